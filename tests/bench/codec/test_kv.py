"""A context's KV is computed once, and what is read on from it is what the model says itself."""

from pathlib import Path

import pytest
import torch
from ragfuse_bench.codec.answers import RAW, ask_all, scores
from ragfuse_bench.codec.contexts import Question, Reading
from ragfuse_bench.codec.fidelity import Told
from ragfuse_bench.codec.kv import Continued
from ragfuse_bench.presets import bench_model
from rich.console import Console

from ragfuse.hf.model import HFModel
from ragfuse.types.kv import ChunkKV, LayerKV


@pytest.fixture(scope="module")
def model(varied_path: Path) -> HFModel:
    return bench_model(str(varied_path), "float32", "cpu", varied_path)


@pytest.fixture(scope="module")
def ids(model: HFModel) -> list[int]:
    return model.tokens(
        "The keeper of the northern lighthouse counted forty ships in one night; its door is green."
    )


def test_what_is_read_behind_kv_is_what_the_model_says_of_the_whole_text(
    model: HFModel, ids: list[int]
) -> None:
    found = Continued(model, model.encode(ids[:60])).logits(ids[60:])
    with torch.no_grad():
        whole = model.model(input_ids=torch.tensor([ids])).logits[0, 60:]
    assert torch.allclose(found, whole, atol=1e-3)


@pytest.mark.parametrize("spoiled", [None, 0, 3])
def test_an_answer_is_the_same_with_a_right_a_wrong_and_no_guess(
    model: HFModel, ids: list[int], spoiled: int | None
) -> None:
    continued = Continued(model, model.encode(ids[:60]))
    plain = continued.answer(ids[60:70], 8)
    assert len(plain.token_ids) == 8
    assert plain.along.shape[0] == 9
    guess = list(plain.token_ids)
    if spoiled is not None:
        guess[spoiled] = (guess[spoiled] + 1) % 200
    again = continued.answer(ids[60:70], 8, guess)
    assert again.token_ids == plain.token_ids
    assert again.along.shape[0] == 9
    assert torch.allclose(again.along[0], plain.along[0], atol=1e-3)


def rounded(kv: ChunkKV, bits: int) -> ChunkKV:
    """Return KV in equal steps up to each row's largest value."""

    def of(rows: torch.Tensor) -> torch.Tensor:
        step = rows.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
        return (rows / step).round() * step

    return ChunkKV(tuple(LayerKV(of(layer.keys), of(layer.values)) for layer in kv.layers))


def test_unchanged_kv_loses_nothing_and_coarser_rounding_loses_more(
    model: HFModel, ids: list[int]
) -> None:
    kv = model.encode(ids[:50])
    told = Told.of(model, kv, ids[50:])
    same = told.loss(model, kv)
    assert (same.kl, same.top1, same.n) == (0.0, 1.0, len(ids) - 51)
    losses = [told.loss(model, rounded(kv, bits)).kl for bits in (8, 4, 2)]
    assert 0 < losses[0] < losses[1] < losses[2]


def test_questions_over_raw_kv_are_the_measure_and_a_spoiled_codec_falls_short_of_it(
    model: HFModel, ids: list[int]
) -> None:
    first = Continued(model, model.encode(ids[:40])).answer(ids[40:50], 24)
    questions = (
        Question("a", tuple(ids[40:50]), (model.text(first.token_ids),)),
        Question("b", (9, 9), ("none",)),
    )
    reading = Reading(tuple(ids[:40]), questions)

    def nothing(kv: ChunkKV) -> ChunkKV:
        return kv

    def spoil(kv: ChunkKV) -> ChunkKV:
        return rounded(kv, 2)

    found = ask_all([reading], model, {"same": nothing, "spoiled": spoil}, Console(quiet=True))
    told = scores(found)
    assert list(told) == [RAW, "same", "spoiled"]
    assert told[RAW]["f1"] == 0.5
    for name in (RAW, "same"):
        assert told[name]["f1_delta"] == 0
        assert told[name]["same_answer"] == told[name]["top1_answers"] == 1
        assert told[name]["kl_answers"] == pytest.approx(0, abs=1e-6)
    assert told["spoiled"]["kl_answers"] > 0.01
    assert told["spoiled"]["same_answer"] < 1
    assert told["spoiled"]["n"] == 2
