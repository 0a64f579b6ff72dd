"""Contexts come from the texts that come along; questions stand behind the passages that answer
them.
"""

from pathlib import Path

import pytest
from ragfuse_bench.codec.contexts import FOLLOW, PASSAGES, held_out, read_contexts, read_questions
from ragfuse_bench.presets import bench_model

from ragfuse.hf.model import HFModel


@pytest.fixture(scope="module")
def model(varied_path: Path) -> HFModel:
    return bench_model(str(varied_path), "float32", "cpu", varied_path)


def test_contexts_are_of_one_length_and_what_follows_is_their_own_next_tokens(
    model: HFModel,
) -> None:
    found = read_contexts(model, 2, 300)
    assert [context.dataset for context in found] == ["held-out"] * 2 + ["demo"] * 2
    assert all((len(context.token_ids), len(context.follow)) == (300, FOLLOW) for context in found)
    first = "\n\n".join(paragraph["context"].strip() for paragraph in held_out()[0]["paragraphs"])
    said = model.text((*found[0].token_ids, *found[0].follow))
    assert first.startswith(said)


def test_every_question_stands_behind_the_passage_that_answers_it(model: HFModel) -> None:
    readings = read_questions(model)
    articles = held_out()
    asked = [
        qa["id"]
        for a in articles
        for p in a["paragraphs"]
        for qa in p["qas"]
        if not qa.get("is_impossible")
    ]
    assert [question.id for reading in readings for question in reading.questions] == asked
    assert len(asked) >= 300
    first = articles[0]["paragraphs"][:PASSAGES]
    text = model.text(readings[0].token_ids)
    assert all(paragraph["context"].strip() in text for paragraph in first)
    question = readings[0].questions[0]
    assert first[0]["qas"][0]["question"].strip() in model.text(question.token_ids)
    assert question.answers[0] in text
