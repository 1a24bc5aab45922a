"""Build the real model of a run from its config: random weights, quantised, with adapters."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import Any

import torch
import transformers
from peft import get_peft_model, prepare_model_for_kbit_training
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForSpeechSeq2Seq,
    BitsAndBytesConfig,
    PretrainedConfig,
)
from transformers.initialization import no_init_weights
from transformers.integrations import sdpa_attention
from transformers.integrations.accelerate import expand_device_map
from transformers.modeling_utils import caching_allocator_warmup, local_torch_dtype
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
)
from transformers.quantizers import AutoHfQuantizer

from whichlora.errors import MeasurementError
from whichlora.methods import get_method, weight_dtype, with_defaults
from whichlora.spec.run import FOUR_BIT_BNB, RunConfig
from whichlora.tasks import task_of
from whichlora.trainers import get_trainer

_PEFT_TASKS = {
    AutoModelForCausalLM: "CAUSAL_LM",
    AutoModelForImageTextToText: "CAUSAL_LM",
    AutoModelForMultimodalLM: "CAUSAL_LM",
    AutoModelForSeq2SeqLM: "SEQ_2_SEQ_LM",
    AutoModelForSequenceClassification: "SEQ_CLS",
}
_PADDING_ID = 0  # of the random tokens, too
# A prime, so that no row of a weight repeats the row above it; of 1 MiB at most in fp32, so that
# it lies in the allocator's small pool and leaves no hole between weights.
_PATTERN_LEN = 262_139
_SEED = 0
_ONCE_PLACED = "_whichlora_once_placed"


def build_model(
    run: RunConfig,
    model_config: Mapping[str, Any],
    *,
    device: str,
    target_modules: Sequence[str] | str,
    quant_storage: str = "uint8",
    divided: bool = False,
) -> Any:
    """The model of `run` on `device`, as `from_pretrained` and PEFT would leave it.

    Nothing is downloaded: matrices hold a repeated random pattern, all other weights the values
    that transformers gives to weights missing from a checkpoint. Each linear layer is quantised
    once it is filled, so loading never holds more than one layer in full precision.

    Args:
        model_config: the Hugging Face config.
        target_modules: leaf names that get an adapter, or "all-linear".
        divided: DeepSpeed's stage 3 is set up for this rank, and divides what is not quantised.

    Raises:
        MeasurementError: a quantisation that needs calibrated weights.
    """
    run = with_defaults(run)
    seed()
    if divided and run.quant == "none":
        return finished_model(_divided(run, model_config), run, target_modules)
    model = meta_model(run, model_config, device=device, quant_storage=quant_storage)
    if getattr(model, "hf_quantizer", None) is not None:
        # as `from_pretrained` does with the device_map that bitsandbytes makes
        places = expand_device_map({"": device}, list(model.state_dict()))
        caching_allocator_warmup(model, places, model.hf_quantizer)
    with experts_quantised(model, run):
        _materialise(model, stored_dtype(run), torch.device(device))
    return finished_model(model, run, target_modules)


def seed() -> None:
    """Every measurement starts from the same random numbers."""
    torch.manual_seed(_SEED)


def meta_model(
    run: RunConfig, model_config: Mapping[str, Any], *, device: str, quant_storage: str = "uint8"
) -> Any:
    """The base model of `run` without storage, its layers already of the quantised class.

    Args:
        quant_storage: the dtype whose elements hold 4-bit codes.

    Raises:
        MeasurementError: a quantisation that needs calibrated weights.
    """
    dtype = stored_dtype(run)
    with torch.device("meta"):
        model = _from_config(run, model_config)
    model.tie_weights()
    task = task_of(run)
    # a projection with a bias would be quantised, of which PEFT makes no copy
    unquantised = [] if task is None else list(task.copied)
    quantizer = _quantizer(run, dtype, quant_storage, unquantised)
    if quantizer is not None:
        quantizer.validate_environment(dtype=dtype, device_map={"": device})
        with local_torch_dtype(dtype):  # of the biases of its layers
            quantizer.preprocess_model(model=model, dtype=dtype, device_map={"": device})
        model.hf_quantizer = quantizer
    return model


def _from_config(run: RunConfig, model_config: Mapping[str, Any]) -> Any:
    """The base model of `run`, whose matrices nobody has filled."""
    config = config_object(model_config)
    # transformers selects SDPA by itself, wherever the architecture has it.
    attn = None if run.attn.startswith("sdpa") else run.attn
    with no_init_weights():
        return _auto_class(run, config).from_config(
            config, dtype=stored_dtype(run), attn_implementation=attn
        )


def _divided(run: RunConfig, model_config: Mapping[str, Any]) -> Any:
    """The base model of `run`, each weight divided among the ranks as soon as it is made.

    Source: transformers 5.23 `PreTrainedModel._from_config` and `get_init_context`, which enter
    `deepspeed.zero.Init` for a config as for a checkpoint.
    """
    model = _from_config(run, model_config)
    shares = [p.ds_tensor for p in model.parameters() if len(p.ds_shape) > 1]
    pattern = _random_pattern(stored_dtype(run), shares[0].device)
    for share in shares:
        _fill(share.data, pattern)
    return model


@contextmanager
def with_efficient_attention() -> Iterator[None]:
    """SDPA has its memory-efficient kernel alone, and gets grouped keys once per query head."""
    backends = torch.backends.cuda
    others = ("flash", "cudnn", "math")
    before = [getattr(backends, f"{name}_sdp_enabled")() for name in others]
    decides = sdpa_attention.use_gqa_in_sdpa
    sdpa_attention.use_gqa_in_sdpa = lambda *_: False
    try:
        for name in others:
            getattr(backends, f"enable_{name}_sdp")(False)
        yield
    finally:
        sdpa_attention.use_gqa_in_sdpa = decides
        for name, enabled in zip(others, before, strict=True):
            getattr(backends, f"enable_{name}_sdp")(enabled)


def stored_dtype(run: RunConfig) -> torch.dtype:
    """The dtype of the weights that are not quantised."""
    dtype: torch.dtype = getattr(torch, weight_dtype(run))
    return dtype


def finished_model(model: Any, run: RunConfig, target_modules: Sequence[str] | str) -> Any:
    """The last steps of loading and PEFT, once the weights are in place."""
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        quantizer.postprocess_model(model)
    if run.phase == "inference" and run.serve == "merged":
        return model.eval()
    task = task_of(run)
    implied = _PEFT_TASKS.get(_auto_class(run, model.config))
    peft_task = implied if task is None else task.peft_task
    model = _with_adapters(model, run, peft_task, target_modules)
    return model.eval() if run.phase == "inference" else model.train()


def _auto_class(run: RunConfig, config: PretrainedConfig) -> Any:
    task = task_of(run)
    if task is None:
        return AutoModelForImageTextToText if run.images else auto_class_of(config)
    for name, value in task.config(run).items():
        setattr(config, name, value)
    text = config.get_text_config()
    if text.pad_token_id is None:
        text.pad_token_id = _PADDING_ID
    return resolve_name(task.auto_class)


def auto_class_of(config: PretrainedConfig) -> Any:
    """The auto class for fine-tuning a model: its language-model head if it has one."""
    if getattr(config, "is_encoder_decoder", False):
        hears = type(config) in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING
        return AutoModelForSpeechSeq2Seq if hears else AutoModelForSeq2SeqLM
    # Encoders such as BERT are in both tables; the config says when one is used as a decoder.
    masked = type(config) in MODEL_FOR_MASKED_LM_MAPPING
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and (
        not masked or getattr(config, "is_decoder", False)
    ):
        return AutoModelForCausalLM
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:  # texts alone, of one that sees
        return AutoModelForImageTextToText
    if type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING:  # one that hears
        return AutoModelForMultimodalLM
    return AutoModelForMaskedLM if masked else AutoModelForSequenceClassification


def config_object(model_config: Mapping[str, Any]) -> PretrainedConfig:
    """The config of transformers that `model_config`, the content of a `config.json`, means.

    Raises:
        MeasurementError: a `model_type` that the installed transformers lacks.
    """
    values = dict(model_config)
    # The storage of the checkpoint; the run decides the dtype of its weights.
    for key in ("quantization_config", "torch_dtype", "dtype", "transformers_version"):
        values.pop(key, None)
    model_type = values.pop("model_type", None)
    if model_type not in CONFIG_MAPPING:
        raise MeasurementError(
            f"transformers {transformers.__version__} has no model_type {model_type!r}; "
            "install one that has, or give another model"
        )
    return AutoConfig.for_model(model_type, **values)


def _quantizer(
    run: RunConfig, dtype: torch.dtype, quant_storage: str, unquantised: list[str]
) -> Any | None:
    skipped = {"llm_int8_skip_modules": unquantised} if unquantised else {}
    quant = run.quant or "none"
    if quant == "none":
        return None
    if quant in FOUR_BIT_BNB:
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=quant.removesuffix("-dq"),
            bnb_4bit_use_double_quant=quant.endswith("-dq"),
            bnb_4bit_compute_dtype=_compute_dtype(run, dtype),
            bnb_4bit_quant_storage=quant_storage,
            **skipped,
        )
    elif quant == "int8":
        config = BitsAndBytesConfig(
            load_in_8bit=True, llm_int8_threshold=run.llm_int8_threshold, **skipped
        )
    else:
        raise MeasurementError(
            f"quant: {quant} needs a calibrated checkpoint and can't be profiled with random "
            "weights; profile nf4, nf4-dq, fp4 or int8 instead"
        )
    return AutoHfQuantizer.from_config(config)


def _compute_dtype(run: RunConfig, dtype: torch.dtype) -> torch.dtype:
    asked = run.compute_dtype
    return dtype if asked == "auto" else getattr(torch, asked)


def _materialise(model: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Give every meta tensor of `model` a place on `device` and a value."""
    pattern = _random_pattern(dtype, device)
    replace_parameters(
        model,
        dtype,
        lambda meta, is_wide: _placed(meta, pattern, device, torch.float32 if is_wide else None),
    )
    for module in model.modules():
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros_like(buffer, device=device)
    # Weights not marked as initialised (norms, biases, rotary frequencies) get their usual values.
    model.initialize_weights()


@contextmanager
def experts_quantised(model: Any, run: RunConfig) -> Iterator[None]:
    """Each parameter that holds all experts of a layer is quantised to 4 bit once it is placed.

    Source: Axolotl `monkeypatch/moe_quant.py`; bitsandbytes 0.50.2 `nn.parametrize`.
    """
    if not run.quantize_moe_experts:
        yield
        return
    replaces = resolve_name("bitsandbytes.nn.parametrize:replace_parameter_4bit")
    # makes the table of codes of nested scales, which takes values that fake tensors lack
    resolve_name("bitsandbytes.functional:quantize_blockwise")(torch.zeros(1))
    modules = [module for name, module in model.named_modules() if name.endswith("experts")]
    kind, nested = (run.quant or "").removesuffix("-dq"), (run.quant or "").endswith("-dq")
    for module in modules:
        names = [name for name, weight in module._parameters.items() if weight.ndim == 3]

        def quantise(module: nn.Module = module, names: Sequence[str] = names) -> None:
            for name in names:
                replaces(module, name, compress_statistics=nested, quant_type=kind)

        setattr(module, _ONCE_PLACED, quantise)
    yield
    for module in modules:
        delattr(module, _ONCE_PLACED)


def replace_parameters(
    model: Any, dtype: torch.dtype, made: Callable[[nn.Parameter, bool], nn.Parameter]
) -> None:
    """Put `made(meta, stays_fp32)` in the place of every parameter; tied ones stay tied."""
    fp32_names = names_kept_wide(model, dtype)
    placed: dict[int, nn.Parameter] = {}  # by id of the meta tensor
    # listed at first: experts get children when they are quantised, with what was placed in them
    for module_name, module in list(model.named_modules()):
        for name, meta in list(module._parameters.items()):
            if meta is None:
                continue
            if id(meta) not in placed:
                is_wide = fp32_names is not None and fp32_names.search(f"{module_name}.{name}")
                placed[id(meta)] = made(meta, bool(is_wide))
            module._parameters[name] = placed[id(meta)]
        getattr(module, _ONCE_PLACED, lambda: None)()


def _placed(
    meta: nn.Parameter, pattern: torch.Tensor, device: torch.device, dtype: torch.dtype | None
) -> nn.Parameter:
    quantised = type(meta) is not nn.Parameter  # Params4bit or Int8Params of bitsandbytes
    dtype = pattern.dtype if quantised else dtype or meta.dtype
    value = torch.empty(meta.shape, dtype=dtype, device=device)
    if meta.ndim < 2:
        return nn.Parameter(value, requires_grad=meta.requires_grad)
    _fill(value, pattern)
    if quantised:
        # As transformers does on loading: the move to the device is what quantises.
        settings = {key: setting for key, setting in vars(meta).items() if key not in ("SCB", "CB")}
        source = value.to("cpu") if type(meta).__name__ == "Int8Params" else value
        parameter = type(meta)(source, requires_grad=False, **settings).to(device)
    else:
        parameter = nn.Parameter(value, requires_grad=meta.requires_grad)
    parameter._is_hf_initialized = True
    return parameter


def _random_pattern(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Values of magnitude 0.01 to 0.03: nothing vanishes, overflows or becomes denormal."""
    generator = torch.Generator().manual_seed(_SEED)
    uniform = torch.rand(_PATTERN_LEN, generator=generator) * 2 - 1
    return (0.02 * (uniform + uniform.sign() * 0.5)).to(device=device, dtype=dtype)


def _fill(tensor: torch.Tensor, pattern: torch.Tensor) -> None:
    flat = tensor.view(-1)
    whole = flat.numel() - flat.numel() % pattern.numel()
    flat[:whole].view(-1, pattern.numel()).copy_(pattern.expand(whole // pattern.numel(), -1))
    flat[whole:].copy_(pattern[: flat.numel() - whole])


def names_kept_wide(model: Any, dtype: torch.dtype) -> re.Pattern[str] | None:
    """Parameters that transformers keeps in fp32 whatever the dtype of the run (T5's `wo`)."""
    keys = list(model._get_dtype_plan(dtype))
    if not keys:
        return None
    return re.compile("|".join(rf"(?:^|\.){key.replace('*', '.*')}(?:\.|$)" for key in keys))


def _with_adapters(
    model: Any, run: RunConfig, task: str | None, target_modules: Sequence[str] | str
) -> Any:
    if run.prepare_kbit and run.phase == "finetune":
        # The trainer enables checkpointing, in the spelling of its own version.
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    method = get_method(run.method)
    frozen = _tower_modules(model) if run.freeze_vision_tower else []
    if not method.peft_class:
        for name, parameter in model.named_parameters():
            if name.rpartition(".")[0] in frozen:
                parameter.requires_grad_(False)
        return model
    targets = target_modules if isinstance(target_modules, str) else list(target_modules)
    settings = dict(method.peft_config(run))
    if "target_modules" in settings:
        settings["target_modules"] = targets
    if frozen:
        settings["exclude_modules"] = frozen
    config = resolve_name(method.peft_class)(**{**settings, "task_type": task})
    narrow = run.narrows_adapters
    model = get_peft_model(model, config, autocast_adapter_dtype=not narrow)
    trainer = get_trainer(run.trainer)
    for name, module in model.named_modules() if run.phase == "finetune" else ():
        weight = getattr(module, "weight", None)
        if trainer.narrows(run, name) and getattr(weight, "dtype", None) == torch.float32:
            module.to(torch.bfloat16)  # TRL 1.16 `peft_module_casting_to_bf16`
    if narrow and run.quant != "none":
        # PEFT gives adapters the dtype of the base weight, which 8 bits don't have. As in TRL, they
        # become 16 bit, but for DoRA's magnitudes.
        narrowed = torch.float16 if run.precision.startswith("fp16") else torch.bfloat16
        for name, parameter in model.named_parameters():
            wide = method.stays_wide and method.stays_wide in name
            if parameter.requires_grad and not wide:
                parameter.data = parameter.data.to(narrowed)
    return model


def _tower_modules(model: Any) -> list[str]:
    """Names of the modules that are of no language model: those of a vision tower around it.

    Also of those that have matrices under other names, which PEFT finds by their own (Gemma 4).
    """
    text = model.get_decoder()
    inside = {id(module) for module in (*text.modules(), model.get_output_embeddings())}
    return [
        name
        for name, module in model.named_modules()
        if inside.isdisjoint(map(id, module.modules()))
    ]


def without_cpu_packing(model: Any) -> Any:
    """`model`, whose 4-bit weights stay as they are on a CPU with AVX-512 BF16.

    bitsandbytes 0.50 `Linear4bit.forward` packs them anew there, and only there, when it serves.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model
