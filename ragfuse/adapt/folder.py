"""The folder of an adapter in training. The folder contains the recipe, the trainer's checkpoints,
and the adapter in PEFT's format (in `chunk_adapter/`).
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
"""The file that the trainer writes to a checkpoint after all other files."""
PARTIAL = ".partial"


@dataclass(frozen=True)
class AdaptRecipe:
    """Everything that determines the trained weights, except the duration.

    Args:
        model: Fingerprint of the plain model.
        documents: Digest of all chunks.
        filler_tokens: Number of filler tokens before each chunk.
        rank: Rank of the adapter.
        seed: Seed of all random choices.
    """

    model: str
    documents: str
    filler_tokens: int
    rank: int
    seed: int


def require_place(path: Path) -> None:
    """Raise InputError if `path` is a file, is not writable, or has files but no recipe."""
    is_file = any(place.is_file() for place in (path, *path.parents))
    has_others = path.is_dir() and any(path.iterdir()) and not (path / RECIPE_FILE).is_file()
    if is_file or has_others or not can_be_written(path):
        found = (
            "not a folder" if is_file else "full of other files" if has_others else "not writable"
        )
        raise InputError(
            "--out must be a new folder, or the folder of an earlier `ragfuse adapt` run;"
            f" '{path}' is {found}. Choose another folder."
        )


class AdapterFolder:
    """The folder of one adapter.

    Args:
        path: The folder; `begin` creates it.
        recipe: The recipe of the training.

    Raises:
        InputError: `require_place` rejects `path`, or `path` has an adapter of another recipe.
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
                f"The adapter in '{path}' was trained with other values of {' and '.join(other)}."
                " Use those values to resume, or choose another folder with --out."
            )

    def begin(self) -> None:
        """Create the folder and write the recipe into it."""
        make_own_folder(self.path)
        partial = self.path / f".{RECIPE_FILE}"
        partial.write_text(json.dumps(asdict(self._recipe)))
        os.replace(partial, self.path / RECIPE_FILE)

    def checkpoint(self) -> Path | None:
        """Return the folder of the latest complete checkpoint, or None."""
        whole = [file.parent for file in self.checkpoints.glob(f"*/{STATE_FILE}")]
        return max(whole, key=lambda folder: int(folder.name.partition("-")[2]), default=None)

    def put(self, adapter: LoraAdapter) -> None:
        """Write the adapter. Each of the adapter's files is replaced atomically."""
        partial = self.path / PARTIAL
        target = self.path / CHUNK_ADAPTER
        shutil.rmtree(partial, ignore_errors=True)
        adapter.save(partial)
        write_shipped(self.path, ShippedProfile(self._recipe.filler_tokens))
        target.mkdir(exist_ok=True)
        for file in partial.iterdir():
            os.replace(file, target / file.name)
        partial.rmdir()
