"""A server under load: sixteen clients of four tenants, cancelled streams, a large body, a slow
client, and SIGTERM in the middle.
"""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from ragfuse.types.prompt import OVERLONG
from tests.kits.serve import (
    CHAT,
    PATIENCE_S,
    process,
    raw,
    refused,
    said,
    settings_of,
    wait_for,
    with_documents,
)

KEYS = tuple(f"key-of-the-tenant-number-{n}" for n in range(4))


def test_under_load_no_answer_is_lost_and_no_tenant_meets_another(
    tiny_path: Path, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("\n".join(KEYS))
    stopping = threading.Event()
    outcomes = Counter[str]()
    settings = settings_of(tiny_path, tmp_path, max_tokens=40)
    grace = {"RAGFUSE_SERVE_GRACE_S": "300", "RAGFUSE_SERVE_PATIENCE_S": "3"}

    with process(settings, "--api-keys-file", str(keys), **grace) as (run, root):
        told = {"authorization": f"Bearer {KEYS[0]}"}
        model = httpx.get(f"{root}/v1/models", headers=told).json()["data"][0]["id"]

        @contextmanager
        def until_stopping() -> Iterator[None]:
            """Let a connection be refused once the server has been told to end."""
            try:
                yield
            except httpx.TransportError:
                assert stopping.is_set()

        def ask(key: str, **fields: Any) -> httpx.Response:
            body = {"model": model, "messages": [said()], **fields}
            bearer = {"authorization": f"Bearer {key}"}
            return httpx.post(f"{root}{CHAT}", json=body, headers=bearer, timeout=PATIENCE_S)

        def stream(key: str, cancelled: bool) -> str:
            body = {"model": model, "messages": [said()], "stream": True, **with_documents()}
            bearer = {"authorization": f"Bearer {key}"}
            with httpx.stream(
                "POST", f"{root}{CHAT}", json=body, headers=bearer, timeout=PATIENCE_S
            ) as answer:
                if answer.status_code != 200:
                    return str(answer.status_code)
                lines = answer.iter_lines()
                try:
                    if cancelled:
                        next(line for line in lines if '"content": ' in line)
                        return "cancelled"
                    return "whole" if "data: [DONE]" in list(lines) else "cut"
                except httpx.TransportError:
                    return "cut"

        def client(number: int) -> None:
            turn = number
            while not stopping.is_set():
                turn += 1
                with until_stopping():
                    outcomes[stream(KEYS[number % 3], cancelled=turn % 3 == 0)] += 1

        def watch() -> None:
            while not stopping.wait(0.05):
                with until_stopping():
                    health = httpx.get(f"{root}/health", timeout=PATIENCE_S)
                    assert health.status_code == 200

        with ThreadPoolExecutor(18) as pool:
            work = [pool.submit(client, number) for number in range(15)] + [pool.submit(watch)]
            try:
                wait_for(lambda: outcomes["whole"] >= 15 and outcomes["cancelled"] >= 8)
                large = ask(KEYS[0], messages=[said("ship " * 800_000)])
                assert refused(large)["code"] == OVERLONG
                newcomer = ask(KEYS[3], **with_documents()).json()["usage"]
                assert newcomer["prompt_tokens_details"]["cached_tokens"] == 0
                with raw(int(root.rpartition(":")[2])) as slow:
                    slow.sendall(
                        f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEYS[0]}"
                        "\r\ncontent-type: application/json\r\ncontent-length: 90\r\n\r\n{".encode()
                    )
                    assert b" 408 " in slow.recv(1 << 16).splitlines()[0]
            finally:
                stopping.set()
                run.send_signal(signal.SIGTERM)
            for each in work:
                each.result()
        assert run.wait(300) == 0
    assert set(outcomes) <= {"whole", "cancelled", "503"}
