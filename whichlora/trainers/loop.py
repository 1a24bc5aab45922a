"""A loop that a script writes out, without the Trainer and without accelerate.

    for batch in batches:
        outputs = model(**batch)
        loss = outputs.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

`outputs` holds the logits through the backward and the optimizer's step. CPython drops the old
object only when the name gets another one, so that the logits of a step live until the forward of
the next one is done. `loss` holds the nodes of the graph as long, but not what they have saved.
Autocast, where the precision has it, is a `with torch.autocast(...)` around forward and loss.
"""

from __future__ import annotations

from whichlora.spec.options import Option
from whichlora.spec.run import RunConfig
from whichlora.trainers.base import OutputsHeld, Trainer, always


def _outputs_held(run: RunConfig) -> OutputsHeld:
    return "until_next_outputs"


def _notes(run: RunConfig) -> tuple[str, ...]:
    if run.gradient_checkpointing or run.trainer_option("use_cache"):
        return ()  # the former switches the cache off
    return (
        "the loop is counted with model.config.use_cache = False; else its outputs hold the keys "
        "and values of every layer, too: --trainer-option use_cache=true",
    )


_CACHE = Option(
    name="use_cache",
    summary="the model caches while it trains, so that outputs hold keys and values, too",
    default=False,
)


TRAINER = Trainer(
    name="loop",
    summary="a plain loop that holds `outputs`",
    steps="whichlora.profiler.plain_loop:measure_loop",
    takes_images=True,
    outputs_held=_outputs_held,
    narrows_embedding_states=always,  # only the Trainer asks bitsandbytes for 32 bits
    notes=_notes,
    options=(_CACHE,),
)
