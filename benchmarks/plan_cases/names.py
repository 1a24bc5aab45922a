"""Names as people type them, grids in which one combination is refused, several GPUs."""

from __future__ import annotations

import json
from typing import Any

import whichlora
from plan_cases.folder import Folder, Result
from plan_cases.registry import case, expect
from plan_cases.winners import SMALL_STAGE_1, TOKENS, data, fitting, total_s

TYPED_MODELS = {
    "llama 3.1 8b": "meta-llama/Llama-3.1-8B",
    "llama3.1:8b": "meta-llama/Llama-3.1-8B",
    "Llama-3.1-8B": "meta-llama/Llama-3.1-8B",
    "gemma-3-27b": "google/gemma-3-27b-pt",
    "mistral 7b": "mistralai/Mistral-7B-v0.3",
    "qwen3 14b": "Qwen/Qwen3-14B",
    "qwen3:0.6b": "Qwen/Qwen3-0.6B",
    "phi-4": "microsoft/phi-4",
}
TYPED_GPUS = {
    "4090": "rtx-4090-24gb",
    "RTX 4090": "rtx-4090-24gb",
    "NVIDIA GeForce RTX 4090": "rtx-4090-24gb",
    "H100 80GB": "h100-sxm-80gb",
    "T4": "t4-16gb",
    "A100": "a100-sxm-40gb",  # the board with the least memory of that name
    "mi300x": "mi300x-192gb",
}


def predictions(result: Result) -> list[dict[str, Any]]:
    expect(result.code == 0, result.last_line)
    rows: list[dict[str, Any]] = json.loads(result.stdout)["predictions"]
    return rows


@case("Models as people type them: llama 3.1 8b, llama3.1:8b, gemma-3-27b, mistral 7b, …")
def models_as_typed(folder: Folder) -> str:
    wrong = []
    for typed, meant in TYPED_MODELS.items():
        result = folder.whichlora("estimate", typed, "--gpu", "h100-sxm-80gb", "--json")
        if result.code != 0:
            wrong.append(f"{typed}: {result.last_line}")
            continue
        (row,) = predictions(result)
        taken, said = row["model"], f"{typed}: taken as {meant}" in row["notes"]
        if taken != meant or not said:
            wrong.append(f"{typed}: {taken}{'' if said else ', without a word'}")
    expect(not wrong, "; ".join(wrong))
    return f"{len(TYPED_MODELS)} of {len(TYPED_MODELS)}, each said"


@case("GPUs as people type them: 4090, RTX 4090, H100 80GB, T4, mi300x")
def gpus_as_typed(folder: Folder) -> str:
    wrong = []
    for typed, meant in TYPED_GPUS.items():
        result = folder.whichlora("estimate", "Qwen/Qwen3-8B", "--gpu", typed, "--json")
        taken = predictions(result)[0]["config"]["gpu"] if result.code == 0 else result.last_line
        if taken != meant:
            wrong.append(f"{typed}: {taken}")
    expect(not wrong, "; ".join(wrong))
    return f"{len(TYPED_GPUS)} of {len(TYPED_GPUS)}"


@case("A plan with `gpu: 4090`, not quoted, and `models: [llama 3.1 8b, qwen3 8b]`")
def plan_with_typed_names(folder: Folder) -> str:
    folder.write_plan(
        gpu=4090,
        models=["llama 3.1 8b", "qwen3 8b"],
        methods="qlora",
        profile="none",
        sequence_length=TOKENS,
        dataset=data(folder),
        stage1_profile=SMALL_STAGE_1,
    )
    result = folder.whichlora("run", "plan.yaml")
    expect(result.code == 0, result.last_line)
    winner = folder.answer()["winner"]
    expect(winner["model"] == "Qwen/Qwen3-8B", winner["model"])  # 8.19B against 8.03B
    return f"{winner['model']} on {winner['gpu']}"


@case("Any card of 24 GB: does QLoRA of an 8B fit, and of a 70B?")
def any_card_of_24_gb(folder: Folder) -> str:
    told = []
    for model, fits in (("meta-llama/Llama-3.1-8B", True), ("meta-llama/Llama-3.1-70B", False)):
        command = f"estimate {model} --gpu 24GB --method qlora --seq-len 1024 --json".split()
        result = folder.whichlora(*command)
        (row,) = predictions(result)
        expect(row["fits"] is fits, f"{model}: fits {row['fits']}")
        told.append(f"{model} {'fits' if fits else 'does not fit'}")
    return ", ".join(told)


@case("Which of three cards trains cheapest, which fastest?")
def cheapest_and_fastest(folder: Folder) -> str:
    prices = {"a100-sxm-80gb": 1.8, "l4-24gb": 0.7, "rtx-4090-24gb": 0.4}
    folder.write_plan(
        gpu=list(prices),
        gpu_prices=prices,
        models="Qwen/Qwen3-4B",
        methods=["lora", "qlora"],
        profile="none",
        padding="none",
        sequence_length=TOKENS,
        dataset=data(folder),
        stage1_profile=SMALL_STAGE_1,
    )
    result = folder.whichlora("run", "plan.yaml")
    expect(result.code == 0, result.last_line)
    best_s = {
        gpu: min(total_s(run) for run in fitting(["Qwen/Qwen3-4B"], gpu, ["lora", "qlora"]))
        for gpu in prices
    }
    fastest = min(best_s, key=lambda gpu: best_s[gpu])
    cheapest = min(best_s, key=lambda gpu: best_s[gpu] * prices[gpu])
    answer = folder.answer()
    said = tuple(
        next(row["gpu"] for row in answer["gpus"] if row[mark]) for mark in ("cheapest", "fastest")
    )
    expect(said == (cheapest, fastest), f"{said}; right are {(cheapest, fastest)}")
    return f"cheapest {cheapest}, fastest {fastest}"


@case("ALBERT among other models: one refused default must not refuse the grid")
def one_refused_of_a_grid(folder: Folder) -> str:
    models = ["albert/albert-base-v2", "google-bert/bert-base-uncased", "Qwen/Qwen3-0.6B"]
    result = folder.whichlora("estimate", ",".join(models), "--gpu", "4090", "--json")
    rows = predictions(result)
    expect({row["model"] for row in rows} == set(models), f"{[row['model'] for row in rows]}")
    combined = folder.whichlora(
        "estimate", ",".join(models), "--gpu", "4090", "--attn", "flash_attention_2", "--json"
    )
    answered = json.loads(combined.stdout)
    refused = {row["model"] for row in answered["refused"]}
    expect(combined.code == 0 and "Qwen/Qwen3-0.6B" not in refused, combined.last_line)
    return f"all three answered; with flash attention refused: {', '.join(sorted(refused)) or '-'}"


@case("A typo in a model and in a GPU")
def typos(folder: Folder) -> str:
    told = []
    for arguments, meant in (
        (("estimate", "meta-llama/Lama-3.1-8B", "--gpu", "4090"), "meta-llama/Llama-3.1-8B"),
        (("estimate", "Qwen/Qwen3-8B", "--gpu", "rtx-4900-24gb"), "rtx-4090-24gb"),
    ):
        result = folder.whichlora(*arguments)
        lines = result.stderr.strip().splitlines()
        expect(result.code == 2 and len(lines) == 1, f"{result.code}: {result.stderr}")
        expect(meant in lines[0], lines[0])
        told.append(meant)
    return f"meant: {', '.join(told)}"


@case("No GPU here and none named: what does a plan of a 12B do?")
def no_gpu_named(folder: Folder) -> str:
    folder.write_plan(models="google/gemma-3-12b-pt", dataset=data(folder))
    result = folder.whichlora("run", "plan.yaml", CUDA_VISIBLE_DEVICES="")
    lines = result.stderr.strip().splitlines()
    expect(result.code == 2 and "gpu" in lines[-1], f"{result.code}: {result.stderr[-300:]}")
    return lines[-1]


@case("The same model by estimate and by Python")
def same_in_python(folder: Folder) -> str:
    command = "estimate meta-llama/Llama-3.1-8B --gpu 4090 --method qlora --seq-len 1024 --json"
    (row,) = predictions(folder.whichlora(*command.split()))
    (run,) = whichlora.estimate("meta-llama/Llama-3.1-8B", "4090", method="qlora", seq_len=1024)
    told = (row["memory"]["device_used_bytes"], run.memory.device_used_bytes)
    expect(told[0] == told[1], f"{told}")
    return f"{told[0]} bytes both"
