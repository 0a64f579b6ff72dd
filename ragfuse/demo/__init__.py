"""The demo's documents, its questions with known answers, and how an answer is scored.

Data and tiny loaders. Nothing here loads a model, cuts a document or asks anything: `ragfuse demo` does.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from ragfuse.calibration.prompts import ASKED


def corpus_path() -> Path:
    """Folder of the articles, one Markdown file each; licence and origin stand in each file and in ATTRIBUTION.md."""
    return Path(str(files(__name__))) / "corpus"


def questions() -> dict[str, Any]:
    """Return the demo's questions: `template`, `chosen_how`, `questions`, and one `long` question.

    Each question is {id, question, answers, article}. questions.json names them; they come from ragfuse's own set
    (`ragfuse bench quality --data demo`).
    """
    said: dict[str, Any] = json.loads((files(__name__) / "questions.json").read_text(encoding="utf-8"))
    own = json.loads((files("ragfuse") / "demo" / "all_questions.json").read_text(encoding="utf-8"))
    known = {row["id"]: {**row, "article": row["support"][0]["article"]} for row in own["questions"]}
    said["template"]["human"] = "{context}".join(ASKED["answer"])
    return {**said, "questions": [known[name] for name in said["questions"]], "long": known[said["long"]]}
