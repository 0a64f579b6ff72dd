"""The figures of the CacheGen paper, measured here: `ragfuse bench paper cg-fig3` and 4, 5, 9, 11 to 15."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ragfuse_bench.codec import compare, deadlines, insight
from ragfuse_bench.codec.compare import by_links
from ragfuse_bench.codec.insight import by_contexts, not_at_hand
from ragfuse_bench.figure import Figure, Wanted

RECKONED = (
    "Reckoned from bytes and seconds that were measured here; a load costs nothing but its bytes, which favours "
    "loading where contexts are short."
)


def _reckoned(wanted: Wanted) -> list[str]:
    return [*not_at_hand(wanted), RECKONED]


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
        "cg-fig9": Figure(
            "size against quality",
            "3.5-4.3 times smaller than quantisation of equal quality (Mistral-7B, LongChat: 622 MB in 8 bits, 176 MB "
            "at 0.98 of its accuracy).",
            compare.sizes,
            ("dataset", "level", "bytes_over_fp16", "bits_a_value", "x_vs_int8", "kl", "top1", "nats_more", "contexts"),
            compare.draw_sizes,
            by_contexts,
            not_at_hand,
            shows=compare.COMMAND,
        ),
        "cg-fig11": Figure(
            "time to first token by bandwidth",
            "CacheGen is fastest from 0.4 to 400 Gbit/s, 3.1-4.7 times faster than text and 1.67-1.81 times faster "
            "than 8 bits at 3 Gbit/s; above 20 Gbit/s little is left to gain on 8 bits (Mistral-7B, 16K tokens).",
            compare.by_bandwidth,
            ("gbps", "text_s", "int8_s", "default_s", "fastest"),
            compare.draw_bandwidth,
            by_links,
            _reckoned,
        ),
        "cg-fig12": Figure(
            "time to first token by requests at a time and by length",
            "the more requests share the GPU, the more CacheGen gains on text (9.6K tokens); under about 1K tokens "
            "text is faster, and taken (3 Gbit/s).",
            compare.by_load,
            ("what", "requests", "tokens", "text_s", "int8_s", "default_s", "fastest"),
            compare.draw_load,
            by_links,
            _reckoned,
        ),
        "cg-fig13": Figure(
            "how often each way is late",
            "bandwidth drawn from 0.1-10 Gbit/s for each piece, 20 traces: at a deadline of 1 s CacheGen is late in 8% "
            "where 8 bits are in 81%, at equal quality; at 0.5 s in 60% fewer.",
            deadlines.late,
            ("deadline_s", "method", "violations", "f1"),
            deadlines.draw_late,
            absent=not_at_hand,
            shows=deadlines.COMMAND,
        ),
        "cg-fig14": Figure(
            "what the time goes to, and what is kept",
            "decoding hardly shows in the time to first token and takes far less compute than prefilling; encoding "
            "takes about 200 ms; all levels together take about as much room as one quantised KV.",
            compare.breakdown,
            ("method", "link_s", "decode_s", "compute_s", "ttft_s", "decode_cpu_s", "encode_s", "mb"),
            compare.draw_breakdown,
            by_links,
            not_at_hand,
        ),
        "cg-fig15": Figure(
            "the share of each idea",
            "a distribution for each channel and layer instead of one for all takes up to 53% off; deltas and layers "
            "by sensitivity take more off (a plot).",
            compare.ideas,
            ("idea", "bytes_over_fp16", "bits_a_value", "kl", "top1", "contexts"),
            compare.draw_ideas,
            by_contexts,
            not_at_hand,
            shows=compare.COMMAND,
        ),
    }
)
"""By the name they have on the command line."""
