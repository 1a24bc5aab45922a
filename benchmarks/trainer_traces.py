"""Trace drawn runs of TRL's trainers, keep the records, and compare them with the ledger.

`python benchmarks/trainer_traces.py` prints errors of the peak by trainer, for docs/memory.md.
`--draw 40` traces as many runs of each trainer anew, or of `--trainers dpo,kto`, which needs TRL
(`pip install trl`). Of GRPO the steps alone are traced: a fake model writes no answers.
The TRL that is installed is the one that is traced: `--trainers dpo,kto,orpo,cpo` beside TRL 1.9,
which Axolotl 0.19 needs, and `--trainers llamafactory-dpo,llamafactory-kto` beside TRL 0.24 and
LLaMA-Factory 0.9.5, which need `pip install --no-deps`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from unittest import mock

from trace_records import live_bytes, read, traced_peak, traced_peaks

from whichlora import families
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.spec.options import OptionValue
from whichlora.spec.run import RunConfig
from whichlora.spec.versions import Libraries
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model

RECORDS = Path(__file__).parent / "traces" / "trainers.jsonl"
GPU = find_gpu("a100-sxm-80gb")
TRAINERS = ("sft", "dpo", "kto", "grpo", "reward", "orpo", "cpo")
OF_LLAMAFACTORY = ("llamafactory-dpo", "llamafactory-kto")
OF_TRL_1_9 = ("dpo", "kto", "orpo", "cpo")  # which have another loss there
_BATCH_SIZES = {"kto": (2, 4), "llamafactory-kto": (2, 4), "grpo": (4, 8)}
MODELS = (
    "meta-llama/Llama-3.2-1B",
    "meta-llama/Llama-3.1-8B",
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen2.5-1.5B",
    "google/gemma-2-2b",
    "mistralai/Mistral-7B-v0.3",
    "microsoft/phi-2",
    "EleutherAI/pythia-1.4b",
    "bigcode/starcoder2-3b",
    "HuggingFaceTB/SmolLM3-3B",
)


def config_of(line: dict[str, Any]) -> dict[str, Any]:
    """The config of the record's model with as many layers as were traced."""
    config = dict(load_model(line["run"]["model"]).config)
    config["num_hidden_layers"] = line["layers"]
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][: line["layers"]]
    return config


def job_of(line: dict[str, Any], config: dict[str, Any] | None = None) -> ResolvedRun:
    """Its run, of `config` instead of that of `config_of`."""
    model = families.build(config or config_of(line), name="drawn")
    return resolve(model, RunConfig.from_dict(line["run"]), GPU)


def predicted(line: dict[str, Any]) -> int:
    """Live bytes at the peak, as the ledger has them; answers are not traced."""
    moments = live_bytes(job_of(line))
    return max(size for name, size in moments.items() if not name.startswith("rollout_"))


def traced(line: dict[str, Any]) -> int:
    """The same of the real trainer on fake tensors."""
    return traced_peak(job_of(line), config_of(line))


def draw(seed: int, trainer: str, trl: str = "") -> dict[str, Any]:
    """A run of `trainer`, as the release `trl` has it."""
    rng = random.Random(f"{trainer} {seed}")
    method = rng.choice(("full", "lora", "lora", "dora", "qlora", "qdora"))
    if trl and method == "qdora":  # refused there
        method = "qlora"
    wide = method == "full" and rng.random() < 0.3
    run = RunConfig(
        model=rng.choice(MODELS),
        trainer=trainer,
        method=method,
        r=rng.choice((8, 16, 64)),
        lora_dropout=rng.choice((0.0, 0.0, 0.05)),
        batch_size=rng.choice(_BATCH_SIZES.get(trainer, (1, 2, 4))),
        seq_len=rng.choice((256, 512, 1024)),
        precision="bf16" if wide else rng.choice(("bf16", "bf16-pure")),
        base_dtype="float32" if wide else "auto",
        gradient_checkpointing=rng.random() < 0.6,
        gradient_accumulation_steps=rng.choice((1, 1, 2)),
        trainer_options=_options(trainer, rng),
        libraries={"trl": trl} if trl else {},
    )
    return {"layers": rng.choice((2, 3, 4)), "run": run.to_dict()}


def _options(trainer: str, rng: random.Random) -> tuple[tuple[str, OptionValue], ...]:
    if trainer == "cpo":
        return (("loss_type", rng.choice(("sigmoid", "simpo", "alphapo"))),)
    if trainer == "llamafactory-dpo":
        return (("pref_loss", rng.choice(("sigmoid", "sigmoid", "simpo"))),)
    if trainer != "grpo":
        return ()
    beta, length = rng.choice((0.0, 0.0, 0.04)), rng.choice((64, 128, 192))
    return ("beta", beta), ("max_completion_length", length), ("num_generations", 4)


def records() -> Iterator[dict[str, Any]]:
    return read(RECORDS)


def errors() -> dict[str, list[float]]:
    """Relative errors of the ledger by trainer and release, over all kept records."""
    by_trainer: dict[str, list[float]] = {}
    for line in records():
        error = abs(predicted(line) / line["traced"] - 1)
        by_trainer.setdefault(" ".join(_kind(line)).strip(), []).append(error)
    return by_trainer


def _kind(line: dict[str, Any]) -> tuple[str, str]:
    """Trainer and release of TRL, where it is not the one of today."""
    release = line["run"].get("libraries", {}).get("trl", "")
    return line["run"]["trainer"], f"of TRL {release}" if release else ""


def installed_release(trainer: str) -> str:
    """The TRL that is traced, where a run has to name it."""
    from importlib.metadata import version

    installed = version("trl")
    same = trainer in OF_LLAMAFACTORY or installed == Libraries().trl
    return "" if same else installed


def beside_transformers_5() -> None:
    """Let TRL 0.24 and LLaMA-Factory be imported, which are older than transformers 5.

    Its answer whether a package is there is a pair now, which they take for yes; packages for
    sound and pictures, which no text needs, are stood in for.
    """
    os.environ["DISABLE_VERSION_CHECK"] = "1"
    of_trl = vars(import_module("trl.import_utils"))
    of_trl |= {
        name: value[0]
        for name, value in of_trl.items()
        if name.endswith("_available") and isinstance(value, tuple)
    }
    for name in ("torchaudio", "torchvision", "torchvision.transforms", "av"):
        if find_spec(name.partition(".")[0]) is None:
            stand_in = mock.MagicMock(__spec__=ModuleSpec(name, None))
            sys.modules.setdefault(name, stand_in)


def table() -> str:
    lines = ["| trainer | runs | median | p95 | worst |", "| --- | --- | --- | --- | --- |"]
    for name, sizes in errors().items():
        p95 = quantiles(sizes, n=20, method="inclusive")[-1]
        shown = " | ".join(f"{100 * size:.3f} %" for size in (median(sizes), p95, max(sizes)))
        lines.append(f"| `{name}` | {len(sizes)} | {shown} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", type=int, metavar="N", help="trace N runs and keep them")
    parser.add_argument("--trainers", default=",".join(TRAINERS))
    arguments = parser.parse_args()
    if arguments.draw:
        drawn = arguments.trainers.split(",")
        if set(drawn) & set(OF_LLAMAFACTORY):
            beside_transformers_5()
        lines = [
            draw(seed, trainer, installed_release(trainer))
            for trainer in drawn
            for seed in range(arguments.draw)
        ]
        kinds = {_kind(line) for line in lines}
        others = [line for line in records() if _kind(line) not in kinds]
        with RECORDS.open("w", encoding="utf-8") as file:
            for line in others:
                print(json.dumps(line), file=file)
            for line in lines:
                line |= traced_peaks(job_of(line), config_of(line))
                print(json.dumps(line), file=file, flush=True)
    print(table())


if __name__ == "__main__":
    main()
