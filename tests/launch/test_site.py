"""What a site's options put into the environment of processes on its devices, and that jax and XLA take it as meant."""

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import yaml

from alpa_hpc.config import compose_experiment, compose_site
from alpa_hpc.errors import ConfigError
from alpa_hpc.launch.locations import config_folder
from alpa_hpc.launch.site import Platform, SiteOptions, host_environment, site_environment

CUDA = SiteOptions(
    platform=Platform.CUDA,
    memory_fraction=0.8,
    preallocate=False,
    xla_flags=("--xla_gpu_autotune_level=4",),
    environment={"NCCL_DEBUG": "INFO", "NCCL_IB_TIMEOUT": 22},
)
CPU = SiteOptions(platform=Platform.CPU, memory_fraction=0.9, preallocate=True, xla_flags=(), environment={})
SITES = sorted(path.stem for path in (config_folder() / "site").glob("*.yaml"))


def shipped(name: str) -> SiteOptions:
    values: dict[str, Any] = yaml.safe_load((config_folder() / "site" / f"{name}.yaml").read_text())
    platform, flags = Platform(values.pop("platform")), tuple(values.pop("xla_flags"))
    return SiteOptions(platform=platform, xla_flags=flags, **values)


def jax_process(code: str, environment: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    inherited = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=inherited | environment, capture_output=True, text=True, timeout=60, check=False)


def test_cpu_site_leaves_gpus_alone() -> None:
    assert site_environment(CPU, {}) == {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    assert host_environment() == {"JAX_PLATFORMS": "cpu"}


def test_cuda_site_says_platform_memory_flags_and_variables() -> None:
    assert site_environment(CUDA, {}) == {
        "JAX_PLATFORMS": "cuda,cpu",
        "XLA_FLAGS": "--xla_gpu_autotune_level=4",
        "XLA_CLIENT_MEM_FRACTION": "0.8",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "NCCL_DEBUG": "INFO",
        "NCCL_IB_TIMEOUT": "22",
    }


def test_flags_of_the_environment_come_last_and_win() -> None:
    flags = site_environment(CUDA, {"XLA_FLAGS": "--xla_gpu_autotune_level=0 --xla_dump_to=/x"})["XLA_FLAGS"]
    assert flags == "--xla_gpu_autotune_level=4 --xla_gpu_autotune_level=0 --xla_dump_to=/x"


def test_a_second_time_it_changes_nothing() -> None:
    for environ in ({}, {"XLA_FLAGS": "--xla_dump_to=/x"}):
        once = site_environment(CUDA, environ)
        assert site_environment(CUDA, once) == once


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_fraction": 0.0}, "memory_fraction is 0.0"),
        ({"memory_fraction": 90.0}, "at most 1"),
        ({"xla_flags": ("xla_gpu_autotune_level=4",)}, "--xla_NAME=VALUE"),
        ({"xla_flags": ("--xla_dump_to=/x --xla_gpu_autotune_level=4",)}, "without spaces"),
        ({"environment": {"NCCL-DEBUG": "INFO"}}, "name of a variable"),
        ({"environment": {"XLA_FLAGS": "--xla_dump_to=/x"}}, "site.xla_flags says: set that one"),
        ({"environment": {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".5"}}, "site.memory_fraction"),
        ({"environment": {"NCCL_IB_DISABLE": True}}, "put it in quotes"),
    ],
)
def test_what_cannot_work_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(CUDA, **change)


@pytest.mark.parametrize("name", sorted(path.stem for path in (config_folder() / "experiment").glob("*.yaml")))
def test_experiments_on_real_clusters_choose_gpus(name: str) -> None:
    config = compose_experiment(name, ("mode=plan",))
    assert config.site == shipped("cpu" if config.cluster.device.kind == "cpu" else "cuda")
    assert compose_site(("site=cuda", "+site.environment.NCCL_IB_HCA=mlx5")).environment == {"NCCL_DEBUG": "WARN", "NCCL_IB_HCA": "mlx5"}


@pytest.mark.parametrize("name", SITES)
def test_xla_knows_each_flag_of_a_shipped_site(name: str) -> None:
    """XLA ends the process at a flag that it does not know, whatever devices it has."""
    flags = site_environment(shipped(name), {})["XLA_FLAGS"]
    ended = jax_process("import jax; print(jax.numpy.ones(3).sum())", {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags})
    assert (ended.returncode, ended.stdout) == (0, "3.0\n"), ended.stderr


def test_xla_would_have_ended_at_an_unknown_flag() -> None:
    ended = jax_process("import jax; jax.numpy.ones(3)", {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_gpu_no_such_flag=1"})
    assert ended.returncode != 0
    assert "Unknown flag" in ended.stderr


def test_jax_takes_the_memory_variables_beside_the_old_name() -> None:
    code = "from jaxlib.xla_client import generate_pjrt_gpu_plugin_options as o; print(o()['memory_fraction'], o()['preallocate'])"
    ended = jax_process(code, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.3"} | site_environment(CUDA, {}))
    assert ended.stdout == "0.8 False\n", ended.stderr
