"""Text as it is written: streamers and stopping for `generate`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from threading import Event
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, StoppingCriteria
from transformers.generation.streamers import TextStreamer


class TextSink(TextStreamer):
    """Hands pieces of text to `say` as soon as they are whole words, and none that may yet become a stop string.

    first_s: `time.perf_counter()` at the first new token, None before it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, say: Callable[[str], None], stops: Sequence[str]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.first_s: float | None = None
        self._say, self._stops, self._held, self._over = say, tuple(stops), "", False

    def put(self, value: Tensor) -> None:
        """One step's token ids; the prompt comes first and is skipped."""
        if not self.next_tokens_are_prompt and self.first_s is None:
            self.first_s = time.perf_counter()
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Text that will not change any more."""
        if self._over:
            return
        self._held += text
        whole = cut_at_stop(self._held, self._stops)
        self._over = len(whole) < len(self._held)
        kept = 0 if stream_end or self._over else longest_start(whole, self._stops)
        ready, self._held = whole[: len(whole) - kept], whole[len(whole) - kept :]
        if ready:
            self._say(ready)


class FirstToken:
    """A streamer that only notes when the first new token came: `first_s`, as `time.perf_counter()`."""

    def __init__(self) -> None:
        self.first_s: float | None = None
        self._prompt = True

    def put(self, value: Tensor) -> None:
        """The prompt, then one step's token ids after the other."""
        if not self._prompt and self.first_s is None:
            self.first_s = time.perf_counter()
        self._prompt = False

    def end(self) -> None:
        """Nothing to finish."""


class StopWhen(StoppingCriteria):
    """Ends generation when an event is set: the caller went away."""

    def __init__(self, event: Event) -> None:
        self.event = event

    def __call__(self, input_ids: Tensor, scores: Any, **options: Any) -> Tensor:
        """bool [B]."""
        return torch.full((input_ids.shape[0],), self.event.is_set(), device=input_ids.device)


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """Text before the first stop string."""
    found = [at for at in (text.find(stop) for stop in stops if stop) if at >= 0]
    return text[: min(found)] if found else text


def longest_start(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of `text` that could be the beginning of a stop string."""
    starts = (stop[:size] for stop in stops for size in range(1, len(stop)))
    return max((len(start) for start in starts if text.endswith(start)), default=0)
