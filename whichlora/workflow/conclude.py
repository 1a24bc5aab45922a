"""What a search has measured so far → the answer as it stands."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from whichlora.calibration.load import refit
from whichlora.errors import ConfigError
from whichlora.methods import under_trainer
from whichlora.predict.counted import host_of
from whichlora.predict.host_memory import memory_of_node, open_note
from whichlora.predict.judgement import TIME_CONFIDENCE
from whichlora.predict.notes import UNVERIFIED
from whichlora.predict.parallel_choice import is_tried_first, not_in_the_trainer
from whichlora.predict.predict import MEMORY_ONLY
from whichlora.predict.repeated_times import Repeatability
from whichlora.predict.running_cost import running_cost
from whichlora.predict.words import describe
from whichlora.search.acquisition import Decision
from whichlora.search.feasibility import (
    LIKELY,
    Candidate,
    accepted,
    best_of_models,
    bolder_than,
    chance_to_serve,
    kept_models,
    least_chance,
    predicted_winner,
)
from whichlora.search.gpu_counts import GpuCounts, compare_counts
from whichlora.search.loop import SearchLoop
from whichlora.search.pareto import pareto
from whichlora.serving import get_engine
from whichlora.spec.costs import RunningCost
from whichlora.spec.numeric import TWO_SIDED_Z
from whichlora.spec.parallel import AUTO
from whichlora.spec.results import ServingPrediction
from whichlora.spec.run import USUAL_TRAINER, RunConfig
from whichlora.trainers import RECIPE, suits_recipe
from whichlora.units import format_bytes
from whichlora.workflow.answer import Answer, Compared, Ending, Search
from whichlora.workflow.session import Session

MUCH_LESS = 0.9  # of the memory, from which on another trainer is worth a line


def conclude(
    session: Session, search_loop: SearchLoop, search: Search, position: int | None
) -> Answer:
    """The answer as things stand; the stored fit takes in what was measured.

    Args:
        position: of the winner among the candidates of `search_loop`, where one was measured.
    """
    plan = session.plan
    candidates = session.candidates(search_loop)
    inference = [
        *session.served,
        *(candidate for candidate in candidates if candidate.run.phase == "inference"),
    ]
    served_models = kept_models(inference)
    serves = chance_to_serve(inference)
    candidates = [
        candidate
        if candidate.run.phase == "inference"
        else replace(candidate, chance_to_serve=serves.get(candidate.form, 0.0))
        for candidate in candidates
    ]
    training = (candidate for candidate in candidates if candidate.run.phase == "finetune")
    finetune = [candidate for candidate in training if candidate.chance_to_serve >= LIKELY]
    best = candidates[position] if position is not None else None
    may_fit: list[Candidate] = []
    least = least_chance(plan)
    if plan.profile == "none":
        finetune = _as_alone(session, finetune, least)
        best = predicted_winner(finetune, least)
        may_fit = bolder_than(best, finetune, least)
    if session.compared:
        session.calibration = refit(session.gpu, plan.calibration_dir)
    shown = best or min(
        finetune,
        key=lambda candidate: (-candidate.chance_of_both_stages, candidate.rank),
        default=None,
    )
    model = plan.models[0] if shown is None else shown.run.model
    serving = _served(session, best)
    life = None if best is None else session.life(best.run)
    return Answer(
        plan=plan,
        gpu=session.gpu,
        basis=session.calibration.basis(
            memory_runs=session.calibration.memory.num_runs,
            time_runs=session.calibration.time["finetune"].num_runs,
            passes=_passes(session, shown),
        )
        + ("" if session.gpu.is_timed else MEMORY_ONLY),
        inference=inference,
        finetune=finetune,
        kept=served_models,
        winner=best,
        may_fit=may_fit,
        serving=serving,
        waits=_waits(session, serving),
        front=_front(finetune, least),
        search=search,
        compared=_compared(session),
        tokens=_describe_tokens(session, best, model),
        cautions=[
            *_cautions(session, best, model),
            *_under_recipe(session, shown, best),
            *(life.faults() if life is not None else ()),
            *_of_several_gpus(session, best, candidates),
        ],
        refused=list(session.space.refused.values()),
        counts=_counts(session, best, finetune, least),
        side_by_side=[] if shown is None else session.side_by_side(search_loop, shown.run),
        cost=_cost(session, best),
        besides=None if best is None else session.besides(best.run),
        life=life,
        repeatability=_repeatability(session, best),
        dataset=_dataset_facts(session, model),
        calibration=session.calibration,
    )


def _compared(session: Session) -> list[Compared]:
    """Each measurement beside what was predicted without runs, before it, and now."""
    return [
        Compared(
            measurement=measurement,
            cold=session.predict(profiled, session.cold),
            before=before,
            after=session.predict(profiled),
        )
        for measurement, profiled, before in session.compared
    ]


def _passes(session: Session, shown: Candidate | None) -> dict[str, Mapping[str, float]]:
    """What the time of the answer is made of, by phase."""
    if not session.gpu.is_timed:
        return {}
    return {"finetune": {} if shown is None else shown.prediction.time.breakdown}


def _cost(session: Session, best: Candidate | None) -> RunningCost | None:
    if best is None:
        return None
    plan, gpu = session.plan, session.gpu
    offers = plan.objective.prices.get(gpu.key, ())
    return running_cost(best.prediction, gpu, offers, plan.grid)


def _dataset_facts(session: Session, model: str) -> dict[str, float]:
    """What total times are for, in tokens of `model`."""
    lengths = session.data.lengths(model)
    return {
        "num_sequences": lengths.num_sequences(),
        "tokens_per_epoch": lengths.total_tokens(),
        "longest": lengths.longest(),
        "epochs": session.plan.epochs,
    }


def _served(session: Session, best: Candidate | None) -> Candidate | None:
    """Stage 1 of the winner where an engine answers: the likeliest shape of its form.

    It is on the fewest GPUs with which both stages meet the limits.
    """
    if best is None:
        return None
    shapes = [each for each in session.served if each.form == best.form]
    meeting = [each for each in shapes if best.chance * each.chance >= least_chance(session.plan)]
    return min(
        meeting or shapes,
        key=lambda each: (get_engine(each.run.serving).num_gpus(each.run), -each.chance),
        default=None,
    )


def _waits(session: Session, serving: Candidate | None) -> list[ServingPrediction]:
    """What one user waits, two, four and so on, up to as many as run at once."""
    if serving is None or serving.prediction.serving is None:
        return []
    most = serving.prediction.serving.max_running
    waits = []
    for number in [*(2**power for power in range(most.bit_length()) if 2**power < most), most]:
        run = replace(serving.run, batch_size=number, request_rate=None)
        answered = session.predict(run).serving
        if answered is not None and answered.time is not None:
            waits.append(answered)
    return waits


def _as_alone(session: Session, finetune: list[Candidate], least: float) -> list[Candidate]:
    """The candidates, of which the best of each model is as it is predicted alone."""
    return _replayed(session, finetune, lambda found: best_of_models(found, least).values())


def _replayed(
    session: Session,
    finetune: list[Candidate],
    shown: Callable[[list[Candidate]], Iterable[Candidate]],
) -> list[Candidate]:
    """The candidates, of which those that `shown` picks are as they are predicted alone.

    Of a large plan few are replayed. Where one no longer meets the limits when it is, the next one
    is looked at.
    """
    replayed: set[RunConfig] = set()
    while session.is_large:
        anew = {
            best.run: replace(session.replay(best.run), chance_to_serve=best.chance_to_serve)
            for best in shown(finetune)
            if best.run not in replayed
        }
        if not anew:
            break
        replayed |= anew.keys()
        finetune = [anew.get(candidate.run, candidate) for candidate in finetune]
    return finetune


def _counts(
    session: Session, best: Candidate | None, finetune: Sequence[Candidate], least: float
) -> GpuCounts | None:
    """The winner's model on each number of GPUs, where the plan asks for several."""
    counts = {config.gpus for config in session.plan.spreads}
    if best is None or len(counts) < 2:
        return None
    compared = partial(
        compare_counts,
        model=best.run.model,
        counts=sorted(counts),
        least=least,
        offers=session.plan.objective.prices.get(session.gpu.key, ()),
    )

    def shown(candidates: list[Candidate]) -> Iterable[Candidate]:
        found = compared(candidates)
        return () if found is None else found.candidates

    return compared(_replayed(session, list(finetune), shown))


def _repeatability(session: Session, best: Candidate | None) -> Repeatability | None:
    if best is None or best.measurement is None or best.measurement.outcome != "ok":
        return None
    return session.repeatability(best.run, best.measurement)


def summary(
    search_loop: SearchLoop,
    decision: Decision,
    stopped_by: Ending,
) -> Search:
    """How sure `decision` is, and what it cost."""
    return Search(
        confidence=decision.confidence,
        stopped_by=stopped_by,
        runs=search_loop.spent.runs,
        device_s=search_loop.spent.device_s,
        chance_to_win={
            run: chance
            for run, chance in zip(search_loop.runs, decision.chance_to_win.tolist(), strict=True)
            if chance > 0
        },
    )


def _describe_tokens(session: Session, best: Candidate | None, model: str) -> str:
    """The lengths that `model` sees, and what the winner's batches make of them."""
    lengths = session.data.lengths(model)
    tokens = f"{lengths.describe()} (for {model})"
    if best is not None:
        load = session.workload(best.run)
        tokens += (
            f"; {load.num_steps} steps over {load.padded_tokens} tokens, "
            f"{100 * load.padding_fraction:.1f} % of them padding ({load.collator}), longest batch "
            f"{best.run.batch_size} x {load.longest}"
        )
        if load.deviation:
            reach = math.exp(TWO_SIDED_Z[TIME_CONFIDENCE] * load.deviation)
            tokens += (
                f" at most; with other lengths {1 / reach:.2f} to {reach:.2f} times the tokens"
            )
    tokens += f"; lengths: {lengths.method}"
    if rows := session.data.dataset.describe():
        tokens += f"; rows: {rows}"
    methods = [session.data.lengths(name).method for name in session.plan.models if name != model]
    if guessed := sum(method.startswith("estimated") for method in methods):
        tokens += f"; estimated for {guessed} of the other models, too"
    return tokens


def _cautions(session: Session, best: Candidate | None, model: str) -> list[str]:
    """What must be known of the data of `model` and of the winner before either is acted on."""
    cautions = list(session.data.cautions(model))
    if best is not None:
        cautions += _merged_instead(session, best)
        of_model = session.models[model].notes
        notes = (note for note in best.prediction.notes if note not in of_model)
        cautions += [note for note in notes if not note.startswith(UNVERIFIED)]
    return cautions


def _under_recipe(session: Session, shown: Candidate | None, best: Candidate | None) -> list[str]:
    """What TRL's recipe would take, where the plan names no trainer and it takes less."""
    plan = session.plan
    if shown is None or "trainer" in plan.raw:
        return []
    run, task = shown.run, session.models[shown.run.model].task
    is_for_texts = suits_recipe([task], on_cpu=session.gpu.is_cpu)
    is_for_texts = is_for_texts and not (run.task or run.audios)
    if run.phase != "finetune" or run.trainer != USUAL_TRAINER or not is_for_texts:
        return []
    try:
        used = session.predict(under_trainer(run, RECIPE)).memory.device_used_bytes
    except ConfigError:
        return []  # a setting of the plan that it lacks
    plain = shown.prediction.memory.device_used_bytes
    if used > MUCH_LESS * plain:
        return []
    return [
        f"with `trainer: {RECIPE}` {'it' if shown is best else describe(run)} takes "
        f"{format_bytes(used)} in place of {format_bytes(plain)}; more may fit"
    ]


def _merged_instead(session: Session, best: Candidate) -> list[str]:
    """Why the winner is judged merged, where its method is served unmerged elsewhere."""
    if session.plan.serve is not None:
        return []
    refusal = session.space.why_merged(session.space.asked_form(best.run))
    return [f"judged merged: {refusal.removeprefix('serving: ')}"] if refusal else []


def _of_several_gpus(
    session: Session, best: Candidate | None, candidates: Sequence[Candidate]
) -> list[str]:
    """What a plan over several GPUs leaves open: how the winner is served, and the global batch."""
    if not session.plan.is_spread:
        return []
    lines = []
    alone = sum(run.parallel.is_one_device for _, run, _ in session.compared)
    if alone:
        runs = "1 run" if alone == 1 else f"{alone} runs"
        lines.append(
            f"profiled on one GPU ({runs}), which corrects what each of several computes; what "
            "they hold and send is predicted"
        )
    if with_ranks := len(session.compared) - alone:
        runs = "1 candidate" if with_ranks == 1 else f"{with_ranks} candidates"
        lines.append(f"profiled with all ranks ({runs}); times of the others are predicted")
    forms = [each for each in candidates if best is not None and each.form == best.form]
    serving = [each for each in forms if each.run.phase == "inference"]
    smallest = min(serving, key=lambda each: each.memory_bytes.value, default=None)
    if smallest and smallest.memory_bytes.value > smallest.prediction.usable_bytes:
        lines.append(
            f"serving {smallest.run.model} takes {format_bytes(smallest.memory_bytes.value)}, "
            "which is more than one GPU has; how several serve it is not predicted, and its time "
            "per token is that of one"
        )
    if best is not None:
        job = session.job(best.run)
        node = memory_of_node(
            best.run.parallel, session.calibration.machines, session.calibration.this_host_bytes
        )
        lines += filter(None, [open_note(host_of(job), node)])
    training = (each.run for each in candidates if each.run.phase == "finetune")
    sizes = {session.job(run).micro_batches * run.batch_size for run in training}
    asked = any(config.global_batch_size for config in session.plan.spreads)
    if len(sizes) > 1 and not asked:
        lines.append(
            f"an optimizer step is over {min(sizes)} to {max(sizes)} sequences; set "
            "global_batch_size to compare candidates that learn alike"
        )
    asked_auto = any(config.strategy == AUTO for config in session.plan.spreads)
    if asked_auto and (best is None or not is_tried_first(best.run.parallel)):
        lines.append(
            f"parallel auto compares what train.py can state; {', '.join(not_in_the_trainer())} "
            "are not among it: estimate compares them, and parallel names them"
        )
    return lines


def _front(candidates: Sequence[Candidate], least: float) -> list[Candidate]:
    """Candidates that meet the limits and that no other beats in both time and memory.

    Args:
        least: chance to meet them.
    """
    import numpy as np

    meeting = [
        candidate
        for candidate in candidates
        if accepted(candidate, least) and candidate.prediction.time.is_known
    ]
    time_s = np.array(
        [(candidate.total_s or candidate.time_per_token_s).value for candidate in meeting]
    )
    num_bytes = np.array([candidate.memory_bytes.value for candidate in meeting])
    return [meeting[i] for i in pareto(time_s, num_bytes).tolist()] if meeting else []
