"""Random and regular PipelineIO, as hypothesis strategies and plain functions, for the tests of emission, checks and simulation."""

from dataclasses import replace

from hypothesis import strategies as st

from alpa_hpc.cluster.hardware import MeshShape
from alpa_hpc.ir.work import ReductionKind
from alpa_hpc.runtime.emit import emit_outlines
from alpa_hpc.runtime.instructions import Layout, MeshProgram
from alpa_hpc.runtime.pipeline import PipelineIO, SharedParam, StageIO
from alpa_hpc.runtime.routes import ReceiveLayout
from alpa_hpc.runtime.schedule import AbstractSchedule, GPipe, OneFOneB
from alpa_hpc.sharding.spec import Spec, replicated

SHAPES = (MeshShape(1, 1), MeshShape(1, 2), MeshShape(2, 2), MeshShape(4, 1))
ARRAY_SHAPE = (16, 16)
SPLITS = (((), ()), ((0,), ()), ((), (0, 1)))
NUM_LEAVES_OF_PARAM = 3  # itself and two of its optimiser

schedules: st.SearchStrategy[AbstractSchedule] = st.sampled_from([OneFOneB(), GPipe()])


def split_first_dim(layout: Layout) -> Layout:
    """A stand-in for `receive_layout` that changes replicated layouts (a gather follows) and keeps split ones."""
    if any(layout.spec.dims) or layout.mesh.num_devices == 1:
        return layout
    return replace(layout, spec=Spec(((0, 1), *layout.spec.dims[1:])))


def keep_layout(layout: Layout) -> Layout:
    """A stand-in for `receive_layout` that never needs a gather."""
    return layout


def layout_on(mesh: MeshShape, dims: tuple[tuple[int, ...], ...] = ((), ())) -> Layout:
    """A float32 matrix on a mesh."""
    return Layout(ARRAY_SHAPE, "float32", Spec(dims), mesh)


def chain(num_stages: int, num_microbatches: int, num_residuals: int = 2) -> PipelineIO:
    """A pipeline of equal stages, value i from stage i to stage i + 1, one param a stage."""
    mesh, last = MeshShape(1, 2), num_stages - 1
    layout = Layout(ARRAY_SHAPE, "float32", replicated(2), mesh)

    def stage(index: int) -> StageIO:
        before, behind = ((index - 1,) if index else ()), ((index,) if index < last else ())
        layouts = dict.fromkeys((*before, *behind), layout)
        return StageIO(
            shape=mesh, batch=(0,) if index == 0 else (), inputs=before, outputs=behind, cotangent_inputs=before, cotangent_outputs=behind,
            num_residuals=num_residuals, params=(index,), gradients=(index,), leaves=(index, num_stages + index), owned=(index,),
            loss_outputs=(0,) if index == last else (),
            value_layouts=layouts, cotangent_layouts=layouts, param_layouts={}, partial_layouts={},
        )  # fmt: skip

    kinds = (ReductionKind.SUM,)
    return PipelineIO(tuple(map(stage, range(num_stages))), num_microbatches, kinds, (kinds,), num_metrics=1, shared_params={})


def tied_chain(num_stages: int, num_microbatches: int) -> PipelineIO:
    """A chain whose last stage reads the first one's param, too."""
    plain = chain(num_stages, num_microbatches)
    first, *middle, last = plain.stages
    layouts = {0: layout_on(first.shape)}
    first = replace(first, param_layouts=layouts, partial_layouts=layouts)
    last = replace(
        last,
        params=(0, *last.params),
        gradients=(0, *last.gradients),
        leaves=(0, *last.leaves),
        param_layouts=layouts,
        partial_layouts=layouts,
    )
    return replace(plain, stages=(first, *middle, last), shared_params={0: SharedParam(0, (num_stages - 1,))})


@st.composite
def pipelines(draw: st.DrawFn, max_stages: int = 6, max_microbatches: int = 12) -> PipelineIO:
    """Pipelines with values that skip stages and have several readers, shared params, and values without cotangents."""
    num_stages = draw(st.integers(1, max_stages))
    values = draw(st.lists(value_paths(num_stages), max_size=6)) if num_stages > 1 else []
    params = draw(st.lists(param_places(num_stages), min_size=1, max_size=5))
    num_losses = draw(st.integers(1, 2))
    losses = [draw(st.sets(st.integers(0, num_stages - 1), min_size=1, max_size=2)) for _ in range(num_losses)]
    shapes = [draw(st.sampled_from(SHAPES)) for _ in range(num_stages)]
    stages = tuple(draw(stage_ios(index, shapes[index], values, params, losses)) for index in range(num_stages))
    shared = {number: SharedParam(users[0], users[1:]) for number, (users, _) in enumerate(params) if len(users) > 1}
    return PipelineIO(
        stages=stages,
        num_microbatches=draw(st.integers(1, max_microbatches)),
        loss_kinds=(ReductionKind.SUM,) * num_losses,
        rounds=tuple(
            tuple(kinds) for kinds in draw(st.lists(st.lists(st.sampled_from(ReductionKind), min_size=1, max_size=3), max_size=2))
        ),
        num_metrics=draw(st.integers(0, 2)),
        shared_params=shared,
    )


Path = tuple[int, tuple[int, ...], frozenset[int]]  # maker, readers, readers that give a cotangent back
Place = tuple[tuple[int, ...], frozenset[int]]  # users (the first owns), users that accumulate a gradient


@st.composite
def value_paths(draw: st.DrawFn, num_stages: int) -> Path:
    """Where a value is made, and by whom it is read."""
    maker = draw(st.integers(0, num_stages - 2))
    readers = tuple(sorted(draw(st.sets(st.integers(maker + 1, num_stages - 1), min_size=1, max_size=3))))
    return maker, readers, draw(st.frozensets(st.sampled_from(readers)))


@st.composite
def param_places(draw: st.DrawFn, num_stages: int) -> Place:
    """Which stages use a param."""
    users = tuple(sorted(draw(st.sets(st.integers(0, num_stages - 1), min_size=1, max_size=3))))
    return users, draw(st.frozensets(st.sampled_from(users))) | {users[0]}


@st.composite
def stage_ios(draw: st.DrawFn, index: int, mesh: MeshShape, values: list[Path], params: list[Place], losses: list[set[int]]) -> StageIO:
    """The part of a pipeline that stage `index` sees; the orders of arguments are drawn, too."""

    def pick(chosen: list[int]) -> tuple[int, ...]:
        return tuple(draw(st.permutations(chosen)))

    shift = draw(st.integers(0, len(SPLITS) - 1))
    layouts = {number: layout_on(mesh, SPLITS[(number + shift) % len(SPLITS)]) for number in range(8)}
    owned = [number for number, (users, _) in enumerate(params) if users[0] == index]
    used = [number for number, (users, _) in enumerate(params) if index in users]
    of_optimiser = [len(params) * place + number for number in owned for place in range(1, NUM_LEAVES_OF_PARAM)]
    return StageIO(
        shape=mesh,
        batch=pick(draw(st.sampled_from([[], [0], [0, 1]]))),
        inputs=pick([number for number, (_, readers, _) in enumerate(values) if index in readers]),
        outputs=pick([number for number, (maker, _, _) in enumerate(values) if maker == index]),
        cotangent_inputs=pick([number for number, (_, _, back) in enumerate(values) if index in back]),
        cotangent_outputs=pick([number for number, (maker, _, back) in enumerate(values) if maker == index and back]),
        num_residuals=draw(st.integers(0, 4)),
        params=pick(used),
        gradients=pick([number for number in used if index in params[number][1]]),
        leaves=pick([*used, *of_optimiser, 99]),
        owned=pick(owned),
        loss_outputs=pick([number for number, makers in enumerate(losses) if index in makers]),
        value_layouts=layouts,
        cotangent_layouts=layouts,
        param_layouts=layouts,
        partial_layouts=layouts,
    )


def emit_programs(pipeline: PipelineIO, schedule: AbstractSchedule, receive_layout: ReceiveLayout) -> tuple[MeshProgram, ...]:
    """The programs of all meshes, written out."""
    return tuple(outline.written_out() for outline in emit_outlines(pipeline, schedule, receive_layout))
