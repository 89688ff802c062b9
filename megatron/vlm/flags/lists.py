"""Megatron flags that may be given: obeyed, set by us, or passed on untested. All others are refused, with a remedy.

Each table has reasons, and the names of Megatron's arguments that share them.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from signal import Signals

OBEYED = {
    "tests/system/test_training.py::test_resuming_goes_on_with_the_same_data_and_loss":
        "train_iters lr_decay_iters log_interval global_batch_size save save_interval load",
    "tests/distributed/test_parity.py::test_every_case_equals_one_process":
        "tensor_model_parallel_size sequence_parallel expert_model_parallel_size overlap_grad_reduce "
        "distributed_timeout_minutes",
    "tests/system/test_training.py::test_the_distributed_optimizer_resumes_without_apex_or_transformer_engine":
        "use_distributed_optimizer",
    "tests/distributed/test_training.py::test_all_layouts_train_the_same_weights": "overlap_param_gather",
    "tests/system/test_training.py::test_an_evaluation_is_every_held_out_token_once": "eval_interval skip_train",
    "tests/distributed/test_dropout.py::test_layouts_draw_alike_and_so_does_a_tower_beside_the_pipeline":
        "hidden_dropout attention_dropout",
    "tests/distributed/test_training.py::test_half_precision_differs_by_its_rounding": "bf16 fp16",
    "tests/unit/flags/test_obeyed.py::test_adam_takes_the_steps_that_the_flags_say":
        "lr min_lr lr_decay_style lr_warmup_iters lr_warmup_init weight_decay adam_beta1 adam_beta2 adam_eps clip_grad",
    "tests/unit/flags/test_obeyed.py::test_sgd_takes_the_steps_that_the_flags_say":
        "optimizer sgd_momentum lr_warmup_fraction start_weight_decay end_weight_decay weight_decay_incr_style",
    "tests/unit/flags/test_obeyed.py::test_the_last_iterations_decay_as_wsd_says":
        "lr_wsd_decay_iters lr_wsd_decay_style",
    "tests/unit/flags/test_obeyed.py::test_the_loss_is_scaled_as_the_flags_say":
        "loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis",
    "tests/unit/flags/test_obeyed.py::test_gradients_are_kept_in_the_precision_asked_for":
        "accumulate_allreduce_grads_in_fp32 grad_reduce_in_bf16",
    "tests/unit/flags/test_obeyed.py::test_weights_start_as_the_flags_say":
        "seed init_method_std embedding_init_method_std make_vocab_size_divisible_by",
    "tests/unit/flags/test_obeyed.py::test_workers_read_ahead_where_images_are_decoded": "num_workers",
    "tests/unit/flags/test_obeyed.py::test_logging_starts_at_the_level_asked_for": "logging_level",
    "tests/unit/models/test_reference.py::test_the_head_takes_the_cross_entropy_that_the_flag_says":
        "cross_entropy_loss_fusion cross_entropy_fusion_impl",
    "tests/unit/models/test_experts.py::test_balance_is_that_of_each_sample": "moe_aux_loss_coeff",
    "tests/unit/models/test_experts.py::test_routers_compute_in_the_precision_asked_for": "moe_router_dtype",
    "tests/unit/models/test_fp8.py::test_language_layers_multiply_in_eight_bits":
        "fp8 fp8_recipe first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16",
    "tests/cards/test_states.py::test_states_are_kept_as_the_flags_say":
        "use_precision_aware_optimizer main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype",
    "tests/system/test_log.py::test_our_lines_are_seen_without_scrolling": "tensorboard_dir",
}  # fmt: skip
"""Flags that do what Megatron says, and the test that shows it."""

SET = {
    "--model: the sizes of its config.json, or of a preset; choose another":
        "num_layers encoder_num_layers hidden_size ffn_hidden_size num_attention_heads group_query_attention "
        "num_query_groups kv_channels normalization layernorm_epsilon swiglu add_bias_linear add_qkv_bias num_experts "
        "moe_ffn_hidden_size moe_router_topk moe_router_pre_softmax qk_layernorm position_embedding_type rotary_base "
        "rotary_percent rotary_interleaved add_position_embedding untie_embeddings_and_output_weights vocab_size",
    "the trainer: it reads token ids; --tokenizer-model of preprocessing chooses the tokenizer": "tokenizer_type",
    "--plan: plan again with omnibal plan":
        "pipeline_model_parallel_size num_virtual_stages_per_pipeline_rank",
    "--plan: the longest pack; pack with another --llm-budget": "seq_length max_position_embeddings",
    "the trainer: a microbatch is one pack; for larger ones pack with a larger --llm-budget or --vit-budget":
        "micro_batch_size eval_micro_batch_size",
    "the trainer: packs are read from --packs, in the index's order": "dataloader_type",
    "the trainer: the loss is the mean over the global batch; --loss-reduction chooses over what":
        "calculate_per_token_loss",
    "the trainer: an evaluation is a whole pass over --eval-packs; pack fewer samples for a shorter one":
        "eval_iters eval_global_batch_size",
    "the trainer: samples longer than a rank's budgets are split over data-parallel ranks; pack with --widths":
        "context_parallel_size",
    "the trainer: weights are sharded over tensor-parallel ranks and stages only":
        "tensor_parallel_num_weight_shards",
    "the trainer: experts are sharded over tensor-parallel ranks, or distributed by --expert-model-parallel-size":
        "expert_tensor_parallel_size",
    "the trainer: the balance loss is per sample; --moe-aux-loss-coeff is its coefficient":
        "moe_router_load_balancing_type",
    "the machine: CUDA or CPU, and torchrun's environment": "distributed_backend local_rank",
    "the machine: layers are core's local ones, with our norms and attention":
        "transformer_impl masked_softmax_fusion bias_gelu_fusion no_persist_layer_norm",
    "the trainer: stages send activations in the precision of --bf16 or --fp16; softmax and norms compute in fp32":
        "fp32_residual_connection attention_softmax_in_fp32",
    "the trainer: steps that are not finite are skipped, at most --max-bad-steps in a row":
        "check_for_nan_in_loss_and_grad",
    "the trainer: only distributed checkpoints can be read with any layout": "ckpt_format",
    "the trainer: a service inside NVIDIA; use --tensorboard-dir or --wandb-project": "enable_one_logger",
}  # fmt: skip
"""Flags with a fixed value: by what it is set, and what to change. Other values are refused."""

UNTESTED = {
    "when Megatron's loop leaves early or evaluates":
        "exit_interval exit_duration_in_mins exit_signal_handler exit_signal start_eval_at_iter",
    "memory and garbage collection between iterations":
        "manual_gc manual_gc_interval manual_gc_eval empty_unused_memory_level train_sync_interval",
    "checks of Megatron's loop on losses, gradients and weights":
        "check_for_large_grads check_weight_hash_across_dp_replicas_interval rerun_mode",
    "what Megatron's loop logs in addition to our lines":
        "timing_log_level timing_log_option barrier_with_L1_time log_params_norm log_num_zeros_in_grad log_energy "
        "log_memory_interval log_device_memory_used log_timers_to_tensorboard log_loss_scale_to_tensorboard "
        "log_validation_ppl_to_tensorboard log_memory_to_tensorboard log_world_size_to_tensorboard "
        "tensorboard_log_interval tensorboard_queue_size wandb_project wandb_exp_name wandb_save_dir wandb_entity "
        "log_straggler straggler_ctrlr_port straggler_minmax_count disable_straggler_on_startup",
    "profilers around iterations":
        "profile profile_step_start profile_step_end profile_ranks use_pytorch_profiler nvtx_ranges record_shapes "
        "pytorch_profiler_collect_shapes pytorch_profiler_collect_callstack record_memory_history memory_snapshot_path",
    "Megatron's checkpoints: what is saved and loaded, when, and by which processes":
        "save_retain_interval finetune ckpt_step exit_on_missing_checkpoint no_save_optim no_save_rng no_load_optim "
        "no_load_rng override_opt_param_scheduler use_checkpoint_opt_param_scheduler dist_ckpt_strictness "
        "dist_ckpt_optim_fully_reshardable ckpt_fully_parallel_save ckpt_fully_parallel_load "
        "ckpt_load_validate_sharding_integrity ckpt_assume_constant_structure async_save async_strategy "
        "use_persistent_ckpt_worker dist_ckpt_workers verify_integrity",
    "process groups and buckets of the data-parallel reduction":
        "ddp_bucket_size ddp_num_buckets ddp_pad_buckets_for_high_nccl_busbw flight_recorder_dump_path "
        "flight_recorder_trace_buffer_size flight_recorder_dump_on_timeout flight_recorder_include_stack_trace "
        "flight_recorder_include_only_active flight_recorder_extra_dump_on_exec",
    "which kernels core's layers take on a GPU; results are the same":
        "bias_swiglu_fusion bias_dropout_fusion apply_rope_fusion gradient_accumulation_fusion use_cpu_initialization "
        "disable_bf16_reduced_precision_matmul disable_jit_fuser",
}  # fmt: skip
"""Flags that our code does not touch and our tests do not run: passed on to Megatron, and named in the log."""


INSTEAD = {
    "leave it out: there is no inference and no reinforcement learning here":
        "--*inference-* --rl-* --*-rl-* --grpo-*",
    "leave it out: shapes change from pack to pack, which CUDA graphs do not support":
        "--*cuda-graph* --te-rng-tracker",
    "chunks per rank are set by --virtual-pipeline-model-parallel-size of omnibal plan":
        "--num-layers-per-virtual-pipeline-stage --microbatch-group-size-*",
    "the plan (--plan) sets pipeline stages and schedule":
        "--decoder-*-pipeline-* --decoder-num-layers --account-for-* --pipeline-model-parallel-* --*overlap-p2p-* "
        "--delay-wgrad-* --defer-embedding-*",
    "--use-distributed-optimizer shards the optimizer's state, which stays on the device":
        "--optimizer-* --*fsdp* --num-distributed-optimizer-* --data-parallel-sharding-*",
    "the plan sets what is recomputed: plan with --memory-gib":
        "--recompute-* --checkpoint-activations --distribute-saved-activations --cpu-offloading-* --*offload*",
    "samples of a pack are isolated; long ones are split over ranks by --widths of omnibal pack":
        "--*context-parallel* --cp-comm-* --max-seqlen-per-* --sft --reset-* --no-create-attention-*",
    "FP8 has --fp8-format, --fp8-recipe and --first-last-layers-bf16 only":
        "--*fp8* --*fp4* --te-precision-*",
    "--optimizer is adam or sgd": "--muon-* --lion-*",
    "overlapped communication has --overlap-grad-reduce and --overlap-param-gather only":
        "--*tp-comm-* --*-align-* --ddp-* --*moe-*-comm --overlap-*",
    "--model sets the experts; only --moe-aux-loss-coeff and --moe-router-dtype can be given":
        "--moe-* --*-moe-*",
    "--model sets the architecture":
        "--use-checkpoint-args --use-mcore-models --apply-* --*rotary-* --*rope-* --yarn-* --mrope-* --*mtp-* "
        "--mamba-* --hybrid-* --is-hybrid-* --heterogeneous-* --multi-latent-* --*-lora-rank --qk-* --v-head-dim "
        "--linear-* --dsa-* --attention-output-* --window-* --softmax-type --squared-relu --openai-gelu --quick-geglu "
        "--img-* --patch-dim --num-channels --num-classes --vision-* --dino-* --spec --padded-vocab-size",
    "leave it out: the attention kernel is chosen by what the machine supports": "--attention-backend --*flash-*",
    "--seed alone sets the initial weights, the same in every layout":
        "--no-initialization --data-parallel-random-* --init-method-* --deterministic-mode",
    "tokens are made by --tokenizer-model and --chat-template of omnibal preprocess":
        "--*tokenizer-* --*tiktoken-* --vocab-* --merge-file --trust-remote-code --chat-template",
    "evaluation data are set by --eval-data and --eval-packs":
        "--valid-data-path --test-data-path --full-validation --test-mode --*validation-set*",
    "training data are set by --data and --packs":
        "--data-* --*-data-path --mock-data --split --*mmap* --eod-mask-loss --*-seq-length --fim-* --dataloader-* "
        "--*dataset* --*-data-args-path --mask-prob --short-seq-prob --iterations-to-skip",
    "--from loads initial weights, --load resumes a run":
        "--pretrained-checkpoint --load-main-* --use-dist-ckpt --auto-detect-ckpt-* --ckpt-convert-*",
    "leave it out: images and conversations alone may lie in a store, datasets, packs, plans and saves stay on a file "
    "system, whose renames and locks they need": "--*msc*",
    "--save and --save-interval write full checkpoints": "--non-persistent-* --replication* --async-ckpt-* --ckpt-*",
    "start the job again: --load resumes it":
        "--inprocess-* --adlr-* --enable-ft-* --ft-* --calc-ft-*",
    "the log has samples and useful tokens a second, every --log-interval": "--log-throughput --log-progress",
}  # fmt: skip


def instead_of(flag: str) -> str:
    """Return what to do instead of giving this flag of Megatron's; "" if no pattern of `INSTEAD` matches it."""
    return next((said for said, many in INSTEAD.items() if any(fnmatchcase(flag, one) for one in many.split())), "")


ONLY: dict[str, tuple[object, ...]] = {
    "optimizer": ("adam", "sgd"),
    "cross_entropy_fusion_impl": ("native",),
    "fp8_recipe": ("tensorwise", "blockwise", "mxfp8"),
    "exit_signal": (Signals.SIGTERM, Signals.SIGINT, Signals.SIGHUP, Signals.SIGUSR2),  # with no other handler
    "rerun_mode": ("disabled", "validate_results"),  # Megatron's loop does not support its parser's third choice
}
"""Supported values of flags; others are refused."""


def each(table: Mapping[str, str]) -> dict[str, str]:
    """Return a reason for each flag, from a table of flags (their names in one text) by reason."""
    return {flag: reason for reason, flags in table.items() for flag in flags.split()}


ALLOWED = each(OBEYED) | each(UNTESTED)
"""The reason of each flag that may be given."""
SET_BY = each(SET)
"""Origin of the value of each flag of `SET`."""
