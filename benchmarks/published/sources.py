"""Each source's rows as observations, or as left out."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from published.cells import (
    A100,
    QUANT,
    Found,
    LeftOut,
    Line,
    Quantity,
    Row,
    libraries_of,
    rounding_of,
    whole,
)
from published.fine_tuning import stated_pairs
from published.models import model_of
from whichlora import families
from whichlora.errors import ConfigError
from whichlora.methods import list_methods
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.run import INT8_THRESHOLD, RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.units import GiB

# --- fitcheck: a plain loop over an fp16 base on a T4, without autocast --------------------------


_FITCHECK_COUNTERS: dict[str, Quantity] = {
    "peak_allocated_gib": "peak_allocated",
    "peak_reserved_gib": "peak_reserved",
    "after_load_allocated_gib": "allocated_after_load",
    "peak_forward_gib": "peak_in_forward",
    "peak_backward_gib": "peak_in_backward",
    "peak_optimizer_gib": "peak_in_optimizer",
}


def fitcheck(line: Line) -> Iterator[Found]:
    row = line.row
    spec = model_of(row["model_id"])
    assert spec is not None
    versions = {"torch": row["torch"].partition("+")[0], "transformers": row["transformers"]}
    run = RunConfig(
        model=spec.name,
        trainer="loop-function",  # `one_step` of scripts/measure.py
        method=row["method"],
        r=whole(row["r"]),
        lora_alpha=whole(row["lora_alpha"]),
        target_modules=tuple(row["targets"].split("+")),
        quant=QUANT[row["quant"]],  # type: ignore[arg-type]
        prepare_kbit=row["quant"] != "none",
        precision="fp16-no-autocast",
        optimizer="adamw_torch",
        gradient_checkpointing=row["gradient_checkpointing"] == "True",
        use_reentrant=row["use_reentrant"] == "True",
        # "sdpa" is pinned to the memory-efficient kernel, with expanded keys
        attn="sdpa-efficient" if row["attn"] == "sdpa" else row["attn"],  # type: ignore[arg-type]
        batch_size=whole(row["batch_size"]),
        seq_len=whole(row["seq_len"]),
        libraries=tuple(sorted(versions.items())),
    )
    for column, quantity in _FITCHECK_COUNTERS.items():
        if row[column]:
            yield line.observed(
                spec,
                run,
                "t4-16gb",
                quantity,
                float(row[column]) * GiB,
                stack=row["attn"],
                rounding=rounding_of(row[column]) * GiB,
            )
    if row["step_s"]:  # one step after one that warms up
        yield line.observed(
            spec,
            run,
            "t4-16gb",
            "step_s",
            float(row["step_s"]),
            stack=row["attn"],
            rounding=rounding_of(row["step_s"]),
        )


# --- fms-acceleration: TRL's trainer on an A100, by framework configuration -----------------------


_FMS_FIRST = {
    "bitsandbytes": "0.43.1",
    # `accelerated-peft-autogptq` brings a copy, and took the same kernel from AutoGPTQ before
    "gptqmodel": "1.0.0",
    "torch": "2.2.2",
    "transformers": "4.39.3",
    "trl": "0.9.6",
}
_FMS_COUNTERS: dict[str, Quantity] = {
    "nvidia-smi memory.used peak minus first reading": "device_used",
    "max_memory_allocated via HF Trainer memory tracker": "peak_allocated",
    "memory_allocated after train via HF Trainer memory tracker": "allocated_between_steps",
}


def _fms_settings(row: Row) -> dict[str, Any]:
    config, mixed = _fms_config(row)
    if mixed == "none":
        # adapters stay fp32 (peft's default) and every product casts for itself
        precision = "bf16-pure" if row["method"] == "full" else "bf16-no-autocast"
    else:
        precision = mixed
    head = "hf"
    if "fast cross" in row["loss_kernel"]:
        head = "unsloth"
    if "liger" in row["loss_kernel"]:
        head = "liger"
    quant = "nf4-dq" if row["quant"] == "nf4" else QUANT[row["quant"]]
    dropout = re.search(r"lora_dropout ([\d.]+)", row["notes"])
    return {
        "method": row["method"],
        "r": whole(row["rank"] or "16"),
        "lora_dropout": float(dropout[1]) if dropout else 0.0,
        "precision": precision,
        "optimizer": "adamw_torch",
        "attn": "flash_attention_2",
        "gradient_checkpointing": True,
        "gradient_accumulation_steps": whole(row["grad_accum"]),
        "loss_head": head,
        "quant": quant,
        "prepare_kbit": config.startswith("baseline-peft-bnb"),
        # what a commit does not pin looks like the first versions that one does
        "libraries": tuple(sorted((_FMS_FIRST | dict(libraries_of(row["versions"]))).items())),
    }


def _fms_config(row: Row) -> tuple[str, str]:
    """Name of the framework configuration, and the autocast dtype or "none"."""
    config = re.search(r"framework_config ([^;]*)", row["notes"])
    mixed = re.search(r"mixed precision fp16=(\w*) bf16=(\w*)", row["notes"])
    assert config is not None
    assert mixed is not None
    return config[1].strip(), "fp16" if mixed[1] else "bf16" if mixed[2] else "none"


_FMS_STEPS = 100  # `max_steps` of its defaults.yaml; of unpacked runs, an epoch


def _fms_runtime(row: Row) -> tuple[float, int]:
    """Seconds of the whole run where they are stated, and its optimizer steps."""
    stated = re.search(r"([\d.]+) s runtime; ([\d.]+) samples/s", row.get("tokens_or_samples", ""))
    if stated is None:
        return 0.0, _FMS_STEPS
    seconds, samples_per_s = float(stated[1]), float(stated[2])
    samples = whole(row["batch_size"]) * whole(row["grad_accum"])
    return seconds, round(seconds * samples_per_s / samples)


@cache
def fms_warm_up_s() -> float:
    """Seconds of its runs beyond the steps: what batches of 4 and 8 extrapolate to at no token.

    The median over its packed LoRA runs of equal settings, whose update and expansion take nothing.
    """
    runtime_s: dict[tuple[str, ...], dict[str, float]] = {}
    with (Path(__file__).parent / "fms_acceleration_bench.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["method"] == "lora" and row["time_value"] and row["seq_len"]:
                key = (row["model_id"], row["source_ref"], *_fms_config(row))
                seconds, steps = _fms_runtime(row)
                assert steps == _FMS_STEPS, row
                runtime_s.setdefault(key, {})[row["batch_size"]] = seconds
    return median(2 * by_batch["4"] - by_batch["8"] for by_batch in runtime_s.values())


def fms(line: Line) -> Iterator[Found]:
    row = line.row
    if "OOM" in row["flags"]:
        yield line.left_out("run", "flagged as failed or out of memory by the source")
        return
    config, _ = _fms_config(row)
    spec = model_of(row["model_id"])
    if "scattermoe" in config or spec is None or "granite" in row["model_id"]:
        yield line.left_out("run", "mixture kernels of its own, or lengths not stated")
        return
    targets = tuple(row["target_modules"].split())
    names = {linear.name for layer, _ in spec.layers() for linear in layer.linears}
    targets = tuple(name for name in targets if name in names)
    settings = _fms_settings(row)
    mean = re.search(r"mean ([\d.]+) tokens per sample", row["notes"])
    packed = bool(row["seq_len"])
    length = whole(row["seq_len"]) if packed else whole(mean[1]) if mean else 0
    run = RunConfig(
        model=spec.name,
        batch_size=whole(row["batch_size"]),
        seq_len=max(1, length),
        **settings,
        **({"target_modules": targets} if targets else {}),
    )
    if row["mem_value"]:
        if packed or _FMS_COUNTERS[row["mem_counter"]] == "allocated_between_steps":
            yield from line.memory(spec, run, A100, _FMS_COUNTERS[row["mem_counter"]], stack=config)
        else:
            yield line.left_out("memory", "length of the longest batch is not stated")
    if row["time_value"]:
        if not length or row["padding"] == "longest":
            yield line.left_out("time", "padded, and the share of padding is not stated")
            return
        per_step = run.batch_size * length * run.gradient_accumulation_steps
        seconds = per_step / float(row["time_value"])
        # the Trainer's runtime starts before the first step, whose warm-up a step has no part in
        seconds -= fms_warm_up_s() / _fms_runtime(row)[1]
        loops = any(layer.moe is not None for layer, _ in spec.layers())
        waits = "experts of transformers 4 run in a Python loop" if loops else ""
        yield line.observed(spec, run, A100, "step_s", seconds, stack=config, waits=waits)


# --- NeuSight: one step in fp32 on nine accelerators, without memory ------------------------------


_NEUSIGHT_GPUS = {
    "AMD Instinct MI100": "mi100-32gb",
    "AMD Instinct MI210": "mi210-64gb",
    "AMD Instinct MI250": "mi250x-gcd-64gb",
    "NVIDIA A100-PCIE-40GB": "a100-pcie-40gb",
    "NVIDIA A100 80GB PCIe": "a100-pcie-80gb",
    "NVIDIA L4": "l4-24gb",
    "Tesla P100-PCIE-16GB": "p100-pcie-16gb",
    "Tesla P4": "p4-8gb",
    "Tesla V100-PCIE-32GB": "v100-pcie-32gb",
}


@cache
def _neusight_model(
    name: str, kind: str, hidden: int, layers: int, heads: int, ffn: int, vocab: int
) -> ModelSpec:
    sizes = {"vocab_size": vocab, "torch_dtype": "float32"}
    if kind == "gpt2":
        sizes |= {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_inner": ffn}
        sizes |= {"n_positions": 2048}
    else:
        sizes |= {"hidden_size": hidden, "num_hidden_layers": layers}
        sizes |= {"num_attention_heads": heads, "max_position_embeddings": 2048}
        sizes |= {"ffn_dim": ffn, "word_embed_proj_dim": hidden} if kind == "opt" else {}
        sizes |= {"intermediate_size": ffn} if kind == "bert" else {}
    return families.build({"model_type": kind, **sizes}, name=name)


def neusight(line: Line) -> Iterator[Found]:
    row = line.row
    if row["variant"]:
        yield line.left_out("time", "compiled with fused operators")
        return
    if row["model_type"] not in ("bert", "gpt2", "opt"):
        yield line.left_out("time", "switch transformer: experts in a Python loop, 0 layers timed")
        return
    gpu = _NEUSIGHT_GPUS.get(row["gpu"])
    if gpu is None:
        yield line.left_out("time", f"{row['gpu']}: no datasheet facts on file")
        return
    sizes = (whole(row[key]) for key in ("hidden", "layers", "heads", "ffn", "vocab"))
    spec = _neusight_model(row["model"], row["model_type"], *sizes)
    if row["model_type"] == "bert" and row["phase"] == "forward":
        # `get_model` of NeuSight's trace.py: AutoModelForSequenceClassification where it does not
        # train, AutoModelForPreTraining where it does
        spec = replace(spec, masked_head=None)
    run = RunConfig(
        model=spec.name,
        method="full",
        precision="fp32",
        batch_size=whole(row["batch_size"]),
        seq_len=whole(row["seq_len"]),
        attn="eager",
        gradient_checkpointing=False,
        optimizer="sgd",
        trainer="loop",
        loss_head="raw",
    )
    quantity: Quantity = "forward_s" if row["phase"] == "forward" else "forward_backward_s"
    yield line.observed(spec, run, gpu, quantity, float(row["e2e_ms"]) / 1e3)


# --- optimum-benchmark: forwards, generations and a few training rows of 7B models ----------------


# One EPYC 7742, four A100 and an "NVIDIA DGX Display" (commit 71a60178): a DGX Station, whose
# boards draw 275 W at most. The same authors' LLM-Perf leaderboard calls them A100-80GB-275W.
_DGX_STATION = f"{A100}@275W"

# Of its quantised rows, which state no version: the newest on 2023-10-30.
_OPTIMUM_QUANTISERS = (("autoawq", "0.1.5"), ("bitsandbytes", "0.41.1"), ("gptqmodel", "0"))


def _optimum_libraries(row: Row) -> tuple[tuple[str, str], ...]:
    second = (("exllama", "2"),) if "exllamav2" in _experiment(row) else ()
    return tuple(sorted((*libraries_of(row["versions"]), *_OPTIMUM_QUANTISERS, *second)))


def optimum(line: Line) -> Iterator[Found]:
    row = line.row
    gpu = "rtx-4090-24gb" if row["gpu"] == "RTX4090" else _DGX_STATION
    if row["phase"] == "finetune":
        yield from _optimum_training(line, gpu)
        return
    if row["mem_counter"].startswith("peak_memory"):
        counter: Quantity | None = None
    else:
        counter = {
            "max_memory_allocated": "peak_allocated",
            "max_memory_reserved": "peak_reserved",
            "nvml used memory, polled peak": "device_used",
        }[row["mem_counter"]]  # type: ignore[assignment]
    attn = {"flash_attention_2": "flash_attention_2", "bettertransformer sdpa": "sdpa"}
    found = line.generation(attn=attn.get(row["attn_impl"], "eager"))
    if isinstance(found, LeftOut):
        yield found
        return
    spec, run = found
    run = replace(run, libraries=_optimum_libraries(row))
    if counter is None:
        yield line.left_out("memory", "one peak of an unnamed counter (allocator or driver)")
    elif counter == "device_used" and run.max_new_tokens > 1:
        reason = "polled in another pass: 26 GB used where the allocator reserved 84 GB"
        yield line.left_out("memory", reason)
    else:
        # NVML's first counter has what the driver keeps of the board, which CUDA never offers
        reserve = 80 * GiB - find_gpu(gpu).memory_bytes if counter == "device_used" else 0
        for one in line.memory(spec, run, gpu, counter, stack=_experiment(row)):
            yield replace(one, value=one.value - reserve)
    if row["time_value"]:
        forward = row["time_unit"].startswith("s per forward")
        yield line.observed(
            spec,
            run,
            gpu,
            "prefill_s" if forward else "generate_s",
            float(row["time_value"]),
            stack=_experiment(row),
        )


def _experiment(row: Row) -> str:
    found = re.search(r"experiment ([^;(]*)", row["notes"])
    return re.sub(r"-batch_size$", "", found[1].strip()) if found else ""


def _optimum_training(line: Line, gpu: str) -> Iterator[Found]:
    row = line.row
    quant = QUANT.get(row["quant"])
    spec = model_of(row["model_id"])
    assert spec is not None
    run = RunConfig(
        model=spec.name,
        method="lora" if quant == "none" else "qlora",
        r=8,
        target_modules=("q_proj", "v_proj"),
        batch_size=whole(row["batch_size"]),
        seq_len=256,
        precision="fp16-no-autocast",  # `torch_dtype` alone, `amp_autocast` false
        quant=quant,  # type: ignore[arg-type]
        gradient_checkpointing=False,
        optimizer="adamw_torch",
        attn="eager",
        prepare_kbit=False,
        libraries=_optimum_libraries(row),
    )
    seconds = run.batch_size / float(row["time_value"])
    yield line.observed(spec, run, gpu, "step_s", seconds, stack=_experiment(row))


# --- Qwen's own documentation: the speed pages of Qwen 1.5 to 2.5, and the README of the first ----


# No row states bitsandbytes: the newest when this transformers was released.
_QWEN1_LIBRARIES = (
    ("bitsandbytes", "0.41.1"),
    ("gptqmodel", "0"),
    ("peft", "0.7.1"),
    ("torch", "2.0.1"),
    ("transformers", "4.32.0"),
)


def qwen_speed(line: Line) -> Iterator[Found]:
    row = line.row
    engine = "vllm" if row["framework"] == "vllm" else "dynamic"
    attn = "flash_attention_2" if row["attn_impl"] == "flash_attention_2" else "sdpa"
    found = line.generation(attn=attn, kv_cache=engine)
    if isinstance(found, LeftOut):
        yield found
        return
    spec, run = found
    if line.source == "qwen15_hf_infer":
        run = replace(run, libraries=(("torch", "2.1.2"), ("transformers", "4.38.2")))
    # transformers took GPTQModel in release 4.48
    run = replace(run, libraries=tuple(sorted((*run.libraries, ("gptqmodel", "0")))))
    if engine == "vllm":  # has model code of its own
        vllm = re.search(r"vllm ([\d.]+)", row["versions"])
        assert vllm, line
        run = replace(run, libraries=(("vllm", vllm[1]),))
    yield from line.memory(spec, run, A100, "peak_allocated")
    if row["time_value"]:
        seconds = run.max_new_tokens / float(row["time_value"])
        if engine == "vllm" and row["quant"] != "none":
            yield line.left_out("time", "vLLM's own 4-bit and 8-bit kernels")
        elif "MoE" in row["model_id"] or "A14B" in row["model_id"]:
            yield line.left_out("time", "experts of transformers 4 run in a Python loop")
        else:
            yield line.observed(spec, run, A100, "generate_s", seconds)


def qwen1_inference(line: Line) -> Iterator[Found]:
    row = line.row
    if not row["prefill_len"]:
        yield line.left_out("run", "prompt length not stated")
        return
    if "README says averaged" in row["notes"]:
        yield line.left_out("time", "speed is an average over read and generated tokens")
        return
    attn = "flash_attention_2" if "flash" in row["attn_impl"] else "eager"
    found = line.generation(attn=attn)
    if isinstance(found, LeftOut):
        yield found
        return
    spec, run = found
    run = replace(run, libraries=_QWEN1_LIBRARIES)
    yield from line.memory(spec, run, A100, "perhaps_allocated")
    if row["time_value"]:
        seconds = run.max_new_tokens / float(row["time_value"])
        yield line.observed(spec, run, A100, "generate_s", seconds)


def qwen1_finetune(line: Line) -> Iterator[Found]:
    row = line.row
    if "LoRA (emb)" in row["notes"] or "embeddings+lm_head trained" in row["notes"]:
        yield line.left_out("run", "embeddings and head trained beside the adapters")
        return
    if row["method"] == "full":
        # QwenLM/Qwen finetune/finetune_ds.sh, the only script for it, has --deepspeed with ZeRO-2,
        # whose fp32 copies and buckets are 24 bytes per parameter whatever the length
        yield line.left_out("run", "the source's script trains all weights under DeepSpeed ZeRO-2")
        return
    spec = model_of(row["model_id"])
    assert spec is not None
    run = RunConfig(
        model=spec.name,
        method=row["method"],
        r=64,
        lora_dropout=0.05 if row["method"] != "full" else 0.0,
        target_modules=tuple(row["target_modules"].split("+"))
        if row["target_modules"]
        else ("all-linear",),
        batch_size=1,
        seq_len=whole(row["seq_len"]),
        precision="bf16" if row["base_dtype"] == "bfloat16" else "fp16",
        quant=QUANT[row["quant"]],  # type: ignore[arg-type]
        prepare_kbit=False,
        gradient_checkpointing=True,
        gradient_accumulation_steps=8,
        attn="flash_attention_2" if row["attn_impl"] else "eager",
        optimizer="adamw_torch",
        libraries=_QWEN1_LIBRARIES,
    )
    yield from line.memory(spec, run, A100, "perhaps_device_used", stack=row["method"])
    if row["time_value"]:
        yield line.observed(
            spec, run, A100, "step_s", float(row["time_value"]), stack=row["method"], rounding=0.05
        )


# --- PEFT's own comparison of its methods: a plain loop over MetaMathQA on an L40S ----------------


# Mean length of its padded batches: what logits and cache take that `outputs` holds, 371,200 bytes
# per token, are 334.4 MB in the row of BEFT.
_PEFT_MEAN_TOKENS = 225
# Padded length of its longest batch, which the reserved memory of LoRA's row of 2026 needs.
_PEFT_LONGEST = 642
_PEFT_ENCODER = "PromptEncoderConfig"  # whose type is P_TUNING
_PEFT_UNLIKE: dict[str, str] = {
    "boft": "its permutations stay on the host: the model was on the GPU before PEFT",
    "lora-fa": "`disable_adapter()` of its evaluation makes the frozen factor trained again",
}


class _PeftConfig:
    """A config as PEFT saved it; what it does not say is the method's default, or None."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Any:
        return self._values.get(name)


def _peft_settings(row: Row) -> dict[str, Any] | None:
    """Method and settings of an adapter config; None where no method has such a config.

    Raises:
        ConfigError: an option that is not modelled.
    """
    if not row["peft_type"]:
        return {"method": "full"}
    if row["optimizer"] == "lora-fa":
        return {"method": "lora-fa"}
    stated = json.loads(row["peft_config"])
    for method in list_methods().values():
        name = method.peft_class.rpartition(".")[2]
        kind = "PTUNING" if name == _PEFT_ENCODER else name.removesuffix("Config").upper()
        if kind != row["peft_type"].replace("_", ""):
            continue
        usual = {option.name: option.default for option in method.options}
        config = type(name, (_PeftConfig,), {})(usual | stated)
        read = method.read_peft(config)
        if read is None or method.base_quant != "none":
            continue
        targets = stated.get("target_modules")
        settings = {"method": method.name, **read}
        if "target_modules" not in method.ignores and isinstance(targets, list):
            settings["target_modules"] = tuple(sorted(targets))
        return settings
    return None


def peft_comparison(line: Line) -> Iterator[Found]:
    row = line.row
    spec = model_of(row["model_id"])
    assert spec is not None
    try:
        settings = _peft_settings(row)
    except ConfigError as error:
        yield line.left_out("run", str(error).partition("=")[0] + " is not modelled")
        return
    if settings is None:
        yield line.left_out("run", f"{row['peft_type']}: no method here has this config")
        return
    run = RunConfig(
        model=spec.name,
        trainer="loop",
        precision="bf16-pure" if settings["method"] == "full" else "bf16-no-autocast",
        optimizer="adamw_torch",
        attn="sdpa",
        gradient_checkpointing=row["gradient_checkpointing"] == "True",
        batch_size=whole(row["batch_size"]),
        seq_len=_PEFT_MEAN_TOKENS,
        padding="padded",
        libraries=libraries_of(row["versions"]),
        **settings,
    )
    gpu, stack = "l40s-48gb", row["experiment"].partition("llama-3.2-3B-")[2]
    reason = _PEFT_UNLIKE.get(run.method)
    if reason is not None:
        yield line.left_out("memory", reason)
    else:
        after, most = float(row["allocated_mean_bytes"]), float(row["reserved_max_bytes"])
        yield line.observed(spec, run, gpu, "allocated_after_step", after, stack=stack)
        longest = replace(run, seq_len=_PEFT_LONGEST)
        yield line.observed(spec, longest, gpu, "peak_reserved", most, stack=stack)
    if dict(run.libraries)["torch"] == "2.7.1":
        yield line.left_out("time", "the loop emptied the allocator's cache after every step")
        return
    yield line.observed(spec, run, gpu, "step_s", float(row["step_s"]), stack=stack)


# --- bitsandbytes: decoding by two of its releases ------------------------------------------------


_BITSANDBYTES_GPUS = {
    "H100 80GB SXM": "h100-sxm-80gb",
    "RTX 4090 24GB": "rtx-4090-24gb",
    "T4 16GB": "t4-16gb",
}


def bitsandbytes(line: Line) -> Iterator[Found]:
    row = line.row
    threshold = 0.0 if row["quant"].endswith("threshold-0") else INT8_THRESHOLD
    found = line.generation(attn="sdpa", llm_int8_threshold=threshold)
    if isinstance(found, LeftOut):
        yield found
        return
    spec, run = found
    seconds = run.batch_size / float(row["time_value"])
    yield line.observed(spec, run, _BITSANDBYTES_GPUS[row["gpu"]], "token_s", seconds)


# --- pages that print memory and speed of a generation ----------------------------------------


_SECONDS: dict[str, Callable[[float, RunConfig], tuple[Quantity, float]]] = {
    "ms per new token, prompt included": lambda value, run: (
        "generate_s",
        value * run.max_new_tokens / 1e3,
    ),
    "tokens/s, prompt and 2048 new ones": lambda value, run: (
        "generate_s",
        (run.prompt_len + run.max_new_tokens) / value,
    ),
    "decoded tokens/s": lambda value, run: ("token_s", 1 / value),
}
_QUANTISERS = re.compile(r"(autoawq|gptqmodel) ([\d.]+)")


def generation_pages(line: Line) -> Iterator[Found]:
    row = line.row
    found = line.generation(attn=row["attn_impl"], **dict(stated_pairs(row["settings"])))
    if isinstance(found, LeftOut):
        yield found
        return
    spec, run = found
    quantisers = _QUANTISERS.findall(row["versions"])
    run = replace(run, libraries=tuple(sorted((*run.libraries, *quantisers))))
    positions = run.prompt_len + run.max_new_tokens
    if (spec.max_position_embeddings or positions) < positions:  # rotary ones, which have no end
        spec = replace(spec, max_position_embeddings=positions)
    stated = row["mem_counter"].startswith("max_memory_allocated")
    yield from line.memory(
        spec, run, row["gpu"], "peak_allocated" if stated else "perhaps_allocated"
    )
    if "A3B" in row["model_id"]:
        yield line.left_out("time", "experts of transformers 4 run in a Python loop")
    elif row["time_value"]:
        quantity, seconds = _SECONDS[row["time_unit"]](float(row["time_value"]), run)
        yield line.observed(spec, run, row["gpu"], quantity, seconds)


# --- Unsloth's notebooks: what their cells printed, by release ------------------------------------


_UNSLOTH_GPUS = {
    "Tesla T4": "t4-16gb",
    "NVIDIA A10G": "a10g-24gb",
    "NVIDIA L4": "l4-24gb",
    "NVIDIA A100-SXM4-40GB": "a100-sxm-40gb",
    "NVIDIA A100-SXM4-80GB": A100,
}
_ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def _images_of(row: Row) -> dict[str, Any]:
    if not row["image_size"]:
        return {}
    width, height = row["image_size"].split("x")
    return {"images": 1, "image_size": (whole(width), whole(height))}


def unsloth_notebooks(line: Line) -> Iterator[Found]:
    row = line.row
    spec = model_of(row["model_id"])
    assert spec is not None
    if "dynamic upload" in row["notes"]:
        yield line.left_out("run", "which matrices its upload keeps in 16 bit is not stated")
        return
    if row["notes"].startswith("other code: "):
        yield line.left_out("run", row["notes"])
        return
    gpu, checkpoints = _UNSLOTH_GPUS[row["gpu"]], row["use_gradient_checkpointing"] != "False"
    # its notebooks of more pretraining have a rate of its own for both
    whole_modules = "trained whole" in row["notes"]
    run = RunConfig(
        model=spec.name,
        trainer="unsloth",
        method="lora" if row["quant"] else "qlora",
        r=whole(row["r"]),
        target_modules=("all-linear",) if row["image_size"] else _ALL_LINEAR,
        precision="fp16" if gpu == "t4-16gb" else "bf16",
        optimizer=row["optimizer"],  # type: ignore[arg-type]
        gradient_checkpointing=checkpoints,
        gradient_accumulation_steps=whole(row["gradient_accumulation_steps"]),
        batch_size=whole(row["batch_size"]),
        seq_len=whole(row["longest_row"] or row["max_seq_length"]),
        libraries=(*libraries_of(row["versions"]), ("unsloth", row["unsloth"])),
        modules_to_save=("embed_tokens", "lm_head") if whole_modules else (),
        trainer_options=(("embedding_learning_rate", 5e-6),) if whole_modules else (),
        **_images_of(row),
    )
    stack = f"unsloth {row['unsloth']}, {row['data'].partition('/')[2]}"
    before, most = float(row["reserved_before_gib"]), float(row["peak_reserved_gib"])
    if "wrote an answer" not in row["notes"]:
        yield line.observed(
            spec,
            run,
            gpu,
            "reserved_before_training",
            before * GiB,
            stack=stack,
            rounding=0.0005 * GiB,
        )
    if not row["longest_row"]:
        yield line.left_out("memory", "length of the longest row not stated")
    elif row["longest_row_from"] == "read off this row":
        yield line.left_out("memory", "its longest row is read off it, for the others of its data")
    else:
        yield line.observed(
            spec, run, gpu, "peak_reserved", most * GiB, stack=stack, rounding=0.0005 * GiB
        )


# --- sources of one table each, and those that nothing can be compared with -----------------------


def fsdp_qlora(line: Line) -> Iterator[Found]:
    row = line.row
    spec = model_of(row["model_id"])
    assert spec is not None
    moment = row["mem_counter"]
    moments: dict[str, Quantity] = {
        "memory_allocated after forward": "allocated_after_forward",
        "max_memory_allocated over forward+backward": "peak_allocated",
    }
    if moment not in moments or row["phase"] == "inference":
        reason = "weights alone, or gradients alone" if row["phase"] == "finetune" else "no_grad"
        yield line.left_out("memory", f"{reason}: after {moment.rpartition('after ')[2]}")
        return
    run = RunConfig(
        model=spec.name,
        method=row["method"],
        r=8,
        lora_dropout=0.1 if row["method"] != "full" else 0.0,
        target_modules=("q_proj", "v_proj"),
        seq_len=whole(row["seq_len"]),
        precision="bf16-pure",
        quant="nf4" if row["quant"] == "nf4" else "none",
        prepare_kbit=False,
        gradient_checkpointing=row["grad_ckpt"] == "True",
        use_reentrant=False,
        optimizer="sgd",  # none runs
        trainer="loop-function",  # one step, with none before it
        loss_head="raw",
        libraries=(("bitsandbytes", "0.42.0"), ("torch", "2.1.2"), ("transformers", "4.37.2")),
    )
    yield from line.memory(spec, run, A100, moments[moment])


def glm4(line: Line) -> Iterator[Found]:
    row = line.row
    spec = model_of(row["model_id"])
    if spec is None:
        yield line.left_out("run", "architecture neither in the database nor stated")
        return
    prompt = whole(row["prefill_len"])
    run = RunConfig(
        model=spec.name, phase="inference", prompt_len=prompt, max_new_tokens=1, attn="sdpa"
    )
    gpu = "h100-sxm-80gb"
    yield from line.memory(spec, run, gpu, "perhaps_device_used")
    value = float(row["time_value"])
    if row["time_unit"] == "s prefill":
        yield line.observed(
            spec, run, gpu, "prefill_s", value, rounding=rounding_of(row["time_value"])
        )
    else:
        yield line.left_out("time", "number of decoded tokens not stated")


def torchtune(line: Line) -> Iterator[Found]:
    row = line.row
    if "in backward" in row["optimizer"]:
        yield line.left_out("run", "optimizer fused into the backward pass")
    elif not row["seq_len"]:
        yield line.left_out("run", "length of the longest sample not stated")
    else:
        yield line.left_out("run", "torchtune's own model code, checkpointing per row not stated")


def not_ours(reason: str) -> Callable[[Line], Iterator[Found]]:
    def one(line: Line) -> Iterator[Found]:
        yield line.left_out("run", reason)

    return one
