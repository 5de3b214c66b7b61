"""(LayeredStep, ClusterSpec) -> MadeFor; (ParallelPlan, the same) -> nothing, or a PlanError that names what differs."""

from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version

from jax.core import ShapedArray

from alpa_hpc.cluster.hardware import ClusterSpec
from alpa_hpc.errors import PlanError
from alpa_hpc.ir.flops import aval_bytes
from alpa_hpc.ir.key import aval_text, content_key
from alpa_hpc.ir.work import LayeredStep
from alpa_hpc.plan.plan import MadeFor, ParallelPlan, StagePlan
from alpa_hpc.units import bytes_words

_MEANINGS = {
    "state": "the model's parameters and optimiser state",
    "batch": "a microbatch",
    "microbatches": "the number of microbatches",
    "layers": "the layers",
    "update": "the optimiser and its numbers",
    "cluster": "the cluster",
    "software": "the software that traced it",
}
_SOFTWARE = ("alpa_hpc", "jax", "jaxlib")


def made_for(step: LayeredStep, cluster: ClusterSpec) -> MadeFor:
    """What a plan for this step on this cluster is made for."""
    update = step.update
    num_bytes = sum(map(aval_bytes, step.state_avals))
    state = _key([*step.state_names, *map(aval_text, step.state_avals)])
    layers = _key([(layer.key, layer.params, layer.batch, layer.inputs, layer.outputs) for layer in step.layers])
    updates = _key([param.key for param in update.params], [one.shared for one in update.rounds], update.shared_after)
    return MadeFor(
        state=f"{len(step.state_avals)} arrays, {num_bytes / 1e6:.6g} MB, {state}",
        batch=_arrays(step.batch_avals),
        microbatches=str(step.num_microbatches),
        layers=f"{len(step.layers)} layers, {layers}",
        update=f"{len(update.params)} updates, {updates}",
        cluster=f"{cluster.num_nodes} x {cluster.devices_per_node} devices",
        software=", ".join(f"{name} {version(name)}" for name in _SOFTWARE),
    )


def check_made_for(plan: ParallelPlan, step: LayeredStep, cluster: ClusterSpec) -> None:
    """Raise PlanError, with each difference, unless the plan was made for this step and a cluster of this shape and memory."""
    found, expected = plan.made_for, made_for(step, cluster)
    if plan.model_key != step.key:
        raise PlanError(
            f"the plan was made for another training step; it differs in {differences(found, expected)}. Plan again with this "
            "configuration, or train with the one it was made for."
        )
    if found.cluster != expected.cluster:
        raise PlanError(
            f"the plan was made for a cluster of {found.cluster}, {cluster.name} has {expected.cluster}: plan again for this one, or take "
            "the cluster it was made for."
        )
    counts = (plan.num_microbatches, plan.num_layers, plan.num_devices)
    true_counts = (step.num_microbatches, len(step.layers), cluster.num_devices)
    if counts != true_counts:
        raise PlanError(
            "the plan says {} microbatches, {} layers, {} devices, ".format(*counts)
            + "this run has {}, {}, {}: the plan was edited. Plan again.".format(*true_counts)
        )
    for index, stage in enumerate(plan.stages):
        _check_place(index, stage, cluster)
    _check_memory(plan, cluster)


def differences(found: MadeFor, expected: MadeFor) -> str:
    """The parts in which two differ, each as "NAME (FOUND in the plan, EXPECTED here)"."""
    here = asdict(expected)
    parts = [f"{_MEANINGS[part]} ({text} in the plan, {here[part]} here)" for part, text in asdict(found).items() if text != here[part]]
    return "; ".join(parts) or "something that the plan's own account of it does not tell"


def _check_place(index: int, stage: StagePlan, cluster: ClusterSpec) -> None:
    """A stage's devices lie as its submesh says: on that many nodes, equally many on each."""
    nodes = [device // cluster.devices_per_node for device in stage.devices]
    counts = {nodes.count(node) for node in nodes}
    if len(set(nodes)) != stage.submesh.num_nodes or counts != {stage.submesh.devices_per_node}:
        raise PlanError(
            f"stage {index} says {stage.submesh.num_nodes} nodes x {stage.submesh.devices_per_node} devices, but its devices "
            f"{', '.join(map(str, stage.devices))} lie otherwise on nodes of {cluster.devices_per_node}: the plan was edited. Plan again."
        )


def _check_memory(plan: ParallelPlan, cluster: ClusterSpec) -> None:
    needed = max(plan.prediction.stage_bytes)
    if needed > cluster.device.memory:
        raise PlanError(
            f"the plan needs {bytes_words(needed)} a device, a device of cluster {cluster.name} has {bytes_words(cluster.device.memory)}: "
            "it was made for a cluster with more memory. Plan again for this one."
        )


def _arrays(avals: Sequence[ShapedArray]) -> str:
    texts = [aval_text(aval) for aval in avals]
    return ", ".join(texts) if len(texts) <= 4 else f"{len(texts)} arrays, {_key(texts)}"


def _key(*parts: object) -> str:
    """Enough of a key to tell two apart."""
    return content_key(*parts)[:12]
