"""The oldest cards that an engine has kernels for, by how weights are stored."""

from __future__ import annotations

from collections.abc import Mapping

from whichlora.errors import ConfigError
from whichlora.serving.base import Served


def check_quant_card(served: Served, cards: Mapping[str, tuple[tuple[str, float], ...]]) -> None:
    """Refuse quantised weights that an engine has no kernels for on the GPU.

    Args:
        cards: by `quant`, the releases from which on a compute capability is enough, oldest first.

    Raises:
        ConfigError: one line.
    """
    engine, quant, gpu = served.run.serving, str(served.run.quant), served.gpu
    if quant not in cards or gpu.compute_capability is None:
        return
    had = float(gpu.compute_capability)
    is_before = served.libraries.older
    needed = [least for since, least in cards[quant] if not is_before(engine, since)][-1]
    if had >= needed:
        return
    later = [since for since, least in cards[quant] if is_before(engine, since) and had >= least]
    newer = f"give libraries {engine}={later[0]} or newer, or " if later else ""
    raise ConfigError(
        f"quant: {engine} {getattr(served.libraries, engine)} has no kernels for {quant} on "
        f"{gpu.key}: it needs compute capability {needed} or newer; {newer}use gptq-int4, or "
        "weights that are not quantised"
    )
