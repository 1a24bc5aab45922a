"""LLaMA-Adapter: queries of the upper layers also attend to trained prompts, behind a gate.

Zhang et al. 2023, arXiv:2303.16199; peft 0.21.2 `tuners/adaption_prompt`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import repeat
from typing import TYPE_CHECKING, Any

from whichlora.errors import ConfigError
from whichlora.methods.base import (
    PEFT_COMPARISON,
    RANK_SETTINGS,
    AdapterWork,
    Method,
    given,
    no_shapes,
    read_options,
)
from whichlora.methods.operators import counted
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.layer import Attention, LayerGroup, Linear
from whichlora.spec.numeric import Count
from whichlora.spec.options import Option
from whichlora.spec.run import RunConfig

if TYPE_CHECKING:
    from whichlora.symbolic.graph import Tensor
    from whichlora.symbolic.operators import OpEmitter

_LENGTH = Option(name="adapter_len", summary="trained prompts of each layer", default=10)
_LAYERS = Option(name="adapter_layers", summary="of the upper layers, how many", default=30)
_OPTIONS = (_LENGTH, _LAYERS)
_FAMILIES = ("llama", "mistral")  # `TRANSFORMERS_MODEL_CONFIG`; of gpt2 it has other code


def with_model(model: ModelSpec, run: RunConfig) -> ModelSpec:
    """The lower layers without what makes the output projection of the others adapted.

    Raises:
        ConfigError: PEFT has no code for its attention, or it has fewer layers.
    """
    if model.model_type not in _FAMILIES:
        raise ConfigError(
            f"method: adaption-prompt is predicted for {' and '.join(_FAMILIES)}, got "
            f"{model.model_type}; use method lora"
        )
    asked, there = _LAYERS.whole(run.method_options), model.num_hidden_layers
    if asked > there:
        raise ConfigError(
            f"adapter_layers must not be above the {there} layers of {model.name}, got {asked}"
        )
    without = there - asked
    if without and run.phase == "finetune" and not run.gradient_checkpointing:
        raise ConfigError(
            f"adapter_layers: {asked} of {there} layers are predicted with gradient checkpointing; "
            f"use it, or {there}"
        )
    groups: list[LayerGroup] = []
    for group in model.groups:
        lower = min(without, group.count)
        without -= lower
        places = group.positions
        if lower:
            layer = replace(group.layer, attentions=tuple(map(_plain, group.layer.attentions)))
            groups.append(replace(group, layer=layer, count=lower, positions=places[:lower]))
        if lower < group.count:
            rest = group.count - lower
            groups.append(replace(group, count=rest, positions=places[lower:]))
    return replace(model, groups=tuple(groups))


def _plain(attention: Attention) -> Attention:
    *first, last = attention.linears
    return replace(attention, linears=(*first, replace(last, adapter_rank=0)))


def find_targets(model: ModelSpec, target_modules: tuple[str, ...]) -> tuple[str, ...]:
    """The last matrix of each attention stands for all of it.

    Raises:
        ConfigError: heads that PEFT counts otherwise than they are.
    """
    attention = model.groups[-1].layer.attentions[0]
    factor = model.hidden_size // attention.k_width
    if factor * attention.num_key_value_heads != attention.num_attention_heads:
        raise ConfigError(
            f"method: adaption-prompt of PEFT takes hidden_size / key width for the heads that "
            f"share a key, which {model.name} has otherwise; use method lora"
        )
    return (attention.linears[-1].name,)


def adapter_shapes(
    linear: Linear, r: Count, *, length: int = 10
) -> tuple[tuple[Count, Count], ...]:
    """Prompts as wide as the stream, and one gate. Kind: exact."""
    return (length + 0 * r, linear.out_features), (1 + 0 * r, 1)


def adapter_widths(linear: Linear, dtypes: Dtypes) -> Iterator[int]:
    """In the dtype of the base's weights, fp32 beside quantised ones.

    Source: peft 0.21.2 `AdaptedAttention.__init__`; `AdaptionPromptModel` casts no adapters.
    """
    return repeat(_size(dtypes))


def _size(dtypes: Dtypes) -> int:
    return dtypes.base_bytes if dtypes.quant == "none" else 4


def after_attention(
    ops: OpEmitter,
    attention: Attention,
    x: Tensor,
    result: Tensor,
    rotate: Callable[[Tensor], Tensor],
    *,
    length: int = 10,
) -> Tensor:
    """The result plus what the queries, made again, find among the prompts.

    Source: peft 0.21.2 `AdaptedAttention.forward`, `llama_compute_query_states`.
    """
    tape, size = ops.tape, _size(ops.dtypes)
    q_linear, k_linear, v_linear, o_linear = attention.linears
    width, heads = attention.q_width, attention.num_attention_heads
    prompts = tape.weight(ops.constant(length * o_linear.out_features), size, trained=True)
    of_prompts = replace(ops, rows=replace(ops.rows, number=length))
    key, value = (of_prompts.base(linear, prompts) for linear in (k_linear, v_linear))
    keys, values = (_for_each_query_head(ops, state, length, width) for state in (key, value))
    query = tape.view(ops.base(q_linear, x), copies_gradient=True)
    unused = ops.base(v_linear, x)
    turned = rotate(query)
    tape.hold(query, unused)
    laid_out = ops.autocast(turned if turned.joined else ops.copy(turned))
    keys_read = ops.autocast(keys)
    scores = tape.op(
        [laid_out, keys_read],
        ops.rows.of(heads * length),
        laid_out.size,
        saves=[laid_out, keys_read],
        what="prompts: scores",
    )
    wide = ops.cast(ops.scale(scores), 4)
    weights = ops.cast(ops.softmax(wide, size=4), turned.size)
    gate = tape.weight(ops.constant(1), size, trained=True)
    gated = ops.multiply_rows(weights, gate)
    read = [ops.autocast(each) for each in (gated, values)]
    mixed = tape.op(read, ops.rows.of(width), read[0].size, saves=read, what="prompts: values")
    update = ops.base(o_linear, ops.copy(mixed))
    summed = ops.cast(ops.add(result, update), turned.size)
    tape.hold(x, result, key, value, keys, values, turned, gated, update)
    return summed


def _for_each_query_head(ops: OpEmitter, state: Tensor, length: int, width: int) -> Tensor:
    """`repeat` of all sequences, and `repeat_interleave` of all heads that share a key."""
    few = ops.per_sequence(state.elements.constant)
    every = ops.tape.op([state], few, state.size)
    return ops.tape.op([every], ops.per_sequence(length * width), state.size, joined=True)


def work(linear: Linear, dtypes: Dtypes, r: Count, *, length: int = 10) -> AdapterWork:
    """Queries and output projected again, and the attention to the prompts.

    Values, which are projected again and which nobody reads, are left out.
    """
    width, hidden = linear.in_features, linear.out_features
    again = 2 * 2 * width * hidden
    attended = 2 * 2 * length * width
    params = length * hidden + 1
    return AdapterWork(
        wide=False,
        **counted(
            linear,
            params + 0 * r,
            forward_flops=again + attended,
            backward_flops=again + 2 * attended,
        ),
    )


def with_options(run: RunConfig) -> dict[str, Any]:
    length = _LENGTH.whole(run.method_options)
    return given(adapter_shapes, after_attention, work, length=length)


def peft_config(run: RunConfig) -> dict[str, Any]:
    return {option.name: option.of(run.method_options) for option in _OPTIONS}


def read_peft(config: Any) -> Mapping[str, Any]:
    return {"method_options": read_options(config, _OPTIONS)["method_options"]}


METHOD = Method(
    name="adaption-prompt",
    summary="LLaMA-Adapter: queries of upper layers also attend to trained prompts",
    peft_class="peft.AdaptionPromptConfig",
    peft_config=peft_config,
    read_peft=read_peft,
    parameter_prefix="adaption_",
    merges=False,
    serve="as-trained",
    ignores=RANK_SETTINGS | {"target_modules", "modules_to_save", "adapter_dtype"},
    options=_OPTIONS,
    with_options=with_options,
    with_model=with_model,
    find_targets=find_targets,
    adapter_shapes=adapter_shapes,
    adapter_widths=adapter_widths,
    autocast_shapes=no_shapes,
    after_attention=after_attention,
    work=work,
    learning_rate=5e-4,
    rate_source=PEFT_COMPARISON,
)
