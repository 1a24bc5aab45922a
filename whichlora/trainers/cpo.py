"""TRL's `CPOTrainer`, with the losses of CPO, SimPO and AlphaPO: pairs, and no reference.

Source: TRL 1.16 `CPOTrainer.concatenated_forward` (cpo_trainer.py, line 787), `cpo_loss`,
`CPOConfig.__post_init__`.
"""

from __future__ import annotations

from dataclasses import replace

from whichlora.spec.options import Option
from whichlora.spec.run import RunConfig
from whichlora.trainers import orpo, trl
from whichlora.trainers.base import LogitsLoss

_BETA = Option(name="beta", summary="temperature of the loss", default=0.1)
_LOSS = Option(
    name="loss_type",
    summary="how the log-probabilities of a pair are compared",
    default="sigmoid",
    choices=("sigmoid", "hinge", "ipo", "simpo", "alphapo"),
)
_ALPHA = Option(
    name="cpo_alpha", summary="weight of the chosen answers' cross entropy; 0 drops it", default=1.0
)


def _logits_loss(run: RunConfig) -> LogitsLoss:
    # `__post_init__` of cpo_config.py makes alphapo simpo with cpo_alpha 0
    is_alpha_po = run.trainer_option(_LOSS.name) == "alphapo"
    weighs = _ALPHA.number(run.trainer_options) != 0
    return trl.loss_of_logits(run, has_cross_entropy=weighs and not is_alpha_po)


TRAINER = replace(
    orpo.TRAINER,
    name="cpo",
    also_called={"CPOTrainer": "", "simpo": "give --trainer-option loss_type=simpo"},
    summary="TRL's CPOTrainer: pairs of answers, no reference; SimPO, too",
    library_class="trl.experimental.cpo.CPOTrainer",
    config_class="trl.experimental.cpo.CPOConfig",
    learning_rate=1e-6,
    rate_source="TRL's CPOConfig",
    options=(_BETA, _LOSS, _ALPHA, trl.DISABLE_DROPOUT),
    logits_loss=_logits_loss,
)
