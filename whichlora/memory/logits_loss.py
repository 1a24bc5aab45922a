"""The loss that a trainer makes of whole logits: of all rows' answers, and of the chosen rows."""

from __future__ import annotations

from whichlora.memory import loss
from whichlora.memory.entries import Fact
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.numeric import Count, floor_div, largest
from whichlora.trainers.base import LogitsLoss, Trainer

LOSS_FORWARD = Fact(
    part="logits_and_loss",
    what="logits of both answers, copy and log-softmax of the chosen ones",
    shape="[2, batch_size, seq_len, vocab_size]",
    dtype="fp32 under autocast",
    why="the end of the loss's forward",
    source="TRL 1.16 concatenated_forward; torch cross_entropy",
)
LOSS_BACKWARD = Fact(
    part="logits_and_loss",
    what="gradients of the logits of both answers",
    shape="[2, batch_size, seq_len, vocab_size]",
    dtype="fp32 under autocast",
    count="2.5",
    why="that of the log-probabilities waits for that of the chosen answers' cross entropy",
    source="TRL 1.16 concatenated_forward; torch slice_backward, InputBuffer::accumulate",
)


def forward_bytes(
    model: ModelSpec,
    dtypes: Dtypes,
    trainer: Trainer,
    computed: LogitsLoss,
    *,
    tokens: Count,
    sequences: Count,
) -> Count:
    """Alive at the worst point of the loss's forward: logits, shifted copy, log-softmax.

    Kind: exact. Source: TRL 1.16 `concatenated_forward` of orpo_trainer.py and cpo_trainer.py,
    `selective_log_softmax` of trainer/utils.py; accelerate 1.15 `ConvertOutputsToFp32`.
    """
    size, logits, scored, likelihood = _sizes(
        model, dtypes, trainer, computed, tokens=tokens, sequences=sequences
    )
    # `logits[..., :-1, :].contiguous()` of one row is a view
    shifted = likelihood * (sequences > 2)
    compared: Count = 0  # with Triton one kernel makes no tensor as wide as the vocabulary
    if dtypes.device_kind == "cpu":
        # row by row: `logsumexp` makes a temporary, `log_softmax` of 16-bit logits a saved result
        compared = floor_div(scored, sequences) if size == 4 else scored
    in_loss = logits + likelihood + largest(shifted, compared)
    narrow = tokens * loss.logit_width(model) * dtypes.compute_bytes
    widening = logits + narrow * (size != dtypes.compute_bytes)
    return largest(widening, in_loss) + _saved_by_head(model, dtypes, tokens=tokens)


def backward_bytes(
    model: ModelSpec,
    dtypes: Dtypes,
    trainer: Trainer,
    computed: LogitsLoss,
    *,
    tokens: Count,
    sequences: Count,
) -> Count:
    """Alive at the worst point of the loss's backward: mostly at the sum of two gradients.

    What came last in the forward goes back first: the log-probabilities, then the cross entropy.

    Kind: exact. Source: TRL 1.16 `_LogProbEntropyFunction` of kernels/logprob_entropy.py; torch
    2.13 `slice_backward`, `InputBuffer::accumulate`.
    """
    size, logits, scored, likelihood = _sizes(
        model, dtypes, trainer, computed, tokens=tokens, sequences=sequences
    )
    comparing = logits + scored  # the kernel has saved the logits
    if dtypes.device_kind == "cpu":
        # `gather` has saved the logits, too; rows of gradients are stacked
        comparing = 2 * scored + logits * (size == 4)
    points = [
        likelihood + comparing,
        likelihood + scored + logits,  # of all but the last positions, and of all
        logits + 3 * likelihood,  # `_log_softmax_backward_data`
    ]
    if computed.has_cross_entropy:
        points.append(2 * logits + floor_div(logits, 2))  # of the chosen rows, and of all, twice
    return largest(*points) + _saved_by_head(model, dtypes, tokens=tokens)


def _sizes(
    model: ModelSpec,
    dtypes: Dtypes,
    trainer: Trainer,
    computed: LogitsLoss,
    *,
    tokens: Count,
    sequences: Count,
) -> tuple[int, Count, Count, Count]:
    """Bytes of one entry, of all logits, of those but each last position's, of the chosen half."""
    vocab = loss.logit_width(model)
    size = loss.returned_logit_bytes(model, dtypes, trainer)
    scored = (tokens - sequences) * vocab * size
    return size, tokens * vocab * size, scored, floor_div(scored, 2) * computed.has_cross_entropy


def _saved_by_head(model: ModelSpec, dtypes: Dtypes, *, tokens: Count) -> Count:
    """The `tanh` of a soft cap saves its result."""
    width = loss.logit_width(model) if model.logit_softcap else 0
    return tokens * width * dtypes.compute_bytes
