"""Hostile names, broken records, second starts: nothing is run, nothing is lost."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from plan_cases.folder import Folder
from plan_cases.jobs import TINY_MODEL
from plan_cases.registry import case, expect
from plan_cases.winners import SMALL_STAGE_1

HOSTILE = 'm"""\nimport os; os.system("touch hacked")\n"""'


def dry_plan(folder: Folder, **keys: Any) -> None:
    folder.write_rows("data.jsonl", [{"text": "some words to learn"}] * 64)
    settings = {
        "gpu": "4090",
        "models": "Qwen/Qwen3-0.6B",
        "methods": "lora",
        "profile": "none",
        "sequence_length": 128,
        "dataset": "data.jsonl",
        "stage1_profile": SMALL_STAGE_1,
    }
    folder.write_plan(**(settings | keys))


@case("A model folder named with quotes and newlines")
def hostile_model_name(folder: Folder) -> str:
    folder.write(f"{HOSTILE}/config.json", json.dumps(TINY_MODEL))
    dry_plan(folder, models=f"./{HOSTILE}", weights="random")
    result = folder.whichlora("run", "plan.yaml")
    expect(result.code == 2 and not result.has_traceback, result.last_line)
    expect(not list(folder.path.rglob("train.py")), "train.py was written")
    lines = result.stderr.strip().splitlines()
    expect(all(line.isprintable() for line in lines), repr(result.stderr))
    return lines[-1]


@case("A column and a file named like a formula and like a terminal's control sequence")
def formulas_in_tables(folder: Folder) -> str:
    name = "=cmd"
    folder.write(f"{name}/config.json", json.dumps(TINY_MODEL))
    dry_plan(folder, models=f"./{name}", weights="random", precision="fp32", gpu="4090")
    result = folder.whichlora("run", "plan.yaml")
    expect(result.code == 0, result.last_line)
    with (folder.path / "runs/plan/candidates.csv").open(newline="", encoding="utf-8") as file:
        cells = [cell for row in csv.reader(file) for cell in row]
    hot = [cell for cell in cells if cell[:1] in ("=", "+", "@", "\t", "\r")]
    expect(not hot, f"{hot[:3]}")
    return f"{len(cells)} cells, none starts a formula"


@case("One merged record with batch 10^9")
def absurd_record(folder: Folder) -> str:
    exported = folder.whichlora("calibrate", "export", "records.csv", "--gpu", "a100-sxm-80gb")
    expect(exported.code == 0, exported.last_line)
    with (folder.path / "records.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    column = next(name for name in rows[0] if name.endswith("batch_size"))
    rows[1][column] = str(10**9)
    with (folder.path / "records.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows[:50])
    imported = folder.whichlora("calibrate", "import", "records.csv", "--skip-bad")
    expect(not imported.has_traceback, imported.last_line)
    fitted = folder.whichlora("calibrate", "--gpu", "a100-sxm-80gb")
    expect(fitted.code == 0, fitted.last_line)
    dry_plan(folder, gpu="a100-sxm-80gb")
    result = folder.whichlora("run", "plan.yaml")
    expect(result.code == 0, result.last_line)
    return imported.last_line


@case("Coefficients that are negative, not a number, or 1e308")
def absurd_coefficients(folder: Folder) -> str:
    told = []
    for value in (-1.0, float("nan"), 1e308):
        source = Path(__file__).parents[2] / "calibration/a100-sxm-80gb/coefficients.json"
        document = json.loads(source.read_text(encoding="utf-8"))
        numbers = document["time"]["finetune"]
        key = next(name for name, held in numbers.items() if isinstance(held, list | dict))
        held = numbers[key]
        first = next(iter(held)) if isinstance(held, dict) else 0
        held[first] = value
        text = json.dumps(document)
        folder.write("calibration/a100-sxm-80gb/coefficients.json", text)
        dry_plan(folder, gpu="a100-sxm-80gb")
        result = folder.whichlora("run", "plan.yaml")
        expect(not result.has_traceback, result.last_line)
        if result.code == 0:
            winner = folder.answer()["winner"]
            expect(0 < winner["total_time_s"] < 3600, f"{value}: {winner['total_time_s']} s")
            expect("coefficients" in result.stdout + result.stderr, f"{value}: nothing is said")
        told.append(str(result.code))
    return f"exit codes {', '.join(told)}, never a nonsense time"


@case("Two starts in one output folder")
def two_starts(folder: Folder) -> str:
    folder.write("tiny/config.json", json.dumps(TINY_MODEL))
    dry_plan(folder, models="./tiny", weights="random", precision="fp32", gpu="cpu", profile="all")
    command = [sys.executable, "-m", "whichlora", "run", "plan.yaml"]
    first = subprocess.Popen(
        command,
        cwd=folder.path,
        env=folder.environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        while not (folder.path / "runs/plan/run.json").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(1)
        second = folder.whichlora("run", "plan.yaml")
        expect(second.code == 2 and not second.has_traceback, second.last_line)
        expect(str(first.pid) in second.stderr, second.last_line)
        first.send_signal(signal.SIGKILL)
        first.wait()
        third = folder.whichlora("run", "plan.yaml")
        expect(third.code == 0, third.last_line)
    finally:
        first.kill()
        first.wait()
    return second.last_line


@case("A grid of a million combinations")
def grid_of_a_million(folder: Folder) -> str:
    sizes = ",".join(map(str, range(1, 1001)))
    start = time.monotonic()
    result = folder.whichlora(
        "estimate", "Qwen/Qwen3-8B", "--gpu", "4090", "--batch-size", sizes, "--seq-len", sizes
    )
    seconds = time.monotonic() - start
    expect(result.code in (0, 2) and not result.has_traceback, result.last_line)
    expect("1000000" in result.stderr.replace(",", "").replace(" ", ""), result.last_line)
    expect(seconds < 60, f"{seconds:.0f} s")
    return result.last_line


@case("Records exported to a table and imported again")
def round_trip(folder: Folder) -> str:
    first = folder.whichlora("calibrate", "export", "one.csv", "--gpu", "a100-sxm-80gb")
    expect(first.code == 0, first.last_line)
    variables = {"WHICHLORA_CALIBRATION": str(folder.path / "elsewhere")}
    imported = folder.whichlora("calibrate", "import", "one.csv", **variables)
    expect(imported.code == 0, imported.last_line)
    second = folder.whichlora(
        "calibrate", "export", "two.csv", "--gpu", "a100-sxm-80gb", **variables
    )
    expect(second.code == 0, second.last_line)
    tables = []
    for name in ("one.csv", "two.csv"):
        with (folder.path / name).open(newline="", encoding="utf-8") as file:
            tables.append(sorted(tuple(sorted(row.items())) for row in csv.DictReader(file)))
    expect(tables[0] == tables[1], "the second export differs")
    return f"{len(tables[0])} records, the same table"
