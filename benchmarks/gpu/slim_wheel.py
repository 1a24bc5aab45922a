"""Cut a bitsandbytes wheel down to its CPU library and one CUDA library, to carry it.

    python -m pip download --no-deps --only-binary=:all: -d wheels bitsandbytes
    python benchmarks/gpu/slim_wheel.py wheels/bitsandbytes-*.whl --cuda 130

A wheel of 40 MiB holds libraries for every CUDA version; a machine uses one.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import zipfile
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--cuda", default="130", help="version without the dot")
    options = parser.parse_args()
    output = slimmed(options.wheel, options.cuda)
    print(f"{output}: {output.stat().st_size / 2**20:.1f} MiB")


def slimmed(wheel: Path, cuda: str) -> Path:
    """A wheel of the same name in a folder `slim` beside `wheel`; its RECORD fits its files.

    Raises:
        SystemExit: the wheel has no library for `cuda`.
    """
    output = wheel.parent / "slim" / wheel.name
    output.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(wheel) as source:
        names = source.namelist()
        if not any(name.endswith(f"_cuda{cuda}.so") for name in names):
            raise SystemExit(
                f"{wheel}: has no library for CUDA {cuda}; it has {', '.join(_libraries(names))}"
            )
        record = next(name for name in names if name.endswith(".dist-info/RECORD"))
        lines = []
        with zipfile.ZipFile(output, "w", zipfile.ZIP_DEFLATED) as target:
            for name in names:
                if name == record or (_is_library(name) and not _is_for(name, cuda)):
                    continue
                data = source.read(name)
                target.writestr(name, data)
                digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
                lines.append(f"{name},sha256={digest.decode()},{len(data)}")
            target.writestr(record, "\n".join([*lines, f"{record},,", ""]))
    return output


def _is_library(name: str) -> bool:
    return "libbitsandbytes_" in name


def _is_for(name: str, cuda: str) -> bool:
    return name.endswith((f"libbitsandbytes_cuda{cuda}.so", "libbitsandbytes_cpu.so"))


def _libraries(names: list[str]) -> list[str]:
    return [Path(name).name for name in names if _is_library(name)]


if __name__ == "__main__":
    main()
