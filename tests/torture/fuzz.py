"""Coverage-guided fuzzing of whatever looks at a checkpoint: `python -m tests.torture.fuzz --minutes 5`.

Needs atheris: `pip install -e ".[fuzz]"`. Inputs that reach new code are kept in a folder, by default a temporary one;
the small ones among them belong into `tests/torture/corpus`, after `--merge`. An input that breaks a promise is
saved and printed, and ends the run: it belongs there too, once it no longer does.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

# Before jax is imported: it reads both just once.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

CORPUS = Path(__file__).parent / "corpus"
LARGEST = 4096  # Bytes of an input: a longer one has more of the same.


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.torture.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--keep", type=Path, help="folder for inputs that reach new code, and for one that fails")
    parser.add_argument("--merge", action="store_true", help="add to the saved corpus what reaches more of the code")
    parser.add_argument("--seed", type=int, default=0, help="the same seed tries the same; 0 is another one each time")
    options, inner = parser.parse_known_args(arguments)  # The others are libFuzzer's, which calls itself for a merge.
    try:
        import atheris  # pyright: ignore[reportMissingImports]
    except ImportError:
        sys.exit('atheris is not installed: pip install -e ".[fuzz]" (it has wheels for Python 3.11 to 3.13 on Linux)')
    with atheris.instrument_imports(include=["ckpt_jax"]):
        from . import hostile, strange
    keep = options.keep or Path(tempfile.mkdtemp(prefix="fuzz-"))
    keep.mkdir(parents=True, exist_ok=True)
    memory = Path("/dev/shm")
    world = hostile.make(Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None)))
    for warm in ({}, {hostile.MANIFEST: b""}, {hostile.TREE: b""}):
        hostile.attack(world, warm)  # What is imported or compiled only now is no fault of an input's.

    def one(data: bytes) -> None:
        try:
            hostile.attack(world, strange.damage_of(world, data))
        except hostile.Broken as broken:
            print(f"\nan input of {len(data)} bytes breaks a promise:\n{broken}\n{data.hex()}", file=sys.stderr)
            raise

    # Sanitized allocation limits are libFuzzer's own; ours and its alarm would take each other's signal.
    flags = [
        f"-max_len={LARGEST}",
        "-timeout=0",
        "-rss_limit_mb=0",
        f"-artifact_prefix={keep}/",
        "-print_final_stats=1",
    ]
    if inner:
        flags = inner
    elif options.merge:
        flags += ["-merge=1", str(CORPUS), str(keep)]
    else:
        flags += [f"-max_total_time={options.minutes * 60:.0f}", f"-seed={options.seed}", str(keep), str(CORPUS)]
    print(f"inputs are kept in {keep}", file=sys.stderr)
    itself = Path(tempfile.mkdtemp()) / "fuzz"
    itself.write_text(f'#!/bin/sh\nexec {sys.executable} -m tests.torture.fuzz "$@"\n')
    itself.chmod(0o700)
    atheris.Setup([str(itself), *flags], one, enable_python_coverage=True)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
