"""What expanding quantised weights moves, by the kernels of each library and version."""

from __future__ import annotations

from typing import Any

import pytest

from whichlora.memory.weights import CODE_TABLE_BYTES
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.spec.dtypes import Dtypes, expands_by_operators
from whichlora.spec.layer import Layer, Linear
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model
from whichlora.timing import expansion
from whichlora.timing.model import chip_of

LLAMA = load_model("HuggingFaceTB/SmolLM2-135M")
AUTOGPTQ, TRITON = (("gptqmodel", "0"),), (("gptqmodel", "2.0.0"),)


def trained(quant: str, gpu: str = "a100-sxm-80gb", **settings: Any) -> Dtypes:
    return job(quant, gpu, method="qlora", **settings).dtypes


def job(quant: str, gpu: str, **settings: Any) -> ResolvedRun:
    return resolve(LLAMA, RunConfig(model=LLAMA.name, quant=quant, **settings), find_gpu(gpu))  # type: ignore[arg-type]


def layer_and_matrix() -> tuple[Layer, Linear]:
    layer, _ = next(iter(LLAMA.layers()))
    return layer, layer.linears[0]


def per_weight(dtypes: Dtypes) -> float:
    _, linear = layer_and_matrix()
    moved = float(expansion.expansion_bytes(linear, dtypes))
    return moved / (linear.in_features * linear.out_features)


@pytest.mark.parametrize(
    ("quant", "settings", "expected"),
    [
        ("fp4", {}, 0.5 + 4 / 64 + 2),
        ("nf4", {}, 0.5 + 4 / 64 + 2),
        # the scales are expanded, moved by their mean and read in fp32
        ("nf4-dq", {}, 0.5 + 1 / 64 + 4 / (64 * 256) + 2 + 16 / 64),
        ("int8", {}, 1 + 2 + 4),
        # shifted to 32 bits, cast, masked, less the zero, scaled; then zero and scale gathered
        ("gptq-int4", {"libraries": AUTOGPTQ}, 0.5 + 16),
        ("gptq-int4", {}, 0.5 + 16 + 6),
        ("gptq-int8", {"libraries": AUTOGPTQ}, 1 + 22),
        ("gptq-int4", {"libraries": TRITON}, 0.5 + 2),
        ("awq-int4", {}, 0.5 + 2),
    ],
)
def test_a_kernel_reads_what_is_stored_and_writes_16_bits(
    quant: str, settings: dict[str, Any], expected: float
) -> None:
    # scales per row, and zeros and scales per group, are less than a tenth of a byte
    found = per_weight(trained(quant, **settings))
    assert expected <= found + CODE_TABLE_BYTES <= expected * 1.05 + 2 * CODE_TABLE_BYTES
    assert found == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(
    ("gpu", "before", "since"),
    [
        ("a100-sxm-80gb", 2.8, 1.7),  # as many lanes for each byte of memory as an H100
        ("t4-16gb", 2.4, 1.4),  # more, at a clock that its power lowers
        ("a10-24gb", 1.9, 1.1),
        ("rtx-4090-24gb", 1.0, 1.0),  # four times as many: memory decides
        ("l4-24gb", 1.0, 1.0),
        ("cpu", 1.0, 1.0),
    ],
)
def test_unpacking_waits_for_instructions_where_memory_is_fast(
    gpu: str, before: float, since: float
) -> None:
    found = find_gpu(gpu)
    times = [
        expansion.unpacking_time(
            trained("nf4", gpu, libraries=(("bitsandbytes", version),)), chip_of(found, "fp16")
        )
        for version in ("0.47.0", "0.48.0")
    ]
    assert times == pytest.approx([before, since], rel=0.05)


def test_gptq_is_expanded_by_operators_in_training_alone() -> None:
    assert expands_by_operators(trained("gptq-int4"))
    assert expansion.expansion_ops(trained("gptq-int4")) == 12
    assert expansion.expansion_ops(trained("gptq-int4", libraries=AUTOGPTQ)) == 9
    by_triton = trained("gptq-int4", libraries=TRITON)
    served = job("gptq-int4", "a100-sxm-80gb", phase="inference").dtypes
    for dtypes in (by_triton, served, trained("nf4")):
        assert not expands_by_operators(dtypes)
        assert expansion.expansion_ops(dtypes) == 0


@pytest.mark.parametrize("quant", ["nf4", "gptq-int4", "int8"])
def test_a_backward_expands_again_what_autograd_did_not_keep(quant: str) -> None:
    layer, _ = layer_and_matrix()
    dtypes = trained(quant)
    moved, read = expansion.backward_bytes(layer, dtypes)
    expanded = sum(float(expansion.expansion_bytes(linear, dtypes)) for linear in layer.linears)
    assert moved == (0 if quant == "gptq-int4" else pytest.approx(expanded))
    assert 0 < read < 2 * sum(linear.num_weights for linear in layer.linears)


def test_a_product_reads_16_bits_of_what_was_expanded_and_else_what_is_stored() -> None:
    layer, _ = layer_and_matrix()
    dtypes = job("nf4", "a100-sxm-80gb", phase="inference").dtypes
    fused, none_more = expansion.forward_bytes(layer, dtypes, 1)
    expanded, more_read = expansion.forward_bytes(layer, dtypes, 4096)
    num_weights = sum(linear.num_weights for linear in layer.linears)
    assert none_more == 0
    assert fused == pytest.approx(num_weights * 4.5 / 8, rel=0.01)
    assert expanded == pytest.approx(num_weights * (4.5 / 8 + 2), rel=0.01)
    assert more_read == pytest.approx(num_weights * (2 - 4.5 / 8), rel=0.01)


def test_autoawq_unpacks_for_every_16_rows_and_expands_since_its_second_release() -> None:
    layer, _ = layer_and_matrix()
    num_weights = sum(linear.num_weights for linear in layer.linears)

    def moved(version: str, rows: int) -> float:
        dtypes = job(
            "awq-int4", "a100-sxm-80gb", phase="inference", libraries=(("autoawq", version),)
        ).dtypes
        return float(expansion.forward_bytes(layer, dtypes, rows)[0]) / num_weights

    once = moved("0.1.5", 1)
    assert once == pytest.approx(0.5 + 2.5 / 128, rel=0.001)
    assert moved("0.1.5", 16) == once
    for rows, tiles in ((17, 2), (1024, 64), (8192, 512)):
        assert moved("0.1.5", rows) == pytest.approx(tiles * once)
    assert moved("0.2.0", 1024) == pytest.approx(64 * once)
    assert moved("0.2.0", 1025) == pytest.approx(once + 2, rel=0.02)
    # GPTQModel's own kernels are not read here
    assert moved("0", 1024) == once


def test_exllamas_first_kernel_unpacks_inside_for_each_of_7_rows_its_second_for_every_8() -> None:
    layer, _ = layer_and_matrix()
    num_weights = sum(linear.num_weights for linear in layer.linears)

    def moved(exllama: str, rows: int) -> float:
        libraries = (("exllama", exllama), *AUTOGPTQ)
        dtypes = job("gptq-int4", "a100-sxm-80gb", phase="inference", libraries=libraries).dtypes
        return float(expansion.forward_bytes(layer, dtypes, rows)[0]) / num_weights

    once = moved("1", 1)
    assert once == moved("2", 8) == pytest.approx(0.5, rel=0.05)
    assert moved("1", 7) == pytest.approx(7 * once)
    assert moved("1", 8) == moved("2", 51) == pytest.approx(once + 2)
    assert moved("2", 50) == pytest.approx(7 * once)


def test_eight_bits_are_multiplied_as_they_are() -> None:
    layer, _ = layer_and_matrix()
    on_gpu, on_cpu = trained("int8"), trained("int8", "cpu")
    assert expansion.multiplies_stored(on_gpu)
    assert expansion.forward_bytes(layer, on_gpu, 4096) == (0, 0)
    assert not expansion.multiplies_stored(on_cpu)
    assert expansion.forward_bytes(layer, on_cpu, 4096)[0] > 0


@pytest.mark.oracle
@pytest.mark.parametrize(("quant", "bits"), [("gptq-int4", 4), ("gptq-int8", 8)])
@pytest.mark.parametrize("gathers", [False, True])
def test_operators_move_what_they_move_in_torch(quant: str, bits: int, gathers: bool) -> None:
    """The lines of AutoGPTQ 0.5 `qlinear_cuda_old` and GPTQModel 7.3 `dequantize_weight`."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    moved = []

    def size(value: Any) -> int:
        if not isinstance(value, torch.Tensor):
            return 0
        seen = 1
        for length, stride in zip(value.shape, value.stride(), strict=True):
            seen *= length if stride else 1  # what is expanded is read once
        return seen * value.element_size()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            if not func.is_view and func is not torch.ops.aten._unsafe_view.default:
                # what a gather reads is few, and in the cache
                gather = func is torch.ops.aten.index.Tensor
                moved.append(size(result) + (0 if gather else sum(map(size, args))))
            return result

    rows, columns, group = 4096, 512, 128
    pack = 32 // bits
    narrow = torch.int16 if bits == 8 else torch.int8
    codes = torch.zeros(rows // pack, columns, dtype=torch.int32)
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)[None, :, None]
    zeros = torch.zeros(rows // group, 1, columns, dtype=narrow)
    scales = torch.zeros(rows // group, 1, columns, dtype=torch.float16)
    groups = torch.arange(rows) // group
    with Count():
        weight = torch.bitwise_right_shift(codes[:, None].expand(-1, pack, -1), shifts).to(narrow)
        weight = torch.bitwise_and(weight, 2**bits - 1)
        if gathers:
            weight = weight.reshape(rows, columns)
            scales[:, 0][groups] * (weight - zeros[:, 0][groups])
        else:
            scales * (weight.reshape(-1, group, columns) - zeros)
    counted = bits / 8 + expansion.OPERATOR_BYTES[quant]
    counted += gathers * expansion.GATHERED_BYTES[quant]
    assert sum(moved) / (rows * columns) == pytest.approx(counted, rel=0.02)
