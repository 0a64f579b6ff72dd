"""The peers: each takes a prompt's token ids and says which token comes first, keeping what it can for the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import DynamicCache

from ragfuse.calibration.case import Case
from ragfuse.calibration.methods import Lab, default_method
from ragfuse.hf.model import HFModel
from ragfuse.models import embedded


class Peer(Protocol):
    """One way to get a first token."""

    def first(self, case: Case, ids: Sequence[int]) -> int:
        """The id of the greedy first token of the answer to a prompt, `ids` being the whole prompt."""
        ...


@dataclass(frozen=True)
class Offer:
    """A peer by name: the package that it needs ("": none), what it is, and how it is set up."""

    name: str
    package: str
    what: str
    make: Callable[[HFModel, Lab, Path | str, int], Peer]

    only: str = ""

    def absent(self, model: str) -> str:
        """Why it is left out of measuring `model`; "" where it takes part."""
        if self.package and not find_spec(self.package.replace("-python", "").replace("-", "_")):
            return f"{self.name} is left out: {self.package} is not installed (pip install {self.package})."
        return f"{self.name} is left out: it reads {self.only} alone." if self.only not in ("", model) else ""


class Transformers:
    """`generate`, with or without the cache of the prompt before."""

    def __init__(self, model: HFModel, keeps: bool) -> None:
        self.model, self.keeps = model, keeps
        self._ids: tuple[int, ...] = ()
        self._cache: Any = None

    def first(self, case: Case, ids: Sequence[int]) -> int:
        """One token by transformers' own `generate`."""
        given = torch.tensor([list(ids)], device=self.model.device)
        cache = self._reused(ids) if self.keeps else DynamicCache()
        with torch.no_grad():
            out = self.model.model.generate(
                given,
                attention_mask=torch.ones_like(given),
                past_key_values=cache,
                max_new_tokens=1,
                do_sample=False,
                pad_token_id=0,
            )
        self._ids, self._cache = tuple(ids), cache
        return int(out[0, -1])

    def _reused(self, ids: Sequence[int]) -> Any:
        same = next((i for i, (a, b) in enumerate(zip(ids, self._ids, strict=False)) if a != b), len(self._ids))
        if self._cache is None or not same:
            return DynamicCache()
        self._cache.crop(min(same, len(ids) - 1) - self._cache.get_seq_length())
        return self._cache


class Fused:
    """ragfuse, its chunks in memory, by the policy that it takes by default."""

    def __init__(self, lab: Lab) -> None:
        self.lab, self.method = lab, default_method(lab.model)

    def first(self, case: Case, ids: Sequence[int]) -> int:
        """One token of a fused prefill, loading included."""
        prefill = self.lab.prefill(self.method, self.lab.prompt(case, self.method.encoded))
        return int(prefill.logits.argmax())


class LlamaCpp:
    """llama.cpp on the GGUF that the weights come from; it goes on from what it shares with the prompt before."""

    def __init__(self, source: Path, threads: int) -> None:
        import llama_cpp  # type: ignore[import-not-found, unused-ignore]

        self.llama = llama_cpp.Llama(
            str(source), n_ctx=8192, n_threads=threads, n_threads_batch=threads, verbose=False, logits_all=False
        )

    def first(self, case: Case, ids: Sequence[int]) -> int:
        """One token by its own sampling loop, which goes on from the longest beginning that it knows."""
        return int(next(self.llama.generate(list(ids), temp=0.0, reset=True)))


class Vllm:
    """vLLM with prefix caching, in its own process: only the wall clock sees it."""

    def __init__(self, folder: Path | str) -> None:
        import vllm  # type: ignore[import-not-found, unused-ignore]

        self.vllm = vllm
        self.llm = vllm.LLM(str(folder), enable_prefix_caching=True, dtype="bfloat16", max_model_len=8192)

    def first(self, case: Case, ids: Sequence[int]) -> int:
        """One token by its own scheduler."""
        wanted = self.vllm.SamplingParams(temperature=0.0, max_tokens=1)
        out = self.llm.generate({"prompt_token_ids": list(ids)}, wanted, use_tqdm=False)
        return int(out[0].outputs[0].token_ids[0])


def _gguf() -> Path:
    known = embedded(PLAIN)
    source = known.source if known is not None else None
    if source is None:
        raise FileNotFoundError("The package of the embedded model, with its GGUF, is not installed.")
    return source


PLAIN = "smollm2-135m"
"""The model whose GGUF llama.cpp can read as it is."""

OFFERS = (
    Offer("hf", "", "transformers generate", lambda model, lab, path, n: Transformers(model, keeps=False)),
    Offer("hf-prefix", "", "generate, prefix kept", lambda model, lab, path, n: Transformers(model, keeps=True)),
    Offer("llama.cpp", "llama-cpp-python", "prefix kept", lambda model, lab, path, n: LlamaCpp(_gguf(), n), PLAIN),
    Offer("vllm", "vllm", "prefix caching, its own threads", lambda model, lab, path, n: Vllm(path)),
    Offer("ragfuse", "", "the default policy, from memory", lambda model, lab, path, n: Fused(lab)),
)
