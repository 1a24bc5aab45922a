"""NCCL's buffers, outside of the framework's allocator."""

from __future__ import annotations

import pytest

from whichlora.parallel.communicators import communicator_bytes
from whichlora.units import MiB


@pytest.mark.parametrize(("size", "mebibytes"), [(1, 0), (2, 340), (3, 690), (64, 690)])
def test_a_communicator_of_two_has_half_the_channels(size: int, mebibytes: int) -> None:
    assert communicator_bytes(size) == mebibytes * MiB
