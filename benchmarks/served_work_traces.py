"""Trace forwards without gradients: what their kernels move, and what lives at once.

`python benchmarks/served_work_traces.py` prints errors of the time model's counts and of the
ledger in a prompt pass and in a decoding step, by model; `--write` writes
docs/accuracy/served_work.md. `--trace` counts the runs anew: the real code runs on fake tensors,
and every operator is one kernel, which reads its inputs and writes its results.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import trainer_traces
from markdown_tables import markdown_table, median_and_worst, write_page
from trace_records import Line, live_bytes, read
from work_traces import Counted, forwards

from whichlora.predict.resolve import ResolvedRun
from whichlora.spec.run import RunConfig
from whichlora.store.hub import load_model
from whichlora.store.jsonfiles import read_object
from whichlora.timing.running import RunningModel
from whichlora.timing.serving_work import served_layers
from whichlora.timing.work import Work
from whichlora.tracer.extrapolate import shallow

RECORDS = Path(__file__).parent / "traces" / "served_work.jsonl"
PAGE, TITLE = "served_work", "Work of a forward, against traces"
LAYERS, NEW_TOKENS = 4, 4  # as many layers, since some models attend in the fourth alone
ATTENTIONS = ("sdpa", "eager")
PROMPTS = (256, 512, 1024, 2048, 4096)
MODELS_DB = Path(__file__).parent.parent / "models_db"
# What a forward on fake tensors can't tell, or not of two layers.
SKIPPED = (
    "bart", "gemma3n", "t5", "mt5", "whisper",  # two stacks, or libraries that are not here
    "dbrx",  # experts whose rows depend on values: all of them run
    "llava", "llava_next",  # configs without a depth: Llama and Mistral
    "minimax_m2",  # refused with few layers
    "gpt_oss", "kimi_k2", "kimi_k25",  # stored in formats that a trace does not load
)  # fmt: skip
PASSES = {"prefill": "prompt pass", "decode": "decoding step"}
QUANTITIES = {"kernels": "kernels", "bytes": "bytes moved", "peak": "peak memory"}
# What is alive at once in each pass; logits are made when its layers are done.
MOMENTS = {"prefill": ("prefill", "first_logits"), "decode": ("decode", "last_logits")}
TEXT = """The real code of Transformers runs on fake tensors, in four layers of a model's real
width; every operator is a kernel that reads its inputs and writes its results. Kernels and bytes
are of layers alone, products and fused attention left out, but for the keys and values that
eager attention reads in a decoding step. The peak is what lives at once, weights, cache and logits
included."""


def models() -> list[str]:
    """One of each type of model in the database that generates, by its name on the hub."""
    named: dict[str, str] = {}
    for path in sorted(MODELS_DB.glob("*.json")):
        entry = read_object(path)
        kind = entry.get("config", {}).get("model_type")
        if kind and kind not in (*SKIPPED, *named):
            named[kind] = entry["hub_id"]
    return [name for name in named.values() if load_model(name).can_generate]


def draw(model: str, number: int) -> Line:
    rng = random.Random(f"served {model} {number}")
    most = load_model(model).max_position_embeddings or max(PROMPTS) + NEW_TOKENS
    run = RunConfig(
        model=model,
        phase="inference",
        batch_size=rng.choice((1, 2, 4)),
        prompt_len=rng.choice([length for length in PROMPTS if length + NEW_TOKENS <= most]),
        max_new_tokens=NEW_TOKENS,
        attn=ATTENTIONS[number],
        precision="bf16",
    )
    return {"layers": LAYERS, "run": run.to_dict()}


def lines() -> Iterator[Line]:
    for model in models():
        for number in range(len(ATTENTIONS)):
            yield draw(model, number)


def config_of(line: Line) -> dict[str, Any]:
    return shallow(load_model(line["run"]["model"]).config, line["layers"])


def job_of(line: Line) -> ResolvedRun:
    return trainer_traces.job_of(line, config_of(line))


def counted(job: ResolvedRun, config: dict[str, Any]) -> dict[int, Counted]:
    """What the layers do in each forward of a generation."""

    def notes(recorder: Any) -> bool:
        layer, _ = recorder._place()
        return layer is not None and bool(recorder._in_model)

    capability = job.gpu.compute_capability
    return forwards(job, config, notes=notes, is_thin=_reads_keys, compute_capability=capability)


def _reads_keys(name: str, args: Any) -> bool:
    """Whether it is a product of one query with keys or values, bound by what it reads."""
    return name in ("bmm", "baddbmm") and args[-2].shape[-2] == 1


def traced(line: Line) -> Line:
    """Kernels, bytes and peak of the prompt pass and of the last decoding step."""
    by_number = counted(job_of(line), config_of(line))
    counts = {
        name: {
            "kernels": sum(count for count, _ in by_number[number].operators.values()),
            "bytes": sum(moved for _, moved in by_number[number].operators.values()),
            "peak": by_number[number].peak_bytes,
        }
        for name, number in (("prefill", min(by_number)), ("decode", max(by_number)))
    }
    return {name: line[name] for name in ("layers", "run")} | {"traced": counts}


def layers_work(job: ResolvedRun, run: RunConfig, *, decoding: bool) -> Work:
    """Of all layers in one pass."""
    return Work.total(
        served_layers(
            group,
            RunningModel(model=job.model, run=run, dtypes=job.dtypes),
            batch_size=run.batch_size,
            context=run.prompt_len + NEW_TOKENS - 1 if decoding else run.prompt_len,
            decoding=decoding,
        )
        for group in job.model.groups
    )


def predicted(line: Line) -> dict[str, dict[str, float]]:
    """The same, as the time model counts them."""
    job = job_of(line)
    run, counts, alive = job.run, {}, live_bytes(job)
    for name in PASSES:
        decoding = name == "decode"
        work = layers_work(job, run, decoding=decoding)
        fused = sum(
            group.count * len(group.layer.attentions)
            for group in job.model.groups
            if run.attn != "eager" and all(one.sdpa != "eager" for one in group.layer.attentions)
        )
        moved = work.elementwise_bytes + work.attention_bytes
        if not decoding:
            moved += work.attention_bytes  # read and written
        elif fused:  # what attention reads of a cache that nothing is appended to
            static = replace(run, kv_cache="static")
            moved -= layers_work(job, static, decoding=True).attention_bytes
        counts[name] = {
            "kernels": work.launches - fused,
            "bytes": moved,
            "peak": max(alive[moment] for moment in MOMENTS[name]),
        }
    return counts


def errors(line: Line) -> dict[tuple[str, str], float]:
    ours = predicted(line)
    return {
        (name, quantity): ours[name][quantity] / line["traced"][name][quantity] - 1
        for name in PASSES
        for quantity in QUANTITIES
    }


def table() -> str:
    by_model: dict[str, list[dict[tuple[str, str], float]]] = defaultdict(list)
    for line in read(RECORDS):
        by_model[line["run"]["model"]].append(errors(line))
    rows = [_row("**all**", [run for runs in by_model.values() for run in runs])]
    rows += [
        _row(model.rpartition("/")[2], by_model[model])
        for model in sorted(by_model, key=lambda name: name.rpartition("/")[2].lower())
    ]
    titles = [f"{title}, {what}" for title in PASSES.values() for what in QUANTITIES.values()]
    header = [name for title in titles for name in (title, "worst")]
    return markdown_table(("model", "runs", *header), rows)


def _row(name: str, runs: list[dict[tuple[str, str], float]]) -> tuple[str, ...]:
    cells = [name, str(len(runs))]
    for key in runs[0]:
        sizes = [run[key] for run in runs]
        cells += median_and_worst(sizes)
    return tuple(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    if arguments.trace:
        with RECORDS.open("w", encoding="utf-8") as file, ProcessPoolExecutor(2) as pool:
            for line in pool.map(traced, lines()):
                print(json.dumps(line), file=file, flush=True)
    text = table()
    print(text)
    if arguments.write:
        write_page(PAGE, TITLE, f"{TEXT}\n\n{text}")


if __name__ == "__main__":
    main()
