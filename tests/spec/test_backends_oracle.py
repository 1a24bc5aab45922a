"""What backends state, against the tables that the libraries show on any machine."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
bitsandbytes = pytest.importorskip("bitsandbytes")

from whichlora.memory import allocator_simulator, metal_heaps
from whichlora.spec.backends import BACKENDS, rocm
from whichlora.units import MiB

pytestmark = pytest.mark.oracle
INCLUDE = Path(torch.__file__).parent / "include"
ON_TORCH = {kind: backend for kind, backend in BACKENDS.items() if kind != "rocm"}


def test_autocast_widens_norms_where_torch_registers_a_kernel_for_it() -> None:
    for backend in ON_TORCH.values():
        if backend.kind == "hpu":  # its plug-in registers its own
            continue
        key = f"Autocast{backend.torch_device.upper()}"
        for operator in ("aten::layer_norm", "aten::softmax.int", "aten::log_softmax.int"):
            has = torch._C._dispatch_has_kernel_for_dispatch_key(operator, key)
            assert has == backend.widens_norms, (operator, key)


def test_foreach_and_fused_optimizers_are_those_of_torch() -> None:
    from torch.utils import _foreach_utils

    listed = _foreach_utils._get_foreach_kernels_supported_devices()
    fused = _foreach_utils._get_fused_kernels_supported_devices()
    for backend in BACKENDS.values():
        assert backend.has_foreach == (backend.torch_device in listed), backend.kind
        assert backend.torch_device in fused


def test_architectures_of_aotriton_are_those_that_torch_tests() -> None:
    # read, not imported: torch's tests need packages that torch does not install
    path = Path(torch.__file__).parent / "testing/_internal/common_cuda.py"
    source = path.read_text(encoding="utf-8")
    for kernel in ("flash", "efficient"):
        function = source.split(f"def evaluate_platform_supports_{kernel}_attention")[1]
        lists = re.findall(r"arch_list \+?= (\[.*?\])", function.split("\ndef ")[0])
        always, experimental = (re.findall(r"gfx\w+", text) for text in lists)
        assert (sorted(always), sorted(experimental)) == (
            sorted(rocm.AOTRITON),
            sorted(rocm.EXPERIMENTAL),
        )


def _dispatched(name: str) -> str:
    yaml = Path(torch.__file__).parents[1] / "torchgen/packaged/ATen/native/native_functions.yaml"
    entry = yaml.read_text(encoding="utf-8").split(f"- func: {name}(")[1]
    return entry.split("\n\n")[0]


def test_attention_of_xpu_and_mps_has_the_backwards_that_are_stated() -> None:
    assert "XPU" in _dispatched("_scaled_dot_product_flash_attention_backward")
    overrideable = "_scaled_dot_product_fused_attention_overrideable"
    assert "XPU" in _dispatched(overrideable)
    assert "XPU" not in _dispatched(f"{overrideable}_backward")
    assert "MPS" in _dispatched("_scaled_dot_product_attention_math_for_mps")
    derivatives = Path(torch.__file__).parents[1] / "torchgen/packaged/autograd/derivatives.yaml"
    assert "math_for_mps" not in derivatives.read_text(encoding="utf-8")
    assert "HPU" not in _dispatched("_fused_sdp_choice")


def test_transformers_hands_grouped_keys_over_as_stated() -> None:
    sdpa = pytest.importorskip("transformers.integrations.sdpa_attention")
    source = inspect.getsource(sdpa.use_gqa_in_sdpa)
    for kind in ("xpu", "mps"):
        major, minor = str(BACKENDS[kind].takes_groups_since).split(".")
        ask = (
            rf"_is_torch_{kind}_available:\s+return _is_torch_greater_or_equal_than_{major}_{minor}"
        )
        assert re.search(ask, source)
    assert BACKENDS["cuda"].takes_groups_since is BACKENDS["hpu"].takes_groups_since is None


def _bytes_of(header: str, constant: str) -> int:
    """A size constant of a header, written as a number, `MB(n)` or a plain product."""
    text = (INCLUDE / header).read_text(encoding="utf-8")
    match = re.search(rf"{constant} = (?:MB\((\d+)\)|(\d+));", text)
    assert match is not None, constant
    return int(match[1]) * MiB if match[1] else int(match[2])


def test_allocators_have_the_constants_of_torch_s_headers() -> None:
    for constant, value in (
        ("kSmallHeap", metal_heaps.SMALL_HEAP_BYTES),
        ("kLargeHeap", metal_heaps.LARGE_HEAP_BYTES),
        ("kXLargeHeap", metal_heaps.EXTRA_LARGE_HEAP_BYTES),
        ("kRoundLarge", metal_heaps.OWN_HEAP_ROUNDING_BYTES),
        ("kMaxSmallAlloc", MiB),
        ("kMinLargeAlloc", 10 * MiB),
    ):
        assert _bytes_of("ATen/mps/MPSAllocator.h", constant) == value
    for constant, value in (  # XPU's and CUDA's
        ("kSmallBuffer", allocator_simulator.SMALL_SEGMENT_BYTES),
        ("kMinBlockSize", allocator_simulator.MIN_BLOCK_BYTES),
        ("kSmallSize", allocator_simulator.SMALL_BYTES),
        ("kMinLargeAlloc", allocator_simulator.MIN_OWN_SEGMENT_BYTES),
        ("kRoundLarge", allocator_simulator.SEGMENT_ROUNDING_BYTES),
    ):
        assert _bytes_of("c10/core/AllocatorConfig.h", constant) == value


def _kernels(operator: str) -> set[str]:
    """Backends with a kernel of bitsandbytes for `operator`."""
    folder = Path(bitsandbytes.__file__).parent / "backends"
    pattern = re.compile(rf'register_kernel\(\s*"bitsandbytes::{operator}", "(\w+)"')
    files = folder.glob("*/ops.py")
    return {name for path in files for name in pattern.findall(path.read_text(encoding="utf-8"))}


def test_bitsandbytes_has_the_backends_that_are_stated() -> None:
    assert {each.torch_device for each in BACKENDS.values()} <= bitsandbytes.supported_torch_devices
    with_8_bit = _kernels("optimizer_update_8bit_blockwise")
    for backend in BACKENDS.values():
        refused = [
            value for lack in backend.lacks if lack.setting == "optimizer" for value in lack[1]
        ]
        assert ("adamw_8bit" in refused) == (backend.torch_device not in with_8_bit), backend.kind
    hpu = Path(bitsandbytes.__file__).parent / "backends/hpu/ops.py"
    assert "only supports quant_type 'nf4'" in hpu.read_text(encoding="utf-8")
    assert not {"fp4"} & BACKENDS["hpu"].quants
    # fp4 elsewhere, and int8 everywhere, have default kernels
    assert {"default"} <= _kernels("dequantize_4bit") & _kernels("int8_linear_matmul")


def test_int8_trains_expanded_where_bitsandbytes_says_so() -> None:
    from bitsandbytes.autograd import _functions

    listed = re.search(r"A\.device\.type in \((.*?)\)", inspect.getsource(_functions.matmul))
    assert listed is not None
    devices = set(re.findall(r'"(\w+)"', listed[1]))
    assert devices == {
        each.torch_device for each in BACKENDS.values() if each.expands_int8_to_train
    }
