"""DeepSeek-VL's models, a line each; sizes of the language model from memory of its published config.json."""

from omnibal_ext.families.family import Preset
from omnibal_ext.families.fields import text, tower

PRESETS = {
    "deepseek-vl-1.3b": Preset(
        {
            "model_type": "deepseek_vl",
            "vision_config": tower(24, 1024, 16, 4096, image_size=384, hidden_act="gelu"),
            "text_config": text(24, 2048, 16, 16, 5504, 102400, rope_theta=1e6),
            "tie_word_embeddings": False,
        }
    )
}
