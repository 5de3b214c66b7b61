"""How a layer of a planned run is split, and what else would have cost at a node: read back from the run folder alone."""

import pytest

from alpa_hpc.commands import explain, verb
from alpa_hpc.config import compose_experiment
from alpa_hpc.experiment import run
from alpa_hpc.launch.files import read_json, write_json
from alpa_hpc.launch.paths import RunPaths

ASKED = (
    "mode=plan",
    "profiling=analytic",
    "cluster.num_nodes=1",
    "cluster.devices_per_node=4",
    "search=intra_only",
    "training.batch_size=16",
)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    return RunPaths(run(compose_experiment("quickstart", [*ASKED, f"runs={tmp_path_factory.mktemp('runs')}"])))


def table(paths: RunPaths, capsys: pytest.CaptureFixture[str], *arguments: str) -> list[list[str]]:
    assert explain.main([str(paths.root), *arguments]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"run         {paths.root}\nlayer       1, of stage 0: layers 0-3 on 1x4")
    return [line.split() for line in out.split("\n\n")[1].splitlines()[1:]]


def test_a_layer_shows_what_every_node_chose(planned: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row[0]: row[1:] for row in table(planned, capsys, "--layer", "1")}
    assert rows["param.2"][0] == "params/blocks/1/qkv"
    stage = read_json(planned.plan)["stages"][0]
    chosen = read_json(planned.plan)["strategies"][stage["strategies"][1]]
    assert {name: row[-2] for name, row in rows.items() if row[-2] != chosen[name]} == {}
    assert all(int(row[-1]) > 1 for row in rows.values())


def test_a_node_shows_that_nothing_else_is_cheaper(planned: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    for node in ("param.8", "output.0"):
        rows = table(planned, capsys, "--layer", "1", "--node", node)
        assert [row[0] for row in rows].count("->") == 1
        assert rows[0][0] == "->" and rows[0][2:] == ["0", "0", "0"]
        others = [row for row in rows[1:] if len(row) > 2 and row[1] != "it"]
        assert len(others) > 1
        assert not any(row[1].startswith("-") for row in others), "memory was free, so nothing else takes fewer seconds"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layer", "4"], "--layer 4: the plan has layers 0 to 3"),
        (["--layer", "-1"], "--layer -1: the plan has layers 0 to 3"),
        (["--layer", "1", "--node", "param.99"], "--node param.99: the layer has no node of this name"),
        (["--layer", "1", "--node", "dot_general"], "(forward."),
    ],
)
def test_what_is_not_there_is_named(planned: RunPaths, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert verb.run_verb("explain", [str(planned.root), *arguments]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.out == ""


def test_a_run_of_an_older_version_does_not_say_what_memory_was_worth(planned: RunPaths) -> None:
    planning = read_json(planned.planning)
    older = {
        **planning,
        "plans": [
            {**plan, "stages": [{k: v for k, v in s.items() if k != "variant"} for s in plan["stages"]]} for plan in planning["plans"]
        ],
    }
    write_json(planned.planning, older)
    try:
        assert verb.run_verb("explain", [str(planned.root), "--layer", "1", "--node", "param.8"]) == 2
    finally:
        write_json(planned.planning, planning)


def test_a_node_without_its_layer_is_refused(planned: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        explain.main([str(planned.root), "--node", "param.8"])
    assert "say which by --layer N" in capsys.readouterr().err
