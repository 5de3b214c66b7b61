"""Every rank: a psum inside its mesh, transfers round all meshes of several dtypes and layouts, scalars joined over all meshes."""

import sys
import time
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import PartitionSpec
from meshes import connect

from alpa_hpc.cluster.hardware import MeshShape
from alpa_hpc.ir.work import ReductionKind
from alpa_hpc.runtime.arrays import named_sharding, replicate
from alpa_hpc.runtime.groups import MeshContext
from alpa_hpc.runtime.instructions import Buffer, Layout, Recv, Send
from alpa_hpc.runtime.transfer import receive_layout
from alpa_hpc.runtime.transport import AbstractPending, MpiTransport
from alpa_hpc.sharding.spec import Spec

SPECS = [Spec(((0,), (1,))), Spec(((), (0, 1))), Spec(((1,), ())), Spec(((), ()))]
DTYPES = ["float32", "bfloat16", "bool", "int8"]
T = TypeVar("T")


def wait(pending: AbstractPending[T]) -> T:
    """Poll until it is here."""
    while not pending.ready():
        time.sleep(1e-4)
    return pending.take()


def content(mesh: int, number: int, dtype: str) -> np.ndarray[Any, Any]:
    """The array that a mesh sends as its transfer `number`."""
    return ((np.arange(64).reshape(8, 8) * (number + 1) + mesh) % 100 % 97).astype(np.dtype(dtype))


def check_psum(context: MeshContext) -> None:
    """The sum over the mesh of each device's number, by the mesh's own collectives."""
    layout = PartitionSpec(("x", "y"))
    numbers = np.arange(context.mesh.size, dtype=np.float32)
    spread = jax.device_put(numbers, jax.NamedSharding(context.mesh, layout))
    total = jax.jit(
        jax.shard_map(lambda part: jax.lax.psum(part, ("x", "y")), mesh=context.mesh, in_specs=layout, out_specs=PartitionSpec())
    )(spread)
    np.testing.assert_array_equal(np.asarray(total.addressable_data(0)), [numbers.sum()])


def check_transfers(context: MeshContext, transport: MpiTransport, shapes: tuple[MeshShape, ...]) -> None:
    """Each mesh sends to the next and receives from the one before, several messages under way at once, the last one empty."""
    here, count = context.mesh_index, len(shapes)
    to, sender = (here + 1) % count, (here - 1) % count
    pending: list[tuple[int, Layout, str, AbstractPending[jax.Array]]] = []
    for number, (spec, dtype) in enumerate([(spec, dtype) for spec in SPECS for dtype in DTYPES]):
        buffer = Buffer("value.0", number)
        source = Layout((8, 8), dtype, spec, shapes[here])
        array = jax.device_put(content(here, number, dtype), named_sharding(spec, context.mesh))
        transport.send(Send(buffer, source, receive_layout(Layout((8, 8), dtype, SPECS[number % 3], shapes[to])), to, number), array)
        array.delete()
        target = receive_layout(Layout((8, 8), dtype, SPECS[number % 3], shapes[here]))
        recv = Recv(buffer, Layout((8, 8), dtype, spec, shapes[sender]), target, sender, number)
        pending.append((number, target, dtype, transport.receive(recv)))
    for number, target, dtype, arrival in pending:
        array = wait(arrival)
        assert array.dtype == np.dtype(dtype) and array.shape == (8, 8)
        assert array.sharding == named_sharding(target.spec, context.mesh)
        expected = jax.device_put(content(sender, number, dtype), array.sharding)
        np.testing.assert_array_equal(np.asarray(array.addressable_data(0)), np.asarray(expected.addressable_data(0)))
    while not transport.drained():
        time.sleep(1e-4)


def check_reduction(context: MeshContext, transport: MpiTransport, count: int) -> None:
    """A sum whose rounding depends on its order, a maximum and a conjunction."""
    values = (np.float32(10.0 ** (7 - 3 * context.mesh_index) + 0.3), np.int32(-5 - context.mesh_index), np.bool_(context.mesh_index != 1))
    kinds = (ReductionKind.SUM, ReductionKind.MAX, ReductionKind.AND)
    arrays = tuple(replicate(np.asarray(value), context.mesh) for value in values)
    total, largest, every = (np.asarray(array.addressable_data(0)) for array in wait(transport.all_reduce(arrays, kinds)))
    expected = np.float32(0)
    for mesh in range(count):
        expected = np.float32(expected + np.float32(10.0 ** (7 - 3 * mesh) + 0.3))
    assert total == expected and total.dtype == np.float32
    assert largest == -5 and largest.dtype == np.int32
    assert every == np.bool_(count == 1) and every.dtype == np.bool_


def main() -> None:
    """All checks, twice, so that tags are used again."""
    context, transport, shapes = connect()
    assert len(jax.local_devices()) == 1
    for _ in range(2):
        check_psum(context)
        check_transfers(context, transport, shapes)
        check_reduction(context, transport, len(shapes))
    sys.stdout.write(f"OK mesh {context.mesh_index} rank {context.rank}\n")


if __name__ == "__main__":
    main()
