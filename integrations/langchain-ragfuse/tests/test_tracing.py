"""What tracers are told of cached tokens: LangSmith's through a server of its kind, others' through
callbacks.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import requests
from langchain_core.tracers import LangChainTracer
from langchain_ragfuse import ChatRagFuse
from langsmith import Client

from ragfuse import Engine

FIRST = "The lighthouse keeper counted forty ships that night and wrote all their names down."
SECOND = "Nobody in the valley remembers who planted the walnut trees along the old road."
ASKED = f"Read this.\n\n{FIRST}\n\n{SECOND}\n\nHow many ships were there?"


@pytest.fixture
def llm(engine: Engine) -> ChatRagFuse:
    llm = ChatRagFuse(engine=engine)
    engine.ingest([(FIRST, "first.txt"), (SECOND, "second.txt")])
    for _ in range(2):  # once for the prompt's beginning, once for the chunks behind it
        llm.invoke(ASKED)
        engine.flush()
    return llm


class Recorder(BaseHTTPRequestHandler):
    """Keeps what is sent, as LangSmith's server takes it."""

    sent: list[dict[str, Any]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.sent.append(json.loads(body))
        self.send_response(202)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    do_PATCH = do_POST

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def langsmith() -> Iterator[tuple[LangChainTracer, Callable[[], dict[str, Any]]]]:
    """A tracer, and ended(): the run of a model as it was sent when it ended."""
    sent: list[dict[str, Any]] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Mine", (Recorder,), {"sent": sent}))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    session = requests.Session()
    session.trust_env = False
    url = f"http://127.0.0.1:{server.server_port}"
    client = Client(api_url=url, api_key="none", session=session, auto_batch_tracing=False, info={})
    tracer = LangChainTracer(client=client, project_name="tests")

    def ended() -> dict[str, Any]:
        tracer.wait_for_futures()
        (run,) = [run for run in sent if run.get("end_time") and run.get("outputs")]
        return run

    try:
        yield tracer, ended
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def called(llm: ChatRagFuse, way: str, callback: Any) -> dict[str, Any]:
    """Usage as the caller sees it."""
    config: Any = {"callbacks": [callback]}
    if way == "invoke":
        return dict(llm.invoke(ASKED, config=config).usage_metadata or {})
    whole = None
    for chunk in llm.stream(ASKED, config=config):
        whole = chunk if whole is None else whole + chunk
    return dict(getattr(whole, "usage_metadata", None) or {})


@pytest.mark.parametrize("way", ["invoke", "stream"])
def test_langsmith_is_sent_cached_tokens_and_the_model_s_name(
    llm: ChatRagFuse, langsmith: Any, way: str
) -> None:
    tracer, ended = langsmith
    usage = called(llm, way, tracer)
    run = ended()
    assert run["extra"]["metadata"]["usage_metadata"] == usage
    assert usage["input_token_details"]["cache_read"] > 0
    assert usage["input_tokens"] >= sum(usage["input_token_details"].values())
    assert run["extra"]["metadata"]["ls_provider"] == "ragfuse"
    assert run["extra"]["metadata"]["ls_model_name"] == llm.model_name
    assert run["run_type"] == "llm"
