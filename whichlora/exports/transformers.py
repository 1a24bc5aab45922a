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
    script = train_script(
        recipe.run,
        target_modules=recipe.target_modules,
        epochs=recipe.epochs,
        learning_rate=recipe.learning_rate,
        rate_source=recipe.rate_source,
        seed=recipe.seed,
        tokenizer=recipe.tokenizer,
        weights=recipe.weights,
        model_config=recipe.model_config,
        batching=recipe.batching,
        masked_lm=recipe.masked_lm,
        trust_remote_code=recipe.trust_remote_code,
        data_format=recipe.data_format,
        train_on=recipe.train_on,
        keeping=recipe.keeping,
    )
    return Export(
        files={FILE: script, **launch_files(recipe.run)},
        command=launch_line(recipe.run, FILE),
        run=recipe.run,
    )
