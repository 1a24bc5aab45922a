"""What papers advise on rank, targets and learning rate of a low-rank adapter, for one run."""

from __future__ import annotations

from dataclasses import dataclass

from whichlora.methods import get_method
from whichlora.spec.run import ALL_LINEAR, RunConfig
from whichlora.units import format_count

LESS = "LoRA Learns Less and Forgets Less, arXiv:2405.09673"
REGRET = "LoRA Without Regret, Thinking Machines 2025"
CAPACITY = "arXiv:2404.05405"
RSLORA = "rsLoRA, arXiv:2312.03732"
COMPARISON = "PEFT's method comparison, Llama-3.2-3B on MetaMathQA"

LORA = "peft.LoraConfig"  # what the papers are about, with DoRA and 4-bit bases
BITS_PER_PARAMETER = 2  # that training can store. Source: Allen-Zhu & Li 2024, CAPACITY
BITS_PER_TOKEN = 1  # of a text to be memorised, at most. Source: REGRET
HIGH_RANK = 64  # from here on rsLoRA's paper and PEFT's comparison differ from alpha / r


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One rule for one setting, and where its evidence is."""

    setting: str
    text: str
    source: str

    @property
    def in_words(self) -> str:
        return f"{self.setting}: {self.text} ({self.source})"


def advice(
    run: RunConfig, num_trainable_params: int, num_tokens: float | None = None
) -> tuple[Advice, ...]:
    """The rules for the adapter of `run`; none where its method is no LoRA.

    Args:
        num_tokens: of the training data, once; None where nobody says.
    """
    if run.phase != "finetune" or get_method(run.method).peft_class != LORA:
        return ()
    return (_rank(run, num_trainable_params, num_tokens), *_scale(run), _targets(run), _rate())


def _rank(run: RunConfig, num_trainable_params: int, num_tokens: float | None) -> Advice:
    most = num_trainable_params * BITS_PER_PARAMETER / BITS_PER_TOKEN
    text = (
        f"{format_count(num_trainable_params)} parameters of rank {run.r} can memorise about "
        f"{format_count(most)} tokens, at 2 bits a parameter and 1 bit a token"
    )
    if num_tokens is None:
        text += "; a rank limits what is learnt only where the data has more"
    elif num_tokens <= most:
        text += f"; the data has {format_count(num_tokens)}, so a higher rank need not help"
    else:
        text += f"; the data has {format_count(num_tokens)}, so compare a higher rank"
    return Advice(setting="rank", text=text, source=f"an upper bound: {REGRET}; {CAPACITY}")


def _scale(run: RunConfig) -> tuple[Advice, ...]:
    if run.r < HIGH_RANK or run.use_rslora:
        return ()
    text = (
        "turn on use_rslora: alpha/r shrinks what a high rank learns, alpha/sqrt(r) does not; rank "
        "64 so reaches 51.3 %, rank 32 with alpha/r 47.8 %"
    )
    return (Advice(setting="scale", text=text, source=f"{RSLORA}; {COMPARISON}"),)


def _targets(run: RunConfig) -> Advice:
    text = "all linear layers, as here"
    if run.target_modules != (ALL_LINEAR,):
        text = "take all linear layers, the MLP first: attention alone learns less"
    return Advice(setting="targets", text=text, source=f"experiments of {LESS}; {REGRET}")


def _rate() -> Advice:
    text = (
        "about 10 times that of full fine-tuning, 15 times below some 100 steps, whatever the "
        "rank; try several, LoRA is sensitive to it"
    )
    return Advice(setting="learning rate", text=text, source=f"sweeps of {REGRET}; {LESS}")
