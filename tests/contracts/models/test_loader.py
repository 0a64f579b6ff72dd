"""One loader for every way in which people have a model, and one sentence where that cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from langchain_ragfuse import ChatRagFuse
from llama_index.llms.ragfuse import RagFuseLLM
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, XLoraConfig, get_peft_model
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    T5Config,
    T5ForConditionalGeneration,
    pipeline,
)

from ragfuse import Ask, Engine, ModelError, Settings
from ragfuse.errors import SettingsError
from ragfuse.hf import model as hf_model
from ragfuse.models import loader
from ragfuse.models.adapters import CHUNK_ADAPTER
from ragfuse.models.loader import load_model, load_tokenizer
from ragfuse.process.shared import forget
from ragfuse.text.chat_messages import Piece
from tests.kits import hf as kit

CHUNKS = [
    f"The keeper of lighthouse {name} counted {count} ships in one night."
    for name, count in ("ab", "cd")
]
ASKED = [
    ("user", (Piece(CHUNKS[0], "chunk"), "\n\n", Piece(CHUNKS[1], "chunk"), "\n\nHow many ships?"))
]


@pytest.fixture
def loaded(varied_path):
    return AutoModelForCausalLM.from_pretrained(varied_path, dtype=torch.float32)


@pytest.fixture
def words(varied_path):
    return AutoTokenizer.from_pretrained(varied_path)


@pytest.fixture
def adapted(loaded):
    """The tiny model with an adapter in place that changes what it says."""
    config = LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"
    )
    model = get_peft_model(loaded, config)
    torch.manual_seed(3)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data.normal_(0.0, 0.2)
    return model.eval()


def own(model: Any, engine: Engine) -> list[int]:
    """What transformers itself makes of the same prompt."""
    ids = [token for segment in engine.prompt(ASKED).segments for token in segment.tokens]
    given = torch.tensor([ids])
    out = model.generate(
        input_ids=given, attention_mask=torch.ones_like(given), max_new_tokens=12, do_sample=False
    )
    return out[0, len(ids) :].tolist()


def answers(engine: Engine) -> Any:
    """Both chunks known, all rows recomputed: what full prefill gives, by way of fusing."""
    engine.ingest([(chunk, "book") for chunk in CHUNKS])
    return engine.answer(ASKED, Ask(policy="hkvd", ratio=1.0))


def reused(engine: Engine) -> int:
    """Tokens of chunks that a question takes from the store."""
    return engine.answer(ASKED, Ask(policy="hkvd", ratio=0.2)).trace.tokens_chunks


@pytest.fixture
def engine_of(tiny_settings):
    """Makes an engine over what is given; all are closed at the end."""
    made: list[Engine] = []

    def make(model: Any = None, tokenizer: Any = None, **told: Any) -> Engine:
        """An engine over a loaded model; `named` is a folder."""
        told["model"] = str(told.pop("named", tiny_settings.model))
        settings = Settings(**{**tiny_settings.model_dump(), **told})
        made.append(Engine(settings, model=model, tokenizer=tokenizer))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


# loaded objects


@pytest.mark.parametrize(("name", "other"), [("dtype", "bfloat16"), ("device", "meta")])
def test_a_setting_that_contradicts_a_loaded_model_is_refused_by_name(
    name,
    other,
    loaded,
    words,
    engine_of,
    monkeypatch,
):
    with pytest.raises(SettingsError, match=name) as refused:
        engine_of(loaded, words, **{name: other})
    assert refused.value.argument == name
    monkeypatch.setenv(f"RAGFUSE_{name.upper()}", other)  # meant for models that ragfuse loads
    assert getattr(engine_of(loaded, words, **{name: other}).settings, name) != other


@pytest.mark.parametrize("kind", ["model", "named", "pipeline", "compiled"])
def test_a_loaded_model_answers_as_its_folder_does_from_the_same_chunks(
    kind, loaded, words, engine_of, tiny_settings
):
    named = engine_of()
    wanted = own(named.model.model, named)
    answers(named)
    if kind == "pipeline":
        engine = engine_of(pipeline("text-generation", model=loaded, tokenizer=words))
    else:
        given = torch.compile(loaded, backend="eager") if kind == "compiled" else loaded
        engine = engine_of(given, tiny_settings.model if kind == "named" else words)
    assert engine.digest == named.digest
    answer = engine.answer(ASKED, Ask(policy="hkvd", ratio=1.0))
    assert list(answer.token_ids) == wanted
    assert reused(engine) > 0
    assert (engine.settings.dtype, engine.settings.device) == ("float32", "cpu")


def test_a_loaded_model_that_is_changed_is_another_one_to_the_next_engine(loaded, words, engine_of):
    first = engine_of(loaded, words)
    assert engine_of(loaded, words).model is first.model
    loaded.model.embed_tokens.weight.data[70] += 1.0
    assert engine_of(loaded, words).digest != first.digest


def test_what_is_no_model_that_writes_is_refused_with_what_was_found(
    loaded, words, varied_path, engine_of
):
    small = T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=32)
    for given, tokenizer, said in (
        (loaded, None, "Pass tokenizer="),
        (loaded, object(), "found object"),
        (torch.nn.Linear(2, 2), words, "found torch.nn.modules.linear.Linear"),
        (T5ForConditionalGeneration(small), words, "found T5ForConditionalGeneration"),
        (AutoModel.from_pretrained(varied_path), words, "found LlamaModel"),
        (str(varied_path), words, "only with a loaded transformers model"),
    ):
        with pytest.raises(ModelError, match=said):
            engine_of(given, tokenizer)
    with pytest.raises(ModelError, match="is already loaded"):
        engine_of(loaded, words, model_kwargs={"revision": "x"})


# options of loading


def test_loading_options_reach_the_model(tiny_settings):
    llm = ChatRagFuse(
        settings=tiny_settings,
        model_kwargs={"attn_implementation": "eager", "torch_dtype": "bfloat16"},
    )
    engine = llm.get_engine()
    assert engine.model.model.config._attn_implementation == "eager"
    assert engine.model.dtype == torch.bfloat16
    assert engine.settings.dtype == "bfloat16"
    forget(engine)
    engine.close()


def test_a_name_that_is_no_option_is_refused_with_the_one_that_is_meant():
    with pytest.raises(SettingsError, match=r"'revison'.*revision"):
        Settings(model_kwargs={"revison": "main"})
    with pytest.raises(SettingsError, match="JSON object"):
        Settings(model_kwargs="[1]")


def test_settings_with_loading_options_can_be_compared_hashed_and_made_again():
    one = Settings(model_kwargs={"device_map": {"": "cpu"}, "revision": "a"})
    two = Settings(model_kwargs=json.dumps({"revision": "a", "device_map": {"": "cpu"}}))
    assert one == two == Settings(**one.model_dump())
    assert hash(one) == hash(two) != hash(Settings())


def test_a_token_is_never_shown_and_neither_it_nor_an_object_is_written_down():
    told = {"token": "hf_secret"}
    llm = RagFuseLLM(model_kwargs=told)
    assert (
        "hf_secret" not in f"{Settings(model_kwargs=told)!r} {Settings(model_kwargs=told)} {llm!r}"
    )
    with pytest.raises(SettingsError, match="model_kwargs"):
        llm.to_dict()
    public = Settings(model_kwargs={"revision": "main"}).as_public()
    assert public["model_kwargs"] == {"revision": "main"}
    for options in (told, {"torch_dtype": torch.float16}):
        with pytest.raises(SettingsError, match="model_kwargs"):
            Settings(model_kwargs=options).as_public()


def test_code_that_comes_with_weights_is_run_only_where_that_is_said(
    folder, tmp_path, retell, monkeypatch
):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    ran, code, trusted = tmp_path / "ran", folder / "own.py", {"trust_remote_code": True}
    code.write_text(
        f"open({str(ran)!r}, 'w').close()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    retell(folder / "config.json", model_type="own", auto_map=classes)
    with pytest.raises(ModelError, match="trust_remote_code"):
        load_model(folder, "float32")
    assert not ran.exists()
    model = load_model(folder, "float32", model_kwargs=trusted)
    assert ran.exists()
    assert type(model.model).__name__ == "OwnModel"
    code.write_text(code.read_text() + "# changed\n")
    again = load_model(folder, "float32", model_kwargs=trusted)
    assert again.fingerprint != model.fingerprint


def test_pickled_weights_are_refused_with_what_to_do(
    folder, varied_path, tmp_path, adapted, retell
):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load_model(folder, "float32")
    adapter = tmp_path / "adapter"
    adapted.save_pretrained(adapter)
    retell(adapter / "adapter_config.json", base_model_name_or_path=str(varied_path))
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors"):
        load_model(adapter, "float32")


@pytest.mark.parametrize("device", ["cuda:99", "mps", "tpu9"])
def test_a_device_that_is_not_there_says_what_to_do(tiny_settings, device):
    with pytest.raises(ModelError, match=f"device '{device}'"):
        load_model(tiny_settings.model, "float32", device)


def test_weights_on_disk_answer_as_those_in_memory(tmp_path, engine_of):
    parts = ("model.embed_tokens", "model.layers", "model.norm", "lm_head", "model.rotary_emb")
    options = {
        "device_map": {**dict.fromkeys(parts, "cpu"), "model.layers": "disk"},
        "offload_folder": str(tmp_path / "away"),
    }
    plain, away = engine_of(), engine_of(model_kwargs=options)
    assert any(weight.is_meta for weight in away.model.model.parameters())
    assert away.digest == plain.digest
    assert away.model.profile.refusal == ""
    assert list(answers(away).token_ids) == own(plain.model.model, plain)


# adapters


@pytest.mark.parametrize("way", ["object", "merged", "in place"])
def test_an_adapter_answers_as_its_model_does(way, adapted, words, tmp_path, engine_of):
    plain = engine_of()
    if way == "object":
        engine = engine_of(adapted, words)
    else:
        adapted.save_pretrained(tmp_path / "adapter")
        options = {"merge_adapter": False} if way == "in place" else {}
        engine = engine_of(named=tmp_path / "adapter", model_kwargs=options)
    assert any("lora" in name for name, _ in engine.model.model.named_parameters()) == (
        way != "merged"
    )
    assert engine.digest != plain.digest
    assert engine.model.profile.refusal == ""
    answer = answers(engine)
    assert list(answer.token_ids) == own(adapted, engine) != own(plain.model.model, plain)
    assert reused(engine) > 0


TASK = {"task_type": "CAUSAL_LM"}
OUTSIDE: dict[str, Callable[[Path], Any]] = {
    "PREFIX_TUNING": lambda folder: PrefixTuningConfig(num_virtual_tokens=3, **TASK),
    "PROMPT_TUNING": lambda folder: PromptTuningConfig(num_virtual_tokens=3, **TASK),
    "activated LoRA": lambda folder: LoraConfig(
        alora_invocation_tokens=[5, 6], target_modules=["q_proj"], **TASK
    ),
    "XLORA": lambda folder: XLoraConfig(hidden_size=64, adapters={"0": str(folder)}, **TASK),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_adapters_that_work_outside_the_layers_are_refused(
    name, adapted, varied_path, words, engine_of, tmp_path
):
    adapted.save_pretrained(tmp_path / "lora")
    model = AutoModelForCausalLM.from_pretrained(varied_path, dtype=torch.float32)
    model.config.use_cache = False  # X-LoRA wants it so
    with pytest.raises(ModelError, match=f"{name} adapters are not supported"):
        engine_of(get_peft_model(model, OUTSIDE[name](tmp_path / "lora")), words)


@pytest.fixture
def unreachable(monkeypatch):
    """A hub that refuses connections at once."""

    def refuse(*_: object) -> None:
        raise ConnectionRefusedError(111, "Connection refused")

    module = import_module("ragfuse.models.embedded")
    monkeypatch.setattr(module, "getproxies", dict)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(module.socket, "create_connection", refuse)


@pytest.mark.parametrize("inner", ["", CHUNK_ADAPTER], ids=["ordinary", "for chunks"])
@pytest.mark.usefixtures("unreachable")
def test_an_adapter_whose_base_is_missing_is_an_error_at_once(adapted, tmp_path, inner, retell):
    adapter = tmp_path / "adapter"
    adapted.save_pretrained(adapter / inner)
    retell(adapter / inner / "adapter_config.json", base_model_name_or_path="nosuch")
    for load in (load_model, lambda folder, _: load_tokenizer(str(folder), tmp_path / "home", {})):
        with pytest.raises(ModelError, match=r"base_model_name_or_path.*'nosuch'"):
            load(adapter, "float32")


@pytest.mark.parametrize("beside", ["ragfuse_profile.json", "config.json"])
def test_the_inner_folder_of_a_chunk_adapter_is_no_model(adapted, tmp_path, engine_of, beside):
    out, link = tmp_path / "out", tmp_path / "link"
    adapted.save_pretrained(out / CHUNK_ADAPTER)
    (out / beside).write_text("{}")
    link.symlink_to(out / CHUNK_ADAPTER)
    for given in (out / CHUNK_ADAPTER, link):
        with pytest.raises(ModelError, match=f"'{out}'"):
            assert engine_of(named=given).model


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "ragfuse_profile.json"])
def test_damaged_json_of_a_folder_is_an_error_with_its_folder(folder, name):
    (folder / name).write_bytes(b"{")
    with pytest.raises(ModelError, match=str(folder)):
        load_model(folder, "float32")


# digests by files


def renamed_token(folder: Path) -> None:
    """Make the folder's tokenizer another one."""
    data = json.loads((folder / "tokenizer.json").read_text())
    data["added_tokens"][0]["content"] = "<new>"
    (folder / "tokenizer.json").write_text(json.dumps(data))


def test_weights_from_files_are_hashed_once(folder, varied_path, tmp_path, monkeypatch):
    counted, home = [], tmp_path / "home"
    for module, name in ((hf_model, "weights_digest"), (loader, "tokenizer_digest")):
        digest = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda part, digest=digest: counted.append(1) or digest(part)
        )

    def told(dtype: str = "float32") -> str:
        return load_model(folder, dtype, home=home).fingerprint

    names = {told() for _ in range(3)}
    assert len(counted) == 2
    assert names == {load_model(varied_path, "float32").fingerprint}
    counted.clear()
    names.add(told("bfloat16"))
    changed = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    changed.model.embed_tokens.weight.data[9, 3] += 1.0
    changed.save_pretrained(folder)
    names.add(told())
    assert (len(names), len(counted)) == (3, 4)
    renamed_token(folder)
    found = told()
    assert found == load_model(folder, "float32").fingerprint
    assert found not in names
    for kept in (home / "fingerprints").iterdir():
        kept.write_text("../../etc/passwd")
    assert told() == found


def test_files_that_change_while_they_are_read_are_hashed_again(folder, tmp_path, monkeypatch):
    home = tmp_path / "home"
    before, plain = load_model(folder, "float32", home=home).fingerprint, loader._tokenizer

    def changed(source: Any, options: Any) -> Any:
        renamed_token(folder)
        return plain(source, options)

    monkeypatch.setattr(loader, "_tokenizer", changed)
    assert load_model(folder, "float32", home=home).fingerprint != before


# what cannot be fused


def test_layers_on_several_devices_are_answered_by_full_prefill(
    monkeypatch,
):
    monkeypatch.setattr("ragfuse.hf.probe.devices_of", lambda model: ("cuda:0", "cuda:1"))
    model = hf_model.HFModel(kit.build("llama", {}), kit.tokenizer())
    assert "spread over cuda:0, cuda:1" in model.profile.refusal
    assert model.full_prefill(kit.ids(20)).logits.shape == (256,)


def test_products_quantised_over_all_rows_are_answered_by_full_prefill(loaded, words, engine_of):
    given = torch.ao.quantization.quantize_dynamic(loaded, {torch.nn.Linear}, dtype=torch.qint8)
    engine = engine_of(given, words)
    answer = answers(engine)
    assert "one scale for all tokens" in answer.trace.fallback_reason
    assert list(answer.token_ids) == own(given, engine)
