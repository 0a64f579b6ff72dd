"""How near rows are to words of the question."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from ragfuse.fuse.fusor import CachedRun
from ragfuse.fuse.select import nearness
from ragfuse.hf.model import HFModel, KVSource
from ragfuse.types.keys import ChunkKey
from ragfuse.types.prompt import Prompt, Segment
from tests.kits import hf as kit
from tests.twins import reference


def near(words: list[int], asked: list[int], candidates: list[int]) -> list[float]:
    found = nearness(
        torch.tensor(words), torch.tensor(asked, dtype=torch.int64), torch.tensor(candidates)
    )
    assert found.dtype == torch.float32
    return found.tolist()


@given(
    words=st.lists(st.integers(-1, 6), min_size=1, max_size=90),
    cut=st.floats(0.1, 0.9),
    skip=st.integers(1, 4),
)
def test_nearness_agrees_with_its_twin(words, cut, skip):
    stop = max(1, round(cut * len(words)))
    candidates, asked = list(range(0, stop, skip)), list(range(stop, len(words)))
    assert near(words, asked, candidates) == pytest.approx(
        reference.nearness(words, asked, candidates), abs=1e-5
    )


@pytest.fixture(scope="module")
def byte_level(smollm_path):
    """A small model that reads with the tokenizer of the embedded one."""
    words = AutoTokenizer.from_pretrained(smollm_path)
    return HFModel(kit.build("llama", {"vocab_size": len(words)}), words)


@pytest.mark.parametrize(
    ("first", "second"),
    [(" Paris", "Paris"), (" was", "Was"), ("THE", " the"), ("7", "7"), (" \u00c9", " \u00e9")],
)
def test_a_word_is_the_same_in_any_case_and_at_the_start_of_a_text(first, second, byte_level):
    one, other = (byte_level.tokens(said)[-1] for said in (first, second))
    assert byte_level._word(one) == byte_level._word(other) != ""


def test_special_tokens_are_no_words_and_letters_that_look_alike_in_bytes_are_two(
    byte_level,
):
    assert {byte_level._word(token) for token in byte_level.tokenizer.all_special_ids} == {""}
    one, other = ([*map(byte_level._word, byte_level.tokens(each))] for each in "\u0442\u0443")
    assert one != other
    assert "" not in one


def said(model: HFModel, *parts: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Ids of parts put together, and the rows of each."""
    ids, spans = [], []
    for part in parts:
        spans.append((len(ids), len(ids) + len(model.tokens(part))))
        ids += model.tokens(part)
    return ids, spans


FIRST = " The mill by the river was built of stone." * 4
SECOND = " Nobody counted the sheep in winter, but forty were sold in spring." * 4


def chosen(model: HFModel, ids: list[int], chunks: list[tuple[int, int]], **more: Any) -> list[int]:
    """Rows that the policy by words computes of these chunks."""
    runs = [CachedRun(index, lo, hi, lo, blend=True) for index, (lo, hi) in enumerate(chunks)]
    kv = KVSource([model.encode(ids[lo:hi]) for lo, hi in chunks])
    return model.fuse(ids, torch.arange(len(ids)), runs, kv, "lexical", 0.2, **more).chosen.tolist()


@pytest.mark.parametrize("behind", [True, False])
def test_rows_near_words_of_the_question_are_chosen_wherever_it_stands(behind, byte_level):
    question = " How many sheep were sold?"
    parts = [FIRST, SECOND, question] if behind else [question, FIRST, SECOND, " Answer:"]
    ids, spans = said(byte_level, *parts)
    chunks = spans[:2] if behind else spans[1:3]
    rows = chosen(byte_level, ids, chunks)
    assert rows
    assert all(chunks[1][0] <= row < chunks[1][1] for row in rows)


def test_a_missed_chunk_before_the_question_is_no_part_of_it(byte_level):
    missed = " The mill by the river was built of stone, and so was the bridge."
    ids, spans = said(byte_level, FIRST, SECOND, missed, " How many sheep were sold?")
    kinds = ["chunk", "chunk", "chunk", "fresh"]
    keys = (ChunkKey("model", "tokens"),)
    segments = [
        Segment(tuple(ids[lo:hi]), lo, k, keys if k == "chunk" else ())
        for k, (lo, hi) in zip(kinds, spans, strict=True)
    ]
    prompt = Prompt(tuple(segments))
    assert [rows.tolist() for rows in prompt.question_rows[:2]] == [list(range(*spans[3]))] * 2
    rows = chosen(byte_level, ids, spans[:2], question_rows=prompt.question_rows)
    assert all(spans[1][0] <= row < spans[1][1] for row in rows)
