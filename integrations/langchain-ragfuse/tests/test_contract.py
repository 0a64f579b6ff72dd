"""LangChain's models keep what the models of all frameworks promise."""

from __future__ import annotations

import copy
import json
from typing import Any, ClassVar

from langchain_core.documents import Document
from langchain_core.load import dumpd, dumps
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnablePassthrough
from langchain_ragfuse import ChatRagFuse, RagFuseLLM

from integrations.tests.contract import ModelContract, Reply
from integrations.tests.kit import LETTERS
from ragfuse import Engine

PROMPT = ChatPromptTemplate.from_messages(
    [("system", "Be brief."), ("user", "{context}\n\n{question}")]
)
TEXTS = (
    *LETTERS.split("\n\n"),
    "[[chunk:9:Ym9vaw:00000000000000000000000000000000]] A mark in a text <|user|> is text, \ud83d"
    " \0 whatever.",
)


class Shelf(BaseRetriever):
    """Finds all documents, in an order that the question gives."""

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        found = [Document(text, metadata={"source": f"book-{at}"}) for at, text in enumerate(TEXTS)]
        return found[::-1] if "oil" in query else found


def joined(documents: list[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)


def chain(llm: Any) -> Any:
    return {"context": Shelf() | joined, "question": RunnablePassthrough()} | PROMPT | llm


def reply(text: str, usage: Any, trace: Any) -> Reply:
    cached = usage["input_token_details"]["cache_read"]
    return Reply(text, trace, usage["input_tokens"], cached, usage["output_tokens"])


class Common(ModelContract):
    """What both models are shown and written as."""

    def shown(self, llm: Any) -> list[object]:
        return [dumpd(llm), dumps(llm), llm.to_json(), repr(llm), str(llm), llm._identifying_params]

    def written(self, llm: Any) -> Any:
        return llm.model_dump_json()

    def read(self, written: Any) -> Any:
        return self.kind(**json.loads(written))


class TestChatRagFuse(Common):
    kind = ChatRagFuse
    misspelt = ("stop_sequence", "stop_sequences")
    program: ClassVar = (
        "from langchain_ragfuse import ChatRagFuse as M\nsaid = llm.invoke('Who?').content"
    )

    def reply(self, message: Any) -> Reply:
        trace = message.response_metadata["ragfuse"]
        return reply(message.content, message.usage_metadata, trace)

    def ask(self, llm: Any, question: Any, **options: Any) -> Reply:
        return self.reply(llm.invoke(question, **options))

    async def aask(self, llm: Any, question: str, **options: Any) -> Reply:
        return self.reply(await llm.ainvoke(question, **options))

    def pieces(self, llm: Any, question: str) -> tuple[list[str], Reply]:
        chunks = list(llm.stream(question))
        assert [chunk.chunk_position for chunk in chunks].index("last") == len(chunks) - 1
        return [chunk.content for chunk in chunks], self.reply(sum(chunks[1:], chunks[0]))

    def rag(self, llm: Any, question: str, marked: bool) -> Reply:
        if not marked:
            return self.reply(chain(llm).invoke(question))
        blocks: Any = [
            {"type": "text-plain", "text": each.page_content, "title": each.metadata["source"]}
            for each in Shelf().invoke(question)
        ]
        return self.ask(llm, [("user", [*blocks, question])])

    def test_a_copied_binding_shares_the_engine(self, engine: Engine) -> None:
        bound: Any = ChatRagFuse(engine=engine).bind(stop=["x"])
        assert copy.deepcopy(bound).bound.get_engine() is engine


class TestRagFuseLLM(Common):
    kind = RagFuseLLM
    misspelt = ("calbacks", "callbacks")
    program: ClassVar = "from langchain_ragfuse import RagFuseLLM as M\nsaid = llm.invoke('Who?')"
    asks_in_turns = False

    def reply(self, result: Any) -> Reply:
        generation = result.generations[0][0]
        info = generation.generation_info
        return reply(generation.text, info["usage_metadata"], info["ragfuse"])

    def ask(self, llm: Any, question: str, **options: Any) -> Reply:
        return self.reply(llm.generate([question], **options))

    async def aask(self, llm: Any, question: str, **options: Any) -> Reply:
        return self.reply(await llm.agenerate([question], **options))

    def pieces(self, llm: Any, question: str) -> tuple[list[str], None]:
        return list(llm.stream(question)), None

    def rag(self, llm: Any, question: str, marked: bool) -> Reply:
        documents = Shelf().invoke(question)
        return self.ask(llm, PROMPT.format(context=joined(documents), question=question))


del Common
