"""Adaptation of a model: load the model, add an adapter, and set up the adapter's training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from ragfuse.adapt.examples import DocumentExamples, Examples, split_chunks
from ragfuse.adapt.folder import AdapterFolder, AdaptRecipe
from ragfuse.adapt.teacher import Teacher, context_of, prompt_of
from ragfuse.adapt.trainer import Trainer
from ragfuse.calibration.calibrate import Chunk
from ragfuse.engine.ask import Ask
from ragfuse.engine.engine import Engine
from ragfuse.errors import InputError, ModelError
from ragfuse.hf.branches import Branch, BranchModel, refuse_unadaptable
from ragfuse.hf.chunk_adapter import ADAPTER_CONFIG, LoraAdapter
from ragfuse.hf.model import HFModel
from ragfuse.hf.probe import logits_error, tolerance_of
from ragfuse.models import quietly, resolve_llm
from ragfuse.models.adapters import CHUNK_ADAPTER
from ragfuse.models.device import limit_threads, resolve_auto
from ragfuse.models.loader import load_model
from ragfuse.plan.evict import lru
from ragfuse.settings import Settings
from ragfuse.store import KVStore, MemoryTier
from ragfuse.types.keys import digest

SEED = 0
STORE_NBYTES_OF_CHECK = 1 << 30


class Adaptation:
    """A model for which an adapter is trained.

    Args:
        settings: Settings for loading the model, and for splitting and encoding chunks.

    Raises:
        ModelError: The model cannot be loaded or adapted.
    """

    def __init__(self, settings: Settings) -> None:
        settings = resolve_auto(settings)
        source = resolve_llm(settings.model, settings.home)
        if any((Path(source) / place / ADAPTER_CONFIG).is_file() for place in ("", CHUNK_ADAPTER)):
            raise ModelError(
                f"'{settings.model}' is an adapter, not a model. Use the adapter's base model, or"
                " merge the adapter and use the folder of the merged model."
            )
        if settings.device.startswith("cpu"):
            limit_threads(None if settings.threads == "auto" else settings.threads)
        with quietly(source):
            self.plain: HFModel = load_model(
                source,
                settings.dtype,
                settings.device,
                model_kwargs=settings.model_kwargs,
                home=settings.home,
                pack=False,
            )
        self.plain.name = settings.model
        self.plain.drift = None
        self.settings = settings.model_copy(update={"learn": "off", "prefix_cache": False})
        refuse_unadaptable(self.plain.model, self.plain.profile)
        self.engine = Engine(
            self.settings, self.plain, KVStore([MemoryTier(STORE_NBYTES_OF_CHECK, lru)])
        )
        self.held: Sequence[Chunk] = ()

    def close(self) -> None:
        """Close the engine that makes prompts."""
        self.engine.close(0.0)

    def prepare(self, chunks: Sequence[Chunk], out: Path, rank: int) -> Trainer:
        """Add an adapter to the model, and return a trainer that trains the adapter on chunks.

        If `out` has a checkpoint, the trainer resumes the training from the checkpoint.

        Args:
            chunks: The chunks of the documents.
            out: Folder of the adapter.
            rank: Rank of the adapter.

        Raises:
            InputError: There are too few chunks, or `trainer` rejects `out` or the settings.
            ModelError: `trainer` rejects the model.
        """
        train, self.held = split_chunks(chunks, SEED)
        return self.trainer(
            DocumentExamples(train, SEED).example,
            DocumentExamples(self.held, SEED + 1).example,
            digest(*(text for text, _ in chunks)),
            out,
            rank,
        )

    def trainer(
        self,
        train: Examples,
        held: Examples,
        source: str,
        out: Path,
        rank: int,
        seed: int = SEED,
    ) -> Trainer:
        """Add an adapter to the model, and return a trainer that trains the adapter on examples.

        Args:
            train: Examples to train on.
            held: Examples of held-out documents.
            source: Digest of the texts from which the examples are made.
            out: Folder of the adapter.
            rank: Rank of the adapter.
            seed: Seed of the adapter's initial weights.

        Raises:
            InputError: `AdapterFolder` rejects `out`, or chunks are encoded without filler text.
            ModelError: The training's attention mask gives other logits than the engine.
        """
        encoder = self.engine.runtime.encoder
        filler = encoder.filler(self.settings.chunk_tokens)
        if not filler:
            raise InputError(
                "Training an adapter needs filler text before chunks. Set filler_tokens to 256."
            )
        recipe = AdaptRecipe(self.plain.fingerprint, source, encoder.filler_tokens, rank, seed)
        folder = AdapterFolder(out, recipe)
        if folder.checkpoint() is None:
            self._require_same(BranchModel(self.plain.model, self.plain.profile, filler), train)
        path = Path(self.settings.model).expanduser()
        base = str(path.resolve()) if path.exists() else self.settings.model
        adapter = LoraAdapter(self.plain.model, rank, seed, base)
        branches = BranchModel(self.plain.model, self.plain.profile, filler, adapter)
        teacher = Teacher(self.engine, branches)
        return Trainer(branches, adapter, teacher, train, held, folder)

    @torch.no_grad()
    def _require_same(self, branches: BranchModel, examples: Examples) -> None:
        """Raise ModelError if the training mask gives other logits than the engine at ratio 0."""
        example = examples(0)
        passages = example.passages[:2]
        prompt = prompt_of(self.engine, example.template, passages, example.questions[0])
        context = context_of(prompt)
        self.engine.ingest([(text, "check") for text in passages])
        wanted = self.engine.prepare(prompt, Ask(policy="none", ratio=0.0)).prefill.logits
        self.engine.store.clear()
        branch = Branch(prompt.token_ids[len(context.token_ids) :], (0,))
        error = logits_error(branches.blockwise(context, [branch]).logits[0], wanted)
        if error > 2 * tolerance_of(self.plain.dtype, self.plain.n_layers):
            raise ModelError(
                f"No adapter can be trained for {self.plain.name}. Training isolates chunks by"
                " an attention mask. With this mask, the model's logits differ from those of a"
                f" fused prefill (relative error {error:.2g}). Use another model, or this model"
                " without an adapter."
            )
