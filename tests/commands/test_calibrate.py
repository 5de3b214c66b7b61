"""`calibrate`: two ranks measure, the fitted cluster is found by its name, a second call measures nothing; bad input starts nothing."""

import json
from pathlib import Path
from typing import Any

import h5py
import pytest

from alpa_hpc.calibration.clusters import read_cluster
from alpa_hpc.calibration.request import calibrated_name
from alpa_hpc.commands.calibrate import main
from alpa_hpc.commands.find import all_roots
from alpa_hpc.config import compose_calibration, compose_experiment
from alpa_hpc.errors import AlpaError
from alpa_hpc.experiment import run
from alpa_hpc.launch.options import Chain
from alpa_hpc.launch.paths import calibrated_config, calibrations_folder, open_run
from alpa_hpc.launch.views import RunPhase, view_run

TINY = ("model.num_layers=1", "layers.num_layers=1", "training.batch_size=16", "search.num_best=1", "profiling=analytic", "data=synthetic")


def planning(runs: Path, cluster: str) -> dict[str, Any]:
    """What planning.json says of a small plan for a cluster."""
    root = run(compose_experiment("quickstart", [f"cluster={cluster}", f"runs={runs}", "mode=plan", *TINY]))
    return json.loads((root / "planning.json").read_text())


@pytest.mark.mpi
@pytest.mark.slow
def test_two_ranks_are_measured_once_and_plans_use_what_they_found(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["cluster=laptop", f"runs={runs}", "--quick", "--repeats", "3"]
    assert main(words) == 0
    first = capsys.readouterr()
    for label in ("all-reduce among 2", "reduce-scatter among 2", "all-gather among 2", "all-to-all among 2", "message of 1 ranks", "GB/s"):
        assert label in first.out
    (shard,) = calibrations_folder(runs).glob("shard-*.h5")
    with h5py.File(shard) as file:
        assert {group.attrs["num_ranks"] for group in file.values()} == {2}
    (root,) = all_roots(runs)
    view = view_run(open_run(root))
    assert (view.phase, view.reason) == (RunPhase.DONE, "a calibration")

    cluster = read_cluster(calibrated_config(runs, calibrated_name("laptop")))
    described = compose_experiment("quickstart", ["cluster=laptop", f"runs={runs}"]).cluster
    assert cluster.device.memory_bandwidth != described.device.memory_bandwidth
    assert 1e6 < cluster.intra_node.bandwidth < 1e12
    assert cluster.inter_node == described.inter_node, "there is no second node"
    assert compose_experiment("quickstart", ["cluster=laptop_calibrated", f"runs={runs}"]).cluster == cluster

    assert main(words) == 0
    again = capsys.readouterr()
    assert "measuring" in first.err
    assert "measuring" not in again.err
    assert again.out == first.out

    calibrated, as_described = planning(runs, "laptop_calibrated"), planning(runs, "laptop")
    for found in (calibrated, as_described):
        assert found["prediction_for_this_machine"] == "calibration"
    assert calibrated["predicted_step_seconds"] == calibrated["predicted_step_seconds_this_machine"]
    assert as_described["predicted_step_seconds"] != as_described["predicted_step_seconds_this_machine"]


def test_the_command_itself_submits_whatever_the_chain_of_jobs_is(runs: Path) -> None:
    config = compose_calibration(["cluster=aws_p3_16xlarge", "launcher=slurm", "launcher.chain=login", "site=cuda", f"runs={runs}"])
    assert config.launcher.chain is Chain.INSIDE
    assert config.cluster.num_devices == 64


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "which cluster"),
        (["cluster=no_such"], "Known clusters: aws_p3_16xlarge"),
        (["cluster=laptop", "launcher=inprocess"], "starts no ranks"),
        (["cluster=laptop", "--repeats", "1"], "at least 2"),
        (["cluster=laptop", "cluster.devices_per_node=0"], "at least one"),
        (["cluster=laptop", "cluster.name=x_calibrated"], "was calibrated already: name the one that it came from, cluster=x"),
        (["cluster=laptop_described", "launcher.max_ranks=4"], "can start 4 ranks"),
        (["cluster=laptop", "cluster.devices_per_node=500", "launcher.max_ranks=500"], "carries at most"),
    ],
)
def test_bad_input_starts_nothing(runs: Path, words: list[str], complaint: str) -> None:
    with pytest.raises(AlpaError, match=complaint):
        main([*words, f"runs={runs}"])
    assert not runs.exists()


def test_a_cluster_of_ones_own_is_found_where_a_run_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine" / "cluster").mkdir(parents=True)
    (tmp_path / "mine" / "cluster" / "own.yaml").write_text("defaults: [laptop]\nname: own\n")
    with pytest.raises(AlpaError, match="starts no ranks"):  # so the cluster was found
        main(["--config-dir", "mine", "cluster=own", "launcher=inprocess"])
    with pytest.raises(AlpaError, match="--config-dir yours is not a folder"):
        main(["--config-dir", "yours", "cluster=own"])


def test_a_torn_cluster_is_named_to_those_who_chose_it(runs: Path) -> None:
    config = calibrated_config(runs, "laptop_calibrated")
    config.parent.mkdir(parents=True)
    config.write_text("name: [")
    with pytest.raises(AlpaError, match=f"{config.name} is not the config of a cluster.*calibrate again"):
        compose_experiment("quickstart", ["cluster=laptop_calibrated", f"runs={runs}"])
    other = compose_experiment("quickstart", ["cluster=laptop", f"runs={runs}"]).cluster
    assert other == compose_experiment("quickstart", ["cluster=laptop"]).cluster
