"""What a checkpoint copies to the host and gathers on a GPU."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from devices import CPU
from train_runs import run_ranks

from whichlora.api import estimate
from whichlora.families import build
from whichlora.parallel import deepspeed, fsdp, zero3
from whichlora.parallel.base import Saving
from whichlora.predict.quantities import training_step
from whichlora.predict.resolve import resolve
from whichlora.spec.parallel import ParallelConfig
from whichlora.spec.run import RunConfig

CONFIG = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "tie_word_embeddings": False,
}
WEIGHTS = 699_264  # parameters
ADAPTERS = 49_152
TABLE = 128 * 1000
WORKER = Path(__file__).parents[1] / "saving_worker.py"


def saving_of(strategy: str, method: str, **options: Any) -> Saving:
    parallel = ParallelConfig(strategy=strategy, gpus=2, options=tuple(options.items()))
    run = RunConfig(
        model="llama", method=method, r=8, seq_len=32, precision="bf16", parallel=parallel
    )
    job = resolve(build(CONFIG, name="llama"), run, CPU)
    assert job.layout is not None
    (kind,) = job.layout.rank_kinds(training_step(job))
    saving = job.layout.saving(kind)
    assert saving is not None
    return saving


def test_fsdp_copies_all_weights_and_states_to_rank_0() -> None:
    full = saving_of("fsdp", "full")
    assert not full.by_all_ranks
    assert full.host_bytes == 8 * WEIGHTS  # AdamW's states, more than the weights in fp32
    assert full.device_bytes == 4 * TABLE
    lora = saving_of("fsdp", "lora")
    assert lora.host_bytes == 2 * WEIGHTS + 4 * ADAPTERS  # frozen ones, too
    assert saving_of("fsdp", "full", fsdp_version="1").device_bytes >= 2 * 4 * TABLE
    assert fsdp.STRATEGY.saving is fsdp.saving


def test_stages_1_and_2_copy_all_weights_on_each_rank() -> None:
    saving = saving_of("zero2", "lora")
    assert saving.by_all_ranks
    assert saving.host_bytes == 2 * (WEIGHTS + ADAPTERS)
    assert saving.device_bytes == 0
    assert deepspeed.saving is zero3.deepspeed.saving


def test_stage_3_gathers_a_module_at_a_time_and_leaves_out_what_is_frozen() -> None:
    assert saving_of("zero3", "full").host_bytes == 2 * WEIGHTS
    lora = saving_of("zero3", "lora")
    assert (lora.host_bytes, lora.device_bytes) == (4 * ADAPTERS, 2 * TABLE)
    assert zero3.STRATEGY.saving is zero3.saving


def test_the_answer_names_it_with_the_setting_that_lowers_it() -> None:
    asked: dict[str, Any] = {"gpus": 4, "nodes": 2, "parallel": ["zero2", "ddp"]}
    zero, ddp = estimate("gpt2", "l4", method="full", seq_len=64, **asked)
    assert zero.several_gpus is not None
    assert zero.several_gpus.saving is not None
    assert zero.several_gpus.saving.host_bytes == 2 * 2 * zero.num_params  # two ranks on a node
    assert zero.to_dict()["saving"]["by_all_ranks"] is True
    assert ddp.to_dict()["saving"] is None


@pytest.mark.oracle
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("strategy", ["fsdp", "zero2", "zero3"])
def test_real_ranks_copy_as_many_bytes(tmp_path: Path, strategy: str, method: str) -> None:
    """FSDP 1 can't be made on a CPU; its hooks were read."""
    if strategy != "fsdp" and not find_spec("deepspeed"):
        pytest.skip("needs deepspeed 0.19.8, which is no dependency")
    parallel = ParallelConfig(strategy=strategy, gpus=2)
    run = RunConfig(model="llama", method=method, precision="bf16", parallel=parallel)
    layout = resolve(build(CONFIG, name="llama"), run, CPU).layout
    assert layout is not None
    lora = {"r": 8, "target_modules": "all-linear"} if method == "lora" else None
    case = {"config": CONFIG, "training": layout.training_arguments(run), "lora": lora}
    (tmp_path / "case.json").write_text(json.dumps(case))
    run_ranks(WORKER, str(tmp_path), world_size=2, logs_folder=tmp_path, timeout_s=300)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    expected = saving_of(strategy, method)
    assert max(first.values()) == expected.host_bytes
    assert max(second.values()) == (expected.host_bytes if expected.by_all_ranks else 0)
