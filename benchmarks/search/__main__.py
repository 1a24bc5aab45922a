"""Searches replayed over tables of real runs, and what is fitted to the table of a CPU.

python benchmarks/search savings --write           the tables of docs/accuracy/search.md
python benchmarks/search savings --invented 4      tries devices drawn from the prior: no evidence
python benchmarks/search shares --replay 100       the shares of `whichlora.search.correlation`
python benchmarks/search early                     the spread of a batch in `repeated_times`
python benchmarks/search measure --only 20         the table, 20 minutes in all on a quiet machine
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # the profiler's worker inherits it

import argparse
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from markdown_tables import write_page

from search import fitted, savings, tables


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("savings")
    command.add_argument("--sets", type=int, default=500)
    command.add_argument("--warm-sets", type=int, default=100, help="sets of the warm curve")
    command.add_argument("--seed", type=int, default=1)
    command.add_argument("--invented", type=int, default=0, help="try so many invented devices")
    command.add_argument("--folder", type=Path, default=tables.FOLDER)
    command.add_argument("--write", action="store_true", help="store the tables in docs/accuracy")
    command = commands.add_parser("shares")
    command.add_argument("--replay", type=int, default=0, help="sets of limits to search under")
    commands.add_parser("early")
    command = commands.add_parser("measure")
    command.add_argument("--only", type=int, help="measure at most so many runs now")
    command.add_argument("--folder", type=Path, default=tables.FOLDER)
    options = parser.parse_args()
    if options.command == "savings":
        report = savings.report(options)
        print(report)
        if options.write:
            write_page("search", "What the search saves", report)
    elif options.command == "shares":
        fitted.print_shares(options.replay)
    elif options.command == "early":
        print(fitted.early_ends(list(tables.measured_tables())))
    else:
        options.folder.mkdir(parents=True, exist_ok=True)
        tables.measure(options.folder, only=options.only)


if __name__ == "__main__":
    main()
