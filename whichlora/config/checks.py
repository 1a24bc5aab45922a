"""Faults between keys: settings that exclude, repeat or need each other.

The checks read the raw mapping, so that their faults are reported together with those of single
values. They skip values of the wrong type, which the schema reports.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from whichlora.config.document import Loc, Problem
from whichlora.config.schema import MOST_TOKENS, Dataset, Stage1
from whichlora.errors import ConfigError, DataFileError
from whichlora.methods import list_methods
from whichlora.parallel import get_strategy, list_strategies, strategy_options
from whichlora.serving import list_engines
from whichlora.spec.data_format import COLUMNS, KINDS, Rows
from whichlora.spec.options import Option
from whichlora.spec.parallel import AUTO, ONE_DEVICE, ParallelConfig
from whichlora.spec.plan import DATA_FILE_SUFFIXES, DatasetConfig, DatasetKind
from whichlora.spec.run import TRANSFORMERS, USUAL_TRAINER
from whichlora.store.costs import find_grid, near_countries, read_prices
from whichlora.store.gpus import find_gpu, list_gpus, one_number
from whichlora.store.models import resolve_name
from whichlora.store.quality import read_scores
from whichlora.tasks import list_tasks
from whichlora.trainers import Trainer, list_trainers
from whichlora.units import parse_tokens

Data = Mapping[Any, Any]

STAGES = ("stage1_profile", "stage2_profile")
_WORDS = ("account", "partition", "clusters", "merge_partition", "qos", "modules")  # of Slurm
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_SPELLINGS = (
    ("peak_memory_gb", "peak_memory"),
    ("time_per_token_ms", "time_per_token"),
    ("total_time_mins", "total_time"),
    ("ttft_ms", "ttft"),
    ("tpot_ms", "tpot"),
)
_OF_ENGINES = (
    *("concurrency", "context", "shared_prompt_fraction", "length_spread"),
    *("ttft_ms", "ttft", "tpot_ms", "tpot", "requests_per_s"),
)
_COUNTS = ("tokens", "samples", "mean_tokens", "p95_tokens", "max_tokens")
_ROW_SETTINGS: Mapping[Rows, tuple[str, ...]] = {
    "texts": (
        *("template", "text_column", "messages_column", "prompt_column", "completion_column"),
        *("images_column", "audio_column"),
    ),
    "pairs": ("prompt_column", "chosen_column", "rejected_column"),
    "labelled": ("prompt_column", "completion_column", "label_column"),
    "prompts": ("prompt_column",),
    "classified": ("text_column", "label_column"),
    "tagged": (),
    "spans": (),
    "scored": (),
    "anchors": (),
}
_OF_ROWS = tuple(dict.fromkeys(itertools.chain.from_iterable(_ROW_SETTINGS.values())))
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_CLASS = re.compile(r"(?P<source>[\w.]+|.+\.py):(?P<name>[A-Za-z_]\w*)")


def check(data: Data, folder: Path) -> Iterator[Problem]:
    """Faults between the keys of `data`, whose relative paths start in `folder`."""
    for stage in STAGES:
        yield from _check_spellings(_section(data, stage), stage)
    yield from _check_repeats(data)
    yield from _check_models(data, folder)
    yield from _check_names(data, "methods", list_methods)
    yield from _check_names(data, "trainer", list_trainers)
    yield from _check_trainer(data)
    yield from _check_task(data)
    yield from _check_names(data, "serving", list_engines)
    yield from _check_serving(data)
    yield from _check_gpus(data)
    yield from _check_spread(data)
    yield from _check_preference(data)
    yield from _check_tables(data, folder)
    yield from _check_budget(data)
    yield from _check_dataset(data, folder)
    yield from _check_folders(data, folder)
    yield from _check_slurm(data)


def resolve_model(name: str, folder: Path) -> str:
    """The hub id that `name` means, or the absolute path if it is spelled as one ('./x', 'x.json').

    Raises:
        ConfigError: the name is ambiguous, or means a quantised copy of a model.
    """
    if name.startswith((".", "/", "~")) or name.endswith(".json"):
        return _absolute(name, folder)
    return resolve_name(name)[0]


def resolve_dataset(path: str, folder: Path) -> str:
    """`path` with its file part made absolute; hub ids and module names stay as they are."""
    if match := _CLASS.fullmatch(path):
        source = match["source"]
        return f"{_absolute(source, folder)}:{match['name']}" if source.endswith(".py") else path
    is_file = DatasetConfig(path=path).kind == "file" or os.path.exists(folder / path)
    return _absolute(path, folder) if is_file else path


def _absolute(path: str, folder: Path) -> str:
    return os.path.abspath(folder / os.path.expanduser(path))  # an unknown ~user stays


def _section(data: Data, key: str) -> Data:
    section = data.get(key)
    return section if isinstance(section, Mapping) else {}


def _texts(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [text for text in values if isinstance(text, str)]


def _check_spellings(section: Data, stage: str) -> Iterator[Problem]:
    for plain, with_unit in _SPELLINGS:
        if plain in section and with_unit in section:
            fault = f"says the same as {stage}.{plain}"
            yield Problem(loc=(stage, with_unit), fault=fault, accepted="one of the two")


def _check_repeats(data: Data) -> Iterator[Problem]:
    for loc, mapping in ((), data), *(((stage,), _section(data, stage)) for stage in STAGES):
        for key, values in mapping.items():
            if not isinstance(values, list) or key == "tokenizers":  # models may share one
                continue
            for index, value in enumerate(values):
                earlier = [before for before in values[:index] if type(before) is type(value)]
                if isinstance(value, str | int) and value in earlier:
                    fault, accepted = "is in the list twice", "each value once"
                    yield Problem(loc=(*loc, key, index), fault=fault, accepted=accepted)


def _check_models(data: Data, folder: Path) -> Iterator[Problem]:
    stage1 = _section(data, "stage1_profile")
    if "models" in data and "model_names" in stage1:
        fault = "says the same as stage1_profile.model_names"
        yield Problem(loc=("models",), fault=fault, accepted="one of the two")
        return
    models = _texts(data.get("models", stage1.get("model_names", [])))
    place: Loc = ("models",) if "models" in data else ("stage1_profile", "model_names")
    for index, name in enumerate(models):
        try:
            resolve_model(name, folder)
        except ConfigError as error:
            fault = str(error).partition(": ")[2]
            yield Problem(loc=(*place, index), fault=fault, show_value=False)
    loc = ("stage1_profile", "tokenizers")
    match stage1.get("tokenizers"):
        case dict() as tokenizers:
            for name in tokenizers:
                if models and isinstance(name, str) and name not in models:
                    near = difflib.get_close_matches(name, models, n=1)
                    yield Problem(
                        loc=(*loc, name),
                        fault="is not one of the models",
                        accepted=", ".join(models),
                        hint="".join(near),
                    )
        case list() | str() as tokenizers if not models:
            yield Problem(
                loc=loc,
                fault="is parallel to a list of models, and there is none",
                accepted="a mapping from model to tokenizer, or model_names",
            )
        case list() | str() as tokenizers if len(_texts(tokenizers)) != len(models):
            yield Problem(
                loc=loc,
                fault=f"names {len(_texts(tokenizers))} for {len(models)} models",
                accepted="one tokenizer per model in the same order, or a mapping",
            )


def _check_names(
    data: Data, key: str, registered: Callable[[], Mapping[str, Any]]
) -> Iterator[Problem]:
    """Names under `key` that neither this package nor an installed one registers."""
    names = data.get(key, [])
    accepted = registered() if names else {}
    for index, name in enumerate(names if isinstance(names, list) else [names]):
        if isinstance(name, str) and name.strip() and name not in accepted:
            yield Problem(
                loc=(key, index) if isinstance(names, list) else (key,),
                fault="is not known",
                accepted=", ".join(accepted),
                hint="".join(difflib.get_close_matches(name.lower(), accepted, n=1)),
            )


def _trainer(data: Data) -> Trainer | None:
    """The trainer that is named, that of the task or the usual one where none is.

    None where it is not known.
    """
    name, of_task = data.get("trainer", USUAL_TRAINER), data.get("task", "")
    task = list_tasks().get(of_task) if isinstance(of_task, str) else None
    if task is not None and name == USUAL_TRAINER:
        name = task.trainers[0]
    return list_trainers().get(name) if isinstance(name, str) else None


def _check_trainer(data: Data) -> Iterator[Problem]:
    """Options that a trainer does not have, and settings of texts beside other rows."""
    trainer = _trainer(data)
    if trainer is None:
        return
    yield from _check_options(data, "trainer_options", f"trainer {trainer.name}", trainer.options)
    rows = _rows(data)
    if rows in ("texts", None):
        return
    for key, accepted in (("collator", "longest"), ("train_on", "completions")):
        if data.get(key, accepted) != accepted:
            fault = f"is for texts, and {_learner(data)} takes {rows}"
            yield Problem(loc=(key,), fault=fault, accepted=f"{accepted}, or no such line")


def _check_task(data: Data) -> Iterator[Problem]:
    """A task that is not known, its options, and a trainer that does not train it."""
    yield from _check_names(data, "task", list_tasks)
    name, options = data.get("task", ""), _section(data, "task_options")
    task = list_tasks().get(name) if isinstance(name, str) else None
    if task is None:
        if options and not name:
            fault = "is for a task, and none is named"
            yield Problem(loc=("task_options",), fault=fault, accepted="task beside it")
        return
    yield from _check_options(data, "task_options", f"task {task.name}", task.options)
    trainer = data.get("trainer", USUAL_TRAINER)
    if trainer not in (USUAL_TRAINER, *task.trainers):
        fault, accepted = f"does not train task {task.name}", " or ".join(task.trainers)
        yield Problem(loc=("trainer",), fault=fault, accepted=f"{accepted}, or no such line")


def _learner(data: Data) -> str:
    """Who says what rows are: a task that has its own, else the trainer."""
    name = data.get("task", "")
    task = list_tasks().get(name) if isinstance(name, str) else None
    if task is not None and task.rows is not None:
        return f"task {name}"
    return f"trainer {data.get('trainer', USUAL_TRAINER)}"


def _rows(data: Data) -> Rows | None:
    """What is learned from, None where a name is not known."""
    trainer, name = _trainer(data), data.get("task", "")
    if trainer is None:
        return None
    task = list_tasks().get(name) if isinstance(name, str) else None
    if name and task is None:
        return None
    return trainer.rows if task is None or task.rows is None else task.rows


def _check_options(
    data: Data,
    section: str,
    owner: str,
    declared: Sequence[Option],
    but: Collection[str] = (),
) -> Iterator[Problem]:
    """Settings under `section` that `owner` does not declare, or whose values it refuses.

    Args:
        but: those that were told already.
    """
    options = {name: option for option in declared for name in (option.name, *option.other_names)}
    for name, value in _section(data, section).items():
        if name in but:
            continue
        if name not in options:
            yield Problem(
                loc=(section, name),
                fault=f"is no option of {owner}",
                accepted=", ".join(options) or "none",
                hint="".join(difflib.get_close_matches(str(name), options, n=1)),
                show_value=False,
            )
            continue
        try:
            options[name].checked(value)
        except ConfigError as error:
            fault = str(error).partition(": ")[2]
            yield Problem(loc=(section, name), fault=fault, show_value=False)


def _check_serving(data: Data) -> Iterator[Problem]:
    """What an engine does not declare, and limits of stage 1 that are not of who serves."""
    name = data.get("serving", TRANSFORMERS)
    engine = list_engines().get(name) if isinstance(name, str) else None
    if engine is None:
        return
    told = [flag for flag in _section(data, "serving_options") if engine.fault_of(str(flag))]
    for flag in told:
        instead = engine.elsewhere.get(flag, "")
        yield Problem(
            loc=("serving_options", flag),
            fault=engine.fault_of(flag),
            accepted="stage1_profile.context" if instead == "context" else instead,
            show_value=False,
        )
    owner = f"serving {engine.name}"
    but = [*told, *engine.ignored]
    yield from _check_options(data, "serving_options", owner, engine.options, but=but)
    if "serving_version" in data and not engine.library:
        fault = f"is the release of an engine, and serving {engine.name} has none"
        yield Problem(loc=("serving_version",), fault=fault, accepted="no such line")
    stage1, limits = _section(data, "stage1_profile"), _section(data, "gpu_limits")
    if engine.start is None:
        of_gpus = [(("gpu_limits", gpu), _section(limits, gpu)) for gpu in limits]
        for loc, section in ((("stage1_profile",), stage1), *of_gpus):
            for key in _OF_ENGINES:
                if key in section:
                    fault = "is of a serving engine, and serving is transformers"
                    accepted = "serving: vllm beside it, or batch_size and time_per_token"
                    yield Problem(loc=(*loc, key), fault=fault, accepted=accepted)
        return
    trainer = _trainer(data)
    task = data.get("task") or ("" if trainer is None else trainer.task)
    if task:
        fault = f"writes texts, and a model of task {task} reads them"
        yield Problem(loc=("serving",), fault=fault, accepted=f"{TRANSFORMERS}, or no such line")
        return
    if "batch_size" in stage1:
        fault = f"is of transformers, and {engine.name} has as many sequences as its pool holds"
        accepted = "concurrency, the fewest that must run at once"
        yield Problem(loc=("stage1_profile", "batch_size"), fault=fault, accepted=accepted)
    if "kv_cache" in data:
        fault = f"is a cache of transformers, and {engine.name} has its own"
        yield Problem(loc=("kv_cache",), fault=fault, accepted="serving_options, or no such line")
    context, defaults = _lengths(stage1.get("context")), Stage1()
    prompt = _lengths(stage1.get("prefill_length", list(defaults.prefill_length)))
    answer = _lengths(stage1.get("tokens_to_generate", list(defaults.tokens_to_generate)))
    if context and prompt and answer and max(prompt) + max(answer) > context[0]:
        fault = f"is less than a prompt of {max(prompt)} tokens and its {max(answer)} new ones"
        accepted = "their sum or more, or a smaller prefill_length or tokens_to_generate"
        yield Problem(loc=("stage1_profile", "context"), fault=fault, accepted=accepted)


def _check_gpus(data: Data) -> Iterator[Problem]:
    for section in ("gpu_limits", "gpu_prices"):
        for name in _section(data, section):
            if type(name) is int:
                name = str(name)
            if not isinstance(name, str) or not name.strip():
                continue
            try:
                find_gpu(name)
            except ConfigError as error:
                is_unknown = str(error).startswith("unknown")
                yield Problem(
                    loc=(section, name),
                    fault="is not a known GPU" if is_unknown else str(error).partition("; ")[0],
                    accepted="a key of `whichlora gpus`, or cpu",
                    hint="".join(difflib.get_close_matches(name.lower(), _gpu_keys(), n=1)),
                    show_value=False,
                )


def take_number_of_gpus(data: dict[Any, Any]) -> Iterator[Problem]:
    """Move the number that `gpu` of `data` states, as in 2x3090, to `gpus`; faults, if any."""
    named = data.get("gpu")
    names = named if isinstance(named, list) else [named]
    if not names or not all(isinstance(name, str | int) for name in names):
        return
    try:
        number, types = one_number([str(name) for name in names], stated="gpus" in data)
    except ConfigError as error:
        yield Problem(loc=("gpu",), fault=str(error).partition(": ")[2], show_value=False)
        return
    if number is not None:
        data |= {"gpu": types, "gpus": number}


def options_of(strategy: str) -> set[str]:
    """Names of the options of `strategy`: of one, of two joined with "+", of "auto" of all.

    Raises:
        ConfigError: no such strategy.
    """
    if strategy in (AUTO, ONE_DEVICE):
        return set(strategy_options()) if strategy == AUTO else set()
    names = ParallelConfig(strategy=strategy).names
    return {option.name for name in names for option in get_strategy(name).options}


def _check_spread(data: Data) -> Iterator[Problem]:
    """Numbers of GPUs, strategies and their options that exclude each other."""
    if "global_batch_size" in data and "gradient_accumulation_steps" in data:
        fault, accepted_keys = "follows from global_batch_size", "one of the two"
        yield Problem(loc=("gradient_accumulation_steps",), fault=fault, accepted=accepted_keys)
    counts = _numbers(data.get("gpus"))
    stated = [
        key for key in ("nodes", "parallel", "interconnect", *strategy_options()) if key in data
    ]
    if "gpus" not in data:
        for key in stated[:1]:
            fault = "needs gpus, the number of GPUs over all nodes"
            yield Problem(
                loc=(key,), fault=fault, accepted="gpus beside it, such as gpus: [1, 2, 4]"
            )
        return
    for index, nodes in enumerate(_numbers(data.get("nodes"))):
        if counts and nodes > 0 and all(count % nodes for count in counts):
            listed = isinstance(data["nodes"], list)
            fault = f"does not divide gpus, which are {', '.join(map(str, counts))} over all nodes"
            yield Problem(loc=("nodes", index) if listed else ("nodes",), fault=fault)
    accepted: set[str] = set()
    known = (*list_strategies(), AUTO, ONE_DEVICE)
    names = _texts(data.get("parallel", AUTO))
    for index, name in enumerate(names):
        loc: Loc = ("parallel", index) if isinstance(data.get("parallel"), list) else ("parallel",)
        unknown = [part.strip() for part in name.split("+") if part.strip() not in known]
        if unknown:
            yield Problem(
                loc=loc,
                fault=f"{unknown[0]!r} is not known",
                accepted=f"{', '.join(known)}, or two joined with +",
                hint="".join(difflib.get_close_matches(unknown[0].lower(), known, n=1)),
                show_value=False,
            )
            return
        accepted |= options_of(name)
        if name == ONE_DEVICE and counts and min(counts) > 1:
            fault = f"is of one GPU, and gpus are {', '.join(map(str, counts))}"
            yield Problem(loc=loc, fault=fault, accepted=", ".join(known[:-1]))
    for key in strategy_options():
        if key in data and key not in accepted:
            yield Problem(
                loc=(key,),
                fault=f"is no option of parallel {', '.join(names)}",
                accepted=", ".join(sorted(accepted)) or "none",
            )


def _lengths(value: Any) -> list[int]:
    """Numbers of tokens, also as texts such as 4k; what is none has a message of its own."""
    numbers = list[Any]()
    for length in value if isinstance(value, list) else [value]:
        with contextlib.suppress(ConfigError):
            numbers.append(parse_tokens(length) if isinstance(length, str) else length)
    return _numbers(numbers)


def _numbers(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [number for number in values if type(number) is int]


def _gpu_keys() -> list[str]:
    return [gpu.key for gpu in list_gpus()]


def _check_preference(data: Data) -> Iterator[Problem]:
    prefer = data.get("prefer")
    if prefer == "quality" and "quality" not in data:
        fault = "needs quality, a CSV file with the columns model and score; none ships"
        yield Problem(loc=("prefer",), fault=fault, accepted="another preference, or quality")
    named = "models" in data or "model_names" in _section(data, "stage1_profile")
    if prefer == "order" and not named:
        fault = "needs models, in your order with the best first"
        yield Problem(loc=("prefer",), fault=fault, accepted="another preference, or models")


def _check_tables(data: Data, folder: Path) -> Iterator[Problem]:
    tables: Mapping[str, Callable[[Path], object]] = {
        "prices": read_prices,
        "quality": read_scores,
    }
    for key, read in tables.items():
        name = data.get(key)
        if not isinstance(name, str) or not name.strip():
            continue
        try:
            read(Path(_absolute(name, folder)))
        except DataFileError as error:
            yield Problem(loc=(key,), fault=f"can't be used: {error}", show_value=False)
    if "prices" in data and "gpu_prices" in data:
        fault = "and gpu_prices both state prices"
        yield Problem(loc=("prices",), fault=fault, accepted="one of both")
    country = data.get("country")
    if isinstance(country, str) and country.strip():
        try:
            find_grid(country)
        except ConfigError:
            yield Problem(
                loc=("country",),
                fault="is not known",
                accepted="a country's name or its code, such as FR or FRA",
                hint="".join(near_countries(country)[:1]),
            )


def _check_budget(data: Data) -> Iterator[Problem]:
    if data.get("profile") != "all":
        return
    for key in ("max_profile_runs", "max_profile_time"):
        if key in data:
            fault = "ends a search, and profile: all measures every candidate"
            yield Problem(loc=(key,), fault=fault, accepted="profile: frontier, or no such line")


def _check_dataset(data: Data, folder: Path) -> Iterator[Problem]:
    value = data.get("dataset")
    dataset = {"path": value} if isinstance(value, str) else _section(data, "dataset")
    counts = [key for key in _COUNTS if key in dataset]
    path = dataset.get("path")
    if counts and "path" in dataset:
        yield Problem(
            loc=("dataset", counts[0]),
            fault="is for planning without data, and dataset.path names data",
            accepted="one of the two",
        )
    elif counts:
        yield from _check_counts(dataset, counts, train=data.get("train") is True)
    elif isinstance(path, str) and path.strip():
        yield from _check_path(path, dataset, folder)
    elif isinstance(value, dict) and path is None:
        yield Problem(
            loc=("dataset",),
            fault="says neither where the data is nor how much there is",
            accepted="path, or tokens and samples",
            show_value=False,
        )
    rows = _rows(data)
    if rows is not None:
        yield from _check_row_settings(dataset, rows, _learner(data))


def _check_folders(data: Data, folder: Path) -> Iterator[Problem]:
    """Files where folders are expected; a run would notice only after its first profile."""
    for key in ("output_dir", "calibration_dir"):
        name = data.get(key)
        if isinstance(name, str) and name.strip() and os.path.isfile(_absolute(name, folder)):
            yield Problem(loc=(key,), fault="is a file", accepted="a folder, there or to be made")


def _check_slurm(data: Data) -> Iterator[Problem]:
    """Texts that no line of a batch script can hold; pretend_memory without calibration_dir."""
    slurm = _section(data, "slurm")
    for key in (*_WORDS, "setup", "options", "command"):
        many = isinstance(slurm.get(key), list)
        for index, text in enumerate(slurm[key] if many else [slurm.get(key)]):
            if not isinstance(text, str) or not text.strip():
                continue
            loc = ("slurm", key, index) if many else ("slurm", key)
            if key in _WORDS and not (text.isprintable() and len(text.split()) == 1):
                yield Problem(loc=loc, fault="is not one word", accepted="a name without blanks")
            elif not text.isprintable():
                yield Problem(
                    loc=loc, fault="is not one line", accepted="a line; several as a list"
                )
            elif key == "options" and not text.startswith("-"):
                accepted = "an option of sbatch as one text, such as '--reservation=class'"
                yield Problem(loc=loc, fault="is not an option", accepted=accepted)
    environment = slurm.get("environment")
    for name in environment if isinstance(environment, Mapping) else ():
        if isinstance(name, str) and name.strip() and not _VARIABLE.fullmatch(name):
            accepted = "letters, digits and _, not starting with a digit"
            yield Problem(
                loc=("slurm", "environment", name),
                fault="can't name an environment variable",
                accepted=accepted,
                show_value=False,
            )
    if "pretend_memory" in slurm and "calibration_dir" not in data:
        yield Problem(
            loc=("slurm", "pretend_memory"),
            fault="writes records that no GPU measured, which must stay apart from true ones",
            accepted="for tests only, with a calibration_dir of their own",
        )


def _check_counts(dataset: Data, counts: list[str], *, train: bool) -> Iterator[Problem]:
    size = [key for key in ("tokens", "mean_tokens") if key in counts]
    if "samples" not in counts or not size:
        missing = "dataset.samples"
        if "samples" in counts:
            missing = "dataset.tokens, of all samples, or dataset.mean_tokens, of one,"
        fault = f"needs {missing} beside it"
        yield Problem(loc=("dataset", counts[0]), fault=fault, accepted="both, or dataset.path")
        return
    if len(size) > 1:
        fault = "says the same as dataset.tokens over dataset.samples"
        yield Problem(loc=("dataset", "mean_tokens"), fault=fault, accepted="one of the two")
        return
    for key in dataset:
        if key in Dataset.model_fields and key not in counts:
            fault, accepted = "says how to read data, and dataset has only counts", "no such line"
            yield Problem(loc=("dataset", key), fault=fault, accepted=accepted)
    yield from _check_lengths(dataset)
    if train:
        yield Problem(
            loc=("train",),
            fault="needs data to train on, and dataset has only counts",
            accepted="false, or give dataset.path",
        )


def _check_lengths(dataset: Data) -> Iterator[Problem]:
    """Lengths that contradict each other."""
    tokens, samples = dataset.get("tokens"), dataset["samples"]
    mean = dataset.get("mean_tokens")
    # the schema refuses more than MOST_TOKENS, which a float may not hold
    if (
        isinstance(tokens, int)
        and isinstance(samples, int)
        and 0 < samples <= MOST_TOKENS >= tokens
    ):
        mean = tokens / samples
        if tokens < samples:
            fault = f"is less than one token for each of {samples} samples"
            yield Problem(loc=("dataset", "tokens"), fault=fault, accepted=f"{samples} or more")
            return
    longest, p95 = dataset.get("max_tokens"), dataset.get("p95_tokens")
    if not isinstance(mean, int | float) or not 1 <= mean <= MOST_TOKENS:
        return
    if isinstance(longest, int) and longest < mean:
        fault = f"is less than the mean of {mean:.5g} tokens"
        accepted = f"{math.ceil(mean)} or more"
        yield Problem(loc=("dataset", "max_tokens"), fault=fault, accepted=accepted)
    if isinstance(p95, int) and 0 < p95 <= MOST_TOKENS:
        try:
            DatasetConfig(mean_tokens=mean, p95_tokens=p95)
        except ConfigError as error:
            accepted = str(error).partition("must be ")[2].rpartition(",")[0]
            fault = "is no 95 % quantile of lengths with this mean"
            yield Problem(loc=("dataset", "p95_tokens"), fault=fault, accepted=accepted)


def _check_path(path: str, dataset: Data, folder: Path) -> Iterator[Problem]:
    loc = ("dataset", "path")
    resolved = resolve_dataset(path, folder)
    kind = DatasetConfig(path=resolved).kind
    local_files = f"a file of type {', '.join(DATA_FILE_SUFFIXES)}"
    if kind == "class":
        match = _CLASS.fullmatch(path)
        if match is None:
            accepted = "module:Class or path/to/file.py:Class"
            yield Problem(loc=loc, fault="names no dataset class", accepted=accepted)
        elif match["source"].endswith(".py") and not os.path.isfile(resolved.rpartition(":")[0]):
            fault = f"is not there: no file {resolved.rpartition(':')[0]}"
            yield Problem(
                loc=loc, fault=fault, accepted="a Python file, from this file's folder on"
            )
    elif kind == "file" and not os.path.exists(resolved):
        fault = f"is not there: no file {resolved}"
        yield Problem(loc=loc, fault=fault, accepted=f"{local_files}, from this file's folder on")
    elif kind == "file" and not resolved.endswith(DATA_FILE_SUFFIXES) and os.path.isfile(resolved):
        yield Problem(loc=loc, fault="is not a type of file that can be read", accepted=local_files)
    elif kind == "hub" and not _HUB_ID.fullmatch(path):
        accepted = f"{local_files}, a dataset id such as org/name, or module:Class"
        yield Problem(loc=loc, fault="is neither a file nor a dataset id", accepted=accepted)
    for key in ("split", "config_name"):
        if key in dataset and kind != "hub":
            fault, accepted = "is for datasets of the hub only", "no such line"
            yield Problem(loc=("dataset", key), fault=fault, accepted=accepted)
    for key in _OF_ROWS:
        if key in dataset and kind == "class":
            fault, accepted = "is not for a dataset class, which has to_text", "no such line"
            yield Problem(loc=("dataset", key), fault=fault, accepted=accepted)
    yield from _check_validation_path(dataset, kind, folder)


def _check_validation_path(dataset: Data, kind: DatasetKind, folder: Path) -> Iterator[Problem]:
    path = dataset.get("validation_path")
    if not isinstance(path, str):
        return
    loc, accepted = ("dataset", "validation_path"), "no such line"
    resolved = resolve_dataset(path, folder)
    if kind != "file":
        yield Problem(
            loc=loc, fault="is for files only, and dataset.path is none", accepted=accepted
        )
    elif not os.path.isfile(resolved) or not resolved.endswith(DATA_FILE_SUFFIXES):
        accepted = f"a file of type {', '.join(DATA_FILE_SUFFIXES)}, from this file's folder on"
        yield Problem(loc=loc, fault=f"is not there: no file {resolved}", accepted=accepted)
    elif "validation_fraction" in dataset:
        fault = "gives the rows to evaluate on, and dataset.validation_fraction as well"
        yield Problem(loc=loc, fault=fault, accepted="one of the two")


def _check_row_settings(dataset: Data, rows: Rows, learner: str) -> Iterator[Problem]:
    accepted = _ROW_SETTINGS[rows]
    for key in _OF_ROWS:
        if key in dataset and key not in accepted:
            fault = f"is not for {rows}, which {learner} takes"
            words = ", ".join(accepted) or f"the columns {', '.join(COLUMNS[KINDS[rows][0]])}"
            yield Problem(loc=("dataset", key), fault=fault, accepted=words)
    if rows == "texts":
        yield from _check_text_settings(dataset)
    elif rows == "pairs":
        for key, partner in itertools.permutations(("chosen_column", "rejected_column")):
            if key in dataset and partner not in dataset:
                fault = f"needs dataset.{partner} beside it"
                yield Problem(loc=("dataset", key), fault=fault, accepted="both, or neither")


def _check_text_settings(dataset: Data) -> Iterator[Problem]:
    ways = (key for key in _ROW_SETTINGS["texts"] if key not in ("images_column", "audio_column"))
    row_keys = [key for key in ways if key in dataset]
    texts = [key for key in row_keys if key in ("template", "text_column")]
    if "audio_column" in dataset and "template" in dataset:
        fault = "goes with a transcript, messages, or a prompt and its completion, not a template"
        accepted = "text_column, messages_column, or prompt_column and completion_column"
        yield Problem(loc=("dataset", "audio_column"), fault=fault, accepted=accepted)
    if {"images_column", "audio_column"} <= set(dataset):
        fault = "is beside dataset.images_column, and a model is trained on one of both here"
        yield Problem(loc=("dataset", "audio_column"), fault=fault, accepted="one of the two")
    if texts and "images_column" in dataset:
        fault = f"goes with messages, or a prompt and its completion, not with dataset.{texts[0]}"
        accepted = "one of the two"
        yield Problem(loc=("dataset", "images_column"), fault=fault, accepted=accepted)
    if row_keys == ["prompt_column", "completion_column"]:
        return
    for key, partner in itertools.permutations(("prompt_column", "completion_column")):
        if row_keys == [key]:
            fault = f"needs dataset.{partner} beside it"
            yield Problem(loc=("dataset", key), fault=fault, accepted="both, or neither")
    for key in row_keys[1:]:
        fault = f"is a second way to read a row, beside dataset.{row_keys[0]}"
        yield Problem(loc=("dataset", key), fault=fault, accepted="one of the two")
    template = dataset.get("template")
    if isinstance(template, str) and template.strip():
        try:
            DatasetConfig(template=template)
        except ConfigError:
            fault = "is not a template"
            accepted = "text with column names in braces, such as '{instruction} {response}'"
            yield Problem(loc=("dataset", "template"), fault=fault, accepted=accepted)
