"""What engines' words for dtypes and ways of quantising mean, in commands and in logs."""

from __future__ import annotations

# The engine's name of a quantisation, and ours.
QUANTISED = {
    **dict.fromkeys(("awq", "awq_marlin"), "awq-int4"),
    **dict.fromkeys(("gptq", "gptq_marlin"), "gptq-int4"),
    "bitsandbytes": "nf4",
    "fp8": "fp8",
    "modelopt": "fp8",
    "modelopt_fp4": "nvfp4",
    "modelopt_mxfp8": "mxfp8",
}
PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32"}
