"""One pass over a context with several questions is exactly the separate prompts; held-out articles
are never seen.
"""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from ragfuse.adapt.examples import Template
from ragfuse.hf.branches import BranchModel
from ragfuse.models.loader import load_model
from training.data import HELD_OUT, AnsweredExample, Examples, Source, split, squad, wikipedia
from training.rules import Passage, Question
from training.train import Coder, branches_of, loss_of

QUESTIONS = (
    Question("Who?", "Ann"),
    Question("Where to, and why?", "home, to sleep"),
    Question("When?", "at 9"),
)
TEMPLATE = Template("Be brief.", "Read:\n{context}\n\nQ: {question}\nA:")


@pytest.fixture(scope="module")
def coder(tiny_path: Path) -> Coder:
    return Coder(AutoTokenizer.from_pretrained(tiny_path))


def test_the_loss_of_questions_asked_together_is_that_of_separate_prompts(
    tiny_path: Path, coder: Coder
) -> None:
    passages = ("Ann went home. " * 12, "It was 9. " * 9)
    model = load_model(tiny_path, "float32", pack=False)
    branches = branches_of(coder, AnsweredExample(TEMPLATE, passages, QUESTIONS), 4000)
    found = loss_of(BranchModel(model.model, model.profile, ()), *branches)
    context, after = coder.context(TEMPLATE, passages)
    losses, weights = [], []
    for question in QUESTIONS:
        asked, said = coder.question(after, question.question), coder.answer(question)
        logits = model.model(torch.tensor([context + asked + said[:-1]])).logits[
            0, len(context) + len(asked) - 1 :
        ]
        losses.append(
            torch.nn.functional.cross_entropy(logits, torch.tensor(said), reduction="none")
        )
        weights.append(torch.full((len(said),), len(said) ** -0.5))
    wanted = (torch.cat(losses) * torch.cat(weights)).sum() / torch.cat(weights).sum()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_prompt_is_pieces_tokenised_apart(coder: Coder) -> None:
    context, after = coder.context(TEMPLATE, ("one", "two"))
    text = coder.tokenizer.decode(context + coder.question(after, "Who?"))
    assert text.endswith("Read:\none\n\ntwo\n\nQ: Who?\nA:\n<|assistant|>")
    assert "Be brief." in text


def article(title: str, count: int) -> dict[str, Any]:
    qas = [
        {"question": f"{title} {i}?", "answers": [{"text": "x"}], "id": f"{title}{i}"}
        for i in range(count)
    ]
    lost = {"question": "no?", "answers": [], "is_impossible": True, "id": f"{title}-"}
    return {"title": title, "paragraphs": [{"context": f"{title} is x.", "qas": [*qas, lost]}]}


def test_the_articles_with_the_fewest_questions_are_held_out(tmp_path: Path) -> None:
    path = tmp_path / "squad.json.gz"
    path.write_bytes(
        gzip.compress(
            json.dumps(
                {"data": [article(t, n) for t, n in zip("abcdef", (5, 1, 4, 2, 6, 3), strict=True)]}
            ).encode()
        )
    )
    train, held = split(squad(path))
    assert set(held) == {"b", "d", "f"}
    assert len(held) == HELD_OUT
    assert set(train) == {"a", "c", "e"}
    assert [len(source.questions) for source in train["c"]] == [4]


def test_examples_ask_of_what_they_hold_and_never_of_what_is_held_out(tmp_path: Path) -> None:
    path = tmp_path / "wiki.jsonl"
    rows = [
        {"title": f"Ann {c}", "text": f"Ann {c} (1 June 19{i:02} – 2 May 1980) was a writer."}
        for i, c in enumerate("bcdefghijkl")
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    train = {
        title: [
            Source(
                Passage(title, f"{title}{i} did it. " * 9),
                (Question(f"Who {title}{i}?", f"{title}{i}"),),
            )
            for i in range(9)
        ]
        for title in "pqr"
    }
    examples = Examples(train, wikipedia(path), seed=1)
    sizes, seen = set(), set()
    for _ in range(300):
        example = examples.draw(6)
        assert 0 < len(example.questions) <= 6
        whole = "\n".join(example.passages)
        assert all(question.answer in whole for question in example.questions)
        sizes.add(len(example.passages))
        seen |= {question.question for question in example.questions}
    assert {1, 2, 4, 6, 8} <= sizes
    assert {f"Who {title}{i}?" for title in "pqr" for i in range(9)} <= seen
