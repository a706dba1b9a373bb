"""Headless Chromium for tests: the DevTools protocol over two pipes, with nothing but the standard library.

Protocol: chromedevtools.github.io/devtools-protocol. With `--remote-debugging-pipe` the browser reads JSON messages
that end with a zero byte from file descriptor 3 and writes its own to 4.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from process_groups import kill

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
TIMEOUT_SECONDS = 600.0


def find_browser() -> str | None:
    """Path of a Chromium that starts, or None. Some systems have such a name that only says where to get one."""
    return next((path for path in map(shutil.which, NAMES) if path and _starts(path)), None)


def _starts(program: str) -> bool:
    try:
        done = subprocess.run([program, "--version"], capture_output=True, timeout=TIMEOUT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


class Browser:
    """One browser with one page. Use as a context manager; `folder` takes its profile."""

    def __init__(self, program: str, folder: Path, *, width: int = 1200, height: int = 900) -> None:
        to_browser, from_browser = os.pipe(), os.pipe()
        # Above 10, so that neither of them is 3 or 4 before it is put there. Only those two are inherited.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (to_browser[0], from_browser[1])]
        arguments = [
            *("--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
            *("--disable-extensions", "--hide-scrollbars", "--force-device-scale-factor=1"),
            f"--user-data-dir={folder}",
            f"--window-size={width},{height}",
            "about:blank",
        ]
        self._process = subprocess.Popen(
            [program, *arguments],
            preexec_fn=lambda: [os.dup2(end, place) for place, end in enumerate(ends, start=3)] and None,
            close_fds=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for end in (to_browser[0], from_browser[1], *ends):
            os.close(end)
        self._to, self._from = to_browser[1], from_browser[0]
        self._buffer = b""
        self._count = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.command(f"{domain}.enable")
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        features = [{"name": "prefers-color-scheme", "value": "light"}]
        self.command("Emulation.setEmulatedMedia", features=features)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._to)
        os.close(self._from)
        try:
            self._process.wait(timeout=5)  # it ends when its pipes do
        except subprocess.TimeoutExpired:
            kill(self._process)

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command and wait for its answer; events that arrive meanwhile are kept in `events`."""
        self._count += 1
        number = self._count
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            if "method" in answer:
                self.events.append(answer)

    def open(self, file: Path) -> None:
        """Open a file and wait until its picture stands."""
        self.command("Page.navigate", url=file.resolve().as_uri())
        self.wait_for("document.readyState === 'complete' && window.evenpipe && window.evenpipe.drawn")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        result = self.command("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until a JavaScript expression is true."""
        look = f"const look = () => ({expression}) ? done(true) : setTimeout(look, 5); look();"
        assert self.evaluate(f"new Promise((done) => {{ {look} }})")

    def frame(self) -> None:
        """Wait until what changed is drawn."""
        self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """One mouse event at a place of the window: mouseMoved, mousePressed, mouseReleased, mouseWheel."""
        self.command("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)
        self.frame()

    def click(self, x: float, y: float) -> None:
        """Move there, press and release the left button."""
        self.mouse("mouseMoved", x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=1)

    def key(self, key: str) -> None:
        """Press and release one key; a single character is typed."""
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        code = {"windowsVirtualKeyCode": 13} if key == "Enter" else {}
        self.command("Input.dispatchKeyEvent", type="keyDown", key=key, **text, **code)
        self.command("Input.dispatchKeyEvent", type="keyUp", key=key, **code)
        self.frame()

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self.command("Input.insertText", text=text)

    def middle_of_pass(self, text: str, panel: int = 0) -> tuple[float, float]:
        """Where in the window a page of timelines has the middle of a pass."""
        x, y = self.evaluate(
            f"""(() => {{
                const {{ scene, canvas }} = evenpipe, panel = scene.panels[{panel}];
                let i = 0;
                while (panel.label(i) !== "{text}") i++;
                const place = scene.place(scene.boxes[{panel}], i), {{ left, top }} = canvas.getBoundingClientRect();
                return [left + place.x + place.width / 2, top + place.y + place.height / 2];
            }})()"""
        )
        return x, y

    def screenshot(self, file: Path) -> None:
        """What the window shows, as PNG."""
        file.write_bytes(base64.b64decode(self.command("Page.captureScreenshot")["data"]))

    def requests(self) -> list[str]:
        """Addresses that the page asked the network for, other than the file itself and data in the page."""
        sent = [event["params"]["request"]["url"] for event in self._of("Network.requestWillBeSent")]
        return [url for url in sent if not url.startswith(("data:", "file:", "about:"))]

    def troubles(self) -> list[str]:
        """Errors and warnings of the console, and exceptions."""
        thrown = [str(event["params"]["exceptionDetails"]) for event in self._of("Runtime.exceptionThrown")]
        logged = [str(event["params"]["entry"]) for event in self._of("Log.entryAdded")]
        called = [
            str(event["params"]["args"])
            for event in self._of("Runtime.consoleAPICalled")
            if event["params"]["type"] in ("error", "warning", "assert")
        ]
        return thrown + logged + called

    def _of(self, method: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["method"] == method]

    def _read(self) -> dict[str, Any]:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"the browser did not answer within {TIMEOUT_SECONDS} seconds"
            chunk = os.read(self._from, 1 << 16)
            assert chunk, "the browser has ended"
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)
