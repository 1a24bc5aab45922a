"""Small checkpoints of models that see images, with real processors, of random weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from oracle_tokenizer import byte_tokenizer
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3Processor,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    MllamaConfig,
    MllamaForConditionalGeneration,
    MllamaProcessor,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil

_CHAT = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% for part in message.content %}{{ 'PLACE' if part.type == 'image' else part.text }}"
    "{% endfor %}</s>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 384,
    "max_position_embeddings": 512,
}
_VISION = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 56,
    "patch_size": 14,
}


def _tokenizer(**special: str) -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(special.values())})
    tokenizer._set_model_specific_special_tokens(special)
    return tokenizer


def _llava() -> tuple[Any, Any]:
    tokenizer = _tokenizer(image_token="<image>")
    processor = LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        chat_template=_CHAT.replace("PLACE", "<image>"),
        num_additional_image_tokens=1,
    )
    config = LlavaConfig(
        text_config={**_TEXT, "model_type": "llama"},
        vision_config={**_VISION, "model_type": "clip_vision_model", "projection_dim": 64},
        image_token_index=tokenizer.image_token_id,
    )
    return processor, LlavaForConditionalGeneration(config)


def _gemma3() -> tuple[Any, Any]:
    tokenizer = _tokenizer(
        boi_token="<start_of_image>",
        image_token="<image_soft_token>",
        eoi_token="<end_of_image>",
    )
    tokenizer.add_tokens(["\n\n"])  # as Gemma's own vocabulary has it
    processor = Gemma3Processor(
        Gemma3ImageProcessorPil(size={"height": 56, "width": 56}),
        tokenizer,
        chat_template=_CHAT.replace("PLACE", "<start_of_image>"),
        image_seq_length=4,
    )
    config = Gemma3Config(
        text_config={**_TEXT, "head_dim": 16, "sliding_window": 64},
        vision_config=_VISION,
        mm_tokens_per_image=4,
        image_token_index=tokenizer.image_token_id,
        boi_token_index=tokenizer.boi_token_id,
        eoi_token_index=tokenizer.eoi_token_id,
    )
    return processor, Gemma3ForConditionalGeneration(config)


def _idefics3() -> tuple[Any, Any]:
    tokenizer = byte_tokenizer()
    places = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    special = ["<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special + places})
    tokenizer.add_tokens(["\n\n"])  # as SmolLM's own vocabulary has it
    processor = Idefics3Processor(
        Idefics3ImageProcessorPil(size={"longest_edge": 224}, max_image_size={"longest_edge": 56}),
        tokenizer,
        image_seq_len=4,
        chat_template=_CHAT.replace("PLACE", "<image>"),
    )
    config = Idefics3Config(
        text_config={**_TEXT, "model_type": "llama"},
        vision_config=_VISION,
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
    )
    return processor, Idefics3ForConditionalGeneration(config)


def _mllama() -> tuple[Any, Any]:
    tokenizer = _tokenizer(image_token="<|image|>", python_token="<|python_tag|>")
    tokenizer.add_special_tokens({"bos_token": "<|begin_of_text|>"})
    processor = MllamaProcessor(
        MllamaImageProcessorPil(size={"height": 56, "width": 56}),
        tokenizer,
        chat_template="{{ bos_token }}" + _CHAT.replace("PLACE", "<|image|>"),
    )
    vision = _VISION | {"attention_heads": 4, "num_global_layers": 1, "vision_output_dim": 192}
    config = MllamaConfig(
        text_config={**_TEXT, "cross_attention_layers": [1], "num_hidden_layers": 3}
        | {
            name: getattr(tokenizer, name)
            for name in ("pad_token_id", "bos_token_id", "eos_token_id")
        },
        vision_config=vision | {"intermediate_layers_indices": [0, 2]},
        image_token_index=tokenizer.image_token_id,
    )
    return processor, MllamaForConditionalGeneration(config)


MODELS: Mapping[str, Callable[[], tuple[Any, Any]]] = {
    "llava": _llava,
    "gemma3": _gemma3,
    "idefics3": _idefics3,
    "mllama": _mllama,
}
"""Whose processors need Pillow alone."""


def write_checkpoint(folder: Path, model_type: str) -> Path:
    """A checkpoint in `folder` that `from_pretrained` loads, with what cuts images and texts."""
    torch.manual_seed(0)
    processor, model = MODELS[model_type]()
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
