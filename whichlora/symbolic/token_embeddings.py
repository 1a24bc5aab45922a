"""What a model makes of the looked-up rows before its first layer, on a tape."""

from __future__ import annotations

from functools import lru_cache

from whichlora.methods.base import Method
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.targets import adapts_table, token_table
from whichlora.symbolic.autograd import Tape
from whichlora.symbolic.graph import SavedTensor, Tensor
from whichlora.symbolic.layer import BlockEvents, block_events
from whichlora.symbolic.linear_form import per_token
from whichlora.symbolic.operators import OpEmitter


def with_adapter(code: OpEmitter, model: ModelSpec, rows: Tensor) -> Tensor:
    """The looked-up rows, and those of A, times B and scaled, added to them.

    The factors are read as transposed views, which autocast casts anew and does not cache.

    Source: peft 0.21.2 `lora.Embedding.forward`, line 1204; torch 2.13 `cached_cast`.
    """
    tape, dtypes, table = code.tape, code.dtypes, token_table(model)
    a = tape.weight(code.per_rank(table.in_features), dtypes.adapter_bytes, trained=True)
    b = tape.weight(code.per_rank(table.out_features), dtypes.adapter_bytes, trained=True)
    inner = code.autocast(tape.op([a], code.rows.of_rank(1), dtypes.adapter_bytes, picks=True))
    narrow = code.autocast(b)
    product = tape.op(
        [inner, narrow],
        per_token(table.out_features),
        inner.size,
        saves=[inner, narrow],
        reshapes=True,
        what=f"{table.name}: B·A·x",
    )
    return code.cast(code.add(rows, code.scale(product)), rows.size)


@lru_cache(maxsize=512)
def saved_by_table(
    model: ModelSpec, dtypes: Dtypes, method: Method, targets: tuple[str, ...]
) -> tuple[SavedTensor, ...]:
    """What an adapter of the token table keeps to its backward; nothing where there is none.

    Kind: exact. Source: `with_adapter`.
    """
    if not adapts_table(model, targets):
        return ()
    tape = Tape()
    width = model.embeddings[0].width
    rows = tape.input(per_token(width), dtypes.embedding_bytes, needs_grad=True)
    with_adapter(OpEmitter(tape, dtypes, targets, method), model, rows)
    return tape.saved_tensors()


def embed(code: OpEmitter, model: ModelSpec, rows: Tensor) -> Tensor:
    """Positions, factors, norms and dropouts between the looked-up rows and the first layer.

    Source: transformers 5.23 `GPT2Model.forward`, `BertEmbeddings.forward`, `OPTDecoder.forward`,
    `BloomModel.forward`, `GemmaTextScaledWordEmbedding.forward`.
    """
    tape, dtypes = code.tape, code.dtypes
    x = rows
    if adapts_table(model, code.targets):
        x = with_adapter(code, model, x)
    if model.embeds_in_steps:
        x = code.scale(x)
    if model.head_linears:
        x = code.linear(model.head_linears[0], x)
    for table in model.embeddings[1:]:
        weight = tape.weight(
            per_token(0), dtypes.embedding_bytes, trained=dtypes.trains_base and table.trains
        )
        looked_up = tape.op([weight], per_token(table.width * table.per_sequence), x.size)
        x = code.add(x, looked_up)
        tape.hold(looked_up)
        if model.adds_positions and model.task == "causal-lm" and not dtypes.training:
            # `position_embeds` of `GPT2Model.forward`; in training the peak is elsewhere
            tape.cached_copies.append(looked_up.storage)
    for norm in model.embedding_norms:
        x = code.norm(norm, x)
    for _ in model.embedding_dropouts if dtypes.training else ():
        x = code.dropout(x)
    return x


def embedding_events(
    model: ModelSpec,
    dtypes: Dtypes,
    method: Method,
    targets: tuple[str, ...],
    *,
    needs_grad: bool,
    accumulated: bool = False,
) -> BlockEvents | None:
    """What happens to the looked-up rows; None where the first layer reads them as they are.

    Args:
        needs_grad: the rows do.
        accumulated: parameters have gradients of earlier micro-steps.

    Kind: exact, as the tape is. Source: `embed`.
    """
    tape = Tape(no_grad=not dtypes.training)
    code = OpEmitter(tape, dtypes, targets, method, stream_bytes=dtypes.stream_bytes)
    width = model.embeddings[0].width
    rows = tape.input(per_token(width), dtypes.embedding_bytes, needs_grad=needs_grad)
    result = embed(code, model, rows)
    if result.storage == rows.storage:
        return None
    tape.returns(result)
    return block_events(tape, accumulated=accumulated)
