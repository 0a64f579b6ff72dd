"""AttentionStore's figures 18 and 19: prefilling with a history that is loaded, layer by layer, through a read buffer.

Reckoned for the paper's model on its GPU as `server.py` has it, without a queue.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from ragfuse_bench.figure import Figure, Rows, Wanted
from ragfuse_bench.sessions.figures import bars
from ragfuse_bench.sessions.server import PCIE_BPS, SERVERS

from ragfuse.plan.look_ahead import read_buffer

LAYERS, BATCH = 40, 16
"""Of LLaMA-13B, and prompts at once (section 4.3.1)."""
SERVER = replace(SERVERS["LLaMA-13B"], gpus=1, batch=BATCH)
LOAD_S = SERVER.token_bytes / PCIE_BPS
PROMPT, NEW = 1000, (500, 400, 300, 200, 100)
PAST, ASKED, BUFFERS = 1000, 100, (0, 5, 10, 15)
"""Of figure 19: tokens of the history, new ones, layers of the buffer."""


def preloaded_s(layers: int, load_s: float, compute_s: float, buffered: int = 0) -> float:
    """Seconds from a prefill's beginning until all layers are computed, each once its KV is there and the one before
    it is done; `buffered` of them were read before it began. load_s, compute_s: of a layer."""
    done_s = 0.0
    for layer in range(layers):
        there_s = max(0, layer + 1 - buffered) * load_s
        done_s = max(done_s, there_s) + compute_s
    return done_s


def layer_times(past: int, new: int) -> tuple[float, float]:
    """Seconds to load and to compute one layer of a batch of prompts."""
    return BATCH * past * LOAD_S / LAYERS, BATCH * new * SERVER.prefill_s / LAYERS


def _ratios(wanted: Wanted) -> Rows:
    """Figure 18: recomputed, loaded first, and loaded layer by layer."""
    rows: Rows = []
    for new in NEW:
        load_s, compute_s = layer_times(PROMPT - new, new)
        again_s = BATCH * PROMPT * SERVER.prefill_s
        ahead_s = preloaded_s(LAYERS, load_s, compute_s)
        rows.append(
            {
                "what": f"{PROMPT - new}/{new}",
                "recompute_s": again_s,
                "loaded_s": LAYERS * (load_s + compute_s),
                "ahead_s": ahead_s,
                "saved": 1 - ahead_s / again_s,
            }
        )
    return rows


def _buffers(wanted: Wanted) -> Rows:
    """Figure 19: without loading ahead, then with buffers of some layers, the last one as large as S_buf says."""
    load_s, compute_s = layer_times(PAST, ASKED)
    first_s = LAYERS * (load_s + compute_s)
    nbytes = BATCH * read_buffer(LOAD_S, PAST, SERVER.prefill_s, ASKED, PCIE_BPS)
    wanted_layers = -int(-nbytes // (BATCH * PAST * SERVER.token_bytes / LAYERS))
    paper = {0: 0.35, 15: 0.61}
    rows: Rows = [{"what": "loaded first", "prefill_s": first_s, "saved": 0.0, "paper_saved": 0.0}]
    for layers in dict.fromkeys((*BUFFERS, wanted_layers)):
        seconds = preloaded_s(LAYERS, load_s, compute_s, layers)
        name = f"{layers} layers" + (" (S_buf)" if layers == wanted_layers else "")
        rows.append(
            {
                "what": name,
                "prefill_s": seconds,
                "saved": 1 - seconds / first_s,
                "paper_saved": paper.get(layers),
            }
        )
    return rows


LOADING: Mapping[str, Figure] = MappingProxyType(
    {
        "as-fig18": Figure(
            "prefilling with a history that is loaded, by its share",
            "loading wins at every share, most where little is new; reading layer by layer hides the loading.",
            _ratios,
            ("what", "recompute_s", "loaded_s", "ahead_s", "saved"),
            bars("recompute_s", "loaded_s", "ahead_s"),
            given=lambda wanted: "reckoned for LLaMA-13B on one A100, batches of 16, PCIe at 26 GB/s",
            is_simulated=True,
        ),
        "as-fig19": Figure(
            "layers read ahead, by the size of the read buffer",
            "35% less time than loading first without a buffer, 61% less with one of 15 layers, which hides all of it.",
            _buffers,
            ("what", "prefill_s", "saved", "paper_saved"),
            bars("prefill_s"),
            given=lambda wanted: "1,000 tokens of history and 100 new ones; reckoned as figure 18",
            is_simulated=True,
        ),
    }
)
