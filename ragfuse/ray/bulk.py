"""Bulk encoding on a Ray cluster: workers with an engine each encode batches of chunks.

Entries are found by their content, so a batch that is tried again writes what is missing: killed
workers, interrupted runs and several runs at once cost time, never an entry.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

from ragfuse.errors import RefusedError
from ragfuse.ray.cluster import (
    LOCAL_CLUSTER,
    Node,
    check_cluster,
    connected,
    cpus_each,
    nodes,
    shared_settings,
)
from ragfuse.settings import Settings


class EncodeWorker:
    """Encodes batches of chunks into the shared store. What is stored already is not encoded again.

    Args:
        settings: The settings, with only those tiers that all workers share.

    Raises:
        RefusedError: KV of this model cannot be reused.
    """

    def __init__(self, settings: Settings) -> None:
        from ragfuse.engine.engine import Engine

        self._engine = Engine(settings)
        if refusal := self._engine.model.profile.refusal:
            raise RefusedError(f"No KV is stored for this model: {refusal}")

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Encode the columns `text` and perhaps `source`; return one row of counts."""
        texts = [str(text) for text in batch["text"]]
        sources = [str(source) for source in batch.get("source", [""] * len(texts))]
        before = self._n_refused()
        done = self._engine.ingest(zip(texts, sources, strict=True))
        names = ("chunks", "encoded", "tokens", "nbytes", "short")
        row = {name: getattr(done, name) for name in names}
        row["unsaved"] = self._n_refused() - before
        return {name: [value] for name, value in row.items()}

    def _n_refused(self) -> int:
        """Return the number of writes to shared tiers that were refused or failed so far."""
        slow = [tier.counts for tier in self._engine.store.tiers if tier.slow]
        return sum(counts["refused"] + counts["failed"] for counts in slow)


BATCH = 16
"""Chunks of a batch; what a killed worker has stored is not encoded again."""
BLOCKS_A_WORKER = 4
"""Blocks that a list of chunks is cut into for each worker, so that slow workers get fewer."""


@dataclass(frozen=True)
class BulkSummary:
    """What a bulk encode came to.

    A batch that was begun by a worker that was killed counts for the one that finished it; chunks
    that the first one had stored are not among `encoded`.

    Args:
        chunks: Chunks handled.
        encoded: Those that were encoded now by workers that told it.
        tokens: Tokens of the encoded chunks.
        nbytes: Bytes of their KV.
        unsaved: Writes that a shared tier did not take; run again to try them again.
        short: Chunks that are too short to be stored. All others were found in the store: from
            before the run, or from a worker of it that died.
        seconds: Time from the first batch to the last, start of the workers included.
    """

    chunks: int = 0
    encoded: int = 0
    tokens: int = 0
    nbytes: int = 0
    unsaved: int = 0
    short: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens encoded in a second, by all workers together, their start included."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the summary in plain JSON types."""
        return {**asdict(self), "tokens_per_s": self.tokens_per_s}


def encode(
    dataset: Any,
    settings: Settings | None = None,
    *,
    address: str = LOCAL_CLUSTER,
    workers: int | None = None,
    cpus: float | None = None,
    batch: int = BATCH,
) -> BulkSummary:
    """Encode chunks on a Ray cluster and store their KV, except for those that are stored already.

    Run it again after an interruption: it goes on where it stopped. Ray shows its progress.

    Args:
        dataset: A `ray.data.Dataset` with a column `text` and perhaps `source`; or (text, source)
            pairs.
        settings: All settings; None: read from the environment and ragfuse.toml. The store must be
            one that all nodes share.
        address: The cluster, unless this process is connected to one: "local" for a new one on this
            machine, "auto", HOST:PORT or ray://HOST:PORT.
        workers: How many engines encode; None: one for each GPU with a model on CUDA, else one for
            each node.
        cpus: CPUs of each worker; None: all but one of the smallest node, at least one.
        batch: Chunks of a batch.

    Returns:
        The totals.

    Raises:
        SettingsError: Ray is missing, or the cluster's nodes do not share the store.
        ray.exceptions.RayError: The cluster does not answer, or a worker cannot load the model or
            finds no column `text`.
    """
    settings = (settings or Settings()).placed()
    check_cluster(settings)
    with connected(address):
        import ray

        settings, members = shared_settings(settings), nodes()
        on_gpu = settings.device.startswith("cuda") or (
            settings.device == "auto" and any(node.gpus for node in members)
        )
        n_workers, n_cpus = worker_size(members, on_gpu, workers, cpus)
        if not isinstance(dataset, ray.data.Dataset):
            rows = [{"text": text, "source": source} for text, source in dataset]
            n_blocks = max(1, min(len(rows), n_workers * BLOCKS_A_WORKER))
            dataset = ray.data.from_items(rows, override_num_blocks=n_blocks)
        began = perf_counter()
        counted = dataset.map_batches(
            EncodeWorker,
            fn_constructor_args=(settings,),
            batch_size=batch,
            compute=ray.data.ActorPoolStrategy(size=n_workers),
            num_cpus=n_cpus,
            **({"num_gpus": 1} if on_gpu else {}),
        )
        done = Counter[str]()
        for row in counted.iter_rows():
            done.update(row)
        return BulkSummary(**done, seconds=perf_counter() - began)


def worker_size(
    members: list[Node], on_gpu: bool, workers: int | None, cpus: float | None
) -> tuple[int, float]:
    """Return how many workers there are, and the CPUs of each."""
    if on_gpu:
        return workers or int(sum(node.gpus for node in members)), cpus or 1.0
    n_workers = workers or max(1, sum(node.cpus >= 1 for node in members))
    return n_workers, cpus or cpus_each(members, n_workers)
