"""vLLM writes over handed-over KV what transformers writes over it; what it cannot load, it
computes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ragfuse.transfer import TransferHandle

CASES = ("full", "fused", "reused", "foreign")


def tokens(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["tokens"] for answer in answers]


def loaded(answers: list[dict[str, Any]]) -> list[bool | None]:
    return [
        answer["params"]["ragfuse"]["loaded"] if answer["params"] else None for answer in answers
    ]


def test_greedy_tokens_equal_those_of_transformers_over_the_same_kv(pair: Any) -> None:
    assert len({tuple(found) for found in pair.prefills.wanted.values()}) == len(CASES)
    for case in CASES:
        answers = pair.decoder.ask(pair.request(case))
        assert tokens(answers) == [pair.prefills.wanted[case]], case
        assert answers[0]["cached"] == len(pair.prefills.ids) - 1
        assert loaded(answers) == [True]
    pair.wait_until_left()


def test_requests_of_all_kinds_are_decoded_together(pair: Any) -> None:
    cases = ("foreign", None, "fused", "reused", "full", None, "foreign")
    wanted = [pair.prefills.wanted[case or "full"] for case in cases]
    assert tokens(pair.decoder.ask(*map(pair.request, cases))) == wanted
    # nor is a plain one answered from fused KV that came before it
    assert [tokens(pair.decoder.ask(pair.request(case)))[0] for case in cases] == wanted
    pair.wait_until_left()


@pytest.mark.parametrize("pair", ["llama-async"], indirect=True)  # whose cache is small enough
def test_a_preempted_request_loads_its_kv_again(pair: Any) -> None:
    before = pair.decoder.counters.get("vllm:num_preemptions", 0)
    cases = ("foreign", "reused", "fused")
    answers = pair.decoder.ask(*map(pair.request, cases))
    assert pair.decoder.counters["vllm:num_preemptions"] > before
    assert tokens(answers) == [pair.prefills.wanted[case] for case in cases]
    pair.wait_until_left()


LIES = {
    "no handle": "yes",
    "another secret": {"secret": "0" * 32},
    "another tenant": {"tenant": "0" * 32},
    "another model": {
        "model": {"name": "x", "n_layers": 4, "kv_heads": 2, "head_dim": 32, "dtype": "float32"}
    },
    "other weights": {"weights": "0" * 32},
    "other tokens": {"tokens": "0" * 32},
    "another length": {"n_tokens": 12},
    "another level": {"level": "int8"},
    "expired": {"expires_s": 1},
}


@pytest.mark.parametrize("lie", LIES)
def test_a_handle_that_is_wrong_costs_the_computation_alone(lie: str, pair: Any) -> None:
    told = pair.request("foreign")
    change = LIES[lie]
    told["params"]["ragfuse"] = (
        {**told["params"]["ragfuse"], **change} if isinstance(change, dict) else change
    )
    answers = pair.decoder.ask(told, pair.request("fused"))
    assert tokens(answers) == [pair.prefills.wanted["full"], pair.prefills.wanted["fused"]]
    assert loaded(answers) == [False, True]
    assert pair.decoder.counters["vllm:ragfuse_prompts_recomputed"] > 0


def test_damaged_kv_is_computed(pair: Any) -> None:
    told = pair.request("foreign")
    layout = TransferHandle.from_dict(told["params"]["ragfuse"]).key.layout
    files = (path for path in (Path(pair.prefills.url) / "chunks").rglob("*") if path.is_file())
    path = next(path for path in files if layout.encode() in path.read_bytes()[:4096])
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    answers = pair.decoder.ask(told)
    assert tokens(answers) == [pair.prefills.wanted["full"]]
    assert loaded(answers) == [False]


def test_a_handle_is_read_once(pair: Any) -> None:
    before, told = pair.waiting(), pair.request("foreign")
    answers = pair.decoder.ask(told, told)
    assert sorted(map(str, loaded(answers))) == ["False", "True"]
    pair.wait_until_left(before)
    again = pair.decoder.ask(told)
    assert tokens(again) == [pair.prefills.wanted["full"]]
    assert loaded(again) == [False]


@pytest.mark.parametrize("step", [0, 1, 3])
def test_an_aborted_request_leaves_nothing(step: int, pair: Any) -> None:
    before, told = pair.waiting(), pair.request("foreign")
    _, answer = pair.decoder.ask({**told, "abort_at": step}, pair.request("fused"))
    assert answer["tokens"] == pair.prefills.wanted["fused"]
    pair.wait_until_left(before)
