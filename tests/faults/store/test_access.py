"""Who may read what is written on disk: this user alone, whatever the umask; a group where that is
meant.
"""

import os
import stat
from contextlib import closing

import pytest

from ragfuse.plan.evict import lru
from ragfuse.store import Catalog, DiskTier
from ragfuse.store.folder import make_root
from ragfuse.store.objects import ObjectTier
from tests.kits.store import encoded, key, kv


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=oct)
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(root):
    """Modes of folders and of files from here on, each once."""
    found = [root, *root.rglob("*")]
    kinds = {True: set(), False: set()}
    for path in found:
        kinds[path.is_dir()].add(stat.S_IMODE(path.stat().st_mode))
    return kinds[True], kinds[False]


def filled(tier):
    assert tier.put(key("a"), *encoded(kv(1)))
    tier.pin([key("a")], True)
    assert tier.get(key("a"), range(1)) is not None
    tier.touch([key("a")])
    return tier


def on_disk(root):
    return filled(DiskTier(root, 1 << 20, lru))


def behind_a_url(root):
    return filled(ObjectTier(root.as_uri()))


def a_book(root):
    book = Catalog(root).strict
    book.put("name", {"a": 1})
    return book


PLACES = [on_disk, behind_a_url, a_book]


@pytest.mark.parametrize("make", PLACES, ids=lambda make: make.__name__)
def test_what_is_written_is_for_this_user_alone_whatever_the_umask(tmp_path, umask, make):
    with closing(make(tmp_path / "deep" / "place")):
        assert modes(tmp_path / "deep" / "place") == ({0o700}, {0o600})


@pytest.mark.parametrize("make", PLACES, ids=lambda make: make.__name__)
def test_what_is_shared_is_for_the_group_whatever_the_umask(tmp_path, umask, make):
    (tmp_path / "place").mkdir()
    (tmp_path / "place").chmod(0o2770)
    with closing(make(tmp_path / "place")):
        assert modes(tmp_path / "place") == ({0o2770}, {0o660})


@pytest.mark.parametrize("make", PLACES, ids=lambda make: make.__name__)
@pytest.mark.parametrize("mode", [0o755, 0o770, 0o777, 0o701])
def test_a_folder_that_lets_others_in_is_warned_about_once_and_its_files_are_for_this_user(
    tmp_path, caplog, make, mode
):
    place = tmp_path / "place"
    place.mkdir()
    place.chmod(mode)
    for _ in range(2):
        with closing(make(place)):
            pass
    (told,) = [
        record.getMessage() for record in caplog.records if "chmod go=" in record.getMessage()
    ]
    assert f"{place} (mode {mode:04o})" in told
    assert f"chmod 2770 {place}" in told
    assert modes(place)[1] == {0o600}
    assert stat.S_IMODE(place.stat().st_mode) == mode, "it is the user's to change"


def test_an_index_of_documents_is_for_this_user_alone(tmp_path, umask):
    from ragfuse.cli.library import replace_file

    make_root(tmp_path / "index")
    replace_file(tmp_path / "index" / "a.json", lambda path: path.write_text("{}"))
    assert modes(tmp_path / "index") == ({0o700}, {0o600})
