"""Batches of global order: any number of processes goes on where others stopped, with each sample once."""

import grain
import jax.numpy as jnp
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


@pytest.mark.parametrize("batches", [-3, 2.7, "2", True, None])
def test_a_state_without_a_number_of_batches_is_refused(batches):
    (one,) = make(1)
    next(one)
    with pytest.raises(ValueError, match="batches is "):
        one.set_state(one.get_state() | {"batches": batches})
    with pytest.raises(ValueError, match="a state of batches is a dict, not None"):
        one.set_state(None)
    assert one.get_state()["batches"] == 1


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


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"process": 1}, "process and processes are given both, or neither of them"),
        ({"processes": 2}, "process and processes are given both, or neither of them"),
        ({"process": 5, "processes": 2}, "process is one of 0 to 1, not 5"),
        ({"process": -1, "processes": 2}, "process is 0 or more, not -1"),
        ({"process": 0, "processes": 0}, "processes is 1 or more, not 0"),
        ({"process": 0.0, "processes": 2}, "process is an int, not 0.0"),
        ({"batch_size": 4.0}, "batch_size is an int, not 4.0"),
        ({"batch_size": True}, "batch_size is an int, not True"),
        ({"batch_size": -4}, "batch_size is 1 or more, not -4"),
        ({"seed": None}, "seed is an int, not None"),
        ({"seed": 1.5}, "seed is an int, not 1.5"),
        ({"seed": -1}, "seed is 0 or more, not -1"),
        ({"epochs": 1.5}, "epochs is an int, not 1.5"),
        ({"epochs": 0}, "epochs is 1 or more, not 0"),
        ({"shuffle": "no"}, "shuffle is True or False, not 'no'"),
    ],
)
def test_wrong_arguments_are_told_at_the_call(arguments, error):
    with pytest.raises((TypeError, ValueError), match=error):
        ck.data.global_batches(range(20), **{"batch_size": 4, "seed": 0} | arguments)


def test_numbers_may_be_numpys_and_jaxs():
    one = ck.data.global_batches(range(20), np.int64(8), seed=jnp.int32(3), epochs=np.int64(2))
    assert given([one], 3) == given(make(1), 3)
    assert one.get_state() == make(1)[0].get_state() | {"batches": 3}
    assert all(type(value) in (int, bool) for value in one.get_state().values())


def test_a_sample_that_is_none_is_named():
    even = grain.MapDataset.range(8).filter(lambda i: i % 2 == 0)
    one = ck.data.global_batches(even, 4, seed=0, shuffle=False)
    with pytest.raises(ValueError, match="sample 1 of the stream is None"):
        next(one)
    assert one.get_state()["batches"] == 0


class _Failing:
    """Ten samples, of which reading one fails once."""

    def __init__(self):
        self.failed = False

    def __len__(self):
        return 10

    def __getitem__(self, index):
        if index == 3 and not self.failed:
            self.failed = True
            raise OSError("no such luck")
        return index


def test_of_a_batch_that_cannot_be_made_no_sample_is_lost():
    one = ck.data.global_batches(_Failing(), 2, seed=0, shuffle=False)
    assert next(one).tolist() == [0, 1]
    with pytest.raises(OSError, match="no such luck"):
        next(one)
    assert next(one).tolist() == [2, 3]
    ragged = ck.data.global_batches([np.zeros(2), np.zeros(3)], 2, seed=0)
    with pytest.raises(ValueError, match="same shape"):
        next(ragged)
    assert ragged.get_state()["batches"] == 0
