"""The demo's documents, and questions with known answers."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from ragfuse.calibration.case import PROMPT_TEXTS


def corpus_path() -> Path:
    """Return the folder of the Markdown articles. ATTRIBUTION.md there has the licence."""
    return Path(str(files(__name__))) / "corpus"


def questions() -> dict[str, Any]:
    """Return the demo's questions, as a dict.

    The keys are `template` (the prompt's texts), `questions`, `chosen_how` (how they were chosen)
    and `long` (the question of the long prompt).

    Each question has id, question, answers and article. The questions are a subset of ragfuse's own
    question set (`ragfuse bench quality --data demo`).
    """
    folder = files(__name__)
    data: dict[str, Any] = json.loads((folder / "questions.json").read_text(encoding="utf-8"))
    known = json.loads((folder / "all_questions.json").read_text(encoding="utf-8"))["questions"]
    by_id = {each["id"]: {**each, "article": each["support"][0]["article"]} for each in known}
    data["template"]["human"] = "{context}".join(PROMPT_TEXTS["answer"])
    return {
        **data,
        "questions": [by_id[name] for name in data["questions"]],
        "long": by_id[data["long"]],
    }
