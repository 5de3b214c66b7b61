"""(LayeredStep, mesh, Restriction) -> the proved best strategies for all layers as one stage, in the whole space of specs.

The stage DP prices thousands of stages and narrows the space where elimination is too wide (`SpecSpace`); here one stage is solved as one
problem by the general solver, so that a baseline and our own plan are optima of the same space, with a certificate each.
"""

from dataclasses import dataclass, replace

from alpa_hpc.baselines.restrict import restrict_to
from alpa_hpc.baselines.restriction import Restriction
from alpa_hpc.ir.work import LayeredStep
from alpa_hpc.runtime.stage import Stage
from alpa_hpc.sharding.apply import ChosenLayer
from alpa_hpc.sharding.build import SpecSpace
from alpa_hpc.sharding.pricing import MeshPrices
from alpa_hpc.sharding.solution import ShardingSolution
from alpa_hpc.sharding.solve import SolverOptions, solve
from alpa_hpc.sharding.stage import layer_problem
from alpa_hpc.sharding.stage_problem import stage_problem


@dataclass(frozen=True, slots=True, eq=False)
class Optimum:
    """A stage of all layers with its strategies; `solution.objective` = seconds an iteration, with its lower bound."""

    stage: Stage
    solution: ShardingSolution


def restricted_optimum(
    step: LayeredStep,
    prices: MeshPrices,
    restriction: Restriction,
    *,
    remat: bool,
    memory_limit: float = float("inf"),
    options: SolverOptions | None = None,
) -> Optimum:
    """The fastest strategies on the mesh of `prices` with one microbatch in flight and at most `memory_limit` bytes a device.

    Only what the problem counts is limited: state, accumulators and residuals. Raises InfeasibleError where nothing allowed fits.
    """
    restrict = restrict_to(restriction, step)
    layers = [restrict(layer_problem(step, index, prices, remat=remat, space=SpecSpace.FULL)) for index in range(len(step.layers))]
    whole, numbers = stage_problem(step, layers)
    solution = solve(replace(whole, memory_limit=memory_limit, inflight=1), options)
    chosen = [
        ChosenLayer(problem, tuple(solution.choices[local[node]] for node in range(len(problem.labels))))
        for problem, local in zip(layers, numbers, strict=True)
    ]
    return Optimum(Stage(prices.mesh.shape, tuple(chosen)), solution)
