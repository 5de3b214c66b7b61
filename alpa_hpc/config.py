"""Hydra's YAML -> ExperimentConfig, one checked and frozen object, and back to a file: the only module that knows OmegaConf.

Hydra composes and type-checks against plain twins of the frozen option classes (`schema.twin`). `to_config` then builds the frozen
classes, whose `__post_init__` checks each value, and `check_experiment` checks values against each other.
"""

import dataclasses
import enum
import importlib.util
import inspect
import math
import re
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from alpa_hpc.calibration.clusters import read_cluster
from alpa_hpc.cluster.hardware import ClusterSpec
from alpa_hpc.errors import ConfigError
from alpa_hpc.launch.arguments import check_arguments, check_own_configs, config_folders, config_names, shipped_experiments
from alpa_hpc.launch.files import write_text
from alpa_hpc.launch.locations import config_folder
from alpa_hpc.launch.options import LauncherKind, LauncherOptions
from alpa_hpc.launch.paths import Origin, calibrated_config, calibrations_folder
from alpa_hpc.launch.site import SiteOptions
from alpa_hpc.launch.sweeps import SweepPlace
from alpa_hpc.layers.options import LayerOptions
from alpa_hpc.profiling.options import ProfilingOptions
from alpa_hpc.runtime.options import SEARCHED, ScheduleOptions
from alpa_hpc.schema import build, check_keys, option_fields, refuse_unknown_key, twin
from alpa_hpc.stages.options import SearchOptions
from alpa_hpc.training.model import Model
from alpa_hpc.training.options import DataKind, DataOptions, TrainingOptions

HYDRA_VERSION = "1.3"  # whose defaults hold, whatever newer Hydra is installed: no change of directory, above all
Composed = DictConfig  # a config as Hydra composed it: right keys and types, values unchecked

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Mode(enum.Enum):
    """How far a run goes."""

    FULL = "full"
    """plan, profile, train"""
    PLAN = "plan"
    """plan only"""
    DRY_RUN = "dry_run"
    """print what would be submitted"""
    CALIBRATE = "calibrate"
    """measure what the cluster's devices and links do: set by the verb of that name"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExperimentConfig:
    """Everything that one run is asked for.

    runs:       folder (absolute) that the run's own folder `runs/NAME/ID` is made in
    model:      the instantiated model
    model_path: folder (absolute) of the model's module, or empty if it is installed: a job that runs elsewhere finds it there
    resolved:   the YAML that this config was built from, paths absolute; `load_config` builds an equal config from it
    """

    name: str
    mode: Mode
    runs: Path
    model: Model
    model_path: str
    cluster: ClusterSpec
    layers: LayerOptions
    search: SearchOptions
    schedule: ScheduleOptions
    profiling: ProfilingOptions
    training: TrainingOptions
    data: DataOptions
    launcher: LauncherOptions
    site: SiteOptions
    resolved: str = dataclasses.field(repr=False, compare=False)

    def __post_init__(self) -> None:
        if _NAME.fullmatch(self.name) is None:
            raise ConfigError(f"name is {self.name!r}, expected letters, digits, '.', '_' and '-': the run folder is called by it")


def compose_command_line(task: Callable[[Composed], None]) -> None:
    """Call `task` with the config that the command line asks for: once a run of a sweep, never for --help and --cfg.

    ConfigError for a bare `experiment=NAME` and for an unknown key; what else Hydra cannot compose (an unknown experiment, a wrong type)
    ends the process with Hydra's own message, which lists what there is, and status 1.
    """
    check_arguments(sys.argv[1:])
    check_keys(sys.argv[1:], ExperimentConfig)
    check_own_configs(sys.argv[1:], config_folders(sys.argv[1:]))
    register(sys.argv[1:])
    hydra.main(version_base=HYDRA_VERSION, config_path=str(config_folder()), config_name="config")(task)()


def current_overrides() -> tuple[str, ...]:
    """What the command line says for this run, in Hydra's order; within `compose_command_line`'s task alone."""
    return tuple(HydraConfig.get().overrides.task)


def current_origin() -> Origin:
    """How this run comes about, the experiment and the folder of runs left out; within `compose_command_line`'s task alone."""
    overrides = tuple(word for word in current_overrides() if not word.startswith(("+experiment=", "runs=")))
    place = current_place()
    return Origin(overrides) if place is None else Origin(overrides, place.folder.name, place.number)


def current_place() -> SweepPlace | None:
    """Which run of a sweep this is, or None where there is no sweep; within `compose_command_line`'s task alone."""
    now = HydraConfig.get()
    if OmegaConf.is_missing(now.job, "num"):
        return None
    folder = Path(now.sweep.dir).absolute()
    asked = OmegaConf.load(folder / "multirun.yaml").hydra.overrides.task  # what Hydra's own sweeper noted before the first run
    parser = OverridesParser.create(GlobalHydra.instance().config_loader())
    sweeps = {one.get_key_element(): one for one in parser.parse_overrides(list(asked)) if one.is_sweep_override()}
    return SweepPlace(folder, int(now.job.num), math.prod(len(list(one.sweep_string_iterator())) for one in sweeps.values()))


def outranked(composed: Composed) -> tuple[str, ...]:
    """What an experiment says of a cluster in place of the one that the command line names; within `compose_command_line`'s task alone."""
    words = current_overrides()
    named = [word for word in words if word.startswith("cluster=")]
    if not named:
        return ()
    own = _leaves(OmegaConf.to_container(hydra.compose("config", named[-1:]).cluster))
    given = {word.partition("=")[0].lstrip("+") for word in words}
    says = {
        f"cluster.{key}": value for key, value in _leaves(OmegaConf.to_container(composed.cluster)).items() if value != own.get(key, value)
    }
    return tuple(
        f"the experiment's {key}={value} outranks the {own[key.removeprefix('cluster.')]} of {named[-1]}: give {key}=VALUE for another"
        for key, value in says.items()
        if key not in given
    )


def _leaves(tree: Any, above: str = "") -> dict[str, Any]:
    """Dotted keys below mappings, and their values."""
    if not isinstance(tree, dict):
        return {above: tree}
    found = cast(dict[str, Any], tree)
    return {key: leaf for name, below in found.items() for key, leaf in _leaves(below, f"{above}.{name}" if above else name).items()}


def compose_experiment(name: str, overrides: Sequence[str] = ()) -> ExperimentConfig:
    """The config of `python -m alpa_hpc +experiment=NAME OVERRIDES`, for callers within Python.

    Raises ConfigError for an unknown experiment, key or type, and where `to_config` does.
    """
    return to_config(_compose(name, overrides))


def compose_site(overrides: Sequence[str]) -> SiteOptions:
    """The site that OVERRIDES choose, without making a model, which would import jax. Raises ConfigError as `compose_experiment`."""
    composed = _compose("quickstart", overrides)
    return build(SiteOptions, OmegaConf.to_container(composed.site), "site")


def compose_calibration(overrides: Sequence[str]) -> ExperimentConfig:
    """The config of `python -m alpa_hpc calibrate OVERRIDES`: a run of no experiment, on the cluster that they name.

    Raises ConfigError for an unknown cluster, key or type, and where `to_config` does.
    """
    if not any(override.startswith(("cluster=", "+experiment=")) for override in overrides):
        raise ConfigError(f"which cluster? Say cluster=NAME. {_known_clusters()}")
    own = (
        "name=calibration",
        f"mode={Mode.CALIBRATE.value}",
        "profiling.source=measured",
        "profiling.max_parallel=1",
        "launcher.chain=inside",
    )
    check_arguments(overrides)
    try:
        return to_config(_composed((*overrides, *own)))
    except HydraException as error:
        raise ConfigError(f"cannot compose {' '.join(overrides)}: {_first_line(error)}. {_known_clusters()}") from error


def _compose(name: str, overrides: Sequence[str]) -> Composed:
    try:
        return _composed((f"+experiment={name}", *overrides))
    except HydraException as error:
        raise ConfigError(f"cannot compose experiment {name!r}: {_first_line(error)}. {shipped_experiments()}") from error


def _composed(overrides: Sequence[str]) -> Composed:
    register(overrides)
    check_keys(overrides, ExperimentConfig)
    with hydra.initialize_config_dir(str(config_folder()), version_base=HYDRA_VERSION):
        return hydra.compose("config", list(overrides))


def register(overrides: Sequence[str] = ()) -> None:
    """Tell Hydra the schema that conf/config.yaml starts from, and the calibrated clusters beside the runs that `overrides` name.

    Unknown keys and wrong types then fail at composition.
    """
    store = ConfigStore.instance()
    store.store(name="schema", node=_schema())
    store.repo.pop("cluster", None)  # those of another folder of runs
    for path in sorted(calibrations_folder(_runs_folder(overrides)).glob("*.yaml")):
        store.store(group="cluster", name=path.stem, node=_calibrated(path), provider="calibrations")


def _calibrated(path: Path) -> dict[str, Any]:
    """What a calibrated cluster's config says. One that cannot be read has a name alone: `to_config` tells those who chose it why."""
    try:
        return dataclasses.asdict(read_cluster(path))
    except ConfigError:
        return {"name": path.stem}


def _runs_folder(overrides: Sequence[str]) -> Path:
    """The folder of runs that a command line names, known before Hydra reads it."""
    default = str(OmegaConf.load(config_folder() / "config.yaml").runs)
    named = [word.removeprefix("runs=").strip("'\"") for word in overrides if word.startswith("runs=")]
    return Path([default, *named][-1]).expanduser().absolute()


def to_config(composed: Composed) -> ExperimentConfig:
    """The checked, frozen form of a composed config; ConfigError if a value, or a combination of values, cannot work."""
    _refuse_unknown_keys(composed)
    missing = sorted(OmegaConf.missing_keys(composed))
    if "name" in missing:
        raise ConfigError(f"no experiment was chosen: say +experiment=NAME, or give a run of your own a name=NAME. {shipped_experiments()}")
    if any(key.startswith("cluster.") and key != "cluster.name" for key in missing):
        if (path := calibrated_config(Path(composed.runs).expanduser().absolute(), composed.cluster.name)).exists():
            read_cluster(path)  # tells what is wrong with it
    if missing:
        raise ConfigError(f"these keys have no value: {', '.join(missing)}. Give each one on the command line as KEY=VALUE")
    values = _with_absolute_paths(cast(dict[str, Any], OmegaConf.to_container(composed, resolve=True)))
    late = ("model", "model_path", "resolved")  # the model imports jax, and a wrong number should not wait for that
    built = {field: build(kind, values[field], field) for field, kind in option_fields(ExperimentConfig) if field not in late}
    if values["model_path"] and not Path(values["model_path"]).is_dir():
        raise ConfigError(f"model_path={values['model_path']} is not a folder, expected the one that the model's module lies in")
    if values["model_path"] and values["model_path"] not in sys.path:
        sys.path.append(values["model_path"])  # behind all others: nothing there can pose as a module of ours
    model = _build_model(values["model"])
    values["model_path"] = values["model_path"] or _folder_of_module(values["model"]["_target_"])
    resolved = OmegaConf.to_yaml(OmegaConf.create(values))
    return check_experiment(ExperimentConfig(**built, model=model, model_path=values["model_path"], resolved=resolved))


def check_experiment(config: ExperimentConfig) -> ExperimentConfig:
    """`config` itself, if its parts fit together; otherwise ConfigError."""
    batch, pieces = config.training.batch_size, config.schedule.num_microbatches
    if pieces != SEARCHED and batch % pieces:
        raise ConfigError(
            f"training.batch_size={batch} cannot be cut into schedule.num_microbatches={pieces} equal microbatches: "
            f"make it a multiple of {pieces}, or choose a number that divides {batch}"
        )
    if config.mode is Mode.DRY_RUN and config.launcher.kind is not LauncherKind.SLURM:
        raise ConfigError(
            "mode=dry_run prints the batch scripts that would be submitted, and "
            f"launcher={config.launcher.kind.value} submits none: use launcher=slurm"
        )
    devices, ranks = config.cluster.num_devices, config.launcher.max_ranks
    if config.mode is not Mode.PLAN and devices > ranks:
        way = "raise launcher.max_ranks" if config.launcher.kind is LauncherKind.SLURM else "launcher=slurm"
        raise ConfigError(
            f"cluster {config.cluster.name!r} has {devices} devices, but launcher {config.launcher.kind.value} can start {ranks} ranks "
            f"(launcher.max_ranks), and each device needs one. Choose a smaller cluster, or {way}, or plan only, by mode=plan"
        )
    if config.profiling.store and Path(config.profiling.store).exists() and not Path(config.profiling.store).is_dir():
        raise ConfigError(f"profiling.store={config.profiling.store} is not a folder: name one, or a path where one can be made")
    if config.data.kind is DataKind.TOKEN_FILE and config.mode is Mode.FULL and not Path(config.data.path).is_file():
        raise ConfigError(
            f"data.path={config.data.path} is not a file: it must be there, on a file system that all nodes see, before jobs start"
        )
    if config.training.evaluate_every and not config.data.kind.is_made_up and not config.data.held_out_fraction:
        raise ConfigError(
            f"training.evaluate_every={config.training.evaluate_every} needs held-out data, and data.held_out_fraction is 0: "
            "raise it, or set training.evaluate_every=0"
        )
    return config


def write_config(config: ExperimentConfig, path: Path) -> None:
    """Write the resolved YAML of `config` to `path`, whole or not at all."""
    write_text(path, config.resolved)


def load_config(path: Path) -> ExperimentConfig:
    """Read a file of `write_config` back; ConfigError if it is absent, torn, or has keys or types that this version does not know."""
    try:
        loaded = OmegaConf.load(path)
        composed = OmegaConf.merge(_schema(), loaded)
    except FileNotFoundError:
        raise ConfigError(f"{path} is not there: a run folder has a config.yaml, is this one?") from None
    except (OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError, OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a config of this version of alpa_hpc: {_first_line(error)}. Start the run again.") from error
    return to_config(cast(Composed, composed))


def _refuse_unknown_keys(composed: Composed) -> None:
    """Hydra itself refuses KEY=VALUE where the schema has no such key, but takes +KEY=VALUE as a wish to add one."""
    try:
        OmegaConf.merge(_schema(), OmegaConf.create(cast(dict[str, Any], OmegaConf.to_container(composed))))
    except OmegaConfBaseException as error:
        key = error.full_key or "the configuration"
        refuse_unknown_key(key, ExperimentConfig)
        raise ConfigError(f"{key} cannot be set: {_first_line(error)}. Is it spelt right? --help lists all keys") from error


def _known_clusters() -> str:
    shipped = set(config_names("cluster"))
    calibrated = {name.removesuffix(".yaml") for name in ConfigStore.instance().repo.get("cluster", {})}
    return "Known clusters: " + ", ".join(sorted(shipped | calibrated))


def _schema() -> DictConfig:
    return OmegaConf.structured(twin(ExperimentConfig))


def _with_absolute_paths(values: dict[str, Any]) -> dict[str, Any]:
    """`values` with paths that hold in any folder: a job does not run where the command did. An empty path stays empty."""
    changed: dict[str, Any] = {**values, "data": {**values["data"]}, "profiling": {**values["profiling"]}}
    for options, key in ((changed, "runs"), (changed, "model_path"), (changed["data"], "path"), (changed["profiling"], "store")):
        options[key] = options[key] and str(Path(options[key]).expanduser().absolute())
    return changed


def _build_model(values: Mapping[str, Any]) -> Model:
    """The object that `_target_` and its arguments make; ConfigError if they make none, or one without the methods of `Model`."""
    target = values.get("_target_")
    if not target:
        raise ConfigError("model._target_ is not set, expected the dotted path of a class, such as alpa_hpc.models.gpt.GPT")
    try:
        model = instantiate(OmegaConf.create(dict(values)), _convert_="all")
    except (HydraException, OmegaConfBaseException) as error:
        arguments = ", ".join(sorted(set(values) - {"_target_"}))
        raise ConfigError(f"model: cannot make {target}({arguments}): {_root_cause(error, target)}{_taken_words(error, target)}") from error
    lacking = [method for method in ("init", "loss", "batch") if not callable(getattr(model, method, None))]
    if lacking:
        raise ConfigError(f"model: {target} lacks {', '.join(lacking)}; alpa_hpc/training/model.py documents what a model must offer")
    return model


def _taken_words(error: BaseException, target: str) -> str:
    """What the model's class takes, where its arguments are not those; for the end of a message."""
    while error.__cause__ is not None:
        error = error.__cause__
    if not isinstance(error, TypeError):
        return ""
    try:
        taken = inspect.signature(get_object(target)).parameters.values()
    except (TypeError, ValueError, ImportError):  # no function, or one that does not tell
        return ""
    needed = [one.name for one in taken if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    optional = [one.name for one in taken if one.default is not one.empty]
    words = [f"needs {', '.join(needed)}"] if needed else []
    words += [f"may have {', '.join(optional)}"] if optional else []
    return f". It {' and '.join(words)}" if words else ""


def _folder_of_module(target: str) -> str:
    """The folder that must be on Python's path for `target` to be found; empty if it is one that every Python of this installation has."""
    spec = importlib.util.find_spec(target.partition(".")[0])
    assert spec is not None, f"{target} was imported a moment ago"
    places = spec.submodule_search_locations
    folder = Path(places[0] if places else spec.origin or "").absolute().parent
    installed = {Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib", "stdlib")}
    return "" if folder in installed or spec.name == "alpa_hpc" else str(folder)


def _root_cause(error: BaseException, target: str) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, ModuleNotFoundError) and error.name == target and (module := target.rpartition(".")[0]) in sys.modules:
        return f"the module {module} has no {target.rpartition('.')[2]}"  # which Hydra took for a module within it
    hint = ". Is its module on Python's path, or in model_path=FOLDER?" if isinstance(error, ImportError) else ""
    return f"{type(error).__name__}: {error}".rstrip(".") + hint


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
