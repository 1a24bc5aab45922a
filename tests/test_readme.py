"""What the README and docs/ promise: their commands work, their keys and links exist."""

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from whichlora.cli import main
from whichlora.config import load_plan
from whichlora.config.schema import json_schema

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
LINK = r"\]\((?!https?:)([^)#]*)#?([^)]*)\)"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
WRITTEN = [page for page in PAGES if page.parent.name != "accuracy"]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


COMMANDS = [
    shlex.split(line, comments=True)
    for block in blocks("bash")
    for line in block.splitlines()
    if line.startswith("whichlora ")
]
ONE_LINERS = [line for line in README.splitlines() if line.startswith("python3 -m venv ")]


@pytest.mark.parametrize(
    "command",
    # these need a config, what its run has left, or the network
    [one for one in COMMANDS if one[1] not in ("run", "report", "slurm", "page")],
    ids=lambda one: " ".join(one),
)
def test_a_command_of_the_readme_works_as_written(command: list[str]) -> None:
    result = CliRunner().invoke(main, command[1:])
    assert result.exit_code == 0, result.stderr
    assert result.stdout.strip()


def test_the_python_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks("python")
    exec(compile(code, "README.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_the_first_screen_has_the_main_job_and_the_tests_in_one_line_each() -> None:
    job, tests = ONE_LINERS
    assert job.endswith(".venv/bin/whichlora run examples/quickstart.yaml")
    assert ".venv/bin/pytest" in tests
    assert all("-c constraints.txt" in line for line in ONE_LINERS)
    assert README.index(tests) < 2500


def test_the_config_of_the_main_job_is_valid() -> None:
    assert load_plan(ROOT / "examples" / "quickstart.yaml").train


def test_every_key_of_a_config_is_explained() -> None:
    text = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    schema = json_schema()
    parts = [schema, *schema["$defs"].values()]
    keys = {key for part in parts for key in part.get("properties", {})}
    explained = set(re.findall(r"`(\w+)`", text))
    assert keys - explained == set()


@pytest.mark.skipif(not (ROOT / "whichlora").is_dir(), reason="names files of a checkout")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for path, anchor in re.findall(LINK, page.read_text(encoding="utf-8")):
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


@pytest.mark.skipif(not (ROOT / "whichlora").is_dir(), reason="names files of a checkout")
@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_a_path_of_this_repository_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    paths = re.findall(r"`((?:whichlora|tests|benchmarks|examples)/[\w./-]+)", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []


def anchors(page: Path) -> set[str]:
    """Anchors of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


def sentences(page: Path) -> list[str]:
    """Sentences of the prose of a page: no code, no tables."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    prose = [line for line in text.splitlines() if not line.startswith(("|", "    "))]
    text = re.sub(r"\]\(.*?\)|`.*?`", "X", "\n".join(prose))
    return re.split(r"[.:;?!]\**\s|\n\n|\n *(?:[-#]|\d+\.) ", text)


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_a_sentence_of_the_docs_has_at_most_30_words(page: Path) -> None:
    words = {sentence: len(re.findall(r"\w[\w./'-]*", sentence)) for sentence in sentences(page)}
    assert [sentence for sentence, count in words.items() if count > 30] == []


def test_the_index_names_every_page() -> None:
    docs = ROOT / "docs"
    index = (docs / "index.md").read_text(encoding="utf-8")
    pages = {page.relative_to(docs).as_posix() for page in docs.rglob("*.md")} - {"index.md"}
    assert pages == set(re.findall(r"\]\(([\w/-]+\.md)\)", index))


PUBLISHED = (ROOT / "docs" / "accuracy" / "published.md").read_text(encoding="utf-8")
FIGURES = {
    "peak allocated memory": "### Peak allocated (",
    "allocated between steps": "### Allocated between steps",
    "peak reserved memory": "### Peak reserved (",
    "device memory used": "### Used on the device",
    "training step on A100, of a model": "### Training step on A100",
    "training step on a GPU without any run": "By GPU:",
    "decoding on A100, of a model": "### Decoding with transformers on A100",
    "forward in fp32, on a GPU": "### Forward in fp32",
}
"""How a row of the table of accuracy begins, and what stands above its figures on their page."""


@pytest.mark.parametrize(("row", "above"), FIGURES.items(), ids=FIGURES)
def test_figures_of_accuracy_are_those_of_their_page(row: str, above: str) -> None:
    (line,) = [line for line in README.splitlines() if line.startswith(f"| {row}")]
    totals = PUBLISHED[PUBLISHED.index(above) :].splitlines()
    page = next(line for line in totals if "| **all** |" in line).partition("**all**")[2]
    number, *shown = re.findall(r"[+-]?[\d.]+(?= %| \|)", line.partition(" | ")[2] + " |")
    count, *exact = re.findall(r"[+-]?[\d.]+(?= %| \|)", page)
    assert number == count
    assert len(shown) == 3
    for text, figure in zip(shown, exact, strict=False):
        digits = len(text.partition(".")[2])
        assert abs(float(text) - float(figure)) <= 0.5 * 10**-digits + 0.05, (text, figure)
