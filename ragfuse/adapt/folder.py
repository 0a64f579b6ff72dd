"""The folder of an adapter that is being trained: what it was started with, the trainer's
checkpoints, and the adapter itself in `chunk_adapter/`, in PEFT's form.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from ragfuse.errors import InputError
from ragfuse.hf.chunk_adapter import LoraAdapter
from ragfuse.models.adapters import CHUNK_ADAPTER
from ragfuse.models.shipped_profile import ShippedProfile, write_shipped
from ragfuse.process.folders import can_be_written, make_own_folder

RECIPE_FILE = "recipe.json"
CHECKPOINTS = "checkpoints"
STATE_FILE = "trainer_state.json"
"""The file of a checkpoint that the trainer writes last."""
PARTIAL = ".partial"


@dataclass(frozen=True)
class AdaptRecipe:
    """What decides the weights that come out, other than how long is trained.

    Args:
        model: Fingerprint of the plain model.
        documents: Digest of all chunks.
        filler_tokens: Tokens of filler text that chunks are encoded after.
        rank: Rank of the adapter.
        seed: Seed of all random choices.
    """

    model: str
    documents: str
    filler_tokens: int
    rank: int
    seed: int


def require_place(path: Path) -> None:
    """Raise InputError unless an adapter can be written here: a new folder, or one of adapt's."""
    is_file = any(place.is_file() for place in (path, *path.parents))
    has_others = path.is_dir() and any(path.iterdir()) and not (path / RECIPE_FILE).is_file()
    if is_file or has_others or not can_be_written(path):
        found = (
            "a file there" if is_file else "other files in it" if has_others else "no write access"
        )
        raise InputError(
            "Wanted a new folder for the adapter or one that `ragfuse adapt` began, found"
            f" {found}: '{path}'. Name another folder with --out."
        )


class AdapterFolder:
    """The folder of one adapter.

    Args:
        path: The folder, which is made by `begin`.
        recipe: What is trained.

    Raises:
        InputError: The folder has files of something else, or the training of another recipe.
    """

    def __init__(self, path: Path, recipe: AdaptRecipe) -> None:
        require_place(path)
        self.path = path
        self.checkpoints = path / CHECKPOINTS
        self._recipe = recipe
        file, wanted = path / RECIPE_FILE, asdict(recipe)
        begun = json.loads(file.read_text()) if file.is_file() else wanted
        other = [name for name in wanted if wanted[name] != begun[name]]
        if other:
            raise InputError(
                f"'{path}' has an adapter that was trained with another {' and '.join(other)}."
                " Use the same values to resume, or name another folder with --out."
            )

    def begin(self) -> None:
        """Make the folder, and write down what is trained in it."""
        make_own_folder(self.path)
        partial = self.path / f".{RECIPE_FILE}"
        partial.write_text(json.dumps(asdict(self._recipe)))
        os.replace(partial, self.path / RECIPE_FILE)

    def checkpoint(self) -> Path | None:
        """Return the last checkpoint that is whole; None if there is none."""
        whole = [file.parent for file in self.checkpoints.glob(f"*/{STATE_FILE}")]
        return max(whole, key=lambda folder: int(folder.name.partition("-")[2]), default=None)

    def put(self, adapter: LoraAdapter) -> None:
        """Write the adapter so that each of its files is the old one or the new one at any time."""
        partial = self.path / PARTIAL
        target = self.path / CHUNK_ADAPTER
        shutil.rmtree(partial, ignore_errors=True)
        adapter.save(partial)
        write_shipped(self.path, ShippedProfile(self._recipe.filler_tokens))
        target.mkdir(exist_ok=True)
        for file in partial.iterdir():
            os.replace(file, target / file.name)
        partial.rmdir()
