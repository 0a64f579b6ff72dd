"""The training: chunks are encoded with the adapter, and the plain model behind them learns to lack nothing.

The loss of a step has three parts: the KL divergence from the teacher, which is the plain model's full prefill, along
the teacher's answers; the relative distance of the hidden states of the questions' rows; and that of the chunks' KV,
which says something of every row. Its gradient flows through the KV of the chunks into the adapter. Examples come by
number, so a training that goes on makes the very steps that one without a break makes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import mean

import torch
from torch import Tensor

from ragfuse.adapt.checkpoint import AdapterFolder, Evaluation, TrainingState, damaged, moments_of, restore_moments
from ragfuse.adapt.examples import NumberedExamples
from ragfuse.adapt.teacher import Lesson, Teacher
from ragfuse.hf.branches import BranchModel, BranchStates
from ragfuse.hf.chunk_adapter import ADAPTER_WEIGHTS
from ragfuse.hf.lora import LoraAdapter
from ragfuse.models.adapters import CHUNK_ADAPTER

POOL = 400
"""Number of different examples; then they come again."""
WARM_UP_STEPS = 8
"""Steps until the learning rate is whole."""
LEAST_SHARE = 0.02
"""The learning rate falls to this share of its highest."""
HIDDEN_WEIGHT = 25.0
"""Weight of the hidden states' relative distance beside the KL."""
KV_WEIGHT = 25.0
"""Weight of the chunks' KV's relative distance beside the KL."""
HIDDEN_LAYERS = 7
"""Number of layers whose hidden states are compared."""
HELD_EXAMPLES = 5
EVALUATE_STEPS = 25
"""Steps between two measurements on held-out documents."""
STALE_EVALUATIONS = 6
"""Measurements without a lower KL after which the training ends."""
SAVE_S = 120.0
"""Seconds between two savings of the state."""


@dataclass(frozen=True)
class TrainingLimits:
    """How long is trained: for so many seconds, or for so many steps if these are given."""

    seconds: float
    steps: int | None = None

    def done(self, state: TrainingState) -> float:
        """Return the share of the training that is done, from 0."""
        if self.steps is not None:
            return state.step / max(1, self.steps)
        return state.seconds / max(1e-9, self.seconds)


@dataclass(frozen=True)
class StepReport:
    """What a step tells: its state, the share that is done, the loss's KL, and the seconds that are left."""

    state: TrainingState
    done: float
    kl: float
    left_s: float


def layers_compared(n_layers: int) -> tuple[int, ...]:
    """Return the numbers of the hidden states that are compared, of which number 0 is the embedding."""
    return tuple(sorted({-(-n_layers * (i + 1) // HIDDEN_LAYERS) for i in range(HIDDEN_LAYERS)}))


def kl_along(wanted: Tensor, found: Tensor) -> Tensor:
    """Return the mean KL(wanted || found) over A positions in nats, with gradients, from logits [A, V]."""
    log_wanted, log_found = torch.log_softmax(wanted.float(), -1), torch.log_softmax(found.float(), -1)
    return (log_wanted.exp() * (log_wanted - log_found)).sum(-1).mean()


def hidden_distance(wanted: Tensor, found: Tensor) -> Tensor:
    """Return the mean relative squared distance of hidden states [L, R, D], with gradients."""
    wanted, found = wanted.float(), found.float()
    return ((found - wanted).square().sum(-1) / wanted.square().sum(-1).clamp_min(1e-12)).mean()


def kv_distance(wanted: Sequence[tuple[Tensor, Tensor]], found: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the mean relative squared distance of keys and values [H, C, D] over all layers, with gradients."""
    parts = [
        (other.float() - one.float()).square().sum() / one.float().square().sum()
        for layer, again in zip(wanted, found, strict=True)
        for one, other in zip(layer, again, strict=True)
    ]
    return torch.stack(parts).mean()


class Trainer:
    """One training of an adapter.

    Args:
        model: The model's forwards over contexts.
        adapter: The adapter on it.
        teacher: Makes lessons.
        train: Examples to train on.
        held: Examples of held-out documents.
        folder: Where everything is kept.
        learning_rate: Highest learning rate.
    """

    def __init__(
        self,
        model: BranchModel,
        adapter: LoraAdapter,
        teacher: Teacher,
        train: NumberedExamples,
        held: NumberedExamples,
        folder: AdapterFolder,
        learning_rate: float,
    ) -> None:
        self._model, self._adapter, self._teacher, self._folder = model, adapter, teacher, folder
        self._train, self._held, self._rate = train, held, learning_rate
        self._layers = layers_compared(model.model.config.get_text_config().num_hidden_layers)
        self._optimizer = torch.optim.AdamW(
            adapter.weights.values(), lr=learning_rate, weight_decay=0.0, betas=(0.9, 0.98)
        )
        self._held_lessons: list[Lesson] = []
        self.state = TrainingState()
        self._resume()

    def _resume(self) -> None:
        kept = self._folder.load()
        if kept is None:
            return
        self.state, tensors = kept
        weights = self._adapter.weights
        try:
            self._adapter.load({name: tensors[f"weight.{name}"] for name in weights})
            if self.state.step:
                restore_moments(self._optimizer, weights, tensors)
        except (KeyError, RuntimeError) as error:  # a tensor is missing, or of another shape
            raise damaged(self._folder.state_file, error) from error

    def run(
        self,
        limits: TrainingLimits,
        report: Callable[[StepReport], object] = lambda report: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> TrainingState:
        """Train until the limit is reached, nothing is gained any more, or `stop` says so; write the best adapter.

        Args:
            limits: How long.
            report: Called after every step.
            stop: Asked after every step.

        Returns:
            The state, whose `finished` is "" if `stop` ended it.
        """
        state, saved = self.state, time.monotonic()
        state.finished = ""
        if not state.evaluations:
            self._timed(self._evaluate)
        while not state.finished and not stop():
            if limits.done(state) >= 1:
                state.finished = "the time is over" if limits.steps is None else "all steps are made"
                break
            self._timed(lambda: self._step(limits, report))
            if state.step % EVALUATE_STEPS == 0:
                self._timed(self._evaluate)
                if self._is_stale():
                    state.finished = f"{STALE_EVALUATIONS} measurements in a row gained nothing"
            if time.monotonic() - saved > SAVE_S:
                self._save()
                saved = time.monotonic()
        if state.finished and state.evaluations[-1].step != state.step:
            self._timed(self._evaluate)
        if state.step and not (self._folder.path / CHUNK_ADAPTER / ADAPTER_WEIGHTS).is_file():
            self._folder.put(self._adapter.save)  # stopped before the first measurement: what was learnt so far
        self._save()
        return state

    def _timed(self, work: Callable[[], object]) -> None:
        began = time.monotonic()
        work()
        self.state.seconds += time.monotonic() - began

    def _step(self, limits: TrainingLimits, report: Callable[[StepReport], object]) -> None:
        state, began = self.state, time.monotonic()
        done = limits.done(state)
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate * min((state.step + 1) / WARM_UP_STEPS, max(LEAST_SHARE, 1 - done))
        number = state.step % POOL
        lesson = self._teacher.lesson(str(number), self._train.example(number))
        found = self._model.blockwise(lesson.context, lesson.branches, self._layers, kv=True)
        kl = kl_along(lesson.states.logits, found.logits)
        hidden = hidden_distance(lesson.states.hidden, found.hidden)
        kv = kv_distance(lesson.states.chunks, found.chunks)
        loss: Tensor = kl + HIDDEN_WEIGHT * hidden + KV_WEIGHT * kv
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(list(self._adapter.weights.values()), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        state.step += 1
        line: dict[str, object] = {
            "step": state.step,
            "kl": float(kl.detach()),
            "hidden": float(hidden.detach()),
            "kv": float(kv.detach()),
            "norm": float(norm),
            "tokens": len(lesson.context.token_ids),
            "seconds": time.monotonic() - began,
        }
        self._note(line)
        left = (1 - done) / done * state.seconds if done else limits.seconds
        report(StepReport(state, done, float(kl.detach()), left))

    @torch.no_grad()
    def _evaluate(self) -> None:
        if not self._held_lessons:
            for number in range(HELD_EXAMPLES):
                lesson = self._teacher.lesson(f"held {number}", self._held.example(number))
                logits = lesson.states.logits
                self._held_lessons.append(
                    Lesson(lesson.context, lesson.branches, BranchStates(logits, logits.new_empty(0)))
                )
        found = mean(
            float(kl_along(lesson.states.logits, self._model.blockwise(lesson.context, lesson.branches).logits))
            for lesson in self._held_lessons
        )
        before = self.state.best
        evaluation = Evaluation(self.state.step, found)
        self.state.evaluations.append(evaluation)
        self._note({"held": asdict(evaluation)})
        if self.state.step and (before is None or evaluation.kl < before.kl):
            self._folder.put(self._adapter.save)
            self._save()

    def _is_stale(self) -> bool:
        best = self.state.best
        return best is not None and self.state.step - best.step >= STALE_EVALUATIONS * EVALUATE_STEPS

    def _save(self) -> None:
        weights = self._adapter.weights
        tensors: dict[str, Tensor] = {f"weight.{name}": weight for name, weight in weights.items()}
        tensors |= moments_of(self._optimizer, weights)
        self._folder.save(self.state, tensors)

    def _note(self, line: dict[str, object]) -> None:
        with self._folder.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
