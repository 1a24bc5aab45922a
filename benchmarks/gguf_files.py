"""GGUF files of a model's shape without its weights: sparse, so that 70B take no disk.

llama.cpp refuses a file whose tensors are not those of the architecture, in name or shape: that it
loads one shows that `whichlora.serving.gguf` has them all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from whichlora.serving.gguf import BLOCKS, Tensor, tensors
from whichlora.serving.gguf_architectures import architecture_of
from whichlora.spec.architecture import ModelSpec, layers_in_order
from whichlora.spec.layer import Attention, Moe


def write(model: ModelSpec, file_type: str, path: Path, *, seed: int | None = None) -> None:
    """Write `path`; with a `seed` its weights are random, else there are none."""
    architecture = architecture_of(model)
    writer = gguf.GGUFWriter(str(path), architecture.name)
    _settings(writer, model, architecture.name)
    rng = None if seed is None else np.random.default_rng(seed)
    for tensor in tensors(model, file_type, architecture):
        prefix = "" if tensor.layer is None else f"blk.{tensor.layer}."
        name = f"{prefix}{tensor.name}{tensor.suffix}"
        _add(writer, name, _shape(tensor), tensor.type, rng)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    if rng is None:
        writer.write_ti_data_to_file()
        sizes = (info.nbytes for shard in writer.tensors for info in shard.values())
        whole = sum(-(-size // 32) * 32 for size in sizes)
        writer.close()
        with path.open("r+b") as file:
            file.truncate(-(-path.stat().st_size // 32) * 32 + whole)
    else:
        writer.write_tensors_to_file()
        writer.close()


def _shape(tensor: Tensor) -> tuple[int, ...]:
    if tensor.num_rows == 1:
        return (tensor.row,)
    beside = () if tensor.count == 1 else (tensor.count,)
    return (*beside, tensor.num_rows // tensor.count, tensor.row)


def _add(writer: gguf.GGUFWriter, name: str, shape: tuple[int, ...], stored: str, rng: Any) -> None:
    kind = gguf.GGMLQuantizationType[stored]
    elements, block_bytes = BLOCKS[stored]
    if rng is None:
        row_bytes = shape[-1] // elements * block_bytes
        num_bytes = int(np.prod(shape[:-1], dtype=np.int64)) * row_bytes
        raw = (*shape[:-1], row_bytes) if stored not in ("F32", "F16") else shape
        dtype = {"F32": np.float32, "F16": np.float16}.get(stored, np.uint8)
        writer.add_tensor_info(name, raw, np.dtype(dtype), num_bytes, raw_dtype=kind)
        return
    values = (0.02 * rng.standard_normal(shape)).astype(np.float32)
    if "norm" in name:
        values += 1
    quantised = values if stored == "F32" else gguf.quantize(values, kind)
    writer.add_tensor(name, quantised, raw_dtype=kind)


def _mixture(writer: gguf.GGUFWriter, model: ModelSpec, moe: Moe) -> None:
    choice = architecture_of(model).choice(model)
    writer.add_expert_count(moe.num_experts)
    writer.add_expert_used_count(moe.experts_per_token)
    writer.add_expert_feed_forward_length(moe.expert.width)
    if moe.shared:
        writer.add_expert_shared_count(max(1, moe.shared.width // moe.expert.width))
        writer.add_expert_shared_feed_forward_length(moe.shared.width)
    if moe.latent:
        writer.add_moe_latent_size(moe.latent[0].out_features)
    if choice.gate == "sigmoid":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if choice.scaled:
        writer.add_expert_weights_scale(2.5)
    if choice.divided:
        writer.add_expert_weights_norm(True)
    if choice.groups[0] > 1:
        writer.add_expert_group_count(choice.groups[0])
        writer.add_expert_group_used_count(choice.groups[1])


def _latents(writer: gguf.GGUFWriter, attention: Attention) -> None:
    """The cache has one head, whose values are a part of its keys."""
    latent = attention.cache_elements - attention.rotary_dim
    low = [each.out_features for each in attention.linears if each.name == "q_a_proj"]
    if low:
        writer.add_q_lora_rank(low[0])
    writer.add_kv_lora_rank(latent)
    writer.add_head_count_kv(1)
    writer.add_key_length(attention.cache_elements)
    writer.add_value_length(latent)
    writer.add_key_length_mla(attention.head_dim)
    writer.add_value_length_mla(attention.v_head_dim)


def _recurrence(writer: gguf.GGUFWriter, attention: Attention) -> None:
    if attention.kind == "conv":
        writer.add_shortconv_l_cache(attention.conv_kernel)
        return
    writer.add_ssm_conv_kernel(attention.conv_kernel)
    writer.add_ssm_inner_size(attention.out_width)
    writer.add_ssm_state_size(attention.head_dim)
    writer.add_ssm_time_step_rank(attention.num_attention_heads)
    keys = (attention.conv_channels - attention.out_width) // 2
    writer.add_ssm_group_count(keys // attention.head_dim)


def _settings(writer: gguf.GGUFWriter, model: ModelSpec, name: str) -> None:
    layers = layers_in_order(model)
    attention = next(
        each for layer in layers for each in layer.attentions if each.kind == "softmax"
    )
    writer.add_file_type(0)
    writer.add_vocab_size(model.vocab_size)
    writer.add_tokenizer_model("none")
    writer.add_context_length(model.max_position_embeddings or 2048)
    writer.add_embedding_length(model.hidden_size)
    writer.add_block_count(len(layers))
    moe = next((layer.moe for layer in layers if layer.moe), None)
    dense = next((layer.mlp for layer in layers if layer.mlp), None)
    widths = [each.width for each in (dense, moe.expert if moe else None) if each]
    if all(layer.mlp or layer.moe for layer in layers):
        writer.add_feed_forward_length(widths[0])
    else:
        writer.add_feed_forward_length(
            [widths[0] if layer.mlp or layer.moe else 0 for layer in layers]
        )
    if moe:
        _mixture(writer, model, moe)
        writer.add_leading_dense_block_count(
            next(number for number, layer in enumerate(layers) if layer.moe)
        )
    writer.add_head_count(attention.num_attention_heads)
    if attention.cache_elements < attention.k_width and "kv_b_proj" in {
        linear.name for linear in attention.linears
    }:
        _latents(writer, attention)
    else:
        heads = attention.num_key_value_heads
        by_layer = architecture_of(model).heads_by_layer
        attends = [any(each.kind == "softmax" for each in layer.attentions) for layer in layers]
        writer.add_head_count_kv([heads * each for each in attends] if by_layer else heads)
        writer.add_key_length(attention.head_dim)
        writer.add_value_length(attention.v_head_dim)
    writer.add_rope_dimension_count(attention.rotary_dim or attention.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_layer_norm_eps(1e-6)
    states = [each for layer in layers for each in layer.attentions if each.kind != "softmax"]
    if states:
        _recurrence(writer, states[0])
    if architecture_of(model).embeddings(model) > 1:
        writer.add_num_deepstack_layers(architecture_of(model).embeddings(model) - 1)
    if model.scales_logits:
        writer.add_logit_scale(8.0)
    if name == "gptneox":
        writer.add_parallel_residual(layers[0].parallel)
    if architecture_of(model).positions > 1:
        writer.add_rope_dimension_sections([11, 11, 10, 0])
    if name == "llama4":
        first = next(number for number, layer in enumerate(layers) if layer.moe)
        writer.add_interleave_moe_layer_step(first + 1)
    if architecture_of(model).scales_queries(model, attention):
        writer.add_attn_temperature_scale(0.1)
        writer.add_rope_scaling_orig_ctx_len(8192)
    if attention.position == "none" and name == "granitehybrid":
        writer.add_rope_scaling_finetuned(False)
    if name.startswith("granite"):
        writer.add_embedding_scale(12.0)
        writer.add_residual_scale(0.22)
        writer.add_attention_scale(0.0156)
    windows = {each.sliding_window for layer in layers for each in layer.attentions} - {None}
    if architecture_of(model).windows and windows:
        writer.add_sliding_window(max(each for each in windows if each))
    if model.logit_softcap:
        writer.add_final_logit_softcapping(model.logit_softcap)
    if attention.softcap:
        writer.add_attn_logit_softcapping(attention.softcap)
