"""Checkpoints and evaluations of the real Trainer on CPU, against what is predicted of them."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from whichlora import families
from whichlora.memory.allocator import context_bytes
from whichlora.methods import weight_dtype
from whichlora.predict.coefficients import prior_calibration
from whichlora.predict.evaluation_and_saving import bytes_of_checkpoint, evaluation_peak_bytes
from whichlora.predict.resolve import resolve
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu

pytestmark = pytest.mark.oracle
torch = pytest.importorskip("torch")
bitsandbytes = pytest.importorskip("bitsandbytes")

CONFIG = {
    "model_type": "llama",
    "vocab_size": 8000,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
WIDTH = 128


@pytest.fixture(autouse=True)
def forgetful_bitsandbytes() -> Iterator[None]:
    """Let no test keep tensors: the Trainer registers embeddings for 8-bit optimizers for good."""
    yield
    bitsandbytes.optim.GlobalOptimManager.get_instance().initialize()
    gc.collect()


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "settings",
    [
        {"method": "lora", "precision": "fp32"},
        {"method": "dora", "precision": "bf16", "optimizer": "adamw_torch"},
        {"method": "lora", "precision": "bf16", "modules_to_save": ("lm_head",)},
        {"method": "lora", "precision": "bf16", "target_modules": ("q_proj", "lm_head")},
        {"method": "lora", "precision": "fp32", "optimizer": "adafactor"},
        {"method": "lora", "precision": "fp32", "optimizer": "adamw_8bit"},
        {"method": "lora", "precision": "fp32", "optimizer": "lion"},
        {"method": "lora", "precision": "fp32", "optimizer": "paged_adamw_32bit"},
        {"method": "full", "precision": "bf16"},
    ],
    ids=str,
)
def test_a_checkpoint_and_an_evaluation_are_as_large_as_predicted(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

    from whichlora.profiler.cpu_peak import CpuPeak, live_tensor_bytes

    before = live_tensor_bytes()  # of what else the test process holds
    gpu = find_gpu("cpu")
    run = RunConfig(model="x", batch_size=2, seq_len=WIDTH, r=16, **settings)
    job = resolve(families.build(CONFIG, name="x"), run, gpu)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**CONFIG), dtype=getattr(torch, weight_dtype(run))
    )
    if job.method.peft_class:
        model = get_peft_model(model, LoraConfig(**job.method.peft_config(run)))
    ids = [torch.randint(0, 8000, (WIDTH,)).tolist() for _ in range(4)]
    rows = [{"input_ids": row, "labels": row} for row in ids]
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=2,
            per_device_eval_batch_size=2,
            max_steps=2,
            use_cpu=True,
            report_to="none",
            save_strategy="steps",
            save_steps=2,
            optim=run.trainer_optim,
            bf16=run.precision == "bf16",
            prediction_loss_only=True,
            disable_tqdm=True,
        ),
        train_dataset=rows,
        eval_dataset=rows,
    )
    trainer.train()
    checkpoint = tmp_path / "checkpoint-2"
    written = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    states = (checkpoint / "optimizer.pt").stat().st_size
    predicted = bytes_of_checkpoint(job)
    assert predicted.weights == pytest.approx(written, rel=0.02)
    assert predicted.optimizer_states == pytest.approx(states, rel=0.02, abs=4096)

    model.zero_grad()
    peak = CpuPeak()
    peak.start()
    trainer.evaluate()
    measured = peak.stop() - before
    evaluated = evaluation_peak_bytes(job, prior_calibration(gpu), width=WIDTH)
    assert evaluated - context_bytes(gpu, run.versions) == pytest.approx(measured, rel=0.03)
