"""Dims of variables that are split together: a union-find with marks."""

from collections.abc import Iterator

from jax.extend.core import JaxprEqn, Var

from alpa_hpc.sharding.strategies.rule import UNSPLIT, OpRule, shape_of

Dim = tuple[Var, int]


class DimSets:
    """Classes of dims; a class is marked if one of its dims is."""

    def __init__(self) -> None:
        self._parent: dict[Dim, Dim] = {}
        self._marked: set[Dim] = set()

    def find(self, dim: Dim) -> Dim:
        """The representative of a dim's class."""
        root = dim
        while (above := self._parent.get(root, root)) != root:
            root = above
        self._parent[dim] = root
        return root

    def join(self, a: Dim, b: Dim) -> None:
        """Make two classes one."""
        self._parent[self.find(a)] = self.find(b)

    def mark(self, dim: Dim) -> None:
        """Mark a dim, and so its class."""
        self._marked.add(dim)

    def marked_roots(self) -> frozenset[Dim]:
        """The representatives of the marked classes."""
        return frozenset(self.find(dim) for dim in self._marked)


def dims_of(var: Var) -> list[Dim]:
    """The dims of a variable."""
    return [(var, d) for d in range(len(shape_of(var)))]


def factor_dims(eqn: JaxprEqn, rule: OpRule) -> Iterator[tuple[int, Dim]]:
    """(factor, dim) for every dim of a variable of the equation, once for each place where it stands, that belongs to a factor."""
    return ((factor, dim) for factor, dim in _placed_dims(eqn, rule) if factor != UNSPLIT)


def whole_dims(eqn: JaxprEqn, rule: OpRule) -> Iterator[Dim]:
    """The dims of more than one element that the equation must have whole in some place."""
    return ((var, d) for factor, (var, d) in _placed_dims(eqn, rule) if factor == UNSPLIT and shape_of(var)[d] > 1)


def _placed_dims(eqn: JaxprEqn, rule: OpRule) -> Iterator[tuple[int, Dim]]:
    for atom, factors in (*zip(eqn.invars, rule.operands, strict=True), *zip(eqn.outvars, rule.results, strict=True)):
        if isinstance(atom, Var):
            yield from ((factor, (atom, d)) for d, factor in enumerate(factors))
