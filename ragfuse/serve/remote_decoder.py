"""The router: this server prefills, a vLLM server decodes, and this server answers by itself where that one does not.

What is asked of vLLM and what it answers is in `decode_body`, how in `vllm_client`. Here is when it is asked, and what
is told of it: a warning when it goes away, a line when it comes back, and counts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from ragfuse.engine.decoder import DecoderError, Sampling
from ragfuse.engine.engine import Engine
from ragfuse.engine.trace_builder import PreparedPrompt
from ragfuse.errors import ModelError, RagFuseError, SettingsError, TransferError
from ragfuse.serve.decode_body import DecodedPiece, decode_body, piece_of
from ragfuse.serve.logprobs import LogprobRecorder
from ragfuse.serve.refusals import APIError
from ragfuse.serve.run import AnswerRequest
from ragfuse.serve.transfer import PromptTransfer
from ragfuse.serve.vllm_client import VLLMClient, VLLMError, said, shortened
from ragfuse.settings import Settings
from ragfuse.transfer import UNKNOWN, TransferModel, TransferPlace, sample_weights
from ragfuse.types.kv import ChunkKV

log = logging.getLogger("ragfuse.serve")

PLACE = "transfer"
"""Folder below `home` where KV waits, where both servers are on one machine and no place is set."""
COME_AGAIN = (408, 425, 429)
"""Statuses below 500 with which a server says that it may do later what it does not do now."""
MIN_PAUSE_S, MAX_PAUSE_S = 5.0, 60.0
"""Shortest and longest seconds between two tries of a server that cannot decode what is prefilled here."""
MAX_REASONS = 32
"""Reasons for decoding an answer here that are told in the log."""
PROBE = "The quick brown fox jumps over the lazy dog."
OUTCOMES = ("decoded", "down", "unsupported", "refused", "place", "failed", "broken")
"""What became of an answer: vLLM wrote it, or this server did, because vLLM was away, would not have written the same,
refused the request, KV could not be put into the place, or vLLM failed before its first token or behind it."""


def with_place(settings: Settings) -> Settings:
    """Return settings with a transfer place for `decode_at`: the one that is set, else a folder below `home`.

    Raises:
        SettingsError: No place is set, and the vLLM server is on another machine, which reaches no folder of this one.
    """
    if not settings.decode_at or settings.transfer_url:
        return settings
    host = urlsplit(settings.decode_at).hostname or ""
    if not _is_here(host):
        raise SettingsError(
            f"Wanted a place that this machine and {host!r} reach, to hand KV over to the vLLM server there, found "
            "none: set RAGFUSE_TRANSFER_URL to a redis:// or s3:// URL, or to a folder that both mount, and "
            "transfer_url of its connector to the same."
        )
    return settings.model_copy(update={"transfer_url": str(settings.home / PLACE)})


def _is_here(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class RemoteDecoder:
    """The vLLM server that decodes, and what is known of it. Thread-safe.

    Args:
        settings: The server's settings, with `decode_at` and a transfer place.
        place: The transfer place.
        model: The model's name, as KV is handed over.
    """

    def __init__(self, settings: Settings, place: TransferPlace, model: str) -> None:
        self.settings, self.place, self.model = settings, place, model
        self.client = VLLMClient(
            settings.decode_at, settings.decode_key, settings.decode_timeout_s, settings.serve_together
        )
        self.outcomes: Counter[str] = Counter()
        self.remote_model, self.weights = model, UNKNOWN
        self.is_up = False
        self._was_up = self._is_told = self._is_unfit_told = self._is_place_told = False
        self._pause_s, self._next_try_s = 0.0, 0.0
        self._lock, self._connecting, self._reasons = threading.Lock(), threading.Lock(), set[str]()
        self._probe: tuple[list[int], ChunkKV] | None = None

    def connect(self, engine: Engine, salt: str) -> None:
        """Find out whether the server is there and goes on from handed-over KV, by having it write one token.

        A server that does not answer is no error: it is asked again, and this server answers by itself meanwhile.

        Args:
            engine: An engine with the model.
            salt: Its tenant's salt.

        Raises:
            SettingsError: It answers, and cannot decode what is prefilled here; the message says what to change.
        """
        try:
            self._check(engine, salt)
        except VLLMError as error:
            if 300 <= error.status < 500 and error.status not in COME_AGAIN:
                raise SettingsError(str(error)) from error
            self.note_down(str(error))
        else:
            self.note_up()

    def reconnect(self, engine: Engine, salt: str) -> None:
        """Try again, as `connect` does, if the server is away; what cannot work is a warning now.

        A server that cannot decode what is prefilled here is tried ever more seldom, up to once in `MAX_PAUSE_S`.
        """
        with self._connecting:  # one at a time: a try that began earlier must not end after a later one
            if self.is_up or time.monotonic() < self._next_try_s:
                return
            try:
                self.connect(engine, salt)
                self._pause_s = self._next_try_s = 0.0
            except (RagFuseError, OSError) as error:
                self._pause_s = min(max(2 * self._pause_s, MIN_PAUSE_S), MAX_PAUSE_S)
                self._next_try_s = time.monotonic() + self._pause_s
                with self._lock:
                    is_told, self._is_unfit_told = self._is_unfit_told, True
                if not is_told:
                    log.warning("Answers are decoded here. %s", error)

    def instead_of(
        self, make: Callable[[Engine], Sequence[AnswerRequest]], salt: str
    ) -> Callable[[Engine], Sequence[AnswerRequest]]:
        """Return a function that makes the same requests, with answers that the vLLM server writes if it is there.

        Args:
            make: Makes the requests of a server that decodes itself.
            salt: The tenant's salt.
        """
        return lambda engine: [self._of(request, salt) for request in make(engine)]

    def note_up(self) -> None:
        """Note that the server decodes."""
        with self._lock:
            was_away = self._is_told or self._is_unfit_told
            again = " again" if self._was_up else ""
            self.is_up, self._was_up, self._is_told, self._is_unfit_told = True, True, False, False
        if was_away:
            log.info("The vLLM server at %s decodes answers%s.", self.client.root, again)

    def note_down(self, why: str) -> None:
        """Note that the server does not decode now."""
        with self._lock:
            is_told, self._is_told, self.is_up = self._is_told, True, False
        if not is_told:
            log.warning(
                "Answers are decoded here until the vLLM server %s. %s", "is back" if self._was_up else "answers", why
            )

    def note_place(self, why: str) -> None:
        """Note that the transfer place took a prompt's KV (""), or why not."""
        with self._lock:
            is_told, self._is_place_told = self._is_place_told, bool(why)
        if why and not is_told:
            log.warning("Answers whose KV cannot be handed over are decoded here. %s", why)

    def note_unsupported(self, why: str) -> None:
        """Note why an answer is not asked for; each of the few reasons is told once."""
        with self._lock:
            is_told = why in self._reasons or len(self._reasons) >= MAX_REASONS
            self._reasons.add(why)
        if not is_told:
            log.info("Some answers are decoded here, not by vLLM: %s.", why.removesuffix("."))

    def count(self, outcome: str) -> None:
        """Count what became of an answer: one of `OUTCOMES`."""
        with self._lock:
            self.outcomes[outcome] += 1

    def close(self) -> None:
        """Abort what is still decoded and close all connections."""
        self.client.close()

    def _of(self, request: AnswerRequest, salt: str) -> AnswerRequest:
        if not request.writes or request.transfer is not None:
            return request
        if not self.is_up:
            self.count("down")
            return request
        return replace(request, decoder=RemoteAnswer(self, salt, request.recorder))

    def _check(self, engine: Engine, salt: str) -> None:
        self.remote_model = self._named(self.client.models())
        if self._probe is None:
            ids = engine.tokens(PROBE)
            try:
                self._probe = ids, engine.model.full_prefill(ids).kv
                TransferModel.of(self.model, self._probe[1])
            except (ModelError, TransferError) as error:
                raise SettingsError(f"{error} Leave out --decode-at for this model.") from error
        ids, kv = self._probe
        self.weights = sample_weights(engine.model.files)
        transfer = PromptTransfer(self.place, self.model, salt, self.settings.transfer_level, self.weights)
        try:
            transfer.put_kv(kv, ids)
            body = decode_body(self.remote_model, ids, Sampling(1), transfer.params(), None)
            reply = self.client.complete({**body, "stream": False})
        finally:
            transfer.withdraw()
        self._check_reply(reply)

    def _named(self, models: Sequence[Mapping[str, Any]]) -> str:
        """Return the name under which the server has the model; SettingsError where it has another one."""
        names = [name for each in models if isinstance(name := each.get("id"), str)]
        roots = [name for each in models if isinstance(name := each.get("id"), str) and self._is_mine(each.get("root"))]
        if self.model in names:
            return self.model
        if roots:
            return roots[0]
        if any(each.get("owned_by") == "ragfuse" for each in models):
            raise SettingsError(
                f"Wanted a vLLM server at {self.client.root}, found a ragfuse server. Set --decode-at to the address "
                "of `vllm serve`."
            )
        raise SettingsError(
            f"Wanted the model {self.model!r} at {self.client.root}, found "
            f"{shortened(', '.join(map(repr, names))) or 'none'}. Serve the same model there; if it is the same under "
            f"another name, start `vllm serve` with --served-model-name {self.model}."
        )

    def _is_mine(self, root: object) -> bool:
        return isinstance(root, str) and root.rstrip("/").rpartition("/")[2] == self.model

    def _check_reply(self, reply: Mapping[str, Any]) -> None:
        """Raise SettingsError unless a reply shows that KV was loaded and ids come back."""
        params = reply.get("kv_transfer_params")
        found = params.get("ragfuse") if isinstance(params, Mapping) else None
        if not isinstance(found, Mapping):
            raise SettingsError(
                f"Wanted a vLLM server with the connector of vllm-ragfuse at {self.client.root}, found one without: "
                'start it with --kv-transfer-config \'{"kv_connector": "RagfuseConnector", ...}\', as the guide to '
                "vLLM has it."
            )
        if found.get("loaded") is not True:
            raise SettingsError(
                f"The vLLM server at {self.client.root} does not load KV that was put into '{self.place.where}': "
                f"{said({'error': found.get('why')})}. If its connector uses another place, set its transfer_url to "
                "this one."
            )
        choices = reply.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, Mapping) or not isinstance(choice.get("token_ids"), list):
            raise SettingsError(
                f"Wanted token ids of the answers of {self.client.root}, found none: use a vLLM that knows "
                "return_token_ids."
            )


class RemoteAnswer:
    """One answer that the vLLM server writes.

    Args:
        remote: The server.
        salt: The tenant's salt.
        recorder: Records log probabilities; None: they are not wanted.
    """

    def __init__(self, remote: RemoteDecoder, salt: str, recorder: LogprobRecorder | None) -> None:
        self._remote, self._recorder, self._salt = remote, recorder, salt

    @property
    def processors(self) -> Sequence[object]:
        """The recorder of log probabilities, which the server tells."""
        return () if self._recorder is None else (self._recorder,)

    def decode(self, prepared: PreparedPrompt, sampling: Sampling) -> Generator[Sequence[int], None, None]:
        """Yield the ids that the server writes, one at a time.

        Raises:
            DecoderError: It does not write the answer, or has stopped before its end.
        """
        remote, settings = self._remote, self._remote.settings
        level = settings.transfer_level
        transfer = PromptTransfer(remote.place, remote.model, self._salt, level, remote.weights)
        n_ids, n_sent, is_over = int(prepared.prefill.logits.shape[-1]), 0, False
        try:
            self._put(transfer, prepared)
            params = transfer.params()
            n_top = None if self._recorder is None else self._recorder.n_top
            ids = params.pop("prompt_token_ids")
            body = decode_body(remote.remote_model, ids, sampling, params, n_top)
            with closing(self._pieces(body, n_ids, n_top)) as pieces:
                for piece in pieces:
                    is_over = bool(piece.finish_reason)
                    for at, id in enumerate(piece.ids):
                        if self._recorder is not None:
                            self._recorder.add(piece.token_logprobs[at])
                        n_sent += 1
                        yield (id,)
                    if not piece.ids and not is_over:
                        yield ()
            raise VLLMError(f"The vLLM server at {remote.client.root} ended an answer early.", is_down=False)
        except VLLMError as error:
            outcome = "broken" if n_sent else "failed" if error.is_down else "refused"
            if error.is_down:
                remote.note_down(str(error))
            remote.count(outcome)
            raise DecoderError(str(error)) from error
        except GeneratorExit:
            if n_sent:
                remote.count("decoded")
            raise
        finally:
            if not is_over:
                transfer.withdraw()

    def resume(self, n_ids: int) -> None:
        """Note that this server goes on behind `n_ids` tokens."""
        if self._recorder is not None:
            self._recorder.resume(n_ids)

    def decline(self, why: str) -> None:
        """Note that the server is not asked."""
        self._remote.note_unsupported(why)
        self._remote.count("unsupported")

    def _put(self, transfer: PromptTransfer, prepared: PreparedPrompt) -> None:
        """Put a prompt's KV into the place; raise DecoderError where that cannot be."""
        try:
            transfer.put(prepared)
        except APIError as error:
            self.decline(error.message)
            raise DecoderError(error.message) from error
        except (RagFuseError, OSError) as error:
            self._remote.count("place")
            self._remote.note_place(str(error))
            raise DecoderError(str(error)) from error
        self._remote.note_place("")

    def _pieces(self, body: Mapping[str, Any], n_ids: int, n_top: int | None) -> Generator[DecodedPiece, None, None]:
        """Yield an answer's pieces up to its end, and empty ones; VLLMError where none comes for too long."""
        remote, n_left = self._remote, int(body["max_tokens"])
        root, patience_s = remote.client.root, remote.settings.decode_timeout_s
        due_s = time.monotonic() + patience_s
        with closing(remote.client.stream(body)) as events:
            for event in events:
                try:
                    piece = DecodedPiece(()) if event is None else piece_of(event, n_left, n_ids, n_top)
                except ValueError as error:
                    raise VLLMError(f"Wanted an answer of {root} as vLLM gives it, found {error}.") from error
                n_left -= len(piece.ids)
                if piece.ids:
                    due_s = time.monotonic() + patience_s
                elif time.monotonic() > due_s:
                    raise VLLMError(
                        f"Wanted a token of the vLLM server at {root} every {patience_s:g} s, found none: it has too "
                        "many requests, or compiles what it needs for the first time. Give it time, or set "
                        "RAGFUSE_DECODE_TIMEOUT_S higher."
                    )
                yield piece
                if piece.finish_reason:
                    return
