"""Trials on the ranks of this MPI job -> CalibrationRows: every rank takes part in every trial, and a repeat took as long as the slowest.

So devices that share cores, memory or a network card are timed as they are when all of them work.
"""

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, assert_never

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from alpa_hpc.calibration.programs import RUNS, collective_program, collective_tile, repeated, work_arguments, work_program
from alpa_hpc.calibration.rows import CalibrationRow
from alpa_hpc.calibration.trials import CollectiveTrial, MessageTrial, PassTrial, ProductTrial, Trial
from alpa_hpc.cluster.hardware import MeshShape
from alpa_hpc.compiler import compiled
from alpa_hpc.profiling.measure import WARM_UP_RUNS, time_compiled
from alpa_hpc.runtime.alone import filled
from alpa_hpc.runtime.instructions import Buffer, Layout, Recv, Send
from alpa_hpc.runtime.links import DirectLinks
from alpa_hpc.runtime.transport import POLL_SECONDS, MpiTransport
from alpa_hpc.sharding.collectives import AXIS_NAMES, mesh_collectives
from alpa_hpc.sharding.spec import Spec

if TYPE_CHECKING:
    from alpa_hpc.runtime.groups import MeshContext  # it loads MPI, which only ranks may

_BYTES = Buffer("value.0")
_ALONE = MeshShape(1, 1)


def measure_trials(context: "MeshContext", trials: Sequence[Trial], repeats: int) -> tuple[CalibrationRow, ...]:
    """One row a trial, the same on every rank. `context` has one mesh, of all ranks."""
    return tuple(_joined(context, trial, _seconds(context, trial, repeats)) for trial in trials)


def _seconds(context: "MeshContext", trial: Trial, repeats: int) -> tuple[float, ...]:
    """What this rank saw, once for each repeat; it waits until all have come before each."""
    match trial:
        case CollectiveTrial():
            return _time_collective(context, trial, repeats)
        case MessageTrial():
            return _time_message(context, trial, repeats)
        case ProductTrial() | PassTrial():
            return _time_work(context, trial, repeats)
        case _:
            assert_never(trial)


def _joined(context: "MeshContext", trial: Trial, seconds: tuple[float, ...]) -> CalibrationRow:
    everyone = np.array(context.world.allgather(seconds))
    slowest = tuple(float(second) for second in everyone.max(axis=0))
    return CalibrationRow(trial, slowest, context.world.size, socket.gethostname(), os.getpid(), time.time())


def _time_collective(context: "MeshContext", trial: CollectiveTrial, repeats: int) -> tuple[float, ...]:
    mesh = Mesh(context.mesh.devices.reshape(trial.shape.sizes), AXIS_NAMES, axis_types=context.mesh.axis_types)
    (rows, columns), lies = collective_tile(trial), PartitionSpec(AXIS_NAMES)
    struct = jax.ShapeDtypeStruct((mesh.size * rows, columns), jnp.float32, sharding=NamedSharding(mesh, lies))
    program = repeated(collective_program(trial, mesh_collectives(mesh)))
    mapped = jax.shard_map(program, mesh=mesh, in_specs=lies, out_specs=(lies,), check_vma=False)
    array = jax.jit(lambda: jnp.full(struct.shape, 0.01, struct.dtype), out_shardings=struct.sharding)()
    timing = time_compiled(
        lambda: compiled(jax.jit(mapped).lower(struct), mesh.devices.flat), lambda: (array,), repeats, lambda: _meet(context)
    )
    return tuple(second / RUNS for second in timing.seconds)


def _time_work(context: "MeshContext", trial: ProductTrial | PassTrial, repeats: int) -> tuple[float, ...]:
    arguments = tuple(filled(struct) for struct in work_arguments(trial))
    program = jax.jit(work_program(trial))
    return time_compiled(
        lambda: compiled(program.lower(*arguments), context.mesh.devices.flat), lambda: arguments, repeats, lambda: _meet(context)
    ).seconds


def _time_message(context: "MeshContext", trial: MessageTrial, repeats: int) -> tuple[float, ...]:
    """There and back by the transport of training, half of that being one message; who has no partner waits."""
    exchange = _exchange(context, trial)
    seconds: list[float] = []
    for _ in range(WARM_UP_RUNS + repeats):
        _meet(context)
        began = time.perf_counter()
        for _ in range(RUNS):
            exchange()
        seconds.append((time.perf_counter() - began) / (2 * RUNS))
    return tuple(seconds[WARM_UP_RUNS:])


def _exchange(context: "MeshContext", trial: MessageTrial) -> Callable[[], None]:
    """What this rank does for one message to its partner and one back."""
    pairs = zip(trial.senders, trial.receivers, strict=True)
    pair = next((pair for pair in pairs if context.rank in pair), None)
    if pair is None:
        return lambda: None
    alone = replace(
        context,
        mesh_index=pair.index(context.rank),
        mesh=Mesh(np.array(jax.local_devices()[:1]).reshape(_ALONE.sizes), AXIS_NAMES, axis_types=context.mesh.axis_types),
        local_device=0,
        ranks=tuple((rank,) for rank in pair),
    )
    transport, layout = MpiTransport(alone, DirectLinks()), Layout((trial.num_bytes // 4,), "float32", Spec(((),)), _ALONE)
    array = jax.device_put(np.full(layout.shape, 0.01, np.float32), NamedSharding(alone.mesh, PartitionSpec(None)))

    def send() -> None:
        transport.send(Send(_BYTES, layout, layout, 1 - alone.mesh_index, 0), array)

    def receive() -> None:
        arrival = transport.receive(Recv(_BYTES, layout, layout, 1 - alone.mesh_index, 0))
        while not arrival.ready():
            time.sleep(POLL_SECONDS)
        jax.block_until_ready(arrival.take())

    def there_and_back() -> None:
        for step in (send, receive) if alone.mesh_index == 0 else (receive, send):
            step()
        while not transport.drained():
            time.sleep(POLL_SECONDS)

    return there_and_back


def _meet(context: "MeshContext") -> None:
    """Return once all ranks have called it. Who waits sleeps: where ranks share cores, a busy one would slow down those that work."""
    met = context.world.Ibarrier()
    while not met.Test():
        time.sleep(POLL_SECONDS)
