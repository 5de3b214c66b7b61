"""Canonical parts -> sha256 in hex: the names under which measured costs are stored, equal wherever the content is equal.

No id(), source location, hash seed or cost-model number may enter a key, or a second run finds nothing.
"""

import hashlib
from importlib.metadata import version

from alpa_hpc.cluster.hardware import MeshShape, Submesh

KEY_VERSION = 1  # raise when what is measured under the same parts changes

NO_LINKS = ""  # of what a lone device is timed with: it talks to nobody

Part = str | int | float | bytes


def content_key(*parts: Part) -> str:
    """The sha256 (64 hex digits) of the parts, each with its type and length, so that no two different lists collide."""
    digest = hashlib.sha256()
    for part in parts:
        content = part if isinstance(part, bytes) else repr(part).encode()
        digest.update(f"{type(part).__name__}:{len(content)}:".encode())
        digest.update(content)
    return digest.hexdigest()


def measure_key(
    stage_content: str, specs: str, mesh: MeshShape, device_kind: str, versions: str, xla_flags: str, links: str = NO_LINKS
) -> str:
    """The key of one measured stage: its content, how it is split, on what mesh, devices and links, and by which software."""
    over = () if links == NO_LINKS else (links,)
    return content_key("measure", KEY_VERSION, stage_content, specs, mesh.rows, mesh.cols, device_kind, versions, xla_flags, *over)


def link_class(cluster_name: str, submesh: Submesh) -> str:
    """The network paths of a mesh, by name: on one cluster, equal rectangles of devices have equal ones."""
    return f"{cluster_name}: {submesh.num_nodes} nodes with {submesh.devices_per_node} devices"


def software_versions() -> str:
    """The versions that compiled code depends on, such as "jax 0.10.2, jaxlib 0.10.2"."""
    return ", ".join(f"{name} {version(name)}" for name in ("jax", "jaxlib"))
