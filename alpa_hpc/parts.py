"""ExperimentConfig -> the parts that several jobs make from it alike: the traced step, the data, the cost store, ranks, the result."""

import os
from dataclasses import replace
from numbers import Integral
from pathlib import Path

from alpa_hpc.calibration.clusters import read_cluster
from alpa_hpc.calibration.request import calibrated_name, is_calibrated
from alpa_hpc.cluster.hardware import ClusterSpec, Submesh
from alpa_hpc.config import ExperimentConfig, check_experiment, load_config
from alpa_hpc.errors import ConfigError
from alpa_hpc.ir.flops import jaxpr_flops
from alpa_hpc.ir.work import LayeredStep
from alpa_hpc.launch.files import fields_of, is_there, read_json
from alpa_hpc.launch.mpirun import CPU_RANK, Place, Ranks
from alpa_hpc.launch.options import LauncherKind
from alpa_hpc.launch.paths import RunPaths, calibrated_config
from alpa_hpc.launch.site import Platform, site_environment
from alpa_hpc.plan.fit import made_for
from alpa_hpc.planner.search import SCHEDULES, seconds_on
from alpa_hpc.profiling.options import CostSource
from alpa_hpc.report.kept import key_of
from alpa_hpc.report.planning import Basis, MachinePrediction, PlanningRecord, iteration_flop, shared_cores_seconds
from alpa_hpc.report.result import Unit, Work, write_result
from alpa_hpc.runtime.options import SEARCHED
from alpa_hpc.stages.options import CheckTarget, with_layers_for
from alpa_hpc.timed import Timed, untimed
from alpa_hpc.training.batch import batch_shapes
from alpa_hpc.training.data import DataSource, open_data
from alpa_hpc.training.prepare import Prepared, prepare


def config_of_run(paths: RunPaths) -> ExperimentConfig:
    """The config of a run; its number of microbatches is the one that was chosen, once the planning job has chosen one."""
    config = load_config(paths.config)
    if config.schedule.num_microbatches != SEARCHED or not is_there(paths.microbatches):
        return config
    with fields_of(paths.microbatches):
        return with_microbatches(config, int(read_json(paths.microbatches)["chosen"]))


def with_microbatches(config: ExperimentConfig, number: int) -> ExperimentConfig:
    """The config with batches cut into `number` microbatches."""
    return check_experiment(replace(config, schedule=replace(config.schedule, num_microbatches=number)))


def prepared(config: ExperimentConfig, timed: Timed = untimed) -> Prepared:
    """The traced and layered train step of a config, cut as its search asks."""
    assert config.schedule.num_microbatches != SEARCHED, "a step is traced at the shapes of a microbatch"
    layers = with_layers_for(config.layers, config.search, config.cluster.num_devices)
    return prepare(config.model, config.training, layers, config.schedule.num_microbatches, timed, config.search.clustering)


def open_training_data(config: ExperimentConfig) -> DataSource:
    """The data of a config, in the shapes of its model."""
    return open_data(config.data, config.model, num_values_of(config.model))


def data_fault(config: ExperimentConfig) -> str:
    """Why a training of this config would be refused for its data: shapes, vocabulary, or no such file here; empty where it would not."""
    try:
        open_training_data(config)
    except ConfigError as error:
        return str(error)
    return ""


def num_values_of(model: object) -> int:
    """How many tokens or classes a model knows: its field `vocab` or `num_classes`, which data of integers need."""
    found = getattr(model, "vocab", getattr(model, "num_classes", 0))
    if not isinstance(found, Integral):
        raise ConfigError(f"the model's vocab or num_classes is {found!r}, expected a whole number: integers in its batches are below it")
    return int(found)


def cost_store(config: ExperimentConfig, paths: RunPaths) -> Path:
    """The folder of measured costs: the config's own, else the one that all runs share."""
    return Path(config.profiling.store) if config.profiling.store else paths.costs


def whole_cluster(config: ExperimentConfig) -> Submesh:
    """All devices: what a training job takes."""
    return Submesh(config.cluster.num_nodes, config.cluster.devices_per_node)


def calibrated_twin(config: ExperimentConfig) -> ClusterSpec | None:
    """The config's cluster as `python -m alpa_hpc calibrate` found it, if it did: with as many nodes and devices."""
    described = config.cluster
    if is_calibrated(described.name):
        return described
    path = calibrated_config(config.runs, calibrated_name(described.name))
    if not is_there(path):
        return None
    found = read_cluster(path)
    is_alike = (found.num_nodes, found.devices_per_node) == (described.num_nodes, described.devices_per_node)
    return found if is_alike else None


def predicted_here(config: ExperimentConfig, step: LayeredStep, record: PlanningRecord, num_cores: int) -> MachinePrediction:
    """The chosen plan on the cluster as it was calibrated; where it was not, its work on this machine's cores."""
    twin, chosen = calibrated_twin(config), record.chosen
    if twin is None:
        return MachinePrediction(shared_cores_seconds(chosen, record.seconds_of, num_cores), Basis.WORK_ALONE)
    if twin is config.cluster:
        return MachinePrediction(chosen.timeline.seconds, Basis.CALIBRATION)
    return MachinePrediction(seconds_on(twin, step, chosen, SCHEDULES[config.schedule.kind]), Basis.CALIBRATION)


def key_of_search(config: ExperimentConfig, step: LayeredStep) -> str | None:
    """The key of all that decides what a search finds and what is told of it, or None where it is going to measure."""
    if config.profiling.source is CostSource.MEASURED:
        return None
    batch = config.training.batch_size
    flop = [iteration_flop(config.model, step, batch, recomputed=share, count=counted_flop) for share in (0.0, 1.0)]
    compiled = os.environ.get("XLA_FLAGS", "") if config.search.check_target is not CheckTarget.NONE else ""
    asked = (config.model, batch, config.cluster, config.search, config.schedule, flop, compiled)
    return key_of((step.key, made_for(step, config.cluster), *asked, calibrated_twin(config), os.cpu_count()))


def key_of_number(config: ExperimentConfig, step: LayeredStep) -> str:
    """The key of all that decides what a config's number of microbatches gives by modelled costs."""
    return key_of((step.key, made_for(step, config.cluster), config.cluster, config.search, config.schedule))


def ranks_on(config: ExperimentConfig, submesh: Submesh) -> Ranks:
    """A rank on every device of a submesh."""
    place = Place.ALLOCATION if config.launcher.kind is LauncherKind.SLURM else Place.THIS_MACHINE
    own = CPU_RANK if config.site.platform is Platform.CPU else {}
    settings = {**own, **site_environment(config.site, os.environ)}
    asked = {name: str(value) for name, value in config.launcher.slurm.environment.items()} if place is Place.ALLOCATION else {}
    return Ranks(submesh.num_devices, submesh.devices_per_node, place, {**settings, **asked})


def counted_flop(step: LayeredStep) -> float:
    """FLOP of an iteration by counting the traced operators."""
    return float(sum(jaxpr_flops(layer.forward.jaxpr) + jaxpr_flops(layer.backward.jaxpr) for layer in step.layers)) * step.num_microbatches


def store_result(config: ExperimentConfig, paths: RunPaths) -> None:
    """Write result.json from what the jobs measured so far."""
    write_result(paths, config.name, config.cluster.num_devices, _work_of_a_step(config))


def _work_of_a_step(config: ExperimentConfig) -> Work:
    batch = batch_shapes(config.model, config.training.batch_size)
    if isinstance(batch, dict) and "tokens" in batch:
        return Work(Unit.TOKENS, int(batch["tokens"].size))
    return Work(Unit.EXAMPLES, config.training.batch_size)
