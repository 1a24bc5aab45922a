"""What llama.cpp computes on the host of GPUs, and what the host is taken for.

Read in llama.cpp 0c1e570 (llama-cpp-python 0.3.36).
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import lru_cache

from whichlora.errors import ConfigError
from whichlora.parallel.stages import placed_groups
from whichlora.serving.base import Served
from whichlora.serving.cpu_timer import ATTENTION_PRODUCTS, CACHE_READS
from whichlora.serving.hosted_time import Hosted
from whichlora.serving.kernel_rates import ExpertRates, KernelRates, kernel_rates
from whichlora.serving.llama_cpp_memory import (
    OFFLOADED_TOKENS,
    file_of,
    file_type,
    layer_place,
    places_of,
)
from whichlora.serving.llama_cpp_split import Placement
from whichlora.serving.step_time import ModelPart
from whichlora.serving.unified_memory import is_unified
from whichlora.spec.architecture import ModelSpec, layers_in_order
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.layer import Linear
from whichlora.spec.numeric import TWO_SIDED_Z

BANDWIDTH = "host_bandwidth"  # our own: no flag of llama-server says it
LOADING = "load_mode"
# Those in whose buffers GPUs copy from pinned memory: a mapped file is not.
# Source: llama.cpp 0c1e570 src/llama-model-loader.cpp:559, 1269.
_PINNED = ("none", "mlock", "dio")
LOAD_MODES = ("auto", "mmap", "mmap+mlock", *_PINNED)
# Memory of usual hosts: two channels, from DDR4-3200 to DDR5-6000.
LEAST_BYTES_PER_S, MOST_BYTES_PER_S = 51.2e9, 96e9
_CHANNEL_BYTES, _USUAL_CHANNELS = 8, 2
_MEMORY = re.compile(r"(?:(?P<channels>\d{1,2})x)?ddr[345]-(?P<rate>\d{3,5})", re.IGNORECASE)
# Of the bandwidth, and of an operator beside its work: all threads wait for each other after it.
# Kind: fitted, to published speeds of models that lie on a host as a whole; the wait of GPU and
# host for each other to those of which only experts do (`benchmarks/llama_cpp_gpus.py --fit`).
HOST_READS, HOST_KERNEL_S = 0.68, 12.5e-6
CROSSING_S = 180e-6
# Of their logs, from host to host; covers 39 of 44 published speeds. The latter are 0.12 to 0.4 ms.
HOST_DEVIATION, CROSSING_DEVIATION = 0.22, 0.6
# Of memory made for the GPU that shares it, what the processor reaches. Kind: fitted, the geometric
# mean of a Strix Halo, an M2 Ultra and a Cix P1 without their GPUs (`llama_cpp_host_speeds.csv`).
SHARED_READS = 0.40
# What a byte a second of memory comes with, and the deviation of its log: a prompt is read 2 to 20
# times as fast as an answer is written. Kind: fitted, to so many processors whose speeds of both
# are published (`benchmarks/llama_cpp_cpu_prompts.csv`). Beside GPUs few prompts ask it.
HOST_FLOPS_PER_BYTE, PROMPT_DEVIATION, PROMPT_HOSTS = 8.9, 0.54, 15
# Of pinned memory's speed, copies of a mapped file reach. Kind: measured, the geometric mean of
# llama.cpp's pull request 6083 (349 and 388 tokens/s) and issue 25859 (21 % faster when pinned).
MAPPED_SHARE = 0.86


def stated_bytes_per_s(text: str) -> float | None:
    """Bytes a second of a host's memory; None where `text` is none.

    Kind: exact. Source: JEDEC's names of memory, whose channels have 64 bits.
    """
    if match := _MEMORY.fullmatch(text.strip()):
        channels = int(match["channels"] or _USUAL_CHANNELS)
        return channels * int(match["rate"]) * 1e6 * _CHANNEL_BYTES
    try:
        gigabytes = float(text)
    except ValueError:
        return None
    return gigabytes * 1e9 if 1 <= gigabytes <= 10_000 else None


def check_bandwidth(served: Served) -> None:
    """Refuse what names no memory.

    Raises:
        ConfigError: one line.
    """
    text = served.options[BANDWIDTH]
    if text is not None and not stated_bytes_per_s(str(text)):
        raise ConfigError(
            f"{BANDWIDTH}: {text!r} is no memory; give GB/s, such as 89.6, or its type, such as "
            "ddr5-5600 for two channels and 8xddr4-3200 for eight"
        )


def time_notes(served: Served) -> list[str]:
    """What times with a part of the model on the host are of, and what makes prompts faster."""
    known = known_bytes_per_s(served)
    if known:
        lines = [f"times are of a host whose memory has {known / 1e9:.4g} GB/s"]
    else:
        lines = [
            "times are of hosts of two channels, DDR4-3200 to DDR5-6000; state yours: "
            f"--serving-option {BANDWIDTH}=ddr5-5600, or in GB/s"
        ]
    if served.gpu.is_cpu:
        lines.append(
            "memory does not say how fast a prompt is read: the interval of the first token is of "
            f"{PROMPT_HOSTS} published processors; a log of this one says more: whichlora "
            "calibrate --gpu cpu --from-log FILE"
        )
        return lines
    faster = []
    if (served.count("ubatch_size") or 512) < 2048:
        faster.append("ubatch_size=2048 does so less often")
    if served.options[LOADING] not in _PINNED:
        faster.append(f"{LOADING}=none faster")
    if faster and served.run.prompt_len >= OFFLOADED_TOKENS:
        lines.append(
            "each micro-batch of a prompt copies the host's layers and experts to the GPU: "
            + ", ".join(faster)
        )
    return lines


def known_bytes_per_s(served: Served) -> float | None:
    """Of the host's memory, as stated or as its GPU shares it; None where that is not known."""
    text = served.options[BANDWIDTH]
    if text is not None:
        return stated_bytes_per_s(str(text))
    return served.gpu.bandwidth_bytes_per_s if is_unified(served.gpu) else None


def host_rates(gpu: GpuSpec, dtype: str) -> KernelRates:
    """As `rates_of`, in whatever dtype the GPUs compute."""
    return rates_of(gpu)


def shared_rates(gpu: GpuSpec, dtype: str) -> KernelRates:
    """As `host_rates`, of a processor that shares its memory with a GPU."""
    return rates_of(gpu, reads=SHARED_READS)


def rates_of(
    gpu: GpuSpec, *, reads: float = HOST_READS, kernel_s: float = HOST_KERNEL_S
) -> KernelRates:
    """Of a processor: shares of its memory's bandwidth and of what it is taken to multiply.

    Kind: fitted. Source: `HOST_READS`, `HOST_FLOPS_PER_BYTE`; `cpu_timer` of attention.
    """
    experts = ExpertRates(own_s=6 * kernel_s, reads=reads, products=1.0, activations=math.inf)
    return replace(
        kernel_rates(gpu),
        product_s=kernel_s,
        reads=reads,
        products=1.0,
        attention_s=kernel_s,
        cache=reads / CACHE_READS,
        query_passes=1.0,
        prefill_attention_s=kernel_s,
        attention=1 / ATTENTION_PRODUCTS,
        pointwise_s=kernel_s,
        experts=experts,
        code_experts=experts,
        deviation=HOST_DEVIATION,
    )


def hosted(served: Served, placed: Placement) -> Hosted:
    """How the file of `served` lies on GPUs and on the host, or on a processor alone."""
    if served.gpu.is_cpu:
        placed = Placement(by_device=(0,))
    is_pinned = served.options[LOADING] in _PINNED
    return _hosted(
        served.model,
        file_type(served),
        placed,
        known_bytes_per_s(served),
        is_pinned=is_pinned,
        is_alone=served.gpu.is_cpu,
        is_shared=is_unified(served.gpu),
    )


@lru_cache(maxsize=256)
def _hosted(
    model: ModelSpec,
    stored: str,
    placed: Placement,
    known: float | None,
    *,
    is_pinned: bool,
    is_alone: bool,
    is_shared: bool,
) -> Hosted:
    """The value of one placement, so that equal ways to step are equal.

    Memory that both share is read and written by a copy within it.
    """
    bandwidth = known or math.sqrt(LEAST_BYTES_PER_S * MOST_BYTES_PER_S)
    spread = math.log(MOST_BYTES_PER_S / LEAST_BYTES_PER_S) / 2
    flops = HOST_FLOPS_PER_BYTE * bandwidth
    used = [device for device, count in enumerate(placed.by_device) if count]
    spilled = {each.device for each in placed.moved if each.device is not None}
    return Hosted(
        parts=tuple(
            (device, _part(model, stored, placed, device)) for device in sorted({*used, *spilled})
        ),
        on_host=replace(_part(model, stored, placed, None), scores=False),
        scores_on_host=placed.output_device is None,
        host=GpuSpec(
            key="host",
            name="the host",
            kind="cpu",
            memory_bytes=0,
            bandwidth_bytes_per_s=bandwidth,
            peak_flops_per_s=dict.fromkeys(("fp32", "bf16", "fp16"), flops),
        ),
        rates=shared_rates if is_shared else host_rates,
        crossings=0 if is_alone else _crossings(placed, len(layers_in_order(model))),
        crossing_s=CROSSING_S,
        crossing_deviation=CROSSING_DEVIATION,
        copied_from=None if is_alone else OFFLOADED_TOKENS,
        copied_share=1.0 if is_pinned else MAPPED_SHARE,
        shared_bytes_per_s=bandwidth / 2 if is_shared else None,
        bandwidth_deviation=0.0 if known else spread / TWO_SIDED_Z[0.90],
        prompt_deviation=PROMPT_DEVIATION,
    )


def _crossings(placed: Placement, num_layers: int) -> int:
    """Times that a step passes from GPUs to the host and back: once for each layer that has both.

    Kind: estimate. Source: llama.cpp 0c1e570 ggml/src/ggml-backend.cpp
    `ggml_backend_sched_split_graph`.
    """
    on_gpus = placed.layers_on_gpus(num_layers)
    moved = {each.layer for each in placed.moved if each.device is None}
    return len(moved.intersection(on_gpus)) + (on_gpus.start > 0)


def _part(model: ModelSpec, stored: str, placed: Placement, device: int | None) -> ModelPart:
    """What `device` has, None being the host."""
    layers = layers_in_order(model)
    number = len(layers)
    here = {place for place in range(number) if layer_place(placed, place, number) == device}
    held: list[dict[tuple[str, int, int, int], int]] = [{} for _ in layers]
    whole: list[dict[tuple[str, int, int, int], int]] = [{} for _ in layers]
    in_layers = [tensor for tensor in file_of(model, stored) if tensor.layer is not None]
    for tensor, place in zip(in_layers, places_of(model, stored, placed), strict=True):
        if tensor.linear is None or tensor.layer is None:
            continue
        key = _key(tensor.linear)
        whole[tensor.layer][key] = whole[tensor.layer].get(key, 0) + tensor.num_rows
        if place == device:
            held[tensor.layer][key] = held[tensor.layer].get(key, 0) + tensor.num_rows
    linears = []
    groups = placed_groups(model)
    for group, positions in groups:
        shares: dict[Linear, float] = {}
        for place in positions:
            for linear in dict.fromkeys(group.layer.linears):
                rows = whole[place].get(_key(linear), 0)
                share = held[place].get(_key(linear), 0) / rows if rows else place in here
                shares[linear] = shares.get(linear, 0.0) + share
        linears.append(shares)
    return ModelPart(
        layers=tuple(len(here.intersection(positions)) for _, positions in groups),
        linears=tuple(linears),
        scores=device is not None and placed.output_device == device,
    )


def _key(linear: Linear) -> tuple[str, int, int, int]:
    return linear.name, linear.count, linear.in_features, linear.out_features
