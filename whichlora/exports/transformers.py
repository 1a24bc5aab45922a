"""`python train.py`: the script that performs exactly what was predicted."""

from __future__ import annotations

from whichlora.exports.launch import launch_files, launch_line
from whichlora.exports.recipe import Export, Recipe
from whichlora.exports.train_script import train_script

FILE = "train.py"


def export(recipe: Recipe) -> Export:
    """The job of `whichlora run`.

    Raises:
        ConfigError: a run that the script can't perform.
    """
    return Export(
        files={FILE: train_script(recipe), **launch_files(recipe.run)},
        command=launch_line(recipe.run, FILE),
        run=recipe.run,
    )
