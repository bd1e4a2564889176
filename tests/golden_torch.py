"""Golden files of torch's, with the values in them beside; `PYTHON_WITH_TORCH tests/golden_torch.py` wrote them, once.

Written by torch 2.14.1 and NumPy 2.4 on Linux. Files are added here, never written anew. The bytes of each tensor stand
in `expected.npz` as `<file>|<name>|<dtype>|<shape>`.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor

HERE = Path(__file__).parent / "golden" / "torch"
PLAIN = [
    *("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"),
    *("complex64", "complex128"),
]
NEW = [
    *("uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    "float8_e8m0fnu",
]


def every_dtype() -> dict[str, Any]:
    """A tensor of each dtype, of bytes that are all different."""
    found = {name: (torch.arange(12) - 5).to(getattr(torch, name)).reshape(3, 4) for name in PLAIN}
    for name in NEW:
        dtype = getattr(torch, name)
        found[name] = torch.arange(1, 1 + 6 * dtype.itemsize, dtype=torch.uint8).view(dtype).reshape(2, 3)
    return found


def views() -> dict[str, Any]:
    """Tensors that share a storage, in every order, and ones without elements."""
    base = torch.arange(120, dtype=torch.float32).reshape(4, 5, 6)
    return {
        "base": base,
        "transposed": base.transpose(0, 2),
        "permuted": base.permute(1, 2, 0),
        "sliced": base[1:3, ::2, 1:5:3],
        "column": base[:, 2, 3],
        "row": base[2],
        "expanded": base[:1, :1, :2].expand(3, 4, 2),
        "scalar": base[1, 2, 3],
        "empty": torch.zeros(0, 3),
        "channels": torch.arange(48.0).reshape(2, 3, 2, 4).contiguous(memory_format=torch.channels_last),
        "of one": torch.tensor([[7]], dtype=torch.int16),
    }


def training() -> dict[str, Any]:
    """A model and an optimizer after two steps, as everybody saves them."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125, betas=(0.5, 0.75))
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "parameter": next(model.parameters()),
        "epoch": 3,
        "loss": 0.5,
        "done": False,
        "name": "naïve ✓",
        "blob": b"\x00\xff",
        "nothing": None,
        "huge": -(2**100),
        "complex": complex(-0.0, 1.5),
        "size": torch.Size([2, 3]),
        "rng": torch.get_rng_state()[:16].clone(),
        "by int": {0: [1, (2.0, "x")], 1: {}},
    }


def sharded() -> dict[str, Any]:
    """What the folder holds: tensors in rows, in columns and on each process, lists and values."""
    return {
        "model": {"rows": torch.arange(35.0).reshape(7, 5), "columns": torch.arange(24).reshape(4, 6).bfloat16()},
        "opt": {"state": [{"mu": torch.ones(6, dtype=torch.float64) / 3}, {"mu": torch.tensor(5)}], "lr": 0.125},
        "whole": torch.arange(3).to(torch.uint16),
        "empty": {},
        "words": ["a", ("b", 2)],
        "none": None,
    }


def process(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29555", rank=rank, world_size=2)
    mesh = DeviceMesh("cpu", [0, 1])
    state = sharded()
    state["model"]["rows"] = distribute_tensor(state["model"]["rows"], mesh, [Shard(0)])
    state["model"]["columns"] = distribute_tensor(state["model"]["columns"], mesh, [Shard(1)])
    state["opt"]["state"][0]["mu"] = distribute_tensor(state["opt"]["state"][0]["mu"], mesh, [Replicate()])
    dcp.save(state, checkpoint_id=folder)
    dist.destroy_process_group()


def tensors(value: Any, name: str = "") -> dict[str, torch.Tensor]:
    """The tensors in a tree by their names."""
    if isinstance(value, torch.Tensor):
        return {name: value.detach()}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    return {key: t for at, child in items for key, t in tensors(child, f"{name}.{at}" if name else str(at)).items()}


def main() -> None:
    files = {"dtypes.pt": every_dtype(), "views.pt": views(), "training.pt": training()}
    expected = {}
    for file, value in {**files, "dcp": sharded()}.items():
        for name, tensor in tensors(value).items():
            key = f"{file}|{name}|{str(tensor.dtype).removeprefix('torch.')}|{list(tensor.shape)}"
            expected[key] = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    if HERE.exists():
        sys.exit(f"{HERE} is there")
    HERE.mkdir(parents=True)
    for file, value in files.items():
        torch.save(value, HERE / file)
    torch.save(every_dtype() | {"nested": [None]}, HERE / "legacy.pt", _use_new_zipfile_serialization=False)
    torch.save(
        {
            "module": torch.nn.Linear(1, 1),
            "ok": torch.ones(1),
            "sparse": torch.eye(2).to_sparse(),
            "set": {1},
            "meta": torch.ones(2, device="meta"),
            "half": torch.ones(2, dtype=torch.complex32),
            "dtype": torch.float32,
            "conj": torch.ones(2, dtype=torch.complex64).conj(),
            "quantized": torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8),
        },
        HERE / "odd.pt",
    )
    torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), HERE / "script.pt")
    mp.spawn(process, (str(HERE / "dcp"),), nprocs=2)
    np.savez_compressed(HERE / "expected.npz", **expected)


if __name__ == "__main__":
    main()
