"""`FOLDER URL OPTIONS`: vLLM with the connector, run by the Python that has vLLM; speaks JSON by
lines.

A line asks `{"requests": [{"ids", "params", "salt", "abort_at"}], "max_tokens"}`, its answer has
the tokens of each.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from benchmarks.peers.workers.wire import private_stdout


def main() -> None:
    out = private_stdout()
    folder, url, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    import vllm

    extra = {
        "transfer_url": url,
        "load": options.pop("load", "async"),
        "model": options.pop("name", None),
    }
    transfer = {
        "kv_connector": "RagfuseConnector",
        "kv_connector_module_path": "vllm_ragfuse",
        "kv_role": "kv_consumer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            name: value for name, value in extra.items() if value is not None
        },
    }
    llm = vllm.LLM(
        folder,
        dtype="float32",
        enforce_eager=True,
        seed=0,
        skip_tokenizer_init=True,
        disable_log_stats=False,
        kv_transfer_config=transfer,
        **options,
    )
    print(json.dumps({"ready": vllm.__version__}), file=out, flush=True)
    for number, line in enumerate(sys.stdin):
        print(json.dumps(answers(vllm, llm, json.loads(line), number)), file=out, flush=True)


def answers(vllm: Any, llm: Any, asked: dict[str, Any], number: int) -> dict[str, Any]:
    """The tokens of all requests, asked at once, and vLLM's counters behind them."""
    engine, found, aborted = llm.llm_engine, {}, {}
    for at, request in enumerate(asked["requests"]):
        params, n = request.get("params"), asked["max_tokens"]
        sampling = vllm.SamplingParams(
            temperature=0.0,
            max_tokens=n,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": params} if params is not None else None,
        )
        prompt = {"prompt_token_ids": request["ids"]}
        if request.get("salt"):
            prompt["cache_salt"] = request["salt"]
        name = f"{number}-{at}"
        engine.add_request(name, prompt, sampling)
        if request.get("abort_at") is not None:
            aborted[name] = request["abort_at"]
    steps = 0
    while engine.has_unfinished_requests():
        doomed = [name for name, step in aborted.items() if step <= steps]
        if doomed:
            engine.abort_request(doomed)
            aborted = {name: step for name, step in aborted.items() if name not in doomed}
        for output in engine.step():
            if output.finished:
                told = {
                    "tokens": list(output.outputs[0].token_ids),
                    "cached": output.num_cached_tokens,
                }
                found[int(output.request_id.split("-")[1])] = {
                    **told,
                    "params": output.kv_transfer_params,
                }
        steps += 1
    counters = {
        each.name: each.value
        for each in llm.get_metrics()
        if isinstance(getattr(each, "value", None), int | float)
    }
    return {
        "answers": [found.get(at) for at in range(len(asked["requests"]))],
        "counters": counters,
    }


if __name__ == "__main__":
    main()
