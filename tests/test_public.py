"""The public names: each documented, each with an example that runs."""

import doctest
import importlib
import inspect
from pathlib import Path

import pytest

import ckpt_jax as ck
from ckpt_jax import errors as errors_module

MODULES = [f"ckpt_jax.{path.stem}" for path in Path(ck.__file__).parent.glob("*.py") if path.stem != "__init__"]
FUNCTIONS = ["save", "restore", "open", "verify", "diff", "steps", "latest", "register_leaf"]


def test_the_table_of_contents_is_short_and_true():
    errors = [name for name in ck.__all__ if name in vars(errors_module)]
    assert len(ck.__all__) - len(errors) < 20
    assert dir(ck) == sorted(ck.__all__)
    for name in ck.__all__:
        assert getattr(ck, name).__name__.removeprefix("ckpt_jax.") == name


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'sava'"):
        _ = ck.sava


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_public_function_shows_itself_at_work(name):
    assert ">>> " in (inspect.getdoc(getattr(ck, name)) or "")


def test_signatures_are_the_contract():
    def of(name):
        return [
            f"{'*' if p.kind is p.KEYWORD_ONLY else ''}{p.name}"
            for p in inspect.signature(getattr(ck, name)).parameters.values()
        ]

    assert of("save") == ["path", "tree", "*step", "*metadata", "*overwrite"]
    assert of("restore") == ["path", "like", "*sharding", "*only", "*rename", "*on_missing", "*on_extra", "*cast"]
    assert (of("open"), of("verify"), of("diff")) == (["path"], ["path", "level"], ["a", "b"])
    assert (of("steps"), of("latest")) == (["root", "*bad"], ["root"])


@pytest.mark.parametrize("module", sorted(MODULES))
def test_examples_run(module):
    failed, _ = doctest.testmod(importlib.import_module(module), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failed == 0


def test_the_examples_of_the_guide_run():
    path = Path(__file__).parent.parent / "docs" / "run.md"
    failed, attempted = doctest.testfile(str(path), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert (failed, attempted > 10) == (0, True)
