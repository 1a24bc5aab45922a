"""Golden predictions: what a change that must not move a figure is compared with.

`tests/golden/predictions.jsonl.gz` holds thousands of seeded runs over every model, method, phase,
option and GPU, and hundreds of starts of engines, each with its prediction or its refusal. Every
tenth run holds its explanation, with the predictions of its alternatives: one takes as long as
forty predictions. Integers and text must be equal, floats to 10 significant digits.

    python benchmarks/golden.py                # compare all with what is predicted now
    python benchmarks/golden.py --sample 120   # compare a part, spread over the whole file
    python benchmarks/golden.py --write        # predict the same runs anew, and say what moved
    python benchmarks/golden.py --draw 3800 --served 600 --seed 15  # draw others, and write them

Priors predict most runs. Those on the GPU of `tests/golden/coefficients.json`, a frozen copy, are
predicted with its coefficients.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import math
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing import Pool
from pathlib import Path
from typing import Any, get_args

from whichlora.errors import ConfigError
from whichlora.predict.coefficients import Calibration, prior_calibration
from whichlora.predict.explain import explain
from whichlora.predict.predict import predict
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.run import (
    AdapterDtype,
    AttentionKernel,
    BaseDtype,
    Bias,
    CacheBackend,
    KvCache,
    LossHead,
    Optimizer,
    Padding,
    Precision,
    Quant,
    RunConfig,
    Serve,
)
from whichlora.store.gpus import find_gpu, list_gpus
from whichlora.store.hub import load_model
from whichlora.store.models import list_models

FOLDER = Path(__file__).parents[1] / "tests" / "golden"
PREDICTIONS = FOLDER / "predictions.jsonl.gz"
COEFFICIENTS = FOLDER / "coefficients.json"
CALIBRATED_GPU = "a100-sxm-80gb"
DIGITS = 10
METHODS = ("full", "lora", "qlora", "dora", "qdora")  # plug-ins have no golden predictions
OLD_LIBRARIES = (
    (),
    (("transformers", "4.46.0"),),
    (("transformers", "4.57.0"), ("peft", "0.17.0")),
)

Row = dict[str, Any]

# A setting keeps its default in half of the runs: most combinations of drawn values are refused.
_FINETUNE: dict[str, Sequence[Any]] = {
    "r": (1, 8, 64, 256),
    "lora_dropout": (0.05,),
    "target_modules": (("attention",),),
    "precision": get_args(Precision),
    "optimizer": get_args(Optimizer),
    "gradient_checkpointing": (False,),
    "gradient_accumulation_steps": (4,),
    "attn": get_args(AttentionKernel),
    "padding": get_args(Padding),
    "loss_head": get_args(LossHead),
    "prepare_kbit": (False, True),
    "use_reentrant": (False, True),
    "modules_to_save": (("lm_head",), ("embed_tokens", "lm_head")),
    "base_dtype": get_args(BaseDtype),
    "adapter_dtype": get_args(AdapterDtype),
    "bias": get_args(Bias),
    "loraplus_lr_ratio": (16.0,),
    "expandable_segments": (True,),
    "libraries": OLD_LIBRARIES,
}
_INFERENCE: dict[str, Sequence[Any]] = {
    "r": (8, 64),
    "max_new_tokens": (1, 2, 512),
    "precision": ("bf16", "fp16", "fp32"),
    "attn": get_args(AttentionKernel),
    "quant": get_args(Quant),
    "serve": get_args(Serve),
    "kv_cache": get_args(KvCache),
    "cache_backend": get_args(CacheBackend),
    "cache_nbits": (2,),
    "cache_group_size": (32,),
    "cache_residual_length": (64,),
    "quant_group_size": (32, 64),
    "libraries": OLD_LIBRARIES,
}
_SERVED: dict[str, Sequence[Any]] = {  # options by engine
    "vllm": (
        (),
        (("gpu_memory_utilization", 0.8), ("max_num_seqs", 64)),
        (("max_num_batched_tokens", 2048), ("enforce_eager", True)),
        (("tensor_parallel_size", 2),),
        (("kv_cache_dtype", "fp8"),),
        (("enable_lora", True), ("max_loras", 4), ("max_lora_rank", 32)),
    ),
    "sglang": (
        (),
        (("mem_fraction_static", 0.8), ("chunked_prefill_size", 4096)),
        (("tp_size", 2),),
        (("kv_cache_dtype", "fp8_e5m2"),),
    ),
    "llama-cpp": (
        (("file_type", "Q4_K_M"),),
        (("file_type", "Q8_0"), ("n_gpu_layers", 20)),
        (("file_type", "Q4_K_M"), ("cache_type_k", "q8_0"), ("cache_type_v", "q8_0")),
        (("file_type", "Q4_K_M"), ("cpu_moe", True)),
    ),
}
_ENGINE_LIBRARIES = {
    "vllm": ((), (("vllm", "0.6.4"),), (("vllm", "0.10.2"),), (("vllm", "0.24.0"),)),
    "sglang": ((), (("sglang", "0.4.6"),), (("sglang", "0.5.10"),)),
    "llama-cpp": ((),),
}


Job = tuple[dict[str, Any], str, bool]


def draw(count: int, seed: int) -> Iterator[Job]:
    """Settings and GPUs of `count` runs: every model in turn, everything else at random."""
    rng = random.Random(seed)
    models = sorted(record.hub_id for record in list_models())
    gpus = sorted(gpu.key for gpu in list_gpus() if gpu.kind != "cpu")
    for index in range(count):
        training = rng.random() < 0.65
        settings: dict[str, Any] = {
            "model": models[index % len(models)],
            "phase": "finetune" if training else "inference",
            "method": rng.choice(METHODS),
            "batch_size": rng.choice((1, 1, 2, 3, 8, 32)),
        }
        settings["seq_len" if training else "prompt_len"] = rng.choice(
            (1, 77, 256, 512, 1024, 4096)
        )
        for name, values in (_FINETUNE if training else _INFERENCE).items():
            if rng.random() < (0.25 if training else 0.4):
                settings[name] = rng.choice(values)
        gpu = CALIBRATED_GPU if rng.random() < 0.1 else rng.choice(gpus)
        yield settings, gpu, index % 10 == 0


def draw_served(count: int, seed: int) -> Iterator[Job]:
    """Settings and GPUs of `count` starts of engines, as of `draw`."""
    rng = random.Random(seed)
    models = sorted(record.hub_id for record in list_models())
    rng.shuffle(models)
    gpus = sorted(gpu.key for gpu in list_gpus() if gpu.kind != "cpu")
    for index in range(count):
        engine = rng.choice(tuple(_SERVED))
        settings: dict[str, Any] = {
            "model": models[index % len(models)],
            "phase": "inference",
            "serving": engine,
            "serving_options": rng.choice(_SERVED[engine]),
            "context": rng.choice((1024, 2048, 8192, 32768)),
            "batch_size": rng.choice((1, 1, 16, 128)),  # at once
            "libraries": rng.choice(_ENGINE_LIBRARIES[engine]),
        }
        if engine != "llama-cpp" and rng.random() < 0.4:
            settings["quant"] = rng.choice(("fp8", "awq-int4", "gptq-int4", "nf4"))
        yield settings, rng.choice(gpus), False


def calibration_of(gpu: GpuSpec) -> Calibration:
    """The frozen coefficients of the calibrated GPU, and the priors of every other."""
    if gpu.key != CALIBRATED_GPU:
        return prior_calibration(gpu)
    return Calibration.from_dict(json.loads(COEFFICIENTS.read_text()), source=COEFFICIENTS.name)


def answer(settings: dict[str, Any], gpu_key: str, is_explained: bool) -> Row:
    """One row: what is predicted or explained, or why it is refused."""
    row: Row = {"settings": settings, "gpu": gpu_key, "is_explained": is_explained}
    gpu = find_gpu(gpu_key)
    name, judge = ("explained", explain) if is_explained else ("prediction", predict)
    try:
        run = _run(settings)
        answered = judge(load_model(run.model), run, gpu, calibration_of(gpu))
    except ConfigError as error:
        return row | {"refused": str(error)}
    return row | {name: json.loads(json.dumps(answered.to_dict()))}


def _run(settings: dict[str, Any]) -> RunConfig:
    """The run of a row, whose tuples are lists in the file.

    Raises:
        ConfigError: settings that exclude each other.
    """
    tuples = {
        name: tuple(tuple(item) if isinstance(item, list) else item for item in value)
        for name, value in settings.items()
        if isinstance(value, list | tuple)
    }
    return RunConfig(**(settings | tuples))


def differences(before: Any, now: Any, path: str = "") -> Iterator[str]:
    """Every place where `now` is not `before`: floats within 10 digits are equal."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in before.keys() | now.keys():
            if key not in before or key not in now:
                yield f"{path}.{key}: {'new' if key not in before else 'gone'}"
            else:
                yield from differences(before[key], now[key], f"{path}.{key}")
    elif isinstance(before, list) and isinstance(now, list):
        if len(before) != len(now):
            yield f"{path}: {len(before)} -> {len(now)} items"
        for index, (old, new) in enumerate(zip(before, now, strict=False)):
            yield from differences(old, new, f"{path}[{index}]")
    elif isinstance(before, float) and isinstance(now, float):
        if not math.isclose(before, now, rel_tol=10**-DIGITS, abs_tol=1e-300):
            yield f"{path}: {before!r} -> {now!r}"
    elif type(before) is not type(now) or before != now:
        yield f"{path}: {before!r} -> {now!r}"


class Texts:
    """Texts and shapes of objects, stored once: explanations repeat them thousands of times."""

    def __init__(self, texts: Sequence[str] = (), shapes: Sequence[Sequence[str]] = ()) -> None:
        self.texts = list(texts)
        self.shapes = [tuple(shape) for shape in shapes]
        self._text_index = {text: index for index, text in enumerate(self.texts)}
        self._shape_index = {shape: index for index, shape in enumerate(self.shapes)}

    def pack(self, value: Any) -> Any:
        """`value` with indices of texts and of the shapes of objects in their place."""
        if isinstance(value, str):
            if value not in self._text_index:
                self._text_index[value] = len(self.texts)
                self.texts.append(value)
            return {"t": self._text_index[value]}
        if isinstance(value, dict):
            shape = tuple(value)
            if shape not in self._shape_index:
                self._shape_index[shape] = len(self.shapes)
                self.shapes.append(shape)
            return {"o": [self._shape_index[shape], *map(self.pack, value.values())]}
        if isinstance(value, list | tuple):
            return [self.pack(item) for item in value]
        return float(f"{value:.12g}") if isinstance(value, float) else value

    def unpack(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.unpack(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "t" in value:
            return self.texts[value["t"]]
        shape, *values = value["o"]
        return dict(zip(self.shapes[shape], map(self.unpack, values), strict=True))


def read_lines(path: Path = PREDICTIONS) -> tuple[Texts, list[str]]:
    """The stored rows as they lie in the file, and the texts that they refer to."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        header = json.loads(next(file))
        return Texts(header["texts"], header["shapes"]), list(file)


def read_rows(path: Path = PREDICTIONS) -> list[Row]:
    """The stored rows, whole."""
    texts, lines = read_lines(path)
    return [texts.unpack(json.loads(line)) for line in lines]


def write_rows(rows: Sequence[Row], path: Path = PREDICTIONS) -> None:
    """Store `rows`; the same rows make the same file."""
    texts = Texts()
    packed = [json.dumps(texts.pack(row), separators=(",", ":")) for row in rows]
    header = {"schema_version": 1, "texts": texts.texts, "shapes": texts.shapes}
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", compresslevel=9, mtime=0) as file:
        for line in (json.dumps(header, ensure_ascii=False), *packed):
            file.write(line.encode() + b"\n")
    path.write_bytes(buffer.getvalue())


def job_of(row: Row) -> Job:
    return row["settings"], row["gpu"], row["is_explained"]


def _answer(job: Job) -> Row:
    return answer(*job)


def answers(jobs: Sequence[Job], processes: int) -> list[Row]:
    """`answer` of every job, by several processes where that pays."""
    if processes == 1 or len(jobs) < 400:
        return [_answer(job) for job in jobs]
    with Pool(processes) as pool:
        return pool.map(_answer, jobs, chunksize=32)


def compare(rows: Sequence[Row], now: Sequence[Row]) -> list[tuple[Row, list[str]]]:
    """The rows that are answered otherwise now, each with what differs."""
    changes = ((old, list(differences(old, new))) for old, new in zip(rows, now, strict=True))
    return [(row, lines) for row, lines in changes if lines]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sample", type=int, help="compare so many rows")
    parser.add_argument("--draw", type=int, help="draw so many other runs, and write them")
    parser.add_argument("--served", type=int, default=600, help="and so many starts of engines")
    parser.add_argument("--seed", type=int, default=14)
    parser.add_argument("--write", action="store_true", help="write what is predicted now")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--quiet", action="store_true", help="print differences alone")
    options = parser.parse_args()
    if options.draw:
        jobs = [*draw(options.draw, options.seed), *draw_served(options.served, options.seed)]
        rows = answers(jobs, options.processes)
        write_rows(rows)
        refused = sum("refused" in row for row in rows)
        print(f"{len(rows)} runs, {refused} of them refused: {PREDICTIONS.stat().st_size:,} bytes")
        return 0
    rows = read_rows()
    if options.sample and not options.write:
        rows = rows[:: max(1, len(rows) // options.sample)]
    now = answers([job_of(row) for row in rows], options.processes)
    changed = compare(rows, now)
    for row, lines in changed[:20]:
        print(f"{row['settings']} on {row['gpu']}: {len(lines)} differences")
        for line in lines[:5]:
            print(f"    {line}")
    if options.write and changed:
        write_rows(now)
    if changed or not options.quiet:
        kinds = Counter(line.partition(":")[0] for _, lines in changed for line in lines[:1])
        print(f"{len(changed)} of {len(rows)} predictions moved", dict(kinds.most_common(5)) or "")
    return 1 if changed and not options.write else 0


if __name__ == "__main__":
    sys.exit(main())
