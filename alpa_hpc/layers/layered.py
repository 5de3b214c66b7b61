"""TracedStep -> LayeredStep: the loss cut into layers (Eq. 6), each differentiated once, and the update split by parameter."""

from dataclasses import dataclass

from alpa_hpc.ir.grad import AuxKind
from alpa_hpc.ir.key import content_key
from alpa_hpc.ir.trace import TracedStep
from alpa_hpc.ir.work import Accumulation, Layer, LayeredStep, LossOutput
from alpa_hpc.layers.differentiate import Programs, differentiate
from alpa_hpc.layers.forward import ForwardLayer, cut_forward
from alpa_hpc.layers.options import Clustering
from alpa_hpc.layers.update import split_update


def cut_layers(traced: TracedStep, *, num_layers: int, imbalance: float, clustering: Clustering = Clustering.COMMUNICATION) -> LayeredStep:
    """Cut a step into `num_layers` layers (0: as many as suit it) with FLOP at most 1 + `imbalance` times the average.

    Raises TraceError if it cannot.
    """
    forward = cut_forward(traced.loss, num_params=len(traced.params), num_layers=num_layers, imbalance=imbalance, clustering=clustering)
    programs: dict[str, _Keyed] = {}
    layers = tuple(_layer(traced, index, layer, programs) for index, layer in enumerate(forward.layers))
    update = split_update(traced)
    kinds = (*(AuxKind.SUM,) * traced.num_values, *traced.aux_kinds)
    loss_outputs = tuple(LossOutput(value, _accumulation(kind)) for value, kind in zip(forward.loss_values, kinds, strict=True))
    return LayeredStep(
        num_microbatches=traced.num_microbatches,
        state_names=traced.state_names,
        state_avals=traced.state_avals,
        batch_avals=traced.batch_avals,
        values=dict(forward.values),
        layers=layers,
        loss_outputs=loss_outputs,
        update=update,
        metric_names=traced.metric_names,
        key=content_key(
            traced.num_microbatches,
            [(layer.key, layer.params, layer.batch, layer.inputs, layer.outputs, layer.cotangent_inputs) for layer in layers],
            [
                (param.key, param.leaves, param.scalars, [(one.scalars, one.reductions) for one in param.partials])
                for param in update.params
            ],
            [([kind.value for kind in one.kinds], one.shared) for one in update.rounds],
            [(output.value, output.accumulation.value) for output in loss_outputs],
            update.shared_leaves,
            update.shared_after,
        ),
    )


def _accumulation(kind: AuxKind) -> Accumulation:
    return Accumulation.LAST if kind is AuxKind.LAST else Accumulation.SUM


@dataclass(frozen=True, slots=True, eq=False)
class _Keyed:
    """The programs of a layer and the key of their content."""

    programs: Programs
    key: str


def _layer(traced: TracedStep, index: int, layer: ForwardLayer, known: dict[str, _Keyed]) -> Layer:
    """Differentiate a layer, or take the programs of an equal one."""
    signature = _signature(layer)
    if signature not in known:
        made = differentiate(layer)
        key = content_key(made.forward, made.backward, len(layer.params), len(layer.batch), len(layer.inputs))
        known[signature] = _Keyed(made, key)
    programs = known[signature].programs
    return Layer(
        index=index,
        key=known[signature].key,
        params=tuple(traced.params[param] for param in layer.params),
        batch=layer.batch,
        inputs=layer.inputs,
        outputs=layer.outputs,
        cotangent_inputs=layer.cotangent_inputs,
        cotangent_outputs=layer.cotangent_outputs,
        forward=programs.forward,
        backward=programs.backward,
    )


def _signature(layer: ForwardLayer) -> str:
    """Equal for layers with one derivative, in this process: rules of custom_jvp and custom_vjp count by identity."""
    rules = [str(id(value)) for equation in layer.closed.jaxpr.eqns for value in equation.params.values() if callable(value)]
    wanted = [layer.inputs.index(value) for value in layer.cotangent_inputs]
    seeded = [layer.outputs.index(value) for value in layer.cotangent_outputs]
    shape = (len(layer.params), len(layer.batch), len(layer.inputs), wanted, seeded, layer.loss_position)
    return content_key(layer.closed, shape, rules)
