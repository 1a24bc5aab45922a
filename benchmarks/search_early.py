"""What ending a profile early spares and gets wrong: `search_early.py`.

Of every run of the CPU table, ended as `whichlora.enough` ends it, under decisive times within
30 % of its own: how many of its batches are made, and how often those made are on the other side of
the decisive time than all together. Also how far single batches scatter.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Sequence
from statistics import mean, median

import numpy as np
import search_table
from markdown_tables import markdown_table
from search_devices import Table, measured_tables
from search_replay import ended_early

from whichlora.results import Measurement

NUM_TIMES = 200  # decisive ones of each run
REACH = 0.3
NAMES = {"finetune": "training steps", "inference": "generations"}


def times_of(record: Measurement) -> tuple[float, ...]:
    return record.step_s or record.generate_s


def early_ends(tables: Sequence[Table]) -> str:
    """A Markdown table, a row for each stage."""
    head = (
        "batches",
        "robust spread of one",
        "made, of those of a profile",
        "device time spared",
        "profiles ended early",
        "of them on the other side",
    )
    rows = []
    rng = np.random.default_rng(0)
    for phase, name in NAMES.items():
        records = [one for table in tables for one in table.records if one.run.phase == phase]
        made, spared, wrong, scatter = [], [], [], []
        for record in records:
            whole_s = mean(times_of(record))
            scatter += [abs(np.log(one / whole_s)) for one in times_of(record)]
            for decisive_s in (whole_s * np.exp(rng.uniform(-REACH, REACH, NUM_TIMES))).tolist():
                ended = ended_early(record, decisive_s)
                times_s = times_of(ended)
                made.append(len(times_s))
                spared.append(1 - ended.device_s / record.device_s)
                if len(times_s) < len(times_of(record)):
                    wrong.append((mean(times_s) > decisive_s) != (whole_s > decisive_s))
        number = len(times_of(records[0]))
        spread = 1.4826 * median(scatter) * (number / (number - 1)) ** 0.5
        made_of = f"{mean(made):.2f} of {number}"
        shares = (f"{mean(spared):.0%}", f"{len(wrong) / len(made):.0%}", f"{mean(wrong):.2%}")
        rows.append((name, f"{spread:.3f}", made_of, *shares))
    return markdown_table(head, rows)


if __name__ == "__main__":
    print(early_ends(list(measured_tables(search_table.FOLDER))))
