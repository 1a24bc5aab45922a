"""Runs that share an engine are predicted as if each were alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from whichlora.calibration.load import load_calibration
from whichlora.errors import ConfigError
from whichlora.predict.alike import Predictor, SharedLedgers
from whichlora.predict.defaults import with_open_settings, with_precision
from whichlora.predict.largest import place
from whichlora.predict.parallel_choice import best_of_judged, best_spread
from whichlora.predict.predict import finished, predict
from whichlora.predict.quantities import moment_parts
from whichlora.predict.resolve import ResolvedRun
from whichlora.spec.numeric import Count
from whichlora.spec.parallel import ParallelConfig
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_target
from whichlora.store.hub import load_model

MODEL, GPU = load_model("Qwen/Qwen2.5-0.5B"), find_target("rtx-4090-24gb")
CALIBRATION = load_calibration(GPU)


def runs(engine: str) -> list[RunConfig]:
    """Loads and options in turns: what one starts must not answer another."""
    loads: list[dict[str, object]] = [
        {"prompt_len": 100, "max_new_tokens": 50},
        {"batch_size": 8, "prompt_len": 3000, "max_new_tokens": 20},
        {"batch_size": 8, "context": 30_000, "shared_prompt_fraction": 0.5},
        {"request_rate": 3.0},
        {"length_spread": 0.3},
    ]
    options = [(), {"vllm": (("max_num_batched_tokens", 512),)}.get(engine, ())]
    return [
        RunConfig(model=MODEL.name, phase="inference", serving=engine, serving_options=each, **load)  # type: ignore[arg-type]
        for load in loads
        for each in dict.fromkeys(options)
    ]


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llama-cpp", "transformers"])
def test_together_and_alone_are_equal(engine: str) -> None:
    predictor = Predictor()
    asked = runs(engine)[: None if engine != "transformers" else 1]
    for run in asked:
        together = predictor.predict(MODEL, run, GPU, CALIBRATION)
        assert together == predict(MODEL, run, GPU, CALIBRATION)


def test_a_refusal_stays_one() -> None:
    predictor = Predictor()
    refused = RunConfig(model=MODEL.name, phase="inference", serving="vllm", quant="nf4")
    for _ in range(2):
        with pytest.raises(ConfigError, match="reads no bitsandbytes"):
            predictor.predict(MODEL, refused, GPU, CALIBRATION)


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "fsdp"])
def test_what_is_counted_once_is_the_same_over_all_links(strategy: str) -> None:
    predictor = Predictor()
    run = RunConfig(model=MODEL.name, precision="bf16", gradient_checkpointing=True)
    for links in ("25GB/s", "auto", "2GB/s"):
        spread = ParallelConfig(strategy=strategy, gpus=2, interconnect=links)
        asked = replace(run, parallel=spread)
        together = predictor.predict_over(MODEL, asked, GPU, CALIBRATION)
        assert together == predict(MODEL, asked, GPU, CALIBRATION)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_the_best_of_what_is_judged_is_the_best_prediction(method: str) -> None:
    predictor = Predictor()
    run = RunConfig(
        model=MODEL.name,
        method=method,
        precision="bf16",
        gradient_checkpointing=True,
        parallel=ParallelConfig(strategy="auto", gpus=4, host_memory_bytes=10**8),
    )
    judged = best_of_judged(
        run, lambda each: predictor.judge(MODEL, each, GPU, CALIBRATION), finished
    )
    assert judged == best_spread(run, lambda each: predict(MODEL, each, GPU, CALIBRATION))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"method": "qlora", "batch_size": 4},
        {"trainer": "grpo", "batch_size": 8},  # whose pool is a share of the card
        {"phase": "inference"},
        {"parallel": ParallelConfig(gpus=2, strategy="fsdp")},
    ],
    ids=str,
)
def test_cards_that_share_a_ledger_are_answered_as_if_each_were_alone(
    settings: dict[str, Any],
) -> None:
    """Of capability 8.0, 8.0, 8.6 and 7.5, each with a context of its own."""
    run, shared = RunConfig(model=MODEL.name, **settings), SharedLedgers()
    for name in ("a100-sxm-40gb", "a100-sxm-80gb", "rtx-3090-24gb", "t4-16gb", "cpu"):
        card = find_target(name)
        calibration = load_calibration(card)
        asked = with_precision(with_open_settings(MODEL, run), card)
        placements = (
            place(MODEL, asked, card, calibration, each) for each in (shared, SharedLedgers())
        )
        together, alone = (placement.to_dict() for placement in placements)
        assert together == alone


def test_bytes_are_counted_once_for_cards_of_one_capability(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted: list[tuple[str, Count]] = []

    def counting(job: ResolvedRun, *, batch_size: Count) -> Mapping[str, Mapping[str, Count]]:
        counted.append((str(job.gpu.compute_capability), batch_size))
        return moment_parts(job, batch_size=batch_size)

    monkeypatch.setattr("whichlora.predict.alike.moment_parts", counting)
    run, shared = RunConfig(model=MODEL.name), SharedLedgers()
    for name in ("a100-sxm-40gb", "a100-sxm-80gb", "rtx-3090-24gb"):
        card = find_target(name)
        place(MODEL, run, card, load_calibration(card), shared)
    assert {capability for capability, _ in counted} == {"8.0", "8.6"}
    assert len(set(counted)) == len(counted)
