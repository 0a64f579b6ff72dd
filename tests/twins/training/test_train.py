"""One pass over a context with several questions is exactly the separate prompts."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from ragfuse.adapt.examples import Template
from ragfuse.hf.branches import BranchModel
from ragfuse.models.loader import load_model
from training.data import AnsweredExample, Examples, Source, wikipedia
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
    seen = set()
    for _ in range(300):
        example = examples.draw(6)
        assert 0 < len(example.questions) <= 6
        whole = "\n".join(example.passages)
        assert all(question.answer in whole for question in example.questions)
        seen |= {question.question for question in example.questions}
    assert {f"Who {title}{i}?" for title in "pqr" for i in range(9)} <= seen
