"""FullyShardedDataParallel: every rank keeps a share of each parameter, and gathers unit by unit.

Source: torch 2.13 `torch/distributed/fsdp/_fully_shard` (version 2) and
`fully_sharded_data_parallel.py` (version 1); accelerate 1.15 `fsdp2_prepare_model` and
`Accelerator.prepare_model`, which say what the units are and which dtypes they have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from whichlora.errors import ConfigError
from whichlora.memory.entries import Entry
from whichlora.memory.event_list import EventList
from whichlora.memory.optimizer import Update, state_bytes, update_bytes
from whichlora.memory.step import TrainingStep
from whichlora.memory.weights import weight_bytes
from whichlora.parallel.base import (
    ON_HOST,
    Hidden,
    HostUpdate,
    Message,
    Moments,
    RankKind,
    Saving,
    Spread,
    Strategy,
    in_run,
    loads_on_host,
)
from whichlora.parallel.fsdp1 import Rank1
from whichlora.parallel.fsdp2 import Rank2
from whichlora.parallel.fsdp_rank import host_entries
from whichlora.parallel.fsdp_units import (
    SentUnits,
    Sharding,
    mixed_precision,
    quant_storage,
    sharding_of,
    syncs_each_batch,
)
from whichlora.parallel.host_update import OMP_NUM_THREADS, threads_of, update_note
from whichlora.spec.numeric import Count, largest
from whichlora.spec.options import Option, OptionValue
from whichlora.spec.run import FOUR_BIT_BNB, Precision, RunConfig
from whichlora.spec.tower import Tower
from whichlora.units import format_bytes

OFFLOADED = ("optimizer", "params")  # `cpu_offload`, with the gradients
OFFLOAD = Option(
    name="offload",
    summary="what is kept on the host; under fsdp both together",
    default=(),
    choices=OFFLOADED,
)
# adamw_hf: `AdamW.step` of transformers 4.28 is torch operators on each parameter, wherever it lies
_ON_HOST = ("adamw_torch_fused", "adamw_torch", "adamw_hf", "adafactor", "sgd")
_BACKENDS = "cuda:nccl,cpu:gloo"  # gloo sums the gradients' norm on the host
_PURE: dict[str, Precision] = {"bf16": "bf16-pure", "fp16": "fp16-pure"}


def _sharding(rank: RankKind, spread: Spread) -> Sharding:
    return sharding_of(rank.at_rest, rank.step, spread)


def _split(rank: RankKind, spread: Spread) -> tuple[RankKind, ...]:
    return (replace(rank, step=_computed(rank.step, spread)),)


def _computed(step: TrainingStep, spread: Spread) -> TrainingStep:
    """What kernels see: the parameters as they are gathered, and no autocast under version 2."""
    run = step.run
    if syncs_each_batch(run, spread):  # gradients are new in every micro-step
        run = replace(run, gradient_accumulation_steps=1)
    mixed = mixed_precision(step, spread)
    if mixed == "no":
        return replace(step, run=run)
    # every parameter is cast as it is gathered, those of a base in fp32 and of adapters, too
    run = replace(run, base_dtype="auto", prepare_kbit=False)
    # version 1: a layer of PEFT asks the weight of `lora_A` for its dtype before that is gathered
    if spread.options["fsdp_version"] == "2":
        # `prepare_model` of accelerate, which would turn autocast on, is not called
        run = replace(run, precision=_PURE[mixed], adapter_dtype="auto")
    return in_run(step, run)


def _moments(rank: RankKind, moments: Moments, spread: Spread) -> Moments:
    sharding = _sharding(rank, spread)
    rank_of = Rank1 if spread.options["fsdp_version"] == "1" else Rank2
    if not _loads_on_gpu(rank.at_rest.run, spread):  # it moves less at once than a step gathers
        moments = {name: moments[name] for name in moments if name != "loading"}
    return rank_of(sharding).moments(moments)


def _requests(rank: RankKind, spread: Spread) -> EventList | None:
    if spread.options["fsdp_version"] != "1":
        return None
    return Rank1(_sharding(rank, spread)).requests()


def _loads_on_gpu(run: RunConfig, spread: Spread) -> bool:
    """Whether each process loads all weights on its GPU: those that are not sharded.

    Others stay on the host until `fully_shard` moves and shards them, module by module; it moves
    nothing that it does not shard. Without a device map a quantised base goes to the GPU.
    Source: transformers 5.23 `Bnb4BitHfQuantizer.update_device_map`; torch 2.13 `fully_shard`,
    `_move_states_to_device`; version 1: `_init_param_handle_from_module`.
    """
    return run.quant in FOUR_BIT_BNB and quant_storage(run, spread) == "uint8"


def _loads_once(step: TrainingStep, spread: Spread) -> bool:
    """Whether the first process of a node loads alone, and others have empty weights."""
    asked = bool(spread.options["cpu_ram_efficient_loading"])
    return asked and step.run.versions.fsdp_loads_once


def _loading_of_others(step: TrainingStep, spread: Spread) -> Count | None:
    """The same of every other process; None where it loads as the first.

    Empty weights take no memory until version 2 widens those that are trained.

    Kind: exact, of tensors. Source: transformers 4.57 `load_state_dict`,
    `_move_missing_keys_from_meta_to_cpu`; accelerate 1.15 `fsdp2_prepare_model`.
    """
    if not _loads_once(step, spread):
        return None
    return 4 * step.num_trained if _widens_trained(step, spread) else 0


def _widens_trained(step: TrainingStep, spread: Spread) -> bool:
    of_version = spread.options["fsdp_version"] == "2" and step.dtypes.quant not in FOUR_BIT_BNB
    return of_version and mixed_precision(step, spread) != "no"


def _loading(step: TrainingStep, spread: Spread) -> Count:
    """What each process has on the host until `fully_shard` takes it, module by module.

    Every process makes 4-bit codes there. Beside 16-bit weights version 2 first widens what is
    trained to fp32.

    Kind: exact, of tensors. Source: transformers 5.23 `get_init_context`, `is_fsdp_enabled`;
    accelerate 1.15 `fsdp2_prepare_model`.
    """
    if step.dtypes.quant not in FOUR_BIT_BNB:
        loaded = loads_on_host(step, spread)
        widens = _widens_trained(step, spread)
        return largest(loaded, 4 * step.num_trained) if widens else loaded
    if _loads_on_gpu(step.run, spread):
        return 0
    return sum(weight_bytes(step.model, step.dtypes).values())


def _messages(rank: RankKind, spread: Spread) -> tuple[Message, ...]:
    sharding = _sharding(rank, spread)
    return tuple(
        message
        for units in sharding.units.sent()
        for message in _of_unit(units, sharding, rank.at_rest, spread)
    )


def _of_unit(
    sent: SentUnits, sharding: Sharding, step: TrainingStep, spread: Spread
) -> Iterator[Message]:
    """Gathers of equal units, and what reduces their gradients.

    Source: the collectives of traced steps (`benchmarks/fsdp_traces.py`).
    """
    run, size = step.run, sharding.size
    micro_steps = run.gradient_accumulation_steps
    unit, number = sent.unit, sent.number
    gathered = unit.gathered(size)
    reduced = unit.reduced(size, sharding.reduce_bytes)
    reductions = micro_steps if syncs_each_batch(run, spread) else 1
    # version 1: `_should_free_in_backward` keeps them where gradients are not sent
    stays = sharding.units.flat and not sharding.reshards and reductions == 1
    if sharding.offloads:
        yield from _between_host(sent, sharding, step)
    if size > 1:
        yield Message(
            what=f"parameters of the {unit.name}, forward",
            collective="all_gather",
            num_bytes=gathered,
            count=number * (1 if stays else micro_steps),
            size=size,
            hidden_by="nothing" if unit.name == "embedding" else "forward",
        )
    again = sent.gathers_in_backward(run) if sharding.reshards else 0
    if size > 1 and again:
        yield Message(
            what=f"parameters of the {unit.name}, backward",
            collective="all_gather",
            num_bytes=gathered,
            count=again * micro_steps,
            size=size,
            hidden_by="backward",
        )
    if not any(parameter.trained for parameter in unit.parameters):
        return
    if size > 1:
        yield Message(
            what=f"gradients of the {unit.name}",
            collective="reduce_scatter",
            num_bytes=reduced,
            count=number * reductions,
            size=size,
            hidden_by="nothing" if sent.is_last else "backward",
            micro_steps=reductions,
        )
    if sharding.replicas > 1:
        yield Message(
            what=f"shards of gradients of the {unit.name}",
            collective="all_reduce",
            num_bytes=reduced // size,
            count=number * reductions,
            size=sharding.replicas,
            hidden_by="nothing" if sent.is_last else "backward",
            micro_steps=reductions,
            stride=size,
        )


def _between_host(sent: SentUnits, sharding: Sharding, step: TrainingStep) -> Iterator[Message]:
    """Shares that go to the GPU before each gather, and gradients that leave it.

    Source: torch 2.13 `FSDPParam.all_gather_inputs`, which copies them as they are kept;
    `foreach_reduce`.
    """
    unit, number, size = sent.unit, sent.number, sharding.size
    micro_steps = step.run.gradient_accumulation_steps
    again = sent.gathers_in_backward(step.run) if sharding.reshards else 0
    share = sum(p.shard(size) * p.rest_bytes for p in unit.parameters)
    first: Hidden = "nothing" if unit.name == "embedding" else "forward"
    for phase, hidden_by, count in (("forward", first, number), ("backward", "backward", again)):
        if count:
            yield Message(
                what=f"shares of the {unit.name} to the GPU, {phase}",
                collective="from_host",
                num_bytes=share,
                count=count * micro_steps,
                size=1,
                hidden_by=hidden_by,
            )
    gradients = unit.gradient_shard(size)
    if any(parameter.trained for parameter in unit.parameters):
        reductions = micro_steps if sharding.syncs_each_batch else 1
        yield Message(
            what=f"gradients of the {unit.name} to the host",
            collective="to_host",
            num_bytes=gradients,
            count=number * reductions,
            size=1,
            hidden_by="nothing" if sent.is_last else "backward",
            micro_steps=reductions,
        )


def _on_host(rank: RankKind, spread: Spread) -> tuple[Entry, ...]:
    return host_entries(_sharding(rank, spread))


def _host_update(rank: RankKind, spread: Spread) -> HostUpdate | None:
    """The update of a rank's shares by torch's operators on the host, after the norm of gradients.

    Kind: exact. Source: `memory.optimizer.update_bytes`; torch 2.13 `foreach_reduce`, which adds
    gradients of further micro-steps on the host where these are sent.
    """
    sharding = _sharding(rank, spread)
    if not sharding.offloads:
        return None
    run = rank.at_rest.run
    sent = run.gradient_accumulation_steps if sharding.syncs_each_batch else 1
    update = Update(
        tensors=tuple(sharding.units.trained_shards(sharding.size)),
        optimizer=run.optimizer,
        foreach=False,
        clips=rank.step.trainer.clips_gradients,
        unscales=False,
        num_micro_batches=sent,
    )
    return HostUpdate(num_bytes=update_bytes(update), threads=threads_of(spread))


def _device_share(spread: Spread) -> float:
    """Of weights and of the update, what is on the GPU."""
    return 0.0 if spread.options["offload"] else _share(spread)


def _share(spread: Spread) -> float:
    replicas = int(spread.options["dp_replicate_size"] or 1)  # type: ignore
    return 1 / (spread.size * spread.joined // replicas)


def saving(rank: RankKind, spread: Spread) -> Saving:
    """Rank 0 copies all weights to the host, frozen ones too, and after them the states.

    Version 1 gathers a unit at once, in the dtype in which it is kept, version 2 a tensor.

    Kind: exact, of tensors; what the file's writer copies is left out.
    Source: transformers 5.23 `TrainingArguments` (state_dict_type FULL_STATE_DICT), `Trainer.
    save_model`, `_save_optimizer_and_scheduler`; accelerate 1.15 `get_state_dict`,
    `save_fsdp_optimizer`; torch 2.13 `_full_pre_state_dict_hook`, `_gather_state_dict`.
    """
    units = _sharding(rank, spread).units
    weights = units.unsharded + sum(unit.kept * number for unit, number in units.all())
    run = rank.at_rest.run
    states = state_bytes(units.trained, optimizer=run.optimizer, device_kind=rank.step.gpu.kind)
    if spread.options["fsdp_version"] == "1":
        gathered = [unit.kept for unit in (units.outside, *units.blocks)]
    else:
        gathered = [
            p.elements // p.count * p.rest_bytes for unit, _ in units.all() for p in unit.parameters
        ]
    return Saving(
        what="all weights" if not rank.step.method.trains_base else "all weights, then all states",
        host_bytes=largest(weights, states),
        device_bytes=largest(*gathered),
        instead="state_dict_type SHARDED_STATE_DICT in fsdp_config",
    )


def _check(step: TrainingStep, spread: Spread) -> None:
    replicas = int(spread.options["dp_replicate_size"] or 1)  # type: ignore
    if spread.size % replicas:
        raise ConfigError(
            f"dp_replicate_size: {spread.size} GPUs can't be divided into {replicas} equal groups; "
            f"give a divisor of {spread.size}"
        )
    if spread.joined > 1 and spread.options["fsdp_version"] == "1":
        raise ConfigError(
            "fsdp_version: accelerate divides sequences with version 2 alone; use fsdp_version 2"
        )
    if step.model.skips_layers:
        raise ConfigError(
            f"parallel: fsdp shards layers of {step.model.name} that rows without images skip, "
            "which is not predicted; use zero2 or zero3"
        )
    if step.model.tower is not None:
        _check_tower(step.model.name, step.model.tower)
    if step.dtypes.quant != "none" and step.dtypes.quant not in FOUR_BIT_BNB:
        raise ConfigError(
            f"quant: {step.dtypes.quant} weights are integers, which FSDP can't shard; use "
            "quant nf4, nf4-dq or none, or parallel ddp"
        )
    if step.dtypes.quant in FOUR_BIT_BNB:
        _check_storage(step, spread)
    if spread.options["offload"]:
        _check_offload(step, spread)
    if spread.options["fsdp_version"] == "1" and step.method.stays_wide:
        raise ConfigError(
            f"method: {step.run.method} reads the weights of lora_A, which version 1 shards on "
            "their own under the Trainer's wrap policy for PEFT, and stops; use fsdp_version 2"
        )


def _check_tower(name: str, tower: Tower) -> None:
    """Refuse towers whose blocks are no units.

    Source: `_no_split_modules` of transformers 5.23, by which accelerate and PEFT wrap.
    """
    if tower.hears:
        raise ConfigError(
            f"audios: an encoder of sound ({name}) is not predicted under fsdp; use ddp or zero2"
        )
    if tower.splits_blocks:
        raise ConfigError(
            f"images: FSDP divides the attention of {name}'s tower alone, and gathers the rest at "
            "once, which is not predicted; use ddp or zero2"
        )


def _check_offload(step: TrainingStep, spread: Spread) -> None:
    """The host's kernels make the update, and the loss's scale is not searched for there."""
    accumulates = step.run.gradient_accumulation_steps > 1
    if spread.options["fsdp_version"] == "1" and accumulates and spread.options["sync_each_batch"]:
        raise ConfigError(
            "offload: version 1 replaces gradients on the host by those of the next micro-step; "
            "use sync_each_batch false, or fsdp_version 2"
        )
    if mixed_precision(step, spread) == "fp16":
        raise ConfigError(
            "offload: fp16 gradients on the host are not modelled; use precision bf16, which takes "
            "as many bytes"
        )
    if step.run.optimizer not in _ON_HOST:
        raise ConfigError(
            f"offload: optimizer {step.run.optimizer} has no kernels for the host; use "
            f"{', '.join(_ON_HOST)}"
        )


def _check_storage(step: TrainingStep, spread: Spread) -> None:
    """Whether what holds 4-bit codes can be gathered, and arrives as it was.

    Source: as of `quant_storage`; uint8 is left out by accelerate 1.15 under version 2.
    """
    storage = quant_storage(step.run, spread)
    options = dict(spread.options) | {"bnb_4bit_quant_storage": None}
    accepted = quant_storage(step.run, replace(spread, options=options))
    if spread.options["fsdp_version"] == "1" and storage != accepted:
        raise ConfigError(
            f"bnb_4bit_quant_storage: version 1 can't join codes in {storage} and norms in "
            f"{accepted} to one vector; leave it out, or use {accepted} or fsdp_version 2"
        )
    if storage not in ("uint8", accepted) and mixed_precision(step, spread) != "no":
        raise ConfigError(
            f"bnb_4bit_quant_storage: version 2 gathers in {accepted}, and casts codes in "
            f"{storage}, which destroys them; leave it out or use {accepted}"
        )


def _notes(step: TrainingStep, spread: Spread) -> tuple[str, ...]:
    notes = _notes_on_four_bit(step, spread) if step.dtypes.quant in FOUR_BIT_BNB else ()
    tower = step.model.tower
    if tower is not None and tower.block_class:
        notes += (
            f"fsdp: accelerate stops at classes that {step.model.name} has not; name those of its "
            f"layers and {tower.block_class} in fsdp_transformer_layer_cls_to_wrap",
        )
    if offload := spread.options["offload"]:
        notes += (update_note(spread),)
        if set(offload) != set(OFFLOADED):  # type: ignore[arg-type]
            notes += (f"offload: FSDP keeps {' and '.join(OFFLOADED)} on the host together",)
    if spread.options["cpu_ram_efficient_loading"] and not _loads_once(step, spread):
        notes += (
            "fsdp: cpu_ram_efficient_loading has no effect on weights from transformers 5.0 on, "
            "where every process loads all of them",
        )
    return notes


def _notes_on_four_bit(step: TrainingStep, spread: Spread) -> tuple[str, ...]:
    storage = quant_storage(step.run, spread)
    if storage == "uint8":
        return (
            "fsdp: 4-bit weights stored as uint8 are not sharded, every GPU keeps all of them; "
            "set bnb_4bit_quant_storage to bfloat16",
        )
    notes = [
        f"fsdp: 4-bit weights are sharded where BitsAndBytesConfig has bnb_4bit_quant_storage="
        f"torch.{storage}; its own default, uint8, is not",
        "fsdp: each process first loads all weights in host memory, "
        f'{format_bytes(_loading(step, spread))} (device_map={{"": "cpu"}}); without that, '
        "transformers loads them on its GPU",
    ]
    if spread.options["fsdp_version"] == "1" and step.run.prepare_kbit:
        notes.append(
            "fsdp: version 1 gathers in the fp32 of the norms, which prepare_kbit makes; 16 bit "
            "needs prepare_kbit false"
        )
    return tuple(notes)


def _training_arguments(run: RunConfig, spread: Spread) -> dict[str, Any]:
    """`fsdp` and `fsdp_config` of `TrainingArguments`, and what their keys can't say refused."""
    options = spread.options
    implied = run.precision if run.precision in ("bf16", "fp16") else "no"
    for name, implied_value in (("mixed_precision", implied), ("reduce_dtype", None)):
        if options[name] not in (None, implied_value):
            raise ConfigError(
                f"{name}: {options[name]} has no key in TrainingArguments, which take it from the "
                "precision; leave it out"
            )
    if options["dp_replicate_size"] != 1:
        raise ConfigError(
            "dp_replicate_size: has no key in fsdp_config; give accelerate's ParallelismConfig"
        )
    config: dict[str, Any] = {
        "version": int(str(options["fsdp_version"])),
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "reshard_after_forward": bool(options["reshard_after_forward"]),
    }
    if options["fsdp_version"] == "1":
        shards = "full_shard" if options["reshard_after_forward"] else "shard_grad_op"
        prefetch = options["backward_prefetch"]
        config |= {"reshard_after_forward": shards, "backward_prefetch": prefetch}
    if options["cpu_ram_efficient_loading"]:
        config["cpu_ram_efficient_loading"] = True
    arguments: dict[str, Any] = {"fsdp": True, "fsdp_config": config}
    if options["offload"]:
        config["cpu_offload"] = True
        if options["fsdp_version"] == "2":  # version 1 sums norms on the GPU
            arguments["ddp_backend"] = _BACKENDS
    if options["sync_each_batch"]:
        arguments["accelerator_config"] = {
            "gradient_accumulation_kwargs": {"sync_each_batch": True}
        }
    return arguments


def _model_arguments(run: RunConfig, spread: Spread) -> dict[str, Any]:
    """What holds 4-bit weights, as `BitsAndBytesConfig` names it, and where they are loaded."""
    if run.quant not in FOUR_BIT_BNB:
        return {}
    placed = {} if _loads_on_gpu(run, spread) else {"device_map": ON_HOST}
    return {"bnb_4bit_quant_storage": quant_storage(run, spread), **placed}


def _accelerate(run: RunConfig, spread: Spread) -> dict[str, Any]:
    options = spread.options
    version = int(str(options["fsdp_version"]))
    reshards: bool | str = bool(options["reshard_after_forward"])
    if version == 1:
        reshards = "FULL_SHARD" if reshards else "SHARD_GRAD_OP"
    config = {
        "fsdp_version": version,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": reshards,
    }
    if version == 1:
        config |= {
            "fsdp_backward_prefetch": options["backward_prefetch"],
            "fsdp_use_orig_params": True,
        }
    if options["offload"]:
        config["fsdp_offload_params"] = True
    if options["cpu_ram_efficient_loading"]:
        config["fsdp_cpu_ram_efficient_loading"] = True
        if version == 1:
            config["fsdp_sync_module_states"] = True
    return {"distributed_type": "FSDP", "fsdp_config": config}


def _read_accelerator(accelerator: Mapping[str, Any]) -> dict[str, OptionValue] | None:
    plugin = accelerator.get("fsdp")
    if plugin is None:
        return None
    if plugin["activation_checkpointing"]:
        raise ConfigError("fsdp: activation_checkpointing is not modelled")
    if plugin["wraps"] != "transformer_auto_wrap_policy":
        whole = "NO_WRAP gathers all weights and gradients on each GPU at once, and "
        raise ConfigError(
            f"fsdp: {whole if plugin['wraps'] == 'NO_WRAP' else ''}only TRANSFORMER_BASED_WRAP is "
            "modelled"
        )
    read: dict[str, OptionValue] = {
        "fsdp_version": str(plugin["fsdp_version"]),
        "reshard_after_forward": plugin["shards"] is True or plugin["shards"] == "FULL_SHARD",
        "sync_each_batch": bool(accelerator["sync_each_batch"]),
        "offload": OFFLOADED if plugin["cpu_offload"] else (),
    }
    if plugin.get("cpu_ram_efficient_loading"):
        read["cpu_ram_efficient_loading"] = True
    if plugin["shards"] not in (True, False, "FULL_SHARD", "SHARD_GRAD_OP"):
        raise ConfigError(f"fsdp: {plugin['shards']} is not modelled")
    if read["fsdp_version"] == "1":
        read["backward_prefetch"] = plugin["backward_prefetch"] or "NO_PREFETCH"
    return read


STRATEGY = Strategy(
    name="fsdp",
    summary="parameters, gradients and states sharded, gathered unit by unit",
    divides="data",
    options=(
        Option(
            name="fsdp_version",
            summary="1: FullyShardedDataParallel, 2: fully_shard",
            default="2",
            choices=("1", "2"),
        ),
        Option(
            name="reshard_after_forward",
            summary="free gathered parameters after the forward; false is SHARD_GRAD_OP",
            default=True,
        ),
        Option(
            name="dp_replicate_size",
            summary="groups that each hold all shards (hybrid sharding)",
            default=1,
        ),
        Option(
            name="mixed_precision",
            summary="dtype in which parameters are gathered; default: of the run's precision",
            default=None,
            choices=("no", "bf16", "fp16"),
        ),
        Option(
            name="reduce_dtype",
            summary="dtype in which gradients are sent; default: of mixed_precision",
            default=None,
            choices=("bf16", "fp16", "fp32"),
        ),
        Option(
            name="backward_prefetch",
            summary="version 1: whether the next unit of the backward is gathered ahead",
            default="NO_PREFETCH",
            choices=("NO_PREFETCH", "BACKWARD_PRE"),
        ),
        Option(
            name="sync_each_batch",
            summary="send gradients after every micro-step, which keeps shards of them alone",
            default=False,
        ),
        OFFLOAD,
        OMP_NUM_THREADS,
        Option(
            name="cpu_ram_efficient_loading",
            summary="the first process of a node loads alone (transformers before 5.0)",
            default=False,
        ),
        Option(
            name="bnb_4bit_quant_storage",
            summary="dtype that stores 4-bit weights; uint8 is not sharded; default: as gathered",
            default=None,
            choices=("uint8", "bfloat16", "float16", "float32"),
        ),
    ),
    smallest=(("offload", OFFLOADED),),
    takes_images=True,
    joins_shards=True,
    check=_check,
    split=_split,
    moments=_moments,
    requests=_requests,
    update_share=_device_share,
    weights_share=_device_share,
    messages=_messages,
    host_update=_host_update,
    on_host=_on_host,
    training_arguments=_training_arguments,
    model_arguments=_model_arguments,
    accelerate=_accelerate,
    runs_alone=True,
    read_accelerator=_read_accelerator,
    loading=_loading,
    loading_of_others=_loading_of_others,
    saving=saving,
    notes=_notes,
)
