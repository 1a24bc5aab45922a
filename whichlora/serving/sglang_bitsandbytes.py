"""SGLang's weights by bitsandbytes: files of 16 bit become nf4 while it loads them."""

from __future__ import annotations

from dataclasses import replace

from whichlora.errors import ConfigError
from whichlora.serving.base import Served
from whichlora.spec.checkpoint import stored_quant
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.run import BNB_QUANTS

LOADED = ("nf4", "nf4-dq")
# Model types whose class says how its parts are joined, without which the loader raises, by the
# first release read that has it. Source: `bitsandbytes_stacked_params_mapping` of srt/models in
# 0.4.6, 0.5.4, 0.5.10 and 0.5.23; Mistral, Phi-3 and InternLM3 are Llama's.
_JOINS = {
    **dict.fromkeys(("llama", "mistral", "phi3", "internlm3", "qwen2", "qwen3"), "0"),
    **dict.fromkeys(("gemma2", "gemma3", "gemma3_text", "qwen2_vl", "qwen2_5_vl"), "0"),
    **dict.fromkeys(("gemma3n", "gemma3n_text", "arcee", "solar", "apertus"), "0.5.4"),
    "exaone4": "0.5.10",
    **dict.fromkeys(("gemma4", "gemma4_text"), "0.5.23"),
}


def stored_dtypes(served: Served) -> Dtypes:
    """The dtypes in which weights are stored: nf4 with quantised scales, whatever is asked for.

    Kind: exact. Source: SGLang 0.5.23 srt/model_loader/loader.py:2854 compress_statistics=True.
    """
    if served.dtypes.quant in LOADED and stored_quant(served.model.config) not in BNB_QUANTS:
        return replace(served.dtypes, quant="nf4-dq")
    return served.dtypes


def flags(served: Served) -> tuple[str, ...]:
    """Of its command. Source: SGLang 0.5.23 srt/arg_groups/fields/model.py:77."""
    if served.run.quant not in BNB_QUANTS:
        return ()
    return ("--load-format bitsandbytes", "--quantization bitsandbytes")


def check(served: Served, ranks: int) -> None:
    """Refuse what its loader refuses.

    Source: SGLang 0.5.23 srt/model_loader/loader.py:2908, :2875.

    Raises:
        ConfigError: one line.
    """
    quant, model = served.run.quant, served.model
    if quant not in BNB_QUANTS:
        return
    is_stored = stored_quant(model.config) in BNB_QUANTS
    since = _JOINS.get(model.model_type)
    if since is None or served.libraries.older("sglang", since):
        later = "" if since is None else f" before {since}"
        raise ConfigError(
            f"serving: sglang loads no bitsandbytes weights of {model.model_type}{later}, got "
            f"quant {quant}; use awq-int4 or gptq-int4 of merged weights"
        )
    if is_stored and ranks > 1:
        raise ConfigError(
            f"serving: sglang divides no files of {model.name}, which bitsandbytes wrote, among "
            f"{ranks} GPUs; give tp_size 1, or files of 16 bit"
        )
    if not is_stored and quant not in LOADED:
        raise ConfigError(
            f"serving: sglang makes nf4 of files of 16 bit, got quant {quant}; give nf4"
        )
