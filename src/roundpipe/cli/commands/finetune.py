"""Fine-tune a causal language model as a recipe says, and save it.

The recipe is a YAML file; docs/finetune.md lists its keys. Written to the recipe's output.folder:
the model and tokenizer (for transformers), metrics.jsonl, loss.png, and the recipe in full.
"""

from __future__ import annotations

import argparse
import importlib.util

from roundpipe.cli.problems import UsageError

HELP = "fine-tune a language model as a recipe says"
_NEEDED = ("transformers", "pydantic", "yaml", "rich", "matplotlib")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("recipe", metavar="RECIPE", help="a YAML file, see recipes/")
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="KEY=VALUE",
        nargs="+",
        action="extend",
        default=[],
        help="change the recipe, as in: --set training.steps=100 optimizer.lr=1e-4",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the recipe."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"finetune needs {', '.join(missing)}; run: pip install 'roundpipe[demo]'")
    from roundpipe.cli.recipe_file import read_recipe

    recipe = read_recipe(arguments.recipe, arguments.overrides)
    from roundpipe.cli.console import ConsoleReporter

    reporter = ConsoleReporter(arguments.recipe, recipe.training.steps)
    with reporter.working("starting"):
        # These take seconds to import, so a bad recipe is told before.
        from roundpipe.cli.job import FineTuning
    FineTuning(recipe, reporter).run()
    return 0
