"""One step over many requests: what is decoded at the same time on one model is computed together.

Every request runs transformers' own `generate` in a thread of its own, with its own cache. What `generate` takes for
the model's forward posts one step here and waits; a thread runs one forward of the model over all posted ones, each
over its own KV, of which nothing is copied or padded where the family takes an attention of ours. So a request joins
and leaves between two tokens. The model's lock is held for each step alone: prefills get in between.

What is decoded alone takes the model's plain forward in its own thread, as ever. So does what cannot be shared: a
state that is no KV per token, several rows at a time, hidden states that are asked for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from ragfuse.fuse.attend import Ragged
from ragfuse.hf.cache import JointCache, RowCache
from ragfuse.hf.hooks import Remade, Wiring, attending
from ragfuse.hf.lock import FairLock
from ragfuse.hf.seed import undrawn
from ragfuse.process.fork import at_fork

log = logging.getLogger("ragfuse.hf")

PATIENCE_S = 0.02
"""Most requests choose a token in less; waiting so long for one costs the others little."""
FAILURES = 3
"""Steps that failed together and not one by one, after which this model's steps are shared no more."""
NEEDED = frozenset({"input_ids", "position_ids", "past_key_values", "attention_mask", "use_cache", "return_dict"})
HARMLESS = frozenset({"logits_to_keep"})
"""Arguments of a forward that a shared one makes for all; any other that says something is for its request alone."""

Forward = Callable[..., Any]


@dataclass(eq=False)
class Member:
    """A request that is being decoded. wiring: None where its family attends by itself, and KV is padded for a step.

    is_late: it let others wait, so nobody waits for it until it is there again. is_posted: it waits for a step.
    """

    cache: RowCache
    wiring: Wiring | None
    is_late: bool = False
    is_posted: bool = False


@dataclass(eq=False)
class Step:
    """One forward of one request, int64 [B, 1], that may be shared."""

    member: Member
    arguments: Mapping[str, Any]
    forward: Forward
    done: threading.Event = field(default_factory=threading.Event)
    output: Any = None
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.length = self.member.cache.length

    @property
    def ids(self) -> Tensor:
        """int64 [B, 1]."""
        ids: Tensor = self.arguments["input_ids"]
        return ids

    def run(self) -> None:
        """Alone; what goes wrong is its own."""
        try:
            self.output = self.forward(**self.arguments)
        except BaseException as error:
            self.error = error

    def take(self) -> Any:
        """What came of it, once it is done."""
        self.done.wait()
        if self.error is not None:
            raise self.error
        return self.output


class Batcher:
    """The steps of all who decode on one model, under its lock. Thread-safe.

    steps, rows: forwards so far that were shared, and rows in them. patience_s: seconds that a step waits for a request
    that is choosing its token, or as long as the last step took, if that is more. Its thread is there
    while requests share steps.
    """

    def __init__(self, model: PreTrainedModel, lock: FairLock) -> None:
        self.steps, self.rows, self.patience_s = 0, 0, PATIENCE_S
        self._model, self._lock = model, lock
        self._failures, self._pads = 0, False
        self._since_s = self._took_s = 0.0
        self.renew()
        at_fork(self)

    def renew(self) -> None:
        """Nobody decodes: whoever did is a thread of the process that was forked."""
        self._changed = threading.Condition()
        self._members: set[Member] = set()
        self._alone = 0
        self._posted: list[Step] = []
        self._thread: threading.Thread | None = None

    @property
    def active(self) -> int:
        """Requests that are being decoded now."""
        with self._changed:
            return len(self._members) + self._alone

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing is decoded; False if that took too long. For what is in no hurry."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._members and not self._alone, timeout_s)

    @contextmanager
    def member(self, cache: RowCache | None, wiring: Wiring | None) -> Iterator[Member | None]:
        """A request while it is decoded; None for one that cannot share a step."""
        member = Member(cache, wiring) if cache is not None else None
        with self._changed:
            self._alone += member is None
            if member is not None:
                self._members.add(member)
        try:
            yield member
        finally:
            with self._changed:
                self._alone -= member is None
                if member is not None:
                    self._members.discard(member)
                self._changed.notify_all()

    def step(self, member: Member | None, forward: Forward, arguments: Mapping[str, Any]) -> Any:
        """What the forward gives: computed with what others ask for now where both can, else alone."""
        if member is not None and not self._lock.is_mine and _can_share(member, arguments):
            step = self._post(Step(member, arguments, forward))
            if step is not None:
                return step.take()
        with self._lock, self._model._optimize_model_for_decode():
            return undrawn(partial(forward, **arguments))

    def _post(self, step: Step) -> Step | None:
        """Let it be computed with others; None where there are none."""
        with self._changed:
            if len(self._members) == 1 or self._failures >= FAILURES:
                return None
            if not self._posted:
                self._since_s = time.perf_counter()
            self._posted.append(step)
            step.member.is_posted, step.member.is_late = True, False
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="ragfuse-decode", daemon=True)
                self._thread.start()
            elif len(self._posted) == 1 or not self._missing:
                self._changed.notify_all()
            return step

    # the thread

    def _work(self) -> None:
        while self._is_due():
            with self._lock:
                began, steps = time.perf_counter(), self._taken()
                try:
                    self._run(steps)
                except BaseException as error:  # of nobody in particular: all shall hear of it, and none wait on
                    _fail(steps, error)
            with self._changed:
                self._since_s = time.perf_counter()
                self._took_s = self._since_s - began
            for step in steps:
                step.done.set()

    def _is_due(self) -> bool:
        """Wait for the next step; False when nobody is left, and the thread is gone."""
        with self._changed:
            while self._members or self._posted:
                left = None
                if self._posted:
                    left = self._since_s + max(self.patience_s, self._took_s) - time.perf_counter()
                    if not self._missing or left <= 0:
                        return True
                self._changed.wait(left)
            self._thread = None
            return False

    @property
    def _missing(self) -> bool:
        """Whether a request is waited for."""
        return any(not member.is_posted and not member.is_late for member in self._members)

    def _taken(self) -> list[Step]:
        """All that wait now; who does not is late."""
        with self._changed:
            steps, self._posted = self._posted, []
            for member in self._members:
                member.is_late = not member.is_posted
            for step in steps:
                step.member.is_posted = False
            return steps

    def _run(self, steps: Sequence[Step]) -> None:
        """All of them, together where they are several; what fails together is tried one by one."""
        with torch.no_grad(), self._model._optimize_model_for_decode():
            if len(steps) == 1 and not steps[0].member.cache.is_apart:
                steps[0].run()
                return
            try:
                self._share(steps)
            except Exception as error:
                log.warning("A step of %d requests failed and is done one by one: %s", len(steps), error)
                log.debug("Where it failed", exc_info=True)
                _take_back(steps)
                for step in steps:
                    step.run()
                self._failures += all(step.error is None for step in steps)

    def _share(self, steps: Sequence[Step]) -> None:
        ragged = Ragged([step.ids.shape[0] for step in steps])
        try:
            logits = self._logits(steps, ragged)
        except Remade:
            self._pads = True
            _take_back(steps)
            logits = self._logits(steps, ragged)
        for step, some in zip(steps, torch.split(logits, ragged.sizes), strict=True):
            step.output = CausalLMOutputWithPast(logits=some, past_key_values=step.member.cache)
        self.steps, self.rows = self.steps + 1, self.rows + sum(ragged.sizes)

    def _logits(self, steps: Sequence[Step], ragged: Ragged) -> Tensor:
        """Of one forward: [sum B, 1, V]."""
        wiring = None if self._pads else steps[0].member.wiring
        caches, arguments = [step.member.cache for step in steps], self._arguments(steps)
        arguments["past_key_values"] = JointCache(caches, ragged, is_padded=wiring is None)
        if wiring is None:
            arguments["attention_mask"] = _padding(caches, ragged.sizes, self._model.device)
        with attending(wiring, ragged) if wiring is not None else nullcontext():
            logits: Tensor = self._model.forward(**arguments).logits
        return logits

    def _arguments(self, steps: Sequence[Step]) -> dict[str, Any]:
        """What all of them are asked for, as one batch."""
        one = steps[0].arguments
        arguments = {name: one[name] for name in ("use_cache", "return_dict", "logits_to_keep") if name in one}
        for name in ("input_ids", "position_ids"):
            if one.get(name) is not None:
                arguments[name] = torch.cat([step.arguments[name] for step in steps])
        return arguments


def _can_share(member: Member, arguments: Mapping[str, Any]) -> bool:
    """Whether a forward is one new token over the member's own cache, and nothing else is asked for."""
    ids = arguments.get("input_ids")
    if arguments.get("past_key_values") is not member.cache or not isinstance(ids, Tensor) or ids.shape[1] != 1:
        return False
    others = (value for name, value in arguments.items() if name not in NEEDED and name not in HARMLESS)
    return all(value is None or value is False for value in others)


def _fail(steps: Sequence[Step], error: BaseException) -> None:
    for step in steps:
        step.error = step.error or error


def _take_back(steps: Sequence[Step]) -> None:
    """Let every cache hold what it held before."""
    for step in steps:
        step.member.cache.length = step.length


def _padding(caches: Sequence[RowCache], sizes: Sequence[int], device: torch.device) -> Tensor:
    """Which rows are there, the new ones too: int64 [sum B, longest + 1], zeros before the shorter ones."""
    longest = max(cache.length for cache in caches)
    mask = torch.ones(sum(sizes), longest + 1, dtype=torch.int64, device=device)
    for rows, cache in zip(torch.split(mask, list(sizes)), caches, strict=True):
        rows[:, : longest - cache.length] = 0
    return mask
