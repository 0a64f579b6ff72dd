"""The engine over prompts in PML: what is encoded once, where it stands, what is exact, and what is
left behind.
"""

from __future__ import annotations

import pytest
import torch

from ragfuse import Ask, Engine, InputError, PMLTemplate
from ragfuse.errors import PMLError
from ragfuse.hf.cache import SharedKV
from ragfuse.hf.model import HFModel
from ragfuse.schemas.bind import SchemaUse
from ragfuse.schemas.pml import parse_prompt
from tests.kits import hf as kit
from tests.kits.tiny import adds_up

TRIP = """
<schema name="trip">
  <system>You plan journeys, and you say little.</system>
  <user>
    <module name="plan">I have <param name="days" len="12"/> for a journey of my own.
      <union>
        <module name="home">I stay in my own country, close to where I live.</module>
        <module name="abroad">I cross the border and take the train all the way there.
          <union>
            <module name="lisbon">I want to see Lisbon and its trams, which are yellow.</module>
            <module name="oslo">I want to see Oslo and its fjords.</module>
          </union>
        </module>
      </union>
    </module>
    <module name="diet">I eat no meat, and no fish on Fridays.</module>
  </user>
</schema>
"""
PROMPT = """
<prompt schema="trip">
  <plan days="a week"><abroad><oslo/></abroad></plan>
  <user>What do I pack?</user>
</prompt>
"""
EDITED = TRIP.replace("Oslo and its fjords", "Oslo and the sea")
LINES = """
<schema name="lines">The first line stands by itself, and is long enough.
<module name="two">The second line is a module of its own, which comes next.
</module><module name="three">The third line is one more, and the last of all.
</module><scaffold modules=". two three"/></schema>
"""
ALL_LINES = '<prompt schema="lines"><two/><three/>What is said here?</prompt>'
ONE = '<schema name="one"><module name="m">The only module of all stands right here.</module></schema>'
FIRST = '<prompt schema="one"><m/>And a question.</prompt>'
CHOSEN = (".", "plan", "plan/abroad", "plan/abroad/oslo")


@pytest.fixture
def trip(engine):
    engine.schemas.register(TRIP)
    return engine


def full(engine, prompt, **options):
    return engine.answer(prompt, Ask(reuse=False, **options))


def states(prefill):
    return [(layer.keys.double(), layer.values.double()) for layer in prefill.kv.layers]


def off(one, other):
    """How far the worst row of any head is away, by its length."""
    pairs = [
        (a, b)
        for mine, theirs in zip(one, other, strict=True)
        for a, b in zip(mine, theirs, strict=True)
    ]
    return max(float(((a - b).norm(dim=-1) / b.norm(dim=-1)).max()) for a, b in pairs)


def equal_full_prefill(engine, pml):
    """The keys that a prompt is read by; its KV and logits equal those of full prefill."""
    prompt = engine.prompt(parse_prompt(pml))
    ready, whole = engine.prepare(prompt), engine.prepare(prompt, Ask(reuse=False)).prefill
    assert off(states(ready.prefill), states(whole)) < 1e-4
    assert (ready.prefill.logits - whole.logits).abs().max() < 1e-4 * whole.logits.abs().max()
    return {fetch.key for fetch in ready.plan.fetches}


# registering


def test_a_schema_is_encoded_once(engine, tmp_path):
    seen = []
    first = engine.schemas.register(TRIP, seen.append)
    runs = first.layout.runs
    assert first.name == "trip"
    assert (first.done.chunks, first.done.encoded) == (len(runs), len(runs))
    assert [done.chunks for done in seen] == list(range(1, len(runs) + 1))
    assert first.done.tokens == sum(len(run.tokens) for run in runs)
    path = tmp_path / "trip.xml"
    path.write_text(TRIP, "utf-8")
    for same in (TRIP, path):
        assert engine.schemas.register(same).done.encoded == 0


def test_an_edit_encodes_what_it_changes_and_the_text_around_what_it_moves(trip):
    before = trip.schemas.show("trip")
    assert trip.schemas.register(EDITED).done.encoded == 1
    longer = "yellow, and its seven hills, and the river that is as wide as a sea"
    changed = trip.schemas.register(TRIP.replace("yellow", longer))
    assert changed.layout.places["diet"].start > before.places["diet"].start
    had = {trip.runtime.encoder.key_of(run) for run in before.runs}
    new = [run for run in changed.layout.runs if trip.runtime.encoder.key_of(run) not in had]
    places = {place for run in new for place in run.members}
    assert places == {"", "plan", "plan/abroad", "plan/abroad/lisbon"}
    assert changed.done.encoded == len(new)


def test_another_process_on_the_store_has_it(trip, tiny_settings):
    answer = trip.answer(parse_prompt(PROMPT))
    trip.close()
    with Engine(tiny_settings) as later:
        again = later.answer(parse_prompt(PROMPT))
        assert again.token_ids == answer.token_ids
        assert again.trace.modules == answer.trace.modules == CHOSEN


def test_a_schema_is_removed_with_the_kv_that_no_other_schema_has(trip):
    trip.schemas.register(LINES)
    trip.schemas.register(TRIP.replace('name="trip"', 'name="voyage"'))
    assert [info.name for info in trip.schemas.ls()] == ["lines", "trip", "voyage"]
    assert trip.schemas.show("lines").places["two"].start > 0
    trip.flush()
    keys = {trip.runtime.encoder.key_of(run) for run in trip.schemas.show("trip").runs}
    assert set(trip.store.lookup(keys)) == keys
    trip.schemas.remove("trip")
    assert trip.answer(parse_prompt(PROMPT.replace("trip", "voyage"))).trace.modules == CHOSEN
    trip.flush()  # what is brought to memory for the next prompt is there
    assert trip.schemas.remove("voyage") > 0
    assert trip.store.lookup(keys) == {}
    assert [info.name for info in trip.schemas.ls()] == ["lines"]
    assert trip.answer(parse_prompt(ALL_LINES)).trace.modules == (".", "two", "three")


def test_what_another_process_removed_is_there_no_more(trip, tiny_settings):
    trip.flush()
    with Engine(tiny_settings) as other:
        other.schemas.remove("trip")
    assert (trip.schemas.names(), trip.schemas.ls()) == ([], [])
    with pytest.raises(PMLError, match="there is none yet"):
        trip.answer(parse_prompt(PROMPT))


def test_a_schema_that_is_not_registered_is_told_with_those_that_are(trip):
    with pytest.raises(PMLError, match=r"'tripp'.*'trip'"):
        trip.answer(parse_prompt(PROMPT.replace("trip", "tripp")))
    for ask in (trip.schemas.show, trip.schemas.remove):
        with pytest.raises(InputError, match=r"'voyage'.*'trip'"):
            ask("voyage")


def test_a_salt_has_schemas_of_its_own(trip, tiny_settings):
    with Engine(tiny_settings.model_copy(update={"salt": "other"})) as other:
        assert other.schemas.ls() == []


# answers


def test_a_prompt_takes_its_modules_from_the_store_at_the_schemas_positions(trip):
    prompt, layout = trip.prompt(parse_prompt(PROMPT)), trip.schemas.show("trip")
    trace = trip.answer(parse_prompt(PROMPT)).trace
    assert (trace.schema, trace.modules) == ("trip", CHOSEN)
    assert adds_up(trace)
    assert trace.tokens_fresh == sum(len(s.tokens) for s in prompt.segments if s.kind == "fresh")
    oslo = next(segment for segment in trace.segments if segment.source == "trip: plan/abroad/oslo")
    assert (oslo.hit, oslo.start) == (True, layout.places["plan/abroad/oslo"].start)
    assert trace.tokens_recomputed == 0


def test_a_scaffold_over_the_prompt_and_a_first_module_equal_full_prefill(engine):
    for schema, pml in ((LINES, ALL_LINES), (ONE, FIRST)):
        layout = engine.schemas.register(schema).layout
        run = (layout.scaffolds or layout.runs)[0]
        assert equal_full_prefill(engine, pml) == {engine.runtime.encoder.key_of(run)}
        answer, whole = engine.answer(parse_prompt(pml)), full(engine, parse_prompt(pml))
        assert answer.token_ids == whole.token_ids
        assert all(segment.exact for segment in answer.trace.segments)


def test_the_order_of_imports_does_not_matter(trip):
    orders = ('<diet/><plan days="a week"/>', '<plan days="a week"/><diet/>')
    one, other = (
        trip.prompt(parse_prompt(f'<prompt schema="trip">{order}<user>What?</user></prompt>'))
        for order in orders
    )
    assert one == other


def test_kv_placed_by_hand_is_what_a_prompt_is_answered_over(trip):
    """Every run encoded by itself and turned to its positions, row by row; the rest computed over
    it.
    """
    from tests.twins.reference import shifted

    prompt = trip.prompt(parse_prompt(PROMPT))
    prefill, model = trip.prepare(prompt).prefill, trip.model
    assert isinstance(prompt.schema_use, SchemaUse)
    for segment, (lo, hi) in zip(prompt.segments, prompt.spans, strict=True):
        if segment.kind == "module":
            run = prompt.schema_use.runs[segment.keys[0]]
            rows = slice(*(segment.rows or (0, len(segment.tokens))))
            kv = model.encode_at(run.tokens, run.positions)
            for layer, (layout, mine) in enumerate(
                zip(model.profile.rope, states(prefill), strict=True)
            ):
                wanted = shifted(kv.layers[layer].keys[:, rows], segment.shift, layout)
                assert torch.allclose(mine[0][:, lo:hi].cpu(), wanted, atol=1e-4)
                assert torch.equal(mine[1][:, lo:hi], kv.layers[layer].values[:, rows].double())


def test_what_is_missing_is_computed_and_encoded_as_a_whole_afterwards(trip):
    trip.flush()
    run = trip.schemas.show("trip").modules["plan"]
    trip.store.forget([trip.runtime.encoder.key_of(run)])
    answer = trip.answer(parse_prompt(PROMPT))
    assert answer.trace.modules == (".", "plan/abroad", "plan/abroad/oslo")
    assert {s.why for s in answer.trace.segments if not s.hit} == {"not in the store"}
    trip.flush()
    assert trip.store.lookup([trip.runtime.encoder.key_of(run)])
    assert trip.answer(parse_prompt(PROMPT)).trace.modules == CHOSEN


def test_a_prompt_is_answered_over_the_very_schema_that_it_was_made_for(engine):
    texts = [TRIP, TRIP.replace("you say little", "you say as much as you like")]
    filled = [PMLTemplate(text, PROMPT).fill({}) for text in texts]
    alone = []
    for each in filled:
        assert engine.schemas.ensure(each.schema) is not None
        alone.append(engine.answer(parse_prompt(PROMPT)))
    engine.flush()
    assert alone[0].trace.tokens < alone[1].trace.tokens
    beside = engine.batch([each.request for each in (*filled, *filled)])
    for answer, wanted in zip(beside, alone * 2, strict=True):
        assert (answer.token_ids, answer.trace.tokens) == (wanted.token_ids, wanted.trace.tokens)
        assert answer.trace.modules == CHOSEN
    engine.schemas.remove("trip")
    with pytest.raises(PMLError, match="which is not registered"):
        engine.answer(filled[0].request)


def test_modules_are_blended_where_it_is_asked_for(trip):
    prompt = parse_prompt(PROMPT)
    blended = trip.answer(prompt, Ask(blend=True, ratio=0.3, policy="hkvd")).trace
    assert blended.tokens_recomputed > 0
    assert blended.modules == trip.answer(prompt).trace.modules
    assert (
        trip.answer(prompt, Ask(blend=True, ratio=1.0, policy="hkvd")).token_ids
        == full(trip, prompt).token_ids
    )


def test_the_other_modules_of_a_union_are_brought_to_memory(trip, tiny_settings):
    trip.close()
    with Engine(tiny_settings) as later:
        later.answer(parse_prompt(PROMPT))
        later.flush()
        for module, tier in (("plan/abroad/lisbon", "memory"), ("diet", "disk")):
            key = later.runtime.encoder.key_of(later.schemas.show("trip").modules[module])
            assert later.store.lookup([key])[key].tier == tier


def test_a_prompt_may_be_given_as_pml_or_its_file(trip, tmp_path):
    path = tmp_path / "ask.xml"
    path.write_text(PROMPT, "utf-8")
    wanted = trip.answer(parse_prompt(PROMPT))
    for pml in (PROMPT, path, str(path)):
        assert trip.answer(pml=pml).token_ids == wanted.token_ids
        with trip.stream(pml=pml) as stream:
            assert "".join(stream) == wanted.text
    assert trip.answer(PROMPT).trace.schema == ""  # a text that is asked stays one
    for ask in (trip.answer, trip.stream):
        for asked, pml in (("And now?", PROMPT), (None, None), (None, TRIP)):
            with pytest.raises(InputError, match=r"both|neither|<prompt>"):
                ask(asked, pml=pml)


@pytest.mark.parametrize(
    "ask", [Ask(session="mine"), Ask(tools=[{"type": "function", "function": {"name": "f"}}])]
)
def test_what_a_prompt_of_modules_cannot_do_is_told(trip, ask):
    with pytest.raises(InputError, match="A prompt in PML"):
        trip.answer(parse_prompt(PROMPT), ask)


def test_messages_are_wrapped_as_the_models_template_does(engine):
    """All modules together are what the template makes of the same messages."""
    said = [
        ("system", "Be brief, as ever."),
        ("user", "What is this?"),
        ("assistant", "A harbour, I think."),
    ]
    modules = "".join(f"<{role}>{text}</{role}>" for role, text in said)
    engine.schemas.register(f'<schema name="talk">{modules}</schema>')
    mine = engine.prompt(parse_prompt('<prompt schema="talk"><user>And that?</user></prompt>'))
    assert mine.token_ids == engine.prompt([*said, ("user", "And that?")]).token_ids


def test_a_chat_begins_as_the_template_does_whatever_stands_before_a_text(engine, monkeypatch):
    words = engine.model.tokenizer
    monkeypatch.setattr(words, "chat_template", words.chat_template.removeprefix("<s>"))
    monkeypatch.setattr(HFModel, "bos", (words.bos_token_id,))
    engine.schemas.register('<schema name="talk"><system>Be brief, as ever.</system></schema>')
    mine = engine.prompt(parse_prompt('<prompt schema="talk"><user>And that?</user></prompt>'))
    assert (
        mine.token_ids
        == engine.prompt([("system", "Be brief, as ever."), ("user", "And that?")]).token_ids
    )
    assert mine.token_ids[0] != words.bos_token_id
    engine.schemas.register('<schema name="told">All that is told is a text.</schema>')
    text = engine.prompt(parse_prompt('<prompt schema="told"> And more.</prompt>'))
    assert text.token_ids == engine.prompt("All that is told is a text. And more.").token_ids
    assert text.token_ids[0] == words.bos_token_id


# families


@pytest.fixture
def of(tiny_settings):
    """Makes an engine over a tiny model of a family, over a store on disk."""
    made = []

    def engine(name):
        made.append(Engine(tiny_settings.model_copy(update={"memory_bytes": 0}), kit.family(name)))
        return made[-1]

    yield engine
    for each in made:
        each.close()


@pytest.mark.parametrize(
    "name", ["llama", "deepseek-latent", "smollm3-some-nope", "bloom-alibi", "gpt2", "gptj"]
)
def test_in_every_family_a_scaffold_over_all_is_full_prefill_and_modules_are_read(of, name):
    engine = of(name)
    engine.schemas.register(LINES)
    engine.flush()
    assert equal_full_prefill(engine, ALL_LINES)
    engine.schemas.register(TRIP)
    trace = engine.answer(parse_prompt(PROMPT)).trace
    assert (trace.modules, trace.fallback_reason) == (CHOSEN, "")


def test_a_refused_model_answers_by_full_prefill(of):
    engine = of("llama-dynamic")
    assert engine.schemas.register(LINES).done.encoded == 0
    answer = engine.answer(parse_prompt(ALL_LINES))
    assert "dynamic" in answer.trace.fallback_reason
    assert answer.token_ids == full(engine, parse_prompt(ALL_LINES)).token_ids


def test_kv_that_cannot_be_moved_is_used_in_place_alone(of):
    engine = of("gpt2")
    engine.schemas.register(LINES)
    long = parse_prompt(f'<prompt schema="lines"><two/>{"word " * 30}<three/>What?</prompt>')
    with pytest.raises(PMLError, match="text of 150 tokens"):
        engine.answer(long)
    blended = engine.answer(parse_prompt(ALL_LINES), Ask(blend=True)).trace
    assert "hidden states" in blended.fallback_reason
    assert engine.answer("Anything else.").trace.fallback_reason != ""
    engine.flush()
    engine.store.clear()
    assert engine.answer(parse_prompt(ALL_LINES)).trace.modules == ()
    engine.flush()
    assert engine.answer(parse_prompt(ALL_LINES)).trace.modules == (".", "two", "three")


# several models on one store


# answers at the same time

LONG = "The sea was calm, and the ship went on. " * 8
BOOK = (
    f'<schema name="book"><module name="sea">{LONG}</module><module'
    f' name="land">{LONG[::-1]}</module></schema>'
)
READERS = [
    f'<prompt schema="book"><sea/><land/>What does reader {name} see?</prompt>' for name in "abcd"
]


def test_a_batch_holds_a_module_once_and_says_what_each_answer_says_alone(engine, monkeypatch):
    engine.schemas.register(BOOK)
    prompts = [parse_prompt(text) for text in READERS]
    alone = [engine.answer(prompt).token_ids for prompt in prompts]
    met = []
    share = SharedKV.share
    monkeypatch.setattr(
        SharedKV, "share", lambda self, *given: (share(self, *given), met.append(len(self)))[0]
    )
    assert [answer.token_ids for answer in engine.batch(prompts)] == alone
    assert met == [2] * 4
