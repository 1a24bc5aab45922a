"""Gemma 3n (text): four hidden states side by side, inputs of every layer, shared keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from whichlora.errors import ConfigError
from whichlora.families.blocks import causal_lm, mlp, norms, softmax_attention
from whichlora.families.decoder import FULL, every_nth_full
from whichlora.families.fields import Fields
from whichlora.families.gemma import GEMMA2, SANDWICH, kv_sharing, layer_input
from whichlora.spec.architecture import Embedding, ModelSpec, Streams
from whichlora.spec.layer import AltUp, Layer, Linear, LowRankResidual, Norm

_FULL_EVERY = 5
_WIDTH = "intermediate_size"
_CLIP = "altup_coef_clip"
_SPARSE_LAYERS = 10  # of a model with more of them, where the config does not say
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3n_text": GEMMA2
    | {
        "vocab_size": 262400,
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "sliding_window": 512,
        "attn_logit_softcapping": None,
        "vocab_size_per_layer_input": 262144,
        "hidden_size_per_layer_input": 256,
        "num_kv_shared_layers": 15,
        "laurel_rank": 64,
        "altup_num_inputs": 4,
        "altup_active_idx": 0,
        _CLIP: 120.0,
        "altup_correct_scale": True,
    }
}


def _altup(c: Fields) -> AltUp:
    hidden, states = c.size("hidden_size"), c.size("altup_num_inputs")
    if c.count("altup_active_idx"):
        raise ConfigError(
            f"{c.name}: altup_active_idx is {c.get('altup_active_idx')}; gemma3n_text is predicted "
            "with 0, as its checkpoints have it"
        )
    clips = c.number_or_none(_CLIP) is not None
    return AltUp(
        num_states=states,
        router=Linear(
            name="modality_router", in_features=hidden, out_features=states, reads="router_in"
        ),
        norm=Norm(name="router_norm", kind="rms_power", width=hidden),
        prediction=Linear(
            name="prediction_coefs",
            in_features=states,
            out_features=states**2,
            reads="predicted_by",
            clamps_weight=clips,
        ),
        correction=Linear(
            name="correction_coefs",
            in_features=states,
            out_features=states,
            reads="corrected_by",
            weight_only=clips,
            clamps_weight=clips,
        ),
        scales=c.flag("altup_correct_scale"),
    )


def _low_rank(c: Fields) -> LowRankResidual:
    hidden, rank = c.size("hidden_size"), c.size("laurel_rank")
    return LowRankResidual(
        down=Linear(name="linear_left", in_features=hidden, out_features=rank, reads="attn_in"),
        up=Linear(name="linear_right", in_features=rank, out_features=hidden, reads="laurel_in"),
        norm=Norm(name="post_laurel_norm", kind="rms_power", width=hidden),
    )


def _layer(c: Fields, kind: str, *, sharing: str, width: int, is_sparse: bool) -> Layer:
    """One block; `sharing` as of `families.gemma.kv_sharing`."""
    hidden, heads = c.size("hidden_size"), c.size("num_attention_heads")
    kv_heads, head_dim = c.size("num_key_value_heads"), c.size("head_dim")
    reuses, bias = sharing == "reuse", c.flag("attention_bias")
    attention = softmax_attention(
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        qkv_bias=bias,
        out_bias=bias,
        cached=not reuses,
        rotary_dim=head_dim,
        sliding_window=None if kind == FULL else c.size("sliding_window"),
        dropout=c.probability("attention_dropout"),
        projection="borrowed" if reuses else "one_after_other",
        keeps_keys=sharing == "store",
    )
    qk_norms = [Norm(name="q_norm", kind="rms_power", width=head_dim, rows=heads)]
    missing = {"k_proj", "v_proj"} if reuses else set()
    if not reuses:
        key: dict[str, Any] = {"kind": "rms_power", "width": head_dim, "rows": kv_heads}
        qk_norms += [Norm(name="k_norm", **key), Norm(name="v_norm", weight=False, **key)]
    fed = mlp(hidden=hidden, width=width, activation=c.text("hidden_activation"))
    return Layer(
        attentions=(
            replace(
                attention,
                linears=tuple(x for x in attention.linears if x.name not in missing),
                norms=tuple(qk_norms),
            ),
        ),
        mlp=replace(fed, names_steps=True, is_sparse=is_sparse),
        norms=norms(SANDWICH, width=hidden, kind="rms_power"),
        layer_input=layer_input(c),
        altup=_altup(c),
        low_rank=_low_rank(c),
    )


def _widths(c: Fields) -> list[int]:
    """Of the MLP of each layer."""
    count, stated = c.layers(), c.get(_WIDTH)
    if not isinstance(stated, list):
        return [c.size(_WIDTH)] * count
    listed = c.items(_WIDTH, length=count) or []
    return [replace(c, values={**c.values, _WIDTH: x}).size(_WIDTH) for x in listed]


def _sparse(c: Fields) -> list[bool]:
    """Whether the MLP of each layer leaves most of its gate out."""
    count = c.layers()
    listed = c.items("activation_sparsity_pattern", length=count)
    if listed is not None:
        return [bool(share) for share in listed]
    first = _SPARSE_LAYERS if count > _SPARSE_LAYERS else 0
    return [number < first for number in range(count)]


def _around(c: Fields, name: str) -> tuple[Linear, ...]:
    """A projection for each state but the first."""
    hidden, further = c.size("hidden_size"), c.size("altup_num_inputs") - 1
    quantises_last = not c.flag("tie_word_embeddings")
    return tuple(
        Linear(
            name=f"{name}.{number}",
            in_features=hidden,
            out_features=hidden,
            reads="embedding" if name == "altup_projections" else f"state {number}",
            # `get_keys_to_not_convert` leaves out what comes last, which a tied head does not
            quantisable=quantises_last or name == "altup_projections" or number + 1 < further,
        )
        for number in range(further)
    )


def _gemma3n(c: Fields) -> ModelSpec:
    hidden, count, packed = c.size("hidden_size"), c.layers(), 0
    packed = count * c.size("hidden_size_per_layer_input")
    types = every_nth_full(c, _FULL_EVERY)
    sharing = kv_sharing(c, types)
    layers = [
        _layer(c, kind, sharing=mode, width=width, is_sparse=is_sparse)
        for kind, mode, width, is_sparse in zip(types, sharing, _widths(c), _sparse(c), strict=True)
    ]
    return causal_lm(
        c,
        layers,
        final_norms=norms(("norm",), width=hidden, kind="rms_power"),
        embeddings=(
            Embedding(name="embed_tokens", rows=c.size("vocab_size"), width=hidden),
            Embedding(
                name="embed_tokens_per_layer",
                rows=c.size("vocab_size_per_layer_input"),
                width=packed,
            ),
        ),
        layer_input_norm=Norm(
            name="per_layer_projection_norm",
            kind="rms_power",
            width=c.size("hidden_size_per_layer_input"),
            rows=count,
        ),
        head_linears=(
            Linear(
                name="per_layer_model_projection",
                in_features=hidden,
                out_features=packed,
                reads="embedding",
            ),
        ),
        streams=Streams(
            expanding=_around(c, "altup_projections"),
            merging=_around(c, "altup_unembed_projections"),
        ),
        rotates_each_kind=True,
        logit_softcap=c.number_or_none("final_logit_softcapping"),
    )


BUILDERS = {"gemma3n_text": _gemma3n}
