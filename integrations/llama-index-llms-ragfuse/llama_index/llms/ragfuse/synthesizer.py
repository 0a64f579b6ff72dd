"""A response synthesizer that puts as many whole nodes into each prompt as fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index.core.prompts.prompt_utils import get_biggest_prompt
from llama_index.core.response_synthesizers import CompactAndRefine
from llama_index.llms.ragfuse.base import RagFuseLLM

from ragfuse.adapters import engine_of
from ragfuse.types.arguments import checks_arguments

TEMPLATE_TOKENS = 64
"""Number of tokens reserved for the chat template's text around messages."""


@checks_arguments
class RagFuseSynthesizer(CompactAndRefine):
    """LlamaIndex's `compact` response mode, without splitting a node that fits into a prompt.

    The KV of an unsplit node can be reused as a whole.

    Args:
        llm: The LLM that answers, or a structured LLM over a `RagFuseLLM`.
        separator: Text between nodes.
        **options: Options of `CompactAndRefine`, such as `streaming` and `output_cls`.
    """

    def __init__(
        self, llm: RagFuseLLM | StructuredLLM, separator: str = "\n\n", **options: Any
    ) -> None:
        if isinstance(llm, StructuredLLM):
            options = {"output_cls": llm.output_cls, **options}
            llm = llm.llm
        tokens = engine_of(llm).tokens
        helper = PromptHelper.from_llm_metadata(llm.metadata, tokenizer=tokens)
        super().__init__(llm=llm, prompt_helper=helper, **options)
        self._separator = separator

    def _make_compact_text_chunks(self, query_str: str, text_chunks: Sequence[str]) -> list[str]:
        """Join texts into contexts, each with as many texts as fit into a prompt.

        Each prompt also needs space for the template, the earlier answer to refine, and the new
        answer.
        """
        templates = [
            each.partial_format(query_str=query_str)
            for each in (self._text_qa_template, self._refine_template)
        ]
        splitter = self._prompt_helper.get_text_splitter_given_prompt(
            get_biggest_prompt(templates),
            num_chunks=1,
            padding=self._llm.metadata.num_output + TEMPLATE_TOKENS,
            llm=self._llm,
        )
        count = lambda text: len(engine_of(self._llm).tokens(text))  # noqa: E731
        contexts: list[str] = []
        for text in filter(None, map(str.strip, text_chunks)):
            for part in [text] if count(text) <= splitter.chunk_size else splitter.split_text(text):
                longer = f"{contexts[-1]}{self._separator}{part}" if contexts else part
                if contexts and count(longer) <= splitter.chunk_size:
                    contexts[-1] = longer
                else:
                    contexts.append(part)
        return contexts
