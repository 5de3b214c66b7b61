"""Stage -> the collectives its strategies stand for, task by task: worked out from specs alone, to be held against compiled programs."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from math import prod

import numpy as np
from jax.core import ShapedArray

from alpa_hpc.cluster.hardware import MeshShape
from alpa_hpc.ir.work import LayeredStep
from alpa_hpc.runtime.pipeline import StageIO
from alpa_hpc.runtime.stage import Stage, batch_spec, gradient_spec, param_spec, partial_spec
from alpa_hpc.sharding.apply import ChosenLayer
from alpa_hpc.sharding.build import Program
from alpa_hpc.sharding.graph import FREE
from alpa_hpc.sharding.hlo import CollectiveKind
from alpa_hpc.sharding.resharding import AllGather, AllReduce, AllToAll, ReduceScatter, Step, after_step, reshard_steps
from alpa_hpc.sharding.spec import Spec

KINDS: dict[type[Step], CollectiveKind] = {
    AllReduce: CollectiveKind.ALL_REDUCE,
    AllGather: CollectiveKind.ALL_GATHER,
    ReduceScatter: CollectiveKind.REDUCE_SCATTER,
    AllToAll: CollectiveKind.ALL_TO_ALL,
}
Traffic = Counter[CollectiveKind]  # bytes a device, as `sharding.hlo` counts them


def moved(shape: tuple[int, ...], itemsize: int, source: Spec, target: Spec, mesh: MeshShape) -> Traffic:
    """One resharding: each collective counts its larger side."""
    specs = [source]
    for step in reshard_steps(source, target):
        specs.append(after_step(specs[-1], step))
    traffic: Traffic = Counter()
    for step, (before, after) in zip(reshard_steps(source, target), pairwise(specs), strict=True):
        if type(step) in KINDS and mesh.sizes[step.axis] > 1:
            traffic[KINDS[type(step)]] += itemsize * max(prod(spec.local_shape(shape, mesh)) for spec in (before, after))
    return traffic


def moved_tensor(chosen: ChosenLayer, tensor: int, source: Spec, target: Spec, mesh: MeshShape) -> Traffic:
    t = chosen.problem.tensors[tensor]
    return moved(t.shape, t.itemsize, source, target, mesh)


def moved_aval(aval: ShapedArray, source: Spec, target: Spec, mesh: MeshShape) -> Traffic:
    return moved(tuple(aval.shape), int(np.dtype(aval.dtype).itemsize), source, target, mesh)


def program_traffic(program: Program, chosen: ChosenLayer, mesh: MeshShape) -> Traffic:
    """Operands brought to the specs that equations want (once a spec), and sums and maxima completed."""
    traffic: Traffic = Counter()
    seen: set[tuple[int, Spec]] = set()
    for record in program.records:
        if not record.plans:
            continue
        plan = record.plans[0 if record.node == FREE else chosen.choices[record.node]]
        for tensor, spec in zip(record.operands, plan.operands, strict=True):
            if tensor >= 0 and (tensor, spec) not in seen:
                seen.add((tensor, spec))
                traffic += moved_tensor(chosen, tensor, chosen.spec(tensor), spec, mesh)
        for tensor, raw in zip(record.results, plan.raw, strict=True):
            traffic += moved_tensor(chosen, tensor, raw, chosen.spec(tensor), mesh)
            whole = Spec(raw.dims, tuple(axis for axis, _ in plan.combined))
            traffic += moved_tensor(chosen, tensor, whole, Spec(raw.dims), mesh)
    return traffic


def reads_traffic(step: LayeredStep, stage: Stage, chosen: ChosenLayer) -> Traffic:
    """Parameters and batch inputs from where they are stored to where this layer reads them."""
    traffic: Traffic = Counter()
    for param in chosen.problem.layer.params:
        traffic += moved_aval(step.state_avals[param], stage.param_spec(param), param_spec(chosen, param), stage.shape)
    for one in chosen.problem.layer.batch:
        traffic += moved_aval(step.batch_avals[one], stage.batch_spec(one), batch_spec(chosen, one), stage.shape)
    return traffic


def forward_traffic(step: LayeredStep, stage: Stage) -> Traffic:
    traffic: Traffic = Counter()
    for chosen in stage.layers:
        problem = chosen.problem
        traffic += reads_traffic(step, stage, chosen) + program_traffic(problem.forward, chosen, stage.shape)
        for port, tensor in zip(problem.outputs, problem.forward.outputs, strict=False):
            traffic += moved_tensor(chosen, tensor, chosen.spec(tensor), chosen.spec(port.tensor), stage.shape)
    return traffic


def backward_traffic(step: LayeredStep, stage: Stage) -> Traffic:
    """Gradients are never among what moves: they stay as they are made until the iteration ends."""
    traffic: Traffic = Counter()
    for chosen in stage.layers:
        problem = chosen.problem
        traffic += reads_traffic(step, stage, chosen) + program_traffic(problem.backward, chosen, stage.shape)
        if problem.remat:
            traffic += program_traffic(problem.forward, chosen, stage.shape)
        for port, tensor in zip(problem.cotangent_inputs, problem.backward.outputs, strict=False):
            traffic += moved_tensor(chosen, tensor, chosen.spec(tensor), chosen.spec(port.tensor), stage.shape)
    return traffic


def gradient_traffic(step: LayeredStep, stage: Stage, params: Sequence[int]) -> Traffic:
    """Each layer's gradient of each parameter, summed over the mesh once an iteration."""
    traffic: Traffic = Counter()
    for param in params:
        for reader in stage.readers(param):
            source, target = gradient_spec(reader, param), partial_spec(stage, param)
            traffic += moved_aval(step.state_avals[param], source, target, stage.shape)
    return traffic


def hand_out_traffic(step: LayeredStep, stage: Stage, io: StageIO) -> Traffic:
    """Each owned parameter's new value, from where it is updated to where it is stored."""
    traffic: Traffic = Counter()
    for param in io.owned:
        chosen, program = stage.update_of(param)
        source = chosen.spec(program.update.outputs[0])
        traffic += moved_aval(step.state_avals[param], source, stage.param_spec(param), stage.shape)
    return traffic
