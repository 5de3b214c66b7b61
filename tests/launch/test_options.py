"""What sbatch cannot be asked for is refused with words that say where it stands and what is expected."""

from dataclasses import replace
from typing import Any

import pytest

from alpa_hpc.errors import ConfigError
from tests.launching import launcher_options, slurm_options

OURS = ["array", "dependency", "error", "job-name", "nodes", "ntasks", "ntasks-per-node", "open-mode", "output", "parsable", "wrap"]
KINDS = ("additional", "plan", "profile", "train")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flag", OURS)
def test_what_follows_from_the_plan_cannot_be_chosen(flag: str, kind: str) -> None:
    for name in (flag, flag.replace("-", "_")):
        with pytest.raises(ConfigError, match=rf"^{kind} sets \['{flag}'\], which follow from the plan and the run folder"):
            slurm_options(**{kind: {"exclude": "node7", name: "4"}})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"--exclude": "node7"}, r"has the flags \['--exclude'\], expected long names without dashes, such as {exclude: node7}"),
        ({"exclude=node7": ""}, r"has the flags \['exclude=node7'\]"),
        ({"exclude": ["node7", "node8"]}, r"has {'exclude': \['node7', 'node8'\]}, expected a text"),
        ({"exclude": None}, "has {'exclude': None}, expected a text"),
        ({"switches": 1.5}, "has .*put it in quotes"),
    ],
)
def test_flags_that_are_none_are_refused(flags: dict[str, Any], message: str, kind: str) -> None:
    with pytest.raises(ConfigError, match=f"^{kind} {message}"):
        slurm_options(**{kind: flags})


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"NCCL-DEBUG": "INFO"}, "environment has 'NCCL-DEBUG', expected the name of a variable"),
        ({"A=1; B": "x"}, "expected the name of a variable"),
        ({"NCCL_IB_DISABLE": True}, r"environment\.NCCL_IB_DISABLE is True.* put it in quotes"),
        ({"A": 0.5}, r"environment\.A is 0\.5"),
    ],
)
def test_variables_that_no_shell_would_take_are_refused(environment: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        slurm_options(environment=environment)


@pytest.mark.parametrize("name", ["time_minutes", "cpus_per_task"])
def test_numbers_below_zero_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is -1, expected a number >= 0"):
        slurm_options(**{name: -1})


def test_a_launcher_starts_at_least_one_rank() -> None:
    assert replace(launcher_options(), max_ranks=1).max_ranks == 1
    with pytest.raises(ConfigError, match="^max_ranks is 0"):
        replace(launcher_options(), max_ranks=0)


def test_flags_that_are_any_other_are_taken_as_they_are() -> None:
    flags = {"exclude": "node7", "mem": 0, "no-kill": True, "mail_type": "END", "exclusive": ""}
    assert slurm_options(additional=flags, train=flags).train == flags
