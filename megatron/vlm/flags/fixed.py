"""Flags that preset, plan, index, machine or trainer set; another value is refused."""

from megatron.vlm.flags.group import Group

SET = (
    Group(
        "--preset: the model's sizes, from its config.json or omnibal_ext/architectures; choose another --preset",
        """
        num_layers encoder_num_layers hidden_size ffn_hidden_size num_attention_heads group_query_attention
        num_query_groups kv_channels normalization layernorm_epsilon swiglu add_bias_linear add_qkv_bias
        num_experts moe_ffn_hidden_size moe_router_topk moe_router_pre_softmax
        qk_layernorm position_embedding_type rotary_base rotary_percent rotary_interleaved
        add_position_embedding untie_embeddings_and_output_weights vocab_size tokenizer_type
        """,
    ),
    Group(
        "--plan: the layout is the plan's; plan again with tools/plan_layout.py",
        """
        pipeline_model_parallel_size num_virtual_stages_per_pipeline_rank
        """,
    ),
    Group(
        "--plan: the longest pack, the packed index's --llm-budget; pack with another budget",
        """
        seq_length max_position_embeddings
        """,
    ),
    Group(
        "the trainer: a microbatch is one pack; larger ones come of larger budgets (tools/pack_data.py "
        "--vit-budget --llm-budget)",
        """
        micro_batch_size eval_micro_batch_size
        """,
    ),
    Group(
        "the trainer: packs are read from --packs, in the index's order",
        """
        dataloader_type
        """,
    ),
    Group(
        "the trainer: the loss is the mean over the global batch; --loss-reduction chooses over what",
        """
        calculate_per_token_loss
        """,
    ),
    Group(
        "the trainer: an evaluation is a whole pass over --eval-packs; pack fewer samples for a shorter one",
        """
        eval_iters eval_global_batch_size
        """,
    ),
    Group(
        "the trainer: a sample longer than a rank's budget is run by neighbouring data-parallel ranks together; pack "
        "with tools/pack_data.py --widths",
        """
        context_parallel_size
        """,
    ),
    Group(
        "the trainer: weights are cut over tensor-parallel ranks and stages alone; use --tensor-model-parallel-size",
        """
        tensor_parallel_num_weight_shards
        """,
    ),
    Group(
        "the trainer: experts are cut over the tensor-parallel ranks, as other perceptrons are, or whole where "
        "--expert-model-parallel-size deals them over ranks",
        """
        expert_tensor_parallel_size
        """,
    ),
    Group(
        "the trainer: routers are balanced sample by sample, which depends on no pack; --moe-aux-loss-coeff says how "
        "much, 0: not at all",
        """
        moe_router_load_balancing_type
        """,
    ),
    Group(
        "the machine: CUDA or CPU, and what torchrun says",
        """
        distributed_backend local_rank
        """,
    ),
    Group(
        "the machine: layers are core's local ones, with our norms and attention; Megatron's own kernels for "
        "these are not used",
        """
        transformer_impl masked_softmax_fusion bias_gelu_fusion no_persist_layer_norm
        """,
    ),
    Group(
        "the trainer: between layers and stages travels the precision of --bf16 or --fp16; softmax and norms "
        "compute in fp32 inside their kernels",
        """
        fp32_residual_connection attention_softmax_in_fp32
        """,
    ),
    Group(
        "the trainer: a step that is not finite is left out and named; --max-bad-steps says how many may be",
        """
        check_for_nan_in_loss_and_grad
        """,
    ),
    Group(
        "the trainer: only distributed checkpoints are read by every layout",
        """
        ckpt_format
        """,
    ),
    Group(
        "the trainer: that service is inside NVIDIA; use --tensorboard-dir or --wandb-project",
        """
        enable_one_logger
        """,
    ),
)
