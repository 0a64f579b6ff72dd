"""`FOLDER MAX_TOKENS`: vLLM with prefix caching, its engine in this process, run by the Python that
has vLLM.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.peers.workers.wire import private_stdout, serve


class Vllm:
    """vLLM as its `LLM` sets it up.

    Args:
        folder: The model's folder.
        max_tokens: Most tokens of a prompt and its answer.
    """

    def __init__(self, folder: str, max_tokens: int) -> None:
        import vllm  # type: ignore[import-not-found, unused-ignore]

        self.version = f"vLLM {vllm.__version__}"
        self._sampling = vllm.SamplingParams
        llm = vllm.LLM(
            folder, dtype="bfloat16", enable_prefix_caching=True, max_model_len=max_tokens
        )
        self.engine = llm.llm_engine
        self._asked = 0

    def hold(self, chunks: Sequence[str]) -> dict[str, Any]:
        """Nothing can be made ready."""
        return {}

    def answer(self, ids: Sequence[int], max_tokens: int) -> Iterator[int]:
        """Yield the tokens of the engine's steps."""
        self._asked += 1
        wanted = self._sampling(temperature=0.0, max_tokens=max_tokens)
        self.engine.add_request(str(self._asked), {"prompt_token_ids": list(ids)}, wanted)
        told = 0
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                found = output.outputs[0].token_ids
                yield from found[told:]
                told = len(found)

    def rest(self) -> dict[str, Any]:
        """Nothing is left to do."""
        return {}


if __name__ == "__main__":
    out = private_stdout()
    serve(Vllm(sys.argv[1], int(sys.argv[2])), out)
