"""Bytes of the base weights as they are stored."""

from __future__ import annotations

from functools import lru_cache

from whichlora.errors import ConfigError
from whichlora.memory.entries import Entry, Fact
from whichlora.memory.mxfp4 import packed_parts
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.dtypes import BNB_BLOCK, Dtypes, is_quantised, quantises_head
from whichlora.spec.float_blocks import FLOAT_BLOCKS
from whichlora.spec.layer import Linear
from whichlora.spec.numeric import Count, ceil_div
from whichlora.spec.run import CHECKPOINT_QUANTS, FOUR_BIT_BNB

NESTED_BLOCK = 256  # scales that share one second-level scale
CODE_TABLE_BYTES = 2560  # per 4-bit matrix: code table, offset, nested code table


def quantised_bytes(
    num_weights: int,
    quant: str,
    *,
    out_features: int,
    group_size: int = 128,
    scale_block: int = 0,
) -> int:
    """Bytes of one matrix of `num_weights` values, stored as `quant`.

    Args:
        group_size: weights that share a scale in GPTQ and AWQ.
        scale_block: edge of the squares that share one in 8-bit floats; 0: each row has one.

    Kind: exact; for GPTQ and AWQ where groups divide the rows.
    Source: `quantised_parts`.

    Raises:
        ConfigError: an unknown format.
    """
    return sum(
        quantised_parts(
            num_weights,
            quant,
            out_features=out_features,
            group_size=group_size,
            scale_block=scale_block,
        )
    )


@lru_cache(maxsize=1024)  # layers and candidates share their shapes
def quantised_parts(
    num_weights: int,
    quant: str,
    *,
    out_features: int,
    group_size: int = 128,
    scale_block: int = 0,
) -> tuple[int, ...]:
    """Bytes of each tensor that stores one matrix: codes, then scales and tables.

    Args: as of `quantised_bytes`.

    Kind: exact; for GPTQ and AWQ where groups divide the rows.
    Source: Dettmers et al. 2023, arXiv:2305.14314, section 3; bitsandbytes 0.50.2
    `functional.quantize_4bit`; AutoGPTQ and AutoAWQ packed layouts; compressed-tensors'
    FP8 of channels and packed 4-bit integers, vLLM 0.33.0 schemes/compressed_tensors_w8a8_fp8.py,
    compressed_tensors_wNa16.py:99; FP8 in blocks, quantization/utils/fp8_utils.py
    `create_fp8_scale_parameter`.

    Raises:
        ConfigError: an unknown format.
    """
    if quant in FOUR_BIT_BNB:
        code_bytes: int = ceil_div(num_weights, 2)  # two 4-bit codes per byte
        num_scales = ceil_div(num_weights, BNB_BLOCK)
        if quant == "nf4-dq":
            # 8-bit scale, and one fp32 per 256 scales: 8/64 + 32/(64*256) = 0.127 bit per weight
            return code_bytes, num_scales, 4 * ceil_div(num_scales, NESTED_BLOCK), CODE_TABLE_BYTES
        # fp32 scale: 32/64 = 0.5 bit per weight
        return code_bytes, 4 * num_scales, CODE_TABLE_BYTES
    if quant == "fp8" and scale_block:  # `weight_scale_inv`, fp32
        columns = ceil_div(num_weights // out_features, scale_block)
        return num_weights, 4 * ceil_div(out_features, scale_block) * columns
    if quant in ("int8", "fp8"):  # one fp32 scale per row: `Int8Params.SCB`, `weight_scale`
        return num_weights, 4 * out_features
    if quant == "w4a16":  # symmetric, so that no zeros are stored: codes, and 16-bit scales
        return ceil_div(num_weights, 2), 2 * ceil_div(num_weights, group_size)
    if quant in CHECKPOINT_QUANTS:
        groups: int = ceil_div(num_weights, group_size)
        bits = 8 if quant == "gptq-int8" else 4
        packed: int = ceil_div(bits * (num_weights + groups), 8)  # codes, and a zero per group
        return packed, 2 * groups  # fp16 scale
    if quant == "mxfp4":
        return packed_parts(num_weights)
    if quant in FLOAT_BLOCKS:
        return FLOAT_BLOCKS[quant].parts(num_weights)
    raise ConfigError(f"quant: {quant!r} has no storage formula")


def linear_bytes(linear: Linear, dtypes: Dtypes) -> int:
    """One layer's matrices called `linear.name`, biases included.

    Kind: exact. Source: `quantised_bytes`; else the dtype of the base; transformers 5.23
    `Mxfp4GptOssExperts`, whose biases are fp32.
    """
    quantised = is_quantised(linear, dtypes)
    bias_width = 4 if quantised and dtypes.wide_expert_biases else dtypes.base_bytes
    bias_bytes = linear.count * linear.out_features * bias_width if linear.bias else 0
    if not quantised:
        return linear.num_weights * dtypes.base_bytes + bias_bytes
    matrices, rows, num_weights = quantised_matrices(linear)
    matrix_bytes = quantised_bytes(
        num_weights,
        dtypes.quant,
        out_features=rows,
        group_size=dtypes.quant_group_size,
        scale_block=dtypes.scale_block,
    )
    return matrices * matrix_bytes + bias_bytes


def quantised_matrices(linear: Linear) -> tuple[int, int, int]:
    """How many tensors `linear` is quantised as, with rows and weights of each.

    Kind: exact. Source: bitsandbytes 0.50.2: a module's weight, or a parameter of all experts.
    """
    rows, num_weights = linear.out_features, linear.in_features * linear.out_features
    if linear.is_module:
        return linear.count, rows, num_weights
    return 1, linear.count * rows, linear.count * num_weights


def quantised_state_bytes(model: ModelSpec, dtypes: Dtypes, *, codes: bool) -> int:
    """Scales and tables of all quantised matrices, which are no parameters, and their codes.

    Kind: exact. Source: `quantised_parts`; bitsandbytes 0.50.2 `QuantState`.
    """
    total = 0
    for group in model.groups:
        for linear in group.layer.linears:
            if is_quantised(linear, dtypes):
                matrices, rows, num_weights = quantised_matrices(linear)
                parts = quantised_parts(
                    num_weights,
                    dtypes.quant,
                    out_features=rows,
                    group_size=dtypes.quant_group_size,
                    scale_block=dtypes.scale_block,
                )
                number = matrices * (1 if group.shared else group.count)
                total += number * sum(parts if codes else parts[1:])
    return total


def masked_head_params(model: ModelSpec) -> int:
    """What an encoder gains when it is loaded to fill masked words, less the pooler it loses.

    A matrix, a norm and one bias per word; the projection to the words unless it is tied.
    Source: transformers 5.23 `BertOnlyMLMHead`, `RobertaLMHead`, `EuroBertForMaskedLM`.

    Kind: exact.
    """
    head = model.masked_head
    if head is None:
        return 0
    transform = sum(module.num_params for module in (head.linear, head.norm) if module is not None)
    words = model.vocab_size * (head.bias + (0 if head.tied else head.width))
    return transform + words - head.lost_params


LAYER_WEIGHTS = Fact(
    part="weights",
    what="weights of the layers",
    shape="[out_features, in_features] of every matrix",
    dtype="quant",
    count="num_hidden_layers",
    why="loaded; frozen or trained, they stay to the end",
    source="config.json; memory.weights.linear_bytes",
)


EMBEDDING_WEIGHTS = Fact(
    part="weights",
    what="embeddings and head",
    shape="[vocab_size, hidden_size]",
    dtype="embedding_bytes",
    count="1 or 2",
    why="loaded; never quantised, and one tensor where they are tied",
    source="config.json; transformers get_keys_to_not_convert",
)


HEAD_WEIGHTS = Fact(
    part="weights",
    what="quantised head",
    shape="[vocab_size, hidden_size]",
    dtype="quant",
    why="loaded, and quantised as every other matrix is",
    source="config.json; lightning BitsandbytesPrecision; memory.weights.linear_bytes",
)


OTHER_WEIGHTS = Fact(
    part="weights",
    what="other weights",
    shape="norms after the layers, poolers, towers",
    dtype="base_bytes",
    why="loaded, outside of the layers",
    source="config.json",
)


BUFFERS = Fact(
    part="weights",
    what="buffers",
    shape="[max_position_embeddings, head_dim]",
    dtype="compute_bytes",
    why="registered by modules: causal masks, rotary tables of older versions",
    source="transformers modeling_*.register_buffer",
)


WEIGHTS = {
    "layers": LAYER_WEIGHTS,
    "embeddings": EMBEDDING_WEIGHTS,
    "head": HEAD_WEIGHTS,
    "other": OTHER_WEIGHTS,
    "buffers": BUFFERS,
}


def weight_bytes(model: ModelSpec, dtypes: Dtypes) -> dict[str, int]:
    """Bytes of what loading leaves: "layers", "embeddings" (with the head), "other", "buffers".

    Of a quantised head there is "head", too.

    Kind: exact. transformers leaves the output head as it is, which is counted once with the
    embedding where they are tied.
    Source: transformers 5.23 `get_keys_to_not_convert`.
    """
    layers = 0
    for group in model.groups:
        layer = group.layer
        linears = layer.linears
        in_linears = sum(linear.num_params for linear in linears)
        layer_weights = sum(linear_bytes(linear, dtypes) for linear in linears)
        layer_weights += (layer.num_params - in_linears) * dtypes.base_bytes
        layers += layer_weights * (1 if group.shared else group.count)
    layers += unconverted_bytes(model, dtypes)
    embeddings = sum(embedding.num_params for embedding in model.embeddings)
    in_head = 0
    if model.head is not None:
        in_head = model.head.num_params - model.head_tied * model.head.num_weights
        embeddings += in_head
    of_head = {"embeddings": in_head * dtypes.head_bytes}
    if model.head is not None and quantises_head(model.head, dtypes):
        of_head = {"head": linear_bytes(model.head, dtypes), "embeddings": 0}
    remaining = model.loaded_params - embeddings - sum(group.num_params for group in model.groups)
    remaining += masked_head_params(model)
    outer = model.outer_linears + model.idle_linears
    remaining -= sum(linear.num_params for linear in outer)
    around = sum(linear_bytes(linear, dtypes) for linear in outer)
    tables = sum(
        embedding.num_elements for embedding in model.embeddings if embedding.kind == "buffer"
    )
    # `final_logits_bias` of `BartForConditionalGeneration`
    logit_bias = model.vocab_size if model.biases_logits else 0
    return {
        "layers": layers,
        **of_head,
        "embeddings": (embeddings - in_head) * dtypes.embedding_bytes + of_head["embeddings"],
        "other": remaining * dtypes.base_bytes + around,
        "buffers": model.buffer_bytes
        + older_buffer_bytes(model, dtypes)
        + (tables + logit_bias) * dtypes.compute_bytes
        + rotary_table_bytes(model, dtypes),
    }


def hosted_bytes(model: ModelSpec, dtypes: Dtypes, names: frozenset[str]) -> int:
    """The token table and the head, where `names` has them; of one weight, where it has both.

    Kind: exact. Source: as of `weight_bytes`.
    """
    table, head = model.embeddings[0], model.head
    size = table.num_params * dtypes.embedding_bytes
    if head is None or not model.head_tied:
        of_head = 0 if head is None else head.num_weights * dtypes.head_bytes
        return size * (table.name in names) + of_head * (head is not None and head.name in names)
    return size * ({table.name, head.name} <= names)


def weight_entries(model: ModelSpec, dtypes: Dtypes, *, like: Count) -> list[Entry]:
    """What loading leaves, in the shape of `like` where that is an array."""
    stored = weight_bytes(model, dtypes)
    return [Entry(WEIGHTS[name], size + 0 * like) for name, size in stored.items()]


def unconverted(model: ModelSpec, dtypes: Dtypes) -> Linear | None:
    """The matrix in the last layer that is left as it is while all others are quantised.

    transformers converts neither the head nor the module of the last parameter. A norm comes last
    otherwise; OLMo's has no weight, so that with a tied head it is the last layer's projection.
    Kind: exact. Source: transformers 5.23 `get_keys_to_not_convert`.
    """
    layer = model.groups[-1].layer
    last = layer.linears[-1]
    ends_in_layer = model.head is not None and model.head_tied and not model.head.bias
    if not ends_in_layer or any(norm.num_params for norm in (*model.final_norms, *layer.norms)):
        return None
    return last if is_quantised(last, dtypes) else None


def unconverted_bytes(model: ModelSpec, dtypes: Dtypes) -> int:
    """What the `unconverted` matrix takes beyond its quantised bytes.

    Kind: exact. Source: `unconverted`.
    """
    last = unconverted(model, dtypes)
    if last is None:
        return 0
    return last.num_weights * dtypes.base_bytes - (
        linear_bytes(last, dtypes) - last.bias * last.count * last.out_features * dtypes.base_bytes
    )


def unconverted_copy_bytes(model: ModelSpec, dtypes: Dtypes) -> int:
    """Autocast's copy of the `unconverted` matrix of an fp32 base, which backward reads.

    Kind: exact. Source: torch 2.13 `autocast_mode.cpp`, `cached_cast`.
    """
    last = unconverted(model, dtypes)
    if last is None or not dtypes.under_autocast or dtypes.base_bytes == dtypes.compute_bytes:
        return 0
    return last.num_weights * dtypes.compute_bytes


def older_buffer_bytes(model: ModelSpec, dtypes: Dtypes) -> int:
    """What modules of older releases keep, too: causal masks, tables of another type.

    Kind: exact. Source: `register_buffer` in the modeling files of transformers 4.38 to 5.2.
    """
    older = dtypes.libraries.older
    return sum(size for until, size in model.older_buffers if older("transformers", until))


def rotary_table_bytes(model: ModelSpec, dtypes: Dtypes) -> int:
    """Cosines and sines of every position, a pair of tables in each attention of old versions.

    Kind: exact. Source: transformers 4.38 `Qwen2RotaryEmbedding._set_cos_sin_cache`; unsloth 2024.8
    models/llama.py `LlamaRotaryEmbedding`.
    """
    positions = model.max_position_embeddings or 0
    most = dtypes.kernels.rope_positions
    if most is not None:
        positions = min(positions, most)
    elif not dtypes.libraries.older("transformers", model.rotary_tables_before):
        return 0
    rotated = sum(
        count * attention.rotary_dim
        for layer, count in model.layers()
        for attention in layer.attentions
        if attention.position == "rope"
    )
    return 2 * dtypes.compute_bytes * positions * rotated
