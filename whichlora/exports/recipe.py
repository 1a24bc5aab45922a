"""A recommended fine-tuning, independent of the tool that runs it; and its export for one tool."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, get_args

from whichlora.errors import ConfigError, DataFileError
from whichlora.methods import usual_learning_rate
from whichlora.spec.data_format import TEXT_ROWS, DataFormat
from whichlora.spec.numeric import is_number
from whichlora.spec.plan import Collator, Keeping, TrainOn
from whichlora.spec.run import RunConfig
from whichlora.text import require_printable

Weights = Literal["pretrained", "random"]

RECIPE_SCHEMA_VERSION = 1
MOST_EPOCHS = 10**12  # as in a config file
DATA_FILE = "train.jsonl"  # beside the exported files, rows of `Recipe.data_format`
VALIDATION_FILE = "validation.jsonl"  # the same, if `Recipe.validation` is set
_KEEPING = Keeping()


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
    keeping: Keeping = _KEEPING
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
    def reader(self) -> Collator:
        """How rows become batches: as stated, else packed where nothing is padded."""
        return self.batching or ("packed" if self.run.padding == "none" else "longest")

    @property
    def rate_comment(self) -> str:
        """Stands above the learning rate in a file: whose it is, where nobody stated it."""
        return f"# usual: {self.rate_source}\n" if self.rate_source else ""

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
