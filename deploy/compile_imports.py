"""Import what commands, chains and tests import, once, so that Python writes its compiled form.

pip compiles nothing of what `make venv` installs: of 60,000 files a fifth is ever imported. Where
PYTHONDONTWRITEBYTECODE is set, as in many containers, every later command would compile those anew:
13 s each time.
"""

from __future__ import annotations

import importlib
import sys

MODULES = (
    "ragfuse.cli",
    "ragfuse.cli.library",
    "ragfuse.cli.engine",
    "ragfuse.demo.run",
    "ragfuse.serve.run",
    "ragfuse.serve.server",
    "langchain_ragfuse",
    "langchain_community.vectorstores.faiss",
    "langchain_classic.chains",
    "langchain_huggingface",
    "llama_index.core",
    "llama_index.embeddings.huggingface",
    "llama_index.llms.ragfuse",
    "haystack_integrations.components.generators.ragfuse",
    "transformers.models.llama.modeling_llama",
    "transformers.models.bert.modeling_bert",
    "transformers.modeling_gguf_pytorch_utils",
    "sentence_transformers",
    "sklearn.metrics.pairwise",
    "matplotlib.pyplot",
    "faiss",
    "openai",
    "pytest",
)


def main() -> int:
    """Import all; 1 if one of them cannot be imported, which is named."""
    failed = 0
    for name in MODULES:
        try:
            importlib.import_module(name)
        except ImportError as error:
            print(f"{name}: {error}", file=sys.stderr)
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
