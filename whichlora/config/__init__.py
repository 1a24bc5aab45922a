"""A config file → `Plan`, or every fault in it with its line."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whichlora.errors import ConfigError
from whichlora.spec.costs import Offer, own_price
from whichlora.spec.options import by_own_names
from whichlora.spec.parallel import ParallelConfig, requested
from whichlora.spec.plan import Budget, DatasetConfig, Keeping, Limits, Objective, Plan, SlurmConfig
from whichlora.spec.run import TRANSFORMERS, RunConfig, image_sides, usual_alpha
from whichlora.units import GiB

if TYPE_CHECKING:  # pydantic and ruamel.yaml cost 100 ms, which only `run` needs to pay
    from whichlora.config.document import Document
    from whichlora.config.schema import Dataset, PlanFile, Slurm

# Models to compare when the user names none: the families that most people fine-tune, from the
# smallest to the largest that an 80 GB device holds in 4 bits. All are in models_db.
DEFAULT_MODELS = (
    "google/gemma-3-270m",
    "google/gemma-3-1b-pt",
    "google/gemma-3-4b-pt",
    "google/gemma-3-12b-pt",
    "google/gemma-3-27b-pt",
    "meta-llama/Llama-3.2-1B",
    "meta-llama/Llama-3.2-3B",
    "meta-llama/Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B",
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-1.7B",
    "Qwen/Qwen3-4B",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-14B",
    "Qwen/Qwen3-32B",
    "mistralai/Mistral-7B-v0.3",
    "mistralai/Mistral-Nemo-Base-2407",
    "mistralai/Mistral-Small-24B-Base-2501",
    "microsoft/Phi-4-mini-instruct",
    "microsoft/phi-4",
)
# And those that need more memory than one such device has, which `recommend` adds there.
LARGE_MODELS = (
    "meta-llama/Llama-3.1-405B",
    "Qwen/Qwen2.5-72B",
    "Qwen/Qwen3-235B-A22B",
    "mistralai/Mistral-Large-Instruct-2407",
    "openai/gpt-oss-120b",
    "zai-org/GLM-4.5-Air",
    "deepseek-ai/DeepSeek-V3",
    "moonshotai/Kimi-K2-Instruct",
)
_ONE_DEVICE_BYTES = 80 * GiB  # of the largest that `DEFAULT_MODELS` was chosen for

_GB = 10**9


def models_for(memory_bytes: int) -> tuple[str, ...]:
    """Models to compare on GPUs that have `memory_bytes` together, when the user names none."""
    return DEFAULT_MODELS + (LARGE_MODELS if memory_bytes > _ONE_DEVICE_BYTES else ())


def parse_duration(text: str, *, setting: str = "budget") -> float:
    """Seconds of a duration with its unit, such as "90s" or "2h 30min".

    Raises:
        ConfigError: no duration.
    """
    from pydantic_core import PydanticCustomError

    from whichlora.config.schema import parse_seconds

    try:
        return parse_seconds(text)
    except PydanticCustomError:
        raise ConfigError(
            f"{setting}: {text!r} is not a duration with a unit; give such as 90s, 10min or 2h"
        ) from None


def load_plan(path: Path) -> Plan:
    """The plan of the config file at `path`, defaults filled in.

    Relative paths in the file start in its folder. `output_dir` alone defaults to
    `runs/<name of the file>` in the current folder.

    Raises:
        ConfigError: every fault of the file, one line each, in the order of the file.
    """
    from whichlora.config.document import read_document

    return _plan_of(read_document(path))


def plan_of(data: Mapping[str, Any], *, source: Path) -> Plan:
    """The plan that `data`, the content of a config file, stands for.

    Args:
        source: what messages call it; relative paths start in its folder.

    Raises:
        ConfigError: every fault, one line each.
    """
    from whichlora.config.document import parse_document

    text = json.dumps(dict(data), indent=1)  # is YAML, too
    document = parse_document(source, text, example="dataset: data.jsonl")
    return _plan_of(replace(document, is_file=False))


def _plan_of(document: Document) -> Plan:
    from pydantic import ValidationError

    from whichlora.config import checks, faults, schema

    path = document.path
    problems = list(document.structure_problems())
    data = _well_formed(document.data)
    said = _by_own_names(data)
    problems += checks.take_number_of_gpus(data)
    try:
        settings = schema.plan_file().model_validate(data)
    except ValidationError as error:
        problems += faults.problems_of(error)
    problems += checks.check(data, path.parent)
    if problems:
        raise document.error(problems)
    plan = _build(settings, path, data)
    return replace(plan, notes=(*plan.notes, *said))


def _by_own_names(data: dict[Any, Any]) -> tuple[str, ...]:
    """Name engine and trainer of `data` as here; what a user of the other names must know."""
    from whichlora import serving, trainers

    notes = []
    for key, axis in (("serving", serving), ("trainer", trainers)):
        called = data.get(key)
        if isinstance(called, str):
            data[key] = axis.own_name(called)
            notes.append(axis.other_name_note(called))
    return tuple(filter(None, notes))


def _well_formed(data: dict[Any, Any]) -> dict[Any, Any]:
    """`data` without what `structure_problems` reports: empty values, keys that are not plain text.

    Settings have two levels. A mapping may be deeper, or contain itself.
    """

    def clean(mapping: dict[Any, Any]) -> dict[Any, Any]:
        return {
            key: value
            for key, value in mapping.items()
            if value is not None and not isinstance(key, tuple)
        }

    return {
        key: clean(value) if isinstance(value, dict) else value
        for key, value in clean(data).items()
    }


def _build(settings: PlanFile, path: Path, data: dict[Any, Any]) -> Plan:
    from whichlora.config.checks import resolve_model
    from whichlora.store.costs import find_grid
    from whichlora.tasks import with_task

    folder = path.parent
    stage1, stage2 = settings.stage1_profile, settings.stage2_profile
    names = settings.models or stage1.model_names or DEFAULT_MODELS
    models = tuple(dict.fromkeys(resolve_model(name, folder) for name in names))
    return Plan(
        source=path,
        output_dir=_folder(settings.output_dir, folder) or Path("runs") / path.stem,
        gpu=settings.gpu[0],
        gpus=settings.gpu,
        spreads=_spreads(settings),
        models=models,
        tokenizers=_tokenizers(stage1.tokenizers, names, folder),
        inference=with_task(_inference(settings, models[0])),
        inference_batch_sizes=_sequences_at_once(settings),
        prompt_lens=stage1.prefill_length,
        max_new_tokens=stage1.tokens_to_generate,
        finetune=with_task(_finetune(settings, models[0])),
        methods=settings.methods,
        ranks=settings.ranks,
        lora_alpha=settings.lora_alpha,
        serve=settings.serve,
        finetune_batch_sizes=stage2.batch_size,
        gradient_checkpointing=settings.gradient_checkpointing or (None,),
        attn=settings.attn,
        optimizers=settings.optimizer,
        limits=_limits(settings),
        gpu_limits=_gpu_limits(settings),
        objective=_objective(settings, models, folder),
        budget=Budget(
            confidence=settings.confidence,
            runs=settings.max_profile_runs,
            device_s=settings.max_profile_time,
        ),
        dataset=_dataset(settings.dataset, folder),
        collator=settings.collator,
        train_on=settings.train_on,
        keeping=Keeping(
            save_steps=settings.save_steps,
            save_total_limit=settings.save_total_limit,
            eval_steps=settings.eval_steps,
        ),
        epochs=settings.epochs,
        learning_rate=settings.learning_rate,
        seed=settings.seed,
        profile=settings.profile,
        num_batches=settings.num_batches,
        num_runs=stage1.num_runs or settings.num_batches,
        timeout_s=settings.profile_timeout,
        weights=settings.weights,
        train=settings.train,
        trust_remote_code=settings.trust_remote_code,
        calibration_dir=_folder(settings.calibration_dir, folder),
        slurm=_slurm(settings.slurm),
        grid=None if settings.country is None else find_grid(settings.country),
        notes=_name_notes(names),
        raw=data,
    )


def _name_notes(names: Sequence[str]) -> tuple[str, ...]:
    """A note for each inexact name: the model that it was taken as."""
    from whichlora.store.models import resolve_name

    return tuple(note for _, note in map(resolve_name, names) if note)


def _shared(settings: PlanFile, model: str) -> dict[str, Any]:
    """Settings that the runs of both stages share; the first entry of a list."""
    return {
        "model": model,
        "precision": settings.precision,
        "attn": settings.attn[0],
        "quant": settings.quant,
        "quant_group_size": settings.quant_group_size,
        "compute_dtype": settings.compute_dtype,
        "expandable_segments": settings.expandable_segments,
        "images": settings.images,
        "image_size": image_sides(settings.image_size),
        "image_max_pixels": settings.image_max_pixels,
        "audios": settings.audios,
        "audio_seconds": settings.audio_seconds,
        "freeze_vision_tower": settings.freeze_vision_tower,
        "kv_cache": settings.kv_cache,
        "cache_backend": settings.cache_backend,
        "cache_nbits": settings.cache_nbits,
        "cache_group_size": settings.cache_group_size,
        "cache_residual_length": settings.cache_residual_length,
    }


def _sequences_at_once(settings: PlanFile) -> tuple[int, ...]:
    """The batches to compare, or the one number of sequences that an engine must run."""
    stage = settings.stage1_profile
    return stage.batch_size if settings.serving == TRANSFORMERS else (stage.concurrency or 1,)


def _inference(settings: PlanFile, model: str) -> RunConfig:
    from whichlora.serving import get_engine

    stage, version = settings.stage1_profile, settings.serving_version
    engine = get_engine(settings.serving)
    return RunConfig(
        **_shared(settings, model),
        phase="inference",
        **_task(settings),
        batch_size=_sequences_at_once(settings)[0],
        prompt_len=stage.prefill_length[0],
        max_new_tokens=stage.tokens_to_generate[0],
        serving=settings.serving,
        serving_options=by_own_names(engine.options, (settings.serving_options or {}).items()),
        context=stage.context,
        shared_prompt_fraction=stage.shared_prompt_fraction,
        length_spread=stage.length_spread,
        libraries=() if version is None else ((engine.library, version),),
    )


def _task(settings: PlanFile) -> dict[str, Any]:
    """What the model is for, where that is not the writing of texts: the trainer may say it."""
    from whichlora.trainers import list_trainers

    options = tuple(sorted((settings.task_options or {}).items()))
    of_trainer = list_trainers()[settings.trainer].task
    named = {"trainer": settings.trainer} if of_trainer else {}
    return {"task": settings.task, "task_options": options, **named}


def _finetune(settings: PlanFile, model: str) -> RunConfig:
    return RunConfig(
        **_shared(settings, model),
        phase="finetune",
        method=settings.methods[0],
        method_options=tuple(sorted((settings.method_options or {}).items())),
        batch_size=settings.stage2_profile.batch_size[0],
        seq_len=settings.sequence_length,
        target_len=settings.target_length,
        r=settings.ranks[0],
        lora_alpha=settings.lora_alpha or usual_alpha(settings.ranks[0]),
        lora_dropout=settings.lora_dropout,
        target_modules=settings.target_modules,
        modules_to_save=settings.modules_to_save,
        base_dtype=settings.base_dtype,
        adapter_dtype=settings.adapter_dtype,
        bias=settings.bias,
        use_rslora=settings.use_rslora,
        loraplus_lr_ratio=settings.loraplus_lr_ratio,
        optimizer=settings.optimizer[0],
        gradient_checkpointing=(settings.gradient_checkpointing or (None,))[0],
        use_reentrant=settings.use_reentrant,
        gradient_accumulation_steps=settings.gradient_accumulation_steps,
        padding=settings.padding,
        loss_head=settings.loss_head,
        trainer=settings.trainer,
        trainer_options=tuple(sorted((settings.trainer_options or {}).items())),
        task=settings.task,
        task_options=tuple(sorted((settings.task_options or {}).items())),
    )


def _spreads(settings: PlanFile) -> tuple[ParallelConfig, ...]:
    """Every way of spreading a fine-tuning that is asked for, each once."""
    from whichlora.config.checks import options_of
    from whichlora.parallel import strategy_options

    options = {
        name: (value,) if isinstance(options[0].default, tuple) else value
        for name, options in strategy_options().items()
        if (value := getattr(settings, name)) is not None
    }
    shared = {
        "global_batch_size": (settings.global_batch_size,),
        "interconnect": (settings.interconnect,),
        "host_memory_bytes": (settings.host_memory,),
    }
    spreads: dict[ParallelConfig, None] = {}
    for gpus, nodes, strategy in itertools.product(
        settings.gpus or (None if settings.global_batch_size is None else 1,),
        settings.nodes or (None,),
        settings.parallel or (None,),
    ):
        of_strategy = {
            k: v for k, v in options.items() if strategy is None or k in options_of(strategy)
        }
        lists = shared | of_strategy
        for values in itertools.product(*lists.values()):
            chosen = dict(zip(lists, values, strict=True))
            asked = {"gpus": gpus, "nodes": nodes, "parallel": strategy} | chosen
            if gpus is None or not (nodes and gpus % nodes):
                spreads[requested(asked)] = None
    return tuple(spreads)


def _objective(settings: PlanFile, models: tuple[str, ...], folder: Path) -> Objective:
    """With the prices that the file states, in a currency of its own; else those of the tables."""
    from whichlora.store.costs import load_rates
    from whichlora.store.gpus import find_gpu
    from whichlora.store.quality import read_scores

    prices: Mapping[str, Sequence[Offer]]
    if settings.gpu_prices:
        own = ((find_gpu(name).key, price) for name, price in settings.gpu_prices.items())
        prices = {key: (own_price(key, price),) for key, price in own}
    else:
        prices = load_rates(_folder(settings.prices, folder)).prices
    quality = _folder(settings.quality, folder)
    scores = {} if quality is None else read_scores(quality)
    return Objective(prefer=settings.prefer, order=models, scores=scores, prices=prices)


def _folder(name: str | None, folder: Path) -> Path | None:
    return None if name is None else Path(os.path.normpath(folder / os.path.expanduser(name)))


def _tokenizers(
    setting: tuple[str, ...] | dict[str, str] | None, names: tuple[str, ...], folder: Path
) -> dict[str, str]:
    """Model to tokenizer, where they differ."""
    from whichlora.config.checks import resolve_model

    if setting is None:
        return {}
    pairs = setting.items() if isinstance(setting, dict) else zip(names, setting, strict=True)
    resolved = {
        resolve_model(model, folder): resolve_model(tokenizer, folder) for model, tokenizer in pairs
    }
    return {model: tokenizer for model, tokenizer in resolved.items() if model != tokenizer}


def _limits(settings: PlanFile) -> Limits:
    stage1, stage2 = settings.stage1_profile, settings.stage2_profile
    return Limits(
        time_per_token_s=_either(stage1.time_per_token, stage1.time_per_token_ms, 1e-3),
        inference_bytes=_bytes(stage1.peak_memory, stage1.peak_memory_gb),
        total_time_s=_either(stage2.total_time, stage2.total_time_mins, 60.0),
        finetune_bytes=_bytes(stage2.peak_memory, stage2.peak_memory_gb),
        ttft_s=_either(stage1.ttft, stage1.ttft_ms, 1e-3),
        tpot_s=_either(stage1.tpot, stage1.tpot_ms, 1e-3),
        requests_per_s=stage1.requests_per_s,
    )


def _gpu_limits(settings: PlanFile) -> dict[str, Limits]:
    """Limits by the key of the GPU."""
    from whichlora.store.gpus import find_gpu

    return {
        find_gpu(name).key: Limits(
            time_per_token_s=limits.time_per_token,
            inference_bytes=limits.inference_memory,
            total_time_s=limits.total_time,
            finetune_bytes=limits.finetune_memory,
            ttft_s=limits.ttft,
            tpot_s=limits.tpot,
            requests_per_s=limits.requests_per_s,
        )
        for name, limits in (settings.gpu_limits or {}).items()
    }


def _slurm(settings: Slurm) -> SlurmConfig:
    return SlurmConfig(
        account=settings.account,
        partitions=settings.partition,
        clusters=settings.clusters,
        merge_partition=settings.merge_partition,
        qos=settings.qos,
        time_limit_s=settings.time_limit,
        startup_s=settings.startup_time,
        cpus_per_task=settings.cpus_per_task,
        memory_bytes=settings.memory,
        max_parallel=settings.max_parallel,
        modules=settings.modules,
        environment=settings.environment,
        setup=settings.setup,
        options=settings.options,
        command=settings.command,
        gpus=settings.gpus,
        pretend_memory_bytes=settings.pretend_memory,
    )


def _either(with_unit: float | None, plain: float | None, scale: float) -> float | None:
    return plain * scale if plain is not None else with_unit


def _bytes(with_unit: int | None, gb: float | None) -> int | None:
    return round(gb * _GB) if gb is not None else with_unit


def _dataset(settings: Dataset, folder: Path) -> DatasetConfig:
    from whichlora.config.checks import resolve_dataset

    mean_tokens = settings.mean_tokens
    if settings.tokens and settings.samples:
        mean_tokens = settings.tokens / settings.samples
    return DatasetConfig(
        path=resolve_dataset(settings.path, folder) if settings.path else "",
        validation_path=(
            resolve_dataset(settings.validation_path, folder) if settings.validation_path else None
        ),
        template=settings.template,
        text_column=settings.text_column,
        messages_column=settings.messages_column,
        prompt_column=settings.prompt_column,
        completion_column=settings.completion_column,
        chosen_column=settings.chosen_column,
        rejected_column=settings.rejected_column,
        label_column=settings.label_column,
        images_column=settings.images_column,
        audio_column=settings.audio_column,
        validation_fraction=settings.validation_fraction,
        split=settings.split or "train",
        config_name=settings.config_name,
        num_samples=settings.samples,
        mean_tokens=mean_tokens,
        p95_tokens=settings.p95_tokens,
        max_tokens=settings.max_tokens,
    )
