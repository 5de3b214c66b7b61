"""A GPT small enough to be planned in a second or two, and a described cluster on which its plan is a real choice."""

from dataclasses import dataclass, replace
from functools import cache

from alpa_hpc.cluster.hardware import ClusterSpec, DeviceSpec, Link
from alpa_hpc.layers.options import LayerOptions
from alpa_hpc.models.gpt import GPT
from alpa_hpc.planner.evidence import NO_EVIDENCE
from alpa_hpc.planner.refine import Refinement, settle
from alpa_hpc.planner.search import find_candidates
from alpa_hpc.stages.candidate import LogicalShapes, SubmeshShapes
from alpa_hpc.stages.cost_table import CostTable
from alpa_hpc.stages.options import RematChoice, SearchOptions
from alpa_hpc.stages.pricing import StagePricer
from alpa_hpc.training.options import OptimiserKind, ParamDtype, TrainingOptions
from alpa_hpc.training.prepare import Prepared, prepare

MODEL = GPT(num_layers=2, hidden=32, num_heads=2, vocab=32, sequence=8)
NUM_MICROBATCHES = 4
TRAINING = TrainingOptions(
    optimiser=OptimiserKind.ADAMW,
    param_dtype=ParamDtype.FLOAT32,
    batch_size=16,
    num_steps=3,
    learning_rate=1e-3,
    warmup_steps=2,
    weight_decay=0.01,
    clip_norm=1.0,
    seed=0,
    evaluate_every=2,
    evaluate_batches=1,
)
LAYERS = LayerOptions(num_layers=3, imbalance=1.0)
SEARCH = SearchOptions(
    submesh_shapes=SubmeshShapes.ALL,
    logical_shapes=LogicalShapes.ALL,
    num_best=4,
    remat=RematChoice.NEVER,
    table_cap=10_000_000,
    solver_seconds=60.0,
)
DEVICE = DeviceSpec("cpu", memory=600_000, flops_32bit=1e9, flops_16bit=1e9, memory_bandwidth=4e9, efficiency=0.8)
CLUSTER = ClusterSpec("two nodes", 2, 4, DEVICE, intra_node=Link(2e9, 1e-6), inter_node=Link(4e6, 1e-5))


@cache
def prepared(model: GPT = MODEL) -> Prepared:
    """The traced and layered train step of a model."""
    return prepare(model, TRAINING, LAYERS, NUM_MICROBATCHES)


@dataclass(frozen=True, eq=False)
class Planned:
    """Costs of all candidates on a cluster."""

    pricer: StagePricer
    table: CostTable
    cluster: ClusterSpec
    search: SearchOptions

    def refinement(self) -> Refinement:
        """The best partitions by modelled seconds, memory counted exactly."""
        return settle(self.pricer, self.table, self.search, NO_EVIDENCE)


@cache
def planned(cluster: ClusterSpec = CLUSTER, search: SearchOptions = SEARCH) -> Planned:
    """Price the candidates of the small GPT."""
    step = prepared().step
    pricer = StagePricer(step, cluster)
    return Planned(pricer, pricer.price(find_candidates(step, cluster, search)), cluster, search)


def with_bandwidth(factor: float) -> ClusterSpec:
    """The cluster with another network between its nodes."""
    return replace(CLUSTER, inter_node=replace(CLUSTER.inter_node, bandwidth=CLUSTER.inter_node.bandwidth * factor))


def with_memory(num_bytes: float) -> ClusterSpec:
    """The cluster with other devices."""
    return replace(CLUSTER, device=replace(DEVICE, memory=int(num_bytes)))
