"""Two ways of answering over many chunks without one long prompt: LangChain's own MapReduce and MapRerank chains.

Both are what they are in `langchain-classic`; ours is only the wording of their prompts. Every call is the model's full
prefill. The clock of the first token stops when the last call says its first: all chunks were read before.
"""

from __future__ import annotations

import re
import time
import warnings
from typing import Any

from ragfuse.calibration.case import Case
from ragfuse.calibration.comparison import ChainAnswer
from ragfuse.calibration.prompts import PROMPT_TEXTS
from ragfuse.engine.engine import Engine

SUMMARY_TOKENS = 48
SCORE_TOKENS = 8
"""For "Score: 90" behind an answer."""
MAP = "Here is a passage.\n\n{text}\n\nSummarise what it says about this question in one or two sentences: {question}"
REDUCE = "{text}".join(PROMPT_TEXTS["answer"])
RERANK = (
    "Use the following passage to answer the question at the end in a few words. Then write 'Score:' and a number from "
    "0 to 100 that says how sure you are.\n\n{text}\n\nQuestion: {question}\nAnswer:"
)


def run_chain(name: str, engine: Engine, case: Case, max_tokens: int) -> ChainAnswer:
    """The case's answer by one of `CHAINS`."""
    import langchain_classic  # noqa: F401  (shows its warnings from here on, so it comes before we stop them)
    from langchain_core.callbacks import BaseCallbackHandler
    from langchain_core.documents import Document
    from langchain_ragfuse import ChatRagFuse

    class Clock(BaseCallbackHandler):
        """Reads the clocks at the first token of each call; the last reading stays. Calls may begin together."""

        def __init__(self) -> None:
            self.heard: set[Any] = set()
            self.first = 0.0, 0.0

        def on_llm_new_token(self, *given: Any, run_id: Any, **named: Any) -> None:
            """The first of each call counts."""
            if run_id not in self.heard:
                self.heard.add(run_id)
                self.first = time.process_time(), time.perf_counter()

    clock = Clock()
    reads = ChatRagFuse(engine=engine, reuse=False, max_tokens=SUMMARY_TOKENS, streaming=True, callbacks=[clock])
    most = max_tokens + (SCORE_TOKENS if name == "maprerank" else 0)
    says = ChatRagFuse(engine=engine, reuse=False, max_tokens=most, streaming=True, callbacks=[clock])
    documents = [Document(page_content=chunk) for chunk in case.chunks]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # langchain-classic says that it is old
        chain = _map_reduce(reads, says) if name == "mapreduce" else _map_rerank(says)
        cpu, wall = time.process_time(), time.perf_counter()
        said = chain.invoke({"input_documents": documents, "question": case.question})["output_text"]
    first_cpu, first_wall = clock.first if clock.heard else (time.process_time(), time.perf_counter())
    return ChainAnswer(str(said).strip(), first_cpu - cpu, first_wall - wall)


def _chain(llm: Any, template: str, parser: Any = None) -> Any:
    from langchain_classic.chains.llm import LLMChain
    from langchain_core.prompts import ChatPromptTemplate

    prompt = ChatPromptTemplate.from_messages([("human", template)])
    return LLMChain(llm=llm, prompt=prompt, **({"output_parser": parser} if parser else {}))


def _map_reduce(reads: Any, says: Any) -> Any:
    from langchain_classic.chains.combine_documents.map_reduce import MapReduceDocumentsChain
    from langchain_classic.chains.combine_documents.reduce import ReduceDocumentsChain
    from langchain_classic.chains.combine_documents.stuff import StuffDocumentsChain

    stuff = StuffDocumentsChain(llm_chain=_chain(says, REDUCE), document_variable_name="text")
    reduce = ReduceDocumentsChain(combine_documents_chain=stuff)
    return MapReduceDocumentsChain(
        llm_chain=_chain(reads, MAP), reduce_documents_chain=reduce, document_variable_name="text"
    )


def _map_rerank(says: Any) -> Any:
    from langchain_classic.chains.combine_documents.map_rerank import MapRerankDocumentsChain
    from langchain_classic.output_parsers.regex import RegexParser

    class Scored(RegexParser):
        """An answer and its score; 0 where the model gave none, which the chain itself would stumble over."""

        def parse(self, text: str) -> dict[str, str]:
            """Split at 'Score:'."""
            answer, _, rest = text.partition("Score:")
            found = re.search(self.regex, rest)
            return {"answer": answer.strip(), "score": found[0] if found else "0"}

    with_parser = _chain(says, RERANK)
    with_parser.prompt.output_parser = Scored(regex=r"\d+", output_keys=["answer", "score"])
    return MapRerankDocumentsChain(
        llm_chain=with_parser, document_variable_name="text", rank_key="score", answer_key="answer"
    )
