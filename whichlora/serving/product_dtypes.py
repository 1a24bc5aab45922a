"""Dtypes in which an engine multiplies, by how weights are stored: what it refuses."""

from __future__ import annotations

from collections.abc import Mapping

from whichlora.errors import ConfigError
from whichlora.serving.base import Served
from whichlora.spec.versions import ByRelease
from whichlora.spec.words import alternatives

FLOAT16, BFLOAT16, FLOAT32 = "float16", "bfloat16", "float32"
NARROW = (BFLOAT16, FLOAT16)
BF16_CAPABILITY = 8.0
_PRECISIONS = {BFLOAT16: "bf16", FLOAT16: "fp16", FLOAT32: "fp32"}


def dtype_of(served: Served) -> str:
    """Of the products, as engines and frameworks spell it."""
    if served.dtypes.compute_bytes == 4:
        return FLOAT32
    return FLOAT16 if served.run.precision.startswith("fp16") else BFLOAT16


def check_card_dtype(served: Served, without_bf16: tuple[str, ...]) -> None:
    """Refuse a dtype that an engine does not serve in on a GPU that lacks bf16.

    Args:
        without_bf16: the dtypes that it does there.

    Raises:
        ConfigError: one line.
    """
    dtype = dtype_of(served)
    if served.gpu.has_bf16 or dtype in without_bf16:
        return
    precisions = alternatives([_PRECISIONS[each] for each in without_bf16])
    raise ConfigError(
        f"precision: {served.run.serving} does not serve in {dtype} on {served.gpu.key}, which has "
        f"no bf16; give precision {precisions}"
    )


def check_quant_dtype(served: Served, dtypes: Mapping[str, ByRelease[tuple[str, ...]]]) -> None:
    """Refuse a dtype that the kernels of quantised weights do not multiply in.

    Args:
        dtypes: by `quant`, those that are accepted.

    Raises:
        ConfigError: one line.
    """
    quant, dtype = str(served.run.quant), dtype_of(served)
    if quant not in dtypes:
        return
    accepted = served.libraries.value_of(served.engine.library, dtypes[quant])
    if dtype not in accepted:
        precisions = alternatives([_PRECISIONS[each] for each in accepted])
        raise ConfigError(
            f"precision: {served.release} multiplies {quant} in "
            f"{alternatives(accepted)}, got {dtype}; give precision {precisions}, or another quant"
        )


def check_model_dtype(served: Served, float16_refused: Mapping[str, str]) -> None:
    """Refuse float16 for a model that an engine does not serve in it.

    Args:
        float16_refused: by `model_type`, the first release that does so.

    Raises:
        ConfigError: one line.
    """
    model, library = served.model, served.engine.library
    since = float16_refused.get(model.model_type)
    if dtype_of(served) != FLOAT16 or not served.libraries.reaches(library, since):
        return
    if served.gpu.has_bf16:
        raise ConfigError(
            f"precision: {served.release} does not serve {model.model_type} in {FLOAT16}; give "
            "precision bf16"
        )
    raise ConfigError(
        f"precision: {served.release} does not serve {model.model_type} in {FLOAT16}, and "
        f"{served.gpu.key} has no bf16; give precision fp32 and quant none, or a GPU of compute "
        f"capability {BF16_CAPABILITY} or newer"
    )
