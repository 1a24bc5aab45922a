"""Placements by `device_map="auto"` and bytes per GPU: the libraries' against the formulas'.

`python benchmarks/device_map_cases.py` compares the kept records; `--draw` makes them anew.
Placements are of 17 models in three precisions on 2 to 8 GPUs of 24 and 80 GiB. Bytes are those of
traces on one device, whose storages are grouped by module: without the copies that accelerate's
hooks make, which are read in its source.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from markdown_tables import sizes_by_strategy

from whichlora import families
from whichlora.memory.allocator import REMAINDERS
from whichlora.parallel import device_map
from whichlora.parallel.placement import balanced_caps, is_quantised_on_device, modules_of, placed
from whichlora.predict.quantities import training_step
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.spec.numeric import added
from whichlora.spec.parallel import ONE_GPU, ParallelConfig
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model
from whichlora.units import GiB

FOLDER = Path(__file__).parent / "traces"
PLACEMENTS, BYTES = FOLDER / "device-map-places.jsonl", FOLDER / "device-map-bytes.jsonl"
GPU = find_gpu("a100-sxm-80gb")
MODELS = (
    "meta-llama/Llama-3.2-1B",
    "meta-llama/Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B",
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen2.5-1.5B",
    "Qwen/Qwen3-30B-A3B",
    "google/gemma-2-2b",
    "google/gemma-2-9b",
    "mistralai/Mistral-7B-v0.3",
    "mistralai/Mixtral-8x7B-v0.1",
    "microsoft/phi-2",
    "EleutherAI/pythia-1.4b",
    "bigcode/starcoder2-3b",
    "openai-community/gpt2",
    "facebook/opt-1.3b",
    "bigscience/bloom-560m",
    "tiiuae/falcon-7b",
)
LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)$")
STACK = re.compile(r"(.*\.)?(layers|h|blocks)|model|transformer|gpt_neox|model\.decoder")
HEADS = ("lm_head", "embed_out")


def job_of(run: dict[str, Any], gpus: int = 1, layers: int = 0) -> ResolvedRun:
    """The run of a record, of a model with fewer layers where `layers` are given."""
    model = load_model(run["model"])
    if layers:
        model = families.build(dict(model.config) | {"num_hidden_layers": layers}, name="drawn")
    parallel = ONE_GPU
    if gpus > 1:
        parallel = ParallelConfig(strategy="device-map", gpus=gpus)
    return resolve(model, replace(RunConfig.from_dict(run), parallel=parallel), GPU)


# --- placements ----------------------------------------------------------------------------------


def library_places(line: dict[str, Any]) -> list[Any]:
    """GPU of every layer and of the head, as transformers has them; "disk" where none has room."""
    from transformers.integrations import accelerate

    from whichlora.profiler.build import meta_model

    job = job_of(line["run"])
    model = meta_model(job.run, job.model.config, device="cpu")
    quantiser, blocks = getattr(model, "hf_quantizer", None), model._no_split_modules
    caps: dict[int | str, float] = dict.fromkeys(range(line["gpus"]), line["gib"] * GiB)
    with mock.patch.object(accelerate, "accelerate_max_memory", lambda given=None: dict(given)):
        balanced = accelerate.get_balanced_memory(
            model,
            max_memory=caps | {"cpu": 0},
            no_split_module_classes=blocks,
            hf_quantizer=quantiser,
        )
        if quantiser is not None:
            balanced = quantiser.adjust_max_memory(balanced)
        places = accelerate.infer_auto_device_map(
            model,
            max_memory=balanced,
            no_split_module_classes=blocks,
            hf_quantizer=quantiser,
            clean_result=False,
        )
    whole = next((gpu for name, gpu in places.items() if STACK.fullmatch(name)), None)
    by_layer = {}
    for name, gpu in places.items():
        matched = LAYER.search(name)
        if matched:
            by_layer[int(matched.group(1))] = gpu
    head = next((gpu for name, gpu in places.items() if name in HEADS), places.get(""))
    return [*(by_layer.get(i, whole) for i in range(job.model.num_hidden_layers)), head]


def formula_places(line: dict[str, Any]) -> list[int] | None:
    """The same by `parallel.placement`; None where something is left over."""
    job = job_of(line["run"])
    modules = modules_of(
        job.model, job.dtypes, 4 if device_map.weight_dtype(job.run) == "float32" else 2
    )
    caps = [float(line["gib"] * GiB)] * line["gpus"]
    quantised = is_quantised_on_device(job.dtypes)
    places = placed(modules, balanced_caps(modules, caps, quantised=quantised))
    if places is None:
        return None
    return [*(places[f"layer {i}"] for i in range(job.model.num_hidden_layers)), places["head"]]


def drawn_places() -> Iterator[dict[str, Any]]:
    settings = (("bf16-pure", "lora"), ("fp32", "full"), ("bf16-pure", "qlora"))
    for name in MODELS:
        for precision, method in settings:
            run = RunConfig(model=name, method=method, precision=precision).to_dict()
            for gpus in (2, 3, 4, 8):
                for gib in (24, 80):
                    yield {"run": run, "gpus": gpus, "gib": gib}


def places_differ() -> list[dict[str, Any]]:
    """Kept records whose layers or head are elsewhere by the formulas."""
    differ = []
    for line in records(PLACEMENTS):
        stays = all(isinstance(gpu, int) for gpu in line["places"])
        if formula_places(line) != (line["places"] if stays else None):
            differ.append(line)
    return differ


# --- bytes ---------------------------------------------------------------------------------------


def predicted(line: dict[str, Any]) -> list[float]:
    """Peak of every GPU by the ledger, without what the hooks of accelerate copy."""
    job = job_of(line["run"], line["gpus"], line["layers"])
    assert job.layout is not None
    copied = (device_map.RETURNED_LOGITS, device_map.NEXT_CHECKPOINT, REMAINDERS)
    peaks = []
    for kind in job.layout.rank_kinds(training_step(job)):
        moments = job.layout.ledger(kind).moments
        sizes = [
            added(entry.num_bytes for entry in entries if entry.fact not in copied)
            for name, entries in moments.items()
            if name != "outputs_return"
        ]
        peaks.append(float(max(sizes)))
    return peaks


def traced(line: dict[str, Any]) -> list[float]:
    """The same of a trace on one device, its storages given to the GPU of their module."""
    from whichlora.tracer.trace import trace

    job = job_of(line["run"], line["gpus"], line["layers"])
    given = device_map.shares(training_step(job), line["gpus"])
    by_layer = {number: index for index, share in enumerate(given) for number in share.layers}
    (first,) = (index for index, share in enumerate(given) if share.embeds)
    (last,) = (index for index, share in enumerate(given) if share.scores)
    events = trace(
        replace(job.run, parallel=ONE_GPU),
        dict(load_model(line["run"]["model"]).config) | {"num_hidden_layers": line["layers"]},
        target_modules=job.targets,
    )
    live, peaks = [0.0] * len(given), [0.0] * len(given)
    places: dict[int, tuple[int, int]] = {}
    moment, outside = "load", first
    for event in events:
        if event.moment != moment:
            moment, outside = event.moment, last if event.moment == "backward" else first
        if event.layer is not None and (event.inside or moment == "optimizer"):
            outside = first if moment == "backward" else last
        if event.num_bytes is None:
            gpu, num_bytes = places.pop(event.storage)
            live[gpu] -= num_bytes
            continue
        gpu = by_layer[event.layer] if event.layer is not None else outside
        if moment == "load" and event.layer is None:
            gpu = first if "embed" in event.operator or "wte" in event.operator else last
        places[event.storage] = gpu, event.num_bytes
        live[gpu] += event.num_bytes
        peaks[gpu] = max(peaks[gpu], live[gpu])
    return peaks


def drawn_bytes() -> Iterator[dict[str, Any]]:
    for name, layers in (("meta-llama/Llama-3.1-8B", 6), ("mistralai/Mistral-7B-v0.3", 8)):
        for method in ("lora", "full"):
            for checkpointed in (False, True):
                for gpus in (2, 3):
                    run = RunConfig(
                        model=name,
                        method=method,
                        precision="bf16-pure",
                        seq_len=1024,
                        batch_size=2,
                        gradient_checkpointing=checkpointed,
                    )
                    yield {"run": run.to_dict(), "gpus": gpus, "layers": layers}


def byte_errors() -> list[float]:
    return [
        abs(formula / library - 1)
        for line in records(BYTES)
        for formula, library in zip(predicted(line), line["traced"], strict=True)
    ]


def records(path: Path) -> Iterator[dict[str, Any]]:
    for text in path.read_text(encoding="utf-8").splitlines():
        yield json.loads(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", action="store_true", help="make the records anew")
    if parser.parse_args().draw:
        FOLDER.mkdir(exist_ok=True)
        with PLACEMENTS.open("w", encoding="utf-8") as file:
            for line in drawn_places():
                print(json.dumps(line | {"places": library_places(line)}), file=file)
        with BYTES.open("w", encoding="utf-8") as file:
            for line in drawn_bytes():
                print(json.dumps(line | {"traced": traced(line)}), file=file)
    number = sum(1 for _ in records(PLACEMENTS))
    print(f"{number} placements, {len(places_differ())} differ")
    print(sizes_by_strategy({"device-map": byte_errors()}))


if __name__ == "__main__":
    main()
