"""`whichlora recommend`: the largest model for a GPU, without a config file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, get_args

import click

from whichlora.cli.faults import EXIT_NOTHING_FITS
from whichlora.cli.options import (
    Count,
    Positive,
    Tokens,
    calibration_option,
    check_form,
    cost_options,
    json_option,
    markdown_option,
    names_if_any,
    print_json,
)
from whichlora.spec.parallel import MOST_GPUS
from whichlora.spec.run import MOST_COUNT, AttentionKernel, RunConfig
from whichlora.text import visible


@click.command()
@click.option(
    "--gpu",
    multiple=True,
    callback=lambda ctx, param, values: ",".join(values) if values else None,
    help="Accelerator: 4090, 2x3090, or memory such as 24GB.",
)
@click.option(
    "--gpus",
    type=Count(1, MOST_GPUS),
    default=1,
    show_default=True,
    help="How many GPUs share the fine-tuning.",
)
@click.option("--host-memory", help="What a node has, such as 128GiB, for what is offloaded.")
@click.option("--models", callback=names_if_any, help="Models to choose from, with commas.")
@click.option(
    "--method",
    callback=names_if_any,
    help="Methods to choose from, with commas, such as full or lora,dora. Default: lora,qlora.",
)
@click.option(
    "--seq-len",
    type=Tokens(2, MOST_COUNT),
    default=RunConfig(model="any").seq_len,
    show_default=True,
    help="Longest training sequence in tokens.",
)
@click.option("--data", help="The training data: a file, a folder or a dataset of the hub.")
@click.option(
    "--samples",
    type=Count(1, 10**7),
    help="Without --data: rows of --seq-len tokens each.",
)
@click.option(
    "--attn",
    type=click.Choice(get_args(AttentionKernel)),
    help="Attention kernel. Default: sdpa.",
)
@click.option(
    "--image-max-pixels",
    type=Count(1, MOST_COUNT),
    help="Larger images of --data are shrunk to so many pixels; 589824 is 768x768.",
)
@click.option("--epochs", type=Positive(1000), default=1.0, show_default=True, help="Passes.")
@click.option("--within", help="Most time of the whole fine-tuning, such as 8h.")
@click.option("--budget", help="GPU-hours (10h), money (20usd) or electricity (5kWh).")
@click.option(
    "--price-per-hour",
    type=Positive(10**6),
    help="What an hour of one GPU costs you, in place of the price table.",
)
@cost_options
@click.option(
    "--quality",
    type=click.Path(path_type=Path),
    help="CSV of scores, columns model and score; the best model, not the largest.",
)
@click.option(
    "--trainer",
    help="Who trains, such as dpo. Default on a GPU: sft, which holds no logits.",
)
@click.option("--serving", help="Who serves the model: vllm, sglang, llama-cpp, transformers.")
@click.option(
    "--serve",
    help="With an engine: how it has the weights, such as awq-int4, fp8, or Q8_0 of llama-cpp. "
    "Default: 16 bit; Q4_K_M of llama-cpp.",
)
@click.option("--tpot", help="With an engine: most time of each further token, such as 50ms.")
@click.option(
    "--save",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the plan that was answered, for `whichlora run`.",
)
@calibration_option
@json_option
@markdown_option
def recommend(
    save: Path | None,
    calibration_dir: Path | None,
    as_json: bool,
    as_markdown: bool,
    **options: Any,
) -> None:
    """The largest models that train on a GPU; no data and no file needed.

    Of each model the fastest variant and batch under TRL's SFTTrainer, or under --trainer, and
    what serving it takes. Without --gpu, the GPU of this machine. Nothing is measured. The plan of
    --save has `profile: none`; with `frontier` there, `whichlora run` measures on a machine with
    the GPU.

    \b
    Example:
      whichlora recommend --gpu 4090 --seq-len 4096
      whichlora recommend --gpu l4 --data train.jsonl --within 8h --save plan.yaml
    """
    from whichlora import terminal
    from whichlora.workflow.recommend import Question, save_plan
    from whichlora.workflow.recommend import recommend as answered

    check_form(as_json, as_markdown)
    question = Question(**options)
    with terminal.Progress(quiet=True) as progress:
        recommendation = answered(question, progress=progress, calibration_dir=calibration_dir)
    if save is not None:
        save_plan(recommendation, save)
    if as_json:
        print_json(recommendation.to_dict())
    elif as_markdown:
        document = terminal.recommended_document(recommendation)
        click.echo(terminal.as_markdown(document), nl=False)
    else:
        terminal.print_recommended(recommendation)
        if save is not None:
            click.echo(visible(f"plan: {save}; try it with: whichlora run {save}"))
            click.echo("  profile: frontier in it measures, on a machine with the GPU")
    if recommendation.answer.winner is None:
        sys.exit(EXIT_NOTHING_FITS)
