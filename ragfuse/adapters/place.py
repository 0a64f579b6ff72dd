"""Where a framework's model runs (`Place`): in an engine of this process, or on a server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from ragfuse.engine.answer_stream import AnswerStream
from ragfuse.engine.ask import Ask, Question
from ragfuse.errors import InputError
from ragfuse.remote import RemoteEngine
from ragfuse.remote.connection import ServerAddress
from ragfuse.remote.remote_engine import Answerer
from ragfuse.schemas.pml_template import FilledTemplate
from ragfuse.settings import Settings
from ragfuse.types.answer import Answer

PLACE_FIELDS = (
    "model",
    "tokenizer",
    "dtype",
    "device",
    "store",
    "settings",
    "model_kwargs",
    "engine",
    "base_url",
    "max_retries",
)
"""Names of the model's fields that `Place.of_fields` reads, besides the secret `api_key`."""
Prompt = Question | FilledTemplate | Callable[[Answerer], Any]
"""A question, a filled template, or a function from an engine to a question or template."""


@dataclass(frozen=True)
class Place:
    """Where a framework's model runs: an engine in this process, or a server. Copies of the model
    share one `Place`.

    Args:
        settings: The settings of an engine in this process. None means that a server is used.
        address: The address of the server; None without a server.
        given: The engine or client that the caller passed, or the engine made for a loaded model.
        is_loaded: True if the caller passed a loaded model, which another process cannot load.
    """

    settings: Settings | None = None
    address: ServerAddress | None = None
    given: Any = field(default=None, repr=False)
    is_loaded: bool = False

    @classmethod
    def of(
        cls,
        *,
        model: Any = None,
        engine: Any = None,
        base_url: str | None = None,
        api_key: str | None = None,
        max_retries: int | None = None,
        **own: Any,
    ) -> Self:
        """Return the `Place` (where the model runs) described by the fields of a framework's model.

        Args:
            model: Name, folder or file of the model, or a loaded model.
            engine: An `Engine` or a `RemoteEngine`.
            base_url: Address of a server.
            api_key: The server's API key. None means the setting `api_key`.
            max_retries: Maximum retries of a request to the server. None means 2.
            **own: Further fields of an engine in this process: `settings`, the `tokenizer` of a
                loaded model, and the settings `dtype`, `device`, `store` and `model_kwargs`.

        Raises:
            InputError: Fields contradict each other.
        """
        given = {name: value for name, value in own.items() if value}
        if base_url is None and engine is None:
            return cls._in_process(model, given)
        strange = [*given, *([] if isinstance(model, str | None) else ["model"])]
        strange += ["engine"] if base_url is not None and engine is not None else []
        if strange:
            raise InputError(
                f"{strange[0]}= has no effect together with"
                f" {'engine' if base_url is None else 'base_url'}=. Remove {strange[0]}=;"
                f" configure the {'engine' if base_url is None else 'server'} itself instead."
            )
        if base_url is not None:
            key = Settings().api_key if api_key is None else api_key
            retries = 2 if max_retries is None else max_retries
            return cls(address=ServerAddress(base_url, key, model or "", retries))
        found: Any = engine_of(engine)
        if isinstance(found, RemoteEngine):
            return cls(address=found.address, given=found)
        return cls(found.settings, given=found)

    @classmethod
    def of_fields(cls, fields: Mapping[str, Any], **changes: Any) -> Self:
        """Call `Place.of`. Each argument gets the value of the field with the same name."""
        key = fields["api_key"]
        given = {name: fields[name] for name in PLACE_FIELDS}
        return cls.of(**{**given, "api_key": key and key.get_secret_value(), **changes})

    @classmethod
    def _in_process(cls, model: Any, given: dict[str, Any]) -> Self:
        base, tokenizer = given.pop("settings", None) or Settings(), given.pop("tokenizer", None)
        if "model_kwargs" in given:
            given["model_kwargs"] = {**base.model_kwargs, **given["model_kwargs"]}
        is_object = not isinstance(model, str | Path | None)
        if model is not None and not is_object:
            given["model"] = str(model)
        settings = _with(base, given)
        if not is_object and tokenizer is None:
            return cls(settings)
        from ragfuse.engine.engine import Engine  # imports torch

        made = Engine.shared(settings, model if is_object else None, tokenizer=tokenizer)
        return cls(made.settings, given=made, is_loaded=True)

    @property
    def name(self) -> str:
        """The model's name, or "" if the server chooses the model and has not been asked yet."""
        if self.settings is not None:
            return self.settings.model
        return self.engine().name  # type: ignore[union-attr]

    @property
    def hears_retrievers(self) -> bool:
        """True if documents from the framework's retrievers are passed along with a question."""
        return self.settings is None or self.settings.learn != "off"

    @property
    def identity(self) -> dict[str, Any]:
        """The values that determine an answer, besides the options of the call."""
        if self.address is not None:
            return {"base_url": self.address.base_url, "model": self.address.model}
        assert self.settings is not None
        return self.settings.model_dump(include={"model", "dtype", "policy", "ratio", "max_tokens"})

    def engine(self, model: str | None = None) -> Answerer:
        """Return `given` if it has the model, else an engine or client shared within the process.

        Args:
            model: Name of another model to use. None means the model of this `Place`.
        """
        if self.given is not None and (model is None or model == self.name):
            return self.given  # type: ignore[no-any-return]
        if self.address is not None:
            return RemoteEngine.shared(replace(self.address, model=model or self.address.model))
        from ragfuse.engine.engine import Engine  # imports torch

        assert self.settings is not None
        return Engine.shared(_with(self.settings, {"model": model} if model else {}))

    def stream(self, prompt: Prompt, ask: Ask, model: str | None = None) -> AnswerStream:
        """Load the model, register the prompt's schema, and stream the answer to the prompt."""
        engine = self.engine(model)
        found = prompt(engine) if callable(prompt) else prompt
        return engine.stream(ready(found, engine), ask)

    async def astream(self, prompt: Prompt, ask: Ask, model: str | None = None) -> AnswerStream:
        """Run `stream` without blocking the event loop."""
        return await asyncio.to_thread(self.stream, prompt, ask, model)

    def told(self, answer: Answer, ask: Ask, model: str | None = None) -> dict[str, Any]:
        """Return an answer's metadata: model, finish reason, OpenAI's `usage`, and the trace.

        The trace is at the key `ragfuse`. `cached_tokens` counts the tokens whose KV was found in
        the store. `cache_creation_tokens` counts the tokens of chunks encoded after the answer.
        """
        card, trace, n_written = self.engine(model).card, answer.trace, len(answer.token_ids)
        saves = ask.reuse and not card.refusal
        details = {
            "cached_tokens": trace.tokens_found,
            "cache_creation_tokens": trace.tokens_to_encode if saves else 0,
        }
        return {
            "model": card.name,
            "finish_reason": answer.finish_reason,
            "usage": {
                "prompt_tokens": trace.tokens,
                "completion_tokens": n_written,
                "total_tokens": trace.tokens + n_written,
                "prompt_tokens_details": details,
            },
            "ragfuse": trace.as_dict(),
        }

    def as_public(self) -> dict[str, Any]:
        """Return the fields from which another process can make an equal `Place`.

        Raises:
            SettingsError: The settings contain a secret.
            InputError: The model is a loaded object.
        """
        self.check_movable()
        return self.identity if self.settings is None else {"settings": self.settings.as_public()}

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle, without the engine. Another process makes its own engine."""
        self.check_movable()
        return {**vars(self), "given": None}

    def check_movable(self) -> None:
        """Raise InputError if the model is a loaded object, which no other process can load."""
        if self.is_loaded:
            raise InputError(
                f"{self.name} was given as a model in memory, which cannot be sent to another"
                " process. Save the model to a folder, and pass model='FOLDER'."
            )


def engine_of(model: Any) -> Answerer:
    """Return a model's engine; return an engine unchanged. Raise InputError for other types."""
    found = model.get_engine() if hasattr(model, "get_engine") else model
    if not hasattr(type(found), "count_tokens"):
        raise InputError(
            f"Expected an Engine, RemoteEngine or ragfuse model, found a {type(model).__name__}."
        )
    return found  # type: ignore[no-any-return]


def ready(prompt: Any, engine: Answerer) -> Any:
    """Return the question to ask the engine; register the schema of a filled template first."""
    if not isinstance(prompt, FilledTemplate):
        return prompt
    if not engine.schemas.has(prompt.schema):  # `has` does not wait for other schemas
        engine.schemas.ensure(prompt.schema)
    return prompt.request


def _with(settings: Settings, changes: Mapping[str, Any]) -> Settings:
    """Return the settings with these changes, validated."""
    return (
        Settings(**{**settings.model_dump(exclude_unset=True), **changes}) if changes else settings
    )
