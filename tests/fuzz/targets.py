"""Everything that reads what a stranger wrote, each with cases made from honest ones."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import os
import random
import re
import shutil
from contextlib import chdir
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args, get_type_hints
from unittest import mock

import click
from answers import answer_values
from click.testing import CliRunner
from harness import Target
from mutation import NUMBERS, TEXTS, mutated, odd_value

from whichlora import estimate
from whichlora.calibration import database as databases
from whichlora.calibration.formula_version import formulas_digest
from whichlora.calibration.share.table import format_table
from whichlora.cli import main
from whichlora.config import load_plan
from whichlora.dataset import BYTE_LEVEL, count_tokens, open_dataset, write_jsonl
from whichlora.errors import ConfigError, WhichLoraError
from whichlora.exports import FORMATS
from whichlora.html.page import page
from whichlora.html.source import read_source
from whichlora.predict.coefficients import prior_calibration
from whichlora.spec.plan import DatasetConfig
from whichlora.spec.results import Measurement
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model
from whichlora.store.measurements import read_measurements
from whichlora.store.models import list_models
from whichlora.store.paths import data_folder
from whichlora.terminal import Progress
from whichlora.workflow import estimates, export
from whichlora.workflow.engine_log import record_log
from whichlora.workflow.run import run_plan

HAS_MCP = find_spec("mcp") is not None
MODEL, GPU = "HuggingFaceTB/SmolLM2-135M", "l4-24gb"
SMALL_MODELS = (
    MODEL,
    "Qwen/Qwen2.5-0.5B",
    "EleutherAI/pythia-160m",
    "google-bert/bert-base-uncased",
)


def write_json(path: Path, value: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def emptied(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


# --- the command line

# What measures, reaches the network or starts processes of its own; and the fit of all shipped
# records, which takes seconds: the target `records` fits a few.
NOT_ASKED = ("fit", "run", "slurm", "profile-task", "pull", "push", "completion")
WORDS = (
    MODEL, "qwen2.5-7b", "llama", "meta-llama/Llama-3.1-8B,Qwen/Qwen2.5-0.5B", "t5-small", "albert",
    GPU, "h100-sxm-80gb", "a100", "4090", "24GB", "cpu", "all", "h100-sxm-80gb,l4-24gb", "lora",
    "full,qlora", "dora", "inference", "finetune,inference", "fp16", "bf16-pure", "nf4", "int8",
    "eager", "flash_attention_2", "adamw_8bit", "1,2,4", "max", "512", "0.1", "q_proj", "liger",
    "transformers=4.44.2", "torch=x", "out.csv", "out.html", "out.json", ".", "missing/x",
    "quantized", "static", "hqq", "embed_tokens", "attention", "png", "--", "-", "--json", "-h",
)  # fmt: skip


def commands(group: click.Group = main, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    found: dict[tuple[str, ...], Any] = {}
    for name, command in group.commands.items():
        if name in NOT_ASKED:
            continue
        if isinstance(command, click.Group):
            found |= commands(command, (*path, name))
        else:
            found[(*path, name)] = command
    return found


COMMANDS = commands()


def _good_values() -> dict[str, list[str]]:
    """Values that an option takes, by flag."""
    values = {
        "--gpu": [GPU, "h100-sxm-80gb,l4-24gb", "4090"],
        "--gpus": [GPU, "h100-sxm-80gb", "4"],
        "--models": list(SMALL_MODELS),
        "--method": ["lora", "full,qlora", "dora", "qdora"],
        "--target-modules": ["q_proj,v_proj", "attention", "all-linear"],
        "--libraries": ["transformers=4.44.2", "torch=2.1.1,peft=0.13.0"],
        "--lora-dropout": ["0.1", "0,0.5"],
        "--batch-size": ["1", "1,2", "max"],
    }
    for name, hint in get_type_hints(RunConfig).items():
        flag = f"--{name.replace('_', '-')}"
        accepted = [one for part in (hint, *get_args(hint)) for one in get_args(part)]
        texts = [one for one in (*get_args(hint), *accepted) if isinstance(one, str)]
        if flag not in values:
            values[flag] = texts or ["1", "8", "64", "512", "8,16"]
    return values


GOOD = _good_values()


def make_command_line(rng: random.Random) -> list[str]:
    paths = list(COMMANDS)
    weights = [len(COMMANDS[path].params) for path in paths]  # more options, more to get wrong
    (path,) = rng.choices(paths, weights)
    words = list(path)
    for parameter in COMMANDS[path].params:
        if isinstance(parameter, click.Argument):
            words += [_word(rng, parameter) for _ in range(rng.choice((1,) * 18 + (0, 2)))]
        elif (
            rng.random() < (0.95 if parameter.required else 0.12)
            and "--measure" not in parameter.opts
        ):
            words.append(rng.choice([*parameter.opts, *parameter.secondary_opts]))
            if not parameter.is_flag and rng.random() < 0.95:
                words.append(_word(rng, parameter))
    if "--gpu" not in words and rng.random() < 0.9 and path[0] in ("estimate", "explain", "export"):
        words += ["--gpu", GPU]
    return words


def _word(rng: random.Random, parameter: click.Parameter) -> str:
    way = rng.random()
    good = GOOD.get(parameter.opts[0])
    if good and rng.random() < 0.85:
        return rng.choice(good)
    if way < 0.35 and isinstance(parameter.type, click.Choice):
        return str(rng.choice(list(parameter.type.choices)))
    if way < 0.35 and isinstance(parameter, click.Argument):
        return rng.choice(SMALL_MODELS)
    if way < 0.75:
        return rng.choice(WORDS)
    if way < 0.9:
        return str(rng.choice(NUMBERS))
    word = rng.choice(TEXTS)
    return word.replace("\x00", "x").replace("\ud800", "\udcff")  # as a process is given them


def run_command_line(words: list[str], folder: Path) -> None:
    # a trace starts a process, a report predicts every shipped record, a server waits for words:
    # `assistant` asks it
    if "trace" in words or words[:2] == ["calibrate", "report"] or words[0] == "mcp":
        return
    # Node.js runs a page for half a minute
    with chdir(emptied(folder)), mock.patch("whichlora.page.build.node", return_value=None):
        result = CliRunner().invoke(main, words, prog_name="whichlora")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code in (0, 1, 2), f"exit code {result.exit_code}"
    assert "Traceback" not in result.output
    assert result.exit_code != 2 or result.stderr.strip(), "refused without a word"


# --- the tools of assistants

ASKED = {
    "estimate": {"model": MODEL, "gpu": GPU, "method": "qlora", "batch_size": 2, "seq_len": 128},
    "explain": {"model": MODEL, "gpu": GPU, "quant": "nf4", "gradient_checkpointing": True},
    "where": {"model": MODEL, "gpus_to_compare": ["l4", "t4"], "optimizer": "adamw_8bit"},
    "recommend": {"gpu": GPU, "models": [MODEL], "samples": 100, "budget": "5usd", "within": "2h"},
    "models": {"pattern": "smol"},
    "gpus": {},
}


def make_question(rng: random.Random) -> dict[str, Any]:
    tool, arguments = rng.choice(list(ASKED.items()))
    changed = dict(arguments)
    for name in rng.sample(list(changed), min(len(changed), rng.randrange(3))):
        changed[name] = rng.choice((odd_value(rng), rng.choice(WORDS)))
    if rng.random() < 0.2:
        changed[rng.choice(WORDS)] = odd_value(rng)
    return {"tool": tool, "arguments": changed}


def run_question(case: dict[str, Any], folder: Path) -> None:
    from mcp.server.mcpserver.exceptions import ToolError, UnexpectedToolError

    from whichlora.mcp_server import server

    try:
        with chdir(emptied(folder)):
            asyncio.run(server().call_tool(case["tool"], case["arguments"]))
    except UnexpectedToolError:
        raise
    except ToolError as error:
        raise ConfigError(str(error)) from None


# --- a model's config.json


@cache
def model_names() -> list[str]:
    return [one.hub_id for one in list_models()]


RUNS: tuple[dict[str, Any], ...] = (
    {"method": "lora", "seq_len": 512},
    {"method": "qlora", "seq_len": 300, "batch_size": 2, "gradient_checkpointing": False},
    {"method": "full", "seq_len": 128, "attn": "eager"},
    {"method": "dora", "loss_head": "liger", "precision": "fp16"},
    {"phase": "inference", "kv_cache": "static"},
    {"phase": "inference", "quant": "nf4", "kv_cache": "quantized"},
)


def make_model(rng: random.Random) -> dict[str, Any]:
    config = dict(load_model(rng.choice(model_names())).config)
    return {"config": mutated(rng, config), "run": rng.choice(RUNS)}


def run_model(case: dict[str, Any], folder: Path) -> None:
    write_json(emptied(folder) / "config.json", case["config"])
    run = RunConfig(model=str(folder), **case["run"])
    for prediction in estimates.estimate([run], [GPU]):
        check_prediction(prediction)


def check_prediction(prediction: Any) -> None:
    """What no prediction may be, whatever it was asked."""
    memory = prediction.memory
    assert all(size >= 0 for size in memory.breakdown.values()), f"negative {memory.breakdown}"
    assert sum(memory.breakdown.values()) == memory.device_used_bytes
    json.dumps(prediction.to_dict(), allow_nan=False)


# --- a plan


PLAN: dict[str, Any] = {
    "models": [MODEL, "EleutherAI/pythia-160m"],
    "gpu": GPU,
    "dataset": {"samples": 100, "tokens": 10_000},
    "sequence_length": 256,
    "epochs": 2,
    "stage1_profile": {"batch_size": [1, 2], "time_per_token": "1s", "peak_memory": "20GiB"},
    "stage2_profile": {"batch_size": [1, 4], "total_time": "4h", "peak_memory_gb": 20},
    "methods": ["lora", "qlora"],
    "ranks": [8],
    "optimizer": "adamw_torch",
    "gpu_limits": {GPU: {"total_time": "1h"}},
    "gpu_prices": {GPU: 0.5},
    "prefer": "size",
    "confidence": 0.9,
    "profile": "none",
    "learning_rate": 1e-4,
    "seed": 1,
    "slurm": {"account": "lab", "environment": {"A": "b"}, "gpus": {"gpu": GPU}, "memory": "8GiB"},
}


SERVED_PLAN = PLAN | {
    "serving": "vllm",
    "serving_options": {"gpu_memory_utilization": 0.9, "max_num_seqs": 64, "enforce_eager": True},
    "serving_version": "0.27.1",
    "serve": "as-trained",
    "stage1_profile": {
        "concurrency": 8,
        "context": 2048,
        "prefill_length": [512, 1024],
        "shared_prompt_fraction": 0.5,
        "peak_memory": "23GiB",
    },
}


def make_plan(rng: random.Random) -> str:
    plan = rng.choice((PLAN, PLAN, SERVED_PLAN))
    text = json.dumps(mutated(rng, plan), indent=1)  # is YAML, too
    for _ in range(rng.choice((0, 0, 0, 1, 3))):
        place = rng.randrange(len(text))
        text = text[:place] + rng.choice((*TEXTS, "\n", ":", "&a", "*a", "!!x", "- ", "#", "\t"))
        text += rng.choice(("", text[place:]))
    return text


def run_text(text: str, folder: Path) -> None:
    path = emptied(folder) / "plan.yaml"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    with chdir(folder):
        plan = load_plan(path)
        measures = plan.profile != "none" or plan.train
        if measures or plan.calibration_dir is not None or not _is_within(folder, plan.output_dir):
            return  # measures on this machine, or writes where no test may
        run_plan(path, progress=Progress(quiet=True))


def _is_within(folder: Path, place: Path) -> bool:
    return place.resolve().is_relative_to(folder.resolve())


# --- answer.json


def make_answer(rng: random.Random) -> Any:
    return mutated(rng, answer_values())


def run_answer(case: Any, folder: Path) -> None:
    text = page(read_source(write_json(folder / "answer.json", case)))
    assert "</html>" in text


# --- the log of a serving engine


LOG_LINES = (
    f"INFO core.py:77] Initializing a V1 LLM engine (v0.11.0) with config: model='{MODEL}', "
    "dtype=torch.bfloat16, max_seq_len=2048, tensor_parallel_size=1, quantization=None",
    "INFO args: {'gpu_memory_utilization': 0.8, 'kv_cache_dtype': 'fp8', 'max_num_seqs': 16}",
    "model weights take 0.25GiB; non_torch_memory takes 0.10GiB; PyTorch activation peak memory "
    "takes 0.26GiB; the rest of the memory reserved for KV Cache is 14.98GiB.",
    "total_gpu_memory (21.95GiB) x gpu_memory_utilization (0.80) = 17.56GiB",
    "GPU KV cache size: 366,480 tokens",
    "Maximum concurrency for 2,048 tokens per request: 178.95x",
    f"server_args=ServerArgs(model_path='{MODEL}', mem_fraction_static=0.8, tp_size=1)",
    "KV Cache is allocated. #tokens: 444500, K size: 7.13 GB, V size: 7.13 GB",
    "max_total_num_tokens=444500, chunked_prefill_size=8192, context_len=2048",
    'vllm:time_to_first_token_seconds_bucket{le="0.1"} 10.0',
    'vllm:time_to_first_token_seconds_bucket{le="+Inf"} 12.0',
    "vllm:request_prompt_tokens_sum 5120.0",
    "vllm:request_prompt_tokens_count 10",
    'vllm:cache_config_info{block_size="16",num_gpu_blocks="12345"} 1.0',
)
_PART = re.compile(r"[\w.]+|\W")


def make_log(rng: random.Random) -> list[str]:
    lines = rng.sample(LOG_LINES, rng.randrange(1, len(LOG_LINES)))
    for _ in range(rng.randrange(4)):
        number = rng.randrange(len(lines))
        parts = _PART.findall(lines[number])
        value = odd_value(rng)
        parts[rng.randrange(len(parts))] = value if isinstance(value, str) else json.dumps(value)
        lines[number] = "".join(parts)
    return lines


def run_log(lines: list[str], folder: Path) -> None:
    path = emptied(folder) / "engine.log"
    path.write_text("\n".join(lines), encoding="utf-8", errors="surrogatepass")
    found = record_log(path, GPU, calibration_dir=folder / "own")
    assert list(read_measurements([folder / "own"], GPU)) == [found.record]
    json.dumps(found.record.to_dict(), allow_nan=False)


# --- records, tables, coefficients, gpu.json


@cache
def records() -> list[dict[str, Any]]:
    shipped = read_measurements([data_folder("calibration")], "a100-sxm-80gb")
    return [one.to_dict() | {"gpu": GPU} for one in shipped[::40]]


def make_records(rng: random.Random) -> list[Any]:
    chosen = rng.sample(records(), 4)
    number = rng.randrange(4)
    chosen[number] = mutated(rng, chosen[number])
    return chosen


def run_records(case: list[Any], folder: Path) -> None:
    emptied(folder)
    other, own = folder / "other", folder / "own"
    path = other / GPU / "measurements" / "run.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("".join(f"{json.dumps(one)}\n" for one in case), encoding="utf-8")
    try:
        databases.merge_records(other, calibration_dir=own)
    except WhichLoraError:
        assert not own.exists(), "half of a refused database was merged"
        own = other  # as if it had been copied by hand
    gpu = find_gpu(GPU)
    databases.calibrate(gpu, own)
    databases.calibration_report(gpu, own)
    for run in RUNS[::3]:
        for prediction in estimates.estimate(
            [RunConfig(model=MODEL, **run)], [GPU], calibration_dir=own
        ):
            check_prediction(prediction)


def make_table(rng: random.Random) -> list[list[str]]:
    chosen = [
        Measurement(
            **{key: _tuples(value) for key, value in one.items() if key != "schema_version"}
        )
        for one in rng.sample(records(), 2)
    ]
    rows = list(csv.reader(io.StringIO(format_table(chosen))))
    for _ in range(rng.randrange(1, 4)):
        row = rng.choice(rows)
        value = odd_value(rng)
        row[rng.randrange(len(row))] = value if isinstance(value, str) else json.dumps(value)
    return rows


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def run_table(case: list[list[str]], folder: Path) -> None:
    text = io.StringIO()
    csv.writer(text).writerows(case)
    path = emptied(folder) / "table.csv"
    path.write_text(text.getvalue(), encoding="utf-8", errors="surrogatepass")
    databases.import_table(path, skip_bad=True, calibration_dir=folder / "own")


@cache
def coefficients() -> dict[str, Any]:
    values = prior_calibration(find_gpu(GPU)).to_dict() | {"formulas": formulas_digest()}
    return json.loads(json.dumps(values | {"schema_version": 1}))


def make_coefficients(rng: random.Random) -> Any:
    return mutated(rng, coefficients())


def run_coefficients(case: Any, folder: Path) -> None:
    write_json(emptied(folder) / GPU / "coefficients.json", case)
    for run in (RUNS[0], RUNS[4]):
        job = RunConfig(model=MODEL, **run)
        for prediction in estimates.estimate([job], [GPU], calibration_dir=folder):
            check_prediction(prediction)
    databases.calibration_report(find_gpu(GPU), folder)


def make_gpu(rng: random.Random) -> Any:
    path = data_folder("calibration") / rng.choice((GPU, "h100-sxm-80gb", "t4-16gb")) / "gpu.json"
    values = json.loads(path.read_text()) | {"key": "mine", "aliases": [], "names": []}
    return mutated(rng, values)


def run_gpu(case: Any, folder: Path) -> None:
    write_json(emptied(folder) / "mine" / "gpu.json", case)
    before = os.environ.get("WHICHLORA_CALIBRATION")
    os.environ["WHICHLORA_CALIBRATION"] = str(folder)
    try:
        assert find_gpu(GPU).key == GPU
        for run in (RUNS[1], RUNS[4]):
            for prediction in estimates.estimate([RunConfig(model=MODEL, **run)], ["mine"]):
                check_prediction(prediction)
    finally:
        if before is None:
            del os.environ["WHICHLORA_CALIBRATION"]
        else:
            os.environ["WHICHLORA_CALIBRATION"] = before


# --- recipe.json


@cache
def recipe() -> dict[str, Any]:
    run = RunConfig(model=MODEL, method="qlora", batch_size=2, seq_len=128)
    return json.loads(json.dumps(export.make_recipe(run, GPU).to_dict()))


def make_recipe(rng: random.Random) -> dict[str, Any]:
    return {"recipe": mutated(rng, recipe()), "to": rng.choice(list(FORMATS))}


def run_recipe(case: dict[str, Any], folder: Path) -> None:
    write_json(emptied(folder) / export.RECIPE_FILE, case["recipe"])
    export.write_export(export.read_recipe(folder), case["to"], folder)


# --- training data


ROWS: tuple[dict[str, Any], ...] = (
    {"text": "a sentence of a text"},
    {"prompt": "two and two?", "completion": "four"},
    {"instruction": "add", "input": "2 2", "output": "4"},
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]},
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]},
    {"prompt": "p", "chosen": "c", "rejected": "r"},
)


def make_data(rng: random.Random) -> dict[str, Any]:
    rows = [dict(rng.choice(ROWS))] * rng.randrange(1, 4)
    if rng.random() < 0.8:
        rows = mutated(rng, rows)
    settings: dict[str, Any] = {}
    if rng.random() < 0.4:
        columns = ("text", "prompt", "messages", "conversations", "instruction", *TEXTS)
        name = rng.choice(("text_column", "messages_column", "template"))
        column = rng.choice(columns)
        settings[name] = f"{{{column}}}" if name == "template" else column
    if rng.random() < 0.3:
        settings["validation_fraction"] = rng.choice((0.0, 0.5, 0.999))
    return {"suffix": rng.choice((".jsonl", ".csv", ".txt", ".json")), "rows": rows} | settings


def run_data(case: dict[str, Any], folder: Path) -> None:
    settings = dict(case)
    path = emptied(folder) / f"data{settings.pop('suffix')}"
    rows = settings.pop("rows")
    rows = rows if isinstance(rows, list) else [rows]
    if path.suffix == ".csv":
        text = io.StringIO()
        lines = [[*row] for row in rows[:1] if isinstance(row, dict)]
        lines += [[*row.values()] for row in rows if isinstance(row, dict)]
        csv.writer(text).writerows([[str(cell) for cell in line] for line in lines])
        content = text.getvalue()
    else:
        content = "".join(f"{json.dumps(row)}\n" for row in rows)
    path.write_text(content, encoding="utf-8", errors="surrogatepass")
    data = open_dataset(DatasetConfig(path=str(path), **settings))
    count_tokens(data, tokenizer=BYTE_LEVEL, offline=True, max_length=512)
    write_jsonl(data, folder / "out")


# --- files of other tools


DEEPSPEED_FILE = {
    "train_micro_batch_size_per_gpu": "auto",
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "reduce_bucket_size": 5e8,
        "overlap_comm": True,
    },
}
ACCELERATE_FILE = {
    "distributed_type": "FSDP",
    "num_processes": 4,
    "num_machines": 2,
    "mixed_precision": "bf16",
    "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True},
    "deepspeed_config": {"zero_stage": 2, "offload_param_device": "none"},
}
TOOL_FILES: tuple[dict[str, Any], ...] = (
    {
        "base_model": MODEL,
        "adapter": "lora",
        "load_in_8bit": True,
        "lora_r": 8,
        "lora_dropout": 0.05,
        "lora_target_modules": ["q_proj"],
        "micro_batch_size": 2,
        "sequence_len": 512,
        "bf16": "auto",
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
        "deepspeed": "ds.json",
        "fsdp": ["full_shard"],
        "fsdp_config": {"offload_params": False},
        "sample_packing": True,
    },
    {
        "model_name_or_path": MODEL,
        "stage": "sft",
        "finetuning_type": "lora",
        "lora_target": "q_proj,v_proj",
        "quantization_bit": 4,
        "cutoff_len": 512,
        "flash_attn": "auto",
        "optim": "adamw_torch",
        "loraplus_lr_ratio": 4.0,
        "deepspeed": "ds.json",
    },
    {
        "model_name_or_path": MODEL,
        "use_peft": True,
        "lora_target_modules": "all-linear",
        "load_in_4bit": True,
        "dtype": "bfloat16",
        "max_length": 512,
        "packing": True,
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {"version": 2},
        "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}},
    },
)


def make_import(rng: random.Random) -> dict[str, Any]:
    settings = mutated(rng, rng.choice(TOOL_FILES))
    launcher = rng.choice(("", "accelerate launch --config_file acc.json", "torchrun", *TEXTS))
    return {
        "settings": settings,
        "deepspeed": mutated(rng, DEEPSPEED_FILE),
        "accelerate": mutated(rng, ACCELERATE_FILE),
        "script": rng.choice(("", f"{launcher} train.py a.json --fsdp {rng.choice(TEXTS)}")),
        "gpus": rng.choice((None, None, 1, 4)),
    }


def run_import(case: dict[str, Any], folder: Path) -> None:
    folder = emptied(folder)
    path = write_json(folder / "a.json", case["settings"])
    write_json(folder / "ds.json", case["deepspeed"])
    accelerate = write_json(folder / "acc.json", case["accelerate"])
    paths = [path, accelerate]
    if case["script"]:
        script = folder / "train.sh"
        script.write_text(case["script"], encoding="utf-8", errors="surrogatepass")
        paths = [script]
    gpus = {} if case["gpus"] is None else {"gpus": case["gpus"]}
    for prediction in estimate(gpu=GPU, from_file=paths, **gpus):
        check_prediction(prediction)


TARGETS = {
    target.name: target
    for target in (
        Target(name="command_line", make=make_command_line, run=run_command_line),
        Target(name="model", make=make_model, run=run_model),
        Target(name="plan", make=make_plan, run=run_text),
        Target(name="log", make=make_log, run=run_log),
        Target(name="answer", make=make_answer, run=run_answer),
        Target(name="records", make=make_records, run=run_records),
        Target(name="table", make=make_table, run=run_table),
        Target(name="coefficients", make=make_coefficients, run=run_coefficients),
        Target(name="gpu", make=make_gpu, run=run_gpu),
        Target(name="recipe", make=make_recipe, run=run_recipe),
        Target(name="data", make=make_data, run=run_data),
        Target(name="import", make=make_import, run=run_import),
        *([Target(name="assistant", make=make_question, run=run_question)] if HAS_MCP else []),
    )
}
