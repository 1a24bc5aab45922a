"""One optimizer step of a training run: the quantities that several of its moments share.

A moment (`memory.moments`) is a list of entries; what more than one of them reads is computed
here, once, when it is first asked for. All sizes may be arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from whichlora.memory import (
    activations,
    allocator,
    kv_cache,
    lasting,
    logits_loss,
    loss,
    optimizer,
)
from whichlora.memory.embeddings import layer_inputs_saved, masked_head_saved, outside_saved
from whichlora.memory.entries import Entry, Fact, Group, Tensor, listed
from whichlora.memory.gradients import (
    Trained,
    cached_params,
    gradient_bytes,
    outer_bytes,
    saved_modules,
    trained_params,
    trained_tensors,
    unwanted_gradient_bytes,
)
from whichlora.memory.layer_bytes import LayerBytes, keeps_keys, layer_bytes, listed_tensors
from whichlora.memory.layer_passes import (
    LayerPasses,
    checkpointed_passes,
    offloaded_passes,
    saved_passes,
)
from whichlora.memory.worst_layer import after, has_one_order, leaves_behind_keys, worst_backward
from whichlora.methods.base import Method
from whichlora.spec.architecture import ModelSpec, layers_in_order, parts_of
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.layer import Layer, Linear
from whichlora.spec.loss_heads import LOSS_HEADS
from whichlora.spec.numeric import Count, ceil_div, floor_div, largest, where
from whichlora.spec.run import RunConfig
from whichlora.spec.targets import (
    adapted,
    adapted_linears,
    adapts_head,
    adapts_table,
    token_table,
    tower_linears,
)
from whichlora.symbolic.altup import StreamPoints, expanding_points, merging_points
from whichlora.symbolic.gemma4 import LayerInputPoints, layer_input_points
from whichlora.symbolic.graph import LAYER_INPUT, SavedTensor
from whichlora.symbolic.language_head import LabelPoints, label_points
from whichlora.symbolic.layer import stream_bytes
from whichlora.symbolic.linear_form import LinearForm, most
from whichlora.symbolic.token_embeddings import saved_by_table
from whichlora.trainers.base import LogitsLoss, Trainer


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """A step after the first, when the optimizer's states exist.

    Args:
        targets: names of the matrices that get an adapter.
        batch_size, seq_len, r: of the run, or arrays in their place. Of two stacks of different
            lengths, `seq_len` is the decoder's; `source_len` says the encoder's.
        waiting: what earlier forwards of a micro-batch hold until this one has gone backward.
        meets: later forwards of the same graph have made their gradients, to which its own come.
        beside: what an engine in the same process holds while the model learns.
    """

    model: ModelSpec
    run: RunConfig
    dtypes: Dtypes
    method: Method
    gpu: GpuSpec
    targets: tuple[str, ...]
    trainer: Trainer
    batch_size: Count
    seq_len: Count
    r: Count
    waiting: tuple[Entry, ...] = ()
    meets: bool = False
    beside: tuple[Entry, ...] = ()

    @cached_property
    def tokens(self) -> Count:
        return self.batch_size * self.seq_len

    @cached_property
    def sized(self) -> dict[str, Count]:
        """Tokens of the batch, and the span that each of them may attend to."""
        return {"tokens": self.tokens, "span": self.seq_len}

    @property
    def has_foreach(self) -> bool:
        """Whether its optimizer updates lists of tensors on this device."""
        return optimizer.has_foreach(self.gpu.kind, self.dtypes.libraries)

    @property
    def source_len(self) -> Count:
        """Tokens of each sequence that the first stack is given: an encoder's, or all there is."""
        return self.model.groups[0].layer.own_len or self.seq_len

    @property
    def source_tokens(self) -> Count:
        return self.batch_size * self.source_len

    @property
    def has_two_lengths(self) -> bool:
        """Whether an encoder's sequences have another length than its decoder's."""
        return bool(self.model.groups[0].layer.own_len)

    @cached_property
    def saved_encoder_out(self) -> Count:
        """Bytes of the encoder's output that decoder layers save, where lengths differ."""
        decoder = (self.layers[number].saved_memory for number in self.second_stack)
        return largest(0 * self.tokens, *(decoder if self.has_two_lengths else ()))

    @cached_property
    def named_encoder_out(self) -> Count:
        """Bytes of the encoder's output that only local variables of the forward hold."""
        decoder = (self.layers[number].memory for number in self.second_stack)
        held = largest(0 * self.tokens, *(decoder if self.has_two_lengths else ()))
        return held - self.saved_encoder_out

    @property
    def accumulates(self) -> bool:
        return self.run.adds_to_gradients

    @property
    def num_forwards(self) -> Count:
        """Forwards with a graph in one micro-step."""
        columns = self.trainer.columns(self.run)
        if columns is None:
            return 1
        return columns.num_forwards(floor_div(self.batch_size, columns.texts))

    @property
    def gradients_wait(self) -> bool:
        """Whether a backward leaves no new gradients: it adds to those there are, or frees them."""
        return self.accumulates or self.method.in_loss or self.frees_gradients

    @property
    def frees_gradients(self) -> bool:
        """Whether each gradient goes as soon as its parameter is updated."""
        return self.trainer.updates_in_backward(self.run)

    # --- what is trained ------------------------------------------------------------------------

    @cached_property
    def num_trained(self) -> Count:
        """Parameters of the adapters, or all: what autocast copies, in the shape of arrays."""
        return trained_params(self.model, self.targets, self.method, self.r)

    @cached_property
    def tensors(self) -> tuple[Trained, ...]:
        """Everything that gets a gradient."""
        return trained_tensors(
            self.model,
            self.targets,
            self.method,
            self.r,
            dtypes=self.dtypes,
            modules_to_save=self.run.modules_to_save,
            bias=self.run.bias,
        )

    @cached_property
    def saved_modules(self) -> tuple[Trained, ...]:
        dtypes, run = self.dtypes, self.run
        return tuple(saved_modules(self.model, run.modules_to_save, dtypes.copy_bytes))

    @property
    def param_bytes(self) -> int:
        dtypes = self.dtypes
        return dtypes.base_bytes if self.method.trains_base else dtypes.adapter_bytes

    @cached_property
    def static(self) -> tuple[Entry, ...]:
        """Entries of the whole step: weights, adapters and the optimizer's states."""
        return lasting.whole_step(self)

    @property
    def has_reference(self) -> bool:
        """Whether log-probabilities of a frozen reference are computed in each step."""
        return bool(self.trainer.forwards(self.run).reference)

    @cached_property
    def always(self) -> tuple[Entry, ...]:
        """Entries that live from the first layer's forward to its backward."""
        return lasting.within_layers(self)

    @cached_property
    def around_layers(self) -> tuple[Entry, ...]:
        """Those of `always` that live before the first layer's forward and after its backward."""
        return lasting.around_layers(self)

    # --- the layers -----------------------------------------------------------------------------

    @cached_property
    def num_idle_layers(self) -> int:
        """Number of first layers without a backward, since all that is trained comes after them.

        Kind: exact; 0 where they are checkpointed, or not known to stand in one order. Source:
        torch 2.13 `VariableType.cpp`: no node is made where no input needs a gradient.
        """
        is_first = self.gives_input_gradient or self.method.trains_base or self.run.bias == "all"
        if is_first or self.run.gradient_checkpointing or not has_one_order(self.model):
            return 0
        trained = (
            bool(adapted(layer, self.targets))
            or any(norm.name in self.targets for norm in layer.norms)
            for layer in layers_in_order(self.model)
        )
        return next((place for place, is_trained in enumerate(trained) if is_trained), 0)

    @cached_property
    def layers(self) -> tuple[LayerBytes, ...]:
        """One of each group of equal layers; `count` is that of those with a graph."""
        idle = self.num_idle_layers
        return tuple(
            self._layer_bytes(
                group.layer, group.count - sum(place < idle for place in group.positions or ())
            )
            for group in self.model.groups
        )

    def _layer_bytes(self, layer: Layer, count: int = 1, *, makes_bias: bool = False) -> LayerBytes:
        return layer_bytes(
            layer,
            count,
            self.model,
            self.targets,
            self.dtypes,
            self.method,
            r=self.r,
            run=self.run,
            meets=self.meets,
            makes_bias=makes_bias,
            **self.sized,
        )

    @cached_property
    def passes(self) -> LayerPasses:
        """Tensors that layers keep from forward to backward, and temporaries of their passes."""
        named = self.keys_in_forward
        if self.expanding is not None:  # `temp_hidden_states` of `Gemma3nTextModel.forward`
            named = named + self.tokens * self.expanding.unsaved_named_bytes
        named = named + self.named_encoder_out
        return replace(self._passes, forward=self._passes.forward + named)

    @property
    def keys_in_forward(self) -> Count:
        """Keys and values for later layers that a dict of the model's forward alone holds."""
        if self.run.gradient_checkpointing:  # they are among `CHECKPOINTS`
            return 0 * self.tokens
        held = (layer.count * layer.held_by_later_layers for layer in self.layers)
        return sum(held, 0 * self.tokens)

    @cached_property
    def _passes(self) -> LayerPasses:
        if self.run.gradient_checkpointing:
            offloads = self.trainer.offloads(self.run)
            passes = offloaded_passes if offloads else checkpointed_passes
            return passes(self.model, self.layers, masks=self.shared_masks, sized=self.sized)
        return saved_passes(
            self.model,
            self.layers,
            self.dtypes,
            freezes_input=not self.gives_input_gradient,
            num_idle=self.num_idle_layers,
            unnamed_mask_bytes=self.unnamed_mask_bytes,
            masks=self.shared_masks,
            sized=self.sized,
        )

    @property
    def goes_backward(self) -> bool:
        """Whether any layer has a graph."""
        return True

    @property
    def gives_input_gradient(self) -> bool:
        """Whether the first layer returns a gradient of its input."""
        from_images = self.learns_from_images and not self.attends
        streams = self.model.streams
        is_projected = streams is not None and any(
            linear.name in self.targets for linear in streams.expanding
        )
        return self.needs_grad or self._trains_norms or from_images or is_projected

    @property
    def attends(self) -> bool:
        """Whether layers cross-attend to a tower's vectors, which are no tokens of the text."""
        return self.model.tower is not None and self.model.tower.attended

    @property
    def transcribes(self) -> bool:
        """Whether layers cross-attend to a clip of sound (Whisper)."""
        return self.model.tower is not None and self.model.tower.transcribes

    @property
    def learns_from_images(self) -> bool:
        """Whether a gradient flows into a vision tower, or into its embedded patches."""
        if self.model.tower is None:
            return False
        learning = set(self.tower_targets)
        if self.cuts_tower:
            learning &= {linear.name for linear in self.model.tower.stack.head_linears}
        return self.hooks_tower or self.trains_tower or bool(learning)

    @property
    def hooks_tower(self) -> bool:
        """Whether checkpointing makes the embedded patches of a vision tower need a gradient."""
        tower = self.model.tower
        if tower is None or not self.hooks_inputs:
            return False
        return self.trainer.hooks_tower(self.run, tower, bool(self.tower_targets))

    @property
    def remakes_tower(self) -> bool:
        """Whether the backward makes the blocks of a vision tower again."""
        tower = self.model.tower
        if tower is None or not self.run.gradient_checkpointing:
            return False
        by_class = self.run.versions.value_of("transformers", tower.checkpointed)
        return self.trainer.rewrites_checkpoints or by_class

    @property
    def cuts_tower(self) -> bool:
        """Whether no gradient reaches the blocks of a vision tower, adapted or not.

        Source: torch 2.13 `CheckpointFunction`, whose results need a gradient if its inputs do.
        """
        tower = self.model.tower
        if tower is None or not (self.remakes_tower and self.run.use_reentrant):
            return False
        embeds = tower.embedder is not None and tower.embedder.name in self.tower_targets
        return not (self.hooks_tower or self.trains_tower or embeds)

    @property
    def trains_tower(self) -> bool:
        """Whether the weights of a vision tower are trained."""
        tower = self.model.tower
        return self.method.trains_base and tower is not None and tower.trained

    @cached_property
    def tower_targets(self) -> tuple[str, ...]:
        """Names of the matrices of a vision tower that get an adapter."""
        named = (linear.name for linear in tower_linears(self.model) if linear.rank_multiple)
        return tuple(sorted(set(named) & set(self.targets)))

    @cached_property
    def tower_gradients(self) -> Count:
        """Gradients of a vision tower, which come after those of the language model."""
        tower = self.model.tower
        if tower is None:
            return 0 * self.num_trained
        if self.method.trains_base:
            return tower.stack.num_params * self.param_bytes * self.trains_tower
        total = 0 * self.num_trained
        for linear in tower.linears:
            if linear.rank_multiple and linear.name in self.tower_targets:
                total = total + self.method.gradient_bytes(linear, self.dtypes, self.r)
        return total

    @property
    def _trains_norms(self) -> bool:
        norms = self.model.groups[0].layer.norms
        return self.run.bias == "all" and any(norm.bias for norm in norms)

    @cached_property
    def first_stack(self) -> tuple[int, ...]:
        """Groups of the stack whose backward comes last: an encoder's, or all of a decoder."""
        groups = self.model.groups
        return tuple(i for i, group in enumerate(groups) if group.stack == groups[0].stack)

    @cached_property
    def second_stack(self) -> tuple[int, ...]:
        """Groups of the decoder after an encoder, else none."""
        return tuple(i for i in range(len(self.layers)) if i not in self.first_stack)

    @cached_property
    def first_kinds(self) -> tuple[int, ...]:
        """Groups of layers one of which goes backward last."""
        return self._kinds_at(self.num_idle_layers, self.first_stack)

    @cached_property
    def first_decoder_kinds(self) -> tuple[int, ...]:
        """`first_kinds` of a decoder after an encoder."""
        return self._kinds_at(0, self.second_stack)

    def _kinds_at(self, place: int, stack: tuple[int, ...]) -> tuple[int, ...]:
        """Groups of `stack` that its layer at `place` is of; all where nobody said."""
        return tuple(i for i in stack if place in self.model.groups[i].positions) or stack

    @property
    def _is_reentrant(self) -> bool:
        return bool(self.run.gradient_checkpointing and self.run.use_reentrant)

    def _masks(
        self, *, checkpointed: bool, side: str = "", unbiased: str = ""
    ) -> tuple[Count, ...]:
        return activations.kept_masks(
            self.model,
            self.dtypes,
            checkpointed=checkpointed,
            side=side,
            unbiased=unbiased,
            without_zeros=self._is_reentrant,
            **self.sized,
        )

    def _mask_bytes(self, **settings: Any) -> Count:
        return sum(self._masks(**settings), 0 * self.tokens)

    @cached_property
    def kept_masks(self) -> tuple[Count, ...]:
        """Bytes of each mask and bias that all layers read."""
        return self._masks(checkpointed=bool(self.run.gradient_checkpointing))

    @cached_property
    def kept_mask_bytes(self) -> Count:
        return sum(self.kept_masks, 0 * self.tokens)

    @cached_property
    def shared_masks(self) -> Group:
        """Masks and biases that every layer reads: one tensor, made before the first layer."""
        # made by `create_causal_mask` of transformers 5.23 masking_utils.py, but for SDPA where its
        # `is_causal` says the same (`_ignore_causal_mask_sdpa`)
        return self._mask_group(self.kept_mask_bytes)

    @cached_property
    def masks_in_first_layer(self) -> Group:
        """Masks in the last layer of the backward, when those of a decoder are freed."""
        return self._masks_of_encoder(is_remade=self._is_bias_remade(0))

    @cached_property
    def masks_in_encoder(self) -> Group:
        """Masks in the backward of the encoder's other layers."""
        return self._masks_of_encoder(is_remade=False)

    def _masks_of_encoder(self, *, is_remade: bool) -> Group:
        checkpointed = bool(self.run.gradient_checkpointing)
        side = self.model.groups[0].stack
        remade = side if is_remade else ""
        num_bytes = self._mask_bytes(checkpointed=checkpointed, side=side, unbiased=remade)
        return self._mask_group(num_bytes + self.decoder_zeros_bytes)

    @cached_property
    def decoder_zeros_bytes(self) -> Count:
        """Zeros of a decoder's cross attention and their gradient, which outlive its backward.

        Kind: exact. Source: transformers 5.23 `T5Attention.forward` makes them a leaf,
        `position_bias.requires_grad = True`: `AccumulateGrad` holds both as long as the graph.
        """
        checkpointed = bool(self.run.gradient_checkpointing)
        if not checkpointed or not self.second_stack or self._is_reentrant:
            return 0 * self.tokens
        first = self.model.groups[self.second_stack[0]].layer
        return 2 * activations.zeros_bytes(first, self.dtypes, span=self.seq_len)

    @cached_property
    def masks_in_first_decoder_layer(self) -> Group:
        """Masks in the last layer of the decoder's backward."""
        if not self._is_bias_remade(self.second_stack[0]):
            return self.shared_masks
        return self._mask_group(self._mask_bytes(checkpointed=True, unbiased="decoder"))

    def _is_bias_remade(self, number: int) -> bool:
        """Whether the first layer of a stack, of group `number`, makes its position bias again.

        By then no later layer's checkpoint holds the one that it made in the forward.
        """
        layer = self.model.groups[number].layer
        return bool(self.run.gradient_checkpointing) and activations.makes_bias(layer)

    def backward_of_last(self, number: int) -> Count:
        """Bytes at the backward of a stack's first layer, the last one, if of group `number`."""
        passes = self.passes
        if not self._is_bias_remade(number):
            return passes.last_backward[number]
        group, layer = self.model.groups[number], self.layers[number]
        first = self._layer_bytes(group.layer, makes_bias=True)
        return passes.last_backward[number] + first.backward - layer.backward

    def _mask_group(self, num_bytes: Count) -> Group:
        masks = Tensor(
            "masks and biases that layers share",
            constant=num_bytes,
            dims="batch_size, seq_len, seq_len",
        )
        return Group(tensors=(masks,), **self.sized)

    @property
    def unnamed_mask_bytes(self) -> Count:
        """Bytes of masks that only the forward's local variables hold, until it is done."""
        # an encoder's go before its decoder begins: they are locals of its loop
        side = self.model.groups[-1].stack if self.second_stack else ""
        checkpointed = bool(self.run.gradient_checkpointing)
        saved_bytes = self._mask_bytes(checkpointed=checkpointed, side=side)
        return self._mask_bytes(checkpointed=True, side=side) - saved_bytes

    @property
    def unnamed_masks(self) -> tuple[Count, ...]:
        """`unnamed_mask_bytes` tensor by tensor, of one run: a mask, and biases of positions."""
        side = self.model.groups[-1].stack if self.second_stack else ""
        saved = list(self._masks(checkpointed=bool(self.run.gradient_checkpointing), side=side))
        unnamed: list[Count] = []
        for num_bytes in self._masks(checkpointed=True, side=side):
            if num_bytes in saved:
                saved.remove(num_bytes)
            elif num_bytes:
                unnamed.append(num_bytes)
        return tuple(unnamed)

    @property
    def encoder_mask_bytes(self) -> Count:
        return self._mask_bytes(checkpointed=True, side="encoder")

    # --- around the layers ----------------------------------------------------------------------

    @cached_property
    def needs_grad(self) -> bool:
        """Whether the looked-up embeddings need a gradient.

        They do where they are trained, and where transformers 5.23
        `PreTrainedModel.enable_input_require_grads` makes them, so that the recomputed layers
        of `torch.utils.checkpoint` get one.
        """
        trains_embedding = any(tensor.is_embedding for tensor in self.saved_modules)
        trains_before = self.method.trains_base or trains_embedding or self.model.continues
        method = self.method
        trains_before = trains_before or bool(method.virtual_tokens) or method.copies_table
        trains_before = trains_before or self.adapts_table or bool(self.left_gradient)
        return trains_before or self.hooks_inputs

    @property
    def hooks_inputs(self) -> bool:
        """Whether checkpointing makes what layers read need a gradient.

        Source: transformers 5.23 `PreTrainedModel.gradient_checkpointing_enable`, which does so for
        a model whose main input is tokens.
        """
        return bool(self.run.gradient_checkpointing) and not self.transcribes

    @property
    def leaf_embedding_bytes(self) -> int:
        """Bytes per token of looked-up embeddings that are a leaf of the graph; 0 where none is.

        They are where the table is frozen and a hook on it asks for a gradient.
        """
        # behind a frozen table no node made the rows, so that `output.requires_grad_(True)` in
        # `make_inputs_require_grads` makes them a leaf: `AccumulateGrad` holds them, and stores a
        # gradient in them that nobody reads
        if not self.hooks_inputs or self.method.trains_base:
            return 0
        if self.method.copies_table:
            return 0
        if any(tensor.is_embedding for tensor in self.saved_modules):
            return 0
        if self.adapts_table:  # the hook is on PEFT's layer, which returns a sum
            return 0
        return self.model.embeddings[0].width * self.dtypes.embedding_bytes

    @cached_property
    def layer_inputs(self) -> LayerInputPoints | None:
        """The second embedding that every layer reads a part of, where the model has one."""
        return layer_input_points(
            self.model,
            self.targets,
            self.dtypes,
            self.method,
            needs_grad=self.needs_grad,
            accumulated=self.gradients_wait,
        )

    @cached_property
    def expanding(self) -> StreamPoints | None:
        """The projections that expand one hidden state into several streams, if there are any."""
        return expanding_points(
            self.model,
            self.targets,
            self.dtypes,
            self.method,
            needs_grad=self.needs_grad,
            accumulated=self.gradients_wait,
        )

    @cached_property
    def merging(self) -> StreamPoints | None:
        """The projections that merge the streams after the last layer, with the last norm."""
        return merging_points(
            self.model, self.targets, self.dtypes, self.method, accumulated=self.gradients_wait
        )

    def _saved_by(self, points: StreamPoints | None) -> tuple[Tensor, ...]:
        saved = () if points is None else points.saved_tensors
        return tuple(listed_tensors(saved, 1, r=self.r, **self.sized))

    @property
    def _saved_by_table(self) -> tuple[SavedTensor, ...]:
        return saved_by_table(self.model, self.dtypes, self.method, self.targets)

    @property
    def _saved_before_layers(self) -> tuple[Tensor, ...]:
        """Tensors saved by what makes the layers' inputs and streams; both read the embeddings."""
        inputs = layer_inputs_saved(self.layer_inputs, r=self.r, **self.sized)
        if self.expanding is None:
            if self.run.gradient_checkpointing:  # whose first checkpoint they are
                inputs = tuple(tensor for tensor in inputs if tensor.what != LAYER_INPUT)
            return inputs
        tensors = (*inputs, *self._saved_by(self.expanding))
        rows = [tensor for tensor in tensors if tensor.what == LAYER_INPUT]
        size = self.leaf_embedding_bytes  # else nobody but these keeps them
        leaf = Tensor("looked-up embeddings", size, dims="hidden_size")
        looked_up = (leaf,) if size else tuple(rows[:1])
        return (*(tensor for tensor in tensors if tensor.what != LAYER_INPUT), *looked_up)

    def _around_layers(self, *, after_layers: bool, in_encoder: bool = False) -> Group:
        head = masked_head_saved(self.model, self.targets, self.dtypes, self.method, r=self.r)
        if self.label_points is not None:
            saved = self.label_points.saved_tensors
            head = tuple(listed_tensors(saved, 1, r=self.r, **self.sized))
        tensors = (
            *outside_saved(
                self.model,
                self.targets,
                self.dtypes,
                embeddings_need_grad=self.needs_grad,
                after_layers=after_layers,
                in_encoder=in_encoder and bool(self.second_stack),
                has_leaf=bool(self.leaf_embedding_bytes),
                joins_rows=bool(self.method.virtual_tokens),
                keeps_head_input=self._keeps_head_input,
                has_points=self.label_points is not None,
            ),
            self._padding_around(in_encoder=in_encoder),
            *(head if after_layers else ()),
            *self._saved_before_layers,
            *listed_tensors(self._saved_by_table, 1, r=self.r, **self.sized),
            *(self._saved_by(self.merging) if after_layers else ()),
        )
        return Group(where="around the layers", tensors=tensors, **self.sized)

    @property
    def _keeps_head_input(self) -> bool:
        is_trained = self.method.trains_base or bool(self.trained_head_bytes)
        return is_trained and LOSS_HEADS[self.run.loss_head].keeps_input

    def _padding_around(self, *, in_encoder: bool) -> Tensor:
        """Padding tokens in an encoder's embeddings and output, beyond `tokens`."""
        layer = self.model.groups[0].layer
        if not layer.has_own_tokens:
            return Tensor("padding")
        of_encoder = outside_saved(
            replace(parts_of(self.model)[0], task="causal-lm", head=None),
            self.targets,
            self.dtypes,
            embeddings_need_grad=self.needs_grad,
            has_leaf=bool(self.leaf_embedding_bytes),
            after_layers=not in_encoder,
        )
        run_on = layer.padded(**self.sized)[0]
        num_bytes = sum(tensor.per_token for tensor in of_encoder) * (run_on - self.tokens)
        if in_encoder and self.has_two_lengths:  # the gradient that a decoder's rows have got
            num_bytes = num_bytes + self.tokens * self.leaf_embedding_bytes
        if not in_encoder:
            encoded = self.model.hidden_size * self.dtypes.stream_bytes
            of_padding = encoded * bool(self.run.gradient_checkpointing)
            num_bytes = num_bytes + of_padding * (run_on - self.source_tokens)
            num_bytes = num_bytes + self.saved_encoder_out
        return Tensor("further tokens of the encoder's sequences", constant=num_bytes)

    @cached_property
    def label_points(self) -> LabelPoints | None:
        """The head for labels, what makes an embedding, or an adapted head, and its loss.

        A loss in chunks, too.

        None of other models.
        """
        return self._label_points_of(sequences=2)

    def _label_points_of(self, *, sequences: int) -> LabelPoints | None:
        model, dtypes = self.model, self.dtypes
        chunked_loss = self.trainer.chunked_loss(self.run)
        on_tape = self.adapts_head or chunked_loss is not None
        if model.label_head is None and model.pooling is None and not on_tape:
            return None
        layers = [layer for layer, _ in model.layers()]
        return label_points(
            model,
            dtypes,
            self.method,
            self.targets,
            stream=stream_bytes(layers[-1], dtypes, after_norm=model.starts_in_layer_norm),
            form=loss.cross_entropy_form(model, dtypes, sequences=sequences),
            loss_head=self.run.loss_head,
            chunked_loss=chunked_loss,
            trains_head=bool(self.head_gradient),
            widens_outputs=self.trainer.widens_outputs,
        )

    @property
    def adapts_table(self) -> bool:
        """Whether the token table has an adapter."""
        return adapts_table(self.model, self.targets)

    @property
    def adapts_head(self) -> bool:
        """Whether the vocabulary's head has an adapter."""
        return adapts_head(self.model, self.targets)

    @property
    def evaluated_head_bytes(self) -> Count:
        """Bytes of an adapted head and its loss without a graph; 0 for other heads."""
        if not self.adapts_head or self.label_points is None:
            return 0 * self.tokens
        return self._in_labels(self.label_points.evaluated)

    def _in_labels(self, points: tuple[LinearForm, ...]) -> Count:
        return largest(most(points, r=self.r, **self.sized), 0 * self.tokens)

    @cached_property
    def outside(self) -> Group:
        """Tensors saved around the layers until the backward reaches the last layer."""
        return self._around_layers(after_layers=True)

    @cached_property
    def outside_in_layers(self) -> Group:
        """`outside` while layers run: without the head's and the last norm's tensors."""
        return self._around_layers(after_layers=False)

    @cached_property
    def outside_in_first_layer(self) -> Group:
        """`outside` in the last layer of the backward: an encoder's, where there is one."""
        return self._around_layers(after_layers=False, in_encoder=True)

    @cached_property
    def table_bytes(self) -> Count:
        """Bytes of the method's copy of the token embedding, or of the copy's gradient."""
        copied = self.method.copies_table * self.model.embeddings[0].num_params
        return copied * self.dtypes.embedding_bytes + 0 * self.tokens

    @property
    def head_copy_bytes(self) -> Count:
        """`table_bytes` of a head that is tied to the embedding."""
        return self.table_bytes * self.model.head_tied

    @property
    def further_head_copies(self) -> Count:
        """16-bit copies of an fp32 head that chunks of its tokens save, but for the first.

        Kind: exact. Source: torch 2.13 `autocast_mode.cpp`, `cached_cast`: of frozen weights none
        is cached; litgpt 0.5.13 `GPT.forward`, `lm_head_chunk_size`.
        """
        computed, head = self.trainer.chunked_loss(self.run), self.model.head
        is_cast = self.dtypes.under_autocast and self.dtypes.head_bytes > self.dtypes.compute_bytes
        if computed is None or not computed.positions or not computed.by_head:
            return 0 * self.tokens
        if head is None or not is_cast:
            return 0 * self.tokens
        copy = head.num_weights * self.dtypes.compute_bytes
        return (ceil_div(self.seq_len, computed.positions) - 1) * copy

    @cached_property
    def saved_for_backward(self) -> Entry:
        """Tensors saved for the backward when the forward is done."""
        return listed(self.passes.fact, *self.passes.groups, self.outside)

    @cached_property
    def saved_in_layers(self) -> Entry:
        """`saved_for_backward` while the last layer runs."""
        return listed(self.passes.fact, *self.passes.groups, self.outside_in_layers)

    # --- the worst points -----------------------------------------------------------------------

    @property
    def scored_tokens(self) -> Count:
        """Positions that the head projects: TRL's fused one leaves out each row's last.

        Where there is no Triton it projects those without a label, too.

        Kind: exact. Source: TRL 1.16 `_fused_forward`; transformers 5.23 projects all and pads the
        labels.
        """
        scored = self.trainer.scored_tokens(self.run)
        if scored is not None and self.dtypes.backend.has_triton:
            return self.batch_size * scored
        return self.tokens - self.batch_size * LOSS_HEADS[self.run.loss_head].leaves_out_last

    def _in_loss(self, formula: Callable[..., Count]) -> Count:
        """A formula of `memory.loss` for this step."""
        return formula(
            self.model,
            self.dtypes,
            self.trainer,
            tokens=self.scored_tokens,
            loss_head=self.run.loss_head,
        )

    def _in_logits_loss(
        self, formula: Callable[..., Count], computed: LogitsLoss, **further: bool
    ) -> Count:
        """A formula of `memory.logits_loss` for this step."""
        return formula(
            self.model,
            self.dtypes,
            self.trainer,
            computed,
            tokens=self.tokens,
            sequences=self.batch_size,
            **further,
        )

    @property
    def compared(self) -> Entry | None:
        """Logits of the policy, while the reference computes those that they are compared with."""
        computed = self.trainer.logits_loss(self.run)
        if computed is None:
            return None
        return Entry(logits_loss.COMPARED, self._in_logits_loss(logits_loss.held_bytes, computed))

    @property
    def reference_loss_bytes(self) -> Count:
        """Bytes that the reference's head and the comparison of its logits allocate."""
        computed = self.trainer.logits_loss(self.run)
        if computed is None:
            return self.loss_forward_bytes
        return self._in_logits_loss(logits_loss.reference_bytes, computed)

    @property
    def loss_facts(self) -> tuple[Fact, Fact]:
        """Facts of the loss's forward and of its backward."""
        if self.trainer.logits_loss(self.run) is not None:
            return logits_loss.LOSS_FORWARD, logits_loss.LOSS_BACKWARD
        if self.label_points is not None:
            if self.model.pooling is not None:
                return loss.EMBEDDINGS_FORWARD, loss.EMBEDDINGS_BACKWARD
            if self.trainer.chunked_loss(self.run) is not None:
                return loss.CHUNKED_FORWARD, loss.CHUNKED_BACKWARD
            if self.adapts_head:
                return loss.ADAPTED_FORWARD, loss.ADAPTED_BACKWARD
            return loss.LABELS_FORWARD, loss.LABELS_BACKWARD
        return loss.LOSS_FORWARD, loss.LOSS_BACKWARD

    @cached_property
    def loss_forward_bytes(self) -> Count:
        computed = self.trainer.logits_loss(self.run)
        if computed is not None:
            return self._in_logits_loss(
                logits_loss.forward_bytes, computed, has_reference=self.has_reference
            )
        if self.label_points is not None:
            several = self._in_labels(self.label_points.forward)
            one_row = self._label_points_of(sequences=1)
            if one_row is None or not self.adapts_head:
                return several
            in_loss = where(self.batch_size > 1, several, self._in_labels(one_row.forward))
            return largest(in_loss, self._widened_outputs_bytes)
        made = loss.unsloth_head_forward(self.model, self.dtypes) * self._trains_fused_head
        forward = partial(
            loss.loss_forward_bytes,
            sequences=self.batch_size,
            trained_head=self.trained_head_bytes,
        )
        return largest(self._in_loss(forward) + made, self._widened_outputs_bytes)

    @cached_property
    def widened_cache(self) -> tuple[int, ...]:
        """Elements per token of each fp32 copy of cached keys or values that the caller gets."""
        checkpointed = bool(self.run.gradient_checkpointing)
        return kv_cache.widened_cache(self.model, self.dtypes, checkpointed=checkpointed)

    @property
    def _widened_outputs_bytes(self) -> Count:
        """Bytes beside what all layers save while the caller's copies of outputs are made.

        `convert_outputs_to_fp32` is around autocast, whose cache is empty by then.
        """
        cached = 4 * sum(self.widened_cache)
        formula = partial(
            loss.widened_outputs_bytes,
            sequences=self.batch_size,
            cached=cached,
            has_points=self.adapts_head,
        )
        return self._in_loss(formula) + self.widened_encoder_out - self.autocast_copies

    @property
    def widened_encoder_out(self) -> Count:
        """Bytes of the fp32 copy of the encoder's output, which is among the outputs, too.

        Autocast makes the result of a LayerNorm fp32 by itself.
        """
        dtypes = self.dtypes
        is_copied = (
            self.trainer.widens_outputs and dtypes.under_autocast and dtypes.stream_bytes == 2
        )
        ends_wide = any(norm.kind == "layer" for norm in self.model.groups[0].layer.norms)
        is_copied = is_copied and bool(self.second_stack) and not ends_wide
        return 4 * self.source_tokens * self.model.hidden_size * is_copied

    @property
    def _trains_fused_head(self) -> bool:
        """Whether Unsloth's loss makes the gradient of a head."""
        return self.run.loss_head == "unsloth-fused" and bool(self.head_gradient)

    @cached_property
    def loss_backward_bytes(self) -> Count:
        computed = self.trainer.logits_loss(self.run)
        if computed is not None:
            return self._in_logits_loss(logits_loss.backward_bytes, computed)
        if self.label_points is not None:
            return self._in_labels(self.label_points.backward)
        made = loss.unsloth_head_backward(self.model, self.dtypes) * self._trains_fused_head
        backward = partial(loss.loss_backward_bytes, trained_head=self.trained_head_bytes)
        return self._in_loss(backward) + made

    @cached_property
    def kept_logits_bytes(self) -> Count:
        """Bytes of logits that the caller holds during the backward."""
        # `Trainer.compute_loss` of transformers 5.23 returns the loss alone: its local `outputs`,
        # the last name of the logits, goes before `accelerator.backward` begins
        if self.trainer.outputs_held(self.run) == "until_loss":
            return 0 * self.tokens
        return self._in_loss(loss.kept_logits_bytes)

    @cached_property
    def layer_backward_bytes(self) -> Count:
        """Bytes at the worst layer's backward, beside what all layers save."""
        # with accumulation no layer leaves new gradients: `AccumulateGrad` adds to those there are
        return self.layer_backward_where(leaves_gradients=not self.gradients_wait)

    def layer_backward_where(self, *, leaves_gradients: bool) -> Count:
        """`layer_backward_bytes` where gradients of layers stay, or are taken away."""
        left_behind = [
            layer.graph_behind_held + (layer.gradients if leaves_gradients else 0)
            for layer in self.layers
        ]
        if self.second_stack:  # the encoder's has a moment of its own
            return self._worst_in_stack(self.second_stack, left_behind)
        return worst_backward(
            self.model,
            self.layers,
            self.passes.backward,
            self.passes.saved,
            left_behind,
            num_idle=self.num_idle_layers,
        )

    def _worst_in_stack(self, numbers: tuple[int, ...], left_behind: list[Count]) -> Count:
        """Bytes at the worst layer's backward in one of two stacks, which has the groups `numbers`.

        Its first layer, if there are others, has a moment of its own.
        """
        passes = self.passes
        stack = self.model.groups[numbers[0]].stack
        (part,) = (part for part in parts_of(self.model) if part.groups[0].stack == stack)
        return worst_backward(
            part,
            [self.layers[number] for number in numbers],
            [passes.backward[number] for number in numbers],
            [passes.saved[number] for number in numbers],
            [left_behind[number] for number in numbers],
            num_idle=int(part.num_hidden_layers > 1),
        )

    @property
    def encoder_backward_bytes(self) -> Count:
        """Bytes at the worst encoder layer's backward, beside what all encoder layers save."""
        left_behind = [layer.gradients * (not self.gradients_wait) for layer in self.layers]
        return self._worst_in_stack(self.first_stack, left_behind)

    @property
    def shares_keys(self) -> bool:
        """Whether checkpoints hold keys and values that one layer makes for later ones."""
        checkpointed = bool(self.run.gradient_checkpointing)
        return checkpointed and any(keeps_keys(layer) for layer, _ in self.model.layers())

    @cached_property
    def keys_in_first_layer(self) -> Count:
        """Keys and values that later layers read, with their graphs, in the first layer's backward.

        Kind: exact. Source: transformers 5.23 `Gemma4TextModel.forward`: one dict of them is an
        argument of every layer's checkpoint.
        """
        held: Count = sum(layer.count * layer.held_by_later_layers for layer in self.layers)
        held = held + leaves_behind_keys(self.model, self.layers, 0)
        return held + after(self.model, [layer.graph_behind_held for layer in self.layers], 0)

    # --- gradients ------------------------------------------------------------------------------

    @cached_property
    def all_gradients(self) -> Count:
        if self.frees_gradients:
            return 0 * self.num_trained
        total = gradient_bytes(self.tensors) + 0 * self.num_trained
        for linear, count in adapted_linears(self.model, self.targets):
            remainders = self.method.gradient_remainders(linear, self.dtypes, self.r)
            total = total + count * linear.count * remainders
        return total

    @cached_property
    def tied_params(self) -> int:
        """Elements of the matrix that turns hidden states into logits."""
        if self.model.head is not None:
            return self.model.head.num_weights
        if self.model.label_head is not None:
            return self.model.label_head.projection.num_weights
        head = self.model.masked_head
        width = self.model.embeddings[0].width if head is None else head.width
        return width * loss.logit_width(self.model)

    @property
    def tied_gradients_wait(self) -> bool:
        """Whether a trained head is tied to the embedding, so that their gradients are summed."""
        head = self.model.masked_head
        is_tied = self.model.head_tied or (head is not None and head.tied)
        return self.method.trains_base and is_tied

    @property
    def adds_tied_in_place(self) -> bool:
        """Whether both gradients of a tied head are summed in place.

        Source: torch 2.13 `InputBuffer::accumulate`: in place, unless a tensor is a view, as the
        `mm` of a head leaves its gradient; autocast's cast and a fused head make new tensors.
        """
        is_cast = self.dtypes.under_autocast and self.param_bytes == 4
        computed = self.trainer.chunked_loss(self.run)
        is_sum = computed is not None and computed.by_head  # of those of all chunks
        return is_cast or is_sum or LOSS_HEADS[self.run.loss_head].in_tiles

    @property
    def trained_head_bytes(self) -> int:
        """Bytes of one element of a head that is trained, or of its copy; 0 for a frozen one."""
        if not self.head_gradient:
            return 0
        return self.dtypes.head_bytes if self.method.trains_base else self.dtypes.copy_bytes

    @cached_property
    def head_gradient(self) -> int:
        """Bytes of the head's gradient, the first of a backward; 0 where the head is frozen."""
        if self.method.trains_base:
            return self.tied_params * self.param_bytes
        return int(
            gradient_bytes(module for module in self.saved_modules if not module.is_embedding)
        )

    @property
    def gradients_of_term(self) -> Count:
        """Gradients of a loss term on the adapters, which come before the layers' backward."""
        return self.all_gradients * self.method.in_loss

    @cached_property
    def gradients_in_layers(self) -> Count:
        """Gradients of this micro-step, beside those of layers, during the layers' backward.

        With accumulation all of them are there since earlier micro-steps, and torch's
        `AccumulateGrad` adds in place; only of a tied head a second one waits.
        """
        gradient = self.head_gradient + 0 * self.num_trained
        if self.accumulates or self.frees_gradients:
            gradient = gradient * self.tied_gradients_wait
        of_head = self._gradients_of(() if self.model.head is None else (self.model.head,))
        of_head = of_head * (not self.method.trains_base)  # else `head_gradient` is it
        return gradient + of_head + self.merging_gradients + self.gradients_of_term

    def _gradients_of(self, linears: Iterable[Linear]) -> Count:
        """Gradients of matrices around the layers, or of their adapters."""
        total: Count = 0 * self.num_trained
        for linear in linears:
            if self.method.trains_base:
                total = total + linear.num_params * self.param_bytes
            elif linear.rank_multiple and linear.name in self.targets:
                total = total + self.method.gradient_bytes(linear, self.dtypes, self.r)
        return total * (not self.gradients_wait)

    @cached_property
    def merging_gradients(self) -> Count:
        """Gradients of matrices after the last layer, which come before those of layers."""
        streams = self.model.streams
        return self._gradients_of(() if streams is None else streams.merging)

    @cached_property
    def _gradients_before_layers(self) -> Count:
        """Gradients of matrices that make the inputs of layers, and further streams."""
        model = self.model
        expanding = () if model.streams is None else model.streams.expanding
        projecting = () if model.layer_input_norm is None else model.head_linears
        return self._gradients_of((*projecting, *expanding))

    @cached_property
    def late_gradients(self) -> Count:
        """Gradients of this micro-step during the first layer's backward, which comes last."""
        gradients = self.gradients_in_layers
        of_first = largest(*(self.layers[number].gradients for number in self.first_kinds))
        if self.method.in_loss and self.accumulates:
            gradients = gradients - self.gradients_of_term + of_first
        elif not self.gradients_wait:
            gradients = self.all_gradients - of_first - self.embedding_gradients
            gradients = gradients - self.tower_gradients - self._gradients_before_layers
            gradients = gradients - self._outer_params * outer_bytes(self.dtypes)
            # the first layer adds to them, so that its own backward counts them
            gradients = gradients - self._gathered_params * self.dtypes.adapter_bytes
        for number, (layer, count) in enumerate(self.model.layers()):
            unwanted = unwanted_gradient_bytes(layer, self.targets, self.method, self.dtypes)
            gradients = gradients + (count - (number == 0)) * unwanted
        return gradients

    @property
    def _outer_params(self) -> int:
        return sum(tensor.num_trained for tensor in self.method.outer_tensors(self.model))

    @property
    def _gathered_params(self) -> Count:
        """Parameters of one layer's part in trained tensors that several layers read."""
        linears = adapted_linears(self.model, self.targets)
        return sum(t.rows * t.width for t in self.method.shared_tensors(linears, self.r))

    @property
    def embedding_gradients(self) -> Count:
        """Gradients of embedding tables, which come after all layers."""
        # `embedding_dense_backward` of torch 2.13 makes a gradient of all rows of the table,
        # however few of them the batch has
        size = gradient_bytes(module for module in self.saved_modules if module.is_embedding)
        if self.adapts_table:
            table = token_table(self.model)
            size = size + self.method.gradient_bytes(table, self.dtypes, self.r)
        if self.method.trains_base:
            looked_up = self.model.embeddings[int(self.model.head_tied) :]
            trained = sum(table.num_params for table in looked_up if table.trains)
            size = size + trained * self.param_bytes
        return size

    @property
    def table_gradient(self) -> int:
        """Gradient of the token embedding, where it is trained."""
        if self.method.trains_base:
            table = self.model.embeddings[0]
            return table.num_params * self.param_bytes * table.trains
        return int(gradient_bytes(module for module in self.saved_modules if module.is_embedding))

    @property
    def left_gradient(self) -> int:
        """Gradient of a frozen token table that is made in each backward, and added up."""
        if not self.trainer.leaves_table_gradient(self.run):
            return 0
        return self.model.embeddings[0].num_params * self.dtypes.embedding_bytes

    @property
    def updated_last(self) -> tuple[Trained, ...]:
        """What the optimizer updates at once in the end: all, or the largest tensor alone.

        Kind: upper bound where each is updated in the backward: the largest need not be the last.
        """
        if not self.frees_gradients:
            return self.tensors
        largest_one = max(self.tensors, key=lambda each: each.param_bytes * each.num_params)
        return (replace(largest_one, count=1),)

    @property
    def looked_up_gradient(self) -> Count:
        """That of the factor whose rows an adapter of the token table looks up."""
        if not self.adapts_table:
            return 0
        (rows, width), _ = self.method.adapter_shapes(token_table(self.model), self.r)
        return rows * width * self.dtypes.adapter_bytes

    @cached_property
    def first_stack_gradients(self) -> Count:
        of_stack = (self.layers[i].count * self.layers[i].gradients for i in self.first_stack)
        return sum(of_stack, 0 * self.num_trained)

    @cached_property
    def autocast_copies(self) -> Count:
        """16-bit copies of trained fp32 weights, in autocast's cache until the forward is done.

        Without checkpointing they are among what each layer keeps.
        Source: torch 2.13 `autocast_mode.cpp`, `cached_cast`.
        """
        # `cached_cast` caches what is fp32, a leaf and needs a gradient: no frozen weight
        dtypes, num_trained = self.dtypes, self.num_trained
        if not dtypes.autocast or not self.run.gradient_checkpointing:
            return 0 * num_trained
        if not self.method.trains_base:
            copied = cached_params(
                self.model,
                self.targets,
                self.method,
                self.r,
                modules_only=self.dtypes.kernels.experts,
            )
            return 2 * copied if dtypes.adapter_bytes == 4 else 0 * num_trained
        matrices = sum(
            count * sum(x.num_weights for x in layer.linears if x.is_module and x.active)
            for layer, count in self.model.layers()
        )
        return (2 * matrices if dtypes.base_bytes == 4 else 0) + 0 * num_trained

    # --- the allocator --------------------------------------------------------------------------

    @cached_property
    def _trained_remainder(self) -> Count:
        """Unsplit remainders of the blocks of all trained tensors, each counted once."""
        total: Count = 0 * self.num_trained
        if allocator.splits_all(self.gpu, expandable=self.run.expandable_segments):
            return total
        for tensor in self.tensors:
            block = allocator.expected_remainder(tensor.param_bytes * tensor.num_params)
            total = total + tensor.count * block
        return total

    @property
    def _lasting_copies(self) -> int:
        """Unsplit remainders of adapters and states; `UNSPLIT_WEIGHTS` has those of the base."""
        return int(not self.method.trains_base) + optimizer.num_wide_states(self.run.optimizer)

    @property
    def lasting_remainder(self) -> Count:
        """Those of adapters and of states that have a block for each trained tensor."""
        return self._lasting_copies * self._trained_remainder

    @cached_property
    def remainders(self) -> Entry:
        """Unsplit remainders while activations and gradients of earlier micro-steps live."""
        of_activations = 0 * self.tokens + self._saved_remainder(self.passes.groups)
        of_gradients = int(self.accumulates) * self._trained_remainder
        total = of_activations + self.lasting_remainder + of_gradients
        return Entry(allocator.REMAINDERS, total)

    @cached_property
    def late_remainders(self) -> Entry:
        """Unsplit remainders when activations are freed and all gradients exist."""
        return Entry(allocator.REMAINDERS, self.lasting_remainder + self._trained_remainder)

    def _saved_remainder(self, groups: Iterable[Group]) -> Count:
        if allocator.splits_all(self.gpu, expandable=self.run.expandable_segments):
            return 0
        return allocator.remainder_bytes(groups, like=self.tokens)
