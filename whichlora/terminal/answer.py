"""The answer of a run: tables, the winner, and why other candidates were rejected."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from math import isnan
from typing import TYPE_CHECKING, Any

from whichlora.predict.cost_words import cost_of, format_money, price_in_words
from whichlora.predict.notes import UNVERIFIED
from whichlora.predict.repeated_times import KNOWN_TO, Repeatability
from whichlora.predict.words import describe, method_in_words, on_serving_gpus
from whichlora.search.feasibility import (
    LIKELY,
    Candidate,
    accepted,
    closest,
    least_chance,
    likeliest_of_models,
    rejected_before,
    relaxations,
)
from whichlora.search.gpu_counts import gpu_seconds
from whichlora.serving.form import form_in_words
from whichlora.terminal.life import stages_sheet
from whichlora.terminal.plane import plane
from whichlora.terminal.rows import comparison_rows, comparison_summary
from whichlora.terminal.serving import lengths_in_words, print_stage_served
from whichlora.terminal.sheet import show
from whichlora.terminal.tables import (
    MAX_REASONS,
    new_table,
    open_console,
    print_table,
    print_whole,
    say,
)
from whichlora.terminal.words import (
    certainty,
    deciding,
    in_unit,
    reason,
    refusals,
    relaxed,
    variant,
)
from whichlora.units import format_bytes, format_count, format_seconds

MAY_FIT = "may fit"
MAX_ROWS = 40  # of a stage; measured candidates are always shown

if TYPE_CHECKING:
    from rich.console import Console

    from whichlora.search.feasibility import Check, Quantity
    from whichlora.search.gpu_choice import GpuChoice
    from whichlora.search.gpu_counts import GpuCounts
    from whichlora.spec.results import ServingPrediction
    from whichlora.spec.run import RunConfig
    from whichlora.workflow.answer import Answer


def explanation(answer: Answer, *, brief: bool = False) -> list[str]:
    """The answer and its reasons in lines of plain text.

    Args:
        brief: of the winner only its money and the least room under each kind of limit.
    """
    best = answer.winner
    lines = _nothing(answer) if best is None else _winner(answer, best, brief)
    lines += _may_fit(answer)
    dropped = _left_out_in_stage_1(answer)
    for candidate in dropped[:MAX_REASONS]:
        form = form_in_words(candidate.run)
        lines.append(f"{candidate.run.model} left out in stage 1 ({form}): {deciding(candidate)}")
    if len(dropped) > MAX_REASONS:
        lines.append(f"… and {len(dropped) - MAX_REASONS} more left out in stage 1, see the table")
    gpus = _of_gpus(answer.choice, answer.gpu.key)
    counts = _of_counts(answer.counts)
    return [*lines, *_left_out(answer), *counts, *gpus, *refusals(answer.refused)]


def _left_out(answer: Answer) -> list[str]:
    """Why no better-ranked candidate is the winner: a line for each model, method and rank."""
    best, bold = answer.winner, {candidate.run for candidate in answer.may_fit}
    variants: dict[object, list[Candidate]] = {}
    for candidate in rejected_before(best, answer.finetune):
        if candidate.run not in bold:
            variants.setdefault(_variant_of(candidate), []).append(candidate)
    lines = []
    for key, candidates in [*variants.items()][:MAX_REASONS]:
        behind = [
            candidate
            for candidate in answer.finetune
            if _variant_of(candidate) == key
            and best is not None
            and key != _variant_of(best)
            and candidate.rank > best.rank
            and accepted(candidate, least_chance(answer.plan))
        ]
        lines.append(_behind(behind) if behind else _why_left_out(answer, candidates))
    if (more := len(variants) - MAX_REASONS) > 0:
        lines.append(f"… and better-ranked ones of {more} more variants, see the table")
    return lines


def _variant_of(candidate: Candidate) -> tuple[object, ...]:
    run = candidate.run
    return run.model, run.method, run.r, run.quant


def _behind(candidates: Sequence[Candidate]) -> str:
    """The best of a variant that meets every limit, in another layout than what ranks first."""
    candidate = min(candidates, key=lambda each: each.rank)
    peak, total = format_bytes(candidate.memory_bytes.value), candidate.total_s
    takes = peak if total is None else f"{format_seconds(total.value)}, {peak}"
    return f"{describe(candidate.run)} meets every limit, but ranks behind the winner: {takes}"


def _why_left_out(answer: Answer, candidates: Sequence[Candidate]) -> str:
    """Of the candidates of a variant the nearest to the limits, and what it misses."""
    meeting = [candidate for candidate in candidates if not deciding(candidate)]
    if not meeting:
        nearest = closest(candidates)
        assert nearest is not None
        return f"{describe(nearest.run)} left out: {deciding(nearest)}"
    chances = answer.search.chance_to_win  # predicted to meet everything, and to be hardly better
    likeliest = max(meeting, key=lambda candidate: chances.get(candidate.run, 0.0))
    chance = f"{chances.get(likeliest.run, 0.0):.0%} chance to beat the winner"
    return f"{describe(likeliest.run)} left out: not measured, {chance}"


def _of_gpus(choice: GpuChoice | None, shown: str) -> list[str]:
    """Which of several GPUs is recommended, which is fastest and which cheapest.

    Args:
        shown: the GPU that the answer is of.
    """
    if choice is None:
        return []
    if choice.best is None:
        return [f"GPU: all of this is of {shown}, the likeliest of {len(choice.gpus)}."]
    lines = [f"GPU: {choice.best.gpu} is recommended, the best of {len(choice.gpus)}."]
    if choice.fastest is not None:
        seconds = choice.fastest.least_s(choice.model) or 0.0
        lines.append(
            f"  fastest for {choice.model}: {choice.fastest.gpu}, {format_seconds(seconds)}"
        )
    if choice.cheapest is not None:
        gpu = choice.cheapest.gpu
        offer = choice.objective.offer(gpu)
        assert offer is not None  # the cheapest has a price
        cost = format_money(choice.cost_of_model(choice.cheapest), offer.currency)
        lines.append(f"  cheapest for {choice.model}: {gpu}, {cost} at {price_in_words(offer, 1)}")
    elif choice.fastest is not None:
        lines.append("  gpu_prices, the price of an hour, is needed to name the cheapest")
    return lines


def gpu_rows(choice: GpuChoice) -> list[tuple[str, ...]]:
    """The GPUs of a plan as cells: winner, memory, time, price and what is best about it."""
    rows: list[tuple[str, ...]] = []
    for on in choice.gpus:
        best, cost = on.winner, choice.cost(on)
        marks = {"recommended": choice.best, "fastest": choice.fastest, "cheapest": choice.cheapest}
        rows.append(
            (
                on.gpu,
                on.without_winner if best is None else best.run.model,
                "-" if best is None else f"{variant(best.run)}, batch {best.run.batch_size}",
                "-" if best is None else format_bytes(best.memory_bytes.value),
                "-" if best is None or not best.total_s else format_seconds(best.total_s.value),
                format_money(cost, choice.currency(on)),
                "predicted" if best is None else best.source,
                ", ".join(mark for mark, marked in marks.items() if marked is on),
            )
        )
    return rows


def print_gpus_of(console: Console, choice: GpuChoice) -> None:
    numbers = ("peak", "total", "cost")
    print_table(
        console,
        ("GPU", "model", "variant", *numbers, "source", ""),
        gpu_rows(choice),
        right=numbers,
        spare=("source", "peak", "variant"),
        title="the plan on each GPU",
    )


def _of_counts(counts: GpuCounts | None) -> list[str]:
    """How many GPUs are the fewest, the cheapest and the fastest for one model."""
    if counts is None:
        return []
    fewest, cheapest, fastest = (
        f"{each.run.parallel.gpus} ({variant(each.run)})"
        for each in (counts.fewest, counts.cheapest, counts.fastest)
    )
    hours = gpu_seconds(counts.cheapest) / 3600
    cost = counts.cost(counts.cheapest)
    price = "" if cost is None else f", {format_money(cost, counts.currency)}"
    lines = [
        f"GPUs: {counts.model} by their number",
        f"  fewest: {fewest}",
        f"  cheapest: {cheapest}, {hours:.3g} GPU-hours{price}",
        f"  fastest: {fastest}, {format_seconds(counts.fastest.total_s.value)}"
        if counts.fastest.total_s
        else "",
    ]
    if counts.lacking:
        lines.append(f"  nothing surely meets the limits on {', '.join(map(str, counts.lacking))}")
    return lines


def print_counts(console: Console, answer: Answer) -> None:
    """The numbers of GPUs side by side, where there are several."""
    counts = answer.counts
    if counts is None or len(counts.candidates) < 2:
        return
    numbers = ("GPUs", "batch", "steps", "peak", "total", "GPU-hours", "cost")
    rows = [
        (
            str(each.run.parallel.gpus),
            each.run.parallel.in_words,
            method_in_words(each.run),
            str(each.run.batch_size),
            str(each.run.gradient_accumulation_steps),
            format_bytes(each.memory_bytes.value),
            format_seconds(each.total_s.value) if each.total_s else "-",
            f"{gpu_seconds(each) / 3600:.3g}",
            format_money(counts.cost(each), counts.currency),
            ", ".join(counts.marks(each)),
        )
        for each in counts.candidates
    ]
    print_table(
        console,
        ("GPUs", "strategy", "method", *numbers[1:], ""),
        rows,
        right=numbers,
        spare=("steps", "cost", "method"),
        title=f"{counts.model} by the number of GPUs",
        caption="",
    )


def _left_out_in_stage_1(answer: Answer) -> list[Candidate]:
    """The closest rejected candidate of each serving form; of a model rejected in all, only one."""
    closest: dict[object, Candidate] = {}
    for candidate in sorted(answer.inference, key=lambda candidate: -candidate.chance):
        form = candidate.form if candidate.run.model in answer.kept else None
        closest.setdefault((candidate.run.model, form), candidate)
    passed = answer.kept
    fell = [
        candidate
        for candidate in closest.values()
        if candidate.run.model not in passed or candidate.chance < LIKELY
    ]
    return sorted(fell, key=lambda candidate: answer.plan.models.index(candidate.run.model))


def _winner(answer: Answer, best: Candidate, brief: bool) -> list[str]:
    run = best.run
    size = format_count(best.prediction.num_params)
    how = "measured"
    if not best.measured:
        how = f"predicted, {best.chance_of_both_stages:.0%} chance to meet every limit"
    lines = [
        f"Winner: {run.model} ({size} parameters), {variant(run, answer.plan)}, "
        f"batch size {run.batch_size} ({how})."
    ]
    if best.form is not None:
        lines.append(f"  served as {form_in_words(best.form)}{_by_engine(answer.serving)}")
    if best.measured:
        lines.append(f"  {certainty(answer.search, has_winner=True)}")
    if answer.repeatability is not None:
        lines.append(f"  {repeated(answer.repeatability)}")
    if not brief or answer.plan.objective.prefer != "size":
        lines.append(f"  {_preferred(answer, run.model)}")
    if answer.cost is not None and best.total_s is not None:
        money_alone = brief and answer.cost.grid is None
        seconds, whole = best.total_s.value, _whole(answer)
        costs = cost_of(answer.cost, seconds, whole, money_alone=money_alone)
        lines.extend(f"  {line}" for line in costs)
    lines.extend(f"  {reason(check)}" for check in _tightest(best.checks, brief))
    return lines


def _tightest(checks: Sequence[Check], brief: bool) -> list[Check]:
    """In brief, of limits on one quantity the one that leaves the least room."""
    if not brief:
        return [*checks]
    tightest: dict[Quantity, Check] = {}
    for check in sorted(checks, key=lambda check: (check.chance, check.bound)):
        tightest.setdefault(check.quantity, check)
    return [check for check in checks if check is tightest[check.quantity]]


def _whole(answer: Answer) -> str:
    """What a total is of; of assumed data its tokens, which the user may scale."""
    if answer.plan.dataset.kind != "counts":
        return "training"
    num_tokens = answer.dataset["tokens_per_epoch"] * answer.plan.epochs
    return f"{format_count(num_tokens)} tokens"


def _by_engine(served: Candidate | None) -> str:
    """What the engine that serves the winner takes and holds; empty for transformers."""
    serving = None if served is None else served.prediction.serving
    if served is None or serving is None:
        return ""
    engine = serving.release + on_serving_gpus(served.run)
    waits = _waits(serving, served.run)
    return (
        f" by {engine}: room for {serving.max_running} sequences of "
        f"{serving.context:,} tokens, pool {format_bytes(serving.kv_pool_bytes)} "
        f"({serving.kv_pool_tokens:,} tokens), longest {serving.max_context:,}{waits}"
    )


def _waits(serving: ServingPrediction, run: RunConfig) -> str:
    """The median waits of its users, where they are predicted."""
    time = serving.time
    if time is None:
        return ""
    return (
        f"; first token after {format_seconds(time.ttft_s)}, each further one "
        f"{format_seconds(time.tpot_s)}, {time.output_tokens_per_s:,.4g} tokens/s in all, with "
        f"{lengths_in_words(run)}"
    )


def repeated(of: Repeatability) -> str:
    """How well the winner's time is known, how alike the device repeats it, and what more costs."""
    batches = "1 batch" if of.num_batches == 1 else f"{of.num_batches} batches"
    line = f"its {batches} tell the mean time to {of.known_to:.1%}"
    if of.more_batches:
        number = of.num_batches + of.more_batches
        line += (
            f"; {of.more_batches} more, about {format_seconds(of.more_s)}, would to {KNOWN_TO:.0%}"
            f" (num_batches: {number})"
        )
    runs = "run" if of.num_repeated == 1 else "runs"
    basis = f"{of.num_repeated} {runs} repeated" if of.num_repeated else "assumed, none repeated"
    return f"{line}; a repeated run differs by {of.run_deviation:.1%} ({basis})"


def _preferred(answer: Answer, model: str) -> str:
    """What ranked the candidates; of quality the winner's score, and what has none."""
    objective = answer.plan.objective
    if objective.prefer != "quality":
        return _PREFERENCE[objective.prefer]
    score = objective.scores.get(model)
    won = "the largest model, as it has no score" if score is None else f"score {score.in_words}"
    unknown = [name for name in answer.plan.models if name not in objective.scores]
    after = f"; without a score, after the others by size: {', '.join(unknown)}" if unknown else ""
    return f"preferred: quality, {won}{after}"


_PREFERENCE = {
    "size": "preferred: the largest model; size alone is not quality, see `prefer: quality`",
    "order": "preferred: the first of your order of models",
    "time": "preferred: the least time; a smaller model may be less good",
    "memory": "preferred: the least memory; a smaller model may be less good",
    "price": "preferred: the lowest price; a smaller model may be less good",
}


def _may_fit(answer: Answer) -> list[str]:
    """Models that a dry run leaves open: their chance, and the limit least likely to be met."""
    lines = []
    likeliest = likeliest_of_models(answer.may_fit)
    for candidate in likeliest[:MAX_REASONS]:
        why = deciding(candidate)
        if not why and candidate.form is not None:
            served = form_in_words(candidate.form)
            why = (
                f"{candidate.chance_to_serve:.0%} chance to meet the limits of stage 1 as {served}"
            )
        chance = f"{candidate.chance_of_both_stages:.0%}"
        lines.append(f"{MAY_FIT}, {chance} chance: {describe(candidate.run)}: {why}")
    if (more := len(likeliest) - MAX_REASONS) > 0:
        models = "1 more model" if more == 1 else f"{more} more models"
        lines.append(f"… and {models} that may fit, see the table")
    return lines


def _nothing(answer: Answer) -> list[str]:
    if answer.may_fit:
        confidence = answer.plan.budget.confidence
        return [
            f"Nothing meets every limit with the requested confidence of {confidence:.0%}; "
            "nothing was measured.",
            "  `profile: frontier` measures what may fit; a lower `confidence` takes it unmeasured",
        ]
    lines = ["Nothing meets every limit.", f"  {certainty(answer.search, has_winner=False)}"]
    pool = [*answer.finetune] or [*answer.inference]
    nearest = closest(pool)
    if nearest is not None:
        lines.append(f"Closest: {describe(nearest.run)}.")
        lines.extend(
            f"  it would need {check.limit} of at {'most' if check.is_least else 'least'} "
            + in_unit(check, check.needed)
            + (
                ""
                if check.quantity.measured
                else f" to be sure; {in_unit(check, check.quantity.value)} is predicted"
            )
            for check in nearest.checks
            if check.verdict != "meets" and check.needed  # none of no sequence
        )
    lines.extend(f"Alone, {relaxed(relaxation)}." for relaxation in relaxations(pool))
    return lines


def print_answer(answer: Answer) -> None:
    """The table, the winner and its reasons, the prediction errors and the files."""
    console = open_console()
    for title, candidates in (
        ("stage 1: inference", answer.inference),
        ("stage 2: fine-tuning", answer.finetune),
    ):
        _print_stage(console, answer, title, candidates)
    for line in _plane(answer, console.width):
        console.print(line, markup=False, no_wrap=True, overflow="ellipsis")
    for line in explanation(answer):
        say(console, line)
    if answer.choice is not None:
        print_gpus_of(console, answer.choice)
    print_counts(console, answer)
    if len(answer.front) > 1:
        _print_front(console, answer.front)
    compared = comparison_rows(answer.compared)
    if compared:
        _print_errors(console, compared)
    if answer.life is not None:
        show(console, stages_sheet(answer.life))
    for line in besides_training(answer):
        say(console, line)
    say(console, f"data: {answer.tokens}")
    say(console, f"basis: {answer.basis}")
    for note in answer_notes(answer):
        say(console, f"note: {note}")
    trained = answer.training is not None and "error" not in answer.training
    if trained:
        print_training(console, answer)
    for purpose, path in answer.files.items():
        say(console, f"{purpose}: {path}", whole=True)
    if "job" in answer.files and answer.winner is not None and not trained:
        if "data_train" not in answer.files:
            data = answer.files["job"].with_name("train.jsonl")
            say(console, f'put your rows into {data} first, as {{"text": ...}} lines', whole=True)
        print_starts(console, answer)


def print_starts(console: Console, answer: Answer) -> None:
    """What starts the winner's fine-tuning, and then the engine that serves it."""
    say(console, f"start the fine-tuning with: {start_command(answer)}", whole=True)
    if "serving" in answer.files:
        script = shlex.quote(str(answer.files["serving"]))
        say(console, f"and then serve it with: sh {script}", whole=True)


def start_command(answer: Answer, *, python: str = sys.executable) -> str:
    """What starts the winner's job."""
    from whichlora.exports.launch import launch_line

    assert answer.winner is not None  # whose job it is
    return launch_line(answer.winner.run, str(answer.files["job"]), python=python)


def besides_training(answer: Answer) -> list[str]:
    """What evaluations and checkpoints of the winner take."""
    also = answer.besides
    if also is None:
        return []
    lines = ["besides training:"]
    if also.evaluation_peak_bytes is not None:
        times = "once" if also.evaluations == 1 else f"{also.evaluations} times"
        seconds = (
            ""
            if isnan(also.evaluation_s)
            else f"{format_seconds(also.evaluation_s)} of the total, "
        )
        lines.append(
            f"  evaluation: {times}, {seconds}peak {format_bytes(also.evaluation_peak_bytes)}"
        )
    if also.checkpoints:
        checkpoint_bytes = also.checkpoint_weights_bytes + also.checkpoint_optimizer_bytes
        lines.append(
            f"  checkpoints: {also.checkpoints}, each {format_bytes(checkpoint_bytes)} on disk "
            f"({format_bytes(also.checkpoint_optimizer_bytes)} of optimizer states), at most "
            f"{format_bytes(also.kept_bytes)} at once"
        )
    return lines if len(lines) > 1 else []


def besides_in_short(answer: Answer) -> str:
    """`besides_training` in one line; empty without evaluations and checkpoints."""
    also = answer.besides
    parts = []
    if also is not None and also.evaluations and not isnan(also.evaluation_s):
        parts.append(f"{format_seconds(also.evaluation_s)} of evaluation")
    if also is not None and also.checkpoints:
        parts.append(f"{format_bytes(also.kept_bytes)} of checkpoints on disk")
    return f"besides training: {', '.join(parts)}" if parts else ""


def answer_notes(answer: Answer) -> list[str]:
    """Notes of the plan, of the winner, and those that all candidates share."""
    notes = [candidate.prediction.notes for candidate in (*answer.inference, *answer.finetune)]
    of_all = [note for note in (notes[0] if notes else ()) if all(note in n for n in notes)]
    of_winner = () if answer.winner is None else answer.winner.prediction.notes
    shown = dict.fromkeys((*answer.plan.notes, *of_winner, *of_all))
    if answer.compared:  # measurements have replaced the datasheet's figures
        return [note for note in shown if not note.startswith(UNVERIFIED)]
    return list(shown)


def _print_stage(
    console: Console, answer: Answer, title: str, candidates: Sequence[Candidate]
) -> None:
    """The candidates of one stage, the best ranked and all that were measured."""
    rows = []
    ranked = sorted(candidates, key=lambda candidate: candidate.rank)
    shown = [candidate for i, candidate in enumerate(ranked) if i < MAX_ROWS or candidate.measured]
    for candidate in shown:
        run, total = candidate.run, candidate.total_s
        untimed = candidate.failed and candidate.measured
        rows.append(
            (
                run.model,
                variant(run, answer.plan),
                str(run.batch_size),
                run.lengths,
                "-" if untimed else format_bytes(candidate.memory_bytes.value),
                "-" if untimed else format_seconds(candidate.time_per_token_s.value),
                "-" if total is None or untimed else format_seconds(total.value),
                candidate.source,
                verdict_of(answer, candidate),
            )
        )
    numbers = ("batch", "tokens", "peak", "per token", "total")
    more = len(ranked) - len(shown)
    caption = f"… and {more} predicted ones, see candidates.csv" if more else ""
    if shown and shown[0].prediction.serving is not None:
        print_stage_served(console, shown, title=title, caption=caption)
        return
    print_table(
        console,
        ("model", "variant", *numbers, "source", "verdict"),
        rows,
        right=numbers,
        lift=("total", "tokens", "variant"),
        spare=("per token", "source", "tokens"),
        title=title,
        caption=caption,
    )


def verdict_of(answer: Answer, candidate: Candidate) -> str:
    """In a word: the winner, what may fit in a dry run, how it failed, or what the limits say."""
    if candidate is answer.winner:
        return "WINNER"
    if any(candidate is c for c in answer.may_fit):
        return f"{MAY_FIT}, {candidate.chance_of_both_stages:.0%}"
    return candidate.failure.split(":")[0] or candidate.verdict


def _plane(answer: Answer, width: int) -> list[str]:
    """Total time against peak memory of stage 2, or the time per token of stage 1 without it."""
    limits, training = answer.plan.limits_on(answer.gpu.key), bool(answer.finetune)
    byte_limit = limits.finetune_bytes if training else limits.inference_bytes
    lines = plane(
        answer.finetune or answer.inference,
        answer.winner,
        time_limit_s=limits.total_time_s if training else limits.time_per_token_s,
        byte_limits=[answer.gpu.memory_bytes, *([byte_limit] if byte_limit else [])],
        width=width,
        device_bytes=answer.gpu.memory_bytes,
    )
    time_name = "total time of the fine-tuning" if training else "time per generated token"
    return [f"peak memory against {time_name}", "", *lines, ""] if lines else []


def _print_front(console: Console, front: Sequence[Candidate]) -> None:
    numbers = ("batch", "peak", "total")
    rows = [
        (
            candidate.run.model,
            variant(candidate.run),
            str(candidate.run.batch_size),
            format_bytes(candidate.memory_bytes.value),
            format_seconds((candidate.total_s or candidate.time_per_token_s).value),
            candidate.source,
        )
        for candidate in front[:MAX_REASONS]
    ]
    more = len(front) - MAX_REASONS
    print_table(
        console,
        ("model", "variant", *numbers, "source"),
        rows,
        right=numbers,
        title="nothing is both faster and smaller than one of these",
        caption=f"… and {more} more, see answer.json" if more > 0 else "",
    )


def _print_errors(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    numbers = ("runs", "cold", "when chosen", "after the refit")
    table = new_table("predicted against measured", *numbers, right=numbers)
    for entry in comparison_summary(rows):
        table.add_row(
            entry["quantity"],
            str(entry["runs"]),
            *(
                f"{entry[f'{stage}_median']:.1%} / {entry[f'{stage}_worst']:.1%}"
                for stage in ("cold", "before", "after")
            ),
        )
    table.caption = "absolute error, median / worst"
    table.caption_justify = "left"
    print_whole(console, table)


def print_training(console: Console, answer: Answer) -> None:
    training, best = answer.training or {}, answer.winner
    seconds = training.get("train_s")
    if isinstance(seconds, int | float) and best is not None and best.total_s is not None:
        predicted = best.total_s.value
        loss = training.get("final_loss")
        shown = f", final loss {loss:.4g}" if isinstance(loss, int | float) else ""
        say(
            console,
            f"trained: {format_seconds(seconds)} for the whole fine-tuning "
            f"(expected {format_seconds(predicted)}){shown}",
        )
    say(console, f"adapter: {training.get('output', '')}", whole=True)
