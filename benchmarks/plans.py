"""Plans as people write them, against their right answers: `plans.py [NAME ...] [--write]`.

Each case writes its files into an empty folder, calls the command line there and compares what it
answers with what is right. The right answer comes from somewhere else: a search by brute force
over single predictions, arithmetic that the case spells out, or the generated job itself, run on
this CPU. `--write` puts the table into docs/accuracy/plans.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from pathlib import Path

from markdown_tables import markdown_table, write_page
from plan_cases import CASES, WrongAnswerError
from plan_cases.folder import Folder

PAGE, TITLE = "plans", "Plans against their right answers"
METHOD = (
    "Plans as people write them go through the command line, and the answers are compared with "
    "right answers that other code found. Who wins is a brute-force search over single "
    "predictions, with each limit as a probability. What the job does is seen by running it on "
    "this CPU. Names, data and files have an answer that the case spells out."
)
HEAD = ("case", "question", "right", "answer", "s")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="cases to run; all by default")
    parser.add_argument("--write", action="store_true", help="write docs/accuracy/plans.md")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(CASES)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    rows, num_wrong = [], 0
    for name in arguments.names or CASES:
        case, start = CASES[name], time.monotonic()
        with tempfile.TemporaryDirectory() as path:
            try:
                answer, right = case.check(Folder(Path(path))), "yes"
            except WrongAnswerError as wrong:
                answer, right = str(wrong), "**no**"
            except Exception as error:
                traceback.print_exc()
                answer, right = f"{type(error).__name__}: {error}", "**no**"
        num_wrong += right != "yes"
        seconds = time.monotonic() - start
        print(f"{right:6} {name}: {answer} ({seconds:.1f} s)", file=sys.stderr, flush=True)
        text = " ".join(answer.split()).replace("|", "\\|")
        rows.append((name, case.question, right, text, f"{seconds:.0f}"))
    table = markdown_table(HEAD, rows, first_figure=4)
    counted = f"{len(rows) - num_wrong} of {len(rows)} answered right"
    print(f"{table}\n\n{counted}")
    if arguments.write:
        write_page(PAGE, TITLE, f"{METHOD}\n\n{counted}.\n\n{table}")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
