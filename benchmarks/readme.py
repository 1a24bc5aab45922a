"""Fill the outputs that README.md and docs/trainers.md show: `readme.py [--check]`.

After a line `<!-- OUTPUT: whichlora ... -->` the code block below it becomes what that command
prints now; `--check` changes nothing and fails where a block is out of date. Other `OUTPUT` lines
are filled by hand, from runs that take a machine and minutes.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import shlex
import sys
import tempfile
from pathlib import Path
from runpy import run_module

os.environ["HF_HUB_OFFLINE"] = "1"  # read where it is imported
_LATER = [  # imported by the commands themselves
    "whichlora.workflow.estimates",
    "whichlora.workflow.guide",
    "whichlora.terminal.estimate",
    "whichlora.terminal.explained",
    "whichlora.terminal.guides",
    "whichlora.terminal.notebook",
    "whichlora.terminal.sheet",
]
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["whichlora.cli", *_LATER])
ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs" / "trainers.md")
_BLOCK = re.compile(r"(<!-- OUTPUT: (whichlora [^\n]*) -->\n```text\n)(.*?)(```\n)", re.DOTALL)


def printed(command: str) -> str:
    """What `command` prints where nobody measured anything, by a fork of one that imported it."""
    arguments = shlex.split(command)
    with tempfile.TemporaryDirectory() as empty:
        if "export" in arguments:
            arguments += ["--output", f"{empty}/job"]
        output, faults, status = (Path(empty) / name for name in ("output", "faults", "status"))
        process = _FORKS.Process(target=_run, args=(arguments, empty, output, faults, status))
        process.start()
        process.join()
        # not `exitcode`: a process that another thread starts reads it first now and then, and 255
        # is left
        if not status.exists() or status.read_text() != "0":
            said = faults.read_text().strip() if faults.exists() else "it did not start"
            sys.exit(f"{command}: failed: {said}")
        text = output.read_text(encoding="utf-8").replace(f"{empty}/job/", "")
    return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n") + "\n"


def _run(arguments: list[str], empty: str, output: Path, faults: Path, status: Path) -> None:
    """The command line with its own arguments, files for its streams and nothing measured.

    How it ended is in `status`, which is not there after an exception.
    """
    for descriptor, path in ((1, output), (2, faults)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ["WHICHLORA_CALIBRATION"] = empty
    sys.argv = arguments
    code: object = 0
    try:
        run_module("whichlora", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code or 0
    sys.stdout.flush()
    status.write_text(str(code), encoding="utf-8")


def write_or_check(page: Path, filled: str) -> None:
    """Make `filled` the text of `page`; with `--check` end where it is not."""
    if "--check" not in sys.argv[1:]:
        page.write_text(filled, encoding="utf-8")
    elif filled != page.read_text(encoding="utf-8"):
        sys.exit(f"{page.name}: an output is out of date; run benchmarks/{Path(sys.argv[0]).name}")


def main() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        filled = _BLOCK.sub(lambda found: found[1] + printed(found[2]) + found[4], text)
        write_or_check(page, filled)


if __name__ == "__main__":
    main()
