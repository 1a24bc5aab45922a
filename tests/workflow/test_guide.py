"""The parameter guide: its rows, and its four formats."""

import csv
import io
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from whichlora.cli import main

MODELS = "HuggingFaceTB/SmolLM2-135M,EleutherAI/pythia-160m"
GRID = ("--models", MODELS, "--gpu", "l4-24gb,t4-16gb", "--batch-size", "1,4", "--seq-len", "256")


def whichlora(*args: str) -> Result:
    result = CliRunner().invoke(main, args, prog_name="whichlora")
    assert result.exit_code == 0, result.stderr
    return result


def test_the_guide_has_a_row_for_every_combination() -> None:
    rows = json.loads(whichlora("guide", *GRID, "--json").stdout)["guide"]
    keys = {(row["model"], row["gpu"], row["batch_size"]) for row in rows}
    assert len(rows) == len(keys) == 2 * 2 * 2


def test_the_guide_leaves_out_what_is_refused_and_says_why(tmp_path: Path) -> None:
    models = ("--models", "HuggingFaceTB/SmolLM2-135M,albert-base-v2", "--gradient-checkpointing")
    args = ("guide", *models, "--gpu", "l4-24gb", "--seq-len", "256")
    answer = json.loads(whichlora(*args, "--json").stdout)
    assert [row["model"] for row in answer["guide"]] == ["HuggingFaceTB/SmolLM2-135M"]
    assert [each["model"] for each in answer["refused"]] == ["albert-base-v2"]
    assert "left out: albert-base-v2: gradient_checkpointing: true" in whichlora(*args).stdout
    whichlora(*args, "--output", str(tmp_path / "guide.md"))
    assert "left out: albert-base-v2" in (tmp_path / "guide.md").read_text()


def test_the_time_for_the_data_is_all_its_steps() -> None:
    args = ("--models", "HuggingFaceTB/SmolLM2-135M", "--gpu", "l4-24gb", "--batch-size", "4")
    more = ("--gradient-accumulation-steps", "2", "--samples", "101", "--epochs", "3")
    (row,) = json.loads(whichlora("guide", *args, *more, "--json").stdout)["guide"]
    assert row["num_steps"] == 3 * 13  # 26 batches are 13 steps
    assert row["total_s"] == pytest.approx(row["step_s"] * row["num_steps"])
    assert row["total_low_s"] < row["total_s"] < row["total_high_s"]


def test_a_guide_of_an_engine_answers_as_many_requests() -> None:
    args = ("--models", "Qwen/Qwen2.5-0.5B", "--gpu", "l4-24gb", "--samples", "700")
    more = ("--phase", "inference", "--serving", "vllm", "--concurrency", "1,8")
    rows = json.loads(whichlora("guide", *args, *more, "--json").stdout)["guide"]
    for row in rows:
        assert row["total_s"] == pytest.approx(700 / row["requests_per_s"])
        assert row["total_low_s"] < row["total_s"] < row["total_high_s"]
    assert rows[0]["money"] > rows[1]["money"] > 0
    assert "vllm, merged 16-bit" in whichlora("guide", *args, *more).stdout


def test_an_engine_takes_the_number_of_gpus_as_its_own_option_and_all_are_paid() -> None:
    args = ("--models", "Qwen/Qwen2.5-7B", "--gpu", "l40s-48gb", "--samples", "700")
    more = ("--phase", "inference", "--serving", "vllm", "--gpus", "1,2")
    rows = json.loads(whichlora("guide", *args, *more, "--json").stdout)["guide"]
    assert [row["serving_gpus"] for row in rows] == [1, 2]
    hourly = [row["money"] / row["total_s"] for row in rows]
    assert hourly[1] == pytest.approx(2 * hourly[0])
    text = whichlora("guide", *args, *more).stdout
    assert "vllm, merged 16-bit" in text
    assert "vllm on 2 GPUs, merged 16-bit" in text


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            ("--serving-option", "tensor_parallel_size=4"),
            "gpus: 2, but tensor_parallel_size is 4; give one of them",
        ),
        (
            ("--parallel", "fsdp"),
            "parallel: vllm divides every matrix (tensor_parallel_size), or has stages",
        ),
        (("--nodes", "3"), "nodes: 3 machines cannot have equally many of 2 GPUs; give a divisor"),
        (("--interconnect", "25GB/s"), "interconnect: vllm is predicted with the usual links"),
        (("--serving", "transformers"), "several are known of fine-tuning, and of serving by"),
    ],
)
def test_gpus_that_an_engine_does_not_divide_so_are_refused(
    more: tuple[str, ...], said: str
) -> None:
    args = ("Qwen/Qwen2.5-7B", "--gpu", "2xl40s", "--phase", "inference", "--serving", "vllm")
    asked = CliRunner().invoke(main, ("estimate", *args, *more))
    assert asked.exit_code == 2
    assert said in asked.output


def test_a_guide_of_several_gpus_shares_the_data_among_them(tmp_path: Path) -> None:
    args = ("--models", "HuggingFaceTB/SmolLM2-135M", "--gpu", "l4-24gb", "--seq-len", "256")
    more = ("--batch-size", "2,4", "--gpus", "1,4", "--parallel", "ddp", "--samples", "800")
    rows = json.loads(whichlora("guide", *args, *more, "--json").stdout)["guide"]
    assert [(row["gpus"], row["batch_size"], row["num_steps"]) for row in rows] == [
        *((1, 2, 400), (1, 4, 200), (4, 2, 100), (4, 4, 50)),
    ]
    for row in rows:
        assert row["gpu_s"] == pytest.approx(row["gpus"] * row["total_s"])
    text = whichlora("guide", *args, *more).stdout
    assert "GPUs   strategy" in text
    whichlora("guide", *args, *more, "--output", str(tmp_path / "guide.csv"))
    table = list(csv.DictReader(io.StringIO((tmp_path / "guide.csv").read_text())))
    assert [row["parallel"] for row in table] == ["ddp"] * 4


def test_the_table_names_its_basis() -> None:
    text = whichlora("guide", *GRID).stdout
    assert text.count("EleutherAI/pythia-160m") == 4
    assert "basis: l4-24gb: memory by the config" in text


def test_markdown_csv_and_html_say_the_same(tmp_path: Path) -> None:
    for suffix in ("md", "csv", "html"):
        said = whichlora("guide", *GRID, "--output", str(tmp_path / f"guide.{suffix}")).stdout
        assert said.endswith("8 rows\n")
    markdown = (tmp_path / "guide.md").read_text()
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 8
    assert len({line.count("|") for line in lines}) == 1
    rows = list(csv.DictReader(io.StringIO((tmp_path / "guide.csv").read_text())))
    assert len(rows) == 8
    assert int(rows[0]["device_used_bytes"]) > 2**28
    cells: list[str] = []

    class Reader(HTMLParser):
        def handle_data(self, data: str) -> None:
            cells.append(data)

    page = (tmp_path / "guide.html").read_text()
    Reader().feed(page)
    shown = [cell.strip() for cell in lines[2].strip("|").split("|")]
    assert all(cell in cells for cell in shown)
    assert "http" not in page  # opens offline


def test_a_guide_of_inference_needs_an_engine() -> None:
    without_length = GRID[:-2]
    result = CliRunner().invoke(main, ["guide", *without_length, "--phase", "inference"])
    assert result.exit_code == 2
    assert "a guide is of fine-tuning" in result.stderr


def test_notes_of_the_user_do_not_become_a_guide(tmp_path: Path) -> None:
    mine = tmp_path / "g.md"
    mine.write_text("mine")
    result = CliRunner().invoke(main, ["guide", *GRID, "--output", str(mine)])
    assert result.exit_code == 2
    assert f"{mine}: exists, and WhichLoRA has no record of writing it" in result.stderr
    assert mine.read_text() == "mine"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--output", "guide.xlsx"), "ends with .xlsx; accepted are .md, .csv, .html"),
        (
            ("--batch-size", "max"),
            "--batch-size: guide takes numbers; 'whichlora estimate' finds max",
        ),
        (("--samples", "0"), "'--samples': 0 is not in the range"),
    ],
)
def test_a_bad_guide_gets_one_clear_line(args: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(main, ["guide", *GRID, *args], prog_name="whichlora")
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert said in line
