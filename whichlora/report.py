"""Predictions and answers as text: terminal tables, CSV and Markdown."""

from __future__ import annotations

import csv
import io
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from whichlora.errors import DataFileError
from whichlora.methods import get_method
from whichlora.results import Measurement, Prediction
from whichlora.search import Candidate, Check
from whichlora.specs import GpuSpec, RunConfig
from whichlora.units import format_bytes, format_count, format_seconds
from whichlora.validation import rejected_before

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from whichlora.calibration import Calibration
    from whichlora.databases import CalibrationReport, Refit
    from whichlora.sharing.union import Merged
    from whichlora.store.models import ModelRecord
    from whichlora.workflow import Answer, Compared

MAX_REASONS = 12
PLAIN_WIDTH = 160  # of output that is not a terminal: nothing is cut off


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else PLAIN_WIDTH
    return Console(stderr=stderr, width=width, highlight=False, soft_wrap=False)


def _table(*columns: str, right: Iterable[str] = ()) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    numbers = set(right)
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left")
    return table


# --- estimate -----------------------------------------------------------------------------


def print_predictions(predictions: Sequence[Prediction]) -> None:
    """A table of all predictions; the byte breakdown as well when there is only one."""
    console = _console()
    numbers = ("batch", "tokens", "peak", "95 % interval", "of the device", "time", "tokens/s")
    table = _table("model", "what", *numbers, "fits", "device", right=numbers)
    for one in predictions:
        memory, time = one.memory, one.time
        low, high = memory.interval_bytes
        run = one.run
        if run.phase == "finetune":
            tokens = str(run.seq_len)
            seconds = f"{format_seconds(time.step_s or 0)} /step"
        else:
            tokens = f"{run.prompt_len}+{run.max_new_tokens}"
            seconds = f"{format_seconds(time.time_per_token_s)} /token"
        table.add_row(
            run.model,
            variant(run),
            str(run.batch_size),
            tokens,
            format_bytes(memory.device_used_bytes),
            f"{format_bytes(low)} - {format_bytes(high)}",
            f"{memory.device_used_bytes / one.usable_bytes:.0%}",
            seconds,
            format_count(time.tokens_per_s),
            {"fits": "yes", "fails": "no", "undecided": "maybe"}[one.verdict],
            one.gpu,
        )
    console.print(table)
    if len(predictions) == 1:
        _print_breakdown(console, predictions[0])
    for text in dict.fromkeys(one.basis for one in predictions):
        console.print(f"basis: {text}")
    for text in dict.fromkeys(note for one in predictions for note in one.notes):
        console.print(f"note: {text}")


def _print_breakdown(console: Console, one: Prediction) -> None:
    table = _table(f"at {one.memory.moment}", "bytes", "share", right=("bytes", "share"))
    total = one.memory.device_used_bytes
    for part, size in one.memory.breakdown.items():
        if size:
            table.add_row(part, format_bytes(size), f"{size / total:.1%}")
    table.add_row("device memory used", format_bytes(total), "100.0%")
    console.print(table)
    low, high = one.time.interval_s
    what = "step" if one.run.phase == "finetune" else "token"
    console.print(
        f"time per {what}: 90 % between {format_seconds(low)} and {format_seconds(high)}; "
        f"parameters: {format_count(one.num_params)}"
        + (
            f", trained: {format_count(one.num_trainable_params)} "
            f"({one.num_trainable_params / one.num_params:.2%})"
            if one.num_trainable_params
            else ""
        )
    )


def variant(run: RunConfig) -> str:
    """What distinguishes a run beside its model and shape."""
    if run.phase == "inference":
        return f"inference, {run.kv_cache} cache"
    return run.method if run.method == "full" else f"{run.method} r={run.r}"


def describe(run: RunConfig) -> str:
    """One line that names a candidate."""
    name = run.model.split("/")[-1]
    if run.phase == "inference":
        return (
            f"{name} inference, batch {run.batch_size}, prompt {run.prompt_len}, "
            f"{run.max_new_tokens} new tokens"
        )
    rank = "" if get_method(run.method).trains_base else f" r={run.r}"
    return f"{name} {run.method}{rank}, batch {run.batch_size}, {run.seq_len} tokens"


# --- catalogs -----------------------------------------------------------------------------


def print_gpus(gpus: Sequence[GpuSpec], *, here: GpuSpec) -> None:
    console = _console()
    rates = ("bf16", "fp16", "fp32")
    numbers = ("memory", "bandwidth", *(f"{rate} TFLOP/s" for rate in rates))
    table = _table("key", "name", *numbers, "capability", "unverified", right=numbers)
    for gpu in gpus:
        peaks = [gpu.peak_flops_per_s.get(rate) for rate in rates]
        table.add_row(
            gpu.key,
            gpu.name,
            format_bytes(gpu.memory_bytes),
            f"{gpu.bandwidth_bytes_per_s / 1e9:.0f} GB/s",
            *("-" if peak is None else f"{peak / 1e12:.1f}" for peak in peaks),
            gpu.compute_capability or "-",
            ", ".join(gpu.unverified),
        )
    console.print(table)
    console.print(
        f"this machine: {here.key} ({here.name}, {format_bytes(here.memory_bytes)}); "
        "every figure's source is in calibration/<key>/gpu.json"
    )


def print_models(models: Sequence[ModelRecord]) -> None:
    console = _console()
    table = _table("model", "type", "parameters", right=("parameters",))
    for one in models:
        table.add_row(one.hub_id, one.model_type, format_count(one.params))
    console.print(table)
    console.print(f"{len(models)} models")


# --- calibrate ----------------------------------------------------------------------------


def print_refit(refit: Refit) -> None:
    """Error on left-out runs by phase: from the datasheet alone, before this fit, and now."""
    console = _console()
    after, before = refit.after, refit.before
    numbers = ("runs", "datasheet alone", "before", "now", "worst now")
    table = _table("phase", *numbers, right=numbers)
    for phase, cold in after.cold.items():
        old = before.held_out.get(phase) if before else None
        new = after.held_out.get(phase)
        table.add_row(
            phase,
            str(_num_runs(after, phase)),
            f"{cold.median:.1%}",
            f"{old.median:.1%} of {old.num_runs}" if old else "-",
            f"{new.median:.1%}" if new else "too few runs",
            f"{new.worst:.1%}" if new else "",
        )
    console.print(f"{after.gpu}: {after.num_records} records", markup=False)
    console.print(table)
    console.print("median error; 'before' and 'now' on runs that were left out of the fit")
    _print_distrusted(console, after)


def print_calibration(found: CalibrationReport) -> None:
    """One device: coefficients as efficiencies, errors, valid range, provenance, outliers."""
    console = _console()
    one = found.calibration
    console.print(f"{one.gpu}: {one.num_records} records fitted{found.stale}", markup=False)
    numbers = ("runs", "left-out median", "worst", "noise", "model size", "batch", "tokens")
    table = _table("phase", *numbers, right=numbers)
    for phase in ("memory", *one.time):
        held_out, ranges = one.held_out.get(phase), one.ranges.get(phase, {})
        model = one.memory if phase == "memory" else one.time[phase]
        table.add_row(
            phase,
            str(model.num_runs),
            f"{held_out.median:.1%}" if held_out else "-",
            f"{held_out.worst:.1%}" if held_out else "-",
            f"{model.noise:.1%}",
            *(_range(ranges.get(name)) for name in ("num_params", "batch_size", "tokens")),
        )
    console.print(table)
    table = _table("efficiency", *one.time, right=one.time)
    for name in next(iter(one.time.values())).mean:
        table.add_row(name, *(_efficiency(name, model.mean[name]) for model in one.time.values()))
    console.print(table)
    factors = (f"{part} {factor:.3f}" for part, factor in one.memory.mean.items())
    console.print(
        f"memory, measured over counted: {', '.join(factors)}", markup=False, soft_wrap=True
    )
    for title, counts in (
        ("outcomes", found.outcomes),
        ("measured by", found.sources),
        ("versions", found.versions),
    ):
        if counts:
            console.print(f"{title}: {_counted(counts)}", markup=False, soft_wrap=True)
    if found.dates:
        console.print(f"dates: {found.dates[0]} to {found.dates[1]}", markup=False)
    _print_distrusted(console, one)


def print_merged(merged: Merged, refused: Sequence[str] = ()) -> None:
    """What was added; rows left out go to stderr."""
    for line in refused:
        _console(stderr=True).print(f"left out: {line}", markup=False, soft_wrap=True)
    console = _console()
    for gpu, count in merged.added.items():
        console.print(f"{gpu}: {count} new records; fit them with: whichlora calibrate --gpu {gpu}")
    if merged.known or not merged.added:
        console.print(f"{merged.known} records were here already")


def _print_distrusted(console: Console, one: Calibration) -> None:
    if one.outliers:
        table = _table(
            "down-weighted record", "phase", "measured / fitted", "weight",
            right=("measured / fitted", "weight"),
        )  # fmt: skip
        for outlier in one.outliers[:MAX_REASONS]:
            table.add_row(
                outlier.record, outlier.phase, f"{outlier.ratio:.2f}", f"{outlier.weight:.2g}"
            )
        console.print(table)
        _print_more(console, len(one.outliers))
    if one.left_out:
        for record, why in list(one.left_out.items())[:MAX_REASONS]:
            console.print(f"left out: {record}: {why}", markup=False, soft_wrap=True)
        _print_more(console, len(one.left_out))


def _print_more(console: Console, count: int) -> None:
    if count > MAX_REASONS:
        console.print(f"… and {count - MAX_REASONS} more; all with --json")


def _num_runs(calibration: Calibration, phase: str) -> int:
    return (calibration.memory if phase == "memory" else calibration.time[phase]).num_runs


def _efficiency(name: str, coefficient: float) -> str:
    if name in ("launch", "constant"):
        return format_seconds(coefficient)
    return f"{1 / coefficient:.0%}" if coefficient else "free"


def _range(bounds: tuple[float, float] | None) -> str:
    if bounds is None:
        return "-"
    low, high = (format_count(bound) for bound in bounds)
    return low if low == high else f"{low} to {high}"


def _counted(counts: Mapping[str, int]) -> str:
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    shown = [f"{name} ({count})" for name, count in ordered[:MAX_REASONS]]
    more = len(ordered) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


# --- run: progress ------------------------------------------------------------------------


class Progress:
    """Shows on stderr what runs, what is left, and what was learned.

    A spinner with the elapsed time on a terminal, plain lines elsewhere.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = _console(stderr=True)
        self._console.quiet = quiet
        self._status: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def say(self, text: str) -> None:
        self._stop()
        self._console.print(text, markup=False)

    def profiling(self, run: RunConfig, *, number: int, open_candidates: int) -> None:
        self._stop()
        text = f"profile {number}: {describe(run)} ({open_candidates} candidates open)"
        if self._console.is_terminal:
            from rich.progress import Progress as Bar
            from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

            bar = Bar(
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
            )
            bar.add_task(text, total=None)
            bar.start()
            self._status = bar
        else:
            self._console.print(text, markup=False)

    def learned(self, measurement: Measurement, prediction: Prediction) -> None:
        self._stop()
        name = describe(prediction.run)
        if measurement.outcome != "ok":
            self._console.print(
                f"  {name}: {measurement.outcome} {measurement.detail}", markup=False
            )
            return
        peak = measurement.peak_allocated_bytes or 0
        shown = [
            f"peak {format_bytes(peak)} ({_off(prediction.memory.peak_allocated_bytes, peak)})"
        ]
        for what, predicted, measured in times(prediction, measurement):
            shown.append(f"{what} {format_seconds(measured)} ({_off(predicted, measured)})")
        self._console.print(f"  {name}: {', '.join(shown)}", markup=False)


def times(prediction: Prediction, measurement: Measurement) -> list[tuple[str, float, float]]:
    """Name, predicted and measured seconds of every time that was measured."""
    from statistics import median

    time = prediction.time
    found: list[tuple[str, float, float]] = []
    if measurement.step_s and time.step_s:
        longest = max(measurement.batch_seq_len, default=prediction.run.seq_len)
        lengths = measurement.batch_seq_len or (longest,) * len(measurement.step_s)
        at_longest = [
            step
            for width, step in zip(lengths, measurement.step_s, strict=True)
            if width == longest
        ]
        found.append(("step", time.step_s, median(at_longest)))
    if measurement.prefill_s and time.prefill_s:
        found.append(("prefill", time.prefill_s, median(measurement.prefill_s)))
    if measurement.decode_s_per_token and time.decode_s_per_token:
        found.append(("decode", time.decode_s_per_token, median(measurement.decode_s_per_token)))
    return found


def _off(predicted: float, measured: float) -> str:
    return f"predicted {predicted / measured - 1:+.0%}" if measured else "not measured"


# --- run: answer --------------------------------------------------------------------------


def reason(check: Check) -> str:
    """One limit in words: the value, the bound, and where the value is from."""
    show = format_bytes if check.unit == "bytes" else format_seconds
    quantity = check.quantity
    how = "measured" if quantity.measured else "predicted"
    text = f"{how} {show(quantity.value)} against {check.limit} {show(check.bound)}"
    if not quantity.measured:
        text += f" ({check.chance:.0%} chance to meet it)"
    return text


def deciding(candidate: Candidate) -> str:
    """Why a candidate does not meet the limits, in one line."""
    if candidate.failure:
        return candidate.failure
    failing = [check for check in candidate.checks if check.verdict != "meets"]
    if not failing:
        return ""
    return reason(min(failing, key=lambda check: check.chance))


def candidate_row(candidate: Candidate) -> dict[str, Any]:
    """One candidate as a flat row of the table: settings, values, and how they are known."""
    run, memory, time = candidate.run, candidate.memory_bytes, candidate.time_per_token_s
    total = candidate.total_s
    training = run.phase == "finetune"
    return {
        "model": run.model,
        "num_params": candidate.prediction.num_params,
        "phase": run.phase,
        "method": run.method if training else "",
        "r": run.r if training and run.method != "full" else "",
        "batch_size": run.batch_size,
        "seq_len": run.seq_len if training else "",
        "prompt_len": "" if training else run.prompt_len,
        "max_new_tokens": "" if training else run.max_new_tokens,
        "verdict": candidate.verdict,
        "reason": deciding(candidate),
        "source": "measured" if candidate.measured else "predicted",
        "outcome": candidate.measurement.outcome if candidate.measurement else "",
        "peak_bytes": round(memory.value),
        "peak_low_bytes": round(memory.low),
        "peak_high_bytes": round(memory.high),
        "time_per_token_s": time.value,
        "time_per_token_low_s": time.low,
        "time_per_token_high_s": time.high,
        "total_time_s": "" if total is None else total.value,
        "total_time_low_s": "" if total is None else total.low,
        "total_time_high_s": "" if total is None else total.high,
    }


def comparison_rows(compared: Sequence[Compared]) -> list[dict[str, Any]]:
    """Predicted against measured, before and after the refit: one row per measured quantity."""
    rows = []
    for one in compared:
        measurement, run = one.measurement, one.after.run
        base = {
            "model": run.model,
            "phase": run.phase,
            "variant": variant(run),
            "batch_size": run.batch_size,
            "tokens": run.seq_len if run.phase == "finetune" else run.prompt_len,
            "outcome": measurement.outcome,
        }
        quantities: list[tuple[str, str, float, list[float]]] = []
        if measurement.peak_allocated_bytes:
            quantities.append(
                (
                    "peak_allocated",
                    "bytes",
                    float(measurement.peak_allocated_bytes),
                    [
                        float(p.memory.peak_allocated_bytes)
                        for p in (one.cold, one.before, one.after)
                    ],
                )
            )
        by_stage = [times(p, measurement) for p in (one.cold, one.before, one.after)]
        for found in zip(*by_stage, strict=True):
            name, _, measured = found[0]
            quantities.append((name, "s", measured, [predicted for _, predicted, _ in found]))
        for name, unit, measured, (cold, before, after) in quantities:
            rows.append(
                base
                | {
                    "quantity": name,
                    "unit": unit,
                    "measured": measured,
                    "cold": cold,
                    "before": before,
                    "after": after,
                    "cold_error": cold / measured - 1,
                    "before_error": before / measured - 1,
                    "after_error": after / measured - 1,
                }
            )
    return rows


def comparison_summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Median and worst absolute error of each quantity, cold, before and after the refit."""
    from statistics import median

    summary = []
    for quantity in dict.fromkeys(row["quantity"] for row in rows):
        chosen = [row for row in rows if row["quantity"] == quantity]
        entry: dict[str, Any] = {"quantity": quantity, "runs": len(chosen)}
        for stage in ("cold", "before", "after"):
            errors = [abs(row[f"{stage}_error"]) for row in chosen]
            entry[f"{stage}_median"] = median(errors)
            entry[f"{stage}_worst"] = max(errors)
        summary.append(entry)
    return summary


def explanation(answer: Answer) -> list[str]:
    """The answer and its reasons in lines of plain text."""
    best = answer.winner
    lines = []
    if best is None:
        lines.append("Nothing meets every limit.")
        pool = [*answer.finetune] or [*answer.inference]
        closest = max(pool, key=lambda one: (one.chance, -one.memory_bytes.value), default=None)
        if closest is not None:
            lines.append(f"Closest: {describe(closest.run)}.")
            lines.extend(
                f"  it would need {check.limit} of at least "
                + (format_bytes if check.unit == "bytes" else format_seconds)(check.quantity.high)
                for check in closest.checks
                if check.verdict != "meets"
            )
    else:
        run = best.run
        size = format_count(best.prediction.num_params)
        how = "measured"
        if not best.measured:
            how = f"predicted, {best.chance:.0%} chance to meet every limit of fine-tuning"
        lines.append(
            f"Winner: {run.model} ({size} parameters), {variant(run)}, "
            f"batch size {run.batch_size} ({how})."
        )
        lines.extend(f"  {reason(check)}" for check in best.checks)
    before = rejected_before(best, answer.finetune)
    dropped = [model for model in answer.plan.models if model not in answer.kept]
    for model in dropped:
        of_model = [one for one in answer.inference if one.run.model == model]
        closest = max(of_model, key=lambda one: one.chance)
        lines.append(f"{model} left out in stage 1: {deciding(closest)}")
    lines.extend(f"{describe(one.run)} left out: {deciding(one)}" for one in before[:MAX_REASONS])
    if len(before) > MAX_REASONS:
        lines.append(
            f"… and {len(before) - MAX_REASONS} more better-ranked candidates, see the table"
        )
    return lines


def print_answer(answer: Answer) -> None:
    """The table, the winner and its reasons, the prediction errors and the files."""
    console = _console()
    for title, candidates in (
        ("stage 1: inference", answer.inference),
        ("stage 2: fine-tuning", answer.finetune),
    ):
        numbers = ("batch", "tokens", "peak", "per token", "total")
        table = _table("model", "variant", *numbers, "source", "verdict", right=numbers)
        table.title = title
        table.title_justify = "left"
        for one in sorted(candidates, key=lambda one: one.rank):
            run, total = one.run, one.total_s
            training = run.phase == "finetune"
            failed = bool(one.failure)
            table.add_row(
                run.model,
                variant(run),
                str(run.batch_size),
                str(run.seq_len) if training else f"{run.prompt_len}+{run.max_new_tokens}",
                "-" if failed and one.measured else format_bytes(one.memory_bytes.value),
                "-" if failed and one.measured else format_seconds(one.time_per_token_s.value),
                "-" if total is None or (failed and one.measured) else format_seconds(total.value),
                "measured" if one.measured else "predicted",
                "WINNER" if one is answer.winner else one.failure.split(":")[0] or one.verdict,
            )
        console.print(table)
    for line in explanation(answer):
        console.print(line, markup=False)
    rows = comparison_rows(answer.compared)
    if rows:
        _print_errors(console, rows)
    console.print(f"data: {answer.tokens}")
    console.print(f"basis: {answer.basis}")
    if answer.training is not None:
        _print_training(console, answer)
    for purpose, path in answer.files.items():
        console.print(f"{purpose}: {path}", markup=False)
    if "job" in answer.files and answer.training is None:
        from whichlora.job import train_command

        command = shlex.join(train_command(answer.files["job"]))
        console.print(f"start the fine-tuning with: {command}", markup=False, soft_wrap=True)


def _print_errors(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    numbers = ("runs", "cold", "when chosen", "after the refit")
    table = _table("predicted against measured", *numbers, right=numbers)
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
    console.print(table)


def _print_training(console: Console, answer: Answer) -> None:
    training, best = answer.training or {}, answer.winner
    seconds = training.get("train_s")
    if isinstance(seconds, int | float) and best is not None and best.total_s is not None:
        predicted = best.total_s.value
        console.print(
            f"trained: {format_seconds(seconds)} for the whole fine-tuning "
            f"(expected {format_seconds(predicted)}), final loss {training.get('final_loss')}"
        )
    console.print(f"adapter: {training.get('output', '')}", markup=False)


# --- files --------------------------------------------------------------------------------


def _write_text(path: Path, text: str) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DataFileError(f"{path}: can't be written ({error.strerror})") from None
    return path


def _csv(rows: Sequence[dict[str, Any]]) -> str:
    text = io.StringIO()
    if rows:
        writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return text.getvalue()


def write_candidates(path: Path, answer: Answer) -> Path:
    """The whole table of both stages as CSV; bytes and seconds."""
    everyone = [*answer.inference, *answer.finetune]
    return _write_text(path, _csv([candidate_row(one) for one in everyone]))


def write_comparison(path: Path, answer: Answer) -> Path:
    """Predicted against measured for every profiled candidate, as CSV."""
    return _write_text(path, _csv(comparison_rows(answer.compared)))


def write_summary(path: Path, answer: Answer) -> Path:
    """The answer and its reasons as Markdown."""
    lines = [f"# WhichLoRA on {answer.gpu.key}", "", *explanation(answer), ""]
    lines += [f"Data: {answer.tokens}.", f"Basis: {answer.basis}."]
    return _write_text(path, "\n\n".join(line for line in lines if line) + "\n")
