"""`FOLDER DTYPE TOKENS STEPS ROUNDS`: vLLM's seconds of CPU time a token, run by the Python that
has vLLM.

Prints one line of JSON: by the tokens of the context, the seconds of each round.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def main(
    folder: str, dtype: str, contexts: list[int], steps: int, rounds: int
) -> dict[int, list[float]]:
    """Return the seconds a token of each round, by the tokens of the context."""
    import vllm  # type: ignore[import-not-found, unused-ignore]

    llm = vllm.LLM(
        folder, dtype=dtype, enable_prefix_caching=True, max_model_len=max(contexts) + steps + 8
    )

    def seconds(ids: list[int], count: int) -> float:
        wanted = vllm.SamplingParams(
            temperature=0.0, max_tokens=count, min_tokens=count, ignore_eos=True
        )
        began = time.process_time()
        llm.generate({"prompt_token_ids": ids}, wanted, use_tqdm=False)
        return time.process_time() - began

    found: dict[int, list[float]] = {}
    for context in contexts:
        ids = [100 + (7 * at) % 9973 for at in range(context)]
        seconds(ids, 4)  # the prompt's KV is kept from here on
        found[context] = [
            (seconds(ids, 4 + steps) - seconds(ids, 4)) / steps for _ in range(rounds)
        ]
    return found


if __name__ == "__main__":
    given: list[Any] = sys.argv[1:]
    sys.stdout, line = sys.stderr, sys.stdout
    contexts = [int(number) for number in given[2].split(",")]
    print(json.dumps(main(given[0], given[1], contexts, int(given[3]), int(given[4]))), file=line)
