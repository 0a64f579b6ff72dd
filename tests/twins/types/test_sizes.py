"""Bytes and seconds in words."""

import pytest

from ragfuse.types.sizes import capacity_text, duration_text, size_text


@pytest.mark.parametrize(
    ("told", "number", "said"),
    [
        (size_text, 0, "0 B"),
        (size_text, 999, "999 B"),
        (size_text, 9_940, "9.9 KB"),
        (size_text, 9_960, "10 KB"),
        (size_text, 999_600, "1.0 MB"),
        (size_text, 3_000_000_000_000_000_000, "3000 PB"),
        (capacity_text, 20 << 30, "20 GiB"),
        (capacity_text, 1_000_000, "1.0 MB"),
        (duration_text, 0.2, "less than a second"),
        (duration_text, 1, "1 second"),
        (duration_text, 89, "89 seconds"),
        (duration_text, 360, "6 minutes"),
        (duration_text, 9000, "2.5 hours"),
    ],
)
def test_sizes_have_two_digits_or_more_capacities_their_setting_s_unit_and_durations_are_rough(
    told, number, said
):
    assert told(number) == said
