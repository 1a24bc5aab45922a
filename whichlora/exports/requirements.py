"""What pip installs for a run beside the `profile` extra, for whoever installs it or says how."""

from __future__ import annotations

from collections.abc import Iterator

from whichlora.exports.train_script.lines import predicted_versions
from whichlora.memory.optimizer import library_of
from whichlora.predict.resolve import layout_of
from whichlora.spec.run import CHECKPOINT_QUANTS, RunConfig
from whichlora.trainers import get_trainer, requirement
from whichlora.trainers.liger import USE

# Compiled against the torch that is there, which pip would hide from their setup.
# Source: their own installation pages.
_COMPILED = frozenset({"flash-attn", "gptqmodel"})


def requirements(run: RunConfig) -> Iterator[str]:
    """The packages that `train.py` of `run` imports, or its libraries do.

    Source: transformers 5.23 `integrations/deepspeed.py`, `modeling_flash_attention_utils.py`,
    `integrations/liger.py`, and `validate_environment` of `quantizers/`.

    Raises:
        ConfigError: a strategy that the Trainer has no key for.
    """
    layout = layout_of(run)
    if layout is not None and "deepspeed" in layout.training_arguments(run):
        yield "deepspeed"
    if get_trainer(run.trainer).arguments(run).get(USE.name):
        yield "liger-kernel"
    if run.attn == "flash_attention_2":
        yield "flash-attn"
    if library_of(run.optimizer) == "torchao":
        yield "torchao"
    if run.quant in CHECKPOINT_QUANTS:
        yield from (("optimum",) if run.quant.startswith("gptq") else ())
        yield "gptqmodel"
    if run.quant == "mxfp4":
        yield "kernels"
    if run.images:
        yield "torchvision"
    if run.audios:
        yield "soundfile"
    if of_trainer := requirement(run):
        yield of_trainer


def packages(run: RunConfig) -> list[str]:
    """Libraries that `train.py` of `run` imports, and what `requirements` says."""
    further = list(requirements(run))
    named = {package.partition("==")[0] for package in further}
    libraries = (name for name in predicted_versions(run) if name not in named)
    return [*libraries, "accelerate", *further]  # the Trainer needs it


def install_commands(run: RunConfig) -> list[str]:
    """Lines of shell that install them, once torch is there."""
    needed = list(requirements(run))
    plain = [package for package in needed if package not in _COMPILED]
    compiled = [package for package in needed if package in _COMPILED]
    if compiled:
        plain += ["ninja", "wheel"]  # which such a setup takes for granted
    options = {"pip install": plain, "pip install --no-build-isolation": compiled}
    return [f"{command} {' '.join(packages)}" for command, packages in options.items() if packages]
