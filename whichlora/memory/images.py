"""What images add to a training step: a vision tower before the layers, and behind them.

The tower runs forward before the first layer and goes backward after it. Meanwhile what autograd
saved of it is there at every moment of the language model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from whichlora.memory.embeddings import norm_kept, norm_points, saves_encoded
from whichlora.memory.entries import Entry, Fact, Group, Tensor, listed
from whichlora.memory.held import held_between_steps, held_outputs
from whichlora.memory.layer_bytes import listed_tensors
from whichlora.memory.moments import LAYER_FORWARD
from whichlora.memory.step import TrainingStep
from whichlora.memory.towers import EMBEDDED_TEXT, TOWER_FORWARD, TowerForward, tower_dtypes
from whichlora.spec.numeric import Count, largest
from whichlora.spec.tower import Tower
from whichlora.symbolic.graph import LAYER_INPUT
from whichlora.symbolic.layer import LayerPoints
from whichlora.symbolic.linear_form import evaluate, most
from whichlora.symbolic.projectors import embedder_saved, projector_points

Entries = tuple[Entry, ...]

TOWER_SAVED = Fact(
    part="activations",
    what="saved by the vision tower",
    shape="[patches, hidden_size of the tower]",
    dtype="listed below",
    why="the tower goes backward last",
    source="symbolic.layer, symbolic.projectors; saved-tensor hooks",
)
TOWER_BACKWARD = Fact(
    part="temporary",
    what="backward of one block of the vision tower, or of its projector",
    shape="[patches, …]",
    dtype="compute_bytes",
    why="saved tensors of a recomputed block, and gradients at the worst point of its backward",
    source="symbolic.layer, symbolic.projectors on the symbolic autograd",
)
TEXT_GRADIENTS = Fact(
    part="gradients",
    what="gradients of the language model, and of blocks that went backward",
    shape="[trained_params]",
    dtype="of the parameter",
    why="the tower goes backward last",
    source="torch AccumulateGrad",
)


@dataclass(frozen=True, kw_only=True)
class TowerStep(TrainingStep):
    """The blocks of a vision tower in a step, each image a sequence of its patches.

    Args:
        forward: the same without a graph.
        trains: its weights are trained.
        is_hooked: a hook makes the embedded patches need a gradient.
        is_cut: no gradient reaches its blocks, whatever they have.
    """

    forward: TowerForward
    trains: bool
    is_hooked: bool
    is_cut: bool

    @classmethod
    def of(cls, step: TrainingStep, tower: Tower) -> TowerStep:
        dtypes = replace(step.dtypes, trains_base=step.trains_tower)
        dtypes = tower_dtypes(tower, step.run, dtypes)
        forward = TowerForward(
            tower=tower,
            run=step.run,
            dtypes=dtypes,
            method=step.method,
            targets=step.tower_targets,
            num_images=step.batch_size * tower.inputs(step.run.images, step.run.audios),
            r=step.r,
        )
        return cls(
            **{name: getattr(step, name) for name in ("method", "gpu", "trainer", "r")},
            run=replace(step.run, gradient_checkpointing=step.remakes_tower),
            model=tower.stack,
            dtypes=dtypes,
            targets=step.tower_targets,
            batch_size=forward.sequences,
            seq_len=forward.span,
            forward=forward,
            trains=step.trains_tower,
            is_hooked=step.hooks_tower,
            is_cut=step.cuts_tower,
        )

    @property
    def tower(self) -> Tower:
        return self.forward.tower

    @cached_property
    def needs_grad(self) -> bool:
        """Whether the embedded patches do: trained, or made to by checkpointing's hook."""
        return self.trains or self.is_hooked or self._adapts_embedder

    @property
    def _adapts_embedder(self) -> bool:
        embedder = self.tower.embedder
        return embedder is not None and embedder.name in self.targets

    @cached_property
    def goes_backward(self) -> bool:
        """Whether any block has a graph."""
        blocks = (linear.name for layer, _ in self.model.layers() for linear in layer.linears)
        adapted = bool(set(blocks) & set(self.targets)) and not self.is_cut
        return self.needs_grad or adapted

    @property
    def pixels(self) -> Entry:
        """Of all batches that a variable of the Trainer holds.

        On a CPU so is the next one, which waits on the host.
        Source: transformers 5.23 `Trainer.get_batch_samples`, which reads those of all micro-steps
        before the first; accelerate 1.15 `DataLoaderShard.__iter__`, which reads one ahead.
        """
        pixels = self.forward.pixels
        if not self.trainer.gathers_batches:
            return pixels
        batches = self.run.gradient_accumulation_steps + self.gpu.is_cpu
        return replace(pixels, num_bytes=pixels.num_bytes * batches)

    @cached_property
    def projected(self) -> LayerPoints:
        return projector_points(
            self.tower,
            self.targets,
            self.dtypes,
            self.method,
            needs_grad=self.goes_backward,
            accumulated=self.accumulates,
            stream=self.forward.stream,
            kept=self.forward.kept,
        )

    @cached_property
    def around_blocks(self) -> Group:
        """Tables that all blocks read, and what is saved before the first."""
        tensors = [Tensor("cosines and sines", self.forward.table_bytes, dims="2, head_dim")]
        size, tower = self.dtypes.compute_bytes, self.tower
        if self.needs_grad and tower.embedding_saved:
            saved = size * tower.embedding_saved
            tensors.append(Tensor("what embeds the patches", saved, dims="patches, …"))
            cast = self.model.other_params if self.trains else tower.hooked_weights
            if cast and self.dtypes.under_autocast and self.dtypes.base_bytes > size:
                copied = size * cast
                tensors.append(Tensor("16-bit copies of what embeds the patches", constant=copied))
        if tower.unfolds and (self.trains or self._adapts_embedder):
            read = embedder_saved(tower, self.targets, self.dtypes, self.method)
            tensors += listed_tensors(read, 1, tokens=0, span=0, r=self.r)
        elif self.trains:
            is_copy = size < self.forward.pixel_bytes or tower.copies_pixels or tower.joins_pixels
            read = self.forward.num_pixels * size * is_copy
            tensors.append(Tensor("pixels, which the kernel of the patches reads", constant=read))
        elif self.is_hooked and self.model.embeds_in_steps:  # a leaf, which the graph holds
            tensors.append(Tensor("embedded patches", constant=self.forward.leaf_bytes))
        if self.trains and tower.table_saved:
            looked_up = self.forward.num_images * tower.table_saved * self.dtypes.base_bytes
            tensors.append(Tensor("looked-up positions, which gates multiply", constant=looked_up))
        for norm in self.model.embedding_norms if self.needs_grad else ():
            tensors += listed_tensors(norm_kept(norm, self.dtypes), 1, tokens=0, span=0, r=0)
        for norm in tower.inner_norms:
            tensors += listed_tensors(norm_kept(norm, self.dtypes), 1, tokens=0, span=0, r=0)
        return Group(where="around the blocks", tensors=tuple(tensors), **self.sized)

    @cached_property
    def saved_by_blocks(self) -> Entry:
        """None where the blocks have no graph."""
        if not self.goes_backward:
            return listed(TOWER_SAVED)
        return listed(TOWER_SAVED, *self.passes.groups, self.around_blocks)

    @property
    def idle_block(self) -> Entry:
        """What a block saves whose result nobody reads, until the model's forward is done."""
        keeps = self.tower.runs_idle and self.goes_backward and not self.run.gradient_checkpointing
        return Entry(TOWER_SAVED, self.passes.saved[-1] if keeps else 0 * self.tokens)

    def named(self, hidden_size: int) -> Entry:
        """What is attended to, and what it is made of where the projector has not saved that."""
        forward = self.forward
        named = forward.named(hidden_size)
        of_image = forward.kept * self.tower.returned_width * forward.stream
        saved = (each.form.per_sequence for each in self.projected.saved_tensors)
        if not of_image or of_image not in saved:
            return named
        return replace(named, num_bytes=named.num_bytes - forward.num_images * of_image)

    @cached_property
    def saved_by_projector(self) -> Entry:
        sizes, deep = self.forward.of_vectors, self.tower.deep
        in_tokens: dict[str, Count] = {
            "tokens": self.forward.num_projected,
            "span": self.forward.projected_span,
        }
        tensors = tuple(listed_tensors(self.projected.saved_tensors, 1, **sizes))
        # what a projector in between reads is the next block's input
        own = tuple(tensor for tensor in tensors if tensor.what != LAYER_INPUT)
        return listed(
            TOWER_SAVED,
            Group(where="projector", tensors=tensors, **in_tokens),
            Group(where="deep projectors", tensors=own, count=deep, **in_tokens),
        )

    @cached_property
    def working(self) -> Count:
        """Worst point of the forward of a block or of the projector, beyond what blocks keep."""
        if not self.goes_backward and not self.targets:
            return self.forward.working
        state = self.forward.state_bytes
        held = self.forward.held
        named = self.forward.named_in_projector
        if self.goes_backward and self.tower.names_blocks:
            # the other states are saved, and so are masks where no block makes its own
            named = state + self.masks.unnamed_bytes
            held = held * (not self.is_hooked)
        in_projector = named + most(self.projected.forward, **self.forward.of_vectors) + held
        if not self.goes_backward:
            return largest(self.forward.working, in_projector)
        # `saved_passes` counts embedded rows beside a layer's input; what a tower embeds is the
        # input of its first block, which is among what is saved
        named_twice = 0 if self.run.gradient_checkpointing else state
        # patches are embedded before any block has saved a thing
        early = self.forward.embedding - self.saved_by_blocks.num_bytes
        return largest(self.passes.forward - named_twice + held, in_projector, early)

    @cached_property
    def worst_backward(self) -> Count:
        """Of the projector or of a block, with what is saved until then."""
        return self.backward_where(leaves_gradients=not self.gradients_wait)

    def backward_where(self, *, leaves_gradients: bool) -> Count:
        """The same; args as of `layer_backward_where`."""
        of_projector = self.projected
        projecting = most(of_projector.backward, **self.forward.of_vectors)
        saved_there = evaluate(of_projector.saved, **self.forward.of_vectors)
        saved = self.saved_by_blocks.num_bytes
        in_projector = saved + largest(projecting, saved_there)
        if not self.goes_backward:
            return in_projector
        # gradients of the states that are joined wait for the blocks that returned them
        waiting = self.forward.state_bytes * self.tower.num_joined
        in_blocks = self.layer_backward_where(leaves_gradients=leaves_gradients)
        return largest(in_projector, saved + waiting + in_blocks)

    @property
    def later_gradients(self) -> Count:
        """Gradients of the first block and of what embeds the patches, which come last."""
        around = self.model.other_params * self.dtypes.base_bytes * self.trains
        return self.layers[0].gradients + around

    @cached_property
    def first_backward(self) -> Count:
        """Of the first block, when all others have gone backward."""
        if not self.goes_backward:
            return 0 * self.tokens
        around = self.around_blocks.num_bytes + self.masks.in_first_layer.num_bytes
        return around + largest(*(self.passes.last_backward[i] for i in self.first_kinds))


def attending(step: TrainingStep) -> TrainingStep:
    """`step` whose layers know what they attend to of the images, where they do.

    Kind: exact. Source: `TowerForward.result_bytes`, `TrainingStep.learns_from_images`.
    """
    tower = step.model.tower
    if tower is None or not tower.attended or tower.transcribes:
        return step
    size, learns = TowerStep.of(step, tower).forward.result_bytes, step.learns_from_images
    dtypes = replace(step.dtypes, encoder_bytes=size, learns_encoder=learns)
    return replace(step, dtypes=dtypes)


def with_images(step: TrainingStep, moments: dict[str, Entries]) -> dict[str, Entries]:
    """`moments` of a language model and of the tower that reads its images, if one does."""
    if step.model.tower is None:
        return moments
    tower = TowerStep.of(step, step.model.tower)
    reads = step.model.tower.reads
    result = {f"{reads}_forward": images_forward(step, tower)}
    if tower.tower.names_blocks:
        result["images_masked"] = images_masked(step, tower)
    for name, entries in moments.items():
        result[name] = (*entries, *held_in(name, step, tower))
    if tower.tower.names_blocks:
        result["last_norm"] = last_norm(step, result["layer_forward"])
    if step.learns_from_images:
        result[f"{reads}_backward"] = images_backward(step, tower)
    return result


_AFTER_BACKWARD = ("embedding_backward", "optimizer_step")


def held_in(moment: str, step: TrainingStep, tower: TowerStep) -> Entries:
    """What `moment` of the text has of the tower.

    Kind: exact. Source: as of `PIXELS`, `TOWER_SAVED` and `TOWER_NAMED`.
    """
    pixels = tower.pixels
    if tower.tower.attended:
        return _attended_in(moment, step, tower)
    if moment in _AFTER_BACKWARD:
        return (pixels,)
    named: Entries = ()
    if moment == "layer_forward":
        named = (tower.forward.named(step.model.hidden_size), tower.idle_block)
    if not step.learns_from_images:
        return pixels, *named
    return pixels, tower.saved_by_blocks, tower.saved_by_projector, *named


_LASTING = ("until_step_ends", "until_next_outputs")


def _attended_in(moment: str, step: TrainingStep, tower: TowerStep) -> Entries:
    """Of an encoder whose decoder is the language model: all of it goes backward last.

    Source: transformers 5.23 `WhisperModel.forward`: nodes of the encoder are older than any of the
    decoder, and its output's gradient is a sum over the decoder's layers.
    """
    states = tower.forward.attended(step.model.hidden_size)
    held = step.trainer.outputs_held(step.run) if step.transcribes else "until_loss"
    if moment == "optimizer_step":
        return tower.pixels, *((states,) if held.startswith(_LASTING) else ())
    saved: Entries = ()
    if step.learns_from_images:
        saved = tower.saved_by_blocks, tower.saved_by_projector
    if moment == "embedding_backward":  # their gradient waits
        return tower.pixels, *saved, states
    checkpointed = bool(step.run.gradient_checkpointing)  # an argument of every layer
    in_forward = moment == "layer_forward" or (moment == "loss_forward" and step.transcribes)
    is_named = in_forward or held != "until_loss"
    earlier = (states,) if in_forward and held == "until_next_outputs" else ()
    is_saved = checkpointed or _is_saved_as_it_is(step, tower)
    kept = (states,) if is_named or is_saved else ()
    if moment == "layer_forward":
        kept = (tower.named(step.model.hidden_size),)
    return tower.pixels, *saved, *earlier, *kept


def _is_saved_as_it_is(step: TrainingStep, tower: TowerStep) -> bool:
    """Whether cross attention keeps the encoder's very output, of which else it makes copies.

    Source: as of `OpEmitter.base`, `methods.lora.around`.
    """
    dtypes = step.dtypes
    if dtypes.quant == "int8":
        return True
    if not dtypes.trains_base and (dtypes.adapters_drop or dtypes.mode == "A"):
        return False  # adapters read what dropout made of it, or a copy in fp32, cast again
    casts = dtypes.under_autocast or dtypes.trains_base
    read = dtypes.compute_bytes if casts else dtypes.adapter_bytes
    saves = saves_encoded(step.model, step.targets, dtypes)
    return saves and tower.forward.result_bytes == read


def images_forward(step: TrainingStep, tower: TowerStep) -> Entries:
    """In a block of the tower, or in its projector: the text is looked up, no layer has run."""
    # `inputs_embeds = self.get_input_embeddings()(input_ids)` stands before `get_image_features`
    is_looked_up = not tower.tower.attended
    rows = step.tokens * step.model.embeddings[0].width * step.dtypes.embedding_bytes * is_looked_up
    return (
        *step.around_layers,
        *held_between_steps(step),
        tower.pixels,
        tower.forward.narrow_pixels,
        Entry(EMBEDDED_TEXT, rows),
        tower.saved_by_blocks,
        Entry(TOWER_FORWARD, tower.working),
    )


def last_norm(step: TrainingStep, in_layer: Entries) -> Entries:
    """After the last layer, in the norm of what it returned: `in_layer` but for what has run."""
    made: Count = 0 * step.tokens
    stream = step.layers[-1].stream_bytes
    for norm in step.model.final_norms:
        points = norm_points(norm, step.dtypes, step.targets)
        made = made + most(points, r=step.r, **step.sized)
    states = step.tokens * step.model.hidden_size
    if step.method.trains_base:  # what it returns is among what is saved: the head's input
        made = made - states * step.dtypes.compute_bytes
    # looked-up rows and what the last layer returned, unless the first layer's norm keeps the rows
    first = step.layers[step.first_kinds[0]]
    keeps = step.gives_input_gradient and any(t.what == LAYER_INPUT for t in first.tensors)
    streams = (2 - keeps) * states * stream
    changed = {
        LAYER_FORWARD: Entry(LAYER_FORWARD, made + streams + step.masks.unnamed_bytes),
        step.saved_in_layers.fact: step.saved_for_backward,
    }
    return tuple(changed.get(entry.fact, entry) for entry in in_layer)


def images_masked(step: TrainingStep, tower: TowerStep) -> Entries:
    """Between the tower and the layers, whose mask of images is made."""
    saved: Entries = ()
    if step.learns_from_images:
        saved = tower.saved_by_blocks, tower.saved_by_projector
    return (
        *step.around_layers,
        *held_between_steps(step),
        tower.pixels,
        *saved,
        tower.named(step.model.hidden_size),
        tower.forward.masking(step.seq_len),
    )


def images_backward(step: TrainingStep, tower: TowerStep) -> Entries:
    """In the backward of the projector, of the last block or of the first, whichever is worst."""
    # the embedding's node is older than the tower's, so that its gradient waits; where it is a
    # leaf it is stored, beside the rows themselves
    width = step.model.hidden_size * step.layers[0].stream_bytes
    waits = (step.tokens * step.needs_grad + tower.forward.num_vectors * tower.tower.deep) * width
    leaf = step.tokens * step.leaf_embedding_bytes
    gradients, in_tower = step.gradients.in_layers, 0 * step.num_trained
    if tower.tower.attended:  # all of the text has gone backward
        waits, leaf, gradients = 0 * waits, 0 * leaf, 0 * gradients
    if not step.accumulates:
        in_tower = step.gradients.of_tower - tower.later_gradients
        gradients = step.gradients.total - step.gradients.of_tower
        if not tower.tower.attended:
            gradients = gradients - step.gradients.of_embeddings
    outputs: Entries = ()
    if tower.tower.attended and step.trainer.outputs_held(step.run) != "until_loss":
        outputs = (held_outputs(step),)
        if step.transcribes:
            outputs += (tower.forward.attended(step.model.hidden_size),)
    return (
        *step.around_layers,
        tower.pixels,
        *outputs,
        Entry(TEXT_GRADIENTS, gradients),
        Entry(EMBEDDED_TEXT, waits + leaf),
        Entry(TOWER_BACKWARD, largest(tower.worst_backward, tower.first_backward + in_tower)),
    )
