"""One rank of `parallel/test_saving.py`: the bytes that it copies to the host to save its model."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import spread_on_cpu
import torch


def main() -> None:
    folder = Path(sys.argv[1])
    case = json.loads((folder / "case.json").read_text())
    spreads = case["training"]
    if "fsdp" in spreads:
        spread_on_cpu.use_fsdp()
    else:
        spread_on_cpu.use_deepspeed()
    trainer = _trained(case, spreads)
    is_stage_3 = spreads.get("deepspeed", {}).get("zero_optimization", {}).get("stage") == 3
    if is_stage_3 and case["lora"]:  # as Trainer.save_model does
        saved = trainer.deepspeed._zero3_consolidated_16bit_state_dict(
            exclude_frozen_parameters=True
        )
    else:
        saved = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    reading = {"weights": _bytes_of(saved)}
    if "fsdp" in spreads:
        reading["states"] = _bytes_of(_states(trainer))
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(reading))


def _trained(case: dict[str, Any], spreads: dict[str, Any]) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=True,
        max_steps=1,
        per_device_train_batch_size=1,
        report_to=[],
        save_strategy="no",
        **spreads,
    )
    config = AutoConfig.for_model(**case["config"])
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if case["lora"]:
        model = get_peft_model(model, LoraConfig(**case["lora"], task_type="CAUSAL_LM"))
    rows = [{"input_ids": list(range(32)), "labels": list(range(32))} for _ in range(8)]
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)  # type: ignore[arg-type]
    trainer.train()
    return trainer


def _states(trainer: Any) -> Any:
    from accelerate.utils.fsdp_utils import _prepare_sd_options
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    options = _prepare_sd_options(trainer.accelerator.state.fsdp_plugin)
    return get_optimizer_state_dict(trainer.model, trainer.optimizer, options=options)


def _bytes_of(saved: Any) -> int:
    leaves = torch.utils._pytree.tree_leaves(saved or {})
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim]
    assert all(tensor.device.type == "cpu" for tensor in tensors)
    return sum({t.data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


if __name__ == "__main__":
    main()
