"""Numbers from a seed for one thread, the same that torch's own state would give, and nobody else's."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ragfuse.hf.seed import seeded, undrawn

WEIGHTS = torch.arange(1.0, 9.0)
DRAWS: dict[str, Callable[[], Tensor]] = {
    "multinomial": lambda: torch.multinomial(WEIGHTS, 5),
    "a method": lambda: WEIGHTS.multinomial(5),
    "bernoulli": lambda: torch.bernoulli(WEIGHTS / 9),
    "normal": lambda: torch.normal(WEIGHTS, WEIGHTS),
    "rand": lambda: torch.rand(3, device="cpu"),
    "randint": lambda: torch.randint(1000, (4,)),
    "randperm": lambda: torch.randperm(9),
    "in place": lambda: torch.empty(4).uniform_() + torch.empty(4).exponential_() + torch.empty(4).normal_(),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_seed_gives_the_numbers_of_torchs_own(draw: Callable[[], Tensor]) -> None:
    torch.manual_seed(5)
    wanted = [draw(), draw()]
    before = torch.random.get_rng_state()
    with seeded(5):
        found = [draw(), draw()]
    assert all(map(torch.equal, found, wanted))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_without_a_seed_torch_draws() -> None:
    torch.manual_seed(6)
    wanted = torch.rand(2)
    torch.manual_seed(6)
    with seeded(None):
        assert torch.equal(torch.rand(2), wanted)


def test_a_generator_that_is_given_is_used() -> None:
    wanted = torch.rand(2, generator=torch.Generator().manual_seed(1))
    with seeded(7):
        assert torch.equal(torch.rand(2, generator=torch.Generator().manual_seed(1)), wanted)


def test_other_threads_draw_their_own() -> None:
    torch.manual_seed(8)
    wanted = torch.rand(2)
    torch.manual_seed(8)
    found = []
    with seeded(3):
        thread = threading.Thread(target=lambda: found.append(torch.rand(2)))
        thread.start()
        thread.join()
    assert torch.equal(found[0], wanted)


def test_what_draws_nothing_goes_past_it() -> None:
    torch.manual_seed(9)
    wanted = torch.rand(2)
    torch.manual_seed(9)
    with seeded(3):
        assert torch.equal(undrawn(lambda: torch.rand(2)), wanted)
        torch.manual_seed(3)
        first = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(first, torch.rand(2))
    assert undrawn(lambda: 4) == 4
