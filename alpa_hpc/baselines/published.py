"""The GPT points of the paper's Fig. 7 (a): the plan that its artifact publishes, and the throughput that the figure shows.

Stages run layers of the artifact's own clustering; the experiments cut as many layers (gpt350m alone is cut finer: its one stage is the
whole model).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from alpa_hpc.baselines.manual import ManualStage
from alpa_hpc.baselines.restriction import BATCH_ON_AXIS_0, FREE, Restriction
from alpa_hpc.cluster.hardware import MeshShape, Submesh


@dataclass(frozen=True, slots=True)
class PublishedPoint:
    """A published plan of `num_microbatches`, and PFLOPS of the whole cluster read off Fig. 7 (+-0.02) for Alpa and for Megatron-LM."""

    num_microbatches: int
    stages: tuple[ManualStage, ...]
    alpa_pflops: float
    megatron_pflops: float


def _even(num_stages: int, layers: int, devices: int, shape: tuple[int, int]) -> tuple[ManualStage, ...]:
    """Equal stages on a part of a node each, batch forced to axis 0 (force_batch_dim_to_mesh_dim=0)."""
    return tuple(_stage(index * layers, layers, devices, shape, BATCH_ON_AXIS_0) for index in range(num_stages))


def _stage(start: int, layers: int, devices: int, shape: tuple[int, int], restriction: Restriction) -> ManualStage:
    return ManualStage(start, start + layers, Submesh(1, devices), MeshShape(*shape), remat=True, restriction=restriction)


_UNEVEN = (_stage(0, 2, 2, (2, 1), BATCH_ON_AXIS_0), _stage(2, 2, 2, (2, 1), FREE), _stage(4, 4, 4, (4, 1), FREE))

GPT_POINTS: Mapping[str, PublishedPoint] = {
    "gpt350m": PublishedPoint(512, (_stage(0, 8, 1, (1, 1), FREE),), 0.048, 0.048),
    "gpt1_3b": PublishedPoint(128, _even(2, 3, 2, (2, 1)), 0.19, 0.19),
    "gpt2_6b": PublishedPoint(128, _UNEVEN, 0.50, 0.39),
    "gpt6_7b": PublishedPoint(64, _even(2, 4, 8, (2, 4)), 0.96, 0.91),
    "gpt15b": PublishedPoint(128, _even(4, 4, 8, (2, 4)), 1.92, 1.87),
    "gpt39b": PublishedPoint(1024, _even(16, 1, 4, (1, 4)), 3.65, 3.70),
}
"""Experiment name -> its published point."""
