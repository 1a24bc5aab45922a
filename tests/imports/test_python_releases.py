"""Scripts of older releases, and what is predicted of them."""

from pathlib import Path

import pytest

from whichlora import estimate
from whichlora.imports import Imported, import_files
from whichlora.spec.releases import installed_in
from whichlora.spec.versions import Libraries
from whichlora.units import format_bytes

MODEL = "HuggingFaceTB/SmolLM2-135M"
LOADED = f'model = AutoModelForCausalLM.from_pretrained("{MODEL}")\n'


def imported(folder: Path, text: str, **options: object) -> Imported:
    path = folder / "train.py"
    path.write_text(LOADED + text)
    return import_files([path], **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "releases", "refused"),
    [
        (
            'SFTTrainer(model, args=TrainingArguments("o", warmup_ratio=0.1), max_seq_length=64, '
            'dataset_text_field="text", tokenizer=tokenizer)',
            (("transformers", "4.46.3"), ("trl", "0.12.2")),
            "trl 1.16.0 refuses dataset_text_field, max_seq_length, tokenizer of SFTTrainer; "
            "transformers 5.23.0 refuses warmup_ratio of TrainingArguments",
        ),
        (
            'SFTTrainer(model, args=SFTConfig("o"), tokenizer=tokenizer)',
            (("transformers", "4.49.0"), ("trl", "0.15.2")),
            "trl 1.16.0 refuses tokenizer of SFTTrainer",
        ),
        (
            'SFTTrainer(model=model, args=SFTConfig("o", max_seq_length=64))',
            (("transformers", "4.53.1"), ("trl", "0.19.1")),
            "trl 1.16.0 refuses max_seq_length of SFTConfig",
        ),
        (
            'DPOTrainer(model=model, args=DPOConfig("o", evaluation_strategy="no"))',
            (("transformers", "4.46.3"), ("trl", "0.15.2")),
            "transformers 5.23.0 refuses evaluation_strategy of TrainingArguments",
        ),
        (
            'Trainer(model=model, args=TrainingArguments("o", warmup_ratio=0.1))',
            (("transformers", "5.4.0"),),
            "transformers 5.23.0 refuses warmup_ratio of TrainingArguments",
        ),
        (
            'Trainer(model=model, tokenizer=tokenizer, args=TrainingArguments("o"))',
            (("transformers", "4.57.6"),),
            "transformers 5.23.0 refuses tokenizer of Trainer",
        ),
        (
            'Seq2SeqTrainer(model=model, args=Seq2SeqTrainingArguments("o", push_to_hub_token=""))',
            (("transformers", "4.57.6"),),
            "transformers 5.23.0 refuses push_to_hub_token of TrainingArguments",
        ),
    ],
)
def test_arguments_that_were_dropped_ask_for_the_releases_that_took_them(
    call: str, releases: tuple[tuple[str, str], ...], refused: str, tmp_path: Path
) -> None:
    read = imported(tmp_path, call)
    assert read.settings["libraries"] == releases
    shown = ",".join(f"{name}={version}" for name, version in sorted(releases, reverse=True))
    assert f"{refused}; predicted as --libraries {shown}, which take it" in read.assumed
    assert not read.unknown
    stated = imported(tmp_path, call, libraries=Libraries())
    assert "libraries" not in stated.settings
    assert refused in stated.assumed


def test_a_script_of_today_is_read_as_of_today(tmp_path: Path) -> None:
    read = imported(tmp_path, 'SFTTrainer(model=model, processing_class=t, args=SFTConfig("o"))')
    assert "libraries" not in read.settings
    assert not any("refuses" in text for text in read.assumed)


def test_transformers_arguments_keep_their_own_defaults_under_trl(tmp_path: Path) -> None:
    """TRL makes `SFTConfig(**args.to_dict())`, whose values are stated."""
    plain = imported(tmp_path, 'SFTTrainer(model=model, args=TrainingArguments("o"))')
    ours = imported(tmp_path, 'SFTTrainer(model=model, args=SFTConfig("o"))')
    assert plain.settings["gradient_checkpointing"] is False
    assert plain.settings["precision"] == "bf16-pure"
    assert ours.settings["gradient_checkpointing"] is None
    assert ours.settings["precision"] == "bf16"
    said = "gradient_checkpointing: is off by default in TrainingArguments; SFTConfig turns it on"
    assert said in plain.assumed
    assert said not in ours.assumed
    parsed = "HfArgumentParser((ModelArguments, TrainingArguments)).parse()\n"
    read = imported(tmp_path, f"{parsed}SFTTrainer(model=model, args=args)")
    assert read.settings["gradient_checkpointing"] is False


@pytest.mark.parametrize(
    ("libraries", "text", "precision"),
    [
        ({"transformers": "4.50.0", "trl": "0.16.0"}, "", "fp32"),
        ({}, "", "bf16-pure"),
        ({"transformers": "4.50.0"}, ", load_in_4bit=True", "fp16-pure"),
    ],
)
def test_a_missing_dtype_is_that_of_the_release(
    libraries: dict[str, str], text: str, precision: str, tmp_path: Path
) -> None:
    """Source: transformers 4.57 `from_pretrained`, and `update_dtype` of its bitsandbytes."""
    path = tmp_path / "train.py"
    loaded = LOADED.replace('")', f'"{text})')
    path.write_text(f'{loaded}Trainer(model=model, args=TrainingArguments("o"))')
    read = import_files([path], libraries=Libraries(**libraries))
    assert read.settings["precision"] == precision


def test_libraries_of_the_command_reach_the_file(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(f'{LOADED}Trainer(model=model, args=TrainingArguments("o"))')
    (now,) = estimate(from_file=path, gpu="24GB")
    (old,) = estimate(from_file=path, gpu="24GB", libraries={"transformers": "4.50.0"})
    assert now.run.precision == "bf16-pure"
    assert old.run.precision == "fp32"


def test_a_name_that_trl_is_given_is_wide_in_every_release(tmp_path: Path) -> None:
    """Source: TRL `create_model_from_path`, which tells transformers nothing before 0.27."""
    path = tmp_path / "train.py"
    path.write_text(f'SFTTrainer(model="{MODEL}", args=SFTConfig("o", bf16=False))')
    widths = {
        release: import_files([path], libraries=Libraries(trl=release)).settings["precision"]
        for release in ("0.26.0", "0.27.0")
    }
    assert widths == {"0.26.0": "fp32", "0.27.0": "fp32"}


@pytest.mark.parametrize(
    ("call", "oldest"),
    [
        ("SFTTrainer(model, max_seq_length=64)", "2024-05"),  # the first TRL that was read
        ('DPOTrainer(model, args=DPOConfig("o", max_prompt_length=9))', "2024-07"),
        ('GRPOTrainer(model, args=GRPOConfig("o", max_prompt_length=9))', "2025-02"),
        (
            'GRPOTrainer(model, args=GRPOConfig("o", max_prompt_length=9, vllm_mode="server"))',
            "2025-06",
        ),
        ('Trainer(model, args=TrainingArguments("o", warmup_ratio=0.1))', "2023-08"),
        (
            'Trainer(model, args=TrainingArguments("o", no_cuda=True, eval_strategy="no"))',
            "2024-06",
        ),
        ('SFTTrainer(model=model, args=SFTConfig("o"))', ""),  # of today
    ],
)
def test_a_script_of_older_releases_says_from_which_month_they_take_it(
    call: str, oldest: str, tmp_path: Path
) -> None:
    assert imported(tmp_path, call).oldest == oldest
    assert imported(tmp_path, call, libraries=Libraries()).oldest == ""


def test_another_answer_of_the_oldest_releases_is_told(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    steps = 'args = TrainingArguments("o", per_device_train_batch_size=4)\n'
    steps += "SFTTrainer(model, args=args, max_seq_length=1024, peft_config=LoraConfig())"
    path.write_text(LOADED.replace('")', '", load_in_4bit=True)') + steps)
    (told,) = estimate(from_file=path, gpu="24GB")
    (note,) = [note for note in told.notes if "older releases take it, too" in note]
    (old,) = estimate(from_file=path, gpu="24GB", libraries=installed_in("2024-05"))
    assert old.memory.device_used_bytes > 1.05 * told.memory.device_used_bytes
    assert f"(--libraries 2024-05) {format_bytes(old.memory.device_used_bytes)}, which" in note
    assert not any("older releases" in note for note in old.notes)
