"""Transfers deliver every element exactly once, and no more bytes than they must."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_hpc.cluster.hardware import MeshShape
from alpa_hpc.errors import ProgramError
from alpa_hpc.runtime.instructions import Layout
from alpa_hpc.runtime.transfer import lower_bound_bytes, plan_transfer, receive_layout, wire_bytes
from alpa_hpc.sharding.spec import Spec, fits, tile_index

MESHES = [MeshShape(*sizes) for sizes in [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (2, 4), (3, 1), (2, 3)]]
SPLITS = [(), (0,), (1,), (0, 1), (1, 0)]


@st.composite
def specs(draw: st.DrawFn, num_dims: int) -> Spec:
    """A spec that uses each mesh axis at most once."""
    left, dims = {0, 1}, list[tuple[int, ...]]()
    for _ in range(num_dims):
        dims.append(draw(st.sampled_from([split for split in SPLITS if left.issuperset(split)])))
        left -= set(dims[-1])
    return Spec(tuple(dims))


@st.composite
def layouts(draw: st.DrawFn, num_dims: int) -> Layout:
    """A layout of an array whose dims divide by 24, so that every split of every mesh fits."""
    return Layout((24,) * num_dims, "float32", draw(specs(num_dims)), draw(st.sampled_from(MESHES)))


PAIRS = st.integers(0, 3).flatmap(lambda num_dims: st.tuples(layouts(num_dims), layouts(num_dims)))


def scatter(array: np.ndarray, layout: Layout) -> list[np.ndarray]:
    """What each device holds; written apart from the code under test, by splitting dim by dim."""
    parts: list[np.ndarray] = []
    for row in range(layout.mesh.rows):
        for col in range(layout.mesh.cols):
            part = array
            for dim, axes in enumerate(layout.spec.dims):
                pieces = math.prod(layout.mesh.sizes[axis] for axis in axes)
                part = np.split(part, pieces, axis=dim)[tile_index(axes, row, col, layout.mesh)]
            parts.append(part)
    return parts


def check_delivers_once(source: Layout, target: Layout) -> None:
    array = np.arange(math.prod(source.shape), dtype=np.int64).reshape(source.shape)
    held, wanted = scatter(array, source), scatter(array, target)
    got = [np.full(part.shape, -1, np.int64) for part in wanted]
    written = [np.zeros(part.shape, np.int64) for part in wanted]
    pairs = set[tuple[int, int]]()
    for tile in plan_transfer(source, target):
        piece = held[tile.source_device][tile.source_slice]
        assert piece.shape == tile.shape
        got[tile.target_device][tile.target_slice] = piece
        written[tile.target_device][tile.target_slice] += 1
        pairs.add((tile.source_device, tile.target_device))
    assert len(pairs) == len(plan_transfer(source, target)), "a pair of devices shares one tag, so it may share one tile only"
    for part, expected, count in zip(got, wanted, written, strict=True):
        np.testing.assert_array_equal(part, expected)
        np.testing.assert_array_equal(count, 1)


@settings(max_examples=150, deadline=None)
@given(PAIRS)
def test_every_element_arrives_exactly_once(pair: tuple[Layout, Layout]) -> None:
    check_delivers_once(*pair)
    source, target = pair
    check_delivers_once(source, receive_layout(target))


@settings(max_examples=150, deadline=None)
@given(PAIRS)
def test_fully_split_wire_layout_reaches_the_lower_bound(pair: tuple[Layout, Layout]) -> None:
    source, target = pair
    wire = receive_layout(target)
    if source.shape:
        assert wire_bytes(source, wire) == lower_bound_bytes(source)
    else:
        assert wire_bytes(source, wire) == lower_bound_bytes(source) * target.mesh.num_devices
    assert wire_bytes(source, target) == lower_bound_bytes(source) * target.mesh.num_devices // target.spec.num_shards(target.mesh)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 3).flatmap(lambda num_dims: st.tuples(st.tuples(*[st.integers(1, 12)] * num_dims), specs(num_dims))),
    st.sampled_from(MESHES),
)
def test_receive_layout_refines_its_target_as_far_as_it_divides(shape_and_spec: tuple[tuple[int, ...], Spec], mesh: MeshShape) -> None:
    shape, spec = shape_and_spec
    target = Layout(shape, "float32", spec, mesh)
    if not fits(spec, shape, mesh):
        return
    wire = receive_layout(target)
    assert replace(wire, spec=spec) == target
    assert fits(wire.spec, shape, mesh)
    assert all(after[: len(before)] == before for before, after in zip(spec.dims, wire.spec.dims, strict=True)), (
        "a local all-gather must give the target"
    )
    assert receive_layout(wire) == wire
    used = {axis for dim in wire.spec.dims for axis in dim}
    for axis in {0, 1} - used:
        for dim, axes in enumerate(wire.spec.dims):
            finer = Spec((*wire.spec.dims[:dim], (*axes, axis), *wire.spec.dims[dim + 1 :]))
            assert mesh.sizes[axis] == 1 or not fits(finer, shape, mesh), "an axis that still fits was left replicated"


def test_receive_layout_finds_the_assignment_a_greedy_choice_misses() -> None:
    target = Layout((4, 2), "float32", Spec(((), ())), MeshShape(2, 4))
    assert receive_layout(target).spec == Spec(((1,), (0,)))


def test_receive_layout_prefers_the_first_dim() -> None:
    target = Layout((8, 8), "float32", Spec(((), ())), MeshShape(2, 2))
    assert receive_layout(target).spec == Spec(((0, 1), ()))


@pytest.mark.parametrize(("source_mesh", "target_mesh"), [((2, 2), (1, 4)), ((4, 1), (1, 2)), ((1, 4), (2, 1)), ((1, 1), (2, 2))])
@pytest.mark.parametrize("spec", [Spec(((0,), (1,))), Spec(((), (0, 1))), Spec(((1, 0), ())), Spec(((), ()))])
def test_unequal_meshes(source_mesh: tuple[int, int], target_mesh: tuple[int, int], spec: Spec) -> None:
    source = Layout((8, 16), "float32", spec, MeshShape(*source_mesh))
    check_delivers_once(source, Layout((8, 16), "float32", Spec(((1,), (0,))), MeshShape(*target_mesh)))


@settings(max_examples=100, deadline=None)
@given(PAIRS)
def test_replicas_share_the_sending(pair: tuple[Layout, Layout]) -> None:
    """Replicas of the same box send the same number of elements, give or take one tile."""
    source, target = pair
    sent = [0] * source.mesh.num_devices
    largest = 0
    for tile in plan_transfer(source, target):
        sent[tile.source_device] += math.prod(tile.shape)
        largest = max(largest, math.prod(tile.shape))
    indices = scatter(np.arange(math.prod(source.shape)).reshape(source.shape), source)
    groups: dict[bytes, list[int]] = {}
    for device, part in enumerate(indices):
        groups.setdefault(part.tobytes(), []).append(sent[device])
    for loads in groups.values():
        assert max(loads) - min(loads) <= largest


def test_replicated_source_sends_one_tile_each() -> None:
    source = Layout((8,), "float32", Spec(((),)), MeshShape(2, 2))
    target = Layout((8,), "float32", Spec(((0, 1),)), MeshShape(2, 2))
    assert [(tile.source_device, tile.target_device) for tile in plan_transfer(source, target)] == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_bfloat16_counts_two_bytes() -> None:
    layout = Layout((8, 4), "bfloat16", Spec(((0,), ())), MeshShape(2, 1))
    assert wire_bytes(layout, layout) == lower_bound_bytes(layout) == 64


def test_empty_array_needs_no_tiles_and_no_bytes() -> None:
    layout = Layout((0, 4), "float32", Spec(((), (0,))), MeshShape(2, 1))
    assert wire_bytes(layout, layout) == 0


def test_partial_sums_are_refused() -> None:
    whole = Layout((8,), "float32", Spec(((),)), MeshShape(2, 1))
    partial = replace(whole, spec=Spec(((),), partial=(0,)))
    with pytest.raises(ProgramError, match="partial sum over mesh axes"):
        plan_transfer(partial, whole)
    with pytest.raises(ProgramError, match="partial sum over mesh axes"):
        receive_layout(partial)


def test_mismatched_ends_are_refused() -> None:
    whole = Layout((8,), "float32", Spec(((),)), MeshShape(2, 1))
    with pytest.raises(ProgramError, match="same shape and dtype"):
        plan_transfer(whole, replace(whole, dtype="int32"))
    with pytest.raises(ProgramError, match="does not divide"):
        plan_transfer(whole, Layout((8,), "float32", Spec(((0,),)), MeshShape(3, 1)))
