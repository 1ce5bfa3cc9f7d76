"""Files and folders that appear whole or not at all."""

import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from dstool import files
from dstool.errors import ConfigError
from dstool.files import (
    in_run,
    new_folder,
    occupied,
    option,
    refuse_existing,
    refuse_replacing,
    refuse_unwritable,
    typed,
    write_text,
)


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def umask():
    """Set the umask of this process, and set it back."""
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


def tree(folder="."):
    """Everything below `folder`, with what is in the files."""
    paths = sorted(Path(folder).rglob("*"))
    return {str(p.relative_to(folder)): p.read_text() if p.is_file() else None for p in paths}


def mode(path):
    return stat.S_IMODE(Path(path).stat().st_mode)


class StopError(Exception):
    """What ends a block early."""


# write_text


def test_a_file_holds_the_text_as_utf8_with_its_line_ends():
    write_text(Path("a/b.txt"), "한글\r\n\n")
    assert Path("a/b.txt").read_bytes() == "한글\r\n\n".encode()
    assert list(tree()) == ["a", "a/b.txt"]


def test_a_file_is_replaced():
    Path("a.txt").write_text("old, and longer")
    write_text(Path("a.txt"), "new")
    assert tree() == {"a.txt": "new"}


def test_text_that_cannot_be_written_leaves_the_old_file_and_nothing_else():
    Path("a.txt").write_text("old")
    for path in ("a.txt", "new/folder/b.txt"):
        with pytest.raises(UnicodeEncodeError):
            write_text(Path(path), "half a pair: \ud800")
    assert tree() == {"a.txt": "old"}


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("folder", "folder cannot be written: Is a directory"),
        ("file/a.txt", "file/a.txt cannot be written: file is no folder"),
        ("file/b/c/a.txt", "file/b/c/a.txt cannot be written: file/b/c is no folder"),
    ],
)
def test_what_is_in_the_way_of_a_file_is_an_expected_failure(path, said):
    Path("folder").mkdir()
    Path("file").write_text("old")
    with pytest.raises(ConfigError) as caught:
        write_text(Path(path), "new")
    assert caught.value.message == said
    assert caught.value.hint
    assert tree() == {"file": "old", "folder": None}


@pytest.mark.parametrize(("mask", "expected"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_a_file_has_the_permissions_of_the_umask(umask, mask, expected):
    umask(mask)
    write_text(Path("a.txt"), "")
    assert mode("a.txt") == expected


# occupied and refuse_existing


def make(kind):
    path = Path("target")
    match kind:
        case "empty file":
            path.touch()
        case "empty folder":
            path.mkdir()
        case "full folder":
            path.mkdir()
            (path / ".hidden").touch()
        case "left-overs":
            path.mkdir()
            (path / ".tmp-model-x1").mkdir()
        case "broken link":
            path.symlink_to("gone")
        case "link to an empty folder":
            Path("real").mkdir()
            path.symlink_to("real")
    return path


KINDS = {
    "nothing": False,
    "empty file": True,
    "empty folder": False,
    "full folder": True,
    "left-overs": False,
    "broken link": True,
    "link to an empty folder": False,
}
by_kind = pytest.mark.parametrize(("kind", "taken"), KINDS.items(), ids=KINDS)


@by_kind
def test_occupied(kind, taken):
    assert occupied(make(kind)) is taken


@by_kind
def test_only_what_is_occupied_is_refused_and_nothing_with_force(kind, taken):
    path = make(kind)
    refuse_existing(path, force=True)
    if not taken:
        assert refuse_existing(path, force=False) is None
        return
    with pytest.raises(ConfigError, match=r"^target exists$") as caught:
        refuse_existing(Path("free"), path, force=False)
    assert "--force" in caught.value.hint


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no /proc")
def test_a_folder_that_the_permissions_promise_and_the_system_refuses():
    with pytest.raises(ConfigError, match=r"^/proc/foo/out cannot be written"):
        refuse_unwritable(Path("/proc/foo/out"))


@pytest.mark.parametrize("path", ["file/out", "x" * 300, "a/b"])
def test_what_can_be_written_is_found_out_without_a_trace(path):
    Path("file").write_text("old")
    if path == "a/b":
        refuse_unwritable(Path(path))
    else:
        with pytest.raises(ConfigError, match="cannot be written"):
            refuse_unwritable(Path(path))
    assert tree() == {"file": "old"}


# names that are typed


@pytest.mark.parametrize("name", ["out", "두 번째/model", "it's", "a b"])
def test_a_path_is_typed_as_a_shell_reads_it(name):
    done = subprocess.run(["sh", "-c", f"printf %s {typed(Path(name))}"], capture_output=True, check=True)
    assert done.stdout.decode() == name


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("here", "here"),
        ("checkpoint-1", "out/checkpoint-1"),
        ("checkpoint-9", "out/checkpoint-9"),
        ("checkpoint-9/global_step9", "out/checkpoint-9/global_step9"),
        ("model", "model"),
        ("/gone", "/gone"),
    ],
)
def test_a_name_that_is_not_here_is_looked_up_in_the_run(name, found):
    for folder in ("here", "out/here", "out/checkpoint-1"):
        Path(folder).mkdir(parents=True)
    assert in_run(Path(name), Path("out")) == Path(found)


# new_folder


def test_a_folder_takes_its_name_at_the_end_of_the_block():
    with new_folder(Path("a/b/out")) as folder:
        (folder / "sub").mkdir()
        (folder / "sub/x").write_text("1")
        assert not Path("a/b/out").exists()
        assert folder.name.startswith(".tmp-")
        assert folder.parent.resolve() == Path("a/b").resolve()
    assert tree() == {"a": None, "a/b": None, "a/b/out": None, "a/b/out/sub": None, "a/b/out/sub/x": "1"}


@pytest.mark.parametrize("error", [StopError, KeyboardInterrupt, SystemExit])
def test_an_error_in_the_block_leaves_nothing_not_even_the_parents(error):
    with pytest.raises(error), new_folder(Path("a/b/out")) as folder:
        (folder / "x").write_text("1")
        raise error
    assert tree() == {}


def test_parents_that_were_there_stay_after_an_error():
    Path("a").mkdir()
    with pytest.raises(StopError), new_folder(Path("a/b/out")):
        raise StopError
    assert tree() == {"a": None}


def test_an_error_of_the_system_in_the_block_keeps_its_class():
    with pytest.raises(FileNotFoundError), new_folder(Path("out")):
        Path("gone").read_text()
    assert tree() == {}


@pytest.mark.parametrize("kind", [kind for kind, taken in KINDS.items() if taken])
def test_a_folder_is_not_started_where_something_is(kind):
    target = make(kind)
    before = tree()
    with pytest.raises(ConfigError, match="target exists"), new_folder(target):
        raise AssertionError("the block must not run")
    assert tree() == before


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("kind", [kind for kind, taken in KINDS.items() if not taken])
def test_a_free_name_and_an_empty_folder_are_filled(kind, force):
    target = make(kind)
    with new_folder(target, force=force) as folder:
        (folder / "x").write_text("1")
    assert tree(target) == {"x": "1"}
    assert [name for name in tree() if ".tmp-" in name] == []


@pytest.mark.parametrize("kind", [kind for kind, taken in KINDS.items() if taken])
def test_force_replaces_what_is_there_and_only_at_the_end(kind):
    target = make(kind)
    with new_folder(target, force=True) as folder:
        (folder / "x").write_text("1")
        assert occupied(target)
        assert not (target / "x").exists()
    assert tree(target) == {"x": "1"}
    assert set(tree()) == {"target", "target/x"}


def test_force_leaves_the_old_folder_after_an_error():
    target = make("full folder")
    with pytest.raises(StopError), new_folder(target, force=True):
        raise StopError
    assert tree() == {"target": None, "target/.hidden": ""}


def test_a_file_above_a_folder_is_an_expected_failure():
    Path("file").write_text("old")
    with pytest.raises(ConfigError, match="file is no folder"), new_folder(Path("file/out")):
        raise AssertionError("the block must not run")
    assert tree() == {"file": "old"}


@pytest.mark.parametrize(
    ("mask", "folder", "file"), [(0o022, 0o755, 0o644), (0o077, 0o700, 0o600), (0o002, 0o775, 0o664)]
)
def test_a_folder_has_the_permissions_of_the_umask(umask, mask, folder, file):
    umask(mask)
    with new_folder(Path("out")) as temporary:
        (temporary / "sub").mkdir(mode=0o700)
        (temporary / "sub/x").touch(mode=0o600)
    assert (mode("out"), mode("out/sub"), mode("out/sub/x")) == (folder, folder, file)


def test_what_a_killed_process_leaves_behind_is_no_result():
    script = (
        "import os, pathlib, signal\n"
        "from dstool.files import new_folder\n"
        "with new_folder(pathlib.Path('runs/out')) as folder:\n"
        "    (folder / 'x').write_text('1')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=False, timeout=60)
    (left,) = [path.name for path in Path("runs").iterdir()]
    assert left.startswith(".tmp-out-")
    assert not occupied(Path("runs"))
    with new_folder(Path("runs/out")) as folder:
        (folder / "x").write_text("2")
    assert tree("runs/out") == {"x": "2"}


KILLED = """
import os, pathlib, signal, sys
from dstool import files
def kill(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
{how}
with files.new_folder(pathlib.Path('out'), force=True) as folder:
    (folder / 'x').write_text('new')
"""


@pytest.mark.parametrize(
    ("how", "left"),
    [
        ("files._remove = kill", "new"),
        ("files._exchange = lambda *_: False; files._remove = kill", "new"),
        (
            "files._exchange = lambda *_: False; rename = pathlib.Path.rename\n"
            "pathlib.Path.rename = lambda one, to: kill() if to.name == 'out' else rename(one, to)",
            None,
        ),
    ],
)
def test_k_what_force_replaces_is_there_in_full_after_kill_9_at_any_moment(how, left):
    """After the names were swapped at once; and where that is no call, after each of the two renames."""
    Path("out").mkdir()
    Path("out/x").write_text("old")
    done = subprocess.run([sys.executable, "-c", KILLED.format(how=how)], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert len(list(Path().glob(".tmp-*"))) == (1 if left else 2)
    assert (Path("out/x").read_text() if left else None) == left
    with pytest.raises(ConfigError, match="out exists"), new_folder(Path("out")):
        raise AssertionError("the block must not run")
    assert tree() == {"out": None, "out/x": left or "old"}


def test_a_folder_that_is_being_made_is_no_orphan_whatever_its_number(monkeypatch):
    """A container of the host's name does not see the processes of another one."""
    monkeypatch.setattr(files, "_is_alive", lambda _: False)
    with new_folder(Path("out")) as mine:
        (mine / "x").write_text("1")
        with new_folder(Path("out")) as other:
            (other / "x").write_text("2")
        assert mine.is_dir()
        shutil.rmtree("out")
    assert tree() == {"out": None, "out/x": "1"}


def test_a_file_that_is_replaced_keeps_its_rights_and_a_link_to_it_stays(tmp_path):
    real, link = tmp_path / "real.yaml", tmp_path / "dstool.yaml"
    real.write_text("old")
    real.chmod(0o600)
    link.symlink_to(real)
    write_text(link, "new")
    assert (link.is_symlink(), real.read_text(), real.stat().st_mode & 0o777) == (True, "new", 0o600)


def test_an_option_is_shown_as_it_is_typed():
    assert option("seq_len", 512) == "--seq-len 512"
    assert option("model", "내 것") == "--model '내 것'"
    assert option("lora") == option("lora", True) == "--lora"


def test_what_force_would_not_replace_is_not_said_to_be_overwritten_by_it():
    Path("link").symlink_to("gone")
    Path("file").write_text("notes")
    for name in ("link", "file"):
        with pytest.raises(ConfigError) as caught:
            refuse_replacing(Path(name), (), force=False)
        assert "--force" not in str(caught.value.hint)


def test_who_comes_second_to_a_free_name_replaces_nothing():
    with pytest.raises(ConfigError, match="out exists"), new_folder(Path("out")) as second:
        (second / "a.txt").write_text("second")
        with new_folder(Path("out")) as first:
            (first / "a.txt").write_text("first")
    assert tree() == {"out": None, "out/a.txt": "first"}
