"""The options of a run on several GPUs, built from what strategies declare."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import click

from whichlora.cli.completion import with_completion
from whichlora.cli.options import counts, words
from whichlora.cli.serving import serving_options
from whichlora.spec.parallel import AUTO, MOST_GPUS, ONE_DEVICE
from whichlora.units import parse_bytes

if TYPE_CHECKING:
    from whichlora.spec.options import Option


_BEFORE_MODEL = ("--model", "--models")


class SpreadCommand(click.Command):
    """A command whose run may be spread over several GPUs, or served by an engine.

    Strategies and engines are imported when such a command runs or is completed, not when the
    program starts.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click's, MODEL also behind `--model`, as other tools take it."""
        if any(isinstance(param, click.Argument) for param in self.params):
            words = (word.removeprefix("--models=").removeprefix("--model=") for word in args)
            args = [word for word in words if word not in _BEFORE_MODEL]
        return super().parse_args(ctx, args)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        params = super().get_params(ctx)
        position = len(self.params)  # before --help
        of_run = (*serving_options(), *spread_options())
        return [*params[:position], *of_run, *params[position:]]


@functools.cache
def spread_options() -> tuple[click.Option, ...]:
    """`--parallel`, what else is said of the GPUs, and a flag for each option of the strategies."""
    from whichlora.parallel import list_strategies

    strategies = list_strategies()
    by_name: dict[str, list[Option]] = {}
    users: dict[str, list[str]] = {}
    for strategy in strategies.values():
        for option in strategy.options:
            by_name.setdefault(option.name, []).append(option)
            users.setdefault(option.name, []).append(strategy.name)
    return (
        with_completion(
            click.Option(
                ["--parallel"],
                callback=_strategies((*strategies, AUTO, ONE_DEVICE)),
                help=f"How several GPUs share a run: {', '.join(strategies)}, two joined with +, "
                "or auto: the fastest that fits; default: auto.",
            ),
            lambda: (*strategies, AUTO),
        ),
        click.Option(
            ["--nodes"],
            callback=_listed(counts("nodes", most=MOST_GPUS)),
            help="Machines, which have equally many of the GPUs; default: as many as the GPUs "
            "need.",
        ),
        click.Option(
            ["--interconnect"],
            callback=_listed(words("interconnect")),
            help="Links between the GPUs: a known machine, or what each GPU sends with, such as "
            "25GB/s; default: what machines with these GPUs usually have.",
        ),
        click.Option(
            ["--host-memory", "host_memory_bytes"],
            callback=_listed(_sizes),
            help="Host memory of each node, such as 512GiB, which what is offloaded must fit in; "
            "default: this machine's where it has the GPU, or that of a named --interconnect.",
        ),
        click.Option(
            ["--global-batch-size"],
            callback=_listed(counts("global-batch-size")),
            help="Sequences per optimizer step over all GPUs, in place of "
            "--gradient-accumulation-steps.",
        ),
        *(_flag(name, options, users[name]) for name, options in by_name.items()),
    )


def _flag(name: str, options: list[Option], users: list[str]) -> click.Option:
    """The flag that several strategies may share."""
    first = options[0]
    word = name.replace("_", "-")
    choices = tuple(dict.fromkeys(choice for option in options for choice in option.choices))
    meaning = f"{', '.join(users)}: {first.summary}"
    if isinstance(first.default, bool):
        return click.Option(
            [f"--{word}/--no-{word}"],
            default=None,
            callback=lambda ctx, param, value: [value],
            help=f"{meaning}; default: {'yes' if first.default else 'no'}.",
        )
    if choices:
        meaning += f" ({(',' if isinstance(first.default, tuple) else ', ').join(choices)})"
    if isinstance(first.default, tuple):
        default = ",".join(first.default)
    else:
        default = "" if first.default is None else str(first.default)
    accepted = choices or None
    read: Callable[..., list[Any]] = (
        words(word, accepted) if choices else counts(word, least=first.least)
    )
    option = click.Option(
        [f"--{word}"],
        callback=_together(read) if isinstance(first.default, tuple) else _listed(read),
        help=f"{meaning}; default: {default}." if default else f"{meaning}.",
    )
    return with_completion(option, lambda: choices) if choices else option


def _strategies(accepted: Iterable[str]) -> Callable[..., list[str | None]]:
    """A click callback: comma list of strategies, each alone or joined with "+"."""
    check = words("parallel", tuple(accepted))

    def split(ctx: click.Context, param: click.Parameter, value: str | None) -> list[str | None]:
        if value is None:
            return [None]
        check(ctx, param, value.replace("+", ","))
        return [name.replace(" ", "") for name in value.split(",")]

    return split


def _sizes(ctx: click.Context, param: click.Parameter, value: str) -> list[int]:
    """A click callback: comma list of amounts of memory."""
    return [parse_bytes(word, setting="--host-memory") for word in value.split(",")]


def _listed(read: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """A click callback: the values that `read` makes of a list; None alone where none is given."""

    def values(ctx: click.Context, param: click.Parameter, value: str | None) -> list[Any]:
        return [None] if value is None else read(ctx, param, value)

    return values


def _together(read: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """The same where a list is one value, which tables join with "+"."""

    def values(ctx: click.Context, param: click.Parameter, value: str | None) -> list[Any]:
        return [None if value is None else tuple(read(ctx, param, value.replace("+", ",")))]

    return values
