"""Bytes of any kind made into damage to a checkpoint, so that a fuzzer that changes bytes gets far into the readers."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import crc32c
import msgspec

from ckpt_jax import _ocdbt

from . import nodes
from .hostile import DATA, KEYS, MANIFEST, TREE, Damage, Make, World, accounted, sealed
from .nodes import Below, Entry

NUMBERS = (0, 1, 2, 3, 7, 31, 32, 33, 127, 128, 255, 256, 300, 2400, 2404, 2**16, 2**20, 2**26, 2**26 + 1, 2**31 - 1)
NUMBERS += (2**31, 2**32, 2**40, 2**53, 2**59, 2**60, 2**62, 2**63 - 1, 2**63, 2**64 - 5, 2**64 - 1, 10**30)
WORDS = ("", "*", ".", "..", "a", "b", "a.b", "big", "big/c/0", "key", "list", "x", "$int", "$tuple", "$dict", "$array")
WORDS += (
    "$float",
    "$str",
    "$bytes",
    "$complex",
    "$scalar",
    "kind",
    "children",
    "keys",
    "dict",
    "tuple",
    "none",
    "named",
)
WORDS += ("unnamed", "array", "scalar", "live", "float32", "float64", "int4", "bfloat16", "uint32", "O", "S9", "f8,f8")
WORDS += (
    "int",
    "float",
    "str",
    "bytes",
    "complex",
    "processes",
    "global",
    "0" * 32,
    "0x10",
    "AAAA",
    "\0",
    "é",
    "\ud800",
)
PATHS = ("d/tree", "manifest.ocdbt", "ocdbt.process_0/d/data", "..", "../MANIFEST.json", "../../50/state/d/tree")
PATHS += (
    "../../../outside/state/d/tree",
    "/etc/passwd",
    "@/state/d/tree",
    "//d/tree",
    "d//tree",
    "./d/tree",
    "d/../d/tree",
)
PATHS += ("state", "", "~/x", "d", "d/tree/", "d/tree\0", "x" * 300, "y/" * 200, "../" * 20 + "etc/passwd", "\ud800")
GENUINE = (MANIFEST, KEYS, TREE, DATA, "state/_METADATA", "state/_sharding", "state/array_metadatas/process_0")
GENUINE += ("state/_strings.json", "_CHECKPOINT_METADATA", "commit_success.txt", "orbax.checkpoint", "BAD.json")
FOLDERS = ("state", "state/d", "state/ocdbt.process_0", "state/ocdbt.process_0/d", "state/array_metadatas")


class Dice:
    """Choices, each made by the next bytes; once there are none left, always the first."""

    def __init__(self, data: bytes):
        self.data, self.at = data, 0

    def __bool__(self) -> bool:
        return self.at < len(self.data)

    def below(self, count: int) -> int:
        """A number from 0 to `count` - 1."""
        size = 1 if count <= 256 else 2
        return int.from_bytes(self.take(size)) % max(1, count)

    def take(self, count: int) -> bytes:
        self.at += count
        return self.data[self.at - count : self.at]

    def one(self, things: Any) -> Any:
        return things[self.below(len(things))]

    def number(self) -> int:
        return self.one(NUMBERS)

    def text(self, world: World) -> str:
        """A word, a path (of which `@` stands for the way to what is outside), or any letters."""
        match self.below(3):
            case 0:
                return self.one(WORDS)
            case 1:
                return self.one(PATHS).replace("@", str(world.outside))
            case _:
                return self.take(self.below(24)).decode("latin-1")


def damage_of(world: World, data: bytes) -> dict[str, bytes | Make | None]:
    """The damage that an input stands for: its first byte says what holds again afterwards, then come changes."""
    dice = Dice(data)
    holds = dice.below(4)
    files: dict[str, bytes | Make | None] = {}
    for _ in range(6):
        if dice:
            dice.one(CHANGES)(world, dice, files)
    if holds & 2:  # The manifest tells of the files as they are now.
        document = _json(_now(world, files, MANIFEST))
        if isinstance(document, dict) and isinstance(document.get("files"), dict):
            files[MANIFEST] = _dumped(accounted(document, files))
    manifest = files.get(MANIFEST)
    if holds & 1 and isinstance(manifest, bytes):
        files[MANIFEST] = sealed(manifest)
    return files


def kind_of(damage: Damage) -> str:
    """Of what kind a damage is, for the table."""
    if any(callable(change) for change in damage.values()):
        return "hostile links, pipes and folders"
    if {KEYS, TREE} & damage.keys():
        return "hostile OCDBT node"
    if damage.keys() - {MANIFEST, DATA}:
        return "hostile sidecar"
    return "hostile data file" if DATA in damage else "hostile manifest"


def _now(world: World, files: dict[str, Any], path: str) -> bytes:
    found = files.get(path)
    return found if isinstance(found, bytes) else world.whole.get(path, b"{}")


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _dumped(document: Any) -> bytes:
    try:
        return msgspec.json.encode(document)
    except (ValueError, OverflowError, RecursionError, msgspec.MsgspecError):  # Lone surrogates; ints beyond 64 bits.
        return json.dumps(document).encode()


# --- changes ----------------------------------------------------------------------------------------------------------


def _splice(world: World, dice: Dice, files: dict[str, Any]) -> None:
    """Other bytes at a place in any file."""
    path = dice.one(GENUINE)
    files[path] = _spliced(dice, _now(world, files, path))


def _spliced(dice: Dice, data: bytes) -> bytes:
    at = dice.below(len(data) + 1)
    gone = dice.below(64)
    match dice.below(3):
        case 0:
            new = dice.take(dice.below(24))
        case 1:
            new = nodes.varints([dice.number()])
        case _:
            new = dice.one(_TOKENS)
    return data[:at] + new + data[at + gone :]


_TOKENS = tuple(b'{ } [ ] , : " "" null true -1 1e999 NaN 1.5 9999999999999999999999 \\ud800 \xff {} []'.split(b" "))


def _node(world: World, dice: Dice, files: dict[str, Any]) -> None:
    """Other bytes in OCDBT's manifest or node, whose length and crc32c hold again."""
    path = (KEYS, TREE)[dice.below(2)]
    data = _spliced(dice, _now(world, files, path)[12:-4])
    magic = _ocdbt.MANIFEST_MAGIC if path == KEYS else _ocdbt.NODE_MAGIC
    framed = magic + (len(data) + 16).to_bytes(8, "little") + data
    files[path] = framed + crc32c.crc32c(framed).to_bytes(4, "little")


def _whole(world: World, dice: Dice, files: dict[str, Any]) -> None:
    """A file of bytes from the input alone."""
    files[dice.one(GENUINE)] = dice.take(dice.below(2**16))


def _value(world: World, dice: Dice, files: dict[str, Any]) -> None:
    """Another value somewhere in JSON: the manifest's mostly."""
    path = dice.one((MANIFEST, MANIFEST, MANIFEST, *(p for p in GENUINE[4:9])))
    document = _json(_now(world, files, path))
    places = _places(document)
    if not places:
        return
    holder, key = dice.one(places)
    match dice.below(4):
        case 0:
            holder[key] = _junk(world, dice, 0)
        case 1:
            del holder[key]
        case 2:
            other, there = dice.one(places)
            holder[key] = json.loads(json.dumps(other[there]))
        case _:
            if isinstance(holder, dict):
                holder[dice.text(world)] = holder.pop(key)
            else:
                holder.insert(key, _junk(world, dice, 0))
    files[path] = _dumped(document)


def _places(document: Any) -> list[tuple[Any, Any]]:
    """Every container and key in a document."""
    found, stack = [], [document]
    while stack:
        holder = stack.pop()
        if isinstance(holder, (dict, list)):
            keys = list(holder) if isinstance(holder, dict) else range(len(holder))
            found += [(holder, key) for key in keys]
            stack += [holder[key] for key in keys]
    return found


def _junk(world: World, dice: Dice, depth: int) -> Any:
    match dice.below(7 if depth < 4 else 5):
        case 0:
            return dice.number()
        case 1:
            return -dice.number()
        case 2:
            return dice.one((None, True, False, 0.5, -0.0, 1e308))
        case 3 | 4:
            return dice.text(world)
        case 5:
            return [_junk(world, dice, depth + 1) for _ in range(dice.below(4))]
        case _:
            return {dice.text(world): _junk(world, dice, depth + 1) for _ in range(dice.below(4))}


def _key_space(world: World, dice: Dice, files: dict[str, Any]) -> None:
    """Another tree of keys: values and nodes elsewhere, of other lengths, below each other."""
    entries = [Entry(key, *msgspec.structs.astuple(value)) for key, value in world.keys.items()]
    for _ in range(dice.below(4)):
        at = dice.below(len(entries))
        entry = entries[at]
        match dice.below(6):
            case 0:
                entries[at] = entry._replace(file=dice.text(world), data=None)
            case 1:
                entries[at] = entry._replace(offset=dice.number(), data=None)
            case 2:
                entries[at] = entry._replace(length=dice.number(), data=None)
            case 3:
                entries[at] = entry._replace(data=dice.take(dice.below(64)))
            case 4:
                entries[at] = entry._replace(key=dice.text(world).encode("utf-8", "surrogatepass"))
            case _:
                entries.append(dice.one(entries))
    data = nodes.leaf(entries)
    here = Below(entries[0].key, 0, "d/tree", 0, len(data))
    height = dice.below(4)
    for level in range(1, height + 1):
        below = [here]
        for _ in range(dice.below(4)):
            below.append(Below(b"x" * dice.below(3), *_elsewhere(world, dice, here)))
        node = nodes.interior(level, below)
        here = Below(here.key, 0, "d/tree", len(data), len(node))
        data += node
    if dice.below(4) == 3:
        here = Below(b"", *_elsewhere(world, dice, here))
    files[TREE], files[KEYS] = data, nodes.manifest(here, dice.below(256) if dice.below(4) == 3 else height)


def _elsewhere(world: World, dice: Dice, near: Below) -> tuple[int, str, int, int]:
    """A prefix' length, and a node's place: here, or somewhere quite different."""
    common = dice.number() if dice.below(4) == 3 else 0
    file = dice.text(world) if dice.below(2) else near.file
    offset = dice.number() if dice.below(2) else near.offset
    return common, file, offset, dice.number() if dice.below(2) else near.length


def _odd(world: World, dice: Dice, files: dict[str, Any]) -> None:
    """Something in place of a file or folder that is none."""
    path = dice.one((*GENUINE, *FOLDERS))
    target = (str(world.outside / path), os.path.relpath(world.outside / path, (world.step / path).parent))
    makers: tuple[Callable[[Path], Any] | None, ...] = (
        None,
        lambda place: place.symlink_to(target[0]),
        lambda place: place.symlink_to(target[1]),
        lambda place: place.symlink_to(place.name),
        lambda place: place.symlink_to("/dev/zero"),
        os.mkfifo,
        Path.mkdir,
    )
    files[path] = dice.one(makers)


CHANGES = (_value, _node, _key_space, _splice, _odd, _whole)
