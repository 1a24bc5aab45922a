"""Policies that know nothing of the formulas, to compare the search with."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np

from search.replay import Device, Limited, Result, all_measured, judged, searching


def exhaustive(case: Limited) -> Result:
    """Everything is measured, as the original WhichLoRA did."""
    return judged(case, all_measured(case), case.winner)


def random_order(case: Limited, dice: random.Random) -> Result:
    """Any order, until an oracle says that the winner is among what was measured."""
    device = Device(case)
    order = list(range(len(case.table.records)))
    dice.shuffle(order)
    for position in order:
        device.measure(position)
        if _has_winner(case, device.asked):
            break
    return judged(case, device, case.winner)


def ours_stopped_by_oracle(case: Limited) -> Result:
    """The product's search, until an oracle says that the winner is among what was measured.

    That is the rule that random order and TPE are given: it asks how well runs are chosen, not
    how well a search knows when to stop.
    """
    device = Device(case)
    search, measure, learn = searching(case, device)
    while not _has_winner(case, device.asked):
        decision = search.decide()
        if decision.next_run is None:
            break
        search.take(decision.next_run, measure(decision.next_run, decision), learn)
    winner = case.winner
    found = winner is None or _has_winner(case, device.asked)
    return judged(case, device, winner if found else None)


def _has_winner(case: Limited, asked: list[int]) -> bool:
    """Whether the winner and a run that shows that its model serves were measured."""
    winner = case.winner
    if winner is None or winner not in asked:
        return False
    return _serves(case, int(case.problem.form[winner]), asked)


def _serves(case: Limited, model: int, asked: Iterable[int]) -> bool:
    problem = case.problem
    inference = ~problem.training & (problem.form == model)
    return not inference.any() or any(inference[i] and case.meets[i] for i in asked)


def binary_search(case: Limited) -> Result:
    """From the largest model down: of each variant the largest batch that fits.

    That is what people do by hand; it stops at the first model with a variant in time.
    """
    device = Device(case)
    problem, table = case.problem, case.table
    answer = None
    for model in sorted(set(problem.form.tolist()), key=lambda m: _tier(case, m)):
        of_model = [i for i in range(len(table.records)) if problem.form[i] == model]
        serving = [i for i in of_model if not problem.training[i]]
        if serving and not any(case.meets[i] for i in _largest_fit(device, serving)):
            # the largest batch is not in time: the others may be
            for i in serving:
                if i not in device.asked:
                    device.measure(i)
            if not any(case.meets[i] for i in serving):
                continue
        variants: dict[object, list[int]] = {}
        for i in of_model:
            if problem.training[i]:
                run = table.runs[i]
                key = (run.method, run.r, run.quant, run.precision, run.loss_head, run.seq_len)
                variants.setdefault(key, []).append(i)
        found = [i for each in variants.values() for i in _largest_fit(device, each)]
        good = [i for i in found if case.meets[i]]
        if good:
            answer = min(good, key=lambda i: table.seconds[i])
            break
    return judged(case, device, answer)


def _tier(case: Limited, model: int) -> float:
    return float(case.problem.tier[case.problem.form == model][0])


def _largest_fit(device: Device, positions: list[int]) -> list[int]:
    """What a binary search over the batch measures, the runs that fit."""
    case = device.problem
    ordered = sorted(positions, key=lambda i: case.table.runs[i].batch_size)
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


def optuna_tpe(case: Limited, seed: int, *, patience: int | None = None) -> Result:
    """A tree-structured Parzen estimator over model, variant and batch.

    A model's serving shapes are measured, the smallest batch first, when it is first proposed.

    Args:
        patience: fine-tunings in a row that are no improvement, after which it stops with the
            best one measured; without it, an oracle stops it.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    device = Device(case)
    problem, table = case.problem, case.table
    training = [i for i in range(len(table.records)) if problem.training[i]]
    settings = {
        i: {
            "model": int(problem.form[i]),
            "variant": _variant(case, i),
            "batch": _batch(case, i),
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
            if _serves(case, model, device.asked):
                break
            if not problem.training[i] and problem.form[i] == model and i not in device.asked:
                device.measure(i)
        cost = case.cost[position]
        if position not in device.asked:
            device.measure(position)
            unimproved += 1
            if np.isfinite(cost) and (best is None or cost < case.cost[best]):
                best, unimproved = position, 0
        if patience is None and _has_winner(case, device.asked):
            break
        if unimproved == patience:
            break
        study.tell(trial, 100.0 if np.isinf(cost) else 10 * problem.tier[position] + cost % 1e3)
        if len(device.asked) == len(table.records):
            break
    return judged(case, device, case.winner if patience is None else best)


def _variant(case: Limited, position: int) -> str:
    run = case.table.runs[position]
    return f"{run.method} {run.r} {run.quant} {run.precision} {run.loss_head} {run.seq_len}"


def _batch(case: Limited, position: int) -> int:
    return case.table.runs[position].batch_size
