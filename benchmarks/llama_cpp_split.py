"""Compare how llama.cpp divides a model over several GPUs with what we predict.

    python benchmarks/llama_cpp_split.py --write    docs/accuracy/llama_cpp_split.md

`--measure BUILD` adds models, as `llama_cpp_runs.py` does: llama.cpp plans its memory on devices
with the rules of its CUDA backend, and `llama-fit-params` says what `--fit` does. Published speeds
of several GPUs are in `llama_cpp_split_speeds.csv`; those of one in `llama_cpp_gpus.csv`.
"""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import llama_cpp_gpus
import llama_cpp_page
import llama_cpp_runs
from llama_cpp_gpus import Speed
from llama_cpp_runs import Case, compiled_device, environment, file_of, part_of, served
from markdown_tables import markdown_table, summary

from whichlora.calibration.load import load_calibration
from whichlora.predict.serving_links import sends_s
from whichlora.serving.base import Served
from whichlora.serving.llama_cpp import stepping
from whichlora.serving.llama_cpp_memory import (
    asked_placement,
    cells_kept,
    fitted_placement,
    slots,
    taken_by,
)
from whichlora.serving.pipeline_time import PipelineTimer, pipeline_timer
from whichlora.serving.step_time import Step, StepTimer, own_all_reduce
from whichlora.spec.options import OptionValue
from whichlora.store.hub import load_model
from whichlora.units import MiB

SPEEDS = Path(__file__).parent / "llama_cpp_split_speeds.csv"
PAGE = "page of 2024"
CHECKS = ("plan", "start", "fit")
RECORDS = Path(__file__).parent / "llama_cpp_split.csv"
MODELS = (
    "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B", "Qwen/Qwen2.5-7B", "Qwen/Qwen3-30B-A3B",
    "mistralai/Mixtral-8x7B-v0.1", "google/gemma-2-9b", "google/gemma-3-12b-pt",
    "microsoft/Phi-3-medium-4k-instruct", "allenai/OLMo-2-1124-7B", "bigcode/starcoder2-3b",
    "openai/gpt-oss-20b", "openai/gpt-oss-120b", "mistralai/Mistral-Small-24B-Base-2501",
    "zai-org/GLM-4.5-Air", "Qwen/Qwen3-Next-80B-A3B-Instruct", "deepseek-ai/DeepSeek-V2-Lite",
)  # fmt: skip
EXPERTS = (
    "Qwen/Qwen3-30B-A3B", "mistralai/Mixtral-8x7B-v0.1", "openai/gpt-oss-20b",
    "openai/gpt-oss-120b", "zai-org/GLM-4.5-Air", "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "deepseek-ai/DeepSeek-V2-Lite",
)  # fmt: skip
# MiB that are free on each device, and what is asked for.
PLANS: tuple[tuple[str, dict[str, OptionValue]], ...] = (
    ("24000,24000", {"context": 8192}),
    ("24000,12000", {"context": 4096, "concurrency": 4, "file_type": "Q4_K_M"}),
    ("24000,24000,24000", {"context": 16384, "ubatch_size": 1024, "file_type": "Q8_0"}),
    ("48000,24000,24000,12000", {"context": 8192, "flash_attn": "off", "file_type": "Q4_K_M"}),
    (
        "24000,24000",
        {"context": 32768, "tensor_split": "3,1", "cache_type_k": "q8_0", "cache_type_v": "q8_0"},
    ),
    ("24000,24000,24000,24000", {"context": 32768, "concurrency": 4, "kv_unified": True}),
    ("24000,24000", {"context": 8192, "n_gpu_layers": 17, "file_type": "Q4_K_M"}),
    ("24000,24000,24000", {"context": 8192, "n_gpu_layers": 20, "tensor_split": "1,2,1"}),
    ("24000,24000", {"context": 4096, "tensor_split": "0,1", "file_type": "Q8_0"}),
    ("24000,24000,24000", {"context": 8192, "tensor_split": "30,30,1", "file_type": "Q6_K"}),
)
EXPERTS_ON_HOST: tuple[tuple[str, dict[str, OptionValue]], ...] = (
    ("24000,24000", {"context": 8192, "n_cpu_moe": 20, "file_type": "Q4_K_M"}),
    ("24000,12000,12000", {"context": 8192, "n_cpu_moe": 5, "file_type": "Q8_0"}),
)
# Read in whole, so only the smaller ones: their buffers are allocated on devices that hold nothing.
STARTED = (
    "meta-llama/Llama-3.1-8B", "Qwen/Qwen2.5-7B", "google/gemma-2-9b", "allenai/OLMo-2-1124-7B",
    "bigcode/starcoder2-3b",
)  # fmt: skip
FITS = (
    "6000,6000", "8000,4000", "3000,2500", "3000,3000,4000", "12000,12000", "24000,12000",
    "5000,3000,2000,2000", "2500,2500,2500,2500", "2000,9000",
)  # fmt: skip
FITTED: dict[str, OptionValue] = {"context": 8192, "file_type": "Q4_K_M"}
KINDS = {"gate|up|gate_up|down).*": "attn", "gate|gate_up|down).*": "up", "down.*": "gate"}


def measure(build: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    import gguf_files

    with RECORDS.open(encoding="utf-8", newline="") as kept:
        known = {row["model"] for row in csv.DictReader(kept)}
    with RECORDS.open("a", encoding="utf-8", newline="") as out:
        writer = csv.writer(out, lineterminator="\n")
        for name in [name for name in MODELS if name not in known]:
            with tempfile.TemporaryDirectory() as folder:
                device = compiled_device(build, Path(folder))
                for free, settings in PLANS + EXPERTS_ON_HOST * (name in EXPERTS):
                    if not Case(model=name, device="cuda", settings=_asked(settings)).is_served:
                        continue
                    file = file_of(Path(folder), gguf_files, name, settings)
                    writer.writerows(_planned(build, device, file, name, free, settings))
                    if name in STARTED:
                        small = {**settings, "file_type": "Q4_K_M"}
                        file = file_of(Path(folder), gguf_files, name, small)
                        writer.writerows(_planned(build, device, file, name, free, small, "start"))
                file = file_of(Path(folder), gguf_files, name, FITTED)
                for free in FITS:
                    writer.writerow(_fitted(build, device, file, name, free))


def _asked(settings: Mapping[str, OptionValue]) -> tuple[tuple[str, OptionValue], ...]:
    """As `Case` has it, on the most GPUs of `PLANS`."""
    return tuple({**settings, "devices": 4}.items())


def _planned(
    build: Path,
    device: Path,
    file: Path,
    name: str,
    free: str,
    settings: Mapping[str, object],
    check: str = "plan",
) -> Iterator[tuple[object, ...]]:
    started = {"runs": False, "allocates": check == "start"}
    asked = json.dumps({**settings, **started, "device": str(device), "file": str(file)})
    done = subprocess.run(
        [sys.executable, __file__, "--probe", asked],
        capture_output=True, text=True, env=environment(build, free), check=False,
    )  # fmt: skip
    lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("memory")]
    if not lines:
        raise SystemExit(f"{name}, {free}, {settings}: {done.stderr[-2000:]}")
    key = (check, name, free, json.dumps(dict(settings)))
    for number in range(1, len(free.split(",")) + 1):
        held = [list(map(int, line[1:])) for line in lines if int(line[0]) == number]
        for index, what in enumerate(("weights", "cache", "compute")):
            yield (*key, what, number, sum(sizes[index] for sizes in held))
    host = (int(size) for line in lines if line[0] == "0" for size in line[1:])
    yield (*key, "host", 0, sum(host))


def _fitted(build: Path, device: Path, file: Path, name: str, free: str) -> tuple[object, ...]:
    """Layers of each device, and which layers' matrices lie elsewhere.

    A pattern for the output matrix, which has no number of a layer, matches nothing.
    """
    command = [str(build / "bin" / "llama-fit-params"), "-m", str(file), "-c", "8192"]
    places = {**environment(build, free), "LD_PRELOAD": str(device)}
    done = subprocess.run(command, capture_output=True, text=True, env=places, check=False)
    layers = re.search(r"-ngl (-?\d+)(?: -ts ([\d,]+))?", done.stdout)
    if layers is None:
        raise SystemExit(f"{name}, {free}: {done.stderr[-2000:]}")
    moved = [
        f"{layer}:{KINDS.get(kind, 'moe')}>{place.removeprefix('FAKE').lower()}"
        for layer, kind, place in re.findall(r"blk\\\.(\d+)\\\.ffn_\(?(.*?)=(\w+)", done.stdout)
        if int(layer) < load_model(name).num_hidden_layers
    ]
    placed = "all" if layers[1] == "-1" else layers[2] or layers[1]
    return "fit", name, free, json.dumps(FITTED), "layers", "", " ".join((placed, *moved))


# --- comparing --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One recorded value beside ours."""

    row: Mapping[str, str]
    ours: object

    @property
    def error(self) -> float:
        """Of bytes."""
        assert isinstance(self.ours, int)
        recorded = int(self.row["value"])
        return self.ours / recorded - 1 if recorded else float(self.ours != 0)

    @property
    def is_equal(self) -> bool:
        return str(self.ours) == self.row["value"]


def compared(checks: Container[str] = CHECKS, model: str | None = None) -> Iterator[Compared]:
    """Every record beside what we predict, or those of a model."""
    with RECORDS.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["check"] not in checks or model not in (None, row["model"]):
                continue
            yield Compared(row=row, ours=_layers(row) if row["check"] == "fit" else _bytes(row))


def asked_of(row: Mapping[str, str]) -> Served:
    """What we are asked for, on as many GPUs."""
    return _asked(row["model"], row["settings"], len(row["free_mib"].split(",")))


@cache
def _asked(name: str, settings: str, devices: int) -> Served:
    return served(name, "cuda", {**json.loads(settings), "devices": devices})


def _free(row: Mapping[str, str]) -> list[int]:
    return [int(mib) * MiB for mib in row["free_mib"].split(",")]


def _bytes(row: Mapping[str, str]) -> int:
    asked = asked_of(row)
    is_plan, device = row["check"] == "plan", max(0, int(row["device"]) - 1)
    kept = cells_kept(asked, asked.context, slots(asked))
    placed = asked_placement(asked, _free(row))
    found = taken_by(asked, placed, kept, device, is_plan=is_plan)
    return part_of(found, row["what"])


def _layers(row: Mapping[str, str]) -> str:
    """As `_fitted` writes what `--fit` does."""
    asked, free = asked_of(row), _free(row)
    placed = fitted_placement(asked, free)
    if placed == asked_placement(asked, free):
        return "all"
    kinds = {"all but attention": "attn", "gate and down": "up", "down": "gate", "experts": "moe"}
    moved = [
        f"{each.layer}:{kinds[each.kind]}>{'cpu' if each.device is None else each.device}"
        for each in placed.moved
    ]
    return " ".join((",".join(map(str, placed.by_device)), *moved))


# --- speeds -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Speedup:
    """How much faster several GPUs are than one of them, as published and as predicted."""

    speed: Speed
    published: float
    ours: float

    @property
    def error(self) -> float:
        return self.ours / self.published - 1


def speedups() -> Iterator[Speedup]:
    """Of models that one GPU holds, too, by the same page."""
    alone = {_what(speed): speed for speed in llama_cpp_gpus.speeds() if speed.group == PAGE}
    for speed in llama_cpp_gpus.speeds(SPEEDS):
        one = alone.get(_what(speed))
        if one is not None:
            yield Speedup(
                speed=speed,
                published=speed.tokens_per_s / one.tokens_per_s,
                ours=_seconds(one) / _seconds(speed),
            )


def _what(speed: Speed) -> tuple[object, ...]:
    return speed.gpu, speed.model, speed.file_type, speed.kind, speed.tokens


def _seconds(speed: Speed) -> float:
    """`llama-bench` waits for the last of all micro-batches."""
    timer, tokens = _timer(speed.gpu, speed.model, speed.file_type, speed.gpus), speed.tokens
    if speed.kind == "decode":
        step = Step(decoding=1, cached_tokens=(tokens + 1) / 2, sampled=1)
        return tokens * timer.seconds(step)
    pairs = tokens * (tokens + 1) / 2
    return timer.seconds(
        Step(decoding=0, cached_tokens=0, sampled=0, prompt_tokens=tokens, prompt_pairs=pairs)
    )


@cache
def _timer(key: str, model: str, file_type: str, gpus: int) -> StepTimer | PipelineTimer:
    asked = llama_cpp_gpus.benchmarked(model, file_type, 512, key, gpus)
    if gpus == 1:
        return llama_cpp_gpus.timer_of(asked)
    steps, machines = stepping(asked), load_calibration(asked.gpu).machines
    sending = sends_s(1, steps.num_stages, asked.gpu, machines)
    assert sending is not None
    alone = own_all_reduce(0.0, 1)
    return pipeline_timer(asked, stepping=steps, reduction_s=alone, sends_s=sending)


def _speed_rows() -> list[tuple[object, ...]]:
    found, rows = list(speedups()), []
    groups = sorted({(each.speed.kind, _size(each.speed)) for each in found})
    for kind, size in groups:
        errors = [
            each.error for each in found if (each.speed.kind, _size(each.speed)) == (kind, size)
        ]
        rows.append((kind, size, *summary(errors).cells()))
    return rows


def _size(speed: Speed) -> str:
    return speed.model.rpartition("-")[2]


def _growth(tokens: int, gpus: int) -> tuple[float, float]:
    """How much faster prompts of `tokens` are on so many RTX 4090: published, and ours."""
    (found,) = (
        each
        for each in speedups()
        if (each.speed.gpu, each.speed.gpus, each.speed.tokens) == ("rtx-4090-24gb", gpus, tokens)
        and (each.speed.kind, each.speed.file_type) == ("prompt", "Q4_K_M")
    )
    return found.published, found.ours


def _speeds_text() -> str:
    growth = "; ".join(
        f"{gpus} in {tokens} tokens {published:.2f} times, we say {ours:.2f}"
        for gpus in (2, 4)
        for tokens in (512, 4096)
        for published, ours in [_growth(tokens, gpus)]
    )
    return (
        f"How much faster several GPUs are than one. RTX 4090 and 8B in Q4_K_M: {growth}. A token "
        "passes all GPUs, so that answers are as slow as on one. Each further GPU cost 0.1 to 0.4 "
        "ms a token in that release; we count what is sent alone. Prompts of 70B in Q4_K_M gained "
        "far less on four GPUs than those of 8B there, and so did 16 bit on some cards, which we "
        "cannot explain. Intervals of several GPUs are wider for that."
    )


# --- page -------------------------------------------------------------------------------------


def document() -> str:
    """The page."""
    found = list(compared())
    rows = []
    for check, title in (("plan", "planned"), ("start", "allocated")):
        for what in ("weights", "cache", "compute", "host"):
            errors = [
                each.error
                for each in found
                if each.row["check"] == check and each.row["what"] == what
            ]
            rows.append((title, what, *summary(errors).cells()))
    fits = [each for each in found if each.row["check"] == "fit"]
    equal = sum(each.is_equal for each in fits)
    return "\n\n".join(
        (
            f"llama.cpp 0c1e570 divides {len(MODELS)} models over 2 to 4 devices with the rules of "
            "its CUDA backend, equal and unequal, by their free memory, by `-ts`, or a part of the "
            f"layers alone. Of {len(STARTED)} models it allocates the buffers, too.",
            markdown_table(
                ("buffers", "of each device", "n", "median", "p90", "worst"), rows, first_figure=2
            ),
            f"`llama-fit-params`: the same layers on each device, and the same matrices elsewhere, "
            f"in {equal} of {len(fits)} cases.",
            "## Speed",
            _speeds_text(),
            markdown_table(
                ("step", "model", "n", "median", "p90", "worst"), _speed_rows(), first_figure=2
            ),
        )
    )


if __name__ == "__main__":
    llama_cpp_page.run(
        __doc__,
        page="llama_cpp_split",
        title="Several GPUs of llama.cpp",
        measure=measure,
        probe=llama_cpp_runs.probe,
        text=document,
    )
