"""transformers' `Trainer`, and what accelerate makes of a model inside it.

Source: transformers 5.23 `Trainer.training_step`, `compute_loss`; accelerate 1.15
`Accelerator.prepare_model`, `ConvertOutputsToFp32`.
"""

from __future__ import annotations

from whichlora.spec.loss_heads import LOSS_HEADS
from whichlora.spec.run import RunConfig
from whichlora.trainers import liger
from whichlora.trainers.base import OutputsHeld, Trainer


def _outputs_held(run: RunConfig) -> OutputsHeld:
    """`compute_loss` drops the outputs; one that computes its own loss (raw) may hold them."""
    return "until_backward" if LOSS_HEADS[run.loss_head].is_outside else "until_loss"


# Of tools whose supervised steps are those of the Trainer: imports/ has what their files add.
_OF_FILE = "its file or command behind --from says the rest, such as dtypes and checkpointing"

TRAINER = Trainer(
    name="transformers",
    also_called=dict.fromkeys(("Trainer", "hf", "peft"), "")
    | dict.fromkeys(("LLaMA-Factory", "Axolotl", "swift", "ms-swift"), _OF_FILE),
    summary="the Trainer of transformers",
    steps="whichlora.profiler.finetune:measure_finetune",
    library_class="transformers.Trainer",
    config_class="transformers.TrainingArguments",
    options=liger.OPTIONS,
    kernels=liger.kernels,
    loss_of=liger.loss_of,
    notes_of=liger.notes_of,
    arguments=liger.arguments,
    takes_images=True,
    gathers_batches=True,
    outputs_held=_outputs_held,
    widens_outputs=True,  # `prepare_model` wraps `forward` in `convert_outputs_to_fp32`
    clips_gradients=True,  # `max_grad_norm` is 1.0 unless told
)
