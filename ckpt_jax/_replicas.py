"""Replicas: do devices that should hold the same values hold the same?"""

import json
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp

from . import _chunks, _processes, _tree
from .errors import Fault


def replica_mismatches(state: Any) -> list[Fault]:
    """Where devices that hold the same part of an array do not hold the same bits.

    Each device takes a fingerprint of what it holds, and only those are compared: between this process's devices and,
    if there are several processes, between all of theirs; then all must call this alike. A device that computes wrong
    values without a word is found so before its values are saved.

    Args:
        state: any tree; leaves that are no jax arrays are left out.

    Returns:
        A fault for each part of a leaf whose replicas differ, naming the devices in the minority; none if all is well.

    >>> import jax, jax.numpy as jnp, ckpt_jax as ck
    >>> from jax.sharding import NamedSharding, PartitionSpec as P
    >>> mesh = jax.make_mesh((len(jax.devices()),), ("data",))
    >>> ck.replica_mismatches({"w": jax.device_put(jnp.ones(8), NamedSharding(mesh, P()))})
    []
    """
    found: dict[str, dict[str, dict[str, str]]] = {}  # name -> box -> device -> fingerprint
    pending = []
    for name, value in _tree.flatten(state).leaves.items():
        if isinstance(value, jax.Array) and value.sharding.num_devices > 1:
            data = jax.random.key_data(value) if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) else value
            for shard in data.addressable_shards:
                box = str(_chunks.box(shard.index, data.shape))
                pending.append((name, box, str(shard.device), _fingerprint(shard.data)))
    for name, box, device, print_ in pending:
        a, b = jax.device_get(print_)
        found.setdefault(name, {}).setdefault(box, {})[device] = f"{int(a):08x}{int(b):08x}"
    for other in _others(found):
        for name, boxes in other.items():
            for box, prints in boxes.items():
                found.setdefault(name, {}).setdefault(box, {}).update(prints)
    return [
        fault for name, boxes in found.items() for box, prints in boxes.items() for fault in _odd(name, box, prints)
    ]


@jax.jit
def _fingerprint(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two sums over the bits, weighted by position: a change of any bit, or of two values' places, changes them."""
    if x.dtype == jnp.bool_ or _bits(x.dtype) < 8:  # Exact in what is wide enough for bits.
        bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    elif x.dtype.itemsize == 1:
        bits = jax.lax.bitcast_convert_type(x, jnp.uint8)
    else:
        x = jnp.stack([x.real, x.imag]) if jnp.issubdtype(x.dtype, jnp.complexfloating) else x
        bits = jax.lax.bitcast_convert_type(x, jnp.uint16 if x.dtype.itemsize == 2 else jnp.uint32)
    bits = bits.reshape(-1).astype(jnp.uint32)
    at = jnp.arange(bits.size, dtype=jnp.uint32)
    # Knuth's multiplicative hash, and another odd constant: sums modulo 2**32 that do not depend on their order.
    first = jnp.sum(bits * (at * jnp.uint32(2654435761) | jnp.uint32(1)), dtype=jnp.uint32)
    second = jnp.sum((bits ^ (bits >> 15)) * (at * jnp.uint32(2246822519) | jnp.uint32(1)), dtype=jnp.uint32)
    return first, second


def _bits(dtype: Any) -> int:
    return (jnp.finfo if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo)(dtype).bits


def _odd(name: str, box: str, prints: dict[str, str]) -> list[Fault]:
    if len(set(prints.values())) < 2:
        return []
    usual, _ = Counter(prints.values()).most_common(1)[0]
    others = [device for device, found in prints.items() if found != usual]
    place = name if box == "()" else f"{name} at {box}"
    return [Fault(place, f"the same bits on {len(prints)} devices", f"others on {', '.join(others)}")]


def _others(found: dict[str, Any]) -> list[dict[str, Any]]:
    group = _processes.group("replicas")
    if group.count == 1:
        return []
    try:
        group.publish(f"prints/{group.index}", json.dumps(found))
        phase = "take fingerprints"
        return [
            json.loads(group.wait(f"prints/{i}", process=i, phase=phase))
            for i in range(group.count)
            if i != group.index
        ]
    finally:
        group.part()
