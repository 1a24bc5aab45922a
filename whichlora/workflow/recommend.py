"""`whichlora recommend`: a few words instead of a config file → the plan they mean, answered."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from whichlora.config import DEFAULT_MODELS, models_for, parse_duration, plan_of
from whichlora.config.document import write_document
from whichlora.dataset import first_format
from whichlora.dataset.media import read_by
from whichlora.errors import ConfigError
from whichlora.methods import under_trainer, with_method
from whichlora.predict.advice import Advice, advice
from whichlora.predict.assumed import MOVING, moving_settings
from whichlora.predict.explain import Alternative, Explanation
from whichlora.predict.largest import Placement
from whichlora.search.feasibility import closest
from whichlora.serving import get_engine
from whichlora.spec.costs import Offer, cheapest, own_price
from whichlora.spec.data_format import TRANSCRIPTS, DataFormat
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.numeric import is_number
from whichlora.spec.parallel import MOST_GPUS
from whichlora.spec.results import Assumed, Prediction
from whichlora.spec.run import MOST_COUNT, MOST_RATIO, TRANSFORMERS, USUAL_TRAINER, RunConfig
from whichlora.store.costs import find_grid, load_rates
from whichlora.store.gpus import find_target, list_gpus, one_number
from whichlora.store.hub import load_model
from whichlora.store.models import find_model, list_models
from whichlora.trainers import RECIPE, get_trainer, suits_recipe
from whichlora.workflow import estimates
from whichlora.workflow.answer import Answer
from whichlora.workflow.profiling import gpus_of
from whichlora.workflow.run import search
from whichlora.workflow.session import Progress, Session

NUM_SAMPLES = 10_000  # rows of full length where no data is given, as `whichlora guide` has them
_PLAN = Path("recommend")  # what messages call a plan that is in no file
_MONEY = re.compile(
    r"(?P<sign>[$€£]?)\s*(?P<amount>\d+(?:\.\d+)?)\s*(?P<unit>[$€£]|[a-z]{3})?", re.IGNORECASE
)
_ENERGY = re.compile(r"(\d+(?:\.\d+)?)\s*(wh|kwh|mwh)", re.IGNORECASE)
_WATT_HOURS = {"wh": 1.0, "kwh": 1e3, "mwh": 1e6}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a person says who has no config file; the rest is the default of a plan.

    Args:
        gpu: as `estimate` takes one, such as "4090" or "2x3090"; None is that of this machine.
        gpus: that share the fine-tuning, and what an engine serves that divides models.
        host_memory: of each node, such as "128GiB", which what is offloaded must fit in; None is
            this machine's, if it has the GPU, and else no more than any known machine has.
        models: to choose from; empty is the default list of a plan.
        method: to choose from; empty are the default ones of a plan.
        data: a file, folder or hub dataset; None is `samples` rows of `seq_len` tokens.
        attn: the attention kernel; None is the default of a plan.
        image_max_pixels: larger images of the data are shrunk to so many.
        within: most time of the whole fine-tuning, such as "8h".
        budget: GPU-hours ("10h"), money ("20usd") or electricity of the boards ("5kWh").
        price_per_hour: of one GPU, in the currency of `budget`; None is that of the price table.
        prices: a CSV file that goes before the table.
        country: whose electricity tells the CO2.
        quality: a CSV file of scores by model, which then go before size.
        trainer: who trains; None is TRL's SFTTrainer on a GPU, where the models write texts.
        serving: who serves the model; None is transformers' generate.
        serve: with an engine, how it has the weights: a quantisation such as "awq-int4", or a type
            of its own files such as "Q8_0"; None is 16 bit, or the usual type.
        tpot: most time of each further token there, such as "50ms".

    Raises:
        ConfigError: a value that is not accepted, or one that needs another beside it.
    """

    gpu: str | None = None
    gpus: int = 1
    host_memory: str | None = None
    models: tuple[str, ...] = ()
    method: tuple[str, ...] = ()
    seq_len: int = RunConfig(model="any").seq_len
    data: str | None = None
    samples: int | None = None
    attn: str | None = None
    image_max_pixels: int | None = None
    epochs: float = 1.0
    within: str | None = None
    budget: str | None = None
    price_per_hour: float | None = None
    prices: str | Path | None = None
    country: str | None = None
    quality: str | Path | None = None
    trainer: str | None = None
    serving: str | None = None
    serve: str | None = None
    tpot: str | None = None

    def __post_init__(self) -> None:
        for name in (
            "gpu",
            "host_memory",
            "data",
            "attn",
            "budget",
            "country",
            "trainer",
            "serving",
            "serve",
        ):
            text = getattr(self, name)
            if not isinstance(text, str | None):
                raise ConfigError(f"{name}: must be text, got {text!r}")
        if "," in (self.gpu or ""):
            raise ConfigError(
                f"gpu: recommend takes one type, got {self.gpu}; 'whichlora where' compares types, "
                "and so does a plan for 'whichlora run'"
            )
        num_cards, (gpu,) = one_number([self.gpu or ""], stated=self.gpus != 1)
        if num_cards is not None:
            object.__setattr__(self, "gpu", gpu)
            object.__setattr__(self, "gpus", num_cards)
        for name, least, most in (
            ("gpus", 1, MOST_GPUS),
            ("seq_len", 2, MOST_COUNT),
            ("samples", 1, 10**7),
            ("image_max_pixels", 1, MOST_COUNT),
        ):
            value = getattr(self, name)
            if value is None and name in ("samples", "image_max_pixels"):
                continue
            if type(value) is not int or not least <= value <= most:
                raise ConfigError(
                    f"{name}: must be a whole number from {least} to {most:,}, got {value!r}"
                )
        for name, number in (("epochs", self.epochs), ("price_per_hour", self.price_per_hour)):
            if number is not None and not (is_number(number) and 0 < number <= MOST_RATIO):
                raise ConfigError(f"{name}: must be a number above 0, got {number!r}")
        if self.prices is not None and self.price_per_hour is not None:
            raise ConfigError("prices and price_per_hour: give one of both")
        if self.data is not None and self.samples is not None:
            raise ConfigError("data and samples: give one of both; data has its own rows")
        for name, what in (("tpot", "a limit"), ("serve", "a form")):
            if getattr(self, name) is not None and self.serving in (None, TRANSFORMERS):
                raise ConfigError(
                    f"{name}: {getattr(self, name)} is {what} of a serving engine; give serving, "
                    "such as vllm"
                )

    def most_s(self, gpu: GpuSpec) -> float | None:
        """The most that the whole fine-tuning may take on `gpu`.

        Raises:
            ConfigError: no duration or budget, money without a price, energy without a power, or
                nothing says how much data.
        """
        limits_s = []
        if self.within is not None:
            limits_s.append(parse_duration(self.within, setting="within"))
        if self.budget is not None:
            limits_s.append(self._budget_s(self.budget, gpu))
        if not limits_s:
            return None
        if self.data is None and self.samples is None:
            name = "budget" if self.within is None else "within"
            raise ConfigError(
                f"{name}: how long a training takes depends on its data; give data, or the number "
                "of samples"
            )
        if not min(limits_s):
            raise ConfigError(f"budget: must be above 0, got {self.budget!r}")
        return min(limits_s)

    def _budget_s(self, budget: str, gpu: GpuSpec) -> float:
        """Seconds of all GPUs that `budget` pays."""
        if energy := _ENERGY.fullmatch(budget.strip()):
            if gpu.most_w is None:
                raise ConfigError(
                    f"budget: {budget!r} is energy, and the power of {gpu.key} is not known; give "
                    "GPU-hours such as 10h"
                )
            joules = 3600 * float(energy[1]) * _WATT_HOURS[energy[2].lower()]
            return joules / (self.gpus * gpu.most_w)
        money = _MONEY.fullmatch(budget.strip())
        if money is None:
            try:
                return parse_duration(budget, setting="budget") / self.gpus
            except ConfigError:
                raise ConfigError(
                    f"budget: {budget!r} is neither money (20usd), GPU-hours (10h) nor energy "
                    "(5kWh)"
                ) from None
        return 3600 * float(money["amount"]) / self._price(gpu, budget, money).per_hour(self.gpus)

    def _price(self, gpu: GpuSpec, budget: str, money: re.Match[str]) -> Offer:
        """What an hour costs in the currency of `budget`."""
        if self.price_per_hour is not None:
            return own_price(gpu.key, float(self.price_per_hour))
        currency = "".join(filter(None, (money["sign"], money["unit"]))).lower()
        if currency not in ("", "$", "usd", "$usd"):
            raise ConfigError(
                f"budget: {budget!r} is not in USD, which the price table is in; give "
                "price_per_hour in your currency"
            )
        offers = load_rates(_path(self.prices)).prices.get(gpu.key, ())
        offer = cheapest(offers, self.gpus)
        if offer is None:
            raise ConfigError(
                f"budget: {budget!r} is money, and the price table has no {gpu.key}; give "
                "price_per_hour, what an hour of one GPU costs, or GPU-hours such as 10h"
            )
        return offer


def _path(text: str | Path | None) -> Path | None:
    return None if text is None else Path(os.path.abspath(os.path.expanduser(text)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The answer to a question, and what may be given up where nothing fits.

    Args:
        plan: content of a config file that asks the same.
        looked_at: which models were compared; empty where the question names them.
        assumes_data: nobody said how much data there is, so that a total means nothing.
        recipes: the winner under its trainer and under the other usual one, where it has one.
        nearest: where nothing fits, the candidate that comes closest, with its other choices.
        longest: it with as many tokens as fit this GPU; None where not even a few do.
        smallest_gpu: the smallest accelerator with a price that it fits on; without one, the
            smallest of all.
    """

    answer: Answer
    plan: Mapping[str, Any]
    looked_at: str = ""
    assumes_data: bool = False
    recipes: tuple[Prediction, ...] = ()
    nearest: Explanation | None = None
    longest: Prediction | None = None
    smallest_gpu: Placement | None = None

    @property
    def advice(self) -> tuple[Advice, ...]:
        """Rules for the adapter of the winner."""
        winner = self.answer.winner
        if winner is None:
            return ()
        tokens = None if self.assumes_data else self.answer.dataset["tokens_per_epoch"]
        return advice(winner.run, winner.prediction.num_trainable_params, tokens)

    @property
    def assumed(self) -> tuple[Prediction, ...]:
        """The winner, or what comes closest, with the settings that nobody asked for."""
        told = self.answer.winner or self.nearest
        if told is None:
            return ()
        asked = {"seq_len", *(name for name in MOVING if name in self.plan)}
        assumed = Assumed(settings=moving_settings(told.prediction.run, asked))
        return (replace(told.prediction, assumed=assumed),)

    @property
    def savings(self) -> tuple[Alternative, ...]:
        """`nearest` with one choice made differently, the largest saving first."""
        if self.nearest is None:
            return ()
        saved = self.nearest.saved_bytes
        less = [each for each in (*self.nearest.savings, *self.nearest.ranks) if saved(each) > 0]
        return tuple(sorted(less, key=saved, reverse=True))

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape: that of an answer, the plan, and what may be given up."""
        savings = [
            {
                "change": saving.name,
                "saved_bytes": self.nearest.saved_bytes(saving),
                "device_used_bytes": saving.prediction.memory.device_used_bytes,
                "verdict": saving.prediction.verdict,
            }
            for saving in self.savings
            if self.nearest is not None
        ]
        smallest = None if self.smallest_gpu is None else self.smallest_gpu.gpu.key
        menu: dict[str, Any] = {
            "savings": savings,
            "longest_seq_len": None if self.longest is None else self.longest.run.seq_len,
            "smallest_gpu": smallest,
        }
        menu["advice"] = [asdict(rule) for rule in self.advice]
        menu["recipes"] = [
            {
                "trainer": each.run.trainer,
                "device_used_bytes": each.memory.device_used_bytes,
                "step_s": each.time.step_s if each.time.is_known else None,
                "verdict": each.verdict,
            }
            for each in self.recipes
        ]
        asked = {"plan": dict(self.plan), "looked_at": self.looked_at}
        return self.answer.to_dict() | asked | menu


def recommend(
    question: Question, *, progress: Progress, calibration_dir: Path | None = None
) -> Recommendation:
    """Predict the plan that `question` means; nothing is measured or written.

    Raises:
        ConfigError: an unknown name, no GPU here where none is named, or a fault of the data.
    """
    content = plan_content(question)
    plan = replace(plan_of(content, source=_PLAN), calibration_dir=calibration_dir)
    (gpu,) = gpus_of(plan)
    named = _gpu(question)[1].notes  # the plan has the key that the name was taken as
    gpu = replace(gpu, notes=tuple(dict.fromkeys((*named, *gpu.notes))))
    with tempfile.TemporaryDirectory() as folder:
        plan = replace(plan, output_dir=Path(folder))
        session = Session(plan, gpu, progress, fresh=True)
        try:
            answer = search(session)
        finally:
            session.close()
    recommendation = Recommendation(
        answer=answer,
        plan=content,
        looked_at=_looked_at(question, len(plan.models)),
        assumes_data=question.data is None and question.samples is None,
    )
    if answer.winner is not None:
        recipes = _recipes(answer.winner.run, content, calibration_dir)
        return replace(recommendation, recipes=recipes)
    return _with_menu(recommendation, calibration_dir)


def plan_content(question: Question) -> dict[str, Any]:
    """What a config file that asks `question` says."""
    gpu, spec = _gpu(question)
    limit_s = question.most_s(spec)
    content: dict[str, Any] = {"gpu": gpu}
    if question.gpus > 1:
        content["gpus"] = question.gpus
    if question.host_memory is not None:
        content["host_memory"] = question.host_memory
    models = question.models or _models_that_read(question)
    trainer = _trainer(question, spec, models)
    if not models and (large := models_for(question.gpus * spec.memory_bytes)) != DEFAULT_MODELS:
        models = large
    if models:
        content["models"] = list(models)
    if question.method:
        content["methods"] = list(question.method)
    if trainer is not None:
        content["trainer"] = trainer
    content |= {"sequence_length": question.seq_len, "epochs": float(question.epochs)}
    if question.data is None:
        length = question.seq_len
        samples = question.samples or NUM_SAMPLES
        lengths = {"mean_tokens": length, "p95_tokens": length, "max_tokens": length}
        content["dataset"] = {"samples": samples} | lengths
    else:
        is_here = os.path.exists(os.path.expanduser(question.data))
        path = os.path.abspath(os.path.expanduser(question.data)) if is_here else question.data
        content["dataset"] = {"path": path}
    if question.attn is not None:
        content["attn"] = question.attn
    if question.image_max_pixels is not None:
        content["image_max_pixels"] = question.image_max_pixels
    content["stage1_profile"] = {"batch_size": 1}
    if question.serving not in (None, TRANSFORMERS):
        content["serving"] = get_engine(question.serving).name
        content["stage1_profile"] = {"concurrency": 1}
        content |= _served_form(question)
        if question.tpot is not None:
            parse_duration(question.tpot, setting="tpot")
            content["stage1_profile"]["tpot"] = question.tpot
    if limit_s is not None:
        content["stage2_profile"] = {"total_time": f"{limit_s:.0f}s"}
    if question.price_per_hour is not None:
        content["gpu_prices"] = {gpu: float(question.price_per_hour)}
    if question.prices is not None:
        content["prices"] = str(_path(question.prices))
    if question.quality is not None:
        content |= {"prefer": "quality", "quality": str(_path(question.quality))}
    if question.country is not None:
        content["country"] = find_grid(question.country).country
    return content | {"profile": "none"}


def _served_form(question: Question) -> dict[str, Any]:
    """How the plan says in which form an engine has the weights; nothing for 16 bit.

    Of an engine with files of its own types it is always one of these: nobody serves 16 bit there.
    """
    engine = get_engine(question.serving or TRANSFORMERS)
    if engine.stored_by:
        return {"serving_options": {engine.stored_by: question.serve or engine.compared_forms[-1]}}
    return {} if question.serve is None else {"serve": question.serve}


def _trainer(question: Question, gpu: GpuSpec, models: Sequence[str]) -> str | None:
    """Who trains; None is the usual one of a plan.

    Raises:
        ConfigError: an unknown trainer.
    """
    if question.trainer is not None:
        return get_trainer(question.trainer).name
    if _first_rows(question) == TRANSCRIPTS:
        return None
    with suppress(ConfigError):  # the plan says it of a model
        tasks = (load_model(name).task for name in models)
        return RECIPE if suits_recipe(tasks, on_cpu=gpu.is_cpu) else None
    return None


def _recipes(
    run: RunConfig, plan: Mapping[str, Any], calibration_dir: Path | None
) -> tuple[Prediction, ...]:
    """`run` under its trainer and under the other usual one; none where it has another."""
    other = {RECIPE: USUAL_TRAINER, USUAL_TRAINER: RECIPE}.get(plan.get("trainer", ""))
    if other is None:
        return ()
    runs = [run, under_trainer(run, other)]
    predictions = estimates.estimate(runs, [plan["gpu"]], calibration_dir=calibration_dir)
    return () if predictions.refused else tuple(predictions)


def _looked_at(question: Question, number: int) -> str:
    if question.models:
        return ""
    if _models_that_read(question):
        return f"looked at: the {number} known models that read such rows"
    num_known = len(list_models())
    return (
        f"looked at: {number} widely used models of {num_known} known, not all; --models names "
        "others ('whichlora models' lists them)"
    )


def _models_that_read(question: Question) -> tuple[str, ...]:
    """The known models that read images, or sound, where the rows have some; else none.

    Raises:
        DataFileError: the first row can't be read.
    """
    rows = _first_rows(question)
    if rows is None or not rows.has_processor:
        return ()
    specs = (find_model(model.hub_id) for model in list_models())
    towers = {model.name: model.tower for model in specs if model is not None}
    if rows == TRANSCRIPTS:
        return tuple(name for name, tower in towers.items() if tower and tower.hears)
    return tuple(name for name, tower in towers.items() if read_by(tower) == rows.media)


def _first_rows(question: Question) -> DataFormat | None:
    """What the first row of the data is made of; None where there is none here.

    Raises:
        DataFileError: it can't be read.
    """
    if question.data is None or not os.path.isfile(os.path.expanduser(question.data)):
        return None
    return first_format(os.path.abspath(os.path.expanduser(question.data)))


def save_plan(recommendation: Recommendation, path: Path) -> None:
    """Write the plan for `whichlora run`.

    Raises:
        DataFileError: the file can't be written, or is one that WhichLoRA did not write.
    """
    comment = "the plan of `whichlora recommend`; `profile: frontier` measures on this machine"
    write_document(path, recommendation.plan, comment=comment)


def _gpu(question: Question) -> tuple[str, GpuSpec]:
    """The GPU, and how a plan names it.

    Raises:
        ConfigError: an unknown name or engine, or no GPU here where none is named.
    """
    if question.serving is not None:
        get_engine(question.serving)
    spec = find_target(question.gpu or "auto")
    if question.gpu is None and spec.is_cpu:
        raise ConfigError(
            "gpu: is left out, and this machine has no GPU; name one, such as 4090 "
            "('whichlora gpus' lists them), or cpu"
        )
    named = spec.called if spec.is_timed or question.gpu is None else question.gpu
    return named, spec


def _with_menu(recommendation: Recommendation, calibration_dir: Path | None) -> Recommendation:
    """What each other choice would save of the candidate that comes closest, and who has room.

    Nothing where it fits: then a limit of time is missed, or one of serving.
    """
    answer = recommendation.answer
    candidate = closest(answer.finetune) or closest(answer.inference)
    if candidate is None:
        return recommendation
    gpu, run = recommendation.plan["gpu"], candidate.run
    if run.phase == "inference":
        run = _smallest_training(answer, run.model, calibration_dir)
    nearest = estimates.explain(run, gpu, calibration_dir=calibration_dir)
    if nearest.prediction.verdict == "fits":
        return recommendation
    return replace(
        recommendation,
        nearest=nearest,
        longest=_longest(run, gpu, calibration_dir),
        smallest_gpu=_smallest_card(run, calibration_dir),
    )


def _smallest_card(run: RunConfig, calibration_dir: Path | None) -> Placement | None:
    """The smallest accelerator that `run` surely fits on, with a price if one of these has it."""
    prices = load_rates().prices
    cards = sorted(list_gpus(), key=lambda gpu: (gpu.key not in prices, gpu.memory_bytes))
    for gpu in cards:
        if run.parallel.is_one_device and _surely_fails(run, gpu.key):
            continue
        try:
            (placement,) = estimates.where(run, [gpu.key], calibration_dir=calibration_dir)
        except ConfigError:
            continue  # the card can't run it
        if placement.prediction and placement.prediction.verdict == "fits":
            return placement
    return None


def _surely_fails(run: RunConfig, gpu: str) -> bool:
    """Whether `gpu` lacks the memory, or can't run it at all."""
    try:
        return estimates.surely_fails(run, gpu)
    except ConfigError:
        return True


def _longest(run: RunConfig, gpu: str, calibration_dir: Path | None) -> Prediction | None:
    """`run` with the longest sequences that fit, where they are shorter."""
    (prediction,) = estimates.estimate(
        [run], [gpu], calibration_dir=calibration_dir, maximise="seq_len"
    )
    shorter = prediction.verdict == "fits" and prediction.run.seq_len < run.seq_len
    return prediction if shorter else None


def _smallest_training(answer: Answer, model: str, calibration_dir: Path | None) -> RunConfig:
    """The fine-tuning of `model` that takes the least memory, of a model that is not served."""
    plan = answer.plan
    runs = [
        replace(with_method(plan.finetune, method), model=model, parallel=spread, batch_size=1)
        for method in plan.methods
        for spread in plan.spreads[:1]
    ]
    predictions = estimates.estimate(runs, [plan.gpu], calibration_dir=calibration_dir)
    return min(predictions, key=lambda each: each.memory.device_used_bytes).run
