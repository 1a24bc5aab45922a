"""A recommended fine-tuning, independent of the tool that runs it; and its export for one tool."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self, get_args

from whichlora.errors import ConfigError, DataFileError
from whichlora.exports.train_script import KEEPING, Weights, require_texts, require_trainer
from whichlora.methods import get_method, usual_learning_rate
from whichlora.spec.data_format import TEXT_ROWS, DataFormat
from whichlora.spec.numeric import is_number
from whichlora.spec.plan import SAVED_SHARE, Collator, Keeping, TrainOn
from whichlora.spec.run import RunConfig
from whichlora.text import require_printable
from whichlora.trainers import get_trainer

RECIPE_SCHEMA_VERSION = 1
MOST_EPOCHS = 10**12  # as in a config file
DATA_FILE = "train.jsonl"  # beside the exported files, rows of `Recipe.data_format`
VALIDATION_FILE = "validation.jsonl"  # the same, if `Recipe.validation` is set

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

# Keys of the Trainer → settings of a run. Exporters write such tables, importers read them.
BATCH: Mapping[str, str] = {
    "per_device_train_batch_size": "batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
}


def written(run: RunConfig, table: Mapping[str, str]) -> dict[str, Any]:
    """The keys of `table` with the settings of `run`."""
    return {key: getattr(run, setting) for key, setting in table.items()}


def without_pinned_kernel(run: RunConfig, tool: str) -> tuple[RunConfig, tuple[str, ...]]:
    """`run` as a tool runs it that lets SDPA choose its kernel, and what to say of that."""
    if run.attn != "sdpa-efficient":
        return run, ()
    return replace(run, attn="sdpa"), (f"{tool} pins no kernel of SDPA: it runs with sdpa",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The winning fine-tuning, with all that a job needs: the content of `recipe.json`.

    It may come from somebody else, so every field is checked before any of it reaches code.

    Args:
        run: every default filled in.
        gpu: key of the accelerator it was chosen for.
        target_modules: leaf names that get an adapter, or "all-linear".
        learning_rate: None becomes the usual one of the method and the trainer.
        rate_source: whose the usual one is; empty where somebody stated it.
        tokenizer: hub id or path; None takes the model's own.
        model_config: the Hugging Face config.
        masked_lm: an encoder, trained to fill in masked tokens.
        longest: estimated tokens of the longest row, if less than `run.seq_len`; the prediction
            takes this length.
        data_format: what a row of `train.jsonl` and `validation.jsonl` looks like.
        validation: there is a `validation.jsonl`.

    Raises:
        ConfigError: a field of another type or out of its range.
    """

    run: RunConfig
    gpu: str
    target_modules: str | tuple[str, ...]
    epochs: float = 1.0
    learning_rate: float | None = None
    rate_source: str = ""
    seed: int = 0
    tokenizer: str | None = None
    weights: Weights = "pretrained"
    model_config: Mapping[str, Any] | None = None
    masked_lm: bool = False
    trust_remote_code: bool = False
    batching: Collator | None = None
    longest: int | None = None
    data_format: DataFormat = TEXT_ROWS
    train_on: TrainOn = "completions"
    keeping: Keeping = KEEPING
    validation: bool = False

    def __post_init__(self) -> None:
        require_printable("gpu", self.gpu)
        targets = self.target_modules
        for name in (targets,) if isinstance(targets, str) else targets:
            require_printable("target_modules", name)
        if self.tokenizer is not None:
            require_printable("tokenizer", self.tokenizer)
        if self.learning_rate is None:
            rate, source = usual_learning_rate(self.run)
            object.__setattr__(self, "learning_rate", rate)
            object.__setattr__(self, "rate_source", source)
        if self.rate_source != "":
            require_printable("rate_source", self.rate_source)
        _number("epochs", self.epochs, above=0, most=MOST_EPOCHS)
        _number("learning_rate", self.learning_rate, above=0, most=1)
        if type(self.seed) is not int:
            raise ConfigError(f"seed: must be a whole number, got {self.seed!r}")
        _number("seed", self.seed, above=-1, most=2**32 - 1)
        if self.weights not in get_args(Weights):
            raise ConfigError(
                f"weights: {self.weights!r} is not known; accepted are "
                f"{', '.join(get_args(Weights))}"
            )
        if self.longest is not None and type(self.longest) is not int:
            raise ConfigError(f"longest: must be a whole number, got {self.longest!r}")
        if self.longest is not None:
            _number("longest", self.longest, above=0, most=self.run.seq_len)
        if self.batching not in (None, *get_args(Collator)):
            raise ConfigError(
                f"batching: {self.batching!r} is not known; accepted are "
                f"{', '.join(get_args(Collator))}"
            )
        if self.train_on not in get_args(TrainOn):
            raise ConfigError(
                f"train_on: {self.train_on!r} is not known; accepted are "
                f"{', '.join(get_args(TrainOn))}"
            )
        if not isinstance(self.model_config, Mapping | None):
            raise ConfigError(
                f"model_config: must be an object, got {type(self.model_config).__name__}"
            )
        for name in ("masked_lm", "trust_remote_code", "validation"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}: {getattr(self, name)!r} is neither true nor false")

    @property
    def rate_notes(self) -> tuple[str, ...]:
        """Whose the learning rate is, where nobody stated it."""
        if not self.rate_source:
            return ()
        return (
            f"learning_rate {self.learning_rate:g} is the usual one of {self.run.method} with "
            f"trainer {self.run.trainer}: {self.rate_source}; state learning_rate for another",
        )

    def predicted(self, run: RunConfig) -> RunConfig:
        """`run`, as a tool runs this recipe, with the estimated length of rows."""
        return run if self.longest is None else replace(run, seq_len=self.longest)

    def to_dict(self) -> dict[str, Any]:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return (
            {"schema_version": RECIPE_SCHEMA_VERSION}
            | fields
            | {
                "run": self.run.to_dict(),
                "data_format": dataclasses.asdict(self.data_format),
                "keeping": dataclasses.asdict(self.keeping),
            }
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, where: str) -> Self:
        """The inverse of `to_dict`.

        Raises:
            DataFileError: starting with `where`: another schema, or a fault in a field.
        """
        fields = dict(values)
        version = fields.pop("schema_version", None)
        if version != RECIPE_SCHEMA_VERSION:
            raise DataFileError(
                f"{where}: schema_version is {version!r}, this release reads "
                f"{RECIPE_SCHEMA_VERSION}; run whichlora run again"
            )
        try:
            targets = fields.pop("target_modules")
            return cls(
                run=RunConfig.from_dict(fields.pop("run")),
                data_format=DataFormat(**fields.pop("data_format", {})),
                keeping=Keeping(**fields.pop("keeping", {})),
                target_modules=targets if isinstance(targets, str) else tuple(targets),
                **fields,
            )
        except KeyError as error:
            raise DataFileError(f"{where}: has no {error}; run whichlora run again") from None
        except (TypeError, ValueError, ConfigError) as error:
            raise DataFileError(f"{where}: {error}; run whichlora run again") from None


def _number(setting: str, value: float | None, *, above: float, most: float) -> None:
    if value is None or not (is_number(value) and above < value <= most):
        raise ConfigError(
            f"{setting}: must be a number above {above:g}, at most {most:g}, got {value!r}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """One fine-tuning in one tool's format.

    Args:
        files: file name to content; the first is the one to start from.
        command: what starts the training, in the folder of the files.
        run: the run as the tool performs it, to be predicted again.
        notes: settings of the recipe that the tool lacks, or that are not modelled under it.
        made_of: file of rows → the file that `simpler_row` converts to it.
        loads_on_gpu: each process loads all weights on its GPU before they are sharded.
    """

    files: Mapping[str, str]
    command: str
    run: RunConfig
    notes: tuple[str, ...] = ()
    made_of: Mapping[str, str] = field(default_factory=dict)
    loads_on_gpu: bool = False


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


def without(run: RunConfig, tool: str, *names: str) -> tuple[RunConfig, tuple[str, ...]]:
    """`run` without the settings that `tool` lacks, and a note for each."""
    chosen = run.chosen()
    left_out = [name for name in names if name in chosen]
    plain = RunConfig(model=run.model)
    defaults: dict[str, Any] = {name: getattr(plain, name) for name in left_out}
    notes = tuple(f"{tool} has no {name}: {chosen[name]} is left out" for name in left_out)
    return dataclasses.replace(run, **defaults), notes


def options_for_texts(run: RunConfig) -> tuple[str, ...]:
    """The setting that holds options of a trainer on texts, of which most tools have none."""
    return ("trainer_options",) if get_trainer(run.trainer).rows == "texts" else ()


def optimising(recipe: Recipe, run: RunConfig) -> dict[str, Any]:
    """How long, how fast and in which precision is trained, in the Trainer's keys."""
    return {
        "num_train_epochs": recipe.epochs,
        "learning_rate": recipe.learning_rate,
        "optim": run.trainer_optim,
        "bf16": run.precision == "bf16",
        "fp16": run.precision == "fp16",
        **({"tf32": True} if run.precision == "tf32" else {}),
    }


def saving(recipe: Recipe) -> dict[str, Any]:
    """When checkpoints are written, in the Trainer's keys, which tools built on it share."""
    keeping = recipe.keeping
    if not keeping.saves:
        return {"save_strategy": "no"}
    return {
        "save_strategy": "steps",
        "save_steps": keeping.save_steps or SAVED_SHARE,
        "save_total_limit": keeping.save_total_limit,
    }


def evaluating(recipe: Recipe) -> dict[str, Any]:
    """When the validation rows are evaluated, in the Trainer's keys; empty without them."""
    if not (recipe.validation and recipe.keeping.evaluates):
        return {}
    if recipe.keeping.eval_steps is None:
        return {"eval_strategy": "epoch"}
    return {"eval_strategy": "steps", "eval_steps": recipe.keeping.eval_steps}


def padding_note(recipe: Recipe, *supported: str) -> tuple[str, ...]:
    """A note if the tool pads to the longest row and the recipe batches otherwise.

    Args:
        known: other batchings that the tool has.
    """
    if recipe.batching in (None, "longest", *supported):
        return ()
    return (
        f"batches were to be {recipe.batching}; here rows are padded to the longest of their "
        "batch, so total time and tokens differ",
    )
