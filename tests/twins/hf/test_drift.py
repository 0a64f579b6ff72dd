"""A model's drift: read from its folder, part of its name, added to chunks that are encoded behind
filler text only.
"""

import pytest
import torch

from ragfuse.errors import ModelError
from ragfuse.fuse.rope import added
from ragfuse.hf.model import HFModel
from ragfuse.models.adapters import DRIFT_NAME
from ragfuse.models.loader import load_model
from ragfuse.types.kv import ChunkKV, LayerKV
from tests.kits import hf as kit
from training.drift import write_drift


def drift_of(model: HFModel, size: float = 0.1) -> ChunkKV:
    torch.manual_seed(3)
    layers = model.encode([5]).layers
    pairs = (
        (size * torch.randn(part.shape) for part in (layer.keys, layer.values)) for layer in layers
    )
    return ChunkKV(tuple(LayerKV(*pair) for pair in pairs))


@pytest.fixture
def folder(tmp_path):
    kit.build("llama", {}).save_pretrained(tmp_path)
    kit.tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_a_drift_is_added_to_chunks_behind_filler_text_alone(folder):
    plain = load_model(folder, "float32")
    drift = drift_of(plain)
    write_drift(folder, drift)
    model = load_model(folder, "float32")
    context, chunk = [3, 4, 5, 6], [9, 8, 7]
    found, encoded = model.encode_with_filler(chunk, context), plain.encode(chunk, context)
    assert kit.apart(found, added(encoded, drift, plain.profile.rope)) == 0.0
    for other in (model.encode(chunk, context), plain.encode_with_filler(chunk, context)):
        assert kit.apart(other, encoded) == 0.0
    assert kit.apart(found, encoded) > 0.01


def test_a_drift_is_part_of_the_fingerprint(folder):
    plain = load_model(folder, "float32")
    seen = {plain.fingerprint}
    for size in (0.1, 0.2):
        write_drift(folder, drift_of(plain, size))
        seen.add(load_model(folder, "float32").fingerprint)
        assert load_model(folder, "float32").fingerprint in seen
    assert len(seen) == 3


def test_a_truncated_drift_file_is_an_error(folder):
    plain = load_model(folder, "float32")
    write_drift(folder, drift_of(plain))
    (folder / DRIFT_NAME).write_bytes((folder / DRIFT_NAME).read_bytes()[:100])
    with pytest.raises(ModelError, match=DRIFT_NAME):
        load_model(folder, "float32")
