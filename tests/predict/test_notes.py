"""What is said beside a prediction's numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from devices import A100, CPU

from whichlora import estimate
from whichlora.memory.weights import weight_bytes
from whichlora.predict.coefficients import prior_calibration
from whichlora.predict.notes import notes_on
from whichlora.predict.predict import predict
from whichlora.predict.resolve import resolve
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.run import RunConfig
from whichlora.store.hub import load_model
from whichlora.units import format_bytes

LLAMA = "HuggingFaceTB/SmolLM2-135M"  # has 8,192 positions
MIXTRAL = "mistralai/Mixtral-8x7B-v0.1"
T5 = "google-t5/t5-small"


def notes(model: str = LLAMA, gpu: GpuSpec = A100, **settings: Any) -> str:
    return "; ".join(notes_on(resolve(load_model(model), RunConfig(model=model, **settings), gpu)))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"seq_len": 8193}, True),
        ({"seq_len": 8192}, False),
        ({"phase": "inference", "prompt_len": 8192, "max_new_tokens": 1}, True),
    ],
)
def test_more_tokens_than_positions_are_noted(settings: dict[str, Any], said: bool) -> None:
    assert ("tokens exceed the model's 8192 positions" in notes(**settings)) == said


def test_a_dtype_without_units_is_noted() -> None:
    assert "cpu has no bf16" in notes(gpu=CPU)
    assert "has no" not in notes()


@pytest.mark.parametrize(
    ("serving", "no_bf16", "scores"),
    [("transformers", True, True), ("vllm", True, False), ("llama-cpp", False, False)],
)
def test_an_engine_is_told_what_binds_its_own_kernels(
    serving: str, no_bf16: bool, scores: bool
) -> None:
    turing = replace(A100, compute_capability="7.5")
    said = notes("Qwen/Qwen2.5-7B", turing, precision="fp16", phase="inference", serving=serving)
    assert ("precision fp16: a100 has no bf16" in said) == no_bf16
    assert ("SDPA has no fused kernel" in said) == scores


def test_facts_that_nobody_verified_are_named() -> None:
    assert "not verified: names, l2_bytes" in notes(
        gpu=replace(A100, unverified=("names", "l2_bytes"))
    )


def test_experts_of_a_packed_checkpoint_stay_16_bit_where_they_are_no_modules() -> None:
    packed: dict[str, Any] = {"method": "lora", "quant": "awq-int4"}
    text = "in transformers 5, which hold no awq-int4: 16-bit; with libraries transformers 4.57.0"
    assert text in notes(MIXTRAL, **packed)
    assert text not in notes(MIXTRAL, **packed, libraries=(("transformers", "4.57.0"),))
    served = {"quant": "awq-int4", "phase": "inference", "serving": "vllm"}
    assert text not in notes(MIXTRAL, **served)


def test_experts_that_are_bare_parameters_stay_16_bit_and_refuse_dora() -> None:
    assert "leaves them 16-bit, and prepare_model_for_kbit_training" in notes(
        MIXTRAL, method="qlora"
    )
    said = notes(MIXTRAL, method="qlora", prepare_kbit=False)
    assert (
        "leaves them 16-bit; Unsloth does not, nor Axolotl with quantize_moe_experts: true" in said
    )
    assert "bitsandbytes" not in notes(MIXTRAL, method="lora")
    assert "PEFT 0.21 refuses DoRA and dropout on experts" in notes(MIXTRAL, method="dora")
    assert "refuses" not in notes(MIXTRAL, method="dora", target_modules=("attention",))


def test_names_of_layers_that_get_no_adapter_say_why() -> None:
    named = {"target_modules": ("q_proj", "c_attn", "w1", "w3")}
    assert "c_attn: no layers of this model, which PEFT passes over" in notes(MIXTRAL, **named)
    assert "w1" not in notes(MIXTRAL, **named)
    packed = notes(MIXTRAL, **named, method="qlora", quantize_moe_experts=True)
    assert "w1, w3: PEFT takes them for the experts', predicted without adapters here" in packed


def test_falcon_is_quantised_under_transformers_4_alone() -> None:
    run = RunConfig(model="tiiuae/falcon-7b", method="qlora")
    older = replace(run, libraries=(("transformers", "4.57.0"),))
    weights = {}
    for each in (run, older):
        job = resolve(load_model(run.model), each, A100)
        weights[each] = sum(weight_bytes(job.model, job.dtypes).values())
        said = "; ".join(notes_on(job))
        assert ("transformers 5 quantises nothing of falcon" in said) == (each is run)
    assert weights[older] < 0.4 * weights[run]


def test_both_stacks_of_an_encoder_decoder_have_the_length_asked() -> None:
    assert "encoder and decoder are both taken at seq_len tokens" in notes(T5)


def test_more_tokens_than_a_table_of_positions_has_fail() -> None:
    assert "exceed the model's 1024 positions, and looking up more fails" in notes("gpt2")
    assert "fails" not in notes(seq_len=8193)  # rotary positions are computed


def test_the_new_tokens_of_an_encoder_are_none() -> None:
    settings = {"phase": "inference", "prompt_len": 512, "max_new_tokens": 128}
    assert "exceed" not in notes("google-bert/bert-base-uncased", **settings)
    assert "1025 tokens exceed" in notes("gpt2", **settings | {"prompt_len": 897})


def test_a_prediction_says_where_the_device_waits_for_the_host() -> None:
    model = load_model(LLAMA)

    def said(gpu: GpuSpec = A100, **settings: Any) -> list[str]:
        run = RunConfig(model=LLAMA, **settings)
        notes = predict(model, run, gpu, prior_calibration(gpu)).notes
        return [note for note in notes if note.startswith("bound by the host")]

    served = said(phase="inference", batch_size=1, prompt_len=64)
    assert "in the prompt pass and a decoding step" in served[0]
    assert "longest in a decoding step" in said(phase="inference", prompt_len=8192)[0]
    assert "longest in an optimizer step" in said(batch_size=1, seq_len=64)[0]
    assert not said(batch_size=32, seq_len=2048)
    assert not said(gpu=CPU, precision="fp32", phase="inference")


def test_int8_without_reentrant_checkpoints_is_told_what_holds_its_inputs() -> None:
    settings: dict[str, Any] = {"method": "lora", "quant": "int8", "batch_size": 4, "seq_len": 512}
    (held,) = estimate("Qwen/Qwen2.5-7B", "24GB", **settings)
    (dropped,) = estimate("Qwen/Qwen2.5-7B", "24GB", use_reentrant=True, **settings)
    (note,) = (note for note in held.notes if "--use-reentrant" in note)
    assert note.endswith(format_bytes(dropped.memory.device_used_bytes))
    assert not any("--use-reentrant" in note for note in dropped.notes)
    settings["quant"] = "nf4-dq"
    (four_bit,) = estimate("Qwen/Qwen2.5-7B", "24GB", **settings)
    assert not any("--use-reentrant" in note for note in four_bit.notes)


@pytest.mark.parametrize(("model", "said"), [(LLAMA, True), (MIXTRAL, False)])
def test_an_adapter_of_a_table_that_is_the_head_is_noted(model: str, said: bool) -> None:
    """SmolLM's table is tied, Mixtral's is not."""
    made = notes(model, target_modules=("q_proj", "embed_tokens"))
    assert ("PEFT adapts the look-up alone" in made) == said
