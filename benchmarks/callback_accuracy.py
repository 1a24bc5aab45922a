"""The callback's prediction before step 1 against the run that followed: a dated Markdown table.

Small models under the real Trainer on this CPU, as a user would write them. Memory is the peak of
live tensors in the step with the longest batch. Time is of the timed steps, and says something on
a quiet machine only; the first table is cold (datasheet priors), and with --calibrate a second
half of the runs is predicted after a fit to the first half.

    python benchmarks/callback_accuracy.py --memory-only
    python benchmarks/callback_accuracy.py --calibrate --output accuracy.md
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]
os.environ.setdefault("OMP_NUM_THREADS", "1")

import oracle_trainer as oracle  # noqa: E402
from memory_on_cpu import environment  # noqa: E402

from whichlora import api  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memory-only", action="store_true", help="leave the times out")
    parser.add_argument("--calibrate", action="store_true", help="fit after half of the runs")
    parser.add_argument("--output", type=Path, help="a file instead of stdout")
    options = parser.parse_args()

    lines = [
        "| run | model | memory predicted | measured | error | time predicted | measured | error |"
    ]
    lines.append("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    errors: dict[str, list[float]] = {"memory": [], "time": []}
    with tempfile.TemporaryDirectory() as folder:
        cases = list(oracle.CASES)
        if options.calibrate:
            for case in cases[::2]:
                oracle.train(case, record=True, calibration_dir=folder)
            api.refit(api.find_gpu("cpu"), Path(folder))
            cases = cases[1::2]
        for case in cases:
            trained = oracle.train(case, calibration_dir=folder)
            predicted, measured = trained.memory
            cells = [case.name, case.family, f"{predicted / 2**20:.2f} MiB"]
            cells += [f"{measured / 2**20:.2f} MiB", f"{100 * (predicted / measured - 1):+.2f} %"]
            errors["memory"].append(100 * abs(predicted / measured - 1))
            if options.memory_only:
                cells += ["", "", ""]
            else:
                predicted_s, measured_s = trained.time
                error = 100 * (predicted_s / measured_s - 1)
                cells += [f"{predicted_s:.3f} s", f"{measured_s:.3f} s", f"{error:+.0f} %"]
                errors["time"].append(abs(error))
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], file=sys.stderr, flush=True)
    for what, found in errors.items():
        if found:
            found.sort()
            p95 = found[min(len(found) - 1, round(0.95 * len(found)))]
            lines.append("")
            lines.append(
                f"{what}: {len(found)} runs, median {statistics.median(found):.2f} %, "
                f"95th percentile {p95:.2f} %, worst {found[-1]:.2f} %"
            )
    command = " ".join(["python", "benchmarks/callback_accuracy.py", *sys.argv[1:]])
    text = f"{environment()}. Made by `{command}`.\n\n" + "\n".join(lines) + "\n"
    if options.output is None:
        print(text)
    else:
        options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
