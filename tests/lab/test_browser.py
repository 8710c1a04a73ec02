"""The page of reproductions in a real browser: every figure is drawn, nothing fails, a phone can show it."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lab.test_report import fill, prove
from posterity_lab.reproduce.page import write


def _chromium() -> str | None:
    """A browser that starts: a distribution may have a script of its name that only tells how to get one."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            asked = subprocess.run([path, "--version"], capture_output=True, check=False, timeout=60)
            if asked.returncode == 0:
                return path
    return None


CHROMIUM = _chromium()
# Headless, as root, in little shared memory, and without a word to the network.
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--allow-file-access-from-files",
    "--enable-logging=stderr",
    "--virtual-time-budget=5000",
]

# Asks the page about itself when all of it is there, and leaves the answer in it.
PROBE = """
<script>
const errors = [];
addEventListener("error", event => errors.push(String(event.message)));
addEventListener("load", () => {
  const images = [...document.images];
  const answer = {
    errors, images: images.length, drawn: images.filter(i => i.complete && i.naturalWidth > 100).length,
    wide: images.filter(i => !i.closest(".scroll") && i.getBoundingClientRect().width > innerWidth).length,
    page: document.documentElement.scrollWidth, window: innerWidth,
    letters: Math.min(...[...document.querySelectorAll("p, td, th, li")].map(
      e => parseFloat(getComputedStyle(e).fontSize)))};
  document.body.setAttribute("data-answer", JSON.stringify(answer));
});
</script>
"""


def ask(page: Path, width: int, folder: Path) -> dict[str, Any]:
    """What the browser has made of the page, in a window of that width."""
    probed = folder / "probed.html"
    probed.write_text(
        page.read_text(encoding="utf-8").replace("<head>", "<head>" + PROBE, 1), encoding="utf-8"
    )
    # A phone's width needs a frame: a window of its own is never narrower than 500 pixels.
    frame = folder / "frame.html"
    frame.write_text(
        f'<iframe src="probed.html" style="width:{width}px;height:900px;border:0" onload="'
        "setTimeout(() => document.body.setAttribute('data-answer', "
        "this.contentDocument.body.getAttribute('data-answer')), 200)\"></iframe>"
    )
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder / 'profile'}", "--dump-dom", frame.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'<body data-answer="([^"]*)"', done.stdout)
    assert found, done.stdout[-500:] + done.stderr[-500:]
    return {**json.loads(html.unescape(found[1])), "console": re.findall(r"CONSOLE.*", done.stderr)}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    write(prove(fill(folder)), folder / "page.html")
    return folder / "page.html"


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_is_whole_in_a_browser(page: Path, tmp_path: Path, width: int) -> None:
    answer = ask(page, width, tmp_path)
    assert answer["window"] == width
    assert answer["images"] == page.read_text(encoding="utf-8").count("<img") > 5
    assert answer["drawn"] == answer["images"]
    assert (answer["errors"], answer["console"]) == ([], [])
    assert answer["wide"] == 0
    assert answer["page"] <= width
    assert answer["letters"] >= 12


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
def test_the_browser_would_say_what_is_wrong(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(
        '<html><head></head><body><p style="width:2000px">wide</p><img src="data:image/png;base64,AAAA">'
        "<script>throw new Error('broken')</script></body></html>"
    )
    answer = ask(page, 390, tmp_path)
    assert answer["drawn"] == 0
    assert answer["page"] >= 2000
    assert "broken" in answer["errors"][0]
    assert answer["console"]
