"""GGUF files: how llama.cpp stores every tensor of a model, by the mix that a file type names.

A file type such as Q4_K_M is a mix: most matrices in one type, some in a wider one. Rules are
those of `llama-quantize` without an importance matrix; types that need one, with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from whichlora.spec.architecture import ModelSpec, layers_in_order
from whichlora.spec.layer import Layer, Linear, Moe, Norm
from whichlora.spec.numeric import ceil_div

if TYPE_CHECKING:
    from whichlora.serving.gguf_architectures.base import Architecture

# Elements of a block, and its bytes: 4-bit codes with a 16-bit scale, and so on.
# Source: llama.cpp 0c1e570 ggml/src/ggml-common.h, block_q4_0 to block_iq4_xs, block_iq1_s.
BLOCKS: dict[str, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "IQ4_NL": (32, 18),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ4_XS": (256, 136),
    "IQ3_S": (256, 110),
    "IQ3_XXS": (256, 98),
    "IQ2_S": (256, 82),
    "IQ2_XS": (256, 74),
    "IQ2_XXS": (256, 66),
    "IQ1_M": (256, 56),
    "IQ1_S": (256, 50),
    "MXFP4": (32, 17),
}
# What a row that is no multiple of 256 is stored as. Source: src/llama-quant.cpp:389.
_NARROW_BLOCKS = {
    "Q2_K": "Q4_0",
    "Q3_K": "Q4_0",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
    "IQ4_XS": "IQ4_NL",
    **dict.fromkeys(("IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S"), "IQ4_NL"),
}
# The type that a file is named by. Source: src/llama-quant.cpp:885 llama_ftype_get_default_type.
FILE_TYPES = {
    "F32": "F32",
    "F16": "F16",
    "BF16": "BF16",
    "Q8_0": "Q8_0",
    "Q6_K": "Q6_K",
    "Q5_K_M": "Q5_K",
    "Q5_K_S": "Q5_K",
    "Q5_1": "Q5_1",
    "Q5_0": "Q5_0",
    "Q4_K_M": "Q4_K",
    "Q4_K_S": "Q4_K",
    "Q4_1": "Q4_1",
    "Q4_0": "Q4_0",
    "IQ4_NL": "IQ4_NL",
    "IQ4_XS": "IQ4_XS",
    "Q3_K_L": "Q3_K",
    "Q3_K_M": "Q3_K",
    "Q3_K_S": "Q3_K",
    "Q2_K": "Q2_K",
    "Q2_K_S": "Q2_K",
    "IQ3_M": "IQ3_S",
    "IQ3_S": "IQ3_S",
    "IQ3_XS": "IQ3_S",
    "IQ3_XXS": "IQ3_XXS",
    "IQ2_M": "IQ2_S",
    "IQ2_S": "IQ2_XS",
    "IQ2_XS": "IQ2_XS",
    "IQ2_XXS": "IQ2_XXS",
    "IQ1_M": "IQ1_M",
    "IQ1_S": "IQ1_S",
    "MXFP4_MOE": "MXFP4",
}
# Mixes of one to two bits, which have rules of their own; those with wider tables of tokens.
_LEAST = ("IQ2_M", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S")
_TABLES = {
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ1_S", "IQ1_M"), "Q2_K"),
    **dict.fromkeys(("IQ2_S", "IQ2_M", "IQ3_XXS"), "IQ3_S"),
}


# Of a repository without a type. Source: llama.cpp 0c1e570 common/arg.cpp `--hf-repo`.
USUAL_TYPE = "Q4_K_M"
STORED_AS = {"mxfp4": "MXFP4_MOE"}  # conversion/gpt_oss.py `repack_mxfp4`


def counted_type(word: str) -> str:
    """The one of `FILE_TYPES` that a file is counted as by the type in its name.

    Of Unsloth's dynamic mixes, such as UD-Q4_K_XL, and of further ones, such as Q4_K_L, only the
    file states the types: they are counted as the nearest. A name without a type means the file
    that llama.cpp takes.
    Kind: exact for `FILE_TYPES`; an estimate for others.
    Source: docs.unsloth.ai/basics/unsloth-dynamic-v2.0-ggufs: types differ by layer and model.
    """
    name = word.upper().removeprefix("UD-")
    if not name or name in FILE_TYPES:
        return name or USUAL_TYPE
    bits = name.partition("_")[0]
    near = (f"{bits}_K_M", f"{bits}_K", f"{bits}_M", f"{bits}_XS", f"{bits}_0")
    return next((each for each in near if each in FILE_TYPES), word)


def other_mix(word: str) -> str:
    """Why the type of a file, such as UD-Q4_K_XL, is none of `FILE_TYPES`; empty of other words."""
    nearest = counted_type(word)
    if nearest not in FILE_TYPES:
        return ""
    return f"is a mix whose types only the file states; give the nearest, {nearest}"


UNQUANTISED = ("F32", "F16", "BF16")

# The name of a layer's matrix in the file; where there are several, its rows are divided among
# them. Source: gguf-py/gguf/tensor_mapping.py.
NAMES: dict[str, tuple[str, ...]] = {
    "q_proj": ("attn_q",),
    "k_proj": ("attn_k",),
    "v_proj": ("attn_v",),
    "qkv_proj": ("attn_qkv",),
    "o_proj": ("attn_output",),
    "gate_proj": ("ffn_gate",),
    "up_proj": ("ffn_up",),
    "down_proj": ("ffn_down",),
    "c_fc": ("ffn_up",),
    "c_proj": ("ffn_down",),
    "gate_up_proj": ("ffn_up",),
    "gate": ("ffn_gate_inp",),
    "shared_expert_gate": ("ffn_gate_inp_shexp",),
}
# Norms of a layer; those of gemma lie around both halves.
NORMS: dict[str, str] = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
}
AROUND = {"post_attention_layernorm": "post_attention_norm"}
VALUES = ("attn_v", "attn_qkv")
ROUTERS = ("ffn_gate_inp", "ffn_gate_inp_shexp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One tensor of a file.

    Args:
        name: as the file has it, without "blk.N." and `suffix`.
        layer: which one it is of; None outside of them.
        row: elements of a row, whose blocks are whole.
        num_rows: of all matrices where there are several.
        count: matrices beside each other, of experts or heads.
        type: empty where the mix of the file decides.
        linear: the matrix that it is, or is a part of.
        is_expert: llama.cpp counts it among the experts, which may stay on the host.
    """

    name: str
    row: int
    num_rows: int
    layer: int | None = None
    count: int = 1
    type: str = "F32"
    suffix: str = ".weight"
    linear: Linear | None = None
    is_expert: bool = False

    @property
    def num_bytes(self) -> int:
        elements, block_bytes = BLOCKS[self.type]
        return self.num_rows * self.row // elements * block_bytes

    def of_layer(self, layer: int, stored: str) -> Tensor:
        """The same tensor of a layer, in a type: `replace`, a third of whose time it takes."""
        return Tensor(
            name=self.name,
            row=self.row,
            num_rows=self.num_rows,
            layer=layer,
            count=self.count,
            type=stored,
            suffix=self.suffix,
            linear=self.linear,
            is_expert=self.is_expert,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mixed:
    """What the rules of a mix ask of a model."""

    num_layers: int
    grouped: int
    num_experts: int
    is_70b: bool
    rules: Mapping[str, Rules]


# For a kind of matrix in a mix: the wider type, and of which layers.
# Source: src/llama-quant.cpp:432-690 llama_tensor_get_type_impl.
_Rule = tuple[str, Callable[[_Mixed, int], bool]]
Rules = Mapping[str, tuple[_Rule, ...]]


def always(mixed: _Mixed, index: int) -> bool:
    return True


def first_eighth(mixed: _Mixed, index: int) -> bool:
    return index < mixed.num_layers // 8


def sensitive(mixed: _Mixed, index: int) -> bool:
    """In the first and last eighth of the layers, and every third one between them."""
    eighth = mixed.num_layers // 8
    outer = index < eighth or index >= 7 * mixed.num_layers // 8
    return outer or (index - eighth) % 3 == 2


def _shares_keys(mixed: _Mixed, index: int) -> bool:
    return mixed.grouped >= 4


def _shares_keys_or_mixes(mixed: _Mixed, index: int) -> bool:
    return mixed.grouped >= 4 or mixed.num_experts >= 4


def _middle(mixed: _Mixed, index: int) -> bool:
    """Beyond the first and the last eighth of the layers."""
    return mixed.num_layers // 8 <= index < 7 * mixed.num_layers // 8


def _first_or_of_eight(mixed: _Mixed, index: int) -> bool:
    of_eight = mixed.num_experts == 8 and sensitive(mixed, index)
    return first_eighth(mixed, index) or of_eight


_VALUES: dict[str, tuple[_Rule, ...]] = {
    **dict.fromkeys(
        ("IQ2_XXS", "IQ2_XS", "IQ1_S", "IQ1_M"),
        (("Q4_K", _shares_keys_or_mixes), ("Q2_K", always)),
    ),
    **dict.fromkeys(("IQ2_S", "IQ2_M"), (("Q4_K", _shares_keys_or_mixes), ("IQ3_S", always))),
    **dict.fromkeys(("IQ3_XXS", "IQ3_XS", "IQ3_S", "Q2_K_S"), (("Q4_K", _shares_keys),)),
    "IQ3_M": (("Q4_K", always),),
    "Q2_K": (("Q4_K", _shares_keys), ("Q3_K", always)),
    "Q3_K_M": (("Q5_K", lambda mixed, index: index < 2), ("Q4_K", always)),
    "Q3_K_L": (("Q5_K", always),),
    "IQ4_NL": (("Q5_K", _shares_keys),),
    "IQ4_XS": (("Q5_K", _shares_keys),),
    "Q4_K_M": (("Q6_K", sensitive),),
    "Q5_K_M": (("Q6_K", sensitive),),
    "Q4_K_S": (("Q5_K", lambda mixed, index: index < 4),),
}
_DOWN: dict[str, tuple[_Rule, ...]] = {
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ1_S", "IQ1_M"), (("Q2_K", first_eighth),)),
    **dict.fromkeys(("IQ2_S", "IQ2_M"), (("IQ3_S", first_eighth),)),
    "IQ3_M": (("Q4_K", _first_or_of_eight),),
    "Q2_K_S": (("Q4_K", first_eighth),),
    "Q2_K": (("Q3_K", always),),
    "Q3_K_M": (("Q5_K", lambda mixed, index: index < mixed.num_layers // 16), ("Q4_K", always)),
    "Q3_K_L": (("Q5_K", always),),
    "IQ4_NL": (("Q5_K", first_eighth),),
    "IQ4_XS": (("Q5_K", first_eighth),),
    "Q4_K_M": (("Q6_K", sensitive),),
    "Q5_K_M": (("Q6_K", sensitive),),
    "Q4_K_S": (("Q5_K", first_eighth),),
}
_OUTPUT: dict[str, tuple[_Rule, ...]] = {
    **dict.fromkeys(("IQ1_S", "IQ1_M"), (("IQ2_XXS", always),)),
    **dict.fromkeys(("IQ2_S", "IQ2_M", "IQ3_XXS"), (("IQ3_S", always),)),
    "IQ3_M": (("Q4_K", always),),
    "Q2_K": (("Q3_K", always),),
    "Q3_K_M": (("Q4_K", always),),
    "Q3_K_L": (("Q5_K", always),),
}
_SCORES: dict[str, tuple[_Rule, ...]] = {
    "IQ3_XXS": (("IQ2_S", always),),
    "IQ3_XS": (("IQ3_XXS", always),),
}
_GATES: dict[str, tuple[_Rule, ...]] = {"IQ3_XS": (("IQ3_XXS", _middle),)}
_WIDER_OUTPUT = (
    *("Q2_K", "Q3_K_S", "Q3_K_M", "IQ4_NL", "IQ4_XS", "Q4_K_S", "Q4_K_M"),
    *("IQ3_XXS", "IQ3_XS", "IQ3_S", "IQ3_M", *_LEAST),
)
RULES: dict[str, Rules] = {
    "attn_v": _VALUES,
    "attn_qkv": _VALUES,
    "attn_k": _SCORES,
    "attn_q": _SCORES,
    "ffn_gate": _GATES,
    "ffn_up": _GATES,
    "ffn_down": _DOWN,
    "attn_output": _OUTPUT,
}


def _kind(name: str) -> str:
    """Which rule a name falls under: shared experts are as others are."""
    return next((kind for kind in ("ffn_down", "ffn_gate", "ffn_up") if kind in name), name)


def _mixed_type(tensor: Tensor, index: int, file_type: str, mixed: _Mixed) -> str:
    """The type of a layer's matrix before its rows are looked at."""
    name, eight = _kind(tensor.name), mixed.num_experts == 8
    if file_type == "MXFP4_MOE":
        return "MXFP4" if tensor.count > 1 else "Q8_0"
    if file_type in _LEAST and name in ("attn_v", "attn_k", "attn_qkv"):
        return "Q4_K" if eight else _ruled(name, index, file_type, mixed)
    if eight and name in ("attn_v", "attn_k", "attn_qkv"):
        return "Q8_0" if name != "attn_qkv" else _ruled("attn_v", index, file_type, mixed)
    if eight and name == "attn_output":
        return "Q5_K" if file_type in _WIDER_OUTPUT else FILE_TYPES[file_type]
    chosen = _ruled(name, index, file_type, mixed)
    if mixed.is_70b and name in ("attn_v", "attn_qkv") and chosen in ("Q3_K", "Q4_K"):
        return "Q5_K"
    return chosen


def _ruled(name: str, index: int, file_type: str, mixed: _Mixed) -> str:
    for wider, holds in mixed.rules.get(name, {}).get(file_type, ()):
        if holds(mixed, index):
            return wider
    return FILE_TYPES[file_type]


def _head_type(file_type: str, row: int, widest: str) -> str:
    """Of the output matrix, and of a token table that is one with it."""
    default = FILE_TYPES[file_type]
    if file_type == "MXFP4_MOE" or row % BLOCKS[default][0]:
        return "Q8_0"
    if widest == "Q6_K" and file_type in (*_LEAST, "IQ3_XXS"):
        return "Q5_K"
    return default if default == "Q8_0" else widest


def _whole_blocks(chosen: str, row: int) -> str:
    """`chosen`, or what takes its place where a row is no whole number of blocks."""
    if row % BLOCKS[chosen][0] == 0:
        return chosen
    narrower = _NARROW_BLOCKS.get(chosen, chosen)
    return "F16" if row % BLOCKS[narrower][0] else narrower


def tensors(model: ModelSpec, file_type: str, architecture: Architecture) -> list[Tensor]:
    """Every tensor of the file that `llama-quantize` makes of `model`.

    Kind: exact. Source: llama.cpp 0c1e570 `llama_tensor_get_type`, src/llama-quant.cpp:717.
    """
    head = model.head
    tied = head is None or model.head_tied
    width, quantised = model.hidden_size, file_type not in UNQUANTISED
    table = "Q8_0" if file_type == "MXFP4_MOE" else _TABLES.get(file_type, FILE_TYPES[file_type])
    if quantised and tied:
        table = _head_type(file_type, width, architecture.head_type)
    in_file = [_stored("token_embd", width, model.embeddings[0].rows, table)]
    if head is not None and not tied:
        of_head = (
            _head_type(file_type, width, architecture.head_type)
            if quantised
            else FILE_TYPES[file_type]
        )
        in_file.append(_stored("output", head.in_features, head.out_features, of_head))
        if head.bias:
            in_file.append(vector("output", head.out_features, suffix=".bias"))
    for norm in (*model.embedding_norms, *model.final_norms):
        in_file += _of_norm(architecture.output_norm, norm)
    in_file += _typed(model, file_type, architecture)
    return in_file


def _typed(model: ModelSpec, file_type: str, architecture: Architecture) -> Iterator[Tensor]:
    """Tensors of the layers, in the types of the mix.

    Values are counted among those that there are; what is fed, too, where there are no experts.
    """
    mixed = _mixed(model, architecture)
    layers = layers_in_order(model)
    # equal layers are one object, whose tensors differ in the number of the layer alone
    different = {id(layer): layer for layer in layers}
    of_layer = {
        key: tuple(architecture.tensors(layer, architecture)) for key, layer in different.items()
    }
    untyped = [
        (index, tensor) for index, each in enumerate(layers) for tensor in of_layer[id(each)]
    ]
    num_values = sum(tensor.name in VALUES and not tensor.type for _, tensor in untyped)
    of_values = replace(mixed, num_layers=num_values)
    seen: dict[str, int] = {}
    for layer_index, tensor in untyped:
        if tensor.type:
            yield tensor.of_layer(layer_index, tensor.type)
            continue
        chosen = FILE_TYPES[file_type]
        if file_type not in UNQUANTISED:
            is_value, kind = tensor.name in VALUES, _kind(tensor.name)
            number = seen.get("values" if is_value else kind, 0)
            seen["values" if is_value else kind] = number + 1
            index = number if is_value or mixed.num_experts <= 1 else layer_index
            chosen = _mixed_type(tensor, index, file_type, of_values if is_value else mixed)
        yield tensor.of_layer(layer_index, _whole_blocks(chosen, tensor.row))


def _stored(name: str, row: int, num_rows: int, chosen: str) -> Tensor:
    return Tensor(name=name, row=row, num_rows=num_rows, type=_whole_blocks(chosen, row))


def _of_norm(name: str, norm: Norm) -> Iterator[Tensor]:
    if norm.weight:
        yield Tensor(name=name, row=norm.width, num_rows=1)
    if norm.bias:
        yield Tensor(name=name, row=norm.width, num_rows=1, suffix=".bias")


def _mixed(model: ModelSpec, architecture: Architecture) -> _Mixed:
    layers = layers_in_order(model)
    attention = next(
        each for layer in layers for each in layer.attentions if each.kind == "softmax"
    )
    grouped = attention.num_attention_heads // attention.num_key_value_heads
    if architecture.heads_by_layer and attention not in layers[0].attentions:
        grouped = 0  # it asks the first layer, which has no heads of keys
    return _Mixed(
        num_layers=len(layers),
        grouped=grouped,
        num_experts=max((layer.moe.num_experts for layer in layers if layer.moe), default=0),
        is_70b=len(layers) == 80 and grouped > 1,
        rules={**RULES, **architecture.rules},
    )


def layer_tensors(layer: Layer, architecture: Architecture) -> Iterator[Tensor]:
    """Matrices, whose type is the mix's; norms, biases and a router are in fp32."""
    around = len(layer.norms) == 4 or layer.post_norm
    names = {**NORMS, **(AROUND if around else {}), **architecture.norms}
    for norm in (*layer.norms, *layer.inner_norms):
        yield from _of_norm(names[norm.name], norm)
    moe = layer.moe
    shared = () if moe is None or moe.shared is None else moe.shared.linears
    beside = len(layer.linears) - len(shared)
    yield from matrices(layer.linears[:beside], architecture.names)
    yield from matrices(shared, architecture.names, suffix="_shexp")
    if moe is not None and has_bias(moe):
        yield vector("exp_probs_b", moe.num_experts, suffix=".bias")


def has_bias(moe: Moe) -> bool:
    """Whether experts are chosen by scores with a bias: so are all of a sigmoid, since DeepSeek V3.

    Transformers has it in a buffer.
    """
    return moe.routing is not None and moe.routing.startswith("sigmoid")


def matrices(
    linears: Iterable[Linear], names: Mapping[str, tuple[str, ...]], suffix: str = ""
) -> Iterator[Tensor]:
    """Tensors of `linears`, and their biases."""
    for linear in linears:
        for name, num_rows in _parts(linear, names):
            is_router = name in ROUTERS
            whole = name if is_router else name + suffix
            yield Tensor(
                name=whole,
                row=linear.in_features,
                num_rows=num_rows,
                count=linear.count,
                type="F32" if is_router else "",
                linear=linear,
                is_expert=linear.count > 1,
            )
            if linear.bias:
                bias = vector(whole, num_rows // linear.count, linear.count, suffix=".bias")
                yield replace(bias, is_expert=linear.count > 1)


def vector(name: str, row: int, num_rows: int = 1, *, suffix: str = ".weight") -> Tensor:
    """What a layer has in fp32 beside its matrices."""
    return Tensor(name=name, row=row, num_rows=num_rows, suffix=suffix)


def _parts(linear: Linear, names: Mapping[str, tuple[str, ...]]) -> list[tuple[str, int]]:
    """Names and rows: a fused gate of experts is stored as two tensors."""
    in_file, num_rows = names.get(linear.name) or NAMES[linear.name], linear.out_features
    if linear.count > 1:
        if linear.name == "gate_up_proj":
            in_file = "ffn_gate", "ffn_up"
        in_file, num_rows = tuple(f"{name}_exps" for name in in_file), linear.count * num_rows
    return [(name, num_rows // len(in_file)) for name in in_file]


def unknown_matrices(model: ModelSpec, architecture: Architecture) -> list[str]:
    """Names of matrices that no file of ours has."""
    names = {linear.name for layer, _ in model.layers() for linear in layer.linears}
    return sorted(names - set(NAMES) - set(architecture.names))


def row_bytes(elements: int, stored: str) -> int:
    """Bytes of `elements` in blocks of a type. Kind: exact. Source: `BLOCKS`."""
    in_block, block_bytes = BLOCKS[stored]
    blocks: int = ceil_div(elements, in_block)
    return blocks * block_bytes
