"""The proof that a resumed run is the same run, which must catch what is left out."""

import time

import psutil
import pytest

import ckpt_jax as ck


def test_a_program_that_saves_everything_is_proven():
    """Killed where a checkpoint was just committed, and where it is two steps old."""
    proof = ck.prove_resume("tests.programs:good", steps=9, interrupt_at=[5, 6])
    assert proof.ok, str(proof)
    proof.check()
    assert str(proof) == "tests.programs:good: killed after step 5, 6 and resumed, all 9 steps are the same to the bit"


def test_a_run_of_12_steps_is_the_same_wherever_it_is_killed():
    proof = ck.prove_resume("tests.programs:good_at_each_step", steps=12, interrupt_at=range(1, 12))
    assert proof.ok, str(proof)
    assert proof.interrupted == tuple(range(1, 12))


@pytest.mark.parametrize(
    ("program", "step", "names"),
    [
        ("no_key", 4, {"key", "params.w"}),
        ("no_numpy_rng", 4, {"params.w"}),
        ("no_python_rng", 4, {"params.w"}),
        ("no_loader", 4, {"samples", "params.w"}),
        ("no_schedule_count", 4, {"opt.1.count"}),
    ],
)
def test_what_is_left_out_is_found_at_its_first_step(program, step, names):
    proof = ck.prove_resume(f"tests.programs:{program}", steps=8, interrupt_at=[5])
    assert not proof.ok
    places = [fault.place for fault in proof.faults]
    found = {place.rpartition(": ")[2] for place in places if f"step {step}:" in place}
    assert names <= found, str(proof)
    with pytest.raises(ck.CheckpointError, match="a resumed run is not the same run"):
        proof.check()


def test_a_program_of_two_processes_is_proven():
    proof = ck.prove_resume("tests.programs:in_two_processes", steps=7, interrupt_at=[5], processes=2)
    assert proof.ok, str(proof)


def test_a_step_that_is_off_by_one_is_found():
    proof = ck.prove_resume("tests.programs:off_by_one", steps=8, interrupt_at=[5])
    assert "expected to go on with step 4 after the checkpoint of step 3, found step 5" in str(proof)


def test_a_program_that_never_resumes_is_found():
    proof = ck.prove_resume("tests.programs:never_resumes", steps=6, interrupt_at=[4])
    assert "it saved nothing until then" in str(proof)


def test_a_program_that_fails_is_told_with_what_it_printed():
    with pytest.raises(ck.CheckpointError, match="no such luck in"):
        ck.prove_resume("tests.programs:fails", steps=3, interrupt_at=[1])


def test_wrong_arguments_are_told():
    with pytest.raises(ValueError, match="module:function"):
        ck.prove_resume("tests.programs")
    with pytest.raises(ValueError, match="interrupt_at is between 1 and 2"):
        ck.prove_resume("tests.programs:good", steps=3, interrupt_at=[3])
    with pytest.raises(ValueError, match="interrupt_at is empty: without a kill nothing is proven"):
        ck.prove_resume("tests.programs:good", interrupt_at=())
    with pytest.raises(TypeError, match=r"interrupt_at is a sequence of steps, such as \(7,\), not 7"):
        ck.prove_resume("tests.programs:good", interrupt_at=7)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="steps is 2 or more"):
        ck.prove_resume("tests.programs:good", steps=0)
    with pytest.raises(ValueError, match="processes is 1 or more, not 0"):
        ck.prove_resume("tests.programs:good", processes=0)


@pytest.mark.parametrize("program", ["other_ids_in_a_dict", "other_ids_of_numpy", "none_after_a_resume"])
def test_other_samples_are_found_in_any_tree(program):
    proof = ck.prove_resume(f"tests.programs:{program}", steps=3, interrupt_at=[1])
    assert [fault.place for fault in proof.faults] == ["killed after step 1, step 2: samples"]


def test_samples_may_be_any_tree():
    proof = ck.prove_resume("tests.programs:ids_of_all_kinds", steps=10, interrupt_at=[1])
    assert proof.ok, str(proof)


def test_a_program_that_ends_before_its_last_step_is_not_proven():
    proof = ck.prove_resume("tests.programs:ends_early", steps=5, interrupt_at=[2])
    assert not proof.ok
    assert "undisturbed: step 4 of 5 was never run" in str(proof)
    assert "nothing is proven" in str(proof)


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("returns_nothing", r"is to yield \(step, state, sample_ids\) after each step, and returned None"),
        ("yields_pairs", r"is to yield \(step, state, sample_ids\) after each step, and yielded \(0, {}\)"),
        ("prints_no_text", "no such luck"),
    ],
)
def test_what_is_no_program_is_told(program, told):
    with pytest.raises(ck.CheckpointError, match=told):
        ck.prove_resume(f"tests.programs:{program}", steps=3, interrupt_at=[1])


def test_a_program_that_yields_nothing_is_not_proven():
    proof = ck.prove_resume("tests.programs:yields_nothing", steps=3, interrupt_at=[1])
    assert "step 1 of 3 was never run" in str(proof)


def test_the_workers_of_a_killed_program_are_ended(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKERS", str(tmp_path / "workers"))
    assert ck.prove_resume("tests.programs:leaves_a_worker", steps=3, interrupt_at=[1]).ok
    workers = [int(line) for line in (tmp_path / "workers").read_text().splitlines()]
    assert len(workers) == 3
    ended = time.monotonic() + 10
    while alive := [pid for pid in workers if _runs(pid)]:
        assert time.monotonic() < ended, alive
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # Nobody may be there to bury an orphan.
    except psutil.NoSuchProcess:
        return False


def test_what_each_of_two_processes_has_for_itself_is_compared():
    """Of arrays that every process holds, a save writes each once: the proof looks at all."""
    proof = ck.prove_resume("tests.programs:other_arrays_in_process_1", steps=3, interrupt_at=[1], processes=2)
    places = {fault.place for fault in proof.faults}
    assert places == {f"killed after step 1, step 2: process 1, {name}" for name in ("a", "b")}, str(proof)


def test_a_program_that_is_another_each_time_is_told_so():
    """Else one would look for what the state lacks."""
    proof = ck.prove_resume("tests.programs:unseeded", steps=4, interrupt_at=[2])
    assert not proof.ok
    assert not proof.is_repeatable
    assert proof.faults[0].place == "run twice, step 1: noise"
    assert "two runs are not the same, even without a kill" in str(proof)
