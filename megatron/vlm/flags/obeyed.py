"""Flags that our chain, schedule and data obey, or that Megatron does and our tests show."""

from megatron.vlm.flags.group import Group

OBEYED = (
    Group(
        "tests/system/test_training.py::test_resuming_goes_on_with_the_same_data_and_loss",
        """
        train_iters lr_decay_iters log_interval global_batch_size save save_interval load
        """,
    ),
    Group(
        "tests/distributed/test_parity.py::test_every_case_equals_one_process",
        """
        tensor_model_parallel_size sequence_parallel expert_model_parallel_size overlap_grad_reduce
        distributed_timeout_minutes
        """,
    ),
    Group(
        "tests/system/test_training.py::test_the_distributed_optimizer_resumes_without_apex_or_transformer_engine",
        """
        use_distributed_optimizer
        """,
    ),
    Group(
        "tests/distributed/test_training.py::test_all_layouts_train_the_same_weights",
        """
        overlap_param_gather
        """,
    ),
    Group(
        "tests/system/test_training.py::test_an_evaluation_is_every_held_out_token_once",
        """
        eval_interval skip_train
        """,
    ),
    Group(
        "tests/distributed/test_dropout.py::test_recomputing_draws_the_same_dropout",
        """
        hidden_dropout attention_dropout
        """,
    ),
    Group(
        "tests/distributed/test_training.py::test_half_precision_differs_by_its_rounding",
        """
        bf16 fp16
        """,
    ),
    Group(
        "tests/unit/flags/test_obeyed.py::test_adam_takes_the_steps_that_the_flags_say",
        """
        lr min_lr lr_decay_style lr_warmup_iters lr_warmup_init weight_decay adam_beta1 adam_beta2 adam_eps
        clip_grad
        """,
    ),
    Group(
        "tests/unit/flags/test_obeyed.py::test_sgd_takes_the_steps_that_the_flags_say",
        """
        sgd_momentum lr_warmup_fraction start_weight_decay end_weight_decay weight_decay_incr_style
        """,
    ),
    Group(
        "tests/unit/flags/test_obeyed.py::test_sgd_takes_the_steps_that_the_flags_say",
        """
        optimizer
        """,
        only=("adam", "sgd"),
    ),
    Group(
        "tests/unit/flags/test_obeyed.py::test_the_last_iterations_decay_as_wsd_says",
        """
        lr_wsd_decay_iters lr_wsd_decay_style
        """,
    ),
    Group(
        "tests/unit/flags/test_obeyed.py::test_the_loss_is_scaled_as_the_flags_say",
        """
        loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis
        """,
    ),
    Group(
        "tests/unit/flags/test_obeyed.py::test_gradients_are_kept_in_the_precision_asked_for",
        """
        accumulate_allreduce_grads_in_fp32 grad_reduce_in_bf16
        """,
    ),
    Group(
        "tests/unit/flags/test_obeyed.py::test_weights_start_as_the_flags_say",
        """
        seed init_method_std embedding_init_method_std make_vocab_size_divisible_by
        """,
    ),
    Group(
        "tests/unit/flags/test_obeyed.py::test_workers_read_ahead_where_images_are_decoded",
        """
        num_workers
        """,
    ),
    Group(
        "tests/unit/models/test_reference.py::test_the_head_takes_the_cross_entropy_that_the_flag_says",
        """
        cross_entropy_loss_fusion
        """,
    ),
    Group(
        "tests/unit/models/test_reference.py::test_the_head_takes_the_cross_entropy_that_the_flag_says",
        """
        cross_entropy_fusion_impl
        """,
        only=("native",),
    ),
    Group(
        "tests/unit/models/test_experts.py::test_balance_is_that_of_each_sample",
        """
        moe_aux_loss_coeff
        """,
    ),
    Group(
        "tests/unit/models/test_experts.py::test_routers_compute_in_the_precision_asked_for",
        """
        moe_router_dtype
        """,
    ),
    Group(
        "tests/unit/models/test_fp8.py::test_language_layers_multiply_in_eight_bits",
        """
        fp8 first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16
        """,
    ),
    Group(
        "tests/unit/models/test_fp8.py::test_language_layers_multiply_in_eight_bits",
        """
        fp8_recipe
        """,
        only=("tensorwise", "blockwise", "mxfp8"),
    ),
    Group(
        "tests/system/test_log.py::test_our_lines_are_seen_without_scrolling",
        """
        tensorboard_dir
        """,
    ),
    Group(
        "tests/unit/flags/test_obeyed.py::test_logging_starts_at_the_level_asked_for",
        """
        logging_level
        """,
    ),
)
