"""PipelineIO -> the ways arrays take between meshes: which buffer goes from where to where, in which layout, under which tags.

A route is one array (a value, a cotangent, a partial gradient, a new parameter) from one mesh to another, once a microbatch or once an
iteration. It arrives in the layout `receive_layout(wanted)`, split as far as the mesh allows so that slow links carry each element once;
where that is not the layout the task wants, a task "gather:NAME" follows on the receiving mesh.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from alpa_hpc.runtime.instructions import Buffer, Layout, Recv, Run, Send
from alpa_hpc.runtime.pipeline import PipelineIO, producer_of

ReceiveLayout = Callable[[Layout], Layout]


@dataclass(frozen=True, slots=True)
class Way:
    """Array `number`: named `sent` and laid out as `made` on mesh `source`; named `received` and wanted as `wanted` on mesh `target`."""

    source: int
    target: int
    number: int
    sent: str
    received: str
    made: Layout
    wanted: Layout


@dataclass(frozen=True, slots=True)
class Route:
    """A way, the layout in which its message arrives, and the message's tag (that of microbatch 0 where each has one)."""

    way: Way
    wire: Layout
    tag: int

    def at(self, tag_shift: int) -> "Route":
        """The same route under a later tag."""
        return Route(self.way, self.wire, self.tag + tag_shift)

    def send(self, microbatch: int) -> Send:
        """The message's Send, for the program of the source."""
        return Send(Buffer(self.way.sent, microbatch), self.way.made, self.wire, self.way.target, self.tag)

    def receive(self, microbatch: int) -> tuple[Recv] | tuple[Recv, Run]:
        """The message's Recv, for the program of the target, and the gathering task where one is needed."""
        way = self.way
        arrived = Buffer(way.received, microbatch)
        if self.wire == way.wanted:
            return (Recv(arrived, way.made, self.wire, way.source, self.tag),)
        tile = Buffer(f"{way.received}.tile", microbatch)
        return (Recv(tile, way.made, self.wire, way.source, self.tag), Run(f"gather:{way.received}", (tile,), (arrived,)))


@dataclass(frozen=True, slots=True)
class Routes:
    """Values and cotangents go once a microbatch, partial gradients and then new parameters once an iteration.

    The tags of microbatch m are those of microbatch 0 plus m * `tag_stride`; all tags of an iteration differ.
    """

    tag_stride: int
    values: tuple[Route, ...]
    cotangents: tuple[Route, ...]
    partials: tuple[Route, ...]
    parameters: tuple[Route, ...]

    def arriving(self, mesh: int) -> "Routes":
        """The routes that end at a mesh."""
        return self.where(lambda way: way.target == mesh)

    def leaving(self, mesh: int) -> "Routes":
        """The routes that begin at a mesh."""
        return self.where(lambda way: way.source == mesh)

    def where(self, belongs: Callable[[Way], bool]) -> "Routes":
        """The routes whose way satisfies a condition, in the same order."""
        kinds = (self.values, self.cotangents, self.partials, self.parameters)
        return Routes(self.tag_stride, *(tuple(route for route in routes if belongs(route.way)) for routes in kinds))


def plan_routes(pipeline: PipelineIO, receive_layout: ReceiveLayout) -> Routes:
    """Lay out and number all routes.

    Each kind is sorted by (source, target, number); both ends follow this order, so they agree on the order of messages between them.
    """
    values, cotangents = value_ways(pipeline), cotangent_ways(pipeline)
    partials, parameters = partial_ways(pipeline), parameter_ways(pipeline)
    stride = len(values) + len(cotangents)
    once = stride * pipeline.num_microbatches

    def lay_out(ways: tuple[Way, ...], first_tag: int) -> tuple[Route, ...]:
        return tuple(Route(way, receive_layout(way.wanted), first_tag + index) for index, way in enumerate(ways))

    return Routes(
        stride, lay_out(values, 0), lay_out(cotangents, len(values)), lay_out(partials, once), lay_out(parameters, once + len(partials))
    )


def in_order(ways: Iterator[Way]) -> tuple[Way, ...]:
    """Ways sorted by source, target and number of the array."""
    return tuple(sorted(ways, key=lambda way: (way.source, way.target, way.number)))


def value_ways(pipeline: PipelineIO) -> tuple[Way, ...]:
    """Each value, from the stage that makes it straight to each stage that reads it."""

    def ways() -> Iterator[Way]:
        for target, stage in enumerate(pipeline.stages):
            for value in stage.inputs:
                source = producer_of(pipeline, value)
                made = pipeline.stages[source].value_layouts[value]
                yield Way(source, target, value, f"value.{value}", f"value.{value}", made, stage.value_layouts[value])

    return in_order(ways())


def cotangent_ways(pipeline: PipelineIO) -> tuple[Way, ...]:
    """Each value's cotangents, back along the value's ways; where several meet they are named after their mesh, to be summed."""

    def ways() -> Iterator[Way]:
        for source, stage in enumerate(pipeline.stages):
            for value in stage.cotangent_inputs:
                target = producer_of(pipeline, value)
                name = f"cotangent.{value}"
                received = name if len(cotangent_makers(pipeline, value)) == 1 else f"{name}.{source}"
                wanted = pipeline.stages[target].cotangent_layouts[value]
                yield Way(source, target, value, name, received, stage.cotangent_layouts[value], wanted)

    return in_order(ways())


def cotangent_makers(pipeline: PipelineIO, value: int) -> tuple[int, ...]:
    """Stages that make a cotangent of `value`."""
    return tuple(index for index, stage in enumerate(pipeline.stages) if value in stage.cotangent_inputs)


def partial_ways(pipeline: PipelineIO) -> tuple[Way, ...]:
    """A shared param's gradient, from each replica that accumulates one to the owner."""

    def ways() -> Iterator[Way]:
        for param, shared in pipeline.shared_params.items():
            wanted = pipeline.stages[shared.owner].partial_layouts[param]
            for replica in gradient_replicas(pipeline, param):
                made = pipeline.stages[replica].partial_layouts[param]
                yield Way(replica, shared.owner, param, f"partial.{param}", f"partial.{param}.{replica}", made, wanted)

    return in_order(ways())


def gradient_replicas(pipeline: PipelineIO, param: int) -> tuple[int, ...]:
    """Replicas of a shared param that accumulate a gradient, ascending."""
    replicas = pipeline.shared_params[param].replicas
    return tuple(replica for replica in sorted(replicas) if param in pipeline.stages[replica].gradients)


def parameter_ways(pipeline: PipelineIO) -> tuple[Way, ...]:
    """A shared param's new value, from its owner to each replica."""

    def ways() -> Iterator[Way]:
        for param, shared in pipeline.shared_params.items():
            made = pipeline.stages[shared.owner].param_layouts[param]
            for replica in shared.replicas:
                wanted = pipeline.stages[replica].param_layouts[param]
                yield Way(shared.owner, replica, param, f"state.{param}", f"state.{param}", made, wanted)

    return in_order(ways())
