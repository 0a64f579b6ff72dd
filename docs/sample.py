"""The README's sample of `make demo`, made from a run's report: `python -m docs.sample
demo-report.json`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ragfuse.demo.show import question_text

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- made: python -m docs.sample -->\n```text\n", "```\n"


def sample(answer: Mapping[str, Any]) -> str:
    """What the demo prints of a question of its report."""
    return question_text(answer) + "\n"


def shown(readme: str) -> str:
    """The sample that the README shows."""
    return readme.partition(BEGIN)[2].partition(END)[0]


def with_sample(readme: str, text: str) -> str:
    """The README with another sample."""
    found = re.escape(BEGIN) + ".*?" + re.escape(END)
    return re.sub(found, lambda _: f"{BEGIN}{text}{END}", readme, count=1, flags=re.DOTALL)


if __name__ == "__main__":
    report = json.loads(
        Path(sys.argv[1] if len(sys.argv) > 1 else "demo-report.json").read_text(encoding="utf-8")
    )
    README.write_text(
        with_sample(README.read_text(encoding="utf-8"), sample(report["questions"][0])),
        encoding="utf-8",
    )
    print(f"Written: the sample in {README.name}")
