"""Output constraints: what the answers to a prompt must be, by their tools, grammar, stops and
penalties.
"""

from __future__ import annotations

from functools import cached_property, lru_cache

from ragfuse.engine.draft import Draft
from ragfuse.engine.options import ends_of, generate_options, n_logits
from ragfuse.engine.prompt_builder import PromptBuilder
from ragfuse.engine.request import Request
from ragfuse.errors import InputError, about
from ragfuse.hf.grammar import GrammarCompiler, GrammarProcessor, held_schema
from ragfuse.text.chat_template import ChatTemplate
from ragfuse.types.grammar import Grammar
from ragfuse.types.prompt import Prompt

TAIL = 32
"""How many of a prompt's last tokens are searched for a tag that opens reasoning."""


class ConstraintCompiler:
    """Compiles the constraints of answers. Thread-safe.

    Args:
        prompts: The model, and how its template writes tool calls.
    """

    def __init__(self, prompts: PromptBuilder) -> None:
        self._runtime, self._prompts = prompts.runtime, prompts
        # one, as a caller with its own end tokens usually stays with them
        self._over = lru_cache(maxsize=1)(
            lambda model, ends: GrammarCompiler(model.tokenizer, n_logits(model), ends)
        )

    def draft(self, request: Request, prompt: Prompt) -> Draft:
        """Return an empty draft of the answer to a prompt, which has its constraints.

        Raises:
            InputError: The tools, the grammar or an option cannot be used, or the chat template has
                no variable of a name in `chat_template_kwargs`.
        """
        ask, model, form = request.ask, request.model, request.ask.grammar
        if ask.chat_template_kwargs and (name := self.template.unread(ask.chat_template_kwargs)):
            raise InputError(
                f"chat_template_kwargs has '{name:.40}', which the chat template of {model.name}"
                f" does not use. It uses {sorted(self.template.names)}; leave others out.",
                "chat_template_kwargs",
            )
        thoughts, is_thinking = None, False
        # answers to any other prompt have no reasoning
        if request.is_chat and form is None and not request.must_call:
            thoughts = self.template.thoughts
        if thoughts is not None:
            end = model.tokenizer.decode(list(prompt.token_ids[-TAIL:]), skip_special_tokens=False)
            is_thinking = thoughts.is_open(str(end))
        calls, rules = None, list[GrammarProcessor]()
        if form is not None or request.tools:
            grammars = self._over(model, ends_of(model, ask.options))
            # The texts of any other form are never read as tool calls.
            if form is None or (
                request.tools and form.kind == "json" and self._prompts.calls.marker
            ):
                calls = self._prompts.calls
                tags = () if thoughts is None else (thoughts.open, thoughts.close)
                schemas = {name: held_schema(each) for name, each in request.schemas.items()}
                several = ask.parallel_tool_calls and ask.tool_choice not in schemas
                either = "" if form is None else held_schema(form.source)
                form = Grammar.lark(
                    calls.rules(
                        schemas, grammars.literal, not request.must_call, several, tags, either
                    )
                )
            with about("tools" if ask.grammar is None else "grammar"):
                rules.append(GrammarProcessor(grammars, form))
        options = generate_options(request, prompt.segments[-1].stop, rules)
        return Draft(request, options, calls, thoughts, is_thinking)

    @cached_property
    def template(self) -> ChatTemplate:
        """The properties of the model's chat template, read once."""
        model = self._runtime.model
        tokenizer = model.tokenizer if model.has_tokenizer else None
        added = () if tokenizer is None else tokenizer.added_tokens_decoder.values()
        return ChatTemplate.of(
            getattr(tokenizer, "chat_template", None), {str(token) for token in added}
        )
