"""Other estimators on the fine-tuning runs that ours is judged on: `peers.py [--write]`.

Prints `docs/accuracy/peers.md`; `--write` stores it, and its first table in the README. The others'
answers are kept in `peer_answers.jsonl`, so that this needs none of them; `--python PATH` asks them
again under an interpreter that has them, one child process per tool (`peer_adapters.py`), `--tool
NAME` only one.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from markdown_tables import markdown_table, summary
from peer_answers import (
    OURS,
    Answer,
    Choice,
    answers,
    ask_again,
    is_stock,
    of_counter,
    place,
    published_rows,
    rows,
    theirs,
    version_of,
)
from published import Observation, Quantity

from whichlora.predict.judgement import MEMORY_CONFIDENCE

README = Path(__file__).parent.parent / "README.md"
START, END = "<!-- peers.py -->\n", "<!-- end -->"
DOCUMENT = Path(__file__).parent.parent / "docs" / "accuracy" / "peers.md"
FAR_TOO_LOW = -0.05
STATED: tuple[Quantity, ...] = ("peak_allocated", "peak_reserved", "device_used")
TITLES: dict[Quantity, str] = {
    "peak_allocated": "Peak allocated",
    "peak_reserved": "Peak reserved",
    "device_used": "Used on the device",
    "perhaps_device_used": "Counter not stated",
}
SHORT: dict[Quantity, str] = {
    "peak_allocated": "allocated",
    "peak_reserved": "reserved",
    "device_used": "device used",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """Facts read in the source of one tool, at the version that was asked.

    Args:
        counters: what its figure is compared with; of several the one on which it does best.
        claims: what it says its figure is, in a few of its own words.
        silent: settings of these runs that it has no argument for.
        adds_up: what its sum holds that moves it here, in bytes where it states them.
    """

    counters: tuple[Quantity, ...]
    asked: str
    claims: str
    silent: str
    adds_up: str
    dora: str = "no"
    interval: str = "no"
    limits: str = "training"


TOOLS: dict[str, Tool] = {
    "canifinetune": Tool(
        counters=("peak_reserved",),
        asked="`estimate(EstimateRequest(...))`, `use_network=False`",
        claims='"process torch peak reserved", safety margin apart',
        silent="kernels but Liger's",
        adds_up="14 bytes per logit, three copies for AdamW, and 8 % of the card as overhead",
        interval='no: a grade, "not a calibrated probability interval"',
    ),
    "fitcheck_llm": Tool(
        counters=("device_used", "peak_reserved"),
        asked="`estimate(ModelConfig(...), TrainingConfig(...), get_gpu(...))`",
        claims='"peak VRAM", of which its measured runs take the reserved peak and the context of '
        "CUDA; the better of the two",
        silent="kernels, states but AdamW's; mixtures and models with images are refused",
        adds_up="3.5 to 4 fp32 copies of the logits or one layer, 34 tensors of it; constants "
        "of the T4 fitted to runs that are rows here (`fitcheck_t4`), of others 500 MiB and 5 %",
    ),
    "fitscout": Tool(
        counters=STATED,
        asked="`estimate_memory(ModelProfile(...), ...)`",
        claims='"real measured peak VRAM": its calibration reads `max_memory_allocated`, its sum '
        "has 1.5 GiB of CUDA context; the best of the three",
        silent="targets, attention, optimizers but 8-bit ones, kernels",
        adds_up="14 bytes per logit, fp32 states and an fp32 copy of all that is trained (12 bytes "
        "per parameter, whatever its dtype), one input per layer under checkpointing",
        interval="±20 %, fixed",
    ),
    "ftuneai": Tool(
        counters=("device_used",),
        asked="`Estimator(...).estimate_memory()`",
        claims='its calibration takes the "actual peak VRAM from nvidia-smi"',
        silent="targets but three sets, kernels",
        adds_up="8 bytes per token, layer and hidden unit under checkpointing, halved by "
        "FlashAttention and doubled by QLoRA; no logits; a fifth on top of everything",
    ),
    "fm_training_estimator": Tool(
        counters=STATED,
        asked="`sdk.estimate_memory(EstimateInput(...))`, theory",
        claims='"total memory taken by that configuration"; the best of the three',
        silent="kernels; QLoRA needs a regressor trained on one's own runs",
        adds_up="one layer's activations with the matrix of scores, whatever the attention; with "
        "LoRA the inputs of the adapters alone; no logits",
    ),
    "accelerate": Tool(
        counters=STATED,
        asked="the functions of `accelerate estimate-memory`",
        claims='"how much training memory is needed for a batch size of 1"; the best of the three',
        silent="method, rank, batch, length, checkpointing, attention, kernels",
        adds_up="the weights, gradients and Adam's states of the whole model; no activations",
        limits="-",
    ),
}
OUR_ROW = ("yes", f"{100 * MEMORY_CONFIDENCE:.0f} %", "inference and training")


# --- comparing -----------------------------------------------------------------------------------


def best_counter(tool: str) -> Quantity:
    """Of the counters that a tool may mean, the one on which its median is the smallest."""

    def size(quantity: Quantity) -> float:
        found = answers(tool, of_counter(quantity))
        return summary(one.error for one in found).median if found else float("inf")

    return min(TOOLS[tool].counters, key=size)


def _share(found: Sequence[Answer], chosen: Callable[[Answer], bool]) -> str:
    return f"{100 * sum(map(chosen, found)) / len(found):.0f} %"


def _too_low(found: Sequence[Answer]) -> tuple[str, str]:
    return (
        _share(found, lambda one: one.error < 0),
        _share(found, lambda one: one.error < FAR_TOO_LOW),
    )


# --- tables --------------------------------------------------------------------------------------


def headline() -> str:
    """One line per tool, the one that README shows."""
    lines = []
    entries = [(OURS, quantity) for quantity in STATED]
    entries += [(tool, best_counter(tool)) for tool in TOOLS]
    for tool, quantity in entries:
        found = answers(tool, of_counter(quantity))
        total = sum(map(of_counter(quantity), rows()))
        facts = OUR_ROW
        if tool != OURS:
            facts = (TOOLS[tool].dora, TOOLS[tool].interval.partition(":")[0], TOOLS[tool].limits)
        name = tool if tool == OURS else f"{tool} {version_of(tool)}"
        _, *sizes = summary(one.error for one in found).cells()
        cells = (name, SHORT[quantity], f"{len(found)} of {total}", *sizes, *_too_low(found))
        lines.append((*cells, *facts))
    head = ("tool", "counter", "rows", "median", "p90", "worst", "too low", "by over 5 %")
    return markdown_table((*head, "DoRA", "interval", "limits on"), lines)


def comparison(chosen: Choice) -> str:
    """Every tool on the rows that it answers, ours beside it on the same ones."""
    total = sum(map(chosen, rows()))
    lines = []
    for tool in (OURS, *TOOLS):
        found = answers(tool, chosen)
        if not found:
            lines.append((tool, f"0 of {total}", *["-"] * 7))
            continue
        same = {place(one) for one in found}
        beside = [one for one in answers(OURS, chosen) if place(one) in same]
        _, *sizes = summary(one.error for one in found).cells()
        _, median, p90, _ = summary(one.error for one in beside).cells()
        share = f"{len(found)} of {total}"
        lines.append((tool, share, *sizes, *_too_low(found), median, p90))
    head = ("tool", "rows", "median", "p90", "worst", "too low", "by over 5 %")
    return markdown_table((*head, f"{OURS} on its rows: median", "p90"), lines)


def _stock(quantity: Quantity) -> Choice:
    def chosen(one: Observation) -> bool:
        return one.quantity == quantity and is_stock(one)

    return chosen


def by_method(quantity: Quantity) -> str:
    """Medians where the base, the method and so the largest part differ."""
    lines = []
    for tool in (OURS, *TOOLS):
        cells = [tool]
        for method in ("full", "lora", "qlora"):
            found = [
                one.error
                for one in answers(tool, of_counter(quantity))
                if one.observation.run.method == method
            ]
            cells.append(f"{summary(found).cells()[1]} ({len(found)})" if found else "-")
        lines.append(cells)
    return markdown_table(("tool", "full", "LoRA", "QLoRA"), lines)


def by_source(quantity: Quantity) -> str:
    """Medians by who measured, and how many rows each tool answers."""
    lines = []
    for source in sorted({one.source for one in rows() if one.quantity == quantity}):
        cells = [source]
        for tool in (OURS, *TOOLS):
            found = [
                one.error
                for one in answers(tool, of_counter(quantity))
                if one.observation.source == source
            ]
            cells.append(f"{summary(found).cells()[1]} ({len(found)})" if found else "-")
        lines.append(cells)
    return markdown_table(("source", OURS, *TOOLS), lines)


def intervals() -> Iterator[str]:
    for tool in (OURS, *TOOLS):
        for quantity in STATED:
            found = [one for one in answers(tool, of_counter(quantity)) if one.within is not None]
            if found:
                held = _share(found, lambda one: one.within is True)
                above = sum(one.within is False and one.error < 0 for one in found)
                what = TITLES[quantity].lower()
                yield f"- {tool}, {what}: {held} of {len(found)}; {above} lie above it."


def _kind(reason: str) -> str:
    """What several reasons share: of one's own the last words, of others' all but their values."""
    for own in ("not among its methods", "not among its quantisations", "no such set"):
        if reason.endswith(own):
            return own
    values = re.compile(r"'[^']*'|[+-]?\d[\d,.]*")
    return re.sub(r"(target_modules) .*", r"\1", values.sub("…", reason)).partition(". ")[0]


def unanswered() -> str:
    reasons = Counter(
        (tool, _kind(reason))
        for tool in TOOLS
        for reason in theirs(tool)
        if isinstance(reason, str)
    )
    lines = [(tool, str(n), reason) for (tool, reason), n in reasons.most_common()]
    return markdown_table(("tool", "rows", "what it says"), sorted(lines))


def facts() -> str:
    lines = [
        (tool, version_of(tool), one.asked, one.claims, one.silent, one.interval)
        for tool, one in TOOLS.items()
    ]
    head = ("tool", "version", "asked by", "what its figure is", "no argument for", "interval")
    return markdown_table(head, lines)


def _chosen_models() -> set[str]:
    return {one.model.name for one in rows()}


SETUP = """\
python3 -m venv peers
peers/bin/pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
peers/bin/pip install canifinetune==0.4.1 fitcheck-llm==0.3.1 fitscout==0.1.1 ftuneai==0.4.1 \
accelerate==1.15.0 transformers==5.23.0
for tool in accelerate canifinetune fitcheck_llm fitscout ftuneai; do
    python benchmarks/peers.py --python peers/bin/python --tool $tool
done
python3 -m venv older # of transformers, whose names of optimizers it reads
older/bin/pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
older/bin/pip install accelerate==1.2.1 transformers==4.46.3 peft==0.14.0 datasets==3.6.0 \
dataclass-wizard==1.0.0
older/bin/pip install --no-deps fm_training_estimator==0.1.3
python benchmarks/peers.py --python older/bin/python --tool fm_training_estimator --write"""


def document() -> str:
    """All tables, dated, as Markdown."""
    today = datetime.datetime.now(datetime.UTC).date()
    counts = Counter(one.quantity for one in rows())
    parts = [
        "# Other estimators on the same runs",
        f"Made by `benchmarks/peers.py --write` on {today}, Python {platform.python_version()}. "
        "Every tool gets the published fine-tuning runs of [published.md](published.md): "
        f"{counts['peak_allocated']} peaks of what is allocated, {counts['peak_reserved']} of what "
        f"is reserved and {counts['device_used']} of the device, of {len(_chosen_models())} models "
        f"on {len({one.gpu for one in rows()})} accelerators. "
        f"{len(published_rows()) - len(rows())} rows came after the tools were asked, and are left "
        "out.",
        "Each is asked offline through its own interface, with every setting it has an argument "
        "for (`benchmarks/peer_requests.py`). Where its table lacks the model, it gets the sizes "
        "and the exact parameter count; where its families lack it, the family whose layers have "
        "the same names. Errors are predicted over measured, less one: positive is too high. Too "
        "low is the side that runs out of memory.",
        headline(),
        "p90 and median are of sizes, worst has its sign. A row without an answer counts as "
        "unanswered, not as an error.",
        "## What to keep in mind",
        "- Nothing was fitted to these rows. But our formulas were corrected with them in view, "
        "and know the kernels and library versions of each. The others had neither.\n"
        "- Many rows replace the loss by a fused kernel, for which the others have no argument "
        "but canifinetune's for Liger. The section on stock kernels leaves those rows out.\n"
        "- fitcheck_llm's constants of a T4 are fitted to the 67 runs of `fitcheck_t4`.\n"
        "- They also answer what was not compared here: time, cost, several GPUs.",
        "## Requests",
        facts(),
        "What determines their sums, read in their sources:",
        "\n".join(f"- {tool}: {one.adds_up}." for tool, one in TOOLS.items()),
        "No source of any of them mentions DoRA. The limits are those that the search of each "
        "keeps to. canifinetune, fitscout and ftuneai choose a training configuration for a card "
        "or a price; none judges how the model is served. accelerate's weights in each precision "
        "are its figure for inference.",
        "Not asked: `unsloth_zoo` 2026.10.9 estimates activations and logits of its own kernels to "
        "decide what to offload (`estimate_training_reserve_bytes`), not a run. `loggetta` 0.7.0 "
        "plans runs of its own trainer, whose kernels no row has.",
    ]
    for quantity in STATED:
        parts += [f"## {TITLES[quantity]}", comparison(of_counter(quantity))]
        parts += ["Medians by method, with the number of rows:", by_method(quantity)]
        parts += ["Medians by source:", by_source(quantity)]
    for quantity in STATED:
        parts += [
            f"## Stock kernels only: {TITLES[quantity].lower()}",
            comparison(_stock(quantity)),
        ]
    parts += [
        "## Counter not stated",
        f"{counts['perhaps_device_used']} runs of Qwen's first models from their README, stock "
        "Trainer and PEFT, batch 1 and up to 8,192 tokens; compared with used on the device. Ours "
        "is worst here, too: the first remote code of these models was not read.",
        comparison(of_counter("perhaps_device_used")),
        "## Intervals",
        "Share of measured values inside the stated interval:",
        "\n".join(intervals()),
        "## Unanswered",
        unanswered(),
        "fm_training_estimator's theory of QLoRA is not reachable: its `HybridQLoraEstimator` "
        "returns nothing without a trained regressor, and none is shipped.",
        "## To run it again",
        f"```bash\n{SETUP}\n```",
        "Without `--python` the kept answers (`benchmarks/peer_answers.jsonl`) are compared with "
        "the predictions of this checkout.",
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", help="an interpreter that has the tools: ask them again")
    parser.add_argument("--tool", choices=sorted(TOOLS), help="ask this one only")
    parser.add_argument("--write", action="store_true", help="store the document")
    given = parser.parse_args()
    if given.python:
        ask_again([given.tool] if given.tool else list(TOOLS), given.python)
    text = document()
    print(text)
    if given.write:
        DOCUMENT.write_text(text, encoding="utf-8")
        before, _, rest = README.read_text(encoding="utf-8").partition(START)
        after = rest.partition(END)[2]
        README.write_text(f"{before}{START}{headline()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
