"""The folder of an adapter that is being trained: what it was started with, and where the training
stands.

The adapter itself lies in `chunk_adapter/`, in PEFT's form, so that it can be used at any time; one
file, written at once, has all that going on needs.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ragfuse.errors import InputError
from ragfuse.hf.chunk_adapter import ADAPTER_WEIGHTS
from ragfuse.hf.lora import LoraAdapter
from ragfuse.models.adapters import CHUNK_ADAPTER
from ragfuse.models.shipped_profile import ShippedProfile, write_shipped
from ragfuse.process.folders import can_be_written, make_own_folder

TRAINING_FILE = "training.safetensors"
PARTIAL = ".partial"


@dataclass(frozen=True)
class AdaptRecipe:
    """What decides the weights that come out, other than how long is trained.

    Args:
        model: Fingerprint of the plain model.
        documents: Digest of all chunks.
        filler_tokens: Tokens of filler text that chunks are encoded behind.
        rank: Rank of the adapter.
        seed: Seed of all random choices.
    """

    model: str
    documents: str
    filler_tokens: int
    rank: int
    seed: int


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
        answers: The teacher's answers by the name of their example.
        finished: Why the training ended; "" while it goes on.
    """

    step: int = 0
    seconds: float = 0.0
    evaluations: list[Evaluation] = field(default_factory=list)
    answers: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)
    finished: str = ""

    @property
    def best(self) -> Evaluation:
        """The measurement with the lowest KL."""
        return min(self.evaluations, key=lambda each: each.kl)


def require_place(path: Path) -> None:
    """Raise InputError unless an adapter can be written to a folder: a new one, or one that
    `ragfuse adapt` began.

    Args:
        path: The folder; it is not made.
    """
    if path.is_dir() and any(path.iterdir()) and not (path / TRAINING_FILE).is_file():
        found = "other files in it"
    elif any(place.is_file() for place in (path, *path.parents)):
        found = "a file there"
    elif not can_be_written(path):
        found = "one that cannot be written to"
    else:
        return
    raise InputError(
        f"Wanted a new folder for the adapter or one that `ragfuse adapt` began, found {found}:"
        f" '{path}'. Name another folder with --out."
    )


class AdapterFolder:
    """The folder of one adapter.

    Args:
        path: The folder, which is made when something is saved.
        recipe: What is trained.

    Raises:
        InputError: The folder has files of something else.
    """

    def __init__(self, path: Path, recipe: AdaptRecipe) -> None:
        require_place(path)
        self.path = path
        self.recipe = recipe

    @property
    def has_adapter(self) -> bool:
        """Whether an adapter was put into it."""
        return (self.path / CHUNK_ADAPTER / ADAPTER_WEIGHTS).is_file()

    def load(self) -> tuple[TrainingState, dict[str, Tensor]]:
        """Return what `save` wrote; a new state and no tensors where there is nothing.

        Raises:
            InputError: What is there cannot be read, or is the training of another recipe.
        """
        file = self.path / TRAINING_FILE
        try:
            with safe_open(file, framework="pt") as kept:
                said = kept.metadata()
                tensors = {name: kept.get_tensor(name) for name in kept.keys()}  # noqa: SIM118
        except FileNotFoundError:
            return TrainingState(), {}
        except (OSError, SafetensorError) as error:
            raise InputError(
                f"Wanted the training that `ragfuse adapt` began in '{self.path}', found '{file}'"
                " damaged. Put the file back from a copy to go on. To begin anew, name another"
                f" folder with --out, or delete '{self.path}', whose {CHUNK_ADAPTER}/ has what was"
                " learnt before."
            ) from error
        wanted = asdict(self.recipe)
        recipe = json.loads(said["recipe"])
        other = [name for name in wanted if wanted[name] != recipe[name]]
        if other:
            raise InputError(
                f"'{self.path}' has an adapter that was trained with another {' and '.join(other)}."
                " Give the same again to go on, or name another folder with --out."
            )
        return TypeAdapter(TrainingState).validate_json(said["state"]), tensors

    def save(self, state: TrainingState, tensors: Mapping[str, Tensor]) -> None:
        """Write a training's state and its tensors at once."""
        make_own_folder(self.path)
        partial = self.path / f".{TRAINING_FILE}"
        said = {"state": json.dumps(asdict(state)), "recipe": json.dumps(asdict(self.recipe))}
        save_file({name: tensor.cpu() for name, tensor in tensors.items()}, partial, said)
        os.replace(partial, self.path / TRAINING_FILE)

    def put(self, adapter: LoraAdapter) -> None:
        """Write the adapter so that each of its files is the old one or the new one at any time."""
        partial = self.path / PARTIAL
        target = self.path / CHUNK_ADAPTER
        shutil.rmtree(partial, ignore_errors=True)
        adapter.save(partial)
        write_shipped(self.path, ShippedProfile(self.recipe.filler_tokens))
        target.mkdir(exist_ok=True)
        for file in partial.iterdir():
            os.replace(file, target / file.name)
        partial.rmdir()
