"""Write the measured times of `calibration/links/` from the tables of NVIDIA's AIConfigurator.

    pip download aiconfigurator-core==0.12.0 --no-deps && unzip aiconfigurator_core-*.whl
    python benchmarks/link_tables.py aiconfigurator_core/systems/data

Its tables (Apache-2.0) hold times of nccl-tests by collective, number of GPUs and size of the whole
tensor. Everything else in the files is written by hand.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pandas

from whichlora.store.links import FOLDER, read_links
from whichlora.store.paths import data_folder
from whichlora.timing.links import RING_FACTORS

# machine: table of the wheel, the newest NCCL of each
TABLES = {
    "hgx-a100": "a100_sxm/comm/nccl/2.27.3",
    "hgx-h100": "h100_sxm/comm/nccl/2.29.2",
    "hgx-h200": "h200_sxm/comm/nccl/2.29.2",
    "hgx-b200": "b200_sxm/comm/nccl/2.29.2",
    "hgx-b300": "b300_sxm/comm/nccl/2.29.2",
    "gb200-tray": "gb200/comm/nccl/2.29.2",
    "gb300-tray": "gb300/comm/nccl/2.29.2",
    "l40s-pcie": "l40s/comm/nccl/2.27.3",
    "rtx-pro-6000-pcie": "rtx_pro_6000_server/comm/nccl/2.29.2",
}
ELEMENT_BYTES = 2  # of "half"; the tables count elements


def measured(folder: Path) -> dict[str, Any]:
    rows = pandas.read_parquet(folder / "nccl_perf.parquet")
    rows = rows[(rows.nccl_dtype == "half") & rows.op_name.isin(RING_FACTORS)]
    sizes = sorted({int(size) for size in rows.message_size})
    times: dict[str, dict[str, list[float]]] = {}
    for (collective, number), group in rows.groupby(["op_name", "num_gpus"]):
        by_size = group.groupby("message_size").latency.median()
        times.setdefault(str(collective), {})[str(number)] = [
            float(f"{1e3 * by_size[size]:.5g}") for size in sizes
        ]
    return {"sizes_bytes": [ELEMENT_BYTES * size for size in sizes], "microseconds": times}


def text_of(values: dict[str, Any]) -> str:
    """JSON with every list of numbers in one line."""
    text = json.dumps(values, indent=2, sort_keys=True, ensure_ascii=False)
    return re.sub(r"\[[\s\d.,e+-]+\]", lambda found: " ".join(found[0].split()), text) + "\n"


def main() -> None:
    data = Path(sys.argv[1])
    for machine, table in TABLES.items():
        path = data_folder("calibration") / FOLDER / f"{machine}.json"
        values = json.loads(path.read_text()) | measured(data / table)
        path.write_text(text_of(values))
        print(machine, len(read_links(path).sizes_bytes), "sizes")


if __name__ == "__main__":
    main()
