"""The report's data layer: what the page holds, parsed, without a browser."""

from __future__ import annotations

import hashlib
import json
import re
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from answers import answer_values, many_candidates, row
from hypothesis import given
from hypothesis import strategies as st

from whichlora.cli import main
from whichlora.errors import ConfigError, DataFileError
from whichlora.html import axes, write_images, write_report
from whichlora.html.figures import build_figures
from whichlora.html.marks import OUT_OF_MEMORY
from whichlora.html.source import read_source
from whichlora.units import GiB

NEW_KEYS = ("front", "explanation", "limits", "comparison", "side_by_side", "dataset", "provenance")
NEW_FIELDS = (
    "gpu", "name", "variant", "num_trainable_params", "usable_bytes", "predicted_peak_bytes",
    "moment", "breakdown", "chance",
)  # fmt: skip


class Page(HTMLParser):
    """Text outside of scripts, scripts by type, and every address that the page names."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.scripts, self.addresses = "", [], []  # type: ignore[var-annotated]
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag
        self.addresses += [value for name, value in attrs if name in ("src", "href")]
        if tag == "script":
            self.scripts.append((dict(attrs).get("type"), ""))

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            kind, text = self.scripts[-1]
            self.scripts[-1] = (kind, text + data)
        elif self._inside != "style":
            self.text += data

    @property
    def data(self) -> Any:
        return json.loads(next(text for kind, text in self.scripts if kind == "application/json"))


def write_answer(folder: Path, values: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "answer.json").write_text(json.dumps(values))
    return folder


def page_of(folder: Path, values: dict[str, Any]) -> Page:
    return Page(write_report(write_answer(folder, values)).read_text(encoding="utf-8"))


def figure(folder: Path, name: str, values: dict[str, Any]) -> dict[str, Any]:
    source = read_source(write_answer(folder, values))
    return next(drawn for drawn in build_figures(source) if drawn["id"] == name)


# --- the page -----------------------------------------------------------------------------


def test_the_answer_and_its_reasons_stand_in_the_text_of_the_page(tmp_path: Path) -> None:
    text = page_of(tmp_path, answer_values()).text
    assert "Fine-tune org/model-7b with lora r=8, batch size 1" in text
    assert "measured 5.20 GiB against peak memory limit 8.00 GiB" in text
    assert "model-7b lora r=8, batch 4 left out: too slow" in text


def test_a_training_that_was_run_says_what_it_took_and_what_was_expected(tmp_path: Path) -> None:
    text = page_of(tmp_path, answer_values(training={"train_s": 1100.0})).text
    assert "run with out/train.py and took 18 min 20 s (expected 16 min 40 s)." in text


def test_where_nothing_fits_the_page_says_so_and_what_came_closest(tmp_path: Path) -> None:
    lines = ["Nothing meets every limit.", "Closest: model-7b lora r=8."]
    text = page_of(tmp_path, answer_values(winner=None, explanation=lines)).text
    assert "Nothing meets every limit." in text
    assert "Closest: model-7b lora r=8." in text


def test_the_page_names_no_address_but_places_in_itself(tmp_path: Path) -> None:
    page = page_of(tmp_path, answer_values())
    assert page.addresses == ["#candidates"]
    style = (tmp_path / "report.html").read_text().split("<style>")[1].split("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style


def test_every_candidate_is_in_the_data_with_what_the_filters_need(tmp_path: Path) -> None:
    values = answer_values()
    data = page_of(tmp_path, values).data
    assert len(data["points"]) == len(values["inference"]) + len(values["finetune"])
    assert data["points"][data["winner"]]["wins"]
    for choice in data["filters"]:
        assert {point[choice["key"]] for point in data["points"]} <= set(choice["values"])


@pytest.mark.parametrize(
    "hostile",
    [
        "</script><script>alert(1)</script>",
        "<!--<script>",
        "<img src=x onerror=alert(1)>",
        "&amp;'\"",
    ],
)
def test_a_hostile_name_stays_text(tmp_path: Path, hostile: str) -> None:
    values = answer_values(basis=hostile, tokens=hostile, explanation=[hostile, hostile])
    values["finetune"] = [row(model=hostile, name=hostile, reason=hostile)]
    values |= {"winner": values["finetune"][0], "front": []}
    values["side_by_side"] = [row(variant=hostile)]
    values["provenance"]["device"]["name"] = hostile
    page = page_of(tmp_path, values)
    assert len(page.scripts) == 3
    assert page.addresses == ["#candidates"]
    assert hostile in page.text
    assert page.data["points"][-1]["model"] == hostile


def test_what_a_terminal_or_a_reader_would_not_see_is_shown_as_its_escape(tmp_path: Path) -> None:
    hidden = "a\x1b[2Jb\u202ec\x00"
    values = answer_values(basis=hidden, explanation=[hidden, hidden])
    values["finetune"][0]["model"] = values["winner"]["model"] = hidden
    page = page_of(tmp_path, values)
    assert r"a\x1b[2Jb\u202ec\x00" in page.text
    assert not set(hidden) - set("abc[2J") & set((tmp_path / "report.html").read_text())


@given(name=st.text(max_size=40))
def test_any_text_comes_back_from_the_data_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    from whichlora.html.template import script_json

    text = script_json({"name": name})
    assert "<" not in text
    assert json.loads(text) == {"name": name}


def test_five_thousand_candidates_make_a_page_of_a_few_megabytes(tmp_path: Path) -> None:
    page = page_of(tmp_path, many_candidates(5000))
    assert len(page.data["points"]) == 5004
    assert (tmp_path / "report.html").stat().st_size < 10e6


def test_the_side_by_side_table_has_counts_shares_bytes_and_hours(tmp_path: Path) -> None:
    text = re.sub(r"\s+", " ", page_of(tmp_path, answer_values()).text)
    assert "lora r=410M (0.143 %)6.00 GiB16 min 40 s" in text


def test_the_plotly_in_the_page_is_the_one_that_its_source_names() -> None:
    folder = files("whichlora.html") / "plotlyjs"
    source = json.loads((folder / "source.json").read_text())
    script = (folder / "plotly.min.js").read_bytes()
    assert hashlib.sha256(script).hexdigest() == source["sha256"]
    assert f"plotly.js v{source['version']}\n".encode() in script[:100]
    assert "MIT License" in (folder / "LICENSE").read_text()


# --- old and broken answers ---------------------------------------------------------------


def old_answer() -> dict[str, Any]:
    """What the release before the report wrote."""
    values = {key: value for key, value in answer_values().items() if key not in NEW_KEYS}

    def plain(row: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in row.items() if key not in NEW_FIELDS}

    values["finetune"] = [plain(row) for row in values["finetune"]]
    values["inference"] = [plain(row) for row in values["inference"]]
    return values | {"winner": values["finetune"][0]}


def test_an_old_answer_makes_a_reduced_report_that_says_what_is_missing(tmp_path: Path) -> None:
    page = page_of(tmp_path, old_answer())
    names = [drawn["id"] for drawn in page.data["figures"]]
    assert names == ["plane-finetune", "plane-inference", "inference", "finetune"]
    assert "did not record" in page.text
    for part in (
        "the reasons",
        "the limit lines",
        "methods and ranks side by side",
        "bytes by part",
    ):
        assert part in page.text
    assert "Fine-tune org/model-7b with lora r=8" in page.text


def test_a_full_answer_lacks_nothing(tmp_path: Path) -> None:
    assert read_source(write_answer(tmp_path, answer_values())).missing == []


def test_an_answer_of_a_newer_release_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataFileError, match="schema_version is 99, this release reads 1 to"):
        read_source(write_answer(tmp_path, answer_values(schema_version=99)))


def test_a_folder_without_an_answer_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataFileError, match=r"has no answer\.json; give the output directory"):
        write_report(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"finetune": [{}]},
        {"finetune": 3},
        {"winner": 1},
        {"winner": row(model="org/not-among-the-candidates")},
        {"limits": []},
        {"limits": {"device_bytes": "x"}},
    ],
)
def test_a_damaged_answer_is_refused_with_its_path(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(DataFileError, match=r"answer\.json: is not an answer of whichlora run"):
        write_report(write_answer(tmp_path, answer_values(**change)))


# --- figures ------------------------------------------------------------------------------


def test_the_plane_shows_every_candidate_once_and_rings_the_winner(tmp_path: Path) -> None:
    values = answer_values()
    drawn = figure(tmp_path, "plane-finetune", values)
    _, *models, ring = [trace for trace in drawn["data"] if "customdata" in trace]
    shown = [i for trace in models for i in trace["customdata"]]
    first = len(values["inference"])
    assert sorted(shown) == list(range(first, first + len(values["finetune"])))
    assert ring["customdata"] == [first]


def test_the_front_is_a_step_line_through_its_candidates(tmp_path: Path) -> None:
    values = answer_values()
    front, *_ = figure(tmp_path, "plane-finetune", values)["data"]
    first = len(values["inference"])
    assert front["customdata"] == [first + 1, first]
    assert front["x"] == [values["finetune"][i]["total_time_s"] for i in (1, 0)]
    assert front["line"]["shape"] == "hv"


def test_limits_near_the_points_are_dashed_lines_at_their_value(tmp_path: Path) -> None:
    layout = figure(tmp_path, "plane-finetune", answer_values())["layout"]
    lines = {(line.get("x0"), line.get("y0")): line["line"]["dash"] for line in layout["shapes"]}
    assert lines == {(1500.0, 0): "dash", (0, 8 * GiB): "dash", (0, 24 * GiB): "dash"}
    assert {label["text"] for label in layout["annotations"]} == {
        "limit 25 min 00 s", "limit 8.00 GiB", "device 24.00 GiB",
    }  # fmt: skip


def test_a_limit_far_beyond_every_point_is_told_in_words(tmp_path: Path) -> None:
    values = answer_values()
    values["limits"]["device_bytes"] = 800 * GiB
    drawn = figure(tmp_path, "plane-finetune", values)
    assert "The device of 800.0 GiB lies above the plot." in drawn["about"]
    assert all(line.get("y0") != 800 * GiB for line in drawn["layout"]["shapes"])


def test_what_ran_out_of_memory_is_a_cross_and_what_would_is_an_open_one(tmp_path: Path) -> None:
    values = answer_values()
    values["finetune"][5] |= {"peak_bytes": 30 * GiB}
    drawn = figure(tmp_path, "finetune", values)
    first = len(values["inference"])
    symbols = {
        i: symbol
        for trace in drawn["data"]
        for i, symbol in zip(trace["customdata"], trace["marker"]["symbol"], strict=True)
    }
    assert symbols[first] == "circle"
    assert symbols[first + 1] == "circle-open"
    assert symbols[first + 3] == OUT_OF_MEMORY
    assert symbols[first + 5] == f"{OUT_OF_MEMORY}-open"


def test_parts_of_a_bar_add_up_to_the_predicted_peak(tmp_path: Path) -> None:
    values = answer_values()
    drawn = figure(tmp_path, "breakdown", values)
    bars = [trace for trace in drawn["data"] if trace["type"] == "bar"]
    points = values["inference"] + values["finetune"]
    for place, i in enumerate(bars[0]["customdata"]):
        assert sum(bar["x"][place] for bar in bars) == points[i]["predicted_peak_bytes"]


def test_total_time_grows_with_the_data_from_what_this_data_takes(tmp_path: Path) -> None:
    values = answer_values()
    winner, *_ = figure(tmp_path, "dataset", values)["data"]
    at_this_size = winner["y"][winner["x"].index(200)]
    assert at_this_size == pytest.approx(values["winner"]["total_time_s"])
    assert winner["y"][-1] == pytest.approx(100 * at_this_size)


def test_error_bars_reach_from_bound_to_bound(tmp_path: Path) -> None:
    cold, *_ = figure(tmp_path, "accuracy", answer_values())["data"]
    assert cold["y"][0] + cold["error_y"]["array"][0] == 6 * GiB
    assert cold["y"][0] - cold["error_y"]["arrayminus"][0] == 4 * GiB


def test_a_run_of_one_stage_alone_still_has_a_report(tmp_path: Path) -> None:
    page = page_of(tmp_path, answer_values(finetune=[], winner=None, side_by_side=[]))
    assert [drawn["id"] for drawn in page.data["figures"]] == [
        "plane-inference",
        "inference",
        "accuracy",
    ]


def test_many_models_have_numbers_in_marks_and_legend_and_few_do_not(tmp_path: Path) -> None:
    def plane(count: int) -> list[dict[str, Any]]:
        folder = write_answer(tmp_path / str(count), many_candidates(count))
        figures = {drawn["id"]: drawn for drawn in build_figures(read_source(folder))}
        traces: list[dict[str, Any]] = figures["plane-finetune"]["data"]
        return traces

    many = plane(60)  # of 20 models
    marked = [set(trace["text"]) for trace in many if "text" in trace]
    numbers = set().union(*marked)
    assert len(numbers) == len(marked) == 20  # one for each model, in all of its marks
    legend = {trace["name"].partition(" ")[0] for trace in many if trace["x"] == [None]}
    assert numbers <= legend
    assert not any("text" in trace for trace in plane(4))  # and few of inference


def test_reasons_after_the_sixth_are_folded_away(tmp_path: Path) -> None:
    lines = ["Winner: it.", *(f"reason {i}" for i in range(20))]
    text = page_of(tmp_path, answer_values(explanation=lines)).text
    assert "14 more reasons" in text
    assert all(line in text for line in lines[1:])


@pytest.mark.parametrize("make", [axes.seconds_axis, axes.bytes_axis, axes.counts_axis])
@given(
    low=st.floats(1e-6, 1e12),
    ratio=st.floats(1.0, 1e6),
)
def test_an_axis_shows_its_values_with_a_few_distinct_labels(
    make: Any, low: float, ratio: float
) -> None:
    axis = make("x", [low, low * ratio])
    bottom, top = axis["range"]
    assert 10**bottom <= low
    assert low * ratio <= 10**top
    assert 2 <= len(axis["tickvals"]) <= axes.MAX_TICKS or low < 1e3
    assert all(10**bottom <= tick <= 10**top * 1.0001 for tick in axis["tickvals"])


# --- the command --------------------------------------------------------------------------


def test_the_command_says_where_the_report_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_answer(tmp_path, answer_values())
    output = tmp_path / "elsewhere" / "x.html"
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path), "--output", str(output)])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"report: {output}\n"
    assert output.stat().st_size > 1e6


def test_training_data_does_not_become_a_report(tmp_path: Path) -> None:
    folder = write_answer(tmp_path / "run", answer_values())
    for name, fault in (
        ("alpaca.jsonl", "ends with .jsonl; the report is .html"),
        ("mine.html", "no record of writing it; give another --output"),
    ):
        mine = tmp_path / name
        mine.write_text("mine")
        with pytest.raises((ConfigError, DataFileError), match=fault):
            write_report(folder, mine)
        assert mine.read_text() == "mine"


def test_an_answer_file_may_be_named_itself(tmp_path: Path) -> None:
    folder = write_answer(tmp_path / "run", answer_values())
    copied = tmp_path / "copied.json"
    (folder / "answer.json").rename(copied)
    assert write_report(copied) == tmp_path / "report.html"


def test_pictures_without_kaleido_say_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "kaleido", None)
    write_answer(tmp_path, answer_values())
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path), "--static", "svg"])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert re.search(r"--static: needs kaleido(, plotly)?: pip install 'whichlora\[images\]'", told)


def test_pictures_without_a_chrome_say_what_they_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("kaleido", reason="kaleido is not installed")

    def no_chrome(*_: Any, **__: Any) -> None:
        raise RuntimeError("\n\nKaleido requires Google Chrome to be installed.\nmore")

    monkeypatch.setattr("plotly.io.write_images", no_chrome)
    with pytest.raises(ConfigError, match=r"could not draw \(Kaleido requires .* a Chrome or"):
        write_images(write_answer(tmp_path, answer_values()), "svg")


def test_models_are_named_without_their_organisation_unless_two_share_the_name(
    tmp_path: Path,
) -> None:
    values = answer_values()
    names = {trace["name"] for trace in figure(tmp_path, "plane-inference", values)["data"]}
    assert names >= {"model-7b", "tiny-1b"}
    for trace in values["inference"][2:]:
        trace["model"] = "other/model-7b"
    names = {trace["name"] for trace in figure(tmp_path, "plane-inference", values)["data"]}
    assert names >= {"org/model-7b", "other/model-7b"}
