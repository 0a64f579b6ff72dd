"""The folder of an adapter that is being trained: what it was started with, and where the training stands.

The adapter itself lies in `chunk_adapter/`, in PEFT's form, so that it can be used at any time; `training/` holds what
going on needs: one file with the weights and the optimizer's moments, written at once.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ragfuse.errors import InputError
from ragfuse.models.adapters import CHUNK_ADAPTER
from ragfuse.models.shipped_profile import ShippedProfile, write_shipped
from ragfuse.process.folders import make_own_folder

RECIPE_FILE = "recipe.json"
STATE_FILE = "state.safetensors"
ANSWERS_FILE = "answers.jsonl"
LOG_FILE = "log.jsonl"
WORK_FOLDER = "training"
PARTIAL = ".partial"
RECIPE_VERSION = 1


@dataclass(frozen=True)
class AdaptRecipe:
    """What decides the weights that come out, other than how long is trained.

    Args:
        model: Fingerprint of the plain model.
        base: Its name, folder or id.
        documents: Digest of all chunks.
        filler_tokens: Tokens of filler text that chunks are encoded behind.
        rank: Rank of the adapter.
        learning_rate: Highest learning rate.
        seed: Seed of all random choices.
        version: `RECIPE_VERSION` when it was written.
    """

    model: str
    base: str
    documents: str
    filler_tokens: int
    rank: int
    learning_rate: float
    seed: int
    version: int = RECIPE_VERSION


@dataclass(frozen=True)
class Evaluation:
    """One measurement on held-out documents.

    Args:
        step: Steps before it.
        kl: KL to the teacher at ratio 0, in nats per token.
    """

    step: int
    kl: float


@dataclass
class TrainingState:
    """Where a training stands.

    Args:
        step: Steps that were made.
        seconds: Seconds that they took, evaluations included.
        evaluations: All measurements, the first before the first step.
        finished: Why the training ended; "" while it goes on.
    """

    step: int = 0
    seconds: float = 0.0
    evaluations: list[Evaluation] = field(default_factory=list)
    finished: str = ""

    @property
    def best(self) -> Evaluation | None:
        """The measurement with the lowest KL; None before the first."""
        return min(self.evaluations, key=lambda each: each.kl, default=None)


def damaged(file: Path, error: Exception) -> InputError:
    """Return the error for a file in the work folder of a training that cannot be read."""
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    folder = file.parent.parent
    return InputError(
        f"Wanted the training that `ragfuse adapt` began in '{folder}', found '{file}' damaged ({first}). Put the file "
        f"back from a copy to go on. To begin anew, name another folder with --out, or delete '{folder}', whose "
        f"{CHUNK_ADAPTER}/ has what was learnt before."
    )


def require_place(path: Path) -> None:
    """Raise InputError unless an adapter can be written to a folder: a new one, or one that `ragfuse adapt` began.

    Args:
        path: The folder; it is not made.
    """
    began = (path / WORK_FOLDER / RECIPE_FILE).is_file()
    there = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not there.is_dir():
        found = f"a file at '{there}'"
    elif not os.access(there, os.W_OK | os.X_OK):
        found = f"'{path}', where nothing can be written to '{there}'"
    elif there == path and not began and any(each.name != PARTIAL for each in path.iterdir()):
        found = f"other files at '{path}'"
    else:
        return
    raise InputError(
        f"Wanted a new folder for the adapter or one that `ragfuse adapt` began, found {found}. Name another folder "
        "with --out."
    )


class AdapterFolder:
    """The folder of one adapter.

    Args:
        path: The folder, which is made if it is not there.
        recipe: What is trained.
        shipped: What the folder says of itself once an adapter is in it.

    Raises:
        InputError: The folder has files of something else, or of another recipe.
    """

    def __init__(self, path: Path, recipe: AdaptRecipe, shipped: ShippedProfile) -> None:
        self.path, self.work, self.shipped = path, path / WORK_FOLDER, shipped
        require_place(path)
        file = self.work / RECIPE_FILE
        if file.is_file():
            self._require_same(file, recipe)
        self.tidy()
        make_own_folder(self.work)
        if not file.is_file():
            self._write(file, json.dumps(asdict(recipe), indent=1) + "\n")

    @staticmethod
    def _require_same(file: Path, recipe: AdaptRecipe) -> None:
        try:
            found = json.loads(file.read_bytes())
            if not isinstance(found, dict):
                raise TypeError("no JSON object")
        except (OSError, ValueError, TypeError) as error:
            raise damaged(file, error) from error
        wanted = asdict(recipe)
        names = {"model": "model", "documents": "documents", "filler_tokens": "filler_tokens", "rank": "--rank"}
        other = next((name for name in wanted if found.get(name) != wanted[name]), None)
        if other is not None:
            raise InputError(
                f"'{file.parent.parent}' has an adapter that was trained with other {names.get(other, other)}: wanted "
                f"{wanted[other]}, found {found.get(other)}. Give the same again to go on, or name another folder with "
                "--out."
            )

    @property
    def answers(self) -> Path:
        """The file of the teacher's answers."""
        return self.work / ANSWERS_FILE

    @property
    def state_file(self) -> Path:
        """The file of the training's state and its tensors."""
        return self.work / STATE_FILE

    @property
    def log(self) -> Path:
        """The file with a line for each step."""
        return self.work / LOG_FILE

    def tidy(self) -> None:
        """Remove what a killed process was writing."""
        shutil.rmtree(self.path / PARTIAL, ignore_errors=True)
        for file in self.work.glob(".*"):
            file.unlink(missing_ok=True)

    def save(self, state: TrainingState, tensors: Mapping[str, Tensor]) -> None:
        """Write a training's state and its tensors at once."""
        partial = self.work / f".{STATE_FILE}"
        named = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(named, partial, metadata={"state": json.dumps(asdict(state))})
        os.replace(partial, self.state_file)

    def load(self) -> tuple[TrainingState, dict[str, Tensor]] | None:
        """Return what `save` wrote; None where there is nothing.

        Raises:
            InputError: What is there cannot be read.
        """
        try:
            with safe_open(self.state_file, framework="pt") as file:
                state = TypeAdapter(TrainingState).validate_json(file.metadata()["state"])
                return state, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise damaged(self.state_file, error) from error

    def put(self, write: Callable[[Path], object]) -> None:
        """Have `write(folder)` write an adapter into a folder of its own, then put its files into this one."""
        partial = self.path / PARTIAL
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        write(partial)
        write_shipped(self.path, self.shipped)
        target = self.path / CHUNK_ADAPTER
        target.mkdir(exist_ok=True)
        for file in sorted(partial.iterdir()):
            os.replace(file, target / file.name)
        partial.rmdir()

    @staticmethod
    def _write(file: Path, text: str) -> None:
        partial = file.with_name(f".{file.name}")
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, file)


def moments_of(optimizer: torch.optim.Optimizer, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the optimizer's state of each weight as named tensors."""
    found = {}
    for name, weight in weights.items():
        for part, value in optimizer.state.get(weight, {}).items():
            found[f"{part}.{name}"] = value if isinstance(value, Tensor) else torch.tensor(float(value))
    return found


def restore_moments(
    optimizer: torch.optim.Optimizer, weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> None:
    """Give an optimizer the state that `moments_of` returned; weights without a gradient have none."""
    for name, weight in weights.items():
        if f"step.{name}" not in tensors:
            continue
        parts = {part: tensors[f"{part}.{name}"] for part in ("step", "exp_avg", "exp_avg_sq")}
        optimizer.state[weight] = {
            part: value.clone() if part == "step" else value.to(weight.device) for part, value in parts.items()
        }
