"""The router: answers are prefilled here and decoded by a server that speaks vLLM's protocol, or here if that fails."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ragfuse import Engine, Settings
from ragfuse.errors import SettingsError, TransferError
from ragfuse.serve import remote_decoder
from ragfuse.serve import service as service_module
from ragfuse.serve.service import Service
from ragfuse.transfer import TransferPlace
from tests.serve.kit import PATIENCE_S, Served, process, said, serving, wait_for, with_documents
from tests.serve.vllm_kit import VLLM, Reply, vllm

KEY = "a-secret-key-of-vllm"
TEXT = {"prompt": "The keeper of the northern lighthouse counted ships and wrote "}
UNEQUAL = ("id", "created", "system_fingerprint")


@pytest.fixture(scope="module")
def letters_path(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, whose greedy answers are letters and spaces by its weights alone."""
    folder = tmp_path_factory.mktemp("letters")
    shutil.copytree(tiny_path, folder, dirs_exist_ok=True)
    ids = AutoTokenizer.from_pretrained(folder)(" abcdefghijklmnopqrstuvwxyz", add_special_tokens=False).input_ids
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        kept = model.lm_head.weight[ids].clone()
        model.lm_head.weight.zero_()
        model.lm_head.weight[ids] = kept
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def settings(letters_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    home = tmp_path_factory.mktemp("router")
    given = {"dtype": "float32", "home": home, "store": home / "store", "learn": "off", "prefix_cache": False}
    return Settings(model=str(letters_path), max_tokens=12, transfer_url=str(home / "place"), **given)


@pytest.fixture(scope="module")
def alone(settings: Settings) -> Iterator[Served]:
    """A server that decodes itself, whose answers are those to compare with."""
    with serving(settings) as made:
        yield made


@pytest.fixture(scope="module")
def place(settings: Settings) -> Iterator[TransferPlace]:
    made = TransferPlace.open(settings)
    yield made
    made.close()


@pytest.fixture(scope="module")
def peer(alone: Served, place: TransferPlace) -> Iterator[VLLM]:
    model = alone.service.engine(alone.service.keys.tenants[0]).model
    with vllm(model, place, alone.service.model) as made:
        yield made


@pytest.fixture(scope="module")
def routing(settings: Settings, peer: VLLM) -> Iterator[Served]:
    """A server that has its answers decoded there."""
    told = {"decode_at": f"{peer.root}/v1", "decode_key": KEY, "decode_timeout_s": PATIENCE_S}
    with serving(Settings(**{**settings.model_dump(), **told})) as made:
        made.service.connect()
        yield made


@pytest.fixture
def router(routing: Served, peer: VLLM) -> Iterator[Served]:
    """The router, connected, with counts and records from 0."""
    assert routing.service.decoder is not None
    peer.spoil = None
    routing.service.reconnect()
    routing.service.decoder.outcomes.clear()
    peer.received.clear()
    peer.headers.clear()
    yield routing
    peer.spoil = None


@contextmanager
def impatient(router: Served, seconds: float = 5.0) -> Iterator[None]:
    """Wait so long for a token."""
    decoder = router.service.decoder
    assert decoder is not None
    before = decoder.settings
    decoder.settings = before.model_copy(update={"decode_timeout_s": seconds})
    yield
    decoder.settings = before


def outcomes(served: Served) -> dict[str, int]:
    assert served.service.decoder is not None
    return dict(served.service.decoder.outcomes)


def events(served: Served, path: str, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream but [DONE]."""
    body = {"model": served.service.model, "stream": True, "stream_options": {"include_usage": True}, **body}
    lines = served.post(path, body).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""], lines[-3:]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def comparable(value: Any) -> Any:
    """A reply without what differs from run to run."""
    if isinstance(value, list):
        return [comparable(each) for each in value]
    if isinstance(value, dict):
        trace = {"load_s", "compute_s", "prefill_s", "ttft_s", "total_s", "summary", "session"}
        trace |= {"tier", "nbytes"}  # where each server's own memory has a chunk
        trace |= {"decoded_elsewhere"}
        return {name: comparable(each) for name, each in value.items() if name not in (*UNEQUAL, *trace)}
    return round(value, 2) if isinstance(value, float) else value


def same(found: Any, wanted: Any) -> None:
    """Both replies read the same."""
    left, right = (json.dumps(comparable(each), indent=1, sort_keys=True).splitlines() for each in (found, wanted))
    assert [pair for pair in zip(left, right, strict=False) if pair[0] != pair[1]] == []
    assert len(left) == len(right)


def joined(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    """A stream's texts and log probabilities by answer, however they were cut."""
    found: dict[str, Any] = {}
    for choice in (choice for each in pieces for choice in each["choices"]):
        text, logprobs = found.setdefault(str(choice["index"]), ["", []])
        told = choice["logprobs"] or {}
        logprobs += told.get("content") or told.get("token_logprobs") or []
        found[str(choice["index"])] = [
            text + (choice.get("text") or choice.get("delta", {}).get("content") or ""),
            logprobs,
        ]
    return found


def ends(event: dict[str, Any]) -> bool:
    """Whether an event tells how an answer ended, or the usage."""
    return any(choice["finish_reason"] for choice in event["choices"]) or bool(event["usage"])


def warm(served: Served) -> None:
    """Have the documents in the store."""
    served.chat(**with_documents())
    served.service.engine(served.service.keys.tenants[0]).flush()


CHATS: list[dict[str, Any]] = [
    {"messages": [said()]},
    {"messages": [said()], **with_documents()},
    {"messages": [said()], "logprobs": True, "top_logprobs": 3},
    {"messages": [said()], "n": 2, "max_tokens": 4},
]


@pytest.mark.parametrize("body", CHATS)
@pytest.mark.parametrize("streams", [False, True])
def test_a_chat_reads_as_from_one_server(body: dict[str, Any], streams: bool, router: Served, alone: Served) -> None:
    warm(alone)
    path = "/v1/chat/completions"
    if streams:
        found, wanted = (events(server, path, **body) for server in (router, alone))
        same(joined(found), joined(wanted))
        same([each for each in found if ends(each)], [each for each in wanted if ends(each)])
    else:
        same(*(server.chat(**body).json() for server in (router, alone)))
    assert outcomes(router) == {"decoded": body.get("n", 1)}


@pytest.mark.parametrize("body", [TEXT, {**TEXT, "logprobs": 0}, {**TEXT, "echo": True}, {"prompt": [[9, 10], [11]]}])
@pytest.mark.parametrize("streams", [False, True])
def test_a_text_reads_as_from_one_server(body: dict[str, Any], streams: bool, router: Served, alone: Served) -> None:
    path = "/v1/completions"
    if streams:
        found, wanted = (events(server, path, **body) for server in (router, alone))
        same(joined(found), joined(wanted))
        same([each for each in found if ends(each)], [each for each in wanted if ends(each)])
    else:
        same(*(server.post(path, {"model": server.service.model, **body}).json() for server in (router, alone)))
    assert outcomes(router) == {"decoded": len(body["prompt"]) if isinstance(body["prompt"], list) else 1}


def test_an_answer_is_decoded_from_fused_kv(router: Served, alone: Served, place: TransferPlace) -> None:
    warm(alone)
    answer = router.chat(**with_documents()).json()
    assert answer["ragfuse"]["tokens_reused"] > 0
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == answer["ragfuse"]["tokens_reused"]
    assert answer["ragfuse"]["decoded_elsewhere"] == answer["usage"]["completion_tokens"] > 0
    assert outcomes(router) == {"decoded": 1}
    assert place.n_waiting == 0


def test_a_conversation_goes_on(router: Served, peer: VLLM) -> None:
    first = router.chat(session_id="guest", max_tokens=4).json()["choices"][0]["message"]["content"]
    messages = [said(), said(first, "assistant"), said("And who before?")]
    answer = router.chat(session_id="guest", messages=messages).json()
    assert answer["ragfuse"]["session"] == "guest"
    assert answer["ragfuse"]["tokens_reused"] > 0
    assert len(peer.asked) == 2


def test_what_was_asked_for_is_passed_on(router: Served, peer: VLLM) -> None:
    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 7, "seed": 5, "max_tokens": 3, "stop": ["\n\n", "END"]}
    sampling |= {"presence_penalty": 0.5, "frequency_penalty": 0.25, "logit_bias": {"9": -5}, "stop_token_ids": [77]}
    router.chat(**sampling)
    (body,) = peer.asked
    ends = body.pop("stop_token_ids")
    assert 77 in ends
    assert len(ends) > 1  # the model's own
    for name, value in sampling.items():
        if name != "stop_token_ids":
            assert body[name] == value
    assert (body["min_p"], body["repetition_penalty"], body["ignore_eos"]) == (0.0, 1.0, True)
    assert body["kv_transfer_params"]["do_remote_prefill"] is True
    assert "prompt_token_ids" not in body["kv_transfer_params"]
    assert peer.headers[0]["authorization"] == f"Bearer {KEY}"


def test_what_the_models_files_ask_for_is_told_once(
    varied_path: Path, settings: Settings, peer: VLLM, place: TransferPlace, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ragfuse.serve")
    told = {"model": str(varied_path), "store": settings.home / "other"}
    with vllm(peer.model, place, varied_path.name) as other:
        with serving(Settings(**{**settings.model_dump(), **told, "decode_at": other.root})) as made:
            made.service.connect()
            for _ in range(2):
                made.chat(max_tokens=2)
        assert outcomes(made) == {"unsupported": 2}
        assert other.asked == []
    assert caplog.text.count("no_repeat_ngram_size") == 1


def test_an_answer_is_greedy_unless_told(router: Served, peer: VLLM) -> None:
    router.chat(top_p=0.5)
    (body,) = peer.asked
    assert (body["temperature"], body["top_p"], body["top_k"], body["seed"]) == (0.0, 1.0, 0, None)


def test_a_stop_string_ends_an_answer_here_too(router: Served, alone: Served, peer: VLLM) -> None:
    whole = alone.chat().json()["choices"][0]["message"]["content"]
    stop = whole[2:4]
    found, wanted = (server.chat(stop=stop).json() for server in (router, alone))
    same(found, wanted)
    assert stop not in found["choices"][0]["message"]["content"]
    assert peer.asked[0]["stop"] == [stop]


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"tools": [TOOL], "tool_choice": "required"},
        {"tools": [TOOL]},
        {"guided_choice": ["yes", "no"]},
        {"temperature": 1.0, "top_p": 0.9, "min_p": 0.1, "seed": 1},
        {"temperature": 0.005, "seed": 1},
        {"repetition_penalty": 1.2, "logit_bias": {"9": 1}},
        {"logprobs": True, "repetition_penalty": 1.2},
    ],
)
def test_what_vllm_would_do_otherwise_is_decoded_here(
    fields: dict[str, Any], router: Served, alone: Served, peer: VLLM
) -> None:
    found, wanted = (server.chat(**fields).json() for server in (router, alone))
    assert peer.asked == []
    for each in (found, wanted):
        for call in each["choices"][0]["message"].get("tool_calls", ()):
            call.pop("id")
    same(found, wanted)
    assert outcomes(router) == {"unsupported": 1}


def fails(status: int) -> Any:
    def spoil(reply: Reply, body: dict[str, Any]) -> bool:
        reply.whole(status, {"error": {"message": f"no \x1b[31m{'x' * 5000}"}})
        return True

    return spoil


def sends(*raw: bytes, kind: str = "text/event-stream", **headers: str) -> Any:
    def spoil(reply: Reply, body: dict[str, Any]) -> bool:
        reply.begin(kind, **headers)
        for each in raw:
            reply.piece(each)
        reply.piece(b"")
        return True

    return spoil


def drips(raw: bytes, wait_s: float = 0.05, n: int = 400) -> Any:
    def spoil(reply: Reply, body: dict[str, Any]) -> bool:
        reply.begin()
        for _ in range(n):
            reply.piece(raw)
            time.sleep(wait_s)
        return True

    return spoil


def silence(reply: Reply, body: dict[str, Any]) -> bool:
    reply.begin()
    wait_until_gone(reply)
    return True


def wait_until_gone(reply: Reply) -> bool:
    """Wait until the client closes the connection; return whether it did."""
    reply.connection.settimeout(PATIENCE_S)
    reply.close_connection = True
    return reply.connection.recv(1) == b""


def choice(**fields: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": "a", "finish_reason": None, **fields}]}).encode() + b"\n\n"


SPOILT = {
    "400": (fails(400), "refused"),
    "404": (fails(404), "refused"),
    "500": (fails(500), "failed"),
    "401": (fails(401), "failed"),
    "302": (fails(302), "failed"),
    "not events": (sends(b"{}", kind="application/json"), "failed"),
    "compressed": (sends(b"\x1f\x8b", content_encoding="gzip"), "failed"),
    "not json": (sends(b"data: {\n\n"), "failed"),
    "not utf-8": (sends(b"data: \xff\xfe\n\n"), "failed"),
    "deep": (sends(b"data: " + b"[" * 100_000 + b"\n\n"), "failed"),
    "an error": (sends(b'data: {"error": {"message": "no KV", "code": 500}}\n\n'), "failed"),
    "no choice": (sends(b'data: {"choices": [7]}\n\n'), "failed"),
    "no ids": (sends(choice()), "failed"),
    "ids of no token": (sends(choice(token_ids=[10**9])), "failed"),
    "negative ids": (sends(choice(token_ids=[-1])), "failed"),
    "ids that are no numbers": (sends(choice(token_ids=[True])), "failed"),
    "too many ids": (sends(choice(token_ids=[9] * 13)), "failed"),
    "nothing": (sends(), "refused"),
    "done at once": (sends(b"data: [DONE]\n\n"), "refused"),
    "a line without end": (sends(*[b"data: " + b"x" * (1 << 16)] * 40), "failed"),
    "comments without end": (sends(*[b": hello\n" * (1 << 13)] * 40), "failed"),
    "comments now and then": (drips(b": hello\n\n"), "failed"),
    "silence": (silence, "failed"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_what_fails_before_the_first_token_is_answered_here(
    name: str, router: Served, alone: Served, peer: VLLM, place: TransferPlace
) -> None:
    (peer.spoil, outcome), decoder = SPOILT[name], router.service.decoder
    assert decoder is not None
    with decoder._connecting:  # no try to reach the spoilt peer again: that hands KV over, too
        with impatient(router):
            found, wanted = (events(server, "/v1/chat/completions", messages=[said()]) for server in (router, alone))
        same(joined(found), joined(wanted))
        same(found[-2:], wanted[-2:])
        assert outcomes(router) == {outcome: 1}
        assert decoder.is_up == (outcome == "refused")
        wait_for(lambda: place.n_waiting == 0)


def breaks_after(n: int, how: str) -> Any:
    """Answer with the right tokens, and break behind the first `n`."""

    def spoil(reply: Reply, body: dict[str, Any]) -> bool:
        tokens, _ = reply.server.written(body)
        reply.begin()
        for event in list(reply.server.events(tokens, body))[:n]:
            reply.event(event)
        if how == "an error":
            reply.event({"error": {"message": "engine died"}})
        elif how == "ends":
            reply.event("[DONE]")
            reply.piece(b"")
        elif how == "hangs":
            wait_until_gone(reply)
        reply.close_connection = True
        return True

    return spoil


@pytest.mark.parametrize(
    ("how", "fields"),
    [
        *(("closes", fields) for fields in ({}, {"logprobs": True, "top_logprobs": 2}, {"stop": ["zz"]})),
        *((how, {}) for how in ("an error", "ends", "hangs")),
    ],
)
def test_what_breaks_behind_some_tokens_goes_on_here(
    how: str, fields: dict[str, Any], router: Served, alone: Served, peer: VLLM
) -> None:
    peer.spoil = breaks_after(5, how)
    path, body = "/v1/chat/completions", {"messages": [said()], **with_documents(), **fields}
    warm(alone)
    with impatient(router, 5.0 if how == "hangs" else PATIENCE_S):
        found, wanted = events(router, path, **body), events(alone, path, **body)
    same(joined(found), joined(wanted))
    assert comparable(found[-1]["usage"]) == comparable(wanted[-1]["usage"])
    assert outcomes(router) == {"broken": 1}


def test_a_client_that_goes_ends_the_answer_there(router: Served, peer: VLLM, place: TransferPlace) -> None:
    gone: list[bool] = []

    def spoil(reply: Reply, body: dict[str, Any]) -> bool:
        tokens, _ = reply.server.written(body)
        reply.begin()
        reply.event(next(iter(reply.server.events(tokens, body))))
        gone.append(wait_until_gone(reply))
        return True

    peer.spoil = spoil
    body = {"model": router.service.model, "messages": [said()], "stream": True}
    with httpx.stream("POST", f"{router.url}/chat/completions", json=body, timeout=PATIENCE_S) as answer:
        next(answer.iter_lines())
    wait_for(lambda: gone == [True])
    wait_for(lambda: router.service.admission.is_idle)
    assert router.service.decoder is not None
    assert router.service.decoder.is_up
    assert place.n_waiting == 0


def test_one_warning_when_it_goes_and_one_line_when_it_is_back(
    settings: Settings, peer: VLLM, place: TransferPlace, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ragfuse.serve")
    with serving(Settings(**{**settings.model_dump(), "decode_at": "http://127.0.0.1:1", "decode_key": KEY})) as made:
        made.service.connect()
        with vllm(peer.model, place, made.service.model) as other:
            assert made.service.decoder is not None
            made.service.decoder.client.root = other.root
            for _ in range(3):
                assert made.chat().status_code == 200
            assert outcomes(made) == {"down": 3}
            assert metrics(made)["ragfuse_decode_at_up"] == 0
            made.service.reconnect()
            made.chat()
            assert outcomes(made) == {"down": 3, "decoded": 1}
            found = metrics(made)
            assert found["ragfuse_decode_at_up"] == 1
            assert found['ragfuse_decode_at_answers_total{outcome="down"}'] == 3
    lines = [each for each in caplog.records if "vLLM server" in each.getMessage()]
    assert [each.levelname for each in lines] == ["WARNING", "INFO"]
    assert "until the vLLM server answers" in lines[0].getMessage()
    assert lines[1].getMessage().endswith("decodes answers.")
    assert KEY not in caplog.text


def test_a_server_that_cannot_decode_is_tried_ever_more_seldom(
    settings: Settings, peer: VLLM, place: TransferPlace, alone: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, tried = [1000.0], list[float]()
    monkeypatch.setattr(remote_decoder, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    with serving(Settings(**{**settings.model_dump(), "decode_at": "http://127.0.0.1:1"})) as made:
        decoder = made.service.decoder
        assert decoder is not None

        def connect(engine: Engine, salt: str) -> None:
            tried.append(now_s[0] - 1000)
            raise SettingsError("Wanted the same place.")

        monkeypatch.setattr(decoder, "connect", connect)
        for _ in range(40):
            made.service.reconnect()
            now_s[0] += 5
    assert tried == [0, 5, 15, 35, 75, 135, 195]


def metrics(served: Served) -> dict[str, float]:
    lines = (line.rsplit(" ", 1) for line in served.get("/metrics").text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}


def test_it_comes_back_by_itself(
    settings: Settings, peer: VLLM, place: TransferPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "UPKEEP_S", 0.05)
    with serving(Settings(**{**settings.model_dump(), "decode_at": peer.root})) as made:
        assert made.service.decoder is not None
        decoder = made.service.decoder
        wait_for(lambda: decoder.is_up)
        made.chat()
    assert outcomes(made) == {"decoded": 1}


def test_a_place_that_is_full_is_told_once(
    router: Served, peer: VLLM, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise TransferError("Wanted room, found none.")

    assert router.service.decoder is not None
    monkeypatch.setattr(router.service.decoder.place, "put", full)
    for _ in range(2):
        assert router.chat().json()["usage"]["completion_tokens"] > 0
    assert outcomes(router) == {"place": 2}
    assert caplog.text.count("found none") == 1
    assert peer.asked == []


@pytest.mark.parametrize("asked", ["do_remote_decode", "do_remote_prefill"])
def test_no_client_gets_or_gives_a_handle(asked: str, router: Served, peer: VLLM, place: TransferPlace) -> None:
    answer = router.chat(kv_transfer_params={asked: True})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "kv_transfer_params"
    assert "hands KV over itself" in answer.json()["error"]["message"]
    assert (peer.asked, place.n_waiting) == ([], 0)


def of_ragfuse(peer: VLLM) -> None:
    peer.models = [{"id": "other", "owned_by": "ragfuse"}]


def without_connector(peer: VLLM) -> None:
    peer.has_connector = False


def of_another_model(peer: VLLM) -> None:
    peer.models = [{"id": "gpt-\x1b[31m", "root": "/models/other"}]


def locked(peer: VLLM) -> None:
    peer.spoil = fails(401)


def refusing(peer: VLLM) -> None:
    peer.spoil = fails(404)


def elsewhere(peer: VLLM) -> None:
    def spoil(reply: Reply, body: dict[str, Any]) -> bool:
        loaded = {"loaded": False, "why": "Layer 0 of a prompt's KV is not in the place"}
        reply.whole(200, {"choices": [{"token_ids": [1]}], "kv_transfer_params": {"ragfuse": loaded}})
        return True

    peer.spoil = spoil


def without_ids(peer: VLLM) -> None:
    def spoil(reply: Reply, body: dict[str, Any]) -> bool:
        reply.whole(200, {"choices": [{"text": "a"}], "kv_transfer_params": {"ragfuse": {"loaded": True}}})
        return True

    peer.spoil = spoil


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without_connector, "--kv-transfer-config"),
        (of_another_model, "--served-model-name"),
        (of_ragfuse, "found a ragfuse server"),
        (locked, "RAGFUSE_DECODE_KEY"),
        (refusing, "found 404"),
        (elsewhere, "Layer 0"),
        (without_ids, "return_token_ids"),
    ],
)
def test_a_server_that_cannot_decode_is_one_sentence_at_start(
    change: Any, words: str, settings: Settings, peer: VLLM, place: TransferPlace, alone: Served
) -> None:
    with vllm(peer.model, place, alone.service.model) as other:
        change(other)
        service = Service(Settings(**{**settings.model_dump(), "decode_at": other.root, "decode_key": KEY}))
        try:
            with pytest.raises(SettingsError, match=r"^Wanted|does not load") as raised:
                service.connect()
        finally:
            service.close()
    assert words in str(raised.value)
    assert KEY not in str(raised.value)
    assert str(raised.value).isprintable()
    assert place.n_waiting == 0


def test_a_name_of_its_own_is_used(settings: Settings, peer: VLLM, place: TransferPlace, alone: Served) -> None:
    with vllm(peer.model, place, alone.service.model) as other:
        other.models[0]["id"] = "chat"
        with serving(Settings(**{**settings.model_dump(), "decode_at": other.root})) as made:
            made.service.connect()
            made.chat()
            assert outcomes(made) == {"decoded": 1}
        assert {body["model"] for body in other.received} == {"chat"}


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("127.0.0.1:8001", "http://HOST:PORT"),
        ("ftp://127.0.0.1", "http://HOST:PORT"),
        ("http://", "http://HOST:PORT"),
        ("http://127.0.0.1:port", "http://HOST:PORT"),
        ("http://127.0.0.1:8001/v2", "leave out"),
        ("http://user:word@127.0.0.1:8001", "RAGFUSE_DECODE_KEY"),
    ],
)
def test_an_address_that_is_none_is_refused(url: str, words: str) -> None:
    with pytest.raises(SettingsError, match="decode_at") as raised:
        Settings(decode_at=url)
    assert words in str(raised.value)


def test_addresses_are_kept_in_one_form() -> None:
    given = [" http://127.0.0.1:8001/v1/ ", "https://Vllm.Example/", "http://[::1]:8001", ""]
    wanted = ["http://127.0.0.1:8001", "https://vllm.example", "http://[::1]:8001", ""]
    assert [Settings(decode_at=url).decode_at for url in given] == wanted


def test_a_key_is_neither_shown_nor_saved() -> None:
    settings = Settings(decode_key=f" {KEY} ")
    assert settings.decode_key == KEY
    assert KEY not in repr(settings)
    with pytest.raises(SettingsError, match="RAGFUSE_DECODE_KEY"):
        settings.as_public()
    with pytest.raises(SettingsError, match="printable"):
        Settings(decode_key="a\nb")


@pytest.mark.parametrize(("host", "is_here"), [("127.0.0.1", True), ("localhost", True), ("10.0.0.7", False)])
def test_a_place_is_needed_where_machines_differ(host: str, is_here: bool, varied_path: Path, tmp_path: Path) -> None:
    settings = Settings(model=str(varied_path), home=tmp_path, decode_at=f"http://{host}:8001")
    if is_here:
        service = Service(settings)
        assert service.settings.transfer_url == str(tmp_path / "transfer")
        service.close()
    else:
        with pytest.raises(SettingsError, match="RAGFUSE_TRANSFER_URL"):
            Service(settings)


def test_the_command_says_who_decodes(settings: Settings, peer: VLLM, router: Served) -> None:
    variables = {"RAGFUSE_DECODE_KEY": KEY, "RAGFUSE_TRANSFER_URL": settings.transfer_url}
    log = list[str]()
    with process(settings, "--decode-at", peer.root, log=log, **variables) as (_, root):
        wait_for(lambda: any(f"vLLM at {peer.root} decodes" in line for line in list(log)))
        body = {"model": router.service.model, "messages": [said()], "max_tokens": 3}
        answer = httpx.post(f"{root}/v1/chat/completions", json=body, timeout=PATIENCE_S).json()
        assert answer["usage"]["completion_tokens"] == 3
    assert len(peer.asked) == 1
