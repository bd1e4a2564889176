"""A run in several real processes: parts, declines, deaths, timeouts, and any number of them resumes."""

import re
import signal
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import ckpt_jax as ck
from tests.forked import Child
from tests.test_processes import HEAD, free_port

RUN = (
    HEAD
    + """
import select, signal, time
from ckpt_jax import _writing, _commit, _save, saver as saver_module
def print_event(event):
    print(f"{index}: {event}", flush=True)
def state_at(step):
    return {"w": place(W + step, P("data", "model")), "all": place(W[:64] + step, P()), "step": step}
def abstract():
    return {"w": place(W * 0, P("data", "model")), "all": place(W[:64] * 0, P()), "step": -1}
def check(state, step):
    assert state["step"] == step, state["step"]
    for name, whole in (("w", W + step), ("all", W[:64] + step)):
        for shard in state[name].addressable_shards:
            assert (np.asarray(shard.data) == whole[shard.index]).all(), name
def barrier(name):
    from jax._src import distributed
    distributed.global_state.client.wait_at_barrier(name, 60000)
def agree(name, here):
    # What process 0 says, in all processes.
    from jax._src import distributed
    client = distributed.global_state.client
    if index == 0: client.key_value_set(f"agree/{name}", str(here))
    return client.blocking_key_value_get(f"agree/{name}", 60000) == "True"
def leave(*lost):
    # Process 0 goes last: JAX ends all others when it goes, also while they are telling of it.
    from jax._src import distributed
    client = distributed.global_state.client
    others = [] if 0 in lost else [i for i in range(1, count) if i not in lost]
    if index in others: client.key_value_set(f"pid/{index}", str(os.getpid()))
    for other in others if index == 0 else []:
        pid = int(client.blocking_key_value_get(f"pid/{other}", 60000))
        try: select.select([os.pidfd_open(pid)], [], [], 60)
        except ProcessLookupError: pass
    os._exit(0)  # Without the barrier at which JAX waits for those that died.
"""
)


class Run:
    """So many processes of one script; `start` is given the number of each, and what a `Child` is made of."""

    def __init__(
        self,
        body: str,
        root: Path,
        count: int,
        *roots: Path,
        start: Callable[..., Child] = lambda _, *made_of: Child(*made_of),
    ):
        script, port = RUN + textwrap.dedent(body), free_port()
        self.children = [
            start(i, script, str(i), str(count), str(port), str((roots or [root] * count)[i])) for i in range(count)
        ]

    def wait(self, timeout: float = 120) -> tuple[list[int], list[str]]:
        try:
            out = [child.communicate(timeout=timeout)[0] for child in self.children]
        finally:
            for child in self.children:
                if child.poll() is None:
                    child.kill()
        return [child.returncode for child in self.children], out

    def until(self, index: int, text: str) -> None:
        out = self.children[index].stdout
        while text not in (line := out.readline()):
            assert line, f"process {index} ended before it said {text!r}"


def fine(body: str, root: Path, count: int) -> list[str]:
    codes, out = Run(body, root, count).wait()
    assert codes == [0] * count, "\n".join(out)
    return out


SAVE = """
with ck.Saver(root, every=ck.Every(steps=2), on_event=print_event) as saver:
    state, step = saver.resume(abstract())
    if step: check(state, step)
    print("resumed", step, flush=True)
    for step in range(step + 1, step + 5):
        saver.step(step, state_at(step), metrics={"loss": 1.0})
        saver.wait()
"""


def test_4_2_1_and_4_processes_go_on_with_one_run(tmp_path):
    """Each on a mesh of its own, from what the others left."""
    for count, expected in ((4, 0), (2, 4), (1, 8), (4, 12)):
        out = fine(SAVE, tmp_path, count)
        assert all(f"resumed {expected}\n" in told for told in out), out
        assert ck.steps(tmp_path)[-1] == expected + 4
    assert ck.steps(tmp_path) == [2, 4, 6, 8, 10, 12, 14, 16]
    assert ck.verify(tmp_path / "16").ok
    assert ck.open(tmp_path / "16").manifest.writers == 4
    norm = ck.open(tmp_path / "16").manifest.health["all"].norm
    assert norm == pytest.approx(np.linalg.norm(np.arange(64 * 512, dtype=np.float64) + 16), rel=1e-4)


def test_no_message_is_left_in_the_service(tmp_path):
    out = fine(
        SAVE
        + """
from jax._src import distributed
barrier("over")
print("left:", [k for k, _ in distributed.global_state.client.key_value_dir_get("ckpt_jax/")], flush=True)
barrier("told")
""",
        tmp_path,
        2,
    )
    for told in out:
        assert "left: []" in told


def test_a_process_that_is_still_writing_declines_and_nothing_is_committed(tmp_path):
    out = fine(
        """
        write = _writing.write
        gate = __import__("threading").Event()
        def slow(*a, **k):
            if index == 1: gate.wait(60)
            return write(*a, **k)
        _writing.write = slow
        with ck.Saver(root, every=ck.Every(steps=1), on_event=print_event) as saver:
            saver.step(1, state_at(1))
            time.sleep(0.5)
            assert not saver.step(2, state_at(2))  # Process 0 waits for 1's part: both are at it.
            barrier("both declined")
            gate.set()
            saver.wait()
            saver.step(3, state_at(3))
        """,
        tmp_path,
        2,
    )
    assert ck.steps(tmp_path) == [1, 3]
    assert "step 2 declined" in out[0]
    assert "step 2 declined" in out[1]


def test_one_that_declines_stops_all(tmp_path):
    """Process 1's last write drags on, while process 0 is through with it."""
    out = fine(
        """
        load = _commit.load
        gate = __import__("threading").Event()
        def slow(place):
            if index == 1 and not gate.is_set(): gate.wait(60)
            return load(place)
        with ck.Saver(root, every=ck.Every(steps=1), on_event=print_event) as saver:
            _commit.load = slow
            saver.step(1, state_at(1))
            if index == 0: saver.wait()
            barrier("first is there")
            saver.step(2, state_at(2))
            gate.set()
            saver._idle.wait()
            barrier("second is over")
            saver.step(3, state_at(3))
        """,
        tmp_path,
        2,
    )
    assert ck.steps(tmp_path) == [1, 3]
    assert "step 2 declined: process 1 is still writing the checkpoint before" in out[0]


def test_resume_is_unanimous(tmp_path):
    """Only process 1 reads the damaged chunk: all go back to the step before."""
    fine(SAVE, tmp_path, 2)
    assert ck.steps(tmp_path) == [2, 4]
    data = max((tmp_path / "4" / "state" / "ocdbt.process_1").rglob("d/*"), key=lambda path: path.stat().st_size)
    whole = bytearray(data.read_bytes())
    whole[len(whole) // 2] ^= 1
    data.write_bytes(whole)
    out = fine(SAVE, tmp_path, 2)
    for told in out:
        assert "step 4 fell back: process 1: " in told
        assert "resumed 2\n" in told
    assert ck.steps(tmp_path) == [2, 4, 6]
    assert ck.verify(tmp_path / "4").ok, "it was written anew"


def test_a_tree_that_does_not_fit_in_one_process_is_an_error_in_all(tmp_path):
    fine(SAVE, tmp_path, 2)
    codes, out = Run(
        """
        like = abstract() if index == 0 else abstract() | {"more": 1}
        with ck.Saver(root) as saver:
            saver.resume(like)
        """,
        tmp_path,
        2,
    ).wait()
    assert 0 not in codes
    assert "process 1 could not resume" in out[0]
    assert "Mismatch" in out[1]


def test_a_root_that_is_not_shared_is_found_out(tmp_path):
    """Two hosts with a disk each, under one path."""
    _, out = Run(
        """
        saver = ck.Saver(root, on_event=print_event)
        saver.save(1, state_at(1))
        saver._idle.wait()
        print(type(saver.last_error).__name__, flush=True)
        leave()
        """,
        tmp_path,
        2,
        tmp_path / "a",
        tmp_path / "b",
    ).wait()
    assert "all processes must save to storage that they share" in out[1]
    assert "process 1 could not write its part" in out[0]
    assert ck.steps(tmp_path / "a") == ck.steps(tmp_path / "b") == []


def test_all_that_are_silent_are_named(tmp_path):
    run = Run(
        """
        saver = ck.Saver(root, timeout=6, on_event=print_event)
        if index in (1, 3):
            _writing.write = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)
        saver.save(1, state_at(1))
        saver._idle.wait()
        leave(1, 3)
        """,
        tmp_path,
        4,
    )
    _, out = run.wait()
    for told in (out[0], out[2]):
        assert "processes 1, 3 did not get through the phase `write` within 6 s" in told


def test_what_a_failure_of_process_0_does_to_the_others_names_its_cause(tmp_path):
    """Process 1 is still writing when the folder goes: what it tells of is why, not that its own write failed."""
    out = fine(
        """
        write = _writing.write
        def failing(*a, **k):
            barrier("both are writing")  # One that came later would make the folder again.
            if index == 0: raise OSError(5, "Input/output error")
            while __import__("glob").glob(root + "/*tmp*"): time.sleep(0.01)
            return write(*a, **k)
        _writing.write = failing
        saver = ck.Saver(root, on_event=print_event)
        saver.save(1, state_at(1))
        saver._idle.wait()
        print("told:", saver.last_error, flush=True)
        leave()
        """,
        tmp_path,
        2,
    )
    for told in out:
        assert "Input/output error" in told.partition("told:")[2]
    assert not list(tmp_path.glob("1*"))


def test_process_0_bids_farewell_no_longer_than_the_timeout():
    """What befell a save is told after the farewell: a dead process must not delay it beyond what was asked for."""
    from ckpt_jax import _processes

    class Service:
        def blocking_key_value_get(self, key, patience):
            asked.append(patience)
            raise TimeoutError

    asked = []
    for timeout in (2.0, 600.0):
        _processes.Group(0, 2, Service(), "ckpt_jax/test", timeout).part()
    _processes._late.clear()
    assert asked == [2000, 10000]


def test_a_global_loader_that_is_elsewhere_in_one_process_is_no_checkpoint(tmp_path):
    out = fine(
        """
        saver = ck.Saver(root, on_event=print_event)
        saver.save(1, {"data": ck.data.global_batches(range(20), 4, seed=index, process=index, processes=count)})
        saver._idle.wait()
        print("told:", saver.last_error, flush=True)
        leave()
        """,
        tmp_path,
        2,
    )
    for told in out:
        assert "the processes do not hold the same state" in told.partition("told:")[2]
    assert ck.steps(tmp_path) == []


def test_an_iterator_that_refuses_its_state_in_one_process_stops_all(tmp_path):
    fine(
        """
        with ck.Saver(root) as saver:
            saver.save(1, {"data": ck.data.global_batches(range(20), 4, seed=0, process=index, processes=count)})
        """,
        tmp_path,
        2,
    )
    codes, out = Run(
        """
        with ck.Saver(root) as saver:
            saver.resume({"data": ck.data.global_batches(range(20), 4, seed=index, process=index, processes=count)})
        """,
        tmp_path,
        2,
    ).wait()
    assert 0 not in codes
    assert "process 1 could not resume: data" in out[0]
    assert "the batches were counted with seed 0, here 1" in out[1]


def test_a_process_that_leaves_a_step_out_is_missed_there_alone(tmp_path):
    out = fine(
        """
        saver = ck.Saver(root, every=ck.Every(steps=1), timeout=4, on_event=print_event)
        for step in (1, 2, 3):
            if not (step == 2 and index == 1): saver.step(step, state_at(step))
            saver._idle.wait()
            barrier(f"at {step}")
        print("last:", saver.last_error, flush=True)
        leave()
        """,
        tmp_path,
        2,
    )
    assert ck.steps(tmp_path) == [1, 3]
    assert "step 2 failed: process 1 did not get through the phase `write`" in out[0]
    assert "last: None" in out[1]


@pytest.mark.parametrize(
    ("every", "saves"),
    [("ck.Every(minutes=0.3 / 60)", 2), ("ck.Every.optimal(mtbf=0.5, least=0.2, most=2, jitter=0.5)", 3)],
    ids=["minutes", "optimal"],
)
def test_what_the_clock_says_is_agreed_on_ahead(tmp_path, every, saves):
    """Process 0 looks at the clock; both save the same step, though one is ahead of the other."""
    out = fine(
        """
        with ck.Saver(root, every=RULE, on_event=print_event) as saver:
            for step in range(1, 10_000):
                time.sleep(0.01 if index else 0.012)
                saver.step(step, {"step": step, "w": W[:8]})
                if step % 10 == 0 and agree(step, len(ck.steps(root)) >= SAVES): break
        """.replace("RULE", every).replace("SAVES", str(saves)),
        tmp_path,
        2,
    )
    steps = ck.steps(tmp_path)
    for told in out:
        assert [int(step) for step in re.findall(r"step (\d+) snapshot:", told)][: len(steps)] == steps
    assert ("planned: save every" in out[0]) == ("optimal" in every)
    assert "planned" not in out[1]


def test_a_mark_that_one_process_cannot_read_ends_the_save_in_all_at_once(tmp_path):
    out = fine(
        """
        with ck.Saver(root, on_event=print_event, timeout=60) as saver:
            is_bad = _commit.is_bad
            def failing(place): raise OSError(5, "Input/output error", str(place))
            if index == 0: _commit.is_bad = failing
            started = time.monotonic()
            saver.save(1, state_at(1))
            saver._idle.wait()
            print("waited", round(time.monotonic() - started), flush=True)
            _commit.is_bad = is_bad
            saver.save(2, state_at(2))
        """,
        tmp_path,
        2,
    )
    for told in out:
        assert "step 1 failed" in told
        assert "Input/output error" in told
        assert int(re.search(r"waited (\d+)", told)[1]) < 30
    assert ck.steps(tmp_path) == [2]


def test_an_error_of_one_process_in_resume_is_heard_by_the_others_at_once(tmp_path):
    fine(SAVE, tmp_path, 2)
    codes, out = Run(
        """
        from ckpt_jax import _restore
        def failing(*_, **__): raise MemoryError("no room")
        if index == 1: _restore.fetch = failing
        with ck.Saver(root, timeout=60) as saver:
            started = time.monotonic()
            try:
                saver.resume(abstract())
            finally:
                print("waited", round(time.monotonic() - started), flush=True)
        """,
        tmp_path,
        2,
    ).wait()
    assert 0 not in codes
    assert "process 1 could not resume: MemoryError: no room" in out[0]
    for told in out:
        assert int(re.search(r"waited (\d+)", told)[1]) < 30
    assert ck.steps(tmp_path, bad=True) == []


def test_a_leftover_that_cannot_be_put_back_is_heard_by_the_others_at_once(tmp_path):
    fine(SAVE, tmp_path, 2)
    codes, out = Run(
        """
        def failing(root): raise PermissionError(13, "Permission denied", str(root))
        _commit.clear_all = failing
        with ck.Saver(root, timeout=60) as saver:
            saver.resume(abstract())
        """,
        tmp_path,
        2,
    ).wait()
    assert 0 not in codes
    assert "process 0 could not propose a step to resume from" in out[1]


def test_a_message_that_is_not_taken_is_an_error(tmp_path):
    out = fine(
        """
        group = _save._processes.group("test")
        if index == 0:
            group.publish("x", "once")
            try:
                group.publish("x", "twice")
            except ck.CheckpointError as error:
                print("told:", error, flush=True)
        group.part()
        """,
        tmp_path,
        2,
    )
    assert "told: the coordination service did not take a message: ALREADY_EXISTS" in out[0]


def test_two_calls_at_once_are_both_heard_at_steps_that_all_agree_on(tmp_path):
    """One process wants a save by the clock just when the other is told to stop."""
    out = fine(
        """
        from ckpt_jax import _agree
        from jax._src import distributed
        meeting = _agree.Meeting(distributed.global_state.client, index, count, "ckpt_jax/test", print)
        meeting.call("stop" if index else "save")
        heard = {}
        for step in range(1, 1000):
            for reason in meeting.passed(step):
                heard[reason] = step
            time.sleep(0.004 if index else 0.005)
            if step % 50 == 0:
                barrier(f"at {step}")
        meeting.close()
        print("heard", sorted(heard.items()), flush=True)
        """,
        tmp_path,
        2,
    )
    told = [re.findall(r"heard (.*)", text)[0] for text in out]
    assert told[0] == told[1]
    assert "'save'" in told[0]
    assert "'stop'" in told[0]


def test_sigterm_without_jaxs_service_stops_all_at_the_same_step(tmp_path):
    """Then the processes agree on the step themselves."""
    run = Run(
        """
        from jax._src import distributed
        distributed.global_state.preemption_sync_manager = None
        with ck.Saver(root, every=ck.Every(steps=10**6), on_event=print_event) as saver:
            step = 0
            while step < 10**5 and not saver.preempted:
                step += 1
                saver.step(step, {"step": step, "w": W[:8]})
                if step == 3: print("running", flush=True)
                time.sleep(0.02 if index else 0.021)
        print("left", step, flush=True)
        """,
        tmp_path,
        2,
    )
    for index in (0, 1):
        run.until(index, "running")
    run.children[1].send_signal(signal.SIGTERM)
    codes, out = run.wait()
    assert codes == [0, 0], out
    (step,) = ck.steps(tmp_path)
    assert all(f"left {step}\n" in told for told in out), out


def test_preemption_stops_all_at_the_same_step(tmp_path):
    """SIGTERM to one of them, through JAX's own service."""
    run = Run(
        """
        with ck.Saver(root, every=ck.Every(steps=10**6), on_event=print_event) as saver:
            step = 0
            while step < 10**5 and not saver.preempted:
                step += 1
                saver.step(step, {"step": step, "w": W[:8]})
                if step == 3: print("running", flush=True)
                time.sleep(0.02)
        print("left", step, flush=True)
        """,
        tmp_path,
        2,
    )
    for index in (0, 1):
        run.until(index, "running")
    run.children[1].send_signal(signal.SIGTERM)
    codes, out = run.wait()
    assert codes == [0, 0], out
    (step,) = ck.steps(tmp_path)
    assert all(f"left {step}\n" in told for told in out), out
