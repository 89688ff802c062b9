"""Flags that are Megatron's own affair and that no test of ours runs: allowed, and said once in the log."""

from signal import Signals

from megatron.vlm.flags.group import Group

UNTESTED = (
    Group(
        "leaving early: Megatron's loop looks at it between iterations",
        """
        exit_interval exit_duration_in_mins exit_signal_handler
        """,
    ),
    Group(
        "leaving early at a signal that a program may handle, and that nobody else here does",
        """
        exit_signal
        """,
        only=(Signals.SIGTERM, Signals.SIGINT, Signals.SIGHUP, Signals.SIGUSR2),
    ),
    Group(
        "memory and garbage collection between iterations",
        """
        manual_gc manual_gc_interval manual_gc_eval empty_unused_memory_level train_sync_interval
        """,
    ),
    Group(
        "checks of Megatron's loop on losses, gradients and weights",
        """
        check_for_large_grads check_weight_hash_across_dp_replicas_interval
        """,
    ),
    Group(
        "whether Megatron's loop runs iterations again and compares; it does not know its parser's other choice",
        """
        rerun_mode
        """,
        only=("disabled", "validate_results"),
    ),
    Group(
        "what Megatron's loop logs beside our lines",
        """
        timing_log_option log_params_norm log_num_zeros_in_grad tensorboard_log_interval tensorboard_queue_size
        log_timers_to_tensorboard log_loss_scale_to_tensorboard log_validation_ppl_to_tensorboard
        log_memory_to_tensorboard log_memory_interval log_device_memory_used log_world_size_to_tensorboard
        log_energy timing_log_level
        wandb_project wandb_exp_name wandb_save_dir wandb_entity barrier_with_L1_time log_straggler
        straggler_ctrlr_port straggler_minmax_count disable_straggler_on_startup
        """,
    ),
    Group(
        "profilers around iterations",
        """
        profile profile_step_start profile_step_end profile_ranks use_pytorch_profiler
        pytorch_profiler_collect_shapes pytorch_profiler_collect_callstack record_memory_history
        memory_snapshot_path record_shapes nvtx_ranges
        """,
    ),
    Group(
        "when Megatron's loop evaluates",
        """
        start_eval_at_iter
        """,
    ),
    Group(
        "Megatron's checkpoints: what is saved and loaded, when, and by which processes",
        """
        save_retain_interval finetune ckpt_step exit_on_missing_checkpoint no_save_optim no_save_rng
        no_load_optim no_load_rng override_opt_param_scheduler use_checkpoint_opt_param_scheduler
        dist_ckpt_strictness dist_ckpt_optim_fully_reshardable ckpt_fully_parallel_save ckpt_fully_parallel_load
        ckpt_load_validate_sharding_integrity ckpt_assume_constant_structure async_save async_strategy
        use_persistent_ckpt_worker dist_ckpt_workers verify_integrity
        """,
    ),
    Group(
        "process groups and buckets of the data-parallel reduction",
        """
        ddp_bucket_size ddp_num_buckets ddp_pad_buckets_for_high_nccl_busbw
        flight_recorder_dump_path flight_recorder_trace_buffer_size flight_recorder_dump_on_timeout
        flight_recorder_include_stack_trace flight_recorder_include_only_active
        flight_recorder_extra_dump_on_exec
        """,
    ),
    Group(
        "which kernels core's layers take on a GPU; results are the same",
        """
        bias_swiglu_fusion bias_dropout_fusion apply_rope_fusion gradient_accumulation_fusion
        use_cpu_initialization disable_bf16_reduced_precision_matmul disable_jit_fuser
        """,
    ),
)
