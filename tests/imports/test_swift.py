"""Commands of ms-swift, as its examples have them, and what its arguments become."""

from pathlib import Path
from typing import Any

import pytest

from whichlora.errors import ConfigError
from whichlora.exports.axolotl import TRL
from whichlora.imports import Imported, import_files

MODEL = "Qwen/Qwen2.5-0.5B"
PLAIN = f"--model {MODEL} --torch_dtype bfloat16 --max_length 512"


def imported(folder: Path, command: str) -> Imported:
    script = folder / "train.sh"
    script.write_text(command)
    return import_files([script])


def test_defaults_are_those_of_swift(tmp_path: Path) -> None:
    read = imported(tmp_path, f"swift sft {PLAIN} --dataset 'swift/self-cognition#500'")
    assert (read.tool, read.unknown) == ("swift", ())
    assert {
        "model": MODEL,
        "method": "lora",
        "r": 8,
        "lora_alpha": 32,
        "lora_dropout": 0.05,
        "target_modules": ("all-linear",),
        "batch_size": 1,
        "gradient_accumulation_steps": 16,
        "gradient_checkpointing": True,
        "use_reentrant": True,
        "precision": "bf16",
        "seq_len": 512,
    }.items() <= read.settings.items()
    assert any("no prompt" in note for note in read.assumed)


@pytest.mark.parametrize(
    ("arguments", "rows"),
    [
        ("--split_dataset_ratio 0.1", 16),  # the strategy is that of saving: steps
        ("--val_dataset $VAL", 16),
        ("--cached_val_dataset cached", 16),
        ("--split_dataset_ratio 0.1 --save_strategy no", 0),
        ("--split_dataset_ratio 0.1 --save_strategy no --eval_strategy epoch", 16),
        ("--split_dataset_ratio 0.1 --eval_strategy no", 0),
        ("--split_dataset_ratio 0.1 --streaming true", 0),
        ("--eval_strategy steps", 0),  # without rows
        ("--split_dataset_ratio $RATIO", 0),
    ],
)
def test_rows_that_are_held_out_are_evaluated_when_it_saves(
    arguments: str, rows: int, tmp_path: Path
) -> None:
    command = f"swift sft {PLAIN} {arguments}"
    read = imported(tmp_path, f"{command} --per_device_eval_batch_size 16")
    assert (read.eval_batch_size, read.unknown) == (rows, ())
    assert ("per_device_eval_batch_size" in read.without_effect) is (rows == 0)
    assert imported(tmp_path, command).eval_batch_size == (rows > 0)  # by default 1


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        ("--tuner_type full", {"method": "full"}),
        ("--train_type full --freeze_vit false", {"method": "full", "freeze_vision_tower": False}),
        ("--use_dora true", {"method": "dora"}),
        ("--quant_method bnb --quant_bits 4", {"method": "qlora"}),
        (
            "--quant_method bnb --quant_bits 4 --bnb_4bit_use_double_quant false",
            {"method": "qlora", "quant": "nf4"},
        ),
        (
            "--quant_method bnb --quant_bits 4 --bnb_4bit_compute_dtype float16",
            {"compute_dtype": "float16", "precision": "bf16"},
        ),
        (
            "--quant_method bnb --quant_bits 4 --torch_dtype float16",
            {"compute_dtype": "float32", "precision": "fp16"},
        ),
        ("--quant_method bnb --quant_bits 8", {"method": "lora", "quant": "int8"}),
        ("--lora_dtype bfloat16", {"adapter_dtype": "bfloat16"}),
        ("--torch_dtype float16", {"precision": "fp16"}),
        ("--torch_dtype float32", {"precision": "fp16", "base_dtype": "float32"}),
        ("--attn_impl flash_attn", {"attn": "flash_attention_2"}),
        ("--per_device_train_batch_size 4", {"gradient_accumulation_steps": 4}),
        ("--task_type seq_cls --num_labels 3", {"task": "sequence-classification"}),
        ("--target_modules q_proj v_proj", {"target_modules": ("q_proj", "v_proj")}),
        ("--target_regex .*q_proj", {"target_modules": ("re:.*q_proj",)}),
        ("--lorap_lr_ratio 16", {"loraplus_lr_ratio": 16.0}),
    ],
)
def test_arguments(tmp_path: Path, arguments: str, settings: dict[str, Any]) -> None:
    read = imported(tmp_path, f"swift sft {PLAIN} {arguments}")
    assert settings.items() <= read.settings.items()
    assert read.refused == {}


@pytest.mark.parametrize(
    ("environment", "arguments", "settings"),
    [
        (
            "NPROC_PER_NODE=4 CUDA_VISIBLE_DEVICES=0,1,2,3",
            "",
            {
                "gpus": 4,
                "parallel": "ddp",
                "use_reentrant": False,
                "gradient_accumulation_steps": 4,
            },
        ),
        ("NPROC_PER_NODE=8", "--deepspeed zero3", {"parallel": "zero3", "use_reentrant": True}),
        ("", "--deepspeed zero3", {"parallel": "zero3", "gpus": 1}),  # one process
        (
            "NPROC_PER_NODE=2",
            "--deepspeed zero2_offload",
            {"parallel": "zero2", "offload": ("optimizer",)},
        ),
        ("NPROC_PER_NODE=2", "--fsdp fsdp2", {"parallel": "fsdp", "gradient_checkpointing": True}),
        ("CUDA_VISIBLE_DEVICES=0,1", "", {"gpus": 2, "parallel": "device-map"}),
    ],
)
def test_processes(
    tmp_path: Path, environment: str, arguments: str, settings: dict[str, Any]
) -> None:
    read = imported(tmp_path, f"{environment} \\\nswift sft {PLAIN} {arguments}")
    assert settings.items() <= read.settings.items()
    assert read.refused == {}


def test_a_sum_by_expr(tmp_path: Path) -> None:
    read = imported(
        tmp_path,
        f"nproc=2\nNPROC_PER_NODE=$nproc swift sft {PLAIN} "
        "--gradient_accumulation_steps $(expr 16 / $nproc)",
    )
    assert read.settings["gradient_accumulation_steps"] == 8


def test_preferences_hold_all_logits(tmp_path: Path) -> None:
    read = imported(tmp_path, f"swift rlhf {PLAIN} --rlhf_type dpo --beta 0.1")
    assert read.settings["trainer"] == "dpo"
    assert read.settings["libraries"] == (("trl", TRL),)
    assert any("TRL" in note for note in read.assumed)


def test_written_answers_come_after_the_prompt(tmp_path: Path) -> None:
    read = imported(tmp_path, f"swift rlhf {PLAIN} --rlhf_type grpo --max_completion_length 2048")
    assert read.settings["seq_len"] == 512 + 2048


@pytest.mark.parametrize(
    ("arguments", "setting"),
    [
        ("--tuner_type reft", "method"),
        ("--freeze_llm true", "method"),
        ("--lisa_activated_layers 2", "method"),
        ("--use_galore true", "optimizer"),
        ("--optimizer muon", "optimizer"),
        ("--quant_method hqq --quant_bits 4", "quant"),
        ("--task_type embedding", "task"),
        ("--sequence_parallel_size 4", "parallel"),
    ],
)
def test_what_is_not_predicted_is_refused_by_name(
    tmp_path: Path, arguments: str, setting: str
) -> None:
    read = imported(tmp_path, f"swift sft {PLAIN} {arguments}")
    assert list(read.refused) == [setting]
    assert arguments.split()[0].removeprefix("--") in read.refused[setting]


def test_a_command_that_does_not_train(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"no command that trains or serves; accepted are .*swift"
    ):
        imported(tmp_path, f"swift infer --model {MODEL} --stream true")


def test_arguments_of_version_two_are_those_of_today(tmp_path: Path) -> None:
    old = f"--model_id_or_path {MODEL} --sft_type lora --dtype bf16 --batch_size 3 "
    old += "--lora_target_modules q_proj v_proj --lora_dropout_p 0.1 --use_flash_attn true"
    new = f"--model {MODEL} --tuner_type lora --torch_dtype bfloat16 "
    new += "--per_device_train_batch_size 3 --target_modules q_proj v_proj --lora_dropout 0.1 "
    new += "--attn_impl flash_attn"
    reads = [imported(tmp_path, f"swift sft {each} --max_length 512") for each in (old, new)]
    assert reads[0].settings == reads[1].settings
    assert reads[0].settings["target_modules"] == ("q_proj", "v_proj")
    assert reads[0].unknown == ()
    slow = imported(tmp_path, f"swift sft {PLAIN} --use_flash_attn false")
    assert slow.settings["attn"] == "eager"


@pytest.mark.parametrize(
    ("name", "strategy", "offload"),
    [
        ("default-zero2", "zero2", ()),
        ("default-zero3", "zero3", ()),
        ("zero2-offload", "zero2", ("optimizer",)),
        ("zero3-offload", "zero3", ("optimizer", "params")),
    ],
)
def test_deepspeed_files_have_the_names_of_version_two(
    name: str, strategy: str, offload: tuple[str, ...], tmp_path: Path
) -> None:
    read = imported(tmp_path, f"NPROC_PER_NODE=2 swift sft {PLAIN} --deepspeed {name}")
    assert read.settings["parallel"] == strategy
    assert tuple(sorted(read.settings.get("offload", ()))) == offload


def test_one_process_spreads_a_model_over_the_gpus_that_it_sees(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(f"NPROC_PER_NODE=1 CUDA_VISIBLE_DEVICES=0,1 swift sft {PLAIN}")
    assert import_files([script], gpus=2).settings["parallel"] == "device-map"


def test_a_generative_reranker_is_refused_with_what_it_holds(tmp_path: Path) -> None:
    """github.com/modelscope/ms-swift/issues/4805, whose logits of 8,192 tokens do not fit"""
    read = imported(tmp_path, f"swift sft {PLAIN} --task_type generative_reranker")
    assert "logits of all tokens of a text and its negatives" in read.refused["task"]
    other = imported(tmp_path, f"swift sft {PLAIN} --task_type embedding")
    assert "logits" not in other.refused["task"]


def test_processes_that_spread_their_models_over_several_gpus_each_are_refused(
    tmp_path: Path,
) -> None:
    """github.com/modelscope/ms-swift/issues/3456, which was answered as eight whole models"""
    launch = "CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 NPROC_PER_NODE={} swift sft " + PLAIN
    two = imported(tmp_path, launch.format(2))
    assert "2 processes on 8 GPUs spread a model over 4 each" in two.refused["parallel"]
    assert "--parallel device-map --gpus 4 is one of them" in two.refused["parallel"]
    assert "parallel" not in imported(tmp_path, launch.format(8)).refused
    one = tmp_path / "one.sh"
    one.write_text(f"NPROC_PER_NODE=1 swift sft {PLAIN}")
    assert import_files([one], gpus=2).settings["parallel"] == "ddp"  # as the user asks
