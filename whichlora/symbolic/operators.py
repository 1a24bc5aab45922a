"""The operators of a transformer's layer on a tape, as the libraries' Python runs them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from whichlora.methods.base import Method
from whichlora.spec.dtypes import (
    BNB_BLOCK,
    Dtypes,
    exllama_kernels,
    expands_by_operators,
    fused_rows,
    is_quantised,
)
from whichlora.spec.layer import Linear, Norm
from whichlora.spec.run import FOUR_BIT_BNB
from whichlora.symbolic.autograd import Tape
from whichlora.symbolic.graph import Assigned, Temporaries, Tensor
from whichlora.symbolic.linear_form import (
    NOTHING,
    LinearForm,
    constant,
    per_group,
    per_pair,
    per_rank,
    per_rank_sequence,
    per_rank_token,
    per_sequence,
    per_token,
    plus,
    scaled,
    where_many_rows,
)


def _before_cast(x: Tensor, size: int) -> LinearForm:
    """The gradient of `x` in the width of a product, where it is cast for `x` afterwards."""
    return scaled(x.elements, size) if x.needs_grad and x.size < size else NOTHING


def _after_cast(x: Tensor, size: int) -> LinearForm:
    """The same as `x` gets it. Source: torch 2.13 `engine.cpp`, `validate_outputs`."""
    return x.form if x.needs_grad and x.size < size else NOTHING


@dataclass(frozen=True, slots=True)
class Rows:
    """How many rows a matrix reads: one of each token, or a number, or a share of the chosen.

    Args:
        number: rows whatever the tokens are; 0 for rows of tokens.
        in_sequence: rows of each sequence, whatever its tokens are; 0 for rows of tokens.
        group: one row for so many tokens of a sequence; 0 for rows of tokens. What adapters make
            of them is left out.
        chosen: rows of each token in all, of which the `part`-th of `parts` is read.
        keys: one row for each token that a query sees. What adapters make of them is left out.
    """

    number: int = 0
    in_sequence: int = 0
    group: int = 0
    chosen: int = 1
    part: int = 0
    parts: int = 1
    keys: bool = False

    def _share(self, width: int) -> int:
        """Shares of all parts add up to the whole."""
        whole = self.chosen * width
        return whole * (self.part + 1) // self.parts - whole * self.part // self.parts

    def of(self, width: int) -> LinearForm:
        if self.number:
            return constant(self.number * width)
        if self.in_sequence:
            return per_sequence(self.in_sequence * width)
        if self.group:
            return per_group(width, self.group)
        if self.keys:
            return per_pair(width)
        return per_token(self._share(width))

    def of_rank(self, multiple: int) -> LinearForm:
        if self.number:
            return per_rank(self.number * multiple)
        if self.in_sequence:
            return per_rank_sequence(self.in_sequence * multiple)
        if self.group or self.keys:
            return NOTHING
        return per_rank_token(self._share(multiple))

    def where_many(self, count: int, fused_rows: int) -> LinearForm:
        """`count` where a product has more than `fused_rows`; a part has as many as tokens."""
        if self.number:
            return constant(count * (self.number > fused_rows))
        if self.keys:
            return constant(count)
        return where_many_rows(count, fused_rows)


@dataclass(frozen=True, slots=True)
class OpEmitter:
    """A tape, and the settings that decide which operators run on it.

    Args:
        targets: leaf names of the adapted matrices.
        method: whose operators an adapted matrix has.
        masked: SDPA gets a mask tensor.
        stream_bytes: one element of the layer's input.
        checkpointed: the layer is run again in its backward.
        reentrant: by `CheckpointFunction`, all of whose results need a gradient.
        rows: how many rows matrices read.
        ragged: the last chunk of a sequence is filled up, or experts turn tokens away.
        decoding: one token of each sequence runs, and sees those in the cache.
        makes_bias: it is the first layer of a stack, and makes the position bias that later ones
            read; else that is counted beside the layers.
        in_chunks: parts of the tokens that a matrix is run on one by one, whose results wait for
            the last; 0: it is run on all; 1: nobody says how many.
    """

    tape: Tape
    dtypes: Dtypes
    targets: tuple[str, ...]
    method: Method
    masked: bool = False
    stream_bytes: int = 2
    checkpointed: bool = False
    rows: Rows = Rows()
    ragged: bool = False
    decoding: bool = False
    makes_bias: bool = False
    reentrant: bool = False
    in_chunks: int = 0

    constant = staticmethod(constant)
    per_rank = staticmethod(per_rank)
    per_sequence = staticmethod(per_sequence)

    @staticmethod
    def short_lived(num_bytes: int) -> tuple[Assigned, Assigned]:
        """A temporary of an operator that is gone before its next one."""
        return Assigned("short-lived", constant(num_bytes)), Assigned("short-lived", None)

    # --- plain operators ---------------------------------------------------------------------

    def cast(self, x: Tensor, size: int, what: str = "") -> Tensor:
        """`x.to(dtype)`: nothing where it has that dtype."""
        if x.size == size:
            return x
        result = self.tape.op(
            [x], x.elements, size, passes=True, joined=x.joined, what=what or "copy, cast"
        )
        return replace(result, strided=x.strided)

    def in_rows(self, x: Tensor, weight: Tensor) -> Tensor:
        """`x` as a product of matrices reads it: copied so that a trained weight is not expanded.

        Source: torch 2.13 `matmul`, `should_fold`.
        """
        return self.copy(x) if (x.strided or x.cut) and weight.needs_grad else x

    def autocast(self, x: Tensor, what: str = "") -> Tensor:
        """`x` as a matrix product reads it: autocast casts it to 16 bits."""
        if not self.dtypes.under_autocast:
            return x
        narrow = self.cast(x, self.dtypes.compute_bytes, what)
        return self.tape.keep_copy(narrow) if x.is_leaf else narrow

    def scale(self, x: Tensor) -> Tensor:
        """Times a Python number."""
        return self.tape.op([x], x.elements, x.size, joined=x.joined)

    def clamp(self, x: Tensor) -> Tensor:
        """Between two tensors. Source: torch 2.13 `clamp_backward`: a boolean for each bound."""
        masks = scaled(x.elements, 1)
        return self.tape.op(
            [x], x.elements, x.size, saves=[x], inner_backward=(masks, masks), what="clamp"
        )

    def maximum(self, x: Tensor) -> Tensor:
        """Of a tensor and a number that is one, too.

        Source: derivatives.yaml of torch 2.13: `where(self == other, grad / 2, grad)`.
        """
        inner = scaled(x.elements, 1 + x.size)
        return self.tape.op(
            [x], x.elements, x.size, saves=[x], inner_backward=inner, what="maximum"
        )

    def add(self, x: Tensor, y: Tensor, what: str = "sum") -> Tensor:
        size = max(x.size, y.size)
        return self.tape.op([x, y], x.elements, size, passes=True, what=what)

    def multiply(self, x: Tensor, y: Tensor) -> Tensor:
        """Two tensors of one shape."""
        # `mul.Tensor` in derivatives.yaml: the gradient of each factor reads the other factor
        saves = [factor for factor, partner in ((y, x), (x, y)) if partner.needs_grad]
        size = max(x.size, y.size)
        inner = plus(_before_cast(x, size), _before_cast(y, size))
        return self.tape.op(
            [x, y],
            x.elements,
            size,
            saves=saves,
            inner_backward=inner,
            casts_gradients=plus(_after_cast(x, size), _after_cast(y, size)),
            what="product",
        )

    def multiply_rows(self, x: Tensor, row: Tensor, *, row_last: bool = False) -> Tensor:
        """`x` times a smaller tensor, which is repeated; its gradient is summed up.

        Args:
            row_last: the code writes `x * row`. `validate_outputs` treats gradients in that order:
                that of `x` is cast before that of `row` is summed up.
        """
        size = max(x.size, row.size)
        saves = [factor for factor, partner in ((row, x), (x, row)) if partner.needs_grad]
        inner, casts = _before_cast(x, size), NOTHING
        if row.needs_grad and row_last and x.needs_grad and x.size < size:
            inner, casts = scaled(x.elements, 2 * size), x.form
        elif row.needs_grad:  # summed up before the gradient of x is cast
            inner = scaled(x.elements, 2 * size - (x.size if x.needs_grad else 0))
        return self.tape.op(
            [x, row],
            x.elements,
            size,
            saves=saves,
            inner_backward=inner,
            casts_gradients=casts,
            what="product",
        )

    def copy(self, x: Tensor) -> Tensor:
        """`contiguous()` of another layout."""
        return self.tape.op([x], x.elements, x.size, passes=True, what="copy")

    def softmax(self, x: Tensor, *, size: int | None = None) -> Tensor:
        """Its backward reads its result, of `size` bytes each where the kernel widens.

        Before torch 1.11 it was given the input, too. CUDA's `softmax_backward_cuda_out` first
        makes `grad * output`, a tensor as large.
        """
        size = size or x.size
        product = scaled(x.elements, size) if self.dtypes.kernel_buffers else NOTHING
        return self.tape.op(
            [x],
            x.elements,
            size,
            saves=[x] if self.dtypes.libraries.softmax_keeps_input else (),
            saves_result=True,
            inner_backward=product,
            what="softmax",
        )

    def dropout(self, x: Tensor) -> Tensor:
        # `native_dropout_backward` reads the mask alone, not the input. The fused dropout of CUDA
        # and XPU keeps a boolean mask, the product elsewhere one as wide as `x`: torch 2.13
        # `dropout_impl`
        mask = scaled(x.elements, x.size if self.dtypes.backend.wide_dropout_masks else 1)
        result = self.tape.op([x], x.elements, x.size, keeps=[mask], what="dropout: result, mask")
        return replace(result, strided=x.strided)

    def convolve(self, x: Tensor, channels: int, kernel: int) -> Tensor:
        """A depthwise convolution, padded on both sides; its backward has input and weight."""
        tape, dtypes = self.tape, self.dtypes
        x = self.cast(x, dtypes.base_bytes)
        weight = tape.weight(
            constant(channels * kernel), dtypes.base_bytes, trained=dtypes.trains_base
        )
        if dtypes.under_autocast:
            x = self.cast(x, dtypes.compute_bytes, "convolution: input, cast")
            weight = self.cast(weight, dtypes.compute_bytes)
        padded = plus(per_token(channels), per_sequence(channels * (kernel - 1)))
        return tape.op([x, weight], padded, x.size, saves=[x, weight], what="convolution: result")

    # --- norms -------------------------------------------------------------------------------

    def norm(self, norm: Norm, x: Tensor, *, rows: LinearForm | None = None) -> Tensor:
        """`x`, normalised over each of `rows`: by default as many as tokens have.

        Source: the norms of transformers 5.23, torch 2.13's layer_norm under CUDA's autocast.
        """
        tape, dtypes = self.tape, self.dtypes
        rows = per_token(norm.rows) if rows is None else rows
        trained = norm.weight and (dtypes.trains_base or norm.name in self.targets)
        weight = tape.weight(constant(norm.width), dtypes.base_bytes, trained=trained)
        if dtypes.kernels.norm != "none" and norm.kind in ("rms", "rms_wide", "rms_offset"):
            return self._fused_norm(norm, x, weight, rows)
        if norm.kind in ("layer", "layer_narrow"):
            on_cpu = dtypes.device_kind == "cpu"
            # OLMo's has no weight, and casts by itself
            widened = norm.kind == "layer" and (not norm.weight or dtypes.widens_layer_norm)
            wide = self.cast(x, 4, f"{norm.name}: fp32 input") if widened else x
            if (
                norm.kind == "layer_narrow"
                and dtypes.under_autocast
                and dtypes.backend.widens_norms
            ):
                wide = self.cast(x, dtypes.compute_bytes, f"{norm.name}: input, cast")
            stats = scaled(rows, 2 * (wide.size if on_cpu else 4))
            out = tape.op(
                [wide, weight],
                x.elements,
                wide.size,
                saves=[wide],
                keeps=[stats],
                what=f"{norm.name}: result, mean and deviation",
            )
            if norm.separate:
                tape.runs_beside(norm.separate)  # a module for each head, and their results joined
            return out if norm.weight else self.cast(out, x.size)
        if norm.kind == "rms_mixed":
            wide = self.cast(x, 4, f"{norm.name}: fp32 input")
            rstd = self._deviation(self._square(wide), rows)
            y = self.cast(self.multiply_rows(x, rstd), dtypes.base_bytes)
            return self._weighted(y, weight)
        is_narrow = norm.kind == "rms_narrow"
        wide = x if is_narrow else self.cast(x, 4, f"{norm.name}: fp32 input")
        if norm.kind == "layer_steps":
            mean = tape.op([wide], rows, 4)
            first = tape.op([wide, mean], x.elements, 4, passes=True)
            second = tape.op([wide, mean], x.elements, 4, passes=True)
            squares = self._square(first)
            rstd = self._deviation(squares, rows)
            y = self.multiply_rows(second, rstd)
            tape.hold(wide, mean)
            return self.cast(self._weighted(y, weight), x.size)
        rstd = self._deviation(self._square(wide), rows, is_power=norm.kind == "rms_power")
        y = self.multiply_rows(wide, rstd)
        if norm.kind in ("rms_wide", "rms_narrow", "rms_offset", "rms_power"):
            if norm.weight:
                y = self._weighted(y, weight)
                tape.runs_beside(2 * (norm.kind == "rms_offset"))  # `1.0 + self.weight.float()`
            y = self.cast(y, x.size)
            tape.hold(x)
            return y
        narrow = self.cast(y, x.size, f"{norm.name}: normalised")
        out = self._weighted(narrow, weight)
        tape.hold(y)
        return out

    def _fused_norm(self, norm: Norm, x: Tensor, weight: Tensor, rows: LinearForm) -> Tensor:
        """An RMSNorm in one kernel; sums of a trained weight's gradient by multiprocessor left out.

        Source: liger-kernel 0.8.5 `ops/rms_norm.py`, `LigerRMSNormFunction`: `dX = dY` in place.
        """
        return self.tape.op(
            [x, weight],
            x.elements,
            x.size,
            saves=[x],
            keeps=[scaled(rows, 4)],
            passes=self.dtypes.kernels.norm == "in_place",
            what=f"{norm.name}: reciprocal deviation",
        )

    def _square(self, x: Tensor) -> Tensor:
        # its backward: x to a power, that times two, and the product with the gradient
        return self.tape.op([x], x.elements, x.size, saves=[x], inner_backward=(x.form, x.form))

    def _deviation(self, squares: Tensor, rows: LinearForm, *, is_power: bool = False) -> Tensor:
        size = squares.size
        saves = [squares] if self.dtypes.libraries.mean_keeps_input else []
        mean = self.tape.op([squares], rows, size, saves=saves)
        # `rsqrt` saves its result, `pow` its input (derivatives.yaml)
        shifted = self.tape.op([mean], rows, size, passes=True)
        return self.tape.op(
            [shifted],
            rows,
            size,
            saves=[shifted] if is_power else [],
            saves_result=not is_power,
            inner_backward=(scaled(rows, size), scaled(rows, size)),
            what="norm: reciprocal deviation",
        )

    def _weighted(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.multiply_rows(x, weight)

    # --- matrices ----------------------------------------------------------------------------

    def linear(self, linear: Linear, x: Tensor) -> Tensor:
        """One projection, with its adapter if it has one."""
        function = self.method.forward if self.adapts(linear) else OpEmitter.base
        if not linear.clamped:
            return function(self, linear, x)
        read = self.clamp(x)
        result = function(self, linear, read)
        self.tape.hold(x, read)
        clamped = self.clamp(result)
        self.tape.hold(result)
        return clamped

    def adapts(self, linear: Linear) -> bool:
        named = linear.rank_multiple and linear.name in self.targets
        return bool(named and not self.dtypes.trains_base)

    def base(self, linear: Linear, x: Tensor) -> Tensor:
        """The matrix itself, frozen or trained."""
        out = self._product(linear, x)
        if self.tape.product is None:
            self.tape.product = out.storage
        return out

    def _product(self, linear: Linear, x: Tensor) -> Tensor:
        tape, dtypes = self.tape, self.dtypes
        elements = self.rows.of(linear.active * linear.out_features)
        weights = constant(linear.num_weights // linear.count)
        if is_quantised(linear, dtypes) and dtypes.quant in FOUR_BIT_BNB:
            return self._four_bit_product(linear, x, elements, weights)
        if is_quantised(linear, dtypes) and dtypes.quant == "int8":
            # rows are quantised from fp16; the layer's own attribute keeps what it was given
            x = self.copy(x) if x.strided or x.cut else x
            coded = tape.op([x], x.elements, 1, inner=scaled(x.elements, 2), detached=True)
            dense = scaled(weights, x.size)
            return tape.op(
                [x, coded],
                elements,
                x.size,
                saves=[x],
                inner_backward=dense,
                hidden=True,
                multiplies=True,
                what=f"{linear.name}: result",
            )
        label = f"{linear.name}: own copy of the input"
        weight = tape.weight(weights, dtypes.base_bytes, trained=dtypes.trains_base)
        narrow = self.in_rows(self.autocast(x, label), weight)
        used = self.autocast(weight, f"{linear.name}: weight, cast")
        saves = [used] if x.needs_grad else []
        if dtypes.trains_base or (dtypes.linears_keep_inputs and not linear.transposed):
            saves.append(narrow)
        result = f"{linear.name}: result"
        # torch's `matmul` saves what operators expanded
        # (GPTQModel 7.3 `TorchLinear._forward_eager`, AutoGPTQ 0.5 `qlinear_cuda_old`)
        dense = self._expanded(linear, weights)
        kept = [dense] if dense and x.needs_grad and expands_by_operators(dtypes) else []
        out = tape.op(
            [narrow, used],
            elements,
            narrow.size,
            saves=saves,
            keeps=kept,
            inner=NOTHING if kept else dense,
            inner_backward=NOTHING if kept else dense,
            reshapes=not is_quantised(linear, dtypes),
            multiplies=True,
            what=result,
        )
        tape.hold(x)
        return out

    def _four_bit_product(
        self, linear: Linear, x: Tensor, elements: LinearForm, weights: LinearForm
    ) -> Tensor:
        """A product with a 4-bit weight, in the compute dtype or, under autocast, in 16 bit.

        Source: bitsandbytes 0.50.2 `Linear4bit.forward`, `MatMul4Bit`; `_dequant_linear_fallback`,
        whose `F.linear` casts input and weight once more where autocast is on.
        """
        tape, dtypes = self.tape, self.dtypes
        given = self._in_compute_dtype(x)
        read, casts = given, dtypes.autocasts_four_bit
        dense = scaled(weights, dtypes.four_bit_bytes)
        narrowed = scaled(weights, dtypes.half_bytes) if casts else NOTHING
        if casts:
            read = self._recast(given, dtypes.half_bytes)
        # expanded for many rows, and its scales to fp32, without their offset and with it
        scales = weights.constant // BNB_BLOCK * 4 if dtypes.quant == "nf4-dq" else 0
        fused = fused_rows(dtypes)
        expanded = (scales, scales, dense.constant, narrowed.constant)
        sizes = [self.rows.where_many(size, fused) for size in expanded]
        inner: list[LinearForm | Assigned] = [*sizes]
        if dtypes.casts_expanded:
            inner[2:3] = [Assigned("expanded", sizes[2])] * 2
        if self.in_chunks:
            earlier = scaled(elements, read.size)  # upper bound: the last one, too
            inner = [Assigned("earlier", earlier), *inner, Assigned("earlier", None)]
        out = tape.op(
            [read],
            elements,
            read.size,
            saves=[given] if dtypes.libraries.linear4bit_keeps_input else [],
            inner=inner,
            inner_backward=self._expanded_backward(weights),
            hidden=True,
            multiplies=True,
            what=f"{linear.name}: result",
        )
        if dtypes.computes_four_bit_apart:
            tape.hold(given)  # the variable `x` of the layer's forward
        recasts = dtypes.recasts_four_bit and not casts and out.size == x.size
        label = f"{linear.name}: result"
        out = self._recast(out, x.size, label) if recasts else self.cast(out, x.size, label)
        tape.hold(x)
        return out

    def _in_compute_dtype(self, x: Tensor) -> Tensor:
        size = self.dtypes.four_bit_bytes
        return self._recast(x, size) if self.dtypes.recasts_four_bit else self.cast(x, size)

    def _recast(self, x: Tensor, size: int, what: str = "copy, cast") -> Tensor:
        """`x` in another dtype, which may be as wide."""
        if x.size != size:
            return self.cast(x, size, what)
        result = self.tape.op([x], x.elements, size, joined=x.joined, what=what)
        return replace(result, strided=x.strided)

    def _expanded_backward(self, weights: LinearForm) -> Temporaries:
        """A 4-bit weight in the dtype that was loaded, and then in that of the product.

        Source: bitsandbytes 0.50.2 `MatMul4Bit.backward`: `dequantize_4bit(...).to(...)`.
        """
        dtypes = self.dtypes
        dense = scaled(weights, dtypes.four_bit_product_bytes)
        is_cast = dtypes.widens_four_bit or dtypes.recasts_four_bit or dtypes.casts_expanded
        if dtypes.autocasts_four_bit or not is_cast:
            return dense
        loaded = scaled(weights, dtypes.half_bytes)
        return [Assigned("expanded", loaded), Assigned("expanded", dense)]

    def _expanded(self, linear: Linear, weights: LinearForm) -> LinearForm:
        """What GPTQ's and AWQ's kernels write of a matrix in 16 bit, beside the product.

        Kernels that unpack inside write nothing, and exllama's write into their scratch.
        """
        dtypes = self.dtypes
        if not is_quantised(linear, dtypes) or exllama_kernels(dtypes):
            return NOTHING
        dense = scaled(weights, dtypes.compute_bytes)
        fused = 0 if dtypes.training else fused_rows(dtypes)
        return self.rows.where_many(dense.constant, fused) if fused else dense
