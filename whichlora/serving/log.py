"""A running engine's log or metrics → numbers and settings; nothing of the text is evaluated."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from whichlora.memory.entries import Fact

MOST_LINE = 20_000  # characters; a longer line is cut
MOST_VALUE = 1e15
# What speaks of memory, so that a line of it which nothing is read from is told.
_OF_MEMORY = re.compile(r"(?i)memory|kv.?cache|\bblocks\b|mem usage|max_total_num_tokens")
_PAIR = re.compile(
    r"""['"]?\b([A-Za-z_]\w*)['"]?\s*[=:]\s*(?:'([^']*)'|"([^"]*)"|([^\s,'"(){}=:]+)(?![=:\w]))"""
)
# A setting that is a mapping, such as limit_mm_per_prompt; the braces before it are of all.
_MAPPING = re.compile(
    r"""['"]?\b([A-Za-z_]\w*)['"]?\s*[=:]\s*(?=(\{(?:[^{}]|\{[^{}]{0,200}\}){1,400}\}))"""
)
_LITERALS = {"True": "true", "False": "false", "None": "null"}
_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)\s*$")
_EDGE = re.compile(r'\ble="([^"]+)"')

_NEVER = r"(?!)"
NUMBER = r"(-?[\d,]*\.?\d+)"  # as engines print one, in a group of its own
SAMPLE = r"(?:\{.*\})? ([\d.]+(?:e\+\d+)?)\s*$"  # what follows the name of a metric, likewise


def label(engine: str, name: str) -> str:
    """Regular expression of the metrics of `engine` whose group is the value of a label."""
    return rf'^{engine}:\w+\{{(?:[^}}]*,)?{name}="([^"]+)"'


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """A number that an engine prints.

    Args:
        states: what it is called in a record, with its unit.
        pattern: regular expression whose group is the number; its commas are left out.
        unit: of the number, in base units.
        least: whether the smallest of several lines counts, as of the ranks of one model.
        adds_up: whether several lines are parts of one number.
        is_mean: whether it is the mean of several lines, as of requests.
        is_difference: whether it is of two readings of a counter, and may be below 0.
        facts: what is predicted of it: the entries of a start that have these.
    """

    states: str
    pattern: str
    unit: float = 1.0
    least: bool = False
    adds_up: bool = False
    is_mean: bool = False
    is_difference: bool = False
    facts: tuple[Fact, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LogText:
    """A setting that an engine prints in a line of its own.

    Args:
        pattern: regular expression whose group is its value.
        words: ours of the engine's, where they differ.
        of_all: whether all lines must agree on it; else the first one counts.
    """

    setting: str
    pattern: str
    of_all: bool = False
    words: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLog:
    """How the log of an engine is read.

    Args:
        lines: numbers.
        texts: settings in lines of their own.
        settings: regular expression of the lines that list settings, as name=value or name: value.
        names: what a run calls a setting, by its name there: model, context, dtype, quantization.
        version: regular expression whose group is the release; empty where no line states it.
        refusals: regular expressions of the line with which it gives up.
        histograms: what the median of a Prometheus histogram is called, by its name there.
        means: what the mean of one is called.
        shares: by number, what it is an equal share of, and of how many. What it is a share of is
            not recorded, and goes before a line that states the share.
        shared_where: a setting, and its value, with which each has all of it.
        one_by_one: whether its times are of requests one after the other, where no line says how
            many run.
    """

    lines: tuple[LogLine, ...]
    texts: tuple[LogText, ...] = ()
    settings: str = ""
    names: Mapping[str, str]
    version: str = ""
    refusals: tuple[str, ...] = ()
    histograms: Mapping[str, str] = field(default_factory=dict)
    means: Mapping[str, str] = field(default_factory=dict)
    shares: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    shared_where: tuple[str, str] | None = None
    one_by_one: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LogReading:
    """What a log states.

    Args:
        values: by name, in base units.
        settings: as text, by the engine's name of it.
        differing: what lines state that do not agree, by a name that is not in `settings`.
        refusal: the line with which the engine gave up; empty where it started.
        not_understood: numbers of the lines that speak of memory, and that nothing was read from.
    """

    values: Mapping[str, float]
    settings: Mapping[str, str]
    differing: Mapping[str, tuple[str, ...]]
    version: str
    refusal: str
    num_lines: int
    num_read: int
    not_understood: tuple[int, ...]


def read_log(log: EngineLog, lines: Iterable[str]) -> LogReading:
    """What `lines` state, as `log` reads them."""
    numbers = [(line, re.compile(line.pattern)) for line in log.lines]
    texts = [(line, re.compile(line.pattern)) for line in log.texts]
    listing, version = (re.compile(each or _NEVER) for each in (log.settings, log.version))
    refusals = [re.compile(pattern) for pattern in log.refusals]
    values: dict[str, float] = {}
    settings: dict[str, str] = {}
    samples: dict[str, _Histogram] = {}
    means: dict[str, list[float]] = {}
    words: dict[str, dict[str, None]] = {}  # in order
    release, refusal, num_lines, num_read = "", "", 0, 0
    strange: list[int] = []
    for number, text in enumerate(lines, 1):
        text, num_lines = text[:MOST_LINE], number
        is_read = False
        for line, pattern in numbers:
            for match in pattern.finditer(text):
                if line.is_mean and (value := _number(match[1])) is not None:
                    means.setdefault(line.states, []).append(value * line.unit)
                    is_read = True
                elif not line.is_mean:
                    is_read |= _take(values, line, match[1])
        for setting, pattern in texts:
            if stated := pattern.search(text):
                word = stated[1].strip()
                word = setting.words.get(word, word)
                words.setdefault(setting.setting, {})[word] = None
                is_read = True
        if listing.search(text):
            is_read = True
            _take_settings(settings, text)
        if found := version.search(text):
            is_read, release = True, release or found[1]
        if any(pattern.search(text) for pattern in refusals):
            is_read, refusal = True, refusal or text.strip()
        is_read |= _take_sample(samples, {**log.histograms, **log.means}, text)
        num_read += is_read
        if not is_read and _OF_MEMORY.search(text) and not text.startswith("#"):
            strange.append(number)
    must_agree = {text.setting for text in log.texts if text.of_all}
    differing = {
        name: tuple(each) for name, each in words.items() if name in must_agree and len(each) > 1
    }
    settings = {name: next(iter(each)) for name, each in words.items()} | settings
    settings = {name: text for name, text in settings.items() if name not in differing}
    values |= {name: sum(each) / len(each) for name, each in means.items()}
    for name, called in log.histograms.items():
        values |= samples.get(name, _Histogram()).quantiles(called)
    for name, called in log.means.items():
        values |= samples.get(name, _Histogram()).mean(called)
    is_shared = log.shared_where is not None and log.shared_where in settings.items()
    for name, (whole, count) in log.shares.items():
        if (of_all := values.pop(whole, None)) and (count in values or name not in values):
            values[name] = of_all // max(1.0, 1.0 if is_shared else values.get(count, 1.0))
    return LogReading(
        values=values,
        settings=settings,
        differing=differing,
        version=release,
        refusal=refusal,
        num_lines=num_lines,
        num_read=num_read,
        not_understood=tuple(strange),
    )


def _number(text: str) -> float | None:
    """A plain number that bytes, tokens or seconds can be; None for any other text."""
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) and abs(value) <= MOST_VALUE else None


def _take_settings(settings: dict[str, str], text: str) -> None:
    for name, *forms in _PAIR.findall(text):
        settings.setdefault(name, next(filter(None, forms), ""))
    for name, stated in _MAPPING.findall(text):
        if mapping := _as_json(stated):
            settings.setdefault(name, mapping)


def _as_json(text: str) -> str:
    """A Python mapping as JSON; empty where it is none of plain values."""
    for python, plain in _LITERALS.items():
        text = re.sub(rf"\b{python}\b", plain, text)
    try:
        return json.dumps(json.loads(text.replace("'", '"')))
    except (ValueError, RecursionError):
        return ""


def _take(values: dict[str, float], line: LogLine, text: str) -> bool:
    number = _number(text)
    if number is None or abs(number * line.unit) > MOST_VALUE:
        return False
    value = number * line.unit
    if line.adds_up:
        values[line.states] = values.get(line.states, 0.0) + value
        return True
    choose = min if line.least else max
    values[line.states] = choose(value, values.get(line.states, value))
    return True


@dataclass(slots=True)
class _Histogram:
    """A Prometheus histogram, summed over its labels.

    Args:
        buckets: number of observations up to each edge.
    """

    buckets: dict[float, float] = field(default_factory=dict)
    total: float = 0.0
    count: float = 0.0

    def quantiles(self, called: str) -> dict[str, float]:
        """Median and 95 % quantile, interpolated within a bucket as Prometheus does it."""
        return {
            name: value
            for name, share in ((called, 0.5), (called.replace("_s", "_p95_s"), 0.95))
            if (value := self._quantile(share)) is not None
        }

    def mean(self, called: str) -> dict[str, float]:
        return {called: self.total / self.count} if self.count else {}

    def _quantile(self, share: float) -> float | None:
        edges = sorted(self.buckets)
        if not edges or not self.buckets[edges[-1]]:
            return None
        rank = share * self.buckets[edges[-1]]
        low, below = 0.0, 0.0
        for edge in edges:
            upto = self.buckets[edge]
            if upto >= rank and upto > below:
                if math.isinf(edge):
                    return low
                return low + (edge - low) * (rank - below) / (upto - below)
            low, below = edge, upto
        return None


def _take_sample(samples: dict[str, _Histogram], wanted: Mapping[str, str], text: str) -> bool:
    """Take in a line of Prometheus text, if it is of a histogram in `wanted`."""
    match = _SAMPLE.match(text)
    if match is None:
        return False
    name, _, kind = match[1].rpartition("_")
    value = _number(match[3])
    if name not in wanted or value is None or kind not in ("bucket", "sum", "count"):
        return False
    histogram = samples.setdefault(name, _Histogram())
    if kind == "sum":
        histogram.total += value
    elif kind == "count":
        histogram.count += value
    elif edge := _EDGE.search(match[2] or ""):
        upto = math.inf if edge[1] == "+Inf" else _number(edge[1])
        if upto is not None:
            histogram.buckets[upto] = histogram.buckets.get(upto, 0.0) + value
    return True
