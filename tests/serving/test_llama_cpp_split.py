"""Which layers lie on which GPU; what llama.cpp says of it is in tests/benchmarks."""

from __future__ import annotations

import pytest

from whichlora.serving.llama_cpp_split import Moved, Placement, divided, fitted

MiB = 1024**2


def test_layers_go_by_free_memory_and_the_output_matrix_comes_last() -> None:
    assert divided(32, 33, [24e9, 24e9]) == (17, 16)
    assert divided(32, 33, [48e9, 24e9, 24e9, 12e9]) == (15, 7, 8, 3)
    assert divided(80, 81, [3, 1]) == (61, 20)


def test_a_boundary_belongs_to_the_next_gpu() -> None:
    """A quarter of 20 layers is exact in 32-bit floats."""
    assert divided(32, 20, [1, 2, 1]) == (5, 10, 5)
    assert divided(32, 20, [0, 1]) == (0, 20)


def test_layers_of_the_host_are_the_first_ones() -> None:
    placed = Placement(by_device=(9, 8))
    assert placed.range_of(0, 32) == range(16, 25)
    assert placed.range_of(1, 32) == range(25, 32)
    assert placed.output_device == 1
    assert not placed.is_pipelined(32)
    assert Placement(by_device=(17, 16)).is_pipelined(32)
    assert not Placement(by_device=(33,)).is_pipelined(32)


@pytest.mark.parametrize(
    ("kind", "moved"),
    [
        ("experts", {"ffn_up_exps", "ffn_gate_exps", "ffn_down_exps"}),
        ("all but attention", {"ffn_gate_inp", "ffn_up_exps", "ffn_gate_exps", "ffn_down_exps"}),
        ("gate and down", {"ffn_gate_inp", "ffn_gate_exps", "ffn_down_exps"}),
        ("down", {"ffn_down_exps"}),
    ],
)
def test_a_pattern_of_fit_has_its_matrices(kind: str, moved: set[str]) -> None:
    names = ("attn_q", "ffn_gate_inp", "ffn_up_exps", "ffn_gate_exps", "ffn_down_exps", "ffn_norm")
    assert {name for name in names if Moved(layer=0, kind=kind).has(name)} == moved


def _needs(placed: Placement) -> list[int]:
    """100 MiB a layer, 40 of them attention."""
    experts = {each.layer for each in placed.moved if each.kind == "experts"}
    needed = []
    for device in range(len(placed.by_device)):
        layers = placed.range_of(device, 10)
        needed.append(sum(40 if layer in experts else 100 for layer in layers) * MiB)
    return needed


def test_the_last_gpu_is_filled_first_and_the_host_gets_the_first_layers() -> None:
    placed = fitted(10, has_experts=False, free=(250 * MiB, 450 * MiB), margin=0, needs=_needs)
    assert placed == Placement(by_device=(2, 5))  # four layers and the output matrix


def test_experts_leave_before_layers_do() -> None:
    placed = fitted(10, has_experts=True, free=(350 * MiB, 350 * MiB), margin=0, needs=_needs)
    assert placed.layers == 11
    assert placed.moved
    needed = _needs(placed)
    assert max(needed) <= 350 * MiB
    assert sum(needed) > 400 * MiB  # more than attention alone
