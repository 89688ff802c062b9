"""What Megatron's flags and ours need: their numbers an interval, to have an effect another flag or a relation.

A flag given with its default value needs nothing.
"""

from argparse import Namespace
from operator import attrgetter

from megatron.vlm import optional, platform, rates
from omnibal_ext import adapters, trainer_flags
from omnibal_ext.costs import states
from omnibal_ext.flags import Interval, Need, flag_name


def decay_iterations(args: Namespace) -> int:
    """Return the iteration at which the learning rate's decay ends."""
    return int(args.lr_decay_iters or args.train_iters)


def warmup_iterations(args: Namespace) -> float:
    """Return the iterations of learning-rate warm-up."""
    return float(args.lr_warmup_iters or (args.lr_warmup_fraction or 0.0) * decay_iterations(args))


def _decay_rises(args: Namespace) -> bool:
    start, end = args.start_weight_decay, args.end_weight_decay
    return args.weight_decay_incr_style == "constant" or (None not in (start, end) and start <= end)


def _is_multiple(number: int, of: int | None) -> bool:
    return not of or number % of == 0


ON = {
    "lora_rank": "lora_alpha",
    "bf16": f"grad_reduce_in_bf16 {states.AWARE}",
    states.AWARE: " ".join(states.DTYPES),
    "first_last_layers_bf16": "num_layers_at_start_in_bf16 num_layers_at_end_in_bf16",
    "save":
        "save_interval save_retain_interval save_hf async_save no_save_optim no_save_rng ckpt_fully_parallel_save "
        "ckpt_assume_constant_structure",
    "async_save": "async_strategy use_persistent_ckpt_worker dist_ckpt_workers",
    "ckpt_assume_constant_structure": "dist_ckpt_workers",
    "tensorboard_dir":
        "tensorboard_log_interval tensorboard_queue_size log_timers_to_tensorboard log_loss_scale_to_tensorboard "
        "log_validation_ppl_to_tensorboard log_memory_to_tensorboard log_world_size_to_tensorboard "
        "use_pytorch_profiler",
    "log_straggler": "straggler_ctrlr_port straggler_minmax_count disable_straggler_on_startup",
    "wandb_project": "wandb_exp_name wandb_save_dir wandb_entity",
    "wandb_exp_name": "wandb_project",
    "metrics_file": "timelines",
    "profile":
        "profile_step_start profile_step_end profile_ranks use_pytorch_profiler nvtx_ranges record_shapes "
        "pytorch_profiler_collect_shapes pytorch_profiler_collect_callstack",
    "use_pytorch_profiler": "pytorch_profiler_collect_shapes pytorch_profiler_collect_callstack",
    "record_memory_history": "memory_snapshot_path",
    "exit_signal_handler": "exit_signal",
    "manual_gc": "manual_gc_interval manual_gc_eval",
    "overlap_grad_reduce": "ddp_bucket_size ddp_num_buckets",
    "use_distributed_optimizer":
        f"ddp_pad_buckets_for_high_nccl_busbw dist_ckpt_optim_fully_reshardable {states.AWARE}",
    "flight_recorder_dump_path":
        "flight_recorder_trace_buffer_size flight_recorder_dump_on_timeout flight_recorder_include_stack_trace "
        "flight_recorder_include_only_active flight_recorder_extra_dump_on_exec",
}  # fmt: skip
"""Flags that need one other flag, by its name."""
ON_A_GPU = (
    "record_memory_history log_memory_to_tensorboard log_straggler log_energy log_device_memory_used nvtx_ranges "
    "ddp_pad_buckets_for_high_nccl_busbw"
)
EVALUATING = "eval_interval start_eval_at_iter skip_train log_validation_ppl_to_tensorboard"
OF_A_START = (
    "ckpt_step exit_on_missing_checkpoint finetune no_load_optim no_load_rng override_opt_param_scheduler "
    "use_checkpoint_opt_param_scheduler dist_ckpt_strictness ckpt_fully_parallel_load "
    "ckpt_load_validate_sharding_integrity verify_integrity"
)


NUMBERS = (
    *trainer_flags.NUMBERS,
    Interval(
        "[1, inf)",
        """
        lr_decay_iters lr_wsd_decay_iters global_batch_size exit_interval exit_duration_in_mins
        tensorboard_log_interval tensorboard_queue_size log_memory_interval train_sync_interval
        check_weight_hash_across_dp_replicas_interval ckpt_step ddp_bucket_size ddp_num_buckets
        loss_scale_window hysteresis
        """,
    ),
    Interval(
        "[0, 1e30]",  # products of a few stay finite in single precision
        """
        lr_warmup_init start_weight_decay end_weight_decay adam_eps
        init_method_std embedding_init_method_std moe_aux_loss_coeff
        """,
    ),
    Interval(
        "[0, inf)",
        """
        num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 manual_gc_interval start_eval_at_iter
        profile_step_start profile_step_end logging_level
        """,
    ),
    Interval("[0, 1)", "hidden_dropout attention_dropout adam_beta1 adam_beta2 sgd_momentum"),
    Interval("(0, 3.4e38]", "loss_scale initial_loss_scale min_loss_scale"),  # kept in single precision
    Interval("[1, 2147483647]", "flight_recorder_trace_buffer_size"),
    Interval("[1, 16384]", "tensor_model_parallel_size expert_model_parallel_size straggler_minmax_count"),
    Interval("[0, 16383]", "profile_ranks"),
    Interval("[1, 128]", "dist_ckpt_workers"),
    Interval("[1, 525600]", "distributed_timeout_minutes"),
    Interval("[1, 65535]", "straggler_ctrlr_port"),
    Interval("[1, 65536]", "make_vocab_size_divisible_by"),
)


NEEDS = (
    *adapters.NEEDS,
    *rates.NEEDS,
    *(Need(names, flag_name(name), attrgetter(name)) for name, names in ON.items()),
    # learning rate
    Need("lr_warmup_iters", "a later end of the decay: --lr-decay-iters, which are --train-iters unless given",
         lambda args: args.lr_warmup_iters < decay_iterations(args)),
    Need("lr_warmup_fraction", "to be given without --lr-warmup-iters", lambda args: not args.lr_warmup_iters),
    Need("lr_warmup_init", "--lr-warmup-iters or --lr-warmup-fraction, and an --lr that is no lower",
         lambda args: warmup_iterations(args) > 0 and args.lr_warmup_init <= args.lr),
    Need("lr_decay_style", "--lr-wsd-decay-iters: the iterations at the end in which it falls",
         lambda args: args.lr_decay_style != "WSD" or args.lr_wsd_decay_iters is not None),
    Need("lr_wsd_decay_iters lr_wsd_decay_style", "--lr-decay-style WSD", lambda args: args.lr_decay_style == "WSD"),
    Need("lr_wsd_decay_iters", "as many iterations between the warm-up and --lr-decay-iters, or --train-iters",
         lambda args: args.lr_wsd_decay_iters + warmup_iterations(args) <= decay_iterations(args)),
    # optimizer and precision
    Need("adam_beta1 adam_beta2 adam_eps use_distributed_optimizer", "--optimizer adam",
         lambda args: args.optimizer == "adam"),
    Need("sgd_momentum", "--optimizer sgd", lambda args: args.optimizer == "sgd"),
    Need("weight_decay", "--weight-decay-incr-style constant", lambda args: args.weight_decay_incr_style == "constant"),
    Need("start_weight_decay end_weight_decay", "--weight-decay-incr-style linear or cosine",
         lambda args: args.weight_decay_incr_style != "constant"),
    Need("weight_decay_incr_style", "--start-weight-decay, and an --end-weight-decay that is no lower",
         _decay_rises),
    Need("loss_scale", "--fp16, --bf16 or --use-distributed-optimizer",
         lambda args: args.fp16 or args.bf16 or args.use_distributed_optimizer),
    Need("initial_loss_scale min_loss_scale loss_scale_window hysteresis", "--fp16, and no --loss-scale",
         lambda args: args.fp16 and not args.loss_scale),
    Need("initial_loss_scale min_loss_scale", "a --min-loss-scale that is no higher than --initial-loss-scale",
         lambda args: args.min_loss_scale <= args.initial_loss_scale),
    Need("loss_scale_window", "to be a whole number", lambda args: float(args.loss_scale_window).is_integer()),
    Need(states.AWARE, "Transformer Engine, whose FusedAdam keeps such states",
         lambda _: platform.HAS_TRANSFORMER_ENGINE),
    Need(states.AWARE, "to be given without --fp8-format, whose weights core copies in fp32",
         lambda args: not args.fp8),
    Need("fp8_recipe first_last_layers_bf16", "--fp8-format", lambda args: args.fp8),
    Need("moe_router_dtype", "a --model with experts", lambda args: args.num_experts),
    # evaluation and checkpoints
    Need(EVALUATING, "--eval-data and --eval-packs", lambda args: args.eval_data or args.eval_packs),
    Need("save", "--save-interval: after so many iterations a checkpoint is saved", lambda args: args.save_interval),
    Need("save_retain_interval", "to be a multiple of --save-interval",
         lambda args: _is_multiple(args.save_retain_interval, args.save_interval)),
    Need("async_save", "--use-persistent-ckpt-worker: Megatron saves while it trains in a process that stays",
         lambda args: args.use_persistent_ckpt_worker),
    Need("async_save", "--async-strategy mcore, or the package nvidia-resiliency-ext",
         lambda args: args.async_strategy == "mcore" or optional.installed("nvidia_resiliency_ext")),
    Need("dist_ckpt_optim_fully_reshardable", "--save or --load", lambda args: args.save or args.load),
    Need(OF_A_START, "--load, --from or --save", lambda args: args.load or args.first_weights or args.save),
    Need("override_opt_param_scheduler", "to be given without --use-checkpoint-opt-param-scheduler",
         lambda args: not args.use_checkpoint_opt_param_scheduler),
    # data, logs, profilers, processes
    Need("cache_tiles", "images that are compared: leave --no-image-checksums out", attrgetter("image_checksums")),
    Need("log_memory_interval", "to be a multiple of --log-interval",
         lambda args: _is_multiple(args.log_memory_interval, args.log_interval)),
    Need("barrier_with_L1_time", "--timing-log-level 1 or 2", lambda args: args.timing_log_level),
    Need("straggler_minmax_count", "to be below the number of ranks",
         lambda args: args.straggler_minmax_count < args.world_size),
    Need("wandb_project", "the package wandb, and --wandb-save-dir or --save",
         lambda args: optional.installed("wandb") and (args.wandb_save_dir or args.save)),
    Need("record_shapes", "to be given without --use-pytorch-profiler", lambda args: not args.use_pytorch_profiler),
    Need("profile", "--profile-step-start below --profile-step-end, and that no later than --train-iters",
         lambda args: args.profile_step_start < args.profile_step_end <= args.train_iters),
    Need("profile_ranks", "to be below the number of ranks",
         lambda args: all(rank < args.world_size for rank in args.profile_ranks)),
    Need("ddp_num_buckets", "to be given without --ddp-bucket-size", lambda args: args.ddp_bucket_size is None),
    Need(ON_A_GPU, "a GPU", lambda _: platform.HAS_CUDA),
    Need("log_energy", "the package nvidia-ml-py", lambda _: optional.installed("pynvml")),
    Need("profile", "a GPU, or --use-pytorch-profiler", lambda args: platform.HAS_CUDA or args.use_pytorch_profiler),
)  # fmt: skip
