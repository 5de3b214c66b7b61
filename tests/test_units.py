"""Numbers of bytes read well, however small."""

import pytest

from alpa_hpc.units import bytes_words


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [
        (0, "0 bytes"),
        (17, "17 bytes"),
        (17_400, "17.4 kB"),
        (600_000, "600 kB"),
        (12.4e6, "12.4 MB"),
        (310_000_000, "0.31 GB"),
        (80e9, "80 GB"),
        (1.25e12, "1.25 TB"),
    ],
)
def test_bytes_are_told_in_the_unit_that_reads_best(num_bytes: float, words: str) -> None:
    assert bytes_words(num_bytes) == words
