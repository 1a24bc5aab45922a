"""Who wins: the plan's answer against a search by brute force over single predictions."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Sequence
from typing import Any

import whichlora
from plan_cases.folder import Folder
from plan_cases.registry import case, expect
from whichlora.config import DEFAULT_MODELS
from whichlora.spec.results import Prediction

ROWS, TOKENS = 960, 256  # divisible by every batch size; each text is longer than TOKENS
BATCH_SIZES = (1, 2, 4, 8, 16)
CONFIDENCE = 0.95
Z = {0.95: 1.959964, 0.9: 1.644854}
SMALL_STAGE_1 = {"batch_size": 1, "prefill_length": 16, "tokens_to_generate": 8}


def data(folder: Folder, tokens: int = TOKENS) -> dict[str, Any]:
    """Rows that are all cut to the same length whatever the tokenizer, so that steps count."""
    folder.write_rows("data.jsonl", [{"text": "word " * 4 * tokens}] * ROWS)
    return {"path": "data.jsonl", "validation_fraction": 0}


def write_dry_plan(folder: Folder, *, tokens: int = TOKENS, **keys: Any) -> None:
    """A plan without measurements over rows of `tokens` each, whose stage 1 asks for little."""
    folder.write_plan(
        sequence_length=tokens,
        profile="none",
        padding="none",
        dataset=data(folder, tokens),
        stage1_profile=SMALL_STAGE_1,
        **keys,
    )


def chance_below(value: float, low: float, high: float, bound: float, confidence: float) -> float:
    """Probability that a log-normal quantity with this interval is at most `bound`."""
    deviation = math.log(high / low) / (2 * Z[confidence])
    return 0.5 * math.erfc(math.log(value / bound) / deviation / math.sqrt(2))


def memory_chance(prediction: Prediction, bound: float) -> float:
    memory = prediction.memory
    return chance_below(memory.device_used_bytes, *memory.interval_bytes, bound, memory.confidence)


def total_s(prediction: Prediction, epochs: int = 1) -> float:
    """Seconds of `ROWS` rows at the prediction's batch size."""
    assert prediction.time.step_s is not None
    return epochs * ROWS / prediction.run.batch_size * prediction.time.step_s


def fitting(
    models: Sequence[str],
    gpu: str,
    methods: Sequence[str],
    *,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    limit_bytes: float = math.inf,
    limit_s: float = math.inf,
    confidence: float = CONFIDENCE,
    **settings: Any,
) -> list[Prediction]:
    """Every run that meets the limits with `confidence`, one prediction at a time."""
    settings = {"seq_len": TOKENS, "padding": "none"} | settings
    meeting = []
    for model, method, batch_size in itertools.product(models, methods, batch_sizes):
        (run,) = whichlora.estimate(model, gpu, method=method, batch_size=batch_size, **settings)
        chance = memory_chance(run, min(run.usable_bytes, limit_bytes))
        if limit_s < math.inf:
            seconds, step_s = total_s(run), run.time.step_s
            low, high = (seconds * bound / step_s for bound in run.time.interval_s)
            chance *= chance_below(seconds, low, high, limit_s, run.time.confidence)
        if chance >= confidence:
            meeting.append(run)
    return meeting


def largest(runs: Sequence[Prediction]) -> Prediction | None:
    """The largest model, its fastest run."""
    return min(runs, key=lambda run: (-run.num_params, total_s(run)), default=None)


def check_winner(folder: Folder, right: Prediction | None, plan: str = "plan") -> str:
    """The winner of the plan is `right`, and the exit code says whether there is one."""
    result = folder.whichlora("run", f"{plan}.yaml")
    expect(not result.has_traceback and result.code in (0, 1), result.last_line)
    winner = folder.answer(plan)["winner"]
    if winner is None:
        expect(right is None and result.code == 1, f"nothing; {named(right)} is right")
        return "nothing fits"
    answered = f"{winner['model']} {winner['method']} batch {winner['batch_size']}"
    expect(right is not None, f"{answered}; nothing is right")
    assert right is not None
    is_right = (winner["model"], winner["method"], winner["batch_size"]) == (
        right.run.model,
        right.run.method,
        right.run.batch_size,
    )
    expect(is_right and result.code == 0, f"{answered}; {named(right)} is right")
    return answered


def named(run: Prediction | None) -> str:
    if run is None:
        return "nothing"
    return f"{run.run.model} {run.run.method} batch {run.run.batch_size}"


@case("What is the largest model I can QLoRA on my RTX 4090 at 1024 tokens?")
def qlora_on_a_4090(folder: Folder) -> str:
    write_dry_plan(
        folder,
        gpu="4090",
        methods="qlora",
        tokens=1024,
    )
    runs = fitting(DEFAULT_MODELS, "rtx-4090-24gb", ["qlora"], seq_len=1024)
    return check_winner(folder, largest(runs))


@case("The same, but the adapter is merged into 16 bits before it is served on that card.")
def qlora_served_merged(folder: Folder) -> str:
    write_dry_plan(
        folder,
        gpu="4090",
        methods="qlora",
        serve="merged",
        tokens=1024,
    )
    served = [
        run.run.model
        for run in whichlora.estimate(
            list(DEFAULT_MODELS),
            "rtx-4090-24gb",
            phase="inference",
            batch_size=1,
            prompt_len=16,
            max_new_tokens=8,
        )
        if memory_chance(run, run.usable_bytes) >= CONFIDENCE
    ]
    runs = fitting(served, "rtx-4090-24gb", ["qlora"], seq_len=1024)
    return check_winner(folder, largest(runs))


@case("Full fine-tuning on one A100 80 GB, AdamW: which model?")
def full_on_an_a100(folder: Folder) -> str:
    write_dry_plan(
        folder,
        gpu="a100-sxm-80gb",
        methods="full",
    )
    return check_winner(folder, largest(fitting(DEFAULT_MODELS, "a100-sxm-80gb", ["full"])))


@case("LoRA, QLoRA or DoRA on an L4 within 12 GiB?")
def variants_within_a_memory_limit(folder: Folder) -> str:
    methods = ["lora", "qlora", "dora"]
    write_dry_plan(
        folder,
        gpu="l4-24gb",
        methods=methods,
        stage2_profile={"peak_memory": "12GiB"},
    )
    runs = fitting(DEFAULT_MODELS, "l4-24gb", methods, limit_bytes=12 * 2**30)
    return check_winner(folder, largest(runs))


@case("The largest model that one epoch of my data trains in 10 minutes on an H100.")
def within_a_deadline(folder: Folder) -> str:
    methods = ["lora", "qlora"]
    write_dry_plan(
        folder,
        gpu="h100-sxm-80gb",
        methods=methods,
        stage2_profile={"total_time": "10min"},
    )
    runs = fitting(DEFAULT_MODELS, "h100-sxm-80gb", methods, limit_s=600)
    return check_winner(folder, largest(runs))


@case("I don't care for size: what trains fastest on a T4 in fp16?")
def fastest_on_a_t4(folder: Folder) -> str:
    models = ["meta-llama/Llama-3.2-1B", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B"]
    write_dry_plan(
        folder,
        gpu="t4-16gb",
        models=models,
        methods=["lora", "qlora"],
        precision="fp16",
        prefer="time",
    )
    runs = fitting(models, "t4-16gb", ["lora", "qlora"], precision="fp16")
    return check_winner(folder, min(runs, key=total_s))


@case("Same three models: which takes the least memory?")
def least_memory(folder: Folder) -> str:
    models = ["meta-llama/Llama-3.2-1B", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B"]
    write_dry_plan(
        folder,
        gpu="rtx-3060-12gb",
        models=models,
        methods=["lora", "qlora"],
        prefer="memory",
    )
    runs = fitting(models, "rtx-3060-12gb", ["lora", "qlora"])
    return check_winner(folder, min(runs, key=lambda run: run.memory.device_used_bytes))


@case("My order of models is Qwen 8B, Llama 8B, Mistral 7B; take the first that fits 16 GB.")
def my_own_order(folder: Folder) -> str:
    models = ["Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B", "mistralai/Mistral-7B-v0.3"]
    write_dry_plan(
        folder,
        gpu="rtx-4080-16gb",
        models=models,
        methods=["lora"],
        prefer="order",
    )
    runs = fitting(models, "rtx-4080-16gb", ["lora"])
    order = {name: place for place, name in enumerate(models)}
    return check_winner(
        folder,
        min(runs, key=lambda run: (order[run.run.model], total_s(run)), default=None),
    )


@case("LoRA of Mistral 24B on a 4090: does it fit?")
def nothing_fits(folder: Folder) -> str:
    write_dry_plan(
        folder,
        gpu="4090",
        models="mistralai/Mistral-Small-24B-Base-2501",
        methods="lora",
    )
    return check_winner(folder, None)


@case("QLoRA of the Qwen 30B-A3B mixture on 24 GB with stock bitsandbytes (experts stay 16 bit)?")
def mixture_on_24_gb(folder: Folder) -> str:
    write_dry_plan(
        folder,
        gpu="4090",
        models="Qwen/Qwen3-30B-A3B",
        methods="qlora",
    )
    return check_winner(folder, None)


@case("Is the winner of a dry run a coin flip?")
def no_coin_flips(folder: Folder) -> str:
    keys: dict[str, Any] = {
        "gpu": "4090",
        "methods": ["lora", "qlora"],
        "profile": "none",
        "dataset": data(folder),
        "stage1_profile": SMALL_STAGE_1,
    }
    told = []
    for seq_len in (512, 1024, 2048, 4096):
        folder.write_plan(sequence_length=seq_len, **keys)
        result = folder.whichlora("run", "plan.yaml")
        answer = folder.answer()
        winner = answer["winner"]
        expect(result.code == 0 and winner is not None, result.last_line)
        told.append(f"{winner['chance']:.0%}")
        expect(winner["chance"] >= CONFIDENCE, f"{winner['name']}: {told[-1]}")
        bolder = [candidate["chance"] for candidate in answer["may_fit"]]
        expect(all(0.05 <= chance < CONFIDENCE for chance in bolder), f"may fit: {bolder}")
    return f"winners meet every limit with {', '.join(told)}"


@case("A plan that nothing meets: is the relaxation it offers enough?")
def relaxation_is_enough(folder: Folder) -> str:
    keys: dict[str, Any] = {
        "gpu": "4090",
        "models": ["Qwen/Qwen3-8B", "Qwen/Qwen3-4B"],
        "methods": ["lora", "qlora"],
        "profile": "none",
        "sequence_length": TOKENS,
        "padding": "none",
        "dataset": data(folder),
        "stage1_profile": SMALL_STAGE_1,
    }
    folder.write_plan(stage2_profile={"peak_memory": "3GiB"}, **keys)
    result = folder.whichlora("run", "plan.yaml")
    expect(result.code == 1, f"exit code {result.code}")
    offered = re.search(r"peak memory limit of at least (\S+ GiB)", result.stdout)
    expect(offered is not None, "no limit is offered")
    assert offered is not None
    folder.write_plan(stage2_profile={"peak_memory": offered[1]}, **keys)
    result = folder.whichlora("run", "plan.yaml")
    winner = folder.answer()["winner"]
    expect(result.code == 0 and winner is not None, f"{offered[1]} is not enough")
    return f"with {offered[1]}: {winner['name']}"


@case("What is the largest batch for QLoRA of an 8B at 2048 tokens on a 4090?")
def largest_batch(folder: Folder) -> str:
    command = "estimate meta-llama/Llama-3.1-8B --gpu 4090 --method qlora --seq-len 2048"
    result = folder.whichlora(*command.split(), "--batch-size", "max", "--json")
    expect(result.code == 0, result.last_line)
    (row,) = json.loads(result.stdout)["predictions"]
    batch_size = row["config"]["batch_size"]
    verdicts = [
        whichlora.estimate(
            "meta-llama/Llama-3.1-8B", "4090", method="qlora", seq_len=2048, batch_size=size
        )[0].verdict
        for size in (batch_size, batch_size + 1)
    ]
    expect(verdicts[0] == "fits" and verdicts[1] != "fits", f"batch {batch_size}: {verdicts}")
    return f"batch size {batch_size}"
