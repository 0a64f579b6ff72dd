"""The prompt texts of calibration and benchmarks: the same for all methods, and those the reader
was trained on.
"""

from types import MappingProxyType

PROMPT_TEXTS = MappingProxyType(
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
"""By task: the text before the chunks, and the text after them."""
NEW_TOKENS = MappingProxyType({"answer": 24, "summary": 128})
"""Most tokens of an answer, by task."""
