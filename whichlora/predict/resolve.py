"""A run → `ResolvedRun`: every default filled in, and refused where settings exclude each other."""

from __future__ import annotations

from dataclasses import dataclass, replace

from whichlora.errors import ConfigError
from whichlora.families import without_dropout
from whichlora.families.experts import with_expert_modules, with_named_experts
from whichlora.families.gemma import without_caps
from whichlora.families.releases import as_of_release
from whichlora.memory import allocator
from whichlora.memory.quantised_cache import check_quantisable
from whichlora.methods import Method, get_method, with_defaults
from whichlora.parallel import get_strategy
from whichlora.parallel.layout import Layout
from whichlora.predict.defaults import with_open_settings, with_precision
from whichlora.predict.images import with_images, with_lengths
from whichlora.predict.refusals.device import (
    MXFP4_CAPABILITY,
    check_attention,
    check_device,
    check_efficient,
    check_kernels,
)
from whichlora.predict.refusals.serving import (
    check_engine,
    check_form,
    check_scoring,
    check_serving,
)
from whichlora.predict.refusals.storage import check_engine_quant, check_storage, reads_checkpoint
from whichlora.predict.refusals.training import (
    check_adapted,
    check_cast,
    check_checkpointing,
    check_clamped,
    check_experts,
    check_loss,
    check_narrowed,
    check_target,
    check_trained,
    check_trained_weights,
)
from whichlora.serving import get_engine, list_engines
from whichlora.serving.base import Engine, Served, Start
from whichlora.spec.architecture import ModelSpec, with_source_len
from whichlora.spec.backends.cuda import ASSUMED_CAPABILITY
from whichlora.spec.checkpoint import (
    FP8_BLOCK,
    LOADED_AS_STORED,
    gguf_type,
    has_fp8_blocks,
    is_gguf,
    stored_group,
    stored_quant,
    with_unpacked,
)
from whichlora.spec.dtypes import Dtypes, resolve_dtypes
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.numeric import Count, is_plain
from whichlora.spec.options import by_own_names
from whichlora.spec.parallel import ONE_DEVICE, ParallelConfig, micro_steps
from whichlora.spec.run import (
    ALL_LINEAR,
    BNB_QUANTS,
    CHECKPOINT_QUANTS,
    FOUR_BIT_BNB,
    PACKED_QUANTS,
    RunConfig,
)
from whichlora.spec.targets import (
    PATTERN,
    asked_names,
    check_saved_modules,
    resolve_targets,
    unmatched_targets,
)
from whichlora.spec.wide_modules import with_wide_modules
from whichlora.symbolic.layer import result_bytes
from whichlora.tasks import task_of
from whichlora.trainers import Trainer, get_trainer


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
    def context_bytes(self) -> int:
        """What its process takes of the GPU beside what it allocates.

        Kind: estimate. Source: `allocator.context_bytes`; `Engine.takes_context`.
        """
        if self.has_pool and not self.engine.takes_context(self.gpu):
            return 0
        return allocator.context_bytes(self.gpu, self.dtypes.libraries)

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
        run = replace(run, target_modules=trainer.own_targets(model, run.target_modules))
        model = trainer.own_model(_trained_model(model, run, trainer), run)
        run = replace(run, loss_head=trainer.loss_of(run, model.model_type))
        check_target(model, run)
    task = task_of(run)
    if task is not None:
        if not training:
            check_scoring(run, task)
        model = task.prepare(model, run)
    if run.versions.experts_are_modules:
        model = with_expert_modules(model)
    if run.attn.startswith("sdpa") and run.versions.sdpa_leaves_out_caps:
        model = without_caps(model, always_masked=run.versions.masks_caps_always)
    model = as_of_release(model, run)
    if not training:
        check_form(run, method)
    model = method.with_model(with_images(model, run, trainer), run)
    check_experts(model, run)
    check_storage(model, run, gpu)
    check_attention(model, run, gpu)
    check_device(run, gpu)
    check_engine_quant(run)
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
        check_adapted(model, run, method, targets)
    dtypes = _dtypes_of(model, run, gpu, method, trainer)
    if model.tower is not None and model.tower.masks_text == "all" and dtypes.uses_sdpa:
        dtypes = replace(dtypes, padded=True)
    if training and method.prefix_tokens:  # more keys than queries, which a mask tells apart
        dtypes = replace(dtypes, padded=True, prefix_tokens=method.prefix_tokens)
    dtypes = _with_stream(model, targets, dtypes, method)
    check_efficient(model, run, gpu, dtypes)
    check_trained(model, run, dtypes)
    check_clamped(model, run, dtypes)
    check_cast(model, run, dtypes)
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
    check_serving(model, run, gpu, method, job.engine)
    if not training:
        check_engine(job.served)
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


def _filled(model: ModelSpec, run: RunConfig, gpu: GpuSpec, method: Method) -> RunConfig:
    """`run` with its defaults, and without what its method ignores."""
    run = with_defaults(_with_packed_experts(model, as_stored(model, run), gpu))
    if run.serving_options:
        named = by_own_names(get_engine(run.serving).options, run.serving_options)
        run = replace(run, serving_options=named)
    run = with_precision(with_open_settings(model, run), gpu, is_stored=True)
    run = with_lengths(model, run)
    if run.phase == "finetune":
        check_trained_weights(model, run, method)
        check_checkpointing(model, run, method)
        run = _with_whole_modules(model, run)
    if "modules_to_save" in method.ignores:
        run = replace(run, modules_to_save=())
    if "bias" in method.ignores:
        run = replace(run, bias="none")
    return run


def _with_whole_modules(model: ModelSpec, run: RunConfig) -> RunConfig:
    """`run` with the targets of which its trainer trains a copy.

    Raises:
        ConfigError: it ties copies, too, whose gradients nobody has looked at.
    """
    trainer = get_trainer(run.trainer)
    whole = trainer.trains_whole.intersection(run.target_modules)
    if whole:
        left = tuple(name for name in run.target_modules if name not in whole)
        saved = tuple(sorted({*run.modules_to_save, *whole}))
        run = replace(run, target_modules=left, modules_to_save=saved)
    if trainer.trains_whole.intersection(run.modules_to_save) and model.head_tied:
        raise ConfigError(
            f"modules_to_save: trainer {trainer.name} ties the copies of {model.name}, whose head "
            "is its token table, which is not predicted; leave them out, or use trainer sft"
        )
    return run


def _trained_model(model: ModelSpec, run: RunConfig, trainer: Trainer) -> ModelSpec:
    """`model` as the trainer makes it."""
    check_loss(model, run, trainer)
    if run.trainer_option("disable_dropout"):
        model = without_dropout(model)
    if run.trainer_option("use_cache") and model.task == "causal-lm":
        model = replace(model, caches_in_training=True)
    return with_named_experts(model) if trainer.names_experts else model


def _adapts_modules_only(run: RunConfig, method: Method) -> bool:
    """Whether bare parameters get none: PEFT can't wrap one that is expanded when it is read."""
    return method.folded is None or run.quantize_moe_experts or run.quant == "mxfp4"


def _dtypes_of(
    model: ModelSpec, run: RunConfig, gpu: GpuSpec, method: Method, trainer: Trainer
) -> Dtypes:
    """What tensors are stored and computed in, and by whose kernels."""
    training = run.phase == "finetune"
    if training and method.stays_wide and trainer.narrows_adapters(run):
        check_narrowed(run, method, trainer)
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
    check_kernels(run, dtypes, gpu)
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


def as_stored(model: ModelSpec, run: RunConfig) -> RunConfig:
    """`run` with the form that the checkpoint of `model` has, where it names none itself.

    A checkpoint of GPTQ, AWQ or bitsandbytes is loaded as it is; so are 8-bit floats by an engine
    that reads them, and a GGUF file by llama.cpp. Another form of bitsandbytes is ignored.
    Source: transformers 5.23 `AutoHfQuantizer.merge_quantization_configs`.
    """
    training, engine = run.phase == "finetune", get_engine(run.serving)
    if not reads_checkpoint(run):
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
