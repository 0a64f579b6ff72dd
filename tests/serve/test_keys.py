"""Who may ask, and as whom: keys, the tenants they stand for, and hosts that need one."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ragfuse import Engine, InputError, Settings, SettingsError
from ragfuse.cli.entries import EntryFilter, OpenStore
from ragfuse.serve.keys import Keys, check_host, read_keys
from tests.serve.kit import (
    Served,
    access_lines,
    said,
    serving,
    settings_of,
    wait_for,
    with_documents,
)
from tests.tiny import CHUNKS

BLUE, OTHER_BLUE, GREEN = "blue-key-of-a-test-1", "blue-key-of-a-test-2", "green-key-of-a-test-1"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def locked(varied_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server for three keys of two tenants."""
    home = tmp_path_factory.mktemp("locked")
    settings = settings_of(varied_path, home, max_tokens=3)
    keys = Keys([f"salt-of-blue:{BLUE}", f"salt-of-blue:{OTHER_BLUE}", GREEN])
    with serving(settings, keys) as made:
        yield made


@pytest.mark.parametrize("told", ["", f"Basic {BLUE}", f"Bearer {BLUE[:-1]}"])
@pytest.mark.parametrize("path", ["/v1/ragfuse/store", "/metrics", "/openapi.json", "/nope"])
def test_without_a_key_nothing_is_told(locked: Served, told: str, path: str) -> None:
    answer = locked.get(path, **({"authorization": told} if told else {}))
    assert answer.status_code == 401
    assert answer.json()["error"]["type"] == "authentication_error"
    assert answer.headers["www-authenticate"] == "Bearer"
    assert locked.get("/health").json()["status"] == "ok"


@pytest.mark.parametrize("key", [BLUE, OTHER_BLUE, GREEN])
def test_every_key_opens(locked: Served, key: str) -> None:
    assert locked.get("/v1/models", **bearer(key)).status_code == 200
    assert (
        locked.get("/v1/models", authorization=f"bearer {key}", host="any.example").status_code
        == 200
    )


def test_keys_of_one_tenant_share_what_is_stored_and_others_do_not_see_it(locked: Served) -> None:
    body = {
        "model": locked.service.model,
        "messages": [{"role": "user", "content": "Who?"}],
        **with_documents(),
    }
    ask = lambda key: locked.post("/v1/chat/completions", body, **bearer(key)).json()  # noqa: E731
    cached = lambda key: ask(key)["usage"]["prompt_tokens_details"]["cached_tokens"]  # noqa: E731
    assert cached(BLUE) == 0
    locked.service.engine(locked.service.keys.tenants[0]).flush()
    assert cached(GREEN) == 0
    assert cached(OTHER_BLUE) > 0
    locked.service.engine(locked.service.keys.tenants[1]).flush()
    held = {
        key: locked.get("/v1/ragfuse/store", **bearer(key)).json()["tiers"]
        for key in (BLUE, OTHER_BLUE, GREEN)
    }
    assert held[BLUE] == held[OTHER_BLUE]
    entries = {tier["name"]: tier["entries"] for tier in held[GREEN]}
    # three documents, and in memory what the prompt is as a beginning
    assert entries == {"memory": 4, "disk": 3}


def test_a_key_finds_what_was_ingested_under_its_salt_alone(
    varied_path: Path, tmp_path: Path
) -> None:
    settings = settings_of(
        varied_path,
        tmp_path,
        max_tokens=3,
    )
    for salt, text in (("mine-3f1", CHUNKS[0]), ("", CHUNKS[1])):
        with Engine(settings.model_copy(update={"salt": salt})) as engine:
            engine.ingest([(text, "book")])
    body = {"messages": [said()], "documents": list(CHUNKS[:2])}
    with serving(settings, Keys([f"mine-3f1:{BLUE}", f":{OTHER_BLUE}", GREEN])) as served:
        hits = [
            [each["hit"] for each in answer["segments"] if each["source"].startswith("document")]
            for answer in (
                served.post("/v1/ragfuse/explain", body, **bearer(key)).json()
                for key in (BLUE, OTHER_BLUE, GREEN)
            )
        ]
        one, two, _ = (served.service.engine(tenant) for tenant in served.service.keys.tenants)
        assert one.model is two.model
        assert one.digest != two.digest
        assert one.settings.memory_bytes == settings.memory_bytes // 3
    assert hits == [[True, False], [False, True], [False, False]]


def test_nothing_of_a_key_or_a_salt_is_in_the_metrics(locked: Served) -> None:
    text = locked.get("/metrics", **bearer(BLUE)).text
    assert 'path="other",status="401"' in text
    assert not [word for word in (BLUE, OTHER_BLUE, GREEN, "salt-of-blue") if word in text]


def test_a_key_is_told_the_counts_of_its_own_tenant_and_of_all_requests(locked: Served) -> None:
    blue, green = locked.service.keys.tenants
    for tenant in (blue, green):
        locked.service.engine(tenant)
    locked.get("/v1/models", **bearer(GREEN))
    for key, mine, other in ((BLUE, blue, green), (OTHER_BLUE, blue, green), (GREEN, green, blue)):
        text = locked.get("/metrics", **bearer(key)).text
        assert (
            f'ragfuse_answers_total{{engine="{locked.service.model}-{mine.name}",how="full"}}'
            in text
        )
        assert (
            re.findall(r'ragfuse_tier_(?:bytes|entries){engine=".*",tier="(\w+)"}', text)
            == ["memory"] * 2
        )
        assert other.name not in text
        assert 'ragfuse_requests_total{path="/v1/models",status="200"}' in text
        assert "ragfuse_requests_running " in text


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_host_that_others_reach_needs_a_key(host: str) -> None:
    with pytest.raises(SettingsError, match="API key"):
        check_host(host, Keys())
    check_host(host, Keys([BLUE]))


def test_loopback_needs_none_and_everybody_is_the_tenant_of_the_salt() -> None:
    check_host("127.0.0.1", Keys())
    (tenant,) = Keys((), "a-salt").tenants
    assert Keys((), "a-salt").tenant(None) == tenant
    assert tenant.salt == "a-salt"


@pytest.mark.parametrize(
    "key", ["salt:short", "has a space in it somewhere", "ümlaut-in-the-key-of-a-test"]
)
def test_a_key_that_anybody_guesses_or_no_header_holds_is_told(key: str) -> None:
    with pytest.raises(SettingsError, match="16 ASCII characters"):
        Keys([key])


def test_keys_come_from_settings_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAGFUSE_API_KEYS", f"{BLUE}, a-salt:{GREEN},")
    assert Settings().api_keys == (BLUE, f"a-salt:{GREEN}")
    assert BLUE not in repr(Settings())
    file = tmp_path / "keys"
    file.write_text(f"# of the blue\n{BLUE}\n\n  a-salt:{GREEN}  \n")
    assert read_keys(file) == [BLUE, f"a-salt:{GREEN}"]
    with pytest.raises(InputError, match="one key a line"):
        read_keys(tmp_path / "none")


def test_the_log_names_tenants_as_the_store_does(
    varied_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings_of(
        varied_path,
        tmp_path,
        max_tokens=3,
    )
    keys = [f"salt-of-blue:{BLUE}", GREEN, f":{OTHER_BLUE}"]
    with (
        serving(settings, Keys(keys)) as served,
        caplog.at_level(logging.INFO, "ragfuse.serve.access"),
    ):
        body = {
            "model": served.service.model,
            "messages": [{"role": "user", "content": "Who?"}],
            **with_documents(),
        }
        for key in (BLUE, GREEN, OTHER_BLUE):
            assert served.post("/v1/chat/completions", body, **bearer(key)).status_code == 200
        wait_for(lambda: len(access_lines(caplog)) == 3)
    lines = access_lines(caplog)
    blue, green, none = (line.split(", ")[1] for line in lines)
    assert none == "no tenant"
    with OpenStore(settings) as admin:
        names = {row.tenant.name for row in admin.selected(EntryFilter())}
        assert names == {settings.model, *(f"{settings.model} ({each})" for each in (blue, green))}
        for each in (blue, green):
            rows = admin.selected(EntryFilter(tenant=each.removeprefix("tenant ")))
            assert {row.tenant.name for row in rows} == {f"{settings.model} ({each})"}
        assert admin.selected(EntryFilter(tenant=blue.removeprefix("tenant ")[:7])) == []


def test_the_tenant_of_the_setting_salt_has_its_name_on_loopback() -> None:
    assert (
        Keys((), "salt-of-blue").tenants[0].name
        == Keys([f"salt-of-blue:{BLUE}"]).tenants[0].name
        != ""
    )
    assert Keys().tenants[0].name == ""
