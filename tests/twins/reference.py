"""Slow, obvious twins of every numeric routine, to compare the fast ones with.

Plain loops or dense masks, float64, no blocks, no buffers, no hooks. Nothing here is shared with
the package but its nouns: what a twin and its fast sibling agree on was written twice.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ragfuse.types.kv import ChunkKV, RopeLayout


def attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    at: Sequence[int],
    positions: Sequence[int],
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """float64 [R, Hq, Dv] of query [Hq, R, D] standing `at` positions over keys [H, T, D]: one
    weight at a time.
    """
    query, keys, values = query.double().cpu(), keys.double().cpu(), values.double().cpu()
    heads, rows = query.shape[:2]
    out = torch.zeros(rows, heads, values.shape[-1], dtype=torch.float64)
    for head in range(heads):
        shared = head // (heads // keys.shape[0])
        for row in range(rows):
            seen = [
                k
                for k, p in enumerate(positions)
                if p <= at[row] and (window is None or p > at[row] - window)
            ]
            scores = [(query[head, row] * keys[shared, k]).sum().item() * scaling for k in seen]
            if softcap is not None:
                scores = [softcap * math.tanh(score / softcap) for score in scores]
            top = max(scores + ([] if sinks is None else [float(sinks[head])]))
            weights = [math.exp(score - top) for score in scores]
            total = sum(weights) + (0.0 if sinks is None else math.exp(float(sinks[head]) - top))
            for weight, k in zip(weights, seen, strict=True):
                out[row, head] += weight / total * values[shared, k]
    return out


def shifted(keys: Tensor, delta: int, layout: RopeLayout) -> Tensor:
    """float64 copy of keys [H, n, D], every pair of dims turned by hand."""
    half = len(layout.inv_freq)
    turns = [
        (math.cos(frequency * delta), math.sin(frequency * delta)) for frequency in layout.inv_freq
    ]
    out: list[list[list[float]]] = keys.double().tolist()
    for row in (row for head in out for row in head):
        for pair, (cos, sin) in enumerate(turns):
            a, b = (pair, pair + half) if layout.pairing == "half" else (2 * pair, 2 * pair + 1)
            x, y = row[layout.lo + a], row[layout.lo + b]
            row[layout.lo + a], row[layout.lo + b] = x * cos - y * sin, y * cos + x * sin
    return torch.tensor(out, dtype=torch.float64)


def deviation(new: Sequence[Tensor], old: Sequence[Tensor]) -> list[float]:
    """Squared distance per row between tensors [H, R, D] of new and old KV, summed over heads, dims
    and tensors.
    """
    total = [0.0] * new[0].shape[1]
    for a, b in zip(new, old, strict=True):
        for head in (a.double() - b.double()).tolist():
            for row, values in enumerate(head):
                total[row] += sum(value * value for value in values)
    return total


def nearness(words: Sequence[int], asked: Sequence[int], offer: Sequence[int]) -> list[float]:
    """Per row the weight of the question's words around it; words of -1 are none."""
    said = [words[row] for row in offer]
    near = []
    for at in range(len(words)):
        total = 0.0
        for row in offer:
            if (
                abs(row - at) <= 24
                and words[row] != -1
                and any(words[row] == words[one] for one in asked)
            ):
                total += math.log(len(offer) / said.count(words[row])) * math.exp(
                    -abs(row - at) / 6
                )
        near.append(total)
    return near


def top(scores: Sequence[float], count: int) -> list[int]:
    """Indices of the `count` highest scores, in order."""
    ranked = sorted(range(len(scores)), key=lambda index: -scores[index])
    return sorted(ranked[:count])


def shares(ratio: float, first: int, n_layers: int) -> list[float]:
    """Share of the offer computed in each layer from `first` on: falling around the mean `ratio`,
    in eight stairs.

    A stair is the mean of a straight line over its layers.
    """
    n = n_layers - first
    if n == 1:
        return [ratio] * n
    spread = min(0.5 * ratio, 1.0 - ratio)
    line = [ratio + spread * (1 - 2 * step / (n - 1)) for step in range(n)]
    width = math.ceil(n / 8)
    stairs = [line[at : at + width] for at in range(0, n, width)]
    return [sum(stair) / len(stair) for stair in stairs for _ in stair]


def budget(share: float, candidate_rows: int, forced: int) -> int:
    """Rows that a share of the offer allows; from 32 on, all computed rows fill whole tiles
    of 16.
    """
    rows = round(share * candidate_rows)
    if 32 <= rows < candidate_rows:
        return max(0, min(candidate_rows, round((rows + forced) / 16) * 16 - forced))
    return rows


@dataclass
class Offer:
    """What a policy's twin is told: offered rows, their places in their chunks, what the question
    looks at.
    """

    rows: list[int]
    offset: list[int]
    forced: int
    ratio: float
    n_layers: int
    score: list[float]


@dataclass
class Fused:
    """What a fused prefill leaves: logits [V], keys and values per layer [H, T, D], offered rows
    computed per layer.
    """

    logits: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    rows: list[list[int]]


@dataclass(frozen=True)
class Cached:
    """A cached run: rows lo:hi, its KV at positions from 0, the position of its first token,
    whether it is blended.
    """

    lo: int
    hi: int
    kv: ChunkKV
    start: int
    blend: bool


class LlamaTwin:
    """A Llama written out: every layer computes chosen rows only, under a dense mask, in
    float64.
    """

    def __init__(self, model: PreTrainedModel, says: Callable[[int], str] = str) -> None:
        self.says = says
        self.weights = {
            name: value.detach().double().cpu() for name, value in model.state_dict().items()
        }
        self.config = model.config
        inv_freq = model.model.rotary_emb.inv_freq.double().tolist()
        self.layout = RopeLayout(tuple(inv_freq))

    def fuse(
        self,
        ids: Sequence[int],
        positions: Sequence[int],
        runs: Sequence[Cached],
        policy: str,
        ratio: float,
    ) -> Fused:
        """One fused prefill by the policy of that name."""
        n_tokens, n_layers = len(ids), self.config.num_hidden_layers
        cached = {row: run for run in runs for row in range(run.lo, run.hi)}
        cached.pop(n_tokens - 1, None)
        candidate_rows = sorted(row for row, run in cached.items() if run.blend)
        forced = [row for row in range(n_tokens) if row not in cached]
        offer = Offer(
            candidate_rows,
            [row - cached[row].lo for row in candidate_rows],
            len(forced),
            ratio,
            n_layers,
            [0.0] * len(candidate_rows),
        )
        if policy.startswith("query"):
            looked = self._look(ids, positions, runs, forced)
            offer.score = [looked[row] for row in candidate_rows]
        if policy == "lexical":
            said = [self.says(id).lower() for id in ids]
            words = [said.index(one) if one.isalnum() else -1 for one in said]
            near = nearness(
                words,
                [row for row in forced if row >= max((run.hi for run in runs), default=0)],
                candidate_rows,
            )
            near = near if any(near) else nearness(words, forced, candidate_rows)
            offer.score = [near[row] for row in candidate_rows]
        choose = POLICIES[policy](offer)
        placed = self._place(n_tokens, runs)
        hidden = self.weights["model.embed_tokens.weight"][list(ids)]
        alive, left = candidate_rows, Fused(torch.empty(0), [], [], [])
        measured: list[float] | None = None
        for layer in range(n_layers):
            new_keys, new_values = self._project(layer, hidden, positions)
            old_keys, old_values = placed[layer]

            def measure(
                rows: list[int],
                k: Tensor = new_keys,
                v: Tensor = new_values,
                old_k: Tensor = old_keys,
                old_v: Tensor = old_values,
            ) -> list[float]:
                return deviation([k[:, rows], v[:, rows]], [old_k[:, rows], old_v[:, rows]])

            alive = choose(
                layer, alive, measured if measured is not None else measure(alive), measure(alive)
            )
            measured = measure(alive) if layer >= 1 else None
            rows = sorted(alive + forced)
            keys, values = old_keys.clone(), old_values.clone()
            keys[:, rows], values[:, rows] = new_keys[:, rows], new_values[:, rows]
            for row in set(candidate_rows) - set(alive):
                asked = [other for other in alive if cached[other] is cached[row]]
                for part, new, old in (
                    (keys, new_keys, old_keys),
                    (values, new_values, old_values),
                ):
                    change = (new[:, asked] - old[:, asked]).sum(1)
                    part[:, row] += change / (len(asked) + 24)
            hidden = self._layer(layer, hidden, keys, values, rows, positions)
            left.keys.append(keys)
            left.values.append(values)
            left.rows.append(alive)
        final = self._norm(hidden[-1:], "model.norm.weight")
        left.logits = (final @ self.weights["lm_head.weight"].T)[0]
        return left

    def _look(
        self,
        ids: Sequence[int],
        positions: Sequence[int],
        runs: Sequence[Cached],
        forced: list[int],
    ) -> list[float]:
        """Attention that the question's rows pay to every row over the reused cache, summed over
        heads and rows.

        The question is what is computed behind the last run, and the layers are those of the third
        quarter.
        """
        n_layers = self.config.num_hidden_layers
        watched = [
            layer
            for layer in range(n_layers)
            if n_layers // 2 <= layer < max(3 * n_layers // 4, n_layers // 2 + 1)
        ]
        asking = [row for row in forced if row >= max(run.hi for run in runs)]
        hidden = self.weights["model.embed_tokens.weight"][list(ids)]
        total = torch.zeros(len(ids), dtype=torch.float64)
        for layer, (keys, values) in enumerate(self._place(len(ids), runs)):
            new_keys, new_values = self._project(layer, hidden, positions)
            keys[:, forced], values[:, forced] = new_keys[:, forced], new_values[:, forced]
            for row in asking if layer in watched else []:
                if layer == n_layers - 1 and row < len(ids) - 1:
                    continue  # only the last row goes through the last layer
                query = self._heads(
                    layer, hidden[row : row + 1], "q_proj", positions[row : row + 1]
                )
                for head in range(query.shape[0]):
                    shared = head // (query.shape[0] // keys.shape[0])
                    scores = keys[shared, : row + 1] @ query[head, 0] * query.shape[-1] ** -0.5
                    total[: row + 1] += torch.softmax(scores, 0)
            hidden = self._layer(layer, hidden, keys, values, forced, positions)
        return total.tolist()

    def _place(self, n_tokens: int, runs: Sequence[Cached]) -> list[tuple[Tensor, Tensor]]:
        placed = []
        for layer in range(self.config.num_hidden_layers):
            heads, dim = self.config.num_key_value_heads, self.config.head_dim
            keys, values = torch.zeros(2, heads, n_tokens, dim, dtype=torch.float64)
            for run in runs:
                kv = run.kv.layers[layer]
                keys[:, run.lo : run.hi] = shifted(kv.keys, run.start, self.layout)
                values[:, run.lo : run.hi] = kv.values.double().cpu()
            placed.append((keys, values))
        return placed

    def _layer(
        self,
        layer: int,
        hidden: Tensor,
        keys: Tensor,
        values: Tensor,
        rows: list[int],
        positions: Sequence[int],
    ) -> Tensor:
        """Hidden states [T, d] with the given rows taken through the layer."""
        name, out = f"model.layers.{layer}", hidden.clone()
        query = self._heads(layer, hidden[rows], "q_proj", [positions[row] for row in rows])
        groups = query.shape[0] // keys.shape[0]
        scores = query @ keys.repeat_interleave(groups, 0).transpose(1, 2) * query.shape[-1] ** -0.5
        at, seen = torch.tensor(positions)[rows], torch.tensor(positions)
        scores = scores.masked_fill(seen[None, None] > at[None, :, None], -math.inf)
        attended = torch.softmax(scores, -1) @ values.repeat_interleave(groups, 0)
        flat = attended.transpose(0, 1).reshape(len(rows), -1)
        after = hidden[rows] + flat @ self.weights[f"{name}.self_attn.o_proj.weight"].T
        normed = self._norm(after, f"{name}.post_attention_layernorm.weight")
        gate, up, down = (
            self.weights[f"{name}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down")
        )
        inner = normed @ gate.T
        out[rows] = after + (inner * torch.sigmoid(inner) * (normed @ up.T)) @ down.T
        return out

    def _project(
        self, layer: int, hidden: Tensor, positions: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        normed = self._norm(hidden, f"model.layers.{layer}.input_layernorm.weight")
        values = normed @ self.weights[f"model.layers.{layer}.self_attn.v_proj.weight"].T
        heads = self.config.num_key_value_heads
        return self._heads(layer, hidden, "k_proj", positions), values.view(
            len(hidden), heads, -1
        ).transpose(0, 1)

    def _heads(self, layer: int, hidden: Tensor, part: str, positions: Sequence[int]) -> Tensor:
        """Rotated queries or keys [heads, R, D]."""
        normed = self._norm(hidden, f"model.layers.{layer}.input_layernorm.weight")
        flat = normed @ self.weights[f"model.layers.{layer}.self_attn.{part}.weight"].T
        states = flat.view(len(hidden), -1, self.config.head_dim).transpose(0, 1)
        rows = [
            shifted(states[:, [row]], position, self.layout)
            for row, position in enumerate(positions)
        ]
        return torch.cat(rows, 1)

    def _norm(self, hidden: Tensor, name: str) -> Tensor:
        size = (hidden**2).mean(-1, keepdim=True) + self.config.rms_norm_eps
        return hidden / size.sqrt() * self.weights[name]


Choose = Callable[[int, list[int], list[float], list[float]], list[int]]
"""(layer, rows alive, deviations measured in the layer before, in this layer) -> rows of this
layer.
"""


def _hkvd(offer: Offer) -> Choose:
    plan = [1.0, *shares(offer.ratio, 1, offer.n_layers)]

    def choose(layer: int, alive: list[int], before: list[float], here: list[float]) -> list[int]:
        if layer == 0:
            return alive
        count = budget(plan[layer], len(offer.rows), offer.forced)
        return [alive[index] for index in top(here if layer == 1 else before, count)]

    return choose


def _query(offer: Offer) -> Choose:
    by_row = dict(zip(offer.rows, offer.score, strict=True))
    count = budget(offer.ratio, len(offer.rows), offer.forced)

    def choose(layer: int, alive: list[int], before: list[float], here: list[float]) -> list[int]:
        return [alive[index] for index in top([by_row[row] for row in alive], count)]

    return choose


def _lexical_rows(offer: Offer) -> list[int]:
    scores = [
        score or -float(place) for score, place in zip(offer.score, offer.offset, strict=True)
    ]
    return [
        offer.rows[index]
        for index in top(scores, budget(offer.ratio, len(offer.rows), offer.forced))
    ]


def _static(first_rows: Callable[[Offer], list[int]]) -> Callable[[Offer], Choose]:
    return lambda offer: lambda layer, alive, before, here: first_rows(offer)


def _lego_rows(offer: Offer) -> list[int]:
    by_edge = [row for _, row in sorted(zip(offer.offset, offer.rows, strict=True))]
    return sorted(by_edge[: budget(offer.ratio, len(offer.rows), offer.forced)])


POLICIES: dict[str, Callable[[Offer], Choose]] = {
    "full": _static(lambda offer: offer.rows),
    "none": _static(lambda offer: []),
    "lego": _static(_lego_rows),
    "lego-3": _static(
        lambda offer: [
            r for r, o in zip(offer.rows, offer.offset, strict=True) if o < 3 or offer.ratio == 1
        ]
    ),
    "lexical": _static(_lexical_rows),
    "hkvd": _hkvd,
    "query": _query,
}


def prefill_by_hand(
    model: PreTrainedModel, parts: Sequence[tuple[Sequence[int], bool]], positions: Sequence[int]
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """(logits [V], KV [H, T, D] per layer) of a prompt whose parts (ids, cached?) are reused or
    computed in order.

    A cached part is encoded alone by the model's own forward, at the positions where it stands in
    the prompt; so the model rotates its keys itself. Everything else runs over what lies before it,
    in the model's own attention.
    """
    cache, lo, out = DynamicCache(), 0, None
    knows = "position_ids" in inspect.signature(type(model).forward).parameters
    for ids, cached in parts:
        at = torch.tensor([positions[lo : lo + len(ids)]], device=model.device)
        options = {"position_ids": at} if knows else {}
        tokens, alone = torch.tensor([list(ids)], device=model.device), DynamicCache()
        with torch.no_grad():
            out = model(
                input_ids=tokens,
                past_key_values=alone if cached else cache,
                use_cache=True,
                **options,
            )
        if cached:
            for index, layer in enumerate(alone.layers):
                cache.update(layer.keys, layer.values, index)
        lo += len(ids)
    return out.logits[0, -1], [(layer.keys[0], layer.values[0]) for layer in cache.layers]


@dataclass(frozen=True)
class Sent:
    """A piece of a stream, by hand: (level, bytes, seconds to decode), the least lossy first;
    seconds as text.
    """

    levels: tuple[tuple[str, int, float], ...]
    text_s: float | None


def streamed_at(
    pieces: Sequence[Sent], rank: int, name: str, bytes_a_second: float, others: int
) -> float:
    """When the last of the pieces is decoded, all sent at one level: one line, one decoder, one
    event at a time.
    """
    line_free = decoder_free = 0.0
    for piece in pieces:
        named = [level for level in piece.levels if level[0] == name]
        _, nbytes, decode_s = named[0] if named else piece.levels[min(rank, len(piece.levels) - 1)]
        arrived = line_free
        for _ in range(1 + others):  # everyone on the line gets as much
            arrived += nbytes / bytes_a_second
        line_free = arrived
        decoder_free = max(decoder_free, arrived) + decode_s
    return decoder_free


def uniform(tensor: Tensor, bits: int) -> Tensor:
    """float32 [H, n, D]: every head's token as codes of `bits` and one bfloat16 scale, by hand."""
    most, out = 2 ** (bits - 1) - 1, torch.zeros(tensor.shape)
    for head in range(tensor.shape[0]):
        for token in range(tensor.shape[1]):
            row = tensor[head, token].float()
            scale = (row.abs().max() / most).to(torch.bfloat16).float()
            for channel, value in enumerate(row):
                code = int((value / scale).round()) if scale > 0 else 0
                out[head, token, channel] = max(-most, min(most, code)) * scale
    return out


def binned(tensor: Tensor, mean: Tensor, steps: Tensor, width: float, odd: Tensor) -> Tensor:
    """float32 [H, n, D] in bins, one value at a time; steps and mean [H, D]; `odd` [n] tokens in 8
    bits.
    """
    out = torch.zeros(tensor.shape)
    eight = uniform(tensor, 8)
    for token in range(tensor.shape[1]):
        if bool(odd[token]):
            out[:, token] = eight[:, token]
            continue
        for head in range(tensor.shape[0]):
            for channel in range(tensor.shape[2]):
                base = mean[head, channel]
                size = steps[head, channel] * width
                out[head, token, channel] = (
                    base + ((tensor[head, token, channel] - base) / size).round() * size
                )
    return out
