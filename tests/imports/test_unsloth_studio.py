"""YAML of Unsloth Studio, as its repository has it."""

from pathlib import Path

from whichlora import estimate
from whichlora.imports import Imported, import_files

TEXT = """
model: unsloth/Qwen2.5-0.5B
data:
  dataset: tatsu-lab/alpaca
training:
  training_type: lora
  max_seq_length: 1024
  load_in_4bit: true
  num_epochs: 2
  learning_rate: 0.0002
  batch_size: 3
  gradient_accumulation_steps: 5
  max_steps: 0
  packing: false
  gradient_checkpointing: "unsloth"
lora:
  lora_r: 32
  lora_alpha: 16
  lora_dropout: 0.0
  target_modules: "all-linear"
  use_rslora: false
  finetune_vision_layers: true
logging:
  enable_wandb: false
"""


def imported(folder: Path, text: str, **options: object) -> Imported:
    path = folder / "studio.yaml"
    path.write_text(text)
    return import_files([path], **options)  # type: ignore[arg-type]


def test_its_keys_are_those_of_unsloths_functions(tmp_path: Path) -> None:
    read = imported(tmp_path, TEXT)
    assert (read.tool, read.unknown, read.refused) == ("unsloth-studio", (), {})
    assert {
        "model": "unsloth/Qwen2.5-0.5B",
        "method": "qlora",
        "r": 32,
        "lora_alpha": 16,
        "target_modules": ("all-linear",),
        "seq_len": 1024,
        "batch_size": 3,
        "gradient_accumulation_steps": 5,
        "trainer": "unsloth",
        "optimizer": "adamw_8bit",
    }.items() <= read.settings.items()
    assert read.epochs == 2


def test_all_weights_and_16_bits_are_told_apart(tmp_path: Path) -> None:
    full = imported(tmp_path, TEXT.replace("training_type: lora", "training_type: full"))
    assert full.settings["method"] == "full"
    plain = imported(tmp_path, TEXT.replace("load_in_4bit: true", "load_in_4bit: false"))
    assert plain.settings["method"] == "lora"


def test_a_file_without_a_model_is_that_of_the_model_before_it(tmp_path: Path) -> None:
    text = TEXT.replace("model: unsloth/Qwen2.5-0.5B\n", "")
    assert imported(tmp_path, text).settings["model"] == ""
    (prediction,) = estimate(
        "unsloth/gemma-4-E2B-it", from_file=tmp_path / "studio.yaml", gpu="16GB"
    )
    assert prediction.run.trainer == "sft"  # Unsloth's kernels are not predicted for it
    assert prediction.run.model == "unsloth/gemma-4-E2B-it"


def test_what_makes_it_fit_is_said_in_its_own_keys(tmp_path: Path) -> None:
    path = tmp_path / "studio.yaml"
    text = "model: unsloth/Qwen2.5-7B\ntraining: {max_seq_length: 8192, batch_size: 8}\n"
    path.write_text(text + "lora: {lora_r: 16}\n")
    (prediction,) = estimate(gpu="t4-16gb", from_file=path)
    keys = [key for way in prediction.ways_out for key in way.keys]
    assert "training.batch_size" in keys
    assert all(key.startswith("training.") for key in keys)
