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
# # Slow links
#
# On a link slower than a disk, the bytes of KV are the wait. Two things help: KV is packed, at *levels* that lose more
# and take less (CacheGen's codec), and a question with a deadline brings each piece at the level that the link allows
# in time, or as text, which is computed (`pip install 'ragfuse-kv[demo]'`).
#
# The link is made here: an object store in a folder, behind a line of so many megabytes a second that may change. In
# your settings it is `tiers=["s3://..."]` or `redis://...`.

# %%
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path

import matplotlib.pyplot as plt
from langchain_text_splitters import RecursiveCharacterTextSplitter
from ragfuse_bench.presets import bench_model

from ragfuse import Ask, Engine, Piece, Settings
from ragfuse.demo import corpus_path
from ragfuse.load.timings import measure

folder = Path(tempfile.mkdtemp())  # everything of this notebook, removed at its end
LEVELS, SIZE = ["raw", "int8", "cg1", "cg2", "cg3", "cg4"], 256  # of chunks: levels, tokens
settings = Settings(
    store=folder / "own",
    dtype="float32",
    memory_bytes=0,  # nothing is nearer than the link
    disk_bytes=0,
    tiers=[f"file://{folder}/far"],
    levels={"objects": LEVELS},
)
model = bench_model(settings.model, settings.dtype, settings.device, settings.home)
engine = Engine(settings, model)
engine.timings.learn(measure(model, [], longest=768, rounds=1))  # how long computing takes here

# %% [markdown]
# ## What a level takes
#
# Six chunks of an article, each kept at all levels. The codec's tables, how this model's keys and values are spread,
# were made when the engine opened, from text that comes along.

# %%
text = (corpus_path() / "1973-oil-crisis.md").read_text(encoding="utf-8")
splitter = RecursiveCharacterTextSplitter.from_huggingface_tokenizer(
    model.tokenizer, chunk_size=SIZE, chunk_overlap=0
)
texts = [split.strip() for split in splitter.split_text(text)][:6]
before, after = (
    "Use the following passages to answer the question at the end.\n\n",
    "\n\nQuestion: {}\nAnswer:",
)


def messages(question):
    pieces = [part for chunk in texts for part in (Piece("\n\n"), Piece(chunk, "chunk"))]
    return [("user", [Piece(before), *pieces[1:], Piece(after.format(question))])]


question = messages("By how much did OPEC raise the posted price of oil on October 16, 1973?")
engine.ingest(
    [(chunk, f"chunk {number}") for number, chunk in enumerate(texts, 1)], engine.prefix(question)
)
engine.flush()

entries = [entry for entry in engine.store.entries() if set(LEVELS) <= set(entry.sizes)]
tokens = sum(entry.n_tokens for entry in entries)
kilobytes = {level: sum(entry.sizes[level] for entry in entries) / tokens / 1e3 for level in LEVELS}
figure, axes = plt.subplots(figsize=(6, 2.4), layout="constrained")
axes.bar_label(
    axes.barh(LEVELS, list(kilobytes.values()), color="tab:blue"), fmt="%.1f", padding=3, fontsize=8
)
axes.invert_yaxis()
axes.set(xlabel="kilobytes a token", xlim=(0, 1.12 * max(kilobytes.values())))
plt.show()

# %% [markdown]
# ## The line
#
# What is read takes at least as long as its bytes take at the line's speed in this moment.


# %%
class Line:
    """The reads of a tier at so many megabytes a second, by seconds since the line was last set."""

    def __init__(self, tier):
        self.get, tier.get = tier.get, self.slowed
        self.set((0, 1e6))

    def set(self, *steps):
        """(from this second on, megabytes a second), the first from 0 on."""
        self.steps, self.began = steps, time.perf_counter()
        engine.runtime.links.clear()  # what was seen of the line before

    def mbps(self):
        since = time.perf_counter() - self.began
        return [mbps for at, mbps in self.steps if at <= since][-1]

    def slowed(self, key, layers, level=None):
        found = self.get(key, layers, level)
        left = sum(piece.nbytes for piece in found[1:]) if found else 0
        while left > 0:  # in steps of 5 ms, as the speed may change meanwhile
            left -= 0.005e6 * self.mbps()
            time.sleep(0.005)
        return found


line = Line(engine.store.tier("objects"))
ask = Ask(max_tokens=24)
engine.answer(question, ask)  # what a first question does once
full = engine.answer(question, Ask(reuse=False, max_tokens=24))
text_s = full.trace.prefill_s
print(f"Computing the whole prompt takes {text_s:.2f} s; the answer: {full.text.strip()}")

# %% [markdown]
# ## Levels by the deadline
#
# The same question over lines from fast to slow, each time due after six tenths of the time that computing all of it
# takes. What came as text was computed.

# %%
deadline = Ask(max_tokens=24, deadline_s=0.6 * text_s)
raw_mb = kilobytes["raw"] * tokens / 1e3
speeds = [raw_mb / text_s * times for times in (8.0, 2.0, 0.7, 0.3, 0.02)]
for mbps in speeds:
    line.set((0, mbps))
    answer = engine.answer(question, deadline)
    stream = answer.trace.stream
    came = ", ".join(
        f"{level} {n}" for level, n in Counter(piece.level for piece in stream.pieces).items()
    )
    held = "missed" if answer.trace.is_late else "held"
    took = f"{answer.trace.ttft_s:.2f} s of {deadline.deadline_s:.2f}"
    print(f"{mbps:7.2f} MB/s: first token after {took}, {held};", end=" ")
    print(f"{answer.text.strip()!r}; pieces: {came}")

# %% [markdown]
# ## One stream, and a line that drops
#
# The line carries enough for 8 bits, then falls to a fifth of that. Each piece is decided by what the line carried
# during the last one.

# %%
line.set((0, speeds[1]), (deadline.deadline_s / 4, speeds[1] / 5))
answer = engine.answer(question, deadline)
pieces = answer.trace.stream.pieces
colors = dict(
    zip(
        ("text", *LEVELS),
        ("#bdbdbd", *plt.cm.viridis([0.0, 0.2, 0.4, 0.6, 0.8, 0.95])),
        strict=True,
    )
)
figure, axes = plt.subplots(figsize=(7, 2.6), layout="constrained")
for number, piece in enumerate(pieces, 1):
    width = max(piece.seconds, 0.004)
    axes.barh(
        number,
        width,
        left=piece.began_s,
        color=colors[piece.level],
        edgecolor="black",
        linewidth=0.5,
    )
    axes.text(piece.began_s + width, number, f" {piece.level}", va="center", fontsize=8)
axes.axvline(deadline.deadline_s, color="tab:red", linewidth=1)
axes.axvline(answer.trace.ttft_s, color="black", linewidth=1, linestyle=":")
axes.axvspan(deadline.deadline_s / 4, deadline.deadline_s, color="tab:orange", alpha=0.12)
axes.invert_yaxis()
axes.set(
    xlabel="seconds (red: due; dotted: first token; shaded: the line has dropped)", ylabel="piece"
)
axes.set_yticks(range(1, len(pieces) + 1))
plt.show()
print(answer.text.strip())

# %%
engine.close()
shutil.rmtree(folder)
