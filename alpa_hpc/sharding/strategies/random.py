"""Random numbers: what a device draws for its tile must be what the whole array has there.

That holds for threefry, which maps (key, number of the element) to bits. Of other generators, batches of keys are not drawn key by key,
so they run whole.
"""

from functools import cache
from math import prod

import jax
from jax.extend.core import JaxprEqn

from alpa_hpc.ir.graph import Atom, aval_of
from alpa_hpc.sharding.strategies.elementwise import elementwise_rule
from alpa_hpc.sharding.strategies.rule import OpRule, RuleDraft, shape_of


def bits_rule(eqn: JaxprEqn) -> OpRule | None:
    """Random bits: keys are a batch; where bits are counter-based, every dim is a factor, for a device can draw its own."""
    if not _is_threefry(eqn.invars[0]):
        return None
    draft = RuleDraft.of(eqn)
    num_keys = len(shape_of(eqn.invars[0]))
    counted = jax.threefry_partitionable.value and prod(eqn.params["shape"]) <= 1 << 32  # the element's number is one word
    for d, size in enumerate(shape_of(eqn.outvars[0])):
        if d < num_keys:
            draft.factor(size, {0: d}, {0: d})
        elif counted:
            draft.factor(size, {}, {0: d})
    return draft.rule()


def prefix_rule(eqn: JaxprEqn) -> OpRule:
    """Keys and their words: the dims of the keys begin both shapes."""
    draft = RuleDraft.of(eqn)
    operand, result = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    for d in range(min(len(operand), len(result))):
        draft.factor(operand[d], {0: d}, {0: d})
    return draft.rule()


def split_rule(eqn: JaxprEqn) -> OpRule | None:
    """New keys from each of a batch of keys."""
    return prefix_rule(eqn) if _is_threefry(eqn.invars[0]) else None


def gamma_rule(eqn: JaxprEqn) -> OpRule | None:
    """Samples for parameters `a`, whose dims begin with those of the keys; further dims share a key, which is split for all of them."""
    if not _is_threefry(eqn.invars[0]):
        return None
    draft = RuleDraft.of(eqn)
    for d, size in enumerate(shape_of(eqn.invars[0])):
        draft.factor(size, {0: d, 1: d}, {0: d})
    return draft.rule()


def keyed_rule(eqn: JaxprEqn) -> OpRule | None:
    """Key by key: seeds to keys, a number folded into each."""
    return elementwise_rule(eqn) if _is_threefry(eqn.invars[0]) or _is_threefry(eqn.outvars[0]) else None


def _is_threefry(keys: Atom) -> bool:
    return aval_of(keys).dtype == _threefry_dtype()


@cache
def _threefry_dtype() -> object:
    return jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")).dtype
