"""What people see on a terminal: nothing is cut in two, nothing runs over the edge."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from whichlora.report.live import SweepProgress
from whichlora.report.progress import Progress
from whichlora.report.terminal import print_table, say
from whichlora.specs import RunConfig
from whichlora.sweep.following import TaskStatus
from whichlora.sweep.state import Array

MODELS = ("HuggingFaceTB/SmolLM2-135M", "meta-llama/Llama-3.1-8B")


def terminal(width: int, *, height: int = 24, **settings: Any) -> Console:
    return Console(
        file=io.StringIO(),
        width=width,
        height=height,
        highlight=False,
        **({"force_terminal": True, "color_system": None} | settings),
    )


def shown(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def rows(*batches: int) -> list[tuple[str, ...]]:
    return [
        (model, "qlora r=16", str(batch), "19.53 GiB", "18.80 GiB - 21.51 GiB", "rtx-4090-24gb")
        for model in MODELS
        for batch in batches
    ]


def table(width: int, **settings: Any) -> list[str]:
    console = terminal(width)
    print_table(
        console,
        ("model", "what", "batch", "peak", "95 % interval", "device"),
        rows(1, 4),
        right=("batch", "peak", "95 % interval"),
        lift=("device", "what"),
        spare=("95 % interval",),
        **settings,
    )
    return shown(console)


def test_a_wide_terminal_shows_every_column_and_whole_names() -> None:
    lines = table(120, title="stage 2")
    assert lines[0] == "stage 2"
    assert sum("meta-llama/Llama-3.1-8B" in line and "rtx-4090" in line for line in lines) == 2


def test_what_all_rows_say_is_said_once_where_the_terminal_is_narrow() -> None:
    lines = table(95, title="stage 2")
    assert lines[0] == "stage 2 (device: rtx-4090-24gb)"
    assert any("meta-llama/Llama-3.1-8B" in line for line in lines)


def test_narrower_ones_do_without_organisations_and_then_without_a_column() -> None:
    assert any(line.startswith(" Llama-3.1-8B ") for line in table(60))
    lines = table(45)
    assert lines[-1] == "a wider terminal also shows: 95 % interval"
    assert sum("19.53 GiB" in line for line in lines) == 4


@pytest.mark.parametrize("width", [40, 60, 80, 100, 160])
def test_no_table_is_wider_than_its_terminal_and_no_number_is_broken(width: int) -> None:
    lines = table(width)
    assert max(map(len, lines)) <= width
    assert sum("19.53 GiB" in line for line in lines) == 4


def test_a_path_with_brackets_is_no_markup() -> None:
    console = terminal(80)
    say(console, "table: runs/[bold]x[/bold]/[1, 2].csv", whole=True)
    assert shown(console) == ["table: runs/[bold]x[/bold]/[1, 2].csv"]


def test_long_lines_are_indented_on_a_terminal_and_whole_elsewhere() -> None:
    text = "  name: " + "word " * 30 + "end"
    console = terminal(60)
    say(console, text)
    lines = shown(console)
    assert max(map(len, lines)) <= 60
    assert [len(line) - len(line.lstrip()) for line in lines] == [2, 4, 4]
    elsewhere = terminal(60, force_terminal=False)
    say(elsewhere, text)
    assert shown(elsewhere) == [text]


def statuses(num_tasks: int, **stands: int) -> Iterator[TaskStatus]:
    for group in ("h100", "v100-v100-32gb"):
        array = Array(
            group=group, round=1, tasks_file="", script="", num_tasks=num_tasks, max_array_size=9
        )
        words = [name for name, number in stands.items() for _ in range(number)]
        for index, stand in enumerate(words):
            yield TaskStatus(
                array=array,
                index=index,
                what="SmolLM2-135M inference, batch 1, prompt 16, 8 new tokens",
                stand="done" if stand == "killed" else stand,  # type: ignore[arg-type]
                words={"done": "ok", "killed": "killed: signal 9"}.get(stand, stand.upper()),
                node="n1",
                timeout_s=300.0,
            )


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (80, 12)])
def test_the_live_picture_of_many_tasks_stays_within_the_terminal(width: int, height: int) -> None:
    progress = SweepProgress()
    console = progress._console = terminal(width, height=height)
    progress._take([*statuses(60, running=9, waiting=51)])
    console.print(progress._picture())
    lines = shown(console)
    assert len(lines) < height
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "0/60" in text
    assert "at most 35 min 00 s" in text  # 7 turns of 9 tasks


def test_what_failed_is_said_once_and_what_was_known_before_is_not() -> None:
    progress = SweepProgress()
    console = progress._console = terminal(160)
    progress._take([*statuses(3, killed=1, running=1, waiting=1)])
    assert shown(console) == []
    for _ in range(2):
        progress._take([*statuses(3, killed=2, running=1)])
    assert [line.partition(":")[0] for line in shown(console)] == ["h100 1-1", "v100-v100-32gb 1-1"]


def test_a_sweep_tells_a_file_only_what_changed() -> None:
    progress = SweepProgress()
    console = progress._console = terminal(160, force_terminal=False)
    for running in (1, 1, 0):
        progress.tasks([*statuses(2, done=2 - running, running=running)])
    assert shown(console) == [
        "h100: 1 done, 1 running; v100-v100-32gb: 1 done, 1 running",
        "h100: 2 done; v100-v100-32gb: 2 done",
    ]


@pytest.mark.parametrize("width", [60, 80])
def test_the_line_of_a_profile_keeps_its_clock_on_a_narrow_terminal(width: int) -> None:
    progress = Progress()
    console = progress._console = terminal(width)
    run = RunConfig(model="HuggingFaceTB/SmolLM2-135M", phase="inference", prompt_len=2048)
    with progress:
        progress.profiling(run, number=12, open_candidates=1)
        progress._status.refresh()
    text = "".join(shown(console))
    assert "0:00:00" in text
    assert "1 candidate open" in text
    assert "…" not in text
