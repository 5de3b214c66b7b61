"""Meshes to compile for: CPU devices of this process, and GPUs that need not be here, or a message that says what to install."""

import pytest

from alpa_hpc.cluster.hardware import MeshShape, Submesh
from alpa_hpc.errors import ConfigError, LaunchError
from alpa_hpc.stages.options import CheckTarget
from alpa_hpc.verify import target as module
from alpa_hpc.verify.target import GPUS, check_compiler, described_mesh


def test_a_cpu_mesh_is_of_this_process():
    mesh = described_mesh(CheckTarget.CPU, Submesh(2, 4), MeshShape(2, 4))
    assert mesh.devices.shape == (2, 4) and mesh.axis_names == ("x", "y")
    with pytest.raises(LaunchError, match="compiles for 16 CPU devices, this process has 8.*device_count=16"):
        described_mesh(CheckTarget.CPU, Submesh(4, 4), MeshShape(4, 4))


@pytest.mark.parametrize("target", list(GPUS))
def test_without_the_plugin_the_message_names_the_extra(target: CheckTarget, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "PLUGINS", ("jax_plugins.not_installed", "no_plugins_at_all.xla_cuda12"))
    with pytest.raises(ConfigError, match=rf"search\.check_target={target.value}.*pip install '\.\[gpu-check\]'"):
        check_compiler(target)
    with pytest.raises(ConfigError, match="gpu-check"):
        described_mesh(target, Submesh(1, 8), MeshShape(8, 1))
    check_compiler(CheckTarget.CPU)
    check_compiler(CheckTarget.NONE)


def test_a_description_says_what_xla_asks():
    text = GPUS[CheckTarget.H100].text()
    assert text.count("{") == text.count("}")
    assert "cuda_compute_capability { major: 9 minor: 0 }" in text and "core_count: 132" in text
    assert "dnn_version_info { major: 9 minor: 10 patch: 2 }" in text


def test_a_dropped_plugin_is_explained(monkeypatch: pytest.MonkeyPatch):
    def no_topology(*_: object, **__: object) -> None:
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(module, "has_gpu_compiler", lambda: True)
    monkeypatch.setattr(module.topologies, "get_topology_desc", no_topology)
    with pytest.raises(LaunchError, match="dropped its CUDA plugin.*Set JAX_PLATFORMS=cpu"):
        described_mesh(CheckTarget.H100, Submesh(1, 8), MeshShape(8, 1))
