"""What a calibration shall measure -> its key, and the request file from which its ranks read it."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from alpa_hpc.calibration.trials import Sizes
from alpa_hpc.cluster.hardware import ClusterSpec
from alpa_hpc.errors import ConfigError, StoreError
from alpa_hpc.profiling.keys import content_key

_FIELD = "calibration"  # by which its request file is told from that of a profiling task
KEY_VERSION = 1  # raise when what is measured under the same parts changes
CALIBRATED = "_calibrated"  # ends the name of a cluster whose constants were measured


@dataclass(frozen=True, slots=True)
class CalibrationRequest:
    """Sizes of the primitives, and how often each is timed."""

    sizes: Sizes
    repeats: int

    def __post_init__(self) -> None:
        if self.repeats < 2:
            raise ConfigError(f"repeats is {self.repeats}, expected at least 2: one alone has no spread")


def calibrated_name(cluster: str) -> str:
    """How a cluster is called once it is calibrated."""
    return f"{cluster}{CALIBRATED}"


def is_calibrated(cluster: str) -> bool:
    """Whether a cluster's name says that its constants were measured."""
    return cluster.endswith(CALIBRATED)


def calibration_key(cluster: ClusterSpec, request: CalibrationRequest, versions: str, xla_flags: str) -> str:
    """The key of what the request measures on the cluster: nothing that the cluster's description claims of speed is in it."""
    layout = (cluster.name, cluster.num_nodes, cluster.devices_per_node, cluster.device.kind)
    return content_key("calibration", KEY_VERSION, *layout, json.dumps(asdict(request)), versions, xla_flags)


def request_to_json(request: CalibrationRequest, key: str) -> dict[str, Any]:
    """Plain data for a request file; `key` is the one that its rows are to have."""
    return {_FIELD: asdict(request), "key": key}


def is_calibration(document: object) -> bool:
    """Whether a request file asks for a calibration."""
    return isinstance(document, dict) and _FIELD in document


def request_from_json(document: dict[str, Any], origin: str) -> tuple[CalibrationRequest, str]:
    """Read a request and its key back. Raises StoreError where the file is not one."""
    try:
        found = document[_FIELD]
        sizes = found["sizes"]
        pairs = [tuple((int(rows), int(width)) for rows, width in sizes[name]) for name in ("products", "passes")]
        return CalibrationRequest(Sizes(_numbers(sizes["num_bytes"]), *pairs), int(found["repeats"])), str(document["key"])
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"{origin} lacks or garbles a field ({error!r}): calibrate again") from error


def _numbers(values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(map(int, values))
