"""Compare what llama.cpp says it takes with what we predict: weights, cache, buffers, layers.

    python benchmarks/llama_cpp_runs.py --write    docs/accuracy/llama_cpp.md, from the records

To measure anew (`--measure BUILD`), BUILD holds a build of the llama.cpp of llama-cpp-python's
source archive, whose Python package and `gguf` are installed, and a compiler is there. Files have
a model's shape and no weights. llama.cpp plans its memory without allocating it (`no_alloc`) on the
CPU, and on a device with the rules of its CUDA or Metal backend (`llama_cpp_device.cpp`); small
random models are allocated, and run, for real. `llama-quantize --dry-run` states the size of a mix,
`llama-fit-params` what `--fit` does. Models that have records keep them: delete their lines to
measure them again.
"""

from __future__ import annotations

import csv
import ctypes
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import llama_cpp_page
from markdown_tables import markdown_table, summary

from whichlora.errors import ConfigError
from whichlora.predict.resolve import resolve
from whichlora.serving.base import Served
from whichlora.serving.gguf import FILE_TYPES, tensors
from whichlora.serving.gguf_architectures import architecture_of
from whichlora.serving.llama_cpp_memory import (
    Taken,
    asked_placement,
    fitted_placement,
    free_bytes,
    slots,
    taken,
)
from whichlora.serving.llama_cpp_split import Placement
from whichlora.spec.options import OptionValue
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_target
from whichlora.store.hub import load_model
from whichlora.units import MiB

RECORDS = Path(__file__).parent / "llama_cpp_runs.csv"
DEVICE = Path(__file__).parent / "llama_cpp_device.cpp"
CHECKS = ("plan", "mix", "fit")
COLUMNS = ("check", "model", "device", "settings", "what", "bytes")
GPUS = {"cuda": "rtx-4090-24gb", "metal": "m3-ultra-512gb"}
WHOLE, TOTAL = 1 << 20, 24564  # MiB that a device says are free: without end, or of a card
MODELS = (
    "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.2-1B", "mistralai/Mistral-7B-v0.1",
    "Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-7B", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B",
    "Qwen/Qwen3-30B-A3B", "mistralai/Mixtral-8x7B-v0.1", "google/gemma-2b", "google/gemma-2-9b",
    "google/gemma-3-1b-pt", "google/gemma-3-12b-pt", "microsoft/Phi-3-medium-4k-instruct",
    "ibm-granite/granite-3.1-2b-instruct", "allenai/OLMo-2-1124-7B", "bigcode/starcoder2-3b",
    "HuggingFaceTB/SmolLM3-3B", "meta-llama/Llama-3.1-70B",
    "openai/gpt-oss-20b", "openai/gpt-oss-120b", "mistralai/Mistral-Small-3.1-24B-Instruct-2503",
    "mistralai/Ministral-3-8B-Base-2512", "zai-org/GLM-4-9B-0414", "zai-org/GLM-4.5-Air",
    "Qwen/Qwen1.5-MoE-A2.7B", "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    "Qwen/Qwen3-Next-80B-A3B-Instruct", "Qwen/Qwen3.5-9B", "Qwen/Qwen3.5-35B-A3B",
    "deepseek-ai/DeepSeek-V2-Lite", "deepseek-ai/DeepSeek-V3", "moonshotai/Kimi-K2-Instruct",
    "zai-org/GLM-4.7-Flash", "Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen3-VL-8B-Instruct",
    "Qwen/Qwen3-VL-30B-A3B-Instruct", "ByteDance-Seed/Seed-OSS-36B-Instruct",
    "allenai/OLMoE-1B-7B-0924", "allenai/Olmo-3-1025-7B", "MiniMaxAI/MiniMax-M2.5",
    "ibm-granite/granite-3.1-3b-a800m-instruct", "ibm-granite/granite-4.0-micro",
    "ibm-granite/granite-4.0-h-tiny", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "nvidia/Nemotron-H-56B-Base-8K", "LiquidAI/LFM2-1.2B", "CohereForAI/aya-23-8B",
    "CohereLabs/c4ai-command-r7b-12-2024", "microsoft/phi-2", "tiiuae/falcon-7b",
    "tiiuae/falcon-40b", "EleutherAI/pythia-1.4b", "stabilityai/stablelm-2-1_6b",
    "stabilityai/stablelm-2-12b",
)  # fmt: skip
# What every model is planned with, on each device. `concurrency` is of the run.
SETTINGS: tuple[dict[str, OptionValue], ...] = (
    {"context": 8192},
    {"context": 2048, "concurrency": 8, "ubatch_size": 1024},
    {"context": 32768, "concurrency": 4, "kv_unified": True},
    {"context": 32768, "cache_type_k": "q8_0", "cache_type_v": "q8_0", "file_type": "Q4_K_M"},
    {"context": 4096, "flash_attn": "off", "file_type": "Q8_0"},
    {"context": 16384, "ubatch_size": 128, "cache_type_k": "bf16", "file_type": "Q6_K"},
    {"context": 8192, "swa_full": True, "file_type": "Q5_K_M", "concurrency": 2},
)
HOST_LAYERS = (1, 9, 17)
# Small enough to be allocated, and run, on the CPU.
RUN_MODELS = (
    "HuggingFaceTB/SmolLM2-135M", "Qwen/Qwen2.5-0.5B", "Qwen/Qwen3-0.6B", "google/gemma-3-270m",
    "google/gemma-3-1b-pt", "meta-llama/Llama-3.2-1B", "Qwen/Qwen3.5-0.8B", "LiquidAI/LFM2-350M",
    "EleutherAI/pythia-160m", "ibm-granite/granite-4.0-350m",
)  # fmt: skip
FREE_MIB = (3000, 6000, 12000, 20000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One start: on the CPU, or on a device of CUDA's or Metal's rules."""

    model: str
    device: str
    settings: tuple[tuple[str, OptionValue], ...]

    @property
    def is_served(self) -> bool:
        """Whether its settings are accepted: blocks of a cache must divide a row, for instance."""
        try:
            return bool(served(self.model, self.device, dict(self.settings)))
        except ConfigError:
            return False


def served(name: str, device: str, settings: Mapping[str, OptionValue]) -> Served:
    """The same as our engine is asked."""
    model = load_model(name)
    options: dict[str, OptionValue] = {"file_type": "F16"}
    options |= {
        key: value for key, value in settings.items() if key not in ("context", "concurrency")
    }
    run = RunConfig(
        model=model.name,
        phase="inference",
        serving="llama-cpp",
        serving_options=tuple(sorted(options.items())),
        context=int(settings["context"]),  # type: ignore[call-overload]
        batch_size=int(settings.get("concurrency", 1)),  # type: ignore[call-overload]
        precision="fp16",
    )
    gpu = find_target("cpu" if device.startswith("cpu") else GPUS[device])
    return resolve(model, run, gpu).served


def cases() -> Iterator[Case]:
    for name in MODELS:
        for settings in SETTINGS:
            for device in ("cuda", "cpu", "metal"):
                yield Case(model=name, device=device, settings=tuple(settings.items()))
        for layers in HOST_LAYERS:
            part = {"context": 8192, "n_gpu_layers": layers, "file_type": "Q4_K_M"}
            yield Case(model=name, device="cuda", settings=tuple(part.items()))

    for name in RUN_MODELS:
        for settings in SETTINGS:
            yield Case(model=name, device="cpu, run", settings=tuple(settings.items()))


# --- measuring --------------------------------------------------------------------------------


def measure(build: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    import gguf_files

    with RECORDS.open(encoding="utf-8", newline="") as kept:
        rows: list[tuple[object, ...]] = [tuple(row.values()) for row in csv.DictReader(kept)]
    known = {(row[0], row[1], row[2]) for row in rows}
    with tempfile.TemporaryDirectory() as folder:
        device = compiled_device(build, Path(folder))
        for case in cases():
            if ("plan", case.model, case.device) in known or not case.is_served:
                continue
            file = file_of(Path(folder), gguf_files, case.model, dict(case.settings))
            rows += _planned(build, device, file, case)
        for name in MODELS:
            if ("mix", name, "-") in known:
                continue
            rows += _mixes(build, file_of(Path(folder), gguf_files, name, {}), name)
            rows += _fits(
                build,
                device,
                file_of(Path(folder), gguf_files, name, {"file_type": "Q4_K_M"}),
                name,
            )
    with RECORDS.open("w", encoding="utf-8", newline="") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(rows)


def compiled_device(build: Path, folder: Path) -> Path:
    """A library with devices of CUDA's rules, by the headers that `build` was made from."""
    source = re.search(
        r"CMAKE_HOME_DIRECTORY:INTERNAL=(.*)", (build / "CMakeCache.txt").read_text()
    )
    assert source
    llama, device = Path(source[1]), folder / "libdevice.so"
    headers = [f"-I{llama / each}" for each in ("ggml/include", "ggml/src", "src", "include")]
    libraries = [f"-L{build / 'bin'}", "-lllama", "-lggml", "-lggml-base"]
    compile_ = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", *headers, str(DEVICE)]
    subprocess.run([*compile_, "-o", str(device), *libraries], check=True)
    return device


def file_of(folder: Path, gguf_files: Any, name: str, settings: Mapping[str, object]) -> Path:
    stored = str(settings.get("file_type", "F16"))
    path = folder / f"{name.replace('/', '--')}-{stored}.gguf"
    if not path.exists():
        gguf_files.write(load_model(name), stored, path)
    return path


def environment(build: Path, free_mib: object, rules: str = "cuda") -> dict[str, str]:
    libraries = str(build / "bin")
    return {
        **os.environ,
        "LLAMA_CPP_LIB_PATH": libraries,
        "LD_LIBRARY_PATH": libraries,
        "FREE_MIB": str(free_mib),
        "TOTAL_MIB": str(free_mib),
        "RULES": rules,
    }


def _planned(build: Path, device: Path, file: Path, case: Case) -> Iterator[tuple[object, ...]]:
    on_cpu = case.device.startswith("cpu")
    asked = json.dumps(
        {
            **dict(case.settings),
            "device": str(device),
            "runs": "run" in case.device,
            "file": str(file),
        }
    )
    places = environment(build, 0 if on_cpu else WHOLE, case.device)
    done = subprocess.run(
        [sys.executable, __file__, "--probe", asked],
        capture_output=True, text=True, env=places, check=False,
    )  # fmt: skip
    found = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("memory")]
    if not found:
        raise SystemExit(f"{case}: {done.stderr[-2000:]}")
    key = ("plan", case.model, case.device, json.dumps(dict(case.settings)))
    own = [line[1:] for line in found if (line[0] == "0") == on_cpu]
    for index, what in enumerate(("weights", "cache", "compute")):
        yield (*key, what, sum(int(sizes[index]) for sizes in own))
    if not on_cpu:
        host = (line[1:] for line in found if line[0] == "0")
        yield (*key, "host", sum(int(size) for sizes in host for size in sizes))


def probe(asked: dict[str, Any]) -> None:
    """Plan one start, and print what it takes."""
    import llama_cpp.llama_cpp as library

    device = ctypes.CDLL(asked["device"])
    device.print_memory.argtypes = [ctypes.c_void_p]

    @library.llama_log_callback
    def log(level: int, text: bytes, _: object) -> None:
        if level >= 3:
            sys.stderr.write(text.decode())

    library.llama_log_set(log, None)
    library.llama_backend_init()
    loading = library.llama_model_default_params()
    loading.no_alloc, loading.load_mode = not (asked["runs"] or asked.get("allocates")), 0
    loading.use_extra_bufts = False  # no second layout for one kind of CPU
    loading.n_gpu_layers = asked.get("n_gpu_layers", -2)
    if "tensor_split" in asked:
        parts = [float(part) for part in asked["tensor_split"].split(",")]
        loading.tensor_split = (ctypes.c_float * 16)(*parts)
    if asked.get("n_cpu_moe"):
        overrides = _experts_on_host(asked["n_cpu_moe"])
        loading.tensor_buft_overrides = ctypes.cast(overrides, ctypes.c_void_p)
    model = library.llama_model_load_from_file(asked["file"].encode(), loading)
    context = library.llama_context_default_params()
    count = asked.get("concurrency", 1)
    caches = 1 if asked.get("kv_unified") else count
    context.n_ctx, context.n_seq_max = asked["context"] * caches, count
    context.n_outputs_max = count
    context.n_ubatch = asked.get("ubatch_size", 512)
    types = {"f16": 1, "q8_0": 8, "bf16": 30, "q4_0": 2}
    context.type_k = types[asked.get("cache_type_k", "f16")]
    context.type_v = types[asked.get("cache_type_v", "f16")]
    context.flash_attn_type = 0 if asked.get("flash_attn") == "off" else -1
    context.kv_unified = asked.get("kv_unified", False)
    context.swa_full = asked.get("swa_full", False)
    started = library.llama_init_from_model(model, context)
    if asked["runs"]:
        tokens = (ctypes.c_int32 * 4)(1, 2, 3, 4)
        if library.llama_decode(started, library.llama_batch_get_one(tokens, 4)):
            raise SystemExit("llama_decode failed")
    device.print_memory(started)
    sys.stdout.flush()
    os._exit(0)


class _Override(ctypes.Structure):
    _fields_ = (("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p))


def _experts_on_host(num_layers: int) -> ctypes.Array[_Override]:
    """As `--n-cpu-moe` says it."""
    cpu = ctypes.CDLL("libggml-base.so").ggml_backend_cpu_buffer_type
    cpu.restype = ctypes.c_void_p
    overrides = (_Override * (num_layers + 1))()
    for index in range(num_layers):
        pattern = rf"blk\.{index}\.ffn_(up|down|gate_up|gate)_(ch|)exps"
        overrides[index].pattern, overrides[index].buft = pattern.encode(), cpu()
    return overrides


def _mixes(build: Path, file: Path, name: str) -> Iterator[tuple[object, ...]]:
    for stored in FILE_TYPES:
        done = subprocess.run(
            [str(build / "bin" / "llama-quantize"), "--dry-run", str(file), stored],
            capture_output=True, text=True, env=environment(build, 0), check=False,
        )  # fmt: skip
        size = re.search(r"quant size\s*=\s*([\d.]+) MiB", done.stdout + done.stderr)
        if size:
            yield "mix", name, "-", stored, "MiB", size[1]


def _fits(build: Path, device: Path, file: Path, name: str) -> Iterator[tuple[object, ...]]:
    for free in FREE_MIB:
        # it plans a row of logits for each token, the server one for each slot: so one token
        command = [str(build / "bin" / "llama-fit-params"), "-m", str(file), "-c", "8192"]
        command += ["-b", "1", "-ub", "1"]
        places = {**environment(build, free), "LD_PRELOAD": str(device)}
        done = subprocess.run(command, capture_output=True, text=True, env=places, check=False)
        layers = re.search(r"-ngl (-?\d+)(.*)", done.stdout)
        if layers:
            on_host = len(re.findall(r"exps=CPU", layers[2]))
            num_layers = load_model(name).num_hidden_layers + 1
            held = num_layers if layers[1] == "-1" else int(layers[1])
            yield "fit", name, f"{free} MiB", "", "layers", held
            yield "fit", name, f"{free} MiB", "", "layers without experts", on_host


# --- comparing --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One recorded number beside ours."""

    row: Mapping[str, str]
    ours: float

    @property
    def published(self) -> float:
        return float(self.row["bytes"])

    @property
    def error(self) -> float | None:
        return self.ours / self.published - 1 if self.published else None


def compared(checks: Container[str] = CHECKS) -> Iterator[Compared]:
    """Every record that we predict."""
    with RECORDS.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["check"] in checks:
                yield Compared(row=row, ours=_CHECKS[row["check"]](row))


def part_of(found: Taken, what: str) -> int:
    """Bytes of what llama.cpp prints a line of."""
    sizes = {
        "weights": found.layers + found.output,
        "cache": found.cache,
        "compute": found.compute,
        "host": found.host,
    }
    return sizes[what]


def _plan(row: Mapping[str, str]) -> float:
    return part_of(_taken(row["model"], row["device"], row["settings"]), row["what"])


@cache
def _taken(name: str, device: str, settings: str) -> Taken:
    """Of one start, of which there is a record for each part."""
    asked = served(name, device, json.loads(settings))
    placed = asked_placement(asked, free_bytes(asked))
    return taken(asked, placed, asked.context, slots(asked))


def _mix(row: Mapping[str, str]) -> float:
    model = load_model(row["model"])
    file = tensors(model, row["settings"], architecture_of(model))
    return sum(tensor.num_bytes for tensor in file) / MiB


@cache
def _fitted(name: str, free_mib: int) -> Placement:
    one_token = {"context": 8192, "file_type": "Q4_K_M", "batch_size": 1, "ubatch_size": 1}
    return fitted_placement(served(name, "cuda", one_token), [free_mib * MiB])


def _fit(row: Mapping[str, str]) -> float:
    placed = _fitted(row["model"], int(row["device"].split()[0]))
    if row["what"] == "layers":
        return placed.layers
    # a pattern for the output matrix, too, which matches nothing
    return sum(each.kind == "experts" for each in placed.moved) + bool(placed.moved)


_PLACES = (
    ("cuda", "device of CUDA's rules"),
    ("metal", "device of Metal's rules"),
    ("cpu", "CPU"),
    ("cpu, run", "CPU, allocated and run"),
)
_CHECKS = {"plan": _plan, "mix": _mix, "fit": _fit}


def _is_partial(row: Mapping[str, str]) -> bool:
    return "n_gpu_layers" in row["settings"]


def _known(error: float | None) -> float:
    return error or 0.0


def device_totals(found: Iterable[Compared]) -> list[float]:
    """Errors of weights, cache and buffer together, of each start."""
    sums: dict[tuple[str, str], list[float]] = {}
    for each in found:
        if each.row["what"] != "host":
            total = sums.setdefault((each.row["model"], each.row["settings"]), [0.0, 0.0])
            total[0] += each.ours
            total[1] += each.published
    return [ours / published - 1 for ours, published in sums.values()]


def document(found: list[Compared]) -> str:
    rows = []
    for device, title in _PLACES:
        plans = [each for each in found if each.row["device"] == device]
        for what in ("weights", "cache", "compute", "host"):
            errors = [each.error for each in plans if each.row["what"] == what]
            whole = [
                each.error
                for each in plans
                if each.row["what"] == what and not _is_partial(each.row)
            ]
            if errors:
                rows.append((title, what, *summary(map(_known, whole)).cells()))
        if partial := device_totals(each for each in plans if _is_partial(each.row)):
            rows.append((title, "all, some layers on the host", *summary(partial).cells()))
    mixes = [each.error for each in found if each.row["check"] == "mix" and each.error is not None]
    rows.append(("`llama-quantize --dry-run`", "size of a mix", *summary(mixes).cells()))
    fits = [each for each in found if each.row["check"] == "fit"]
    equal = sum(each.ours == each.published for each in fits)
    near = sum(abs(each.ours - each.published) <= 1 for each in fits)
    return "\n\n".join(
        (
            f"llama.cpp 0c1e570 plans {len(MODELS)} models from 0.5 B to 1 T parameters without "
            "allocating them: on a CPU, and on devices with the rules of its CUDA and Metal "
            "backends. "
            f"Another {len(RUN_MODELS)} are allocated, and run, on the CPU. "
            "Files have the shapes that we predict, and llama.cpp accepts them.",
            markdown_table(("where", "what", "n", "median", "p90", "worst"), rows, first_figure=2),
            f"Layers that `--fit` leaves on the GPU: equal in {equal} of {len(fits)} cases, and in "
            f"{near} at most one apart. Several GPUs: "
            "[llama_cpp_split.md](llama_cpp_split.md).",
        )
    )


if __name__ == "__main__":
    llama_cpp_page.run(
        __doc__,
        page="llama_cpp",
        title="Memory of llama.cpp",
        measure=measure,
        probe=probe,
        text=lambda: document(list(compared())),
    )
