"""What earlier planning runs solved is not solved again, and changes nothing; another mesh, price, or batch is not taken for it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import pytest

from alpa_hpc.cluster.hardware import ClusterSpec, MeshShape, Submesh
from alpa_hpc.cluster.mesh import logical_mesh
from alpa_hpc.ir.work import LayeredStep
from alpa_hpc.planner.search import find_candidates
from alpa_hpc.sharding.build import LayerProblem, SpecSpace
from alpa_hpc.sharding.pricing import MeshPrices
from alpa_hpc.sharding.solved import SolvedRuns
from alpa_hpc.sharding.stage import StageSolver
from alpa_hpc.sharding.wiring import layer_content, wire
from alpa_hpc.stages.candidate import StageCandidate
from alpa_hpc.stages.cost_table import CostTable
from alpa_hpc.stages.pricing import StagePricer
from alpa_hpc.training.prepare import prepare
from tests.planning import CLUSTER, LAYERS, MODEL, NUM_MICROBATCHES, SEARCH, TRAINING, prepared

PAIR = replace(CLUSTER, num_nodes=1, devices_per_node=2, device=replace(CLUSTER.device, memory=8 * CLUSTER.device.memory))


def priced(step: LayeredStep, solved: SolvedRuns, cluster: ClusterSpec = PAIR) -> tuple[StagePricer, CostTable]:
    candidates = find_candidates(step, cluster, SEARCH)
    pricer = StagePricer(step, cluster, solved=solved)
    return pricer, pricer.price(candidates)


def test_a_second_run_solves_nothing_and_finds_the_same() -> None:
    step, first = prepared().step, SolvedRuns()
    cold, table = priced(step, first)
    second = SolvedRuns(known=first.new)
    warm, again = priced(step, second)
    assert again == table
    assert cold.num_runs > 0 == cold.num_known
    assert (warm.num_runs, warm.num_known) == (0, cold.num_runs)
    assert second.new == {}
    assert warm.num_problems < cold.num_problems, "only what workspaces are told from is built"
    for candidate in find_candidates(step, PAIR, SEARCH):
        ours, theirs = (pricer.choose(candidate, 1) for pricer in (warm, cold))
        assert [layer.choices for layer in ours] == [layer.choices for layer in theirs]


@pytest.mark.parametrize("change", ["network", "microbatches", "model"])
def test_what_is_not_the_same_is_solved(change: str) -> None:
    first = SolvedRuns()
    priced(prepared().step, first)
    step, cluster = prepared().step, PAIR
    match change:
        case "network":
            cluster = replace(PAIR, intra_node=replace(PAIR.intra_node, bandwidth=PAIR.intra_node.bandwidth / 2))
        case "microbatches":
            step = prepare(MODEL, TRAINING, LAYERS, NUM_MICROBATCHES // 2).step
        case _:
            step = prepared(replace(MODEL, hidden=64)).step
    second = SolvedRuns(known=first.new)
    warm, table = priced(step, second, cluster)
    assert warm.num_runs > 0
    assert table == priced(step, SolvedRuns(), cluster)[1]


def test_on_devices_of_another_memory_the_same_runs_are_known_where_memory_is_free() -> None:
    first, roomy = SolvedRuns(), replace(PAIR, device=replace(PAIR.device, memory=2 * PAIR.device.memory))
    priced(prepared().step, first)
    warm, table = priced(prepared().step, SolvedRuns(known=first.new), roomy)
    assert warm.num_known > 0
    assert table == priced(prepared().step, SolvedRuns(), roomy)[1]


def test_a_model_that_is_a_block_deeper_reuses_what_it_can() -> None:
    layers = [replace(LAYERS, num_layers=num_blocks) for num_blocks in (4, 5)]
    steps = [prepare(replace(MODEL, num_layers=one.num_layers), TRAINING, one, NUM_MICROBATCHES).step for one in layers]
    first = SolvedRuns()
    priced(steps[0], first, PAIR)
    warm, table = priced(steps[1], SolvedRuns(known=first.new), PAIR)
    assert warm.num_known > 0
    assert table == priced(steps[1], SolvedRuns(), PAIR)[1]


@dataclass(frozen=True)
class Skipping:
    """Four products in a row; the last one adds what the one numbered `back` made."""

    back: int

    def init(self, key: jax.Array) -> list[jax.Array]:
        return list(jax.random.normal(key, (4, 16, 16)))

    def loss(self, params: list[jax.Array], batch: jax.Array, key: jax.Array) -> jax.Array:
        made = [batch]
        for weight in params:
            made.append(made[-1] @ weight)
        return jnp.mean(made[-1] * made[self.back])

    def batch(self, batch_size: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch_size, 16), jnp.float32)


def test_equal_layers_that_are_joined_otherwise_may_need_another_space() -> None:
    steps = [prepare(Skipping(back), TRAINING, replace(LAYERS, num_layers=4), NUM_MICROBATCHES).step for back in (1, 2)]
    contents = [[layer_content(step, index) for index in range(4)] for step in steps]
    assert contents[0] == contents[1] and wire(steps[0], 0, 4) != wire(steps[1], 0, 4)
    prices = MeshPrices(logical_mesh(PAIR, Submesh(1, 2), MeshShape(2, 1)))
    first = SolvedRuns()
    assert StageSolver(steps[0], prices, remat=False, solved=first).space is SpecSpace.FULL
    narrow = SolvedRuns({key: replace(solved, space=SpecSpace.NARROW) for key, solved in first.new.items()})
    spaces = [StageSolver(step, prices, remat=False, solved=narrow).space for step in steps]
    assert spaces == [SpecSpace.NARROW, SpecSpace.FULL], "that of the other model is not known"


def test_other_rules_know_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    step, first = prepared().step, SolvedRuns()
    cold, _ = priced(step, first)
    monkeypatch.setattr("alpa_hpc.sharding.solved.rules_key", lambda: b"another version")
    monkeypatch.setattr("alpa_hpc.sharding.stage.wiring_key", repr)
    warm, _ = priced(step, SolvedRuns(known=first.new))
    assert (warm.num_known, warm.num_runs) == (0, cold.num_runs)


def test_a_restricted_pricer_is_given_nothing() -> None:
    step, first = prepared().step, SolvedRuns()
    priced(step, first)

    def first_choice(problem: LayerProblem) -> LayerProblem:
        return problem

    with pytest.raises(AssertionError, match="without restrictions"):
        StagePricer(step, PAIR, restrict=first_choice, solved=SolvedRuns(known=first.new))


def test_what_is_forgotten_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    candidates = find_candidates(prepared().step, PAIR, SEARCH)
    keeping, table = priced(prepared().step, SolvedRuns())
    kept = sum(solver.kept_bytes > 0 for solver in solvers(keeping, candidates))
    choices = [tuple(layer.choices for layer in keeping.choose(one, 1)) for one in candidates]
    monkeypatch.setattr("alpa_hpc.stages.pricing.MOST_KEPT_BYTES", 0)
    forgetting, same = priced(prepared().step, SolvedRuns())
    assert same.options == table.options
    assert sum(solver.kept_bytes > 0 for solver in solvers(forgetting, candidates)) <= 1 < kept
    assert [tuple(layer.choices for layer in forgetting.choose(one, 1)) for one in candidates] == choices


def solvers(pricer: StagePricer, candidates: Sequence[StageCandidate]) -> set[StageSolver]:
    return {pricer.solver(one.submesh, one.shape, remat=one.remat) for one in candidates}
