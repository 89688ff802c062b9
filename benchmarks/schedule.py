"""Our executor against megatron-core's own 1F1B, on the same GPT: same weights, same batches, same process group.

    python benchmarks/schedule.py

Two gloo ranks on this machine train a `GPTModel` of core's, cut in two, with either schedule in turns, each first in
every other round. The last line is the median over rounds of our seconds to core's; the losses must be the same.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Start the two ranks, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        _rank(arguments.rounds)
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([*command, "--rounds", str(arguments.rounds)], env=environment, capture_output=True,
                          text=True, check=False)  # fmt: skip
    shown = [line for line in done.stdout.splitlines() if line.startswith("|")]
    if done.returncode or not shown:
        sys.exit(done.stderr[-4000:])
    print("\n".join(line.removeprefix("|") for line in shown))


def _rank(rounds: int) -> None:
    import torch

    import megatron.vlm  # noqa: F401 (readies the machine, before megatron.core is imported)
    from megatron.vlm.single import single_process

    sizes = ["--pipeline-model-parallel-size", "1", "--make-vocab-size-divisible-by", "16"]
    with single_process("tiny", sizes) as inputs:
        ours, core = _candidates(inputs.args)
        seconds: dict[str, list[float]] = {"megatron-core": [], "ours": []}
        turns = [("megatron-core", core), ("ours", ours)]
        for number in range(rounds + 2):
            found = {}
            for name, run in turns if number % 2 else reversed(turns):
                torch.distributed.barrier()
                started = time.perf_counter()
                found[name] = run(number)
                torch.distributed.barrier()
                seconds[name].append(time.perf_counter() - started)
            assert found["ours"] == found["megatron-core"], found
        _print(seconds, torch.distributed.get_rank())


def _print(seconds: dict[str, list[float]], rank: int) -> None:
    if rank == 0:
        medians = {name: statistics.median(taken[2:]) for name, taken in seconds.items()}
        for name, median in medians.items():
            sys.__stdout__.write(f"|{name}: {median * 1e3:.1f} ms an iteration\n")
        pairs = zip(seconds["ours"][2:], seconds["megatron-core"][2:], strict=True)
        ratio = statistics.median(ours / core for ours, core in pairs)
        sys.__stdout__.write(f"|ours / megatron-core: {ratio:.3f}, losses equal\n")


MICROBATCHES, TOKENS, WIDTH, LAYERS, VOCABULARY = 8, 512, 256, 8, 512


def _candidates(args: Any) -> tuple[Callable[[int], list[float]], Callable[[int], list[float]]]:
    """Either schedule as a function that runs iteration number n and returns the losses on the last rank."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.enums import ModelType
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.pipeline_parallel.schedules import forward_backward_pipelining_without_interleaving
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.utils import get_model_config
    from megatron.training.training import get_model

    from megatron.vlm.microbatch import Microbatch
    from megatron.vlm.pipeline.executor import Executor

    class GptStage(GPTModel):
        """Core's GPT, saying what our executor asks of a stage."""

        has_backward = True
        receives_gradient = property(lambda self: not self.post_process)
        sends_gradient = property(lambda self: not self.pre_process)

        def input_shape(self, _: Any) -> tuple[int, int, int] | None:
            return None if self.pre_process else (TOKENS, 1, WIDTH)

        def gathers_first(self, _: Any) -> bool:
            return False

    def provide(pre_process: bool = True, post_process: bool = True, **_: Any) -> GptStage:
        config = TransformerConfig(
            num_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=8, use_cpu_initialization=True,
            pipeline_model_parallel_size=2, pipeline_dtype=torch.float32, hidden_dropout=0.0, attention_dropout=0.0,
            masked_softmax_fusion=False, bias_dropout_fusion=False, gradient_accumulation_fusion=False,
            calculate_per_token_loss=True, deallocate_pipeline_outputs=True, batch_p2p_comm=False,
        )  # fmt: skip
        return GptStage(
            config, get_gpt_layer_local_spec(), VOCABULARY, TOKENS, pre_process, post_process,
            share_embeddings_and_output_weights=False, position_embedding_type="rope",
        )  # fmt: skip

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    args.pipeline_model_parallel_size = 2
    args.fp16 = args.bf16 = False
    torch.manual_seed(0)
    model = get_model(provide, ModelType.encoder_or_decoder)
    get_model_config(model[0]).finalize_model_grads_func = finalize_model_grads
    positions = torch.arange(TOKENS).unsqueeze(0)
    mask = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool).triu(1)

    def loss(losses: Any) -> tuple[Any, Any, dict[str, Any]]:
        return losses.sum(), torch.tensor(losses.numel(), dtype=torch.int), {"loss": losses.detach().sum()}

    def forward_step(data: Iterator[Any], module: Any) -> tuple[Any, Callable[..., Any]]:
        tokens = next(data).input_ids
        return module(tokens, positions, mask, labels=tokens.roll(-1, 1)), loss

    def candidate(schedule: Callable[..., Any]) -> Callable[[int], list[float]]:
        def run(number: int) -> list[float]:
            generator = torch.Generator().manual_seed(number)
            draw = (
                Microbatch((TOKENS,), 1, TOKENS, input_ids=torch.randint(VOCABULARY, (1, TOKENS), generator=generator))
                for _ in range(MICROBATCHES)
            )
            for module in model:
                module.zero_grad_buffer()
            records = schedule(
                forward_step_func=forward_step, data_iterator=draw, model=model, num_microbatches=MICROBATCHES,
                seq_length=TOKENS, micro_batch_size=1, decoder_seq_length=TOKENS, forward_only=False,
            )  # fmt: skip
            return [record["loss"].item() for record in records]

        return run

    return candidate(Executor("1f1b")), candidate(forward_backward_pipelining_without_interleaving)


if __name__ == "__main__":
    main()
