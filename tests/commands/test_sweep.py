"""The table of a sweep: each run's plan or why it has none, and how many are done, failed, running and not begun."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from alpa_hpc.commands import explain, list_runs, verb
from alpa_hpc.commands.sweep import counts_words
from alpa_hpc.launch.paths import Origin, RunPaths, new_run
from alpa_hpc.launch.status import JobState
from alpa_hpc.launch.sweeps import SWEEPS
from tests.commands.run_folders import PLAN, made, report, write_text
from tests.report.test_explain import PLANNING

ID = "20260101-000000-000001"


def begun(runs: Path, number: int, search: str, mode: str = "plan") -> RunPaths:
    paths = new_run(runs, "demo", Origin((f"search={search}", "mode=plan", f"layers.num_layers={number}"), ID, number))
    config = {"mode": mode, "launcher": {"kind": "local"}, "training": {"num_steps": 1}, "search": {"name": search}}
    paths.config.write_text(json.dumps(config))
    return paths


def planned(paths: RunPaths, **more: Any) -> RunPaths:
    report(paths, PLAN, JobState.DONE)
    write_text(paths.planning, json.dumps(PLANNING))
    write_text(paths.result, json.dumps({"experiment": "demo", "planning": PLANNING, **more}))
    return paths


def infeasible(paths: RunPaths, missing: float) -> RunPaths:
    report(paths, PLAN, JobState.FAILED, message="no partition fits")
    refusal = {"reason": "no partition fits: much is missing\nmore", "missing_bytes": missing}
    write_text(paths.result, json.dumps({"experiment": "demo", "search": "intra_only", "infeasible": refusal}))
    return paths


@pytest.fixture
def sweep(runs: Path) -> Path:
    """Seven runs: planned, trained, out of memory, infeasible, failed, running, refused; and three that are not begun."""
    planned(begun(runs, 0, "alpa"))
    planned(begun(runs, 1, "wide"), training={"step_seconds": 2.5})
    infeasible(begun(runs, 2, "intra_only"), 3.25e9)
    infeasible(begun(runs, 3, "pp_dp"), 0.0)
    report(begun(runs, 4, "megatron"), PLAN, JobState.FAILED, message="a solver failed")
    report(begun(runs, 5, "manual"), PLAN, JobState.RUNNING, pid=os.getpid())
    made(runs)
    folder = runs / SWEEPS / ID
    folder.mkdir(parents=True)
    (folder / "sweep.json").write_text('{"total": 10}')
    refused = {"overrides": ["+experiment=other", "search=manual", "mode=plan"], "reason": "no stage\nmore", "missing_bytes": 0.0}
    (folder / "refused-0006.json").write_text(json.dumps(refused))
    (folder / "refused-0004.json").write_text(json.dumps({**refused, "reason": "a solver failed"}))
    return runs


def cells(line: str) -> list[str]:
    return [word.strip() for word in line.split("  ") if word.strip()]


def test_each_run_of_a_sweep_has_its_row(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert list_runs.main(["--sweep", ID]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"sweep {ID} with mode=plan"
    rows = [cells(line) for line in lines[3:10]]
    assert rows[0][:6] == ["demo", "alpa", "done", "500.00 ms", "0.25", "8 GB of 10 GB"]
    assert rows[1][:9] == ["demo", "wide", "done", "500.00 ms", "0.25", "8 GB of 10 GB", "2", "8", "2500.00 ms"]
    assert (rows[2][:3], rows[2][-1]) == (["demo", "intra_only", "out of memory"], "3.25 GB a device are missing at least")
    assert (rows[3][:3], rows[3][-1]) == (["demo", "pp_dp", "infeasible"], "no partition fits: much is missing")
    assert (rows[4][:3], rows[4][-1]) == (["demo", "megatron", "failed"], "plan: a solver failed")
    assert rows[5][:3] == ["demo", "manual", "running"] and rows[5][-1] == "planning"
    assert rows[6] == ["other", "manual", "refused", "no stage"]
    assert [row[-1 if number < 2 else -2] for number, row in enumerate(rows[:6])] == [f"layers.num_layers={n}" for n in range(6)]
    assert lines[-1] == "10 runs: 2 done, 1 out of memory, 1 failed, 1 infeasible, 1 refused, 1 still running, 3 not begun"


def test_a_sweep_that_is_none_is_an_error(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verb.run_verb("list", ["--sweep", "2027"]) == 2
    assert capsys.readouterr().err.startswith("error: '2027' is no sweep in ")


def test_counts_are_those_of_the_rows() -> None:
    assert counts_words(3, ["done"] * 3) == "3 runs: 3 done"
    assert counts_words(4, ["running", "failed"]) == "4 runs: 1 failed, 1 still running, 2 not begun"


def test_explain_tells_the_plan(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = planned(begun(runs, 0, "alpa"))
    assert explain.main([str(paths.root)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"run         {paths.root}\nexperiment  demo\ncluster     1 x 3 v100\nsearch      megatron")
    assert "what lost, and why:\n   400.00 ms  out of memory by 0.31 GB on stage 1: " in out


def test_explain_tells_why_there_is_no_plan(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    infeasible(begun(runs, 0, "intra_only"), 3.25e9)
    assert explain.main([]) == 1
    out = capsys.readouterr().out
    assert "plan        none fits: 3.25 GB a device are missing at least\n\nno partition fits: much is missing\nmore\n" in out
    paths = begun(runs, 1, "alpa")
    report(paths, PLAN, JobState.RUNNING, pid=os.getpid())
    assert verb.run_verb("explain", [str(paths.root)]) == 2
    assert "has no plan: the run is planning" in capsys.readouterr().err


def lacking(document: Any) -> Iterator[Any]:
    """The document with one thing out of it, or in the place of it another: for each thing that it has."""
    for key in list(document) if isinstance(document, dict) else range(len(document)) if isinstance(document, list) else ():
        rest = document.copy()
        del rest[key]
        yield rest
        for other in ({}, [], None, "word"):
            changed = document.copy()
            changed[key] = other
            yield changed
        for part in lacking(document[key]):
            changed = document.copy()
            changed[key] = part
            yield changed


def test_a_plan_that_is_damaged_is_told_of_or_refused_by_name(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever lacks: no traceback, and no other run is hidden."""
    paths = next(paths for paths in map(RunPaths, sweep.glob("demo/*")) if paths.planning.exists())
    for number, changed in enumerate((None, [], "word", *lacking(PLANNING))):
        paths.planning.write_text(json.dumps(changed))
        paths.result.write_text(json.dumps({"experiment": "demo", "planning": changed} if number % 2 else changed))
        if verb.run_verb("explain", [str(paths.root)]) == 2:
            assert re.match(rf"error: {paths.root}/\w+\.json lacks or garbles a field .* Start the run again", capsys.readouterr().err)
        verb.run_verb("status", [str(paths.root)])
        assert re.search(r"^plan +(.*predicted step|cannot be told: .* lacks or garbles)", capsys.readouterr().out, re.MULTILINE)
        assert verb.run_verb("list", ["--sweep", ID]) == 0
        assert " runs: " in capsys.readouterr().out.splitlines()[-1]


def test_a_marker_that_is_damaged_hides_no_other_run(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = next(map(RunPaths, sweep.glob("demo/*")))
    marker = json.loads(paths.marker.read_text())
    for field in ({"overrides": 5}, {"number": "x"}, {"number": None}, {"overrides": None}):
        paths.marker.write_text(json.dumps({**marker, **field}))
        assert verb.run_verb("list", []) == 0
        assert len([line for line in capsys.readouterr().out.splitlines() if " demo " in line]) == 7
        assert verb.run_verb("list", ["--sweep", ID]) == 0
        assert capsys.readouterr().out.splitlines()[-1].startswith("10 runs: ")


@pytest.mark.parametrize(
    "content", ["[]", "null", "launcher: []", "mode: plan\nlauncher: {kind: local}\ntraining: {num_steps: 1}\nsearch: []", "["]
)
def test_a_config_that_is_damaged_hides_no_other_run(sweep: Path, capsys: pytest.CaptureFixture[str], content: str) -> None:
    paths = next(map(RunPaths, sweep.glob("demo/*")))
    paths.config.write_text(content)
    assert verb.run_verb("list", []) == 0
    paths.config.unlink()
    paths.config.mkdir()
    assert verb.run_verb("list", []) == 0
    assert len([line for line in capsys.readouterr().out.splitlines() if " demo " in line]) == 14
