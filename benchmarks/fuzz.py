"""Many random models through roundpipe and through a plain PyTorch loop.

    python benchmarks/fuzz.py [--models 2000] [--first 0]

Prints how many were equal. A model that differs is made smaller, and a program that shows the
difference is printed; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.fuzz import Pools, difference, draw_case, script, shrink


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="number of the first model")
    parser.add_argument(
        "--keep-going", action="store_true", help="count failures, print no program"
    )
    options = parser.parse_args()
    begin, failed = time.perf_counter(), 0
    with Pools() as pools:
        for seed in range(options.first, options.first + options.models):
            case = draw_case(seed)
            what = difference(case, pools)
            if what is None:
                continue
            failed += 1
            print(f"model {seed}: {what[:300]}")
            if not options.keep_going:
                case = shrink(case, lambda smaller: difference(smaller, pools) is not None)
                print(script(case, (difference(case, pools) or what).splitlines()[0]))
                return 1
    seconds = time.perf_counter() - begin
    print(
        f"{options.models - failed} of {options.models} models equal plain PyTorch, {seconds:.0f} s"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
