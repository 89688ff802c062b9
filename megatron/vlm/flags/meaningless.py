"""Flags of Megatron's that nothing here would obey: refused."""

from megatron.vlm.flags.group import Group

WITHOUT_MEANING = (
    Group(
        "the plan says what is recomputed; plan with less --memory-gib, or write the lists into plan.json",
        """
        recompute_granularity recompute_method recompute_num_layers recompute_modules recompute_activations
        checkpoint_activations distribute_saved_activations mlp_chunks_for_training
        """,
    ),
    Group(
        "activations are recomputed as the plan says, not moved to the host",
        """
        cpu_offloading_num_layers cpu_offloading_retain_pinned_cpu_buffers fine_grained_activation_offloading
        offload_modules min_offloaded_tensor_size delta_offload_bytes_across_pp_ranks
        activation_offload_fraction fine_grained_offloading_max_inflight_offloads
        """,
    ),
    Group(
        "the plan says where the model is cut and in which order ranks work; plan again with tools/plan_layout.py",
        """
        pipeline_model_parallel_comm_backend delay_wgrad_compute use_ring_exchange_p2p
        defer_embedding_wgrad_compute wgrad_deferral_limit overlap_p2p_comm_warmup_flush
        microbatch_group_size_per_vp_stage account_for_embedding_in_pipeline_split
        account_for_loss_in_pipeline_split decoder_num_layers decoder_first_pipeline_num_layers
        decoder_last_pipeline_num_layers pipeline_model_parallel_layout model_parallel_size
        num_layers_per_virtual_pipeline_stage overlap_p2p_comm
        """,
    ),
    Group(
        "how many ranks run a pack is packed (tools/pack_data.py --widths); a pack's samples are isolated already",
        """
        hierarchical_context_parallel_sizes max_seqlen_per_dp_cp_rank cp_comm_type sft
        sft_tokenizer_prompt_format hybrid_context_parallel
        """,
    ),
    Group(
        "experts are those of --preset: routed to by their likelihood alone, no token dropped; those of a rank are "
        "multiplied together, and tokens travel by the trainer's own way to those of others",
        """
        moe_token_dispatcher_type
        inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type
        expert_tensor_parallel_num_weight_shards
        overlap_moe_expert_parallel_comm overlap_dispatch_backward_with_experts_wgrad
        ep_overlap_early_attn_memory_release high_priority_a2a_comm_stream
        moe_shared_expert_intermediate_size moe_shared_expert_gate moe_shared_expert_overlap
        use_grouped_gemm_for_shared_expert moe_shared_expert_glu_interleave_size moe_enable_routing_replay
        moe_router_padding_for_quantization moe_router_padding_for_fp8 moe_router_num_groups
        moe_router_group_topk moe_router_topk_scaling_factor moe_router_score_function
        moe_router_enable_expert_bias moe_router_bias_update_rate moe_router_quantile_balancing_ema
        moe_router_force_load_balancing moe_router_force_biased use_grouped_gemm_for_dense_mlp
        moe_grouped_gemm moe_single_grouped_weight moe_single_grouped_bias moe_z_loss_coeff
        moe_input_jitter_eps moe_enable_deepep moe_flex_dispatcher_backend moe_permute_fusion_into_hybridep
        moe_hybridep_pad_uneven_dispatch_inputs moe_per_layer_logging moe_expert_capacity_factor
        moe_pad_expert_input_to_capacity moe_pad_experts_for_cuda_graph_inference moe_token_drop_policy
        moe_layer_recompute moe_permute_fusion moe_router_fusion moe_apply_probs_on_input moe_latent_size
        moe_flex_dispatcher_num_sms moe_deepep_num_sms moe_hybridep_num_sms moe_hybridep_num_blocks_permute
        moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms_preprocessing moe_ncclep_static_shape
        moe_ncclep_zero_copy moe_mlp_glu_interleave_size moe_expert_rank_capacity_factor moe_paged_stash
        moe_paged_stash_page_size moe_paged_stash_buffer_size_factor_cuda
        moe_paged_stash_buffer_size_factor_cpu save_tokens_per_expert_interval moe_layer_freq
        moe_use_upcycling moe_upcycling_granularity moe_routing_trace_path
        moe_routing_trace_max_training_iters moe_routing_trace_capture_logits
        moe_routing_trace_capture_hidden_states moe_routing_trace_dump_weights
        """,
    ),
    Group(
        "the preset's model has no such layers",
        """
        mtp_standalone mtp_num_layers mtp_loss_scaling_factor mtp_use_repeated_layer mtp_detach_heads
        mtp_hybrid_override_pattern is_hybrid_model mamba_state_dim mamba_head_dim mamba_num_groups
        mamba_num_heads use_mamba_mem_eff_path mamba_training_ssm_states_dtype heterogeneous_layers_config_path
        heterogeneous_layers_config_encoded_json hybrid_layer_pattern hybrid_override_pattern
        """,
    ),
    Group(
        "the preset's attention is multi-head or grouped-query attention",
        """
        attention_output_gate multi_latent_attention experimental_attention_variant dsa_indexer_n_heads
        dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_topk_freq dsa_indexer_skip_topk_offset
        dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss dsa_kernel_backend dsa_indexer_rope_interleaved
        dsa_indexer_rotate_activation dsa_indexer_scoring_relu dsa_indexer_k_norm_epsilon
        dsa_indexer_k_norm_fp32 linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim
        linear_num_key_heads linear_num_value_heads q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim
        v_head_dim rotary_scaling_factor mscale mscale_all_dim cache_mla_latents mla_down_proj_fusion
        linear_attention_freq
        """,
    ),
    Group(
        "attention is our own, isolated per sample, in the kernel that the machine has (docs/training.md)",
        """
        attention_backend flash_attention_version use_flash_attn softmax_type qk_l2_norm qk_clip qk_clip_alpha
        qk_clip_threshold apply_query_key_layer_scaling log_max_attention_logit window_size
        window_attn_skip_freq
        """,
    ),
    Group(
        "rotary positions are the preset's, scaled as its config.json says",
        """
        yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow yarn_correction_range_round_to_int
        relative_attention_num_buckets relative_attention_max_distance use_rotary_position_embeddings
        rotary_seq_len_interpolation_factor use_rope_scaling rope_scaling_factor no_rope_freq mrope_section
        rope_type
        """,
    ),
    Group(
        "the preset's layers have their own norms, residuals and activations",
        """
        apply_residual_connection_post_layernorm layernorm_zero_centered_gamma glu_linear_offset
        activation_func_clamp_value openai_gelu squared_relu quick_geglu onnx_safe bert_binary_head
        """,
    ),
    Group(
        "widths are not parametrised here (muP)",
        """
        use_mup mup_width_mult mup_base_hidden_size mup_embedding_mult mup_output_mult mup_base_head_dim
        mup_attn_scale_power
        """,
    ),
    Group(
        "the loss is computed in fp32 from the logits as they are",
        """
        fp16_lm_cross_entropy
        """,
    ),
    Group(
        "every layer draws its weights by --seed and its place, alike in all layouts, from a normal distribution",
        """
        perform_initialization data_parallel_random_init init_method_xavier_uniform
        """,
    ),
    Group(
        "not shown for our attention kernels; results that do not depend on the layout need no flag",
        """
        deterministic_mode
        """,
    ),
    Group(
        "our word embedding and configuration have no such switch",
        """
        clone_scatter_output_in_embedding config_logger_dir
        """,
    ),
    Group(
        "no recipe of FP8 that is obeyed reads it, weights stay in bf16, and FP4 reaches none of our layers",
        """
        fp8_quantizer_factory fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo
        fp8_wgrad fp8_output_proj
        use_kitchen_attention kitchen_attention_backend fp4 fp4_recipe fp4_quantizer_factory stream_ckpt_dequant
        reuse_grad_buf_for_mxfp8_param_ag fp4_param_gather fp8_param_gather te_precision_config_file
        """,
    ),
    Group(
        "our layers are not Transformer Engine's, whose communication this overlaps",
        """
        tp_comm_overlap tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs
        tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_split_rs tp_comm_bootstrap_backend
        use_fused_weighted_squared_relu fused_residual_rmsnorm use_transformer_engine_op_fuser
        use_te_activation_func tp_comm_overlap_cfg
        """,
    ),
    Group(
        "packs have other shapes in every iteration, which CUDA graphs cannot replay",
        """
        enable_cuda_graph cuda_graph_warmup_steps external_cuda_graph cuda_graph_impl
        delay_offload_until_cuda_graph optimizer_cuda_graph te_rng_tracker cuda_graph_scope_deprecated
        cuda_graph_modules
        """,
    ),
    Group(
        "weights are not sharded beyond --use-distributed-optimizer: stages need them whole",
        """
        init_model_with_meta_device strict_fsdp_dtensor_load use_megatron_fsdp use_torch_fsdp2
        fsdp_manual_registration create_all_gather_group data_parallel_sharding_strategy
        outer_dp_sharding_strategy gradient_reduce_div_fusion fsdp_double_buffer
        suggested_communication_unit_size keep_fp8_transpose_cache enable_full_sharding_in_hsdp
        num_distributed_optimizer_instances torch_fsdp2_reshard_after_forward megatron_fsdp_main_params_dtype
        megatron_fsdp_main_grads_dtype megatron_fsdp_grad_comm_dtype
        megatron_fsdp_enable_fine_grained_param_gather megatron_fsdp_max_pool_double_buffer
        fsdp_db_use_persist_buf_on_alloc_fail
        """,
    ),
    Group(
        "with --overlap-param-gather all gathers start with the iteration, in one order on all ranks",
        """
        overlap_param_gather_with_optimizer_step align_param_gather
        """,
    ),
    Group(
        "each stage reduces when its own last backward pass ends",
        """
        align_grad_reduce
        """,
    ),
    Group(
        "gradients are summed and divided by the global batch's tokens",
        """
        ddp_average_in_collective ddp_reduce_scatter_with_fp32_accumulation
        ddp_param_name_patterns_for_fp32_local_accumulation
        """,
    ),
    Group(
        "process groups are Megatron's usual ones; our pipeline's channels would not follow",
        """
        nccl_communicator_config_path use_tp_pp_dp_mapping use_gloo_process_groups use_sharp sharp_enabled_group
        high_priority_stream_groups distributed_timeout_seconds_after_init nccl_ub
        disable_symmetric_registration lazy_mpu_init
        """,
    ),
    Group(
        "a fake group reduces nothing: ranks would train apart",
        """
        fake_process_group
        """,
    ),
    Group(
        "optimizers are adam and sgd",
        """
        muon_momentum muon_split_qkv muon_nesterov muon_scale_mode muon_fp32_matmul_prec muon_coefficient_type
        muon_num_ns_steps muon_tp_mode muon_extra_scale_factor muon_scalar_optimizer lion_beta1 lion_beta2
        apply_wd_to_qk_layernorm no_weight_decay_cond_type dump_param_to_param_group_map
        """,
    ),
    Group(
        "the optimizer's state stays in fp32 on the device; shard it with --use-distributed-optimizer",
        """
        optimizer_cpu_offload optimizer_offload_fraction use_torch_optimizer_for_cpu_offload
        overlap_cpu_optimizer_d2h_h2d pin_cpu_grads pin_cpu_params use_layer_wise_param_layout
        use_precision_aware_optimizer main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype
        """,
    ),
    Group(
        "--lr-vit and --lr-projector give these parts rates of their own, --lr is that of all others",
        """
        decoupled_lr decoupled_min_lr
        """,
    ),
    Group(
        "--freeze vit projector llm chooses what is not trained",
        """
        freeze_all_layers
        """,
    ),
    Group(
        "training is counted in iterations: --train-iters, --lr-decay-iters, --lr-warmup-iters "
        "(tools/launch.py --epochs)",
        """
        train_samples lr_decay_samples lr_wsd_decay_samples lr_warmup_samples warmup
        """,
    ),
    Group(
        "the global batch is the packed index's; pack with other --micro-batches",
        """
        rampup_batch_size step_batch_size_schedule decrease_batch_size_if_needed batch_size
        """,
    ),
    Group(
        "every iteration's packs are trained on, once",
        """
        iterations_to_skip result_rejected_tracker_filename check_for_spiky_loss
        """,
    ),
    Group(
        "evaluation is given by --eval-data and --eval-packs, one set",
        """
        test_mode full_validation multiple_validation_sets validation_set_names
        """,
    ),
    Group(
        "data come from --data and --packs (tools/preprocess_data.py, tools/pack_data.py)",
        """
        data_path phase_transition_iterations split train_data_path valid_data_path test_data_path
        data_args_path per_split_data_args_path per_dataset_sequences_path dataloader_fast_cache_load
        dataloader_defer_npy_index_mmap data_cache_path mmap_bin_files mock_data encoder_seq_length
        decoder_seq_length sample_rate mask_prob short_seq_prob reset_position_ids reset_attention_mask
        dataloader_inter_document_masking eod_mask_loss create_attention_mask_in_dataloader
        num_dataset_builder_threads object_storage_cache_path mid_level_dataset_surplus
        allow_ambiguous_pad_tokens fim_data fim_rate fim_spm_rate fim_split_sample fim_fragment_rate
        fim_no_prefix fim_prefix_token fim_middle_token fim_suffix_token fim_pad_token fim_eod_token
        """,
    ),
    Group(
        "the dataset holds tokens already; tools/preprocess_data.py chose tokenizer and template",
        """
        padded_vocab_size pad_vocab_size vocab_file merge_file vocab_extra_ids tokenizer_model metadata_path
        special_tokens tiktoken_pattern tiktoken_num_special_tokens tokenizer_sentencepiece_legacy
        tokenizer_sentencepiece_ignore_extra_whitespaces tokenizer_hf_no_use_fast
        tokenizer_hf_no_include_special_tokens trust_remote_code null_tokenizer_eod_id null_tokenizer_pad_id
        chat_template
        """,
    ),
    Group(
        "the preset says how the model is built; a checkpoint is only read",
        """
        use_checkpoint_args use_mp_args_from_checkpoint_args use_tokenizer_model_from_checkpoint_args
        """,
    ),
    Group(
        "tools/convert_checkpoint.py converts",
        """
        ckpt_convert_format ckpt_convert_save ckpt_convert_update_legacy_dist_opt_format auto_detect_ckpt_format
        use_dist_ckpt_deprecated dist_ckpt_format_deprecated dist_ckpt_save_pre_mcore_014
        ckpt_fully_parallel_save_deprecated
        """,
    ),
    Group(
        "first weights are given by --from, a run's own by --load",
        """
        pretrained_checkpoint load_main_params_from_ckpt override_ckpt_iteration
        """,
    ),
    Group(
        "checkpoints are whole and on the file system of --save",
        """
        non_persistent_save_interval non_persistent_ckpt_type non_persistent_global_ckpt_dir
        non_persistent_local_ckpt_dir non_persistent_local_ckpt_algo replication replication_jump
        replication_factor enable_msc disable_msc_deprecated async_ckpt_cpu_priority async_ckpt_io_priority
        async_ckpt_use_cpu_shm ckpt_fully_parallel_load_exchange_algo ckpt_fully_parallel_save_process_group
        ckpt_fully_parallel_load_process_group distrib_optim_fully_reshardable_mem_efficient
        """,
    ),
    Group(
        "these dumps hook into core's models; ours are not dumped",
        """
        save_params_interval save_activations_interval save_wgrads_interval save_dgrads_interval
        pytorch_profiler_collect_chakra
        """,
    ),
    Group(
        "Megatron counts the operations of a language model at full length; our log line counts samples and "
        "useful tokens",
        """
        log_throughput log_progress
        """,
    ),
    Group(
        "services of NVIDIA's clusters, restarts inside a process, and planted faults; a job is resumed by "
        "starting it again",
        """
        adlr_autoresume adlr_autoresume_interval run_workload_inspector_server one_logger_project
        one_logger_run_name one_logger_async app_tag_run_name app_tag_run_version inprocess_restart
        inprocess_max_iterations inprocess_monitor_thread_interval inprocess_monitor_process_interval
        inprocess_progress_watchdog_interval inprocess_heartbeat_interval inprocess_soft_timeout
        inprocess_hard_timeout inprocess_heartbeat_timeout inprocess_barrier_timeout
        inprocess_completion_timeout inprocess_last_call_wait inprocess_termination_grace_time
        inprocess_granularity inprocess_active_world_size inprocess_empty_cuda_cache enable_ft_package
        calc_ft_timeouts ft_num_warmup_iters error_injection_rate error_injection_type fault_injector_ranks
        fault_injector_num_ranks fault_injector_fault_types fault_injector_fault_probabilities
        fault_injector_fault_delay fault_injector_delay_start_iteration fault_injector_mtti_seconds
        fault_injector_offset_seconds fault_injector_seed gpu_sniff_test_interval
        exit_signal_handler_for_dataloader exit_signal_handler_for_training
        """,
    ),
    Group(
        "arguments come from the command line, the preset and the plan alone",
        """
        yaml_cfg spec enable_experimental deprecated_use_mcore_models
        """,
    ),
    Group(
        "generation is tools' work; the trainer trains",
        """
        inference_dynamic_batching_mamba_memory_ratio inference_dynamic_batching_prefix_caching_mamba_gb
        mamba_inference_conv_states_dtype mamba_inference_ssm_states_dtype inference_cuda_graph_scope
        flash_decode batch_invariant_mode symmetric_ar_type nccl_all_reduce_for_prefill
        inference_fuse_tp_communication inference_disable_triton_nvls_kernels inference_grouped_gemm_backend
        mlp_chunks_for_prefill inference_rng_tracker inference_batch_times_seqlen_threshold max_tokens_to_oom
        output_bert_embeddings bert_embedder_type use_legacy_static_engine inference_max_requests
        inference_max_seq_length inference_dynamic_batching inference_dynamic_batching_buffer_size_gb
        inference_dynamic_batching_paused_buffer_size_gb inference_dynamic_batching_block_size
        inference_dynamic_batching_max_requests inference_dynamic_batching_max_tokens
        inference_dynamic_batching_num_cuda_graphs inference_dynamic_batching_track_paused_request_events
        inference_dynamic_batching_track_generated_token_events decode_only_cuda_graphs
        inference_cuda_graph_all_prefills inference_cuda_graph_max_tokens
        inference_dynamic_batching_unified_memory_level enable_chunked_prefill num_speculative_tokens
        inference_dynamic_batching_enable_prefix_caching
        inference_dynamic_batching_prefix_caching_eviction_policy
        inference_dynamic_batching_prefix_caching_coordinator_policy
        inference_dynamic_batching_prefix_caching_routing_alpha
        inference_dynamic_batching_cuda_graph_mixed_prefill_count
        inference_dynamic_batching_cuda_graph_sizing_distribution inference_dynamic_batching_sampling_backend
        offset_sampling_seed_by_dp_rank inference_dynamic_batching_async_sched_mode
        inference_dynamic_batching_logprobs_mode inference_logging_step_interval
        inference_text_gen_server_logging inference_wandb_logging inference_coordinator_port
        inference_use_synchronous_zmq_collectives inference_disable_ep_consensus inference_shards
        """,
    ),
    Group(
        "no reinforcement learning",
        """
        perform_rl_step rl_prompts_per_eval grpo_prompts_per_step grpo_group_size rl_generation_lag
        rl_submission_granularity rl_consumption_granularity grpo_iterations grpo_clamp_eps_lower
        grpo_clamp_eps_upper grpo_kl_beta grpo_entropy_term_weight grpo_filter_groups_with_same_reward
        langrl_env_config rl_default_temperature rl_default_top_p rl_default_top_k
        rl_offload_optimizer_during_inference rl_kv_cache_management_mode rl_persist_cuda_graphs
        rl_partial_rollouts rl_inference_logprobs_is_correction rl_importance_sampling_truncation_coef
        rl_use_sequence_packing rl_sequence_packing_max_sequences_per_bin rl_sequence_packing_algo
        rl_training_cuda_graphs rl_inference_tensor_model_parallel_size
        rl_inference_pipeline_model_parallel_size rl_inference_expert_model_parallel_size
        rl_inference_expert_tensor_model_parallel_size rl_inference_model_unified_memory_level
        rl_offload_inference_model_weights_when_idle refit_method rl_verify_model_weights_swap rl_skip_bos_token
        rl_profile rl_profile_dir rl_inference_parsers
        """,
    ),
    Group(
        "no distillation",
        """
        logits_save_top_k logits_save_top_p logits_save_top_p_min_k logits_save_dir logits_save_dtype
        logits_load_dir logits_load_decode_threads logits_load_prefetch_factor logits_load_msc_prefetch_depth
        logits_load_kd_loss_alpha logits_load_ignore_errors
        """,
    ),
    Group(
        "Megatron's old vision models; --preset and the dataset have their sizes",
        """
        num_classes img_h img_w num_channels patch_dim classes_fraction data_per_class_fraction data_sharding
        head_lr_mult vision_pretraining vision_pretraining_type vision_backbone_type swin_backbone_type
        mask_type mask_factor iter_per_epoch dino_local_img_size dino_local_crops_number dino_head_hidden_size
        dino_bottleneck_size dino_freeze_last_layer dino_norm_last_layer dino_warmup_teacher_temp
        dino_teacher_temp dino_warmup_teacher_temp_epochs
        """,
    ),
    Group(
        "Megatron's retrieval models",
        """
        ict_head_size biencoder_projection_dim biencoder_shared_query_context_model ict_load bert_load
        titles_data_path query_in_block_prob use_one_sent_docs evidence_data_path
        retriever_report_topk_accuracies retriever_score_scaling block_data_path embedding_path
        indexer_batch_size indexer_log_interval
        """,
    ),
)
