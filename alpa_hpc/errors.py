"""Every error a user, a file or a cluster can cause; what our own mistakes cause is an `assert`."""


class AlpaError(Exception):
    """Base of all errors that the command line shows without a traceback."""


class ConfigError(AlpaError):
    """An option or a combination of options that cannot work."""


class TraceError(AlpaError):
    """A train step or a loss that cannot be cut into layers and microbatches."""


class InfeasibleError(AlpaError):
    """No plan fits the model on the cluster; the message says what is missing.

    `missing_bytes`: of memory, a device, at the least; 0 where memory is not what is missing.
    """

    def __init__(self, message: str, missing_bytes: float = 0.0) -> None:
        super().__init__(message)
        self.missing_bytes = missing_bytes


class SolverError(AlpaError):
    """A solver that failed, or whose answer does not survive the re-check."""


class PlanError(AlpaError):
    """A plan, read or made, that breaks a rule."""


class ProgramError(AlpaError):
    """Mesh programs that would deadlock, leak a buffer or exceed memory."""


class StoreError(AlpaError):
    """A file of ours that is torn, foreign or of another version."""


class TrainingError(AlpaError):
    """A training that cannot go on: its numbers have gone astray."""


class LaunchError(AlpaError):
    """A job that could not be submitted, started or finished."""
