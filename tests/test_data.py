"""Batches of global order: any number of processes goes on where others stopped, with each sample once."""

import grain
import numpy as np
import pytest

import ckpt_jax as ck


def given(batches: list, count: int) -> list[list[int]]:
    """The global batches that processes are given, so many."""
    return [np.concatenate([next(one) for one in batches]).tolist() for _ in range(count)]


def make(processes: int, **named):
    arguments = {"batch_size": 8, "seed": 3} | named
    return [ck.data.global_batches(range(20), process=i, processes=processes, **arguments) for i in range(processes)]


@pytest.mark.parametrize("stops", [(4, 2, 1, 8), (8, 1), (1, 4), (2, 2, 2)])
def test_any_number_of_processes_goes_on(stops):
    """Across the ends of epochs (20 samples, batches of 8) and their shuffles."""
    whole = given(make(1), 3 * len(stops))
    found, state = [], None
    for processes in stops:
        batches = make(processes)
        if state is not None:
            for one in batches:
                one.set_state(state)
        found += given(batches, 3)
        states = [one.get_state() for one in batches]
        assert all(other == states[0] for other in states), "one state serves all"
        state = states[0]
    assert found == whole
    flat = [sample for batch in whole for sample in batch]
    for epoch in range(len(flat) // 20):
        assert sorted(flat[20 * epoch : 20 * epoch + 20]) == list(range(20)), "each sample once in each epoch"
    assert flat[:20] != flat[20:40], "in another order each time"


def test_c095_what_was_read_before_is_passed_over_once(root):
    """Resumed in the middle of an epoch: the epochs after it are whole."""
    (it,) = make(1, shuffle=False, batch_size=4)
    given([it], 2)
    ck.save(f"{root}/2", {"data": it})
    (again,) = make(1, shuffle=False, batch_size=4)
    ck.restore(f"{root}/2", {"data": again})
    flat = [sample for batch in given([again], 13) for sample in batch]
    assert flat == [*range(8, 20), *range(20), *range(20)]


def test_it_goes_through_a_checkpoint_to_another_number_of_processes(root):
    (four, *_) = batches = make(4)
    whole = given(make(1), 7)
    assert given(batches, 3) == whole[:3]
    ck.save(f"{root}/3", {"data": four})
    resumed = make(2)
    for one in resumed:
        ck.restore(f"{root}/3", {"data": one})
    assert given(resumed, 4) == whole[3:]


def test_epochs_end():
    batches = make(2, epochs=2)
    assert len(given(batches, 5)) == 5
    for one in batches:
        with pytest.raises(StopIteration):
            next(one)
    again = make(2, epochs=2)[0]
    again.set_state(batches[0].get_state())
    with pytest.raises(StopIteration):
        next(again)


def test_samples_are_trees_and_sources_may_be_grains():
    source = grain.MapDataset.range(6).map(lambda i: {"x": np.full(2, i), "y": i})
    batch = next(ck.data.global_batches(source, 4, seed=0, shuffle=False))
    assert batch["x"].tolist() == [[0, 0], [1, 1], [2, 2], [3, 3]]
    assert batch["y"].tolist() == [0, 1, 2, 3]


def test_the_order_depends_on_the_seed_alone():
    assert given(make(1), 5) == given(make(1), 5)
    assert given(make(1), 5) != given(make(1, seed=4), 5)
    assert given(make(1, shuffle=False), 1) == [list(range(8))]


def test_a_state_of_other_batches_is_refused(memory):
    ck.save(memory, {"data": make(1)[0]})
    with pytest.raises(ck.Mismatch, match="counted with batch_size 8, here 4"):
        ck.restore(memory, {"data": make(1, batch_size=4)[0]})


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"batch_size": 7}, "batch_size 7 is no multiple of the number of processes, 2"),
        ({"batch_size": 64, "epochs": 1}, "1 epochs of 20 samples are less than a batch of 64"),
    ],
)
def test_absurd_batches_are_refused(arguments, error):
    with pytest.raises(ValueError, match=error):
        make(2, **arguments)
