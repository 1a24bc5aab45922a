"""The head of a class for labels on a tape: in place of logits of a vocabulary.

Source: transformers 5.23 `GenericForSequenceClassification.forward`,
`GenericForTokenClassification.forward`, `BertForSequenceClassification.forward`.
"""

from __future__ import annotations

from whichlora.spec.architecture import LabelHead, LabelTransform
from whichlora.spec.layer import Linear
from whichlora.symbolic.graph import Tensor
from whichlora.symbolic.linear_form import constant, per_sequence, per_token
from whichlora.symbolic.mlp import activate
from whichlora.symbolic.operators import OpEmitter


def run_label_head(code: OpEmitter, head: LabelHead, x: Tensor, *, trained: bool) -> Tensor:
    """Scores of the labels of every position, or of every sequence, from the last hidden states.

    Args:
        trained: the projection, and what PEFT copies with it, is.
    """
    tape = code.tape
    pooled = head.pools == "before"
    y = x
    if head.averages:  # `last_hidden_state * attention_mask.unsqueeze(-1)`
        y = tape.op([y], y.elements, y.size)
    y = _first_position(code, head.projection.in_features, y) if pooled else y
    if head.transform is not None:
        y = _transformed(code, head.transform, y, pooled=pooled, trained=trained)
    if head.drops and code.dtypes.training:
        y = code.dropout(y)
    if code.adapts(head.projection) and not pooled:
        scores = code.linear(head.projection, y)
    else:
        scores = _projected(code, head.projection, y, pooled=pooled, trained=trained)
    tape.hold_to_end(x)  # the base model's output names it until the class returns
    if head.pools != "after":
        return scores
    # `logits[torch.arange(batch_size), last_non_pad_token]`: its backward fills a tensor of zeros
    return tape.op([scores], per_sequence(head.projection.out_features), scores.size)


def _first_position(code: OpEmitter, width: int, x: Tensor) -> Tensor:
    """`hidden[:, 0]`, whose backward fills a tensor of zeros as large as all of them."""
    return code.tape.op([x], per_sequence(width), x.size)


def _transformed(
    code: OpEmitter, transform: LabelTransform, x: Tensor, *, pooled: bool, trained: bool
) -> Tensor:
    """The matrix and what follows it; of one position, an adapter's few values are left out."""
    if pooled:
        is_trained = code.dtypes.trains_base or (trained and transform.in_head)
        y = _projected(code, transform.linear, x, pooled=True, trained=is_trained)
    else:
        y = code.linear(transform.linear, x)
    y = activate(code, transform.activation, y)
    return y if transform.norm is None or pooled else code.norm(transform.norm, y)


def _projected(
    code: OpEmitter, linear: Linear, x: Tensor, *, pooled: bool, trained: bool
) -> Tensor:
    """A product with a matrix that is never quantised, and may be trained beside adapters."""
    tape = code.tape
    narrow = code.autocast(x)
    weight = tape.weight(constant(linear.num_weights), code.dtypes.base_bytes, trained=trained)
    used = code.autocast(weight)
    saves = [used, narrow] if trained else [used]
    elements = (per_sequence if pooled else per_token)(linear.out_features)
    return tape.op([narrow, used], elements, narrow.size, saves=saves, reshapes=True)
