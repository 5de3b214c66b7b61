"""Canonical parts -> sha256 in hex: the names under which measured costs are stored, equal wherever the content is equal.

No id(), source location, hash seed or cost-model number may enter a key, or a second run finds nothing.
"""

import hashlib
from importlib.metadata import version

from alpa_hpc.cluster.hardware import MeshShape

KEY_VERSION = 1  # raise when what is measured under the same parts changes

Part = str | int | float | bytes


def content_key(*parts: Part) -> str:
    """The sha256 (64 hex digits) of the parts, each with its type and length, so that no two different lists collide."""
    digest = hashlib.sha256()
    for part in parts:
        content = part if isinstance(part, bytes) else repr(part).encode()
        digest.update(f"{type(part).__name__}:{len(content)}:".encode())
        digest.update(content)
    return digest.hexdigest()


def measure_key(stage_content: str, specs: str, mesh: MeshShape, device_kind: str, versions: str, xla_flags: str) -> str:
    """The key of one measured stage: its canonical content, how it is split, on what mesh and devices, and by which software."""
    return content_key("measure", KEY_VERSION, stage_content, specs, mesh.rows, mesh.cols, device_kind, versions, xla_flags)


def software_versions() -> str:
    """The versions that compiled code depends on, such as "jax 0.10.2, jaxlib 0.10.2"."""
    return ", ".join(f"{name} {version(name)}" for name in ("jax", "jaxlib"))
