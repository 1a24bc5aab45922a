"""Write the table of `whichlora/spec/releases.py` anew: `releases_by_month.py LAST_MONTH`.

Needs uv and PyPI: `uv pip compile --exclude-newer DAY` names the newest releases of a day.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from whichlora.spec.releases import LIBRARIES, by_month

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "whichlora" / "spec" / "releases.py"
_COMPILE = ("uv", "pip", "compile", "-", "--no-deps", "--quiet", "--no-annotate", "--no-header")


def newest(month: str) -> list[str]:
    """Of each library, on the first day of `month`, without what is behind the release."""
    told = subprocess.run(
        [*_COMPILE, "--python-version", "3.11", "--exclude-newer", f"{month}-01"],
        input="\n".join(LIBRARIES),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    versions = dict(line.split("==") for line in told.split())
    return [versions[name].partition(".post")[0] for name in LIBRARIES]


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("give the last month, such as 2026-12")
    first = next(iter(by_month()))
    years = range(int(first[:4]), int(sys.argv[1][:4]) + 1)
    months = [f"{year}-{month:02}" for year in years for month in range(1, 13)]
    asked = [month for month in months if first <= month <= sys.argv[1]]
    rows = "".join(f"{' '.join((month, *newest(month)))}\n" for month in asked)
    text = TABLE.read_text(encoding="utf-8")
    pattern = r'(_BY_MONTH = """\n)[^"]*'
    TABLE.write_text(re.sub(pattern, lambda found: found[1] + rows, text), encoding="utf-8")
    print(f"{len(asked)} months written")


if __name__ == "__main__":
    main()
