"""Fill the outputs that README.md shows: `readme.py [--check]`.

After a line `<!-- OUTPUT: whichlora ... -->` the code block below it becomes what that command
prints now; `--check` changes nothing and fails where a block is out of date. Other `OUTPUT` lines
are filled by hand, from runs that take a machine and minutes.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"
_BLOCK = re.compile(r"(<!-- OUTPUT: (whichlora [^\n]*) -->\n```text\n)(.*?)(```\n)", re.DOTALL)


def printed(command: str) -> str:
    """What `command` prints where nobody measured anything."""
    arguments = [sys.executable, "-m", *shlex.split(command)]
    with tempfile.TemporaryDirectory() as empty:
        settings = os.environ | {"WHICHLORA_CALIBRATION": empty, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(arguments, capture_output=True, text=True, check=True, env=settings)
    return "\n".join(line.rstrip() for line in done.stdout.splitlines()).strip("\n") + "\n"


def write_or_check(page: Path, filled: str) -> None:
    """Make `filled` the text of `page`; with `--check` end where it is not."""
    if "--check" not in sys.argv[1:]:
        page.write_text(filled, encoding="utf-8")
    elif filled != page.read_text(encoding="utf-8"):
        sys.exit(f"{page.name}: an output is out of date; run benchmarks/{Path(sys.argv[0]).name}")


def main() -> None:
    text = README.read_text(encoding="utf-8")
    write_or_check(README, _BLOCK.sub(lambda found: found[1] + printed(found[2]) + found[4], text))


if __name__ == "__main__":
    main()
