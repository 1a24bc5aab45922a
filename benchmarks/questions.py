"""Answer the questions of `questions.md` anew: `questions.py [--check]`.

Each question has a command, and below it the lines of what it prints that a pattern chooses:
`<!-- SHOWS: pattern -->`. `--check` changes nothing and fails where an answer is out of date.
"""

from __future__ import annotations

import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from readme import printed, write_or_check

PAGE = Path(__file__).with_name("questions.md")
_BLOCK = re.compile(
    r"(```bash\n(whichlora [^\n]*)\n```\n<!-- SHOWS: ([^\n]*) -->\n```text\n)(.*?)(```\n)",
    re.DOTALL,
)


def answered(command: str, pattern: str) -> str:
    """The lines that `command` prints where `pattern` is found in them."""
    chosen = [line for line in printed(command).splitlines() if re.search(pattern, line)]
    if not chosen:
        sys.exit(f"{PAGE.name}: {command}: no line has {pattern!r}")
    return "".join(f"{line.strip()}\n" for line in chosen)


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    asked = [match.group(2, 3) for match in _BLOCK.finditer(text)]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        answers = dict(zip(asked, pool.map(lambda pair: answered(*pair), asked), strict=True))
    filled = _BLOCK.sub(lambda found: found[1] + answers[found.group(2, 3)] + found[5], text)
    write_or_check(PAGE, filled)
    print(f"{len(asked)} questions answered")


if __name__ == "__main__":
    main()
