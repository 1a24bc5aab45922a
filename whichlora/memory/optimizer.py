"""Bytes of optimizer states and of the temporaries of its step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from whichlora.memory.entries import Fact
from whichlora.memory.gradients import Trained
from whichlora.spec.numeric import Count, ceil_div, largest

_MIN_8BIT_PARAMS = 4096  # smaller tensors keep 32-bit states
_MIN_PAGED_PARAMS = 100_000  # smaller tensors keep their states on the device
_BLOCK = 256  # 8-bit states that share one fp32 scale
_STATES = {"adamw_torch": 2, "adamw_torch_fused": 2, "sgd": 0}  # as wide as the parameter


def num_wide_states(optimizer: str) -> int:
    """States that are a tensor as large as an fp32 parameter, each.

    Kind: exact. Source: as of `state_bytes`.
    """
    return _STATES.get(optimizer, int(optimizer == "lion"))


STATES = Fact(
    part="optimizer_states",
    what="optimizer states",
    shape="[trained_params]",
    dtype="of the optimizer",
    count="states per parameter",
    why="made by the first step, kept between steps",
    source="torch.optim, bitsandbytes.optim: init_state",
)


def state_bytes(tensors: Iterable[Trained], *, optimizer: str, device_kind: str) -> Count:
    """Bytes of states after the first step, inside the framework's allocator.

    Kind: exact. Paged states live outside the allocator; a CPU has none.
    Source: torch 2.13 `optim`; bitsandbytes 0.50.2 `Optimizer2State.init_state` and
    `get_state_buffer`; transformers 5.23 `Adafactor.step`, `Trainer.create_optimizer`.
    """
    total: Count = 0
    for tensor in tensors:
        size = tensor.num_params
        if optimizer in _STATES:
            each = _STATES[optimizer] * tensor.param_bytes * size
        elif optimizer == "lion":
            each = 4 * size
        elif optimizer == "adafactor":  # sums over rows and columns; all of a vector
            each = 4 * (tensor.rows * (tensor.rows != 1) + tensor.width)
        else:
            is_paged = optimizer == "paged_adamw_8bit" and device_kind != "cpu"
            each = _8bit_states(tensor, is_paged=is_paged)
        total = total + each * tensor.count
    return total


def _8bit_states(tensor: Trained, *, is_paged: bool) -> Count:
    """Two states of one tensor, with a scale per block of each."""
    size = tensor.num_params
    # `Optimizer2State.init_state` of bitsandbytes makes fp32 states below `min_8bit_size`
    is_wide = (size < _MIN_8BIT_PARAMS) | tensor.is_embedding
    scales = 2 * 4 * ceil_div(size, _BLOCK) * (1 - is_wide)
    codes = size * (2 + 6 * is_wide)
    if is_paged:
        codes = codes * (size < _MIN_PAGED_PARAMS)
    return codes + scales


TEMPORARIES = Fact(
    part="temporary",
    what="temporaries of the optimizer",
    shape="[trained_params]",
    dtype="of the parameter",
    why="foreach AdamW makes a list of tensors, Adafactor an fp32 update of one at a time",
    source="torch.optim.adamw._multi_tensor_adamw; transformers Adafactor.step",
)


def step_temporary_bytes(tensors: Sequence[Trained], *, optimizer: str, device_kind: str) -> Count:
    """Temporaries at the peak of the step.

    The foreach implementation of AdamW makes one list of tensors as large as the parameters; the
    fused one makes none, and neither does the CPU, which loops over parameters. Adafactor makes an
    fp32 update and its next stage of one parameter at a time, and of 16-bit ones fp32 copies of
    the gradient and the parameter. SGD and bitsandbytes update in place.
    Kind: exact. Source: torch 2.13 `_multi_tensor_adamw`; transformers 5.23 `Adafactor.step`.
    """
    if optimizer == "adafactor":
        return largest(
            *(
                (8 if tensor.param_bytes == 4 else 16) * tensor.num_params * (tensor.count > 0)
                for tensor in tensors
            )
        )
    # `_multi_tensor_adam` of torch 2.13: `torch._foreach_sqrt` allocates `exp_avg_sq_sqrt`, the
    # other foreach calls work in place; one list per dtype, one after the other
    lists: dict[int, Count] = {}
    for tensor in tensors:
        size = tensor.param_bytes * tensor.num_params * tensor.count
        lists[tensor.param_bytes] = lists.get(tensor.param_bytes, 0) + size
    of_all = largest(*lists.values())
    return of_all if optimizer == "adamw_torch" and device_kind != "cpu" else 0 * of_all
