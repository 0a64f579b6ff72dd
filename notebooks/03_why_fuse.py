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
# # Why fuse
#
# A chunk's KV depends on the text before it. Take it from a store as it is, and the chunk has never seen its
# neighbours: fast, and further from what the model would have said. Recompute everything, and nothing was saved.
# Between the two lies fusing: a small share of the rows is recomputed. This notebook looks at what is lost,
# where, and what the share buys, on a few questions that come along (`pip install 'ragfuse-kv[demo]'`). A few
# questions show the shape; the [results](../docs/results.md) have the numbers.

# %%
import matplotlib.pyplot as plt
import torch
from ragfuse_bench.deviation import attention_deviation, attention_of, kv_deviation
from ragfuse_bench.options import QualityOptions
from ragfuse_bench.presets import bench_model
from ragfuse_bench.quality.cases import Packing, read_cases
from ragfuse_bench.quality.methods import methods_of
from ragfuse_bench.quality.run import Plan, drawn, measure
from ragfuse_bench.quality.table import results_of
from rich.console import Console

from ragfuse import Settings
from ragfuse.calibration.methods import Lab, Method

settings = Settings(dtype="float32")  # not every CPU is quick in bfloat16
model = bench_model(settings.model, settings.dtype, settings.device, settings.home)
lab = Lab(model)
packing = Packing(lambda text: len(model.tokens(text)), passages=3)
case = min(drawn(read_cases("held-out", packing), 12), key=lambda case: sum(map(len, case.chunks)))
FULL, REUSE = Method("full", 1.0), Method("none", 0.0, "alone")
lab.hold(case, [REUSE])
prompt = lab.prompt(case, "alone")
chunks = [
    span
    for segment, span in zip(prompt.segments, prompt.spans, strict=True)
    if segment.kind == "chunk"
]
print(f"{len(prompt)} tokens, chunks at {chunks}")
print(f"{case.question} ({case.answers[0]})")

# %% [markdown]
# ## What plain reuse loses: attention between chunks
#
# Left, the model's own prefill: tokens of later chunks look back at earlier ones. Right, chunks that were encoded
# alone: each looks at itself. What stood between the diagonal blocks is gone (figure 4 of the CacheBlend paper). One
# layer, all heads.

# %%
layer = model.n_layers // 2
total = len(prompt)
whole = attention_of(model, model.full_prefill(prompt.token_ids), total - 1)[layer].sum(0)
alone = torch.zeros_like(whole)
for lo, hi in chunks:
    own = attention_of(model, model.full_prefill(prompt.token_ids[lo:hi]), hi - lo - 1)[layer].sum(
        0
    )
    alone[lo : hi - 1, lo:hi] = own
asked = attention_of(model, lab.prefill(REUSE, prompt), total - chunks[-1][1])[layer].sum(0)
alone[chunks[-1][1] - 1 :] = asked

shown = slice(chunks[0][0], total)
figure, panels = plt.subplots(1, 2, figsize=(9.5, 4.6), layout="constrained", sharey=True)
for axes, (name, attention) in zip(
    panels, (("full prefill", whole), ("plain reuse", alone)), strict=True
):
    picture = axes.imshow(
        (attention[shown, shown] + 1e-4).log10(), cmap="magma", vmin=-3, vmax=0, aspect="auto"
    )
    for lo, _ in [*chunks[1:], (chunks[-1][1], 0)]:
        axes.axvline(lo - shown.start, color="tab:cyan", linewidth=0.6)
        axes.axhline(lo - shown.start, color="tab:cyan", linewidth=0.6)
    axes.set(title=name, xlabel="looked at: token of the prompt")
panels[0].set_ylabel("looking: token of the prompt")
figure.colorbar(picture, ax=panels, label="attention, log10")
plt.show()

# %%
between = torch.zeros_like(whole, dtype=torch.bool)
for lo, hi in chunks[1:]:
    between[lo : hi - 1, chunks[0][0] : lo] = True
share = whole[between].sum() / whole[chunks[1][0] : chunks[-1][1] - 1].sum()
print(
    f"{share:.0%} of the later chunks' attention goes to earlier chunks; with plain reuse {alone[between].sum():.0f}"
)

# %% [markdown]
# ## Which tokens changed: KV deviation
#
# How far each token's reused keys and values are from those of the full prefill. The first chunk stands where it was
# encoded but for the prompt's beginning; in later ones a few tokens stick out, and they are the same ones on
# neighbouring layers. That is what selecting goes by (the paper's figures 7 and 8).

# %%
away = kv_deviation(lab.prefill(REUSE, prompt).kv, model.full_prefill(prompt.token_ids).kv)
inside = torch.cat([torch.arange(lo, hi) for lo, hi in chunks])
figure, (left, right) = plt.subplots(
    1, 2, figsize=(9.5, 3), layout="constrained", width_ratios=(3, 2)
)
for index, color in (
    (model.n_layers // 4, "tab:blue"),
    (layer, "tab:orange"),
    (3 * model.n_layers // 4, "tab:green"),
):
    left.plot(
        away[index] / away[index, inside].mean(), color=color, linewidth=0.7, label=f"layer {index}"
    )
    ranked = away[index, inside].sort(descending=True).values
    right.plot(
        torch.linspace(0, 100, len(ranked)),
        ranked / ranked.mean(),
        color=color,
        label=f"layer {index}",
    )
for lo, _ in chunks[1:]:
    left.axvline(lo, color="black", linewidth=0.5)
left.set(xlabel="token of the prompt, lines where chunks begin", ylabel="KV deviation, mean = 1")
right.set(xlabel="tokens, highest first (%)", ylabel="KV deviation, mean = 1")
right.legend(fontsize=8)
plt.show()

# %%
top = away[layer, inside].sort(descending=True).values.square()
tenth = len(top) // 10
print(
    f"A tenth of the tokens holds {top[:tenth].sum() / top.sum():.0%} of the squared deviation on layer {layer}."
)

# %% [markdown]
# ## What computing some rows again gives back
#
# Attention of the question's tokens, compared with the full prefill's (the paper's figure 6): by the rows that
# deviate most (`hkvd`), and by as many at random.

# %%
rows = len(prompt.segments[-1].tokens)
wanted = attention_of(model, model.full_prefill(prompt.token_ids), rows)
ratios = (0.0, 0.05, 0.15, 0.4, 1.0)
figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
for policy, style in (("hkvd", "o-"), ("random", "s--")):
    found = [
        attention_of(model, lab.prefill(Method(policy, ratio, "alone"), prompt), rows)
        for ratio in ratios
    ]
    line = [float(attention_deviation(mine, wanted).mean()) for mine in found]
    axes.plot(
        [100 * ratio for ratio in ratios], [value / line[0] for value in line], style, label=policy
    )
axes.set(
    xlabel="rows recomputed (%)", ylabel="attention deviation, plain reuse = 1", ylim=(0, None)
)
axes.legend()
plt.show()

# %% [markdown]
# ## Quality and time against the share
#
# The distance of the next-token distributions to full prefill's (KL along its own answer, plain reuse = 1), and how
# much faster the first token comes. `hkvd@alone` is the paper's own method. `lexical` is what the embedded model
# comes with: its chunks were encoded behind filler text, and the rows are those that share words with the question.

# %%
N = 2
names, shares = ["none", "hkvd@alone", "lexical"], [0.05, 0.15]
options = QualityOptions(("held-out",), limit=N, answers=False, passages=3)
plan = Plan(options, tuple(methods_of(names, shares, model)))
results = results_of(measure(plan, model, Console(quiet=True)))

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.4), layout="constrained")
reuse = next(row for row in results if row["method"] == "none")
for axes, key in ((left, "kl_over_reuse"), (right, "ttft_x")):
    axes.plot(0, reuse[key], "D", color="tab:grey", label="none (plain reuse)")
    for color, name in zip(("tab:blue", "tab:orange"), names[1:], strict=True):
        mine = sorted(
            (row for row in results if row["method"] == name), key=lambda row: row["ratio"]
        )
        axes.plot(
            [100 * row["ratio"] for row in mine],
            [row[key] for row in mine],
            "o-",
            color=color,
            label=name,
        )
    axes.plot(100, 0 if key == "kl_over_reuse" else 1, "k*", label="full prefill")
    axes.set(xlabel="rows recomputed (%)", ylim=(0, None))
left.set_ylabel("KL to full prefill, plain reuse = 1")
right.set_ylabel("first token, times faster than full prefill")
left.legend(fontsize=8)
figure.suptitle(f"{settings.model}, n = {N}, {reuse['tokens']:.0f} prompt tokens", fontsize=9)
plt.show()

# %%
for row in sorted(results, key=lambda row: -row["ttft_x"]):
    over = f"{row['kl_over_reuse']:.2f}" if row.get("kl_over_reuse") is not None else "0"
    ratio = f"{row['ratio']:.0%}" if row["ratio"] is not None else ""
    print(
        f"{row['method']:11} {ratio:>4}  KL of reuse's {over:>5}  same first choice {row['top1']:.0%}"
    )
lab.close()
