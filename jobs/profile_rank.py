"""One rank of a profiling task: `mpirun -n DEVICES python jobs/profile_rank.py RUN_DIR TASK`, where all devices of a mesh are timed."""

import sys
from pathlib import Path

from alpa_hpc.launch.failures import recording_failure
from alpa_hpc.launch.paths import JobKind, open_run
from alpa_hpc.runtime.groups import abort_on_error


def main(root: str, task: str) -> None:
    """Measure as one rank; an exception on any rank ends all of them."""
    abort_on_error("a rank that has not joined its mesh yet")
    paths = open_run(Path(root))
    with recording_failure(paths.failures(JobKind.PROFILE, int(task))):
        from alpa_hpc.profile_job import profile_rank  # within, so that a broken installation is reported, too

        profile_rank(paths, int(task))


if __name__ == "__main__":
    main(*sys.argv[1:])
