"""LitGPT's commands, and the YAML of its config_hub."""

from pathlib import Path
from typing import Any

import pytest

from whichlora import estimate
from whichlora.imports import Imported, import_files

MODEL = "meta-llama/Meta-Llama-3-8B"
# config_hub/finetune/llama-3-8b/qlora.yaml, without its comments
QLORA = f"""
checkpoint_dir: checkpoints/{MODEL}
out_dir: out/finetune/qlora-llama3-8b
precision: bf16-true
quantize: bnb.nf4
devices: 1
num_nodes: 1
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_query: true
lora_key: false
lora_value: true
lora_projection: false
lora_mlp: false
lora_head: false
data:
  class_path: litgpt.data.Alpaca2k
  init_args:
    mask_prompt: false
train:
  save_interval: 200
  log_interval: 1
  global_batch_size: 8
  micro_batch_size: 2
  lr_warmup_steps: 10
  epochs: 2
  max_tokens:
  max_steps:
  max_seq_length: 512
  tie_embeddings:
  max_norm:
  min_lr: 6.0e-05
eval:
  interval: 100
  max_new_tokens: 100
  final_validation: true
logger_name: csv
seed: 1337
optimizer:
  class_path: torch.optim.AdamW
  init_args:
    lr: 0.0002
    betas:
      - 0.9
      - 0.95
"""


def imported(folder: Path, text: str, *, name: str = "train.sh", **options: Any) -> Imported:
    path = folder / name
    path.write_text(text)
    return import_files([path], **options)


def test_a_file_of_its_hub_is_read_whole(tmp_path: Path) -> None:
    read = imported(tmp_path, QLORA, name="qlora.yaml")
    assert (read.tool, read.unknown, read.refused) == ("litgpt", (), {})
    assert {
        "model": MODEL,
        "trainer": "litgpt",
        "method": "qlora",
        "quant": "nf4",
        "r": 32,
        "target_modules": ("query", "value"),
        "batch_size": 2,
        "gradient_accumulation_steps": 4,
        "seq_len": 512,
        "precision": "bf16-pure",
        "optimizer": "paged_adamw_32bit",
        "gradient_checkpointing": False,
        "gpus": 1,
    }.items() <= read.settings.items()
    assert (read.epochs, read.eval_batch_size) == (2, 2)


def test_its_peak_is_what_the_hub_says(tmp_path: Path) -> None:
    """17.41 GB on an A10G (config_hub/finetune/README.md), by what 0.4.13 pins."""
    libraries = {"litgpt": "0.4.13", "torch": "2.3.1", "bitsandbytes": "0.42.0"}
    path = tmp_path / "qlora.yaml"
    path.write_text(QLORA)
    (found,) = estimate(from_file=path, gpu="a10g-24gb", libraries=libraries)
    assert found.memory.peak_allocated_bytes == pytest.approx(17.41e9, rel=0.01)


def test_a_command_without_a_precision_trains_fp32_weights(tmp_path: Path) -> None:
    read = imported(tmp_path, f"litgpt finetune_lora {MODEL} --train.micro_batch_size 4")
    assert {
        "model": MODEL,
        "method": "lora",
        "precision": "bf16",
        "base_dtype": "float32",
        "batch_size": 4,
        "gradient_accumulation_steps": 4,
        "r": 8,
        "optimizer": "adamw_torch",
    }.items() <= read.settings.items()
    assert any("bf16-mixed, whose weights are fp32" in note for note in read.assumed)


def test_options_of_the_command_count_more_than_its_file(tmp_path: Path) -> None:
    (tmp_path / "lora.yaml").write_text(QLORA.replace("quantize: bnb.nf4", "quantize:"))
    command = "litgpt finetune --config lora.yaml --lora_mlp=true --train.max_seq_length 1024"
    read = imported(tmp_path, f"{command} --optimizer SGD --precision 16-true")
    assert read.settings["target_modules"] == ("query", "value", "mlp")
    assert (read.settings["seq_len"], read.settings["optimizer"]) == (1024, "sgd")
    assert (read.settings["precision"], read.unknown) == ("fp16-pure", ())


def test_all_weights_and_several_gpus(tmp_path: Path) -> None:
    read = imported(tmp_path, f"litgpt finetune_full {MODEL} --devices 4 --precision bf16-true")
    assert {
        "method": "full",
        "gpus": 4,
        "parallel": "fsdp",
        "gradient_checkpointing": True,
    }.items() <= (read.settings.items())
    assert read.settings["gradient_accumulation_steps"] == 16 // 4
    every = imported(tmp_path, f"litgpt finetune_lora {MODEL} --devices auto")
    assert "gpus" not in every.settings
    assert (
        imported(tmp_path, f"litgpt finetune_lora {MODEL} --devices auto", gpus=2).settings["gpus"]
        == 2
    )


def test_a_script_of_lit_gpt_holds_its_batches_itself(tmp_path: Path) -> None:
    command = f"python finetune/lora.py --checkpoint_dir checkpoints/{MODEL} --precision bf16-true"
    read = imported(tmp_path, command)
    assert (read.tool, read.settings["method"]) == ("litgpt", "lora")
    assert (read.settings["batch_size"], read.settings["gradient_accumulation_steps"]) == (4, 32)
    assert any("its own of 2023" in note for note in read.assumed)


@pytest.mark.parametrize(
    ("options", "setting", "said"),
    [
        ("--quantize bnb.nf4", "precision", "refuses it without --precision bf16-true"),
        ("--quantize bnb.int8-training", "quant", "'int8-training' is not predicted"),
        ("--precision 64-true", "precision", "'64-true' is not predicted; bf16-true"),
        ("--optimizer torch.optim.Rprop", "optimizer", "torch.optim.Rprop is not predicted"),
        ("--lora_query false --lora_value false", "target_modules", "nothing is adapted"),
    ],
)
def test_what_is_not_predicted_is_refused_in_one_line(
    options: str, setting: str, said: str, tmp_path: Path
) -> None:
    refusal = imported(tmp_path, f"litgpt finetune_lora {MODEL} {options}").refused[setting]
    assert said in refusal
    assert "\n" not in refusal


def test_adapters_of_another_kind_are_refused(tmp_path: Path) -> None:
    read = imported(tmp_path, f"litgpt finetune_adapter {MODEL}")
    assert "litgpt finetune_adapter is not predicted" in read.refused["method"]
