"""The site as readers see it: every page in a real browser, wide and narrow, light and dark."""

import functools
import http.server
import os
import shutil
import threading
from importlib.util import find_spec
from urllib.parse import unquote, urldefrag

import pytest

pytestmark = pytest.mark.slow

# What tests/conftest.py looks for in the reasons of skipped tests, to show it at the end.
NO_BROWSER = "no browser: needs selenium, chromium and chromedriver (Debian: chromium, chromium-driver)"

# As root in a container, without the services that look for their own hosts.
FLAGS = """
    --headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars
"""
WIDE, NARROW = (1280, 900, False), (375, 812, True)

# Of one whole document: the wait of the driver can end before a large page has been read to its end.
WHOLE = "return document.readyState === 'complete' && location.href === arguments[0]"
CONTENTS = """
    return {
        whole: document.readyState === 'complete' && location.href === arguments[0],
        ids: [...document.querySelectorAll('[id]')].map(e => e.id),
        links: [...document.querySelectorAll('a[href]')].map(a => a.href),
        elsewhere: performance.getEntriesByType('resource').map(r => r.name)
            .filter(name => !name.startsWith(location.origin)),
    };
"""
OVERFLOW = """
    const width = document.documentElement.clientWidth;
    return document.documentElement.scrollWidth <= width ? [] :
        [...document.querySelectorAll('article *')].filter(e => e.getBoundingClientRect().right > width + 1)
            .slice(0, 3).map(e => e.outerHTML.slice(0, 120));
"""
# Tables of few columns are read without scrolling; those of the index of names are lists.
CUT_OFF = """
    return [...document.querySelectorAll('article table:not(.genindextable)')]
        .filter(t => t.rows[0].cells.length <= 3 && t.scrollWidth > t.parentElement.clientWidth + 1)
        .map(t => t.innerText.slice(0, 60));
"""
CODE_CUT = """
    return [...document.querySelectorAll('article pre')].filter(p => p.scrollWidth > p.clientWidth + 1)
        .map(p => p.innerText.slice(0, 60));
"""
UNCOPIED = """
    return [...document.querySelectorAll('article div.highlight pre')]
        .filter(p => !p.parentElement.querySelector('button.copybtn')).map(p => p.innerText.slice(0, 60));
"""
# Photographs and plots on a ground of their own; drawings have colors for both.
ONE_GROUND = """
    return [...document.querySelectorAll('article img[src$=".png"]')]
        .filter(i => !/only-(light|dark)/.test(i.className)).map(i => i.getAttribute('src'));
"""
EMPTY = "return [...document.images].filter(i => !i.naturalWidth).map(i => i.getAttribute('src'))"
# How many characters fit into a line of the first program.
COLUMNS = """
    const block = document.querySelector('article div.highlight pre'), line = document.createElement('span');
    line.textContent = '0'.repeat(100);
    line.style.whiteSpace = 'pre';
    block.append(line);
    const style = getComputedStyle(block);
    const inside = block.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
    return inside / line.getBoundingClientRect().width * 100;
"""
# The contrast of text and what is behind it, as WCAG 2 defines it, for the first of each kind on the page.
CONTRASTS = """
    const parse = text => (text.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
    const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
        .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const behind = element => {
        for (let e = element; e; e = e.parentElement) {
            const color = parse(getComputedStyle(e).backgroundColor);
            if (color.length < 4 || color[3] === 1) return color;
        }
        return [255, 255, 255];
    };
    const found = {};
    const kinds = ['p', 'a', 'code', 'pre', 'td'].map(name => `article ${name}`);
    for (const kind of [...kinds, 'svg.diagram text', '.sidebar-tree a']) {
        const element = document.querySelector(kind);
        if (!element) continue;
        const style = getComputedStyle(element);
        const own = kind.startsWith('svg') ? style.fill : style.color;
        const [one, other] = [light(parse(own)), light(behind(element))].sort((a, b) => b - a);
        found[kind] = (one + 0.05) / (other + 0.05);
    }
    return found;
"""


@pytest.fixture(scope="module")
def address(site):
    """Where the site is served."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # a page's files come over few connections

        def log_message(self, *_):
            pass

    class Server(http.server.ThreadingHTTPServer):
        request_queue_size = 128  # the 5 of the default are soon full on a loaded machine

    server = Server(("127.0.0.1", 0), functools.partial(Quiet, directory=site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if find_spec("selenium") is None or chromium is None or driver is None:
        give_up = pytest.fail if os.environ.get("TP_NEEDS_BROWSER") else pytest.skip
        give_up(NO_BROWSER)
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in [*FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('profile')}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    chrome.set_page_load_timeout(300)
    yield chrome
    chrome.quit()


def resize(browser, width, height, mobile):
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def opened(browser, page):
    """What is in the page, once all of it is there."""
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get(page)
    WebDriverWait(browser, 300).until(lambda b: b.execute_script(WHOLE, page))
    contents = browser.execute_script(CONTENTS, page)
    assert contents["whole"], f"{page} went away"
    return contents


@pytest.mark.takes(200)
@pytest.mark.nightly
def test_every_page_is_whole_wide_and_narrow_light_and_dark(browser, site, address):
    """One walk over all pages: what is wrong with any of them is told together."""
    wanted: dict[str, set[tuple[str, str]]] = {}  # the fragments of a page, and who links to them
    waiting, ids, wrong = [f"{address}/index.html"], {}, []
    while waiting:
        page = waiting.pop()
        resize(browser, *WIDE)
        name, contents = page.removeprefix(f"{address}/"), opened(browser, page)
        ids[page] = set(contents["ids"])
        wrong += [f"{name} loads {resource}" for resource in contents["elsewhere"]]
        wrong += [f"{name} logs {entry['message']}" for entry in browser.get_log("browser")]
        for link in contents["links"]:
            target, fragment = urldefrag(link)
            if not target.startswith(address):
                continue
            if target not in wanted and target not in ids and target not in waiting:
                if target.endswith(".html"):
                    waiting.append(target)
                elif not (site / unquote(target.removeprefix(f"{address}/"))).is_file():
                    wrong.append(f"{name} links to {target}, which is not there")
            wanted.setdefault(target, set()).add((unquote(fragment), name))
        wrong += [f"{name} has no copy button at: {c}" for c in browser.execute_script(UNCOPIED)]
        wrong += [f"{name} has {i} for one ground alone" for i in browser.execute_script(ONE_GROUND)]
        wrong += [f"{name} has an empty picture: {i}" for i in browser.execute_script(EMPTY)]
        for theme in ("light", "dark"):
            browser.execute_script("document.body.dataset.theme = arguments[0]", theme)
            contrasts = browser.execute_script(CONTRASTS)
            wrong += [f"{name} ({theme}): {k} has contrast {c:.1f}" for k, c in contrasts.items() if c < 4]
        for size in (WIDE, NARROW):
            resize(browser, *size)
            wrong += [f"{name} is wider than {size[0]}: {e}" for e in browser.execute_script(OVERFLOW)]
            wrong += [f"{name} cuts code off at {size[0]}: {c}" for c in browser.execute_script(CODE_CUT)]
        wrong += [f"{name} cuts a table off on a phone: {t}" for t in browser.execute_script(CUT_OFF)]
    for page, links in wanted.items():
        for fragment, source in links:
            if fragment and fragment not in ids.get(page, {fragment}):  # which was not opened
                wrong.append(f"{source} links to {page.removeprefix(address)}#{fragment}, which is not there")
    assert len(ids) > 50
    assert not wrong, "\n".join(wrong)


def test_a_program_of_88_columns_is_not_wrapped(browser, address):
    resize(browser, *WIDE)
    opened(browser, f"{address}/index.html")
    assert browser.execute_script(COLUMNS) >= 88


def test_the_search_finds_what_is_written(browser, address):
    from selenium.webdriver.support.ui import WebDriverWait

    resize(browser, *WIDE)
    browser.get(f"{address}/search.html?q=interrupted")
    found = "return document.querySelectorAll('#search-results li a').length"
    WebDriverWait(browser, 300).until(lambda b: b.execute_script(found) > 0)
