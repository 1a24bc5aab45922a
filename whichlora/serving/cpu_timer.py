"""Seconds of a step of llama.cpp on a CPU, by what it printed of the same model on that machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from whichlora.serving.base import LoggedTimes, Served, Stepping
from whichlora.serving.gguf import tensors
from whichlora.serving.gguf_architectures import architecture_of
from whichlora.serving.step_time import PARTS, Step
from whichlora.spec.architecture import ModelSpec, layers_in_order

# A byte of keys and values takes as long as so many of weights; a multiplication of attention as so
# many of a product, while a prompt is read. Logs of several lengths tell it better: from file to
# file it varies by `SPREAD`, and logs repeat to `NOISE`. Kind: fitted, to
# `benchmarks/llama_cpp_speeds.csv`, as is the deviation of the log of a step's time: each step by
# the rates of another one of the same file.
CACHE_READS, ATTENTION_PRODUCTS = 4.0, 1.5
SPREAD, NOISE = 0.7, 0.03
DEVIATION = 0.085
# Of steps of 2, 4 and 8 sequences, beside so many of one: llama.cpp 0c1e570 on one core of an EPYC,
# SmolLM2-135M in Q8_0 (4.1, 5.9 and 7.3 times one) and Qwen3-0.6B in Q4_K_M (2.2, 4.0 and 6.4).
ROWS_DEVIATION = 0.35


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attention:
    """Of the layers that have one window: bytes cached of a token, multiplications of a pair."""

    window: int | None
    cached_bytes: float
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuTimer:
    """Times the steps of one file on one machine.

    Args:
        read_bytes: of weights in a step; `weights` that a token is multiplied with in the layers.
        read_s: seconds of a byte of weights; `cached_s` of one of keys and values.
        product_s: of a weight and a token; `pair_s` of a multiplication of attention in a prompt.
        deviation: of the log of a step's time.
    """

    read_bytes: float
    weights: float
    attentions: tuple[_Attention, ...]
    read_s: float
    cached_s: float
    product_s: float
    pair_s: float
    stepping: Stepping
    deviation: float

    def parts(self, step: Step) -> dict[str, float]:
        """Seconds of `step` by `step_time.PARTS`, which add up to it.

        Each sequence that decodes takes as long as one: few rows are multiplied one by one.
        Kind: estimate. Source: `CACHE_READS`, `ROWS_DEVIATION`.
        """
        products = self.product_s * step.prompt_tokens * self.weights
        products += self.read_s * step.decoding * self.read_bytes
        attention = 0.0
        for same in self.attentions:
            cached, pairs = step.cached_tokens, step.prompt_pairs
            if same.window is not None:
                cached = min(cached, step.decoding * same.window)
                pairs = min(pairs, step.prompt_tokens * same.window)
            attention += self.cached_s * cached * same.cached_bytes
            attention += self.pair_s * pairs * same.width
        return {**dict.fromkeys(PARTS, 0.0), "products": products, "attention": attention}

    def seconds(self, step: Step) -> float:
        """Of `step`."""
        return sum(self.parts(step).values())


def cpu_timer(
    served: Served, stored: str, stepping: Stepping, logs: Sequence[LoggedTimes]
) -> CpuTimer | None:
    """The timer of `served`, a file of mix `stored`; None where no log is of this file.

    Args:
        logs: of requests one after the other.
    """
    unit = _unit(served.model, stored, stepping)
    decoded, read = list[tuple[float, float]](), list[tuple[float, float]]()
    for log in logs:
        run, options = log.run, dict(log.run.serving_options)
        if run.model != served.model.name or options.get("file_type", "BF16") != stored:
            continue
        if tpot_s := log.values.get("tpot_s"):
            cached = run.prompt_len + run.max_new_tokens / 2
            decoded.append(_per_second(unit, Step(1, cached, 1), tpot_s))
        if (ttft_s := log.values.get("ttft_s")) and run.prompt_len > 1:
            pairs = run.prompt_len * (run.prompt_len + 1) / 2
            read.append(_per_second(unit, Step(0, 0.0, 1, run.prompt_len, pairs), ttft_s))
    if not decoded or not read:
        return None
    (read_s, cached), (product_s, pair) = _rates(decoded), _rates(read)
    return replace(
        unit,
        read_s=read_s,
        cached_s=CACHE_READS * cached,
        product_s=product_s,
        pair_s=ATTENTION_PRODUCTS * pair,
    )


def _per_second(unit: CpuTimer, step: Step, seconds: float) -> tuple[float, float]:
    """Units of products and of attention in each second of a step."""
    parts = unit.parts(step)
    return parts["products"] / seconds, parts["attention"] / seconds


def _rates(logs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Seconds of a unit of products, and of one of attention.

    The least relative errors over `logs`, and the least difference of both, each by its variance.
    """
    both = [products + attention for products, attention in logs]
    equal = sum(both) / sum(each * each for each in both)  # where both are one rate
    scaled = [(equal * products, equal * attention) for products, attention in logs]
    near = NOISE**2 / SPREAD**2
    aa = sum(a * a for a, _ in scaled) + near
    bb = sum(b * b for _, b in scaled) + near
    ab = sum(a * b for a, b in scaled) - near
    a, b = (sum(pair[part] for pair in scaled) for part in (0, 1))
    determinant = aa * bb - ab * ab
    factors = (bb * a - ab * b) / determinant, (aa * b - ab * a) / determinant
    products, attention = (max(0.0, equal * factor) for factor in factors)
    return products, attention


def _unit(model: ModelSpec, stored: str, stepping: Stepping) -> CpuTimer:
    """The timer of a machine that reads a byte of weights, and multiplies, in one second."""
    head = "token_embd" if model.head_tied else "output"
    read_bytes = weights = 0.0
    for tensor in tensors(model, stored, architecture_of(model)):
        if tensor.layer is not None:
            moe = layers_in_order(model)[tensor.layer].moe if tensor.is_expert else None
            share = 1.0 if moe is None else moe.experts_per_token / moe.num_experts
            read_bytes += share * tensor.num_bytes
            weights += share * tensor.num_rows * tensor.row
        elif tensor.name == head:
            read_bytes += tensor.num_bytes
    sums: dict[int | None, tuple[float, int]] = {}
    for layer, count in model.layers():
        for attention in layer.attentions:
            cached, width = sums.get(attention.sliding_window, (0.0, 0))
            cached += count * attention.cache_elements * stepping.cache_bytes
            width += count * attention.num_attention_heads * attention.head_dim
            sums[attention.sliding_window] = cached, width
    return CpuTimer(
        read_bytes=read_bytes,
        weights=weights,
        attentions=tuple(
            _Attention(window=window, cached_bytes=cached, width=width)
            for window, (cached, width) in sums.items()
        ),
        read_s=1.0,
        cached_s=CACHE_READS,
        product_s=1.0,
        pair_s=ATTENTION_PRODUCTS,
        stepping=stepping,
        deviation=ROWS_DEVIATION if (stepping.max_num_seqs or 1) > 1 else DEVIATION,
    )
