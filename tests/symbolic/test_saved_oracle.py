"""How many tensors pass through the saved-tensor hooks of a layer of the real code, on CPU."""

from dataclasses import replace
from typing import Any

import pytest

from whichlora.families import build
from whichlora.predict.quantities import running_model
from whichlora.predict.resolve import resolve
from whichlora.profiler.build import build_model
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.timing import traffic
from whichlora.timing.chip import UNKNOWN_CHIP

pytestmark = pytest.mark.oracle

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "tie_word_embeddings": True,
}
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def saved_in_a_layer(run: RunConfig) -> int:
    """Of the real code: what three layers save beyond two."""
    import torch

    counts = []
    for num_layers in (2, 3):
        config = LLAMA | {"num_hidden_layers": num_layers}
        model = build_model(run, config, device="cpu", target_modules=TARGETS).train()
        packed: list[None] = []

        def pack(tensor: Any, packed: list[None] = packed) -> Any:
            packed.append(None)
            return tensor

        tokens = torch.randint(0, 128, (1, 8))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens)
        counts.append(len(packed))
    return counts[1] - counts[0]


@pytest.mark.parametrize(("method", "most_missing"), [("full", 0), ("lora", 0), ("dora", 0.2)])
def test_a_layer_saves_as_many_tensors_as_its_tape(method: str, most_missing: float) -> None:
    run = RunConfig(
        model="llama", method=method, batch_size=1, seq_len=8, precision="bf16-pure",
        gradient_checkpointing=False,
    )  # fmt: skip
    job = resolve(build(LLAMA | {"num_hidden_layers": 2}, name="llama"), run, find_gpu("t4-16gb"))
    (layer, _), *_ = job.model.layers()
    counted = traffic.trained_layer(
        layer, replace(running_model(job), chip=UNKNOWN_CHIP), tokens=8, span=8
    )
    saved = saved_in_a_layer(run)
    assert (1 - most_missing) * saved <= counted.forward.saves <= saved
