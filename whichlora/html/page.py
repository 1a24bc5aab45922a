"""The HTML page: its text and tables; `page.js` has its behaviour."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from whichlora.errors import ConfigError
from whichlora.html.figures import build_figures
from whichlora.html.source import Estimate, Point, Source, read_source
from whichlora.html.template import filled, script_json
from whichlora.predict.cost_words import format_money
from whichlora.predict.words import VERDICTS
from whichlora.store.written import OTHER_OUTPUT, write_files
from whichlora.units import format_bytes, format_count, format_seconds

COLUMNS = (
    "Model", "Variant", "Batch", "Tokens", "Device", "Verdict", "Known from", "Peak memory",
    "Interval of peak", "Time per token", "Total time", "Interval of total", "Trained", "Why",
)  # fmt: skip
NUMBERS = frozenset(COLUMNS[2:4] + COLUMNS[7:13])
NONE = "–"
MAX_REASONS = 6  # before the first figure; more are folded


def write_report(place: Path, output: Path | None = None) -> Path:
    """Write the report of the run in directory `place`, there or at `output`.

    Raises:
        ConfigError: `output` does not end with .html.
        DataFileError: no readable answer there, the file can't be written, or is somebody else's.
    """
    if output is not None and output.suffix != ".html":
        raise ConfigError(
            f"--output: {output} ends with {output.suffix or 'nothing'}; the report is .html"
        )
    source = read_source(place)
    folder = place if place.is_dir() else place.parent
    path = output or folder / "report.html"
    write_files({path: page(source).encode()}, instead=OTHER_OUTPUT)
    return path


def page(source: Source) -> str:
    """The whole HTML document."""
    figures = build_figures(source)
    folder = files("whichlora.html")
    texts = {
        "title": escape(f"WhichLoRA on {_device_name(source)}"),
        "style": "".join(
            (folder / name).read_text(encoding="utf-8") for name in ("base.css", "page.css")
        ),
        "answer": _answer(source),
        "lead": "".join(
            _figure_slot(figure) for figure in figures if figure["id"] == _lead(figures)
        ),
        "figures": "".join(
            _figure_slot(figure) for figure in figures if figure["id"] != _lead(figures)
        ),
        "gpus": _gpus(source) + _stages(source),
        "side_by_side": _side_by_side(source),
        "missing": _missing(source),
        "provenance": _provenance(source),
        "data": script_json(_data(source, figures)),
        "plotly": (folder / "plotlyjs" / "plotly.min.js").read_text(encoding="utf-8"),
        "script": (folder / "page.js").read_text(encoding="utf-8"),
    }
    return filled((folder / "page.html").read_text(encoding="utf-8"), texts)


def _lead(figures: Sequence[dict[str, Any]]) -> str:
    """The figure of the first screen: the fine-tuning plane, if there is one."""
    return str(figures[0]["id"]) if figures else ""


def _device_name(source: Source) -> str:
    return str(source.provenance["device"].get("name") or source.texts["gpu"])


# --- data for the script ------------------------------------------------------------------


def _data(source: Source, figures: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "columns": [{"title": title, "number": title in NUMBERS} for title in COLUMNS],
        "points": [_row(point, i == source.winner) for i, point in enumerate(source.points)],
        "filters": [
            {"key": key, "title": title, "values": values}
            for key, title, values in (
                ("model", "Model", _distinct(point.model for point in source.points)),
                ("method", "Method", _distinct(point.method for point in source.points)),
                ("gpu", "GPU", _distinct(point.gpu for point in source.points)),
                ("source", "Known from", ["measured", "predicted"]),
            )
        ],
        "figures": [
            {key: figure[key] for key in ("id", "title", "data", "layout")} for figure in figures
        ],
        "winner": source.winner,
    }


def _distinct(values: Any) -> list[str]:
    return list(dict.fromkeys(values))


def _row(point: Point, wins: bool) -> dict[str, Any]:
    """A candidate for filters, hover text, bars and table; a cell is text, or number and text."""
    total, lost = point.total_s, point.failed and point.measured
    verdict = "WINNER" if wins else point.outcome if point.failed else point.verdict
    cells: list[Any] = [
        point.model,
        point.variant,
        [point.batch_size, str(point.batch_size)],
        [sum(int(word) for word in point.tokens.split("+")), point.tokens],
        point.gpu,
        verdict,
        "measured" if point.measured else "predicted",
        [point.peak_bytes.value, NONE if lost else format_bytes(point.peak_bytes.value)],
        [point.peak_bytes.high, _bounds(point.peak_bytes, format_bytes)],
        *(
            [time.value, NONE if lost else format_seconds(time.value)] if time else [-1, NONE]
            for time in (point.time_per_token_s, total)
        ),
        [total.high, _bounds(total, format_seconds)] if total else [-1, NONE],
        [point.num_trainable_params, _trained(point)],
        point.reason,
    ]
    return {
        "name": point.name,
        "stage": "fine-tuning" if point.stage == "finetune" else "inference",
        "model": point.model,
        "method": point.method,
        "gpu": point.gpu,
        "source": "measured" if point.measured else "predicted",
        "bytes": dict(point.breakdown),
        "peak": point.peak_bytes.value if point.measured and not point.failed else None,
        "wins": wins,
        "verdict": verdict,
        "cells": cells,
    }


def _bounds(estimate: Estimate, show: Any) -> str:
    if estimate.low == estimate.high:
        return NONE
    return f"{show(estimate.low)} to {show(estimate.high)}"


def _trained(point: Point) -> str:
    if not point.num_trainable_params:
        return NONE
    share = point.num_trainable_params / point.num_params
    return f"{format_count(point.num_trainable_params)} ({100 * share:.3g} %)"


# --- text ---------------------------------------------------------------------------------


def _answer(source: Source) -> str:
    """The answer in one line, its figures against their limits, and the reasons."""
    lines = source.explanation
    if source.winner is None:
        headline = lines[0] if lines else "Nothing meets every limit."
        cards = ""
    else:
        best = source.points[source.winner]
        headline = f"Fine-tune {best.model} with {best.variant}, batch size {best.batch_size}"
        cards = _cards(source, best)
    items = [f"<li>{_prose(line.strip())}</li>" for line in lines[1:]]
    more = items[MAX_REASONS:] if len(items) > MAX_REASONS + 1 else []
    reasons = "".join(items[: len(items) - len(more)])
    folded = (
        f"<details><summary>{len(more)} more reasons</summary>"
        f"<ul class=reasons>{''.join(more)}</ul></details>"
        if more
        else ""
    )
    if not lines and source.winner is not None:
        reasons = f"<li>{escape(source.points[source.winner].name)} was found best.</li>"
    return (
        f"<p class=kicker>{escape(_kicker(source))}</p><h1>{escape(headline)}</h1>"
        f"<dl class=cards>{cards}</dl>"
        f"<h2>Why</h2><ul class=reasons>{reasons}</ul>{folded}{_start(source)}"
    )


def _prose(text: str) -> str:
    """`text` as HTML, with text in backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _kicker(source: Source) -> str:
    measured = sum(point.measured for point in source.points)
    summary = f"{measured} of {len(source.points)} candidates measured"
    return f"{_device_name(source)} · {summary}"


def _cards(source: Source, best: Point) -> str:
    byte_limit = source.limit("finetune_bytes") or source.limit("device_bytes")
    cards = [_card("Peak memory", best.peak_bytes.value, byte_limit, format_bytes)]
    if best.total_s is not None:
        limit = source.limit("total_time_s")
        cards.append(_card("Total time", best.total_s.value, limit, format_seconds))
    if best.time_per_token_s is not None:
        cards.append(_card("Time per token", best.time_per_token_s.value, None, format_seconds))
    if best.num_trainable_params:
        share = best.num_trainable_params / best.num_params
        trained = f"{share:.2%} of {format_count(best.num_params)}"
        cards.append(_card("Trained", best.num_trainable_params, None, format_count, trained))
    return "".join(cards)


def _card(title: str, value: float, limit: float | None, show: Any, detail: str = "") -> str:
    bar = ""
    if limit is not None:
        share = min(1.0, value / limit)
        detail = f"of {show(limit)}"
        bar = f"<span class=bar aria-hidden=true><span style='width:{share:.1%}'></span></span>"
    text = f"{escape(show(value))} <small>{escape(detail)}</small>"
    return f"<div><dt>{title}</dt><dd>{text}{bar}</dd></div>"


def _start(source: Source) -> str:
    if not source.job:
        return ""
    job = escape(source.job)
    if source.trained_s is None:
        return f"<p>Start the fine-tuning with <code>{escape(source.start)}</code></p>"
    took = format_seconds(source.trained_s)
    best = None if source.winner is None else source.points[source.winner].total_s
    expected = f" (expected {format_seconds(best.value)})" if best is not None else ""
    text = f"and took {took}{expected}."
    return f"<p>The fine-tuning was run with <code>{job}</code> {escape(text)}</p>"


def _figure_slot(figure: dict[str, Any]) -> str:
    name, title = escape(figure["id"]), escape(figure["title"])
    about = escape(figure["about"])
    chooser = ""
    if name == "breakdown":
        chooser = (
            "<p class=noprint><label>Show <select id=chooser></select></label> "
            "<button type=button id=unchoose hidden>back to the best ones</button></p>"
        )
    return (
        f"<section class=figure id=section-{name}><h2>{title}</h2><p class=about>{about}</p>"
        f"{chooser}<div class=plot id={name} role=img aria-label='{title}. {about}'></div>"
        "</section>"
    )


def _side_by_side(source: Source) -> str:
    """Methods and ranks as a table: trained parameters, bytes, hours."""
    if not source.side_by_side:
        return ""
    fits = source.limit("finetune_bytes") or source.limit("device_bytes")
    rows = []
    for point in source.side_by_side:
        too_large = fits is not None and point.peak_bytes.value > fits
        times = (
            format_seconds(time.value) if time else NONE
            for time in (point.total_s, point.time_per_token_s)
        )
        cells = (
            _trained(point),
            format_bytes(point.peak_bytes.value),
            *times,
            "measured" if point.measured else "predicted",
            "over the limit" if too_large else "within",
        )
        rows.append(
            f"<tr><th scope=row>{escape(point.variant)}</th>"
            + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
            + "</tr>"
        )
    head = (
        "Variant",
        "Trained",
        "Peak memory",
        "Total time",
        "Time per token",
        "Known from",
        "Memory",
    )
    return _plain_table(head, rows)


def _plain_table(head: Sequence[str], rows: Sequence[str]) -> str:
    return (
        "<div class=scroll><table class=plain><thead><tr>"
        + "".join(f"<th scope=col>{title}</th>" for title in head)
        + f"</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _gpus(source: Source) -> str:
    """The winner on each GPU of the plan."""
    if not source.gpus:
        return ""
    rows = []
    for on in source.gpus:
        cells = (
            on.winner or on.without_winner,
            NONE if on.peak_bytes is None else format_bytes(on.peak_bytes),
            NONE if on.total_s is None else format_seconds(on.total_s),
            NONE if on.cost is None else format_money(on.cost, on.currency),
            "measured" if on.measured else "predicted",
            ", ".join(on.marks) or NONE,
        )
        rows.append(
            f"<tr{' class=wins' if 'recommended' in on.marks else ''}>"
            f"<th scope=row>{escape(on.gpu)}</th>"
            + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
            + "</tr>"
        )
    head = ("GPU", "Winner there", "Peak memory", "Total time", "Cost", "Known from", "Best for")
    return f"<section><h2>On each GPU</h2>{_plain_table(head, rows)}</section>"


def _stages(source: Source) -> str:
    """The winner's peaks outside its steps, too."""
    if not source.stages:
        return ""
    rows = []
    for stage in source.stages:
        sizes = (stage.device_used_bytes, stage.host_bytes, stage.disk_bytes)
        fits = VERDICTS.get(stage.verdict, NONE) if stage.device_used_bytes else NONE
        cells = (*(format_bytes(size) if size else NONE for size in sizes), fits)
        rows.append(
            f"<tr><th scope=row>{escape(stage.name)}</th>"
            + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
            + "</tr>"
        )
    head = ("Stage", "GPU", "Host memory", "Disk, added", "Fits the GPU")
    return f"<section><h2>From download to resumption</h2>{_plain_table(head, rows)}</section>"


def _missing(source: Source) -> str:
    if not source.missing:
        return ""
    return (
        "<p class=missing role=note>This answer was written by a release that did not record "
        f"{escape(', '.join(source.missing))}; run <code>whichlora run</code> again for these.</p>"
    )


def _provenance(source: Source) -> str:
    """Provenance of the figures: data, formulas, calibration, versions, device."""
    facts, texts = source.provenance, source.texts
    calibration, device = facts["calibration"], facts["device"]
    rows = [
        ("Config", texts["config"]),
        ("Written", _date(facts.get("date"))),
        ("Data", texts["tokens"]),
        ("Basis", texts["basis"]),
        ("Profiling policy", facts.get("profile")),
        ("Device", device.get("name")),
        ("Device key", texts["gpu"]),
        ("Device memory", format_bytes(device["memory_bytes"]) if device else None),
        ("Facts not verified", ", ".join(device.get("unverified", ()))),
        ("Calibration records", calibration.get("num_records")),
        ("Calibration digest", calibration.get("digest")),
        ("WhichLoRA", facts.get("whichlora")),
        ("Python", facts.get("python")),
        ("Libraries", _pairs(facts["libraries"])),
        *(("Measured on", _pairs(environment)) for environment in facts.get("environments", ())),
        *(("Note", note) for note in facts.get("notes", ())),
    ]
    return "".join(
        f"<dt>{title}</dt><dd>{escape(str(value))}</dd>" for title, value in rows if value
    )


def _date(text: str | None) -> str | None:
    """2026-11-21 07:47 UTC, where `text` is a time as our records write it."""
    match = re.fullmatch(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d):\d\d\+00:00", text or "")
    return f"{match[1]} {match[2]} UTC" if match else text


def _pairs(values: dict[str, Any]) -> str:
    shown = []
    for name, value in values.items():
        shown.append(_pairs(value) if isinstance(value, dict) else f"{name} {value}")
    return ", ".join(shown)
