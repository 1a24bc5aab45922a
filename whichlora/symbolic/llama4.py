"""What is Llama 4's own on a tape: queries and keys, and experts that every token passes.

Source: transformers 5.23 `Llama4TextAttention.forward`, `apply_rotary_emb`,
`Llama4TextMoe.forward`, `Llama4Router.forward`, `Llama4TextExperts.forward`.
"""

from __future__ import annotations

from whichlora.errors import ConfigError
from whichlora.spec.layer import Attention, Linear, Moe
from whichlora.spec.run import BNB_QUANTS
from whichlora.symbolic.graph import INDEX_BYTES, Tensor
from whichlora.symbolic.linear_form import constant, per_token, plus
from whichlora.symbolic.mlp import activate, feed_forward
from whichlora.symbolic.operators import OpEmitter


def project_and_turn(
    code: OpEmitter, attention: Attention, x: Tensor, *, copies_gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Norms come after the rotation, a temperature where there is none.

    Args:
        copies_gradient: the kernel's gradients have another layout than the projections' results.
    """
    tape = code.tape
    q_linear, k_linear, v_linear, _ = attention.linears
    q, k, v = (code.linear(linear, x) for linear in (q_linear, k_linear, v_linear))
    q, k = (tape.view(state, copies_gradient=copies_gradient) for state in (q, k))
    if attention.position == "rope":
        before = (q, k)
        wide = [code.cast(state, 4) for state in before]
        turned = [_times_complex(code, state) for state in wide]
        q, k = (code.cast(state, q.size) for state in turned)
        tape.hold(*before, *wide, *turned)
        for norm in attention.norms:
            if norm.name == "q_norm":
                q = code.norm(norm, q)
            else:
                k = code.norm(norm, k)
    elif attention.has_temperature:
        untempered = q
        q = code.cast(code.multiply_rows(q, tape.weight(per_token(1), 4)), q.size)
        tape.hold(untempered)
    return q, k, v


def _times_complex(code: OpEmitter, x: Tensor) -> Tensor:
    """Pairs of elements times complex numbers of length one."""
    return code.tape.op([x], x.elements, 4, inner_backward=plus(x.form, x.form))


def check_experts(moe: Moe, quant: str) -> None:
    """Refuse a storage in which experts of this kind have matrices that are not described.

    Raises:
        ConfigError: a base in bitsandbytes, for which transformers 5.23 puts matrices of their own
            in the place of the experts (`SequentialLlama4TextExperts`).
    """
    if moe.by_score and quant in BNB_QUANTS:
        raise ConfigError(
            f"quant: the experts of Llama 4 in {quant} are not predicted; leave quant out, or "
            "trace the real code with --engine trace"
        )


def run_every_expert(code: OpEmitter, moe: Moe, x: Tensor) -> Tensor:
    """Each expert on each token, times its score, which is 0 where the expert is not chosen.

    Raises:
        ConfigError: as of `check_experts`.
    """
    check_experts(moe, code.dtypes.quant)
    tape, hidden, count = code.tape, moe.router.in_features, moe.num_experts
    scores, logits = _scores(code, moe, x)
    every = per_token(count * hidden)
    repeated = tape.op([x], every, x.size, what="experts: repeated inputs")
    column = tape.op([scores], scores.elements, scores.size)
    routed = code.multiply_rows(repeated, column)
    tape.hold(repeated)

    up_linear, down_linear = moe.expert.linears
    joint = _batched(code, up_linear, routed, "experts: gate and up")
    half = per_token(count * moe.expert.width)
    gate, up = tape.parts(joint, (half, half))
    inner = code.multiply(up, activate(code, moe.expert.activation, gate))
    out = _batched(code, down_linear, inner, "experts: outputs")
    tape.hold(routed, joint)

    assert moe.shared is not None
    shared = feed_forward(code, moe.shared, x)
    size = 4 if code.dtypes.under_autocast else out.size
    summed = tape.op([out], per_token(hidden), size)
    result = tape.in_place(shared, summed)
    tape.hold(x, routed, out)
    tape.hold_to_end(logits, name="router logits")
    return result


def _scores(code: OpEmitter, moe: Moe, x: Tensor) -> tuple[Tensor, Tensor]:
    tape, few = code.tape, per_token(moe.experts_per_token)
    logits = code.linear(moe.router, x)
    chosen = tape.op([], few, INDEX_BYTES)
    top = tape.op([logits], few, logits.size, saves=[chosen])
    spread = tape.op([top], logits.elements, logits.size, saves=[chosen])
    wide = code.cast(spread, 4)
    sigmoid = tape.op([wide], wide.elements, 4, saves_result=True, what="router: scores")
    scores = code.cast(sigmoid, logits.size)
    tape.hold(logits, chosen, top, spread)
    return scores, logits


def _batched(code: OpEmitter, linear: Linear, x: Tensor, label: str) -> Tensor:
    """The same number of rows for every expert, times its matrix."""
    tape, dtypes = code.tape, code.dtypes
    weight = tape.weight(
        constant(linear.num_weights), dtypes.base_bytes, trained=dtypes.trains_base
    )
    narrow, used = code.autocast(x), code.autocast(weight, f"{linear.name}: weight, cast")
    saves = [factor for factor, partner in ((used, x), (narrow, weight)) if partner.needs_grad]
    elements = per_token(linear.count * linear.out_features)
    return tape.op([narrow, used], elements, narrow.size, saves=saves, multiplies=True, what=label)
