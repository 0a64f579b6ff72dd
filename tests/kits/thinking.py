"""A tiny model that thinks: its template opens a thought, and the tag that ends it is one of its
likeliest tokens.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from integrations.tests.kit import TEMPLATE

OPENS = TEMPLATE.replace("<|assistant|>{% endif %}", "<|assistant|><think>\n{% endif %}")


def thinking_model(folder: Path, to: Path, template: str = OPENS, bias: float = 3.0) -> Path:
    """A copy of the tiny model with the tags as tokens; bias: how much likelier the closing one is
    than by chance.
    """
    words, model = (
        AutoTokenizer.from_pretrained(folder),
        AutoModelForCausalLM.from_pretrained(folder),
    )
    words.add_tokens(["<think>", "</think>"])
    words.chat_template = template
    model.resize_token_embeddings(len(words), mean_resizing=False)
    close = words.convert_tokens_to_ids("</think>")
    model.generation_config.sequence_bias = [[[close], bias]]
    with torch.no_grad():
        for weight in (model.lm_head.weight, model.get_input_embeddings().weight):
            weight[-2:] = 0.1 * torch.randn(
                weight[-2:].shape, generator=torch.Generator().manual_seed(0)
            )
    model.save_pretrained(to)
    words.save_pretrained(to)
    return to
