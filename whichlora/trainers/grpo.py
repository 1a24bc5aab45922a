"""TRL's `GRPOTrainer`: the model writes several answers to each prompt, and learns from rewards.

`generate` of the model itself writes them, or a vLLM on the same GPU, which holds a copy of the
weights. Rewards are computed by functions of the user: a model among them is not counted.

Source: TRL 1.16 `GRPOTrainer._prepare_inputs`, `_generate_and_score_completions`,
`_compute_loss`, `GRPOConfig.__post_init__`.
"""

from __future__ import annotations

import math
from dataclasses import replace

from whichlora.errors import ConfigError
from whichlora.spec.options import Option
from whichlora.spec.run import RunConfig
from whichlora.trainers import sft, trl
from whichlora.trainers.base import Forwards, Repeats, Rollout

_BETA = Option(
    name="beta", summary="weight of the KL term; a reference is there above 0", default=0.0
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
    summary="on the same GPU, or elsewhere",
    default="colocate",
    choices=("colocate", "server"),
)
_SHARE = Option(
    name="vllm_gpu_memory_utilization",
    summary="of the GPU that a vLLM takes",
    default=0.3,
    is_share=True,
)
_DROPOUT = Option(
    name="disable_dropout", summary="dropout of adapters and model is off", default=False
)


_shares_code = trl.since("0.22")  # with SFT: `prepare_peft_model`


def _micro_steps(run: RunConfig) -> int:
    """Those that learn from answers which are written at once."""
    return _STEPS.whole(run.trainer_options, unstated=run.gradient_accumulation_steps)


def _uses_vllm(run: RunConfig) -> bool:
    return _VLLM.flag(run.trainer_options)


def _has_server(run: RunConfig) -> bool:
    """Whether other GPUs write the answers."""
    return _uses_vllm(run) and _MODE.text(run.trainer_options) == "server"


def _rollout(run: RunConfig) -> Rollout | None:
    if _has_server(run):
        return None
    micro_steps, new_tokens = _micro_steps(run), _LENGTH.whole(run.trainer_options)
    learnt = micro_steps * _ITERATIONS.whole(run.trainer_options)
    return Rollout(
        batch_size=run.batch_size * micro_steps,
        prompt_len=run.seq_len - new_tokens,
        new_tokens=new_tokens,
        steps=learnt / run.gradient_accumulation_steps,
        pool_share=_SHARE.number(run.trainer_options) if _uses_vllm(run) else 0.0,
    )


def _repeats(run: RunConfig) -> Repeats:
    """Source: TRL 1.16 `RepeatSampler` of trainer/utils.py, `GRPOTrainer._get_train_sampler`."""
    micro_steps = _micro_steps(run)
    return Repeats(
        answers=run.batch_size * micro_steps,
        per_row=_GENERATIONS.whole(run.trainer_options),
        micro_batches=micro_steps * _ITERATIONS.whole(run.trainer_options),
    )


def _forwards(run: RunConfig) -> Forwards:
    """Old log-probabilities where answers are learnt from later, or vLLM's differ from them."""
    iterations = _ITERATIONS.whole(run.trainer_options)
    written_for = _micro_steps(run) * iterations
    is_old = run.gradient_accumulation_steps % written_for != 0
    has_reference = _BETA.number(run.trainer_options) != 0.0
    return Forwards(
        policy=(is_old or _uses_vllm(run)) / iterations,
        reference=has_reference / iterations,
        in_graph=False,
    )


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


def _notes(run: RunConfig) -> tuple[str, ...]:
    answers = "batch_size counts answers; models that give rewards are not counted"
    if _has_server(run):
        return (answers, "a vLLM elsewhere writes the answers: its time is not in the step's")
    if _uses_vllm(run):
        share = _SHARE.number(run.trainer_options)
        return (
            answers,
            f"a vLLM beside the trainer takes {share:.0%} of the GPU, in which a copy of the "
            "weights and its cache must fit",
        )
    return (answers,)


TRAINER = replace(
    sft.TRAINER,
    takes_images=False,
    name="grpo",
    also_called={"GRPOTrainer": "", "unsloth-grpo": trl.UNDER_UNSLOTH},
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
        _DROPOUT,
    ),
    rows="prompts",
    forwards=_forwards,
    loss_of=sft.own_loss,
    rollout=_rollout,
    repeats=_repeats,
    keeps_base=_keeps_base,
    narrows_adapters=_narrows_adapters,
    scored_tokens=lambda run: _LENGTH.whole(run.trainer_options),
    check=_check,
    least_batch=least_batch,
    notes=_notes,
)
