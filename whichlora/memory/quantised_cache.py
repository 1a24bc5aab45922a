"""Decoding with transformers' quantised cache: what is stored, and what each step takes besides.

A step expands one layer's keys and values after the other, joins them with the new token's, and
gives them to the attention. New tokens gather in full width; when there are `residual_length` of
them, all tokens are quantised anew. See `docs/kv_cache.md`.
"""

from __future__ import annotations

from dataclasses import replace

from whichlora.errors import ConfigError
from whichlora.memory.entries import Entry, Fact
from whichlora.memory.kv_cache import cache_bytes, stored_bytes
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.layer import Attention
from whichlora.spec.numeric import Count
from whichlora.spec.run import CacheFormat
from whichlora.symbolic.cache import quantising_points
from whichlora.symbolic.linear_form import most


def check_quantisable(model: ModelSpec, stored: CacheFormat) -> None:
    """Refuse what the library refuses.

    Raises:
        ConfigError: layers that don't keep every token, or groups that don't fit the heads.
    """
    attentions = [attention for layer, _ in model.layers() for attention in layer.attentions]
    if model.task != "causal-lm":
        raise ConfigError(
            f"kv_cache: quantized is for decoders only, {model.name} is none; use dynamic"
        )
    if any(
        attention.sliding_window is not None or attention.kind != "softmax"
        for attention in attentions
    ):
        raise ConfigError(
            f"kv_cache: quantized needs full attention in every layer, {model.name} has sliding "
            "windows or recurrent layers; use dynamic or static"
        )
    if model.chooses_keys:
        raise ConfigError(
            f"kv_cache: quantized is not predicted for {model.name}, whose indexers keep keys of "
            "their own; use dynamic or static"
        )
    for attention in attentions:
        half = attention.cache_elements // 2
        if stored.group_size is not None and half % stored.group_size:
            raise ConfigError(
                f"cache_group_size: {stored.group_size} does not divide the {half} elements per "
                f"token of a layer's keys in {model.name}; give a divisor of it"
            )


QUANTISED_CACHE = Fact(
    part="kv_cache",
    what="key-value cache, quantised",
    shape="[batch_size, num_key_value_heads, tokens, head_dim]",
    dtype="cache_nbits, with a scale and a zero per cache_group_size elements",
    count="2 x num_hidden_layers",
    why="decoding reads keys and values of every earlier token",
    source="transformers QuantizedLayer.update; optimum-quanto, hqq; docs/kv_cache.md",
)


def stored_by_earlier_layers(
    model: ModelSpec, stored: CacheFormat, *, batch_size: Count, tokens: Count, element_bytes: int
) -> Count:
    """The prompt's cache while the last layer makes its own. Kind: exact.

    Source: transformers 5.23 `QuantizedLayer.update`.
    """
    # the first `update` quantises, and returns `key_states` to the attention as they are
    every = _stored(model, stored, batch_size * tokens, element_bytes)
    of_one = batch_size * tokens * _widest(model).cache_elements
    return every - stored_bytes(of_one, stored, element_bytes)


FRESH_CACHE = Fact(
    part="kv_cache",
    what="keys and values of the newest tokens",
    shape="[batch_size, num_key_value_heads, up to cache_residual_length, head_dim]",
    dtype="compute_bytes",
    count="2 x num_hidden_layers",
    why="they gather in full width until cache_residual_length of them are quantised",
    source="transformers QuantizedLayer.update",
)


EXPANDED = Fact(
    part="temporary",
    what="one layer's keys and values, expanded and joined with the new ones",
    shape="[batch_size, num_key_value_heads, tokens, head_dim]",
    dtype="compute_bytes",
    count="4",
    why="the expanded ones keep their names while those that attention reads are put together",
    source="transformers QuantizedLayer.update, Fp8QuantizedLayer.update",
)


QUANTISING = Fact(
    part="temporary",
    what="steps of quantising one layer's values",
    shape="[batch_size, num_key_value_heads, tokens, head_dim]",
    dtype="compute_bytes; for hqq fp32 and fp16",
    count="3, or 11 for hqq",
    why="cache_residual_length tokens are new: the whole cache is quantised again",
    source="optimum-quanto quantize_affine, pack_weights; hqq Quantizer.quantize",
)


def decode_moments(
    model: ModelSpec,
    dtypes: Dtypes,
    stored: CacheFormat,
    *,
    batch_size: Count,
    prompt_len: Count,
    max_new_tokens: Count,
) -> dict[str, tuple[Entry, ...]]:
    """The cache's part of the last step, and of the last step that quantises all tokens anew.

    The second is worst in the first layer, while the others hold their new tokens in full width.
    Kind: exact. Source: transformers 5.23 `QuantizedLayer.update`, `Fp8QuantizedLayer.update`.
    """
    steps = max_new_tokens - 1  # the first token comes from the prompt pass
    of_token = batch_size * _widest(model).cache_elements  # elements of one layer
    if not stored.residual_length:
        tokens = prompt_len + steps
        size = dtypes.compute_bytes
        # `Fp8QuantizedLayer.update` names the codes before they are joined until it returns; then
        # the keys, and of the values `quant_tensor.float()` and its product with the scale
        joining = of_token * (tokens - 1) + of_token // 2 * tokens * (size + 8)
        return {
            "decode": (
                Entry(QUANTISED_CACHE, _stored(model, stored, batch_size * tokens, size)),
                Entry(EXPANDED, joining * (steps > 0)),
            )
        }
    length = stored.residual_length
    fresh = steps % length
    quantised = prompt_len + steps // length * length
    sizes = {"batch_size": batch_size, "of_token": of_token, "quantised": quantised}
    return {
        "decode": _last_step(model, dtypes, stored, fresh=fresh, **sizes),
        "renewal": _renewal(model, dtypes, stored, is_made=steps >= length, **sizes),
    }


def _last_step(
    model: ModelSpec,
    dtypes: Dtypes,
    stored: CacheFormat,
    *,
    batch_size: Count,
    of_token: Count,
    quantised: Count,
    fresh: Count,
) -> tuple[Entry, ...]:
    """Of `fresh` tokens in full width after `quantised` ones."""
    size = dtypes.compute_bytes
    # Expanded, then joined with what is new; the values' new tokens are joined to a second copy.
    # `dequant_keys` and `dequant_values` are names until `QuantizedLayer.update` returns
    expanded = size * (of_token * (2 * quantised + fresh) + of_token // 2 * (fresh - 1))
    return (
        Entry(QUANTISED_CACHE, _stored(model, stored, batch_size * quantised, size)),
        Entry(FRESH_CACHE, _layers_token(model, batch_size, size) * fresh),
        Entry(EXPANDED, expanded * (fresh > 0)),
    )


def _renewal(
    model: ModelSpec,
    dtypes: Dtypes,
    stored: CacheFormat,
    *,
    batch_size: Count,
    of_token: Count,
    quantised: Count,
    is_made: Count,
) -> tuple[Entry, ...]:
    """Of the last step that quantises all tokens anew, in the first layer, if one `is_made`."""
    size, length = dtypes.compute_bytes, stored.residual_length
    assert length is not None
    before = quantised - length
    # `_quantized_keys` is set anew before the values are quantised, `self.keys` and `self.values`
    # are emptied after both; the expanded and the joined ones keep their names all the while
    points = quantising_points(
        _widest(model).cache_elements // 2, size, replace(dtypes, stores=stored)
    )
    quantising = most(points, tokens=batch_size * quantised, span=quantised, r=0)
    for sign, tokens in ((1, quantised), (-1, before)):  # the keys are stored anew already
        quantising = quantising + sign * stored_bytes(of_token // 2 * tokens, stored, size)
    fresh = _layers_token(model, batch_size, size) * (length - 1)
    return (
        Entry(QUANTISED_CACHE, _stored(model, stored, batch_size * before * is_made, size)),
        Entry(FRESH_CACHE, fresh * is_made),
        Entry(EXPANDED, size * of_token * (2 * before + length) * is_made),
        Entry(QUANTISING, quantising * is_made),
    )


def _layers_token(model: ModelSpec, batch_size: Count, element_bytes: int) -> Count:
    """Keys and values of one token of each sequence in all layers, in full width."""
    elements = sum(
        count * attention.cache_elements
        for layer, count in model.layers()
        for attention in layer.attentions
    )
    return element_bytes * batch_size * elements


def _stored(model: ModelSpec, stored: CacheFormat, tokens: Count, element_bytes: int) -> Count:
    return cache_bytes(
        model,
        batch_size=tokens,
        tokens=1,
        kv_cache="quantized",
        element_bytes=element_bytes,
        stored=stored,
    )


def _widest(model: ModelSpec) -> Attention:
    attentions = (attention for layer, _ in model.layers() for attention in layer.attentions)
    return max(attentions, key=lambda attention: attention.cache_elements)
