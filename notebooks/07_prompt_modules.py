# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Prompt modules
#
# Many prompts are made of the same parts: an instruction, a profile, one of several forms. A *schema* says once what
# there is and where everything stands; a prompt imports what it needs. Each module's KV is computed once, and a prompt
# computes nothing but what is new in it (Prompt Cache; `pip install 'ragfuse-kv[demo]'`).

# %%
import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import matplotlib.pyplot as plt
from ragfuse_bench.modules.lengths import slope
from ragfuse_bench.presets import bench_model
from ragfuse_bench.rounds import Runner
from rich.console import Console

from ragfuse import Ask, Engine, Settings
from ragfuse.schemas.frontends.python import MaxTokens, program, schema_of, user
from ragfuse.schemas.pml import parse_prompt, to_pml

folder = Path(tempfile.mkdtemp())  # a store of this notebook's own, removed at its end
settings = Settings(store=folder, dtype="float32")  # not every CPU is quick in bfloat16
model = bench_model(settings.model, settings.dtype, settings.device, settings.home)
engine = Engine(settings, model)

# %% [markdown]
# ## A schema
#
# What a small island's office tells its guests. Of a union's modules a prompt takes one; `guest` has room for a name
# and a day.

# %%
schema = """
<schema name="island">
<user>Use the following passages to answer the question at the end in a few words.

<module name="island">The island. Hestoy lies an hour from the coast. It has one road, two shops and a church of 1788,
whose bell came from a wreck. Forty people live there all the year round, most of them in the harbour. There is no bank
on the island and no doctor; a nurse comes on Tuesdays. Cars stay on the coast, and whoever cannot walk to the end of
the road is taken there by Marit Olsen with her horse.

</module><module name="ferry">The ferry. The ship is called Lundi and has room for sixty people and their bicycles. She
does not sail when the waves are higher than three metres, which is told on the radio at six in the morning.
<union><module name="summer">From May to September the ferry sails five times a day, and the last one leaves the island
at ten in the evening. A ticket is 14 euros, and children travel free.
</module><module name="winter">From October to April the ferry sails once a day, and leaves the island at noon. A ticket
is 9 euros, and it is sold on board.
</module></union>
</module><module name="guest">The guest. The guest's name is <param name="name" len="8"/>, and the room is booked until
<param name="day" len="8"/>. It is the blue room above the smaller shop, with a stove and a view of the lighthouse.
Breakfast is at the shop, at eight.

</module></user></schema>
"""
found = engine.schemas.register(schema)
done, layout = found.done, found.layout
print(
    f"{done.encoded} modules of {done.tokens} tokens were encoded: {done.nbytes / 1e6:.1f} MB of KV."
)

# %% [markdown]
# ## Where everything stands
#
# Every module has its positions, whichever others a prompt takes. `summer` and `winter` begin at the same one; an
# argument has its room, marked here.

# %%
places = list(layout.places.values())
figure, axes = plt.subplots(figsize=(7, 2.2), layout="constrained")
for line, place in enumerate(places):
    color = f"C{1 + place.path.count('/')}" if place.path else "lightgray"
    axes.barh(line, place.stop - place.start, left=place.start, color=color)
    for each in place.ranges:
        if each.param:
            axes.barh(line, len(each.tokens), left=each.start, color="black", alpha=0.3)
axes.set_yticks(range(len(places)), [place.path or "the schema itself" for place in places])
axes.invert_yaxis()
axes.set_xlabel("position")
plt.show()

# %% [markdown]
# ## A prompt, with and without its modules' KV
#
# The same tokens at the same positions both ways. Modules did not see each other when they were encoded, so answers
# may differ, as they may with chunks; with `Ask(blend=True)` some rows are recomputed.

# %%
prompt = """<prompt schema="island"><island/><ferry><{season}/></ferry>

Question: {question}
Answer:</prompt>"""


def asked(question, season="summer"):
    return parse_prompt(prompt.format(season=season, question=question))


church = asked("In which year was the church built?")
engine.answer(church, Ask(max_tokens=2))  # what a first answer does once
for name, ask in (
    ("all computed", Ask(reuse=False, max_tokens=16)),
    ("over modules", Ask(max_tokens=16)),
):
    answer = engine.answer(church, ask)
    trace = answer.trace
    print(
        f"{name}: {trace.tokens_reused:3} of {trace.tokens} tokens reused, {trace.ttft_s:.2f} s,",
        end=" ",
    )
    print(answer.text.strip())

# %% [markdown]
# ## Another one of a union
#
# In winter the other timetable is taken. It is in memory already: once a prompt is answered, the other modules of its
# unions are brought there.

# %%
engine.flush()
for season in ("summer", "winter"):
    for question in ("How many times a day does the ferry sail?", "What is the price of a ticket?"):
        answer = engine.answer(asked(question, season), Ask(max_tokens=16))
        tiers = {segment.tier for segment in answer.trace.segments if segment.hit}
        print(f"{season}: {question} {answer.text.strip()} (modules from {', '.join(tiers)})")

# %% [markdown]
# ## Arguments
#
# Only the argument is computed; the module around it was encoded with placeholders in its room.

# %%
own = """<prompt schema="island"><guest name="{name}" day="{day}"/>

Question: What is the guest's name?
Answer:</prompt>"""
for name, day in (("Agnes Worth", "Thursday"), ("Tomas Brandt", "the third of May")):
    answer = engine.answer(parse_prompt(own.format(name=name, day=day)), Ask(max_tokens=16))
    print(
        f"{name}: {answer.text.strip()} ({answer.trace.tokens_fresh} of {answer.trace.tokens} tokens computed)"
    )

# %% [markdown]
# ## A Python function
#
# `if` is a module, `if` with `else` a union, a parameter a room. The function is compiled when it is defined; calling
# it gives a prompt.


# %%
@program
def shop(day: Annotated[str, MaxTokens(6)], is_small: bool):
    with user:
        "Use the following passages to answer the question at the end in a few words.\n\n"
        if is_small:
            "The smaller shop, beside the church, sells bread, smoked fish and stamps, and opens at seven. "
        else:
            "The larger shop, down in the harbour, sells tools, boots and paint, and opens at noon. "
        f"Today is {day}, and there is a queue."


print(to_pml(schema_of(shop)))
engine.schemas.register(schema_of(shop))
for is_small in (True, False):
    request = shop("Monday", is_small)
    answer = engine.answer(
        request.asking("Question: What does the shop sell?\nAnswer:"), Ask(max_tokens=16)
    )
    print(f"is_small={is_small}: {answer.text.strip()}")

# %% [markdown]
# ## The longer, the more
#
# Computing attends from every token to all before it. Modules are read and placed, which grows with their length, and
# a question of a few tokens is computed: here up to 2,000 tokens, nearly all of them cached.

# %%
times = slope(engine, Runner(1, model.device, Console(quiet=True)), (256, 1024, 2048))
figure, axes = plt.subplots(figsize=(6, 2.6), layout="constrained")
for key, color, label in (
    ("full_s", "tab:gray", "all computed"),
    ("cached_s", "tab:blue", "modules cached"),
):
    axes.plot(
        [row["tokens"] for row in times],
        [row[key] for row in times],
        "o-",
        color=color,
        label=label,
    )
axes.set(xlabel="tokens of the prompt", ylabel="seconds of CPU to the first token")
axes.set_ylim(bottom=0)
axes.legend()
plt.show()
longest = times[-1]
print(
    f"{longest['tokens']} tokens, {longest['cached_share']:.0%} cached: {longest['ttft_x']:.0f} times faster."
)

# %%
engine.close()
shutil.rmtree(folder)
