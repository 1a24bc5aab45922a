"""A vision tower in a training step and in a generation."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

import image_traces
import numpy as np
import pytest
from devices import A100

from whichlora.errors import ConfigError
from whichlora.families import build
from whichlora.memory.activations import rotary_bytes
from whichlora.memory.held import KEPT_CACHE
from whichlora.memory.images import (
    TOWER_SAVED,
    TowerStep,
    images_backward,
    images_forward,
    with_images,
)
from whichlora.memory.kv_cache import trained_cache_bytes, trained_memory_bytes
from whichlora.memory.lasting import INPUTS
from whichlora.memory.moments import training_moments
from whichlora.memory.step import TrainingStep
from whichlora.memory.towers import NARROW_PIXELS, PIXELS, TOWER_NAMED, grid_of
from whichlora.memory.worst_layer import gathered_after
from whichlora.predict.quantities import ledger, training_step
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.spec.numeric import added
from whichlora.spec.run import RunConfig

QWEN = image_traces.config_of({"type": "qwen2_5_vl", "layers": 2, "blocks": 8, "vocab": 0})
PATCHES, TOKENS = 3996, 999  # of 1024x768
FROZEN = {"freeze_vision_tower": True, "gradient_checkpointing": False}


def job(**settings: Any) -> ResolvedRun:
    run = RunConfig(model="m", **({"images": 1, "image_size": (1024, 768)} | settings))
    return resolve(build(QWEN, name="m"), run, A100)


def steps(**settings: Any) -> tuple[TrainingStep, TowerStep]:
    step = training_step(job(**settings))
    assert step.model.tower is not None
    return step, TowerStep.of(step, step.model.tower)


def named(moments: Mapping[str, Any], moment: str, fact: object) -> int:
    return int(added(entry.num_bytes for entry in moments[moment] if entry.fact is fact))


def test_pixels_are_in_the_batch_at_every_moment_and_narrow_in_the_tower() -> None:
    moments = ledger(job(batch_size=2, images=2, seq_len=4096)).moments
    numbers = 4 * PATCHES * 3 * 2 * 14**2
    for moment in set(moments) - {"loading"}:
        assert named(moments, moment, PIXELS) == 4 * numbers
    assert named(moments, "images_forward", NARROW_PIXELS) == 2 * numbers
    assert named(moments, "layer_forward", NARROW_PIXELS) == 0


def test_a_frozen_tower_saves_nothing_and_goes_forward_alone() -> None:
    moments = ledger(job(**FROZEN)).moments
    assert named(moments, "loss_backward", TOWER_SAVED) == 0
    assert "images_forward" in moments
    assert "images_backward" not in moments
    step, tower = steps(**FROZEN)
    assert not step.learns_from_images
    assert tower.working == tower.forward.working > 0


def test_checkpointing_makes_a_frozen_tower_go_backward() -> None:
    # `enable_input_require_grads` has a hook on the embedding of the patches, too
    step, tower = steps(freeze_vision_tower=True, gradient_checkpointing=True)
    assert step.learns_from_images
    assert tower.goes_backward
    inputs = 8 * PATCHES * 1280 * tower.forward.stream
    assert inputs < tower.saved_by_blocks.num_bytes < 1.5 * inputs


def test_a_tower_with_adapters_saves_more_than_a_checkpointed_one() -> None:
    saved = {
        on: steps(gradient_checkpointing=on)[1].saved_by_blocks.num_bytes for on in (True, False)
    }
    assert saved[False] > 10 * saved[True]


def test_moments_of_images_come_before_and_after_those_of_the_layers() -> None:
    step, tower = steps()
    moments = with_images(step, training_moments(step))
    assert next(iter(moments)) == "images_forward"
    assert moments["images_forward"] == images_forward(step, tower)
    assert moments["images_backward"] == images_backward(step, tower)
    assert grid_of(tower.tower, step.run).tokens == TOKENS


def test_gradients_of_a_trained_tower_are_there_after_its_backward() -> None:
    step, tower = steps(method="full", precision="bf16-pure")
    assert step.gradients.of_tower == 2 * tower.model.num_params
    frozen, _ = steps(method="full", precision="bf16-pure", freeze_vision_tower=True)
    assert frozen.gradients.of_tower == 0
    trained = step.gradients.total - frozen.gradients.total
    assert trained == step.gradients.of_tower


def test_a_block_whose_result_nobody_reads_keeps_until_the_forward_is_done_alone() -> None:
    run = RunConfig(model="m", images=1, gradient_checkpointing=False, precision="bf16-pure")
    line = {"type": "llava", "layers": 2, "blocks": 4, "vocab": 0, "run": run.to_dict()}
    resolved = image_traces.job_of(line)
    step = training_step(resolved)
    assert step.model.tower is not None
    tower = TowerStep.of(step, step.model.tower)
    assert 3 * tower.idle_block.num_bytes == pytest.approx(tower.saved_by_blocks.num_bytes, rel=0.1)
    moments = ledger(resolved).moments
    kept = {name: named(moments, name, TOWER_SAVED) for name in ("layer_forward", "loss_backward")}
    assert kept["layer_forward"] - kept["loss_backward"] == tower.idle_block.num_bytes


def test_tables_of_positions_are_there_while_layers_of_the_text_are_alone() -> None:
    step, _ = steps()
    moments = ledger(job()).moments
    counted = {name: named(moments, name, INPUTS) for name in ("images_forward", "layer_forward")}
    tables = rotary_bytes(step.model, step.dtypes, span=step.seq_len)
    assert counted["layer_forward"] - counted["images_forward"] == tables > 0
    assert named(moments, "images_backward", INPUTS) == counted["images_forward"]


def test_a_mask_of_patches_is_there_until_the_first_block_has_gone_backward() -> None:
    run = RunConfig(model="m", images=2, image_size=(640, 480), gradient_checkpointing=True)
    line = {"type": "gemma4", "layers": 2, "blocks": 4, "vocab": 0, "run": run.to_dict()}
    step = training_step(image_traces.job_of(line))
    assert step.model.tower is not None
    tower = TowerStep.of(step, step.model.tower)
    assert tower.masks.in_first_layer.num_bytes == 2 * 2520**2
    inputs_of_others = 3 * tower.forward.state_bytes
    assert tower.worst_backward - tower.first_backward == inputs_of_others


def attending(**settings: Any) -> tuple[TrainingStep, TowerStep]:
    """A step of Llama 3.2 Vision, whose second and fourth layer attend to two images."""
    run = RunConfig(model="m", images=2, seq_len=1024, **settings)
    line = {"type": "mllama", "layers": 5, "blocks": 4, "vocab": 0, "run": run.to_dict()}
    step = training_step(image_traces.job_of(line))
    assert step.model.tower is not None
    return step, TowerStep.of(step, step.model.tower)


def test_layers_that_attend_read_every_vector_of_every_image_and_their_mask() -> None:
    step, _ = attending(precision="bf16-pure", gradient_checkpointing=False)
    own, crossed = step.model.groups
    (attention,) = crossed.layer.attentions
    assert (own.positions, crossed.positions) == ((0, 2, 4), (1, 3))
    assert attention.memory_len == 2 * 4 * 1025
    by_name = {tensor.what: tensor for tensor in step.layers[1].tensors}
    repeated = by_name["values, repeated"]
    assert repeated.constant == 2 * attention.memory_len * attention.q_width
    # 8,200 keys are no multiple of 16: each layer lays the mask out anew
    masks = [t.per_token for t in step.layers[1].tensors if t.per_token == 2 * 8208]
    assert len(masks) == 1
    moments = ledger(
        image_traces.job_of(
            {"type": "mllama", "layers": 5, "blocks": 4, "vocab": 0, "run": step.run.to_dict()}
        )
    ).moments
    assert {"images_masked", "last_norm"} <= set(moments)


def test_a_frozen_tower_is_attended_to_and_gets_no_gradient() -> None:
    frozen, learning = attending(**FROZEN)[0], attending(gradient_checkpointing=False)[0]
    assert not frozen.dtypes.learns_encoder
    assert learning.dtypes.learns_encoder
    assert [layer.gathered for layer in frozen.layers] == [0, 0]
    of_images = 2 * 4 * 1025 * 2048 * learning.dtypes.encoder_bytes
    assert [layer.gathered for layer in learning.layers] == [0, of_images]
    # what the last layer that attends has not summed yet waits before all others
    after = [gathered_after(learning.model, learning.layers, place) for place in range(5)]
    assert after == [of_images, of_images, of_images, 0, 0]


def test_a_tower_that_is_not_checkpointed_keeps_all_and_joins_states_of_blocks() -> None:
    step, tower = attending(gradient_checkpointing=True, precision="bf16-pure")
    assert not tower.run.gradient_checkpointing
    assert step.run.gradient_checkpointing
    assert tower.is_hooked
    unhooked = attending(gradient_checkpointing=False, precision="bf16-pure")[1]
    more = tower.saved_by_blocks.num_bytes - unhooked.saved_by_blocks.num_bytes
    assert tower.forward.leaf_bytes < more < 5 * tower.forward.leaf_bytes
    (last,) = tower.model.head_linears
    assert last.in_features == 3 * tower.model.hidden_size
    assert tower.forward.num_vectors == 2 * 4 * 1025
    assert tower.forward.num_patches == 2 * 4 * 1032


@pytest.mark.parametrize(
    ("model_type", "release", "is_remade"),
    [
        ("mllama", "4.54.1", True),
        ("mllama", "4.55.0", False),
        ("qwen2_vl", "4.46.3", False),
        ("qwen2_vl", "4.47.1", True),
    ],
)
def test_whether_a_tower_is_checkpointed_is_a_matter_of_the_release(
    model_type: str, release: str, is_remade: bool
) -> None:
    libraries = (("transformers", release),)
    run = RunConfig(model="m", images=1, use_reentrant=False, libraries=libraries)
    line = {"type": model_type, "layers": 5, "blocks": 4, "vocab": 0, "run": run.to_dict()}
    step = training_step(image_traces.job_of(line))
    assert step.run.gradient_checkpointing
    assert step.model.tower is not None
    assert TowerStep.of(step, step.model.tower).run.gradient_checkpointing is is_remade


@pytest.mark.parametrize(
    ("release", "reentrant", "learns"),
    [("5.23.0", True, False), ("5.23.0", False, True), ("4.57.0", True, False)],
)
def test_reentrant_checkpoints_cut_off_a_tower_that_nothing_hooks(
    release: str, reentrant: bool, learns: bool
) -> None:
    """Qwen3-VL's class names no embedding of patches, and before 5 no class is asked."""
    for model_type in ("qwen3_vl", "qwen2_5_vl"):
        libraries = (("transformers", release),)
        run = RunConfig(
            model="m",
            images=1,
            seq_len=2048,
            use_reentrant=reentrant,
            target_modules=("all-linear",),
            libraries=libraries,
        )
        line = {"type": model_type, "layers": 5, "blocks": 4, "vocab": 0, "run": run.to_dict()}
        step = training_step(image_traces.job_of(line))
        assert step.model.tower is not None
        tower = TowerStep.of(step, step.model.tower)
        hooked = model_type == "qwen2_5_vl" and release.startswith("5")
        assert tower.goes_backward is (learns or hooked)
        assert (tower.saved_by_blocks.num_bytes > 0) is (learns or hooked)
        assert step.learns_from_images  # the projector is adapted, too


def test_an_older_tower_copies_the_states_of_all_blocks() -> None:
    def working(release: str) -> float:
        run = RunConfig(
            model="m",
            images=1,
            freeze_vision_tower=True,
            gradient_checkpointing=False,
            libraries=(("transformers", release),),
        )
        line = {"type": "mllama", "layers": 5, "blocks": 8, "vocab": 0, "run": run.to_dict()}
        step = training_step(image_traces.job_of(line))
        assert step.model.tower is not None
        tower = TowerStep.of(step, step.model.tower)
        return float(tower.forward.working / tower.forward.state_bytes)

    # 9 are named, their copies and 2 of these; else 10, 2 copies, and 3 that are joined beside x
    assert working("4.46.2") - working("4.50.0") == pytest.approx(4)


def test_a_caller_who_holds_the_outputs_holds_all_keys_that_they_cache() -> None:
    settings = {"gradient_checkpointing": False, "precision": "bf16-pure", "trainer": "loop"}
    step, _ = attending(**settings)
    of_text, of_images = 3 * 1024, 2 * 8200
    bytes_of_key = 2 * 4 * 128 * 2
    cached = trained_cache_bytes(step.model, step.dtypes, **step.sized)
    assert cached == bytes_of_key * (of_text + of_images)
    moments = training_moments(step)
    assert named(moments, "layer_forward", KEPT_CACHE) == cached
    assert named(moments, "optimizer_step", KEPT_CACHE) == cached
    assert named(moments, "loss_backward", KEPT_CACHE) == 0
    checkpointed, _ = attending(**settings | {"gradient_checkpointing": True})
    assert named(training_moments(checkpointed), "layer_forward", KEPT_CACHE) == 0


def test_keys_of_images_are_cached_in_training_where_attention_reads_copies() -> None:
    step, _ = attending(gradient_checkpointing=False, precision="bf16-pure")
    per_layer = 8200 * 2 * 4 * 128 * 2
    assert trained_memory_bytes(step.model, step.dtypes) == 2 * per_layer


def test_arrays_count_as_single_runs_do() -> None:
    resolved = job(seq_len=2048)
    batch_size = np.array([1, 2, 5])
    together = ledger(resolved, batch_size=batch_size).peak_allocated_bytes
    alone = [ledger(resolved, batch_size=int(size)).peak_allocated_bytes for size in batch_size]
    assert together.tolist() == alone


@pytest.mark.parametrize("phase", ["finetune", "inference"])
def test_arrays_count_as_single_runs_do_where_layers_attend(phase: str) -> None:
    run = RunConfig(model="m", images=2, phase=phase, seq_len=1024, prompt_len=1024)
    line = {"type": "mllama", "layers": 5, "blocks": 4, "vocab": 0, "run": run.to_dict()}
    resolved, batch_size = image_traces.job_of(line), np.array([1, 2, 5])
    together = ledger(resolved, batch_size=batch_size).peak_allocated_bytes
    alone = [ledger(resolved, batch_size=int(size)).peak_allocated_bytes for size in batch_size]
    assert together.tolist() == alone


def test_a_generation_runs_the_tower_before_the_prompt_and_holds_pixels() -> None:
    settings = {"phase": "inference", "prompt_len": 2048}
    moments = ledger(job(**settings)).moments
    pixels = 4 * PATCHES * 1176
    assert {named(moments, name, PIXELS) for name in set(moments) - {"loading"}} == {pixels}
    assert next(iter(moments)) == "images"


def test_an_encoder_of_sound_waits_until_all_of_its_decoder_has_gone_backward() -> None:
    run = RunConfig(model="m", method="full", seq_len=64, precision="bf16-pure")
    line = {"type": "whisper", "layers": 2, "blocks": 2, "vocab": 0, "run": run.to_dict()}
    moments = ledger(image_traces.job_of(line)).moments
    saved = named(moments, "embedding_backward", TOWER_SAVED)
    assert saved > 2 * 1500 * 768 * 2  # the inputs of both blocks
    assert named(moments, "layer_backward", TOWER_SAVED) == saved
    assert named(moments, "optimizer_step", TOWER_SAVED) == 0
    positions = {named(moments, name, TOWER_NAMED) for name in ("layer_forward", "layer_backward")}
    assert positions == {1500 * 768 * 2}
    assert named(moments, "audio_backward", TOWER_NAMED) == 0
    line["run"]["trainer"] = "loop"  # whose variable holds the model's outputs
    held = ledger(image_traces.job_of(line)).moments
    assert named(held, "audio_backward", TOWER_NAMED) == 1500 * 768 * 2
    assert named(held, "layer_forward", TOWER_NAMED) == 2 * 1500 * 768 * 2


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"images": 1}, "reads audio, not images"),
        ({"freeze_vision_tower": True}, "frozen encoder"),
        ({"seq_len": 449}, "449 tokens are more than the 448"),
        ({"use_reentrant": True}, "nothing of drawn would be trained"),
    ],
)
def test_what_an_encoder_of_sound_has_not_is_refused(setting: dict[str, Any], message: str) -> None:
    run = RunConfig(model="m", **({"seq_len": 64} | setting))
    line = {"type": "whisper", "layers": 2, "blocks": 2, "vocab": 0, "run": run.to_dict()}
    with pytest.raises(ConfigError, match=message):
        image_traces.job_of(line)


def test_traced_runs_with_images_are_predicted() -> None:
    by_type = image_traces.errors(image_traces.records())
    assert set(by_type) == set(image_traces.CONFIGS)
    sizes = [size for of_type in by_type.values() for size in of_type]
    assert median(sizes) < 0.005
    assert max(sizes) < 0.06


def test_traced_runs_with_images_under_trl_are_predicted() -> None:
    by_type = image_traces.errors(image_traces.records("sft"))
    assert set(by_type) == set(image_traces.CONFIGS) - set(image_traces.NO_SFT)
    assert max(size for of_type in by_type.values() for size in of_type) < 0.015


@pytest.mark.oracle
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("model_type", "seed"),
    [
        *(("qwen2_vl", 13), ("qwen2_5_vl", 4), ("qwen3_vl", 3), ("gemma3", 2), ("mistral3", 0)),
        *(("gemma4", 4), ("mllama", 4), ("mllama", 12), ("mllama", 18)),
        *(("whisper", 0), ("whisper", 5), ("whisper", 13)),
    ],
)
def test_a_traced_run_with_images_needs_as_much(model_type: str, seed: int) -> None:
    pytest.importorskip("peft")
    line = image_traces.draw(seed, model_type)
    assert image_traces.predicted(line) == pytest.approx(
        image_traces.traced(line)["traced"], rel=0.005
    )
