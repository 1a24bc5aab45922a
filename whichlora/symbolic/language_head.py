"""The last norm, the head and the loss of a language model on a tape, and their backward."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import lru_cache

from whichlora.methods.base import Method
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.dtypes import Dtypes, quantises_head
from whichlora.spec.layer import Linear
from whichlora.spec.numeric import Count, ceil_div, floor_div, next_power_of_2, smallest
from whichlora.symbolic.altup import merge_streams
from whichlora.symbolic.autograd import Tape
from whichlora.symbolic.graph import FP32_BYTES, Assigned, SavedTensor, Tensor
from whichlora.symbolic.label_head import run_label_head
from whichlora.symbolic.layer import BlockEvents, block_events
from whichlora.symbolic.linear_form import (
    NOTHING,
    LinearForm,
    constant,
    maximal,
    minus,
    per_sequence,
    per_token,
    plus,
    scaled,
)
from whichlora.symbolic.masked_lm_head import run_masked_head
from whichlora.symbolic.operators import OpEmitter
from whichlora.symbolic.pooling import compared, pooled
from whichlora.symbolic.traffic import StepTraffic
from whichlora.trainers.base import ChunkedLoss, LogitsLoss


def end_of_stack(code: OpEmitter, model: ModelSpec, x: Tensor) -> Tensor:
    """What makes one state of several, and the norms and dropouts after the last layer.

    Source: transformers 5.23 `LlamaModel.forward`, `T5Stack.forward`.
    """
    if model.streams is not None:
        x = merge_streams(code, model.streams, x)
    for norm in model.final_norms:
        x = code.norm(norm, x)
    for _ in model.final_dropouts if code.dtypes.training else ():
        x = code.dropout(x)
    return x


def stack_end_events(
    model: ModelSpec,
    dtypes: Dtypes,
    method: Method,
    targets: tuple[str, ...],
    *,
    stream: int,
    accumulated: bool = False,
) -> BlockEvents | None:
    """What ends a stack of layers before a decoder or a head; None where its last layer does.

    Kind: exact.

    Args:
        stream: one element of the last layer's result.

    Source: `end_of_stack`.
    """
    tape = Tape(no_grad=not dtypes.training)
    code = OpEmitter(tape, dtypes, targets, method, stream_bytes=stream)
    x = tape.input(per_token(model.stream_width), stream, needs_grad=dtypes.training)
    result = end_of_stack(code, model, x)
    if result.storage == x.storage:
        return None
    tape.returns(result)
    return block_events(tape, accumulated=accumulated)


def logits_of(code: OpEmitter, model: ModelSpec, x: Tensor, *, trained: bool) -> Tensor:
    """The last norm of `x`, and the product with the head.

    Source: transformers 5.23 `LlamaModel.forward`, `LlamaForCausalLM.forward`.
    """
    tape, dtypes = code.tape, code.dtypes
    y = end_of_stack(code, model, x)
    if model.label_head is not None:
        return run_label_head(code, model.label_head, y, trained=trained)
    if model.masked_head is not None:
        elements = constant(model.vocab_size * model.masked_head.width)
        words = tape.weight(elements, dtypes.embedding_bytes, trained=trained)
        return run_masked_head(code, model.masked_head, y, words, vocab_size=model.vocab_size)
    if model.head is None:
        return y
    tape.hold(x)
    if model.scales_head_input:
        y = code.scale(y)
    if model.returns_wide_logits:
        y = code.cast(y, dtypes.head_bytes)
    if code.adapts(model.head):
        logits = _adapted_head(code, model.head, y)
    else:
        logits = _head(code, model.head, y, trained=trained)
    tape.hold_to_end(y)
    if model.logit_softcap:
        capped = tape.op([code.scale(logits)], logits.elements, logits.size, saves_result=True)
        return code.scale(capped)
    if model.biases_logits:  # `lm_logits` of `BartForConditionalGeneration.forward`
        return tape.op([logits], logits.elements, logits.size, passes=True)
    if model.returns_wide_logits:
        return code.cast(logits, 4)
    return code.scale(logits) if model.scales_logits else logits


def _head(code: OpEmitter, head: Linear, x: Tensor, *, trained: bool) -> Tensor:
    tape, dtypes = code.tape, code.dtypes
    if quantises_head(head, dtypes):
        return code.base(head, x)
    narrow = code.autocast(x)
    elements = constant(head.in_features * head.out_features)
    weight = tape.weight(elements, dtypes.head_bytes, trained=trained)
    used = code.autocast(weight)
    saves = [used, narrow] if trained else [used]
    # of a frozen weight no copy is cached: each chunk makes one, and saves it
    is_cast = used.storage >= 0 and not trained
    keeps = [scaled(used.form, code.in_chunks - 1)] if code.in_chunks > 1 and is_cast else []
    # torch 2.13 `MmBackward0` makes the gradient of its second matrix first
    return tape.op(
        [used, narrow],
        per_token(head.out_features),
        narrow.size,
        saves=saves,
        keeps=keeps,
        # each chunk makes a gradient of the weight, which is added to that of those before
        inner_backward=weight.form if trained and code.in_chunks else NOTHING,
        reshapes=True,
    )


def _adapted_head(code: OpEmitter, head: Linear, x: Tensor) -> Tensor:
    """The product with a head that has an adapter, in the dtype of the frozen head.

    Source: peft 0.21.2 `LoraModel._create_and_replace`, which replaces a head like any `nn.Linear`.
    """
    dtypes = replace(code.dtypes, base_bytes=code.dtypes.head_bytes)
    of_head = replace(code, dtypes=dtypes)
    read = replace(head, quantisable=quantises_head(head, dtypes))
    return of_head.method.forward(of_head, read, x)


def logits_events(
    model: ModelSpec, dtypes: Dtypes, method: Method, targets: tuple[str, ...], *, stream: int
) -> BlockEvents | None:
    """Logits of every position without a gradient, as an encoder's own head returns them.

    Args:
        stream: one element of what the stack of layers ends with.

    Kind: exact, as the tape is. Source: `logits_of`.
    """
    if model.head is None and model.masked_head is None and model.label_head is None:
        return None
    tape = Tape(no_grad=True)
    code = OpEmitter(tape, dtypes, targets, method, stream_bytes=stream)
    x = tape.input(per_token(model.hidden_size), stream, needs_grad=False)
    # `stack_end_events` has them
    headless = replace(model, final_norms=(), final_dropouts=(), streams=None)
    tape.returns(logits_of(code, headless, x, trained=False))
    return block_events(tape)


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossEntropy:
    """How a model's loss reads its logits.

    Args:
        width: bytes of one entry that the loss reads.
        in_place: the model widens its logits, and drops the narrow ones before the loss.
        narrow: it leaves them as they are, so that autocast widens what operators read.
        narrow_softmax: of these the log-softmax is as narrow, and what `nll_loss` reads is a copy.
        copies: it copies the logits that it shifts.
    """

    width: int
    in_place: bool = False
    narrow: bool = False
    narrow_softmax: bool = False
    copies: bool = False


def cross_entropy(code: OpEmitter, logits: Tensor, form: CrossEntropy) -> tuple[Tensor, Tensor]:
    """The loss of `logits`, and the logits that the model returns.

    Source: transformers 5.23 `ForCausalLMLoss`; torch 2.13 `cross_entropy_loss`: a log-softmax
    that it saves, and `nll_loss`, which reads it again in its backward.
    """
    tape = code.tape
    wide = logits if form.narrow else code.cast(logits, form.width)
    shifted = code.copy(wide) if form.copies else wide
    read = shifted if form.narrow_softmax else code.cast(shifted, form.width)
    scores = tape.op([read], wide.elements, read.size, saves_result=True)
    scores = code.cast(scores, form.width)
    loss = tape.op([scores], constant(1), 4, saves=[scores], picks=True)
    returned = wide if form.in_place else logits
    tape.hold(wide, shifted)
    tape.hold(returned)
    return loss, returned


def chunked_cross_entropy(
    code: OpEmitter, logits: Tensor, computed: ChunkedLoss
) -> tuple[Tensor, Tensor]:
    """The loss of `logits`, and what the caller has of them.

    Its backward frees the log-softmax of a chunk for the gradient of its logits, so that beside
    all of them two chunks are alive, or all gradients put together.

    Kind: exact; upper bound for sequences shorter than a chunk. The end of a forward whose caller
    has wide logits is left out: the beginning of its backward has more.
    Source: litgpt 0.5.13 utils.py `chunked_cross_entropy`; lightning 2.6.6
    fabric/plugins/precision/half.py `HalfPrecision.convert_output`; torchtune 0.6.1
    modules/loss/ce_chunked_output_loss.py; torch 2.13 `nll_loss_backward`,
    `_log_softmax_backward_data`, `split_backward`.
    """
    if computed.compiled:
        return _compiled_cross_entropy(code, logits, computed), logits
    wide = scaled(logits.elements, FP32_BYTES)
    outputs = logits
    if computed.widened and logits.size < FP32_BYTES:
        outputs = code.tape.op([logits], logits.elements, FP32_BYTES, detached=True)
    entries = FP32_BYTES * logits.elements.per_token
    chunk = per_sequence(computed.positions * entries)
    if not computed.positions:
        chunk = per_token(entries // computed.parts)
    made = {"gradient": chunk, "of logits": chunk} if computed.by_head else {"whole": wide}
    is_counted = computed.widened or computed.in_loss  # as the caller's, or made chunk by chunk
    read = replace(logits, storage=-1) if is_counted else logits
    loss = code.tape.op(
        [read],
        constant(1),
        FP32_BYTES,
        keeps=[wide],
        inner=[] if computed.widened else [chunk, chunk],  # logits, and the same in fp32
        inner_backward=[
            *itertools.starmap(Assigned, made.items()),
            *(Assigned(name, None) for name in made),
        ],
        overwrites=True,
        what="log-softmax",
    )
    return loss, outputs


def _compiled_cross_entropy(code: OpEmitter, logits: Tensor, computed: ChunkedLoss) -> Tensor:
    """One whose kernels read the logits again in the backward, where their gradient takes over.

    Kind: estimate: what torch compiles is not read, but told by torchtune's README, to 3 %.
    Source: torchtune 0.6.1 `CEWithChunkedOutputLoss`: "compiled together for better performance".
    """
    chunk = per_token(logits.size * logits.elements.per_token // computed.parts)
    return code.tape.op(
        [logits],
        constant(1),
        FP32_BYTES,
        saves=[logits],
        inner_backward=[Assigned("gradient", chunk), Assigned("gradient", None)],
        overwrites=True,
    )


def compared_answers(
    code: OpEmitter, logits: Tensor, computed: LogitsLoss, *, sequences: int
) -> Tensor:
    """The loss of pairs of answers, whose chosen rows are the first half.

    Source: TRL 1.16 `concatenated_forward` of orpo_trainer.py and cpo_trainer.py,
    `_LogProbEntropyFunction` of kernels/logprob_entropy.py, 1.9 `selective_log_softmax` of
    trainer/utils.py; LLaMA-Factory 0.9.5 `get_batch_logps` of train/trainer_utils.py.
    """
    tape = code.tape
    by_softmax = computed.log_probabilities == "softmax"
    logits = code.cast(logits, 4) if by_softmax else logits
    width = logits.elements.per_token
    parts = []
    if computed.has_cross_entropy:
        half = width // 2
        (chosen,) = tape.parts(logits, [per_token(half)])
        (likelihood,) = tape.parts(chosen, [plus(per_token(half), per_sequence(-half))])
        shifted = likelihood if sequences == 2 else code.copy(likelihood)
        scores = tape.op([shifted], likelihood.elements, logits.size, saves_result=True)
        parts.append(tape.op([scores], constant(1), 4, saves=[scores]))
        tape.hold(shifted)
    (scored,) = tape.parts(logits, [plus(per_token(width), per_sequence(-width))])
    if by_softmax or (computed.log_probabilities == "rows" and logits.size < 4):
        scored = tape.op([scored], scored.elements, logits.size, saves_result=True)
    parts.append(tape.op([scored], per_token(1), 4, saves=[scored]))
    tape.hold(logits)
    return tape.op(parts, constant(1), 4)


FUSED_TILE_TOKENS = 4096
FUSED_TILE_VOCAB = 32_768


def fused_tiles(
    *, rows: int, vocab: int, logit_bytes: int, cast_row: int, cast_word: int, names_slices: bool
) -> list[LinearForm | Assigned]:
    """What one pass of TRL's head makes: a buffer for logits, casts of states and of the head.

    Args:
        rows: that are scored.
        logit_bytes: of one.
        cast_row, cast_word: of the cast states of one row, of the head's one word; 0 if none is.
        names_slices: the loop's variable keeps a cast slice until the next one is there, as in the
            backward; in the forward it is an argument alone.

    Kind: exact. Source: TRL 1.16 `ChunkedLogProbFunction`: `mm_buf`, `hidden_chunk`, `w_chunk`.
    """
    made: list[LinearForm | Assigned] = [
        constant(min(rows, FUSED_TILE_TOKENS) * FUSED_TILE_VOCAB * logit_bytes)
    ]
    for row in range(0, rows, FUSED_TILE_TOKENS):
        tile_rows = min(FUSED_TILE_TOKENS, rows - row)
        made.append(Assigned("states", constant(tile_rows * cast_row)))
        for word in range(0, vocab if cast_word else 0, FUSED_TILE_VOCAB):
            words = min(FUSED_TILE_VOCAB, vocab - word)
            made.append(Assigned("slice", constant(words * cast_word)))
            if not names_slices:
                made.append(Assigned("slice", None))
    return made


def fused_loss(
    code: OpEmitter, model: ModelSpec, x: Tensor, *, tokens: int, sequences: int, trained: bool
) -> Tensor:
    """TRL's fused head, which makes tiles of logits and goes backward through them again.

    Source: TRL 1.16 `_fused_forward` of trainer/utils.py, `ChunkedLogProbFunction` of
    kernels/chunked_logprob.py.
    """
    tape, dtypes, width = code.tape, code.dtypes, model.hidden_size
    assert model.head is not None
    y = end_of_stack(code, model, x)
    tape.hold(x)
    # the rows whose next token is scored
    scored = tape.op([y], plus(per_token(width), per_sequence(-width)), y.size)
    weight = tape.weight(constant(model.head.num_weights), dtypes.head_bytes, trained=trained)
    compute = dtypes.compute_bytes
    cast_row, cast_word = (
        width * compute * (tensor.size != compute) for tensor in (scored, weight)
    )
    forward, backward = (
        fused_tiles(
            rows=tokens - sequences,
            vocab=model.head.out_features,
            logit_bytes=compute,
            cast_row=cast_row,
            cast_word=cast_word,
            names_slices=names_slices,
        )
        for names_slices in (False, True)
    )
    scores = tape.op(
        [scored, weight],
        per_token(1),
        4,
        saves=[scored],
        keeps=[per_token(8 + 4)],  # targets and normaliser
        inner=forward,
        inner_backward=backward,
        sums_wide=True,
        what="selected hidden states",
    )
    tape.hold(y)
    return tape.op([scores], constant(1), 4)


LIGER_VECTORS = 4 + 8 + 8 + 1  # losses, labels padded and shifted, and which count


def liger_chunk(vocab: int, hidden: int, *, tokens: Count) -> Count:
    """Tokens whose logits Liger's loss makes at once: as many bytes as all hidden states, or more.

    Kind: exact. Source: liger-kernel 0.8.5 `fused_linear_cross_entropy_forward`: `inc_factor`,
    `chunk_size`.
    """
    most = max(1, ceil_div(vocab, hidden))  # chunks
    least = ceil_div(tokens, most)
    return smallest(next_power_of_2(least), tokens)


def liger_loss(
    code: OpEmitter, model: ModelSpec, x: Tensor, *, tokens: int, trained: bool
) -> Tensor:
    """Liger's fused head, whose forward makes the gradients and whose backward scales them.

    Source: liger-kernel 0.8.5 `fused_linear_cross_entropy_forward`, all of whose chunks write
    their logits into one tensor where `_can_use_mm_out` holds.
    """
    tape, dtypes, head = code.tape, code.dtypes, model.head
    assert head is not None
    y = end_of_stack(code, model, x)
    tape.hold(x)
    weight = tape.weight(constant(head.num_weights), dtypes.head_bytes, trained=trained)
    made = [per_token(y.size * model.hidden_size)]
    if trained:
        made.append(constant(dtypes.head_bytes * head.num_weights))
    rows = liger_chunk(head.out_features, model.hidden_size, tokens=tokens)
    width = dtypes.compute_bytes
    passing = [constant(rows * head.out_features * width)]
    # `@` casts what it reads, and makes a tensor of its own
    if y.size != width or dtypes.head_bytes != width:
        passing *= min(2, ceil_div(tokens, rows))  # the loop still names the chunk before
        passing.append(constant(rows * model.hidden_size * width * (y.size != width)))
        passing.append(constant(head.num_weights * width * (dtypes.head_bytes != width)))
    loss = tape.op(
        [y, weight],
        constant(1),
        4,
        keeps=made,
        inner=[*passing, per_token(LIGER_VECTORS)],
        overwrites=True,
        what="gradients that the loss has made",
    )
    tape.hold(y)
    return loss


def head_events(
    model: ModelSpec,
    dtypes: Dtypes,
    method: Method,
    targets: tuple[str, ...],
    *,
    stream: int,
    form: CrossEntropy,
    trains_head: bool,
    loss_head: str,
    logits_loss: LogitsLoss | None,
    chunked_loss: ChunkedLoss | None,
    tokens: int,
    sequences: int,
    holds_outputs: bool,
    widens_outputs: bool,
    widened_cache: tuple[int, ...],
    accumulated: bool,
) -> BlockEvents:
    """What the head and the loss make and free in one step.

    Args:
        stream: one element of the last layer's result.
        form: how the model's own loss reads logits.
        loss_head: "hf", "raw" for a caller that reads the logits, "liger" or "trl-fused".
        logits_loss: what that caller computes, where it is a trainer.
        chunked_loss: how a trainer computes the cross entropy, where it does.
        tokens, sequences: of a batch, and its rows.
        holds_outputs: the caller holds them when it goes backward: they are among `copies`.
        widens_outputs: under autocast it gets fp32 copies of them.
        widened_cache: elements per token of each copy of cached keys or values among them.

    Kind: exact, as the tape is. Source: the functions above.
    """
    tape = Tape()
    in_chunks = 0
    if chunked_loss is not None and chunked_loss.by_head:
        span = floor_div(tokens, sequences)
        in_chunks = ceil_div(span, chunked_loss.positions) if chunked_loss.positions else 1
    code = OpEmitter(tape, dtypes, targets, method, stream_bytes=stream, in_chunks=in_chunks)
    x = tape.input(per_token(model.stream_width), stream, needs_grad=True)
    if loss_head == "trl-fused":
        sizes = {"tokens": tokens, "sequences": sequences}
        tape.returns(fused_loss(code, model, x, trained=trains_head, **sizes))
        return block_events(tape, frees_input=True, accumulated=accumulated)
    if loss_head == "liger":
        tape.returns(liger_loss(code, model, x, tokens=tokens, trained=trains_head))
        return block_events(tape, frees_input=True, accumulated=accumulated)
    logits = logits_of(code, model, x, trained=trains_head)
    if loss_head == "raw":
        outputs = _read_by_caller(code, logits, widens_outputs)
        if logits_loss is None:
            loss = tape.op([outputs], constant(1), 4)  # one that keeps nothing
        else:
            loss = compared_answers(code, outputs, logits_loss, sequences=sequences)
    elif chunked_loss is not None:
        loss, outputs = chunked_cross_entropy(code, logits, chunked_loss)
    else:
        loss, returned = cross_entropy(code, logits, form)
        outputs = _widened(code, returned, widens_outputs)
        if _widens(code, widens_outputs):
            copies = [_cached_copy(tape, elements) for elements in widened_cache]
            tape.hold(returned, outputs, *copies)
    if holds_outputs:
        tape.keep_copy(outputs)
    tape.returns(loss)
    return block_events(tape, frees_input=True, accumulated=accumulated)


def _cached_copy(tape: Tape, elements: int) -> Tensor:
    """Keys or values of a layer as the model's caller gets them."""
    return tape.op([], per_token(elements), 4, detached=True)


def _widened(code: OpEmitter, x: Tensor, widens_outputs: bool) -> Tensor:
    """An output as the caller gets it, who sends no gradient through it."""
    if not _widens(code, widens_outputs) or x.size >= 4:
        return x
    return code.tape.op([x], x.elements, 4, detached=True)


def _read_by_caller(code: OpEmitter, logits: Tensor, widens_outputs: bool) -> Tensor:
    """Logits as a caller gets them who computes the loss of them, and sends a gradient back."""
    return code.cast(logits, 4) if _widens(code, widens_outputs) else logits


def _widens(code: OpEmitter, widens_outputs: bool) -> bool:
    """Source: accelerate 1.15 `ConvertOutputsToFp32`: a Trainer's model returns fp32 logits."""
    return widens_outputs and code.dtypes.under_autocast


@lru_cache(maxsize=512)
def head_traffic(
    model: ModelSpec,
    dtypes: Dtypes,
    method: Method,
    targets: tuple[str, ...],
    *,
    stream: int,
    form: CrossEntropy,
    trains_head: bool,
    loss_head: str,
    widens_outputs: bool,
) -> StepTraffic:
    """What the kernels of the last norm, the head and a loss without a kernel of its own move.

    Args: as of `head_events`.

    Kind: estimate: each operator reads its inputs and writes its results once.
    Source: as of `head_events`, `label_points`.
    """
    tape = Tape()
    code = OpEmitter(tape, dtypes, targets, method, stream_bytes=stream)
    x = tape.input(per_token(model.stream_width), stream, needs_grad=True)
    if model.pooling is not None:
        loss, _ = _embedded(code, model, x, widens_outputs=widens_outputs)
    elif loss_head == "raw":
        logits = logits_of(code, model, x, trained=trains_head)
        loss = tape.op([_read_by_caller(code, logits, widens_outputs)], constant(1), 4)
    elif loss_head == "hf":
        logits = logits_of(code, model, x, trained=trains_head)
        loss, returned = cross_entropy(code, logits, form)
        _widened(code, returned, widens_outputs)
    else:
        loss = end_of_stack(code, model, x)
    tape.returns(loss)
    return tape.traffic(recomputed=False) if tape.has_graph else StepTraffic(tape.forward_traffic)


@dataclass(frozen=True, slots=True)
class LabelPoints:
    """Bytes at the points of a head and of its loss, beside what they save.

    Args:
        saved_tensors: from the last norm on, until the backward reaches the last layer.
        forward, backward: alive in either, `saved_tensors` left out.
        states: the last hidden states, which the caller names until the loss is there.
        evaluated: alive in a forward without a graph.
    """

    saved_tensors: tuple[SavedTensor, ...]
    forward: tuple[LinearForm, ...]
    backward: tuple[LinearForm, ...]
    states: LinearForm = NOTHING
    evaluated: tuple[LinearForm, ...] = ()


@lru_cache(maxsize=512)
def label_points(
    model: ModelSpec,
    dtypes: Dtypes,
    method: Method,
    targets: tuple[str, ...],
    *,
    stream: int,
    form: CrossEntropy,
    loss_head: str,
    chunked_loss: ChunkedLoss | None,
    trains_head: bool,
    widens_outputs: bool,
) -> LabelPoints:
    """From the last layer's result to the loss, and back. Kind: exact, as the tape is.

    Of labels, of embeddings, and of a vocabulary whose head has an adapter or whose loss the
    trainer computes in chunks.

    Args: as of `head_events`.

    Source: `end_of_stack`, `run_label_head`, `cross_entropy`; of embeddings `symbolic.pooling`.
    """
    tape = Tape()
    in_chunks = int(chunked_loss is not None and chunked_loss.by_head)  # nobody says how many
    code = OpEmitter(tape, dtypes, targets, method, stream_bytes=stream, in_chunks=in_chunks)
    x = tape.input(per_token(model.stream_width), stream, needs_grad=True)
    states = NOTHING
    if model.pooling is not None:
        loss, states = _embedded(code, model, x, widens_outputs=widens_outputs)
        tape.returns(loss)
    elif loss_head == "raw":
        logits = logits_of(code, model, x, trained=trains_head)
        tape.returns(tape.op([_read_by_caller(code, logits, widens_outputs)], constant(1), 4))
    elif chunked_loss is not None:
        logits = logits_of(code, model, x, trained=trains_head)
        tape.returns(chunked_cross_entropy(code, logits, chunked_loss)[0])
    else:
        logits = logits_of(code, model, x, trained=trains_head)
        tape.returns(cross_entropy(code, logits, form)[0])
    saved = tape.saved

    def beside(points: list[LinearForm]) -> tuple[LinearForm, ...]:
        return maximal(minus(point, saved) for point in points)

    return LabelPoints(
        tape.saved_tensors(),
        beside(tape.forward(saving=True)),
        beside(tape.backward(recomputed=False)),
        states,
        tuple(maximal(tape.forward(saving=False))),
    )


def _embedded(
    code: OpEmitter, model: ModelSpec, x: Tensor, *, widens_outputs: bool
) -> tuple[Tensor, LinearForm]:
    """The loss that compares embeddings, and the bytes of the last hidden states."""
    assert model.pooling is not None
    tape, width = code.tape, model.hidden_size
    y = end_of_stack(code, model, x)
    embedding = pooled(code, model.pooling, y, width=width)
    _widened(code, y, widens_outputs)  # the hidden states are among the outputs
    if _widens(code, widens_outputs):
        embedding = code.cast(embedding, 4)
    tape.hold(y)  # the batch's dict names them until the loss is there
    loss = compared(code, embedding, width=width)
    tape.hold(y)
    return loss, NOTHING if y.storage in tape.saved_storages() else y.form
