"""README's one command as a user runs it who has installed what PyPI has: a model's folder trains, and comes back.

    python tests/smoke.py FOLDER

With the torch of this interpreter, whatever it is built for, and no GPU to be seen. Ends with exit code 1, and what the
command said, where one of them fails.
"""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).parents[1]
VISION = {"hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TEXT = {
    **{"model_type": "qwen3", "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16},
    **{"num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 512, "max_position_embeddings": 512},
}
TURNS = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% for part in m.content %}"
    "{{ part.text }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
)


def main() -> None:
    """Demo conversations, a model in small, a run of an epoch with its saves, weights back with the same logits."""
    folder = Path(sys.argv[1])
    print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, transformers {transformers.__version__}")
    transformers.utils.logging.disable_progress_bar()
    if torch.cuda.is_available():
        sys.exit("a GPU is seen: start with CUDA_VISIBLE_DEVICES=''")
    tool("make_demo_data", "--output-dir", folder / "demo", "--samples", 112, "--heldout-samples", 4)
    make_model(folder)
    tool("launch", "--model", folder / "model", "--input", folder / "demo/train.jsonl", "--image-root", folder / "demo",
         "--run-dir", folder / "run", "--nproc-per-node", 2, "--pipeline-model-parallel-size", 2, "--analytic", "a100",
         "--", "--lr", "1e-3", "--log-interval", 1)  # fmt: skip
    lines = map(json.loads, (folder / "run/metrics.jsonl").read_text().splitlines())
    losses = [line["loss"] for line in lines if "loss" in line]
    if len(losses) < 3 or not all(map(math.isfinite, losses)):
        sys.exit(f"not a training of a few iterations: losses {losses}")
    tool("convert_checkpoint", "--to-hf", folder / "run/checkpoints", "--output-dir", folder / "tuned")
    tuned = transformers.AutoModelForImageTextToText.from_pretrained(folder / "tuned")
    print(f"trained, saved and brought back: losses {losses}, {sum(w.numel() for w in tuned.parameters()):,} weights")


def make_model(folder: Path) -> None:
    """A folder as Hugging Face has them, with the demo's tokenizer."""
    torch.manual_seed(0)
    vision = {**VISION, "image_size": [32, 32], "patch_size": [8, 8]}
    config = transformers.InternVLConfig(
        vision_config=vision, text_config=TEXT, image_token_id=7, tie_word_embeddings=False
    )
    transformers.InternVLForConditionalGeneration(config).save_pretrained(folder / "model")
    shutil.copyfile(folder / "demo/tokenizer.model", folder / "model/tokenizer.model")
    (folder / "model/chat_template.jinja").write_text(TURNS)
    (folder / "model/tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    pixels = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225], "max_patches": 32}
    (folder / "model/preprocessor_config.json").write_text(json.dumps(pixels))


def tool(name: str, *words: object) -> None:
    """Run one of our programs, or end with what it said."""
    command = [sys.executable, str(ROOT / f"tools/{name}.py"), *map(str, words)]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{done.stdout[-8000:]}\n{' '.join(command)}: exit code {done.returncode}")


if __name__ == "__main__":
    main()
