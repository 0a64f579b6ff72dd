"""The radix tree over earlier prompts: what it finds is what a list of all prompts would find."""

from hypothesis import given
from hypothesis import strategies as st

from ragfuse.store.radix import RadixTree, Rows
from ragfuse.types.keys import ChunkKey
from tests.text.operations import MOST_GROWTH, lines


def key(name):
    return ChunkKey("model", name)


def spelled(tree, ids):
    """What a match says of each token: entry and row."""
    found = {}
    for rows in tree.match(ids):
        for at in range(rows.lo, rows.hi):
            found[at] = (rows.key, rows.row + at - rows.lo)
    return found


class Twin:
    """Every prompt in a list; a token's entry is that of the first prompt that had it behind the
    same ones.
    """

    def __init__(self):
        self.known = {}

    def insert(self, ids, parts):
        for part in parts:
            for at in range(part.lo, part.hi):
                self.known.setdefault(tuple(ids[: at + 1]), (part.key, part.row + at - part.lo))

    def match(self, ids):
        found = {}
        for at in range(len(ids)):
            if tuple(ids[: at + 1]) not in self.known:
                break
            found[at] = self.known[tuple(ids[: at + 1])]
        return found


def test_an_entry_that_is_gone_leaves_a_hole_that_the_next_prompt_fills():
    tree = RadixTree()
    tree.insert([1, 2, 3, 4], [Rows(0, 2, key("one")), Rows(2, 4, key("two"))])
    tree.discard({key("one")})
    assert tree.match([1, 2, 3, 4]) == [Rows(2, 4, key("two"))]
    tree.insert([1, 2, 3, 4], [Rows(0, 2, key("again")), Rows(2, 4, key("other"))])
    assert tree.match([1, 2, 3, 4]) == [Rows(0, 2, key("again")), Rows(2, 4, key("two"))]


def test_nodes_that_lead_nowhere_are_forgotten():
    tree = RadixTree()
    tree.insert([1, 2, 3], [Rows(0, 3, key("one"))])
    tree.insert([1, 2, 4, 5], [Rows(0, 2, key("one")), Rows(2, 4, key("two"))])
    tree.discard({key("one"), key("two")})
    assert (tree.n_nodes, tree.n_tokens, tree.keys) == (0, 0, set())


def test_what_holds_a_run_of_ids_is_found_across_edges_and_from_there_on():
    tree = RadixTree()
    tree.insert([1, 2, 3, 4], [Rows(0, 2, key("one")), Rows(2, 4, key("two"))])
    tree.insert([1, 2, 9, 9], [Rows(0, 2, key("one")), Rows(2, 4, key("three"))])
    assert tree.holding([2, 3]) == {key("two")}
    assert tree.holding([1]) == {key("one"), key("two"), key("three")}
    assert tree.holding([4, 1]) == set()


ids = st.lists(st.integers(0, 3), min_size=1, max_size=12)


@given(st.lists(ids, min_size=1, max_size=25))
def test_it_finds_what_a_list_of_all_prompts_finds(prompts):
    tree, twin = RadixTree(), Twin()
    for number, prompt in enumerate(prompts):
        assert spelled(tree, prompt) == twin.match(prompt)
        known = tree.match(prompt)
        at = known[-1].hi if known else 0
        parts = [*known, Rows(at, len(prompt), key(str(number)))] if at < len(prompt) else known
        tree.insert(prompt, parts)
        twin.insert(prompt, parts)
        assert spelled(tree, prompt) == twin.match(prompt)
        assert len(spelled(tree, prompt)) == len(prompt)
    assert tree.n_tokens == len(twin.known)


def test_many_parts_are_put_in_by_as_many_steps():
    def work(n):
        parts = [Rows(lo, lo + 1, key(str(lo))) for lo in range(n)]
        tree, ids = RadixTree(), list(range(n))
        return lines(lambda: tree.insert(ids, parts))

    assert work(1600) <= MOST_GROWTH * work(200)
