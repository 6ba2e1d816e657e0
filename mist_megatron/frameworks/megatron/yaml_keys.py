"""Keys of YAML files that configure Megatron-core -> the flags that say the same. Data.

NeMo 1 (`model:` beside `trainer:`), NeMo 2 and Megatron-Bridge (dataclasses of Megatron-core by their
fields), and Megatron's own `--yaml-cfg`. A key that is a flag with underscores needs no line here; what
stands in none of these tables and is no flag is named by `lint`, and then nothing is priced.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

RENAMED: Mapping[str, str] = MappingProxyType(
    {
        "encoder_seq_length": "seq-length",
        "sequence_length": "seq-length",
        "num_moe_experts": "num-experts",
        "layernorm_epsilon": "norm-epsilon",
        "rotary_percentage": "rotary-percent",
        "seq_len_interpolation_factor": "rotary-seq-len-interpolation-factor",
        "virtual_pipeline_model_parallel_size": "num-virtual-stages-per-pipeline-rank",
        "num_layers_in_first_pipeline_stage": "decoder-first-pipeline-num-layers",
        "num_layers_in_last_pipeline_stage": "decoder-last-pipeline-num-layers",
        "microbatch_group_size_per_vp_stage": "microbatch-group-size-per-virtual-pipeline-stage",
        "activations_checkpoint_granularity": "recompute-granularity",
        "activations_checkpoint_method": "recompute-method",
        "activations_checkpoint_num_layers": "recompute-num-layers",
        "ub_tp_comm_overlap": "tp-comm-overlap",
        "ub_tp_comm_overlap_cfg": "tp-comm-overlap-cfg",
        "scale_positional_embedding": "use-rope-scaling",
        "rope_scaling": "use-rope-scaling",
        "overlap_grad_sync": "overlap-grad-reduce",
        "overlap_param_sync": "overlap-param-gather",
        "fp8_params": "fp8-param-gather",
        "fp8_param": "fp8-param-gather",
        "nccl_ub": "use-nccl-ub",
        "sharp": "use-sharp",
        "bucket_size": "ddp-bucket-size",
        "num_buckets": "ddp-num-buckets",
        "average_in_collective": "ddp-average-in-collective",
        "pad_buckets_for_high_nccl_busbw": "ddp-pad-buckets-for-high-nccl-busbw",
        "reduce_scatter_with_fp32_accumulation": "ddp-reduce-scatter-with-fp32-accumulation",
        "use_custom_fsdp": "use-megatron-fsdp",
        "overlap_p2p_comm_warmup_flush": "overlap-p2p-communication-warmup-flush",
        "qkv_bias": "add-qkv-bias",
    }
)

OFF: Mapping[str, str] = MappingProxyType(
    {
        "bias": "disable-bias-linear",
        "add_bias_linear": "disable-bias-linear",
        "share_embeddings_and_output_weights": "untie-embeddings-and-output-weights",
        "bias_activation_fusion": "no-bias-gelu-fusion",
        "bias_dropout_add_fusion": "no-bias-dropout-fusion",
        "apply_rope_fusion": "no-rope-fusion",
        "overlap_p2p_comm": "no-overlap-p2p-communication",
    }
)
"""On where nothing is said; the flag stands for off. Those of `--no-KEY` and `--disable-KEY` need no line."""

HARMLESS: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "accumulate_grad_batches": (1,),
        "accelerator": ("gpu", "cuda", "auto"),
        "attention_type": ("multihead",),
        "transformer_block_type": ("pre_ln",),
        "headscale": (False,),
        "normalize_attention_scores": (True,),
        "ffn_dropout": (0, 0.0),
        "embedding_dropout": (0, 0.0),
        "megatron_legacy": (False,),
        "use_emha": (False,),
        "fsdp": (False,),
        "cpu_offloading": (False,),
        "num_micro_batches_with_partial_activation_checkpoints": (0,),
        "num_microbatches_with_partial_activation_checkpoints": (0,),
        "activations_checkpoint_layers_per_pipeline": (0,),
        "fp8_dot_product_attention": (False,),
        "fp8_multi_head_attention": (False,),
        "fp4": (False,),
        "fp4_param": (False,),
        "tp_comm_overlap_disable_qkv": (False,),
        "tp_comm_overlap_disable_fc1": (False,),
        "tp_comm_atomic_ag": (False,),
        "tp_comm_atomic_rs": (False,),
        "activation_func_fp8_input_store": (False,),
        "variable_seq_lengths": (False,),
        "moe_token_dropping": (False,),
        "memory_efficient_layer_norm": (False,),
        "use_arbitrary_attention_mask": (False,),
        "peft_scheme": ("none", ""),
        "reset_attention_mask": (False,),
        "cpu_offloading_num_layers": (0,),
        "async_tensor_model_parallel_allreduce": (True,),
        "deterministic": (False,),
        "detect_anomaly": (False,),
        "fp32": (False,),
        "num_layers_at_start_in_bf16": (0,),
        "num_layers_at_end_in_bf16": (0,),
        "autocast_enabled": (False,),
        "use_inference_optimized_layers": (False,),
        "fused_single_qkv_rope": (False,),
        "moe_router_topk_limited_devices": (),
        "store_param_remainders": (True,),
        "restore_modelopt_state": (False,),
        "param_name_patterns_for_fp32_local_accumulation": (),
        "overfit_batches": (0, 0.0),
        "use_kitchen": (False,),
        "use_layer_wise_distributed_optimizer": (False,),
        "softmax_scale": (),
        "enable_cuda_graph": (False,),
        "strategy": ("auto", "ddp"),
        "pipeline_model_parallel_split_rank": (0,),
        "external_cuda_graph": (False,),
        "moe_extended_tp": (False,),
        "expert_gtp_weight_remat_size": (0, 1),
        "gtp_weight_remat_size": (0, 1),
        "quant_recipe": (),
        "experimental_attention_variant_loss_scale_func": (),
        "heterogeneous_block_specs": (False,),
        "packed_sequence": (False,),
        "packed_sequence_size": (-1, 0),
        "packed_sequence_specs": (),
    }
)
"""Key -> the values with which it says what is priced anyway; none of them but null where there are none."""

_INDIFFERENT = """
adaptive_muon_beta2 adaptive_muon_eps adaptive_muon_moment2_method amp_backend amp_level
apex_transformer_log_level auto_lr_find autocast_dtype barebones barrier_with_L1_time batch_p2p_comm
batch_p2p_sync benchmark bert_binary_head betas bucket_cap_mb callbacks capturable check_for_nan_in_grad
check_val_every_n_epoch checkpoint_io ckpt_assume_constant_structure ckpt_async_save
ckpt_include_optimizer ckpt_load_directly_on_device ckpt_load_main_params ckpt_load_optimizer
ckpt_load_strictness ckpt_parallel_load ckpt_parallel_save ckpt_parallel_save_optim
ckpt_parallel_save_within_dp ckpt_save_optimizer ckpt_torch_dist_multiproc cluster_environment
config_logger_dir contiguous_grad_buffer contiguous_param_buffer cpu_offloading_activations
cpu_offloading_double_buffering cpu_offloading_weights cuda_graph_retain_backward_graph
cuda_graph_use_single_mempool data data_sampler deallocate_pipeline_outputs decoupled_weight_decay
default_root_dir devices disable_parameter_transpose_cache dist_ckpt_assume_constant_structure
dist_ckpt_format dist_ckpt_load_on_device dist_ckpt_load_strictness dist_ckpt_parallel_dist_opt
dist_ckpt_parallel_load dist_ckpt_parallel_save dist_ckpt_parallel_save_within_dp
dist_ckpt_torch_dist_multiproc do_layer_norm_weight_decay dsa_indexer_rotate_activation
dsa_indexer_scoring_relu embedding_init_method enable_autocast enable_checkpointing enable_megatron_timers
enable_model_summary enable_one_logger enable_progress_bar eps fast_dev_run finalize_model_grads_func
find_unused_parameters fp8_amax_compute_algo fp8_amax_history_len fp8_interval fp8_margin
fsdp_all_gather_in_start_param_sync fsdp_grad_reduce_dtype fsdp_sharded_checkpoint fsdp_sharding_strategy
fsdp_use_orig_params gc_interval get_attention_mask_from_fusion grad_allreduce_chunk_size_mb
grad_div_ar_fusion grad_norm_skip_threshold grad_scale_func grad_sync_func gradient_as_bucket_view
gradient_clip_algorithm gradient_clip_val hetereogenous_dist_checkpoint hf_model_id inference
inference_mode inference_sampling_seed init_method init_model_parallel layernorm_zero_centered_gamma
lazy_init limit_test_batches limit_train_batches limit_val_batches log_every_n_steps logger lr
lr_scheduler max_epochs max_steps max_time mcore_gpt megatron_fsdp_cuda_graph_mode
megatron_fsdp_use_decoupled_grad megatron_log_level megatron_timer_kwargs min_epochs min_steps
moe_grad_scale_func move_metrics_to_cpu mtp_enabled mtp_grad_scale_func muon_split_qkv name
native_amp_growth_interval native_amp_init_scale nemo_path nemo_version no_sync_func no_weight_decay_cond
nsys_profile num_nodes num_sanity_val_steps one_logger_entity one_logger_run_name optim
output_layer_init_method parallel_devices parallel_output param_sync_func params_dtype
perform_initialization pipeline_dtype plugins post_process pre_process precision profiler
progress_interval reduce_amax reload_dataloaders_every_n_epochs replace_progress_bar replace_sampler_ddp
restore_config restore_from_ckpt restore_from_path resume_from_checkpoint retriever_seq_length rng_tracker
rotary_interleaved save_ckpt_format save_nemo_on_validation_end scale_lr_cond
scatter_embedding_sequence_parallel scatter_gather_tensors_in_pipeline sched seed setup_optimizers
should_pad_vocab soap_precondition_frequency soap_shampoo_beta soap_use_kl_shampoo
standalone_embedding_stage sync_batch_comm sync_batchnorm target te_rng_tracker timers tokenizer
tp_only_amax_red track_grad_norm use_cpu_initialization use_distributed_sampler use_flash_attention
use_gloo_process_groups use_mamba_mem_eff_path use_scaled_init_method use_te_rng_tracker
use_transformer_engine_full_layer_spec val_check_interval validation_drop_last version weight_decay
weights_summary
"""
INDIFFERENT = frozenset(_INDIFFERENT.split())
"""Without effect on a step's time and memory, or read where the file's layout is known."""

_SECTIONS = """
base_config base_results_dir callbacks checkpoint checkpoints cluster cluster_type comm_overlap container
container_mounts data data_dir dataset ddp defaults dist env_vars eval exp_manager ft gpt_configs hydra
inference inprocess_restart launcher_scripts_path log logger mcore_version mixed_precision model name
nemo_version numa_mapping nvrx optim optimizer optimizer_config_override_provider perf_env profiling
prompts rerun_state_machine restore_from_ckpt restore_from_hparams_path restore_from_path resume
resume_from_checkpoint rng run scheduler seed server stages straggler tensor_inspect tokenizer train
trainer training training_config validation wandb_api_key_file
"""
SECTIONS = frozenset(_SECTIONS.split())
"""Sections of a whole file that are read, or that say nothing of a step."""

NEMO_1_DEFAULTS: Mapping[str, object] = MappingProxyType(
    {
        "transformer_engine": False,
        "megatron_amp_O2": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "overlap_p2p_comm": False,
    }
)
"""What NeMo 1 takes where its file says nothing and Megatron takes the opposite."""
