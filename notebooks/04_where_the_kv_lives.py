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
# # Where the KV lives
#
# A chunk's KV takes thousands of times the bytes of its text, so it cannot all stay in memory. It lies in tiers, from
# fast and dear to slow and cheap, and a controller decides by this machine's own timings: read or compute, how many
# rows to compute while reading, and which tier a chunk belongs to.
#
# The slower tiers are made here: folders behind a line of so many megabytes a second, so that the picture is the same
# on every machine. In your settings they are `tiers=["redis://...", "s3://..."]` (`pip install 'ragfuse-kv[demo]'`).

# %%
import shutil
import tempfile
import time
from pathlib import Path

import matplotlib.pyplot as plt
from langchain_text_splitters import RecursiveCharacterTextSplitter
from ragfuse_bench.presets import bench_model
from ragfuse_bench.throttle import ThrottledTier

from ragfuse import Ask, Engine, Piece, Settings
from ragfuse.demo import corpus_path
from ragfuse.load.timings import measure
from ragfuse.plan.controller import PRICES, choose_tier
from ragfuse.plan.evict import lru
from ragfuse.plan.explanation import in_words
from ragfuse.store import DiskTier, KVStore, MemoryTier

folder = Path(tempfile.mkdtemp())  # everything of this notebook, removed at its end
settings = Settings(
    store=folder / "own", dtype="float32", placement="all"
)  # chunks go to all tiers, to be seen in each
model = bench_model(settings.model, settings.dtype, settings.device, settings.home)
GB, SIZE = 1 << 30, 192  # bytes; tokens of a chunk
speeds = {"disk": 400.0, "objects": 40.0}
tiers = [MemoryTier(GB, lru)]
tiers += [
    ThrottledTier(DiskTier(folder / name, GB, lru), mbps, name=name)
    for name, mbps in speeds.items()
]
engine = Engine(settings, model, KVStore(tiers))

# %% [markdown]
# ## This machine's timings
#
# `ragfuse measure` times prefills, fused prefills and reads once and keeps the result; here a short version of it.

# %%
machine = measure(model, tiers, longest=768, rounds=1)
engine.timings.learn(machine)
chunk_bytes = sum(
    layer.nbytes for layer in model.encode(model.tokens("word " * SIZE)[:SIZE]).layers
)
print(f"A chunk of {SIZE} tokens is {chunk_bytes / 1e6:.1f} MB of KV.")
for name in machine.tiers:
    print(f"{name:8} loads it in {1e3 * machine.load_s(name, chunk_bytes):6.1f} ms")
for ratio in (0.1, 0.3, 1.0):
    print(
        f"computing {ratio:4.0%} of its rows takes {1e3 * ratio * machine.prefill_s(SIZE):6.1f} ms"
    )

# %% [markdown]
# ## Chunks in tiers
#
# An article's chunks, encoded once. Four are kept in memory, four on the disk, four far away.

# %%
text = (corpus_path() / "1973-oil-crisis.md").read_text(encoding="utf-8")
splitter = RecursiveCharacterTextSplitter.from_huggingface_tokenizer(
    model.tokenizer, chunk_size=SIZE, chunk_overlap=0
)
texts = [split.strip() for split in splitter.split_text(text)][:12]
before, after = (
    "Use the following passages to answer the question at the end.\n\n",
    "\n\nQuestion: {}\nAnswer:",
)
groups = dict(zip(("memory", "disk", "objects"), (texts[:4], texts[4:8], texts[8:]), strict=True))


def messages(chunks, question="What happened in 1973?"):
    pieces = [part for chunk in chunks for part in (Piece("\n\n"), Piece(chunk, "chunk"))]
    return [("user", [Piece(before), *pieces[1:], Piece(after.format(question))])]


def prompt(chunks):
    return engine.prompt(messages(chunks))


prefix = engine.prefix(messages(texts[:1]))
engine.ingest([(chunk, f"chunk {number}") for number, chunk in enumerate(texts)], prefix)
engine.flush()


def keys(chunks):
    return [
        key
        for segment in prompt(chunks).segments
        if segment.kind == "chunk"
        for key in segment.keys
    ]


def keep_in(tier, chunks):
    """Leave the chunks in one tier alone."""
    if tier == "memory":
        engine.prepare(prompt(chunks))  # what is read from a slower tier is copied to memory
    for other in machine.tiers:
        if other != tier:
            engine.store.forget(keys(chunks), other)


for tier, chunks in groups.items():
    keep_in(tier, chunks)
for tier in engine.store.tiers:
    entries = [entry for entry in engine.store.entries() if entry.tier == tier.name]
    print(f"{tier.name:8} {len(entries):3} entries, {tier.nbytes / 1e6:6.1f} MB")

# %% [markdown]
# ## A plan, told
#
# What a question would read and compute, before anything is done. The same question over near and far chunks:

# %%
mixed = [*groups["memory"][:2], *groups["disk"][:2], *groups["objects"][:2]]
print(in_words(engine.plan(messages(mixed))))

# %% [markdown]
# ## Predicted and measured
#
# Prompts of two to four chunks from each tier: what the plan foresaw, and how long the prefill then took. What was
# read from a slow tier is copied to memory, so it is taken away again before each.

# %%
done = []
for tier, chunks in groups.items():
    for count in (2, 3, 4):
        for ask in (Ask(), Ask(policy="lexical", ratio=0.1)):
            keep_in(tier, chunks)
            began = time.perf_counter()
            ready = engine.prepare(prompt(chunks[:count]), ask)
            seconds = time.perf_counter() - began
            engine.flush()
            done.append((tier, ready.plan.forecast.ttft_s, seconds, ready.plan))

figure, axes = plt.subplots(figsize=(4.6, 4.2), layout="constrained")
for tier, marker in zip(groups, "os^", strict=True):
    mine = [(predicted, seconds) for name, predicted, seconds, _ in done if name == tier]
    axes.plot(*zip(*mine, strict=True), marker, label=tier, alpha=0.8)
most = 1.1 * max(max(predicted, seconds) for _, predicted, seconds, _ in done)
axes.plot([0, most], [0, most], color="black", linewidth=0.8)
axes.set(
    xlabel="predicted seconds to the first token", ylabel="measured", xlim=(0, most), ylim=(0, most)
)
axes.legend(title="chunks lie in", fontsize=8)
plt.show()

# %% [markdown]
# ## Hits by tier
#
# One question, asked three times over the far chunks. The second time they are in memory.

# %%
keep_in("objects", groups["objects"])
question = [
    Piece(before),
    *(Piece(chunk, "chunk") for chunk in groups["objects"]),
    Piece(after.format("What happened?")),
]
for turn in (1, 2, 3):
    trace = engine.answer([("user", question)], Ask(max_tokens=8)).trace
    where = sorted(
        {segment.tier for segment in trace.segments if segment.hit and segment.kind == "chunk"}
    )
    print(
        f"{turn}: chunks from {', '.join(where) or 'nowhere, computed'}; {trace.nbytes / 1e6:.0f} MB read,",
        end=" ",
    )
    print(f"predicted {trace.predicted_ttft_s:.2f} s, took {trace.prefill_s:.2f} s")
    engine.flush()

# %% [markdown]
# ## Prices
#
# A new chunk goes to the cheapest tier whose loading hides behind the rows that are computed anyway. What keeping ten
# thousand chunks costs a month, and what is chosen as more rows are computed:

# %%
names = list(machine.tiers)
cost = [PRICES[name] * 10_000 * chunk_bytes / 1e9 for name in names]
load = [1e3 * machine.load_s(name, chunk_bytes) for name in names]
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
left.bar_label(left.bar(names, cost, color="tab:green"), fmt="%.2f", fontsize=8)
left.set(ylabel="cost a month of 10,000 chunks", yscale="log")
right.bar_label(right.bar(names, load, color="tab:purple"), fmt="%.1f", fontsize=8)
right.set(ylabel="milliseconds to load one", yscale="log")
for axes in (left, right):
    axes.margins(y=0.15)
levels = dict.fromkeys(names, ("raw",))
for ratio in (0.02, 0.1, 0.3, 0.6, 1.0):
    chosen = choose_tier(SIZE, chunk_bytes, machine, levels, ratio)
    print(f"{ratio:4.0%} of the rows computed: {chosen}")
plt.show()

# %%
engine.close()
shutil.rmtree(folder)
