"""VeRA as another package states it, against the real PEFT code; needs torch."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("peft")

from traced import live_bytes
from train_runs import run_script
from written_job import train_script_of

from whichlora import families
from whichlora.predict import quantities
from whichlora.predict import resolve as resolution
from whichlora.spec import members
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.tracer.trace import trace

pytestmark = pytest.mark.oracle

OUTSIDE = Path(__file__).parents[1] / "outside_methods"
GPU = find_gpu("a100-sxm-80gb")
LLAMA = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 1000,
    "n_embd": 256,
    "n_layer": 4,
    "n_head": 8,
    "n_positions": 512,
}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(OUTSIDE)
    monkeypatch.setattr(members, "entry_points", importlib.metadata.entry_points)  # not hidden here
    importlib.invalidate_caches()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (LLAMA, {}),
        (LLAMA, {"gradient_checkpointing": False, "lora_dropout": 0.1}),
        (LLAMA, {"gradient_checkpointing": False, "precision": "bf16-no-autocast", "r": 256}),
        (LLAMA, {"quant": "nf4-dq"}),
        (GPT2, {"quant": "nf4-dq"}),
        (GPT2, {"gradient_checkpointing": False, "r": 256}),
        (GPT2, {"precision": "bf16-pure"}),
    ],
    ids=lambda value: value.get("model_type", str(value)),
)
def test_the_ledger_agrees_with_the_trace(config: dict[str, Any], settings: dict[str, Any]) -> None:
    settings = {"seq_len": 256, "r": 64, "expandable_segments": True} | settings  # no remainders
    run = RunConfig(model="x", method="outside-vera", **settings)
    job = resolution.resolve(families.build(config, name="x"), run, GPU)
    found = quantities.ledger(job)
    events = trace(job.run, config, target_modules="all-linear")
    traced = max(num_bytes for _, num_bytes in live_bytes(events))
    predicted = int(found.peak_allocated_bytes) - found.workspace_bytes
    assert predicted == pytest.approx(traced, rel=0.01)


def test_train_py_trains_it(tmp_path: Path) -> None:
    run = RunConfig(
        model="tiny",
        method="outside-vera",
        padding="padded",
        seq_len=32,
        batch_size=2,
        precision="fp32",
        r=4,
    )
    config = LLAMA | {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64}
    path = tmp_path / "train.py"
    path.write_text(
        train_script_of(
            run, target_modules="all-linear", weights="random", model_config=config, epochs=0.5
        )
    )
    rows = "".join(json.dumps({"text": "to be or not to be"}) + "\n" for _ in range(4))
    (tmp_path / "train.jsonl").write_text(rows)
    done = run_script(path)
    assert done.returncode == 0, done.stderr
    saved = [json.loads(path.read_text()) for path in tmp_path.rglob("adapter_config.json")]
    assert {config["peft_type"] for config in saved} == {"VERA"}
    assert json.loads((tmp_path / "output" / "result.json").read_text())
