"""Scripts and notebooks, as people write them: what is read, and what is said of the rest."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from whichlora import estimate
from whichlora.cli import main
from whichlora.errors import ConfigError
from whichlora.imports import Imported, import_files
from whichlora.predict.words import headline
from whichlora.units import format_bytes

MODEL = "Qwen/Qwen2.5-0.5B"
UNSLOTH = """
from unsloth import FastLanguageModel
max_seq_length = 1024  # choose any
model, tokenizer = FastLanguageModel.from_pretrained(
    model_name = "unsloth/Qwen2.5-0.5B", max_seq_length = max_seq_length, dtype = None,
    load_in_4bit = True,
)
model = FastLanguageModel.get_peft_model(
    model, r = 32, target_modules = ["q_proj", "v_proj"], lora_alpha = 16, lora_dropout = 0,
    use_gradient_checkpointing = "unsloth", random_state = 3407, loftq_config = None,
)
trainer = SFTTrainer(
    model = model, tokenizer = tokenizer, max_seq_length = max_seq_length, packing = False,
    args = SFTConfig(
        per_device_train_batch_size = 2, gradient_accumulation_steps = 4, max_steps = 60,
        optim = "adamw_8bit", fp16 = not is_bfloat16_supported(), bf16 = is_bfloat16_supported(),
    ),
)
"""
QLORA = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--lr", type=float)
args = parser.parse_args()
bnb = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float16
)
base_model = "Qwen/Qwen2.5-0.5B"
model = AutoModelForCausalLM.from_pretrained(base_model, quantization_config=bnb)
tokenizer = AutoTokenizer.from_pretrained("another/model")
model = prepare_model_for_kbit_training(model)
peft_config = LoraConfig(r=64, lora_alpha=16, lora_dropout=0.1, target_modules=["q_proj"])
arguments = TrainingArguments(
    "out", per_device_train_batch_size=args.batch_size, optim="paged_adamw_8bit",
    learning_rate=args.lr, fp16=True,
)
SFTTrainer(model=model, peft_config=peft_config, max_seq_length=512, args=arguments).train()
"""
CLASSIFIER = """
model = AutoModelForSequenceClassification.from_pretrained("google-bert/bert-base-uncased")
def tokenize(batch): return tok(batch["text"], truncation=True, max_length=256)
args = TrainingArguments("out", per_device_train_batch_size=32, bf16=True)
Trainer(model=model, args=args).train()
"""


def script(folder: Path, text: str, name: str = "train.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def imported(folder: Path, text: str) -> Imported:
    return import_files([script(folder, text)])


def test_a_notebook_of_unsloth(tmp_path: Path) -> None:
    code = ["%%capture\n", "!pip install unsloth\n", *UNSLOTH.splitlines(keepends=True)]
    cells = [
        {"cell_type": "markdown", "source": ["# x = ("]},
        {"cell_type": "code", "source": code},
    ]
    read = import_files([script(tmp_path, json.dumps({"cells": cells}), "train.ipynb")])
    assert (read.tool, read.unknown, read.refused) == ("unsloth", (), {})
    assert {
        "model": "unsloth/Qwen2.5-0.5B",
        "trainer": "unsloth",
        "method": "qlora",
        "r": 32,
        "lora_alpha": 16,
        "target_modules": ("q_proj", "v_proj"),
        "seq_len": 1024,
        "batch_size": 2,
        "gradient_accumulation_steps": 4,
        "gradient_checkpointing": True,
        "trainer_options": (("use_gradient_checkpointing", "unsloth"),),
        "precision": "auto",
    }.items() <= read.settings.items()
    assert read.epochs is None


def test_what_unsloth_compiles_is_trl_with_a_note(tmp_path: Path) -> None:
    text = UNSLOTH.replace("unsloth/Qwen2.5-0.5B", "unsloth/gemma-3-1b-it")
    read = imported(tmp_path, text)
    assert (read.settings["trainer"], read.settings["gradient_checkpointing"]) == ("sft", True)
    assert any("code for gemma3_text; assumed: TRL's" in note for note in read.assumed)


def test_names_that_no_layer_has_are_passed_over(tmp_path: Path) -> None:
    path = script(tmp_path, QLORA.replace('["q_proj"]', '["q_proj", "c_attn"]'))
    (prediction,) = estimate(gpu="h100-sxm-80gb", from_file=path)
    assert any("c_attn: no layers of this model" in note for note in prediction.notes)
    none = script(tmp_path, QLORA.replace('["q_proj"]', '["c_attn"]'))
    with pytest.raises(ConfigError, match="'c_attn' is no linear layer of"):
        estimate(gpu="h100-sxm-80gb", from_file=none)


GRPO = UNSLOTH.replace("SFTTrainer", "GRPOTrainer").replace(
    "SFTConfig(", "GRPOConfig(num_generations=6, max_completion_length=300, temperature=0.9,"
)


def test_a_script_of_grpo_under_unsloth(tmp_path: Path) -> None:
    read = imported(tmp_path, GRPO)
    assert (read.unknown, read.refused) == ((), {})
    assert (read.settings["trainer"], read.settings["batch_size"]) == ("unsloth-grpo", 6)
    assert read.settings["seq_len"] == 812  # a prompt of 512 is assumed
    options = dict(read.settings["trainer_options"])
    assert (options["num_generations"], options["max_completion_length"]) == (6, 300)
    assert "fast_inference" not in options


def test_an_engine_inside_unsloth_has_the_script_s_settings(tmp_path: Path) -> None:
    standby = """import os\nos.environ["UNSLOTH_VLLM_STANDBY"] = "1"\n"""
    fast = "fast_inference = True, gpu_memory_utilization = 0.9, max_lora_rank = 32, load_in_4bit"
    text = standby + GRPO.replace("load_in_4bit", fast)
    read = imported(tmp_path, text)
    assert (read.unknown, read.refused) == ((), {})
    assert {
        ("UNSLOTH_VLLM_STANDBY", True),
        ("fast_inference", True),
        ("gpu_memory_utilization", 0.9),
        ("max_lora_rank", 32),
        ("max_seq_length", 1024),
    } <= set(read.settings["trainer_options"])
    off = imported(tmp_path, text.replace('= "1"', '= "0"'))
    assert dict(off.settings["trainer_options"])["UNSLOTH_VLLM_STANDBY"] is False
    (prediction,) = estimate(gpu="l4-24gb", from_file=script(tmp_path, text))
    assert prediction.fits
    whole = text.replace("load_in_4bit = True", "full_finetuning = True")
    assert "with an engine inside it" in imported(tmp_path, whole).refused["trainer"]


def test_an_answer_whose_length_is_computed_takes_what_the_prompt_leaves(tmp_path: Path) -> None:
    text = GRPO.replace("=300", "=max_seq_length - longest, max_prompt_length=longest")
    read = imported(tmp_path, text)
    assert read.settings["seq_len"] == 1024
    assert dict(read.settings["trainer_options"])["max_completion_length"] == 512
    assert any("max_completion_length: is computed; assumed: 512" in n for n in read.assumed)


def test_of_two_trainers_the_last_counts_with_its_own_arguments(tmp_path: Path) -> None:
    later = """
args = GRPOConfig(num_generations=4, per_device_train_batch_size=8, max_prompt_length=100,
    max_completion_length=200)
GRPOTrainer(model=model, args=args, reward_funcs=[reward]).train()
"""
    read = imported(tmp_path, UNSLOTH + later)
    assert (read.settings["trainer"], read.settings["batch_size"]) == ("unsloth-grpo", 8)
    assert (read.settings["seq_len"], read.settings["gradient_accumulation_steps"]) == (300, 1)
    assert any("SFTTrainer comes before GRPOTrainer" in note for note in read.assumed)
    again = UNSLOTH + "trainer = SFTTrainer(model=model, args=SFTConfig(packing=True))"
    assert imported(tmp_path, again).settings["batch_size"] == 2  # the first of a kind
    assert not any("comes before" in note for note in imported(tmp_path, again).assumed)


def test_adapters_beside_all_weights_have_no_effect_under_unsloth(tmp_path: Path) -> None:
    text = UNSLOTH.replace("load_in_4bit = True", "full_finetuning = True")
    read = imported(tmp_path, text)
    assert read.settings["method"] == "full"
    assert any("get_peft_model: has no effect" in note for note in read.assumed)


def test_a_base_in_fp8_under_unsloth_is_taken_as_one_in_16_bit(tmp_path: Path) -> None:
    read = imported(tmp_path, UNSLOTH.replace("load_in_4bit", "load_in_fp8"))
    assert read.settings["method"] == "lora"
    assert any("load_in_fp8: is not predicted; assumed: a base in 16" in n for n in read.assumed)


def test_a_checkpoint_in_mxfp4_is_unsloth_s_own_upload_in_4_bit(tmp_path: Path) -> None:
    text = UNSLOTH.replace("unsloth/Qwen2.5-0.5B", "unsloth/gpt-oss-20b")
    read = imported(tmp_path, text)
    assert read.settings["model"] == "unsloth/gpt-oss-20b-unsloth-bnb-4bit"
    assert read.settings["quantize_moe_experts"] is True
    grpo = imported(tmp_path, text.replace("SFT", "GRPO")).settings
    assert (grpo["model"], grpo["trainer"]) == (read.settings["model"], "unsloth-grpo")
    assert "quantize_moe_experts" not in grpo  # it always does


def test_names_that_wrap_matrices_of_a_tower_are_adapted_in_the_text_alone(tmp_path: Path) -> None:
    text = UNSLOTH.replace("unsloth/Qwen2.5-0.5B", "unsloth/gemma-4-E2B-it")
    read = imported(tmp_path, text)
    assert read.settings["freeze_vision_tower"] is True
    assert any("in the vision tower, too; assumed: in the text alone" in n for n in read.assumed)


def test_a_token_table_that_unsloth_is_told_to_offload_leaves_the_gpu(tmp_path: Path) -> None:
    text = UNSLOTH.replace("load_in_4bit", "offload_embedding = True, load_in_4bit")
    read = imported(tmp_path, text)
    assert ("offload_embedding", "true") in read.settings["trainer_options"]
    assert read.unknown == ()


def test_embeddings_under_unsloth_are_of_16_bit_and_without_checkpoints(tmp_path: Path) -> None:
    text = """
from unsloth import FastSentenceTransformer
model = FastSentenceTransformer.from_pretrained("unsloth/Qwen3-Embedding-0.6B")
model = FastSentenceTransformer.get_peft_model(model, r=32, target_modules=["q_proj"])
args = SentenceTransformerTrainingArguments("o", batch_sampler=BatchSamplers.NO_DUPLICATES)
SentenceTransformerTrainer(model=model, args=args, loss=MultipleNegativesRankingLoss(model))
"""
    settings = imported(tmp_path, text).settings
    assert (settings["method"], settings["gradient_checkpointing"]) == ("lora", False)


def test_a_script_of_trl_and_its_own_arguments(tmp_path: Path) -> None:
    read = imported(tmp_path, QLORA)
    assert (read.unknown, read.refused) == ((), {})
    assert {
        "model": "Qwen/Qwen2.5-0.5B",
        "method": "qlora",
        "quant": "nf4",
        "r": 64,
        "target_modules": ("q_proj",),
        "prepare_kbit": True,
        "gradient_checkpointing": True,
        "precision": "fp16",
        "trainer": "sft",
        "batch_size": 4,
        "seq_len": 512,
    }.items() <= read.settings.items()


@pytest.mark.parametrize(
    ("compute", "dtype", "said"),
    [
        ("bnb_4bit_compute_dtype=torch.float16", None, ""),
        ('bnb_4bit_compute_dtype="bfloat16"', "bfloat16", ""),
        ("", "float32", "is missing, which is float32"),
        ("bnb_4bit_compute_dtype=None", "float32", "is missing"),
        ("bnb_4bit_compute_dtype=torch.float32", "float32", ""),
        ("bnb_4bit_compute_dtype=chosen(x)", None, "is computed; assumed: that of the precision"),
    ],
)
def test_the_dtype_of_4_bit_products_is_read_of_a_script(
    compute: str, dtype: str | None, said: str, tmp_path: Path
) -> None:
    text = QLORA.replace("bnb_4bit_compute_dtype=torch.float16", compute)
    read = imported(tmp_path, text)
    name = "BitsAndBytesConfig.bnb_4bit_compute_dtype"
    assert read.settings["precision"] == "fp16"
    assert read.settings.get("compute_dtype") == dtype
    notes = [note for note in read.assumed if note.startswith(f"{name}: ")]
    assert [said in note for note in notes] == [True] * bool(said)
    assert name not in read.without_effect + read.unknown


def test_another_dtype_than_float32_in_a_run_of_fp32_is_told(tmp_path: Path) -> None:
    text = QLORA.replace("fp16=True", "fp16=False, bf16=False")
    text = text.replace("quantization_config=bnb", "quantization_config=bnb, dtype=torch.float32")
    read = imported(tmp_path, text)
    assert read.settings["precision"] == "fp32"
    assert "compute_dtype" not in read.settings
    assert any("is float16 in a run of fp32, which is not predicted" in t for t in read.assumed)


def test_a_command_sets_the_arguments_of_its_script(tmp_path: Path) -> None:
    script(tmp_path, QLORA, "finetune.py")
    command = script(tmp_path, "torchrun --nproc_per_node 2 finetune.py --batch-size 8", "run.sh")
    read = import_files([command])
    assert (read.tool, read.settings["batch_size"]) == ("python", 8)
    assert (read.settings["gpus"], read.settings["parallel"]) == (2, "ddp")


QUICKSTART = """
from trl import SFTConfig, SFTTrainer
from datasets import load_dataset
trainer = SFTTrainer(
    model="Qwen/Qwen3-0.6B", args=SFTConfig(per_device_train_batch_size=4, max_length=1024),
    train_dataset=load_dataset("trl-lib/Capybara", split="train"),
)
trainer.train()
"""


def test_a_trainer_of_trl_that_loads_the_model(tmp_path: Path) -> None:
    read = imported(tmp_path, QUICKSTART)
    assert (read.tool, read.unknown, read.refused) == ("python", (), {})
    assert {
        "model": "Qwen/Qwen3-0.6B",
        "method": "full",
        "seq_len": 1024,
        "batch_size": 4,
        "precision": "bf16",
        "base_dtype": "float32",
        "trainer": "sft",
    }.items() <= read.settings.items()
    assert any(
        "dtype: is missing; assumed: loaded in float32, as its trainer" in t for t in read.assumed
    )


@pytest.mark.parametrize(
    ("options", "base", "note"),
    [
        ('{"dtype": "bfloat16", "attn_implementation": "flash_attention_2"}', None, ""),
        ("{'torch_dtype': torch.bfloat16}", None, ""),
        ("of_a_function(x)", "float32", "is computed; assumed: loaded in float32"),
    ],
)
def test_what_trl_is_told_of_the_model(
    options: str, base: str | None, note: str, tmp_path: Path
) -> None:
    read = imported(
        tmp_path, QUICKSTART.replace("SFTConfig(", f"SFTConfig(model_init_kwargs={options}, ")
    )
    assert read.settings.get("base_dtype") == base
    assert (read.settings["attn"] == "flash_attention_2") == ("flash" in options)
    assert read.unknown == ()
    assert note in "".join(text for text in read.assumed if "dtype" in text)
    assert any("dtype" in text for text in read.assumed) == bool(note)


def test_a_quantised_model_that_trl_loads(tmp_path: Path) -> None:
    quantised = (
        "quantization_config=BitsAndBytesConfig(load_in_4bit=True), peft_config=LoraConfig(),"
    )
    text = QUICKSTART.replace("train_dataset", f"{quantised} train_dataset")
    read = imported(tmp_path, text)
    assert (read.settings["method"], read.settings["quant"]) == ("qlora", "fp4")
    assert "base_dtype" not in read.settings
    assert any("in which a quantised base computes; assumed: 16" in text for text in read.assumed)


def test_a_script_of_grpo_in_the_form_of_trl_s_quickstart(tmp_path: Path) -> None:
    read = imported(
        tmp_path,
        """
config = GRPOConfig(max_prompt_length=512, max_completion_length=1024, num_generations=8)
GRPOTrainer("Qwen/Qwen2.5-7B-Instruct", reward_funcs=reward, args=config).train()
""",
    )
    assert (read.settings["model"], read.settings["trainer"]) == (
        "Qwen/Qwen2.5-7B-Instruct",
        "grpo",
    )
    assert (read.settings["seq_len"], read.unknown) == (1536, ())


def test_a_model_that_the_script_loads_beside_a_trainer_of_its_name(tmp_path: Path) -> None:
    """A reward model, say: whose name the trainer is given is the one that learns."""
    judge = (
        "judge = AutoModelForSequenceClassification.from_pretrained('a/judge', dtype='bfloat16')"
    )
    read = imported(tmp_path, judge + QUICKSTART)
    assert (read.settings["model"], read.settings.get("task")) == ("Qwen/Qwen3-0.6B", None)


EMBEDS = """
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, losses
model = SentenceTransformer("google-bert/bert-base-uncased")
model.max_seq_length = 256
loss = losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=32)
args = SentenceTransformerTrainingArguments("o", per_device_train_batch_size=512, bf16=True)
SentenceTransformerTrainer(model=model, args=args, train_dataset=train, loss=loss).train()
"""


def test_a_script_of_sentence_transformers(tmp_path: Path) -> None:
    read = imported(tmp_path, EMBEDS)
    assert (read.tool, read.unknown, read.refused) == ("python", (), {})
    assert {
        "model": "google-bert/bert-base-uncased",
        "trainer": "sentence-transformers",
        "trainer_options": (
            ("loss", "CachedMultipleNegativesRankingLoss"),
            ("mini_batch_size", 32),
        ),
        "seq_len": 256,
        "batch_size": 512,
        "precision": "bf16",
        "base_dtype": "float32",
    }.items() <= read.settings.items()
    (prediction,) = estimate(gpu="h100-sxm-80gb", from_file=script(tmp_path, EMBEDS))
    assert any("batch_size counts examples of 2 texts" in note for note in prediction.notes)


def test_a_loss_of_sentence_transformers_that_is_not_predicted(tmp_path: Path) -> None:
    text = EMBEDS.replace(
        "CachedMultipleNegativesRankingLoss(model, mini_batch_size=32)", "CoSENTLoss(model)"
    )
    with pytest.raises(ConfigError, match="'CoSENTLoss' is not accepted; accepted are Multiple"):
        estimate(gpu="h100-sxm-80gb", from_file=script(tmp_path, text))


def test_a_script_that_loads_nothing_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="loads no model with from_pretrained, nor hands a tra"):
        imported(tmp_path, "args = TrainingArguments('out')")


def test_a_model_that_a_script_makes_itself_is_asked_of_the_user(tmp_path: Path) -> None:
    path = script(tmp_path, "Trainer(model=LlamaForCausalLM(LlamaConfig()), args=args)")
    with pytest.raises(ConfigError, match=r"`LlamaForCausalLM.*name the model before the file"):
        estimate(gpu="h100-sxm-80gb", from_file=path)
    (prediction,) = estimate(MODEL, gpu="h100-sxm-80gb", from_file=path)
    assert any("made in float32" in note for note in prediction.notes)
    assert not any("unknown keys" in note for note in prediction.notes)


@pytest.mark.parametrize(
    ("version", "said"),
    [("4.45.2", "loaded in float32, as"), ("4.46.0", "that of the config, bfloat16")],
)
def test_a_model_of_a_config_has_its_dtype(tmp_path: Path, version: str, said: str) -> None:
    path = script(
        tmp_path,
        f"""
config = AutoConfig.from_pretrained("{MODEL}", vocab_size=1000)
model = AutoModelForCausalLM.from_config(config)
Trainer(model=model, args=TrainingArguments("out"))
""",
    )
    (prediction,) = estimate(
        gpu="h100-sxm-80gb", from_file=path, libraries={"transformers": version}
    )
    assert prediction.run.model == MODEL
    assert any(f"missing; assumed: {said}" in note for note in prediction.notes)
    unknown = "unknown keys, not used: from_pretrained.vocab_size"
    assert any(note.endswith(unknown) for note in prediction.notes)


def test_a_classifier_of_the_trainer(tmp_path: Path) -> None:
    read = imported(tmp_path, CLASSIFIER)
    assert {
        "method": "full",
        "task": "sequence-classification",
        "seq_len": 256,
        "batch_size": 32,
        "base_dtype": "float32",
        "trainer": "transformers",
    }.items() <= read.settings.items()


def test_arguments_of_its_own_functions_are_read(tmp_path: Path) -> None:
    text = """
def parse():
    parser.add_argument("--cutoff", default=300)
def train(base_model="Qwen/Qwen2.5-0.5B", cutoff_len=256, rank=8):
    model = AutoModelForCausalLM.from_pretrained(base_model, dtype=getattr(torch, "bfloat16"))
    tokenize = lambda row: tokenizer(row, truncation=True, max_length=cutoff_len)
    config = LoraConfig(r=rank)
    Trainer(model, args=TrainingArguments("x", per_device_train_batch_size=2))
train(cutoff_len=args.cutoff)
"""
    read = imported(tmp_path, text)
    assert (read.settings["model"], read.settings["seq_len"]) == ("Qwen/Qwen2.5-0.5B", 300)
    assert (read.settings["r"], read.settings["target_modules"]) == (8, ("default",))
    assert not any("dtype" in note for note in read.assumed)


def test_a_parser_of_transformers_reads_the_command(tmp_path: Path) -> None:
    text = """
@dataclass
class ModelArguments:
    model_name_or_path: str = field(default="facebook/opt-125m")
    lora_rank: int = 8
@dataclass
class TrainingArguments(transformers.TrainingArguments):
    optim: str = field(default="paged_adamw_32bit")
    model_max_length: int = 512
    per_device_train_batch_size: int = 1
model_args, training_args = HfArgumentParser((ModelArguments, TrainingArguments)).parse()
model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path)
config = LoraConfig(r=model_args.lora_rank)
Trainer(model=model, args=training_args).train()
"""
    script(tmp_path, text, "finetune.py")
    command = f"python finetune.py --model_name_or_path {MODEL} --per_device_train_batch_size 3"
    read = import_files([script(tmp_path, command + " --bf16 True --lora_rank 4", "run.sh")])
    assert (read.settings["model"], read.settings["r"]) == (MODEL, 4)
    assert (read.settings["batch_size"], read.settings["precision"]) == (3, "bf16")
    assert (read.settings["optimizer"], read.settings["seq_len"]) == ("paged_adamw_32bit", 512)
    assert read.unknown == ()


def test_a_function_is_given_the_options_of_its_command(tmp_path: Path) -> None:
    text = """
def train(base_model: str = "", batch_size: int = 128, micro_batch_size: int = 4):
    steps = batch_size // micro_batch_size
    model = LlamaForCausalLM.from_pretrained(base_model, load_in_8bit=True)
    args = TrainingArguments("x", micro_batch_size, gradient_accumulation_steps=steps)
fire.Fire(train)
"""
    script(tmp_path, text, "alpaca.py")
    command = f"python alpaca.py --base_model {MODEL} --micro_batch_size 8"
    read = import_files([script(tmp_path, command, "run.sh")])
    assert (read.settings["model"], read.settings["gradient_accumulation_steps"]) == (MODEL, 16)


def test_fields_of_a_dataclass_are_arguments(tmp_path: Path) -> None:
    text = """
@dataclass
class ScriptArguments:
    model_name: str = field(default="Qwen/Qwen2.5-0.5B", metadata={"help": "x"})
    rank: int = 4
model = AutoModelForCausalLM.from_pretrained(script_args.model_name, dtype=torch.bfloat16)
config = LoraConfig(r=script_args.rank, target_modules="all-linear")
trainer = DPOTrainer(model, args=DPOConfig(beta=0.3, max_length=128), peft_config=config)
"""
    read = imported(tmp_path, text)
    assert (read.settings["model"], read.settings["r"]) == ("Qwen/Qwen2.5-0.5B", 4)
    assert read.settings["target_modules"] == ("all-linear",)
    assert read.settings["trainer"] == "dpo"
    assert dict(read.settings["trainer_options"])["beta"] == 0.3


@pytest.mark.parametrize(
    ("line", "setting", "replaced"),
    [
        ("per_device_train_batch_size=int(sys.argv[1])", "batch_size", "--batch-size"),
        (
            "gradient_accumulation_steps=64 // world",
            "gradient_accumulation_steps",
            "--gradient-acc",
        ),
        ("max_length=pick(tokenizer)", "seq_len", "--seq-len"),
    ],
)
def test_what_is_computed_is_asked_of_the_user(
    tmp_path: Path, line: str, setting: str, replaced: str
) -> None:
    text = f"""model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
args = SFTConfig("out", {line})
"""
    read = imported(tmp_path, text)
    assert list(read.refused) == [setting]
    assert "train.py:2: " in read.refused[setting]
    assert replaced in read.refused[setting]


def test_options_of_a_user_replace_what_is_computed(tmp_path: Path) -> None:
    path = script(tmp_path, CLASSIFIER.replace("size=32", "size=int(sys.argv[1])"))
    command = ["estimate", "--from", str(path), "--gpu", "4090"]
    refused = CliRunner().invoke(main, command)
    assert refused.exit_code == 2
    assert "is computed, which is not read; pass --batch-size" in refused.stderr
    answered = CliRunner().invoke(main, [*command, "--batch-size", "16", "--json"])
    (prediction,) = json.loads(answered.stdout)["predictions"]
    assert prediction["config"]["batch_size"] == 16


@pytest.mark.parametrize(("switch", "quant"), [("", "none"), ("--q_lora True", "nf4")])
def test_a_branch_that_is_not_taken_is_left_out(tmp_path: Path, switch: str, quant: str) -> None:
    text = f"""
parser.add_argument("--q_lora", default=False)
parser.add_argument("--full", default=True)
bnb = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4") if args.q_lora else None
model = AutoModelForCausalLM.from_pretrained("{MODEL}", quantization_config=bnb)
if not args.full:
    config = LoraConfig(r=2)
else:
    config = LoraConfig(r=3)
tokenizer(text, truncation=True, max_length=10)
tokenizer(text, truncation=True, max_length=20)
"""
    script(tmp_path, text)
    read = import_files([script(tmp_path, f"python train.py {switch}", "run.sh")])
    assert read.settings.get("quant", "nf4" if switch else "none") == quant
    assert read.settings["r"] == 3
    assert read.settings["seq_len"] == 20
    assert any("given several times" in note for note in read.assumed)


def of_peft(config: str) -> str:
    text = QLORA.replace("peft_config = LoraConfig(", f"model = get_peft_model(model, {config}(")
    return text.replace('target_modules=["q_proj"])', 'target_modules=["q_proj"]))')


def test_another_config_of_peft_is_read_by_its_method(tmp_path: Path) -> None:
    read = imported(tmp_path, of_peft("VeraConfig"))
    assert (read.settings["method"], read.settings["quant"]) == ("vera", "nf4")
    assert (read.settings["r"], read.settings["target_modules"]) == (64, ("q_proj",))
    read = imported(tmp_path, of_peft("VeraConfig").replace("r=64, ", ""))
    assert read.settings["r"] == 256


def test_adapters_of_another_kind_are_refused(tmp_path: Path) -> None:
    assert "method" in imported(tmp_path, of_peft("OwnConfig")).refused


def test_another_config_of_quantisation_is_asked_of_the_user(tmp_path: Path) -> None:
    lines = (
        "from transformers import AutoModelForCausalLM, GPTQConfig, Trainer, TrainingArguments",
        "from peft import LoraConfig, get_peft_model",
        "how = GPTQConfig(bits=4)",
        'model = AutoModelForCausalLM.from_pretrained("m/m", quantization_config=how)',
        "model = get_peft_model(model, LoraConfig(r=8))",
        'Trainer(model, TrainingArguments("out")).train()',
    )
    found = imported(tmp_path, "\n".join(lines))
    assert "is no BitsAndBytesConfig that the script makes; pass --quant" in found.refused["quant"]
    found = imported(tmp_path, "\n".join(lines).replace("GPTQConfig(bits=4)", "None"))
    assert (found.refused, found.settings["method"]) == ({}, "lora")
    assert found.without_effect == ()


def test_a_computed_rank_of_another_config_is_asked(tmp_path: Path) -> None:
    text = of_peft("LoHaConfig").replace("r=64", "r=rank_of(model)")
    assert "method" in imported(tmp_path, text).refused


def test_arguments_that_a_script_makes_of_others_are_unknown(tmp_path: Path) -> None:
    text = 'AutoModel.from_pretrained("Qwen/Qwen2.5-0.5B")\nTrainingArguments("x", **options())\n'
    assert imported(tmp_path, text).unknown == ("**",)


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ("2 * 4", 8),
        ("SIZE", 2),
        ("-1 if False else 3", 3),
        ("(4)", 4),
        ("6 if SIZE == 2 else 7", 6),
        ("6 if None is not None else 7", 7),
        ("6 if os.name == 'nt' else 7", None),
        ("f'{SIZE}'", None),
        ("SEVERAL", None),
        ("os.environ['X']", None),
        ("9 ** 9", None),
    ],
)
def test_expressions(tmp_path: Path, value: str, read: Any) -> None:
    text = f"""SIZE = 2
SEVERAL = 1
SEVERAL = 3
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
TrainingArguments("x", per_device_train_batch_size={value})
"""
    found = imported(tmp_path, text)
    if read is None:
        assert "batch_size" in found.refused
    else:
        assert found.settings["batch_size"] == read


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("a.py", "from trl import SFTTrainer\n", "loads no model with from_pretrained"),
        ("a.py", "def f(:\n", "a.py:1: is no Python that can be read"),
        ("a.py", "x = " + "(" * 5000, "is no Python that can be read"),
        ("a.py", "x = " + "-" * 90000 + "1\n", "can't|can be read|too deeply"),
        ("a.ipynb", '{"cells": []}', "loads no model with from_pretrained"),
        ("a.ipynb", "[]", "is no notebook that can be read"),
        ("a.ipynb", '{"cells": [1]}', "is no notebook that can be read"),
    ],
)
def test_a_fault_is_one_line(tmp_path: Path, name: str, text: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault) as error:
        import_files([script(tmp_path, text, name)])
    assert "\n" not in str(error.value)


def test_nothing_of_a_script_is_run(tmp_path: Path) -> None:
    made = tmp_path / "made"
    imported(tmp_path, f"open({str(made)!r}, 'w')\n{CLASSIFIER}")
    assert not made.exists()


def test_dict_with_keywords_is_read_like_a_literal(tmp_path: Path) -> None:
    text = f"""trainer = SFTTrainer(
    model="{MODEL}",
    args=SFTConfig(
        "x", model_init_kwargs=dict(torch_dtype="auto", attn_implementation="flash_attention_2")
    ),
)
"""
    read = imported(tmp_path, text)
    assert read.settings["attn"] == "flash_attention_2"
    assert not any("is computed" in line for line in read.assumed)


def test_the_threshold_of_int8_is_read(tmp_path: Path) -> None:
    text = f"""bnb = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
model = AutoModelForCausalLM.from_pretrained("{MODEL}", quantization_config=bnb)
Trainer(model=model, args=TrainingArguments("x"))
"""
    read = imported(tmp_path, text)
    assert read.settings["llm_int8_threshold"] == 0.0
    assert not any("llm_int8" in name for name in read.without_effect)
    four = imported(tmp_path, text.replace("load_in_8bit", "load_in_4bit"))
    assert "llm_int8_threshold" not in four.settings


OLD_TRL = """
from trl import SFTConfig, SFTTrainer
model = AutoModelForCausalLM.from_pretrained(
    "meta-llama/Llama-3.1-8B", torch_dtype=torch.bfloat16,
    quantization_config=BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    ),
)
args = SFTConfig(per_device_train_batch_size=2, max_seq_length=2048)
trainer = SFTTrainer(model=model, args=args, peft_config=LoraConfig(target_modules="all-linear"))
"""


def test_a_script_is_judged_as_the_trainer_of_its_release(tmp_path: Path) -> None:
    path = script(tmp_path, OLD_TRL.replace("=2048", "=2048, bf16=True"))
    for version in ("0.12.1", "0.21.0", "0.26.2", "1.16.0"):
        asked = {"gpu": "l4-24gb", "libraries": {"trl": version}}
        (of_file,) = estimate(from_file=path, **asked)
        options = {"trainer": "sft", "method": "qlora", "batch_size": 2, "r": 8, "lora_alpha": 8}
        (stated,) = estimate("meta-llama/Llama-3.1-8B", **options, **asked)
        ours, theirs = of_file.run.to_dict(), stated.run.to_dict()
        assert ours == theirs | {"optimizer": ours["optimizer"]}
    with pytest.raises(ConfigError, match=r"TRL 1\.10\.0 computes the loss in chunks"):
        estimate(from_file=path, gpu="l4-24gb", libraries={"trl": "1.10.0"})


def test_a_script_before_0_19_has_no_autocast_that_it_does_not_ask_for(tmp_path: Path) -> None:
    path = script(tmp_path, OLD_TRL)
    precisions = {
        version: estimate(gpu="l4-24gb", from_file=path, libraries={"trl": version})[
            0
        ].run.precision
        for version in ("0.18.2", "0.19.1")
    }
    assert precisions == {"0.18.2": "bf16-pure", "0.19.1": "bf16"}


def test_who_prepares_the_base_of_a_script(tmp_path: Path) -> None:
    def prepared(text: str) -> object:
        return imported(tmp_path, text).settings.get("prepare_kbit", "the trainer")

    by_script = "model = prepare_model_for_kbit_training(model)\n"
    adapted = "model = get_peft_model(model, LoraConfig(r=8))\n"
    assert prepared(OLD_TRL) == "the trainer"
    assert prepared(OLD_TRL + by_script) is True
    assert prepared(OLD_TRL.replace("peft_config=", "peft_config_=") + adapted) is False


ENCODER = """
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer
tokenizer = AutoTokenizer.from_pretrained("bert-base-uncased")
model = AutoModelForSequenceClassification.from_pretrained("bert-base-uncased")
rows = data.map(lambda row: tokenizer(row["text"], padding="max_length", truncation=True))
Trainer(model=model, args=TrainingArguments(per_device_train_batch_size=16)).train()
"""


@pytest.mark.parametrize(
    ("found", "given", "seq_len"),
    [
        ("", "", 512),  # the course's line: padded to all positions
        ("bert-base-uncased", "answerdotai/ModernBERT-base", 8192),
        (', padding="max_length"', "", None),
        ("truncation=True", "truncation=True, max_length=128", 128),
        ("rows =", "tokenizer.model_max_length = 256\nrows =", 256),
        ('Tokenizer.from_pretrained("', 'Tokenizer.from_pretrained(model_max_length=384, n="', 384),
    ],
)
def test_how_a_tokenizer_cuts_and_pads(
    found: str, given: str, seq_len: int | None, tmp_path: Path
) -> None:
    read = imported(tmp_path, ENCODER.replace(found, given) if found else ENCODER)
    assert read.settings.get("seq_len") == seq_len
    assert not any(name.startswith("tokenizer.") for name in read.unknown)
    path = script(tmp_path, ENCODER.replace(found, given) if found else ENCODER)
    (prediction,) = estimate(gpu="rtx-4090-24gb", from_file=path)
    assert prediction.run.seq_len == (seq_len or 512)
    said = "does not say how long rows are; assumed: 2048 tokens, or as many as the model looks up"
    assert any(said in note for note in prediction.notes) is (seq_len is None)


def test_rows_of_trl_are_cut_to_its_own_length(tmp_path: Path) -> None:
    read = imported(tmp_path, QUICKSTART.replace(", max_length=1024", ""))
    assert read.settings["seq_len"] == 1024
    assert any("max_length: is missing; assumed: 1024, to which TRL" in t for t in read.assumed)


@pytest.mark.parametrize(
    ("stated", "release", "seq_len"),
    [
        ("max_length=None", "1.16", None),
        ("max_seq_length=None", "0.15.2", None),
        ("max_seq_length=None", "0.14.0", 1024),
        ("max_seq_length=None", "0.19.0", 1024),
        ("max_length=None", "0.19.0", None),
    ],
)
def test_none_switches_the_cutting_of_rows_off(
    stated: str, release: str, seq_len: int | None, tmp_path: Path
) -> None:
    path = script(tmp_path, QUICKSTART.replace("max_length=1024", stated))
    lines = f"model_name_or_path: {MODEL}\nuse_peft: true\n"
    settings = tmp_path / "trl.yaml"
    settings.write_text(lines + stated.replace("=None", ": null"))
    for source in (path, settings):
        (prediction,) = estimate(gpu="l4-24gb", from_file=source, libraries={"trl": release})
        assert prediction.run.seq_len == (seq_len or 2048)
        said = [note for note in prediction.notes if "does not say how long rows are" in note]
        assert len(said) == (seq_len is None)
        assert not any("max_length: is missing" in note for note in prediction.notes)
        assert not any("step: max_" in note for note in prediction.notes)  # without effect


def test_a_model_of_several_names_is_refused_with_them(tmp_path: Path) -> None:
    text = QUICKSTART.replace('model="Qwen/Qwen3-0.6B"', "model=load(name)")
    several = 'name = "Qwen/Qwen3-0.6B"\nmodel = AutoModel.from_pretrained(name)\nname = "mine"\n'
    path = script(tmp_path, several + text)
    said = (
        r"from_pretrained.model: `name` is set to 'Qwen/Qwen3-0.6B', 'mine'; name the model before"
    )
    with pytest.raises(ConfigError, match=said):
        estimate(gpu="l4-24gb", from_file=path)
    (prediction,) = estimate("Qwen/Qwen3-0.6B", "l4-24gb", from_file=path)
    assert prediction.run.model == "Qwen/Qwen3-0.6B"


def test_the_older_name_of_ligers_switch(tmp_path: Path) -> None:
    read = imported(tmp_path, QUICKSTART.replace("max_length=1024", "use_liger=True"))
    assert read.settings["trainer_options"] == (("use_liger_kernel", True),)
    assert "use_liger" not in read.unknown


def test_an_evaluation_that_takes_more_than_training_decides(tmp_path: Path) -> None:
    evaluates = 'max_length=1024, bf16=True, eval_strategy="steps"'
    text = QUICKSTART.replace(
        "train_batch_size=4, max_length=1024", f"train_batch_size=1, {evaluates}"
    )
    text = text.replace("per_device_train", "per_device_eval_batch_size=256, per_device_train")
    text = text.replace("SFTTrainer(", "SFTTrainer(peft_config=LoraConfig(r=8),")
    path = script(tmp_path, text)
    (large,) = estimate(gpu="rtx-4090-24gb", from_file=path)
    (small,) = estimate(gpu="8GiB", from_file=path)
    assert (large.verdict, small.verdict) == ("fits", "fails")
    assert small.memory.device_used_bytes < 8 * 2**30
    assert (large.fits, small.fits, small.to_dict()["fits"]) == (True, False, False)
    assert small.evaluation is not None
    needs = small.evaluation.device_used_bytes
    assert needs > 8 * 2**30
    assert f": {format_bytes(needs)} (" in headline(small)
    assert headline(small).endswith("of 8.00 GiB in evaluations of 256 rows, does not fit")
    assert small.to_dict()["evaluation"]["device_used_bytes"] == needs
    for prediction in (large, small):
        assert any(
            note.startswith("evaluation decides: 256 rows at once take")
            for note in prediction.notes
        )
    path = script(tmp_path, text.replace("eval_batch_size=256", "eval_batch_size=1"))
    (even,) = estimate(gpu="8GiB", from_file=path)
    assert even.verdict == "fits"
    assert not any("evaluation decides" in note for note in even.notes)
    assert "evaluation" not in even.to_dict()


@pytest.mark.parametrize(
    ("parts", "targets", "refused"),
    [
        ("", ("all-linear",), ""),
        ("finetune_mlp_modules=False", ("attention",), ""),
        ("finetune_attention_modules=False", ("gate_proj", "up_proj", "down_proj"), ""),
        ("finetune_language_layers=False", (), "of the tower alone"),
        ("finetune_attention_modules=False, finetune_mlp_modules=False", (), "adapts nothing"),
    ],
)
def test_the_parts_that_unsloth_s_fast_model_adapts(
    tmp_path: Path, parts: str, targets: tuple[str, ...], refused: str
) -> None:
    text = UNSLOTH.replace("FastLanguageModel", "FastModel").replace(
        'target_modules = ["q_proj", "v_proj"]', f"finetune_vision_layers=False, {parts}"
    )
    read = imported(tmp_path, text.replace(", ,", ","))
    assert refused or read.settings["target_modules"] == targets
    assert refused in read.refused.get("target_modules", "")
    assert not read.unknown


def test_targets_that_unsloth_trains_whole(tmp_path: Path) -> None:
    text = UNSLOTH.replace('"v_proj"]', '"v_proj", "embed_tokens", "lm_head"]')
    assert imported(tmp_path, text).settings["trainer"] == "sft"  # whose weights are tied
    text = text.replace("Qwen2.5-0.5B", "Qwen2.5-7B").replace(
        "SFTConfig(", "UnslothTrainingArguments("
    )
    read = imported(
        tmp_path, text.replace("max_steps", "embedding_learning_rate = 5e-6, max_steps")
    )
    assert read.settings["target_modules"] == ("q_proj", "v_proj")
    assert read.settings["modules_to_save"] == ("embed_tokens", "lm_head")
    assert read.settings["trainer"] == "unsloth"
    assert ("embedding_learning_rate", 5e-6) in read.settings["trainer_options"]


@pytest.mark.parametrize(
    ("placed", "parallel", "said"),
    [
        ('{"": 0}', "ddp", "puts the model on GPU 0 alone, and leaves the others idle"),
        ('{"": PartialState().process_index}', "ddp", ""),
        ('"auto"', "device-map", ""),
        ('{"model.layers.0": 0, "lm_head": 1}', "device-map", "places parts by name"),
    ],
)
def test_a_device_map_decides_for_several_gpus(
    placed: str, parallel: str, said: str, tmp_path: Path
) -> None:
    text = f"""model = AutoModelForCausalLM.from_pretrained("{MODEL}", device_map={placed})
Trainer(model=model, args=TrainingArguments("x"))
"""
    read = import_files([script(tmp_path, text)], gpus=2)
    assert read.settings["parallel"] == parallel
    assert any(said in line for line in read.assumed)
    assert bool(said) == any("from_pretrained.device_map" in line for line in read.assumed)


def test_keys_without_effect_are_told_where_there_are_some(tmp_path: Path) -> None:
    trains = f'model = AutoModelForCausalLM.from_pretrained("{MODEL}")\nSFTTrainer(model{{}})'
    assert imported(tmp_path, trains.format("")).notes[-1].endswith(": read as python")
    told = imported(tmp_path, trains.format(', args=SFTConfig("o", logging_steps=1)')).notes[-1]
    assert told.endswith("read as python; 1 key without effect on memory and time of a step")


def test_a_notebook_that_writes_llamafactorys_file_is_that_file(tmp_path: Path) -> None:
    """The form of LLaMA-Factory's own notebook for Colab: args of a training, a chat, an export."""
    training = f"""import json
args = dict(
  stage="sft", do_train=True, model_name_or_path="{MODEL}", finetuning_type="lora",
  lora_target="all", per_device_train_batch_size=2, cutoff_len=1024, fp16=True,
)
json.dump(args, open("train.json", "w", encoding="utf-8"), indent=2)
!llamafactory-cli train train.json
"""
    chat = f"""from llamafactory.chat import ChatModel
args = dict(model_name_or_path="{MODEL}", adapter_name_or_path="lora", quantization_bit=4)
chat_model = ChatModel(args)
json.dump(args, open("merge.json", "w", encoding="utf-8"), indent=2)
"""
    cells = [{"cell_type": "code", "source": [text]} for text in (chat, training)]
    read = import_files([script(tmp_path, json.dumps({"cells": cells}), "train.ipynb")])
    assert read.tool == "llamafactory"
    assert {"seq_len": 1024, "batch_size": 2, "method": "lora", "precision": "fp16"}.items() <= (
        read.settings.items()
    )
    plain = script(tmp_path, f'run_exp({{"model_name_or_path": "{MODEL}", "stage": "pt"}})')
    assert import_files([plain]).tool == "llamafactory"
    with pytest.raises(ConfigError, match=r"loads no model with from_pretrained"):
        import_files([script(tmp_path, 'import json\njson.dump(3, open("x", "w"))')])
