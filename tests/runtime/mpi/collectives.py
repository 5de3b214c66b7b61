"""Every collective of a mesh of ranks, large and small arrays by turns, against numpy: whole numbers, so any order of summation is exact.

Arguments: the mesh (`2x1`), how many rounds. Every rank prints one JSON line: how many results it compared, and which were wrong.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from meshes import join, shapes_of

from alpa_hpc.sharding.collectives import AXIS_NAMES, AbstractCollectives, mesh_collectives
from alpa_hpc.sharding.strategies.rule import Combine

# Large messages after small ones are what gloo's reduce-scatter fails on: those that take three TCP segments, of 64 KB on one machine.
SHAPES = ((256, 128), (128,), (128, 3, 128), (384,), (16384,), (128, 512), (512,), (512, 128))
Values = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
COLLECTIVES: Mapping[str, Callable[[AbstractCollectives, jax.Array], jax.Array]] = {
    "reduce_scatter": lambda collectives, x: collectives.reduce_scatter(x, 0, 0),
    "reduce_scatter of the last dim": lambda collectives, x: collectives.reduce_scatter(x, 0, x.ndim - 1),
    "all_reduce": lambda collectives, x: collectives.all_reduce(x, (0,), Combine.SUM),
    "all_gather": lambda collectives, x: collectives.all_gather(x, 0, 0),
    "all_to_all": lambda collectives, x: collectives.all_to_all(x, 0, x.ndim - 1, 0),
}


def expected(name: str, everyone: Values, device: int) -> Values:
    """What device `device` gets where device d brings everyone[d]."""
    count, last = len(everyone), everyone.ndim - 2
    match name:
        case "reduce_scatter":
            return np.split(everyone.sum(0), count, 0)[device]
        case "reduce_scatter of the last dim":
            return np.split(everyone.sum(0), count, last)[device]
        case "all_reduce":
            return everyone.sum(0)
        case "all_gather":
            return np.concatenate(list(everyone), 0)
        case _:
            return np.concatenate([np.split(one, count, 0)[device] for one in everyone], last)


def main() -> None:
    """Compare round after round; the ranks come to each at different times."""
    context = join(shapes_of(sys.argv[1]))
    device, count = context.local_device, context.mesh.size
    collectives = mesh_collectives(context.mesh)
    spec = PartitionSpec(AXIS_NAMES[0])
    hosts = [np.random.default_rng(number).integers(-99, 99, (count, *shape)).astype(np.float32) for number, shape in enumerate(SHAPES)]
    arrays = [
        jax.make_array_from_single_device_arrays(
            host.shape, NamedSharding(context.mesh, spec), [jax.device_put(host[device : device + 1], context.mesh.local_devices[0])]
        )
        for host in hosts
    ]
    wrong: list[str] = []
    pause = np.random.default_rng(device)
    for name, collective in COLLECTIVES.items():

        def on_tiles(*tiles: jax.Array, collective: Callable[[AbstractCollectives, jax.Array], jax.Array] = collective) -> list[jax.Array]:
            return [collective(collectives, jnp.negative(tile[0]))[None] for tile in tiles]

        program = jax.jit(jax.shard_map(on_tiles, mesh=context.mesh, in_specs=spec, out_specs=spec, check_vma=False))
        wanted = [expected(name, -host, device) for host in hosts]
        for number in range(int(sys.argv[2])):
            time.sleep(pause.random() * 0.003)
            found = [np.asarray(result.addressable_data(0))[0] for result in program(*arrays)]
            pairs = zip(SHAPES, found, wanted, strict=True)
            wrong += [f"{name} of {shape}, round {number}" for shape, one, want in pairs if not np.array_equal(one, want)]
    sys.stdout.write(json.dumps({"compared": len(COLLECTIVES) * len(SHAPES) * int(sys.argv[2]), "wrong": wrong}) + "\n")


if __name__ == "__main__":
    main()
