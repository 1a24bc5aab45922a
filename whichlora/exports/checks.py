"""What a tool can't write of a fine-tuning, and how that is refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from whichlora.errors import ConfigError
from whichlora.exports.recipe import DATA_FILE, Recipe
from whichlora.methods import get_method, under_trainer, with_defaults
from whichlora.spec.data_format import DataFormat
from whichlora.spec.run import RunConfig
from whichlora.trainers import get_trainer, list_trainers

TRAINER_CLASS = "transformers.Trainer"  # whose steps the script's are
SFT_CLASS = "trl.SFTTrainer"


# PEFT config class → its keys that Axolotl, LLaMA-Factory, TRL and Unsloth can all write. They
# lack "bias": exports leave it out with a note.
LORA_KEYS: Mapping[str, frozenset[str]] = {
    "peft.LoraConfig": frozenset(
        {
            "r",
            "lora_alpha",
            "lora_dropout",
            "target_modules",
            "bias",
            "use_rslora",
            "use_dora",
            "modules_to_save",
        }
    )
}


def require_plain(
    recipe: Recipe,
    tool: str,
    *,
    quants: frozenset[str],
    rows: Collection[DataFormat],
    data: DataFormat | None = None,
    adapters: Mapping[str, frozenset[str]],
    trainers: Collection[str] = (),
) -> None:
    """Refuse a recipe that only WhichLoRA's own script can run.

    Args:
        rows: formats that `tool` takes.
        data: format of the rows that it gets; None is that of `train.jsonl`.
        adapters: PEFT config class → its keys that `tool` can write.
        trainers: classes whose steps it runs, beside the Trainer's.

    Raises:
        ConfigError: an adapter that it can't write, an encoder, random weights, other rows, or a
            storage that it doesn't load.
    """
    require_texts(recipe.run, f"--to {tool}")
    _require_adapter(recipe.run, tool, adapters)
    require_trainer(recipe.run, f"--to {tool}", *trainers)
    if recipe.run.task:
        raise ConfigError(
            f"--to {tool}: task {recipe.run.task} can't be written, {tool} trains the writing of "
            "texts; use --to transformers"
        )
    if recipe.masked_lm:
        raise ConfigError(
            f"--to {tool}: {recipe.run.model} is an encoder, which {tool} doesn't train; "
            "use --to transformers"
        )
    if (recipe.model_config or {}).get("is_encoder_decoder"):
        raise ConfigError(
            f"--to {tool}: {recipe.run.model} is an encoder-decoder, and the file is of single "
            "texts; use --to transformers, which writes pairs"
        )
    if (data or recipe.data_format) not in rows:
        raise ConfigError(
            f"--to {tool}: the rows of {DATA_FILE} are {recipe.data_format.describe()}; it takes "
            f"{' or '.join(accepted.describe() for accepted in rows)}; use --to transformers"
        )
    if recipe.weights == "random":
        raise ConfigError(
            f"--to {tool}: weights are random, and {tool} loads a checkpoint; set weights: "
            "pretrained, or use --to transformers"
        )
    quant = recipe.run.quant or "none"
    if quant not in quants:
        raise ConfigError(
            f"--to {tool}: quant {quant} can't be loaded by it; accepted are "
            f"{', '.join(sorted(quants))}"
        )


def _require_adapter(run: RunConfig, tool: str, adapters: Mapping[str, frozenset[str]]) -> None:
    method = get_method(run.method)
    if not method.peft_class:
        return
    if method.makes_optimizer:
        raise ConfigError(
            f"--to {tool}: method {method.name} needs {method.makes_optimizer}, which {tool} can't "
            "write; use --to transformers"
        )
    if method.peft_class not in adapters:
        raise ConfigError(
            f"--to {tool}: method {method.name} needs {method.peft_class}, which {tool} can't "
            f"write; it writes {', '.join(adapters)}; use --to transformers"
        )
    accepted = adapters[method.peft_class]
    unknown = sorted(set(method.peft_config(run)) - accepted)
    if unknown:
        raise ConfigError(
            f"--to {tool}: method {method.name} sets {unknown[0]} of {method.peft_class}, which "
            f"{tool} can't write; it writes {', '.join(sorted(accepted))}; use --to transformers"
        )


def require_texts(run: RunConfig, place: str) -> None:
    """Refuse rows with images or sound, which `train.py` alone reads.

    Args:
        place: how the message begins.

    Raises:
        ConfigError: there are images, or a tower that is left alone.
    """
    for setting in ("images", "audios", "freeze_vision_tower"):
        if getattr(run, setting):
            raise ConfigError(
                f"{place}: {setting} can't be written, its training would leave them out; "
                f"use --to transformers, or leave {setting} out"
            )


def require_library(run: RunConfig, place: str) -> None:
    """Refuse a run whose steps no library has.

    Args:
        place: how the message begins.

    Raises:
        ConfigError: its steps are written out by a script.
    """
    trainer = get_trainer(run.trainer)
    if not trainer.config_class:
        whose = trainer.library_class or "a script's own"
        raise ConfigError(
            f"{place}: it can't be written for trainer {run.trainer}, whose steps are {whose}; use "
            "trainer transformers, or 'whichlora export' to its tool"
        )


def require_trainer(run: RunConfig, place: str, *others: str) -> None:
    """Refuse a run whose steps are not those of the Trainer of transformers, or a subclass of it.

    Args:
        place: how the message begins.
        others: further classes whose steps are accepted.

    Raises:
        ConfigError: another trainer.
    """
    if not runs_in_trainer(run, *others):
        is_written = get_trainer(run.trainer).config_class
        names = [
            trainer.name
            for trainer in list_trainers().values()
            if trainer.library_class in (TRAINER_CLASS, *others)
        ]
        raise ConfigError(
            f"{place}: trainer {run.trainer} can't be written, it runs {', '.join(names)}; use "
            f"{'--to transformers' if is_written else 'trainer transformers'}"
        )


def by_own_sft(recipe: Recipe, tool: str, trainer: str) -> tuple[Recipe, tuple[str, ...]]:
    """`recipe` of TRL's SFT as a tool trains it that has SFT of its own, and what to say of it.

    Args:
        trainer: whose steps are those of the tool.
    """
    if get_trainer(recipe.run.trainer).library_class != SFT_CLASS:
        return recipe, ()
    run, left_out = without(recipe.run, tool, "trainer_options")
    own = with_defaults(under_trainer(run, trainer))
    note = f"{tool} trains SFT itself: it is predicted with the steps of trainer {trainer}"
    return replace(recipe, run=own), (note, *left_out)


def runs_in_trainer(run: RunConfig, *others: str) -> bool:
    """Whether the steps of `run` are those of `TRAINER_CLASS`, or of one of `others`."""
    return get_trainer(run.trainer).library_class in (TRAINER_CLASS, *others)


def without(run: RunConfig, tool: str, *names: str) -> tuple[RunConfig, tuple[str, ...]]:
    """`run` without the settings that `tool` lacks, and a note for each."""
    chosen = run.chosen()
    left_out = [name for name in names if name in chosen]
    plain = RunConfig(model=run.model)
    defaults: dict[str, Any] = {name: getattr(plain, name) for name in left_out}
    notes = tuple(f"{tool} has no {name}: {chosen[name]} is left out" for name in left_out)
    return replace(run, **defaults), notes


def without_pinned_kernel(run: RunConfig, tool: str) -> tuple[RunConfig, tuple[str, ...]]:
    """`run` as a tool runs it that lets SDPA choose its kernel, and what to say of that."""
    if run.attn != "sdpa-efficient":
        return run, ()
    return replace(run, attn="sdpa"), (f"{tool} pins no kernel of SDPA: it runs with sdpa",)


def options_for_texts(run: RunConfig) -> tuple[str, ...]:
    """The setting that holds options of a trainer on texts, of which most tools have none."""
    return ("trainer_options",) if get_trainer(run.trainer).rows == "texts" else ()
