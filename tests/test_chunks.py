"""The geometry of chunks, by example: what is cut where, and who writes it (properties are in test_properties.py)."""

import math
from collections import Counter

import pytest

from ckpt_jax import _chunks

MB = 1 << 20


@pytest.mark.parametrize(
    ("shape", "shard", "itemsize", "writers", "cell", "expected"),
    [
        pytest.param((), (), 4, 1, 16 * MB, (), id="a 0-d array is one chunk"),
        pytest.param((), (), 4, 8, 16 * MB, (), id="a 0-d array is one chunk, however many hold it"),
        pytest.param((8, 4), (2, 4), 4, 1, 16 * MB, (2, 4), id="a small shard is one chunk"),
        pytest.param((8, 4), (2, 4), 4, 8, 16 * MB, (2, 4), id="small shards are not worth sharing"),
        pytest.param((0, 4), (0, 4), 4, 1, 16 * MB, (1, 4), id="no chunk is empty, even of an empty array"),
        pytest.param((4, 0), (2, 0), 4, 1, 16 * MB, (2, 1), id="no chunk is empty along the last axis either"),
        pytest.param((16,), (16,), 4, 1, 16, (4,), id="cells are cut to the limit"),
        pytest.param((17,), (17,), 4, 1, 16, (4,), id="an unsharded axis is cut unevenly"),
        pytest.param((34,), (17,), 4, 1, 16, (1,), id="a sharded axis is cut evenly, if only into ones"),
        pytest.param((24,), (12,), 4, 1, 16, (4,), id="a sharded axis is cut at a divisor"),
        pytest.param((4, 8), (4, 8), 4, 1, 16, (1, 4), id="the outermost axis is cut first, then the next"),
        pytest.param((1, 1, 8), (1, 1, 8), 4, 1, 16, (1, 1, 4), id="an axis of one cannot be cut"),
        pytest.param((2, 2), (2, 2), 64, 1, 16, (1, 1), id="one element is the least, above the limit too"),
        pytest.param((8, MB), (8, MB), 4, 8, 16 * MB, (1, MB), id="eight that hold 32 MB write an eighth each"),
        pytest.param((3, MB), (3, MB), 4, 8, 64 * MB, (1, -(-MB // 3)), id="eight that hold three rows cut these too"),
    ],
)
def test_grid(  # noqa: PLR0917
    shape: tuple[int, ...],
    shard: tuple[int, ...],
    itemsize: int,
    writers: int,
    cell: int,
    expected: tuple[int, ...],
) -> None:
    assert _chunks.grid(shape, shard, itemsize, writers, cell) == expected


@pytest.mark.parametrize(
    ("shape", "shards"), [((50257, 1600), (1, 1)), ((6400, 16000), (8, 1)), ((32, 4096, 4096), (1, 8, 1))]
)
def test_a_cell_of_a_large_array_is_at_most_the_limit_and_not_needlessly_small(
    shape: tuple[int, ...], shards: tuple[int, ...]
) -> None:
    shard = tuple(n // k for n, k in zip(shape, shards, strict=True))
    size = 4 * math.prod(_chunks.grid(shape, shard, 4))
    assert _chunks.CELL_BYTES / 3 < size <= _chunks.CELL_BYTES


def test_a_sharded_axis_that_is_prime_is_not_cut_into_single_rows() -> None:
    """50,261 is a prime: there is no even way to cut its rows but into single ones."""
    assert _chunks.grid((2 * 50261, 4096), (50261, 4096), 4) == (50261, 82)
    assert _chunks.grid((2 * 50261, 2 * 4099), (50261, 4099), 4) == (50261, 4099), "larger than asked, if both are"
    huge = _chunks.grid((2 * 1000003, 2 * 4099), (1000003, 4099), 4)
    assert huge == (1000003, 1), "but not as large as 16 GB"
    assert _chunks.grid((2 * 268435459,), (268435459,), 4) == (268435459,), "nor as small as a number"


@pytest.mark.parametrize("holders", [[0], [3], [0, 1], [1, 4, 6], list(range(8))])
@pytest.mark.parametrize("turn", [0, 1, 5])
def test_as_many_cells_as_holders_give_each_holder_one(holders: list[int], turn: int) -> None:
    owners = [_chunks.owner(holders, number, len(holders), turn) for number in range(len(holders))]
    assert sorted(owners) == holders


def test_many_cells_are_shared_evenly() -> None:
    owners = Counter(_chunks.owner([0, 1, 2], number, 10, turn=4) for number in range(10))
    assert sorted(owners.values()) == [3, 3, 4]


def test_leaves_of_one_cell_go_round_their_holders() -> None:
    """Or process 0 would write every bias of a data-parallel run."""
    owners = Counter(_chunks.owner(range(8), 0, 1, turn) for turn in range(80))
    assert owners == dict.fromkeys(range(8), 10)


def test_a_box_is_what_a_devices_slices_cover() -> None:
    assert _chunks.box((slice(None), slice(2, 4)), (3, 8)) == ((0, 3), (2, 4))
    assert _chunks.box((), ()) == ()
    assert _chunks.box((slice(0, None), slice(None, 100)), (3, 8)) == ((0, 3), (0, 8))


def test_boxes_overlap_where_both_are() -> None:
    assert _chunks.overlap(((0, 4), (0, 4)), ((2, 6), (3, 9))) == ((2, 4), (3, 4))
    assert _chunks.overlap(((0, 4),), ((4, 8),)) is None
    assert _chunks.overlap((), ()) == ()
    assert _chunks.overlap(((3, 3),), ((0, 8),)) is None, "an empty box shares nothing"


def test_a_cell_ends_with_the_array() -> None:
    assert _chunks.cell((2, 0), (4, 3), (10, 3)) == ((8, 10), (0, 3))


def test_an_empty_box_is_covered_by_no_chunk() -> None:
    assert list(_chunks.covering(((0, 0), (0, 5)), (1, 5))) == []
    assert list(_chunks.covering(((2, 2),), (4,))) == []


def test_a_0_d_array_is_covered_by_one_chunk() -> None:
    assert list(_chunks.covering((), ())) == [()]
    assert _chunks.key("a.b", ()) == "a.b/c"


def test_chunk_keys_are_zarrs() -> None:
    assert _chunks.key("params.w", (3, 0, 12)) == "params.w/c/3/0/12"
