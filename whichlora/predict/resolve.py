"""A run → `ResolvedRun`: every default filled in, and refused where settings exclude each other."""

from __future__ import annotations

from dataclasses import dataclass, replace

from whichlora.errors import ConfigError
from whichlora.families import without_dropout
from whichlora.families.experts import with_expert_modules, with_named_experts
from whichlora.families.gemma import without_caps
from whichlora.memory.quantised_cache import check_quantisable
from whichlora.methods import BUILT_IN, Method, get_method, with_defaults
from whichlora.parallel import get_strategy, list_strategies
from whichlora.parallel.layout import Layout
from whichlora.predict.defaults import with_open_settings, with_precision
from whichlora.predict.images import with_images, with_lengths
from whichlora.serving import get_engine, list_engines
from whichlora.serving.base import Engine, Served, Start
from whichlora.serving.scheduler import MOST_CLIENTS
from whichlora.spec.architecture import ModelSpec, parts_of, with_source_len
from whichlora.spec.backends.cuda import ASSUMED_CAPABILITY, FLASH_CAPABILITY
from whichlora.spec.checkpoint import (
    FP8_BLOCK,
    LOADED_AS_STORED,
    gguf_type,
    has_fp8_blocks,
    is_gguf,
    is_mixed,
    packed_experts,
    refuses_bitsandbytes,
    stored_group,
    stored_quant,
    with_unpacked,
)
from whichlora.spec.dtypes import Dtypes, is_quantised, resolve_dtypes
from whichlora.spec.float_blocks import FLOAT_BLOCKS
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.kernels import NO_KERNELS
from whichlora.spec.loss_heads import LOSS_HEADS
from whichlora.spec.numeric import Count, is_plain
from whichlora.spec.options import by_own_names
from whichlora.spec.parallel import ONE_DEVICE, ParallelConfig, micro_steps
from whichlora.spec.run import (
    ALL_LINEAR,
    BNB_QUANTS,
    CHECKPOINT_QUANTS,
    ENGINE_QUANTS,
    FOUR_BIT_BNB,
    FP32_PRECISIONS,
    PACKED_QUANTS,
    TRANSFORMERS,
    USUAL_SPREAD,
    RunConfig,
)
from whichlora.spec.targets import (
    PATTERN,
    adapted_linears,
    adapts_head,
    asked_names,
    check_saved_modules,
    resolve_targets,
    unmatched_targets,
)
from whichlora.spec.wide_modules import with_wide_modules
from whichlora.symbolic.kernels import runs_efficient
from whichlora.symbolic.layer import result_bytes
from whichlora.tasks import Task, task_of
from whichlora.trainers import Trainer, get_trainer

# Setting, value, what computes it, and the least compute capability that has kernels for.
# Source: installation pages of bitsandbytes 0.50 and vLLM; README of Triton, the language of
# Liger's and unsloth's kernels.
_TRITON = 7.0
MXFP4_CAPABILITY = 7.5  # transformers 5.23 `Mxfp4HfQuantizer.validate_environment`
_LEAST_CAPABILITY = (
    ("quant", "int8", "bitsandbytes' LLM.int8()", 7.5, "nf4"),
    ("quant", "mxfp4", "transformers' Mxfp4GptOssExperts", MXFP4_CAPABILITY, "none"),
    ("loss_head", "liger", "Triton", _TRITON, "hf"),
    ("loss_head", "unsloth", "Triton", _TRITON, "hf"),
    ("kv_cache", "vllm", "vLLM", 7.0, "dynamic"),
)
DYNAMIC = "dynamic"  # the cache of a run that names none


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRun:
    """A run with every default resolved against its model, method and device.

    Args:
        engine: who serves it, of an inference.
        layout: the strategies that spread it over several GPUs; None on one.
    """

    model: ModelSpec
    run: RunConfig
    gpu: GpuSpec
    method: Method
    trainer: Trainer
    dtypes: Dtypes
    targets: tuple[str, ...]
    engine: Engine
    layout: Layout | None = None

    @property
    def served(self) -> Served:
        """The same as an engine is asked to serve it.

        It reads the codes of every expert as a checkpoint of GPTQ or AWQ has them, also where
        transformers keeps all experts in one parameter.
        Source: vLLM 0.6.3 layers/quantization/gptq_marlin.py `GPTQMarlinMoEMethod`, awq_marlin.py
        `AWQMoEMethod`; SGLang 0.5.23 layers/quantization/gptq/gptq.py, awq/awq.py.
        """
        packs = self.run.quant in CHECKPOINT_QUANTS and self.engine.reads_checkpoints
        return Served(
            model=self.model,
            run=self.run,
            dtypes=replace(self.dtypes, quantises_experts=True) if packs else self.dtypes,
            method=self.method,
            gpu=self.gpu,
            targets=self.targets,
            options=self.engine.filled(self.run),
            libraries=self.engine.libraries(self.run),
            engine=self.engine,
        )

    @property
    def num_sequences(self) -> int:
        """Of one forward: a pair of answers is two."""
        training = self.run.phase == "finetune"
        return self.run.batch_size * (self.trainer.sequences(self.run) if training else 1)

    @property
    def row_tokens(self) -> int:
        """Of a training's longest row as the layers see it."""
        return self.run.seq_len + self.method.virtual_tokens

    def at_length(self, seq_len: Count) -> tuple[ModelSpec, Count]:
        """The model of a batch whose rows have `seq_len` tokens, and the tokens of its last stack.

        An encoder reads those of the rows; `ModelSpec.target_len` says how many a decoder writes.
        Where both differ, all rows of an array have the longest source: an upper bound of what
        `predict.of_each_source` takes apart.
        """
        target_len = self.model.target_len(self.run.target_len, seq_len)
        if target_len is None:
            return self.model, seq_len
        longest = seq_len if is_plain(seq_len) else seq_len.max()
        return with_source_len(self.model, int(longest)), target_len

    @property
    def has_pool(self) -> bool:
        """Whether an engine takes all its memory when it starts, whatever the requests are."""
        return self.run.phase == "inference" and self.engine.start is not None

    @property
    def has_adapters(self) -> bool:
        """Whether the run holds adapters beside the base: it trains them, or serves them so."""
        return bool(self.targets)

    @property
    def peft_targets(self) -> str | tuple[str, ...]:
        """PEFT's `target_modules`: its word for all linears, which includes experts, or names."""
        by_name = self.method.find_targets is not None or self.method.names_targets
        names = asked_names(self.model, self.targets)
        if self.run.target_modules != (ALL_LINEAR,) or by_name:
            return names
        if any(linear.is_refused for layer, _ in self.model.layers() for linear in layer.linears):
            return names
        task, head = task_of(self.run), self.model.label_head
        copied_whole = head is not None and head.transform is not None and head.transform.in_head
        if task is not None and (task.linears_by_name or copied_whole):
            return names
        every = resolve_targets(self.model, (ALL_LINEAR,), modules_only=False)
        return ALL_LINEAR if set(every) == set(self.targets) else names

    @property
    def passed_over(self) -> tuple[str, ...]:
        """Names of `target_modules` that no layer has."""
        if not self.targets or self.method.find_targets is not None:
            return ()
        modules_only = _adapts_modules_only(self.run, self.method)
        return unmatched_targets(self.model, self.run.target_modules, modules_only=modules_only)

    @property
    def size_names(self) -> tuple[str, ...]:
        """Settings that formulas also take as arrays, so that many runs are counted at once."""
        if self.run.phase == "finetune":
            return ("batch_size", "seq_len", "r")
        return ("batch_size", "prompt_len", "max_new_tokens", "r")

    @property
    def at_once(self) -> int:
        """Micro-batches that are computed at the same time."""
        return 1 if self.layout is None else self.layout.data_parallel_size

    @property
    def micro_batches(self) -> int:
        """Of one optimizer step, over all GPUs."""
        return self.at_once * self.run.gradient_accumulation_steps

    @property
    def dtype(self) -> str:
        """Dtype of the matrix products, as the datasheet names it."""
        return self.run.product_dtype


def resolve(model: ModelSpec, run: RunConfig, gpu: GpuSpec) -> ResolvedRun:
    """Fill in what the method, the model and the device decide.

    Raises:
        ConfigError: settings that exclude each other.
    """
    method = get_method(run.method)
    run = _filled(model, run, gpu, method)
    trainer = get_trainer(run.trainer)
    method = method.of(run)
    training = run.phase == "finetune"
    if training:
        model = _trained_model(model, run, trainer)
        run = replace(run, loss_head=trainer.loss_of(run, model.model_type))
        _check_target(model, run)
    task = task_of(run)
    if task is not None:
        if not training:
            _check_scoring(run, task)
        model = task.prepare(model, run)
    if run.versions.experts_are_modules:
        model = with_expert_modules(model)
    if run.attn.startswith("sdpa") and run.versions.sdpa_leaves_out_caps:
        model = without_caps(model, always_masked=run.versions.masks_caps_always)
    if not training:
        _check_form(run, method)
    model = method.with_model(with_images(model, run, trainer), run)
    _check_experts(model, run)
    _check_storage(model, run, gpu)
    _check_attention(model, run, gpu)
    _check_device(run, gpu)
    if run.quant in ENGINE_QUANTS:
        readers = _engines_that_serve(run.quant)
        if training or run.serving not in readers:
            raise ConfigError(
                f"quant: {run.quant} is how {' or '.join(readers)} serve weights; give serving one "
                "of them, or quant none"
            )
    model = _as_checkpoint(model, run.quant)
    if not training and run.cache_format is not None:
        check_quantisable(model, run.cache_format)
    targets: tuple[str, ...] = ()
    if not method.trains_base and (training or run.serve == "as-trained"):
        modules_only = _adapts_modules_only(run, method)
        if method.find_targets is not None:
            targets = method.find_targets(model, run.target_modules)
        else:
            targets = resolve_targets(model, run.target_modules, modules_only=modules_only)
            if any(target.startswith(PATTERN) for target in run.target_modules):
                run = replace(run, target_modules=targets)  # which a library is told
        check_saved_modules(model, run.modules_to_save)
        _check_adapted(model, run, method, targets)
    dtypes = _dtypes_of(model, run, gpu, method, trainer)
    if model.tower is not None and model.tower.masks_text == "all" and dtypes.uses_sdpa:
        dtypes = replace(dtypes, padded=True)
    if training and method.prefix_tokens:  # more keys than queries, which a mask tells apart
        dtypes = replace(dtypes, padded=True, prefix_tokens=method.prefix_tokens)
    dtypes = _with_stream(model, targets, dtypes, method)
    _check_efficient(model, run, gpu, dtypes)
    _check_trained(model, run, dtypes)
    _check_clamped(model, run, dtypes)
    _check_cast(model, run, dtypes)
    run, layout = spread(run)
    job = ResolvedRun(
        model=model,
        run=run,
        gpu=gpu,
        method=method,
        trainer=trainer,
        dtypes=dtypes,
        targets=targets,
        engine=get_engine(run.serving),
        layout=layout,
    )
    _check_serving(job)
    if not gpu.beside or job.engine.start is None:
        return job
    return of_fullest_card(job, job.engine.start(job.served))


def _as_checkpoint(model: ModelSpec, quant: str | None) -> ModelSpec:
    """`model` whose matrices know which of them its checkpoint in `quant` leaves in 16 bit."""
    if quant in PACKED_QUANTS or quant == stored_quant(model.config) == "fp8":
        return with_unpacked(model)
    is_stored_so = quant in BNB_QUANTS and stored_quant(model.config) in BNB_QUANTS
    return with_wide_modules(model) if is_stored_so else model


def of_fullest_card(job: ResolvedRun, start: Start) -> ResolvedRun:
    """`job` on that of unequal cards which its engine fills the most when it starts."""
    cards = job.gpu.beside
    if not cards:
        return job
    return replace(job, gpu=replace(cards[max(0, start.stage - 1)], beside=cards))


def _check_form(run: RunConfig, method: Method) -> None:
    """Refuse a form in which the method's model can't be served, or is not predicted."""
    if run.serve == "merged" and not (method.merges or method.trains_base):
        raise ConfigError(
            f"serve: what {method.name} trains can't be merged into weights; use as-trained"
        )
    if run.serve == "as-trained" and method.copies_table:
        raise ConfigError(
            f"serve: {method.name} copies the token table in every forward, which is not "
            "predicted; use merged"
        )


def _check_adapted(
    model: ModelSpec, run: RunConfig, method: Method, targets: tuple[str, ...]
) -> None:
    """Refuse a matrix that PEFT's code of the method can't adapt."""
    own_loop = bool(method.after_update or method.find_targets)
    is_shared = bool(method.shared_tensors(adapted_linears(model, targets), run.r))
    if run.phase == "finetune" and (own_loop or is_shared) and run.parallel.gpus > 1:
        raise ConfigError(
            f"method: {method.name} is predicted on one GPU, got gpus {run.parallel.gpus}; use "
            "method lora"
        )
    if method.find_targets is not None and (model.label_head or model.pooling or model.tower):
        raise ConfigError(
            f"method: {method.name} is predicted for rows of text and models that write them; use "
            "method lora, or leave task and images out"
        )
    for linear, _ in adapted_linears(model, targets):
        reason = method.refuses(linear, run.quant or "none")
        if reason:
            raise ConfigError(f"method: {method.name} of {linear.name}: {reason}")
    if adapts_head(model, targets):
        _check_adapted_head(model, run, method)


_WHOLE_STEPS = {"ddp", "zero1", "zero2"}  # each rank has all layers, and a head with its adapter


def _check_adapted_head(model: ModelSpec, run: RunConfig, method: Method) -> None:
    """Refuse an adapter of what makes logits, where nobody has looked at what it keeps.

    Raises:
        ConfigError: it is one of these.
    """
    assert model.head is not None
    trainer = get_trainer(run.trainer)
    reasons = (
        (not method.adapts_head, f"method {method.name}; use method lora"),
        (model.head.name in run.modules_to_save, "modules_to_save of its name; use one"),
        (run.phase == "inference", "serve as-trained; use merged"),
        (
            run.phase == "finetune"
            # kernels of its own read more than the logits
            and (LOSS_HEADS[run.loss_head].passes or trainer.logits_loss(run) is not None),
            f"the loss of trainer {run.trainer}, loss_head {run.loss_head}; use trainer "
            "transformers or loop, and loss_head hf or raw",
        ),
        (len(parts_of(model)) > 1, "a model with an encoder"),
        (model.tower is not None, "a model that reads images"),
        (
            not set(run.parallel.names) <= _WHOLE_STEPS and run.parallel.gpus > 1,
            "what divides the model; use one GPU, ddp, zero1 or zero2",
        ),
    )
    for is_so, reason in reasons:
        if is_so:
            raise ConfigError(
                f"target_modules: an adapter of {model.head.name!r} is not predicted with {reason}"
            )


def _filled(model: ModelSpec, run: RunConfig, gpu: GpuSpec, method: Method) -> RunConfig:
    """`run` with its defaults, and without what its method ignores."""
    run = with_defaults(_with_packed_experts(model, as_stored(model, run), gpu))
    if run.serving_options:
        named = by_own_names(get_engine(run.serving).options, run.serving_options)
        run = replace(run, serving_options=named)
    run = with_precision(with_open_settings(model, run), gpu, is_stored=True)
    run = with_lengths(model, run)
    training = run.phase == "finetune"
    if training and method.trains_base and run.quant != "none":
        quantised = [
            built_in.name for built_in in BUILT_IN.values() if built_in.base_quant != "none"
        ]
        is_copy = stored_quant(model.config) == run.quant
        whole = "a 16-bit copy of the model" if is_copy else "quant none"
        raise ConfigError(
            f"quant: {run.quant!r} weights cannot be trained; use method {' or '.join(quantised)}, "
            f"or {whole} for full fine-tuning"
        )
    if training and run.gradient_checkpointing and not model.supports_checkpointing:
        raise ConfigError(
            f"gradient_checkpointing: true, but the {model.model_type} of transformers has none, "
            "so that the Trainer refuses it; use false"
        )
    if training and run.gradient_checkpointing and not method.checkpoints:
        raise ConfigError(
            f"gradient_checkpointing: true, but {method.name} hands layers a cache, which "
            "checkpointed layers of transformers drop, so that PEFT refuses it; use false"
        )
    if "modules_to_save" in method.ignores:
        run = replace(run, modules_to_save=())
    if "bias" in method.ignores:
        run = replace(run, bias="none")
    return run


def _trained_model(model: ModelSpec, run: RunConfig, trainer: Trainer) -> ModelSpec:
    """`model` as the trainer makes it."""
    if trainer.logits_loss(run) is not None and model.task != "causal-lm":
        raise ConfigError(
            f"{model.name}: trainer {trainer.name} is predicted for models that continue a text; "
            f"{model.model_type} is none"
        )
    if run.trainer_option("disable_dropout"):
        model = without_dropout(model)
    return with_named_experts(model) if trainer.names_experts else model


def _check_target(model: ModelSpec, run: RunConfig) -> None:
    """Refuse a target's length where there is no target, or more tokens than positions."""
    if run.target_len is None:
        return
    if not model.has_two_stacks or task_of(run) is not None:
        raise ConfigError(
            f"target_len: is of encoder-decoders of texts, and {model.name} is none here; its "
            "length is seq_len, leave target_len out"
        )
    longest = model.longest_input
    if longest is not None and run.target_len > longest:
        raise ConfigError(
            f"target_len: {run.target_len} tokens are more than the {longest} positions that the "
            f"decoder of {model.name} has; give {longest} or less"
        )


def _check_scoring(run: RunConfig, task: Task) -> None:
    """Refuse what is there for the writing of texts beside a model that only reads them."""
    for setting, usual in (("serving", TRANSFORMERS), ("kv_cache", DYNAMIC)):
        if getattr(run, setting) != usual:
            raise ConfigError(
                f"{setting}: {getattr(run, setting)} is for models that write texts, and task "
                f"{task.name} has one that reads them; leave {setting} out"
            )


def _adapts_modules_only(run: RunConfig, method: Method) -> bool:
    """Whether bare parameters get none: PEFT can't wrap one that is expanded when it is read."""
    return method.folded is None or run.quantize_moe_experts or run.quant == "mxfp4"


def _dtypes_of(
    model: ModelSpec, run: RunConfig, gpu: GpuSpec, method: Method, trainer: Trainer
) -> Dtypes:
    """What tensors are stored and computed in, and by whose kernels."""
    training = run.phase == "finetune"
    if training and method.stays_wide and trainer.narrows_adapters(run):
        _check_narrowed(run, method, trainer)
    dtypes = resolve_dtypes(
        run,
        trains_base=training and method.trains_base,
        device_kind=gpu.kind,
        compute_capability=gpu.compute_capability,
        widens_result=training and method.widens_result,
        narrows_adapters=trainer.narrows_adapters(run),
    )
    if not training:
        in_blocks = dtypes.quant == "fp8" and has_fp8_blocks(model.config)
        return replace(dtypes, scale_block=FP8_BLOCK) if in_blocks else dtypes
    in_four_bits = trainer.quantises_experts and dtypes.quant in FOUR_BIT_BNB
    dtypes = replace(
        dtypes,
        kernels=trainer.kernels(run, model.model_type),
        quantises_experts=dtypes.quantises_experts or in_four_bits,
    )
    dtypes = trainer.narrow_copies(trainer.with_narrow_tables(dtypes, run, model))
    _check_kernels(run, dtypes, gpu)
    return dtypes


def _with_stream(
    model: ModelSpec, targets: tuple[str, ...], dtypes: Dtypes, method: Method
) -> Dtypes:
    """`dtypes` with the stream of several states, or of adapters that keep their input's dtype.

    Autocast takes powers in fp32, so that states of one magnitude are fp32 and widen the others.

    Under autocast a LayerNorm returns fp32, so that such a layer after it does, too; the sum with
    a 16-bit stream is fp32.
    """
    if model.streams is not None and dtypes.under_autocast and dtypes.backend.widens_norms:
        dtypes = replace(dtypes, stream_bytes=4)
    if not (method.keeps_input_dtype and dtypes.under_autocast and targets):
        return dtypes
    hidden = model.stream_width
    widths = [result_bytes(layer, hidden, targets, dtypes, method) for layer, _ in model.layers()]
    return replace(dtypes, stream_bytes=max(dtypes.stream_bytes, *widths))


def _check_serving(job: ResolvedRun) -> None:
    """Refuse an engine beside what it does not read, and what the engine refuses."""
    run, engine = job.run, job.engine
    if run.request_rate is not None and not job.has_pool:
        raise ConfigError(
            "request_rate: is of an engine that serves; give phase inference and serving vllm, or "
            "leave it out"
        )
    if run.length_spread != USUAL_SPREAD and not job.has_pool:
        raise ConfigError(
            "length_spread: is of an engine that serves; give phase inference and serving vllm, or "
            "leave it out"
        )
    if run.phase == "finetune":
        if run.has_engine:
            raise ConfigError(f"serving: {run.serving} is of inference; give phase inference")
        return
    if run.has_engine and job.model.streams is not None:
        raise ConfigError(
            f"serving: {engine.name} is not predicted for {job.model.name}, whose stream has "
            f"{job.model.streams.num_states} states; leave serving out"
        )
    if run.kv_cache in ("vllm", "paged") and job.model.chooses_keys:
        raise ConfigError(
            f"kv_cache: {run.kv_cache} is not predicted for {job.model.name}, whose indexers have "
            "keys of their own; use dynamic or static"
        )
    if engine.start is not None:
        if run.kv_cache != DYNAMIC:
            raise ConfigError(
                f"kv_cache: {run.kv_cache} is a cache of transformers; leave it out beside serving "
                f"{engine.name}, which has its own"
            )
        if run.batch_size > MOST_CLIENTS:
            raise ConfigError(
                f"concurrency: at most {MOST_CLIENTS} clients are simulated, got {run.batch_size}; "
                "give fewer, or request_rate in its place"
            )
        for card in job.gpu.beside or (job.gpu,):
            if card.kind not in engine.device_kinds:
                raise ConfigError(
                    f"serving: {engine.name} is predicted for NVIDIA's GPUs, not {card.key}"
                )
            _check_card(card, engine)
    on_linears = job.method.find_targets is None
    if run.serve == "as-trained" and not on_linears and run.has_engine:
        instead = "serve merged" if job.method.merges else f"serving {TRANSFORMERS}"
        raise ConfigError(
            f"serving: {engine.name} serves adapters of linear layers, not what {job.method.name} "
            f"trains; use {instead}"
        )
    engine.check_flags(job.served)
    engine.check_nodes(run)
    engine.check(job.served)


def _check_card(gpu: GpuSpec, engine: Engine) -> None:
    """Refuse a card that is older than an engine's kernels."""
    capability = gpu.compute_capability
    if capability is not None and float(capability) < engine.least_capability:
        raise ConfigError(
            f"serving: {engine.name} does not run on {gpu.key}: it needs compute capability "
            f"{engine.least_capability} or newer; leave serving out"
        )


def spread(run: RunConfig) -> tuple[RunConfig, Layout | None]:
    """`run` with every option of its strategies and the micro-steps of its global batch.

    Raises:
        ConfigError: what `layout_of` refuses, or no number of micro-steps reaches that batch.
    """
    layout = layout_of(run)
    config = run.parallel if layout is None else layout.config
    if config.global_batch_size is None:
        return replace(run, parallel=config), layout
    steps = micro_steps(
        config.global_batch_size,
        batch_size=run.batch_size,
        at_once=1 if layout is None else layout.data_parallel_size,
        accumulation=run.gradient_accumulation_steps,
    )
    config = replace(config, global_batch_size=None)
    return replace(run, gradient_accumulation_steps=steps, parallel=config), layout


def respread(job: ResolvedRun, config: ParallelConfig) -> ResolvedRun:
    """`job` under other strategies on as many GPUs, of which nothing else of it knows.

    Raises:
        ConfigError: as of `layout_of`.
    """
    layout = _layout(config, job.run.phase)
    filled = config if layout is None else layout.config
    return replace(job, run=replace(job.run, parallel=filled), layout=layout)


def layout_of(run: RunConfig) -> Layout | None:
    """The strategies that spread `run` over several GPUs, every option filled in; None on one.

    Raises:
        ConfigError: an unknown strategy or option, or a phase that nothing is known of.
    """
    return _layout(run.parallel, run.phase)


def _layout(config: ParallelConfig, phase: str) -> Layout | None:
    if config.strategy == ONE_DEVICE:
        if config.options:
            raise ConfigError(f"{config.options[0][0]}: needs parallel, which is {ONE_DEVICE}")
        return None
    layout = Layout.of(config, [get_strategy(name) for name in config.names])
    if phase == "inference":
        able = [name for name in list_engines() if get_engine(name).divided_by]
        raise ConfigError(
            f"gpus: several are known of fine-tuning, and of serving by {' or '.join(able)}; give "
            "one of these, or leave gpus and parallel out"
        )
    return layout


def _check_experts(model: ModelSpec, run: RunConfig) -> None:
    if not run.quantize_moe_experts:
        return
    bare = any(
        not linear.is_module and linear.count > 1
        for layer, _ in model.layers()
        for linear in layer.linears
    )
    for is_wrong, message in (
        (run.quant not in FOUR_BIT_BNB, f"is for 4-bit weights, got quant {run.quant}"),
        (not bare, f"{model.name} has no experts in one parameter"),
    ):
        if is_wrong:
            raise ConfigError(f"quantize_moe_experts: {message}; leave it out")
    # what codes of experts are under a strategy that cuts weights was not looked at
    whole = [
        name
        for name, each in list_strategies().items()
        if each.keeps_weights or each.order == "one after the other"
    ]
    if run.parallel.gpus > 1 and not set(run.parallel.names) <= set(whole):
        raise ConfigError(
            "parallel: quantize_moe_experts is predicted where no matrix is cut; use one of "
            f"{', '.join(whole)}"
        )


def as_stored(model: ModelSpec, run: RunConfig) -> RunConfig:
    """`run` with the form that the checkpoint of `model` has, where it names none itself.

    A checkpoint of GPTQ, AWQ or bitsandbytes is loaded as it is; so are 8-bit floats by an engine
    that reads them, and a GGUF file by llama.cpp. Another form of bitsandbytes is ignored.
    Source: transformers 5.23 `AutoHfQuantizer.merge_quantization_configs`.
    """
    training, engine = run.phase == "finetune", get_engine(run.serving)
    if not _reads_checkpoint(run):
        file_type, options = gguf_type(model.config), dict(run.serving_options)
        converted = engine.stored_as.get(stored_quant(model.config) or "", "")
        if converted and run.serve is None and engine.stored_by not in options:
            return replace(run, serving_options=(*options.items(), (engine.stored_by, converted)))
        counted = engine.counted_type(file_type) if is_gguf(model.config) else model.file_type
        if not engine.stored_by or not counted or engine.stored_by in options:
            return run
        return replace(run, serving_options=(*run.serving_options, (engine.stored_by, counted)))
    quant = stored_quant(model.config)
    is_read = quant in LOADED_AS_STORED or (quant in engine.stored_forms and not training)
    if not is_read or not (run.quant in (None, quant) or {run.quant, quant} <= BNB_QUANTS):
        return run
    group = stored_group(model.config) or run.quant_group_size
    return replace(run, quant=quant, quant_group_size=group)


def _with_packed_experts(model: ModelSpec, run: RunConfig, gpu: GpuSpec) -> RunConfig:
    """`run` with experts as an mxfp4 checkpoint has them, where an inference names no form."""
    is_asked = run.quant is not None or run.serve is not None or run.phase == "finetune"
    if is_asked or stored_quant(model.config) != "mxfp4" or not gpu.backend.keeps_mxfp4:
        return run
    if (
        get_method(run.method).serve == "as-trained"
        or not get_engine(run.serving).reads_checkpoints
    ):
        return run
    capability = float(gpu.compute_capability or ASSUMED_CAPABILITY)
    return replace(run, quant="mxfp4") if capability >= MXFP4_CAPABILITY else run


def _check_clamped(model: ModelSpec, run: RunConfig, dtypes: Dtypes) -> None:
    """Refuse to train on packed weights that the class clamps. Source: `Linear.clamps_weight`."""
    if run.phase != "finetune":
        return
    linears = (linear for layer, _ in model.layers() for linear in layer.linears)
    clamped = [x for x in linears if x.clamps_weight and is_quantised(x, dtypes)]
    if clamped:
        raise ConfigError(
            f"quant: transformers clamps {clamped[0].name} of {model.name} while it trains, which "
            f"weights in {run.quant} refuse; use quant none"
        )


def _check_cast(model: ModelSpec, run: RunConfig, dtypes: Dtypes) -> None:
    """Refuse 4-bit weights to whose dtype a class casts. Source: `Linear.casts_input`."""
    linears = (linear for layer, _ in model.layers() for linear in layer.linears)
    cast = [x for x in linears if x.casts_input and is_quantised(x, dtypes)]
    if cast and run.quant in FOUR_BIT_BNB:
        raise ConfigError(
            f"quant: transformers casts what {cast[0].name} of {model.name} reads to the dtype of "
            f"its weight, which is uint8 in {run.quant}; use quant int8 or none"
        )


def _reads_checkpoint(run: RunConfig) -> bool:
    return run.phase == "finetune" or get_engine(run.serving).reads_checkpoints


def _engines_that_serve(quant: str) -> list[str]:
    """Names of engines that serve weights so stored."""
    return [name for name, engine in list_engines().items() if quant in engine.stored_forms]


def _packed_in_words(quant: str) -> str:
    if quant in FLOAT_BLOCKS:
        return f"{FLOAT_BLOCKS[quant].bits}-bit floats ({quant})"
    return f"4-bit integers ({quant})"


def _check_storage(model: ModelSpec, run: RunConfig, gpu: GpuSpec) -> None:
    """Refuse what transformers refuses beside, or without, experts in mxfp4."""
    quant = run.quant or "none"
    if refuses_bitsandbytes(model.config, quant):
        raise ConfigError(
            f"quant: {model.name} is stored in mxfp4, beside which transformers refuses "
            f"bitsandbytes, got {quant}; use method lora, which expands it to 16 bit, or name a "
            "16-bit copy of the model, such as one that ends in -BF16"
        )
    if is_gguf(model.config) and _reads_checkpoint(run):
        raise ConfigError(
            f"model: {model.name} is a GGUF file, which llama.cpp serves and nothing trains; give "
            "serving llama-cpp, or the model it was made from with method qlora"
        )
    if is_mixed(model.config):
        raise ConfigError(
            f"quant: {model.name} is stored in several forms beside each other, such as NVFP4 and "
            "FP8, which is not predicted; name a copy in one form, or the 16-bit model it was made "
            "from"
        )
    stored = stored_quant(model.config)
    if stored in PACKED_QUANTS and quant != stored:
        raise ConfigError(
            f"quant: {model.name} is stored in {_packed_in_words(stored)}, which "
            f"{' and '.join(_engines_that_serve(stored))} serve and nothing here trains or "
            f"expands, got {quant}; name the 16-bit model it was made from"
        )
    if stored in LOADED_AS_STORED and quant != stored and _reads_checkpoint(run):
        raise ConfigError(
            f"quant: {model.name} is stored in {stored}, and is loaded so, got {quant}; leave "
            "quant out, or name a 16-bit copy of the model"
        )
    if quant != "mxfp4":
        return
    for is_wrong, fault in (
        (not packed_experts(model), f"{model.name} has no experts of gpt-oss's class; use none"),
        (run.phase == "finetune", "transformers trains no packed experts; use none, or leave out"),
        (not gpu.backend.keeps_mxfp4, f"is predicted on NVIDIA's GPUs, not on {gpu.key}; use none"),
        (run.precision in FP32_PRECISIONS, f"needs 16 bit, got precision {run.precision}"),
    ):
        if is_wrong:
            raise ConfigError(f"quant: mxfp4: {fault}")


def _check_attention(model: ModelSpec, run: RunConfig, gpu: GpuSpec) -> None:
    """Refuse FlashAttention where the device, the architecture or the precision has none."""
    if run.attn != "flash_attention_2":
        return
    capability = float(gpu.compute_capability or 0) if gpu.kind == "cuda" else 0.0
    if gpu.is_timed and gpu.kind in ("cpu", "cuda") and capability < FLASH_CAPABILITY:
        raise ConfigError(
            f"attn: flash_attention_2 does not run on {gpu.key} (it needs compute capability "
            "8.0 or newer); use sdpa"
        )
    if not all(attention.flash for layer, _ in model.layers() for attention in layer.attentions):
        raise ConfigError(
            f"attn: flash_attention_2 is not in the {model.model_type} of transformers, which "
            "has sdpa or eager; use sdpa, which takes what there is"
        )
    if run.precision in FP32_PRECISIONS:
        raise ConfigError(
            f"attn: flash_attention_2 needs 16-bit precision; use sdpa with {run.precision}"
        )


def _check_efficient(model: ModelSpec, run: RunConfig, gpu: GpuSpec, dtypes: Dtypes) -> None:
    """Refuse SDPA's memory-efficient kernel where the device or the architecture has none."""
    if run.attn != "sdpa-efficient":
        return
    attentions = [
        attention
        for layer, _ in model.layers()
        for attention in layer.attentions
        if attention.kind == "softmax"
    ]
    if not all(attention.sdpa == "fused" for attention in attentions):
        raise ConfigError(
            f"attn: sdpa-efficient is not in the {model.model_type} of transformers, whose "
            "attention is written out; use sdpa, which takes what there is"
        )
    if not all(runs_efficient(attention, dtypes) for attention in attentions):
        raise ConfigError(
            f"attn: sdpa-efficient has no kernel on {gpu.key} for these heads in {run.precision}; "
            "use sdpa, or another precision"
        )


def _check_device(run: RunConfig, gpu: GpuSpec) -> None:
    """Refuse settings that the device has no units, no allocator or no library for."""
    if not gpu.is_timed:  # any card of so much memory
        return
    backend = gpu.backend
    if run.precision == "tf32" and not (backend.has_tf32 and "tf32" in gpu.peak_flops_per_s):
        usable = [name for name in ("fp32", "bf16", "fp16") if name in gpu.peak_flops_per_s]
        raise ConfigError(f"precision: tf32 has no units on {gpu.key}; use {' or '.join(usable)}")
    if not {run.precision[:4], "fp32"} & set(gpu.peak_flops_per_s):
        rated = ", ".join(gpu.peak_flops_per_s)
        raise ConfigError(
            f"precision: {run.precision} has no known rate on {gpu.key}; use one of {rated}"
        )
    since = backend.expandable_since
    if run.expandable_segments and not run.versions.reaches("torch", since):
        of_torch = f"torch's allocator of {backend.kind} has them since {since}"
        raise ConfigError(
            "expandable_segments: "
            + (of_torch if since else f"torch's allocator of {backend.kind} has none")
            + f", which {gpu.key} uses; leave it out"
        )
    if run.quant in BNB_QUANTS - backend.quants:
        raise ConfigError(
            f"quant: {run.quant!r} is not among what bitsandbytes has for {backend.kind}, "
            f"{', '.join(sorted(backend.quants))}; use one of these, or quant none"
        )
    for lack in backend.lacks:
        if getattr(run, lack.setting) in lack.values:
            value = getattr(run, lack.setting)
            raise ConfigError(f"{lack.setting}: {value} {lack.why}; {lack.instead}")
    if run.parallel.gpus > 1 and backend.lacks_groups:
        raise ConfigError(f"gpus: {backend.lacks_groups}")
    if gpu.kind != "cuda" or gpu.compute_capability is None:
        return
    for setting, value, library, least, instead in _LEAST_CAPABILITY:
        if getattr(run, setting) == value and float(gpu.compute_capability) < least:
            raise ConfigError(
                f"{setting}: {value} does not run on {gpu.key} ({library} needs compute capability "
                f"{least} or newer); use {instead}"
            )


def _check_narrowed(run: RunConfig, method: Method, trainer: Trainer) -> None:
    """Refuse a TRL that narrows what stays fp32 in later ones. Source: TRL 1.14 and 1.15."""
    if run.quant in BNB_QUANTS and run.versions.trl_compares_logits:
        raise ConfigError(
            f"method: {method.name} in trainer {trainer.name} of TRL {run.versions.trl} has "
            f"{method.stays_wide} parameters of 16 bit on a quantised base, which is not "
            "predicted; use TRL 1.15 or later, or qlora"
        )


def _check_kernels(run: RunConfig, dtypes: Dtypes, gpu: GpuSpec) -> None:
    """Refuse fused kernels where Triton, their language, does not run."""
    lacks = gpu.backend.lacks_kernels
    if lacks and (dtypes.kernels != NO_KERNELS or LOSS_HEADS[run.loss_head].in_triton):
        raise ConfigError(
            f"use_liger_kernel, trainer, loss_head: fused kernels do not run on {gpu.key}: "
            f"{lacks}; leave them out"
        )
    if dtypes.kernels == NO_KERNELS or not gpu.is_timed or gpu.kind != "cuda":
        return
    if float(gpu.compute_capability or ASSUMED_CAPABILITY) < _TRITON:
        raise ConfigError(
            f"use_liger_kernel, trainer: its kernels do not run on {gpu.key} (Triton needs compute "
            f"capability {_TRITON} or newer); leave them out"
        )


def _check_trained(model: ModelSpec, run: RunConfig, dtypes: Dtypes) -> None:
    """Refuse what the libraries can't train beside, or within, the adapters."""
    if run.modules_to_save and run.precision == "fp16" and dtypes.embedding_bytes == 2:
        raise ConfigError(
            "modules_to_save: copies of fp16 modules can't be trained, the gradient scaler refuses "
            "fp16 gradients; use precision bf16"
        )
    if run.bias == "none" or run.phase != "finetune":
        return
    if run.precision == "fp16" and dtypes.base_bytes == 2:
        raise ConfigError(
            "bias: fp16 biases can't be trained, the gradient scaler refuses fp16 gradients; "
            "use precision bf16"
        )
    if model.task != "causal-lm":
        raise ConfigError(f"bias: {run.bias} is modelled for decoders only; use none")
