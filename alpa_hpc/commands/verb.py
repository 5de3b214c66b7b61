"""(verb, arguments) -> exit status, with what went wrong told on stderr in a line."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from alpa_hpc.errors import AlpaError

COULD_NOT = 2
STOPPED = 130  # the exit status of a shell's Ctrl-C: 128 + SIGINT
PIPE_CLOSED = 141  # 128 + SIGPIPE

_MODULES = {"list": "list_runs"}  # a module called `list` would shadow Python's


def run_verb(verb: str, arguments: Sequence[str]) -> int:
    """Do what a verb says."""
    module = import_module(f"alpa_hpc.commands.{_MODULES.get(verb, verb)}")
    try:
        status: int = module.main(arguments)
        sys.stdout.flush()
    except AlpaError as error:
        if os.environ.get("ALPA_HPC_TRACEBACK") == "1":
            raise
        sys.stderr.write(f"error: {error}\n")
        return COULD_NOT
    except KeyboardInterrupt:
        return STOPPED
    except BrokenPipeError:  # whoever read the output, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains when it flushes at its end
        return PIPE_CLOSED
    return status
