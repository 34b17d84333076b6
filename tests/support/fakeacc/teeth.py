"""The waits of the accelerator back end: what breaks without each, and that it is noticed.

    PYTHONPATH=tests python -m support.fakeacc.teeth

runs a small program for every wait, once as it is and once without the wait, and prints the table.
A wait has teeth if the program is clean with it and the checker reports it missing. A few waits
order no memory; of them the table says in words what they are for.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass

from . import clear_reports, drain, load, reports, scenarios
from .scenarios import Scenario
from .sites import Site, find_sites, left_out


@dataclass(frozen=True)
class Tooth:
    """A row of the table.

    Attributes:
        without: what happens without the wait; for one that orders no memory, what it is for.
        scenario: a program that needs it; None if it orders no memory.
    """

    without: str
    scenario: Scenario | None = None


TEETH = {
    "transfer.Value.send: stream wait": Tooth(
        "a device reads a host copy that another device is still filling", scenarios.training
    ),
    "transfer.Value.fetch: stream wait": Tooth(
        "compute reads an activation before it is there", scenarios.training
    ),
    "transfer.Value.fetch: stream wait 2": Tooth(
        "a layer overwrites its input while that is on its way home", scenarios.overwriting
    ),
    "transfer.Value.fetch: record_stream": Tooth(
        "the next activation is copied over one that compute still reads", scenarios.training
    ),
    "transfer.Value.home: host wait": Tooth(
        "the user reads an output before it is home", scenarios.evaluation
    ),
    "transfer.download: stream wait": Tooth(
        "what goes home is read before compute has written it", scenarios.training
    ),
    "transfer.download: record_stream": Tooth(
        "compute writes over what is still on its way home", scenarios.training
    ),
    "stage_weights.StageWeights._place_gradient: stream wait": Tooth(
        "the next call takes along a gradient that is not home yet", scenarios.uploading_early
    ),
    "stage_weights.StageWeights.arrive: stream wait": Tooth(
        "compute reads weights before they are there", scenarios.training
    ),
    "stage_weights.StageWeights.arrive: record_stream": Tooth(
        "an upload overwrites a gradient that compute still converts", scenarios.accumulation
    ),
    "stage_weights.StageWeights.send_gradients: stream wait": Tooth(
        "orders nothing that `transfer.download` does not: keeps compute's time out of the copies' "
        "measured time"
    ),
    "stage_weights.StageWeights.release: stream wait": Tooth(
        "the next weights overwrite those that compute still reads", scenarios.training
    ),
    "dispatch._DeviceRun._run_tasks: host wait": Tooth(
        "orders nothing that the store's own waits do not: a download that failed is told by its "
        "call, with its stage"
    ),
    "dispatch._DeviceRun._give_up: host wait": Tooth(
        "after a failure the user's change reaches weights that an upload still reads",
        scenarios.failing_while_weights_arrive,
    ),
    "gradients.Contribution.wait: host wait": Tooth(
        "a step adds up a gradient that is not home yet", scenarios.stepping_early
    ),
    "parameters.ParameterStore.adopt_user_gradients: host wait": Tooth(
        "the user's gradient is added to one that is not home yet", scenarios.adding_early
    ),
    "parameters.ParameterStore.expose_gradients: host wait": Tooth(
        "the user sees a gradient that is not home yet", scenarios.showing_early
    ),
    "parameters.ParameterStore.wait_unread: host wait": Tooth(
        "new parameters are written while an upload reads the old ones",
        scenarios.publishing_early,
    ),
    "devices.accelerator.AcceleratorDevice.wait: stream wait": Tooth(
        "none of the stream waits above happens", scenarios.training
    ),
    "devices.accelerator.AcceleratorDevice.mark_use: record_stream": Tooth(
        "none of the memory above is kept", scenarios.training
    ),
    "devices.accelerator.AcceleratorEvent.synchronize: host wait": Tooth(
        "none of the host waits for an event above happens", scenarios.reading
    ),
    "devices.accelerator.AcceleratorDevice.synchronize: host wait": Tooth(
        "a run that failed leaves copies behind that use host memory",
        scenarios.failing_while_weights_arrive,
    ),
    "devices.accelerator.AcceleratorDevice.close: host wait": Tooth(
        "copies use host memory after the device was closed", scenarios.closing
    ),
    "devices.accelerator.AcceleratorDevice.start_clock: host wait": Tooth(
        "orders no memory: the host's clock is read when the device is at the point"
    ),
    "devices.accelerator.AcceleratorMoment.ns: host wait": Tooth(
        "orders no memory: a runtime refuses to tell the time of a point that is still to come"
    ),
}


def bites(name: str) -> list[str]:
    """What the checker reports with the wait left out.

    Raises:
        AssertionError: The program is not clean with the wait in place.
    """
    scenario = TEETH[name].scenario
    assert scenario is not None
    with_it = found_in(scenario, None)
    assert not with_it, f"{name}: reports although nothing is left out: {with_it[:3]}"
    return found_in(scenario, find_sites()[name])


def found_in(scenario: Scenario, omitted: Site | None) -> list[str]:
    """The checker's reports on a run of the program."""
    drain()
    clear_reports()
    try:
        if omitted is None:
            scenario()
        else:
            with left_out(omitted):
                scenario()
    finally:
        drain()
        found = [str(report) for report in reports()]
        clear_reports()
    return found


def rows() -> Iterator[str]:
    """The table of `docs/design.md`, in Markdown."""
    yield "| wait | without it | shown by |"
    yield "| --- | --- | --- |"
    for name, tooth in TEETH.items():
        shown = "words" if tooth.scenario is None else f"`{tooth.scenario.__name__}`"
        yield f"| `{name}` | {tooth.without} | {shown} |"


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    """Runs and prints everything."""
    load(2)
    missing = sorted(find_sites().keys() ^ TEETH.keys())
    for name in missing:
        _say(f"NOT IN TABLE AND CODE ALIKE  {name}")
    toothless = 0
    for name, tooth in TEETH.items():
        if tooth.scenario is None:
            _say(f"in words    {name}: {tooth.without}")
            continue
        found = bites(name)
        toothless += not found
        _say(f"{len(found):4} reports{'' if found else ' NO TEETH'}  {name}: {tooth.without}")
        if found:
            _say(f"              {found[0]}")
    return 1 if missing or toothless else 0


if __name__ == "__main__":
    sys.exit(main())
