"""Property: what the YAML and the command line say is what the frozen ExperimentConfig holds, or a ConfigError says why not."""

import os
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

from alpa_hpc.config import ExperimentConfig, Mode, compose_experiment, load_config, to_config, write_config
from alpa_hpc.errors import ConfigError
from alpa_hpc.launch.options import Chain, LauncherKind
from alpa_hpc.runtime.options import ScheduleKind
from alpa_hpc.schema import check_keys
from alpa_hpc.stages.candidate import SubmeshShapes
from alpa_hpc.stages.options import RematChoice
from tests.configs import STUB, WITHOUT_SIZES, Stub, composed, config_of

REPOSITORY = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def path_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """A config that names a folder of models puts it there."""
    monkeypatch.setattr(sys, "path", [*sys.path])


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
        (["model._target_=tests.configs.Nothing"], "the module tests.configs has no Nothing$"),
        (["model._target_=tests.configs.Stub"], r"unexpected keyword argument .*\. It needs vocab, sequence$"),
        (["+model.wdith=17"], r"unexpected keyword argument 'wdith'\. It needs .*hidden, .* and may have .*dropout"),
        (["model._target_=''"], "_target_ is not set"),
        (["model._target_=tests.configs.LossOnly", "~model.vocab", "~model.sequence", *WITHOUT_SIZES], "lacks init, batch"),
    ],
)
def test_a_model_that_cannot_be_used_is_a_config_error(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s)model.*{message}"):
        to_config(composed("+experiment=quickstart", *overrides))


def test_a_job_that_runs_elsewhere_finds_the_users_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "code" / "users_package"
    package.mkdir(parents=True)
    lines = ["class Mine:", *(f"    def {name}(self, *args): ..." for name in ("init", "loss", "batch"))]
    (package / "model.py").write_text("\n".join(lines))
    (package / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path / "code"), *sys.path])
    config = to_config(
        composed("+experiment=quickstart", *WITHOUT_SIZES, "~model.vocab", "~model.sequence", "model._target_=users_package.model.Mine")
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
