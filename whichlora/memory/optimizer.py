"""What an optimizer keeps, moves and launches: states, passes and temporaries of its step.

An optimizer is one entry of `_OPTIMIZERS`. Passes are counted operator by operator, each reading
its inputs and writing its result; `tests/memory/test_optimizer.py` traces the real code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from whichlora.memory.entries import Fact
from whichlora.memory.gradients import Trained
from whichlora.spec.backends import backend_of
from whichlora.spec.numeric import Count, ceil_div, largest
from whichlora.spec.versions import Libraries

_MIN_8BIT_PARAMS = 4096  # smaller tensors keep 32-bit states
_MIN_PAGED_PARAMS = 100_000  # smaller tensors keep their states on the device
_BLOCK = 256  # 8-bit states that share one fp32 scale

# Of `torch.nn.utils.clip_grad_norm_`: a gradient is read for its norm, then read and written by the
# multiplication.
CLIP_PASSES = 3
CLIP_LISTS = (1, 1)
CLIP_LAUNCHES = (
    8  # the norms: zeroed, summed, stacked; their norm, and four operators of one number
)
# Of `GradScaler.unscale_`, a gradient is read and written by one kernel.
UNSCALE_PASSES = 2
UNSCALE_LISTS = (1,)
# Of a further micro-batch, a gradient and the sum are read, and the sum is written.
ACCUMULATION_PASSES = 3

# `multi_tensor_apply` of torch: elements that one block of threads takes, blocks of one launch, and
# tensors of one launch by the number of lists.
_CHUNK = 65536
_MOST_BLOCKS = 320
_MOST_TENSORS = (110, 64, 48, 36)


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """What one optimizer keeps, moves and launches.

    Args:
        state_bytes: of the states of one tensor, told whether the device is an accelerator.
        moved_bytes: read and written by the step of one tensor.
        flops: of the step of one tensor, where arithmetic takes longer than those bytes.
        lists: of tensors in each `foreach` call on an accelerator; empty: one tensor after the
            other, as on a CPU.
        tensor_launches: kernels of one tensor where each is updated on its own.
        wide_states: states that are a tensor as large as an fp32 parameter, each.
        update_bytes: temporaries of one tensor's step, which are gone before the next one's.
        lists_temporary: on an accelerator one more list of tensors as large as the parameters.
        stored_states: of one tensor, those that a checkpoint has, counts of steps among them.
        library: whose code it is.
    """

    state_bytes: Callable[[Trained, bool], Count]
    moved_bytes: Callable[[Trained], Count]
    lists: tuple[int, ...] = ()
    tensor_launches: Callable[[Trained], int]
    wide_states: int = 0
    update_bytes: Callable[[Trained], Count] | None = None
    lists_temporary: bool = False
    stored_states: Callable[[Trained], Count]
    library: Literal["torch", "transformers", "bitsandbytes", "peft", "torchao"] = "torch"
    flops: Callable[[Trained], Count] | None = None


def _as_wide(number: int) -> Callable[[Trained, bool], Count]:
    """As many states, each as wide as the parameter."""
    return lambda tensor, accelerated: number * tensor.param_bytes * tensor.num_params


def _passes(number: int, other_bytes: int = 0) -> Callable[[Trained], Count]:
    """As many elements as wide as the parameter, and bytes of states of another width."""
    return lambda tensor: (number * tensor.param_bytes + other_bytes) * tensor.num_params


def _always(number: int) -> Callable[[Trained], int]:
    return lambda tensor: number


def _is_matrix(tensor: Trained) -> Count:
    return tensor.rows != 1


def _factored_states(tensor: Trained, accelerated: bool) -> Count:
    return 4 * (tensor.rows * _is_matrix(tensor) + tensor.width)  # sums; all of a vector


def _factored_bytes(tensor: Trained) -> Count:
    """Adafactor's operators in fp32; of a 16-bit parameter two copies are made, and one back."""
    copies = 0 if tensor.param_bytes == 4 else 18
    return (100 - 16 * _is_matrix(tensor) + copies) * tensor.num_params


def _factored_launches(tensor: Trained) -> Count:
    return 16 + 8 * _is_matrix(tensor) + (0 if tensor.param_bytes == 4 else 3)


def _factored_update(tensor: Trained) -> Count:
    # `update = (grad**2) + eps` has two fp32 tensors alive, and so has `add_(-update)` at the end;
    # of a 16-bit parameter `grad.float()` and `p_data_fp32.float()` are two more
    return (8 if tensor.param_bytes == 4 else 16) * tensor.num_params


def _factored_stored(tensor: Trained) -> Count:
    return 2 + _is_matrix(tensor)  # its size, and two factors or the one state of a vector


def _keeps_8bit(tensor: Trained) -> Count:
    # `Optimizer2State.init_state` of bitsandbytes makes fp32 states below `min_8bit_size`
    return (tensor.num_params >= _MIN_8BIT_PARAMS) & (not tensor.is_embedding)


def _scale_bytes(tensor: Trained) -> Count:
    return 2 * 4 * ceil_div(tensor.num_params, _BLOCK) * _keeps_8bit(tensor)


def _code_bytes(tensor: Trained) -> Count:
    return tensor.num_params * (8 - 6 * _keeps_8bit(tensor))


def _8bit_states(tensor: Trained, accelerated: bool) -> Count:
    """Two states of one tensor, with a scale per block of each."""
    return _code_bytes(tensor) + _scale_bytes(tensor)


def _in_allocator(tensor: Trained, accelerated: bool) -> Count:
    """Whether states of a paged optimizer lie in the allocator; a CPU has no pages."""
    # `Optimizer8bit.get_state_buffer` calls `get_paged` of bitsandbytes functional.py: managed
    # memory of CUDA, outside the caching allocator
    return (tensor.num_params < _MIN_PAGED_PARAMS) if accelerated else 1


def _paged_8bit_states(tensor: Trained, accelerated: bool) -> Count:
    """As `_8bit_states`, of which large codes are paged: `absmax1`, `absmax2` are `torch.zeros`."""
    return _code_bytes(tensor) * _in_allocator(tensor, accelerated) + _scale_bytes(tensor)


def _paged_states(tensor: Trained, accelerated: bool) -> Count:
    """Two in fp32, whatever the parameter is."""
    return 8 * tensor.num_params * _in_allocator(tensor, accelerated)


def _8bit_moved(tensor: Trained) -> Count:
    """A gradient read, a parameter and both states with their scales read and written."""
    states = _code_bytes(tensor) + _scale_bytes(tensor)
    return 3 * tensor.param_bytes * tensor.num_params + 2 * states


def _torchao_states(code_bits: int) -> Callable[[Trained, bool], Count]:
    """Two states of one tensor: codes, a scale per block, and the table of values of each code.

    Others than a whole number of blocks, and small ones, are as wide as the parameter.
    Source: torchao 0.18 `_AdamBase._new_buffer`, `OptimState8bit.zeros`, `OptimState4bit.zeros`.
    """

    def size(tensor: Trained, accelerated: bool) -> Count:
        num_params = tensor.num_params
        has_codes = (num_params >= _MIN_8BIT_PARAMS) & (num_params % _BLOCK == 0)
        coded = num_params * code_bits // 8 + 4 * (num_params // _BLOCK) + 4 * 2**code_bits
        plain = tensor.param_bytes * num_params
        return 2 * (plain + has_codes * (coded - plain))

    return size


def _torchao(code_bits: int) -> Optimizer:
    """Kind: its compiled step is taken as two kernels that read each tensor once: an estimate."""
    state_bytes = _torchao_states(code_bits)

    def moved(tensor: Trained) -> Count:
        return 3 * tensor.param_bytes * tensor.num_params + 2 * state_bytes(tensor, True)

    return Optimizer(
        state_bytes=state_bytes,
        moved_bytes=moved,
        tensor_launches=_always(2),
        stored_states=_always(3),
        library="torchao",
    )


def _8bit_flops(tensor: Trained) -> Count:
    """Both codes are looked up, and found again by a search for each new state.

    Kind: fitted, to one device: 26.3 ms for 973 million parameters on an H200
    (`benchmarks/gpu/kernel_times`), where their bytes take 3.
    """
    return 1450 * tensor.num_params * _keeps_8bit(tensor)


def _of_bitsandbytes(states: int, bits: int, *, paged: bool = False) -> Optimizer:
    """As many states of 32 or 8 bits, the latter with a scale per block of each.

    Source: bitsandbytes 0.50.2 `Optimizer1State.init_state`, `AdEMAMix.init_state`, which has its
    two averages in one state and their scales in another.
    """

    def code_bytes(tensor: Trained) -> Count:
        return states * tensor.num_params * (4 - 3 * (bits == 8) * _keeps_8bit(tensor))

    def scale_bytes(tensor: Trained) -> Count:
        return states * _scale_bytes(tensor) // 2 * (bits == 8)

    def size(tensor: Trained, accelerated: bool) -> Count:
        in_allocator = _in_allocator(tensor, accelerated) if paged else 1
        return code_bytes(tensor) * in_allocator + scale_bytes(tensor)

    def moved(tensor: Trained) -> Count:
        state_bytes = code_bytes(tensor) + scale_bytes(tensor)
        return 3 * tensor.param_bytes * tensor.num_params + 2 * state_bytes

    def stored(tensor: Trained) -> Count:
        kept = min(states, 2)  # averages of AdEMAMix share a tensor
        return kept * (1 + (bits == 8) * _keeps_8bit(tensor))

    return Optimizer(
        state_bytes=size,
        moved_bytes=moved,
        flops=(lambda tensor: states * _8bit_flops(tensor) // 2) if bits == 8 else None,
        tensor_launches=_always(1),
        wide_states=0 if paged or bits == 8 else states,
        stored_states=stored,
        library="bitsandbytes",
    )


# Passes of AdamW: lerp of the first state 3, the second decayed 2 and added to 3, its root made 2,
# divided 2, epsilon added 2, the parameter updated 4. Decoupled decay, which the Trainer leaves at
# zero, is 2 more. The fused kernels, here and of bitsandbytes, read each tensor once.
_OPTIMIZERS = {
    "adamw_torch": Optimizer(
        state_bytes=_as_wide(2),
        moved_bytes=_passes(18),
        lists=(2, 1, 3, 2, 1, 1, 3),
        tensor_launches=_always(7),
        wide_states=2,
        # `torch._foreach_sqrt` of `_multi_tensor_adam` makes `exp_avg_sq_sqrt`, the other foreach
        # calls work in place
        lists_temporary=True,
        stored_states=_always(3),
    ),
    # transformers' own, before 5: `AdamW.step` of optimization.py loops over parameters
    "adamw_hf": Optimizer(
        state_bytes=_as_wide(2),
        # both states decayed 2 each and added to 3 each, the root 2, epsilon 2, the parameter 4
        moved_bytes=_passes(18),
        tensor_launches=_always(7),
        wide_states=2,
        update_bytes=lambda tensor: tensor.param_bytes * tensor.num_params,  # `denom`
        stored_states=_always(2),  # its `step` is a number
        library="transformers",
    ),
    "adamw_torch_fused": Optimizer(
        state_bytes=_as_wide(2),
        moved_bytes=_passes(7),
        lists=(1, 4),  # the first counts steps
        tensor_launches=_always(1),
        wide_states=2,
        stored_states=_always(3),
    ),
    "sgd": Optimizer(
        state_bytes=_as_wide(0),
        moved_bytes=_passes(3),
        lists=(2,),
        tensor_launches=_always(1),
        stored_states=_always(0),
    ),
    "lion": Optimizer(
        state_bytes=lambda tensor, accelerated: 4 * tensor.num_params,
        moved_bytes=_passes(3, 8),
        tensor_launches=_always(1),
        wide_states=1,
        stored_states=_always(1),
        library="bitsandbytes",
    ),
    "adafactor": Optimizer(
        state_bytes=_factored_states,
        moved_bytes=_factored_bytes,
        tensor_launches=_factored_launches,
        update_bytes=_factored_update,
        stored_states=_factored_stored,
        library="transformers",
    ),
    "lora_fa": Optimizer(
        state_bytes=_as_wide(2),
        # the gradient cast, projected, scaled and cast back, then AdamW without foreach
        moved_bytes=_passes(26),
        tensor_launches=_always(24),
        # `grad_B`, and the root of the second state
        update_bytes=lambda tensor: 2 * tensor.param_bytes * tensor.num_params,
        stored_states=_always(3),
        library="peft",
    ),
    "adamw_8bit": Optimizer(
        state_bytes=_8bit_states,
        moved_bytes=_8bit_moved,
        flops=_8bit_flops,
        tensor_launches=_always(1),
        stored_states=_always(4),
        library="bitsandbytes",
    ),
    "lion_8bit": _of_bitsandbytes(1, 8),
    "paged_lion_32bit": _of_bitsandbytes(1, 32, paged=True),
    "paged_lion_8bit": _of_bitsandbytes(1, 8, paged=True),
    "ademamix": _of_bitsandbytes(3, 32),
    "ademamix_8bit": _of_bitsandbytes(3, 8),
    "paged_ademamix_32bit": _of_bitsandbytes(3, 32, paged=True),
    "paged_ademamix_8bit": _of_bitsandbytes(3, 8, paged=True),
    "rmsprop_bnb": _of_bitsandbytes(1, 32),
    "rmsprop_bnb_8bit": _of_bitsandbytes(1, 8),
    "adamw_torch_8bit": _torchao(8),
    "adamw_torch_4bit": _torchao(4),
    "paged_adamw_8bit": Optimizer(
        state_bytes=_paged_8bit_states,
        moved_bytes=_8bit_moved,
        flops=_8bit_flops,
        tensor_launches=_always(1),
        stored_states=_always(4),
        library="bitsandbytes",
    ),
    "paged_adamw_32bit": Optimizer(
        state_bytes=_paged_states,
        moved_bytes=_passes(3, 16),
        tensor_launches=_always(1),
        stored_states=_always(2),
        library="bitsandbytes",
    ),
}


def library_of(optimizer: str) -> str:
    """The package whose code an optimizer is. Kind: exact. Source: its `optim`."""
    return _OPTIMIZERS[optimizer].library


def num_stored_states(tensors: Iterable[Trained], *, optimizer: str) -> Count:
    """Tensors of `optimizer.pt`.

    Kind: exact. Source: torch 2.13 `Adam`: `step`, `exp_avg`, `exp_avg_sq`; transformers 5.23
    `Adafactor`: `RMS` beside its factors; bitsandbytes 0.50.2: each state, and its scales.
    """
    stored = _OPTIMIZERS[optimizer].stored_states
    return sum(stored(tensor) * tensor.count for tensor in tensors)


def num_wide_states(optimizer: str) -> int:
    """States that are a tensor as large as an fp32 parameter, each.

    Kind: exact. Source: as of `state_bytes`.
    """
    return _OPTIMIZERS[optimizer].wide_states


STATES = Fact(
    part="optimizer_states",
    what="optimizer states",
    shape="[trained_params]",
    dtype="of the optimizer",
    count="states per parameter",
    why="made by the first step, kept between steps",
    source="torch.optim, bitsandbytes.optim: init_state",
)


def state_bytes(
    tensors: Iterable[Trained], *, optimizer: str, device_kind: str, narrow_embeddings: bool = False
) -> Count:
    """Bytes of states after the first step, inside the framework's allocator.

    Args:
        narrow_embeddings: 8-bit states of embeddings have 8 bits, too; the Trainer keeps them wide.

    Kind: exact. Paged states live outside the allocator, where there are any.
    Source: torch 2.13 `optim`; bitsandbytes 0.50.2 `Optimizer2State.init_state` and
    `get_state_buffer`; torchao 0.18 `_AdamBase._new_buffer`; transformers 5.23 `Adafactor.step`,
    `Trainer.create_optimizer`.
    """
    of_tensor = _OPTIMIZERS[optimizer].state_bytes
    if narrow_embeddings:
        tensors = [replace(tensor, is_embedding=False) for tensor in tensors]
    return sum(
        of_tensor(tensor, backend_of(device_kind).has_paged_states) * tensor.count
        for tensor in tensors
    )


def state_blocks(tensor: Trained, *, optimizer: str, device_kind: str) -> list[int]:
    """Bytes of each tensor that the optimizer keeps of one trained tensor, in the order made.

    Kind: exact where states are as wide as fp32 parameters; of others, which have two and their
    scales, each is half. Source: as of `state_bytes`.
    """
    rule = _OPTIMIZERS[optimizer]
    number = rule.wide_states or 2
    return [rule.state_bytes(tensor, backend_of(device_kind).has_paged_states) // number] * number


def has_foreach(device_kind: str, libraries: Libraries) -> bool:
    """Whether optimizers update lists of tensors. Kind: exact. Source: both properties."""
    return backend_of(device_kind).has_foreach and libraries.has_foreach


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What happens to the gradients of one optimizer step.

    Args:
        clips: their norm is computed, and they are scaled by what it allows.
        unscales: a `GradScaler` multiplied the loss, as under fp16 autocast.
        num_micro_batches: whose gradients are summed.
        foreach: `has_foreach` of the device.
    """

    tensors: tuple[Trained, ...]
    optimizer: str
    foreach: bool
    clips: bool
    unscales: bool
    num_micro_batches: int

    @property
    def num_params(self) -> Count:
        return sum(tensor.num_params * tensor.count for tensor in self.tensors)


def update_bytes(update: Update) -> Count:
    """Bytes read and written by summing, unscaling and clipping gradients, and by the step.

    Gradients are dropped afterwards, not zeroed: `zero_grad` sets them to None.

    Kind: exact, Adafactor's numbers per row and column left out.
    Source: torch 2.13 `_multi_tensor_adam`, `_single_tensor_adam`, `fused_adam_utils.cuh`,
    `_multi_tensor_sgd`, `clip_grad_norm_`, `_amp_foreach_non_finite_check_and_unscale_`,
    `AccumulateGrad`; bitsandbytes 0.50.2 `kOptimizer32bit1State`,
    `kOptimizerStatic8bit2StateBlockwise`; transformers 5.23 `Adafactor.step`. All are traced but
    for the two kernels of bitsandbytes (lion's was read, the 8-bit one follows its states), and
    torchao's compiled step, which is an estimate.
    """
    passes = CLIP_PASSES * update.clips + UNSCALE_PASSES * update.unscales
    passes += ACCUMULATION_PASSES * (update.num_micro_batches - 1)
    of_tensor = _OPTIMIZERS[update.optimizer].moved_bytes
    return sum(
        (of_tensor(tensor) + passes * tensor.param_bytes * tensor.num_params) * tensor.count
        for tensor in update.tensors
    )


def update_flops(update: Update) -> Count:
    """Operations in fp32 of the steps that arithmetic bounds.

    Kind: fitted. Source: `_8bit_flops`.
    """
    flops = _OPTIMIZERS[update.optimizer].flops
    return sum(flops(tensor) * tensor.count for tensor in update.tensors) if flops else 0


def update_launches(update: Update) -> Count:
    """Kernels of what `update_bytes` counts.

    Kind: lower bound: launches of a `foreach` call are as full as its tensors allow.
    Source: as of `update_bytes`; torch 2.13 `MultiTensorApply.cuh`.
    """
    called = _OPTIMIZERS[update.optimizer]
    together = CLIP_LISTS * update.clips + UNSCALE_LISTS * update.unscales
    launches: Count = CLIP_LAUNCHES * update.clips
    num_tensors: Count = 0
    chunks: Count = 0
    for tensor in update.tensors:
        present = tensor.count * (tensor.num_params > 0)
        num_tensors = num_tensors + present
        chunks = chunks + ceil_div(tensor.num_params, _CHUNK) * tensor.count
        if not (update.foreach and called.lists):
            launches = launches + present * called.tensor_launches(tensor)
    launches = launches + num_tensors * (update.num_micro_batches - 1)
    if not update.foreach:
        return launches + num_tensors * len(together)
    for lists in together + called.lists:
        full = ceil_div(num_tensors, _MOST_TENSORS[lists - 1])
        launches = launches + largest(full, ceil_div(chunks, _MOST_BLOCKS))
    return launches


TEMPORARIES = Fact(
    part="temporary",
    what="temporaries of the optimizer",
    shape="[trained_params]",
    dtype="of the parameter",
    why="foreach AdamW makes a list of tensors, Adafactor an fp32 update of one at a time",
    source="torch.optim.adam._multi_tensor_adam; transformers Adafactor.step",
)


def step_temporary_bytes(tensors: Sequence[Trained], *, optimizer: str, foreach: bool) -> Count:
    """Temporaries at the peak of the step.

    The foreach implementation of AdamW makes one list of tensors as large as the parameters; the
    fused one makes none, and neither do a CPU and others that loop over parameters, torch before 2
    among them. transformers' own AdamW makes a root of one parameter at a time, Adafactor an fp32
    update and its next stage, and of 16-bit ones fp32 copies of the gradient and the parameter. SGD
    and bitsandbytes update in place.
    Kind: exact. Source: torch 2.13 `_multi_tensor_adam`; transformers 5.23 `Adafactor.step`,
    4.16 `AdamW.step`.
    """
    rule = _OPTIMIZERS[optimizer]
    if rule.update_bytes is not None:
        return largest(*(rule.update_bytes(each) * (each.count > 0) for each in tensors))
    lists: dict[int, Count] = {}  # one per dtype, one after the other
    for tensor in tensors:
        size = tensor.param_bytes * tensor.num_params * tensor.count
        lists[tensor.param_bytes] = lists.get(tensor.param_bytes, 0) + size
    of_all = largest(*lists.values())
    return of_all if rule.lists_temporary and foreach else 0 * of_all


def temporary_blocks(
    tensors: Sequence[Trained], *, optimizer: str, foreach: bool
) -> Iterator[list[int]]:
    """Temporaries of the step in order, those that are alive together in one list.

    Kind: exact. Source: as of `step_temporary_bytes`.
    """
    rule = _OPTIMIZERS[optimizer]
    if rule.update_bytes is not None:
        for tensor in tensors:
            size = rule.update_bytes(tensor)
            block = min(4 * tensor.num_params, size)
            yield [block] * (size // max(1, block))
    elif rule.lists_temporary and foreach:
        lists: dict[int, list[int]] = {}
        for tensor in tensors:
            size = tensor.param_bytes * tensor.num_params
            lists.setdefault(tensor.param_bytes, []).append(size)
        yield from lists.values()
