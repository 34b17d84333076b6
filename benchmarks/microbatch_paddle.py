"""The paddle side of ``benchmarks/microbatch.py``: needs paddle and neither torch nor roundpipe.

That benchmark runs this file with the Python that ``ROUNDPIPE_PADDLE_PYTHON`` names, and reads the
seconds per split and per merge that it prints.
"""

from __future__ import annotations

import importlib
import json
import sys
import timeit
from time import process_time
from typing import Any


def make_kwargs(paddle: Any) -> dict[str, Any]:
    """The tree of the other benchmark, with paddle's tensors."""
    return {
        f"record{i}": {
            "hidden": paddle.ones([16, 32 + i]),
            "extra": [paddle.ones([16, 42 + i]), (i, float(i))],
            "name": f"name{i}",
        }
        for i in range(10)
    }


def main(pieces: int, rounds: int) -> None:
    paddle = importlib.import_module("paddle")
    functions = importlib.import_module("paddle.distributed.auto_parallel.pipelining.microbatch")
    paddle.set_device("cpu")
    kwargs = make_kwargs(paddle)

    def split() -> Any:
        return functions.split_args_kwargs_into_chunks((), kwargs, pieces)

    times = timeit.repeat(split, timer=process_time, number=10, repeat=rounds)
    print(json.dumps({"split": min(times) / 10}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
