"""The peers by name: what each is, what it needs to take part, and how its process is started."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from benchmarks.peers.llama_server import LlamaServer, command, free_port
from benchmarks.peers.process import Peer, PeerProcess, Worker
from benchmarks.peers.weights import has_adapter, own_gguf

ROOT = Path(__file__).parents[2]
"""Where `benchmarks` is imported from."""
WORKERS = "benchmarks.peers.workers"
DTYPE = "bfloat16"


@dataclass(frozen=True)
class Given:
    """What peers are made from.

    Args:
        model: As ragfuse names it: an embedded name, a folder or a GGUF file.
        folder: Its weights as safetensors, without ragfuse's drift.
        bf16_gguf: Makes a GGUF of the same weights in bf16; None where that cannot be made.
        vllm: The Python that has vLLM; None: there is none.
        llama: llama-server; None: there is none.
        threads: Of every peer.
        memory_bytes: Of KV that every peer that keeps it in memory may keep.
        max_tokens: Most tokens of a prompt and its answer.
        start_s: Seconds that a peer may take until it is ready.
        answer_s: Seconds that an answer may take.
        scratch: An empty folder that goes away afterwards.
    """

    model: str
    folder: Path
    bf16_gguf: Callable[[], Path] | None
    vllm: Path | None
    llama: Path | None
    threads: int
    memory_bytes: int
    max_tokens: int
    start_s: float
    answer_s: float
    scratch: Path

    def worker(
        self,
        name: str,
        python: Path,
        module: str,
        arguments: tuple[str, ...],
        more: Mapping[str, str] | None = None,
    ) -> Worker:
        """Start a worker, which finds this repository's packages."""
        paths = f"{ROOT}:{ROOT / 'benchmarks'}"
        environment = {**self.environment, "PYTHONPATH": paths, **(more or {})}
        line = [str(python), "-m", f"{WORKERS}.{module}", *arguments]
        process = PeerProcess(name, line, environment)
        try:
            return Worker(process, self.start_s, self.answer_s)
        except BaseException:
            process.close()
            raise

    def server(self, name: str, gguf: Path, reuse: bool) -> LlamaServer:
        """Start llama.cpp's server."""
        assert self.llama is not None
        port = free_port()
        line = command(
            self.llama, gguf, port, self.threads, self.max_tokens, self.memory_bytes, reuse
        )
        process = PeerProcess(name, line, self.environment)
        try:
            return LlamaServer(process, port, self.start_s, self.answer_s)
        except BaseException:
            process.close()
            raise

    @property
    def environment(self) -> dict[str, str]:
        """Variables of every peer."""
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        return {
            **dict.fromkeys(names, str(self.threads)),
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
        }


@dataclass(frozen=True)
class Offer:
    """A peer by name.

    Args:
        name: Its name in results.
        start: Starts it.
        absent: Why it cannot take part, without its name; "" where it can.
        keeps_many: Whether it keeps the beginnings of many prompts, so that all are asked once
            before it counts.
    """

    name: str
    start: Callable[[Given], Peer]
    absent: Callable[[Given], str] = lambda given: ""
    keeps_many: bool = True


def _transformers(given: Given, *options: str) -> Peer:
    name = "-".join(("hf", *options))
    return given.worker(
        name, Path(sys.executable), "transformers_worker", (str(given.folder), *options)
    )


def _ragfuse(given: Given, name: str, folder: Path | None = None) -> Peer:
    arguments = [
        given.model,
        DTYPE,
        str(given.memory_bytes),
        *([str(folder)] if folder is not None else []),
    ]
    return given.worker(name, Path(sys.executable), "ragfuse_worker", tuple(arguments))


def _vllm(given: Given) -> Peer:
    assert given.vllm is not None
    more = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": str(max(1, given.memory_bytes >> 30)),
    }
    openmp = given.vllm.parents[1] / "lib" / "libiomp5.so"  # which vLLM asks for
    if openmp.is_file():
        more["LD_PRELOAD"] = str(openmp)
    return given.worker(
        "vllm", given.vllm, "vllm_worker", (str(given.folder), str(given.max_tokens)), more
    )


def _no_vllm(given: Given) -> str:
    if given.vllm is not None:
        return ""
    return (
        "no Python with vLLM was found; set one up by `python -m benchmarks.peers.setup vllm`, or"
        " name it by --vllm"
    )


def _no_llama(given: Given) -> str:
    if given.llama is not None:
        return ""
    return (
        "no llama-server was found; build one by `python -m benchmarks.peers.setup llama`, or name"
        " it by --llama"
    )


def _no_own_gguf(given: Given) -> str:
    if own_gguf(given.model) is None:
        return f"the weights of {given.model} come from no GGUF"
    return (
        "the GGUF has the weights without the adapter"
        if has_adapter(given.model)
        else _no_llama(given)
    )


def _no_bf16(given: Given) -> str:
    return (
        f"the weights of {given.model} come from no GGUF"
        if given.bf16_gguf is None
        else _no_llama(given)
    )


def _bf16(given: Given) -> Path:
    assert given.bf16_gguf is not None
    return given.bf16_gguf()


def _own(given: Given) -> Path:
    found = own_gguf(given.model)
    assert found is not None
    return found


OFFERS = MappingProxyType(
    {
        offer.name: offer
        for offer in (
            Offer("hf", _transformers, keeps_many=False),
            Offer(
                "hf-prefix",
                lambda given: _transformers(given, "prefix"),
                keeps_many=False,
            ),
            Offer(
                "llama.cpp",
                lambda given: given.server("llama.cpp", _own(given), reuse=False),
                _no_own_gguf,
            ),
            Offer(
                "llama.cpp-bf16",
                lambda given: given.server("llama.cpp-bf16", _bf16(given), reuse=False),
                _no_bf16,
            ),
            Offer(
                "llama.cpp-reuse",
                lambda given: given.server("llama.cpp-reuse", _bf16(given), reuse=True),
                _no_bf16,
            ),
            Offer("vllm", _vllm, _no_vllm),
            Offer(
                "ragfuse",
                lambda given: _ragfuse(given, "ragfuse"),
            ),
            Offer(
                "ragfuse-disk",
                lambda given: _ragfuse(given, "ragfuse-disk", given.scratch / "store"),
            ),
        )
    }
)
"""The peers in the order in which they take turns; the first is the yardstick."""
