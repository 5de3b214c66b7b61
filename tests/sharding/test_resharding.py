"""Resharding: the steps that are priced are the steps that run, and on real arrays they give the tiles of the target spec."""

import itertools
import random
from collections import Counter
from functools import cache

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from alpa_hpc.cluster.hardware import ClusterSpec, DeviceSpec, Link, MeshShape, Submesh
from alpa_hpc.cluster.mesh import LogicalMesh, logical_mesh
from alpa_hpc.sharding.apply import reshard
from alpa_hpc.sharding.collectives import AXIS_NAMES, LoneCollectives, MeshCollectives
from alpa_hpc.sharding.place import Place
from alpa_hpc.sharding.pricing import MeshPrices, all_specs, with_partials
from alpa_hpc.sharding.resharding import (
    AllReduce,
    MaskFirst,
    Slice,
    after_step,
    bytes_after,
    joint_moves,
    reshard_moves,
    reshard_seconds,
    reshard_steps,
    step_seconds,
)
from alpa_hpc.sharding.spec import Spec, replicated, tile_index

DEVICE = DeviceSpec("cpu", 4 << 30, 1e11, 1e11, 1e10, 0.5)
CLUSTER = ClusterSpec("two nodes", 2, 4, DEVICE, Link(1e10, 1e-6), Link(1e9, 1e-5))
SHAPES = {1: (16,), 2: (16, 8), 3: (8, 16, 8)}


def mesh_of(rows: int, cols: int) -> LogicalMesh:
    submesh = Submesh(2, 4) if rows * cols == 8 else Submesh(1, rows * cols)
    return logical_mesh(CLUSTER, submesh, MeshShape(rows, cols))


def specs_of(rank: int, mesh: LogicalMesh) -> tuple[Spec, ...]:
    return with_partials(all_specs(SHAPES[rank], mesh), mesh)


@cache
def whole(rank: int) -> np.ndarray:
    return np.arange(np.prod(SHAPES[rank]), dtype=np.float32).reshape(SHAPES[rank])


def summands(array: np.ndarray, spec: Spec, mesh: MeshShape) -> np.ndarray:
    """[rows, cols, ...]: each device's summand of the whole array, different on every device of the partial axes."""
    sizes = [mesh.sizes[axis] if axis in spec.partial else 1 for axis in (0, 1)]
    parts = np.random.default_rng(0).integers(-8, 8, (*sizes, *array.shape)).astype(np.float32)
    parts[0, 0] += array - parts.sum((0, 1))
    return np.broadcast_to(parts, (*mesh.sizes, *array.shape))


def tile(array: np.ndarray, spec: Spec, row: int, col: int, mesh: MeshShape) -> np.ndarray:
    cuts = []
    for size, axes in zip(spec.local_shape(array.shape, mesh), spec.dims, strict=True):
        start = tile_index(axes, row, col, mesh) * size
        cuts.append(slice(start, start + size))
    return array[tuple(cuts)]


def tiles(parts: np.ndarray, spec: Spec, mesh: MeshShape) -> np.ndarray:
    return np.stack([np.stack([tile(parts[r, c], spec, r, c, mesh) for c in range(mesh.cols)]) for r in range(mesh.rows)])


def check_result(result: np.ndarray, target: Spec, array: np.ndarray, mesh: MeshShape) -> None:
    """`result` [rows, cols, tile]: summed over the partial axes, it is every device's tile of `array`."""
    total = result.sum(target.partial, keepdims=True)
    expected = tiles(np.broadcast_to(array, (*mesh.sizes, *array.shape)), target, mesh)
    np.testing.assert_array_equal(np.broadcast_to(total, expected.shape), expected, err_msg=str(target))


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize(("rows", "cols"), [(2, 2), (2, 4), (4, 2), (1, 4)])
def test_every_pair_of_specs_gives_the_tiles_of_the_target(rows: int, cols: int, rank: int) -> None:
    mesh = mesh_of(rows, cols)
    shape, array, specs = mesh.shape, whole(rank), specs_of(rank, mesh)
    targets = specs if rank < 3 else specs[:: max(1, len(specs) // 12)]
    device_mesh = Mesh(np.array(jax.devices()[: rows * cols]).reshape(rows, cols), AXIS_NAMES)
    place = Place(shape, MeshCollectives())

    def to_all_targets(*sources: jax.Array) -> tuple[tuple[jax.Array, ...], ...]:
        bare = [x[0, 0] for x in sources]
        return tuple(tuple(reshard(x, s, t, place)[None, None] for t in targets) for x, s in zip(bare, specs, strict=True))

    mapped = jax.shard_map(
        to_all_targets, mesh=device_mesh, in_specs=PartitionSpec(*AXIS_NAMES), out_specs=PartitionSpec(*AXIS_NAMES), check_vma=False
    )
    arguments = [tiles(summands(array, spec, shape), spec, shape) for spec in specs]
    results = jax.jit(mapped)(*arguments)
    for row in results:
        for target, result in zip(targets, row, strict=True):
            check_result(np.asarray(result), target, array, shape)


@pytest.mark.parametrize(("rows", "cols"), [(2, 2), (2, 4), (4, 2), (8, 1)])
def test_steps_lead_from_source_to_target_and_the_price_is_their_sum(rows: int, cols: int) -> None:
    mesh = mesh_of(rows, cols)
    for rank in (1, 2, 3):
        for source, target in itertools.product(specs_of(rank, mesh), repeat=2):
            spec, local, seconds = source, 1e6 / source.num_shards(mesh.shape), 0.0
            for step in reshard_steps(source, target):
                seconds += step_seconds(step, mesh, local)
                local, spec = bytes_after(step, mesh, local), after_step(spec, step)
                assert np.isclose(local, 1e6 / spec.num_shards(mesh.shape))
            assert spec == target
            assert reshard_seconds(mesh, source, target, 1e6) == pytest.approx(seconds)
            if source == target:
                assert not reshard_steps(source, target)


@pytest.mark.parametrize(("rows", "cols"), [(2, 4), (4, 2)])
def test_prices_are_linear_and_monotone_in_bytes(rows: int, cols: int) -> None:
    mesh = mesh_of(rows, cols)
    specs = specs_of(2, mesh)
    prices = MeshPrices(mesh)
    small, large = (prices.reshard_matrix(specs, specs, num_bytes) for num_bytes in (1e5, 1e7))
    assert (small >= 0).all() and (large >= small).all()
    expected = [[reshard_seconds(mesh, s, t, 1e7) for t in specs] for s in specs]
    np.testing.assert_allclose(large, expected, rtol=1e-9)


def test_a_partial_sum_is_scattered_where_the_target_is_split():
    steps = reshard_steps(Spec(((), ()), (0, 1)), Spec(((0,), (1,))))
    assert [type(step).__name__ for step in steps] == ["ReduceScatter", "ReduceScatter"]
    assert reshard_steps(Spec(((), ()), (0,)), replicated(2)) == (AllReduce(0),)
    assert reshard_steps(replicated(2), Spec(((0,), ()))) == (Slice(0, 0),)
    assert reshard_steps(replicated(1), Spec(((),), (1,))) == (MaskFirst(1),)


def test_a_lone_device_makes_tiles_of_the_same_shapes():
    mesh = mesh_of(2, 4)
    lone = Place(mesh.shape, LoneCollectives(mesh.shape))
    for source, target in itertools.product(specs_of(2, mesh), repeat=2):
        tile_of_source = jax.ShapeDtypeStruct(source.local_shape(SHAPES[2], mesh.shape), np.float32)
        result = jax.eval_shape(lambda x, s=source, t=target: reshard(x, s, t, lone), tile_of_source)
        assert result.shape == target.local_shape(SHAPES[2], mesh.shape)


@pytest.mark.parametrize(("rows", "cols"), [(2, 2), (2, 4)])
def test_arrays_that_are_summed_meet_on_their_way_and_move_on_as_one(rows: int, cols: int) -> None:
    mesh = mesh_of(rows, cols)
    specs = specs_of(2, mesh)
    draw = random.Random(0)
    met = 0
    for _ in range(500):
        sources, target = draw.choices(specs, k=draw.randint(1, 4)), draw.choice(specs)
        there = Counter(sources)
        moves = joint_moves(sources, target, mesh.shape)
        for move in moves:
            assert there[move.before], "what is moved is there, and whole: nothing arrives where something has left"
            there[move.after] += there.pop(move.before)
        assert there == {target: len(sources)}
        apart = [move for source in set(sources) for move in reshard_moves(source, target, mesh.shape)]
        assert Counter(moves) == Counter(set(apart))
        met += len(moves) < len(apart)
    assert met > 100
