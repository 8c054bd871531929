"""How the fields of OptimizerConfig and DistributedDataParallelConfig are classed, and what stands only in Megatron's namespace of arguments.

Weights are updated and gradients reduced outside the layers, so most of it cannot change what a tiled layer computes. What is refused changes
where gradients are accumulated, when they are sent, or what memory the host has left.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional, Tuple

from ..policy.tiles import LayerPolicy
from .allowlist_rules import NO_MEMO, Refusal, Refused, gated, irrelevant, merged, refused

_PLAIN = "Leave it out: data parallelism with --use-distributed-optimizer, --overlap-grad-reduce and --overlap-param-gather is supported."
_UNPACKED = "Train on samples of one sequence each, all of one length."
_OURS = "Leave it out: --memo decides what is kept, swapped and recomputed (--memo-alpha, --memo-keep, --memo-keep-layers)."
_DENSE_GPT = "Use GPT layers of one kind, or train without --memo."

_REFUSED: Dict[str, Refused] = {
    "use_layer_wise_distributed_optimizer": refused("--optimizer", "Leave out --use-distributed-optimizer: with it this optimizer is distributed by layer."),
    "optimizer": Refused(
        "--optimizer", "Set --optimizer muon: dist_muon is a distributed optimizer.", "any but dist_muon", lambda value, owner: value != "dist_muon"),
    "overlap_param_gather_with_optimizer_step": refused("--overlap-param-gather-with-optimizer-step", _PLAIN),
    "use_precision_aware_optimizer": refused("--use-precision-aware-optimizer", _PLAIN),
    "optimizer_cpu_offload": refused("--optimizer-cpu-offload", "Leave it out: it needs the host memory that activations are swapped to."),
    "optimizer_cuda_graph": refused("--optimizer-cuda-graph", NO_MEMO),
    "use_megatron_fsdp": refused("--use-megatron-fsdp", _PLAIN),
    "use_custom_fsdp": refused("--use-megatron-fsdp", _PLAIN),
    "nccl_ub": refused("--use-nccl-ub", _PLAIN),
    "fp8_param_gather": refused("--fp8-param-gather", "Train in bf16, fp16 or fp32."),
    "fp4_param_gather": refused("--fp4-param-gather", "Train in bf16, fp16 or fp32."),
    "param_name_patterns_for_fp32_local_accumulation": refused(
        "--ddp-param-name-patterns-for-fp32-local-accumulation", "Set --accumulate-allreduce-grads-in-fp32 instead.", (), [], None),
}

OPTIMIZER_RULES = merged(
    (
        _REFUSED,
        irrelevant(
            "acts on weights or gradients outside the layers",
            "lr min_lr decoupled_lr decoupled_min_lr weight_decay apply_wd_to_qk_layernorm loss_scale initial_loss_scale min_loss_scale "
            "loss_scale_window hysteresis adam_beta1 adam_beta2 adam_eps decoupled_weight_decay sgd_momentum muon_momentum muon_split_qkv "
            "muon_nesterov muon_use_nesterov muon_scale_mode muon_fp32_matmul_prec muon_coefficient_type muon_num_ns_steps muon_tp_mode "
            "muon_extra_scale_factor muon_scalar_optimizer muon_use_syrk lion_beta1 lion_beta2 soap_shampoo_beta soap_precondition_frequency "
            "soap_use_kl_shampoo adaptive_muon_moment2_method adaptive_muon_beta2 adaptive_muon_eps clip_grad grad_norm_skip_threshold "
            "log_num_zeros_in_grad",
        ),
        irrelevant(
            "how gradients are reduced and weights gathered around the layers' passes; a layer gives each gradient once",
            "use_distributed_optimizer num_distributed_optimizer_instances reduce_scatter_with_fp32_accumulation overlap_grad_reduce "
            "overlap_param_gather align_param_gather grad_reduce_in_fp32 check_for_nan_in_grad check_for_large_grads bucket_size num_buckets pad_buckets_for_high_nccl_busbw "
            "average_in_collective",
        ),
        gated("fp8_param_gather", "reuse_grad_buf_for_mxfp8_param_ag"),
        gated("use_precision_aware_optimizer", "store_param_remainders main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype"),
        gated("optimizer_cpu_offload", "optimizer_offload_fraction use_torch_optimizer_for_cpu_offload overlap_cpu_optimizer_d2h_h2d pin_cpu_grads "
              "pin_cpu_params"),
        gated("nccl_ub", "disable_symmetric_registration"),
        gated(
            "use_megatron_fsdp",
            "data_parallel_sharding_strategy gradient_reduce_div_fusion suggested_communication_unit_size keep_fp8_transpose_cache "
            "fsdp_double_buffer "
            "fsdp_db_use_persist_buf_on_alloc_fail fsdp_all_gather_in_start_param_sync outer_dp_sharding_strategy fsdp_manual_registration "
            "megatron_fsdp_version megatron_fsdp_main_params_dtype megatron_fsdp_main_grads_dtype megatron_fsdp_grad_comm_dtype "
            "megatron_fsdp_use_decoupled_grad megatron_fsdp_cuda_graph_mode megatron_fsdp_enable_fine_grained_param_gather "
            "megatron_fsdp_max_pool_double_buffer",
        ),
    )
)

# Where the namespace calls a configuration's field otherwise.
ARGUMENT_OF = {
    "num_moe_experts": "num_experts",
    "fp8_param": "fp8_param_gather",
    "fp4_param": "fp4_param_gather",
    "quant_recipe": "te_precision_config_file",
    "use_kitchen": "kitchen_config_file",
    "param_name_patterns_for_fp32_local_accumulation": "ddp_param_name_patterns_for_fp32_local_accumulation",
}

ARGUMENT_RULES: Dict[str, Refused] = {
    # samples
    "sft": refused("--sft", _UNPACKED),
    "dataloader_inter_document_masking": refused("--dataloader-inter-document-masking", _UNPACKED),
    "reset_attention_mask": refused("--reset-attention-mask", _UNPACKED),
    "perform_rl_step": refused("--perform-rl-step", NO_MEMO),
    # model
    "position_embedding_type": refused(
        "--position-embedding-type", "Set one of these, or train without --memo.", "learned_absolute", "rope", "yarn", "none"),
    "spec": refused("--spec", _DENSE_GPT, None),
    "hybrid_layer_pattern": refused("--hybrid-layer-pattern", _DENSE_GPT, None),
    "hybrid_override_pattern": refused("--hybrid-override-pattern", _DENSE_GPT, None),
    "kitchen_recipe_number": refused("--kitchen-recipe-number", "Train in bf16, fp16 or fp32.", None),
    "freeze_all_layers": refused("--freeze-all-layers", NO_MEMO),
    "use_legacy_models": refused("--use-legacy-models", "Use Megatron-Core models, or train without --memo."),
    "yaml_cfg": refused("--yaml-cfg", "Give the settings as flags.", None),
    # parallelism
    "fake_process_group": refused("--fake-process-group", "Leave it out: ranks share the host's memory among themselves before the first step."),
    "use_torch_fsdp2": refused("--use-torch-fsdp2", _PLAIN),
    # memory
    "recompute_activations": refused("--recompute-activations", _OURS),
    # module hooks would see tiles, and recomputed ones twice
    "save_activations_interval": refused("--save-activations-interval", NO_MEMO, None),
    "save_dgrads_interval": refused("--save-dgrads-interval", NO_MEMO, None),
    "inprocess_restart": refused("--inprocess-restart", "Restart the whole job instead."),
}

MASK_LIMIT_BYTES = 64 << 20


def _attention_mask(args: Any) -> Optional[Refusal]:
    """Megatron's dataloader makes an [s, s] mask in fp32 and copies an [s, s] one a sample to the GPU: at long lengths the largest tensors there are.

    64 MiB are 4096 tokens. Without the mask nothing changes: TransformerEngine masks by type, and the local spec makes its own causal mask.
    """
    tokens = getattr(args, "seq_length", None) or getattr(args, "encoder_seq_length", None) or 0
    mask_bytes = 4 * tokens * tokens
    if not getattr(args, "create_attention_mask_in_dataloader", False) or mask_bytes <= MASK_LIMIT_BYTES:
        return None
    return Refusal(
        "create_attention_mask_in_dataloader",
        "--no-create-attention-mask-in-dataloader",
        f"a mask of {mask_bytes / (1 << 20):,.0f} MiB for each sample of {tokens} tokens",
        f"at most {MASK_LIMIT_BYTES >> 20} MiB",
        "Set --no-create-attention-mask-in-dataloader: causal attention needs no mask from there.",
    )


def _is_one_tile(args: Any) -> bool:
    """Whether a layer of this job is a single tile: fractions between 0 and 1 make more of them than --memo-tiles says."""
    policy = LayerPolicy(getattr(args, "memo_alpha", 0.5), getattr(args, "memo_keep", 0.0), getattr(args, "memo_tiles", 2))
    return len(policy.cut(getattr(args, "seq_length", None) or 1 << 20)) == 1


def _sums_of_tiles(args: Any) -> Optional[Refusal]:
    """Fused kernels add a tile's weight gradient to main_grad. In 16 bits each tile rounds once more: 3 times the error with 16 tiles."""
    if not getattr(args, "gradient_accumulation_fusion", False) or _is_one_tile(args):
        return None
    fp16 = getattr(args, "fp16", False) and not getattr(args, "accumulate_allreduce_grads_in_fp32", False)
    bf16 = getattr(args, "bf16", False) and getattr(args, "grad_reduce_in_bf16", False)
    if not (fp16 or bf16):
        return None
    flag = "--accumulate-allreduce-grads-in-fp32" if fp16 else "--grad-reduce-in-bf16"
    advice = "Set --accumulate-allreduce-grads-in-fp32" if fp16 else "Leave it out"
    return Refusal(
        "accumulate_allreduce_grads_in_fp32" if fp16 else "grad_reduce_in_bf16",
        flag,
        f"{'fp16' if fp16 else 'bf16'} gradient buffers with fused weight gradients and --memo-tiles {getattr(args, 'memo_tiles', 'above 1')}",
        "fp32 gradient buffers",
        f"{advice}, or set --no-gradient-accumulation-fusion: tiles are then summed in fp32 and rounded once.",
    )


def _determinism(args: Any) -> Optional[Refusal]:
    """FlashAttention-4 is called without its deterministic backward pass."""
    if not getattr(args, "deterministic_mode", False) or getattr(args, "memo_attention", "host") != "fa4":
        return None
    return Refusal("deterministic_mode", "--deterministic-mode", "True with --memo-attention fa4", "False", "Set --memo-attention host.")


def _attention_dropout(args: Any) -> Optional[Refusal]:
    """The kernels that are called directly have no dropout."""
    dropout, attention = getattr(args, "attention_dropout", 0), getattr(args, "memo_attention", "host")
    if not dropout or attention == "host":
        return None
    return Refusal(
        "attention_dropout", "--attention-dropout", f"{dropout:g} with --memo-attention {attention}", "0", "Set it to 0, or take --memo-attention host."
    )


def _random_numbers(args: Any) -> Optional[Refusal]:
    """TransformerEngine's tracker hands the generators themselves around: putting a state back would reach another one."""
    hidden, attention = getattr(args, "hidden_dropout", 0), getattr(args, "attention_dropout", 0)
    if not getattr(args, "te_rng_tracker", False) or not (hidden or attention):
        return None
    found = f"True with --hidden-dropout {hidden:g} and --attention-dropout {attention:g}"
    return Refusal("te_rng_tracker", "--te-rng-tracker", found, "False", "Leave it out, or set both to 0.")


def _cut_sequences(args: Any) -> Optional[Refusal]:
    """The kernels that are called directly see one rank's rows alone."""
    ranks, attention = getattr(args, "context_parallel_size", 1), getattr(args, "memo_attention", "host")
    name, flag = "context_parallel_size", "--context-parallel-size"
    if ranks <= 1:
        return None
    if attention != "host":
        advice = "Take --memo-attention host: TransformerEngine's attention exchanges keys and values."
        return Refusal(name, flag, f"{ranks} with --memo-attention {attention}", "1", advice)
    if not getattr(args, "memo_allow_untested", False):
        advice = (
            "It has been shown right with an attention of the tests alone, not with TransformerEngine's on GPUs. "
            "Use tensor parallelism with --sequence-parallel, or set --memo-allow-untested."
        )
        return Refusal(name, flag, f"{ranks}", "1", advice)
    return None


COMBINATIONS: Tuple[Callable[[Any], Optional[Refusal]], ...] = (
    _attention_mask,
    _sums_of_tiles,
    _determinism,
    _attention_dropout,
    _random_numbers,
    _cut_sequences,
)
