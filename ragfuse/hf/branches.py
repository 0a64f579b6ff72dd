"""Run several questions over one context in one forward pass, with gradients.

A question and the answer to it form a branch. The tokens of a branch have the positions
directly after the context, and attend to the context and to each other. So one forward pass gives
the results of several prompts.

The context is encoded fully causally or blockwise. Blockwise encoding gives the KV that the engine
reuses at ratio 0: each chunk is encoded separately after filler tokens, the filler's KV is cut off,
and the chunk's keys are rotated to the chunk's position. Both encodings use the model's own
forward, and branches attend through a mask.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ragfuse.errors import RefusedError
from ragfuse.fuse.rope import angles, rotated
from ragfuse.hf import probe
from ragfuse.hf.cache import CACHE
from ragfuse.hf.chunk_adapter import LoraAdapter
from ragfuse.types.kv import LayerKV
from ragfuse.types.profiles import ModelProfile

CONTEXT_ROW = -1
"""The branch number of context tokens. All branches attend to context tokens."""


@dataclass(frozen=True)
class ContextTokens:
    """The tokens of a context that several questions share.

    Args:
        token_ids: The C tokens, from the beginning of the prompt to the end of its last chunk.
        chunks: The range lo:hi of each chunk in `token_ids`, in order.
    """

    token_ids: tuple[int, ...]
    chunks: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Branch:
    """A question after a context, and the answer to the question.

    Args:
        question: Token ids of the question, which follows the last chunk.
        answer: Token ids of the answer, at least one. The last id is predicted but is not an input.
    """

    question: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        """The input tokens: the question, and the answer without its last token."""
        return self.question + self.answer[:-1]


@dataclass(frozen=True)
class BranchStates:
    """Outputs of a model for the branches of a context.

    Args:
        logits: [A, V], the logits that predict all A answer tokens, branch by branch.
        hidden: [L, R, D], the L requested hidden states of the branches' R input tokens. Empty if
            no hidden states were requested.
        chunks: Each layer's keys and values [H, C, D] of the C tokens of all chunks. The keys are
            rotated to the tokens' positions in the prompt. Empty if not requested.
    """

    logits: Tensor
    hidden: Tensor
    chunks: tuple[tuple[Tensor, Tensor], ...] = ()


@dataclass
class _Past:
    """A model's cache of N tokens, with the branch and the position (int64 [N]) of each token."""

    cache: DynamicCache
    branch: Tensor
    position: Tensor


class BranchModel:
    """Runs a causal LM over a context and over the branches of the context.

    Args:
        model: The model. Gradients are computed if torch's gradients are enabled.
        profile: The model's profile, with the RoPE layout of each layer.
        filler: The tokens that precede each chunk during encoding.
        chunk_adapter: An adapter on the model that is active only while chunks are encoded.

    Raises:
        RefusedError: KV reuse is refused for the model, or the model uses a sliding window, latent
            attention (MLA) or ALiBi.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        profile: ModelProfile,
        filler: Sequence[int],
        chunk_adapter: LoraAdapter | None = None,
    ) -> None:
        refuse_unadaptable(model, profile)
        self.model, self.rope, self.device = model, profile.rope, probe.device_of(model)
        self.filler, self.chunk_adapter = tuple(filler), chunk_adapter

    def full(self, context: ContextTokens, branches: Sequence[Branch]) -> BranchStates:
        """Return the outputs of the branches under full causal attention."""
        with self._plain():
            return self._ended(self._causal(context), (), branches, ())

    def blockwise(
        self,
        context: ContextTokens,
        branches: Sequence[Branch],
        layers: Collection[int] = (),
    ) -> BranchStates:
        """Return the branches' outputs over separately encoded chunks; no row is recomputed.

        Args:
            context: The context.
            branches: The branches.
            layers: Indices of hidden states to return. If given, the chunks' KV is also returned.
        """
        inside = {row for lo, hi in context.chunks for row in range(lo, hi)}
        rest = [(token, row) for row, token in enumerate(context.token_ids) if row not in inside]
        past = self._chunks(context)
        chunks = _kv_of(past, slice(None)) if layers else ()
        with self._plain():
            states = self._ended(past, rest, branches, layers)
        return replace(states, chunks=chunks)

    @torch.no_grad()
    def taught(
        self,
        context: ContextTokens,
        questions: Sequence[Sequence[int]],
        max_tokens: int,
        ends: Collection[int],
        layers: Collection[int] = (),
        answers: Sequence[tuple[int, ...]] | None = None,
    ) -> tuple[list[Branch], BranchStates]:
        """Generate greedy answers under full causal attention; return branches and outputs.

        Args:
            context: The context, which is prefilled only once.
            questions: Token ids of each question after the context.
            max_tokens: Maximum number of tokens per answer.
            ends: Ids of end tokens. An answer includes the end token.
            layers: Indices of hidden states to return. If given, the chunks' KV is also returned.
            answers: The answers if they are known. None means that the answers are generated.
        """
        with self._plain():
            past = self._causal(context)
            rows = torch.tensor(
                [row for lo, hi in context.chunks for row in range(lo, hi)], device=self.device
            )
            chunks = _kv_of(past, rows) if layers else ()
            said = (
                answers if answers is not None else self._written(past, questions, max_tokens, ends)
            )
            branches = [
                Branch(tuple(ids), answer) for ids, answer in zip(questions, said, strict=True)
            ]
            return branches, replace(self._ended(past, (), branches, layers), chunks=chunks)

    def _plain(self) -> AbstractContextManager[None]:
        return self.chunk_adapter.off() if self.chunk_adapter is not None else nullcontext()

    def _written(
        self,
        past: _Past,
        questions: Sequence[Sequence[int]],
        max_tokens: int,
        ends: Collection[int],
    ) -> list[tuple[int, ...]]:
        """Generate the answers to all questions in parallel; `past` is restored afterwards."""
        begin, before = len(past.position), (past.branch, past.position)
        said: list[list[int]] = [[] for _ in questions]
        open_ = list(range(len(questions)))
        rows = [
            (token, begin + i, n) for n, ids in enumerate(questions) for i, token in enumerate(ids)
        ]
        last = torch.tensor([len(ids) for ids in questions]).cumsum(0) - 1
        for _ in range(max_tokens):
            found = self._forward(past, rows, last).logits.argmax(-1).tolist()
            for n, token in zip(open_, found, strict=True):
                said[n].append(token)
            open_ = [n for n in open_ if said[n][-1] not in ends]
            if not open_:
                break
            rows = [(said[n][-1], begin + len(questions[n]) + len(said[n]) - 1, n) for n in open_]
            last = torch.arange(len(rows))
        past.cache.crop(begin - len(past.position))
        past.branch, past.position = before
        return [tuple(ids) for ids in said]

    def _causal(self, context: ContextTokens) -> _Past:
        cache, count = DynamicCache(), len(context.token_ids)
        probe.forward(self.model, torch.tensor([context.token_ids], device=self.device), cache, 0)
        return _Past(cache, torch.full((count,), CONTEXT_ROW), torch.arange(count))

    def _chunks(self, context: ContextTokens) -> _Past:
        """Encode each chunk after the filler; return the KV of all chunks, rotated into place."""
        cut, before, placed = len(self.filler), tuple[LayerKV, ...](), DynamicCache()
        if cut:
            # no gradients for the filler, because its KV is cut off
            ids = torch.tensor([self.filler], device=self.device)
            before = probe.plain_kv(self.model, ids, -cut)
        for lo, hi in context.chunks:
            ids = torch.tensor([context.token_ids[lo:hi]], device=self.device)
            layers = probe.plain_kv(self.model, ids, 0, before, probe.forward)
            for number, (layer, layout) in enumerate(zip(layers, self.rope, strict=True)):
                keys, values = layer.keys[:, cut:], layer.values[:, cut:]
                if layout is not None:
                    keys = rotated(keys, angles(layout, lo, self.device), layout)
                placed.update(keys[None], values[None], number)
        rows = torch.tensor([row for lo, hi in context.chunks for row in range(lo, hi)])
        return _Past(placed, torch.full((len(rows),), CONTEXT_ROW), rows)

    def _ended(
        self,
        past: _Past,
        rest: Sequence[tuple[int, int]],
        branches: Sequence[Branch],
        layers: Collection[int],
    ) -> BranchStates:
        """Return the outputs of branches that follow `past` and then `rest` (id and position)."""
        begin = int(past.position.max()) + 1
        rows = [(token, position, CONTEXT_ROW) for token, position in rest]
        asked: list[int] = []
        for number, branch in enumerate(branches):
            first = len(rows) + len(branch.question) - 1
            asked += range(first, first + len(branch.answer))
            rows += [(token, begin + i, number) for i, token in enumerate(branch.tokens)]
        return self._forward(past, rows, torch.tensor(asked), len(rest), layers)

    def _forward(
        self,
        past: _Past,
        rows: Sequence[tuple[int, int, int]],
        asked: Tensor,
        skipped: int = 0,
        layers: Collection[int] = (),
    ) -> BranchStates:
        """Compute the tokens `rows` (id, position, branch) after `past`, and append the tokens to
        `past`. Return the logits of the rows in `asked`, and the hidden states of all rows but the
        first `skipped`.
        """
        ids, positions, numbers = (torch.tensor(each) for each in zip(*rows, strict=True))
        past.branch, past.position = (
            torch.cat((past.branch, numbers)),
            torch.cat((past.position, positions)),
        )
        known = (past.branch[None] == CONTEXT_ROW) | (past.branch[None] == numbers[:, None])
        seen, dtype = known & (past.position[None] <= positions[:, None]), self.model.dtype
        mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)
        asked = asked.to(self.device)
        options: dict[str, Any] = probe.at_positions(self.model, positions.to(self.device))
        keeps = self.model._supports_logits_to_keep()
        out: Any = self.model(
            input_ids=ids[None].to(self.device),
            attention_mask=mask[None, None].to(self.device),
            use_cache=True,
            **{CACHE: past.cache},
            output_hidden_states=bool(layers),
            **options,
            **({"logits_to_keep": asked} if keeps else {}),
        )
        logits = out.logits[0] if keeps else out.logits[0, asked]
        hidden = (
            torch.stack([out.hidden_states[n][0, skipped:] for n in layers])
            if layers
            else logits.new_empty(0)
        )
        return BranchStates(logits, hidden)


def _kv_of(past: _Past, rows: Tensor | slice) -> tuple[tuple[Tensor, Tensor], ...]:
    return tuple((layer.keys[0, :, rows], layer.values[0, :, rows]) for layer in past.cache.layers)


def refuse_unadaptable(model: PreTrainedModel, profile: ModelProfile) -> None:
    """Raise RefusedError if the model cannot attend to separately encoded chunks by a mask."""
    found, windows = profile.refusal, [window for window in profile.windows if window is not None]
    if windows:
        found = f"The model has a sliding window of {min(windows)} tokens"
    elif any(layout is not None and layout.part != "keys" for layout in profile.rope):
        found = "The model has latent attention (MLA)"
    elif probe.is_alibi(model.config) or not probe.takes_positions(model):
        found = "The model has position biases (ALiBi)"
    if found:
        raise RefusedError(
            "An adapter needs a model with rotary positions (RoPE) whose layers attend to all"
            f" earlier tokens. {found.rstrip('.')}. Use another model, such as a Llama or Qwen."
        )
