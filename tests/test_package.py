"""The package as a user has it: what importing it costs, its public names, and the README's library example and model, as they stand."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import alpa_hpc

REPOSITORY = Path(__file__).parent.parent


def clean_environment() -> dict[str, str]:
    """A user's environment, without the virtual devices of the tests."""
    return {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"PYTHONPATH": str(REPOSITORY)}


def run_python(code: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, env=clean_environment(), capture_output=True, text=True, timeout=120, check=False)


def test_importing_the_package_imports_no_jax(tmp_path: Path) -> None:
    code = (
        "import sys, alpa_hpc; from alpa_hpc import ClusterSpec, DeviceSpec, Link, ParallelPlan; dir(alpa_hpc); print('jax' in sys.modules)"
    )
    result = run_python(code, tmp_path)
    assert (result.stdout, result.stderr) == ("False\n", "")


def test_every_public_name_is_there() -> None:
    assert {name for name in alpa_hpc.__all__ if getattr(alpa_hpc, name).__name__ != name} == set()
    assert dir(alpa_hpc) == sorted(alpa_hpc.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        getattr(alpa_hpc, "nothing")  # noqa: B009 - the checker would see through it


def readme_section(title: str) -> tuple[str, str]:
    """A section of the README and its one block of Python."""
    section = (REPOSITORY / "README.md").read_text(encoding="utf-8").partition(f"\n### {title}\n")[2].partition("\n##")[0]
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(blocks) == 1
    return section, blocks[0]


def test_the_readme_example_runs_as_it_stands(tmp_path: Path) -> None:
    result = run_python(readme_section("As a library")[1], tmp_path)
    assert result.returncode == 0, result.stderr
    assert "laptop: 2 x 4 cpu; number of stages: " in result.stdout
    losses = [float(line.split()[-1]) for line in result.stdout.splitlines() if line.startswith("loss ")]
    assert len(losses) == 20 and losses[-1] < 0.5 * losses[0]
    assert (tmp_path / "plan.json").is_file()


def test_a_model_of_the_users_own_is_planned_as_the_readme_says(tmp_path: Path) -> None:
    section, module = readme_section("Your own model")
    indented = "\n".join(line.strip() for line in section.splitlines() if line.startswith("    ") and line not in module.splitlines())
    config, found, command = indented.partition("python -m alpa_hpc")
    assert found
    (tmp_path / "my_package.py").write_text(module)
    (tmp_path / "my_configs" / "model").mkdir(parents=True)
    (tmp_path / "my_configs" / "model" / "mine.yaml").write_text(config)
    arguments = [sys.executable, "-m", "alpa_hpc", *command.split(), "mode=plan"]
    result = subprocess.run(arguments, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    [plan] = tmp_path.glob("runs/mine/*/plan.json")
    assert alpa_hpc.load_plan(plan).num_devices == 8
