"""Run → a stand-alone `train.py` that performs exactly the fine-tuning that was predicted."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import indent
from typing import Any, Literal

from whichlora.errors import ConfigError
from whichlora.methods import get_method, with_defaults
from whichlora.plan import Collator
from whichlora.python_source import Code, call, import_lines, literal
from whichlora.specs import FOUR_BIT_BNB, RunConfig

Weights = Literal["pretrained", "random"]

_IMPORTABLE = {
    "peft": ("LoraConfig", "get_peft_config", "get_peft_model", "prepare_model_for_kbit_training"),
    "peft.optimizers": ("create_loraplus_optimizer",),
    "tokenizers": ("Tokenizer", "decoders", "models", "pre_tokenizers"),
    "transformers": (
        "AutoConfig",
        "AutoModelForCausalLM",
        "AutoModelForMaskedLM",
        "AutoTokenizer",
        "BitsAndBytesConfig",
        "DataCollatorForLanguageModeling",
        "PreTrainedTokenizerFast",
        "Trainer",
        "TrainingArguments",
        "set_seed",
    ),
}
_HEAD = '''\
"""Fine-tune {model} with {method}.

Written by WhichLoRA for exactly the run it predicted; edit it as you like.
"""

import json
{os}{bisect}from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import torch
{imports}

HERE = Path(__file__).resolve().parent
{constants}


'''
_RANDOM_CHECKPOINT_LINES = ["if not MODEL.exists():", "    write_random_model()"]
_RANDOM_MODEL = '''\
def write_random_model():
    """A checkpoint with random weights, so that nothing is downloaded."""
    config = AutoConfig.for_model(**MODEL_CONFIG)
    model = {model_class}.from_config(config, dtype=torch.{dtype})
    model.save_pretrained(MODEL)


'''
_BYTE_TOKENIZER = '''\
def byte_tokenizer():
    """Each byte is a token, so that no tokenizer is downloaded."""
    symbols = ["<pad>", "</s>", "<mask>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocab = {symbol: number for number, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        mask_token="<mask>",
    )


'''
_READ_TEXTS = """\
    with path.open(encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file]
"""
_READ_ROWS = {
    "longest": '''\
def read_rows(path, tokenizer):
    """The texts of a JSONL file as token ids; batches are padded to their longest."""
{read_texts}\
    ids = tokenizer(texts, truncation=True, max_length=SEQ_LEN)["input_ids"]
    return [{{"input_ids": row}} for row in ids if row]


''',
    "fixed": '''\
def read_rows(path, tokenizer):
    """The texts of a JSONL file as token ids, cut or padded to SEQ_LEN."""
{read_texts}\
    columns = tokenizer(
        texts, truncation=True, padding="max_length", max_length=SEQ_LEN
    )
    rows = zip(columns["input_ids"], columns["attention_mask"], strict=True)
    return [{{"input_ids": ids, "attention_mask": mask}} for ids, mask in rows]


''',
    "packed": '''\
def read_rows(path, tokenizer):
    """The texts of a JSONL file, joined and cut into blocks of SEQ_LEN: no padding."""
{read_texts}\
    rows = tokenizer(texts, verbose=False)["input_ids"]
    ids = [token for row in rows for token in row]
    starts = range(0, len(ids) - SEQ_LEN + 1, SEQ_LEN)
    return [{{"input_ids": ids[start : start + SEQ_LEN]}} for start in starts]


''',
}
_READ_ROWS["grouped"] = _READ_ROWS["longest"]
_READ_ROWS["packed-bfd"] = '''\
def read_rows(path, tokenizer):
    """The texts of a JSONL file, whole, put together into rows of up to SEQ_LEN."""
{read_texts}\
    ids = tokenizer(texts, truncation=True, max_length=SEQ_LEN)["input_ids"]
    rows = []
    for start in range(0, len(ids), 1000):  # each thousand on its own, as TRL packs
        room = []  # left, and in which row
        for row in sorted(ids[start : start + 1000], key=len, reverse=True):
            fits = bisect_left(room, (len(row), -1))
            left, number = room.pop(fits) if fits < len(room) else (SEQ_LEN, len(rows))
            rows += [[]] * (number == len(rows))
            rows[number] = rows[number] + row
            insort(room, (left - len(row), number))
    return [{{"input_ids": row}} for row in rows if row]


'''
_TAIL = """\
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=read_rows(HERE / "train.jsonl", tokenizer),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm={masked_lm}),
{optimizer}    )
    outcome = trainer.train()

    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    result = {{
        "num_steps": outcome.global_step,
        "final_loss": losses[-1],
        "train_s": outcome.metrics["train_runtime"],
    }}
    if torch.cuda.is_available():
        result["peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
        result["peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
    else:  # the whole process; Linux counts in KiB
        result["peak_process_bytes"] = 1024 * getrusage(RUSAGE_SELF).ru_maxrss
    trainer.save_model(OUTPUT)
    tokenizer.save_pretrained(OUTPUT)

    validation = HERE / "validation.jsonl"
    if validation.exists() and (rows := read_rows(validation, tokenizer)):
        result["validation_loss"] = trainer.evaluate(rows)["eval_loss"]
    with (OUTPUT / "result.json").open("w", encoding="utf-8") as file:
        json.dump(result, file, indent=2)
    for name, value in result.items():
        print(f"{{name}}: {{value}}")


if __name__ == "__main__":
    main()
"""


def train_command(path: Path) -> list[str]:
    """The command that runs the script at `path`."""
    return [sys.executable, str(path)]


def train_script(
    run: RunConfig,
    *,
    target_modules: Sequence[str] | str,
    epochs: float = 1.0,
    learning_rate: float = 2e-4,
    seed: int = 0,
    tokenizer: str | None = None,
    weights: Weights = "pretrained",
    model_config: Mapping[str, Any] | None = None,
    batching: Collator | None = None,
    masked_lm: bool = False,
    max_steps: int | None = None,
    trust_remote_code: bool = False,
) -> str:
    """The source of a script that fine-tunes `run` on the `train.jsonl` beside it.

    It evaluates on `validation.jsonl` if there is one, and writes the adapter (or the model) and
    `result.json` to `output/`. Only the lines that the settings need are in it.

    Args:
        target_modules: leaf names that get an adapter, or "all-linear".
        tokenizer: hub id or path; None takes the model's own.
        weights: "random" needs `model_config`, downloads no weights and, unless `tokenizer` is
            given, takes bytes for tokens.
        batching: as `Plan.collator`. None follows `run.padding`: packed without padding, longest
            with it.
        masked_lm: an encoder, trained to fill in masked tokens.
        max_steps: stop after so many optimizer steps instead of `epochs`.

    Raises:
        ConfigError: a run that the script can't perform.
    """
    run = with_defaults(run)
    _check(run, weights, model_config)
    random_config = model_config if weights == "random" else None
    takes_bytes = random_config is not None and tokenizer is None
    model_class = "AutoModelForMaskedLM" if masked_lm else "AutoModelForCausalLM"
    hub = {"trust_remote_code": True} if trust_remote_code else {}
    constants = {
        "MODEL": run.model if random_config is None else Code('HERE / "random-weights"'),
        "TOKENIZER": tokenizer,
        "OUTPUT": Code('HERE / "output"'),
        "SEQ_LEN": run.seq_len,
        "BATCH_SIZE": run.batch_size,
        "GRADIENT_ACCUMULATION_STEPS": run.gradient_accumulation_steps,
        "EPOCHS": epochs if max_steps is None else None,
        "MAX_STEPS": max_steps,
        "LEARNING_RATE": learning_rate,
        "SEED": seed,
        "MODEL_CONFIG": _without_quantisation(random_config),
    }
    reader: Collator = batching or ("packed" if run.padding == "none" else "longest")
    main = [
        *_allocator_lines(run),
        "set_seed(SEED)",
        *_tokenizer_lines(tokenizer, takes_bytes, hub),
        *_RANDOM_CHECKPOINT_LINES * (random_config is not None),
        *_model_lines(run, model_class, hub),
        *_adapter_lines(run, target_modules),
        *_argument_lines(run, limited=max_steps is not None, grouped=reader == "grouped"),
        *_optimizer_lines(run),
    ]
    body = "".join(
        [
            _RANDOM_MODEL.format(model_class=model_class, dtype=run.weight_dtype)
            if random_config is not None
            else "",
            _BYTE_TOKENIZER if takes_bytes else "",
            _READ_ROWS[reader].format(read_texts=_READ_TEXTS),
            "def main():\n",
            indent("\n".join(main) + "\n", "    "),
            _TAIL.format(
                masked_lm=masked_lm,
                optimizer="        optimizers=(optimizer, None),\n" if _is_loraplus(run) else "",
            ),
        ]
    )
    head = _HEAD.format(
        model=run.model,
        method=run.method,
        os="import os\n" if "os.environ" in body else "",
        bisect="from bisect import bisect_left, insort\n" if "insort(" in body else "",
        imports=import_lines(body, _IMPORTABLE),
        constants="\n".join(
            f"{name} = {literal(value)}" for name, value in constants.items() if value is not None
        ),
    )
    return head + body


def _check(run: RunConfig, weights: Weights, model_config: Mapping[str, Any] | None) -> None:
    if run.phase != "finetune":
        raise ConfigError(f"phase: {run.phase} has nothing to train; a job needs finetune")
    if run.loss_head not in ("hf", "liger"):
        raise ConfigError(
            f"loss_head: {run.loss_head} can't be trained by the job; accepted are hf and liger"
        )
    if weights == "random" and model_config is None:
        raise ConfigError("weights: random needs the config of the model")
    if model_config is not None and model_config.get("is_encoder_decoder"):
        raise ConfigError(
            f"model: {run.model} is an encoder-decoder, which needs pairs of texts; the job "
            "trains on single texts"
        )


def _without_quantisation(model_config: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The config without what it says of the published checkpoint's storage."""
    if model_config is None:
        return None
    return {name: value for name, value in model_config.items() if name != "quantization_config"}


def _allocator_lines(run: RunConfig) -> list[str]:
    if not run.expandable_segments:
        return []
    return [
        "# Before CUDA starts; an older torch reads PYTORCH_CUDA_ALLOC_CONF instead.",
        'os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")',
    ]


def _is_loraplus(run: RunConfig) -> bool:
    return run.loraplus_lr_ratio != 1 and not get_method(run.method).trains_base


def _optimizer_lines(run: RunConfig) -> list[str]:
    """LoRA+: the Trainer's own optimizer, with another learning rate for B."""
    if not _is_loraplus(run):
        return []
    make = call(
        "create_loraplus_optimizer",
        Code("model"),
        Code("optimizer_class"),
        lr=Code('options.pop("lr")'),
        loraplus_lr_ratio=run.loraplus_lr_ratio,
        **{"**": Code("options")},
    )
    return [
        "optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(args, model)",
        f"optimizer = {make}",
    ]


def _tokenizer_lines(tokenizer: str | None, takes_bytes: bool, hub: Mapping[str, Any]) -> list[str]:
    if takes_bytes:
        return ["tokenizer = byte_tokenizer()"]
    source = Code("MODEL" if tokenizer is None else "TOKENIZER")
    return [
        f"tokenizer = {call('AutoTokenizer.from_pretrained', source, **hub)}",
        "if tokenizer.pad_token is None:",
        "    tokenizer.pad_token = tokenizer.eos_token",
        'tokenizer.padding_side = "right"',
    ]


def _model_lines(run: RunConfig, model_class: str, hub: Mapping[str, Any]) -> list[str]:
    options: dict[str, Any] = {"dtype": Code(f"torch.{run.weight_dtype}")}
    if run.attn != "sdpa":  # which transformers takes by itself, where the architecture has it
        options["attn_implementation"] = run.attn
    quant = run.quant or "none"
    if quant in FOUR_BIT_BNB:
        options["quantization_config"] = call(
            "BitsAndBytesConfig",
            load_in_4bit=True,
            bnb_4bit_quant_type=quant.removesuffix("-dq"),
            bnb_4bit_use_double_quant=quant.endswith("-dq"),
            bnb_4bit_compute_dtype=options["dtype"],
        )
    elif quant == "int8":
        options["quantization_config"] = call("BitsAndBytesConfig", load_in_8bit=True)
    load = call(f"{model_class}.from_pretrained", Code("MODEL"), **options, **hub)
    lines = [f"model = {load}"]
    if run.prepare_kbit:
        name = "prepare_model_for_kbit_training"
        prepare = call(name, Code("model"), use_gradient_checkpointing=False)
        lines += ["# Checkpointing, if any, is turned on by the Trainer.", f"model = {prepare}"]
    return lines


def _adapter_lines(run: RunConfig, target_modules: Sequence[str] | str) -> list[str]:
    settings = get_method(run.method).peft_config(run)
    if settings is None:
        return []
    targets = target_modules if isinstance(target_modules, str) else list(target_modules)
    settings = settings | {"target_modules": targets}
    if "peft_type" in settings:
        config = call("get_peft_config", settings)
    else:
        config = call("LoraConfig", **settings)
    options = {"autocast_adapter_dtype": False} if run.narrows_adapters else {}
    lines = [f"model = {call('get_peft_model', Code('model'), config, **options)}"]
    if run.narrows_adapters and run.quant != "none":
        lines += [
            "for name, parameter in model.named_parameters():",
            '    if parameter.requires_grad and "magnitude" not in name:',
            "        parameter.data = parameter.data.to(torch.bfloat16)",
        ]
    return lines


def _argument_lines(run: RunConfig, *, limited: bool, grouped: bool) -> list[str]:
    options: dict[str, Any] = {
        "output_dir": Code("OUTPUT"),
        "per_device_train_batch_size": Code("BATCH_SIZE"),
        "per_device_eval_batch_size": Code("BATCH_SIZE"),
        "gradient_accumulation_steps": Code("GRADIENT_ACCUMULATION_STEPS"),
        **({"max_steps": Code("MAX_STEPS")} if limited else {"num_train_epochs": Code("EPOCHS")}),
        "learning_rate": Code("LEARNING_RATE"),
        "optim": run.trainer_optim,
        **({"bf16": True} if run.precision == "bf16" else {}),
        **({"fp16": True} if run.precision == "fp16" else {}),
        **({"tf32": True} if run.precision == "tf32" else {}),
        **({"use_liger_kernel": True} if run.loss_head == "liger" else {}),
        "use_cpu": Code("not torch.cuda.is_available()"),
        "seed": Code("SEED"),
        "prediction_loss_only": True,
        "logging_first_step": True,
        "logging_steps": 10,
        "save_strategy": "no",
        "report_to": "none",
    }
    lines = []
    renamed = []
    if run.gradient_checkpointing:
        lines += [
            "# transformers 5 renamed the option; version 6 drops the old name.",
            'checkpointing = "activation_checkpointing"',
            "if not hasattr(TrainingArguments, checkpointing):",
            '    checkpointing = "gradient_checkpointing"',
        ]
        renamed.append("checkpointing: True")
    if grouped:
        lines += [
            "# transformers 5 has this option as one of several strategies.",
            'grouping = {"train_sampling_strategy": "group_by_length"}',
            'if not hasattr(TrainingArguments, "train_sampling_strategy"):',
            '    grouping = {"group_by_length": True}',
        ]
        renamed.append("**grouping")
    if renamed:
        options["**"] = Code(f"{{{', '.join(renamed)}}}")
    return [*lines, f"args = {call('TrainingArguments', **options)}"]
