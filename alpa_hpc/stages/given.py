"""A stage in words, as plans are printed, -> StageCandidate: `layers 0-3 on 1x4 as 2x2 remat`, `layer 4 on 2x8 as 4x4`.

Layers from the first to the last, the stage's devices (nodes x devices of each), its logical mesh (rows x columns), and `remat` where its
forward is run again in its backward.
"""

import re

from alpa_hpc.cluster.hardware import MeshShape, Submesh
from alpa_hpc.errors import ConfigError
from alpa_hpc.stages.candidate import StageCandidate

_STAGE = re.compile(r"layers? (\d+)(?:-(\d+))? on (\d+)x(\d+) as (\d+)x(\d+)( remat)?")


def parse_stage(words: str) -> StageCandidate:
    """The stage that is meant. Raises ConfigError where the words are none, or contradict themselves."""
    match = _STAGE.fullmatch(" ".join(words.split()))
    if match is None:
        raise ConfigError(
            f"{words!r} is no stage: say it as a plan is printed, such as 'layers 0-3 on 1x4 as 2x2' or 'layer 4 on 2x8 as 4x4 remat'"
        )
    first, last, nodes, devices, rows, cols, remat = match.groups()
    start, stop = int(first), int(last or first) + 1
    if stop <= start:
        raise ConfigError(f"{words!r} ends before it starts: say the first layer, then the last")
    submesh, shape = Submesh(int(nodes), int(devices)), MeshShape(int(rows), int(cols))
    if submesh.num_devices != shape.num_devices or not shape.num_devices:
        raise ConfigError(
            f"{words!r} has {submesh.num_devices} devices and sees them as {shape.rows} x {shape.cols} = {shape.num_devices}: "
            "make them equal in number, and at least one"
        )
    return StageCandidate(start, stop, submesh, shape, remat=remat is not None)
