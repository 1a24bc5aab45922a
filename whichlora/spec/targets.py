"""Which matrices of a model get an adapter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from whichlora.errors import ConfigError
from whichlora.spec.architecture import Layer, Linear, ModelSpec
from whichlora.spec.run import ALL_LINEAR, ATTENTION, DEFAULT_TARGETS

# What PEFT adapts of each type of model where nobody names layers.
# Source: peft 0.21.2 `TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING`, utils/constants.py.
_DEFAULTS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("t5", "mt5"), ("q", "v")),
    **dict.fromkeys(("bart", "opt", "gptj", "gpt_neo", "llama", "llama4"), ("q_proj", "v_proj")),
    **dict.fromkeys(("mistral", "mixtral", "stablelm", "gemma", "gemma2"), ("q_proj", "v_proj")),
    **dict.fromkeys(("gemma3_text", "qwen2", "qwen3"), ("q_proj", "v_proj")),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), ("c_attn",)),
    **dict.fromkeys(("bloom", "gpt_neox", "chatglm", "falcon"), ("query_key_value",)),
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "electra"), ("query", "value")),
    "deberta-v2": ("query_proj", "value_proj"),
    "mpt": ("Wqkv",),
    "phi": ("q_proj", "v_proj", "fc1", "fc2"),
    "nemotron_h": ("q_proj", "k_proj", "v_proj", "o_proj"),
}


def all_linears(model: ModelSpec) -> Iterator[Linear]:
    """The matrices of each distinct layer."""
    return (linear for layer, _ in model.layers() for linear in layer.linears)


def tower_linears(model: ModelSpec) -> tuple[Linear, ...]:
    """The matrices that images pass, `count` of each; none where no image does."""
    return () if model.tower is None else model.tower.linears


def resolve_targets(
    model: ModelSpec, target_modules: tuple[str, ...], *, modules_only: bool = False
) -> tuple[str, ...]:
    """Leaf names that `target_modules` means for `model`, sorted.

    "all-linear" is every matrix that PEFT adapts, the output head left out; "attention" is the
    projections of the attention blocks; "default" is what PEFT adapts where nobody names any.

    Args:
        modules_only: bare parameters, such as those of experts, can get no adapter.

    Raises:
        ConfigError: a name that no layer of the model has, or nothing to adapt.
    """
    adaptable = [
        linear
        for linear in (*all_linears(model), *model.outer_linears, *tower_linears(model))
        if linear.rank_multiple
    ]
    bare = {linear.name for linear in adaptable if modules_only and not linear.is_module}
    candidates = {linear.name for linear in adaptable} - bare
    if not candidates:
        raise ConfigError(
            f"target_modules: {model.name} has no linear layer that can be adapted; use method full"
        )
    names: set[str] = set()
    for target in target_modules:
        if target == DEFAULT_TARGETS:
            names |= set(_defaults_of(model))
        elif target == ALL_LINEAR:
            names |= candidates
        elif target == ATTENTION:
            names |= {
                linear.name
                for layer, _ in model.layers()
                for attention in layer.attentions
                for linear in attention.linears
                if linear.rank_multiple
            }
        elif target in candidates:
            names.add(target)
        elif target in _outside(model):
            raise ConfigError(
                f"target_modules: an adapter of {target!r} is not predicted; leave it out, or "
                "train it as a whole with modules_to_save"
            )
        else:
            raise ConfigError(
                f"target_modules: {target!r} is no linear layer of {model.name}; accepted are "
                f"{', '.join(sorted(candidates))}, all-linear, attention and default"
            )
    return tuple(sorted(names))


def _defaults_of(model: ModelSpec) -> tuple[str, ...]:
    if model.model_type not in _DEFAULTS:
        raise ConfigError(
            f"target_modules: PEFT has no default for models of type {model.model_type}; name "
            "layers, or give all-linear"
        )
    return _DEFAULTS[model.model_type]


def _outside(model: ModelSpec) -> tuple[str, ...]:
    """The token embedding and the head, which lie outside the layers."""
    head = () if model.head is None else (model.head.name,)
    return (model.embeddings[0].name, *head)


def check_saved_modules(model: ModelSpec, modules_to_save: tuple[str, ...]) -> None:
    """Whether `model` has every module that is to be trained as a whole.

    Raises:
        ConfigError: a name that is neither the token embedding nor the head.
    """
    accepted = _outside(model)
    for name in modules_to_save:
        if name not in accepted:
            raise ConfigError(
                f"modules_to_save: {name!r} is neither the token embedding nor the head of "
                f"{model.name}; accepted are {', '.join(accepted)}"
            )


def adapted(layer: Layer, targets: tuple[str, ...]) -> tuple[Linear, ...]:
    """The matrices of `layer` that get an adapter."""
    return tuple(
        linear for linear in layer.linears if linear.rank_multiple and linear.name in targets
    )


def adapted_linears(model: ModelSpec, targets: tuple[str, ...]) -> tuple[tuple[Linear, int], ...]:
    """Every matrix of `model` that gets an adapter, and the number of layers that have it."""
    in_layers = [
        (linear, 1 if group.shared else group.count)
        for group in model.groups
        for linear in adapted(group.layer, targets)
    ]
    around = [
        (linear, 1)
        for linear in (*model.outer_linears, *tower_linears(model))
        if linear.rank_multiple and linear.name in targets
    ]
    return (*in_layers, *around)
