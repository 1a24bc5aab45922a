"""Trace drawn runs with images or sound, keep the records, and compare them with the ledger.

`python benchmarks/image_traces.py` prints errors of the peak by class, for docs/memory.md.
`--draw 12` traces as many runs of each class anew, or of `--types qwen2_5_vl,gemma3`; `--seed 1000`
draws others, which are printed and not kept. `--trainer sft` traces those of TRL's `SFTTrainer`,
which needs TRL (`pip install trl`). What the allocator reserves is compared by
`reserved_accuracy.py`.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from trace_records import live_bytes, read, traced_peaks

from whichlora import families
from whichlora.memory.towers import grid_of
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu

RECORDS = Path(__file__).parent / "traces" / "images.jsonl"
SFT_RECORDS = RECORDS.with_name("images-sft.jsonl")
# TRL's fused head finds no states: `base_model` of these is the text with its own head; or no
# `num_experts` (GLM-4.5V)
NO_SFT = ("llama4", "whisper", "qwen2_audio", "glm4v_moe")
GPU = find_gpu("a100-sxm-80gb")
_QWEN2_TEXT = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
}
_QWEN2_5_TEXT = {
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
}
_GLM_ROPE = {
    "rope_type": "default",
    "rope_theta": 10_000.0,
    "mrope_section": [8, 12, 12],
    "partial_rotary_factor": 0.5,
}
# Sizes of published checkpoints; depths are drawn.
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "qwen2_vl": {  # Qwen2-VL-2B
        "text_config": _QWEN2_TEXT,
        "vision_config": {"embed_dim": 1280, "hidden_size": 1536},
        "tie_word_embeddings": True,
    },
    "qwen2_5_vl": {  # Qwen2.5-VL-3B
        "text_config": _QWEN2_5_TEXT,
        "vision_config": {"hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 2048},
        "tie_word_embeddings": True,
    },
    "qwen3_vl": {  # Qwen3-VL-2B
        "text_config": {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
        },
        "vision_config": {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "out_hidden_size": 2048,
            "deepstack_visual_indexes": [0, 1, 3],
        },
        "tie_word_embeddings": True,
    },
    "qwen3_vl_moe": {  # Qwen3-VL-30B-A3B with 16 of its 128 experts
        "text_config": {
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "moe_intermediate_size": 768,
            "num_experts": 16,
            "num_experts_per_tok": 8,
            "vocab_size": 151936,
        },
        "vision_config": {
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "out_hidden_size": 2048,
            "deepstack_visual_indexes": [0, 1, 3],
        },
    },
    "qwen3_5": {  # Qwen3.5-2B's widths
        "text_config": {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_value_heads": 16,
            "vocab_size": 248320,
        },
        "vision_config": {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "out_hidden_size": 2048,
        },
        "tie_word_embeddings": True,
    },
    "glm4v": {  # GLM-4.1V-9B's tower, and a text half as wide
        "text_config": {
            "hidden_size": 2048,
            "intermediate_size": 6848,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "rope_parameters": _GLM_ROPE,
            "vocab_size": 151552,
        },
        "vision_config": {"out_hidden_size": 2048, "intermediate_size": 13696},
    },
    "glm4v_moe": {  # GLM-4.5V's tower, and a text half as wide with 16 of its 128 experts
        "text_config": {
            "hidden_size": 2048,
            "num_attention_heads": 48,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 5472,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 16,
            "num_experts_per_tok": 8,
            "rope_parameters": _GLM_ROPE,
            "vocab_size": 151552,
        },
        "vision_config": {"out_hidden_size": 2048, "intermediate_size": 10944},
    },
    "gemma3": {  # Gemma 3 4B
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window": 1024,
            "vocab_size": 262208,
        },
        "vision_config": {
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_attention_heads": 16,
            "patch_size": 14,
            "image_size": 896,
            "vision_use_head": False,
        },
        "mm_tokens_per_image": 256,
    },
    "gemma4": {  # Gemma 4 26B-A4B's tower, and a text half as wide without experts
        "text_config": {
            "hidden_size": 1408,
            "intermediate_size": 8448,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "hidden_size_per_layer_input": 0,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "sliding_window": 1024,
            "use_bidirectional_attention": "vision",
            "vocab_size": 262144,
        },
        "vision_config": {
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "head_dim": 72,
            "standardize": True,
        },
    },
    "llava": {  # LLaVA 1.5, with half as wide a text
        "text_config": {
            "model_type": "llama",
            "hidden_size": 2048,
            "intermediate_size": 5504,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "vocab_size": 32064,
        },
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_attention_heads": 16,
            "patch_size": 14,
            "image_size": 336,
        },
        "image_token_index": 32000,
    },
    "llava_next": {  # LLaVA-NeXT with half of Mistral 7B
        "text_config": {
            "model_type": "mistral",
            "hidden_size": 2048,
            "intermediate_size": 7168,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "sliding_window": None,
            "vocab_size": 32064,
        },
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_attention_heads": 16,
            "patch_size": 14,
            "image_size": 336,
        },
        "image_token_index": 32000,
    },
    "internvl": {  # InternVL3-2B
        "text_config": {
            "model_type": "qwen2",
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "vocab_size": 151674,
        },
        "vision_config": {
            "model_type": "internvl_vision",
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_attention_heads": 16,
            "attention_bias": True,
            "image_size": [448, 448],
            "patch_size": [14, 14],
        },
        "tie_word_embeddings": False,
    },
    "smolvlm": {  # SmolVLM2-2.2B
        "text_config": {
            "model_type": "llama",
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "vocab_size": 49280,
        },
        "vision_config": {
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_attention_heads": 16,
            "image_size": 384,
            "patch_size": 14,
        },
        "scale_factor": 3,
        "image_token_id": 49190,
    },
    "idefics3": {  # SmolVLM-256M
        "text_config": {
            "model_type": "llama",
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "vocab_size": 49280,
        },
        "vision_config": {
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_attention_heads": 12,
            "image_size": 512,
            "patch_size": 16,
        },
        "scale_factor": 4,
        "image_token_id": 49190,
    },
    "llama4": {  # Llama 4 Scout, with a narrower text and fewer experts
        "text_config": {
            "model_type": "llama4_text",
            "hidden_size": 2048,
            "intermediate_size": 4096,
            "intermediate_size_mlp": 8192,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "vocab_size": 202048,
        },
        "vision_config": {
            "model_type": "llama4_vision_model",
            "hidden_size": 1408,
            "intermediate_size": 5632,
            "num_attention_heads": 16,
            "vision_output_dim": 4096,
            "image_size": 336,
        },
        "image_token_index": 2000,
    },
    "mllama": {  # Llama 3.2 Vision 11B, with half as wide a text and fewer, so smaller states
        "text_config": {
            "hidden_size": 2048,
            "intermediate_size": 7168,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "cross_attention_layers": [1, 3],
            "vocab_size": 128256,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        "vision_config": {
            "hidden_size": 1280,
            "intermediate_size": 5120,
            "num_global_layers": 2,
            "image_size": 448,
            "intermediate_layers_indices": [0, 2],
            "vision_output_dim": 3840,
        },
        "image_token_index": 2000,
    },
    "mistral3": {  # Mistral Small 3.1, with half as wide a text
        "text_config": {
            "model_type": "mistral",
            "hidden_size": 2560,
            "intermediate_size": 8192,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "sliding_window": None,
            "vocab_size": 131072,
        },
        "vision_config": {
            "model_type": "pixtral",
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_attention_heads": 16,
            "patch_size": 14,
            "image_size": 1540,
            "hidden_act": "silu",
        },
        "tie_word_embeddings": False,
    },
    "qwen2_audio": {  # Qwen2-Audio 7B's encoder, and a narrower text
        "text_config": {
            "model_type": "qwen2",
            "hidden_size": 2048,
            "intermediate_size": 5504,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "vocab_size": 156032,
        },
        "audio_config": {
            "model_type": "qwen2_audio_encoder",
            "d_model": 1280,
            "encoder_attention_heads": 20,
            "encoder_ffn_dim": 5120,
        },
        "audio_token_index": 2000,
    },
    "whisper": {  # Whisper small
        "d_model": 768,
        "encoder_attention_heads": 12,
        "decoder_attention_heads": 12,
        "encoder_ffn_dim": 3072,
        "decoder_ffn_dim": 3072,
        "vocab_size": 51865,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
    },
}
_HEARS = ("qwen2_audio",)
_QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5")
DEPTH_KEYS = dict.fromkeys((*_QWEN, "glm4v", "glm4v_moe"), "depth")
DEPTH_KEYS |= {"qwen2_audio": "encoder_layers"}


def config_of(line: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the record's class with as many layers and blocks as were traced."""
    known = CONFIGS[line["type"]]
    if "text_config" not in known:  # an encoder and its decoder
        depths = {"encoder_layers": line["blocks"], "decoder_layers": line["layers"]}
        vocab = line["vocab"] or known["vocab_size"]
        return {**known, **depths, "model_type": line["type"], "vocab_size": vocab}
    text = known["text_config"] | {"num_hidden_layers": line["layers"]}
    if line["vocab"]:  # so few that the peak is no longer at the loss
        text |= {"vocab_size": line["vocab"]}
    depth = DEPTH_KEYS.get(line["type"], "num_hidden_layers")
    part = "audio_config" if line["type"] in _HEARS else "vision_config"
    tower = known[part] | {depth: line["blocks"]}
    return {**known, "model_type": line["type"], "text_config": text, part: tower}


def job_of(line: Mapping[str, Any]) -> ResolvedRun:
    model = families.build(config_of(line), name="drawn")
    return resolve(model, RunConfig.from_dict(line["run"]), GPU)


def moments(line: Mapping[str, Any]) -> dict[str, int]:
    """Live bytes at each moment as the ledger has them."""
    return live_bytes(job_of(line))


def predicted(line: Mapping[str, Any]) -> int:
    return max(moments(line).values())


def traced(line: Mapping[str, Any]) -> dict[str, int]:
    """The same of the real class on fake tensors, and what is reserved for it."""
    return traced_peaks(job_of(line), config_of(line))


_SECONDS = (2.5, 5.0, 12.3, 20.0, 29.0)
_SIZES = ((448, 448), (640, 480), (1024, 768), (768, 1280), (1600, 1200), (301, 997))


# a text that has fewer layers than the tower hands features to would drop some of them
_MORE_LAYERS = {"qwen3_vl": 3, "qwen3_vl_moe": 3, "qwen3_5": 4, "mllama": 2}
_SHARED = ("batch_size", "images", "image_size", "audios", "audio_seconds")
_UNQUANTISED = ("llama4",)  # whose experts in 4 bits are refused
# by PEFT's wrapper of parameters, which refuses dropout; its kernel of patches is adapted, too
EXPERTS_ADAPTED = ("glm4v_moe",)
_WRAPPED = ("gemma4",)  # in whose tower PEFT can't adapt matrices by their names


def _served(rng: random.Random) -> dict[str, Any]:
    return {
        "phase": "inference",
        "serve": "merged",
        "precision": "bf16",
        "quant": rng.choice(("none", "nf4")),
        "prompt_len": rng.choice((1024, 2048, 4096)),
        "max_new_tokens": rng.choice((2, 6)),
    }


def _draw_sound(seed: int, model_type: str) -> dict[str, Any]:
    """A run with one clip in each row, whose tokens are those of what is said in it."""
    rng = random.Random(f"{model_type} {seed}")
    method = rng.choice(("full", "lora", "lora", "qlora", "qlora", "dora"))
    wide = method == "full" and rng.random() < 0.5
    size = {"batch_size": rng.choice((1, 2, 4, 8))}
    settings = {
        "method": method,
        "r": rng.choice((8, 16, 64)),
        "lora_dropout": rng.choice((0.0, 0.0, 0.05)),
        "seq_len": rng.choice((64, 128, 256, 448)),
        "precision": "bf16" if wide else rng.choice(("bf16", "bf16-pure")),
        "base_dtype": "float32" if wide else "auto",
        "gradient_checkpointing": rng.random() < 0.5,
        "gradient_accumulation_steps": rng.choice((1, 1, 2)),
        "target_modules": rng.choice((("all-linear",), ("q_proj", "v_proj"))),
    }
    if rng.random() < 0.2:
        settings = _served(rng) | {"prompt_len": 4, "max_new_tokens": rng.choice((2, 100))}
    return {
        "type": model_type,
        "layers": rng.choice((2, 4)),
        "blocks": rng.choice((2, 4)),
        "vocab": rng.choice((0, 4096)),
        "run": RunConfig(model=model_type, **settings, **size).to_dict(),
    }


def draw(seed: int, model_type: str) -> dict[str, Any]:
    """A run with images that the language model has room for."""
    if model_type == "whisper":
        return _draw_sound(seed, model_type)
    rng = random.Random(f"{model_type} {seed}")
    while True:
        method = rng.choice(("full", "lora", "lora", "qlora", "qlora"))
        if method == "qlora" and model_type in _UNQUANTISED:
            method = "lora"
        wide = method == "full" and rng.random() < 0.3
        settings = {
            "method": method,
            "r": rng.choice((8, 16, 64)),
            "lora_dropout": rng.choice((0.0, 0.0, 0.05)) * (model_type not in EXPERTS_ADAPTED),
            "batch_size": rng.choice((1, 1, 2)),
            "seq_len": rng.choice((1024, 2048, 4096)),
            "precision": "bf16" if wide else rng.choice(("bf16", "bf16-pure")),
            "base_dtype": "float32" if wide else "auto",
            "gradient_checkpointing": rng.random() < 0.5,
            "gradient_accumulation_steps": rng.choice((1, 1, 2)),
            "images": rng.choice((1, 1, 2, 3, 4)),
            "image_size": rng.choice(_SIZES),
            "audios": 0,
            "audio_seconds": 30.0,
            "freeze_vision_tower": rng.random() < 0.35,
            "target_modules": rng.choice((("all-linear",), ("all-linear",), ("q_proj", "v_proj"))),
        }
        adapts = method != "full" and model_type in EXPERTS_ADAPTED
        if adapts or (model_type in _WRAPPED and settings["target_modules"] != ("all-linear",)):
            settings["freeze_vision_tower"] = True
        if model_type in _HEARS:
            settings |= {"audios": settings["images"], "audio_seconds": rng.choice(_SECONDS)}
            settings["images"] = 0
        if rng.random() < 0.2:
            settings = _served(rng) | {key: settings[key] for key in _SHARED}
            if model_type in _UNQUANTISED:
                settings["quant"] = "none"
        run = RunConfig(model=model_type, **settings)
        line = {
            "type": model_type,
            "layers": rng.choice((2, 3)) + _MORE_LAYERS.get(model_type, 0),
            "blocks": rng.choice((4, 8, 12)),
            "vocab": rng.choice((0, 4096)),
            "run": run.to_dict(),
        }
        tower = families.build(config_of(line), name="drawn").tower
        assert tower is not None
        # a text token stands before each image, and one at the end
        room = run.seq_len if run.phase == "finetune" else run.prompt_len
        tokens = grid_of(tower, run).tokens + 1
        if tower.inputs(run.images, run.audios) * tokens < room:
            return line


def draw_of(trainer: str, seed: int, model_type: str) -> dict[str, Any]:
    """The run of that seed, or of TRL's trainer the training that it or a later one draws."""
    line = draw(seed, model_type)
    if trainer == "transformers":
        return line
    while line["run"]["phase"] != "finetune":
        seed += 10_000
        line = draw(seed, model_type)
    line["run"] |= {"trainer": trainer, "loss_head": "trl-fused"}
    return line


def records(trainer: str = "transformers") -> Iterator[dict[str, Any]]:
    return read(RECORDS if trainer == "transformers" else SFT_RECORDS)


def errors(lines: Iterable[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Relative errors of the ledger by class."""
    by_type: dict[str, list[float]] = {}
    for line in lines:
        by_type.setdefault(line["type"], []).append(abs(predicted(line) / line["traced"] - 1))
    return by_type


def table(by_type: Mapping[str, list[float]]) -> str:
    lines = ["| class | runs | median | p95 | worst |", "| --- | --- | --- | --- | --- |"]
    every = [error for sizes in by_type.values() for error in sizes]
    for name, sizes in (*by_type.items(), ("all", every)):
        p95 = quantiles(sizes, n=20, method="inclusive")[-1] if len(sizes) > 1 else sizes[0]
        shown = " | ".join(f"{100 * size:.3f} %" for size in (median(sizes), p95, max(sizes)))
        lines.append(f"| `{name}` | {len(sizes)} | {shown} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", type=int, metavar="N", help="trace N runs of each class")
    parser.add_argument("--types", default=",".join(CONFIGS))
    parser.add_argument("--seed", type=int, default=0, help="of the first run; kept from 0 alone")
    parser.add_argument("--trainer", default="transformers", choices=("transformers", "sft"))
    arguments = parser.parse_args()
    trainer = arguments.trainer
    path = RECORDS if trainer == "transformers" else SFT_RECORDS
    kept = list(read(path)) if path.exists() else []
    if arguments.draw:
        drawn = arguments.types.split(",")
        if trainer == "sft":
            drawn = [name for name in drawn if name not in NO_SFT]
        seeds = range(arguments.seed, arguments.seed + arguments.draw)
        lines = [draw_of(trainer, seed, name) for name in drawn for seed in seeds]
        for line in lines:
            line |= traced(line)
        if arguments.seed:
            print(table(errors(lines)))
            return
        kept = [line for line in kept if line["type"] not in drawn] + lines
        with path.open("w", encoding="utf-8") as file:
            for line in kept:
                print(json.dumps(line), file=file)
    print(table(errors(kept)))


if __name__ == "__main__":
    main()
