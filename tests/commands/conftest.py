"""What the tests of verbs share: an empty folder of runs in the working folder, and a Slurm that is not one."""

from pathlib import Path

import pytest

from alpa_hpc.commands import cancel, list_runs
from alpa_hpc.launch import views
from tests.commands.run_folders import FakeSlurm


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm()
    monkeypatch.setattr(views.view_run, "__defaults__", (fake.ask, lambda names: {}))  # pyright: ignore[reportUnknownLambdaType]
    monkeypatch.setattr(cancel, "cancel", fake.cancel)
    monkeypatch.setattr(cancel, "cancel_pending", fake.cancel_pending)
    monkeypatch.setattr(list_runs, "ask_queue", fake.ask)
    monkeypatch.setattr(cancel, "POLL_SECONDS", 0.01)
    return fake
