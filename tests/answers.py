"""`answer.json` made by hand, with as many candidates as a test wants."""

from __future__ import annotations

import itertools
from typing import Any

from whichlora.units import GiB

METHODS = ("lora", "qlora", "dora")


def row(
    index: int = 0,
    *,
    phase: str = "finetune",
    model: str = "org/model-7b",
    method: str = "lora",
    r: int = 8,
    batch_size: int = 1,
    peak_bytes: float = 6 * GiB,
    time_per_token_s: float = 0.01,
    source: str = "predicted",
    outcome: str = "",
    verdict: str = "meets",
    **changes: Any,
) -> dict[str, Any]:
    """One candidate as `answer.json` holds it."""
    training = phase == "finetune"
    wide = 1.0 if source == "measured" else 1.3
    name = model.rsplit("/", 1)[-1]
    return {
        "model": model,
        "num_params": 7 * 10**9 - index,
        "phase": phase,
        "method": method if training else "",
        "r": r if training else "",
        "batch_size": batch_size,
        "seq_len": 512 if training else "",
        "prompt_len": "" if training else 16,
        "max_new_tokens": "" if training else 8,
        "verdict": verdict,
        "reason": "" if verdict == "meets" else "predicted 9.00 GiB against peak memory limit",
        "source": source,
        "outcome": outcome,
        "peak_bytes": round(peak_bytes),
        "peak_low_bytes": round(peak_bytes / wide),
        "peak_high_bytes": round(peak_bytes * wide),
        "time_per_token_s": time_per_token_s,
        "time_per_token_low_s": time_per_token_s / wide,
        "time_per_token_high_s": time_per_token_s * wide,
        "total_time_s": 1e5 * time_per_token_s if training else "",
        "total_time_low_s": 1e5 * time_per_token_s / wide if training else "",
        "total_time_high_s": 1e5 * time_per_token_s * wide if training else "",
        "gpu": "made-up-24gb",
        "name": f"{name} {method} r={r}, batch {batch_size}, 512 tokens"
        if training
        else f"{name} inference, batch {batch_size}, prompt 16, 8 new tokens",
        "variant": f"{method} r={r}" if training else "inference, dynamic cache",
        "num_trainable_params": 10**7 if training else 0,
        "usable_bytes": 24 * GiB,
        "predicted_peak_bytes": round(peak_bytes),
        "moment": "loss",
        "breakdown": {"weights": round(0.75 * peak_bytes), "activations": round(0.25 * peak_bytes)},
        "chance": 1.0,
    } | changes


def answer_values(**changes: Any) -> dict[str, Any]:
    """A small answer: two models, three methods, two batch sizes; one out of memory."""
    finetune = [
        row(
            i,
            model=model,
            method=method,
            batch_size=batch,
            peak_bytes=(5 + i) * GiB,
            time_per_token_s=0.01 / batch + 0.001 * i,
        )
        for i, (model, method, batch) in enumerate(
            itertools.product(("org/model-7b", "org/tiny-1b"), METHODS, (1, 4))
        )
    ]
    finetune[0] |= row(0, peak_bytes=5.2 * GiB, source="measured", outcome="ok")
    finetune[3] |= {"source": "measured", "outcome": "oom", "verdict": "misses"}
    inference = [
        row(i, phase="inference", model=model, batch_size=batch, peak_bytes=(2 + i) * GiB)
        for i, (model, batch) in enumerate(
            itertools.product(("org/model-7b", "org/tiny-1b"), (1, 4))
        )
    ]
    guess = {"value": 5.0 * GiB, "low": 4.0 * GiB, "high": 6.0 * GiB, "confidence": 0.95}
    seconds = {"value": 0.012, "low": 0.006, "high": 0.024, "confidence": 0.9}
    compared = {"name": "model-7b lora r=8", "model": "org/model-7b", "phase": "finetune"}
    return {
        "schema_version": 1,
        "config": "plan.yaml",
        "gpu": "made-up-24gb",
        "basis": "memory by the config",
        "tokens": "200 sequences, 40000 tokens an epoch",
        "winner": finetune[0],
        "front": [] if "finetune" in changes else [finetune[1], finetune[0]],
        "kept_models": ["org/model-7b", "org/tiny-1b"],
        "inference": inference,
        "finetune": finetune,
        "files": {"job": "out/train.py"},
        "training": None,
        "explanation": [
            "Winner: org/model-7b (7B parameters), lora r=8, batch size 1 (measured).",
            "  measured 5.20 GiB against peak memory limit 8.00 GiB",
            "model-7b lora r=8, batch 4 left out: too slow",
        ],
        "limits": {
            "device_bytes": 24 * GiB,
            "inference_bytes": None,
            "finetune_bytes": 8 * GiB,
            "time_per_token_s": 0.02,
            "total_time_s": 1500.0,
        },
        "dataset": {"num_sequences": 200, "tokens_per_epoch": 40000, "longest": 512, "epochs": 1},
        "comparison": [
            compared
            | {
                "quantity": "memory_bytes",
                "measured": 5.2 * GiB,
                "cold": guess,
                "before": guess,
                "after": guess,
            },
            compared
            | {
                "quantity": "time_per_token_s",
                "measured": 0.01,
                "cold": seconds,
                "before": seconds,
                "after": seconds,
            },
        ],
        "side_by_side": [
            row(r, method=method, r=r, variant=f"{method} r={r}")
            for method in METHODS
            for r in (4, 64)
        ],
        "provenance": {
            "date": "2026-11-21T00:00:00+00:00",
            "whichlora": "0.1.0",
            "python": "3.11.7",
            "libraries": {"torch": "2.13.0"},
            "profile": "frontier",
            "device": {
                "key": "made-up-24gb",
                "name": "Made Up 24 GB",
                "memory_bytes": 24 * GiB,
                "unverified": [],
            },
            "environments": [],
            "notes": [],
            "calibration": {"num_records": 3, "digest": "abc"},
        },
    } | changes


def many_candidates(count: int) -> dict[str, Any]:
    """An answer with `count` candidates of fine-tuning, spread over models and methods."""
    rows = [
        row(
            i,
            model=f"org/model-{i % 20}",
            method=METHODS[i // 20 % 3],
            r=4 << (i // 60 % 5),
            batch_size=1 + i // 300,
            peak_bytes=(1 + i % 97 / 4) * GiB,
            time_per_token_s=1e-3 * (1 + i % 89),
        )
        for i in range(count)
    ]
    return answer_values(finetune=rows, winner=rows[0])
