"""A server that speaks vLLM's side of disaggregated prefill: it decodes greedily over the KV that a handle names.

What it received is kept, and what it answers can be spoilt.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from transformers import DynamicCache

from ragfuse.hf.model import HFModel
from ragfuse.transfer import TransferError, TransferHandle, TransferPlace
from ragfuse.types.kv import ChunkKV

Spoil = Callable[["Reply", dict[str, Any]], bool]
"""Answers a request in another way; False where the server shall answer as usual."""


class Reply(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    server: VLLM

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self.whole(200, {"object": "list", "data": self.server.models})
        else:
            self.whole(404, {"error": {"message": "no such path"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.received.append(body)
        self.server.headers.append(dict(self.headers))
        if self.server.spoil is not None and self.server.spoil(self, body):
            return
        tokens, loaded = self.server.written(body)
        if not body["stream"]:
            ids = [id for id, _ in tokens]
            params = {"ragfuse": loaded} if self.server.has_connector else None
            self.whole(200, {"choices": [{"token_ids": ids, "text": "", "index": 0}], "kv_transfer_params": params})
            return
        self.begin()
        for piece in self.server.events(tokens, body):
            self.event(piece)
        self.event("[DONE]")
        self.piece(b"")

    def whole(self, status: int, value: Any) -> None:
        raw = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def begin(self, kind: str = "text/event-stream; charset=utf-8", **headers: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("transfer-encoding", "chunked")
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def event(self, value: Any) -> None:
        text = value if isinstance(value, str) else json.dumps(value)
        self.piece(f"data: {text}\n\n".encode())

    def piece(self, raw: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(raw), raw))
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


class VLLM(ThreadingHTTPServer):
    """The server. spoil: answers instead of it; received: the bodies that came."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, model: HFModel, place: TransferPlace, name: str, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Reply)
        self.model, self.place = model, place
        self.models: list[dict[str, Any]] = [{"id": name, "object": "model", "root": f"/models/{name}"}]
        self.received: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.spoil: Spoil | None = None
        self.has_connector = True
        self.broken_pipes = 0

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def asked(self) -> list[dict[str, Any]]:
        """The requests for answers; those that asked whether it decodes are left out."""
        return [body for body in self.received if body["stream"]]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Count clients that have gone."""
        self.broken_pipes += 1

    def written(self, body: dict[str, Any]) -> tuple[list[tuple[int, torch.Tensor]], dict[str, Any]]:
        """The ids of an answer, each with the log probabilities that it was chosen by; whether KV was loaded."""
        handle = TransferHandle.from_dict(body["kv_transfer_params"]["ragfuse"])
        try:
            kv = ChunkKV(tuple(self.place.read(handle)))
        except TransferError as error:
            return [(0, torch.zeros(1))], {"loaded": False, "why": str(error)}
        try:
            ends = set(body["stop_token_ids"])
            return self.greedy(body["prompt"], kv, body["max_tokens"], ends), {"loaded": True}
        finally:
            self.place.delete(handle)

    def greedy(self, ids: Sequence[int], kv: ChunkKV, n: int, ends: set[int]) -> list[tuple[int, torch.Tensor]]:
        cache, token, found = DynamicCache(), ids[-1], list[tuple[int, torch.Tensor]]()
        for at, layer in enumerate(kv.layers):
            cache.update(layer.keys[None, :, :-1].clone(), layer.values[None, :, :-1].clone(), at)
        for _ in range(n):
            with self.model.lock, torch.no_grad():
                out = self.model.model(input_ids=torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            row = out.logits[0, -1].float().log_softmax(-1)
            token = int(row.argmax())
            found.append((token, row))
            if token in ends:
                break
        return found

    def events(self, tokens: Sequence[tuple[int, torch.Tensor]], body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a stream, as vLLM writes them."""
        for at, (id, row) in enumerate(tokens):
            is_last = at == len(tokens) - 1
            reason = ("stop" if id in body["stop_token_ids"] else "length") if is_last else None
            choice: dict[str, Any] = {"index": 0, "text": "?", "token_ids": [id], "finish_reason": reason}
            if body["logprobs"] is not None:
                best = row.topk(body["logprobs"]) if body["logprobs"] else None
                pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True) if best is not None else ()
                top = {f"token_id:{other}": value for other, value in (*pairs, (id, float(row[id])))}
                choice["logprobs"] = {
                    "tokens": [f"token_id:{id}"],
                    "token_logprobs": [float(row[id])],
                    "top_logprobs": [top],
                    "text_offset": [0],
                }
            yield {"id": "cmpl-1", "object": "text_completion", "model": body["model"], "choices": [choice]}


@contextlib.contextmanager
def vllm(model: HFModel, place: TransferPlace, name: str, port: int = 0) -> Iterator[VLLM]:
    """A server on a port of this machine, until the end of the block."""
    server = VLLM(model, place, name, port)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
