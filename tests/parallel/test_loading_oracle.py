"""What the second process of a node loads where the first one should load alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.oracle

SCRIPT = """
import sys, torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations import is_fsdp_enabled
sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
config = AutoConfig.for_model("llama", vocab_size=64, **sizes)
AutoModelForCausalLM.from_config(config).save_pretrained(sys.argv[1])
store = f"file://{sys.argv[2]}"
torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
assert is_fsdp_enabled()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
print({p.device.type for p in model.parameters()}, all(bool(p.any()) for p in model.parameters()))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="gloo over a file")
def test_the_second_process_loads_all_weights(tmp_path: Path) -> None:
    efficient = {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
    second = os.environ | efficient | {"LOCAL_RANK": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "model"), str(tmp_path / "store")]
    done = subprocess.run(command, env=second, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip().splitlines()[-1:] == ["{'cpu'} True"], done.stderr[-2000:]
