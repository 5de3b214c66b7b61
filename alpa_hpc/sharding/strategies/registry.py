"""The table of rules: primitive name -> rule. A primitive that is absent, or whose rule answers None, runs replicated and is reported."""

from functools import partial

from jax.extend.core import JaxprEqn

from alpa_hpc.sharding.strategies import batches, contraction, indexing, nested, random, shapes, windows
from alpa_hpc.sharding.strategies.elementwise import ELEMENTWISE, elementwise_rule
from alpa_hpc.sharding.strategies.rule import Combine, OpRule, RuleDraft, RuleFunction


def rule_of(eqn: JaxprEqn) -> OpRule | None:
    """The sharding rule of an equation; None means: run it whole on every device."""
    function = RULES.get(eqn.primitive.name)
    return None if function is None else function(eqn)


def whole_rule(eqn: JaxprEqn) -> OpRule:
    """The rule without factors: every operand and result whole on every device."""
    return RuleDraft.of(eqn).rule()


RULES: dict[str, RuleFunction] = {
    **dict.fromkeys(ELEMENTWISE, elementwise_rule),
    "transpose": shapes.transpose_rule,
    "broadcast_in_dim": shapes.broadcast_rule,
    "squeeze": shapes.squeeze_rule,
    "reshape": shapes.reshape_rule,
    "slice": shapes.slice_rule,
    "pad": shapes.pad_rule,
    "concatenate": shapes.concatenate_rule,
    "split": shapes.split_rule,
    "stack": shapes.stack_rule,
    "unstack": shapes.unstack_rule,
    "tile": shapes.tile_rule,
    "rev": shapes.rev_rule,
    "bitcast_convert_type": shapes.bitcast_rule,
    "iota": shapes.iota_rule,
    **dict.fromkeys(("optimization_barrier", "sharding_constraint", "layout_constraint", "device_put"), shapes.together_rule),
    "dynamic_slice": shapes.dynamic_slice_rule,
    "dynamic_update_slice": shapes.dynamic_update_slice_rule,
    **dict.fromkeys(("cumsum", "cumlogsumexp", "cummax", "cummin", "cumprod"), batches.along_rule("axis")),
    "sort": batches.along_rule("dimension"),
    "top_k": batches.along_rule("axis"),
    "approx_top_k": batches.along_rule("reduction_dimension"),
    **batches.LINEAR_ALGEBRA_RULES,
    "fft": batches.fft_rule,
    "dot_general": contraction.dot_general_rule,
    "ragged_dot_general": contraction.ragged_dot_rule,
    **dict.fromkeys(contraction.COMBINE, contraction.reduction_rule),
    **dict.fromkeys(("argmax", "argmin", "reduce_prod", "reduce_xor", "reduce"), contraction.kept_dims_rule),
    "conv_general_dilated": windows.convolution_rule,
    "reduce_window_sum": windows.pooling_rule(Combine.SUM),
    "reduce_window_max": windows.pooling_rule(Combine.MAX),
    "reduce_window_min": windows.pooling_rule(Combine.MIN),
    "reduce_window": windows.general_pooling_rule,
    "select_and_gather_add": windows.window_gather_rule,
    "select_and_scatter_add": windows.window_scatter_rule(elements=1, windows=0),
    "select_and_scatter": windows.window_scatter_rule(elements=0, windows=1),
    "gather": indexing.gather_rule,
    "scatter": indexing.scatter_rule(None),
    "scatter-add": indexing.scatter_rule(Combine.SUM),
    "scatter-sub": indexing.scatter_rule(Combine.SUM),
    "scatter-mul": indexing.scatter_rule(None),
    "scatter-min": indexing.scatter_rule(Combine.MIN),
    "scatter-max": indexing.scatter_rule(Combine.MAX),
    "random_bits": random.bits_rule,
    "random_split": random.split_rule,
    "random_wrap": random.prefix_rule,
    "random_unwrap": random.prefix_rule,
    **dict.fromkeys(("scan", "while", "cond"), partial(nested.nested_rule, rule_of)),
    "random_gamma": random.gamma_rule,
    **dict.fromkeys(("random_seed", "random_fold_in", "random_clone"), random.keyed_rule),
}
