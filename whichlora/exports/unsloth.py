"""A script for Unsloth 2026.10; it takes no configuration file."""

from __future__ import annotations

import json
from dataclasses import replace

from whichlora.errors import ConfigError
from whichlora.exports.recipe import DATA_FILE, Export, Recipe, padding_note, require_plain, without
from whichlora.methods import get_method
from whichlora.specs import FP32_PRECISIONS, RunConfig

FILE = "train_unsloth.py"
_UNKNOWN = ("bias", "adapter_dtype", "base_dtype", "loraplus_lr_ratio", "expandable_segments")
_QUANTS = frozenset({"none", "int8", "nf4-dq"})
_SCRIPT = '''\
"""Fine-tune {model} with {method} under Unsloth.

Written by WhichLoRA; edit it as you like.
"""

from unsloth import FastLanguageModel  # first: it patches what is imported after it

import torch
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

model, tokenizer = FastLanguageModel.from_pretrained(
    model_name={model_literal},
    max_seq_length={seq_len},
    dtype=torch.{dtype},
    load_in_4bit={four_bit},
    load_in_8bit={eight_bit},
    full_finetuning={full},
)
{adapter}
trainer = SFTTrainer(
    model=model,
    processing_class=tokenizer,
    train_dataset=load_dataset("json", data_files="{data}", split="train"),
    args=SFTConfig(
        output_dir="output-unsloth",
        dataset_text_field="text",
        max_length={seq_len},
        packing=False,
        per_device_train_batch_size={batch_size},
        gradient_accumulation_steps={accumulation},
        num_train_epochs={epochs},
        learning_rate={learning_rate},
        optim="{optim}",
        bf16={bf16},
        fp16={fp16},
        seed={seed},
        save_strategy="no",
        report_to="none",
    ),
)
trainer.train()
model.save_pretrained("output-unsloth")
tokenizer.save_pretrained("output-unsloth")
'''
_ADAPTER = """\
model = FastLanguageModel.get_peft_model(
    model,
    r={r},
    lora_alpha={lora_alpha},
    lora_dropout={lora_dropout},
    target_modules={targets},
    use_dora={use_dora},
{use_rslora}    modules_to_save={modules_to_save},
    bias="none",
    use_gradient_checkpointing={checkpointing},
    random_state={seed},
)
"""


def export(recipe: Recipe) -> Export:
    """A script; checkpointing is PyTorch's own, not the one that moves activations to the host.

    Raises:
        ConfigError: what Unsloth can't do.
    """
    require_plain(recipe, "unsloth", quants=_QUANTS)
    run, left_out = without(recipe.run, "Unsloth", *_UNKNOWN)
    run, notes = under_unsloth(run)
    notes += left_out
    notes += padding_note(recipe)
    quant = run.quant or "none"
    settings = get_method(run.method).peft_config(run)
    adapter = ""
    if settings is not None:
        targets = recipe.target_modules
        adapter = _ADAPTER.format(
            r=run.r,
            lora_alpha=run.lora_alpha,
            lora_dropout=run.lora_dropout,
            targets=json.dumps(targets if isinstance(targets, str) else list(targets)),
            use_rslora="    use_rslora=True,\n" if run.use_rslora else "",
            use_dora=bool(settings.get("use_dora")),
            modules_to_save=list(run.modules_to_save) or None,
            checkpointing=run.gradient_checkpointing,
            seed=recipe.seed,
        )
    script = _SCRIPT.format(
        model=run.model,
        model_literal=json.dumps(run.model),
        method=run.method,
        seq_len=run.seq_len,
        dtype=run.weight_dtype,
        four_bit=quant == "nf4-dq",
        eight_bit=quant == "int8",
        full=settings is None,
        adapter=adapter,
        data=DATA_FILE,
        batch_size=run.batch_size,
        accumulation=run.gradient_accumulation_steps,
        epochs=recipe.epochs,
        learning_rate=recipe.learning_rate,
        optim=run.trainer_optim,
        bf16=run.precision == "bf16",
        fp16=run.precision == "fp16",
        seed=recipe.seed,
    )
    return Export(files={FILE: script}, command=f"python {FILE}", run=run, notes=notes)


def under_unsloth(run: RunConfig) -> tuple[RunConfig, tuple[str, ...]]:
    """`run` with Unsloth's loss; it never casts a 4-bit base.

    Raises:
        ConfigError: fp32 weights, which its kernels don't take.
    """
    if run.precision in FP32_PRECISIONS:
        raise ConfigError("--to unsloth: its kernels are 16-bit; set precision bf16 or fp16")
    notes = ["of Unsloth's kernels only the loss is modelled; the others keep less"]
    precision = run.precision
    if precision in ("bf16-pure", "bf16-no-autocast"):
        precision = "bf16"
        notes.append(f"Unsloth has no {run.precision}: it runs under bf16 autocast")
    changed = replace(run, loss_head="unsloth", prepare_kbit=False, precision=precision)
    return changed, tuple(notes)
