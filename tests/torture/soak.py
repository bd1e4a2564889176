"""A soak: a trainer is killed again and again, and must end to the last bit as if nothing had happened.

`python -m tests.torture.soak --minutes 10 --seed 1`. The time between two blows is drawn from an exponential
distribution with a mean of `--mtbf` seconds, beginning when the trainer is started: some come before its first step.
Of ten blows, on average,

* 5.5 are SIGKILL,
* 1.5 are SIGTERM, upon which the trainer saves once more and ends,
* 1 is SIGSTOP, and SIGCONT within a second: nothing ends,
* 2 are SIGKILL, and while no trainer lives a bit is flipped in a chunk of the newest checkpoint, if it is not the only
  one.

What a kill costs: a checkpoint is of the state at its snapshot, and counts from its commit, which is `w` seconds later.
With `T` seconds between snapshots a kill finds the newest between `w` and `T + w` old, each age as likely: on average
T/2 + w is lost. With 25 steps of 7 ms (T = 175 ms) and w = 115 ms that is 203 ms or 29 steps. A flipped bit costs about
one interval more.

The exit code is 0 if all held that is told of as a fault otherwise, else 1.
"""

import argparse
import contextlib
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ckpt_jax as ck
from ckpt_jax._zarr import CRC
from tests.forked import Child
from tests.torture.damage import chunks_in_files
from tests.torture.soak_account import Facts, account, steps_of, table
from tests.torture.soak_trainer import Task
from tests.trees import differences

BLOWS = {"SIGKILL": 55, "SIGTERM": 15, "SIGSTOP": 10, "a flipped bit": 20}
ROOM = 100  # So many steps the last trainer has, which nobody kills.
PATIENCE = 120  # Seconds for what ends by itself.
RUN = "import json, sys\nfrom tests.torture.soak_trainer import Task, train\ntrain(Task(*json.loads(sys.argv[1])))"


class Soak:
    """A root, the trainers that came and went, and what they left."""

    def __init__(self, place: Path, seed: int, mtbf: float, forget: str):
        self.place, self.root, self.forget, self.mtbf = place, place / "disturbed", forget, mtbf
        self.random = random.Random(seed)
        self.facts = Facts()
        self.trainers: list[Path] = []  # Their notes.
        self.flipped: dict[int, int] = {}  # Steps that no resume has told of since, and how many events there were.
        self.ever_flipped = set[int]()
        self.good: list[int] = []

    def run(self, minutes: float) -> Facts:
        started = time.monotonic()
        over = started + 60 * minutes
        # Until each thing that is to be seen has been, however slow the machine is.
        while not self.facts.faults and (time.monotonic() < over or not self.facts.blows["a flipped bit"]):
            self._live_and_die(over)
        last = max([ROOM, *(step + ROOM for notes in self.trainers for step, *_ in steps_of(notes))])
        self._expect_end(self._start(self.root, last), 0)  # Whom nobody strikes.
        self.facts.seconds, self.facts.steps = time.monotonic() - started, last
        if not self.facts.faults:
            undisturbed = self._start(self.place / "undisturbed", last)
            self._expect_end(undisturbed, 0, patience=PATIENCE + 2 * self.facts.seconds)  # It has as much to do.
        self._look_around()
        if not self.facts.faults:
            self._compare(last)
            account(self.facts, self.trainers, self._events())
        return self.facts

    # --- one trainer --------------------------------------------------------------------------------------------------

    def _start(self, root: Path, steps: int | None) -> Child:
        self.trainers.append(self.place / f"trainer_{len(self.trainers)}")
        self.trainers[-1].mkdir()
        return Child(RUN, json.dumps(Task(str(root), str(self.trainers[-1]), steps, self.forget)))

    def _live_and_die(self, over: float) -> None:
        trainer, verified = self._start(self.root, None), False
        while True:
            now, strikes = time.monotonic(), time.monotonic() + self.random.expovariate(1 / self.mtbf)
            strikes = min(strikes, over) if now < over else strikes
            (blow,) = self.random.choices(list(BLOWS), list(BLOWS.values()))
            while time.monotonic() < strikes and trainer.poll() is None:
                if not verified and steps_of(self.trainers[-1]):
                    verified = self._verify(ck.latest(self.root))
                time.sleep(0.005)
            if (code := trainer.poll()) is not None:
                self._fault(f"a trainer ended by itself with exit code {code}: {trainer.communicate()[0][-2000:]}")
                return
            if blow != "SIGSTOP" or time.monotonic() >= over:
                break
            self.facts.blows[blow] += 1
            trainer.send_signal(signal.SIGSTOP)
            time.sleep(self.random.random())
            trainer.send_signal(signal.SIGCONT)
        if blow == "SIGTERM":
            trainer.send_signal(signal.SIGTERM)
            self._expect_end(trainer, 0, -signal.SIGTERM)  # Before there is a Saver it ends whoever gets it.
            self.facts.preempted += trainer.returncode == 0
        else:
            trainer.kill()
            self._expect_end(trainer, -signal.SIGKILL)
        self._look_around()
        flips = blow == "a flipped bit"
        blow = "SIGKILL" if blow in ("SIGSTOP", "a flipped bit") else blow
        if flips or (time.monotonic() >= over and not self.facts.blows["a flipped bit"]):
            blow = "a flipped bit" if self._flip() else blow
        self.facts.blows[blow] += 1
        (self.trainers[-1] / "blow").write_text(blow)

    def _expect_end(self, trainer: Child, *codes: int, patience: float = PATIENCE) -> None:
        out = trainer.communicate(timeout=patience)[0]
        if trainer.returncode not in codes:
            self._fault(f"a trainer ended with exit code {trainer.returncode}, expected one of {codes}: {out[-2000:]}")

    def _fault(self, text: str) -> None:
        self.facts.faults.append(text)

    # --- between two --------------------------------------------------------------------------------------------------

    def _look_around(self) -> None:
        """All that is listed as good is good, but for what was flipped and nobody has read since."""
        events = self._events()
        for step, at in list(self.flipped.items()):
            since = [(event["kind"], event.get("step")) for event in events[at:]]
            if ("fell back", step) in since:
                self.facts.fallbacks += 1
                del self.flipped[step]
            elif any(kind == "resumed" for kind, _ in since):
                self._fault(f"a resume did not fall back from step {step}, in which a bit was flipped")
        if odd := {event["step"] for event in events if event["kind"] == "fell back"} - self.ever_flipped:
            self._fault(f"a resume fell back from what is not damaged: {sorted(odd)}")
        self.good = [step for step in ck.steps(self.root) if step not in self.flipped]
        for step in self.good:
            self._verify(f"{self.root}/{step}")

    def _verify(self, path: str | None) -> bool:
        """Whether it could be read to its end; a trainer that lives may delete it meanwhile."""
        try:
            report = ck.verify(path) if path else None
        except ck.NotFound:
            return False
        if report is not None:
            self.facts.verified += report.bytes
            if not report.ok:
                self._fault(str(report))
        return report is not None

    def _flip(self) -> bool:
        """A bit in a chunk of the newest checkpoint, if there is another to fall back to."""
        if len(self.good) < 2 or self.good[-1] != max(ck.steps(self.root)):
            return False
        step = self.good[-1]
        chunks = chunks_in_files(self.root / str(step))
        place = chunks[self.random.choice([key for key in chunks if key.startswith("params")])]
        data = bytearray(place.path.read_bytes())
        data[place.offset + self.random.randrange(place.length - CRC)] ^= 1 << self.random.randrange(8)
        place.path.write_bytes(data)
        self.flipped[step] = len(self._events())
        self.ever_flipped.add(step)
        return True

    def _events(self) -> list[dict[str, Any]]:
        path, found = self.root / "events.jsonl", []
        for line in path.read_text().splitlines() if path.exists() else ():
            with contextlib.suppress(ValueError):  # Torn by a kill, where it lies across the end of a page.
                found.append(json.loads(line))
        return found

    # --- what it came to ----------------------------------------------------------------------------------------------

    def _compare(self, last: int) -> None:
        """Every step that any trainer took, the state in memory at the end, and the last checkpoints: bit by bit."""
        whole = {step: rest for step, *rest in steps_of(self.trainers[-1])}
        for notes in self.trainers[:-1]:
            odd = [step for step, *rest in steps_of(notes) if whole.get(step) != rest]
            if odd:
                what = "samples" if any(s == odd[0] and r[0] != whole[s][0] for s, *r in steps_of(notes)) else "loss"
                self._fault(f"{notes.name}: of {len(odd)} steps the first that is another one is {odd[0]} (its {what})")
        ours, theirs = (json.loads((notes / "end").read_text()) for notes in self.trainers[-2:])
        odd = [name for name in theirs if ours.get(name) != theirs[name]]
        if odd:
            self._fault(f"the state at the end is not that of the undisturbed run: {', '.join(odd)}")
        a, b = (ck.restore(self.place / root / str(last)) for root in ("disturbed", "undisturbed"))
        if odd := differences(a, b):
            self._fault(f"the last checkpoint is not that of the undisturbed run: {'; '.join(odd)[:500]}")
        names = {"LATEST", "events.jsonl", *map(str, ck.steps(self.root)), *map(str, ck.steps(self.root, bad=True))}
        if litter := {path.name for path in self.root.iterdir()} - names:
            self._fault(f"litter: {sorted(litter)}")


def soak(minutes: float, seed: int, *, mtbf: float = 4.0, forget: str = "", place: Path | None = None) -> Facts:
    """Tortures a run for so many minutes, lets it end, and compares it with one that nobody disturbed."""
    folder = Path(tempfile.mkdtemp(prefix="soak_", dir=place))
    try:
        return Soak(folder, seed, mtbf, forget).run(minutes)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.torture.soak", description="Kills a trainer again and again."
    )
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mtbf", type=float, default=4.0, help="seconds between two blows, on average")
    parser.add_argument(
        "--forget", default="", choices=["", "key", "position"], help="what a broken trainer leaves out"
    )
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    facts = soak(asked.minutes, asked.seed, mtbf=asked.mtbf, forget=asked.forget)
    print(json.dumps(vars(facts), indent=2) if asked.json else table(facts))
    return 1 if facts.faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
