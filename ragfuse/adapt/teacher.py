"""The teacher of a training: the plain model, whose answers by full prefill are the targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ragfuse.adapt.examples import Example, Template
from ragfuse.engine.engine import Engine
from ragfuse.engine.request import ends_of
from ragfuse.errors import InputError
from ragfuse.hf.branches import Branch, BranchModel, BranchStates, ContextTokens
from ragfuse.text.chat_messages import Piece
from ragfuse.types.prompt import Prompt

ANSWER_TOKENS = 16
"""Maximum tokens of a target answer."""
MAX_CONTEXT_TOKENS = 2048
"""Maximum tokens of a prompt and its answer; passages that do not fit are left out."""


@dataclass(frozen=True)
class Lesson:
    """The training data of an example: the context, the questions with the teacher's answers
    (`branches`), and the teacher's logits, hidden states and KV.
    """

    context: ContextTokens
    branches: tuple[Branch, ...]
    states: BranchStates


def prompt_of(engine: Engine, template: Template, passages: Sequence[str], question: str) -> Prompt:
    """Return the prompt that the engine would build to answer one question."""

    def pieces(text: str) -> list[Piece]:
        before, mark, after = text.replace("{question}", question).partition("{context}")
        if not mark:
            return [Piece(before)] if before else []
        chunks = [
            part for text in passages for part in (Piece(template.between), Piece(text, "chunk"))
        ]
        return [piece for piece in (Piece(before), *chunks[1:], Piece(after)) if piece.text]

    turns = [("system", pieces(template.system))] if template.system else []
    return engine.prompt([*turns, ("user", pieces(template.user))])


def context_of(prompt: Prompt) -> ContextTokens:
    """Return a prompt's tokens up to the end of its last chunk.

    Raises:
        InputError: The prompt has no chunk.
    """
    spans = zip(prompt.segments, prompt.spans, strict=True)
    chunks = tuple(span for segment, span in spans if segment.kind == "chunk")
    if not chunks:
        raise InputError(
            "Every chunk of the prompt is shorter than the setting min_chunk_tokens, so no chunk is"
            " stored. Use longer chunks, or lower min_chunk_tokens."
        )
    return ContextTokens(prompt.token_ids[: chunks[-1][1]], chunks)


class Teacher:
    """Converts examples to lessons. Prompts are built by an engine, answers come from the model."""

    def __init__(self, engine: Engine, model: BranchModel) -> None:
        self._engine = engine
        self._model = model
        # answers by the name of an example, so that no answer is generated twice
        self._known: dict[str, list[tuple[int, ...]]] = {}

    def lesson(self, name: str, example: Example, layers: Sequence[int] = ()) -> Lesson:
        """Return the training data of an example, with the teacher's hidden states at `layers`. The
        teacher's answers are cached under `name`.
        """
        context, questions = self._tokens(example)
        branches, states = self._model.taught(
            context,
            questions,
            ANSWER_TOKENS,
            ends_of(self._engine.model),
            layers,
            self._known.get(name),
        )
        self._known[name] = [branch.answer for branch in branches]
        return Lesson(context, tuple(branches), states)

    def _tokens(self, example: Example) -> tuple[ContextTokens, list[tuple[int, ...]]]:
        """Return the token ids of an example's context, and the ids that follow in each question's
        prompt. A question is left out if its prompt does not begin with the ids of the context.
        """
        most = min(self._engine.model.max_context or MAX_CONTEXT_TOKENS, MAX_CONTEXT_TOKENS)
        passages = example.passages
        while True:
            prompts = [
                prompt_of(self._engine, example.template, passages, question)
                for question in example.questions
            ]
            if len(passages) == 1 or max(map(len, prompts)) + ANSWER_TOKENS <= most:
                break
            passages = passages[:-1]
        context = context_of(prompts[0])
        count = len(context.token_ids)
        same = [prompt for prompt in prompts if prompt.token_ids[:count] == context.token_ids]
        return context, [prompt.token_ids[count:] for prompt in same]
