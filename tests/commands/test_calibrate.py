"""`calibrate`: two ranks measure, the fitted cluster is found by its name, a second call measures nothing; bad input starts nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import h5py
import pytest

from alpa_hpc.calibration.request import calibrated_name
from alpa_hpc.commands.calibrate import main
from alpa_hpc.commands.find import all_roots
from alpa_hpc.config import compose_experiment, read_cluster
from alpa_hpc.errors import AlpaError
from alpa_hpc.launch.paths import calibrated_config, calibrations_folder, open_run
from alpa_hpc.launch.views import RunPhase, view_run

TINY = ("layers.num_layers=2", "training.batch_size=16", "search.num_best=2", "profiling=analytic", "data=synthetic")


def call(runs: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "alpa_hpc", *words, f"runs={runs}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment, cwd=runs.parent)


@pytest.mark.mpi
@pytest.mark.slow
def test_two_ranks_are_measured_once_and_plans_use_what_they_found(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    first = call(runs, "calibrate", "cluster=laptop", "--quick", "--repeats", "3")
    assert first.returncode == 0, first.stderr
    for words in ("all-reduce among 2", "reduce-scatter among 2", "all-gather among 2", "all-to-all among 2", "message of 1 ranks", "GB/s"):
        assert words in first.stdout
    (shard,) = calibrations_folder(runs).glob("shard-*.h5")
    with h5py.File(shard) as file:
        assert {group.attrs["num_ranks"] for group in file.values()} == {2}
    config = calibrated_config(runs, calibrated_name("laptop"))
    cluster = read_cluster(config)
    described = compose_experiment("quickstart", ["cluster=laptop", f"runs={runs}"]).cluster
    assert cluster.device.memory_bandwidth != described.device.memory_bandwidth
    assert 1e6 < cluster.intra_node.bandwidth < 1e12
    assert cluster.inter_node == described.inter_node, "there is no second node"
    assert compose_experiment("quickstart", ["cluster=laptop_calibrated", f"runs={runs}"]).cluster == cluster

    again = call(runs, "calibrate", "cluster=laptop", "--quick", "--repeats", "3")
    assert again.returncode == 0, again.stderr
    assert "measuring" not in again.stderr
    assert again.stdout == first.stdout
    (root,) = all_roots(runs)
    view = view_run(open_run(root))
    assert (view.phase, view.reason) == (RunPhase.DONE, "a calibration")

    for name in ("laptop", "laptop_calibrated"):
        planned = call(runs, "+experiment=quickstart", f"cluster={name}", "mode=plan", *TINY)
        assert planned.returncode == 0, planned.stderr
    predictions = [json.loads((one / "planning.json").read_text()) for one in all_roots(runs) if (one / "planning.json").exists()]
    assert [one["prediction_for_this_machine"] for one in predictions] == ["calibration"] * 2
    calibrated, as_described = sorted(
        predictions, key=lambda one: one["predicted_step_seconds"] != one["predicted_step_seconds_this_machine"]
    )
    assert calibrated["predicted_step_seconds"] == calibrated["predicted_step_seconds_this_machine"]
    assert as_described["predicted_step_seconds"] != as_described["predicted_step_seconds_this_machine"]


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


def test_a_torn_cluster_is_named(runs: Path) -> None:
    config = calibrated_config(runs, "laptop_calibrated")
    config.parent.mkdir(parents=True)
    config.write_text("name: [")
    with pytest.raises(AlpaError, match=f"{config.name} is not the config of a cluster.*calibrate again"):
        compose_experiment("quickstart", ["cluster=laptop_calibrated", f"runs={runs}"])
