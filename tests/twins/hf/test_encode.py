"""A run is encoded alone or behind a context, at its own positions; the model's name covers what
decides its KV.
"""

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from ragfuse.errors import ModelError
from ragfuse.fuse.rope import shifted
from ragfuse.hf.model import HFModel, fingerprint
from ragfuse.models.loader import load_model
from tests.kits import hf as kit
from tests.kits.families import FAMILIES


@pytest.mark.parametrize("name", FAMILIES)
def test_a_run_behind_a_context_equals_the_rows_of_a_longer_prefill(name):
    model, context, run = kit.family(name), kit.ids(11, 1), kit.ids(26, 2)
    encoded = model.encode(run, context=context)
    whole = kit.states(model.full_prefill([*context, *run]))
    for layout, layer, parts in zip(model.profile.rope, encoded.layers, whole, strict=True):
        for part, wanted in zip(("keys", "values"), parts, strict=True):
            turned = layout if layout is not None and layout.part == part else None
            found = shifted(getattr(layer, part), len(context), turned)
            assert kit.off(found, wanted[:, len(context) :]) < kit.EXACT
            assert found.untyped_storage().nbytes() == found.nbytes


# what a fingerprint covers


def fresh(seed: int = 0, dtype: torch.dtype = torch.float32, **options: object) -> str:
    return fingerprint(kit.build("llama", dict(options), seed, dtype), kit.tokenizer())


def test_fingerprints_tell_models_apart():
    prints = [
        fresh(),
        fresh(seed=1),
        fresh(dtype=torch.bfloat16),
        fresh(dtype=torch.float16),
        fresh(rope_theta=20_000.0),
        fresh(rope_scaling={"rope_type": "linear", "factor": 2.0}),
        fresh(rope_scaling={"rope_type": "linear", "factor": 4.0}),
        fresh(rms_norm_eps=1e-4),
        fresh(num_hidden_layers=3),
    ]
    assert len(set(prints)) == len(prints)
    assert fresh() == prints[0] == kit.family("llama").fingerprint


def test_another_tokenizer_is_another_model_and_using_it_makes_none():
    model, words = kit.build("llama", {}), kit.tokenizer()
    other = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0, "other": 1}, unk_token="<pad>"))
    )
    assert len({fingerprint(model, each) for each in (words, other, None)}) == 3
    before = fingerprint(model, words)
    words("abc", padding="max_length", max_length=9, truncation=True)
    assert fingerprint(model, words) == before


def test_a_model_keeps_its_fingerprint_on_its_way_through_files(tmp_path):
    """Another dtype is another model, another attention is none."""
    folder, moved = tmp_path / "a", tmp_path / "b"
    kit.build("llama", {}).save_pretrained(folder)
    with pytest.raises(ModelError, match=rf"{folder}.*tokenizer"):
        load_model(folder)
    kit.tokenizer().save_pretrained(folder)
    first = load_model(folder, "float32").fingerprint
    folder.rename(moved)
    assert load_model(moved, "float32").fingerprint == first
    low = load_model(moved, "bfloat16")
    assert low.dtype == torch.bfloat16
    assert low.fingerprint != first
    eager = AutoModelForCausalLM.from_pretrained(
        moved, dtype=torch.float32, attn_implementation="eager"
    )
    model = HFModel(eager, load_model(moved).tokenizer)
    assert model.fingerprint == first
    kit.fuse(model, kit.usual(), "hkvd", 0.3)
    assert eager.config._attn_implementation == "eager"
