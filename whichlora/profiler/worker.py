"""The child process of `profile.Profiler`: a JSON request per line in, an answer per line out."""

from __future__ import annotations

import gc
import json
import os
import platform
import queue
import re
import resource
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from tempfile import gettempdir
from typing import TYPE_CHECKING, Any, TextIO

from whichlora.errors import MeasurementError
from whichlora.profiler.early_stop import is_enough
from whichlora.profiler.installed import installed_versions
from whichlora.store.detect import detect_gpus

if TYPE_CHECKING:
    from whichlora.profiler.kept_model import KeptModel
    from whichlora.profiler.meter import Meter

Tell = Callable[[str], None]  # takes the worker's current stage, for the message of a timeout

_PARENT_POLL_S = 1.0
_OUT_OF_MEMORY = re.compile(
    r"out of memory|can't allocate memory|CUBLAS_STATUS_ALLOC_FAILED|bad_alloc", re.IGNORECASE
)


def main() -> None:
    from whichlora.profiler.kept_model import KeptModel

    device = sys.argv[1]
    serve(partial(environment, device), partial(answer, device, KeptModel()))


def serve(
    facts: Callable[[], Mapping[str, Any]],
    answered: Callable[[Mapping[str, Any], Tell], Mapping[str, Any]],
) -> None:
    """Answer requests until the parent closes the pipe or dies.

    Args:
        facts: makes what is said of the environment first.
    """
    answers = _private_stdout()
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(requests,), daemon=True).start()
    _say(answers, {"event": "ready", "environment": facts()})
    while True:
        request = json.loads(requests.get())

        def tell(phase: str) -> None:
            _say(answers, {"event": "phase", "phase": phase})

        _say(answers, {"event": "result", **answered(request, tell)})


def _private_stdout() -> TextIO:
    """The pipe to the parent, out of reach of what libraries print."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def _say(answers: TextIO, message: Mapping[str, Any]) -> None:
    print(json.dumps(message), file=answers, flush=True)


def _read_requests(requests: queue.SimpleQueue[bytes]) -> None:
    """Hand lines of stdin to the main thread; end the process when there is nobody to answer.

    The end of the pipe is not enough: a process forked from the parent may hold it open.
    """
    parent = os.getppid()
    buffer = b""
    while os.getppid() == parent:
        if not select.select([0], [], [], _PARENT_POLL_S)[0]:
            continue
        chunk = os.read(0, 1 << 16)
        if not chunk:
            break
        *lines, buffer = (buffer + chunk).split(b"\n")
        for line in lines:
            requests.put(line)
    os._exit(0)


def answer(device: str, kept: KeptModel, request: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """The outcome of one request; whatever the libraries raise is a result.

    Args:
        kept: of an earlier request; afterwards that of this one, where nothing else is left of it.
    """
    from whichlora.profiler.meter import Meter

    meter = Meter(
        device,
        keeps_history=request.get("keeps_history", False),
        warms_lengths=request.get("warms_lengths", False),
    )
    kept.drop_unless(request)
    _collect(meter)
    if not kept.num_bytes:  # a frozen model would never be freed
        gc.freeze()  # half a million objects of libraries, which each collection would pass again
    start_bytes = meter.live_bytes() - kept.num_bytes
    try:
        with _memory_limit(request["memory_limit_bytes"], held_bytes=kept.num_bytes):
            payload = {"outcome": "ok"} | _measure(request, device, meter, kept, tell)
        kept.restore()
    except Exception as error:
        kept.drop()
        detail = " ".join(f"{type(error).__name__}: {error}".split())
        oom = isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(detail)
        payload = {"outcome": "oom" if oom else "error", "detail": detail}
        _log(error)
    return payload | {"clean": _is_clean(meter, start_bytes, kept)}


def _log(error: BaseException) -> None:
    import traceback

    traceback.print_exception(error, file=sys.stderr)


def _measure(
    request: Mapping[str, Any], device: str, meter: Meter, kept: KeptModel, tell: Tell
) -> dict[str, Any]:
    import torch
    from accelerate.state import AcceleratorState

    from whichlora.profiler.build import build_model, seed, with_efficient_attention
    from whichlora.profiler.finetune import training_arguments
    from whichlora.profiler.inference import measure_inference
    from whichlora.profiler.spread import spreading
    from whichlora.spec.run import RunConfig
    from whichlora.trainers import get_trainer

    AcceleratorState._reset_state(reset_partial_state=True)  # it remembers the mixed precision
    start_s = time.monotonic()
    run = RunConfig.from_dict(request["run"])
    # set for every run: the setting of the last run must not stay
    torch.set_float32_matmul_precision("high" if run.precision == "tf32" else "highest")

    build_s = 0.0

    def build() -> Any:
        nonlocal build_s
        tell("building the model")
        build_start_s = time.monotonic()
        spread = spreading(run)
        divided = spread.divides_while_loading
        # alive while the model is made: transformers asks them whether to divide it
        arguments = training_arguments(run, meter, gettempdir(), max_steps=1) if divided else None
        model = build_model(
            run,
            request["model_config"],
            device="cpu" if spread.loads_on_host else device,
            target_modules=request["target_modules"],
            quant_storage=spread.quant_storage,
            divided=divided,
        )
        del arguments
        build_s = time.monotonic() - build_start_s
        return model

    model = kept.model_for(request, meter, build)
    seed()
    meter.forget_peak()

    def is_done(times_s: Sequence[float]) -> bool:
        if run.parallel.gpus > 1:
            return False  # ranks that stop at different steps would wait for each other
        is_late = time.monotonic() - start_s > request["extra_until_s"]
        return is_enough(run.phase, times_s, request["decisive_s"], request["predicted_s"]) or (
            is_late and len(times_s) >= request["num_batches"]
        )

    fields: dict[str, Any]
    with with_efficient_attention() if run.attn == "sdpa-efficient" else nullcontext():
        if run.phase == "inference":
            number = len(request["seq_lens"])
            fields = measure_inference(model, run, meter, number, is_done, tell=tell)
        else:
            measure = resolve_name(get_trainer(run.trainer).steps)
            fields = measure(model, run, meter, request["seq_lens"], is_done, tell=tell)
    return fields | {"build_s": build_s}


def _collect(meter: Meter) -> None:
    """Free the caches of the libraries, so that every measurement starts from the same state."""
    import torch

    if "bitsandbytes" in sys.modules:  # its 8-bit optimizers register the embeddings
        sys.modules["bitsandbytes"].optim.GlobalOptimManager.get_instance().initialize()
    gc.collect()
    if meter.is_cuda:
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def _is_clean(meter: Meter, start_bytes: int, kept: KeptModel) -> bool:
    """Whether everything but a model as it was built is freed, and the device still works."""
    from whichlora.profiler.kept_model import leaves_no_bytes

    try:
        _collect(meter)
        meter.now()
        if leaves_no_bytes(meter, start_bytes + kept.num_bytes):
            return True
        kept.drop()
        _collect(meter)
        return leaves_no_bytes(meter, start_bytes)
    except RuntimeError:  # after an illegal access a CUDA context answers nothing else
        return False


@contextmanager
def _memory_limit(limit_bytes: int | None, *, held_bytes: int) -> Iterator[None]:
    """Let the process take `limit_bytes` beyond what it holds now; more is a failed allocation.

    Args:
        held_bytes: of what it holds, those that count.
    """
    if limit_bytes is None:
        yield
        return
    status = Path("/proc/self/status").read_text(encoding="ascii")
    used = re.search(r"^VmData:\s+(\d+) kB", status, re.MULTILINE)
    assert used is not None
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(
        resource.RLIMIT_DATA, (int(used.group(1)) * 1024 + limit_bytes - held_bytes, hard)
    )
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def environment(device: str) -> dict[str, Any]:
    """Versions and devices that a measurement depends on; the imports are the slow part."""
    import torch

    import whichlora.profiler.finetune
    import whichlora.profiler.inference  # noqa: F401

    facts: dict[str, Any] = {
        "device": _cpu_model(),
        "cpu": _cpu_model(),
        "num_threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "libraries": installed_versions(),
    }
    if device.startswith("cuda"):
        torch.zeros(1, device=device)  # creates the context: not part of any measurement
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        facts |= {
            "device": torch.cuda.get_device_name(),
            "cuda": torch.version.cuda or torch.version.hip,
            **_driver_facts(torch.cuda.current_device()),
            "device_total_bytes": total_bytes,
            "device_used_idle_bytes": total_bytes - free_bytes,
        }
    return facts


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _driver_facts(index: int) -> dict[str, Any]:
    """What NVML says of the visible GPU of that number; nothing where there is none, as on ROCm."""
    try:
        gpus = detect_gpus()
    except MeasurementError:  # the rest of the record still stands
        return {}
    if index >= len(gpus):
        return {}
    return {"driver": gpus[index].driver, "power_limit_w": gpus[index].power_limit_w}


if __name__ == "__main__":
    main()
