"""The classes of transformers that give labels: what stands after the last layer in each of them.

Decoders share one form, which most take from `modeling_layers.py`; an encoder's family says what
its own classes have.

Source: transformers 5.23 `GenericForSequenceClassification`, `GenericForTokenClassification`,
`GenericForQuestionAnswering`, and the classes of the same names in each modeling file.
"""

from __future__ import annotations

from whichlora.families.fields import Fields
from whichlora.spec.architecture import LabelHead, LabelTransform, ModelSpec
from whichlora.spec.layer import Linear, Norm

SEQUENCES, TOKENS, SPANS = "sequence-classification", "token-classification", "question-answering"
LabelHeads = tuple[tuple[str, LabelHead], ...]

_ALL = "arcee bloom exaone4 falcon gpt2 gpt_neo gpt_neox llama ministral ministral3 mistral mixtral"
_ALL += " mpt nemotron qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next seed_oss smollm3"
_NO_SPANS = "deepseek_v3 gemma gemma2 glm glm4 gpt_bigcode gpt_oss helium persimmon phi phi3"
_NO_SPANS += " qwen3_5 stablelm starcoder2"
_SEQUENCES_ALONE = "deepseek_v2 gemma3 gemma3_text hunyuan_v1_dense hunyuan_v1_moe olmo olmo2 olmo3"
_SEQUENCES_ALONE += " phimoe qwen3_5_text"
_CLASSES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_ALL.split(), (SEQUENCES, TOKENS, SPANS)),
    **dict.fromkeys(_NO_SPANS.split(), (SEQUENCES, TOKENS)),
    **dict.fromkeys(("gptj", "opt"), (SEQUENCES, SPANS)),
    "apertus": (TOKENS,),
    **dict.fromkeys(_SEQUENCES_ALONE.split(), (SEQUENCES,)),
}
"""Tasks that a decoder's type has a class for. Source: transformers 5.23 modeling_auto.py."""
_OWN_TOKEN_LOSS = frozenset(
    {"bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "mpt"}
)
"""Classes that call `CrossEntropyLoss` themselves, of logits that nobody widens."""


def projection(
    name: str, in_features: int, *, bias: bool, out_features: int = 1, copied: bool = True
) -> Linear:
    """To the labels; where PEFT copies it, it gets no adapter, and must not be quantised."""
    return Linear(
        name=name,
        in_features=in_features,
        out_features=out_features,
        reads="last_hidden",
        bias=bias,
        adapter_rank=0 if copied else None,
        quantisable=not copied,
    )


def of_decoder(model: ModelSpec) -> LabelHeads:
    """Those of a decoder: every position is projected, of whose scores one is picked."""
    hidden = model.hidden_size if model.head is None else model.head.in_features
    by_task = {
        SEQUENCES: LabelHead(projection=projection("score", hidden, bias=False), pools="after"),
        TOKENS: LabelHead(
            projection=projection("score", hidden, bias=True),
            pools="never",
            drops=True,
            widens_logits=model.model_type not in _OWN_TOKEN_LOSS,
        ),
        SPANS: LabelHead(
            projection=projection("qa_outputs", hidden, bias=True, out_features=2), pools="never"
        ),
    }
    return tuple((task, by_task[task]) for task in _CLASSES.get(model.model_type, ()))


def of_encoder(
    c: Fields,
    transform: LabelTransform,
    *,
    lost_params: int = 0,
    drops_tokens: bool = True,
    drops_spans: bool = False,
) -> LabelHeads:
    """Those of an encoder: the first position of a sequence passes `transform`.

    Args:
        lost_params: the pooler of `AutoModel`, which classes without `in_model` lack.
        drops_tokens, drops_spans: whether there is a dropout before the labels of tokens and spans.
    """
    hidden = c.size("hidden_size")
    return (
        (
            SEQUENCES,
            LabelHead(
                projection=projection("classifier", hidden, bias=True),
                pools="before",
                transform=transform,
                lost_params=0 if transform.in_model else lost_params,
            ),
        ),
        (
            TOKENS,
            LabelHead(
                projection=projection("classifier", hidden, bias=True),
                pools="never",
                drops=drops_tokens,
                lost_params=lost_params,
            ),
        ),
        (
            SPANS,
            LabelHead(
                projection=projection("qa_outputs", hidden, bias=True, out_features=2),
                pools="never",
                drops=drops_spans,
                lost_params=lost_params,
            ),
        ),
    )


def transform(
    c: Fields,
    activation: str,
    *,
    name: str = "dense",
    norm: Norm | None = None,
    bias: bool = True,
    in_model: bool = False,
    in_head: bool = False,
) -> LabelTransform:
    """A square matrix before the labels; what is in one module with the head gets no adapter."""
    hidden = c.size("hidden_size")
    linear = Linear(
        name=name,
        in_features=hidden,
        out_features=hidden,
        reads="last_hidden",
        bias=bias,
        adapter_rank=0 if in_head else None,
        quantisable=not in_head,
    )
    return LabelTransform(
        linear=linear, activation=activation, norm=norm, in_model=in_model, in_head=in_head
    )


def with_pooler(c: Fields, model: ModelSpec) -> LabelHeads:
    """BERT and its kin: the pooler of the model itself."""
    pooler = transform(c, "tanh", in_model=True)
    drops = c.probability("hidden_dropout_prob") > 0
    return of_encoder(c, pooler, lost_params=model.other_params, drops_tokens=drops)


def with_dense_head(c: Fields, model: ModelSpec, *, activation: str = "tanh") -> LabelHeads:
    """RoBERTa and its kin: a head of two matrices, which PEFT copies whole, and no pooler."""
    dense = transform(c, activation, in_head=True)
    drops = c.probability("hidden_dropout_prob") > 0
    return of_encoder(c, dense, lost_params=model.other_params, drops_tokens=drops)
