"""Megatron's command line beyond its configurations: arguments that no tiled layer can notice, and why not.

Most of what stands on a command line never reaches a layer. It is listed all the same: what stands in no table is new, and must be at its default
until somebody has looked at it.
"""

from __future__ import annotations

from .allowlist_rules import gated, irrelevant, merged

_MODEL = merged(
    (
        irrelevant(
            "becomes a field of a configuration, which is classed and checked when the model stands",
            "accumulate_allreduce_grads_in_fp32 bias_gelu_fusion bias_swiglu_fusion check_for_nan_in_loss_and_grad decoder_first_pipeline_num_layers "
            "decoder_last_pipeline_num_layers decoder_num_layers encoder_num_layers ddp_average_in_collective ddp_bucket_size ddp_num_buckets "
            "ddp_pad_buckets_for_high_nccl_busbw ddp_reduce_scatter_with_fp32_accumulation grad_reduce_in_bf16 group_query_attention "
            "init_method_xavier_uniform no_persist_layer_norm num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank "
            "openai_gelu quick_geglu squared_relu swiglu te_rng_tracker",
        ),
        irrelevant(
            "positions: frequencies and position embeddings come from outside, their rows are cut by tile",
            "add_position_embedding max_position_embeddings reset_position_ids rope_scaling_factor rotary_seq_len_interpolation_factor use_rope_scaling "
            "use_rotary_position_embeddings yarn_beta_fast yarn_beta_slow yarn_correction_range_round_to_int yarn_original_max_position_embeddings",
        ),
        irrelevant(
            "acts on embedding, loss or logits, outside the layers",
            "fp16_lm_cross_entropy logit_dtype logits_load_decode_threads logits_load_dir logits_load_ignore_errors logits_load_kd_loss_alpha "
            "logits_load_msc_prefetch_depth logits_load_prefetch_factor logits_save_dir logits_save_dtype logits_save_top_k logits_save_top_p "
            "logits_save_top_p_min_k make_vocab_size_divisible_by pad_vocab_size padded_vocab_size untie_embeddings_and_output_weights vocab_size",
        ),
        irrelevant("how Megatron's own functions are compiled; tiled layers call the same ones", "disable_jit_fuser enable_experimental"),
        irrelevant("read by nothing but legacy models, which are refused", "onnx_safe use_flash_attn"),
        irrelevant("Megatron itself ends the job when it is given", "batch_size checkpoint_activations model_parallel_size warmup"),
        irrelevant(
            "of other scripts (BERT, T5, retrieval, vision), whose models are refused when they stand",
            "bert_binary_head bert_embedder_type bert_load biencoder_projection_dim biencoder_shared_query_context_model block_data_path "
            "classes_fraction data_per_class_fraction decoder_seq_length dino_bottleneck_size dino_freeze_last_layer dino_head_hidden_size "
            "dino_local_crops_number dino_local_img_size dino_norm_last_layer dino_teacher_temp dino_warmup_teacher_temp "
            "dino_warmup_teacher_temp_epochs embedding_path evidence_data_path head_lr_mult ict_head_size ict_load img_h img_w indexer_batch_size "
            "indexer_log_interval iter_per_epoch mask_factor mask_prob mask_type num_channels num_classes output_bert_embeddings patch_dim "
            "query_in_block_prob retriever_report_topk_accuracies retriever_score_scaling short_seq_prob swin_backbone_type titles_data_path "
            "use_one_sent_docs vision_backbone_type vision_pretraining vision_pretraining_type vocab_extra_ids",
        ),
    )
)

_DATA = irrelevant(
    "which samples are read, in what batches",
    "allow_ambiguous_pad_tokens chat_template create_attention_mask_in_dataloader data_args_path data_cache_path data_path data_sharding "
    "dataloader_defer_npy_index_mmap dataloader_fast_cache_load dataloader_type decrease_batch_size_if_needed encoder_seq_length eod_mask_loss "
    "eval_global_batch_size eval_interval eval_iters eval_micro_batch_size fim_data fim_eod_token fim_fragment_rate fim_middle_token fim_no_prefix "
    "fim_pad_token fim_prefix_token fim_rate fim_split_sample fim_spm_rate fim_suffix_token full_validation global_batch_size iterations_to_skip "
    "merge_file metadata_path micro_batch_size mid_level_dataset_surplus mmap_bin_files mock_data multiple_validation_sets null_tokenizer_eod_id "
    "null_tokenizer_pad_id num_dataset_builder_threads num_workers object_storage_cache_path per_dataset_sequences_path per_split_data_args_path "
    "phase_transition_iterations rampup_batch_size sample_rate seq_length sft_tokenizer_prompt_format special_tokens split start_eval_at_iter "
    "step_batch_size_schedule test_data_path tiktoken_num_special_tokens tiktoken_pattern tiktoken_special_tokens "
    "tokenizer_hf_include_special_tokens tokenizer_hf_no_include_special_tokens tokenizer_hf_no_use_fast tokenizer_hf_use_fast tokenizer_metadata "
    "tokenizer_model tokenizer_sentencepiece_ignore_extra_whitespaces tokenizer_sentencepiece_legacy tokenizer_special_tokens tokenizer_type "
    "train_data_path trust_remote_code use_gigatoken valid_data_path validation_set_names vocab_file",
)

_LOOP = merged(
    (
        irrelevant(
            "acts on weights or gradients outside the layers",
            "dump_param_to_param_group_map end_weight_decay lr_decay_iters lr_decay_samples lr_decay_style lr_warmup_fraction lr_warmup_init "
            "lr_warmup_iters lr_warmup_samples lr_wsd_decay_iters lr_wsd_decay_samples lr_wsd_decay_style no_weight_decay_cond_type "
            "override_opt_param_scheduler start_weight_decay use_checkpoint_opt_param_scheduler use_layer_wise_param_layout weight_decay_incr_style",
        ),
        irrelevant(
            "how many steps, and what happens between them",
            "adlr_autoresume adlr_autoresume_interval check_for_spiky_loss check_weight_hash_across_dp_replicas_interval empty_unused_memory_level "
            "error_injection_rate error_injection_type exit_duration_in_mins exit_interval exit_signal exit_signal_handler "
            "exit_signal_handler_for_dataloader exit_signal_handler_for_training fault_injector_delay_start_iteration fault_injector_fault_delay "
            "fault_injector_fault_probabilities fault_injector_fault_types fault_injector_mtti_seconds fault_injector_num_ranks "
            "fault_injector_offset_seconds fault_injector_ranks fault_injector_seed gpu_sniff_test_interval help manual_gc manual_gc_eval "
            "manual_gc_interval rerun_mode result_rejected_tracker_filename seed skip_train train_iters train_samples train_sync_interval",
        ),
        irrelevant(
            "checkpoints; layers keep their parameters and names",
            "async_ckpt_cpu_priority async_ckpt_io_priority async_ckpt_use_cpu_shm async_save async_strategy auto_detect_ckpt_format "
            "ckpt_assume_constant_structure ckpt_convert_format ckpt_convert_save ckpt_convert_update_legacy_dist_opt_format "
            "ckpt_drop_redundant_extra_state ckpt_format ckpt_fully_parallel_load ckpt_fully_parallel_load_exchange_algo "
            "ckpt_fully_parallel_load_per_rank_objects ckpt_fully_parallel_load_process_group ckpt_fully_parallel_save "
            "ckpt_fully_parallel_save_deprecated ckpt_fully_parallel_save_process_group ckpt_load_validate_sharding_integrity "
            "ckpt_pg_tensors_cache_create ckpt_pg_tensors_cache_path ckpt_step disable_msc_deprecated dist_ckpt_format_deprecated "
            "dist_ckpt_optim_fully_reshardable dist_ckpt_save_pre_mcore_014 dist_ckpt_strictness dist_ckpt_workers "
            "distrib_optim_fully_reshardable_mem_efficient enable_msc exit_on_missing_checkpoint finetune load load_main_params_from_ckpt "
            "no_load_optim no_load_rng no_save_optim no_save_rng non_persistent_ckpt_type non_persistent_global_ckpt_dir "
            "non_persistent_local_ckpt_algo non_persistent_local_ckpt_dir non_persistent_save_interval override_ckpt_iteration "
            "pretrained_checkpoint replication replication_factor replication_jump save save_interval save_params_interval save_retain_interval "
            "save_tokenizer_assets save_wgrads_interval stream_ckpt_dequant strict_fsdp_dtensor_load use_dist_ckpt_deprecated "
            "use_persistent_ckpt_worker use_tokenizer_model_from_checkpoint_args verify_integrity",
        ),
        irrelevant(
            "settings that a checkpoint brings; configurations and arguments are checked again when the model stands",
            "deprecated_use_mcore_models use_checkpoint_args use_mp_args_from_checkpoint_args",
        ),
        irrelevant(
            "logs, traces and profiles",
            "app_tag_run_name app_tag_run_version calc_ft_timeouts disable_straggler_on_startup enable_ft_package enable_one_logger "
            "flight_recorder_dump_on_timeout flight_recorder_dump_path flight_recorder_extra_dump_on_exec flight_recorder_include_only_active "
            "flight_recorder_include_stack_trace flight_recorder_trace_buffer_size ft_num_warmup_iters log_device_memory_used log_energy "
            "log_interval log_loss_scale_to_tensorboard log_memory_interval log_memory_to_tensorboard log_params_norm log_progress log_straggler "
            "log_throughput log_timers_to_tensorboard log_validation_ppl_to_tensorboard log_world_size_to_tensorboard logging_level "
            "memory_snapshot_path nvtx_ranges one_logger_async one_logger_project one_logger_run_name otel_enabled otel_service_name "
            "otel_span_groups profile profile_ranks profile_step_end profile_step_start pytorch_profiler_collect_callstack "
            "pytorch_profiler_collect_chakra pytorch_profiler_collect_shapes record_memory_history record_shapes run_workload_inspector_server "
            "straggler_ctrlr_port straggler_minmax_count tensorboard_dir tensorboard_log_interval tensorboard_queue_size timing_log_level "
            "timing_log_option use_pytorch_profiler wandb_entity wandb_exp_name wandb_project wandb_save_dir",
        ),
        irrelevant(
            "process groups and how they communicate; layers use the model's",
            "align_grad_reduce create_all_gather_group data_parallel_random_init distributed_backend distributed_timeout_minutes "
            "distributed_timeout_seconds_after_init high_priority_stream_groups lazy_mpu_init local_rank nccl_communicator_config_path "
            "scatter_gather_tensors_in_pipeline sharp_enabled_group use_gloo_process_groups use_sharp use_tp_pp_dp_mapping",
        ),
        irrelevant(
            "read by inference only",
            "enable_chunked_prefill inference_batch_times_seqlen_threshold inference_coordinator_port inference_cuda_graph_all_prefills "
            "inference_cuda_graph_max_tokens inference_disable_ep_consensus inference_dynamic_batching inference_dynamic_batching_async_sched_mode "
            "inference_dynamic_batching_block_size inference_dynamic_batching_buffer_size_gb inference_dynamic_batching_cuda_graph_max_tokens "
            "inference_dynamic_batching_cuda_graph_mixed_prefill_count inference_dynamic_batching_cuda_graph_sizing_distribution "
            "inference_dynamic_batching_enable_prefix_caching inference_dynamic_batching_logprobs_mode "
            "inference_dynamic_batching_mamba_memory_ratio inference_dynamic_batching_max_requests inference_dynamic_batching_max_tokens "
            "inference_dynamic_batching_num_cuda_graphs inference_dynamic_batching_paused_buffer_size_gb "
            "inference_dynamic_batching_prefix_caching_coordinator_policy inference_dynamic_batching_prefix_caching_eviction_policy "
            "inference_dynamic_batching_prefix_caching_mamba_gb inference_dynamic_batching_prefix_caching_routing_alpha "
            "inference_dynamic_batching_sampling_backend inference_dynamic_batching_track_generated_token_events "
            "inference_dynamic_batching_track_paused_request_events inference_dynamic_batching_unified_memory_level "
            "inference_logging_step_interval inference_max_requests inference_max_seq_length inference_shards inference_text_gen_server_logging "
            "inference_use_synchronous_zmq_collectives inference_wandb_logging mamba_inference_conv_states_dtype mamba_inference_ssm_states_dtype "
            "max_tokens_to_oom num_speculative_tokens offset_sampling_seed_by_dp_rank use_legacy_static_engine",
        ),
    )
)

_GATED = merged(
    (
        gated("cuda_graph_impl", "cuda_graph_scope_deprecated decode_only_cuda_graphs"),
        gated("gtp_weight_remat_size", "gtp_expert_remat_nccl_ub gtp_remat_nccl_ub gtp_remat_reduce_scatter_with_fp32_accumulation"),
        gated("num_moe_experts", "moe_routing_trace_capture_hidden_states moe_routing_trace_capture_logits moe_routing_trace_dump_weights "
              "moe_routing_trace_max_training_iters moe_routing_trace_path moe_upcycling_granularity moe_use_upcycling "
              "save_tokens_per_expert_interval"),
        gated("position_embedding_type", "relative_attention_max_distance relative_attention_num_buckets"),
        gated("tp_comm_overlap", "tp_comm_overlap_cfg"),
        gated("use_megatron_fsdp", "enable_full_sharding_in_hsdp"),
        gated("use_torch_fsdp2", "torch_fsdp2_reshard_after_forward"),
        gated("inprocess_restart", "inprocess_active_world_size inprocess_barrier_timeout inprocess_completion_timeout inprocess_empty_cuda_cache "
              "inprocess_granularity inprocess_hard_timeout inprocess_heartbeat_interval inprocess_heartbeat_timeout inprocess_last_call_wait "
              "inprocess_max_iterations inprocess_monitor_process_interval inprocess_monitor_thread_interval "
              "inprocess_progress_watchdog_interval inprocess_soft_timeout inprocess_termination_grace_time"),
        gated("perform_rl_step", "grpo_clamp_eps_lower grpo_clamp_eps_upper grpo_entropy_term_weight grpo_filter_groups_with_same_reward "
              "grpo_group_size grpo_iterations grpo_kl_beta grpo_prompts_per_step langrl_env_config refit_method rl_consumption_granularity "
              "rl_default_temperature rl_default_top_k rl_default_top_p rl_durable_rollout_bank rl_generation_batch_size rl_generation_lag "
              "rl_importance_sampling_truncation_coef rl_inference_expert_model_parallel_size rl_inference_expert_tensor_model_parallel_size "
              "rl_inference_logprobs_is_correction rl_inference_model_unified_memory_level rl_inference_parsers "
              "rl_inference_pipeline_model_parallel_size rl_inference_tensor_model_parallel_size rl_kv_cache_management_mode "
              "rl_max_inflight_requests rl_num_parallel_generation_batches rl_num_parallel_generations "
              "rl_offload_inference_model_weights_when_idle rl_offload_optimizer_during_inference rl_parallel_generation_tasks "
              "rl_partial_rollouts rl_persist_cuda_graphs rl_profile rl_profile_dir rl_prompts_per_eval rl_rollout_bank_dir "
              "rl_rollout_bank_max_bytes rl_sequence_packing_algo rl_sequence_packing_max_sequences_per_bin rl_skip_bos_token "
              "rl_submission_granularity rl_training_cuda_graphs rl_use_sequence_packing rl_verify_model_weights_swap"),
    )
)

OUTSIDE_ARGUMENTS = merged((_MODEL, _DATA, _LOOP, _GATED))
