import os
import stat

import pytest

from ragfuse.process.folders import make_own_folder


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=oct)
def umask(request):
    before = os.umask(request.param)
    yield
    os.umask(before)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_all_missing_folders_are_for_this_user_alone(tmp_path, umask):
    tmp_path.chmod(0o755)
    make_own_folder(tmp_path / "home" / "models" / "reader")
    assert [
        mode(tmp_path / part) for part in (".", "home", "home/models", "home/models/reader")
    ] == [
        0o755,
        0o700,
        0o700,
        0o700,
    ]


def test_a_folder_that_is_there_keeps_its_mode(tmp_path):
    (tmp_path / "home").mkdir(mode=0o755)
    (tmp_path / "home").chmod(0o755)
    make_own_folder(tmp_path / "home")
    make_own_folder(tmp_path / "home" / "store")
    assert (mode(tmp_path / "home"), mode(tmp_path / "home" / "store")) == (0o755, 0o700)


def test_a_file_in_the_way_is_told(tmp_path):
    (tmp_path / "home").write_text("")
    with pytest.raises(OSError, match="home"):
        make_own_folder(tmp_path / "home")
    with pytest.raises(OSError, match="home"):
        make_own_folder(tmp_path / "home" / "store")
