"""What is refused beside rows with images or clips of sound."""

from __future__ import annotations

from whichlora.errors import ConfigError
from whichlora.memory.towers import grid_of
from whichlora.methods import get_method
from whichlora.serving import get_engine
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.loss_heads import LOSS_HEADS, TRL
from whichlora.spec.run import ALL_LINEAR, ATTENTION, AUTOCAST_PRECISIONS, RunConfig
from whichlora.spec.targets import all_linears
from whichlora.spec.tower import Tower
from whichlora.trainers import Trainer

WIDE_PIXEL_BYTES = 4  # fp32, which towers cast themselves


def check_medium(model: ModelSpec, tower: Tower, run: RunConfig) -> None:
    """Refuse images for a model that hears, and clips for one that sees."""
    other = "images" if tower.hears else "audios"
    if getattr(run, other):
        reads = "audio, not images" if tower.hears else "images, not audio"
        raise ConfigError(f"{other}: {model.name} reads {reads}; leave {other} out")


def check_transcript(model: ModelSpec, run: RunConfig) -> None:
    """Refuse more tokens than there are positions. Source: transformers 5.23 `WhisperDecoder`."""
    longest, trains = model.longest_input, run.phase == "finetune"
    names = ("seq_len",) if trains else ("prompt_len", "max_new_tokens")
    tokens = sum(getattr(run, name) for name in names)
    if longest is not None and tokens > longest:
        raise ConfigError(
            f"{' and '.join(names)}: {tokens} tokens are more than the {longest} that {model.name} "
            f"writes of one clip; give {longest} or less"
        )


def check_tokens(tower: Tower, run: RunConfig) -> None:
    setting = "seq_len" if run.phase == "finetune" else "prompt_len"
    grid, room = grid_of(tower, run), getattr(run, setting)
    tokens = tower.inputs(run.images, run.audios) * (grid.tokens + grid.markers)
    if tokens > room and tower.hears:
        raise ConfigError(
            f"audios: {run.audios} of {run.audio_seconds:g} s are {tokens:,} tokens, more than "
            f"{setting} {room:,}, which includes them; give a larger {setting}, or fewer audios"
        )
    if tokens > room:
        width, height = run.image_size
        raise ConfigError(
            f"images: {run.images} of {width}x{height} are {tokens:,} tokens, "
            f"more than {setting} {room:,}, which includes them; give a larger {setting}, fewer "
            "images, or set image_max_pixels (589824 is 768x768)"
        )


def check_attending(model: ModelSpec, run: RunConfig, trainer: Trainer) -> None:
    """Refuse what breaks where several layers attend to images.

    Source: torch 2.13 `CheckpointFunction.backward`, which detaches arguments that are positional,
    as those of `MllamaTextModel.forward` of 4.54; transformers 5.23 `QuantizedLayer.update`,
    which keeps no `keys` that `_has_cached_cross_attention_states` of modeling_mllama.py finds.
    """
    training = run.phase == "finetune"
    detached = trainer.rewrites_checkpoints or run.versions.older("transformers", "4.55")
    if training and run.gradient_checkpointing and run.use_reentrant and not detached:
        raise ConfigError(
            f"use_reentrant: each layer of {model.name} that attends to images would go backward "
            "through the whole tower, which is possible once; use false"
        )
    if not training and run.kv_cache == "quantized":
        raise ConfigError(
            f"kv_cache: transformers does not find quantized keys of images, so that layers of "
            f"{model.name} would be skipped after the prompt; use dynamic or static"
        )


def check_pixels(tower: Tower, run: RunConfig) -> None:
    """Source: torch 2.13: `mm` takes two tensors of one dtype, autocast casts them before."""
    autocasts = run.phase == "finetune" and run.precision in AUTOCAST_PRECISIONS
    casts = tower.pixel_bytes == WIDE_PIXEL_BYTES or run.quant != "none"
    if not (casts or autocasts or run.precision.startswith("bf16")):
        raise ConfigError(
            f"images: the processor makes bf16 pixels, which weights of precision {run.precision} "
            "can't be multiplied with; use precision bf16"
        )


def check_tower_targets(model: ModelSpec, tower: Tower, run: RunConfig) -> None:
    """Source: peft 0.21.2 `LoraModel._create_new_module`."""
    loads = run.phase == "finetune" or get_engine(run.serving).loads_towers
    adapts = loads and (run.phase == "finetune" or run.serve == "as-trained")
    if run.freeze_vision_tower or get_method(run.method).trains_base or not adapts:
        return
    named = set(run.target_modules)
    if ATTENTION in named:
        named |= {linear.name for linear in all_linears(model)}
    if refused := sorted(named & set(tower.wraps)):
        raise ConfigError(
            f"target_modules: PEFT refuses {', '.join(refused)}, which in the vision tower of "
            f"{model.name} are no matrices but modules around one; use all-linear, or "
            "freeze_vision_tower"
        )
    if tower.kernel is not None and tower.kernel.name in named:
        raise ConfigError(
            f"target_modules: {tower.kernel.name} is the convolution of patches of {model.name}, "
            "too, whose adapter is not predicted; use all-linear, or freeze_vision_tower"
        )
    reached = tower.kernel is not None and any(x.rank_multiple for x in tower.idle)
    if run.images and reached and ALL_LINEAR in named:
        raise ConfigError(
            f"target_modules: PEFT translates those of {model.name} to names, which its "
            "convolution of patches has, too: not predicted with images; use freeze_vision_tower"
        )


def check_beside(model: ModelSpec, run: RunConfig, trainer: Trainer, reads: str = "images") -> None:
    training, tower = run.phase == "finetune", model.tower
    assert tower is not None  # its caller has looked
    served = not training and get_engine(run.serving).start is not None
    fused = LOSS_HEADS[run.loss_head].own_trainer == TRL and not tower.fused_head
    for is_wrong, fault in (
        (training and not trainer.takes_images, f"not predicted for trainer {trainer.name}"),
        (training and fused, f"not predicted for loss_head {run.loss_head}, but for hf"),
        (served, f"not predicted for serving {run.serving}"),
        (model.label_head is not None, "predicted for models that write texts, not for a task"),
        (run.kv_cache in ("vllm", "paged"), f"not predicted for kv_cache {run.kv_cache}"),
        (run.attn == "eager", "predicted for attn sdpa and flash_attention_2, not for eager"),
        (run.bias != "none", f"not predicted for bias {run.bias}"),
    ):
        if is_wrong:
            if reads == "images":
                raise ConfigError(f"images: are {fault}; leave images out")
            raise ConfigError(f"{reads}: is {fault}; choose another")


def check_clips(model: ModelSpec, run: RunConfig) -> None:
    """Refuse what an encoder of clips does not train or read."""
    frozen = run.phase == "finetune" and not get_method(run.method).trains_base
    for is_wrong, fault in (
        (
            frozen and bool(run.use_reentrant),
            f"use_reentrant: nothing of {model.name} would be trained, since checkpointing makes "
            "no input of it need a gradient; use false",
        ),
        (
            run.freeze_vision_tower,
            f"freeze_vision_tower: a frozen encoder of {model.name} is not predicted; leave it out",
        ),
        (run.audios > 1, f"audios: {model.name} transcribes one clip in each row; leave it out"),
    ):
        if is_wrong:
            raise ConfigError(fault)
