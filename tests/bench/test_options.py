"""The command line of the benchmarks."""

from __future__ import annotations

import subprocess
import sys


def test_help_of_a_benchmark_needs_no_torch() -> None:
    code = "import sys, ragfuse_bench.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
