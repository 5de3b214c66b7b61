"""A run that fails in this process says so in its folder, keeps what it had, and names the folder to the person."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from jax.errors import JaxRuntimeError
from jax.sharding import Mesh
from jax.stages import Compiled

from alpa_hpc.api import load_plan
from alpa_hpc.commands import explain, list_runs
from alpa_hpc.config import compose_experiment
from alpa_hpc.errors import ConfigError, InfeasibleError, TraceError
from alpa_hpc.experiment import run
from alpa_hpc.launch.arguments import config_names
from alpa_hpc.launch.files import read_json
from alpa_hpc.launch.paths import JobKind, RunPaths
from alpa_hpc.launch.status import JobState, read_status
from alpa_hpc.models.gpt import GPT
from alpa_hpc.parts import data_fault, key_of_search, num_values_of, prepared
from alpa_hpc.runtime.tasks import StageTask, compile_task
from alpa_hpc.training.metrics import read_metrics
from alpa_hpc.verify import plan as verify_plan
from alpa_hpc.verify import target

SMALL = ["cluster.num_nodes=1", "cluster.devices_per_node=1", "layers.num_layers=1", "schedule.num_microbatches=1", "training.batch_size=2"]
TINY = [*SMALL, "model.num_layers=1", "model.hidden=16", "model.vocab=256", "model.sequence=8", "profiling=analytic"]


def only_run(runs: Path) -> RunPaths:
    """The one run folder there is."""
    [folder] = (runs / "quickstart").iterdir()
    return RunPaths(folder)


def test_a_planning_that_fails_here_says_so_in_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TraceError, match="cannot be cut into 500 layers"):
        run(compose_experiment("quickstart", [*TINY, "mode=plan", "layers.num_layers=500", f"runs={tmp_path}"]))
    paths = only_run(tmp_path)
    status = read_status(paths, JobKind.PLAN)
    assert status is not None
    assert (status.state, status.exit_code) == (JobState.FAILED, 1)
    assert "cannot be cut into 500 layers" in status.message
    assert capsys.readouterr().out == f"run folder: {paths.root}\n"


@pytest.mark.parametrize("launcher", ["local", "slurm"])
def test_a_planning_that_would_fail_in_a_job_is_refused_before_one_starts(tmp_path: Path, launcher: str) -> None:
    asked = [*TINY, "mode=plan", "profiling=measured", f"launcher={launcher}", "layers.num_layers=500", f"runs={tmp_path}"]
    with pytest.raises(TraceError, match="cannot be cut into 500 layers"):
        run(compose_experiment("quickstart", asked))
    assert not (tmp_path / "quickstart").exists()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("model.vocab=100", "the model knows 100 tokens, bytes need 256"),
        ("data=synthetic_images", "synthetic images need a model whose batch is"),
        ("data=token_file data.path=/nowhere/tokens.npy", "token file /nowhere/tokens.npy is not there"),
    ],
)
def test_a_plan_for_data_that_cannot_be_trained_on_is_made_with_a_warning(
    wrong: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(compose_experiment("quickstart", [*TINY, "mode=plan", f"runs={tmp_path}", *wrong.split()]))
    assert f"warning: a plan needs no data, but training would be refused: {words}" in capsys.readouterr().err
    assert only_run(tmp_path).plan.exists()


@pytest.mark.parametrize("name", config_names("experiment"))
def test_the_data_of_each_experiment_are_for_its_model(name: str) -> None:
    assert data_fault(compose_experiment(name)) == ""


@pytest.mark.parametrize("vocab", [None, "many", 2.5])
def test_data_that_cannot_know_the_range_of_integers_says_so(vocab: object) -> None:
    with pytest.raises(ConfigError, match=f"vocab or num_classes is {vocab!r}, expected a whole number"):
        num_values_of(SimpleNamespace(vocab=vocab))


def test_a_training_that_goes_astray_stops_and_says_so(tmp_path: Path) -> None:
    astray = ["launcher=inprocess", "training.learning_rate=1e30", "training.num_steps=10", f"runs={tmp_path}"]
    command = [sys.executable, "-m", "alpa_hpc", "+experiment=quickstart", *TINY, *astray]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)  # jax counts its devices once a process
    paths = only_run(tmp_path)
    assert ended.returncode == 1
    assert ended.stdout == f"run folder: {paths.root}\n"
    assert re.search(r"^error: the loss is nan at step 2, .* the last finite one was \d\.\d+ at step 1", ended.stderr, re.MULTILINE)
    planning, training = read_status(paths, JobKind.PLAN), read_status(paths, JobKind.TRAIN)
    assert planning is not None and planning.state is JobState.DONE
    assert training is not None and training.state is JobState.FAILED
    assert "the loss is nan at step 2" in training.message
    assert [line["step"] for line in read_metrics(paths.metrics)] == [1, 2]
    assert not paths.training.exists()


def test_the_chosen_stages_are_compiled_and_compared_with_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(jax.devices()) >= 4  # and jax has started: planning must do with the devices that there are
    four = ["cluster.devices_per_node=4", "training.batch_size=8", "search.check_target=cpu", "mode=plan", f"runs={tmp_path}"]
    paths = RunPaths(run(compose_experiment("quickstart", [*TINY, *four])))
    check = read_json(paths.result)["planning"]["check"]
    assert check["target"] == "cpu" and check["mismatches"] == []
    assert {row["task"] for row in check["tasks"]} >= {"forward", "backward", "partials", "update"}
    exchanges = [one for row in check["tasks"] for one in row["collectives"]]
    assert exchanges and all(one["planned_bytes"] == one["compiled_bytes"] > 0 for one in exchanges)
    assert "checked against code for cpu: planned / compiled bytes" in capsys.readouterr().out


def test_a_compiler_that_fails_on_a_task_leaves_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(task: StageTask, mesh: Mesh) -> Compiled:
        if task.name == "backward":
            raise JaxRuntimeError("INTERNAL: no tile sizes for hlo: %dot.36\n  in a file of XLA's")
        return compile_task(task, mesh)

    monkeypatch.setattr(verify_plan, "compile_task", failing)
    four = ["cluster.devices_per_node=4", "training.batch_size=8", "search.check_target=cpu", "mode=plan", f"runs={tmp_path}"]
    paths = RunPaths(run(compose_experiment("quickstart", [*TINY, *four])))
    assert load_plan(paths.plan).stages
    [result, planning] = [read_json(paths.result)["planning"]["check"], read_json(paths.planning)["check"]]
    [failed] = result["not_compiled"]
    assert result == planning and failed == {"stage": 0, "task": "backward", "reason": "INTERNAL: no tile sizes for hlo: %dot.36"}
    assert {row["task"] for row in result["tasks"]} >= {"forward", "update"} and result["mismatches"] == []
    told = capsys.readouterr()
    assert "the plan stands, but stage 0, backward is not checked: XLA's compiler for cpu failed on it: INTERNAL: no tile" in told.err
    assert "; 1 not checked, since the compiler failed: stage 0, backward (all in planning.json)" in told.out


def test_a_check_that_cannot_be_made_is_refused_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "PLUGINS", ())
    with pytest.raises(ConfigError, match=r"pip install '\.\[gpu-check\]'"):
        run(compose_experiment("quickstart", [*TINY, "search.check_target=h100", "mode=plan", f"runs={tmp_path}"]))
    assert not (tmp_path / "quickstart").exists()


def test_a_sweep_of_searches_ends_in_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "cluster.device.memory=64000000,1000"
    command = [sys.executable, "-m", "alpa_hpc", "-m", "+experiment=quickstart", *TINY, "mode=plan", "search=alpa,manual", sizes]
    ended = subprocess.run([*command, f"runs={tmp_path}"], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1, "some runs found no plan"
    told = re.search(rf"^all 4 runs in one table: python -m alpa_hpc list --sweep (\S+) --runs {tmp_path}$", ended.stderr, re.MULTILINE)
    assert told
    assert list_runs.main(["--sweep", told[1], "--runs", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [re.split(r"  +", line) for line in lines[3:7]]
    assert [row[:3] for row in rows] == [
        ["quickstart", "alpa", "done"],
        ["quickstart", "alpa", "out of memory"],
        ["quickstart", "manual", "refused"],
        ["quickstart", "manual", "refused"],
    ]
    assert rows[0][5].endswith(" of 64 MB") and rows[0][-1] == "cluster.device.memory=64000000"
    assert rows[1][-2] == "cluster.device.memory=1000" and rows[1][-1].endswith("a device are missing at least")
    assert lines[-1] == "4 runs: 1 done, 1 out of memory, 2 refused"
    planned, lacking = (tmp_path / "quickstart" / row[at] for row, at in ((rows[0], 8), (rows[1], 3)))
    result = json.loads((planned / "result.json").read_text())["planning"]
    assert (result["search"], result["infeasible"]) == ("alpa", [])
    assert result["gap"] == result["objective_seconds"] / result["lower_bound_seconds"] - 1 >= 0
    assert [explain.main([str(folder)]) for folder in (planned, lacking)] == [0, 1]
    assert re.search(r"bound +.* \(gap .* %\).*\n(.*\n)*plan +none fits: .* are missing at least", capsys.readouterr().out)


def test_the_same_search_is_made_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["mode=plan", f"runs={tmp_path}"]
    first, second = (RunPaths(run(compose_experiment("quickstart", [*TINY, *asked]))) for _ in range(2))
    assert second.plan.read_text() == first.plan.read_text()
    made, known = read_json(first.planning), read_json(second.planning)
    differing = {name for name in made if made[name] != known[name]}
    assert differing <= {"seconds"}
    assert {"solve", "simulate"} <= set(made["seconds"]) and "solve" not in known["seconds"]
    assert made["searched_by"] == known["searched_by"] == str(first.root)
    assert f"found by {first.root}, which was asked the same" in capsys.readouterr().err
    explain.main([str(second.root)])
    assert f"searched by {first.root}" in capsys.readouterr().out


def test_the_number_of_microbatches_is_chosen_and_all_jobs_of_the_run_know_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["training.batch_size=8", "schedule.num_microbatches=0", "training.num_steps=2", "launcher=inprocess", f"runs={tmp_path}"]
    command = [sys.executable, "-m", "alpa_hpc", "+experiment=quickstart", *TINY, "cluster.devices_per_node=2", *chosen]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)  # jax counts its devices once a process
    assert ended.returncode == 0, ended.stderr
    paths = only_run(tmp_path)
    planning, tried = read_json(paths.planning), read_json(paths.microbatches)
    assert [row["num_microbatches"] for row in tried["tried"]] == [1, 2, 4, 8]
    fastest = min((row for row in tried["tried"] if not row["reason"]), key=lambda row: row["simulated_seconds"])
    number = fastest["num_microbatches"]
    assert tried["chosen"] == planning["num_microbatches"] == json.loads(paths.plan.read_text())["num_microbatches"] == number
    assert planning["predicted_step_seconds"] == pytest.approx(fastest["simulated_seconds"])
    assert len(read_metrics(paths.metrics)) == 2, "the training job traced the same step"
    assert f"microbatches: {number}, chosen from 4 numbers: " in ended.stdout
    for more in ([], ["--layer", "0"]):
        assert explain.main([str(paths.root), *more]) == 0
    assert f"of microbatches: {number}, chosen from 4 numbers: " in capsys.readouterr().out
    kept = sorted(paths.known_numbers.iterdir())
    searched = [path.stat().st_mtime_ns for path in kept]
    again = subprocess.run([*command, "mode=plan"], capture_output=True, text=True, timeout=120, check=False)
    assert again.returncode == 0, again.stderr
    assert [path.stat().st_mtime_ns for path in kept] == searched, "what was known was searched again"
    assert kept and f"microbatches: {number}, chosen from 4 numbers: " in again.stdout


def test_a_run_whose_model_fits_at_no_number_of_microbatches_says_so(tmp_path: Path) -> None:
    asked = [*TINY, "mode=plan", "schedule.num_microbatches=0", "cluster.device.memory=1000", f"runs={tmp_path}"]
    with pytest.raises(InfeasibleError, match="are missing at the least"):
        run(compose_experiment("quickstart", asked))
    paths = only_run(tmp_path)
    assert "infeasible" in read_json(paths.result)
    assert [row["simulated_seconds"] for row in read_json(paths.microbatches)["tried"]] == [None, None]


@pytest.mark.parametrize("change", ["training.batch_size=4", "search.num_best=1", "cluster.intra_node.bandwidth=1e9", "model.hidden=32"])
def test_another_search_is_made(tmp_path: Path, change: str) -> None:
    asked = ["mode=plan", f"runs={tmp_path}"]
    runs = [RunPaths(run(compose_experiment("quickstart", [*TINY, *asked, *more]))) for more in ([], [change])]
    assert [read_json(paths.planning)["searched_by"] for paths in runs] == [str(paths.root) for paths in runs]


def test_a_model_whose_formula_of_flop_has_changed_is_told_by_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [*TINY, "mode=plan", f"runs={tmp_path}"]
    first = RunPaths(run(compose_experiment("quickstart", asked)))
    monkeypatch.setattr(GPT, "iteration_flops", lambda _model, batch_size, remat: 7.0 * batch_size + remat)
    second = RunPaths(run(compose_experiment("quickstart", asked)))
    assert read_json(second.planning)["iteration_flop"] in (14.0, 15.0)
    assert second.plan.read_text() == first.plan.read_text()


def test_a_plan_whose_code_was_checked_is_known_under_the_same_flags_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    for checked, is_same in (("none", True), ("cpu", False)):
        config = compose_experiment("quickstart", [*TINY, "mode=plan", f"search.check_target={checked}"])
        step, keys = prepared(config).step, set[str | None]()
        for flags in ("", "--xla_cpu_enable_fast_math=true"):
            monkeypatch.setenv("XLA_FLAGS", flags)
            keys.add(key_of_search(config, step))
        assert (len(keys) == 1) is is_same, checked


@pytest.mark.parametrize("damage", [lambda text: text[:100], lambda text: text.replace('"gap"', '"gab"'), lambda _: "[]", lambda _: "\0"])
def test_what_is_damaged_is_not_known(tmp_path: Path, damage: Callable[[str], str]) -> None:
    asked = [*TINY, "mode=plan", f"runs={tmp_path}"]
    first = RunPaths(run(compose_experiment("quickstart", asked)))
    [kept] = first.known_plans.iterdir()
    text = kept.read_text()
    assert damage(text) != text
    kept.write_text(damage(text))
    second = RunPaths(run(compose_experiment("quickstart", asked)))
    assert read_json(second.planning)["searched_by"] == str(second.root)
    assert second.plan.read_text() == first.plan.read_text()
