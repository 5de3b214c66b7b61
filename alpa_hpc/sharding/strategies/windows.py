"""Operators that look at windows: convolutions, pooling and its gradients. Only windows that no cut divides can be split without a halo."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jax.extend.core import JaxprEqn

from alpa_hpc.ir.graph import Atom
from alpa_hpc.sharding.strategies.rule import Combine, OpRule, RuleDraft, shape_of


@dataclass(frozen=True, slots=True)
class WindowedDim:
    """One dim of a windowed operator: its size, the number of windows, and how they lie (dilations in the usual sense)."""

    size: int
    num_windows: int
    window: int
    stride: int = 1
    padding: tuple[int, int] = (0, 0)
    base_dilation: int = 1
    window_dilation: int = 1

    @property
    def is_apart(self) -> bool:
        """Whether each window stands in its own `stride` elements: then a piece of the dim makes a piece of the result."""
        reach = (self.window - 1) * self.window_dilation + 1
        return self._is_plain and reach <= self.stride and self.size == self.num_windows * self.stride

    @property
    def is_whole(self) -> bool:
        """Whether one window covers all of the dim: then it is a reduction."""
        return self._is_plain and self.window_dilation == 1 and self.num_windows == 1 and self.window == self.size > 1

    @property
    def _is_plain(self) -> bool:
        return self.padding == (0, 0) and self.base_dilation == 1


def convolution_rule(eqn: JaxprEqn) -> OpRule:
    """Factors: batch, output channels, input channels (summed), groups of channels or of the batch, and places without overlap.

    The gradients of a convolution are convolutions with the dims in other roles (the batch is summed as an input channel), so what a dim
    means is read off `dimension_numbers`. Groups lie outermost in the dims that they share.
    """
    params = eqn.params
    numbers, groups, batch_groups = params["dimension_numbers"], params["feature_group_count"], params["batch_group_count"]
    left, right, shape = shape_of(eqn.invars[0]), shape_of(eqn.invars[1]), shape_of(eqn.outvars[0])
    (batch, channel, *places), (kernel_out, kernel_in, *kernel), (out_batch, out_channel, *out) = (
        numbers.lhs_spec,
        numbers.rhs_spec,
        numbers.out_spec,
    )
    draft = RuleDraft.of(eqn)
    if batch_groups > 1:
        draft.factor(batch_groups, {0: batch, 1: kernel_out}, {0: out_channel})
    else:
        draft.factor(left[batch], {0: batch}, {0: out_batch})
    if groups > 1:
        draft.factor(groups, {0: channel, 1: kernel_out}, {0: out_channel})
    else:
        draft.factor(left[channel], {0: channel, 1: kernel_in}, combine=Combine.SUM)
    if groups == batch_groups == 1:
        draft.factor(right[kernel_out], {1: kernel_out}, {0: out_channel})
    for i, (place, kernel_place, out_place) in enumerate(zip(places, kernel, out, strict=True)):
        dim = WindowedDim(
            left[place],
            shape[out_place],
            right[kernel_place],
            params["window_strides"][i],
            tuple(params["padding"][i]),
            params["lhs_dilation"][i],
            params["rhs_dilation"][i],
        )
        if dim.is_whole:
            draft.factor(dim.size, {0: place, 1: kernel_place}, combine=Combine.SUM)
        elif dim.is_apart:
            draft.factor(dim.num_windows, {0: place}, {0: out_place})
    return draft.rule()


def pooling_rule(combine: Combine) -> Callable[[JaxprEqn], OpRule]:
    """reduce_window_sum, _max, _min: dims whose windows do not overlap; a dim under one window is reduced."""
    return lambda eqn: _pooled(eqn, eqn.invars[0], eqn.outvars[0], 1, combine).rule(linear=combine is Combine.SUM)


def general_pooling_rule(eqn: JaxprEqn) -> OpRule:
    """reduce_window by any function: several arrays of one shape, then their initial scalars."""
    return _pooled(eqn, eqn.invars[0], eqn.outvars[0], len(eqn.outvars)).rule()


def window_gather_rule(eqn: JaxprEqn) -> OpRule:
    """select_and_gather_add: both operands have the elements, the result one value a window."""
    return _pooled(eqn, eqn.invars[0], eqn.outvars[0], 2).rule()


def window_scatter_rule(elements: int, windows: int) -> Callable[[JaxprEqn], OpRule]:
    """The gradient of pooling by choice: the result lies as operand number `elements`; operand `windows` has one value a window."""
    return lambda eqn: _pooled(eqn, eqn.invars[elements], eqn.invars[windows], 2).rule()


def _pooled(eqn: JaxprEqn, wide: Atom, narrow: Atom, num_operands: int, combine: Combine | None = None) -> RuleDraft:
    """The first operands and all results are split where windows of `wide`, one for each element of `narrow`, stand apart."""
    draft = RuleDraft.of(eqn)
    for d, dim in enumerate(_windowed_dims(eqn.params, shape_of(wide), shape_of(narrow))):
        if combine is not None and dim.is_whole:
            draft.factor(dim.size, {0: d}, combine=combine)
        elif dim.is_apart:
            draft.factor(dim.num_windows, dict.fromkeys(range(num_operands), d), dict.fromkeys(range(len(eqn.outvars)), d))
    return draft


def _windowed_dims(params: Mapping[str, Any], sizes: tuple[int, ...], counts: tuple[int, ...]) -> list[WindowedDim]:
    once = (1,) * len(sizes)
    columns = zip(
        sizes,
        counts,
        params["window_dimensions"],
        params["window_strides"],
        map(tuple, params["padding"]),
        params.get("base_dilation", once),
        params.get("window_dilation", once),
        strict=True,
    )
    return [WindowedDim(*column) for column in columns]
