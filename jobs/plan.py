"""The planning job: `python jobs/plan.py RUN_DIR` reads the run's config, has stages profiled, writes the plan, has it trained."""

import os
import sys
from pathlib import Path

from alpa_hpc.launch.paths import JobKind, open_run
from alpa_hpc.launch.site import host_environment
from alpa_hpc.launch.status import reporting


def main(root: str) -> None:
    """Run the job on the run folder `root`."""
    paths = open_run(Path(root))
    os.environ.update(host_environment())  # planning needs no GPU, and shall not take one
    with reporting(paths, JobKind.PLAN):
        from alpa_hpc.experiment import plan_run  # within, so that a broken installation is reported, too

        plan_run(paths)


if __name__ == "__main__":
    main(*sys.argv[1:])
