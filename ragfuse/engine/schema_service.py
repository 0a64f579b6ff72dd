"""The schemas of an engine (Prompt Cache): registered in the store's catalog, laid out and encoded for its model.

`schemas.pml` reads a schema, `schemas.layout` gives its tokens positions, `schemas.bind` makes a prompt over it. A
schema belongs to a tenant, its KV to a model as well. `schemas/registry.py` manages schemas without a model.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragfuse.engine.ask import Ask
from ragfuse.engine.encoder import Encoder
from ragfuse.engine.overflow import remaining_context
from ragfuse.engine.prompt_builder import PromptBuilder
from ragfuse.engine.runtime import Runtime
from ragfuse.errors import InputError, PMLError
from ragfuse.schemas.bind import bind, check_names
from ragfuse.schemas.layout import NO_WRAPPING, ModulePosition, SchemaLayout, Wrapping, lay_out
from ragfuse.schemas.nodes import Item, Module, PMLPrompt, Role, Schema, TextNode, inner
from ragfuse.schemas.pml import parse_prompt, parse_schema, read_schema
from ragfuse.schemas.pml_writer import to_pml
from ragfuse.schemas.registry import SchemaRegistry, StoredSchema
from ragfuse.schemas.wrap_probe import wrapping_of
from ragfuse.settings import Settings
from ragfuse.store import KVStore
from ragfuse.store.catalog import Catalog
from ragfuse.types.ingested import Ingested
from ragfuse.types.prompt import Prompt

__all__ = [
    "PMLPrompt",
    "RegisteredSchema",
    "SchemaService",
    "StoredSchema",
    "outline",
    "parse_prompt",
    "parse_schema",
]


@dataclass(frozen=True)
class RegisteredSchema:
    """A registered schema.

    Args:
        layout: Its layout for the engine's model.
        done: The counts of its encoding; each run of the schema counts as one chunk.
    """

    layout: SchemaLayout
    done: Ingested

    @property
    def name(self) -> str:
        """The name by which prompts refer to it."""
        return self.layout.schema.name


class SchemaService(SchemaRegistry):
    """The schemas of one engine's tenant, laid out and encoded for its model, and prompts over them. Thread-safe.

    Args:
        settings: The tenant, and the shortest run that is encoded.
        store: Holds the KV.
        catalog: Holds the schemas, which processes on one store share.
        prompts: Renders the chat template.
        runtime: The model and its encoder.
    """

    def __init__(
        self, settings: Settings, store: KVStore, catalog: Catalog, prompts: PromptBuilder, runtime: Runtime
    ) -> None:
        super().__init__(store, catalog, settings.salt)
        self._settings, self._prompts, self._runtime = settings, prompts, runtime
        self._laying_out, self._ensuring = threading.Lock(), threading.Lock()
        self._layouts: dict[str, tuple[str, SchemaLayout]] = {}
        self._laid_out_keys: dict[str, tuple[SchemaLayout, list[str]]] = {}
        self._template: tuple[str, Wrapping] | None = None

    def register(
        self, schema: Schema | Path | str, progress: Callable[[Ingested], None] | None = None, must: bool = True
    ) -> RegisteredSchema:
        """Lay out a schema, encode those of its runs that are not stored yet, and register it for later processes too.

        It replaces a registered schema of the same name; runs that both have are not encoded again.

        Args:
            schema: The schema; a text that begins with `<` is PML, any other names a file.
            progress: Called after each run with the counts so far.
            must: Whether a catalog that cannot be written is an error; otherwise only this process knows the schema.

        Raises:
            PMLError: The schema cannot be read or laid out.
            InputError: It does not fit the model's context.
            StoreError: It cannot be written to the catalog.
        """
        stored = _stored_schema(schema)
        layout, encoder, began = self._lay_out(stored), self._runtime.encoder, time.perf_counter()
        remaining_context(layout.n_positions, encoder.model, f"Schema '{stored.name}'", "Shorten its modules.")
        done = Ingested(of=len(layout.runs))
        for run in layout.runs:
            done = done.plus(len(run.tokens), encoder.keep_run(run), time.perf_counter() - began)
            if progress is not None:
                progress(done)
        keys = [str(encoder.key_of(run)) for run in layout.runs]
        self.put(stored, encoder.digest, keys, must)
        with self._laying_out:
            self._layouts[stored.name] = stored.pml, layout
        return RegisteredSchema(layout, done)

    def has(self, schema: Schema) -> bool:
        """Return whether an equal schema is registered and encoded for the engine's model."""
        stored = self.get(schema.name)
        if stored is None or not stored.is_encoded(self._runtime.encoder.digest):
            return False
        return self._layout_if_same(stored, schema) is not None

    def ensure(self, schema: Schema, progress: Callable[[Ingested], None] | None = None) -> RegisteredSchema | None:
        """Register a schema unless it is registered already; a registration in another thread is waited for.

        A catalog that cannot be written is not an error here, unlike in `register`.

        Returns:
            The registered schema; None where it was registered before.
        """
        with self._ensuring:
            return None if self.has(schema) else self.register(schema, progress, must=False)

    def show(self, name: str | Path) -> SchemaLayout:
        """Return the layout, for the engine's model, of a registered schema or of one in a file (without registering).

        Raises:
            InputError: There is no such schema and no such file.
        """
        return self.laid_out(self.named(name))

    def named(self, name: str | Path) -> StoredSchema:
        """Return a registered schema, or the one in a file (without registering it); no model is needed.

        Raises:
            InputError: There is no such schema and no such file.
        """
        stored = self.get(str(name))
        if stored is None and Path(name).is_file():
            stored = _stored_schema(Path(name))
        if stored is None:
            raise InputError(f"There is no schema '{name}', nor a file of this name; wanted {self.describe_names()}.")
        return stored

    def check(self, request: PMLPrompt) -> None:
        """Raise PMLError where the schema of a prompt in PML is not registered or does not fit it; needs no model."""
        stored = self._needed_by(request)
        check_names(request, parse_schema(stored.pml, stored.file))

    def _needed_by(self, request: PMLPrompt) -> StoredSchema:
        stored = self.get(request.schema)
        if stored is None:
            raise request.at.error(
                f"a prompt for schema '{request.schema}', which is not registered",
                self.describe_names(),
                "Register it first: `ragfuse schema add FILE` or engine.schemas.register(FILE).",
            )
        return stored

    def laid_out(self, stored: StoredSchema) -> SchemaLayout:
        """Return the layout of a stored schema for the engine's model; it is cached until the schema changes."""
        with self._laying_out:
            pml, layout = self._layouts.get(stored.name, ("", None))
        if layout is None or pml != stored.pml:
            layout = self._lay_out(stored)
            with self._laying_out:
                self._layouts[stored.name] = stored.pml, layout
        return layout

    def remove(self, name: str) -> int:
        """Delete a schema and, in every tier, the KV that no other registered schema uses; return the bytes freed."""
        with self._laying_out:
            self._layouts.pop(name, None)
            self._laid_out_keys.pop(name, None)
        return super().remove(name)

    def prompt(self, request: PMLPrompt, ask: Ask) -> Prompt:
        """Build the prompt of a request in PML: modules at the schema's positions, and new text (`schemas.bind`).

        Raises:
            InputError: The request has a session or tools, which PML prompts cannot have.
            PMLError: Its schema is not registered, or it does not fit the schema.
            OverlongError: It can never fit the model's context.
        """
        if ask.session is not None:
            raise InputError(
                "A prompt in PML cannot continue a session: leave out `session`, or ask with messages.", "session"
            )
        if ask.tools:
            raise InputError("A prompt in PML cannot have tools: leave out `tools`, or ask with messages.", "tools")
        stored, encoder = self._needed_by(request), self._runtime.encoder
        layout = self._layout_of(stored, request.over)
        self._note(stored, layout, encoder)
        return bind(request, layout, encoder.model.tokens, encoder.key_of, ask.blend)

    # inside

    def _layout_of(self, stored: StoredSchema, schema: Schema | None) -> SchemaLayout:
        """Return the layout of `schema`, even if the stored one of its name differs; None means the stored one."""
        if schema is None:
            return self.laid_out(stored)
        return self._layout_if_same(stored, schema) or self._lay_out(_stored_schema(schema))

    def _note(self, stored: StoredSchema, layout: SchemaLayout, encoder: Encoder) -> None:
        """Record the keys that answers over a layout may store, so that they are deleted together with the schema."""
        with self._laying_out:
            noted = self._laid_out_keys.get(stored.name)
        if noted is None or noted[0] is not layout:
            noted = layout, [str(encoder.key_of(run)) for run in layout.runs]
            with self._laying_out:
                self._laid_out_keys[stored.name] = noted
        if not {*noted[1]} <= {*stored.keys.get(encoder.digest, ())}:
            self.note(stored.name, encoder.digest, noted[1])

    def _layout_if_same(self, stored: StoredSchema, schema: Schema) -> SchemaLayout | None:
        """Return the layout of the stored schema if it equals `schema`, else None."""
        try:
            layout = self.laid_out(stored)
        except PMLError:  # the stored schema is a different one
            return None
        return layout if layout.schema == schema else None

    def _lay_out(self, stored: StoredSchema) -> SchemaLayout:
        model, schema = self._runtime.encoder.model, parse_schema(stored.pml, stored.file)
        begins, wrapping = self._wrapping()
        is_chat = wrapping is not NO_WRAPPING and _has_messages(schema.items)
        bos = model.tokens(begins, True) if is_chat else model.bos
        first = _first_text(schema.items, wrapping if is_chat else NO_WRAPPING)
        bos = (*bos, *model.encoder.prefix_ids(first, is_chat and bool(begins)))
        unknown = model.tokenizer.unk_token_id
        placeholder = unknown if isinstance(unknown, int) else model.tokens(" ")[0]
        shortest, fixed = self._settings.min_chunk_tokens, model.profile.fixed
        return lay_out(schema, model.tokens, placeholder, wrapping, bos, shortest, fixed)

    def _wrapping(self) -> tuple[str, Wrapping]:
        """Return how the chat template begins a prompt, and the texts it puts around messages; probed once."""
        if self._template is None:
            tokenizer = self._runtime.encoder.model.tokenizer
            has_template = getattr(tokenizer, "chat_template", None)
            render: Any = lambda messages, ask: self._prompts.render(messages, (), ask)  # noqa: E731
            self._template = wrapping_of(render, str(tokenizer.bos_token or "")) if has_template else ("", NO_WRAPPING)
        return self._template


def outline(layout: SchemaLayout, nbytes_per_token: int) -> Iterator[dict[str, Any]]:
    """Yield one row in plain JSON types for each part of a layout, in order.

    A row has depth, what (its kind), and positions start to stop. A module also has name, path, tokens (own text and
    room for arguments) and nbytes (bytes of its run's KV); a parameter has name and tokens.
    """
    for depth, what, part in layout.outline():
        row: dict[str, Any] = {"depth": depth, "what": what, "start": part.start, "stop": part.stop}
        if isinstance(part, ModulePosition):
            run = layout.modules.get(part.path)
            n_kept = len(run.tokens) if run is not None else 0
            own = sum(len(each.tokens) for each in part.ranges)
            row |= {"name": part.name, "path": part.path, "tokens": own, "nbytes": n_kept * nbytes_per_token}
        elif what == "param":
            row |= {"name": getattr(part, "param", ""), "tokens": part.stop - part.start}
        yield row


def _has_messages(items: tuple[Item, ...]) -> bool:
    scope = list(inner(items))
    deeper = (_has_messages(each.items) for each in scope if isinstance(each, Module))
    return any(isinstance(each, Role) for each in scope) or any(deeper)


def _first_text(items: tuple[Item, ...], wrapping: Wrapping) -> str:
    """Return the first text of a prompt over a schema, which decides how its first token is made."""
    for item in inner(items):
        if isinstance(item, TextNode) and (item.text.strip() or not _has_messages(items)):
            return item.text
        if isinstance(item, Role):
            return wrapping.around(item.role)[0] or _first_text(item.items, wrapping)
        if isinstance(item, Module):
            return _first_text(item.items, wrapping)
    return ""


def _stored_schema(schema: Schema | Path | str) -> StoredSchema:
    """Return a schema, PML text or file as a `StoredSchema`."""
    if isinstance(schema, Schema):
        return StoredSchema(schema.name, to_pml(schema), os.path.abspath(schema.at.file) if schema.at.file else "")
    if isinstance(schema, str) and schema.lstrip().startswith("<"):
        return StoredSchema(parse_schema(schema).name, schema)
    file = Path(schema).expanduser()
    return StoredSchema(read_schema(file).name, file.read_text("utf-8"), os.path.abspath(file))
