"""What the template over a schema promises in every framework that has one, as a class to inherit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from integrations.tests.contract import ChatContract
from integrations.tests.pml import HOSTILE, PROMPT, TRIP, VALUES, WHOLE, journey
from ragfuse import Engine, InputError
from ragfuse.schemas.pml import parse_prompt


class PMLContract(ChatContract):
    """What a template over a schema promises: say how it is filled."""

    template: ClassVar[Callable[..., Any]]

    def filled(self, template: Any, **values: Any) -> Any:
        """What `ask` takes."""
        raise NotImplementedError

    def some(self, template: Any, **values: Any) -> Any:
        """The template with these values given ahead."""
        raise NotImplementedError

    async def test_a_template_is_answered_as_the_engine_answers_it(self, engine: Engine) -> None:
        llm = self.kind(engine=engine)
        prompt = self.filled(self.template(TRIP, PROMPT), **VALUES)
        first = self.ask(llm, prompt)
        expected = engine.answer(parse_prompt(WHOLE))
        pieces, last = self.pieces(llm, prompt)
        assert "".join(pieces) == expected.text != ""
        for reply in (first, last, await self.aask(llm, prompt)):
            assert reply is not None
            assert (reply.text, reply.trace["modules"]) == (expected.text, [".", "plan"])
            assert reply.n_cached == expected.trace.tokens_found > 0

    @pytest.mark.parametrize("variable", VALUES)
    def test_values_are_text_whatever_they_look_like(
        self, local: Any, remote: Any, engine: Engine, variable: str
    ) -> None:
        template, values = self.template(TRIP, PROMPT), {**VALUES, variable: HOSTILE}
        for llm in (local, remote):
            assert template.register(llm).encoded > 0
        here, there = (self.ask(llm, self.filled(template, **values)) for llm in (local, remote))
        assert here.told() == there.told()
        assert here.trace["modules"] == there.trace["modules"] == [".", "plan"]
        asked = engine.prompt(template.template.fill(values).request)
        assert HOSTILE in engine.model.text(list(asked.token_ids))
        assert here.n_tokens == len(asked)

    def test_a_prompt_function_and_values_given_ahead_are_taken(self, engine: Engine) -> None:
        llm = self.kind(engine=engine)
        template = self.template(journey, question="{question}")
        week = self.some(template, days="a week")
        reply = self.ask(llm, self.filled(week, question="Where?"))
        assert reply.text == engine.answer(journey("a week").asking("Where?")).text
        by_train = self.ask(llm, self.filled(week, question="Where?", by_train=True))
        assert by_train.trace["modules"] == [".", "by_train"]
        with pytest.raises((InputError, KeyError), match="days"):
            self.filled(template, question="Where?")
