"""A run with images: which model reads them, and what is refused beside them."""

from __future__ import annotations

from dataclasses import replace

from whichlora.errors import ConfigError
from whichlora.memory.towers import grid_of
from whichlora.serving import get_engine
from whichlora.spec.architecture import ModelSpec, Tower
from whichlora.spec.run import RunConfig
from whichlora.trainers import Trainer


def with_images(model: ModelSpec, run: RunConfig, trainer: Trainer) -> ModelSpec:
    """`model` with its tower in use, or without one where no row has an image.

    Raises:
        ConfigError: no tower of the model is described, its tokens exceed the row, or a setting
            is not predicted beside images.
    """
    tower = model.tower
    if tower is not None and run.freeze_vision_tower:
        tower = _without_adapters(tower)
        model = replace(model, tower=tower, idle_linears=(*tower.linears, *tower.idle))
    if not run.images:
        has_tower = any(linear.reads == "tower" for linear in model.idle_linears)
        if run.phase == "inference" and has_tower and not get_engine(run.serving).loads_towers:
            return _text_alone(model)
        return replace(model, tower=None) if tower is not None else model
    if tower is None:
        raise ConfigError(
            f"images: the tower of {model.name} ({model.model_type}) is not predicted; leave "
            "images out, or choose a model whose images are, such as Qwen/Qwen2.5-VL-7B-Instruct"
        )
    _check_beside(model, run, trainer)
    _check_tokens(tower, run)
    return replace(
        model,
        tower=tower,
        idle_params=tower.idle_params + tower.stack.num_params * run.freeze_vision_tower,
        embeds_in_steps=True,  # `masked_scatter` makes a new tensor of the looked-up rows
        notes=(*model.notes[:-1], _note(tower, run)),
    )


def _text_alone(model: ModelSpec) -> ModelSpec:
    """`model` without its tower, which an engine leaves out that serves texts alone."""
    note = f"text tower alone, without the {model.other_params:,} parameters of the vision tower"
    return replace(
        model,
        tower=None,
        idle_params=0,
        idle_linears=(),
        unloaded_params=model.other_params,
        notes=(*model.notes[:-1], note),
    )


def _without_adapters(tower: Tower) -> Tower:
    """`tower` whose matrices PEFT leaves alone, as by `exclude_modules`."""
    stack = tower.stack
    groups = []
    for group in stack.groups:
        layer = group.layer
        assert layer.mlp is not None
        attentions = tuple(
            replace(attention, linears=tuple(replace(x, adapter_rank=0) for x in attention.linears))
            for attention in layer.attentions
        )
        plain = tuple(replace(linear, adapter_rank=0) for linear in layer.mlp.linears)
        layer = replace(layer, attentions=attentions, mlp=replace(layer.mlp, linears=plain))
        groups.append(replace(group, layer=layer))
    around = tuple(replace(linear, adapter_rank=0) for linear in stack.head_linears)
    return replace(
        tower,
        stack=replace(stack, groups=tuple(groups), head_linears=around),
        idle=tuple(replace(linear, adapter_rank=0) for linear in tower.idle),
        trained=False,
    )


def _note(tower: Tower, run: RunConfig) -> str:
    grid = grid_of(tower, run)
    width, height = run.image_size
    tokens = grid.tokens + grid.markers
    return (
        f"images: {run.images} of {width}x{height} in each row{_shrunk(run)}, {tokens:,} tokens "
        f"and {grid.crops * grid.patches:,} patches each"
    )


def _shrunk(run: RunConfig) -> str:
    width, height = run.image_size
    most = run.image_max_pixels
    return f", shrunk to {most:,} pixels" if most is not None and width * height > most else ""


def _check_tokens(tower: Tower, run: RunConfig) -> None:
    setting = "seq_len" if run.phase == "finetune" else "prompt_len"
    grid, room = grid_of(tower, run), getattr(run, setting)
    tokens = run.images * (grid.tokens + grid.markers)
    if tokens > room:
        width, height = run.image_size
        raise ConfigError(
            f"images: {run.images} of {width}x{height} are {tokens:,} tokens, "
            f"more than {setting} {room:,}, which includes them; give a larger {setting}, fewer "
            "images, or set image_max_pixels (589824 is 768x768)"
        )


def _check_beside(model: ModelSpec, run: RunConfig, trainer: Trainer) -> None:
    training = run.phase == "finetune"
    served = not training and get_engine(run.serving).start is not None
    for is_wrong, fault in (
        (training and not trainer.takes_images, f"are not predicted for trainer {trainer.name}"),
        (served, f"are not predicted for serving {run.serving}"),
        (model.label_head is not None, "are predicted for models that write texts, not for a task"),
        (run.kv_cache in ("vllm", "paged"), f"are not predicted for kv_cache {run.kv_cache}"),
        (run.attn == "eager", "are predicted for attn sdpa and flash_attention_2, not for eager"),
        (run.bias != "none", f"are not predicted for bias {run.bias}"),
    ):
        if is_wrong:
            raise ConfigError(f"images: {fault}; leave images out")
