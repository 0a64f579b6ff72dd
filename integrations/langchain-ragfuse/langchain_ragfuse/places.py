"""Where the model of a `RagFuseModel` is: in this process, or at a server. Models ask their place, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragfuse import Ask, InputError, Settings
from ragfuse.remote import Answerer, RemoteEngine, ServerAddress, address_of

IN_PROCESS = ("dtype", "device", "store", "settings", "tokenizer")
"""Fields that a server has for itself, so that they have no effect beside `base_url`."""


@dataclass
class ProcessPlace:
    """An engine of this process.

    Args:
        settings: Its settings.
        made: The engine of a model that was given as an object; copies share it.
    """

    settings: Settings
    made: Answerer | None = None

    @classmethod
    def of(cls, llm: Any, loading: Mapping[str, Any]) -> ProcessPlace:
        """Return the place that the fields of a model describe.

        Args:
            llm: A `RagFuseModel`.
            loading: Its options for loading the model.

        Raises:
            InputError: Fields contradict each other.
        """
        base = llm.settings or (Settings() if llm.engine is None else llm.engine.settings)
        is_object = llm.model is not None and not isinstance(llm.model, str | Path)
        name = None if is_object or llm.model is None else str(llm.model)
        named = {"model": name, "dtype": llm.dtype, "device": llm.device, "store": llm.store}
        given = {name: value for name, value in named.items() if value is not None}
        if loading:
            given["model_kwargs"] = {**base.model_kwargs, **loading}
        settings = base if llm.engine is not None else _with(base, given)
        if is_object or llm.tokenizer is not None or (llm.engine is not None and loading):
            return cls._around(llm, settings, llm.model if is_object else None)
        return cls(settings)

    @classmethod
    def _around(cls, llm: Any, settings: Settings, loaded_model: Any) -> ProcessPlace:
        """Return the place of a loaded model; raise InputError if other fields contradict it."""
        if llm.engine is not None:
            raise InputError(
                "An engine already has its model: with engine=, leave out model=, tokenizer= and loading options."
            )
        from ragfuse import Engine  # loads torch

        engine = Engine.shared(settings, loaded_model, tokenizer=llm.tokenizer)
        llm.tokenizer = None
        return cls(engine.settings, engine)

    @property
    def name(self) -> str:
        """The model's name."""
        return self.settings.model

    @property
    def is_loaded_object(self) -> bool:
        """Whether the model was given as an object, which another process cannot load."""
        return self.made is not None

    @property
    def hears_retrievers(self) -> bool:
        """Whether retrieved documents are recognised unasked."""
        return self.settings.learn != "off"

    def engine(self, given: Any, model: str | None) -> Answerer:
        """Return the given engine, else the one that the process shares; `model` names another model."""
        from ragfuse import Engine  # loads torch

        if model in (None, self.name):
            return given or self.made or Engine.shared(self.settings)
        return Engine.shared(_with(self.settings, {"model": model}))

    def params(self, ask: Ask) -> dict[str, Any]:
        """Return what decides an answer beside the options of `ask` that are sent as they are."""
        settings = self.settings
        return {
            "model": settings.model,
            "dtype": settings.dtype,
            "policy": ask.policy or settings.policy,
            "ratio": settings.ratio if ask.ratio is None else ask.ratio,
            "reuse": ask.reuse,
            "overflow": ask.overflow or settings.overflow,
            "max_tokens": ask.max_tokens or settings.max_tokens,
        }


@dataclass
class ServerPlace:
    """A server, asked through the client that the process shares.

    Args:
        address: Its address, with the API key and the name of the model that it must have.
    """

    address: ServerAddress

    is_loaded_object = False
    hears_retrievers = True

    @classmethod
    def of(cls, llm: Any) -> ServerPlace:
        """Return the place that the fields of a model describe.

        Raises:
            InputError: A field is given that only an engine in this process has.
        """
        found = [name for name in IN_PROCESS if getattr(llm, name) is not None]
        found += ["engine"] if llm.engine is not None else []
        found += [f"model_kwargs={{'{name}': ...}}" for name in llm.model_kwargs if name in Settings.LOADING]
        found += ["model (an object or a folder)"] if not isinstance(llm.model, str | None) else []
        key = llm.api_key.get_secret_value() if llm.api_key is not None else None
        model = llm.model if isinstance(llm.model, str) else ""
        return cls(address_of(llm.engine, llm.base_url, key, model, llm.max_retries, found))

    def __repr__(self) -> str:
        return f"ServerPlace({self.address.base_url!r})"

    @property
    def name(self) -> str:
        """The model's name; "" before the first question if none was given."""
        return self._client(self.address.model).name

    def engine(self, given: Any, model: str | None) -> Answerer:
        """Return the given client, else the one that the process shares; a server refuses another model by name."""
        if model in (None, self.address.model):
            return given or self._client(self.address.model)
        return self._client(str(model))

    def params(self, ask: Ask) -> dict[str, Any]:
        """Return what decides an answer beside the options of `ask` that are sent as they are."""
        return {
            "base_url": self.address.base_url,
            "model": self.address.model,
            "policy": ask.policy,
            "ratio": ask.ratio,
            "reuse": ask.reuse,
            "overflow": ask.overflow,
            "max_tokens": ask.max_tokens,
        }

    def _client(self, model: str) -> RemoteEngine:
        return RemoteEngine.shared(self.address.base_url, self.address.api_key, model, self.address.max_retries)


def _with(settings: Settings, given: Mapping[str, Any]) -> Settings:
    """Return a copy of the settings with some values replaced."""
    return Settings(**{**settings.model_dump(), **given}) if given else settings
