"""Lists of settings become runs: every combination, or the reason why it is refused."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from whichlora.errors import ConfigError
from whichlora.methods import get_method, with_defaults
from whichlora.predict.largest import Size
from whichlora.serving import get_engine
from whichlora.serving.base import Engine, unequal
from whichlora.spec.options import by_own_names
from whichlora.spec.parallel import AUTO, ONE_DEVICE, ONE_GPU, micro_steps, requested
from whichlora.spec.results import Refused
from whichlora.spec.run import (
    ADAPTER_SETTINGS,
    TRANSFORMERS,
    Phase,
    RunConfig,
    named_optimizer,
    usual_alpha,
    usual_optimizer,
)
from whichlora.spec.versions import Libraries
from whichlora.spec.words import MAX, alternatives
from whichlora.store.gpus import number_in, one_number, types_by_number
from whichlora.store.quantised_names import PLAIN_GGUF_TYPES, gguf_type_named
from whichlora.tasks import with_task
from whichlora.trainers import get_trainer

_ALONE = (None, AUTO, ONE_DEVICE)  # what one GPU is asked with
USUAL = "auto"  # of an optimizer and of a batch that nobody names
UNSTATED: Mapping[str, Sequence[Any]] = {
    "gradient_checkpointing": [None],
    "precision": ["auto"],
    "optimizer": [USUAL],
}
MOST_COMBINATIONS = 20_000  # half a minute of predictions
SIZES: tuple[Size, ...] = ("batch_size", "seq_len", "context")
_RUN_SETTINGS = frozenset(field.name for field in dataclasses.fields(RunConfig)) - {"parallel"}
# Settings that a phase does not read: a grid over them would only repeat itself.
_FINETUNE_ONLY = (
    "method",
    "method_options",
    "seq_len",
    "target_len",
    "r",
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    "modules_to_save",
    "base_dtype",
    "adapter_dtype",
    "bias",
    "use_rslora",
    "loraplus_lr_ratio",
    "optimizer",
    "gradient_checkpointing",
    "use_reentrant",
    "gradient_accumulation_steps",
    "padding",
    "loss_head",
    "prepare_kbit",
    "trainer",
    "trainer_options",
    "task",
    "task_options",
    "freeze_vision_tower",
)
# Those of them that a generation with an unmerged adapter reads.
_OF_ADAPTER = (*ADAPTER_SETTINGS, "freeze_vision_tower")
_QUANTISED_ONLY = ("cache_backend", "cache_nbits", "cache_group_size", "cache_residual_length")
_INFERENCE_ONLY = (
    "prompt_len",
    "max_new_tokens",
    "serve",
    "kv_cache",
    *_QUANTISED_ONLY,
    "serving",
    "serving_options",
    "context",
    "shared_prompt_fraction",
    "request_rate",
    "length_spread",
)


def grid(settings: Mapping[str, Sequence[Any]]) -> Iterator[RunConfig]:
    """Every combination of `settings` (a list of values by name of a `RunConfig` field).

    The GPUs and the strategy of `ParallelConfig` are settings like any other: `gpus`, `nodes`,
    `interconnect`, `host_memory_bytes`, `global_batch_size`, `parallel` and the options that
    strategies declare; None leaves an option at its default.
    Several GPUs without a strategy ask for the best one, "auto".

    A setting that a phase does not read is left at its default there, so that no candidate
    appears twice: a method is one of an inference only where its model is served as trained.

    Raises:
        ConfigError: a value that is not accepted, or more combinations than `MOST_COMBINATIONS`.
    """
    yield from only_runs(combinations(settings))


def only_runs(runs: Iterable[RunConfig | Refused]) -> list[RunConfig]:
    """`runs`, none of which may be refused.

    Raises:
        ConfigError: one is.
    """
    accepted = []
    for run in runs:
        if isinstance(run, Refused):
            raise ConfigError(run.reason)
        accepted.append(run)
    return accepted


def combinations(settings: Mapping[str, Sequence[Any]]) -> Iterator[RunConfig | Refused]:
    """As `grid`; a combination whose settings exclude each other in its place.

    Raises:
        ConfigError: settings that none of the combinations can mean.
    """
    _check_number(settings)
    seen: set[RunConfig] = set()
    for phase in settings.get("phase", ("finetune",)):
        unread: Collection[str] = _INFERENCE_ONLY
        if phase == "inference":
            unread = set(_FINETUNE_ONLY) - {*_OF_ADAPTER, "trainer", "task", "task_options"}
        names = [name for name in settings if name not in unread and name != "phase"]
        for values in itertools.product(*(settings[name] for name in names)):
            chosen = dict(zip(names, values, strict=True))
            if phase == "inference" and not _is_of_task(chosen):
                chosen.pop("trainer", None)
            if phase == "inference" and _is_merged(chosen):
                merged = (*_OF_ADAPTER, "serve")
                chosen = {name: chosen[name] for name in chosen if name not in merged}
            if chosen.get("kv_cache") != "quantized":
                chosen = {name: chosen[name] for name in chosen if name not in _QUANTISED_ONLY}
            try:
                run = _run_of(chosen, phase)
            except ConfigError as error:
                model = str(chosen.pop("model", ""))
                yield Refused(model=model, settings={"phase": phase, **chosen}, reason=str(error))
                continue
            if run not in seen:
                seen.add(run)
                yield run


def _run_of(chosen: Mapping[str, Any], phase: Phase) -> RunConfig:
    """One combination, with what nobody states as its trainer and its releases have it.

    Raises:
        ConfigError: settings that exclude each other.
    """
    _check_base(chosen, phase)
    shared = dict(chosen)
    if shared.get("serving"):
        shared["serving"] = get_engine(shared["serving"]).name
    shared = dict(stored_by_engine(shared, phase))
    shared = dict(shared_by_engine(shared)) if phase == "inference" else shared
    if "optimizer" in shared:
        shared["optimizer"] = _optimizer(shared)
    if "r" in shared:
        shared = {"lora_alpha": usual_alpha(shared["r"]), **shared}
    is_open = shared.get("batch_size", USUAL) == USUAL
    if is_open:
        shared["batch_size"] = 1
    run = with_task(RunConfig(phase=phase, **with_parallel(shared)))
    if not is_open or phase == "inference":
        return run
    return dataclasses.replace(run, batch_size=get_trainer(run.trainer).least_batch(run))


def _optimizer(settings: Mapping[str, Any]) -> str:
    if settings["optimizer"] == USUAL:
        return usual_optimizer(Libraries.of(settings.get("libraries", ())))
    return named_optimizer(settings["optimizer"])


def with_concurrency(
    settings: Mapping[str, Any], *, stated: Collection[str], beside_files: bool = False
) -> dict[str, Any]:
    """`settings` with the sequences at once as what a run calls them, its batch size.

    An engine is of inference, where no phase is given.

    Args:
        stated: names of those that the user gave.
        beside_files: files of other tools may say the phase and the engine; then `check_asked`
            is for when they are read.

    Raises:
        ConfigError: as of `check_asked`.
    """
    asked = dict(settings)
    if _engines(asked) and "phase" not in stated:
        asked["phase"] = ["inference"]
    if not beside_files:
        check_asked(asked, stated)
    concurrency = asked.pop("concurrency", [None])
    return asked if concurrency == [None] else {**asked, "batch_size": concurrency}


def check_asked(asked: Mapping[str, Any], stated: Collection[str]) -> None:
    """Refuse settings of the user, `stated`, that no asked phase reads.

    Raises:
        ConfigError: one is, both a batch size and sequences at once are given, or a batch size
            beside an engine that takes none.
    """
    engines = _engines(asked)
    serves = "inference" in asked.get("phase", ())
    if engines and not serves:
        raise ConfigError(
            f"serving: {engines[0]} is of phase inference; give it, or leave serving out"
        )
    _check_lengths(asked, stated)
    _check_rank(asked, stated)
    is_given = "concurrency" in stated and asked.get("concurrency") != [None]
    if "batch_size" in stated and (is_given or engines):
        fault = "is concurrency by another name" if is_given else f"is not of serving {engines[0]}"
        raise ConfigError(f"batch_size: {fault}; give concurrency alone")
    if is_given and not serves:
        raise ConfigError("concurrency: is of phase inference; give batch_size")
    if is_given and any(asked.get("request_rate") or ()):
        raise ConfigError("concurrency: is what request_rate leads to; give one of them")


def _engines(asked: Mapping[str, Any]) -> list[str]:
    return [name for name in asked.get("serving", ()) if name != TRANSFORMERS]


def _check_rank(asked: Mapping[str, Any], stated: Collection[str]) -> None:
    """Refuse a rank where no asked method has one.

    Raises:
        ConfigError: the user gave one.
    """
    methods = [get_method(name) for name in asked.get("method") or ()]
    if "r" in stated and methods and all("r" in method.ignores for method in methods):
        names = alternatives(method.name for method in methods)
        raise ConfigError(f"r: method {names} has no rank; leave r out, or give method lora")


def _check_base(chosen: Mapping[str, Any], phase: str) -> None:
    """Refuse a base in 16 bit under a method that is named after its base in 4 bit.

    Raises:
        ConfigError: it is asked for.
    """
    name = chosen.get("method")
    if phase != "finetune" or name is None or chosen.get("quant") != "none":
        return
    method = get_method(name)
    if method.base_quant != "none":
        raise ConfigError(
            f"quant: none, but method {method.name} has its base in {method.base_quant}; leave "
            "quant out, or give method lora"
        )


def _check_lengths(asked: Mapping[str, Any], stated: Collection[str]) -> None:
    """Refuse lengths, and what else of requests, that the answer would not be about.

    They decide what a user asks.

    Raises:
        ConfigError: it is of another phase, or of an engine.
    """
    phases = set(asked.get("phase") or ["finetune"])
    serves = bool(set(asked.get("serving") or ()) - {TRANSFORMERS})
    own = "context" if serves else "prompt_len and max_new_tokens"
    for name in ("seq_len", "target_len"):
        if name in stated and phases == {"inference"}:
            raise ConfigError(f"{name}: is of phase finetune; give {own}")
    for name in ("prompt_len", "max_new_tokens", "context"):
        if name in stated and "inference" not in phases:
            raise ConfigError(f"{name}: is of phase inference; give seq_len")
    for name in ("request_rate", "length_spread"):
        if name in stated and asked.get(name) != [None] and "inference" not in phases:
            raise ConfigError(
                f"{name}: is of an engine that serves; give phase inference and serving vllm, or "
                "leave it out"
            )
    if "context" in stated and not serves:
        raise ConfigError(f"context: is of a serving engine; give serving, or {own}")


def with_cards(
    settings: Mapping[str, Sequence[Any]], targets: Sequence[str]
) -> Mapping[str, Sequence[Any]]:
    """`settings` with the number of GPUs that unequal cards state: "3090+2x4090" are three.

    Only where nothing else states it, and one target alone.

    Raises:
        ConfigError: an unknown accelerator.
    """
    if len(targets) != 1 or "+" not in targets[0] or _states_number(settings):
        return settings
    return {**settings, "gpus": [number_in(targets[0])]}


def by_number(
    settings: Mapping[str, Sequence[Any]], targets: Sequence[str]
) -> Iterator[tuple[Mapping[str, Sequence[Any]], list[str]]]:
    """`settings` and types of GPU for each number of GPUs that `targets` state: "2x3090".

    Raises:
        ConfigError: the settings state a number, too.
    """
    for number, types in types_by_number(targets, stated=_states_number(settings)).items():
        yield settings if number is None else {**settings, "gpus": [number]}, types


def _states_number(settings: Mapping[str, Sequence[Any]]) -> bool:
    return any(settings.get("gpus") or ())


def of_one_target(
    settings: Mapping[str, Sequence[Any]], target: str
) -> tuple[dict[str, list[Any]], str]:
    """`settings` and the type of GPU for the number of GPUs that `target` states.

    Raises:
        ConfigError: as `by_number`.
    """
    settings, (gpu,) = of_one_number(settings, [target])
    return settings, gpu


def of_one_number(
    settings: Mapping[str, Sequence[Any]], targets: Sequence[str]
) -> tuple[dict[str, list[Any]], list[str]]:
    """`settings` and types of GPU for the one number of GPUs that `targets` state.

    Raises:
        ConfigError: as `by_number`, or they state several.
    """
    number, types = one_number(targets, stated=_states_number(settings))
    listed = {name: list(values) for name, values in settings.items()}
    return listed if number is None else {**listed, "gpus": [number]}, types


def stored_by_engine(settings: Mapping[str, Any], phase: str) -> Mapping[str, Any]:
    """`settings` whose quant names a type of GGUF files, with it as the engine's own option.

    Raises:
        ConfigError: another engine, or an option that says otherwise.
    """
    quant = settings.get("quant")
    file_type = gguf_type_named(quant) if isinstance(quant, str) else ""
    if not file_type:
        return settings
    engine = get_engine(settings.get("serving") or TRANSFORMERS)
    if phase != "inference" or not engine.stored_by:
        precision = PLAIN_GGUF_TYPES.get(file_type)
        plain = f"quant none with precision {precision}"
        instead = plain if precision else "quant nf4 or awq-int4 for 4 bits"
        raise ConfigError(
            f"quant: {quant} is a type of GGUF files, which are llama.cpp's; use phase inference "
            f"with serving llama-cpp, or {instead}"
        )
    stated = dict(settings.get("serving_options") or ())
    options = dict(by_own_names(engine.options, stated.items()))
    ((_, asked),) = by_own_names(engine.options, [(engine.stored_by, file_type)])
    if options.setdefault(engine.stored_by, asked) != asked:
        raise ConfigError(
            f"quant: {quant}, but {engine.stored_by} is {options[engine.stored_by]}; give one of "
            "them"
        )
    return {**settings, "quant": None, "serving_options": tuple(sorted(options.items()))}


def shared_by_engine(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """`settings` of an inference with its number of GPUs as the engine's own option.

    What else is of several GPUs is of fine-tuning, and not read.

    Raises:
        ConfigError: that option or a strategy says otherwise.
    """
    engine, gpus = get_engine(settings.get("serving") or TRANSFORMERS), settings.get("gpus")
    if not engine.divided_by or gpus is None:
        return settings
    stated = dict(settings.get("serving_options") or ())
    options = dict(by_own_names(engine.options, stated.items()))
    _with_ranks(options, gpus, engine)
    if settings.get("parallel") not in _ALONE:
        ways = {engine.shared_by: "divides every matrix", engine.staged_by: "has stages of layers"}
        told = ", or ".join(f"{how} ({option})" for option, how in ways.items() if option)
        raise ConfigError(
            f"parallel: {engine.name} {told}; leave parallel out, or give such a serving option"
        )
    nodes = settings.get("nodes")
    if nodes not in (None, 1) and not engine.spread_by:
        raise ConfigError(f"nodes: {engine.name} is predicted on one machine, got {nodes}; give 1")
    if nodes is not None and (fault := unequal(gpus, nodes)):
        raise ConfigError(f"nodes: {fault}")
    if nodes is not None and engine.spread_by:
        options.setdefault(engine.spread_by, nodes)
    if settings.get("interconnect") is not None:
        raise ConfigError(
            f"interconnect: {engine.name} is predicted with the usual links; leave it out"
        )
    others = {name: settings[name] for name in settings if name in _RUN_SETTINGS}
    return others | {"serving_options": tuple(sorted(options.items()))}


def _with_ranks(options: dict[str, Any], gpus: int, engine: Engine) -> None:
    """Give `options` the ranks that share every matrix: `gpus` over stated stages and copies.

    Of an engine that divides no matrix, the stages.
    """
    shared_by, staged_by = engine.shared_by, engine.staged_by
    stages, copies = options.get(staged_by, 1), options.get(engine.copied_by, 1)
    if isinstance(copies, int) and copies > 1:
        if gpus % copies:
            raise ConfigError(
                f"gpus: {gpus}, but {engine.copied_by} is {copies}; give a multiple of it, or "
                "leave gpus out"
            )
        gpus //= copies
    if not shared_by or not isinstance(stages, int) or stages < 2:
        divided_by = engine.divided_by
        if options.setdefault(divided_by, gpus) != gpus:
            raise ConfigError(
                f"gpus: {gpus}, but {divided_by} is {options[divided_by]}; give one of them"
            )
        return
    if gpus % stages:
        raise ConfigError(
            f"gpus: {gpus}, but {staged_by} is {stages}; give a multiple of it, or leave gpus out"
        )
    if gpus > stages or shared_by in options:
        ranks = options.setdefault(shared_by, gpus // stages)
        if ranks != gpus // stages:
            raise ConfigError(
                f"gpus: {gpus}, but {shared_by} is {ranks} and {staged_by} {stages}; leave gpus out"
            )


def with_parallel(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` with those of several GPUs as one `ParallelConfig`.

    Raises:
        ConfigError: they exclude each other.
    """
    of_run = {name: value for name, value in settings.items() if name in _RUN_SETTINGS}
    stated = {
        name: value
        for name, value in settings.items()
        if name not in of_run and name != "parallel" and value is not None
    }
    strategy = settings.get("parallel")
    global_batch_size = stated.get("global_batch_size")
    if global_batch_size is not None and stated.get("gpus", 1) == 1 and strategy in _ALONE:
        of_run["gradient_accumulation_steps"] = micro_steps(
            stated.pop("global_batch_size"),
            batch_size=of_run.get("batch_size", 1),
            at_once=1,
            accumulation=of_run.get("gradient_accumulation_steps", 1),
        )
    parallel = requested({"parallel": strategy, **stated})
    return of_run if parallel == ONE_GPU else of_run | {"parallel": parallel}


def _check_number(settings: Mapping[str, Sequence[Any]]) -> None:
    """Refuse a grid that nobody could wait for, nor read."""
    numbers = {name: len(set(values)) for name, values in settings.items()}
    combinations = math.prod(numbers.values())
    if combinations > MOST_COMBINATIONS:
        longest = sorted(numbers, key=lambda name: -numbers[name])[:3]
        most = ", ".join(f"{numbers[name]} of {name}" for name in longest if numbers[name] > 1)
        raise ConfigError(
            f"these settings make {combinations} combinations ({most}), more than "
            f"{MOST_COMBINATIONS}; give fewer values, or let 'whichlora run' search them with "
            "profile: none"
        )


def _is_of_task(inference: Mapping[str, Any]) -> bool:
    """Whether an inference is of a model that its trainer makes for one task."""
    return "trainer" in inference and bool(get_trainer(inference["trainer"]).task)


def _is_merged(inference: Mapping[str, Any]) -> bool:
    """Whether the settings of an inference leave no adapter beside the weights."""
    names = ("method", "serve")
    method_settings = {name: inference[name] for name in names if name in inference}
    return (
        with_defaults(RunConfig(model="", phase="inference", **method_settings)).serve == "merged"
    )


def maximised(settings: dict[str, Any], called: Callable[[str], str] = str) -> Size | None:
    """The setting that is asked as large as it fits, left at 1 in `settings`.

    Args:
        called: how the user knows a setting.

    Raises:
        ConfigError: more than one, one among other values, or one that the phase does not read.
    """
    sizes: list[Size] = [name for name in SIZES if MAX in settings.get(name, ())]
    if not sizes:
        return None
    if len(sizes) > 1:
        size, length = map(called, sizes)
        raise ConfigError(
            f"{size} and {length}: only one of both can be max, since more of one leaves less for "
            f"the other; give some lengths, such as {size} max {length} 4096,16384,65536"
        )
    (name,) = sizes
    if len(settings[name]) > 1:
        raise ConfigError(f"{called(name)}: max stands alone; leave the numbers out")
    if name == "batch_size" and settings.get("global_batch_size", [None]) != [None]:
        (size, *_) = settings["global_batch_size"]
        whole = called("global_batch_size")
        raise ConfigError(
            f"{called(name)}: max finds the largest without accumulation; compare some that fill "
            f"{whole}, such as {called(name)} 1,2,4,8 {whole} {size}"
        )
    if name == "seq_len" and "inference" in settings.get("phase", ()):
        raise ConfigError(
            f"{called(name)}: max is of fine-tuning; inference takes {called('prompt_len')}"
        )
    settings[name] = [1]
    return name
