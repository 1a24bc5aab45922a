"""Small real trainings as a user would write them, with the callback added and nothing else."""

from __future__ import annotations

import io
import os
import tempfile
import warnings
from collections.abc import Callable
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from oracle_memory import CONFIGS
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    Trainer,
    TrainingArguments,
)

from whichlora.integrations import WhichLoRACallback

NUM_STEPS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training.

    Args:
        dtype: of the weights that are loaded.
        load: fields of BitsAndBytesConfig; empty for weights as they are.
        config: fields of the model's config; empty for the small one of `family`.
        adapter: fields of LoraConfig; None trains all weights.
        peft: other arguments of get_peft_model.
        fixed: rows of one length, instead of different ones that a collator pads.
        args: fields of TrainingArguments.
    """

    name: str
    family: str = "llama"
    config: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    load: dict[str, Any] = field(default_factory=dict)
    prepare: bool = True
    adapter: dict[str, Any] | None = field(default_factory=lambda: {"r": 8})
    peft: dict[str, Any] = field(default_factory=dict)
    fixed: bool = True
    seq_len: int = 64
    args: dict[str, Any] = field(default_factory=dict)


NF4 = {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": torch.float32,
}
BF16 = torch.bfloat16
CHECKPOINTING = {"activation_checkpointing": True}
CASES = (
    Case(name="lora fp32"),
    Case(name="lora fp32, checkpointing", family="qwen2", args=CHECKPOINTING),
    Case(name="lora fp32, rows of many lengths", fixed=False, args={"optim": "adamw_torch"}),
    Case(
        name="lora fp32, dropout, 2 micro-steps",
        family="gpt2",
        adapter={"r": 4, "lora_dropout": 0.1},
        args={"gradient_accumulation_steps": 2},
    ),
    Case(
        name="lora on attention, adafactor",
        family="mistral",
        adapter={"r": 16, "target_modules": ["q_proj", "v_proj"]},
        args={"optim": "adafactor"},
    ),
    Case(name="lora bf16 autocast", family="qwen3", dtype=BF16, args={"bf16": True}),
    Case(name="lora bf16, no autocast", dtype=BF16),
    Case(
        name="bf16 adapters under autocast",
        dtype=BF16,
        peft={"autocast_adapter_dtype": False},
        args={"bf16": True},
    ),
    Case(name="dora fp32", family="gpt_neox", adapter={"r": 8, "use_dora": True}),
    Case(name="full fp32, sgd", family="qwen2", adapter=None, args={"optim": "sgd"}),
    Case(name="full bf16", adapter=None, dtype=BF16),
    Case(name="full fp32 under bf16 autocast", adapter=None, args={"bf16": True}),
    Case(name="lora on fp32 under bf16 autocast", args={"bf16": True}),
    Case(name="lora fp32 and the head", adapter={"r": 8, "modules_to_save": ["lm_head"]}),
    Case(
        name="lora bf16 autocast and both embeddings",
        dtype=BF16,
        adapter={"r": 8, "modules_to_save": ["embed_tokens", "lm_head"]},
        args={"bf16": True},
    ),
    Case(name="qlora fp32", load=NF4),
    Case(name="qlora fp32, checkpointing", load=NF4, args=CHECKPOINTING),
    Case(
        name="qlora bf16 autocast",
        dtype=BF16,
        load=NF4 | {"bnb_4bit_compute_dtype": BF16},
        args={"bf16": True},
    ),
    Case(name="qdora fp32, unprepared", load=NF4, prepare=False, adapter={"use_dora": True}),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What the callback predicted, measured and said."""

    callback: WhichLoRACallback
    lines: list[str]

    @property
    def memory(self) -> tuple[int, int]:
        """Peak of live tensors, predicted before step 1 and measured."""
        forecast, measurement = self.callback.forecast, self.callback.measurement
        assert forecast is not None, self.lines
        assert measurement is not None
        measured = measurement.peak_allocated_bytes
        assert measured is not None
        return forecast.prediction.memory.peak_allocated_bytes, measured

    @property
    def time(self) -> tuple[float, float]:
        """Seconds of the timed steps, predicted and measured."""
        forecast, measurement = self.callback.forecast, self.callback.measurement
        assert forecast is not None
        assert measurement is not None
        predicted = sum(forecast.step_s(width) for width in measurement.batch_seq_len)
        return predicted, sum(measurement.step_s)


def train(
    case: Case,
    *,
    change: Callable[[Any], Any] | None = None,
    dataset: Any = None,
    collator: Any = None,
    **callback_options: Any,
) -> Trained:
    """Run `case` under the real Trainer; `change` gets the model before it is handed over."""
    lines: list[str] = []
    callback = WhichLoRACallback(say=lines.append, **callback_options)
    with tempfile.TemporaryDirectory() as folder, quiet():
        model = load(case, Path(folder) / "model")
        if change is not None:
            model = change(model) or model
        trainer = Trainer(
            model=model,
            args=arguments(case, folder),
            train_dataset=rows(case) if dataset is None else dataset,
            data_collator=collator or pad,
            callbacks=[callback],
        )
        trainer.train()
    return Trained(callback=callback, lines=lines)


def load(case: Case, folder: Path) -> Any:
    """The model as a user's script makes it."""
    torch.manual_seed(0)
    fields = {"model_type": case.family} | (case.config or CONFIGS[case.family])
    config = AutoConfig.for_model(**fields)
    model = AutoModelForCausalLM.from_config(config, dtype=case.dtype)
    if case.load:
        model.save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=case.dtype,
            quantization_config=BitsAndBytesConfig(**case.load),
        )
        if case.prepare:
            model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    if case.adapter is None:
        return model
    settings = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"} | case.adapter
    return get_peft_model(model, LoraConfig(**settings), **case.peft)


def arguments(case: Case, folder: str) -> TrainingArguments:
    options: dict[str, Any] = {
        "output_dir": folder,
        "per_device_train_batch_size": 2,
        "max_steps": NUM_STEPS,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 2,
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
        "remove_unused_columns": False,
    }
    return TrainingArguments(**(options | case.args))


def rows(case: Case) -> list[dict[str, Any]]:
    """Rows of one length, or of many; the longest is in the step that is measured, the second."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for number in range(24):
        length = case.seq_len
        if not case.fixed and number != 2:
            length = 8 + (number * 11) % (case.seq_len // 2)
        ids = torch.randint(3, 2048, (length,), generator=generator)
        made.append({"input_ids": ids})
    return made


def pad(batch: list[dict[str, Any]]) -> dict[str, Any]:
    """What a padding collator makes of a batch."""
    ids = [row["input_ids"] for row in batch]
    mask = [torch.ones_like(row) for row in ids]
    stack = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": stack(ids, batch_first=True),
        "attention_mask": stack(mask, batch_first=True),
        "labels": stack(ids, batch_first=True, padding_value=-100),
    }


@contextmanager
def quiet() -> Any:
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):  # the Trainer prints its logs
        warnings.simplefilter("ignore")
        yield
