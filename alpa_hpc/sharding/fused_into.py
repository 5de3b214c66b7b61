"""Steps -> the kernels that work each tile out, if all is fused that may be: one that reads it many times makes it once, inside."""

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set

from alpa_hpc.sharding.tiles import Compute, Exchange, Tile, TileStep
from alpa_hpc.sharding.work_kind import Work


def kernels_of(steps: Sequence[TileStep], wanted: Set[Tile]) -> Mapping[Tile, Set[Tile]]:
    """For each tile its kernels, each by a tile that it makes, which lies in memory; `wanted` = tiles that do in any case."""
    found: defaultdict[Tile, set[Tile]] = defaultdict(set)
    for step in reversed(steps):
        match step:
            case Exchange(read=read):
                found[read].add(read)
            case Compute(work=Work.FUSED | Work.FUNCTION | Work.CONVERSION | Work.TRANSPOSITION):
                ends = set[Tile]().union(*({made} if made in wanted or made in found[made] else found[made] for made in step.makes))
                for read in step.reads:
                    found[read] |= ends
            case Compute(work=Work.REDUCTION | Work.ROW_REDUCTION):
                for read in step.reads:
                    found[read].add(step.makes[0])
            case _:
                for read in step.reads:
                    found[read].add(read)
    return found
