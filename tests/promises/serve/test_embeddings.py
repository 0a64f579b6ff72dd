"""`/v1/embeddings`, by OpenAI's own client, with the embedded embedder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kits.serve import Client, Served, refused

pytest.importorskip("sentence_transformers", reason="the extra of embedded models is not installed")

MODEL = "minilm-l6"
TEXTS = [
    "A lighthouse stands in the north.",
    "The keeper counts ships at night.",
    "Bread is made of flour.",
]


def test_texts_become_the_vectors_that_the_embedder_makes_of_them(
    client: Client, served: Served, minilm_path: Path
) -> None:
    create = client.openai.embeddings.create
    found = create(model=MODEL, input=TEXTS)  # the client asks for base64
    floats = create(model=MODEL, input=TEXTS, encoding_format="float")
    vectors = np.array([each.embedding for each in found.data], dtype=np.float32)
    assert np.array_equal(vectors, np.float32([each.embedding for each in floats.data]))
    assert np.allclose(vectors, served.service.embedder.embed(TEXTS), atol=1e-6)
    assert [each.index for each in found.data] == [0, 1, 2]
    assert (
        found.usage.prompt_tokens
        == found.usage.total_tokens
        == sum(served.service.embedder.lengths(TEXTS))
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": "word " * 600}, "input"),
        ({"input": "x", "dimensions": 64}, "dimensions"),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_name(
    served: Served, fields: dict[str, Any], param: str
) -> None:
    told = refused(served.post("/v1/embeddings", {"model": MODEL, **fields}))
    assert told["param"].startswith(param)


def test_another_model_is_not_found(served: Served) -> None:
    answer = served.post("/v1/embeddings", {"model": served.service.model, "input": "x"})
    assert MODEL in refused(answer, 404)["message"]
