"""Checks a model's `generation_config.json`, which transformers takes as it is, or leaves out where it is damaged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ragfuse.errors import ModelError
from ragfuse.hf.json_object import read_json_object

GENERATION_CONFIG = "generation_config.json"


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _all(value: Any, is_one: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(is_one, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_ID = "a token id", _is_id
_ID_OR_IDS = "a token id or a list of them", lambda value: _is_id(value) or _all(value, _is_id)
_IDS = "a list of token ids", lambda value: _all(value, _is_id)
_NUMBER = "a number", _is_number
_ABOVE_0 = "a number above 0", lambda value: _is_number(value) and value > 0
_TEXTS = "a text or a list of texts", lambda value: _is_text(value) or _all(value, _is_text)
GENERATION_FIELDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = MappingProxyType(
    {
        **dict.fromkeys(("bos_token_id", "pad_token_id", "forced_bos_token_id"), _ID),
        **dict.fromkeys(("eos_token_id", "forced_eos_token_id"), _ID_OR_IDS),
        **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), _IDS),
        **dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "typical_p", "length_penalty"), _NUMBER),
        **dict.fromkeys(("max_new_tokens", "max_length", "num_beams", "num_return_sequences"), _ABOVE_0),
        "repetition_penalty": _ABOVE_0,
        "no_repeat_ngram_size": _NUMBER,
        "stop_strings": _TEXTS,
    }
)
"""What is wanted of each field, and whether a value is that. null is always allowed, and stands for the default."""


def check_generation_config(folder: Path) -> None:
    """Check the generation config of a model's folder, if it has one.

    Raises:
        ModelError: The file is damaged, or a field has a value of the wrong kind.
    """
    file = folder / GENERATION_CONFIG
    if not file.is_file():
        return
    for name, value in read_json_object(file).items():
        wanted, is_right = GENERATION_FIELDS.get(name, ("", lambda _: True))
        if value is not None and not is_right(value):
            raise ModelError(f"Wanted {wanted} as {name} in '{file}', found {value!r:.60}. Correct the file.")


def complete_generation_config(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Let the tokenizer's end token end an answer where the model's generation config has none."""
    config = model.generation_config
    if config is not None and config.eos_token_id is None and tokenizer.eos_token_id is not None:
        config.eos_token_id = tokenizer.eos_token_id
