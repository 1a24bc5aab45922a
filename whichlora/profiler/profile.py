"""Measure runs in a child process, so that out of memory, crashes and hangs are results."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import cycle, islice, zip_longest
from pathlib import Path
from typing import IO, Any, Self

import whichlora
from whichlora.errors import MeasurementError
from whichlora.extras import require
from whichlora.spec.results import Measurement
from whichlora.spec.run import RunConfig

# Importing the libraries from a cold network file system takes minutes; measuring never counts it.
_START_TIMEOUT_S = 600.0
_EXIT_GRACE_S = 1.0
_HUNG_UP_S = 30.0  # a process that closed its pipe is ending, libraries and drivers included
_LOG_TAIL_BYTES = 8192
# bitsandbytes 0.50.2 keeps managed memory to the end of the process: 3.9 GiB on an H200.
_PAGED = "paged"
_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "PYTHONWARNINGS": "ignore",
}


_Batch = tuple[int, float, float]  # length, decisive and predicted seconds


class Profiler:
    """Measures runs one after another in a worker process.

    A healthy worker serves many runs, since importing the libraries costs more than a small
    measurement. One that ran out of memory, died, hung or left tensors behind is replaced.

    Args:
        gpu: device key written into every record.
        device: "cpu", "cuda" or "cuda:1", counted among the visible devices.
        provenance: of each record: host, command, commit, run id.
        memory_limit_bytes: limit of one measurement on a CPU; without it, the kernel's
            out-of-memory killer ends a run that is too large.
        log_path: where the output of the libraries is appended; None discards it.
        python: interpreter of the worker.
    """

    def __init__(
        self,
        *,
        gpu: str,
        device: str = "cpu",
        provenance: Mapping[str, Any],
        memory_limit_bytes: int | None = None,
        log_path: Path | None = None,
        python: str = sys.executable,
    ) -> None:
        self._gpu = gpu
        self._device = device
        self._provenance = dict(provenance)
        self._memory_limit_bytes = memory_limit_bytes
        self._log_path = log_path
        self._python = python
        self._worker: _Worker | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the worker; the next measurement starts a new one."""
        if self._worker is not None:
            self._worker.kill()
            self._worker = None

    @staticmethod
    def require_libraries() -> None:
        """Refuse profiles where a library that they run, or the fit to them, is not installed.

        Raises:
            ConfigError: one of them is missing.
        """
        require(
            "profile",
            *("torch", "transformers", "peft", "accelerate", "sklearn"),
            extra="profile",
            otherwise="set profile: none for predictions alone",
        )

    def measure(
        self,
        run: RunConfig,
        *,
        model_config: Mapping[str, Any],
        target_modules: Sequence[str] | str,
        seq_lens: Sequence[int],
        num_batches: int = 5,
        decisive_s: Sequence[float] = (),
        predicted_s: Sequence[float] = (),
        timeout_s: float,
        in_order: bool = False,
        keeps_history: bool = False,
    ) -> Measurement:
        """Measure `num_batches` batches of `run`, and say how it ended.

        Args:
            model_config: the Hugging Face config.
            target_modules: leaf names that get an adapter, or "all-linear".
            seq_lens: padded lengths of the batches (fine-tuning); taken in turn if there are
                fewer than `num_batches`. Those beyond `num_batches` are run only as long as the
                mean of the batches is not known (`early_stop.KNOWN_TO`).
            decisive_s: time limit of each batch in `seq_lens` (inference: each generation), above
                which the run is useless. Once that is clear (`early_stop.is_enough`), the run
                ends.
            predicted_s: of each batch in `seq_lens`. Once the mean of measured over predicted time
                is known, the run ends; without predictions `num_batches` are made.
            timeout_s: limit for building and measuring; starting the worker is not part of it.
                After half of it no batch beyond `num_batches` is begun.
            in_order: batches come as `seq_lens` says, as in a real run; else the longest and the
                shortest go first, so that an early end has seen both.
            keeps_history: also record the largest blocks that a CUDA allocator handed out.

        Raises:
            MeasurementError: the worker can't start.
        """
        described = list(zip_longest(seq_lens, decisive_s, predicted_s))
        batches = _ordered_batches(described, num_batches, in_order=in_order)
        if predicted_s:
            batches += described[num_batches:]
        request = {
            "run": run.to_dict(),
            "model_config": dict(model_config),
            "target_modules": target_modules,
            "num_batches": num_batches,
            "seq_lens": [length for length, _, _ in batches],
            "decisive_s": [limit for _, limit, _ in batches] if decisive_s else [],
            "predicted_s": [each for _, _, each in batches] if predicted_s else [],
            "extra_until_s": timeout_s / 2,
            "memory_limit_bytes": self._memory_limit_bytes,
            "keeps_history": keeps_history,
            "warms_lengths": not in_order,
        }
        try:
            worker = self._worker_for(run)
            start_s = time.perf_counter()
            answer = worker.ask(request, timeout_s=timeout_s)
            device_s = time.perf_counter() - start_s
        except BaseException:  # Ctrl-C too: the worker has a session of its own and would go on
            self.close()
            raise
        clean = answer.pop("clean", False)  # absent where the worker died
        environment = answer.pop("environment", worker.environment)
        device_s = answer.pop("device_s", device_s)
        keeps_memory = _PAGED in run.optimizer and self._device != "cpu"
        if answer["outcome"] == "oom" or not clean or keeps_memory:
            self.close()
        return Measurement(
            id=uuid.uuid4().hex,
            gpu=self._gpu,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            config=run.to_dict(),
            device_s=device_s,
            environment=environment,
            provenance=self._provenance,
            **_fields(answer),
        )

    def _worker_for(self, run: RunConfig) -> _Worker:
        """The worker, started anew for another kind of run: it reads its settings once."""
        several = run.parallel.gpus > 1
        settings = (several, run.expandable_segments)
        if self._worker is not None and self._worker.settings != settings:
            self.close()
        if self._worker is None:
            self._worker = _Worker(
                self._python,
                self._device,
                self._log_path,
                several=several,
                expandable=run.expandable_segments,
            )
        return self._worker


def _ordered_batches(
    described: Sequence[_Batch], num_batches: int, *, in_order: bool
) -> list[_Batch]:
    """The first `num_batches` in the order in which they are run."""
    batches = list(islice(cycle(described), num_batches))
    if in_order:
        return batches
    longest, *shorter = sorted(batches, reverse=True)
    return [longest, *shorter[-1:], *shorter[:-1]]


def _fields(answer: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in answer.items()
    }


class _Worker:
    """One child process in a session of its own, so that a kill reaches its children too."""

    def __init__(
        self, python: str, device: str, log_path: Path | None, *, several: bool, expandable: bool
    ) -> None:
        self.settings = (several, expandable)
        self._log = _open_log(log_path)  # closed by `kill`, with the pipes
        self._log_start = self._log.seek(0, os.SEEK_END)
        self._buffer = b""
        self._hung_up = False
        self._process = subprocess.Popen(
            [
                python,
                "-m",
                f"whichlora.profiler.{'ranks' if several else 'worker'}",
                device.partition(":")[0],
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=_worker_environment(device, expandable=expandable, several=several),
            start_new_session=True,
        )
        try:
            hello = self._next_message(time.monotonic() + _START_TIMEOUT_S)
        except BaseException:
            self.kill()
            raise
        if hello is None:
            outcome = self._end(f"no answer within {_START_TIMEOUT_S:g} s")
            self.kill()
            raise MeasurementError(
                f"the profiling worker did not start ({outcome['detail']}); install "
                "whichlora[profile], or set profile: none for predictions alone"
            )
        self.environment: Mapping[str, Any] = hello["environment"]

    def ask(self, request: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """The answer to `request`, or how the worker ended instead of answering."""
        assert self._process.stdin is not None
        deadline = time.monotonic() + timeout_s
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._hung_up = True
            return self._end("")
        phase = "building the model"
        while (message := self._next_message(deadline)) is not None:
            if message.pop("event") != "phase":
                return message
            phase = str(message["phase"])
        return self._end(
            f"stopped after {timeout_s:g} s, {phase}; raise profile_timeout to measure it"
        )

    def kill(self) -> None:
        """End the process and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()

    def _next_message(self, deadline: float) -> dict[str, Any] | None:
        """The next message; None at the deadline or at the end of the pipe."""
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        while True:
            line, newline, after = self._buffer.partition(b"\n")
            if newline:
                self._buffer = after
                message = _parse(line)
                if message is not None:
                    return message
                continue
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0 or not select.select([pipe], [], [], remaining_s)[0]:
                return None
            chunk = os.read(pipe, 1 << 16)
            if not chunk:
                self._hung_up = True
                return None
            self._buffer += chunk

    def _end(self, late: str) -> dict[str, Any]:
        """The outcome of a worker that gave no answer.

        Args:
            late: the detail of a worker that is still running.
        """
        try:
            # Its pipe closes a moment before the process can be waited for.
            code = self._process.wait(timeout=_HUNG_UP_S if self._hung_up else _EXIT_GRACE_S)
        except subprocess.TimeoutExpired:
            if self._hung_up:
                return {"outcome": "crashed", "detail": f"hung up: {self._last_log_line()}"}
            return {"outcome": "timeout", "detail": late}
        if code == -signal.SIGKILL:
            return {
                "outcome": "killed",
                "detail": "killed by SIGKILL, usually by the kernel's out-of-memory killer",
            }
        ended = f"died of {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return {"outcome": "crashed", "detail": f"{ended}: {self._last_log_line()}"}

    def _last_log_line(self) -> str:
        end = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(self._log_start, end - _LOG_TAIL_BYTES))
        lines = self._log.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "no output")


def _open_log(log_path: Path | None) -> IO[bytes]:
    return tempfile.TemporaryFile() if log_path is None else log_path.open("ab+")


def _parse(line: bytes) -> dict[str, Any] | None:
    """A message of the worker; None for a line that a library wrote into the pipe."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) and "event" in message else None


def _worker_environment(
    device: str, *, expandable: bool = False, several: bool = False
) -> dict[str, str]:
    """The environment of the worker: quiet, this package importable, one device visible.

    With more than one visible GPU the Trainer would spread the batch over all of them, unless each
    has a process.
    """
    kind, _, index = device.partition(":")
    visible = ""
    if kind == "cuda":
        devices = os.environ.get("CUDA_VISIBLE_DEVICES")
        position = int(index or 0)
        visible = str(position) if devices is None else devices.split(",")[position]
    package_parent = str(Path(whichlora.__file__).parent.parent)
    paths = [package_parent, os.environ.get("PYTHONPATH", "")]
    allocator = {}
    if expandable:  # the first name is that of newer versions of torch
        names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
        allocator = dict.fromkeys(names, "expandable_segments:True")
    devices_seen = {} if several and kind == "cuda" else {"CUDA_VISIBLE_DEVICES": visible}
    search_path = {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    return dict(os.environ) | _QUIET | allocator | devices_seen | search_path
