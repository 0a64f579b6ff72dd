"""Bulk encoding on a Ray cluster: each worker has an engine and encodes batches of chunks.

Entries are addressed by content, so a repeated batch writes only missing entries. Killed workers,
interrupted calls and concurrent calls cost time but lose no entries.
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
    """Encodes batches of chunks into the shared store; chunks that are already stored are skipped.

    Args:
        settings: The settings that `shared_settings` returned.

    Raises:
        RefusedError: KV of this model cannot be reused.
    """

    def __init__(self, settings: Settings) -> None:
        from ragfuse.engine.engine import Engine

        self._engine = Engine(settings)
        if refusal := self._engine.model.profile.refusal:
            raise RefusedError(f"No KV is stored for this model: {refusal}")

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Encode a batch with columns `text` and optionally `source`; return one row of counts."""
        texts = [str(text) for text in batch["text"]]
        sources = [str(source) for source in batch.get("source", [""] * len(texts))]
        before = self._n_refused()
        done = self._engine.ingest(zip(texts, sources, strict=True))
        names = ("chunks", "encoded", "tokens", "nbytes", "short")
        row = {name: getattr(done, name) for name in names}
        row["unsaved"] = self._n_refused() - before
        return {name: [value] for name, value in row.items()}

    def _n_refused(self) -> int:
        """Return the number of failed or refused writes to shared tiers so far."""
        slow = [tier.counts for tier in self._engine.store.tiers if tier.slow]
        return sum(counts["refused"] + counts["failed"] for counts in slow)


BATCH = 16
"""Number of chunks per batch. Another worker repeats the batch of a killed worker."""
BLOCKS_A_WORKER = 4
"""Number of blocks of (text, source) pairs per worker. Slow workers process fewer blocks."""


@dataclass(frozen=True)
class BulkSummary:
    """The result of a bulk encode.

    If a worker is killed, another worker repeats the batch, and only the repetition is counted.
    Chunks that the killed worker had already stored are not in `encoded`.

    Args:
        chunks: Number of chunks processed.
        encoded: Number of chunks encoded by this call, as reported by the workers.
        tokens: Tokens of the encoded chunks.
        nbytes: Bytes of the encoded chunks' KV.
        unsaved: Number of failed writes to shared tiers. Call `encode` again to repeat the writes.
        short: Number of chunks too short to be stored. Chunks that are neither encoded nor short
            were stored before, by an earlier call or a killed worker.
        seconds: Seconds until all batches were encoded, including the start of the workers.
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
        """Tokens encoded per second by all workers together, including the start of the workers."""
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
    """Encode chunks on a Ray cluster and store the KV. Chunks that are already stored are skipped.

    After an interruption, call the function again to resume. Ray shows the progress.

    Args:
        dataset: (text, source) pairs, or a `ray.data.Dataset` with a column `text` and optionally
            a column `source`.
        settings: All settings. None means the settings of the environment and ragfuse.toml. All
            nodes must share the store.
        address: The cluster. "local" starts a new cluster on this machine, and "auto" finds a
            running cluster. HOST:PORT and ray://HOST:PORT are also accepted. Ignored if this
            process is already connected.
        workers: Number of workers. None means one per GPU if the model is on CUDA, else one per
            node.
        cpus: CPUs per worker. None means 1 if the model is on CUDA. On other devices, None gives
            each worker of a node an equal share of the smallest node's CPUs minus one, at least 1.
        batch: Number of chunks per batch.

    Returns:
        The totals of all workers.

    Raises:
        SettingsError: Ray is not installed, or the cluster's nodes do not share the store.
        ray.exceptions.RayError: The cluster does not respond, a worker cannot load the model, or
            the dataset has no column `text`.
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
    """Return the number of workers and the CPUs per worker, with defaults for None."""
    if on_gpu:
        return workers or int(sum(node.gpus for node in members)), cpus or 1.0
    n_workers = workers or max(1, sum(node.cpus >= 1 for node in members))
    return n_workers, cpus or cpus_each(members, n_workers)
