"""A job imports what its submitter imports, from whatever folder it is started."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import alpa_hpc
from alpa_hpc.launch import python
from alpa_hpc.launch.python import import_folders, job_python

ROOT = str(Path(str(alpa_hpc.__file__)).parents[1])


def test_a_job_imports_what_its_submitter_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    working = str(tmp_path / "working")
    Path(working).mkdir()
    monkeypatch.chdir(working)
    monkeypatch.setenv("PYTHONPATH", f"models{os.pathsep}{ROOT}")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    assert import_folders() == (ROOT, f"{working}/models")
    monkeypatch.setattr(sys, "path", [working, *sys.path])
    assert import_folders() == (ROOT, working, f"{working}/models"), "as with `python -m alpa_hpc`"


def test_an_installed_package_adds_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.setattr(python.sysconfig, "get_path", lambda _: ROOT)
    assert import_folders() == ()


def test_the_command_survives_a_shell_whatever_the_folders_are_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = tmp_path / "my 'own' $models"
    models.mkdir()
    (models / "users_model.py").write_text("print('found')\n")
    monkeypatch.setenv("PYTHONPATH", str(models))
    done = subprocess.run(
        ["sh", "-c", f"{job_python()} -c 'import users_model, alpa_hpc'"], cwd="/", capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "found\n"), done.stderr


def test_the_working_folder_of_a_job_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "alpa_hpc.py").write_text("raise SystemExit('this is not the package')\n")
    done = subprocess.run(["sh", "-c", f"{job_python()} -c 'import alpa_hpc'"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
