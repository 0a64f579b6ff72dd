"""What importing the packages loads, in fresh interpreters."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

HEAVY = {
    "torch",
    "transformers",
    "numpy",
    "langchain_core",
    "llama_index.core",
    "haystack",
    "sentence_transformers",
    "sqlite3",
}
PACKAGES = {
    "ragfuse": ("Engine", "Settings"),
    "langchain_ragfuse": ("ChatRagFuse", "RagFuseRetriever"),
    "llama_index.llms.ragfuse": ("RagFuseLLM", "KVPrecompute"),
    "haystack_integrations.components.generators.ragfuse": ("RagfuseChatGenerator",),
}


def loaded_by(code: str) -> set[str]:
    """Names of the modules that are there after `code`, in an interpreter of its own."""
    said = subprocess.run(
        [sys.executable, "-c", f"import json, sys\n{code}\nprint(json.dumps(sorted(sys.modules)))"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(json.loads(said.stdout.splitlines()[-1]))


@pytest.mark.parametrize("package", PACKAGES)
def test_importing_a_package_loads_nothing_heavy(package: str) -> None:
    bare, ours = loaded_by("pass"), loaded_by(f"import {package}")
    assert package in ours
    assert not HEAVY & ours
    assert len(ours - bare) < 100, sorted(ours - bare)


def test_settings_and_errors_are_used_without_torch() -> None:
    assert not {"torch", "transformers"} & loaded_by(
        "import ragfuse; ragfuse.Settings(); issubclass(ragfuse.InputError, ragfuse.RagFuseError)"
    )


@pytest.mark.skipif(
    find_spec("torchao") is not None, reason="transformers imports torchao, which prints"
)
def test_importing_an_engine_prints_nothing() -> None:
    code = (
        "from ragfuse import Engine; from langchain_ragfuse import ChatRagFuse; import"
        " transformers.quantizers"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_of_a_package_is_found(package: str) -> None:
    module = __import__(package, fromlist=["__all__"])
    assert set(PACKAGES[package]) <= set(module.__all__) <= set(dir(module))
    assert [name for name in module.__all__ if getattr(module, name, None) is None] == []
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = module.no_such_name
