"""Configs that say one thing otherwise than a released model: the ledger against the trace."""

from __future__ import annotations

from typing import Any
from unittest import mock

import memory_samples as samples
import pytest

from whichlora.families import build
from whichlora.memory.allocator_simulator import replay
from whichlora.predict.resolve import resolve
from whichlora.spec.run import RunConfig

pytestmark = pytest.mark.oracle
SMALL = {
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
RUNS: tuple[dict[str, Any], ...] = (
    {"method": "full", "gradient_checkpointing": False},
    {"method": "lora", "gradient_checkpointing": False, "target_modules": ("all-linear",)},
    {"method": "lora", "precision": "bf16-pure", "target_modules": ("all-linear",)},
)
CHANGES: tuple[tuple[str, str, Any], ...] = (
    ("gemma2", "attn_logit_softcapping", None),  # SDPA is left out all the same
    ("vaultgemma", "attn_logit_softcapping", None),
    ("gemma", "hidden_act", "gelu_new"),  # not `hidden_activation`
    ("llama", "hidden_act", "tanh"),
    ("llama", "attention_bias", True),
    ("olmo", "hidden_act", "relu"),
    ("qwen3", "hidden_act", "quick_gelu"),
    ("granite", "attention_dropout", 0.1),
    ("mistral", "sliding_window", 256),
    ("starcoder2", "residual_dropout", 0.1),
)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run['method']}-{len(run)}")
@pytest.mark.parametrize(("model_type", "key", "value"), CHANGES)
def test_a_changed_config_takes_what_its_class_takes(
    model_type: str, key: str, value: Any, run: dict[str, Any]
) -> None:
    tracer = pytest.importorskip("whichlora.tracer.trace")
    spec = build({**SMALL, "model_type": model_type, key: value}, name="changed")
    asked = RunConfig(model="changed", batch_size=2, seq_len=512, attn="sdpa", **run)
    job = resolve(spec, asked, samples.GPU)
    with mock.patch.object(samples, "model_of", return_value=spec):
        predicted = samples.predicted_allocated(asked)["peak_allocated_bytes"]
    events, _ = tracer.whole_trace(
        job.run,
        spec.config,
        target_modules=job.peft_targets,
        device_kind=samples.GPU.kind,
        compute_capability=samples.GPU.compute_capability,
        layers="all",
    )
    traced = replay(one.event for one in events).peak_allocated_bytes
    assert predicted == pytest.approx(traced, rel=0.015)
