"""The figures of the CacheGen paper, measured here: `ragfuse bench paper cg-fig3` and 4, 5, 9, 11 to 15."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ragfuse.bench.codec import insight
from ragfuse.bench.codec.insight import by_contexts, not_at_hand
from ragfuse.bench.figure import Figure

CACHEGEN: Mapping[str, Figure] = MappingProxyType(
    {
        "cg-fig3": Figure(
            "deltas between neighbouring tokens vary less than values",
            "the variance of deltas is 2.4-2.9 times lower than that of values (one K layer of Llama-7B and 13B, "
            "LongChat).",
            insight.variances,
            ("part", "layer", "over_delta", "over_anchor", "own_over_delta", "own_over_anchor", "n"),
            insight.draw_variances,
            by_contexts,
            not_at_hand,
        ),
        "cg-fig4": Figure(
            "which layers bear rounding",
            "accuracy falls far more when the earlier layers are rounded (a plot, no numbers in the text).",
            insight.sensitivity,
            ("layers", "kl", "top1", "kl_keys", "kl_values", "n"),
            insight.draw_sensitivity,
            by_contexts,
            not_at_hand,
        ),
        "cg-fig5": Figure(
            "channels and layers tell more of a value than its token",
            "entropy falls far less by token than by channel or by layer (a plot, no numbers in the text).",
            insight.entropies,
            ("part", "none", "token", "channel", "layer", "channel_and_layer"),
            insight.draw_entropies,
            by_contexts,
            not_at_hand,
        ),
    }
)
"""By the name they have on the command line."""
