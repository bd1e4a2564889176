"""Devices that should hold the same: one that does not is named."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ckpt_jax as ck


def with_one_wrong(values: np.ndarray, sharding: NamedSharding, device: int, wrong: np.ndarray) -> jax.Array:
    """An array of which one device holds other values, as a faulty one may."""
    shards = [
        jax.device_put((wrong if i == device else values)[index], d)
        for i, (d, index) in enumerate(sharding.addressable_devices_indices_map(values.shape).items())
    ]
    return jax.make_array_from_single_device_arrays(values.shape, sharding, shards)


DTYPES = ["float32", "bfloat16", "float16", "int8", "uint32", "int4", "bool", "complex64", "float8_e4m3fn"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_device_that_holds_other_bits_is_named(mesh42, dtype):
    values = np.ones((8, 6), dtype if dtype not in dir(ml_dtypes) else getattr(ml_dtypes, dtype))
    sharding = NamedSharding(mesh42, P("data"))  # Each part is on two devices.
    good = with_one_wrong(values, sharding, 3, values)
    assert ck.replica_mismatches({"w": good}) == []
    index = list(sharding.addressable_devices_indices_map(values.shape).values())[3]
    bad = values.copy()
    bad[index] = values[index] * 0 if dtype != "bool" else ~values[index]
    (fault,) = ck.replica_mismatches({"a": good, "w": with_one_wrong(values, sharding, 3, bad)})
    assert fault.place.startswith("w at ((")
    assert "the same bits on 2 devices" in fault.expected


def test_a_single_bit_and_two_values_that_changed_places_are_found(mesh42):
    values = np.arange(4096, dtype=np.float32)
    sharding = NamedSharding(mesh42, P())
    swapped, flipped = values.copy(), values.copy()
    swapped[[100, 2000]] = swapped[[2000, 100]]
    flipped.view(np.uint32)[77] ^= 1
    for wrong in (swapped, flipped):
        (fault,) = ck.replica_mismatches([with_one_wrong(values, sharding, 5, wrong)])
        assert fault.expected == "the same bits on 8 devices"
        assert fault.found.startswith("others on ")
        assert fault.found.count("5") == 1


def test_other_leaves_are_left_out(mesh42):
    state = {"n": 1, "host": np.ones(3), "alone": jnp.ones(3), "key": jax.random.key(0), "none": None}
    state["keys"] = jax.device_put(jax.random.split(jax.random.key(0), 8), NamedSharding(mesh42, P("data")))
    assert ck.replica_mismatches(state) == []
