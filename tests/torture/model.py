"""A root as a dict of what must be there, and every operation on it as the list of what may be there on the way.

Whatever ends an operation, the root is as one of the worlds of its course says; if nothing does, as the last one says.
Nothing here looks at a disk, nor at the library but for its kinds of errors.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import ckpt_jax as ck

# What is wrong with a step: nothing; bytes that only others read; bytes of a value; a file's size; the manifest; no
# manifest at all.
Ailment = Literal["", "beside", "value", "size", "manifest", "lost"]


@dataclass(frozen=True, slots=True)
class Step:
    """A checkpoint: which value it must give back, and what was done to it.

    Attributes:
        hidden: it is under another name for the moment, as a kill between the two renames of a replacement leaves it
            where two folders cannot be exchanged. The next save, prune or resume puts it back.
    """

    value: int
    ailment: Ailment = ""
    marked: bool = False
    hidden: bool = False
    milestone: bool = False

    @property
    def has_manifest(self) -> bool:
        return self.ailment not in ("manifest", "lost") and not self.hidden

    @property
    def gives_its_value(self) -> bool:
        return self.ailment in ("", "beside")


@dataclass(frozen=True, slots=True)
class World:
    """What is in a root; `aside` is what rollbacks put under another name."""

    local: bool
    steps: Mapping[int, Step] = field(default_factory=dict)
    aside: tuple[tuple[int, Step], ...] = ()

    def put(self, step: int, found: Step | None) -> "World":
        steps = {**self.steps, step: found} if found else {s: f for s, f in self.steps.items() if s != step}
        return replace(self, steps=steps)

    def change(self, step: int, **changes: object) -> "World":
        return self.put(step, replace(self.steps[step], **changes))  # pyright: ignore[reportArgumentType]

    def those(self, which: Callable[[Step], bool]) -> list[int]:
        return sorted(step for step, found in self.steps.items() if which(found))

    @property
    def listed(self) -> list[int]:
        """What `steps` tells."""
        return self.those(lambda found: found.has_manifest and not found.marked)

    @property
    def good(self) -> list[int]:
        """What `latest` and `prune` go by: they look at no file's contents."""
        return [step for step in self.listed if self.steps[step].ailment != "size"]


@dataclass(frozen=True, slots=True)
class Course:
    """The worlds that an operation goes through, and the error that it ends with, or the step that it answers.

    Attributes:
        refused: of a resume: the steps that it passed over and could not mark.
    """

    worlds: tuple[World, ...]
    error: type[Exception] | None = None
    answer: int | None = None
    refused: frozenset[int] = frozenset()

    @property
    def last(self) -> World:
        return self.worlds[-1]

    def then(self, following: "Course") -> "Course":
        return replace(following, worlds=(*self.worlds, *following.worlds))


def shown(world: World, steps: Iterable[int] | None = None) -> World:
    """What was hidden is put back."""
    for step in world.those(lambda found: found.hidden) if steps is None else steps:
        if step in world.steps:
            world = world.change(step, hidden=False)
    return world


def saved(
    world: World, step: int, new: Step, *, overwrite: bool = False, healthy: bool = True, exchange: bool = True
) -> Course:
    """A save: nothing changes but at its step, and there all at once."""
    old = world.steps.get(step)
    in_the_way = old is not None and not old.hidden and (world.local or old.ailment != "lost" or old.marked)
    if old is not None and in_the_way and (old.ailment == "lost" or not overwrite):
        return Course((world,), ck.Exists)  # A folder without a manifest is not ours to delete.
    course = [world, shown(world, [step])]
    if not healthy:
        return Course(tuple(course), ck.Unhealthy)
    if old is not None and old.hidden and not overwrite:
        return Course(tuple(course), ck.Exists)
    if old is not None and not exchange:
        course.append(course[-1].change(step, hidden=True))
    return Course((*course, world.put(step, new)))


def saved_by_a_run(world: World, step: int, new: Step, refused: Iterable[int] = (), **how: bool) -> Course:
    """A Saver replaces what is marked, and puts aside what is no checkpoint, if that was refused or marked."""
    old = world.steps.get(step)
    if old is not None and old.ailment == "lost" and world.local and (old.marked or step in refused):
        if not how.get("healthy", True):
            return Course((world,), ck.Unhealthy)
        return Course((world, world.put(step, None), world.put(step, new)))
    return saved(world, step, new, overwrite=old is not None and old.marked and not old.hidden, **how)


def pruned(world: World, keep: ck.Keep, also: Iterable[int] = ()) -> Course:
    """The oldest goes first, and each at once."""
    course = [world, shown(world)]
    found = course[-1].good
    stay = {*also, *keep.milestones, *found[-max(1, keep.last) :]}
    stay |= {step for step in found if course[-1].steps[step].milestone or (keep.every and step % keep.every == 0)}
    go = [step for step in found if step not in stay]
    if go and len(found) - len(go) == 1 and course[-1].steps[found[-1]].ailment:
        return Course(tuple(course), ck.Corrupt)  # All would hang on one that is damaged.
    for step in go:
        course.append(course[-1].put(step, None))
    return Course(tuple(course))


def rolled_back(world: World, step: int) -> Course:
    """The newest goes aside first: whatever ends it, what is left is a shorter run."""
    course = [world, shown(world)]
    found = course[-1].steps.get(step)
    if found is None or found.ailment == "lost":
        return Course(tuple(course), ck.NotFound)
    if found.ailment in ("manifest", "size") or found.marked:
        return Course(tuple(course), ck.Corrupt)
    for later in reversed([other for other in course[-1].listed if other > step]):
        now = course[-1]
        if world.local:
            moved = ((later, now.steps[later]), *now.aside)
            course.append(replace(now.put(later, None), aside=moved))
        else:
            course.append(now.change(later, marked=True))
    return Course(tuple(course))


def resumed(world: World) -> Course:
    """The newest that gives its value; those above it, which do not, are marked on the way."""
    course = [world, shown(world)]
    passed, refused = False, set[int]()
    for step in reversed(course[-1].those(lambda found: True)):
        now = course[-1].steps[step]
        if now.ailment == "lost" and not now.marked and not world.local:
            continue  # In a bucket a dead attempt looks like this.
        if now.gives_its_value and not now.marked:
            return Course(tuple(course), answer=step, refused=frozenset(refused))
        passed = True
        if now.ailment != "lost" and not now.marked:
            course.append(course[-1].change(step, marked=True))
        elif not now.marked:
            refused.add(step)
    return Course(tuple(course), ck.Corrupt if passed else None)
