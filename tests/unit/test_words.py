"""Words that strangers misread stay out of the code and the documents; what to write instead stands beside each."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
REFUSED = {
    "kin": "width class, exchange group", "mishaps?": "bad sample, skipped step", "seat": "slot",
    "lifeline": "parent watch", "meeting": "head exchange", "soundly": "finite", "mend(ed|s|ing)?": "fix",
    "levelled": "rebalanced", "aside": "leftover, superseded", "dealt": "distributed, assigned",
    "roads?": "tower layout",
}  # fmt: skip
FORMATS = re.compile(r"levelled-[{\d]|\.aside\b|\[['\"]road['\"]\]|\"road\":")
"""Names of files, and keys of plan.json, that older versions wrote too."""


def files() -> list[Path]:
    code = [path for package in ("omnibal_ext", "megatron", "tools") for path in (ROOT / package).rglob("*.py")]
    return [*code, *ROOT.glob("docs/**/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


def test_private_words_stay_out() -> None:
    private = re.compile(rf"(?<![a-z-])({'|'.join(REFUSED)})(?![a-z-])", re.IGNORECASE)
    found = []
    for path in files():
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for match in private.finditer(FORMATS.sub("", line)):
                found.append(f"{path.relative_to(ROOT)}:{number}: {match[1]!r}")
    assert not found, f"write instead, by the word: {REFUSED}"
