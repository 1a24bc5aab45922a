"""The report in a real browser: hover, filters, limit lines, many points, themes, print."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from answers import answer_values, many_candidates

from whichlora.html import write_images, write_report

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the path"),
]
QUIET = ["--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-sync"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(
            executable_path=CHROMIUM, headless=True, chromium_sandbox=False, args=QUIET
        )
        yield chromium
        chromium.close()


class Opened:
    """A page, and what it asked for or complained about."""

    def __init__(self, browser: Any, path: Path, **context: Any) -> None:
        self.page = browser.new_context(
            **({"viewport": {"width": 1440, "height": 900}} | context)
        ).new_page()
        self.requests: list[str] = []
        self.faults: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on(
            "console",
            lambda message: self.faults.append(message.text) if message.type == "error" else None,
        )
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("#plane-finetune .point")

    def count(self, selector: str) -> int:
        return int(self.page.evaluate("s => document.querySelectorAll(s).length", selector))

    def shown(self) -> set[int]:
        """Candidates that the first plane shows."""
        indices = self.page.evaluate(
            "() => document.getElementById('plane-finetune').data"
            ".filter(one => one.customdata).flatMap(one => one.customdata)"
        )
        return set(indices)

    def wait_until(self, condition: str) -> None:
        """Wait for a JavaScript expression; the page forbids the eval that playwright uses."""
        for _ in range(100):
            if self.page.evaluate(condition):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"never came true: {condition}")

    def draw_all(self) -> None:
        for section in self.page.query_selector_all(".figure"):
            # playwright's own scrolling waits for frames, which a busy machine does not make
            section.evaluate("section => section.scrollIntoView()")
            section.wait_for_selector(".main-svg")


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Opened]:
    values = answer_values()
    opened = Opened(browser, written(tmp_path, values))
    yield opened
    assert opened.faults == []
    opened.page.context.close()


def written(folder: Path, values: dict[str, Any]) -> Path:
    (folder / "answer.json").write_text(json.dumps(values))
    return write_report(folder)


HOSTILE = "</script><img src=x onerror='window.hurt=1'><svg onload='window.hurt=1'>"


def test_names_and_reasons_of_a_stranger_run_no_code(browser: Any, tmp_path: Path) -> None:
    values = answer_values(basis=HOSTILE, tokens=HOSTILE, explanation=[HOSTILE, HOSTILE])
    hostile = {"model": HOSTILE, "name": HOSTILE, "variant": HOSTILE, "reason": HOSTILE}
    for row in [*values["inference"], *values["finetune"], *values["side_by_side"]]:
        row.update(hostile | {"gpu": HOSTILE, "breakdown": {HOSTILE: 2**30}})
    for row in values["comparison"]:
        row["name"] = HOSTILE
    values |= {"winner": values["finetune"][0], "front": [], "gpu": HOSTILE}
    opened = Opened(browser, written(tmp_path, values))
    opened.draw_all()
    opened.page.query_selector("#plane-finetune .scatterlayer .point").hover(force=True)
    opened.page.wait_for_selector("#plane-finetune .hovertext")
    assert opened.page.evaluate("window.hurt") is None
    assert opened.count("img, main > svg, td svg, [onload], [onerror]") == 0
    assert "<img src=x onerror='window.hurt=1'>" in opened.page.text_content("#table tbody td")
    assert opened.faults == []


def test_nothing_is_asked_for_but_the_file_itself(opened: Opened) -> None:
    opened.draw_all()
    assert [url for url in opened.requests if not url.startswith(("data:", "blob:"))] == [
        opened.page.url
    ]


def test_every_figure_is_drawn_with_its_name_for_screen_readers(opened: Opened) -> None:
    opened.draw_all()
    assert opened.count(".figure") == 8
    assert opened.count(".figure .main-svg") >= 8
    assert all(plot.get_attribute("aria-label") for plot in opened.page.query_selector_all(".plot"))


def test_the_first_screen_holds_the_answer_the_reasons_and_the_plane(opened: Opened) -> None:
    for selector in ("h1", ".cards", ".reasons", "#plane-finetune"):
        box = opened.page.query_selector(selector).bounding_box()
        assert box["y"] >= 0
        assert box["y"] + box["height"] <= 900


def test_hovering_a_point_names_the_candidate(opened: Opened) -> None:
    opened.page.query_selector("#plane-finetune .scatterlayer .point").hover(force=True)
    opened.page.wait_for_selector("#plane-finetune .hovertext")
    text = opened.page.query_selector("#plane-finetune .hoverlayer").text_content()
    assert "org/model-7b" in text
    assert "peak memory: 5.20 GiB" in text
    assert "known from: measured" in text


def test_limit_lines_are_dashed(opened: Opened) -> None:
    dashes = opened.page.evaluate(
        "() => [...document.querySelectorAll('#plane-finetune .shapelayer path')]"
        ".map(one => getComputedStyle(one).strokeDasharray)"
    )
    assert len(dashes) == 3
    assert all(dash not in ("", "none") for dash in dashes)


def test_a_filter_hides_candidates_in_figures_and_table_and_comes_back(opened: Opened) -> None:
    everyone, rows = opened.shown(), opened.count("#table tbody tr")
    opened.page.uncheck("input[name=model][value='org/tiny-1b']")
    assert len(opened.shown()) == len(everyone) / 2
    assert opened.count("#table tbody tr") == rows / 2
    opened.page.uncheck("input[name=source][value=predicted]")
    assert len(opened.shown()) == 2
    assert opened.page.text_content("#count") == "2 of 16 candidates"
    opened.page.click("button[type=reset]")
    opened.wait_until("document.querySelectorAll('#table tbody tr').length == 16")
    assert opened.shown() == everyone


def test_a_filter_works_from_the_keyboard(opened: Opened) -> None:
    opened.page.focus("input[name=method][value=dora]")
    opened.page.keyboard.press("Space")
    assert opened.page.text_content("#count") == "12 of 16 candidates"


def test_the_table_sorts_by_a_column_both_ways(opened: Opened) -> None:
    def peaks() -> list[str]:
        cells = opened.page.query_selector_all("#table tbody td:nth-child(7)")
        return [cell.text_content() for cell in cells]

    opened.page.focus("#table th:nth-child(7) button")
    opened.page.keyboard.press("Enter")
    rising = peaks()
    opened.page.keyboard.press("Enter")
    assert [text for text in peaks() if text != "–"] == [t for t in rising[::-1] if t != "–"]
    assert opened.page.get_attribute("#table th:nth-child(7)", "aria-sort") == "descending"


def test_any_candidate_can_be_broken_down_into_bytes(opened: Opened) -> None:
    opened.draw_all()
    last = "tiny-1b dora r=8, batch 4, 512 tokens"
    opened.page.select_option("#chooser", label=last)
    opened.wait_until(
        "document.getElementById('breakdown').data[0].y[0].startsWith('tiny-1b dora')"
    )
    first = opened.page.evaluate(
        "() => document.getElementById('breakdown').data"
        ".filter(one => one.type == 'bar').reduce((sum, one) => sum + one.x[0], 0)"
    )
    assert first == 16 * 2**30
    opened.page.click("#unchoose")
    opened.wait_until(
        "document.getElementById('breakdown').data[0].y[0].startsWith('model-7b lora')"
    )


def test_five_thousand_points_are_drawn_and_filtered(browser: Any, tmp_path: Path) -> None:
    opened = Opened(browser, written(tmp_path, many_candidates(5000)))
    assert len(opened.shown()) == 5000
    opened.page.uncheck("input[name=method][value=dora]")
    assert len(opened.shown()) < 5000
    assert opened.count("#table tbody tr") == 200
    opened.page.query_selector("#plane-finetune .scatterlayer .point").hover(force=True)
    opened.page.wait_for_selector("#plane-finetune .hovertext")
    assert opened.faults == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_follows_the_system_and_its_button_turns_it(
    browser: Any, tmp_path: Path, scheme: str
) -> None:
    opened = Opened(browser, written(tmp_path, answer_values()), color_scheme=scheme)

    def brightness() -> tuple[int, int]:
        """Of the page and of a figure's text, 0 to 255."""
        return tuple(
            opened.page.evaluate(
                "() => [getComputedStyle(document.body).backgroundColor, getComputedStyle("
                "document.querySelector('#plane-finetune .xtick text')).fill]"
                ".map(text => Number(text.match(/[0-9]+/)[0]))"
            )
        )

    back, text = brightness()
    assert (back > 200 > text + 100) if scheme == "light" else (text > 200 > back + 100)
    opened.page.click("#theme")
    turned = brightness()
    assert (turned[0] > 128) != (back > 128)
    assert (turned[1] > 128) != (text > 128)


def test_print_has_every_figure_within_the_paper_and_no_controls(opened: Opened) -> None:
    opened.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    opened.page.emulate_media(media="print")
    assert opened.count(".figure .main-svg") >= 8
    widths = opened.page.evaluate(
        "() => [...document.querySelectorAll('.plot .main-svg')].map(one => one.clientWidth)"
    )
    assert max(widths) <= 680
    assert not opened.page.is_visible("#filters")
    assert opened.page.pdf(format="A4").startswith(b"%PDF")
    opened.page.emulate_media(media="screen")
    opened.page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert opened.page.is_visible("#filters")


@pytest.mark.parametrize("width", [1440, 1024, 400])
def test_nothing_is_wider_than_the_window(browser: Any, tmp_path: Path, width: int) -> None:
    viewport = {"width": width, "height": 768}
    opened = Opened(browser, written(tmp_path, answer_values()), viewport=viewport)
    opened.draw_all()
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width


def test_two_plots_stand_beside_each_other_or_on_a_phone_one_above_the_other(
    browser: Any, tmp_path: Path
) -> None:
    path = written(tmp_path, answer_values())

    def domains(width: int) -> Any:
        opened = Opened(browser, path, viewport={"width": width, "height": 800})
        opened.draw_all()
        return opened.page.evaluate(
            "() => { const { xaxis, xaxis2, yaxis, yaxis2 } ="
            " document.getElementById('accuracy')._fullLayout;"
            " return [xaxis, xaxis2, yaxis, yaxis2].map((axis) => axis.domain); }"
        )

    (first, second, *_), (_, _, upper, lower) = domains(1440), domains(390)
    assert first[1] < second[0]
    assert lower[1] < upper[0]


def test_the_reasons_of_the_table_are_on_the_screen_of_a_laptop(
    browser: Any, tmp_path: Path
) -> None:
    viewport = {"width": 1366, "height": 768}
    opened = Opened(browser, written(tmp_path, answer_values()), viewport=viewport)
    edges = opened.page.evaluate(
        "() => [...document.querySelectorAll('td.why')]"
        ".map((one) => one.getBoundingClientRect().right)"
    )
    assert len(edges) == 16
    assert max(edges) <= 1366


def test_an_interval_stands_in_the_cell_of_its_value(opened: Opened) -> None:
    titles = opened.page.evaluate(
        "() => [...document.querySelectorAll('#table th')].map((one) => one.textContent)"
    )
    assert not any("nterval" in title for title in titles)
    assert opened.count("#table td.number small") > 0


@pytest.mark.parametrize("image_format", ["png", "svg"])
def test_every_figure_can_be_a_picture(tmp_path: Path, image_format: str) -> None:
    pytest.importorskip("kaleido", reason="kaleido is not installed")
    written(tmp_path, answer_values())
    paths = write_images(tmp_path, image_format)
    assert len(paths) == 8
    start = {"png": b"\x89PNG", "svg": b"<svg"}[image_format]
    assert all(path.read_bytes().startswith(start) for path in paths)
