"""The results of checks, and whether they let the run start."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeVar

from omnibal_ext.errors import UserError

Facts = TypeVar("Facts")


class Note(str):
    """A check's result that refuses nothing but should be read."""

    __slots__ = ()


@dataclass(frozen=True)
class Finding:
    """One line of the table of checks. `detail` of a refusal says what, where, the limit and the remedy.

    "later": not checked, because its input does not exist yet.
    """

    check: str
    state: Literal["ok", "note", "later", "refused"]
    detail: str


Check = Callable[[Facts], str | None]
"""Returns what it found, a `Note` if that should be read; None: does not apply. Raises UserError to refuse the run."""


def run_checks(checks: Iterable[tuple[str, Check[Facts]]], facts: Facts) -> list[Finding]:
    """Run all checks on `facts`, also after a refusal; return a finding for each that applies."""
    findings = []
    for name, check in checks:
        try:
            detail = check(facts)
        except UserError as error:
            findings.append(Finding(name, "refused", str(error)))
            continue
        if detail is not None:
            findings.append(Finding(name, "note" if isinstance(detail, Note) else "ok", str(detail)))
    return findings


def refuse(findings: Iterable[Finding]) -> None:
    """Raise the first refusal as a UserError."""
    for finding in findings:
        if finding.state == "refused":
            raise UserError(finding.detail)
