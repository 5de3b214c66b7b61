"""How one tensor lies on a logical mesh: for each dim the axes that split it, and the axes over which it is a partial sum."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from alpa_hpc.cluster.hardware import MeshShape

AXES = (0, 1)


@dataclass(frozen=True, slots=True, order=True)
class Spec:
    """`dims[d]` = mesh axes splitting dim d, major first (`()` = R, `(0,)` = S0, `(1,)` = S1, `(0, 1)` = S01).

    `partial` = axes over which the devices hold summands of the value ("unreduced"); a mesh axis occurs at most once in all.
    """

    dims: tuple[tuple[int, ...], ...]
    partial: tuple[int, ...] = ()
    _hash: int = field(
        init=False, repr=False, compare=False
    )  # specs are the keys of every price: hashing them anew took a third of the time

    def __post_init__(self) -> None:
        used = [axis for dim in self.dims for axis in dim] + list(self.partial)
        assert len(used) == len(set(used)), f"axis used twice in {self}"
        object.__setattr__(self, "_hash", hash((self.dims, self.partial)))

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        text = ",".join("S" + "".join(map(str, dim)) if dim else "R" for dim in self.dims)
        return f"[{text}]" + ("+U" + "".join(map(str, self.partial)) if self.partial else "")

    def num_shards(self, mesh: MeshShape) -> int:
        """Number of distinct tiles of the tensor."""
        shards = 1
        for dim in self.dims:
            for axis in dim:
                shards *= mesh.sizes[axis]
        return shards

    def local_shape(self, shape: tuple[int, ...], mesh: MeshShape) -> tuple[int, ...]:
        """Shape of one device's tile."""
        return tuple(size // split_of(dim, mesh) for size, dim in zip(shape, self.dims, strict=True))

    def whole_shape(self, tile: tuple[int, ...], mesh: MeshShape) -> tuple[int, ...]:
        """Shape of the array that has tiles of shape `tile`."""
        return tuple(size * split_of(dim, mesh) for size, dim in zip(tile, self.dims, strict=True))


SpecList = tuple[Spec, ...]


def split_of(axes: tuple[int, ...], mesh: MeshShape) -> int:
    """Into how many pieces `axes` split a dim."""
    split = 1
    for axis in axes:
        split *= mesh.sizes[axis]
    return split


def subsets(axes: Sequence[int]) -> list[tuple[int, ...]]:
    """Some of `axes`, in every way, none first."""
    found: list[tuple[int, ...]] = [()]
    for axis in axes:
        found += [(*subset, axis) for subset in found]
    return found


def common_spec(specs: Sequence[Spec]) -> Spec:
    """The splits of which all specs are further splits."""
    return Spec(tuple(_common_splits(dims) for dims in zip(*(spec.dims for spec in specs), strict=True)))


def _common_splits(splits: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """The longest beginning that all splits of one dim share."""
    common: list[int] = []
    for axes in zip(*splits, strict=False):
        if len(set(axes)) > 1:
            break
        common.append(axes[0])
    return tuple(common)


def replicated(rank: int) -> Spec:
    """The spec of a tensor held whole by every device."""
    return Spec(((),) * rank)


def tile_index(axes: tuple[int, ...], row: int, col: int, mesh: MeshShape) -> int:
    """Which piece of a dim split by `axes` device (row, col) holds: axis-major, so (0, 1) gives row * cols + col."""
    index = 0
    for axis in axes:
        index = index * mesh.sizes[axis] + (row, col)[axis]
    return index


def fits(spec: Spec, shape: tuple[int, ...], mesh: MeshShape) -> bool:
    """Whether every split dim divides evenly (only such specs are planned)."""
    return all(size % split_of(dim, mesh) == 0 for size, dim in zip(shape, spec.dims, strict=True))
