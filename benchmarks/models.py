"""Try every causal language model family of transformers, and write the table of docs/models.md.

    python benchmarks/models.py                    all families that have no result yet
    python benchmarks/models.py --again llama opt  these, whether or not they have one
    python benchmarks/models.py --again-failed     those that failed
    python benchmarks/models.py --table            only write the table

Each family is built tiny with random weights, in a process of its own with a time limit. Results go
to a file, one line each, as they come.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch
import transformers

from hf.families import CANNOT_BE_BUILT, FAMILIES, build
from hf.family_checks import (
    HeadCheck,
    allowed_difference,
    check_head,
    engine_difference,
    prepare,
    recipe_parts,
)
from roundpipe.hf import CutRefusedError

DOCUMENT = Path(__file__).parent.parent / "docs" / "models.md"
CLOSE = 1e-5


@dataclass(frozen=True)
class Result:
    """What became of a family.

    Attributes:
        family: its name in the library.
        model_class: the class that was built.
        outcome: ``works``, ``refused`` or ``failed``.
        seconds: how long it took.
        detail: why it was refused or failed.
        lists: names of the lists of layers.
        parts: letters of the recipe, see :func:`hf.family_checks.recipe_parts`.
        stage: largest relative difference with ``recompute_grain="stage"``.
        layer: the same with ``"layer"``.
        head: ``chunked``, ``full``, or empty where the loss is of a kind of its own.
        head_loss: relative difference of the whole batch's loss.
        head_grads: the same for gradients.
        balance: whether the loss has a term for the balance of experts.
    """

    family: str
    model_class: str = ""
    outcome: str = "failed"
    seconds: float = 0.0
    detail: str = ""
    lists: str = ""
    parts: str = ""
    stage: float = 0.0
    layer: float = 0.0
    head: str = ""
    head_loss: float = 0.0
    head_grads: float = 0.0
    balance: bool = False


def examine(name: str) -> Result:
    """All checks of one family."""
    family = build(name)
    cls = type(family.model).__name__
    try:
        cut, plain = prepare(family)
    except CutRefusedError as error:
        return Result(name, cls, "refused", detail=error.reason)
    stage, layer = (engine_difference(cut, plain, grain) for grain in ("stage", "layer"))
    limit = max(CLOSE, allowed_difference(name, cut))
    lists = dict.fromkeys(layer.rpartition(".")[0] for layer in cut.names[1:-1])
    head = check_head(family, cut) or HeadCheck(False, 0.0, 0.0)
    kind = "chunked" if head.chunked else "full" if cut.loss_rule else ""
    return Result(
        name,
        cls,
        "works" if max(stage, layer) <= limit else "failed",
        lists=", ".join(lists),
        parts=recipe_parts(cut, family),
        stage=stage,
        layer=layer,
        head=kind,
        head_loss=head.loss,
        head_grads=head.grads,
        balance=cut.loss_rule is not None and cut.loss_rule.balance_coefficient is not None,
    )


def in_process(name: str, limit_s: float) -> Result:
    """The result of one family, whatever happens to its process."""
    context = multiprocessing.get_context("fork")  # the library is imported already
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(name, there))
    start = time.perf_counter()
    process.start()
    there.close()
    try:
        if here.poll(limit_s):
            result: Result = here.recv()
        else:
            result = Result(name, detail=f"no result within {limit_s:.0f} s")
    except EOFError:
        process.join()
        result = Result(name, detail=f"its process ended with {process.exitcode}")
    finally:
        process.kill()
        process.join()
    return Result(**{**asdict(result), "seconds": round(time.perf_counter() - start, 1)})


def _child(name: str, answer: Connection) -> None:
    transformers.utils.logging.set_verbosity_error()
    try:
        result = examine(name)
    except Exception as error:  # noqa: BLE001 - it is the result
        lines = str(error).strip().splitlines() or [""]
        result = Result(name, detail=f"{type(error).__name__}: {lines[0][:200]}")
    answer.send(result)
    answer.close()


def read(path: Path) -> dict[str, Result]:
    """The latest result of each family."""
    known = {field.name for field in fields(Result)}
    results = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        values = json.loads(line)
        results[values["family"]] = Result(**{k: v for k, v in values.items() if k in known})
    return results


def run(names: Iterable[str], path: Path, limit_s: float) -> None:
    for name in names:
        result = in_process(name, limit_s)
        with path.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")
        print(f"{name}: {result.outcome} {result.detail} ({result.seconds} s)", flush=True)


def document(results: dict[str, Result]) -> str:
    """The text of docs/models.md."""
    found = [results[name] for name in sorted(results)]
    works = [r for r in found if r.outcome == "works"]
    exact = [r for r in works if r.stage == r.layer == 0.0]
    chunked = [r for r in works if r.head == "chunked"]
    own = [r.family for r in works if not r.head]
    lines = [
        "# Models of transformers",
        "",
        "Written by `python benchmarks/models.py`; do not edit.",
        "",
        f"transformers {transformers.__version__} knows {len(FAMILIES) + len(CANNOT_BE_BUILT)} "
        f"families of causal language models. {len(CANNOT_BE_BUILT)} cannot be built alone; of the "
        f"other {len(found)}, **{len(works)} work** and {len(found) - len(works)} do not. None has "
        "code of its own in roundpipe.",
        "",
        "Each was built tiny with random weights and trained one call on two CPU devices: 6 rows "
        "of 12 tokens with padding and labels left out, in 3 microbatches, train mode, dropout 0, "
        f"fp32, torch {torch.__version__.partition('+')[0]}.",
        "",
        "- **equal** compares outputs, loss and the gradient of every parameter with the plain "
        "model on the same microbatches, for both recompute grains: `bitwise`, or the largest "
        "difference relative to the largest number of the tensor. Most of these have a parameter "
        "in two pieces (a tied embedding), whose gradients are added in another order. "
        f"{len(exact)} are bitwise.",
        "- **head** compares the loss and gradients of a call that leaves out the logits and "
        "divides by the whole batch's labels with the plain model on the whole batch. `chunked`: "
        f"logits never exist as a whole ({len(chunked)} families); `full`: the family's loss needs "
        "them as a whole; empty: the loss is no mean over labels, so microbatches' losses stay as "
        f"the library gives them ({', '.join(own) or 'none'}).",
        "- **needs** are the parts of the cut beyond a list of layers from hidden state to hidden "
        "state: T layers return tuples, C more values carried from layer to layer, M dicts that "
        "layers share, G operations between layers, E more inputs of layers that need gradients, S "
        "parameters that layers share, L several lists, R layers called more than once, H the tail "
        "reads an embedding.",
        "- **balance**: with `output_router_logits` the loss has a term for the balance of experts "
        "that is weighted by tokens.",
        "",
        "| family | class | layers | needs | equal | head | balance |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [_row(result) for result in found]
    lines += ["", "Not built:", ""]
    lines += [f"- `{name}`: {reason}" for name, reason in CANNOT_BE_BUILT.items()]
    return "\n".join(lines) + "\n"


def _row(result: Result) -> str:
    cells = [result.family, f"`{result.model_class}`"]
    if result.outcome == "works":
        equal = max(result.stage, result.layer)
        off = max(result.head_loss, result.head_grads)
        cells += [
            f"`{result.lists}`",
            result.parts,
            "bitwise" if equal == 0.0 else f"{equal:.0e}",
            f"{result.head}, {off:.0e}" if result.head else "",
            "yes" if result.balance else "",
        ]
    else:
        cells += ["", "", f"{result.outcome}: {result.detail}", "", ""]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--again", action="store_true", help="also those that have a result")
    parser.add_argument("--again-failed", action="store_true", help="those that failed")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--results", type=Path, default=Path("models.jsonl"))
    parser.add_argument("--limit", type=float, default=180.0, help="seconds for a family")
    args = parser.parse_args()
    unknown = set(args.families) - set(FAMILIES)
    if unknown:
        parser.error(f"no such family: {', '.join(sorted(unknown))}")
    known = read(args.results)
    wanted = list(args.families or FAMILIES)
    if args.again_failed:
        wanted = [name for name in wanted if known.get(name, Result(name)).outcome == "failed"]
    elif not args.again:
        wanted = [name for name in wanted if name not in known]
    if not args.table:
        run(wanted, args.results, args.limit)
    results = read(args.results)
    failed = sorted(name for name, result in results.items() if result.outcome == "failed")
    print(f"{len(results)} of {len(FAMILIES)} families; failed: {', '.join(failed) or 'none'}")
    if len(results) == len(FAMILIES):
        DOCUMENT.write_text(document(results))
        print(f"wrote {DOCUMENT}")


if __name__ == "__main__":
    main()
