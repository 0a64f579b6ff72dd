"""Documents that were retrieved for a question: of very many the first ones are looked for."""

from ragfuse import Ask
from ragfuse.hf.model import HFModel
from ragfuse.types.request_limits import MAX_RETRIEVED
from tests.tiny import CHUNKS, messages


def test_of_very_many_documents_the_first_ones_are_looked_for(engine, monkeypatch):
    documents = [(f"{CHUNKS[0]} {number}", "book") for number in range(4 * MAX_RETRIEVED)]
    read, tokens = list[str](), HFModel.tokens

    def counted(self, text, special=False):
        read.append(text)
        return tokens(self, text, special)

    monkeypatch.setattr(HFModel, "tokens", counted)
    engine.answer(messages(), Ask(documents=documents))
    engine.flush()
    looked_for = {text for text, _ in documents} & set(read)
    assert looked_for == {text for text, _ in documents[:MAX_RETRIEVED]}
