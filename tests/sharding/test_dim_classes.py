"""In a GPT layer the sequence and the head size are not worth splitting; batch, heads and hidden size are."""

from functools import cache

from jax.extend.core import Var

from alpa_hpc.ir.work import LayeredStep
from alpa_hpc.layers.options import LayerOptions
from alpa_hpc.models.gpt import GPT
from alpa_hpc.sharding.dim_classes import awkward_dims, awkward_values
from alpa_hpc.sharding.strategies.rule import shape_of
from alpa_hpc.training.prepare import prepare
from tests.planning import TRAINING

ROWS, HEADS, SIZE, SEQUENCE, VOCAB = 4, 3, 5, 7, 11  # all sizes differ, so that a size names its dim
HIDDEN = HEADS * SIZE
NAMES = {ROWS: "batch", HEADS: "heads", SIZE: "size", SEQUENCE: "sequence", HIDDEN: "hidden", 4 * HIDDEN: "up", VOCAB: "vocab"}


@cache
def step() -> LayeredStep:
    model = GPT(num_layers=4, hidden=HIDDEN, num_heads=HEADS, vocab=VOCAB, sequence=SEQUENCE)
    return prepare(model, TRAINING, LayerOptions(num_layers=4, imbalance=1.0), TRAINING.batch_size // ROWS).step


def named(var: Var) -> list[str]:
    return [NAMES.get(size, str(size)) for size in shape_of(var)]


@cache
def kinds() -> tuple[set[str], set[str]]:
    """Names of the dims that are awkward somewhere in a layer in the middle, and of those that are not, where some dim is left to split."""
    awkward: set[str] = set()
    good: set[str] = set()
    for var, dims in awkward_dims(step().layers[1]).items():
        for d, name in enumerate(named(var)):
            (awkward if d in dims else good).add(name)
    return awkward & set(NAMES.values()), good & set(NAMES.values())


def test_sequence_and_head_size_are_awkward_and_nothing_else():
    awkward, good = kinds()
    assert awkward == {"sequence", "size"}
    assert {"batch", "heads", "hidden", "up"} <= good
    assert not awkward & good


def test_forward_and_backward_agree_on_activations_and_their_cotangents():
    layer = step().layers[1]
    dims = awkward_dims(layer)
    of_shape: dict[tuple[int, ...], set[frozenset[int]]] = {}
    for var, found in dims.items():
        of_shape.setdefault(shape_of(var), set()).add(found)
    assert of_shape[ROWS, SEQUENCE, HIDDEN] == {frozenset({1})}
    assert of_shape[ROWS, HEADS, SEQUENCE, SEQUENCE] == {frozenset({2, 3})}
    assert of_shape[ROWS, SEQUENCE, HEADS, SIZE] == {frozenset({1, 3})}


def test_values_between_layers_may_not_be_split_by_the_sequence():
    values = awkward_values(step())
    activations = [value for value, aval in step().values.items() if aval.shape == (ROWS, SEQUENCE, HIDDEN)]
    assert len(activations) >= 3
    assert {values[value] for value in activations} == {frozenset({1})}


def test_a_tensor_of_awkward_dims_alone_keeps_them():
    for dims, var in ((dims, var) for var, dims in awkward_dims(step().layers[1]).items()):
        assert len(dims) < len(shape_of(var)), f"{named(var)} would have no dim left to split"
