"""Single formulas of the ledger against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from whichlora import families
from whichlora.memory import (
    activations,
    allocator,
    evaluation,
    kv_cache,
    layer_passes,
    optimizer,
    quantised_cache,
    weights,
)
from whichlora.memory import allocator_simulator as replay
from whichlora.memory import gradients as trained
from whichlora.memory import loss as logits
from whichlora.memory.entries import Group, Tensor, tensor_bytes
from whichlora.memory.step import TrainingStep
from whichlora.methods import get_method
from whichlora.predict.quantities import ledger, training_step
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.run import RunConfig

MiB = 2**20
LLAMA = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32_000,
}
BERT = {"model_type": "bert", "vocab_size": 30_000, "hidden_size": 768}
T5 = {"model_type": "t5", "d_model": 512, "num_heads": 8, "num_decoder_layers": 6, "d_kv": 64}
CARD = GpuSpec(
    key="card",
    name="card",
    kind="cuda",
    memory_bytes=2**40,
    bandwidth_bytes_per_s=1e12,
    peak_flops_per_s={"bf16": 1e14, "fp16": 1e14, "fp32": 1e13},
    compute_capability="8.0",
)


def job(config: dict[str, object], **settings: object) -> ResolvedRun:
    run = RunConfig.from_dict({"model": "m", "seq_len": 128, **settings})
    return resolve(families.build(config, name="m"), run, CARD)


def test_tensor_bytes_add_up_per_token_per_pair_and_whatever_the_tokens() -> None:
    tensors = (Tensor("a", per_token=2, per_token_pair=3, constant=5), Tensor("b", per_token=7))
    assert tensor_bytes(tensors, tokens=10, span=4) == 10 * (9 + 3 * 4) + 5


def test_rotary_bytes_are_two_tables_of_one_head() -> None:
    llama = job(LLAMA)
    head_dim, width = 64, llama.dtypes.stream_bytes
    assert (
        activations.rotary_bytes(llama.model, llama.dtypes, span=128) == 2 * width * head_dim * 128
    )


def test_zeros_bytes_are_of_cross_attention_alone() -> None:
    t5 = job(T5)
    decoder = next(group.layer for group in t5.model.groups if group.stack == "decoder")
    encoder = next(group.layer for group in t5.model.groups if group.stack == "encoder")
    zeros = activations.zeros_bytes(decoder, t5.dtypes, span=128)
    assert zeros == 8 * t5.dtypes.linear_out_bytes * 128 * 128
    assert activations.zeros_bytes(encoder, t5.dtypes, span=128) == 0


def test_remainder_bytes_count_every_layer_of_a_group() -> None:
    tensor = Tensor("odd", constant=11 * MiB)  # a segment of its own, rounded up to 12 MiB
    group = Group(tensors=(tensor,), tokens=1, span=1, count=3)
    assert allocator.remainder_bytes([group], like=0) == 3 * MiB


def test_evaluation_bytes_hold_neither_gradients_nor_what_a_backward_reads() -> None:
    resolved = job(LLAMA, gradient_checkpointing=True)
    checkpointed = ledger(resolved)
    size = evaluation.evaluation_bytes(training_step(resolved))
    static = sum(entry.num_bytes for entry in checkpointed.moments["optimizer_step"][:5])
    assert static < size < checkpointed.peak_allocated_bytes


def test_trained_cache_elements_are_of_t5_and_of_nested_texts_alone() -> None:
    # over an fp32 stream, which autocast narrows: 2 caches of 2 x 512 in each of 6 layers
    t5, llama = job(T5, precision="bf16"), job(LLAMA)
    assert kv_cache.trained_cache_elements(llama.model, llama.dtypes) == 0
    wide = replace(t5.dtypes, linear_out_bytes=4, compute_bytes=2)
    assert kv_cache.trained_cache_elements(t5.model, wide) == 6 * 2 * 2 * 512
    sees = replace(llama.model, caches_in_training=True)
    assert kv_cache.trained_cache_elements(sees, llama.dtypes) == 0
    assert kv_cache.trained_cache_elements(sees, wide) > 0


def test_checkpointed_passes_keep_the_input_and_saved_passes_what_backward_reads() -> None:
    llama = job(LLAMA)
    step = TrainingStep(
        model=llama.model,
        run=replace(llama.run, gradient_checkpointing=False),
        dtypes=llama.dtypes,
        method=llama.method,
        gpu=CARD,
        targets=llama.targets,
        trainer=llama.trainer,
        batch_size=1,
        seq_len=128,
        r=8,
    )
    common = {"masks": step.masks.shared, "sized": step.sized}
    few = layer_passes.checkpointed_passes(llama.model, step.layers, **common)
    every = layer_passes.saved_passes(
        llama.model,
        step.layers,
        llama.dtypes,
        freezes_input=True,
        num_idle=0,
        unnamed_mask_bytes=0,
        **common,
    )
    assert few.saved == (128 * 1024 * llama.dtypes.stream_bytes,)
    assert every.saved == tuple(layer.saved for layer in step.layers)
    (layer,) = step.layers  # the first keeps less, its input being frozen
    assert every.groups[-1].num_bytes - step.masks.shared.num_bytes == -layer.unsaved < 0


def test_logit_width_is_the_vocabulary_also_of_an_encoder() -> None:
    assert logits.logit_width(job(LLAMA).model) == 32_000
    bert = job(BERT, method="full").model
    assert logits.logit_width(bert) == 30_000
    assert logits.encoder_bytes(bert, tokens=10, compute_bytes=2) == 10 * 30_000 * 2


def test_loss_element_bytes_are_fp32_of_a_decoder() -> None:
    llama = job(LLAMA, precision="bf16-no-autocast")
    assert logits.loss_element_bytes(llama.model, llama.dtypes) == 4


@pytest.mark.parametrize(("method", "copied"), [("qlora", 2 * 32_000 * 1024), ("lora", 0)])
def test_head_copy_bytes_are_of_a_prepared_base_alone(method: str, copied: int) -> None:
    llama = job(LLAMA, method=method)
    assert logits.head_copy_bytes(llama.model, llama.dtypes, loss_head="hf") == copied


@pytest.mark.parametrize(
    ("name", "states"), [("adamw_torch", 2), ("lion", 1), ("sgd", 0), ("paged_adamw_8bit", 0)]
)
def test_num_wide_states_are_those_as_large_as_a_parameter(name: str, states: int) -> None:
    assert optimizer.num_wide_states(name) == states


def test_stored_by_earlier_layers_leaves_out_one_of_four() -> None:
    serving = job(LLAMA, phase="inference", kv_cache="quantized")
    stored = serving.run.cache_format
    assert stored is not None
    sizes = {"batch_size": 1, "tokens": 64, "element_bytes": 2}
    every = kv_cache.cache_bytes(serving.model, kv_cache="quantized", stored=stored, **sizes)
    earlier = quantised_cache.stored_by_earlier_layers(serving.model, stored, **sizes)
    assert earlier == every * 3 // 4


@pytest.mark.parametrize(("asked", "counted"), [(1, 512), (512, 512), (513, 1024)])
def test_rounded_is_a_multiple_of_512(asked: int, counted: int) -> None:
    assert replay.rounded(asked) == counted


@pytest.mark.parametrize(
    ("asked", "segment"), [(512, 2 * MiB), (2 * MiB, 20 * MiB), (11 * MiB, 12 * MiB)]
)
def test_segment_bytes_follow_the_size_of_the_request(asked: int, segment: int) -> None:
    assert replay.segment_bytes(asked) == segment


def test_gradient_bytes_are_as_wide_as_the_parameters() -> None:
    tensors = [
        trained.Trained(rows=3, width=5, param_bytes=4, count=2),
        trained.Trained(rows=1, width=7, param_bytes=2),
    ]
    assert trained.gradient_bytes(tensors) == 4 * 15 * 2 + 2 * 7


def test_unwanted_gradient_bytes_are_none_of_plain_linears() -> None:
    llama = job(LLAMA)
    (layer, _), *_ = llama.model.layers()
    lora = get_method("lora")
    assert trained.unwanted_gradient_bytes(layer, ("q_proj",), lora, llama.dtypes) == 0


def test_rotary_table_bytes_are_of_old_versions_alone() -> None:
    qwen = LLAMA | {"model_type": "qwen2", "max_position_embeddings": 2048}
    old, new = job(qwen, libraries={"transformers": "4.38.0"}), job(qwen)
    assert weights.rotary_table_bytes(new.model, new.dtypes) == 0
    tables = 4 * 2 * 2048 * 64  # of each layer, for every position
    assert weights.rotary_table_bytes(old.model, old.dtypes) == tables * old.dtypes.compute_bytes
