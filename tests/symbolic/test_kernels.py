"""Which attention kernel runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from whichlora.errors import ConfigError
from whichlora.predict.coefficients import prior_calibration
from whichlora.predict.judged import judged_run
from whichlora.predict.predict import memory_prediction
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.spec.backends import SdpaCall, backend_of
from whichlora.spec.backends.cuda import ASSUMED_CAPABILITY
from whichlora.spec.layer import Attention
from whichlora.spec.run import RunConfig
from whichlora.spec.versions import Libraries
from whichlora.store.gpus import find_target
from whichlora.store.hub import load_model
from whichlora.symbolic.kernels import attention_kernel, repeats_keys, runs_efficient
from whichlora.symbolic.layer import working_points
from whichlora.timing.work import kernels_of

GROUPED = "Qwen/Qwen2.5-0.5B"
CALL: dict[str, Any] = {
    "device_kind": "cuda",
    "compute_capability": "8.0",
    "libraries": Libraries(),
    "dtype": "bf16",
    "head_dim": 128,
    "v_head_dim": 128,
    "groups": "none",
    "masked": False,
    "dropout": False,
    "needs_grad": True,
}

ON_XPU: dict[str, Any] = {"device_kind": "xpu", "compute_capability": "bmg_g21"}
ON_MPS: dict[str, Any] = {"device_kind": "mps", "compute_capability": None, "needs_grad": False}


# Each line is a check of torch 2.13's sdp_utils.cpp, mkldnn/xpu/Attention.cpp or Attention.mm.
@pytest.mark.parametrize(
    ("changes", "kernel"),
    [
        ({}, "flash"),
        ({"groups": "enabled"}, "flash"),
        ({"masked": True}, "efficient"),  # check_for_attn_mask
        ({"dtype": "fp32"}, "efficient"),  # check_dtypes_flash_attention
        ({"dtype": "fp32", "groups": "enabled"}, "math"),  # <supports_gqa = false>
        (
            {"dtype": "fp32", "groups": "enabled", "libraries": Libraries(torch="2.14.0")},
            "efficient",
        ),
        ({"groups": "broadcast"}, "math"),  # check_batch_size_and_num_heads_dense
        ({"head_dim": 512, "v_head_dim": 512}, "efficient"),  # check_head_dim_size_flash
        ({"head_dim": 192}, "efficient"),  # values of another width
        ({"masked": True, "head_dim": 100, "v_head_dim": 100}, "math"),  # minimum_gemm_alignment
        ({"dtype": "fp32", "head_dim": 100, "v_head_dim": 100}, "efficient"),
        ({"compute_capability": "7.5", "dtype": "fp16"}, "efficient"),
        ({"compute_capability": "7.5", "dtype": "fp16", "groups": "enabled"}, "math"),
        ({"compute_capability": "7.5"}, "math"),  # less_than_sm80_mem_efficient_dtypes
        ({"compute_capability": "8.9", "head_dim": 224, "v_head_dim": 224}, "efficient"),
        ({"compute_capability": "8.9", "head_dim": 256, "v_head_dim": 256}, "flash"),
        (
            {"compute_capability": "12.0", "head_dim": 256, "v_head_dim": 256, "dropout": True},
            "efficient",
        ),
        ({"device_kind": "rocm", "compute_capability": "gfx942", "groups": "enabled"}, "flash"),
        ({"device_kind": "rocm", "compute_capability": "gfx908"}, "math"),  # AOTriton has none
        ({"device_kind": "rocm", "compute_capability": "gfx1100"}, "flash"),
        ({"device_kind": "rocm", "compute_capability": "gfx1101"}, "math"),  # experimental
        ({"device_kind": "rocm", "compute_capability": None, "masked": True}, "efficient"),
        (  # aotriton_max_hdim
            {"device_kind": "rocm", "compute_capability": "gfx942"}
            | {"head_dim": 512, "v_head_dim": 512},
            "flash",
        ),
        (
            {"device_kind": "rocm", "compute_capability": "gfx1100"}
            | {"head_dim": 512, "v_head_dim": 512},
            "math",
        ),
        # check_no_grad: oneDNN's kernel reads masks and has no backward
        (ON_XPU | {"masked": True, "needs_grad": False}, "flash"),
        (ON_XPU | {"groups": "enabled"}, "flash"),
        (ON_XPU | {"masked": True}, "math"),
        (ON_XPU | {"head_dim": 256, "v_head_dim": 256}, "math"),
        (ON_XPU | {"compute_capability": "acm_g10"}, "math"),  # no SYCL-TLA on Alchemist
        (ON_XPU | {"dtype": "fp32"}, "math"),
        ({"device_kind": "mps", "compute_capability": None}, "math"),  # no backward
        (ON_MPS, "flash"),
        (ON_MPS | {"head_dim": 48, "v_head_dim": 48}, "math"),
        (ON_MPS | {"libraries": Libraries(torch="2.12.0")}, "math"),
        ({"device_kind": "cpu", "dtype": "fp32", "groups": "enabled"}, "flash"),
        ({"device_kind": "cpu", "dtype": "fp32", "dropout": True}, "math"),  # check_for_dropout
    ],
)
def test_sdpa_dispatches_as_torch_2_13_does(changes: dict[str, Any], kernel: str) -> None:
    call = CALL | changes
    device_kind = call.pop("device_kind")
    assert backend_of(device_kind).sdpa(SdpaCall(**call)) == kernel


def job_of(gpu: str = "a100-sxm-80gb", name: str = GROUPED, **settings: Any) -> ResolvedRun:
    return resolve(load_model(name), RunConfig(model=name, **settings), find_target(gpu))


def attention_of(job: ResolvedRun) -> Attention:
    return job.model.groups[0].layer.attentions[0]


@pytest.mark.parametrize(
    ("gpu", "settings", "kernel"),
    [
        ("a100-sxm-80gb", {"precision": "bf16"}, "flash"),
        ("a100-sxm-80gb", {"precision": "fp32"}, "math"),
        ("a100-sxm-80gb", {"precision": "tf32"}, "math"),
        ("a100-sxm-80gb", {"precision": "fp32", "padding": "padded"}, "efficient"),
        ("a100-sxm-80gb", {"precision": "bf16", "method": "qlora"}, "flash"),
        ("a100-sxm-80gb", {"precision": "bf16-no-autocast", "method": "qlora"}, "math"),
        ("t4-16gb", {"precision": "fp16"}, "math"),
        ("t4-16gb", {"precision": "fp16", "attn": "sdpa-efficient"}, "efficient"),
        ("t4-16gb", {"precision": "fp16", "attn": "eager"}, "eager"),
        # its SDPA was handed keys once per query head
        ("t4-16gb", {"precision": "fp16", "libraries": (("transformers", "4.53.3"),)}, "efficient"),
        ("24GB", {"precision": "bf16"}, "flash"),
    ],
)
def test_a_run_has_the_kernel_of_its_dtype_its_mask_and_its_card(
    gpu: str, settings: dict[str, Any], kernel: str
) -> None:
    job = job_of(gpu, **settings)
    found = attention_kernel(attention_of(job), job.dtypes, masked=job.dtypes.padded)
    assert found == kernel


@pytest.mark.parametrize(
    ("version", "padding", "kernel"),
    [
        ("4.47.1", "none", "eager"),
        ("4.49.0", "none", "efficient"),  # a mask, whatever is padded
        ("5.19.0", "none", "flash"),
        ("5.19.0", "padded", "efficient"),
        ("5.21.0", "none", "eager"),
    ],
)
def test_releases_between_ran_gemma_2_by_sdpa_without_its_soft_cap(
    version: str, padding: str, kernel: str
) -> None:
    libraries = (("transformers", version),)
    job = job_of(name="google/gemma-2-9b", precision="bf16", padding=padding, libraries=libraries)
    kernels = kernels_of(attention_of(job), job.dtypes, 2048, decoding=False)
    assert [(found, share) for share, found, _ in kernels if share] == [(kernel, 1)]


def test_heads_that_are_not_grouped_never_fall_to_the_math_kernel_in_fp32() -> None:
    job = job_of(name="EleutherAI/pythia-160m", precision="fp32")
    assert attention_kernel(attention_of(job), job.dtypes, masked=False) == "efficient"


def test_transformers_repeats_keys_where_it_has_a_mask() -> None:
    job = job_of(precision="bf16")
    attention, dtypes = attention_of(job), job.dtypes
    assert not repeats_keys(attention, dtypes, masked=False)
    assert repeats_keys(attention, dtypes, masked=True)
    assert not repeats_keys(attention, dtypes, masked=True, decoding=True)  # a packed query
    wide = replace(attention, head_dim=512, v_head_dim=512)
    assert repeats_keys(wide, dtypes, masked=False)
    assert attention_kernel(wide, dtypes, masked=False) == "efficient"


def test_the_math_kernel_costs_a_t4_a_matrix_of_scores() -> None:
    def peak(**settings: Any) -> int:
        job = job_of("t4-16gb", precision="fp16", seq_len=2048, loss_head="liger", **settings)
        return memory_prediction(judged_run(job, prior_calibration(job.gpu)))[
            0
        ].peak_allocated_bytes

    scores = 14 * 2048**2 * 4
    # probabilities, their gradient, the product of both, and the scores' gradient, in fp32
    assert peak() - peak(attn="sdpa-efficient") > 3 * scores


def test_the_efficient_kernel_is_refused_where_it_does_not_run() -> None:
    job = job_of(precision="bf16")
    assert runs_efficient(attention_of(job), job.dtypes)
    with pytest.raises(ConfigError, match=r"sdpa-efficient has no kernel on t4-16gb"):
        job_of("t4-16gb", precision="bf16", attn="sdpa-efficient")
    with pytest.raises(ConfigError, match=r"sdpa-efficient has no kernel on h100"):
        job_of("h100-sxm-80gb", name="openlm-research/open_llama_3b_v2", attn="sdpa-efficient")
    with pytest.raises(ConfigError, match="sdpa-efficient is not in the bloom"):
        job_of(name="bigscience/bloom-560m", attn="sdpa-efficient")


def test_an_amount_of_memory_says_which_compute_capability_it_is_taken_as() -> None:
    assert any(f"capability {ASSUMED_CAPABILITY} or newer" in x for x in find_target("24GB").notes)


def test_a_kernel_is_given_a_mask_in_16_bit_where_nothing_is_saved() -> None:
    run = RunConfig(model=GROUPED, phase="inference", precision="bf16", kv_cache="static")
    job = resolve(load_model(GROUPED), run, find_target("a100-sxm-80gb"))
    (layer, _), *_ = job.model.layers()

    def pairs(*, masked: bool) -> int:
        settings = (layer, job.model.hidden_size, (), job.dtypes, job.method)
        return max(form.per_pair for form in working_points(*settings, masked=masked, stream=2))

    assert (pairs(masked=True), pairs(masked=False)) == (2, 0)
