"""Tiny models of three families, their KV by ragfuse, and a vLLM that decodes it in a process of
its own.

vLLM wants another transformers than ragfuse, so it runs by the Python that TEST_VLLM_PYTHON names
(`make test-vllm`); without it these tests are skipped.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, Qwen2Config, Qwen3Config

from benchmarks.peers.llama_server import free_port
from benchmarks.peers.process import PeerProcess
from integrations.tests.kit import byte_tokenizer
from ragfuse import Engine, Settings
from ragfuse.fuse.fusor import CachedRun
from ragfuse.hf.model import HFModel
from ragfuse.hf.prefill import KVSource
from ragfuse.transfer import TransferHandle, TransferModel, TransferPlace, sample_weights
from ragfuse.types.kv import ChunkKV
from tests.kits.serve import Served, serving, settings_of

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).resolve().parent
PYTHON = os.environ.get("TEST_VLLM_PYTHON", "")
PATIENCE_S = float(os.environ.get("TEST_PATIENCE_S", "900"))
N_TOKENS = 24
ENVIRONMENT = {
    "PYTHONPATH": f"{ROOT}{os.pathsep}{HERE.parent}",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
TENANT = TransferHandle.tenant_label("")


def tiny_model(family: str, folder: Path) -> Path:
    """A random 4-layer model whose greedy answers have many different tokens."""
    tokenizer = byte_tokenizer()
    config = CONFIGS[family](
        vocab_size=len(tokenizer),
        hidden_size=128,
        head_dim=32,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
        use_sliding_window=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim > 1:
                    weight.normal_(0.0, 1.2 * weight.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@dataclass
class Prefills:
    """Prompts that ragfuse has prefilled, and what transformers writes over the same KV."""

    model: HFModel
    name: str
    place: TransferPlace
    url: str
    ids: list[int]
    kv: dict[str, ChunkKV] = field(default_factory=dict)
    wanted: dict[str, list[int]] = field(default_factory=dict)

    def params(
        self, case: str = "full", ids: Sequence[int] | None = None, **changes: Any
    ) -> dict[str, Any]:
        """A new hand-over of a case's KV, as the server answers it; `changes` of the handle are
        lies.
        """
        kv = self.kv[case]
        model = TransferModel.of(self.name, kv)
        handle = self.place.put(
            kv, ids or self.ids, model, TENANT, weights=sample_weights(self.model.files)
        )
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "ragfuse": {**handle.as_dict(), **changes},
        }

    def add(self, case: str, kv: ChunkKV) -> None:
        self.kv[case], self.wanted[case] = kv, greedy(self.model, self.ids, kv)


def greedy(model: HFModel, ids: Sequence[int], kv: ChunkKV) -> list[int]:
    """What transformers writes behind this KV: its last row is computed, all others are taken."""
    cache, token, found = DynamicCache(), ids[-1], []
    for at, layer in enumerate(kv.layers):
        cache.update(layer.keys[None, :, :-1].clone(), layer.values[None, :, :-1].clone(), at)
    with torch.no_grad():
        for _ in range(N_TOKENS):
            logits = model.model(
                input_ids=torch.tensor([[token]]), past_key_values=cache, use_cache=True
            ).logits
            token = int(logits[0, -1].argmax())
            found.append(token)
    return found


def prefilled(
    model: HFModel,
    name: str,
    settings: Settings,
    head: list[int],
    chunks: list[list[int]],
    tail: list[int],
    other: list[int],
) -> Prefills:
    """The KV of one prompt: computed, fused, reused, and that of another text as long."""
    ids, runs, at = list(head), [], len(head)
    for index, chunk in enumerate(chunks):
        runs.append(CachedRun(index, at, at + len(chunk), at, blend=True))
        ids += chunk
        at += len(chunk)
    ids += tail
    source, positions = KVSource([model.encode(chunk) for chunk in chunks]), torch.arange(len(ids))
    made = Prefills(model, name, TransferPlace.open(settings), settings.transfer_url, ids)
    made.add("full", model.full_prefill(ids).kv)
    made.add("fused", model.fuse(ids, positions, runs, source, "hkvd", 0.15).kv)
    made.add("reused", model.fuse(ids, positions, runs, source, "none", 0.0).kv)
    made.add("foreign", model.full_prefill(other[: len(ids)]).kv)
    return made


class Decoder:
    """A vLLM with the connector."""

    def __init__(self, folder: Path, url: str, **options: Any) -> None:
        environment = {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        options = {"max_model_len": 1024, "max_num_seqs": 8, **options}
        command = [PYTHON, "-P", str(HERE / "decode.py"), str(folder), url, json.dumps(options)]
        self._process = PeerProcess("vLLM", command, environment)
        self.version = self._said()["ready"]

    def ask(self, *requests: dict[str, Any], max_tokens: int = N_TOKENS) -> list[dict[str, Any]]:
        """The answers to requests that are asked at once; None for one that was aborted."""
        self._process.write(json.dumps({"requests": requests, "max_tokens": max_tokens}))
        said = self._said()
        self.counters: dict[str, float] = said["counters"]
        found: list[dict[str, Any]] = said["answers"]
        return found

    def close(self) -> None:
        self._process.close()

    def _said(self) -> dict[str, Any]:
        said: dict[str, Any] = json.loads(
            self._process.read(time.monotonic() + PATIENCE_S, "worked")
        )
        return said


@dataclass(frozen=True)
class Pair:
    """Both engines over one model."""

    prefills: Prefills
    decoder: Decoder

    def request(self, case: str | None, **changes: Any) -> dict[str, Any]:
        """A request with the KV of a case; None: without a handle."""
        params = self.prefills.params(case, **changes) if case is not None else None
        return {"ids": self.prefills.ids, "params": params}

    def waiting(self) -> set[Any]:
        """Keys of the prompts that wait in the place."""
        return {entry.key for entry in self.prefills.place._tier.list()}

    def wait_until_left(self, before: Set[Any] = frozenset()) -> None:
        """Until no prompt waits in the place that did not before; of those, some may have gone
        meanwhile.
        """
        until_s = time.monotonic() + PATIENCE_S
        while self.waiting() - before:
            assert time.monotonic() < until_s, "something was left behind"
            time.sleep(0.05)


class VllmServer:
    """`vllm serve` with the connector, its engine in a process of its own."""

    def __init__(self, folder: Path, url: str) -> None:
        port = free_port()
        transfer = {
            "kv_connector": "RagfuseConnector",
            "kv_connector_module_path": "vllm_ragfuse",
            "kv_role": "kv_consumer",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"transfer_url": url},
        }
        said = {"host": "127.0.0.1", "port": port, "model": folder, "served-model-name": "tiny"}
        said |= {"dtype": "float32", "max-model-len": 2048}
        said |= {"kv-transfer-config": json.dumps(transfer)}
        options = [each for name, value in said.items() for each in (f"--{name}", str(value))]
        module = ["-P", "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
        self._process = PeerProcess("vLLM", [PYTHON, *module, *options], ENVIRONMENT)
        self.root = f"http://127.0.0.1:{port}"
        until_s = time.monotonic() + PATIENCE_S
        while not self._is_healthy():
            if not self._process.is_running or time.monotonic() > until_s:
                raise self._process.failure("did not begin")
            time.sleep(0.5)

    def close(self) -> None:
        self._process.close()

    def _is_healthy(self) -> bool:
        try:
            return httpx.get(f"{self.root}/health", timeout=5.0).status_code == 200
        except httpx.TransportError:
            return False


PAIRS = {
    "llama-async": ("llama", {"load": "async", "num_gpu_blocks_override": 14}),
    "qwen2-sync": ("qwen2", {"load": "sync", "max_num_batched_tokens": 256}),
    "qwen3-async": ("qwen3", {"load": "async", "enable_prefix_caching": False, "name": "reader"}),
    "llama-2-ranks": ("llama", {"load": "async", "tensor_parallel_size": 2}),
}


@pytest.fixture(scope="session")
def skip_without_vllm() -> None:
    """Skip where no Python with vLLM is named."""
    if not PYTHON:
        pytest.skip("TEST_VLLM_PYTHON names no Python with vLLM: make test-vllm")


@pytest.fixture(scope="module", params=PAIRS)
def pair(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    skip_without_vllm: None,
) -> Iterator[Pair]:
    """ragfuse and vLLM over a tiny model."""
    family, options = PAIRS[request.param]
    home = tmp_path_factory.mktemp(family)
    folder = tiny_model(family, home / f"tiny-{family}")
    settings = settings_of(folder, home, transfer_url=str(home / "place"))
    made = torch.Generator().manual_seed(5)

    def some(n: int) -> list[int]:
        return torch.randint(8, len(byte_tokenizer()), (n,), generator=made).tolist()

    with Engine(settings) as engine:
        told = settings, some(7), [some(150), some(97), some(203)], some(43), some(600)
        prefills = prefilled(engine.model, options.get("name", folder.name), *told)
        decoder = Decoder(folder, settings.transfer_url, **options)
        yield Pair(prefills, decoder)
        decoder.close()
        prefills.place.close()


@dataclass(frozen=True)
class Servers:
    """Both servers, and the place between them."""

    prefills: Served
    decodes: VllmServer
    place: TransferPlace

    def counts(self) -> dict[str, float]:
        """What the connector has counted, and the requests that vLLM runs."""
        text = httpx.get(f"{self.decodes.root}/metrics", timeout=PATIENCE_S).text
        names = ("vllm:ragfuse", "vllm:num_requests_running")
        lines = (line for line in text.splitlines() if line.startswith(names))
        return {line.split("{")[0]: float(line.split()[-1]) for line in lines}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, skip_without_vllm: None) -> Iterator[Servers]:
    """`ragfuse serve` and `vllm serve` over a tiny model."""
    home = tmp_path_factory.mktemp("served")
    folder, url = tiny_model("llama", home / "tiny"), str(home / "place")
    settings = settings_of(folder, home, transfer_url=url, prefix_cache=False)
    with serving(settings) as made:
        decodes = VllmServer(folder, url)
        place = TransferPlace.open(settings)
        yield Servers(made, decodes, place)
        decodes.close()
        place.close()
