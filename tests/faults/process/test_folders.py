"""Folders of ragfuse's own are for this user alone."""

import os
import stat

import pytest

from ragfuse.process.folders import make_own_folder


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=oct)
def umask(request):
    before = os.umask(request.param)
    yield
    os.umask(before)


def test_all_missing_folders_are_for_this_user_alone_and_others_keep_their_mode(tmp_path, umask):
    tmp_path.chmod(0o755)
    make_own_folder(tmp_path)
    make_own_folder(tmp_path / "home" / "models" / "reader")
    folders = (".", "home", "home/models", "home/models/reader")
    modes = [stat.S_IMODE((tmp_path / folder).stat().st_mode) for folder in folders]
    assert modes == [0o755, 0o700, 0o700, 0o700]


def test_a_file_where_a_folder_is_wanted_is_an_error(tmp_path):
    (tmp_path / "home").write_text("")
    for folder in (tmp_path / "home", tmp_path / "home" / "store"):
        with pytest.raises(OSError, match="home"):
            make_own_folder(folder)
