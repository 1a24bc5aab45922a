"""`from whichlora import estimate, explain, where, …`: the commands as Python functions."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from whichlora.calibration.database import Refit, calibrate_all
from whichlora.errors import ConfigError
from whichlora.extras import require
from whichlora.parallel import strategy_options
from whichlora.predict.explain import Explanation
from whichlora.predict.largest import Placement
from whichlora.predict.ledger_lines import Line
from whichlora.predict.life import Life
from whichlora.spec.life import LifeConfig, MergeOn
from whichlora.spec.options import OptionValue
from whichlora.spec.plan import Keeping
from whichlora.spec.results import Answers, Prediction
from whichlora.spec.run import (
    AdapterDtype,
    AttentionKernel,
    BaseDtype,
    Bias,
    CacheBackend,
    ComputeDtype,
    Engine,
    KvCache,
    LossHead,
    Optimizer,
    Padding,
    Phase,
    Precision,
    Quant,
    RunConfig,
    Serve,
    image_sides,
)
from whichlora.spec.words import meant
from whichlora.store.costs import load_rates
from whichlora.store.gpus import is_count
from whichlora.terminal import Progress
from whichlora.units import parse_tokens
from whichlora.workflow import combinations, estimates, served_models
from whichlora.workflow.guide import GuideRow
from whichlora.workflow.methods import COMMON_GPU, COMMON_MODEL, MethodRow, method_rows
from whichlora.workflow.whole_training import NO_FILES, Data, FromFiles

if TYPE_CHECKING:
    import pandas as pd

    from whichlora.workflow.answer import Answer

AnyPath = str | Path
_LENGTHS = ("seq_len", "target_len", "prompt_len", "max_new_tokens", "context")  # also as "4k"
_MAPPINGS = ("method_options", "trainer_options", "serving_options", "task_options", "libraries")


class _RunSettings(TypedDict, total=False):
    """Settings of a run; a list of values makes a grid.

    Defaults are those of `RunConfig`; precision is bf16 where the device has it, else fp16.
    """

    phase: Phase | Sequence[Phase]
    method: str | Sequence[str]
    batch_size: int | str | Sequence[int | str]
    seq_len: int | str | Sequence[int | str]
    target_len: int | str | Sequence[int | str | None] | None
    r: int | Sequence[int]
    lora_alpha: int | Sequence[int]
    lora_dropout: float | Sequence[float]
    target_modules: str | Sequence[str]
    modules_to_save: tuple[str, ...]
    base_dtype: BaseDtype | Sequence[BaseDtype]
    adapter_dtype: AdapterDtype | Sequence[AdapterDtype]
    bias: Bias | Sequence[Bias]
    use_rslora: bool
    loraplus_lr_ratio: float
    precision: Precision | Sequence[Precision]
    optimizer: Optimizer | Sequence[Optimizer]
    gradient_checkpointing: bool | Sequence[bool] | None
    use_reentrant: bool | None
    gradient_accumulation_steps: int | Sequence[int]
    attn: AttentionKernel | Sequence[AttentionKernel]
    padding: Padding | Sequence[Padding]
    loss_head: LossHead | Sequence[LossHead]
    trainer: str | Sequence[str]
    task: str | Sequence[str]
    method_options: Mapping[str, OptionValue]
    task_options: Mapping[str, OptionValue]
    trainer_options: Mapping[str, OptionValue]
    quant: Quant | Sequence[Quant | None] | None
    quant_group_size: int | Sequence[int]
    prepare_kbit: bool | None
    compute_dtype: ComputeDtype | Sequence[ComputeDtype]
    llm_int8_threshold: float
    quantize_moe_experts: bool | Sequence[bool]
    expandable_segments: bool | Sequence[bool]
    images: int | Sequence[int]
    image_size: tuple[int, int]
    image_max_pixels: int | None
    audios: int | Sequence[int]
    audio_seconds: float
    freeze_vision_tower: bool | Sequence[bool]
    prompt_len: int | str | Sequence[int | str]
    max_new_tokens: int | str | Sequence[int | str]
    kv_cache: KvCache | Sequence[KvCache]
    cache_backend: CacheBackend | Sequence[CacheBackend]
    cache_nbits: int | Sequence[int]
    cache_group_size: int | Sequence[int]
    cache_residual_length: int | Sequence[int]
    serve: Serve | Sequence[Serve]
    serving: str | Sequence[str]
    serving_options: Mapping[str, OptionValue]
    concurrency: int | Sequence[int]
    context: int | str | Sequence[int | str]
    shared_prompt_fraction: float
    request_rate: float | None
    length_spread: float
    libraries: Mapping[str, str]
    nodes: int | Sequence[int]
    parallel: str | Sequence[str]
    interconnect: str | Sequence[str]
    host_memory_bytes: int | Sequence[int]
    global_batch_size: int | Sequence[int]


class RunSettings(_RunSettings, total=False):
    """Settings of a run and its GPUs; the options of strategies are settings, too."""

    gpus: int | Sequence[int]


def estimate(
    models: str | Sequence[str] = (),
    gpu: str | Sequence[str] = "auto",
    *,
    from_file: AnyPath | Sequence[AnyPath] = (),
    gpus: int | Sequence[int] | str | Sequence[str] | None = None,
    calibration_dir: AnyPath | None = None,
    engine: Engine = "auto",
    data: AnyPath | None = None,
    samples: int | None = None,
    epochs: float | None = None,
    prices: AnyPath | None = None,
    country: str | None = None,
    **settings: Unpack[_RunSettings],
) -> Answers[Prediction]:
    """Peak memory, time and cost of every combination; nothing is run or downloaded but a config.

    >>> (prediction,) = estimate("Qwen/Qwen2.5-7B", "rtx-4090-24gb", method="qlora", seq_len=1024)
    >>> prediction.verdict
    'fits'

    Args:
        models: hub ids, local folders, or names as people write them ("llama 3.1 8b"); may be left
            out beside `from_file`. Without both, a serving engine answers for the largest models.
        from_file: files of another tool, or a script; `models` and `settings` override them.
        gpu: keys of `whichlora gpus`, "cpu", "auto" for what this machine has, several cards of
            one run ("2x3090"), or an amount of memory ("24GB"), for which no time is predicted.
        gpus: how many, over all nodes; types, an older meaning, are accepted with a warning.
        calibration_dir: your calibrations; None is your own folder.
        engine: "trace" asks the real code instead of the formulas (needs torch); "auto" does so
            for models that the formulas do not know.
        data: the training data (a file, a folder or a dataset of the hub), for `training` of the
            predictions; in its place `samples`, a number of rows of `seq_len` tokens.
        epochs: how often it is passed; 1 where nobody says.
        prices: a CSV file with columns gpu and usd_per_hour, which goes before the price table.
        country: by name or code; the CO2 is that of its electricity.
        settings: fields of `RunConfig`; a list of values makes a grid, and "max" of `batch_size`,
            `seq_len` or `context` is the largest that fits. `nodes`, `parallel` and the options of
            its strategies say how several GPUs share a run.

    Returns:
        A list; its `refused` are the combinations whose settings exclude each other.

    Raises:
        ConfigError: an unknown name, or no combination remains.
    """
    run_settings: dict[str, Any] = dict(settings)
    if gpus is not None:
        numbers = _numbers(gpus)
        if numbers:
            run_settings["gpus"] = numbers
        else:
            gpu = _old_spelling(gpu, gpus)  # type: ignore[arg-type]
    types = _types(gpu)
    grid = _grid(models, run_settings, beside_files=bool(_listed(from_file)))
    if not _listed(from_file) and served_models.asks_for_models(grid):
        return served_models.largest_served(
            grid,
            types,
            calibration_dir=_path(calibration_dir),
            maximise=combinations.maximised(grid),
            rates=load_rates(_path(prices), country),
        )
    stated = {**run_settings, **({} if data is None else {"data": data})}
    grid, files = _with_files(grid, from_file, stated=stated, types=types)
    return estimates.estimate_grid(
        grid,
        types,
        calibration_dir=_path(calibration_dir),
        engine=engine,
        maximise=combinations.maximised(grid),
        files=files,
        rates=load_rates(_path(prices), country),
        data=Data.asked(_data(data), _plain(samples), _plain(epochs), files),
        stated=files.stated or run_settings.keys(),
    )


def explain(
    model: str = "",
    gpu: str | Sequence[str] = "auto",
    *,
    from_file: AnyPath | Sequence[AnyPath] = (),
    calibration_dir: AnyPath | None = None,
    **settings: Unpack[RunSettings],
) -> Explanation:
    """Every tensor at the peak of one run, and what each other choice would change.

    >>> explanation = explain("Qwen/Qwen2.5-7B", "rtx-4090-24gb", method="qlora", seq_len=1024)
    >>> explanation.lines[0].what
    'embeddings and head'

    Args:
        gpu: one accelerator, as `estimate` takes it.
        from_file: as `estimate` takes it.
        settings: fields of `RunConfig`, one value each.

    Raises:
        ConfigError: an unknown name, settings that exclude each other, several runs or GPUs.
    """
    name = _one_type("explain", gpu)
    grid, files = _with_files(
        _grid(model or (), settings, beside_files=bool(_listed(from_file))),
        from_file,
        stated=settings,
        types=[name],
    )
    grid, name = combinations.of_one_target(grid, name)
    run = _one_run("explain", grid)
    return estimates.explain(
        run, name, calibration_dir=_path(calibration_dir), notes=files.notes_of_step(run)
    )


def life(
    model: str = "",
    gpu: str | Sequence[str] = "auto",
    *,
    from_file: AnyPath | Sequence[AnyPath] = (),
    eval_rows: int = 0,
    eval_accumulation_steps: int | None = None,
    save_total_limit: int = 2,
    merge_on: MergeOn = "gpu",
    calibration_dir: AnyPath | None = None,
    **settings: Unpack[RunSettings],
) -> Life:
    """Peaks of loading, training, evaluating, saving, merging and resuming one fine-tuning.

    >>> life("Qwen/Qwen2.5-7B", "rtx-4090-24gb", method="qlora", seq_len=1024).largest.name
    'merging'

    Args:
        gpu: one accelerator, as `estimate` takes it.
        from_file: as `estimate` takes it.
        eval_rows: rows whose logits `compute_metrics` gets; 0: evaluations compute the loss alone.
        eval_accumulation_steps: batches after which these logits move to the host.
        save_total_limit: checkpoints that are kept.
        merge_on: where the adapter is merged into the base: "gpu", "cpu" or "none".
        settings: fields of `RunConfig`, one value each.

    Raises:
        ConfigError: an unknown name, settings that exclude each other, several runs or GPUs, or a
            run whose life is not known.
    """
    name = _one_type("life", gpu)
    grid, files = _with_files(
        _grid(model or (), settings, beside_files=bool(_listed(from_file))),
        from_file,
        stated=settings,
        types=[name],
    )
    grid, name = combinations.of_one_target(grid, name)
    run = _one_run("life", grid)
    stages = LifeConfig(
        eval_rows=_plain(eval_rows),
        eval_accumulation_steps=_plain(eval_accumulation_steps),
        merge_on=merge_on,
        keeping=Keeping(save_total_limit=_plain(save_total_limit)),
    )
    folder = _path(calibration_dir)
    return estimates.life(run, name, stages, calibration_dir=folder, notes=files.notes_of_step(run))


def where(
    model: str = "",
    gpu: str | Sequence[str] = "all",
    *,
    from_file: AnyPath | Sequence[AnyPath] = (),
    calibration_dir: AnyPath | None = None,
    prices: AnyPath | None = None,
    country: str | None = None,
    **settings: Unpack[RunSettings],
) -> Answers[Placement]:
    """One run on every accelerator of the catalog, or on some; the smallest that fits comes first.

    >>> where("Qwen/Qwen2.5-7B", method="qlora", seq_len=1024)[0].gpu.key
    't4-16gb'

    Args:
        gpu: accelerators, as `estimate` takes them; "all" is the catalog.
        from_file, prices, country: as `estimate` takes them.
        settings: fields of `RunConfig`, one value each.

    Raises:
        ConfigError: an unknown name, several runs, or settings that no accelerator can run.
    """
    grid, files = _with_files(
        _grid(model or (), settings, beside_files=bool(_listed(from_file))),
        from_file,
        stated=settings,
    )
    grid, types = combinations.of_one_number(grid, _types(gpu))
    run = _one_run("where", grid)
    return estimates.where(
        run,
        types,
        calibration_dir=_path(calibration_dir),
        notes=files.notes_of_step(run),
        rates=load_rates(_path(prices), country),
    )


def compare_methods(
    model: str = COMMON_MODEL, gpu: str = COMMON_GPU, *, calibration_dir: AnyPath | None = None
) -> list[MethodRow]:
    """What each fine-tuning method trains on `model`, and its cost relative to LoRA.

    >>> [row.name for row in compare_methods() if not row.merges]
    ['full', 'prompt-tuning', 'p-tuning', 'beft', 'lily', 'prefix-tuning', 'cartridge',
     'adaption-prompt']

    Raises:
        ConfigError: an unknown model or accelerator, or one that LoRA does not run on.
    """
    return method_rows(model, gpu, calibration_dir=_path(calibration_dir))


class _Question(TypedDict, total=False):
    """What `recommend` takes in place of a plan: fields of `workflow.recommend.Question`."""

    gpu: str
    gpus: int
    host_memory: str
    models: Sequence[str]
    method: str | Sequence[str]
    seq_len: int | str
    data: str
    samples: int
    attn: str
    image_max_pixels: int
    epochs: float
    within: str
    budget: str
    price_per_hour: float
    prices: AnyPath
    country: str
    quality: AnyPath
    trainer: str
    serving: str
    serve: str
    tpot: str


def recommend(
    plan: AnyPath | Mapping[str, Any] | None = None,
    *,
    fresh: bool = False,
    quiet: bool = True,
    save: AnyPath | None = None,
    calibration_dir: AnyPath | None = None,
    **question: Unpack[_Question],
) -> Answer:
    """The largest model, variant and batch size that meet the limits.

    With a plan this is `whichlora run`, with keywords `whichlora recommend`, which measures and
    writes nothing.

    >>> recommend(gpu="4090", seq_len=4096).winner.run.model
    'google/gemma-3-27b-pt'

    Args:
        plan: a config file, or its content as a mapping (docs/config.md has the keys); paths in
            a mapping start in the current folder.
        fresh: measure again what an earlier run measured.
        quiet: say nothing on stderr while it works.
        save: a file for the plan that the keywords mean.
        calibration_dir: your calibrations; None is your own folder. A plan has its own key.
        question: the options of `whichlora recommend`, where there is no plan.

    Returns:
        The winner (None where nothing fits), every candidate, and the files that were written.

    Raises:
        ConfigError: a fault in the plan or a keyword, the data, a model or the device.
        MeasurementError: the profiler cannot start.
    """
    from whichlora.workflow.run import run_plan

    with Progress(quiet=quiet) as progress:
        if plan is None:
            return _recommended(question, _path(save), _path(calibration_dir), progress)
        if keywords := [*question, *(["save"] if save else [])]:
            raise ConfigError(f"{', '.join(keywords)}: a plan says it all; give one or the other")
        if isinstance(plan, str | os.PathLike):
            return run_plan(Path(plan), fresh=fresh, progress=progress)
        if not isinstance(plan, Mapping):
            kind = type(plan).__name__
            raise ConfigError(
                f"plan: must be a config file or its content as a mapping, got {kind}"
            )
        content = {"output_dir": "runs/recommend"} | dict(plan)
        text = json.dumps(content, indent=1, default=_in_plan)  # is YAML, too
        with tempfile.NamedTemporaryFile(
            "w", dir=Path.cwd(), prefix="plan-", suffix=".yaml", encoding="utf-8"
        ) as file:
            file.write(text)
            file.flush()
            try:
                return run_plan(Path(file.name), fresh=fresh, progress=progress)
            except ConfigError as error:
                lines = re.sub(rf"{re.escape(file.name)}:\d+:\d+: ", "plan: ", str(error))
                raise ConfigError(lines) from None


def _recommended(
    question: _Question, save: Path | None, folder: Path | None, progress: Progress
) -> Answer:
    """The answer to keywords.

    Raises:
        ConfigError: one that does not exist, or as `recommend`.
    """
    from whichlora.workflow.recommend import Question, save_plan
    from whichlora.workflow.recommend import recommend as recommend_for

    accepted = _Question.__annotations__
    if unknown := [name for name in question if name not in accepted]:
        raise ConfigError(f"{unknown[0]}: is not a keyword; accepted are {', '.join(accepted)}")
    keywords: dict[str, Any] = {name: _plain(value) for name, value in question.items()}
    keywords["models"] = tuple(_models(keywords.get("models", ())))
    keywords["method"] = tuple(_listed(keywords.get("method", ())))
    if "data" in keywords:
        keywords["data"] = _data(keywords["data"])
    if "seq_len" in keywords:
        keywords["seq_len"] = _tokens("seq_len", keywords["seq_len"])
    recommendation = recommend_for(Question(**keywords), progress=progress, calibration_dir=folder)
    if save is not None:
        save_plan(recommendation, save)
    return recommendation.answer


def calibrate(
    gpu: str | Sequence[str] | None = None, *, calibration_dir: AnyPath | None = None
) -> list[Refit]:
    """Fit the predictors to every recorded run: `whichlora calibrate`.

    Args:
        gpu: accelerators; None is every one that has records.

    Returns:
        What each fit knew before and knows now.

    Raises:
        ConfigError: an unknown accelerator.
        DataFileError: a broken record file; nothing is written then.
    """
    return calibrate_all(() if gpu is None else _types(gpu), _path(calibration_dir))


def to_frame(
    answer: Iterable[Prediction | GuideRow | Placement] | Explanation | Life | Answer,
) -> pd.DataFrame:
    """What the functions here return as a DataFrame, in bytes and seconds.

    One row per prediction, row of a guide, accelerator or candidate of an answer; of an
    explanation one per line of the ledger, those of the card after them, which add up to the
    device memory used; of a life one per line of each stage. Settings that
    are the same everywhere stay in it.

    Raises:
        ConfigError: pandas is not installed, or something else is given.
    """
    require("to_frame", "pandas", extra="pandas")
    import pandas as pd

    from whichlora.terminal import candidate_row
    from whichlora.workflow.answer import Answer

    if isinstance(answer, Answer):
        return pd.DataFrame(
            [candidate_row(candidate) for candidate in (*answer.inference, *answer.finetune)]
        )
    if isinstance(answer, Explanation):
        return pd.DataFrame([_line_row(line) for line in (*answer.lines, *answer.card)])
    if isinstance(answer, Life):
        rows = (
            {"stage": stage.name, "place": held.place, "setting": held.setting}
            | _line_row(held.line)
            for stage in answer.stages
            for held in stage.lines
        )
        return pd.DataFrame(list(rows))
    answers: list[Any] = list(answer) if isinstance(answer, Iterable) else [answer]
    for row in answers:
        if not isinstance(row, Prediction | GuideRow | Placement):
            raise ConfigError(
                "to_frame: takes what estimate, explain, life, where or recommend returns, got "
                f"{type(row).__name__}"
            )
    return pd.DataFrame([_row_of(row) for row in answers])


def _row_of(row: Prediction | GuideRow | Placement) -> dict[str, Any]:
    if isinstance(row, GuideRow):
        return row.to_row()
    if isinstance(row, Prediction):
        return _prediction_row(row)
    judged = {} if row.prediction is None else _prediction_row(row.prediction)
    return {
        "gpu": row.gpu.key,
        "memory_bytes": row.gpu.memory_bytes,
        "largest_batch_size": row.batch_size,
        "refusal": row.refusal,
    } | judged


def _line_row(line: Line) -> dict[str, Any]:
    row = dataclasses.asdict(line)
    del row["members"]
    return row


def _prediction_row(prediction: Prediction) -> dict[str, Any]:
    run = prediction.run.to_dict()
    run["target_modules"] = ", ".join(run["target_modules"])
    run["libraries"] = ", ".join(f"{name}={version}" for name, version in prediction.run.libraries)
    low, high = prediction.memory.interval_bytes
    low_s, high_s = prediction.time.interval_s
    return {
        "model": run.pop("model"),
        "gpu": prediction.gpu,
        **run,
        "num_params": prediction.num_params,
        "num_trainable_params": prediction.num_trainable_params,
        "peak_allocated_bytes": prediction.memory.peak_allocated_bytes,
        "device_used_bytes": prediction.memory.device_used_bytes,
        "device_used_low_bytes": low,
        "device_used_high_bytes": high,
        **{f"{part}_bytes": size for part, size in prediction.memory.breakdown.items()},
        "usable_bytes": prediction.usable_bytes,
        "verdict": prediction.verdict,
        "step_s": prediction.time.step_s,
        "tokens_per_s": prediction.time.tokens_per_s,
        "time_per_token_s": prediction.time.time_per_token_s,
        "time_low_s": low_s,
        "time_high_s": high_s,
        "basis": prediction.basis,
    }


def _with_files(
    grid: dict[str, list[Any]],
    files: AnyPath | Sequence[AnyPath],
    *,
    stated: Mapping[str, Any],
    types: Sequence[str] = (),
) -> tuple[dict[str, list[Any]], FromFiles]:
    """`grid` over the settings of `files`, and what else these say; `types` are GPUs.

    Raises:
        ConfigError: neither a model nor a file, or a fault of one.
    """
    paths = [Path(file) for file in _listed(files)]
    if not paths:
        if not grid["model"]:
            raise ConfigError("models: is empty; name a model, or give from_file")
        return grid, NO_FILES
    from whichlora.workflow.from_files import with_files

    names = {*stated, *(["model"] if grid["model"] else [])}
    return with_files(paths, grid, names, types)


def _grid(
    models: str | Sequence[str], settings: Mapping[str, Any], *, beside_files: bool = False
) -> dict[str, list[Any]]:
    accepted = RunSettings.__annotations__
    grid: dict[str, Any] = {"model": _models(models), **combinations.UNSTATED}
    for name, value in settings.items():
        if name not in accepted:
            options = strategy_options()
            if name not in options:
                near = meant(name, [*accepted, *options])
                raise ConfigError(
                    f"{name}: is not a setting; {f'did you mean {near}; ' if near else ''}"
                    f"accepted are {', '.join([*accepted, *options])}"
                )
            together = isinstance(options[name][0].default, tuple) and isinstance(value, tuple)
            grid[name] = [value] if together else _listed(value)
        elif name == "gpus":
            grid[name] = _numbers(value)
            if not grid[name]:
                raise ConfigError(f"gpus: {value!r} is no number of GPUs; gpu= takes types")
        elif name in _MAPPINGS:
            if not isinstance(value, Mapping):
                raise ConfigError(f"{name}: {value!r} is not a mapping of settings")
            grid[name] = [tuple(sorted((key, _plain(of_key)) for key, of_key in value.items()))]
        elif name in _LENGTHS:
            grid[name] = [_tokens(name, each) for each in _listed(value)]
        elif name == "image_size":
            grid[name] = [image_sides(_plain(value))]
        elif name == "target_modules":
            grid[name] = [tuple(_listed(value))]
        else:
            grid[name] = _listed(value)
        if not grid[name]:
            raise ConfigError(f"{name}: is an empty list; give a value, or leave it out")
    return combinations.with_concurrency(grid, stated=grid, beside_files=beside_files)


def _one_run(function: str, grid: Mapping[str, list[Any]]) -> RunConfig:
    runs = combinations.only_runs(combinations.combinations(grid))
    if len(runs) != 1:
        raise ConfigError(
            f"{function} takes one run, these settings make {len(runs)}; give one value of each, "
            "or ask estimate"
        )
    return runs[0]


def _one_type(function: str, gpu: str | Sequence[str]) -> str:
    names = _types(gpu)
    if len(names) > 1:
        raise ConfigError(
            f"gpu: {function} takes one type, got {', '.join(names)}; estimate and where take "
            "several"
        )
    return names[0]


def _types(gpu: str | Sequence[str]) -> list[str]:
    names = [str(name) for name in _listed(gpu)]
    if not names:
        raise ConfigError("gpu: is an empty list; name a type, such as 'l4-24gb'")
    return names


def _numbers(gpus: Any) -> list[Any]:
    """The counts in `gpus`; empty where they are types, an older meaning.

    Raises:
        ConfigError: counts beside types.
    """
    values = _listed(gpus)
    are_counts = [not isinstance(value, str) or is_count(value) for value in values]
    if any(are_counts) and not all(are_counts):
        shown = ", ".join(map(str, values))
        raise ConfigError(f"gpus: {shown}: is the number of GPUs; gpu= takes types")
    if not all(are_counts):
        return []
    return [
        int(value) if isinstance(value, str) and value.strip().isdecimal() else value
        for value in values
    ]


def _old_spelling(gpu: str | Sequence[str], gpus: str | Sequence[str]) -> list[str]:
    """The types in `gpus`, with a warning that says how they are written now.

    Raises:
        ConfigError: `gpus` stands beside `gpu`.
    """
    names = _types(gpus)
    if gpu != "auto":
        raise ConfigError("gpus: is the number of GPUs; for types give gpu= alone")
    message = f"gpus= is the number of GPUs; write gpu={gpus!r} for their types"
    warnings.warn(message, FutureWarning, stacklevel=3)
    return names


def _listed(value: Any) -> list[Any]:
    value = _plain(value)
    return list(map(_plain, value)) if isinstance(value, list | tuple | set | range) else [value]


def _plain(value: Any) -> Any:
    """A number or array of NumPy, PyTorch or pandas as Python's own."""
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, type) else value


def _in_plan(value: Any) -> Any:
    """What a config file says for a value that JSON has no type for.

    Raises:
        ConfigError: a file can't say it.
    """
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    if hasattr(value, "tolist"):
        return _plain(value)
    raise ConfigError(f"plan: {value!r} is no number, text, list or mapping; give one of these")


def _models(models: Any) -> list[Any]:
    """Names of models; a path is a local folder, whatever it looks like."""
    names = []
    for each in _listed(models):
        if not isinstance(each, str | os.PathLike):
            raise ConfigError(
                f"model: must be a name or a folder with a config.json, got {type(each).__name__}"
            )
        names.append(os.path.abspath(each) if isinstance(each, os.PathLike) else each)
    return names


def _tokens(name: str, value: Any) -> Any:
    """A length that may be written as "4k"; other values are checked with the run.

    Raises:
        ConfigError: a text that is no number of tokens.
    """
    if not isinstance(value, str) or value == "max":
        return value
    return parse_tokens(value, setting=name)


def _data(data: Any) -> str | None:
    """The file, folder or dataset that holds the rows.

    Raises:
        ConfigError: it is none of these, such as the rows themselves.
    """
    if data is not None and not isinstance(data, str | os.PathLike):
        raise ConfigError(
            f"data: must be a file, a folder or a dataset of the hub, got {type(data).__name__}; "
            "write the rows to a JSONL file"
        )
    return None if data is None else os.fspath(data)


def _path(folder: AnyPath | None) -> Path | None:
    return None if folder is None else Path(folder)


__all__ = [
    "RunSettings",
    "calibrate",
    "compare_methods",
    "estimate",
    "explain",
    "life",
    "recommend",
    "to_frame",
    "where",
]
