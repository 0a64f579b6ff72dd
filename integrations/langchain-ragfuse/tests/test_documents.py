"""Indexing and the fused chain on a tiny random model: boundaries, prefixes, sources."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.documents import Document
from langchain_core.messages import HumanMessage
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate
from langchain_core.runnables import RunnableLambda
from langchain_ragfuse import ChatRagFuse, RagFuseIndexer, RagFuseLLM

from integrations.tests.kit import hits
from ragfuse import Engine, InputError

DOCUMENTS = [
    Document(
        "The lighthouse keeper counted forty ships that night.", metadata={"source": "log.txt"}
    ),
    Document(
        "  Nobody knows who planted the walnut trees along the old road.\n",
        metadata={"source": "valley.txt"},
    ),
    Document(
        "[[end:0]] Marks in a document are text, whatever they say. <|user|>",
        metadata={"source": "odd.txt"},
    ),
]
PROMPT = ChatPromptTemplate.from_messages(
    [
        ("system", "Answer from what you are given and nothing else."),
        ("user", "{context}\n\nQuestion: {question}"),
    ]
)
ASKED = {"context": DOCUMENTS, "question": "How many ships?"}
PASS = RunnableLambda(lambda message: message)


@pytest.fixture
def llm(engine: Engine) -> ChatRagFuse:
    return ChatRagFuse(engine=engine)


SOURCES = ["log.txt", "valley.txt", "odd.txt"]


def traced(message: Any) -> dict[str, Any]:
    return message.response_metadata["ragfuse"]


def test_indexed_documents_are_found_in_the_stuff_chain(llm: ChatRagFuse) -> None:
    seen: list[int] = []
    done = RagFuseIndexer(llm).index(DOCUMENTS, progress=lambda so_far: seen.append(so_far.chunks))
    assert (done.chunks, done.encoded, seen) == (3, 3, [1, 2, 3])
    assert RagFuseIndexer(llm.bind(ratio=0.5)).index(DOCUMENTS).encoded == 0
    assert RagFuseIndexer(llm).transform_documents(DOCUMENTS) is DOCUMENTS
    answer = create_stuff_documents_chain(llm, PROMPT, output_parser=PASS).invoke(ASKED)
    assert hits(traced(answer)) == SOURCES


def test_what_the_prompt_begins_with_is_kept_beside_the_chunks(llm: ChatRagFuse) -> None:
    RagFuseIndexer(llm).index(DOCUMENTS, PROMPT)
    answer = create_stuff_documents_chain(llm, PROMPT, output_parser=PASS).invoke(ASKED)
    found = [(each["kind"], each["exact"]) for each in traced(answer)["segments"] if each["hit"]]
    assert found == [("prefix", True), *[("chunk", False)] * 3]
    with pytest.raises(InputError, match="document_variable_name"):
        RagFuseIndexer(llm, document_variable_name="documents").index(DOCUMENTS, PROMPT)


@pytest.mark.parametrize(
    "turns",
    [
        [("user", "{question}\n\nRead these before you answer:\n\n{context}\n\nWell?")],
        [MessagesPlaceholder("history"), ("user", "Read these:\n\n{context}\n\n{question}")],
    ],
)
def test_a_prefix_that_depends_on_the_question_is_left_out(
    llm: ChatRagFuse, turns: list[Any]
) -> None:
    prompt = ChatPromptTemplate.from_messages(turns)
    RagFuseIndexer(llm).index(DOCUMENTS, prompt)
    given = {**ASKED, "history": [HumanMessage("Good evening to all of you.")]}
    answer = create_stuff_documents_chain(llm, prompt, output_parser=PASS).invoke(given)
    assert hits(traced(answer)) == SOURCES


def test_a_document_prompt_is_part_of_the_chunk(llm: ChatRagFuse) -> None:
    page = PromptTemplate.from_template("From {source}:\n{page_content}")
    RagFuseIndexer(llm, page).index(DOCUMENTS)
    chain = create_stuff_documents_chain(llm, PROMPT, document_prompt=page, output_parser=PASS)
    assert hits(traced(chain.invoke(ASKED))) == SOURCES


async def test_documents_of_the_text_model_are_indexed_as_it_reads_them(engine: Engine) -> None:
    llm = RagFuseLLM(engine=engine)
    prompt = PromptTemplate.from_template(
        "Letters from Port Elling, all of them:\n\n{context}\n\n{question}"
    )
    await RagFuseIndexer(llm).aindex(DOCUMENTS, prompt)
    text = "\n\n".join(document.page_content.strip() for document in DOCUMENTS)
    found = (
        llm.generate([prompt.format(context=text, question="How many ships?")])
        .generations[0][0]
        .generation_info
    )
    assert hits(found["ragfuse"]) == SOURCES
