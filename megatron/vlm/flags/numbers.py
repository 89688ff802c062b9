"""Intervals of numeric flags, Megatron's and ours."""

from omnibal_ext import trainer_flags
from omnibal_ext.flags import Interval

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
