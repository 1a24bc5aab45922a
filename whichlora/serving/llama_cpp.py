"""llama.cpp's server: weights of a GGUF file, and a cache for every slot, allocated at the start.

Read in llama.cpp 0c1e570 (llama-cpp-python 0.3.36). What a GPU cannot hold lies in host memory.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache

from whichlora.errors import ConfigError
from whichlora.memory import allocator
from whichlora.memory.entries import Entry
from whichlora.serving.base import Engine, LoggedTimes, Pool, Served, Start, Stepping
from whichlora.serving.cpu_timer import CpuTimer, cpu_timer
from whichlora.serving.ggml_graph import FP32, Batch, compute_bytes
from whichlora.serving.gguf import (
    BLOCKS,
    FILE_TYPES,
    UNQUANTISED,
    Tensor,
    row_bytes,
    tensors,
    unknown_matrices,
)
from whichlora.serving.gguf_architectures import (
    MODEL_TYPES,
    architecture_of,
    known_architecture,
)
from whichlora.serving.kernel_rates import (
    ExpertRates,
    KernelRates,
    kernel_rates,
)
from whichlora.serving.llama_cpp_entries import COMPUTE, KV_CACHE, LAYERS, OUTPUT
from whichlora.serving.llama_cpp_log import LOG
from whichlora.serving.other_flags import DRAFT, IMAGES, NO_NUMBER, OF_A_SERVER
from whichlora.serving.rank import check_model, positions_note
from whichlora.spec.architecture import Linear, ModelSpec, layers_in_order
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.numeric import ceil_div
from whichlora.spec.options import Option
from whichlora.timing.model import product_rate, sustained_factor
from whichlora.units import MiB, format_bytes

CELLS = 256  # a cache has a multiple of them; src/llama-context.cpp:293
MOST_SLOTS = 256  # src/llama-cparams.h LLAMA_MAX_SEQ
MARGIN_BYTES = 1024 * MiB  # what --fit leaves free; common/common.h:483
OFFLOADED_TOKENS = 32  # of a batch from which on a GPU computes with copies; ggml-cuda.cu
CACHE_TYPES = ("f16", "bf16", "f32", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
_WIDE = ("f16", "bf16", "f32")
_SEVERAL = "divides a file over several GPUs, which is not predicted of llama-cpp; use vllm"
_OVERRIDES = "places tensors by their names, which is not predicted; give n_cpu_moe or n_gpu_layers"


# --- what it is asked for ---------------------------------------------------------------------


def file_type(served: Served) -> str:
    """The type of the file; 16 bit where nobody states one."""
    stated = served.options["file_type"]
    if stated is not None:
        return str(stated)
    return "F16" if served.run.precision.startswith("fp16") else "BF16"


def slots(served: Served) -> int:
    """Sequences that are served at once."""
    return served.count("parallel") or int(served.run.batch_size)


def micro_batch(served: Served, cells: int) -> int:
    """Tokens of one graph. Kind: exact. Source: llama.cpp 0c1e570 src/llama-context.cpp:246."""
    batch = min(served.count("batch_size") or 2048, cells)
    return min(batch, served.count("ubatch_size") or 512)


def uses_flash(served: Served) -> bool:
    """Whether attention is one fused kernel, which every GPU that we know has."""
    return served.options["flash_attn"] != "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """The cells of a slot, or of all slots where they share one cache.

    Args:
        cells: by sliding window; None is whole attention.
        streams: caches beside each other.
    """

    cells: tuple[tuple[int | None, int], ...]
    streams: int


def cells_kept(served: Served, context: int, num_slots: int) -> Cache:
    """How many tokens each layer keeps.

    Kind: exact. Source: llama.cpp 0c1e570 src/llama-context.cpp:293-311;
    `llama_kv_cache_iswa`, src/llama-kv-cache-iswa.cpp:68.
    """
    unified = bool(served.options["kv_unified"])
    whole = _padded(context * num_slots if unified else context)
    cells: dict[int | None, int] = {None: whole}
    total = whole if unified else whole * num_slots
    tokens = micro_batch(served, total)
    for window in filter(None, _windows(served.model)):
        kept = window * (num_slots if unified else 1) + tokens
        full = bool(served.options["swa_full"])
        cells[window] = whole if full else _padded(min(whole, kept))
    return Cache(cells=tuple(cells.items()), streams=1 if unified else num_slots)


def _padded(cells: int) -> int:
    padded: int = ceil_div(cells, CELLS) * CELLS
    return padded


def _window(model: ModelSpec, window: int | None) -> int | None:
    return window if architecture_of(model).windows else None


@lru_cache(maxsize=256)
def _windows(model: ModelSpec) -> frozenset[int | None]:
    """Of its layers; None is whole attention."""
    sliding = {each.sliding_window for layer, _ in model.layers() for each in layer.attentions}
    return frozenset(_window(model, window) for window in sliding)


def cache_bytes(served: Served, kept: Cache) -> list[int]:
    """Bytes of every layer's cache, of all slots; a state of fixed size is in fp32.

    Kind: exact. Source: llama.cpp 0c1e570 src/llama-kv-cache.cpp:232; `llama_memory_recurrent`,
    src/llama-memory-recurrent.cpp.
    """
    cells = dict(kept.cells)
    return [
        kept.streams * cells[window] * keys_and_values + slots(served) * state
        for window, keys_and_values, state in _cell_bytes(served.model, *_cache_types(served))
    ]


def _cache_types(served: Served) -> tuple[str, str]:
    """Of keys and values."""
    return str(served.options["cache_type_k"]).upper(), str(served.options["cache_type_v"]).upper()


@lru_cache(maxsize=256)
def _cell_bytes(
    model: ModelSpec, keys: str, values: str
) -> tuple[tuple[int | None, int, int], ...]:
    """Of every layer its window, and the bytes of one token and of one sequence."""
    architecture, found = architecture_of(model), []
    for layer in layers_in_order(model):
        window = None
        token = state = 0
        for attention in layer.attentions:
            window = _window(model, attention.sliding_window)
            k_width, v_width = architecture.cached(attention)
            token += row_bytes(k_width, keys) + row_bytes(v_width, values)
            state += FP32 * architecture.state(attention)
        found.append((window, token, state))
    return tuple(found)


@lru_cache(maxsize=256)
def _token_widths(model: ModelSpec) -> tuple[int, int]:
    """Elements of keys and values of the first layer that caches any."""
    cached = architecture_of(model).cached
    widths = (cached(each) for layer in layers_in_order(model) for each in layer.attentions)
    return next(filter(any, widths))


def _token_bytes(served: Served) -> tuple[int, int]:
    """So in bytes."""
    (k_width, v_width), (keys, values) = _token_widths(served.model), _cache_types(served)
    return row_bytes(k_width, keys), row_bytes(v_width, values)


# --- where it lies ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What the GPU holds.

    Args:
        layers: the last ones, and one more is the output matrix.
        expert_layers: of the first layers the GPU has the experts, too.
        host_experts: but of so many first ones, whose experts are asked to lie on the host.
    """

    layers: int
    expert_layers: int
    host_experts: int = 0


@lru_cache(maxsize=256)
def _file(model: ModelSpec, stored: str) -> tuple[Tensor, ...]:
    return tuple(tensors(model, stored, architecture_of(model)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """Bytes of the device, and of the host beside a GPU."""

    layers: int
    output: int
    cache: int
    compute: int
    host: int

    @property
    def device(self) -> int:
        return self.layers + self.output + self.cache + self.compute


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    """Bytes of a file where it lies: layers and output on the device, and what is on the host.

    Args:
        copied: tensors of layers on the host, by layer and name.
    """

    layers: int
    output: int
    host: int
    copied: tuple[tuple[tuple[int, str], int], ...]


@lru_cache(maxsize=1024)
def _weights(model: ModelSpec, stored: str, placed: Placement, on_cpu: bool) -> _Weights:
    """Kind: exact. Source: llama.cpp 0c1e570 src/llama-model.cpp load_tensors."""
    first = _first_on_gpu(model, placed)
    table, *others = _file(model, stored)
    layers, host = 0, table.num_bytes
    output = table.num_bytes if on_cpu or model.head_tied else 0
    copied: dict[tuple[int, str], int] = {}
    for tensor in others:
        if tensor.layer is None:
            output += tensor.num_bytes if placed.layers or on_cpu else 0
        elif on_cpu or _is_on_gpu(tensor, first, placed):
            layers += tensor.num_bytes
        else:
            host += tensor.num_bytes
            name = tensor.name + tensor.suffix.removesuffix(".weight")
            copied[tensor.layer, name] = tensor.num_bytes
    return _Weights(layers=layers, output=output, host=host, copied=tuple(copied.items()))


def _first_on_gpu(model: ModelSpec, placed: Placement) -> int:
    """The first layer on the GPU."""
    return len(layers_in_order(model)) + 1 - placed.layers


def taken(served: Served, placed: Placement, context: int, num_slots: int) -> Taken:
    """What llama.cpp takes of the device and of the host.

    Kind: exact. Source: llama.cpp 0c1e570 src/llama-model.cpp load_tensors; `LAYERS` and others.
    """
    model, kept = served.model, cells_kept(served, context, num_slots)
    on_cpu = served.gpu.kind == "cpu"
    held = _weights(model, file_type(served), placed, on_cpu)
    by_layer, first = cache_bytes(served, kept), _first_on_gpu(model, placed)
    on_device = sum(by_layer if on_cpu else by_layer[first:])
    batch = _batch(served, placed, kept)
    return Taken(
        layers=held.layers,
        output=held.output,
        cache=on_device,
        compute=compute_bytes(model, batch, architecture_of(model), reads_tokens=on_cpu),
        host=0
        if on_cpu
        else held.host + sum(by_layer) - on_device + host_buffer_bytes(model, batch),
    )


def _is_on_gpu(tensor: Tensor, first: int, placed: Placement) -> bool:
    assert tensor.layer is not None
    has_experts = placed.host_experts <= tensor.layer < placed.expert_layers
    if tensor.is_expert and not has_experts:
        return False
    return tensor.layer >= first


def host_buffer_bytes(model: ModelSpec, batch: Batch) -> int:
    """The host's buffer beside a GPU: token numbers, embeddings, positions and masks.

    Kind: exact where every layer lies on the GPU. Source: llama.cpp 0c1e570
    `build_inp_embd`, src/llama-graph.cpp:2376.
    """
    architecture, (_, width) = architecture_of(model), _token_widths(model)
    # looked up, and room for embeddings that are handed in
    hidden = FP32 * model.hidden_size * (1 + architecture.embeddings(model))
    rows = 4 + 4 * architecture.positions
    rows += FP32 if _scales_queries(model) else 0
    states = 4 * batch.sequences if _has_states(model) else 0  # which one is whose
    rows += len(batch.cells) * 8 * (1 + (1 if batch.flash else width))
    masks = sum(cells for _, cells in batch.cells) * (2 if batch.flash else FP32)
    return batch.tokens * (hidden + rows + masks) + states


def _scales_queries(model: ModelSpec) -> bool:
    scales = architecture_of(model).scales_queries
    return any(scales(model, each) for layer, _ in model.layers() for each in layer.attentions)


def _has_states(model: ModelSpec) -> bool:
    state = architecture_of(model).state
    return any(state(each) for layer, _ in model.layers() for each in layer.attentions)


def _batch(served: Served, placed: Placement, kept: Cache) -> Batch:
    """What a graph is reserved for; a row of logits for each slot."""
    keys, values = (str(served.options[name]) for name in ("cache_type_k", "cache_type_v"))
    windows = _windows(served.model)
    tokens = micro_batch(served, sum(cells for _, cells in kept.cells[:1]) * kept.streams)
    batch = Batch(
        tokens=ceil_div(tokens, slots(served)) * slots(served),
        outputs=min(tokens, slots(served)),
        sequences=slots(served),
        cells=tuple((window, cells) for window, cells in kept.cells if window in windows),
        flash=uses_flash(served),
        widened_keys=kept.streams if keys != "f16" else 0,
        widened_values=kept.streams if values != "f16" else 0,
        rotates_keys=keys not in _WIDE,
        rotates_values=values not in _WIDE,
    )
    if served.gpu.kind == "cpu":
        return replace(batch, alignment=32, widened_keys=0, widened_values=0)
    return _with_copies(served, placed, batch, kept)


def _with_copies(served: Served, placed: Placement, batch: Batch, kept: Cache) -> Batch:
    """`batch` with the copies that a GPU makes of what lies in host memory."""
    if batch.tokens < OFFLOADED_TOKENS:
        return batch
    copied = _weights(served.model, file_type(served), placed, on_cpu=False).copied
    if not copied:
        return batch
    batch = replace(batch, copied=copied)
    first = _first_on_gpu(served.model, placed)
    if first <= 0:
        return batch
    keys, values = _token_bytes(served)
    return replace(
        batch,
        host_layers=first,
        copied_keys=kept.streams * keys,
        copied_values=kept.streams * values,
    )


def all_of(model: ModelSpec) -> Placement:
    num_layers = len(layers_in_order(model))
    return Placement(layers=num_layers + 1, expert_layers=num_layers)


def placement(served: Served) -> Placement:
    """What lies on the GPU: all layers, those that are asked for, or those that fit.

    `--fit` leaves whole layers on the host until the margin stays free. Of experts it counts those
    of the first layer on the GPU alone. It then adds those of as many next ones as fit, if the GPU
    could hold everything but experts.
    Kind: exact for dense models; of experts, whole layers (it may add a part of one more).
    Source: llama.cpp 0c1e570 `common_params_fit_impl`, common/fit.cpp:173.
    """
    whole = _asked(served)
    room = free_bytes(served) - MARGIN_BYTES
    if served.gpu.kind == "cpu" or not _fits(served) or _needs(served, whole) <= room:
        return whole
    if not served.model.has_experts:
        dense = _most(
            whole.layers, lambda number: _needs(served, replace(whole, layers=number)), room
        )
        return replace(whole, layers=dense)

    def last(number: int, with_experts: int = 1) -> Placement:
        return Placement(layers=number, expert_layers=whole.layers - number + with_experts)

    number = _most(whole.layers, lambda number: _needs(served, last(number)), room)
    if not number or _needs(served, replace(whole, expert_layers=0)) >= room:
        return last(number)
    more = _most(number - 1, lambda more: _needs(served, last(number, 1 + more)), room)
    return last(number, 1 + more)


def _asked(served: Served) -> Placement:
    """What is asked of the GPU: everything where nothing is stated.

    Kind: exact. Source: llama.cpp 0c1e570 common/arg.cpp `--n-cpu-moe`, `--cpu-moe`.
    """
    whole = all_of(served.model)
    stated, experts = served.count("n_gpu_layers"), served.count("n_cpu_moe") or 0
    return replace(
        whole,
        layers=whole.layers if stated is None else min(stated, whole.layers),
        host_experts=whole.expert_layers
        if served.options["cpu_moe"]
        else min(experts, whole.expert_layers),
    )


def _fits(served: Served) -> bool:
    """Whether `--fit` moves what does not fit: nothing that a user has placed.

    Source: llama.cpp 0c1e570 `common_params_fit_impl`, "already set by user, abort".
    """
    placed = served.count("n_gpu_layers") is not None or served.options["cpu_moe"]
    return bool(served.options["fit"]) and not (placed or served.count("n_cpu_moe"))


def _most(high: int, needs: Callable[[int], int], room: int) -> int:
    """A number up to `high` whose needs fit, one more does not; the method of false position.

    Kind: exact. Source: llama.cpp 0c1e570 `common_params_fit_impl`, common/fit.cpp:688.
    """
    low, least, most = 0, needs(0), needs(high)
    if most <= room:
        return high
    while high - low > 1:
        step = (high - low) * (room - least) // max(1, most - least)
        middle = low + min(max(step, 1), high - low - 1)
        needed = needs(middle)
        if needed <= room:
            low, least = middle, needed
        else:
            high, most = middle, needed
    return low


def _needs(served: Served, placed: Placement) -> int:
    return taken(served, placed, served.context, slots(served)).device


def free_bytes(served: Served) -> int:
    """Free when the model is loaded."""
    return served.gpu.memory_bytes - allocator.context_bytes(served.gpu)


# --- what it takes ----------------------------------------------------------------------------


def _load_of_start(served: Served) -> tuple[int, int]:
    """Slots, and the length of each as `cache` pads it."""
    return slots(served), _padded(served.context)


def start(served: Served) -> Start:
    """What llama-server takes of one device when it starts.

    Kind: exact, but for the context of the process. Source: `taken`, `placement`.
    """
    placed, num_slots = placement(served), slots(served)
    needed = taken(served, placed, served.context, num_slots)
    room = free_bytes(served)
    if _fits(served) and served.gpu.kind == "cuda":
        room -= MARGIN_BYTES
    pool = _pool(served, placed, needed, room)
    entries = (
        Entry(LAYERS, needed.layers),
        Entry(OUTPUT, needed.output),
        Entry(KV_CACHE, needed.cache),
        Entry(COMPUTE, needed.compute),
    )
    fault = ""
    if needed.device > free_bytes(served):
        fault = _fault(served, needed, pool)
    return Start(
        entries=entries,
        budget_bytes=needed.device,
        pool=pool,
        max_num_seqs=lambda context: served.count("parallel") or MOST_SLOTS,
        fault=fault,
        untimed=_untimed(served, placed),
    )


def _pool(served: Served, placed: Placement, needed: Taken, room: int) -> Pool:
    """What could be had for keys and values, in cells of one layer.

    A longer context has larger masks, too, which are counted with it.
    """
    cell_bytes = CELLS * sum(_token_bytes(served))
    computing = taken(served, placed, served.context, 1).compute

    @cache
    def of_padded(context: int) -> int:
        each = taken(served, placed, context, 1)
        masks = each.compute - computing
        blocks: int = ceil_div(each.cache + masks, cell_bytes)
        return max(1, blocks)

    def blocks_of(context: int) -> int:
        return of_padded(_padded(context))

    held = needed.layers + needed.output + needed.compute
    return Pool(num_bytes=room - held, block_bytes=cell_bytes, blocks_of=blocks_of)


def _fault(served: Served, needed: Taken, pool: Pool) -> str:
    free = format_bytes(free_bytes(served))
    wants = (
        f"weights take {format_bytes(needed.layers + needed.output)}, the cache of "
        f"{slots(served)} x {_padded(served.context)} tokens {format_bytes(needed.cache)} and "
        f"computing {format_bytes(needed.compute)}, and {free} are free"
    )
    if served.gpu.kind == "cpu":
        return f"{wants}; give a smaller file_type or context"
    longest = pool.max_context(served.model.max_position_embeddings)
    ways = "a larger n_cpu_moe" if served.count("n_cpu_moe") else "fewer n_gpu_layers or fit true"
    return f"{wants}; give {ways}, a smaller file_type, or a context up to {longest} for one slot"


# --- how it steps -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRates:
    """What products with weights in blocks reach on GPUs of one compute capability.

    Args:
        kernel_s: of a kernel beside its work; a product also narrows its input to 8 bit.
        products: of the fp32 peak, in many rows, where `sustained_factor` is 1.
        deviation: wider where fewer than five cards were measured.
    """

    kernel_s: float
    products: float
    deviation: float = 0.12


# Kind: fitted, to the published speeds of one 7B model in Q4_0 on 25 cards
# (`benchmarks/llama_cpp_gpus.py --fit`); those of few rows to an RTX 3090, whose steps of 1 to 8
# tokens take 1.04 ms longer for each (pull request 15802).
BLOCK_READS = 0.86  # of the bandwidth
FEW_PRODUCTS = 0.38  # of the fp32 peak, of at most FEW_ROWS rows
BLOCK_RATES = {
    "6.1": BlockRates(kernel_s=13.2e-6, products=1.15, deviation=0.25),
    "7.0": BlockRates(kernel_s=6.8e-6, products=2.95, deviation=0.25),
    "7.5": BlockRates(kernel_s=7.6e-6, products=2.37, deviation=0.25),
    "8.0": BlockRates(kernel_s=7.6e-6, products=3.69, deviation=0.25),
    "8.6": BlockRates(kernel_s=3.7e-6, products=1.89),
    "8.9": BlockRates(kernel_s=2.5e-6, products=1.96),
    "9.0": BlockRates(kernel_s=5.8e-6, products=2.19, deviation=0.25),
    "12.0": BlockRates(kernel_s=2.4e-6, products=1.82),
    "12.1": BlockRates(kernel_s=3.1e-6, products=1.59, deviation=0.25),
}
_BLOCKS_ELSEWHERE = BlockRates(kernel_s=5.1e-6, products=2.07, deviation=0.25)  # geometric means
PLAIN_DEVIATION = 0.25  # of 16-bit files: only releases of 2024 were measured
# Of experts: of two products beside four small kernels, and of the rate of a dense product. Kind:
# estimate.
EXPERT_KERNELS_S, EXPERTS_PRODUCTS = 20e-6, 0.39
FEW_ROWS = 8  # ggml/src/ggml-cuda/mmvq.cuh MMVQ_MAX_BATCH_SIZE


def block_rates(gpu: GpuSpec, dtype: str) -> KernelRates:
    """Of kernels that read weights in blocks and compute in 8 bit, and of those beside them.

    Source: llama.cpp 0c1e570 ggml/src/ggml-cuda/mmvq.cu, mmq.cuh.
    """
    capability = str(gpu.compute_capability or "")
    blocks = BLOCK_RATES.get(capability) or _BLOCKS_ELSEWHERE
    rate = blocks.products * sustained_factor(gpu, "bf16") * product_rate(gpu, "fp32")
    products = rate / product_rate(gpu, dtype)
    return replace(
        kernel_rates(gpu),
        product_s=blocks.kernel_s,
        attention_s=blocks.kernel_s,
        prefill_attention_s=blocks.kernel_s,
        pointwise_s=blocks.kernel_s,
        reads=BLOCK_READS,
        products=products,
        code_experts=ExpertRates(
            own_s=EXPERT_KERNELS_S + 4 * blocks.kernel_s,
            reads=BLOCK_READS,
            products=EXPERTS_PRODUCTS * products,
            activations=math.inf,
        ),
        overlaps=False,
        few_rows=FEW_ROWS,
        few_products=FEW_PRODUCTS,
        deviation=blocks.deviation,
    )


def plain_rates(gpu: GpuSpec, dtype: str) -> KernelRates:
    """Of kernels that read weights of 16 bit."""
    return replace(kernel_rates(gpu), deviation=PLAIN_DEVIATION)


def weight_bytes(served: Served, linear: Linear | None) -> float:
    """Bytes of a matrix in the file, the mean of the layers that have it; of the head for None."""
    return _weight_bytes(served.model, file_type(served))(linear)


@lru_cache(maxsize=256)
def _weight_bytes(model: ModelSpec, stored: str) -> Callable[[Linear | None], float]:
    """The function of one file, so that equal ways to step are equal."""
    file = _file(model, stored)

    def of(linear: Linear | None) -> float:
        if linear is None:
            name = "token_embd" if model.head_tied else "output"
            return float(sum(tensor.num_bytes for tensor in file if tensor.name == name))
        found = [tensor for tensor in file if _is_same(tensor.linear, linear)]
        return sum(tensor.num_bytes for tensor in found) / len({tensor.layer for tensor in found})

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
    keys, values = (str(served.options[name]).upper() for name in ("cache_type_k", "cache_type_v"))
    in_block = 256
    cached = (row_bytes(in_block, keys) + row_bytes(in_block, values)) / (2 * in_block)
    batch = served.count("batch_size") or 2048
    return Stepping(
        ranks=1,
        step_s=0.0,
        sequence_s=0.0,
        max_step_tokens=batch,
        mixes=True,
        captured_tokens=batch,
        launch_s=0.0,
        cache_bytes=cached,
        rates=block_rates if in_blocks else plain_rates,
        weight_bytes=_weight_bytes(served.model, file_type(served)),
        joins=False,
        max_num_seqs=slots(served),
        graph_tokens=min(batch, served.count("ubatch_size") or 512),
    )


def _untimed(served: Served, placed: Placement) -> str:
    """Why steps on a CPU, or with a part of the model on the host, have no times."""
    rates = "each type of weights has a rate of its own there, which a datasheet does not state"
    if served.gpu.kind == "cpu":
        return (
            f"a step of llama.cpp on a CPU is predicted from its log of this file alone: {rates}; "
            "let llama-server answer a request, then: whichlora calibrate --gpu cpu --from-log FILE"
        )
    if reason := architecture_of(served.model).untimed:
        return reason
    if placed != all_of(served.model):
        return f"the host computes a part of each step: {rates}; use a smaller file_type or context"
    return ""


def logged_timer(served: Served, logs: Sequence[LoggedTimes]) -> CpuTimer | None:
    """The timer of a CPU, by logs of the same file on it."""
    if served.gpu.kind != "cpu":
        return None
    return cpu_timer(served, file_type(served), stepping(served), logs)


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
            "serving option file_type, such as Q4_K_M"
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
    if not _token_widths(model)[1] and len(set(_cache_types(served))) > 1:
        raise ConfigError(
            f"cache_type_k: values of {model.name} are a part of its cached keys, got "
            f"{served.options['cache_type_k']} and cache_type_v {served.options['cache_type_v']}; "
            "give both the same type"
        )
    if not uses_flash(served) and str(served.options["cache_type_v"]) not in _WIDE:
        raise ConfigError(
            f"cache_type_v: {served.options['cache_type_v']} needs flash attention; leave "
            "flash_attn out, or use f16"
        )
    _check_rows(served)


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
    return f"{served.model.name.rpartition('/')[2]}-{stored}.gguf"


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
    words = ["llama-server", "-m", shlex.quote(_file_path(served, file_type(served)))]
    words += ["-c", str(served.context * num_slots), "-np", str(num_slots)]
    for option, value in served.run.serving_options:
        if option in ("file_type", "parallel"):
            continue
        flag = "--" + option.replace("_", "-")
        if option == "fit":
            words += [flag, "on" if value else "off"]
        elif value is True:
            words.append(flag)
        elif value is not False:
            words += [flag, str(value)]
    return " ".join(words)


def notes(served: Served, start: Start) -> tuple[str, ...]:
    """What a user must know."""
    placed, whole = placement(served), all_of(served.model)
    needed = taken(served, placed, served.context, slots(served))
    count = slots(served)
    words = "1 slot" if count == 1 else f"{count} slots"
    lines = [f"llama.cpp with a file of type {file_type(served)}, {words}"]
    lines += positions_note(served, "the cache is allocated, and a slot stops at them")
    if served.gpu.kind == "cpu":
        return tuple(lines)
    if placed.layers < whole.layers:
        lines.append(
            f"the GPU holds {placed.layers} of {whole.layers} layers, the output matrix included; "
            "the host computes the others, far slower"
        )
    num_layers = whole.expert_layers
    whole_on_host = max(0, _first_on_gpu(served.model, placed))
    first_experts = max(whole_on_host, placed.host_experts)
    on_host = num_layers - max(0, placed.expert_layers - first_experts)
    if served.model.has_experts and on_host > whole_on_host:
        lines.append(f"the experts of {on_host} of {num_layers} layers lie on the host, far slower")
    lines.append(
        f"the host holds {format_bytes(needed.host)}: token embeddings, buffers and what the GPU "
        "does not hold"
    )
    return tuple(lines)


ENGINE = Engine(
    name="llama-cpp",
    summary="llama.cpp: a GGUF file, and a cache of every slot from the start",
    device_kinds=("cuda", "cpu"),
    reads_checkpoints=False,
    loads_towers=False,  # a GGUF file of its own has it, which `--mmproj` names
    also_called=("ollama", "llama.cpp", "llamacpp", "llama-server", "lm-studio"),
    stored_by="file_type",
    stored_as={"mxfp4": "MXFP4_MOE"},  # conversion/gpt_oss.py `repack_mxfp4`
    options=(
        Option(
            name="file_type",
            summary="mix of types in the GGUF file",
            default=None,
            kind=str,
            choices=tuple(FILE_TYPES),
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
            other_names=("ngl", "gpu_layers", "num_gpu"),
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
            name="fit",
            summary="layers that do not fit beside 1 GiB lie on the host",
            default=True,
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
            other_names=("fa",),
        ),
        Option(
            name="kv_unified",
            summary="slots share one cache (-kvu)",
            default=False,
            other_names=("kvu",),
        ),
        Option(name="swa_full", summary="sliding layers keep everything", default=False),
    ),
    least_capability=5.0,  # docs/build.md
    start=start,
    load_of_start=_load_of_start,
    stepping=stepping,
    logged_timer=logged_timer,
    check=check,
    command=command,
    prepare=prepare,
    notes=notes,
    log=LOG,
    elsewhere=dict.fromkeys(("c", "ctx_size", "num_ctx", "OLLAMA_CONTEXT_LENGTH"), "context"),
    refused=OF_A_SERVER
    | dict.fromkeys(("m", "model", "hf", "hf_repo", "alias", "jinja", "temp"), NO_NUMBER)
    | dict.fromkeys(("t", "threads", "mlock", "no_mmap", "main_gpu", "mg"), NO_NUMBER)
    | dict.fromkeys(("md", "model_draft"), DRAFT)
    | dict.fromkeys(("mmproj", "mm"), IMAGES)
    | dict.fromkeys(("ts", "tensor_split", "sm", "split_mode"), _SEVERAL)
    | dict.fromkeys(("ot", "override_tensor"), _OVERRIDES),
)
