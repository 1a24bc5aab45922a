"""The keys of a config file, their types and defaults."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainValidator,
    Tag,
    WithJsonSchema,
    create_model,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from whichlora.errors import ConfigError
from whichlora.methods import BUILT_IN, COMPARED
from whichlora.parallel import strategy_options
from whichlora.spec.options import Option
from whichlora.spec.parallel import MOST_GPUS
from whichlora.spec.plan import Collator, Keeping, Prefer, ProfilePolicy, TrainOn
from whichlora.spec.run import (
    MOST_COUNT,
    MOST_IMAGES,
    MOST_RATIO,
    MOST_SECONDS,
    AdapterDtype,
    AttentionKernel,
    BaseDtype,
    Bias,
    CacheBackend,
    ComputeDtype,
    KvCache,
    LossHead,
    Optimizer,
    Padding,
    Precision,
    Quant,
    RunConfig,
    Serve,
    image_sides,
    named_optimizer,
)
from whichlora.units import parse_bytes, parse_tokens

_RUN = RunConfig(model="any")  # one place for the defaults that `estimate` and `run` share
_KEEPING = Keeping()

MOST_TOKENS = 10**15
_MOST = 10**15  # more bytes or seconds than any machine has; keeps later arithmetic finite
_SECONDS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION_PART = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|min|h|d)(?![A-Za-z])", re.IGNORECASE)


class _OneOrMany:
    """A list setting that also takes one value alone."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        def as_tuple(value: Any) -> Any:
            if isinstance(value, Mapping):
                return value  # refused by the tuple schema with its own message
            return tuple(value) if isinstance(value, list) else (value,)

        return core_schema.no_info_before_validator_function(as_tuple, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        many = handler(schema)
        return {"anyOf": [many["items"], many]}


def _tokens(value: Any) -> Any:
    """A text such as 4k in tokens; whatever else stays as it is, for its own message."""
    if not isinstance(value, str):
        return value
    try:
        return parse_tokens(value)
    except ConfigError as error:
        raise PydanticCustomError("tokens", "is no number of tokens") from error


def _our_optimizer(value: Any) -> Any:
    """Our name of an optimizer of `TrainingArguments`; whatever else stays as it is."""
    try:
        return named_optimizer(value) if isinstance(value, str) else value
    except ConfigError as error:
        raise PydanticCustomError("optimizer", "is described by no formula here") from error


def _parse_size(value: Any) -> int:
    if isinstance(value, str) and not value.strip()[-1:].isdigit():
        try:
            size = parse_bytes(value)
        except (ConfigError, OverflowError):
            size = 0
        if 0 < size <= _MOST:
            return size
    raise PydanticCustomError("size", "is not a size with a unit")


def parse_seconds(value: Any) -> float:
    """Seconds of a duration with units, for pydantic."""
    total_s, end = 0.0, 0
    text = value.strip() if isinstance(value, str) else ""
    while part := _DURATION_PART.match(text, end):
        total_s += float(part[1]) * _SECONDS[part[2].lower()]
        end = part.end()
    if end < len(text) or not 0 < total_s <= _MOST:
        raise PydanticCustomError("duration", "is not a duration with a unit")
    return total_s


def _sides(text: str) -> str:
    try:
        image_sides(text)
    except ConfigError as error:
        raise PydanticCustomError("sides", "is no width and height") from error
    return text


def _seen(name: str) -> str:
    if not name.isprintable():
        raise PydanticCustomError("printable", "holds a character that can't be seen")
    return name


Count = Annotated[int, Field(ge=1, le=MOST_COUNT)]
Counts = Annotated[tuple[Count, ...], Field(min_length=1), _OneOrMany()]
_Length = BeforeValidator(_tokens)
Length = Annotated[Count, _Length]
Lengths = Annotated[tuple[Length, ...], Field(min_length=1), _OneOrMany()]
GpuCounts = Annotated[
    tuple[Annotated[int, Field(ge=1, le=MOST_GPUS)], ...], Field(min_length=1), _OneOrMany()
]
Positive = Annotated[float, Field(gt=0, le=MOST_RATIO, allow_inf_nan=False)]
Gigabytes = Annotated[float, Field(ge=1e-9, le=MOST_RATIO, allow_inf_nan=False)]
Text = Annotated[str, Field(pattern=r"\S")]
Name = Annotated[Text, AfterValidator(_seen)]
Version = Annotated[str, Field(pattern=r"^\d+(\.\d+)*$")]
Fractions = Annotated[tuple[Positive, ...], Field(min_length=1), _OneOrMany()]
Texts = Annotated[tuple[Text, ...], Field(min_length=1), _OneOrMany()]
# "gpu: 4090" is a number to YAML
GpuName = Annotated[
    Name,
    BeforeValidator(lambda value: str(value) if type(value) is int else value),
    WithJsonSchema({"type": ["string", "integer"], "pattern": r"\S"}),
]
GpuNames = Annotated[tuple[GpuName, ...], Field(min_length=1), _OneOrMany()]
_TextKeys = BeforeValidator(
    lambda value: (
        {str(key) if type(key) is int else key: entry for key, entry in value.items()}
        if isinstance(value, Mapping)
        else value
    )
)
Names = Annotated[tuple[Name, ...], Field(min_length=1), _OneOrMany()]
_OptimizerName = Annotated[Optimizer, BeforeValidator(_our_optimizer)]
Optimizers = Annotated[tuple[_OptimizerName, ...], Field(min_length=1), _OneOrMany()]
AttentionKernels = Annotated[tuple[AttentionKernel, ...], Field(min_length=1), _OneOrMany()]
Switches = Annotated[tuple[bool, ...], Field(min_length=1), _OneOrMany()]
Size = Annotated[
    int,
    PlainValidator(_parse_size),
    WithJsonSchema({"type": "string", "examples": ["24GiB", "24GB"]}),
]
Duration = Annotated[
    float,
    PlainValidator(parse_seconds),
    WithJsonSchema({"type": "string", "examples": ["20ms", "90s", "2h 30min"]}),
]
ImageSize = Annotated[
    str, AfterValidator(_sides), WithJsonSchema({"type": "string", "examples": ["1024x768"]})
]
OptionValues = Annotated[dict[Name, Any], _TextKeys]  # who declares an option checks its value
# The tags become parts of an error's path; no key looks like them, so the mapper passes them over.
Tokenizers = Annotated[
    Annotated[Names, Tag("[]")] | Annotated[dict[Name, Name], Tag("{}")],
    Discriminator(lambda value: "{}" if isinstance(value, Mapping) else "[]"),
]


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True
    )


class Stage1(_Section):
    """Inference: the candidates, and what a model must meet to go on to fine-tuning."""

    model_names: Names | None = None
    """Models to choose from; without them and without `models`, a default list."""
    tokenizers: Tokenizers | None = None
    """A list parallel to the models, or a mapping from model to tokenizer."""
    batch_size: Counts = (1, 2, 4, 8, 16)
    """Sequences generated at once."""
    prefill_length: Lengths = (_RUN.prompt_len,)
    """Tokens of the prompt."""
    tokens_to_generate: Lengths = (_RUN.max_new_tokens,)
    """New tokens per sequence."""
    num_runs: Count | None = None
    """Measured generations per profiled candidate; without it, `num_batches`."""
    time_per_token_ms: Positive | None = None
    """Limit: time of the whole generation over the generated tokens of all sequences."""
    time_per_token: Duration | None = None
    """The same limit with a unit."""
    peak_memory_gb: Gigabytes | None = None
    """Limit on the device memory, in GB of 10**9 bytes."""
    peak_memory: Size | None = None
    """The same limit with a unit; 24GiB and 24GB are different amounts."""
    concurrency: Count | None = None
    """Limit of a serving engine: sequences that run at once, in place of batch_size."""
    context: Length | None = None
    """Limit of a serving engine: tokens of a prompt and its answer; without it, those asked for."""
    shared_prompt_fraction: Annotated[float, Field(ge=0, le=1)] = _RUN.shared_prompt_fraction
    """Share of the prompt that all sequences begin with, such as a system prompt."""
    length_spread: Annotated[float, Field(ge=0, lt=1)] = _RUN.length_spread
    """Share by which prompts and answers of an engine's requests vary in length."""
    ttft_ms: Positive | None = None
    """Limit of a serving engine: time to the first token."""
    ttft: Duration | None = None
    """The same limit with a unit."""
    tpot_ms: Positive | None = None
    """Limit of a serving engine: time of each further token of one sequence."""
    tpot: Duration | None = None
    """The same limit with a unit."""
    requests_per_s: Positive | None = None
    """Limit of a serving engine: the fewest requests that it answers."""


class Stage2(_Section):
    """Fine-tuning: the batch sizes, and what the run must meet."""

    batch_size: Counts = (1, 2, 4, 8, 16)
    """Sequences per device per micro-step."""
    total_time_mins: Positive | None = None
    """Limit on the whole fine-tuning, in minutes."""
    total_time: Duration | None = None
    """The same limit with a unit."""
    peak_memory_gb: Gigabytes | None = None
    """Limit on the device memory, in GB of 10**9 bytes."""
    peak_memory: Size | None = None
    """The same limit with a unit; 24GiB and 24GB are different amounts."""


class Dataset(_Section):
    """Where the training text comes from, or only how much of it there is."""

    path: Name | None = None
    """A JSONL, CSV, Parquet or text file, a hub dataset, `module:Class` or `file.py:Class`."""
    validation_path: Name | None = None
    """A file with the rows to evaluate on; without it, a share of the rows of `path`."""
    template: Text | None = None
    """A row as text, such as '{instruction} {response}'; without it, columns are recognised."""
    text_column: Name | None = None
    """The column that holds the text."""
    messages_column: Name | None = None
    """The column that holds chat messages: role and content, or from and value."""
    prompt_column: Name | None = None
    """The column that holds the question, which becomes the user's message."""
    completion_column: Name | None = None
    """The column that holds the answer to learn, which becomes the assistant's message."""
    chosen_column: Name | None = None
    """The column that holds the better of two answers, for trainers on pairs."""
    rejected_column: Name | None = None
    """The column that holds the worse of two answers."""
    label_column: Name | None = None
    """The column that tells whether an answer is wanted, for trainers on labelled answers."""
    images_column: Name | None = None
    """The column that holds the paths of images, beside messages or a question."""
    audio_column: Name | None = None
    """The column that holds a clip beside its transcript, or clips beside messages."""
    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Share of the rows kept for validation where the data has no such split."""
    split: Name | None = None
    """Training split of a hub dataset."""
    config_name: Name | None = None
    """Configuration of a hub dataset."""
    tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)] | None = None
    """Tokens in the training split, for planning without the data."""
    samples: Annotated[int, Field(ge=1, le=10**7)] | None = None
    """Samples in the training split, for planning without the data."""
    mean_tokens: Annotated[float, Field(ge=1, le=10**8), _Length] | None = None
    """Mean tokens of a sample, in place of `tokens`."""
    p95_tokens: Length | None = None
    """Tokens that 95 % of the samples do not exceed; without it, as public instruction data."""
    max_tokens: Length | None = None
    """Tokens of the longest sample; without it, one may be as long as sequence_length."""


class GpuLimits(_Section):
    """Limits on one type of GPU, in place of those of the stages."""

    time_per_token: Duration | None = None
    """Inference: the whole generation over the generated tokens of all sequences."""
    inference_memory: Size | None = None
    """Device memory of inference."""
    ttft: Duration | None = None
    """A serving engine: time to the first token."""
    tpot: Duration | None = None
    """A serving engine: time of each further token of one sequence."""
    requests_per_s: Positive | None = None
    """A serving engine: the fewest requests that it answers."""
    total_time: Duration | None = None
    """The whole fine-tuning."""
    finetune_memory: Size | None = None
    """Device memory of fine-tuning."""


class Slurm(_Section):
    """How `whichlora slurm` asks the cluster; every key may be left out."""

    account: Text | None = None
    """Account that the jobs are charged to."""
    partition: Texts = ()
    """Partitions to look at and submit to; without it, all."""
    clusters: Texts = ()
    """Clusters of a multi-cluster site; without it, the one that sbatch uses."""
    merge_partition: Text | None = None
    """Partition of the merge job, which needs no GPU; without it, the default one."""
    qos: Text | None = None
    time_limit: Duration | None = None
    """Time limit of every job; without it, the predicted time of the longest candidate."""
    startup_time: Duration = Field(default="10min", validate_default=True)
    """What a job may take to load the libraries, on top of the predicted time."""
    cpus_per_task: Count = 4
    memory: Size | None = None
    """Host memory of a job; without it, what the cluster gives."""
    max_parallel: Count | None = None
    """Array tasks that run at once."""
    modules: Texts = ()
    """Modules to load, in this order."""
    environment: dict[Name, str] = Field(default_factory=dict)
    """Environment variables to export."""
    setup: Texts = ()
    """Shell lines that run before the measurement, such as 'source venv/bin/activate'."""
    options: Texts = ()
    """Further options of sbatch, such as '--reservation=class'."""
    command: Text | None = None
    """How a node calls this program; without it, this Python with -m whichlora."""
    gpus: dict[Name, GpuName] = Field(default_factory=dict)
    """Slurm's GPU type or a feature to a key of `whichlora gpus`, where its name does not tell."""
    pretend_memory: Size | None = None
    """For tests of a cluster without GPUs: measure on the CPU, and record it as the GPU asked."""


class PlanFile(_Section):
    """A WhichLoRA run: models, data, limits and what may be profiled."""

    dataset: Annotated[
        Dataset,
        BeforeValidator(lambda value: {"path": value} if isinstance(value, str) else value),
    ]
    """A path or hub id, or a mapping with the details."""
    stage1_profile: Stage1 = Field(default_factory=Stage1)
    stage2_profile: Stage2 = Field(default_factory=Stage2)
    models: Names | None = None
    """Models to choose from: hub ids, aliases, or local folders ('./my-model')."""
    gpu: GpuNames = ("auto",)
    """A key of `whichlora gpus`, a device name, cpu, or auto for the GPU of this machine; of
    several, each is answered for and the best one recommended."""
    gpus: GpuCounts | None = None
    """How many GPUs share a fine-tuning, over all nodes; of several numbers the best is found."""
    nodes: GpuCounts | None = None
    """Machines, which have equally many of the GPUs."""
    parallel: Names | None = None
    """How GPUs share a fine-tuning: names of strategies, two joined with +, or auto for all."""
    global_batch_size: Count | None = None
    """Sequences per optimizer step over all GPUs, in place of gradient_accumulation_steps."""
    interconnect: Name | None = None
    """Links between the GPUs: a known machine, or a bandwidth such as 25GB/s of each GPU."""
    host_memory: Size | None = None
    """Host memory of each node, which what is offloaded must fit in."""
    epochs: Positive = 1.0
    """Passes over the training split."""
    train_on: TrainOn = "completions"
    """What is learned: completions and the assistant's turns where the data has them, or all."""
    save_steps: Annotated[int, Field(ge=0, le=10**9)] | None = None
    """Optimizer steps between checkpoints; without it, a tenth of the run; 0 writes none."""
    save_total_limit: Count = _KEEPING.save_total_limit
    """Checkpoints that are kept, the newest."""
    eval_steps: Annotated[int, Field(ge=0, le=10**9)] | None = None
    """Optimizer steps between evaluations; without it, each epoch; 0 for none."""
    collator: Collator = "longest"
    """How training batches are made: padded to their longest, of similar lengths, or packed."""
    sequence_length: Annotated[int, Field(ge=2, le=MOST_COUNT), _Length] = _RUN.seq_len
    """Longest training sequence in tokens; longer ones are truncated."""
    target_length: Length | None = _RUN.target_len
    """Of an encoder-decoder, tokens that the decoder learns to write; sequence_length are those
    that the encoder reads. Without it, as many."""
    methods: Names = tuple(name for name in COMPARED if not BUILT_IN[name].trains_base)
    """Fine-tuning methods to compare."""
    method_options: OptionValues | None = None
    """Settings of the method's own, such as {init_lora_weights: pissa} of lora."""
    ranks: Counts = (_RUN.r,)
    """Ranks of the adapters."""
    target_modules: Names = _RUN.target_modules
    """Layers with an adapter: all-linear, attention, or names such as q_proj."""
    modules_to_save: Annotated[tuple[Name, ...], _OneOrMany()] = ()
    """Modules trained as a whole beside the adapters, such as embed_tokens and lm_head."""
    base_dtype: BaseDtype = _RUN.base_dtype
    """Dtype of the base weights: what the precision implies, or fp32 under 16-bit autocast."""
    adapter_dtype: AdapterDtype = _RUN.adapter_dtype
    """Dtype of the adapters: float32 as PEFT makes them, or the bfloat16 of the base."""
    compute_dtype: ComputeDtype = _RUN.compute_dtype
    """Dtype of products with 4-bit weights: what the precision implies, or the one named."""
    bias: Bias = _RUN.bias
    """Biases of the base that are trained beside the adapters, as PEFT names them."""
    use_rslora: bool = _RUN.use_rslora
    """Scale adapters by the root of the rank."""
    loraplus_lr_ratio: Positive = _RUN.loraplus_lr_ratio
    """LoRA+: learning rate of B over that of A."""
    lora_alpha: Count | None = None
    """Scale of the adapters; without it, twice the rank."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = _RUN.lora_dropout
    precision: Precision = "auto"
    """Base weights, adapters and autocast; auto: bf16, or fp16 where the GPU has no bf16."""
    optimizer: Optimizers = ("adamw_torch_fused",)
    """Optimizers to compare."""
    gradient_checkpointing: Switches | None = None
    """Whether activations are computed again in the backward, or both to compare; without it, where
    the model has that."""
    use_reentrant: bool | None = None
    """Kind of checkpointing; without it, what this version of transformers does."""
    gradient_accumulation_steps: Count = _RUN.gradient_accumulation_steps
    attn: AttentionKernels = (_RUN.attn,)
    """Attention kernels to compare, in both stages."""
    padding: Padding = _RUN.padding
    """Whether training batches hold padding also where lengths do not differ, as of a batch of
    one."""
    loss_head: LossHead = _RUN.loss_head
    trainer: Name = _RUN.trainer
    """Who runs the training steps."""
    task: str = _RUN.task
    """What the model learns in place of what its type implies: sequence-classification, …"""
    task_options: OptionValues | None = None
    """Settings of the task's own, such as {num_labels: 3}."""
    trainer_options: OptionValues | None = None
    """Settings of the trainer's own, such as {beta: 0.1} of dpo."""
    quant: Quant | None = None
    """Storage of the base weights in both stages; without it, the method decides."""
    serve: Serve | Quant | None = None
    """How stage 1 judges a model: as-trained (the base as it was trained on, with its adapter),
    merged (16 bit), or merged in a storage; without it, as each method says."""
    serving: Name = _RUN.serving
    """Who serves the model: transformers' generate, or a serving engine."""
    serving_options: OptionValues | None = None
    """Settings of the engine's own, such as {gpu_memory_utilization: 0.9} of vllm."""
    serving_version: Version | None = None
    """Release of the engine; without it, the one that its file was read from."""
    quant_group_size: Count = _RUN.quant_group_size
    """Weights that share a scale in a GPTQ or AWQ checkpoint."""
    images: Annotated[int, Field(ge=0, le=MOST_IMAGES)] = _RUN.images
    """Images of each row and prompt; their tokens are among sequence_length and prefill_length."""
    image_size: ImageSize = "x".join(map(str, _RUN.image_size))
    """Width and height of each image in pixels, before anything resizes it: 1024x768."""
    image_max_pixels: Annotated[int, Field(ge=1, le=MOST_COUNT)] | None = _RUN.image_max_pixels
    """A larger image is shrunk to so many pixels before its processor sees it."""
    audios: Annotated[int, Field(ge=0, le=MOST_IMAGES)] = _RUN.audios
    """Clips of sound of each row and prompt; their tokens are among the lengths, too."""
    audio_seconds: Annotated[float, Field(gt=0, le=MOST_SECONDS)] = _RUN.audio_seconds
    """How long each clip lasts."""
    freeze_vision_tower: bool = _RUN.freeze_vision_tower
    """Whether the vision tower gets no adapters and is not trained."""
    expandable_segments: bool = _RUN.expandable_segments
    """PyTorch's allocator joins segments, as with PYTORCH_ALLOC_CONF=expandable_segments:True."""
    kv_cache: KvCache = _RUN.kv_cache
    cache_backend: CacheBackend = _RUN.cache_backend
    """Quantiser of kv_cache: quantized."""
    cache_nbits: Literal[4, 2] = 4
    """Bits of a quantised cache."""
    cache_group_size: Count = _RUN.cache_group_size
    """Elements of a quantised cache that share a scale."""
    cache_residual_length: Length = _RUN.cache_residual_length
    """New tokens that a quantised cache gathers in full width."""
    learning_rate: Annotated[float, Field(gt=0, le=1)] | None = None
    """Without it, the usual one of the winner's method and trainer."""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    gpu_limits: Annotated[dict[Name, GpuLimits], _TextKeys] | None = None
    """Limits by GPU, where they differ from those of the stages."""
    prefer: Prefer = "size"
    """What ranks the candidates that meet the limits; order takes that of models, best first."""
    gpu_prices: Annotated[dict[Name, Positive], _TextKeys] | None = None
    """Price of an hour by GPU, in any currency; without it, that of the price table."""
    prices: Name | None = None
    """A CSV file of prices that come before the table: columns gpu and usd_per_hour."""
    quality: Name | None = None
    """A CSV file of scores, for prefer: quality: columns model and score, the higher the better."""
    country: Name | None = None
    """Where it runs: its electricity tells the CO2."""
    confidence: Annotated[float, Field(ge=0.5, lt=1)] = 0.95
    """How sure the winner must be before the search ends."""
    max_profile_runs: Count | None = None
    """Most candidates to profile."""
    max_profile_time: Duration | None = None
    """Device time after which no further candidate is profiled."""
    profile: ProfilePolicy = "frontier"
    """What to measure: nothing (a dry run), what could change the answer, or every candidate."""
    num_batches: Count = 5
    """Measured batches per profiled candidate; up to twice as many until their mean is known."""
    profile_timeout: Duration = Field(default="10min", validate_default=True)
    """Device time after which one profile is stopped."""
    weights: Literal["pretrained", "random"] = "pretrained"
    """Random weights try the whole path where nothing can be downloaded."""
    train: bool = False
    """Run the winning job at the end."""
    trust_remote_code: bool = False
    """Let the models and datasets of the hub run their own code."""
    output_dir: Name | None = None
    """Folder of the results; without it, runs/<name of this file> in the current folder."""
    calibration_dir: Name | None = None
    """Folder of the measurements; without it, the user's data folder."""
    slurm: Slurm = Field(default_factory=Slurm)


@cache
def plan_file() -> type[PlanFile]:
    """`PlanFile` with a key for every option that a parallel strategy declares."""
    fields: dict[str, Any] = {
        name: (_values_of(options) | None, Field(default=None, description=options[0].summary))
        for name, options in strategy_options().items()
    }
    return create_model("PlanFile", __base__=PlanFile, **fields)


def _values_of(options: tuple[Option, ...]) -> Any:
    """What a key takes that these options share; a list is searched over, unless it is one value.

    A choice that is a number may be written as one.
    """
    default = options[0].default
    choices = tuple(dict.fromkeys(choice for option in options for choice in option.choices))
    if not choices:
        number = Fractions if isinstance(default, float) else Counts
        return Switches if isinstance(default, bool) else number
    accepted: Any = cast("Any", Literal).__getitem__(choices)
    as_text = BeforeValidator(lambda value: str(value) if type(value) is int else value)
    many: Any = cast("Any", tuple).__class_getitem__((Annotated[accepted, as_text], ...))
    return Annotated[many, Field(min_length=1), _OneOrMany()]


@cache
def json_schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of a config file: accepted values and names for messages."""
    schema = plan_file().model_json_schema()
    schema["properties"]["dataset"] = {
        "description": schema["properties"]["dataset"].get("description", ""),
        "anyOf": [
            {"type": "string", "examples": ["a path or dataset id"]},
            {"$ref": "#/$defs/Dataset"},
        ],
    }
    clean: dict[str, Any] = _without_null(schema)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | clean


def _without_null(schema: Any) -> Any:
    """`schema` without the null of optional settings: an empty value is refused everywhere.

    `oneOf`, which pydantic writes for tagged choices, becomes `anyOf`, so that readers of the
    schema know one way to say a choice.
    """
    if isinstance(schema, list):
        return [_without_null(option) for option in schema if option != {"type": "null"}]
    if not isinstance(schema, dict):
        return schema
    clean = {
        "anyOf" if key == "oneOf" else key: _without_null(value)
        for key, value in schema.items()
        if not (key == "default" and value is None)
    }
    options = clean.get("anyOf", [])
    return (options[0] | _omit(clean, "anyOf")) if len(options) == 1 else clean


def _omit(mapping: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in mapping.items() if name != key}
