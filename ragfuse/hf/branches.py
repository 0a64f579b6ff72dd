"""Forwards of several questions over one context, with gradients: fully causal, or blockwise.

Each question is a branch: its tokens attend to the context and to each other, at the positions
directly after the context. So one forward gives the results of several prompts. Blockwise, each
chunk of the context is encoded separately after filler tokens whose KV is cut off, its keys are
rotated to its position, and nothing is recomputed. The engine computes the same at ratio 0; here
the model's own forward computes it, with a mask.
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
"""The branch number of the context's tokens, to which all branches attend."""


@dataclass(frozen=True)
class ContextTokens:
    """The tokens of a context that several questions share.

    Args:
        token_ids: The C tokens, from the beginning of the prompt to the end of its last chunk.
        chunks: Tokens lo:hi of each chunk, in order.
    """

    token_ids: tuple[int, ...]
    chunks: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Branch:
    """One question after a context, and its answer.

    Args:
        question: Token ids after the last chunk.
        answer: Token ids of the answer, at least one; the last one is predicted but never read.
    """

    question: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens that are read: question and answer, except the answer's last token."""
        return self.question + self.answer[:-1]


@dataclass(frozen=True)
class BranchStates:
    """Outputs of a model for the branches of a context.

    Args:
        logits: [A, V], which predict all answer tokens, branch by branch.
        hidden: [L, R, D], the hidden states of all R tokens of the branches after L of the layers;
            empty if not requested.
        chunks: For each layer, keys and values [H, C, D] of the C tokens of all chunks, keys
            rotated to their positions in the prompt; empty if not requested.
    """

    logits: Tensor
    hidden: Tensor
    chunks: tuple[tuple[Tensor, Tensor], ...] = ()


@dataclass
class _Past:
    """A model's cache, with the branch and the position (int64 [N]) of each of its N tokens."""

    cache: DynamicCache
    branch: Tensor
    position: Tensor


class BranchModel:
    """A causal LM that runs a context and its branches.

    Args:
        model: The model. Gradients are computed if enabled.
        profile: Its profile, for the key rotation.
        filler: The tokens that precede each chunk during encoding.
        chunk_adapter: An adapter on the model, which is on only while chunks are encoded.

    Raises:
        RefusedError: The model's attention cannot take a mask over separately encoded chunks.
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
        """Return the states of the branches under full causal attention."""
        with self._plain():
            return self._ended(self._causal(context), (), branches, ())

    def blockwise(
        self,
        context: ContextTokens,
        branches: Sequence[Branch],
        layers: Collection[int] = (),
    ) -> BranchStates:
        """Return the branches' states over separately encoded chunks, with nothing recomputed.

        Args:
            context: The context.
            branches: The branches.
            layers: Indices of the requested hidden states; with any, the chunks' KV is also
                returned.
        """
        inside = {row for lo, hi in context.chunks for row in range(lo, hi)}
        rest = tuple(row for row in range(len(context.token_ids)) if row not in inside)
        past = self._chunks(context)
        chunks = _kv_of(past, slice(None)) if layers else ()
        with self._plain():
            states = self._ended(
                past, tuple((context.token_ids[row], row) for row in rest), branches, layers
            )
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
        """Return greedy answers under full causal attention, and their states; one context prefill.

        Args:
            context: The context.
            questions: Token ids after the context.
            max_tokens: Maximum tokens of an answer.
            ends: End tokens; an answer includes its end token.
            layers: Indices of the requested hidden states; with any, the chunks' KV is also
                returned.
            answers: The answers, if already known.
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
        """Generate all answers in parallel; the past is restored afterwards."""
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
        """Return the KV of all chunks, each encoded after the filler and rotated into position."""
        cut, before, placed = len(self.filler), tuple[LayerKV, ...](), DynamicCache()
        if cut:
            # the filler's KV is cut off, so it needs no gradients
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
        """Return the states of branches after `past` and further tokens `rest`, (id, position)."""
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
        """Run the tokens `rows`, (id, position, branch), after `past`, and add them to it. Return
        the logits of those at `asked`, and hidden states without the first `skipped` tokens.
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
    """Raise RefusedError if a mask cannot express attention over separately encoded chunks."""
    found, windows = profile.refusal, [window for window in profile.windows if window is not None]
    if windows:
        found = f"a sliding window of {min(windows)} tokens"
    elif any(layout is not None and layout.part != "keys" for layout in profile.rope):
        found = "latent attention (MLA)"
    elif probe.is_alibi(model.config) or not probe.takes_positions(model):
        found = "biases in place of positions (ALiBi)"
    if found:
        raise RefusedError(
            "Wanted a model whose layers attend to all earlier tokens with rotated keys (RoPE),"
            f" found: {found.rstrip('.')}. Use another, such as a Llama or Qwen."
        )
