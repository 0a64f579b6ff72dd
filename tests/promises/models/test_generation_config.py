"""A model's generation config is completed where it has no end."""

from ragfuse.engine.request import ends_of
from ragfuse.models.loader import load_model


def test_the_tokenizers_end_ends_an_answer_where_the_config_has_none(folder):
    config = folder / "generation_config.json"
    config.write_text("{}")
    model = load_model(folder, "float32")
    assert model.tokenizer.eos_token_id is not None
    assert ends_of(model) == (model.tokenizer.eos_token_id,)
    config.write_text('{"eos_token_id": [7, 8]}')
    assert ends_of(load_model(folder, "float32")) == (7, 8)
