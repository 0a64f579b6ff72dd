"""A loaded transformers model: encodes chunks to KV, and prefills prompts with or without cached
KV.

Thread-safe. Each model has one lock, which is held during a forward pass and released between two
tokens of an answer. Other modules retrieve passages, store KV and decide which KV is reused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cache, cached_property, partial
from itertools import chain, islice
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from cachetools import LRUCache, cachedmethod
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from ragfuse.errors import FixedError, ModelError, RefusedError
from ragfuse.fuse.fusor import Buffers, CachedRun, Fusion, LayerSource, bucket, candidates_of
from ragfuse.fuse.rope import added
from ragfuse.fuse.select import nearness, policy_named
from ragfuse.hf import probe
from ragfuse.hf.cache import CACHE, RowCache
from ragfuse.hf.chunk_adapter import ChunkAdapter
from ragfuse.hf.decode import Batcher, FairLock
from ragfuse.hf.fingerprint import fingerprint, weights_digest
from ragfuse.hf.hooks import FusedPass, Wiring
from ragfuse.hf.kept_states import States, begin, kind_of
from ragfuse.hf.packed_linear import pack
from ragfuse.hf.prefill import KVSource, Prefill, PromptPart
from ragfuse.hf.tokens import TextEncoder
from ragfuse.process.shared import OneProcess
from ragfuse.types.kv import ChunkKV, LayerKV
from ragfuse.types.profiles import ModelProfile
from ragfuse.types.texts import whole_text

__all__ = ["HFModel", "KVSource", "Prefill", "fingerprint"]

SPARE_ROWS = 64
"""Extra rows in the KV buffers of a fused prompt, for the first tokens of the answer."""
AT_ONCE_NBYTES, AT_ONCE_ON_CPU_NBYTES = 32 << 20, 4 << 20
"""Maximum bytes of keys copied and rotated at once. On a CPU, keys should fit the CPU's cache."""
CONTEXTS = 2
"""Number of contexts whose KV is cached in memory. Many chunks have the same context."""
ENCODE_STEP_TOKENS = 128
"""Tokens per forward pass when a long chunk is encoded. The lock is free between passes."""


class HFModel(OneProcess):
    """A causal LM of transformers with a tokenizer, a model profile and a lock.

    Args:
        model: The transformers model, whose weights must not change afterwards.
        tokenizer: The model's tokenizer. If None, prompts can be given as token ids only.
        profile_of: Returns the stored profile of a fingerprint, or None. Without a stored profile,
            the model is probed.
        drift: KV offset added to chunks encoded after filler text (`fuse/rope.py`), one row per
            layer.
        weights: The result of `weights_digest`. If None, the digest is computed.
        chunk_adapter: Adapter that is active while chunks are encoded after filler text.
        words: The result of `tokenizer_digest`. If None, the digest is computed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        profile_of: Callable[[str], ModelProfile | None] | None = None,
        drift: ChunkKV | None = None,
        weights: str | None = None,
        chunk_adapter: ChunkAdapter | None = None,
        words: str | None = None,
    ) -> None:
        self.model, self._tokenizer, self.drift = model.eval(), tokenizer, drift
        self.chunk_adapter = chunk_adapter
        self.lock = FairLock()
        self.batcher = Batcher(self.model, self.lock)
        self._wired: Wiring | None = None
        self._word = cache(partial(_word, tokenizer))
        self.border = cache(partial(_border, tokenizer))
        """Maps a token id to a pair: the kind of border in the token, and True if the token has
        visible text. Kinds: 0 no border, 1 end of a line, 2 end of a paragraph, 3 special token.
        """
        self._contexts: LRUCache[Any, tuple[LayerKV, ...]] = LRUCache(CONTEXTS)
        self.device, self.dtype = probe.device_of(model), model.dtype
        # tensor shapes are padded so that they recur, and no values are read back to the host
        self.accelerated = self.device.type != "cpu"
        self.name = str(model.config._name_or_path) or model.config.model_type
        # the folder with the safetensors files of these weights, in any dtype; None if unknown
        self.files: Path | None = None
        self.weights = weights or weights_digest(model)
        adapted = chunk_adapter.digest if chunk_adapter is not None else ""
        self.fingerprint = fingerprint(model, tokenizer, drift, self.weights, adapted, words)
        self.n_layers = int(model.config.get_text_config().num_hidden_layers)
        self.profile = ModelProfile(self.fingerprint, self.n_layers)
        known = profile_of(self.fingerprint) if profile_of is not None else None
        self.profile = known if known is not None else self._probed()

    def packed(self) -> HFModel:
        """Pack the weights for fast products on a CPU, unless KV reuse is refused; return self."""
        if not self.profile.refusal:
            pack(self.model)
        return self

    @property
    def has_tokenizer(self) -> bool:
        """True if the model came with a tokenizer."""
        return self._tokenizer is not None

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer. If the model has no tokenizer, ModelError is raised."""
        if self._tokenizer is None:
            raise ModelError(
                f"{self.name} was loaded without a tokenizer. Pass token ids, or load a tokenizer"
                " too."
            )
        return self._tokenizer

    @cached_property
    def text_encoder(self) -> TextEncoder:
        """The encoder of prompts and text pieces. Raises ModelError if there is no tokenizer."""
        return TextEncoder(self.tokenizer)

    @property
    def bos(self) -> tuple[int, ...]:
        """The BOS token's id as a tuple, which is empty if plain text is encoded without BOS."""
        first = self.tokenizer.bos_token_id
        return (
            (first,) if first is not None and self.tokenizer("a").input_ids[:1] == [first] else ()
        )

    def tokens(self, text: str, special: bool = False) -> list[int]:
        """Return the token ids that a text has inside a prompt, without BOS or other added tokens.

        Args:
            text: The text. Lone surrogates are replaced by U+FFFD.
            special: If True, special tokens in the text become control tokens, as does the chat
                template's markup of tool calls, tool results and reasoning. If False, all text is
                encoded as plain text.
        """
        text = whole_text(text)
        encoder = self.text_encoder
        return encoder.template_tokens(text) if special else encoder.tokens(text)

    def text(self, token_ids: Sequence[int]) -> str:
        """Decode token ids to text, without special tokens."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    @property
    def nbytes_per_token(self) -> int:
        """Bytes of KV per token, over all layers."""
        return self.encode([0]).nbytes

    @property
    def max_context(self) -> int | None:
        """Maximum number of tokens of prompt and answer together. None means no known limit."""
        config = self.model.config.get_text_config()
        found = getattr(config, "max_position_embeddings", None) or getattr(
            config, "max_seq_len", None
        )
        return found if isinstance(found, int) and found > 0 else None

    def encode(
        self,
        token_ids: Sequence[int],
        context: Sequence[int] = (),
        adapter: ChunkAdapter | None = None,
    ) -> ChunkKV:
        """Encode a chunk at positions 0..n-1 and return its KV.

        A long chunk is computed in several forward passes. The lock is free between two passes.

        Args:
            token_ids: The n tokens of the chunk.
            context: Tokens before the chunk, at negative positions. Their KV is not returned.
            adapter: An adapter that is active during encoding. None means no adapter.
        """
        cut = len(context)
        before = self._context_kv(tuple(context), adapter) if context else ()
        layers = self._extended(before, token_ids, 0, adapter)
        return ChunkKV(
            tuple(
                LayerKV(kv.keys[:, cut:].contiguous(), kv.values[:, cut:].contiguous())
                for kv in layers
            )
        )

    def _extended(
        self,
        before: tuple[LayerKV, ...],
        token_ids: Sequence[int],
        position: int,
        adapter: ChunkAdapter | None,
    ) -> tuple[LayerKV, ...]:
        """Compute `token_ids` after the KV `before`, in steps; return the KV of all tokens."""
        ids = torch.tensor([list(token_ids)], device=self.device)
        size = ids.shape[1]
        step = ENCODE_STEP_TOKENS if size > 2 * ENCODE_STEP_TOKENS else size
        for lo in range(0, size, step):
            with self.lock, adapter.on(self.model) if adapter is not None else nullcontext():
                part = ids[:, lo : lo + step]
                before = probe.plain_kv(self.model, part, position + lo, before)
        return before

    def encode_at(self, token_ids: Sequence[int], positions: Sequence[int]) -> ChunkKV:
        """Encode tokens at given positions, without preceding tokens, and return their KV (Prompt
        Cache 3.3).

        Args:
            token_ids: The n tokens.
            positions: The n positions of the tokens, increasing.
        """
        if list(positions) == list(range(len(token_ids))):
            return self.encode(token_ids)
        kv = self.full_prefill(token_ids, torch.tensor(list(positions))).kv
        return ChunkKV(
            tuple(LayerKV(layer.keys.clone(), layer.values.clone()) for layer in kv.layers)
        )

    def encode_with_filler(self, token_ids: Sequence[int], context: Sequence[int]) -> ChunkKV:
        """Encode a chunk after filler text and return its KV.

        The filler `context` stands for the unknown text before the chunk in a real prompt. If the
        model has a chunk adapter, the adapter is active. If the model has a drift, the drift is
        added to the KV.
        """
        kv = self.encode(token_ids, context, self.chunk_adapter)
        return kv if self.drift is None else added(kv, self.drift, self.profile.rope)

    @cachedmethod(attrgetter("_contexts"), lock=attrgetter("lock"))
    def _context_kv(
        self, context: tuple[int, ...], adapter: ChunkAdapter | None
    ) -> tuple[LayerKV, ...]:
        """Return the cached KV of a context at positions -n..-1."""
        return self._extended((), context, -len(context), adapter)

    @contextmanager
    def before_layers(self, check: Callable[[], object]) -> Iterator[None]:
        """While the `with` block runs, hold the lock, and call `check` before each layer.

        An exception in `check` ends the forward pass.
        """
        lists = (each for each in self.model.modules() if isinstance(each, nn.ModuleList))
        with self.lock, ExitStack() as hooked:
            for layer in chain.from_iterable(lists):
                hook = layer.register_forward_pre_hook(lambda module, inputs: check())
                hooked.callback(hook.remove)
            yield

    def full_prefill(self, token_ids: Sequence[int], positions: Tensor | None = None) -> Prefill:
        """Prefill a whole prompt without reuse of KV.

        Args:
            token_ids: The T tokens of the prompt.
            positions: int64 [T], the position of each token. None means 0..T-1.
        """
        ids = torch.tensor([list(token_ids)], device=self.device)
        at = self._explicit_positions(positions) if positions is not None else None
        if at is not None and not self.profile.refusal:
            return self.fuse(token_ids, at, [], KVSource(), "none", 0.0)
        with self.lock:
            out = probe.run_forward(
                self.model, ids, None if self.profile.refusal else DynamicCache(), at
            )
        found = getattr(out, CACHE, None)
        cache = (
            RowCache(self.n_layers) if probe.is_whole(found, self.n_layers, ids.shape[1]) else None
        )
        if cache is not None:
            cache.adopt(found)
        return Prefill(tuple(token_ids), cache, out.logits[0, -1], at)

    def prefill_state(self, token_ids: Sequence[int], states: States | None) -> Prefill:
        """Prefill all tokens of a prompt but the last, for a model without KV per token
        (`hf/kept_states.py`).

        Args:
            token_ids: The tokens of the prompt. `generate` computes the last token.
            states: Copies of caches of earlier prompts. The prefill continues from the copy with
                the longest matching prefix, and adds copies. None means that no copies are used.
        """
        with self.lock:
            state, n_before = begin(self.model, token_ids, self.profile.state, states)
        return Prefill(
            tuple(token_ids),
            None,
            torch.empty(0, device=self.device),
            state=state,
            n_before=n_before,
        )

    def _explicit_positions(self, positions: Tensor) -> Tensor | None:
        """Return positions int64 [T] on the model's device, or None if they are 0..T-1."""
        usual = torch.arange(len(positions), device=positions.device)
        return None if torch.equal(positions, usual) else positions.to(self.device)

    def score_continuation(self, prefill: Prefill, token_ids: Sequence[int]) -> Tensor:
        """Return the logits float32 [n, V] that predict n given tokens after a prompt.

        The model must keep KV per token. All given tokens but the last are appended to the
        prefill's cache.
        """
        scored = [prefill.logits[None]]
        if len(token_ids) > 1:
            at = prefill.positions
            begin = len(prefill.token_ids) if at is None else int(at[-1]) + 1
            ids = torch.tensor([list(token_ids[:-1])], device=self.device)
            places = torch.arange(begin, begin + ids.shape[1], device=self.device)
            options = {CACHE: prefill.cache, **probe.at_positions(self.model, places)}
            with self.lock, torch.no_grad():
                out: Any = self.model(input_ids=ids, use_cache=True, **options)
            scored.append(out.logits[0])
        return torch.cat(scored).float()

    def fuse(
        self,
        token_ids: Sequence[int],
        positions: Tensor,
        runs: Sequence[CachedRun],
        source: LayerSource,
        policy: str,
        ratio: float,
        profile: ModelProfile | None = None,
        question_rows: Sequence[Tensor] = (),
    ) -> Prefill:
        """Prefill a prompt that reuses the KV of cached runs of tokens.

        Args:
            token_ids: The T tokens of the prompt.
            positions: int64 [T], the position of every token.
            runs: The cached runs of tokens in the prompt.
            source: Yields the KV of the cached runs, layer by layer.
            policy: Name of the policy that chooses the rows to recompute.
            ratio: Share of the candidate rows to recompute, 0..1.
            profile: A profile to use instead of the model's own profile.
            question_rows: Sets of rows, int64, that may be the question, likeliest first
                (`Prompt.question_rows`). The policy `lexical` uses the first set that has a word in
                common with the chunks. The policy `query` uses the first set. Default: the rows
                after the last cached run, then all rows outside cached runs.

        Raises:
            RefusedError: KV of this model cannot be reused.
            LostRun: A cached run can no longer be read. Call `fuse` again without that run.
        """
        profile = profile or self.profile
        if profile.refusal and not (profile.fixed and runs and not any(run.blend for run in runs)):
            raise RefusedError(f"{self.name} cannot reuse stored KV: {profile.refusal}")
        ids, at = (
            torch.tensor([list(token_ids)], device=self.device),
            self._explicit_positions(positions),
        )
        positions = positions.to(self.device)
        chosen = policy_named(policy if ratio > 0 else "none")
        n_tokens, pads = len(token_ids), self.accelerated
        padding = bucket(n_tokens) - n_tokens if pads and profile.mode == "rows" else 0
        buffers = Buffers(
            n_tokens,
            runs,
            source,
            profile.rope,
            self.device,
            SPARE_ROWS,
            AT_ONCE_NBYTES if pads else AT_ONCE_ON_CPU_NBYTES,
            padding,
            profile.windows,
        )
        candidates = candidates_of(runs, n_tokens, self.n_layers, ratio, self.device)
        asked = question_rows or _question_rows(candidates.cached, runs)
        with self.lock, torch.no_grad():
            score = None
            if chosen.wants == "words" and len(candidates):
                score = self._nearness(token_ids, candidates.rows.cpu(), asked)
            elif chosen.wants == "attention" and len(candidates):
                bare = Fusion(buffers, positions, candidates, policy_named("none"), pads)
                attention = FusedPass(self._wiring(profile), bare).look(ids, asked[0])
                score = (
                    attention.index_select(0, candidates.rows) if attention is not None else None
                )
            fusion = Fusion(buffers, positions, replace(candidates, score=score), chosen, pads)
            run = FusedPass(self._wiring(profile), fusion)
            run.run(ids)
        run.cache.fill(buffers)
        if self.device.type == "cuda":
            # wait for the GPU, so that timings include the whole computation
            torch.cuda.current_stream(self.device).synchronize()
        return Prefill(
            tuple(token_ids), run.cache, run.logits, at, fusion.chosen, fusion.mean_ratio
        )

    def fuse_parts(
        self,
        parts: Sequence[PromptPart],
        policy: str,
        ratio: float,
        profile: ModelProfile | None = None,
    ) -> Prefill:
        """Prefill a prompt of parts with KV in memory and parts without KV; see `fuse`."""
        ids, runs, chunks = list[int](), list[CachedRun](), list[ChunkKV]()
        for part in parts:
            lo = len(ids)
            ids += part.ids
            if part.kv is not None:
                runs.append(CachedRun(len(chunks), lo, len(ids), lo, part.blend))
                chunks.append(part.kv)
        return self.fuse(
            ids, torch.arange(len(ids)), runs, KVSource(chunks), policy, ratio, profile
        )

    def _nearness(
        self, token_ids: Sequence[int], candidates: Tensor, question_rows: Sequence[Tensor]
    ) -> Tensor:
        """Return the nearness of each candidate row to words of the question, float32 [C]."""
        words = [self._word(token_id) for token_id in token_ids]
        known = {word: number for number, word in enumerate(dict.fromkeys(words))}
        numbers = torch.tensor([known[word] if word else -1 for word in words])
        for rows in question_rows:
            near = nearness(numbers, rows, candidates)[candidates]
            if bool(near.any()):
                break
        return near.to(self.device)

    @property
    def shared_wiring(self) -> Wiring | None:
        """The hooks for decoding several answers in one batch; None if that is unsupported."""
        if (
            self.profile.refusal
            or self.profile.mode != "rows"
            or not probe.takes_positions(self.model)
        ):
            return None
        return self._wiring(self.profile)

    def _wiring(self, profile: ModelProfile) -> Wiring:
        wanted, wired = (profile.windows, profile.mode, profile.fixed), self._wired
        if wired is None or (wired.windows, wired.mode, wired.pads) != wanted:
            layers = probe.decoder_layers(self.model)
            self._wired = wired = Wiring(self.model, layers, *wanted)
        return wired

    def _probed(self) -> ModelProfile:
        """Probe the model and return its profile, with the reason if KV reuse is refused."""
        try:
            return self._probe()
        except FixedError as error:
            return self._probe_fixed(str(error))
        except RefusedError as error:
            with self.lock:
                state = kind_of(self.model, self.n_layers)
            return ModelProfile(self.fingerprint, self.n_layers, refusal=str(error), state=state)

    def _probe(self) -> ModelProfile:
        config = self.model.config.get_text_config()
        probe.refuse_by_config(config)
        probe.refuse_by_modules(self.model)
        layers = probe.decoder_layers(self.model)
        windows = probe.windows(config, len(layers))
        tokens = probe.probe_tokens(config.vocab_size, probe.RUN_TOKENS, self.device)
        try:
            rope = probe.find_rope(
                self.model, tokens, probe.tolerance_of(self.dtype, self.n_layers)
            )
        except probe.UNFIT as failure:
            cause = f"{type(failure).__name__}: {failure}"
            raise RefusedError(
                f"The model's forward does not store all tokens' KV in a standard cache ({cause})."
            ) from failure
        profile = ModelProfile(self.fingerprint, len(layers), rope, windows)
        found = self._first_exact(profile, "ratio_one", self._self_test)
        if isinstance(found, str):
            raise RefusedError(f"The model failed the self-test of fused prefill: {found}.")
        return found

    def _first_exact(
        self, profile: ModelProfile, name: str, test: Callable[[ModelProfile], float]
    ) -> ModelProfile | str:
        """Return `profile` in the first mode that passes `test`, or the last failure as text."""
        why = ""
        for mode in ("rows", "dense") if self.model._supports_attention_backend else ("dense",):
            candidate = replace(profile, mode=mode)
            try:
                error = test(candidate)
            except probe.UNFIT as failure:
                why = f"its forward cannot do a fused prefill ({type(failure).__name__}: {failure})"
                continue
            if error <= probe.tolerance_of(self.dtype, self.n_layers):
                return replace(candidate, errors={name: error})
            why = f"the relative error of fused to full prefill is {error:.2g}"
        return why

    def _probe_fixed(self, why: str) -> ModelProfile:
        """Return the profile of a model whose KV cannot be moved to other positions."""
        n_layers = len(probe.decoder_layers(self.model))
        windows = probe.windows(self.model.config.get_text_config(), n_layers)
        refused = ModelProfile(self.fingerprint, n_layers, (None,) * n_layers, windows, refusal=why)
        parts = self.probe_parts((probe.RUN_TOKENS, probe.RUN_TOKENS))
        found = self._first_exact(
            replace(refused, fixed=True),
            "fixed",
            lambda profile: self.error_of(parts, "none", 0.0, profile),
        )
        return refused if isinstance(found, str) else found

    def _self_test(self, profile: ModelProfile) -> float:
        """Fuse a prompt longer than all sliding windows at ratio 1, and return the error."""
        longest = max([window or 0 for window in profile.windows], default=0)
        total = max(3 * probe.RUN_TOKENS, longest + probe.RUN_TOKENS)
        size = (total - 4) // 3
        parts = self.probe_parts((size, size, size, total - 3 * size))
        return self.error_of(parts, "hkvd", 1.0, profile)

    def probe_parts(self, sizes: Sequence[int]) -> list[PromptPart]:
        """Return a test prompt: a prefix, chunks and a question of the given sizes in tokens."""
        vocab_size = self.model.config.get_text_config().vocab_size
        ids = iter(probe.probe_tokens(vocab_size, sum(sizes), self.device)[0].tolist())
        *runs, question = [tuple(islice(ids, size)) for size in sizes]
        cached = [
            PromptPart(run, self.encode(run), blend=index > 0) for index, run in enumerate(runs)
        ]
        return [*cached, PromptPart(question)]

    def error_of(
        self,
        parts: Sequence[PromptPart],
        policy: str,
        ratio: float,
        profile: ModelProfile | None = None,
    ) -> float:
        """Return the error of a fused prefill relative to full prefill. Args: see `fuse_parts`."""
        fused = self.fuse_parts(parts, policy, ratio, profile)
        return fused.error(self.full_prefill(fused.token_ids), self.is_routed)

    @cached_property
    def is_routed(self) -> bool:
        """True if rounding may send a token to a different expert (`hf.probe.is_routed`)."""
        return probe.is_routed(self.model.config.get_text_config(), self.dtype)


def _question_rows(cached: Tensor, runs: Sequence[CachedRun]) -> tuple[Tensor, Tensor]:
    """Return two sets of rows: uncached rows after the last run, and all uncached rows."""
    outside = (~cached).nonzero()[:, 0]
    return outside[outside >= max((run.hi for run in runs), default=0)], outside


def _word(tokenizer: PreTrainedTokenizerBase | None, token_id: int) -> str:
    """Return the word, or part of a word, in a token; "" for punctuation and white space."""
    text, is_special = _text_of(tokenizer, token_id)
    text = text.strip().casefold()
    if tokenizer is None or "\ufffd" in text:
        return f"{text} {token_id}"
    return text if not is_special and any(letter.isalnum() for letter in text) else ""


def _border(tokenizer: PreTrainedTokenizerBase | None, token_id: int) -> tuple[int, bool]:
    text, is_special = _text_of(tokenizer, token_id)
    ends = 3 if is_special else min(2, text.count("\n"))
    return ends, not is_special and bool(text.strip())


def _text_of(tokenizer: PreTrainedTokenizerBase | None, token_id: int) -> tuple[str, bool]:
    """Return the text of a token, and True if the token is special."""
    if tokenizer is None:
        return "", False
    return str(tokenizer.decode([token_id])), token_id in tokenizer.all_special_ids
