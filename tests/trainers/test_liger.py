"""Liger's kernels in the Trainer: which run in a model, what its layers keep then, and who says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from devices import A100

from whichlora.errors import ConfigError
from whichlora.exports import FORMATS
from whichlora.memory.layer_bytes import layer_bytes
from whichlora.methods import with_defaults
from whichlora.predict.notes import notes_on
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.spec.kernels import NO_KERNELS, FusedKernels
from whichlora.spec.liger import fused_kernels, liger_kernels, liger_notes
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model
from whichlora.symbolic.language_head import liger_chunk
from whichlora.trainers.liger import kernel_config
from whichlora.workflow.export import make_recipe

LLAMA = "meta-llama/Meta-Llama-3-8B"
ON = (("use_liger_kernel", True),)
LAYERS_ALONE = (("liger_kernel_config", '{"fused_linear_cross_entropy": false}'), *ON)
RUN = RunConfig(
    model=LLAMA, precision="bf16-pure", gradient_checkpointing=False, trainer_options=ON
)


def job(run: RunConfig) -> ResolvedRun:
    return resolve(load_model(run.model), run, A100)


def kept_per_token(run: RunConfig) -> int:
    """Bytes that one layer keeps for the backward, per token."""
    found = job(run)
    layer, count = next(found.model.layers())
    sized: Any = {"tokens": 1, "span": 1}
    kept = layer_bytes(
        layer,
        count,
        found.model,
        found.targets,
        found.dtypes,
        found.method,
        r=run.r,
        run=found.run,
        **sized,
    )
    return int(kept.saved)


def test_a_layer_keeps_what_its_kernels_save() -> None:
    """Llama 3 8B: 32 heads of 128 and 8 of keys; each norm its input and a deviation, the MLP gate
    and up; adapters the inputs of q, k and v, of gate and up, and of down, and seven of rank 16.
    """
    h, f, q, kv = 4096, 14336, 4096, 1024
    norms = 2 * (2 * h + 4)
    attention = 2 * q + 2 * kv + 2 * kv + 2 * q + 4 * 32
    adapters = 2 * h + 2 * h + 2 * f + 7 * 2 * 16
    assert kept_per_token(RUN) == norms + attention + 2 * 2 * f + adapters
    # PyTorch's norms keep an fp32 copy, its activation a result beside gate and up
    stock = replace(RUN, trainer_options=())
    assert kept_per_token(stock) - kept_per_token(RUN) == 2 * 2 * h + 2 * f


@pytest.mark.parametrize(
    ("model_type", "config", "kernels"),
    [
        ("llama", {}, {"rope", "rms_norm", "swiglu", "fused_linear_cross_entropy"}),
        (
            "llama",
            {"rope": False, "geglu": True},
            {"rms_norm", "swiglu"} | {"fused_linear_cross_entropy"},
        ),
        ("gemma2", {}, {"rope", "rms_norm", "geglu", "fused_linear_cross_entropy"}),
        ("glm4", {"rope": True}, {"rms_norm", "swiglu", "fused_linear_cross_entropy"}),
        ("granite", {}, {"rope", "rms_norm", "swiglu"}),  # and a loss that is not predicted
        ("qwen3_moe", {}, {"rope", "rms_norm", "fused_linear_cross_entropy"}),
        ("qwen3_next", {}, {"fused_linear_cross_entropy"}),
        ("phi", {}, set()),
    ],
)
def test_each_type_gets_the_kernels_that_liger_has_for_it(
    model_type: str, config: dict[str, bool], kernels: set[str]
) -> None:
    assert liger_kernels(model_type, config) == kernels


def test_where_the_gradient_of_a_norm_goes() -> None:
    on = frozenset({"rms_norm", "geglu"})
    assert fused_kernels("gemma", on) == FusedKernels(norm="in_place", gated=True)
    assert fused_kernels("gemma2", on) == FusedKernels(norm="apart", gated=True)
    assert fused_kernels("gemma2", frozenset()) == NO_KERNELS


def test_what_liger_does_not_replace_is_told() -> None:
    assert liger_notes("llama", {}) == ()
    (none,) = liger_notes("phi", {})
    assert "no kernels for phi" in none
    (stock,) = liger_notes("qwen3_moe", {})
    assert "swiglu for qwen3_moe are predicted as the stock operators" in stock
    run = RunConfig(model="microsoft/phi-2", trainer_options=ON)
    assert none in notes_on(job(run))
    assert job(run).run.loss_head == "hf"


def test_two_losses_are_refused() -> None:
    with pytest.raises(ConfigError, match="cross_entropy or fused_linear_cross_entropy, not both"):
        liger_kernels("llama", {"cross_entropy": True})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((("liger_kernel_config", "{}"),), "liger_kernel_config: needs use_liger_kernel"),
        ((("liger_kernel_config", "rope"), *ON), "'rope' is not accepted; accepted is JSON"),
        ((("liger_kernel_config", '{"norm": true}'), *ON), "'norm' is not accepted"),
        ((("liger_kernel_config", '{"rope": 1}'), *ON), "is not accepted"),
        ((("use_liger_kernel", "yes"),), "use_liger_kernel: 'yes' is neither true nor false"),
        ((("liger_kernel_config", True), *ON), "liger_kernel_config: True is not a text"),
    ],
)
def test_options_that_liger_does_not_take(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        job(replace(RUN, trainer_options=options))


def test_kernels_need_triton() -> None:
    old = find_gpu("p40-24gb")
    for options in (ON, LAYERS_ALONE):
        run = replace(RUN, precision="fp32", trainer_options=options)
        with pytest.raises(ConfigError, match=r"do(es)? not run on p40-24gb \(Triton"):
            resolve(load_model(LLAMA), run, old)


def test_its_loss_takes_the_place_of_the_model_s_unless_the_run_names_one() -> None:
    assert job(RUN).run.loss_head == "liger"
    assert job(replace(RUN, trainer_options=LAYERS_ALONE)).run.loss_head == "hf"
    assert job(replace(RUN, loss_head="raw")).run.loss_head == "raw"
    assert kernel_config(with_defaults(RUN)) == {}


def test_trl_s_trainer_keeps_its_own_loss() -> None:
    sft = job(replace(RUN, trainer="sft"))
    assert sft.run.loss_head == "trl-fused"
    assert sft.dtypes.kernels == FusedKernels(norm="in_place", rope="in_place", gated=True)
    asked = (("liger_kernel_config", '{"fused_linear_cross_entropy": true}'), *ON)
    with pytest.raises(ConfigError, match="SFTTrainer has its own loss"):
        job(replace(RUN, trainer="sft", trainer_options=asked))


def test_a_chunk_of_the_loss_has_as_many_logits_as_all_tokens_have_states() -> None:
    """The example of liger-kernel's `fused_linear_cross_entropy_forward`."""
    assert liger_chunk(32_000, 4096, tokens=4096 * 4) == 2048
    assert liger_chunk(32_000, 4096, tokens=3) == 1


def test_the_script_asks_for_the_kernels_of_the_run() -> None:
    def script(run: RunConfig) -> str:
        made = FORMATS["transformers"](make_recipe(replace(run, seq_len=256), A100.key))
        return made.files["train.py"].replace("'", '"')

    every = script(RUN)
    assert "use_liger_kernel=True" in every
    assert "liger_kernel_config" not in every
    named = script(replace(RUN, trainer_options=LAYERS_ALONE))
    assert 'liger_kernel_config={"fused_linear_cross_entropy": False}' in named
    loss = script(replace(RUN, trainer_options=(), loss_head="liger"))
    assert '"rms_norm": False' in loss
    assert '"fused_linear_cross_entropy": True' in loss
