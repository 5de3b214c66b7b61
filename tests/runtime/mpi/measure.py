"""All ranks form one mesh and time a stage of the small GPT on it, as two logical shapes; rank 0 prints one JSON line a shape."""

import json
import sys
from dataclasses import asdict

from meshes import join

from alpa_hpc.cluster.hardware import MeshShape, Submesh
from alpa_hpc.planner.requests import describe_request
from alpa_hpc.planner.search import chosen_stage
from alpa_hpc.planner.timing import joined_rows, measure_request_on_mesh
from alpa_hpc.profiling.options import Extent
from alpa_hpc.stages.cost_table import StageOption
from alpa_hpc.stages.objective import StageChoice
from alpa_hpc.stages.pricing import StagePricer
from tests.planning import CLUSTER, prepared


def main() -> None:
    """The argument is the number of ranks: they form a column, then two columns."""
    count = int(sys.argv[1])
    shapes = (MeshShape(count, 1), MeshShape(count // 2, 2))
    context = join(shapes[:1])
    pricer = StagePricer(prepared().step, CLUSTER)
    for shape in shapes:
        option = StageOption(shape, False, 0, 0.0, 0.0, 0.0, 0.0, 0.0, measured=False)
        choice = StageChoice(1, 2, Submesh(1, count), option)
        stage = chosen_stage(pricer, choice)
        request = describe_request(
            choice, stage, device_kind="cpu", versions="", xla_flags="", extent=Extent.MESH, cluster_name=CLUSTER.name
        )
        row = measure_request_on_mesh(pricer.step, CLUSTER, request, 3, context.mesh, context.world.Barrier, f"node{context.rank % 2}")
        rows = context.world.gather(row)
        if rows is not None:
            sys.stdout.write(json.dumps(asdict(joined_rows(rows))) + "\n")


if __name__ == "__main__":
    main()
