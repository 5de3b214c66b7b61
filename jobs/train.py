"""The training job's batch half: `python jobs/train.py RUN_DIR` starts one rank a device with mpirun and hands signals on to them."""

import sys
from pathlib import Path

from alpa_hpc.launch.paths import JobKind, open_run
from alpa_hpc.launch.status import reporting


def main(root: str) -> None:
    """Run the job on the run folder `root`."""
    paths = open_run(Path(root))
    with reporting(paths, JobKind.TRAIN):
        from alpa_hpc.train_job import train_run  # within, so that a broken installation is reported, too

        train_run(paths)


if __name__ == "__main__":
    main(*sys.argv[1:])
