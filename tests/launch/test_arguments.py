"""A command line's words that Hydra would take amiss are refused in ours, and all others are left to it."""

from pathlib import Path

import pytest

from alpa_hpc.errors import ConfigError
from alpa_hpc.launch.arguments import check_arguments, check_own_configs, config_folders


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


@pytest.mark.parametrize("words", [["--config-dir", "mine", "cluster=own"], ["a=b", "-cd", "mine"], ["--config-dir=mine"]])
def test_folders_of_ones_own_are_found_on_a_command_line(words: list[str]) -> None:
    assert config_folders(words) == (Path("mine"),)
    assert config_folders(["cluster=mine", "-m"]) == ()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("name: [", "is no YAML: .* at line 1"),
        ("device: cpu\n  kind: cpu", "is no YAML: .* at line 2"),
        ("- a", r"holds \['a'\], expected KEY"),
    ],
)
def test_a_config_of_ones_own_that_is_no_yaml_is_named(text: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    for name, content in {"whole": "name: x", "empty": "", "torn": text}.items():
        (tmp_path / "cluster" / f"{name}.yaml").write_text(content)
    check_own_configs(["cluster=whole,empty,laptop", "model=torn", "mode=plan"], [tmp_path])
    with pytest.raises(ConfigError, match=f"torn.yaml {complaint}"):
        check_own_configs(["+cluster=whole,torn"], [tmp_path])
