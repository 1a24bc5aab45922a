"""What a checkpoint of bitsandbytes leaves in 16 bit: `llm_int8_skip_modules` of its config."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from whichlora.spec.architecture import ModelSpec
from whichlora.spec.checkpoint import stored_config
from whichlora.spec.layer import Layer, LayerGroup, Linear

# Of a copy whose name alone is known, in place of the list of modules in 16 bit.
UNKNOWN_MODULES = "unknown"
_JOINED = {
    "qkv_proj": ("qkv_proj", "q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_up_proj", "gate_proj", "up_proj"),
}
_OF_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.(.+))?$")
_OF_TOWERS = re.compile(r"visual|vision|audio|multi_modal|merger|modality")


def names_wide_modules(config: Mapping[str, Any]) -> bool:
    """Whether what bitsandbytes leaves in 16 bit is known; False of a copy known by its name."""
    return bool(_listed(config) != UNKNOWN_MODULES)


def _listed(config: Mapping[str, Any]) -> Any:
    return stored_config(config).get("llm_int8_skip_modules")


def with_wide_modules(model: ModelSpec) -> ModelSpec:
    """`model`, of whose layers a checkpoint of bitsandbytes leaves some matrices in 16 bit.

    Its list names modules: a matrix, an MLP, a whole layer; by their path or the end of it. A group
    of layers falls into those that it names alike. Towers are left as they are.
    Kind: exact where positions of layers are known. Source: transformers 5.23
    `quantizers_utils.should_convert_module`.
    """
    listed = _listed(model.config)
    names = [str(each) for each in listed] if isinstance(listed, list) else []
    names = [name for name in names if not _OF_TOWERS.search(name)]
    in_layers: dict[int, set[str]] = defaultdict(set)
    everywhere: set[str] = set()
    for name in names:
        match = _OF_LAYER.search(name)
        if match is None:
            everywhere.add(name)
        else:
            in_layers[int(match[1])].add(match[2] or "")
    groups: list[LayerGroup] = []
    start = 0
    for group in model.groups:
        places = group.positions or tuple(range(start, start + group.count))
        start += group.count
        alike: dict[frozenset[str], list[int]] = defaultdict(list)
        for place in places:
            alike[frozenset(in_layers[place] | everywhere)].append(place)
        groups += (
            [
                replace(
                    group,
                    layer=_widened(group.layer, wide_names),
                    count=len(at),
                    positions=tuple(at),
                )
                for wide_names, at in alike.items()
            ]
            if len(alike) > 1
            else [replace(group, layer=_widened(group.layer, next(iter(alike))))]
        )
    wide = sum(
        group.count * sum(not linear.quantisable for linear in group.layer.linears)
        for group in groups
    )
    before = sum(
        group.count * sum(not linear.quantisable for linear in group.layer.linears)
        for group in model.groups
    )
    if wide == before:
        return model
    note = f"{wide - before} matrices of layers stay in 16 bit, as its config names them"
    return replace(model, groups=tuple(groups), notes=(*model.notes, note))


def _widened(layer: Layer, wide_names: Collection[str]) -> Layer:
    """`layer` with the matrices in 16 bit that `wide_names` has: modules, or ends of paths."""

    def marked(linears: tuple[Linear, ...], module: str) -> tuple[Linear, ...]:
        return tuple(
            replace(linear, quantisable=False)
            if any(_is_named(f"{module}.{part}", wide_names) for part in _all_parts(linear.name))
            else linear
            for linear in linears
        )

    attentions = tuple(
        replace(each, linears=marked(each.linears, "self_attn")) for each in layer.attentions
    )
    mlp = layer.mlp and replace(layer.mlp, linears=marked(layer.mlp.linears, "mlp"))
    return replace(layer, attentions=attentions, mlp=mlp)


def _is_named(path: str, wide_names: Collection[str]) -> bool:
    module = path.partition(".")[0]
    return any(
        not name or name in (path, module) or path.endswith(f".{name}") for name in wide_names
    )


def _all_parts(name: str) -> tuple[str, ...]:
    """Names that a matrix of ours has in files: those of its parts, where it joins several."""
    return _JOINED.get(name, (name,))
