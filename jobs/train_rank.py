"""One rank of the training job: `mpirun -n RANKS python jobs/train_rank.py RUN_DIR`, one rank a device."""

import sys
from pathlib import Path

from alpa_hpc.launch.failures import recording_failure
from alpa_hpc.launch.paths import JobKind, open_run
from alpa_hpc.runtime.groups import abort_on_error


def main(root: str) -> None:
    """Train as one rank on the run folder `root`; an exception on any rank ends all of them."""
    abort_on_error("a rank that has not joined its mesh yet")
    paths = open_run(Path(root))
    with recording_failure(paths.failures(JobKind.TRAIN)):
        from alpa_hpc.train_job import train_rank  # within, so that a broken installation is reported, too

        train_rank(paths)


if __name__ == "__main__":
    main(*sys.argv[1:])
