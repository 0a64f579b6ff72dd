"""Where the model of a `RagFuseLLM` is: in this process, or at a server. The LLM asks its place, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragfuse import InputError, Settings
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
    def of(cls, llm: Any) -> ProcessPlace:
        """Return the place that the fields of an LLM describe; raise InputError if they contradict each other."""
        if llm.engine is not None and (llm.model_kwargs or llm.tokenizer is not None):
            raise InputError("An engine already has its model: with engine=, leave out tokenizer= and model_kwargs=.")
        is_object = llm.model is not None and not isinstance(llm.model, str | Path)
        settings = llm.engine.settings if llm.engine is not None else _resolved(llm, is_object)
        if is_object or llm.tokenizer is not None:
            return cls._around(llm, settings, llm.model if is_object else None)
        return cls(settings)

    @classmethod
    def _around(cls, llm: Any, settings: Settings, loaded_model: Any) -> ProcessPlace:
        """Return the place of a loaded model; raise InputError if other fields contradict it."""
        if llm.engine is not None:
            raise InputError("An engine already has its model: with engine=, leave out model= and tokenizer=.")
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
        """Whether retrieved nodes are recognised unasked."""
        return self.settings.learn != "off"

    @property
    def fields(self) -> dict[str, Any]:
        """The values of the LLM's fields, as the settings have them."""
        settings = self.settings
        return {
            "model_kwargs": {name: value for name, value in settings.model_kwargs.items() if name != "token"},
            "model": settings.model,
            "dtype": settings.dtype,
            "device": settings.device,
            "store": None if settings.store is None else str(settings.store),
        }

    def engine(self, given: Any) -> Answerer:
        """Return the given engine, else the one that the process shares."""
        from ragfuse import Engine  # loads torch

        return given or self.made or Engine.shared(self.settings)

    def as_public(self) -> dict[str, Any]:
        """Return the further fields that `from_dict` needs; raises SettingsError if they contain a secret."""
        return {"settings": self.settings.as_public()}


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
        """Return the place that the fields of an LLM describe.

        Raises:
            InputError: A field is given that only an engine in this process has.
        """
        found = [name for name in IN_PROCESS if getattr(llm, name) is not None]
        found += [name for name in ("engine", "model_kwargs") if getattr(llm, name)]
        found += ["model (an object or a folder)"] if not isinstance(llm.model, str | None) else []
        key = llm.api_key.get_secret_value() if llm.api_key is not None else None
        model = llm.model if isinstance(llm.model, str) else ""
        return cls(address_of(llm.engine, llm.base_url, key, model, llm.max_retries, found))

    def __repr__(self) -> str:
        return f"ServerPlace({self.address.base_url!r})"

    @property
    def name(self) -> str:
        """The model's name; "" before the first question if none was given."""
        return self._client.name

    @property
    def fields(self) -> dict[str, Any]:
        """The values of the LLM's fields that follow from the place."""
        return {"base_url": self.address.base_url, "model": self.address.model or None}

    def engine(self, given: Any) -> Answerer:
        """Return the given client, else the one that the process shares."""
        return given or self._client

    def as_public(self) -> dict[str, Any]:
        """Return the further fields that `from_dict` needs: none, as the key is read from the environment."""
        return {}

    @property
    def _client(self) -> RemoteEngine:
        return RemoteEngine.shared(
            self.address.base_url, self.address.api_key, self.address.model, self.address.max_retries
        )


def _resolved(llm: Any, is_object: bool) -> Settings:
    """Return the settings, with model, dtype, device, store and model_kwargs replaced by those of an LLM."""
    name = None if is_object or llm.model is None else str(llm.model)
    named = {"model": name, "dtype": llm.dtype, "device": llm.device, "store": llm.store}
    given = {name: value for name, value in named.items() if value is not None}
    base = llm.settings or Settings()
    if llm.model_kwargs:
        given["model_kwargs"] = {**base.model_kwargs, **llm.model_kwargs}
    return Settings(**{**base.model_dump(), **given}) if given else base
