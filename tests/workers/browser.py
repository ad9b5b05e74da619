"""Drives a headless Chromium over a pipe, without any library, for tests that look at pages.

The protocol is Chrome's DevTools protocol with --remote-debugging-pipe: JSON messages that end in a
zero byte, commands on file descriptor 3, answers on 4.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from ranks import PATIENCE

# Every text of a page, through the shadow roots that hide it from `innerText`.
ALL_TEXT = """(() => {
  const seen = [];
  const walk = node => {
    if (node.nodeType === 3 && node.textContent.trim()) {
      const box = node.parentElement && node.parentElement.getBoundingClientRect();
      if (box && box.width && box.height) seen.push(node.textContent.trim());
    }
    if (node.shadowRoot) walk(node.shadowRoot);
    if (node.tagName === 'STYLE' || node.tagName === 'SCRIPT') return;
    node.childNodes.forEach(walk);
  };
  walk(document.body);
  return seen.join('\\n');
})()"""

# Which of the given texts stand in an element too narrow for them.
CUT = """(wanted => {
  const cut = [];
  const walk = node => {
    if (node.nodeType === 3 && wanted.includes(node.textContent.trim())) {
      const box = node.parentElement;
      if (box && box.clientWidth && box.scrollWidth > box.clientWidth + 1)
        cut.push(node.textContent.trim());
    }
    if (node.shadowRoot) walk(node.shadowRoot);
    node.childNodes.forEach(walk);
  };
  walk(document.body);
  return cut;
})"""


def chromium() -> str | None:
    """Path of a Chromium or Chrome; None where none is installed."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


class Browser:
    """One page; `close` ends the browser."""

    def __init__(self, profile: Path, width: int = 1500, height: int = 1000):
        command_read, self._write = os.pipe()
        self._read, answer_write = os.pipe()
        self._answers = select.poll()  # select.select ends at descriptor 1024
        self._answers.register(self._read, select.POLLIN)
        options = (
            f"--headless --no-sandbox --disable-gpu --no-first-run --remote-debugging-pipe"
            f" --user-data-dir='{profile}' --window-size={width},{height} about:blank"
        )
        script = f"exec '{chromium()}' {options} 3<&{command_read} 4>&{answer_write}"
        self._process = subprocess.Popen(
            ["bash", "-c", script],
            pass_fds=(command_read, answer_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(command_read)
        os.close(answer_write)
        self._ids, self._rest, self._session = itertools.count(1), b"", None
        targets = self._ask("Target.getTargets")["targetInfos"]
        page = next(target for target in targets if target["type"] == "page")
        attached = self._ask("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        self._ask(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip

    def open(self, address: str, wanted: list[str], timeout_s: float = 120) -> str:
        """Open `address`, wait until every text of `wanted` is shown; returns the page's text."""
        self._ask("Page.navigate", url="about:blank")
        self._ask("Page.navigate", url=address)
        deadline, text = time.monotonic() + timeout_s * PATIENCE, ""
        while time.monotonic() < deadline:
            time.sleep(0.5)
            text = self.evaluate(ALL_TEXT) or ""
            if all(each in text for each in wanted):
                time.sleep(0.5)  # what is drawn after the text
                return self.evaluate(ALL_TEXT)
        missing = [each for each in wanted if each not in text]
        raise AssertionError(f"{address}: {missing} did not appear in {timeout_s} s; seen: {text}")

    def cut(self, texts: list[str]) -> list[str]:
        """Texts of `texts` that are shown only in part."""
        return self.evaluate(f"{CUT}({json.dumps(texts)})")

    def picture(self) -> bytes:
        """Screenshot of the page as PNG bytes."""
        return base64.b64decode(self._ask("Page.captureScreenshot")["data"])

    def evaluate(self, expression: str) -> Any:
        """Value of a JavaScript expression."""
        answer = self._ask("Runtime.evaluate", expression=expression, returnByValue=True)
        return answer["result"].get("value")

    def close(self) -> None:
        """End the browser."""
        self._process.terminate()
        self._process.wait(timeout=20 * PATIENCE)
        os.close(self._write)
        os.close(self._read)

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._ids)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "result" in answer, answer
                return answer["result"]

    def _next(self, timeout_s: float = 60) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready = self._answers.poll(timeout_s * 1000)
            assert ready, f"the browser was silent for {timeout_s} s"
            got = os.read(self._read, 1 << 20)
            assert got, "the browser is gone"
            self._rest += got
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)
