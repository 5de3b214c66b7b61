"""What every test shares: a CPU that poses as eight devices and compiles fast, set before jax is imported by anyone."""

import os
from pathlib import Path

import pytest

from tests.quick import QUICK_FLAGS

HOST_DEVICES = "--xla_force_host_platform_device_count=8"

if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {HOST_DEVICES} {QUICK_FLAGS}".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# OpenMPI refuses to start ranks for root, which is who runs the tests in a container.
os.environ.setdefault("OMPI_ALLOW_RUN_AS_ROOT", "1")
os.environ.setdefault("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take longest come first, so that two workers end together: those on a Slurm, then other slow ones."""
    weights: dict[Path, int] = {}
    for item in items:
        weight = 2 if item.get_closest_marker("slurm") else 1 if item.get_closest_marker("slow") else 0
        weights[item.path] = max(weight, weights.get(item.path, 0))
    items.sort(key=lambda item: -weights[item.path])
