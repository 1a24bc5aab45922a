"""What vLLM takes for images, videos and sounds that a model may be sent: its tower's first run.

When it starts it runs as many of the largest items as the encoder's budget has room for, and
holds what they become while it profiles the text.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from functools import cache

from whichlora.errors import ConfigError
from whichlora.memory.entries import Entry, Fact
from whichlora.memory.towers import TowerForward, tower_dtypes
from whichlora.serving.base import Served
from whichlora.serving.vllm_settings import RANKS, max_num_batched_tokens, max_num_seqs
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.numeric import ceil_div
from whichlora.spec.options import OptionValue
from whichlora.spec.run import RunConfig
from whichlora.spec.tower import SAMPLING_RATE, ImageGrid, Tower
from whichlora.spec.versions import Libraries

TEXT_OPTION, LIMITS, UNPROFILED = "language_model_only", "limit_mm_per_prompt", "skip_mm_profiling"
USUAL_LIMIT = 999  # items of a prompt; vLLM 0.19.0 config/multimodal.py:19
# Sides of images among which the largest one is sought: tiles of the processors that we know.
_TILES, _MOST_TILES, _WHOLE = (336, 364, 384, 448, 512, 560), 16, (896, 1024, 1536, 1540, 2048)
# Model types whose videos are profiled, too. Source: `get_supported_mm_limits` and
# `get_mm_max_tokens_per_item` of vLLM 0.19.0 models/qwen2_vl.py:817, qwen3_vl.py:786, 0.22.0
# gemma4_mm.py:199.
FRAMES = {"qwen2_vl": 14, "qwen2_5_vl": 14}  # of a video, before 0.11 16
VIDEO_PIXELS, FRAMES_AT_ONCE = 25_165_824, 2  # of Qwen3-VL: preprocessor_config.json of its videos
# In these releases a time is counted beside each token of Qwen3-VL's videos, and vectors of every
# item are spread over as many rows as the encoder's budget has tokens. Source: vLLM 0.11.0 and
# 0.12.0 models/qwen3_vl.py:658 `get_max_video_tokens`, v1/worker/gpu_model_runner.py:3374
# `expanded_outputs`; neither in 0.10.2 and 0.13.0. Logs of 0.11 name a budget of 153,600 tokens.
TIMED_VIDEOS, TIME_SHARE = ("0.11", "0.13"), 12.5
GEMMA4_FRAMES, GEMMA4_FRAME_TOKENS, GEMMA4_MARKERS = 32, 70, 8
GEMMA4_TABLE = 10_240  # rows of its table of positions
CHUNKED_SINCE = "0.22"  # before which its tower sees one image or frame at a time; 0.21 is not read
# Since when a GPU's tower attends with its own heads alone, before which it gathers those of all.
# Source: vLLM 0.11.0 models/qwen2_5_vl.py:315 `all_gather_interleave`, 0.13.0 :330; not 0.12.
DIVIDED_SINCE = "0.13"
# Types whose videos have other rules, which are not counted.
OTHER_VIDEOS = ("glm4v", "glm4v_moe", "internvl")

TOWER_PIXELS = Fact(
    part="activations",
    what="profile pass: the largest images, videos or sounds",
    shape="[items, …]",
    dtype="compute_bytes",
    why="a variable of the profile holds the batch to the end",
    source="vLLM 0.19.0 v1/worker/gpu_model_runner.py:5764 batched_dummy_mm_inputs",
)
TOWER_PASS = Fact(
    part="activations",
    what="profile pass: the tower's largest block over them",
    shape="[patches, …]",
    dtype="compute_bytes",
    why="as many items as the encoder's budget has room for are run at once",
    source="vLLM 0.19.0 v1/worker/gpu_model_runner.py:5770; memory.towers.TowerForward",
    kind="estimate",
)
# Types whose towers are transformers' own code, or mask rows of patches as that does.
TRANSFORMERS_TOWERS = ("gemma4", "qwen2_audio", "mistral3")
TOWER_VECTORS = Fact(
    part="activations",
    what="profile pass: vectors of the encoder's cache",
    shape="[tokens of the items, hidden_size]",
    dtype="compute_bytes",
    why="the cache has them until the text is profiled",
    source="vLLM 0.19.0 v1/worker/gpu_model_runner.py:5779 encoder_cache",
)
TOWER_INPUTS = Fact(
    part="activations",
    what="embedded tokens of a step",
    shape="[max_num_batched_tokens, hidden_size]",
    dtype="compute_bytes",
    why="of a model that sees they are an input of its graphs, allocated at the start",
    source="vLLM 0.19.0 v1/worker/gpu_model_runner.py `self.inputs_embeds`",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """The largest thing of its kind that a prompt may have.

    Args:
        medium: "image", "video" or "audio".
        tokens: of the text that stand for it.
        images: whole images, or clips, with as many patches.
        size: width and height of such an image.
    """

    medium: str
    tokens: int
    images: float
    size: tuple[int, int]


def starts_tower(run: RunConfig, model: ModelSpec) -> bool:
    """Whether vLLM loads the tower with which `model` sees or hears.

    Source: vLLM 0.17.0 config/multimodal.py `language_model_only`; github.com/vllm-project/vllm/
    pull/22299 (0.10.1), where every limit is 0.
    """
    options = dict(run.serving_options)
    if options.get(TEXT_OPTION) is True:
        return False
    limits = _limits(options.get(LIMITS))
    return any(limits.get(medium, USUAL_LIMIT) for medium in media(model))


def media(model: ModelSpec) -> tuple[str, ...]:
    """What `model` takes beside text. Source: `FRAMES`."""
    tower = model.tower or model.started_tower
    if tower is not None and tower.hears:
        return ("audio",)
    kind = model.model_type
    has_videos = kind.startswith(("qwen", "glm4v")) or kind in ("gemma4", "internvl")
    return ("image", "video") if has_videos else ("image",)


def _limits(stated: OptionValue | None) -> dict[str, int]:
    """Items per prompt by medium; none where the value cannot be read."""
    if stated is None:
        return {}
    text = str(stated)
    try:
        limits = json.loads(text)
    except ValueError:  # as releases before 0.10 write it: image=2,video=0
        limits = dict(part.split("=", 1) for part in text.split(",") if "=" in part)
    if not isinstance(limits, dict):
        return {}
    counts = {}
    for medium, value in limits.items():
        number = value.get("count", USUAL_LIMIT) if isinstance(value, dict) else value
        if str(number).isdigit():
            counts[str(medium)] = int(number)
    return counts


def check(served: Served) -> None:
    """Refuse limits that cannot be read, and pipelines whose first stage has a tower.

    Raises:
        ConfigError: one line.
    """
    stated = served.options[LIMITS]
    if stated is not None and not _limits(stated):
        raise ConfigError(
            f'{LIMITS}: {str(stated)!r} is not read; accepted is {{"image": 1, "video": 0}}'
        )


def profiled(served: Served) -> tuple[int, Item] | None:
    """How many of the largest item the profile pass runs, and which; None without a tower.

    Kind: exact for images and the videos of Qwen and Gemma 4.
    Source: vLLM 0.19.0 multimodal/encoder_budget.py `MultiModalBudget`; v1/core/
    encoder_cache_manager.py:269; logs of 1 image in 16,384 tokens (Qwen3.5), 1 video in 114,688
    (Qwen2.5-VL), 3 videos in 8,192 (Gemma 4) and 5 images in 16,384 (LLaVA-NeXT).
    """
    tower = served.model.started_tower
    if tower is None or served.options[UNPROFILED]:
        return None
    limits = _limits(served.options[LIMITS])
    items = [each for each in _items(served, tower) if limits.get(each.medium, USUAL_LIMIT)]
    if not items:
        return None
    largest = max(items, key=lambda each: (each.tokens, each.medium))
    budget = _budget(served, largest)
    of_prompt = min(limits.get(largest.medium, USUAL_LIMIT), served.context // largest.tokens)
    most = max_num_seqs(served) * max(1, of_prompt)
    return max(1, min(budget // largest.tokens, most)), largest


def _budget(served: Served, largest: Item) -> int:
    """Tokens for which an encoder runs at once, and its cache has room."""
    return max(max_num_batched_tokens(served), largest.tokens)


def _spreads(served: Served) -> bool:
    """Whether vectors of an item have as many rows as the encoder's budget has tokens."""
    since, until = TIMED_VIDEOS
    return not served.libraries.older("vllm", since) and served.libraries.older("vllm", until)


def _items(served: Served, tower: Tower) -> list[Item]:
    """The largest item of each medium that a model takes."""
    kind = served.model.model_type
    if tower.hears:
        grid = tower.grid(1, round(tower.window_s * SAMPLING_RATE))
        return [Item(medium="audio", tokens=grid.tokens, images=1, size=(1, 1))]
    size, grid = largest_image(tower)
    tokens = grid.tokens + grid.markers
    items = [Item(medium="image", tokens=tokens, images=1, size=size)]
    if kind in FRAMES:
        frames = 16 if served.libraries.older("vllm", "0.11") else FRAMES[kind]
        pairs = max(1, min(frames // FRAMES_AT_ONCE, served.context // tokens))
        items.append(Item(medium="video", tokens=pairs * tokens, images=pairs, size=size))
    elif kind.startswith(("qwen3_vl", "qwen3_5")):
        seen = grid.num_pixels / (3 * FRAMES_AT_ONCE)  # of three colours, once a frame
        share, shrunk = VIDEO_PIXELS / FRAMES_AT_ONCE / seen, math.sqrt(seen / math.prod(size))
        frame = (round(size[0] * shrunk), round(size[1] * shrunk * share))
        times = TIME_SHARE if _spreads(served) else 1
        items.append(Item(medium="video", tokens=int(tokens * share * times), images=1, size=frame))
    elif kind == "gemma4":
        of_video = GEMMA4_FRAMES * (GEMMA4_FRAME_TOKENS + GEMMA4_MARKERS)
        images = GEMMA4_FRAMES * GEMMA4_FRAME_TOKENS / grid.tokens
        items.append(Item(medium="video", tokens=of_video, images=images, size=size))
    return items


@cache
def _sizes() -> tuple[tuple[int, int], ...]:
    sides = range(1, _MOST_TILES + 1)
    tiled = [(tile * wide, tile * high) for tile in _TILES for wide in sides for high in sides]
    return (*((side, side) for side in _WHOLE), *tiled)


def largest_image(tower: Tower) -> tuple[tuple[int, int], ImageGrid]:
    """Width and height of the image with the most tokens, and its grid of patches.

    Kind: exact for processors whose largest image has sides of `_sizes`.
    Source: `get_image_size_with_most_features` of vLLM 0.19.0 model_executor/models.
    """
    best = max(_sizes(), key=lambda size: _tokens(tower.grid(size[1], size[0])))
    return best, tower.grid(best[1], best[0])


def _tokens(grid: ImageGrid) -> tuple[int, int]:
    return grid.tokens + grid.markers, grid.crops * grid.patches


def tower_entries(served: Served) -> tuple[list[Entry], list[Entry], list[Entry]]:
    """What the tower takes: while the text is profiled, while the tower runs, and always.

    Kind: estimate: kernels and projectors take more.
    Source: `TOWER_PIXELS`, `TOWER_PASS`, `TOWER_VECTORS`, `TOWER_INPUTS`.
    """
    model, element_bytes = served.model, served.dtypes.compute_bytes
    tower = model.started_tower
    if tower is None:
        return [], [], []
    width = max_num_batched_tokens(served) * model.hidden_size * element_bytes
    always = [Entry(TOWER_INPUTS, width)]
    largest = profiled(served)
    if largest is None:
        return [], [], always
    count, item = largest
    forward = _forward(served, tower, ceil_div(round(1000 * count * item.images), 1000), item)
    vector_bytes = model.hidden_size * element_bytes * (1 + tower.deep)
    pixels = Entry(TOWER_PIXELS, forward.num_pixels * element_bytes)
    rows = forward.num_vectors
    if _spreads(served) and rows // count < (budget := _budget(served, item)):
        rows = rows // count + count * budget  # a variable of the loop holds the last item's own
    vectors = Entry(TOWER_VECTORS, rows * vector_bytes)
    if model.model_type == "gemma4":
        working = int(_forward(served, tower, _gemma4_images(served, forward), item).working)
    elif model.model_type in TRANSFORMERS_TOWERS:
        working = int(forward.working)
    else:
        is_divided = not served.libraries.older("vllm", DIVIDED_SINCE)
        ranks = served.count(RANKS) or 1
        elements = block_width(tower, ranks if is_divided else 1)
        working = forward.num_patches * elements * element_bytes
    return [pixels, vectors], [pixels, Entry(TOWER_PASS, working)], always


def _gemma4_images(served: Served, forward: TowerForward) -> int:
    """How many of the images, or of as many patches in frames, Gemma 4's tower sees at once.

    A tenth of the GPU holds four numbers of 64 bits for each of a patch's positions.
    Kind: exact where half of what is free is more. Source: vLLM 0.20.0 models/gemma4_mm.py
    `_process_video_input`, which passes frames one by one; 0.22.0 :1105 `_encoder_chunk`.
    """
    if served.libraries.older("vllm", CHUNKED_SINCE):
        return 1
    patches = served.gpu.memory_bytes // 10 // (4 * GEMMA4_TABLE * 8)
    of_each = forward.num_patches // forward.num_images
    at_once: int = max(1, min(forward.num_images, patches // of_each))
    return at_once


def block_width(tower: Tower, ranks: int = 1) -> int:
    """Elements of a patch at the worst point of vLLM's own blocks, and embedded positions.

    Each of `ranks` GPUs has its heads and its part of what is between two matrices, and a tensor of
    its own for the sum of all: vLLM 0.20.0 device_communicators/cuda_communicator.py:223.

    A block's input, its norm's result and what was projected live until the call returns: Python's
    frames hold arguments. Queries and keys are copied before they are rotated, and rotated into a
    third tensor. What is activated is a tensor of its own; a gated block adds up in place.
    Kind: exact for these lines. Source: vLLM 0.22.0 models/qwen2_5_vl.py:306, :366-420,
    qwen3_vl.py `Qwen3_VisionBlock.forward`, siglip.py `SiglipEncoderLayer.forward`.
    """
    width = tower.stack.hidden_size
    summed = width if ranks > 1 else 0
    widths: list[int] = []
    for layer, _ in tower.stack.layers():
        for each in layer.attentions:
            keys = each.q_width + each.k_width
            copies = 2 * keys if each.rotary_dim else 0
            of_heads = keys + each.v_width + copies + each.out_width
            widths.append(3 * width + ceil_div(of_heads, ranks))
        if layer.mlp is not None:
            gated = layer.mlp.gated
            between = ceil_div(layer.mlp.width * (4 if gated else 2), ranks)
            widths.append((2 if gated else 3) * width + between)
    return max(widths) + summed + (width if tower.positions else 0)


def _forward(served: Served, tower: Tower, images: int, item: Item) -> TowerForward:
    run = replace(served.run, image_size=item.size, audio_seconds=tower.window_s or 30.0)
    return TowerForward(
        tower=tower,
        run=run,
        dtypes=tower_dtypes(tower, run, served.dtypes),
        method=served.method,
        targets=(),
        num_images=images,
        r=run.r,
    )


def tower_notes(served: Served) -> list[str]:
    """Notes on the tower, for the user."""
    model = served.model
    if model.unloaded_params:
        return [f"{model.name} is started for texts alone: what it sees with stays on the disk"]
    if not has_tower(model):
        return []
    way_out = text_flag(served)
    largest = profiled(served)
    if largest is None:
        profile = "none of its largest images is profiled"
    else:
        count, item = largest
        profile = (
            f"room is kept for {count} {item.medium}{'s' * (count > 1)} of {item.tokens:,} tokens"
        )
    lines = [f"the tower of {model.name} is loaded, and {profile}; {way_out} leaves it out"]
    if model.model_type in OTHER_VIDEOS and "video" in media(model):
        lines.append(f"the largest video of {model.name} may take more, which is not counted")
    return lines


def has_tower(model: ModelSpec) -> bool:
    """Whether an engine holds a tower of `model`."""
    in_tower = any(linear.reads == "tower" for linear in model.idle_linears)
    return model.started_tower is not None or in_tower


def text_options(libraries: Libraries, model: ModelSpec) -> dict[str, OptionValue]:
    """The option with which a release leaves the tower of `model` out.

    Source: github.com/vllm-project/vllm/pull/22299 (0.10.1), pull/34120 (2026-02-09).
    """
    if libraries.older("vllm", "0.17"):
        return {LIMITS: json.dumps(dict.fromkeys(media(model), 0))}
    return {TEXT_OPTION: True}


def text_flag(served: Served) -> str:
    """The flag of `text_options`."""
    ((name, value),) = text_options(served.libraries, served.model).items()
    flag = "--" + name.replace("_", "-")
    return flag if value is True else f"{flag} '{value}'"
