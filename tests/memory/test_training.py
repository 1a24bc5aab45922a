"""The memory ledger: golden values, properties, and single formulas by hand."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from devices import A100, CPU
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from strategies import DEVICES, finetune_runs, inference_runs

from whichlora import families
from whichlora.memory import allocator, kv_cache, loading, moments, optimizer, weights
from whichlora.memory import inference as generation
from whichlora.memory import loss as logits
from whichlora.memory.entries import Kind
from whichlora.memory.gradients import Trained, trained_biases, trained_tensors
from whichlora.memory.training import PARTS, RETURNED, Ledger, least_parts, trained_params
from whichlora.memory.worst_layer import after
from whichlora.predict.notes import notes_on
from whichlora.predict.parts import part_bytes
from whichlora.predict.quantities import ledger, training_step
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.run import Quant, RunConfig
from whichlora.store.models import find_model
from whichlora.symbolic import kernels
from whichlora.units import GiB, MiB

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "golden" / "memory_reference.json").read_text(encoding="utf-8")
)
STATIC_PARTS = ("weights", "adapters", "gradients", "optimizer_states")
LLAMA_3_8B = "meta-llama/Llama-3.1-8B"
INPUTS = "token ids, labels, mask, rotary tables"


@cache
def model(name: str) -> ModelSpec:
    found = find_model(name)
    assert found is not None
    return found


def job(run: RunConfig, gpu: GpuSpec = A100, spec: ModelSpec | None = None) -> ResolvedRun:
    return resolve(spec or model(run.model), run, gpu)


def peak(run: RunConfig, gpu: GpuSpec = A100) -> int:
    return int(ledger(job(run, gpu)).peak_allocated_bytes)


def test_least_parts_are_alive_together_at_the_loss() -> None:
    llama = job(RunConfig(model=LLAMA_3_8B, method="qlora", gradient_checkpointing=False, r=64))
    step = training_step(llama, batch_size=4, seq_len=512, r=8)
    least, moments = least_parts(step), ledger(llama, batch_size=4, seq_len=512).moments
    entries = (*moments["loss_forward"], *moments["loss_backward"])
    for part, num_bytes in least.items():
        alive = {entry.what: entry.num_bytes for entry in entries if entry.part == part}
        assert 0.9 * sum(alive.values()) < 2 * num_bytes
        assert num_bytes <= sum(alive.values())


# --- golden values --------------------------------------------------------------------------


def dynamic_bytes(found: Ledger) -> int:
    """Peak of what a step adds to weights, adapters, gradients and states, inputs left out."""
    return max(
        sum(
            entry.num_bytes
            for entry in entries
            if entry.part not in STATIC_PARTS
            and entry.what != INPUTS
            and entry.fact is not allocator.REMAINDERS  # of blocks; these are live bytes
        )
        for entries in found.moments.values()
    )


@pytest.mark.parametrize(
    "row",
    GOLDEN["activations"]["rows"],
    ids=lambda row: f"{row['model']}-{row['precision']}-{row['gradient_checkpointing']}",
)
def test_activations_are_those_of_the_traced_models(row: dict[str, Any]) -> None:
    run = RunConfig(
        model=row["model"],
        precision=row["precision"],
        gradient_checkpointing=row["gradient_checkpointing"],
        seq_len=2048,
        r=16,
    )
    tolerance = GOLDEN["activations"]["relative_tolerance"]
    assert dynamic_bytes(ledger(job(run))) / GiB == pytest.approx(row["gib"], rel=tolerance)


def bytes_per_prompt_token(spec: ModelSpec) -> float:
    def prefill(prompt_len: int) -> int:
        run = RunConfig(
            model="m",
            phase="inference",
            precision="bf16",
            attn="flash_attention_2",
            prompt_len=prompt_len,
        )
        return int(ledger(job(run, spec=spec)).moment_bytes("prefill"))

    return (prefill(31_000) - prefill(14_000)) / 17_000


def block_bytes(spec: ModelSpec) -> float:
    return float(
        kv_cache.cache_bytes(spec, batch_size=1, tokens=1, kv_cache="vllm", element_bytes=2)
    )


def bytes_per_trained_token(spec: ModelSpec) -> float:
    run = RunConfig(
        model="m", seq_len=4096, target_modules=("q_proj", "k_proj", "v_proj", "o_proj")
    )
    few, many = (
        ledger(job(replace(run, batch_size=size), spec=spec)).peak_allocated_bytes
        for size in (4, 8)
    )
    return float(many - few) / (4 * 4096)


FORMULAS = {
    "prefill, bytes per prompt token": bytes_per_prompt_token,
    "vLLM block of 16 tokens, bytes": block_bytes,
    "LoRA step with checkpointing, allocated bytes per token": bytes_per_trained_token,
}


@pytest.mark.parametrize("row", GOLDEN["published"]["rows"], ids=lambda row: row["what"])
def test_slopes_are_those_that_others_measured(row: dict[str, Any]) -> None:
    named = isinstance(row["model"], str)
    spec = model(row["model"]) if named else families.build(row["model"], name="PowerLM-3B")
    predicted = FORMULAS[row["what"]](spec)
    assert predicted == pytest.approx(row["published"], rel=row["relative_tolerance"])


# --- properties -----------------------------------------------------------------------------


@given(run=st.one_of(finetune_runs(), inference_runs()), gpu=DEVICES)
@settings(max_examples=200)
def test_parts_sum_to_the_total_and_none_is_negative(run: RunConfig, gpu: GpuSpec) -> None:
    one = job(run, gpu)
    found = ledger(one)
    for moment, entries in found.moments.items():
        assert {entry.part for entry in entries} <= set(PARTS)
        assert all(entry.num_bytes >= 0 for entry in entries)
        parts = part_bytes(one, found, moment)
        live = sum(parts[name] for name in PARTS) - parts["allocator"] - parts["context"]
        assert 0 <= parts[RETURNED] <= parts["allocator"]
        assert live == found.moment_bytes(moment) <= found.peak_allocated_bytes


@given(run=st.one_of(finetune_runs(), inference_runs()), gpu=DEVICES)
@settings(max_examples=200)
def test_the_members_of_an_entry_add_up_to_it(run: RunConfig, gpu: GpuSpec) -> None:
    for entries in ledger(job(run, gpu)).moments.values():
        for entry in entries:
            if entry.groups:
                assert sum(group.num_bytes for group in entry.groups) == entry.num_bytes
            for one in (one for group in entry.groups for one in group.tensors):
                if one.element_bytes:
                    sizes = (one.per_token, one.per_token_pair, one.constant)
                    assert all(int(size) % one.element_bytes == 0 for size in sizes), one


@given(run=st.one_of(finetune_runs(), inference_runs()), gpu=DEVICES)
def test_every_entry_says_what_it_is_why_it_lives_and_who_says_so(
    run: RunConfig, gpu: GpuSpec
) -> None:
    dtypes = {field.name for field in fields(Dtypes)}
    for entries in ledger(job(run, gpu)).moments.values():
        assert len({entry.what for entry in entries}) == len(entries)
        for entry in entries:
            fact = entry.fact
            assert all((fact.what, fact.shape, fact.dtype, fact.count, fact.why, fact.source))
            assert fact.kind in get_args(Kind)
            assert fact.part in PARTS
            assert not fact.dtype.endswith("_bytes") or fact.dtype in dtypes


@given(
    run=finetune_runs(),
    gpu=DEVICES,
    sizes=st.lists(
        st.tuples(st.integers(1, 64), st.integers(1, 4096), st.integers(1, 128)), min_size=1
    ),
)
@settings(max_examples=50)
def test_arrays_of_candidates_get_what_each_gets_alone_in_training(
    run: RunConfig, gpu: GpuSpec, sizes: list[tuple[int, int, int]]
) -> None:
    one = job(run, gpu)
    batch_size, seq_len, r = np.array(sizes).T
    together = ledger(one, batch_size=batch_size, seq_len=seq_len, r=r)
    alone = [ledger(one, batch_size=b, seq_len=s, r=k) for b, s, k in sizes]
    assert together.peak_allocated_bytes.tolist() == [x.peak_allocated_bytes for x in alone]
    idle = np.broadcast_to(together.idle_bytes, batch_size.shape)
    assert idle.tolist() == [x.idle_bytes for x in alone]


@given(
    run=inference_runs(),
    gpu=DEVICES,
    sizes=st.lists(
        st.tuples(
            st.integers(1, 64), st.integers(1, 4096), st.integers(1, 1024), st.integers(1, 128)
        ),
        min_size=1,
    ),
)
@settings(max_examples=50)
def test_arrays_of_candidates_get_what_each_gets_alone_in_inference(
    run: RunConfig, gpu: GpuSpec, sizes: list[tuple[int, int, int]]
) -> None:
    one = job(run, gpu)
    batch_size, prompt_len, new, r = np.array(sizes).T
    together = ledger(one, batch_size=batch_size, prompt_len=prompt_len, max_new_tokens=new, r=r)
    alone = [ledger(one, batch_size=b, prompt_len=p, max_new_tokens=n, r=k) for b, p, n, k in sizes]
    assert together.peak_allocated_bytes.tolist() == [x.peak_allocated_bytes for x in alone]


@pytest.mark.slow
def test_a_million_candidates_are_one_call() -> None:
    one = job(RunConfig(model="HuggingFaceTB/SmolLM2-135M"))
    batch_size, seq_len, r = np.meshgrid(
        np.arange(1, 101), np.arange(32, 32 * 101, 32), np.arange(1, 101), indexing="ij"
    )
    peaks = ledger(one, batch_size=batch_size, seq_len=seq_len, r=r).peak_allocated_bytes
    assert peaks.shape == (100, 100, 100)
    assert peaks.dtype == np.int64
    assert (np.diff(peaks, axis=0) >= 0).all()


@given(run=finetune_runs(method="lora"), gpu=DEVICES)
def test_dora_needs_more_than_lora(run: RunConfig, gpu: GpuSpec) -> None:
    assert peak(replace(run, method="dora"), gpu) > peak(run, gpu)


@given(run=finetune_runs(method="lora", gradient_checkpointing=True), gpu=DEVICES)
def test_checkpointing_never_keeps_more_of_the_layers(run: RunConfig, gpu: GpuSpec) -> None:
    def kept(one: RunConfig) -> int:
        found = ledger(job(one, gpu)).moments["loss_backward"]
        return sum(entry.num_bytes for entry in found if entry.part == "activations")

    assume(run.seq_len > 1)
    assert kept(run) <= kept(replace(run, gradient_checkpointing=False))


@given(run=finetune_runs(optimizer="adamw_torch"), gpu=DEVICES)
def test_the_fused_optimizer_never_needs_more(run: RunConfig, gpu: GpuSpec) -> None:
    assert peak(replace(run, optimizer="adamw_torch_fused"), gpu) <= peak(run, gpu)


# T5's cross attention adds zeros where there is no mask: the decoder's, gone in the encoder's
# backward, where the peak of so few tokens is
SHORT_T5 = RunConfig(
    model="google-t5/t5-small",
    method="lora",
    precision="fp32",
    r=9,
    seq_len=5,
    gradient_checkpointing=False,
)


@given(run=finetune_runs(method="lora", precision="fp32", padding="none", attn="sdpa"), gpu=DEVICES)
@example(run=SHORT_T5, gpu=A100)
def test_a_mask_never_makes_a_step_smaller(run: RunConfig, gpu: GpuSpec) -> None:
    assume(run.seq_len > 1)  # one token has nothing beside it to mask
    # before torch 2.14 a mask spares grouped keys in fp32 the math kernel
    run = replace(run, libraries=(("torch", "2.14.0"),))
    assert peak(replace(run, padding="padded"), gpu) >= peak(run, gpu)


# --- single formulas ------------------------------------------------------------------------


@pytest.mark.parametrize(("quant", "bits"), [("nf4", 4.5), ("fp4", 4.5), ("nf4-dq", 4.127)])
def test_four_bits_match_the_published_bits_per_weight(quant: str, bits: float) -> None:
    size = weights.quantised_bytes(2**28, quant, out_features=2**14)
    assert 8 * size / 2**28 == pytest.approx(bits, abs=1e-3)


@given(num_weights=st.integers(65, 10**10))
def test_double_quantisation_is_never_larger(num_weights: int) -> None:
    double = weights.quantised_bytes(num_weights, "nf4-dq", out_features=1)
    assert double <= weights.quantised_bytes(num_weights, "nf4", out_features=1)


def test_the_cache_of_llama_3_takes_128_kib_per_token() -> None:
    size = kv_cache.cache_bytes(
        model("meta-llama/Meta-Llama-3-8B"),
        batch_size=1,
        tokens=1,
        kv_cache="dynamic",
        element_bytes=2,
    )
    assert size == 2 * 32 * 8 * 128 * 2  # keys and values, layers, heads, head_dim, bytes


@pytest.mark.parametrize(
    ("engine", "tokens", "kept"),
    [("dynamic", 17, 17), ("vllm", 17, 32), ("vllm", 32, 32), ("paged", 257, 512)],
)
def test_an_engine_keeps_whole_blocks(engine: str, tokens: int, kept: int) -> None:
    layer = model("meta-llama/Meta-Llama-3-8B").groups[0].layer
    assert kv_cache.kept_tokens(layer, tokens, kv_cache=engine) == kept


def test_a_sliding_layer_keeps_its_window() -> None:
    sliding = next(
        layer
        for layer, _ in model("google/gemma-2-2b").layers()
        if layer.attentions[0].sliding_window == 4096
    )
    assert kv_cache.kept_tokens(sliding, 8192, kv_cache="dynamic") == 4096
    assert kv_cache.kept_tokens(sliding, 8192, kv_cache="static") == 4096


@pytest.mark.parametrize("batch_size", [1, 32])
def test_a_forward_beside_the_last_output_needs_the_logits_of_the_report_and_its_caches(
    batch_size: int,
) -> None:
    """Gemma-2B loaded in fp32, a prompt of 32, as the code of early 2024 runs it."""
    run = RunConfig(
        model="google/gemma-2b",
        phase="inference",
        precision="fp32",
        batch_size=batch_size,
        prompt_len=32,
        max_new_tokens=2,
        libraries=(("transformers", "4.40.2"),),
    )
    moments = ledger(job(run)).moments
    forward = [entry for entry in moments["first_logits"] if entry.part != "weights"]
    last_output = [
        *(entry for entry in forward if entry.fact is generation.PROMPT_CACHE),
        *(entry for entry in moments["second_token"] if entry.fact is generation.HELD_LOGITS),
    ]
    alive = [*forward, *last_output]
    scores = sum(entry.num_bytes for entry in alive if entry.part == "logits_and_loss")
    assert scores == batch_size * 62.5 * MiB  # what the report's figure shows
    assert sum(entry.num_bytes for entry in alive) == batch_size * 65 * MiB


def test_generation_keeps_logits_of_one_position() -> None:
    spec = model("google/gemma-2b")
    size = logits.generation_bytes(spec, batch_size=1, compute_bytes=2)
    assert size == 10 * 256_000


@pytest.mark.parametrize(
    ("name", "param_bytes", "per_param"),
    [
        ("adamw_torch_fused", 4, 8),
        ("adamw_torch_fused", 2, 4),
        ("adamw_8bit", 4, 2 + 8 / 256),
        ("paged_adamw_8bit", 4, 8 / 256),  # only the scales
        ("paged_adamw_32bit", 2, 0),
        ("lion", 4, 4),
        ("lion", 2, 4),  # fp32 whatever the parameter is
        ("sgd", 4, 0),
    ],
)
def test_optimizer_states_per_parameter(name: str, param_bytes: int, per_param: float) -> None:
    size = optimizer.state_bytes(
        [Trained(rows=1000, width=1024, param_bytes=param_bytes)],
        optimizer=name,
        device_kind="cuda",
    )
    assert size == per_param * 1_024_000


@pytest.mark.parametrize(
    ("tensor", "per_param"),
    [
        (Trained(rows=1, width=4095, param_bytes=4), 8),
        (Trained(rows=1000, width=1024, param_bytes=4, is_embedding=True), 8),
    ],
)
def test_8_bit_optimizers_keep_32_bits_for_embeddings_and_small_tensors(
    tensor: Trained, per_param: int
) -> None:
    size = optimizer.state_bytes([tensor], optimizer="adamw_8bit", device_kind="cuda")
    assert size == per_param * tensor.num_params


@pytest.mark.parametrize(
    ("name", "width", "codes"),
    [
        ("adamw_8bit", 4096, 2 * 4096),
        ("paged_adamw_8bit", 99_999, 2 * 99_999),
        ("paged_adamw_8bit", 100_000, 0),  # on the host
    ],
)
def test_from_4096_elements_states_are_8_bit_and_from_100_000_on_the_host(
    name: str, width: int, codes: int
) -> None:
    """bitsandbytes 0.50.2: `min_8bit_size` and `get_state_buffer`."""
    tensor = Trained(rows=1, width=width, param_bytes=4)
    size = optimizer.state_bytes([tensor], optimizer=name, device_kind="cuda")
    assert size == codes + 2 * 4 * -(-width // 256)


@pytest.mark.parametrize(("width", "num_bytes"), [(99_999, 8 * 99_999), (100_000, 0)])
def test_from_100_000_elements_paged_32_bit_states_are_on_the_host(
    width: int, num_bytes: int
) -> None:
    tensor = Trained(rows=1, width=width, param_bytes=2)
    paged = {"optimizer": "paged_adamw_32bit", "device_kind": "cuda"}
    assert optimizer.state_bytes([tensor], **paged) == num_bytes


@pytest.mark.parametrize("quant", ["none", "nf4"])
def test_a_bias_stays_in_16_bit_beside_its_matrix(quant: Quant) -> None:
    """Qwen 2.5 has biases at queries, keys and values, and none elsewhere."""
    found = job(RunConfig(model="Qwen/Qwen2.5-0.5B", phase="inference", quant=quant))
    layer = found.model.groups[0].layer
    for linear in layer.linears:
        without = weights.linear_bytes(replace(linear, bias=False), found.dtypes)
        beside = weights.linear_bytes(linear, found.dtypes) - without
        assert beside == (2 * linear.out_features if linear.bias else 0)
    assert {linear.bias for linear in layer.linears} == {True, False}


@pytest.mark.parametrize(("param_bytes", "per_param"), [(4, 8), (2, 16)])
def test_adafactor_makes_two_fp32_tensors_of_its_largest_parameter_and_copies_of_a_narrow_one(
    param_bytes: int, per_param: int
) -> None:
    tensors = [Trained(rows=8, width=width, param_bytes=param_bytes) for width in (64, 4096)]
    size = optimizer.step_temporary_bytes(tensors, optimizer="adafactor", foreach=True)
    assert size == per_param * 8 * 4096


def test_adafactor_keeps_sums_over_rows_and_columns() -> None:
    matrix = Trained(rows=8, width=4096, param_bytes=2)
    vector = Trained(rows=1, width=4096, param_bytes=2)
    size = optimizer.state_bytes([matrix, vector], optimizer="adafactor", device_kind="cuda")
    assert size == 4 * (8 + 4096) + 4 * 4096


@given(run=finetune_runs())
def test_the_trained_tensors_hold_the_trained_parameters(run: RunConfig) -> None:
    found = job(run)
    what = found.model, found.targets, found.method, run.r
    saved = {"modules_to_save": run.modules_to_save}
    tensors = trained_tensors(*what, dtypes=found.dtypes, **saved)
    assert sum(one.num_params * one.count for one in tensors) == trained_params(*what, **saved)


@pytest.mark.parametrize(("quant", "bits"), [("gptq-int4", 4), ("awq-int4", 4), ("gptq-int8", 8)])
def test_a_smaller_group_costs_a_scale_and_a_zero_each(quant: str, bits: int) -> None:
    coarse, fine = (
        weights.quantised_bytes(4096 * 4096, quant, out_features=4096, group_size=size)
        for size in (128, 32)
    )
    more_groups = 4096 * 4096 // 32 - 4096 * 4096 // 128
    assert fine - coarse == more_groups * (2 + bits / 8)


def test_gptq_weights_that_torch_expands_stay_until_the_backward_but_for_checkpoints() -> None:
    run = RunConfig(model=LLAMA_3_8B, method="qlora", quant="gptq-int4", batch_size=1, seq_len=512)
    by_triton = replace(run, libraries=(("gptqmodel", "2.0.0"),))
    layers = sum(group.layer.num_params * group.count for group in model(LLAMA_3_8B).groups)
    for checkpoints in (False, True):
        kept, freed = (
            peak(replace(each, gradient_checkpointing=checkpoints)) for each in (run, by_triton)
        )
        assert kept - freed == pytest.approx(0 if checkpoints else 2 * layers, abs=0.02 * layers)


@given(run=finetune_runs() | inference_runs())
def test_expandable_segments_never_leave_more_idle_and_keep_what_lives(run: RunConfig) -> None:
    unsplit = (allocator.REMAINDERS, loading.UNSPLIT_WEIGHTS)
    plain, joined = (ledger(job(replace(run, expandable_segments=on))) for on in (False, True))
    for moment, entries in plain.moments.items():
        lives = [one for one in entries if one.fact not in unsplit]
        others = joined.moments[moment]
        assert [one for one in others if one.fact not in unsplit] == lives
        assert all(one.num_bytes == 0 for one in others if one.fact in unsplit)
    assert joined.idle_bytes <= plain.idle_bytes


@pytest.mark.parametrize("settings", [{"use_rslora": True}, {"loraplus_lr_ratio": 16.0}], ids=str)
def test_rslora_and_loraplus_take_what_lora_takes_and_say_so(settings: dict[str, Any]) -> None:
    run = RunConfig(model=LLAMA_3_8B)
    plain, other = job(run), job(replace(run, **settings))
    assert ledger(other) == ledger(plain)
    assert any("the bytes and the time of plain LoRA" in note for note in notes_on(other))
    assert not any("plain LoRA" in note for note in notes_on(plain))


@pytest.mark.parametrize(
    ("modules", "vocabularies"), [((), 0), (("embed_tokens",), 1), (("embed_tokens", "lm_head"), 2)]
)
def test_a_saved_module_costs_its_copy_a_gradient_and_two_states(
    modules: tuple[str, ...], vocabularies: int
) -> None:
    run = RunConfig(
        model=LLAMA_3_8B,
        optimizer="adamw_torch_fused",
        precision="bf16-pure",
        expandable_segments=True,  # no remainders of blocks
    )
    step = "optimizer_step"
    plain = ledger(job(run)).moment_bytes(step)
    saved = ledger(job(replace(run, modules_to_save=modules))).moment_bytes(step)
    assert saved - plain == vocabularies * 128_256 * 4096 * 2 * (1 + 1 + 2)


def test_layers_after_a_place_are_those_that_stand_there() -> None:
    spec = model("google/gemma-3-1b-pt")  # 26 layers, every sixth of them full
    assert [group.positions[:2] for group in spec.groups] == [(0, 1), (5, 11)]
    sliding, full = 1, 100
    assert after(spec, [sliding, full], -1) == 22 * sliding + 4 * full
    assert after(spec, [sliding, full], 5) == 17 * sliding + 3 * full
    assert after(spec, [sliding, full], 25) == 0


def test_the_first_layer_of_another_kind_goes_backward_under_the_gradients_after_it() -> None:
    run = RunConfig(model="google/gemma-3-1b-pt", method="full", precision="bf16-pure")
    moment = ledger(job(run)).moments["layer_5_backward"]
    (left,) = (int(x.num_bytes) for x in moment if x.fact is moments.LATER_LAYERS_GRADIENTS)
    spec = model(run.model)
    head = spec.vocab_size * spec.hidden_size
    sliding, full = (group.layer.num_params for group in spec.groups)
    assert left == 2 * (head + 17 * sliding + 3 * full)


def test_a_tower_is_quantised_and_adapted_though_no_text_passes_it() -> None:
    run = RunConfig(model="google/gemma-4-26B-A4B", method="qlora", r=8)
    one = job(run)
    idle = one.model.idle_linears
    # of the nn.Linear modules that transformers 5.23 builds
    assert sum(linear.num_params for linear in idle) == 549_070_848
    adapters = 8 * sum(x.count * (x.in_features + x.out_features) for x in idle) * 4
    named = job(replace(run, target_modules=("q_proj",), freeze_vision_tower=True))
    texts = replace(one.model, idle_linears=())
    for target, expected in ((one, adapters), (named, 0)):
        static = {
            spec is texts: sum(
                int(entry.num_bytes)
                for entry in ledger(replace(target, model=spec)).moments["optimizer_step"]
                if entry.part == "adapters"
            )
            for spec in (target.model, texts)
        }
        assert static[False] - static[True] == expected


def test_a_window_costs_a_mask_only_when_it_is_full() -> None:
    run = RunConfig(model="google/gemma-3-1b-pt", precision="bf16-pure")
    one = job(run)
    sliding = next(
        attention
        for layer, _ in one.model.layers()
        for attention in layer.attentions
        if attention.sliding_window
    )
    window = sliding.sliding_window
    masked = kernels.is_masked(sliding, one.dtypes, np.array([window - 1, window]))
    assert masked.tolist() == [0, 1]


def test_dropout_of_attention_costs_a_cpu_its_fused_kernel() -> None:
    run = RunConfig(model="openai-community/gpt2", precision="fp32")
    attention = model(run.model).groups[0].layer.attentions[0]
    assert attention.dropout == 0.1
    assert kernels.attention_kernel(attention, job(run, CPU).dtypes, masked=False) == "math"
    assert kernels.attention_kernel(attention, job(run, A100).dtypes, masked=False) == "efficient"


@pytest.mark.parametrize(
    ("num_bytes", "block_bytes", "segments"),
    [
        (9 * MiB, MiB, 10 * MiB),  # small blocks share 2 MiB
        (9 * MiB, MiB + 512, 20 * MiB),
        (21 * MiB, 10 * MiB - 512, 40 * MiB),
        (21 * MiB, 10 * MiB, 22 * MiB),  # a segment of its own
    ],
)
def test_a_small_model_reserves_whole_segments(
    num_bytes: int, block_bytes: int, segments: int
) -> None:
    assert allocator.in_whole_segments(num_bytes, block_bytes) == segments


def test_the_smallest_encoder_reserves_megabytes_not_tens_of_them() -> None:
    """A replayed trace of ALBERT in 16 bit reserves 48 MiB, 40 of them allocated."""
    run = RunConfig(
        model="albert/albert-base-v2", phase="inference", precision="fp16", prompt_len=309
    )
    found = ledger(job(run, A100))
    reserved = found.peak_allocated_bytes + found.idle_bytes - found.workspace_bytes
    assert reserved == pytest.approx(48 * MiB, rel=0.05)


def test_two_stacks_add_the_encoders_part_of_a_tied_gradient_in_place() -> None:
    run = RunConfig(model="google-t5/t5-small", method="full", precision="fp32", seq_len=8)
    found = ledger(job(run, CPU))

    def tied(moment: str) -> int:
        return sum(
            int(one.num_bytes)
            for one in found.moments[moment]
            if one.fact is moments.TIED_GRADIENTS
        )

    vocabulary = 32_128 * 512 * 4
    assert tied("decoder_embedding_backward") == 2 * vocabulary
    assert tied("embedding_backward") == vocabulary


def test_an_encoder_waits_while_the_decoder_goes_backward() -> None:
    run = RunConfig(model="google-t5/t5-small", method="full", precision="fp32", seq_len=8)
    found = ledger(job(run, CPU)).moments
    later = {
        name: sum(int(x.num_bytes) for x in found[name] if x.fact is moments.LATER_LAYERS_GRADIENTS)
        for name in ("first_decoder_layer_backward", "first_layer_backward")
    }
    assert later["first_decoder_layer_backward"] < later["first_layer_backward"]


@pytest.mark.parametrize(
    ("bias", "trained"),
    # per layer: queries with keys and values, their projection, the MLP's two, two norms
    [
        ("none", 0),
        ("lora_only", 12 * 2304),
        ("all", 12 * (2304 + 768 + 3072 + 768 + 2 * 768) + 768),
    ],
)
def test_gpt_2_has_102_144_biases_to_train(bias: str, trained: int) -> None:
    found = trained_biases(model("openai-community/gpt2"), ("c_attn",), bias, 4)
    assert sum(one.num_params * one.count for one in found) == trained


@pytest.mark.parametrize(
    ("first", "last", "moved_mib"),
    [
        (1024, 4096, 0),  # segments that others can use
        (5120, 7168, 2 * 12),  # 10 MiB to 14 MiB in steps of 2: two, of 12 MiB on average
    ],
)
def test_a_growing_cache_leaves_its_old_segments_behind(
    first: int, last: int, moved_mib: int
) -> None:
    """Llama 3 8B: a token takes 2 KiB of keys, and of values, in each of 32 layers."""
    size = kv_cache.left_behind_bytes(
        model(LLAMA_3_8B), batch_size=1, first_tokens=first, last_tokens=last, element_bytes=2
    )
    assert size == 2 * 32 * moved_mib * MiB


@pytest.mark.parametrize(("precision", "per_weight"), [("bf16-pure", 4 + 2), ("fp32", 4)])
def test_a_trained_head_of_the_fused_loss_has_a_gradient_in_fp32(
    precision: Any, per_weight: int
) -> None:
    run = RunConfig(model=LLAMA_3_8B, method="full", loss_head="trl-fused", precision=precision)
    found = job(run)
    what = found.model, found.dtypes, found.trainer
    trained, kept = (
        logits.loss_backward_bytes(*what, tokens=100, loss_head="trl-fused", trained_head=width)
        for width in (found.dtypes.head_bytes, 0)
    )
    selected = (
        100 * found.dtypes.stream_bytes * 4096
    )  # of a trained head they are among what is saved for it
    assert trained - kept == per_weight * 128_256 * 4096 - selected


@pytest.mark.parametrize(("transformers", "caches"), [("4.41.0", 2), ("4.43.0", 1)])
@pytest.mark.parametrize("new_tokens", [1, 2])
def test_a_cache_of_tuples_is_there_twice_while_it_grows(
    transformers: str, caches: int, new_tokens: int
) -> None:
    run = RunConfig(
        model="meta-llama/Meta-Llama-3-8B",
        phase="inference",
        prompt_len=1000,
        max_new_tokens=new_tokens,
        libraries=(("transformers", transformers),),
    )
    entries = ledger(job(run)).moments["second_token"]
    (size,) = (entry.num_bytes for entry in entries if entry.fact is generation.TWO_CACHES)
    assert size == (caches if new_tokens > 1 else 1) * 1000 * 128 * 1024


def test_the_fused_loss_holds_one_tile_of_logits_beside_its_hidden_states() -> None:
    """4,096 tokens by 32,768 words at once; per token the last norm's result and its selected rows,
    two bytes an entry each, and 40 more.
    """
    found = job(RunConfig(model=LLAMA_3_8B, loss_head="trl-fused", precision="bf16-pure"))
    for tokens in (100, 10_000):
        size = logits.loss_forward_bytes(
            found.model, found.dtypes, found.trainer, tokens=tokens, loss_head="trl-fused"
        )
        assert size == min(tokens, 4096) * 32_768 * 2 + tokens * (2 * 2 * 4096 + 40)


def test_adafactor_makes_two_stages_of_one_parameter_and_copies_of_a_narrow_one() -> None:
    wide = Trained(rows=8, width=100, param_bytes=4)
    narrow = Trained(rows=8, width=100, param_bytes=2)
    absent = Trained(rows=8, width=1000, param_bytes=4, count=0)
    for tensor, size in ((wide, 2 * 4 * 800), (narrow, 4 * 4 * 800)):
        tensors = [tensor, absent]
        found = optimizer.step_temporary_bytes(tensors, optimizer="adafactor", foreach=True)
        assert found == size


@pytest.mark.parametrize(
    ("kv_cache_name", "size"),
    [("dynamic", 2 * 100 * 8 * 128 * 2), ("static", 0), ("vllm", 0)],
)
def test_only_a_dynamic_cache_copies_a_layers_keys_to_append_a_token(
    kv_cache_name: str, size: int
) -> None:
    found = kv_cache.append_transient_bytes(
        model(LLAMA_3_8B), batch_size=2, tokens=100, kv_cache=kv_cache_name, element_bytes=2
    )
    assert found == size


@pytest.mark.parametrize(("tokens", "halves"), [(100, 200), (4096, 8192), (9000, 9000)])
def test_a_sliding_layer_joins_keys_and_values_of_its_window_before_it_drops_either(
    tokens: int, halves: int
) -> None:
    """Gemma 2: full layers beside layers with a window of 4,096 tokens, 4 heads of 256."""
    found = kv_cache.append_transient_bytes(
        model("google/gemma-2-2b"),
        batch_size=2,
        tokens=tokens,
        kv_cache="dynamic",
        element_bytes=2,
    )
    assert found == 2 * halves * 4 * 256 * 2


def test_layers_of_the_last_step_run_beside_the_scores_before_and_logits_come_after_them() -> None:
    run = RunConfig(model=LLAMA_3_8B, phase="inference", batch_size=8, max_new_tokens=10)
    assert held(run, "decode", generation.LAST_SCORES) == 8 * 128_256 * 4
    assert held(run, "last_logits", generation.LAST_LOGITS) == 8 * 128_256 * (2 + 4 + 4)
    after = {entry.fact for entry in ledger(job(run)).moments["last_logits"]}
    assert generation.TOKEN_FORWARD not in after
    assert generation.APPENDED not in after


def test_a_bias_of_the_logits_is_a_buffer_beside_the_parameters() -> None:
    bart = job(RunConfig(model="facebook/bart-base", precision="bf16-pure"))
    without = replace(bart.model, biases_logits=False)
    buffers = [weights.weight_bytes(x, bart.dtypes)["buffers"] for x in (bart.model, without)]
    assert buffers[0] - buffers[1] == 50_265 * 2


@pytest.mark.parametrize(
    ("kind", "capability", "size"),
    [
        ("cuda", "8.0", 8_519_680),
        ("cuda", None, 8_519_680),
        ("cuda", "9.0", 32 * MiB),
        ("cuda", "12.0", 32 * MiB),
        ("rocm", "gfx942", 128 * MiB),
        ("rocm", "gfx90a", 32 * MiB),
        ("xpu", None, 0),
        ("cpu", None, 0),
    ],
)
def test_a_workspace_of_products_is_larger_from_hopper_on_and_twice_in_training(
    kind: Any, capability: str | None, size: int
) -> None:
    gpu = replace(A100, kind=kind, compute_capability=capability)
    assert allocator.workspace_bytes(gpu, training=False) == size
    assert allocator.workspace_bytes(gpu, training=True) == 2 * size


def held(run: RunConfig, moment: str, fact: Any) -> int:
    (size,) = (entry.num_bytes for entry in ledger(job(run)).moments[moment] if entry.fact is fact)
    return int(size)


def test_a_cache_of_tuples_keeps_the_old_cache_beside_the_new_one() -> None:
    """Llama 3 8B: 128 KiB a token; the last step reads 1009 tokens and makes it 1008 to 1009."""
    run = RunConfig(
        model="meta-llama/Meta-Llama-3-8B",
        phase="inference",
        prompt_len=1000,
        max_new_tokens=10,
        libraries=(("transformers", "4.41.0"),),
    )
    assert held(run, "decode", generation.FULL_CACHE) == 1009 * 128 * 1024
    assert held(run, "decode", generation.APPENDED) == 1008 * 128 * 1024
    once = replace(run, max_new_tokens=1)
    assert held(once, "decode", generation.APPENDED) == 0
    # later versions copy one layer's keys alone
    today = replace(run, libraries=())
    assert held(today, "decode", generation.APPENDED) == 1009 * 8 * 128 * 2


def test_an_encoder_holds_its_last_hidden_states_and_every_logit() -> None:
    run = RunConfig(
        model="google-bert/bert-base-uncased",
        phase="inference",
        batch_size=2,
        prompt_len=100,
        precision="bf16",
    )
    assert held(run, "logits", generation.EVERY_LOGIT) == 200 * 30_522 * 2
    assert held(run, "logits", generation.LAST_HIDDEN) == 2 * 200 * 768 * 2


def test_a_prompt_leaves_its_last_hidden_states_and_the_logits_of_one_position() -> None:
    run = RunConfig(
        model="meta-llama/Meta-Llama-3-8B", phase="inference", batch_size=2, prompt_len=100
    )
    assert held(run, "first_logits", generation.LAST_HIDDEN) == 200 * 4096 * 6
    assert held(run, "first_logits", generation.PROMPT_LOGITS) == 2 * 128_256 * (2 + 8)
    assert held(run, "first_logits", generation.PROMPT_CACHE) == 200 * 128 * 1024


@pytest.mark.parametrize(("phase", "threads"), [("inference", 1), ("finetune", 2)])
def test_backward_runs_in_a_thread_with_a_workspace_of_its_own(phase: Any, threads: int) -> None:
    found = ledger(job(RunConfig(model=LLAMA_3_8B, phase=phase)))
    assert found.workspace_bytes == threads * 8_519_680


@pytest.mark.parametrize(
    ("precision", "loss_head", "per_entry"),
    [("bf16", "raw", 4), ("bf16-pure", "raw", 2), ("bf16", "hf", 0)],  # accelerate widens
)
def test_a_loop_with_its_own_loss_keeps_the_logits(
    precision: Any, loss_head: Any, per_entry: int
) -> None:
    found = job(RunConfig(model=LLAMA_3_8B, precision=precision, loss_head=loss_head, seq_len=10))
    entries = ledger(found).moments["layer_backward"]
    (size,) = (entry.num_bytes for entry in entries if entry.fact is logits.KEPT_LOGITS)
    assert size == 10 * 128_256 * per_entry
    if size:
        what = found.model, found.dtypes, found.trainer
        assert logits.kept_logits_bytes(*what, tokens=10, loss_head=loss_head) == size


def test_the_fused_loss_goes_backward_over_a_tile_and_eight_bytes_a_hidden_entry() -> None:
    found = job(RunConfig(model=LLAMA_3_8B, loss_head="trl-fused", precision="bf16-pure"))
    for tokens in (100, 10_000):
        size = logits.loss_backward_bytes(
            found.model, found.dtypes, found.trainer, tokens=tokens, loss_head="trl-fused"
        )
        assert size == min(tokens, 4096) * 32_768 * 2 + tokens * (8 * 4096 + 12)


@pytest.mark.parametrize(
    ("loss_head", "forward", "backward"),
    [
        # logits in 16 bit, in fp32 and shifted; log-softmax and its two gradients
        ("hf", None, 12 * 128_256),
        ("unsloth", None, 8 * 128_256 + 2 * 4096),
        # states and their gradient, losses and labels, logits of a chunk: one token of ten
        ("liger", 4 * 4096 + 21 + 2 * 128_256 // 10, 4 * 4096),
        # beside the logits, which the loop holds: their gradient, and the head's input from it
        ("raw", 2 * 128_256, 2 * 128_256 + 2 * 4096),
    ],
)
def test_bytes_per_token_of_each_loss(loss_head: Any, forward: int | None, backward: int) -> None:
    found = job(RunConfig(model=LLAMA_3_8B, loss_head=loss_head, precision="bf16-pure"))
    what = found.model, found.dtypes, found.trainer
    if forward is not None:
        size = logits.loss_forward_bytes(*what, tokens=10, loss_head=loss_head)
        assert size // 10 == forward
    assert logits.loss_backward_bytes(*what, tokens=10, loss_head=loss_head) == 10 * backward


@pytest.mark.parametrize(("name", "per_entry"), [("google/gemma-2-2b", 2 + 2), (LLAMA_3_8B, 2)])
def test_a_softcap_keeps_its_tanh_beside_the_logits(name: str, per_entry: int) -> None:
    found = job(RunConfig(model=name, loss_head="raw", precision="bf16-pure"))
    size = logits.loss_forward_bytes(
        found.model, found.dtypes, found.trainer, tokens=10, loss_head="raw"
    )
    assert size == 10 * found.model.vocab_size * per_entry


def test_a_recurrent_layer_keeps_a_window_and_an_fp32_state_however_long_the_prompt() -> None:
    """Mamba 2: 128 inner channels and two states of 24 in a window of 4; 8 heads of 16 by 24."""
    config = {
        "model_type": "granitemoehybrid",
        "hidden_size": 64,
        "shared_intermediate_size": 160,
        "num_hidden_layers": 6,
        "layer_types": ["mamba", "mamba", "attention"] * 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 0,
        "mamba_n_heads": 8,
        "mamba_d_state": 24,
        "vocab_size": 320,
    }
    spec = families.build(config, name="m")
    mamba = 4 * (2 * (128 + 2 * 24) * 4 + 4 * 8 * 16 * 24)
    attention = 2 * 2 * 2 * 2 * 16  # bytes, layers, keys and values, heads of 16
    for tokens in (1, 10):
        size = kv_cache.cache_bytes(
            spec, batch_size=3, tokens=tokens, kv_cache="dynamic", element_bytes=2
        )
        assert size == 3 * (mamba + attention * tokens)


@pytest.mark.parametrize(("precision", "per_entry"), [("bf16", 2 + 4), ("fp32", 4)])
def test_an_old_prompt_pass_scores_every_position(precision: Any, per_entry: int) -> None:
    found = job(RunConfig(model=LLAMA_3_8B, phase="inference", precision=precision))
    size = logits.prompt_bytes(found.model, found.dtypes, tokens=10)
    assert size == 10 * 128_256 * per_entry
    headless = replace(found.model, head=None)
    assert logits.prompt_bytes(headless, found.dtypes, tokens=10) == 0


def test_biases_count_among_the_trained_parameters() -> None:
    found = job(RunConfig(model="openai-community/gpt2", r=8, target_modules=("c_attn",)))
    numbers = [
        trained_params(found.model, found.targets, found.method, 8, bias=bias)
        for bias in ("none", "lora_only", "all")
    ]
    factors = 12 * 8 * (768 + 2304)
    assert numbers == [factors, factors + 12 * 2304, factors + 102_144]


LLAMA_2 = "meta-llama/Llama-2-7b-hf"
OF_2024 = (("torch", "2.1.2"), ("transformers", "4.45.2"))


def of_2024(model: str, **settings: Any) -> RunConfig:
    """A LoRA without checkpointing, as Jenga's logs have it."""
    ending = "out_proj" if "opt" in model else "o_proj"
    return RunConfig(
        **{
            "model": model,
            "method": "lora",
            "r": 8,
            "target_modules": ("q_proj", "k_proj", "v_proj", ending),
            "batch_size": 1,
            "seq_len": 4096,
            "precision": "bf16",
            "optimizer": "adamw_torch",
            "attn": "flash_attention_2",
            "gradient_checkpointing": False,
            "libraries": OF_2024,
            "expandable_segments": True,
            **settings,
        }
    )


@pytest.mark.parametrize(
    ("model", "logged"),
    [(LLAMA_2, 42_743.81), ("facebook/opt-1.3b", 13_016.18)],
)
def test_an_older_class_s_keys_and_values_are_copied_in_fp32_at_the_peak(
    model: str, logged: float
) -> None:
    """Jenga's logs, allocated on an A800; OPT's class has 16-bit logits beside their copy."""
    spec = find_model(model)
    assert spec is not None
    if "opt" in model:  # its script repeats the table of positions
        spec = families.build({**spec.config, "max_position_embeddings": 4096}, name=model)
    found = ledger(job(of_2024(model), spec=spec))
    assert found.peak_allocated_bytes / MiB == pytest.approx(logged, rel=1e-4)
    for release, difference in (("4.45.2", 1), ("4.57.1", 0)):
        run = of_2024(model, libraries=(("torch", "2.1.2"), ("transformers", release)))
        off = families.build({**spec.config, "use_cache": False}, name=model)
        on, without = (ledger(job(run, spec=x)).moment_bytes("loss_forward") for x in (spec, off))
        assert (on > without) == difference


def test_one_row_is_shifted_without_a_copy() -> None:
    found = job(of_2024(LLAMA_2, libraries=(("transformers", "4.49.0"),)))
    what = found.model, found.dtypes, found.trainer
    one, two = (
        logits.loss_forward_bytes(*what, tokens=1000, loss_head="hf", sequences=rows)
        for rows in (1, 2)
    )
    assert two - one == 1000 * 32_000 * 4
    assert [logits.copies_shifted(*what[:2], rows) for rows in (1, 2)] == [0, 1]
    today = job(of_2024(LLAMA_2, libraries=()))
    assert logits.copies_shifted(today.model, today.dtypes, 2) == 0


@pytest.mark.parametrize(
    ("precision", "device", "forward", "backward"),
    [
        # logits and log-softmax in 16 bit, the fp32 copy of it that `nll_loss` reads
        ("bf16", "a100-sxm-80gb", 2 + 2 + 4, 2 + 4 + 4),
        ("bf16-pure", "a100-sxm-80gb", 2 + 2, 3 * 2),
        ("bf16", "cpu", 2 + 4 + 4, 3 * 4),  # whose autocast widens the logits first
    ],
)
def test_a_loss_of_narrow_logits_is_widened_at_its_second_part(
    precision: Any, device: str, forward: int, backward: int
) -> None:
    run = RunConfig(model="google-t5/t5-small", method="lora", precision=precision)
    found = job(run, CPU if device == "cpu" else A100)
    what = found.model, found.dtypes, found.trainer
    vocab = found.model.vocab_size
    sizes = [
        formula(*what, tokens=10, loss_head="hf") // 10
        for formula in (logits.loss_forward_bytes, logits.loss_backward_bytes)
    ]
    assert sizes == [forward * vocab, backward * vocab]
    is_narrow = (precision, device) == ("bf16", "a100-sxm-80gb")
    assert logits.narrow_softmax_bytes(found.model, found.dtypes) == 2 * is_narrow
    # accelerate's fp32 copy, the narrow logits, and what the loss has saved
    widened = logits.widened_outputs_bytes(
        *what, tokens=10, sequences=1, loss_head="hf", cached=7, has_points=False
    )
    assert widened == (precision == "bf16") * 10 * (vocab * (4 + 2 + 4 + 2 * is_narrow) + 7)


@pytest.mark.parametrize(
    ("head", "moment", "per_weight"),
    [
        ("liger", "loss_forward", 2),
        ("liger", "loss_backward", 2),
        ("trl-fused", "loss_backward", 6),
    ],
)
def test_a_fused_loss_makes_the_gradient_of_a_copied_head(
    head: str, moment: str, per_weight: int
) -> None:
    """Of modules_to_save: in its own dtype (Liger), and summed up in fp32 before (TRL)."""
    settings: dict[str, Any] = {"method": "lora", "precision": "bf16", "loss_head": head}
    if head == "trl-fused":
        settings["trainer"] = "sft"
    frozen = job(RunConfig(model=LLAMA_3_8B, **settings))
    trained = job(RunConfig(model=LLAMA_3_8B, **settings, modules_to_save=("lm_head",)))
    of_loss = [
        sum(e.num_bytes for e in ledger(each).moments[moment] if e.part == "logits_and_loss")
        for each in (frozen, trained)
    ]
    difference = of_loss[1] - of_loss[0]
    assert difference == pytest.approx(per_weight * 128_256 * 4096, rel=0.02)
