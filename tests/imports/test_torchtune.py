"""Recipes of torchtune, as its repository has them."""

from pathlib import Path

import pytest

from whichlora import estimate
from whichlora.errors import ConfigError
from whichlora.imports import Imported, import_files
from whichlora.imports.torchtune_configs import content_of
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
        "trainer": "torchtune",
        "loss_head": "hf",
        "trainer_options": (("compile", True), ("loss", "LinearCrossEntropyLoss")),
    }.items() <= read.settings.items()
    assert read.epochs == 1
    assert not read.is_lower_bound


@pytest.mark.parametrize(
    ("changes", "published", "within"),
    [
        ("", 24.9, 0.015),
        ("optimizer_in_bwd=True", 23.1, 0.01),
        ("optimizer_in_bwd=True enable_activation_offloading=True", 21.8, 0.01),
    ],
)
def test_all_weights_take_what_the_readme_of_torchtune_measured(
    changes: str, published: float, within: float, tmp_path: Path
) -> None:
    """GiB of live tensors, Llama 3.2 3B on an A100: README.md, "Optimization flags"."""
    path = tmp_path / "tune.sh"
    path.write_text(
        "tune run full_finetune_single_device --config llama3_2/3B_full_single_device compile=True "
        "batch_size=2 tokenizer.max_seq_len=4096 dataset.packed=True optimizer.fused=True "
        f"optimizer=torch.optim.AdamW optimizer_in_bwd=False {changes}"
    )
    (prediction,) = estimate(from_file=path, gpu="a100-sxm-80gb")
    measured = published * GiB
    assert prediction.memory.peak_allocated_bytes == pytest.approx(measured, rel=within)


def test_layers_are_counted_without_compile(tmp_path: Path) -> None:
    read = imported(tmp_path, RECIPE)
    assert any("compile: is predicted of the loss" in text for text in read.assumed)
    eager = imported(tmp_path, RECIPE.replace("compile: True", "compile: False"))
    assert eager.settings["trainer_options"] == (("loss", "LinearCrossEntropyLoss"),)
    assert not any("compile" in text for text in eager.assumed)


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


SINGLE = "tune run lora_finetune_single_device --config llama3_1/8B_lora_single_device"


def commanded(folder: Path, command: str, **options: object) -> Imported:
    path = folder / "tune.sh"
    path.write_text(command)
    return import_files([path], **options)  # type: ignore[arg-type]


def test_a_command_starts_from_the_configuration_that_comes_with_it(tmp_path: Path) -> None:
    """recipes/configs/llama3_1/8B_lora_single_device.yaml of torchtune 0.6.1."""
    read = commanded(tmp_path, f"{SINGLE} batch_size=1 tokenizer.max_seq_len=2048")
    assert (read.tool, read.unknown, read.refused) == ("torchtune", (), {})
    assert {
        "model": "meta-llama/Llama-3.1-8B",
        "method": "lora",
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        "batch_size": 1,
        "gradient_accumulation_steps": 8,
        "seq_len": 2048,
        "gradient_checkpointing": True,
        "optimizer": "adamw_torch_fused",
        "gpus": 1,
    }.items() <= read.settings.items()


@pytest.mark.parametrize(
    ("override", "optimizer"),
    [
        ("optimizer=torch.optim.SGD", "sgd"),
        ("optimizer._component_=bitsandbytes.optim.AdamW8bit", "adamw_8bit"),
        ("optimizer.fused=False", "adamw_torch"),
    ],
)
def test_a_component_may_stand_in_the_place_of_its_section(
    override: str, optimizer: str, tmp_path: Path
) -> None:
    read = commanded(tmp_path, f"{SINGLE} {override}")
    assert (read.settings["optimizer"], read.unknown) == (optimizer, ())


@pytest.mark.parametrize(
    ("launch", "gpus"),
    [
        ("--nproc_per_node 4", 4),
        ("--nnodes 2 --nproc_per_node 8", 16),
        ("--nproc_per_node=2 --rdzv-backend c10d", 2),
        ("--nproc_per_node gpu", None),
    ],
)
def test_options_of_torchrun_stand_before_the_recipe(
    launch: str, gpus: int | None, tmp_path: Path
) -> None:
    recipe = "lora_finetune_distributed --config llama3_1/8B_lora batch_size=4"
    read = commanded(tmp_path, f"tune run {launch} {recipe}")
    assert read.settings.get("gpus") == gpus
    assert (read.settings["batch_size"], read.unknown, read.refused) == (4, (), {})
    assert not read.settings["gradient_checkpointing"]


def test_a_file_of_ones_own_is_read_with_what_stands_behind_it(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(RECIPE)
    command = "tune run lora_finetune_single_device --config mine.yaml batch_size=1"
    settings = commanded(tmp_path, command).settings
    assert (settings["batch_size"], settings["r"]) == (1, 64)


def test_a_configuration_of_the_tool_is_known_by_the_path_in_its_repository(tmp_path: Path) -> None:
    command = "tune run full_finetune_single_device --config "
    named = commanded(tmp_path, f"{command}llama2/7B_full_low_memory")
    by_path = commanded(tmp_path, f"{command}recipes/configs/llama2/7B_full_low_memory.yaml")
    assert by_path.settings == named.settings
    assert named.settings["optimizer"] == "paged_adamw_32bit"
    assert any("config: as torchtune 0.6.1 has it" in note for note in named.notes)
    with pytest.raises(ConfigError, match=r"there is no file 'mine\.yaml'"):
        commanded(tmp_path, f"{command}mine.yaml")


def test_weights_of_a_checkpoint_in_fp16_are_loaded_in_bf16() -> None:
    (prediction,) = estimate(
        "meta-llama/Llama-2-7b-hf", "a100-sxm-80gb", trainer="torchtune", method="full"
    )
    assert prediction.run.precision == "bf16-pure"


def test_other_recipes_and_configurations_are_refused_in_one_line(tmp_path: Path) -> None:
    other = SINGLE.replace("lora_finetune", "lora_dpo")
    assert (
        "'lora_dpo_single_device' is not predicted" in commanded(tmp_path, other).refused["trainer"]
    )
    with pytest.raises(ConfigError, match=r"tune\.sh: config: 'x/1B' is none of those") as error:
        commanded(tmp_path, "tune run lora_finetune_single_device --config x/1B")
    assert "\n" not in str(error.value)


def test_each_configuration_is_that_of_a_model() -> None:
    content = content_of("qwen2_5/1.5B_full_single_device") or {}
    assert content["model._component_"] == "torchtune.models.qwen2_5.qwen2_5_1_5b_instruct"
    assert content["optimizer._component_"] == "bitsandbytes.optim.PagedAdamW"
    assert content_of("llama3_1/8B_lora_dpo") is None
    assert content_of("") is None
