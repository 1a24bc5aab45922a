"""P-tuning: an encoder makes the embeddings of virtual tokens, which alone are left of it.

Liu et al. 2021, arXiv:2103.10385; peft 0.21.2 `tuners/p_tuning`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from whichlora.methods import prompt_tuning
from whichlora.methods.base import OuterTensor
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.options import Option
from whichlora.spec.run import RunConfig

_HIDDEN = Option(
    name="encoder_hidden_size",
    summary="width of the encoder; without it that of the model",
    default=None,
)
_OPTIONS = (*prompt_tuning.OPTIONS, _HIDDEN)


def outer_tensors(
    model: ModelSpec, *, tokens: int = 20, hidden: int | None = None
) -> tuple[OuterTensor, ...]:
    """The table, and the three matrices and biases of the encoder. Kind: exact.

    A checkpoint has what the encoder makes of the table, which is as large as it.
    Source: `PromptEncoder.__init__`; `PeftModel.get_prompt_embedding_to_save`.
    """
    width = model.embeddings[0].width
    inner = hidden or width
    tensors = list(prompt_tuning.outer_tensors(model, tokens=tokens))
    for number, (rows, columns) in enumerate(((inner, width), (inner, inner), (width, inner))):
        name = f"encoder: matrix {number + 1}"
        dims = "out_features, in_features"
        tensors += [
            OuterTensor(
                name=name, dims=dims, rows=rows, width=columns, is_factor=True, training_only=True
            ),
            OuterTensor(
                name=f"{name}, bias", dims="out_features", rows=1, width=rows, training_only=True
            ),
        ]
    return tuple(tensors)


def with_options(run: RunConfig) -> dict[str, Any]:
    tokens, hidden = prompt_tuning.num_virtual_tokens(run), _HIDDEN.of(run.method_options)
    width = None if hidden is None else int(str(hidden))
    return {
        "virtual_tokens": tokens,
        "outer_tensors": partial(outer_tensors, tokens=tokens, hidden=width),
    }


METHOD = replace(
    prompt_tuning.METHOD,
    name="p-tuning",
    summary="tokens before each sequence, whose embeddings an encoder makes in training",
    peft_class="peft.PromptEncoderConfig",
    peft_config=partial(prompt_tuning.peft_config, options=_OPTIONS),
    read_peft=partial(
        prompt_tuning.read_peft,
        options=_OPTIONS,
        plain={"encoder_reparameterization_type": ("MLP",)},
    ),
    options=_OPTIONS,
    with_options=with_options,
    outer_tensors=outer_tensors,
)
