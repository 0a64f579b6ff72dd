"""How the benchmarks' prompts are worded: the same for every method, and what the reader was trained on most."""

from types import MappingProxyType

ASKED = MappingProxyType(
    {
        "answer": (
            "Use the following passages to answer the question at the end in a few words.\n\n",
            "\n\nQuestion: {question}\nAnswer:",
        ),
        "summary": (
            "Here are several passages.\n\n",
            "\n\n{question}Write a summary of all of them in one paragraph.",
        ),
    }
)
"""What stands before the chunks and behind them, by task."""
NEW_TOKENS = MappingProxyType({"answer": 24, "summary": 128})
"""Most tokens of an answer, by task."""
