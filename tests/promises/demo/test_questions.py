"""The demo's data: every known answer stands in the article that it is said to come from."""

import json
from importlib.resources import files
from pathlib import Path

import pytest

from ragfuse.calibration.case import is_right
from ragfuse.demo import corpus_path, questions

SAID = questions()
ASKED = [*SAID["questions"], SAID["long"]]


@pytest.mark.parametrize("item", ASKED, ids=lambda item: item["id"])
def test_known_answers_stand_in_their_article_and_not_in_the_question(item):
    article = (corpus_path() / f"{item['article']}.md").read_text(encoding="utf-8")
    assert item["answers"]
    assert item["answers"][0] in article
    assert not is_right(item["question"], item["answers"])


def test_questions_are_twelve_on_the_articles_that_the_reader_was_not_trained_on():
    asked = SAID["questions"]
    articles = json.loads(
        (Path(str(files("ragfuse_bench"))) / "sets" / "squad_held_out.json").read_text()
    )["data"]
    held_out = {article["title"].lower().replace(" ", "-") for article in articles}
    assert len({item["question"] for item in asked}) == len(asked) == 12
    assert {item["article"] for item in asked} == held_out
    assert SAID["long"]["article"] in held_out
    assert SAID["long"] not in asked


def test_every_article_names_its_origin_and_licence():
    articles = sorted(corpus_path().glob("*.md"))
    assert len(articles) == 12
    for article in articles:
        heading, *_, note = article.read_text(encoding="utf-8").splitlines()
        assert heading.startswith("# ")
        assert all(word in note for word in ("Wikipedia", "SQuAD 2.0", "CC BY-SA 4.0", "Changes:"))
