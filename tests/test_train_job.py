"""A training that did not come to its end is no success, whatever mpirun says."""

from pathlib import Path

import pytest

from alpa_hpc import train_job
from alpa_hpc.config import compose_experiment
from alpa_hpc.errors import LaunchError
from alpa_hpc.launch.paths import new_run


def test_ranks_that_end_well_without_having_trained_have_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = new_run(tmp_path, "preempted")
    paths.training.write_text("{}")  # of an earlier attempt
    paths.planning.write_text("{}")
    for name, found in {"config_of_run": compose_experiment("quickstart"), "read_plan": None, "fingerprint": {}, "run_ranks": None}.items():
        monkeypatch.setattr(train_job, name, lambda *_, found=found: found)
    with pytest.raises(LaunchError, match=r"mpirun with 8 ranks ended with exit code 0, but training did not come to its end"):
        train_job.train_run(paths)
    assert not paths.result.exists()
