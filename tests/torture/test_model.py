"""A root is as the model says: saved to, pruned, rolled back, damaged, killed midway and resumed in any order.

Promises R-1 to R-5 and R-8.
"""

import collections
import contextlib
import json
import signal
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import ckpt_jax as ck
from ckpt_jax import _commit, _retain, _storage
from tests.conftest import Count
from tests.forked import Child
from tests.torture.model import Course, Step, World, pruned, resumed, rolled_back, saved, saved_by_a_run
from tests.torture.model_root import DAMAGES, DYING, Draws, Eye, damage, expected, tree
from tests.trees import same

STEPS = st.integers(0, 5)  # Few, so that they meet.
WHICH = st.integers(0, 7)  # Of those that are there; 7 is none of them.
VALUES = st.integers(0, 2**20)
NOTHING = 2**21  # The value of a state that is to be filled.
LIES = (b"", b"{", b'{"step": 4}\n', b'{"step": 99999}\n', b"\xff", b"[" * 2000)
Keeps = dict[str, Any]
KEEPS = st.fixed_dictionaries(
    {"last": st.integers(0, 4), "every": st.none() | st.integers(1, 3), "milestones": st.lists(STEPS, max_size=1)}
)


class Machine(RuleBasedStateMachine):
    """One root, and the world that it must be."""

    def __init__(self, root: str, tally: Counter[tuple[str, str]]):
        super().__init__()
        self.root, self.tally = root, tally
        self.place = _storage.folder(root)
        self.eye = Eye(self.place)
        self.world = World(local=self.place.local)
        self.saver: ck.Saver | None = None
        self.events: list[Any] = []
        self.keep = ck.Keep()  # The open Saver's; and what it committed, as far as it spares that.
        self.newest = collections.deque[int]()
        self.refused = set[int]()  # What it passed over, and is no checkpoint: it puts that aside.
        self.litter, self.swept = False, set[int]()  # Whether a kill may have left some, and where there is none again.

    @initialize(steps=st.lists(STEPS, max_size=4, unique=True))
    def fill(self, steps: list[int]) -> None:
        for step in steps:
            ck.save(f"{self.root}/{step}", tree(step))
            self.world = self.world.put(step, Step(step))

    # --- what is done to a root ---------------------------------------------------------------------------------------

    @rule(step=STEPS, value=VALUES)
    def save(self, step: int, value: int) -> None:
        course = saved(self.world, step, Step(value))
        self.tally["save", self.does(course, lambda: ck.save(f"{self.root}/{step}", tree(value)))] += 1
        self.swept |= {step} if not course.error else set()

    @rule(which=WHICH, value=VALUES)
    def overwrite(self, which: int, value: int) -> None:
        step = self.one(which)
        old = self.world.steps.get(step)
        course = saved(self.world, step, Step(value), overwrite=True)
        outcome = self.does(course, lambda: ck.save(f"{self.root}/{step}", tree(value), overwrite=True))
        of = ", of a damaged one" if old and old.ailment else "" if old else ", of nothing"
        self.tally["overwrite", outcome + of] += 1
        self.swept |= {step} if not course.error else set()

    @precondition(lambda self: self.saver is None)
    @rule(keep=KEEPS)
    def begin(self, keep: Keeps) -> None:
        self.keep = ck.Keep(**keep)
        self.newest = collections.deque(maxlen=max(1, self.keep.last))
        self.refused = set()
        self.saver = ck.Saver(
            self.root, every=ck.Every(steps=1), keep=self.keep, max_failures=999, on_event=self.events.append
        )
        self.tally["a run", "begun"] += 1

    @precondition(lambda self: self.saver is not None)
    @rule()
    def end(self) -> None:
        saver, self.saver = self.saver, None
        assert saver is not None
        with contextlib.suppress(ck.Exists, ck.Unhealthy):  # Of its last save: `train` has seen it.
            saver.close()

    @precondition(lambda self: self.saver is not None)
    @rule(
        saves=st.lists(st.tuples(STEPS, VALUES, st.booleans(), st.integers(0, 5)), min_size=1, max_size=3),
        wait=st.booleans(),
    )
    def train(self, saves: list[tuple[int, int, bool, int]], wait: bool) -> None:
        """Saves behind the loop; what that does to the state meanwhile does not come into them."""
        assert self.saver is not None
        for step, value, milestone, odd in saves:
            state = tree(value)
            state["w"] = jnp.asarray(state["w"] if odd else np.full(9, np.nan))
            taken = self.saver.step(step, state, milestone=milestone)
            state["w"].delete()
            state["few"] += 1
            state["of"].append(0)
            if wait:
                self.saver._idle.wait()
            if taken:
                new = Step(value, milestone=milestone)
                course = saved_by_a_run(self.world, step, new, self.refused, healthy=bool(odd))
                self.refused -= {step} if not course.error else set()
                self.tally["async save", course.error.__name__ if course.error else "done"] += 1
                self.world = self.pruned_after(course, step, self.keep, self.newest).last
                self.litter = self.litter and bool(course.error)
            else:
                self.tally["async save", "skipped"] += 1
        self.saver._idle.wait()

    @staticmethod
    def pruned_after(course: Course, step: int, keep: ck.Keep, newest: collections.deque[int]) -> Course:
        """What a Saver does after each commit: it prunes, and spares what it committed itself."""
        if course.error is not None:
            return course
        newest.append(step)
        return course.then(pruned(course.last, keep, newest))

    @rule(keep=KEEPS, also=st.lists(STEPS, max_size=1))
    def prune(self, keep: Keeps, also: list[int]) -> None:
        course = pruned(self.world, ck.Keep(**keep), also)
        if not course.error and not self.world.those(lambda found: found.hidden):
            go = sorted(self.world.steps.keys() - course.last.steps.keys())
            assert ck.prune(self.root, ck.Keep(**keep), also=also, dry_run=True) == go
        self.tally["prune", self.does(course, lambda: ck.prune(self.root, ck.Keep(**keep), also=also))] += 1
        self.litter = False

    @rule(which=WHICH)
    def roll_back(self, which: int) -> None:
        step = self.one(which)
        course = rolled_back(self.world, step)
        self.tally["rollback", self.does(course, lambda: _retain.rollback(self.root, step))] += 1
        self.litter = False

    @rule()
    def resume(self) -> None:
        """By the open Saver, or a new one."""
        course, before, begun = resumed(self.world), self.world, len(self.events)
        found: list[Any] = []

        def go_on() -> None:
            saver = self.saver or ck.Saver(self.root, on_event=self.events.append)
            try:
                found[:] = saver.resume(tree(NOTHING))
            finally:
                if saver is not self.saver:
                    saver.close()

        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            outcome = self.does(course, go_on)
        if self.saver is not None:
            self.refused = set(course.refused)
        passed = {event.step for event in self.events[begun:] if event.kind == "fell back"}
        if found:
            value = NOTHING if course.answer is None else course.last.steps[course.answer].value
            assert found[1] == (course.answer or 0)
            assert same(found[0], tree(value))
            assert len(warned) == len(passed), "who looks at no events is warned"
        marked = {step for step, now in course.last.steps.items() if now.marked and not before.steps[step].marked}
        assert marked <= passed
        assert not [step for step in passed if before.steps[step].gives_its_value]
        self.tally["resume", "fell back" if passed and outcome == "done" else outcome] += 1
        self.litter = False

    # --- what befalls it ----------------------------------------------------------------------------------------------

    @rule(how=st.sampled_from(DAMAGES), numbers=st.lists(st.integers(0, 2**40), min_size=4, max_size=4))
    def damage_the_newest(self, how: str, numbers: list[int]) -> None:
        self.damage(max(0, len(self.world.steps) - 1), how, numbers)

    @rule(which=WHICH, how=st.sampled_from(DAMAGES), numbers=st.lists(st.integers(0, 2**40), min_size=4, max_size=4))
    def damage(self, which: int, how: str, numbers: list[int]) -> None:
        step, draw = self.one(which), Draws(numbers)
        found = self.world.steps.get(step)
        others = [other for other in self.world.those(lambda found: found.has_manifest) if other != step]
        if found is None or found.hidden or found.ailment or (how == "stale" and not others):
            return
        other = (self.place / str(others[draw(len(others))])).read("MANIFEST.json") if others else None
        ailment = damage(self.place / str(step), found.value, how, draw, other or b"")
        self.world = self.world.change(step, ailment=ailment)
        harm = {"": "nobody reads it", "beside": "the value is right", "lost": "not there"}
        self.tally[f"damage: {how}", harm.get(ailment, "Corrupt")] += 1

    @rule(which=WHICH, lie=st.none() | st.sampled_from(LIES))
    def meddle(self, which: int, lie: bytes | None) -> None:
        """A step is deleted by hand, or LATEST says what is not so."""
        step = self.one(which)
        if lie is not None:
            self.place.make()
            self.place.write("LATEST", lie)
            self.tally["LATEST lies", "nobody believes it"] += 1
        elif step in self.world.steps and not self.world.steps[step].hidden:
            (self.place / str(step)).remove()
            self.world = self.world.put(step, None)
            self.refused -= {step}
            self.tally["deleted by hand", "gone"] += 1

    @precondition(lambda self: not self.place.local)
    @rule(step=STEPS, which=WHICH)
    def leave_torn(self, step: int, which: int) -> None:
        """In a bucket, a dead attempt is what a checkpoint is but for its manifest."""
        whole = self.place / str(self.one(which))
        names = [name for name in whole.files() if name.startswith("state.")]
        if names and step not in self.world.steps:
            for name in names:
                (self.place / str(step)).write(name.replace("state.", "state.0", 1), whole.read(name) or b"")
            self.world = self.world.put(step, Step(0, "lost"))
            self.tally["dead attempt in a bucket", "not there"] += 1

    @precondition(lambda self: self.place.local)
    @rule(
        what=st.sampled_from(["save", "overwrite", "prune", "rollback", "run"]),
        saves=st.lists(st.tuples(STEPS, VALUES), min_size=1, max_size=3),
        which=WHICH,
        keep=KEEPS,
        percent=st.integers(0, 105),
        exchange=st.booleans(),
    )
    def crash(
        self, *, what: str, saves: list[tuple[int, int]], which: int, keep: Keeps, percent: int, exchange: bool
    ) -> None:
        """A process is killed at one of the changes that it makes: it came as far as one of its worlds."""
        exchange = exchange or bool(self.world.those(lambda found: found.hidden))  # One at a time.
        step = saves[0][0] if what in ("save", "run") else self.one(which)
        how: dict[str, Any] = {"step": step, "value": saves[0][1], "keep": keep, "saves": saves}
        match what:
            case "save" | "overwrite":
                new = Step(saves[0][1])
                course = saved(self.world, step, new, overwrite=what == "overwrite", exchange=exchange)
            case "prune":
                course = pruned(self.world, ck.Keep(**keep))
            case "rollback":
                course = rolled_back(self.world, step)
            case _:
                course, newest = resumed(self.world), collections.deque[int](maxlen=max(1, ck.Keep(**keep).last))
                refused = set(course.refused)
                for at, value in saves if course.error is None else ():
                    course = course.then(saved_by_a_run(course.last, at, Step(value), refused, exchange=exchange))
                    refused -= {at} if not course.error else set()
                    course = self.pruned_after(course, at, ck.Keep(**keep), newest)
        # About so many changes are made by a save, and by what each other world of the course takes.
        changes = 34 * {"save": 1, "overwrite": 1, "run": len(saves)}.get(what, 0)
        changes += (3 if what == "rollback" else 18) * (len(course.worlds) - 2)
        child = Child(DYING, json.dumps([what, self.root, changes * percent // 100, exchange, how]))
        printed = child.communicate()[0].strip()
        assert child.returncode == (0 if printed else -signal.SIGKILL), printed
        assert what == "run" or printed in ("", course.error.__name__ if course.error else "done")
        found = self.eye.look()
        may = [course.last] if printed else list(course.worlds)
        fit = [world for world in may if expected(world) == found]
        assert fit, "\n".join([f"{what}, killed at {percent} %: none of", *(str(expected(w)) for w in may), str(found)])
        end = "all done" if fit[-1] == course.last else "not done" if fit[-1] == course.worlds[0] else "half done"
        self.tally[f"SIGKILL in {what}", "came too late" if printed else end] += 1
        self.world = fit[-1]
        if not printed:
            self.litter, self.swept = True, set()

    # --- what holds, whatever happens ---------------------------------------------------------------------------------

    def one(self, which: int) -> int:
        """One of the steps that are there; 6 for none, as a rule."""
        there = sorted(self.world.steps)
        return there[which % len(there)] if there and which < 7 else 6

    def does(self, course: Course, call: Callable[[], Any]) -> str:
        """Calls, and the world is what it must be afterwards; tells the error, if there has to be one."""
        self.world = course.last
        if course.error is None:
            call()
            return "done"
        with pytest.raises(course.error) as caught:
            call()
        assert caught.type is course.error
        return course.error.__name__

    @invariant()
    def is_as_the_model_says(self) -> None:
        assert self.eye.look() == expected(self.world)

    @invariant()
    def has_no_litter(self) -> None:
        """But for what a kill left, until the next save of that step, and the next prune, rollback or resume."""
        hidden = {f"{step}{_commit.TMP}old" for step in self.world.those(lambda found: found.hidden)}
        names = [name for name in self.place.entries() if _commit.TMP in name and name not in hidden]
        assert not [name for name in names if not self.litter or int(name.partition(".")[0]) in self.swept]

    def teardown(self) -> None:
        if self.saver is not None:
            self.end()
        assert self.eye.look(anew=True) == expected(self.world)


@pytest.mark.parametrize(("where", "examples", "many"), [("file", 100, 600), ("memory", 60, 500)])
def test_a_root_is_as_the_model_says(
    *, where: str, examples: int, many: int, tmp_path: Path, full: bool, count: Count
) -> None:
    tally, numbers = Counter[tuple[str, str]](), iter(range(10**9))

    def machine() -> Machine:
        number = next(numbers)
        return Machine(str(tmp_path / f"{number}") if where == "file" else f"memory:/{tmp_path}/{number}", tally)

    chosen = settings(
        max_examples=many if full else examples,
        stateful_step_count=25,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],  # Kills do not strike at the same byte twice: shrinking would search for hours.
        suppress_health_check=[*HealthCheck],
    )
    run_state_machine_as_test(machine, settings=chosen)  # pyright: ignore[reportArgumentType]
    for (fault, outcome), number in tally.items():
        count(f"model, {where}: {fault}", outcome, number)
