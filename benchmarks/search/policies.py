"""Policies that know nothing of the formulas, to compare the search with."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np

from search.replay import Device, Limited, Result, all_measured, judged, searching


def exhaustive(problem: Limited) -> Result:
    """Everything is measured, as the original WhichLoRA did."""
    return judged(problem, all_measured(problem), problem.winner)


def random_order(problem: Limited, dice: random.Random) -> Result:
    """Any order, until an oracle says that the winner is among what was measured."""
    device = Device(problem)
    order = list(range(len(problem.table.records)))
    dice.shuffle(order)
    for position in order:
        device.measure(position)
        if _has_winner(problem, device.asked):
            break
    return judged(problem, device, problem.winner)


def ours_stopped_by_oracle(problem: Limited) -> Result:
    """The product's search, until an oracle says that the winner is among what was measured.

    That is the rule that random order and TPE are given: it asks how well runs are chosen, not
    how well a search knows when to stop.
    """
    device = Device(problem)
    search, measure, learn = searching(problem, device)
    while not _has_winner(problem, device.asked):
        decision = search.decide()
        if decision.next_run is None:
            break
        search.take(decision.next_run, measure(decision.next_run, decision), learn)
    winner = problem.winner
    found = winner is None or _has_winner(problem, device.asked)
    return judged(problem, device, winner if found else None)


def _has_winner(problem: Limited, asked: list[int]) -> bool:
    """Whether the winner and a run that shows that its model serves were measured."""
    winner = problem.winner
    if winner is None or winner not in asked:
        return False
    return _serves(problem, int(problem.problem.form[winner]), asked)


def _serves(problem: Limited, model: int, asked: Iterable[int]) -> bool:
    problem = problem.problem
    inference = ~problem.training & (problem.form == model)
    return not inference.any() or any(inference[i] and problem.meets[i] for i in asked)


def binary_search(problem: Limited) -> Result:
    """From the largest model down: of each variant the largest batch that fits.

    That is what people do by hand; it stops at the first model with a variant in time.
    """
    device = Device(problem)
    problem, table = problem.problem, problem.table
    answer = None
    for model in sorted(set(problem.form.tolist()), key=lambda m: _tier(problem, m)):
        of_model = [i for i in range(len(table.records)) if problem.form[i] == model]
        serving = [i for i in of_model if not problem.training[i]]
        if serving and not any(problem.meets[i] for i in _largest_fit(device, serving)):
            # the largest batch is not in time: the others may be
            for i in serving:
                if i not in device.asked:
                    device.measure(i)
            if not any(problem.meets[i] for i in serving):
                continue
        variants: dict[object, list[int]] = {}
        for i in of_model:
            if problem.training[i]:
                run = table.runs[i]
                key = (run.method, run.r, run.quant, run.precision, run.loss_head, run.seq_len)
                variants.setdefault(key, []).append(i)
        found = [i for each in variants.values() for i in _largest_fit(device, each)]
        good = [i for i in found if problem.meets[i]]
        if good:
            answer = min(good, key=lambda i: table.seconds[i])
            break
    return judged(problem, device, answer)


def _tier(problem: Limited, model: int) -> float:
    return float(problem.problem.tier[problem.problem.form == model][0])


def _largest_fit(device: Device, positions: list[int]) -> list[int]:
    """What a binary search over the batch measures, the runs that fit."""
    problem = device.problem
    ordered = sorted(positions, key=lambda i: problem.table.runs[i].batch_size)
    low, high = 0, len(ordered) - 1
    fits = []
    while low <= high:
        middle = (low + high + 1) // 2
        position = ordered[middle]
        if device.measure(position).outcome == "ok":
            fits.append(position)
            low = middle + 1
        else:
            high = middle - 1
    return fits


def optuna_tpe(problem: Limited, seed: int, *, patience: int | None = None) -> Result:
    """A tree-structured Parzen estimator over model, variant and batch.

    A model's serving shapes are measured, the smallest batch first, when it is first proposed.

    Args:
        patience: fine-tunings in a row that are no improvement, after which it stops with the
            best one measured; without it, an oracle stops it.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    device = Device(problem)
    problem, table = problem.problem, problem.table
    training = [i for i in range(len(table.records)) if problem.training[i]]
    settings = {
        i: {
            "model": int(problem.form[i]),
            "variant": _variant(problem, i),
            "batch": _batch(problem, i),
        }
        for i in training
    }
    by_setting = {tuple(one.values()): i for i, one in settings.items()}
    choices = {
        name: sorted({one[name] for one in settings.values()}, key=str)
        for name in ("model", "variant", "batch")
    }
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    best, unimproved = None, 0
    for _ in range(20 * len(training)):
        trial = study.ask()
        chosen = tuple(trial.suggest_categorical(name, values) for name, values in choices.items())
        position = by_setting.get(chosen)
        if position is None:
            study.tell(trial, 1e3)
            continue
        model = int(problem.form[position])
        for i in range(len(table.records)):
            if _serves(problem, model, device.asked):
                break
            if not problem.training[i] and problem.form[i] == model and i not in device.asked:
                device.measure(i)
        cost = problem.cost[position]
        if position not in device.asked:
            device.measure(position)
            unimproved += 1
            if np.isfinite(cost) and (best is None or cost < problem.cost[best]):
                best, unimproved = position, 0
        if patience is None and _has_winner(problem, device.asked):
            break
        if unimproved == patience:
            break
        study.tell(trial, 100.0 if np.isinf(cost) else 10 * problem.tier[position] + cost % 1e3)
        if len(device.asked) == len(table.records):
            break
    return judged(problem, device, problem.winner if patience is None else best)


def _variant(problem: Limited, position: int) -> str:
    run = problem.table.runs[position]
    return f"{run.method} {run.r} {run.quant} {run.precision} {run.loss_head} {run.seq_len}"


def _batch(problem: Limited, position: int) -> int:
    return problem.table.runs[position].batch_size
