"""What llama.cpp holds: the cache of every slot, tensors and buffers, on each GPU and on the host.

Read in llama.cpp 0c1e570 (llama-cpp-python 0.3.36). What GPUs cannot hold lies in host memory.
"""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from whichlora.memory import allocator
from whichlora.serving.base import Served
from whichlora.serving.ggml_backends import FP32, ggml_backend
from whichlora.serving.ggml_buffer import HOST
from whichlora.serving.ggml_graph import Batch, LayerPlace, compute_bytes
from whichlora.serving.gguf import Tensor, row_bytes, tensors
from whichlora.serving.gguf_architectures import architecture_of
from whichlora.serving.llama_cpp_overrides import OVERRIDES, overridden
from whichlora.serving.llama_cpp_split import Moved, Placement, divided, fitted
from whichlora.spec.architecture import ModelSpec, layers_in_order
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.numeric import ceil_div
from whichlora.units import MiB

CELLS = 256  # a cache has a multiple of them; src/llama-context.cpp:293
MARGIN_BYTES = 1024 * MiB  # what --fit leaves free of each GPU; common/common.h:483
COPIES = 4  # of inputs where micro-batches overlap; ggml-backend.cpp:772 GGML_SCHED_MAX_COPIES
DEVICES = "devices"  # the option for the number of GPUs
OFFLOADED_TOKENS = 32  # of a batch from which on a GPU computes with copies; ggml-cuda.cu
WIDE = ("f16", "bf16", "f32")


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
    """Whether attention is one fused kernel: where it is not switched off and the backend has it.

    Kind: exact. Source: llama.cpp 0c1e570 src/llama-context.cpp:615 sched_reserve, "auto".
    """
    return served.options["flash_attn"] != "off" and has_flash(served)


def has_flash(served: Served) -> bool:
    """Whether its backend has fused attention for this model and these caches."""
    keys, values = (each.lower() for each in cache_types(served))
    return ggml_backend(served.gpu).has_flash(_head_dims(served.model), keys, values)


def with_caches(served: Served, cache_type: str) -> bool:
    """As `has_flash`, with keys and values of another type."""
    return ggml_backend(served.gpu).has_flash(_head_dims(served.model), cache_type, cache_type)


@lru_cache(maxsize=256)
def _head_dims(model: ModelSpec) -> frozenset[int]:
    """Elements that heads compare: of latents, whose values are a part of the keys, all cached."""
    return frozenset(
        each.head_dim if architecture_of(model).cached(each)[1] else each.cache_elements
        for layer, _ in model.layers()
        for each in layer.attentions
        if each.kind == "softmax"
    )


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

    Slots that share one cache may each have all of it: n_ctx_seq is n_ctx then, else its share.
    Kind: exact. Source: llama.cpp 0c1e570 src/llama-context.cpp:290-311;
    `llama_kv_cache_iswa`, src/llama-kv-cache-iswa.cpp:68.
    """
    unified = shares_cache(served)
    whole = padded(context)
    cells: dict[int | None, int] = {None: whole}
    total = whole if unified else whole * num_slots
    tokens = micro_batch(served, total)
    for window in filter(None, _windows(served.model)):
        kept = window * (num_slots if unified else 1) + tokens
        full = bool(served.options["swa_full"])
        cells[window] = whole if full else padded(min(whole, kept))
    return Cache(cells=tuple(cells.items()), streams=1 if unified else num_slots)


def shares_cache(served: Served) -> bool:
    """Whether its slots have one cache between them: the server's default without `-np`.

    Source: llama.cpp 0c1e570 tools/server/server.cpp:152, which then has 4 slots.
    """
    return bool(served.options["kv_unified"])


def padded(cells: int) -> int:
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
        for window, keys_and_values, state in _cell_bytes(served.model, *cache_types(served))
    ]


def cache_types(served: Served) -> tuple[str, str]:
    """Of keys and values: values that are a part of the cached keys have no tensor of their own.

    Kind: exact. Source: llama.cpp 0c1e570 src/llama-kv-cache.cpp, `has_v = !is_mla`.
    """
    keys, values = (str(served.options[name]).upper() for name in ("cache_type_k", "cache_type_v"))
    return keys, values if token_widths(served.model)[1] else keys


@lru_cache(maxsize=256)
def _cell_bytes(
    model: ModelSpec, keys: str, values: str
) -> tuple[tuple[int | None, int, int], ...]:
    """Of every layer its window, and the bytes of one token and of one sequence."""
    architecture, cells = architecture_of(model), []
    for layer in layers_in_order(model):
        window = None
        token = state = 0
        for attention in layer.attentions:
            window = _window(model, attention.sliding_window)
            k_width, v_width = architecture.cached(attention)
            token += row_bytes(k_width, keys) + row_bytes(v_width, values)
            state += FP32 * architecture.state(attention)
        cells.append((window, token, state))
    return tuple(cells)


@lru_cache(maxsize=256)
def token_widths(model: ModelSpec) -> tuple[int, int]:
    """Elements of keys and values of the first layer that caches any."""
    cached = architecture_of(model).cached
    widths = (cached(each) for layer in layers_in_order(model) for each in layer.attentions)
    return next(filter(any, widths))


def token_bytes(served: Served) -> tuple[int, int]:
    """So in bytes."""
    (k_width, v_width), (keys, values) = token_widths(served.model), cache_types(served)
    return row_bytes(k_width, keys), row_bytes(v_width, values)


# --- where it lies ----------------------------------------------------------------------------


@lru_cache(maxsize=256)
def file_of(model: ModelSpec, stored: str) -> tuple[Tensor, ...]:
    return tuple(tensors(model, stored, architecture_of(model)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """Bytes of one device, and of the host beside all GPUs."""

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
    """Bytes of a file where it lies: layers and output on the device, and what is on the host."""

    layers: int
    output: int
    host: int


@lru_cache(maxsize=4096)
def places_of(model: ModelSpec, stored: str, placed: Placement) -> tuple[int | None, ...]:
    """The GPU of each tensor of a layer, in the order of the file; None is the host.

    Kind: exact. Source: llama.cpp 0c1e570 src/llama-model.cpp load_tensors.
    """
    num_layers = len(layers_in_order(model))
    by_layer = [layer_place(placed, layer, num_layers) for layer in range(num_layers)]
    moved = {each.layer: each for each in placed.moved}
    places = []
    for tensor in file_of(model, stored):
        if tensor.layer is not None:
            elsewhere = moved.get(tensor.layer)
            is_moved = elsewhere is not None and elsewhere.has(tensor.name)
            places.append(elsewhere.device if elsewhere and is_moved else by_layer[tensor.layer])
    return tuple(places)


def layer_place(placed: Placement, layer: int, num_layers: int) -> int | None:
    """The GPU that has a layer, but for what is moved out of it; None is the host."""
    on_gpus = placed.layers_on_gpus(num_layers)
    return bisect(placed.ends(num_layers), layer) if layer in on_gpus else None


@lru_cache(maxsize=4096)
def _weights(
    model: ModelSpec, stored: str, placed: Placement, device: int, on_cpu: bool
) -> _Weights:
    """Kind: exact. Source: llama.cpp 0c1e570 src/llama-model.cpp load_tensors."""
    table, *others = file_of(model, stored)
    places = iter(places_of(model, stored, placed))
    has_output = on_cpu or placed.output_device == device
    layers, host = 0, table.num_bytes
    output = table.num_bytes if on_cpu or (model.head_tied and has_output) else 0
    for tensor in others:
        if tensor.layer is None:
            output += tensor.num_bytes if has_output else 0
            continue
        place = next(places)
        if on_cpu or place == device:
            layers += tensor.num_bytes
        elif place is None:
            host += tensor.num_bytes
    return _Weights(layers=layers, output=output, host=host)


def taken(
    served: Served, placed: Placement, context: int, num_slots: int, *, device: int = 0
) -> Taken:
    """What llama.cpp takes of one device, and of the host.

    Kind: exact. Source: llama.cpp 0c1e570 src/llama-model.cpp load_tensors; `LAYERS` and others.
    """
    return taken_by(served, placed, cells_kept(served, context, num_slots), device, is_plan=False)


def taken_by(
    served: Served, placed: Placement, kept: Cache, device: int, *, is_plan: bool
) -> Taken:
    """As `taken`.

    Args:
        is_plan: as `--fit` plans it, which forgets on which GPU a layer's norm is.
    """
    model, on_cpu = served.model, served.gpu.is_cpu
    held = _weights(model, file_type(served), placed, device, on_cpu)
    by_layer = cache_bytes(served, kept)
    num_layers = len(by_layer)
    own, on_gpus = placed.range_of(device, num_layers), placed.layers_on_gpus(num_layers)
    on_device = sum(by_layer if on_cpu else by_layer[own.start : own.stop])
    batch = _batch(served, placed, kept, device, is_plan=is_plan)
    is_used = on_cpu or placed.by_device[device] > 0 or bool(batch.places)
    graph_device = device if batch.places else 0
    on_host = sum(by_layer[: on_gpus.start])
    return Taken(
        layers=held.layers,
        output=held.output,
        cache=on_device,
        compute=compute_bytes(
            model, batch, architecture_of(model), reads_tokens=on_cpu, device=graph_device
        )
        if is_used
        else 0,
        host=0 if on_cpu else held.host + on_host + host_buffer_bytes(model, batch),
    )


def host_buffer_bytes(model: ModelSpec, batch: Batch) -> int:
    """The host's buffer beside GPUs: token numbers, embeddings, positions and masks.

    Kind: exact where every layer lies on a GPU. Source: llama.cpp 0c1e570
    `build_inp_embd`, src/llama-graph.cpp:2376; ggml/src/ggml-backend.cpp:1430 graph_inputs.
    """
    architecture, (_, width) = architecture_of(model), token_widths(model)
    # looked up, and room for embeddings that are handed in
    embeddings = FP32 * model.hidden_size * architecture.embeddings(model)
    rows = 4 + 4 * architecture.positions
    rows += FP32 if _scales_queries(model) else 0
    states = 4 * batch.sequences if _has_states(model) else 0  # which one is whose
    is_whole = batch.flash or batch.turns_values
    rows += len(batch.cells) * 8 * (1 + (1 if is_whole else width))
    masks = sum(cells for _, cells in batch.cells) * (2 if batch.flash else FP32)
    inputs = batch.tokens * (embeddings + rows + masks) + states
    return batch.tokens * FP32 * model.hidden_size + batch.copies * inputs


def _scales_queries(model: ModelSpec) -> bool:
    scales = architecture_of(model).scales_queries
    return any(scales(model, each) for layer, _ in model.layers() for each in layer.attentions)


def _has_states(model: ModelSpec) -> bool:
    state = architecture_of(model).state
    return any(state(each) for layer, _ in model.layers() for each in layer.attentions)


def _batch(served: Served, placed: Placement, kept: Cache, device: int, *, is_plan: bool) -> Batch:
    """What a graph is reserved for on `device`; a row of logits for each slot."""
    keys, values = (each.lower() for each in cache_types(served))
    windows = _windows(served.model)
    tokens = micro_batch(served, sum(cells for _, cells in kept.cells[:1]) * kept.streams)
    backend = ggml_backend(served.gpu)
    wide_keys, wide_values = (
        backend.widens == "all" or (backend.widens == "others" and each != "f16")
        for each in (keys, values)
    )
    batch = Batch(
        backend=backend,
        streams=kept.streams,
        tokens=ceil_div(tokens, slots(served)) * slots(served),
        outputs=min(tokens, slots(served)),
        sequences=slots(served),
        cells=tuple((window, cells) for window, cells in kept.cells if window in windows),
        flash=uses_flash(served),
        turns_values=served.options["flash_attn"] != "off" and not has_flash(served),
        widened_keys=kept.streams * wide_keys,
        widened_values=kept.streams * wide_values,
        rotates_keys=keys not in WIDE,
        rotates_values=str(served.options["cache_type_v"]) not in WIDE,
    )
    if served.gpu.is_cpu:
        return batch
    return _part(served, placed, batch, kept, device, is_plan=is_plan)


def _part(
    served: Served, placed: Placement, batch: Batch, kept: Cache, device: int, *, is_plan: bool
) -> Batch:
    """`batch` of the layers that `device` has, which are all of one GPU.

    Source: llama.cpp 0c1e570 src/llama-context.cpp:2643, where norms of small batches, and of
    models that lie on GPUs as a whole, are bound to their layer's GPU; `--fit` resets that before
    it plans (`ggml_backend_sched_reserve_size`).
    """
    num_layers = len(layers_in_order(served.model))
    is_small = batch.tokens < OFFLOADED_TOKENS
    binds_norms = not is_plan and (is_small or placed.layers > num_layers)
    if (placed.moved or placed.layers <= num_layers) and not is_small:
        return replace(
            batch,
            places=_places(served, placed, kept),
            output_place=HOST if placed.output_device is None else placed.output_device,
            binds_norms=binds_norms,
        )
    if len(placed.by_device) == 1:
        return batch
    own, on_gpus = placed.range_of(device, num_layers), placed.layers_on_gpus(num_layers)
    return replace(
        batch,
        layers=(own.start, own.stop),
        scores=placed.output_device == device,
        copies=COPIES if placed.is_pipelined(num_layers) else 1,
        takes_norm=not binds_norms and own.start > on_gpus.start,
        gives_norm=not binds_norms and own.stop < num_layers,
    )


def _places(served: Served, placed: Placement, kept: Cache) -> tuple[LayerPlace, ...]:
    """Where each layer lies, with the tensors that lie elsewhere."""
    num_layers = len(layers_in_order(served.model))
    moved = {each.layer: each for each in placed.moved}
    cells, sizes = dict(kept.cells), token_bytes(served)
    by_layer = _cell_bytes(served.model, *cache_types(served))
    places = []
    for layer, stored in enumerate(_stored(served.model, file_type(served))):
        elsewhere: list[tuple[str, int, int]] = []
        own = layer_place(placed, layer, num_layers)
        if own is None:
            elsewhere = [(name, HOST, size) for name, size in stored]
        elif layer in moved:
            to = moved[layer].device
            place = HOST if to is None else to
            elsewhere = [(name, place, size) for name, size in stored if moved[layer].has(name)]
        cached: tuple[int, ...] = ()
        window, of_token, _ = by_layer[layer]
        if own is None and of_token:
            cached = tuple(kept.streams * cells[window] * size for size in sizes)
        places.append(
            LayerPlace(
                place=HOST if own is None else own,
                elsewhere=tuple(elsewhere),
                cached=cached,
            )
        )
    return tuple(places)


@lru_cache(maxsize=256)
def _stored(model: ModelSpec, stored: str) -> tuple[tuple[tuple[str, int], ...], ...]:
    """Names and bytes of every layer's tensors; those of a bias end so."""
    layers: list[list[tuple[str, int]]] = [[] for _ in layers_in_order(model)]
    for tensor in file_of(model, stored):
        if tensor.layer is not None:
            name = tensor.name + tensor.suffix.removesuffix(".weight")
            layers[tensor.layer].append((name, tensor.num_bytes))
    return tuple(map(tuple, layers))


def cards_of(served: Served) -> dict[int, GpuSpec]:
    """GPUs that it uses by their number, from 0: all that it may, or one of them."""
    count = served.count(DEVICES) or 1
    cards = dict(enumerate(served.gpu.beside or (served.gpu,) * count))
    if served.options["split_mode"] == "none":
        main = served.count("main_gpu") or 0
        return {main: cards[main]}
    return cards


def num_devices(served: Served) -> int:
    """How many GPUs it uses."""
    return len(cards_of(served))


def proportions(served: Served) -> list[float]:
    """What tensor_split states for each GPU, 0 where it states nothing.

    Source: llama.cpp 0c1e570 common/arg.cpp `--tensor-split`.
    """
    count, text = num_devices(served), str(served.options["tensor_split"] or 0)
    return [*map(float, re.split("[,/]+", text)), *[0.0] * count][:count]


def placement(served: Served) -> Placement:
    """What lies on GPUs: all layers, those that are asked for, or those that fit.

    Where the buffers for micro-batches that overlap do not fit, it starts without.
    Kind: exact. Source: llama.cpp 0c1e570 src/llama-context.cpp:677.
    """
    free = free_bytes(served)
    on_cpu = served.gpu.is_cpu
    placed = (
        asked_placement(served, free)
        if on_cpu or not fits(served)
        else fitted_placement(served, free)
    )
    if not placed.is_pipelined(len(layers_in_order(served.model))):
        return placed
    kept = cells_kept(served, served.context, slots(served))
    needs = needs_of(served, placed, kept, is_plan=False)
    is_held = all(need <= room for need, room in zip(needs, free, strict=True))
    return replace(placed, overlaps=is_held)


def needs_of(served: Served, placed: Placement, kept: Cache, *, is_plan: bool) -> list[int]:
    """Bytes of each device."""
    devices = range(len(placed.by_device))
    return [taken_by(served, placed, kept, device, is_plan=is_plan).device for device in devices]


def asked_placement(served: Served, free: Sequence[int]) -> Placement:
    """What is asked of GPUs with `free` bytes: everything where nothing is stated.

    Kind: exact. Source: llama.cpp 0c1e570 common/arg.cpp `--n-cpu-moe`, `--cpu-moe`,
    `--override-tensor`; src/llama-model.cpp:1557.
    """
    num_layers, stated = len(layers_in_order(served.model)), proportions(served)
    on_gpus, experts = served.count("n_gpu_layers"), served.count("n_cpu_moe") or 0
    if served.options["cpu_moe"]:
        experts = num_layers
    moved = tuple(Moved(layer=layer, kind="experts") for layer in range(min(experts, num_layers)))
    if (patterns := served.options[OVERRIDES]) is not None:
        moved = _overridden(served.model, file_type(served), str(patterns))
    return Placement(
        by_device=divided(
            num_layers,
            num_layers + 1 if on_gpus is None else on_gpus,
            stated if any(stated) else free,
        ),
        moved=moved,
    )


@lru_cache(maxsize=256)
def _overridden(model: ModelSpec, stored: str, patterns: str) -> tuple[Moved, ...]:
    """Of tensors that llama.cpp looks for on devices: the table of tokens is on the host anyway."""
    _, *others = file_of(model, stored)
    names = [(each.layer, each.name) for each in others if each.linear or each.layer is None]
    return overridden(model, names, patterns)


def fitted_placement(served: Served, free: Sequence[int]) -> Placement:
    """What `--fit` puts on GPUs with `free` bytes.

    Kind: exact. Source: llama.cpp 0c1e570 `common_params_fit_impl`, common/fit.cpp:173.
    """
    asked, kept = asked_placement(served, free), cells_kept(served, served.context, slots(served))

    def needs(placed: Placement) -> list[int]:
        return needs_of(served, placed, kept, is_plan=True)

    if all(need + MARGIN_BYTES <= room for need, room in zip(needs(asked), free, strict=True)):
        return asked
    return fitted(
        len(layers_in_order(served.model)),
        has_experts=served.model.has_experts,
        free=free,
        margin=MARGIN_BYTES,
        needs=needs,
    )


def fits(served: Served) -> bool:
    """Whether `--fit` moves what does not fit: nothing that a user has placed.

    Source: llama.cpp 0c1e570 `common_params_fit_impl`, "already set by user, abort".
    """
    placed = served.count("n_gpu_layers") is not None or served.options["cpu_moe"]
    placed = placed or served.options[OVERRIDES] is not None
    placed = placed or (num_devices(served) > 1 and any(proportions(served)))
    return bool(served.options["fit"]) and not (placed or served.count("n_cpu_moe"))


def free_bytes(served: Served) -> list[int]:
    """Of each device when the model is loaded."""
    cards = cards_of(served).values()
    return [card.memory_bytes - _process_bytes(card) for card in cards]


def _process_bytes(card: GpuSpec) -> int:
    return 0 if ggml_backend(card).counts_process else allocator.idle_context_bytes(card)
