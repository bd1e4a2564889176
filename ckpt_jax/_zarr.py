"""An array's metadata and a chunk's bytes, as zarr has them (no JAX)."""

import functools
import json
import sys
from typing import Any

import ml_dtypes  # noqa: F401  Registers bfloat16, float8 and the like with NumPy.
import numpy as np

from . import _chunks
from ._manifest import Leaf

CRC = 4  # Bytes of the crc32c that zarr's codec of that name appends.

# The dtypes that TensorStore's zarr3 driver has. Others are stored as uint8; the manifest has the true one.
ZARR = frozenset(
    {
        *("bool", "int2", "int4", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128", "float4_e2m1fn"),
        *("float8_e3m4", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
        *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    }
)


def zarr_json(leaf: Leaf) -> bytes:
    """An array's zarr v3 metadata: raw little-endian bytes and their crc32c, nothing compressed."""
    return _zarr_json(leaf.dtype if leaf.dtype in ZARR else "uint8", leaf.shape, leaf.chunk)


@functools.lru_cache(1024)
def _zarr_json(dtype: str, shape: _chunks.Shape, chunk: _chunks.Shape) -> bytes:
    fill: Any = [0.0, 0.0] if dtype.startswith("complex") else 0.0 if "float" in dtype else 0
    return json.dumps(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": shape,
            "data_type": dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": False if dtype == "bool" else fill,
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
        }
    ).encode()


@functools.cache
def little(dtype: str) -> np.dtype:
    """A dtype as it lies on disk."""
    native = np.dtype(dtype)
    # Not `newbyteorder` alone: a bfloat16 that is little-endian by name is another dtype to JAX, and crashes it.
    return native if sys.byteorder == "little" else native.newbyteorder("<")
