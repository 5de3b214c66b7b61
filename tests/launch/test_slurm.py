"""What sbatch is handed, in which environment, and what stands on record before and after; its refusals come through word for word."""

import itertools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_hpc.errors import LaunchError
from alpa_hpc.launch import slurm
from alpa_hpc.launch.batch import Allocation, BatchJob, batch_script, job_name
from alpa_hpc.launch.paths import JobKind, RunPaths, new_run
from alpa_hpc.launch.slurm import (
    DEFAULT_MAX_ARRAY_SIZE,
    check_sbatch,
    clean_environment,
    max_array_size,
    parse_max_array_size,
    refusal_ahead,
    submit,
    with_site_defaults,
)
from alpa_hpc.launch.submission import Submission, read_submissions
from tests.launching import fake_command, slurm_options

PLAN = BatchJob(JobKind.PLAN, Allocation(1, 1, 0))
OPTIONS = slurm_options(time_minutes=5)
FOREIGN = ("SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "PMI_", "PMIX_", "PRTE_", "OMPI_COMM_WORLD_")
WAY_TO_SLURM = {"SLURM_CONF": "/etc/slurm.conf", "SLURM_CLUSTERS": "big"}


def profiling(*tasks: int) -> BatchJob:
    return BatchJob(JobKind.PROFILE, Allocation(1, 2, 0), tasks=tasks, max_parallel=2)


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return new_run(tmp_path / "runs", "demo")


def recording(folder: Path, answer: str) -> dict[str, str]:
    """The environment of an sbatch that notes what it was asked, in which environment, and what stood in its script."""
    body = f'printf "%s\\n" "$@" >> {folder}/arguments; env > {folder}/environment; cat "$2" > {folder}/script; {answer}'
    return fake_command(folder / "bin", "sbatch", body)


# ---- the environment (a job that submits is itself a job)


@given(
    st.dictionaries(
        st.builds(
            lambda head, tail: head + tail, st.sampled_from([*FOREIGN, "", "MY_", "OMPI_MCA_", "NCCL_"]), st.from_regex("[A-Z_]{0,9}")
        ),
        st.text(max_size=5),
    ),
    st.dictionaries(st.sampled_from(list(WAY_TO_SLURM)), st.text(max_size=5)),
)
def test_a_job_inherits_nothing_about_another_but_the_way_to_slurm(others: dict[str, str], way: dict[str, str]) -> None:
    environ = others | way
    clean = clean_environment(environ)
    assert clean.items() <= environ.items()
    assert way.items() <= clean.items()
    assert not [name for name in clean if name.startswith(FOREIGN) and name not in WAY_TO_SLURM]
    assert {name for name in environ if not name.startswith((*FOREIGN, "OMPI_"))} <= set(clean)


def test_settings_of_openmpi_and_of_a_test_bed_stay() -> None:
    kept = ("OMPI_MCA_btl", "OMPI_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM", "SLURM_CONF")
    gone = ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_STEP_ID", "OMPI_UNIVERSE_SIZE", "PRTE_LAUNCHED", "SBATCH_PARTITION")
    assert set(clean_environment(dict.fromkeys((*kept, *gone), "1"))) == set(kept)


def test_sbatch_is_asked_in_a_clean_environment(tmp_path: Path, run: RunPaths) -> None:
    dirty = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SBATCH_PARTITION": "x", "PMIX_RANK": "0", "SLURM_CONF": "/c", "MINE": "yes"}
    submit(PLAN, run, OPTIONS, recording(tmp_path, "echo 12") | dirty)
    seen = dict(line.split("=", 1) for line in (tmp_path / "environment").read_text().splitlines() if "=" in line)
    assert {name: value for name, value in seen.items() if name in dirty} == {"SLURM_CONF": "/c", "MINE": "yes"}


# ---- what a site's users set for all their jobs

DEFAULTS = {"SBATCH_PARTITION": "gpu", "SBATCH_ACCOUNT": "physics", "SBATCH_QOS": "long", "SBATCH_CONSTRAINT": "a100"}


def test_variables_of_a_user_hold_where_the_config_says_nothing() -> None:
    options = with_site_defaults(slurm_options(account="mine"), DEFAULTS)
    assert (options.partition, options.account, options.qos, options.constraint) == ("gpu", "mine", "long", "a100")
    assert with_site_defaults(OPTIONS, {"SBATCH_PARTITION": "", "SLURM_PARTITION": "x"}) == OPTIONS


def test_a_job_that_submits_jobs_gives_them_the_same_defaults(tmp_path: Path, run: RunPaths) -> None:
    """The planning job submits the others, from an environment that sbatch was not handed the user's variables in."""
    first = with_site_defaults(OPTIONS, DEFAULTS)
    submit(PLAN, run, first, recording(tmp_path, "echo 12") | DEFAULTS)
    script = (tmp_path / "script").read_text()
    exports = dict(re.findall(r"^export (SBATCH_\w+)=(\S+)$", script, re.MULTILINE))
    assert with_site_defaults(OPTIONS, exports) == first


# ---- one job


def test_a_job_is_submitted_and_on_record(tmp_path: Path, run: RunPaths) -> None:
    (submitted,) = submit(PLAN, run, OPTIONS, recording(tmp_path, "echo 12"))
    script = run.logs / "plan" / "plan.sh"
    assert (tmp_path / "arguments").read_text().splitlines() == ["--parsable", str(script)]
    assert script.read_text() == (tmp_path / "script").read_text() == submitted.script == batch_script(PLAN, run, OPTIONS)
    assert (submitted.job_id, submitted.tasks, submitted.is_array, submitted.job_name) == ("12", (0,), False, job_name(run, PLAN))
    assert read_submissions(run) == (submitted,)


def test_the_number_is_read_without_the_cluster_that_may_follow_it(tmp_path: Path, run: RunPaths) -> None:
    (submitted,) = submit(PLAN, run, OPTIONS, recording(tmp_path, "echo '12;cluster'"))
    assert submitted.job_id == "12"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("echo 'sbatch: error: invalid partition specified: moon' >&2; exit 1", "sbatch: error: invalid partition specified: moon"),
        ("echo 12; echo 'sbatch: error: late' >&2; exit 1", "sbatch: error: late"),
        ("echo 'Submitted batch job'", "Submitted batch job"),
        ("echo 12.5", "12.5"),
        ("printf 'Le mot de passe est erron\\351' >&2; exit 1", "Le mot de passe est erron\ufffd"),
        ("exit 0", "without a word"),
    ],
)
def test_what_sbatch_refuses_it_says_itself(answer: str, said: str, tmp_path: Path, run: RunPaths) -> None:
    script = run.logs / "plan" / "plan.sh"
    with pytest.raises(LaunchError, match=rf"^sbatch refused {re.escape(str(script))}: {re.escape(said)}$"):
        submit(PLAN, run, OPTIONS, recording(tmp_path, answer))
    (record,) = read_submissions(run)
    assert record.job_id == ""


@pytest.mark.parametrize(
    ("body", "refusal"),
    [
        ("grep -q '#SBATCH --nodes=9' || exit 7; echo 'allocation failure: too many' >&2; exit 1", "allocation failure: too many"),
        ("echo 'Job 3 to start at noon' >&2", ""),
        ("echo 'Unable to contact slurm controller' >&2; exit 1", ""),
    ],
)
def test_what_sbatch_has_against_a_later_job_is_asked_with_its_script(body: str, refusal: str, tmp_path: Path, run: RunPaths) -> None:
    training = BatchJob(JobKind.TRAIN, Allocation(9, 4, 0))
    asked = fake_command(tmp_path / "bin", "sbatch", f'test "$1" = --test-only || exit 8\n{body}')
    assert refusal_ahead(training, run, OPTIONS, asked) == refusal


def test_an_sbatch_that_does_not_answer_is_not_waited_for(tmp_path: Path, run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "SBATCH_SECONDS", 0.2)
    with pytest.raises(LaunchError, match=r"did not answer in 0 s.*scontrol ping.*reach the queue all the same.*squeue --me --name plan-"):
        submit(PLAN, run, OPTIONS, fake_command(tmp_path, "sbatch", "exec sleep 30"))
    (record,) = read_submissions(run)
    assert (record.job_id, record.job_name) == ("", job_name(run, PLAN)), "by its name it is found again"


def test_without_sbatch_nothing_is_written(tmp_path: Path, run: RunPaths) -> None:
    for path in ("", str(tmp_path)):
        with pytest.raises(LaunchError, match=r"no sbatch on PATH.*login node.*mode=dry_run.*launcher=local"):
            submit(PLAN, run, OPTIONS, {"PATH": path})
    assert read_submissions(run) == ()
    check_sbatch(recording(tmp_path, ""))


SUBMITTER = """
import os, sys
from pathlib import Path
from alpa_hpc.launch.batch import Allocation, BatchJob
from alpa_hpc.launch.paths import JobKind, RunPaths
from alpa_hpc.launch.slurm import submit
from tests.launching import slurm_options
submit(BatchJob(JobKind.PLAN, Allocation(1, 1, 0)), RunPaths(Path(sys.argv[1])), slurm_options(), os.environ)
"""


def test_a_job_whose_submitter_is_killed_stands_on_record_by_its_name(tmp_path: Path, run: RunPaths) -> None:
    environment = fake_command(tmp_path / "bin", "sbatch", "kill -KILL $PPID; sleep 0.1; echo 12")
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", SUBMITTER, str(run.root)], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    (record,) = read_submissions(run)
    assert (record.kind, record.job_id, record.job_name) == (JobKind.PLAN, "", job_name(run, PLAN))


def test_the_account_of_an_earlier_attempt_is_gone_before_sbatch_is_asked(tmp_path: Path, run: RunPaths) -> None:
    for task in (3, 4, 5):
        run.status(JobKind.PROFILE, task).write_text("old")
    submit(profiling(3, 4), run, OPTIONS, recording(tmp_path, f"ls {run.status_folder} > {tmp_path}/statuses; echo 12"))
    assert (tmp_path / "statuses").read_text().split() == ["profile-0005.json"]


def test_the_folder_of_the_log_is_there_when_sbatch_is_asked_and_is_the_owners_alone(tmp_path: Path, run: RunPaths) -> None:
    submit(profiling(0), run, OPTIONS, recording(tmp_path, "echo 12"))
    (output,) = re.findall(r"--output=(\S+)", (tmp_path / "script").read_text())
    assert Path(output).parent.stat().st_mode & 0o777 == 0o700


# ---- arrays


@given(
    st.lists(st.integers(0, 9999), min_size=1, max_size=25, unique=True).map(lambda tasks: range(tasks[0], tasks[0] + len(tasks))),
    st.integers(1, 9),
)
@settings(max_examples=20, deadline=None)
def test_an_array_is_cut_to_what_the_site_allows_and_each_task_is_in_it_once(tasks: Sequence[int], limit: int) -> None:
    numbers = map(str, itertools.count(100))
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        run = new_run(Path(folder), "demo")
        patch.setattr(slurm, "check_sbatch", lambda _: None)
        patch.setattr(slurm, "max_array_size", lambda _: limit)
        patch.setattr(slurm, "_sbatch", lambda *_: next(numbers))
        submissions = submit(profiling(*tasks), run, OPTIONS, os.environ)
        assert read_submissions(run) == submissions
    assert [task for one in submissions for task in one.tasks] == list(tasks)
    assert len({one.job_id for one in submissions}) == len({one.file_name for one in submissions}) == -(-len(tasks) // limit)
    addresses: set[str] = set()
    for one in submissions:
        assert one.is_array
        (last, at_once) = re.findall(r"--array=0-(\d+)%(\d+)", one.script)[0]
        assert int(last) + 1 == len(one.tasks) <= limit
        assert int(at_once) <= 2
        addresses |= {one.slurm_id(task) for task in one.tasks}
        for element, task in enumerate(one.tasks):
            assert one.slurm_id(task) == f"{one.job_id}_{element}"
            assert task_of(one, element) == task
    assert len(addresses) == len(tasks)


def task_of(submission: Submission, element: int) -> int:
    """The task that the script runs as an element of its array, by its own sum."""
    (first,) = re.findall(r"\$\(\((\d+) \+ SLURM_ARRAY_TASK_ID\)\)$", submission.script, re.MULTILINE)
    return int(first) + element


def test_an_array_of_which_a_part_is_refused_leaves_nothing_in_the_queue(
    tmp_path: Path, run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelled: list[Sequence[str]] = []
    monkeypatch.setattr(slurm, "cancel", cancelled.append)
    monkeypatch.setattr(slurm, "max_array_size", lambda _: 2)
    answer = f"n=$(wc -l < {tmp_path}/arguments); [ $n -lt 6 ] && echo 1$n || {{ echo 'too many jobs' >&2; exit 1; }}"
    with pytest.raises(LaunchError, match="too many jobs"):
        submit(profiling(*range(6)), run, OPTIONS, recording(tmp_path, answer))
    assert cancelled == [["12", "14"]]


@pytest.mark.parametrize(
    ("body", "size"),
    [
        ("echo 'MaxArraySize            = 4'", 4),
        ("echo 'XMaxArraySize = 3'; echo 'MaxArraySize=77'", 77),
        ("echo 'slurm_load_ctl_conf error' >&2; exit 1", DEFAULT_MAX_ARRAY_SIZE),
        ("exec sleep 30", DEFAULT_MAX_ARRAY_SIZE),
    ],
)
def test_the_site_says_how_long_an_array_may_be(body: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "SBATCH_SECONDS", 2.0 if "echo" in body else 0.2)
    assert max_array_size(fake_command(tmp_path, "scontrol", body)) == size


def test_where_there_is_no_scontrol_slurms_own_default_holds() -> None:
    assert max_array_size({"PATH": ""}) == DEFAULT_MAX_ARRAY_SIZE


def test_a_site_without_arrays_is_refused_with_a_way_out() -> None:
    with pytest.raises(LaunchError, match=r"MaxArraySize=0.*launcher\.chain=login"):
        parse_max_array_size("MaxArraySize = 0\n")


def test_a_job_that_reached_the_queue_after_all_is_taken(tmp_path: Path, run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "SBATCH_SECONDS", 0.2)
    monkeypatch.setattr(slurm, "find_by_name", lambda names: dict.fromkeys(names, "31"))
    (submitted,) = submit(PLAN, run, OPTIONS, fake_command(tmp_path, "sbatch", "exec sleep 30"))
    assert submitted.job_id == "31"
    assert read_submissions(run) == (submitted,)
