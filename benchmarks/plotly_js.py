"""Take plotly.js, which the HTML report carries, from the plotly wheel of constraints.txt.

python benchmarks/plotly_js.py            write whichlora/html/plotlyjs/
python benchmarks/plotly_js.py --check    say whether it is what that wheel holds (exit code 1: no)
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "whichlora" / "html_report" / "plotlyjs"
SCRIPT = "plotly/package_data/plotly.min.js"


def plotly_version() -> str:
    match = re.search(r"^plotly==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert match, "constraints.txt names no version of plotly"
    return match[1]


def downloaded_wheel(version: str) -> zipfile.ZipFile:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder]
        subprocess.run([*command, f"plotly=={version}"], check=True)
        (path,) = Path(folder).glob("plotly-*.whl")
        return zipfile.ZipFile(io.BytesIO(path.read_bytes()))


def bundled_files(wheel: zipfile.ZipFile, version: str) -> dict[str, bytes]:
    """What the folder holds: the script, its licence, and where both are from."""
    script = wheel.read(SCRIPT)
    match = re.search(rb"plotly\.js v(\S+)", script[:200])
    assert match, f"{SCRIPT} does not say its version"
    source = {
        "file": f"{SCRIPT} of plotly {version} (PyPI)",
        "version": match[1].decode(),
        "sha256": hashlib.sha256(script).hexdigest(),
    }
    return {
        "plotly.min.js": script,
        "LICENSE": wheel.read(f"plotly-{version}.dist-info/licenses/LICENSE.txt"),
        "source.json": (json.dumps(source, indent=1) + "\n").encode(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    version = plotly_version()
    files = bundled_files(downloaded_wheel(version), version)
    if check:
        stale = [name for name in files if (FOLDER / name).read_bytes() != files[name]]
        for name in stale:
            print(f"{FOLDER / name}: is not that of plotly {version}", file=sys.stderr)
        return 1 if stale else 0
    FOLDER.mkdir(exist_ok=True)
    for name, data in files.items():
        (FOLDER / name).write_bytes(data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
