"""Samples from a seed for one thread, the same that torch's own state would give, and nobody
else's.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from ragfuse.hf.decode import Seeded, undrawn

WEIGHTS = torch.arange(1.0, 9.0)


def drawn() -> Tensor:
    return torch.multinomial(WEIGHTS, 5)


def drawn_after(seed: int) -> Tensor:
    torch.manual_seed(seed)
    return drawn()


def test_a_seed_gives_the_samples_of_torchs_own() -> None:
    wanted = [drawn_after(5), drawn()]
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    with Seeded(5):
        found = [drawn(), drawn()]
    assert all(map(torch.equal, found, wanted))
    assert torch.equal(torch.random.get_rng_state(), before)


def in_a_thread(draw: Callable[[], Tensor]) -> Tensor:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(draw).result()


@pytest.mark.parametrize("way", [in_a_thread, undrawn])
def test_other_threads_and_what_is_said_to_draw_nothing_go_past_it(
    way: Callable[..., Tensor],
) -> None:
    wanted, first = drawn_after(8), drawn_after(3)
    torch.manual_seed(8)
    with Seeded(3):
        assert torch.equal(way(drawn), wanted)
        assert torch.equal(drawn(), first)
