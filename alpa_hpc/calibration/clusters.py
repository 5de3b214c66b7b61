"""A fitted ClusterSpec <-> the text of a config of the group `cluster`, as a person would write one."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from alpa_hpc.cluster.hardware import ClusterSpec, DeviceSpec, Link
from alpa_hpc.errors import ConfigError


def cluster_text(cluster: ClusterSpec, origin: str) -> str:
    """The config; its first line says where it comes from."""
    return f"# {origin}\n{yaml.safe_dump(asdict(cluster), sort_keys=False)}"


def read_cluster(path: Path) -> ClusterSpec:
    """Read such a config back. Raises ConfigError where it is torn, lacks or adds a key, or has values that cannot be."""
    try:
        return _built(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (yaml.YAMLError, ValueError, RecursionError, OSError, KeyError, TypeError, ConfigError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path} is not the config of a cluster ({reason}). Delete it, and calibrate again") from error


def _built(found: Mapping[str, Any]) -> ClusterSpec:
    parts: dict[str, Any] = {name: kind(**found[name]) for name, kind in _PARTS.items()}
    return _checked(ClusterSpec(**{**found, **parts}))


def _checked(cluster: ClusterSpec) -> ClusterSpec:
    """The same; TypeError where a text or a whole number is none, which `ClusterSpec` cannot tell."""
    whole = {"num_nodes": cluster.num_nodes, "devices_per_node": cluster.devices_per_node, "device.memory": cluster.device.memory}
    for name, value in whole.items():
        if type(value) is not int:
            raise TypeError(f"{name} is {value!r}, expected a whole number")
    for name, value in {"name": cluster.name, "device.kind": cluster.device.kind}.items():
        if type(value) is not str:
            raise TypeError(f"{name} is {value!r}, expected a text")
    return cluster


_PARTS: Mapping[str, type[DeviceSpec | Link]] = {"device": DeviceSpec, "intra_node": Link, "inter_node": Link}
