"""Run a small batch through plain PyTorch and through roundpipe, and say what differs.

The model is a folder, .gguf file or hub name of a language model of transformers, or a Python file
with a function build() that returns a dict: model, inputs, label, loss_fn, and if wanted further
keyword arguments of roundpipe.verify. Exit code 0 if everything is equal, 1 if not,
2 for what cannot be used.
"""

from __future__ import annotations

import argparse

HELP = "check that a model trains as in plain PyTorch"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("source", metavar="MODEL", help="a Python file, or a model of transformers")
    parser.add_argument(
        "--function", default="build", help="the function in the Python file (default: build)"
    )
    parser.add_argument("--devices", help='as in RoundPipe (default: "cpu:2")')
    parser.add_argument(
        "--microbatches",
        type=int,
        nargs="+",
        metavar="N",
        help="numbers of pieces to cut the batch into (default: 1 2 3)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Verify the model and print the report."""
    from roundpipe import RoundPipeError, verify
    from roundpipe.cli.problems import UsageError
    from roundpipe.cli.verifying import subject_of

    counts = arguments.microbatches
    if counts is not None and min(counts) < 1:
        raise UsageError(f"--microbatches has {min(counts)}; expected numbers of at least 1")
    try:
        subject = subject_of(arguments.source, arguments.function)
        options = dict(subject.options)
        if arguments.devices is not None:
            options["devices"] = arguments.devices
        if counts is not None:
            options["num_microbatches"] = tuple(counts)
        if subject.loss_fn is not None:
            options["loss_fn"] = subject.loss_fn
        report = verify(subject.model, subject.inputs, subject.label, **options)
    except UsageError:
        raise
    except RoundPipeError as error:
        # What goes wrong in the runs is in the report; this is about what they were given.
        raise UsageError(str(error)) from error
    print(report)
    return 0 if report.ok else 1
