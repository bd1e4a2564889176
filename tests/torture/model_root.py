"""A real root for the model: what is saved in it, what can befall it, and what everything that looks at it says."""

import os
from collections import Counter
from typing import Any

import numpy as np

import ckpt_jax as ck
from ckpt_jax import _commit, _storage
from tests.torture.model import Ailment, Step, World
from tests.trees import same

DAMAGES = ("chunk", "bit", "cut", "longer", "gone", "manifest", "stale", "lost")


class Draws:
    """Numbers below others, of some that were drawn before anything was looked at: so the same are drawn again."""

    def __init__(self, numbers: list[int]):
        self._numbers = iter(numbers)

    def __call__(self, below: int) -> int:
        return next(self._numbers) % below


def tree(value: int) -> dict[str, Any]:
    """A state made of a number: a chunk in a data file, one among the keys, and values in the manifest."""
    rng = np.random.default_rng(value)
    return {"w": rng.standard_normal(3000, np.float32), "few": rng.integers(0, 9, 5), "n": 2**70 + value, "of": [value]}


# --- a process that is killed in the middle ---------------------------------------------------------------------------

# It is killed right before one of the changes that it makes to the disk; opening a folder, by which it is made durable,
# counts as one. No JAX is started for NumPy arrays.
DYING = """
import json, os, signal, sys, warnings
import ckpt_jax as ck
from ckpt_jax import _retain, _storage
from tests.torture.model_root import tree

what, root, left, exchange, how = json.loads(sys.argv[1])
def before(name, arguments):
    global left
    writes = name == "open" and arguments[2] & (os.O_DIRECTORY | os.O_WRONLY | os.O_RDWR)
    if writes or name in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "ctypes.dlsym"):
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
if not exchange:
    _storage._exchange = lambda a, b: False  # As where the system has no such call.
warnings.simplefilter("ignore")
sys.addaudithook(before)
try:
    if what in ("save", "overwrite"):
        ck.save(f"{root}/{how['step']}", tree(how["value"]), overwrite=what == "overwrite")
    elif what == "prune":
        ck.prune(root, ck.Keep(**how["keep"]))
    elif what == "rollback":
        _retain.rollback(root, how["step"])
    else:
        with ck.Saver(root, keep=ck.Keep(**how["keep"])) as saver:
            saver.resume(tree(0))
            for step, value in how["saves"]:
                saver.save(step, tree(value))
                saver._idle.wait()
    end = "done"
except ck.CheckpointError as error:
    end = type(error).__name__
left = 10**9
print(end, flush=True)
os._exit(0)
"""


# --- damage -----------------------------------------------------------------------------------------------------------


def damage(place: _storage.Folder, value: int, how: str, draw: Draws, other: bytes) -> Ailment:
    """Does to a checkpoint what a disk or a hand can do; `other` is another step's manifest."""
    files = sorted(ck.open(place.url).manifest.files)  # In a bucket there are others, which only Orbax reads.
    name = files[draw(len(files))]
    match how:
        case "chunk":
            raw = tree(value)["w"].tobytes()
            name = next(name for name in files if raw in (place.read(name) or b""))
            _flip(place, name, (place.read(name) or b"").index(raw) + draw(len(raw)), draw(8))
            return "value"
        case "bit":
            name = name if (size := place.files()[name]) else "MANIFEST.json"
            _flip(place, name, draw(size) if size else 0, draw(8))
            return _ailment(place) if size else "manifest"
        case "cut" | "longer":
            whole = place.read(name) or b""
            place.write(name, whole + b"\0" if how == "longer" or not whole else whole[: draw(len(whole))])
            return "size"
        case "gone":
            place.unlink(name)
            return "size"
        case "manifest":
            # All but the line feed at its end, without which it says the same.
            _flip(place, "MANIFEST.json", draw(len(place.read("MANIFEST.json") or b"") - 1), draw(8))
            return "manifest"
        case "stale":
            place.write("MANIFEST.json", other)
            return "manifest"
    place.unlink("MANIFEST.json")
    return "lost"


def _flip(place: _storage.Folder, name: str, at: int, bit: int) -> None:
    whole = bytearray(place.read(name) or b"")
    whole[at] ^= 1 << bit
    place.write(name, bytes(whole))


def _ailment(place: _storage.Folder) -> Ailment:
    """Of a bit anywhere, also where nobody reads; the invariant sees to it that what comes back is the right value."""
    try:
        ck.restore(place.url)
    except ck.Corrupt:
        return "value"
    return "" if ck.verify(place.url).ok else "beside"


# --- what is seen -----------------------------------------------------------------------------------------------------


class Eye:
    """Looks at a root, and again only at folders in which any file has changed."""

    def __init__(self, place: _storage.Folder):
        self.place = place
        self._seen: dict[str, tuple[Any, Any]] = {}

    def look(self, *, anew: bool = False) -> dict[str, Any]:
        """All that anyone says of the root, as `expected` has it."""
        names = [name for name in self.place.entries() if name.partition(".")[0].isdigit()]
        steps = {int(name): self._at(name, anew=anew) for name in names if name.isdigit()}
        aside = Counter((int(n.partition(".")[0]), self._at(n, anew=anew)) for n in names if ".rolled-back-" in n)
        newest = ck.latest(self.place.url)
        return {
            "steps": ck.steps(self.place.url),
            "marked": ck.steps(self.place.url, bad=True),
            "latest": newest and int(newest.rpartition("/")[2]),
            "values": {step: found for step, found in steps.items() if found is not None},
            "hidden": [
                int(n.partition(".")[0]) for n in names if n.endswith(f"{_commit.TMP}old") and _is_gone(self.place, n)
            ],
            "aside": aside,
        }

    def _at(self, name: str, *, anew: bool) -> Any:
        place = self.place / name
        now = (
            [(p, (s := os.stat(f"{place}/{p}")).st_mtime_ns, s.st_ino, size) for p, size in place.files().items()]
            if place.local
            else None
        )
        before, found = self._seen.get(name, (None, None))
        if anew or now is None or now != before:
            found = _seen_at(place)
            self._seen[name] = now, found
        return found


def _is_gone(root: _storage.Folder, hidden: str) -> bool:
    return not (root / hidden.partition(".")[0]).exists()


def _seen_at(place: _storage.Folder) -> tuple[Any, Any, bool] | None:
    """What one checkpoint gives back, whether it verifies, and whether it is marked; None for an empty folder."""
    value: Any
    verified: Any
    try:
        found = ck.restore(place.url)
        value = found["n"] - 2**70
        same(found, tree(value))  # Bit for bit, or there is a silent wrong value.
    except (ck.Corrupt, ck.NotFound) as error:
        value = type(error).__name__
    try:
        verified = ck.verify(place.url).ok
    except ck.NotFound:
        verified = "NotFound"
    if value == verified == "NotFound" and not place.files():
        return None
    return value, verified, _commit.is_bad(place)


def expected(world: World) -> dict[str, Any]:
    """What is seen of such a world."""
    visible = {step: found for step, found in world.steps.items() if not found.hidden}
    return {
        "steps": world.listed,
        "marked": world.those(lambda found: found.has_manifest and found.marked),
        "latest": max(world.good, default=None),
        "values": {step: _told(found) for step, found in visible.items()},
        "hidden": world.those(lambda found: found.hidden),
        "aside": Counter((step, _told(found)) for step, found in world.aside),
    }


def _told(found: Step) -> tuple[Any, Any, bool]:
    if found.ailment == "lost":
        return "NotFound", "NotFound", found.marked
    return found.value if found.gives_its_value else "Corrupt", found.ailment == "", found.marked
