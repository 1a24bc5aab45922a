"""Trace drawn runs of every PEFT method on ten architectures, and compare them with the ledger.

`python benchmarks/method_traces.py` prints the errors of the peak by method; `--write` writes
docs/accuracy/methods.md. `--draw 320` traces as many runs anew, each in the real code of PEFT on
fake tensors. A drawn run that is refused is drawn again.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import trainer_traces
from trace_records import DrawnRuns, first_accepted

from whichlora.spec.run import RunConfig

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
# Methods that fake tensors can run, and values of their settings to draw from. SHiRA, AdaMSS and
# FRoD need values; LoftQ, EVA, CorDA and LoRA-GA need values or data before the step, which is
# LoRA's.
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
    3000: {"beft": {}},
    3100: {"osf": {"effective_rank": (0.5, 0.75, 256.0)}},
    3200: {"psoft": {"use_cayley_neumann": (False, True), "psoft_orth": (True, False)}},
    3300: {"deft": {"decomposition_method": ("relu", "qr"), "para": (False, False, True)}},
    3500: {
        "glora": {
            "config_A_B": ("lora", "lora", "vector", "constant"),
            "config_C": ("lora", "vector", "none"),
            "config_D_E": ("constant", "vector"),
        }
    },
    3600: {"peanut": {"depth": (1, 2), "act_fn": ("relu", "gelu")}},
    3700: {"mica": {}},
    3800: {"kasa": {}},
    3850: {"velora": {"num_groups": (32, 64, 128)}},
    3900: {"supertuning": {"sparsity": (0.99, 0.95), "r": (8, 16)}},
    6000: {"lily": {"stride_A": (1, 1, 2), "num_B": (2, 4)}},
    6100: {"randlora": {}},
    6200: {"vblora": {"vector_length": (32, 64), "num_vectors": (64, 256), "topk": (2, 3)}},
    6300: {"boft": {"boft_block_size": (32, 64, 128)}},
    6400: {"waveft": {"n_frequency": (300, 2592), "use_idwt": (True, True, False)}},
    6500: {"pvera": {}},
    6600: {"tinylora": {"u": (16, 64), "weight_tying": (0.0, 0.5, 1.0)}},
    6700: {"unilora": {"theta_d_length": (256, 4096)}},
    6800: {"hra": {"apply_GS": (False, False, True)}},
    6900: {"prefix-tuning": {"num_virtual_tokens": (20, 48, 100)}},
    7000: {"cartridge": {"num_virtual_tokens": (64, 256), "num_frozen_tokens": (0, 1, 4)}},
    7100: {"adaption-prompt": {"adapter_len": (10, 30, 64), "adapter_layers": (1, 2, 3, 4)}},
    7200: {
        "prefix-tuning": {
            "num_virtual_tokens": (20, 100),
            "prefix_projection": (True,),
            "encoder_hidden_size": (128, 512),
        }
    },
}


def draw(seed: int) -> tuple[dict[str, Any], int]:
    """A run, and how many drawn before it were refused."""
    rng = random.Random(f"methods {seed}")
    first = max((number for number in LATER if number <= seed), default=0)
    drawn = LATER.get(first, METHODS)
    method = sorted(drawn)[seed % len(drawn)]  # as many of each

    def propose() -> dict[str, Any] | None:
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
            return None  # PEFT widens what is in 16 bits on a CPU, which a trace is
        if seed >= WITHOUT_T5 and run.model == T5:
            return None
        if method == "adalora" and run.precision == "fp32":
            return None  # a trace moves no tensor to a device, which makes `ranknum` trained
        return line

    return first_accepted(propose, trainer_traces.predicted)


TEXT = (
    "# Peak memory of PEFT's methods, against traces\n\n"
    "Made by `benchmarks/method_traces.py --write`. Runs are drawn with a seed: method, its "
    "settings, model, rank, targets, batch, length, precision, storage, dropout, "
    "checkpointing, accumulation. PEFT 0.21.2 runs each on fake tensors, in two to four "
    "layers of the model's real width; the ledger predicts the peak of live bytes.\n\n"
    "Formulas were finished on seeds below 200; the others were drawn after. Seeds from "
    f"{WITHOUT_T5} on are of methods that came later, without T5: AdaLoRA's formulas were "
    "finished on these runs, the others on a small Llama before. SHiRA, AdaMSS and FRoD "
    "read values, so that real steps on a CPU test them "
    "(`tests/methods/test_methods_oracle.py`, every method within 1 %). MiSS's `bat` and "
    "RandLoRA with 16-bit adapters are left out: PEFT widens these on a CPU alone, which a "
    "trace runs on. So is AdaLoRA on an fp32 base, where a GPU alone trains `ranknum`."
)
RUNS = DrawnRuns(
    records=Path(__file__).parent / "traces" / "methods.jsonl",
    page=Path(__file__).parents[1] / "docs" / "accuracy" / "methods.md",
    kind="method",
    text=TEXT,
    draw=draw,
    predicted=trainer_traces.predicted,
    traced=trainer_traces.traced,
)

if __name__ == "__main__":
    RUNS.main(__doc__)
