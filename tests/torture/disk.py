"""A disk as it may be after the power fails: of what was not made durable, any part is missing.

What POSIX promises, and no more: the bytes of a file are on the disk once the file was synced, an entry of a folder
once the folder was, both in any order, each entry at once. What real file systems add to that, nobody is to rely on.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.torture.syscalls import Operation

Image = dict[str, "Image | bytes"]  # A folder's contents, by name.


@dataclass(eq=False)
class File:
    """A file: the bytes that are durable, and the writes that are not yet, each with its number."""

    durable: bytes = b""
    pending: list[tuple[int, int, bytes | None]] = field(default_factory=list)  # None: it is cut off there.

    def contents(self, kept: Callable[[int], bool]) -> bytes:
        data = bytearray(self.durable)
        for number, at, new in self.pending:
            if not kept(number):
                continue
            if new is None:
                del data[at:]
            data.extend(bytes(max(0, at + len(new or b"") - len(data))))
            if new is not None:
                data[at : at + len(new)] = new
        return bytes(data)

    def sync(self) -> None:
        self.durable, self.pending = self.contents(lambda _: True), []


@dataclass(eq=False)
class Folder:
    """A folder: the entries that are durable, those that it has now, and the changes between, each with its number."""

    durable: dict[str, File | Folder] = field(default_factory=dict)
    now: dict[str, File | Folder] = field(default_factory=dict)
    pending: list[tuple[int, dict[str, File | Folder | None]]] = field(default_factory=list)

    def change(self, number: int, entries: dict[str, File | Folder | None]) -> None:
        self.pending.append((number, entries))
        self.now = _changed(self.now, entries)

    def contents(self, kept: Callable[[int], bool]) -> Image:
        found = self.durable
        for number, entries in self.pending:
            if kept(number):
                found = _changed(found, entries)
        return {name: node.contents(kept) for name, node in found.items()}

    def sync(self) -> None:
        self.durable, self.pending = dict(self.now), []


def _changed(old: dict[str, File | Folder], entries: dict[str, File | Folder | None]) -> dict[str, File | Folder]:
    both = old | entries
    return {name: node for name, node in both.items() if node is not None}


class Disk:
    """Takes one operation after the other; tells what may be found after a crash now."""

    def __init__(self) -> None:
        self.root = Folder()
        self.number = 0
        self._nodes: list[File | Folder] = [self.root]

    def apply(self, operation: Operation) -> None:
        """Raises KeyError or AssertionError for what no file system would let happen."""
        self.number += 1
        path, kind = operation.path, operation.kind
        if kind == "fsync":
            self._at(path).sync()
            return
        if kind in ("write", "truncate"):
            file = self._file(path)
            file.pending.append((self.number, operation.at, operation.data if kind == "write" else None))
            return
        folder, name = self._above(path)
        if kind == "create" and name in folder.now:
            self._file(path).pending.append((self.number, 0, None))
        elif kind in ("create", "mkdir"):
            assert name not in folder.now
            node = File() if kind == "create" else Folder()
            self._nodes.append(node)
            folder.change(self.number, {name: node})
        elif kind in ("unlink", "rmdir"):
            assert isinstance(folder.now[name], File if kind == "unlink" else Folder)
            folder.change(self.number, {name: None})
        else:
            same, to = self._above(operation.to)
            assert same is folder, "a rename from one folder to another is not known here"
            swapped = folder.now[to] if kind == "exchange" else None
            folder.change(self.number, {name: swapped, to: folder.now[name]})

    def _at(self, path: str) -> File | Folder:
        node: File | Folder = self.root
        for name in path.split("/") if path != "." else ():
            assert isinstance(node, Folder)
            node = node.now[name]
        return node

    def _file(self, path: str) -> File:
        node = self._at(path)
        assert isinstance(node, File)
        return node

    def _above(self, path: str) -> tuple[Folder, str]:
        above = self._at(posixpath.dirname(path) or ".")
        assert isinstance(above, Folder)
        return above, posixpath.basename(path)

    # --- after a crash ---

    def pending(self) -> list[int]:
        """The numbers of the operations whose effects may be missing."""
        self._nodes = [node for node in self._nodes if node.pending or isinstance(node, Folder)]
        return sorted(change[0] for node in self._nodes for change in node.pending)

    def image(self, kept: Callable[[int], bool]) -> Image:
        """What is found if of the pending effects just these made it."""
        return self.root.contents(kept)

    def images(self, *, pairs: bool) -> Iterator[Image]:
        """After a crash now: none made it, all, all up to one, one alone, all but one; or but two."""
        pending = self.pending()
        yield self.image(lambda _: False)
        yield self.image(lambda _: True)
        for i, one in enumerate(pending):
            yield self.image(lambda number, one=one: number <= one)
            yield self.image(lambda number, one=one: number == one)
            yield self.image(lambda number, one=one: number != one)
            for two in pending[:i] if pairs else ():
                yield self.image(lambda number, one=one, two=two: number in (one, two))
                yield self.image(lambda number, one=one, two=two: number not in (one, two))


def put(image: Image, at: Path) -> None:
    """Makes real files of an image."""
    at.mkdir()
    for name, found in image.items():
        if isinstance(found, bytes):
            (at / name).write_bytes(found)
        else:
            put(found, at / name)


def replay(operations: Iterable[Operation]) -> Disk:
    """The disk after all of these."""
    disk = Disk()
    for operation in operations:
        if operation.kind != "say":
            disk.apply(operation)
    return disk
