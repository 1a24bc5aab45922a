"""The answer to `whichlora recommend`: the largest models, or what may be given up."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from whichlora.predict.cost_words import format_money, price_in_words
from whichlora.predict.words import VERDICTS, describe
from whichlora.search.feasibility import Candidate, closest
from whichlora.spec.run import USUAL_TRAINER
from whichlora.terminal.answer import verdict_of
from whichlora.terminal.assumed import assumed_lines
from whichlora.terminal.sheet import Document, Sheet
from whichlora.terminal.short import best_of_each_model, not_shown, print_reasons, reason_lines
from whichlora.terminal.tables import open_console, print_table, say
from whichlora.terminal.words import deciding, variant
from whichlora.trainers import get_trainer
from whichlora.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from whichlora.workflow.answer import Answer
    from whichlora.workflow.recommend import Recommendation

MAX_MODELS = 5
MAX_SAVINGS = 6
_MILLION = 10**6
_FIRST = {"quality": "best"}


def print_recommended(recommendation: Recommendation) -> None:
    """The largest models that fit with what they take, the best one with its reasons.

    Where nothing fits, what each other choice would save.
    """
    console, answer = open_console(), recommendation.answer
    _print(console, _models_sheet(recommendation))
    print_reasons(console, answer)
    for line in _named_without_row(recommendation):
        say(console, line)
    told = (
        *assumed_lines(recommendation.assumed),
        *_form_lines(recommendation),
        *_recipe_lines(recommendation),
    )
    for line in told:
        say(console, line)
    for rule in recommendation.advice:
        say(console, f"advice: {rule.in_words}")
    _print(console, _savings_sheet(recommendation))
    for line in _other_ways(recommendation):
        say(console, line)


def recommended_document(recommendation: Recommendation) -> Document:
    """The same for Markdown."""
    sheets = (_models_sheet(recommendation), _savings_sheet(recommendation))
    title, *lines = map(str.strip, reason_lines(recommendation.answer))
    lines += _named_without_row(recommendation)
    lines += assumed_lines(recommendation.assumed)
    lines += [*_form_lines(recommendation), *_recipe_lines(recommendation)]
    lines += [f"advice: {rule.in_words}" for rule in recommendation.advice]
    return Document(
        title=title,
        sheets=[sheet for sheet in sheets if sheet.rows],
        lines=[*lines, *_other_ways(recommendation)],
    )


def _print(console: Console, sheet: Sheet) -> None:
    if sheet.rows:
        print_table(
            console,
            sheet.columns,
            sheet.rows,
            right=sheet.right,
            lift=("tokens", "variant"),
            spare=("per answer token", "serving", "variant", "cost"),
            title=sheet.title,
        )


def _models_sheet(recommendation: Recommendation) -> Sheet:
    """The best candidate of each model; columns of which nothing is known are left out."""
    answer = recommendation.answer
    per_million = recommendation.assumes_data
    time_column = "per 1M tokens" if per_million else "total"
    numbers = ("batch", "tokens", "peak", time_column, "cost", "serving", "per answer token")
    rows = [
        (
            candidate.run.model,
            variant(candidate.run, answer.plan),
            str(candidate.run.batch_size),
            str(candidate.run.seq_len),
            format_bytes(candidate.memory_bytes.value),
            *_time_and_cost(answer, candidate, per_million=per_million),
            *_serving(answer, candidate),
            verdict_of(answer, candidate),
        )
        for candidate in best_of_each_model(answer)[:MAX_MODELS]
    ]
    heads = ("model", "variant", *numbers, "verdict")
    shown_places = [i for i in range(len(heads)) if any(row[i] != "-" for row in rows)]
    shown = tuple(heads[i] for i in shown_places)
    gpus = recommendation.plan.get("gpus", 1)
    return Sheet(
        title=f"the {_FIRST.get(answer.plan.objective.prefer, 'largest')} models that train on "
        + (f"{gpus} x " if gpus > 1 else "")
        + answer.gpu.key
        + _under(answer),
        columns=shown,
        right=tuple(head for head in numbers if head in shown),
        rows=[tuple(row[i] for i in shown_places) for row in rows],
    )


def _under(answer: Answer) -> str:
    """Who trains, where that is not the usual trainer of a plan."""
    trainer = answer.plan.finetune.trainer
    return "" if trainer == USUAL_TRAINER else f" with trainer {trainer}"


def _form_lines(recommendation: Recommendation) -> Iterator[str]:
    """That narrower weights may serve a larger model, where an engine was asked for 16 bit."""
    answer, plan = recommendation.answer, recommendation.plan
    stated = {"serve", "serving_options"} & plan.keys()
    served = [shape.prediction.serving for shape in answer.inference]
    if stated or all(each is None or each.starts for each in served):
        return
    yield (
        f"serving: 16 bit, in which {plan['serving']} starts no more of these models; --serve "
        "awq-int4 looks for one whose weights are quantised once they are merged"
    )


def _recipe_lines(recommendation: Recommendation) -> Iterator[str]:
    """What the winner takes under its trainer, and under the other usual one."""
    if not recommendation.recipes:
        return
    chosen, other = recommendation.recipes
    trainer = get_trainer(chosen.run.trainer)
    took = format_bytes(other.memory.device_used_bytes)
    if other.time.is_known and chosen.time.step_s and other.time.step_s:
        more = other.time.step_s / chosen.time.step_s - 1
        took += f" and {abs(more):.0%} {'more' if more >= 0 else 'less'} time"
    yield (
        f"trainer: {trainer.name} ({trainer.summary}), "
        f"{format_bytes(chosen.memory.device_used_bytes)}; with {other.run.trainer} the winner "
        f"takes {took}, fits: {VERDICTS[other.verdict]}; --trainer looks for another winner"
    )


def _named_without_row(recommendation: Recommendation) -> Iterator[str]:
    """Why models that the user names are not in the table; where none is, which were compared."""
    answer = recommendation.answer
    if recommendation.looked_at:
        models = best_of_each_model(answer)
        if models and (more := not_shown(answer, models, MAX_MODELS)):
            yield f"not shown: {', '.join(more)}; --json has those looked at"
        yield recommendation.looked_at
        return
    if answer.winner is None:
        return
    shown = [candidate.run.model for candidate in best_of_each_model(answer)][:MAX_MODELS]
    told = "\n".join(reason_lines(answer))
    missing = [
        name for name in answer.plan.models if name not in shown and f"{name} left out" not in told
    ]
    for name in missing[:MAX_MODELS]:
        yield f"left out: {name}: {_why_left_out(answer, name)}"
    if len(missing) > MAX_MODELS:
        yield f"left out: {len(missing) - MAX_MODELS} more; --json has all"


def _why_left_out(answer: Answer, model: str) -> str:
    for refusal in answer.refused:
        if refusal.model == model:
            return refusal.reason
    for stage in (answer.finetune, answer.inference):
        nearest = closest(each for each in stage if each.run.model == model)
        if nearest is not None:
            return deciding(nearest) or "it ranks below"
    return "it ranks below, and was not looked at"


def _time_and_cost(answer: Answer, candidate: Candidate, *, per_million: bool) -> tuple[str, str]:
    """Of the whole fine-tuning, or of a million tokens where the data is assumed."""
    if candidate.total_s is None:
        return "-", "-"
    seconds = candidate.total_s.value
    if per_million:
        num_tokens = answer.dataset["num_sequences"] * candidate.run.seq_len * answer.plan.epochs
        seconds *= _MILLION / num_tokens
    objective, gpus = answer.plan.objective, candidate.run.parallel.gpus
    offer = objective.offer(answer.gpu.key, gpus)
    money = objective.money(answer.gpu.key, gpus, seconds)
    return format_seconds(seconds), format_money(money, "" if offer is None else offer.currency)


def _serving(answer: Answer, candidate: Candidate) -> tuple[str, str]:
    """What serving takes, and the time of a token of one sequence."""
    shapes = [each for each in answer.inference if each.form == candidate.form]
    if not shapes:
        return "-", "-"
    best = max(shapes, key=lambda each: each.chance)
    serving = best.prediction.serving
    seconds = math.nan
    if serving is None and best.prediction.time.is_known:
        seconds = best.time_per_token_s.value
    elif serving is not None and serving.time is not None:
        seconds = serving.time.tpot_s
    return format_bytes(best.memory_bytes.value), format_seconds(seconds)


def _savings_sheet(recommendation: Recommendation) -> Sheet:
    """What each other choice saves of the candidate that comes closest, where nothing fits."""
    nearest = recommendation.nearest
    rows, title = [], ""
    if nearest is not None:
        title = f"{describe(nearest.prediction.run)}, with one choice made differently"
        rows = [
            (
                saving.name,
                format_bytes(nearest.saved_bytes(saving)),
                format_bytes(saving.prediction.memory.device_used_bytes),
                VERDICTS[saving.prediction.verdict],
            )
            for saving in recommendation.savings[:MAX_SAVINGS]
        ]
    columns = ("give up", "saves", "peak", "fits")
    return Sheet(title=title, columns=columns, right=("saves", "peak"), rows=rows)


def _other_ways(recommendation: Recommendation) -> Iterator[str]:
    """The length that fits, and the card, where nothing does."""
    nearest, longest = recommendation.nearest, recommendation.longest
    if longest is not None:
        yield f"shorter: {longest.run.seq_len} tokens fit on {longest.gpu}"
    placement = recommendation.smallest_gpu
    if placement is not None and nearest is not None:
        price = ""
        cost = None if placement.prediction is None else placement.prediction.cost
        if cost is not None and cost.offer is not None:
            price = f", {price_in_words(cost.offer, cost.num_gpus)}"
        yield (
            f"another card: {describe(nearest.prediction.run)} fits on {placement.gpu.key}, "
            f"the smallest {'with a price' if price else 'of `whichlora where`'}{price}"
        )
