"""What people see on a terminal: nothing is cut in two, nothing runs over the edge."""

from __future__ import annotations

import csv
import io
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from whichlora.cli import main
from whichlora.cluster.state import Array
from whichlora.cluster.watch import TaskStatus
from whichlora.spec.run import RunConfig
from whichlora.terminal.live import SweepProgress
from whichlora.terminal.progress import Progress
from whichlora.terminal.sheet import as_csv
from whichlora.terminal.tables import new_table, open_console, print_table, print_whole, say
from whichlora.terminal.words import variants
from whichlora.text import from_csv_cell
from whichlora.workflow import estimates

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


def test_words_stay_whole_where_heads_and_texts_can_be_broken_between_them() -> None:
    cells = [("qlora r=16", "11 h 10 min", "yes", key) for key in ("rtx-4090-24gb", "l4-24gb")]
    columns = ("method", "time for the data", "fits", "device")
    console = terminal(46)
    print_table(console, columns, cells, right=("time for the data",))
    text = "\n".join(lines := shown(console))
    assert max(map(len, lines)) <= 46
    for whole in ("method", "qlora", "11 h 10 min", "fits", "yes", "device", "rtx-4090-24gb"):
        assert sum(whole in line for line in lines) >= 1, text
    assert "time for the data" not in text  # its cells are narrower
    console = terminal(42)
    print_table(console, columns, cells, right=("time for the data",))
    assert "rtx-4090-24gb" in "\n".join(shown(console))  # columns stand closer


def asked_once(patch: pytest.MonkeyPatch, name: str) -> None:
    """The same command is answered as before."""
    function, answers = getattr(estimates, name), []

    def answer(*args: Any, **settings: Any) -> Any:
        answers[:] = answers or [function(*args, **settings)]
        return answers[0]

    patch.setattr(estimates, name, answer)


@pytest.mark.parametrize(
    "command",
    [
        "estimate Qwen/Qwen2.5-7B --gpu 4090,l4 --method lora,qlora --data data.jsonl",
        "estimate Qwen/Qwen2.5-7B,meta-llama/Llama-3.1-8B --gpu a100-sxm-80gb,h100-sxm-80gb"
        " --gpus 2,4 --parallel fsdp,ddp",
        "guide --models Qwen/Qwen2.5-7B,Qwen/Qwen2.5-0.5B --gpu 4090,l4 --method lora,qlora",
        "where Qwen/Qwen2.5-7B --method qlora",
        "methods Qwen/Qwen2.5-7B --gpu 4090",
        "calibrate show --gpu h100-sxm-80gb",
        "recommend --gpu 4090 --models Qwen/Qwen3-8B,meta-llama/Llama-3.1-8B",
        "estimate Qwen/Qwen2.5-7B,Qwen/Qwen2.5-0.5B --gpu l4-24gb,4090 --serving vllm",
    ],
)
def test_no_word_of_a_table_is_cut(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data.jsonl").write_text('{"text": "some words of a row"}\n' * 400)
    monkeypatch.chdir(tmp_path)
    asked_once(monkeypatch, "where")
    asked_once(monkeypatch, "estimate_grid")
    printed = {}
    for width in (1000, 40, 80):
        monkeypatch.setattr("whichlora.terminal.tables.PLAIN_WIDTH", width)
        monkeypatch.setattr("whichlora.terminal.guides._PLAIN_WIDTH", width)
        printed[width] = CliRunner().invoke(main, command.split()).stdout
    known = set(printed.pop(1000).split())
    known |= {word.rpartition("/")[2] for word in known}
    for width, text in printed.items():
        lines = text.splitlines()
        at_rule = next(i for i, line in enumerate(lines) if line.startswith(" ──"))
        table = [*itertools.takewhile(str.strip, lines[at_rule:])]
        assert max(map(len, table)) <= width or width == 40
        cut = {word for line in table for word in line.split() if "──" not in word} - known
        assert not cut


def test_numbers_go_from_the_right_and_the_memory_stays_before_a_line_runs_over() -> None:
    columns = ("method", "batch", "peak", "step", "device")
    cells = [("qlora r=16", "8", "19.53 GiB", "2 h 35 min", "rtx-4090-24gb")]

    def lines(width: int) -> list[str]:
        console = terminal(width)
        print_table(console, columns, cells, right=columns[1:4])
        return [line.rstrip() for line in shown(console)]

    assert lines(44)[-1] == "a wider terminal also shows: step"
    assert " ".join(lines(44)[1].split()) == "method batch peak device"
    assert max(map(len, lines(44)[:-1])) <= 44
    assert lines(30)[-2:] == ["a wider terminal also shows:", "  step, batch"]
    assert lines(30)[3] == " qlora   19.53 GiB  rtx-4090-24gb"  # over the edge, and whole


def test_other_tables_are_broken_between_words_alone() -> None:
    table = new_table("efficiency", "of the whole device", right=("of the whole device",))
    table.add_row("a long word", "12.5 GiB")
    console = terminal(16)
    print_whole(console, table)
    assert [line.split() for line in shown(console) if line.strip("─ ")] == [
        ["of", "the"],
        ["whole"],
        ["efficiency", "device"],
        ["a", "long", "12.5", "GiB"],
        ["word"],
    ]


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
def test_the_live_table_of_many_tasks_stays_within_the_terminal(width: int, height: int) -> None:
    progress = SweepProgress()
    console = progress._console = terminal(width, height=height)
    progress._take([*statuses(60, running=9, waiting=51)])
    console.print(progress._render())
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


HIDDEN = "a\x1b[31mred\x1b]0;title\x07\u202eb\rc\x9bd"


@pytest.mark.parametrize("terminal", [True, False])
def test_text_moves_no_cursor_and_hides_nothing(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    stream.isatty = lambda: terminal  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdout", stream)
    monkeypatch.setenv("TERM", "xterm-256color")
    console = open_console()
    say(console, HIDDEN)
    print_table(console, ("model", "n"), [(HIDDEN, "1\n2")], title=HIDDEN, caption=HIDDEN)
    table = new_table("model")
    table.add_row(HIDDEN)
    console.print(table)
    text = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())  # colours of our own
    assert not [line for line in text.splitlines() if not line.isprintable()]
    assert r"\x1b[31mred" in text
    assert not re.search(r"\x1b\[[0-9;]*31", stream.getvalue())


def test_an_error_about_a_hidden_name_shows_what_it_holds() -> None:
    result = CliRunner().invoke(main, ["estimate", "x/a\x1b[2Jb\u202e", "--gpu", "l4-24gb"])
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.isprintable()


@pytest.mark.parametrize("text", ["=1+1", "+a", "-a", "@a", "\ta", "\ra", "'a", "''", "'=a"])
def test_a_cell_that_starts_a_formula_is_text_and_comes_back(text: str) -> None:
    (row,) = csv.reader(io.StringIO(as_csv([{"a": text}]).partition("\n")[2], newline=""))
    assert row[0].startswith("'")
    assert from_csv_cell(row[0]) == text


@pytest.mark.parametrize("cell", [-1.5, "-1.5", "+2e-3", "text", "a=b", "'tis"[1:]])
def test_numbers_and_plain_texts_of_a_table_stay_as_they_are(cell: object) -> None:
    assert as_csv([{"a": cell}]) == f"a\n{cell}\n"


def test_rows_that_would_look_alike_name_what_differs() -> None:
    runs = [
        RunConfig(model="m", trainer=trainer, precision=precision, method=method)
        for trainer, precision, method in (
            ("transformers", "bf16", "lora"),
            ("loop", "bf16", "lora"),
            ("loop", "fp32", "qlora"),
        )
    ]
    names = variants(runs, ["t4-16gb"] * 3)
    assert names == [
        "lora r=16, trainer transformers",
        "lora r=16, trainer loop",
        "qlora r=16, trainer loop",
    ]
    # a trainer is named wherever there are two, on devices of their own, too
    assert variants(runs[:2], ["t4-16gb", "l4-24gb"]) == names[:2]
    assert variants(runs[1:2] * 2, ["t4-16gb", "l4-24gb"]) == ["lora r=16"] * 2
