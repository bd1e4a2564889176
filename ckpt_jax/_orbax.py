"""The sidecar files that make the folder an Orbax checkpoint too (measured against orbax-checkpoint 0.12.8)."""

import base64
import json
import time
from typing import Any

import msgspec

from ._manifest import Leaf, Manifest
from ._structure import ROOT, Node, join, keys_of, part

# The one handler with which every reader of Orbax's that we tried takes an item called `state`.
_HANDLER = "orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler"
_SEQUENCE, _DICT = 1, 2
# In the custom metadata of what was exported: keys stand there as they do in names.
ESCAPED = {"ckpt_jax": {"names": "escaped"}}
WRITTEN = b"Written by ckpt_jax.\n"  # By this it is known that a manifest belongs to it.
_EMPTY = {"none": "None", "dict": "Dict", "list": "List", "tuple": "Tuple", "named": "NamedTuple", "unnamed": "List"}
_INT32, _INT64 = 2**31, 2**63


def scalar_array(leaf: Leaf) -> tuple[str, Any] | None:
    """The dtype and value of the 0-d array in which Orbax finds a Python number, if one holds it exactly."""
    if leaf.kind != "scalar" or isinstance(leaf.value, (dict, str)):
        return None
    value = leaf.value
    if leaf.dtype == "bool":
        return "bool", value
    if leaf.dtype == "int":
        return ("int32" if -_INT32 <= value < _INT32 else "int64"), value
    return ("float64", float(value)) if leaf.dtype == "float" else None


def sidecars(manifest: Manifest, device: str) -> dict[str, bytes]:
    """The sidecar files by path; `device` is the one that Orbax puts keys on when it restores without a target."""
    # Encoded piece by piece: with 10,000 leaves as dicts the collector's rounds took a quarter of a save.
    parameters: dict[str, msgspec.Raw] = {}
    strings: dict[str, str] = {}
    shardings: dict[str, str] = {}
    arrays: list[msgspec.Raw] = []
    one_device = json.dumps({"sharding_type": "SingleDeviceSharding", "device_str": device})

    def walk(node: Node | str, name: str, keys: tuple[str, ...], path: bytes) -> None:
        if isinstance(node, str):
            name = name or ROOT
            leaf = manifest.leaves[name]
            kind = _value_type(leaf)
            if kind is None:
                return  # Orbax cannot hold it; it stands in the manifest only.
            parameters[str(keys)] = _parameter(path, kind)
            if kind == "string":
                strings[name] = leaf.value
            if kind == "jax.Array":
                shardings[base64.b64encode(name.encode()).decode()] = one_device
            if leaf.stored:
                arrays.append(_array(name, leaf))
            return
        if not node.children:
            parameters[str(keys)] = _parameter(path, _EMPTY[node.kind])
        kind = _SEQUENCE if node.kind in ("list", "tuple", "unnamed") else _DICT
        for key, child in zip(keys_of(node), node.children, strict=True):
            own = part(key)
            entry = msgspec.json.encode({"key": own, "key_type": kind})
            walk(child, join(name, key), (*keys, own), path + b"," + entry if path else entry)

    walk(manifest.tree, "", (), b"")
    item = manifest.state
    now = time.time_ns()
    tree = {
        "tree_metadata": parameters,
        "use_ocdbt": True,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    checkpoint = {
        "item_handlers": {item: _HANDLER},
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": now,
        "commit_timestamp_nsecs": now,
        "custom_metadata": {},
    }
    contents: dict[str, Any] = {
        f"{item}/_METADATA": tree,
        f"{item}/_sharding": shardings,
        f"{item}/array_metadatas/process_0": {"array_metadatas": arrays},
        "_CHECKPOINT_METADATA": checkpoint,
    }
    if strings:
        contents[f"{item}/_strings.json"] = strings
    files = {path: msgspec.json.encode(value) for path, value in contents.items()}
    return files | {"orbax.checkpoint": b"", "commit_success.txt": WRITTEN}


def holds(leaf: Leaf) -> bool:
    """Whether Orbax finds a leaf: others stand in the manifest only."""
    return _value_type(leaf) is not None


def _parameter(path: bytes, kind: str) -> msgspec.Raw:
    skip = b"true" if kind in _EMPTY.values() else b"false"
    return msgspec.Raw(
        b'{"key_metadata":[%b],"value_metadata":{"value_type":"%b","skip_deserialize":%b}}'
        % (path, kind.encode(), skip)
    )


def _array(name: str, leaf: Leaf) -> msgspec.Raw:
    found = {
        "param_name": name,
        "write_shape": leaf.chunk,
        "chunk_shape": leaf.chunk,
        "ext_metadata": {"random_key_impl": leaf.impl} if leaf.kind == "key" else None,
    }
    return msgspec.Raw(msgspec.json.encode({"array_metadata": found}))


def _value_type(leaf: Leaf) -> str | None:
    if leaf.kind == "array":
        return "np.ndarray"
    if leaf.kind == "key":
        return "jax.Array"
    if leaf.dtype == "str" and isinstance(leaf.value, str):
        return "string"
    return "scalar" if scalar_array(leaf) is not None else None
