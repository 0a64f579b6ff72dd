"""Data sets of all shapes become the same kind of case; what is no data set is told with what was
found.
"""

import json
from pathlib import Path
from typing import Any

from ragfuse_bench.quality.cases import Packing, read_cases

from ragfuse.calibration.case import Case


def words(text: str) -> int:
    return len(text.split())


def read(folder: Path, data: Any, lines: bool = False, **packing: int) -> list[Case]:
    path = folder / "set.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in data) if lines else json.dumps(data))
    return read_cases(path, Packing(words, **packing))


def squad() -> dict[str, Any]:
    def paragraph(name: str, index: int) -> dict[str, Any]:
        asked = {
            "id": f"{name}{index}",
            "question": f"Who is {name}{index}?",
            "answers": [{"text": f"{name}{index}"}],
        }
        lost = {
            "id": f"{name}{index}x",
            "question": "Who not?",
            "answers": [],
            "is_impossible": True,
        }
        return {"context": f" {name}{index} stands here. ", "qas": [asked, lost]}

    return {
        "data": [
            {"title": t, "paragraphs": [paragraph(t, i) for i in range(5)]} for t in ("a", "b")
        ]
    }


def test_a_squad_question_stands_over_its_paragraph_and_five_others(tmp_path: Path) -> None:
    cases = read(tmp_path, squad())
    assert len(cases) == 10
    for case in cases:
        assert len(set(case.chunks)) == 6
        assert f"{case.answers[0]} stands here." in case.chunks
    assert len({case.chunks.index(f"{case.answers[0]} stands here.") for case in cases}) > 2


def test_rows_with_ctxs_keep_their_order_under_their_titles(tmp_path: Path) -> None:
    row = {
        "question": "q",
        "answers": ["x"],
        "ctxs": [{"title": "A", "text": "one"}, {"title": "", "text": "two"}],
    }
    (case,) = read(tmp_path, [row], lines=True)
    assert (case.chunks, case.task, case.id) == (("A\none", "two"), "answer", "0")
