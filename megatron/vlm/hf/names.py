"""What our weights are called at Hugging Face, as data: one table for each kind of tower.

A line says: in links of this kind, our weight is made of these of theirs, in this form, if the model has it. `{n}` is
the number of the layer, `{f}` of a feature that enters the language model later, `{e}` of an expert, of which there are
many names. Names are those of published
checkpoints on disk; other spellings are brought to them first.
"""

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter

from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.chain import FULL, LINEAR, layer_names


@dataclass(frozen=True)
class Weight:
    """One weight of ours, in layers whose costs stand under `kind`; `form` is a name of `forms.FORMS`, `when` a field
    of the architecture that must be true."""

    kind: str
    ours: str
    theirs: tuple[str, ...]
    form: str = "same"
    when: str = ""


def _norm(kind: str, ours: str, theirs: str, when: str = "") -> Iterator[Weight]:
    """A vision tower's norm has a bias if it is a LayerNorm."""
    yield Weight(kind, f"{ours}.weight", (f"{theirs}.weight",), when=when)
    yield Weight(kind, f"{ours}.bias", (f"{theirs}.bias",), when=when or "vision.norm_bias")


def _linear(kind: str, ours: str, theirs: str, when: str = "") -> Iterator[Weight]:
    yield Weight(kind, f"{ours}.weight", (f"{theirs}.weight",))
    yield Weight(kind, f"{ours}.bias", (f"{theirs}.bias",), when=when)


def _split_qkv(kind: str, theirs: str, form: str, when: str) -> Iterator[Weight]:
    for part, condition in (("weight", ""), ("bias", when)):
        names = tuple(f"{theirs}{one}_proj.{part}" for one in "qkv")
        yield Weight(kind, f"self_attention.linear_qkv.{part}", names, form, condition)


def _embedding(class_token: str, positions: str, patches: str) -> Iterator[Weight]:
    yield Weight("patch_embed", "class_token", (class_token,), "tokens", "vision.class_token")
    yield Weight("patch_embed", "positions", (positions,), "tokens")
    yield Weight("patch_embed", "projection.weight", (f"{patches}.weight",))
    yield Weight("patch_embed", "projection.bias", (f"{patches}.bias",), when="vision.patch_bias")


def _intern_vit(layer: str, names: dict[str, str]) -> Iterator[Weight]:
    """What transformers' and InternVL's own code have alike in a layer; `names` are the parts' names."""
    yield from _norm("vit", "input_layernorm", f"{layer}.{names['norm1']}")
    yield from _norm("vit", "pre_mlp_layernorm", f"{layer}.{names['norm2']}")
    yield from _linear("vit", "self_attention.linear_proj", f"{layer}.{names['projection']}")
    yield from _linear("vit", "mlp.linear_fc1", f"{layer}.mlp.fc1")
    yield from _linear("vit", "mlp.linear_fc2", f"{layer}.mlp.fc2")
    yield Weight("vit", "self_attn_bda.scale", (f"{layer}.{names['scale1']}",), when="vision.layer_scale")
    yield Weight("vit", "mlp_bda.scale", (f"{layer}.{names['scale2']}",), when="vision.layer_scale")
    for one in "qk":
        norm = f"{layer}.{names['attention']}.{one}_norm.weight"
        yield Weight("vit", f"self_attention.{one}_layernorm.weight", (norm,), when="vision.qk_norm")


def _internvl_vision() -> Iterator[Weight]:
    names = {"norm1": "layernorm_before", "norm2": "layernorm_after", "projection": "attention.projection_layer"}
    names |= {"scale1": "lambda_1", "scale2": "lambda_2", "attention": "attention"}
    layer, embeddings = "vision_tower.encoder.layer.{n}", "vision_tower.embeddings"
    yield from _embedding(
        f"{embeddings}.cls_token", f"{embeddings}.position_embeddings", f"{embeddings}.patch_embeddings.projection"
    )
    yield from _intern_vit(layer, names)
    yield from _split_qkv("vit", f"{layer}.attention.", "vision_qkv", "vision.qkv_bias")
    yield from _norm("projector", "vision_norm", "vision_tower.layernorm", when="vision.final_norm")
    yield from _norm("projector", "norm", "multi_modal_projector.layer_norm", when="projector_norm")
    yield from _linear("projector", "linear_fc1", "multi_modal_projector.linear_1")
    yield from _linear("projector", "linear_fc2", "multi_modal_projector.linear_2")


def _internvl_original_vision() -> Iterator[Weight]:
    names = {"norm1": "norm1", "norm2": "norm2", "projection": "attn.proj"}
    names |= {"scale1": "ls1", "scale2": "ls2", "attention": "attn"}
    layer, embeddings = "vision_model.encoder.layers.{n}", "vision_model.embeddings"
    yield from _embedding(
        f"{embeddings}.class_embedding", f"{embeddings}.position_embedding", f"{embeddings}.patch_embedding"
    )
    yield from _intern_vit(layer, names)
    yield Weight("vit", "self_attention.linear_qkv.weight", (f"{layer}.attn.qkv.weight",), "vision_packed_qkv")
    yield Weight(
        "vit", "self_attention.linear_qkv.bias", (f"{layer}.attn.qkv.bias",), "vision_packed_qkv", "vision.qkv_bias"
    )
    yield from _norm("projector", "norm", "mlp1.0", when="projector_norm")
    yield from _linear("projector", "linear_fc1", "mlp1.1")
    yield from _linear("projector", "linear_fc2", "mlp1.3")


def _llava_vision() -> Iterator[Weight]:
    """CLIP's, and SigLIP's, which has no class token."""
    layer, embeddings = "vision_tower.encoder.layers.{n}", "vision_tower.embeddings"
    yield from _embedding(
        f"{embeddings}.class_embedding", f"{embeddings}.position_embedding.weight", f"{embeddings}.patch_embedding"
    )
    yield from _norm("patch_embed", "norm", "vision_tower.pre_layrnorm", when="vision.pre_norm")
    yield from _norm("vit", "input_layernorm", f"{layer}.layer_norm1")
    yield from _norm("vit", "pre_mlp_layernorm", f"{layer}.layer_norm2")
    yield from _split_qkv("vit", f"{layer}.self_attn.", "vision_qkv", "vision.qkv_bias")
    yield from _linear("vit", "self_attention.linear_proj", f"{layer}.self_attn.out_proj")
    yield from _linear("vit", "mlp.linear_fc1", f"{layer}.mlp.fc1")
    yield from _linear("vit", "mlp.linear_fc2", f"{layer}.mlp.fc2")


def _llava_projector() -> Iterator[Weight]:
    yield from _linear("projector", "linear_fc1", "multi_modal_projector.linear_1", when="projector_bias")
    yield from _linear("projector", "linear_fc2", "multi_modal_projector.linear_2", when="projector_bias")
    yield Weight("word_embed", "newline", ("image_newline",), "row", when="newline")


def _gemma_projector() -> Iterator[Weight]:
    projector = "multi_modal_projector"
    yield from _norm("projector", "vision_norm", "vision_tower.post_layernorm")
    yield Weight("projector", "norm.weight", (f"{projector}.mm_soft_emb_norm.weight",))
    yield Weight("projector", "linear.weight", (f"{projector}.mm_input_projection_weight",), "transposed")


def _qwen_attention(layer: str) -> Iterator[Weight]:
    yield from _norm("vit", "input_layernorm", f"{layer}.norm1")
    yield from _norm("vit", "pre_mlp_layernorm", f"{layer}.norm2")
    for part in ("weight", "bias"):
        yield Weight("vit", f"self_attention.linear_qkv.{part}", (f"{layer}.attn.qkv.{part}",), "vision_packed_qkv")
    yield from _linear("vit", "self_attention.linear_proj", f"{layer}.attn.proj")


def _qwen_vision(later: bool) -> Iterator[Weight]:
    """Qwen2-VL's and Qwen2.5-VL's ViT."""
    layer, merger = "visual.blocks.{n}", "visual.merger"
    yield Weight("patch_embed", "projection.weight", ("visual.patch_embed.proj.weight",))
    yield from _qwen_attention(layer)
    if later:
        for part in ("weight", "bias"):
            halves = (f"{layer}.mlp.gate_proj.{part}", f"{layer}.mlp.up_proj.{part}")
            yield Weight("vit", f"mlp.linear_fc1.{part}", halves, "stacked")
    else:
        yield from _linear("vit", "mlp.linear_fc1", f"{layer}.mlp.fc1")
    yield from _linear("vit", "mlp.linear_fc2", f"{layer}.mlp.{'down_proj' if later else 'fc2'}")
    yield from _norm("projector", "norm", f"{merger}.ln_q")
    yield from _linear("projector", "linear_fc1", f"{merger}.mlp.0")
    yield from _linear("projector", "linear_fc2", f"{merger}.mlp.2")


def _qwen3_vision() -> Iterator[Weight]:
    """Qwen3-VL's ViT."""
    layer = "visual.blocks.{n}"
    yield from _linear("patch_embed", "projection", "visual.patch_embed.proj")
    yield Weight("patch_embed", "positions", ("visual.pos_embed.weight",))
    yield from _qwen_attention(layer)
    yield from _linear("vit", "mlp.linear_fc1", f"{layer}.mlp.linear_fc1")
    yield from _linear("vit", "mlp.linear_fc2", f"{layer}.mlp.linear_fc2")
    for ours, theirs in (("", "visual.merger"), ("feature_{f}.", "visual.deepstack_merger_list.{f}")):
        yield from _norm("projector", f"{ours}norm", f"{theirs}.norm")
        yield from _linear("projector", f"{ours}linear_fc1", f"{theirs}.linear_fc1")
        yield from _linear("projector", f"{ours}linear_fc2", f"{theirs}.linear_fc2")


def _llama_language(branch_norms: bool = False) -> Iterator[Weight]:
    """With norms behind both branches, the one in front of the perceptron is called otherwise (Gemma)."""
    yield from _llama_all_but_perceptrons(branch_norms)
    yield from _perceptron("llm", "mlp", "language_model.model.layers.{n}.mlp")


def _perceptron(kind: str, ours: str, theirs: str) -> Iterator[Weight]:
    """A gated one of a language layer."""
    halves = (f"{theirs}.gate_proj.weight", f"{theirs}.up_proj.weight")
    yield Weight(kind, f"{ours}.linear_fc1.weight", halves, "stacked")
    yield Weight(kind, f"{ours}.linear_fc2.weight", (f"{theirs}.down_proj.weight",))


def _language_of_experts(apart: bool) -> Iterator[Weight]:
    """Qwen3-MoE's, whose experts' weights have a name each (`apart`), and Qwen3-VL-MoE's."""
    yield from _llama_all_but_perceptrons()
    yield from _experts("llm", "language_model.model.layers.{n}.mlp", apart, together="either_way")


def _experts(kind: str, mlp: str, apart: bool, together: str) -> Iterator[Weight]:
    """Of a layer, and their router; `together` is the form of weights that are not `apart`."""
    ours = "mlp.experts.experts"
    yield Weight(kind, "mlp.router.weight", (f"{mlp}.gate.weight",))
    if apart:
        halves = (f"{mlp}.experts.{{e}}.gate_proj.weight", f"{mlp}.experts.{{e}}.up_proj.weight")
        yield Weight(kind, f"{ours}.linear_fc1.weight", halves, "stacked_experts")
        yield Weight(kind, f"{ours}.linear_fc2.weight", (f"{mlp}.experts.{{e}}.down_proj.weight",), "experts")
    else:
        yield Weight(kind, f"{ours}.linear_fc1.weight", (f"{mlp}.experts.gate_up_proj",), together)
        yield Weight(kind, f"{ours}.linear_fc2.weight", (f"{mlp}.experts.down_proj",), together)


def _llama_all_but_perceptrons(branch_norms: bool = False) -> Iterator[Weight]:
    model, layer = "language_model.model", "language_model.model.layers.{n}"
    yield Weight("word_embed", "embedding.weight", (f"{model}.embed_tokens.weight",))
    yield Weight("llm", "input_layernorm.weight", (f"{layer}.input_layernorm.weight",))
    yield from _split_qkv("llm", f"{layer}.self_attn.", "language_qkv", "language.qkv_bias")
    for one in "qk":
        norm = f"{layer}.self_attn.{one}_norm.weight"
        yield Weight("llm", f"self_attention.{one}_layernorm.weight", (norm,), when="language.qk_norm")
    yield Weight("llm", "self_attention.linear_proj.weight", (f"{layer}.self_attn.o_proj.weight",))
    before_mlp = "pre_feedforward" if branch_norms else "post_attention"
    yield Weight("llm", "pre_mlp_layernorm.weight", (f"{layer}.{before_mlp}_layernorm.weight",))
    if branch_norms:
        for branch, theirs in (("self_attn", "post_attention"), ("mlp", "post_feedforward")):
            yield Weight("llm", f"{branch}_bda.norm.weight", (f"{layer}.{theirs}_layernorm.weight",))
    yield Weight("head", "norm.weight", (f"{model}.norm.weight",))
    yield Weight("head", "linear.weight", ("language_model.lm_head.weight",), when="untied")


def _linear_language(experts: bool, apart: bool = False) -> Iterator[Weight]:
    """Qwen3.5's: linear attention in some layers; perceptrons or experts, each with weights of its own or together."""
    model, layer = "language_model.model", "language_model.model.layers.{n}"
    attention, net = f"{layer}.self_attn", f"{layer}.linear_attn"
    yield Weight("word_embed", "embedding.weight", (f"{model}.embed_tokens.weight",))
    for kind in ("llm", LINEAR):
        yield Weight(kind, "input_layernorm.weight", (f"{layer}.input_layernorm.weight",))
        yield Weight(kind, "pre_mlp_layernorm.weight", (f"{layer}.post_attention_layernorm.weight",))
        yield from _with_shared_expert(kind, apart) if experts else _perceptron(kind, "mlp", f"{layer}.mlp")
    queries = tuple(f"{attention}.{one}_proj.weight" for one in "qkv")
    yield Weight("llm", "self_attention.linear_qkv.weight", queries, "gated_qkv")
    for one in "qk":
        yield Weight("llm", f"self_attention.{one}_layernorm.weight", (f"{attention}.{one}_norm.weight",))
    yield Weight("llm", "self_attention.linear_proj.weight", (f"{attention}.o_proj.weight",))
    projected = tuple(f"{net}.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a"))
    yield Weight(LINEAR, "self_attention.linear_qkv.weight", projected, "linear")
    yield Weight(LINEAR, "self_attention.convolution", (f"{net}.conv1d.weight",), "convolution")
    yield Weight(LINEAR, "self_attention.a_log", (f"{net}.A_log",))
    yield Weight(LINEAR, "self_attention.dt_bias", (f"{net}.dt_bias",))
    yield Weight(LINEAR, "self_attention.norm_weight", (f"{net}.norm.weight",))
    yield Weight(LINEAR, "self_attention.linear_proj.weight", (f"{net}.out_proj.weight",))
    yield Weight("head", "norm.weight", (f"{model}.norm.weight",))
    yield Weight("head", "linear.weight", ("language_model.lm_head.weight",), when="untied")


def _with_shared_expert(kind: str, apart: bool) -> Iterator[Weight]:
    mlp = "language_model.model.layers.{n}.mlp"
    yield from _experts(kind, mlp, apart, together="same")
    yield from _perceptron(kind, "mlp.shared_experts", f"{mlp}.shared_expert")
    yield Weight(kind, "mlp.shared_experts.gate_weight", (f"{mlp}.shared_expert_gate.weight",))


def _internlm2_language() -> Iterator[Weight]:
    model, layer = "language_model.model", "language_model.model.layers.{n}"
    yield Weight("word_embed", "embedding.weight", (f"{model}.tok_embeddings.weight",))
    yield Weight("llm", "input_layernorm.weight", (f"{layer}.attention_norm.weight",))
    # InternLM2 and Megatron order query, key and value alike: group by group.
    yield Weight("llm", "self_attention.linear_qkv.weight", (f"{layer}.attention.wqkv.weight",))
    yield Weight("llm", "self_attention.linear_proj.weight", (f"{layer}.attention.wo.weight",))
    yield Weight("llm", "pre_mlp_layernorm.weight", (f"{layer}.ffn_norm.weight",))
    halves = (f"{layer}.feed_forward.w1.weight", f"{layer}.feed_forward.w3.weight")
    yield Weight("llm", "mlp.linear_fc1.weight", halves, "stacked")
    yield Weight("llm", "mlp.linear_fc2.weight", (f"{layer}.feed_forward.w2.weight",))
    yield Weight("head", "norm.weight", (f"{model}.norm.weight",))
    yield Weight("head", "linear.weight", ("language_model.output.weight",), when="untied")


VISION_TABLES = {
    "internvl": tuple(_internvl_vision()),
    "internvl_chat": tuple(_internvl_original_vision()),
    **dict.fromkeys(("llava", "llava_next", "llava_onevision"), (*_llava_vision(), *_llava_projector())),
    "gemma3": (*_llava_vision(), *_gemma_projector()),
    "qwen2_vl": tuple(_qwen_vision(later=False)),
    "qwen2_5_vl": tuple(_qwen_vision(later=True)),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), tuple(_qwen3_vision())),
}
LANGUAGE_TABLES = {
    "internlm2": tuple(_internlm2_language()),
    "gemma3_text": tuple(_llama_language(branch_norms=True)),
    "qwen3_moe": tuple(_language_of_experts(apart=True)),
    "qwen3_vl_moe_text": tuple(_language_of_experts(apart=False)),
    "qwen3_5_text": tuple(_linear_language(experts=False)),
    "qwen3_5_moe_text": tuple(_linear_language(experts=True)),
}
APART = {"qwen3_5_moe_text": tuple(_linear_language(experts=True, apart=True))}
"""Where the weights of experts lie together as published, and apart as transformers 5 saves them."""
FIRST_EXPERT = r"^language_model\.model\.layers\.\d+\.mlp\.experts\.0\."
"""In a name of the tables: they lie apart."""
LLAMA_TABLE = tuple(_llama_language())
"""Also Qwen's, Mistral's, Vicuna's and Yi's."""

SPELLINGS = (
    (r"^model\.language_model\.", "language_model.model."),
    (r"^lm_head\.", "language_model.lm_head."),
    (r"^model\.visual\.", "visual."),
    (r"^model\.(?=layers\.|embed_tokens\.|norm\.)", "language_model.model."),
    (r"^model\.(?=vision_tower|multi_modal_projector|image_newline)", ""),
    (r"^vision_tower\.vision_model\.", "vision_tower."),
)
"""Other spellings (transformers' modules in memory, older checkpoints) of the names in the tables."""

IDLE = (
    r"vision_tower\.(post_layernorm|head)\.",
    r"vision_tower\.layernorm\.",
    r"vision_tower\.encoder\.layers?\.\d+\.",
    r"vision_model\.encoder\.layers\.\d+\.",
    r"(vision_tower|vision_model)\.embeddings\.position_ids$",
    r".*rotary_emb\.inv_freq$",
    r"mtp\.",
)
"""Weights that a checkpoint has and the model never uses (beyond those in the tables): kept aside for the way back."""


@dataclass(frozen=True)
class Source:
    """Where one weight of ours comes from: names of theirs, as in the tables, and the form."""

    theirs: tuple[str, ...]
    form: str


def table_name(name: str) -> str:
    """The name as in the tables."""
    for pattern, replacement in SPELLINGS:
        name = re.sub(pattern, replacement, name)
    return name


def is_idle(name: str) -> bool:
    """Whether a weight that no table asks for is one that the model never uses."""
    return any(re.match(pattern, name) for pattern in IDLE)


def sources(architecture: Architecture, vision: str, language: str, stored: Collection[str] = ()) -> dict[str, Source]:
    """Every weight of the chain by its name in our checkpoints, in the chain's order.

    `vision` is the model type of a config.json, `language` that of its language model, `stored` the names that are
    there, as in the tables.
    """
    tables = LANGUAGE_TABLES | (APART if any(re.search(FIRST_EXPERT, name) for name in stored) else {})
    table = (*VISION_TABLES[vision], *tables.get(language, LLAMA_TABLE))
    found = {}
    for cost, link in zip(architecture.cost_kinds, layer_names(architecture.chain), strict=True):
        kind, number = "vit" if cost == FULL else cost, link.partition(".")[2]
        for weight in _present(table, kind, architecture):
            features = range(len(architecture.vision.feature_layers)) if "{f}" in weight.ours else (0,)
            for feature in map(str, features):
                names = tuple(
                    name.replace("{n}", number).replace("{f}", feature) for name in _of_experts(weight, architecture)
                )
                ours = weight.ours.replace("{f}", feature)
                found[f"links.{link.replace('.', '_')}.{ours}"] = Source(names, weight.form)
    return found


def _of_experts(weight: Weight, architecture: Architecture) -> tuple[str, ...]:
    """Theirs of all experts in turn, where each has its own."""
    experts = architecture.language.experts
    if experts is None or "{e}" not in weight.theirs[0]:
        return weight.theirs
    return tuple(name.replace("{e}", str(expert)) for expert in range(experts.count) for name in weight.theirs)


def _present(table: Iterable[Weight], kind: str, architecture: Architecture) -> Iterator[Weight]:
    for weight in table:
        if weight.kind == kind and (not weight.when or attrgetter(weight.when)(architecture)):
            yield weight
