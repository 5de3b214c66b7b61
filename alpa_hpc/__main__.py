"""The command line: `python -m alpa_hpc VERB ...`, or `python -m alpa_hpc +experiment=NAME [overrides]`, which Hydra reads."""

import sys

from alpa_hpc.commands import VERBS
from alpa_hpc.commands.verb import run_verb


def main() -> None:
    """Do what the arguments say, and end with its exit status: 1 where a run failed; those of verbs stand in `alpa_hpc.commands`."""
    verb, *arguments = sys.argv[1:] or [""]
    if verb in VERBS:
        sys.exit(run_verb(verb, arguments))
    from alpa_hpc.commands.run import run_command_line  # late: it needs Hydra, which a look at a run does not

    sys.exit(run_command_line())


if __name__ == "__main__":
    main()
