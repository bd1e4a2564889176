"""Imports go down the floors only, and `import ckpt_jax` stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import ckpt_jax

PACKAGE = Path(ckpt_jax.__file__).parent

# From the ground up; a module imports only from those before it. The floors are those of docs/architecture.md.
FLOORS = [
    ["errors", "_collector", "_direct", "_threads", "_units"],
    ["plan", "_values", "_chunks", "_structure", "_manifest", "_tree"],
    ["_leaves", "_storage", "_processes", "_rules"],
    ["_ocdbt", "_ocdbt_writer", "_zarr", "_writing", "_reading", "_health", "_snapshot", "_orbax", "_place"],
    ["_commit", "_faults", "_view", "_flat", "_zip", "_described", "_zarr_arrays", "_pickled", "_zipped"],
    ["_torch_file", "_torch_folder"],
    [
        "_from_own",
        "_from_orbax",
        "_from_safetensors",
        "_from_numpy",
        "_from_msgpack",
        "_from_jax",
        "_from_torch",
        "_formats",
        "_names",
    ],
    ["_save", "_restore", "_verify", "_retain", "_open", "_diff"],
    ["_events", "_pace", "_agree", "_preempt", "_resume", "_host_rng", "_replicas", "saver", "data", "prove"],
    ["_copy_one", "_copy", "_import", "_in_a_row", "_to_safetensors", "_to_npz", "_to_orbax", "_export"],
    ["demo", "plan_sim", "_plan_file", "_plan_report", "_plan_run", "_plan_plot"],
    ["_terminal", "_cli_formats"],
    ["cli"],
]
ORDER = [name for floor in FLOORS for name in floor]
# These run beside a busy accelerator: they must not even import JAX.
NO_JAX = [
    "errors",
    "_collector",
    "_direct",
    "_threads",
    "_values",
    "_chunks",
    "_manifest",
    "_structure",
    "_storage",
    "_ocdbt",
    "_ocdbt_writer",
    "_health",
    "_zarr",
    "_writing",
    "_reading",
    "_orbax",
    "_commit",
    "_faults",
]
NO_JAX += ["_units", "plan", "plan_sim", "_pace", "_plan_file", "_plan_report", "_plan_run", "_plan_plot"]
NO_JAX += ["_faults", "_verify", "_retain", "_open", "_diff", "cli"]
NO_JAX += ["_view", "_flat", "_zarr_arrays", "_from_own", "_from_orbax", "_formats", "_rules", "_names"]
NO_JAX += ["_copy_one", "_copy"]
NO_JAX += ["_zip", "_described", "_from_safetensors", "_from_numpy", "_in_a_row", "_to_safetensors", "_to_npz"]
NO_JAX += ["_from_msgpack", "_from_jax", "_from_torch", "_pickled", "_zipped", "_torch_file", "_torch_folder"]


def modules() -> list[str]:
    return sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__")


def imported(module: str) -> set[str]:
    """The package's own modules that one of them imports, wherever in its code."""
    found = set()
    for node in ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            found |= {node.module.partition(".")[0]} if node.module else {alias.name for alias in node.names}
    return found


def test_every_module_has_its_floor():
    assert set(modules()) <= set(ORDER)


@pytest.mark.parametrize("module", modules())
def test_imports_go_down_only(module):
    above = {name for name in imported(module) if ORDER.index(name) >= ORDER.index(module)}
    assert not above, f"{module} imports {sorted(above)}, which do not stand below it"


@pytest.mark.parametrize("module", modules())
def test_a_module_says_its_one_idea_first(module):
    first = ast.get_docstring(ast.parse((PACKAGE / f"{module}.py").read_text()))
    assert first, f"{module} has no docstring"


def run(code: str, **env: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.parametrize("module", NO_JAX)
def test_modules_that_run_beside_a_busy_accelerator_do_not_import_jax(module):
    name = "ckpt_jax" if module == "__init__" else f"ckpt_jax.{module}"
    assert run(f"import sys, {name}; print('jax' in sys.modules)") == "False\n"


def test_importing_the_package_imports_nothing_heavy():
    heavy = ["jax", "numpy", "tensorstore", "msgspec", "typer", "rich", "flax", "optax", "grain", "orbax"]
    code = f"import sys, ckpt_jax; print([m for m in {heavy} if m in sys.modules])"
    assert run(code) == "[]\n"


def test_listing_a_root_imports_no_array_library():
    heavy = ["jax", "numpy", "tensorstore", "rich.progress"]
    code = f"import sys, ckpt_jax; ckpt_jax.steps('/nowhere'); print([m for m in {heavy} if m in sys.modules])"
    assert run(code) == "[]\n"


def test_no_code_is_ever_loaded():
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        assert not names & {"pickle", "eval", "exec", "__import__", "marshal", "shelve", "dill", "cloudpickle"}, path
