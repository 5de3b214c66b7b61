"""A profiling task: `python jobs/profile.py RUN_DIR TASK` measures what request TASK asks for, row by row into the cost store."""

import sys
from pathlib import Path

from alpa_hpc.launch.paths import JobKind, open_run
from alpa_hpc.launch.status import reporting


def main(root: str, task: str) -> None:
    """Run the task with number `task` of the run folder `root`."""
    paths = open_run(Path(root))
    with reporting(paths, JobKind.PROFILE, int(task)):
        from alpa_hpc.profile_job import profile_run  # within, so that a broken installation is reported, too

        profile_run(paths, int(task))


if __name__ == "__main__":
    main(*sys.argv[1:])
