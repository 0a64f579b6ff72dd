"""A run is encoded alone or behind a context, at its own positions; the model's name covers what
decides its KV.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from ragfuse.errors import ModelError
from ragfuse.fuse.rope import shifted
from ragfuse.hf.model import HFModel, fingerprint
from ragfuse.models.loader import load_model
from ragfuse.types.profiles import ModelProfile
from tests.hf import kit
from tests.hf.families import FAMILIES

EXACT = 5e-6


@pytest.mark.parametrize("name", FAMILIES)
def test_a_run_behind_a_context_equals_the_rows_of_a_longer_prefill(name: str) -> None:
    model, context, run = kit.family(name), kit.ids(11, 1), kit.ids(26, 2)
    encoded = model.encode(run, context=context)
    whole = kit.states(model.full_prefill([*context, *run]))
    for layout, layer, parts in zip(model.profile.rope, encoded.layers, whole, strict=True):
        for part, wanted in zip(("keys", "values"), parts, strict=True):
            turned = layout if layout is not None and layout.part == part else None
            found = shifted(getattr(layer, part), len(context), turned)
            assert kit.off(found, wanted[:, len(context) :]) < EXACT


@pytest.mark.parametrize("context", [[], [5, 9, 77]])
def test_encoded_kv_owns_just_its_bytes_and_no_graph(context: list[int]) -> None:
    for layer in kit.family("llama").encode(kit.ids(12), context).layers:
        for part in (layer.keys, layer.values):
            assert part.is_contiguous()
            assert part.untyped_storage().nbytes() == part.nbytes
            assert not part.requires_grad


# what a fingerprint covers


def fresh(seed: int = 0, dtype: torch.dtype = torch.float32, **options: object) -> str:
    return fingerprint(kit.build("llama", dict(options), seed, dtype), kit.tokenizer())


def test_fingerprints_tell_models_apart() -> None:
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


def test_another_tokenizer_is_another_model() -> None:
    model = kit.build("llama", {})
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "other": 3}
    other = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    )
    assert len({fingerprint(model, each) for each in (kit.tokenizer(), other, None)}) == 3


def test_using_a_tokenizer_does_not_rename_the_model() -> None:
    model, words = kit.build("llama", {}), kit.tokenizer()
    before = fingerprint(model, words)
    words("abc", padding="max_length", max_length=9, truncation=True)
    assert fingerprint(model, words) == before


@pytest.mark.slow
def test_a_fingerprint_is_the_same_in_another_process() -> None:
    code = "from tests.hf.test_encode import fresh; print(fresh())"
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == fresh()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model and its tokenizer as files."""
    kit.build("llama", {}).save_pretrained(tmp_path / "a")
    kit.tokenizer().save_pretrained(tmp_path / "a")
    return tmp_path / "a"


def test_a_model_keeps_its_fingerprint_on_its_way_through_files(
    folder: Path, tmp_path: Path
) -> None:
    first = load_model(folder, "float32")
    folder.rename(tmp_path / "b")
    second = load_model(tmp_path / "b", "float32")
    assert first.fingerprint == second.fingerprint
    low = load_model(tmp_path / "b", "bfloat16")
    assert low.dtype == torch.bfloat16
    assert low.fingerprint != first.fingerprint


def test_the_attention_in_use_is_not_part_of_the_fingerprint(folder: Path) -> None:
    eager = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert fingerprint(eager, kit.tokenizer()) == fingerprint(plain, kit.tokenizer())
    model = HFModel(eager, kit.tokenizer())
    before = eager.config._attn_implementation
    kit.fuse(model, kit.usual(), "hkvd", 0.3)
    assert eager.config._attn_implementation == before == "eager"


def test_a_known_profile_is_taken_and_not_measured_again() -> None:
    model = kit.build("llama", {})
    asked: list[str] = []

    def known(name: str) -> ModelProfile:
        asked.append(name)
        return ModelProfile(name, 4, refusal="because I say so")

    loaded = HFModel(model, kit.tokenizer(), known)
    assert loaded.profile.refusal == "because I say so"
    assert asked == [loaded.fingerprint]
    assert HFModel(model, kit.tokenizer(), lambda name: None).profile.refusal == ""


@pytest.mark.parametrize("where", ["nowhere", "empty"])
def test_a_model_that_is_not_there_says_what_to_do(tmp_path: Path, where: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=rf"{where}.*models ls"):
        load_model(tmp_path / where)


def test_a_model_without_its_tokenizer_is_an_error_that_names_both(tmp_path: Path) -> None:
    kit.build("llama", {}).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=rf"{tmp_path}.*tokenizer"):
        load_model(tmp_path)


def test_without_a_tokenizer_there_are_no_words() -> None:
    with pytest.raises(ModelError, match="token ids only"):
        _ = HFModel(kit.build("llama", {})).tokenizer
