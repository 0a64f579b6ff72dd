"""Requests whose answer another engine decodes: the KV that it finds is what was prefilled here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ragfuse import Settings
from ragfuse.transfer import UNKNOWN, TransferHandle, TransferPlace, sample_weights
from tests.kits.serve import CHAT, TEXT, Served, refused, said, serving, settings_of, with_documents

WANTED = {
    "kv_transfer_params": {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
    }
}


@pytest.fixture(scope="module")
def settings(varied_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    home = tmp_path_factory.mktemp("prefills")
    more = {"learn": "retrieved", "prefix_cache": False, "transfer_url": str(home / "place")}
    return settings_of(varied_path, home, salt="salt-of-blue", **more)


@pytest.fixture(scope="module")
def prefills(settings: Settings) -> Iterator[Served]:
    with serving(settings) as made:
        yield made


@pytest.fixture
def place(settings: Settings) -> Iterator[TransferPlace]:
    made = TransferPlace.open(settings)
    yield made
    made.close()


def test_the_kv_of_a_prompt_waits_for_another_engine(
    prefills: Served, place: TransferPlace
) -> None:
    answer = prefills.chat(max_tokens=1, **WANTED).json()
    params = answer["kv_transfer_params"]
    handle, ids = TransferHandle.from_dict(params["ragfuse"]), params["prompt_token_ids"]
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
    assert answer["usage"]["completion_tokens"] == 1
    assert (
        answer["ragfuse"]["tokens"]
        == handle.n_tokens
        == len(ids)
        == answer["usage"]["prompt_tokens"]
    )
    exact = prefills.engine().model.full_prefill(ids).kv
    for found, wanted in zip(place.read(handle), exact.layers, strict=True):
        assert torch.equal(found.keys, wanted.keys)
        assert torch.equal(found.values, wanted.values)
    assert handle.model.name == prefills.service.model
    assert handle.tenant == TransferHandle.tenant_label("salt-of-blue")
    assert handle.weights == sample_weights(Path(prefills.service.settings.model)) != UNKNOWN
    assert place.delete(handle)


def test_what_is_handed_over_is_fused(prefills: Served, place: TransferPlace) -> None:
    prefills.chat(**with_documents())
    prefills.engine().flush()
    answer = prefills.chat(**with_documents(), **WANTED).json()
    handle = TransferHandle.from_dict(answer["kv_transfer_params"]["ragfuse"])
    assert answer["ragfuse"]["tokens_reused"] > 0
    exact = (
        prefills.engine().model.full_prefill(answer["kv_transfer_params"]["prompt_token_ids"]).kv
    )
    last = [*place.read(handle)][-1]
    assert last.keys.shape == exact.layers[-1].keys.shape
    assert not torch.equal(last.keys, exact.layers[-1].keys)
    assert place.delete(handle)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, {"prompt": "The keeper", "logprobs": 2, "echo": True}),
        (CHAT, {"messages": [said()], "ignore_eos": True, "a_field_of_vllm": 1}),
    ],
)
def test_how_an_answer_is_written_is_for_the_other_engine(
    path: str, body: dict[str, object], prefills: Served, place: TransferPlace
) -> None:
    answer = prefills.post(path, {"model": prefills.service.model, **body, **WANTED})
    assert answer.status_code == 200, answer.text
    assert place.delete(TransferHandle.from_dict(answer.json()["kv_transfer_params"]["ragfuse"]))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"n": 2}, "n: 1"),
        ({"session_id": "a"}, "session_id"),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, "do_remote_decode"),
    ],
)
def test_what_cannot_be_handed_over_is_refused(
    fields: dict[str, object], says: str, prefills: Served
) -> None:
    assert says in refused(prefills.chat(**{**WANTED, **fields}))["message"]


def test_a_server_without_a_place_names_the_setting(served: Served) -> None:
    assert "RAGFUSE_TRANSFER_URL" in refused(served.chat(**WANTED))["message"]


def test_positions_with_gaps_are_refused(prefills: Served, place: TransferPlace) -> None:
    schema = (
        '<schema name="trip"><user><module name="plan">I have <param name="days" len="12"/>'
        ' days.</module><module name="diet">I eat no meat.</module></user></schema>'
    )
    assert prefills.post("/v1/ragfuse/schemas", {"pml": schema}).status_code == 200
    refused(prefills.chat(pml='<prompt schema="trip"><diet/></prompt>', **WANTED))
    assert place.n_waiting == 0


def test_a_place_that_is_full_is_a_passing_error(settings: Settings, tmp_path: Path) -> None:
    small = settings.model_copy(
        update={"transfer_url": str(tmp_path / "small"), "transfer_bytes": 4096}
    )
    with serving(small) as made:
        assert refused(made.chat(**WANTED), 503)["code"] == "transfer"
        assert made.chat(max_tokens=2).status_code == 200
