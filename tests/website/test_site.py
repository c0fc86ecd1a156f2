"""The documentation site: it builds without a warning, its pages open without a network, and no page is forgotten."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
import yaml
from website.hooks import ROOT_PAGES, decisions_page, site_links

import laconic
from tests.report.chromium import Chromium, find_chromium
from tests.website.blocks import ROOT
from website import pictures, reference

PROGRAM = find_chromium()
DOCS = ROOT / "docs"
needs_browser = [
    pytest.mark.slow,
    pytest.mark.browser,
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium here; apt-get install chromium"),
]


def navigation() -> set[str]:
    """Every page in the menu of the site."""
    configuration = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    found: set[str] = set()

    def collect(entry: object) -> None:
        if isinstance(entry, str):
            found.add(entry)
        elif isinstance(entry, list):
            for one in entry:
                collect(one)
        elif isinstance(entry, dict):
            for one in entry.values():
                collect(one)

    collect(yaml.safe_load(configuration)["nav"])
    return found


def test_every_page_is_in_the_menu() -> None:
    menu = navigation()
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    for page in sorted(pages - menu):
        assert page.startswith("decisions/"), (
            f'docs/{page} is not in the menu of the site: add "- Title: {page}" to `nav` in mkdocs.yml, where a reader '
            "would look for it: Guides for a guide, Strategies for a family of methods, Results for a measurement."
        )
    generated = {*ROOT_PAGES, "decisions/index.md", *(section.path for section in reference.sections())}
    gone = menu - pages - generated
    assert not gone, f"`nav` in mkdocs.yml names pages that do not exist: {sorted(gone)}"


def test_every_result_is_in_the_list_of_results() -> None:
    listed = set(re.findall(r"\]\(([\w.]+)\)", (DOCS / "results" / "index.md").read_text(encoding="utf-8")))
    pages = {path.name for path in (DOCS / "results").glob("*.md")} - {"index.md"}
    assert pages == listed, "add a row with a question and a link to a table in docs/results/index.md"


def test_the_reference_has_every_public_name() -> None:
    named = {name for section in reference.sections() for name in section.names}
    assert named >= set(laconic.__all__)
    linked = reference.link_names((DOCS / "api.md").read_text(encoding="utf-8"))
    assert "| [`ErrorFeedback`](reference/compression.md#errorfeedback) |" in linked


def test_an_entry_of_the_reference_holds_signature_formula_and_settings() -> None:
    compression, training = (
        reference.page(section)
        for name in ("Compression", "Training")
        for section in reference.sections()
        if section.title == name
    )
    entry = compression.split("## PowerSgd ")[1].split("\n## ")[0]
    assert "In strategy text: `powersgd`" in entry
    assert "\n    P = orth(sum_i M_i Q)," in entry
    assert "(https://arxiv.org/abs/1905.13727)" in entry
    assert "| `rank` | `4` | a whole number >= 1 |" in entry
    assert "\n    decoded = g\n" in compression.split("## NoCompression ")[1].split("\n## ")[0]
    assert "    strategy: Strategy | str | Chooser,\n    *,\n" in training
    assert "\n- `timeout_s`: " in training


def test_links_of_the_repository_become_links_of_the_site() -> None:
    text = "[a](../README.md) [b](../CHANGELOG.md#x) [c](results/) [d](lab.md) [e](https://x.org/y) [f](#here)"
    assert site_links("stability.md", text) == (
        "[a](index.md) [b](CHANGELOG.md#x) [c](results/index.md) [d](lab.md) [e](https://x.org/y) [f](#here)"
    )
    assert site_links("results/chaos.md", "[a](../lab.md)") == "[a](../lab.md)"
    assert site_links("CHANGELOG.md", "[a](docs/lab.md#x) [b](CONTRIBUTING.md)") == "[a](lab.md#x) [b](CONTRIBUTING.md)"
    picture = "![x](pictures/report-sweep.png)"
    assert site_links("gallery.md", picture) == f'<a href="gallery/sweep.html">{picture}</a>'
    assert "- 0001 [Gradients are scaled" in decisions_page()


def test_pictures_are_as_they_are_drawn() -> None:
    for name, draw in pictures.PICTURES.items():
        stored = (DOCS / "pictures" / f"{name}.svg").read_text(encoding="utf-8")
        assert stored == draw().svg(), "run `python -m website.pictures`"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole site; MkDocs fails at a link or an anchor that leads nowhere."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    assert PROGRAM is not None
    with Chromium(PROGRAM) as chromium:
        yield chromium


class _Links(HTMLParser):
    """The addresses on a page, and the anchors that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.anchors = {""}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value and not value.startswith(("data:", "mailto:")):
                self.addresses.append(value)
            elif name == "id" and value:
                self.anchors.add(value)


def _read(page: Path) -> _Links:
    found = _Links()
    found.feed(page.read_text(encoding="utf-8"))
    return found


@pytest.mark.slow
def test_links_of_the_built_site_lead_somewhere(site: Path) -> None:
    """Those that MkDocs cannot check too: to reports, and in raw HTML. Other sites are listed, not visited."""
    pages = {page: _read(page) for page in site.rglob("*.html") if page.parent.name != "gallery"}
    others: set[str] = set()
    for page, links in pages.items():
        if page.name == "404.html":  # has addresses as a server would resolve them
            continue
        for address in links.addresses:
            if address.startswith(("https:", "http:")):
                others.add(address)
                continue
            target, _, anchor = address.partition("#")
            there = (page.parent / target).resolve() if target else page
            assert there.exists(), f"{page.relative_to(site)} links to {address}"
            if there in pages and not anchor.startswith("__"):
                assert unquote(anchor) in pages[there].anchors, f"{page.relative_to(site)} links to {address}"
    print("\n".join(sorted(others)))
    assert all(address.startswith("https://") for address in others), others


class TestSite:
    """The built site; slow because building takes seconds."""

    pytestmark = needs_browser

    @pytest.mark.timeout(300)
    def test_every_page_opens_on_a_phone_and_on_a_desk_in_light_and_dark(self, site: Path, browser: Chromium) -> None:
        # Reports have tests of their own; 404.html is for servers.
        pages = sorted(
            path for path in site.rglob("*.html") if path.name != "404.html" and path.parent.name != "gallery"
        )
        assert len(pages) > 60
        # Parts of the page move for a moment after a change of its width.
        wide = (
            "new Promise((done) => { const end = performance.now() + 10000, root = document.documentElement;"
            "const look = () => { const over = root.scrollWidth - root.clientWidth;"
            "over && performance.now() < end ? requestAnimationFrame(look) : done(over) }; look() })"
        )
        for place, page in enumerate(pages):
            browser.look(width=390, height=844, dark=place % 2 == 0, phone=True)
            browser.open(page)
            sideways = [browser.value(wide)]
            # Without loading the page again, which takes longer than all the rest.
            browser.look(width=1280, dark=place % 2 == 1)
            browser.settle()
            sideways.append(browser.value(wide))
            found = (page.relative_to(site), browser.logged, browser.requested, sideways)
            assert found[1:] == ([], [], [0, 0]), found

    def test_colours_follow_the_reader(self, site: Path, browser: Chromium) -> None:
        background = "getComputedStyle(document.body).backgroundColor"
        colours = []
        for dark in (False, True):
            browser.look(width=1280, dark=dark)
            browser.open(site / "choosing.html")
            colours.append(browser.value(background))
            assert browser.value("document.querySelectorAll('article img').length") == 5
            scheme = browser.value("document.body.dataset.mdColorScheme")
            assert scheme == ("slate" if dark else "default")
            assert browser.value("[...document.images].every((image) => image.naturalWidth > 0)")
        assert colours[0] != colours[1]

    def test_search_finds_a_page_without_a_server(self, site: Path, browser: Chromium) -> None:
        browser.look(width=1280)
        browser.open(site / "index.html")
        browser.value(
            "(() => { const box = document.querySelector('.md-search__input'); box.focus(); box.value = 'powersgd';"
            "box.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true})); })()"
        )
        found = browser.value(
            "new Promise((done) => { const look = () => {"
            "const list = document.querySelector('.md-search-result__list');"
            "list.querySelector('a') ? done(list.textContent) : setTimeout(look, 50) };"
            "look(); setTimeout(() => done(''), 10000) })"
        )
        assert "powersgd" in found.lower()
        assert (browser.logged, browser.requested) == ([], [])
