"""The live objects of a Trainer → the model and the run that they amount to, or why not.

Whatever a `RunConfig` can't say is refused: a wrong answer would cost more than none.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from typing import Any, get_args

from whichlora import families
from whichlora.errors import ConfigError
from whichlora.methods import BUILT_IN, Method, list_methods
from whichlora.parallel import list_strategies
from whichlora.predict.quantities import num_trained
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.options import OptionValue
from whichlora.spec.parallel import ParallelConfig
from whichlora.spec.run import (
    ALL_LINEAR,
    FOUR_BIT_BNB,
    OPTIMIZER_NAMES,
    USUAL_HEAD,
    AdapterDtype,
    AttentionKernel,
    BaseDtype,
    LossHead,
    Precision,
    RunConfig,
)
from whichlora.spec.targets import resolve_targets
from whichlora.spec.versions import Libraries
from whichlora.trainers import Trainer, liger, list_trainers

_LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes")
_COUNT_TOLERANCE = 0.005  # of the parameters: more is another model than its config describes
_OPTIMIZER_CLASSES = {  # by a part of the name; else AdamW
    "adafactor": "Adafactor",
    "sgd": "SGD",
    "lion": "Lion",
    "ademamix": "AdEMAMix",
    "rmsprop": "RMSprop",
}
_REWARD_HEADS = re.compile(r"ForSequenceClassification$")
_REWARD_MODULES = ("classifier", "score")  # that PEFT trains whole: of `SEQ_CLS`
_LANGUAGE_HEADS = re.compile(r"(CausalLM|LMHeadModel|MaskedLM|ConditionalGeneration)$")


def read_job(
    model: Any,
    args: Any,
    optimizer: Any,
    *,
    gpu: GpuSpec,
    batch_size: int,
    seq_len: int,
    padded: bool,
    parallel: ParallelConfig | None = None,
) -> ResolvedRun:
    """What trains, resolved and checked against the tensors that are there.

    On several GPUs that is before they divide the model.

    Args:
        model: what the Trainer holds, with adapters or without.
        args: its `TrainingArguments`.
        optimizer: the one it made of them, or was given.
        seq_len: padded length of the longest batch.
        parallel: the GPUs of the run; None is one.

    Raises:
        ConfigError: something that a `RunConfig` can't say; one line.
    """
    _check_machinery(args)
    trainer = read_trainer(args)
    libraries = _older_libraries(trainer)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    spec = _read_model(base, trainer)
    quant, computes, loaded = _read_quant(base)
    method, adapters = _read_adapters(model, spec, quant, trainer)
    autocast = _read_autocast(args)
    spread = parallel or ParallelConfig()
    adapter_dtype: AdapterDtype = "auto"
    if not method.trains_base:
        adapter_dtype = _read_adapter_dtype(
            model, method, autocast, narrows=_narrows(trainer, quant, libraries, spread)
        )
    run = RunConfig(
        model=spec.name,
        batch_size=batch_size,
        seq_len=seq_len,
        padding="padded" if padded else "none",
        precision=_read_precision(model, method, args, autocast, loaded or computes),
        compute_dtype=computes or "auto",
        base_dtype=_read_base_dtype(base, method, autocast, quant),
        adapter_dtype=adapter_dtype,
        quant=quant,
        prepare_kbit=quant != "none" and _dtype(_stored(base, method), "base weights") == "float32",
        optimizer=_read_optimizer(args, optimizer),
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        attn=_read_attention(base),
        loss_head=_read_loss_head(args, trainer),
        trainer=trainer.name,
        trainer_options=_read_options(args, trainer),
        libraries=libraries,
        **_read_checkpointing(base, args, before=parallel is not None),
        parallel=spread,
        method=method.name,
        **adapters,
    )
    job = resolve(spec, run, gpu)
    _check_dtypes(job, model, base)
    _check_counts(job, model, base)
    return job


def read_parallel(args: Any) -> ParallelConfig | None:
    """The GPUs of the run, as the accelerator divides it; None is one GPU.

    Raises:
        ConfigError: a way that no strategy knows.
    """
    if args.world_size == 1:
        if args.n_gpu > 1:
            raise ConfigError(
                f"the run has {args.n_gpu} devices in one process (nn.DataParallel), which is not "
                "modelled; start it with torchrun"
            )
        for name in ("deepspeed", "fsdp"):
            if getattr(args, name, None):
                raise ConfigError(f"{name}={getattr(args, name)!r} is not modelled on one device")
        return None
    accelerator = _read_accelerator(args)
    for strategy in list_strategies().values():
        options = strategy.read_accelerator(accelerator)
        if options is not None:
            return ParallelConfig(
                strategy=strategy.name,
                gpus=args.world_size,
                nodes=args.world_size // int(os.environ.get("LOCAL_WORLD_SIZE", args.world_size)),
                options=tuple(sorted(options.items())),
            )
    raise ConfigError(
        f"{args.world_size} processes under {accelerator['distributed_type']} are not modelled; "
        f"{', '.join(list_strategies())} are"
    )


def _read_accelerator(args: Any) -> dict[str, Any]:
    """How the accelerator of this process is set up, as strategies read it."""
    from accelerate.state import AcceleratorState

    state = AcceleratorState()
    accumulation = getattr(args.accelerator_config, "gradient_accumulation_kwargs", None) or {}
    read: dict[str, Any] = {
        "distributed_type": str(getattr(state.distributed_type, "value", state.distributed_type)),
        "sync_each_batch": bool(accumulation.get("sync_each_batch")),
    }
    if read["distributed_type"] == "DEEPSPEED":
        read["deepspeed"] = state.deepspeed_plugin.deepspeed_config
    if read["distributed_type"] == "FSDP":
        plugin = state.fsdp_plugin
        version = int(plugin.fsdp_version)
        shards = plugin.reshard_after_forward if version == 2 else plugin.sharding_strategy
        policy = plugin.auto_wrap_policy
        read["fsdp"] = {
            "fsdp_version": version,
            "shards": getattr(shards, "name", shards),
            "cpu_offload": _offloads(plugin.cpu_offload),
            "activation_checkpointing": bool(plugin.activation_checkpointing),
            "backward_prefetch": getattr(plugin.backward_prefetch, "name", None),
            "cpu_ram_efficient_loading": bool(plugin.cpu_ram_efficient_loading),
            "wraps": getattr(policy, "__name__", str(policy)),
        }
    return read


def _offloads(policy: Any) -> bool:
    """FSDP 1 has a setting of it, FSDP 2 a class."""
    return bool(getattr(policy, "offload_params", type(policy).__name__ == "CPUOffloadPolicy"))


def _check_machinery(args: Any) -> None:
    """None of the machinery that keeps other tensors.

    Raises:
        ConfigError: otherwise.
    """
    for name in ("torch_compile", "label_smoothing_factor"):
        if getattr(args, name, None):
            raise ConfigError(f"{name}={getattr(args, name)!r} is not modelled")
    if getattr(args, "activation_offloading", False):
        raise ConfigError("activation_offloading is not modelled")


# --- the model


def _read_model(base: Any, trainer: Trainer) -> ModelSpec:
    kind = type(base).__name__
    heads = _REWARD_HEADS if trainer.task else _LANGUAGE_HEADS
    if not heads.search(kind):
        part = "head of rewards" if trainer.task else "language-model head"
        raise ConfigError(f"{kind} is not modelled; a model with a {part} is")
    config = json.loads(base.config.to_json_string(use_diff=False))
    config.pop("quantization_config", None)  # how it is held is read from the tensors
    name = getattr(base.config, "_name_or_path", "") or str(config.get("model_type"))
    return families.build(config, name=name)


def _is_adapter(name: str, method: Method) -> bool:
    return bool(method.parameter_prefix) and method.parameter_prefix in name


def _stored(base: Any, method: Method) -> Iterator[Any]:
    """Base weights that are not quantised."""
    for name, parameter in base.named_parameters():
        is_plain = parameter.is_floating_point() and not _is_quantised(parameter)
        if is_plain and not _is_adapter(name, method):
            yield parameter


def _is_quantised(parameter: Any) -> bool:
    return type(parameter).__name__ in ("Params4bit", "Int8Params")


def _read_quant(base: Any) -> tuple[Any, Any, str | None]:
    """How the base weights are stored, the dtype that 4-bit layers compute in, and what it was."""
    kinds: set[tuple[str, str | None, str | None]] = set()
    for module in base.modules():
        weight: Any = module._parameters.get("weight")  # its own: PEFT's layers show the base's
        if type(weight).__name__ == "Params4bit":
            # before the first forward, bitsandbytes may not have made its state yet
            state = weight.quant_state
            nested = state.nested if state is not None else weight.compress_statistics
            dtype = _name(module.compute_dtype) if module.compute_dtype is not None else None
            loaded = None if state is None else _name(state.dtype)
            kinds.add((f"{weight.quant_type}{'-dq' if nested else ''}", dtype, loaded))
        elif type(weight).__name__ == "Int8Params":
            kinds.add(("int8", None, None))
    if not kinds:
        method = getattr(base, "quantization_method", None)
        if method is not None:
            raise ConfigError(f"weights quantised by {getattr(method, 'value', method)}")
        return "none", None, None
    if len({quant for quant, *_ in kinds}) > 1:
        raise ConfigError(f"weights are stored in several ways: {sorted(kinds)}")
    (quant, computes, loaded), *_ = sorted(kinds, key=str)
    if quant == "fp4-dq":
        raise ConfigError("fp4 with double quantisation is not modelled; nf4 with it is")
    return quant, computes, loaded


def _read_adapters(
    model: Any, spec: ModelSpec, quant: str, trainer: Trainer
) -> tuple[Method, Mapping[str, Any]]:
    """The method, and its rank, targets and dropout."""
    configs = getattr(model, "peft_config", None)
    if not configs:
        frozen = sum(not parameter.requires_grad for parameter in model.parameters())
        if frozen:
            raise ConfigError(f"{frozen} weights are frozen and there is no adapter")
        return next(method for method in BUILT_IN.values() if method.trains_base), {}
    if len(configs) > 1:
        raise ConfigError(f"{len(configs)} adapters are loaded ({', '.join(configs)}); one is")
    (config,) = configs.values()
    method, settings = _read_method(config, quant)
    if method.find_targets is not None:
        return method, settings
    leaves = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if hasattr(module, "base_layer")
        and any(child.startswith(method.parameter_prefix) for child, _ in module.named_children())
    }
    if trainer.task:  # its head is trained with every method
        saved = (name for name in settings["modules_to_save"] if name not in _REWARD_MODULES)
        settings = {**settings, "modules_to_save": tuple(saved)}
    whole = leaves == set(resolve_targets(spec, (ALL_LINEAR,), modules_only=method.folded is None))
    targets = (ALL_LINEAR,) if whole else tuple(sorted(leaves))
    return method, {"target_modules": targets, **settings}


def _read_method(config: Any, quant: str) -> tuple[Method, Mapping[str, Any]]:
    """The method whose PEFT config `config` is, and its settings.

    Of several that differ in the storage of the base, it is the one that stores it so.

    Raises:
        ConfigError: no method knows it.
    """
    kind = f"{type(config).__module__.partition('.')[0]}.{type(config).__name__}"
    methods = [method for method in list_methods().values() if method.peft_class == kind]
    readings = [(method, method.read_peft(config)) for method in methods]
    matching = [(method, settings) for method, settings in readings if settings is not None]
    if not matching:
        modelled = dict.fromkeys(
            method.peft_class for method in BUILT_IN.values() if method.peft_class
        )
        raise ConfigError(f"adapters of {kind} are not modelled; {' and '.join(modelled)} are")
    four_bit = quant in FOUR_BIT_BNB
    stored_so = [
        candidate for candidate in matching if (candidate[0].base_quant in FOUR_BIT_BNB) == four_bit
    ]
    return (stored_so or matching)[0]


def _read_attention(base: Any) -> AttentionKernel:
    kernel = getattr(base.config, "_attn_implementation", None)
    for modelled in get_args(AttentionKernel):
        if kernel == modelled:
            return modelled  # type: ignore[no-any-return]
    accepted = ", ".join(get_args(AttentionKernel))
    raise ConfigError(f"attn_implementation={kernel!r} is not modelled; {accepted} are")


# --- the arguments


def _read_optimizer(args: Any, optimizer: Any) -> Any:
    name = str(getattr(args.optim, "value", args.optim))
    if name not in OPTIMIZER_NAMES:
        raise ConfigError(f"optim={name!r} is not modelled; {', '.join(OPTIMIZER_NAMES)} are")
    ours = OPTIMIZER_NAMES[name]
    expected = next((made for part, made in _OPTIMIZER_CLASSES.items() if part in ours), "AdamW")
    actual = type(getattr(optimizer, "optimizer", optimizer)).__name__
    if optimizer is not None and actual != expected:
        raise ConfigError(f"the optimizer is {actual}, which is not what optim={name!r} makes")
    return ours


def _read_checkpointing(base: Any, args: Any, *, before: bool) -> dict[str, Any]:
    """Whether and how; what transformers 5 renamed is read under both names.

    Args:
        before: the Trainer has not turned it on yet.
    """
    blocks = [module for module in base.modules() if hasattr(module, "gradient_checkpointing")]
    names = ("activation_checkpointing", "gradient_checkpointing") if before else ()
    asked = any(getattr(args, name, False) for name in names)
    if not asked and not any(module.gradient_checkpointing for module in blocks):
        return {"gradient_checkpointing": False}
    options = getattr(args, "activation_checkpointing_kwargs", None)
    options = options or getattr(args, "gradient_checkpointing_kwargs", None) or {}
    for name in ("every_n_layers", "offload", "selective"):
        if options.get(name) not in (None, False, 1):
            raise ConfigError(f"checkpointing with {name}={options[name]!r} is not modelled")
    return {"gradient_checkpointing": True, "use_reentrant": options.get("use_reentrant")}


def read_trainer(args: Any) -> Trainer:
    """The trainer whose arguments `args` are.

    Raises:
        ConfigError: one of TRL that is not known.
    """
    by_arguments = {
        (package, name): trainer
        for trainer in reversed(list_trainers().values())  # of equal ones the first
        for package, _, path in [trainer.config_class.partition(".")]
        for name in [path.rpartition(".")[2]]
        if name
    }
    kinds = [(kind.__module__.partition(".")[0], kind.__name__) for kind in type(args).__mro__]
    for package, name in kinds:
        if (package, name) in by_arguments:
            return by_arguments[package, name]
        if package == "trl" and not name.startswith("_"):
            known = ", ".join(config for owner, config in by_arguments if owner == package)
            raise ConfigError(f"{name}: its trainer is not modelled; those of {known} are")
    raise ConfigError(f"{kinds[0][1]}: its trainer is not modelled; use TrainingArguments")


def _read_options(args: Any, trainer: Trainer) -> tuple[tuple[str, OptionValue], ...]:
    """The trainer's own settings, as its arguments have them."""
    values: dict[str, OptionValue] = {}
    for option in trainer.options:
        if option in liger.OPTIONS:
            continue
        value = getattr(args, option.name, None)
        if isinstance(value, list):
            if len(value) != 1:
                raise ConfigError(f"{option.name}={value!r} is not modelled; one of them is")
            (value,) = value
        if value is not None:
            values[option.name] = float(value) if isinstance(option.default, float) else value
    return tuple(sorted((values | _read_liger(args, trainer)).items()))


_OF_LOSSES = ("use_liger_kernel", "padding_free", "sync_ref_model", "use_weighting")


def _read_loss_head(args: Any, trainer: Trainer) -> LossHead:
    """Who computes the loss, where that is not the trainer's usual one.

    Raises:
        ConfigError: a loss of a trainer of TRL that is not modelled.
    """
    has_kernels = _has_kernels(trainer)
    if "liger" in trainer.loss_heads and args.use_liger_kernel and not has_kernels:
        return "liger"
    for name in _OF_LOSSES if trainer.makes_adapters else ():
        if getattr(args, name, False) and not (has_kernels and name == liger.USE.name):
            raise ConfigError(f"{name}={getattr(args, name)!r} of {trainer.name} is not modelled")
    has_type = any(option.name == "loss_type" for option in trainer.options)
    if trainer.rows == "texts" and not has_type and getattr(args, "loss_type", "nll") != "nll":
        raise ConfigError("SFTConfig: only loss_type='nll' is modelled")
    return USUAL_HEAD


def _read_liger(args: Any, trainer: Trainer) -> dict[str, OptionValue]:
    """Liger's kernels, of a trainer whose options they are."""
    if not args.use_liger_kernel or not _has_kernels(trainer):
        return {}
    config = getattr(args, liger.CONFIG.name, None)
    written = {liger.CONFIG.name: json.dumps(dict(config))} if config else {}
    return {**written, liger.USE.name: True}


def _has_kernels(trainer: Trainer) -> bool:
    return liger.USE in trainer.options


def _read_autocast(args: Any) -> str:
    """Mixed precision as the accelerator runs it: "bf16", "fp16", or "no"."""
    from accelerate.state import AcceleratorState

    if AcceleratorState._shared_state:
        return str(AcceleratorState().mixed_precision)
    requested = "bf16" if args.bf16 else "fp16" if args.fp16 else "no"
    return os.environ.get("ACCELERATE_MIXED_PRECISION", requested)


def _read_precision(
    model: Any, method: Method, args: Any, autocast: str, quant_dtype: str | None
) -> Precision:
    weights = _dtype(_stored(model, method), "base weights")
    if quant_dtype is not None:  # norms may have been widened; the matrices had this dtype
        weights = quant_dtype
    if autocast == "bf16":
        return "bf16"
    if autocast == "fp16":
        return "fp16"
    if autocast != "no":
        raise ConfigError(f"mixed precision {autocast} is not modelled; bf16 and fp16 are")
    if weights == "float32":
        return "tf32" if args.tf32 else "fp32"
    if weights != "bfloat16":
        raise ConfigError(f"{weights} weights without autocast are not modelled; bfloat16 are")
    pure = method.trains_base or _dtype(_adapters(model, method), "adapters") == "bfloat16"
    return "bf16-pure" if pure else "bf16-no-autocast"


def _read_base_dtype(base: Any, method: Method, autocast: str, quant: str) -> BaseDtype:
    """Whether 16-bit autocast runs over fp32 weights, as a model has them that nobody narrowed."""
    if autocast == "no" or quant != "none":
        return "auto"
    return "float32" if _dtype(_stored(base, method), "base weights") == "float32" else "auto"


def _narrows(
    trainer: Trainer,
    quant: str,
    libraries: tuple[tuple[str, str], ...],
    parallel: ParallelConfig,
) -> bool:
    """Whether the installed trainer casts the adapters of a base in `quant`."""
    run = RunConfig(model="", libraries=libraries, parallel=parallel)
    return quant in FOUR_BIT_BNB and trainer.narrows_adapters(run)


def _read_adapter_dtype(
    model: Any, method: Method, autocast: str, *, narrows: bool
) -> AdapterDtype:
    """The dtype of the adapters under bf16 autocast, where it is not the libraries' own choice."""
    dtype = _dtype(_adapters(model, method), "adapters")
    usual = "bfloat16" if narrows else "float32"
    if autocast != "bf16" or dtype == usual:
        return "auto"
    for modelled in get_args(AdapterDtype):
        if dtype == modelled:
            return modelled  # type: ignore[no-any-return]
    raise ConfigError(f"{dtype} adapters under bf16 autocast are not modelled; float32 are")


def _adapters(model: Any, method: Method) -> Iterator[Any]:
    """What the method trains, but for what keeps a dtype of its own."""
    for name, parameter in model.named_parameters():
        stays_wide = method.stays_wide and method.stays_wide in name
        if _is_adapter(name, method) and parameter.requires_grad and not stays_wide:
            yield parameter


def _older_libraries(trainer: Trainer) -> tuple[tuple[str, str], ...]:
    """Installed versions that are older than the formulas'; newer ones are taken as these."""
    modelled = Libraries()
    package = trainer.library
    of_trainer = [package] if package not in _LIBRARIES and hasattr(modelled, package) else []
    older = []
    for name in (*_LIBRARIES, *of_trainer):
        try:
            installed = re.match(r"[\d.]*\d", metadata.version(name))
        except metadata.PackageNotFoundError:
            continue
        if installed and Libraries.of([(name, installed[0])]).older(name, getattr(modelled, name)):
            older.append((name, installed[0]))
    return tuple(older)


# --- the tensors, against what the formulas take them for


def _check_dtypes(job: ResolvedRun, model: Any, base: Any) -> None:
    dtypes, precision = job.dtypes, job.run.precision
    embedding = base.get_input_embeddings().weight
    checks: list[tuple[str, Callable[[], Iterator[Any]], int]] = [
        ("embeddings", lambda: iter([embedding]), dtypes.embedding_bytes),
        ("adapters", lambda: _adapters(model, job.method), dtypes.adapter_bytes),
        ("base weights", lambda: _stored(base, job.method), dtypes.base_bytes),
    ]
    for part, tensors, expected in checks:
        for tensor in tensors():
            if tensor.element_size() != expected:
                raise ConfigError(
                    f"{part} in {_name(tensor.dtype)} with {precision} training: the formulas know "
                    f"them with {expected} bytes each there"
                )


def _check_counts(job: ResolvedRun, model: Any, base: Any) -> None:
    trained = sum(_numel(parameter) for parameter in model.parameters() if parameter.requires_grad)
    expected = int(num_trained(job))
    if abs(trained - expected) > _COUNT_TOLERANCE * expected:
        raise ConfigError(
            f"{trained:,} parameters are trained, its settings describe {expected:,}; "
            "some layers are left out or added"
        )
    if job.run.quant == "none":
        total = sum(
            _numel(parameter)
            for name, parameter in base.named_parameters()
            if not _is_adapter(name, job.method) and ".modules_to_save." not in name  # copies
        )
        described = job.model.loaded_params
        if abs(total - described) > _COUNT_TOLERANCE * total:
            raise ConfigError(
                f"the model has {total:,} parameters, its config describes {described:,}"
            )


def _numel(parameter: Any) -> int:
    """Elements, also of a parameter that DeepSpeed's zero.Init has divided."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _dtype(tensors: Iterator[Any], part: str) -> str:
    """The one dtype of `tensors`.

    Raises:
        ConfigError: they have several, or there are none.
    """
    names = sorted({_name(tensor.dtype) for tensor in tensors})
    if len(names) != 1:
        raise ConfigError(f"{part} are {' and '.join(names) or 'missing'}; one dtype is modelled")
    return names[0]


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
