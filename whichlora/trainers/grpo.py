"""TRL's `GRPOTrainer`: the model writes several answers to each prompt, and learns from rewards.

`generate` of the model itself writes them, or a vLLM on the same GPU, which holds a copy of the
weights. Rewards are computed by functions of the user: a model among them is not counted.

Source: TRL 1.16 `GRPOTrainer._prepare_inputs`, `_generate_and_score_completions`,
`_compute_loss`, `GRPOConfig.__post_init__`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from whichlora.errors import ConfigError
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.options import Option
from whichlora.spec.run import FOUR_BIT_BNB, RunConfig
from whichlora.spec.versions import ByRelease, release_numbers
from whichlora.trainers import sft, trl
from whichlora.trainers.base import Colocated, Forwards, Repeats, Rollout

_BETA = Option(
    name="beta",
    summary="weight of the KL term, above 0 with a reference; without it 0, before TRL 0.19 0.04",
    default=None,
    kind=float,
)
_GENERATIONS = Option(name="num_generations", summary="answers to each prompt", default=8)
_LENGTH = Option(
    name="max_completion_length", summary="tokens of an answer, of the seq_len of both", default=256
)
_STEPS = Option(
    name="steps_per_generation",
    summary="micro-batches that are written at once; without it, those of an optimizer step",
    default=None,
)
_ITERATIONS = Option(name="num_iterations", summary="times that answers are learnt from", default=1)
_VLLM = Option(name="use_vllm", summary="a vLLM writes the answers", default=False)
_MODE = Option(
    name="vllm_mode",
    summary="colocate: on the same GPU; server: elsewhere, the default before TRL 1.0",
    default=None,
    kind=str,
    choices=("colocate", "server"),
)
_SHARE = Option(
    name="vllm_gpu_memory_utilization",
    summary="of the GPU that a vLLM takes",
    default=0.3,
    is_share=True,
)
_SLEEP = Option(
    name="vllm_enable_sleep_mode",
    summary="a vLLM on the same GPU gives weights and cache back while the model learns",
    default=False,
)
_CONTEXT = Option(
    name="vllm_max_model_length",
    summary="tokens of a sequence of that vLLM; without it all that the model accepts",
    default=None,
    has_suffixes=True,
)
_RANKS = Option(
    name="vllm_tensor_parallel_size",
    summary="GPUs that have one such vLLM together",
    default=1,
)
_DROPOUT = Option(
    name="disable_dropout", summary="dropout of adapters and model is off", default=False
)


ANSWERS_NOTE = "batch_size counts answers; models that give rewards are not counted"

# The newest vLLM that a release takes, and of those that bound none the one of their days; the last
# with bitsandbytes of its own. Source: their METADATA, `extra == "vllm"`.
_NEWEST_VLLM: ByRelease[str] = (
    ("0", "0.9.2"),
    ("0.21", "0.10.2"),
    ("0.26", "0.11.2"),
    ("0.28", "0.12.0"),
    ("1.0", "0.17.1"),
    ("1.3", "0.18.0"),
    ("1.6", "0.19.0"),
    ("1.9", "0.25.1"),
    ("1.12", "0.27.1"),
    ("1.14", "0.30.0"),
    ("1.16", "0.31.0"),
)
_LAST_FOUR_BIT = "0.27.1"

_shares_code = trl.since("0.22")  # with SFT: `prepare_peft_model`


def _micro_steps(run: RunConfig) -> int:
    """Those that learn from answers which are written at once.

    Source: `_prepare_inputs` of TRL 0.16.1 and 0.17.0; `steps_per_generation` of 0.18.2 and later.
    """
    of_step = 1 if run.versions.older("trl", "0.17") else run.gradient_accumulation_steps
    return _STEPS.whole(run.trainer_options, unstated=of_step)


def _uses_vllm(run: RunConfig) -> bool:
    return _VLLM.flag(run.trainer_options)


def _has_server(run: RunConfig) -> bool:
    """Whether other GPUs write the answers.

    Source: `GRPOConfig.vllm_mode` of 0.18.2 to 0.28.0, and of 1.0.0.
    """
    usual = "server" if run.versions.older("trl", "1.0") else "colocate"
    return _uses_vllm(run) and (run.trainer_option(_MODE.name) or usual) == "server"


def vllm_release(run: RunConfig) -> str:
    """That of a vLLM beside the trainer, where a run states none."""
    newest = run.versions.value_of("trl", _NEWEST_VLLM)
    is_late = release_numbers(newest) > release_numbers(_LAST_FOUR_BIT)
    return _LAST_FOUR_BIT if is_late and run.quant in FOUR_BIT_BNB else newest


def release_note(run: RunConfig) -> tuple[str, ...]:
    """What a 4-bit base asks of a newer vLLM."""
    if "vllm" in dict(run.libraries) or vllm_release(run) != _LAST_FOUR_BIT:
        return ()
    return (
        f"the vLLM is taken as {_LAST_FOUR_BIT}: newer ones read 4-bit bases with the package "
        "vllm-bnb-plugin alone",
    )


def _colocated(run: RunConfig, model: ModelSpec, gpu: GpuSpec, free_bytes: int) -> Colocated | None:
    """Kind: exact.

    Source: TRL 1.16 generation/vllm_generation.py:334-366, trainer/grpo_trainer.py:1124; 0.25.1
    grpo_trainer.py, whose context was that of the longest prompt and answer; 0.18.2 and 0.20.0
    (`max_num_batched_tokens`), 0.24.0 and 0.26.2 (`quantization`); 0.23.1 and 0.25.1 (`sleep`).
    """
    if not _uses_vllm(run) or _has_server(run):
        return None
    older, ranks = run.versions.older, _RANKS.whole(run.trainer_options)
    sequences = run.batch_size * ranks * _micro_steps(run)
    options: dict[str, bool | int | float | str] = {
        "gpu_memory_utilization": _SHARE.number(run.trainer_options),
        "max_num_seqs": sequences,
        "tensor_parallel_size": ranks,
    }
    if not older("trl", "0.20"):
        options["max_num_batched_tokens"] = max(4096, sequences)
    stated = _CONTEXT.whole(run.trainer_options)
    context = run.seq_len if older("trl", "0.26") else stated
    return Colocated(
        engine="vllm",
        release=vllm_release(run),
        options=options,
        context=context or None,
        context_option=_CONTEXT.name,
        share_option=_SHARE.name,
        gives_back="cache and weights" if _SLEEP.flag(run.trainer_options) else "nothing",
        ranks=ranks,
    )


def rollout(run: RunConfig, *, by_engine: bool) -> Rollout:
    """Answers that are written at once."""
    micro_steps, new_tokens = _micro_steps(run), _LENGTH.whole(run.trainer_options)
    learnt = micro_steps * _ITERATIONS.whole(run.trainer_options)
    return Rollout(
        batch_size=run.batch_size * micro_steps,
        prompt_len=run.seq_len - new_tokens,
        new_tokens=new_tokens,
        steps=learnt / run.gradient_accumulation_steps,
        by_engine=by_engine,
    )


def _rollout(run: RunConfig) -> Rollout | None:
    return None if _has_server(run) else rollout(run, by_engine=_uses_vllm(run))


def _repeats(run: RunConfig) -> Repeats:
    """Source: TRL 1.16 `RepeatSampler` of trainer/utils.py, `GRPOTrainer._get_train_sampler`."""
    micro_steps = _micro_steps(run)
    return Repeats(
        answers=run.batch_size * micro_steps,
        per_row=_GENERATIONS.whole(run.trainer_options),
        micro_batches=micro_steps * _ITERATIONS.whole(run.trainer_options),
    )


def forwards(run: RunConfig, *, rescores: bool) -> Forwards:
    """Old log-probabilities where answers are learnt from later, or an engine's differ from them.

    Args:
        rescores: the model scores the answers of an engine once more.
    """
    iterations = _ITERATIONS.whole(run.trainer_options)
    written_for = _micro_steps(run) * iterations
    is_old = run.gradient_accumulation_steps % written_for != 0
    beta = run.trainer_option(_BETA.name)
    if beta is None:  # `GRPOConfig.beta` of 0.18.2 and 0.19.1
        beta = 0.04 if run.versions.older("trl", "0.19") else 0.0
    has_reference = beta != 0.0
    return Forwards(
        policy=(is_old or rescores) / iterations,
        reference=has_reference / iterations,
        in_graph=False,
    )


def _forwards(run: RunConfig) -> Forwards:
    return forwards(run, rescores=_uses_vllm(run))


def _check(run: RunConfig) -> None:
    answers, length = _GENERATIONS.whole(run.trainer_options), _LENGTH.whole(run.trainer_options)
    if length >= run.seq_len:
        raise ConfigError(
            f"seq_len: {run.seq_len} tokens of a prompt and its answer leave none for the prompt, "
            f"with max_completion_length {length}; give more, or a shorter answer"
        )
    if answers < 2:
        raise ConfigError("num_generations: an advantage needs 2 answers or more to compare, got 1")
    written = run.batch_size * _micro_steps(run) * run.parallel.gpus
    if written % answers:
        raise ConfigError(
            f"batch_size: {written} answers are written at once (batch size x "
            f"steps_per_generation x GPUs), which is no multiple of num_generations {answers}; "
            f"give batch_size {least_batch(run)} or a multiple of it, since it counts answers, or "
            "another num_generations"
        )

    ranks, gpus = _RANKS.whole(run.trainer_options), run.parallel.gpus
    if gpus % ranks:
        raise ConfigError(
            f"vllm_tensor_parallel_size: {ranks} does not divide the {gpus} GPUs of the training "
            "evenly; give a number that does"
        )


def least_batch(run: RunConfig) -> int:
    """Answers of a GPU with which all to a prompt are written at once.

    Kind: exact. Source: TRL 1.16 `GRPOConfig.__post_init__`: `generation_batch_size` is a multiple
    of `num_generations`, and the batch times GPUs times steps_per_generation.
    """
    answers = _GENERATIONS.whole(run.trainer_options)
    return answers // math.gcd(answers, _micro_steps(run) * run.parallel.gpus)


def _keeps_base(run: RunConfig) -> bool:
    """Source: grpo_trainer.py calls `get_peft_model` alone to 0.21, and again from 0.26 on."""
    return not _shares_code(run) or sft.keeps_base(run)


def _narrows_adapters(run: RunConfig) -> bool:
    return _shares_code(run) and sft.keeps_base(run)


def idle_note(run: RunConfig, options: Iterable[Option], why: str) -> tuple[str, ...]:
    """Names those of `options` that a run changes and nobody reads."""
    stated = dict(run.trainer_options)
    idle = [each.name for each in options if stated.get(each.name, each.default) != each.default]
    return (f"{', '.join(idle)}: without effect {why}",) if idle else ()


def _notes(run: RunConfig) -> tuple[str, ...]:
    beside = (_SHARE, _SLEEP, _CONTEXT, _RANKS)
    if not _uses_vllm(run):
        why = "without use_vllm=true, so that generate of the model itself writes the answers"
        return (ANSWERS_NOTE, *idle_note(run, (_MODE, *beside), why))
    if _has_server(run):
        elsewhere = "a vLLM elsewhere writes the answers: its time is not in the step's"
        return (ANSWERS_NOTE, elsewhere, *idle_note(run, beside, "with vllm_mode server"))
    share, release = _SHARE.number(run.trainer_options), release_note(run)
    if (ranks := _RANKS.whole(run.trainer_options)) > 1:
        sums = f"what the {ranks} GPUs of a vLLM send each other is not in the time of answers"
        release = (*release, sums)
    taken = f"a vLLM beside the trainer takes {share:.0%} of the GPU, a copy of the weights in it"
    if _SLEEP.flag(run.trainer_options):
        return (
            ANSWERS_NOTE,
            f"{taken}, while it writes; asleep it keeps graphs and kernels. The trainer's own "
            "weights stay, and each step copies them to it, which takes time that is not counted",
            *release,
        )
    return (
        ANSWERS_NOTE,
        f"{taken}, at all times; vllm_enable_sleep_mode gives it back between answers",
        *release,
    )


TRAINER = replace(
    sft.TRAINER,
    takes_images=False,
    name="grpo",
    also_called={"GRPOTrainer": ""},
    summary="TRL's GRPOTrainer: learns from rewards of answers that it writes",
    library_class="trl.GRPOTrainer",
    config_class="trl.GRPOConfig",
    learning_rate=1e-6,
    rate_source="TRL's GRPOConfig",
    length_argument="",
    options=(
        _BETA,
        _GENERATIONS,
        _LENGTH,
        _STEPS,
        _ITERATIONS,
        _VLLM,
        _MODE,
        _SHARE,
        _SLEEP,
        _CONTEXT,
        _RANKS,
        _DROPOUT,
    ),
    rows="prompts",
    forwards=_forwards,
    loss_of=sft.own_loss,
    rollout=_rollout,
    colocated=_colocated,
    repeats=_repeats,
    keeps_base=_keeps_base,
    narrows_adapters=_narrows_adapters,
    scored_tokens=lambda run: _LENGTH.whole(run.trainer_options),
    check=_check,
    least_batch=least_batch,
    notes=_notes,
)
