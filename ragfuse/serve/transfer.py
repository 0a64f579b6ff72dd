"""The prefill side of vLLM's disaggregated prefill: this server fuses a prompt, another engine
decodes its answer.

The request says `kv_transfer_params: {"do_remote_decode": true}`, the answer's `kv_transfer_params`
say how its KV is found. A proxy hands them to the engine that decodes, as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ragfuse.engine.request import PreparedPrompt
from ragfuse.errors import ModelError, TransferError
from ragfuse.serve.refusals import unusable
from ragfuse.transfer import TransferHandle, TransferModel, TransferPlace

FIELD = "kv_transfer_params"


@dataclass
class PromptTransfer:
    """Puts the KV of one prompt into a place, and says in vLLM's words how it is found.

    Args:
        place: Where it is put.
        model: Name of the model, which both engines must be told.
        salt: The tenant's salt.
        level: The codec level.
        weights: Digest of the model's weights (`sample_weights`).
        params: The `kv_transfer_params` for the engine that decodes, once the KV is put.
    """

    place: TransferPlace
    model: str
    salt: str
    level: str
    weights: str
    params: dict[str, Any] | None = None

    def put(self, prepared: PreparedPrompt) -> None:
        """Put the KV of a prefilled prompt into the place.

        Raises:
            APIError: No other engine could go on from it (400).
            TransferError: It does not fit now, or the place failed.
        """
        prefill = prepared.prefill
        positions, ids = prefill.positions, tuple(prefill.token_ids)
        if positions is not None and positions.tolist() != list(range(len(ids))):
            raise unusable(
                FIELD,
                "This prompt's positions have gaps, as those of schemas do; an engine that decodes"
                f" wants 0, 1, 2 and so on. Leave out {FIELD}, or send the prompt without pml.",
            )
        try:
            kv = prefill.kv
            model = TransferModel.of(self.model, kv)
        except (ModelError, TransferError) as error:
            raise unusable(FIELD, f"{error} Leave out {FIELD}.") from error
        label = TransferHandle.tenant_label(self.salt)
        handle = self.place.put(kv, ids, model, label, self.level, self.weights)
        self.params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": handle.place,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
            "prompt_token_ids": list(ids),
            "ragfuse": handle.as_dict(),
        }
