"""A state, any pytree that a user likes -> the arrays that are trained and placed, and back.

A PRNG key is kept as its raw data. What is no array (a function among the fields of an equinox module, a string) stays as it is, in the
tree: a step must hand it on. A Python number that a step hands on stays too, like a rate of dropout; one that it changes is an array.
"""

import reprlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_flatten_with_path

from alpa_hpc.errors import TraceError


@dataclass(frozen=True, slots=True)
class _Static:
    """A leaf that is no array."""

    value: Any


@dataclass(frozen=True, slots=True)
class _Key:
    """A leaf of PRNG keys, and their implementation."""

    impl: str


@dataclass(frozen=True, slots=True)
class _Array:
    """A leaf of numbers."""


_Kind = _Static | _Key | _Array


@dataclass(frozen=True, slots=True, eq=False)
class StateLayout:
    """How a state is made of arrays: its tree, what each leaf of the tree is, and the names of those that are arrays or keys."""

    tree: Any
    kinds: tuple[_Kind, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, state: object, changed: Collection[int] = ()) -> "StateLayout":
        """The layout of a state of arrays, of shapes, or of both; Python numbers stay, but for the leaves number `changed`."""
        pairs, tree = tree_flatten_with_path(state)
        kinds = tuple(_Array() if place in changed else _kind(leaf) for place, (_, leaf) in enumerate(pairs))
        named = zip(pairs, kinds, strict=True)
        names = tuple(keystr(path, simple=True, separator="/") for (path, _), kind in named if not isinstance(kind, _Static))
        return cls(tree, kinds, names)

    @property
    def numbers(self) -> dict[int, int | float | complex]:
        """The Python numbers that stay, by position among all leaves of the tree."""
        return {place: kind.value for place, kind in enumerate(self.kinds) if isinstance(kind, _Static) and is_number(kind.value)}

    def arrays(self, state: object) -> list[Any]:
        """The arrays of a state of this layout, keys as raw data (of shapes: theirs).

        Raises:
            TraceError: the state is built otherwise, or has another value where there is no array.
        """
        tree = jax.tree.structure(state)
        if tree != self.tree:
            raise TraceError(f"the new state must have the structure of the state: {self.tree}, found {tree}.")
        found: list[Any] = []
        for (path, leaf), kind in zip(tree_flatten_with_path(state)[0], self.kinds, strict=True):
            match kind:
                case _Static(value):
                    _check_handed_on(keystr(path, simple=True, separator="/"), value, leaf)
                case _Key():
                    found.append(key_data(leaf))
                case _Array():
                    found.append(leaf)
        return found

    def state(self, arrays: Sequence[Any]) -> Any:
        """The state that is made of these arrays."""
        remaining = iter(arrays)
        leaves: list[Any] = []
        for kind in self.kinds:
            match kind:
                case _Static(value):
                    leaves.append(value)
                case _Key(impl):
                    leaves.append(jax.random.wrap_key_data(jnp.asarray(next(remaining)), impl=impl))
                case _Array():
                    leaves.append(next(remaining))
        return jax.tree.unflatten(self.tree, leaves)


def key_data(keys: Any) -> Any:
    """The raw data of PRNG keys, or its shape where `keys` are shapes; what is raw data already stays."""
    if not is_key(keys):
        return keys
    return jax.eval_shape(jax.random.key_data, keys) if isinstance(keys, jax.ShapeDtypeStruct) else jax.random.key_data(keys)


def is_key(leaf: Any) -> bool:
    """Whether an array or an aval is of PRNG keys."""
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array, of jax or numpy, or its shape."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def is_number(leaf: Any) -> bool:
    """Whether a leaf is a number of Python, a flag among them."""
    return isinstance(leaf, int | float | complex) and not is_array(leaf)


def layout_of(step: Callable[[Any, Any], Any], state: object, batch: object) -> StateLayout:
    """The layout of `state`. Where it holds Python numbers, a trial trace with shapes `batch` shows which of them the step hands on.

    A number that comes out as it went in stays so for ever. Where the trial fails, all of them are arrays, as they are for `jax.jit`.
    """
    layout = StateLayout.of(state)
    if not layout.numbers:
        return layout
    results: list[Any] = []

    def on_arrays(arrays: Sequence[Any], batch: Any) -> None:
        results.append(step(layout.state(arrays), batch))

    try:
        jax.eval_shape(on_arrays, shapes_of(layout.arrays(state)), batch)
        new_leaves, tree = jax.tree.flatten(results[0][0])
        if tree != layout.tree:
            return layout
        changed = [place for place, number in layout.numbers.items() if not is_number(new_leaves[place]) or new_leaves[place] != number]
    except Exception:  # noqa: BLE001 - whatever a step that wants an array does with a number; it is traced again, and what fails then is told
        changed = list(layout.numbers)
    return StateLayout.of(state, changed)


def shapes_of(tree: Any) -> Any:
    """A pytree's shapes and dtypes, as jax would take them: a Python float is a float32 scalar. TraceError for what it does not take."""
    try:
        return jax.eval_shape(lambda whole: whole, tree)
    except TypeError as error:
        path, leaf = next((path, leaf) for path, leaf in tree_flatten_with_path(tree)[0] if not _is_taken(leaf))
        name = keystr(path, simple=True, separator="/")
        raise TraceError(f"leaf '{name}' of the batch is {reprlib.repr(leaf)}, expected an array of numbers, or a number.") from error


def _is_taken(leaf: Any) -> bool:
    try:
        jax.eval_shape(lambda part: part, leaf)
    except TypeError:
        return False
    return True


def _kind(leaf: Any) -> _Kind:
    if is_array(leaf):
        return _Key(key_impl(leaf)) if is_key(leaf) else _Array()
    return _Static(leaf)


def key_impl(keys: Any) -> str:
    """The implementation of PRNG keys (arrays, shapes or avals)."""
    found: list[str] = []
    jax.eval_shape(lambda key: found.append(str(jax.random.key_impl(key))), jax.ShapeDtypeStruct(keys.shape, keys.dtype))
    return found[0]


def _check_handed_on(name: str, value: Any, leaf: Any) -> None:
    if leaf is not value and (is_array(leaf) or leaf != value):
        raise TraceError(
            f"state leaf '{name}' is {value!r}, which is no array and so must stay as it is; the step makes {leaf!r} of it. "
            "If it is to change, put it into the state as an array."
        )
