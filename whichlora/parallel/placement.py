"""Which GPU `device_map="auto"` gives each block: transformers' rule, on sizes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from whichlora.parallel.stages import placed_groups
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.dtypes import Dtypes, is_quantised
from whichlora.spec.numeric import floor_div
from whichlora.spec.run import BNB_QUANTS, FOUR_BIT_BNB

BUFFER = 1.25  # of the largest block, beside an equal share
QUANTISED_SHARE = 0.9  # of each GPU, where bitsandbytes quantises on it
ROTARY_ELEMENTS = 2  # `inv_freq` and `original_inv_freq`, half the rotated width each


@dataclass(frozen=True, slots=True)
class Module:
    """A module with its bytes; a block is placed as a whole.

    Args:
        tied: the other module that has its tensor.
    """

    name: str
    num_bytes: float
    children: tuple[Module, ...] = ()
    tied: str = ""


def _stored_bytes(model: ModelSpec, dtypes: Dtypes, element_bytes: int) -> list[float]:
    """Bytes of every layer, as the rule counts them: scales of quantised matrices are left out.

    Kind: exact. Source: transformers 5.23 `compute_module_sizes`, `HfQuantizer.param_element_size`.
    """
    by_place: dict[int, float] = {}
    coded = 0.5 if dtypes.quant in FOUR_BIT_BNB else 1.0
    for group, places in placed_groups(model):
        layer = group.layer
        converted = [linear for linear in layer.linears if is_quantised(linear, dtypes)]
        narrow = sum(linear.num_weights for linear in converted)
        # bitsandbytes' layers are made with biases in fp32, whatever they are when they are loaded
        wide = sum(linear.num_params - linear.num_weights for linear in converted)
        size = narrow * coded + wide * 4 + (layer.num_params - narrow - wide) * element_bytes
        by_place |= dict.fromkeys(places, size + model.buffer_bytes / model.num_hidden_layers)
    return [by_place[place] for place in sorted(by_place)]


def modules_of(model: ModelSpec, dtypes: Dtypes, element_bytes: int) -> tuple[Module, ...]:
    """The children of the model's class, as deep as they may be divided.

    Args:
        element_bytes: of what is not quantised, as it is loaded.

    Kind: exact. Source: module trees of transformers 5.23, `_no_split_modules`.
    """
    base = element_bytes
    tables = [
        Module(f"embedding {i}", table.num_elements * base, tied="head" if not i else "")
        for i, table in enumerate(model.embeddings)
    ]
    if not model.head_tied:
        tables = [Module(table.name, table.num_bytes) for table in tables]
    layers = tuple(
        Module(f"layer {i}", size) for i, size in enumerate(_stored_bytes(model, dtypes, base))
    )
    first = sum(norm.num_params for norm in model.embedding_norms) * base
    last = sum(norm.num_params for norm in model.final_norms) * base
    rotated = {
        attention.rotary_dim
        for layer, _ in model.layers()
        for attention in layer.attentions
        if attention.position == "rope"
    }
    trunk = [
        *tables,
        *([Module("embedding norms", first)] if first else []),
        Module("layers", sum(layer.num_bytes for layer in layers), layers),
        Module("final norms", last),
        *([Module("rotary", ROTARY_ELEMENTS * 2 * sum(rotated))] if rotated else []),
    ]
    head = Module("head", 0.0)
    if model.head is not None:
        own = model.head.num_params - (model.head.num_weights if model.head_tied else 0)
        head = Module("head", own * base, tied="embedding 0" if model.head_tied else "")
    trunk_bytes = sum(module.num_bytes for module in trunk)
    return Module("model", trunk_bytes, tuple(trunk)), head


def _blocks(modules: Sequence[Module]) -> list[Module]:
    blocks: list[Module] = []
    for module in modules:
        blocks += _blocks(module.children) if module.children else [module]
    return blocks


def balanced_caps(
    modules: Sequence[Module], caps: Sequence[float], *, quantised: bool
) -> list[float]:
    """Bytes that each GPU may get: an equal share and a buffer, the last one all it has.

    Kind: exact. Source: transformers 5.23 `integrations/accelerate.py`, `get_balanced_memory`;
    `Bnb4BitHfQuantizer.adjust_max_memory`.
    """
    total = int(sum(module.num_bytes for module in modules))
    if len(caps) == 1:
        balanced = [0.9 * caps[0]]
    else:
        largest = max(module.num_bytes for module in _blocks(modules))
        share = floor_div(total, len(caps)) + int(BUFFER * largest)
        balanced = [*(min(share, cap) for cap in caps[:-1]), caps[-1]]
    return [cap * QUANTISED_SHARE for cap in balanced] if quantised else balanced


def placed(modules: Sequence[Module], caps: Sequence[float]) -> dict[str, int] | None:
    """The GPU of every block, by name; None where they do not all fit.

    GPU 0 keeps room for the largest block that is still to be placed.
    Kind: exact. Source: transformers 5.23 `integrations/accelerate.py`, `infer_auto_device_map`.
    """
    waiting = list(modules)
    used = [0.0] * len(caps)
    places: dict[str, int] = {}
    gpu = 0
    reserve, reserved = _largest(waiting)
    while waiting:
        module = waiting.pop(0)
        inside = {block.name for block in _blocks([module])}
        reserved -= inside
        if not reserved:
            reserve, reserved = _largest(waiting)
        tied = _tied_outside(module, inside, waiting)
        room = caps[gpu] - (reserve if gpu == 0 else 0)
        if used[gpu] + module.num_bytes + sum(each.num_bytes for each in tied) <= room:
            used[gpu] += module.num_bytes + sum(each.num_bytes for each in tied)
            for each in (module, *tied):
                places |= dict.fromkeys((block.name for block in _blocks([each])), gpu)
            waiting = [each for each in waiting if each not in tied]
        elif module.children:
            waiting = [*module.children, *waiting]
            reserve, reserved = _largest(waiting)
        elif gpu + 1 == len(caps):
            return None
        else:
            gpu += 1
            waiting = [module, *waiting]
    return places


def _largest(waiting: Sequence[Module]) -> tuple[float, set[str]]:
    """Bytes of the largest block, and the names of those that are as large."""
    blocks = _blocks(waiting)
    most = max((block.num_bytes for block in blocks), default=0.0)
    return most, {block.name for block in blocks if block.num_bytes == most}


def _tied_outside(module: Module, inside: set[str], waiting: Sequence[Module]) -> list[Module]:
    names = {block.tied for block in _blocks([module]) if block.tied} - inside
    if not names:
        return []
    return [each for each in waiting if {block.name for block in _blocks([each])} & names]


def is_quantised_on_device(dtypes: Dtypes) -> bool:
    return dtypes.quant in BNB_QUANTS
