"""README and docs are true: their commands and programs run and print what they show, and their links are good."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from outputs import PAGES, render

import evenpipe
from evenpipe.schedule import SCHEDULES

ROOT = Path(__file__).resolve().parent.parent

NAMES = [page.name for page in PAGES]
README = (ROOT / "README.md").read_text(encoding="utf-8")
OURS = "https://(?:github.com|raw.githubusercontent.com)/evenpipe/evenpipe/(?:blob/)?main/"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_what_a_page_shows_is_what_its_commands_print(page: Path, tmp_path: Path) -> None:
    pytest.importorskip("ortools")
    text = page.read_text(encoding="utf-8")
    assert render(text, tmp_path) == text, f"run python tools/outputs.py {page.relative_to(ROOT)}"


@pytest.mark.parametrize(
    ("page", "refused"),
    [
        ("```\nls\n```", "a block of '' is not run"),
        ("```bash\nls\n```", "a block of 'bash' is not run"),
        ("```toml\nF = 1\n```", "a block of toml has no name"),
        ("```sh\nfalse\n```", "false"),
        ("<!-- not run: -->\n```bash\nls\n```", "a block of 'bash' is not run"),
    ],
)
def test_a_block_that_is_not_run_needs_a_reason(page: str, refused: str, tmp_path: Path) -> None:
    with pytest.raises((ValueError, RuntimeError), match=refused):
        render(page, tmp_path)


def test_a_block_with_a_reason_is_only_shown(tmp_path: Path) -> None:
    page = "<!-- not run: needs two machines -->\n```sh\nfalse\n```"
    assert render(page, tmp_path) == page


def test_readme_is_short_and_names_the_command_of_ci() -> None:
    assert len(README.split()) <= 1300
    assert "make test" in README
    assert "\nmake test\n" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_links_of_the_readme_are_absolute_and_lead_to_files() -> None:
    links = re.findall(r"\]\(([^)]*)\)", README)
    assert [link for link in links if not link.startswith("https://")] == []


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_into_the_repository_lead_to_files(page: Path) -> None:
    for link in re.findall(rf"\]\({OURS}([^)#]*)", page.read_text(encoding="utf-8")):
        assert (ROOT / link).exists(), link


def test_the_page_on_schedules_has_every_name() -> None:
    page = (ROOT / "docs" / "schedules.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z0-9-]+)` \|", page, re.MULTILINE)
    assert set(SCHEDULES) <= set(rows)
    assert len(rows) == len(set(rows))


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_make_targets_of_the_pages_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"(?:^|`)make ([\w-]+)", page.read_text(encoding="utf-8"), re.MULTILINE):
        assert re.search(rf"^(?:[\w-]+ )*{target}(?: [\w-]+)*:", makefile, re.MULTILINE), target


@pytest.mark.parametrize(
    "name", ["picture", "memory_picture", "offload_picture", "replicas_picture", "configuration_page", "families_page"]
)
def test_pictures_are_what_the_code_draws(name: str) -> None:
    module = importlib.import_module(name)
    assert module.FILE.read_text(encoding="utf-8") == module.draw(), f"run python tools/{name}.py"


def test_every_page_has_a_place_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listed = re.findall(r": (\w+\.md)$", navigation, re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


def test_the_api_page_has_every_public_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    shown = re.findall(r"^::: evenpipe\.[\w.]*?(\w+)$", page, re.MULTILINE)
    assert sorted(shown) == sorted(set(evenpipe.__all__) - {"__version__"})
