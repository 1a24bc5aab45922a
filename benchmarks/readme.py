"""Fill the outputs that README.md and docs/trainers.md show: `readme.py [--check]`.

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

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs" / "trainers.md")
_BLOCK = re.compile(r"(<!-- OUTPUT: (whichlora [^\n]*) -->\n```text\n)(.*?)(```\n)", re.DOTALL)


def printed(command: str) -> str:
    """What `command` prints where nobody measured anything."""
    arguments = [sys.executable, "-m", *shlex.split(command)]
    with tempfile.TemporaryDirectory() as empty:
        settings = os.environ | {"WHICHLORA_CALIBRATION": empty, "HF_HUB_OFFLINE": "1"}
        if "export" in arguments:
            arguments += ["--output", f"{empty}/job"]
        done = subprocess.run(arguments, capture_output=True, text=True, check=True, env=settings)
        text = done.stdout.replace(f"{empty}/job/", "")
    return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n") + "\n"


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
