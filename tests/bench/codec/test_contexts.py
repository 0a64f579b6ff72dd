"""Contexts come from the named files or from what comes along; questions stand behind the passages that answer them."""

import gzip
import json
from pathlib import Path

import pytest
from ragfuse_bench.codec.contexts import FOLLOW, PASSAGES, absent, held_out, read_contexts, read_questions
from ragfuse_bench.presets import bench_model

from ragfuse.errors import InputError
from ragfuse.hf.model import HFModel


@pytest.fixture(scope="module")
def model(varied_path: Path) -> HFModel:
    return bench_model(str(varied_path), "float32", "cpu", varied_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The three data sets, small, in folders below."""
    below = tmp_path / "data" / "deep"
    below.mkdir(parents=True)
    cases = [{"question": f"Who is {i}?", "answers": [f"n{i}"], "ctxs": [{"text": f"{i}" * 90}]} for i in range(6)]
    (below / "musique_200.jsonl").write_text("\n".join(map(json.dumps, cases)))
    with gzip.open(below / "cachegen_longchat.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"test_id": i, "prompt": f"USER {i}: " + "talk\n" * 90}) + "\n" for i in range(3))
    with gzip.open(below / "squad2_dev.json.gz", "wt") as file:
        file.write(json.dumps({"data": [{"title": "T", "paragraphs": [{"context": "fact " * 60, "qas": []}] * 4}]}))
    return tmp_path / "data"


def test_every_set_of_a_folder_gives_contexts_of_one_length(model: HFModel, folder: Path) -> None:
    found = read_contexts(model, folder, 2, 200)
    assert [context.dataset for context in found] == ["musique"] * 2 + ["squad"] * 2 + ["longchat"] * 2
    assert all(len(context.token_ids) == 200 and 0 < len(context.follow) <= FOLLOW for context in found)
    assert len({context.token_ids for context in found}) == 6
    assert absent(folder) == []


def test_what_follows_a_text_is_its_own_next_tokens_and_after_passages_a_question(model: HFModel, folder: Path) -> None:
    musique, chat = (
        next(c for c in read_contexts(model, folder, 1, 200) if c.dataset == name) for name in ("musique", "longchat")
    )
    assert model.text(musique.follow) == "\n\nQuestion: Who is 0?\nAnswer: n0"
    whole = "USER 0: " + "talk\n" * 90
    said = model.text((*chat.token_ids, *chat.follow))
    assert len(said) > 200
    assert whole.startswith(said)


def test_without_a_folder_the_texts_that_come_along_are_taken(model: HFModel) -> None:
    found = read_contexts(model, None, 2, 300)
    assert [context.dataset for context in found] == ["held-out"] * 2 + ["demo"] * 2
    assert absent(None) == ["musique", "squad", "longchat"]


def test_a_folder_without_any_set_is_named_with_what_was_wanted(model: HFModel, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"musique_200\.jsonl"):
        read_contexts(model, tmp_path, 1, 200)


def test_every_question_stands_behind_the_passage_that_answers_it(model: HFModel) -> None:
    readings = read_questions(model)
    articles = json.loads(held_out().read_text())["data"]
    asked = [qa["id"] for a in articles for p in a["paragraphs"] for qa in p["qas"] if not qa.get("is_impossible")]
    assert [question.id for reading in readings for question in reading.questions] == asked
    assert len(asked) >= 300
    first = articles[0]["paragraphs"][:PASSAGES]
    text = model.text(readings[0].token_ids)
    assert all(paragraph["context"].strip() in text for paragraph in first)
    question = readings[0].questions[0]
    assert first[0]["qas"][0]["question"].strip() in model.text(question.token_ids)
    assert question.answers[0] in text


def test_fewer_questions_are_the_first_ones(model: HFModel) -> None:
    few = [question for reading in read_questions(model, 30) for question in reading.questions]
    every = [question for reading in read_questions(model) for question in reading.questions]
    assert few == every[:30]
