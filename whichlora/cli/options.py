"""Options that several commands share, and the callbacks that read their lists."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from whichlora.errors import ConfigError
from whichlora.spec.options import OptionValue, written
from whichlora.spec.parallel import MOST_GPUS
from whichlora.spec.releases import installed_in, is_date, month_of
from whichlora.spec.results import SCHEMA_VERSION
from whichlora.spec.run import image_sides
from whichlora.spec.versions import Libraries, release_numbers
from whichlora.spec.words import MAX, unknown
from whichlora.text import visible
from whichlora.units import parse_tokens

if TYPE_CHECKING:
    from whichlora.store.costs import Rates

_MAX_COUNT = 10**9  # no batch, no length: a slipped key

_OLD_GPUS = "whichlora.gpus"  # where the context keeps what `--gpus` was given


class Count(click.IntRange):
    """A whole number, as messages call it, where click says "integer range"."""

    name = "whole number"


class Tokens(Count):
    """A whole number of tokens, such as 4096 or 4k."""

    name = "number of tokens"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        setting = "length" if param is None else param.opts[0]
        return super().convert(parse_tokens(str(value), setting=setting), param, ctx)


class Number(click.FloatRange):
    """A number, as messages call it."""

    name = "number"


class Positive(Number):
    """A number above 0 and at most `most`; NaN, which no bound refuses, is none."""

    def __init__(self, most: float) -> None:
        super().__init__(0, most, min_open=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is not in the range {self._describe_range()}.", param, ctx)
        return number


json_option = click.option("--json", "as_json", is_flag=True, help="Print every field as JSON.")
markdown_option = click.option(
    "--markdown", "as_markdown", is_flag=True, help="Print a Markdown document."
)
calibration_option = click.option(
    "--calibration-dir", type=click.Path(path_type=Path, file_okay=False), help="Your calibrations."
)


def data_options(command: Any) -> Any:
    """`--data`, `--samples` and `--epochs` of a whole training."""
    command = click.option("--epochs", type=Positive(1000), help="Passes over the data; 1.")(
        command
    )
    command = click.option(
        "--samples",
        type=Count(1, 10**9),
        help="Without --data: rows of --seq-len tokens each.",
    )(command)
    return click.option(
        "--data",
        help="What is learned, for time and cost of the whole training: a file, a folder or a "
        "dataset of the hub; --seq-len cuts its rows.",
    )(command)


def check_form(as_json: bool, as_markdown: bool) -> None:
    """Refuse two forms of one answer."""
    if as_json and as_markdown:
        raise ConfigError("--json and --markdown: only one of both")


def cost_options(command: Any) -> Any:
    """`--prices` and `--country`, which `rates_of` reads."""
    command = click.option(
        "--country", help="Where it runs, such as FR: the CO2 of its electricity."
    )(command)
    return click.option(
        "--prices",
        type=click.Path(path_type=Path),
        help="CSV of your prices, columns gpu and usd_per_hour; others come from the table.",
    )(command)


def rates_of(prices: Path | None, country: str | None) -> Rates:
    """What costs are predicted from.

    Raises:
        ConfigError: no such country.
        DataFileError: a fault of the file.
    """
    from whichlora.store.costs import load_rates

    return load_rates(prices, country)


def words(setting: str, accepted: tuple[str, ...] | None = None) -> Callable[..., list[str]]:
    """A click callback: comma list of words, each one of `accepted`."""

    def split(ctx: click.Context, param: click.Parameter, value: str) -> list[str]:
        names = [word.strip() for word in value.split(",")]
        if setting == "target-modules" and value.startswith("re:"):
            return [value]  # a pattern, which may have commas
        for word in names:
            if not word:
                shown = setting if setting == "model" else f"--{setting}"  # an argument
                raise ConfigError(f"{shown}: has an empty name in {value!r}")
            if accepted is not None and word not in accepted:
                raise ConfigError(unknown(f"--{setting}", word, accepted))
        return names

    return split


def names_if_any(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...]:
    """A click callback: names with commas, none where it is not given."""
    flag = param.opts[0].lstrip("-")
    return () if value is None else tuple(words(flag)(ctx, param, value))


def split_models(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> list[str]:
    """A click callback: models as arguments, each of which may be a list with commas."""
    split = words("model")
    return [
        name
        for text in value
        for name in ([text] if os.path.exists(text) else split(ctx, param, text))
    ]


def counts(
    setting: str,
    *,
    least: int = 1,
    most: int = _MAX_COUNT,
    also: str = "",
    of_tokens: bool = False,
) -> Callable[..., list[int]]:
    """A click callback: comma list of whole numbers from `least` to `most`.

    Args:
        also: what else is accepted, as the end of a refusal.
        of_tokens: whether 4k is such a number, too.
    """
    parse: Callable[[str], int] = int
    if of_tokens:
        parse = partial(parse_tokens, setting=f"--{setting}")

    def split(ctx: click.Context, param: click.Parameter, value: str) -> list[int]:
        numbers = []
        for word in value.split(","):
            if len(word) == 3 and word.startswith("0"):
                raise ConfigError(
                    f"--{setting}: {value[:40]!r} is a list, of which {word!r} is no number; write "
                    "thousands without a comma"
                )
            try:
                count = parse(word)
            except ValueError:
                count = least - 1
            if not least <= count <= most:
                raise ConfigError(
                    f"--{setting}: {word.strip()[:40]!r} is not a whole number from {least} to "
                    f"{most}; give one, or several with commas{also}"
                )
            numbers.append(count)
        return numbers

    return split


def tokens_if_any(setting: str) -> Callable[..., list[int] | None]:
    """A click callback: comma list of numbers of tokens; None where nobody gave any."""
    listed = counts(setting, of_tokens=True)

    def split(ctx: click.Context, param: click.Parameter, value: str | None) -> list[int] | None:
        return None if value is None else listed(ctx, param, value)

    return split


def counts_or_max(setting: str, *, of_tokens: bool = False) -> Callable[..., Sequence[int | str]]:
    """A click callback: comma list of whole numbers, or "max" alone; else as `counts`."""
    listed = counts(setting, also=f", or {MAX}", of_tokens=of_tokens)

    def split(ctx: click.Context, param: click.Parameter, value: str) -> Sequence[int | str]:
        words = [word.strip() for word in value.split(",")]
        if MAX in words and len(words) > 1:
            raise ConfigError(
                f"--{setting}: max stands alone, got {value!r}; ask for max by itself"
            )
        return [MAX] if words == [MAX] else listed(ctx, param, value)

    return split


def fractions(setting: str) -> Callable[..., list[float]]:
    """A click callback: comma list of numbers from 0 to below 1."""

    def split(ctx: click.Context, param: click.Parameter, value: str) -> list[float]:
        numbers = []
        for word in value.split(","):
            try:
                fraction = float(word)
            except ValueError:
                fraction = -1.0
            if not 0.0 <= fraction < 1.0:
                raise ConfigError(
                    f"--{setting}: {word.strip()[:40]!r} is not a number from 0 to below 1; "
                    "give one, or several with commas"
                )
            numbers.append(fraction)
        return numbers

    return split


DATES = "whichlora.dates"  # in `Context.meta`: what a date in --libraries stands for


def versions(ctx: click.Context, param: click.Parameter, value: str) -> tuple[Any, ...]:
    """A click callback: comma list of library=version, and of a date for all of its day."""
    words = [word.strip() for word in value.split(",") if word.strip()]
    dates = [word for word in words if is_date(word)]
    stated: dict[str, str] = {}
    said = []
    for date in dates:
        installed = installed_in(date)
        said.append(f"libraries: {date}: {', '.join(map(' '.join, installed.items()))}")
        stated |= installed
    for library, _, version in (word.partition("=") for word in words if word not in dates):
        stated[library.strip()] = version.lstrip("=").strip()  # "==" is how pip writes it
    ctx.meta[DATES] = [*said, *_beside_todays(stated)]
    return tuple(sorted(stated.items()))


def _beside_todays(stated: Mapping[str, str]) -> list[str]:
    """A note where a TRL of its days would run beside a transformers of today."""
    month = month_of("trl", stated.get("trl", ""))
    if not month or "transformers" in stated:
        return []
    then = installed_in(month)["transformers"]
    if release_numbers(then)[:1] == release_numbers(Libraries().transformers)[:1]:
        return []
    return [
        f"libraries: trl {stated['trl']} is of {month}, beside transformers {then}; the others are "
        f"taken as of today: --libraries {month} takes all as of then"
    ]


def image_size(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, int]:
    """A click callback: width and height, as 1024x768."""
    return image_sides(value)


def named_values(
    ctx: click.Context, param: click.Parameter, value: Sequence[str]
) -> tuple[tuple[str, OptionValue], ...]:
    """A click callback: name=value, several times; a value is true, false, a number or a text."""
    values = {}
    for text in value:
        name, equals, text_of = (part.strip() for part in text.partition("="))
        if not name or not equals or not text_of:
            raise ConfigError(f"{param.opts[0]}: {text!r} is not name=value, such as beta=0.1")
        values[name.lstrip("-").replace("-", "_")] = written(text_of)
    return tuple(sorted(values.items()))


def list_option(
    flag: str, default: str, help_text: str, callback: Callable[..., Any]
) -> Callable[[Any], Any]:
    return click.option(
        f"--{flag}", default=default, show_default=True, help=help_text, callback=callback
    )


def gpu_option(
    default: str | None, help_text: str, *, single: bool = False, counted: bool = False
) -> Callable[[Any], Any]:
    """`--gpu`, a list of types of GPU, with `single` the name of the only one.

    Types behind `--gpus`, as `whichlora guide` took them, are accepted with one line.

    Args:
        counted: `--gpus` is the number of GPUs, of a run that may be spread over several.
    """

    def read(ctx: click.Context, param: click.Parameter, given: Sequence[str]) -> list[str] | str:
        value = ",".join(given) if given else None
        old_spelling: list[str] = ctx.meta.pop(_OLD_GPUS, [])
        if old_spelling:
            if ctx.get_parameter_source("gpu") is click.core.ParameterSource.COMMANDLINE:
                raise ConfigError(
                    f"--gpus: {','.join(old_spelling)}: is the number of GPUs; for types give "
                    "--gpu alone"
                )
            ctx.set_parameter_source("gpu", click.core.ParameterSource.COMMANDLINE)
        names = old_spelling or ([] if value is None else words("gpu")(ctx, param, value))
        text = ",".join(names)
        if single and len(names) > 1:
            raise ConfigError(
                f"--gpu: {ctx.info_name} takes one type, got {text}; 'whichlora estimate' and "
                "'whichlora where' take several"
            )
        if old_spelling:
            message = f"--gpus: is the number of GPUs; write --gpu {text} for their types"
            click.echo(visible(message), err=True)
        return names[0] if single else names

    def decorate(command: Any) -> Any:
        command = click.option(
            "--gpus",
            hidden=not counted,
            is_eager=True,
            expose_value=counted,
            callback=_number_of_gpus if counted else _only_types,
            help="How many GPUs, over all nodes; --batch-size is of each.",
        )(command)
        return click.option(
            "--gpu",
            multiple=True,
            default=(default,) if default else (),
            show_default=default is not None,
            help=help_text,
            callback=read,
        )(command)

    return decorate


def _number_of_gpus(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> list[int] | list[None]:
    """Counts; types, the older meaning, are kept for the callback of `--gpu`, called later."""
    if value is None:
        return [None]
    from whichlora.store.gpus import is_count

    names = words("gpus")(ctx, param, value)
    are_counts = set(map(is_count, names))
    if len(are_counts) > 1:
        raise ConfigError(f"--gpus: {value}: is the number of GPUs; --gpu takes the type")
    if True in are_counts:
        return counts("gpus", most=MOST_GPUS)(ctx, param, value)
    ctx.meta[_OLD_GPUS] = names
    return [None]


def _only_types(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    """Keeps the types, where a number of GPUs has no meaning."""
    if _number_of_gpus(ctx, param, value) != [None]:
        raise ConfigError(
            f"--gpus: {value}: {ctx.info_name} is of one GPU so far; leave it out, --gpu takes the "
            "type"
        )


def choices(flag: str, default: str, help_text: str, choice: Any) -> Callable[[Any], Any]:
    accepted = tuple(get_args(choice))
    return list_option(
        flag, default, f"{help_text} ({', '.join(accepted)}).", words(flag, accepted)
    )


def print_json(answer: dict[str, Any]) -> None:
    """A command's answer, headed by the version of its form."""
    click.echo(json.dumps({"schema_version": SCHEMA_VERSION} | answer, indent=1))
