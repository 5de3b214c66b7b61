"""A command line's words that Hydra would take amiss are refused in ours, and all others are left to it."""

import pytest

from alpa_hpc.errors import ConfigError
from alpa_hpc.launch.arguments import check_arguments


@pytest.mark.parametrize("name", ["null", "true", "False", "5", "-1", "1.5", "1e3", "1_000", "nan", "+inf", "NULL"])
@pytest.mark.parametrize("group", ["search", "+cluster", "model"])
def test_what_is_no_name_is_refused_with_the_names_there_are(group: str, name: str) -> None:
    with pytest.raises(ConfigError, match=r"found '.*', expected the name of one of: .*(wide|laptop|gpt_tiny)"):
        check_arguments(["mode=plan", f"{group}={name}"])


def test_an_experiment_wants_a_plus() -> None:
    with pytest.raises(ConfigError, match=r"found 'experiment=gpt39b', expected a plus before it: \+experiment=gpt39b\. .*quickstart"):
        check_arguments(["experiment=gpt39b"])


def test_all_else_is_hydras() -> None:
    names = ["search=alpa", "search=alpa,wide", "search='5'", "model=gpt_1_3b", "cluster=8nodes", "search={}"]
    check_arguments([*names, "+experiment=quickstart", "mode=plan", "layers.num_layers=5", "name=null", "-m", "runs=5", ""])
