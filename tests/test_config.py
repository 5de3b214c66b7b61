"""Property: what the YAML and the command line say is what the frozen ExperimentConfig holds, or a ConfigError says why not."""

import os
import re
import signal
import subprocess
import sys
from dataclasses import FrozenInstanceError, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from alpa_hpc.cluster.hardware import MeshShape, Submesh
from alpa_hpc.config import ExperimentConfig, Mode, compose_experiment, load_config, register, to_config, write_config
from alpa_hpc.errors import ConfigError
from alpa_hpc.launch.locations import config_folder
from alpa_hpc.launch.options import Chain, LauncherKind
from alpa_hpc.models.gpt import GPT
from alpa_hpc.models.llama import Llama
from alpa_hpc.models.moe import MoE
from alpa_hpc.models.wide_resnet import WideResNet
from alpa_hpc.profiling.options import CostSource
from alpa_hpc.runtime.options import ScheduleKind
from alpa_hpc.schema import check_keys
from alpa_hpc.stages.candidate import StageCandidate, SubmeshShapes
from alpa_hpc.stages.options import RematChoice
from alpa_hpc.training.options import DataKind, OptimiserKind

REPOSITORY = Path(__file__).parent.parent
EXPERIMENTS = sorted(path.stem for path in (config_folder() / "experiment").glob("*.yaml"))
STUB = ["model._target_=stub_model.Stub", "~model.hidden", "~model.num_layers", "~model.num_heads", "~model.dtype", "~model.dropout"]


@dataclass(frozen=True)
class Stub:
    """A model that needs no jax; `stub_model` below makes it importable by path."""

    vocab: int
    sequence: int

    def init(self, key: Any) -> Any: ...
    def loss(self, params: Any, batch: Any, key: Any) -> Any: ...
    def batch(self, batch_size: int) -> Any: ...


class LossOnly:
    def loss(self, params: Any, batch: Any, key: Any) -> Any: ...


@pytest.fixture(autouse=True)
def stub_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "stub_model", sys.modules[__name__])
    monkeypatch.setattr(sys, "path", [*sys.path])


def composed(*overrides: str) -> Any:
    register()
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        return compose("config", [*overrides])


def config_of(*overrides: str) -> ExperimentConfig:
    return to_config(composed(*overrides, *STUB))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_each_experiment_composes_and_its_values_win(name: str) -> None:
    wanted = OmegaConf.load(config_folder() / "experiment" / f"{name}.yaml")
    del wanted["defaults"]  # pyright: ignore[reportArgumentType]  # untyped container
    got = composed(f"+experiment={name}")
    assert wanted
    assert OmegaConf.merge(got, wanted) == got
    config = to_config(got)
    assert config.name == name


def test_all_experiments_of_the_paper_are_there() -> None:
    gpt, moe = ("350m", "1_3b", "2_6b", "6_7b", "15b", "39b"), ("380m", "1_3b", "2_4b", "10b", "27b", "70b")
    sizes = {"gpt": gpt, "moe": moe, "wresnet": ("250m", "1b", "2b", "4b", "6_8b", "13b")}
    assert {f"{family}{size}" for family, each in sizes.items() for size in each} <= set(EXPERIMENTS)


@pytest.mark.parametrize(
    ("name", "devices", "billions", "petaflop", "microbatches", "layers"),
    [
        ("gpt350m", 1, 0.3547, 3.285, 512, 8),
        ("gpt1_3b", 4, 1.3134, 11.637, 128, 6),
        ("gpt2_6b", 8, 2.6486, 23.343, 128, 8),
        ("gpt6_7b", 16, 6.6537, 57.614, 64, 8),
        ("gpt15b", 32, 15.364, 132.535, 128, 16),
        ("gpt39b", 64, 39.079, 333.653, 1024, 16),
    ],
)
def test_the_papers_points_are_those_of_its_tables(
    name: str, devices: int, billions: float, petaflop: float, microbatches: int, layers: int
) -> None:
    config = to_config(composed(f"+experiment={name}"))
    assert isinstance(config.model, GPT)
    assert config.model.num_params() / 1e9 == pytest.approx(billions, rel=3e-4)
    assert config.model.iteration_flops(config.training.batch_size, True) / 1e15 == pytest.approx(petaflop, rel=3e-4)
    assert config.model.dtype == "float16"
    assert (config.cluster.num_devices, config.schedule.num_microbatches, config.layers.num_layers) == (devices, microbatches, layers)
    assert (config.training.batch_size, config.search.remat, config.launcher.kind) == (1024, RematChoice.ALWAYS, LauncherKind.SLURM)
    assert config.profiling.source is CostSource.ANALYTIC


@pytest.mark.parametrize(
    ("name", "devices", "billions", "petaflop", "microbatches", "layers"),
    [
        ("moe380m", 1, 0.3835, 1.580, 512, 4),
        ("moe1_3b", 4, 1.3468, 3.006, 32, 8),
        ("moe2_4b", 8, 2.3830, 4.993, 32, 8),
        ("moe10b", 16, 10.170, 10.446, 16, 8),
        ("moe27b", 32, 26.648, 17.871, 128, 8),
        ("moe70b", 64, 70.415, 35.333, 64, 8),
    ],
)
def test_the_papers_mixtures_are_those_of_its_tables(
    name: str, devices: int, billions: float, petaflop: float, microbatches: int, layers: int
) -> None:
    config = to_config(composed(f"+experiment={name}"))
    assert isinstance(config.model, MoE)
    assert config.model.num_params() / 1e9 == pytest.approx(billions, rel=3e-4)
    assert config.model.iteration_flops(config.training.batch_size, True) / 1e15 == pytest.approx(petaflop, rel=3e-4)
    assert (config.model.dtype, config.model.group_size, config.model.capacity_factor) == ("float16", 2048, 2.0)
    assert (config.cluster.num_devices, config.schedule.num_microbatches, config.layers.num_layers) == (devices, microbatches, layers)
    assert (config.training.batch_size, config.training.optimiser, config.search.remat) == (
        1024,
        OptimiserKind.ADAFACTOR,
        RematChoice.ALWAYS,
    )
    tokens = config.training.batch_size // microbatches * config.model.sequence
    assert tokens % config.model.group_size == 0, "a microbatch holds whole groups"


@pytest.mark.parametrize(
    ("name", "devices", "billions", "depth", "channels", "width", "batch", "microbatches"),
    [
        ("wresnet250m", 1, 0.25, 50, 160, 2, 1536, 24),
        ("wresnet1b", 4, 1.0, 50, 320, 2, 1536, 24),
        ("wresnet2b", 8, 2.0, 50, 448, 2, 1536, 24),
        ("wresnet4b", 16, 4.0, 50, 640, 2, 1536, 32),
        ("wresnet6_8b", 32, 6.8, 50, 320, 16, 1536, 32),
        ("wresnet13b", 64, 13.0, 101, 320, 16, 1520, 38),
    ],
)
def test_the_papers_wide_resnets_are_those_of_its_tables(
    name: str, devices: int, billions: float, depth: int, channels: int, width: int, batch: int, microbatches: int
) -> None:
    config = to_config(composed(f"+experiment={name}"))
    assert config.model == WideResNet(depth=depth, channels=channels, width=width, num_classes=1024, image=224, dtype="float32")
    assert isinstance(config.model, WideResNet)
    assert config.model.num_params() / 1e9 == pytest.approx(billions, rel=0.05)
    assert (config.cluster.num_devices, config.schedule.num_microbatches, config.training.batch_size) == (devices, microbatches, batch)
    assert config.layers.num_layers == {50: 16, 101: 33}[depth], "a layer each residual block"
    assert (config.training.optimiser, config.search.remat, config.data.kind) == (OptimiserKind.SGD, RematChoice.ALWAYS, DataKind.SYNTHETIC)


@pytest.mark.parametrize(("name", "devices", "num_params"), [("llama1_1b", 8, 1_100_048_384), ("llama8b", 32, 8_030_261_248)])
def test_the_llamas_are_of_published_sizes(name: str, devices: int, num_params: int) -> None:
    config = to_config(composed(f"+experiment={name}"))
    assert isinstance(config.model, Llama)
    assert config.model.num_params() == num_params
    assert (config.cluster.num_devices, config.model.dtype) == (devices, "bfloat16")


def test_the_quickstarts_model_is_of_about_a_million_parameters() -> None:
    model = to_config(composed("+experiment=quickstart")).model
    assert isinstance(model, GPT)
    assert model.num_layers >= 4
    assert 0.7e6 < model.num_params() < 1.5e6


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("alpa", {}),
        ("intra_only", {"partitions": "one_stage"}),
        ("inter_only", {"submesh_shapes": "one_device"}),
        ("pp_dp", {"strategies": "data_parallel", "logical_shapes": "rows"}),
        ("equal_layer", {"partitions": "equal_layers"}),
        ("equal_operator", {"clustering": "equal_operators"}),
        ("megatron", {"partitions": "grid", "strategies": "megatron", "num_best": 16}),
        ("manual", {"partitions": "manual", "manual": ["layer 0 on 8x8 as 8x8"]}),
        ("wide", {"submesh_shapes": "all", "remat": "search", "num_best": 8}),
    ],
)
def test_each_search_is_that_of_the_paper_with_what_restricts_it(name: str, changed: dict[str, object]) -> None:
    given = ["search.manual=[layer 0 on 8x8 as 8x8]"] if name == "manual" else []
    base, found = (
        OmegaConf.to_container(composed("+experiment=gpt39b", f"search={one}", *words).search)
        for one, words in (("alpa", ()), (name, given))
    )
    assert isinstance(base, dict) and base["name"] == "alpa"
    assert found == {**base, "name": name, **changed}
    config = config_of("+experiment=gpt39b", f"search={name}", *given)
    assert config.search.given == ((StageCandidate(0, 1, Submesh(8, 8), MeshShape(8, 8), remat=False),) if given else ())


def test_each_search_is_tried_above() -> None:
    names = {path.stem for path in (config_folder() / "search").glob("*.yaml")}
    assert names == {"alpa", "intra_only", "inter_only", "pp_dp", "equal_layer", "equal_operator", "megatron", "manual", "wide"}


def test_words_become_members_and_values_frozen_objects() -> None:
    config = config_of(
        *("+experiment=quickstart", "mode=dry_run", "launcher=slurm"),
        *("schedule=gpipe", "search.remat=never", "launcher.slurm.setup=[module load cuda]"),
    )
    assert config.mode is Mode.DRY_RUN
    assert config.schedule.kind is ScheduleKind.GPIPE
    assert (config.search.remat, config.search.submesh_shapes) == (RematChoice.NEVER, SubmeshShapes.ALL)
    assert config.launcher.slurm.setup == ("module load cuda",)
    assert config.model == Stub(vocab=256, sequence=32)
    with pytest.raises(FrozenInstanceError):
        config.schedule.num_microbatches = 3  # pyright: ignore[reportAttributeAccessIssue]  # that it fails is the point


@pytest.mark.parametrize("mode", list(Mode))
def test_each_mode_has_its_word(mode: Mode) -> None:
    assert config_of("+experiment=gpt39b", f"mode={mode.value}").mode is mode


def test_the_command_line_beats_the_experiment() -> None:
    config = config_of("+experiment=gpt39b", "cluster.num_nodes=16", "launcher.slurm.partition=gpu")
    assert (config.cluster.num_devices, config.launcher.slurm.partition) == (128, "gpu")


def test_a_written_config_is_read_back_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = tmp_path / "tokens.bin"
    tokens.write_bytes(b"1234")
    monkeypatch.chdir(tmp_path)
    config = config_of(
        "+experiment=quickstart", "data=token_file", "data.path=tokens.bin", "+launcher.slurm.additional={mem: 0, exclude: n7}"
    )
    write_config(config, tmp_path / "config.yaml")
    monkeypatch.chdir("/")
    assert load_config(tmp_path / "config.yaml") == config
    assert (config.data.path, config.runs) == (str(tokens), tmp_path / "runs")


@pytest.mark.parametrize("text", ["name: [", "name: 3\ntrainin: 4\n", "training: {batch_size: many}\n", "- 1\n", "\x00", ""])
def test_a_torn_or_foreign_config_is_refused_with_its_name(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"config\.yaml|no experiment"):
        load_config(path)


def test_an_absent_config_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml is not there"):
        load_config(tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("mode=ful", "mode=ful .* expected one of: full, plan, dry_run"),
        ("name=a/b", "name is 'a/b'"),
        ("training.batch_size=30", "batch_size=30 cannot be cut into .*=4"),
        ("training.batch_size=0", "training: batch_size is 0"),
        ("training.learning_rate=0", "training: learning_rate"),
        ("training.optimiser=adam", r"training\.optimiser=adam .* adamw, sgd, adafactor"),
        ("training.learning_rate=nan", "training: learning_rate"),
        ("training.weight_decay=-1", "training: weight_decay"),
        ("data.held_out_fraction=1", "data: held_out_fraction"),
        ("data.held_out_fraction=0", "needs held-out data"),
        ("data.path=x", "data: kind stdlib_bytes with path"),
        ("data=token_file", r"no value: data\.path"),
        ("schedule.num_microbatches=-1", "schedule: num_microbatches is -1"),
        ("layers.num_layers=-1", "layers: num_layers is -1"),
        ("layers.imbalance=-0.1", "layers: imbalance"),
        ("search.num_best=0", "search: num_best is 0"),
        ("search.solver_seconds=0", "search: solver_seconds"),
        ("search=manual", "search: no stage is given"),
        ("search.manual=[layer 0 on 1x4 as 2x2]", "search: manual has 1 stages, and partitions=any"),
        ("search.manual=[layer 0 on 1x4 as 2x3]", r"search: 'layer 0 on 1x4 as 2x3' has 4 devices and sees them as 2 x 3"),
        ("search.manual=[[layer 0 on 1x4 as 2x2]]", r"search\.manual has \['layer 0 on 1x4 as 2x2'\], expected a list of texts alone"),
        ("site.xla_flags=[[a]]", r"site\.xla_flags has \['a'\], expected a list of texts"),
        ("search.balance=nan", "search: balance is nan, .* or inf"),
        ("cluster.device.flops_32bit=nan", r"cluster\.device: .*flops_32bit is nan, .*finite"),
        ("cluster.intra_node.bandwidth=inf", r"cluster\.intra_node: link: bandwidth is inf, expected"),
        ("cluster.inter_node.latency=inf", r"cluster\.inter_node: .*latency is inf, .*finite"),
        ("search.partitions=some", r"search\.partitions=some .* any, one_stage, equal_layers, grid, manual"),
        ("search.remat=maybe", r"search\.remat=maybe .* always, never, search"),
        ("profiling.repeats=0", "profiling: repeats"),
        ("launcher.max_ranks=0", "launcher: max_ranks"),
        ("launcher.slurm.time_minutes=-1", r"launcher\.slurm: time_minutes"),
        ("+launcher.slurm.additional={--mem: 0}", r"launcher\.slurm: additional has the flags \['--mem'\]"),
        ("+launcher.slurm.train={nodes: 3}", r"launcher\.slurm: train sets \['nodes'\]"),
        ("+launcher.slurm.plan={exclude: null}", r"launcher\.slurm: plan has {'exclude': None}"),
        ("+launcher.slurm.environment={A-B: 1}", r"launcher\.slurm: environment has 'A-B'"),
        ("launcher.chain=outside", r"launcher\.chain=outside is not a known choice, expected one of: inside, dependency, login"),
        ("cluster.num_nodes=3", "12 devices, but launcher local can start 8 ranks"),
        ("cluster.num_nodes=0", "cluster: .* at least one node"),
        ("cluster.device.efficiency=1.5", r"cluster\.device: .*efficiency"),
        ("cluster.inter_node.bandwidth=0", r"cluster\.inter_node: .*bandwidth"),
    ],
)
def test_bad_values_are_config_errors_that_say_where(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of("+experiment=quickstart", override)


@pytest.mark.parametrize("launcher", list(LauncherKind))
def test_each_launcher_takes_each_option_of_slurm(launcher: LauncherKind) -> None:
    """So that a run moves from one to another by one word."""
    changes = ["launcher.chain=login", "launcher.wait=true", "launcher.slurm.setup=[module load cuda]", "launcher.slurm.time_minutes=7"]
    flags = [
        "+launcher.slurm.additional.exclude=node7",
        "+launcher.slurm.profile.exclusive=''",
        "+launcher.slurm.train={mem: 0, no-kill: true}",
    ]
    variables = ["+launcher.slurm.environment.NCCL_DEBUG=WARN", "+launcher.slurm.environment.TITLE='a b'"]
    options = config_of("+experiment=quickstart", f"launcher={launcher.value}", *changes, *flags, *variables).launcher
    assert (options.kind, options.chain, options.wait) == (launcher, Chain.LOGIN, True)
    slurm = options.slurm
    assert (slurm.setup, slurm.time_minutes, slurm.additional) == (("module load cuda",), 7, {"exclude": "node7"})
    assert (slurm.plan, slurm.profile, slurm.train) == ({}, {"exclusive": ""}, {"mem": 0, "no-kill": True})
    assert slurm.environment == {"NCCL_DEBUG": "WARN", "TITLE": "a b"}


def test_launchers_say_the_same_of_slurm_but_for_what_each_needs() -> None:
    """The three files repeat each other, since Hydra shows a user the whole of the one that holds."""
    local, inprocess, slurm = (config_of("+experiment=quickstart", f"launcher={kind.value}").launcher for kind in LauncherKind)
    assert replace(inprocess, kind=local.kind) == local
    assert replace(slurm, kind=local.kind, max_ranks=local.max_ranks, wait=True, slurm=replace(slurm.slurm, time_minutes=0)) == local
    assert (slurm.chain, slurm.wait, slurm.slurm.time_minutes) == (Chain.INSIDE, False, 60)


def test_dry_run_needs_a_launcher_that_submits() -> None:
    for launcher in ("inprocess", "local"):
        with pytest.raises(ConfigError, match=f"launcher={launcher} submits none"):
            config_of("+experiment=quickstart", f"launcher={launcher}", "mode=dry_run")


@pytest.mark.parametrize(("override", "named"), [("+training.num_stepz=3", r"training\.num_stepz"), ("+foo=1", "foo")])
def test_a_key_that_is_added_by_a_plus_is_refused(override: str, named: str) -> None:
    with pytest.raises(ConfigError, match=f"^{named} is no key"):
        config_of("+experiment=quickstart", override)


def test_a_cost_store_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").touch()
    with pytest.raises(ConfigError, match=r"profiling\.store=.* is not a folder"):
        config_of("+experiment=quickstart", f"profiling.store={tmp_path / 'store'}")


OWN_CLUSTER = """
name: mine
num_nodes: 1
devices_per_node: 4
device: {kind: cpu, memory: 2e9, flops_32bit: 5e10, flops_16bit: 5e10, memory_bandwidth: 1e10, efficiency: 0.5}
intra_node: {bandwidth: 2e9, latency: 2e-5}
inter_node: {bandwidth: 2e9, latency: 2e-5}
"""


def test_a_cluster_of_ones_own_says_what_it_must_and_numbers_as_people_write_them(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "mine.yaml").write_text(OWN_CLUSTER)
    cluster = config_of("cluster=mine", "name=own", f"hydra.searchpath=[file://{tmp_path}]").cluster
    assert (cluster.device.memory, cluster.device.hides_collectives) == (2_000_000_000, False)
    assert type(cluster.device.memory) is int


def test_what_an_experiment_says_of_a_cluster_that_was_named_beside_it_is_told(tmp_path: Path) -> None:
    asked = ("+experiment=gpt39b", "cluster=laptop", "cluster.num_nodes=3", "launcher=local")
    said = command(*asked, folder=tmp_path).stderr.splitlines()
    warning = "warning: the experiment's cluster.devices_per_node=8 outranks the 2 of cluster=laptop: give cluster.devices_per_node=VALUE"
    assert [line.startswith(warning) for line in said] == [True, False], said
    assert said[1].startswith("error: cluster 'laptop' has 24 devices, but launcher local can start 8 ranks"), said


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("training.num_step=5", r"^training\.num_step is no key: did you mean training\.num_steps\? There are training\.batch_size, "),
        ("+launcher.slurm.timeminutes=5", r"did you mean launcher\.slurm\.time_minutes\?"),
        ("lanucher=slurm", r"^lanucher is no key: did you mean launcher\? There are cluster, "),
    ],
)
def test_a_key_that_there_is_not_is_told_with_those_that_there_are(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_keys([word], ExperimentConfig)


@pytest.mark.parametrize("word", ["+experiment=gpt39b", "+launcher.slurm.train.nice=5", "model.x=1", "hydra.run.dir=.", "-m", "+mine=x"])
def test_other_words_are_for_hydra(word: str) -> None:
    check_keys([word], ExperimentConfig)


def test_planning_needs_no_ranks() -> None:
    with pytest.raises(ConfigError, match=r"launcher slurm can start 4 ranks .* or raise launcher\.max_ranks, or plan only"):
        config_of("+experiment=quickstart", "launcher=slurm", "launcher.max_ranks=4", "mode=dry_run")
    assert config_of("+experiment=quickstart", "cluster.num_nodes=3", "mode=plan").cluster.num_devices == 12


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model._target_=nowhere.Model"], r"No module named 'nowhere'\. Is its module on Python's path, or in model_path=FOLDER\?"),
        (["model_path=/nowhere"], "_path=/nowhere is not a folder"),
        (["model.dropout=1.5"], r"dropout is 1\.5, expected a number with 0 <= dropout < 1 \(0 turns it off\)$"),
        (["model._target_=stub_model.Nothing"], "the module stub_model has no Nothing$"),
        (["model._target_=stub_model.Stub"], r"unexpected keyword argument .*\. It needs vocab, sequence$"),
        (["+model.wdith=17"], r"unexpected keyword argument 'wdith'\. It needs .*hidden, .* and may have .*dropout"),
        (["model._target_=''"], "_target_ is not set"),
        (["model._target_=stub_model.LossOnly", "~model.vocab", "~model.sequence", *STUB[1:]], "lacks init, batch"),
    ],
)
def test_a_model_that_cannot_be_used_is_a_config_error(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s)model.*{message}"):
        to_config(composed("+experiment=quickstart", *overrides))


def command(*arguments: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **variables}
    return subprocess.run(
        [sys.executable, "-m", "alpa_hpc", *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_cfg_shows_the_overrides_from_any_folder_and_writes_nothing(tmp_path: Path) -> None:
    done = command("+experiment=gpt39b", "training.num_steps=77", "mode=plan", "--cfg", "job", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    shown = OmegaConf.create(done.stdout)
    assert (shown.name, shown.mode, shown.training.num_steps, shown.model.hidden) == ("gpt39b", "plan", 77, 8192)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["--help"], ["+experiment=quickstart", "--cfg", "job"]])
def test_help_and_cfg_import_no_jax(arguments: list[str], tmp_path: Path) -> None:
    done = command(*arguments, folder=tmp_path, PYTHONPROFILEIMPORTTIME="1")
    imported = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")]
    assert done.returncode == 0
    assert "alpa_hpc.config" in imported
    assert not {"jax", "jaxlib", "optax", "mpi4py", "highspy"} & set(imported)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["experiment=quickstart"], r"error: .*\+experiment=quickstart.*gpt39b"),
        (["experiment="], r"error: .*\+experiment=NAME.*gpt39b"),
        (["+experiment=gpt40b"], "(?s)gpt40b.*gpt39b"),
        (["+experiment=quickstart", "cluster=moon"], "(?s)moon.*aws_p3_16xlarge"),
        (["+experiment=quickstart", "trainin.seed=1"], "trainin"),
        (["+experiment=quickstart", "training.seed=one"], r"(?s)one.*training\.seed"),
        ([], "error: no experiment was chosen.*gpt39b"),
        (["+experiment=quickstart", "training.batch_size=-1"], "error: training: batch_size is -1"),
        (["+experiment=quickstart", "training.batch_size=-1,-2", "-m"], "(?s)batch_size is -1.*batch_size is -2"),
    ],
)
def test_what_a_user_gets_wrong_ends_with_status_1_and_no_traceback(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = command(*arguments, folder=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.search(message, done.stderr), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_unwinds_what_runs_and_gives_status_130(number: signal.Signals, tmp_path: Path) -> None:
    main = f"""
import os, signal, time
import alpa_hpc.commands.run as command
def task(_):
    try:
        os.kill(os.getpid(), {int(number)})
        time.sleep(30)
    finally:
        print('unwound')
command.compose_command_line = task
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
raise SystemExit(command.run_command_line())
"""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", main], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (130, "unwound\n"), done.stderr
    assert re.fullmatch(r"error: stopped by (Ctrl-C|SIGTERM|SIGHUP)\n", done.stderr), done.stderr


@pytest.mark.parametrize("variable", ["ALPA_HPC_TRACEBACK", "HYDRA_FULL_ERROR"])
def test_the_traceback_can_be_had(variable: str, tmp_path: Path) -> None:
    done = command("+experiment=quickstart", "training.batch_size=-1", folder=tmp_path, **{variable: "1"})
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "batch_size is -1" in done.stderr


def test_configs_and_models_of_the_user_are_found(tmp_path: Path) -> None:
    model = tmp_path / "configs" / "model" / "mine.yaml"
    model.parent.mkdir(parents=True)
    model.write_text("_target_: mine.Mine\nwidth: 3\n")
    (tmp_path / "mine.py").write_text("class Mine:\n    def __init__(self, width):\n        raise SystemExit(f'made with width {width}')\n")
    done = command("--config-dir", "configs", "+experiment=quickstart", "model=mine", folder=tmp_path)
    assert "made with width 3" in done.stderr


def test_a_job_that_runs_elsewhere_finds_the_users_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "code" / "users_package"
    package.mkdir(parents=True)
    lines = ["class Mine:", *(f"    def {name}(self, *args): ..." for name in ("init", "loss", "batch"))]
    (package / "model.py").write_text("\n".join(lines))
    (package / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path / "code"), *sys.path])
    config = to_config(
        composed("+experiment=quickstart", *STUB[1:], "~model.vocab", "~model.sequence", "model._target_=users_package.model.Mine")
    )
    write_config(config, tmp_path / "config.yaml")
    there = "import sys, pathlib, alpa_hpc.config as config; print(config.load_config(pathlib.Path(sys.argv[1])).model)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", there, str(tmp_path / "config.yaml")],
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "users_package.model.Mine" in done.stdout, done.stderr


def test_an_installed_model_needs_no_folder() -> None:
    assert to_config(composed("+experiment=quickstart")).model_path == ""


def test_an_experiment_composes_from_python_as_from_the_command_line() -> None:
    overrides = ["schedule.num_microbatches=64", *STUB]
    assert compose_experiment("gpt15b", overrides) == config_of("+experiment=gpt15b", "schedule.num_microbatches=64")


@pytest.mark.parametrize(
    ("name", "override", "named"), [("gpt16b", "mode=plan", "gpt15b"), ("gpt15b", "schedule.microbatches=1", "microbatches")]
)
def test_what_does_not_compose_from_python_is_a_config_error(name: str, override: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        compose_experiment(name, [override, *STUB])
