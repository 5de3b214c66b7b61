"""A task as it is compiled: what it is given to take over, it takes over."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from alpa_hpc.cluster.hardware import MeshShape
from alpa_hpc.runtime.instructions import Layout
from alpa_hpc.runtime.tasks import Local, LocalFunction, Place, StageTask, compile_task
from alpa_hpc.sharding.collectives import AXIS_NAMES
from alpa_hpc.sharding.spec import Spec

ROWS = Layout((64, 32), "float32", Spec(((0,), ())), MeshShape(2, 1))
TILE_BYTES = 64 * 32 * 4 // 2


def copying(_place: Place) -> LocalFunction:
    """New values that know nothing of the old ones, as those of parameters in 16 bits are made of their originals alone."""

    def run(original: Local, _old: Local) -> tuple[Local, ...]:
        assert not isinstance(original, tuple)
        return (original * 2,)

    return run


@pytest.mark.parametrize(("donated", "taken_over"), [((), 0), ((1,), TILE_BYTES)])
def test_a_new_value_takes_the_place_of_an_old_one_that_nobody_reads(donated: tuple[int, ...], taken_over: int) -> None:
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(2, 1), AXIS_NAMES)
    memory = compile_task(StageTask("update", copying, (ROWS, ROWS), (ROWS,), donated), mesh).memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == taken_over
    assert memory.argument_size_in_bytes == 2 * TILE_BYTES
