"""The parent's side of profiling, against a fake worker: no torch, no model."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from whichlora.errors import MeasurementError
from whichlora.profiler.profile import Profiler
from whichlora.spec.results import Measurement
from whichlora.spec.run import RunConfig

# Stands in for the Python of the worker. What it does is named by the model of the request.
FAKE_WORKER = """#!{python}
import json, os, signal, subprocess, sys, time

def say(**message):
    print(json.dumps(message), flush=True)

def ok(**fields):
    say(event="result", outcome="ok", **({{"clean": True, "detail": str(os.getpid())}} | fields))

if os.environ.get("FAKE_START") == "fails":
    sys.exit("ModuleNotFoundError: No module named 'torch'")
print("a library says hello")
say(event="ready", environment={{"device": "fake", "arguments": sys.argv[1:]}})
for line in sys.stdin:
    request = json.loads(line)
    match request["run"]["model"]:
        case "ok":
            ok(step_s=[0.5] * len(request["seq_lens"]), batch_seq_len=request["seq_lens"])
        case "repeat":
            ok(detail=json.dumps([request["seq_lens"], request["decisive_s"]]))
        case "extended":
            ok(detail=json.dumps([request["seq_lens"], request["predicted_s"]]))
        case "oom":
            say(event="result", outcome="oom", detail="12 GiB", clean=True)
        case "error":
            say(event="result", outcome="error", detail="ValueError: no", clean=True)
        case "unclean":
            ok(clean=False)
        case "garbage":
            print("[W] a library warns \\udcff".encode(errors="replace"), "17", "{{", sep="\\n")
            ok()
        case "exit":
            sys.exit("last words")
        case "linger":  # as a process does that unloads a driver
            os.close(1)
            time.sleep(1.5)
            os._exit(1)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "hang":
            say(event="phase", phase="warming up")
            say(event="phase", phase="in batch 2 of 5")
            child = subprocess.Popen(["sleep", "60"])
            open(os.environ["FAKE_CHILD"], "w").write(str(child.pid))
            time.sleep(60)
"""


@pytest.fixture
def fake_python(tmp_path: Path) -> str:
    path = tmp_path / "python"
    path.write_text(FAKE_WORKER.format(python=sys.executable))
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def profiler(fake_python: str, tmp_path: Path) -> Iterator[Profiler]:
    with Profiler(
        gpu="fake",
        provenance={"command": "pytest"},
        log_path=tmp_path / "profile.log",
        python=fake_python,
    ) as profiler:
        yield profiler


def measure(profiler: Profiler, behaviour: str, **keywords: Any) -> Measurement:
    settings: dict[str, Any] = {
        "model_config": {},
        "target_modules": "all-linear",
        "seq_lens": [128],
        "timeout_s": 20.0,
    }
    return profiler.measure(RunConfig(model=behaviour), **settings | keywords)


def test_importing_the_parent_side_leaves_torch_alone() -> None:
    code = "import sys, whichlora.profiler.profile; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_measurement_is_a_complete_record(profiler: Profiler) -> None:
    record = measure(profiler, "ok", seq_lens=[32, 128], num_batches=3)
    assert record.outcome == "ok"
    assert record.batch_seq_len == (128, 32, 32)
    assert record.step_s == (0.5, 0.5, 0.5)
    assert record.run == RunConfig(model="ok")
    assert record.environment["device"] == "fake"
    assert record.environment["arguments"] == ["-m", "whichlora.profiler.worker", "cpu"]
    assert record.provenance == {"command": "pytest"}
    assert record.device_s > 0
    json.dumps(record.to_dict())


def test_batches_can_come_in_the_order_of_a_real_run(profiler: Profiler) -> None:
    record = measure(profiler, "ok", seq_lens=[32, 128, 64], num_batches=3, in_order=True)
    assert record.batch_seq_len == (32, 128, 64)


def test_batches_beyond_those_wanted_come_last_and_only_where_times_were_predicted(
    profiler: Profiler,
) -> None:
    lengths: dict[str, Any] = {"seq_lens": [64, 128, 32, 96, 48], "num_batches": 3}
    record = measure(profiler, "extended", predicted_s=[2.0, 4.0, 1.0, 3.0, 1.5], **lengths)
    assert json.loads(record.detail) == [[128, 32, 64, 96, 48], [4.0, 1.0, 2.0, 3.0, 1.5]]
    record = measure(profiler, "extended", **lengths)
    assert json.loads(record.detail) == [[128, 32, 64], []]


def test_the_longest_and_the_shortest_batch_come_first_each_with_what_it_may_take(
    profiler: Profiler,
) -> None:
    record = measure(
        profiler, "repeat", seq_lens=[64, 128, 32], decisive_s=[2.0, 4.0, math.inf], num_batches=4
    )
    assert json.loads(record.detail) == [[128, 32, 64, 64], [4.0, math.inf, 2.0, 2.0]]


def test_without_a_time_that_decides_every_batch_is_asked_for(profiler: Profiler) -> None:
    assert json.loads(measure(profiler, "repeat", num_batches=2).detail) == [[128, 128], []]


def test_a_healthy_worker_serves_many_runs(profiler: Profiler) -> None:
    pids = {measure(profiler, "ok").detail for _ in range(3)}
    assert len(pids) == 1


def test_an_error_of_the_libraries_keeps_the_worker(profiler: Profiler) -> None:
    before = measure(profiler, "ok").detail
    assert measure(profiler, "error").outcome == "error"
    assert measure(profiler, "ok").detail == before


@pytest.mark.parametrize(
    ("behaviour", "outcome", "detail"),
    [
        ("oom", "oom", "12 GiB"),
        ("unclean", "ok", ""),
        ("exit", "crashed", "exit code 1: last words"),
        ("linger", "crashed", "exit code 1: "),
        ("segfault", "crashed", "SIGSEGV"),
        ("kill", "killed", "out-of-memory killer"),
    ],
)
def test_a_spent_worker_is_replaced(
    profiler: Profiler, behaviour: str, outcome: str, detail: str
) -> None:
    before = measure(profiler, "ok").detail
    record = measure(profiler, behaviour)
    assert record.outcome == outcome
    assert detail in record.detail
    assert measure(profiler, "ok").detail != before


def test_a_hanging_worker_is_ended_with_its_children(
    profiler: Profiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CHILD", str(tmp_path / "child"))
    start_s = time.monotonic()
    record = measure(profiler, "hang", timeout_s=1.0)
    assert record.outcome == "timeout"
    assert record.detail == (
        "stopped after 1 s, in batch 2 of 5; raise profile_timeout to measure it"
    )
    assert time.monotonic() - start_s < 10
    wait_until(lambda: not is_running(int((tmp_path / "child").read_text())))
    assert measure(profiler, "ok").outcome == "ok"


def test_garbage_on_the_pipe_is_passed_over(profiler: Profiler) -> None:
    assert measure(profiler, "garbage").outcome == "ok"


def test_a_worker_that_died_between_two_runs_is_a_result(profiler: Profiler) -> None:
    os.kill(int(measure(profiler, "ok").detail), signal.SIGKILL)
    assert measure(profiler, "ok").outcome == "killed"
    assert measure(profiler, "ok").outcome == "ok"


def test_a_worker_that_cannot_start_is_named(
    profiler: Profiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_START", "fails")
    with pytest.raises(MeasurementError, match=r"No module named 'torch'.*whichlora\[profile\]"):
        measure(profiler, "ok")


def test_one_gpu_is_visible_to_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    from whichlora.profiler.profile import _worker_environment

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert _worker_environment("cuda")["CUDA_VISIBLE_DEVICES"] == "4"
    assert _worker_environment("cuda:1")["CUDA_VISIBLE_DEVICES"] == "6"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert _worker_environment("cuda:1")["CUDA_VISIBLE_DEVICES"] == "1"
    assert "PYTORCH_ALLOC_CONF" not in _worker_environment("cuda")
    expandable = _worker_environment("cuda", expandable=True)["PYTORCH_ALLOC_CONF"]
    assert expandable == "expandable_segments:True"
    assert _worker_environment("cpu")["CUDA_VISIBLE_DEVICES"] == ""


PARENT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a job in the background
from whichlora.profiler.profile import Profiler
from whichlora.spec.run import RunConfig

def measure(profiler, model):
    return profiler.measure(RunConfig(model=model), model_config={}, target_modules="all-linear",
                            seq_lens=[8], timeout_s=60)

with Profiler(gpu="fake", provenance={}, python=sys.argv[1]) as profiler:
    print(measure(profiler, "ok").detail, flush=True)
    measure(profiler, "hang")
"""


def test_an_interrupted_parent_ends_its_worker(
    fake_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CHILD", str(tmp_path / "child"))
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, fake_python],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    wait_until((tmp_path / "child").exists)
    parent.send_signal(signal.SIGINT)
    parent.communicate(timeout=10)
    wait_until(lambda: not is_running(worker))


WATCHED = """
import json, os, queue, sys, time
from whichlora.profiler.worker import _private_stdout, _say, _read_requests
import threading
answers = _private_stdout()
print("this goes to stderr", flush=True)
os.write(1, b"and so does this\\n")
_say(answers, {"event": "ready", "environment": {"pid": os.getpid()}})
threading.Thread(target=_read_requests, args=(queue.SimpleQueue(),), daemon=True).start()
time.sleep(60)  # a measurement
"""


def test_a_worker_ends_when_its_parent_is_killed_in_the_middle_of_a_measurement() -> None:
    code = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {WATCHED!r}], stdin=subprocess.PIPE)\n"
        "time.sleep(60)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    worker = json.loads(parent.stdout.readline())["environment"]["pid"]
    parent.kill()
    parent.wait()
    wait_until(lambda: not is_running(worker))


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # nobody may be there to reap it


def wait_until(condition: Callable[[], bool], *, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        time.sleep(0.02)
