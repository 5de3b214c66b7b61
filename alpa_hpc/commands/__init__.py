"""A verb and its arguments -> exit status: one module a verb, with `main(arguments) -> int`, imported only when it is asked for.

Exit statuses of all verbs: 0 it did what was asked, 1 the answer is bad (the run failed, a check failed), 2 it could not tell or could
not do it. Nothing here imports jax.
"""

from collections.abc import Mapping

VERBS: Mapping[str, str] = {
    "status": "what became of a run and of each of its jobs",
    "explain": "its plan: stages, meshes, time, memory, the bound, and why others lost",
    "logs": "the output of a job",
    "cancel": "end all jobs of a run",
    "list": "all runs, the newest first",
    "calibrate": "measure what a cluster's devices and links do, for plans and predictions",
    "doctor": "what this machine has of what a run needs",
}
"""Each verb with what it tells or does."""
