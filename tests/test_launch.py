"""The launcher: its argv, what a rank reports, and the end of a whole session."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from dstool import launch
from dstool.errors import (
    ConfigError,
    DataError,
    EnvironmentUnfit,
    NoDevice,
    RankCrashed,
    RankFailed,
    RunFailed,
)
from dstool.launch import (
    check_build_locks,
    choose_devices,
    free_port,
    launcher_argv,
    rank_environment,
    report_error,
    report_result,
)

OF_A_RANK = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@pytest.fixture(autouse=True)
def _nothing_launched(monkeypatch):
    """No variable of a rank is set, and none that a test sets stays."""
    for name in (*OF_A_RANK, launch.RESULT_VARIABLE, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


# choose_devices


@pytest.mark.parametrize(
    ("gpus", "num_gpus", "include", "devices"),
    [
        (0, None, None, ["--num_gpus", "1"]),
        (0, 1, None, ["--num_gpus", "1"]),
        (1, None, None, ["--include", "localhost:0"]),
        (2, None, None, ["--include", "localhost:0,1"]),
        (4, 2, None, ["--include", "localhost:0,1"]),
        (4, 4, None, ["--include", "localhost:0,1,2,3"]),
        (4, None, "localhost:1,3", ["--include", "localhost:1,3"]),
    ],
)
def test_devices(gpus, num_gpus, include, devices):
    assert choose_devices(gpus, num_gpus=num_gpus, include=include) == devices


@pytest.mark.parametrize(
    ("visible", "gpus", "num_gpus", "devices"),
    [
        ("2,3", 2, None, "localhost:2,3"),
        ("2,3", 2, 1, "localhost:2"),
        ("5", 1, 1, "localhost:5"),
        (" 1 , 0 ,", 2, None, "localhost:1,0"),
        ("0,9", 1, None, "localhost:0"),
    ],
)
def test_the_gpus_that_cuda_visible_devices_names_are_named_again(
    monkeypatch, visible, gpus, num_gpus, devices
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert choose_devices(gpus, num_gpus=num_gpus, include=None) == ["--include", devices]


@pytest.mark.parametrize(
    ("gpus", "num_gpus", "include", "error", "said"),
    [
        (2, 4, None, NoDevice, "--num-gpus 4: this machine has 2"),
        (0, None, "localhost:0", NoDevice, "--include localhost:0: no GPU is visible here"),
        (2, 2, "localhost:0", ConfigError, "--num-gpus and --include exclude each other"),
        (0, 2, "localhost:0", ConfigError, "--num-gpus and --include exclude each other"),
        (2, 0, None, ConfigError, "--num-gpus 0 starts nothing"),
        (0, -1, None, ConfigError, "--num-gpus -1 starts nothing"),
    ],
)
def test_devices_that_cannot_be_had(gpus, num_gpus, include, error, said):
    with pytest.raises(error) as caught:
        choose_devices(gpus, num_gpus=num_gpus, include=include)
    assert caught.value.message == said
    assert caught.value.hint


def test_no_device_exits_with_4_and_names_what_cuda_visible_devices_hides(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(NoDevice) as caught:
        choose_devices(2, num_gpus=4, include=None)
    assert caught.value.exit_code == 4
    assert caught.value.message == "--num-gpus 4: CUDA_VISIBLE_DEVICES=0,1 shows 2"
    assert caught.value.hint == "--num-gpus 2"


def test_gpu_uuids_which_crash_the_launcher_are_refused(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6")
    with pytest.raises(ConfigError, match="no UUIDs") as caught:
        choose_devices(1, num_gpus=None, include=None)
    assert "nvidia-smi -L" in caught.value.hint


@pytest.mark.parametrize("over", [0, 1])
def test_more_cpu_ranks_than_cores_are_started_with_a_warning(caplog, monkeypatch, over):
    monkeypatch.setattr(logging.getLogger("dstool"), "propagate", True)
    ranks = os.cpu_count() + over
    assert choose_devices(0, num_gpus=ranks, include=None) == ["--num_gpus", str(ranks)]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * over
    assert over == 0 or f"{ranks} CPU ranks share {ranks - 1} cores" in caplog.text


def test_the_launchers_argv():
    argv = launcher_argv(["train", "--config", "a b.yaml"], ["--num_gpus", "2"], 29123)
    assert argv == [
        *(sys.executable, "-m", "deepspeed.launcher.runner", "--log_level=critical", "--num_gpus", "2"),
        *("--master_port", "29123", "--module", "dstool", "train", "--config", "a b.yaml"),
    ]


def test_shared_memory_is_freed_for_one_port_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "SHARED_MEMORY", tmp_path)
    names = [f"deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1_{port}_0" for port in (29501, 29502)]
    for name in names:
        (tmp_path / name).touch()
    launch.free_shared_memory(29501)
    assert [path.name for path in tmp_path.iterdir()] == names[1:]


def test_a_free_port_can_be_listened_on():
    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port()))
        server.listen()
        taken = server.getsockname()[1]
        assert free_port() != taken


# what a rank knows


def test_a_process_that_nothing_launched_becomes_a_world_of_one():
    with rank_environment():
        found = {name: os.environ.get(name) for name in OF_A_RANK}
    assert not any(name in os.environ for name in OF_A_RANK)
    assert 0 < int(found.pop("MASTER_PORT")) < 65536
    assert found == {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_SIZE": "1",
        "LOCAL_WORLD_SIZE": None,
        "MASTER_ADDR": "127.0.0.1",
    }


@pytest.mark.parametrize(
    ("extra", "local_size"),
    [({"LOCAL_WORLD_SIZE": "2"}, "2"), ({"LOCAL_SIZE": "3", "LOCAL_WORLD_SIZE": "2"}, "3"), ({}, "4")],
)
def test_a_launched_rank_keeps_what_it_has_and_learns_its_local_size(monkeypatch, extra, local_size):
    given = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_PORT": "29501", **extra}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with rank_environment():
        pass
    assert os.environ["LOCAL_SIZE"] == local_size
    assert {name: os.environ[name] for name in given} == given
    assert launch.world_size() == 4
    assert launch.launched()


def test_nothing_launched_is_a_world_of_one():
    assert launch.world_size() == 1
    assert not launch.launched()


# the result file


@pytest.fixture
def report(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    monkeypatch.setenv(launch.RESULT_VARIABLE, str(path))
    return path


def as_rank(monkeypatch, number):
    monkeypatch.setenv("RANK", str(number))


def test_the_result_of_rank_0_is_read_by_the_parent(report, monkeypatch):
    assert launch.reports_to_parent()
    for number in (1, 0):
        as_rank(monkeypatch, number)
        report_result({"steps": 3, "output_dir": Path("out"), "rank": number})
    assert launch._read_report(report, 0) == {"steps": 3, "output_dir": "out", "rank": 0}


def test_another_ranks_result_is_not_reported(report, monkeypatch):
    as_rank(monkeypatch, 1)
    report_result({"steps": 3})
    assert not report.exists()


def test_the_first_error_is_believed_and_keeps_its_class_message_and_hint(report, monkeypatch):
    as_rank(monkeypatch, 1)
    report_error(DataError("reviews.csv has no rows", hint="another file"))
    as_rank(monkeypatch, 0)
    report_error(RankFailed("the connection was lost"))
    with pytest.raises(DataError) as caught:
        launch._read_report(report, 1)
    assert (caught.value.message, caught.value.hint, caught.value.exit_code) == (
        "reviews.csv has no rows",
        "another file",
        3,
    )


def test_an_error_of_a_class_that_this_version_does_not_know_is_a_failed_run(report):
    report.write_text(json.dumps({"error": "FromTheFuture", "message": "what", "hint": None}))
    with pytest.raises(RunFailed, match="what"):
        launch._read_report(report, 1)


def test_a_bug_in_a_rank_is_a_bug(report):
    report_error(RankCrashed("rank 1 ended with ZeroDivisionError: oh", hint="see the traceback above"))
    with pytest.raises(RankCrashed) as caught:
        launch._read_report(report, 1)
    assert caught.value.exit_code == 1


def test_a_report_is_whole_when_it_is_there(report, monkeypatch):
    as_rank(monkeypatch, 0)
    report_result({"text": "x" * 100_000})
    assert len(json.loads(report.read_text())["result"]["text"]) == 100_000
    assert [path.name for path in report.parent.iterdir()] == ["result.json"]


def test_a_run_that_wrote_its_result_counts_although_a_rank_ends_badly(report, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("dstool"), "propagate", True)
    as_rank(monkeypatch, 0)
    report_result({"steps": 3})
    assert launch._read_report(report, 250) == {"steps": 3}
    assert "exit code 250 after the run was complete" in caplog.text


@pytest.mark.parametrize("code", [-9, 137, 247])
def test_a_rank_that_was_killed_is_a_question_of_memory(tmp_path, code):
    with pytest.raises(RankFailed, match="out of memory") as caught:
        launch._read_report(tmp_path / "none", code)
    assert "dmesg" in caught.value.hint
    assert caught.value.exit_code == 5


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (0, "the launcher ended without a result"),
        (1, "a rank ended with exit code 1"),
        (-15, "a rank ended with exit code -15 (SIGTERM)"),
        (250, "a rank ended with exit code 250 (SIGABRT)"),
        (134, "a rank ended with exit code 134 (SIGABRT)"),
        (245, "a rank ended with exit code 245 (SIGSEGV)"),
        (255, "a rank ended with exit code 255 (SIGHUP)"),
    ],
)
def test_an_end_without_a_report_is_a_failure(tmp_path, code, said):
    with pytest.raises(RankFailed) as caught:
        launch._read_report(tmp_path / "none", code)
    assert caught.value.message == said
    assert caught.value.hint


@pytest.mark.parametrize(
    ("message", "lost"),
    [
        ("[gloo/transport/tcp/pair.cc:537] Connection closed by peer [127.0.0.1]:4000", True),
        ("recv failed: Connection reset by peer", True),
        ("expected scalar type Float", False),
    ],
)
def test_a_rank_knows_when_it_only_lost_its_peers(message, lost):
    assert launch.lost_peers(RuntimeError(message)) is lost


# a session: small Python processes stand where the launcher's argv stands

CHILD = """
import os, pathlib, signal, subprocess, sys, time
folder, stubborn = pathlib.Path(sys.argv[1]), sys.argv[2] == "stubborn"
if stubborn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) == 3:
    subprocess.Popen([sys.executable, "-c", os.environ["CHILD"], *sys.argv[1:], "the rank"])
draft = folder / f"draft.{os.getpid()}"
draft.touch()
draft.rename(folder / f"pid.{os.getpid()}")
time.sleep(60)
"""
PARENT = """
import os, sys
from dstool import launch
launch.GRACE_SECONDS = 1.0
argv = [sys.executable, "-c", os.environ["CHILD"], *sys.argv[1:]]
launch._run_in_session(argv, dict(os.environ))
"""


def wait_for(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "nothing happened for 20 seconds"
        time.sleep(0.02)


def runs(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes under /proc")
@pytest.mark.parametrize(
    ("number", "nature", "code"),
    [
        (signal.SIGTERM, "meek", 143),
        (signal.SIGTERM, "stubborn", 143),
        (signal.SIGHUP, "meek", 129),
        (signal.SIGINT, "meek", -2),
    ],
    ids=["SIGTERM", "SIGTERM, ignored by the ranks", "SIGHUP", "Ctrl-C"],
)
def test_a_signal_ends_the_launcher_and_its_ranks(tmp_path, number, nature, code):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path), nature],
        env={**os.environ, "CHILD": CHILD},
        stderr=subprocess.DEVNULL,
    )
    wait_for(lambda: len(list(tmp_path.glob("pid.*"))) == 2)
    pids = [int(path.suffix[1:]) for path in tmp_path.glob("pid.*")]
    assert all(map(runs, pids))
    parent.send_signal(number)
    assert parent.wait(timeout=20) == code
    wait_for(lambda: not any(map(runs, pids)))


def test_sigterm_means_what_it_did_before_when_the_run_is_over():
    before = signal.getsignal(signal.SIGTERM)
    assert launch._run_in_session([sys.executable, "-c", ""], dict(os.environ)) == 0
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("body", "code"),
    [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", -9), ("", 0)],
)
def test_the_launchers_exit_code_is_told(body, code):
    assert launch._run_in_session([sys.executable, "-c", body], dict(os.environ)) == code


def test_the_launchers_stdout_is_not_ours():
    script = (
        "import os, sys; from dstool import launch;"
        "launch._run_in_session([sys.executable, '-c', 'print(1)'], dict(os.environ))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert (done.stdout, done.stderr) == ("", "1\n")


# locks of builds


@pytest.fixture
def extensions(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return tmp_path


def lock(folder, *, age):
    folder.mkdir(parents=True)
    path = folder / "lock"
    path.touch()
    os.utime(path, (time.time() - age,) * 2)
    return path


@pytest.mark.parametrize("where", ["cpu_adam", "py311_cpu/cpu_adam", "two words/cpu_adam"])
def test_the_lock_of_a_killed_build_is_named_with_what_removes_it(extensions, where):
    path = lock(extensions / where, age=3600)
    with pytest.raises(EnvironmentUnfit) as caught:
        check_build_locks()
    assert str(path) in caught.value.message
    subprocess.run(["sh", "-c", caught.value.hint], check=True)
    assert not path.exists()
    assert check_build_locks() is None


def test_all_stale_locks_are_named_at_once(extensions):
    paths = [lock(extensions / op, age=3600) for op in ("async_io", "cpu_adam")]
    with pytest.raises(EnvironmentUnfit) as caught:
        check_build_locks()
    assert set(caught.value.hint.split()) == {"rm", *map(str, paths)}


def test_a_fresh_lock_is_waited_for(extensions):
    path = lock(extensions / "cpu_adam", age=5)
    assert check_build_locks() is None
    assert path.exists()


@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="looks for builds under /proc")
def test_the_lock_of_a_build_that_goes_on_is_waited_for(extensions):
    path = lock(extensions / "cpu_adam", age=3600)
    with subprocess.Popen(["sleep", "60"], cwd=path.parent) as ninja:
        assert check_build_locks() is None
        ninja.kill()
    with pytest.raises(EnvironmentUnfit):
        check_build_locks()


def test_no_folder_and_no_lock_are_fine(extensions, monkeypatch):
    assert check_build_locks() is None
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(extensions / "gone"))
    assert check_build_locks() is None
    assert not launch.is_built("cpu_adam")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_a_folder_of_ops_that_may_not_be_read_counts_as_not_built():
    with tempfile.TemporaryDirectory() as place:  # pytest's own folders are for their owner alone
        Path(place, "torch_extensions").mkdir(mode=0)
        code = (
            "import os, pathlib, sys; sys.path.insert(0, sys.argv[1]); from dstool import launch\n"
            "os.environ['TORCH_EXTENSIONS_DIR'] = sys.argv[2] + '/torch_extensions'\n"
            "os.chmod(sys.argv[2], 0); os.setuid(65534); print(launch.is_built('cpu_adam'))"
        )
        root = str(Path(launch.__file__).parent.parent)
        done = subprocess.run(
            [sys.executable, "-c", code, root, place], check=False, capture_output=True, text=True
        )
        Path(place).chmod(0o700)
    assert done.stdout == "False\n", done.stderr


def test_an_op_is_built_when_its_library_is_there(extensions):
    (extensions / "py311_cpu/cpu_adam").mkdir(parents=True)
    (extensions / "py311_cpu/cpu_adam/cpu_adam.so").touch()
    assert launch.is_built("cpu_adam")
    assert not launch.is_built("async_io")
