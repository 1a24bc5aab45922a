# ruff: noqa: E501
"""Where the linear layers of each type of model are; written by `benchmarks/module_paths.py`.

A line has a module, numbers of layers and experts as "{}", and its linear layers.

Source: transformers 5.23.0, modules of `from_config`.
"""

from __future__ import annotations

from collections.abc import Mapping

LINEAR_PATHS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("albert",),
        (
            "albert.encoder.albert_layer_groups.{}.albert_layers.{}.attention: dense key query value",
            "albert.encoder.albert_layer_groups.{}.albert_layers.{}: ffn ffn_output",
            "albert.encoder: embedding_hidden_mapping_in",
            "predictions: decoder dense",
        ),
    ),
    **dict.fromkeys(
        ("bart",),
        (
            ": lm_head",
            "model.decoder.layers.{}.encoder_attn: k_proj out_proj q_proj v_proj",
            "model.decoder.layers.{}: fc1 fc2",
            "model.decoder.layers.{}.self_attn: k_proj out_proj q_proj v_proj",
            "model.encoder.layers.{}: fc1 fc2",
            "model.encoder.layers.{}.self_attn: k_proj out_proj q_proj v_proj",
        ),
    ),
    **dict.fromkeys(
        ("bert",),
        (
            "bert.encoder.layer.{}.attention.output: dense",
            "bert.encoder.layer.{}.attention.self: key query value",
            "bert.encoder.layer.{}.intermediate: dense",
            "bert.encoder.layer.{}.output: dense",
            "cls.predictions: decoder",
            "cls.predictions.transform: dense",
        ),
    ),
    **dict.fromkeys(
        ("bloom", "falcon"),
        (
            ": lm_head",
            "transformer.h.{}.mlp: dense_4h_to_h dense_h_to_4h",
            "transformer.h.{}.self_attention: dense query_key_value",
        ),
    ),
    **dict.fromkeys(
        (
            "cohere",
            "cohere2",
            "gemma",
            "gemma2",
            "gemma3_text",
            "granite",
            "internlm3",
            "llama",
            "ministral3",
            "mistral",
            "olmo",
            "olmo2",
            "olmo3",
            "qwen2",
            "qwen3",
            "seed_oss",
            "smollm3",
            "stablelm",
        ),
        (
            ": lm_head",
            "model.layers.{}.mlp: down_proj gate_proj up_proj",
            "model.layers.{}.self_attn: k_proj o_proj q_proj v_proj",
        ),
    ),
    **dict.fromkeys(
        ("dbrx",),
        (
            ": lm_head",
            "transformer.blocks.{}.ffn.router: layer",
            "transformer.blocks.{}.norm_attn_norm.attn: Wqkv out_proj",
        ),
    ),
    **dict.fromkeys(
        ("deberta-v2",),
        (
            "cls.predictions: decoder",
            "cls.predictions.transform: dense",
            "deberta.encoder.layer.{}.attention.output: dense",
            "deberta.encoder.layer.{}.attention.self: key_proj query_proj value_proj",
            "deberta.encoder.layer.{}.intermediate: dense",
            "deberta.encoder.layer.{}.output: dense",
        ),
    ),
    **dict.fromkeys(
        ("deepseek_v2",),
        (
            ": lm_head",
            "model.layers.{}.mlp: down_proj gate_proj up_proj",
            "model.layers.{}.mlp.shared_experts: down_proj gate_proj up_proj",
            "model.layers.{}.self_attn: kv_a_proj_with_mqa kv_b_proj o_proj q_proj",
        ),
    ),
    **dict.fromkeys(
        ("deepseek_v3", "glm4_moe_lite"),
        (
            ": lm_head",
            "model.layers.{}.mlp: down_proj gate_proj up_proj",
            "model.layers.{}.mlp.shared_experts: down_proj gate_proj up_proj",
            "model.layers.{}.self_attn: kv_a_proj_with_mqa kv_b_proj o_proj q_a_proj q_b_proj",
        ),
    ),
    **dict.fromkeys(
        ("deepseek_v32", "glm_moe_dsa"),
        (
            ": lm_head",
            "model.layers.{}.mlp: down_proj gate_proj up_proj",
            "model.layers.{}.mlp.shared_experts: down_proj gate_proj up_proj",
            "model.layers.{}.self_attn.indexer: weights_proj wk wq_b",
            "model.layers.{}.self_attn: kv_a_proj_with_mqa kv_b_proj o_proj q_a_proj q_b_proj",
        ),
    ),
    **dict.fromkeys(
        ("distilbert",),
        (
            "distilbert.transformer.layer.{}.attention: k_lin out_lin q_lin v_lin",
            "distilbert.transformer.layer.{}.ffn: lin1 lin2",
            ": vocab_projector vocab_transform",
        ),
    ),
    **dict.fromkeys(
        ("electra",),
        (
            "electra.encoder.layer.{}.attention.output: dense",
            "electra.encoder.layer.{}.attention.self: key query value",
            "electra.encoder.layer.{}.intermediate: dense",
            "electra.encoder.layer.{}.output: dense",
            ": generator_lm_head",
            "generator_predictions: dense",
        ),
    ),
    **dict.fromkeys(
        ("gemma3",),
        (
            ": lm_head",
            "model.language_model.layers.{}.mlp: down_proj gate_proj up_proj",
            "model.language_model.layers.{}.self_attn: k_proj o_proj q_proj v_proj",
            "model.vision_tower.encoder.layers.{}.mlp: fc1 fc2",
            "model.vision_tower.encoder.layers.{}.self_attn: k_proj out_proj q_proj v_proj",
        ),
    ),
    **dict.fromkeys(
        ("gemma4",),
        (
            ": lm_head",
            "model.embed_vision: embedding_projection",
            "model.language_model.layers.{}.mlp: down_proj gate_proj up_proj",
            "model.language_model.layers.{}.router: proj",
            "model.language_model.layers.{}.self_attn: k_proj o_proj q_proj v_proj",
            "model.vision_tower.encoder.layers.{}.mlp.down_proj: linear",
            "model.vision_tower.encoder.layers.{}.mlp.gate_proj: linear",
            "model.vision_tower.encoder.layers.{}.mlp.up_proj: linear",
            "model.vision_tower.encoder.layers.{}.self_attn.k_proj: linear",
            "model.vision_tower.encoder.layers.{}.self_attn.o_proj: linear",
            "model.vision_tower.encoder.layers.{}.self_attn.q_proj: linear",
            "model.vision_tower.encoder.layers.{}.self_attn.v_proj: linear",
            "model.vision_tower.patch_embedder: input_proj",
        ),
    ),
    **dict.fromkeys(
        ("glm", "glm4"),
        (
            ": lm_head",
            "model.layers.{}.mlp: down_proj gate_up_proj",
            "model.layers.{}.self_attn: k_proj o_proj q_proj v_proj",
        ),
    ),
    **dict.fromkeys(
        ("glm4_moe",),
        (
            ": lm_head",
            "model.layers.{}.mlp: down_proj gate_proj up_proj",
            "model.layers.{}.mlp.shared_experts: down_proj gate_proj up_proj",
            "model.layers.{}.self_attn: k_proj o_proj q_proj v_proj",
        ),
    ),
    **dict.fromkeys(
        ("glm4v",),
        (
            ": lm_head",
            "model.language_model.layers.{}.mlp: down_proj gate_up_proj",
            "model.language_model.layers.{}.self_attn: k_proj o_proj q_proj v_proj",
            "model.visual.blocks.{}.attn: proj qkv",
            "model.visual.blocks.{}.mlp: down_proj gate_proj up_proj",
            "model.visual.merger: down_proj gate_proj proj up_proj",
        ),
    ),
    **dict.fromkeys(
        ("glm4v_moe",),
        (
            ": lm_head",
            "model.language_model.layers.{}.mlp: down_proj gate_proj up_proj",
            "model.language_model.layers.{}.mlp.shared_experts: down_proj gate_proj up_proj",
            "model.language_model.layers.{}.self_attn: k_proj o_proj q_proj v_proj",
            "model.visual.blocks.{}.attn: proj qkv",
            "model.visual.blocks.{}.mlp: down_proj gate_proj up_proj",
            "model.visual.merger: down_proj gate_proj proj up_proj",
        ),
    ),
    **dict.fromkeys(
        ("gpt2", "gpt_bigcode"),
        (": lm_head", "transformer.h.{}.attn: c_attn c_proj", "transformer.h.{}.mlp: c_fc c_proj"),
    ),
    **dict.fromkeys(
        ("gpt_neo",),
        (
            ": lm_head",
            "transformer.h.{}.attn.attention: k_proj out_proj q_proj v_proj",
            "transformer.h.{}.mlp: c_fc c_proj",
        ),
    ),
    **dict.fromkeys(
        ("gpt_neox",),
        (
            "gpt_neox.layers.{}.attention: dense query_key_value",
            "gpt_neox.layers.{}.mlp: dense_4h_to_h dense_h_to_4h",
            ": lm_head",
        ),
    ),
    **dict.fromkeys(
        ("gpt_oss", "granitemoe", "minimax_m2", "mixtral", "olmoe", "qwen3_moe"),
        (": lm_head", "model.layers.{}.self_attn: k_proj o_proj q_proj v_proj"),
    ),
    **dict.fromkeys(
        ("gptj",),
        (
            ": lm_head",
            "transformer.h.{}.attn: k_proj out_proj q_proj v_proj",
            "transformer.h.{}.mlp: fc_in fc_out",
        ),
    ),
    **dict.fromkeys(
        ("granitemoehybrid",),
        (
            ": lm_head",
            "model.layers.{}.self_attn: k_proj o_proj q_proj v_proj",
            "model.layers.{}.shared_mlp: input_linear output_linear",
        ),
    ),
    **dict.fromkeys(
        ("idefics3", "smolvlm"),
        (
            ": lm_head",
            "model.connector.modality_projection: proj",
            "model.text_model.layers.{}.mlp: down_proj gate_proj up_proj",
            "model.text_model.layers.{}.self_attn: k_proj o_proj q_proj v_proj",
            "model.vision_model.encoder.layers.{}.mlp: fc1 fc2",
            "model.vision_model.encoder.layers.{}.self_attn: k_proj out_proj q_proj v_proj",
        ),
    ),
    **dict.fromkeys(
        ("kimi_k25",),
        (
            ": lm_head",
            "model.language_model.layers.{}.mlp: down_proj gate_proj up_proj",
            "model.language_model.layers.{}.mlp.shared_experts: down_proj gate_proj up_proj",
            "model.language_model.layers.{}.self_attn: kv_a_proj_with_mqa kv_b_proj o_proj q_a_proj q_b_proj",
            "model.mm_projector: in_proj out_proj",
            "model.vision_tower.layers.{}.attn: k_proj proj q_proj v_proj",
            "model.vision_tower.layers.{}.mlp: fc1 fc2",
        ),
    ),
    **dict.fromkeys(
        ("lfm2",),
        (
            ": lm_head",
            "model.layers.{}.conv: in_proj out_proj",
            "model.layers.{}.feed_forward: w1 w2 w3",
            "model.layers.{}.self_attn: k_proj out_proj q_proj v_proj",
        ),
    ),
    **dict.fromkeys(
        ("llama4",),
        (
            ": lm_head",
            "model.layers.{}.feed_forward: down_proj gate_proj router up_proj",
            "model.layers.{}.feed_forward.shared_expert: down_proj gate_proj up_proj",
            "model.layers.{}.self_attn: k_proj o_proj q_proj v_proj",
        ),
    ),
    **dict.fromkeys(
        ("llava", "llava_next"),
        (
            ": lm_head",
            "model.language_model.layers.{}.mlp: down_proj gate_proj up_proj",
            "model.language_model.layers.{}.self_attn: k_proj o_proj q_proj v_proj",
            "model.multi_modal_projector: linear_1 linear_2",
            "model.vision_tower.encoder.layers.{}.mlp: fc1 fc2",
            "model.vision_tower.encoder.layers.{}.self_attn: k_proj out_proj q_proj v_proj",
        ),
    ),
    **dict.fromkeys(
        ("mistral3",),
        (
            ": lm_head",
            "model.language_model.layers.{}.mlp: down_proj gate_proj up_proj",
            "model.language_model.layers.{}.self_attn: k_proj o_proj q_proj v_proj",
            "model.multi_modal_projector: linear_1 linear_2",
            "model.multi_modal_projector.patch_merger: merging_layer",
            "model.vision_tower.transformer.layers.{}.attention: k_proj o_proj q_proj v_proj",
            "model.vision_tower.transformer.layers.{}.feed_forward: down_proj gate_proj up_proj",
        ),
    ),
    **dict.fromkeys(
        ("mllama",),
        (
            ": lm_head",
            "model.layers.{}.cross_attn: k_proj o_proj q_proj v_proj",
            "model.layers.{}.mlp: down_proj gate_proj up_proj",
            "model.layers.{}.self_attn: k_proj o_proj q_proj v_proj",
        ),
    ),
    **dict.fromkeys(
        ("modernbert",),
        (": decoder", "head: dense", "model.layers.{}.attn: Wo Wqkv", "model.layers.{}.mlp: Wi Wo"),
    ),
    **dict.fromkeys(
        ("mpt",),
        (
            ": lm_head",
            "transformer.blocks.{}.attn: Wqkv out_proj",
            "transformer.blocks.{}.ffn: down_proj up_proj",
        ),
    ),
    **dict.fromkeys(
        ("mt5",),
        (
            "decoder.block.{}.layer.{}.DenseReluDense: wi_0 wi_1 wo",
            "decoder.block.{}.layer.{}.EncDecAttention: k o q v",
            "decoder.block.{}.layer.{}.SelfAttention: k o q v",
            "encoder.block.{}.layer.{}.DenseReluDense: wi_0 wi_1 wo",
            "encoder.block.{}.layer.{}.SelfAttention: k o q v",
            ": lm_head",
        ),
    ),
    **dict.fromkeys(
        ("nemotron",),
        (
            ": lm_head",
            "model.layers.{}.mlp: down_proj up_proj",
            "model.layers.{}.self_attn: k_proj o_proj q_proj v_proj",
        ),
    ),
    **dict.fromkeys(
        ("nemotron_h",),
        (
            ": lm_head",
            "model.layers.{}.mixer: down_proj in_proj k_proj o_proj out_proj q_proj up_proj v_proj",
        ),
    ),
    **dict.fromkeys(
        ("opt",),
        (
            ": lm_head",
            "model.decoder.layers.{}: fc1 fc2",
            "model.decoder.layers.{}.self_attn: k_proj out_proj q_proj v_proj",
            "model.decoder: project_in project_out",
        ),
    ),
    **dict.fromkeys(
        ("phi",),
        (
            ": lm_head",
            "model.layers.{}.mlp: fc1 fc2",
            "model.layers.{}.self_attn: dense k_proj q_proj v_proj",
        ),
    ),
    **dict.fromkeys(
        ("phi3",),
        (
            ": lm_head",
            "model.layers.{}.mlp: down_proj gate_up_proj",
            "model.layers.{}.self_attn: o_proj qkv_proj",
        ),
    ),
    **dict.fromkeys(
        ("phimoe",),
        (
            ": lm_head",
            "model.layers.{}.mlp: router",
            "model.layers.{}.self_attn: k_proj o_proj q_proj v_proj",
        ),
    ),
    **dict.fromkeys(
        ("qwen2_5_vl",),
        (
            ": lm_head",
            "model.language_model.layers.{}.mlp: down_proj gate_proj up_proj",
            "model.language_model.layers.{}.self_attn: k_proj o_proj q_proj v_proj",
            "model.visual.blocks.{}.attn: proj qkv",
            "model.visual.blocks.{}.mlp: down_proj gate_proj up_proj",
            "model.visual.merger.mlp: 0 2",
        ),
    ),
    **dict.fromkeys(
        ("qwen2_audio",),
        (
            ": lm_head",
            "model.audio_tower.layers.{}: fc1 fc2",
            "model.audio_tower.layers.{}.self_attn: k_proj out_proj q_proj v_proj",
            "model.language_model.layers.{}.mlp: down_proj gate_proj up_proj",
            "model.language_model.layers.{}.self_attn: k_proj o_proj q_proj v_proj",
            "model.multi_modal_projector: linear",
        ),
    ),
    **dict.fromkeys(
        ("qwen2_moe",),
        (
            ": lm_head",
            "model.layers.{}.mlp.shared_expert: down_proj gate_proj up_proj",
            "model.layers.{}.mlp: shared_expert_gate",
            "model.layers.{}.self_attn: k_proj o_proj q_proj v_proj",
        ),
    ),
    **dict.fromkeys(
        ("qwen2_vl",),
        (
            ": lm_head",
            "model.language_model.layers.{}.mlp: down_proj gate_proj up_proj",
            "model.language_model.layers.{}.self_attn: k_proj o_proj q_proj v_proj",
            "model.visual.blocks.{}.attn: proj qkv",
            "model.visual.blocks.{}.mlp: fc1 fc2",
            "model.visual.merger.mlp: 0 2",
        ),
    ),
    **dict.fromkeys(
        ("qwen3_5",),
        (
            ": lm_head",
            "model.layers.{}.linear_attn: in_proj_a in_proj_b in_proj_qkv in_proj_z out_proj",
            "model.layers.{}.mlp: down_proj gate_proj up_proj",
            "model.layers.{}.self_attn: k_proj o_proj q_proj v_proj",
        ),
    ),
    **dict.fromkeys(
        ("qwen3_5_moe", "qwen3_5_moe_text"),
        (
            ": lm_head",
            "model.layers.{}.linear_attn: in_proj_a in_proj_b in_proj_qkv in_proj_z out_proj",
            "model.layers.{}.mlp.shared_expert: down_proj gate_proj up_proj",
            "model.layers.{}.mlp: shared_expert_gate",
            "model.layers.{}.self_attn: k_proj o_proj q_proj v_proj",
        ),
    ),
    **dict.fromkeys(
        ("qwen3_next",),
        (
            ": lm_head",
            "model.layers.{}.linear_attn: in_proj_ba in_proj_qkvz out_proj",
            "model.layers.{}.mlp.shared_expert: down_proj gate_proj up_proj",
            "model.layers.{}.mlp: shared_expert_gate",
            "model.layers.{}.self_attn: k_proj o_proj q_proj v_proj",
        ),
    ),
    **dict.fromkeys(
        ("qwen3_vl",),
        (
            ": lm_head",
            "model.language_model.layers.{}.mlp: down_proj gate_proj up_proj",
            "model.language_model.layers.{}.self_attn: k_proj o_proj q_proj v_proj",
            "model.visual.blocks.{}.attn: proj qkv",
            "model.visual.blocks.{}.mlp: linear_fc1 linear_fc2",
            "model.visual.deepstack_merger_list.{}: linear_fc1 linear_fc2",
            "model.visual.merger: linear_fc1 linear_fc2",
        ),
    ),
    **dict.fromkeys(
        ("qwen3_vl_moe",),
        (
            ": lm_head",
            "model.language_model.layers.{}.self_attn: k_proj o_proj q_proj v_proj",
            "model.visual.blocks.{}.attn: proj qkv",
            "model.visual.blocks.{}.mlp: linear_fc1 linear_fc2",
            "model.visual.deepstack_merger_list.{}: linear_fc1 linear_fc2",
            "model.visual.merger: linear_fc1 linear_fc2",
        ),
    ),
    **dict.fromkeys(
        ("roberta", "xlm-roberta"),
        (
            "lm_head: decoder dense",
            "roberta.encoder.layer.{}.attention.output: dense",
            "roberta.encoder.layer.{}.attention.self: key query value",
            "roberta.encoder.layer.{}.intermediate: dense",
            "roberta.encoder.layer.{}.output: dense",
        ),
    ),
    **dict.fromkeys(
        ("starcoder2",),
        (
            ": lm_head",
            "model.layers.{}.mlp: c_fc c_proj",
            "model.layers.{}.self_attn: k_proj o_proj q_proj v_proj",
        ),
    ),
    **dict.fromkeys(
        ("t5",),
        (
            "decoder.block.{}.layer.{}.DenseReluDense: wi wo",
            "decoder.block.{}.layer.{}.EncDecAttention: k o q v",
            "decoder.block.{}.layer.{}.SelfAttention: k o q v",
            "encoder.block.{}.layer.{}.DenseReluDense: wi wo",
            "encoder.block.{}.layer.{}.SelfAttention: k o q v",
            ": lm_head",
        ),
    ),
    **dict.fromkeys(
        ("whisper",),
        (
            "model.decoder.layers.{}.encoder_attn: k_proj out_proj q_proj v_proj",
            "model.decoder.layers.{}: fc1 fc2",
            "model.decoder.layers.{}.self_attn: k_proj out_proj q_proj v_proj",
            "model.encoder.layers.{}: fc1 fc2",
            "model.encoder.layers.{}.self_attn: k_proj out_proj q_proj v_proj",
            ": proj_out",
        ),
    ),
}
