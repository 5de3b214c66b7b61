"""ProfileRequest <-> JSON: what the planning job asks of its profiling tasks, as a file."""

from collections.abc import Sequence
from typing import Any

from alpa_hpc.errors import StoreError
from alpa_hpc.plan.codec import stage_from_json, stage_to_json
from alpa_hpc.planner.refine import ProfileRequest


def requests_to_json(requests: Sequence[ProfileRequest]) -> list[dict[str, Any]]:
    """Plain data for a request file."""
    return [
        {"key": one.key, "label": one.label, "stage": stage_to_json(one.stage), "strategies": [dict(row) for row in one.strategies]}
        for one in requests
    ]


def requests_from_json(document: object, origin: str) -> tuple[ProfileRequest, ...]:
    """Read a request file back. Raises StoreError where it is not one."""
    if not isinstance(document, list):
        raise StoreError(f"{origin} is no list of profiling requests, found {type(document).__name__}: plan again")
    try:
        return tuple(_request(one) for one in document)
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"{origin} lacks or garbles a field ({error!r}): plan again") from error


def _request(one: dict[str, Any]) -> ProfileRequest:
    rows = tuple({str(name): str(label) for name, label in row.items()} for row in one["strategies"])
    return ProfileRequest(str(one["key"]), str(one["label"]), stage_from_json(one["stage"]), rows)
