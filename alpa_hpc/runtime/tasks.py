"""Stage -> its tasks: forward, backward, reductions and update as functions of one device's tiles, and their compilation.

A task is written once, for one device at a `Place`. Training compiles it inside `shard_map` over the stage's mesh (fully manual: no
collective but the planned ones); profiling compiles the same function for one lone device. An array that is a partial sum over mesh axes
crosses the border of a task with one leading dim for each of them, so that each device keeps its summand.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Compiled

from alpa_hpc.cluster.hardware import MeshShape
from alpa_hpc.compiler import compiled
from alpa_hpc.ir.work import Accumulation, LayeredStep
from alpa_hpc.runtime.instructions import Layout
from alpa_hpc.sharding.collectives import AXIS_NAMES, mesh_collectives
from alpa_hpc.sharding.place import Place
from alpa_hpc.sharding.spec import Spec

Argument = Layout | tuple[Layout, ...]  # a buffer: one array, or the accumulators of one gradient
Local = jax.Array | tuple[jax.Array, ...]
LocalFunction = Callable[..., tuple[Local, ...]]
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True, eq=False)
class StageTask:
    """A function of one device's tiles, its buffers' layouts, and which inputs it consumes. `function(place)` gives the function."""

    name: str
    function: Callable[[Place], LocalFunction]
    inputs: tuple[Argument, ...]
    outputs: tuple[Argument, ...]
    donated: tuple[int, ...] = ()


def compile_task(task: StageTask, mesh: Mesh) -> Compiled:
    """Compile a task for all devices of a mesh with axes "x" and "y"."""
    shape = MeshShape(*mesh.devices.shape)
    local = task.function(Place(shape, mesh_collectives(mesh)))

    def on_tiles(*arguments: Local) -> tuple[Local, ...]:
        bare = [_map(_without_summand_dims, layout, value) for layout, value in zip(task.inputs, arguments, strict=True)]
        results = local(*bare)
        return tuple(_map(_with_summand_dims, layout, value) for layout, value in zip(task.outputs, results, strict=True))

    mapped = jax.shard_map(
        on_tiles,
        mesh=mesh,
        in_specs=tuple(map(_border_specs, task.inputs)),
        out_specs=tuple(map(_border_specs, task.outputs)),
        check_vma=False,
    )
    avals = [_map_layout(lambda layout: border_struct(layout, mesh), layout) for layout in task.inputs]
    # said once more, since XLA makes a constant out of an array without elements, and gives that back whole
    placed = tuple(_map_layout(lambda layout: NamedSharding(mesh, border_spec(layout.spec)), layout) for layout in task.outputs)
    jitted = jax.jit(mapped, donate_argnums=reused_inputs(task), out_shardings=placed, keep_unused=True)
    return compiled(jitted.lower(*avals), mesh.devices.flat)


def reused_inputs(task: StageTask) -> tuple[int, ...]:
    """The donated inputs whose memory outputs of the same layouts can take over (jax warns of any other)."""
    free = [layout for output in task.outputs for layout in _layouts(output)]
    reused: list[int] = []
    for position in task.donated:
        wanted = _layouts(task.inputs[position])
        left = list(free)
        if all(_take(left, layout) for layout in wanted):
            free = left
            reused.append(position)
    return tuple(reused)


def _take(free: list[Layout], layout: Layout) -> bool:
    if layout not in free:
        return False
    free.remove(layout)
    return True


def _layouts(argument: Argument) -> tuple[Layout, ...]:
    return (argument,) if isinstance(argument, Layout) else argument


def border_struct(layout: Layout, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of a whole array as it crosses task borders."""
    sizes = tuple(layout.mesh.sizes[axis] for axis in layout.spec.partial)
    return jax.ShapeDtypeStruct((*sizes, *layout.shape), dtype_of(layout), sharding=NamedSharding(mesh, border_spec(layout.spec)))


def border_spec(spec: Spec) -> PartitionSpec:
    """The PartitionSpec at task borders: partial axes as leading dims."""
    partial = [AXIS_NAMES[axis] for axis in spec.partial]
    return PartitionSpec(*partial, *(tuple(AXIS_NAMES[axis] for axis in dim) or None for dim in spec.dims))


def lone_structs(task: StageTask) -> tuple[jax.ShapeDtypeStruct | tuple[jax.ShapeDtypeStruct, ...], ...]:
    """Shapes and dtypes of one device's tiles of the inputs."""
    return tuple(_map_layout(_tile_struct, layout) for layout in task.inputs)


def _tile_struct(layout: Layout) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(layout.spec.local_shape(layout.shape, layout.mesh), dtype_of(layout))


def dtype_of(layout: Layout) -> Any:
    """The dtype that a layout names; PRNG keys, which numpy does not know, included."""
    return _key_dtypes()[layout.dtype] if layout.dtype.startswith("key<") else jnp.dtype(layout.dtype)


@cache
def _key_dtypes() -> Mapping[str, Any]:
    dtypes = [jax.eval_shape(lambda impl=impl: jax.random.key(0, impl=impl)).dtype for impl in ("threefry2x32", "rbg", "unsafe_rbg")]
    return {str(dtype): dtype for dtype in dtypes}


def _border_specs(layout: Argument) -> PartitionSpec | tuple[PartitionSpec, ...]:
    return _map_layout(lambda one: border_spec(one.spec), layout)


def _map_layout(function: Callable[[Layout], Made], layout: Argument) -> Made | tuple[Made, ...]:
    return function(layout) if isinstance(layout, Layout) else tuple(function(one) for one in layout)


def _map(function: Callable[[Layout, jax.Array], jax.Array], layout: Argument, value: Local) -> Local:
    if isinstance(layout, Layout):
        return function(layout, one_array(value))
    return tuple(function(one, x) for one, x in zip(layout, accumulators(value), strict=True))


def one_array(value: Local) -> jax.Array:
    """The array of a buffer that holds one."""
    assert not isinstance(value, tuple), "one layout, one array"
    return value


def accumulators(value: Local) -> tuple[jax.Array, ...]:
    """The arrays of a gradient's buffer."""
    assert isinstance(value, tuple), "a gradient is a tuple of accumulators"
    return value


def _without_summand_dims(layout: Layout, x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[len(layout.spec.partial) :]) if layout.spec.partial else x


def _with_summand_dims(layout: Layout, x: jax.Array) -> jax.Array:
    return x.reshape((1,) * len(layout.spec.partial) + x.shape) if layout.spec.partial else x


def accumulate(step: LayeredStep, loss_output: int, total: jax.Array, value: jax.Array) -> jax.Array:
    """Gather a loss output over microbatches."""
    match step.loss_outputs[loss_output].accumulation:
        case Accumulation.SUM:
            return total + value
        case Accumulation.LAST:
            return value


def tile_zeros(layout: Layout) -> jax.Array:
    """One device's tile of a zero array."""
    return jnp.zeros(layout.spec.local_shape(layout.shape, layout.mesh), dtype_of(layout))


def split_arguments(arguments: Sequence[Local], counts: Sequence[int]) -> list[tuple[Local, ...]]:
    """Cut positional arguments into consecutive groups."""
    groups: list[tuple[Local, ...]] = []
    start = 0
    for count in counts:
        groups.append(tuple(arguments[start : start + count]))
        start += count
    assert start == len(arguments), f"{len(arguments)} arguments, expected {start}"
    return groups


def arrays(values: Sequence[Local]) -> list[jax.Array]:
    """A group of arguments each of which is one array."""
    return [one_array(value) for value in values]
