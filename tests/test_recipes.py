"""The recipes of CONTRIBUTING.md, followed in a copy of the package: one new file and one registry
line each.

Each variant is a toy. One program then goes through planning, fusing and explaining with all of
them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ragfuse import Settings
from tests.contracts.store.test_contract import toy_code

ROOT = Path(__file__).parents[1]

POLICY = '''"""Every second token of each chunk."""

from dataclasses import dataclass

from torch import Tensor

from ragfuse.fuse.select.policy import Candidates, Policy


@dataclass(frozen=True, kw_only=True)
class EverySecond(Policy):
    """Half of the rows, whatever is asked for."""

    name: str = "every-second"
    fixed_share: float | None = 0.5

    def choose(self, candidates: Candidates, layer: int, active: Tensor, deviation: Tensor | None) -> Tensor:
        """Rows at even places of their chunks; all of them at ratio 1."""
        return active if layer or candidates.ratio >= 1 else active[candidates.offset % 2 == 0]
'''

EVICTION = '''"""The largest first."""

from ragfuse.plan.evict import EvictionItem


def by_size(item: EvictionItem, place: float | None) -> tuple[int, float]:
    """The most bytes first."""
    return 0, -float(item.nbytes)
'''

PROGRAM = """
import json, sys
from ragfuse import Ask, Engine, Settings
from ragfuse.plan.explanation import in_words
from tests.kits.tiny import CHUNKS, ingest, messages

settings = Settings(
    model=sys.argv[2], dtype="float32", store=sys.argv[1] + "/store", min_chunk_tokens=8, memory_bytes=0, tiers=("toy://a",),
    levels={"disk": ["cg0"], "toy": ["cg0"]}, evict="by-size", home=sys.argv[1] + "/home", placement="all",
)
question = messages()
with Engine(settings) as engine:
    ingest(engine)
    engine.flush()
    plan = engine.plan(question, Ask(policy="every-second"))
    answer = engine.answer(question, Ask(policy="every-second", max_tokens=4))
    print(json.dumps({
        "words": in_words(plan),
        "policy": answer.trace.policy,
        "mean_ratio": answer.trace.mean_ratio,
        "levels": sorted({segment.level for segment in answer.trace.segments if segment.hit}),
        "tiers": sorted({entry.tier for entry in engine.store.entries()}),
        "recomputed": answer.trace.tokens_recomputed,
    }))
"""


def _insert(path: Path, before: str, line: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(before) == 1, f"{path} has {text.count(before)} times {before!r}"
    path.write_text(text.replace(before, line + before), encoding="utf-8")


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package in which each recipe was followed."""
    folder = tmp_path_factory.mktemp("recipes")
    ignored = shutil.ignore_patterns("__pycache__", "*.safetensors")
    shutil.copytree(ROOT / "ragfuse", folder / "ragfuse", ignore=ignored)
    (folder / "ragfuse/fuse/select/every_second.py").write_text(POLICY, encoding="utf-8")
    policies = folder / "ragfuse/fuse/select/__init__.py"
    _insert(
        policies, "POLICIES = (\n", "from ragfuse.fuse.select.every_second import EverySecond\n\n"
    )
    _insert(policies, '    Policy(name="full"', "    EverySecond(),\n")
    _insert(folder / "ragfuse/types/choices.py", '    "full",\n', '    "every-second",\n')
    _insert(
        folder / "ragfuse/types/choices.py",
        '    CodecLevel("cg1"',
        '    CodecLevel("cg0", "cachegen", width=0.3),\n',
    )
    (folder / "ragfuse/store/toy.py").write_text(toy_code(), encoding="utf-8")
    line = '    TierKind("toy", ("toy",), "ragfuse.store.toy:ToyTier"),\n'
    _insert(folder / "ragfuse/types/choices.py", '    TierKind("objects"', line)
    (folder / "ragfuse/plan/evict_by_size.py").write_text(EVICTION, encoding="utf-8")
    line = '        "by-size": "ragfuse.plan.evict_by_size:by_size",\n'
    _insert(folder / "ragfuse/types/choices.py", '        "look-ahead"', line)
    return folder


def test_one_new_file_and_one_line_each_go_through_planning_fusing_and_explaining(
    followed: Path, tiny_settings: Settings
) -> None:
    path = os.pathsep.join([str(followed), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(followed), str(tiny_settings.model)],
        capture_output=True,
        text=True,
        cwd=followed,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["policy"] == "every-second"
    assert found["mean_ratio"] == pytest.approx(0.5, abs=0.05)
    assert found["recomputed"] > 0
    assert found["levels"] == ["cg0"]
    assert found["tiers"] == ["disk", "toy"]
    assert " as cg0" in found["words"]
