"""What other estimators answer to the published fine-tuning runs, kept and asked again.

An answer is filed in `peer_answers.jsonl` under the digest of its question, so that comparing
needs none of the tools.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import published
from peer_requests import REQUESTS, Arguments, NoArgumentError
from published import Observation, Quantity, gpu_of
from published.memory import predicted_bytes

from whichlora.predict.coefficients import prior_calibration
from whichlora.predict.judged import judged_run
from whichlora.predict.predict import memory_prediction
from whichlora.predict.resolve import resolve

ANSWERS = Path(__file__).with_name("peer_answers.jsonl")
ADAPTERS = Path(__file__).with_name("peer_adapters.py")
OURS = "WhichLoRA"
QUANTITIES: tuple[Quantity, ...] = (
    *("peak_allocated", "peak_reserved", "device_used"),
    "perhaps_device_used",
)
CARDS = {"fsdp_qlora": "t4-16gb"}  # a 16 GB card that is not named; one tool reserves a share of it

# --- asking --------------------------------------------------------------------------------------


@cache
def published_rows() -> tuple[Observation, ...]:
    """The published fine-tuning runs with the peak of a counter."""
    return tuple(
        one
        for one in published.read_all()
        if isinstance(one, Observation)
        and one.run.phase == "finetune"
        and one.quantity in QUANTITIES
    )


def request(tool: str, one: Observation) -> Arguments:
    return REQUESTS[tool](one.model, one.run, gpu_of(CARDS.get(one.source, one.gpu)))


def key_of(arguments: Arguments) -> str:
    """What an answer is filed under: a digest of the arguments."""
    text = json.dumps(arguments, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def requests(tool: str) -> dict[str, Arguments]:
    """Each different question that the published rows ask of `tool`."""
    found = {}
    for one in published_rows():
        try:
            arguments = request(tool, one)
        except NoArgumentError:
            continue
        found[key_of(arguments)] = arguments
    return found


def ask(tool: str, python: str) -> list[dict[str, Any]]:
    """The answers of `tool` under the interpreter `python`."""
    asked = requests(tool)
    done = subprocess.run(
        [python, str(ADAPTERS), tool],
        input="".join(json.dumps(one) + "\n" for one in asked.values()),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    head, *answers = map(json.loads, done.stdout.splitlines())
    return [
        {"tool": tool, **head, "asked": key, **answer}
        for key, answer in zip(asked, answers, strict=True)
    ]


def ask_again(tools: Iterable[str], python: str) -> None:
    """Replace the kept answers of `tools`."""
    kept = [one for (tool, _), one in kept_answers().items() if tool not in tools]
    found = kept + [one for tool in tools for one in ask(tool, python)]
    found.sort(key=lambda one: (one["tool"], one["asked"]))
    ANSWERS.write_text("".join(json.dumps(one) + "\n" for one in found), encoding="utf-8")
    for each in (kept_answers, rows):
        each.cache_clear()


@cache
def kept_answers() -> dict[tuple[str, str], dict[str, Any]]:
    """Answers by tool and digest of the question."""
    lines = ANSWERS.read_text(encoding="utf-8").splitlines() if ANSWERS.exists() else []
    return {(one["tool"], one["asked"]): one for one in map(json.loads, lines)}


def version_of(tool: str) -> str:
    return next(str(one["version"]) for (name, _), one in kept_answers().items() if name == tool)


@cache
def rows() -> tuple[Observation, ...]:
    """The published rows that were there when the tools were asked."""
    kept = kept_answers().keys()
    return tuple(one for one in published_rows() if kept >= set(_questions(one)))


def _questions(one: Observation) -> Iterator[tuple[str, str]]:
    """What `one` asks of which tool, by its digest."""
    for tool in REQUESTS:
        with contextlib.suppress(NoArgumentError):
            yield tool, key_of(request(tool, one))


# --- comparing -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """One figure beside the one that was measured.

    Args:
        within: whether the stated interval holds the measured one; None without an interval.
    """

    observation: Observation
    error: float
    within: bool | None


@cache
def ours() -> tuple[Answer, ...]:
    found = []
    for one in rows():
        job = resolve(one.model, one.run, gpu_of(one.gpu))
        memory, _ = memory_prediction(judged_run(job, prior_calibration(job.gpu)))
        stated = {
            "peak_allocated": memory.allocated_interval_bytes,
            "peak_reserved": memory.reserved_interval_bytes,
        }
        low, high = stated.get(one.quantity, memory.interval_bytes)
        found.append(Answer(one, predicted_bytes(one) / one.value - 1, low <= one.value <= high))
    return tuple(found)


@cache
def theirs(tool: str) -> tuple[Answer | str, ...]:
    """For each row what `tool` says, or why it says nothing."""
    found: list[Answer | str] = []
    for one in rows():
        try:
            asked = key_of(request(tool, one))
        except NoArgumentError as reason:
            found.append(str(reason))
            continue
        answer = kept_answers()[tool, asked]
        if "unanswered" in answer:
            found.append(answer["unanswered"])
            continue
        within = answer["low"] <= one.value <= answer["high"] if "low" in answer else None
        found.append(Answer(one, answer["bytes"] / one.value - 1, within))
    return tuple(found)


def place(one: Answer) -> tuple[str, int]:
    """Which row it answers."""
    return one.observation.source, one.observation.line


Choice = Callable[[Observation], bool]


def of_counter(quantity: Quantity) -> Choice:
    return lambda one: one.quantity == quantity


def is_stock(one: Observation) -> bool:
    """A run of the libraries' own kernels, which is what the others describe."""
    return one.run.loss_head in ("hf", "raw") and "foak" not in one.stack


def answers(tool: str, chosen: Choice) -> list[Answer]:
    found = ours() if tool == OURS else theirs(tool)
    return [one for one in found if isinstance(one, Answer) and chosen(one.observation)]
