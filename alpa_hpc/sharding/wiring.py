"""A layer's content, and how layers are joined by their ports: what equal runs of layers have in common, wherever they stand."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from alpa_hpc.ir.work import Layer, LayeredStep, ParamUpdate
from alpa_hpc.sharding.dim_classes import awkward_params, awkward_values
from alpa_hpc.sharding.solved import run_key


@dataclass(frozen=True, slots=True)
class LayerWiring:
    """A layer's place in a stage: the number of each of its ports (order of LayerProblem.ports), and the ports that later layers read."""

    content: str
    ports: tuple[int, ...]
    live: frozenset[int]

    def __str__(self) -> str:
        return f"{self.content} {self.ports} {sorted(self.live)}"


@lru_cache(maxsize=65536)
def wire(step: LayeredStep, start: int, stop: int) -> tuple[LayerWiring, ...]:
    """How layers [start, stop) are joined, ports numbered by first appearance, so that equal runs of layers have equal wirings."""
    numbers: dict[tuple[str, int], int] = {}
    last_reader = {("value", value): layer.index for layer in step.layers for value in layer.inputs}
    last_reader |= {("cotangent", value): last for (_, value), last in last_reader.items()}
    last_reader |= {("param", param): layer.index for layer in step.layers for param in layer.params}
    wirings: list[LayerWiring] = []
    for index in range(start, stop):
        ports = port_names(step.layers[index], shared_places(step, index))
        placed = tuple(numbers.setdefault(port, len(numbers)) for port in ports)
        live = frozenset(number for port, number in numbers.items() if last_reader.get(port, -1) > index)
        wirings.append(LayerWiring(layer_content(step, index), placed, live))
    return tuple(wirings)


@lru_cache(maxsize=65536)
def wiring_key(wiring: tuple[LayerWiring, ...]) -> str:
    """A key of equal runs of layers, in any process."""
    return run_key(map(str, wiring))


def port_names(layer: Layer, shared: Iterable[int]) -> tuple[tuple[str, int], ...]:
    """(kind, value or parameter) of each port of a layer, in the order of LayerProblem.ports; `shared` as LayerProblem has it."""
    return (
        *(("value", v) for v in layer.inputs),
        *(("cotangent", v) for v in layer.cotangent_inputs),
        *(("value", v) for v in layer.outputs),
        *(("cotangent", v) for v in layer.cotangent_outputs),
        *(("param", layer.params[place]) for place in shared),
    )


@lru_cache(maxsize=4096)
def shared_places(step: LayeredStep, index: int) -> tuple[int, ...]:
    """The places, in a layer's parameters, of those that other layers read too."""
    elsewhere = {param for layer in step.layers if layer.index != index for param in layer.params}
    return tuple(place for place, param in enumerate(step.layers[index].params) if param in elsewhere)


@lru_cache(maxsize=4096)
def owned_updates(step: LayeredStep, index: int) -> tuple[ParamUpdate, ...]:
    """Updates of the parameters that layer `index` owns: those no earlier layer reads."""
    earlier = {p for layer in step.layers[:index] for p in layer.params}
    mine = [p for p in step.layers[index].params if p not in earlier]
    by_param = {work.param: work for work in step.update.params}
    return tuple(by_param[p] for p in mine)


@lru_cache(maxsize=4096)
def layer_content(step: LayeredStep, index: int) -> str:
    """What decides a layer's sharding problem: programs, updates it owns, which outputs are losses, which cotangents exist, borders."""
    layer = step.layers[index]
    losses = {output.value for output in step.loss_outputs}
    owned = {work.param: work.key for work in owned_updates(step, index)}
    params = ",".join(owned.get(p, "-") for p in layer.params)
    outputs = ",".join(f"{int(v in losses)}{int(v in layer.cotangent_outputs)}" for v in layer.outputs)
    inputs = ",".join(str(int(v in layer.cotangent_inputs)) for v in layer.inputs)
    awkward = awkward_values(step)
    borders = ",".join("".join(map(str, sorted(awkward.get(v, ())))) for v in (*layer.inputs, *layer.outputs))
    places, dims = shared_places(step, index), awkward_params(step)
    shared = ",".join(f"{place}:" + "".join(map(str, sorted(dims.get(layer.params[place], ())))) for place in places)
    return f"{layer.key}|{params}|{inputs}|{outputs}|{borders}|{shared}"
