"""README and docs are true: their commands and programs run and print what they show, and their links are good."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from outputs import BLOCK, PAGES, render

import evenpipe
from evenpipe.schedule import SCHEDULES

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
OURS = "https://(?:github.com|raw.githubusercontent.com)/evenpipe/evenpipe/(?:blob/)?main/"
SHOWN_ONLY = "not run"


def run_by(page: Path) -> str:
    """The blocks of a page that are run, as one text."""
    blocks = BLOCK.finditer(page.read_text(encoding="utf-8"))
    return "\n".join(match[0] for match in blocks if not (match[1] or "").startswith(SHOWN_ONLY))


def is_slow(page: Path) -> bool:
    """Whether it trains or searches for plans."""
    return re.search("<!-- run small|\nevenpipe plan", run_by(page)) is not None


WITH_COMMANDS = [page for page in PAGES if run_by(page)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] * is_slow(page), id=page.name) for page in WITH_COMMANDS]
)
def test_what_a_page_shows_is_what_its_commands_print(page: Path, tmp_path: Path) -> None:
    pytest.importorskip("ortools")
    text = page.read_text(encoding="utf-8")
    assert render(text, tmp_path) == text, f"run python tools/outputs.py {page.relative_to(ROOT)}"


NOT_RUN = [
    ("```\nls\n```", "a block of '' is not run"),
    ("```bash\nls\n```", "a block of 'bash' is not run"),
    ("```toml\nF = 1\n```", "a block of toml has no name"),
    ("```sh\nfalse\n```", "false"),
    ("<!-- not run: -->\n```bash\nls\n```", "a block of 'bash' is not run"),
]


def test_a_block_that_is_only_shown_needs_a_reason(tmp_path: Path) -> None:
    for number, (page, refused) in enumerate(NOT_RUN):
        (tmp_path / str(number)).mkdir()
        with pytest.raises((ValueError, RuntimeError), match=refused):
            render(page, tmp_path / str(number))
    page = "<!-- not run: needs two machines -->\n```sh\nfalse\n```"
    assert render(page, tmp_path) == page


def test_links_and_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    faults = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for link in re.findall(rf"\]\({OURS}([^)#]*)", text):
            faults += [] if (ROOT / link).exists() else [f"{page.name}: {link}"]
        for target in re.findall(r"(?:^|`)make ([\w-]+)", text, re.MULTILINE):
            exists = re.search(rf"^(?:[\w-]+ )*{target}(?: [\w-]+)*:", makefile, re.MULTILINE)
            faults += [] if exists else [f"{page.name}: make {target}"]
    links = re.findall(r"\]\(([^)]*)\)", README)
    faults += [f"README: {link} is relative" for link in links if not link.startswith("https://")]
    assert not faults
    assert "make test" in README and "\nmake test\n" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "name",
    [
        "picture",
        "memory_picture",
        "offload_picture",
        "replicas_picture",
        "configuration_page",
        "families_page",
        "measurements_page",
    ],
)
def test_pictures_are_what_the_code_draws(name: str) -> None:
    module = importlib.import_module(name)
    assert module.FILE.read_text(encoding="utf-8") == module.draw(), f"run python tools/{name}.py"


def test_no_schedule_page_or_public_name_is_forgotten() -> None:
    schedules = (ROOT / "docs" / "schedules.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z0-9-]+)` \|", schedules, re.MULTILINE)
    assert set(SCHEDULES) <= set(rows) and len(rows) == len(set(rows))
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listed = re.findall(r": (\w+\.md)$", navigation, re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))
    api = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    shown = re.findall(r"^::: evenpipe\.[\w.]*?(\w+)$", api, re.MULTILINE)
    assert sorted(shown) == sorted(set(evenpipe.__all__) - {"__version__"})
