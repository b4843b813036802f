"""The page at / of a real server in headless Chromium. PAGE_URL names another address, such as a proxy's."""

import json
import os
import pathlib
import re
import shutil
import sys
import urllib.parse

import pytest
from playwright.sync_api import sync_playwright

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from serving import serving  # noqa: E402

SHOTS = pathlib.Path(os.environ.get("PAGE_SHOTS", HERE.parents[1] / "target" / "page"))
KEY = "a-key-for-the-test-of-the-page"
DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 360, "height": 740}
# What Chromium says of an answer such as a 400; tests that provoke one allow it.
REFUSED = re.compile("Failed to load resource: .*(status of 4|ERR_FAILED)")


@pytest.fixture(scope="session")
def address():
    if "PAGE_URL" in os.environ:
        yield os.environ["PAGE_URL"]
        return
    with serving() as address:
        yield address


@pytest.fixture(scope="session")
def locked():
    """A server that wants `KEY`."""
    if "PAGE_LOCKED_URL" in os.environ:
        yield os.environ["PAGE_LOCKED_URL"]
        return
    with serving(TAPER_API_KEY=KEY) as address:
        yield address


@pytest.fixture(scope="session")
def browser():
    names = ("chromium", "chromium-browser", "google-chrome")
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.fail("no Chromium here: apt-get install chromium, or name one in CHROMIUM", pytrace=False)
    # Root has no sandbox.
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=options)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser, address):
    """Opens the page; at the end nothing may have left its origin, and the console must be clean."""
    opened = []

    def visit(url=address, viewport=DESKTOP, refusals=False, **options):
        context = browser.new_context(viewport=viewport, **options)
        page = context.new_page()
        page.set_default_timeout(30_000)
        seen = {"page": page, "url": url, "refusals": refusals, "requests": [], "problems": []}
        page.on("request", lambda request: seen["requests"].append(request.url))
        page.on("pageerror", lambda error: seen["problems"].append(str(error)))
        page.on("console", lambda m: m.type in ("error", "warning") and seen["problems"].append(m.text))
        opened.append(seen)
        page.goto(url)
        if page.locator("#send").count():
            # Before it has fetched what methods there are, the chat hears nothing.
            page.locator("#send:enabled, #key-dialog[open]").first.wait_for()
        return page

    yield visit
    for seen in opened:
        origin = urllib.parse.urlsplit(seen["url"]).netloc
        assert all(urllib.parse.urlsplit(url).netloc == origin for url in seen["requests"]), seen["requests"]
        problems = [p for p in seen["problems"] if not (seen["refusals"] and REFUSED.match(p))]
        assert problems == []
        seen["page"].context.close()


@pytest.fixture
def page(visit):
    return visit()


def shot(page, name, element=None):
    """Keeps a screenshot; of an element all of it, also what would have to be scrolled to."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    path = SHOTS / f"{name}.png"
    if element is None:
        page.screenshot(path=path)
        return
    size = page.viewport_size
    page.set_viewport_size({**size, "height": int(element.bounding_box()["height"]) + 250})
    element.screenshot(path=path)
    page.set_viewport_size(size)


class Ui:
    """What people do on the page."""

    def __init__(self, page):
        self.page = page

    def control(self, path, side="A"):
        return self.page.locator(f"details[data-side={side}] [data-path='{path}']")

    def method(self, path, name, side="A"):
        self.control(path, side).locator("select").first.select_option(name)

    def number(self, path, value, side="A"):
        self.control(path, side).locator("input[type=number]").fill(str(value))

    def length(self, tokens):
        self.page.get_by_text("Answer: length and sampling").click()
        self.page.locator("[data-path=max_tokens] input").fill(str(tokens))

    def ask(self, text, wait=True):
        """Sends a message; the bodies of the requests that went out."""
        self.page.get_by_label("Message").fill(text)
        sides = 2 if self.page.get_by_role("button", name="Compare").get_attribute("aria-pressed") == "true" else 1
        bodies = []
        catch = lambda r: r.url.endswith("/v1/chat/completions") and bodies.append(r.post_data_json)  # noqa: E731
        self.page.on("request", catch)
        # Before it knows the methods the page sends nothing.
        self.page.locator("#send:enabled").wait_for()
        self.page.get_by_label("Message").press("Enter")
        if wait:
            self.done()
            assert len(bodies) == sides
        self.page.remove_listener("request", catch)
        return bodies

    def done(self):
        self.page.locator("body:not(.running):has(.turn)").wait_for()

    def alert(self):
        alert = self.page.locator("#alert")
        alert.wait_for()
        return alert.inner_text()


@pytest.fixture
def ui(page):
    return Ui(page)


def answer_with(page, *answers):
    """Answers chats with canned ones instead of the server's, in turn: `(tokens, attention)`; and names the prompt's tokens."""
    left = list(answers)

    def chat(route):
        tokens, attention = left.pop(0) if len(left) > 1 else left[0]
        chunks = [{"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}]
        for token in tokens:
            logprobs = {"content": [{"token": token, "logprob": -1, "bytes": list(token.encode())}]}
            chunks.append({"choices": [{"delta": {"content": token}, "logprobs": logprobs, "finish_reason": None}]})
        chunks.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        usage = {"prompt_tokens": len(PROMPT), "completion_tokens": len(tokens), "prompt_tokens_details": {"cached_tokens": 0}}
        chunks.append({"choices": [], "usage": {**usage, "attention": attention}})
        body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        route.fulfill(body=body, content_type="text/event-stream")

    page.route("**/v1/chat/completions", chat)
    page.route("**/tokenize", lambda route: route.fulfill(json={"count": len(PROMPT), "token_strs": PROMPT}))


# A prompt of twelve tokens.
PROMPT = ["<|im_start|>", "user", "\n", "Where", " is", " the", " cat", "?", "<|im_end|>", "\n", "<|im_start|>", "assistant"]


def attention(tokens, layers=4, heads=2, density=0.25, trace=True, audit=True):
    """A canned `usage.attention` for an answer of so many tokens: the row at p reads p % 8 + 1 pairs' worth of key 6."""
    cell = lambda layer, head: round(density * (1 + layer / layers + head / heads) / 2, 4)  # noqa: E731
    grid = [[cell(layer, head) for head in range(heads)] for layer in range(layers)]
    phase = {"method": "quest", "density": density, "budget_mean": 4.5, "budget_max": 9, "seed": 1}
    errors = {"heads": 40, "error_mean": 0.05, "error_p99": 0.12, "error_max": 0.2, "over_epsilon": 0.05}
    first = len(PROMPT)
    rows = [
        {
            "position": p,
            "budget": 4 + (p % 3),
            "density": (4 + (p % 3)) / (p + 1),
            **({"error": 0.02 * (p - first + 1)} if audit else {}),
            "reads": [[0, 2, layers * heads], [6, 1, p % 8 + 1], [p - 1, 2, layers * heads]],
        }
        for p in range(first, first + tokens - 1)
    ]
    usage = {
        "prefill": {**phase, "method": "dense", "density": 1.0},
        "decode": {**phase, **({"audit": errors} if audit else {})},
    }
    if trace:
        ones = [[1.0] * heads] * layers
        usage["trace"] = {
            "layers": layers,
            "kv_heads": heads,
            "prefill": {"density": ones},
            "decode": {"density": grid},
            "tokens": rows,
        }
    return usage
