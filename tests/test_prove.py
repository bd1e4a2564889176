"""The proof that a resumed run is the same run, which must catch what is left out."""

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
    assert "none was committed" in str(proof)


def test_a_program_that_fails_is_told_with_what_it_printed():
    with pytest.raises(ck.CheckpointError, match="no such luck in"):
        ck.prove_resume("tests.programs:fails", steps=3, interrupt_at=[1])


def test_wrong_arguments_are_told():
    with pytest.raises(ValueError, match="module:function"):
        ck.prove_resume("tests.programs")
    with pytest.raises(ValueError, match="interrupt_at is between 1 and 2"):
        ck.prove_resume("tests.programs:good", steps=3, interrupt_at=[3])
