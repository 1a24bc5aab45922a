"""Say what the packages of this Python environment take on the disk; pip and setuptools apart.

python benchmarks/base_install.py --most 120    exit code 1: more than 120 MB of files

Run it with the Python of a fresh environment into which WhichLoRA alone was installed. Bytecode,
which pip writes unless told otherwise, is counted apart: it is no part of what is installed.
"""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path

TOOLS = ("pip", "setuptools", "wheel")
MB = 1024**2
BLOCK_BYTES = 4096  # what a file takes is a multiple of it


def taken_bytes(distribution: Distribution) -> tuple[int, int]:
    """Bytes that the files of one package take, and those of their bytecode."""
    files, bytecode = 0, 0
    for file in distribution.files or ():
        path = Path(str(file.locate()))
        if path.is_file():
            size = -(-path.stat().st_size // BLOCK_BYTES) * BLOCK_BYTES
            if path.suffix == ".pyc":
                bytecode += size
            else:
                files += size
    return files, bytecode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--most", type=int, help="MB of files, bytecode apart")
    most = parser.parse_args().most
    sizes = {one.metadata["Name"]: taken_bytes(one) for one in distributions()}
    sizes = {name: size for name, size in sizes.items() if name not in TOOLS}
    for name in sorted(sizes, key=lambda name: -sum(sizes[name])):
        files, bytecode = sizes[name]
        print(f"{files / MB:8.1f} MB and {bytecode / MB:5.1f} MB of bytecode  {name}")
    files, bytecode = (sum(each) for each in zip(*sizes.values(), strict=True))
    print(f"{files / MB:8.1f} MB and {bytecode / MB:5.1f} MB of bytecode  in all")
    if most is not None and files > most * MB:
        print(f"more than {most} MB", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
