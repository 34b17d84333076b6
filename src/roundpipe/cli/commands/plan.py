"""Plan the stages of a model: which layers run together, in which order, on how many devices.

COSTS is a file that model.costs().save(path) wrote, or one written by hand (docs/plans.md tells
what it holds); --published plans for the published layer times of a well-known model instead.
Printed are the plan, why it is as fast as it is and what would make it faster, where the devices'
time goes, and a timeline.
"""

from __future__ import annotations

import argparse

HELP = "plan the stages of a model from measured or published layer times"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    from roundpipe.cli.planning import add_output, add_workload

    add_workload(parser)
    parser.add_argument(
        "--memory", type=float, metavar="GIB", help="what stages may use of each device's memory"
    )
    parser.add_argument(
        "--save", metavar="FILE", help="write the plan as JSON, for roundpipe simulate --plan"
    )
    parser.add_argument(
        "--account", metavar="FILE", help="draw the bubble account (.png, .svg, .pdf)"
    )
    add_output(parser, "print only the plan, its bubble in percent and its time, as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Plan, and show the plan."""
    from roundpipe.cli.planning import plan_command

    return plan_command(arguments)
