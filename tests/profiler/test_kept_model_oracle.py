"""A profile takes the model of the last one where it would build the same, and measures as much."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from whichlora.profiler.kept_model import KeptModel
from whichlora.profiler.worker import answer
from whichlora.spec.run import RunConfig

pytestmark = pytest.mark.oracle

LLAMA = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()  # the libraries, which every measurement else collects among


def request(**settings: Any) -> dict[str, Any]:
    run = RunConfig(**({"model": "tiny", "precision": "fp32", "seq_len": 64} | settings))
    return {
        "run": run.to_dict(),
        "model_config": LLAMA,
        "target_modules": "all-linear",
        "seq_lens": [run.seq_len, run.seq_len // 2],
        "num_batches": 2,
        "decisive_s": [],
        "predicted_s": [],
        "extra_until_s": 100.0,
        "memory_limit_bytes": None,
    }


def measured(kept: KeptModel, **settings: Any) -> tuple[dict[str, Any], list[str]]:
    """The answer, and the stages that were told."""
    stages: list[str] = []
    payload = answer("cpu", kept, request(**settings), stages.append)
    assert payload["outcome"] == "ok", payload
    return payload, stages


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "lora", "precision": "bf16"},
        {"method": "qlora", "precision": "bf16"},
        {"method": "qdora", "precision": "bf16", "gradient_checkpointing": False},
        {"method": "full", "precision": "bf16", "optimizer": "adamw_torch"},
        {"method": "lora", "trainer": "loop", "loss_head": "raw"},
        {"method": "lora", "phase": "inference", "prompt_len": 16, "max_new_tokens": 8},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_a_kept_model_measures_what_a_new_one_does(settings: dict[str, Any]) -> None:
    kept = KeptModel()
    measured(kept, **settings)
    first = kept._model
    again, stages = measured(kept, **settings, batch_size=3)
    assert kept._model is first
    assert "building the model" not in stages
    assert again["clean"]
    alone, stages = measured(KeptModel(), **settings, batch_size=3)
    assert "building the model" in stages
    # but for scalars of the Trainer
    assert again["peak_allocated_bytes"] == pytest.approx(alone["peak_allocated_bytes"], rel=1e-4)


def test_another_model_is_built_and_the_kept_one_freed() -> None:
    kept = KeptModel()
    measured(kept, method="lora")
    held = kept.num_bytes
    payload, stages = measured(kept, method="lora", r=4)
    assert "building the model" in stages
    assert payload["clean"]
    assert 0 < kept.num_bytes < held


def test_what_failed_leaves_no_model() -> None:
    kept = KeptModel()
    measured(kept, method="lora")
    payload = answer("cpu", kept, request(method="lora", loss_head="trl-fused"), lambda _: None)
    assert payload["outcome"] == "error"
    assert payload["clean"]
    assert kept.num_bytes == 0


def test_modules_and_parameters_are_as_they_were_built() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    kept = KeptModel()

    class NoMeter:
        def live_bytes(self) -> int:
            return 0

    kept.model_for(request(), NoMeter(), lambda: model)  # type: ignore[arg-type]
    model[0].register_forward_hook(lambda *_: None)
    model[0].forward = lambda x: x
    model.append(torch.nn.Linear(4, 4))
    model[1].weight.requires_grad_(False)
    model[0].weight.grad = torch.ones(4, 4)
    kept.restore()
    assert len(model) == 2
    assert not model[0]._forward_hooks
    assert model[0].weight.grad is None
    assert model[1].weight.requires_grad
    assert "forward" not in vars(model[0])
