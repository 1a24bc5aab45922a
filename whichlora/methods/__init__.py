"""Fine-tuning methods by name; one small file each, also from other packages.

A package adds its own method with an entry point in the group `whichlora.methods` that loads a
`Method`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from whichlora.errors import ConfigError
from whichlora.methods import (
    adalora,
    adamss,
    adaption_prompt,
    beft,
    boft,
    c3a,
    cartridge,
    deft,
    delora,
    dora,
    fourierft,
    frod,
    full,
    glora,
    gralora,
    hira,
    hra,
    ia3,
    kasa,
    lily,
    ln_tuning,
    loha,
    lokr,
    lora,
    lora_fa,
    miss,
    oft,
    osf,
    p_tuning,
    peanut,
    prefix_tuning,
    prompt_tuning,
    psoft,
    pvera,
    qdora,
    qlora,
    randlora,
    road,
    shira,
    starts,
    supertuning,
    tinylora,
    trainable_tokens,
    unilora,
    vblora,
    velora,
    vera,
    waveft,
)
from whichlora.methods.base import Method
from whichlora.spec.dtypes import has_master_weights
from whichlora.spec.members import Members
from whichlora.spec.options import OptionValue, known
from whichlora.spec.run import (
    BNB_QUANTS,
    FOUR_BIT_BNB,
    FP32_PRECISIONS,
    USUAL_HEAD,
    ComputeDtype,
    RunConfig,
)
from whichlora.tasks import with_task
from whichlora.trainers import get_trainer, with_trainer
from whichlora.trainers.base import SUPERVISED_RATE

MOST_RATE = 1.0  # of learning rates, as in a config file
WeightDtype = Literal["bfloat16", "float16", "float32"]

_METHODS = Members[Method](
    "method",
    "methods",
    Method,
    (
        *(module.METHOD for module in (full, lora, qlora, dora, qdora)),
        *starts.METHODS,
        *(module.METHOD for module in (lora_fa, miss, oft, c3a, shira, vera, ia3, loha, lokr)),
        *(module.METHOD for module in (adalora, trainable_tokens, prompt_tuning, p_tuning)),
        *(module.METHOD for module in (ln_tuning, hira, fourierft, delora, road, gralora)),
        *(module.METHOD for module in (beft, osf, psoft, deft, adamss, glora, peanut, frod)),
        *(module.METHOD for module in (supertuning, kasa, velora)),
        *(
            module.METHOD
            for module in (lily, randlora, vblora, boft, waveft, pvera, tinylora, unilora, hra)
        ),
        *(module.METHOD for module in (prefix_tuning, cartridge, adaption_prompt)),
    ),
)
BUILT_IN = _METHODS.built_in
ENTRY_POINT_GROUP = _METHODS.group
list_methods = _METHODS.all
COMPARED = ("full", "lora", "qlora", "dora", "qdora")  # where nobody names the methods to compare
# types of peft 0.21.2 that no file here describes, and why
_ASKS_TASKS = "its forward asks for task_ids with each batch, which no trainer here hands on"
NOT_MODELLED = {
    "cpt": "it replaces the loss by one of its own",
    "multitask-prompt-tuning": _ASKS_TASKS,
    "poly": _ASKS_TASKS,
    "shadow": "it trains a second model beside the base",
    "xlora": "it mixes LoRA adapters that were trained before",
}


# adapters of surveys of LoRA that no release of PEFT up to 0.21.2 has
NOT_IN_PEFT = ("delta-lora", "dylora", "hydralora", "mora", "nola", "relora", "sora", "tied-lora")


def get_method(name: str) -> Method:
    """The method called `name`.

    Raises:
        ConfigError: there is none, or it is a type of PEFT that is not modelled, or not in PEFT.
    """
    try:
        return _METHODS.get(name)
    except ConfigError:
        if name in NOT_IN_PEFT:
            raise ConfigError(
                f"method: {name} is not in PEFT 0.21.2, so that nothing here trains it; 'whichlora "
                "methods' lists those that are modelled"
            ) from None
        if name not in NOT_MODELLED:
            raise
        raise ConfigError(
            f"method: {name} of PEFT is not modelled: {NOT_MODELLED[name]}; 'whichlora methods' "
            "lists those that are"
        ) from None


def with_defaults(run: RunConfig) -> RunConfig:
    """`run` with what its method, its trainer and its libraries decide filled in.

    The method knows its storage, and how its model is served. Merged weights are stored in 16 bit
    where `quant` does not say otherwise; a model without adapters has nothing to merge.
    PEFT's recipes prepare a bitsandbytes base for training; of TRL's trainers the release says.

    Raises:
        ConfigError: no such method or trainer, or one that has no such setting.
    """
    method = get_method(run.method)
    options = _stated(method, run)
    if options != run.method_options:
        run = replace(run, method_options=options)
    training = run.phase == "finetune"
    run = with_task(run)
    if training:
        run = with_trainer(_with_optimizer(method, run))
    serve = run.serve or method.serve
    if training or method.trains_base:  # which do not ask
        serve = "merged"
    quant = run.quant
    if quant is None:
        quant = method.base_quant if training or serve == "as-trained" else "none"
    prepare_kbit = run.prepare_kbit
    if prepare_kbit is None:
        prepare_kbit = quant in BNB_QUANTS and not get_trainer(run.trainer).keeps_base(run)
    use_reentrant = run.use_reentrant
    if use_reentrant is None:
        use_reentrant = get_trainer(run.trainer).reentrant if training else None
    if use_reentrant is None:
        use_reentrant = run.versions.checkpoints_reentrant
    return replace(
        run,
        quant=quant,
        serve=serve,
        prepare_kbit=prepare_kbit,
        use_reentrant=use_reentrant,
        compute_dtype=_compute_dtype(run, quant),
    )


def _compute_dtype(run: RunConfig, quant: str) -> ComputeDtype:
    """What 4-bit products compute in; "auto" where there are none, or the run computes so, too."""
    of_precision = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "tf32": "float32"}
    is_usual = run.compute_dtype == of_precision.get(run.product_dtype)
    return "auto" if quant not in FOUR_BIT_BNB or is_usual else run.compute_dtype


def under_trainer(run: RunConfig, trainer: str) -> RunConfig:
    """`run` as `trainer` runs it, with what that decides open again."""
    return replace(
        run,
        trainer=trainer,
        trainer_options=(),
        loss_head=USUAL_HEAD,
        prepare_kbit=None,
        use_reentrant=None,
    )


def usual_learning_rate(run: RunConfig) -> tuple[float, str]:
    """The learning rate of `run` where nobody states one, and whose it is.

    Kind: a rule of thumb: what its method takes in supervised training, times what its trainer
    takes of that. Source: each member's `rate_source`; TRL's documentation has the same products.
    """
    method, trainer = get_method(run.method), get_trainer(run.trainer)
    times = method.learning_rate / SUPERVISED_RATE
    rate = float(f"{min(times * trainer.learning_rate, MOST_RATE):.6g}")
    if times == 1:
        return rate, trainer.rate_source
    return rate, f"{times:g} times that of {trainer.rate_source} ({method.rate_source})"


def _with_optimizer(method: Method, run: RunConfig) -> RunConfig:
    """`run` with the optimizer that its method is, or that its release of transformers has.

    Raises:
        ConfigError: the optimizer is another method.
    """
    if method.optimizer is not None:
        return replace(run, optimizer=method.optimizer)
    if run.optimizer == "adamw_hf" and not run.versions.has_own_adamw:
        return replace(run, optimizer="adamw_torch")
    owners = [each.name for each in BUILT_IN.values() if each.optimizer == run.optimizer]
    if owners:
        raise ConfigError(
            f"optimizer: {run.optimizer} is method {owners[0]}, got method {method.name}; use "
            f"method {owners[0]}, or another optimizer"
        )
    return run


def _stated(method: Method, run: RunConfig) -> tuple[tuple[str, OptionValue], ...]:
    """The options of `run` that are not at their defaults.

    Raises:
        ConfigError: the method has no such option, or does not accept its value.
    """
    asked = dict(run.method_options)
    owner = f"method {method.name}"
    known(method.options, asked, setting="method_options", owner=owner)
    values = (
        (option, option.checked(asked[option.name]))
        for option in method.options
        if option.name in asked
    )
    changed = ((o.name, value) for o, value in values if value is not None and value != o.default)
    return tuple(sorted(changed))


def with_method(run: RunConfig, name: str) -> RunConfig:
    """`run` with another method, and those of its options that this one has, too."""
    names = {option.name for option in get_method(name).options}
    kept = tuple(pair for pair in run.method_options if pair[0] in names)
    return replace(run, method=name, method_options=kept)


def weight_dtype(run: RunConfig) -> WeightDtype:
    """Dtype of the weights of `run` that are not quantised.

    Raises:
        ConfigError: no such method.
    """
    trains_base = get_method(run.method).trains_base
    if run.precision in FP32_PRECISIONS or has_master_weights(run, trains_base=trains_base):
        return "float32"
    return "float16" if run.precision.startswith("fp16") else "bfloat16"


def input_dtype(run: RunConfig) -> WeightDtype:
    """Dtype of the inputs of a tower that casts none, as its first weights need them.

    Source: transformers 5.23 `WhisperEncoder.forward`; torch 2.13: autocast casts them.
    """
    trains = run.phase == "finetune"
    is_wide = trains and (run.precision in ("bf16", "fp16") or bool(run.prepare_kbit))
    return "float32" if is_wide else weight_dtype(run)


__all__ = [
    "BUILT_IN",
    "COMPARED",
    "ENTRY_POINT_GROUP",
    "NOT_IN_PEFT",
    "NOT_MODELLED",
    "Method",
    "get_method",
    "input_dtype",
    "list_methods",
    "weight_dtype",
    "with_defaults",
    "with_method",
]
