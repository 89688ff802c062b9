"""Record of the family of PaddleOCR-VL."""

from collections.abc import Iterator

from omnibal_ext.families.family import Family, Model, Packs, Preset
from omnibal_ext.families.fields import GENERAL, LANGUAGE, names, text, tower
from omnibal_ext.families.markup import ImageMarkup
from omnibal_ext.families.paddleocr_vl.config import TEXT, VISION, read_paddleocr
from omnibal_ext.families.section import ModelType
from omnibal_ext.families.towers.languages import LLAMA_WEIGHTS
from omnibal_ext.families.towers.tiles import clip_layer_weights
from omnibal_ext.families.weights import Weight, linear, norm

MARKS = names("image_token_id video_token_id vision_start_token_id vision_end_token_id")

UNREAD = names("compression_ratio ignored_index rope_is_neox_style use_3d_rope weight_share_add_bias")
"""Fields of published files of which transformers reads nothing."""


def weights() -> Iterator[Weight]:
    """Yield names in files of the weights of ViT and merger."""
    tower = "visual.vision_model"
    patches = f"{tower}.embeddings.patch_embedding"
    yield Weight("patch_embed", "projection.weight", (f"{patches}.weight",), "one_frame")
    yield Weight("patch_embed", "projection.bias", (f"{patches}.bias",))
    yield Weight("patch_embed", "positions", (f"{tower}.embeddings.position_embedding.weight",))
    yield from clip_layer_weights(f"{tower}.encoder.layers.{{n}}")
    yield from norm("projector", "vision_norm", f"{tower}.post_layernorm")
    yield from norm("projector", "norm", "mlp_AR.pre_norm")
    yield from linear("projector", "linear_fc1", "mlp_AR.linear_1")
    yield from linear("projector", "linear_fc2", "mlp_AR.linear_2")


MODEL = ModelType({"image_token_id": 100295, "tie_word_embeddings": True}, GENERAL | MARKS | UNREAD, tuple(weights()))
FAMILY = Family(
    models={
        "paddleocr_vl": Model(
            MODEL,
            read_paddleocr,
            takes=("image_grid_thw", "pixel_values", "mm_token_type_ids"),
            packs=Packs("native_widened"),
        )
    },
    model_types={
        TEXT: ModelType(
            text(18, 1024, 16, 2, 3072, 103424, hidden_act="silu", rms_norm_eps=1e-5, head_dim=128, use_bias=False),
            LANGUAGE,
            LLAMA_WEIGHTS,
        ),
        VISION: ModelType(
            tower(
                27, 1152, 16, 4304, image_size=384, patch_size=14, hidden_act="gelu_pytorch_tanh", layer_norm_eps=1e-6,
                spatial_merge_size=2,
            ),
            GENERAL | {"temporal_patch_size", "tokens_per_second"},  # of videos, which transformers' does not take
        ),
    },
    presets={"paddleocr-vl": Preset({"model_type": "paddleocr_vl"})},
    markups=(
        ImageMarkup(
            "paddleocr-vl",
            "<|IMAGE_PLACEHOLDER|>",
            ("<|IMAGE_PLACEHOLDER|>", "<|IMAGE_START|>", "<|IMAGE_END|>"),
            before="<|IMAGE_START|>",
            after="<|IMAGE_END|>",
            gap="",
        ),
    ),
    folder_says_template=True,
    spellings=((r"^model\.projector\.", "mlp_AR."),),
    modules=((r"^mlp_AR\.", "projector."),),
    idle=(r"visual\.vision_model\.(head|embeddings\.packing_position_embedding)\.",),
)  # fmt: skip
