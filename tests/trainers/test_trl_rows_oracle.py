"""Rows of answers, beside what TRL's own trainers make of them, and their `train.py` on CPU."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="pip install trl beside the profile extra")

from pkgutil import resolve_name

from datasets import Dataset
from oracle_tokenizer import byte_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from train_runs import run_module, run_script
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification
from transformers import PreTrainedTokenizerFast as FastTokenizer
from trl import GRPOConfig, GRPOTrainer
from written_job import train_script_of

from whichlora.dataset import count_tokens, data_format, open_dataset, workload, write_jsonl
from whichlora.spec.plan import DatasetConfig
from whichlora.spec.run import RunConfig
from whichlora.trainers import get_trainer
from whichlora.workflow.export import make_recipe, write_export

pytestmark = pytest.mark.oracle

LENGTH = 40
LLAMA = {
    "vocab_size": 400,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}> {{ message.content }}"
    "{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)
WORDS = [
    "the",
    "a",
    "model",
    "adapter",
    "learns",
    "rank",
    "of",
    "low",
    "matrix",
    "token",
    "ids",
    "<s>",
    "and",
    "pairs,",
    "better",
    "or",
    "worse!",
]


def some_text(rng: random.Random, most: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, most)))


def rows_of(kind: str, *, chat: bool, prompt: bool = True) -> list[dict[str, Any]]:
    """Rows of which some are cut, and some have a prompt that leaves no room."""
    rng = random.Random(f"{kind}{chat}{prompt}")
    rows = []
    for number in range(40):
        question = some_text(rng, 36) + " "
        answers = [some_text(rng, 16) for _ in range(2)]
        row: dict[str, Any] = {"prompt": question}
        if chat:
            row = {"prompt": [{"role": "user", "content": question}]}
            answers = [[{"role": "assistant", "content": answer}] for answer in answers]
        if kind == "labelled":
            row |= {"completion": answers[0], "label": number % 2 == 0}
        if kind == "pairs":
            row |= dict(zip(("chosen", "rejected"), answers, strict=True))
        if not prompt:
            start = row.pop("prompt")
            row = {name: start + answer for name, answer in row.items()}
        rows.append(row)
    return rows


@pytest.fixture(scope="module", params=["with BOS", "without"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that adds a BOS token by itself, as Llama's does, and one that does not."""
    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<pad>", "<s>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    fast.train_from_iterator(
        [" ".join(WORDS)] * 5,
        trainers.BpeTrainer(vocab_size=350, special_tokens=special, initial_alphabet=alphabet),
    )
    if request.param == "with BOS":
        pair = ("<s>", fast.token_to_id("<s>"))
        fast.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[pair])
    folder = tmp_path_factory.mktemp("tokenizer")
    names = dict(zip(("pad_token", "bos_token", "eos_token"), special, strict=True))
    loaded = FastTokenizer(tokenizer_object=fast, **names)
    loaded.chat_template = TEMPLATE
    loaded.save_pretrained(folder)
    return folder


def made_by_trl(name: str, rows: list[dict[str, Any]], tokenizer: Path, folder: Path) -> Any:
    """The trainer of TRL with `rows`, which it has made token ids of."""
    trainer = get_trainer(name)
    model_class = LlamaForSequenceClassification if trainer.task else LlamaForCausalLM
    args = resolve_name(trainer.config_class)(
        output_dir=str(folder), max_length=LENGTH, bf16=False, report_to="none", use_cpu=True
    )
    return resolve_name(trainer.library_class)(
        model=model_class(LlamaConfig(**LLAMA, num_labels=1)),
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=FastTokenizer.from_pretrained(tokenizer),
        **({"ref_model": LlamaForCausalLM(LlamaConfig(**LLAMA))} if name in ("dpo", "kto") else {}),
    )


def lengths_of(row: dict[str, Any]) -> list[int]:
    """Tokens of the sequences of a row, by whichever columns its trainer has made."""
    if "chosen_input_ids" in row:
        if not all(any(label != -100 for label in row[f"{side}_labels"]) for side in SIDES):
            return []  # `train.py` leaves it out
        return [len(row[f"{side}_input_ids"]) for side in SIDES]
    start = len(row.get("prompt_ids", ()))
    names = [f"{name}_ids" for name in (*SIDES, "completion") if f"{name}_ids" in row]
    return [min(start + len(row[name]), LENGTH) for name in names]


SIDES = ("chosen", "rejected")


@pytest.mark.parametrize("form", ["text", "chat", "implicit prompt"])
@pytest.mark.parametrize("name", ["dpo", "kto", "orpo", "cpo", "reward"])
def test_lengths_are_those_of_the_rows_that_trl_makes(
    name: str, form: str, tokenizer: Path, tmp_path: Path
) -> None:
    kind = get_trainer(name).rows
    if form == "implicit prompt" and kind == "labelled":
        pytest.skip("a labelled answer has its prompt")
    rows = rows_of(kind, chat=form == "chat", prompt=form != "implicit prompt")
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = open_dataset(DatasetConfig(path=str(file), validation_fraction=0), kind)
    counted = count_tokens(
        data,
        tokenizer=str(tokenizer),
        offline=True,
        max_length=LENGTH,
        run=RunConfig(model="tiny", trainer=name),
    )
    written = write_jsonl(data, tmp_path / "job")["train"]
    as_written = [json.loads(line) for line in written.read_text().splitlines()]
    tuned = made_by_trl(name, as_written, tokenizer, tmp_path / "out")
    made = [lengths for row in tuned.train_dataset if (lengths := lengths_of(row))]
    assert counted.num_truncated or name == "reward"
    assert counted.num_unlearned == len(rows) - len(made) > 0
    assert counted.lengths["train"] == tuple(map(max, made))
    assert counted.total_tokens() == sum(map(sum, made))


@pytest.mark.parametrize("form", ["text", "chat"])
@pytest.mark.parametrize("name", ["dpo", "kto", "orpo", "cpo", "reward"])
def test_the_written_job_trains_on_cpu(name: str, form: str, tmp_path: Path) -> None:
    kind = get_trainer(name).rows
    rows = rows_of(kind, chat=form == "chat")
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = open_dataset(DatasetConfig(path=str(file), validation_fraction=0.1), kind)
    run = RunConfig(
        model="tiny",
        trainer=name,
        method="lora" if form == "text" else "full",
        precision="fp32",
        seq_len=300 if form == "chat" else 120,
        batch_size=4,
        gradient_checkpointing=form == "chat",
    )
    write_jsonl(data, tmp_path)
    script = train_script_of(
        run,
        target_modules="all-linear",
        weights="random",
        model_config={"model_type": "llama", **LLAMA},
        data_format=data_format(data),
    )
    (tmp_path / "train.py").write_text(script)
    done = run_script(tmp_path / "train.py")
    assert done.returncode == 0, done.stderr[-2000:]
    counted = count_tokens(data, tokenizer="bytes", offline=True, max_length=run.seq_len, run=run)
    result = json.loads((tmp_path / "output" / "result.json").read_text())
    assert result["num_steps"] == -(-counted.num_sequences() // 4)
    assert result["validation_loss"] > 0
    left_out = f"{36 - counted.num_sequences()} of 36 rows are left out"
    assert (left_out in done.stderr) == (counted.num_sequences() < 36)


@pytest.mark.parametrize("name", ["dpo", "kto", "reward"])
def test_the_command_of_trl_trains_what_the_export_says(name: str, tmp_path: Path) -> None:
    trainer = get_trainer(name)
    loads = LlamaForSequenceClassification if trainer.task else LlamaForCausalLM
    loads(LlamaConfig(**LLAMA, num_labels=1, pad_token_id=0)).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    rows = rows_of(trainer.rows, chat=False)[:8]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = RunConfig(
        model=str(tmp_path / "model"),
        trainer=name,
        trainer_options=(("beta", 0.4),) if name != "reward" else (),
        precision="fp32",
        batch_size=2,
        seq_len=300,
        r=4,
    )
    made = write_export(make_recipe(run, "cpu", epochs=1.0), "trl", tmp_path)
    assert made.export.command == f"trl {name} --config trl.yaml"
    assert made.after.run == made.before.run  # predicted as it runs
    settings = ("--config", "trl.yaml", "--use_cpu", "true")
    done = run_module(f"trl.scripts.{name}", *settings, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    output = tmp_path / "output-trl"
    state = json.loads(next(output.glob("checkpoint-*/trainer_state.json")).read_text())
    assert state["max_steps"] == 4
    saved = json.loads((output / "adapter_config.json").read_text())
    assert (saved["r"], saved["task_type"]) == (4, "SEQ_CLS" if name == "reward" else "CAUSAL_LM")


REWARDS = """
import json


def answers_that_are_long(completions, number, **columns):
    return [len(json.dumps(each)) + of_row for each, of_row in zip(completions, number)]
"""


@pytest.mark.parametrize("form", ["text", "chat"])
def test_prompts_are_counted_and_learnt_from_as_trl_does(
    form: str, tokenizer: Path, tmp_path: Path
) -> None:
    rows = [
        {"prompt": row["prompt"], "number": number}
        for number, row in enumerate(rows_of("pairs", chat=form == "chat"))
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = open_dataset(DatasetConfig(path=str(file), validation_fraction=0), "prompts")
    options = {"num_generations": 2, "max_completion_length": 8, "num_iterations": 2}
    run = RunConfig(
        model="tiny",
        trainer="grpo",
        trainer_options=tuple(options.items()),
        precision="fp32",
        batch_size=4,
        gradient_accumulation_steps=2,
        seq_len=120 if form == "text" else 300,
    )
    counted = count_tokens(data, tokenizer=str(tokenizer), offline=True, max_length=LENGTH, run=run)
    tuned = GRPOTrainer(
        model=LlamaForCausalLM(LlamaConfig(**LLAMA)),
        args=GRPOConfig(
            output_dir=str(tmp_path / "out"), bf16=False, report_to="none", use_cpu=True
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=FastTokenizer.from_pretrained(tokenizer),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
    )
    prompts, *_ = tuned._tokenize_prompts([row["prompt"] for row in rows])
    kept = [len(ids) + 8 for ids in prompts if len(ids) + 8 <= LENGTH]
    assert 0 < len(kept) < len(rows)
    assert counted.lengths["train"] == tuple(kept)

    write_jsonl(data, tmp_path)
    (tmp_path / "rewards.py").write_text(REWARDS)
    script = train_script_of(
        run,
        target_modules="all-linear",
        weights="random",
        model_config={"model_type": "llama", **LLAMA},
        data_format=data_format(data),
    )
    (tmp_path / "train.py").write_text(script)
    done = run_script(tmp_path / "train.py")
    assert done.returncode == 0, done.stderr[-2000:]
    by_bytes = count_tokens(data, tokenizer="bytes", offline=True, max_length=run.seq_len, run=run)
    load = workload(
        by_bytes, batch_size=4, accumulation=2, repeats=get_trainer(run.trainer).repeats(run)
    )
    result = json.loads((tmp_path / "output" / "result.json").read_text())
    assert result["num_steps"] == load.num_steps
