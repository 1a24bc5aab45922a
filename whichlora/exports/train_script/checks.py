"""What `train.py` can't train is refused before it is written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whichlora.errors import ConfigError
from whichlora.exports.checks import require_library, runs_in_trainer
from whichlora.exports.recipe import Recipe
from whichlora.families import writes_transcripts
from whichlora.methods import get_method
from whichlora.spec.data_format import TRANSCRIPTS, DataFormat
from whichlora.spec.plan import Collator
from whichlora.spec.run import BNB_QUANTS, RunConfig
from whichlora.tasks import rows_of
from whichlora.trainers import get_trainer


def check(recipe: Recipe) -> None:
    """Refuse a recipe that the script can't perform.

    Args:
        recipe: its run with every default filled in.

    Raises:
        ConfigError: what can't be trained, and what to do instead.
    """
    run, data_format = recipe.run, recipe.data_format
    if run.phase != "finetune":
        raise ConfigError(f"phase: {run.phase} has nothing to train; a job needs finetune")
    trainer = get_trainer(run.trainer)
    require_library(run, "train.py")
    if runs_in_trainer(run) and run.loss_head not in ("hf", "liger"):
        raise ConfigError(
            f"loss_head: {run.loss_head} can't be trained by the job; accepted are hf and liger"
        )
    if run.quantize_moe_experts:
        raise ConfigError(
            "quantize_moe_experts: train.py leaves experts in 16 bit; use --to axolotl, or leave "
            "it out"
        )
    _check_media(recipe)
    data_format.require(rows_of(run))
    adapted = trainer.makes_adapters and not get_method(run.method).trains_base
    keeps_base = trainer.keeps_base(run)
    if adapted and run.quant in BNB_QUANTS and run.prepare_kbit == keeps_base:
        does = "does not prepare" if keeps_base else "prepares"
        raise ConfigError(
            f"prepare_kbit: {run.prepare_kbit}, but trainer {run.trainer} {does} a quantised base; "
            "leave it out"
        )
    if adapted and run.quant == "none" and run.narrows_adapters:
        raise ConfigError(
            f"train.py: trainer {run.trainer} makes adapters in fp32, not those of precision "
            f"{run.precision} and adapter_dtype {run.adapter_dtype}; use precision bf16 or "
            "bf16-no-autocast, and leave adapter_dtype out"
        )
    if recipe.weights == "random" and recipe.model_config is None:
        raise ConfigError("weights: random needs the config of the model")
    transcribes = writes_transcripts(recipe.model_config or {})
    if transcribes != (data_format == TRANSCRIPTS):
        takes = "clips with transcripts: audio, text" if transcribes else "messages or texts"
        raise ConfigError(
            f"train.py: rows have {data_format.describe()}, and {run.model} learns from {takes}; "
            "give such rows, or another model"
        )
    if has_targets(recipe.model_config) and not run.task:
        _check_targets(run, data_format, recipe.reader)


def _check_media(recipe: Recipe) -> None:
    """Refuse images or sound that the job can't read.

    Raises:
        ConfigError: there are images without rows that name them, or settings that exclude them.
    """
    run, data_format, reader = recipe.run, recipe.data_format, recipe.reader
    for setting in ("images", "audios"):
        if getattr(run, setting) and data_format.media != setting and data_format != TRANSCRIPTS:
            raise ConfigError(
                f"train.py: {setting} are predicted, and no row names one; give rows with a column "
                f"{setting}, or leave {setting} out"
            )
    if not data_format.has_processor:
        return
    media, trainer = data_format.media or "audio", get_trainer(run.trainer)
    reads = runs_in_trainer(run) or (data_format.images and trainer.takes_images)
    for is_wrong, fault in (
        (
            recipe.weights == "random",
            "weights: random has no processor for them; set weights: pretrained",
        ),
        (not reads, f"trainer {run.trainer} does not read them; use transformers"),
        (reader != "longest", f"collator {reader} can't batch them; use longest"),
    ):
        if is_wrong:
            raise ConfigError(f"train.py: rows have {media}: {fault}")


def has_targets(model_config: Mapping[str, Any] | None) -> bool:
    """Whether an encoder reads one text of each row, and its decoder learns to write the other."""
    config = model_config or {}
    return bool(config.get("is_encoder_decoder")) and not writes_transcripts(config)


def _check_targets(run: RunConfig, data: DataFormat, reader: Collator) -> None:
    """Refuse rows that are no pairs of texts, or settings that can't batch them."""
    model = f"model: {run.model} is an encoder-decoder"
    for is_wrong, fault in (
        (
            data.kind not in ("prompt-completion", "messages") or data.media,
            f"which needs pairs of texts, and rows have {data.describe()}; give prompt and "
            "completion, or messages",
        ),
        (
            reader not in ("longest", "grouped"),
            f"whose two texts collator {reader} can't batch; use longest",
        ),
        (
            not runs_in_trainer(run),
            f"which trainer {run.trainer} does not train; use transformers",
        ),
    ):
        if is_wrong:
            raise ConfigError(f"{model}, {fault}")
