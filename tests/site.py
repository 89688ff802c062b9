"""What mkdocs.yml's site has beyond docs/: README.md and its neighbours as pages, the navigation that README lists,
and `llms.txt`, which names every page as Markdown."""

import re
from collections.abc import Iterator
from pathlib import Path
from posixpath import dirname, join, normpath, relpath

from jinja2 import Environment
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
BESIDE = {"README.md": "index.md", **{name: name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")}}
"""Pages that are not in docs/, by their path in the repository."""
BELOW = {"Models by family": ("models/*.md",), "In your trainer": ("verdicts.md", "trainers/*.md")}
"""Pages that README lists no link to, by the title above them."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")
LISTED = re.compile(r"^- \*\*(.+)\*\*: (.*)$", re.MULTILINE)
"""README's lists of documents: what for, and links."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the navigation: what README lists, and a page for each family of models and each trainer."""
    readme = (ROOT / "README.md").read_text()
    sections = [
        {what: [{name: path.removeprefix("docs/")} for _, name, path, anchor in LINK.findall(links) if not anchor]}
        for what, links in LISTED.findall(readme.partition("\n## Documentation\n")[2])
    ]
    docs = Path(config.docs_dir)
    found = {name: [path for pattern in below for path in sorted(docs.glob(pattern))] for name, below in BELOW.items()}
    below = [{name: [str(path.relative_to(docs)) for path in paths]} for name, paths in found.items()]
    config.nav = [{"Home": "index.md"}, *sections, *below, {"Changes": "CHANGELOG.md"}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from beside docs/."""
    for name, page in BESIDE.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to where the site has what they name; of other files, to the repository's, or leave their words."""
    here = next((name for name, uri in BESIDE.items() if uri == page.file.src_uri), f"docs/{page.file.src_uri}")

    def linked(link: re.Match[str]) -> str:
        picture, words, path, anchor = link.groups(default="")
        target = normpath(join(dirname(here), path))
        if target in BESIDE or target.startswith("docs/"):
            there = BESIDE.get(target, target.removeprefix("docs/"))
            return f"{picture}[{words}]({relpath(there, dirname(page.file.src_uri) or '.')}{anchor})"
        return f"[{words}]({config.repo_url}/blob/main/{target})" if config.repo_url else words

    return LINK.sub(linked, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Show the `|` of code in tables as GitHub does: mkdocs leaves its backslash."""
    return re.sub("<td.*?</td>", lambda cell: cell[0].replace(r"\|", "|"), html, flags=re.DOTALL)


def on_env(env: Environment, config: MkDocsConfig, files: Files) -> None:
    """Write llms.txt (llmstxt.org), and the Markdown that it names beside each page."""
    site, pages = Path(config.site_dir), {file.src_uri: file.page for file in files.documentation_pages()}
    lines = [f"# {config.site_name}", "", f"> {config.site_description}"]
    for section in config.nav or ():
        ((title, below),) = section.items()
        lines += ["", f"## {title}", ""]
        for uri in paths(below):
            page = pages[uri]
            (site / uri).parent.mkdir(parents=True, exist_ok=True)
            (site / uri).write_text(page.markdown)
            lines.append(f"- [{page.title}]({config.site_url or ''}{uri}): {purpose(page.markdown)}")
    (site / "llms.txt").write_text("\n".join(lines) + "\n")


def paths(below: object) -> Iterator[str]:
    """The pages of a part of the navigation."""
    if isinstance(below, str):
        yield below
    else:
        for one in below if isinstance(below, list) else below.values():
            yield from paths(one)


def purpose(markdown: str) -> str:
    """The first sentence of a page."""
    text = " ".join(LINK.sub(r"\2", markdown).partition("\n\n")[2].partition("\n\n")[0].split())
    return re.split(r"(?<=\.) ", text)[0]
