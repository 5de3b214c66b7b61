"""Property: configs and job scripts are found in a checkout, and in a wheel, where they are data of alpa_hpc and nothing else."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from alpa_hpc.errors import LaunchError
from alpa_hpc.launch import locations

REPOSITORY = Path(__file__).parent.parent.parent


def test_a_checkout_has_its_configs() -> None:
    assert locations.config_folder() == REPOSITORY / "conf"


@pytest.mark.parametrize("script", [path.stem for path in sorted((REPOSITORY / "jobs").glob("*.py"))])
def test_a_checkout_has_its_jobs(script: str) -> None:
    assert locations.job_script(script) == REPOSITORY / "jobs" / f"{script}.py"


def test_an_unknown_job_is_refused_with_the_known_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "_jobs").mkdir()
    (tmp_path / "_jobs" / "plan.py").touch()
    monkeypatch.setattr(locations, "files", lambda _: tmp_path)
    assert locations.job_script("plan") == tmp_path / "_jobs" / "plan.py"
    with pytest.raises(LaunchError, match=r"nope\.py; the known jobs are plan"):
        locations.job_script("nope")


def test_an_installation_without_configs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locations, "files", lambda _: tmp_path / "alpa_hpc")
    with pytest.raises(LaunchError, match="install alpa_hpc again"):
        locations.config_folder()


@pytest.mark.slow
def test_a_wheel_carries_configs_and_jobs_and_runs_anywhere(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(REPOSITORY)]
    subprocess.run(build, check=True, capture_output=True, timeout=120)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    expected = {f"alpa_hpc/_conf/{path.relative_to(REPOSITORY / 'conf')}" for path in (REPOSITORY / "conf").rglob("*.yaml")}
    expected |= {f"alpa_hpc/_jobs/{path.name}" for path in (REPOSITORY / "jobs").glob("*.py")}
    assert expected <= names
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"alpa_hpc"}

    (tmp_path / "elsewhere").mkdir()
    shown = subprocess.run(
        [sys.executable, "-m", "alpa_hpc", "+experiment=gpt39b", "--cfg", "job"],
        cwd=tmp_path / "elsewhere",
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "name: gpt39b" in shown.stdout
    where = "from alpa_hpc.launch.locations import config_folder; print(config_folder())"
    found = subprocess.run(
        [sys.executable, "-c", where],
        cwd=tmp_path / "elsewhere",
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert found.stdout.strip() == str(tmp_path / "site" / "alpa_hpc" / "_conf")
