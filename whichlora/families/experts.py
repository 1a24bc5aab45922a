"""How PEFT adapts mixtures of experts whose experts became 3-D parameters in transformers 5.

For some model types PEFT 0.21 translates the names that the experts had as modules into
parameters: every expert gets an adapter, at twice the rank where gate and up are one matrix, and
so does the router; a matrix module that shares one of those names gets none.
Source: `peft.utils.transformers_weight_conversion`, compared on meta-device models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from whichlora.spec.architecture import ModelSpec
from whichlora.spec.layer import Layer, Linear, Mlp, Moe
from whichlora.spec.tower import Tower

_Names = Mapping[str, tuple[str, ...]]  # of a parameter → those that its parts had as modules
_MIXTRAL: _Names = {"gate": ("gate",), "gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}
_PROJECTIONS: _Names = {
    "gate": ("gate",),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}
TRANSLATED: dict[str, _Names] = {
    "mixtral": _MIXTRAL,
    "minimax_m2": _MIXTRAL,
    "cohere2_moe": _PROJECTIONS,
    "deepseek_v2": _PROJECTIONS,
    "deepseek_v3": _PROJECTIONS,
    "deepseek_v32": _PROJECTIONS,
    "dots1": _PROJECTIONS,
    "ernie4_5_moe": _PROJECTIONS,
    "exaone_moe": _PROJECTIONS,
    "flex_olmo": _PROJECTIONS,
    "glm4_moe": _PROJECTIONS,
    "glm4_moe_lite": _PROJECTIONS,
    "glm4v_moe": _PROJECTIONS,
    "glm_moe_dsa": _PROJECTIONS,
    "hunyuan_v1_moe": _PROJECTIONS,
    "kimi_k2": _PROJECTIONS,  # as deepseek_v3
    "mellum": _PROJECTIONS,
    "olmoe": _PROJECTIONS,
    "qwen3_moe": _PROJECTIONS,
    "qwen3_next": _PROJECTIONS,
    "solar_open": _PROJECTIONS,
}
"""Model type to the module names that PEFT takes for the experts' and the router's."""


# Transformers 4 kept these experts as 3-D parameters too.
_NEVER_MODULES = frozenset({"dbrx", "gpt_oss", "granitemoe"})


def with_expert_modules(spec: ModelSpec) -> ModelSpec:
    """`spec` as transformers 4 builds it: the matrices of every expert are linears."""
    if spec.model_type in _NEVER_MODULES or not spec.has_experts:
        return spec
    return spec.with_layers(_with_expert_modules)


def _with_expert_modules(layer: Layer) -> Layer:
    if layer.moe is None:
        return layer
    expert = layer.moe.expert
    linears = tuple(replace(linear, is_module=True, adapter_rank=1) for linear in expert.linears)
    looped = replace(layer.moe, expert=replace(expert, linears=linears), one_by_one=True)
    return replace(layer, moe=looped)


def with_routed_rows(spec: ModelSpec) -> ModelSpec:
    """`spec` as engines run it, whose experts get the rows of their own tokens only.

    Kind: exact. Source: vLLM 0.33.0 `Llama4MoE`, a `FusedMoE`; transformers 5.23 `Llama4TextMoe`.
    """
    if not any(group.layer.moe and group.layer.moe.by_score for group in spec.groups):
        return spec
    return spec.with_layers(_with_routed_rows)


def _with_routed_rows(layer: Layer) -> Layer:
    moe = layer.moe
    if moe is None or not moe.by_score:
        return layer
    linears = tuple(replace(linear, active=moe.experts_per_token) for linear in moe.expert.linears)
    routed = replace(moe, by_score=False, expert=replace(moe.expert, linears=linears))
    return replace(layer, moe=routed)


def with_adapter_ranks(spec: ModelSpec) -> ModelSpec:
    """`spec` with the rank that PEFT gives each matrix, where its rule is not the plain one."""
    names = TRANSLATED.get(spec.model_type)
    if names is None:
        return spec
    spec = replace(_groups(spec, names), idle_linears=_linears(spec.idle_linears, names))
    if spec.tower is None:
        return spec
    tower, kernel = _tower(spec.tower, names), spec.tower.kernel
    if kernel is None:
        return replace(spec, tower=tower)
    reached = replace(kernel, adapter_rank=1)  # translated targets are names
    tower = replace(tower, idle=(*tower.idle, reached))
    return replace(spec, tower=tower, idle_linears=(*spec.idle_linears, reached))


def _groups(spec: ModelSpec, names: _Names) -> ModelSpec:
    return spec.with_layers(lambda layer: _layer(layer, names))


def _tower(tower: Tower, names: _Names) -> Tower:
    """The names are those of a whole model: matrices of a tower that share them get none, too."""
    stack = _groups(tower.stack, names)
    linears = _linears(stack.head_linears, names)
    return replace(tower, stack=replace(stack, head_linears=linears))


def with_named_experts(spec: ModelSpec) -> ModelSpec:
    """`spec` where parameters of experts are named to PEFT: nothing is translated.

    Kind: exact. Source: peft 0.21.2 `LoraConfig.target_parameters`; unsloth `models/_utils.py`,
    `get_moe_target_parameters`, which names them by the names of projections.
    """
    return spec.with_layers(_with_named_experts)


def _with_named_experts(layer: Layer) -> Layer:
    if layer.moe is None:
        return layer
    expert = layer.moe.expert
    linears = tuple(_named_expert(linear) for linear in expert.linears)
    router = layer.moe.router
    if not router.is_module:
        router = replace(router, adapter_rank=0)
    named = replace(layer.moe, expert=replace(expert, linears=linears), router=router)
    return replace(layer, moe=named)


def _named_expert(linear: Linear) -> Linear:
    parts = _PROJECTIONS.get(linear.name, ())
    return replace(linear, adapter_rank=1, asked_as=parts, needs_all=False)


def _layer(layer: Layer, names: _Names) -> Layer:
    return replace(
        layer,
        attentions=tuple(
            replace(attention, linears=_linears(attention.linears, names))
            for attention in layer.attentions
        ),
        mlp=None if layer.mlp is None else _mlp(layer.mlp, names),
        moe=None if layer.moe is None else _moe(layer.moe, names),
    )


def _moe(moe: Moe, names: _Names) -> Moe:
    return replace(
        moe,
        expert=_mlp(moe.expert, names),
        router=_linear(moe.router, names),
        shared=None if moe.shared is None else _mlp(moe.shared, names),
    )


def _mlp(mlp: Mlp, names: _Names) -> Mlp:
    return replace(mlp, linears=_linears(mlp.linears, names))


def _linears(linears: tuple[Linear, ...], names: _Names) -> tuple[Linear, ...]:
    return tuple(_linear(linear, names) for linear in linears)


def _linear(linear: Linear, names: _Names) -> Linear:
    if linear.is_module:
        is_theirs = any(linear.name in parts for parts in names.values())
        return replace(linear, adapter_rank=0) if is_theirs else linear
    parts = names.get(linear.name, ())
    return replace(linear, adapter_rank=max(1, len(parts)), asked_as=parts)
