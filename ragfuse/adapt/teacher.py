"""The teacher: what the model itself answers by full prefill.

Answers are kept in a file by the number of their example, so that an interrupted training writes none of them twice.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ragfuse.adapt.examples import Example, Template
from ragfuse.engine.engine import Engine
from ragfuse.engine.options import ends_of
from ragfuse.errors import InputError
from ragfuse.hf.branches import Branch, BranchModel, BranchStates, ContextTokens
from ragfuse.text.chat_messages import Piece
from ragfuse.types.prompt import Prompt

ANSWER_TOKENS = 16
"""Most tokens of an answer that is taught."""
MAX_CONTEXT_TOKENS = 2048
"""Most tokens of a context; passages that do not fit are left out."""

log = logging.getLogger("ragfuse.adapt")


@dataclass(frozen=True)
class Lesson:
    """A context with questions, the teacher's answers to them, and what the teacher computed along these."""

    context: ContextTokens
    branches: tuple[Branch, ...]
    states: BranchStates


def prompt_of(engine: Engine, template: Template, passages: Sequence[str], question: str) -> Prompt:
    """Return the prompt of one question, token by token as the engine reads it."""

    def pieces(text: str) -> list[Piece]:
        before, mark, after = text.replace("{question}", question).partition("{context}")
        if not mark:
            return [Piece(before)] if before else []
        chunks = [part for text in passages for part in (Piece(template.between), Piece(text, "chunk"))]
        return [piece for piece in (Piece(before), *chunks[1:], Piece(after)) if piece.text]

    turns = [("system", pieces(template.system))] if template.system else []
    return engine.prompt([*turns, ("user", pieces(template.user))])


def context_of(prompt: Prompt) -> ContextTokens:
    """Return the context of a prompt: its tokens up to the end of the last chunk.

    Raises:
        InputError: It has no chunk.
    """
    spans = zip(prompt.segments, prompt.spans, strict=True)
    chunks = tuple(span for segment, span in spans if segment.kind == "chunk")
    if not chunks:
        raise InputError(
            "Every chunk of the prompt has fewer tokens than the setting min_chunk_tokens, so that none is stored. Use "
            "longer chunks, or lower the setting."
        )
    return ContextTokens(prompt.token_ids[: chunks[-1][1]], chunks)


class Teacher:
    """Turns examples into lessons.

    Args:
        engine: An engine over the model; it makes the prompts.
        model: The model's forwards over contexts.
        layers: Numbers of the hidden states that lessons hold.
        answers: File of the answers; None: they are not kept.
    """

    def __init__(self, engine: Engine, model: BranchModel, layers: Sequence[int], answers: Path | None) -> None:
        self._engine, self._model = engine, model
        self._layers, self._file, self._ends = tuple(layers), answers, ends_of(engine.model)
        self._known: dict[str, list[tuple[int, ...]]] = {}
        if answers is not None and answers.is_file():
            for line in answers.read_text(encoding="utf-8").splitlines():
                try:
                    said = json.loads(line)
                    self._known[str(said["example"])] = [tuple(map(int, ids)) for ids in said["answers"]]
                except (ValueError, KeyError, TypeError):
                    log.debug("An answer that was being written when a process ended is written again.")

    def lesson(self, name: str, example: Example) -> Lesson:
        """Return the lesson of an example, whose answers are kept under its name."""
        context, questions = self._tokens(example)
        answers = self._known.get(name)
        branches, states = self._model.taught(
            context, questions, ANSWER_TOKENS, self._ends, self._layers, answers, kv=True
        )
        if answers is None and self._file is not None:
            line = json.dumps({"example": name, "answers": [branch.answer for branch in branches]})
            with self._file.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")
        return Lesson(context, tuple(branches), states)

    def _tokens(self, example: Example) -> tuple[ContextTokens, list[tuple[int, ...]]]:
        """Return the tokens of an example: its context, and what stands behind it for each question."""
        most = min(self._engine.model.max_context or MAX_CONTEXT_TOKENS, MAX_CONTEXT_TOKENS)
        while True:
            prompts = [
                prompt_of(self._engine, example.template, example.passages, each.question) for each in example.questions
            ]
            context = context_of(prompts[0])
            if len(example.passages) == 1 or max(map(len, prompts)) + ANSWER_TOKENS <= most:
                break
            example = replace(example, passages=example.passages[:-1])
        count = len(context.token_ids)
        same = [prompt for prompt in prompts if prompt.token_ids[:count] == context.token_ids]
        return context, [prompt.token_ids[count:] for prompt in same]
