"""Train the reader: a LoRA adapter that makes a small chat model answer from passages, in a few words.

One pass over a context serves all its questions: each sees the context and itself, and stands at the position it
would have alone, so the loss is that of separate prompts at a fraction of the time.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from training.data import Example, Examples, Question, Template, split, squad, wikipedia
from training.lean import lean

ALL_ATTENTION_FUNCTIONS["branched"] = lambda *given, **named: branched(*given, **named)

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
WARM_UP = 20
"""Steps until the learning rate is whole."""
ALIGN = 128
"""Lengths are rounded to this, so that the same sizes of memory come again and again."""
SAVE_S = 300
"""Seconds between two savings of what is learned so far."""


class Coder:
    """Examples as ids, every piece tokenised apart, as ragfuse assembles prompts."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.end = tokenizer.eos_token_id

    def ids(self, text: str) -> list[int]:
        """Ids of a text, none added."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def context(self, template: Template, passages: Sequence[str]) -> tuple[list[int], str]:
        """Ids up to the last passage, and the text behind it with {question} in it."""
        turns = [{"role": "system", "content": template.system}] if template.system else []
        turns.append({"role": "user", "content": template.user})
        text = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        before, after = text.split("{context}")
        ids = self.ids(before)
        for i, passage in enumerate(passages):
            ids += self.ids(passage) + (self.ids(template.between) if i < len(passages) - 1 else [])
        return ids, after

    def question(self, after: str, question: str) -> list[int]:
        """Ids of what stands behind the last passage."""
        head, tail = after.split("{question}")
        return self.ids(head) + self.ids(question) + self.ids(tail)

    def answer(self, question: Question) -> list[int]:
        """Ids of an answer with its end."""
        return [*self.ids(question.answer), self.end]


def pack(coder: Coder, example: Example, max_tokens: int) -> dict[str, torch.Tensor]:
    """ids and positions int64 [1, T], mask bfloat16 [1, 1, n, T] of the last n tokens.

    where, targets int64 [m], weights float32 [m]: hidden states that the loss is taken of.
    """
    context, after = coder.context(example.template, example.passages)
    ids, positions, blocks, where, targets, weights = list(context), list(range(len(context))), [], [], [], []
    for question in example.questions:
        asked, said = coder.question(after, question.question), coder.answer(question)
        begin = len(ids)
        ids += asked + said[:-1]
        positions += range(len(context), len(context) + len(asked) + len(said) - 1)
        blocks.append((begin, len(ids)))
        first = begin + len(asked) - 1
        where += range(first, first + len(said))
        targets += said
        weights += [1 / len(said) ** 0.5] * len(said)
        if len(ids) > max_tokens:
            break
    seen, used = len(context), len(ids)
    clear, total = seen // ALIGN * ALIGN, -(-used // (2 * ALIGN)) * 2 * ALIGN
    ids += [coder.end] * (total - used)
    positions += [0] * (total - used)
    mask = torch.full((total - clear, total), float("-inf"), dtype=torch.bfloat16)
    mask[: seen - clear, :seen] = torch.full((seen, seen), float("-inf")).triu_(1)[clear:]
    for begin, end in blocks:
        mask[begin - clear : end - clear, :seen] = 0
        mask[begin - clear : end - clear, begin:end].triu_(1)
    rest = torch.arange(used, total)
    mask[rest - clear, rest] = 0
    return {
        "ids": torch.tensor([ids]),
        "positions": torch.tensor([positions]),
        "mask": mask[None, None],
        "where": torch.tensor(where),
        "targets": torch.tensor(targets),
        "weights": torch.tensor(weights),
    }


def branched(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, **given: Any
) -> tuple[torch.Tensor, None]:
    """Attention of a context and of the questions behind it, apart: half the work of one call under a whole mask.

    query [1, H, T, D], key and value [1, Hkv, T, D]; mask additive [1, 1, n, T] for the n tokens of the questions.
    """
    n = key.shape[2] - mask.shape[2]
    scale, attend = given["scaling"], torch.nn.functional.scaled_dot_product_attention
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    context = attend(query[:, :, :n], key[:, :, :n], value[:, :, :n], is_causal=True, scale=scale)
    asked = attend(query[:, :, n:], key, value, attn_mask=mask, scale=scale)
    return torch.cat((context, asked), 2).transpose(1, 2).contiguous(), None


def loss_of(model: Any, packed: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean cross-entropy over answer tokens, those of long answers weighing less."""
    inner = model.get_base_model()
    hidden = inner.model(
        input_ids=packed["ids"], position_ids=packed["positions"], attention_mask=packed["mask"], use_cache=False
    ).last_hidden_state[0, packed["where"]]
    each = torch.nn.functional.cross_entropy(inner.lm_head(hidden).float(), packed["targets"], reduction="none")
    return (each * packed["weights"]).sum() / packed["weights"].sum()


def main() -> None:
    """Train for as long as was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="Folder that `ragfuse models path smollm2-135m` prints.")
    parser.add_argument("--squad", type=Path, required=True, help="SQuAD 2.0 JSON.")
    parser.add_argument("--wikipedia", type=Path, required=True, help="JSONL of {title, text}.")
    parser.add_argument("--out", type=Path, required=True, help="Folder of the adapter.")
    parser.add_argument("--start", type=Path, help="Folder of an adapter to go on from; take a lower --lr then.")
    parser.add_argument("--minutes", type=float, default=50, help="The learning rate falls to 0 in them.")
    parser.add_argument("--batch", type=int, default=2, help="Contexts a step.")
    parser.add_argument("--questions", type=int, default=12, help="Most questions of a context.")
    parser.add_argument("--max-tokens", type=int, default=3000)
    parser.add_argument("--max-words", type=int, default=1900)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    torch.manual_seed(chosen.seed)
    random.seed(chosen.seed)
    torch.set_num_threads(chosen.threads)

    coder = Coder(AutoTokenizer.from_pretrained(chosen.model))
    base = AutoModelForCausalLM.from_pretrained(chosen.model, dtype=torch.bfloat16, attn_implementation="branched")
    if chosen.start is not None:
        model = PeftModel.from_pretrained(base, chosen.start, is_trainable=True)
    else:
        lora = LoraConfig(r=chosen.rank, lora_alpha=2 * chosen.rank, target_modules=LINEAR, task_type="CAUSAL_LM")
        model = get_peft_model(base, lora)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data = weight.data.float()
    lean(model)
    train, held = split(squad(chosen.squad))
    print("held out:", ", ".join(held), flush=True)
    examples = Examples(train, wikipedia(chosen.wikipedia), chosen.seed, chosen.max_words)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=chosen.lr, weight_decay=0.01, betas=(0.9, 0.98))
    model.train()
    chosen.out.mkdir(parents=True, exist_ok=True)
    began, smooth, tokens, seconds, step, saved = time.monotonic(), 0.0, 0, 0.0, 0, 0
    with (chosen.out / "train.jsonl").open("w", buffering=1) as log:
        while (done := seconds / (60 * chosen.minutes)) < 1:
            for group in optimizer.param_groups:
                group["lr"] = chosen.lr * min((step + 1) / WARM_UP, max(0.02, 1 - done))
            total = 0.0
            for _ in range(chosen.batch):
                packed = pack(coder, examples.draw(chosen.questions), chosen.max_tokens)
                loss = loss_of(model, packed) / chosen.batch
                loss.backward()
                total += loss.item()
                tokens += packed["ids"].shape[1]
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step, smooth = step + 1, 0.95 * smooth + 0.05 * total if step else total
            seconds = time.monotonic() - began
            log.write(json.dumps({"step": step, "loss": total, "seconds": seconds, "tokens": tokens}) + "\n")
            if step % 10 == 0:
                print(f"{step} steps, loss {smooth:.3f}, {tokens / seconds:.0f} tokens/s, {done:.0%}", flush=True)
            if seconds - saved > SAVE_S:
                model.save_pretrained(chosen.out)
                saved = seconds
    model.save_pretrained(chosen.out)
    shrink(chosen.out)


KEPT = ("peft_type", "task_type", "r", "lora_alpha", "bias", "target_modules", "inference_mode")


def shrink(folder: Path) -> None:
    """Leave of a saved adapter what merging it needs, its weights in bf16: what comes along with the package."""
    weights = load_file(folder / "adapter_model.safetensors")
    save_file({name: weight.bfloat16() for name, weight in weights.items()}, folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    kept = {"base_model_name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct", **{name: config[name] for name in KEPT}}
    kept["target_modules"] = sorted(kept["target_modules"])
    (folder / "adapter_config.json").write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
