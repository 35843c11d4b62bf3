"""What each field of a saved model section means for the step: one table, with a reason each.

Where the replay's model has another value than the run had, this says whether the step is another
one. Names are Megatron-Core's and Megatron-Bridge's; a ``*`` stands for any ending. Of several
entries that fit a name the first counts. A field that no entry names is unknown: nobody looked at
what it does.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

Meaning = Literal["changes the step", "does not", "unknown"]


@dataclass(frozen=True)
class Entry:
    """Fields that mean the same, for the same reason."""

    meaning: Meaning
    reason: str
    names: tuple[str, ...]


def _changes(reason: str, names: str) -> Entry:
    return Entry("changes the step", reason, tuple(names.split()))


def _same(reason: str, names: str) -> Entry:
    return Entry("does not", reason, tuple(names.split()))


TABLE: tuple[Entry, ...] = (
    _changes(
        "it gives the network its shape",
        "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels "
        "num_moe_experts moe_layer_freq moe_ffn_hidden_size moe_shared_expert_intermediate_size "
        "moe_shared_expert_gate moe_latent_size share_embeddings_and_output_weights "
        "add_bias_linear add_qkv_bias gated_linear_unit heterogeneous_block_specs "
        "moe_mlp_glu_interleave_size "
        "moe_shared_expert_glu_interleave_size vision_config",
    ),
    _changes(
        "it changes what a layer computes from its input",
        "layernorm_epsilon layernorm_zero_centered_gamma normalization qk_layernorm qk_l2_norm "
        "activation_func activation_func_clamp_value glu_linear_offset softmax_scale softmax_type "
        "apply_residual_connection_post_layernorm attention_output_gate window_size "
        "window_attn_skip_freq no_rope_freq mup_embedding_mult mup_output_mult mup_width_mult "
        "mup_attn_scale_power use_mup",
    ),
    _changes(
        "it turns queries and keys by other angles",
        "position_embedding_type rotary_base rotary_percent rotary_interleaved rope_scaling "
        "rope_scaling_factor seq_len_interpolation_factor mrope_section "
        "yarn_rotary_scaling_factor rotary_scaling_factor",
    ),
    _changes(
        "it decides which experts a token gets, or with which probability",
        "moe_router_topk moe_router_pre_softmax moe_router_score_function moe_router_num_groups "
        "moe_router_group_topk moe_router_topk_limited_devices moe_router_topk_scaling_factor "
        "moe_router_enable_expert_bias moe_apply_probs_on_input moe_router_force_load_balancing "
        "moe_router_force_biased moe_n_hash_layers moe_input_jitter_eps "
        "moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_drop_policy "
        "moe_token_dropping moe_expert_rank_capacity_factor moe_enable_routing_replay",
    ),
    _changes(
        "it adds a gradient of its own to the router's",
        "moe_aux_loss_coeff moe_router_load_balancing_type moe_z_loss_coeff",
    ),
    _changes(
        "it rounds parameters or activations to another precision",
        "params_dtype bf16 fp16 fp8 fp4 fp32_residual_connection moe_router_dtype "
        "first_last_layers_bf16 enable_autocast",
    ),
    _changes("it makes the step random", "hidden_dropout attention_dropout"),
    _changes(
        "gradients are summed and divided once by the denominators, or else averaged",
        "calculate_per_token_loss",
    ),
    _changes(
        "another architecture",
        "multi_latent_attention mtp_num_layers experimental_attention_variant "
        "linear_attention_freq is_hybrid_model hybrid_override_pattern init_model_with_meta_device",
    ),
    _same(
        "the attention here takes its softmax in float32 always, as flash kernels do",
        "attention_softmax_in_fp32",
    ),
    _same(
        "a factor that attention takes out of the scores again after the softmax's scaling",
        "apply_query_key_layer_scaling",
    ),
    _same(
        "a layout of ranks: the gradient is the same up to the order of sums",
        "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size "
        "virtual_pipeline_model_parallel_size expert_model_parallel_size "
        "expert_tensor_parallel_size expert_tensor_parallel_num_weight_shards sequence_parallel "
        "pipeline_model_parallel_layout pipeline_model_parallel_comm_backend pipeline_dtype "
        "num_layers_in_*_pipeline_stage account_for_*_in_pipeline_split "
        "microbatch_group_size_per_vp_stage hierarchical_context_parallel_sizes "
        "hybrid_context_parallel max_seqlen_per_dp_cp_rank moe_extended_tp "
        "scatter_embedding_sequence_parallel parallel_output tensor_parallel_num_weight_shards "
        "*gtp_weight_remat_size",
    ),
    _same(
        "how ranks talk to each other",
        "tp_comm_* cp_comm_type batch_p2p_* overlap_* use_ring_exchange_p2p symmetric_ar_type "
        "variable_seq_lengths moe_token_dispatcher_type moe_enable_deepep moe_deepep_* "
        "moe_hybridep_* moe_ncclep_* moe_flex_dispatcher_* nccl_* high_priority_a2a_comm_stream "
        "async_tensor_model_parallel_allreduce tp_only_amax_red ep_overlap_* "
        "deallocate_pipeline_outputs defer_embedding_wgrad_compute delay_wgrad_compute "
        "wgrad_deferral_limit no_sync_func grad_sync_func param_sync_func "
        "clone_scatter_output_in_embedding moe_permute_fusion_into_hybridep",
    ),
    _same(
        "kernels: fused, grouped or of another library, equal up to the order of sums",
        "use_grouped_gemm_for_* gradient_accumulation_fusion bias_activation_fusion "
        "bias_dropout_fusion masked_softmax_fusion apply_rope_fusion fused_single_qkv_rope "
        "fused_residual_rmsnorm moe_grouped_gemm dense_grouped_gemm moe_permute_fusion "
        "moe_router_fusion "
        "moe_shared_expert_overlap moe_use_legacy_grouped_gemm moe_single_grouped_* "
        "cross_entropy_loss_fusion cross_entropy_fusion_impl persist_layer_norm "
        "memory_efficient_layer_norm attention_backend flash_attention_version flash_decode "
        "transformer_impl transformer_layer_spec use_transformer_engine_* use_te_* use_kitchen* "
        "kitchen_* use_fused_weighted_squared_relu use_mamba_mem_eff_path deterministic_mode "
        "batch_invariant_mode disable_bf16_reduced_precision_matmul "
        "moe_router_padding_for_quantization moe_router_padding_for_fp8",
    ),
    _same(
        "memory: what is kept, recomputed, moved away or captured",
        "recompute_* cpu_offloading* _cpu_offloading_context fine_grained_* offload_modules "
        "activation_offload_fraction delta_offload_* delay_offload_* min_offloaded_tensor_size "
        "distribute_saved_activations moe_layer_recompute mlp_chunks_for_* moe_paged_stash* "
        "num_microbatches_with_partial_activation_checkpoints cuda_graph_* enable_cuda_graph "
        "external_cuda_graph disable_parameter_transpose_cache activation_func_fp8_input_store",
    ),
    _same(
        "parameters come from the checkpoint",
        "init_method init_method_std output_layer_init_method embedding_init_method* "
        "perform_initialization use_cpu_initialization hf_model_id hf_model_revision "
        "restore_modelopt_state generation_config",
    ),
    _same(
        "the embedding's rows are the checkpoint's",
        "vocab_size should_pad_vocab make_vocab_size_divisible_by",
    ),
    _same(
        "the trainer computes log-probabilities and loss by itself, in float32",
        "fp16_lm_cross_entropy grad_scale_func moe_grad_scale_func mtp_grad_scale_func "
        "finalize_model_grads_func",
    ),
    _same(
        "rotary angles have no longest position; the split takes the worker's own length",
        "seq_length",
    ),
    _same(
        "it acts after the step, or between steps",
        "moe_router_bias_update_rate moe_router_quantile_balancing_ema qk_clip*",
    ),
    _same(
        "it belongs to something that is off, or is refused by the field that turns it on",
        "fp8_* fp4_* dsa_* mamba_* linear_* yarn_* mtp_* num_layers_at_*_in_bf16 quant_recipe "
        "autocast_dtype mup_base_* experimental_attention_variant_loss_scale_func",
    ),
    _same(
        "inference, logging, timing or storage",
        "inference_* use_inference_optimized_layers moe_pad_experts_for_cuda_graph_inference "
        "moe_per_layer_logging log_max_attention_logit timers barrier_with_L1_time test_mode "
        "config_logger_dir hetereogenous_dist_checkpoint use_arbitrary_attention_mask _target_",
    ),
)


def entry_of(field: str) -> Entry | None:
    """The entry that ``field`` falls under; None where no entry names it."""
    for entry in TABLE:
        if any(fnmatchcase(field, pattern) for pattern in entry.names):
            return entry
    return None
