"""Precision modes: which dtype every kind of tensor has, and who copies what."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from strategies import finetune_runs

from whichlora.errors import ConfigError
from whichlora.methods import with_defaults
from whichlora.spec.dtypes import Dtypes, resolve_dtypes
from whichlora.spec.run import RunConfig


def dtypes(*, trains_base: bool = False, device_kind: str = "cuda", **settings: Any) -> Dtypes:
    run = RunConfig(**({"model": "m"} | settings))
    return resolve_dtypes(with_defaults(run), trains_base=trains_base, device_kind=device_kind)


@pytest.mark.parametrize(
    ("settings", "mode"),
    [
        ({"precision": "bf16"}, "A"),
        ({"precision": "fp16"}, "A"),
        ({"precision": "bf16-pure"}, "P"),
        ({"precision": "bf16-no-autocast"}, "C"),
        ({"precision": "fp32"}, "F"),
        ({"precision": "bf16", "method": "qlora"}, "Q"),
        ({"precision": "bf16", "method": "qlora", "loss_head": "trl-fused"}, "P"),
        ({"precision": "bf16", "method": "qlora", "prepare_kbit": False}, "P"),
        ({"precision": "bf16-no-autocast", "method": "qlora"}, "F"),
        ({"precision": "bf16", "method": "full", "trains_base": True}, "P"),
        ({"precision": "fp16", "method": "full", "trains_base": True}, "Q"),
        ({"precision": "bf16", "phase": "inference"}, "P"),
    ],
)
def test_settings_decide_the_mode(settings: dict[str, Any], mode: str) -> None:
    assert dtypes(**settings).mode == mode


@pytest.mark.parametrize(
    ("precision", "adapter_bytes"), [("bf16", 4), ("bf16-no-autocast", 4), ("bf16-pure", 2)]
)
def test_the_adapters_are_fp32_unless_the_precision_is_pure(
    precision: str, adapter_bytes: int
) -> None:
    assert dtypes(precision=precision).adapter_bytes == adapter_bytes


def test_bf16_adapters_under_autocast_are_not_copied() -> None:
    resolved = dtypes(precision="bf16", adapter_dtype="bfloat16")
    assert resolved.adapter_bytes == 2
    assert resolved.under_autocast
    assert not resolved.autocast  # nothing that is trained is copied


@pytest.mark.parametrize(
    ("precision", "adapter_dtype", "same"),
    [
        ("bf16-pure", "float32", "bf16-no-autocast"),
        ("bf16-no-autocast", "bfloat16", "bf16-pure"),
    ],
)
@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_the_dtype_of_adapters_is_what_parts_the_modes_without_autocast(
    precision: str, adapter_dtype: str, same: str, method: str
) -> None:
    resolved = dtypes(precision=precision, adapter_dtype=adapter_dtype, method=method)
    assert resolved == dtypes(precision=same, method=method)


def test_autocast_over_fp32_weights_is_what_fp16_does_to_full_fine_tuning() -> None:
    resolved = dtypes(precision="bf16", base_dtype="float32", method="full", trains_base=True)
    in_fp16 = dtypes(precision="fp16", method="full", trains_base=True)
    assert replace(resolved, half="fp16", fused_fp16_softmax=True) == in_fp16
    assert (resolved.base_bytes, resolved.stream_bytes, resolved.linear_out_bytes) == (4, 4, 2)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"precision": "bf16-pure"}, "base_dtype: .*got precision bf16-pure; use"),
        ({"method": "qlora"}, "base_dtype: weights stored in nf4-dq .*; use"),
        ({"adapter_dtype": "bfloat16"}, "adapter_dtype: .*got bfloat16; use"),
    ],
)
def test_fp32_weights_go_with_autocast_alone(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        dtypes(**settings, base_dtype="float32")


@pytest.mark.parametrize(
    ("precision", "asked", "computed", "multiplied", "recasts"),
    [
        ("bf16", "auto", 2, 2, False),
        ("bf16", "bfloat16", 2, 2, False),
        ("bf16", "float16", 2, 2, True),
        ("bf16", "float32", 4, 2, False),
        ("bf16-no-autocast", "float32", 4, 4, False),
        ("fp16", "bfloat16", 2, 2, True),
        ("fp32", "float32", 4, 4, False),
    ],
)
def test_4_bit_weights_are_expanded_to_the_compute_dtype(
    precision: str, asked: str, computed: int, multiplied: int, recasts: bool
) -> None:
    resolved = dtypes(precision=precision, compute_dtype=asked, method="qlora")
    assert resolved.four_bit_bytes == computed
    assert resolved.four_bit_product_bytes == multiplied
    assert resolved.recasts_four_bit == recasts
    plain = dtypes(precision=precision, compute_dtype=asked, method="lora")
    assert plain == dtypes(precision=precision, method="lora")


def test_older_bitsandbytes_computes_in_the_dtype_of_its_input() -> None:
    for precision, version, computed in [
        ("bf16", "0.46.1", 2),
        ("bf16", "0.47.0", 4),
        ("fp16", "0.46.1", 4),
    ]:
        resolved = dtypes(
            precision=precision,
            compute_dtype="float32",
            method="qlora",
            libraries=(("bitsandbytes", version),),
        )
        assert resolved.four_bit_bytes == computed


def test_a_narrow_compute_dtype_of_a_run_of_fp32_is_refused() -> None:
    with pytest.raises(ConfigError, match="compute_dtype: bfloat16 products of a fp32 run"):
        dtypes(precision="fp32", compute_dtype="bfloat16", method="qlora")


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_bf16_adapters_need_a_bf16_base(precision: str) -> None:
    with pytest.raises(ConfigError, match=f"adapter_dtype: .*got {precision}; use"):
        dtypes(precision=precision, adapter_dtype="bfloat16")


def test_a_prepared_base_has_an_fp32_stream_under_16_bit_products() -> None:
    resolved = dtypes(precision="bf16", method="qlora")
    assert (resolved.stream_bytes, resolved.compute_bytes, resolved.mlp_bytes) == (4, 2, 4)
    assert resolved.embedding_bytes == 4


def test_full_fp16_keeps_fp32_weights() -> None:
    assert dtypes(precision="fp16", method="full", trains_base=True).base_bytes == 4


@given(run=finetune_runs())
def test_every_size_is_that_of_a_float(run: RunConfig) -> None:
    resolved = resolve_dtypes(
        with_defaults(run), trains_base=run.method == "full", device_kind="cuda"
    )
    sizes = (
        resolved.base_bytes,
        resolved.stream_bytes,
        resolved.compute_bytes,
        resolved.adapter_bytes,
    )
    assert set(sizes) <= {2, 4}


@pytest.mark.parametrize("settings", [{}, {"method": "full"}, {"phase": "inference"}], ids=str)
def test_tf32_is_of_products_and_keeps_the_tensors_of_fp32(settings: dict[str, Any]) -> None:
    assert dtypes(precision="tf32", **settings) == dtypes(precision="fp32", **settings)


def test_dropout_is_on_in_training_only() -> None:
    assert dtypes().training
    assert not dtypes(phase="inference").training
