"""Scratch memory of exllama's kernels, which multiply with GPTQ's 4-bit weights in inference."""

from __future__ import annotations

from whichlora.memory.entries import Entry, Fact
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.dtypes import Dtypes, exllama_kernels, is_quantised
from whichlora.spec.layer import Linear
from whichlora.spec.numeric import Count

_ALIGNED = 128  # bytes that each part of the second kernels' scratch has more
_MOST_ROWS = 2048 * 8  # `max_input_len` times `max_batch_size`

SCRATCH = Fact(
    part="weights",
    what="scratch of exllama's kernels",
    shape="the largest [in_features, out_features]; of the second kernels 16,384 more rows in fp32",
    dtype="fp16",
    why="allocated once after loading and never freed: weights are expanded in it",
    source="AutoGPTQ 0.5.1 modeling/_utils.py autogptq_post_init; qlinear_exllamav2.py, "
    "scratch_space_fixed; GPTQModel 7.3.4 utils/model.py gptqmodel_post_init",
)


def _of_matrix(linear: Linear, kernels: int) -> int:
    expanded = 2 * linear.in_features * linear.out_features
    if kernels == 1:
        return expanded
    return expanded + _ALIGNED + 4 * linear.out_features * _MOST_ROWS + _ALIGNED


def scratch_bytes(model: ModelSpec, dtypes: Dtypes) -> int:
    """What the kernels hold from loading on, as much as the matrix that needs most.

    Kind: exact without act-order, for which the first kernels hold 2,048 rows of the widest matrix
    besides. Source: `SCRATCH`.
    """
    kernels = exllama_kernels(dtypes)
    if not kernels:
        return 0
    return max(
        (
            _of_matrix(linear, kernels)
            for group in model.groups
            for linear in group.layer.linears
            if is_quantised(linear, dtypes)
        ),
        default=0,
    )


def scratch_entries(model: ModelSpec, dtypes: Dtypes, *, like: Count) -> list[Entry]:
    """The scratch in the shape of `like`; none where no such kernel runs."""
    num_bytes = scratch_bytes(model, dtypes)
    return [Entry(SCRATCH, num_bytes + 0 * like)] if num_bytes else []
