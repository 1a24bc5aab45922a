"""The head that fills masked words, on a tape."""

from __future__ import annotations

from functools import lru_cache

from whichlora.methods.base import Method
from whichlora.spec.architecture import MaskedHead
from whichlora.spec.dtypes import Dtypes
from whichlora.symbolic.autograd import Tape
from whichlora.symbolic.graph import SavedTensor, Tensor
from whichlora.symbolic.linear_form import constant, per_token
from whichlora.symbolic.mlp import activate
from whichlora.symbolic.operators import OpEmitter


def run_masked_head(
    code: OpEmitter, head: MaskedHead, x: Tensor, words: Tensor, *, vocab_size: int
) -> Tensor:
    """The transform of an encoder's last hidden states, and the projection by `words`."""
    dtypes = code.dtypes
    y = x
    if head.linear is not None:
        y = activate(code, head.activation, code.linear(head.linear, x))
    if head.norm is not None:
        y = code.norm(head.norm, y)
    narrow = code.cast(y, dtypes.compute_bytes) if dtypes.under_autocast else y
    used = code.autocast(words)
    saves = [used, narrow] if words.is_leaf else [used]
    return code.tape.op([narrow, used], per_token(vocab_size), narrow.size, saves=saves)


@lru_cache(maxsize=512)
def saved_by_masked_head(
    head: MaskedHead,
    in_features: int,
    vocab_size: int,
    targets: tuple[str, ...],
    dtypes: Dtypes,
    method: Method,
    *,
    stream: int,
) -> tuple[SavedTensor, ...]:
    """What the head of an encoder keeps for backward. Kind: exact."""
    tape = Tape()
    code = OpEmitter(tape, dtypes, targets, method, stream_bytes=stream)
    x = tape.input(per_token(in_features), stream, needs_grad=True)
    # the 16-bit copy that autocast makes of the words is an entry of its own: `loss.HEAD_COPY`
    elements = constant(vocab_size * head.width)
    words = tape.weight(elements, dtypes.compute_bytes, trained=dtypes.trains_base)
    run_masked_head(code, head, x, words, vocab_size=vocab_size)
    return tape.saved_tensors()
