"""How the GPUs of an engine divide experts: each by its width, or whole among them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist

from whichlora.errors import ConfigError
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.layer import Moe
from whichlora.spec.numeric import ceil_div


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRanks:
    """How experts are divided among all GPUs of an engine.

    Args:
        copies: of everything but experts, each with its own sequences (data-parallel ranks).
        whole: GPUs among which experts are divided as they are (expert parallel); 1 for none.
        width: GPUs that share the width of each expert.
        redundant: copies of experts that are held beside those of the model.
        gathers_all: whether MLPs, shared experts and the head are divided among all GPUs, too, and
            see the tokens of all copies.
    """

    copies: int = 1
    whole: int = 1
    width: int = 1
    redundant: int = 0
    gathers_all: bool = False

    @property
    def gathered(self) -> int:
        """Copies whose tokens MLPs, shared experts and the head see."""
        return self.copies if self.gathers_all else 1

    def held(self, num_experts: int) -> int:
        """Experts of the fullest GPU.

        Kind: exact. Source: vLLM 0.33.0 fused_moe/expert_map_manager.py:22 `determine_expert_map`;
        models/deepseek_v2.py:338 n_redundant_experts.
        """
        held: int = ceil_div(num_experts + self.redundant, self.whole)
        return held

    def spread(self, chosen: int) -> float:
        """How many more tokens the fullest GPU has than the mean, times the root of all tokens.

        Experts are chosen by chance; those of a trained model may be less even.

        Args:
            chosen: experts of each token.

        Kind: estimate: the largest of `whole` normal deviates. Source: Blom 1958, section 6.9.
        """
        if self.whole == 1:
            return 0.0
        largest = NormalDist().inv_cdf((self.whole - 0.375) / (self.whole + 0.25))
        return largest * math.sqrt((self.whole - 1) / chosen)

    def of_rank(self, moe: Moe) -> Moe:
        """The experts of one GPU that holds `held` of them, whose widths are divided already."""
        held = self.held(moe.num_experts)
        linears = tuple(replace(linear, count=held) for linear in moe.expert.linears)
        return replace(moe, expert=replace(moe.expert, linears=linears))


def check_experts(model: ModelSpec, ranks: ExpertRanks) -> None:
    """Refuse what the experts of `model` cannot be divided into.

    Raises:
        ConfigError: one line.
    """
    for layer, _ in model.layers():
        if layer.moe is None:
            continue
        experts = layer.moe.num_experts
        if ranks.whole > 1 and experts + ranks.redundant < 2 * ranks.whole:
            raise ConfigError(
                f"serving: {experts} experts of {model.name} are fewer than two for each of "
                f"{ranks.whole} GPUs, which is not predicted; use fewer GPUs"
            )
        if ranks.redundant and (experts + ranks.redundant) % ranks.whole:
            raise ConfigError(
                f"num_redundant_experts: {experts} and {ranks.redundant} experts are not equally "
                f"many on {ranks.whole} GPUs; give {-experts % ranks.whole} or a multiple of "
                f"{ranks.whole} more"
            )
