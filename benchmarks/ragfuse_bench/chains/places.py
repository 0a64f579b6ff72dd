"""Where a program is asked, in this process or over a server, and what each of its prompts found in the store."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, Self
from urllib.request import urlopen

from ragfuse_bench.chains.doors import Program, Wording, messages_over
from ragfuse_bench.throughput.served import Serving

from ragfuse.calibration.prompts import NEW_TOKENS
from ragfuse.engine.engine import Engine
from ragfuse.engine.request import Request
from ragfuse.errors import RagFuseError
from ragfuse.settings import Settings
from ragfuse.types.answer import Answer
from ragfuse.types.prompt import Prompt

PATIENCE_S, LOOK_S, LOOKS = 120.0, 0.3, 3
"""How long a server may go on saving after an answer, at most; how often one looks, and how often it must be idle."""
ANSWER_S = 600.0
"""Seconds that a server may take for an answer."""


@dataclass(frozen=True)
class Prompted:
    """One prompt: its ids, what was found of it as (lo, hi, share recomputed), seconds to the first token."""

    ids: tuple[int, ...]
    found: tuple[tuple[int, int, float], ...]
    first_s: float


@dataclass(frozen=True)
class Reply:
    """An answer, and all prompts that it took."""

    text: str
    prompts: tuple[Prompted, ...]

    @property
    def first_s(self) -> float:
        """Seconds to the first tokens of all prompts together."""
        return sum(prompt.first_s for prompt in self.prompts)


class Place(Protocol):
    """A door with its store."""

    def ask(self, question: str, reuse: bool) -> Reply:
        """The answer; without reuse, by full prefill."""
        ...

    def rest(self) -> None:
        """Wait as a person would before the next question: what an answer leaves to be saved is saved."""
        ...


def prompted(ids: Sequence[int], trace: Mapping[str, Any], first_s: float) -> Prompted:
    """What a trace says of a prompt. Rows are recomputed among the chunks that are not exact as they are."""
    hits = [each for each in trace["segments"] if each["hit"]]
    blended = sum(each["n_tokens"] for each in hits if _is_blended(each))
    again = trace["tokens_recomputed"] / blended if blended else 0.0
    found = ((each["start"], each["start"] + each["n_tokens"], again if _is_blended(each) else 0.0) for each in hits)
    return Prompted(tuple(ids), tuple(found), first_s)


def _is_blended(segment: Mapping[str, Any]) -> bool:
    return segment["kind"] == "chunk" and not segment["exact"]


class Recorder(Engine):
    """An engine that keeps what it answered, and to which prompt."""

    def __init__(self, settings: Settings) -> None:
        self._said = list[Prompted]()
        super().__init__(settings)

    def __enter__(self) -> Self:
        return self

    def take(self) -> tuple[Prompted, ...]:
        """All since this was last asked."""
        taken, self._said = tuple(self._said), []
        return taken

    def _run(self, prompt: Prompt, request: Request) -> Answer:
        answer = super()._run(prompt, request)
        self._said.append(prompted(prompt.token_ids, answer.trace.as_dict(), answer.trace.ttft_s))
        return answer


@dataclass(frozen=True)
class Here:
    """A program in this process: over a model of ours, and over one that reuses nothing."""

    engine: Recorder
    ours: Program
    full: Program

    def ask(self, question: str, reuse: bool) -> Reply:
        """The answer, by the one or the other."""
        text = (self.ours if reuse else self.full)(question)
        return Reply(text.strip(), self.engine.take())

    def rest(self) -> None:
        """Let the engine finish."""
        self.engine.flush()


@dataclass(frozen=True)
class There:
    """A server, asked by OpenAI's client with what a retriever found here. words: an engine that only tokenises."""

    server: Serving
    words: Engine
    retriever: Any
    wording: Wording

    @cached_property
    def client(self) -> Any:
        """OpenAI's, as anyone makes it."""
        from openai import OpenAI

        return OpenAI(base_url=f"{self._url}/v1", api_key="none", timeout=ANSWER_S, max_retries=0)

    @cached_property
    def model(self) -> str:
        """What the server calls its model."""
        return str(self.client.models.list().data[0].id)

    def ask(self, question: str, reuse: bool) -> Reply:
        """The answer as it streams; `ragfuse` in the body is a field of this server's, for the comparison alone."""
        found = [document.page_content for document in self.retriever.invoke(question)]
        messages, name = messages_over(question, found, self.wording), self.model
        ids = self.words.prompt([(each["role"], each["content"]) for each in messages]).token_ids
        told = {"extra_body": {"ragfuse": {"reuse": False}}} if not reuse else {}
        began, first_s, said, trace = time.perf_counter(), None, "", None
        stream = self.client.chat.completions.create(
            model=name, messages=messages, max_tokens=NEW_TOKENS["answer"], temperature=0, stream=True, **told
        )
        for event in stream:
            delta = event.choices[0].delta.content if event.choices else ""
            if delta and first_s is None:
                first_s = time.perf_counter() - began
            said += delta or ""
            trace = getattr(event, "ragfuse", None) or trace
        if trace is None or trace["tokens"] != len(ids):
            n_tokens = "none" if trace is None else trace["tokens"]
            raise RagFuseError(f"Wanted a trace of {len(ids)} tokens from the server, found {n_tokens}.")
        whole_s = time.perf_counter() - began
        return Reply(said.strip(), (prompted(ids, trace, first_s or whole_s),))

    def rest(self) -> None:
        """Wait until nothing waits to be encoded, looked at several times."""
        idle, until_s = 0, time.monotonic() + PATIENCE_S
        while idle < LOOKS and time.monotonic() < until_s:
            time.sleep(LOOK_S)
            with urlopen(f"{self._url}/v1/ragfuse/store", timeout=ANSWER_S) as answer:
                idle = 0 if json.load(answer)["waiting_to_be_encoded"] else idle + 1

    @property
    def _url(self) -> str:
        return "http://{}:{}".format(*self.server.place)
