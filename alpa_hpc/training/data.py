"""(data source, split, seed, step) -> batch, such as {"tokens": int32 [batch, sequence + 1]}: a pure function of its arguments.

Every rank and every restart draws the same batch for the same (seed, step), so that no rank has to send data to another
and no file has to remember a position. Sources: the Python standard library's sources as bytes, a token file, noise, or images
made up of a pattern and noise.
"""

import hashlib
import sysconfig
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from numpy.typing import NDArray

from alpa_hpc.errors import ConfigError
from alpa_hpc.training.batch import batch_shapes
from alpa_hpc.training.model import Model
from alpa_hpc.training.options import DataKind, DataOptions

Batch = Any  # a pytree of numpy arrays, as `Model.batch` describes it

MAX_CORPUS_BYTES = 8_000_000
BYTE_VOCABULARY = 256
_CHECKED_AT_ONCE = 1 << 20  # tokens looked at when a file is opened; later windows are checked when drawn
_FIELDS = 4  # of a pattern, along each side
_NOT_TEXT_OF_PYTHON_ITSELF = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


class Split(Enum):
    """The two parts of a data source; no file, and no token of a token file, is in both."""

    TRAINING = "training"
    HELD_OUT = "held_out"


class DataSource(Protocol):
    """What the training loop draws batches from."""

    def batch(self, split: Split, batch_size: int, seed: int, step: int) -> Batch:
        """A batch of `batch_size` rows as numpy arrays; a pure function of the arguments."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ByteCorpus:
    """Text files as bytes (vocabulary 256). `files` names, relative to their folder, what each split holds, in order."""

    sequence: int
    files: Mapping[Split, tuple[str, ...]]
    tokens: Mapping[Split, NDArray[np.uint8]]

    def batch(self, split: Split, batch_size: int, seed: int, step: int) -> Batch:
        """{"tokens": int32 [batch_size, sequence + 1]}: random windows of one split; ConfigError if it is shorter than a window."""
        return {"tokens": _windows(self.tokens[split], split, batch_size, self.sequence, _generator(split, seed, step))}


@dataclass(frozen=True, slots=True, eq=False)
class TokenFile:
    """A long row of tokens in a file (memory-mapped); what stands behind `border` is held out."""

    path: Path
    sequence: int
    vocabulary: int
    tokens: NDArray[Any]
    border: int

    def batch(self, split: Split, batch_size: int, seed: int, step: int) -> Batch:
        """{"tokens": int32 [batch_size, sequence + 1]}; ConfigError if the split is too short or a token is outside the vocabulary."""
        part = self.tokens[: self.border] if split is Split.TRAINING else self.tokens[self.border :]
        tokens = _windows(part, split, batch_size, self.sequence, _generator(split, seed, step))
        _check_range(self.path, tokens, self.vocabulary)
        return {"tokens": tokens}


@dataclass(frozen=True, slots=True, eq=False)
class SyntheticBatches:
    """Noise of the shapes the model asks for, for timing: integers uniform in 0 .. `num_values` - 1, the rest standard normal."""

    model: Model
    num_values: int

    def batch(self, split: Split, batch_size: int, seed: int, step: int) -> Batch:
        """A batch with the structure of `model.batch(batch_size)`."""
        generator = _generator(split, seed, step)
        return jax.tree.map(lambda leaf: _noise(leaf, self.num_values, generator), batch_shapes(self.model, batch_size))


@dataclass(frozen=True, slots=True, eq=False)
class PatternImages:
    """Images of a pattern a class in noise: `patterns` [class, height, width, channels] are standard normal, and so is the noise."""

    patterns: NDArray[np.float32]

    def batch(self, split: Split, batch_size: int, seed: int, step: int) -> Batch:
        """{"images": float32 [batch_size, height, width, channels], "labels": int32 [batch_size]}: classes uniform, fresh noise."""
        generator = _generator(split, seed, step)
        labels = generator.integers(0, len(self.patterns), size=batch_size).astype(np.int32)
        noise = generator.standard_normal(size=(batch_size, *self.patterns.shape[1:]), dtype=np.float32)
        return {"images": self.patterns[labels] + noise, "labels": labels}


def open_data(options: DataOptions, model: Model, num_values: int) -> DataSource:
    """The source that `options` names, in the shapes that `model.batch` asks for; ConfigError if the two do not fit together.

    `num_values` is how many values the model's integers have: its tokens, or its classes. Text needs a model whose batch is
    {"tokens": int32 [batch, sequence + 1]}, images one whose batch is {"images": float32 [batch, H, W, C], "labels": int32 [batch]}.
    """
    match options.kind:
        case DataKind.STDLIB_BYTES:
            sequence = _text_sequence(model)
            if num_values < BYTE_VOCABULARY:
                raise ConfigError(f"the model knows {num_values} tokens, bytes need {BYTE_VOCABULARY}: raise the model's vocabulary")
            return standard_library_corpus(sequence, options.held_out_fraction)
        case DataKind.TOKEN_FILE:
            return token_file(Path(options.path), num_values, _text_sequence(model), options.held_out_fraction)
        case DataKind.SYNTHETIC:
            return SyntheticBatches(model, _num_values(model, num_values))
        case DataKind.SYNTHETIC_IMAGES:
            return pattern_images(_image_shape(model), _num_values(model, num_values))


def standard_library_corpus(sequence: int, held_out_fraction: float) -> ByteCorpus:
    """The Python standard library's own sources (without tests and installed packages), at most 8 MB: text every machine has."""
    return byte_corpus(Path(sysconfig.get_paths()["stdlib"]), MAX_CORPUS_BYTES, sequence, held_out_fraction)


def byte_corpus(folder: Path, max_bytes: int, sequence: int, held_out_fraction: float) -> ByteCorpus:
    """The `*.py` files below `folder` in the order of their names' hashes up to `max_bytes`; the hash also chooses each file's split.

    The order by hash makes a bounded corpus a fair sample of the folder. ConfigError if a split that is wanted would be empty.
    """
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*.py") if _is_text(path.relative_to(folder))}
    files: dict[Split, list[str]] = {split: [] for split in Split}
    texts: dict[Split, list[bytes]] = {split: [] for split in Split}
    used = 0
    for name in sorted(names, key=lambda name: (_fraction("order", name), name)):
        text = (folder / name).read_bytes()
        if used + len(text) > max_bytes:
            break
        split = Split.HELD_OUT if _fraction("split", name) < held_out_fraction else Split.TRAINING
        files[split].append(name)
        texts[split].append(text)
        used += len(text)
    if not texts[Split.TRAINING] or (held_out_fraction > 0 and not texts[Split.HELD_OUT]):
        raise ConfigError(f"{folder} holds too few .py files ({len(names)}) for a training and a held-out part: use a token file")
    return ByteCorpus(
        sequence=sequence,
        files={split: tuple(parts) for split, parts in files.items()},
        tokens={split: np.frombuffer(b"".join(parts), dtype=np.uint8) for split, parts in texts.items()},
    )


def token_file(path: Path, vocabulary: int, sequence: int, held_out_fraction: float) -> TokenFile:
    """Open a numpy `.npy` file of one row of integers, or any other name as raw little-endian uint16; ConfigError if it cannot be used."""
    if not path.is_file():
        raise ConfigError(f"token file {path.absolute()} is not there: give the path of a .npy file or of raw uint16 tokens")
    try:
        tokens = np.load(path, mmap_mode="r") if path.suffix == ".npy" else np.memmap(path, dtype="<u2", mode="r")
    except (ValueError, EOFError) as error:
        raise ConfigError(f"token file {path} cannot be read: {error}. Expected a .npy file or raw little-endian uint16") from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ConfigError(f"token file {path} holds {tokens.dtype} of shape {tokens.shape}, expected one row of integers")
    border = tokens.size - int(tokens.size * held_out_fraction)
    if border < sequence + 1:
        raise ConfigError(f"token file {path} has {border} tokens for training, a window needs {sequence + 1}: shorten the sequence")
    _check_range(path, tokens[:_CHECKED_AT_ONCE], vocabulary)
    return TokenFile(path=path, sequence=sequence, vocabulary=vocabulary, tokens=tokens, border=border)


def pattern_images(shape: tuple[int, int, int], num_classes: int) -> PatternImages:
    """Images of (height, width, channels); each class has 4 x 4 fields of a constant colour of its own, the same in every process."""
    height, width, channels = shape
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([zlib.crc32(b"patterns"), num_classes])))
    fields = generator.standard_normal(size=(num_classes, _FIELDS, _FIELDS, channels), dtype=np.float32)
    rows, columns = (np.arange(size) * _FIELDS // size for size in (height, width))
    return PatternImages(fields[:, rows[:, None], columns[None, :]])


def _num_values(model: Model, num_values: int) -> int:
    integers = [leaf for leaf in jax.tree.leaves(batch_shapes(model, 1)) if np.issubdtype(leaf.dtype, np.integer)]
    if integers and num_values < 1:
        raise ConfigError(
            "the model's batch has integers, and it is not known from which range: give the model a field `vocab` (its tokens are "
            "0 .. vocab - 1) or `num_classes` (its labels are 0 .. num_classes - 1)"
        )
    return num_values


def _image_shape(model: Model) -> tuple[int, int, int]:
    batch = batch_shapes(model, 1)
    described = {name: (leaf.dtype, len(leaf.shape)) for name, leaf in batch.items()} if isinstance(batch, dict) else batch
    if described != {"images": (np.float32, 4), "labels": (np.int32, 1)}:
        raise ConfigError(
            "synthetic images need a model whose batch is {'images': float32 [batch, height, width, channels], 'labels': int32 [batch]}, "
            f"this one asks for {batch}: use data=synthetic"
        )
    _, height, width, channels = batch["images"].shape
    return height, width, channels


def _text_sequence(model: Model) -> int:
    batch = batch_shapes(model, 1)
    tokens = batch.get("tokens") if isinstance(batch, dict) and len(batch) == 1 else None
    if tokens is None or tokens.dtype != np.int32 or len(tokens.shape) != 2 or tokens.shape[1] < 2:
        raise ConfigError(
            f"text needs a model whose batch is {{'tokens': int32 [batch, sequence + 1]}}, this one asks for {batch}: use data=synthetic"
        )
    return int(tokens.shape[1]) - 1


def _windows(tokens: NDArray[Any], split: Split, batch_size: int, sequence: int, generator: np.random.Generator) -> NDArray[np.int32]:
    length = sequence + 1
    if tokens.size < length:
        raise ConfigError(f"the {split.value} part has {tokens.size} tokens, a window needs {length}: shorten the sequence")
    starts = generator.integers(0, tokens.size - length + 1, size=batch_size)
    return np.stack([np.asarray(tokens[start : start + length], dtype=np.int32) for start in starts])


def _noise(leaf: Any, num_values: int, generator: np.random.Generator) -> NDArray[Any]:
    if np.issubdtype(leaf.dtype, np.integer):
        return generator.integers(0, num_values, size=leaf.shape).astype(leaf.dtype)
    if leaf.dtype == np.bool_:
        return generator.integers(0, 2, size=leaf.shape).astype(leaf.dtype)
    return generator.standard_normal(size=leaf.shape, dtype=np.float32).astype(leaf.dtype)


def _generator(split: Split, seed: int, step: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, step, zlib.crc32(split.value.encode())])))


def _check_range(path: Path, tokens: NDArray[Any], vocabulary: int) -> None:
    low, high = int(tokens.min(initial=0)), int(tokens.max(initial=0))
    if low < 0 or high >= vocabulary:
        raise ConfigError(f"token file {path} holds token {low if low < 0 else high}, the model's vocabulary is 0 .. {vocabulary - 1}")


def _is_text(relative: Path) -> bool:
    return not _NOT_TEXT_OF_PYTHON_ITSELF & set(relative.parts)


def _fraction(purpose: str, name: str) -> float:
    """A number in [0, 1) that depends on nothing but the two texts."""
    return int.from_bytes(hashlib.sha256(f"{purpose}:{name}".encode()).digest()[:8], "big") / 2**64
