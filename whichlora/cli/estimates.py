"""`whichlora estimate`: one candidate or a grid, predicted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import click

from whichlora import specs
from whichlora.cli.options import choices, counts, fractions, list_option, versions, words
from whichlora.results import SCHEMA_VERSION


@click.command()
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@choices("phase", "finetune", "What runs", specs.Phase)
@list_option("method", "lora", "full, lora, qlora, dora, qdora.", words("method"))
@list_option("batch-size", "1", "Sequences per device per micro-step.", counts("batch-size"))
@list_option("seq-len", "2048", "Tokens per sequence, padding included.", counts("seq-len"))
@list_option("r", "16", "Rank of the adapters.", counts("r"))
@list_option("lora-dropout", "0", "Dropout before the adapters.", fractions("lora-dropout"))
@click.option(
    "--target-modules",
    default=specs.ALL_LINEAR,
    show_default=True,
    help="Layers that get an adapter: names with commas, all-linear, or attention.",
    callback=words("target-modules"),
)
@choices("precision", "bf16", "Base weights, adapters and autocast", specs.Precision)
@choices("optimizer", "adamw_torch_fused", "Optimizer", specs.Optimizer)
@click.option(
    "--gradient-checkpointing/--no-gradient-checkpointing",
    default=True,
    show_default=True,
    help="Recompute activations in the backward pass.",
)
@list_option(
    "gradient-accumulation-steps",
    "1",
    "Micro-steps per optimizer step.",
    counts("gradient-accumulation-steps"),
)
@choices("attn", "sdpa", "Attention kernel", specs.AttentionKernel)
@choices("padding", "none", "Whether batches carry padding", specs.Padding)
@choices("loss-head", "hf", "Who computes the loss", specs.LossHead)
@click.option(
    "--quant",
    default=None,
    help=f"Storage of the base weights ({', '.join(get_args(specs.Quant))}); "
    "default: nf4-dq for qlora and qdora, else none.",
)
@click.option(
    "--prepare-kbit/--no-prepare-kbit",
    default=None,
    help="Whether prepare_model_for_kbit_training runs; default: for a 4-bit or 8-bit base, "
    "except with the trl-fused loss.",
)
@list_option("prompt-len", "512", "Prompt tokens (inference).", counts("prompt-len"))
@list_option("max-new-tokens", "128", "Generated tokens (inference).", counts("max-new-tokens"))
@choices("kv-cache", "dynamic", "Key-value cache (inference)", specs.KvCache)
@click.option(
    "--libraries",
    default="",
    callback=versions,
    help="Versions that are not the current ones, such as transformers=4.44.2,torch=2.1.1; older "
    "code keeps other tensors.",
)
@list_option("gpu", "auto", "Accelerators: see `whichlora gpus`; cpu, auto.", words("gpu"))
@click.option(
    "--calibration-dir",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Your calibrations.",
)
@click.option(
    "--engine",
    type=click.Choice(get_args(specs.Engine)),
    default="ledger",
    show_default=True,
    help="Where memory comes from: formulas, or a trace of the real code (needs torch).",
)
@click.option(
    "--trace-layers",
    type=click.Choice(["2,4", "all"]),
    default="2,4",
    show_default=True,
    help="Trace four layers and stretch them to all, checked by two; or trace all.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON with every part.")
def estimate(
    models: tuple[str, ...],
    gpu: list[str],
    quant: str | None,
    target_modules: list[str],
    gradient_checkpointing: bool,
    prepare_kbit: bool | None,
    libraries: tuple[tuple[str, str], ...],
    calibration_dir: Path | None,
    engine: specs.Engine,
    trace_layers: str,
    as_json: bool,
    **lists: list[Any],
) -> None:
    """Peak memory and time, without a GPU and without running anything.

    Every list with commas makes a grid.

    \b
    Example:
      whichlora estimate meta-llama/Llama-3.1-8B --gpu h100-sxm-80gb \\
          --method lora,qlora --batch-size 1,4,16 --seq-len 2048
    """
    from whichlora import api

    quants: list[str | None] = [None]
    if quant is not None:
        quants = list(words("quant", tuple(get_args(specs.Quant)))(None, None, quant))
    settings: dict[str, list[Any]] = {
        **lists,
        "model": list(models),
        "quant": quants,
        "target_modules": [tuple(target_modules)],
        "gradient_checkpointing": [gradient_checkpointing],
        "prepare_kbit": [prepare_kbit],
        "libraries": [libraries],
    }
    predictions = api.estimate(
        api.grid(settings),
        gpu,
        calibration_dir=calibration_dir,
        engine=engine,
        trace_layers=trace_layers,
    )
    if as_json:
        answer = {
            "schema_version": SCHEMA_VERSION,
            "predictions": [prediction.to_dict() for prediction in predictions],
        }
        click.echo(json.dumps(answer, indent=1))
        return
    from whichlora import report

    report.print_predictions(predictions)
