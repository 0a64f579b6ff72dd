"""`python -m benchmarks.imports`: how long importing each package takes in a fresh interpreter, and what it loads.

The interpreter's own start is not counted; the median of several, files warm. Whether anything heavy is loaded is a
test; how long it takes is measured here, because a busy machine is no bug.
"""

from __future__ import annotations

import json
import subprocess
import sys
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

STATEMENTS = (
    "import ragfuse",
    "import langchain_ragfuse",
    "import llama_index.llms.ragfuse",
    "import haystack_integrations.components.generators.ragfuse",
    "from ragfuse import Settings",
    "from ragfuse import Engine",
    "from langchain_ragfuse import ChatRagFuse",
    "from llama_index.llms.ragfuse import RagFuseLLM",
)
HEAVY = ("torch", "transformers", "langchain_core", "llama_index.core", "haystack")
TIMES = 5

MEASURE = """
import json, sys, time
before, start = len(sys.modules), time.perf_counter()
{statement}
seconds = time.perf_counter() - start
heavy = [name for name in {heavy!r} if name in sys.modules]
print(json.dumps({{"seconds": seconds, "modules": len(sys.modules) - before, "heavy": heavy}}))
"""


def measure(statement: str, times: int = TIMES) -> dict[str, Any]:
    """Seconds (median), modules and heavy packages of one statement, each time in an interpreter of its own."""
    code = MEASURE.format(statement=statement, heavy=HEAVY)
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(times)
    ]
    found = [json.loads(run.stdout.splitlines()[-1]) for run in runs]
    return {**found[-1], "statement": statement, "seconds": median(each["seconds"] for each in found)}


def main() -> None:
    """All statements as a table."""
    table = Table(title=f"Imports in a fresh interpreter (median of {TIMES})")
    for column in ("statement", "seconds", "modules", "heavy among them"):
        table.add_column(column, justify="left" if column in ("statement", "heavy among them") else "right")
    for statement in STATEMENTS:
        found = measure(statement)
        table.add_row(statement, f"{found['seconds']:.3f}", str(found["modules"]), ", ".join(found["heavy"]) or "-")
    Console().print(table)


if __name__ == "__main__":
    main()
