"""Masks and biases of positions that the layers of a training step read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from whichlora.memory import activations
from whichlora.memory.entries import Group, Tensor
from whichlora.spec.numeric import Count

if TYPE_CHECKING:
    from whichlora.memory.step import TrainingStep


@dataclass(frozen=True)
class StepMasks:
    """The masks of one step: how long each is held, and what reads it.

    Source: `memory.activations.kept_masks`.
    """

    step: TrainingStep

    @property
    def _is_reentrant(self) -> bool:
        step = self.step
        return bool(step.run.gradient_checkpointing and step.run.use_reentrant)

    def _each(self, *, checkpointed: bool, side: str = "", unbiased: str = "") -> tuple[Count, ...]:
        step = self.step
        return activations.kept_masks(
            step.model,
            step.dtypes,
            checkpointed=checkpointed,
            side=side,
            unbiased=unbiased,
            without_zeros=self._is_reentrant,
            **step.sized,
        )

    def _bytes(self, **settings: Any) -> Count:
        return sum(self._each(**settings), 0 * self.step.tokens)

    @cached_property
    def kept(self) -> tuple[Count, ...]:
        """Bytes of each mask and bias that all layers read."""
        return self._each(checkpointed=bool(self.step.run.gradient_checkpointing))

    @cached_property
    def kept_bytes(self) -> Count:
        return sum(self.kept, 0 * self.step.tokens)

    @cached_property
    def shared(self) -> Group:
        """Masks and biases that every layer reads: one tensor, made before the first layer."""
        # made by `create_causal_mask` of transformers 5.23 masking_utils.py, but for SDPA where its
        # `is_causal` says the same (`_ignore_causal_mask_sdpa`)
        return self._group(self.kept_bytes)

    @cached_property
    def in_first_layer(self) -> Group:
        """Masks in the last layer of the backward, when those of a decoder are freed."""
        return self._of_encoder(is_remade=self.is_bias_remade(0))

    @cached_property
    def in_encoder(self) -> Group:
        """Masks in the backward of the encoder's other layers."""
        return self._of_encoder(is_remade=False)

    def _of_encoder(self, *, is_remade: bool) -> Group:
        step = self.step
        checkpointed = bool(step.run.gradient_checkpointing)
        side = step.model.groups[0].stack
        remade = side if is_remade else ""
        num_bytes = self._bytes(checkpointed=checkpointed, side=side, unbiased=remade)
        return self._group(num_bytes + self.decoder_zeros_bytes)

    @cached_property
    def decoder_zeros_bytes(self) -> Count:
        """Zeros of a decoder's cross attention and their gradient, which outlive its backward.

        Kind: exact. Source: transformers 5.23 `T5Attention.forward` makes them a leaf,
        `position_bias.requires_grad = True`: `AccumulateGrad` holds both as long as the graph.
        """
        step = self.step
        checkpointed = bool(step.run.gradient_checkpointing)
        if not checkpointed or not step.second_stack or self._is_reentrant:
            return 0 * step.tokens
        first = step.model.groups[step.second_stack[0]].layer
        return 2 * activations.zeros_bytes(first, step.dtypes, span=step.seq_len)

    @cached_property
    def in_first_decoder_layer(self) -> Group:
        """Masks in the last layer of the decoder's backward."""
        if not self.is_bias_remade(self.step.second_stack[0]):
            return self.shared
        return self._group(self._bytes(checkpointed=True, unbiased="decoder"))

    def is_bias_remade(self, number: int) -> bool:
        """Whether the first layer of a stack, of group `number`, makes its position bias again.

        By then no later layer's checkpoint holds the one that it made in the forward.
        """
        step = self.step
        layer = step.model.groups[number].layer
        return bool(step.run.gradient_checkpointing) and activations.makes_bias(layer)

    def _group(self, num_bytes: Count) -> Group:
        masks = Tensor(
            "masks and biases that layers share",
            constant=num_bytes,
            dims="batch_size, seq_len, seq_len",
        )
        return Group(tensors=(masks,), **self.step.sized)

    @property
    def unnamed_bytes(self) -> Count:
        """Bytes of masks that only the forward's local variables hold, until it is done."""
        step = self.step
        # an encoder's go before its decoder begins: they are locals of its loop
        side = step.model.groups[-1].stack if step.second_stack else ""
        checkpointed = bool(step.run.gradient_checkpointing)
        saved_bytes = self._bytes(checkpointed=checkpointed, side=side)
        return self._bytes(checkpointed=True, side=side) - saved_bytes

    @property
    def unnamed(self) -> tuple[Count, ...]:
        """`unnamed_bytes` tensor by tensor, of one run: a mask, and biases of positions."""
        step = self.step
        side = step.model.groups[-1].stack if step.second_stack else ""
        saved = list(self._each(checkpointed=bool(step.run.gradient_checkpointing), side=side))
        unnamed: list[Count] = []
        for num_bytes in self._each(checkpointed=True, side=side):
            if num_bytes in saved:
                saved.remove(num_bytes)
            elif num_bytes:
                unnamed.append(num_bytes)
        return tuple(unnamed)

    @property
    def encoder_bytes(self) -> Count:
        return self._bytes(checkpointed=True, side="encoder")
