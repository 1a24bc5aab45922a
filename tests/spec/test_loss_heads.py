from typing import get_args

from whichlora.spec.loss_heads import LOSS_HEADS
from whichlora.spec.run import LossHead


def test_every_loss_head_has_its_facts() -> None:
    assert set(LOSS_HEADS) == set(get_args(LossHead))
