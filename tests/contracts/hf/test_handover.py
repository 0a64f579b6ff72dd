"""What is written after a prefill is what transformers' own generate writes, whatever it is asked
for.
"""

from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
)

from ragfuse.errors import SettingsError
from ragfuse.hf.handover import generate
from ragfuse.hf.model import HFModel, Prefill
from tests.kits import hf as kit

LENGTH = 14
GREEDY = kit.greedy(LENGTH)


class Shifted(LogitsProcessor):
    """Prefers the tokens that follow the last one."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter_add(
            1, (input_ids[:, -1:] + 1) % 256, torch.full_like(scores[:, :1], 3.0)
        )


def fused(model: HFModel, seed: int = 0) -> Prefill:
    """A prompt whose cached rows were all recomputed, so that the KV is the model's own."""
    return kit.fuse(model, kit.usual(seed), "hkvd", 1.0)


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "one token": {"do_sample": False, "max_new_tokens": 1},
    "sampling": {"do_sample": True},
    "sampling among few": {"do_sample": True, "top_k": 5, "top_p": 0.8, "temperature": 0.7},
    "no early end": {"do_sample": False, "min_new_tokens": LENGTH},
    "repetition penalty": {
        "do_sample": False,
        "repetition_penalty": 1.7,
        "no_repeat_ngram_size": 2,
    },
    "forbidden words": {"do_sample": False, "bad_words_ids": [[40], [90], [120]]},
    "a logits processor": {
        "do_sample": False,
        "logits_processor": LogitsProcessorList([Shifted()]),
    },
    "an end token": {"do_sample": False, "eos_token_id": [*range(40, 140)]},
    "prefill in pieces": {"do_sample": False, "prefill_chunk_size": 16},
    "guidance": {"do_sample": False, "guidance_scale": 1.5},
    "a generation config": {
        "generation_config": GenerationConfig(
            max_new_tokens=LENGTH, do_sample=False, eos_token_id=2
        )
    },
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize(
    "name", ["llama", pytest.param("gemma3-two-ropes", marks=pytest.mark.slow)]
)
def test_options_work_as_in_transformers(name, options):
    model = kit.family(name)
    if "generation_config" not in options:
        options = {"max_new_tokens": LENGTH, **options}
    wanted = kit.theirs(model, kit.usual().token_ids, options, seed=11)
    assert generate(model, fused(model), options, seed=11) == wanted
    assert generate(model, model.full_prefill(kit.usual().token_ids), options, seed=11) == wanted


@pytest.mark.parametrize("ratio", [0.0, 0.3])
def test_a_fused_prompt_goes_on_from_its_own_kv(ratio):
    """Step by step through the model's forward, over the KV that the prefill left."""
    model, scene = kit.family("llama"), kit.usual()
    cache, written = DynamicCache(), []
    prefill = kit.fuse(model, scene, "hkvd", ratio)
    for index, (keys, values) in enumerate(kit.states(prefill)):
        cache.update(keys[None].clone(), values[None].clone(), index)
    logits = prefill.logits
    for step in range(LENGTH):
        written.append(int(logits.argmax()))
        at = kit.tensor([[len(scene.token_ids) + step]])
        with torch.no_grad():
            logits = model.model(
                kit.tensor([written[-1:]]), past_key_values=cache, position_ids=at
            ).logits[0, -1]
    assert generate(model, prefill, GREEDY) == written


@pytest.mark.parametrize("companion", [False, True])
def test_an_answer_stands_right_behind_a_prompt_with_gaps(companion):
    """The first new token's position is the last one's plus one, not the number of tokens."""
    model = kit.family("llama")
    scene = kit.scene([6, 18, 8], ["prefix", "chunk", "fresh"], gaps=[0, 40, 25])
    ids, positions, written = list(scene.token_ids), scene.positions.tolist(), []
    for _ in range(LENGTH):
        tokens, at = kit.tensor([ids + written]), kit.tensor([positions])
        with torch.no_grad():
            logits = model.model(tokens, position_ids=at, past_key_values=DynamicCache()).logits
        written.append(int(logits[0, -1].argmax()))
        positions.append(positions[-1] + 1)
    prompt = kit.usual().token_ids
    prefills, wanted = [kit.fuse(model, scene, "hkvd", 1.0)], [written]
    if companion:
        prefills.append(model.full_prefill(prompt))
        wanted.append(kit.theirs(model, prompt, GREEDY))
    assert kit.together(model, [(each, {"options": GREEDY}) for each in prefills]) == wanted


@pytest.mark.parametrize(
    "options",
    [
        {"assistant_model": object()},
        {"cache_implementation": "static"},
        {"past_key_values": DynamicCache()},
        {"input_ids": torch.zeros(1, 3)},
        {"generation_config": GenerationConfig(prompt_lookup_num_tokens=3)},
        {"num_beams": 3},
        {"num_return_sequences": 2},
    ],
    ids=lambda options: "-".join(options),
)
def test_another_cache_and_several_sequences_are_refused(options):
    model = kit.family("llama")
    prefill = fused(model)
    with pytest.raises(SettingsError, match="option"):
        generate(model, prefill, {"max_new_tokens": 3, **options})
    assert generate(model, prefill, GREEDY) == kit.theirs(model, kit.usual().token_ids, GREEDY)


def test_a_models_own_wish_for_another_cache_or_beams_is_overruled():
    model = kit.HFModel(kit.build("llama", {}), kit.tokenizer())
    wanted = kit.theirs(model, kit.usual().token_ids, GREEDY)
    own = {"cache_implementation": "static", "use_cache": False, "num_beams": 2}
    model.model.generation_config.update(**own)
    assert generate(model, fused(model), GREEDY) == wanted
    assert own.items() <= model.model.generation_config.to_dict().items()


def test_a_long_answer_outgrows_its_buffers():
    model, options = kit.family("mistral-window"), kit.greedy(150)
    wanted = kit.theirs(model, kit.usual().token_ids, options)
    assert generate(model, fused(model), options) == wanted
