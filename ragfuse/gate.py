"""The quality gate: whether blending may be used with a model unless told otherwise, and what is said of it.

`verify` finds out whether fusing is exact where it must be, `ragfuse calibrate` whether answers stay close to full
prefill's; both verdicts are kept in the model's profile. A model of which nothing is known runs at the conservative
default, and that is said once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from typing import TypeVar

from ragfuse.errors import StoreError
from ragfuse.fork import ForkLock, at_fork
from ragfuse.models import embedded
from ragfuse.plan.controller import AUTO, MEASURED
from ragfuse.profiles import PROFILE_VERSION, ModelProfile
from ragfuse.sharing import note
from ragfuse.store import Book
from ragfuse.store.breaker import Breaker, BreakerOpen

T = TypeVar("T")
log = logging.getLogger("ragfuse")

COOL_DOWN_S = 10.0
"""Seconds for which a book that could not be read or written is left alone."""
WAIT_S = 3.0
"""Seconds that an answer waits, at most, for another process that is writing the book."""

INEXACT = "verify found that fusing is not exact with this model where it must be"
UNSAFE = "calibrate found no policy whose answers stay close to full prefill's with this model"


def refusal_of(profile: ModelProfile, policy: str) -> str:
    """Why a prompt is answered by full prefill; "" where it may be blended: always by a policy that was asked for."""
    if profile.refusal or policy != AUTO:
        return profile.refusal
    return INEXACT if profile.verified is False else UNSAFE if profile.safe is False else ""


def as_shipped(profile: ModelProfile, name: str) -> ModelProfile:
    """The profile of the model `name` with the choice that an embedded one comes with."""
    ours = embedded(name)
    return profile.calibrated(True, *ours.choice) if ours is not None and ours.choice else profile


class Booked:
    """The store's book, asked by who goes on without it: an answer is worth more than a note of it.

    Called, it gives `otherwise` where there is no book, and where the book cannot be read or written. That is counted
    in `failures`, said once in the log, and named by every answer that met it (`sharing.noting`); the book is then left
    alone for `COOL_DOWN_S`, and a lock on it is waited for no longer than `WAIT_S`. `strictly` raises StoreError
    instead: for what somebody asked the book for by itself. Threads may share it.
    """

    def __init__(self, book: Book | None) -> None:
        self._book, self._lock, self.failures, self._why = book, ForkLock(), 0, ""
        name = f"The book of {book.path}" if book is not None else ""
        self._breaker = Breaker(name, (StoreError,), cool_down_s=COOL_DOWN_S, said=_cause)
        at_fork(self)

    def renew(self) -> None:
        """Count from nothing."""
        self.failures = 0

    def __call__(self, use: Callable[[Book], T], otherwise: T) -> T:
        """What `use` makes of the book; `otherwise` where it cannot be asked."""
        answered, found = self.asked(use)
        return found if answered else otherwise  # type: ignore[return-value]

    def asked(self, use: Callable[[Book], T]) -> tuple[bool, T | None]:
        """Whether the book answered, and what `use` makes of it, None where it did not."""
        book = self._book
        if book is None:
            return False, None
        try:
            with self._breaker.guard():
                try:
                    with book.hurried(WAIT_S):
                        return True, use(book)
                except StoreError:
                    if self._book is book:
                        raise
                    return False, None  # closed in this very moment
        except StoreError as error:
            self._why = f"{self._breaker.name}: {_cause(error)}"
        except BreakerOpen:
            pass
        with self._lock:
            self.failures += 1
        note(self._why)
        return False, None

    def strictly(self, use: Callable[[Book], T], otherwise: T) -> T:
        """What `use` makes of the book; `otherwise` without one. StoreError where it cannot be read or written."""
        book = self._book
        if book is None:
            return otherwise
        try:
            return use(book)
        except StoreError:
            if self._book is book:
                raise
            return otherwise  # closed in this very moment

    def close(self) -> None:
        """Let go of the file: from now on there is no book."""
        book, self._book = self._book, None
        if book is not None:
            book.close()


def _cause(error: Exception) -> str:
    """What the system said, without what is to be done where a store cannot be opened."""
    return str(error.__cause__ or error)


class Profiles:
    """Model profiles as one store's book keeps them."""

    def __init__(self, booked: Booked) -> None:
        self._booked = booked

    def get(self, fingerprint: str) -> ModelProfile | None:
        """What was kept of a model; None where nothing was."""
        found = self._booked(lambda book: book.get(_name(fingerprint)), None)
        return ModelProfile.from_dict(found) if found else None

    def probed(self, fingerprint: str) -> ModelProfile | None:
        """The same without what was learned of it on this store: for a model that others share."""
        found = self.get(fingerprint)
        return found.probed if found else None

    def joined(self, own: ModelProfile) -> ModelProfile:
        """What came with a model, and over it what was learned on this store."""
        kept = self.get(own.model)
        if kept is None:
            return own
        return kept if kept.safe is not None else replace(own, verified=kept.verified)

    def judge(self, own: ModelProfile, verified: bool) -> None:
        """Keep what verify says of a model, and nothing else of what came with it."""
        found = self._booked.strictly(lambda book: book.get(_name(own.model)), None)
        kept = ModelProfile.from_dict(found) if found else None
        self.put(replace(kept or own.probed, verified=verified))

    def remember(self, profile: ModelProfile) -> None:
        """Keep what the probe found, unless something is kept."""
        found = profile.probed.as_dict()
        self._booked(lambda book: book.settle(_name(profile.model), found), found)

    def put(self, profile: ModelProfile) -> None:
        """Keep a profile in place of an earlier one; StoreError where the book cannot be written."""
        self._booked.strictly(lambda book: book.put(_name(profile.model), profile.as_dict()), None)


def _name(fingerprint: str) -> str:
    """A profile is only as good as the libraries it was measured with."""
    return f"model-{fingerprint}-{PROFILE_VERSION}-torch-{version('torch')}-transformers-{version('transformers')}"


class Hint:
    """Says once, in the log, that a model is not calibrated, and what to do."""

    def __init__(self) -> None:
        self._lock, self._said = ForkLock(), False

    def give(self, profile: ModelProfile, policy: str, model: str) -> None:
        """Say it if it is so and was not said."""
        with self._lock:
            if self._said or policy != AUTO or profile.choice is not None:
                return
            self._said = True
        name, ratio = MEASURED
        log.warning(
            "%s is not calibrated: %s at %.0f%% is used. Find its own best, and whether blending is safe with it: "
            "ragfuse calibrate --model %s --docs PATH",
            *(model, name, 100 * ratio, model),
        )
