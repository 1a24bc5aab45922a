"""Whether GPUs can share the widths of MLPs and experts, and what shares a scale stays whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from whichlora.errors import ConfigError
from whichlora.serving.base import Served
from whichlora.serving.expert_ranks import ExpertRanks, check_experts
from whichlora.serving.rank import heads_fault
from whichlora.spec.checkpoint import scaled_together
from whichlora.spec.layer import Mlp
from whichlora.spec.options import OptionValue
from whichlora.spec.run import CHECKPOINT_QUANTS
from whichlora.spec.words import alternatives

# Widths that their authors' own integer copies have instead, so that GPUs can share them: Qwen's of
# 72B. Source: the hub's config.json of Qwen2.5-72B-Instruct-GPTQ-Int4.
_PADDED = {29_568: 29_696}


def check_widths(
    served: Served,
    option: str,
    staged_by: str,
    *,
    ranks_of: Callable[[Served], int],
    experts_of: Callable[[Served], ExpertRanks],
    whole: tuple[str, OptionValue],
) -> None:
    """Refuse GPUs among which a width leaves a rest, or that cut what shares a scale.

    Args:
        ranks_of: GPUs that share attention, which MLPs are divided among, too.
        experts_of: how experts are divided.
        whole: the engine's option that leaves experts whole, and its value for these GPUs.

    Source: vLLM 0.33.0 `divide` of distributed/utils.py; `FusedMoE`, which asserts the same of
    experts; SGLang 0.5.23 srt/distributed/utils.py.

    Raises:
        ConfigError: one line, which names sizes that divide.
    """

    def fault_of(asked: Served) -> str:
        ranks, experts = ranks_of(asked), experts_of(asked)
        return next(filter(None, _faults(asked, ranks, experts)), "")

    def at(name: str, value: OptionValue) -> Served:
        return replace(served, options={**served.options, name: value})

    fault = fault_of(served)
    if not fault:
        return
    gpus = served.count(option) or 1
    sizes = [
        size
        for size in range(2, gpus)
        for asked in [at(option, size)]
        if _shares_heads(asked, ranks_of(asked), experts_of(asked)) and not fault_of(asked)
    ]
    ways = [f"{option} {alternatives(sizes)}"] if sizes else []
    if served.model.has_experts and _is_whole(at(*whole), experts_of) and not fault_of(at(*whole)):
        ways.append(f"{whole[0]} {str(whole[1]).lower()}")
    ways.append(f"{option} 1 with {staged_by} {gpus * (served.count(staged_by) or 1)}")
    raise ConfigError(f"{option}: {fault}; use {', or '.join(ways)}")


def _shares_heads(served: Served, ranks: int, experts: ExpertRanks) -> bool:
    """Whether copies and whole experts divide these GPUs, and each copy's share the heads."""
    is_divisor = experts.width * experts.whole == ranks * experts.copies > 0
    return is_divisor and not heads_fault(served.model, ranks)


def _is_whole(served: Served, experts_of: Callable[[Served], ExpertRanks]) -> bool:
    """Whether there are enough experts to have some whole on each GPU."""
    try:
        check_experts(served.model, experts_of(served))
    except ConfigError:
        return False
    return True


def _faults(served: Served, ranks: int, experts: ExpertRanks) -> Iterator[str]:
    """What cannot be shared; empty where it can."""
    for layer, _ in served.model.layers():
        if layer.mlp is not None:
            yield _fault(served, "an MLP", layer.mlp, ranks * experts.gathered)
        if layer.moe is None:
            continue
        yield _fault(served, "each expert", layer.moe.expert, experts.width, is_routed=True)
        if layer.moe.shared is not None and experts.whole == 1:
            yield _fault(served, "the shared expert", layer.moe.shared, ranks * experts.gathered)


def _fault(served: Served, what: str, mlp: Mlp, ranks: int, *, is_routed: bool = False) -> str:
    """Why `ranks` cannot share `mlp`; empty where they can."""
    each, rest = divmod(mlp.width, ranks)
    if rest:
        return f"the width {mlp.width} of {what} can't be divided by {ranks}"
    scaled = _scaled(served, mlp, is_routed=is_routed)
    if served.run.quant in CHECKPOINT_QUANTS:
        each = _PADDED.get(mlp.width, mlp.width) // ranks
    if ranks == 1 or each % scaled == 0:
        return ""
    return (
        f"the width {mlp.width} of {what} divided by {ranks} is {each}, no multiple of the "
        f"{scaled} that share a scale in {served.run.quant}"
    )


def _scaled(served: Served, mlp: Mlp, *, is_routed: bool) -> int:
    """What a GPU's part of a width must be a multiple of, for its scales.

    Blocks of fp8 bind routed experts under older releases of vLLM; 0.18 has served 192 of each of
    MiniMax M2.5's to a GPU (`benchmarks/serving_scripts.csv`). For those with groups of integers
    both engines have kernels that halve the group.
    Kind: exact. Source: vLLM 0.33.0 `validate_fp8_block_shape`, quantization/utils/fp8_utils.py,
    which SGLang's fp8.py has as well; `AWQLinearMethod.create_weights` of both ("not aligned with
    the quantized weight shape"), and that of GPTQ; `MoeWNA16Method`;
    github.com/vllm-project/vllm/issues/17569, 21695, 25292.
    """
    quant = served.run.quant or "none"
    is_packed = all(linear.quantisable for linear in mlp.linears)
    is_free = is_routed and not (quant == "fp8" and served.libraries.older("vllm", "0.18"))
    if not is_packed or is_free:
        return 1
    return scaled_together(served.model.config, quant, served.dtypes.quant_group_size)
