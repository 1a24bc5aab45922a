"""Token lengths → the padded batches that each collator makes of them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import TYPE_CHECKING

from whichlora.errors import ConfigError
from whichlora.spec.plan import Collator

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Lengths = NDArray[np.int64]

PACKED_TOGETHER = 1000  # sequences; what `datasets.Dataset.map` hands over at once
_MOST_MEGABATCH = 50  # batches that are sorted together


def best_fit_decreasing(lengths: Lengths, seq_len: int) -> Lengths:
    """Lengths of rows of whole sequences, each put into the fullest row with room.

    Longest first, longer ones cut to `seq_len`; `PACKED_TOGETHER` sequences at a time.
    Kind: exact; where the data set holds empty texts, TRL counts them among the thousand. Source:
    TRL 1.16.0, `data_utils.pack_dataset`, strategy "bfd", which `Dataset.map` calls in batches.
    """
    import numpy as np

    rows = [
        _packed(lengths[at : at + PACKED_TOGETHER], seq_len)
        for at in range(0, len(lengths), PACKED_TOGETHER)
    ]
    return np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64)


def _packed(lengths: Lengths, seq_len: int) -> Lengths:
    import numpy as np

    room: list[int] = []  # free tokens of each row, ascending
    for length in sorted(np.minimum(lengths, seq_len).tolist(), reverse=True):
        at = bisect_left(room, length)
        row_room = room.pop(at) if at < len(room) else seq_len
        insort(room, row_room - length)
    return seq_len - np.array(room, dtype=np.int64)


def length_grouped(lengths: Lengths, batch_size: int, rng: np.random.Generator) -> Lengths:
    """`lengths` in the order that puts similar ones into one batch, the longest first.

    Kind: exact but for the random numbers. Source: transformers 5.23,
    `trainer_pt_utils.get_length_grouped_indices`: a shuffle cut into mega-batches, each sorted.

    Args:
        batch_size: sequences of one optimizer step, as the Trainer tells its sampler.
    """
    import numpy as np

    shuffled = rng.permutation(lengths)
    size = batch_size * max(1, min(len(lengths) // (4 * batch_size), _MOST_MEGABATCH))
    mega = [np.sort(shuffled[at : at + size])[::-1] for at in range(0, len(shuffled), size)]
    longest = int(np.argmax([batch[0] for batch in mega]))
    mega[0][0], mega[longest][0] = mega[longest][0], mega[0][0]
    return np.concatenate(mega)


def rows(
    lengths: Lengths,
    collator: Collator,
    *,
    seq_len: int,
    step_sequences: int,
    rng: np.random.Generator,
) -> Lengths:
    """Lengths of the rows of one epoch, in the order in which they are batched.

    Args:
        seq_len: longer sequences are cut, but for "packed", whose blocks have this length.
        step_sequences: of one optimizer step, accumulation included.

    Raises:
        ConfigError: too few tokens for a single block.
    """
    import numpy as np

    if collator == "packed":
        num_tokens = int(lengths.sum())
        if num_tokens < seq_len:
            raise ConfigError(
                f"collator: packed fills no block of {seq_len} tokens with the {num_tokens} that "
                "there are; use longest, or a smaller sequence_length"
            )
        return np.full(num_tokens // seq_len, seq_len, dtype=np.int64)
    if collator == "packed-bfd":
        return rng.permutation(best_fit_decreasing(lengths, seq_len))
    cut = np.minimum(lengths, seq_len)
    if collator == "grouped":
        return length_grouped(cut, step_sequences, rng)
    return rng.permutation(cut)


def batches(
    lengths: Sequence[int],
    collator: Collator,
    *,
    batch_size: int,
    seq_len: int,
    accumulation: int = 1,
    seed: int = 0,
    epoch: int = 0,
) -> NDArray[np.int64]:
    """Padded length and number of rows of each batch of one epoch, [num_batches, 2].

    Every epoch has a shuffle of its own, and the longest row of a batch sets its width. The
    shuffle is NumPy's, so the batches follow the same distribution, not the very order of torch.
    """
    import numpy as np

    ordered = rows(
        np.asarray(lengths, dtype=np.int64),
        collator,
        seq_len=seq_len,
        step_sequences=batch_size * accumulation,
        rng=np.random.default_rng((seed, epoch)),
    )
    starts = np.arange(0, len(ordered), batch_size)
    widths = np.maximum.reduceat(ordered, starts)
    if collator == "fixed":
        widths = np.full_like(widths, seq_len)
    return np.stack((widths, np.minimum(batch_size, len(ordered) - starts)), axis=1)
