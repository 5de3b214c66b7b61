"""Configs as tests compose them: from the folder conf/, with a model that needs no jax."""

from dataclasses import dataclass
from typing import Any

from hydra import compose, initialize_config_dir

from alpa_hpc.config import ExperimentConfig, register, to_config
from alpa_hpc.launch.locations import config_folder

WITHOUT_SIZES = ("~model.hidden", "~model.num_layers", "~model.num_heads", "~model.dtype", "~model.dropout")
STUB = ("model._target_=tests.configs.Stub", *WITHOUT_SIZES)


@dataclass(frozen=True)
class Stub:
    """A model that needs no jax."""

    vocab: int
    sequence: int

    def init(self, key: Any) -> Any: ...
    def loss(self, params: Any, batch: Any, key: Any) -> Any: ...
    def batch(self, batch_size: int) -> Any: ...


class LossOnly:
    """A model that lacks what else it must have."""

    def loss(self, params: Any, batch: Any, key: Any) -> Any: ...


def composed(*overrides: str) -> Any:
    """What Hydra makes of the words of a command line."""
    register()
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        return compose("config", [*overrides])


def config_of(*overrides: str) -> ExperimentConfig:
    """The config of a command line, with the stub in place of the model."""
    return to_config(composed(*overrides, *STUB))
