"""The options of a run that an engine serves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from whichlora.cli.completion import with_completion
from whichlora.cli.options import Number, counts_or_max, named_values, words
from whichlora.spec.run import TRANSFORMERS, USUAL_SPREAD


@functools.cache
def serving_options() -> tuple[click.Option, ...]:
    """`--serving`, the engine's own options, and what it is asked for."""
    from whichlora.serving import list_engines

    engines = list_engines()
    return (
        with_completion(
            click.Option(
                ["--serving"],
                default=TRANSFORMERS,
                show_default=True,
                callback=words("serving"),
                help=f"Who serves the model (inference): {', '.join(engines)}.",
            ),
            lambda: tuple(engines),
        ),
        click.Option(
            ["--serving-option", "serving_options"],
            multiple=True,
            callback=_listed_values,
            help="A setting of the engine's own, such as gpu_memory_utilization=0.9; several times "
            "for several (docs/serving.md).",
        ),
        click.Option(
            ["--concurrency"],
            callback=_where_given("concurrency"),
            help="Sequences at once (inference), in place of --batch-size; max for as many as the "
            "engine runs.",
        ),
        click.Option(
            ["--context"],
            callback=_where_given("context", of_tokens=True),
            help="Most tokens of a prompt and its answer; max for as many as the engine can take; "
            "default: --prompt-len and --max-new-tokens.",
        ),
        click.Option(
            ["--request-rate"],
            type=Number(0, min_open=True),
            callback=lambda ctx, param, value: [value],
            help="Requests a second that arrive by chance at an engine; default: --concurrency of "
            "them under way at any time.",
        ),
        click.Option(
            ["--length-spread"],
            type=Number(0, 1, max_open=True),
            default=USUAL_SPREAD,
            callback=lambda ctx, param, value: [value],
            help="Share by which an engine's prompts and answers vary in length; 0: all alike, as "
            f"vllm bench serve sends them; default: {USUAL_SPREAD}.",
        ),
        click.Option(
            ["--shared-prompt-fraction"],
            type=Number(0, 1),
            default=0.0,
            callback=lambda ctx, param, value: [value],
            help="Share of the prompt that all sequences begin with, which engines keep once.",
        ),
    )


def _listed_values(ctx: click.Context, param: click.Parameter, value: Any) -> list[Any]:
    return [named_values(ctx, param, value)]


def _where_given(setting: str, *, of_tokens: bool = False) -> Callable[..., Any]:
    """A click callback: `counts_or_max`, or None where the option is not given."""
    split = counts_or_max(setting, of_tokens=of_tokens)

    def callback(ctx: click.Context, param: click.Parameter, value: str | None) -> Any:
        return [None] if value is None else split(ctx, param, value)

    return callback
