"""What is refused of a fine-tuning: weights, adapters, losses and their precision."""

from __future__ import annotations

from whichlora.errors import ConfigError
from whichlora.methods import BUILT_IN, Method
from whichlora.parallel import list_strategies
from whichlora.spec.architecture import ModelSpec, parts_of
from whichlora.spec.checkpoint import stored_quant
from whichlora.spec.dtypes import Dtypes, is_quantised
from whichlora.spec.loss_heads import LOSS_HEADS
from whichlora.spec.run import BNB_QUANTS, FOUR_BIT_BNB, RunConfig
from whichlora.spec.targets import adapted_linears, adapts_head, adapts_table
from whichlora.spec.words import alternatives
from whichlora.tasks import task_of
from whichlora.trainers import Trainer, get_trainer


def check_trained_weights(model: ModelSpec, run: RunConfig, method: Method) -> None:
    """Refuse to train quantised weights."""
    if not method.trains_base or run.quant == "none":
        return
    quantised = [each.name for each in BUILT_IN.values() if each.base_quant != "none"]
    is_copy = stored_quant(model.config) == run.quant
    whole = "a 16-bit copy of the model" if is_copy else "quant none"
    raise ConfigError(
        f"quant: {run.quant!r} weights cannot be trained; use method {' or '.join(quantised)}, "
        f"or {whole} for full fine-tuning"
    )


def check_checkpointing(model: ModelSpec, run: RunConfig, method: Method) -> None:
    """Refuse checkpointing that the Trainer or PEFT refuses."""
    if not run.gradient_checkpointing:
        return
    if not model.supports_checkpointing:
        raise ConfigError(
            f"gradient_checkpointing: true, but the {model.model_type} of transformers has none, "
            "so that the Trainer refuses it; use false"
        )
    if not method.checkpoints:
        raise ConfigError(
            f"gradient_checkpointing: true, but {method.name} hands layers a cache, which "
            "checkpointed layers of transformers drop, so that PEFT refuses it; use false"
        )


def check_loss(model: ModelSpec, run: RunConfig, trainer: Trainer) -> None:
    """Refuse a trainer's loss of logits for a model that continues no text."""
    if trainer.logits_loss(run) is not None and model.task != "causal-lm":
        raise ConfigError(
            f"{model.name}: trainer {trainer.name} is predicted for models that continue a text; "
            f"{model.model_type} is none"
        )


def check_target(model: ModelSpec, run: RunConfig) -> None:
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


def check_adapted(
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
        if linear.transposed and not method.takes_conv1d:
            reason = "PEFT's layer takes nn.Linear, and no Conv1D; use method lora"
        if reason:
            raise ConfigError(f"method: {method.name} of {linear.name}: {reason}")
    _check_taken_by_name(model, run, method, targets)


def _check_taken_by_name(
    model: ModelSpec, run: RunConfig, method: Method, targets: tuple[str, ...]
) -> None:
    """Refuse an adapter of the head or the token table where nobody has looked at what it keeps.

    Raises:
        ConfigError: it is one of these.
    """
    refusals = []
    if adapts_head(model, targets):
        assert model.head is not None
        refusals.append((model.head.name, method.adapts_head, _refused_of_head(run)))
    if adapts_table(model, targets):
        table = model.embeddings[0].name
        refusals.append((table, method.adapts_table, _refused_of_table(model, run)))
    whole = [name for name, each in list_strategies().items() if each.keeps_weights]
    for name, is_known, own in refusals:
        reasons = (
            (not is_known, f"method {method.name}; use method lora"),
            (name in run.modules_to_save, "modules_to_save of its name; use one"),
            (run.phase == "inference", "serve as-trained; use merged"),
            *own,
            (len(parts_of(model)) > 1, "a model with an encoder"),
            (model.tower is not None, "a model that reads images"),
            (
                not set(run.parallel.names) <= set(whole) and run.parallel.gpus > 1,
                f"what divides the model; use {alternatives(('one GPU', *whole))}",
            ),
        )
        for is_so, reason in reasons:
            if is_so:
                raise ConfigError(
                    f"target_modules: an adapter of {name!r} is not predicted with {reason}"
                )


def _refused_of_head(run: RunConfig) -> tuple[tuple[bool, str], ...]:
    """Losses whose own kernels read more than the logits."""
    reads_more = (
        LOSS_HEADS[run.loss_head].passes or get_trainer(run.trainer).logits_loss(run) is not None
    )
    reason = (
        f"the loss of trainer {run.trainer}, loss_head {run.loss_head}; use trainer transformers "
        "or loop, and loss_head hf or raw"
    )
    return ((bool(run.phase == "finetune" and reads_more), reason),)


def _refused_of_table(model: ModelSpec, run: RunConfig) -> tuple[tuple[bool, str], ...]:
    """Starts that decompose a weight, and layers that read the looked-up rows again."""
    reads_again = model.streams is not None or model.layer_input_norm is not None
    return (
        (bool(run.method_options), "method options; leave them out"),
        (reads_again, f"a {model.model_type}, whose layers read the rows again"),
        (model.task != "causal-lm", f"task {run.task}; leave it out of target_modules"),
    )


def check_narrowed(run: RunConfig, method: Method, trainer: Trainer) -> None:
    """Refuse a TRL that narrows what stays fp32 in later ones. Source: TRL 1.14 and 1.15."""
    if run.quant in BNB_QUANTS and run.versions.trl_compares_logits:
        raise ConfigError(
            f"method: {method.name} in trainer {trainer.name} of TRL {run.versions.trl} has "
            f"{method.stays_wide} parameters of 16 bit on a quantised base, which is not "
            "predicted; use TRL 1.15 or later, or qlora"
        )


def check_experts(model: ModelSpec, run: RunConfig) -> None:
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


def check_clamped(model: ModelSpec, run: RunConfig, dtypes: Dtypes) -> None:
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


def check_cast(model: ModelSpec, run: RunConfig, dtypes: Dtypes) -> None:
    """Refuse 4-bit weights to whose dtype a class casts. Source: `Linear.casts_input`."""
    linears = (linear for layer, _ in model.layers() for linear in layer.linears)
    cast = [x for x in linears if x.casts_input and is_quantised(x, dtypes)]
    if cast and run.quant in FOUR_BIT_BNB:
        raise ConfigError(
            f"quant: transformers casts what {cast[0].name} of {model.name} reads to the dtype of "
            f"its weight, which is uint8 in {run.quant}; use quant int8 or none"
        )


def check_trained(model: ModelSpec, run: RunConfig, dtypes: Dtypes) -> None:
    """Refuse what the libraries can't train beside, or within, the adapters."""
    if run.modules_to_save and run.precision == "fp16" and dtypes.copy_bytes == 2:
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
