"""The training: chunks are encoded with the adapter, and the plain model behind them learns to lack
nothing.

The loss of a step has three parts: the KL divergence from the teacher, which is the plain model's
full prefill, along the teacher's answers; the relative distance of the hidden states of the
questions' rows; and that of the chunks' KV, which says something of every row. Its gradient flows
through the KV of the chunks into the adapter. Examples come by number, so a training that goes on
makes the very steps that one without a break makes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

import torch
from torch import Tensor

from ragfuse.adapt.checkpoint import AdapterFolder, Evaluation, TrainingState
from ragfuse.adapt.examples import NumberedExamples
from ragfuse.adapt.teacher import Lesson, Teacher
from ragfuse.hf.branches import BranchModel
from ragfuse.hf.lora import LoraAdapter

LEARNING_RATE = 1e-3
"""The highest learning rate."""
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


def layers_compared(n_layers: int) -> tuple[int, ...]:
    """Return the numbers of the hidden states that are compared, of which number 0 is the
    embedding.
    """
    return tuple(sorted({-(-n_layers * (i + 1) // HIDDEN_LAYERS) for i in range(HIDDEN_LAYERS)}))


def kl_along(wanted: Tensor, found: Tensor) -> Tensor:
    """Return the mean KL(wanted || found) over A positions in nats, with gradients, from logits [A,
    V].
    """
    log_wanted, log_found = (
        torch.log_softmax(wanted.float(), -1),
        torch.log_softmax(found.float(), -1),
    )
    return (log_wanted.exp() * (log_wanted - log_found)).sum(-1).mean()


def hidden_distance(wanted: Tensor, found: Tensor) -> Tensor:
    """Return the mean relative squared distance of hidden states [L, R, D], with gradients."""
    wanted, found = wanted.float(), found.float()
    return ((found - wanted).square().sum(-1) / wanted.square().sum(-1).clamp_min(1e-12)).mean()


def kv_distance(
    wanted: Sequence[tuple[Tensor, Tensor]], found: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """Return the mean relative squared distance of keys and values [H, C, D] over all layers, with
    gradients.
    """
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
        state: Where the training stands.
        tensors: What was saved with it; none for a new training.
    """

    def __init__(
        self,
        model: BranchModel,
        adapter: LoraAdapter,
        teacher: Teacher,
        train: NumberedExamples,
        held: NumberedExamples,
        folder: AdapterFolder,
        state: TrainingState,
        tensors: Mapping[str, Tensor],
    ) -> None:
        self.state = state
        self._model = model
        self._adapter = adapter
        self._teacher = teacher
        self._train = train
        self._held = held
        self._folder = folder
        self._layers = layers_compared(model.model.config.get_text_config().num_hidden_layers)
        weights = adapter.weights.values()
        self._optimizer = torch.optim.AdamW(weights, weight_decay=0.0, betas=(0.9, 0.98))
        self._held_lessons: list[Lesson] = []
        if tensors:
            adapter.load({name: tensors[f"weight.{name}"] for name in adapter.weights})
            kept = self._optimizer.state_dict()
            kept["state"] = {
                index: {
                    part: tensors[f"{part}.{index}"] for part in ("step", "exp_avg", "exp_avg_sq")
                }
                for index in range(len(adapter.weights))
                if f"step.{index}" in tensors
            }
            self._optimizer.load_state_dict(kept)

    def run(
        self,
        limits: TrainingLimits,
        report: Callable[[float], object] = lambda done: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> TrainingState:
        """Train until the limit is reached, nothing is gained any more, or `stop` says so; write
        the best adapter.

        Args:
            limits: How long.
            report: Called after every step with the share of the training that is done.
            stop: Asked after every step.

        Returns:
            The state, whose `finished` is "" if `stop` ended it.
        """
        state = self.state
        state.finished = ""
        saved = before = time.monotonic()
        while not state.finished and not stop():
            done = limits.done(state)
            if done >= 1:
                state.finished = (
                    "the time is over" if limits.steps is None else "all steps are made"
                )
            elif state.evaluations:
                self._step(done)
            if not state.evaluations or self._is_due():
                self._evaluate()
                saved = time.monotonic()
            elif time.monotonic() - saved > SAVE_S:
                self._save()
                saved = time.monotonic()
            state.seconds += time.monotonic() - before
            before = time.monotonic()
            report(limits.done(state))
        if state.step and not self._folder.has_adapter:
            # stopped before it was measured: what was learnt so far
            self._folder.put(self._adapter)
        self._save()
        return state

    def _is_due(self) -> bool:
        """Return whether the weights are to be measured on held-out documents."""
        last = self.state.evaluations[-1].step
        return self.state.step != last and (
            bool(self.state.finished) or self.state.step % EVALUATE_STEPS == 0
        )

    def _step(self, done: float) -> None:
        step = self.state.step
        share = min((step + 1) / WARM_UP_STEPS, max(LEAST_SHARE, 1 - done))
        self._optimizer.param_groups[0]["lr"] = LEARNING_RATE * share
        number = step % POOL
        lesson = self._teacher.lesson(str(number), self._train.example(number), self._layers)
        found = self._model.blockwise(lesson.context, lesson.branches, self._layers)
        loss: Tensor = (
            kl_along(lesson.states.logits, found.logits)
            + HIDDEN_WEIGHT * hidden_distance(lesson.states.hidden, found.hidden)
            + KV_WEIGHT * kv_distance(lesson.states.chunks, found.chunks)
        )
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(list(self._adapter.weights.values()), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.state.step += 1

    @torch.no_grad()
    def _evaluate(self) -> None:
        """Measure the weights on held-out documents, keep the best ones, and note where nothing is
        gained.
        """
        state = self.state
        if not self._held_lessons:
            self._held_lessons = [
                self._teacher.lesson(f"held {number}", self._held.example(number))
                for number in range(HELD_EXAMPLES)
            ]
        found = mean(
            float(
                kl_along(
                    lesson.states.logits,
                    self._model.blockwise(lesson.context, lesson.branches).logits,
                )
            )
            for lesson in self._held_lessons
        )
        state.evaluations.append(Evaluation(state.step, found))
        if state.step and state.best.step == state.step:
            self._folder.put(self._adapter)
        elif state.step - state.best.step >= STALE_EVALUATIONS * EVALUATE_STEPS:
            state.finished = f"{STALE_EVALUATIONS} measurements in a row gained nothing"
        self._save()

    def _save(self) -> None:
        weights = self._adapter.weights
        tensors: dict[str, Tensor] = {f"weight.{name}": weight for name, weight in weights.items()}
        for index, parts in self._optimizer.state_dict()["state"].items():
            tensors |= {f"{part}.{index}": value for part, value in parts.items()}
        self._folder.save(self.state, tensors)
