"""Markdown and HTML of an answer: no text of a user ends a cell, or becomes markup."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

import whichlora
from whichlora.spec.results import Answers
from whichlora.terminal.sheet import Document, Sheet, as_html, as_markdown

HOSTILE = (
    "<img src=x onerror=alert(1)>",
    "</td></table><script>alert(1)</script>",
    "a | b \\| c",
    "`code` [link](https://e.org) ![i](https://e.org)",
    "two\nlines\r\nof \x1b[31m text",
    '" onload="alert(1)',
    "&lt;b&gt;",
)
ELEMENTS = {
    "div",
    "p",
    "b",
    "table",
    "caption",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
    "ul",
    "li",
    "br",
}


class Elements(HTMLParser):
    """Names of all elements and attributes, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: set[tuple[str, str | None]] = set()
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes.update(attrs)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def document(text: str) -> Document:
    sheet = Sheet(
        title=text,
        columns=("name", text),
        right=(text,),
        rows=[(text, "1"), (text, text)],
        totals=frozenset({1}),
    )
    return Document(title=text, sheets=[sheet], lines=[text])


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_no_text_is_html(text: str) -> None:
    found = Elements(as_html(document(text)))
    assert found.names <= ELEMENTS
    assert found.attributes == {("style", "text-align: right")}
    if text.isprintable():
        assert found.texts.count(text) == 7  # titles, head, cells, line


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_no_text_leaves_its_cell(text: str) -> None:
    lines = as_markdown(document(text)).splitlines()
    assert len(lines) == 10
    table = [line for line in lines if line.startswith("|")]
    ends = [len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) for line in table]
    assert ends == [3] * 4
    begins = re.compile(r"(?<!\\)(?:\\\\)*(?:[`<]|\]\(|!\[)")
    assert not begins.search("\n".join(lines))


def test_a_notebook_shows_tables_of_predictions_and_explanations() -> None:
    model, gpu = "HuggingFaceTB/SmolLM2-135M", "l4-24gb"
    predictions = whichlora.estimate(model, gpu, batch_size=[1, 2])
    for answer in (
        predictions,
        predictions[0],
        whichlora.explain(model, gpu),
        whichlora.where(model, ["l4", "t4"]),
        whichlora.life(model, gpu),
        whichlora.recommend(gpu=gpu, models=[model]),
    ):
        found = Elements(answer._repr_html_() or "")
        assert "table" in found.names
        assert found.names <= ELEMENTS
        assert "l4-24gb" in " ".join(found.texts)
    assert Answers([1])._repr_html_() is None
