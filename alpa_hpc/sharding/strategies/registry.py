"""The table of rules: primitive name -> rule. A primitive that is absent, or whose rule answers None, runs replicated and is reported."""

from jax.extend.core import JaxprEqn

from alpa_hpc.sharding.strategies import contraction, indexing, shapes
from alpa_hpc.sharding.strategies.elementwise import ELEMENTWISE, elementwise_rule
from alpa_hpc.sharding.strategies.rule import UNSPLIT, OpRule, RuleFunction, shape_of

RULES: dict[str, RuleFunction] = {
    **{name: elementwise_rule for name in ELEMENTWISE},
    "transpose": shapes.transpose_rule,
    "broadcast_in_dim": shapes.broadcast_rule,
    "squeeze": shapes.squeeze_rule,
    "reshape": shapes.reshape_rule,
    "slice": shapes.slice_rule,
    "pad": shapes.pad_rule,
    "concatenate": shapes.concatenate_rule,
    "split": shapes.split_rule,
    "rev": shapes.rev_rule,
    "dynamic_slice": shapes.dynamic_slice_rule,
    "dynamic_update_slice": shapes.dynamic_update_slice_rule,
    "cumsum": shapes.along_axis_rule,
    "cumlogsumexp": shapes.along_axis_rule,
    "cummax": shapes.along_axis_rule,
    "cummin": shapes.along_axis_rule,
    "cumprod": shapes.along_axis_rule,
    "dot_general": contraction.dot_general_rule,
    "reduce_sum": contraction.reduction_rule,
    "reduce_max": contraction.reduction_rule,
    "reduce_min": contraction.reduction_rule,
    "reduce_and": contraction.reduction_rule,
    "reduce_or": contraction.reduction_rule,
    "argmax": contraction.arg_reduction_rule,
    "argmin": contraction.arg_reduction_rule,
    "gather": indexing.gather_rule,
    "scatter-add": indexing.scatter_add_rule,
}

CONTRACTIONS = frozenset({"dot_general", "gather", "scatter-add"})


def rule_of(eqn: JaxprEqn) -> OpRule | None:
    """The sharding rule of an equation; None means: run it whole on every device."""
    function = RULES.get(eqn.primitive.name)
    return None if function is None else function(eqn)


def whole_rule(eqn: JaxprEqn) -> OpRule:
    """The rule without factors: every operand and result whole on every device."""
    unsplit = tuple((UNSPLIT,) * len(shape_of(atom)) for atom in eqn.invars)
    return OpRule((), unsplit, tuple((UNSPLIT,) * len(shape_of(var)) for var in eqn.outvars))
