"""What a reader must know about a prediction beside its numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from whichlora.errors import ConfigError
from whichlora.memory import kv_cache
from whichlora.memory.layer_passes import offloaded_bytes
from whichlora.predict.changes import holds_inputs
from whichlora.predict.defaults import is_dated
from whichlora.predict.resolve import ResolvedRun
from whichlora.spec.checkpoint import gguf_type, is_gguf, stored_quant
from whichlora.spec.dtypes import is_quantised
from whichlora.spec.layer import Attention
from whichlora.spec.numeric import Real
from whichlora.spec.results import Prediction
from whichlora.spec.run import BNB_QUANTS, CHECKPOINT_QUANTS, FOUR_BIT_BNB, RunConfig
from whichlora.spec.targets import adapts_table, all_linears
from whichlora.spec.versions import changes_nothing
from whichlora.symbolic.kernels import attention_kernel, runs_efficient
from whichlora.units import format_bytes

# The oldest compute capability that PyTorch's wheels for CUDA 12.8 and later have kernels for.
# Source: release notes of 2.8; github.com/pytorch/pytorch, issue 172352.
_LEAST_CAPABILITY = (("0", 0.0), ("2.8", 7.0), ("2.11", 7.5))
UNVERIFIED = "datasheet facts"  # how the note on facts that nobody confirmed begins
# How notes on where facts are from begin, or go on behind a name: they move no memory.
_WHENCE = re.compile(rf"{UNVERIFIED}|shapes of |links of |for --task |[^ ]+: read as ")
_NOTABLE = 0.1  # of the memory, what is worth a note
HOST_BOUND = "bound by the host"  # how the one on the side that waits does


def says_whence(note: str) -> bool:
    """Whether `note` says where facts are from, and nothing of what the run takes."""
    return _WHENCE.match(note) is not None


_PASS_NAMES = {
    "finetune": "an optimizer step",
    "prefill": "the prompt pass",
    "decode": "a decoding step",
}


def host_notes(job: ResolvedRun, pass_parts: Mapping[str, Mapping[str, Real]]) -> tuple[str, ...]:
    """A note where the device waits for the host; on a CPU both are the same cores.

    Args:
        pass_parts: seconds of one pass by feature, by phase; the side that waits counts zero.
    """
    bound = [_PASS_NAMES[phase] for phase, parts in pass_parts.items() if parts["launch"] > 0]
    if job.gpu.is_cpu or not bound:
        return ()
    return (f"{HOST_BOUND}: launching kernels takes longest in {' and '.join(bound)}",)


def _on_gpu(job: ResolvedRun) -> Iterator[str]:
    """What the GPU lacks for the run."""
    run, gpu = job.run, job.gpu
    lacks_units = gpu.is_timed and job.dtype not in gpu.peak_flops_per_s
    if job.dtype in ("bf16", "fp16") and lacks_units:
        yield f"{gpu.key} has no {job.dtype} matrix units: time is taken from its fp32 rate" + (
            "; precision fp16 uses its fp16 units" if "fp16" in gpu.peak_flops_per_s else ""
        )
    if run.phase == "inference" and not job.engine.runs_torch:
        return
    if run.precision == "fp16" and not gpu.has_bf16:
        yield f"precision fp16: {gpu.key} has no bf16"
    if gpu.kind == "cuda" and gpu.compute_capability is not None:
        least = run.versions.value_of("torch", _LEAST_CAPABILITY)
        if float(gpu.compute_capability) < least:
            yield (
                f"PyTorch has kernels for compute capability {gpu.compute_capability} in its "
                "CUDA 12.6 wheels only"
            )


def notes_on(job: ResolvedRun) -> tuple[str, ...]:
    """The notes on `job`, as sentences without a full stop."""
    run, gpu = job.run, job.gpu
    notes = [*job.model.notes, *gpu.notes]
    notes += _beyond_positions(job)
    notes += _on_gpu(job)
    if not job.has_pool or job.engine.runs_torch:
        notes += gpu.backend.notes(run)
    if not job.has_pool and _writes_scores(job):  # engines have kernels of their own
        notes.append(
            "SDPA has no fused kernel for this attention: its math kernel writes every score in "
            "fp32" + ("; `--attn sdpa-efficient` avoids that" if _has_efficient(job) else "")
        )
    if stored := _stored(job):
        notes.append(stored)
    if gpu.unverified:
        notes.append(f"{UNVERIFIED} of {gpu.key} not verified: {', '.join(gpu.unverified)}")
    experts_are_parameters = any(
        not linear.is_module
        for layer, _ in job.model.layers()
        if layer.moe is not None
        for linear in layer.moe.expert.linears
    )
    if experts_are_parameters and (told := _experts_in_words(job)):
        notes.append(told)
    left_wide = any(
        linear.is_subclass and not is_quantised(linear, job.dtypes)
        for linear in all_linears(job.model)
    )
    if left_wide and job.dtypes.quant in BNB_QUANTS:
        notes.append(
            f"transformers 5 quantises nothing of {job.model.model_type}, whose matrices are of a "
            "class of their own; with libraries transformers 4.57.0 it does"
        )
    adapted_experts = any(
        linear.rank_multiple and not linear.is_module and linear.name in job.targets
        for linear in all_linears(job.model)
    )
    notes += _without_checkpoints(job)
    notes += job.method.notes(run, adapted_experts)
    if idle := [name for name, _ in run.libraries if changes_nothing(name)]:
        notes.append(f"libraries: no formula asks for the version of {', '.join(idle)}")
    notes += _passed_over_in_words(job)
    if job.model.head_tied and adapts_table(job.model, job.targets):
        # Source: peft 0.21.2 `BaseTuner.inject_adapter`, its warning on tied target modules
        notes.append(
            f"target_modules: {job.model.embeddings[0].name} is the head's weight, too: PEFT "
            "adapts the look-up alone, and a merge changes both"
        )

    if run.phase == "finetune" and "r" not in job.method.ignores:
        notes += _beyond_every_rank(job)
    if run.phase == "finetune":
        notes += job.trainer.notes(run)
        notes += job.trainer.notes_of(run, job.model.model_type)
        notes += _cached_in_words(job)
        if run.gradient_checkpointing and job.trainer.offloads(run):
            on_host = offloaded_bytes(job.model, tokens=run.batch_size * run.seq_len)
            notes.append(f"{format_bytes(on_host)} of layers' inputs lie in pinned host memory")
    if job.model.has_two_stacks and run.phase == "finetune":
        notes.append(_lengths_in_words(job))
    return tuple(notes)


def _beyond_positions(job: ResolvedRun) -> Iterator[str]:
    """That the run is longer than the model has positions."""
    run = job.run
    limit = job.model.max_position_embeddings
    length = run.seq_len if run.phase == "finetune" else run.prompt_len
    if run.phase == "inference" or job.model.has_two_stacks:
        limit = job.model.max_prompt_positions or limit
    if run.phase == "inference" and job.model.task == "causal-lm" and job.model.can_generate:
        length += run.max_new_tokens
    if limit and length > limit:
        fails = ", and looking up more fails" if job.model.longest_input else ""
        yield f"{length} tokens exceed the model's {limit} positions{fails}"


def _without_checkpoints(job: ResolvedRun) -> Iterator[str]:
    """Why layers are not checkpointed where nobody says so."""
    run = job.run
    if run.phase != "finetune":
        return
    if not job.model.supports_checkpointing:
        yield f"gradient_checkpointing is off: the {job.model.model_type} of transformers has none"
    elif not run.gradient_checkpointing and _is_off_by_itself(job):
        library = job.trainer.dated_by
        release = f" of {library} {getattr(run.versions, library)}" if library else ""
        yield (
            f"gradient_checkpointing is off, as trainer {run.trainer}{release} has it where "
            "nobody asks for it"
        )


def held_inputs_note(
    prediction: Prediction, used_bytes: Callable[[RunConfig], int]
) -> tuple[str, ...]:
    """That bitsandbytes holds inputs of products which a checkpoint should drop, and a way out.

    Reentrant checkpoints run a forward without a graph, which has nothing to hold them.
    """
    run = prediction.run
    if run.phase != "finetune" or not run.gradient_checkpointing:
        return ()
    if run.use_reentrant or not holds_inputs(run):
        return ()
    try:
        used = used_bytes(replace(run, use_reentrant=True))
    except ConfigError:
        return ()
    if used > (1 - _NOTABLE) * prediction.memory.device_used_bytes:
        return ()
    return (
        f"{run.quant}: bitsandbytes keeps the inputs of its products, and non-reentrant "
        f"checkpointing, the default of transformers 5, can't drop them; with --use-reentrant, as "
        f"transformers 4 does, {format_bytes(used)}",
    )


def _is_off_by_itself(job: ResolvedRun) -> bool:
    """Whether the release that the user states does not checkpoint where nobody says."""
    defaults = job.trainer.defaults
    if defaults is None or not is_dated(job.run):
        return False
    return not defaults(job.run.versions).checkpoints


def _beyond_every_rank(job: ResolvedRun) -> list[str]:
    """That the rank exceeds that of every matrix which gets an adapter."""
    sides = (
        min(linear.in_features, linear.out_features)
        for linear in all_linears(job.model)
        if linear.name in job.targets
    )
    widest = max(sides, default=job.run.r)
    if job.run.r <= widest:
        return []
    return [
        f"r {job.run.r}: no matrix that gets an adapter has a rank above {widest}, so that more "
        "parameters learn nothing more"
    ]


def _cached_in_words(job: ResolvedRun) -> list[str]:
    """That older classes return keys and values in training, of which accelerate makes copies."""
    run, trainer = job.run, job.trainer
    copied = kv_cache.widened_cache(
        job.model, job.dtypes, checkpointed=bool(run.gradient_checkpointing)
    )
    widens = trainer.widens_outputs and job.dtypes.under_autocast
    if not copied or not widens or trainer.logits_loss(run) is not None:
        return []
    num_bytes = 4 * sum(copied) * run.batch_size * run.seq_len
    return [
        f"use_cache: the class of transformers {run.versions.transformers} returns keys and "
        f"values, and accelerate makes {format_bytes(num_bytes)} of fp32 copies; "
        "model.config.use_cache = False saves them"
    ]


def _lengths_in_words(job: ResolvedRun) -> str:
    """What an encoder and its decoder are taken at."""
    source, target = job.run.seq_len, job.model.target_len(job.run.target_len, job.run.seq_len)
    if target is None:
        return "encoder and decoder are both taken at seq_len tokens"
    if job.run.target_len is None:
        return f"the encoder reads {source} tokens, the decoder has positions for {target}"
    return f"the encoder reads seq_len, {source} tokens; the decoder writes target_len, {target}"


def _attentions(job: ResolvedRun) -> list[Attention]:
    return [
        attention
        for layer, _ in job.model.layers()
        for attention in layer.attentions
        if attention.kind == "softmax"
    ]


def _writes_scores(job: ResolvedRun) -> bool:
    """Whether a GPU's SDPA falls back to plain operators in some layer."""
    dtypes = job.dtypes
    return dtypes.device_kind != "cpu" and "math" in (
        attention_kernel(
            attention,
            dtypes,
            masked=dtypes.padded or attention.always_masked or attention.position == "relative",
        )
        for attention in _attentions(job)
    )


def _has_efficient(job: ResolvedRun) -> bool:
    return all(runs_efficient(attention, job.dtypes) for attention in _attentions(job))


def _stored(job: ResolvedRun) -> str:
    """What a checkpoint's own quantisation changes; empty where the run counts it as it is."""
    config = job.model.config.get("quantization_config")
    if job.model.file_type or is_gguf(job.model.config):
        return _file_in_words(job)
    if not isinstance(config, Mapping):
        return ""
    quant = stored_quant(job.model.config)
    if not job.engine.reads_checkpoints:
        return _converted_in_words(job, quant or str(config.get("quant_method", "")))
    if quant == "mxfp4":
        return _mxfp4_in_words(job)
    if quant == job.run.quant:
        return ""
    counted = "16-bit" if job.dtypes.quant == "none" else job.dtypes.quant
    if quant is None:
        method = config.get("quant_method", "an unknown format")
        return f"the checkpoint is stored as {method}, which is not modelled: counted as {counted}"
    if quant == "fp8":
        refused = "; transformers refuses bitsandbytes beside it: convert it to 16 bit first"
        refused *= job.run.quant in BNB_QUANTS
        return f"the checkpoint is stored in fp8, counted is {counted}{refused}"
    return f"the checkpoint is stored as {quant}, which {job.engine.name} does not read as it is"


def _file_in_words(job: ResolvedRun) -> str:
    """Which file of a GGUF repository or of Ollama is counted, where the name does not say it."""
    engine = job.engine
    if not engine.stored_by:
        return ""
    counted, named = job.served.options.get(engine.stored_by), gguf_type(job.model.config)
    if not named and counted == (job.model.file_type or engine.counted_type("")):
        whose = "Ollama's tag" if job.model.file_type else "the name states no file, and"
        return f"{whose} means {counted}; {engine.stored_by} states another"
    if named and counted == engine.counted_type(named) != named:
        return (
            f"the types of {named} are stated by its file alone: counted as {counted}, the nearest"
        )
    return ""


def _converted_in_words(job: ResolvedRun, quant: str) -> str:
    """What becomes of a checkpoint under an engine that has files of its own; empty if kept."""
    engine, file_type = job.engine, job.served.options.get(job.engine.stored_by)
    own_type = engine.stored_as.get(quant, "")
    if own_type and file_type == own_type:
        return ""
    instead = f"; {engine.stored_by} {own_type} keeps it" if own_type else ""
    return f"the checkpoint is stored as {quant}, and is converted for {engine.name}{instead}"


def _mxfp4_in_words(job: ResolvedRun) -> str:
    """What becomes of experts that the checkpoint has in mxfp4."""
    stored = "the checkpoint stores its experts in mxfp4"
    if job.run.quant == "mxfp4":
        merged = "; with an adapter merged into them they take 16 bit (--serve merged)"
        return f"{stored}, and they are served so" + merged * (job.run.serve == "merged")
    if job.run.phase == "finetune":
        return f"{stored}; training needs Mxfp4Config(dequantize=True), so they are held in 16 bit"
    return f"{stored}, counted is 16-bit: give quant mxfp4 for a GPU that has kernels for it"


def _passed_over_in_words(job: ResolvedRun) -> Iterator[str]:
    """Names of layers that get no adapter, and why."""
    parts = {part for linear in all_linears(job.model) for part in linear.asked_as}
    of_experts = [name for name in job.passed_over if name.rpartition(".")[2] in parts]
    others = [name for name in job.passed_over if name not in of_experts]
    for names, why in (
        (others, "no layers of this model, which PEFT passes over"),
        (of_experts, "PEFT takes them for the experts', predicted without adapters here"),
    ):
        if names:
            yield f"target_modules: {', '.join(names)}: {why}"


def _experts_in_words(job: ResolvedRun) -> str:
    """What becomes of experts in one parameter under a quantisation; empty without one.

    Source: Axolotl `monkeypatch/moe_quant.py`; Unsloth quantises them by code of its own.
    """
    if job.dtypes.quant in CHECKPOINT_QUANTS and not job.has_pool:
        return (
            f"experts are 3-D parameters in transformers 5, which hold no {job.dtypes.quant}: "
            "16-bit; with libraries transformers 4.57.0 they are modules, which do"
        )
    if job.dtypes.quant not in BNB_QUANTS:
        return ""
    if job.run.quantize_moe_experts:
        return (
            "experts are in 4 bit and expanded a layer at a time, as Axolotl's "
            "quantize_moe_experts does; transformers alone leaves them in 16 bit"
        )
    if job.dtypes.quantises_experts:
        return (
            "experts are in 4 bit; each product expands a layer's to 16 bit, in the forward and "
            "again in the backward"
        )
    told = "experts are 3-D parameters in transformers 5: bitsandbytes leaves them 16-bit"
    if job.run.prepare_kbit and job.run.phase == "finetune":
        told += ", and prepare_model_for_kbit_training makes them fp32 (--no-prepare-kbit)"
    in_four_bits = job.dtypes.quant in FOUR_BIT_BNB and job.run.phase == "finetune"
    others = "; Unsloth does not, nor Axolotl with quantize_moe_experts: true"
    return f"{told}{others} (--quantize-moe-experts)" if in_four_bits else told
