"""Llama 3.2 Vision's text: Llama, between whose layers others read images by cross attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from whichlora.families.blocks import norms, softmax_attention
from whichlora.families.decoder import PRE_NORM, decoder
from whichlora.families.fields import Fields
from whichlora.families.llama import LLAMA
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.layer import Layer, LayerGroup, Norm

_ADDED_ROWS = 8  # of the embedding, for the image's token, which no logit belongs to
_NUM_GATES = 2  # of one number each: of what attention and the MLP add

DEFAULTS: dict[str, dict[str, Any]] = {
    "mllama_text_model": LLAMA
    | {
        "vocab_size": 128256,
        "intermediate_size": 14336,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38],
    }
}
SYNONYMS = {"mllama_text_model": {"attention_dropout": ("dropout",)}}


def _cross_layer(c: Fields, plain: Layer) -> Layer:
    """`MllamaCrossAttentionDecoderLayer`, whose keys and values come from the images."""
    hidden, heads = c.size("hidden_size"), c.size("num_attention_heads")
    kv_heads = c.size("num_key_value_heads", fallback=heads)
    qk_norms = (
        Norm(name="q_norm", kind="rms", width=hidden // heads, rows=heads),
        Norm(name="k_norm", kind="rms", width=hidden // heads, rows=kv_heads),
    )
    attention = softmax_attention(
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        norms=qk_norms,
        position="none",
        causal=False,
        cross=True,
        projection="queries_first",
        adds_mask="weights",
        always_masked=True,
        dropout=c.probability("attention_dropout"),
        flash=False,
    )
    return replace(
        plain,
        attentions=(attention,),
        norms=norms(PRE_NORM, width=hidden, kind="rms"),
        gates_sums=True,
        masks_fed=True,
        other_params=_NUM_GATES,
    )


def _mllama(c: Fields) -> ModelSpec:
    """Rows without images skip the layers of cross attention, which are loaded all the same.

    The embedding has more rows than the head, so that the two are never tied.

    Source: transformers 5.23 `MllamaTextModel.__init__`, `MllamaTextModel.forward`.
    """
    model = decoder(c, returns_wide_logits=True)
    (group,) = model.groups
    crossing = c.indices("cross_attention_layers") & set(range(group.count))
    attention = replace(group.layer.attentions[0], flash=False)
    own = LayerGroup(
        layer=replace(group.layer, attentions=(attention,)), count=group.count - len(crossing)
    )
    crossed = _cross_layer(c, group.layer)
    (table,) = model.embeddings
    skipped = len(crossing) * crossed.num_params
    model = replace(
        model, embeddings=(replace(table, rows=table.rows + _ADDED_ROWS),), head_tied=False
    )
    places = {False: own.layer, True: crossed}
    return replace(
        model,
        groups=(own,),
        for_images=replace(
            model,
            groups=tuple(
                LayerGroup(layer=layer, count=len(positions), positions=positions)
                for is_crossed, layer in places.items()
                if (
                    positions := tuple(
                        place for place in range(group.count) if (place in crossing) == is_crossed
                    )
                )
            ),
            returns_wide_logits=False,  # as of `MllamaForConditionalGeneration.forward`
        ),
        other_params=skipped,
        idle_params=skipped,
        skips_layers=bool(crossing),
        idle_linears=tuple(
            replace(linear, count=len(crossing)) for linear in crossed.linears if crossing
        ),
        notes=(
            *model.notes,
            f"{len(crossing)} of {group.count} layers read images alone: they are loaded, and rows "
            "without images skip them",
        ),
    )


BUILDERS = {"mllama_text_model": _mllama}
