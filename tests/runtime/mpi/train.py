"""Two meshes run a small program for three iterations under the watchdog; the second argument is what goes wrong: nothing, raise, drop."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from meshes import connect

from alpa_hpc.cluster.hardware import MeshShape
from alpa_hpc.ir.work import ReductionKind
from alpa_hpc.runtime.arrays import named_sharding
from alpa_hpc.runtime.execute import prepare, run_iteration
from alpa_hpc.runtime.groups import MeshContext
from alpa_hpc.runtime.instructions import AllMeshReduce, Buffer, Feed, Free, Instruction, Layout, MeshProgram, Recv, Run, Send
from alpa_hpc.runtime.transport import MpiTransport
from alpa_hpc.runtime.watchdog import WatchdogLimits, watched
from alpa_hpc.sharding.spec import Spec

NUM_MICROBATCHES = 3
WEIGHT, LOSS, TOTAL = Buffer("state.0"), Buffer("extra.0"), Buffer("total.0")


def first_program(source: Layout, target: Layout) -> MeshProgram:
    """value = weight * batch, sent; weight -= total / 2."""
    body: list[Instruction] = [Run("zeros", (), (LOSS,))]
    for m in range(NUM_MICROBATCHES):
        batch, value = Buffer("batch.0", m), Buffer("value.1", m)
        body += [Feed(batch, 0), Run("forward", (WEIGHT, batch), (value,)), Send(value, source, target, 1, m), Free(value), Free(batch)]
    body += [
        AllMeshReduce((LOSS,), (TOTAL,), (ReductionKind.SUM,)),
        Free(LOSS),
        Run("update", (WEIGHT, TOTAL), (WEIGHT,), donated=(WEIGHT,)),
    ]
    return MeshProgram(0, tuple(body), (WEIGHT,), (TOTAL,))


def second_program(source: Layout, target: Layout) -> MeshProgram:
    """total = sum of all values."""
    body: list[Instruction] = [Run("zeros", (), (LOSS,))]
    for m in range(NUM_MICROBATCHES):
        value = Buffer("value.1", m)
        body += [Recv(value, source, target, 0, m), Run("loss", (value, LOSS), (LOSS,), donated=(LOSS,)), Free(value)]
    body += [AllMeshReduce((LOSS,), (TOTAL,), (ReductionKind.SUM,)), Free(LOSS)]
    return MeshProgram(1, tuple(body), (), (TOTAL,))


class LossySend:
    """A transport's `send` that loses the messages of tag 1."""

    def __init__(self, transport: MpiTransport) -> None:
        self._send = transport.send

    def __call__(self, instruction: Send, array: jax.Array) -> None:
        if instruction.tag != 1:
            self._send(instruction, array)


def run(context: MeshContext, transport: MpiTransport, shapes: tuple[MeshShape, ...], fault: str) -> None:
    """Three iterations, each checked against numpy."""
    source = Layout((8, 4), "float32", Spec(((0,), (1,))), shapes[0])
    target = Layout((8, 4), "float32", Spec(((0, 1), ())), shapes[1])
    whole = NamedSharding(context.mesh, PartitionSpec())
    calls = 0

    def loss(value: jax.Array, total: jax.Array) -> tuple[jax.Array]:
        nonlocal calls
        calls += 1
        if fault == "raise" and calls == 5 and context.local_device == 0:
            raise FloatingPointError("made to fail in iteration 1, microbatch 1")
        return jitted_loss(value, total)

    jitted_loss = jax.jit(lambda v, s: (s + v.sum(),), out_shardings=(whole,))
    tasks = {
        "zeros": jax.jit(lambda: (jnp.zeros((), jnp.float32),), out_shardings=(whole,)),
        "forward": jax.jit(lambda w, b: (w * b,), out_shardings=(named_sharding(source.spec, context.mesh),)),
        "update": jax.jit(lambda w, total: (w - 0.5 * total,), donate_argnums=0, out_shardings=(whole,)),
        "loss": loss,
    }
    if fault == "drop" and context.mesh_index == 0:
        transport.send = LossySend(transport)
    executor = prepare((first_program, second_program)[context.mesh_index](source, target), tasks, transport)
    batches = np.arange(32, dtype=np.float32).reshape(8, 4) + np.arange(NUM_MICROBATCHES, dtype=np.float32)[:, None, None]
    weight = np.float32(3.0)
    state = {WEIGHT: jax.device_put(weight, whole)} if context.mesh_index == 0 else {}
    limits = WatchdogLimits(first_seconds=3.0, seconds=3.0)
    with watched(executor, context.rank, limits, sys.stderr, lambda: context.world.Abort(1)):
        for _ in range(3):
            result = run_iteration(executor, state, lambda _, microbatch: jax.device_put(batches[microbatch], whole))
            state, total = result.resident, np.sum(weight * batches)
            weight = weight - np.float32(0.5) * total
            np.testing.assert_allclose(np.asarray(result.results[TOTAL].addressable_data(0)), total, rtol=1e-5)
            if context.mesh_index == 0:
                np.testing.assert_allclose(np.asarray(state[WEIGHT].addressable_data(0)), weight, rtol=1e-5)


def main() -> None:
    """Join, run, print OK."""
    context, transport, shapes = connect()
    run(context, transport, shapes, sys.argv[2])
    sys.stdout.write(f"OK mesh {context.mesh_index} rank {context.rank}\n")


if __name__ == "__main__":
    main()
