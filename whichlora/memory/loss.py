"""Tensors of vocabulary width: the logits and the loss.

With checkpointing, and for almost every model with 32,000 tokens or more even without it, the
peak of training is here, at 12 bytes per token and vocabulary entry.
"""

from __future__ import annotations

from typing import Any

from whichlora.memory.entries import Fact
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.kernels import LogitTiles
from whichlora.spec.layer import UNTIL_TODAY
from whichlora.spec.loss_heads import LOSS_HEADS
from whichlora.spec.numeric import (
    Count,
    ceil_div,
    largest,
    next_power_of_2,
    rounded,
    smallest,
    where,
)
from whichlora.spec.run import LossHead
from whichlora.symbolic.language_head import (
    FUSED_TILE_TOKENS,
    FUSED_TILE_VOCAB,
    LIGER_VECTORS,
    CrossEntropy,
    liger_chunk,
)
from whichlora.trainers.base import Trainer


def logit_width(model: ModelSpec) -> int:
    """Entries per position that the model returns; an encoder is trained to fill masked words.

    Of labels there are some for each position, or none: those of a sequence are too few to count.

    Kind: exact. Source: transformers 5.23 `LlamaForCausalLM.forward`, `BertForMaskedLM.forward`.
    """
    if model.pooling is not None:
        return 0
    if model.label_head is not None:
        return model.label_head.projection.out_features * (model.label_head.pools == "never")
    has_logits = model.head is not None or model.task == "encoder"
    return model.vocab_size if has_logits else 0


def has_narrow_loss(model: ModelSpec, dtypes: Dtypes) -> bool:
    """Whether the class shifts a copy of its logits as they are and calls `CrossEntropyLoss`.

    Kind: exact. Source: transformers 4.48.1 `GPTBigCodeForCausalLM.forward`; 4.49.0 calls
    `ForCausalLMLoss`. 5.23 `Qwen2AudioForConditionalGeneration.forward`, which copies what the
    padding mask chooses.
    """
    until = model.narrow_loss_before
    return bool(until) and dtypes.libraries.older("transformers", until)


def _widens_in_place(model: ModelSpec, dtypes: Dtypes) -> bool:
    """Whether the model returns fp32 logits in place of the 16-bit ones."""
    widens = model.task == "causal-lm" and dtypes.libraries.widens_logits_in_place
    return model.returns_wide_logits or (widens and not has_narrow_loss(model, dtypes))


LOSS_FORWARD = Fact(
    part="logits_and_loss",
    what="logits, their fp32 copy, log-softmax",
    shape="[batch_size, seq_len, vocab_size]",
    dtype="fp32",
    why="the end of the loss's forward",
    source="transformers ForCausalLMLoss; torch cross_entropy",
)


def copies_shifted(model: ModelSpec, dtypes: Dtypes, sequences: Count) -> Count:
    """Whether the loss copies the logits that it shifts: those of one row stay where they are.

    A class that shifts what the padding mask chooses (Qwen2-Audio) copies always.

    Kind: exact, run. Source: transformers 4.49 `ForCausalLMLoss`, whose `[..., :-1, :]` of one row
    is contiguous for torch, which asks no stride of a dimension of 1; 4.45 the same in the model.
    """
    if has_narrow_loss(model, dtypes) and model.narrow_loss_before == UNTIL_TODAY:
        return 1 + 0 * sequences
    shifts = model.task == "causal-lm" and model.label_head is None
    shifts = shifts and dtypes.libraries.shifts_logits
    return 1 * (sequences > 1) * shifts


def loss_forward_bytes(
    model: ModelSpec,
    dtypes: Dtypes,
    trainer: Trainer,
    *,
    tokens: Count,
    loss_head: str,
    sequences: Count = 1,
    trained_head: int = 0,
) -> Count:
    """Alive at the end of the loss's forward: logits, their fp32 copy, the log-softmax.

    Args:
        trained_head: bytes of one element of a head that is trained; 0 for a frozen one.

    Kind: exact for hf, unsloth and raw.
    Source: transformers 5.23 `ForCausalLMLoss`; TRL 1.16 fused head; liger-kernel 0.8.5
    ops/fused_linear_cross_entropy.py, whose forward makes the gradients. Older versions and
    unsloth: slopes of published peaks, 12V + 8h and 8V + 6h per token to 0.02 %.
    """
    if loss_head == "raw":
        return _raw_forward(model, dtypes, trainer, tokens=tokens)
    if loss_head == "trl-fused":
        return _trl_forward(model, dtypes, tokens=tokens, trained_head=trained_head)
    if loss_head == "unsloth-fused":
        return _unsloth_forward(model, dtypes, trainer, tokens=tokens)
    if loss_head == "liger":
        return _liger_forward(model, dtypes, tokens=tokens, trained_head=trained_head)
    copied = copies_shifted(model, dtypes, sequences)
    if has_narrow_loss(model, dtypes):
        in_loss = _narrow_loss_bytes(model, dtypes, copied=copied, loss_head=loss_head)
        return tokens * in_loss
    vocab, widened = logit_width(model), _widens_in_place(model, dtypes)
    hidden_bytes = 2 * dtypes.stream_bytes * model.hidden_size  # before and after the last norm
    if loss_head == "unsloth":
        # its kernel turns the shifted fp32 logits into their gradient
        entry = (4 if widened else 6) + 4 * copied
        return tokens * (vocab * entry + hidden_bytes // 2)
    logits_bytes = dtypes.compute_bytes
    loss_bytes = loss_element_bytes(model, dtypes)
    softmax_bytes = narrow_softmax_bytes(model, dtypes)
    # `ForCausalLMLoss` runs `logits = logits.float()`; `logits` of the model's `forward` still
    # refers to the 16-bit tensor, which the output returns
    upcast_bytes = 0 if logits_bytes == loss_bytes else softmax_bytes or loss_bytes
    softcap_bytes = dtypes.compute_bytes if model.logit_softcap else 0
    # `_log_softmax` saves its result for backward, not the logits, and `nll_loss_forward` saves the
    # very same tensor as its input (torch 2.13 derivatives.yaml): one, not two
    entry = logits_bytes + upcast_bytes + loss_bytes + softcap_bytes
    # older versions shift logits, 5.23 `ForCausalLMLoss` shifts labels
    if model.task == "causal-lm" and dtypes.libraries.shifts_logits:
        if widened and upcast_bytes:
            entry -= logits_bytes
        if trained_head and dtypes.compute_bytes == dtypes.stream_bytes:
            hidden_bytes //= 2  # a trained head has saved the norm's result
        return tokens * (vocab * (entry + loss_bytes * copied) + hidden_bytes)
    return tokens * vocab * entry


def _raw_forward(model: ModelSpec, dtypes: Dtypes, trainer: Trainer, *, tokens: Count) -> Count:
    is_copied = _widens_in_place(model, dtypes) or _widens_outputs(dtypes, trainer)
    # `tanh` saves its result (derivatives.yaml), the product that follows is a new tensor
    tanh_bytes = dtypes.compute_bytes if model.logit_softcap else 0
    entry = dtypes.compute_bytes + (4 if is_copied else 0) + tanh_bytes
    return tokens * logit_width(model) * entry


def _trl_forward(model: ModelSpec, dtypes: Dtypes, *, tokens: Count, trained_head: int) -> Count:
    # `backbone_outputs` names the last norm's result; selected rows of it, targets and
    # normaliser, seven fp32 vectors
    folded = _fused_temporaries(model, dtypes, tokens=tokens, bytes_per_entry=13)
    selected = _selected_bytes(model, dtypes, trained_head)
    states = dtypes.stream_bytes * model.hidden_size + selected
    weight = trained_head or dtypes.embedding_bytes
    tile = _fused_tile(model, dtypes, tokens=tokens, weight=weight, names_slices=False)
    return tokens * (states + 12 + 28) + tile + folded


def _liger_forward(model: ModelSpec, dtypes: Dtypes, *, tokens: Count, trained_head: int) -> Count:
    vocab = logit_width(model)
    states = 2 * dtypes.stream_bytes * model.hidden_size  # the last norm's result, its gradient
    rows = liger_chunk(vocab, model.hidden_size, tokens=tokens)
    # autocast's cache has a 16-bit copy of a trained fp32 head; the product with its transpose,
    # a view without a gradient, makes another (`cached_cast` of autocast_mode.cpp)
    is_cast = dtypes.under_autocast and trained_head == 4
    made = vocab * model.hidden_size * (trained_head + 2 * is_cast)
    return tokens * (states + LIGER_VECTORS) + rows * vocab * dtypes.compute_bytes + made


def widened_outputs_bytes(
    model: ModelSpec,
    dtypes: Dtypes,
    trainer: Trainer,
    *,
    tokens: Count,
    sequences: Count,
    loss_head: LossHead,
    cached: int,
    has_points: bool,
) -> Count:
    """Alive when the caller's fp32 copies of the outputs are made: logits, keys and values.

    The outputs are there until all of them are copied, and so is what the loss has saved.

    Args:
        cached: bytes per token of the copies of cached keys and values.
        has_points: what the loss saves is among what `label_points` has.

    Kind: exact. Source: accelerate 1.15 `ConvertOutputsToFp32`, `recursively_apply`; transformers
    4.45 `LlamaForCausalLM.forward`. A published log has it to 1 MiB: `jenga_reproduction`.
    """
    if not _widens_outputs(dtypes, trainer):
        return 0 * tokens
    if LOSS_HEADS[loss_head].in_tiles:
        return tokens * cached
    vocab, narrow = logit_width(model), dtypes.compute_bytes
    in_place = _widens_in_place(model, dtypes)
    saved = loss_element_bytes(model, dtypes) + narrow_softmax_bytes(model, dtypes) + 0 * tokens
    if loss_head == "unsloth":  # whose kernel saves the logits that it reads
        copied = copies_shifted(model, dtypes, sequences)
        of_kernel = narrow if has_narrow_loss(model, dtypes) else 4
        saved = of_kernel * (copied if in_place or of_kernel == narrow else 1 + 0 * tokens)
    elif LOSS_HEADS[loss_head].is_outside or has_points:
        saved = 0 * tokens
    narrow = 0 if in_place else narrow
    softcap = dtypes.compute_bytes if model.logit_softcap else 0
    return tokens * (vocab * (4 + narrow + saved + softcap) + cached)


_UNSLOTH_VECTORS = 8 + 4  # shifted labels, log-probabilities
_CHUNKED_ENTRY = 4  # logits and their gradient in 16 bit; what is fp32 is in registers
_MOST_ROWS, _FEWEST_ROWS = 4096, 512
_FEWEST_LOGITS = 512 * 151_936
_MOST_LOGITS_BYTES = 2 * 1024**3


def makes_all_logits(dtypes: Dtypes, loss_head: str, tokens: Count) -> Any:
    """Whether those of all tokens are there at once, in 16 bit too. Kind: exact.

    Source: transformers 5.23 `ForCausalLMLoss`; unsloth 2025.1.5 models/llama.py, RETURN_LOGITS.
    """
    if loss_head != "unsloth-fused":
        return loss_head in ("hf", "unsloth")
    most = dtypes.kernels.logits.whole
    return most is None or tokens <= most


def _unsloth_forward(model: ModelSpec, dtypes: Dtypes, trainer: Trainer, *, tokens: Count) -> Count:
    """Of all logits, when accelerate widens them for the caller; of tiles, or of none.

    The kernel reads logits where they are, and its backward writes their gradient over them.

    Kind: exact for all logits and for a loss in registers; upper bound for rows; estimate for
    chunks, which torch compiles. Source: unsloth 2024.8 models/llama.py
    `CausalLM_fast_forward`, kernels/cross_entropy_loss.py; accelerate `ConvertOutputsToFp32`;
    cut-cross-entropy 25.1.1 cce.py; unsloth_zoo 2025.9.1 fused_losses/cross_entropy_loss.py;
    `unsloth_rows`.
    """
    vocab, stream = logit_width(model), dtypes.stream_bytes * model.hidden_size
    kernel = dtypes.kernels.logits
    widened = 4 if trainer.widens_outputs and dtypes.compute_bytes == 2 else 0
    whole = tokens * (vocab * (dtypes.compute_bytes + widened) + stream + _UNSLOTH_VECTORS)
    if kernel.whole is None:
        return whole
    tiled = tokens * (2 * stream + _UNSLOTH_VECTORS)
    if kernel.tiles == "rows":
        tiled = tiled + unsloth_rows(model, tokens=tokens) * vocab * 4
    elif kernel.tiles == "chunks":
        rows = ceil_div(tokens, _num_chunks(kernel, tokens * vocab * 4))
        tiled = tiled + rows * vocab * _CHUNKED_ENTRY
    return where(tokens <= kernel.whole, whole, tiled) if kernel.whole else tiled


def unsloth_head_forward(model: ModelSpec, dtypes: Dtypes) -> int:
    """What a trained head has beside `_unsloth_forward`: its gradient, made in the forward.

    Chunks sum theirs up. Of an fp32 head a copy in 16 bit is there, too: of whole logits that is
    all, as their backward makes the gradient.

    Kind: exact. Source: unsloth_zoo 2026.10.9 fused_losses/fused_linear.py `_ce_impl`; 2026.8.13
    fused_losses/cross_entropy_loss.py `UnslothFusedLoss.forward`; torch `cached_cast`.
    """
    weights = logit_width(model) * model.hidden_size
    cast = dtypes.compute_bytes * (dtypes.copy_bytes > dtypes.compute_bytes)
    kernel = dtypes.kernels.logits
    made = 0 if kernel.whole is None else 1 + (kernel.tiles == "chunks")
    return weights * (made * dtypes.copy_bytes + cast)


def unsloth_head_backward(model: ModelSpec, dtypes: Dtypes) -> int:
    """The gradient of a trained head, and what it is made of: itself unscaled, or in 16 bit.

    Kind: exact. Source: unsloth_zoo 2026.10.9 `_ce_backward`; 2026.8.13 `UnslothFusedLoss.backward`
    multiplies out of place; torch 2.13 `ToCopyBackward0` behind `mm`.
    """
    weights = logit_width(model) * model.hidden_size
    if dtypes.kernels.logits.whole is not None:
        return 2 * weights * dtypes.copy_bytes
    is_cast = dtypes.copy_bytes > dtypes.compute_bytes  # the copy, and the gradient that is cast
    return weights * (dtypes.copy_bytes + 2 * dtypes.compute_bytes * is_cast)


def _num_chunks(kernel: LogitTiles, logit_bytes: Count) -> Count:
    """Of fp32 logits. Kind: exact where memory for a chunk is free; see `trainers.unsloth`.

    Source: unsloth_zoo 2025.9.1 and 2026.8.13 fused_losses/cross_entropy_loss.py `get_chunk_size`.
    """
    target = kernel.chunk_gib * 1024**3
    if kernel.chunks_up:
        return where(logit_bytes <= target, 1, 4 * ceil_div(logit_bytes, 4 * target))
    return largest(4 * rounded(logit_bytes / (4 * target)), 1)


def unsloth_rows(model: ModelSpec, *, tokens: Count) -> Count:
    """Tokens whose fp32 logits Unsloth's loss makes at once.

    As many as hidden states have bytes, rounded down to a power of two, within bounds of its own.

    Kind: upper bound: from 4,096 tokens on (any number on cards of 24 GB) a tiled pass takes less;
    with less than 4 GiB free the bound of 2 GiB is half of that.
    Source: unsloth_zoo 2026.10.9 fused_losses/fused_linear.py, `fused_linear_rows` and
    `_budget_bytes`.
    """
    vocab = max(1, logit_width(model))
    fewest = min(max(_power_below(_FEWEST_LOGITS // vocab), _FEWEST_ROWS), _MOST_ROWS)
    rows = _power_below(largest(tokens * model.hidden_size // vocab, 1))
    most = max(2, _MOST_LOGITS_BYTES // (4 * vocab))
    return smallest(largest(rows, fewest), min(_MOST_ROWS, most), tokens)


def _power_below(value: Count) -> Count:
    """The largest power of two that is no larger."""
    return next_power_of_2(value + 1) // 2


def _narrow_loss_bytes(model: ModelSpec, dtypes: Dtypes, *, copied: Count, loss_head: str) -> Count:
    """Per token: in the loss of logits that nobody widened.

    The kernel of unsloth's head turns the shifted logits into their gradient.
    """
    narrow, loss_bytes = dtypes.compute_bytes, dtypes.loss_bytes
    in_kernel = loss_head == "unsloth"
    softmax_bytes = narrow_softmax_bytes(model, dtypes)
    upcast_bytes = 0 if narrow == loss_bytes else softmax_bytes or loss_bytes
    vocab = logit_width(model)
    in_loss = vocab * (narrow + narrow * copied + (0 if in_kernel else upcast_bytes + loss_bytes))
    # `forward` names the last norm's output, which autocast makes fp32 of a LayerNorm
    if not all(norm.kind == "layer" for norm in model.final_norms):
        is_saved = dtypes.trains_base and dtypes.stream_bytes == narrow  # by the head, too
        in_loss = in_loss + dtypes.stream_bytes * model.hidden_size * (not is_saved)
    elif dtypes.under_autocast:
        in_loss = in_loss + 4 * model.hidden_size
    return in_loss


KEPT_LOGITS = Fact(
    part="logits_and_loss",
    what="logits that a variable of the caller holds",
    shape="[batch_size, seq_len, vocab_size]",
    dtype="compute_bytes, or fp32 where accelerate widens them",
    why="the model's output is held: by a loop until its next output or until its step's function "
    "returns, with loss head raw until the backward is done",
    source="trainers.loop, trainers.loop_function; accelerate ConvertOutputsToFp32",
)


def kept_logits_bytes(
    model: ModelSpec, dtypes: Dtypes, trainer: Trainer, *, tokens: Count, loss_head: LossHead
) -> Count:
    """Logits as the caller gets them, where a variable of it holds the outputs. Kind: exact.

    Source: accelerate 1.15 `ConvertOutputsToFp32`.
    """
    if LOSS_HEADS[loss_head].in_tiles:
        return 0 * tokens
    return tokens * logit_width(model) * returned_logit_bytes(model, dtypes, trainer)


def returned_logit_bytes(model: ModelSpec, dtypes: Dtypes, trainer: Trainer) -> int:
    """One entry of the logits that a caller of the model gets.

    Kind: exact. Source: accelerate 1.15 `ConvertOutputsToFp32`.
    """
    # `convert_to_fp32` calls `.float()`, whose backward (`_to_copy`) reads no tensor: nothing holds
    # the narrow logits any more when the caller has the wide ones
    if _widens_in_place(model, dtypes) or _widens_outputs(dtypes, trainer):
        return 4
    return 4 if trainer.widens_always else dtypes.compute_bytes


def _widens_outputs(dtypes: Dtypes, trainer: Trainer) -> bool:
    """Whether the caller gets fp32 copies of 16-bit outputs."""
    return trainer.widens_outputs and dtypes.under_autocast and dtypes.compute_bytes == 2


def _fused_tile(
    model: ModelSpec, dtypes: Dtypes, *, tokens: Count, weight: int, names_slices: bool
) -> Count:
    """Of TRL's head: a tile of logits, the cast states of its rows, cast slices of the weight.

    A variable's new value is there before its old one goes: states where a second tile of tokens
    begins, slices of the weight in the backward.

    Kind: exact; an upper bound where the backward casts gradients, as its last slice may be
    smaller. Source: TRL 1.16 `ChunkedLogProbFunction`: `mm_buf`, `hidden_chunk`, `w_chunk`.
    """
    vocab, compute = logit_width(model), dtypes.compute_bytes
    width = compute * model.hidden_size
    first = smallest(tokens, FUSED_TILE_TOKENS)
    both = smallest(tokens, 2 * FUSED_TILE_TOKENS)
    tile = first * FUSED_TILE_VOCAB * compute
    of_states = width * (dtypes.stream_bytes != compute)
    if weight == compute:
        return tile + of_states * both
    words = min(vocab, FUSED_TILE_VOCAB)
    if not names_slices:
        return tile + largest(of_states * first + width * words, of_states * both)
    last = (vocab - 1) % FUSED_TILE_VOCAB + 1
    before = min(vocab - words, words) if vocab > words else words * (both > first)
    at_slice = of_states * first + width * (words + before)
    return tile + largest(at_slice, of_states * both + width * last)


def _fused_temporaries(
    model: ModelSpec, dtypes: Dtypes, *, tokens: Count, bytes_per_entry: int
) -> Count:
    """What TRL's head makes of a tile where there is no Triton: fp32 tensors of its size.

    Forward: scores, their exponent, a product and a mask. Backward: scores twice, log-softmax,
    softmax, gradient, two temporaries and a mask. With Triton one kernel does it in registers.
    Kind: exact on CPU. Source: TRL 1.16 `kernels/chunked_logprob.py`, `_forward_tile`,
    `_backward_tile`.
    """
    if dtypes.backend.has_triton:
        return 0 * tokens
    entries = smallest(tokens, FUSED_TILE_TOKENS) * min(logit_width(model), FUSED_TILE_VOCAB)
    capped = 4 if model.logit_softcap else 0  # its tanh
    return (bytes_per_entry + capped) * entries


def loss_element_bytes(model: ModelSpec, dtypes: Dtypes) -> int:
    """One entry of what the loss reads: decoders widen logits, T5 and BERT leave that to autocast.

    Kind: exact. Source: transformers 5.23 `ForCausalLMLoss`; torch 2.13 `autocast_mode.h`.
    """
    return 4 if _widens_logits(model, dtypes) else dtypes.loss_bytes


def _widens_logits(model: ModelSpec, dtypes: Dtypes) -> bool:
    if model.label_head is not None:
        return model.label_head.widens_logits
    if model.task == "causal-lm" and not has_narrow_loss(model, dtypes):
        return True
    masked = model.masked_head
    return model.widens_logits or (masked is not None and masked.widens_logits)


def narrow_softmax_bytes(model: ModelSpec, dtypes: Dtypes) -> int:
    """One entry of a log-softmax of 16-bit logits, beside the fp32 copy that `nll_loss` reads.

    Kind: exact, but on a CPU, whose autocast widens logits first. Source: torch 2.13
    `autocast_mode.h`: of `cross_entropy_loss` CUDA widens `nll_loss` alone, as `log_softmax` is
    told its dtype (LossNLL.cpp). A published log of OPT has both (`jenga_reproduction`).
    """
    is_narrow = loss_element_bytes(model, dtypes) > dtypes.compute_bytes
    is_narrow = is_narrow and not _widens_logits(model, dtypes)
    return dtypes.compute_bytes * (is_narrow and not dtypes.widens_cross_entropy)


def cross_entropy_form(model: ModelSpec, dtypes: Dtypes, *, sequences: int) -> CrossEntropy:
    """How the model's own loss reads its logits; more than one of `sequences` are copied."""
    in_place = _widens_in_place(model, dtypes) and dtypes.compute_bytes < 4
    return CrossEntropy(
        width=loss_element_bytes(model, dtypes),
        in_place=in_place and not model.returns_wide_logits,
        narrow=not _widens_logits(model, dtypes),
        narrow_softmax=bool(narrow_softmax_bytes(model, dtypes)),
        copies=bool(copies_shifted(model, dtypes, sequences)),
    )


def log_probability_bytes(model: ModelSpec, dtypes: Dtypes, *, trained_head: int) -> int:
    """Per token, what TRL's fused head leaves until its backward.

    The selected hidden states, targets and normaliser; log-probability, entropy, mean logit, and
    whether the target is the largest.

    Args:
        trained_head: bytes of one element of a head that is trained; 0 for a frozen one.

    Kind: exact. Source: TRL 1.16 `ChunkedLogProbFunction.forward`, `_fused_forward`.
    """
    return _selected_bytes(model, dtypes, trained_head) + 12 + 13


def _selected_bytes(model: ModelSpec, dtypes: Dtypes, trained_head: int) -> int:
    """Of the rows that a fused head projects; a trained head's are among what is saved for it."""
    return 0 if trained_head else dtypes.stream_bytes * model.hidden_size


LABELS_FORWARD = Fact(
    part="logits_and_loss",
    what="last norm, scores of the labels and their loss",
    shape="[batch_size, seq_len, hidden_size + num_labels]",
    dtype="compute_bytes; the loss in fp32",
    why="the worst point between the last layer and the loss; there is no vocabulary",
    source="transformers GenericForSequenceClassification.forward; symbolic.label_head",
)
LABELS_BACKWARD = Fact(
    part="logits_and_loss",
    what="gradients of the scores and of the last hidden states",
    shape="[batch_size, seq_len, hidden_size + num_labels]",
    dtype="compute_bytes",
    why="the loss, the head and the last norm go backward",
    source="torch index and select backward; symbolic.label_head",
)
EMBEDDINGS_FORWARD = Fact(
    part="logits_and_loss",
    what="last norm, pooled hidden states, embeddings of length 1",
    shape="[batch_size, seq_len, hidden_size]",
    dtype="stream_bytes; embeddings in fp32 under autocast",
    why="the worst point between the last layer and the loss; there is no vocabulary",
    source="sentence-transformers Pooling.forward, cos_sim; symbolic.pooling",
)
EMBEDDINGS_BACKWARD = Fact(
    part="logits_and_loss",
    what="gradients of embeddings and of the last hidden states",
    shape="[batch_size, seq_len, hidden_size]",
    dtype="stream_bytes",
    why="the loss, the pooling and the last norm go backward",
    source="torch gather, sum and mul backward; symbolic.pooling",
)
ADAPTED_FORWARD = Fact(
    part="logits_and_loss",
    what="logits, what the head's adapter adds to them, fp32 copy, log-softmax",
    shape="[batch_size, seq_len, vocab_size]",
    dtype="compute_bytes, adapter_bytes and fp32",
    why="the worst point between the last layer and the end of the loss",
    source="peft lora.Linear.forward; transformers ForCausalLMLoss",
)
ADAPTED_BACKWARD = Fact(
    part="logits_and_loss",
    what="gradients of the loss, of the logits and of the head's adapter",
    shape="[batch_size, seq_len, vocab_size]",
    dtype="compute_bytes, adapter_bytes and fp32",
    why="the loss, the head with its adapter and the last norm go backward",
    source="torch log_softmax_backward; peft lora.Linear.forward",
)
CHUNKED_FORWARD = Fact(
    part="logits_and_loss",
    what="logits and their fp32 copies",
    shape="[batch_size, seq_len, vocab_size]",
    dtype="compute_bytes and fp32",
    why="Fabric gives the caller fp32 copies of all outputs, before the loss is made of them",
    source="lightning HalfPrecision.convert_output; litgpt GPT.forward",
)
CHUNKED_BACKWARD = Fact(
    part="logits_and_loss",
    what="gradients of the logits of a chunk",
    shape="[batch_size, 128, vocab_size]",
    dtype="fp32",
    count="2",
    why="the loss goes backward chunk by chunk; what a chunk saved makes room for its gradient",
    source="litgpt chunked_cross_entropy; torch nll_loss_backward, log_softmax_backward",
)
LOSS_BACKWARD = Fact(
    part="logits_and_loss",
    what="log-softmax and its gradients",
    shape="[batch_size, seq_len, vocab_size]",
    dtype="fp32",
    count="3",
    why="backward of the cross entropy: what it reads, its gradient, the logits' gradient",
    source="transformers ForCausalLMLoss; torch log_softmax_backward",
)


def loss_backward_bytes(
    model: ModelSpec,
    dtypes: Dtypes,
    trainer: Trainer,
    *,
    tokens: Count,
    loss_head: str,
    trained_head: int = 0,
) -> Count:
    """Alive at the worst point of the loss's backward.

    Args: as of `loss_forward_bytes`.

    Kind: exact for hf: the log-softmax and its two gradients, 12 bytes per entry in fp32.
    Source: torch 2.13 `_log_softmax_backward_data`, `nll_loss_backward`.
    """
    vocab = logit_width(model)
    hidden = model.hidden_size
    in_place = _widens_in_place(model, dtypes)
    if loss_head == "raw":
        # beside the logits, which stay with the caller; fp32 ones get an fp32 gradient, too
        is_copied = in_place or _widens_outputs(dtypes, trainer)
        entry = (4 if is_copied else 0) + dtypes.compute_bytes
        if model.logit_softcap:  # the tanh, and where no cast makes it, a second gradient
            entry += dtypes.compute_bytes * (1 if is_copied else 2)
        elif model.scales_logits and not is_copied:
            entry += dtypes.compute_bytes  # the gradient before and after the factor
        # the head's backward reads the gradient of the logits: the fp32 ones are gone by then
        of_head = 0 if is_copied else hidden * dtypes.compute_bytes
        return tokens * (vocab * entry + of_head)
    if loss_head == "unsloth":
        # the gradient of the shifted logits, and the same with the last position again
        logits_bytes = dtypes.compute_bytes if has_narrow_loss(model, dtypes) else 4
        return tokens * (2 * logits_bytes * vocab + dtypes.stream_bytes * hidden)
    if loss_head == "trl-fused":
        weight = trained_head or dtypes.embedding_bytes
        tile = _fused_tile(model, dtypes, tokens=tokens, weight=weight, names_slices=True)
        # a trained head: its gradient is summed up in fp32 and handed on in its own dtype
        handed_on = 0 if trained_head == 4 else trained_head
        summed = (4 + handed_on) * vocab * hidden if trained_head else 0
        folded = _fused_temporaries(model, dtypes, tokens=tokens, bytes_per_entry=29)
        narrowed = 0 if dtypes.stream_bytes == 4 else dtypes.stream_bytes  # the summed gradient
        selected = _selected_bytes(model, dtypes, trained_head)
        states = tokens * (selected + 12 + (4 + narrowed) * hidden)
        return states + tile + summed + folded
    if loss_head == "unsloth-fused":
        of_logits = dtypes.compute_bytes * vocab * makes_all_logits(dtypes, loss_head, tokens)
        of_head = vocab * hidden * dtypes.compute_bytes * dtypes.kernels.logits.head_gradient
        return tokens * (2 * dtypes.stream_bytes * hidden + of_logits) + of_head
    if loss_head == "liger":
        states = 2 * dtypes.stream_bytes * hidden
        return tokens * states + vocab * hidden * trained_head
    softcap_bytes = dtypes.compute_bytes if model.logit_softcap else 0
    final_norm = 20 * hidden  # its backward; larger only where the vocabulary is tiny or absent
    # `nll_loss_backward` makes a gradient as large as the log-softmax, and
    # `_log_softmax_backward_data` reads both while it makes the gradient of the logits
    read = loss_element_bytes(model, dtypes)
    entry = 2 * read + (narrow_softmax_bytes(model, dtypes) or read) + softcap_bytes
    return tokens * max(vocab * entry, final_norm)


def prompt_bytes(model: ModelSpec, dtypes: Dtypes, *, tokens: Count) -> Count:
    """Logits of a whole prompt, in 16 bit and fp32, as `generate` made them; Kind: exact.

    Classes whose own loss is narrow do not widen them.

    Source: transformers 4.38 `LlamaForCausalLM.forward`, 4.44 `OPTForCausalLM.forward`.
    """
    if model.head is None:
        return 0 * tokens
    upcast_bytes = prompt_logit_bytes(model, dtypes)
    if upcast_bytes == dtypes.compute_bytes:
        upcast_bytes = 0
    return tokens * model.vocab_size * (dtypes.compute_bytes + upcast_bytes)


def prompt_logit_bytes(model: ModelSpec, dtypes: Dtypes) -> int:
    """Of each of them, as the model returns it. Kind: exact. Source: as of `prompt_bytes`."""
    return dtypes.compute_bytes if has_narrow_loss(model, dtypes) else 4


def scores_prompt(model: ModelSpec, dtypes: Dtypes) -> bool:
    """Whether `generate` gets logits of every token of a prompt, not of the last alone.

    Kind: exact. Source: `num_logits_to_keep`, `logits_to_keep` in transformers 4.45 to 5.0.
    """
    libraries = dtypes.libraries
    before = model.scores_prompt_before
    of_class = bool(before) and libraries.older("transformers", before)
    return libraries.scores_whole_prompt or of_class


def generation_bytes(model: ModelSpec, *, batch_size: Count, compute_bytes: int) -> Count:
    """Logits that `generate` keeps while it picks the next token: last positions only.

    The model's logits, their fp32 copy and the processed scores. Kind: exact for
    transformers 4.45 and later. Source: trace of `GenerationMixin._sample`.
    """
    # `outputs.logits[:, -1].to(copy=True, dtype=torch.float32)` copies fp32 logits, too. Where no
    # processor makes new scores, `next_token_scores` still names those of the token before
    if model.head is None:
        return 0 * batch_size
    return batch_size * model.vocab_size * (compute_bytes + 8)


def encoder_bytes(model: ModelSpec, *, tokens: Count, compute_bytes: int) -> Count:
    """Logits of every position, as an encoder's own head returns them. Kind: exact.

    Source: transformers 5.23 `BertForMaskedLM.forward`.
    """
    vocab = logit_width(model)
    return tokens * vocab * compute_bytes


HEAD_COPY = Fact(
    part="temporary",
    what="16-bit copy of the head",
    shape="[vocab_size, hidden_size]",
    dtype="compute_bytes",
    why="autocast casts the fp32 head of a prepared base; backward needs the copy",
    source="torch autocast_mode.cpp cached_cast",
)


def head_copy_bytes(model: ModelSpec, dtypes: Dtypes, *, loss_head: LossHead) -> int:
    """The 16-bit copy of an fp32 head that autocast makes and backward needs (mode Q).

    Kind: exact. Source: torch 2.13 `autocast_mode.cpp`, `cached_cast`.
    """
    # a frozen head needs no gradient, so that `cached_cast` keeps its copy out of the cache; `mm`
    # saves it, as the gradient of the hidden states reads the weight (derivatives.yaml)
    if dtypes.mode != "Q" or dtypes.head_bytes == 2 or LOSS_HEADS[loss_head].casts_tiles:
        return 0
    if model.masked_head is not None:
        return 2 * model.vocab_size * model.masked_head.width
    if model.head is None:
        return 0
    return 2 * model.head.num_weights
