"""Batches are a pure function of (split, seed, step), the two splits share no file, and bad files are refused with a reason."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from alpa_hpc.errors import ConfigError
from alpa_hpc.training.data import ByteCorpus, Split, byte_corpus, open_data, standard_library_corpus, token_file
from alpa_hpc.training.options import DataKind, DataOptions

STDLIB = DataOptions(kind=DataKind.STDLIB_BYTES, path="", held_out_fraction=0.1)
SYNTHETIC = DataOptions(kind=DataKind.SYNTHETIC, path="", held_out_fraction=0.0)
IMAGES = DataOptions(kind=DataKind.SYNTHETIC_IMAGES, path="", held_out_fraction=0.0)


@dataclass(frozen=True)
class Shapes:
    """A model of which only `batch` is asked."""

    dtype: Any = np.int32

    def init(self, key: jax.Array) -> Any:
        raise AssertionError

    def loss(self, params: Any, batch: Any, key: jax.Array) -> jax.Array:
        raise AssertionError

    def batch(self, batch_size: int) -> Any:
        return {"tokens": jax.ShapeDtypeStruct((batch_size, 17), self.dtype)}


@dataclass(frozen=True)
class Images(Shapes):
    """Batches of floats and labels."""

    def batch(self, batch_size: int) -> Any:
        return {"x": jax.ShapeDtypeStruct((batch_size, 3), np.float32), "y": jax.ShapeDtypeStruct((batch_size,), np.int32)}


@pytest.fixture(scope="module")
def corpus() -> ByteCorpus:
    return standard_library_corpus(sequence=16, held_out_fraction=0.1)


def test_no_file_is_in_both_parts(corpus: ByteCorpus) -> None:
    training, held_out = (corpus.files[split] for split in Split)
    assert not set(training) & set(held_out)
    assert len(set(training)) == len(training) > 100
    assert len(held_out) > 10
    assert not any("test" in Path(name).parts or "site-packages" in Path(name).parts for name in training + held_out)
    sizes = {split: tokens.size for split, tokens in corpus.tokens.items()}
    assert 4e6 < sum(sizes.values()) <= 8e6
    assert 0.04 < sizes[Split.HELD_OUT] / sum(sizes.values()) < 0.2


def test_the_same_step_is_the_same_batch_in_any_process_and_order(corpus: ByteCorpus) -> None:
    again = standard_library_corpus(sequence=16, held_out_fraction=0.1)
    again.batch(Split.TRAINING, 4, seed=0, step=99)
    first, second = (source.batch(Split.TRAINING, 4, seed=0, step=3)["tokens"] for source in (corpus, again))
    assert first.shape == (4, 17)
    assert first.dtype == np.int32
    np.testing.assert_array_equal(first, second)
    for other in ((Split.TRAINING, 4, 0, 4), (Split.TRAINING, 4, 1, 3), (Split.HELD_OUT, 4, 0, 3)):
        assert not np.array_equal(first, corpus.batch(*other)["tokens"])


def test_windows_are_text_of_their_own_split(corpus: ByteCorpus) -> None:
    for split in Split:
        text = corpus.tokens[split].tobytes()
        for row in corpus.batch(split, 8, seed=1, step=2)["tokens"]:
            assert row.astype(np.uint8).tobytes() in text


def write_texts(folder: Path, count: int, size: int) -> None:
    for number in range(count):
        (folder / f"file{number}.py").write_bytes(bytes([number]) * size)


def test_the_corpus_is_bounded_and_holds_out_what_is_asked(tmp_path: Path) -> None:
    write_texts(tmp_path, 40, 100)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "not_this.py").write_text("x")
    assert sum(tokens.size for tokens in byte_corpus(tmp_path, 1500, 4, 0.3).tokens.values()) == 1500
    whole = byte_corpus(tmp_path, 10**6, 4, 0.0)
    assert len(whole.files[Split.TRAINING]) == 40
    with pytest.raises(ConfigError, match="held_out part has 0 tokens"):
        whole.batch(Split.HELD_OUT, 1, 0, 0)
    with pytest.raises(ConfigError, match="too few"):
        byte_corpus(tmp_path / "tests", 10**6, 4, 0.5)
    with pytest.raises(ConfigError, match="a window needs 5001"):
        byte_corpus(tmp_path, 10**6, 5000, 0.3).batch(Split.TRAINING, 1, 0, 0)


@pytest.mark.parametrize("name", ["tokens.npy", "tokens.bin"])
def test_a_token_file_is_read_and_its_end_held_out(tmp_path: Path, name: str) -> None:
    tokens = np.arange(1000, dtype=np.uint16)
    path = tmp_path / name
    np.save(path, tokens) if name.endswith("npy") else tokens.tofile(path)
    source = token_file(path, vocabulary=1000, sequence=9, held_out_fraction=0.2)
    for split, low, high in ((Split.TRAINING, 0, 800), (Split.HELD_OUT, 800, 1000)):
        batch = np.concatenate([source.batch(split, 16, 0, step)["tokens"] for step in range(20)])
        assert batch.min() >= low
        assert batch.max() < high
        assert (np.diff(batch, axis=1) == 1).all()


def test_bad_token_files_are_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "tokens.npy"
    with pytest.raises(ConfigError, match=r"tokens\.npy is not there"):
        token_file(path, 10, 4, 0.0)
    path.write_bytes(b"not numpy")
    with pytest.raises(ConfigError, match="cannot be read"):
        token_file(path, 10, 4, 0.0)
    for wrong, match in (
        (np.zeros((3, 3), int), "shape"),
        (np.zeros(9, float), "float64"),
        (np.full(9, 10), "holds token 10"),
        (np.full(9, -1), "token -1"),
    ):
        np.save(path, wrong)
        with pytest.raises(ConfigError, match=match):
            token_file(path, 10, 4, 0.0)
    np.save(path, np.zeros(9, int))
    with pytest.raises(ConfigError, match="has 5 tokens for training, a window needs 9"):
        token_file(path, 10, 8, 0.5)
    (tmp_path / "odd.bin").write_bytes(b"abc")
    with pytest.raises(ConfigError, match=r"odd\.bin cannot be read"):
        token_file(tmp_path / "odd.bin", 10, 4, 0.0)


def test_a_token_outside_the_vocabulary_is_found_when_drawn(tmp_path: Path) -> None:
    tokens = np.zeros((1 << 20) + 64, np.uint16)
    tokens[1 << 20 :] = 77
    tokens.tofile(tmp_path / "late.bin")
    source = token_file(tmp_path / "late.bin", 50, 31, 0.00004)
    with pytest.raises(ConfigError, match="holds token 77"):
        source.batch(Split.HELD_OUT, 4, 0, 0)


def test_the_source_fits_the_model_or_is_refused(tmp_path: Path) -> None:
    assert open_data(STDLIB, Shapes(), 256).batch(Split.TRAINING, 2, 0, 0)["tokens"].shape == (2, 17)
    with pytest.raises(ConfigError, match="knows 100 tokens, bytes need 256"):
        open_data(STDLIB, Shapes(), 100)
    for model in (Images(), Shapes(np.int16)):
        for num_values in (256, 5):  # a model of something else than text hears of that, not of its vocabulary
            with pytest.raises(ConfigError, match="data=synthetic"):
                open_data(STDLIB, model, num_values)
    path = tmp_path / "t.bin"
    np.zeros(100, np.uint16).tofile(path)
    options = DataOptions(kind=DataKind.TOKEN_FILE, path=str(path), held_out_fraction=0.2)
    assert open_data(options, Shapes(), 5).batch(Split.HELD_OUT, 2, 0, 0)["tokens"].shape == (2, 17)


def test_synthetic_batches_have_the_models_structure() -> None:
    source = open_data(SYNTHETIC, Images(), 7)
    batch, again = (source.batch(Split.TRAINING, 64, 0, 5) for _ in range(2))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), batch) == {"x": ((64, 3), np.float32), "y": ((64,), np.int32)}
    assert set(batch["y"]) == set(range(7))
    jax.tree.map(np.testing.assert_array_equal, batch, again)


def test_bools_are_drawn_too() -> None:
    [drawn] = open_data(SYNTHETIC, Shapes(np.bool_), 0).batch(Split.TRAINING, 4, 0, 0).values()
    assert drawn.dtype == np.bool_ and 0 < drawn.mean() < 1


def test_integers_of_an_unknown_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="`vocab` .* or `num_classes`"):
        open_data(SYNTHETIC, Images(), 0)
    floats = open_data(SYNTHETIC, Shapes(np.float32), 0)
    assert floats.batch(Split.TRAINING, 2, 0, 0)["tokens"].dtype == np.float32


@dataclass(frozen=True)
class Pictures(Shapes):
    """Batches of images and labels."""

    name: str = "labels"

    def batch(self, batch_size: int) -> Any:
        return {
            "images": jax.ShapeDtypeStruct((batch_size, 10, 6, 3), np.float32),
            self.name: jax.ShapeDtypeStruct((batch_size,), np.int32),
        }


def test_synthetic_images_show_their_class_in_noise() -> None:
    source = open_data(IMAGES, Pictures(), 5)
    batch, again = (source.batch(Split.TRAINING, 400, 0, 5) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, batch, again)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), batch) == {
        "images": ((400, 10, 6, 3), np.float32),
        "labels": ((400,), np.int32),
    }
    assert set(batch["labels"]) == set(range(5))
    held_out = open_data(IMAGES, Pictures(), 5).batch(Split.HELD_OUT, 400, 7, 0)
    assert not np.array_equal(held_out["images"], batch["images"])
    means = np.stack([batch["images"][batch["labels"] == label].mean(axis=0) for label in range(5)])
    nearest = ((held_out["images"][:, None] - means) ** 2).sum(axis=(2, 3, 4)).argmin(axis=1)
    assert (nearest == held_out["labels"]).mean() > 0.95, "what one split shows, the other one can be told by"
    assert means.std() == pytest.approx(1, abs=0.3)
    noise = batch["images"] - means[batch["labels"]]
    assert noise.std() == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("model", [Images(), Pictures(name="classes"), Shapes()])
def test_synthetic_images_need_a_model_of_images(model: Shapes) -> None:
    with pytest.raises(ConfigError, match="synthetic images need a model .* use data=synthetic"):
        open_data(IMAGES, model, 5)
