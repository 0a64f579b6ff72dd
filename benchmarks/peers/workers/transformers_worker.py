"""`FOLDER [prefix]`: transformers' own `generate`, with or without the cache of the prompt
before.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from threading import Thread
from typing import Any

from benchmarks.peers.workers.wire import private_stdout, serve


class Transformers:
    """A model as `from_pretrained` gives it.

    Args:
        folder: The model's folder.
        keeps: Whether the cache of the prompt before is cropped to what both begin with and handed
            over.
    """

    def __init__(self, folder: str, keeps: bool) -> None:
        import torch
        import transformers

        self.version = f"transformers {transformers.__version__}"
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16
        ).eval()
        self.keeps = keeps
        self._ids: list[int] = []
        self._cache: Any = None

    def hold(self, chunks: Sequence[str]) -> dict[str, Any]:
        """Nothing can be made ready."""
        return {}

    def answer(self, ids: Sequence[int], max_tokens: int) -> Iterator[int]:
        """Yield the tokens that `generate` streams."""
        cache = self._reused(ids) if self.keeps else self._empty()
        told: SimpleQueue[int | BaseException | None] = SimpleQueue()
        thread = Thread(target=self._generate, args=(ids, max_tokens, cache, told), daemon=True)
        thread.start()
        self._ids, self._cache = list(ids), cache if self.keeps else None
        while (token := told.get()) is not None:
            if isinstance(token, BaseException):
                raise token
            self._ids.append(token)
            yield token
        thread.join()

    def rest(self) -> dict[str, Any]:
        """Nothing is left to do."""
        return {}

    def _generate(
        self,
        ids: Sequence[int],
        max_tokens: int,
        cache: Any,
        told: SimpleQueue[int | BaseException | None],
    ) -> None:
        import torch

        given = torch.tensor([list(ids)])
        try:
            with torch.no_grad():
                self.model.generate(
                    given,
                    attention_mask=torch.ones_like(given),
                    past_key_values=cache,
                    max_new_tokens=max_tokens,
                    do_sample=False,
                    pad_token_id=0,
                    streamer=_Streamer(told),
                )
        except BaseException as error:
            told.put(error)
        told.put(None)

    def _reused(self, ids: Sequence[int]) -> Any:
        held = self._cache.get_seq_length() if self._cache is not None else 0
        known = self._ids[:held]
        same = next(
            (i for i, (a, b) in enumerate(zip(ids, known, strict=False)) if a != b),
            min(len(ids), held),
        )
        same = min(same, len(ids) - 1)
        if not same:
            return self._empty()
        if same < held:
            self._cache.crop(same - held)
        return self._cache

    @staticmethod
    def _empty() -> Any:
        from transformers import DynamicCache

        return DynamicCache()


class _Streamer:
    """What `generate` hands its tokens to; the prompt comes first."""

    def __init__(self, told: SimpleQueue[int | BaseException | None]) -> None:
        self.told, self._is_prompt = told, True

    def put(self, value: Any) -> None:
        """Take the prompt, then each token."""
        if not self._is_prompt:
            self.told.put(int(value.reshape(-1)[-1]))
        self._is_prompt = False

    def end(self) -> None:
        """Nothing."""


if __name__ == "__main__":
    out = private_stdout()
    serve(Transformers(sys.argv[1], "prefix" in sys.argv[2:]), out)
