"""Files of other tools, as people have them: what is read, and what is said of the rest."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from whichlora import estimate, explain, where
from whichlora.cli import main
from whichlora.errors import ConfigError
from whichlora.imports import Imported, Tool, import_files, list_tools
from whichlora.spec import members

GPU = "h100-sxm-80gb"
MODEL = "HuggingFaceTB/SmolLM2-135M"


def files_of(folder: Path, **texts: str) -> list[Path]:
    """Files whose names have "_" for the point before the suffix."""
    paths = []
    for name, text in texts.items():
        path = folder / ".".join(name.rsplit("_", 1))
        path.write_text(text)
        paths.append(path)
    return paths


def imported(folder: Path, **texts: str) -> Imported:
    return import_files(files_of(folder, **texts))


def whichlora(*args: str) -> Result:
    return CliRunner().invoke(main, args, prog_name="whichlora")


# --- examples of the tools' repositories, as facts of their keys

AXOLOTL_LORA_8B = f"""
base_model: {MODEL}
load_in_8bit: true
datasets:
  - path: mhenrichsen/alpaca_2k_test
    type: alpaca
dataset_prepared_path:
val_set_size: 0.05
sequence_len: 4096
sample_packing: true
adapter: lora
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
lora_modules_to_save: [embed_tokens]
gradient_accumulation_steps: 4
micro_batch_size: 2
optimizer: adamw_bnb_8bit
learning_rate: 0.0002
bf16: auto
tf32: false
gradient_checkpointing: true
attn_implementation: flash_attention_2
wandb_project:
"""
AXOLOTL_FSDP_70B = """
base_model: meta-llama/Llama-3.1-70B
load_in_4bit: true
adapter: qlora
sequence_len: 512
lora_r: 8
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
gradient_accumulation_steps: 4
micro_batch_size: 1
gradient_checkpointing: true
gradient_checkpointing_kwargs:
  use_reentrant: true
fsdp: [full_shard, auto_wrap]
fsdp_config:
  fsdp_limit_all_gathers: true
  fsdp_offload_params: OFFLOADED
  fsdp_use_orig_params: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_sharding_strategy: FULL_SHARD
"""
AXOLOTL_QLORA = """
base_model: mistralai/Mistral-7B-v0.1
load_in_4bit: true
adapter: qlora
sequence_len: 8192
lora_r: 32
lora_target_modules: [gate_proj, q_proj]
micro_batch_size: 2
plugins: [axolotl.integrations.liger.LigerPlugin]
liger_fused_linear_cross_entropy: true
liger_rms_norm: true
flash_attention: true
"""
LLAMAFACTORY = f"""
model_name_or_path: {MODEL}
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: identity,alpaca_en_demo
template: qwen3_nothink
cutoff_len: 1024
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
bf16: true
resume_from_checkpoint: null
"""
LLAMAFACTORY_SCRIPT = f"""#!/bin/bash

set -x

MODEL_PATH={MODEL}

llamafactory-cli train \\
    --model_name_or_path ${{MODEL_PATH}} \\
    --trust_remote_code \\
    --stage sft \\
    --finetuning_type lora \\
    --lora_rank 8 \\
    --lora_target all \\
    --save_only_model false \\
    --per_device_train_batch_size 1 \\
    --gradient_accumulation_steps 8 \\
    --cutoff_len 1024 \\
    --bf16
"""
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": False,
        "reduce_bucket_size": "auto",
        "stage3_max_live_parameters": 1e9,
    },
}
FSDP_CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_offload_params: false
  fsdp_sharding_strategy: FULL_SHARD
mixed_precision: bf16
num_machines: 1
num_processes: 2
"""
ZERO3_CONFIG = """
distributed_type: DEEPSPEED
deepspeed_config:
  offload_optimizer_device: none
  offload_param_device: none
  zero3_init_flag: true
  zero_stage: 3
mixed_precision: bf16
num_machines: 1
num_processes: 8
"""
TRL_CLI = f"""
model_name_or_path:
  {MODEL}
dataset_name:
  stanfordnlp/imdb
report_to:
  none
learning_rate:
  0.0001
"""
SFT = f"""python trl/scripts/sft.py \\
    --model_name_or_path {MODEL} \\
    --dataset_name trl-lib/Capybara \\
    --packing \\
    --per_device_train_batch_size 2 \\
    --gradient_accumulation_steps 8 \\
    --eos_token '<|im_end|>' \\
    --use_peft \\
    --lora_r 32 \\
    --lora_alpha 16
"""


def test_axolotl_lora(tmp_path: Path) -> None:
    read = imported(tmp_path, lora_yml=AXOLOTL_LORA_8B)
    assert read.tool == "axolotl"
    assert read.unknown == ()
    assert {"datasets", "learning_rate", "wandb_project"} <= set(read.without_effect)
    asked = {
        "method": "lora",
        "quant": "int8",
        "batch_size": 2,
        "seq_len": 4096,
        "r": 32,
        "optimizer": "adamw_8bit",
        "precision": "auto",
        "attn": "flash_attention_2",
        "use_reentrant": True,
        "target_modules": ("all-linear",),
        "modules_to_save": ("embed_tokens",),
        "prepare_kbit": False,
    }
    assert {name: read.settings[name] for name in asked} == asked
    assert any("sample_packing: every row is full" in text for text in read.assumed)


def test_axolotl_takes_a_gptq_checkpoint_as_it_is(tmp_path: Path) -> None:
    text = AXOLOTL_LORA_8B.replace("load_in_8bit: true", "gptq: true")
    read = imported(tmp_path, lora_yml=text)
    assert (read.settings["method"], read.settings["quant"]) == ("lora", "gptq-int4")


def test_axolotl_fsdp(tmp_path: Path) -> None:
    text = AXOLOTL_FSDP_70B.replace("OFFLOADED", "true")
    offloaded = imported(tmp_path, fsdp_yaml=text)
    assert offloaded.settings["offload"] == ("optimizer", "params")
    read = imported(tmp_path, fsdp_yaml=text.replace("fsdp_offload_params: true", ""))
    assert (read.settings["parallel"], read.settings["fsdp_version"]) == ("fsdp", "1")
    assert read.settings["method"] == "qlora"
    assert "quant" not in read.settings  # the method's own
    with pytest.raises(ConfigError, match="asks for fsdp and does not say how many GPUs"):
        estimate(gpu=GPU, from_file=tmp_path / "fsdp.yaml")


def test_a_card_may_state_how_many_gpus_a_file_runs_on(tmp_path: Path) -> None:
    text = AXOLOTL_FSDP_70B.replace("fsdp_offload_params: OFFLOADED", "")
    (tmp_path / "fsdp.yaml").write_text(text)
    (asked,) = estimate(gpu=f"8x{GPU}", from_file=tmp_path / "fsdp.yaml")
    (told,) = estimate(gpu=GPU, gpus=8, from_file=tmp_path / "fsdp.yaml")
    assert asked == told
    assert asked.run.parallel.strategy == "fsdp"
    explained = explain(gpu=f"8x{GPU}", from_file=tmp_path / "fsdp.yaml")
    assert explained.prediction.run == told.run


def test_a_pattern_of_target_modules_is_read(tmp_path: Path) -> None:
    pattern = r".*layers\.\d+\.mlp\.(up|down)_proj$"
    text = AXOLOTL_QLORA.replace("[gate_proj, q_proj]", f"'{pattern}'")
    assert imported(tmp_path, qlora_yml=text).settings["target_modules"] == (f"re:{pattern}",)
    (prediction,) = estimate(gpu=GPU, from_file=tmp_path / "qlora.yml")
    assert prediction.run.target_modules == ("down_proj", "up_proj")


def test_a_list_of_patterns_is_refused(tmp_path: Path) -> None:
    text = AXOLOTL_QLORA.replace("[gate_proj, q_proj]", r"['.*q_proj', v_proj]")
    read = imported(tmp_path, qlora_yml=text)
    assert "a list of patterns: PEFT takes one text" in read.refused["target_modules"]


def test_axolotl_plugins(tmp_path: Path) -> None:
    read = imported(tmp_path, qlora_yml=AXOLOTL_QLORA)
    options = dict(read.settings["trainer_options"])
    asked = json.loads(options["liger_kernel_config"])
    assert {name for name, on in asked.items() if on} == {"rms_norm", "fused_linear_cross_entropy"}
    assert options["use_liger_kernel"] is True
    assert read.settings["attn"] == "flash_attention_2"
    assert read.settings["gradient_checkpointing"] is False
    assert any(text.startswith("lora_mlp_kernel: ") for text in read.assumed)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("adapter: qlora", "Require cfg.load_in_4bit to be True for qlora"),
        ("adapter: qlora\nload_in_8bit: true", "Can't load qlora in 8bit"),
        ("adapter: qlora\nload_in_4bit: true\nload_in_8bit: true", "Can't load qlora in 8bit"),
        ("adapter: qlora\ngptq: true", "Can't load qlora if gptq"),
        ("load_in_4bit: true", "load_in_4bit: without an adapter is refused by Axolotl"),
    ],
)
def test_storage_that_axolotl_refuses(lines: str, said: str, tmp_path: Path) -> None:
    path = files_of(tmp_path, q_yml=f"base_model: {MODEL}\nlora_target_linear: true\n{lines}\n")
    with pytest.raises(ConfigError, match=re.escape(said)) as error:
        estimate(gpu=GPU, from_file=path)
    assert "; write " in str(error.value)
    if "qlora" in lines:
        (prediction,) = estimate(gpu=GPU, from_file=path, quant="nf4-dq")
        assert (prediction.run.method, prediction.run.quant) == ("qlora", "nf4-dq")


@pytest.mark.parametrize(
    ("lines", "quant"),
    [("load_in_4bit: true", "none"), ("load_in_4bit: true\nload_in_8bit: true", "int8")],
)
def test_axolotl_s_lora_is_not_in_4_bit(lines: str, quant: str, tmp_path: Path) -> None:
    text = AXOLOTL_LORA_8B.replace("load_in_8bit: true", lines)
    (prediction,) = estimate(gpu=GPU, from_file=files_of(tmp_path, lora_yml=text))
    assert (prediction.run.method, prediction.run.quant) == ("lora", quant)
    assert any("Axolotl quantises nothing" in each for each in prediction.notes) == (
        quant == "none"
    )


CUT = "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"


@pytest.mark.parametrize(
    ("lines", "head", "note"),
    [
        (f"plugins: [{CUT}]", "liger", f"plugins: {CUT.rpartition('.')[2]} is not predicted"),
        (f"plugins: [{CUT}]\ncut_cross_entropy: true", "liger", "cut_cross_entropy: is not"),
        (f"plugins: [{CUT}]\ncut_cross_entropy: false", "hf", ""),
        ("cut_cross_entropy: true", "hf", "cut_cross_entropy: Axolotl reads it with CutCross"),
        ("chunked_cross_entropy: true", "liger", "chunked_cross_entropy: is not predicted"),
        ("liger_rms_norm: true", "hf", "liger_rms_norm: Axolotl reads it with LigerPlugin under"),
    ],
)
def test_axolotl_s_plugins_decide_on_the_loss(
    lines: str, head: str, note: str, tmp_path: Path
) -> None:
    text = AXOLOTL_LORA_8B + lines + "\n"
    read = imported(tmp_path, lora_yml=text)
    assert read.settings["loss_head"] == head
    assert "trainer_options" not in read.settings
    assert read.unknown == ()
    notes = [text for text in read.assumed if not text.startswith("sample_packing")]
    assert [each.startswith(note) for each in notes] == [True] * bool(note)


def test_axolotl_s_plugins_beside_each_other(tmp_path: Path) -> None:
    text = AXOLOTL_QLORA.replace("plugins: [", f"plugins: [{CUT}, ").replace(
        "liger_fused_linear_cross_entropy: true", ""
    )
    read = imported(tmp_path, qlora_yml=text)
    asked = json.loads(dict(read.settings["trainer_options"])["liger_kernel_config"])
    assert {name for name, on in asked.items() if on} == {"rms_norm"}
    assert read.settings["loss_head"] == "liger"


@pytest.mark.parametrize(
    ("line", "kernel", "notes"),
    [
        ("xformers_attention: true", "sdpa-efficient", 1),
        ("attn_implementation: xformers", "sdpa-efficient", 1),
        ("sage_attention: true", "flash_attention_2", 1),
        ("attn_implementation: sage", "flash_attention_2", 1),
        ("flex_attention: true", "flash_attention_2", 1),
        ("attn_implementation: kernels-community/vllm-flash-attn3", "flash_attention_2", 1),
        ("sdp_attention: true", "sdpa", 0),
    ],
)
def test_axolotl_s_kernels_of_attention_are_near_ones(
    line: str, kernel: str, notes: int, tmp_path: Path
) -> None:
    read = imported(tmp_path, q_yml=AXOLOTL_QLORA.replace("flash_attention: true", line))
    assert read.settings["attn"] == kernel
    said = [text for text in read.assumed if f"is not predicted; assumed: {kernel}" in text]
    assert len(said) == notes


@pytest.mark.parametrize("name", ["adamw_torch_8bit", "adamw_torch_4bit"])
def test_torchao_s_optimizers_of_axolotl_s_examples(name: str, tmp_path: Path) -> None:
    text = AXOLOTL_LORA_8B.replace("adamw_bnb_8bit", name)
    (prediction,) = estimate(gpu=GPU, from_file=files_of(tmp_path, a_yml=text))
    assert prediction.run.optimizer == name


COLAB = """
base_model: Qwen/Qwen3-14B
load_in_4bit: true
adapter: qlora
lora_r: 32
lora_alpha: 64
lora_target_modules: [q_proj, k_proj, v_proj, o_proj, gate_proj, down_proj, up_proj]
xformers_attention: true
plugins:
  - axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin
sample_packing: true
sequence_len: 4096
micro_batch_size: 1
gradient_accumulation_steps: 1
gradient_checkpointing: true
gradient_checkpointing_kwargs:
  use_reentrant: false
optimizer: paged_adamw_8bit
fp16: true
bf16: false
"""


def test_axolotl_s_notebook_for_a_t4_takes_what_it_took_there(tmp_path: Path) -> None:
    (prediction,) = estimate(gpu="t4-16gb", from_file=files_of(tmp_path, colab_yaml=COLAB))
    assert prediction.run.loss_head == "liger"
    # the log of examples/colab-notebooks: 9.768GB (+3.287GB cache) after the first step
    assert prediction.memory.peak_reserved_bytes == pytest.approx(13.055 * 2**30, rel=0.03)


def test_llamafactory_yaml_and_script_say_the_same(tmp_path: Path) -> None:
    of_yaml = imported(tmp_path, lora_yaml=LLAMAFACTORY)
    of_script = imported(tmp_path, lora_sh=LLAMAFACTORY_SCRIPT)
    assert (of_yaml.tool, of_script.tool) == ("llamafactory", "llamafactory")
    assert of_yaml.settings == of_script.settings
    assert of_yaml.unknown == of_script.unknown == ()
    assert of_yaml.settings["lora_alpha"] == 16  # twice the rank
    assert of_yaml.settings["gradient_accumulation_steps"] == 8


def test_llamafactory_with_deepspeed(tmp_path: Path) -> None:
    text = LLAMAFACTORY + "deepspeed: examples/deepspeed/ds_z3_config.json\n"
    paths = files_of(tmp_path, lora_yaml=text, ds_json=json.dumps(DEEPSPEED))
    (of_the_tool,) = estimate(gpu=GPU, gpus=4, from_file=paths[:1])
    (prediction,) = estimate(gpu=GPU, gpus=4, from_file=paths)
    assert prediction.run.parallel.strategy == "zero3"
    options = dict(prediction.run.parallel.options)
    assert options["overlap_comm"] is False
    assert prediction.run.expandable_segments  # its launcher sets it
    assert of_the_tool.run.parallel.strategy == "zero3"
    note = "deepspeed: the file is not here; assumed: the one of this name in the tool"
    assert any(note in each for each in of_the_tool.notes)
    assert not any(note in each for each in prediction.notes)
    assert dict(of_the_tool.run.parallel.options)["overlap_comm"] is False
    older = {"libraries": {"transformers": "4.46.1"}}
    (then,) = estimate(gpu=GPU, gpus=4, from_file=paths[:1], **older)
    assert dict(then.run.parallel.options)["overlap_comm"] is True
    assert any("of before 2025-03, with overlap_comm" in each for each in then.notes)


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3_bf16", "zero3_bf16_cpuoffload_all"])
def test_axolotl_s_files_of_deepspeed_need_not_be_here(name: str, tmp_path: Path) -> None:
    text = AXOLOTL_LORA_8B.replace("load_in_8bit: true", "").replace(
        "adamw_bnb_8bit", "adamw_torch"
    )
    (path,) = files_of(tmp_path, lora_yaml=f"{text}deepspeed: deepspeed_configs/{name}.json\n")
    (prediction,) = estimate(gpu=GPU, gpus=2, from_file=path)
    assert prediction.run.parallel.strategy == name[:5]
    options = dict(prediction.run.parallel.options)
    assert options["overlap_comm"] is True
    assert options.get("stage3_max_live_parameters", 0) == 0  # under the field's own name
    assert bool(options["offload"]) is (name in ("zero2", "zero3_bf16_cpuoffload_all"))


def test_a_broken_file_of_deepspeed_is_not_replaced_by_the_tool_s(tmp_path: Path) -> None:
    text = LLAMAFACTORY + "deepspeed: ds_z3_config.json\n"
    path, _ = files_of(tmp_path, lora_yaml=text, ds_z3_config_json="{")
    with pytest.raises(ConfigError, match="is not JSON"):
        estimate(gpu=GPU, gpus=4, from_file=path)


def test_deepspeed_s_older_words_for_offload_and_limits_of_zero(tmp_path: Path) -> None:
    zero = {"stage": 3, "cpu_offload": True, "cpu_offload_param": True}
    files = {
        "ds_json": json.dumps({"zero_optimization": zero | {"stage3_max_live_parameters": 0}}),
        "lora_yaml": LLAMAFACTORY + "deepspeed: ds.json\n",
    }
    _, path = files_of(tmp_path, **files)
    read = import_files([path])
    assert read.settings["offload"] == ("optimizer", "params")
    assert read.unknown == ()
    (prediction,) = estimate(gpu=GPU, gpus=2, from_file=path)
    assert dict(prediction.run.parallel.options)["stage3_max_live_parameters"] == 0
    flags = ["--parallel", "zero3", "--stage3-max-live-parameters", "0", "--gpus", "2"]
    assert whichlora("estimate", MODEL, "--gpu", GPU, *flags).exit_code == 0


@pytest.mark.parametrize(
    ("stated", "frozen"), [("", True), ("freeze_vision_tower: false\n", False)]
)
def test_llamafactory_freezes_the_vision_tower_by_default(
    stated: str, frozen: bool, tmp_path: Path
) -> None:
    text = LLAMAFACTORY + stated + "freeze_multi_modal_projector: false\n"
    read = imported(tmp_path, lora_yaml=text)
    assert read.settings["freeze_vision_tower"] is frozen
    noted = any(text.startswith("freeze_multi_modal_projector: ") for text in read.assumed)
    assert noted is frozen


def test_llamafactory_with_fsdp(tmp_path: Path) -> None:
    files_of(tmp_path, lora_yaml=LLAMAFACTORY + "quantization_bit: 4\n", fsdp_yaml=FSDP_CONFIG)
    command = "accelerate launch --config_file fsdp.yaml src/train.py lora.yaml\n"
    read = imported(tmp_path, train_sh=f"#!/bin/bash\nCUDA_VISIBLE_DEVICES=0,1 {command}")
    assert read.settings["parallel"] == "fsdp"
    assert read.settings["gpus"] == 2
    assert read.settings["backward_prefetch"] == "BACKWARD_PRE"
    assert read.settings["method"] == "qlora"
    assert "expandable_segments" not in read.settings


def test_trl_yaml_takes_the_defaults_of_trl(tmp_path: Path) -> None:
    read = imported(tmp_path, sft_yaml=TRL_CLI)
    asked = {
        "method": "full",
        "batch_size": 8,
        "seq_len": 1024,
        "precision": "bf16",
        "base_dtype": "float32",
        "gradient_checkpointing": None,  # the release says
        "trainer": "sft",
    }
    assert read.tool == "trl"
    assert {name: read.settings[name] for name in asked} == asked


def test_trl_script(tmp_path: Path) -> None:
    read = imported(tmp_path, sft_sh=SFT)
    assert read.tool == "trl"
    assert (read.settings["method"], read.settings["r"]) == ("lora", 32)
    assert read.settings["lora_dropout"] == 0.05
    assert read.settings["target_modules"] == ("default",)
    assert any(text.startswith("packing: ") for text in read.assumed)
    # without --use_peft TRL reads none of its keys
    full = imported(tmp_path, full_sh=SFT.replace("--use_peft", ""))
    text = "use_peft: is off, and lora_r without effect; assumed: no adapters"
    assert text in full.assumed
    assert full.settings["method"] == "full"
    assert "lora_r" in full.without_effect


def test_trl_under_accelerate_with_deepspeed(tmp_path: Path) -> None:
    files_of(tmp_path, zero3_yaml=ZERO3_CONFIG)
    command = SFT.replace("python", "accelerate launch --config_file zero3.yaml")
    (prediction,) = estimate(gpu=GPU, from_file=files_of(tmp_path, sft_sh=command))
    assert (prediction.run.parallel.strategy, prediction.run.parallel.gpus) == ("zero3", 8)


@pytest.mark.parametrize("on", ["true", "false"])
def test_loading_by_one_process_is_read(on: str, tmp_path: Path) -> None:
    config = f"fsdp_version: 2\nfsdp_config:\n  cpu_ram_efficient_loading: {on}\n"
    read = imported(tmp_path, lora_yml=AXOLOTL_LORA_8B + config)
    assert read.settings.get("cpu_ram_efficient_loading", False) == (on == "true")
    assert not any("cpu_ram_efficient_loading" in line for line in read.assumed)


def test_axolotl_s_loss_in_parts_is_none_of_a_preference_trainer(tmp_path: Path) -> None:
    text = AXOLOTL_LORA_8B + f"plugins: [{CUT}]\nrl: dpo\n"
    read = imported(tmp_path, lora_yml=text)
    assert read.settings["trainer"] == "dpo"
    assert any("assumed: this trainer's own loss" in line for line in read.assumed)
    assert not any("Liger's loss" in line for line in read.assumed)


@pytest.mark.parametrize(
    ("lines", "trainer", "options"),
    [
        ("rl: dpo\nrl_beta: 0.2", "dpo", {"beta": 0.2, "disable_dropout": True}),
        ("rl: ipo", "dpo", {"loss_type": "ipo", "disable_dropout": True}),
        ("rl: simpo\ncpo_alpha: 0.5\nsimpo_gamma: 1", "cpo", {"loss_type": "simpo"}),
        ("rl: orpo\norpo_alpha: 0.1", "orpo", {}),
        ("rl: kto\nkto_desirable_weight: 1.0", "kto", {"loss_type": "kto"}),
        ("reward_model: true", "reward", {}),
    ],
)
def test_axolotl_s_preferences_are_those_of_the_trl_that_it_needs(
    lines: str, trainer: str, options: dict[str, Any], tmp_path: Path
) -> None:
    text = AXOLOTL_QLORA.replace("liger_fused_linear_cross_entropy: true", lines)
    files = files_of(tmp_path, a_yaml=text)
    assert import_files(files).unknown == ()
    (prediction,) = estimate(gpu=GPU, from_file=files)
    assert prediction.run.trainer == trainer
    assert dict(prediction.run.libraries) == {"trl": "1.9.0"}
    assert options.items() <= dict(prediction.run.trainer_options).items()


@pytest.mark.parametrize(
    ("lines", "trainer"),
    [
        ("stage: dpo\npref_beta: 0.2\npref_ftx: 0", "llamafactory-dpo"),
        ("stage: dpo\npref_loss: simpo\nsimpo_gamma: 0.5", "llamafactory-dpo"),
        ("stage: kto\nkto_chosen_weight: 1.0", "llamafactory-kto"),
    ],
)
def test_llamafactory_s_preferences_have_its_own_trainers(
    lines: str, trainer: str, tmp_path: Path
) -> None:
    files = files_of(tmp_path, a_yaml=LLAMAFACTORY.replace("stage: sft", lines))
    assert import_files(files).unknown == ()
    (prediction,) = estimate(gpu=GPU, from_file=files)
    assert prediction.run.trainer == trainer
    options = {name: str(value) for name, value in prediction.run.trainer_options}
    stated = dict(line.split(": ") for line in lines.splitlines())
    assert {name: value for name, value in stated.items() if name in options}.items() <= (
        options.items()
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (LLAMAFACTORY.replace("stage: sft", "stage: rm"), "rm are not predicted, which train"),
        (LLAMAFACTORY.replace("stage: sft", "stage: ppo"), "ppo are not predicted, which write"),
        (AXOLOTL_QLORA + "rl: grpo\n", "'grpo' is not predicted; dpo, kto, orpo, simpo, ipo are"),
        (AXOLOTL_QLORA + "process_reward_model: true\n", "rewards of each step are not"),
    ],
)
def test_steps_that_are_not_predicted_say_which_are(text: str, reason: str, tmp_path: Path) -> None:
    assert reason in imported(tmp_path, a_yaml=text).refused["trainer"]


def test_the_switch_of_older_axolotl_files_is_dpo(tmp_path: Path) -> None:
    """github.com/axolotl-ai-cloud/axolotl/issues/1108, of 2024-01"""
    switched, named = (
        imported(tmp_path, a_yaml=f"{AXOLOTL_QLORA}rl: {rl}\n") for rl in ("true", "dpo")
    )
    assert switched.settings == named.settings
    assert any("rl: is a switch" in note for note in switched.assumed)


def test_trl_dpo(tmp_path: Path) -> None:
    command = SFT.replace("sft.py", "dpo.py").replace("--packing", "--beta 0.2 --max_length 512")
    (prediction,) = estimate(gpu=GPU, from_file=files_of(tmp_path, dpo_sh=command))
    assert prediction.run.trainer == "dpo"
    assert prediction.run.trainer_option("beta") == 0.2
    assert prediction.run.seq_len == 512


@pytest.mark.parametrize(
    ("name", "strategy", "gpus"),
    [("fsdp2", "fsdp", 8), ("zero2", "zero2", 8), ("multi_gpu", "ddp", 8), ("single_gpu", None, 1)],
)
def test_trl_knows_its_accelerate_configs(
    name: str, strategy: str | None, gpus: int, tmp_path: Path
) -> None:
    of_yaml = imported(tmp_path, sft_yaml=TRL_CLI + f"accelerate_config: {name}\n")
    command = f"trl sft --config sft.yaml --accelerate_config {name} --output_dir out"
    of_command = imported(tmp_path, sft_sh=command)
    for read in (of_yaml, of_command):
        assert (read.settings.get("parallel"), read.settings["gpus"]) == (strategy, gpus)
        assert read.unknown == ()


def test_trl_s_launch_configurations_need_not_be_here(tmp_path: Path) -> None:
    file = "examples/accelerate_configs/deepspeed_zero3.yaml"
    launch = f"accelerate launch --config_file {file} --num_processes 4"
    read = imported(tmp_path, sft_sh=SFT.replace("python", launch))
    assert (read.settings["parallel"], read.settings["gpus"]) == ("zero3", 4)
    told = "config_file: the file is not here; assumed: the one of this name in the tool"
    assert told in read.assumed
    with pytest.raises(ConfigError, match=r"there is no file 'my_zero3\.yaml'"):
        imported(tmp_path, sft_sh=SFT.replace("python", launch.replace(file, "my_zero3.yaml")))


def test_trl_grpo(tmp_path: Path) -> None:
    command = SFT.replace("sft.py", "grpo.py").replace("--packing", "--num_generations 4")
    (path,) = files_of(tmp_path, grpo_sh=command.replace("batch_size 2", "batch_size 4"))
    read = import_files([path])
    assert read.settings["trainer"] == "grpo"
    assert read.settings["trainer_options"] == (("num_generations", 4),)
    assert read.settings["seq_len"] == 512 + 256
    (prediction,) = estimate(gpu=GPU, from_file=path)
    assert prediction.run.trainer_option("num_generations") == 4


@pytest.mark.parametrize(
    ("program", "trainer"),
    [("reward_modeling", "reward"), ("run-dpo", "dpo"), ("dpo_vlm", "dpo"), ("train", "sft")],
)
def test_the_name_of_a_program_says_its_trainer_and_the_answer_says_so(
    program: str, trainer: str, tmp_path: Path
) -> None:
    text = SFT.replace("sft.py", f"{program}.py").replace("--packing", "")
    (path,) = files_of(tmp_path, train_sh=text)
    read = import_files([path])
    assert read.settings.get("trainer", "sft") == trainer
    assert f"{program}: taken as TRL's {trainer} unless --trainer is given" in read.assumed
    assert import_files([path], trainer="kto").settings["trainer"] == "kto"


@pytest.mark.parametrize("name", ["rloo", "orpo", "online_dpo_vlm"])
def test_a_trainer_whose_files_are_not_read_is_refused(name: str, tmp_path: Path) -> None:
    read = imported(tmp_path, script_sh=SFT.replace("sft.py", f"{name}.py"))
    name = name.removesuffix("_vlm")
    assert f"{name} is not read; nearest is --trainer " in read.refused["trainer"]


@pytest.mark.parametrize(
    ("launch", "gpus", "nodes"),
    [
        ("torchrun --nproc_per_node=4 --nnodes 2", 8, 2),
        ("python -m torch.distributed.run --nproc-per-node 4", 4, 1),
        ("accelerate launch --num_processes 2 --mixed_precision bf16", 2, 1),
        ("deepspeed --num_gpus=2", 2, 1),
    ],
)
def test_launchers_say_how_many_gpus(launch: str, gpus: int, nodes: int, tmp_path: Path) -> None:
    read = imported(tmp_path, sft_sh=SFT.replace("python", launch))
    assert (read.settings["gpus"], read.settings.get("nodes", 1)) == (gpus, nodes)
    assert read.settings["parallel"] == "ddp"


def test_a_variable_of_options_is_split_as_the_shell_splits_it(tmp_path: Path) -> None:
    text = f"""GPUS=4
DISTRIBUTED_ARGS="
    --nproc_per_node $GPUS \\
    --nnodes 2
"
ARGS="--model_name_or_path {MODEL} --block_size 256"
torchrun $DISTRIBUTED_ARGS run_clm.py ${{ARGS}} --run_name "a b" --bf16 True "$@"
"""
    read = imported(tmp_path, clm_sh=text)
    assert (read.settings["gpus"], read.settings["nodes"]) == (8, 2)
    assert (read.settings["model"], read.settings["seq_len"]) == (MODEL, 256)
    assert read.settings["precision"] == "bf16"


def test_an_array_of_options_is_read(tmp_path: Path) -> None:
    text = f"""ARGS=(
  --model_name_or_path "{MODEL}"   # the base
  # --lora_r 8
  --use_peft
)
ARGS+=(--lora_r 4)
MORE="--max_length 256"
MORE+=" --bf16"
COMMAND=(accelerate launch --num_processes 4 sft.py)
"${{COMMAND[@]}}" "${{ARGS[@]}}" $MORE --dataset_name x
"""
    read = imported(tmp_path, sft_sh=text)
    assert (read.settings["model"], read.settings["method"]) == (MODEL, "lora")
    assert (read.settings["r"], read.settings["seq_len"]) == (4, 256)
    assert read.settings["gpus"] == 4


def test_a_number_of_nodes_that_the_cluster_says_is_not_one(tmp_path: Path) -> None:
    launch = "srun torchrun --nnodes $SLURM_NNODES --nproc_per_node 8"
    assert "gpus" not in imported(tmp_path, sft_sh=SFT.replace("python", launch)).settings


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("$(($TOTAL/$NUM_GPUS/2))", 16),
        ("$(( TOTAL / (NUM_GPUS) ))", None),  # brackets within are not read
        ("$(( ${TOTAL} % 3 + 1 ))", 3),
        ("$((9**9**9))", None),
        ("$((TOTAL/0))", None),
        ("$(($OTHER*2))", None),
        ("$((99999999*99999999))", None),
    ],
)
def test_whole_numbers_of_a_script_are_computed(
    text: str, steps: int | None, tmp_path: Path
) -> None:
    script = f"""TOTAL=128
NUM_GPUS=4
STEPS={text}
{SFT.strip()} --gradient_accumulation_steps $STEPS
"""
    read = imported(tmp_path, sft_sh=script)
    assert ("gradient_accumulation_steps" in read.refused) == (steps is None)
    assert read.settings["gradient_accumulation_steps"] == (steps or 1)


def test_a_number_of_gpus_that_the_machine_says_is_not_known(tmp_path: Path) -> None:
    text = "GPUS=$(nvidia-smi -L | wc -l)\n" + SFT.replace(
        "python", "torchrun --nproc_per_node $GPUS"
    )
    assert "gpus" not in imported(tmp_path, sft_sh=text).settings


def test_accelerate_options_of_fsdp(tmp_path: Path) -> None:
    launch = "accelerate launch --use_fsdp --num_processes 4 --fsdp_version 2"
    launch += " --fsdp_reshard_after_forward false --fsdp_activation_checkpointing true"
    text = SFT.replace("python", launch) + " --gradient_checkpointing false\n"
    read = imported(tmp_path, sft_sh=text.replace("16\n --", "16 --"))
    assert read.settings["parallel"] == "fsdp"
    assert read.settings["reshard_after_forward"] is False
    assert read.settings["gradient_checkpointing"] is True


def test_a_script_of_the_trainer(tmp_path: Path) -> None:
    text = f"""torchrun --nproc_per_node 2 run_clm.py --model_name_or_path {MODEL} \\
        --per_device_train_batch_size 4 --block_size 512 --bf16 --torch_compile --my_option 3"""
    read = imported(tmp_path, clm_sh=text)
    assert read.tool == "transformers"
    assert (read.settings["method"], read.settings["seq_len"]) == ("full", 512)
    assert read.unknown == ("my_option",)
    assert "torch_compile: is not predicted; assumed: eager kernels" in read.assumed


QWEN = f"""torchrun --nproc_per_node 2 finetune.py --model_name_or_path {MODEL} --bf16 True \\
    --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --model_max_length 512 \\
    --gradient_checkpointing --lora_r 64 --lora_dropout 0"""


def test_a_script_of_its_own_with_more_arguments_of_the_trainer_is_not_trl_s(
    tmp_path: Path,
) -> None:
    read = imported(tmp_path, finetune_sh=QWEN + " --use_lora False")
    assert (read.tool, read.settings["seq_len"]) == ("transformers", 512)
    assert (read.settings["method"], read.refused) == ("full", {})


@pytest.mark.parametrize("asking", ["", " --use_lora", " --q_lora True"])
def test_adapters_of_a_script_of_its_own_are_refused_unless_the_user_names_a_method(
    asking: str, tmp_path: Path
) -> None:
    (path,) = files_of(tmp_path, finetune_sh=QWEN + asking)
    with pytest.raises(ConfigError, match="adapters that a script of its own makes are not read"):
        estimate(gpu=GPU, from_file=path)
    (prediction,) = estimate(gpu=GPU, from_file=path, method="qlora")
    assert (prediction.run.method, prediction.run.r) == ("qlora", 64)


@pytest.mark.parametrize(
    ("program", "task", "length"),
    [
        ("run_glue", "sequence-classification", 128),
        ("run_qa", "question-answering", 384),
        ("run_mlm", "", 512),  # of no script: what the model looks up
    ],
)
def test_an_example_of_transformers_trains_its_task_in_the_dtype_of_its_checkpoints(
    program: str, task: str, length: int, tmp_path: Path
) -> None:
    text = f"python {program}.py --model_name_or_path google-bert/bert-base-cased "
    (path,) = files_of(tmp_path, run_sh=text + "--dataset_name mrpc --do_train")
    read = import_files([path])
    assert read.tool == "transformers"
    said = "dtype: is missing; assumed: that of the checkpoint, float32, as transformers 5 does"
    assert said in read.assumed
    assert "per_device_train_batch_size: is missing; assumed: 8" in read.assumed
    (prediction,) = estimate(gpu=GPU, from_file=path)
    run = prediction.run
    assert (run.task, run.seq_len, run.precision) == (task, length, "fp32")


@pytest.mark.parametrize(
    ("program", "model", "reason", "precision"),
    [
        ("run_clm", "openai-community/gpt2", "that of the checkpoint, float32, as", "fp32"),
        ("run_clm", "./own", "a checkpoint in bfloat16", "bf16-pure"),
        ("run_glue", "./own", "a checkpoint in float32", "fp32"),
    ],
)
def test_an_example_of_transformers_asks_a_known_checkpoint_for_its_dtype(
    program: str, model: str, reason: str, precision: str, tmp_path: Path
) -> None:
    text = f"python {program}.py --model_name_or_path {model} --dataset_name wikitext --do_train"
    read = import_files(files_of(tmp_path, run_sh=text))
    assert any(f"dtype: is missing; assumed: {reason}" in note for note in read.assumed)
    assert read.settings["precision"] == precision


@pytest.mark.parametrize(
    ("text", "precision"),
    [
        ("swift sft --model facebook/opt-1.3b --dataset x", "fp16"),
        ("swift sft --model openai-community/gpt2 --dataset x", "bf16"),
        ("python run_clm.py --model_name_or_path openai-community/gpt2 --dtype auto", "fp32"),
        ("python run_clm.py --model_name_or_path Qwen/Qwen2.5-0.5B --dtype auto", "bf16-pure"),
        (
            "llamafactory-cli train --model_name_or_path facebook/opt-1.3b --lora_target all",
            "fp16-no-autocast",
        ),
    ],
)
def test_a_dtype_that_is_the_checkpoint_s_is_that_of_a_known_one(
    text: str, precision: str, tmp_path: Path
) -> None:
    read = import_files(files_of(tmp_path, run_sh=text))
    assert read.settings["precision"] == precision
    assert not any("bfloat16" in note for note in read.assumed)
    own = re.sub(r"[\w-]+/[\w.-]+", "./own", text, count=1)
    unknown = import_files(files_of(tmp_path, other_sh=own))
    assert any("a checkpoint in bfloat16" in note for note in unknown.assumed)


def test_an_example_of_transformers_for_sound_is_read(tmp_path: Path) -> None:
    text = "python run_speech_recognition_seq2seq.py --model_name_or_path openai/whisper-tiny "
    text += "--dataset_name mozilla-foundation/common_voice_11_0 --fp16 --freeze_encoder"
    (path,) = files_of(tmp_path, asr_sh=text)
    (prediction,) = estimate(gpu=GPU, from_file=path)
    assert prediction.run.base_dtype == "float32"
    assert any("freeze_encoder: is not predicted" in note for note in prediction.notes)


@pytest.mark.parametrize(("switch", "attn"), [("true", "flash_attention_2"), ("false", "sdpa")])
def test_a_switch_of_attention_is_that_of_older_versions(
    switch: str, attn: str, tmp_path: Path
) -> None:
    lines = [line for line in LLAMAFACTORY.splitlines() if "flash_attn" not in line]
    text = "\n".join([*lines, f"flash_attn: {switch}\n"])
    assert imported(tmp_path, lora_yaml=text).settings["attn"] == attn


def test_a_script_with_ranks_as_llamafactory_calls_them_is_not_its(tmp_path: Path) -> None:
    command = f"torchrun --nproc_per_node 2 finetune.py --model_name_or_path {MODEL} "
    command += "--lora_rank 64 --lora_alpha 16 --max_seq_length 512 --use_lora"
    read = imported(tmp_path, own_sh=command)
    assert (read.tool, read.settings["seq_len"]) == ("transformers", 512)
    of_its_own = imported(tmp_path, own_sh=f"{command} --stage sft --cutoff_len 256")
    assert (of_its_own.tool, of_its_own.settings["seq_len"]) == ("llamafactory", 256)


def test_a_script_with_words_of_axolotl_is_not_axolotl_s(tmp_path: Path) -> None:
    words = "--micro_batch_size 8 --lora_r 16 --num_epochs 3"
    with pytest.raises(ConfigError, match=r"finetune is of no tool .*; give the settings as"):
        imported(tmp_path, lora_sh=f"python finetune.py --base_model {MODEL} {words}")
    text = "accelerate launch scripts/finetune.py axolotl.yaml --micro_batch_size 4"
    _, path = files_of(tmp_path, axolotl_yaml=AXOLOTL_QLORA, old_sh=text)
    assert import_files([path]).tool == "axolotl"


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ("--enable_fsdp --fsdp_config.pure_bf16", "enable_fsdp: how a script of its own spreads"),
        ("--zero_stage 2 --deepspeed", "zero_stage: how a script of its own spreads"),
        ("--deepspeed", "deepspeed: is a switch, which names no file"),
    ],
)
def test_a_script_that_spreads_a_run_in_its_own_words_is_refused(
    words: str, fault: str, tmp_path: Path
) -> None:
    text = f"torchrun --nproc_per_node 2 finetuning.py --model_name_or_path {MODEL} {words}"
    (path,) = files_of(tmp_path, own_sh=text)
    with pytest.raises(ConfigError, match=fault):
        estimate(gpu=GPU, from_file=path)
    (prediction,) = estimate(gpu=GPU, from_file=path, parallel="fsdp")
    assert prediction.run.parallel.strategy == "fsdp"


@pytest.mark.parametrize("command", ["NPROC_PER_NODE=2 megatron sft", "composer train --config x"])
def test_a_command_of_a_tool_that_is_not_known_is_no_yaml(command: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="has no command that trains or serves; accepted are accelerate"
    ):
        imported(tmp_path, train_sh=f"{command} --model {MODEL} --lora_rank 8")


@pytest.mark.parametrize(
    ("stated", "rows"),
    [
        ("", 0),  # off by default
        ("eval_strategy: 'no'\n", 0),
        ("eval_strategy: steps\n", 8),  # by default
        ("evaluation_strategy: epoch\nper_device_eval_batch_size: 3\n", 3),
        ("eval_strategy: steps\nper_device_eval_batch_size: 2\n", 2),
    ],
)
def test_an_evaluation_of_more_rows_at_once_than_a_step_is_told(
    stated: str, rows: int, tmp_path: Path
) -> None:
    text = LLAMAFACTORY.replace("train_batch_size: 1", "train_batch_size: 2") + stated
    (path,) = files_of(tmp_path, lora_yaml=text)
    read = import_files([path])
    assert (read.settings["batch_size"], read.eval_batch_size) == (2, rows)
    said = f"evaluation reads {rows} rows at once, training 2"
    (alone,) = estimate(gpu=GPU, from_file=path)
    (wider,) = estimate(gpu=GPU, from_file=path, batch_size=16)
    (spread,) = estimate(gpu=GPU, from_file=path, gpus=2)
    (unequal,) = estimate(gpu="3090+4090", from_file=path)
    placed = where(from_file=path, gpu=GPU)[0].prediction
    assert placed is not None
    explained = explain(from_file=path, gpu=GPU).prediction
    for notes in (unequal.notes, placed.notes, explained.notes):
        assert (f"{said}, which is not counted here" in notes) is (rows > 2)
    assert (f"{said}; the verdict counts it" in alone.notes) is (rows == 3)
    decides = f"evaluation decides: {rows} rows at once take"
    for counted in (alone, spread):
        assert any(note.startswith(decides) for note in counted.notes) is (rows == 8)
    assert not any("evaluation reads" in note for note in wider.notes)


@pytest.mark.parametrize(
    ("stated", "rows"),
    [
        ("evals_per_epoch: 4\n", 64),
        ("eval_steps: 0.1\n", 64),
        ("eval_strategy: epoch\n", 64),
        ("", 0),  # Axolotl leaves the Trainer's default, which is off
        ("eval_strategy: no\n", 0),
        ("evals_per_epoch: 0\n", 0),
    ],
)
def test_axolotl_evaluates_where_a_key_says_when(stated: str, rows: int, tmp_path: Path) -> None:
    text = AXOLOTL_LORA_8B + stated
    read = imported(tmp_path, axolotl_yaml=f"{text}eval_batch_size: 64\n")
    assert read.eval_batch_size == rows
    assert ("eval_batch_size" in read.without_effect) is (rows == 0)
    assert imported(tmp_path, axolotl_yaml=text).eval_batch_size == (2 if rows else 0)
    nothing = f"{text}eval_batch_size: 64\n".replace("val_set_size: 0.05", "val_set_size: 0")
    assert imported(tmp_path, axolotl_yaml=nothing).eval_batch_size == 0
    tested = f"{nothing}test_datasets: [{{path: a}}]\n"
    assert imported(tmp_path, axolotl_yaml=tested).eval_batch_size == rows


def test_a_script_of_pairs_has_two_lengths(tmp_path: Path) -> None:
    text = "python run_summarization.py --model_name_or_path google-t5/t5-small --bf16 "
    text += "--per_device_train_batch_size 4 --max_source_length 512 --predict_with_generate"
    read = imported(tmp_path, sum_sh=text)
    assert (read.settings["seq_len"], read.settings["target_len"]) == (512, 128)
    assert read.unknown == ()
    (prediction,) = estimate(gpu=GPU, from_file=tmp_path / "sum.sh")
    assert prediction.run.lengths == "512+128"


# --- settings of the user, notes, faults


def test_options_count_more_than_the_file(tmp_path: Path) -> None:
    (path,) = files_of(tmp_path, lora_yaml=LLAMAFACTORY)
    args = ["--gpu", GPU, "--batch-size", "1,2", "--seq-len", "512", "--json"]
    done = whichlora("estimate", "--from", str(path), *args)
    predictions = json.loads(done.stdout)["predictions"]
    assert [p["config"]["batch_size"] for p in predictions] == [1, 2]
    assert {p["config"]["seq_len"] for p in predictions} == {512}
    assert {p["config"]["r"] for p in predictions} == {8}
    other = estimate("Qwen/Qwen3-0.6B", GPU, from_file=path)
    assert other[0].run.model == "Qwen/Qwen3-0.6B"


def test_a_strategy_of_the_user_replaces_that_of_the_file(tmp_path: Path) -> None:
    files_of(tmp_path, zero3_yaml=ZERO3_CONFIG)
    command = SFT.replace("python", "accelerate launch --config_file zero3.yaml")
    (path,) = files_of(tmp_path, sft_sh=command)
    (sharded,) = estimate(gpu=GPU, from_file=path, parallel="fsdp", gpus=2)
    assert (sharded.run.parallel.strategy, sharded.run.parallel.gpus) == ("fsdp", 2)
    (alone,) = estimate(gpu=GPU, from_file=path, gpus=1)
    assert alone.run.parallel.gpus == 1


def test_what_goes_with_a_setting_of_the_file_falls_with_it(tmp_path: Path) -> None:
    (path,) = files_of(tmp_path, sft_yaml=TRL_CLI)
    (of_file,) = estimate(gpu=GPU, from_file=path)
    assert (of_file.run.base_dtype, of_file.run.loss_head) == ("float32", "trl-fused")
    (pure,) = estimate(gpu=GPU, from_file=path, precision="bf16-pure", trainer="loop")
    assert (pure.run.base_dtype, pure.run.loss_head) == ("auto", "hf")
    for settings in ({"method": "qlora"}, {"method": "lora", "quant": "int8"}):  # without a dtype
        (stored,) = estimate(gpu=GPU, from_file=path, **settings)
        assert stored.run.base_dtype == "auto"


def test_a_way_to_quantise_without_bits_is_told(tmp_path: Path) -> None:
    beside = "quantization_method: bnb\nquantization_type: nf4\n"
    text = "quantization_method: has no effect without quantization_bit"
    assert text in imported(tmp_path, lora_yaml=LLAMAFACTORY + beside).assumed
    quantised = imported(tmp_path, lora_yaml=f"{LLAMAFACTORY}{beside}quantization_bit: 4\n")
    assert text not in quantised.assumed
    assert quantised.settings["method"] == "qlora"


def test_unsloth_inside_llamafactory_is_a_trainer_to_ask_for(tmp_path: Path) -> None:
    (path,) = files_of(tmp_path, lora_yaml=f"{LLAMAFACTORY}use_unsloth: true\n")
    (own,) = estimate(gpu="l40", from_file=path)
    (fused,) = estimate(gpu="l40", from_file=path, trainer="unsloth")
    assert any("takes more (--trainer unsloth)" in note for note in own.notes)
    assert not any("use_unsloth" in note for note in fused.notes)
    assert fused.memory.peak_allocated_bytes < own.memory.peak_allocated_bytes


def test_deepspeed_of_one_gpu_has_its_dtypes_and_its_offload(tmp_path: Path) -> None:
    text = LLAMAFACTORY.replace("finetuning_type: lora", "finetuning_type: full")
    full, ds = files_of(tmp_path, full_yaml=f"{text}deepspeed: ds.json\n", ds_json="{}")
    sizes = {}
    for name, zero in (
        ("zero2", {"stage": 2}),
        ("zero3", {"stage": 3}),
        ("offloaded", {"stage": 2, "offload_optimizer": {"device": "cpu"}}),
    ):
        ds.write_text(json.dumps({"zero_optimization": zero}))
        (found,) = estimate(gpu="1xh100", from_file=full)
        assert found.run.parallel.gpus == 1
        assert found.run.parallel.strategy == f"zero{zero['stage']}"
        sizes[name] = found.memory.device_used_bytes
    (plain,) = estimate(gpu=GPU, from_file=full, gpus=1, parallel="none")
    assert plain.run.parallel.is_one_device
    assert sizes["offloaded"] < plain.memory.device_used_bytes
    more = min(sizes["zero2"], sizes["zero3"]) - plain.memory.device_used_bytes
    assert more > 8 * 134_515_008  # fp32 masters, and their states in place of bf16 ones


def test_a_strategy_of_the_user_replaces_a_file_of_deepspeed_that_is_not_here(
    tmp_path: Path,
) -> None:
    (path,) = files_of(tmp_path, lora_yaml=LLAMAFACTORY + "deepspeed: ../../etc/none.json\n")
    fault = r"yaml:\d+:1: deepspeed: there is no file '../../etc/none.json'; .*pass --parallel to"
    with pytest.raises(ConfigError, match=fault):
        estimate(gpu=GPU, from_file=path, gpus=2)
    (found,) = estimate(gpu=GPU, from_file=path, gpus=2, parallel="zero2")
    assert found.run.parallel.strategy == "zero2"


def test_a_target_may_state_the_number_of_gpus(tmp_path: Path) -> None:
    text = LLAMAFACTORY + "deepspeed: ds.json\n"
    lora, _ = files_of(tmp_path, lora_yaml=text, ds_json=json.dumps(DEEPSPEED))
    (stated,) = estimate(gpu=GPU, from_file=lora, gpus=4)
    (counted,) = estimate(gpu=f"4x{GPU}", from_file=lora)
    assert counted == stated
    with pytest.raises(ConfigError, match="does not say how many GPUs the run has; pass --gpus"):
        estimate(gpu=[f"4x{GPU}", GPU], from_file=lora)
    command = SFT.replace("python", "torchrun --nproc_per_node=8")
    (path,) = files_of(tmp_path, sft_sh=command)
    assert estimate(gpu=f"2x{GPU}", from_file=path)[0].run.parallel.gpus == 2


def test_a_file_of_another_trainer_of_trl_is_told(tmp_path: Path) -> None:
    told = "dpo.yaml: beta: is no key of trl sft, which is assumed unless --trainer is given"
    (path,) = files_of(tmp_path, dpo_yaml=TRL_CLI + "beta: 0.1\n")
    assert any(told in note for note in estimate(gpu=GPU, from_file=path)[0].notes)
    (path,) = files_of(tmp_path, sft_yaml=TRL_CLI)
    assert not any("trl sft" in note for note in estimate(gpu=GPU, from_file=path)[0].notes)


def test_a_file_of_trl_is_read_as_the_trainer_that_the_user_names(tmp_path: Path) -> None:
    text = TRL_CLI + "max_prompt_length: 100\nmax_completion_length: 156\nuse_vllm: true\n"
    (path,) = files_of(tmp_path, grpo_yaml=text)
    command = f"python trl/scripts/grpo.py --config {path.name}"
    (script,) = files_of(tmp_path, grpo_sh=command)
    (named,) = estimate(gpu=GPU, from_file=path, trainer="grpo", batch_size=8)
    (of_script,) = estimate(gpu=GPU, from_file=script, batch_size=8)
    assert named.run == of_script.run
    assert named.run.trainer_option("use_vllm") is True
    assert named.run.seq_len == 256


def test_the_answer_says_what_was_not_used(tmp_path: Path) -> None:
    (path,) = files_of(tmp_path, lora_yaml=LLAMAFACTORY + "frobnicate: 3\n")
    done = whichlora("estimate", "--from", str(path), "--gpu", GPU)
    text = " ".join(done.stdout.split())
    assert "unknown keys, not used: frobnicate" in text
    assert "does not say how many GPUs the run has; assumed: 1" in text
    explained = explain(gpu=GPU, from_file=path)
    assert "frobnicate" in explained.prediction.notes[0]
    assert whichlora("explain", "--from", str(path), "--gpu", GPU).exit_code == 0
    (prediction,) = estimate(gpu=GPU, from_file=path)
    (placed,) = where(gpu=GPU, from_file=path)
    assert placed.prediction is not None
    assert placed.prediction.run == prediction.run
    assert set(prediction.notes) <= set(placed.prediction.notes)
    listed = json.loads(whichlora("where", "--from", str(path), "--gpu", GPU, "--json").stdout)
    memory = listed["placements"][0]["prediction"]["memory"]
    assert memory["device_used_bytes"] == prediction.memory.device_used_bytes


def test_an_optimizer_that_is_not_predicted_is_refused_unless_one_is_given(tmp_path: Path) -> None:
    (path,) = files_of(tmp_path, lora_yaml=LLAMAFACTORY + "optim: muon\n")
    with pytest.raises(ConfigError, match=r"optim: 'muon' is not predicted.*pass --optimizer"):
        estimate(gpu=GPU, from_file=path)
    assert estimate(gpu=GPU, from_file=path, optimizer="sgd")[0].run.optimizer == "sgd"


FAULTS: list[tuple[dict[str, str], str]] = [
    ({"a_yaml": ""}, "is empty"),
    ({"a_yaml": "- 1\n"}, "is not a mapping"),
    ({"a_yaml": "base_model: [\n"}, "is not YAML"),
    ({"a_json": '{"a": '}, "is not JSON"),
    ({"a_yaml": "foo: 1\n"}, "is of no tool that is known"),
    ({"a_yaml": "micro_batch_size: 1\ncutoff_len: 2\n"}, "have one of the keys base_model"),
    ({"a_yaml": "base_model: !!python/object:os.system x\n"}, "is not accepted"),
    ({"a_yaml": "base_model: x\nmicro_batch_size: many\n"}, "'many' is not a whole number"),
    ({"a_yaml": "base_model: x\nbase_model: y\n"}, "is given twice, first in line 1"),
    ({"a_yaml": "base_model: 5\n"}, "a.yaml:1:1: base_model: 5 is not text"),
    ({"a_yaml": FSDP_CONFIG}, "says nothing of a training"),
    ({"a_yaml": LLAMAFACTORY, "b_yaml": LLAMAFACTORY}, "is of the same kind as"),
    ({"a_sh": "#!/bin/bash\nls\n"}, "has no command that trains"),
    ({"a_sh": "llamafactory-cli export --x y\n"}, "merges or exports a model, and trains nothing"),
    ({"a_sh": "#!/bin/bash\npython a.py 'x\n"}, "has a quote that is not closed"),
    ({"a_sh": SFT + "\n" + SFT}, "has 2 commands to predict"),
    (
        {"a_sh": SFT.replace("--lora_r 32", "--optim $HOME")},
        "has a variable that the file does not set",
    ),
    (
        {"a_sh": SFT.replace("--lora_r 32", "--optim $(id)")},
        "has a variable that the file does not set",
    ),
    ({"a_sh": SFT.replace("python", "torchrun --nproc_per_node=-1")}, "is not a number of GPUs"),
]


@pytest.mark.parametrize(("texts", "fault"), FAULTS, ids=[fault for _, fault in FAULTS])
def test_a_fault_is_one_line(texts: dict[str, str], fault: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        import_files(files_of(tmp_path, **texts))
    assert fault in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("broken", [5, [1], {"stage": "x"}, {"stage": 3, "offload_param": 7}])
def test_a_broken_deepspeed_file_is_refused(broken: Any, tmp_path: Path) -> None:
    text = LLAMAFACTORY + "deepspeed: ds.json\n"
    files_of(tmp_path, ds_json=json.dumps({"zero_optimization": broken}))
    assert "parallel" in imported(tmp_path, lora_yaml=text).refused


def test_an_importer_may_come_from_another_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Point:
        value = "outside"

        def load(self) -> Tool:
            return Tool(
                name="outside",
                summary="",
                models=frozenset({"the_model"}),
                marks=frozenset(),
                programs=frozenset(),
                read=lambda keys, launch: {"model": keys.word("the_model"), "r": 3},
            )

    monkeypatch.setattr(members, "entry_points", lambda group: (Point(),))
    (path,) = files_of(tmp_path, outside_yaml=f"the_model: {MODEL}\nother: 1\n")
    read = import_files([path])
    assert (read.tool, read.settings["r"], read.unknown) == ("outside", 3, ("other",))


def test_without_a_file_a_model_is_needed() -> None:
    assert "Missing argument 'MODEL'" in whichlora("explain", "--gpu", GPU).stderr
    with pytest.raises(ConfigError, match="models: is empty"):
        estimate(gpu=GPU)


def test_no_tool_has_a_key_in_two_tables() -> None:
    for tool in list_tools().values():
        assert not set(tool.unmodelled) & set(tool.without_effect), tool.name


@pytest.mark.parametrize(
    ("base", "key"),
    [
        *(
            (f"base_model: {MODEL}\nload_in_4bit: true\nadapter: qlora\n", key)
            for key in ("lora_r", "lora_target_linear", "sample_packing", "micro_batch_size")
        ),
        *(
            (f"model_name_or_path: {MODEL}\nstage: sft\nfinetuning_type: lora\n", key)
            for key in ("lora_rank", "lora_target", "cutoff_len", "per_device_train_batch_size")
        ),
    ],
)
def test_a_misspelt_key_is_unknown_and_not_without_effect(
    tmp_path: Path, base: str, key: str
) -> None:
    misspelt = key[:-2] + key[-1] + "x"
    read = imported(tmp_path, file_yaml=f"{base}{misspelt}: 4\n")
    assert read.unknown == (misspelt,)


@pytest.mark.parametrize(
    ("key", "spelled"),
    [
        ("micro_batch_size", "micro_batch_sise"),
        ("gradient_accumulation_steps", "gradient_acumulation_steps"),
        ("sequence_len", "sequence_lenght"),
        ("", "nothing_like_it"),
    ],
)
def test_a_note_names_the_key_that_an_unknown_one_is_spelled_like(
    key: str, spelled: str, tmp_path: Path
) -> None:
    read = imported(tmp_path, file_yaml=f"base_model: {MODEL}\nadapter: lora\n{spelled}: 4\n")
    told = f"{spelled} ({key}?)" if key else spelled
    assert any(note.endswith(f"unknown keys, not used: {told}") for note in read.notes)


def test_a_misspelt_key_of_the_model_is_told_from_a_file_of_no_tool(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"which is under base_model in such .*, not base_modle"):
        imported(tmp_path, file_yaml=f"base_modle: {MODEL}\nadapter: lora\n")


def test_keys_of_accelerates_and_deepspeeds_files_that_nothing_reads_are_named(
    tmp_path: Path,
) -> None:
    run = "model_name_or_path: Qwen/Qwen2.5-0.5B\nmax_length: 64\nuse_peft: true\n"
    accelerate = """compute_environment: LOCAL_MACHINE
distributed_type: FSDP
num_proceses: 4
fsdp_config: {fsdp_version: 2, fsdp_reshard_after_foward: false}
"""
    deepspeed = '{"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}, "bf 16": {}}'
    for name, text in (("run.yaml", run), ("acc.yaml", accelerate), ("ds.json", deepspeed)):
        (tmp_path / name).write_text(text)
    of_fsdp, of_zero = (
        import_files([tmp_path / "run.yaml", tmp_path / name], gpus=4).unknown
        for name in ("acc.yaml", "ds.json")
    )
    assert of_fsdp == ("fsdp_config.fsdp_reshard_after_foward", "num_proceses")
    assert of_zero == ("deepspeed.bf 16", "zero_optimization.zero_hpz_partition_size")


# --- models on another host


def test_a_path_of_another_host_is_the_model_whose_name_it_ends_in(tmp_path: Path) -> None:
    text = "model_name_or_path: /home/x/Qwen2.5-7B-Instruct/\nstage: sft\nfinetuning_type: lora\n"
    read = imported(tmp_path, a_yaml=text)
    assert read.settings["model"] == "Qwen/Qwen2.5-7B-Instruct"
    said = "/home/x/Qwen2.5-7B-Instruct/ is not on this host; taken as Qwen/Qwen2.5-7B-Instruct"
    assert any(said in line for line in read.assumed)
    own = tmp_path / "Qwen2.5-7B-Instruct"
    own.mkdir()
    read = imported(tmp_path, a_yaml=text.replace("/home/x/Qwen2.5-7B-Instruct/", str(own)))
    assert read.settings["model"] == str(own)


def test_a_path_of_an_unknown_model_says_how_to_name_one(tmp_path: Path) -> None:
    text = "model_name_or_path: /home/x/my-sft\nstage: sft\nfinetuning_type: lora\n"
    (path,) = files_of(tmp_path, a_yaml=text)
    with pytest.raises(ConfigError) as error:
        estimate(from_file=path, gpu=GPU)
    assert "name the model before the file: whichlora estimate MODEL --from FILE" in str(
        error.value
    )
    assert "\n" not in str(error.value)
    (prediction,) = estimate(MODEL, from_file=path, gpu=GPU)
    assert prediction.run.model == MODEL
    assert not any("on this host" in note for note in prediction.notes)


def test_a_variable_of_the_shell_before_a_models_name_is_a_folder(tmp_path: Path) -> None:
    read = imported(tmp_path, a_sh=SFT.replace(MODEL, "$MODELS/SmolLM2-135M"))
    assert read.settings["model"] == MODEL
    unset = imported(tmp_path, a_sh=SFT.replace(MODEL, "$HOME"))
    assert "has a variable that the file does not set" in unset.refused["model"]


def test_a_users_option_stands_for_a_variable_that_the_script_does_not_set(tmp_path: Path) -> None:
    (path,) = files_of(
        tmp_path, a_sh=SFT.replace("--lora_r 32", "--lora_r $RANK --deepspeed $HERE/zero3.json")
    )
    (tmp_path / "zero3.json").write_text('{"zero_optimization": {"stage": 3}}')
    with pytest.raises(
        ConfigError, match=r"lora_r: '\$RANK' has a variable .*; pass --r to predict"
    ):
        estimate(from_file=path, gpu=GPU, gpus=2)
    (prediction,) = estimate(from_file=path, gpu=GPU, gpus=2, r=64)
    assert prediction.run.r == 64
    assert prediction.run.parallel is not None
    assert prediction.run.parallel.strategy == "zero3"


def test_accelerates_file_spreads_a_run_whose_settings_the_user_names(tmp_path: Path) -> None:
    (path,) = files_of(tmp_path, accelerate_yaml=FSDP_CONFIG)
    (read,) = estimate(MODEL, from_file=path, gpu=GPU, method="full")
    (asked,) = estimate(
        MODEL,
        gpu=GPU,
        gpus=2,
        method="full",
        parallel="fsdp",
        fsdp_version="1",
        backward_prefetch="BACKWARD_PRE",
    )
    assert read.run == asked.run
    assert read.memory == asked.memory


def test_deepspeeds_file_spreads_a_run_whose_settings_the_user_names(tmp_path: Path) -> None:
    zero = {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": "auto",
        "fp16": {"enabled": True},
    }
    (path,) = files_of(tmp_path, ds_json=json.dumps(zero))
    (prediction,) = estimate(MODEL, from_file=path, gpu=GPU, gpus=2, method="full")
    assert prediction.run.batch_size == 3
    assert prediction.run.gradient_accumulation_steps == 1
    assert prediction.run.precision == "fp16"
    assert prediction.run.parallel is not None
    assert prediction.run.parallel.strategy == "zero3"
    assert dict(prediction.run.parallel.options)["offload"] == ("optimizer",)


@pytest.mark.parametrize(
    ("keys", "method", "fault"),
    [
        ("quantization_bit: 4\nquantization_method: bitsandbytes\n", "qlora", ""),
        ("quantization_bit: 8\nquantization_method: bitsandbytes\n", "lora", ""),
        ("quantization_bit: 4\nquantization_method: hqq\n", "", "quantization_method: 'hqq' is"),
        ("quantization_bit: 3\n", "", "quantization_bit: 3 is not predicted"),
        ("quantization_bit: 4\nquantization_type: int4\n", "", "quantization_type: 'int4' is"),
    ],
)
def test_the_storage_of_llamafactory_is_named_by_the_key_that_differs(
    keys: str, method: str, fault: str, tmp_path: Path
) -> None:
    read = imported(tmp_path, a_yaml=LLAMAFACTORY + keys)
    assert fault in read.refused.get("quant", "")
    assert bool(fault) == ("quant" in read.refused)
    if method:
        assert read.settings["method"] == method


def test_ppo_is_refused_with_what_comes_near(tmp_path: Path) -> None:
    read = imported(tmp_path, script_sh=SFT.replace("sft.py", "ppo.py"))
    assert "nearest is --trainer grpo, of batches of 8 answers" in read.refused["trainer"]
    code = f'm = AutoModelForCausalLM.from_pretrained("{MODEL}")\nPPOTrainer(model=m)\n'
    read = imported(tmp_path, script_py=code)
    assert "TRL's ppo is not read; nearest is --trainer grpo" in read.refused["trainer"]


@pytest.mark.parametrize(
    ("launch", "length"),
    [
        ("torchrun --nproc_per_node=4 train.py --data_path a.json", 512),
        ("torchrun --nproc_per_node=4 fastchat/train/train_mem.py --data_path a.json", 512),
        ("torchrun --nproc_per_node=4 train.py --data_path a.json --model_max_length 2048", 2048),
        ("torchrun --nproc_per_node=4 finetune.py --data_path a.json", None),
        ("torchrun --nproc_per_node=4 train.py", None),
    ],
)
def test_a_script_like_stanford_alpacas_cuts_rows_at_its_default(
    launch: str, length: int | None, tmp_path: Path
) -> None:
    read = imported(tmp_path, a_sh=f"{launch} --model_name_or_path {MODEL} --bf16 True")
    assert read.settings.get("seq_len") == length
    assert read.unknown == ()
    assert any("Stanford Alpaca" in note for note in read.assumed) == (length == 512)
