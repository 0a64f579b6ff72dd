"""One set of weights in every peer's form: a folder of safetensors, and a GGUF in bf16."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ragfuse.errors import ModelError
from ragfuse.models.embedded import embedded

HF_NAMES = (
    (r"token_embd", "model.embed_tokens"),
    (r"output_norm", "model.norm"),
    (r"output", "lm_head"),
    (r"blk\.(\d+)\.attn_norm", r"model.layers.\1.input_layernorm"),
    (r"blk\.(\d+)\.ffn_norm", r"model.layers.\1.post_attention_layernorm"),
    (r"blk\.(\d+)\.attn_([qkv])", r"model.layers.\1.self_attn.\2_proj"),
    (r"blk\.(\d+)\.attn_output", r"model.layers.\1.self_attn.o_proj"),
    (r"blk\.(\d+)\.ffn_(gate|up|down)", r"model.layers.\1.mlp.\2_proj"),
)
"""What GGUF calls a layer, and what transformers calls it in models like Llama and Qwen2."""
FAMILIES = ("llama", "qwen2")
"""Architectures whose GGUF can be written anew."""
BF16_FILE = 32
"""The file type of GGUF that says bf16."""


def own_gguf(model: str) -> Path | None:
    """Return the GGUF that a model's weights come from; None where it is no GGUF.

    That of an embedded model with an adapter has its weights without the adapter.
    """
    known = embedded(model)
    if known is not None:
        return known.source
    path = Path(model).expanduser()
    return path if path.suffix == ".gguf" and path.is_file() else None


def has_adapter(model: str) -> bool:
    """Return whether a model's weights differ from those in its GGUF."""
    known = embedded(model)
    return known is not None and bool(known.adapter)


def bf16_gguf(original: Path, folder: Path, into: Path) -> Path:
    """Write a GGUF with the weights of a folder in bf16, its other fields those of the original,
    unless it is there.

    Args:
        original: A GGUF of the same architecture and tokenizer.
        folder: The model's folder of safetensors.
        into: The folder of such files.

    Returns:
        The file.

    Raises:
        ModelError: The architecture is not known, or the folder's weights are those of another one.
    """
    stat = (folder / "model.safetensors").stat()
    target = into / f"{folder.name}-bf16-{stat.st_size:x}-{stat.st_mtime_ns:x}.gguf"
    if target.is_file():
        return target
    into.mkdir(parents=True, exist_ok=True)
    for old in into.glob(f"{folder.name}-bf16-*.gguf"):
        old.unlink()
    partial = target.with_suffix(".partial")
    try:
        _write(original, folder, partial)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return target


def _write(original: Path, folder: Path, target: Path) -> None:
    import gguf
    import numpy
    from safetensors import safe_open

    reader = gguf.GGUFReader(original)
    family = str(reader.fields["general.architecture"].contents())
    if family not in FAMILIES:
        raise ModelError(
            f"Wanted a GGUF whose weights can be written anew ({', '.join(FAMILIES)}), found"
            f" '{family}' in '{original}'. Name a model of these."
        )
    heads = (
        _heads(json.loads((folder / "config.json").read_text("utf-8"))) if family == "llama" else {}
    )
    writer = gguf.GGUFWriter(target, family)
    _copy_fields(reader, writer)
    with safe_open(folder / "model.safetensors", "pt") as weights:
        names = set(weights.keys())
        for tensor in reader.tensors:
            name = hf_name(tensor.name)
            if name == "lm_head.weight" and name not in names:
                name = "model.embed_tokens.weight"
            if name not in names:
                raise ModelError(
                    f"Wanted '{tensor.name}' of '{original}' as '{name}' in '{folder}', found no"
                    " such weights. Name a model of one architecture."
                )
            values = weights.get_tensor(name).float().numpy()
            for part, n_heads in heads.items():
                if f".attn_{part}." in tensor.name:
                    values = interleaved(values, n_heads)
            if values.ndim == 1:
                writer.add_tensor(tensor.name, values.astype(numpy.float32))
            else:
                kind = gguf.GGMLQuantizationType.BF16
                writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    writer.close()


def _copy_fields(reader: Any, writer: Any) -> None:
    import gguf

    for field in reader.fields.values():
        if field.name == "general.architecture" or field.name.startswith("GGUF."):
            continue
        kind = field.types[0]
        value = BF16_FILE if field.name == "general.file_type" else field.contents()
        part = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, value, kind, sub_type=part)


def hf_name(name: str) -> str:
    """Return what transformers calls a tensor of a GGUF, "" where it is not known."""
    layer, _, kind = name.rpartition(".")
    for pattern, replacement in HF_NAMES:
        if re.fullmatch(pattern, layer):
            return f"{re.sub(pattern, replacement, layer)}.{kind}"
    return ""


def _heads(config: Mapping[str, Any]) -> dict[str, int]:
    return {"q": int(config["num_attention_heads"]), "k": int(config["num_key_value_heads"])}


def interleaved(values: Any, n_heads: int) -> Any:
    """Return the rows of a projection of queries or keys as llama.cpp's Llama rotates them:
    neighbours in pairs.
    """
    halves = values.reshape(n_heads, 2, values.shape[0] // n_heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)
