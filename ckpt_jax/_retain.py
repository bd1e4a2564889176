"""A root of checkpoints: which steps are there (no JAX)."""

from . import _commit, _storage


def steps(root: _storage.PathLike, *, bad: bool = False) -> list[int]:
    """The committed steps in a root, in ascending order.

    A step counts if its manifest is whole and records the step that the folder's name says. Folders that look like
    steps and hold nothing committed are left out, as are steps that were found damaged.

    Args:
        root: a folder of checkpoints, one for each step. None are found where there is no such folder.
        bad: list the steps that were marked as damaged instead.

    >>> import numpy as np, ckpt_jax as ck
    >>> for step in (100, 200):
    ...     _ = ck.save(f"memory://docs/steps/{step}", {"w": np.zeros(3)})
    >>> ck.steps("memory://docs/steps")
    [100, 200]
    """
    return _commit.steps(_storage.folder(root), bad=bad)


def latest(root: _storage.PathLike) -> str | None:
    """The path of the newest committed step whose files are all there; None if there is none.

    >>> import numpy as np, ckpt_jax as ck
    >>> ck.latest("memory://docs/nothing") is None
    True
    >>> _ = ck.save("memory://docs/latest/300", {"w": np.zeros(3)})
    >>> ck.latest("memory://docs/latest")
    'memory://docs/latest/300'
    """
    found = _commit.latest(_storage.folder(root))
    return found.url if found is not None else None
