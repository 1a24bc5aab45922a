"""Bytes of a checkpoint on disk: what is trained, and the optimizer's states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from whichlora.memory import optimizer, weights
from whichlora.memory.gradients import Trained, frozen_outer_bytes, gradient_bytes
from whichlora.methods.base import Method
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.numeric import Count

# Headers, as measured on CPU checkpoints of 56 to 112 tensors: safetensors names each tensor, its
# dtype and place; torch.save writes a record of a zip file for each storage.
_TENSOR_HEADER_BYTES = 128
_RECORD_HEADER_BYTES = 275
# An adapter of it brings the frozen weight itself into the file: `EMBEDDING_LAYER_NAMES` of peft
# 0.21.2, `save_embedding_layers` "auto" of `get_peft_model_state_dict`.
_SAVED_WITH_ADAPTER = frozenset({"embed_tokens", "lm_head"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointBytes:
    """One checkpoint of the Trainer.

    Args:
        weights: the adapters and saved modules, or the whole model, in safetensors.
        tensors: of these without the headers of the file.
        optimizer_states: `optimizer.pt`.
    """

    weights: Count
    tensors: Count
    optimizer_states: Count

    @property
    def total(self) -> Count:
        return self.weights + self.optimizer_states


def checkpoint_bytes(
    model: ModelSpec,
    dtypes: Dtypes,
    method: Method,
    tensors: Sequence[Trained],
    *,
    targets: tuple[str, ...] = (),
    optimizer_name: str,
) -> CheckpointBytes:
    """What `Trainer._save_checkpoint` writes; schedule, random states and settings left out.

    Kind: exact but for the headers of the files, which are an estimate. Source: transformers 5.23
    `Trainer._save_checkpoint`; peft 0.21.2 `get_peft_model_state_dict`. States that are paged
    from the device are written, too.

    Args:
        tensors: everything that gets a gradient.
        targets: names of what is adapted.
    """
    stored = gradient_bytes(tensor for tensor in tensors if tensor.is_stored)
    stored = stored + frozen_outer_bytes(model, method, dtypes)
    whole = _SAVED_WITH_ADAPTER.intersection(targets)
    if model.head is not None and model.head.name in whole:
        stored = stored + model.head.num_weights * dtypes.head_bytes
    if model.embeddings[0].name in whole:
        stored = stored + model.embeddings[0].num_elements * dtypes.embedding_bytes
    if method.trains_base:
        # `state_dict` leaves out buffers with `persistent=False`, such as `inv_freq` of a rotary
        # table
        loaded = weights.weight_bytes(model, dtypes)
        stored = sum(size for name, size in loaded.items() if name != "buffers")
    states = optimizer.state_bytes(tensors, optimizer=optimizer_name, device_kind="cpu")
    num_tensors = sum(tensor.count for tensor in tensors if tensor.is_stored)
    records = optimizer.num_stored_states(tensors, optimizer=optimizer_name)
    return CheckpointBytes(
        weights=stored + _TENSOR_HEADER_BYTES * num_tensors,
        tensors=stored,
        optimizer_states=states + _RECORD_HEADER_BYTES * records,
    )
