"""The embedding of a text on a tape: its hidden states pooled, and what a loss of batches reads.

Source: sentence-transformers 6.2 `Pooling._forward_padded`, `MultipleNegativesRankingLoss`,
`normalize_embeddings`; accelerate 1.15 `ConvertOutputsToFp32`.
"""

from __future__ import annotations

from whichlora.spec.architecture import Pooling
from whichlora.symbolic.graph import Tensor
from whichlora.symbolic.linear_form import constant, per_sequence
from whichlora.symbolic.operators import OpEmitter


def pooled(code: OpEmitter, pooling: Pooling, x: Tensor, *, width: int) -> Tensor:
    """The embedding of each sequence, from the last hidden states."""
    tape = code.tape
    elements = per_sequence(width)
    # torch 2.13 `gather_backward` fills a tensor of zeros, and reads what it gathered from
    if pooling == "cls":
        embedding = tape.op([x], elements, x.size, saves=[x])
    elif pooling == "lasttoken":
        # the mask is expanded to the width of the hidden states, and the product saves it
        mask = tape.op([x], x.elements, x.size, detached=True)
        chosen = tape.op([x, mask], x.elements, x.size, saves=[mask])
        embedding = tape.op([chosen], elements, x.size, saves=[chosen])
    else:
        masked = tape.op([x], x.elements, x.size)
        # `sum(dim=1, dtype=float32)`, whose backward repeats a row without copying it
        summed = tape.op([masked], elements, 4, passes=True)
        embedding = code.cast(tape.op([summed], elements, 4), x.size)
    return embedding


def compared(code: OpEmitter, embedding: Tensor, *, width: int) -> Tensor:
    """The loss of embeddings: they are joined, scaled to length 1 and multiplied.

    Scores of all pairs are counted elsewhere, since they are as many as sequences squared.
    """
    tape = code.tape
    joined = tape.op([embedding], per_sequence(width), embedding.size)
    unit = tape.op([joined], per_sequence(width), joined.size, saves=[joined], saves_result=True)
    return tape.op([unit], constant(1), 4, saves=[unit])
