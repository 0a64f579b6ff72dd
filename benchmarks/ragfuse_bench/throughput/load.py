"""An open loop: requests come when they come, whether the ones before them are answered or not,
over HTTP.

What is heard of each is kept; what it means is told in `run`.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from statistics import mean, quantiles
from typing import Any

SKIPPED = 6
"""Of so many requests the first one is not counted, as a share: a sixth of the load warms up."""
PATH = "/v1/chat/completions"


@dataclass(frozen=True)
class Heard:
    """One request. due_s: when it came, from the load's beginning. first_s, whole_s: from then
    until its first token and its last one; None, with what went wrong, where it was lost. tokens:
    of the answer.
    """

    due_s: float
    first_s: float | None = None
    whole_s: float | None = None
    tokens: int = 0
    wrong: str = ""


def arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """When requests come that are independent of each other, `rate` a second: a Poisson process."""
    chance, at, found = random.Random(seed), 0.0, list[float]()
    while (at := at + chance.expovariate(rate)) < seconds:
        found.append(at)
    return found


def offer(
    place: tuple[str, int],
    bodies: Sequence[Mapping[str, Any]],
    due: Sequence[float],
    patience_s: float,
    heard: Callable[[Heard], object] = lambda one: None,
) -> list[Heard]:
    """Send each body when it is due, and wait for all answers; in the order in which they were
    sent.

    place: the server's host and port. heard: called once for each, from its own thread.
    """
    found: list[Heard | None] = [None] * len(bodies)
    began_s = time.monotonic()

    def one(at: int) -> None:
        found[at] = answer = ask(place, bodies[at], began_s + due[at], patience_s, due[at])
        heard(answer)

    threads = [
        threading.Thread(target=one, args=(at,), name="bench-client", daemon=True)
        for at in range(len(bodies))
    ]
    for thread, at_s in zip(threads, due, strict=True):
        time.sleep(max(0.0, began_s + at_s - time.monotonic()))
        thread.start()
    for thread in threads:
        thread.join()
    return [each for each in found if each is not None]


def one_by_one(
    place: tuple[str, int],
    bodies: Sequence[Mapping[str, Any]],
    patience_s: float,
    together: int = 1,
    path: str = PATH,
) -> list[Heard]:
    """Send each body as soon as an answer has come, with so many at a time."""
    found: list[Heard] = []
    left = list(reversed(bodies))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                if not left:
                    return
                body = left.pop()
            answer = ask(place, body, time.monotonic(), patience_s, path=path)
            with lock:
                found.append(answer)

    threads = [
        threading.Thread(target=work, name="bench-client", daemon=True) for _ in range(together)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def ask(
    place: tuple[str, int],
    body: Mapping[str, Any],
    since_s: float,
    patience_s: float,
    due_s: float = 0.0,
    path: str = PATH,
) -> Heard:
    """Send a request and read its answer as it comes; seconds count from `since_s` on, by the
    monotonic clock.
    """
    line = HTTPConnection(*place, timeout=patience_s)
    told = {**body, "stream": True, "stream_options": {"include_usage": True}}
    first_s: float | None = None
    tokens, ended = 0, False
    try:
        line.request("POST", path, json.dumps(told).encode(), {"content-type": "application/json"})
        answer = line.getresponse()
        if answer.status != 200:
            return Heard(due_s, wrong=f"{answer.status}: {answer.read(300)!r}")
        while text := answer.readline():
            if not text.startswith(b"data: "):
                continue
            first_s = time.monotonic() - since_s if first_s is None else first_s
            ended = text.startswith(b"data: [DONE]")
            event = {} if ended else json.loads(text[6:])
            if "error" in event:
                return Heard(due_s, wrong=str(event["error"])[:300])
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    except (OSError, HTTPException, ValueError) as error:
        return Heard(due_s, wrong=f"{type(error).__name__}: {error}")
    finally:
        line.close()
    whole_s = time.monotonic() - since_s
    return (
        Heard(due_s, first_s, whole_s, tokens)
        if ended
        else Heard(due_s, wrong="the answer broke off")
    )


def counted(found: Sequence[Heard]) -> list[Heard]:
    """Without the first sixth of them."""
    return list(found[-(-len(found) // SKIPPED) :])


def summed(rate: float, found: Sequence[Heard]) -> dict[str, Any]:
    """A load in numbers: mean and 95th percentile of the time to the first token, tokens a second,
    what was lost.
    """
    first = [each.first_s for each in counted(found) if each.first_s is not None]
    ends = [each.due_s + each.whole_s for each in found if each.whole_s is not None]
    written = sum(each.tokens for each in found)
    return {
        "rate": rate,
        "n": len(found),
        "lost": sum(each.first_s is None for each in found),
        "mean_s": mean(first) if first else None,
        "p95_s": percentile(first, 95) if first else None,
        "tokens_per_s": written / max(ends) if ends else 0.0,
        "wrong": sorted({each.wrong for each in found if each.wrong})[:5],
    }


def percentile(values: Sequence[float], percent: int) -> float:
    """The value that so many percent of them do not exceed, between neighbours as if values went on
    evenly.
    """
    return (
        quantiles(values, n=100, method="inclusive")[percent - 1] if len(values) > 1 else values[0]
    )
