"""The planning job: `python jobs/plan.py RUN_DIR` reads the run's config and writes its plan (and has it profiled and trained)."""

import sys
from pathlib import Path

from alpa_hpc.experiment import plan_run
from alpa_hpc.launch.paths import JobKind, open_run
from alpa_hpc.launch.status import reporting


def main(root: str) -> None:
    """Run the job on the run folder `root`."""
    paths = open_run(Path(root))
    with reporting(paths, JobKind.PLAN):
        plan_run(paths)


if __name__ == "__main__":
    main(*sys.argv[1:])
