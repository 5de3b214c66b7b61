"""Proposed stage -> ProfileRequest <-> JSON: what the planning job asks of its profiling tasks, as a file (DESIGN, "Costs")."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from alpa_hpc.cluster.hardware import Submesh
from alpa_hpc.errors import StoreError
from alpa_hpc.plan.codec import stage_from_json, stage_to_json
from alpa_hpc.plan.plan import StagePlan, Strategies
from alpa_hpc.planner.lookup import strategies_of
from alpa_hpc.profiling.keys import NO_LINKS, link_class, measure_key
from alpa_hpc.profiling.options import Extent
from alpa_hpc.runtime.stage import Stage
from alpa_hpc.sharding.apply import ChosenLayer
from alpa_hpc.stages.objective import StageChoice


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """A stage to be timed: its content key, words for people, on how much of its mesh, and all that is needed to rebuild it."""

    key: str
    label: str
    extent: Extent
    stage: StagePlan
    strategies: tuple[Strategies, ...]

    @property
    def submesh(self) -> Submesh:
        """The devices that take part in the measurement."""
        match self.extent:
            case Extent.LONE:
                return Submesh(1, 1)
            case Extent.MESH:
                return self.stage.submesh


def describe_request(
    choice: StageChoice,
    stage: Stage,
    *,
    device_kind: str,
    versions: str,
    xla_flags: str,
    extent: Extent,
    cluster_name: str,
) -> ProfileRequest:
    """What a profiling task needs to rebuild and time a stage; the key is its content, wherever the stage stands in the model.

    `cluster_name` tells apart equal meshes whose links differ; it counts where collectives are timed.
    A mesh of one device is a lone device.
    """
    extent = extent if choice.submesh.num_devices > 1 else Extent.LONE
    rows = tuple(strategies_of(layer) for layer in stage.layers)
    option = choice.option
    plan = StagePlan(choice.start, choice.stop, choice.submesh, stage.shape, (), option.remat, tuple(range(len(rows))))
    content = "|".join(_content(layer) for layer in stage.layers) + f"|remat={option.remat}"
    specs = repr([sorted(row.items()) for row in rows])
    links = NO_LINKS if extent is Extent.LONE else link_class(cluster_name, choice.submesh)
    key = measure_key(content, specs, stage.shape, device_kind, versions, xla_flags, links)
    label = (
        f"layers {choice.start}-{choice.stop} on {stage.shape.rows}x{stage.shape.cols} of {choice.submesh.num_nodes}x"
        f"{choice.submesh.devices_per_node}{' recomputed' if option.remat else ''}"
    )
    return ProfileRequest(key, label, extent, plan, rows)


def _content(layer: ChosenLayer) -> str:
    """What of a layer is timed: its programs, and the updates of the parameters that it owns."""
    return f"{layer.problem.layer.key}+{','.join(program.work.key for program in layer.problem.updates)}"


def requests_to_json(requests: Sequence[ProfileRequest]) -> list[dict[str, Any]]:
    """Plain data for a request file."""
    return [
        {
            "key": one.key,
            "label": one.label,
            "extent": one.extent.value,
            "stage": stage_to_json(one.stage),
            "strategies": [dict(row) for row in one.strategies],
        }
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
    return ProfileRequest(str(one["key"]), str(one["label"]), Extent(one["extent"]), stage_from_json(one["stage"]), rows)
