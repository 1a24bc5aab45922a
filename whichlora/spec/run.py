"""What a user asks for: one run with all of its settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

from whichlora.errors import ConfigError
from whichlora.spec.options import OptionValue
from whichlora.spec.parallel import ONE_GPU, ParallelConfig
from whichlora.spec.versions import Libraries
from whichlora.spec.words import unknown
from whichlora.text import require_printable

Phase = Literal["finetune", "inference"]
Precision = Literal[
    "auto",
    "bf16",
    "bf16-pure",
    "bf16-no-autocast",
    "fp16",
    "fp16-pure",
    "fp16-no-autocast",
    "tf32",
    "fp32",
]
Optimizer = Literal[
    "adamw_torch",
    "adamw_torch_fused",
    "adamw_hf",
    "adamw_torch_8bit",
    "adamw_torch_4bit",
    "adamw_8bit",
    "paged_adamw_8bit",
    "paged_adamw_32bit",
    "adafactor",
    "sgd",
    "lion",
    "lion_8bit",
    "paged_lion_32bit",
    "paged_lion_8bit",
    "ademamix",
    "ademamix_8bit",
    "paged_ademamix_32bit",
    "paged_ademamix_8bit",
    "rmsprop_bnb",
    "rmsprop_bnb_8bit",
]
MethodOptimizer = Literal["lora_fa"]  # which a method is, and nobody chooses
AnyOptimizer = Literal[Optimizer, MethodOptimizer]
AttentionKernel = Literal["sdpa", "sdpa-efficient", "eager", "flash_attention_2"]
Padding = Literal["none", "padded"]
LossHead = Literal["hf", "trl-fused", "liger", "unsloth", "unsloth-fused", "raw"]
USUAL_HEAD: LossHead = "hf"  # of a run that names none
Quant = Literal[
    "none", "nf4", "nf4-dq", "fp4", "int8", "gptq-int4", "gptq-int8", "awq-int4", "mxfp4", "fp8",
    "w4a16", "nvfp4", "nvfp4a16", "mxfp8",
]  # fmt: skip
Bias = Literal["none", "all", "lora_only"]
BaseDtype = Literal["auto", "float32"]
AdapterDtype = Literal["auto", "float32", "bfloat16"]
ComputeDtype = Literal["auto", "float32", "bfloat16", "float16"]
Engine = Literal["auto", "ledger", "trace"]
Serve = Literal["as-trained", "merged"]
TRANSFORMERS = "transformers"  # the engine that profiles run
USUAL_TRAINER = "transformers"
KvCache = Literal["dynamic", "static", "quantized", "paged", "vllm"]
CacheBackend = Literal["quanto", "hqq", "fp8"]

AUTOCAST_PRECISIONS: frozenset[str] = frozenset({"bf16", "fp16"})
FP32_PRECISIONS: frozenset[str] = frozenset({"tf32", "fp32"})  # of the tensors, not the products
# What an unmerged adapter's bytes and work depend on, beside the base that it is served with.
ADAPTER_SETTINGS = (
    "method",
    "method_options",
    "r",
    "target_modules",
    "modules_to_save",
    "adapter_dtype",
)
FOUR_BIT_BNB: frozenset[str] = frozenset({"nf4", "nf4-dq", "fp4"})
BNB_QUANTS: frozenset[str] = FOUR_BIT_BNB | {"int8"}
CHECKPOINT_QUANTS: frozenset[str] = frozenset({"gptq-int4", "gptq-int8", "awq-int4"})  # written so
# Files of these are served by engines, and nothing trains or expands them: `spec.float_blocks`.
PACKED_QUANTS: frozenset[str] = frozenset({"w4a16", "nvfp4", "nvfp4a16", "mxfp8"})
ENGINE_QUANTS: frozenset[str] = PACKED_QUANTS | {"fp8"}  # engines read them, nothing trains
USUAL_SPREAD = 0.1  # of the lengths of an engine's requests
CACHE_NBITS = (4, 2)  # what quanto and HQQ both have
CACHE_GROUP_STEP = 8  # whole bytes of codes, whatever they are packed along
# The bounds of settings, in whatever they are read from: far beyond any run, and small enough that
# what is computed from them stays finite.
MOST_COUNT = 10**9
MOST_RATIO = 10**12
INT8_THRESHOLD = 6.0  # of `BitsAndBytesConfig`
# `TrainingArguments.optim` to ours; of several names, the first is written
OPTIMIZER_NAMES: Mapping[str, Optimizer] = {
    "adamw_torch": "adamw_torch",
    "adamw_torch_fused": "adamw_torch_fused",
    "adamw_torch_8bit": "adamw_torch_8bit",
    "adamw_torch_4bit": "adamw_torch_4bit",
    "adamw_8bit": "adamw_8bit",
    "adamw_bnb_8bit": "adamw_8bit",
    "paged_adamw_8bit": "paged_adamw_8bit",
    "paged_adamw_32bit": "paged_adamw_32bit",
    "adafactor": "adafactor",
    "sgd": "sgd",
    "lion_32bit": "lion",
    "lion_8bit": "lion_8bit",
    "paged_lion_32bit": "paged_lion_32bit",
    "paged_lion_8bit": "paged_lion_8bit",
    "ademamix": "ademamix",
    "ademamix_8bit": "ademamix_8bit",
    "paged_ademamix_32bit": "paged_ademamix_32bit",
    "paged_ademamix_8bit": "paged_ademamix_8bit",
    "rmsprop_bnb": "rmsprop_bnb",
    "rmsprop_bnb_32bit": "rmsprop_bnb",
    "rmsprop_bnb_8bit": "rmsprop_bnb_8bit",
    "adamw_hf": "adamw_hf",  # of transformers before 5, and `adamw_torch` since
}
# Those of transformers 5.23 and Axolotl that no formula here describes.
OTHER_OPTIMIZERS = (
    *("adagrad", "rmsprop", "adamw_anyprecision", "adamw_torch_xla", "adamw_torch_npu_fused"),
    *("galore_adamw", "galore_adamw_8bit", "galore_adafactor", "galore_adamw_layerwise"),
    *("galore_adamw_8bit_layerwise", "galore_adafactor_layerwise", "apollo_adamw"),
    *("apollo_adamw_layerwise", "lomo", "adalomo", "grokadamw", "stable_adamw"),
    *("schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd", "muon"),
)
# In which runs may differ that one built model serves.
BATCH_SETTINGS = (
    "batch_size",
    "seq_len",
    "target_len",
    "gradient_accumulation_steps",
    "prompt_len",
    "max_new_tokens",
    "padding",
)
DEFAULT_IMAGE_SIZE = (1024, 1024)
MOST_IMAGES = 10_000  # of one row
DEFAULT_AUDIO_SECONDS = 30.0
MOST_SECONDS = 3600.0  # of one clip
ALL_LINEAR = "all-linear"
ATTENTION = "attention"
DEFAULT_TARGETS = "default"  # what PEFT adapts of a type of model where nobody names layers


def autocast_precision(precision: Precision) -> Precision:
    """`precision`, of which a tool has no form without autocast."""
    without: dict[str, Precision] = {
        f"{autocast}-{kind}": autocast
        for autocast in ("bf16", "fp16")
        for kind in ("pure", "no-autocast")
    }
    return without.get(precision, precision)


def precision_of_weights(
    mixed: str, weights: str, *, narrows_adapters: bool, tf32: bool = False
) -> dict[str, Any]:
    """Precision, and the dtype of the base, of weights that are loaded in `weights`.

    Args:
        mixed: of autocast, or "no".
        narrows_adapters: what is trained has the 16 bits of the weights, where nothing casts.
        tf32: fp32 products are made in tf32.
    """
    if mixed != "no":
        return {"precision": mixed, **({"base_dtype": weights} if weights == "float32" else {})}
    if weights == "float32":
        return {"precision": "tf32" if tf32 else "fp32"}
    width = "fp16" if weights == "float16" else "bf16"
    return {"precision": f"{width}-pure" if narrows_adapters else f"{width}-no-autocast"}


def named_optimizer(name: str) -> str:
    """Ours, of the name that `TrainingArguments` have; others are as they are.

    Raises:
        ConfigError: one that no formula describes.
    """
    if name in OTHER_OPTIMIZERS:
        known = ", ".join(get_args(Optimizer))
        raise ConfigError(f"optimizer: no formula here describes {name}; {known} are predicted")
    return OPTIMIZER_NAMES.get(name, name)


def usual_optimizer(versions: Libraries) -> Optimizer:
    """That of `TrainingArguments` where nobody names one.

    Kind: exact. Source: `default_optim` of transformers' training_args.py, read in 4.16 to 5.23:
    4.32 and 4.54 (pull 37358) are the first with another, the latter from torch 2.8 on.
    """
    if versions.older("transformers", "4.32"):
        return "adamw_hf"
    is_old = versions.older("transformers", "4.54") or versions.older("torch", "2.8")
    return "adamw_torch" if is_old else "adamw_torch_fused"


def usual_alpha(r: int) -> int:
    """`lora_alpha` where nobody states it: an update of any rank is scaled by two."""
    return 2 * r


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFormat:
    """How transformers' `QuantizedCache` stores keys and values.

    Args:
        backend: whose quantiser: optimum-quanto's or HQQ's, or 8-bit floats of torch itself.
        nbits: of one element.
        group_size: elements that share a scale and a zero; None: one scale for a whole tensor.
        residual_length: new tokens that gather in full width before all are quantised anew; 0:
            each is quantised as it comes.
    """

    backend: CacheBackend
    nbits: int
    group_size: int | None
    residual_length: int


_CHOICES: dict[str, tuple[str, ...]] = {
    "phase": get_args(Phase),
    "precision": get_args(Precision),
    "optimizer": get_args(AnyOptimizer),
    "attn": get_args(AttentionKernel),
    "padding": get_args(Padding),
    "loss_head": get_args(LossHead),
    "kv_cache": get_args(KvCache),
    "serve": get_args(Serve),
    "cache_backend": get_args(CacheBackend),
    "quant": get_args(Quant),
    "bias": get_args(Bias),
    "base_dtype": get_args(BaseDtype),
    "adapter_dtype": get_args(AdapterDtype),
    "compute_dtype": get_args(ComputeDtype),
}


def _choice(setting: str, value: str, accepted: tuple[str, ...]) -> None:
    if value not in accepted:
        raise ConfigError(unknown(setting, value, accepted))


def _switch(setting: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{setting}: {value!r} is neither true nor false; give one of them")


def _at_least(setting: str, value: int, minimum: int, hint: str = "") -> None:
    # bool is an int in Python; "batch_size: true" is a typing mistake, not a batch of one.
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{setting}: {value!r} is not a whole number; give {minimum} or more")
    if value < minimum:
        raise ConfigError(f"{setting}: must be {minimum} or more, got {value}{hint}")
    if value > MOST_COUNT:
        raise ConfigError(f"{setting}: must be {MOST_COUNT} or less, got {str(value)[:20]}")


def image_sides(value: Any) -> tuple[int, int]:
    """Width and height, of "1024x768" or of two numbers.

    Raises:
        ConfigError: neither.
    """
    sides = value.lower().split("x") if isinstance(value, str) else value
    if isinstance(sides, list | tuple) and len(sides) == 2:
        texts = [str(side).strip() for side in sides]
        if all(text.isdecimal() and 0 < int(text) <= MOST_COUNT for text in texts):
            return int(texts[0]), int(texts[1])
    raise ConfigError(f"image_size: {value!r} is no width and height, such as 1024x768")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One candidate: a model, a phase and every setting that memory or time depends on.

    Args:
        method: a name registered in `whichlora.methods`; inference reads it, and the settings of
            its adapter, where the model is served as trained.
        batch_size: sequences per device per micro-step.
        seq_len: tokens per sequence in fine-tuning, padding included.
        target_len: of an encoder-decoder of texts, tokens that the decoder learns to write, padding
            included; `seq_len` are those that the encoder reads. None: as many.
        target_modules: leaf names of the adapted layers, or ("all-linear",), ("attention",) or
            ("default",), PEFT's own of a type of model.
        precision: "auto" until `resolve.with_precision` asks the device: bf16 where it has that.
        modules_to_save: leaf names of modules that PEFT copies and trains as a whole beside the
            adapters: the token embedding, the output head.
        quant: how the base weights are stored; None until `methods.with_defaults` asks the method.
        gradient_checkpointing: None until `resolution.resolve` asks the model: on where it has it.
        prepare_kbit: whether `prepare_model_for_kbit_training` runs; None until then, too.
        prompt_len, max_new_tokens: inference only.
        serve: inference: the base as the method stores it with its adapter unmerged
            ("as-trained"), or one set of weights stored as `quant` says ("merged"); None until
            `methods.with_defaults` asks the method.
        cache_backend, cache_nbits, cache_group_size, cache_residual_length: of kv_cache
            quantized; `backend`, `nbits`, `q_group_size` and `residual_length` in the
            `cache_config` of transformers.
        base_dtype: of the weights that are not quantised; auto: what the precision implies;
            float32: fp32 master weights under bf16 or fp16 autocast.
        adapter_dtype: of the trained adapters; auto: fp32 as PEFT makes them, but for
            bf16-pure and fp16-pure.
        bias: which biases of the base PEFT trains beside the adapters.
        use_rslora: scale adapters by the root of the rank; the bytes and the time are LoRA's.
        loraplus_lr_ratio: learning rate of B over that of A (LoRA+); so are they.
        quant_group_size: weights that share a scale in a GPTQ or AWQ checkpoint.
        compute_dtype: of products with 4-bit weights, `bnb_4bit_compute_dtype`; auto: what the
            precision implies.
        llm_int8_threshold: from where on bitsandbytes multiplies an input in 16 bit; 0: none.
        quantize_moe_experts: experts in one parameter are stored in 4 bit, too, and expanded a
            layer at a time, as Axolotl does.
        expandable_segments: setting of PyTorch's CUDA allocator.
        use_reentrant: kind of checkpointing; None: what this version of transformers does.
        libraries: (library, version) pairs where they are not the current ones.
        method_options: (name, value) pairs of what the method declares.
        trainer: a name registered in `whichlora.trainers`.
        trainer_options: (name, value) pairs of what the trainer declares.
        task: a name registered in `whichlora.tasks`; empty: what the model's type implies, or what
            the trainer is for.
        task_options: (name, value) pairs of what the task declares.
        parallel: the GPUs of the run, and how it is spread over them.
        serving: a name registered in `whichlora.serving`; of an engine with a pool, `batch_size`
            are the sequences that are asked for at once.
        serving_options: (name, value) pairs of what the engine declares.
        context: most tokens of a prompt and its answer; None for those of the run's own.
        shared_prompt_fraction: of the prompt, what all sequences begin with; an engine that caches
            prefixes keeps its keys and values once.
        request_rate: requests a second that arrive by chance; None where `batch_size` of them are
            under way at any time.
        length_spread: of an engine's requests, the share by which prompts and answers are longer
            or shorter, evenly by chance; 0 for all alike.
        images: of each row or prompt; the tokens that the language model reads of them are among
            `seq_len` and `prompt_len`.
        image_size: width and height of each in pixels, before anything resizes it.
        audios: clips of sound of each row or prompt, whose tokens are among them, too; of a model
            that transcribes there is always one.
        audio_seconds: how long each lasts.
        image_max_pixels: a larger image is shrunk to so many before its processor sees it; None
            for as it is.
        freeze_vision_tower: it gets no adapters and is not trained, whatever `target_modules` is.
    """

    model: str
    phase: Phase = "finetune"
    method: str = "lora"
    batch_size: int = 1
    seq_len: int = 2048
    target_len: int | None = None
    r: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.0
    target_modules: tuple[str, ...] = (ALL_LINEAR,)
    precision: Precision = "bf16"
    optimizer: AnyOptimizer = "adamw_torch_fused"
    gradient_checkpointing: bool | None = True
    gradient_accumulation_steps: int = 1
    attn: AttentionKernel = "sdpa"
    padding: Padding = "none"
    loss_head: LossHead = "hf"
    quant: Quant | None = None
    prepare_kbit: bool | None = None
    prompt_len: int = 512
    max_new_tokens: int = 128
    serve: Serve | None = None
    kv_cache: KvCache = "dynamic"
    cache_backend: CacheBackend = "quanto"
    cache_nbits: int = 4
    cache_group_size: int = 64
    cache_residual_length: int = 128
    use_reentrant: bool | None = None
    libraries: tuple[tuple[str, str], ...] = ()
    modules_to_save: tuple[str, ...] = ()
    base_dtype: BaseDtype = "auto"
    adapter_dtype: AdapterDtype = "auto"
    bias: Bias = "none"
    use_rslora: bool = False
    loraplus_lr_ratio: float = 1.0
    quant_group_size: int = 128
    expandable_segments: bool = False
    compute_dtype: ComputeDtype = "auto"
    llm_int8_threshold: float = INT8_THRESHOLD
    quantize_moe_experts: bool = False
    method_options: tuple[tuple[str, OptionValue], ...] = ()
    trainer: str = USUAL_TRAINER
    trainer_options: tuple[tuple[str, OptionValue], ...] = ()
    task: str = ""
    task_options: tuple[tuple[str, OptionValue], ...] = ()
    parallel: ParallelConfig = ONE_GPU
    serving: str = TRANSFORMERS
    serving_options: tuple[tuple[str, OptionValue], ...] = ()
    context: int | None = None
    shared_prompt_fraction: float = 0.0
    request_rate: float | None = None
    length_spread: float = USUAL_SPREAD
    images: int = 0
    image_size: tuple[int, int] = DEFAULT_IMAGE_SIZE
    image_max_pixels: int | None = None
    audios: int = 0
    audio_seconds: float = DEFAULT_AUDIO_SECONDS
    freeze_vision_tower: bool = False

    def __post_init__(self) -> None:
        self._check_names()
        self._check_load()
        self._check_choices()
        self._check_cache()
        # what "auto" becomes is checked again
        if self.base_dtype == "float32" and self.precision not in {"auto", *AUTOCAST_PRECISIONS}:
            raise ConfigError(
                f"base_dtype: float32 weights are for training under autocast, got precision "
                f"{self.precision}; use precision bf16 or fp16, or base_dtype auto"
            )
        if self.base_dtype == "float32" and (self.quant or "none") != "none":
            raise ConfigError(
                f"base_dtype: weights stored in {self.quant} are not float32; use quant none, or "
                "base_dtype auto"
            )
        if self.adapter_dtype == "bfloat16" and not self.precision.startswith(("bf16", "auto")):
            raise ConfigError(
                f"adapter_dtype: bfloat16 adapters need a bf16 precision, got {self.precision}; "
                "use precision bf16 or adapter_dtype float32"
            )
        if self.adapter_dtype == "bfloat16" and self.base_dtype == "float32":
            raise ConfigError(
                "adapter_dtype: PEFT makes adapters as wide as a float32 base, got bfloat16; use "
                "adapter_dtype auto, or base_dtype auto"
            )
        _at_least("concurrency" if self.has_engine else "batch_size", self.batch_size, 1)
        self._check_lengths()
        _at_least("r", self.r, 1, "; common values are 8, 16 and 64")
        _at_least("lora_alpha", self.lora_alpha, 1)
        _at_least(
            "quant_group_size", self.quant_group_size, 1, "; common values are 32, 64 and 128"
        )
        _at_least("gradient_accumulation_steps", self.gradient_accumulation_steps, 1)
        if not 0.0 <= self.lora_dropout < 1.0:
            raise ConfigError(
                f"lora_dropout: must be at least 0 and below 1, got {self.lora_dropout}"
            )
        if not 0.0 < self.loraplus_lr_ratio <= MOST_RATIO:
            raise ConfigError(
                f"loraplus_lr_ratio: must be above 0 and at most {MOST_RATIO}, got "
                f"{self.loraplus_lr_ratio}; 16 is usual"
            )
        _at_least("images", self.images, 0)
        _at_least("audios", self.audios, 0)
        for name in ("images", "audios"):
            if getattr(self, name) > MOST_IMAGES:
                raise ConfigError(
                    f"{name}: must be {MOST_IMAGES} or less, got {getattr(self, name)}"
                )
        if not 0 < self.audio_seconds <= MOST_SECONDS:
            raise ConfigError(
                f"audio_seconds: must be above 0 and at most {MOST_SECONDS}, got "
                f"{self.audio_seconds}"
            )
        image_sides(self.image_size)
        if self.image_max_pixels is not None:
            _at_least("image_max_pixels", self.image_max_pixels, 1, "; 589824 is 768x768")
        if not 0.0 <= self.llm_int8_threshold <= MOST_COUNT:
            raise ConfigError(
                f"llm_int8_threshold: must be from 0 to {MOST_COUNT}, got "
                f"{self.llm_int8_threshold}; 6 is usual, 0 looks for no outliers"
            )
        if not self.target_modules:
            raise ConfigError(
                "target_modules: is empty; name at least one layer, such as q_proj, or all-linear"
            )
        if self.libraries:
            Libraries.of(self.libraries)

    def _check_load(self) -> None:
        if not 0.0 <= self.shared_prompt_fraction <= 1.0:
            raise ConfigError(
                f"shared_prompt_fraction: must be from 0 to 1, got {self.shared_prompt_fraction}"
            )
        if self.request_rate is not None and not 0.0 < self.request_rate <= MOST_COUNT:
            raise ConfigError(
                f"request_rate: must be above 0 and at most {MOST_COUNT}, got {self.request_rate}"
            )
        if not 0.0 <= self.length_spread < 1.0:
            raise ConfigError(
                f"length_spread: must be from 0 to below 1, got {self.length_spread}; 0 is all "
                "requests alike"
            )

    def _check_names(self) -> None:
        """Names and switches, which come from files of others, too."""
        if self.model != "":  # the defaults of all settings are those of a run without one
            require_printable("model", self.model)
        require_printable("method", self.method)
        require_printable("trainer", self.trainer)
        require_printable("serving", self.serving)
        if self.task:
            require_printable("task", self.task)
        for name in ("target_modules", "modules_to_save"):
            for module in getattr(self, name):
                require_printable(name, module)
        for name in (
            "use_rslora",
            "expandable_segments",
            "quantize_moe_experts",
            "freeze_vision_tower",
        ):
            _switch(name, getattr(self, name))
        for name in ("gradient_checkpointing", "prepare_kbit", "use_reentrant"):
            if getattr(self, name) is not None:
                _switch(name, getattr(self, name))

    def _check_lengths(self) -> None:
        for name in ("seq_len", "target_len", "prompt_len", "max_new_tokens", "context"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)

    def _check_choices(self) -> None:
        for setting, accepted in _CHOICES.items():
            value = getattr(self, setting)
            if value is not None or setting not in ("quant", "serve"):
                _choice(setting, value, accepted)
        is_narrow = self.compute_dtype in ("bfloat16", "float16")
        if is_narrow and self.precision in FP32_PRECISIONS:
            raise ConfigError(
                f"compute_dtype: {self.compute_dtype} products of a {self.precision} run are not "
                "predicted; use a precision of 16 bit, or compute_dtype auto"
            )

    def _check_cache(self) -> None:
        if self.cache_nbits not in CACHE_NBITS:
            raise ConfigError(
                f"cache_nbits: {self.cache_nbits!r} is not accepted; give "
                f"{' or '.join(map(str, CACHE_NBITS))}"
            )
        _at_least("cache_group_size", self.cache_group_size, CACHE_GROUP_STEP)
        if self.cache_group_size % CACHE_GROUP_STEP:
            raise ConfigError(
                f"cache_group_size: {self.cache_group_size} can't be packed; give a multiple of "
                f"{CACHE_GROUP_STEP}, such as 64"
            )
        _at_least("cache_residual_length", self.cache_residual_length, 1)
        if self.cache_backend != "fp8":
            return
        grouped = ("cache_nbits", "cache_group_size", "cache_residual_length")
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        changed = [name for name in grouped if getattr(self, name) != defaults[name]]
        if changed:
            raise ConfigError(
                f"{changed[0]}: is not of cache_backend fp8, which has 8 bits and one scale per "
                "tensor; leave it out, or use quanto or hqq"
            )

    @property
    def product_dtype(self) -> str:
        """Dtype of the matrix products, as datasheets name it."""
        return self.precision[:4]

    @property
    def cache_format(self) -> CacheFormat | None:
        """How the key-value cache is quantised, if it is."""
        if self.kv_cache != "quantized":
            return None
        if self.cache_backend == "fp8":
            return CacheFormat(backend="fp8", nbits=8, group_size=None, residual_length=0)
        return CacheFormat(
            backend=self.cache_backend,
            nbits=self.cache_nbits,
            group_size=self.cache_group_size,
            residual_length=self.cache_residual_length,
        )

    @property
    def versions(self) -> Libraries:
        """Every library's version, the current one where the run names none."""
        return Libraries.of(self.libraries)

    @property
    def adds_to_gradients(self) -> bool:
        """Whether a backward finds gradients: of a micro-step before it, or zeros of a step.

        Strategies over several GPUs keep gradients in ways of their own.
        """
        of_steps = self.versions.zeroes_gradients and self.parallel.gpus == 1
        return of_steps or self.gradient_accumulation_steps > 1

    @property
    def has_engine(self) -> bool:
        """Whether an engine serves it, which has a pool and queues, in place of `generate`."""
        return self.serving != TRANSFORMERS

    @property
    def has_engine_kernels(self) -> bool:
        """Whether its forward is that of an engine, also of one that a trainer asks for answers."""
        return self.engine != TRANSFORMERS

    @property
    def engine(self) -> str:
        """Whose forward serves it: that of transformers, or of an engine with its own kernels."""
        return "vllm" if self.kv_cache == "vllm" else self.serving

    @property
    def longest_sequence(self) -> int:
        """The most tokens of a prompt and its answer."""
        return self.context or self.prompt_len + self.max_new_tokens

    @property
    def lengths(self) -> str:
        """Tokens of each sequence, of what is read and what is written."""
        if self.phase == "inference":
            return f"{self.prompt_len}+{self.max_new_tokens}"
        return str(self.seq_len) if self.target_len is None else f"{self.seq_len}+{self.target_len}"

    @property
    def trainer_optim(self) -> str:
        """The optimizer as `transformers.TrainingArguments` names it."""
        names = (name for name, ours in OPTIMIZER_NAMES.items() if ours == self.optimizer)
        return next(names, "adamw_torch")  # one that is handed to the Trainer has no name there

    @property
    def narrows_adapters(self) -> bool:
        """Whether adapters have the base's 16 bits: PEFT's `autocast_adapter_dtype=False`."""
        if self.adapter_dtype == "auto":
            return self.precision.endswith("-pure")
        return self.adapter_dtype == "bfloat16"

    def trainer_option(self, name: str) -> OptionValue | None:
        """The value of a trainer's option; None where the run does not say, and has no default."""
        return dict(self.trainer_options).get(name)

    def chosen(self) -> dict[str, Any]:
        """The settings that are not at their defaults, as JSON types: what names a record.

        A default is what a record without the setting means, so that one that is added names no
        record anew.
        """
        defaults = self.from_dict({"model": ""}).to_dict()
        chosen = self.to_dict().items()
        return {name: value for name, value in chosen if value not in (None, defaults.get(name))}

    def to_dict(self) -> dict[str, Any]:
        """Every setting as JSON types, in declaration order.

        `parallel` is there of several GPUs alone, `task` and options where there are any,
        `serving` and its own of an engine other than transformers.
        """
        values = dataclasses.asdict(self)
        del values["parallel"]
        if not self.task:
            del values["task"]
        for name in ("method_options", "trainer_options", "task_options"):
            pairs = values.pop(name)
            if pairs:
                values[name] = dict(pairs)
        del values["serving"], values["serving_options"], values["context"]
        if self.has_engine:
            values |= {"serving": self.serving, "serving_options": dict(self.serving_options)}
        if self.context is not None:
            values["context"] = self.context
        if not self.shared_prompt_fraction:  # an engine's own, too
            del values["shared_prompt_fraction"]
        if self.request_rate is None:
            del values["request_rate"]
        if self.length_spread == USUAL_SPREAD:
            del values["length_spread"]
        if not self.images:
            del values["images"], values["image_size"]
        else:
            values["image_size"] = list(self.image_size)
        if self.image_max_pixels is None:
            del values["image_max_pixels"]
        if not self.audios:
            del values["audios"], values["audio_seconds"]
        if not self.freeze_vision_tower:
            del values["freeze_vision_tower"]
        if self.compute_dtype == "auto":
            del values["compute_dtype"]
        if self.target_len is None:
            del values["target_len"]
        if self.parallel != ONE_GPU:
            values["parallel"] = self.parallel.to_dict()
        values["target_modules"] = list(self.target_modules)
        values["modules_to_save"] = list(self.modules_to_save)
        values["libraries"] = dict(self.libraries)
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`; settings that older records lack take their defaults.

        Raises:
            ConfigError: an unknown setting, or a value that is not accepted.
        """
        settings = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(values) - settings)
        if unknown:
            raise ConfigError(
                f"{unknown[0]}: is not a setting; known are {', '.join(sorted(settings))}"
            )
        fields = dict(values)
        fields.setdefault("serve", "merged")  # older records know no other form
        for name in ("target_modules", "modules_to_save"):
            if name in fields:
                if not isinstance(fields[name], list | tuple):
                    raise ConfigError(f"{name}: {fields[name]!r} is not a list of names")
                fields[name] = tuple(fields[name])
        for name in ("method_options", "trainer_options", "serving_options", "task_options"):
            if name in fields:
                if not isinstance(fields[name], Mapping):
                    raise ConfigError(f"{name}: {fields[name]!r} is not an object of settings")
                fields[name] = tuple(sorted(fields[name].items()))
        if "image_size" in fields:
            fields["image_size"] = image_sides(fields["image_size"])
        if "parallel" in fields:
            fields["parallel"] = ParallelConfig.from_dict(fields["parallel"])
        if "libraries" in fields:
            if not isinstance(fields["libraries"], Mapping):
                raise ConfigError(
                    f"libraries: {fields['libraries']!r} is not an object of versions"
                )
            fields["libraries"] = tuple(sorted(fields["libraries"].items()))
        return cls(**fields)
