"""Keys are equal for equal content, in every process, and differ otherwise."""

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from alpa_hpc.cluster.hardware import MeshShape, Submesh
from alpa_hpc.profiling.keys import NO_LINKS, content_key, link_class, measure_key, software_versions

PARTS = st.lists(st.one_of(st.text(), st.binary(), st.integers(), st.floats(allow_nan=False)), max_size=4)


@given(PARTS, PARTS)
def test_lists_of_parts_have_equal_keys_only_if_they_are_equal(left: list[str], right: list[str]) -> None:
    def typed(parts: list[str]) -> list[tuple[str, str]]:
        return [(type(part).__name__, repr(part)) for part in parts]

    assert (content_key(*left) == content_key(*right)) == (typed(left) == typed(right))


def test_the_border_between_parts_counts() -> None:
    assert content_key("ab", "c") != content_key("a", "bc")
    assert content_key(1) != content_key("1") != content_key(1.0)


def test_another_process_finds_the_same_key() -> None:
    code = "from alpa_hpc.profiling.keys import content_key; print(content_key('a', 1, 2.5, b'x'))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == content_key("a", 1, 2.5, b"x")


def test_each_argument_of_a_measure_key_counts() -> None:
    base = ("lambda a. add", "S0 R", MeshShape(1, 4), "cpu", software_versions(), "", link_class("c", Submesh(1, 4)))
    others = [(*base[:i], MeshShape(4, 1) if i == 2 else f"{base[i]}!", *base[i + 1 :]) for i in range(len(base))]
    keys = {measure_key(*arguments) for arguments in (base, *others)}  # pyright: ignore[reportArgumentType]
    assert len(keys) == 1 + len(base)
    assert "jaxlib 0." in software_versions()


def test_links_are_named_by_cluster_and_rectangle() -> None:
    names = [link_class("c", Submesh(1, 4)), link_class("c", Submesh(2, 2)), link_class("d", Submesh(1, 4)), NO_LINKS]
    assert len(set(names)) == len(names)
