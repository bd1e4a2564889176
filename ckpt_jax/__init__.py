"""Functional checkpoints for JAX: saved on one mesh, restored on any other, every byte checked.

This page is the table of contents; each name is imported when it is first used, so that `import ckpt_jax` costs
nothing and the command line starts no JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import data as data
    from . import plan as plan
    from ._diff import diff as diff
    from ._health import Health as Health
    from ._host_rng import HostRNG as HostRNG
    from ._leaves import register_leaf as register_leaf
    from ._open import open as open
    from ._pace import Every as Every
    from ._replicas import replica_mismatches as replica_mismatches
    from ._restore import restore as restore
    from ._retain import Best as Best
    from ._retain import Keep as Keep
    from ._retain import latest as latest
    from ._retain import prune as prune
    from ._retain import steps as steps
    from ._save import save as save
    from ._verify import verify as verify
    from .errors import CheckpointError as CheckpointError
    from .errors import Corrupt as Corrupt
    from .errors import Exists as Exists
    from .errors import Mismatch as Mismatch
    from .errors import NotFound as NotFound
    from .errors import Unhealthy as Unhealthy
    from .errors import Unsupported as Unsupported
    from .prove import prove_resume as prove_resume
    from .saver import Saver as Saver

_HOMES = {
    "save": "_save",
    "restore": "_restore",
    "open": "_open",
    "verify": "_verify",
    "diff": "_diff",
    "steps": "_retain",
    "latest": "_retain",
    "prune": "_retain",
    "Keep": "_retain",
    "Best": "_retain",
    "Saver": "saver",
    "Every": "_pace",
    "Health": "_health",
    "HostRNG": "_host_rng",
    "replica_mismatches": "_replicas",
    "prove_resume": "prove",
    "register_leaf": "_leaves",
    "data": "data",
    "plan": "plan",
    **dict.fromkeys(
        ("CheckpointError", "NotFound", "Exists", "Mismatch", "Corrupt", "Unsupported", "Unhealthy"), "errors"
    ),
}

__all__ = list(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = import_module(f".{_HOMES[name]}", __name__)
    value = home if name == _HOMES[name] else getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
