"""One module per architecture family: a Hugging Face config in, its blocks and tensors out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from whichlora.errors import ConfigError
from whichlora.families import (
    alibi,
    bart,
    bert,
    dbrx,
    deepseek,
    encoders,
    gemma,
    gemma3n,
    gpt,
    jamba,
    labels,
    layernorm,
    led,
    lfm2,
    llama,
    llama4,
    longt5,
    mamba,
    mixtures,
    mllama,
    moe,
    opt,
    qwen_hybrid,
    seq2seq,
    switch_transformers,
    t5gemma,
    whisper,
)
from whichlora.families.experts import with_adapter_ranks
from whichlora.families.fields import Fields
from whichlora.families.multimodal import TOWERS, build_multimodal
from whichlora.families.releases import with_older_releases
from whichlora.spec.architecture import ModelSpec, Pooling
from whichlora.spec.layer import Linear

_MODULES = (
    llama,
    llama4,
    mllama,
    layernorm,
    moe,
    mixtures,
    mamba,
    jamba,
    deepseek,
    gemma,
    gemma3n,
    qwen_hybrid,
    lfm2,
    gpt,
    opt,
    alibi,
    dbrx,
    seq2seq,
    longt5,
    switch_transformers,
    bart,
    led,
    bert,
    encoders,
    t5gemma,
    whisper,
)
_DEFAULTS: dict[str, Mapping[str, Any]] = {
    key: value for module in _MODULES for key, value in module.DEFAULTS.items()
}
_SYNONYMS: dict[str, Mapping[str, tuple[str, ...]]] = {
    key: value for module in _MODULES for key, value in getattr(module, "SYNONYMS", {}).items()
}
_DROPOUT_MODULES: dict[str, tuple[str, ...]] = {
    key: value
    for module in _MODULES
    for key, value in getattr(module, "DROPOUT_MODULES", {}).items()
}
_LABEL_HEADS: dict[str, Callable[[Fields, ModelSpec], labels.LabelHeads]] = {
    key: value for module in _MODULES for key, value in getattr(module, "LABEL_HEADS", {}).items()
}
FAMILIES: dict[str, Callable[[Fields], ModelSpec]] = {
    key: value for module in _MODULES for key, value in module.BUILDERS.items()
}


def known_types() -> tuple[str, ...]:
    """Every `model_type` that `build` accepts."""
    return tuple(sorted({*FAMILIES, *TOWERS}))


# Types whose config or attention in transformers 5.23 refuses heads that do not divide the hidden
# size, whatever head_dim is; others cut the hidden size, and some projections are narrower.
_HEADS_DIVIDE_HIDDEN = {
    *("arcee", "bert", "biogpt", "bloom", "camembert", "codegen"),
    *("cwm", "data2vec-text", "deberta-v2", "deepseek_v2", "distilbert", "ernie"),
    *("eurobert", "falcon", "gemma2", "gemma3_text", "gemma3n_text", "gpt2"),
    *("gpt_bigcode", "gpt_neox", "gptj", "hyperclovax", "internlm3", "iquestcoder"),
    *("jais2", "layoutlm", "llama", "megatron-bert", "minicpm3", "modernbert"),
    *("mpnet", "opt", "persimmon", "qwen2_5_vl_text", "qwen2_vl_text", "rembert"),
    *("roberta", "roberta-prelayernorm", "stablelm", "vaultgemma", "xlm-roberta", "xlm-roberta-xl"),
}


def build(config: Mapping[str, Any], *, name: str) -> ModelSpec:
    """The architecture that `config`, the content of a `config.json`, describes.

    Args:
        config: as on the hub; a missing key means what its transformers class takes it to mean.
        name: hub id or path, for the spec and for messages.

    Raises:
        ConfigError: an unknown `model_type`, a size that is missing or no whole number, or sizes
            that transformers refuses.
    """
    return with_adapter_ranks(_described(config, name=name))


def _described(config: Mapping[str, Any], *, name: str) -> ModelSpec:
    """`build` before PEFT's own ranks, which it looks up by the outer type."""
    model_type = str(config.get("model_type"))
    if model_type in TOWERS:
        whole = Fields(name=name, values=config, defaults={}, synonyms={})
        return build_multimodal(whole, partial(_described, name=name), TOWERS[model_type])
    if model_type not in FAMILIES:
        raise ConfigError(
            f"{name}: model_type {config.get('model_type')!r} is not known to the formulas; "
            "'whichlora estimate' traces its real code on one GPU, where neither serving nor "
            "--engine is given"
        )
    fields = Fields(
        name=name,
        values=config,
        defaults=_DEFAULTS[model_type],
        synonyms=_SYNONYMS.get(model_type, {}),
    )
    model = FAMILIES[model_type](fields)
    if model_type in _HEADS_DIVIDE_HIDDEN:
        hidden, num_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
        if hidden % num_heads:
            raise ConfigError(
                f"{name}: hidden_size {hidden} is not a multiple of num_attention_heads "
                f"{num_heads}, which transformers refuses of {model_type}; correct one of them"
            )
    if model_type in _LABEL_HEADS:
        heads = _LABEL_HEADS[model_type](fields, model)
    else:
        heads = labels.of_decoder(model)
    return with_older_releases(replace(model, label_heads=heads))


def without_dropout(model: ModelSpec) -> ModelSpec:
    """`model` whose `nn.Dropout` modules drop nothing, which then return what they are given.

    Source: TRL 1.16 `disable_dropout_in_model`; torch 2.13 `_dropout_impl`.
    """
    off = dict.fromkeys(_DROPOUT_MODULES.get(model.model_type, ()), 0.0)
    if not off:
        return model
    quiet = build({**model.config, **off}, name=model.name)
    return replace(model, groups=quiet.groups, embedding_dropouts=quiet.embedding_dropouts)


def with_label_head(model: ModelSpec, task: str, *, num_labels: int) -> ModelSpec:
    """`model` as its class for `task` is built, without the vocabulary's head.

    Raises:
        ConfigError: transformers has no such class, or it is not described.
    """
    head = dict(model.label_heads).get(task)
    if head is None:
        known = ", ".join(name for name, _ in model.label_heads)
        hint = f"known of it are {known}" if known else "no other task is, so leave task out"
        raise ConfigError(f"task: {task} of {model.model_type} is not predicted; {hint}")
    projection = replace(head.projection, out_features=num_labels)
    return replace(
        model,
        head=None,
        head_tied=False,
        masked_head=None,
        label_head=replace(head, projection=projection),
        logit_softcap=None,
        scales_logits=False,
        biases_logits=False,
    )


def with_pooling(model: ModelSpec, pooling: Pooling) -> ModelSpec:
    """`model` as `AutoModel` builds it, whose last hidden states are pooled in place of a head.

    The pooler of its own class runs, and nobody reads what it returns: it gets no gradient.

    Raises:
        ConfigError: it has two stacks, of which sentence-transformers takes the encoder alone.
    """
    if model.task == "seq2seq-lm":
        raise ConfigError(
            f"task: embedding of {model.model_type} is not predicted: sentence-transformers takes "
            "its encoder alone"
        )
    own = 0 if model.masked_head is None else model.masked_head.lost_params
    before = dict(model.label_heads).get(labels.SEQUENCES)
    named = None if before is None else before.transform
    pooler = Linear(
        name=named.linear.name if named is not None and named.in_model else "dense",
        in_features=model.hidden_size,
        out_features=model.hidden_size,
        reads="first_token",
        bias=True,
    )
    return replace(
        model,
        head=None,
        head_tied=False,
        masked_head=None,
        label_head=None,
        pooling=pooling,
        idle_linears=(*model.idle_linears, *((pooler,) if own else ())),
        idle_params=model.idle_params + own,
        logit_softcap=None,
        scales_logits=False,
        scales_head_input=False,
        biases_logits=False,
    )


def writes_transcripts(config: Mapping[str, Any]) -> bool:
    """Whether the model of a `config.json` learns from clips of sound with their transcripts."""
    if config.get("model_type") not in known_types():
        return False
    tower = build(config, name="model").tower
    return tower is not None and tower.transcribes


__all__ = [
    "FAMILIES",
    "Fields",
    "build",
    "known_types",
    "with_label_head",
    "with_pooling",
    "without_dropout",
    "writes_transcripts",
]
