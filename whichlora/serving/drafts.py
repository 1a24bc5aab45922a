"""Tokens that are drafted before the model verifies them: by what, and what that takes of a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from whichlora.errors import ConfigError
from whichlora.memory.entries import Entry, Fact
from whichlora.serving.base import Served
from whichlora.serving.drafted import Drafts
from whichlora.serving.indexers import index_key_bytes
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.checkpoint import stored_quant
from whichlora.spec.layer import Attention, Layer, LayerGroup, Linear
from whichlora.spec.numeric import ceil_div
from whichlora.spec.options import Option

ACCEPTED = "acceptance_length"  # our own option: no flag of an engine says it
UNTIMED = (
    "steps with drafts are predicted for a stated length alone: how many are accepted depends on "
    f"the texts; give {ACCEPTED}, tokens of a step as the engine's log or metrics have them"
)

NOTE = "what drafts is loaded by the engine, and counted here beside the model's parameters"
STATES_READ = 3  # of the model's layers, by a drafter of EAGLE-3; models/llama_eagle3.py:207


class _Kept(NamedTuple):
    """Where a config says how many layers draft.

    Attributes:
        key: of the config; `unstated` layers where it says nothing.
        divides: whether the matrix before them is divided among the GPUs.
    """

    key: str
    unstated: int = 0
    divides: bool = False


# Model types whose draft layer is one more layer, joined to the model by a matrix. Source: vLLM
# 0.33.0 config/speculative.py:733-1031 and models/deepseek_mtp.py:73, glm4_moe_mtp.py:78,
# qwen3_next_mtp.py:68, qwen3_5_mtp.py:88; SGLang 0.5.23 srt/models/*_nextn.py and *_mtp.py.
_NEXT_N, _QWEN = "num_nextn_predict_layers", _Kept("mtp_num_hidden_layers", divides=True)
WITH_DRAFT_LAYER: dict[str, _Kept] = {
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "glm_moe_dsa"), _Kept(_NEXT_N)),
    **dict.fromkeys(("glm4_moe", "glm4_moe_lite", "ernie4_5_moe"), _Kept(_NEXT_N)),
    "qwen3_next": _Kept(_NEXT_N, unstated=1, divides=True),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _QWEN),
}
# Of these, those whose files in 4 bits have it in 16. Source: qwen3_5_mtp.py:92 and :113; the
# lists of exceptions of published copies, which name `mtp`. Kind: estimate.
WIDE_DRAFT_LAYER = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")

JOINT = Fact(
    part="weights",
    what="matrix and norms before a layer for drafts",
    shape="[hidden_size, 2 x hidden_size], 3 x [hidden_size]",
    dtype="compute_bytes",
    count="num_nextn_predict_layers",
    why="each GPU has it whole, but Qwen's under vLLM; table and head are those of the model",
    source="vLLM 0.33.0 model_executor/models/deepseek_mtp.py:83; "
    "v1/spec_decode/llm_base_proposer.py:1418 _maybe_share_embeddings; SGLang 0.5.23 "
    "srt/models/deepseek_nextn.py:94",
)
DRAFTER = Fact(
    part="weights",
    what="matrix before a drafter's layers, its table and head",
    shape="[hidden_size, inputs x hidden_size], [draft_vocab_size, hidden_size]",
    dtype="compute_bytes",
    why="EAGLE-3 has a head of its own, a draft model a table, too; both are divided",
    source="vLLM 0.33.0 model_executor/models/llama_eagle3.py:218, :355; "
    "v1/spec_decode/draft_model.py",
)
COPIED = Fact(
    part="weights",
    what="a second table and head, until the layer for drafts has those of the model",
    shape="2 x [vocab_size, hidden_size]",
    dtype="16 bit",
    why="they are freed after the pool has been sized, so that nothing takes their place",
    source="SGLang 0.5.23 srt/speculative/eagle_worker_v2.py:258 init_lm_head; "
    "github.com/sgl-project/sglang/issues/36452",
)


def acceptance_option() -> Option:
    """The option of every engine that drafts."""
    return Option(
        name=ACCEPTED,
        summary="tokens that a step gives a sequence in the mean, drafts accepted among them",
        default=None,
        kind=float,
    )


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def _kept(model: ModelSpec) -> _Kept | None:
    return WITH_DRAFT_LAYER.get(_text(model.config).get("model_type", model.model_type))


def num_layers(model: ModelSpec) -> int:
    """Layers of `model` that draft.

    Kind: exact. Source: `WITH_DRAFT_LAYER`.
    """
    kept = _kept(model)
    if kept is None:
        return 0
    number = _text(model.config).get(kept.key)
    return number if isinstance(number, int) else kept.unstated


def has_draft_layer(model: ModelSpec) -> bool:
    """Whether a layer for drafts is predicted of `model`."""
    return bool(num_layers(model))


def _draft_layer(model: ModelSpec) -> Layer:
    """The last layer that is as a draft's: of whole attention, with an indexer or experts, if any.

    Kind: exact. Source: vLLM 0.33.0 models/qwen3_next_mtp.py:84 layer_type="full_attention".
    """
    able = [
        layer
        for layer, _ in model.layers()
        if (layer.moe is not None or not model.has_experts)
        and all(
            each.kind == "softmax"
            and each.sliding_window is None
            and (each.sparse is None or index_key_bytes(each))
            for each in layer.attentions
        )
    ]
    return able[-1]


def _wide(layer: Layer) -> Layer:
    """`layer` in 16 bit, however the others are stored."""

    def widened(linears: tuple[Linear, ...]) -> tuple[Linear, ...]:
        return tuple(replace(linear, quantisable=False) for linear in linears)

    moe, mlp = layer.moe, layer.mlp
    if mlp is not None:
        mlp = replace(mlp, linears=widened(mlp.linears))
    if moe is not None:
        expert = replace(moe.expert, linears=widened(moe.expert.linears))
        shared = moe.shared and replace(moe.shared, linears=widened(moe.shared.linears))
        moe = replace(moe, expert=expert, shared=shared)
    wide = layer.with_attentions(lambda each: replace(each, linears=widened(each.linears)))
    return replace(wide, mlp=mlp, moe=moe)


def _reads_twice(attention: Attention) -> Attention:
    """The first layer of EAGLE-3, whose attention reads a token's row beside the state."""
    linears = tuple(
        replace(linear, in_features=2 * linear.in_features) if linear.reads == "attn_in" else linear
        for linear in attention.linears
    )
    return replace(attention, linears=linears)


def drafting_model(served: Served, drafts: Drafts) -> ModelSpec | None:
    """What drafts, with the table and head that it uses; None where nothing computes.

    Kind: exact. Source: vLLM 0.33.0 models/deepseek_mtp.py:104 mtp_block, models/deepseek_v32/
    attention.py:195 is_mtp_layer, models/llama_eagle3.py:85; SGLang 0.5.23
    srt/model_executor/pool_configurator.py:262.
    """
    model = served.model
    if drafts.by == "layer":
        layer = _draft_layer(model)
        if model.model_type in WIDE_DRAFT_LAYER and served.dtypes.quant not in ("none", "fp8"):
            layer = _wide(layer)
        groups = (LayerGroup(layer=layer, count=num_layers(model)),)
        return replace(model, groups=groups, started_tower=None, idle_linears=())
    drafter = model.drafter
    if drafter is None:
        return None
    if drafts.by == "eagle3":
        first = drafter.groups[0]
        groups = (replace(first, layer=first.layer.with_attentions(_reads_twice)),)
        drafter = replace(drafter, groups=(*groups, *drafter.groups[1:]))
        if drafter.head is not None:
            rows = drafter.config.get("draft_vocab_size") or drafter.vocab_size
            drafter = replace(drafter, head=replace(drafter.head, out_features=rows))
    elif drafts.by == "eagle":
        drafter = replace(drafter, head=model.head)
    return drafter if stored_quant(drafter.config) else drafter.with_layers(_wide)


def beside_drafts(notes: Sequence[str], model: ModelSpec) -> tuple[str, ...]:
    """`notes` on `model` that hold where `NOTE` does: its own layer that drafts is counted then."""
    if model.drafter is not None:
        return tuple(notes)
    return tuple(note for note in notes if note != model.draft_note)


def with_drafts(served: Served, drafts: Drafts | None) -> Served:
    """`served` whose model has the layers that draft, too: their weights and their cache.

    Kind, source: as of `drafting_model`.
    """
    drafting = drafting_model(served, drafts) if drafts else None
    if drafting is None:
        return served
    model = served.model
    return replace(served, model=replace(model, groups=(*model.groups, *drafting.groups)))


def draft_entries(served: Served, drafts: Drafts, ranks: int) -> list[Entry]:
    """What drafts beside its layers. Kind: exact. Source: `JOINT`, `DRAFTER`.

    Args:
        ranks: GPUs that share every matrix.
    """
    model, width = served.model, served.dtypes.compute_bytes
    hidden, kept = model.hidden_size, _kept(model)
    if drafts.by == "layer":
        divides = kept is not None and kept.divides and served.engine.divides_joint
        joint = ceil_div(2 * hidden * hidden, ranks if divides else 1) + 3 * hidden
        return [Entry(JOINT, num_layers(model) * joint * width)]
    drafter = drafting_model(served, drafts)
    if drafter is None:
        return []
    elements = 0
    if drafts.by in ("eagle", "eagle3"):
        states = STATES_READ if drafts.by == "eagle3" else 2
        elements += states * hidden * drafter.hidden_size + 3 * drafter.hidden_size
    if drafts.by == "model":
        elements += sum(ceil_div(each.rows, ranks) * each.width for each in drafter.embeddings)
    if drafter.head is not None and drafts.by != "eagle" and not drafter.head_tied:
        elements += ceil_div(drafter.head.num_weights, ranks)
    return [Entry(DRAFTER, elements * width)]


def copied_entry(served: Served, ranks: int) -> Entry:
    """A second table and head. Kind: exact for an untied head. Source: `COPIED`."""
    model = served.model
    rows = sum(ceil_div(each.rows, ranks) * each.width for each in model.embeddings)
    head = 0 if model.head is None or model.head_tied else ceil_div(model.head.num_weights, ranks)
    return Entry(COPIED, 2 * (rows + head))


def accepted_tokens(served: Served, drafts: Drafts | None) -> float:
    """Tokens that a step gives a sequence in the mean; 0 where nobody states them."""
    stated = served.options[ACCEPTED]
    return float(stated) if drafts and isinstance(stated, (int, float)) else 0.0


def check_drafts(served: Served, option: str, drafts: Drafts | None, stages: int) -> None:
    """Refuse what no engine drafts with, or what is not predicted of it.

    Args:
        option: that asks for drafts.

    Raises:
        ConfigError: one line.
    """
    model, stated = served.model, served.options[ACCEPTED]
    if drafts is None:
        if stated is not None:
            raise ConfigError(f"{ACCEPTED}: nothing drafts; give {option}, too, or leave it out")
        return
    if isinstance(stated, (int, float)) and not 1 <= stated <= drafts.queries:
        raise ConfigError(
            f"{ACCEPTED}: a step gives 1 to {drafts.queries} tokens, those drafted and one more, "
            f"got {stated:g}"
        )
    if drafts.by == "layer" and not has_draft_layer(model):
        raise ConfigError(
            f"{option}: a layer for drafts is predicted for DeepSeek V3, GLM-4.5 and GLM-5, Ernie "
            f"4.5 and Qwen3-Next to Qwen3.8, which {model.name} is none of; leave it out"
        )
    if drafts.has_drafter and model.drafter is None:
        raise ConfigError(f"{option}: names no model that drafts; give one, or leave it out")
    if stages > 1:
        raise ConfigError(f"{option}: is not predicted beside stages of a pipeline; leave it out")
    _check_drafter(served, option, drafts)


def _check_drafter(served: Served, option: str, drafts: Drafts) -> None:
    """Refuse another model that cannot draft for this one.

    Source: vLLM 0.33.0 config/speculative.py:2040 `verify_equal_vocab_size_if_draft_model`.
    """
    drafter, model = served.model.drafter, served.model
    if drafter is None or not drafts.has_drafter:
        return
    if drafts.by == "model" and drafter.vocab_size != model.vocab_size:
        raise ConfigError(
            f"{option}: {drafter.name} has {drafter.vocab_size} tokens, {model.name} has "
            f"{model.vocab_size}; a draft model needs as many"
        )
    quant = stored_quant(drafter.config)
    if quant and quant != served.run.quant:
        raise ConfigError(
            f"{option}: {drafter.name} is stored in {quant}, which is not predicted beside a "
            f"model in {served.run.quant}; give one in 16 bit"
        )
    kinds = {each.kind for layer, _ in drafter.layers() for each in layer.attentions}
    if kinds != {"softmax"} or drafter.has_experts:
        raise ConfigError(
            f"{option}: {drafter.name} has experts or states, of which no drafts are predicted; "
            "give a dense model"
        )
