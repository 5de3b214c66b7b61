"""Property: the published plans are complete partitions of the shipped experiments, under their numbers of microbatches and layers."""

import pytest

from alpa_hpc.baselines.published import GPT_POINTS
from alpa_hpc.config import compose_experiment


@pytest.mark.parametrize("name", GPT_POINTS)
def test_a_published_plan_covers_its_experiment(name: str) -> None:
    point, config = GPT_POINTS[name], compose_experiment(name)
    assert config.schedule.num_microbatches == point.num_microbatches
    assert [stage.start for stage in point.stages] == [0, *(stage.stop for stage in point.stages[:-1])]
    assert point.stages[-1].stop == config.layers.num_layers
    assert sum(stage.submesh.num_devices for stage in point.stages) == config.cluster.num_devices
    assert all(stage.submesh.num_devices == stage.shape.num_devices for stage in point.stages)
