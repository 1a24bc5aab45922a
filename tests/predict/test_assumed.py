"""What an answer says of settings that nobody stated."""

from __future__ import annotations

from typing import Any

from whichlora import estimate
from whichlora.predict.assumed import MOVING
from whichlora.spec.results import Answers, Prediction
from whichlora.terminal.assumed import assumed_lines


def answers(**settings: Any) -> Answers[Prediction]:
    return estimate("Qwen/Qwen3-0.6B", "24GB", batch_size=1, **settings)


def test_the_trainers_own_memory_is_that_of_the_same_run_with_its_defaults() -> None:
    (open_run,) = answers(method="full")
    stated: dict[str, Any] = {"precision": "bf16-pure", "gradient_checkpointing": False}
    (own,) = answers(method="full", **stated)
    assert open_run.assumed is not None
    assert open_run.assumed.own == stated
    assert open_run.assumed.own_bytes == own.memory.device_used_bytes
    (line,) = assumed_lines([open_run])
    assert "bf16 with autocast, gradient checkpointing, fused AdamW, SDPA, 2,048 tokens" in line
    assert "Trainer by itself has bf16 weights without autocast and no gradient checkpoi" in line


def test_what_is_stated_is_not_assumed() -> None:
    settings: dict[str, Any] = {
        "precision": "bf16",
        "gradient_checkpointing": True,
        "optimizer": "sgd",
        "attn": "eager",
        "seq_len": 512,
    }
    assert set(settings) == set(MOVING)
    (prediction,) = answers(**settings)
    assert prediction.assumed is None
    assert not list(assumed_lines([prediction]))
    (of_inference,) = answers(phase="inference")
    assert of_inference.assumed is None


def test_a_release_of_trl_is_named() -> None:
    libraries = {"trl": "0.17", "transformers": "4.51.3"}
    (prediction,) = answers(method="full", trainer="dpo", libraries=libraries, seq_len=512)
    (line,) = assumed_lines([prediction])
    assert line == (
        "assumed, as trl 0.17 has them: fp32, no gradient checkpointing, AdamW (foreach), SDPA"
    )


def test_one_line_is_of_a_whole_table() -> None:
    (line,) = assumed_lines(answers(method=["lora", "qlora"], seq_len=[512, 2048]))
    assert line.count("Trainer by itself") == 1
    assert line.endswith(" times the memory")
