"""Who may ask, and as whom: keys, the tenants they stand for, and hosts that need one."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ragfuse import Engine, InputError, Settings, SettingsError
from ragfuse.serve.keys import Keys, check_host, read_keys
from ragfuse.store.catalog import hidden
from tests.kits.serve import (
    BLUE,
    GREEN,
    Served,
    refused,
    said,
    serving,
    settings_of,
    with_documents,
)
from tests.kits.tiny import CHUNKS

OTHER_BLUE = "blue-key-of-a-test-2"


@pytest.fixture(scope="module")
def locked(make_server: Callable[..., Served]) -> Served:
    """A server for three keys of two tenants."""
    keys = (f"salt-of-blue:{BLUE}", f"salt-of-blue:{OTHER_BLUE}", GREEN)
    return make_server(keys, max_tokens=3)


@pytest.mark.parametrize("told", ["", f"Basic {BLUE}", f"Bearer {BLUE[:-1]}"])
@pytest.mark.parametrize("path", ["/v1/ragfuse/store", "/metrics", "/openapi.json", "/nope"])
def test_without_a_key_only_health_is_shown(locked: Served, told: str, path: str) -> None:
    answer = locked.get(path, **({"authorization": told} if told else {}))
    assert refused(answer, 401)["type"] == "authentication_error"
    assert answer.headers["www-authenticate"] == "Bearer"
    assert locked.get("/health").json()["status"] == "ok"


def test_keys_of_one_tenant_share_what_is_stored_and_others_do_not_see_it(locked: Served) -> None:
    def cached(key: str) -> int:
        usage = locked.of(key).chat(**with_documents()).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    def tiers(key: str) -> list[dict[str, object]]:
        return list(locked.of(key).get("/v1/ragfuse/store").json()["tiers"])

    assert cached(BLUE) == 0
    locked.engine(0).flush()
    assert cached(GREEN) == 0
    assert cached(OTHER_BLUE) > 0
    locked.engine(1).flush()
    assert tiers(BLUE) == tiers(OTHER_BLUE)
    # three documents, and in memory what the prompt is as a beginning
    entries = {tier["name"]: tier["entries"] for tier in tiers(GREEN)}
    assert entries == {"memory": 4, "disk": 3}


def test_a_key_finds_what_was_ingested_under_its_salt_alone(
    varied_path: Path, tmp_path: Path
) -> None:
    settings = settings_of(varied_path, tmp_path, max_tokens=3)
    for salt, text in (("mine-3f1", CHUNKS[0]), ("", CHUNKS[1])):
        with Engine(settings.model_copy(update={"salt": salt})) as engine:
            engine.ingest([(text, "book")])
    body = {"model": varied_path.name, "messages": [said()], "documents": list(CHUNKS[:2])}
    with serving(settings, Keys([f"mine-3f1:{BLUE}", f":{OTHER_BLUE}", GREEN])) as served:
        for key, hits in (
            (BLUE, [True, False]),
            (OTHER_BLUE, [False, True]),
            (GREEN, [False, False]),
        ):
            segments = served.of(key).post("/v1/ragfuse/explain", body).json()["segments"]
            found = [each["hit"] for each in segments if each["source"].startswith("document")]
            assert found == hits
        one, two = served.engine(0), served.engine(1)
        assert one.model is two.model
        assert one.digest != two.digest
        assert one.settings.memory_bytes == settings.memory_bytes // 3


def test_a_key_sees_the_metrics_of_its_own_tenant_and_of_all_requests(locked: Served) -> None:
    blue, green = locked.service.keys.tenants
    for tenant in range(2):
        locked.engine(tenant)
    locked.get("/nope")
    locked.of(GREEN).get("/v1/models")
    for key, mine, other in ((BLUE, blue, green), (OTHER_BLUE, blue, green), (GREEN, green, blue)):
        text = locked.of(key).get("/metrics").text
        engine = f'engine="{locked.service.model}-{mine.name}"'
        assert f'ragfuse_answers_total{{{engine},how="full"}}' in text
        tiers = re.findall(r'ragfuse_tier_(?:bytes|entries){engine=".*",tier="(\w+)"}', text)
        assert tiers == ["memory"] * 2
        assert 'ragfuse_requests_total{path="/v1/models",status="200"}' in text
        assert 'path="other",status="401"' in text
        assert "ragfuse_requests_running " in text
        secrets = (BLUE, OTHER_BLUE, GREEN, "salt-of-blue", other.name)
        assert not [word for word in secrets if word in text]


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_host_that_others_reach_needs_a_key(host: str) -> None:
    with pytest.raises(SettingsError, match="API key"):
        check_host(host, Keys())
    check_host(host, Keys([BLUE]))
    check_host("127.0.0.1", Keys())


@pytest.mark.parametrize(
    "key", ["salt:short", "has a space in it somewhere", "ümlaut-in-the-key-of-a-test"]
)
def test_a_key_that_anybody_guesses_or_no_header_holds_is_refused(key: str) -> None:
    with pytest.raises(SettingsError):
        Keys([key])


def test_keys_come_from_settings_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAGFUSE_API_KEYS", f"{BLUE}, a-salt:{GREEN},")
    assert Settings().api_keys == (BLUE, f"a-salt:{GREEN}")
    assert BLUE not in repr(Settings())
    file = tmp_path / "keys"
    file.write_text(f"# of the blue\n{BLUE}\n\n  a-salt:{GREEN}  \n")
    assert read_keys(file) == [BLUE, f"a-salt:{GREEN}"]
    with pytest.raises(InputError):
        read_keys(tmp_path / "none")


def test_the_tenant_of_the_setting_salt_is_that_of_a_key_with_this_salt() -> None:
    (tenant,) = Keys((), "salt-of-blue").tenants
    assert tenant == Keys((), "salt-of-blue").tenant(None)
    assert tenant == Keys([f"salt-of-blue:{BLUE}"]).tenants[0]
    assert tenant.name != Keys().tenants[0].name == ""
    assert hidden("salt-of-blue").startswith(tenant.name)  # as the store names it
