"""Audio encoders of Qwen2.5-Omni and Qwen3-Omni: `audio_config` read, and the names of their weights."""

from collections.abc import Iterator

from omnibal_ext.errors import UserError
from omnibal_ext.families.fields import GENERAL, names
from omnibal_ext.families.section import ModelType, Section
from omnibal_ext.families.towers.native import ACTIVATIONS
from omnibal_ext.families.weights import Weight, linear, norm
from omnibal_ext.modalities.audio.architecture import AudioArchitecture
from omnibal_ext.reading.checks import integer

SIZE = integer(1, 2**20)
WHISPER = {
    "num_mel_bins": 128, "encoder_layers": 32, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120, "d_model": 1280,
    "activation_function": "gelu", "max_source_positions": 1500, "output_dim": 3584, "dropout": 0.0,
    "attention_dropout": 0.0, "activation_dropout": 0.0, "scale_embedding": False,
}  # fmt: skip
UNREAD = GENERAL | names("conv_chunksize encoder_layerdrop init_std num_hidden_layers")
OVER_TIME = ModelType({**WHISPER, "n_window": 100}, UNREAD)
OVER_BOTH = ModelType({**WHISPER, "n_window": 50, "n_window_infer": 800, "downsample_hidden_size": 480}, UNREAD)


def read_audio(tower: Section, width: int) -> AudioArchitecture:
    """Read an `audio_config`; `width`: of the language model, and of its output. Raises UserError naming a field."""
    over_both = "downsample_hidden_size" in tower.model_type.defaults
    if (out := tower.take("output_dim", SIZE)) != width:
        raise UserError(f"{tower.where}: its output is {out} wide, the language model's hidden_size is {width}")
    tower.must(dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, scale_embedding=False)
    size, heads = tower.take("d_model", SIZE), tower.take("encoder_attention_heads", integer(1, 2**12))
    if size % heads:
        raise UserError(f"{tower.where}: {size} does not divide into {heads} heads")
    chunk = 2 * tower.take("n_window", integer(1, 2**12))
    if over_both:
        tower.must(n_window=50)  # transformers counts 13 rows a chunk
    if chunk // 2 > (positions := tower.take("max_source_positions", SIZE)):
        raise UserError(f"{tower.where}: a chunk may have {chunk // 2} rows, but there are {positions} positions")
    found = AudioArchitecture(
        layers=tower.take("encoder_layers", integer(1, 2**10)),
        hidden_size=size,
        heads=heads,
        ffn_hidden_size=tower.take("encoder_ffn_dim", SIZE),
        mel_bins=tower.take("num_mel_bins", integer(1, 2**12)),
        chunk=chunk,
        chunks_attended=max(1, tower.take("n_window_infer", integer(1, 2**20)) // chunk) if over_both else 1,
        channels=tower.take("downsample_hidden_size", SIZE) if over_both else 0,
        pooled=not over_both,
        key_bias=over_both,
        activation=tower.choose("activation_function", ACTIVATIONS),
    )
    tower.refuse_unread()
    return found


def _layers(key_bias: bool) -> Iterator[Weight]:
    layer = "audio_tower.layers.{n}"
    for ours, theirs in (("input_layernorm", "self_attn_layer_norm"), ("pre_mlp_layernorm", "final_layer_norm")):
        yield from norm("audio", ours, f"{layer}.{theirs}", "further")
    qkv = "self_attention.linear_qkv"
    yield Weight("audio", f"{qkv}.weight", tuple(f"{layer}.self_attn.{one}_proj.weight" for one in "qkv"), "audio_qkv")
    biases = tuple(f"{layer}.self_attn.{one}_proj.bias" for one in ("qkv" if key_bias else "qv"))
    yield Weight("audio", f"{qkv}.bias", biases, "audio_qkv" if key_bias else "audio_qv")
    yield from linear("audio", "self_attention.linear_proj", f"{layer}.self_attn.out_proj")
    for number in (1, 2):
        yield from linear("audio", f"mlp.linear_fc{number}", f"{layer}.fc{number}")


def over_time() -> Iterator[Weight]:
    """Yield names of the weights of Qwen2.5-Omni's audio encoder: convolutions over time, layers, a matrix behind
    averaged pairs of rows."""
    for number in (1, 2):
        yield from linear("audio_embed", f"convolutions.{number - 1}", f"audio_tower.conv{number}")
    yield from _layers(key_bias=False)
    yield from norm("audio_projector", "norm", "audio_tower.ln_post", "further")
    yield from linear("audio_projector", "linear", "audio_tower.proj")


def over_both() -> Iterator[Weight]:
    """Yield names of the weights of Qwen3-Omni's audio encoder: convolutions over time and mel bins, layers, an MLP."""
    for number in (1, 2, 3):
        yield from linear("audio_embed", f"convolutions.{number - 1}", f"audio_tower.conv2d{number}")
    yield Weight("audio_embed", "projection.weight", ("audio_tower.conv_out.weight",))
    yield from _layers(key_bias=True)
    yield from norm("audio_projector", "norm", "audio_tower.ln_post", "further")
    for number in (1, 2):
        yield from linear("audio_projector", f"linear_fc{number}", f"audio_tower.proj{number}")
