"""What a model makes of the looked-up rows before its first layer, on a tape."""

from __future__ import annotations

from whichlora.methods.base import Method
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.dtypes import Dtypes
from whichlora.symbolic.autograd import Tape, Tensor
from whichlora.symbolic.layer import BlockEvents, block_events
from whichlora.symbolic.linear_form import per_token
from whichlora.symbolic.operators import OpEmitter


def embed(code: OpEmitter, model: ModelSpec, rows: Tensor) -> Tensor:
    """Positions, factors, norms and dropouts between the looked-up rows and the first layer.

    Source: transformers 5.23 `GPT2Model.forward`, `BertEmbeddings.forward`, `OPTDecoder.forward`,
    `BloomModel.forward`, `GemmaTextScaledWordEmbedding.forward`.
    """
    tape, dtypes = code.tape, code.dtypes
    x = rows
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
) -> BlockEvents | None:
    """What happens to the looked-up rows; None where the first layer reads them as they are.

    Args:
        needs_grad: the rows do.

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
    return block_events(tape)
