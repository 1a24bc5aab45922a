"""Fuzz everything that reads what a stranger wrote.

python tests/fuzz --cases 10000 --seed 1                      that many cases of every target
python tests/fuzz --target model --cases 100000 --seed 7
python tests/fuzz --replay model-7-31                         one case again, with its traceback
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

from harness import run_target, time_limit
from targets import TARGETS

MEMORY_BYTES = 8 << 30  # a case that needs more is as bad as one that hangs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", choices=list(TARGETS), action="append")
    parser.add_argument("--cases", type=int, default=1000, help="of each target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replay", metavar="NAME")
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "case"
        os.environ |= {"HF_HUB_OFFLINE": "1", "WHICHLORA_CALIBRATION": f"{place}/calibration"}
        if arguments.replay:
            target = TARGETS[arguments.replay.partition("-")[0]]
            case = target.make(random.Random(arguments.replay))
            print(json.dumps(case, indent=1))
            with time_limit(60):
                target.run(case, folder)
            return 0
        failed = False
        for name in arguments.target or TARGETS:
            start = time.process_time()
            failures, count = run_target(
                TARGETS[name], cases=arguments.cases, seed=arguments.seed, folder=folder
            )
            took_s = time.process_time() - start
            told = f"{len(failures)} failures, {took_s:.0f} s of processor time"
            print(f"{name}: {count} cases, {told}", flush=True)
            places = Counter((one.where, one.fault[:90]) for one in failures)
            for (where, fault), number in places.most_common():
                first = next(
                    one for one in failures if (one.where, one.fault[:90]) == (where, fault)
                )
                print(f"  {number:>5}  {where}  {fault}  ({first.seed})", flush=True)
            failed = failed or bool(failures)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
