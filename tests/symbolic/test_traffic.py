"""What the kernels of operators move, counted by hand."""

from __future__ import annotations

from whichlora.symbolic.autograd import Tape
from whichlora.symbolic.linear_form import NOTHING, constant, evaluate, per_rank, per_token


def moved(form: object, *, tokens: int = 10) -> float:
    return float(evaluate(form, tokens=tokens, span=tokens, r=4))  # type: ignore[arg-type]


def test_a_kernel_reads_its_inputs_and_writes_its_result() -> None:
    tape = Tape()
    x = tape.input(per_token(8), 2, needs_grad=True)
    wide = tape.op([x], x.elements, 4)
    tape.returns(tape.op([wide, x], x.elements, 4, saves=[x]))
    found = tape.traffic(recomputed=False)
    # a cast reads 2 bytes and writes 4; a product reads 4 and 2 and writes 4
    assert moved(found.forward.moved) == 10 * 8 * ((2 + 4) + (4 + 2 + 4))
    assert found.forward.kernels == 2
    # the product's gradients: two read 4 bytes and what was saved, 2, is read once; 4 and 2 are
    # written. The cast's reads 4 and writes 2, and both gradients of x are added
    assert moved(found.backward.moved) == 10 * 8 * ((4 + 4 + 2 + 4 + 2) + (4 + 2) + 3 * 2)
    assert found.backward.kernels == 2 + 1 + 1
    assert found.repeated.moved == NOTHING


def test_products_are_bound_by_arithmetic_unless_a_side_is_a_rank() -> None:
    def forward(width: object, elements: object) -> float:
        tape = Tape()
        x = tape.input(per_token(8), 2, needs_grad=True)
        weight = tape.weight(width, 2, trained=True)  # type: ignore[arg-type]
        y = tape.op([x, weight], elements, 2, saves=[x, weight], reshapes=True)  # type: ignore[arg-type]
        tape.returns(y)
        return moved(tape.forward_traffic.moved)

    assert forward(constant(8 * 16), per_token(16)) == 0
    # 10 tokens of 8, a factor of 8 by 4, and results of 16
    assert forward(per_rank(8), per_token(16)) == 2 * (10 * 8 + 8 * 4 + 10 * 16)


def test_a_checkpoint_runs_its_forward_again_and_hands_gradients_on_for_nothing() -> None:
    tape = Tape()
    x = tape.input(per_token(8), 2, needs_grad=True)
    y = tape.op([x], x.elements, 2, saves=[x])
    z = tape.op([y], x.elements, 2, saves=[y])
    tape.returns(tape.op([z, x], x.elements, 2, passes=True))
    kept, again = (tape.traffic(recomputed=on) for on in (False, True))
    assert again.forward == kept.forward
    # it stops with the last tensor that the backward reads: the sum is not repeated
    assert again.repeated.kernels == 1
    assert kept.backward == again.backward
    assert kept.backward.kernels == 2 + 1  # the sum hands its gradient on to both


def test_what_passes_is_what_a_kernel_right_before_has_touched_or_nobody_keeps() -> None:
    tape = Tape()
    x = tape.input(per_token(8), 2, needs_grad=False)
    y = x
    for _ in range(6):
        y = tape.op([y], x.elements, 2)
    tape.returns(tape.op([y, x], x.elements, 2))
    (sizes,) = tape.forward_traffic.sizes  # 32 and 48 bytes per token are about as many
    assert sizes.number == 7
    assert moved(sizes.moved) == 10 * 8 * (6 * 4 + 6)
    # six results, each written and read right after; x itself was read too long ago
    assert moved(sizes.passing) == 10 * 8 * 6 * (2 + 2)


def test_each_operator_that_saves_a_tensor_saves_it_once_more_and_weights_are_saved_too() -> None:
    tape = Tape()
    x = tape.input(per_token(8), 2, needs_grad=True)
    weight = tape.weight(constant(8 * 8), 2)
    y = tape.op([x, weight], x.elements, 2, saves=[x, weight])
    z = tape.op([x, y], x.elements, 2, saves=[x, y], saves_result=True)
    tape.op([z], x.elements, 2, saves=[z], hidden=True)  # past the hooks
    tape.returns(tape.in_place(z, y))
    assert tape.traffic(recomputed=False).forward.saves == 2 + 3
    assert tape.forward_traffic.saves == 0  # without a graph nothing is saved
