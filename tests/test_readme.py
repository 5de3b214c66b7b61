"""Property: the README tells the truth about files: its tree is the repository's, its links lead somewhere, its targets exist."""

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
MAKEFILE = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
NOT_OURS = {"runs", "dist", "build", "outputs", "multirun", "__pycache__"}  # made by use; .gitignore lists them
NOT_IN_THE_TREE = {"README.md", "alpa_hpc/__init__.py"}


def tree_paths() -> list[str]:
    """The paths that the section "The tree" names, relative to the repository, without a final slash."""
    section = README.partition("## The tree\n")[2].partition("\n## ")[0]
    paths: list[str] = []
    folder = ""
    for line in section.splitlines():
        if match := re.fullmatch(r"    (  )?(\S+)(?:  +.*)?", line):
            indented, name = match.groups()
            folder = folder if indented else (name if name.endswith("/") else "")
            paths.append(((folder + name) if indented else name).rstrip("/"))
    return paths


def own_entries(folder: Path) -> set[str]:
    found = (path for path in folder.iterdir() if not path.name.startswith(".") and path.name not in NOT_OURS)
    kept = (path for path in found if not path.is_dir() or any(child.suffix != ".pyc" for child in path.rglob("*") if child.is_file()))
    return {path.relative_to(REPOSITORY).as_posix() for path in kept if not path.name.endswith(".egg-info")}


def test_the_tree_has_the_size_that_was_seen() -> None:
    assert len(tree_paths()) > 20


@pytest.mark.parametrize("path", tree_paths())
def test_each_path_of_the_tree_exists(path: str) -> None:
    assert (REPOSITORY / path).exists()


def test_each_folder_and_top_file_is_in_the_tree() -> None:
    real = own_entries(REPOSITORY) | own_entries(REPOSITORY / "alpa_hpc")
    assert real - set(tree_paths()) - NOT_IN_THE_TREE == set()


def test_packages_are_listed_in_import_order() -> None:
    pyproject = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    block = re.search(r"^layers = \[(.*?)^\]", pyproject, re.MULTILINE | re.DOTALL)
    assert block
    order = re.findall(r"[a-z_]+", block.group(1))
    packages = [Path(path).name for path in tree_paths() if path.startswith("alpa_hpc/") and (REPOSITORY / path).is_dir()]
    assert sorted(packages, key=order.index) == packages


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)#]+)\)", README))))
def test_each_link_leads_to_a_file(target: str) -> None:
    assert not target.startswith("/")
    assert target.startswith("https://") or (REPOSITORY / target).exists()


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\bmake ([a-z-]+)\b", README.replace("Python 3.11 and make, and", "")))))
def test_each_make_target_exists(target: str) -> None:
    assert re.search(rf"^{target}:.*## ", MAKEFILE, re.MULTILINE)


@pytest.mark.parametrize(
    "name", sorted(set(re.findall(r"\+experiment=(\w+)", README)) | set(re.findall(r"`((?:gpt|moe|wresnet|llama)[0-9]\w+)`", README)))
)
def test_each_experiment_exists(name: str) -> None:
    assert (REPOSITORY / "conf" / "experiment" / f"{name}.yaml").is_file()
