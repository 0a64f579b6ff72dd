"""Bytes and seconds in words."""

import pytest

from ragfuse.types.sizes import capacity_text, duration_text, size_text


@pytest.mark.parametrize(
    ("nbytes", "said"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (9_940, "9.9 KB"),
        (9_960, "10 KB"),
        (999_600, "1.0 MB"),
        (1_900_000_000, "1.9 GB"),
        (3_000_000_000_000_000_000, "3000 PB"),
    ],
)
def test_sizes_have_two_digits_or_more_and_a_unit(nbytes, said):
    assert size_text(nbytes) == said


@pytest.mark.parametrize(
    ("nbytes", "said"),
    [
        (20 << 30, "20 GiB"),
        (1_000_000, "1.0 MB"),
        (0, "0 B"),
    ],
)
def test_a_capacity_is_written_as_its_setting_is(nbytes, said):
    assert capacity_text(nbytes) == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.2, "less than a second"),
        (1, "1 second"),
        (89, "89 seconds"),
        (360, "6 minutes"),
        (9000, "2.5 hours"),
        (90000, "25 hours"),
    ],
)
def test_durations_are_rough(seconds, said):
    assert duration_text(seconds) == said
