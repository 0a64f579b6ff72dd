"""Five requests whose first line changes, as one with a clock: all but that line and the question
is found.
"""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnablePassthrough
from langchain_ragfuse import ChatRagFuse

from ragfuse import Engine

AREAS = (
    "prices",
    "opening hours",
    "lost parcels",
    "refunds",
    "the ferry",
    "guided tours",
    "the museum",
)
INSTRUCTIONS = "\n".join(
    f"{at}. When a visitor asks about {area}, answer in one or two short sentences of plain"
    f" English. Name the document that the answer comes from. If no document speaks of {area}, say"
    " so and give the number of the desk. Never guess, never repeat the question, and keep `names`"
    " and [numbers] as the documents write them."
    for at, area in enumerate(AREAS, 1)
)
PLACES = ("lighthouse", "harbour office", "rope walk")
DOCUMENTS = [
    Document(
        f"The {place} of Port Elling was built in {1820 + 9 * at} from grey stone that ships"
        f" brought as ballast. Its keeper lives beside the {place} with {at + 2} dogs, opens its"
        f" door at {at + 8} in the morning, and shows visitors the old maps of the coast, the bell"
        " that called the boats in fog, and a book of all storms since the first winter. In summer"
        " a band plays there on Sundays, and the mayor pays for the lemonade.",
        metadata={"source": place},
    )
    for at, place in enumerate(PLACES)
]
QUESTIONS = (
    "Who lives there?",
    "When does it open?",
    "What is shown?",
    "Who pays?",
    "What is it built from?",
)


class Retriever(BaseRetriever):
    """Returns all documents."""

    def _get_relevant_documents(self, query: str, **_: Any) -> list[Document]:
        return DOCUMENTS


def by_a_retriever(engine: Engine, stamp: str, question: str) -> Any:
    """Return the trace of a request of a plain chain with a retriever."""
    llm = ChatRagFuse(engine=engine, max_tokens=1)
    prompt = ChatPromptTemplate.from_messages(
        [("system", "cch={stamp};\n" + INSTRUCTIONS), ("human", "{context}\n\n{question}")]
    )
    joined = Retriever() | (lambda found: "\n\n".join(each.page_content for each in found))
    given = {"context": joined, "question": RunnablePassthrough(), "stamp": lambda _: stamp}
    message = (given | prompt | llm).invoke(question)
    return message.response_metadata["ragfuse"]


@pytest.mark.embedded
def test_from_the_third_request_on_most_of_it_is_found(real_engine: Engine) -> None:
    shares = []
    for at, question in enumerate(QUESTIONS):
        trace = by_a_retriever(real_engine, f"{7919 * (at + 3):x}", question)
        real_engine.flush()
        shares.append((trace["tokens_reused"] + trace["tokens_recomputed"]) / trace["tokens"])
    assert len(real_engine.model.tokens(INSTRUCTIONS)) >= 500
    assert min(shares[2:]) >= 0.85, shares
