"""A run with images: which model reads them, and what is refused beside them."""

from __future__ import annotations

from dataclasses import replace

from whichlora.errors import ConfigError
from whichlora.families.multimodal import TEXT_TOWER
from whichlora.memory.towers import grid_of
from whichlora.predict.refusals.media import (
    check_attending,
    check_beside,
    check_clips,
    check_medium,
    check_pixels,
    check_tokens,
    check_tower_targets,
    check_transcript,
)
from whichlora.serving import get_engine
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.layer import Attention
from whichlora.spec.run import RunConfig
from whichlora.spec.tower import Tower
from whichlora.trainers import Trainer


def with_images(model: ModelSpec, run: RunConfig, trainer: Trainer) -> ModelSpec:
    """`model` with its tower in use, or without one where no row has an image.

    Raises:
        ConfigError: no tower of the model is described, its tokens exceed the row, or a setting
            is not predicted beside images.
    """
    tower = model.tower
    if tower is not None and tower.transcribes:
        check_medium(model, tower, run)
        return _with_sound(model, tower, run, trainer)
    if run.images and model.for_images is not None:
        model = model.for_images
    if tower is not None and run.freeze_vision_tower:
        of_tower = {*tower.linears, *tower.idle}
        tower = _without_adapters(tower)
        others = tuple(linear for linear in model.idle_linears if linear not in of_tower)
        loads = len(others) < len(model.idle_linears)
        loaded = (*tower.linears, *tower.idle) if loads else ()
        model = replace(model, tower=tower, idle_linears=(*others, *loaded))
    if tower is not None:
        check_tower_targets(model, tower, run)
    if tower is not None:
        check_medium(model, tower, run)
    if not (run.images or run.audios):
        return _without_media(model, run)
    if tower is None:
        raise ConfigError(
            f"images: the tower of {model.name} ({model.model_type}) is not predicted; leave "
            "images out, or choose a model whose images are, such as Qwen/Qwen2.5-VL-7B-Instruct"
        )
    check_beside(model, run, trainer, "audio" if tower.hears else "images")
    if tower.attended:
        check_attending(model, run, trainer)
    check_pixels(tower, run)
    check_tokens(tower, run)
    if tower.masks_text == "windows":
        model = _with_masked_windows(model)
    if tower.attended:
        model = _attending(model, run.images * grid_of(tower, run).vectors)
    return replace(
        model,
        tower=tower,
        idle_linears=(*tower.linears, *tower.idle),  # also where texts alone load none
        unloaded_params=0,
        idle_params=tower.idle_params + tower.stack.num_params * run.freeze_vision_tower,
        # `masked_scatter` makes a new tensor of the looked-up rows
        embeds_in_steps=model.embeds_in_steps or not tower.attended,
        notes=(*_beside_tower(model.notes), _note(tower, run)),
    )


def _with_masked_windows(model: ModelSpec) -> ModelSpec:
    """`model` whose layers with a window always have a mask.

    Source: transformers 5.23 `create_masks_for_vision_model` of modeling_gemma4.py.
    """

    def masked(attention: Attention) -> Attention:
        return replace(attention, always_masked=attention.sliding_window is not None)

    return model.with_attentions(masked)


def _attending(model: ModelSpec, length: int) -> ModelSpec:
    """`model` whose cross attention reads `length` vectors for each row."""

    def crossing(attention: Attention) -> Attention:
        return replace(attention, memory_len=length) if attention.cross else attention

    return model.with_attentions(crossing)


def _beside_tower(notes: tuple[str, ...]) -> tuple[str, ...]:
    """`notes` without what is said of a tower that no image passes."""
    return tuple(note for note in notes if not note.startswith(TEXT_TOWER))


def _without_media(model: ModelSpec, run: RunConfig) -> ModelSpec:
    """`model` whose rows have texts alone, with as much of its tower as is loaded then."""
    tower = model.tower
    in_tower = any(linear.reads == "tower" for linear in model.idle_linears)
    # families that describe no blocks name its inputs so; SigLIP's blocks name their own
    has_tower = in_tower or (tower is not None and bool(model.idle_linears))
    if run.phase == "inference":
        engine = get_engine(run.serving)
        if engine.starts_tower is not None and (has_tower or model.unloaded_params):
            starts = engine.starts_tower(run, model)
            return _with_started_tower(model) if starts else _text_alone(model)
        if has_tower and not engine.loads_towers:
            return _text_alone(model)
    return replace(model, tower=None) if tower is not None else model


def _with_started_tower(model: ModelSpec) -> ModelSpec:
    """`model` with the tower that an engine loads beside the text."""
    tower, unloaded = model.tower, model.unloaded_params
    beside = () if tower is None or not unloaded else (*tower.linears, *tower.idle)
    held = model.idle_params + unloaded
    hears = tower is not None and tower.hears
    note = f"{TEXT_TOWER}, and {held:,} parameters of the {_called(hears)}, which is loaded, too"
    return replace(
        model,
        tower=None,
        started_tower=tower,
        idle_params=held,
        idle_linears=(*model.idle_linears, *beside),
        unloaded_params=0,
        notes=(*_beside_tower(model.notes), note),
    )


def _called(hears: bool) -> str:
    return "audio encoder" if hears else "vision tower"


def _text_alone(model: ModelSpec) -> ModelSpec:
    """`model` without its tower, which an engine leaves out that serves texts alone."""
    hears = model.tower is not None and model.tower.hears
    left_out = model.idle_params + model.unloaded_params
    note = f"{TEXT_TOWER} alone, without the {left_out:,} parameters of the {_called(hears)}"
    return replace(
        model,
        tower=None,
        idle_params=0,
        idle_linears=(),
        unloaded_params=left_out,
        notes=(*_beside_tower(model.notes), note),
    )


_WHISPER_PROMPT = 4  # tokens that say: a transcript begins, its language, the task, no times
_DEFAULTS = RunConfig(model="")


def with_lengths(model: ModelSpec, run: RunConfig) -> RunConfig:
    """`run`, whose default lengths are shortened where a decoder of sound reads no such row.

    Source: openai/whisper `Tokenizer.sot_sequence_including_notimestamps`.
    """
    longest = model.longest_input
    if model.tower is None or not model.tower.transcribes or longest is None:
        return run
    seq_len, prompt_len = run.seq_len, run.prompt_len
    if seq_len == _DEFAULTS.seq_len:
        seq_len = min(seq_len, longest)
    if prompt_len == _DEFAULTS.prompt_len:
        prompt_len = _WHISPER_PROMPT
    return replace(run, seq_len=seq_len, prompt_len=prompt_len)


def _with_sound(model: ModelSpec, tower: Tower, run: RunConfig, trainer: Trainer) -> ModelSpec:
    """`model` of which each row has one clip of sound, as long as its encoder always reads."""
    check_clips(model, run)
    check_beside(model, run, trainer, "audio")
    check_transcript(model, run)
    positions = grid_of(tower, run).vectors
    note = f"audio: one clip in each row, which the encoder reads as {positions:,} positions"
    return replace(model, notes=(*model.notes, note))


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
    if tower.hears:
        return (
            f"audio: {run.audios} of {run.audio_seconds:g} s in each row, "
            f"{grid.tokens + grid.markers:,} tokens and {grid.patches:,} positions each"
        )
    width, height = run.image_size
    tokens = grid.tokens + grid.markers
    return (
        f"images: {run.images} of {width}x{height} in each row{_shrunk(run)}, {tokens:,} "
        f"token{'s' * (tokens != 1)} and {grid.crops * grid.patches:,} patches each"
    )


def _shrunk(run: RunConfig) -> str:
    width, height = run.image_size
    most = run.image_max_pixels
    return f", shrunk to {most:,} pixels" if most is not None and width * height > most else ""
