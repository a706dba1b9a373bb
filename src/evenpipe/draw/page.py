"""A page to explore timelines: one self-contained HTML file, which loads nothing.

Its parts are in the folder `page`: a skeleton, a style sheet, and scripts that this module concatenates in the order of
`SCRIPTS`. A content security policy allows only these, and no connections. Figures are plain HTML tables, for readers
who have scripts disabled.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

from evenpipe.given import plain

from .encode import StyleTable, encode
from .figures import Scale, amount_text, busy_share, figures, limit_text, shades_text, share_text
from .kinds import STYLES, for_dark, ink_on
from .panel import Panel, Timelines, kinds_in, panels_of

SCRIPTS = (
    "decode.js",
    "panel.js",
    "format.js",
    "theme.js",
    "view.js",
    "layout.js",
    "shades.js",
    "paint.js",
    "overview.js",
    "chain.js",
    "moves.js",
    "search.js",
    "words.js",
    "legend.js",
    "scene.js",
    "pointer.js",
    "keys.js",
    "main.js",
)


def page(timelines: Timelines, *, title: str = "", unit_seconds: float | None = None) -> str:
    """Timelines as one HTML file, with one time axis and one zoom for all.

    unit_seconds: seconds per unit of time, if known. The same timelines always give the same text.
    """
    panels = panels_of(timelines)
    scale = Scale(unit_seconds)
    heading = title or " and ".join(panel.name for panel in panels if panel.name) or "Timeline"
    style, script = _part("page.css"), _script()
    return _filled(
        _part("page.html"),
        {
            "TITLE": escape(plain(heading)),
            "STYLE": style,
            "STYLE_HASH": _hash(style),
            "SCRIPT": script,
            "SCRIPT_HASH": _hash(script),
            "DATA": _data(panels, scale),
            "FIGURES": _figures(panels, scale),
            "DEVICES": "\n".join(_devices(panel) for panel in panels),
        },
    )


def _data(panels: tuple[Panel, ...], scale: Scale) -> str:
    """The data for the scripts. It contains no `<`, so that nothing can end its element."""
    styles = StyleTable()
    encoded = [encode(panel, styles, scale) for panel in panels]
    content: dict[str, Any] = {
        "unit": scale.unit_seconds,
        "kinds": [(kind.value, style.words, style.colour) for kind, style in STYLES.items()],
        "looks": [
            (
                list(STYLES).index(kind),
                [(colour, for_dark(colour), ink_on(colour), ink_on(for_dark(colour))) for colour in colours],
            )
            for kind, colours in styles.entries
        ],
        "resources": list(styles.resources),
        "shades": shades_text(panels),
        "limit": limit_text(panels),
        "panels": encoded,
    }
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def _figures(panels: tuple[Panel, ...], scale: Scale) -> str:
    """The figures of all panels side by side."""
    columns = [{figure.name: figure.text for figure in figures(panel, scale)} for panel in panels]
    notes = {figure.name: figure.note for panel in panels for figure in figures(panel, scale)}
    head = "".join(f'<th scope="col">{escape(panel.name or "timeline")}</th>' for panel in panels)
    lines = [f'<tr><th scope="col">figure</th>{head}<th scope="col" class="note">meaning</th></tr>']
    for name, note in notes.items():
        cells = "".join(f"<td>{escape(column.get(name, ''))}</td>" for column in columns)
        lines.append(f'<tr><th scope="row">{name}</th>{cells}<td class="note">{escape(note)}</td></tr>')
    return "\n".join(lines)


def _devices(panel: Panel) -> str:
    """Return, per device, how busy it is, its peak, and the time of each kind as a share of the makespan."""
    kinds = kinds_in([panel])
    head = "".join(f'<th scope="col" title="{escape(STYLES[kind].words)}">{kind.value}</th>' for kind in kinds)
    makespan = panel.timeline.makespan
    lines = []
    for device in range(panel.devices):
        times = panel.timeline.busy_by_kind[device]
        cells = "".join(f"<td>{share_text(times.get(kind, 0.0) / makespan) if makespan else ''}</td>" for kind in kinds)
        lines.append(
            f'<tr><th scope="row">{device}</th><td>{share_text(busy_share(panel, device))}</td>'
            f"<td>{escape(amount_text(panel, panel.peaks[device]))}</td>{cells}</tr>"
        )
    return (
        f"<table><caption>{escape(panel.name or 'timeline')}</caption><thead>"
        f'<tr><th scope="col">device</th><th scope="col">busy</th><th scope="col">peak</th>{head}</tr>'
        "</thead><tbody>\n" + "\n".join(lines) + "\n</tbody></table>"
    )


def _filled(text: str, values: dict[str, str]) -> str:
    """`text` with each @@NAME@@ replaced in a single pass, so that names inside values are not replaced."""
    return re.sub(r"@@([A-Z_]+)@@", lambda match: values[match[1]], text)


def _hash(text: str) -> str:
    """The name of an inline element with this content in a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


@cache
def _script() -> str:
    """All scripts in one function, so that they share names and leave no globals."""
    body = "\n".join(_part(name) for name in SCRIPTS)
    return f'\n"use strict";\n(() => {{\n{body}\n}})();\n'


@cache
def _part(name: str) -> str:
    return files(__package__).joinpath("page", name).read_text(encoding="utf-8")
