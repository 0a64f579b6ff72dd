"""Programs that ask a model about what their retriever finds, each as its framework's own pages build it.

They are given a model and do not know whose it is: what they are made of says that nothing but the model changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

TOP = 6
"""Passages that are retrieved for a question."""
Program = Callable[[str], str]
"""A question in, its answer out."""
Wording = tuple[str, str]
"""What stands before the passages and behind them; the question is {question}."""


def passages_by(texts: Sequence[str], embeddings: Any) -> Any:
    """A LangChain retriever over these texts, in FAISS."""
    from langchain_community.vectorstores import FAISS
    from langchain_core.documents import Document

    documents = [Document(text, metadata={"source": f"passage {n}"}) for n, text in enumerate(texts, 1)]
    return FAISS.from_documents(documents, embeddings).as_retriever(search_kwargs={"k": TOP})


def nodes_of(texts: Sequence[str]) -> list[Any]:
    """The texts as LlamaIndex's nodes."""
    from llama_index.core.schema import TextNode

    return [TextNode(text=text, id_=f"passage-{n}") for n, text in enumerate(texts, 1)]


# LangChain


def retrieval_chain(llm: Any, texts: Sequence[str], embeddings: Any, wording: Wording) -> Program:
    """`create_retrieval_chain` over `create_stuff_documents_chain`."""
    from langchain_classic.chains.combine_documents import create_stuff_documents_chain
    from langchain_classic.chains.retrieval import create_retrieval_chain
    from langchain_core.prompts import ChatPromptTemplate

    template = wording[0] + "{context}" + wording[1].replace("{question}", "{input}")
    answering = create_stuff_documents_chain(llm, ChatPromptTemplate.from_template(template))
    chain = create_retrieval_chain(passages_by(texts, embeddings), answering)
    return lambda question: str(chain.invoke({"input": question})["answer"])


def lcel_chain(llm: Any, texts: Sequence[str], embeddings: Any, wording: Wording) -> Program:
    """A chain of runnables, whose function joins the documents."""
    from langchain_core.output_parsers import StrOutputParser
    from langchain_core.prompts import ChatPromptTemplate
    from langchain_core.runnables import RunnablePassthrough

    def join(documents: Sequence[Any]) -> str:
        return "\n\n".join(document.page_content for document in documents)

    retriever = passages_by(texts, embeddings)
    prompt = ChatPromptTemplate.from_template("{context}".join(wording))
    chain: Any = {"context": retriever | join, "question": RunnablePassthrough()} | prompt | llm | StrOutputParser()
    return lambda question: str(chain.invoke(question))


def agent_step(llm: Any, texts: Sequence[str], embeddings: Any, wording: Wording) -> Program:
    """A tool that retrieves, called with the question, and the model that answers over what it said.

    The call is written here: a small model does not decide by itself that it wants to search.
    """
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
    from langchain_core.tools.retriever import create_retriever_tool

    search = create_retriever_tool(passages_by(texts, embeddings), "search", "Find passages about a question.")
    model = llm.bind_tools([search], tool_choice="none")

    def ask(question: str) -> str:
        call = {"name": "search", "args": {"query": question}, "id": f"call_{uuid4().hex}", "type": "tool_call"}
        asked: list[Any] = [SystemMessage(wording[0].strip()), HumanMessage(question)]
        asked += [AIMessage("", tool_calls=[call]), search.invoke(call)]
        return str(model.invoke(asked).content)

    return ask


# LlamaIndex


def _index(texts: Sequence[str], embeddings: Any) -> Any:
    from llama_index.core import VectorStoreIndex

    return VectorStoreIndex(nodes_of(texts), embed_model=embeddings)


def _template(wording: Wording) -> Any:
    from llama_index.core import PromptTemplate

    return PromptTemplate(wording[0] + "{context_str}" + wording[1].replace("{question}", "{query_str}"))


def compact(llm: Any, texts: Sequence[str], embeddings: Any, wording: Wording) -> Program:
    """A query engine that packs what it found into one prompt."""
    engine = _index(texts, embeddings).as_query_engine(
        llm=llm, response_mode="compact", similarity_top_k=TOP, text_qa_template=_template(wording)
    )
    return lambda question: str(engine.query(question))


def refine(llm: Any, texts: Sequence[str], embeddings: Any, wording: Wording) -> Program:
    """A query engine with a prompt for each node: an answer, which the next one refines in LlamaIndex's own words."""
    engine = _index(texts, embeddings).as_query_engine(
        llm=llm, response_mode="refine", similarity_top_k=TOP, text_qa_template=_template(wording)
    )
    return lambda question: str(engine.query(question))


def tree_summarize(llm: Any, texts: Sequence[str], embeddings: Any, wording: Wording) -> Program:
    """A query engine that answers over as many nodes as fit, and again over these answers."""
    engine = _index(texts, embeddings).as_query_engine(
        llm=llm, response_mode="tree_summarize", similarity_top_k=TOP, summary_template=_template(wording)
    )
    return lambda question: str(engine.query(question))


def chat_engine(llm: Any, texts: Sequence[str], embeddings: Any, wording: Wording) -> Program:
    """A chat engine that puts what it found into the system's message, in LlamaIndex's own words; a new chat each."""
    engine = _index(texts, embeddings).as_chat_engine(chat_mode="context", llm=llm, similarity_top_k=TOP)

    def ask(question: str) -> str:
        engine.reset()
        return str(engine.chat(question))

    return ask


# any client of OpenAI's interface


def messages_over(question: str, texts: Sequence[str], wording: Wording) -> list[dict[str, str]]:
    """What a program that knows no framework sends: the instruction, the passages and the question as plain text."""
    said = "\n\n".join(texts) + wording[1].replace("{question}", question)
    return [{"role": "system", "content": wording[0].strip()}, {"role": "user", "content": said}]
