"""What one tensor-parallel rank of an engine holds: weights, rotary tables, adapters' slots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from whichlora.errors import ConfigError
from whichlora.families.experts import with_routed_rows
from whichlora.memory.entries import Entry, Fact
from whichlora.memory.weights import weight_entries
from whichlora.parallel.division import COLUMNS, ROWS, divided_model
from whichlora.serving.base import Served
from whichlora.serving.expert_ranks import ExpertRanks
from whichlora.serving.indexers import attended_elements, with_wide_indexers
from whichlora.serving.quant_cards import offered_quants
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.layer import Attention, Layer, Linear, Mlp
from whichlora.spec.numeric import ceil_div
from whichlora.spec.run import BNB_QUANTS
from whichlora.spec.words import alternatives
from whichlora.units import format_bytes

KEYS_AND_VALUES = ("k_proj", "v_proj")
LATENTS = ("q_latent", "kv_latent")
# Projections whose heads are divided; a gate comes with its query head.
DIVIDED = (
    *("plain", "gated", "scaled", "scaled_keys"),
    *("one_by_one", "one_by_one_shared", "one_after_other", "borrowed"),
)
# Kinds of rotation whose positions in a config are scaled already. Source: vLLM 0.33.0
# config/model.py:2603.
SCALED_POSITIONS = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
WHOLE_TOWERS = ("gemma4", "gemma3n")  # each rank has all of it
# Of a recurrent layer, the matrices that are divided by rows; the others are by columns.
STATE_ROWS = ("out_proj", "x_proj")

ROTARY_TABLES = Fact(
    part="weights",
    what="cosines and sines of every position",
    shape="[max_position_embeddings, rotary_dim]",
    dtype="compute_bytes; fp32 in SGLang",
    count="1 for each kind of rotation, shared by all layers",
    why="a buffer of the rotary embedding",
    source="vLLM 0.33.0 model_executor/layers/rotary_embedding/base.py:59 cos_sin_cache; "
    "SGLang 0.5.23 srt/layers/rotary_embedding/base.py:115",
)
LORA_SLOTS = Fact(
    part="adapters",
    what="slots for adapters",
    shape="[max_loras, max_lora_rank, in_features], [max_loras, out_features, max_lora_rank]",
    dtype="of the model",
    count="every matrix; embeddings and head where the model's class lists them",
    why="allocated when the engine starts, whether adapters are loaded or not",
    source="vLLM 0.33.0 lora/layers/column_parallel_linear.py:224, base_linear.py:133",
)


def rank_model(model: ModelSpec, size: int, experts: ExpertRanks | None = None) -> ModelSpec:
    """What one of `size` tensor-parallel ranks has of `model`.

    Where there are fewer heads of keys than ranks, each rank has one of them.

    Args:
        experts: how routed experts are divided; None: their widths among the ranks.

    Kind: exact. Source: vLLM 0.33.0 `LlamaAttention.__init__`, models/llama.py:152-160;
    `FusedMoE` divides the width of every expert.
    """
    model = with_wide_indexers(with_routed_rows(model)).with_attentions(_with_own_values)
    model = _with_divided_tower(model, size)
    routed = experts or ExpertRanks(width=size)
    if size == routed.width == routed.whole == routed.gathered == 1:
        return model

    def of_rank(layer: Layer) -> Layer:
        return _with_divided_experts(_with_repeated_keys(layer, size), size, routed)

    if model.head is not None and routed.gathered > 1:
        rows = ceil_div(model.head.out_features, routed.gathered)
        model = replace(model, head=replace(model.head, out_features=rows))
    return divided_model(model.with_layers(of_rank), size)


def _with_divided_tower(model: ModelSpec, size: int) -> ModelSpec:
    """`model` whose tower's matrices are divided as the text's are, but those of transformers.

    Kind: exact, but for biases of rows. Source: vLLM 0.33.0 models/qwen3_vl.py
    `Qwen3_VisionBlock`, siglip.py, clip.py; gemma4_mm.py `AutoModel.from_config`; SGLang 0.5.23
    srt/layers/attention/vision.py `VisionAttention`.
    """
    if size == 1 or model.model_type in WHOLE_TOWERS:
        return model
    linears = tuple(
        replace(linear, out_features=ceil_div(linear.out_features, size))
        for linear in model.idle_linears
    )
    saved = sum(each.num_params for each in model.idle_linears)
    saved -= sum(each.num_params for each in linears)
    return replace(
        model,
        idle_linears=linears,
        idle_params=model.idle_params - saved,
        other_params=model.other_params - saved,
    )


def _with_own_values(attention: Attention) -> Attention:
    """Gemma 4's layers of one matrix for keys and values: it is loaded into both places.

    Source: vLLM 0.33.0 model_executor/models/gemma4.py:107, :421.
    """
    if attention.projection != "one_by_one_shared":
        return attention
    values = (
        replace(linear, name="v_proj") for linear in attention.linears if linear.name == "k_proj"
    )
    return replace(attention, linears=(*attention.linears, *values))


def _with_repeated_keys(layer: Layer, size: int) -> Layer:
    return layer.with_attentions(lambda attention: _repeated(attention, size))


def _repeated(attention: Attention, size: int) -> Attention:
    """`attention` whose equal shares are what each rank has of it."""
    if attention.kind != "softmax":
        return _shared_state(attention, size)
    if has_latents(attention):
        return _repeated_latents(attention, size)
    return _repeated_keys(attention, size)


def _shared_state(attention: Attention, size: int) -> Attention:
    """A recurrent layer, of which each rank has a share of the heads with their state.

    Where there are fewer groups of heads than ranks, each rank has one of them.
    Source: vLLM 0.33.0 layers/mamba/mamba_utils.py:144 `MambaStateShapeCalculator`,
    mamba_mixer2.py, gdn/qwen_gdn_linear_attn.py, short_conv.py.
    """
    groups = ceil_div(size, attention.num_key_value_heads) * attention.num_key_value_heads
    repeated = (groups - attention.num_key_value_heads) * attention.head_dim
    channels = attention.conv_channels + 2 * repeated * (attention.kind == "mamba2")
    return replace(
        attention,
        num_key_value_heads=groups,
        linears=tuple(
            replace(linear, in_features=ceil_div(linear.in_features, size))
            if linear.name in STATE_ROWS
            else replace(linear, out_features=ceil_div(linear.out_features, size))
            for linear in attention.linears
        ),
        norms=tuple(replace(norm, rows=max(norm.rows, size)) for norm in attention.norms),
        state_elements=ceil_div(channels, size) * attention.conv_kernel,
        recurrent_elements=attention.recurrent_elements // size,
        other_params=ceil_div(attention.other_params, size),
    )


def has_latents(attention: Attention) -> bool:
    """Whether one latent of a token is cached for all heads."""
    return attention.projection.startswith("latent")


def latent_width(attention: Attention) -> int:
    """Elements that one head multiplies of a token's latent, with its rotated part and without."""
    return 2 * attended_elements(attention) - (attention.rotary_dim or 0)


def between_latents(rank: ModelSpec) -> int:
    """Elements of the matrices from latents to keys and values of the heads, in all layers."""
    return sum(
        count * linear.num_weights
        for layer, count in rank.layers()
        for attention in layer.attentions
        for linear in attention.linears
        if linear.reads == "kv_latent"
    )


def _repeated_latents(attention: Attention, size: int) -> Attention:
    """`attention` with latents for each rank, which has them whole.

    Of the matrices that read one it has its heads' share; indexers are whole.
    Source: vLLM 0.33.0 models/deepseek_v2.py:1052 fused_qkv_a_proj, :1083 q_b_proj, :1099
    kv_b_proj; SGLang 0.5.23 srt/models/deepseek_v2.py.
    """
    return replace(
        attention,
        cache_elements=attention.cache_elements * size,
        norms=tuple(replace(norm, rows=norm.rows * size) for norm in attention.norms),
        linears=tuple(
            replace(linear, out_features=ceil_div(linear.out_features, size))
            if linear.reads in LATENTS and linear.active
            else linear
            for linear in attention.linears
        ),
    )


def _repeated_keys(attention: Attention, size: int) -> Attention:
    """`attention` with as many heads of keys as ranks, where it has fewer."""
    copies = ceil_div(size, attention.num_key_value_heads)
    if copies == 1:
        return attention
    return replace(
        attention,
        num_key_value_heads=attention.num_key_value_heads * copies,
        cache_elements=attention.cache_elements * copies,
        linears=tuple(
            replace(linear, out_features=linear.out_features * copies)
            if linear.name in KEYS_AND_VALUES
            else linear
            for linear in attention.linears
        ),
    )


def _with_divided_experts(layer: Layer, size: int, experts: ExpertRanks) -> Layer:
    if layer.mlp is not None and experts.gathered > 1:
        layer = replace(layer, mlp=_divided_experts(layer.mlp, experts.gathered))
    if layer.moe is None:
        return layer
    shared = layer.moe.shared
    moe = replace(
        layer.moe,
        expert=_divided_experts(layer.moe.expert, experts.width),
        shared=None if shared is None else _divided_experts(shared, size * experts.gathered),
    )
    return replace(layer, moe=experts.of_rank(moe))


def _divided_experts(mlp: Mlp, size: int) -> Mlp:
    """The fused gate and up are divided by columns, the way back by rows."""
    width = mlp.width
    return replace(
        mlp,
        width=ceil_div(width, size),
        linears=tuple(_divided_expert(linear, width, size) for linear in mlp.linears),
    )


def _divided_expert(linear: Linear, width: int, size: int) -> Linear:
    if linear.in_features == width:
        return replace(linear, in_features=ceil_div(width, size))
    return replace(linear, out_features=ceil_div(linear.out_features, size))


def with_aligned_experts(rank: ModelSpec, *, hidden: int, width: int) -> ModelSpec:
    """`rank` whose experts a kernel pads: both of their sizes to multiples.

    Args:
        hidden, width: what the hidden size and the width of an expert are multiples of.

    Kind: exact. Source: vLLM 0.33.0 fused_moe/oracle/mxfp4.py:837
    `mxfp4_round_up_hidden_size_and_intermediate_size`.
    """

    def aligned(layer: Layer) -> Layer:
        if layer.moe is None:
            return layer
        mlp = layer.moe.expert
        inner = ceil_div(mlp.width, width) * width
        outer = ceil_div(rank.hidden_size, hidden) * hidden
        joint, down = mlp.linears
        linears = (
            replace(joint, in_features=outer, out_features=2 * inner),
            replace(down, in_features=inner, out_features=outer),
        )
        return replace(layer, moe=replace(layer.moe, expert=replace(mlp, linears=linears)))

    return rank.with_layers(aligned)


def held_entries(
    served: Served,
    rank: ModelSpec,
    *,
    rotary_element_bytes: int,
    dtypes: Dtypes | None = None,
    times_positions: int = 1,
) -> list[Entry]:
    """Weights of one rank, and its rotary tables.

    Args:
        dtypes: of the weights, where the engine stores them otherwise than transformers.
        times_positions: rows of the tables over the positions of the model.

    Kind: exact for whole models; under tensor parallelism a vocabulary is padded further.
    """
    if served.run.quant not in BNB_QUANTS:  # quantised files have the tower in 16 bit
        rank = replace(rank, idle_linears=())
    entries = weight_entries(rank, dtypes or served.dtypes, like=0)
    table = times_positions * rotary_bytes(rank, rotary_element_bytes)
    return [*entries, Entry(ROTARY_TABLES, table)]


def check_ranks(served: Served, option: str, staged_by: str, *, ranks: int | None = None) -> None:
    """Refuse ranks that cannot share the heads.

    Args:
        ranks: that share them, where these are not all of `option`.

    Source: vLLM 0.33.0 `LlamaAttention.__init__`, model_executor/models/llama.py:148-160.

    Raises:
        ConfigError: one line, which names `option`, and `staged_by` as the way out.
    """
    ranks = ranks or served.count(option) or 1
    if ranks == 1:
        return
    gpus = ranks * (served.count(staged_by) or 1)
    stages = f"{option} 1 with {staged_by} {gpus}"
    for layer, _ in served.model.layers():
        for attention in layer.attentions:
            if attention.projection not in DIVIDED and not has_latents(attention):
                raise ConfigError(
                    f"{option}: not predicted for the attention of {served.model.name}; use "
                    f"{stages}"
                )
    if fault := heads_fault(served.model, ranks):
        divisors = (each for each in range(ranks - 1, 0, -1) if ranks % each == 0)
        most = next(each for each in divisors if not heads_fault(served.model, each))
        raise ConfigError(f"{option}: {fault}; use {option} {most} with {staged_by} {gpus // most}")


def heads_fault(model: ModelSpec, ranks: int) -> str:
    """Why `ranks` cannot share the heads of `model`; empty where they can."""
    for layer, _ in model.layers():
        for attention in layer.attentions:
            heads, keys = attention.num_attention_heads, attention.num_key_value_heads
            has_groups = attention.kind == "softmax" and not has_latents(attention)
            shares_keys = not has_groups or max(keys, ranks) % min(keys, ranks) == 0
            if (heads % ranks and attention.kind != "conv") or not shares_keys:
                return f"{heads} heads and {keys} heads of keys can't be divided by {ranks}"
    return ""


def check_model(served: Served, *, keeps_states: bool = False) -> None:
    """Refuse a model that generates nothing, or whose layers keep another state than keys.

    Args:
        keeps_states: whether the engine's pool of states is predicted, too.

    Raises:
        ConfigError: one line.
    """
    model, name = served.model, served.run.serving
    if model.task != "causal-lm":
        raise ConfigError(
            f"serving: {name} is predicted for models that continue a text, {model.name} is none; "
            "leave serving out"
        )
    kinds = {attention.kind for layer, _ in model.layers() for attention in layer.attentions}
    if "softmax" not in kinds or (kinds != {"softmax"} and not keeps_states):
        raise ConfigError(
            f"serving: {name}'s pool is not predicted for the recurrent layers of {model.name}; "
            "leave serving out"
        )
    if model.skips_layers:
        raise ConfigError(
            f"serving: {name}'s pool is not predicted for the cross attention of {model.name}; "
            "leave serving out"
        )


def longest_context(
    served: Served, *, scaled: tuple[str, ...] = (), scales_yarn: bool = False
) -> int | None:
    """The most tokens that an engine derives from the config; None where that is another model's.

    Kind, source and arguments as of `derived_context`.
    """
    model = served.model
    if model.shapes_of:
        return None
    return derived_context(model, scaled=scaled, scales_yarn=scales_yarn)


def derived_context(
    model: ModelSpec, *, scaled: tuple[str, ...] = (), scales_yarn: bool = False
) -> int | None:
    """The most tokens that an engine derives from a config; None where that states no positions.

    A factor of a rotation counts where its positions are not scaled already.
    Kind: exact; upper bound for kinds of rotation that an engine does not know.
    Source: vLLM 0.33.0 config/model.py:2545 `_get_and_verify_max_len`; SGLang 0.5.23
    srt/utils/hf_transformers/common.py:677 `get_context_length`.

    Args:
        scaled: model types whose positions are scaled, whatever their rotation says.
        scales_yarn: whether the positions of YaRN are its original ones times its factor, whatever
            the config states.
    """
    if model.max_position_embeddings is None:
        return None
    config = model.config
    text = config.get("text_config") or config
    rotation = text.get("rope_scaling") or text.get("rope_parameters") or {}
    kind = rotation.get("rope_type", rotation.get("type"))
    original = rotation.get("original_max_position_embeddings")
    positions, factor = model.max_position_embeddings, rotation.get("factor") or 1.0
    if scales_yarn and kind == "yarn" and original:
        positions = original
    elif kind in SCALED_POSITIONS or original is not None or model.model_type in scaled:
        factor = 1.0
    derived = int(factor * positions)
    return max(derived, config.get("model_max_length") or 0)


def beyond_positions(served: Served, way_out: str, limit: int | None) -> str:
    """What lies beyond the positions of a model, and `way_out`, for `Start.beyond`."""
    return f"the {limit} positions of {served.model.name}; give {limit} or less, or {way_out}"


def positions_note(served: Served, consequence: str) -> list[str]:
    """What an engine makes of a context beyond the positions that the config states; [] of others.

    Sizes of a family share a config here, and a copy of a model may state more.
    """
    limit = served.model.max_position_embeddings
    if limit is None or served.context <= limit:
        return []
    return [
        f"a context of {served.context} tokens is beyond the {limit} positions of "
        f"{served.model.name}: {consequence}"
    ]


def weights_of(entries: Iterable[Entry]) -> int:
    """Bytes of what is loaded."""
    return sum(entry.num_bytes for entry in entries if entry.part == "weights")


def oversized(served: Served, weights_bytes: int, free_bytes: int) -> str:
    """That weights alone are more than `free_bytes` of a GPU, and what helps; empty where not."""
    if weights_bytes <= free_bytes:
        return ""
    quants = offered_quants(served)
    instead = f"quant {alternatives(quants)}, " if quants else ""
    return (
        f"weights alone take {format_bytes(weights_bytes)}, and {format_bytes(free_bytes)} of the "
        f"GPU are free; give {instead}more GPUs, or a smaller model"
    )


def rotary_bytes(model: ModelSpec, element_bytes: int) -> int:
    """Tables of all kinds of rotation: one, or two where sliding layers have their own.

    Kind: exact; a scaled rotation has more positions than the config states. Source:
    `ROTARY_TABLES`; Llama-3.1-8B logs 14.9889 GiB after loading, 32 MiB more than its weights.
    """
    rotations = {
        (attention.rotary_dim or attention.head_dim, model.rotates_each_kind and window)
        for layer, _ in model.layers()
        for attention in layer.attentions
        if attention.position == "rope"
        for window in [attention.sliding_window is not None]
    }
    positions = model.max_position_embeddings or 0
    return sum(positions * width * element_bytes for width, _ in rotations)


def slot_tensors(
    model: ModelSpec, size: int, rank: int, *, tables: int, element_bytes: int = 2
) -> Iterator[int]:
    """Bytes of A and of B of each matrix in one adapter's slot, on one of `size` ranks.

    A matrix that is divided by columns keeps A whole, one divided by rows B.
    Kind: exact for models without experts; the kernels' indices (48 bytes for each token of a
    step) are left out. Source: `LORA_SLOTS`; lora/layers/vocab_parallel_embedding.py:31,
    logits_processor.py:93.

    Args:
        tables: how often embeddings have slots beside those of the head; 0: neither has.
    """
    width = rank * element_bytes
    outside = (model.vocab_size * width, model.hidden_size * width)
    if any(table.rows for table in model.embeddings[:1]):
        yield from outside * tables
    for layer, count in model.layers():
        for _ in range(count):
            for linear in layer.linears:
                rows = ceil_div(linear.in_features, size if linear.name in ROWS else 1)
                columns = ceil_div(linear.out_features, size if linear.name in COLUMNS else 1)
                yield linear.count * rows * width
                yield linear.count * columns * width
    if tables and model.head is not None:
        yield from outside
