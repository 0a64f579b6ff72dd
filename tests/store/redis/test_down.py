"""The redis tier against a server that is killed, hung, full, started again, or reached in odd ways."""

import logging
import shutil
import signal
import subprocess
import sys
import traceback

import pytest

from ragfuse.errors import StoreError
from ragfuse.plan.evict import lru
from ragfuse.store import DiskTier, KVStore
from ragfuse.store.redis import RedisTier
from ragfuse.types.keys import FORMAT_VERSION
from tests.store.kit import encoded, key, kv, same
from tests.store.redis_server import RedisServer, chunk_name, free_port, until

A, B, C = key("a"), key("b"), key("c")
PREFIX = f"ragfuse:{FORMAT_VERSION}:"


# down, hung, full


def test_a_server_killed_between_two_layers_is_a_miss_and_another_tier_answers(server, tmp_path, open_tier, caplog):
    chunk = kv()
    tier, disk = open_tier(url=server.url(), cool_down_s=3600), DiskTier(tmp_path / "store", 1 << 20, lru)
    with KVStore([tier, disk]) as store:
        assert store.put(A, chunk)
        assert store.flush(30)
        assert store.lookup([A])[A].tier == "redis"
        assert same(store.read_layers(A, 0, tier="redis")[0], chunk.layers[0])
        before = tier.breaker.attempts
        server.kill()
        assert tier.read(A, 1) is None
        for i in (1, 2):
            assert same(store.read_layers(A, i, tier="redis")[0], chunk.layers[i])
        assert store.lookup([A])[A].tier == "disk"
        assert store.put(B, chunk)
        assert store.flush(30)
        assert set(disk.entries()) == {A, B}
    assert tier.breaker.attempts == before + 1
    assert len(caplog.records) == 1
    assert tier.counts["corrupt"] == 0


def test_a_hung_server_costs_one_timeout_and_not_one_per_chunk(server, open_tier, caplog):
    tier = open_tier(url=server.url(), timeout_s=1.0, cool_down_s=3600)
    assert tier.write(A, *encoded(kv()))
    before = tier.breaker.attempts
    server.signal(signal.SIGSTOP)
    for i in range(50):
        assert tier.entries([A, key(i)]) == {}
        assert tier.read(A, i % 3) is None
        assert not tier.write(key(i), *encoded(kv()))
    assert tier.delete([A]) == 0
    assert tier.nbytes == 0
    assert tier.breaker.attempts == before + 1
    assert tier.counts["failed"] == 52  # the timeout, and what was asked to change
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2  # the breaker's, and the delete's
    server.signal(signal.SIGCONT)


def test_what_asks_the_server_nothing_does_not_bring_it_back(server, open_tier):
    tier = open_tier(url=server.url(), cool_down_s=0)
    server.kill()
    assert tier.entries([A]) == {}
    assert (tier.entries([]), tier.delete([]), tier.pin([], True)) == ({}, 0, None)
    assert not tier.write(B, *encoded(kv(n=100_000)))
    assert tier.breaker.is_open
    assert tier.counts["refused"] == 1


def test_one_page_of_a_listing_that_is_answered_is_enough_to_use_a_server_again(server, open_tier):
    tier, other = open_tier(url=server.url(), cool_down_s=0), open_tier(url=server.url())
    for i in range(3):
        assert other.write(key(i), *encoded(kv()))
    server.kill()
    assert tier.entries() == {}
    server.start()
    for i in range(3):
        assert other.write(key(i), *encoded(kv()))
    rows = tier._index.rows(None)
    next(rows)
    assert not tier.breaker.is_open  # though the listing is not read to its end
    assert len(list(rows)) == 2


def test_a_server_that_goes_on_is_used_again(server, open_tier, caplog):
    caplog.set_level(logging.INFO, "ragfuse.store")
    tier = open_tier(url=server.url(), timeout_s=1.0, cool_down_s=0)
    assert tier.write(A, *encoded(kv()))
    server.signal(signal.SIGSTOP)
    assert tier.read(A, 0) is None
    server.signal(signal.SIGCONT)
    until(lambda: tier.read(A, 0) is not None)
    assert set(tier.entries()) == {A}
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_a_server_that_starts_again_is_used_again(server, open_tier):
    tier = open_tier(url=server.url(), cool_down_s=0)
    assert tier.write(A, *encoded(kv()))
    server.kill()
    assert tier.read(A, 0) is None
    server.start()
    assert tier.read(A, 0) is None
    assert (tier.entries(), tier.counts["corrupt"]) == ({}, 0)
    assert tier.write(A, *encoded(kv()))
    assert tier.read(A, 0) is not None


def test_a_server_that_started_again_unnoticed_costs_nothing(server, open_tier):
    tier = open_tier(url=server.url(), cool_down_s=3600)
    server.kill()
    server.start()
    assert tier.write(A, *encoded(kv()))
    assert tier.read(A, 0) is not None
    assert tier.counts["failed"] == 0


def test_a_server_that_is_down_at_opening_is_no_error_and_comes_back(server, open_tier, caplog):
    server.kill()
    tier = open_tier(url=server.url(), cool_down_s=0)
    assert tier.breaker.is_open
    assert (tier.entries(), tier.nbytes, tier.write(A, *encoded(kv()))) == ({}, 0, False)
    assert len(caplog.records) == 1
    server.start()
    assert tier.write(A, *encoded(kv()))
    assert not tier.breaker.is_open


def test_a_server_without_memory_keeps_what_it_has_and_says_so_once(server, open_tier, caplog):
    tier = open_tier(url=server.url())
    assert tier.write(A, *encoded(kv()))
    raw = server.raw()
    raw.config_set("maxmemory", 1)
    for i in range(5):
        assert not tier.write(key(i), *encoded(kv()))
    assert tier.counts["failed"] == 5
    assert len(caplog.records) == 1
    assert "maxmemory" in caplog.text
    assert not tier.breaker.is_open
    assert tier.read(A, 0, 3) is not None
    assert tier.entries()[A].hits == 1
    tier.pin([A], True)
    assert tier.entries()[A].pinned
    assert tier.delete([A]) == 1
    assert (tier.nbytes, raw.keys(f"{PREFIX}[cn]*")) == (0, [])
    raw.config_set("maxmemory", 0)
    assert tier.write(B, *encoded(kv()))


def test_memory_that_ends_in_the_middle_of_an_upload_leaves_nothing(server, open_tier, caplog):
    tier = open_tier(1 << 30, url=server.url())
    raw = server.raw()
    raw.config_set("maxmemory", raw.info("memory")["used_memory"] + (1 << 20))
    kept = [tier.write(key(i), *encoded(kv(n=2000))) for i in range(12)]
    assert True in kept
    assert False in kept
    assert tier.counts["failed"] == kept.count(False)
    assert tier.nbytes == sum(entry.nbytes for entry in tier.entries().values())
    assert len(tier.entries()) == kept.count(True)
    assert raw.keys(f"{PREFIX}new:*") == []
    assert "maxmemory" in caplog.text
    assert "<memory at" not in caplog.text
    texts = [record.getMessage().partition("could not")[2].partition(": ")[2] for record in caplog.records]
    assert len(texts) == len(set(texts))


# reaching it


BAD_URLS = [
    "http://user:secret@host/0",
    "redis://user:secret/1@host:6379/0",
    "redis://user:secret@host:port/0",
    "redis://user:secret@host:6379/zero",
    "redis://:secret@/0",
    "unix://user:secret@",
    "secret",
    "",
]


@pytest.mark.parametrize("bad", BAD_URLS)
def test_a_url_that_cannot_be_used_is_refused_without_its_password(bad):
    with pytest.raises(StoreError, match=r"wanted.*found.*correct it") as caught:
        RedisTier(bad, 1 << 20, lru)
    assert "secret" not in "".join(traceback.format_exception(caught.value))


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(StoreError, match=r"pip install 'ragfuse-kv\[redis\]'"):
        RedisTier("redis://localhost", 1 << 20, lru)


def test_user_and_password_come_from_the_url(server, open_tier, caplog):
    caplog.set_level(logging.DEBUG)
    server.raw().execute_command("ACL", "SETUSER", "me", "on", ">se@cret", "~ragfuse:*", "+@all")
    server.raw().config_set("requirepass", "general")
    tier = open_tier(url=server.url(auth="me:se%40cret@"), cool_down_s=0)
    assert tier.write(A, *encoded(kv()))
    assert tier.read(A, 0, 3) is not None
    assert tier.counts["failed"] == 0
    server.kill()
    assert tier.entries() == {}
    assert "se@cret" not in caplog.text + repr(tier) + repr(vars(tier))
    assert "se%40cret" not in caplog.text + repr(tier) + repr(vars(tier))


@pytest.mark.parametrize("auth", ["", ":wrong-one@", "nobody:wrong-one@"])
def test_a_wrong_password_is_a_tier_that_is_left_out_and_says_why(server, open_tier, auth, caplog):
    server.raw().config_set("requirepass", "right-one")
    tier = open_tier(url=server.url(auth=auth), cool_down_s=3600)
    assert not tier.write(A, *encoded(kv()))
    assert tier.entries() == {}
    assert (tier.breaker.attempts, tier.counts["failed"]) == (1, 2)
    (record,) = caplog.records
    assert "AuthenticationError" in record.message
    assert f"redis://127.0.0.1:{server.port}/0" in record.message
    assert "wrong-one" not in caplog.text + repr(tier) + repr(vars(tier))


def test_a_user_who_may_not_is_told_once_and_keeps_nothing(server, open_tier, caplog):
    server.raw().execute_command("ACL", "SETUSER", "me", "on", ">pw", "~other:*", "+@all")
    tier = open_tier(url=server.url(auth="me:pw@"))
    assert not tier.write(A, *encoded(kv()))
    assert (tier.entries(), tier.read(A, 0), tier.counts["failed"]) == ({}, None, 4)
    assert len({record.message for record in caplog.records}) == len(caplog.records) <= 3


def test_a_server_that_is_no_redis_is_left_out(open_tier, tmp_path):
    code = "import http.server as h; s = h.HTTPServer(('127.0.0.1', 0), h.BaseHTTPRequestHandler); "
    code += "print(s.server_port, flush=True); s.serve_forever()"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        tier = open_tier(url=f"redis://127.0.0.1:{int(process.stdout.readline())}", cool_down_s=3600)
        assert tier.breaker.is_open
        assert tier.entries([A]) == {}
    finally:
        process.kill()
        process.communicate()


def test_a_unix_socket_will_do(server, open_tier):
    tier = open_tier(url=f"unix://{server.folder}/s?db=3")
    assert tier.write(A, *encoded(kv()))
    assert server.raw(3).exists(chunk_name(A))


def test_tls_checks_the_servers_certificate(tmp_path, open_tier, caplog):
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed: apt-get install openssl")
    cert, secret = tmp_path / "cert.pem", tmp_path / "key.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    new = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    subprocess.run([*new, *subject, "-keyout", secret, "-out", cert], check=True, capture_output=True)
    port = free_port()
    tls = ["--tls-port", port, "--tls-cert-file", cert, "--tls-key-file", secret, "--tls-auth-clients", "no"]
    server = RedisServer(tmp_path, *tls)
    try:
        trusting = open_tier(url=f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={cert}")
        assert trusting.write(A, *encoded(kv()))
        assert trusting.read(A, 0) is not None
        assert caplog.records == []
        wary = open_tier(url=f"rediss://127.0.0.1:{port}/0")
        assert wary.breaker.is_open
        assert "add ?ssl_ca_certs=FILE to its URL" in caplog.text
        assert wary.entries() == {}
    finally:
        server.kill()
