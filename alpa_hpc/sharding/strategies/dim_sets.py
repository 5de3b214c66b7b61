"""Dims of variables that are split together: a union-find with marks."""

from jax.extend.core import Var

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
