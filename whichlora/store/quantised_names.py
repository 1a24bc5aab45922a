"""Names of quantised copies: `-AWQ`, `-GPTQ-Int4`, `-bnb-4bit`, `-FP8`, `-GGUF`, `:q4_K_M`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

AUTOROUND_PACKING = "auto_round:auto_gptq"
_GROUP = re.compile(r"(?:32|64|128)g|g(?:32|64|128)")
_GGUF_TYPE = re.compile(r"q[2-8](_[0-9k]\w*)?|iq[1-4](_\w+)?")
# Types that are no quantisation, with the precision that says the same of other files.
PLAIN_GGUF_TYPES = {"F16": "fp16", "BF16": "bf16", "F32": "fp32"}
# Those by the words of file names and of Ollama's tags.
PLAIN_WORDS = {name.lower(): name for name in PLAIN_GGUF_TYPES} | {"fp16": "F16"}


@dataclass(frozen=True, slots=True)
class StoredForm:
    """How the name of a quantised copy says that its weights are stored.

    Args:
        label: the format, in words.
        instead: the setting that predicts its bytes from the model that it was made from.
        config: the `quantization_config` that such a copy has; None for one not predicted as such.
    """

    label: str
    instead: str
    config: Mapping[str, Any] | None = None


def _gptq(marks: Sequence[str]) -> StoredForm:
    bits = 8 if {"int8", "8bit"} & {*marks} else 4
    config = {"quant_method": "gptq", "bits": bits, **_group(marks)}
    return StoredForm("GPTQ", f"quant gptq-int{bits}", config)


def _awq(marks: Sequence[str]) -> StoredForm:
    config = {"quant_method": "awq", "bits": 4, **_group(marks)}
    return StoredForm("AWQ", "quant awq-int4", config)


def _autoround(marks: Sequence[str]) -> StoredForm:
    """Symmetric, and packed as GPTQ does, which engines load as such.

    Source: intel/auto-round, `auto_round:auto_gptq`; vLLM 0.28.0 quantization/inc.
    """
    form = _gptq(marks)
    config = {**(form.config or {}), "quant_method": "auto-round", "sym": True}
    return StoredForm("AutoRound", form.instead, config | {"packing_format": AUTOROUND_PACKING})


def _w4a16(marks: Sequence[str]) -> StoredForm:
    """Source: the copies of RedHatAI (`quantized.w4a16`), packed by llm-compressor."""
    weights = {"type": "int", "num_bits": 4, "strategy": "group", "symmetric": True}
    weights["group_size"] = _group(marks).get("group_size", 128)
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }
    return StoredForm("W4A16", "quant w4a16, as vllm and sglang serve it", config)


def _int8(marks: Sequence[str]) -> StoredForm:
    """Integers of 8 bits by llm-compressor, beside inputs of 16 or 8 bits: no config of theirs."""
    is_wide = "w8a16" in marks
    instead = "gptq-int8" if is_wide else "fp8"
    label = "W8A16" if is_wide else "W8A8"
    return StoredForm(label, f"quant {instead}, whose weights take as many bytes")


def _bitsandbytes(marks: Sequence[str]) -> StoredForm:
    """Source: the copies of Unsloth, which are nf4 with a nested quantisation."""
    config: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    config |= {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    if {"int8", "8bit"} & {*marks}:
        config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    return StoredForm("bitsandbytes", "method qlora", config if "bnb" in marks else None)


def _gguf(marks: Sequence[str]) -> StoredForm:
    mixed = "UD-" if "ud" in marks else ""  # Unsloth's dynamic mixes
    types = [mixed + mark.upper() for mark in marks if _GGUF_TYPE.fullmatch(mark)]
    types += [PLAIN_WORDS[mark] for mark in marks if mark in PLAIN_WORDS]
    instead = "--serving llama-cpp, or with method qlora for 4 bits"
    config = {"quant_method": "gguf", **({"file_type": types[0]} if types else {})}
    return StoredForm("GGUF", instead, config)


def gguf_type_named(word: str) -> str:
    """The type of a GGUF file that `word` names, such as q4_k_m or gguf-q4_k_m; empty of others."""
    name = re.sub(r"^gguf[-_:]", "", word.lower()).upper()
    is_mix = _GGUF_TYPE.fullmatch(name.lower().removeprefix("ud-"))
    is_type = is_mix or name in ("MXFP4_MOE", *PLAIN_GGUF_TYPES)
    return name if is_type else ""


def _fp8(marks: Sequence[str]) -> StoredForm:
    """Qwen's copies are fine-grained, in blocks of 128; Meta's leave attention in 16 bit.

    Source: model cards; the Llama 3 paper, arXiv:2407.21783, section 6.2. Of Meta's 405B the MLPs
    of the first and the last layer are in 16 bit, too, which is left out: 1 % of its bytes.
    """
    config: dict[str, Any] = {"quant_method": "fp8"}
    if "qwen" in marks:
        config["weight_block_size"] = [128, 128]
    if "meta-llama" in marks:
        config["modules_to_not_convert"] = ["re:.*self_attn.*"]
    return StoredForm("FP8", "quant fp8, as vllm and sglang serve it", config)


def _nvfp4(marks: Sequence[str]) -> StoredForm:
    """Source: the copies of NVIDIA, whose ModelOpt narrows inputs, too, and of RedHatAI.

    Those of llm-compressor leave linear attention in 16 bit, as its examples do.
    """
    label = "NVFP4A16" if {"nvfp4a16", "a16"} & {*marks} else "NVFP4"
    floats = {"type": "float", "num_bits": 4, "group_size": 16}
    is_own = "nvidia" in marks
    config = {
        "quant_method": "modelopt" if is_own else "compressed-tensors",
        "quant_algo": "NVFP4",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": floats,
                **({"input_activations": floats} if label == "NVFP4" else {}),
            }
        },
        "ignore": ["lm_head"] if is_own else ["lm_head", "re:.*linear_attn.*"],
    }
    return StoredForm(label, f"quant {label.lower()}, as vllm and sglang serve it", config)


def _fp4(marks: Sequence[str]) -> StoredForm:
    """NVIDIA's copies that say no more than FP4 are NVFP4."""
    return _nvfp4(marks) if "nvidia" in marks else _bitsandbytes(marks)


def _mxfp8(marks: Sequence[str]) -> StoredForm:
    config = {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head"]}
    return StoredForm("MXFP8", "quant mxfp8, as vllm and sglang serve it", config)


def _group(marks: Sequence[str]) -> dict[str, int]:
    sizes = [int(mark.strip("g")) for mark in marks if _GROUP.fullmatch(mark)]
    return {"group_size": sizes[0]} if sizes else {}


# Words that mark a quantised copy, and what the copy is; the first that is there decides.
_QUANTISED: tuple[tuple[re.Pattern[str], Callable[[Sequence[str]], StoredForm]], ...] = (
    (re.compile(r"gptq"), _gptq),
    (re.compile(r"awq"), _awq),
    (re.compile(r"w4a16"), _w4a16),
    (re.compile(r"autoround"), _autoround),
    (re.compile(r"fp8"), _fp8),
    (re.compile(r"w8a(16|8)"), _int8),
    (re.compile(rf"gguf|ggml|{_GGUF_TYPE.pattern}"), _gguf),
    (
        re.compile(r"exl[23]|mlx|hqq|aqlm|eetq|mxfp4(a16)?"),
        lambda marks: StoredForm(
            marks[0].upper(),
            "method qlora for 4 bits, or where it is served a quant such as awq-int4 or nvfp4",
        ),
    ),
    (re.compile(r"nvfp4(a16)?"), _nvfp4),
    (re.compile(r"mxfp8"), _mxfp8),
    (re.compile(r"bnb|[48]bit|nf4|int[48]"), _bitsandbytes),
    (re.compile(r"fp4"), _fp4),
)
# Words that only say more of such a copy.
_OF_A_COPY = re.compile(
    rf"{_GROUP.pattern}|actorder_(true|false)|dynamic|unsloth|static|quantized|ud|{'|'.join(PLAIN_WORDS)}"
)

# One of the files that a large one is cut into. Source: llama.cpp 0c1e570 src/llama.cpp,
# `llama_split_path`.
_PART = re.compile(r"-\d{5}-of-\d{5}(?=\.gguf$)")


def quantised(name: str, owner: str = "") -> tuple[StoredForm, str] | None:
    """How a quantised copy is stored, and its name without what says so; None for another model.

    Args:
        owner: who uploaded it, where the name says so.
    """
    whole = _PART.sub("", name.lower())
    parts = re.split(r"[-:/\s]+|\.(?=gg|i?q\d|w[48]a)|_(?=gptq|awq|gguf|bnb)", whole)
    marks = [part for part in parts if any(pattern.fullmatch(part) for pattern, _ in _QUANTISED)]
    for pattern, form in _QUANTISED:
        first = [mark for mark in marks if pattern.fullmatch(mark)]
        if first:
            more = [part for part in parts if _OF_A_COPY.fullmatch(part)]
            base = [part for part in parts if part not in (*marks, *more)]
            return form([*first, *marks, *more, owner.lower()]), " ".join(base)
    return None
