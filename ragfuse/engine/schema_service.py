"""The schemas of an engine (Prompt Cache): stored in the catalog, laid out and encoded for the
engine's model.

`schemas.pml` parses a schema, `schemas.layout` assigns token positions, `schemas.bind` builds a
prompt over a schema. A schema belongs to a tenant; the schema's KV belongs to a tenant and a model.
`schemas/registry.py` manages schemas without a model.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ragfuse.engine.ask import Ask
from ragfuse.engine.prompt_builder import PromptBuilder
from ragfuse.engine.runtime import remaining_context
from ragfuse.errors import InputError, PMLError
from ragfuse.process.shared import LRU
from ragfuse.schemas.bind import bind
from ragfuse.schemas.layout import (
    NO_WRAPPING,
    SchemaLayout,
    Wrapping,
    lay_out,
    wrapping_of,
)
from ragfuse.schemas.nodes import (
    Item,
    Module,
    PMLPrompt,
    Role,
    Schema,
    TextNode,
    has_messages,
    inner,
)
from ragfuse.schemas.pml import parse_schema, read_schema, to_pml
from ragfuse.schemas.registry import SchemaRegistry, StoredSchema
from ragfuse.types.answer import Ingested
from ragfuse.types.prompt import Prompt

MAX_LAYOUTS = 256
"""Maximum cached layouts of schemas."""


@dataclass(frozen=True)
class RegisteredSchema:
    """A registered schema, laid out and encoded for the engine's model.

    Args:
        layout: The token positions of the schema's modules for this model.
        done: The totals of the registration, such as encoded runs, bytes and seconds. Each run
            counts as one chunk.
    """

    layout: SchemaLayout
    done: Ingested

    @property
    def name(self) -> str:
        """The schema's name, which prompts refer to."""
        return self.layout.schema.name


class SchemaService(SchemaRegistry):
    """The schemas of one engine's tenant, laid out and encoded for the engine's model. Thread-safe.

    Args:
        prompts: Provides the model, the store and the chat template.
    """

    def __init__(self, prompts: PromptBuilder) -> None:
        runtime = prompts.runtime
        super().__init__(runtime.store, runtime.catalog, runtime.settings.salt)
        self._prompts, self._runtime = prompts, runtime
        self._ensuring = threading.Lock()
        self._layouts = LRU[str, SchemaLayout](MAX_LAYOUTS)

    def register(
        self,
        schema: Schema | Path | str,
        progress: Callable[[Ingested], None] | None = None,
        must: bool = True,
    ) -> RegisteredSchema:
        """Lay out, encode and register a schema, for this and later processes.

        A registered schema of the same name is replaced. Runs that are already stored are not
        encoded again.

        Args:
            schema: The schema. A text that begins with `<` is PML; any other text is a file's path.
            progress: Called after each run of the schema with the totals so far.
            must: True to raise StoreError if the catalog cannot be written. If False, a schema
                that cannot be written is known only to this process.

        Raises:
            PMLError: The schema cannot be parsed or laid out.
            OverlongError: The schema exceeds the model's context.
            StoreError: The catalog cannot be written.
        """
        stored = _stored_schema(schema)
        layout, encoder, began = self.laid_out(stored), self._runtime.encoder, time.perf_counter()
        remaining_context(
            layout.n_positions, encoder.model, f"Schema '{stored.name}'", "Shorten its modules."
        )
        done = Ingested(of=len(layout.runs))
        for run in layout.runs:
            done = done.plus(len(run.tokens), encoder.keep_run(run), time.perf_counter() - began)
            if progress is not None:
                progress(done)
        self.put(stored, encoder.digest, self._keys(layout), must)
        return RegisteredSchema(layout, done)

    def has(self, schema: Schema) -> bool:
        """Return whether an equal schema is registered and encoded for the engine's model."""
        stored = self.get(schema.name)
        if stored is None or not stored.is_encoded(self._runtime.encoder.digest):
            return False
        with suppress(PMLError):  # the PML of another version may be invalid
            return self.laid_out(stored).schema == schema
        return False

    def ensure(
        self, schema: Schema, progress: Callable[[Ingested], None] | None = None
    ) -> RegisteredSchema | None:
        """Register a schema if it is not registered yet. Only one thread registers at a time.

        Unlike `register`, raise no error if the catalog cannot be written.

        Returns:
            The registered schema; None if the schema was already registered.
        """
        with self._ensuring:
            return None if self.has(schema) else self.register(schema, progress, must=False)

    def show(self, name: str | Path) -> SchemaLayout:
        """Return the layout of a registered schema, or of a schema in a file.

        Raises:
            InputError: There is neither such a schema nor such a file.
        """
        return self.laid_out(self.named(name))

    def named(self, name: str | Path) -> StoredSchema:
        """Return a registered schema, or a schema from a file. Needs no model.

        Raises:
            InputError: There is neither such a schema nor such a file.
        """
        stored = self.get(str(name))
        if stored is None and Path(name).is_file():
            stored = _stored_schema(Path(name))
        if stored is None:
            raise InputError(
                f"'{name}' is neither a schema nor a file. Use {self.describe_names()}."
            )
        return stored

    def prompt(self, request: PMLPrompt, ask: Ask) -> Prompt:
        """Build the `Prompt` of a PML prompt from reused modules and new text (`schemas.bind`).

        Raises:
            InputError: The request has a session or tools, which PML prompts do not support.
            PMLError: The schema is not registered, or the request does not match the schema.
        """
        if ask.session is not None:
            raise InputError(
                "A prompt in PML cannot continue a session. Remove `session` or `pml`.",
                "session",
            )
        if ask.tools:
            raise InputError(
                "A prompt in PML cannot have tools. Remove `tools`, or use messages instead.",
                "tools",
            )
        stored, encoder = self.get(request.schema), self._runtime.encoder
        if stored is None:
            raise request.at.error(
                f"a prompt for schema '{request.schema}', which is not registered",
                self.describe_names(),
                "Register the schema first: `ragfuse schema add FILE` or"
                " engine.schemas.register(FILE).",
            )
        layout = self.laid_out(stored if request.over is None else _stored_schema(request.over))
        keys = self._keys(layout)
        if not {*keys} <= {*stored.keys.get(encoder.digest, ())}:
            # the answer may store entries of these keys, which are deleted with the schema
            self.note(stored.name, encoder.digest, keys)
        return bind(request, layout, encoder.model.tokens, encoder.key_of, ask.blend)

    def laid_out(self, stored: StoredSchema) -> SchemaLayout:
        """Return a schema's layout for the engine's model; recent layouts are cached."""
        found = self._layouts.get(stored.pml)
        if found is not None:
            return found
        schema, model = parse_schema(stored.pml, stored.file), self._runtime.model
        begins, wrapping = self._wrapping
        is_chat = wrapping is not NO_WRAPPING and has_messages(schema.items)
        bos = model.tokens(begins, True) if is_chat else model.bos
        first = _first_text(schema.items, wrapping if is_chat else NO_WRAPPING)
        bos = (*bos, *model.text_encoder.prefix_ids(first, is_chat and bool(begins)))
        unknown = model.tokenizer.unk_token_id
        placeholder = unknown if isinstance(unknown, int) else model.tokens(" ")[0]
        shortest, fixed = self._runtime.settings.min_chunk_tokens, model.profile.fixed
        layout = lay_out(schema, model.tokens, placeholder, wrapping, bos, shortest, fixed)
        return self._layouts.add(stored.pml, layout)

    # internal

    def _keys(self, layout: SchemaLayout) -> list[str]:
        return [str(self._runtime.encoder.key_of(run)) for run in layout.runs]

    @cached_property
    def _wrapping(self) -> tuple[str, Wrapping]:
        """How the chat template begins a prompt and wraps messages; probed only once."""
        template, bos = self._prompts.template, self._runtime.model.tokenizer.bos_token
        render: Any = lambda messages, ask: template.render(messages, (), ask)  # noqa: E731
        return wrapping_of(render, str(bos or "")) if template.source else ("", NO_WRAPPING)


def _first_text(items: tuple[Item, ...], wrapping: Wrapping) -> str:
    """Return a schema's first text. The first token of the schema's prompts depends on the text."""
    for item in inner(items):
        if isinstance(item, TextNode) and (item.text.strip() or not has_messages(items)):
            return item.text
        if isinstance(item, Role):
            return wrapping.around(item.role)[0] or _first_text(item.items, wrapping)
        if isinstance(item, Module):
            return _first_text(item.items, wrapping)
    return ""


def _stored_schema(schema: Schema | Path | str) -> StoredSchema:
    if isinstance(schema, Schema):
        return StoredSchema(
            schema.name, to_pml(schema), os.path.abspath(schema.at.file) if schema.at.file else ""
        )
    if isinstance(schema, str) and schema.lstrip().startswith("<"):
        return StoredSchema(parse_schema(schema).name, schema)
    file = Path(schema).expanduser()
    return StoredSchema(read_schema(file).name, file.read_text("utf-8"), os.path.abspath(file))
