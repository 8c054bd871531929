"""How every field of TransformerConfig and ModelParallelConfig is classed, for Megatron core 0.17 to 0.20.

A tiled layer runs Megatron's own norms, linears, core attention and MLP on rows; what it replaces is the body of
TransformerLayer._forward_attention and of Attention.forward between them. So a field is supported when it acts inside what still runs and acts
on each token alone (or inside core attention, which sees the whole sequence), irrelevant when no value reaches a layer's training pass, and
refused otherwise. In doubt it is refused.
"""

from __future__ import annotations

from typing import Any, Dict, Sequence

from .allowlist_rules import NO_MEMO, Refused, gated, irrelevant, merged, refused, supported

_SUPPORTED = supported(
    # random numbers: recomputed tiles draw theirs again (COMBINATIONS in allowlist_args refuses what cannot)
    "hidden_dropout attention_dropout use_te_rng_tracker "
    # the layer's shape
    "num_layers hidden_size num_attention_heads num_query_groups ffn_hidden_size kv_channels attention_output_gate "
    # parallelism, numbers, gradients
    "tensor_model_parallel_size sequence_parallel context_parallel_size pipeline_model_parallel_size fp16 bf16 params_dtype deterministic_mode gradient_accumulation_fusion "
    "disable_bf16_reduced_precision_matmul disable_parameter_transpose_cache "
    # norms, biases, MLP: modules of Megatron that see tokens one by one
    "layernorm_epsilon layernorm_zero_centered_gamma persist_layer_norm qk_layernorm qk_l2_norm add_bias_linear add_qkv_bias "
    "gated_linear_unit activation_func glu_linear_offset activation_func_clamp_value bias_activation_fusion bias_dropout_fusion "
    # positions: the frequencies come from outside, their rows are cut by tile
    "rotary_interleaved apply_rope_fusion no_rope_freq "
    # inside core attention
    "attention_backend flash_attention_version softmax_scale attention_softmax_in_fp32 masked_softmax_fusion"
)

_OUTSIDE = merged(
    (
        irrelevant(
            "initial values only",
            "init_method output_layer_init_method init_method_std embedding_init_method embedding_init_method_std perform_initialization "
            "use_cpu_initialization",
        ),
        irrelevant("acts on embedding, loss or logits, outside the layers", "clone_scatter_output_in_embedding cross_entropy_loss_fusion "
                   "cross_entropy_fusion_impl calculate_per_token_loss"),
        irrelevant("the training loop's own", "timers finalize_model_grads_func grad_scale_func no_sync_func barrier_with_L1_time config_logger_dir"),
        irrelevant("checkpoint names only", "hetereogenous_dist_checkpoint"),
        irrelevant("read by inference only", "inference_sampling_seed inference_disable_triton_nvls_kernels inference_grouped_gemm_backend "
                   "inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type"),
        irrelevant("read by inference only", "inference_rng_tracker"),
    )
)

_GATED = merged(
    (
        irrelevant(
            "which layers a stage has, and how it sends and receives; the order of its passes is known (swap.schedule)",
            "virtual_pipeline_model_parallel_size pipeline_model_parallel_layout "
            "num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage account_for_embedding_in_pipeline_split "
            "account_for_loss_in_pipeline_split pipeline_model_parallel_comm_backend pipeline_dtype overlap_p2p_comm batch_p2p_comm batch_p2p_sync "
            "use_ring_exchange_p2p deallocate_pipeline_outputs overlap_p2p_comm_warmup_flush microbatch_group_size_per_vp_stage",
        ),
        gated("hybrid_context_parallel", "max_seqlen_per_dp_cp_rank"),
        irrelevant("when gradients are reduced and parameters gathered; the layers' modules run the hooks that do it", "grad_sync_func param_sync_func"),
        gated("mtp_num_layers", "mtp_loss_scaling_factor mtp_use_repeated_layer mtp_detach_heads mtp_hybrid_override_pattern mtp_standalone "
              "mtp_grad_scale_func mtp_hsm"),
        gated("window_size", "window_attn_skip_freq"),
        gated("qk_clip", "qk_clip_alpha qk_clip_threshold"),
        gated("symmetric_ar_type", "nccl_all_reduce_for_prefill"),
        gated("batch_invariant_mode", "batch_invariant_backend"),
        gated("enable_autocast", "autocast_dtype"),
        gated("use_mup", "mup_width_mult mup_base_hidden_size mup_embedding_mult mup_base_head_dim mup_attn_scale_power"),
        # A scaling of the logits, also without use_mup.
        irrelevant("acts on embedding, loss or logits, outside the layers", "mup_output_mult"),
        gated(
            "experimental_attention_variant",
            "experimental_attention_variant_loss_scale_func dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_topk_freq "
            "dsa_indexer_skip_topk_offset dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss dsa_kernel_backend dsa_indexer_rope_interleaved "
            "dsa_indexer_rotate_activation dsa_indexer_scoring_relu dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32 linear_conv_kernel_dim "
            "linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads",
        ),
        gated("is_hybrid_model", "mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads mamba_training_ssm_states_dtype "
              "use_mamba_mem_eff_path gdp_cutedsl_kernel gdp_num_chunk_states_to_recompute gdp_num_householder"),
        gated("recompute_granularity", "recompute_method recompute_num_layers distribute_saved_activations recompute_modules"),
        gated("cpu_offloading", "_cpu_offloading_context cpu_offloading_activations cpu_offloading_weights cpu_offloading_double_buffering "
              "cpu_offloading_retain_pinned_cpu_buffers"),
        gated("fine_grained_activation_offloading", "offload_modules min_offloaded_tensor_size delay_offload_until_cuda_graph "
              "delta_offload_bytes_across_pp_ranks activation_offload_fraction fine_grained_offloading_max_inflight_offloads"),
        gated("cuda_graph_impl", "cuda_graph_use_single_mempool cuda_graph_retain_backward_graph cuda_graph_warmup_steps cuda_graph_modules "
              "cuda_graph_scope inference_cuda_graph_scope"),
        gated("fp8", "fp8_recipe fp8_quantizer_factory fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad fp8_output_proj "
              "fp8_dot_product_attention fp8_multi_head_attention tp_only_amax_red first_last_layers_bf16 num_layers_at_start_in_bf16 "
              "num_layers_at_end_in_bf16"),
        gated("fp4", "fp4_recipe fp4_quantizer_factory"),
        gated("use_kitchen_attention", "kitchen_attention_backend"),
        gated("tp_comm_overlap", "tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_overlap_rs_dgrad "
              "tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 "
              "tp_comm_bootstrap_backend"),
        gated("defer_embedding_wgrad_compute", "wgrad_deferral_limit"),
        gated("overlap_moe_expert_parallel_comm", "ep_overlap_early_attn_memory_release high_priority_a2a_comm_stream"),
        gated("gtp_weight_remat_size", "gtp_remat_opt_in_modules"),
        gated("enable_mhc_connections", "mhc_num_residual_streams mhc_sinkhorn_iterations mhc_init_gating_factor mhc_recompute_layer_num"),
        gated("heterogeneous_block_specs", "per_block_parameters"),
        gated("multi_latent_attention", "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type rotary_base rotary_percent "
              "rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim cache_mla_latents "
              "mla_down_proj_fusion"),
        gated(
            "num_moe_experts",
            "expert_tensor_parallel_size expert_tensor_parallel_num_weight_shards expert_gtp_weight_remat_size moe_grad_scale_func "
            "use_fused_weighted_squared_relu use_grouped_gemm_for_shared_expert moe_shared_expert_intermediate_size moe_shared_expert_gate "
            "moe_shared_expert_overlap moe_shared_expert_glu_interleave_size moe_layer_freq moe_ffn_hidden_size moe_router_load_balancing_type "
            "moe_router_topk moe_enable_routing_replay moe_router_topk_limited_devices moe_router_padding_for_quantization "
            "moe_router_padding_for_fp8 "
            "moe_router_num_groups moe_router_group_topk moe_router_pre_softmax moe_router_topk_scaling_factor moe_router_score_function "
            "moe_router_dtype moe_router_enable_expert_bias moe_router_bias_update_rate moe_router_quantile_balancing_ema "
            "moe_router_force_load_balancing moe_router_force_biased moe_grouped_gemm moe_single_grouped_weight moe_single_grouped_bias "
            "moe_use_grouped_tensor moe_aux_loss_coeff moe_z_loss_coeff moe_input_jitter_eps moe_token_dropping moe_token_dispatcher_type "
            "moe_enable_deepep moe_flex_dispatcher_backend moe_permute_fusion_into_hybridep moe_hybridep_pad_uneven_dispatch_inputs "
            "moe_per_layer_logging moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_pad_experts_for_cuda_graph_inference "
            "moe_token_drop_policy moe_permute_fusion moe_router_fusion moe_apply_probs_on_input moe_latent_size moe_flex_dispatcher_num_sms "
            "moe_deepep_num_sms moe_hybridep_num_sms moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute "
            "moe_hybridep_num_sms_preprocessing moe_ncclep_static_shape moe_ncclep_zero_copy moe_mlp_glu_interleave_size "
            "moe_expert_rank_capacity_factor moe_dispatch_fwd_dtype moe_combine_bwd_dtype moe_paged_stash moe_paged_stash_page_size "
            "moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_buffer_size_factor_cpu",
        ),
    )
)


_CUT_BY = {"p2p", "a2a", "all_gather", "allgather"}


def _listed(value: Any) -> Sequence[str]:
    """One kind of communication for all layers, or one a layer."""
    return () if value is None else value if isinstance(value, (list, tuple)) else (value,)


def _one_shard_a_rank(value: Any, owner: Any) -> bool:
    return value is None or value == getattr(owner, "tensor_model_parallel_size", 1)


_OURS = "Leave it out: --memo decides what is kept, swapped and recomputed (--memo-alpha, --memo-keep, --memo-keep-layers)."
_GRAPHS = "Leave it out: swapping has no place in a CUDA graph yet."
_DENSE = "Use a dense model, or train without --memo."
_PRECISION = "Train in bf16, fp16 or fp32."

_REFUSED: Dict[str, Refused] = {
    # parallelism
    "cp_comm_type": Refused(
        "--cp-comm-type", "Set p2p, a2a or all_gather.", "p2p, a2a, all_gather", lambda value, owner: set(_listed(value)) <= _CUT_BY),
    "hierarchical_context_parallel_sizes": refused("--hierarchical-context-parallel-sizes", "Leave it out: it is for --cp-comm-type a2a+p2p.", None),
    "hybrid_context_parallel": refused("--hybrid-context-parallel", NO_MEMO),
    "expert_model_parallel_size": refused("--expert-model-parallel-size", _DENSE, 1),
    "tensor_parallel_num_weight_shards": Refused(
        "--tensor-parallel-num-weight-shards", NO_MEMO, "the tensor-parallel size", _one_shard_a_rank),
    "gtp_weight_remat_size": refused("--tensor-parallel-num-weight-shards", NO_MEMO, 1),
    "variable_seq_lengths": refused("", "Pad all samples to one length: host memory is sized for it before the first step."),
    # attention
    "softmax_type": refused("--softmax-type", NO_MEMO, "vanilla"),
    "window_size": refused("--window-size", "Use full causal attention.", None),
    "apply_query_key_layer_scaling": refused("--apply-query-key-layer-scaling", NO_MEMO),
    "qk_clip": refused("--qk-clip", NO_MEMO),
    "log_max_attention_logit": refused("--log-max-attention-logit", NO_MEMO),
    "multi_latent_attention": refused("--multi-latent-attention", "Use multi-head or grouped-query attention."),
    "fused_single_qkv_rope": refused("", "Set it to False: q, k and v of a tile are made apart."),
    "experimental_attention_variant": refused("--experimental-attention-variant", NO_MEMO, None),
    "linear_attention_freq": refused("--linear-attention-freq", NO_MEMO, None),
    "mrope_section": refused("--mrope-section", "Use --position-embedding-type rope.", None),
    "test_mode": refused("--test-mode", NO_MEMO),
    # the layer's body
    "fp32_residual_connection": refused("--fp32-residual-connection", NO_MEMO),
    "apply_residual_connection_post_layernorm": refused("--apply-residual-connection-post-layernorm", NO_MEMO),
    "normalization": refused("--normalization", "Set --normalization LayerNorm or --normalization RMSNorm.", "LayerNorm", "RMSNorm"),
    "memory_efficient_layer_norm": refused("", "Set it to False: a recomputed tile saves nothing anyway."),
    "fused_residual_rmsnorm": refused("--fused-residual-rmsnorm", NO_MEMO),
    "use_te_activation_func": refused("--use-te-activation-func", NO_MEMO),
    "use_transformer_engine_op_fuser": refused("--use-transformer-engine-op-fuser", NO_MEMO),
    "use_grouped_gemm_for_dense_mlp": refused("--use-grouped-gemm-for-dense-mlp", NO_MEMO),
    "mlp_chunks_for_prefill": refused("--mlp-chunks-for-prefill", "Leave it out: it is for inference.", 1),
    "mlp_chunks_for_training": refused("--mlp-chunks-for-training", "Leave it out and set --memo-tiles: tiles chunk the MLP too.", 1),
    "enable_mhc_connections": refused("", NO_MEMO),
    "use_mup": refused("--use-mup", NO_MEMO),
    "batch_invariant_mode": refused("--batch-invariant-mode", NO_MEMO),
    "transformer_impl": refused(
        "--transformer-impl", "Set --transformer-impl transformer_engine or --transformer-impl local.", "transformer_engine", "local"),
    # other models
    "mtp_num_layers": refused("--mtp-num-layers", NO_MEMO, None, 0),
    "num_moe_experts": refused("--num-experts", _DENSE, None, 0),
    "is_hybrid_model": refused("--is-hybrid-model", NO_MEMO),
    "heterogeneous_block_specs": refused("--heterogeneous-layers-config-path", "Use the same spec for all layers."),
    "heterogeneous_layers_config_path": refused("--heterogeneous-layers-config-path", "Use the same spec for all layers.", None, ""),
    "heterogeneous_layers_config_encoded_json": refused("--heterogeneous-layers-config-encoded-json", "Use the same spec for all layers.", None, ""),
    # Megatron's own remedies for memory
    "recompute_granularity": refused("--recompute-granularity", _OURS, None),
    "moe_layer_recompute": refused("--moe-layer-recompute", _OURS),
    "num_microbatches_with_partial_activation_checkpoints": refused("", _OURS, None),
    "cpu_offloading": refused("--cpu-offloading-num-layers", _OURS),
    "cpu_offloading_num_layers": refused("--cpu-offloading-num-layers", _OURS, 0),
    "fine_grained_activation_offloading": refused("--fine-grained-activation-offloading", _OURS),
    "init_model_with_meta_device": refused("--init-model-with-meta-device", NO_MEMO),
    # CUDA graphs
    "cuda_graph_impl": refused("--cuda-graph-impl", _GRAPHS, "none"),
    "enable_cuda_graph": refused("--enable-cuda-graph", _GRAPHS),
    "external_cuda_graph": refused("--external-cuda-graph", _GRAPHS),
    # precision
    "fp8": refused("--fp8-format", _PRECISION, None),
    "fp8_param": refused("--fp8-param-gather", _PRECISION),
    "activation_func_fp8_input_store": refused("", _PRECISION),
    "fp4": refused("--fp4-format", _PRECISION, None),
    "fp4_param": refused("--fp4-param-gather", _PRECISION),
    "quant_recipe": refused("--te-precision-config-file", _PRECISION, None),
    "use_kitchen": refused("--kitchen-config-file", _PRECISION),
    "use_kitchen_attention": refused("--use-kitchen-attention", NO_MEMO),
    "enable_autocast": refused("", "Set bf16 or fp16 in the configuration: a tile recomputed in the backward pass is outside autocast."),
    # communication and weight gradients at another time than the layer's own
    "tp_comm_overlap": refused("--tp-comm-overlap", NO_MEMO),
    "symmetric_ar_type": refused("--symmetric-ar-type", NO_MEMO, None),
    "overlap_moe_expert_parallel_comm": refused("--overlap-moe-expert-parallel-comm", _DENSE),
    "overlap_dispatch_backward_with_experts_wgrad": refused("--overlap-dispatch-backward-with-experts-wgrad", _DENSE),
    "delay_wgrad_compute": refused("--delay-wgrad-compute", NO_MEMO),
    "defer_embedding_wgrad_compute": refused("--defer-embedding-wgrad-compute", NO_MEMO),
    # inference
    "flash_decode": refused("--flash-decode", "Leave it out: it is for inference."),
    "use_inference_optimized_layers": refused("", "Set it to False: it is for inference."),
    "inference_fuse_tp_communication": refused("--inference-fuse-tp-communication", "Leave it out: it is for inference."),
}

MODEL_RULES = merged((_SUPPORTED, _OUTSIDE, _GATED, _REFUSED))
