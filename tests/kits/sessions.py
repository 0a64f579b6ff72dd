"""What the tests of conversations share: said lines, a dialogue with an engine, full prefill of the
same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ragfuse import Answer, Ask, Engine
from ragfuse.engine.build import build
from ragfuse.engine.request import Request
from ragfuse.types.kv import ChunkKV

QUESTIONS = (
    "Who kept the lighthouse of Port Elling, and what did he count in one night?",
    "What was its lamp burned with before petroleum came?",
    "And who wrote down the name of every ship that came in?",
    "When did the harbour freeze over?",
)


def talk(
    engine: Engine, questions: Sequence[str] = QUESTIONS, session: str = "one", **ask: Any
) -> list[Answer]:
    """Answers to questions of one session, one after the other."""
    return [
        engine.answer([("user", question)], Ask(session=session, **ask)) for question in questions
    ]


def resent(questions: Sequence[str], answers: Sequence[Answer]) -> list[tuple[str, str]]:
    """The messages as a framework sends them again: every question, every answer's text, the last
    question.
    """
    messages = []
    for number, question in enumerate(questions):
        messages.append(("user", question))
        if number < len(answers):
            messages.append(("assistant", answers[number].text))
    return messages


def scaled_error(one: ChunkKV, other: ChunkKV) -> float:
    """The largest difference of two prompts' KV, by the largest value of each tensor."""
    pairs = [
        (a, b)
        for mine, theirs in zip(one.layers, other.layers, strict=True)
        for a, b in ((mine.keys, theirs.keys), (mine.values, theirs.values))
    ]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def is_full_prefill(engine: Engine, ready: Any, bound: float = 1e-4) -> bool:
    """Whether a fused prompt's KV and logits are those of the model's own prefill of the same
    tokens.
    """
    full = engine.model.full_prefill(ready.plan.prompt.token_ids)
    logits = float((ready.prefill.logits - full.logits).abs().max() / full.logits.abs().max())
    return (
        scaled_error(ready.prefill.kv, full.kv) <= bound
        and logits <= bound
        and not torch.isnan(full.logits).any()
    )


def built(engine, question, ask):
    """The prompt of a question, with what is known of its conversation."""
    return build(Request.of(question, ask, engine.runtime), engine.history, engine.schemas)
