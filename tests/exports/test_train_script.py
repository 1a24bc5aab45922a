import itertools
import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
from written_job import train_script_of

from whichlora.errors import ConfigError
from whichlora.exports.launch import launch_files, launch_line, slurm_lines, train_command
from whichlora.exports.recipe import Recipe
from whichlora.methods import list_methods
from whichlora.spec.data_format import AUDIO_ROWS, IMAGE_ROWS, DataFormat
from whichlora.spec.parallel import ParallelConfig
from whichlora.spec.plan import Keeping, TrainOn
from whichlora.spec.run import Optimizer, Precision, Quant, RunConfig

GOLDEN = Path(__file__).parents[1] / "golden"
MODEL = "HuggingFaceTB/SmolLM2-135M"
TINY_LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "rope_scaling": None,
    "eos_token_id": [1, 2],
}


FORMATS = [
    DataFormat(),
    DataFormat(kind="messages", conversational=True),
    *(
        DataFormat(kind=kind, conversational=conversational)  # type: ignore[arg-type]
        for kind in ("prompt-completion", "preference")
        for conversational in (False, True)
    ),
]
KEPT = [
    Keeping(save_steps=0),
    Keeping(eval_steps=0),
    Keeping(save_steps=0, eval_steps=0),
    Keeping(save_steps=50, save_total_limit=3, eval_steps=100),
]


def script(**settings: Any) -> str:
    names = {field.name for field in fields(Recipe)} & settings.keys()
    recipe = {name: settings.pop(name) for name in names}
    run = RunConfig(model=MODEL, **settings)
    return train_script_of(run, target_modules=["q_proj", "v_proj"], **recipe)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("train_lora.py.txt", {"padding": "padded", "seq_len": 512, "batch_size": 4}),
        (
            "train_qdora_random.py.txt",
            {
                "method": "qdora",
                "precision": "bf16-pure",
                "weights": "random",
                "model_config": TINY_LLAMA,
                "epochs": 0.25,
                "optimizer": "lion",
            },
        ),
    ],
)
def test_a_script_is_written_word_for_word(name: str, settings: dict[str, Any]) -> None:
    assert script(**settings) == (GOLDEN / name).read_text(encoding="utf-8")


VARIANTS: list[dict[str, Any]] = [
    *({"method": name} for name, method in list_methods().items() if not method.reads_batches),
    *({"precision": precision} for precision in get_args(Precision)),
    *({"optimizer": optimizer} for optimizer in get_args(Optimizer)),
    *({"quant": quant} for quant in get_args(Quant)),
    *(
        {"batching": batching}
        for batching in ("longest", "grouped", "fixed", "packed", "packed-bfd")
    ),
    {"gradient_checkpointing": False, "loss_head": "liger"},
    {"weights": "random", "model_config": TINY_LLAMA},
    {"weights": "random", "model_config": TINY_LLAMA, "tokenizer": "gpt2"},
    {"masked_lm": True},
    *(
        {"data_format": data_format, "train_on": train_on, "batching": batching}
        for data_format, train_on, batching in itertools.product(
            FORMATS, get_args(TrainOn), ("longest", "packed", "packed-bfd")
        )
    ),
    *({"masked_lm": True, "data_format": data_format} for data_format in FORMATS),
    *({"keeping": keeping} for keeping in KEPT),
    {"keeping": Keeping(save_steps=0), "precision": "bf16-pure"},
    {"use_rslora": True, "loraplus_lr_ratio": 16.0, "expandable_segments": True},
    {"trainer": "sft", "data_format": FORMATS[2], "batching": "longest", "method": "qlora"},
    *(
        {"trainer": trainer, "data_format": data_format, "batching": "longest"} | settings
        for trainer, data_format in (
            ("dpo", FORMATS[4]),
            ("orpo", FORMATS[5]),
            ("cpo", FORMATS[4]),
            ("reward", FORMATS[5]),
            ("kto", DataFormat(kind="labelled")),
            ("grpo", DataFormat(kind="prompts", conversational=True)),
        )
        for settings in (
            {"batch_size": 8, "weights": "random", "model_config": TINY_LLAMA},
            {"batch_size": 8, "method": "qlora", "keeping": KEPT[0]},
            {"batch_size": 8, "method": "full", "gradient_checkpointing": False},
            {"batch_size": 8, "loraplus_lr_ratio": 16.0},
        )
    ),
]
PAIRS = {"data_format": FORMATS[4]}


def test_every_script_compiles_and_has_no_unused_or_missing_name(tmp_path: Path) -> None:
    for number, variant in enumerate(VARIANTS):
        source = script(**variant)
        compile(source, "train.py", "exec")
        (tmp_path / f"train_{number}.py").write_text(source, encoding="utf-8")
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "E,F,I", "-q"]
    pytest.importorskip("ruff")
    checked = subprocess.run(
        [*command, "--line-length", "100", str(tmp_path)], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout
    formatted = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--isolated", "--diff", "-q", str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert formatted.returncode == 0, formatted.stdout


@pytest.mark.parametrize(
    ("settings", "present", "absent"),
    [
        ({"method": "full"}, ["torch.bfloat16"], ["peft", "BitsAndBytes"]),
        ({"method": "full", "precision": "fp16"}, ["torch.float32", "fp16=True"], ["bf16=True"]),
        (
            {"method": "qlora", "compute_dtype": "float32"},
            ["bnb_4bit_compute_dtype=torch.float32", "dtype=torch.bfloat16"],
            ["bnb_4bit_compute_dtype=torch.bfloat16"],
        ),
        ({"base_dtype": "float32"}, ["torch.float32", "bf16=True"], ["bfloat16"]),
        ({"precision": "bf16-no-autocast"}, ["torch.bfloat16"], ["bf16=True"]),
        ({"precision": "bf16-pure"}, ["autocast_adapter_dtype=False"], ["bf16=True"]),
        ({"method": "dora"}, ["use_dora=True"], ["prepare_model_for_kbit_training"]),
        ({"quant": "int8"}, ["load_in_8bit=True", "prepare_model_for_kbit_training"], ["4bit"]),
        ({"method": "qlora", "prepare_kbit": False}, ['"nf4"'], ["prepare_model_for_kbit"]),
        ({"gradient_checkpointing": False}, [], ["checkpointing"]),
        ({"bias": "lora_only"}, ['bias="lora_only"'], []),
        ({"use_rslora": True}, ["use_rslora=True"], ["loraplus"]),
        (
            {"loraplus_lr_ratio": 16.0},
            ["loraplus_lr_ratio=16.0", "get_optimizer_cls_and_kwargs", "(optimizer, None)"],
            ["use_rslora", "os.environ"],
        ),
        ({"loraplus_lr_ratio": 16.0, "method": "full"}, [], ["loraplus", "optimizers="]),
        ({"expandable_segments": True}, ["import os", '"PYTORCH_ALLOC_CONF"'], []),
        ({"precision": "tf32"}, ["torch.float32", "tf32=True"], ["bf16=True"]),
        ({"adapter_dtype": "bfloat16"}, ["autocast_adapter_dtype=False", "bf16=True"], []),
        ({"attn": "eager", "lora_dropout": 0.1}, ['"eager"', "lora_dropout=0.1"], []),
        (
            PAIRS | {"trainer": "dpo", "trainer_options": (("beta", 0.3),)},
            ["DPOConfig(", "max_length=SEQ_LEN", "beta=0.3", "peft_config=peft_config", '"trl"'],
            ["TrainingArguments", "data_collator", "get_peft_model", "is_learned"],
        ),
        (
            PAIRS | {"trainer": "dpo", "method": "full", "precision": "fp32"},
            ["bf16=False", "disable_dropout=True"],  # which TRL turns on by itself
            ["peft_config", "NarrowTrainer"],
        ),
        (
            PAIRS | {"trainer": "dpo", "method": "qlora"},
            ["class NarrowTrainer(DPOTrainer)", "trainer = NarrowTrainer("],
            ["prepare_model_for_kbit_training"],
        ),
        (
            PAIRS | {"trainer": "orpo", "method": "qlora"},
            ["trainer.train_dataset.filter(is_learned)", "peft_config=peft_config"],
            ["prepare_model_for_kbit_training", "NarrowTrainer"],  # it prepares the base itself
        ),
        (
            PAIRS | {"trainer": "reward"},
            ["AutoModelForSequenceClassification", "num_labels=1", 'task_type="SEQ_CLS"'],
            ["CAUSAL_LM"],
        ),
        (
            {"trainer": "grpo", "batch_size": 8, "data_format": DataFormat(kind="prompts")},
            ["reward_funcs=reward_funcs", "len(ids) + 256 <= SEQ_LEN", "import runpy"],
            ["max_length", "eval_dataset", "validation"],
        ),
        (
            PAIRS | {"trainer": "dpo", "loraplus_lr_ratio": 16.0},
            ["model = trainer.model", "trainer.optimizer = optimizer"],
            ["optimizers="],
        ),
    ],
)
def test_a_script_holds_what_its_settings_need_and_nothing_else(
    settings: dict[str, Any], present: list[str], absent: list[str]
) -> None:
    source = script(**settings)
    assert [text for text in present if text not in source] == []
    assert [text for text in absent if text in source] == []


def test_rows_are_joined_only_where_the_prediction_had_no_padding() -> None:
    assert "no padding" in script(padding="none")
    assert "padded to their longest" in script(padding="padded")
    assert "padded to their longest" in script(padding="none", batching="longest")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"phase": "inference"}, "phase: inference has nothing to train"),
        ({"loss_head": "raw"}, "loss_head: raw can't be trained.*hf and liger"),
        ({"weights": "random"}, "weights: random needs the config"),
        ({"model_config": {"is_encoder_decoder": True}}, "needs pairs of texts"),
        ({"trainer": "dpo"}, "has text as text, and the trainer takes pairs: prompt, chosen"),
        (PAIRS | {"trainer": "dpo", "precision": "bf16-pure"}, "makes adapters in fp32, not those"),
        (
            PAIRS | {"trainer": "dpo", "method": "qlora", "prepare_kbit": True},
            "prepare_kbit: True, but trainer dpo does not prepare a quantised base",
        ),
        (PAIRS | {"trainer": "grpo", "batch_size": 8}, "the trainer takes prompts: prompt; give"),
        ({"trainer": "unsloth", "method": "qlora"}, "trainer unsloth, whose steps are unsloth"),
    ],
)
def test_a_run_that_no_script_can_perform_is_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        script(**settings)


def test_the_command_uses_this_interpreter() -> None:
    run = RunConfig(model="m")
    assert train_command(Path("out/train.py"), run) == [sys.executable, "out/train.py"]


def on_gpus(strategy: str, **settings: Any) -> RunConfig:
    return RunConfig(model="m", parallel=ParallelConfig(strategy=strategy, **settings))


@pytest.mark.parametrize(
    ("run", "line"),
    [
        (on_gpus("fsdp", gpus=4), "python -m torch.distributed.run --nproc-per-node=4 train.py"),
        (on_gpus("device-map", gpus=4), "python train.py"),
        (
            on_gpus("ddp", gpus=16, nodes=2),
            "python -m torch.distributed.run --nproc-per-node=8 --nnodes=2 --rdzv-backend=c10d "
            "--rdzv-endpoint=$MASTER_ADDR:29500 train.py",
        ),
    ],
)
def test_a_process_is_started_for_each_gpu_of_a_node(run: RunConfig, line: str) -> None:
    assert launch_line(run, "train.py") == line


def test_a_batch_script_starts_one_launcher_on_each_node() -> None:
    run = on_gpus("fsdp", gpus=16, nodes=2)
    lines = "\n".join(slurm_lines(run, "my job.py", python="python"))
    assert "exec srun --ntasks-per-node=1 " in lines
    assert "--nproc-per-node=8 --nnodes=2 " in lines
    assert lines.endswith("'my job.py'")
    one_node = slurm_lines(on_gpus("fsdp", gpus=4), "train.py", python="python")
    assert one_node == [f"exec {launch_line(on_gpus('fsdp', gpus=4), 'train.py')}"]


def test_threads_of_an_offloaded_update_are_set_for_the_processes() -> None:
    options = (("offload", ("optimizer",)), ("omp_num_threads", 8))
    run = on_gpus("zero2", gpus=2, options=options)
    assert launch_line(run, "train.py").startswith("OMP_NUM_THREADS=8 python -m torch.distributed")
    assert train_command(Path("train.py"), run)[:3] == ["env", "OMP_NUM_THREADS=8", sys.executable]


def test_several_nodes_are_not_started_from_one() -> None:
    with pytest.raises(ConfigError, match="nodes: 2 can't be started from one of them"):
        train_command(Path("train.py"), on_gpus("ddp", gpus=4, nodes=2))


def test_a_script_states_the_strategy_and_files_state_it_for_accelerate() -> None:
    text = script(parallel=ParallelConfig(strategy="fsdp", gpus=4))
    assert "fsdp=True" in text
    assert '"version": 2' in text
    files = launch_files(on_gpus("fsdp", gpus=4))
    assert list(files) == ["accelerate.yaml"]
    assert "distributed_type: FSDP\n" in files["accelerate.yaml"]
    assert "num_processes: 4\n" in files["accelerate.yaml"]


@pytest.mark.parametrize(("strategy", "leaves"), [("ddp", True), ("device-map", False)])
def test_ranks_leave_their_group_once_ddp_is_gone(strategy: str, leaves: bool) -> None:
    text = script(parallel=ParallelConfig(strategy=strategy, gpus=4))
    end = text[text.index('if __name__ == "__main__":') :]
    assert re.findall(r"    (\S+\(\))", end) == [
        "main()",
        *["gc.collect()", "PartialState().destroy_process_group()"] * leaves,
    ]
    assert ("import gc\n" in text) == ("import PartialState\n" in text) == leaves


@pytest.mark.parametrize("strategy", ["pp", "tp"])
def test_what_the_trainer_cannot_do_is_refused(strategy: str) -> None:
    with pytest.raises(ConfigError, match=f"{strategy} has no key in TrainingArguments"):
        script(parallel=ParallelConfig(strategy=strategy, gpus=2))


def test_deepspeed_reads_its_own_file() -> None:
    text = script(parallel=ParallelConfig(strategy="zero3", gpus=4))
    assert 'deepspeed=str(HERE / "deepspeed.json")' in text
    files = launch_files(on_gpus("zero3", gpus=4))
    assert json.loads(files["deepspeed.json"])["zero_optimization"]["stage"] == 3
    assert "  zero3_init_flag: true\n" in files["accelerate.yaml"]
    assert text.index("args = TrainingArguments(") < text.index("model = AutoModelForCausalLM")
    assert "  deepspeed_config_file: deepspeed.json\n" in files["accelerate.yaml"]


def test_sharded_4_bit_weights_are_held_in_a_dtype_that_can_be_sharded() -> None:
    text = script(method="qlora", parallel=ParallelConfig(strategy="fsdp", gpus=4))
    assert 'bnb_4bit_quant_storage="bfloat16"' in text


def test_a_pinned_attention_kernel_is_pinned_in_the_script() -> None:
    text = script(attn="sdpa-efficient")
    assert "from transformers.integrations import sdpa_attention" in text
    assert "sdpa_attention.use_gqa_in_sdpa = lambda *_: False" in text
    assert 'for name in ("flash", "cudnn", "math"):' in text
    assert "attn_implementation" not in text
    assert "sdpa_attention" not in script()


@pytest.mark.parametrize(
    ("model_type", "loads"),
    [("qwen2_5_vl", "AutoModelForImageTextToText"), ("gemma3", "AutoModelForCausalLM")],
)
def test_a_model_that_sees_is_loaded_by_the_class_that_knows_it(
    model_type: str, loads: str
) -> None:
    text = script(model_config={"model_type": model_type})
    assert f"model = {loads}.from_pretrained(" in text


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"images": 1}, "images are predicted, and no row names one"),
        ({"audios": 1}, "audios are predicted, and no row names one"),
        ({"data_format": AUDIO_ROWS, "trainer": "sft"}, "trainer sft does not read them"),
        ({"data_format": IMAGE_ROWS, "weights": "random"}, "random has no processor for them"),
        ({"data_format": IMAGE_ROWS, "trainer": "dpo"}, "trainer dpo does not read them"),
        ({"data_format": IMAGE_ROWS, "batching": "packed"}, "collator packed can't batch them"),
    ],
)
def test_images_that_a_job_can_not_read_are_refused(settings: dict[str, Any], fault: str) -> None:
    if settings.get("weights") == "random":
        settings = settings | {"model_config": TINY_LLAMA}
    with pytest.raises(ConfigError, match=fault):
        script(**settings)
