"""Reserved bytes by a replay of the run's own requests, against replays of real ones."""

import itertools
import json
import statistics
from dataclasses import replace

import memory_samples as samples
import pytest
from reserved_accuracy import compared_liger

from whichlora.memory.reserved import replayed_idle_bytes
from whichlora.memory.step import TrainingStep
from whichlora.memory.training import training_ledger
from whichlora.predict.quantities import ledger_and_idle, training_step
from whichlora.predict.resolve import resolve
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.units import GiB

MODEL = "Qwen/Qwen2.5-0.5B"


def reserved(run: RunConfig) -> int | None:
    """Predicted without a limit of memory and without workspaces."""
    step = step_of(run, memory_bytes=2**60)
    counted = training_ledger(step)
    live = counted.peak_allocated_bytes - counted.workspace_bytes
    idle = replayed_idle_bytes(step, live_bytes=live)
    return None if idle is None else live + idle


def step_of(run: RunConfig, **gpu: int) -> TrainingStep:
    return training_step(resolve(samples.model_of(run.model), run, replace(samples.GPU, **gpu)))


@pytest.mark.parametrize(
    ("settings", "traced"),
    [  # MiB that the requests of the real code reserve; `benchmarks/memory_samples._peaks`
        ({}, 9820),
        ({"gradient_checkpointing": False}, 15576),
        ({"method": "qlora"}, 10152),
        ({"method": "dora"}, 10046),
        ({"method": "dora", "gradient_checkpointing": False}, 20546),
        ({"method": "full"}, 11992),
        ({"method": "full", "optimizer": "adamw_torch", "gradient_checkpointing": False}, 17260),
    ],
)
def test_what_is_reserved_is_what_the_real_requests_reserve(
    settings: dict[str, object], traced: int
) -> None:
    found = reserved(RunConfig(model=MODEL, batch_size=4, seq_len=1024, **settings))
    assert found is not None
    assert found / 2**20 == pytest.approx(traced, rel=0.01)


def test_kept_traces_reserve_what_the_replay_says() -> None:
    lines = [line for line in samples.read_lines() if "refused" not in line]
    lines = [line for line in lines if line["run"].get("phase") != "inference"][::18]
    errors = []
    for line in lines:
        found = reserved(RunConfig.from_dict(line["run"]))
        if found is not None:
            errors.append(abs(found / line["peak_reserved_bytes"] - 1))
    assert len(errors) >= len(lines) // 2, json.dumps([line["run"] for line in lines])
    assert statistics.median(errors) < 0.01


def test_ligers_loss_reserves_what_the_real_one_does() -> None:
    """Of the traces of `kernel_traces.py`; chunks of logits share a tensor or have one each."""
    found = list(itertools.islice(compared_liger(), 0, None, 4))
    errors = [abs(one.answer) for one in found if one.is_replayed]
    assert len(errors) >= 0.75 * len(found)
    assert statistics.median(errors) < 0.003
    assert max(errors) < 0.07


@pytest.mark.parametrize(
    "settings",
    [
        # layers that end in a norm, a masked head that autocast copies
        {"model": "google-bert/bert-base-uncased", "method": "qlora", "use_reentrant": False},
        {"model": "google-bert/bert-base-uncased", "method": "full", "precision": "bf16-pure"},
        # inputs that 8-bit matrices hold, of layers without a norm before them
        {"model": "allenai/OLMo-2-1124-7B", "quant": "int8"},
        # the last norm keeps the stream
        {"model": "allenai/Olmo-3-1025-7B", "precision": "fp32", "loss_head": "raw"},
        # an encoder and its decoder, with one table of tokens and a tied head
        {"model": "google-t5/t5-base", "method": "full", "precision": "bf16-pure"},
        {"model": "facebook/bart-base", "gradient_checkpointing": False},
        {"model": "t5gemma", "quant": "int8"},
        # a fused head that casts several slices of its weight, for several tiles of tokens
        {"model": "google/gemma-2-2b", "trainer": "sft", "base_dtype": "float32"},
        {
            "model": "google/gemma-2-2b",
            "trainer": "sft",
            "method": "full",
            "base_dtype": "float32",
            "seq_len": 1024,
        },
        # a tower that takes no part
        {"model": "Qwen/Qwen3.5-9B", "method": "qlora"},
    ],
)
def test_events_add_up_to_the_ledger_in_every_micro_step(settings: dict[str, object]) -> None:
    sizes = {"batch_size": 8, "seq_len": 512, "gradient_accumulation_steps": 3}
    run = RunConfig(**sizes | settings)
    assert reserved(run) is not None


@pytest.mark.parametrize(
    "settings",
    [
        {"model": "google-bert/bert-base-uncased", "method": "full"},
        {"method": "full", "batch_size": 8, "gradient_checkpointing": False},
        {"method": "qlora"},
        {"method": "lora", "gradient_accumulation_steps": 3},
    ],
)
def test_zeros_in_place_of_gradients_add_up_to_the_ledger(settings: dict[str, object]) -> None:
    run = RunConfig(**{"model": MODEL, "seq_len": 512, **settings})
    zeroed, dropped = (
        reserved(replace(run, libraries=(("torch", torch),))) for torch in ("1.13.1", "2.0.0")
    )
    assert zeroed is not None
    assert dropped is not None
    assert zeroed >= dropped


def test_no_replay_says_what_its_events_do_not_know() -> None:
    # one layer, run twelve times
    run = RunConfig(model="albert/albert-base-v2", seq_len=128, gradient_checkpointing=False)
    assert reserved(run) is None
    step = step_of(RunConfig(model=MODEL, seq_len=128))
    assert replayed_idle_bytes(step, live_bytes=100 * GiB) is None  # another run's ledger
    on_cpu = replace(step, gpu=replace(step.gpu, kind="cpu"))
    assert replayed_idle_bytes(on_cpu, live_bytes=GiB) is None


def test_a_run_that_no_address_reaches_has_an_estimate() -> None:
    absurd = RunConfig(model=MODEL, batch_size=10**9, seq_len=10**9)
    counted, idle_bytes = ledger_and_idle(resolve(samples.model_of(MODEL), absurd, samples.GPU))
    assert idle_bytes is None
    assert counted.peak_allocated_bytes > 2**64


def test_expandable_segments_reserve_less() -> None:
    plain = RunConfig(model=MODEL, batch_size=4, seq_len=1024)
    by_pages = reserved(replace(plain, expandable_segments=True))
    assert by_pages is not None
    assert by_pages < (reserved(plain) or 0)


@pytest.mark.parametrize(
    ("settings", "measured"),
    [  # MiB of runs on an H200, calibration/h200-sxm-141gb/measurements
        # a workspace is cut from the logits' blocks in the first backward, so that another is made
        ({"model": "HuggingFaceTB/SmolLM2-135M", "method": "full", "batch_size": 8}, 7854),
        (
            {
                "model": "HuggingFaceTB/SmolLM2-135M",
                "method": "full",
                "batch_size": 2,
                "seq_len": 4096,
                "optimizer": "adamw_8bit",
                "padding": "padded",
            },
            7958,
        ),
        ({"batch_size": 1, "seq_len": 512, "gradient_checkpointing": False}, 4640),
        ({"batch_size": 4, "gradient_checkpointing": False}, 17170),
        # from blocks that layer 0 has freed before its first product
        ({"model": "Qwen/Qwen2.5-3B", "phase": "inference", "batch_size": 32}, 8480),
        ({"model": "google/gemma-2b", "phase": "inference", "prompt_len": 2048}, 5170),
    ],
    ids=str,
)
def test_workspaces_are_cut_from_what_is_idle_as_on_an_h200(
    settings: dict[str, object], measured: int
) -> None:
    run = RunConfig(
        **{
            "model": "meta-llama/Llama-3.2-1B",
            "seq_len": 1024,
            "optimizer": "adamw_torch_fused",
            "lora_dropout": 0.0,
            "r": 16,
            "max_new_tokens": 16,
        }
        | settings
    )
    gpu = find_gpu("h200-sxm-141gb")
    job = resolve(samples.model_of(run.model), run, gpu)
    counted, idle = ledger_and_idle(job)
    assert idle is not None
    assert (counted.peak_allocated_bytes + idle) / 2**20 == pytest.approx(measured, rel=0.005)
