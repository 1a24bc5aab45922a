"""GGUF files: how llama.cpp stores every tensor of a model, by the mix that a file type names.

A file type such as Q4_K_M is a mix: most matrices in one type, some in a wider one. Rules are
those of `llama-quantize` without an importance matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from whichlora.spec.architecture import Layer, Linear, ModelSpec, layers_in_order
from whichlora.spec.numeric import ceil_div

# Elements of a block, and its bytes: 4-bit codes with a 16-bit scale, and so on.
# Source: llama.cpp 0c1e570 ggml/src/ggml-common.h, block_q4_0 to block_iq4_xs.
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
}
# What a row that is no multiple of 256 is stored as. Source: src/llama-quant.cpp:389.
_NARROW_BLOCKS = {
    "Q2_K": "Q4_0",
    "Q3_K": "Q4_0",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
    "IQ4_XS": "IQ4_NL",
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
}
UNQUANTISED = ("F32", "F16", "BF16")

# The name of a layer's matrix in the file. Source: gguf-py/gguf/tensor_mapping.py.
NAMES = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "qkv_proj": "attn_qkv",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "c_fc": "ffn_up",
    "c_proj": "ffn_down",
    "gate_up_proj": "ffn_up",
    "gate": "ffn_gate_inp",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One tensor of a file.

    Args:
        name: as the file has it, without "blk.N." and ".weight".
        layer: which one it is of; None outside of them.
        row: elements of a row, whose blocks are whole.
        num_rows: of all experts where there are several.
        num_experts: 1 where there are none.
    """

    name: str
    row: int
    num_rows: int
    layer: int | None = None
    num_experts: int = 1
    type: str = "F32"

    @property
    def num_bytes(self) -> int:
        elements, block_bytes = BLOCKS[self.type]
        return self.num_rows * self.row // elements * block_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mixed:
    """What the rules of a mix ask of a model."""

    num_layers: int
    grouped: int
    num_experts: int
    is_70b: bool

    def is_sensitive(self, index: int) -> bool:
        """In the first and last eighth of the layers, and every third one between them."""
        eighth = self.num_layers // 8
        outer = index < eighth or index >= 7 * self.num_layers // 8
        return outer or (index - eighth) % 3 == 2


# For a kind of matrix in a mix: the wider type, and of which layers.
# Source: src/llama-quant.cpp:432-690 llama_tensor_get_type_impl.
_Rule = tuple[str, Callable[[_Mixed, int], bool]]


def _always(mixed: _Mixed, index: int) -> bool:
    return True


def _first_eighth(mixed: _Mixed, index: int) -> bool:
    return index < mixed.num_layers // 8


def _shares_keys(mixed: _Mixed, index: int) -> bool:
    return mixed.grouped >= 4


_VALUES: dict[str, tuple[_Rule, ...]] = {
    "Q2_K": (("Q4_K", _shares_keys), ("Q3_K", _always)),
    "Q3_K_M": (("Q5_K", lambda mixed, index: index < 2), ("Q4_K", _always)),
    "Q3_K_L": (("Q5_K", _always),),
    "IQ4_NL": (("Q5_K", _shares_keys),),
    "IQ4_XS": (("Q5_K", _shares_keys),),
    "Q4_K_M": (("Q6_K", _Mixed.is_sensitive),),
    "Q5_K_M": (("Q6_K", _Mixed.is_sensitive),),
    "Q4_K_S": (("Q5_K", lambda mixed, index: index < 4),),
}
_DOWN: dict[str, tuple[_Rule, ...]] = {
    "Q2_K": (("Q3_K", _always),),
    "Q3_K_M": (("Q5_K", lambda mixed, index: index < mixed.num_layers // 16), ("Q4_K", _always)),
    "Q3_K_L": (("Q5_K", _always),),
    "IQ4_NL": (("Q5_K", _first_eighth),),
    "IQ4_XS": (("Q5_K", _first_eighth),),
    "Q4_K_M": (("Q6_K", _Mixed.is_sensitive),),
    "Q5_K_M": (("Q6_K", _Mixed.is_sensitive),),
    "Q4_K_S": (("Q5_K", _first_eighth),),
}
_OUTPUT: dict[str, tuple[_Rule, ...]] = {
    "Q2_K": (("Q3_K", _always),),
    "Q3_K_M": (("Q4_K", _always),),
    "Q3_K_L": (("Q5_K", _always),),
}
_WIDER_OUTPUT = ("Q2_K", "Q3_K_S", "Q3_K_M", "IQ4_NL", "IQ4_XS", "Q4_K_S", "Q4_K_M")
_RULES = {"attn_v": _VALUES, "attn_qkv": _VALUES, "ffn_down": _DOWN, "attn_output": _OUTPUT}


def _mixed_type(name: str, index: int, file_type: str, mixed: _Mixed) -> str:
    """The type of a layer's matrix before its rows are looked at."""
    eight = mixed.num_experts == 8
    if eight and name in ("attn_v", "attn_k", "attn_qkv"):
        return "Q8_0" if name != "attn_qkv" else _ruled("attn_v", index, file_type, mixed)
    if eight and name == "attn_output":
        return "Q5_K" if file_type in _WIDER_OUTPUT else FILE_TYPES[file_type]
    chosen = _ruled(name.removesuffix("_exps"), index, file_type, mixed)
    if mixed.is_70b and name in ("attn_v", "attn_qkv") and chosen in ("Q3_K", "Q4_K"):
        return "Q5_K"
    return chosen


def _ruled(name: str, index: int, file_type: str, mixed: _Mixed) -> str:
    for wider, holds in _RULES.get(name, {}).get(file_type, ()):
        if holds(mixed, index):
            return wider
    return FILE_TYPES[file_type]


def _head_type(file_type: str, row: int) -> str:
    """Of the output matrix, and of a token table that is one with it."""
    default = FILE_TYPES[file_type]
    if row % BLOCKS[default][0]:
        return "Q8_0"
    return default if default == "Q8_0" else "Q6_K"


def _whole_blocks(chosen: str, row: int) -> str:
    """`chosen`, or what takes its place where a row is no whole number of blocks."""
    if row % BLOCKS[chosen][0] == 0:
        return chosen
    narrower = _NARROW_BLOCKS.get(chosen, chosen)
    return "F16" if row % BLOCKS[narrower][0] else narrower


def tensors(model: ModelSpec, file_type: str) -> list[Tensor]:
    """Every tensor of the file that `llama-quantize` makes of `model`.

    Kind: exact. Source: llama.cpp 0c1e570 `llama_tensor_get_type`, src/llama-quant.cpp:717.
    """
    mixed = _mixed(model)
    head = model.head
    tied = head is None or model.head_tied
    width, quantised = model.hidden_size, file_type not in UNQUANTISED
    table = FILE_TYPES[file_type]
    if quantised and tied:
        table = _head_type(file_type, width)
    found = [_stored("token_embd", width, model.embeddings[0].rows, table)]
    if head is not None and not tied:
        of_head = _head_type(file_type, width) if quantised else FILE_TYPES[file_type]
        found.append(_stored("output", head.in_features, head.out_features, of_head))
    outside = sum(norm.num_params for norm in (*model.embedding_norms, *model.final_norms))
    found.append(Tensor(name="output_norm", row=outside, num_rows=1))
    for index, layer in enumerate(layers_in_order(model)):
        found += _layer_tensors(layer, index, file_type, mixed)
    return found


def _stored(name: str, row: int, num_rows: int, chosen: str) -> Tensor:
    return Tensor(name=name, row=row, num_rows=num_rows, type=_whole_blocks(chosen, row))


def _mixed(model: ModelSpec) -> _Mixed:
    layers = layers_in_order(model)
    attention = layers[0].attentions[0]
    grouped = attention.num_attention_heads // attention.num_key_value_heads
    return _Mixed(
        num_layers=len(layers),
        grouped=grouped,
        num_experts=max((layer.moe.num_experts for layer in layers if layer.moe), default=0),
        is_70b=len(layers) == 80 and grouped > 1,
    )


def _layer_tensors(layer: Layer, index: int, file_type: str, mixed: _Mixed) -> Iterator[Tensor]:
    """Matrices in their types; norms, biases and a router in fp32."""
    in_linears = 0
    narrow = 0
    for linear in layer.linears:
        in_linears += linear.num_params
        narrow += linear.count * linear.out_features if linear.bias else 0
        for name, num_rows in _parts(linear):
            chosen = "F32"
            if name != "ffn_gate_inp":
                chosen = FILE_TYPES[file_type]
                if file_type not in UNQUANTISED:
                    chosen = _mixed_type(name, index, file_type, mixed)
            yield Tensor(
                name=name,
                row=linear.in_features,
                num_rows=num_rows,
                layer=index,
                num_experts=linear.count,
                type=_whole_blocks(chosen, linear.in_features),
            )
    narrow += layer.num_params - in_linears
    yield Tensor(name="norms and biases", row=narrow, num_rows=1, layer=index)


def _parts(linear: Linear) -> list[tuple[str, int]]:
    """Names and rows: a fused gate of experts is stored as two tensors."""
    name, num_rows = NAMES[linear.name], linear.count * linear.out_features
    if linear.count == 1:
        return [(name, num_rows)]
    if linear.name == "gate_up_proj":
        return [("ffn_gate_exps", num_rows // 2), ("ffn_up_exps", num_rows // 2)]
    return [(f"{name}_exps", num_rows)]


def unknown_matrices(model: ModelSpec) -> list[str]:
    """Names of matrices that no file of ours has."""
    names = {linear.name for layer, _ in model.layers() for linear in layer.linears}
    return sorted(names - set(NAMES))


def row_bytes(elements: int, stored: str) -> int:
    """Bytes of `elements` in blocks of a type. Kind: exact. Source: `BLOCKS`."""
    in_block, block_bytes = BLOCKS[stored]
    blocks: int = ceil_div(elements, in_block)
    return blocks * block_bytes
