"""What unit tests share."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

from omnibal_ext.reading import stores

# The first example may wait for the compiler, and any for a machine that does other things too.
settings.register_profile("unhurried", settings.default, deadline=None)
settings.load_profile("unhurried")


@pytest.fixture(autouse=True)
def no_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one test's command line names is not named by those after it."""
    monkeypatch.setattr(stores, "_named", set())


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    import torch

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
