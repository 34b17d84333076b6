"""What the commands ``plan`` and ``simulate`` do. Needs nothing but, for pictures, matplotlib."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from roundpipe.cli.problems import UsageError
from roundpipe.costs import read_document
from roundpipe.plan import (
    Machine,
    PlanLimits,
    Planned,
    StagePlan,
    Timeline,
    Workload,
    plan_iteration,
    simulate,
)
from roundpipe.plan.documents import plan_from_document, workload_from_document
from roundpipe.plan.explain import account_of_plan
from roundpipe.plan.published import PublishedModel, published_model, published_names
from roundpipe.plan.report import plan_document, plan_text, simulation_document, simulation_text
from roundpipe.plan.trace_events import save_trace_document
from roundpipe.plan.workload import MODES, check_count
from roundpipe.plot import plot_account, plot_timeline, save_picture

_GIB = 2**30
_PICTURES = (".png", ".svg", ".pdf")
_FRAME = 16  # characters of a timeline's row beside the slices, for usual names of devices


def add_workload(parser: argparse.ArgumentParser) -> None:
    """The arguments that say what is planned or simulated."""
    parser.add_argument("costs", metavar="COSTS", nargs="?", help="a costs file (JSON)")
    parser.add_argument(
        "--published", metavar="NAME", help=f"one of: {', '.join(published_names())}"
    )
    parser.add_argument(
        "--mode",
        choices=MODES,
        help="how steps and calls follow each other; by default as the costs file says, else sync",
    )
    parser.add_argument("--devices", type=int, metavar="N", help="so many devices, all alike")
    parser.add_argument(
        "--microbatches", type=int, metavar="N", help="microbatches of an iteration"
    )


def add_output(parser: argparse.ArgumentParser, json_help: str) -> None:
    """The arguments that say what is shown."""
    parser.add_argument("--json", action="store_true", help=json_help)
    parser.add_argument("--picture", metavar="FILE", help="draw the timeline (.png, .svg, .pdf)")
    parser.add_argument(
        "--trace", metavar="FILE", help="write the timeline for https://ui.perfetto.dev"
    )


def plan_command(arguments: argparse.Namespace) -> int:
    """``roundpipe plan``."""
    with _usage():
        _check_picture(arguments.picture)
        _check_picture(arguments.account)
        published, workload = _workload(arguments)
        workload = _with_memory(workload, arguments.memory)
        planned = plan_iteration(workload, None if published is None else published.limits)
        document = plan_document(planned)
        if arguments.save:
            Path(arguments.save).write_text(json.dumps(document) + "\n", encoding="utf-8")
        account, timeline = account_of_plan(planned)
        timeline = replace(timeline, title=_title(planned))
        _write(arguments, timeline)
        if arguments.account:
            save_picture(plot_account({workload.costs.name: account}), arguments.account)
    print(json.dumps(document) if arguments.json else plan_text(planned, published, _width()))
    return 0


def simulate_command(arguments: argparse.Namespace) -> int:
    """``roundpipe simulate``."""
    with _usage():
        _check_picture(arguments.picture)
        published, workload = _workload(arguments)
        if arguments.early_head:
            rules = replace(workload.rules, early_fused_forward=True)
            workload = replace(workload, rules=rules)
        plan, per_round = _plan_to_simulate(arguments, published, workload)
        simulation = simulate(
            workload,
            plan,
            microbatches_per_round=per_round,
            iterations=arguments.iterations,
            title=f"{workload.costs.name}, {workload.mode}",
        )
        _write(arguments, simulation.timeline)
    if arguments.json:
        print(json.dumps(simulation_document(workload, simulation)))
    else:
        print(simulation_text(workload, simulation, _width()))
    return 0


@contextmanager
def _usage() -> Iterator[None]:
    """What the numbers or files make impossible is the user's to change."""
    try:
        yield
    except UsageError:
        raise
    except OSError as error:
        raise UsageError(
            f"{error.filename}: {error.strerror}; give the path of a file that can be read, or of "
            "one that can be written"
        ) from error
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error


def _workload(arguments: argparse.Namespace) -> tuple[PublishedModel | None, Workload]:
    if (arguments.costs is None) == (arguments.published is None):
        given = "neither" if arguments.costs is None else "both"
        raise UsageError(
            f"{given} of COSTS and --published given; expected one: a file from "
            "model.costs().save(path), or --published with one of "
            f"{', '.join(published_names())}"
        )
    published: PublishedModel | None = None
    if arguments.published is not None:
        published = published_model(arguments.published)
        workload = published.workload(arguments.mode or "sync")
    else:
        workload = workload_from_document(read_document(arguments.costs))
        if arguments.mode is not None:
            workload = replace(workload, mode=arguments.mode)
        if not any(
            layer.again_ms + layer.forward_ms + layer.backward_ms for layer in workload.costs.layers
        ):
            raise UsageError(
                f"all layers of {arguments.costs} take 0 ms; expected the times of at least one, "
                "as measured by model.costs() after some calls"
            )
    if arguments.devices is not None:
        check_count("--devices", arguments.devices)
        workload = replace(workload, machine=_of_size(workload.machine, arguments.devices))
    if arguments.microbatches is not None:
        check_count("--microbatches", arguments.microbatches)
        workload = replace(workload, microbatches=arguments.microbatches)
    return published, workload


def _of_size(machine: Machine, devices: int) -> Machine:
    """So many devices, all like the first."""
    first = machine.devices[0]
    like = replace(first, name=first.name.rpartition(":")[0] or first.name)
    return Machine.uniform(
        devices, machine.hop_ms, like=like, links=machine.links, stage_ms=machine.stage_ms
    )


def _with_memory(workload: Workload, gib: float | None) -> Workload:
    if gib is None:
        return workload
    if not gib > 0:
        raise UsageError(f"--memory is {gib}; expected GiB above 0")
    machine = workload.machine
    devices = tuple(replace(spec, memory_bytes=int(gib * _GIB)) for spec in machine.devices)
    return replace(workload, machine=replace(machine, devices=devices))


def _plan_to_simulate(
    arguments: argparse.Namespace, published: PublishedModel | None, workload: Workload
) -> tuple[StagePlan, int]:
    """The plan and its microbatches per round."""
    if arguments.plan is not None:
        document = read_document(arguments.plan)
        if "layers" in document and "backward" not in document:
            raise UsageError(
                f"{arguments.plan} is a costs file; expected a plan, as roundpipe plan COSTS "
                "--save FILE writes it"
            )
        count: Any = document.get("microbatches_per_round", workload.microbatches)
        return plan_from_document(document), count
    if published is not None:
        count = published.microbatches_per_round
        return published.plan, count if workload.microbatches % count == 0 else 1
    planned = plan_iteration(workload, PlanLimits())
    return planned.plan, planned.microbatches_per_round


def _title(planned: Planned) -> str:
    return (
        f"{planned.workload.costs.name}, {planned.workload.mode}: {planned.iteration_ms:.1f} ms an "
        f"iteration, bubble {planned.bubble_percent:.2f}%"
    )


def _check_picture(path: str | None) -> None:
    """Before anything is computed: would the picture be of a known kind?"""
    if path is not None and Path(path).suffix not in _PICTURES:
        raise UsageError(
            f"{path} would be a picture of unknown kind; expected a name that ends in one of "
            f"{', '.join(_PICTURES)}"
        )


def _write(arguments: argparse.Namespace, timeline: Timeline) -> None:
    if arguments.picture:
        save_picture(plot_timeline(timeline), arguments.picture)
    if arguments.trace:
        save_trace_document(arguments.trace, timeline)


def _width() -> int:
    """Characters of a timeline: as wide as the terminal is."""
    return max(shutil.get_terminal_size((100, 24)).columns - _FRAME, 20)
