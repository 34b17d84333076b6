"""Simulate a plan: what every device does when, and where its time goes.

COSTS is a file that model.costs().save(path) wrote, or one written by hand (docs/plans.md tells
what it holds); --published takes the published layer times of a well-known model instead. Without
--plan, the published partition is simulated with --published, and the planner's plan with COSTS.
"""

from __future__ import annotations

import argparse

HELP = "simulate a plan and show its timeline"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    from roundpipe.cli.planning import add_output, add_workload

    add_workload(parser)
    parser.add_argument(
        "--plan", metavar="FILE", help="the plan, from roundpipe plan --save (or --json)"
    )
    parser.add_argument(
        "--iterations", type=int, default=1, metavar="N", help="how many to simulate; default 1"
    )
    parser.add_argument(
        "--early-head",
        action="store_true",
        help="let the head's forward start before its input is there, as in the published "
        "simulation, although no engine can",
    )
    add_output(parser, "print ends of iterations and the bubble account as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Simulate, and show what happened."""
    from roundpipe.cli.planning import simulate_command

    return simulate_command(arguments)
