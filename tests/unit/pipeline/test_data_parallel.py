"""All buckets of a stage have one order, whichever ranks share them."""

from types import SimpleNamespace

import torch

from megatron.vlm.pipeline.data_parallel import OrderedReductions


class Group:
    """A bucket group that notes when it starts."""

    def __init__(self, name: str, weights: list[torch.nn.Parameter], started: list[str]) -> None:
        self.buckets = [SimpleNamespace(params_list=weights)]
        self.start_grad_sync = lambda: started.append(name)


class Stage(torch.nn.Module):
    """Two layers, each with a bucket for its experts and one for all else, as core wraps it."""

    def __init__(self, started: list[str]) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(1)) for _ in range(4))
        norm0, expert0, norm1, expert1 = self.weights
        self.bucket_groups = [Group("norm1", [norm1], started), Group("norm0", [norm0], started)]
        self.expert_parallel_bucket_groups = [
            Group("expert1", [expert1], started),
            Group("expert0", [expert0], started),
        ]


def test_reductions_of_experts_have_their_turns_among_the_others() -> None:
    """In backward order, however they become ready; core, which asks each in turn, finds them in it."""
    wanted = ["expert1", "norm1", "expert0", "norm0"]
    for ready in ((0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)):
        started: list[str] = []
        stage, order = Stage(started), OrderedReductions()
        order.attach(stage)
        groups = [*stage.bucket_groups, *stage.expert_parallel_bucket_groups]
        for place in ready:
            groups[place].start_grad_sync()
        assert started == wanted
        for group in (*stage.bucket_groups, *stage.expert_parallel_bucket_groups):
            group.start_grad_sync()
        assert started == 2 * wanted
