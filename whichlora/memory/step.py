"""One optimizer step of a training run: the quantities that several of its moments share.

A moment (`memory.moments`) is a list of entries; what more than one of them reads is computed
here, once, when it is first asked for. All sizes may be arrays.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from whichlora.memory import allocator, lasting, optimizer
from whichlora.memory.embeddings import layer_inputs_saved, masked_head_saved, outside_saved
from whichlora.memory.entries import Entry, Group, Tensor, listed
from whichlora.memory.gradients import (
    Trained,
    cached_params,
    saved_modules,
    trained_params,
    trained_tensors,
)
from whichlora.memory.layer_bytes import LayerBytes, keeps_keys, layer_bytes, listed_tensors
from whichlora.memory.layer_passes import (
    LayerPasses,
    checkpointed_passes,
    offloaded_passes,
    saved_passes,
)
from whichlora.memory.step_gradients import StepGradients
from whichlora.memory.step_loss import StepLoss
from whichlora.memory.step_masks import StepMasks
from whichlora.memory.worst_layer import after, has_one_order, leaves_behind_keys, worst_backward
from whichlora.methods.base import Method
from whichlora.spec.architecture import ModelSpec, layers_in_order, parts_of
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.layer import Layer
from whichlora.spec.loss_heads import LOSS_HEADS
from whichlora.spec.numeric import Count, floor_div, largest
from whichlora.spec.run import RunConfig
from whichlora.spec.targets import (
    adapted,
    adapts_head,
    adapts_table,
    tower_linears,
)
from whichlora.symbolic.altup import StreamPoints, expanding_points, merging_points
from whichlora.symbolic.gemma4 import LayerInputPoints, layer_input_points
from whichlora.symbolic.graph import LAYER_INPUT, SavedTensor
from whichlora.symbolic.token_embeddings import saved_by_table
from whichlora.trainers.base import Trainer


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

    @cached_property
    def masks(self) -> StepMasks:
        """Masks and biases of positions."""
        return StepMasks(self)

    @cached_property
    def loss(self) -> StepLoss:
        """The head and the loss."""
        return StepLoss(self)

    @cached_property
    def gradients(self) -> StepGradients:
        """The gradients."""
        return StepGradients(self)

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
            return passes(self.model, self.layers, masks=self.masks.shared, sized=self.sized)
        return saved_passes(
            self.model,
            self.layers,
            self.dtypes,
            freezes_input=not self.gives_input_gradient,
            num_idle=self.num_idle_layers,
            unnamed_mask_bytes=self.masks.unnamed_bytes,
            masks=self.masks.shared,
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

    def backward_of_last(self, number: int) -> Count:
        """Bytes at the backward of a stack's first layer, the last one, if of group `number`."""
        passes = self.passes
        if not self.masks.is_bias_remade(number):
            return passes.last_backward[number]
        group, layer = self.model.groups[number], self.layers[number]
        first = self._layer_bytes(group.layer, makes_bias=True)
        return passes.last_backward[number] + first.backward - layer.backward

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
        trains_before = trains_before or self.adapts_table or bool(self.gradients.left)
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
        if self.loss.label_points is not None:
            saved = self.loss.label_points.saved_tensors
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
                has_points=self.loss.label_points is not None,
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
        is_trained = self.method.trains_base or bool(self.gradients.trained_head_bytes)
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

    @property
    def adapts_table(self) -> bool:
        """Whether the token table has an adapter."""
        return adapts_table(self.model, self.targets)

    @property
    def adapts_head(self) -> bool:
        """Whether the vocabulary's head has an adapter."""
        return adapts_head(self.model, self.targets)

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

    @cached_property
    def saved_for_backward(self) -> Entry:
        """Tensors saved for the backward when the forward is done."""
        return listed(self.passes.fact, *self.passes.groups, self.outside)

    @cached_property
    def saved_in_layers(self) -> Entry:
        """`saved_for_backward` while the last layer runs."""
        return listed(self.passes.fact, *self.passes.groups, self.outside_in_layers)

    # --- the worst points -----------------------------------------------------------------------

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

    # --- the update, and copies for autocast ----------------------------------------------------

    @property
    def updated_last(self) -> tuple[Trained, ...]:
        """What the optimizer updates at once in the end: all, or the largest tensor alone.

        Kind: upper bound where each is updated in the backward: the largest need not be the last.
        """
        if not self.frees_gradients:
            return self.tensors
        largest_one = max(self.tensors, key=lambda each: each.param_bytes * each.num_params)
        return (replace(largest_one, count=1),)

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
