"""Read the config.json of GLM-4.1V, GLM-4.5V and GLM-4.6V (arXiv 2507.01006): a ViT at native resolution whose learned
positions are stretched bicubically, M-RoPE of a part of each head in the language model, dense or with experts."""

from pathlib import Path
from typing import Any

from omnibal_ext.architectures.architecture import Architecture, PromptFormat
from omnibal_ext.architectures.folder import OLD_PROCESSOR, PROCESSOR, read_config
from omnibal_ext.errors import UserError
from omnibal_ext.families.section import Section
from omnibal_ext.families.towers.llama import Sizes, chosen_experts, language_sizes, tied, tied_as_either_says
from omnibal_ext.families.towers.native import ACTIVATIONS, native_sizes, rotary_base
from omnibal_ext.families.towers.rotation import Rotation, partial_rotation, rotary_share, rotation_fields
from omnibal_ext.modalities.language.architecture import LanguageArchitecture
from omnibal_ext.modalities.language.experts import Experts
from omnibal_ext.modalities.language.layer import Attention, Layer
from omnibal_ext.modalities.vision.architecture import NativeResolution, VisionArchitecture
from omnibal_ext.reading.checks import finite

GLM_46V_PROCESSOR = "Glm46VProcessor"
"""The class of GLM-4.6V's processor, as a folder's files name it."""
ROTATION = Rotation(sections=(8, 12, 12))


def read_glm(name: str, config: Section) -> Architecture:
    """Read a glm4v's, glm46v's or glm4v_moe's config.json. Raises UserError naming an unsupported field."""
    kind = "glm4v_moe" if config["model_type"] == "glm4v_moe" else "glm4v"
    tower, text = config.towers(f"{kind}_vision", f"{kind}_text")
    language = _mixture(text) if kind == "glm4v_moe" else read_dense(text, None, qkv_bias=True)
    vision, merger_width = read_vision(tower, language.hidden_size), tower.take("intermediate_size")
    tower.refuse_unread()
    return whole(name, config, text, vision, language, merger_width, _prompt(config))


def whole(
    name: str, config: Section, text: Section, vision: VisionArchitecture, language: LanguageArchitecture,
    merger_width: int, prompt: PromptFormat,
) -> Architecture:  # fmt: skip
    """Return the model of these parts; `text`: the language model's section, `merger_width`: the projector's MLP's."""
    is_46v = config["model_type"] == "glm46v"  # whose class does not read what its language model's section says
    return Architecture(
        name,
        vision,
        language,
        merger="gated",
        merger_width=merger_width,
        projector_norm=False,
        tied=tied(config) if is_46v else tied_as_either_says(config),
        prompt=prompt,
        types=(config["model_type"], text["model_type"]),
    )


def _prompt(config: Section) -> PromptFormat:
    """Return how prompts are written; the folder's processor, not the model type, decides how a video's times are."""
    kind, markup = config["model_type"], "glm-4.6v"
    files = (config.folder / name for name in (PROCESSOR, OLD_PROCESSOR)) if config.folder else ()
    if kind != "glm46v" and GLM_46V_PROCESSOR not in map(_processor, files):
        markup = "glm-4.1v"
    template = "glm-4.1v" if kind == "glm4v" else "glm-4.5v"
    return PromptFormat(markup, config.take("image_token_id"), template, "native_grown")


def _processor(file: Path) -> Any:
    return read_config(file).get("processor_class") if file.is_file() else None


def read_vision(tower: Section, out: int) -> VisionArchitecture:
    """Read the ViT. Raises UserError unless its output is `out` wide, as the language model's hidden states."""
    tower.must(in_channels=3, attention_dropout=0.0, hidden_dropout_prob=0.0, spatial_merge_size=2)
    sizes = native_sizes(tower)
    if (given := tower.take("out_hidden_size")) != out:
        raise UserError(f"{tower.where}: its output is {given} wide, the language model's hidden_size is {out}")
    return VisionArchitecture(
        **sizes,
        ffn_hidden_size=out,
        normalization="RMSNorm",
        norm_epsilon=tower.take("rms_norm_eps"),
        qkv_bias=tower.take("attention_bias"),
        bias=False,
        activation=tower.choose("hidden_act", ACTIVATIONS),
        gated=True,
        pre_norm=True,
        final_norm=True,
        pixels="clip",
        native=NativeResolution(
            frames=tower.take("temporal_patch_size"),
            theta=rotary_base(tower),
            learned_positions=tower.take("image_size") // sizes["patch_size"],
            bicubic=True,
        ),
    )


def read_dense(section: Section, head_size: int | None, qkv_bias: bool) -> LanguageArchitecture:
    """Read a dense language model; `head_size` None: hidden size / heads. Raises UserError naming a bad field."""
    sizes = language_sizes(section, head_size)
    if head_size is None:
        if sizes.hidden_size % sizes.heads:
            raise UserError(
                f"{section.where}: hidden_size {sizes.hidden_size} does not divide into {sizes.heads} heads"
            )
        section.must(head_dim=sizes.head_dim)
    layer = Layer(_attention(section, sizes, 1.0, qkv_bias), sizes.ffn_hidden_size, branch_norms=True)
    section.refuse_unread()
    return sizes.model((layer,) * sizes.layers, older=sizes.older)


def _mixture(section: Section) -> LanguageArchitecture:
    sizes = language_sizes(section, section.take_if("head_dim"), mixture=True)
    experts, layers = _experts(section), sizes.layers
    dense, width = section.take("first_k_dense_replace"), section.take("intermediate_size")
    if dense >= layers:
        raise UserError(f"{section.where}.first_k_dense_replace is {dense}; supported: fewer than the {layers} layers")
    attention = _attention(section, sizes, 0.5, section.take("attention_bias"))
    section.refuse_unread()
    first, others = Layer(attention, width), Layer(attention, sizes.ffn_hidden_size, experts)
    return sizes.model((first,) * dense + (others,) * (layers - dense), older=sizes.older)


def _attention(section: Section, sizes: Sizes, share: float, qkv_bias: bool) -> Attention:
    """Return the attention of all layers; `share`: fraction of a head that RoPE rotates if config.json does not say."""
    section.must(hidden_act="silu", attention_dropout=0.0)
    rope, base = rotation_fields(section, ROTATION)
    rotated = int(sizes.head_dim * rotary_share(section, rope, share))
    rotation = partial_rotation(section, rope, base, rotated, sizes.head_dim, ROTATION)
    return sizes.attention(rope=rotation, qkv_bias=qkv_bias)


def _experts(section: Section) -> Experts:
    """Read experts of the layers behind the dense ones. Raises UserError for routing that Megatron does not have."""
    section.must(norm_topk_prob=True)
    count = section.take("n_routed_experts")
    chosen = chosen_experts(section, count)
    groups, chosen_groups = (section.take(name) for name in ("n_group", "topk_group"))
    two_a_group = groups > 1 and (chosen // chosen_groups != 2 or count // groups < 2)
    if count % groups or chosen_groups > groups or two_a_group:
        raise UserError(
            f"{section.where}: {chosen} of {count} experts, {chosen_groups} of {groups} groups (n_group, topk_group); "
            "supported: one group, or groups of one size, of which half as many are chosen as experts"
        )
    return Experts(
        count,
        chosen,
        balance=section.take("router_aux_loss_coef"),
        shared=section.take("moe_intermediate_size") * section.take("n_shared_experts"),
        shared_gate=False,
        sigmoids=True,
        groups=groups,
        chosen_groups=chosen_groups,
        scale=section.take("routed_scaling_factor", finite(1e-6, 1e6)),
    )
