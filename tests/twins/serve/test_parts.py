"""The parts without a network: sampling, probabilities, errors."""

from __future__ import annotations

import json
import math

import pytest
import torch

from ragfuse import StoreError
from ragfuse.serve.refusals import APIError, api_error_of
from ragfuse.serve.run import ZERO_LOGPROB, LogprobRecorder, as_text
from ragfuse.serve.schema import ChatRequest


def chat(**fields: object) -> ChatRequest:
    return ChatRequest.model_validate(
        {"model": "m", "messages": [{"role": "user", "content": "Who?"}], **fields}
    )


def test_probabilities_are_those_of_a_softmax_and_change_nothing() -> None:
    torch.manual_seed(0)
    rows, drawn, recorder = torch.randn(4, 10), [3, 9, 0, 5], LogprobRecorder(2)
    rows[1, 4] = -math.inf
    ids = [1, 2]
    for row, token in zip(rows, drawn, strict=True):
        scores = row[None].clone()
        assert torch.equal(recorder(torch.tensor([ids]), scores), row[None])
        ids.append(token)
    recorder.end(drawn)
    found = recorder.take()
    assert [each.id for each in found] == drawn
    for each, row, token in zip(found, rows, drawn, strict=True):
        whole = [math.exp(value) for value in row.tolist()]
        assert each.logprob == pytest.approx(math.log(whole[token] / sum(whole)), abs=1e-5)
        best = sorted(range(10), key=lambda at, whole=whole: -whole[at])[:2]
        assert [id for id, _ in each.top] == best
    assert recorder.take() == []


def test_what_ends_an_answer_has_no_probability_of_its_own() -> None:
    recorder, ids = LogprobRecorder(0), [1]
    for token in (5, 6, 0):
        recorder(torch.tensor([ids]), torch.zeros(1, 8))
        ids.append(token)
    recorder(torch.tensor([ids]), torch.zeros(1, 8))
    recorder.end([5, 6])
    assert [each.id for each in recorder.take()] == [5, 6]


def test_an_impossible_token_has_a_number_that_json_knows() -> None:
    recorder, scores = LogprobRecorder(2), torch.tensor([[0.0, -math.inf]])
    recorder(torch.tensor([[0]]), scores)
    recorder.end([1])
    told = as_text(recorder.take(), lambda id: "ab"[id])
    assert told["token_logprobs"] == [ZERO_LOGPROB]
    assert json.loads(json.dumps(told, allow_nan=False))["top_logprobs"] == [
        {"a": 0.0, "b": ZERO_LOGPROB}
    ]


def test_internal_errors_show_a_client_nothing_of_the_machine(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for error in (KeyError("/secret/path"), StoreError("/secret/path cannot be written")):
        refusal = api_error_of(error)
        assert refusal.status >= 500
        assert "secret" not in refusal.message
        assert "secret" in caplog.text
    assert api_error_of(APIError(418, "tea")).status == 418
