"""What nothing hides of the messages of one step, and how long stages take together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from whichlora.parallel.base import Message
from whichlora.parallel.communication import Sent, communication, extended, sent_over, step_s
from whichlora.spec.links import LinkSpec

LINKS = LinkSpec(
    key="x", name="x", bandwidth_bytes_per_s=1e9, latency_s=1e-9, relative_deviation=0.1
)
COMPUTING = {"forward": 10.0, "backward": 20.0, "optimizer": 1.0}


def sent(message_s: Any, count: int, hidden_by: Any, **fields: Any) -> Sent:
    message = Message(
        what="a tensor",
        collective="all_gather",
        num_bytes=1,
        count=count,
        size=2,
        hidden_by=hidden_by,
        **fields,
    )
    return Sent(message=message, message_s=message_s)


def exposed(*messages: Sent, micro_steps: int = 1) -> float:
    return float(communication(messages, COMPUTING, micro_steps=micro_steps).exposed_s)


def test_what_nothing_hides_is_waited_for() -> None:
    time = communication([sent(0.5, 4, "nothing")], COMPUTING, micro_steps=1)
    assert (time.exposed_s, time.total_s, time.overlapped_s) == (2.0, 2.0, 0.0)


def test_of_messages_shorter_than_the_computing_the_first_is_waited_for() -> None:
    assert exposed(sent(0.2, 10, "forward")) == pytest.approx(0.2)


def test_of_longer_messages_the_computing_hides_what_it_lasts() -> None:
    assert exposed(sent(3.0, 10, "forward")) == pytest.approx(30 - 10 * 9 / 10)
    assert exposed(sent(30.0, 1, "forward")) == 30.0  # one message has nothing beside it


def test_every_micro_step_begins_with_a_message_that_nothing_hides() -> None:
    assert exposed(sent(0.2, 40, "backward"), micro_steps=4) == pytest.approx(4 * 0.2)


def test_the_last_micro_step_alone_hides_what_it_alone_sends() -> None:
    reduction = sent(1.0, 10, "backward", micro_steps=1)
    assert exposed(reduction, micro_steps=4) == pytest.approx(10 - 20 / 4 * 9 / 10)
    assert exposed(reduction) == pytest.approx(1.0)


def test_slower_links_are_waited_for_longer() -> None:
    messages = [sent(3.0, 10, "forward"), sent(0.5, 1, "nothing")]
    usual = communication(messages, COMPUTING, micro_steps=1)
    slower = communication(messages, COMPUTING, micro_steps=1, slower=1.1)
    assert slower.total_s == pytest.approx(1.1 * usual.total_s)
    assert slower.exposed_s == pytest.approx(usual.exposed_s + 3.05)


def test_what_overlaps_slows_the_computing_as_much_as_the_links_say() -> None:
    messages = [sent(0.2, 10, "forward"), sent(0.5, 1, "nothing")]
    time = communication(messages, COMPUTING, micro_steps=1, contention=0.5)
    assert time.slowdown_s == pytest.approx(0.5 * (2.0 - 0.2))
    assert time.overlapped_s == pytest.approx(2.0 - 0.2)


def test_kernels_that_wait_for_a_network_slow_nothing() -> None:
    slow = Sent(message=sent(1.0, 10, "backward").message, message_s=1.0, on_node_s=0.1)
    time = communication([slow], COMPUTING, micro_steps=1, contention=1.0)
    assert (time.exposed_s, time.overlapped_s) == (1.0, 9.0)
    assert time.slowdown_s == pytest.approx(1.0)


def test_arrays_give_what_each_element_does() -> None:
    times = np.array([0.1, 1.0, 5.0])
    many = communication([sent(times, 10, "backward")], COMPUTING, micro_steps=1).exposed_s
    assert list(many) == pytest.approx([exposed(sent(each, 10, "backward")) for each in times])


def test_messages_take_what_the_links_give() -> None:
    message = Message(what="x", collective="all_reduce", num_bytes=10**9, count=3, size=2)
    (priced,) = sent_over(LINKS, [message], 8)
    assert priced.total_s == pytest.approx(3.0)
    assert extended(LINKS, [message], 8) == ()  # nothing was measured


def test_ranks_that_compute_together_are_as_slow_as_the_slowest() -> None:
    assert step_s([(4.0, 1.0, 1), (5.0, 0.5, 1)], order="at once", micro_steps=2) == 5.5


def test_a_pipeline_idles_for_the_stages_that_fill_it() -> None:
    stages = [(8.0, 1.0, 4)]
    piped = step_s(stages, order="pipelined", micro_steps=8)
    assert piped == 8.0 + 3.0 + 1.0  # it idles for (p - 1) / m of the computing
    assert step_s(stages, order="one after the other", micro_steps=8) == 4 * 8.0 + 1.0
