"""What the OpenAPI document promises, tried with requests made up from it: no server error, no
other answers.
"""

from __future__ import annotations

import pytest

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")

from hypothesis import HealthCheck, given, settings  # noqa: E402

from ragfuse.serve.service import Service  # noqa: E402
from tests.kits.serve import Served  # noqa: E402

ASKED = {
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("GET", "/v1/ragfuse/model"),
    ("POST", "/v1/ragfuse/tokens"),
    ("POST", "/v1/responses"),
    ("GET", "/v1/responses/{id}"),
    ("DELETE", "/v1/responses/{id}"),
    ("POST", "/v1/embeddings"),
    ("GET", "/v1/ragfuse/documents"),
    ("POST", "/v1/ragfuse/documents"),
    ("POST", "/v1/ragfuse/documents/search"),
    ("GET", "/v1/ragfuse/documents/{id}"),
    ("DELETE", "/v1/ragfuse/documents/{id}"),
    ("GET", "/v1/ragfuse/live"),
    ("DELETE", "/v1/ragfuse/entries"),
    ("GET", "/v1/ragfuse/sessions"),
    ("DELETE", "/v1/ragfuse/sessions/{id}"),
    ("GET", "/v1/ragfuse/store"),
    ("POST", "/v1/ragfuse/explain"),
    ("GET", "/v1/ragfuse/schemas"),
    ("POST", "/v1/ragfuse/schemas"),
    ("GET", "/v1/ragfuse/schemas/{name}"),
    ("DELETE", "/v1/ragfuse/schemas/{name}"),
    ("GET", "/health"),
    ("GET", "/metrics"),
}


@pytest.fixture
def document(served: Served) -> object:
    return served.get("/openapi.json").json()


def test_the_document_names_every_route_and_what_may_come_instead(document: dict) -> None:
    found = {(method.upper(), path) for path, told in document["paths"].items() for method in told}
    assert found == ASKED
    for told in document["paths"].values():
        for operation in told.values():
            assert {"200", "4XX", "5XX"} <= set(operation["responses"])
            assert "422" not in operation["responses"]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "path"), sorted(ASKED))
def test_no_request_that_can_be_made_up_is_a_server_error(
    served: Served, method: str, path: str
) -> None:
    operation = schemathesis.openapi.from_url(f"{served.root}/openapi.json")[path][method]
    checks = schemathesis.checks
    kept = [each for each in checks.CHECKS.get_all() if each.__name__ == "status_code_conformance"]
    met = list[int]()

    @settings(
        max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    @given(case=operation.as_strategy())
    def ask(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict):
            _ask_little(case.body, served.service)
        answer = case.call(timeout=120)
        met.append(answer.status_code)
        case.validate_response(answer, checks=[checks.not_a_server_error, *kept])

    ask()
    assert met


def _ask_little(body: dict, service: Service) -> None:
    """So that an example takes no time: a model that there is, short answers."""
    if "model" in body and len(str(body["model"])) % 3:
        body["model"] = service.model
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if isinstance(body.get(name), int) and body[name] > 8:
            body[name] = 8
