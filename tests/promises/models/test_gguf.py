"""A GGUF file is a model: turned into a folder once, anew where it changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ragfuse import ModelError
from ragfuse.models import resolve_llm
from ragfuse.models.loader import load_model

WORDS = ["<unk>", "<s>", "</s>", *(chr(code) for code in range(33, 127))]


def write_gguf(path: Path, seed: int = 0, left_out: str = "-") -> LlamaForCausalLM:
    """A random llama in 8 bits, as llama.cpp writes one; gives the model as it was before."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    to = gguf.GGUFWriter(path, "llama")
    facts = {
        "context_length": 256,
        "embedding_length": 64,
        "block_count": 2,
        "feed_forward_length": 128,
        "head_count": 2,
        "head_count_kv": 2,
        "layer_norm_rms_eps": config.rms_norm_eps,
        "rope_dimension_count": 32,
        "vocab_size": len(WORDS),
        "tokenizer_model": "llama",
        "token_list": WORDS,
        "token_scores": [-float(index) for index in range(len(WORDS))],
        "token_types": [3, 3, 3, *[1] * (len(WORDS) - 3)],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unk_token_id": 0,
    }
    for name, value in facts.items():
        getattr(to, f"add_{name}")(value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, weight in model.state_dict().items():
        stem, _, end = name.rpartition(".")
        if left_out in name:
            continue
        data: Any = weight.float()
        if "q_proj" in name or "k_proj" in name:  # llama.cpp pairs neighbours
            data = data.view(2, 2, 16, 64).transpose(1, 2).reshape(64, 64)
        array, kind = data.contiguous().numpy(), None
        if array.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            array = gguf.quantize(array, kind)
        to.add_tensor(f"{names.get_name(stem)}.{end}", array, raw_dtype=kind)
    to.write_header_to_file()
    to.write_kv_data_to_file()
    to.write_tensors_to_file()
    to.close()
    return model.eval()


def test_a_gguf_file_is_turned_into_a_folder_once_and_answers_as_its_model(tmp_path):
    model = write_gguf(tmp_path / "tiny.gguf")
    home = tmp_path / "home"
    folder = Path(resolve_llm(str(tmp_path / "tiny.gguf"), home))
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve_llm(str(tmp_path), home) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made
    loaded = load_model(folder, "float32")
    ids = torch.tensor([[5, 9, 40, 41, 17, 60]])
    with torch.no_grad():
        wanted = model(input_ids=ids).logits[0, -1]
    found = loaded.full_prefill(ids[0].tolist()).logits
    assert float((found - wanted).norm() / wanted.norm()) < 0.05
    write_gguf(tmp_path / "tiny.gguf", seed=1)
    again = load_model(resolve_llm(str(tmp_path / "tiny.gguf"), home), "float32")
    assert again.fingerprint != loaded.fingerprint


def test_weights_that_a_gguf_file_lacks_are_not_filled_with_random_ones(tmp_path):
    write_gguf(tmp_path / "part.gguf", left_out="layers.1.mlp")
    with pytest.raises(ModelError, match=r"part\.gguf.*layers\.1\.mlp"):
        resolve_llm(str(tmp_path / "part.gguf"), tmp_path / "home")
    assert not [*(tmp_path / "home" / "models").glob("*part*/")]


def test_a_truncated_gguf_file_is_an_error(tmp_path):
    write_gguf(tmp_path / "whole.gguf")
    whole = (tmp_path / "whole.gguf").read_bytes()
    for left in (8, 500, len(whole) // 2, len(whole) - 40):
        (tmp_path / "cut.gguf").write_bytes(whole[:left])
        with pytest.raises(ModelError, match=r"cut\.gguf' as the GGUF file"):
            resolve_llm(str(tmp_path / "cut.gguf"), tmp_path / "home")
