"""The lines of `train.py` that depend on the settings of the run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from textwrap import indent
from typing import Any

from whichlora.errors import ConfigError
from whichlora.exports.python_source import Code, call, literal
from whichlora.exports.train_script.audio_rows import TRANSCRIPT_PROCESSOR_LINES
from whichlora.exports.train_script.image_rows import FREEZING_LINES, FROZEN_TOWER_LINES
from whichlora.exports.train_script.media_rows import MEDIA_PROCESSOR_LINES
from whichlora.memory.optimizer import library_of
from whichlora.methods import get_method, weight_dtype
from whichlora.predict.resolve import layout_of
from whichlora.spec.data_format import ALPACA_CHAT_TEMPLATE
from whichlora.spec.plan import Keeping
from whichlora.spec.run import BNB_QUANTS, FOUR_BIT_BNB, INT8_THRESHOLD, RunConfig
from whichlora.tasks import task_of
from whichlora.trainers import get_trainer

DEEPSPEED_FILE = "deepspeed.json"  # beside the script
CLASS_NAMES_LINES = ["model.config.id2label = dict(enumerate(map(str, CLASSES)))"]
RANDOM_CHECKPOINT_LINES = ["if not MODEL.exists():", "    write_random_model()"]


def allocator_lines(run: RunConfig) -> list[str]:
    if not run.expandable_segments:
        return []
    return [
        "# Before CUDA starts; an older torch reads PYTORCH_CUDA_ALLOC_CONF instead.",
        'os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")',
    ]


def predicted_versions(run: RunConfig) -> dict[str, str]:
    """Version of each library that the script uses, as the prediction takes it."""
    uses = {"torch": True, "transformers": True}
    uses["peft"] = not get_method(run.method).trains_base
    uses["bitsandbytes"] = (run.quant or "none") in BNB_QUANTS
    uses[library_of(run.optimizer)] = True
    uses[get_trainer(run.trainer).library] = True
    return {
        name: getattr(run.versions, name)
        for name, used in uses.items()
        if used and hasattr(run.versions, name)
    }


def is_loraplus(run: RunConfig) -> bool:
    method = get_method(run.method)
    return run.loraplus_lr_ratio != 1 and not (method.trains_base or method.makes_optimizer)


def has_optimizer(run: RunConfig) -> bool:
    """Whether the script makes the optimizer, which the Trainer is handed."""
    return is_loraplus(run) or bool(get_method(run.method).makes_optimizer)


def trainer_name(run: RunConfig) -> str:
    """The class that trains, as the script imports it."""
    return get_trainer(run.trainer).class_name


def optimizer_lines(run: RunConfig) -> list[str]:
    """LoRA+: the Trainer's optimizer with a higher learning rate for B."""
    maker = get_method(run.method).makes_optimizer
    if maker:
        settings = {"r": run.r, "lora_alpha": run.lora_alpha, "lr": Code("LEARNING_RATE")}
        return [f"optimizer = {call(maker.rpartition('.')[2], Code('model'), **settings)}"]
    if not is_loraplus(run):
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
        f"optimizer_class, options = {trainer_name(run)}.get_optimizer_cls_and_kwargs(args, model)",
        f"optimizer = {make}",
    ]


def tokenizer_lines(tokenizer: str | None, takes_bytes: bool, hub: Mapping[str, Any]) -> list[str]:
    if takes_bytes:
        return ["tokenizer = byte_tokenizer()"]
    source = Code("MODEL" if tokenizer is None else "TOKENIZER")
    return [
        f"tokenizer = {call('AutoTokenizer.from_pretrained', source, **hub)}",
        "if tokenizer.pad_token is None:",
        "    tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token",
        'tokenizer.padding_side = "right"',
    ]


def processor_lines(tokenizer: str | None, hub: Mapping[str, Any], *, media: str) -> list[str]:
    """The lines that load what makes tokens of a text, and what the model reads of its `media`.

    Args:
        media: images or audios beside messages; "": a clip whose transcript is the text.
    """
    settings = "".join(f", {name}={literal(value)}" for name, value in hub.items())
    source = "MODEL" if tokenizer is None else "TOKENIZER"
    lines = MEDIA_PROCESSOR_LINES if media else TRANSCRIPT_PROCESSOR_LINES
    return lines.format(source=source, hub=settings, media=media).splitlines()


def chat_template() -> Code:
    """The template for a tokenizer without one, a line of source for each of its parts."""
    parts = re.split(r"(?<=[%}]\})|(?<=\. )", ALPACA_CHAT_TEMPLATE)
    lines = indent("\n".join(literal(part) for part in parts if part), "    ")
    return Code(f"(\n{lines}\n)")


def attention_lines(run: RunConfig) -> list[str]:
    if run.attn != "sdpa-efficient":
        return []
    return [
        "# SDPA's memory-efficient kernel alone, which gets keys once per query head.",
        "sdpa_attention.use_gqa_in_sdpa = lambda *_: False",
        'for name in ("flash", "cudnn", "math"):',
        '    getattr(torch.backends.cuda, f"enable_{name}_sdp")(False)',
    ]


def _spread_arguments(run: RunConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """What spreads `run` over its GPUs: arguments of `from_pretrained`, then of the Trainer.

    Raises:
        ConfigError: a setting that has no key there.
    """
    layout = layout_of(run)
    if layout is None:
        return {}, {}
    training = layout.training_arguments(run)
    if "deepspeed" in training:
        training["deepspeed"] = Code(f"str(HERE / {literal(DEEPSPEED_FILE)})")
    return layout.model_arguments(run), training


def divides_while_loading(run: RunConfig) -> bool:
    """Whether `TrainingArguments` must exist before the model, which is loaded in parts.

    Source: transformers 5.23 `is_deepspeed_zero3_enabled` in `from_pretrained`.
    """
    layout = layout_of(run)
    if layout is None:
        return False
    deepspeed = layout.training_arguments(run).get("deepspeed", {})
    return bool(deepspeed) and deepspeed["zero_optimization"]["stage"] == 3


def _loading_options(run: RunConfig, *, expanded: bool) -> dict[str, Any]:
    """Arguments of `from_pretrained`; `expanded` as of `model_lines`."""
    spread, _ = _spread_arguments(run)
    stored = {name: spread.pop(name) for name in list(spread) if name.startswith("bnb_4bit_")}
    options: dict[str, Any] = {"dtype": Code(f"torch.{weight_dtype(run)}"), **spread}
    task = task_of(run)
    skipped: dict[str, Any] = {}
    if task is not None:
        options |= task.config(run)
        if task.copied:  # a head that is quantised is one that PEFT can't copy
            skipped["llm_int8_skip_modules"] = list(task.copied)
    if not run.attn.startswith(
        "sdpa"
    ):  # the default of transformers, where the architecture has it
        options["attn_implementation"] = run.attn
    quant = run.quant or "none"
    if quant in FOUR_BIT_BNB:
        options["quantization_config"] = call(
            "BitsAndBytesConfig",
            load_in_4bit=True,
            bnb_4bit_quant_type=quant.removesuffix("-dq"),
            bnb_4bit_use_double_quant=quant.endswith("-dq"),
            bnb_4bit_compute_dtype=_compute_dtype(run, options["dtype"]),
            **stored,
            **skipped,
        )
    elif quant == "int8":
        if run.llm_int8_threshold != INT8_THRESHOLD:
            skipped["llm_int8_threshold"] = run.llm_int8_threshold
        options["quantization_config"] = call("BitsAndBytesConfig", load_in_8bit=True, **skipped)
    elif expanded:
        options["quantization_config"] = call("Mxfp4Config", dequantize=True)
    return options


def _compute_dtype(run: RunConfig, usual: Code) -> Code:
    """`bnb_4bit_compute_dtype`, without which products are in float32."""
    return usual if run.compute_dtype == "auto" else Code(f"torch.{run.compute_dtype}")


def embedder_lines(
    run: RunConfig, hub: Mapping[str, Any], *, loads_tokenizer: bool, expanded: bool = False
) -> list[str]:
    """The lines that load the model into the modules of sentence-transformers.

    Args:
        loads_tokenizer: the model has one beside it; else `tokenizer` is put there.
        expanded: as of `model_lines`.
    """
    settings: dict[str, Any] = {"max_seq_length": Code("SEQ_LEN")}
    settings["model_kwargs"] = {**_loading_options(run, expanded=expanded), **hub}
    if hub:
        settings |= {"config_kwargs": dict(hub), "processor_kwargs": dict(hub)}
    lines = [] if loads_tokenizer else ["tokenizer.save_pretrained(MODEL)"]
    lines += [
        f"transformer = {call('Transformer', Code('MODEL'), **settings)}",
        "transformer.processor = tokenizer",
        "transformer.max_seq_length = SEQ_LEN",
    ]
    if run.prepare_kbit:
        prepared = call(
            "prepare_model_for_kbit_training",
            Code("transformer.model"),
            use_gradient_checkpointing=False,
        )
        lines += ["# Checkpointing, if any, is turned on by the Trainer.", prepared]
    width = Code("transformer.get_embedding_dimension()")
    return [
        *lines,
        f"pooling = {call('Pooling', width, **dict(run.task_options))}",
        "model = SentenceTransformer(modules=[transformer, pooling])",
    ]


def loss_lines(run: RunConfig) -> list[str]:
    """The line that makes the loss, where the trainer is handed one."""
    loss = get_trainer(run.trainer).loss(run)
    return [f"loss = {call(loss.name, Code('model'), **loss.settings)}"] if loss else []


def model_lines(
    run: RunConfig, model_class: str, hub: Mapping[str, Any], *, expanded: bool = False
) -> list[str]:
    """The lines that load the model.

    Args:
        expanded: loading expands the experts of an mxfp4 checkpoint.
    """
    trainer, task = get_trainer(run.trainer), task_of(run)
    options = _loading_options(run, expanded=expanded)
    load = call(f"{model_class}.from_pretrained", Code("MODEL"), **options, **hub)
    lines = [f"model = {load}"]
    if task is not None and not trainer.makes_adapters:
        lines.append("model.config.get_text_config().pad_token_id = tokenizer.pad_token_id")
    if run.prepare_kbit and not trainer.makes_adapters:
        name = "prepare_model_for_kbit_training"
        prepare = call(name, Code("model"), use_gradient_checkpointing=False)
        lines += ["# Checkpointing, if any, is turned on by the Trainer.", f"model = {prepare}"]
    return lines


def adapter_lines(run: RunConfig, target_modules: Sequence[str] | str) -> list[str]:
    method = get_method(run.method).of(run)
    frozen = FROZEN_TOWER_LINES * run.freeze_vision_tower
    if not method.peft_class:
        return [*frozen, *FREEZING_LINES * run.freeze_vision_tower]
    if method.reads_batches:
        raise ConfigError(
            f"method: {run.method} needs {method.reads_batches} of PEFT before the first step, "
            "which train.py does not run; use method pissa or olora, or write it by hand"
        )
    targets = target_modules if isinstance(target_modules, str) else list(target_modules)
    settings = dict(method.peft_config(run))
    if "target_modules" in settings:
        settings["target_modules"] = targets
        settings |= {"exclude_modules": Code("frozen")} if run.freeze_vision_tower else {}
    trainer, task = get_trainer(run.trainer), task_of(run)
    if trainer.makes_adapters:
        kind = "CAUSAL_LM" if task is None else task.peft_task
        made = call(method.peft_class.rpartition(".")[2], **settings, task_type=kind)
        return [*frozen, f"peft_config = {made}"]
    if task is not None:  # which has PEFT train the head, too
        settings["task_type"] = task.peft_task
    elif method.added_tokens:  # whose forward differs from task to task
        settings["task_type"] = "CAUSAL_LM"
    config = call(method.peft_class.rpartition(".")[2], **settings)
    options = {"autocast_adapter_dtype": False} if run.narrows_adapters else {}
    lines = [*frozen, f"model = {call('get_peft_model', Code('model'), config, **options)}"]
    if trainer.model_class:
        lines = [call("model.add_adapter", config)]
    if run.narrows_adapters and (run.quant != "none" or trainer.model_class):
        wide = f" and {literal(method.stays_wide)} not in name" if method.stays_wide else ""
        lines += [
            "for name, parameter in model.named_parameters():",
            f"    if parameter.requires_grad{wide}:",
            "        parameter.data = parameter.data.to(torch.bfloat16)",
        ]
    return lines


def saving_options(keeping: Keeping) -> dict[str, Any]:
    """When `TrainingArguments` save and evaluate."""
    options: dict[str, Any] = {"save_strategy": "no"}
    if keeping.saves:
        options = {
            "save_strategy": "steps",
            "save_steps": Code("SAVE_STEPS"),
            "save_total_limit": Code("SAVE_TOTAL_LIMIT"),
        }
    if keeping.evaluates:
        how = "epoch" if keeping.eval_steps is None else "steps"
        options["eval_strategy"] = Code(f'"{how}" if validation_rows else "no"')
        if keeping.eval_steps is not None:
            options["eval_steps"] = Code("EVAL_STEPS")
    return options


def argument_lines(
    run: RunConfig, keeping: Keeping, *, grouped: bool, processor: bool
) -> list[str]:
    """The lines that make the Trainer's arguments.

    Args:
        grouped: rows of similar length are batched.
        processor: rows hold paths of images or clips, which the collator reads.
    """
    options: dict[str, Any] = {
        "output_dir": Code("OUTPUT"),
        "per_device_train_batch_size": Code("BATCH_SIZE"),
        "per_device_eval_batch_size": Code("BATCH_SIZE"),
        "gradient_accumulation_steps": Code("GRADIENT_ACCUMULATION_STEPS"),
        "num_train_epochs": Code("EPOCHS"),
        "learning_rate": Code("LEARNING_RATE"),
        "optim": run.trainer_optim,
        **({"bf16": True} if run.precision == "bf16" else {}),
        **({"fp16": True} if run.precision == "fp16" else {}),
        **({"tf32": True} if run.precision == "tf32" else {}),
        "use_cpu": Code("not torch.cuda.is_available()"),
        "seed": Code("SEED"),
        "prediction_loss_only": True,
        "logging_first_step": True,
        "logging_steps": 10,
        **saving_options(keeping),
        **_spread_arguments(run)[1],
        "report_to": "none",
    }
    if processor:
        workers = Code("min(4, os.cpu_count() or 1)")
        options |= {"remove_unused_columns": False, "dataloader_num_workers": workers}
    trainer = get_trainer(run.trainer)
    if trainer.length_argument:
        options[trainer.length_argument] = Code("SEQ_LEN")
    options |= trainer.arguments(run)
    lines = []
    renamed = []
    if run.gradient_checkpointing and "gradient_checkpointing" in trainer.turned_on:
        options["gradient_checkpointing"] = True
        if run.use_reentrant != run.versions.checkpoints_reentrant:
            options["gradient_checkpointing_kwargs"] = {"use_reentrant": bool(run.use_reentrant)}
    elif run.gradient_checkpointing:
        lines += [
            "# transformers 5 renamed the option; version 6 drops the old name.",
            'checkpointing = "activation_checkpointing"',
            "if not hasattr(TrainingArguments, checkpointing):",
            '    checkpointing = "gradient_checkpointing"',
        ]
        renamed.append("checkpointing: True")
        if run.use_reentrant != run.versions.checkpoints_reentrant:
            kind = f'{{"use_reentrant": {bool(run.use_reentrant)}}}'
            renamed.append(f'f"{{checkpointing}}_kwargs": {kind}')
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
    options = dict.fromkeys(trainer.turned_on, False) | options
    return [*lines, f"args = {call(trainer.config_class.rpartition('.')[2], **options)}"]
