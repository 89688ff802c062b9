"""Core's configurations of language model and encoders, from Megatron's arguments and an architecture."""

import copy
from argparse import Namespace

from megatron.core.activations import quick_gelu
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import init_method_normal, scaled_init_method_normal
from megatron.training.arguments import core_transformer_config_from_args
from torch import Tensor
from torch.nn.functional import gelu, silu

from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.modalities.language.experts import Experts
from omnibal_ext.modalities.language.layer import Attention
from omnibal_ext.modalities.vision.architecture import VisionArchitecture


def gelu_tanh(value: Tensor) -> Tensor:
    """Apply GELU by its tanh approximation."""
    return gelu(value, approximate="tanh")


ACTIVATIONS = {"gelu": gelu, "quick_gelu": quick_gelu, "gelu_tanh": gelu_tanh, "silu": silu}


def language_config(args: Namespace, architecture: Architecture) -> TransformerConfig:
    """Return the language model's configuration: Megatron's, with the true number of layers. What layers may differ in,
    each sets for itself (`language.language_layer_config`).

    Groups of heads are padded to a multiple of the tensor-parallel size.
    """
    heads, groups = args.num_attention_heads, args.num_query_groups
    filled = Attention(heads, groups, args.kv_channels).groups_over(args.tensor_model_parallel_size)
    numbers = {"num_query_groups": filled, "num_attention_heads": filled * (heads // groups)}
    # Core lets weight gradients wait only where experts exchange tokens meanwhile; ours wait for a schedule.
    config = core_transformer_config_from_args(Namespace(**vars(args) | numbers | {"delay_wgrad_compute": False}))
    config.delay_wgrad_compute = args.delay_wgrad_compute
    config.num_layers = architecture.language.layers
    config.layernorm_zero_centered_gamma = architecture.language.centred_norms
    if experts := architecture.language.experts:
        _set_router(config, experts)
    _set_initialization(config)
    return config


def _set_router(config: TransformerConfig, experts: Experts) -> None:
    """Set how experts are chosen and weighed, and the one that all tokens share."""
    if experts.shared:
        config.moe_shared_expert_intermediate_size = experts.shared
        config.moe_shared_expert_gate = experts.shared_gate
    if experts.sigmoids:
        config.moe_router_score_function, config.moe_router_enable_expert_bias = "sigmoid", True
    if experts.groups > 1:
        config.moe_router_num_groups, config.moe_router_group_topk = experts.groups, experts.chosen_groups
    if experts.scale != 1:
        config.moe_router_topk_scaling_factor = experts.scale


def vision_config(language: TransformerConfig, vision: VisionArchitecture) -> TransformerConfig:
    """Return a ViT's configuration: the language model's parallelism, precision and dropout, the ViT's sizes.

    Heads are padded to a multiple of the tensor-parallel size, under sequence parallelism a pack's tokens too.
    """
    config = copy.deepcopy(language)
    config.num_layers = max(1, vision.layers)  # core draws weights by the root of it
    config.hidden_size = vision.hidden_size
    heads = vision.heads_over(config.tensor_model_parallel_size)
    config.num_attention_heads = config.num_query_groups = heads
    config.kv_channels = vision.hidden_size // vision.heads
    config.ffn_hidden_size = vision.ffn_hidden_size
    config.normalization = vision.normalization
    config.layernorm_zero_centered_gamma = False
    config.softmax_scale = 1.0 if vision.head_norms else None
    config.layernorm_epsilon = vision.norm_epsilon
    config.gated_linear_unit = vision.gated
    config.activation_func = ACTIVATIONS[vision.activation]
    config.add_bias_linear = vision.bias
    config.num_moe_experts = None
    config.fp8 = None  # 1025 tokens a tile make no whole blocks of eight bits
    config.add_qkv_bias = vision.qkv_bias
    config.qk_layernorm = vision.qk_norm or vision.norms_heads
    config.bias_activation_fusion = False  # core's is another GELU; `perceptron.Perceptron` fuses the model's own
    _set_initialization(config)
    return config


def outside_layers(config: TransformerConfig) -> TransformerConfig:
    """Copy a configuration for modules outside transformer layers: every rank sees all rows."""
    config = copy.copy(config)
    config.sequence_parallel = False
    return config


def _set_initialization(config: TransformerConfig) -> None:
    config.init_method = init_method_normal(config.init_method_std)
    config.embedding_init_method = init_method_normal(config.embedding_init_method_std or config.init_method_std)
    config.output_layer_init_method = scaled_init_method_normal(config.init_method_std, config.num_layers)
