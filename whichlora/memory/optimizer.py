"""Bytes of optimizer states and of the temporaries of its step."""

from __future__ import annotations

from whichlora.numeric import Count

_STATES_8BIT = {"adamw_8bit", "paged_adamw_8bit"}


def state_bytes(num_trained: Count, *, optimizer: str, param_bytes: int) -> Count:
    """Bytes of states after the first step, inside the framework's allocator.

    Kind: exact; paged states live outside the allocator; Adafactor's factored second moment is
    a lower bound of a few rows and columns, counted as nothing.
    Source: torch 2.13 `optim`, bitsandbytes 0.50.2 `optim`.
    """
    if optimizer == "paged_adamw_8bit":
        return 0 * num_trained
    if optimizer == "adamw_8bit":
        return 2 * num_trained
    per_param = {
        "adamw_torch": 2,
        "adamw_torch_fused": 2,
        "lion": 1,
        "adafactor": 0,
        "sgd": 0,
    }[optimizer]
    return per_param * param_bytes * num_trained


def step_temporary_bytes(
    num_trained: Count, *, optimizer: str, param_bytes: int, device_kind: str
) -> Count:
    """Temporaries at the peak of the step.

    The foreach implementation of AdamW makes one tensor list of the size of the parameters; the
    fused one makes none, and neither does the CPU, which loops over parameters.
    Kind: exact for AdamW, lower bound elsewhere.
    """
    if optimizer == "adamw_torch" and device_kind != "cpu":
        return param_bytes * num_trained
    return 0 * num_trained
