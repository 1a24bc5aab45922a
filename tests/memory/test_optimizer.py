"""What a step of an optimizer moves and launches: against the real code, and by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whichlora.memory import optimizer
from whichlora.memory.gradients import Trained
from whichlora.spec.run import Optimizer
from whichlora.spec.versions import Libraries

MATRIX = Trained(rows=512, width=512, param_bytes=4)
VECTOR = Trained(rows=1, width=65536, param_bytes=4)
BETWEEN_ELEMENTWISE = 0.003  # a fraction: the sums of Adafactor, and numbers of one element


def update_of(tensors: list[Trained], name: str, **settings: Any) -> optimizer.Update:
    usual = {"foreach": True, "clips": False, "unscales": False, "num_micro_batches": 1}
    return optimizer.Update(tensors=tuple(tensors), optimizer=name, **usual | settings)


def moved(tensor: Trained, name: str, **settings: Any) -> float:
    """Bytes per parameter."""
    size = optimizer.update_bytes(update_of([tensor], name, **settings))
    return float(size / (tensor.num_params * tensor.count))


def launched(tensors: list[Trained], name: str, **settings: Any) -> int:
    return int(optimizer.update_launches(update_of(tensors, name, **settings)))


# --- against the real code

OF_BITSANDBYTES = {
    "adamw_8bit": "AdamW8bit",
    "paged_adamw_8bit": "PagedAdamW8bit",
    "paged_adamw_32bit": "PagedAdamW",
    "lion": "Lion",
    "lion_8bit": "Lion8bit",
    "paged_lion_32bit": "PagedLion",
    "paged_lion_8bit": "PagedLion8bit",
    "ademamix": "AdEMAMix",
    "ademamix_8bit": "AdEMAMix8bit",
    # a CPU has no pages, for which this class asks anyway
    "paged_ademamix_32bit": "AdEMAMix",
    "paged_ademamix_8bit": "AdEMAMix8bit",
    "rmsprop_bnb": "RMSprop32bit",
    "rmsprop_bnb_8bit": "RMSprop8bit",
}
OF_TORCHAO = {"adamw_torch_8bit": "AdamW8bit", "adamw_torch_4bit": "AdamW4bit"}


class Recorded:
    """The operators that ran: bytes of the different tensors of each, and its lists of tensors."""

    def __init__(self) -> None:
        self.moved = 0
        self.operators: list[str] = []
        self.lists: list[int] = []


def record(run: Any) -> Recorded:
    """What every operator that `run` calls reads and writes."""
    from torch import Tensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    recorded = Recorded()

    def sizes(values: Any) -> dict[int, int]:
        tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
        return {id(tensor): tensor.numel() * tensor.element_size() for tensor in tensors}

    def of_tensors(value: Any) -> bool:
        return isinstance(value, list | tuple) and isinstance([*value, None][0], Tensor)

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            name = func._schema.name.removeprefix("aten::")
            views = any(
                out.alias_info and not out.alias_info.is_write for out in func._schema.returns
            )
            if views or name.startswith(("profiler", "_local_scalar_dense")):
                return result
            arguments = dict(zip(func._schema.arguments, args, strict=False))
            reads, writes = sizes([args, kwargs]), sizes(result)
            for argument, value in arguments.items():
                written = argument.alias_info is not None and argument.alias_info.is_write
                # the fused kernel writes gradients only where it unscales them
                if written and not (name == "_fused_adamw_" and argument.name == "grads"):
                    writes |= sizes(value)
            if name == "copy_":
                del reads[id(args[0])]
            recorded.moved += sum(reads.values()) + sum(writes.values())
            recorded.operators.append(name)
            outputs = 0 if name.endswith("_") else len(func._schema.returns)
            recorded.lists.append(sum(map(of_tensors, args)) + outputs)
            return result

    with Mode():
        run()
    return recorded


def parameters(tensor: Trained, count: int = 2, device: str = "cpu") -> list[Any]:
    torch = pytest.importorskip("torch")
    dtype = torch.float32 if tensor.param_bytes == 4 else torch.bfloat16
    shape = (tensor.width,) if tensor.rows == 1 else (tensor.rows, tensor.width)
    made = [torch.nn.Parameter(torch.ones(shape, dtype=dtype, device=device)) for _ in range(count)]
    for parameter in made:
        parameter.grad = torch.ones_like(parameter)
    return made


def real_optimizer(name: str, params: list[Any], *, foreach: bool = False) -> Any:
    """What the Trainer makes for `name`."""
    torch = pytest.importorskip("torch")
    transformers_optimization = pytest.importorskip("transformers.optimization")
    settings: dict[str, Any] = {"lr": 0.1}
    if name == "adafactor":  # `Trainer.get_optimizer_cls_and_kwargs`
        settings |= {"scale_parameter": False, "relative_step": False}
        return transformers_optimization.Adafactor(params, **settings)
    if name == "sgd":
        return torch.optim.SGD(params, foreach=foreach, **settings)
    if name in OF_BITSANDBYTES:
        made = getattr(pytest.importorskip("bitsandbytes").optim, OF_BITSANDBYTES[name])
        return made(params, **settings)
    if name in OF_TORCHAO:  # `_get_torchao_optimizer`
        made = getattr(pytest.importorskip("torchao.optim"), OF_TORCHAO[name])
        return made(params, block_size=256, **settings)
    kernel = {"fused": True} if name == "adamw_torch_fused" else {"foreach": foreach}
    return torch.optim.AdamW(params, weight_decay=0.0, **settings, **kernel)


def real_step(name: str, params: list[Any], *, foreach: bool) -> Recorded:
    """The second step."""
    made = real_optimizer(name, params, foreach=foreach)
    made.step()
    return record(made.step)


@pytest.mark.oracle
@pytest.mark.parametrize("tensor", [MATRIX, VECTOR], ids=["matrix", "vector"])
@pytest.mark.parametrize("param_bytes", [2, 4])
@pytest.mark.parametrize("name", ["adamw_torch", "adamw_torch_fused", "sgd", "adafactor"])
def test_a_step_moves_what_the_real_operators_read_and_write(
    name: str, param_bytes: int, tensor: Trained
) -> None:
    tensor = replace(tensor, param_bytes=param_bytes)
    recorded = real_step(name, parameters(tensor), foreach=False)
    per_param = recorded.moved / (2 * tensor.num_params)
    assert per_param == pytest.approx(moved(tensor, name), rel=BETWEEN_ELEMENTWISE)


@pytest.mark.oracle
@pytest.mark.parametrize("tensor", [MATRIX, VECTOR], ids=["matrix", "vector"])
@pytest.mark.parametrize("name", sorted({*get_args(Optimizer)} - {"adamw_hf"}))
def test_a_checkpoint_has_the_states_of_the_real_optimizer(name: str, tensor: Trained) -> None:
    made = real_optimizer(name, parameters(tensor))
    made.step()
    tensors = [
        value
        for state in made.state.values()
        for key, value in state.items()
        if hasattr(value, "numel") and not key.startswith("qmap")  # a table that all share
    ]
    stored = optimizer.num_stored_states([replace(tensor, count=2)], optimizer=name)
    assert len(tensors) == stored
    assert type(made).__module__.partition(".")[0] == optimizer.library_of(name)


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["adamw_torch", "sgd"])
def test_foreach_calls_move_as_much_in_kernels_of_as_many_lists(name: str) -> None:
    recorded = real_step(name, parameters(MATRIX, device="meta"), foreach=True)
    assert recorded.moved / (2 * MATRIX.num_params) == pytest.approx(
        moved(MATRIX, name), rel=BETWEEN_ELEMENTWISE
    )
    of_steps = 1 if name == "adamw_torch" else 0  # counted on the host
    assert tuple(recorded.lists[of_steps:]) == optimizer._OPTIMIZERS[name].lists


@pytest.mark.oracle
@pytest.mark.parametrize("tensor", [MATRIX, VECTOR], ids=["matrix", "vector"])
@pytest.mark.parametrize("param_bytes", [2, 4])
def test_adafactor_launches_a_kernel_per_operator_of_every_tensor(
    param_bytes: int, tensor: Trained
) -> None:
    tensor = replace(tensor, param_bytes=param_bytes)
    recorded = real_step("adafactor", parameters(tensor, count=1), foreach=False)
    for foreach in (False, True):
        counted = launched([tensor], "adafactor", foreach=foreach)
        assert counted == len(recorded.operators)


@pytest.mark.oracle
def test_clipping_reads_gradients_for_their_norm_and_scales_them() -> None:
    torch = pytest.importorskip("torch")
    params = parameters(MATRIX)
    recorded = record(lambda: torch.nn.utils.clip_grad_norm_(params, 1.0))
    assert recorded.moved / (2 * MATRIX.num_params) == pytest.approx(
        4 * optimizer.CLIP_PASSES, rel=0.001
    )
    assert [name for name in recorded.operators if "foreach" in name] == [
        "_foreach_norm",
        "_foreach_mul_",
    ]
    # the norms are zeroed and summed in launches of their own
    assert len(recorded.operators) - 2 + 2 == optimizer.CLIP_LAUNCHES


@pytest.mark.oracle
def test_unscaling_reads_and_writes_the_gradients() -> None:
    torch = pytest.importorskip("torch")
    grads = [parameter.grad for parameter in parameters(MATRIX)]
    one, none = torch.ones(1), torch.zeros(1)
    recorded = record(lambda: torch._amp_foreach_non_finite_check_and_unscale_(grads, none, one))
    assert recorded.moved / (2 * MATRIX.num_params) == pytest.approx(
        4 * optimizer.UNSCALE_PASSES, rel=0.001
    )
    assert recorded.operators == ["_amp_foreach_non_finite_check_and_unscale_"]


# --- by hand


@pytest.mark.parametrize(
    ("name", "param_bytes", "per_param"),
    [
        ("adamw_torch", 2, 18 * 2),
        ("adamw_torch_fused", 2, 7 * 2),
        ("sgd", 4, 3 * 4),
        ("lion", 2, 3 * 2 + 2 * 4),
        ("paged_adamw_32bit", 2, 3 * 2 + 2 * 8),
        ("adafactor", 4, 84),
        ("lion_8bit", 2, 3 * 2 + 2 * (1 + 4 / 256)),
        ("paged_lion_32bit", 2, 3 * 2 + 2 * 4),
        ("ademamix", 4, 3 * 4 + 2 * 12),
        ("paged_ademamix_8bit", 2, 3 * 2 + 2 * (3 + 12 / 256)),
        ("adafactor", 2, 102),
        # two codes of a byte and two fp32 scales of 256 of them, read and written
        ("adamw_8bit", 2, 3 * 2 + 2 * (2 + 8 / 256)),
        ("paged_adamw_8bit", 4, 3 * 4 + 2 * (2 + 8 / 256)),
        ("adamw_torch_8bit", 2, 3 * 2 + 4 * (1 + 4 / 256 + 1024 / MATRIX.num_params)),
        ("adamw_torch_4bit", 4, 3 * 4 + 4 * (0.5 + 4 / 256 + 64 / MATRIX.num_params)),
    ],
)
def test_bytes_of_an_update_per_parameter(name: str, param_bytes: int, per_param: float) -> None:
    tensor = replace(MATRIX, param_bytes=param_bytes)
    assert moved(tensor, name) == per_param
    assert moved(tensor, name, clips=True) == per_param + 3 * param_bytes
    assert moved(tensor, name, unscales=True) == per_param + 2 * param_bytes
    assert moved(tensor, name, num_micro_batches=4) == per_param + 3 * 3 * param_bytes


@pytest.mark.parametrize(
    ("name", "num_params", "size"),
    [
        # codes, fp32 scales of 256, and the values of the codes
        ("adamw_torch_8bit", 512_000, 512_000 + 8_000 + 1_024),
        ("adamw_torch_4bit", 512_000, 256_000 + 8_000 + 64),
        ("adamw_torch_8bit", 4_096, 4_096 + 64 + 1_024),
        ("adamw_torch_8bit", 4_095, 2 * 4_095),  # small
        ("adamw_torch_4bit", 5_000, 2 * 5_000),  # no whole blocks
    ],
)
def test_states_of_torchao(name: str, num_params: int, size: int) -> None:
    tensor = Trained(rows=1, width=num_params, param_bytes=2, count=3)
    assert optimizer.state_bytes([tensor], optimizer=name, device_kind="cuda") == 3 * 2 * size


@pytest.mark.oracle
@pytest.mark.parametrize("num_params", [512_000, 4_096, 4_095, 5_000])
@pytest.mark.parametrize("name", list(OF_TORCHAO))
def test_states_of_torchao_are_those_of_its_code(name: str, num_params: int) -> None:
    torch = pytest.importorskip("torch")
    parameter = torch.nn.Parameter(torch.ones(num_params, dtype=torch.bfloat16))
    made = real_optimizer(name, [parameter])
    states = [made._new_buffer(parameter, signed) for signed in (True, False)]
    parts = [
        part
        for state in states
        for part in (
            [getattr(state, name) for name in state.tensor_attrs]
            if hasattr(state, "tensor_attrs")
            else [state]
        )
    ]
    tensor = Trained(rows=1, width=num_params, param_bytes=2)
    size = optimizer.state_bytes([tensor], optimizer=name, device_kind="cuda")
    assert sum(part.nbytes for part in parts) == size


@pytest.mark.oracle
@pytest.mark.parametrize("tensor", [MATRIX, VECTOR, replace(VECTOR, width=4095)], ids=str)
@pytest.mark.parametrize("name", list(OF_BITSANDBYTES))
def test_states_of_bitsandbytes_are_those_of_its_code(name: str, tensor: Trained) -> None:
    (parameter,) = parameters(replace(tensor, param_bytes=2), count=1)
    made = real_optimizer(name, [parameter])
    made.step()
    states = made.state[parameter].items()
    held = [each for key, each in states if hasattr(each, "nbytes") and not key.startswith("qmap")]
    size = optimizer.state_bytes([tensor], optimizer=name, device_kind="cpu")
    assert sum(each.nbytes for each in held) == size


def test_states_of_large_tensors_are_paged() -> None:
    for name in ("paged_lion_32bit", "paged_ademamix_32bit"):
        assert optimizer.state_bytes([MATRIX], optimizer=name, device_kind="cuda") == 0
    in_codes = optimizer.state_bytes([MATRIX], optimizer="paged_lion_8bit", device_kind="cuda")
    assert in_codes == 4 * MATRIX.num_params // 256  # scales are not


def test_a_small_tensor_has_states_of_32_bits_under_an_8_bit_optimizer() -> None:
    small = Trained(rows=1, width=1024, param_bytes=2)
    assert moved(small, "adamw_8bit") == 3 * 2 + 2 * 8


def test_arithmetic_bounds_the_tensors_whose_states_have_8_bits() -> None:
    def flops(tensor: Trained, name: str = "adamw_8bit") -> float:
        return float(optimizer.update_flops(update_of([tensor], name)))

    assert flops(replace(MATRIX, count=3)) == 3 * flops(MATRIX) > 0
    assert flops(replace(MATRIX, is_embedding=True)) == 0
    assert flops(replace(VECTOR, width=4095)) == 0
    assert flops(MATRIX, "adamw_torch_fused") == 0


@pytest.mark.parametrize(
    ("name", "of_448", "calls"),
    [
        # of 448 tensors: 5 launches of one list, 7 of two, 10 of three, 13 of four
        ("adamw_torch", 3 * 5 + 2 * 7 + 2 * 10, 7),
        ("adamw_torch_fused", 5 + 13, 2),
        ("sgd", 7, 1),
    ],
)
def test_launches_of_an_update_are_as_full_as_tensors_and_blocks_allow(
    name: str, of_448: int, calls: int
) -> None:
    adapters = [Trained(rows=16, width=4096, param_bytes=4, count=448)]
    assert launched(adapters, name) == of_448
    assert launched(adapters, name, clips=True) == of_448 + 5 + 5 + 8
    assert launched(adapters, name, unscales=True) == of_448 + 5
    assert launched(adapters, name, num_micro_batches=3) == of_448 + 2 * 448
    large = [Trained(rows=65536, width=320 * 30, param_bytes=2)]  # 320 blocks of 65,536 a launch
    assert launched(large, name) == calls * 30


def test_bitsandbytes_and_a_cpu_update_one_tensor_after_the_other() -> None:
    tensors = [replace(MATRIX, count=10), replace(VECTOR, count=5)]
    assert launched(tensors, "adamw_8bit") == launched(tensors, "lion") == 15
    on_cpu = {"foreach": False}
    assert launched(tensors, "adamw_torch", **on_cpu) == 15 * 7
    assert launched(tensors, "adamw_torch_fused", **on_cpu) == 15
    assert launched(tensors, "adafactor", **on_cpu) == 10 * 24 + 5 * 16
    assert launched(tensors, "sgd", clips=True, **on_cpu) == 15 + 2 * 15 + 8


@given(
    name=st.sampled_from(get_args(Optimizer)),
    tensor=st.builds(
        Trained,
        rows=st.integers(1, 5000),
        width=st.integers(1, 5000),
        param_bytes=st.sampled_from([2, 4]),
        count=st.integers(1, 300),
    ),
)
def test_every_optimizer_reads_a_gradient_and_a_parameter_and_writes_it(
    name: str, tensor: Trained
) -> None:
    assert moved(tensor, name) >= 3 * tensor.param_bytes
    assert launched([tensor], name) > 0


def test_transformers_own_adamw_moves_and_launches_what_it_wrote() -> None:
    """`AdamW.step` of optimization.py in transformers 4.16, in its order, without weight decay."""
    torch = pytest.importorskip("torch")
    (parameter,) = parameters(MATRIX, 1)
    first, second = torch.zeros_like(parameter), torch.zeros_like(parameter)

    def step() -> None:
        first.mul_(0.9).add_(parameter.grad, alpha=0.1)
        second.mul_(0.999).addcmul_(parameter.grad, parameter.grad, value=0.001)
        denom = second.sqrt().add_(1e-6)
        parameter.data.addcdiv_(first, denom, value=-1e-3)

    real = record(step)
    assert moved(MATRIX, "adamw_hf") * MATRIX.num_params == real.moved
    assert launched([MATRIX], "adamw_hf") == len(real.operators)
    of_16_bit = replace(MATRIX, param_bytes=2)
    for tensor in (MATRIX, of_16_bit):
        (root,) = next(optimizer.temporary_blocks([tensor], optimizer="adamw_hf", foreach=True))
        assert root == tensor.param_bytes * tensor.num_params
    both = [replace(MATRIX, count=5), VECTOR]
    size = optimizer.step_temporary_bytes(both, optimizer="adamw_hf", foreach=True)
    assert size == 4 * 512 * 512


def test_a_torch_before_2_has_no_lists_of_tensors() -> None:
    old, new = Libraries(torch="1.13.1"), Libraries(torch="2.0")
    assert optimizer.has_foreach("cuda", new)
    assert not optimizer.has_foreach("cuda", old)
    assert not optimizer.has_foreach("cpu", new)
