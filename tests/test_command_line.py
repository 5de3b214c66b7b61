"""The command line as a user meets it: what it prints, imports and finds, and how it ends."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

REPOSITORY = Path(__file__).parent.parent


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


def test_what_an_experiment_says_of_a_cluster_that_was_named_beside_it_is_told(tmp_path: Path) -> None:
    asked = ("+experiment=gpt39b", "cluster=laptop", "cluster.num_nodes=3", "launcher=local")
    said = command(*asked, folder=tmp_path).stderr.splitlines()
    warning = "warning: the experiment's cluster.devices_per_node=8 outranks the 2 of cluster=laptop: give cluster.devices_per_node=VALUE"
    assert [line.startswith(warning) for line in said] == [True, False], said
    assert said[1].startswith("error: cluster 'laptop' has 24 devices, but launcher local can start 8 ranks"), said
