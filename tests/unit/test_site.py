"""The site of the documents: its strict build passes, every page is in llms.txt, and what a page names is there."""

import re
from pathlib import Path

import pytest

from tests.programs import ROOT

commands = pytest.importorskip("mkdocs.commands.build", reason="mkdocs-material is not here: pip install '.[docs]'")
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), repo_url="https://example.org/own/er")
    commands.build(config)
    return folder


def test_llms_txt_names_every_page_and_they_lead_on_as_markdown(site: Path) -> None:
    named = re.findall(r"^- \[[^\]]+\]\(([^)]+)\): \S", (site / "llms.txt").read_text(), re.MULTILINE)
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert {*named} == pages | {"index.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"}
    assert len(named) == len({*named})
    for name in named:
        for path in re.findall(r"\]\((?!\w+:)([^)#\s]+)", (site / name).read_text()):
            assert (site / name).parent.joinpath(path).exists(), f"{name}: {path}"


def test_links_and_pictures_of_pages_are_there(site: Path) -> None:
    count = 0
    for page in site.rglob("*.html"):
        for path in re.findall(r'(?:href|src)="(?!\w+:|#|/|\.\.?")([^"#]+)', page.read_text()):
            there = page.parent / path
            assert (there / "index.html" if there.is_dir() else there).exists(), f"{page.relative_to(site)}: {path}"
            count += 1
    assert count > 1000


def test_other_files_are_the_repository_s(site: Path) -> None:
    """Where that is said; else their words stand alone, as on an index."""
    text = (site / "install.md").read_text()
    assert "[Dockerfile](https://example.org/own/er/blob/main/Dockerfile)" in text


def test_code_in_tables_is_what_a_reader_types(site: Path) -> None:
    cells = re.findall("<td.*?</td>", (site / "chat-templates/index.html").read_text(), re.DOTALL)
    assert any("<code>&lt;|vision_start|&gt;" in cell for cell in cells)
