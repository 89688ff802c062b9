"""A chat template of a stranger's folder stays in Jinja's sandbox: it reaches neither modules nor the environment."""

import pytest

from megatron.vlm.data.chat_program import ChatProgram
from megatron.vlm.data.turns import ASSISTANT, USER, Message
from omnibal_ext.errors import Rejected, UserError

CHAT = [Message(USER, "hi"), Message(ASSISTANT, "x")]


@pytest.mark.parametrize(
    "source",
    [
        "{{ ('{0.__init__.__globals__}'|attr('format'))(cycler) }}",
        "{{ ('{0.__init__.__globals__[os].environ[SECRET]}'|attr('format'))(cycler) }}",
        "{{ (['{0.__init__.__globals__}']|map('attr', 'format')|list)[0](cycler) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ (cycler|attr('__init__'))|attr('__globals__') }}",
    ],
)
def test_no_way_leads_out(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "in plain sight")
    try:
        written = str(ChatProgram(source, "t").run(CHAT, ()))
    except (Rejected, UserError):
        return
    assert "__name__" not in written
    assert "module" not in written
    assert "in plain sight" not in written
