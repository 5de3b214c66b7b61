"""The knobs of training: batch, optimiser, length, and the data."""

import enum
import math
from dataclasses import dataclass

from alpa_hpc.errors import ConfigError


class OptimiserKind(enum.Enum):
    """What turns gradients into updates."""

    ADAMW = "adamw"
    """Adam with decoupled weight decay"""
    SGD = "sgd"
    """gradient descent with Nesterov's momentum; weight decay is part of the gradient"""
    ADAFACTOR = "adafactor"
    """Adafactor: second moments as a row and a column of each matrix, steps in units of a parameter's own size; hardly any state"""


class ParamDtype(enum.Enum):
    """What forward and backward read matrices in, and sum their gradients in over devices and microbatches (scales and biases: as made)."""

    FLOAT32 = "float32"
    """as the model makes them"""
    BFLOAT16 = "bfloat16"
    """half the bytes, range of float32; a float32 original of each is kept with the optimiser's state, which updates that"""
    FLOAT16 = "float16"
    """the same with finer steps and a small range: gradients are not scaled, what is below 6e-8 of them is lost"""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingOptions:
    """An optimiser with linear warm-up, weight decay and clipping of the global gradient norm.

    param_dtype:      mixed precision with float32 originals (Micikevicius et al., 2018), where it is a 16-bit one
    batch_size:       examples of a global batch (one optimiser step)
    clip_norm:        largest global gradient norm; 0 turns clipping off
    evaluate_every:   steps between evaluations on held-out data; 0 turns them off
    evaluate_batches: batches (of `batch_size`) of one evaluation
    """

    optimiser: OptimiserKind
    param_dtype: ParamDtype
    batch_size: int
    num_steps: int
    learning_rate: float
    warmup_steps: int
    weight_decay: float
    clip_norm: float
    seed: int
    evaluate_every: int
    evaluate_batches: int

    def __post_init__(self) -> None:
        for name in ("batch_size", "num_steps", "evaluate_batches"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected at least 1")
        for name in ("warmup_steps", "weight_decay", "clip_norm", "seed", "evaluate_every"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected a finite number >= 0 (0 turns it off)")
        if not 0 < self.learning_rate < math.inf:
            raise ConfigError(f"learning_rate is {self.learning_rate}, expected a finite number > 0, such as 1e-3")


class DataKind(enum.Enum):
    """Where batches come from."""

    STDLIB_BYTES = "stdlib_bytes"
    """the bytes of the Python standard library's sources, which every machine has"""
    TOKEN_FILE = "token_file"
    """a file of token ids, read through a memory map"""
    SYNTHETIC = "synthetic"
    """noise in the shapes of the model's own `batch`, for timing"""
    SYNTHETIC_IMAGES = "synthetic_images"
    """images of a pattern a class in noise: what a classifier can learn, on every machine"""

    @property
    def is_made_up(self) -> bool:
        """Whether batches are drawn and not read, so that nothing needs to be kept back for evaluation."""
        return self in (DataKind.SYNTHETIC, DataKind.SYNTHETIC_IMAGES)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataOptions:
    """`path` is the token file, or empty where the kind needs none; `held_out_fraction` of the text is kept for evaluation."""

    kind: DataKind
    path: str
    held_out_fraction: float

    def __post_init__(self) -> None:
        if (self.kind is DataKind.TOKEN_FILE) != bool(self.path):
            raise ConfigError(
                f"kind {self.kind.value} with path {self.path!r}: data=token_file needs data.path=FILE, and the other kinds take no path"
            )
        if not 0 <= self.held_out_fraction < 1:
            raise ConfigError(f"held_out_fraction is {self.held_out_fraction}, expected 0 <= fraction < 1, such as 0.1")
