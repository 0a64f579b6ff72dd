"""What `bench engines` asks, and how it sums up what it heard. The servers themselves are measured, not tested."""

from __future__ import annotations

from pathlib import Path

import pytest
from ragfuse_bench.engines.asked import cut
from ragfuse_bench.engines.options import numbers, sizes
from ragfuse_bench.engines.run import ALONE, BOTH, VLLM, compared, summed, sure
from ragfuse_bench.engines.vllm_server import require_vllm
from ragfuse_bench.throughput.load import Heard
from typer.testing import CliRunner

from ragfuse.calibration.runner import MALLOC
from ragfuse.cli.main import app
from ragfuse.errors import InputError, RagFuseError, SettingsError


def heard(first_s: float, whole_s: float, tokens: int, wrong: str = "") -> Heard:
    return Heard(0.0, first_s=first_s, whole_s=whole_s, tokens=tokens, wrong=wrong)


def test_sizes_and_numbers_are_read_and_nonsense_is_told() -> None:
    assert sizes("6x512,24x160", "--shapes") == ((6, 512), (24, 160))
    assert numbers("1,4,16", "--together") == (1, 4, 16)
    for text in ("6", "6x", "0x512", "6x8", "axb"):
        with pytest.raises(SettingsError, match="--shapes"):
            sizes(text, "--shapes")
    for text in ("", "0", "1,x"):
        with pytest.raises(SettingsError, match="--together"):
            numbers(text, "--together")


def test_chunks_are_whole_sentences_of_about_the_size_that_is_wanted() -> None:
    paragraphs = [" ".join(f"Sentence {i} of paragraph {n} has eight words." for i in range(9)) for n in range(6)]
    count = lambda text: len(text.split())  # noqa: E731
    found = list(cut(paragraphs, 40, count))
    assert len(found) > 5
    assert all(36 <= count(text) <= 44 for text in found)
    assert all(text.startswith("Sentence") and text.endswith("words.") for text in found)
    assert " ".join(" ".join(paragraphs).split()).startswith(" ".join(" ".join(found).split()))


def test_a_load_is_summed_by_medians() -> None:
    found = summed([heard(1.0, 3.0, 11), heard(2.0, 4.0, 21), heard(3.0, 7.0, 41)], 10.0)
    assert found == {"ttft_s": 2.0, "tokens_per_s": 7.3, "decode_tokens_per_s": 10.0}


def test_both_is_held_against_vllm_alone() -> None:
    one = {"ttft_s": 3.0, "tokens_per_s": 5.0, "decode_tokens_per_s": 10.0}
    found = compared({VLLM: [one], ALONE: [one], BOTH: [{**one, "ttft_s": 0.5, "decode_tokens_per_s": 11.0}]})
    assert (found["ttft_x"], found["decode_x"]) == (6.0, pytest.approx(1.1))


def test_an_answer_that_went_wrong_ends_the_measurement() -> None:
    with pytest.raises(RagFuseError, match="vllm did not answer: 503"):
        sure(VLLM, [heard(1.0, 2.0, 3), heard(1.0, 2.0, 0, "503")])


@pytest.mark.parametrize("python", [None, Path("/nowhere/python")])
def test_without_vllm_it_says_how_to_get_it(python: Path | None) -> None:
    with pytest.raises(InputError, match="make venv-vllm"):
        require_vllm(python)
    given = [] if python is None else ["--vllm", str(python)]
    result = CliRunner().invoke(app, ["bench", "engines", *given], env=dict(MALLOC))
    assert result.exit_code == 1
    assert "make venv-vllm" in " ".join(result.stderr.split())
