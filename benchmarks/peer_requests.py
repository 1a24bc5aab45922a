"""What each other estimator is asked about one of our runs: its own names for our settings.

A function here maps a model, a run and an accelerator to the arguments of one tool, or raises
`NoArgumentError` where the tool has no way to say it. A setting that a tool has no argument for
is left out. `peer_adapters.py` hands the arguments over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from whichlora.errors import ConfigError
from whichlora.methods import weight_dtype
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.layer import Layer
from whichlora.spec.run import ALL_LINEAR, ATTENTION, FP32_PRECISIONS, RunConfig
from whichlora.spec.targets import resolve_targets
from whichlora.units import GiB, MiB

Arguments = dict[str, Any]
Scope = Literal["qv", "attention", "all"]


class NoArgumentError(Exception):
    """The tool has no argument that would say this run."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes that estimators ask for, of a decoder whose layers are alike."""

    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    num_experts: int
    experts_per_token: int


def _whole_layer(model: ModelSpec) -> Layer:
    """The first layer that has what estimators ask the sizes of."""
    for layer, _ in model.layers():
        if layer.attentions and (layer.moe or layer.mlp):
            return layer
    raise NoArgumentError("no layer has attention and an MLP: no such sizes")


def shape_of(model: ModelSpec) -> Shape:
    layer = _whole_layer(model)
    attention = layer.attentions[0]
    mlp = layer.moe.expert if layer.moe else layer.mlp
    assert mlp is not None
    return Shape(
        num_attention_heads=attention.num_attention_heads,
        num_key_value_heads=attention.num_key_value_heads,
        intermediate_size=mlp.width,
        num_experts=layer.moe.num_experts if layer.moe else 1,
        experts_per_token=layer.moe.experts_per_token if layer.moe else 1,
    )


def scope_of(model: ModelSpec, run: RunConfig) -> Scope:
    """Which of the groups of layers that estimators know the adapters sit on."""
    layer = _whole_layer(model)
    targets = set(run.target_modules)
    if targets == {ALL_LINEAR} or targets == {linear.name for linear in layer.linears}:
        return "all"
    if targets in ({ATTENTION}, {linear.name for linear in layer.attentions[0].linears}):
        return "attention"
    if targets in ({"q_proj", "v_proj"}, {"c_attn"}):  # the fused one has little more
        return "qv"
    raise NoArgumentError(f"target_modules {', '.join(sorted(targets))}: no such set")


def config_of(model: ModelSpec, run: RunConfig) -> Arguments:
    """The Hugging Face config, allowing as many positions as were trained where it states none."""
    config = dict(model.config)
    if "n_positions" not in config:
        config.setdefault("max_position_embeddings", run.seq_len)
    return config


SHORT_NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def _method(run: RunConfig) -> str:
    if run.phase != "finetune" or run.method not in ("full", "lora", "qlora"):
        raise NoArgumentError(f"{run.method}: not among its methods")
    return run.method


def accelerate(model: ModelSpec, run: RunConfig, gpu: GpuSpec) -> Arguments:
    if _method(run) != "full":
        raise NoArgumentError("trains the whole model with Adam, nothing else")
    dtype = "float32" if run.precision in FP32_PRECISIONS else "float16"  # bf16 has the same size
    return {"config": config_of(model, run), "dtype": dtype}


def _known_family(model: ModelSpec) -> str:
    """The family that canifinetune knows and whose layers have these names; else the model's own.

    "Use a supported family" is what it says to others.
    """
    layer = _whole_layer(model)
    names = {linear.name for linear in layer.linears}
    by_name = {"c_fc": "gpt2", "gate_proj": "llama"}
    known = ("gemma", "gpt2", "llama", "mistral", "mixtral", "phi", "phi3", "qwen2")
    if model.model_type in known:
        return model.model_type
    return next((family for name, family in by_name.items() if name in names), model.model_type)


def canifinetune(model: ModelSpec, run: RunConfig, gpu: GpuSpec) -> Arguments:
    shape = shape_of(model)
    override = {
        "family": _known_family(model),
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": model.vocab_size,
        "total_params": model.num_params,
        "tie_word_embeddings": model.head_tied,
        "num_local_experts": shape.num_experts,
        "num_experts_per_tok": shape.experts_per_token,
    }
    quant = run.quant or "none"
    name = model.name
    if quant.startswith(("gptq", "awq")):  # the tool reads this key of a checkpoint's config
        override["quantization_config"] = {"quant_method": quant.partition("-")[0]}
        name = f"{name}-{quant}"
    bnb = {"nf4": "nf4", "nf4-dq": "nf4_double_quant", "fp4": "fp4", "int8": "int8"}
    same_states = dict.fromkeys(("adamw_hf", "paged_adamw_32bit"), "adamw_torch")
    scopes = {"qv": "conservative", "attention": "attention", "all": "all_linear"}
    return {
        "model_id": name,
        "override": override,
        "method": _method(run),
        "gpu_vram_gb": gpu.memory_bytes / GiB,
        "seq_len": run.seq_len,
        "micro_batch_size": run.batch_size,
        "gradient_accumulation_steps": run.gradient_accumulation_steps,
        "base_dtype": SHORT_NAMES[weight_dtype(run)],
        "quantization": bnb.get(quant, "nf4"),  # ignored but by qlora
        "lora_rank": run.r,
        "lora_alpha": run.lora_alpha,
        "lora_dropout": run.lora_dropout,
        "lora_target_scope": scopes[scope_of(model, run)],
        "optimizer": same_states.get(run.optimizer, run.optimizer),
        "gradient_checkpointing": run.gradient_checkpointing,
        "attention_implementation": run.attn.partition("-")[0],  # SDPA, whichever its kernel
        "loss_backend": "liger" if run.loss_head == "liger" else "stock",
    }


def fitscout(model: ModelSpec, run: RunConfig, gpu: GpuSpec) -> Arguments:
    shape = shape_of(model)
    return {
        "profile": {
            "params": model.num_params,
            "num_layers": model.num_hidden_layers,
            "hidden_size": model.hidden_size,
            "num_attention_heads": shape.num_attention_heads,
            "num_kv_heads": shape.num_key_value_heads,
            "intermediate_size": shape.intermediate_size,
            "vocab_size": model.vocab_size,
            "tie_word_embeddings": model.head_tied,
            "num_experts": shape.num_experts,
            "dtype_bytes": 4 if weight_dtype(run) == "float32" else 2,
        },
        "settings": {
            "method": _method(run),
            "micro_batch": run.batch_size,
            "seq_len": run.seq_len,
            "grad_ckpt": run.gradient_checkpointing,
            "opt_8bit": "8bit" in run.optimizer,
            "lora_rank": run.r,
        },
    }


def fm_training_estimator(model: ModelSpec, run: RunConfig, gpu: GpuSpec) -> Arguments:
    targets: Any = "all-linear" if scope_of(model, run) == "all" else list(run.target_modules)
    return {
        "config": config_of(model, run),
        "training": {
            "per_device_train_batch_size": run.batch_size,
            "gradient_accumulation_steps": run.gradient_accumulation_steps,
            "gradient_checkpointing": run.gradient_checkpointing,
            "optim": run.optimizer,
        },
        "fm": {
            "technique": _method(run),
            "torch_dtype": weight_dtype(run),
            "flash_attention_v2": run.attn == "flash_attention_2",
            "block_size": run.seq_len,
            "max_seq_length": run.seq_len,
        },
        "infra": {"gpu_memory_in_gb": round(gpu.memory_bytes / GiB)},
        "lora": {
            "r": run.r,
            "lora_alpha": run.lora_alpha,
            "lora_dropout": run.lora_dropout,
            "target_modules": targets,
        },
        "qlora": {"quant_type": "nf4", "use_double_quant": run.quant == "nf4-dq"},
    }


def ftuneai(model: ModelSpec, run: RunConfig, gpu: GpuSpec) -> Arguments:
    shape = shape_of(model)
    bits = {"none": "none", "int8": "8bit", "gptq-int8": "8bit"}
    optimizers = {"sgd": "sgd", "adafactor": "adafactor"}
    targets = {"qv": "attention", "attention": "attention_all", "all": "all_linear"}
    mixture = shape.num_experts > 1
    return {
        "model": {
            "name": model.name,
            "parameters": model.num_params,
            "hidden_size": model.hidden_size,
            "num_layers": model.num_hidden_layers,
            "num_attention_heads": shape.num_attention_heads,
            "num_kv_heads": shape.num_key_value_heads,
            "intermediate_size": shape.intermediate_size,
            "vocab_size": model.vocab_size,
            "max_seq_length": max(model.max_position_embeddings or 0, run.seq_len),
            "default_dtype": weight_dtype(run),
            "is_moe": mixture,
            "num_experts": shape.num_experts if mixture else None,
            "num_active_experts": shape.experts_per_token if mixture else None,
        },
        "settings": {
            "method": _method(run),
            "quantization": bits.get(run.quant or "none", "4bit"),
            "batch_size": run.batch_size,
            "seq_length": run.seq_len,
            "gradient_checkpointing": run.gradient_checkpointing,
            "optimizer": "adam_8bit"
            if "8bit" in run.optimizer
            else optimizers.get(run.optimizer, "adamw"),
            "lora_rank": run.r,
            "lora_alpha": run.lora_alpha,
            "lora_target": targets[scope_of(model, run)],
            "flash_attention": run.attn != "eager",  # SDPA keeps no matrix of scores either
        },
    }


def _names(model: ModelSpec, run: RunConfig) -> list[str]:
    """Each layer that gets an adapter, by its name."""
    try:
        return list(resolve_targets(model, run.target_modules))
    except ConfigError:  # those of another library's layers
        raise NoArgumentError(f"target_modules {', '.join(run.target_modules)}") from None


def fitcheck_llm(model: ModelSpec, run: RunConfig, gpu: GpuSpec) -> Arguments:
    dtype, method = weight_dtype(run), _method(run)
    quants = {"none": "none", "nf4": "nf4", "nf4-dq": "nf4", "int8": "int8"}
    if (run.quant or "none") not in quants:
        raise NoArgumentError(f"{run.quant}: not among its quantisations")
    adapters: Arguments = {"lora_rank": None}
    if method != "full":
        adapters = {"lora_rank": run.r, "lora_targets": _names(model, run)}
    return {
        "model_id": model.name,
        "config": config_of(model, run),
        "num_params": model.num_params,
        # the one card whose context and fragmentation it has measured
        "gpu": {"name": "t4"} if gpu.key == "t4-16gb" else {"vram_mib": gpu.memory_bytes // MiB},
        "settings": {
            **adapters,
            "precision": SHORT_NAMES[dtype],
            "quantization": quants[run.quant or "none"],
            "double_quant": run.quant == "nf4-dq",
            "optimizer": "adamw8bit" if "8bit" in run.optimizer else "adamw",
            "optimizer_dtype": "bf16" if method == "full" and dtype == "bfloat16" else "fp32",
            "batch_size": run.batch_size,
            "seq_len": run.seq_len,
            "grad_checkpoint": run.gradient_checkpointing,
            "flash_attn": run.attn != "eager",  # SDPA keeps no matrix of scores either
            "grad_accum_steps": run.gradient_accumulation_steps,
        },
    }


REQUESTS: dict[str, Callable[[ModelSpec, RunConfig, GpuSpec], Arguments]] = {
    one.__name__: one
    for one in (accelerate, canifinetune, fitcheck_llm, fitscout, fm_training_estimator, ftuneai)
}
