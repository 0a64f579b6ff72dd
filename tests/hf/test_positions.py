"""A run is encoded at positions with gaps, and a prompt over such runs is what its own prefill there would be."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ragfuse.errors import InputError, ModelError, RefusedError
from ragfuse.fuse.fusor import CachedRun
from ragfuse.hf.handover import generate, sharing
from ragfuse.hf.model import HFModel, KVSource
from ragfuse.hf.probe import decoder_layers
from tests.hf import kit
from tests.hf.families import FAMILIES, REFUSED

EXACT = 5e-6
ROTATED = ["llama", "gemma3-two-ropes", "glm-interleaved", "smollm3-some-nope", "deepseek-latent", "gpt-neox-partial"]
UNMARKED = ["bloom-alibi", "falcon-alibi", "mpt-alibi"]
FIXED = ["gpt2", "opt", "gpt-bigcode", "xglm", "gptj", "codegen", "hunyuan"]
GAPPED = [*range(9), *range(20, 33), *range(40, 44)]
options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def at(start: int) -> list[int]:
    return [start + position for position in GAPPED]


def own(name: str, ids: list[int], positions: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The KV of the family's own forward at these positions."""
    model = kit.family(name).model
    with torch.no_grad():
        out = model(input_ids=kit.tensor([ids]), position_ids=kit.tensor([positions]), use_cache=True)
    return [(layer.keys[0], layer.values[0]) for layer in out.past_key_values.layers]


def among(name: str, ids: list[int], positions: list[int], n_more: int = 0) -> tuple[list[int], torch.Tensor, list]:
    """Greedy ids, logits and KV of the family's own forward over a row without gaps, others standing in them unseen."""
    model, rows = kit.family(name).model, list(positions)
    row = [77] * (positions[-1] + 1)
    for position, token in zip(positions, ids, strict=True):
        row[position] = token
    unseen = [at for at in range(len(row)) if at not in set(positions)]

    def hide(module, args, kwargs):
        mask = kwargs["attention_mask"].clone()
        mask[..., unseen] = True if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
        return args, {**kwargs, "attention_mask": mask}

    handles = [layer.register_forward_pre_hook(hide, with_kwargs=True) for layer in decoder_layers(model)]
    try:
        with torch.no_grad():
            for _ in range(n_more + 1):
                out = model(input_ids=kit.tensor([row]), use_cache=True)
                row.append(int(out.logits[0, -1].argmax()))
    finally:
        for handle in handles:
            handle.remove()
    kv = [(layer.keys[0][:, rows], layer.values[0][:, rows]) for layer in out.past_key_values.layers]
    return row[positions[-1] + 1 : -1] if n_more else [], out.logits[0, rows[-1]], kv


@pytest.mark.parametrize("name", UNMARKED)
@pytest.mark.parametrize("start", [0, 7])
def test_biases_count_positions_and_not_keys(name: str, start: int) -> None:
    model, ids = kit.family(name), kit.ids(len(GAPPED))
    written, _, kv = among(name, ids, at(start), 8)
    assert kit.worst(kit.copied(model.encode_at(ids, at(start))), kv) < EXACT
    full = model.full_prefill(ids, torch.tensor(at(start)))
    assert kit.off(full.logits, among(name, ids, at(start))[1]) < EXACT
    assert generate(model, full.copy(), options) == [written]
    follow = model.score_continuation(full, [5, 9, 2])
    wanted = among(name, [*ids, 5, 9], [*at(start), start + 44, start + 45])[1]
    assert kit.off(follow[-1], wanted) < EXACT


@pytest.mark.parametrize("name", UNMARKED)
def test_all_rows_computed_again_behind_gaps_equal_full_prefill(name: str) -> None:
    model, ids = kit.family(name), kit.ids(len(GAPPED) + 2)
    positions = torch.tensor([*at(0), 50, 51])
    source = KVSource([model.encode(ids[:9]), model.encode(ids[9:22]), model.encode(ids[22:26])])
    runs = [CachedRun(at, *span, blend=True) for at, span in enumerate([(0, 9, 0), (9, 22, 20), (22, 26, 40)])]
    fused, full = model.fuse(ids, positions, runs, source, "hkvd", 1.0), model.full_prefill(ids, positions)
    assert kit.off(fused.logits, full.logits) < EXACT
    assert kit.worst(kit.states(fused), kit.states(full)) < EXACT
    some = model.fuse(ids, positions, runs, source, "hkvd", 0.5)
    assert 1e-4 < kit.off(some.logits, full.logits) < kit.off(reused(model, ids, positions, runs, source), full.logits)


def reused(
    model: HFModel, ids: list[int], positions: torch.Tensor, runs: list[CachedRun], source: KVSource
) -> torch.Tensor:
    return model.fuse(ids, positions, runs, source, "none", 0.0).logits


@pytest.mark.parametrize("name", UNMARKED)
@pytest.mark.parametrize("jump", [700, 3000])
@pytest.mark.parametrize("lead", [0, 9])
def test_a_long_gap_costs_no_precision(name: str, jump: int, lead: int) -> None:
    """16 bits count coarsely where numbers are large: what is near must not."""
    if name == "mpt-alibi":
        jump = 440
    ids, positions = kit.ids(30), torch.tensor([*range(lead), *range(jump, jump + 30 - lead)])
    ends = []
    for dtype in (torch.float32, torch.bfloat16):
        model = kit.family(name, dtype)
        full = model.full_prefill(ids, positions)
        ends.append((full.logits, model.score_continuation(full, [5, 9, 2])[-1]))
    plain = [kit.family(name, dtype).full_prefill(ids).logits for dtype in (torch.float32, torch.bfloat16)]
    rounding = max(kit.off(plain[1].float(), plain[0]), 0.01)
    for exact, rounded in zip(*ends, strict=True):
        assert kit.off(rounded.float(), exact.float()) < 3 * rounding


@pytest.mark.parametrize("name", UNMARKED)
def test_what_stands_anywhere_without_gaps_needs_no_biases_of_ours(name: str) -> None:
    model, ids = kit.family(name), kit.ids(20)
    assert sharing(model, model.full_prefill(ids, torch.arange(7, 27)))[0] is not None
    assert sharing(model, model.full_prefill(ids, torch.tensor([*range(10), *range(12, 22)]))) == (None, None)
    there = model.full_prefill(ids, torch.arange(100, 120))
    assert kit.off(there.logits, model.full_prefill(ids).logits) < EXACT


def test_biases_that_are_not_found_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = HFModel(kit.build(*FAMILIES["bloom-alibi"][:2]), None)
    monkeypatch.setattr("ragfuse.hf.biases._is_bias", lambda name, value: False)
    with pytest.raises(ModelError, match="bloom passes no position biases"):
        model.encode_at([1, 2, 3], [0, 1, 9])


@pytest.mark.parametrize("name", UNMARKED)
def test_several_rows_are_written_behind_gaps(name: str) -> None:
    model, ids = kit.family(name), kit.ids(len(GAPPED))
    full = model.full_prefill(ids, torch.tensor(at(0)))
    written = among(name, ids, at(0), 8)[0]
    drawn = {**options, "do_sample": True, "top_k": 1, "num_return_sequences": 3}
    assert generate(model, full, drawn) == [written] * 3


@pytest.mark.parametrize("name", UNMARKED)
def test_answers_behind_gaps_and_without_are_written_at_the_same_time(name: str) -> None:
    model, ids = kit.family(name), kit.ids(len(GAPPED))
    gapped, plain = model.full_prefill(ids, torch.tensor(at(0))), model.full_prefill(ids)
    wanted = [generate(model, each.copy(), options) for each in (gapped, plain, plain)]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda each: generate(model, each, options), [gapped, plain, plain.copy()]))
    assert found == wanted


@pytest.mark.parametrize("name", [name for name in (*ROTATED, *UNMARKED) if name != "gemma3-two-ropes"])
def test_what_follows_is_predicted_behind_the_last_position(name: str) -> None:
    model, ids = kit.family(name), kit.ids(len(GAPPED))
    follow = model.score_continuation(model.full_prefill(ids, torch.tensor(at(3))), [5, 9, 2])
    whole = model.full_prefill([*ids, 5, 9], torch.tensor([*at(3), 47, 48]))
    assert kit.off(follow[-1], whole.logits) < EXACT


def test_a_prompt_beyond_the_last_bias_is_refused() -> None:
    model = kit.family("mpt-alibi")
    longest = model.max_context
    assert longest == 512
    with pytest.raises(InputError, match=f"{longest + 1} positions, and this model has {longest}"):
        model.encode_at([1, 2, 3], [0, 1, longest])


@pytest.mark.parametrize("name", [*ROTATED, *FIXED])
def test_a_run_with_gaps_equals_the_models_own_forward_there(name: str) -> None:
    model, ids = kit.family(name), kit.ids(len(GAPPED))
    encoded = model.encode_at(ids, at(7))
    windowed = any(window is not None for window in model.profile.windows)
    assert windowed or kit.worst(kit.copied(encoded), own(name, ids, at(7))) < EXACT
    assert kit.worst(kit.copied(encoded), kit.copied(model.encode_at(ids, range(7, 7 + len(ids))))) > 1e-4
    for layer in encoded.layers:
        assert layer.keys.untyped_storage().nbytes() == layer.keys.nbytes


@pytest.mark.parametrize("name", [*ROTATED, *UNMARKED, *FIXED])
def test_a_run_without_gaps_is_encoded_as_ever(name: str) -> None:
    model, ids = kit.family(name), kit.ids(20)
    pairs = zip(kit.copied(model.encode_at(ids, range(20))), kit.copied(model.encode(ids)), strict=True)
    assert all(torch.equal(a, b) for one, other in pairs for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", [*ROTATED, *UNMARKED, *FIXED])
def test_a_prompt_from_one_run_with_gaps_equals_its_full_prefill(name: str) -> None:
    """Encoded from 0 on and turned to where it stands; where nothing can be turned, encoded there."""
    model, ids, start = kit.family(name), kit.ids(len(GAPPED) + 3), 11
    positions = torch.tensor([*at(start), 60, 61, 62])
    n_run = len(GAPPED)
    kv = model.encode_at(ids[:n_run], at(start if model.profile.fixed else 0))
    turn = 0 if model.profile.fixed else start
    fused = model.fuse(ids, positions, [CachedRun(0, 0, n_run, turn, blend=False)], KVSource([kv]), "none", 0.0)
    full = model.full_prefill(ids, positions)
    assert kit.off(fused.logits, full.logits) < EXACT
    assert kit.worst(kit.states(fused), kit.states(full)) < EXACT
    assert generate(model, fused, options) == generate(model, full, options)


@pytest.mark.parametrize("name", [*ROTATED, *UNMARKED, *FIXED])
def test_a_full_prefill_honours_its_positions(name: str) -> None:
    model, ids = kit.family(name), kit.ids(len(GAPPED))
    gapped, plain = model.full_prefill(ids, torch.tensor(at(0))), model.full_prefill(ids)
    assert kit.off(gapped.logits, plain.logits) > 1e-4
    assert torch.equal(model.full_prefill(ids, torch.arange(len(ids))).logits, plain.logits)


@pytest.mark.parametrize("name", FIXED)
def test_what_stays_where_it_was_encoded_is_used_there_and_never_blended(name: str) -> None:
    model, ids = kit.family(name), kit.ids(30)
    assert model.profile.fixed
    assert model.profile.refusal
    source = KVSource([model.encode(ids[:20])])
    with pytest.raises(RefusedError):
        model.fuse(ids, torch.arange(30), [CachedRun(0, 0, 20, 0, blend=True)], source, "hkvd", 0.3)


def test_only_what_is_right_at_its_own_positions_stays_there() -> None:
    assert sorted(name for name in REFUSED if kit.family(name).profile.fixed) == sorted(FIXED)
