"""The prefill side of vLLM's disaggregated prefill: this server fuses a prompt, another engine decodes its answer.

The request says `kv_transfer_params: {"do_remote_decode": true}`, the answer's `kv_transfer_params` say how its KV is
found. A proxy hands them to the engine that decodes, as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ragfuse.engine.engine import Engine
from ragfuse.engine.trace_builder import PreparedPrompt
from ragfuse.errors import ModelError, TransferError
from ragfuse.serve.refusals import unusable
from ragfuse.serve.run import AnswerRequest
from ragfuse.serve.schema import CompletionRequest
from ragfuse.serve.service import Service
from ragfuse.transfer import UNKNOWN, TransferHandle, TransferModel, TransferPlace, sample_weights

log = logging.getLogger("ragfuse.serve")

FIELD = "kv_transfer_params"


class PromptTransfer:
    """Puts the KV of one prompt into a place, and says in vLLM's words how it is found.

    Args:
        place: Where it is put.
        model: Name of the model, which both engines must be told.
        salt: The tenant's salt.
        level: The codec level.
        weights: Digest of the model's weights (`sample_weights`), where it is loaded already.
    """

    def __init__(self, place: TransferPlace, model: str, salt: str, level: str, weights: str = UNKNOWN) -> None:
        self._place, self._model, self._level, self._weights = place, model, level, weights
        self._tenant = TransferHandle.tenant_label(salt)
        self._token_ids: tuple[int, ...] = ()
        self._handle: TransferHandle | None = None

    def put(self, prepared: PreparedPrompt) -> None:
        """Put the KV of a prefilled prompt into the place.

        Raises:
            APIError: No other engine could go on from it (400).
            TransferError: It does not fit now, or the place failed.
        """
        prefill = prepared.prefill
        positions = prefill.positions
        if positions is not None and positions.tolist() != list(range(len(prefill.token_ids))):
            raise unusable(
                FIELD,
                "This prompt's positions have gaps, as those of schemas do; an engine that decodes wants 0, 1, 2 and "
                f"so on. Leave out {FIELD}, or send the prompt without pml.",
            )
        try:
            kv = prefill.kv
            model = TransferModel.of(self._model, kv)
        except (ModelError, TransferError) as error:
            raise unusable(FIELD, f"{error} Leave out {FIELD}.") from error
        self._token_ids = tuple(prefill.token_ids)
        self._handle = self._place.put(kv, self._token_ids, model, self._tenant, self._level, self._weights)

    def instead_of(
        self, make: Callable[[Engine], Sequence[AnswerRequest]]
    ) -> Callable[[Engine], Sequence[AnswerRequest]]:
        """Return a function that makes the one request which prefills the prompt and writes a single token.

        How an answer is sampled and where it ends is for the engine that decodes. The function raises APIError (400)
        where there are several answers to give.

        Args:
            make: Makes the requests of a server that decodes itself.
        """
        return lambda engine: self._prefill_only(make(engine), engine)

    def params(self) -> dict[str, Any]:
        """Return the `kv_transfer_params` for the engine that decodes: vLLM's names, the token ids, the handle."""
        assert self._handle is not None
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._handle.place,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
            "prompt_token_ids": list(self._token_ids),
            "ragfuse": self._handle.as_dict(),
        }

    def _prefill_only(self, made: Sequence[AnswerRequest], engine: Engine) -> list[AnswerRequest]:
        if len(made) != 1:
            raise unusable(FIELD, f"{FIELD} needs one prompt and n: 1, found {len(made)} answers.")
        self._weights = sample_weights(engine.model.files)
        ask = made[0].ask
        choice = "none" if ask.tool_choice == "none" else "auto"
        ask = replace(ask, max_tokens=1, stop=(), options={}, grammar=None, tool_choice=choice)
        return [AnswerRequest(made[0].question, ask, transfer=self)]


def transfer_of(body: CompletionRequest, service: Service, salt: str) -> PromptTransfer | None:
    """Return the transfer that a request asks for; None where it is to be answered here.

    Args:
        body: The body of the request.
        service: The service.
        salt: The tenant's salt.

    Raises:
        APIError: It cannot be done (400).
    """
    params = body.kv_transfer_params or {}
    if params.get("do_remote_prefill"):
        raise unusable(
            FIELD,
            f"{FIELD} ask this server to decode what another one has prefilled, which it cannot. Send this to the "
            'engine that decodes; here ask {"do_remote_decode": true}.',
        )
    if not params.get("do_remote_decode"):
        return None
    if service.transfers is None:
        raise unusable(
            FIELD,
            f"{FIELD} ask this server to hand KV over, but it has no place for it. Start it with RAGFUSE_TRANSFER_URL "
            "set to a folder or URL that the engine that decodes reaches, too.",
        )
    for name in ("stream", "session_id"):
        if getattr(body, name):
            raise unusable(name, f"{name} cannot be used with {FIELD}: another engine writes the answer. Leave it out.")
    return PromptTransfer(service.transfers, service.model, salt, service.settings.transfer_level)
