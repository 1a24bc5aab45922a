"""The page in a real browser: the same bytes, by keyboard, on a telephone, without a stranger."""

from __future__ import annotations

import functools
import json
import re
import shlex
import shutil
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from click.testing import CliRunner

from whichlora.cli import main
from whichlora.page.build import build
from whichlora.page.pyodide import cached

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
PYODIDE = cached()  # before a test has another cache
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the path"),
    pytest.mark.skipif(not PYODIDE.is_file(), reason=f"no {PYODIDE}: `whichlora page` fetches it"),
]
QUIET = ["--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-sync"]
LLAMA = "meta-llama/Llama-3.1-8B"
MOST_MS = 180_000  # of a slow machine


class Handler(SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The site on loopback."""
    folder = tmp_path_factory.mktemp("site")
    build(folder, PYODIDE)
    handler = functools.partial(Handler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(
            executable_path=CHROMIUM, headless=True, chromium_sandbox=False, args=QUIET
        )
        yield chromium
        chromium.close()


class Opened:
    """The page at one question, and what it asked for or complained about."""

    def __init__(
        self, browser: Any, address: str, question: dict[str, str], **context: Any
    ) -> None:
        self.page = browser.new_context(**context).new_page()
        self.requests: list[str] = []
        self.faults: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on(
            "console",
            lambda message: self.faults.append(message.text) if message.type == "error" else None,
        )
        self.page.goto(address + (f"#{urlencode(question)}" if question else ""))

    def text(self, selector: str) -> str:
        return str(self.page.text_content(selector))

    def wait_until(self, condition: str) -> None:
        """Wait for a JavaScript expression; the page forbids the eval that playwright uses."""
        for _ in range(MOST_MS // 50):
            if self.page.evaluate(condition):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"never came true: {condition}; {self.faults}")

    def answered(self) -> None:
        self.wait_until("['done', 'failed'].includes(document.body.dataset.state)")
        assert self.page.evaluate("document.body.dataset.state") != "failed", self.text("#fault")


@pytest.fixture(scope="module")
def opened(browser: Any, address: str) -> Opened:
    question = {"gpu": "4090", "model": "llama 3.1 8b", "method": "qlora"}
    return Opened(browser, address, question, viewport={"width": 390, "height": 844})


def test_it_answers_a_link_with_the_bytes_of_the_command_line(opened: Opened) -> None:
    opened.answered()
    command = opened.text(".copy code")
    program, *words = shlex.split(command)
    assert (program, words[:2]) == ("whichlora", ["estimate", "llama 3.1 8b"])
    printed = CliRunner().invoke(main, [*words, "--json"]).stdout
    assert opened.text("#document") + "\n" == printed
    assert opened.text("#headline h2") == (
        "Llama-3.1-8B qlora r=16, batch 1, 2048 tokens on rtx-4090-24gb"
    )
    assert opened.faults == []


def test_it_asks_its_own_host_alone(opened: Opened, address: str) -> None:
    opened.answered()
    strangers = [url for url in opened.requests if not url.startswith((address, "blob:", "data:"))]
    assert strangers == []
    refused = opened.page.evaluate(
        "fetch('http://127.0.0.1:9/').then(() => 'asked', (error) => String(error))"
    )
    assert "Failed to fetch" in refused
    assert any("Content Security Policy" in fault for fault in opened.faults)
    opened.faults.clear()


def test_nothing_is_wider_than_a_telephone(opened: Opened) -> None:
    opened.answered()
    assert opened.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    for theme in ("light", "dark"):
        opened.page.emulate_media(color_scheme=theme)
        opened.wait_until(f"document.documentElement.dataset.theme === '{theme}'")
        for selector in (
            ".status",
            ".verdict",
            ".question label",
            ".legend .share",
            ".cards small",
        ):
            assert contrast(opened, selector) >= 4.5, (theme, selector)


def contrast(opened: Opened, selector: str) -> float:
    """Of a text against the nearest background behind it, as WCAG counts it."""
    colours = opened.page.evaluate(
        """(selector) => {
          let element = document.querySelector(selector);
          const text = getComputedStyle(element).color;
          const back = (at) => getComputedStyle(at).backgroundColor;
          const clear = () => element.parentElement && /, 0\\)$/.test(back(element));
          while (clear()) element = element.parentElement;
          return [text, back(element)];
        }""",
        selector,
    )
    lights = []
    for colour in colours:
        channels = [int(number) / 255 for number in re.findall(r"\d+", colour)[:3]]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        lights.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(lights) + 0.05) / (min(lights) + 0.05)


def test_the_keyboard_changes_the_question_and_a_fault_is_one_line(opened: Opened) -> None:
    opened.answered()
    opened.page.focus("#field-model")
    opened.page.keyboard.press("Control+A")
    opened.page.keyboard.type("<img src=x onerror=alert(1)>")
    opened.page.keyboard.press("Enter")
    opened.wait_until("!document.getElementById('fault').hidden")
    assert "<img src=x onerror=alert(1)>" in opened.text("#fault")
    assert opened.page.evaluate("document.querySelector('#fault img')") is None
    opened.page.keyboard.press("Control+A")
    opened.page.keyboard.type("qwen3 8b")
    opened.page.keyboard.press("Tab")
    opened.wait_until("document.querySelector('#headline h2').textContent.startsWith('Qwen3-8B')")
    assert opened.page.evaluate("document.getElementById('fault').hidden")
    assert "model=qwen3+8b" in opened.page.url
    assert opened.page.evaluate("document.activeElement.matches('input, select, button')")
    assert opened.faults == []


def test_a_visitor_sees_the_models_of_a_card_before_python_has_loaded(
    browser: Any, address: str
) -> None:
    first = Opened(browser, address, {}, java_script_enabled=True)
    shown = first.text("#headline h2")
    assert shown.endswith("on rtx-4090-24gb")
    assert first.text("#status") == "Python is loading"
    first.wait_until("document.getElementById('status').textContent === 'ready'")
    first.page.fill("#field-seq_len", "2049")  # the same question but for a token
    first.page.press("#field-seq_len", "Enter")
    first.answered()
    assert first.text("#headline h2") == shown.replace("2048", "2049")
    assert first.faults == []


def test_a_folder_is_refused_with_one_line(browser: Any, tmp_path: Path) -> None:
    build(tmp_path, PYODIDE)
    file = Opened(browser, (tmp_path / "index.html").as_uri(), {})
    file.wait_until("document.body.dataset.state === 'failed'")
    assert "serve it, such as with: python -m http.server" in file.text("#fault")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Training data and a file of Axolotl, in the folder of the command line."""
    rows = ({"text": "word " * (i % 90 + 1)} for i in range(300))
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "train.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "axolotl.yaml").write_text(
        f"base_model: {LLAMA}\nload_in_4bit: true\nadapter: qlora\nlora_target_linear: true\n"
        "sequence_len: 1024\nmicro_batch_size: 2\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    return tmp_path


def same_document(opened: Opened) -> None:
    """The answer as JSON is what its command prints, but for why there is no tokenizer.

    The last digit of a power is that of the browser's mathematics.
    """

    def read(text: str) -> Any:
        return json.loads(text, parse_float=lambda digits: f"{float(digits):.10g}")

    _, *words = shlex.split(opened.text(".copy code"))
    printed = read(CliRunner().invoke(main, [*words, "--json"]).stdout)
    shown = read(opened.text("#document"))
    for document in (printed, shown):
        for prediction in document["predictions"]:
            notes = prediction["notes"]
            prediction["notes"] = [each for each in notes if not each.startswith("lengths are")]
    assert shown == printed


def test_files_are_read_in_the_browser_and_answered_as_the_command_line_does(
    browser: Any, address: str, files: Path
) -> None:
    opened = Opened(browser, address, {"gpu": "l4"}, viewport={"width": 390, "height": 844})
    opened.answered()
    opened.page.set_input_files("#field-from", files / "axolotl.yaml")
    opened.wait_until(
        "document.querySelector('#headline h2').textContent.startsWith('Llama-3.1-8B qlora')"
    )
    opened.page.fill("#field-epochs", "3")
    opened.page.press("#field-epochs", "Tab")  # which asks
    opened.answered()
    opened.page.set_input_files("#field-data", files / "train.jsonl")
    opened.wait_until("document.querySelector('#detail').textContent.includes('300 rows')")
    opened.answered()
    assert "The training costs" in opened.text("#detail")
    assert "--from axolotl.yaml" in opened.text(".copy code")
    assert "--data train.jsonl --epochs 3" in opened.text(".copy code")
    same_document(opened)
    assert opened.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert [url for url in opened.requests if not url.startswith((address, "blob:"))] == []
    assert "train" not in opened.page.url
    for name in ("#field-from", "#field-data"):
        hint = opened.page.get_attribute(name, "aria-describedby")
        assert "sent nowhere" in opened.text(f"#{hint}")
    opened.page.click("#table tbody a")  # another card, the same files
    opened.answered()
    assert "300 rows" in opened.text("#detail")
    assert opened.faults == []


def test_a_dropped_file_goes_to_the_field_of_its_kind(browser: Any, address: str) -> None:
    opened = Opened(browser, address, {"gpu": "l4", "model": LLAMA, "method": "qlora"})
    opened.answered()
    drop = """([name, text]) => {
      const data = new DataTransfer();
      data.items.add(new File([text], name));
      document.body.dispatchEvent(
        new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
    }"""
    opened.page.evaluate(drop, ["rows.jsonl", '{"text": "a"}\n{"text": \n'])
    opened.wait_until("!document.getElementById('fault').hidden")
    assert "rows.jsonl:2: is not JSON" in opened.text("#fault")
    opened.page.evaluate(drop, ["rows.jsonl", '{"text": "a"}\n{"text": "b"}\n'])
    opened.wait_until("document.querySelector('#detail').textContent.includes('2 rows')")
    opened.page.evaluate(drop, ["model.bin", "x"])
    assert "model.bin: is neither training data" in opened.text("#fault")
    assert opened.faults == []


def test_cards_are_compared_and_any_card_is_asked_by_keyboard(
    browser: Any, address: str, files: Path
) -> None:
    opened = Opened(browser, address, {"gpu": "2x3090,a6000", "model": LLAMA, "method": "qlora"})
    opened.answered()
    assert opened.text("#table tbody").count("USD") == 4
    assert "2 x rtx-3090-24gb" in opened.text("#headline")
    same_document(opened)
    opened.page.focus("#field-gpu")
    opened.page.keyboard.press("Control+A")
    opened.page.keyboard.press("Delete")
    opened.page.keyboard.press("Enter")
    opened.wait_until(
        "document.body.dataset.state === 'done'"
        " && document.querySelector('#headline').textContent.includes('Cheapest')"
    )
    card = opened.text("#table tbody th")
    assert f"Cheapest: {card}, " in opened.text("#headline")
    assert "gpu=" not in opened.page.url
    opened.page.reload()
    opened.answered()
    assert opened.text("#table tbody th") == card
    opened.page.fill("#field-gpu", "l4")
    opened.page.keyboard.press("Enter")
    opened.answered()
    opened.page.focus("#order")
    opened.page.keyboard.press("Enter")
    assert opened.page.get_attribute("#order", "aria-pressed") == "true"
    assert opened.text("#table tbody th") == card
    assert opened.page.evaluate("document.activeElement.id") == "order"
    assert opened.faults == []
