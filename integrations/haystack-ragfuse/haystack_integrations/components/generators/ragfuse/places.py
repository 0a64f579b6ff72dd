"""Where the model of a chat generator is: in this process, or at a server. The generator asks its place alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragfuse import InputError, Settings
from ragfuse.remote import Answerer, RemoteEngine, ServerAddress, address_of

IN_PROCESS = ("dtype", "device", "store", "settings", "tokenizer", "engine", "model_kwargs")
"""Arguments that a server has for itself, so that they have no effect beside `base_url`."""


@dataclass
class ProcessPlace:
    """An engine of this process.

    Args:
        settings: Its settings.
        given: An engine that was given, or made of a loaded model; None: one that the process shares. Copies share it.
        is_loaded: Whether the model was given as an object.
    """

    settings: Settings
    given: Any = None
    is_loaded: bool = False

    @classmethod
    def of(cls, generator: Any) -> ProcessPlace:
        """Return the place that a generator's arguments describe; raise InputError if they contradict each other."""
        named = {name: getattr(generator, name) for name in ("model", "dtype", "device", "store")}
        is_object = generator.model is not None and not isinstance(generator.model, str | Path)
        if generator.engine is not None:
            found = [name for name in (*named, "tokenizer", "settings", "model_kwargs") if getattr(generator, name)]
            if found:
                raise InputError(f"An engine already has its model and settings: with engine=, leave out {found[0]}=.")
            return cls(generator.engine.settings, generator.engine)
        given = {name: value for name, value in named.items() if value is not None}
        if is_object:
            del given["model"]
        base = generator.settings or Settings()
        if generator.model_kwargs:
            given["model_kwargs"] = {**base.model_kwargs, **generator.model_kwargs}
        settings = Settings(**{**base.model_dump(), **given}) if given else base
        if not is_object and generator.tokenizer is None:
            return cls(settings)
        from ragfuse import Engine  # loads torch

        loaded = generator.model if is_object else None
        engine = Engine.shared(settings, loaded, tokenizer=generator.tokenizer)
        generator.model = generator.tokenizer = None
        return cls(engine.settings, engine, True)

    is_server = False

    @property
    def name(self) -> str:
        """The model's name."""
        return self.settings.model

    @property
    def hears_retrievers(self) -> bool:
        """Whether retrieved documents are recognised unasked."""
        return self.settings.learn != "off"

    def engine(self) -> Answerer:
        """Return the given engine, else the one that the process shares."""
        from ragfuse import Engine  # loads torch

        return self.given or Engine.shared(self.settings)

    def as_public(self) -> dict[str, Any]:
        """Return the arguments from which another process makes the same place.

        Raises:
            SettingsError: The settings contain a secret.
            InputError: The model was given as a loaded object.
        """
        if self.is_loaded:
            raise InputError(
                f"{self.name} was given as a loaded model, which cannot be serialised. Save it to a folder, and pass "
                "that: model='folder'."
            )
        return {"settings": self.settings.as_public()}


@dataclass
class ServerPlace:
    """A server, asked through the client that the process shares.

    Args:
        address: Its address, with the API key and the name of the model that it must have.
        given: The client that was given, used instead of the shared one.
    """

    address: ServerAddress
    given: Any = None

    is_server = True
    hears_retrievers = True

    @classmethod
    def of(cls, generator: Any) -> ServerPlace:
        """Return the place that a generator's arguments describe.

        Raises:
            InputError: An argument is given that only an engine in this process has.
        """
        found = [name for name in IN_PROCESS if getattr(generator, name)]
        if isinstance(generator.engine, RemoteEngine) and generator.base_url is None:
            found.remove("engine")
        found += ["model (an object or a folder)"] if not isinstance(generator.model, str | None) else []
        key = generator.api_key.resolve_value() if generator.api_key is not None else None
        model = generator.model or "" if isinstance(generator.model, str | None) else ""
        given = address_of(generator.engine, generator.base_url, key, model, generator.max_retries, found)
        return cls(given, generator.engine)

    @property
    def name(self) -> str:
        """The model's name; that of a server is known after the first question if none was given."""
        return self.address.model or "ragfuse"

    def engine(self) -> Answerer:
        """Return the given client, else the one that the process shares."""
        at = self.address
        return self.given or RemoteEngine.shared(at.base_url, at.api_key, at.model, at.max_retries)

    def as_public(self) -> dict[str, Any]:
        """Return the arguments from which another process makes the same place."""
        return {"base_url": self.address.base_url, "model": self.address.model or None}
