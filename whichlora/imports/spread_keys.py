"""Keys that accelerate's and DeepSpeed's files may have; others are misspelt, or not predicted.

Left out are those that change bytes or time in a way that no strategy reads, such as
`zero_hpz_partition_size` and `megatron_lm_config`. Source: accelerate 1.15 `ClusterConfig`,
`accelerate launch --help`, `FullyShardedDataParallelPlugin`; transformers 5.23
`TrainingArguments._process_fsdp_args`; deepspeed 0.19.8 `runtime/constants.py`, `zero/config.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from whichlora.parallel.deepspeed import STAGE_3


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# of accelerate's file, and options of its launcher, which have the same names
_OF_DEEPSPEED_PLUGIN = _names(
    "deepspeed_config_file deepspeed_exclusion_filter deepspeed_hostfile "
    "deepspeed_inclusion_filter deepspeed_moe_layer_cls_names deepspeed_multinode_launcher "
    "gradient_accumulation_steps gradient_clipping offload_optimizer_device "
    "offload_optimizer_nvme_path offload_param_device offload_param_nvme_path "
    "zero3_init_flag zero3_save_16bit_model zero_stage"
)
_OF_ACCELERATE = _OF_DEEPSPEED_PLUGIN | _names(
    "command_file commands compute_environment config_file debug deepspeed_config "
    "distributed_type downcast_bf16 dynamo_backend dynamo_config dynamo_mode "
    "enable_cpu_affinity fsdp_config gpu_ids log_dir machine_rank main_process_ip "
    "main_process_port main_training_function max_restarts mixed_precision module "
    "monitor_interval mpirun_config multi_gpu no_python num_cpu_threads_per_process "
    "num_machines num_processes parallelism_config quiet rdzv_backend rdzv_conf role "
    "same_network tee tpu_env tpu_name tpu_use_cluster tpu_use_sudo tpu_zone use_cpu "
    "use_deepspeed use_fsdp"
)
_OF_FSDP = _names(
    "activation_checkpointing auto_wrap_policy backward_prefetch backward_prefetch_policy "
    "cpu_offload cpu_ram_efficient_loading forward_prefetch limit_all_gathers min_num_params "
    "offload_params reshard_after_forward sharding_strategy state_dict_type sync_module_states "
    "transformer_layer_cls_to_wrap use_orig_params version"
)
_OF_DEEPSPEED = _names(
    "bf16 checkpoint comms_config communication_data_type data_types dataloader_drop_last "
    "disable_allgather flops_profiler fp16 gradient_accumulation_steps gradient_clipping "
    "gradient_predivide_factor monitor_config optimizer prescale_gradients scheduler "
    "sparse_gradients steps_per_print tensorboard "
    "train_batch_size train_micro_batch_size_per_gpu wall_clock_breakdown wandb "
    "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization"
)
_OF_ZERO = _names(
    "allgather_bucket_size allgather_partitions contiguous_gradients cpu_offload "
    "cpu_offload_param cpu_offload_use_pin_memory elastic_checkpoint "
    "ignore_unused_parameters load_from_fp32_weights offload_optimizer offload_param overlap_comm "
    "reduce_bucket_size reduce_scatter round_robin_gradients stage sub_group_size "
    "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save "
    "stage3_max_live_parameters stage3_max_reuse_distance stage3_model_persistence_threshold "
    "stage3_param_persistence_threshold stage3_prefetch_bucket_size"
)
_OF_ZERO |= {name.removeprefix(STAGE_3) for name in _OF_ZERO}


def unknown_of_accelerate(config: Mapping[str, Any]) -> Iterator[str]:
    """Keys of accelerate's file that nothing reads."""
    yield from _others(config, _OF_ACCELERATE | {f"fsdp_{name}" for name in _OF_FSDP})
    plugin = config.get("deepspeed_config")
    if isinstance(plugin, Mapping):
        known = _OF_DEEPSPEED_PLUGIN | _OF_ACCELERATE
        yield from (f"deepspeed_config.{name}" for name in _others(plugin, known))


def unknown_of_fsdp(config: Mapping[str, Any]) -> Iterator[str]:
    """Keys of `fsdp_config` that nothing reads, with or without "fsdp_" in front."""
    known = _OF_FSDP | {f"fsdp_{name}" for name in _OF_FSDP}
    yield from (f"fsdp_config.{name}" for name in _others(config, known))


def unknown_of_deepspeed(config: Mapping[str, Any]) -> Iterator[str]:
    """Keys of DeepSpeed's JSON that nothing reads."""
    yield from (f"deepspeed.{name}" for name in _others(config, _OF_DEEPSPEED))
    zero = config.get("zero_optimization")
    if isinstance(zero, Mapping):
        yield from (f"zero_optimization.{name}" for name in _others(zero, _OF_ZERO))


def _others(config: Mapping[str, Any], known: Collection[str]) -> Iterator[str]:
    return (str(name) for name in config if str(name) not in known)
