"""Predictions by name: estimate, explain and where, from model and GPU names to answers."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from whichlora import families
from whichlora.calibration.load import load_calibration, stale_note
from whichlora.errors import ConfigError
from whichlora.methods import with_defaults
from whichlora.predict import explain as explanation
from whichlora.predict.alike import Predictor, SharedLedgers
from whichlora.predict.assumed import assumed
from whichlora.predict.coefficients import Calibration
from whichlora.predict.defaults import with_open_settings, with_precision
from whichlora.predict.explain import Explanation
from whichlora.predict.images import with_lengths
from whichlora.predict.judged import least_training_bytes
from whichlora.predict.largest import (
    Placement,
    Size,
    largest_served,
    largest_that_fits,
    place,
    smallest_first,
    with_size,
)
from whichlora.predict.lengths import BeyondPositionsError, within_positions
from whichlora.predict.life import Life, life_of
from whichlora.predict.notes import held_inputs_note
from whichlora.predict.parallel_choice import best_of_judged, best_spread
from whichlora.predict.predict import finished, predict
from whichlora.predict.rank_time import over_nodes
from whichlora.predict.resolve import resolve
from whichlora.predict.running_cost import running_cost
from whichlora.predict.serving import bounded
from whichlora.predict.unequal_cards import Card, over_cards, predict_on_cards, serve_on_cards
from whichlora.predict.unknown_storage import with_unknown_storage
from whichlora.predict.ways_out import ways_out
from whichlora.predict.words import FITS, describe, headline
from whichlora.serving.base import Start
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.costs import RunningCost
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.life import LifeConfig
from whichlora.spec.parallel import AUTO
from whichlora.spec.results import Answers, FileKey, Prediction, Refused, TracedPeak
from whichlora.spec.run import ALL_LINEAR, Engine, RunConfig
from whichlora.spec.targets import resolve_targets
from whichlora.spec.words import unknown
from whichlora.store import hub, models
from whichlora.store.costs import Rates, load_rates
from whichlora.store.gpus import each_once, find_cards, find_target, list_gpus, require_one_limit
from whichlora.store.hub import load_model, load_model_of, with_drafter
from whichlora.units import format_bytes
from whichlora.workflow.combinations import by_number, combinations, with_cards
from whichlora.workflow.evaluation import at_least, with_evaluation, with_uncounted
from whichlora.workflow.whole_training import (
    NO_FILES,
    Data,
    FromFiles,
    OlderReleases,
    with_training,
)

_OTHER_ANSWER = 0.05  # of the bytes, from which a note names what other releases take
MOST_COMPARED = 12  # predictions beside which those of the trainers' own defaults are made


def estimate(
    runs: Iterable[RunConfig | Refused],
    gpus: Sequence[str] = ("auto",),
    *,
    calibration_dir: Path | None = None,
    engine: Engine = "auto",
    trace_layers: str = "2,4",
    maximise: Size | None = None,
    notes: tuple[str, ...] = (),
    rates: Rates | None = None,
    data: Data | None = None,
    eval_batch_size: int = 0,
    stated: Collection[str] | None = None,
) -> Answers[Prediction]:
    """Peak memory and time of every run on every accelerator. Nothing is run or downloaded.

    A combination whose settings exclude each other, or that the model or the accelerator lacks,
    is among the `refused` of the answers.

    Args:
        maximise: "batch_size", "seq_len" or, of an engine, "context", which becomes the largest
            that fits each accelerator, or 1 where nothing does; a note says which.
        notes: of every run, beside those of its prediction.
        rates: prices and electricity; None are those of the tables.
        engine: "ledger" adds up what lives; "trace" runs the real code on tensors without storage,
            in seconds per run; "auto" is "trace" for models that the ledger does not know.
        data: what is learned, all of it; None predicts one step alone.
        eval_batch_size: rows that evaluations read at once, which the verdict counts.
        stated: names of settings that the user gave; of others the answers say what is assumed.
        trace_layers: "2,4" stretches the trace of four layers to all, "all" traces all.

    Raises:
        ConfigError: an unknown model or accelerator, or nothing is left of the combinations.
    """
    _check_asked(gpus, engine, maximise, data)
    targets = _targets(gpus, calibration_dir)
    stale = {name: _stale_notes(cards, calibration_dir) for name, cards in targets.items()}
    rates = rates or load_rates()
    models: dict[str, ModelSpec] = {}
    predictor = Predictor()
    predictions: list[Prediction] = []
    asked, refused = _apart(runs)
    stated = _with_length(stated, data, maximise)
    advised = partial(_with_assumed, predictor, stated, len(asked) * len(targets))
    for run in asked:
        if run.model not in models:
            models[run.model] = _load(run.model, engine)
        model = with_drafter(models[run.model], run.serving, run.serving_options)
        is_traced = _is_traced(model, engine, maximise)
        run = with_lengths(model, replace(run, model=model.name))
        try:
            as_requested, of_length = _sized(run, model, data, maximise)
        except BeyondPositionsError as error:
            refused.append(_refused(run, "", error))
            continue
        traces: dict[tuple[str, str, str | None], TracedPeak] = {}  # by what chooses the kernels
        for name, cards in targets.items():
            gpu, calibration = cards[0].gpu, cards[0].calibration
            run, of_nodes = on_device(model, as_requested, gpu, calibration)
            try:
                if len(cards) > 1:
                    run = over_cards(with_open_settings(model, as_requested), name, cards)
                traced = _traced_once(traces, model, run, gpu, trace_layers) if is_traced else None
                if len(cards) > 1:
                    prediction = _on_unequal(model, run, name, cards, maximise, predictor)
                else:
                    prediction = _estimate(
                        model, run, gpu, calibration, traced, maximise, predictor
                    )
            except ConfigError as error:
                refused.append(_refused(run, name, error))
                continue
            if len(cards) == 1 and not is_traced:
                prediction = _whole(prediction, model, cards[0], data, eval_batch_size)
                prediction = advised(prediction, model, cards[0], as_requested)
            else:
                prediction = with_uncounted(prediction, eval_batch_size)
            said = (*notes, *of_nodes, *of_length)
            predictions.append(_finished(prediction, cards, said, rates, stale[name]))
    return Answers(predictions, refused)


def _with_length(
    stated: Collection[str] | None, data: Data | None, maximise: Size | None
) -> Collection[str] | None:
    """`stated`, and the length where the data or a search says it."""
    has_length = (data is not None and bool(data.path)) or maximise == "seq_len"
    return stated if stated is None or not has_length else {*stated, "seq_len"}


def _apart(runs: Iterable[RunConfig | Refused]) -> tuple[list[RunConfig], list[Refused]]:
    """Runs, and combinations that are none."""
    listed = list(runs)
    return (
        [run for run in listed if not isinstance(run, Refused)],
        [run for run in listed if isinstance(run, Refused)],
    )


def _with_assumed(
    predictor: Predictor,
    stated: Collection[str] | None,
    num_answers: int,
    prediction: Prediction,
    model: ModelSpec,
    card: Card,
    asked: RunConfig,
) -> Prediction:
    """With what was not stated, and a note on inputs that a checkpoint can't drop.

    Args:
        num_answers: of many nobody compares each with its trainer's own defaults.
    """

    def used_bytes(run: RunConfig) -> int:
        judged = predictor.judge(model, run, card.gpu, card.calibration)
        return judged.memory.device_used_bytes

    notes = held_inputs_note(prediction, used_bytes)
    prediction = replace(prediction, notes=(*notes, *prediction.notes))
    if stated is None:
        return prediction
    told = assumed(
        model, asked, prediction, stated, used_bytes if num_answers <= MOST_COMPARED else None
    )
    return replace(prediction, assumed=told)


def _whole(
    prediction: Prediction, model: ModelSpec, card: Card, data: Data | None, eval_batch_size: int
) -> Prediction:
    """`prediction` of a step with what is known beside it: its data, storage and evaluations."""
    if data is not None:
        prediction = with_training(prediction, data, model, card.gpu, card.calibration)
    prediction = with_unknown_storage(prediction, model)
    return with_evaluation(prediction, model, card.gpu, card.calibration, eval_batch_size)


def _is_traced(model: ModelSpec, engine: Engine, maximise: Size | None) -> bool:
    """Whether the real code tells the memory. Raises: ConfigError: its largest size is asked."""
    is_traced = engine == "trace" or _is_unknown(model)
    if maximise and is_traced:
        raise ConfigError(
            f"{maximise}: max needs a model that the formulas know, got {model.name}; "
            "give values, which are traced"
        )
    return is_traced


def _sized(
    run: RunConfig, model: ModelSpec, data: Data | None, maximise: Size | None
) -> tuple[RunConfig, tuple[str, ...]]:
    """`run` at the length of the data, or at one that the model looks up, and a note.

    Raises:
        BeyondPositionsError: a stated length that it does not.
    """
    if data is None:
        return within_positions(model, run)
    return data.sized(run, model, largest_batch=maximise == "batch_size"), ()


def _check_asked(
    gpus: Sequence[str], engine: Engine, maximise: Size | None, data: Data | None
) -> None:
    """Refuse what no run can be asked for.

    Raises:
        ConfigError: one line.
    """
    if engine not in get_args(Engine):
        raise ConfigError(unknown("engine", engine, get_args(Engine)))
    if maximise and engine == "trace":
        raise ConfigError(f"{maximise}: max needs --engine ledger; a trace takes seconds per value")
    if maximise == "seq_len" and data is not None:
        raise ConfigError("seq_len: max and data exclude each other; the data has its lengths")
    if "all" in gpus:
        raise ConfigError("gpu: 'all' is no accelerator; 'whichlora where' judges every one")


def on_device(
    model: ModelSpec, run: RunConfig, gpu: GpuSpec, calibration: Calibration
) -> tuple[RunConfig, tuple[str, ...]]:
    """`run` in a precision that `gpu` has, over as many nodes as its GPUs need, and a note."""
    run = with_open_settings(model, run)
    config, note = over_nodes(run.parallel, gpu, calibration.machines)
    return replace(with_precision(run, gpu), parallel=config), (note,) if note else ()


def _traced_once(
    traces: dict[tuple[str, str, str | None], TracedPeak],
    model: ModelSpec,
    run: RunConfig,
    gpu: GpuSpec,
    trace_layers: str,
) -> TracedPeak:
    """The trace of `run`, which is among `traces` where another card has the same kernels."""
    _check_traceable(run, model)
    device = run.precision, gpu.kind, gpu.compute_capability
    if device not in traces:
        traces[device] = _trace(model, run, gpu, trace_layers)
    return traces[device]


def estimate_grid(
    settings: Mapping[str, Sequence[Any]],
    gpus: Sequence[str] = ("auto",),
    *,
    files: FromFiles = NO_FILES,
    **options: Any,
) -> Answers[Prediction]:
    """`estimate` of every combination of `settings`; a target may state its number: "2x3090".

    Args:
        files: what the user's files say beside `settings`.
        options: of `estimate`.

    Raises:
        ConfigError: as `estimate`, or settings that exclude each other.
    """
    options |= {"notes": files.notes, "eval_batch_size": files.eval_batch_size}
    of_numbers = [
        estimate(combinations(with_cards(grid, types)), types, **options)
        for grid, types in by_number(settings, gpus)
    ]
    predictions = [prediction for answers in of_numbers for prediction in answers]
    predictions = _with_ways_out(
        predictions, files.keys, options.get("rates"), options.get("calibration_dir")
    )
    if files.older is not None:
        predictions = _beside_older(predictions, files.older, gpus, options)
    return Answers(
        map(at_least, predictions) if files.is_lower_bound else predictions,
        (refused for answers in of_numbers for refused in answers.refused),
    )


def _beside_older(
    predictions: list[Prediction],
    older: OlderReleases,
    gpus: Sequence[str],
    options: Mapping[str, Any],
) -> list[Prediction]:
    """`predictions`, and what `older` makes of each, where that is another answer."""
    others: Sequence[Prediction] = ()
    with contextlib.suppress(ConfigError):
        others = [
            other
            for grid, types in by_number(older.settings, gpus)
            for other in estimate(
                combinations(with_cards(grid, types)), types, **{**options, "notes": ()}
            )
        ]
    if len(others) != len(predictions):
        return predictions
    return [
        replace(each, notes=(*each.notes, *_older_note(each, other, older)))
        for each, other in zip(predictions, others, strict=True)
    ]


def _older_note(newer: Prediction, other: Prediction, older: OlderReleases) -> tuple[str, ...]:
    before, after = (each.memory.device_used_bytes for each in (other, newer))
    if other.verdict == newer.verdict and abs(before - after) < _OTHER_ANSWER * after:
        return ()
    return (
        f"{older.path}: older releases take it, too: with those of {older.month} (--libraries "
        f"{older.month}) {format_bytes(before)}, which {FITS[other.verdict]}",
    )


def _with_ways_out(
    predictions: list[Prediction],
    keys: Mapping[str, FileKey],
    rates: Rates | None,
    calibration_dir: Path | None,
) -> list[Prediction]:
    """`predictions`; where none surely fits, the one that lacks least says what makes it fit.

    Another card is one that the price table has: neither a laptop's nor a small computer's.

    Args:
        keys: of the user's file, by the setting that each alone says.
    """

    def lack(prediction: Prediction) -> float:
        return prediction.memory.device_used_bytes / prediction.usable_bytes

    known = [
        prediction
        for prediction in predictions
        if prediction.run.phase == "finetune" and "+" not in prediction.gpu
    ]
    if not known or any(prediction.verdict == "fits" for prediction in predictions):
        return predictions
    least = min(known, key=lack)
    model, gpu = load_model_of(least.run), find_target(least.gpu)
    rates = rates or load_rates()
    for_hire = [card for card in list_gpus() if card.key in rates.prices]
    ways = ways_out(
        model, least, gpu, lambda card: load_calibration(card, calibration_dir), for_hire
    )
    ways = tuple(way.in_file(keys) for way in ways)
    return [replace(each, ways_out=ways) if each is least else each for each in predictions]


def surely_fails(run: RunConfig, gpu: str) -> bool:
    """Whether a fine-tuning lacks memory on one `gpu` by the least that it needs.

    Kind: lower bound, a hundredth of the work of a prediction.

    Raises:
        ConfigError: an unknown name, or settings that exclude each other.
    """
    device, model = find_target(gpu), load_model_of(run)
    run = with_precision(with_open_settings(model, replace(run, model=model.name)), device)
    least = least_training_bytes(
        resolve(model, run, device),
        load_calibration(device),
        batch_size=run.batch_size,
        seq_len=run.seq_len,
        least_r=run.r,
    )
    return bool(least > device.memory_bytes)


def document(answers: Answers[Prediction]) -> dict[str, Any]:
    """What `whichlora estimate --json` prints, but for the version of its form."""
    return {
        "predictions": [prediction.to_dict() for prediction in answers],
        "refused": [combination.to_dict() for combination in answers.refused],
    }


def faults(answers: Answers[Prediction]) -> list[str]:
    """A line for each run of `answers` that does not fit, and for each that can't run.

    A serving engine that refuses the requests asked for can't run them.
    """
    failing = [headline(prediction) for prediction in answers if prediction.verdict == "fails"]
    failing += (
        f"{describe(prediction.run)} on {prediction.gpu}: {prediction.serving.refuses}"
        for prediction in answers
        if prediction.serving is not None and prediction.serving.refuses
    )
    refused = (
        f"{each.model}{f' on {each.gpu}' * bool(each.gpu)}: {each.reason}"
        for each in answers.refused
    )
    return [*failing, *refused]


def _stale_notes(cards: Sequence[Card], calibration_dir: Path | None) -> str:
    """How old the calibrations of `cards` are."""
    notes = (stale_note(card.calibration, calibration_dir) for card in cards)
    return "".join(dict.fromkeys(notes))


def _refused(run: RunConfig, gpu: str, error: ConfigError) -> Refused:
    settings = {name: value for name, value in run.chosen().items() if name != "model"}
    return Refused(model=run.model, gpu=gpu, settings=settings, reason=str(error))


def _finished(
    prediction: Prediction,
    cards: Sequence[Card],
    notes: tuple[str, ...],
    rates: Rates,
    stale: str,
) -> Prediction:
    """With notes, how old its calibration is, and its cost, where all its cards are equal."""
    return replace(
        prediction,
        basis=prediction.basis + stale,
        notes=(*notes, *prediction.notes),
        cost=_cost(prediction, cards[0].gpu, rates) if len(cards) == 1 else None,
    )


def _cost(prediction: Prediction, gpu: GpuSpec, rates: Rates) -> RunningCost | None:
    return running_cost(prediction, gpu, rates.prices.get(gpu.key, ()), rates.grid)


def _targets(names: Sequence[str], calibration_dir: Path | None) -> dict[str, tuple[Card, ...]]:
    """The cards that each of `names` means, each once; several of one where they are unequal."""
    cards = [find_cards(name) for name in names]
    require_one_limit(gpu for numbered in cards for gpu, _ in numbered)
    targets: dict[str, tuple[Card, ...]] = {}
    for numbered in cards:
        words = (f"{number}x{gpu.key}" if number > 1 else gpu.key for gpu, number in numbered)
        ends = [0, *itertools.accumulate(number for _, number in numbered)]
        targets["+".join(words)] = tuple(
            Card(
                gpu=gpu,
                calibration=load_calibration(gpu, calibration_dir),
                ranks=tuple(range(start, end)),
            )
            for (gpu, _), (start, end) in zip(numbered, itertools.pairwise(ends), strict=True)
        )
    return targets


def _on_unequal(
    model: ModelSpec,
    run: RunConfig,
    name: str,
    cards: Sequence[Card],
    maximise: Size | None,
    predictor: Predictor,
) -> Prediction:
    """One run on unequal cards.

    Raises:
        ConfigError: settings that exclude each other.
    """
    if maximise:
        raise ConfigError(f"{maximise}: max is found on equal cards; ask for the smallest alone")
    on_cards = serve_on_cards if run.phase == "inference" else predict_on_cards
    return on_cards(
        run,
        name,
        cards,
        lambda each, card: predictor.predict_over(model, each, card.gpu, card.calibration),
    )


def _estimate(
    model: ModelSpec,
    run: RunConfig,
    gpu: GpuSpec,
    calibration: Calibration,
    traced: TracedPeak | None,
    maximise: Size | None,
    predictor: Predictor,
) -> Prediction:
    """One run on one type of GPU, as large as it fits where `maximise` says so.

    Raises:
        ConfigError: settings that exclude each other.
    """
    if run.parallel.strategy == AUTO and traced is None and maximise is None:
        return best_of_judged(
            run, lambda each: predictor.judge(model, each, gpu, calibration), finished
        )
    if run.parallel.strategy == AUTO:
        return best_spread(
            run, lambda each: _estimate(model, each, gpu, calibration, traced, maximise, predictor)
        )
    if traced is not None:
        return predict(model, run, gpu, calibration, traced=traced)
    if maximise is None:
        return predictor.predict(model, run, gpu, calibration)
    if run.has_engine:
        return _most_served(model, run, gpu, calibration, maximise, predictor)
    most = largest_that_fits(model, run, gpu, calibration, maximise)
    largest = with_size(run, maximise, most.value or most.least)
    kind = "inference" if run.phase == "inference" else run.method
    note = f"{run.model.rpartition('/')[2]} {kind} on {gpu.key}: {most.note}"
    prediction = predict(model, largest, gpu, calibration)
    return replace(prediction, notes=(note, *prediction.notes))


def _most_served(
    model: ModelSpec,
    run: RunConfig,
    gpu: GpuSpec,
    calibration: Calibration,
    maximise: Size,
    predictor: Predictor,
) -> Prediction:
    """As many sequences, or as long ones, as an engine serves.

    Raises:
        ConfigError: settings that exclude each other.
    """

    def start_of(asked: RunConfig) -> Start:
        service = predictor.count(model, asked, gpu).service
        assert service is not None  # as of the first prediction, which has an engine's answer
        return service.start

    run, bound = bounded(resolve(model, run, gpu))
    first = predictor.predict(model, run, gpu, calibration)
    most, note = largest_served(first, maximise, start_of, model.max_position_embeddings)
    largest = with_size(run, maximise, max(1, most))
    prediction = predictor.predict(model, largest, gpu, calibration)
    return replace(prediction, notes=(note, *bound, *prediction.notes))


def explain(
    run: RunConfig,
    gpu: str = "auto",
    *,
    calibration_dir: Path | None = None,
    notes: tuple[str, ...] = (),
    stated: Collection[str] | None = None,
) -> Explanation:
    """The prediction of `run` taken apart, and what other choices would change.

    Args:
        notes: beside those of the prediction.
        stated: as `estimate` takes them.

    Raises:
        ConfigError: an unknown model or accelerator, or settings that exclude each other.
    """
    device = find_target(gpu)
    calibration = load_calibration(device, calibration_dir)
    model = load_model_of(run)
    asked, of_length = within_positions(model, replace(run, model=model.name))
    run, of_nodes = on_device(model, asked, device, calibration)
    if run.parallel.strategy == AUTO:
        best = best_spread(run, lambda each: predict(model, each, device, calibration))
        run = replace(run, parallel=best.run.parallel)
        explained = explanation.explain(model, run, device, calibration)
        prediction = replace(explained.prediction, notes=best.notes)
    else:
        explained = explanation.explain(model, run, device, calibration)
        prediction = explained.prediction
    prediction = with_unknown_storage(prediction, model)
    basis = prediction.basis + stale_note(calibration, calibration_dir)
    predictor = Predictor()

    def used_bytes(each: RunConfig) -> int:
        return predictor.judge(model, each, device, calibration).memory.device_used_bytes

    told = None if stated is None else assumed(model, asked, prediction, stated, used_bytes)
    prediction = replace(
        prediction,
        assumed=told,
        basis=basis,
        notes=(*notes, *of_nodes, *of_length, *prediction.notes),
        cost=_cost(prediction, device, load_rates()),
    )
    return replace(explained, prediction=prediction)


def life(
    run: RunConfig,
    gpu: str = "auto",
    settings: LifeConfig | None = None,
    *,
    calibration_dir: Path | None = None,
    notes: tuple[str, ...] = (),
) -> Life:
    """The stages of `run` from its download to its resumption, and which of them is largest.

    Args:
        notes: beside those of the stages.

    Raises:
        ConfigError: an unknown model or accelerator, or a run whose life is not known.
    """
    device = find_target(gpu)
    calibration = load_calibration(device, calibration_dir)
    model = load_model_of(run)
    run, of_length = within_positions(model, replace(run, model=model.name))
    run = with_precision(with_open_settings(model, run), device)
    lived = life_of(model, run, device, calibration, settings or LifeConfig())
    return replace(lived, notes=(*notes, *of_length, *device.notes, *lived.notes))


def where(
    run: RunConfig,
    gpus: Sequence[str] = ("all",),
    *,
    calibration_dir: Path | None = None,
    notes: tuple[str, ...] = (),
    rates: Rates | None = None,
    stated: Collection[str] | None = None,
) -> Answers[Placement]:
    """`run` on each of `gpus`, the smallest that fits first; "all" means those of the catalog.

    Args:
        notes: of every prediction, beside its own.
        stated: as `estimate` takes them; nobody compares a card with the trainer's own defaults.
        rates: as `estimate` takes them.

    Raises:
        ConfigError: an unknown model or accelerator, or settings that none of them can run.
    """
    devices = each_once(
        spec
        for name in gpus
        for spec in (list_gpus() if name.strip().lower() == "all" else (find_target(name),))
    )
    model = load_model_of(run)
    run, of_length = within_positions(model, replace(run, model=model.name))
    rates = rates or load_rates()
    shared, placements = SharedLedgers(), []
    for gpu in devices:
        calibration = load_calibration(gpu, calibration_dir)
        asked, of_nodes = on_device(model, run, gpu, calibration)
        placement = place(model, asked, gpu, calibration, shared)
        if placement.prediction is not None:
            wider = with_unknown_storage(placement.prediction, model)
            if stated is not None:
                wider = replace(wider, assumed=assumed(model, run, wider, stated, None))
            placement = replace(placement, prediction=wider)
        placements.append(_completed(placement, (*notes, *of_nodes, *of_length), rates))
    if all(placement.prediction is None for placement in placements):
        raise ConfigError(placements[0].refusal)
    return Answers(smallest_first(placements))


def _completed(placement: Placement, notes: tuple[str, ...], rates: Rates) -> Placement:
    """With `notes` and what the run costs there."""
    prediction = placement.prediction
    if prediction is None:
        return placement
    cost = _cost(prediction, placement.gpu, rates)
    prediction = replace(prediction, notes=(*notes, *prediction.notes), cost=cost)
    return replace(placement, prediction=prediction)


def _load(name: str, engine: Engine) -> ModelSpec:
    """The model called `name`; one of an unknown family as a Llama of its sizes, and saying so.

    Raises:
        ConfigError: no such model, a config whose sizes go by other names, or no libraries that
            trace it.
    """
    try:
        return load_model(name)
    except ConfigError as fault:
        if engine == "ledger" or models.find_model(name) is not None:
            raise
        try:
            config = hub.load_config(name)
        except ConfigError:  # which knows less of the name, such as that it means several models
            raise fault from None
    if config.get("model_type") in families.known_types():
        return load_model(name)  # it has another fault
    from whichlora.tracer.client import require_tracing

    require_tracing(
        f"{name}: model_type {config.get('model_type')!r} is not known; tracing its real code"
    )
    as_llama = families.build(config | {"model_type": "llama"}, name=name)
    note = (
        f"model_type {config.get('model_type')!r} is not known to the ledger: memory is traced, "
        "time is that of a Llama of the same sizes"
    )
    return replace(as_llama, config=config, notes=(*as_llama.notes, note))


def _is_unknown(model: ModelSpec) -> bool:
    """Whether `_load` took it for a Llama."""
    return model.config.get("model_type") not in families.known_types()


def _check_traceable(run: RunConfig, model: ModelSpec) -> None:
    """Refuse what a trace can't tell; the formulas can, of a model that they know."""
    lacking = ""
    if _is_unknown(model):
        model_type = model.config.get("model_type")
        lacking = f"predicted by formulas, which do not know model_type {model_type!r}"
    if run.phase == "inference" and run.has_engine:
        fault = f"a trace is of transformers' generate, got {run.serving}; use --engine ledger"
        if lacking:
            fault = f"{run.serving} is {lacking}; leave it out: generate is traced"
        raise ConfigError(f"serving: {fault}")
    if not run.parallel.is_one_device:
        fault = f"a trace is of one GPU, got {run.parallel.gpus}; use --engine ledger"
        if lacking:
            fault = f"{run.parallel.gpus} are {lacking}; give 1, of which it is traced"
        raise ConfigError(f"gpus: {fault}")


def _trace(model: ModelSpec, run: RunConfig, gpu: GpuSpec, layers: str) -> TracedPeak:
    from whichlora.tracer.client import trace_peaks

    targets: tuple[str, ...] = ()
    if run.phase == "finetune" or with_defaults(run).serve == "as-trained":
        targets = resolve_targets(model, run.target_modules)
    return trace_peaks(
        run,
        model_config=model.config,
        target_modules=ALL_LINEAR if run.target_modules == (ALL_LINEAR,) else targets,
        device_kind=gpu.kind,
        compute_capability=gpu.compute_capability,
        layers=layers,
    )
