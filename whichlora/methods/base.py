"""What a fine-tuning method is: its parameters, operators and work, and what PEFT is told of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import repeat
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from whichlora.errors import ConfigError
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.layer import Attention, Linear
from whichlora.spec.numeric import Count
from whichlora.spec.options import Option, OptionValue
from whichlora.spec.run import ALL_LINEAR, MethodOptimizer, Quant, RunConfig, Serve
from whichlora.trainers.base import SUPERVISED_RATE

PEFT_COMPARISON = "PEFT's method comparison"  # method_comparison/MetaMathQA, its experiments' lr

if TYPE_CHECKING:  # a method uses the operators that it is given, so it lies below them
    from whichlora.symbolic.graph import Tensor
    from whichlora.symbolic.operators import OpEmitter

LORA_SETTINGS = frozenset({"use_rslora", "loraplus_lr_ratio", "bias"})  # of a run, of LoRA alone
RANK_SETTINGS = LORA_SETTINGS | {"r", "lora_alpha", "lora_dropout"}  # of methods with a rank


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenTensor:
    """A matrix of the adapters that is not trained: of one target, or shared between all.

    Args:
        name, dims: what `explain` calls it, and its shape in words.
        count: how many equal ones there are.
        element_bytes: as wide as the adapters where it is None.
        as_base: as wide as the base's weights that are not quantised.
    """

    name: str
    dims: str
    rows: Count
    width: Count
    count: int = 1
    element_bytes: int | None = None
    as_base: bool = False

    @property
    def num_params(self) -> Count:
        return self.count * self.rows * self.width

    def bytes_of_one(self, dtypes: Dtypes) -> int:
        """Bytes of one element."""
        return dtypes.base_bytes if self.as_base else self.element_bytes or dtypes.adapter_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTensor:
    """A trained tensor that several adapted matrices read, so that its gradient is their sum.

    Args:
        name, dims: what `explain` calls it, and its shape in words.
        count: how many equal ones there are, of which one layer reads one.
        is_factor: a product reads it as it is, so that autocast caches one copy of it.
    """

    name: str
    dims: str
    rows: Count
    width: Count
    count: int = 1
    is_factor: bool = False

    @property
    def num_params(self) -> Count:
        return self.count * self.rows * self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterTensor:
    """A trained tensor outside of the layers, whose gradient comes after all of theirs.

    Args:
        name, dims: what `explain` calls it, and its shape in words.
        is_factor: a product reads it, so that autocast's copy of it lives until the backward.
        training_only: it is neither saved nor served.
        frozen: it is saved and served, and not trained.
        served_only: nor there in training.
    """

    name: str
    dims: str
    rows: int
    width: int
    is_factor: bool = False
    training_only: bool = False
    frozen: bool = False
    served_only: bool = False

    @property
    def num_params(self) -> int:
        return self.rows * self.width

    @property
    def num_trained(self) -> int:
        return 0 if self.frozen else self.num_params


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterWork:
    """The products that the adapters of one `Linear` add to a step.

    Two operations for each trained parameter and token, and twice as many backward, are counted
    for every method and left out here. Parameters that layers share are not counted so. What
    other kernels read and write follows from `Method.forward`.

    Args:
        token_flops: of one token forward; the input's gradient takes as many again.
        backward_token_flops: of one token backward beyond those.
        weight_flops: of one forward whatever the number of tokens.
        backward_weight_flops: the same of a backward.
        wide: they are in fp32, or in the base's dtype; None where they are in the adapters' dtype.
        replaces_base: they stand for the base's own product, which is as wide as they are.
        expansions: of a quantised weight, beyond that of the product, in one forward.
        modules: that PEFT puts around a linear layer and into it.
    """

    token_flops: Count = 0
    backward_token_flops: Count = 0
    weight_flops: Count = 0
    backward_weight_flops: Count = 0
    wide: bool | None = None
    replaces_base: bool = False
    expansions: int = 0
    modules: int = 4


def _base_alone(ops: OpEmitter, linear: Linear, x: Tensor) -> Tensor:
    return ops.base(linear, x)


def no_shapes(linear: Linear, r: Count) -> tuple[tuple[Count, Count], ...]:
    return ()


def rank_fault(linear: Linear, r: int) -> str:
    """Why a decomposition of a weight refuses the rank `r`; empty where it has as many."""
    smaller = min(linear.in_features, linear.out_features)
    return f"r must not be above {smaller}, got {r}" if r > smaller else ""


def _as_wide_as_adapters(linear: Linear, dtypes: Dtypes) -> Iterator[int]:
    return repeat(dtypes.adapter_bytes)


def _nothing_frozen(linears: Sequence[tuple[Linear, int]], r: Count) -> tuple[FrozenTensor, ...]:
    return ()


def _nothing_shared(linears: Sequence[tuple[Linear, int]], r: Count) -> tuple[SharedTensor, ...]:
    return ()


def _nothing_outside(model: ModelSpec) -> tuple[OuterTensor, ...]:
    return ()


def _no_remainders(linear: Linear, dtypes: Dtypes, r: Count) -> Count:
    return 0 * r


def _no_work(linear: Linear, dtypes: Dtypes, r: Count) -> AdapterWork:
    return AdapterWork()


def _product_and_scaled(base_bytes: int) -> int:
    # `transpose(weight_B @ weight_A) * scaling` of `get_delta_weight`: two fp32 matrices
    return 8


def _no_refusal(linear: Linear, quant: str) -> str:
    return ""


def _nothing_bound(run: RunConfig) -> Mapping[str, Any]:
    return {}


def _no_start(linears: Sequence[tuple[Linear, int]], dtypes: Dtypes, r: Count) -> Count:
    return 0


def _no_notes(run: RunConfig, adapts_experts: bool) -> tuple[str, ...]:
    return ()


def given(*functions: Callable[..., Any], **settings: Any) -> dict[str, Any]:
    """`functions` with `settings` filled in, by their names, which are fields of `Method`."""
    return {function.__name__: partial(function, **settings) for function in functions}


def adapted_modules(run: RunConfig) -> dict[str, Any]:
    """What every PEFT config says of the modules; the caller resolves groups but all-linear."""
    targets = run.target_modules
    saved = {"modules_to_save": list(run.modules_to_save)} if run.modules_to_save else {}
    return {"target_modules": ALL_LINEAR if targets == (ALL_LINEAR,) else list(targets)} | saved


def stated_options(run: RunConfig, options: Iterable[Option]) -> dict[str, Any]:
    """Those of `options` that `run` states, by the names that PEFT gives them."""
    stated = dict(run.method_options)
    return {option.name: stated[option.name] for option in options if option.name in stated}


def read_options(
    config: Any,
    options: Iterable[Option],
    *,
    plain: Mapping[str, tuple[Any, ...]] = MappingProxyType({}),
) -> Mapping[str, Any]:
    """The settings that all PEFT configs share, and `options` that are not at their defaults.

    Args:
        plain: fields of the config that are not modelled, and the values that mean so.

    Raises:
        ConfigError: another value of one of them.
    """
    kind = type(config).__name__
    usual: dict[str, tuple[Any, ...]] = {"layers_to_transform": (None, []), "bias": ("none",)}
    for name, accepted in {**usual, **plain}.items():
        value = getattr(config, name, None)
        if value is not None and value not in accepted:
            raise ConfigError(f"{kind}.{name}={value!r} is not modelled")
    values = ((option, getattr(config, option.name)) for option in options)
    return {
        "modules_to_save": tuple(sorted(getattr(config, "modules_to_save", None) or ())),
        "method_options": tuple(
            sorted((option.name, value) for option, value in values if value != option.default)
        ),
    }


def _not_its_own(config: Any) -> Mapping[str, Any] | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One way to fine-tune. Where a function takes a `Linear`, that is an adapted matrix.

    Args:
        peft_class: the PEFT config class as a dotted name; empty for a method without adapters.
        peft_defaults: ranks, scales and dropouts that it has where a script gives none, and what
            else is no option's default.
        peft_config: its keyword arguments. `target_modules` may still hold "attention"; who builds
            the config puts the resolved names there.
        read_peft: the other way: the settings of `RunConfig` that a config object means, None where
            it is another method's. It may raise a `ConfigError` where it is this method's with an
            option that is not modelled.
        parameter_prefix: how PEFT's names of its parameters begin.
        stays_wide: word in the names of those that stay fp32 where adapters are narrowed, and that
            a layer's result is multiplied with.
        widens_result: a layer of a quantised base returns fp32, as the parameter is that it is
            multiplied with, and does not cast it back under autocast.
        keeps_input_dtype: a layer returns the dtype of its input, whatever the base returns.
        merges: PEFT can make its update a part of the weights.
        optimizer: the one that the method is, where it is one.
        makes_optimizer: the function of PEFT that makes it, as a dotted name.
        virtual_tokens: trained ones that stand before each sequence, in all layers and the loss.
        with_model: the model with what the method changes in its layers, such as how many of them
            it adapts.
        after_attention: operators on the result of an attention whose last matrix is adapted, told
            its input and how queries get their positions.
        prefix_tokens: trained keys and values that stand before each sequence's own in all layers.
        checkpoints: its model may be trained with gradient checkpointing.
        copies_table: the token table, and a head that is tied to it, are read as copies with other
            rows, whose gradients have all rows.
        outer_tensors: what it trains outside of the layers.
        adapts_head: its operators are those of any `nn.Linear` where that is what makes logits.
        adapts_table: PEFT's layer around a token table looks up A, and multiplies with B.
        find_targets: names in a model that the method trains in place of linear layers, told
            `target_modules`: norms by their names, or none.
        names_targets: it groups matrices by the names in `target_modules`, so that it is told
            them: of "all-linear" PEFT makes full names where they are fewer than 20.
        in_loss: PEFT's model adds a term of the trained tensors to the loss, so that most of their
            gradient is there before the model goes backward.
        num_scores: tensors as large as the trained ones that PEFT holds from step to step, beside
            the optimizer's states.
        after_update: what of the PEFT model a loop calls with the number of the step between the
            optimizer's step and `zero_grad`, as a dotted name.
        reads_batches: the function of PEFT that must see batches before the first step, if any.
        ignores: settings of `RunConfig` that mean nothing to it.
        options: its own settings, as its PEFT config names them.
        with_options: fields of the method that these settings, or the rank, decide; told a run
            that has nothing else.
        one_rank: its operators are not linear in the rank, so that each rank is counted alone.
        takes_conv1d: PEFT's layers adapt Conv1D, too, the linear layer of GPT-2: read in the
            `_create_new_module` of its model.
        refuses: why PEFT can't adapt a matrix stored as a `Quant`; empty where it can.
        trains_base: all base weights get gradients.
        base_quant: storage of the base weights where the user does not say.
        serve: how its model is served where the user does not say.
        adapter_shapes: (rows, width) of the trained tensors that one of the `count` matrices gets.
        autocast_shapes: those of them that a product reads as they are, which autocast casts once
            and caches; None for all.
        adapter_widths: bytes of one element of each of them.
        gradient_remainders: bytes that the gradients of one of the `count` matrices hold beyond
            their own, being views of larger ones.
        frozen_tensors: matrices of the adapters that are not trained, of all adapted matrices of a
            model, each given with the number of layers that have it.
        shared_tensors: trained tensors that several matrices read, told what `frozen_tensors` is;
            `adapter_shapes` leaves them out, and `ops.tape.shared_weight` makes them.
        forward: the operators of one adapted module, the base's product (`ops.base`) among them.
        folded: the operators that make the weight of a bare parameter, such as that of experts,
            with its adapter; None where the method adapts modules alone.
        trains_frozen: whether a gradient is made for the frozen weight, which nobody asked for.
        work: the products and modules that it adds to a step; those of trained parameters are
            counted for every method.
        start_bytes: beside the loaded weights at the largest moment of making the adapters, of all
            adapted matrices; of a start that decomposes weights or gradients.
        merging: bytes per weight that PEFT makes beside the matrix into which it merges an fp32
            adapter, told those of the matrix's own elements.
        learning_rate: usual in supervised training.
        rate_source: who tried it.
        notes: what a user must know of a run; told whether experts are adapted.
    """

    name: str
    summary: str
    peft_class: str = ""
    peft_defaults: tuple[tuple[str, Any], ...] = ()
    peft_config: Callable[[RunConfig], Mapping[str, Any]] = lambda run: {}
    read_peft: Callable[[Any], Mapping[str, Any] | None] = _not_its_own
    parameter_prefix: str = ""
    stays_wide: str = ""
    widens_result: bool = False
    keeps_input_dtype: bool = False
    optimizer: MethodOptimizer | None = None
    makes_optimizer: str = ""
    merges: bool = True
    virtual_tokens: int = 0
    with_model: Callable[[ModelSpec, RunConfig], ModelSpec] = lambda model, run: model
    after_attention: (
        Callable[[OpEmitter, Attention, Tensor, Tensor, Callable[[Tensor], Tensor]], Tensor] | None
    ) = None
    prefix_tokens: int = 0
    checkpoints: bool = True
    copies_table: bool = False
    adapts_head: bool = False
    adapts_table: bool = False
    outer_tensors: Callable[[ModelSpec], tuple[OuterTensor, ...]] = _nothing_outside
    find_targets: Callable[[ModelSpec, tuple[str, ...]], tuple[str, ...]] | None = None
    names_targets: bool = False
    in_loss: bool = False
    num_scores: int = 0
    after_update: str = ""
    reads_batches: str = ""
    ignores: frozenset[str] = frozenset()
    options: tuple[Option, ...] = ()
    with_options: Callable[[RunConfig], Mapping[str, Any]] = _nothing_bound
    one_rank: bool = False
    takes_conv1d: bool = True
    refuses: Callable[[Linear, str], str] = _no_refusal
    trains_base: bool = False
    base_quant: Quant = "none"
    serve: Serve = "merged"
    adapter_shapes: Callable[[Linear, Count], tuple[tuple[Count, Count], ...]] = no_shapes
    autocast_shapes: Callable[[Linear, Count], tuple[tuple[Count, Count], ...]] | None = None
    adapter_widths: Callable[[Linear, Dtypes], Iterable[int]] = _as_wide_as_adapters
    gradient_remainders: Callable[[Linear, Dtypes, Count], Count] = _no_remainders
    frozen_tensors: Callable[[Sequence[tuple[Linear, int]], Count], tuple[FrozenTensor, ...]] = (
        _nothing_frozen
    )
    shared_tensors: Callable[[Sequence[tuple[Linear, int]], Count], tuple[SharedTensor, ...]] = (
        _nothing_shared
    )
    forward: Callable[[OpEmitter, Linear, Tensor], Tensor] = _base_alone
    folded: Callable[[OpEmitter, Linear], Tensor] | None = None
    trains_frozen: Callable[[Linear, Dtypes], bool] = lambda linear, dtypes: False
    work: Callable[[Linear, Dtypes, Count], AdapterWork] = _no_work
    start_bytes: Callable[[Sequence[tuple[Linear, int]], Dtypes, Count], Count] = _no_start
    merging: Callable[[int], int] = _product_and_scaled
    learning_rate: float = 10 * SUPERVISED_RATE
    rate_source: str = PEFT_COMPARISON
    notes: Callable[[RunConfig, bool], tuple[str, ...]] = _no_notes

    @property
    def added_tokens(self) -> int:
        """Trained tokens of each sequence: that all layers run, or that have keys alone."""
        return self.virtual_tokens + self.prefix_tokens

    def of(self, run: RunConfig) -> Method:
        """The method as the options and the rank of `run` make it."""
        if not self.options and not self.one_rank:
            return self
        return _bound(self, run.method_options, run.r)

    def adapter_params(self, linear: Linear, r: Count) -> Count:
        """Trained parameters that the `count` matrices of `linear` get. Kind: exact."""
        total: Count = 0 * r
        for rows, width in self.adapter_shapes(linear, r):
            total = total + rows * width
        return total * linear.count

    def adapter_bytes(self, linear: Linear, dtypes: Dtypes, r: Count) -> Count:
        """Bytes of these parameters. Kind: exact."""
        total: Count = 0 * r
        widths = self.adapter_widths(linear, dtypes)
        for (rows, width), element_bytes in zip(
            self.adapter_shapes(linear, r), widths, strict=False
        ):
            total = total + rows * width * element_bytes
        return total * linear.count

    def gradient_bytes(self, linear: Linear, dtypes: Dtypes, r: Count) -> Count:
        """Bytes that the gradients of these parameters hold. Kind: exact."""
        remainders = self.gradient_remainders(linear, dtypes, r) * linear.count
        return self.adapter_bytes(linear, dtypes, r) + remainders


@lru_cache(maxsize=256)  # equal runs share one value, by which symbolic layers are cached
def _bound(method: Method, options: tuple[tuple[str, OptionValue], ...], r: int) -> Method:
    run = RunConfig(model="", method_options=options, r=r)
    return replace(method, **method.with_options(run))


NO_ADAPTERS = Method(name="none", summary="a model as it was loaded")
