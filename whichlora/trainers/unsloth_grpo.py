"""Unsloth under TRL's `GRPOTrainer`, alone or with a vLLM that shares weights with the training.

Answers of a micro-batch are read as one row without padding, and the head projects completions
alone, in rows of its fused loss. With `fast_inference` the base is loaded by a vLLM in the same
process, whose tensors are trained on: its pool lies beside the step, unless it is on standby.

Source: unsloth 2026.10.9 models/rl.py, models/rl_replacements.py, models/llama.py:4225;
unsloth_zoo 2026.10.9 rl_replacements.py `grpo_accumulated_loss`,
fused_losses/chunked_logprob.py, vllm_utils.py `load_vllm`, `convert_vllm_to_huggingface`,
`patch_vllm_enable_sleep_mode`.
"""

from __future__ import annotations

from dataclasses import replace

from whichlora.errors import ConfigError
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.kernels import FusedKernels
from whichlora.spec.options import Option
from whichlora.spec.run import RunConfig
from whichlora.trainers import grpo, unsloth
from whichlora.trainers.base import Colocated, Forwards
from whichlora.trainers.unsloth_vllm import RANKS, Asked, Settings, settings

FAST = Option(
    name="fast_inference",
    summary="a vLLM in the same process writes the answers, and shares its weights",
    default=False,
)
SHARE = Option(
    name="gpu_memory_utilization",
    summary="of the free memory, what that vLLM takes, weights among it",
    default=0.5,
    is_share=True,
)
RANK = Option(name="max_lora_rank", summary="rank of its slot for the adapter", default=64)
CONTEXT = Option(
    name="max_seq_length",
    summary="tokens of its sequences; without it those of a prompt and its answer",
    default=None,
    has_suffixes=True,
)
STANDBY = Option(
    name="UNSLOTH_VLLM_STANDBY",
    summary="its cache is given back while the model learns, and its share is chosen by the GPU",
    default=False,
)
_BESIDE = (SHARE, RANK, CONTEXT, STANDBY)
# Options of TRL's that Unsloth sets itself.
_LEFT_OUT = {"use_vllm", "vllm_mode", "vllm_gpu_memory_utilization", "vllm_enable_sleep_mode"}
_LEFT_OUT |= {"vllm_max_model_length", "vllm_tensor_parallel_size"}
_OPTIONS = tuple(each for each in grpo.TRAINER.options if each.name not in _LEFT_OUT)


def _is_fast(run: RunConfig) -> bool:
    return FAST.flag(run.trainer_options)


def _asked(run: RunConfig) -> Asked:
    return Asked(
        share=SHARE.number(run.trainer_options),
        context=CONTEXT.whole(run.trainer_options, unstated=run.seq_len),
        rank=RANK.whole(run.trainer_options),
        standby=STANDBY.flag(run.trainer_options),
        vllm=dict(run.libraries).get("vllm", ""),
    )


def engine_settings(run: RunConfig, model: ModelSpec, gpu: GpuSpec, free_bytes: int) -> Settings:
    """What its vLLM is started with; args as of `Trainer.colocated`."""
    return settings(
        model, gpu, run.versions, quant=run.quant, free_bytes=free_bytes, asked=_asked(run)
    )


def _colocated(run: RunConfig, model: ModelSpec, gpu: GpuSpec, free_bytes: int) -> Colocated | None:
    if not _is_fast(run):
        return None
    found = engine_settings(run, model, gpu, free_bytes)
    return Colocated(
        engine="vllm",
        release=grpo.vllm_release(run),
        options={
            "gpu_memory_utilization": found.share,
            "max_num_batched_tokens": found.tokens,
            "max_num_seqs": found.sequences,
            "enable_lora": True,
            "max_lora_rank": found.rank,
            "enable_prefix_caching": True,
        },
        context=found.context,
        context_option=CONTEXT.name,
        share_option=SHARE.name,
        shares_weights=True,
        gives_back="cache" if STANDBY.flag(run.trainer_options) else "nothing",
    )


def _forwards(run: RunConfig) -> Forwards:
    """TRL's, but that vLLM's probabilities are taken as the policy's.

    Source: unsloth 2026.10.9 models/rl.py:3361, `vllm_importance_sampling_correction` False; TRL
    1.16 `_generate_and_score_completions`.
    """
    return grpo.forwards(run, rescores=False)


def _kernels(run: RunConfig, model_type: str) -> FusedKernels:
    """Other types have stock layers here, which those that Unsloth compiles are bounded by."""
    try:
        return unsloth.kernels(run, model_type)
    except ConfigError:
        if run.modules_to_save or model_type in unsloth.OWN_TYPES:
            raise
        return FusedKernels()


def _notes_of(run: RunConfig, model_type: str) -> tuple[str, ...]:
    if model_type in unsloth.OWN_TYPES:
        return unsloth.TRAINER.notes_of(run, model_type)
    return (
        f"Unsloth compiles the layers of {model_type}; they are counted as transformers and PEFT "
        "write them, which takes more",
    )


def _check(run: RunConfig) -> None:
    unsloth.TRAINER.check(run)
    grpo.TRAINER.check(run)
    rank = RANK.whole(run.trainer_options)
    if not _is_fast(run):
        return
    if run.r > rank:
        raise ConfigError(
            f"max_lora_rank: {rank} is less than the adapter's rank {run.r}; give {run.r} or more"
        )
    if rank > RANKS[-1]:
        raise ConfigError(f"max_lora_rank: vllm has slots up to rank {RANKS[-1]}, got {rank}")
    context = CONTEXT.whole(run.trainer_options, unstated=run.seq_len)
    if context < run.seq_len:
        raise ConfigError(
            f"max_seq_length: {context} is less than the seq_len {run.seq_len} of a prompt and its "
            "answer, which vllm writes; give as much, or a shorter seq_len"
        )


def _notes(run: RunConfig) -> tuple[str, ...]:
    told = (*unsloth.TRAINER.notes(run), grpo.ANSWERS_NOTE)
    if not _is_fast(run):
        why = "without fast_inference=true, so that the model itself writes the answers"
        return (*told, *grpo.idle_note(run, _BESIDE, why))
    told += grpo.release_note(run)
    if STANDBY.flag(run.trainer_options):
        return (
            *told,
            "the vLLM on standby keeps weights, slots and graphs while the model learns; its share "
            "of the GPU is Unsloth's own choice, whatever gpu_memory_utilization says",
        )
    return (
        *told,
        "the vLLM's weights are those that are trained on; its cache stays beside each step, and "
        "UNSLOTH_VLLM_STANDBY=true gives it back",
    )


TRAINER = replace(
    unsloth.TRAINER,
    name="unsloth-grpo",
    also_called={"UnslothGRPOTrainer": ""},
    summary="Unsloth under TRL's GRPOTrainer, with or without a vLLM that shares its weights",
    library_class="unsloth.UnslothGRPOTrainer",
    learning_rate=grpo.TRAINER.learning_rate,
    rate_source=grpo.TRAINER.rate_source,
    length_argument="",
    options=(*unsloth.TRAINER.options, *_OPTIONS, FAST, *_BESIDE),
    rows="prompts",
    forwards=_forwards,
    rollout=lambda run: grpo.rollout(run, by_engine=_is_fast(run)),
    colocated=_colocated,
    repeats=grpo.TRAINER.repeats,
    kernels=_kernels,
    notes_of=_notes_of,
    scored_tokens=grpo.TRAINER.scored_tokens,
    check=_check,
    least_batch=grpo.least_batch,
    notes=_notes,
)
