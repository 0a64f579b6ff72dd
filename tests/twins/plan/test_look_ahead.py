"""Prefetching and the read buffer, against the paper's formulas and against trying."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ragfuse.plan.controller import layers_before, to_prefetch
from ragfuse.types.keys import ChunkKey
from ragfuse.types.plan import Fetch, Forecast, LoadPlan
from ragfuse.types.prompt import Prompt, Segment


@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 9)), max_size=12),
    st.integers(0, 30),
)
def test_what_is_fetched_is_the_beginning_of_the_queue_that_fits_in_its_order(queue, room):
    most = max(
        n for n in range(len(queue) + 1) if n == 0 or sum(size for _, size in queue[:n]) <= room
    )
    assert list(to_prefetch(queue, room)) == [name for name, _ in queue[:most]]


def planned(load_s, compute_s, past=1000, new=100, nbytes=1 << 20):
    """A plan that reads so many tokens and bytes, and what that takes."""
    segments = (
        Segment((1,) * past, 0, "history", (ChunkKey("m", "t"),)),
        Segment((2,) * new, past),
    )
    fetches = (Fetch(0, ChunkKey("m", "t"), "disk", "raw", nbytes, past),)
    return LoadPlan(
        Prompt(segments), 0.0, "none", fetches, forecast=Forecast(load_s, compute_s, load_s, 9.0)
    )


@given(st.floats(0.01, 9), st.floats(0.01, 9), st.integers(1, 48))
def test_with_so_many_layers_read_before_no_layer_is_waited_for_and_with_fewer_one_is(
    load_s, compute_s, n_layers
):
    before = layers_before(planned(load_s, compute_s), n_layers)

    def waits(buffered):
        there = [max(0, layer + 1 - buffered) * load_s / n_layers for layer in range(n_layers)]
        return any(at > layer * compute_s / n_layers + 1e-9 for layer, at in enumerate(there))

    assert not waits(before + 1)  # the first of all is waited for where nothing is read before
    assert before == 0 or waits(before - 1)


def test_a_buffer_is_none_where_loading_hides_and_where_nothing_was_measured():
    assert layers_before(planned(1.0, 2.0), 30) == 0
    assert layers_before(planned(4.0, 1.0), 40) == 30
    assert layers_before(replace(planned(4.0, 1.0), forecast=None), 40) == 0
    assert layers_before(replace(planned(4.0, 1.0), fetches=()), 40) == 0
