"""Seconds that the ranks of one run send for, and how many of them nothing hides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from whichlora.parallel.base import Message
from whichlora.spec.links import LinkSpec
from whichlora.spec.numeric import Count, Real, largest, smallest
from whichlora.timing.links import (
    RING_FACTORS,
    collective_s,
    extends_measurements,
    group_of,
    on_node_s,
)

PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """Equal messages and their time.

    Args:
        message_s: of one of them.
        on_node_s: of them that the links of a node take, at whose rate NCCL's kernels work; a
            slower network leaves them waiting. None: all.
    """

    message: Message
    message_s: Real
    on_node_s: Real | None = None

    @property
    def total_s(self) -> Real:
        return self.message.count * self.message_s

    @property
    def working_s(self) -> Real:
        """While NCCL's kernels work."""
        return self.total_s if self.on_node_s is None else self.message.count * self.on_node_s


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationTime:
    """What one rank waits for in one optimizer step.

    Args:
        exposed_s: while nothing computes.
        slowdown_s: that the computing takes longer beside the others.
        total_s: of all messages.
    """

    sent: tuple[Sent, ...]
    exposed_s: Real
    slowdown_s: Real
    total_s: Real

    @property
    def overlapped_s(self) -> Real:
        return self.total_s - self.exposed_s


def sent_over(links: LinkSpec, messages: Sequence[Message], gpus_per_node: int) -> tuple[Sent, ...]:
    """`messages` and the seconds of each over `links`; NaN where these are not known."""
    sent = []
    for message in messages:
        group = group_of(message.size, message.stride, gpus_per_node)
        num_bytes = 1.0 * message.num_bytes
        on_node = None
        if group.nodes > 1 and message.collective in RING_FACTORS:
            on_node = on_node_s(links, message.collective, num_bytes, group.on_node)
        seconds = collective_s(links, message.collective, num_bytes, group)
        sent.append(Sent(message=message, message_s=seconds, on_node_s=on_node))
    return tuple(sent)


def extended(links: LinkSpec, messages: Sequence[Message], gpus_per_node: int) -> tuple[str, ...]:
    """Why times of `messages` go beyond what was measured; empty where they do not."""
    reasons = (
        extends_measurements(
            links,
            message.collective,
            message.num_bytes,
            group_of(message.size, message.stride, gpus_per_node),
        )
        for message in messages
    )
    return tuple(dict.fromkeys(reason for reason in reasons if reason))


def communication(
    sent: Sequence[Sent],
    phase_s: Mapping[str, Real],
    *,
    micro_steps: Count,
    contention: float = 0.0,
    slower: float = 1.0,
) -> CommunicationTime:
    """Exposed and overlapped seconds of one optimizer step.

    In a pass, the message of one block runs while another block computes, and the larger of both
    decides. The first gather of a forward, or the last reduction of a backward, has nothing to hide
    it. Of n equal messages S seconds long beside C seconds of computing that is
    max(S - C (n-1)/n, S/n).

    Args:
        phase_s: seconds of computing by `PHASES`, in the whole optimizer step.
        micro_steps: of the step; a message is sent in all of them, where it does not say.
        contention: `LinkSpec.contention`.
        slower: factor on the time of every message.

    Kind: estimate: blocks are taken as equal.
    Source: FSDP's streams, torch 2.13 `fsdp/_runtime_utils.py`; DDP's reducer.
    """
    total: Real = 0.0
    exposed: Real = 0.0
    slowdown: Real = 0.0
    for phase in ("nothing", *PHASES):
        group = [each for each in sent if each.message.hidden_by == phase]
        if not group:
            continue
        seconds = slower * sum((each.total_s for each in group), 0.0)
        total = total + seconds
        if phase == "nothing":
            exposed = exposed + seconds
            continue
        passes = max(_passes(each.message, phase, micro_steps) for each in group)
        count = sum(each.message.count for each in group)
        in_pass = largest(1.0, count / passes)
        share = 1.0 if phase == "optimizer" else passes / micro_steps
        computing = phase_s[phase] * share
        waits = largest(seconds - computing * (1 - 1 / in_pass), seconds / in_pass)
        exposed = exposed + waits
        working = slower * sum((each.working_s for each in group), 0.0)
        # waiting for the network and for the computing overlap: of the work, what is not exposed
        slowdown = slowdown + contention * smallest(working, seconds - waits)
    return CommunicationTime(
        sent=tuple(sent),
        exposed_s=exposed,
        slowdown_s=slowdown,
        total_s=total,
    )


def _passes(message: Message, phase: str, micro_steps: Count) -> int:
    if phase == "optimizer":
        return 1
    return int(micro_steps if message.micro_steps is None else message.micro_steps)


def step_s(stages: Sequence[tuple[Real, Real, int]], *, order: str, micro_steps: Count) -> Real:
    """Seconds of one optimizer step.

    A pipeline is as long as one micro-batch through all stages, and the others through the slowest;
    without one each micro-batch passes all stages before the next one starts.

    Args:
        stages: by kind of rank: seconds of its micro-steps, of its update, and how many stages
            there are of that kind.
        order: `Strategy.order`.

    Kind: estimate: forwards and backwards of a stage take equal shares on all of them.
    Source: 1F1B, Narayanan et al. 2021, arXiv:2104.04473, section 2.2: (p-1)/m of the time.
    """
    slowest = largest(*(steps_s for steps_s, _, _ in stages))
    update = largest(*(update_s for _, update_s, _ in stages))
    if order == "at once":
        return largest(*(steps_s + update_s for steps_s, update_s, _ in stages))
    through = sum((steps_s * number for steps_s, _, number in stages), 0.0)
    idle = through - slowest
    if order == "pipelined":
        idle = idle / micro_steps
    return slowest + idle + update
