"""Train the reader: a LoRA adapter that makes a small chat model answer from passages, in a few
words.

One pass over a context serves all its questions: each sees the context and itself, and stands at
the position it would have alone, so the loss is that of separate prompts at a fraction of the time.
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
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from ragfuse.adapt.examples import Template
from ragfuse.hf.branches import Branch, BranchModel, ContextTokens
from ragfuse.hf.chunk_adapter import LoraAdapter
from ragfuse.models.loader import load_model
from training.data import AnsweredExample, Examples, split, squad, wikipedia
from training.lean import lean
from training.rules import Question

WARM_UP = 20
"""Steps until the learning rate is whole."""
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


def branches_of(
    coder: Coder, example: AnsweredExample, max_tokens: int
) -> tuple[ContextTokens, list[Branch]]:
    """Return an example's context and its questions with their answers, as many as fit into
    `max_tokens`.
    """
    context, after = coder.context(example.template, example.passages)
    branches, count = [], len(context)
    for question in example.questions:
        branches.append(
            Branch(tuple(coder.question(after, question.question)), tuple(coder.answer(question)))
        )
        count += len(branches[-1].tokens)
        if count > max_tokens:
            break
    return ContextTokens(tuple(context), ()), branches


def loss_of(model: BranchModel, context: ContextTokens, branches: Sequence[Branch]) -> torch.Tensor:
    """Return the mean cross-entropy over answer tokens, those of long answers weighing less."""
    logits = model.full(context, branches).logits
    targets = torch.tensor(
        [token for branch in branches for token in branch.answer], device=logits.device
    )
    shares = [len(branch.answer) ** -0.5 for branch in branches for _ in branch.answer]
    weights = torch.tensor(shares, device=logits.device)
    each = torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")
    return (each * weights).sum() / weights.sum()


def main() -> None:
    """Train for as long as was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", required=True, help="Folder that `ragfuse models path smollm2-135m` prints."
    )
    parser.add_argument("--squad", type=Path, required=True, help="SQuAD 2.0 JSON.")
    parser.add_argument("--wikipedia", type=Path, required=True, help="JSONL of {title, text}.")
    parser.add_argument("--out", type=Path, required=True, help="Folder of the adapter.")
    parser.add_argument(
        "--start", type=Path, help="Folder of an adapter to go on from; take a lower --lr then."
    )
    parser.add_argument(
        "--minutes", type=float, default=50, help="The learning rate falls to 0 in them."
    )
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
    loaded = load_model(chosen.model, "bfloat16", pack=False)
    adapter = LoraAdapter(loaded.model, chosen.rank, chosen.seed, BASE)
    if chosen.start is not None:
        adapter.read(chosen.start)
    lean(loaded.model)
    model = BranchModel(loaded.model, loaded.profile, ())
    train, held = split(squad(chosen.squad))
    print("held out:", ", ".join(held), flush=True)
    examples = Examples(train, wikipedia(chosen.wikipedia), chosen.seed, chosen.max_words)
    weights = list(adapter.weights.values())
    optimizer = torch.optim.AdamW(weights, lr=chosen.lr, weight_decay=0.01, betas=(0.9, 0.98))
    chosen.out.mkdir(parents=True, exist_ok=True)
    began, smooth, tokens, seconds, step, saved = time.monotonic(), 0.0, 0, 0.0, 0, 0
    with (chosen.out / "train.jsonl").open("w", buffering=1) as log:
        while (done := seconds / (60 * chosen.minutes)) < 1:
            for group in optimizer.param_groups:
                group["lr"] = chosen.lr * min((step + 1) / WARM_UP, max(0.02, 1 - done))
            total = 0.0
            for _ in range(chosen.batch):
                context, branches = branches_of(
                    coder, examples.draw(chosen.questions), chosen.max_tokens
                )
                loss = loss_of(model, context, branches) / chosen.batch
                loss.backward()
                total += loss.item()
                tokens += len(context.token_ids) + sum(len(branch.tokens) for branch in branches)
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step, smooth = step + 1, 0.95 * smooth + 0.05 * total if step else total
            seconds = time.monotonic() - began
            log.write(
                json.dumps({"step": step, "loss": total, "seconds": seconds, "tokens": tokens})
                + "\n"
            )
            if step % 10 == 0:
                print(
                    f"{step} steps, loss {smooth:.3f}, {tokens / seconds:.0f} tokens/s, {done:.0%}",
                    flush=True,
                )
            if seconds - saved > SAVE_S:
                adapter.save(chosen.out)
                saved = seconds
    adapter.save(chosen.out)
    shrink(chosen.out)


BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
KEPT = ("peft_type", "task_type", "r", "lora_alpha", "bias", "target_modules", "inference_mode")


def shrink(folder: Path) -> None:
    """Leave of a saved adapter what merging it needs, its weights in bf16: what comes along with
    the package.
    """
    weights = load_file(folder / "adapter_model.safetensors")
    save_file(
        {name: weight.bfloat16() for name, weight in weights.items()},
        folder / "adapter_model.safetensors",
    )
    config = json.loads((folder / "adapter_config.json").read_text())
    kept = {"base_model_name_or_path": BASE, **{name: config[name] for name in KEPT}}
    kept["target_modules"] = sorted(kept["target_modules"])
    (folder / "adapter_config.json").write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
