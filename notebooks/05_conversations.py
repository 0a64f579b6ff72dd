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
# # Conversations
#
# Each turn of a conversation begins with all that was said before, and a model that forgets computes all of it again.
# ragfuse keeps the KV of every turn: the next one computes what is new (AttentionStore). That is exact, the same
# tokens behind the same tokens have the same KV, so the answers stay what they were (`pip install 'ragfuse-kv[demo]'
# langchain-ragfuse`).

# %%
import shutil
import tempfile
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
from langchain_core.messages import AIMessage, HumanMessage
from langchain_ragfuse import ChatRagFuse
from ragfuse_bench.presets import bench_model
from ragfuse_bench.sessions.run import SETTINGS, Bench, packaged, paper_load
from ragfuse_bench.sessions.server import SERVERS
from ragfuse_bench.sessions.simulate import Given
from rich.console import Console

from ragfuse import Ask, Engine, Settings
from ragfuse.demo import corpus_path

warnings.simplefilter("ignore")
folder = Path(tempfile.mkdtemp())  # a store of this notebook's own, removed at its end
settings = Settings(store=folder, dtype="float32")  # not every CPU is quick in bfloat16
model = bench_model(settings.model, settings.dtype, settings.device, settings.home)
engine = Engine(settings, model)

# %% [markdown]
# ## Name it, and go on
#
# The first message brings an article's beginning, the later ones are short. Each question is answered twice: with all
# of the prompt computed, and with the history from the store.

# %%
article = (corpus_path() / "packet-switching.md").read_text(encoding="utf-8")
questions = [
    f"Read this, and then answer my questions about it in one sentence each.\n\n{article[:5000]}\n\nWhat is it about?",
    "Who invented it?",
    "Which network was the first to use it?",
    "What did it replace?",
    "Where is it used today?",
    "Why was it doubted at first?",
]
turns = []
for question in questions:
    asked = [("user", question)]
    ways = {
        way: engine.answer(asked, Ask(session="talk", reuse=way == "kept", max_tokens=32))
        for way in ("full", "kept")
    }
    engine.flush()  # what was said is saved in the background; here we wait for it, so that times are of answers alone
    turns.append(ways)
    trace, same = ways["kept"].trace, ways["kept"].text == ways["full"].text
    print(
        f"{trace.tokens:5} tokens, {trace.history_reused:5} of them kept; the same answer: {same}.",
        end=" ",
    )
    print(ways["kept"].text.strip().split("\n")[0][:60])

# %%
figure, axes = plt.subplots(figsize=(6, 2.6), layout="constrained")
for way, color, label in (
    ("full", "tab:gray", "all computed"),
    ("kept", "tab:blue", "history from the store"),
):
    axes.plot(
        range(1, len(turns) + 1),
        [each[way].trace.ttft_s for each in turns],
        "o-",
        color=color,
        label=label,
    )
axes.set(xlabel="turn", ylabel="seconds to the first token", xticks=range(1, len(turns) + 1))
axes.set_ylim(bottom=0)
axes.legend()
plt.show()

# %% [markdown]
# ## Go on tomorrow
#
# The session lies in the store's folder. Another process that opens it goes on by the name alone; here a second
# engine.

# %%
engine.close()
engine = Engine(settings, model)
answer = engine.answer(
    [("user", "Say it once more in three words.")], Ask(session="talk", max_tokens=16)
)
print(
    f"{answer.trace.history_reused} of {answer.trace.tokens} tokens were kept. {answer.text.strip()}"
)

# %%
for info in engine.sessions.ls():
    print(f"{info.id}: {info.turns} turns, {info.tokens} tokens")

# %% [markdown]
# ## Callers that send everything again
#
# LangChain's histories and LlamaIndex's memories send all messages with every question. Nothing changes in the chain:
# what was heard and said before is recognised by its beginning. An edited message is another conversation from there
# on.

# %%
chat = ChatRagFuse(engine=engine, max_tokens=24)


def reused(message):
    return message.response_metadata["ragfuse"]["tokens_reused"]


messages = [
    HumanMessage("I keep a lighthouse on a rock in the sea, and count ships. Say hello to me.")
]
for said in ("How would you count them at night?", "And in fog?", None):
    reply = chat.invoke(messages)
    print(
        f"{reused(reply):4} of {reply.usage_metadata['input_tokens']:4} tokens of the prompt were kept"
    )
    messages += [AIMessage(reply.content), HumanMessage(said)] if said else []
    engine.flush()

edited = [*messages[:2], HumanMessage("How would you count birds at night?")]
print(f"after an edit of the second question: {reused(chat.invoke(edited))} tokens were kept")

# %% [markdown]
# ## Too long
#
# A prompt that does not fit the window loses its earliest half window. Rows are left out and the others placed anew,
# by one rotation of their keys: nothing is recomputed, and what stays is what it was.

# %%
engine.close()
engine = Engine(settings.model_copy(update={"window_tokens": 1200, "sinks": 4}), model)
answer = engine.answer(
    [("user", "Thank you. What was the hardest part?")], Ask(session="talk", max_tokens=16)
)
trace = answer.trace
print(
    f"{trace.truncated} tokens left the prompt; of the {trace.tokens} in it, {trace.history_reused} were kept"
)
engine.close()

# %% [markdown]
# ## Many conversations, little memory
#
# On a server, what is kept outgrows memory, and soon the disk. The queue of waiting requests says whose history is
# needed next: it is fetched ahead, and dropped last. Simulated in the paper's setting, with the policies that ragfuse
# runs: 9,000 conversations, one more each second, 128 GB of memory and 2 TB of disk.

# %%
bench, (name, memory, disk) = Bench(Console(quiet=True)), SETTINGS[0]
load = paper_load(packaged(), quick=False)
policies = ("look-ahead", "lru", "fifo")
given = {policy: Given(SERVERS["LLaMA-13B"], memory, disk, policy) for policy in policies}
rates = [bench.run(load, given[policy], policy).rates() for policy in policies]

figure, axes = plt.subplots(figsize=(5, 2.6), layout="constrained")
in_memory, on_disk = ([rate[where] for rate in rates] for where in ("ram", "disk"))
axes.bar(policies, in_memory, label="found in memory", color="tab:blue")
axes.bar(policies, on_disk, bottom=in_memory, label="found on disk", color="tab:orange")
axes.set(ylabel="share of turns", ylim=(0, 1))
axes.legend(fontsize=8)
plt.show()

# %%
shutil.rmtree(folder)
