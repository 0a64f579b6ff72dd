"""Where a chunk should lie: the cheapest place that is fast enough, a faster one once it is hit
often.
"""

from hypothesis import given
from hypothesis import strategies as st

from ragfuse.plan.controller import PRICES, choose_tier
from tests.kits.plan import NBYTES_PER_TOKEN, machine

ALL = ("memory", "redis", "disk", "objects")
N, NBYTES = 500, 500 * NBYTES_PER_TOKEN


def chosen(ratio=0.15, tiers=ALL, **byte_s):
    return choose_tier(N, NBYTES, machine(**byte_s), {tier: ["raw"] for tier in tiers}, ratio)


def test_tiers_that_were_not_measured_are_not_chosen():
    assert chosen() == "disk"
    assert chosen(tiers=("objects",)) is None


@given(st.floats(0, 1), st.dictionaries(st.sampled_from(ALL), st.floats(1e-12, 1e-6), min_size=1))
def test_what_is_chosen_hides_or_nothing_does(ratio, byte_s):
    measured = machine(**byte_s)
    tier = choose_tier(N, NBYTES, measured, {name: ["raw"] for name in ALL}, ratio)
    load_s = {name: measured.load_s(name, NBYTES) for name in ALL if name in measured.tiers}
    hidden = {name for name, seconds in load_s.items() if seconds <= measured.recompute_s(ratio, N)}
    assert tier in hidden or (not hidden and load_s[tier] == min(load_s.values()))
    assert all(PRICES[tier] <= PRICES[name] for name in hidden)


def test_a_tier_s_price_is_that_of_its_kind():
    far = {"objects-2": ["raw"], "disk": ["raw"], "tape": ["raw"]}
    costs = machine(**{"objects-2": 0.0, "tape": 0.0})
    assert choose_tier(N, NBYTES, costs, far, 1.0) == "objects-2"
