"""Load a model from a folder, a Hugging Face id, an adapter, or a loaded object.

A loaded object is a `pipeline`, or a `PreTrainedModel` or PEFT model with its tokenizer. An adapter
is a folder with an ordinary adapter or with a chunk adapter. Included models and GGUF files are
first converted to folders (`models/embedded.py`). Weights are read only from safetensors and GGUF
files. Nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoTokenizer,
    Pipeline,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ragfuse.errors import ModelError
from ragfuse.hf.chunk_adapter import ADAPTER_CONFIG, read_chunk_adapter, read_json_object
from ragfuse.hf.fingerprint import tokenizer_digest
from ragfuse.hf.model import HFModel
from ragfuse.models.adapters import CHUNK_ADAPTER, DRIFT_NAME
from ragfuse.models.device import dtype_named, require_device
from ragfuse.models.embedded import require_hub, resolve_llm
from ragfuse.models.shipped_profile import read_shipped
from ragfuse.models.weights import (
    is_quantised,
    keep_digests,
    kept_digests,
    kept_file,
    load_adapted,
    load_weights,
    refuse_outside,
)
from ragfuse.types.kv import ChunkKV, LayerKV
from ragfuse.types.profiles import ModelProfile

FOR_TOKENIZERS = (
    "revision",
    "trust_remote_code",
    "token",
    "subfolder",
    "cache_dir",
    "local_files_only",
    "gguf_file",
)
SECRET = "token"
Given: TypeAlias = (
    "HFModel | LoadedModel | PreTrainedModel | nn.Module | Pipeline | str | Path | None"
)
"""A model in any form, including a PEFT model. None means the model that the settings name."""
Tokens: TypeAlias = PreTrainedTokenizerBase | str | Path | None
"""The tokenizer of a loaded model, or the folder or id from which the tokenizer is loaded."""
ProfileOf = Callable[[str], ModelProfile | None]


def load_model(
    source: str | Path,
    dtype: str = "bfloat16",
    device: str = "cpu",
    profile_of: ProfileOf | None = None,
    *,
    model_kwargs: Mapping[str, Any] | None = None,
    home: Path | None = None,
    pack: bool = True,
) -> HFModel:
    """Load a model and its tokenizer from a folder or a Hugging Face id.

    Weights are packed for fast matrix products on a CPU (`hf/packed_linear.py`), unless the weights
    are quantised, the model has adapters, or the model's KV cannot be reused.

    Args:
        source: A folder with weights, an adapter or a chunk adapter, or a Hugging Face id.
        dtype: "float32", "bfloat16" or "float16". A dtype in `model_kwargs` has precedence.
        device: The device of the model. A `device_map` in `model_kwargs` has precedence.
        profile_of: Returns the stored profile of a fingerprint, so that models are probed once.
        model_kwargs: Options of `from_pretrained`. `types.choices.LOADING` lists their names.
        home: Folder for digests of weights and tokenizers, and for prepared base models. If None,
            digests are not cached, and base models are prepared in the default folder.
        pack: True if weights may be packed. Packed weights cannot be trained.

    Raises:
        ModelError: The model cannot be loaded. The message says what to do.
    """
    require_device(device)
    options = {**(model_kwargs or {})}
    given_dtype = options.pop("torch_dtype", options.pop("dtype", None))
    dtype = dtype if given_dtype in (None, "auto") else dtype_named(given_dtype)
    options.setdefault("trust_remote_code", False)
    adapted_chunks = Path(source) / CHUNK_ADAPTER
    has_chunk_adapter = (adapted_chunks / ADAPTER_CONFIG).is_file()
    if has_chunk_adapter:
        source = _base_of(adapted_chunks, home, options)
    folder = Path(source)
    public_options = {key: value for key, value in options.items() if key != SECRET}
    load_options = {"dtype": dtype, "device": torch.device(device).type, **public_options}
    with _readable_errors(source):
        if isinstance(source, str) and not folder.is_dir():
            folder = _adapter_on_hub(source, options) or folder
        shipped = read_shipped(adapted_chunks.parent if has_chunk_adapter else folder)
        is_adapter = (folder / ADAPTER_CONFIG).is_file()
        base = _base_of(folder, home, options) if is_adapter else source
        has_words = is_adapter and (folder / "tokenizer_config.json").is_file()
        words_from, merge = folder if has_words else base, options.pop("merge_adapter", None)
        parts = {folder, Path(base)}
        # Digests are cached only if all parts are local folders, the tokenizer has a
        # tokenizer.json (needs no conversion), and no code of the model's folder runs.
        is_local = (
            all(path.is_dir() for path in parts) and (Path(words_from) / "tokenizer.json").is_file()
        )
        is_known = is_local and not options["trust_remote_code"]
        kept = kept_file(home, parts, load_options) if is_known else None
        with _readable_errors(base):
            tokenizer = _tokenizer(words_from, options)
            model = load_weights(base, dtype, device, options)
        if is_adapter:
            model = _bare(load_adapted(model, folder, merge))
    generation = model.generation_config
    if generation is not None and generation.eos_token_id is None:
        generation.eos_token_id = tokenizer.eos_token_id
    if kept is not None and kept != kept_file(home, parts, load_options):
        kept = None  # files changed during loading, so the digests of the loaded data are unknown
    known = kept_digests(kept) if kept is not None else None
    weights, words = known or (None, tokenizer_digest(tokenizer))
    chunk_adapter = read_chunk_adapter(adapted_chunks, model) if has_chunk_adapter else None
    drift = None if has_chunk_adapter else _drift_of(model, folder / DRIFT_NAME)
    loaded = HFModel(model, tokenizer, profile_of, drift, weights, chunk_adapter, words)
    if not (is_quantised(model) or is_adapter):
        loaded.files = _files_of(source, options)
    if kept is not None and known is None:
        keep_digests(kept, loaded.weights, words)
    if shipped is not None:
        loaded.profile = shipped.over(loaded.profile)
    has_adapters = any(type(each).__module__.startswith("peft.") for each in model.modules())
    return loaded if is_quantised(model) or has_adapters or not pack else loaded.packed()


def load_tokenizer(
    name_or_path: str, home: Path, model_kwargs: Mapping[str, Any]
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model, but not the weights.

    Args:
        name_or_path: A model in any form that the setting `model` accepts.
        home: Folder of prepared models.
        model_kwargs: Options of `from_pretrained`.

    Raises:
        ModelError: The model does not exist or has no tokenizer.
    """
    source = resolve_llm(name_or_path, home)
    require_hub(source, model_kwargs)
    with _readable_errors(source):
        for adapted in (Path(source) / CHUNK_ADAPTER, Path(source)):
            if (adapted / ADAPTER_CONFIG).is_file() and not (
                adapted / "tokenizer_config.json"
            ).is_file():
                source = _base_of(adapted, home, model_kwargs)
        return _tokenizer(source, model_kwargs)


@dataclass(frozen=True)
class LoadedModel:
    """A model loaded by the user, with its tokenizer. Do not modify the model while it is used."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def of(cls, given: Given, tokenizer: Tokens = None) -> LoadedModel:
        """Return model and tokenizer of a `PreTrainedModel`, a `pipeline` or a PEFT model.

        Args:
            given: The loaded object.
            tokenizer: The tokenizer, or the folder or id from which the tokenizer is loaded. If
                None, a pipeline's own tokenizer is used.

        Raises:
            ModelError: The object is of a different type, is not a causal LM, or has no tokenizer.
        """
        if isinstance(given, Pipeline):
            tokenizer = tokenizer if tokenizer is not None else given.tokenizer
            given = given.model
        model = _bare(given)
        if isinstance(tokenizer, str | Path):
            with _readable_errors(tokenizer):
                tokenizer = _tokenizer(tokenizer, {"trust_remote_code": False})
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            found = "none" if tokenizer is None else type(tokenizer).__name__
            raise ModelError(
                f"The loaded model {_name_of(model)} needs its tokenizer, found {found}. Pass"
                " tokenizer=AutoTokenizer.from_pretrained(...) in addition to model=..."
            )
        return cls(model, tokenizer)

    @property
    def name(self) -> str:
        """The name in the model's config, or the model's type if there is no name."""
        return _name_of(self.model)


def _bare(given: object) -> PreTrainedModel:
    """Return an object's causal LM with its adapters; raise ModelError if there is no causal LM."""
    given = getattr(given, "_orig_mod", given)  # unwraps torch.compile
    if type(given).__module__.partition(".")[0] == "peft":
        wrapped: Any = given
        for config in getattr(wrapped, "peft_config", {}).values():
            refuse_outside(config)
        given = wrapped.get_base_model()
    if not isinstance(given, PreTrainedModel):
        raise ModelError(
            "The model must be a name, a folder, a loaded PreTrainedModel, a pipeline or a PEFT"
            f" model; found {type(given).__module__}.{type(given).__name__}."
        )
    if given.config.is_encoder_decoder or given.get_output_embeddings() is None:
        raise ModelError(
            "The model must be a decoder that generates text (AutoModelForCausalLM), found"
            f" {type(given).__name__}. Load the model with"
            " AutoModelForCausalLM.from_pretrained(...)."
        )
    return given


def _base_of(folder: Path, home: Path | None, options: Mapping[str, Any]) -> str | Path:
    """Return the folder or id of an adapter's base model; raise ModelError if none can be found."""
    name = read_json_object(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not name or not isinstance(name, str):
        raise ModelError(
            f"The adapter in '{folder}' does not name its base model. Set base_model_name_or_path"
            f" in {ADAPTER_CONFIG} to a folder, Hugging Face id or name of `ragfuse models ls`."
        )
    if (folder / name).is_dir() and not Path(name).is_absolute():
        return (folder / name).resolve()
    from ragfuse.settings import Settings

    try:
        base = resolve_llm(name, home if home is not None else Settings().home)
        require_hub(base, options)
    except ModelError as error:
        raise ModelError(
            f"The base model of the adapter in '{folder}' cannot be loaded"
            f" (base_model_name_or_path in {ADAPTER_CONFIG}). {error}"
        ) from error
    return base


def _adapter_on_hub(name: str, options: Mapping[str, Any]) -> Path | None:
    """Download an adapter, except pickled files; return None if the id is not an adapter."""
    from huggingface_hub import snapshot_download
    from transformers.utils.peft_utils import find_adapter_config_file

    where = {
        key: options[key]
        for key in ("revision", "token", "cache_dir", "local_files_only")
        if key in options
    }
    if find_adapter_config_file(name, **where) is None:
        return None
    return Path(
        snapshot_download(
            name, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt"], **where
        )
    )


def _drift_of(model: PreTrainedModel, file: Path) -> ChunkKV | None:
    """Load the drift from a file onto the model's device; return None if there is no file."""
    if not file.is_file():
        return None
    with _readable_errors(file):
        parts = load_file(file, device=str(model.device))
        layers = range(model.config.get_text_config().num_hidden_layers)
        return ChunkKV(tuple(LayerKV(parts[f"keys.{at}"], parts[f"values.{at}"]) for at in layers))


def _tokenizer(source: str | Path, options: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    given = {name: options[name] for name in FOR_TOKENIZERS if name in options}
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, **given)
    return found


def _files_of(source: str | Path, options: Mapping[str, Any]) -> Path | None:
    """Return the folder of the safetensors files from which a model was read, if known."""
    if options.get("gguf_file") or options.get("subfolder") or options.get("cache_dir"):
        return None
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(str(source), "config.json", revision=options.get("revision"))
    return Path(config).parent if isinstance(config, str) else None


def _name_of(model: PreTrainedModel) -> str:
    return str(model.config._name_or_path) or str(model.config.model_type)


@contextmanager
def _readable_errors(source: object) -> Iterator[None]:
    """Convert loading errors to a ModelError with advice."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # raised by transformers, safetensors, tokenizers or PEFT
        advice = "Use a complete local folder, a Hugging Face id, or a name of `ragfuse models ls`."
        if "trust_remote_code" in str(error):
            advice = (
                "The model needs its own Python code: review the code, then load the model with"
                " model_kwargs={'trust_remote_code': True}."
            )
        elif isinstance(error, ImportError):
            advice = "Install the package that the error names."
        found = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(f"No model could be loaded from '{source}' ({found}). {advice}") from error
