"""The radix tree over earlier prompts: what it finds is what a list of all prompts would find."""

from hypothesis import given
from hypothesis import strategies as st

from ragfuse.store.radix import RadixTree, Rows
from ragfuse.types.keys import ChunkKey
from tests.kits.operations import MOST_GROWTH, lines


def key(name):
    return ChunkKey("model", str(name))


def test_what_holds_a_run_of_ids_is_found_across_edges_and_from_there_on():
    tree = RadixTree()
    tree.insert([1, 2, 3, 4], [Rows(0, 2, key("one")), Rows(2, 4, key("two"))])
    tree.insert([1, 2, 9, 9], [Rows(0, 2, key("one")), Rows(2, 4, key("three"))])
    assert tree.holding([2, 3]) == {key("two")}
    assert tree.holding([1]) == {key("one"), key("two"), key("three")}
    assert tree.holding([4, 1]) == set()


ids = st.lists(st.integers(0, 3), min_size=1, max_size=12)


@given(st.lists(st.tuples(ids, st.none() | st.integers(0, 9)), min_size=1, max_size=25))
def test_it_finds_what_a_list_of_all_prompts_finds_also_behind_entries_that_are_gone(prompts):
    """A token's entry is that of the first prompt that had it behind the same ones."""
    tree, twin = RadixTree(), {}
    for number, (prompt, gone) in enumerate(prompts):
        tree.insert(prompt, [Rows(0, len(prompt), key(number))])
        beginnings = [tuple(prompt[: at + 1]) for at in range(len(prompt))]
        for at, beginning in enumerate(beginnings):
            twin.setdefault(beginning, (key(number), at))
        if gone is not None:
            tree.discard({key(gone)})
            twin = {ids: entry for ids, entry in twin.items() if entry[0] != key(gone)}
        found = [
            (at, (rows.key, rows.row + at - rows.lo))
            for rows in tree.match(prompt)
            for at in range(rows.lo, rows.hi)
        ]
        assert found == [(at, twin[ids]) for at, ids in enumerate(beginnings) if ids in twin]
        assert tree.keys == {entry[0] for entry in twin.values()}
    tree.discard(tree.keys)
    assert tree.n_nodes == 0


def test_many_parts_are_put_in_by_as_many_steps():
    def work(n):
        parts = [Rows(lo, lo + 1, key(lo)) for lo in range(n)]
        tree, ids = RadixTree(), list(range(n))
        return lines(lambda: tree.insert(ids, parts))

    assert work(1600) <= MOST_GROWTH * work(200)
