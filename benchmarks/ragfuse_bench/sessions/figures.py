"""The figures of the AttentionStore paper that a simulation yields: `ragfuse bench paper as-fig13` and so on.

Each is a table beside the paper's numbers. Hit rates, times and costs are simulated for the paper's own models on its
own servers, as `server.py` reckons them; conversations are drawn from counts of real ones, which are shorter than the
paper's. Writing behind (figure 20) is reckoned alone, without a queue.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ragfuse_bench.figure import LINE, Figure, Rows, Wanted
from ragfuse_bench.sessions.run import SETTINGS, Bench, Load, lengths_of, paper_load, shown
from ragfuse_bench.sessions.server import DISK_PRICE, GB, GPU_PRICE, MEMORY_PRICE, PCIE_BPS, SERVERS, Server
from ragfuse_bench.sessions.simulate import Given, Tally
from ragfuse_bench.sessions.windows import required_capacity

_, MEMORY, DISK = SETTINGS[1]
HBM = 10 * GB
TTL_S = 3600.0
RATIOS = (0.05, 0.10, 0.15, 0.25, 0.50, 1.00)
"""RCC/CCpUT, of figure 23."""
STEPS, WRITE_BATCH, WRITE_TOKENS = 20, 16, (1000, 1200, 1400, 1600)
"""Of figure 20: decoding steps, prompts at once, their tokens."""

PAPER = MappingProxyType(
    {
        "fig13": {"LLaMA-13B": 0.86, "LLaMA-65B": 0.71, "LLaMA-70B": 0.89, "Falcon-40B": 0.90},
        "fig14": {"LLaMA-13B": 0.85, "LLaMA-65B": 0.61, "LLaMA-70B": 0.87, "Falcon-40B": 0.86},
        "fig17": {"LLaMA-13B": 0.70, "LLaMA-65B": 0.43, "LLaMA-70B": 0.66, "Falcon-40B": 0.68},
        "fig22": {"LLaMA-13B": 0.176, "LLaMA-65B": 0.415, "LLaMA-70B": 0.181, "Falcon-40B": 0.184},
        "fig24": {"LLaMA-13B": 0.034, "LLaMA-65B": 0.017, "LLaMA-70B": 0.077, "Falcon-40B": 0.191},
        "128G/2T": {"look-ahead": 0.40, "lru": 0.129, "fifo": 0.095},
        "128G/10T": {"look-ahead": 0.86, "lru": 0.58, "fifo": 0.48},
    }
)
"""What the paper says in words (sections 4.2 and 4.3); for 128G/2T its own rate follows from LRU's and FIFO's."""


def _load(wanted: Wanted) -> Load:
    return paper_load(lengths_of(wanted.folder), wanted.quick)


def _each(wanted: Wanted, **changes: Any) -> Iterator[tuple[str, Server, Load, Bench, Given]]:
    load, bench = _load(wanted), Bench(wanted.console)
    for name, server in SERVERS.items():
        yield name, server, load, bench, replace(Given(server, MEMORY, DISK, "look-ahead"), **changes)


def _hits(wanted: Wanted) -> Rows:
    """Figure 13: hit rates of each model with 128 GB and 10 TB."""
    return [
        {"what": name, **shown(bench.run(load, given, name)), "paper_hit": PAPER["fig13"][name]}
        for name, _, load, bench, given in _each(wanted)
    ]


def _pairs(wanted: Wanted) -> Iterator[tuple[str, Server, Tally, Tally]]:
    """Each model with KV kept and with all recomputed."""
    for name, server, load, bench, given in _each(wanted):
        kept = bench.run(load, given, name)
        yield name, server, kept, bench.run(load, replace(given, policy="none"), f"{name}: recomputed")


def _first_tokens(wanted: Wanted) -> Rows:
    """Figure 14: time to the first token once a turn is taken, and how much shorter it is."""
    rows: Rows = []
    for name, _, kept, again in _pairs(wanted):
        kept_s, again_s = kept.first_token_s / kept.turns, again.first_token_s / again.turns
        paper = PAPER["fig14"][name]
        rows.append(
            {
                "what": name,
                "recompute_s": again_s,
                "ttft_s": kept_s,
                "saved": 1 - kept_s / again_s,
                "paper_saved": paper,
            }
        )
    return rows


def _costs(wanted: Wanted) -> Rows:
    """Figure 17: dollars for the GPUs' time, and for memory and disk beside it."""
    rows: Rows = []
    storage = MEMORY / GB * MEMORY_PRICE + DISK / GB * DISK_PRICE
    for name, server, kept, again in _pairs(wanted):
        gpus = server.gpus * GPU_PRICE
        cost, full = kept.gpu_s / 3600 * (gpus + storage), again.gpu_s / 3600 * gpus
        shares = {"saved": 1 - cost / full, "storage_share": storage / (gpus + storage)}
        rows.append({"what": name, "recompute_usd": full, "usd": cost, **shares, "paper_saved": PAPER["fig17"][name]})
    return rows


def _writing(wanted: Wanted) -> Rows:
    """Figure 20: prefilling, 20 steps and saving, one after the other and with saving behind the steps."""
    server = replace(SERVERS["LLaMA-13B"], gpus=1, batch=WRITE_BATCH, usual_tokens=WRITE_TOKENS[0])
    rows: Rows = []
    for tokens in WRITE_TOKENS:
        prefill_s, steps_s = WRITE_BATCH * tokens * server.prefill_s, STEPS * server.step_s
        save_s = WRITE_BATCH * tokens * server.token_bytes / PCIE_BPS
        after_s, behind_s = prefill_s + steps_s + save_s, prefill_s + max(steps_s, save_s)
        rows.append({"tokens": tokens, "after_s": after_s, "behind_s": behind_s, "saved": 1 - behind_s / after_s})
    return rows


def _policies(wanted: Wanted) -> Rows:
    """Figure 21: look-ahead, LRU and FIFO, with 2 TB and with 10 TB."""
    load, bench, rows = _load(wanted), Bench(wanted.console), []
    for name, memory, disk in SETTINGS:
        for policy, paper in PAPER[name].items():
            tally = bench.run(load, Given(SERVERS["LLaMA-13B"], memory, disk, policy), f"{name}: {policy}")
            rows.append({"what": name, "method": policy, **shown(tally), "paper_hit": paper})
    return rows


def _overflow(wanted: Wanted) -> Rows:
    """Figure 22: the hit rate where KV is kept with its positions, so that a cut invalidates it."""
    rows: Rows = []
    for name, _, load, bench, given in _each(wanted):
        hit = bench.run(load, given, name).rates()["hit"]
        coupled = bench.run(load, replace(given, decoupled=False), f"{name}: coupled").rates()["hit"]
        lost = {"lost": hit - coupled, "paper_lost": PAPER["fig22"][name]}
        rows.append({"what": name, "hit": hit, "coupled_hit": coupled, **lost})
    return rows


def _capacities(wanted: Wanted) -> Rows:
    """Figure 23: the hit rate by capacity, as a share of what keeps every conversation of an hour at its longest."""
    load, bench, server = _load(wanted), Bench(wanted.console), SERVERS["LLaMA-13B"]
    per_ttl = sessions_per(load, TTL_S)
    rows: Rows = []
    for ratio in RATIOS:
        room = required_capacity(ratio, per_ttl, server.window or 0, server.token_bytes)
        memory = min(MEMORY, room)
        given = Given(server, memory, room - memory, "look-ahead", ttl_s=TTL_S)
        tally = bench.run(replace(load, share=1.0), given, f"RCC/CCpUT {ratio:g}")
        found = {
            "capacity_tb": room / 1e12,
            **shown(tally),
            "turns_per_s": tally.turns / (tally.ended_s - tally.begun_s),
        }
        rows.append({"ratio": ratio, **found, "paper_hit": {0.10: 0.51, 0.25: 0.98}.get(ratio)})
    return rows


def sessions_per(load: Load, seconds: float) -> float:
    """DSpUT: the most conversations that begin within so many seconds."""
    starts = sorted(talk[0].pause_s if talk[0].at_s is None else talk[0].at_s for talk in load.talks)
    most = first = 0
    for last, start in enumerate(starts):
        while start - starts[first] > seconds:
            first += 1
        most = max(most, last - first + 1)
    return float(most)


def _media(wanted: Wanted) -> Rows:
    """Figure 24: KV in 10 GB of GPU memory, with 128 GB of memory beside it, and with 10 TB of disk."""
    rows: Rows = []
    for name, _, load, bench, given in _each(wanted):
        for media, memory, disk, paper in (
            ("GPU", HBM, 0, 0.0),
            ("GPU + memory", HBM + MEMORY, 0, PAPER["fig24"][name]),
            ("GPU + memory + disk", HBM + MEMORY, DISK, PAPER["fig13"][name]),
        ):
            tally = bench.run(load, replace(given, memory_bytes=memory, disk_bytes=disk), f"{name}: {media}")
            rows.append({"what": name, "method": media, **shown(tally), "paper_hit": paper})
    return rows


# pictures


def bars(*keys: str) -> Any:
    """Draws these columns as bars side by side, a group for each row."""

    def draw(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
        named = [[str(row[key]) for key in ("what", "method", "tokens") if key in row] for row in rows]
        crowded = len(rows) * max(len(part) for parts in named for part in parts) > LINE
        slanted = {"rotation": 35, "ha": "right", "rotation_mode": "anchor"} if crowded else {}
        width = 0.8 / len(keys)
        for index, key in enumerate(keys):
            at = [group + (index - (len(keys) - 1) / 2) * width for group in range(len(rows))]
            label = key.replace("_", " ").replace("paper", "the paper:")
            axes.bar(at, [row[key] for row in rows], width, label=label)
        labels = [(", " if crowded else "\n").join(parts) for parts in named]
        axes.set_xticks(range(len(rows)), labels, fontsize=7, **slanted)
        axes.margins(y=0.2)  # room for the legend
        axes.legend(fontsize=8)

    return draw


def _draw_capacities(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    ratios = [row["ratio"] for row in rows]
    for key, label in (("hit", "of all turns"), ("later_hit", "of turns with a history")):
        axes.plot(ratios, [row[key] for row in rows], "o-", label=f"hits {label}")
    paper = [(row["ratio"], row["paper_hit"]) for row in rows if row["paper_hit"] is not None]
    axes.plot(*zip(*paper, strict=True), "s--", color="tab:grey", label="the paper")
    axes.set_xlabel("capacity over that of every conversation of an hour at its longest (RCC/CCpUT)")
    axes.set_ylim(0, 1.02)
    axes.legend(fontsize=8)


def _figure(title: str, paper: str, measure: Any, columns: tuple[str, ...], draw: Any, given: str) -> Figure:
    def said(wanted: Wanted) -> str:
        return given.replace("9,000", "1,500").replace(" GB", "/6 GB") if wanted.quick else given

    return Figure(title, paper, measure, columns, draw, given=said, is_simulated=True)


_LOAD = (
    "9,000 conversations drawn from counts of real ones, which are shorter than the paper's, Poisson 1/s; 128 GB, 10 TB"
)
_TIMES = f"{_LOAD}; linear prefilling at the paper's rate for LLaMA-65B"

ATTENTIONSTORE: Mapping[str, Figure] = MappingProxyType(
    {
        "as-fig13": _figure(
            "hit rates by model",
            "86%, 71%, 89% and 90% for LLaMA-13B, 65B, 70B and Falcon-40B.",
            _hits,
            ("what", "hit", "ram", "disk", "later_hit", "paper_hit"),
            bars("hit", "paper_hit"),
            _LOAD,
        ),
        "as-fig14": _figure(
            "time to the first token, against computing all again",
            "85%, 61%, 87% and 86% less.",
            _first_tokens,
            ("what", "recompute_s", "ttft_s", "saved", "paper_saved"),
            bars("saved", "paper_saved"),
            f"{_TIMES}; from being taken to the first token, without the wait in the queue",
        ),
        "as-fig17": _figure(
            "cost at the paper's prices, against computing all again",
            "70%, 43%, 66% and 68% less; storage is 16.4%, 9.0%, 9.0% and 9.0% of the cost.",
            _costs,
            ("what", "recompute_usd", "usd", "saved", "storage_share", "paper_saved"),
            bars("saved", "paper_saved"),
            f"{_TIMES}; decoding in full batches, which takes most of the GPUs' time here and little of the paper's",
        ),
        "as-fig20": _figure(
            "saving behind decoding, against saving afterwards",
            "13% to 15% less time for prompts of 1K to 1.6K tokens and 20 steps.",
            _writing,
            ("tokens", "after_s", "behind_s", "saved"),
            bars("after_s", "behind_s"),
            "reckoned for LLaMA-13B on one A100, batches of 16, PCIe at 26 GB/s",
        ),
        "as-fig21": _figure(
            "eviction policies",
            "128G/2T: 27 points more than LRU (12.9%) and 31 more than FIFO (9.5%); 128G/10T: 86%, "
            "58% and 48%. Over 99.6% of look-ahead's hits are in memory, .5% to .6% of turns with the others.",
            _policies,
            ("what", "method", "hit", "ram", "disk", "later_hit", "gpu_hours", "paper_hit"),
            bars("hit", "paper_hit"),
            f"LLaMA-13B, {_LOAD} or 2 TB",
        ),
        "as-fig22": _figure(
            "hit rates lost where a cut invalidates KV",
            "17.6, 41.5, 18.1 and 18.4 points.",
            _overflow,
            ("what", "hit", "coupled_hit", "lost", "paper_lost"),
            bars("lost", "paper_lost"),
            _LOAD,
        ),
        "as-fig23": _figure(
            "hit rates by capacity",
            "51% at RCC/CCpUT = 0.1 and 98% at 0.25, where the throughput is best, too; TTL of an hour.",
            _capacities,
            ("ratio", "capacity_tb", "hit", "later_hit", "turns_per_s", "paper_hit"),
            _draw_capacities,
            f"LLaMA-13B, {_LOAD.partition(';')[0]}; TTL of an hour; DSpUT: the most that begin within one",
        ),
        "as-fig24": _figure(
            "GPU memory, memory and disk",
            "about 0 in 10 GB of GPU memory; 3.4%, 1.7%, 7.7% and 19.1% with memory; 86%, 71%, 89% and 90% with disk.",
            _media,
            ("what", "method", "hit", "later_hit", "paper_hit"),
            bars("hit", "paper_hit"),
            _LOAD,
        ),
    }
)
