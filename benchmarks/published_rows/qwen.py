"""Qwen's own documentation: the speed pages of Qwen 1.5 to 2.5, and the README of the first."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from published_rows.cells import A100, QUANT, Found, LeftOut, Line, whole
from published_rows.models import model_of
from whichlora.specs import RunConfig

_QWEN1_LIBRARIES = (("peft", "0.7.1"), ("torch", "2.0.1"), ("transformers", "4.32.0"))


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
