"""How A and B of LoRA begin: the values of PEFT's `init_lora_weights`, and what making them takes.

Source: peft 0.21.2 `LoraConfig.__post_init__`, `LoraLayer.update_layer`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from whichlora.spec.dtypes import Dtypes, is_quantised
from whichlora.spec.layer import Linear
from whichlora.spec.options import Option
from whichlora.spec.run import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One value of `init_lora_weights`.

    Args:
        decomposes: it has the matrix in fp32.
        has_vectors: beside its singular vectors, or Q and R; without, factors are thin.
        results: matrices as large, which are made of them: a product, a difference.
        has_gradients: it has a gradient of every target.
        is_wide_alone: weights are in 16 or 32 bits.
        is_square_alone: a Conv1D is square.
        reads_batches: the function of PEFT that reads batches before the first step; else empty.
        freezes_b: B is no parameter.
        settings: further arguments of `peft.LoraConfig`.
    """

    decomposes: bool = True
    has_vectors: bool = False
    results: int = 0
    has_gradients: bool = False
    is_wide_alone: bool = False
    is_square_alone: bool = False
    reads_batches: str = ""
    freezes_b: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)


_RANDOM = Start(decomposes=False)
_THIN = Start(results=2, is_wide_alone=True)  # `svd_lowrank`
_OF_LOFTQ = {"loftq_bits": 4, "loftq_iter": 1}  # the defaults of `peft.LoftQConfig`
STARTS: Mapping[str, Start] = {
    "true": _RANDOM,
    "false": _RANDOM,
    "gaussian": _RANDOM,
    "orthogonal": _RANDOM,
    "pissa": Start(has_vectors=True, results=2, is_wide_alone=True),
    **{f"pissa_niter_{number}": _THIN for number in (4, 8, 16, 32)},
    "olora": Start(has_vectors=True, results=1, is_square_alone=True),
    "loftq": Start(results=2, is_wide_alone=True, settings={"loftq_config": _OF_LOFTQ}),
    "eva": Start(decomposes=False, reads_batches="initialize_lora_eva_weights"),
    "corda": Start(results=2, is_wide_alone=True, reads_batches="preprocess_corda"),
    "lora_ga": Start(
        decomposes=False,
        has_gradients=True,
        is_wide_alone=True,
        reads_batches="preprocess_loraga",
    ),
    "mica": Start(has_vectors=True, is_wide_alone=True, freezes_b=True),
}
START = Option(
    name="init_lora_weights",
    summary="how A and B start; a start changes loading, and no step",
    default="true",
    choices=tuple(STARTS),
)


def start_of(run: RunConfig) -> str:
    """How A and B of `run` begin."""
    return START.text(run.method_options)


def start_bytes(start: Start, linears: Sequence[tuple[Linear, int]], dtypes: Dtypes) -> int:
    """Beside the loaded model at the largest moment of making adapters that start from weights.

    PiSSA has the fp32 weight, its singular vectors, and the product and the difference of the
    residual; OLoRA the fp32 weight, Q, R and the product. LoRA-GA has a gradient of every target.
    One target comes after the other; the other starts take no more than the factors.

    Kind: lower bound: workspaces of cuSOLVER, and a LoRA-GA step's activations, are left out.
    Source: peft 0.21.2 `LoraLayer.pissa_init`, `olora_init`; `loraga.estimate_gradients`.
    """
    if start.has_gradients:
        return sum(linear.num_weights * count for linear, count in linears) * dtypes.base_bytes
    return max((_decomposed_bytes(start, linear, dtypes) for linear, _ in linears), default=0)


def _decomposed_bytes(start: Start, linear: Linear, dtypes: Dtypes) -> int:
    num_weights = linear.in_features * linear.out_features
    vectors = min(linear.in_features, linear.out_features)
    vectors *= linear.in_features + linear.out_features
    is_copied = dtypes.base_bytes != 4 or is_quantised(linear, dtypes)
    widened = num_weights * (start.decomposes and is_copied)
    return 4 * (widened + vectors * start.has_vectors + num_weights * start.results)


def start_refusal(name: str, linear: Linear, quant: str) -> str:
    """Why a start can't be made of a matrix. Source: peft 0.21.2 `LoraLayer.update_layer`."""
    start = STARTS[name]
    if start.is_wide_alone and linear.is_stored_in(quant):
        return f"{START.name} {name} needs weights in 16 or 32 bits, not {quant}"
    is_square = linear.in_features == linear.out_features
    if start.is_square_alone and linear.transposed and not is_square:
        return f"{START.name} {name} takes no Conv1D that is not square"
    if name != START.default and not linear.is_module and linear.count > 1:
        return f"{START.name} {name} is predicted for linear layers, not for experts"
    return ""


def start_settings(name: str) -> dict[str, Any]:
    """Arguments of `peft.LoraConfig` that choose a start; train.py refuses those of data."""
    if name == START.default:
        return {}
    return {START.name: False if name == "false" else name, **STARTS[name].settings}


def start_notes(run: RunConfig) -> tuple[str, ...]:
    """That batches are read before the first step."""
    name = start_of(run)
    function = STARTS[name].reads_batches
    if run.phase != "finetune" or not function:
        return ()
    text = f"{name} runs peft's {function} over batches before the first step"
    return (f"{text}, which is not predicted",)
