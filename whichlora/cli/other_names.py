"""What other tools call our options, for those who type their names."""

from __future__ import annotations

from collections.abc import Collection

from whichlora.methods import list_methods
from whichlora.serving import list_engines
from whichlora.trainers import list_trainers

_NAMES = {
    "--attn": "attn-implementation flash-attn flash-attention",
    "--audio-seconds": "audio-length",
    "--batch-size": "bs micro-batch-size per-device-train-batch-size train-batch-size",
    "--concurrency": "num-users parallel-requests users",
    "--context": "context-length context-size ctx ctx-size max-seq-len-to-capture num-ctx",
    "--epochs": "num-epochs num-train-epochs",
    "--from": "config config-file yaml",
    "--gpus": "n-gpus nproc-per-node num-gpus num-processes world-size",
    "--gradient-accumulation-steps": "grad-accum gradient-accumulation",
    "--image-size": "image image-resolution",
    "--max-new-tokens": "max-tokens output-len output-tokens",
    "--method qlora": "4bit load-in-4bit qlora",
    "--nodes": "nnodes num-nodes",
    "--optimizer": "optim",
    "--parallel": "deepspeed fsdp strategy zero",
    "--precision": "bf16 dtype fp16 torch-dtype",
    "--prompt-len": "input-len input-tokens",
    "--quant": "quantization",
    "--r": "lora-r lora-rank rank",
    "--samples": "max-samples num-samples rows",
    "--seq-len": "cutoff-len max-length max-seq-len max-seq-length sequence-len sequence-length "
    "model-max-length",
    "--serving": "server",
    "--target-modules": "lora-target lora-target-modules",
}
_MEANT = {f"--{each}": ours for ours, names in _NAMES.items() for each in names.split()}
_NO_SAY = frozenset(
    (
        *("--alpha", "--learning-rate", "--lora-alpha", "--lr", "--lr-scheduler-type", "--seed"),
        *("--warmup-ratio", "--warmup-steps", "--weight-decay"),
    )
)
NO_SAY = "it has no say in memory and time, so leave it out"


def has_no_say(typed: str) -> bool:
    """Whether no prediction depends on what `typed` is elsewhere."""
    return typed.replace("_", "-") in _NO_SAY


def meant_by(typed: str, options: Collection[str]) -> str:
    """What of `options`, a command's, goes by the name `typed` elsewhere; empty if none does."""
    typed = typed.replace("_", "-")
    name = typed.lstrip("-").replace("-", "_")
    engines = list_engines().values()
    settings = [each.elsewhere[name] for each in engines if name in each.elsewhere]
    owned = {
        "--serving-option": [option for each in engines for option in each.options],
        "--trainer-option": [
            option for each in list_trainers().values() for option in each.options
        ],
        "--method-option": [option for each in list_methods().values() for option in each.options],
    }
    found = [
        _MEANT.get(typed, ""),
        *(f"--{setting.replace('_', '-')}" for setting in settings),
        *(f"{ours} {name}=VALUE" for ours, own in owned.items() if name in {e.name for e in own}),
    ]
    return next((each for each in found if each.partition(" ")[0] in options), "")
