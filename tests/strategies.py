"""Runs for property tests: a few models of the database, every setting that changes bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

from devices import A100, CPU
from hypothesis import strategies as st

from whichlora.spec.checkpoint import stored_quant
from whichlora.spec.run import BNB_QUANTS, Optimizer, RunConfig
from whichlora.store.gpus import list_gpus
from whichlora.store.hub import load_model
from whichlora.store.models import list_models

MODELS = (
    "HuggingFaceTB/SmolLM2-135M",
    "Qwen/Qwen2.5-0.5B",
    "EleutherAI/pythia-160m",
    "openai-community/gpt2",
    "google/gemma-2b",
    "google-t5/t5-small",
    "google-bert/bert-base-uncased",
)
ADAPTERS = ("lora", "qlora", "dora", "qdora")
DEVICES = st.sampled_from((CPU, A100))


def _with_dtypes(values: dict[str, Any]) -> dict[str, Any]:
    """bfloat16 adapters only where there is a bf16 base, an fp32 base where it is possible."""
    if not values["precision"].startswith("bf16"):
        values["adapter_dtype"] = "auto"
    plain = values["method"] in ("lora", "dora") and "gpt2" not in values["model"]
    if values["precision"] not in ("bf16", "fp16") or not plain:
        values["base_dtype"] = "auto"
    if values["base_dtype"] == "float32" and values["adapter_dtype"] == "bfloat16":
        values["base_dtype"] = "auto"
    return values


def finetune_runs(**fixed: Any) -> st.SearchStrategy[RunConfig]:
    """Fine-tuning runs of every method and precision."""
    choices: dict[str, st.SearchStrategy[Any]] = {
        "model": st.sampled_from(MODELS),
        "method": st.sampled_from((*ADAPTERS, "full")),
        "batch_size": st.integers(1, 64),
        "seq_len": st.integers(1, 4096),
        "r": st.integers(1, 128),
        "lora_dropout": st.sampled_from((0.0, 0.1)),
        "precision": st.sampled_from(("bf16", "bf16-pure", "bf16-no-autocast", "fp16", "fp32")),
        "base_dtype": st.sampled_from(("auto", "auto", "float32")),
        "adapter_dtype": st.sampled_from(("auto", "float32", "bfloat16")),
        "optimizer": st.sampled_from(("adamw_torch", "adamw_torch_fused", "adamw_8bit", "sgd")),
        "gradient_checkpointing": st.booleans(),
        "gradient_accumulation_steps": st.sampled_from((1, 4)),
        "attn": st.sampled_from(("sdpa", "eager")),
        "padding": st.sampled_from(("none", "padded")),
        "loss_head": st.sampled_from(("hf", "trl-fused", "liger", "unsloth", "raw")),
    }
    return _runs(choices, fixed, _with_dtypes)


def inference_runs(**fixed: Any) -> st.SearchStrategy[RunConfig]:
    """Generation with every cache and storage format."""
    choices: dict[str, st.SearchStrategy[Any]] = {
        "model": st.sampled_from(MODELS),
        "phase": st.just("inference"),
        "batch_size": st.integers(1, 64),
        "prompt_len": st.integers(1, 4096),
        "max_new_tokens": st.integers(1, 1024),
        "precision": st.sampled_from(("bf16", "fp16", "fp32")),
        "attn": st.sampled_from(("sdpa", "eager")),
        "quant": st.sampled_from(("none", "nf4", "nf4-dq", "int8", "gptq-int8")),
        "kv_cache": st.sampled_from(("dynamic", "static", "paged", "vllm")),
        "serve": st.sampled_from(("merged", "as-trained")),
        "method": st.sampled_from(("lora", "dora")),
        "r": st.integers(1, 64),
    }
    return _runs(choices, fixed)


# the whole database: what a property holds for
EVERY_MODEL = st.sampled_from(
    [
        record.hub_id
        for record in list_models()
        if stored_quant(load_model(record.hub_id).config) != "w4a16"  # which nothing trains
    ]
)
EVERY_GPU = st.sampled_from([*list_gpus(), CPU])
OLDER = {"transformers": "4.46.0"}


def every_finetune_run() -> st.SearchStrategy[RunConfig]:
    """Fine-tuning of any model of the database, with what the usual strategy leaves alone."""
    return finetune_runs(
        model=EVERY_MODEL,
        precision=st.sampled_from(
            ("bf16", "bf16-pure", "bf16-no-autocast", "fp16", "fp32", "tf32")
        ),
        optimizer=st.sampled_from(
            [name for name in get_args(Optimizer) if name != "adamw_torch_fused"]
        ),
        attn=st.sampled_from(("sdpa", "eager", "flash_attention_2")),
        use_reentrant=st.sampled_from((None, True, False)),
        bias=st.sampled_from(("none", "all", "lora_only")),
        modules_to_save=st.sampled_from(((), ("lm_head",), ("embed_tokens", "lm_head"))),
        target_modules=st.sampled_from((("all-linear",), ("attention",))),
        expandable_segments=st.booleans(),
        libraries=st.sampled_from(((), tuple(OLDER.items()))),
    )


def every_inference_run() -> st.SearchStrategy[RunConfig]:
    """Generation with any model of the database."""
    return inference_runs(
        model=EVERY_MODEL,
        attn=st.sampled_from(("sdpa", "eager", "flash_attention_2")),
        quant=st.sampled_from(("none", *sorted(BNB_QUANTS), "gptq-int4", "awq-int4")),
        kv_cache=st.sampled_from(("dynamic", "static", "quantized", "paged", "vllm")),
        libraries=st.sampled_from(((), tuple(OLDER.items()))),
    )


def _runs(
    choices: dict[str, st.SearchStrategy[Any]],
    fixed: dict[str, Any],
    allowed: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> st.SearchStrategy[RunConfig]:
    fields = choices | {
        name: value if isinstance(value, st.SearchStrategy) else st.just(value)
        for name, value in fixed.items()
    }
    return st.fixed_dictionaries(fields).map(lambda values: RunConfig(**allowed(values)))
