"""How long the page in the browser takes to answer, in Chromium on this machine.

    python benchmarks/page_speed.py

Builds the site, serves it on loopback and opens it at a run that it has not prepared. The first
answer counts from the start of the navigation, with an empty cache; each later one from the change
of a field to the first part of its answer, and to the last that the allocator's whole replay
corrects. Needs playwright, a chromium on the path, and Node.js
for the snapshot. Of each kind three changes are made, each to a value not asked before.
"""

from __future__ import annotations

import functools
import json
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlencode

from whichlora.page.build import build

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
FLAGS = ["--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-sync"]
FIRST = {"gpu": "4090", "model": "llama 3.1 8b", "method": "qlora"}
ROUNDS = 3
TARGET_MS = 50  # of a later answer
# Notes when the first part of an answer is back.
WATCH = """
window.times = [];
const Plain = Worker;
window.Worker = class extends Plain {
  constructor(...given) {
    super(...given);
    this.addEventListener("message", ({ data }) => {
      if (data.part) times.push([performance.now(), data.part.part, data.part.text]);
    });
  }
};
"""
# kind: the field, and values that are asked one after the other
CHANGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "batch size": ("batch_size", ("2", "3", "5")),
    "card": ("gpu", ("l4", "a100", "5090")),
    "length": ("seq_len", ("1024", "1536", "3000")),
    "rank": ("r", ("8", "32", "64")),
    "method": ("method", ("dora", "lora", "qlora")),
    "model of 8B": ("model", ("qwen3 8b", "mistralai/Mistral-7B-v0.1", "qwen2.5 7b")),
    "model of 14B to 32B": (
        "model",
        ("qwen3 14b", "google/gemma-3-27b-pt", "qwen3 32b"),
    ),
    "number of cards": ("gpu", ("2x3090", "4xa100", "8xh100")),
    "cards beside each other": ("gpu", ("2x3090,a6000", "l4,t4", "4090,5090")),
}


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of `folder` on loopback."""
    handler = functools.partial(_Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def first_answer(page: Any, address: str) -> float:
    page.goto(f"{address}#{urlencode(FIRST)}")
    return _answer_after(page, 0)[0]


def later_answer(page: Any, field: str, value: str) -> tuple[float, float]:
    """Milliseconds from the change of `field` to the first part of its answer, and to its last run.

    Where the whole replay corrects nothing, both are the same.
    """
    _rest(page)
    number = int(page.evaluate("times.length"))
    page.evaluate(
        """([id, value]) => {
          const field = document.getElementById(id);
          field.value = value;
          window.changed = performance.now();
          field.dispatchEvent(new Event("change", { bubbles: true }));
        }""",
        [f"field-{field}", value],
    )
    answered, kind, text = _answer_after(page, number)
    if kind == "refusal":
        raise SystemExit(f"{field} {value}: {text}")
    _rest(page)
    parts = page.evaluate("times")[number:]
    runs = [when for when, part, _ in parts if part == "run"]
    changed = float(page.evaluate("changed"))
    return answered - changed, (runs[-1] if runs else answered) - changed


def _answer_after(page: Any, number: int) -> tuple[float, str, str]:
    for _ in range(6000):
        for when, kind, text in page.evaluate("times")[number:]:
            return float(when), str(kind), str(text)
        page.wait_for_timeout(20)
    raise SystemExit("the page does not answer")


def _rest(page: Any) -> None:
    while page.evaluate("document.body.dataset.state") != "done":
        page.wait_for_timeout(50)


def main() -> None:
    from playwright.sync_api import sync_playwright

    if CHROMIUM is None:
        raise SystemExit("no chromium on the path")
    with tempfile.TemporaryDirectory() as name, sync_playwright() as started:
        build(Path(name))
        chromium = started.chromium.launch(
            executable_path=CHROMIUM, headless=True, chromium_sandbox=False, args=FLAGS
        )
        with served(Path(name)) as address:
            firsts = []
            for _ in range(ROUNDS):
                page = chromium.new_context().new_page()
                page.add_init_script(WATCH)
                firsts.append(first_answer(page, address))
            print("| what is asked | median | worst | corrected, worst |")
            print("| --- | ---: | ---: | ---: |")
            print(f"| first | {median(firsts) / 1000:.1f} s | {max(firsts) / 1000:.1f} s | |")
            answered: list[float] = []
            for kind, (field, values) in CHANGES.items():
                _rest(page)
                page.evaluate(f"location.hash = {json.dumps('#' + urlencode(FIRST))}")
                page.wait_for_timeout(200)
                taken = [later_answer(page, field, value) for value in values]
                first = [before for before, _ in taken]
                corrected = [after for before, after in taken if after > before]
                worst = f"{max(corrected):.0f} ms ({len(corrected)})" if corrected else "–"
                slowest = f"{max(first):.0f} ms ({values[first.index(max(first))]})"
                print(f"| {kind} | {median(first):.0f} ms | {slowest} | {worst} |")
                answered += first
            within = sum(took <= TARGET_MS for took in answered)
            print(f"\n{within} of {len(answered)} later answers within {TARGET_MS} ms.")
        chromium.close()


if __name__ == "__main__":
    sys.exit(main())
