"""llama.cpp's server: weights of a GGUF file, and a cache for every slot, allocated at the start.

Read in llama.cpp 0c1e570 (llama-cpp-python 0.3.36). What a GPU cannot hold lies in host memory.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache

from whichlora.errors import ConfigError
from whichlora.memory import allocator
from whichlora.memory.entries import Entry
from whichlora.serving.base import Engine, Pool, ReadLogs, Served, Start, Stepping
from whichlora.serving.block_groups import CachedLayers
from whichlora.serving.cpu_timer import CpuTimer, cpu_timer
from whichlora.serving.ggml_backends import BACKENDS, FP32, ggml_backend
from whichlora.serving.gguf import (
    BLOCKS,
    FILE_TYPES,
    STORED_AS,
    UNQUANTISED,
    counted_type,
    other_mix,
    row_bytes,
    unknown_matrices,
)
from whichlora.serving.gguf_architectures import (
    MODEL_TYPES,
    known_architecture,
)
from whichlora.serving.llama_cpp_entries import COMPUTE, KV_CACHE, LAYERS, OUTPUT
from whichlora.serving.llama_cpp_host import (
    BANDWIDTH,
    LOAD_MODES,
    LOADING,
    check_bandwidth,
    hosted,
    time_notes,
)
from whichlora.serving.llama_cpp_log import LOG
from whichlora.serving.llama_cpp_memory import (
    CELLS,
    COPIES,
    DEVICES,
    MARGIN_BYTES,
    WIDE,
    Taken,
    cache_types,
    cards_of,
    file_of,
    file_type,
    fits,
    free_bytes,
    has_flash,
    num_devices,
    padded,
    placement,
    proportions,
    shares_cache,
    slots,
    taken,
    token_bytes,
    uses_flash,
    with_caches,
)
from whichlora.serving.llama_cpp_overrides import OVERRIDES
from whichlora.serving.llama_cpp_rates import (
    LEAST_INTEGER_PRODUCTS,
    block_rates,
    has_block_rates,
    plain_rates,
    wide_block_rates,
)
from whichlora.serving.llama_cpp_split import Placement
from whichlora.serving.other_flags import DRAFT, IMAGES, NO_NUMBER, OF_A_SERVER
from whichlora.serving.rank import check_model, positions_note
from whichlora.serving.unified_memory import is_unified
from whichlora.spec.architecture import ModelSpec, layers_in_order
from whichlora.spec.checkpoint import gguf_type, is_gguf
from whichlora.spec.layer import Linear
from whichlora.spec.numeric import ceil_div
from whichlora.spec.options import Option
from whichlora.spec.run import MOST_COUNT
from whichlora.units import format_bytes

MOST_SLOTS = 256  # src/llama-cparams.h LLAMA_MAX_SEQ
# A step copies a recurrent layer's state out of the cache; its kernel writes the next one there.
# Source: llama.cpp 0c1e570 src/llama-graph.cpp build_rs, ggml/src/ggml-cuda/ggml-cuda.cu:3465.
STATE_PASSES = 2
# Of a prompt under the delta rule, which one warp takes token by token. Kind: measured, 512 to
# 1,024 tokens of 32 heads on an RTX 5090 (llama.cpp's pull request 22587, "master").
# Source: llama.cpp 0c1e570 ggml/src/ggml-cuda/gated_delta_net.cu.
DELTA_TOKEN_S = 0.48e-6
# More than any model has: what "all" means, also in releases that lack the word; "auto" is -1 and
# "all" -2 in common/arg.cpp.
ALL_LAYERS = 999
CACHE_TYPES = ("f16", "bf16", "f32", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
_OF_OLLAMA = (
    "the command is llama.cpp's. Ollama starts by 'ollama serve', and has num_ctx for context, "
    "num_gpu for n_gpu_layers, num_batch for batch_size in a Modelfile or request; "
    "OLLAMA_NUM_PARALLEL for parallel, OLLAMA_KV_CACHE_TYPE for cache_type_k and cache_type_v and "
    "OLLAMA_FLASH_ATTENTION for flash_attn in its environment"
)


# --- what it takes ----------------------------------------------------------------------------


def _load_of_start(served: Served) -> tuple[int, int]:
    """Slots, and the length of each as `cache` pads it."""
    return slots(served), padded(served.context)


def start(served: Served) -> Start:
    """What llama-server takes when it starts, of the GPU that is the fullest.

    Kind: exact, but for the context of the process. Source: `taken`, `placement`.
    """
    placed = placement(served)
    loads = loads_of(served, placed)
    fullest = min(loads, key=lambda load: load.left_bytes)
    if fullest.left_bytes >= 0:
        fullest = min(loads, key=lambda load: load.pool.max_concurrency(served.context))
    needed = fullest.taken
    entries = (
        Entry(LAYERS, needed.layers),
        Entry(OUTPUT, needed.output),
        Entry(KV_CACHE, needed.cache),
        Entry(COMPUTE, needed.compute),
    )
    pool = _common_pool(fullest, loads)
    fault = _fault(served, fullest, pool) if fullest.left_bytes < 0 else ""
    return Start(
        entries=entries,
        budget_bytes=needed.device,
        pool=pool,
        max_num_seqs=lambda context: served.count("parallel") or MOST_SLOTS,
        shared_cells=padded(served.context) if shares_cache(served) else None,
        fault=fault,
        untimed=_untimed(served, placed),
        stage=fullest.number + 1 if (served.count(DEVICES) or 1) > 1 else 0,
        held=_held(served, placed) if fits(served) and not served.gpu.is_cpu else "",
        counts_process=ggml_backend(served.gpu).counts_process,
        is_whole=_is_whole(served, placed),
    )


def _is_whole(served: Served, placed: Placement) -> bool:
    """Whether GPUs hold all of the model."""
    is_moved = any(each.device is None for each in placed.moved)
    return placed.layers > len(layers_in_order(served.model)) and not is_moved


def _held(served: Served, placed: Placement) -> str:
    """What of the model GPUs have."""
    num_layers = len(layers_in_order(served.model))
    count = "all" if placed.layers > num_layers else f"{placed.layers} of {num_layers + 1}"
    words = f"{count} layers on the {'GPU' if len(placed.by_device) == 1 else 'GPUs'}"
    without = len({each.layer for each in placed.moved if each.device is None})
    return f"{words}, the experts of {without} on the host" if without else words


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What one device has at the start.

    Args:
        number: of the device, from 0.
        left_bytes: free after the start; below 0 where it fails.
        pool: what could be had for keys and values.
    """

    number: int
    taken: Taken
    left_bytes: int
    pool: Pool


def loads_of(served: Served, placed: Placement) -> list[Load]:
    """Of each device."""
    margin = MARGIN_BYTES if fits(served) and not served.gpu.is_cpu else 0
    loads = []
    for (device, number), free in zip(enumerate(cards_of(served)), free_bytes(served), strict=True):
        needed = taken(served, placed, served.context, slots(served), device=device)
        pool = _pool(served, placed, needed, free - margin, device)
        left_bytes = free - needed.device
        loads.append(Load(number=number, taken=needed, left_bytes=left_bytes, pool=pool))
    return loads


def _pool(served: Served, placed: Placement, needed: Taken, room: int, device: int) -> Pool:
    """What could be had for keys and values on `device`, in cells of one layer.

    A longer context has larger masks, too, which are counted with it.
    """
    cell_bytes = CELLS * sum(token_bytes(served))
    computing = taken(served, placed, served.context, 1, device=device).compute

    @cache
    def of_padded(context: int) -> int:
        each = taken(served, placed, context, 1, device=device)
        masks = each.compute - computing
        blocks: int = ceil_div(each.cache + masks, cell_bytes)
        return max(1, blocks)

    def blocks_of(context: int) -> int:
        return of_padded(padded(context))

    held = needed.layers + needed.output + needed.compute
    return Pool(num_bytes=room - held, block_bytes=cell_bytes, blocks_of=blocks_of)


def _common_pool(fullest: Load, loads: Sequence[Load]) -> Pool:
    """The pool of `fullest`, in which a sequence takes as large a share as of any device."""
    pool = fullest.pool
    others = [load.pool for load in loads if load is not fullest and load.pool.num_blocks]
    if not others:
        return pool

    def blocks_of(context: int) -> int:
        needed: int = pool.blocks_of(context)
        for pool_beside in others:
            share = pool_beside.blocks_of(context) * pool.num_blocks
            needed = max(needed, ceil_div(share, pool_beside.num_blocks))
        return needed

    return replace(pool, blocks_of=blocks_of)


def _cells_in_words(served: Served) -> str:
    cells = str(padded(served.context))
    return cells if shares_cache(served) else f"{slots(served)} x {cells}"


def _fault(served: Served, load: Load, pool: Pool) -> str:
    needed = load.taken
    several = num_devices(served) > 1
    where = f" on GPU {load.number} of {num_devices(served)}" if several else ""
    free = format_bytes(needed.device + load.left_bytes)
    wants = (
        f"weights take {format_bytes(needed.layers + needed.output)}, the cache of "
        f"{_cells_in_words(served)} tokens {format_bytes(needed.cache)} and "
        f"computing {format_bytes(needed.compute)}, and {free} are free{where}"
    )
    if served.gpu.is_cpu:
        return f"{wants}; give a smaller file_type or context"
    longest = pool.max_context(served.model.max_position_embeddings)
    ways = "a larger n_cpu_moe" if served.count("n_cpu_moe") else "fewer n_gpu_layers or fit true"
    if several and any(proportions(served)):
        ways = "another tensor_split"
    smaller = "a smaller file_type"
    last = f"{smaller}, or a context up to {longest} for one slot" if longest else f"or {smaller}"
    return f"{wants}; give {ways}, {last}"


# --- how it steps -----------------------------------------------------------------------------


def weight_bytes(served: Served, linear: Linear | None) -> float:
    """Bytes of a matrix in the file, the mean of the layers that have it; of the head for None."""
    return _weight_bytes(served.model, file_type(served))(linear)


@lru_cache(maxsize=256)
def _weight_bytes(model: ModelSpec, stored: str) -> Callable[[Linear | None], float]:
    """The function of one file, so that equal ways to step are equal."""
    file = file_of(model, stored)

    def of(linear: Linear | None) -> float:
        if linear is None:
            name = "token_embd" if model.head_tied else "output"
            return float(sum(tensor.num_bytes for tensor in file if tensor.name == name))
        equal = [tensor for tensor in file if _is_same(tensor.linear, linear)]
        return sum(tensor.num_bytes for tensor in equal) / len({tensor.layer for tensor in equal})

    return of


def _is_same(stored: Linear | None, linear: Linear) -> bool:
    """Shared experts have the names of others, and other sizes."""
    if stored is None or stored.name != linear.name or stored.count != linear.count:
        return False
    return (stored.in_features, stored.out_features) == (linear.in_features, linear.out_features)


def stepping(served: Served) -> Stepping:
    """Slots that decode and prompts share a batch, which is read in micro-batches.

    Kind: exact; what the host does between two steps is in the kernels' times.
    Source: llama.cpp 0c1e570 tools/server/server-context.cpp `update_slots`.
    """
    in_blocks = file_type(served) not in UNQUANTISED
    keys, values = cache_types(served)
    in_block = 256
    cached = (row_bytes(in_block, keys) + row_bytes(in_block, values)) / (2 * in_block)
    batch = served.count("batch_size") or 2048
    placed, num_layers = placement(served), len(layers_in_order(served.model))
    is_whole = not served.gpu.is_cpu and _is_whole(served, placed)
    rates = plain_rates
    if in_blocks:
        is_measured = len(placed.by_device) == 1 and not _has_states(served.model)
        rates = block_rates if is_measured else wide_block_rates
    return Stepping(
        ranks=1,
        step_s=0.0,
        sequence_s=0.0,
        max_step_tokens=batch,
        mixes=True,
        captured_tokens=batch,
        launch_s=0.0,
        cache_bytes=cached,
        rates=rates,
        weight_bytes=_weight_bytes(served.model, file_type(served)),
        joins=False,
        max_num_seqs=slots(served),
        graph_tokens=min(batch, served.count("ubatch_size") or 512),
        stage_layers=_stage_layers(placed, num_layers) if is_whole else (),
        stage_cards=_stage_cards(served, placed) if is_whole else (),
        hosted=None if is_whole else hosted(served, placed),
        passes_at_once=COPIES if placed.is_pipelined(num_layers) else 1,
        state_bytes=_state_bytes,
        state_passes=STATE_PASSES,
        delta_token_s=DELTA_TOKEN_S,
    )


def _has_states(model: ModelSpec) -> bool:
    return any(each.kind != "softmax" for layer, _ in model.layers() for each in layer.attentions)


def _state_bytes(kind: CachedLayers) -> int:
    """Of one sequence in one layer: in fp32, whatever else is cached."""
    return kind.conv_elements * FP32 + kind.recurrent_elements * FP32


def _stage_layers(placed: Placement, num_layers: int) -> tuple[int, ...]:
    """Of each GPU that has some; none of one GPU."""
    counts = [
        len(placed.range_of(device, num_layers))
        for device, count in enumerate(placed.by_device)
        if count
    ]
    return tuple(counts) if len(counts) > 1 else ()


def _stage_cards(served: Served, placed: Placement) -> tuple[int, ...]:
    """The card of each stage, where they are unequal."""
    if not served.gpu.beside or len(placed.by_device) == 1:
        return ()
    return tuple(number for number, count in enumerate(placed.by_device) if count)


def _untimed(served: Served, placed: Placement) -> str:
    """Why steps of such a file, or of one that memory does not hold, have no times."""
    if served.gpu.is_cpu:
        return ""
    backend = ggml_backend(served.gpu)
    if backend.untimed:
        return backend.untimed
    if is_unified(served.gpu) and not _is_whole(served, placed):
        needed = taken(served, placed, served.context, slots(served))
        both = needed.device + needed.host
        if both > served.gpu.memory_bytes:
            has = "macOS lets the GPU use" if backend.limit else "processor and GPU share"
            return (
                f"{has} {format_bytes(served.gpu.memory_bytes)}, of which the "
                f"model takes {format_bytes(both)}: what does not fit is read from the disk again "
                "for each token; use a smaller file_type"
            )
    cards = cards_of(served).values()
    if file_type(served) not in UNQUANTISED and not all(map(has_block_rates, cards)):
        return (
            f"{served.gpu.key} has no products of 8-bit integers, by which weights in blocks are "
            f"multiplied from compute capability {LEAST_INTEGER_PRODUCTS} on, and rates without "
            "them are not known; use file_type F16"
        )
    return ""


def logged_timer(served: Served, read_logs: ReadLogs) -> CpuTimer | None:
    """The timer of a CPU, by logs of the same file on it; those of GPUs are not read."""
    if not served.gpu.is_cpu:
        return None
    return cpu_timer(served, file_type(served), stepping(served), read_logs())


# --- what it refuses --------------------------------------------------------------------------


def check(served: Served) -> None:
    """Refuse what llama.cpp cannot serve, and what is not predicted of it.

    Raises:
        ConfigError: one line.
    """
    check_model(served, keeps_states=True)
    model, run = served.model, served.run
    architecture = known_architecture(model)
    if architecture is None or unknown_matrices(model, architecture):
        raise ConfigError(
            f"serving: llama-cpp is not predicted for the architecture {model.model_type}; known "
            f"are {', '.join(MODEL_TYPES)}"
        )
    if run.quant not in (None, "none"):
        raise ConfigError(
            f"serving: llama-cpp reads GGUF files, got quant {run.quant}; use quant none and "
            f"serving option file_type, such as {STORED_AS.get(run.quant, 'Q4_K_M')}"
        )
    if served.targets:
        raise ConfigError(
            "serving: llama-cpp's unmerged adapters are not predicted; use serve merged"
        )
    if run.precision in ("fp32", "tf32"):
        raise ConfigError(
            f"serving: llama-cpp takes its weights from file_type, got precision {run.precision}; "
            "leave precision out"
        )
    if not model.has_experts and (served.options["cpu_moe"] or served.count("n_cpu_moe")):
        raise ConfigError(
            f"serving: n_cpu_moe and cpu_moe move experts, and {model.name} has none; give "
            "fewer n_gpu_layers"
        )
    _check_flash(served)
    values = cache_types(served)[1].lower()
    if not uses_flash(served) and values not in WIDE:
        raise ConfigError(
            f"cache_type_v: {values} needs flash attention; leave flash_attn out, or use f16"
        )
    if slots(served) > MOST_SLOTS:
        raise ConfigError(
            f"parallel: llama.cpp has at most {MOST_SLOTS} slots, got {slots(served)}; give "
            f"parallel {MOST_SLOTS} or less, so that more requests wait"
        )
    _check_devices(served)
    _check_rows(served)
    check_bandwidth(served)
    if served.options[OVERRIDES] is not None:
        for option in ("n_cpu_moe", "cpu_moe"):
            if served.options[option]:
                raise ConfigError(f"{OVERRIDES}: {option} places experts, too; give one of both")
        placement(served)


def _check_flash(served: Served) -> None:
    """Refuse fused attention that a backend lacks: the processor would attend in its place.

    Source: llama.cpp 0c1e570 src/llama-context.cpp:615 sched_reserve.
    """
    if served.options["flash_attn"] == "off" or has_flash(served):
        return
    keys, values = (each.lower() for each in cache_types(served))
    if served.options["flash_attn"] == "on" or values not in WIDE:
        called, narrow = ggml_backend(served.gpu).called, with_caches(served, "q8_0")
        instead = "give both f16, or both q8_0" if narrow else "give both f16"
        if served.options["flash_attn"] == "on" and not with_caches(served, "f16"):
            instead = "leave flash_attn out"
        raise ConfigError(
            f"cache_type_k: {keys} and cache_type_v {values} have no fused attention on {called} "
            f"for heads of {served.model.name}; {instead}"
        )


def _check_devices(served: Served) -> None:
    """Refuse ways to divide a model that this release lacks, or that are not predicted.

    Source: llama.cpp 0c1e570 `make_gpu_buft_list`, src/llama-model.cpp:1140, and
    `ggml_backend_cuda_reg_get_proc_address`, which has no split buffers (pull request 24216).
    """
    mode, count = served.options["split_mode"], served.count(DEVICES) or 1
    if mode == "row":
        raise ConfigError(
            "split_mode: row was removed from llama.cpp's CUDA backend, which refuses to load; use "
            "layer"
        )
    if mode == "tensor":
        raise ConfigError(
            "split_mode: tensor is experimental in llama.cpp, and not predicted; use layer, or vllm"
        )
    if count > 1 and any(card.is_cpu for card in served.gpu.beside or (served.gpu,)):
        raise ConfigError(f"{DEVICES}: a CPU has no other GPUs, got {count}; use 1")
    if len({card.kind for card in served.gpu.beside}) > 1:
        raise ConfigError(
            f"{DEVICES}: GPUs of several vendors are not predicted in one run; name those of one"
        )
    if count > 1 and served.gpu.backend.shares_host_memory:
        raise ConfigError(f"{DEVICES}: {served.gpu.key} is one GPU, got {count}; use 1")
    if (served.count("main_gpu") or 0) >= count:
        raise ConfigError(
            f"main_gpu: {served.count('main_gpu')} of {count} GPUs; they are numbered from 0"
        )
    text = served.options["tensor_split"]
    if text is None:
        return
    try:
        parts = [float(part) for part in re.split("[,/]+", str(text))]
    except ValueError:
        parts = []
    if not parts or len(parts) > count or min(parts) < 0 or not any(parts):
        raise ConfigError(
            f"tensor_split: {text} for {count} GPUs; give a proportion of each, such as "
            f"{'/'.join('1' * count)}"
        )


def _check_rows(served: Served) -> None:
    """A cache in blocks needs rows of whole blocks."""
    for name in ("cache_type_k", "cache_type_v"):
        elements = BLOCKS[str(served.options[name]).upper()][0]
        for layer, _ in served.model.layers():
            for attention in layer.attentions:
                width = attention.head_dim
                if width % elements:
                    raise ConfigError(
                        f"{name}: {served.options[name]} has blocks of {elements}, and heads of "
                        f"{served.model.name} have {width} elements; use f16"
                    )


def _file_path(served: Served, stored: str) -> str:
    """The GGUF file whose mix of types is `stored`."""
    if served.weights:
        return f"{served.weights}/model-{stored}.gguf"
    name = served.model.name.rpartition("/")[2]
    own_type = gguf_type(served.model.config)
    if counted_type(own_type) == stored and name.lower().endswith(".gguf"):
        return name
    if is_gguf(served.model.config):  # its name states a type itself
        name = re.sub(r"[-_.]gguf$", "", name, flags=re.IGNORECASE)
        name = re.sub(rf"[-_.:]{own_type}$", "", name, flags=re.IGNORECASE)
    return f"{name}-{stored}.gguf"


def _file_words(served: Served) -> tuple[str, str]:
    """The flag and the value that name the file: on this machine, or in a repository of the hub.

    Source: llama.cpp 0c1e570 common/arg.cpp `--hf-repo`, "<user>/<model>[:quant]".
    """
    model, stored = served.model, file_type(served)
    repository, _, tag = model.name.partition(":")
    is_file = "/" not in repository or repository.lower().endswith(".gguf")
    if served.weights or is_file or not is_gguf(model.config):
        return "-m", _file_path(served, stored)
    is_named = counted_type(gguf_type(model.config)) == stored
    return "-hf", f"{repository}:{tag if tag and is_named else stored}"


def prepare(served: Served) -> str:
    """Makes the file of merged weights, with a checkout of llama.cpp and its programs.

    Source: llama.cpp 0c1e570 convert_hf_to_gguf.py --outtype, tools/quantize/quantize.cpp.
    """
    if not served.weights:
        return ""
    stored = file_type(served)
    plain = stored if stored in ("BF16", "F16", "F32") else "BF16"
    file, source = _file_path(served, stored), _file_path(served, plain)
    lines = [
        f'python "${{LLAMA_CPP:-llama.cpp}}/convert_hf_to_gguf.py" {served.weights} '
        f"--outtype {plain.lower()} --outfile {source}"
    ]
    if stored != plain:
        lines.append(f"llama-quantize {source} {file} {stored}")
    steps = "\n  ".join(lines)
    return f"if [ ! -f {file} ]; then\n  {steps}\nfi\n"


def command(served: Served) -> str:
    """Source: llama.cpp 0c1e570 common/arg.cpp."""
    num_slots = slots(served)
    flag, file = _file_words(served)
    words = ["llama-server", flag, shlex.quote(file)]
    caches = 1 if shares_cache(served) else num_slots
    words += ["-c", str(served.context * caches), "-np", str(num_slots)]
    for option, value in served.run.serving_options:
        if option in ("file_type", "parallel", BANDWIDTH):
            continue
        if option == DEVICES:
            device, count = ggml_backend(served.gpu).name, served.count(DEVICES) or 1
            names = ",".join(f"{device}{number}" for number in range(count))
            words += ["--device", names]
            continue
        flag = "--" + option.replace("_", "-")
        if option == "fit":
            words += [flag, "on" if value else "off"]
        elif value is True:
            words.append(flag)
        elif value is not False:
            words += [flag, shlex.quote(str(value))]
    return " ".join(words)


def notes(served: Served, start: Start) -> tuple[str, ...]:
    """What a user must know."""
    limit = served.model.max_position_embeddings
    placed, num_layers = placement(served), len(layers_in_order(served.model))
    needed = taken(served, placed, served.context, slots(served))
    count = slots(served)
    words = "1 slot" if count == 1 else f"{count} slots"
    lines = [f"llama.cpp with a file of type {file_type(served)}, {words}"]
    lines += positions_note(served, "the cache is allocated, and a slot stops at them")
    if served.gpu.is_cpu:
        return tuple(lines)
    lines += _backend_notes(served)
    lines += _device_notes(served, placed, start)
    if start.held and start.pool.max_context(limit) < (limit or MOST_COUNT):
        lines.append(
            f"pool, at once and longest are with {start.held}; asked for more, it starts with more "
            "of the model on the host (--fit)"
        )
    if placed.layers <= num_layers:
        holder = "the GPU holds" if len(placed.by_device) == 1 else "GPUs hold"
        lines.append(
            f"{holder} {placed.layers} of {num_layers + 1} layers, the output matrix included; "
            "the host computes the others, far slower"
        )
    if not any(load.taken.cache for load in loads_of(served, placed)):
        lines.append(
            "keys and values lie on the host, whose memory limits them and is not judged: the pool "
            "is what the GPU would have"
        )
    on_gpus = placed.layers_on_gpus(num_layers)
    of_host = {each.layer for each in placed.moved if each.device is None}
    on_host = len(of_host.union(range(on_gpus.start)))
    if of_host.intersection(on_gpus):
        what = "experts" if served.model.has_experts else "MLPs"
        lines.append(f"the {what} of {on_host} of {num_layers} layers lie on the host, far slower")
    lines.append(
        f"the host holds {format_bytes(needed.host)}: token embeddings, buffers and what the GPU "
        "does not hold"
    )
    if is_unified(served.gpu) and not _is_whole(served, placed):
        lines.append(
            "processor and GPU share one memory: a part on the host frees nothing, and is slower"
        )
    return tuple(lines)


def _backend_notes(served: Served) -> list[str]:
    """What is known of memory, and what attention does, beside NVIDIA's GPUs."""
    backend = ggml_backend(served.gpu)
    lines = [backend.limit] if backend.limit else []
    if backend.leaves:
        context = format_bytes(allocator.idle_context_bytes(served.gpu))
        lines.append(f"{backend.leaves} is not known: {context} are taken")
    if not has_flash(served) and served.options["flash_attn"] == "auto":
        lines.append(
            f"{backend.called} has no fused attention for these heads and caches: every score of a "
            "micro-batch is written"
        )
    return lines


def _time_notes(served: Served) -> list[str]:
    """Of times that a host has a part in, or more than one build."""
    is_whole = not served.gpu.is_cpu and _is_whole(served, placement(served))
    lines = [] if is_whole else time_notes(served)
    builds = ggml_backend(served.gpu).builds
    return [*lines, builds] if builds else lines


def _device_notes(served: Served, placed: Placement, start: Start) -> list[str]:
    """What each GPU has; none where there is one."""
    count, asked = len(placed.by_device), served.count(DEVICES) or 1
    if asked > 1 and count == 1:
        return [f"split_mode none: GPU {served.count('main_gpu') or 0} of {asked} has everything"]
    if count == 1:
        return []
    cards = cards_of(served)
    held = [
        f"GPU {load.number}{f' ({cards[load.number].key})' * bool(served.gpu.beside)} {layers} "
        f"layers, {format_bytes(load.taken.device)}"
        for load, layers in zip(loads_of(served, placed), placed.by_device, strict=True)
    ]
    lines = [
        f"of each GPU: {'; '.join(held)}; the output matrix is one layer, and bytes are of GPU "
        f"{start.stage - 1}, the fullest"
    ]
    if served.gpu.beside:
        lines.append("GPUs are numbered as you named them; CUDA numbers the fastest one 0")
    if placed.is_pipelined(len(layers_in_order(served.model))):
        lines.append(
            "a token passes the GPUs one after the other; micro-batches of a long prompt overlap"
        )
    elif not placed.overlaps:
        lines.append("micro-batches do not overlap: the buffers for that do not fit")
    return lines


ENGINE = Engine(
    name="llama-cpp",
    summary="llama.cpp: a GGUF file, and a cache of every slot from the start",
    device_kinds=tuple(BACKENDS),
    reads_checkpoints=False,
    loads_towers=False,  # a GGUF file of its own has it, which `--mmproj` names
    also_called=dict.fromkeys(("llama.cpp", "llamacpp", "llama-server", "lm-studio"), "")
    | {"ollama": _OF_OLLAMA},
    stored_by="file_type",
    staged_by=DEVICES,
    takes_unequal=True,
    fills_stages=False,
    stored_as=STORED_AS,
    counted_type=counted_type,
    compared_forms=("Q8_0", "Q4_K_M"),
    usual_quants=("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M"),
    options=(
        Option(
            name="file_type",
            summary="mix of types in the GGUF file",
            default=None,
            kind=str,
            choices=tuple(FILE_TYPES),
            explain=other_mix,
        ),
        Option(
            name="parallel",
            summary="slots (-np); default: --concurrency",
            default=None,
            other_names=("np", "OLLAMA_NUM_PARALLEL"),
        ),
        Option(
            name="n_gpu_layers",
            summary="layers on the GPU (-ngl), the output matrix is one; default: all, or as fit",
            default=None,
            least=0,
            other_names=("ngl", "gpu_layers", "num_gpu"),
            stands_for={"auto": None, -1: None, "all": ALL_LAYERS, -2: ALL_LAYERS},
        ),
        Option(
            name="n_cpu_moe",
            summary="of so many first layers the experts lie on the host (-ncmoe)",
            default=None,
            other_names=("ncmoe",),
        ),
        Option(
            name="cpu_moe",
            summary="all experts lie on the host (-cmoe)",
            default=False,
            other_names=("cmoe",),
        ),
        Option(
            name=OVERRIDES,
            summary="what lies on the host by its name, such as exps=CPU (-ot)",
            default=None,
            kind=str,
            other_names=("ot",),
            joiner=",",
        ),
        Option(
            name="fit",
            summary="layers that do not fit beside 1 GiB lie on the host",
            default=True,
            stands_for={"on": True, "off": False},
        ),
        Option(name=DEVICES, summary="GPUs that it may use (-dev); default: --gpus", default=1),
        Option(
            name="split_mode",
            summary="layer: each GPU has whole layers; none: main_gpu has all (-sm)",
            default="layer",
            choices=("layer", "none", "row", "tensor"),
            other_names=("sm",),
        ),
        Option(
            name="tensor_split",
            summary="proportions of the GPUs, such as 3/1; default: their free memory (-ts)",
            default=None,
            kind=str,
            other_names=("ts",),
        ),
        Option(
            name="main_gpu",
            summary="which GPU has all with split_mode none, from 0 (-mg)",
            default=0,
            least=0,
            other_names=("mg",),
        ),
        Option(
            name="batch_size",
            summary="tokens of a logical batch (-b)",
            default=2048,
            other_names=("b", "num_batch"),
        ),
        Option(
            name="ubatch_size",
            summary="tokens of one graph (-ub)",
            default=512,
            other_names=("ub",),
        ),
        Option(
            name="cache_type_k",
            summary="of keys (-ctk)",
            default="f16",
            choices=CACHE_TYPES,
            other_names=("ctk", "OLLAMA_KV_CACHE_TYPE"),
        ),
        Option(
            name="cache_type_v",
            summary="of values (-ctv)",
            default="f16",
            choices=CACHE_TYPES,
            other_names=("ctv", "OLLAMA_KV_CACHE_TYPE"),
        ),
        Option(
            name="flash_attn",
            summary="fused attention (-fa)",
            default="auto",
            choices=("auto", "on", "off"),
            other_names=("fa", "OLLAMA_FLASH_ATTENTION"),
            stands_for={True: "on", False: "off"},  # and 1 and 0; plans read on as true
        ),
        Option(
            name="kv_unified",
            summary="slots share one cache of --context tokens, of which each may have all (-kvu)",
            default=False,
            other_names=("kvu",),
        ),
        Option(name="swa_full", summary="sliding layers keep everything", default=False),
        Option(
            name=BANDWIDTH,
            summary="of the host's memory: GB/s, or ddr5-5600 (two channels), 8xddr4-3200",
            default=None,
            kind=str,
        ),
        Option(
            name=LOADING,
            summary="none: weights on the host lie where GPUs copy from faster (-lm)",
            default="auto",
            choices=LOAD_MODES,
            other_names=("lm", "no_mmap"),
            stands_for={True: "none", False: None},  # of --no-mmap, which older releases have
        ),
    ),
    least_capability=5.0,  # docs/build.md
    runs_torch=False,
    takes_context=lambda gpu: not ggml_backend(gpu).counts_process,
    start=start,
    load_of_start=_load_of_start,
    stepping=stepping,
    logged_timer=logged_timer,
    check=check,
    command=command,
    prepare=prepare,
    notes=notes,
    time_notes=_time_notes,
    log=LOG,
    programs=("llama-server", "llama-cli"),
    images=("ggml-org/llama.cpp", "ggerganov/llama.cpp"),
    model_flags=("hf", "hf_repo", "hfr", "m", "model"),
    elsewhere=dict.fromkeys(("c", "ctx_size", "num_ctx", "OLLAMA_CONTEXT_LENGTH"), "context"),
    refused=OF_A_SERVER
    | dict.fromkeys(("m", "model", "hf", "hf_repo", "alias", "jinja", "temp"), NO_NUMBER)
    | dict.fromkeys(("t", "threads", "mlock", "prio", "a", "reasoning_format"), NO_NUMBER)
    | dict.fromkeys(("p", "prompt", "cnv", "no_cnv", "conversation", "color"), NO_NUMBER)
    | dict.fromkeys(("md", "model_draft"), DRAFT)
    | dict.fromkeys(("mmproj", "mm"), IMAGES),
    set_aside=frozenset(("mmproj", "mm")),
)
