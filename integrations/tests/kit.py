"""What both siblings' tests share: a tiny random model for mechanics, the embedded models and texts
for questions.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ragfuse import Ask, Engine, Settings
from ragfuse.models import resolve_embedder, resolve_llm

# A user's own settings and proxy are none of a test's; where the embedded models lie, and the
# device to test on, are.
for name in [each for each in os.environ if each.startswith("RAGFUSE_")]:
    if name not in ("RAGFUSE_HOME", "RAGFUSE_DEVICE", "RAGFUSE_GPU_BYTES"):
        del os.environ[name]
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost"

TEMPLATE = (
    "<s>{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor"
    " %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LETTERS = """\
Port Elling. The harbour of Port Elling was dug in 1847 by sailors who had lost their ship in a winter storm. Its first
harbour master, Agnes Worth, kept a book in which she wrote the name of every ship that came in. When she died, the book
held more than nine thousand names, and it is shown in the town hall to this day. The harbour froze over only once, in
1881, when children skated between the boats.

The Elling lighthouse. The lighthouse of Port Elling is painted green, because red paint was too dear in the year it was
built. Its lamp burned whale oil until 1902, then petroleum. The last keeper, Tomas Brandt, counted forty ships in one
night and could tell most of them by their lights. He retired to the valley and planted walnut trees along the old road.

The walnut valley. Behind the hills lies a valley that is known for its walnuts. Every October the village holds a fair
at which the oldest tree is given a name. Oil of the valley was used to polish violins, and one workshop still does so.
The railway reached the valley in 1893 and was given up in 1961; its bed is a path for walkers now.

The violin workshop. The workshop of the Marek family has built violins since 1790. Its wood is dried for 12 years in
the attic of an old mill. A violin takes about two hundred hours to build, and its varnish is made of resin and walnut
oil. The workshop has never sold more than ten instruments in one year."""
FIRST = "The lighthouse keeper counted forty ships that night and wrote all their names down."
SECOND = "Nobody in the valley remembers who planted the walnut trees along the old road."
READ = f"Read this.\n\n{FIRST}\n\n{SECOND}\n\nHow many ships were there?"
SECRETS: list[dict[str, Any]] = [
    {"salt": "blue-7f31c0"},
    {"tiers": ("redis://user:blue-7f31c0@cache:6379/0",)},
    {"tiers": ("s3://bucket/folder?secret_access_key=blue-7f31c0",)},
]
ROLES = ["system", "user", "assistant", "tool"]


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random 3-layer Llama whose tokens are bytes, wide weights, and a chat
    template; one for the tests of all frameworks.
    """
    folder = tmp_path_factory.getbasetemp() / "tiny-model"
    if folder.exists():
        return folder
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim > 1:
                    weight.normal_(0.0, 1.2 * weight.shape[-1] ** -0.5)
            model.lm_head.weight[: len(ROLES) + 3] = 0.0  # no special token is ever the likeliest
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def tiny_settings(tiny_path: Path, tmp_path: Path) -> Settings:
    """The tiny model over an empty store, without prefix caching, which would hide what
    chunks do.
    """
    alone = {"prefix_cache": False, "learn": "retrieved", "max_tokens": 12}
    return Settings(model=str(tiny_path), dtype="float32", store=tmp_path / "store", **alone)


@pytest.fixture
def engine(tiny_settings: Settings) -> Iterator[Engine]:
    """An engine of the test's own."""
    with Engine(tiny_settings) as engine:
        yield engine


@pytest.fixture(scope="session")
def smollm() -> str:
    """The embedded LLM's folder; the first run on a machine prepares it."""
    return str(resolve_llm("smollm2-135m", Settings().home))


@pytest.fixture(scope="session")
def minilm() -> str:
    """The embedded embedder's folder."""
    return str(resolve_embedder("minilm-l6", Settings().home))


@pytest.fixture
def real_engine(smollm: str, tmp_path: Path) -> Iterator[Engine]:
    """The embedded LLM in float32, where equal means equal, over an empty store."""
    with Engine(
        Settings(model="smollm2-135m", dtype="float32", store=tmp_path / "store", max_tokens=16)
    ) as engine:
        yield engine


def byte_tokenizer() -> PreTrainedTokenizerFast:
    special = ["<pad>", "<s>", "</s>", *(f"<|{role}|>" for role in ROLES)]
    alphabet = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({token: id for id, token in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens=special[3:],
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def hits(trace: Mapping[str, Any]) -> list[str]:
    """Return the sources of the chunks of an answer that came from the store."""
    chunks = (each for each in trace["segments"] if each["kind"] == "chunk")
    return [each["source"] for each in chunks if each["hit"]]


def outline(trace: Mapping[str, Any]) -> Any:
    """Return all of a trace but times and the name of the model."""
    names = ("kind", "n_tokens", "start", "hit", "source")
    kinds = [tuple(each[name] for name in names) for each in trace["segments"]]
    counts = ("tokens", "tokens_reused", "tokens_recomputed", "tokens_fresh")
    return kinds, [trace[name] for name in counts]


@pytest.fixture
def asks(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Ask]:
    """Every wish that reaches the engine."""
    seen: list[Ask] = []

    def noted(call: Any, prompt: Any, ask: Ask, *rest: Any) -> Any:
        seen.append(ask)
        return call(prompt, ask, *rest)

    for name in ("stream", "batch"):
        monkeypatch.setattr(engine, name, partial(noted, getattr(engine, name)))
    return seen


def read_and_stored(engine: Engine, ask: Callable[[], object]) -> None:
    """Let a prompt with both sentences be known: its beginning, then the chunks behind it."""
    engine.ingest([(FIRST, "first.txt"), (SECOND, "second.txt")])
    for _ in range(2):
        ask()
        engine.flush()


def loaded_by(code: str) -> list[str]:
    """Return what a program prints, and which heavy packages it has loaded."""
    heavy = "sorted({'torch', 'transformers', 'tokenizers'} & set(sys.modules))"
    program = f"import sys\n{code}\nprint({heavy})"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout.splitlines()


async def ends_when_cancelled(call: asyncio.Task[Any], engine: Engine) -> None:
    """Cancel an awaited call once it generates, and see that its generation ends."""
    while not engine.model.batcher.active:
        await asyncio.sleep(0.005)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await asyncio.to_thread(engine.model.batcher.wait_idle, 60.0)
