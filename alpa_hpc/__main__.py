"""The command line: `python -m alpa_hpc +experiment=NAME [overrides]`, with Hydra's --help, --cfg job, -m and --config-dir."""

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager

from alpa_hpc.config import Composed, compose_command_line, to_config
from alpa_hpc.errors import AlpaError


def main() -> None:
    """Run what the arguments say; exit status 1 after any AlpaError. In a sweep the other runs go on after one has failed."""
    failed: list[AlpaError] = []

    def task(composed: Composed) -> None:
        with _reported(failed):
            config = to_config(composed)
            from alpa_hpc.experiment import run  # late: it needs jax, which --help, --cfg and a wrong number do not

            run(config)

    with _reported(failed):
        compose_command_line(task)
    sys.exit(1 if failed else 0)


@contextmanager
def _reported(failed: list[AlpaError]) -> Generator[None]:
    try:
        yield
    except AlpaError as error:
        if "1" in map(os.environ.get, ("ALPA_HPC_TRACEBACK", "HYDRA_FULL_ERROR")):
            raise
        print(f"error: {error}", file=sys.stderr)
        failed.append(error)


if __name__ == "__main__":
    main()
