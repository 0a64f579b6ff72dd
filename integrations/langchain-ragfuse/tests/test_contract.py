"""LangChain's models keep what the models of all frameworks promise."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any, ClassVar

from langchain_core.documents import Document
from langchain_core.load import dumpd, dumps
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnablePassthrough
from langchain_core.tools import tool
from langchain_ragfuse import ChatRagFuse, PMLPromptTemplate, RagFuseLLM
from langchain_ragfuse.messages import to_ragfuse_messages
from pydantic import BaseModel

from integrations.tests.contract import CALL, ModelContract, Reply
from integrations.tests.kit import LETTERS
from integrations.tests.pml_contract import PMLContract
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


class TestChatRagFuse(Common, PMLContract):
    kind = ChatRagFuse
    misspelt = ("stop_sequence", "stop_sequences")
    program: ClassVar = (
        "from langchain_ragfuse import ChatRagFuse as M\nsaid = llm.invoke('Who?').content"
    )
    tool = staticmethod(tool)
    convert = staticmethod(to_ragfuse_messages)
    of_generate = "model_kwargs"
    template = PMLPromptTemplate

    def reply(self, message: Any) -> Reply:
        told = message.response_metadata
        found = reply(str(message.text), message.usage_metadata, told["ragfuse"])
        return replace(
            found,
            finish=told["finish_reason"],
            thought=message.additional_kwargs.get("reasoning_content", ""),
            calls=tuple((call["name"], call["args"]) for call in message.tool_calls),
        )

    def bound(self, llm: Any, options: dict[str, Any]) -> Any:
        tools = options.pop("tools", None)
        return llm.bind(**options) if tools is None else llm.bind_tools(tools, **options)

    def ask(self, llm: Any, question: Any, **options: Any) -> Reply:
        return self.reply(self.bound(llm, options).invoke(question))

    async def aask(self, llm: Any, question: Any, **options: Any) -> Reply:
        return self.reply(await self.bound(llm, options).ainvoke(question))

    def pieces(self, llm: Any, question: Any, **options: Any) -> tuple[list[str], Reply]:
        chunks = list(self.bound(llm, options).stream(question))
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

    def conversations(self) -> list[Any]:
        call = {"name": CALL.name, "args": CALL.arguments, "id": CALL.id, "type": "tool_call"}
        before = [SystemMessage("Be brief."), HumanMessage("Paint."), HumanMessage("Now.")]
        blocks: list[Any] = [{"type": "text", "text": "Yes."}, {**call, "type": "tool_use"}]
        thought: Any = {"reasoning_content": "A door."}
        said = [
            AIMessage("Yes.", tool_calls=[call], additional_kwargs=thought),
            AIMessage([{"type": "thinking", "thinking": "A door."}, *blocks], tool_calls=[call]),
            AIMessage([{"type": "reasoning", "reasoning": "A door."}, *blocks], tool_calls=[call]),
        ]
        return [[*before, each, ToolMessage("Done.", tool_call_id="call_1")] for each in said]

    def image(self) -> Any:
        return HumanMessage(
            [{"type": "image_url", "image_url": {"url": "data:image/png;base64,A"}}]
        )

    def held(self, llm: Any, form: type[BaseModel]) -> Any:
        return llm.with_structured_output(form).invoke("Hello?", max_tokens=90)

    def filled(self, template: Any, **values: Any) -> Any:
        return template.invoke(values)

    def some(self, template: Any, **values: Any) -> Any:
        return template.partial(**values)

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

    def pieces(self, llm: Any, question: str, **options: Any) -> tuple[list[str], None]:
        return list(llm.stream(question, **options)), None

    def rag(self, llm: Any, question: str, marked: bool) -> Reply:
        documents = Shelf().invoke(question)
        return self.ask(llm, PROMPT.format(context=joined(documents), question=question))


del Common
