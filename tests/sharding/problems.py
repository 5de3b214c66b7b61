"""Random sharding problems, small enough to enumerate, with few distinct numbers so that ties are common."""

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from alpa_hpc.sharding.problem import Costs, Edge, ShardingProblem


@st.composite
def problems(draw: st.DrawFn, max_nodes: int = 6) -> ShardingProblem:
    """2 to `max_nodes` nodes, 1 to 4 strategies, any edges (parallel, either way, none), some infinities, with or without a limit."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sizes = draw(st.lists(st.integers(1, 4), min_size=2, max_size=max_nodes))
    forbidden = draw(st.sampled_from((0.0, 0.1, 0.3)))
    pairs = [rng.permutation(len(sizes))[:2].tolist() for _ in range(draw(st.integers(0, 9)))]
    fixed = tuple(rng.integers(0, 9, size).astype(float) for size in sizes)
    residuals = tuple(rng.integers(0, 4, size).astype(float) for size in sizes)
    inflight = draw(st.integers(1, 3))
    return ShardingProblem(
        node_costs=tuple(_costs(rng, (size,), forbidden) for size in sizes),
        edges=tuple(Edge(u, v, _costs(rng, (sizes[u], sizes[v]), forbidden)) for u, v in pairs),
        fixed_bytes=fixed,
        inflight_bytes=residuals,
        memory_limit=draw(st.sampled_from((float("inf"), *_limits(fixed, residuals, inflight)))),
        inflight=inflight,
    )


def _costs(rng: np.random.Generator, shape: tuple[int, ...], forbidden: float) -> Costs:
    return np.where(rng.random(shape) < forbidden, np.inf, rng.integers(0, 5, shape).astype(float))


def _limits(fixed: Sequence[Costs], residuals: Sequence[Costs], inflight: int) -> tuple[float, ...]:
    """Limits from just impossible to just free."""
    held = [one + inflight * other for one, other in zip(fixed, residuals, strict=True)]
    least, most = sum(float(one.min()) for one in held), sum(float(one.max()) for one in held)
    return (least - 1, least, *(float(np.floor(least + share * (most - least))) for share in (0.2, 0.4, 0.6)), most)
