"""What an engine has no kernels for, or is not predicted, by how weights are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from whichlora.errors import ConfigError
from whichlora.serving.base import Served
from whichlora.spec.checkpoint import (
    has_fp8_blocks,
    is_compressed,
    names_four_bit_cache,
    stored_quant,
)
from whichlora.spec.versions import ByRelease

# The oldest cards that have AWQ's kernels, in every release of vLLM and SGLang.
AWQ_CAPABILITY = 7.5


@dataclass(frozen=True)
class QuantCards:
    """The compute capability that is enough for an engine's kernels, by `quant`.

    Attributes:
        weights: of weights unless what follows says otherwise.
        compressed: of those that llm-compressor wrote.
        blocks: of those whose blocks of 128 x 128 share a scale.
        experts: of models with experts, which other kernels multiply.
    """

    weights: Mapping[str, ByRelease[float]]
    compressed: Mapping[str, ByRelease[float]] = field(default_factory=dict)
    blocks: Mapping[str, ByRelease[float]] = field(default_factory=dict)
    experts: Mapping[str, ByRelease[float]] = field(default_factory=dict)

    def of(self, served: Served, quant: str) -> tuple[ByRelease[float], str]:
        """Those of a run, () for any card, and what it is of the weights that asks for them."""
        config = served.model.config
        if served.model.has_experts and quant in self.experts:
            return self.experts[quant], f"experts in {quant}"
        if has_fp8_blocks(config) and quant in self.blocks:
            return self.blocks[quant], f"{quant} in blocks"
        if is_compressed(config) and quant in self.compressed:
            return self.compressed[quant], quant
        return self.weights.get(quant, ()), quant


def offered_quants(served: Served) -> tuple[str, ...]:
    """Storage in 4 bits that would serve the model in less memory; () where none is to be had.

    Kernels of AWQ and GPTQ multiply in 16 bit alone; a checkpoint in mxfp4 is loaded so.
    """
    in_mxfp4 = stored_quant(served.model.config) == "mxfp4"
    if served.dtypes.quant != "none" or served.dtypes.compute_bytes == 4 or in_mxfp4:
        return ()
    has_awq = float(served.gpu.compute_capability or AWQ_CAPABILITY) >= AWQ_CAPABILITY
    return ("awq-int4", "gptq-int4") if has_awq else ("gptq-int4",)


def check_quant_card(served: Served, cards: QuantCards) -> None:
    """Refuse quantised weights that an engine has no kernels for on the GPU.

    A checkpoint in mxfp4 is loaded so, whatever is asked for. A merged copy of it is 16 bit, and is
    asked for by the name of such a copy.

    Raises:
        ConfigError: one line.
    """
    library, quant, gpu = served.engine.library, str(served.run.quant), served.gpu
    is_packed = stored_quant(served.model.config) == "mxfp4"
    if is_packed:
        quant = "mxfp4"
    by_release, what = cards.of(served, quant)
    if not by_release or gpu.compute_capability is None:
        return
    had = float(gpu.compute_capability)
    first = by_release[0][0]
    if served.libraries.older(library, first):
        raise ConfigError(
            f"quant: {library} {getattr(served.libraries, library)} does not read {quant}, {first} "
            f"or newer does; give libraries {library}={first}, or another quant"
        )
    needed = served.libraries.value_of(library, by_release)
    if had >= needed:
        return
    enough = [since for since, least in by_release if had >= least]
    later = next((since for since in enough if served.libraries.older(library, since)), None)
    newer = f"give libraries {library}={later} or newer, or " if later else ""
    instead = "use gptq-int4, or weights that are not quantised"
    if is_packed:
        instead = (
            f"{served.model.name} is stored so: name a 16-bit copy of the model, such as one that "
            "ends in -BF16"
        )
    elif stored_quant(served.model.config) == quant:
        instead = f"{served.model.name} is stored so: name another copy, such as one in 16 bit"
    raise ConfigError(
        f"quant: {served.release} has no kernels for {what} on "
        f"{gpu.key}: it needs compute capability {needed} or newer; {newer}{instead}"
    )


def check_named_cache(served: Served) -> None:
    """Refuse a cache in 4 bits that the files name, unless the run states another.

    Raises:
        ConfigError: one line.
    """
    name = served.model.name
    if served.options["kv_cache_dtype"] == "auto" and names_four_bit_cache(served.model.config):
        raise ConfigError(
            f"kv_cache_dtype: the files of {name} name a cache in 4 bits, which is not predicted; "
            "give bfloat16 or fp8_e4m3"
        )
