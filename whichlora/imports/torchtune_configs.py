"""The configurations that come with torchtune's recipes of supervised fine-tuning on texts.

Each line is a name, what its builder is called without the package, and what it sets apart from
`_USUAL`. Source: torchtune 0.6.1
`_recipe_registry.py`, recipes/configs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MODELS = "torchtune.models."
_FOLDER = "recipes/configs/"
_USUAL: Mapping[str, Any] = {
    "batch_size": 2,
    "dtype": "bf16",
    "enable_activation_checkpointing": True,
    "epochs": 1,
    "loss._component_": "torchtune.modules.loss.CEWithChunkedOutputLoss",
    "optimizer._component_": "torch.optim.AdamW",
    "optimizer.fused": True,
}
_USUAL_LORA: Mapping[str, Any] = {
    "gradient_accumulation_steps": 8,
    "model.apply_lora_to_mlp": True,
    "model.lora_alpha": 16,
    "model.lora_attn_modules": ["q_proj", "v_proj", "output_proj"],
    "model.lora_dropout": 0.0,
    "model.lora_rank": 8,
}
_KEYS: Mapping[str, str] = {
    "alpha": "model.lora_alpha",
    "batch": "batch_size",
    "checkpoints": "enable_activation_checkpointing",
    "compile": "compile",
    "dora": "model.use_dora",
    "fused": "optimizer.fused",
    "in_bwd": "optimizer_in_bwd",
    "length": "tokenizer.max_seq_len",
    "offloads": "enable_activation_offloading",
    "on_host": "fsdp_cpu_offload",
    "output": "model.apply_lora_to_output",
    "packed": "dataset.packed",
    "quantized": "model.quantize_base",
    "rank": "model.lora_rank",
    "steps": "gradient_accumulation_steps",
}
_PAGED = {
    "32bit": "bitsandbytes.optim.PagedAdamW",
    "8bit": "bitsandbytes.optim.PagedAdamW8bit",
}


def content_of(name: str) -> Mapping[str, Any] | None:
    """The keys of a configuration, sections in front; None where there is none of this name.

    Args:
        name: as `--config` takes it, or the path of its file in torchtune's repository.
    """
    name = name.rpartition(_FOLDER)[2].removesuffix(".yaml")
    line = _BY_NAME.get(name)
    if line is None:
        return None
    size, *settings = line.split()
    package = name.partition("/")[0]
    kind, lora, size = size.rpartition("lora_")
    builder = f"{_MODELS}{package}.{kind}{lora}{package}_{size}"
    keys = {**_USUAL, "model._component_": builder}
    keys |= _USUAL_LORA if lora else {"gradient_accumulation_steps": 1}
    for setting in settings:
        key, _, value = setting.partition("=")
        if key == "paged":
            keys |= {"optimizer._component_": _PAGED[value], "optimizer.fused": False}
        else:
            keys[_KEYS[key]] = value
    return keys


_LINES = """
code_llama2/7B_full_low_memory: 7b paged=32bit offloads=True in_bwd=True
code_llama2/7B_lora_single_device: lora_7b
code_llama2/7B_qlora_single_device: qlora_7b
gemma/2B_full: 2b
gemma/2B_lora: lora_2b batch=4 steps=1 rank=64 alpha=128
gemma/2B_lora_single_device: lora_2b batch=4 rank=64 alpha=128
gemma/2B_qlora_single_device: qlora_2b batch=4 rank=64 alpha=128
gemma/7B_full: 7b batch=1
gemma/7B_lora: lora_7b batch=4 steps=1 rank=64 alpha=128
gemma/7B_lora_single_device: lora_7b batch=8
gemma/7B_qlora_single_device: qlora_7b batch=4 rank=64 alpha=128
gemma2/27B_full: 27b batch=1
gemma2/27B_lora: lora_27b batch=4 steps=1 rank=64 alpha=128
gemma2/27B_lora_single_device: lora_27b
gemma2/27B_qlora_single_device: qlora_27b batch=4 rank=64 alpha=128
gemma2/2B_full: 2b
gemma2/2B_lora: lora_2b batch=4 steps=1 rank=64 alpha=128
gemma2/2B_lora_single_device: lora_2b batch=8 rank=64 alpha=128
gemma2/2B_qlora_single_device: qlora_2b batch=4 rank=64 alpha=128
gemma2/9B_full: 9b batch=1
gemma2/9B_lora: lora_9b batch=4 steps=1 rank=64 alpha=128
gemma2/9B_lora_single_device: lora_9b batch=8
gemma2/9B_qlora_single_device: qlora_9b batch=4 rank=64 alpha=128
llama2/13B_full: 13b
llama2/13B_lora: lora_13b checkpoints=False output=True
llama2/13B_qlora_single_device: qlora_13b
llama2/70B_lora: lora_70b steps=1 rank=16 alpha=32
llama2/70B_qlora: qlora_70b steps=1 rank=16 alpha=32
llama2/7B_full: 7b
llama2/7B_full_low_memory: 7b paged=32bit offloads=True in_bwd=True
llama2/7B_lora: lora_7b checkpoints=False
llama2/7B_lora_single_device: lora_7b
llama2/7B_qlora: qlora_7b
llama2/7B_qlora_single_device: qlora_7b
llama3/70B_full: 70b fused=False on_host=True
llama3/70B_lora: lora_70b steps=1 rank=16 alpha=32
llama3/8B_dora: lora_8b steps=1 checkpoints=False dora=True
llama3/8B_dora_single_device: lora_8b dora=True
llama3/8B_full: 8b
llama3/8B_full_single_device: 8b paged=8bit in_bwd=True
llama3/8B_lora: lora_8b checkpoints=False
llama3/8B_lora_single_device: lora_8b
llama3/8B_qdora_single_device: lora_8b dora=True quantized=True
llama3/8B_qlora_single_device: qlora_8b
llama3_1/405B_qlora: qlora_405b batch=1 rank=16 alpha=32
llama3_1/70B_full: 70b fused=False on_host=True
llama3_1/70B_lora: lora_70b steps=1 rank=16 alpha=32
llama3_1/8B_full: 8b
llama3_1/8B_full_single_device: 8b paged=8bit in_bwd=True
llama3_1/8B_lora: lora_8b checkpoints=False
llama3_1/8B_lora_single_device: lora_8b
llama3_1/8B_qlora_single_device: qlora_8b
llama3_2/1B_full: 1b batch=4 steps=8 checkpoints=False
llama3_2/1B_full_single_device: 1b batch=4 checkpoints=False paged=8bit in_bwd=True
llama3_2/1B_lora: lora_1b batch=4 rank=64 alpha=128 checkpoints=False
llama3_2/1B_lora_single_device: lora_1b batch=4 rank=64 alpha=128 checkpoints=False
llama3_2/1B_qlora_single_device: qlora_1b batch=4 rank=64 alpha=128 checkpoints=False
llama3_2/3B_full: 3b batch=4 steps=8
llama3_2/3B_full_single_device: 3b batch=4 paged=8bit in_bwd=True
llama3_2/3B_lora: lora_3b batch=4 rank=64 alpha=128 checkpoints=False
llama3_2/3B_lora_single_device: lora_3b batch=4 rank=64 alpha=128
llama3_2/3B_qlora_single_device: qlora_3b batch=4 rank=64 alpha=128
llama3_3/70B_full: 70b fused=False on_host=True
llama3_3/70B_full_multinode: 70b batch=4 compile=True packed=True length=1024
llama3_3/70B_lora: lora_70b steps=1 rank=16 alpha=32
llama3_3/70B_qlora: qlora_70b steps=1 rank=16 alpha=32
mistral/7B_full: 7b
mistral/7B_full_low_memory: 7b paged=32bit offloads=True in_bwd=True
mistral/7B_lora: lora_7b batch=4 steps=1 rank=64 output=True
mistral/7B_lora_single_device: lora_7b batch=4 rank=64 output=True
mistral/7B_qlora_single_device: qlora_7b batch=4 rank=64
phi3/mini_full: mini steps=8
phi3/mini_full_low_memory: mini paged=32bit offloads=True in_bwd=True
phi3/mini_lora: lora_mini checkpoints=False
phi3/mini_lora_single_device: lora_mini
phi3/mini_qlora_single_device: qlora_mini
phi4/14B_full: 14b steps=8
phi4/14B_full_low_memory: 14b paged=32bit offloads=True in_bwd=True
phi4/14B_lora: lora_14b checkpoints=False
phi4/14B_lora_single_device: lora_14b
phi4/14B_qlora_single_device: qlora_14b
qwen2/0.5B_full: 0_5b steps=8 checkpoints=False
qwen2/0.5B_full_single_device: 0_5b steps=8
qwen2/0.5B_lora: lora_0_5b batch=4 rank=32 alpha=64
qwen2/0.5B_lora_single_device: lora_0_5b batch=4 rank=32 alpha=64
qwen2/1.5B_full: 1_5b checkpoints=False
qwen2/1.5B_full_single_device: 1_5b paged=32bit in_bwd=True
qwen2/1.5B_lora: lora_1_5b rank=32 alpha=64
qwen2/1.5B_lora_single_device: lora_1_5b rank=32 alpha=64
qwen2/7B_full: 7b steps=8
qwen2/7B_full_single_device: 7b paged=32bit in_bwd=True
qwen2/7B_lora: lora_7b checkpoints=False
qwen2/7B_lora_single_device: lora_7b
qwen2_5/0.5B_full: 0_5b steps=8 checkpoints=False
qwen2_5/0.5B_full_single_device: 0_5b steps=8 checkpoints=False
qwen2_5/0.5B_lora: lora_0_5b rank=32 alpha=64 checkpoints=False
qwen2_5/0.5B_lora_single_device: lora_0_5b rank=32 alpha=64 checkpoints=False
qwen2_5/1.5B_full: 1_5b_instruct
qwen2_5/1.5B_full_single_device: 1_5b_instruct batch=4 paged=32bit in_bwd=True
qwen2_5/1.5B_lora: lora_1_5b_instruct rank=32 alpha=64 checkpoints=False
qwen2_5/1.5B_lora_single_device: lora_1_5b_instruct rank=32 alpha=64 checkpoints=False
qwen2_5/14B_lora_single_device: lora_14b_instruct
qwen2_5/32B_lora: lora_32b_instruct checkpoints=False
qwen2_5/3B_full: 3b steps=8
qwen2_5/3B_full_single_device: 3b paged=32bit in_bwd=True
qwen2_5/3B_lora: lora_3b checkpoints=False
qwen2_5/3B_lora_single_device: lora_3b
qwen2_5/72B_lora: lora_72b_instruct steps=1
qwen2_5/7B_full: 7b_instruct steps=8
qwen2_5/7B_full_single_device: 7b_instruct paged=32bit in_bwd=True
qwen2_5/7B_lora: lora_7b_instruct checkpoints=False
qwen2_5/7B_lora_single_device: lora_7b_instruct
"""
_BY_NAME: Mapping[str, str] = {
    name: rest for name, _, rest in (line.partition(": ") for line in _LINES.strip().splitlines())
}
