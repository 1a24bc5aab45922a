"""Recipes of torchtune, as its repository has them."""

from pathlib import Path

import pytest

from whichlora import estimate
from whichlora.imports import Imported, import_files
from whichlora.units import GiB

RECIPE = """
output_dir: /tmp/torchtune/llama3_2_3B/lora
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  path: /tmp/Llama-3.2-3B-Instruct/original/tokenizer.model
  max_seq_len: 4096
model:
  _component_: torchtune.models.llama3_2.lora_llama3_2_3b
  lora_attn_modules: ['q_proj', 'v_proj', 'output_proj']
  apply_lora_to_mlp: True
  apply_lora_to_output: False
  lora_rank: 64
  lora_alpha: 128
  lora_dropout: 0.0
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: /tmp/Llama-3.2-3B-Instruct/
dataset:
  _component_: torchtune.datasets.alpaca_cleaned_dataset
  packed: True
seed: null
batch_size: 2
optimizer:
  _component_: torch.optim.AdamW
  fused: True
  lr: 3e-4
loss:
  _component_: torchtune.modules.loss.LinearCrossEntropyLoss
epochs: 1
gradient_accumulation_steps: 8
compile: True
dtype: bf16
enable_activation_checkpointing: True
"""
FULL = RECIPE.replace("lora_llama3_2_3b", "llama3_2_3b").replace("steps: 8", "steps: 1")


def imported(folder: Path, text: str, **options: object) -> Imported:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return import_files([path], **options)  # type: ignore[arg-type]


def test_a_recipe_is_a_plain_loop_in_16_bits(tmp_path: Path) -> None:
    read = imported(tmp_path, RECIPE)
    assert (read.tool, read.unknown, read.refused) == ("torchtune", (), {})
    assert {
        "model": "meta-llama/Llama-3.2-3B",
        "method": "lora",
        "r": 64,
        "lora_alpha": 128,
        "target_modules": ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        "batch_size": 2,
        "gradient_accumulation_steps": 8,
        "seq_len": 4096,
        "precision": "bf16-pure",
        "gradient_checkpointing": True,
        "optimizer": "adamw_torch_fused",
        "trainer": "loop-function",
        "loss_head": "liger",
    }.items() <= read.settings.items()
    assert read.epochs == 1
    assert not read.is_lower_bound


def test_all_weights_take_what_the_readme_of_torchtune_measured(tmp_path: Path) -> None:
    """24.9 GiB of live tensors: "+ Activation Checkpointing", Llama 3.2 3B on A100."""
    path = tmp_path / "recipe.yaml"
    path.write_text(FULL)
    (prediction,) = estimate(from_file=path, gpu="a100-sxm-80gb")
    assert prediction.memory.peak_allocated_bytes == pytest.approx(24.9 * GiB, rel=0.02)


def test_a_loss_without_compile_keeps_more_than_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.replace("compile: True", "compile: False"))
    read = import_files([path])
    assert any("3.91 GiB of 8192 tokens" in text for text in read.assumed)
    (prediction,) = estimate(from_file=path, gpu="a100-sxm-80gb")
    assert prediction.verdict == "undecided"


@pytest.mark.parametrize(
    ("builder", "model", "quant"),
    [
        ("llama3.qlora_llama3_8b", "meta-llama/Meta-Llama-3-8B", "qlora"),
        ("qwen2_5.lora_qwen2_5_1_5b_instruct", "Qwen/Qwen2.5-1.5B", "lora"),
        ("qwen3.lora_qwen3_0_6b_base", "Qwen/Qwen3-0.6B", "lora"),
        ("gemma2.lora_gemma2_27b", "google/gemma-2-27b", "lora"),
        ("phi4.lora_phi4_14b", "microsoft/phi-4", "lora"),
    ],
)
def test_builders_are_models(builder: str, model: str, quant: str, tmp_path: Path) -> None:
    text = RECIPE.replace("llama3_2.lora_llama3_2_3b", builder)
    read = imported(tmp_path, text)
    assert (read.settings["model"], read.settings["method"]) == (model, quant)


@pytest.mark.parametrize(
    ("change", "setting", "said"),
    [
        (("lora_llama3_2_3b", "lora_mine"), "model", "'lora_mine' is of no model that is read"),
        (("to_output: False", "to_output: True"), "target_modules", "is not predicted"),
        (("dtype: bf16", "dtype: fp16"), "precision", "'fp16' is not bf16 or fp32"),
        (("dtype: bf16", "dtype: bf16\noptimizer_in_bwd: True"), "optimizer", "without gradients"),
        (("torch.optim.AdamW", "torch.optim.Rprop"), "optimizer", "torch.optim.Rprop is not"),
        (("modules.loss.Linear", "rlhf.loss.DPO"), "trainer", "learning preferences is not"),
        (("epochs: 1", "teacher_model: {}"), "trainer", "distillation is not predicted"),
    ],
)
def test_what_is_not_predicted_is_refused_in_one_line(
    change: tuple[str, str], setting: str, said: str, tmp_path: Path
) -> None:
    text = RECIPE.replace(*change).replace("teacher_model: {}", "teacher_model: {a: 1}")
    refusal = imported(tmp_path, text).refused[setting]
    assert said in refusal
    assert "\n" not in refusal


def test_several_gpus_divide_by_fsdp_2(tmp_path: Path) -> None:
    settings = imported(tmp_path, RECIPE, gpus=8).settings
    assert (settings["gpus"], settings["parallel"]) == (8, "fsdp")
    offloaded = imported(tmp_path, f"{RECIPE}fsdp_cpu_offload: True\n", gpus=8).settings
    assert offloaded["offload"]
