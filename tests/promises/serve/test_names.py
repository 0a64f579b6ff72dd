"""The names under which a model is served, the line that a request leaves in the log, and the
pages' files.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from ragfuse.serve.server import HEADERS
from tests.kits.serve import BLUE, TENANTS, Served, access_lines, refused, wait_for


@pytest.fixture(scope="module")
def named(make_server: Callable[..., Served]) -> Served:
    """A server with keys, whose model has a name and an alias."""
    names = "reader, gpt-4o-mini,reader"
    return make_server(TENANTS[:1], max_tokens=4, served_model_name=names).of(BLUE)


def test_a_model_is_found_under_each_of_its_names_and_answers_under_the_first(
    named: Served,
) -> None:
    for name in ("reader", "gpt-4o-mini"):
        assert named.chat(model=name).json()["model"] == "reader"
    found = named.get("/v1/models").json()["data"]
    assert [each["id"] for each in found] == ["reader", "gpt-4o-mini", "minilm-l6"]


def test_another_name_is_refused_with_the_names_that_there_are(
    named: Served, varied_path: Path
) -> None:
    for name in ("gpt-5", str(varied_path)):
        assert "'reader', 'gpt-4o-mini'" in refused(named.chat(model=name), 404)["message"]


def test_a_request_leaves_one_line_without_its_key_and_its_question(
    named: Served, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "ragfuse.serve.access"):
        assert named.chat(model="reader").status_code == 200
        named.of("").get("/v1/mod%0Aels")
        named.get("/health")
        wait_for(lambda: [each for each in access_lines(caplog) if each.startswith("GET ")])
    lines = access_lines(caplog)[-2:]  # there may be a late one of the test before
    tenant = named.service.keys.tenants[0].name
    assert lines[0].startswith(f"POST /v1/chat/completions 200, tenant {tenant}, ")
    assert lines[1].startswith("GET /v1/mod%0Aels 401, ")
    assert not any(secret in "".join(lines) for secret in (BLUE, "lighthouse"))


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "text/html"),
        ("/page/api.js", "text/javascript"),
    ],
)
def test_the_pages_need_no_key_and_let_no_other_script_in(
    named: Served, path: str, kind: str
) -> None:
    answer = named.of("").get(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith(kind)
    assert HEADERS.items() <= dict(answer.headers).items()
    assert "unsafe" not in answer.headers["content-security-policy"]


def test_the_pages_folder_is_no_way_to_other_files(named: Served) -> None:
    for path in ("/page/..%2froutes.py", "/page/%2e%2e/routes.py", "/page/none.js"):
        answer = named.get(path)
        assert answer.status_code in (401, 404)
        assert "APIRouter" not in answer.text
