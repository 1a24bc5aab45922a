"""Runs with images: the model that reads them, and what is refused beside them."""

from __future__ import annotations

from typing import Any

import pytest
from devices import A100

from whichlora.errors import ConfigError
from whichlora.families import build
from whichlora.predict.coefficients import prior_calibration
from whichlora.predict.explain import explain
from whichlora.predict.predict import predict
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.spec.parallel import ParallelConfig
from whichlora.spec.run import RunConfig, image_sides
from whichlora.spec.tower import limited_sides

TEXT = {
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
}
QWEN = {
    "model_type": "qwen2_5_vl",
    "text_config": TEXT,
    "vision_config": {"hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 2048},
}
RUN: dict[str, Any] = {"model": "m", "images": 1, "image_size": (1024, 768)}


LLAMA4 = {
    "model_type": "llama4",
    "text_config": {**TEXT, "moe_layers": [], "intermediate_size_mlp": 4096},
    "vision_config": {"hidden_size": 64, "intermediate_size": 256, "vision_output_dim": 4096},
}


def job(config: dict[str, Any] = QWEN, **settings: Any) -> ResolvedRun:
    return resolve(build(config, name="m"), RunConfig(**(RUN | settings)), A100)


def test_images_bring_the_tower_into_use_and_a_note() -> None:
    with_images, without = job(), job(images=0)
    assert with_images.model.tower is not None
    assert without.model.tower is None
    assert with_images.model.idle_params == 0 < without.model.idle_params
    (note,) = with_images.model.notes
    assert note == "images: 1 of 1024x768 in each row, 999 tokens and 3,996 patches each"


def test_all_linear_reaches_the_tower_and_a_frozen_one_has_no_adapter() -> None:
    assert {"qkv", "proj", "q_proj"} <= set(job().targets)
    frozen = job(freeze_vision_tower=True)
    assert not {"qkv", "proj"} & set(frozen.targets)
    assert frozen.model.tower is not None
    assert not any(linear.rank_multiple for linear in frozen.model.tower.linears)


def test_a_larger_image_is_shrunk_and_a_smaller_one_is_not() -> None:
    whole, limited = (
        job(image_size=(4000, 3000), seq_len=16384),
        job(image_size=(4000, 3000), image_max_pixels=768 * 768),
    )
    (note,) = limited.model.notes
    assert "1 of 4000x3000 in each row, shrunk to 589,824 pixels, 768 tokens" in note
    assert "15,301 tokens" in whole.model.notes[0]
    small = job(image_size=(512, 384), image_max_pixels=768 * 768)
    assert small.model.notes == job(image_size=(512, 384)).model.notes
    assert limited_sides(3000, 4000, 768 * 768) == (665, 886)
    assert limited_sides(1, 10**6, 100) == (1, 10_000)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"images": 3}, "3 of 1024x768 are 2,997 tokens, more than seq_len 2,048, which includes"),
        (
            {"phase": "inference", "prompt_len": 512},
            "1 of 1024x768 are 999 tokens, more than prompt_len 512",
        ),
        ({"trainer": "dpo"}, "are not predicted for trainer dpo"),
        ({"attn": "eager"}, "for attn sdpa and flash_attention_2, not for eager"),
        ({"phase": "inference", "prompt_len": 2048, "serving": "vllm"}, "for serving vllm"),
    ],
)
def test_what_is_not_predicted_is_refused_in_one_line(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^images: .*{message}"):
        job(**settings)


@pytest.mark.parametrize(
    ("settings", "is_refused"),
    [
        ({"precision": "fp32"}, True),
        ({"precision": "fp16-pure"}, True),
        ({"precision": "fp16"}, False),  # autocast
        ({"precision": "fp16", "phase": "inference", "prompt_len": 2048}, True),
        ({"precision": "fp32", "method": "qlora"}, False),
    ],
)
def test_narrow_pixels_need_weights_of_their_dtype(
    settings: dict[str, Any], is_refused: bool
) -> None:
    if is_refused:
        with pytest.raises(ConfigError, match=r"^images: the processor makes bf16 pixels"):
            job(LLAMA4, **settings)
    else:
        tower = job(LLAMA4, **settings).model.tower
        assert tower is not None
        assert tower.pixel_bytes == 2


def test_sft_trains_on_images_where_its_fused_head_finds_the_states() -> None:
    assert job(trainer="sft").run.loss_head == "trl-fused"
    with pytest.raises(
        ConfigError, match=r"^images: are not predicted for loss_head trl-fused, but for hf"
    ):
        job(LLAMA4, trainer="sft")


GLM_ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
GLM4V_MOE = {
    "model_type": "glm4v_moe",
    "text_config": TEXT | {"rope_parameters": GLM_ROPE},
    "vision_config": {"out_hidden_size": TEXT["hidden_size"]},
}


def test_a_convolution_that_shares_a_name_is_adapted_where_targets_are_names() -> None:
    alone = job(GLM4V_MOE, images=0).model.idle_linears
    assert [x.rank_multiple for x in alone if not x.is_module] == [1]
    assert not any(x.rank_multiple for x in alone if x.name in ("gate_proj", "down_proj"))
    with pytest.raises(ConfigError, match="to names, which its convolution of patches has, too"):
        job(GLM4V_MOE)
    with pytest.raises(ConfigError, match="proj is the convolution of patches"):
        job(GLM4V_MOE, target_modules=("q_proj", "proj"))
    for settings in ({"freeze_vision_tower": True}, {"target_modules": ("q_proj",)}):
        assert job(GLM4V_MOE, **settings).model.tower is not None
    with pytest.raises(ConfigError, match=r"^images: are not predicted for loss_head trl-fused"):
        job(GLM4V_MOE, trainer="sft", freeze_vision_tower=True)


GEMMA4 = {
    "model_type": "gemma4",
    "text_config": TEXT
    | {"hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"},
    "vision_config": {},
}


def test_names_that_peft_refuses_in_a_tower_are_refused_unless_it_is_frozen() -> None:
    named: dict[str, Any] = {"target_modules": ("q_proj", "linear")}
    for images in (0, 1):
        with pytest.raises(ConfigError, match="PEFT refuses q_proj, which in the vision tower of"):
            job(GEMMA4, images=images, **named)
    served = job(
        GEMMA4,
        phase="inference",
        serve="as-trained",
        serving="vllm",
        images=0,
        target_modules=("q_proj",),
    )
    assert "q_proj" in served.targets  # which loads no tower
    assert "linear" in job(GEMMA4).targets
    frozen = {"target_modules": ("attention",), "freeze_vision_tower": True}
    assert "q_proj" in job(GEMMA4, **frozen).targets


def test_images_mask_the_layers_with_a_window_alone() -> None:
    def masked(images: int) -> list[bool]:
        layers = job(GEMMA4, images=images).model.layers()
        return [layer.attentions[0].always_masked for layer, _ in layers]

    assert masked(1) == [True, False]
    assert masked(0) == [False, False]


def test_a_model_without_a_described_tower_takes_no_images() -> None:
    with pytest.raises(ConfigError, match=r"images: the tower of m \(qwen2\) is not predicted"):
        job({"model_type": "qwen2", **TEXT})


@pytest.mark.parametrize("value", ["1024", "1024x", "0x10", (1, 2, 3), "10*10", ("a", "b")])
def test_sides_are_two_numbers(value: object) -> None:
    assert image_sides("1024X768") == image_sides([1024, 768]) == (1024, 768)
    with pytest.raises(ConfigError, match=r"image_size: .* is no width and height, such as 1024"):
        image_sides(value)


MLLAMA = {"model_type": "mllama", "text_config": {}, "vision_config": {}}


def test_images_bring_the_layers_into_use_that_attend_to_them() -> None:
    with_images, texts = job(MLLAMA, seq_len=128), job(MLLAMA, images=0)
    assert with_images.model.num_hidden_layers == 40 == texts.model.num_hidden_layers + 8
    assert with_images.model.idle_params == 0 < texts.model.idle_params
    assert with_images.model.notes[-1].endswith("1 token and 4,128 patches each")
    assert {"fc1", "multi_modal_projector"} <= set(with_images.targets)
    assert not {"fc1", "multi_modal_projector"} & set(texts.targets)


def test_a_frozen_tower_that_texts_leave_on_the_disk_keeps_the_layers_that_they_skip() -> None:
    frozen, plain = (
        job(MLLAMA, images=0, freeze_vision_tower=freezes).model.idle_linears
        for freezes in (True, False)
    )
    assert frozen == plain != ()


@pytest.mark.parametrize("images", [0, 1])
def test_a_frozen_tower_has_each_of_its_matrices_once_and_no_adapter(images: int) -> None:
    adapted = job(images=images, method="qlora").model
    frozen = job(images=images, method="qlora", freeze_vision_tower=True).model
    sizes = [[x.num_params for x in model.idle_linears] for model in (adapted, frozen)]
    assert sizes[0] == sizes[1]
    assert any(linear.rank_multiple for linear in adapted.idle_linears)
    assert not any(linear.rank_multiple for linear in frozen.idle_linears)


def test_a_tower_that_several_layers_attend_to_goes_backward_once() -> None:
    settings = {"seq_len": 128, "use_reentrant": True}
    with pytest.raises(ConfigError, match="use_reentrant: each layer of m that attends to images"):
        job(MLLAMA, gradient_checkpointing=True, **settings)
    job(MLLAMA, gradient_checkpointing=False, **settings)


def test_keys_of_images_are_not_quantised() -> None:
    settings = {"phase": "inference", "kv_cache": "quantized"}
    with pytest.raises(ConfigError, match="kv_cache: transformers does not find quantized keys"):
        job(MLLAMA, **settings)
    job(MLLAMA, images=0, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"parallel": "fsdp"}, "fsdp shards layers of m that rows without images skip"),
        ({"parallel": "ddp"}, "ddp waits for all gradients, and the layers of m that rows without"),
        ({"phase": "inference", "serving": "vllm"}, "not predicted for the cross attention of m"),
    ],
)
def test_layers_that_texts_skip_are_refused_where_they_count(
    settings: dict[str, Any], message: str
) -> None:
    if "parallel" in settings:
        settings = settings | {"parallel": ParallelConfig(strategy=settings["parallel"], gpus=2)}
    run = RunConfig(model="m", gradient_checkpointing=True, **settings)
    with pytest.raises(ConfigError, match=message):
        predict(build(MLLAMA, name="m"), run, A100, prior_calibration(A100))


HEARS: dict[str, Any] = {
    "model_type": "qwen2_audio",
    "text_config": {**TEXT, "model_type": "qwen2"},
    "audio_config": {},
}
CLIPS: dict[str, Any] = {"images": 0, "audios": 2, "audio_seconds": 12.3}


def test_clips_bring_the_encoder_into_use_and_a_note() -> None:
    with_clips, without = job(HEARS, **CLIPS), job(HEARS, images=0)
    assert with_clips.model.tower is not None
    (note,) = with_clips.model.notes
    assert note == "audio: 2 of 12.3 s in each row, 309 tokens and 1,500 positions each"
    (note,) = without.model.notes
    assert note.startswith("text tower; the audio encoder adds 639,")
    assert "no audio passes it" in note
    assert RunConfig(**RUN | CLIPS).to_dict()["audios"] == 2
    assert "audio_seconds" not in RunConfig(model="m").to_dict()


@pytest.mark.parametrize(
    ("config", "settings", "fault"),
    [
        (HEARS, {"images": 1}, "images: m reads audio, not images; leave images out"),
        (QWEN, CLIPS, "audios: m reads images, not audio; leave audios out"),
        (HEARS, CLIPS | {"seq_len": 500}, "audios: 2 of 12.3 s are 618 tokens, more than seq_len"),
        (HEARS, CLIPS | {"attn": "eager"}, "audio: is predicted for attn sdpa"),
        (HEARS, CLIPS | {"audios": 10_001}, "audios: must be 10000 or less, got 10001"),
        (HEARS, CLIPS | {"audio_seconds": 0.0}, "audio_seconds: must be above 0 and at most"),
    ],
)
def test_clips_that_can_not_be_predicted_are_refused(
    config: dict[str, Any], settings: dict[str, Any], fault: str
) -> None:
    with pytest.raises(ConfigError, match=fault):
        job(config, **settings)


@pytest.mark.parametrize("phase", ["finetune", "inference"])
def test_an_explanation_of_clips_speaks_of_no_image(phase: str) -> None:
    settings = CLIPS | {"phase": phase, "prompt_len": 1024, "seq_len": 1024}
    run = RunConfig(**RUN | settings)
    found = explain(build(HEARS, name="m"), run, A100, prior_calibration(A100))
    lines = [*found.lines, *(member for line in found.lines for member in line.members)]
    words = " ".join(f"{line.what} {line.shape} {line.why}" for line in lines)
    assert "clips" in words
    assert not [word for word in ("image", "vision", "pixel", "patch") if word in words]
    assert any(name.startswith("audio") for name in found.moments)
