"""Continuous batching: concurrent requests on one model share the forward passes of decoding.

Every request runs transformers' `generate` in its own thread with its own cache. The `forward`
that `generate` calls posts one step to the `Batcher` and waits. A worker thread runs one forward
pass over all posted steps. Each step attends to the KV of its own request. That KV is neither
copied nor padded, so requests can join and leave between any two tokens. The model's lock is
released after each step, so prefills can run between steps.

If only one request is decoding, each step runs in the thread of that request, with the same
attention function as shared steps. Some steps cannot be shared and run the model's plain `forward`:
steps of several tokens, steps that return hidden states, and all steps of a model that does not
take ragfuse's attention function.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from ragfuse.fuse.attend import Ragged
from ragfuse.hf.cache import CACHE, JointCache, RowCache
from ragfuse.hf.hooks import KVTransformed, Wiring, attending
from ragfuse.process.jobs import release_pool, start_thread, use_threads


class FairLock:
    """A re-entrant lock that prefers short steps (decoding a token) without starving long steps.

    Use `with lock` for a long step, and `with lock.short()` for a short step.
    """

    def __init__(self) -> None:
        self._owner: int | None = None
        self._depth = 0
        self._mutex = threading.Lock()
        self._turns = {is_short: deque[tuple[int, threading.Lock]]() for is_short in (False, True)}
        # True if the owner's step is short; number of short steps before the next long step
        self._is_short, self._n_first = False, 0

    @property
    def is_mine(self) -> bool:
        """True if the calling thread holds the lock."""
        return self._owner == threading.get_ident()

    @property
    def waiting(self) -> int:
        """Number of threads that wait for the lock."""
        with self._mutex:
            return sum(map(len, self._turns.values()))

    def acquire(self, is_short: bool = False) -> None:
        """Acquire the lock, blocking until the lock is free.

        Args:
            is_short: True for a short step, such as decoding one token.
        """
        me = threading.get_ident()
        with self._mutex:
            if self._owner is None:
                self._owner, self._is_short = me, is_short
            if self._owner == me:
                self._depth += 1
                return
            turn = me, threading.Lock()
            turn[1].acquire()
            self._turns[is_short].append(turn)
        try:
            release_pool()
            turn[1].acquire()  # released by `_hand_on`
        except BaseException:  # Ctrl-C
            with self._mutex:
                if turn in self._turns[is_short]:
                    self._turns[is_short].remove(turn)
                else:
                    self._hand_on()
            raise

    def release(self) -> None:
        """Undo one `acquire`. The lock is free once each `acquire` has been undone."""
        with self._mutex:
            self._depth -= 1
            if not self._depth:
                self._hand_on()

    def _hand_on(self) -> None:
        """Give the lock to a waiting thread. After a long step, waiting short steps run first."""
        short, long = self._turns[True], self._turns[False]
        if not self._is_short:
            self._n_first = len(short)
        self._is_short = bool(short) and (self._n_first > 0 or not long)
        self._n_first -= self._is_short
        turns = short if self._is_short else long
        self._owner, gate = turns.popleft() if turns else (None, None)
        self._depth = int(gate is not None)
        if gate is not None:
            gate.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    @contextmanager
    def short(self) -> Iterator[None]:
        """Hold the lock for a short step."""
        self.acquire(is_short=True)
        try:
            yield
        finally:
            self.release()


T = TypeVar("T")


class Seeded(TorchFunctionMode):
    """A context manager: in this thread, `torch.multinomial` samples with a given seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `func`, with the seeded generator if `func` is `torch.multinomial`."""
        options = kwargs or {}
        if func is torch.multinomial:
            device = args[0].device
            if device not in self._generators:
                self._generators[device] = torch.Generator(device).manual_seed(self._seed)
            options = {**options, "generator": self._generators[device]}
        return func(*args, **options)


def undrawn(do: Callable[[], T]) -> T:
    """Call a function that draws no random numbers, without the overhead of `Seeded`."""
    if not has_torch_function((do,)):
        return do()
    return handle_torch_function(do, ())


log = logging.getLogger("ragfuse.hf")

PATIENCE_S = 0.02
"""Seconds that a shared step waits for requests that are still sampling a token."""
FAILURES = 3
"""Sharing is disabled after this many steps that succeed only with the model's own attention."""
AS_GIVEN = ("use_cache", "return_dict", "logits_to_keep")
SHARED = frozenset({"input_ids", "position_ids", CACHE, "attention_mask", *AS_GIVEN})
"""Arguments that a shared forward pass supports. A step that sets any other argument runs alone."""

Forward = Callable[..., Any]


@dataclass(eq=False)
class Member:
    """A request in the decoding phase.

    Args:
        cache: KV of the request. None if the model's state is not KV per token.
        wiring: The hooks of ragfuse's attention. None means that the request's steps run alone.
        is_late: True if the request missed a shared step and has posted no step since. Shared steps
            do not wait for late requests.
        is_posted: True while a posted step of the request waits for a forward pass.
        threads: `torch.get_num_threads()` before decoding, which is restored after decoding.
    """

    cache: RowCache | None
    wiring: Wiring | None
    is_late: bool = False
    is_posted: bool = False
    threads: int = field(default_factory=torch.get_num_threads)


@dataclass(eq=False)
class Step:
    """One request's forward pass over one token (ids int64 [1, 1]). Steps may be batched."""

    member: Member
    arguments: Mapping[str, Any]
    forward: Forward
    done: threading.Event = field(default_factory=threading.Event)
    output: Any = None
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.cache = cast(RowCache, self.member.cache)
        self.length = self.cache.length

    def run(self) -> None:
        """Run this step alone, and store the step's output or error."""
        try:
            self.output = self.forward(**self.arguments)
        except BaseException as error:
            self.error = error

    def take(self) -> Any:
        """Wait until the step is done; return the output or raise the error."""
        if not self.done.is_set():  # another thread computes; this thread only samples
            release_pool()
            use_threads(1)
            self.done.wait()
        if self.error is not None:
            raise self.error
        return self.output


class Batcher:
    """Schedules all decoding steps of one model, and holds the model's lock per step. Thread-safe.

    A worker thread runs shared steps, and exists only while requests share steps.

    Attributes:
        steps: Number of shared forward passes so far.
        patience_s: Seconds that a shared step waits for requests that are sampling. If the previous
            step took longer, the wait is as long as that step.
    """

    def __init__(self, model: PreTrainedModel, lock: FairLock) -> None:
        self.steps, self.patience_s = 0, PATIENCE_S
        self._model, self._lock = model, lock
        self._failures = 0
        self._since_s = self._took_s = 0.0
        self._changed = threading.Condition()
        self._members: set[Member] = set()
        self._posted: list[Step] = []
        self._thread: threading.Thread | None = None

    @property
    def active(self) -> int:
        """Number of requests in the decoding phase."""
        with self._changed:
            return len(self._members)

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request is being decoded. Background work calls this before it starts.

        Returns:
            True if no request is being decoded, False after `timeout_s`.
        """
        with self._changed:
            return self._changed.wait_for(lambda: not self._members, timeout_s)

    @contextmanager
    def member(self, cache: RowCache | None, wiring: Wiring | None) -> Iterator[Member]:
        """Register a request as decoding while the `with` block runs."""
        member = Member(cache, wiring)
        with self._changed:
            self._members.add(member)
        try:
            yield member
        finally:
            use_threads(member.threads)
            with self._changed:
                self._members.discard(member)
                self._changed.notify_all()

    def step(self, member: Member | None, forward: Forward, arguments: Mapping[str, Any]) -> Any:
        """Run one forward pass, batched with other requests' steps if possible; return its output.

        Args:
            member: The request. None means that the step runs alone.
            forward: The model's own `forward`, for a step that runs alone.
            arguments: Keyword arguments of `forward`.
        """
        if member is not None:
            use_threads(member.threads)
        if member is None or self._failures >= FAILURES or not _can_share(member, arguments):
            with self._lock.short(), self._model._optimize_model_for_decode():
                return undrawn(partial(forward, **arguments))
        step = Step(member, arguments, forward)
        if self._lock.is_mine or not self._post(step):
            with self._lock.short():
                undrawn(partial(self._run, [step]))
            step.done.set()
        return step.take()

    def _post(self, step: Step) -> bool:
        """Post a step for a shared forward pass; return False if no other request is decoding."""
        with self._changed:
            if len(self._members) == 1:
                return False
            if not self._posted:
                self._since_s = time.perf_counter()
            self._posted.append(step)
            step.member.is_posted, step.member.is_late = True, False
            if self._thread is None:
                self._thread = start_thread("decode", self._work)
            elif len(self._posted) == 1 or not self._missing:
                self._changed.notify_all()
            return True

    # the worker thread

    def _work(self) -> None:
        while self._is_due():
            with self._lock.short():
                began, steps = time.perf_counter(), self._take_posted()
                try:
                    self._run(steps)
                # not caused by one request: raised in all requests, so that no thread waits forever
                except BaseException as error:
                    for step in steps:
                        step.error = step.error or error
            with self._changed:
                self._since_s = time.perf_counter()
                self._took_s = self._since_s - began
            for step in steps:
                step.done.set()

    def _is_due(self) -> bool:
        """Wait until the next shared step is due; return False if no request is left."""
        with self._changed:
            while self._members or self._posted:
                wait_s = None
                if self._posted:
                    wait_s = (
                        self._since_s + max(self.patience_s, self._took_s) - time.perf_counter()
                    )
                    if not self._missing or wait_s <= 0:
                        return True
                self._changed.wait(wait_s)
            self._thread = None
            return False

    @property
    def _missing(self) -> bool:
        return any(not member.is_posted and not member.is_late for member in self._members)

    def _take_posted(self) -> list[Step]:
        """Take all posted steps; mark requests without a posted step as late."""
        with self._changed:
            steps, self._posted = self._posted, []
            for member in self._members:
                member.is_late = not member.is_posted
            for step in steps:
                step.member.is_posted = False
            return steps

    def _run(self, steps: Sequence[Step]) -> None:
        """Run steps in one forward pass. If it fails, run each alone with the model's attention."""
        with torch.no_grad(), self._model._optimize_model_for_decode():
            try:
                self._share(steps)
                return
            except KVTransformed:
                self._failures = FAILURES
            except Exception as error:
                log.warning(
                    "A decoding step of %d requests failed with ragfuse's attention. Each request"
                    " repeats the step with the model's own attention, which is slower. Cause: %s",
                    len(steps),
                    error,
                )
                log.debug("Where it failed", exc_info=True)
            for step in steps:
                step.cache.length = step.length
                step.run()
            self._failures += all(step.error is None for step in steps)

    def _share(self, steps: Sequence[Step]) -> None:
        """Run one forward pass over all steps, and store the logits [1, 1, V] of each step."""
        one, caches, ragged = steps[0].arguments, [step.cache for step in steps], Ragged()
        arguments = {name: one[name] for name in AS_GIVEN if name in one}
        for name in ("input_ids", "position_ids"):
            if one.get(name) is not None:
                arguments[name] = torch.cat([step.arguments[name] for step in steps])
        with attending(cast(Wiring, steps[0].member.wiring), ragged):
            out = self._model.forward(**arguments, **{CACHE: JointCache(caches, ragged)})
        for step, logits in zip(steps, torch.split(out.logits, 1), strict=True):
            step.output = CausalLMOutputWithPast(logits=logits, **{CACHE: step.cache})
        self.steps += len(steps) > 1


def _can_share(member: Member, arguments: Mapping[str, Any]) -> bool:
    """Return True if a forward pass computes just one token and uses the member's own cache."""
    ids = arguments.get("input_ids")
    if member.wiring is None or arguments.get(CACHE) is not member.cache:
        return False
    if not isinstance(ids, Tensor) or ids.shape[1] != 1:
        return False
    others = (value for name, value in arguments.items() if name not in SHARED)
    return all(value is None or value is False for value in others)
