"""Gated delta nets and short convolutions on the tape."""

from __future__ import annotations

from typing import Any

import pytest
from written_layers import points_of, points_of_layer

from whichlora.errors import ConfigError
from whichlora.families import build
from whichlora.memory.gradients import trained_tensors
from whichlora.memory.kv_cache import cache_bytes
from whichlora.memory.training import trained_params
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.models import find_model
from whichlora.symbolic.layer import LayerPoints
from whichlora.symbolic.linear_form import evaluate, most

DELTA = "Qwen/Qwen3.5-9B"
STATE = 32 * 128 * 128  # elements: value heads, widths of their keys and values


def first_layer_points(model: str, precision: str) -> LayerPoints:
    run = RunConfig(model=model, precision=precision, target_modules=("attention",))
    return points_of(run, group=0)


def kept(points: LayerPoints, *, tokens: int, span: int) -> int:
    return int(evaluate(points.saved, tokens=tokens, span=span, r=0))


@pytest.mark.parametrize("precision", ["bf16", "bf16-pure"])
def test_a_started_chunk_costs_as_much_as_a_whole_one(precision: str) -> None:
    points = first_layer_points(DELTA, precision)
    by_length = {span: kept(points, tokens=span, span=span) for span in (64, 65, 127, 128)}
    step = by_length[65] - by_length[64]
    assert step > 4 * STATE  # a state in fp32 at least
    assert by_length[128] - by_length[127] < step / 10


def test_many_short_sequences_keep_as_many_states_as_one_long_one_but_no_first_of_each() -> None:
    points = first_layer_points(DELTA, "bf16")
    long, short = (kept(points, tokens=1024, span=span) for span in (1024, 64))
    assert long - short > 15 * 4 * STATE


def test_a_cached_state_is_in_fp32_whatever_the_model_is() -> None:
    spec = find_model(DELTA)
    assert spec is not None
    sizes = [
        cache_bytes(spec, batch_size=2, tokens=0, kv_cache="dynamic", element_bytes=size)
        for size in (2, 4)
    ]
    states = 2 * 24 * STATE * 4
    assert 2 * (sizes[0] - states) == sizes[1] - states


def test_a_short_convolution_keeps_its_tail() -> None:
    points = first_layer_points("LiquidAI/LFM2-1.2B", "bf16-pure")
    hidden, longer = 2048, 2
    (convolved,) = (one.form for one in points.saved_tensors if one.what == "convolution: result")
    assert evaluate(convolved, tokens=64, span=32, r=0) == 2 * hidden * (64 + 2 * longer)


SCAN: dict[str, Any] = {
    "model_type": "granitemoehybrid",
    "hidden_size": 512,
    "num_hidden_layers": 3,
    "layer_types": ["mamba", "mamba", "attention"],
    "num_attention_heads": 8,
    "num_local_experts": 0,
    "mamba_n_heads": 16,
    "mamba_d_state": 32,
    "mamba_chunk_size": 128,
}


def scan_points(**fields: Any) -> LayerPoints:
    run = RunConfig(model="scan", precision="bf16-pure", target_modules=("attention",))
    job = resolve(build(SCAN | fields, name="scan"), run, find_gpu("h100-sxm-80gb"))
    return points_of_layer(job.model.groups[0].layer, job)


def test_a_scan_fills_up_chunks_of_the_length_that_the_config_says() -> None:
    points = scan_points()
    by_length = {span: kept(points, tokens=span, span=span) for span in (128, 129, 255, 256)}
    pairs = 3 * 4 * 16 * 128 * 128  # scores, decays and their product in each head of a chunk
    assert by_length[129] - by_length[128] > pairs
    assert by_length[256] - by_length[255] < pairs / 10


def test_longer_chunks_keep_more_pairs_and_fewer_states() -> None:
    short, long = (
        kept(scan_points(mamba_chunk_size=size), tokens=1024, span=1024) for size in (64, 256)
    )
    of_pairs = 3 * 4 * 16 * 1024 * (256 - 64)
    assert of_pairs / 2 < long - short < of_pairs


LOOP: dict[str, Any] = {
    "model_type": "jamba",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attn_layer_period": 4,
    "attn_layer_offset": 3,
    "num_experts": 4,
    "mamba_d_state": 8,
    "mamba_dt_rank": 4,
}


def loop_job(**settings: Any) -> ResolvedRun:
    run = RunConfig(model="loop", precision="bf16-pure", **settings)
    return resolve(build(LOOP, name="loop"), run, find_gpu("h100-sxm-80gb"))


def test_a_loop_over_tokens_keeps_every_state_in_fp32_and_narrowed() -> None:
    job = loop_job()
    points = points_of_layer(job.model.groups[0].layer, job)
    states = (x.form for x in points.saved_tensors if x.what == "scan: states")
    size = sum(evaluate(form, tokens=20, span=10, r=8) for form in states)
    assert size == 2 * 128 * 8 * (9 * 4 + 2 + 10 * 2)  # the first is narrow, the last not kept


def test_the_first_forward_of_a_checkpointed_loop_holds_one_state_after_the_other() -> None:
    sizes = {"tokens": 2000, "span": 1000, "r": 8}
    job = loop_job()
    saving, checkpointed = (
        most(points_of_layer(job.model.groups[0].layer, job, checkpointed=each).forward, **sizes)
        for each in (False, True)
    )
    states = 128 * 8 * (4 + 2) * 2000
    assert saving - checkpointed > states


@pytest.mark.parametrize(("quant", "idle"), [("none", 3), ("nf4", 0)])
def test_an_adapter_whose_module_is_never_called_gets_no_gradient(quant: str, idle: int) -> None:
    job = loop_job(quant=quant, r=8)
    tensors = trained_tensors(job.model, job.targets, job.method, 8, dtypes=job.dtypes)
    in_adapters = trained_params(job.model, job.targets, job.method, 8)
    trained = sum(tensor.num_params * tensor.count for tensor in tensors)
    assert in_adapters - trained == idle * 8 * (4 + 128)  # of dt_proj in each state space


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"attn_layer_offset": 4}, "attn_layer_offset is 4, must be smaller than"),
        ({"use_mambapy": True}, "use_mambapy is true"),
    ],
)
def test_a_loop_that_the_formulas_lack_is_refused(field: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(LOOP | field, name="loop")


def test_heads_of_a_scan_have_to_fill_its_width() -> None:
    with pytest.raises(ConfigError, match="mamba_n_heads 16 times mamba_d_head 60"):
        scan_points(mamba_d_head=60)


def test_the_tower_that_is_not_loaded_takes_no_memory() -> None:
    spec = find_model(DELTA)
    assert spec is not None
    assert spec.unloaded_params == spec.other_params > 400_000_000
    assert spec.loaded_params == spec.num_params - spec.other_params
    run = RunConfig(model=DELTA, method="full")
    job = resolve(spec, run, find_gpu("h100-sxm-80gb"))
    assert trained_params(job.model, job.targets, job.method, 0) == spec.loaded_params
