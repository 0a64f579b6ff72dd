"""An HTTP client of a vLLM server: its models, one answer, and an answer as it is written.

It runs an event loop in a thread of its own, as answers are generated in threads, and a read that nobody waits for any
more must end at once: closing the connection is how vLLM learns that a request was aborted. Nothing that the server
sends is trusted: lines, replies and whole streams are bounded, and whatever is not as it should be is a `VLLMError`.
"""

from __future__ import annotations

import asyncio
import json
import queue
import ssl
import threading
from collections.abc import Coroutine, Generator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

import httpx

T = TypeVar("T")
DECODER_CONNECT_S = 5.0
"""Seconds that a connection may take to open."""
POLL_S = 0.05
"""Seconds after which a reader of a stream hears that nothing has come."""
REPLY_NBYTES = 1 << 20
"""Largest reply that is read whole, and largest line of a stream beside the prompt's ids in it."""
ID_NBYTES = 16
"""Bytes that one token id may take in a reply."""
TOKEN_NBYTES = 4096
"""Bytes that one token with its text and log probability may take in a stream, names of fields included."""
LOGPROB_NBYTES = 512
"""Bytes that each of the likeliest tokens may take there."""
LINGER_S = 2.0
"""Seconds in which a stream that has told its end may close by itself, so that its connection is used again."""
SHOWN_CHARS = 300
"""Characters of a server's own words that are shown."""
EVENTS = "text/event-stream"
END_EVENT = "[DONE]"


class VLLMError(Exception):
    """A request to a vLLM server that was not answered as it should be.

    Args:
        message: What was wanted, what was found, what to do.
        is_down: Whether others would fail, too: the server is away or broken, or refuses this client.
        status: The HTTP status; 0 without an answer.
    """

    def __init__(self, message: str, is_down: bool = True, status: int = 0) -> None:
        super().__init__(message)
        self.is_down, self.status = is_down, status


class VLLMClient:
    """A client of one vLLM server. Thread-safe.

    Args:
        root: The server's address, without `/v1`.
        key: Its API key; "" for none.
        timeout_s: Most seconds between two pieces of a reply.
        together: Most requests at once.
    """

    def __init__(self, root: str, key: str, timeout_s: float, together: int) -> None:
        self.root, self._timeout_s, self._together = root, timeout_s, together
        self._headers = {"accept-encoding": "identity", **({"authorization": f"Bearer {key}"} if key else {})}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ragfuse-vllm", daemon=True)
        self._thread.start()
        self._client = self._wait_for(self._opened())

    def models(self) -> list[dict[str, Any]]:
        """Return the models that the server lists.

        Raises:
            VLLMError: It cannot be reached, or does not answer as vLLM does.
        """
        found = self._wait_for(self._whole("GET", "/v1/models", None, REPLY_NBYTES)).get("data")
        if not isinstance(found, list):
            raise self._strange("no list of models")
        return [each for each in found if isinstance(each, dict)]

    def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the whole reply of `/v1/completions`; VLLMError as for `models`."""
        return self._wait_for(self._whole("POST", "/v1/completions", body, REPLY_NBYTES))

    def stream(self, body: Mapping[str, Any]) -> Generator[dict[str, Any] | None, None, None]:
        """Yield the events of a streamed completion, and None where nothing came for a moment; closing it aborts.

        One that has told why it ended is not aborted.

        Args:
            body: The request's body, with `prompt` as ids, `max_tokens` and `logprobs`.

        Raises:
            VLLMError: The server did not answer, or not as it should.
        """
        items: queue.Queue[dict[str, Any] | VLLMError | None] = queue.Queue()
        reading = asyncio.run_coroutine_threadsafe(self._events(body, items), self._loop)
        is_over = False
        try:
            while True:
                try:
                    item = items.get(timeout=POLL_S)
                except queue.Empty:
                    yield None
                    continue
                if item is None:
                    return
                if isinstance(item, VLLMError):
                    raise item
                is_over = has_ended(item)
                yield item
        finally:
            if is_over:
                self._loop.call_soon_threadsafe(self._loop.call_later, LINGER_S, reading.cancel)
            else:
                reading.cancel()

    def close(self) -> None:
        """Abort all requests and end the thread."""
        if self._loop.is_closed():
            return
        with suppress(Exception):
            self._wait_for(self._closed())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # on the event loop

    async def _opened(self) -> httpx.AsyncClient:
        timeout = httpx.Timeout(self._timeout_s, connect=min(DECODER_CONNECT_S, self._timeout_s))
        limits = httpx.Limits(max_connections=self._together + 1, max_keepalive_connections=self._together)
        # No proxy of the environment: a request carries the right to read a prompt's KV.
        return httpx.AsyncClient(
            headers=self._headers,
            timeout=timeout,
            limits=limits,
            follow_redirects=False,
            trust_env=False,
            verify=ssl.create_default_context(),
        )

    async def _closed(self) -> None:
        mine = asyncio.current_task()
        for task in asyncio.all_tasks():
            if task is not mine:
                task.cancel()
        await self._client.aclose()

    async def _whole(self, method: str, path: str, body: Mapping[str, Any] | None, max_nbytes: int) -> dict[str, Any]:
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._client.stream(method, f"{self.root}{path}", json=body) as response,
            ):
                raw = await self._read(response, max_nbytes)
        except (httpx.HTTPError, TimeoutError, OSError) as error:
            raise self._failed(error) from error
        found = self._parsed(raw)
        if response.status_code != 200:
            raise self._refused(response.status_code, found)
        if found is None:
            raise self._strange("a reply that is no JSON object")
        return found

    async def _events(self, body: Mapping[str, Any], items: queue.Queue[dict[str, Any] | VLLMError | None]) -> None:
        try:
            async with self._client.stream("POST", f"{self.root}/v1/completions", json=body) as response:
                if response.status_code != 200:
                    found = self._parsed(await self._read(response, REPLY_NBYTES))
                    raise self._refused(response.status_code, found)
                kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
                if kind != EVENTS or response.headers.get("content-encoding", "identity") != "identity":
                    raise self._strange(f"a reply of type {kind!r:.60} in place of events")
                await self._read_events(response, body, items)
            items.put(None)
        except VLLMError as error:
            items.put(error)
        except (httpx.HTTPError, TimeoutError, OSError) as error:
            items.put(self._failed(error))
        except asyncio.CancelledError:
            items.put(VLLMError("The request was aborted.", is_down=False))
            raise
        except Exception as error:
            items.put(self._failed(error))

    async def _read_events(
        self, response: httpx.Response, body: Mapping[str, Any], items: queue.Queue[dict[str, Any] | VLLMError | None]
    ) -> None:
        """Put a stream's events, up to its end, or to as many bytes as its tokens may take."""
        line_nbytes = REPLY_NBYTES + ID_NBYTES * len(body["prompt"])
        token_nbytes = TOKEN_NBYTES + LOGPROB_NBYTES * (body.get("logprobs") or 0)
        left, pending, seen = line_nbytes + token_nbytes * body["max_tokens"], bytearray(), 0
        async for piece in response.aiter_raw():
            left -= len(piece)
            pending += piece
            while (end := pending.find(b"\n", seen)) >= 0:
                line = bytes(pending[:end])
                del pending[: end + 1]
                seen = 0
                event = self._event(line)
                if event == END_EVENT:
                    return
                if isinstance(event, dict):
                    items.put(event)
            seen = len(pending)
            if left < 0 or seen > line_nbytes:
                raise self._strange("more than its tokens can take")

    def _event(self, line: bytes) -> dict[str, Any] | str | None:
        """Return the event of a line of a stream; None for a line without one."""
        name, _, value = line.rstrip(b"\r").partition(b":")
        if name != b"data":
            return None
        if value.strip() == END_EVENT.encode():
            return END_EVENT
        found = self._parsed(value)
        if found is None:
            raise self._strange("an event that is no JSON object")
        if found.get("error"):
            raise VLLMError(f"The vLLM server at {self.root} ended an answer: {said(found)}.")
        return found

    async def _read(self, response: httpx.Response, max_nbytes: int) -> bytes:
        found = bytearray()
        async for piece in response.aiter_raw():
            found += piece
            if len(found) > max_nbytes:
                raise self._strange(f"a reply of more than {max_nbytes:,} bytes")
        return bytes(found)

    # inside

    def _wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result()

    def _parsed(self, raw: bytes) -> dict[str, Any] | None:
        """Return the JSON object that bytes hold; None where they hold something else."""
        try:
            found = json.loads(raw.decode("utf-8"))
        except (ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) else None

    def _refused(self, status: int, found: Mapping[str, Any] | None) -> VLLMError:
        if status in (401, 403):
            return VLLMError(
                f"Wanted an answer of the vLLM server at {self.root}, found {status}: it wants another API key. Set "
                "RAGFUSE_DECODE_KEY to it.",
                True,
                status,
            )
        message = f"Wanted an answer of the vLLM server at {self.root}, found {status}: {said(found)}."
        return VLLMError(message, status >= 500 or status < 400, status)

    def _failed(self, error: Exception) -> VLLMError:
        late = isinstance(error, TimeoutError | httpx.TimeoutException)
        why = f"nothing within {self._timeout_s:g} s" if late else shortened(str(error) or type(error).__name__)
        return VLLMError(f"Wanted an answer of the vLLM server at {self.root}, found none: {why}. Start it.")

    def _strange(self, found: str) -> VLLMError:
        return VLLMError(
            f"Wanted answers as vLLM gives them at {self.root}, found {found}. Set --decode-at to a vLLM server."
        )


def has_ended(event: Mapping[str, Any]) -> bool:
    """Return whether an event tells why its answer ended."""
    choices = event.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return isinstance(first, dict) and first.get("finish_reason") is not None


def said(found: Mapping[str, Any] | None) -> str:
    """Return a server's own words for an error, shortened."""
    error = (found or {}).get("error", found)
    message = error.get("message") if isinstance(error, Mapping) else error
    return shortened(message if isinstance(message, str) else "no reason").removesuffix(".")


def shortened(text: str) -> str:
    """Return a text of a server on one line, without control characters, at most `SHOWN_CHARS` long."""
    clean = " ".join("".join(sign if sign.isprintable() else " " for sign in text[: 4 * SHOWN_CHARS]).split())
    return clean if len(clean) <= SHOWN_CHARS else f"{clean[:SHOWN_CHARS]}..."
