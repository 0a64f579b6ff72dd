"""A chat engine with LlamaIndex's chat memory: the turns before are sent again, and found by what they say."""

from __future__ import annotations

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.llms.ragfuse import RagFuseLLM

from ragfuse import Engine

ASKED = ("Who kept the lighthouse?", "What did he count in one night?", "And who wrote the names down?")


def test_a_later_turn_of_a_chat_memory_reuses_the_turns_before(engine: Engine) -> None:
    llm, memory, found = RagFuseLLM(engine=engine), ChatMemoryBuffer.from_defaults(token_limit=3000), []
    for question in ASKED:
        memory.put(ChatMessage(role="user", content=question))
        response = llm.chat(memory.get())
        memory.put(response.message)
        found.append(response.raw["ragfuse"])
    reused = [
        sum(each["n_tokens"] for each in trace["segments"] if each["kind"] == "history" and each["hit"])
        for trace in found
    ]
    assert reused[0] == 0
    assert all(later >= before["tokens"] for later, before in zip(reused[1:], found, strict=False))
    assert len({trace["session"] for trace in found}) == 1
