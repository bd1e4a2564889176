"""The demo's settings, as `configs/demo/tiny_gpt.toml` and `quick.toml` have them."""

import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_PACKAGE = Path(__file__).parent.parent
Name = Literal["usual", "other"]  # The mesh that the run is at home on, and the one that it is moved to.


@dataclass(frozen=True, slots=True)
class Model:
    vocabulary: int
    context: int
    layers: int
    width: int
    heads: int
    dropout: float


@dataclass(frozen=True, slots=True)
class Train:
    batch: int
    steps: int
    warmup: int
    learning_rate: float
    weight_decay: float
    clip: float
    save_every: int
    keep: int
    timeout: float
    kill_at: int
    seed: int


@dataclass(frozen=True, slots=True)
class Mesh:
    shape: tuple[int, int]
    axes: tuple[str, str]
    processes: int

    @property
    def devices(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        named = (f"{axis}={size}" for axis, size in zip(self.axes, self.shape, strict=True))
        return f"a {'x'.join(map(str, self.shape))} mesh ({', '.join(named)}) of {self.devices} CPU devices"


@dataclass(frozen=True, slots=True)
class Settings:
    model: Model
    train: Train
    mesh: dict[Name, Mesh]


def where(name: str = "tiny_gpt") -> Path:
    """A settings file: the repository's, or in an installed package the copy that came with it."""
    ours, packaged = _PACKAGE.parent / "configs", _PACKAGE / "_configs"
    return (ours if (ours / "demo").is_dir() else packaged) / "demo" / f"{name}.toml"


def load(path: Path) -> Settings:
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    meshes: dict[Name, Mesh] = {
        name: Mesh(tuple(table["shape"]), tuple(table["axes"]), table["processes"])
        for name, table in tables["mesh"].items()
    }
    return Settings(Model(**tables["model"]), Train(**tables["train"]), meshes)
