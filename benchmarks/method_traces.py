"""Trace drawn runs of every PEFT method on ten architectures, and compare them with the ledger.

`python benchmarks/method_traces.py` prints the errors of the peak by method; `--write` writes
docs/accuracy/methods.md. `--draw 320` traces as many runs anew, each in the real code of PEFT on
fake tensors. A drawn run that is refused is drawn again.
"""

from __future__ import annotations

import argparse
import json
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import trainer_traces

from whichlora.errors import ConfigError
from whichlora.spec.run import RunConfig

RECORDS = Path(__file__).parent / "traces" / "methods.jsonl"
PAGE = Path(__file__).parents[1] / "docs" / "accuracy" / "methods.md"
T5 = "google-t5/t5-base"
WITHOUT_T5 = 1000  # first seed that leaves it out: it takes ten times as long to trace
MODELS = (
    "meta-llama/Llama-3.2-1B",
    "mistralai/Mistral-7B-v0.3",
    "Qwen/Qwen2.5-1.5B",
    "Qwen/Qwen3-0.6B",
    "google/gemma-2-2b",
    "openai-community/gpt2",
    "facebook/opt-1.3b",
    "microsoft/phi-2",
    "EleutherAI/pythia-1b",
    "bigscience/bloom-560m",
    T5,
)
# Methods that fake tensors can run, and values of their settings to draw from. SHiRA's mask needs
# values; LoftQ, EVA, CorDA and LoRA-GA need values or data before the step, which is LoRA's.
METHODS: dict[str, dict[str, tuple[Any, ...]]] = {
    "lora": {},
    "miss": {"init_weights": ("true", "true", "bat")},
    "oft": {"oft_block_size": (16, 32, 64), "num_cayley_neumann_terms": (3, 5, 6)},
    "c3a": {"block_size": (32, 64, 128)},
    "vera": {},
    "ia3": {},
    "loha": {},
    "lokr": {"decompose_factor": (4, 8, 16), "decompose_both": (False, True)},
}

# Sets that were drawn later, by their first seed, so that the others draw what they drew.
LATER: dict[int, dict[str, dict[str, tuple[Any, ...]]]] = {
    400: {"lora-fa": {}},
    1000: {"adalora": {"target_r": (4,), "tinit": (100,)}},
    1100: {"trainable-tokens": {"token_indices": ("5", "5+6+7")}},
    1200: {"prompt-tuning": {"num_virtual_tokens": (20, 50, 100)}},
    1300: {"p-tuning": {"num_virtual_tokens": (20, 50), "encoder_hidden_size": (128, 512)}},
    1400: {"ln-tuning": {}},
    1500: {"hira": {}},
    1600: {"fourierft": {"n_frequency": (300, 1000)}},
    1700: {"delora": {}},
    1800: {"road": {"variant": ("road_1", "road_2", "road_4"), "group_size": (32, 64)}},
    1900: {"gralora": {"gralora_k": (2, 4)}},
    6000: {"lily": {"stride_A": (1, 1, 2), "num_B": (2, 4)}},
    6100: {"randlora": {}},
    6200: {"vblora": {"vector_length": (32, 64), "num_vectors": (64, 256), "topk": (2, 3)}},
    6300: {"boft": {"boft_block_size": (32, 64, 128)}},
    6400: {"waveft": {"n_frequency": (300, 2592), "use_idwt": (True, True, False)}},
    6500: {"pvera": {}},
    6600: {"tinylora": {"u": (16, 64), "weight_tying": (0.0, 0.5, 1.0)}},
    6700: {"unilora": {"theta_d_length": (256, 4096)}},
}


def draw(seed: int) -> tuple[dict[str, Any], int]:
    """A run, and how many drawn before it were refused."""
    rng = random.Random(f"methods {seed}")
    first = max((number for number in LATER if number <= seed), default=0)
    drawn = LATER.get(first, METHODS)
    method = sorted(drawn)[seed % len(drawn)]  # as many of each
    for refused in range(1000):
        options = {name: rng.choice(values) for name, values in drawn[method].items()}
        run = RunConfig(
            model=rng.choice(MODELS),
            method=method,
            method_options=tuple(sorted(options.items())),
            r=rng.choice((8, 16, 32)),
            lora_dropout=rng.choice((0.0, 0.0, 0.05)),
            target_modules=rng.choice((("all-linear",), ("all-linear",), ("attention",))),
            batch_size=rng.choice((1, 2, 4)),
            seq_len=rng.choice((256, 512, 1024)),
            precision=rng.choice(("bf16", "bf16", "bf16-no-autocast", "bf16-pure", "fp32")),
            quant=rng.choice(("none", "none", "none", "nf4-dq", "int8")),
            gradient_checkpointing=rng.random() < 0.5,
            gradient_accumulation_steps=rng.choice((1, 1, 2)),
        )
        line = {"layers": rng.choice((2, 3, 4)), "run": run.to_dict()}
        widens = method == "randlora" or options.get("init_weights") == "bat"
        if widens and run.narrows_adapters:
            continue  # PEFT widens what is in 16 bits on a CPU, which a trace is
        if seed >= WITHOUT_T5 and run.model == T5:
            continue
        if method == "adalora" and run.precision == "fp32":
            continue  # a trace moves no tensor to a device, which is what makes `ranknum` trained
        try:
            trainer_traces.predicted(line)
        except ConfigError:
            continue
        return line, refused
    raise AssertionError(f"no run of {method} is accepted")


def records() -> Iterator[dict[str, Any]]:
    for text in RECORDS.read_text(encoding="utf-8").splitlines():
        yield json.loads(text)


def errors() -> dict[str, list[float]]:
    """Relative errors of the ledger over all kept records, by method."""
    by_method: dict[str, list[float]] = {}
    for line in records():
        error = abs(trainer_traces.predicted(line) / line["traced"] - 1)
        by_method.setdefault(line["run"]["method"], []).append(error)
    return by_method


def row(name: str, sizes: list[float]) -> str:
    two = sizes if len(sizes) > 1 else sizes * 2  # of fewer there are no quantiles
    p90, p95 = (quantiles(two, n=20, method="inclusive")[place] for place in (17, 18))
    shown = (f"{100 * size:.3f} %" for size in (median(sizes), p90, p95, max(sizes)))
    return f"| {name} | {len(sizes)} | {' | '.join(shown)} |"


def page() -> str:
    """docs/accuracy/methods.md."""
    by_method = errors()
    every = [size for sizes in by_method.values() for size in sizes]
    models = sorted({line["run"]["model"] for line in records()})
    rows = [row("all", every), *(row(name, sizes) for name, sizes in by_method.items())]
    header = (
        "| method | runs | median | p90 | p95 | worst |\n| --- | ---: | ---: | ---: | ---: | ---: |"
    )
    return (
        "# Peak memory of PEFT's methods, against traces\n\n"
        "Made by `benchmarks/method_traces.py --write`. Runs are drawn with a seed: method, its "
        "settings, model, rank, targets, batch, length, precision, storage, dropout, "
        "checkpointing, accumulation. PEFT 0.21.2 runs each on fake tensors, in two to four "
        "layers of the model's real width; the ledger predicts the peak of live bytes.\n\n"
        "Formulas were finished on seeds below 200; the others were drawn after. Seeds from "
        f"{WITHOUT_T5} on are of methods that came later, without T5: AdaLoRA's formulas were "
        "finished on these runs, the others on a small Llama before. SHiRA's mask "
        "needs values, so that real steps on a CPU test it "
        "(`tests/methods/test_methods_oracle.py`, every method within 1 %). MiSS's `bat` and "
        "RandLoRA with 16-bit adapters are left out: PEFT widens these on a CPU alone, which a "
        "trace runs on. So is AdaLoRA on an fp32 base, where a GPU alone trains `ranknum`.\n\n"
        + "\n".join([header, *rows])
        + f"\n\nModels: {', '.join(models)}.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", type=int, metavar="N", help="trace N runs and keep them")
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    parser.add_argument("--output", type=Path, default=RECORDS)
    parser.add_argument("--write", action="store_true", help="write the page")
    arguments = parser.parse_args()
    if arguments.draw:
        warnings.simplefilter("ignore")
        with arguments.output.open("a", encoding="utf-8") as file:
            for seed in range(arguments.first, arguments.first + arguments.draw):
                line, _ = draw(seed)
                line["traced"] = trainer_traces.traced(line)
                print(json.dumps(line), file=file, flush=True)
    if arguments.write:
        PAGE.write_text(page(), encoding="utf-8")
        return
    by_method = errors()
    for method, sizes in by_method.items():
        print(row(method, sizes))
    print(row("all", [size for sizes in by_method.values() for size in sizes]))


if __name__ == "__main__":
    main()
