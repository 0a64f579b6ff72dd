"""Train a chunk adapter, so that answers from reused chunks come closer to full prefill.

The loss of a step is a weighted sum of three distances to the teacher (full prefill by the plain
model):
- KL divergence along the teacher's answers,
- relative distance of the hidden states of questions and answers,
- relative distance of the chunks' KV.

The gradient flows through the chunks' KV into the adapter. transformers' `Trainer` provides the
loop, checkpoints and resuming. Examples are numbered, so a resumed training uses the same examples
in the same order as an uninterrupted training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import kl_div
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from ragfuse.adapt.examples import Examples
from ragfuse.adapt.folder import STATE_FILE, AdapterFolder
from ragfuse.adapt.teacher import Lesson, Teacher
from ragfuse.hf.branches import BranchModel
from ragfuse.hf.chunk_adapter import LoraAdapter

LEARNING_RATE = 1e-3
"""Maximum learning rate."""
POOL = 400
"""Number of distinct examples. After the last example, training continues with the first."""
WARM_UP_STEPS = 8
"""Steps until the learning rate reaches its maximum."""
LEAST_SHARE = 0.02
"""Final learning rate, as a share of the maximum."""
HIDDEN_WEIGHT = 25.0
"""Weight of the relative distance of hidden states in the loss; the KL's weight is 1."""
KV_WEIGHT = 25.0
"""Weight of the relative distance of the chunks' KV in the loss; the KL's weight is 1."""
HIDDEN_LAYERS = 7
"""Number of layers whose hidden states are in the loss."""
HELD_EXAMPLES = 5
EVALUATE_STEPS = 25
"""Steps between evaluations on held-out documents. Every evaluation saves a checkpoint."""
STALE_EVALUATIONS = 6
"""Training stops after this number of evaluations in a row without a new lowest KL."""
UNLIMITED_STEPS = 10**9


def layers_compared(n_layers: int) -> tuple[int, ...]:
    """Return the layers whose output is in the loss. The first layer has number 1."""
    return tuple(sorted({-(-n_layers * (i + 1) // HIDDEN_LAYERS) for i in range(HIDDEN_LAYERS)}))


def kl_along(wanted: Tensor, found: Tensor) -> Tensor:
    """Return the mean KL(wanted || found) in nats per token, from logits [A, V]."""
    log_wanted = torch.log_softmax(wanted.float(), -1)
    log_found = torch.log_softmax(found.float(), -1)
    return kl_div(log_found, log_wanted, reduction="batchmean", log_target=True)


def hidden_distance(wanted: Tensor, found: Tensor) -> Tensor:
    """Return the mean relative squared distance of hidden states [L, R, D]."""
    wanted, found = wanted.float(), found.float()
    return ((found - wanted).square().sum(-1) / wanted.square().sum(-1).clamp_min(1e-12)).mean()


def kv_distance(
    wanted: Sequence[tuple[Tensor, Tensor]], found: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """Return the mean relative squared distance of KV [H, C, D] over all layers."""
    parts = [
        (other.float() - one.float()).square().sum() / one.float().square().sum()
        for layer, again in zip(wanted, found, strict=True)
        for one, other in zip(layer, again, strict=True)
    ]
    return torch.stack(parts).mean()


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """Trains an adapter, and stores checkpoints and the best adapter in a folder."""

    def __init__(
        self,
        model: BranchModel,
        adapter: LoraAdapter,
        teacher: Teacher,
        train: Examples,
        held: Examples,
        folder: AdapterFolder,
    ) -> None:
        self._branches = model
        self._adapter = adapter
        self._teacher = teacher
        self._train = train
        self._held = held
        self._folder = folder
        self._layers = layers_compared(model.model.config.get_text_config().num_hidden_layers)
        self._held_lessons: list[Lesson] = []
        arguments = transformers.TrainingArguments(
            str(folder.checkpoints),
            per_device_train_batch_size=1,
            train_sampling_strategy="sequential",
            eval_strategy="steps",
            eval_steps=EVALUATE_STEPS,
            save_steps=EVALUATE_STEPS,
            save_total_limit=2,
            load_best_model_at_end=True,
            metric_for_best_model="kl",
            greater_is_better=False,
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            use_cache=True,
            use_cpu=model.device.type == "cpu",
            restore_callback_states_from_checkpoint=True,
        )
        super().__init__(
            adapter.module,
            arguments,
            data_collator=lambda numbers: {"number": numbers[0]},
            train_dataset=range(POOL),
            eval_dataset=range(HELD_EXAMPLES),
            callbacks=[transformers.EarlyStoppingCallback(STALE_EVALUATIONS)],
        )
        self.remove_callback(transformers.PrinterCallback)
        self._begun = folder.checkpoint()
        if self._begun is not None:
            self.state = transformers.TrainerState.load_from_json(str(self._begun / STATE_FILE))

    @property
    def evaluations(self) -> list[dict[str, float]]:
        """The evaluations on held-out documents, each as {"step", "kl"}. "kl" is the KL of plain
        reuse to the teacher, in nats per token. The first evaluation precedes the first step.
        """
        logs = [each for each in self.state.log_history if "eval_kl" in each]
        return [{"step": each["step"], "kl": each["eval_kl"]} for each in logs]

    def run(
        self,
        seconds: float,
        steps: int | None = None,
        report: Callable[[float], object] = lambda done: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Train until a limit is reached, the KL stops falling or `stop` returns True. Then write
        the adapter with the lowest KL.

        Args:
            seconds: Maximum duration, unless `steps` is given.
            steps: Total number of steps, including the steps before a resumption. None means that
                `seconds` is the limit.
            report: Called after every step with the completed share of the limit, 0 to 1.
            stop: Called after every step. If `stop` returns True, the training stops.
        """
        if steps is not None and self.state.global_step >= steps:
            return
        self._folder.begin()
        began_s = time.monotonic()

        def done(step: int) -> float:
            return (time.monotonic() - began_s) / seconds if steps is None else step / steps

        def step_end(step: int, control: transformers.TrainerControl) -> None:
            is_over = done(step) >= 1
            control.should_evaluate |= is_over
            if is_over or stop():
                control.should_save = control.should_training_stop = True
            report(done(step))

        self.add_callback(_StepEnd(step_end))
        self.args.max_steps = steps or UNLIMITED_STEPS
        self.args.eval_on_start = self._begun is None
        weights = self._adapter.weights.values()
        self.optimizer = AdamW(weights, LEARNING_RATE, weight_decay=0.0, betas=(0.9, 0.98))
        self.lr_scheduler = LambdaLR(
            self.optimizer,
            lambda step: min((step + 1) / WARM_UP_STEPS, max(LEAST_SHARE, 1 - done(step))),
        )
        self.train(resume_from_checkpoint=self._begun and str(self._begun))
        self._folder.put(self._adapter)

    def compute_loss(self, model: Any, inputs: dict[str, int], *_: Any, **__: Any) -> Tensor:
        """Return the loss of the example whose number is in `inputs`."""
        model.eval()
        number = inputs["number"]
        lesson = self._teacher.lesson(str(number), self._train(number), self._layers)
        found = self._branches.blockwise(lesson.context, lesson.branches, self._layers)
        return (
            kl_along(lesson.states.logits, found.logits)
            + HIDDEN_WEIGHT * hidden_distance(lesson.states.hidden, found.hidden)
            + KV_WEIGHT * kv_distance(lesson.states.chunks, found.chunks)
        )

    @torch.no_grad()
    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Return and log `eval_kl`, the adapter's mean KL to the teacher on held-out documents."""
        self.model.eval()
        self._held_lessons = self._held_lessons or [
            self._teacher.lesson(f"held {number}", self._held(number))
            for number in range(HELD_EXAMPLES)
        ]
        distances = [
            kl_along(
                lesson.states.logits,
                self._branches.blockwise(lesson.context, lesson.branches).logits,
            )
            for lesson in self._held_lessons
        ]
        metrics = {"eval_kl": float(torch.stack(distances).mean())}
        self.log(metrics)
        self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _save(self, output_dir: str, state_dict: Any = None) -> None:
        self._adapter.save(Path(output_dir))


class _StepEnd(transformers.TrainerCallback):  # type: ignore[misc]
    """Calls a function after each step."""

    def __init__(self, call: Callable[[int, transformers.TrainerControl], None]) -> None:
        self._call = call

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Call the function with the number of steps and the trainer's control object."""
        self._call(state.global_step, control)
