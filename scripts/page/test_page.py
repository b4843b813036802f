"""The page against a real server: chat, controls, pictures, comparison, errors, themes, phone, keyboard."""

import json
import re
import urllib.request

from playwright.sync_api import expect

from conftest import DESKTOP, KEY, PHONE, PROMPT, Ui, answer_with, attention, shot

ANSWER = ["On", " the", " **", "mat", "**", ".\n\n- ", "one", "\n- ", "two", ""]
SIDEWAYS = "[document.documentElement, document.body, document.querySelector('#scroller')].map((e) => e.scrollWidth - e.clientWidth)"


def test_chat_streams(page, ui):
    page.evaluate("""() => {
        window.seen = new Set();
        const note = () => seen.add(document.querySelector(".content")?.textContent);
        new MutationObserver(note).observe(document.querySelector("#log"), { childList: true, subtree: true });
    }""")
    shot(page, "empty-light")
    # Long enough for frames to come meanwhile, on a machine with other work too.
    ui.length(64)
    [body] = ui.ask("Tell a long story about a cat.")
    assert body["messages"] == [{"role": "user", "content": "Tell a long story about a cat."}]
    assert (body["stream"], body["stream_options"], body["max_tokens"]) == (True, {"include_usage": True}, 64)
    # Shown once a frame at most: nothing, a part, all of it.
    assert page.evaluate("seen.size") > 2, "the answer grows"
    first = page.locator(".answer .content").inner_text()
    stats = page.locator(".stats").inner_text()
    assert re.search(r"TTFT\s*[\d.,]+ ms", stats) and re.search(r"tokens/s\s*[\d.]+", stats), stats
    [body] = ui.ask("And about a dog?")
    assert [m["role"] for m in body["messages"]] == ["user", "assistant", "user"]
    words = lambda text: re.findall(r"\w+", text)
    assert words(body["messages"][1]["content"]) == words(first)
    assert page.locator("details.what[open]").count() <= 1, "pictures of earlier answers fold"
    page.get_by_role("button", name="Ask again").last.click()
    ui.done()
    assert page.locator(".turn").count() == 2
    page.get_by_role("button", name="New chat").click()
    assert page.locator(".turn").count() == 0 and page.locator(".welcome").is_visible()


def test_answers_are_markdown_and_never_html(page, ui):
    evil = ["<img src=x onerror=\"document.title='gotcha'\">", " [x](javascript:alert(1))", " **bold**"]
    answer_with(page, (ANSWER, attention(len(ANSWER))), (evil, attention(len(evil))))
    ui.ask("Where is the cat?")
    content = page.locator(".content").last
    assert content.locator("strong").inner_text() == "mat"
    assert content.locator("li").all_inner_texts() == ["one", "two"]
    ui.ask("<b>And now?</b>")
    content = page.locator(".content").last
    assert content.locator("strong").inner_text() == "bold"
    assert content.locator("img, a").count() == 0 and "<img src=x" in content.inner_text()
    assert page.locator(".user").last.inner_text() == "<b>And now?</b>"
    assert page.title() == "Taper"


def test_every_parameter_of_every_method_has_a_control(page, ui, address):
    methods = json.load(urllib.request.urlopen(address + "/v1/attention/methods"))
    for path in methods["schema"]["properties"]:
        assert ui.control(f"attention.{path}").first.is_visible(), path
    for method in methods["data"]:
        if method["phase"] not in ("prefill", "decode"):
            continue
        ui.method(f"attention.{method['phase']}", method["name"])
        group = ui.control(f"attention.{method['phase']}")
        assert method["summary"].split("`")[0] in group.inner_text()
        # One look at all controls: what each path shows, first of itself and not of what is within.
        shown = group.evaluate("""(group) => Object.fromEntries([...group.querySelectorAll("[data-path]")].map((one) => {
            const field = one.querySelector("input:not([type=range]), select, textarea");
            const value = field.type === "checkbox" ? field.checked : field.selectedOptions?.[0].text ?? (field.value || field.placeholder);
            return [one.dataset.path, one.checkVisibility() ? value : null];
        }))""")
        for name, schema in method["parameters"]["properties"].items():
            if name == "method":
                continue
            default, value = schema["default"], shown[f"attention.{method['phase']}.{name}"]
            if isinstance(default, bool):
                assert value == default
            elif isinstance(default, list):
                assert json.loads(value) == default
            elif isinstance(default, (int, float)):
                assert float(value) == default, (method["name"], name)
            else:
                assert value == (default["method"] if isinstance(default, dict) else default), (method["name"], name)
    # Looking through them is no choice.
    for phase in ("prefill", "decode"):
        ui.method(f"attention.{phase}", methods["default"][phase]["method"])
    assert ui.control("attention.question").locator(".reset").is_hidden()


def test_what_the_controls_say_is_sent_and_no_more(page, ui):
    answer_with(page, (ANSWER, attention(len(ANSWER))))
    asked = lambda: ui.ask("Where is the cat?")[0].get("attention")  # noqa: E731
    assert asked() == {"trace": True}
    ui.method("attention.prefill", "delta")
    ui.number("attention.prefill.gamma", 32)
    ui.method("attention.prefill.base", "bigbird")
    ui.number("attention.prefill.base.random", 5)
    ui.method("attention.decode", "vattention")
    ui.number("attention.decode.epsilon", 0.05)
    ui.number("attention.decode.delta", 0.1)
    assert ui.control("attention.decode.top_k").locator("input").get_attribute("placeholder") == "auto"
    ui.number("attention.decode.top_k", 0.05)
    ui.method("attention.decode.top", "quest")
    ui.method("attention.decode.top.page", "32")
    ui.number("attention.audit", 0.5)
    ui.method("attention.question", "dense")
    base = {"method": "bigbird", "random": 5}
    wanted = {
        "prefill": {"method": "delta", "gamma": 32, "base": base},
        "decode": {"method": "vattention", "epsilon": 0.05, "top_k": 0.05, "top": {"method": "quest", "page": 32}},
        "question": "dense",
        "audit": 0.5,
        "trace": True,
    }
    shot(page, "settings-light", page.locator("details[data-side=A]"))
    assert asked() == wanted
    page.locator(".sent summary").first.click()
    assert json.loads(page.locator(".sent code").first.inner_text()) == {"attention": wanted}
    ui.control("attention.decode.epsilon").locator(".reset").click()
    ui.number("attention.decode.top_k", "")
    ui.number("attention.audit", "")
    ui.control("attention.trace").locator("input").uncheck()
    for name in ("epsilon", "top_k"):
        wanted["decode"].pop(name)
    del wanted["audit"], wanted["trace"]
    assert asked() == wanted
    page.get_by_role("button", name="Reset to the server's default").first.click()
    assert asked() == {"trace": True}
    ui.method("attention.prefill", "hip")
    stages = ui.control("attention.prefill.stages").locator("textarea")
    stages.fill('[{"chunk": 64, "keep": 128}]')
    assert asked() == {"prefill": {"method": "hip", "stages": [{"chunk": 64, "keep": 128}]}, "trace": True}


def test_drafts_can_be_asked_for(page, ui):
    """An object that may be null: a switch and what it holds."""
    answer_with(page, (ANSWER, attention(len(ANSWER))))
    speculate = ui.control("attention.speculate").first
    speculate.locator(".switch").first.check()
    ui.method("attention.speculate.method", "quest")
    ui.number("attention.speculate.tokens", 6)
    assert ui.ask("Where?")[0]["attention"]["speculate"] == {"method": {"method": "quest"}, "tokens": 6}
    speculate.locator(".switch").first.uncheck()
    assert "speculate" not in ui.ask("Where?")[0]["attention"]


def test_the_real_pictures(page, ui):
    """A real trace: as many cells as layers × heads, their mean the density that the usage says."""
    ui.length(12)
    ui.method("attention.decode", "streaming_llm")
    ui.number("attention.decode.window", 8)
    ui.number("attention.audit", 0.5)
    answers = []

    def keep(route):
        response = route.fetch()
        answers.append(response.text())
        route.fulfill(response=response)

    page.route("**/v1/chat/completions", keep)
    ui.ask("Why is the sky blue?")
    [line] = [line for line in answers[0].splitlines() if '"usage":{' in line.replace(" ", "")]
    usage = json.loads(line.removeprefix("data: "))["usage"]
    trace = usage["attention"]["trace"]
    maps = page.locator(".heatmap")
    assert maps.count() == 2
    for phase, figure in (("prefill", maps.nth(0)), ("decode", maps.nth(1))):
        cells = figure.locator(".cell")
        assert cells.count() == trace["layers"] * trace["kv_heads"]
        shown = cells.evaluate_all("(all) => all.map((c) => [Number(c.dataset.layer), Number(c.dataset.head), Number(c.dataset.value)])")
        assert all(trace[phase]["density"][layer][head] == value for layer, head, value in shown)
    assert page.locator(".reading .token").count() == usage["prompt_tokens"] + usage["completion_tokens"]
    text = "".join(page.locator(".reading [role=list] .token").all_text_contents()).replace("↵", "")
    assert "Why is the sky blue?" in text
    # A window of eight and four sinks.
    assert page.locator(".reading .token.read").count() == 12
    shot(page, "pictures-real-light", page.locator(".answer"))


def test_heat_map(page, ui):
    usage = attention(len(ANSWER), layers=5, heads=3)
    answer_with(page, (ANSWER, usage))
    ui.ask("Where is the cat?")
    figure = page.locator(".heatmap").nth(1)
    cells = figure.locator(".cell")
    assert cells.count() == 15
    assert figure.locator(".row:not(.ticks)").count() == 3
    shown = cells.evaluate_all("(all) => all.map((c) => [c.dataset.layer, c.dataset.head, c.dataset.value].map(Number))")
    density = usage["trace"]["decode"]["density"]
    wanted = [(layer, head, value) for layer, row in enumerate(density) for head, value in enumerate(row)]
    assert sorted(map(tuple, shown)) == wanted
    # More is darker, in the light theme, and the legend has the scale's end.
    light = """(all) => all.map((cell) => {
        const x = new OffscreenCanvas(1, 1).getContext('2d');
        x.fillStyle = getComputedStyle(cell).backgroundColor;
        x.fillRect(0, 0, 1, 1);
        const [r, g, b] = x.getImageData(0, 0, 1, 1).data;
        return [Number(cell.dataset.value), r + g + b];
    })"""
    by_value = sorted(map(tuple, cells.evaluate_all(light)))
    assert all(a[1] > b[1] for a, b in zip(by_value, by_value[1:]) if a[0] < b[0])
    assert figure.locator(".legend").inner_text().split() == ["0", "0.5"]
    # The number under pointer and focus.
    figure.locator(".cell[data-layer='2'][data-head='1']").hover()
    assert figure.locator(".readout").inner_text() == f"Layer 2, KV head 1: density {usage['trace']['decode']['density'][2][1]}"
    cells.first.focus()
    for key in ("ArrowRight", "ArrowDown", "ArrowDown", "ArrowDown", "End", "ArrowRight", "ArrowUp"):
        page.keyboard.press(key)
    assert figure.locator(".readout").inner_text().startswith("Layer 4, KV head 1:")
    assert figure.locator(".cell[tabindex='0']").count() == 1


def test_budget_and_error_and_reading(page, ui):
    usage = attention(len(ANSWER))
    answer_with(page, (ANSWER, usage))
    ui.method("attention.decode", "vattention")
    ui.ask("Where is the cat?")
    budget = page.locator(".budget-chart")
    assert budget.locator("path.budget").get_attribute("d").count("L") == len(ANSWER) - 2
    slider = budget.get_by_role("slider")
    slider.focus()
    page.keyboard.press("Home")
    assert budget.locator(".readout").inner_text() == "Token 13 “ the”: 4 keys of 13 (30.8 %)"
    # All pictures show the token that one of them shows.
    assert page.locator(".token.picked").inner_text().strip() == "the"
    page.keyboard.press("ArrowRight")
    assert budget.locator(".readout").inner_text().startswith("Token 14 “ **”: 5 keys of 14")
    errors = page.locator(".error-chart")
    assert "promised ε 0.1" in errors.inner_text()
    assert errors.locator(".bar").count() == 3 and errors.locator(".bar.over").count() == 2
    assert errors.locator(".dot").count() == len(ANSWER) - 1
    # Errors grow by 0.02 a token: the first five keep to 0.1.
    assert errors.locator(".dot.over").count() == len(ANSWER) - 1 - 5
    assert errors.locator("line.epsilon").count() == 2
    assert "Token 14" in errors.locator(".readout").inner_text() and "0.04" in errors.locator(".readout").inner_text()

    reading = page.locator(".reading")
    token = lambda at: reading.locator(f".token[data-at='{at}']")  # noqa: E731
    share = lambda at: float(token(at).evaluate("(t) => t.style.getPropertyValue('--v') || 0"))  # noqa: E731
    # The row at 14 writes the token at 15; it read 0, 1, 13 and 14 in all eight pairs, and 6 in seven.
    token(15).hover()
    assert [share(at) for at in (0, 1, 2, 6, 13, 14, 15)] == [1, 1, 0, 7 / 8, 1, 1, 0]
    assert "To write “mat” (token 15)" in reading.inner_text()
    token(6).hover()
    assert reading.locator(".key-readout").inner_text() == "“ cat” (token 6) was read by 6 of 8 heads."
    assert token(14).evaluate("(t) => t.classList.contains('picked')"), "what was pinned comes back"
    token(16).click()
    token(6).hover()
    assert reading.locator(".key-readout").inner_text() == "“ cat” (token 6) was read by 8 of 8 heads."
    token(16).focus()
    page.keyboard.press("ArrowLeft")
    assert "To write “mat” (token 15)" in reading.inner_text() and share(6) == 7 / 8
    token(12).click()
    assert "comes from the prompt's last row" in reading.inner_text()
    assert reading.locator(".token.read").count() == 0
    assert reading.locator(".strip rect").count() == 0
    token(15).click()
    assert reading.locator(".strip rect").count() == 3
    shot(page, "pictures-light", page.locator(".answer"))


def test_a_long_text_is_shaded_where_it_is_seen(page, ui):
    tokens = [f" t{at}" for at in range(900)]
    answer_with(page, (tokens, attention(len(tokens))))
    ui.ask("A long one?")
    reading = page.locator(".reading")
    last = len(PROMPT) + len(tokens) - 1
    assert reading.locator(".token.picked").get_attribute("data-at") == str(last)
    reading.locator("[role=listbox]").scroll_into_view_if_needed()
    expect(reading.locator(".token.picked")).to_be_in_viewport()
    page.locator(".budget-chart").get_by_role("slider").press("Home")
    assert reading.locator(".token.picked").get_attribute("data-at") == str(len(PROMPT) + 1)
    # The row before it read the first two tokens, key 6, and its own and the one before.
    before = "(all) => all.filter((t) => t.matches('.read')).map((t) => Number(t.dataset.at))"
    assert reading.locator(".token").evaluate_all(f"(all) => ({before})(all.slice(0, 100))") == [0, 1, 6, 11, 12]
    near = reading.locator(f".token[data-at='{last - 1}']")
    reading.locator("[role=listbox]").evaluate("(box) => { box.scrollTop = box.scrollHeight; }")
    expect(near).to_have_class("token")
    reading.locator(f".token[data-at='{last}']").hover()
    expect(near).to_have_class("token read half strong")
    assert reading.locator(".strip rect").count() == 3


def test_pictures_say_what_is_missing(page, ui):
    bare = attention(1)
    bare["trace"].update(tokens=[], decode=None, prefill=None)
    many = attention(len(ANSWER), audit=False)
    for row in many["trace"]["tokens"]:
        del row["reads"]
    answer_with(page, (["No"], attention(1, trace=False)), (["No"], bare), (ANSWER, many))
    ui.ask("First?")
    assert "switch “trace” on" in page.locator(".pictures").last.inner_text()
    ui.ask("Second?")
    text = page.locator(".pictures").last.inner_text()
    assert "prefix cache" in text and "prompt's last row" in text
    ui.ask("Third?")
    text = page.locator(".pictures").last.inner_text()
    assert "Which ones was not recorded" in text and "Nothing of the answer was audited" in text
    page.get_by_role("button", name="Audit the next answers").last.click()
    assert ui.ask("Fourth?")[0]["attention"] == {"audit": 1, "trace": True}


def test_shaded_text_is_readable(page, ui):
    """Every shade of the scale leaves a contrast of 4.5 to its text, in both themes."""
    contrasts = """(tokens) => tokens.map((token) => {
        const x = new OffscreenCanvas(1, 1).getContext('2d', { willReadFrequently: true });
        const linear = (c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4);
        const light = (colour) => {
            x.fillStyle = colour; x.fillRect(0, 0, 1, 1);
            const [r, g, b] = [...x.getImageData(0, 0, 1, 1).data].map(linear);
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        const { color, backgroundColor } = getComputedStyle(token);
        const [a, b] = [light(color), light(backgroundColor)].sort((p, q) => q - p);
        return (a + 0.05) / (b + 0.05);
    })"""
    usage = attention(2, layers=100, heads=1)
    usage["trace"]["tokens"][0]["reads"] = [[at, 1, n] for at, n in enumerate([2, 20, 40, 47, 50, 51, 58, 62, 65, 66, 75, 100])]
    answer_with(page, (["Here", "."], usage))
    ui.ask("Where?")
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme, reduced_motion="reduce")
        found = page.locator(".token.read").evaluate_all(contrasts)
        assert len(found) == 12 and min(found) >= 4.5, (theme, found)


def test_a_bad_value_is_shown_at_its_control(visit):
    page = visit(refusals=True)
    ui = Ui(page)
    ui.method("attention.decode", "vattention")
    ui.number("attention.decode.epsilon", 7)
    page.get_by_label("Message").fill("Why?")
    page.get_by_label("Message").press("Enter")
    error = ui.control("attention.decode.epsilon").locator(".error")
    error.wait_for()
    assert "greater than 0 and less than 1; got 7" in error.inner_text()
    field = ui.control("attention.decode.epsilon").locator("input[type=number]")
    assert field.get_attribute("aria-invalid") == "true"
    assert field.evaluate("(f) => f === document.activeElement")
    assert page.get_by_label("Message").input_value() == "Why?", "the message is not lost"
    assert page.locator(".turn").count() == 0
    shot(page, "error-light")
    # A parameter of a method within a method, and one that no method has.
    ui.number("attention.decode.epsilon", 0.1)
    ui.method("attention.prefill", "delta")
    ui.method("attention.prefill.base", "streaming_llm")
    ui.number("attention.prefill.base.window", 0.5)
    page.get_by_label("Message").press("Enter")
    ui.control("attention.prefill.base.window").locator(".error").wait_for()
    ui.number("attention.prefill.base.window", 64)
    page.get_by_text("Answer: length and sampling").click()
    page.locator("[data-path=temperature] input").fill("9")
    page.get_by_label("Message").press("Enter")
    page.locator("[data-path=temperature] .error").get_by_text("temperature").wait_for()
    page.locator("[data-path=temperature] input").fill("0")
    # What needs a file that is not here.
    ui.method("attention.decode", "double_sparsity")
    page.get_by_label("Message").press("Enter")
    page.locator("[data-path='attention.decode'] .error:visible").first.wait_for()


def test_errors_without_a_control_stand_above_the_message(visit):
    page = visit(refusals=True)
    ui = Ui(page)
    busy = {"error": {"message": "too busy", "param": None, "code": 503}}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=429, json=busy, headers={"Retry-After": "3"}))
    page.get_by_label("Message").fill("Why?")
    page.get_by_label("Message").press("Enter")
    assert ui.alert() == "too busy (try again in 3 s)"
    page.unroute("**/v1/chat/completions")
    page.route("**/v1/chat/completions", lambda route: route.abort())
    page.get_by_label("Message").press("Enter")
    page.locator("#alert").get_by_text("cannot be reached").wait_for()
    page.unroute("**/v1/chat/completions")
    # An error in the middle of a stream keeps what was there.
    broken = 'data: {"choices": [{"delta": {"content": "Half an"}}]}\n\ndata: ' + json.dumps(busy) + "\n\ndata: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=broken, content_type="text/event-stream"))
    page.get_by_label("Message").press("Enter")
    page.locator(".answer[data-state=failed]").wait_for()
    page.locator("#alert").get_by_text("too busy").wait_for()
    assert page.locator(".answer .content").last.inner_text() == "Half an"
    assert "Broken off" in page.locator(".answer .status").last.inner_text()
    assert page.get_by_label("Message").input_value() == "", "the message is in its turn"


def test_where_nothing_may_be_stored(visit):
    """As in a browser that takes no cookies from anyone."""
    page = visit()
    page.add_init_script(
        "for (const name of ['sessionStorage', 'localStorage']) Object.defineProperty(window, name,"
        " {get: () => { throw new DOMException('denied', 'SecurityError'); }});"
    )
    page.reload()
    page.get_by_role("button", name="Send").and_(page.locator(":enabled")).wait_for()
    ui = Ui(page)
    ui.length(4)
    ui.ask("Hello")


def test_keys_find_their_way(visit):
    page = visit(viewport=PHONE)
    settings = page.get_by_role("button", name="Settings")
    settings.click()
    page.locator("body.panel-open").wait_for()
    page.keyboard.press("Escape")
    page.locator("body:not(.panel-open)").wait_for()
    assert settings.evaluate("one => one === document.activeElement")
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body="data: [DONE]\n\n", content_type="text/event-stream"))
    page.get_by_label("Message").fill("Hello")
    page.keyboard.press("Enter")
    page.locator(".answer[data-state=done]").wait_for()
    page.get_by_role("button", name="Ask again").focus()
    page.keyboard.press("Enter")
    page.locator(".answer[data-state=done]").wait_for()
    assert page.evaluate("document.querySelector('.turn').contains(document.activeElement)")


def test_a_key_is_asked_for(visit, locked):
    page = visit(locked, refusals=True)
    dialog = page.get_by_role("dialog")
    dialog.wait_for()
    assert "wants an API key" in dialog.inner_text()
    shot(page, "key-light")
    page.get_by_label("Key", exact=True).fill("wrong")
    page.keyboard.press("Enter")
    dialog.get_by_text("not known here").wait_for()
    page.get_by_label("Key", exact=True).fill(KEY)
    page.keyboard.press("Enter")
    dialog.wait_for(state="hidden")
    ui = Ui(page)
    ui.length(4)
    ui.ask("Hello")
    assert page.evaluate("[sessionStorage.length, JSON.stringify(localStorage)]") == [1, "{}"]
    page.reload()
    page.locator(".welcome").wait_for()
    assert page.get_by_role("dialog").count() == 0


def test_compare(page, ui):
    page.get_by_role("button", name="Compare").click()
    ui.length(12)
    ui.method("attention.decode", "streaming_llm", "B")
    ui.number("attention.decode.window", 2, "B")
    ui.number("attention.decode.sink", 0, "B")
    bodies = ui.ask("Why is the sky blue? Answer in three sentences.")
    sent = [body["attention"] for body in bodies]
    assert {"trace": True} in sent and {"decode": {"method": "streaming_llm", "window": 2, "sink": 0}, "trace": True} in sent
    assert len({json.dumps(body["messages"]) for body in bodies}) == 1
    assert page.locator(".answer mark").count() > 0
    assert "are marked" in page.locator(".verdict").inner_text()
    assert page.locator(".pictures").count() == 2
    assert [text.split()[0] for text in page.locator(".versus tbody th").all_inner_texts()][:2] == ["TTFT", "tokens/s"]
    shot(page, "compare-light")
    shot(page, "compare-whole-light", page.locator(".turn"))
    # Each side goes on from its own answer.
    page.locator("[data-path=max_tokens] input").fill("2")
    first, second = (body["messages"][1]["content"] for body in ui.ask("Go on."))
    assert first != second


def test_compare_marks_words_and_shows_errors_at_their_side(visit):
    page = visit(refusals=True)
    ui = Ui(page)
    page.get_by_role("button", name="Compare").click()
    said = [["The **cat** sat", " on the mat."], ["The **dog** sat", " on the mat."]]
    answer_with(page, *((tokens, attention(2)) for tokens in said))
    ui.ask("What sat?")
    assert sorted(page.locator(".answer mark").all_inner_texts()) == ["cat", "dog"]
    assert page.locator(".answer strong mark").count() == 2, "Markdown stays"
    assert "1 of 7 words of A and 1 of 7 of B" in page.locator(".verdict").inner_text()
    answer_with(page, (said[0], attention(2)))
    ui.ask("What sat?")
    assert "Both say the same" in page.locator(".verdict").last.inner_text()
    page.unroute("**/v1/chat/completions")
    ui.method("attention.decode", "vattention", "B")
    ui.number("attention.decode.delta", 3, "B")
    page.locator("details[data-side=A] > summary").click()
    ui.length(4)
    ui.ask("And now?", wait=False)
    error = ui.control("attention.decode.delta", "B").locator(".error")
    error.wait_for()
    assert "got 3" in error.inner_text() and ui.alert().startswith("B: ")
    ui.done()
    assert page.locator(".turn").last.locator("[data-state=done]").count() == 1, "the other side answers"


def test_stop(page, ui):
    ui.length(2000)
    ui.ask("Count to a thousand.", wait=False)
    page.locator(".answer[data-state=streaming] .content:not(:empty)").wait_for()
    page.get_by_role("button", name="Stop").click()
    page.locator(".answer[data-state=stopped]").wait_for()
    assert "Stopped" in page.locator(".answer .status").inner_text()
    assert page.locator(".content").inner_text() and page.get_by_role("button", name="Send").is_visible()
    page.get_by_role("button", name="Ask again").click()
    page.locator(".answer[data-state=streaming] .content:not(:empty)").wait_for()
    page.keyboard.press("Escape")
    page.locator(".answer[data-state=stopped]").wait_for()
    page.locator("[data-path=max_tokens] input").fill("4")
    ui.ask("Short now.")
    assert page.locator(".answer[data-state=done]").count() == 1


def test_light_and_dark(visit):
    ground = "getComputedStyle(document.body).backgroundColor"
    light, dark = visit(), visit(color_scheme="dark")
    grounds = [page.evaluate(ground) for page in (light, dark)]
    assert grounds[0] != grounds[1]
    theme = light.get_by_role("button", name="Theme")
    theme.click()
    theme.click()
    assert theme.get_attribute("aria-label") == "Theme: dark" and light.evaluate(ground) == grounds[1]
    light.reload()
    assert light.evaluate(ground) == grounds[1], "a choice is kept"
    still = visit(reduced_motion="reduce")
    still.locator(".switch").first.wait_for()
    for page, moves in ((light, True), (still, False)):
        moving = page.locator(".switch").first.evaluate("(s) => getComputedStyle(s, '::before').transitionDuration !== '0s'")
        assert moving == moves
    answer_with(dark, (ANSWER, attention(len(ANSWER), layers=16, heads=4)))
    ui = Ui(dark)
    ui.method("attention.decode", "vattention")
    ui.ask("Where is the cat?")
    shot(dark, "answer-dark")
    shot(dark, "pictures-dark", dark.locator(".answer"))


def test_phone(visit):
    page = visit(viewport=PHONE, color_scheme="light", has_touch=True, is_mobile=True)
    ui = Ui(page)
    narrow = lambda: page.evaluate(SIDEWAYS)  # noqa: E731
    page.locator(".welcome").wait_for()
    assert narrow() == [0, 0, 0]
    shot(page, "phone-empty-light")
    page.get_by_role("button", name="Settings").tap()
    ui.method("attention.decode", "vattention")
    assert page.locator("aside").evaluate("(a) => a.scrollWidth - a.clientWidth") == 0 and narrow() == [0, 0, 0]
    shot(page, "phone-settings-light")
    page.get_by_role("button", name="Settings").tap()
    wide = ["```\n" + "x" * 200 + "\n```\n", "|a|b|\n|-|-|\n|" + "y" * 99 + "|" + "z" * 99 + "|\n"]
    answer_with(page, (wide, attention(2, layers=32, heads=8)), (ANSWER, attention(len(ANSWER), layers=32, heads=8)))
    page.get_by_label("Message").fill("w" * 300)
    page.get_by_role("button", name="Send").tap()
    ui.done()
    assert narrow() == [0, 0, 0]
    page.get_by_role("button", name="Compare").tap()
    page.get_by_role("button", name="Settings").tap()
    page.get_by_label("Message").fill("Where is the cat?")
    page.get_by_role("button", name="Send").tap()
    ui.done()
    assert narrow() == [0, 0, 0]
    reading = page.locator(".turn").last.locator(".reading").last
    reading.locator(".token[data-at='15']").tap()
    assert "To write “mat”" in reading.inner_text()
    shot(page, "phone-answer-light")
    page.emulate_media(color_scheme="dark")
    assert narrow() == [0, 0, 0]
    shot(page, "phone-answer-dark")
    shot(page, "phone-pictures-dark", page.locator(".below").last)


def test_keyboard_alone(page):
    answer_with(page, (ANSWER, attention(len(ANSWER))))
    page.locator(".welcome").wait_for()
    focused = lambda: page.evaluate("document.activeElement.outerHTML.slice(0, 200)")  # noqa: E731
    inside = lambda selector: page.evaluate(f"Boolean(document.activeElement.closest({json.dumps(selector)}))")  # noqa: E731

    def tab_to(selector, most=80, key="Tab"):
        for _ in range(most):
            page.keyboard.press(key)
            if inside(selector):
                outline = page.evaluate("getComputedStyle(document.activeElement.closest('.write') || document.activeElement).outlineStyle")
                assert outline != "none", focused()
                return
        raise AssertionError(f"Tab does not come to {selector}, but to {focused()}")

    tab_to("[data-path='attention.decode'] select")
    page.keyboard.type("quest")
    tab_to("[data-path='attention.decode.k'] input")
    page.keyboard.press("ControlOrMeta+a")
    page.keyboard.type("0.1")
    tab_to("#prompt")
    page.keyboard.type("Where is")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("the cat?")
    with page.expect_request("**/v1/chat/completions") as request:
        page.keyboard.press("Enter")
    body = request.value.post_data_json
    assert body["messages"][0]["content"] == "Where is\nthe cat?"
    assert body["attention"]["decode"] == {"method": "quest", "k": 0.1}
    page.locator(".pictures").wait_for()
    tab_to(".heat", key="Shift+Tab", most=20)
    page.keyboard.press("ArrowRight")
    assert "Layer 1," in page.locator(".heatmap .readout").nth(1).inner_text()
    tab_to("[role=slider]")
    tab_to("[role=list]")
    page.keyboard.press("End")
    tab_to("[role=listbox]")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert "To write" in page.locator(".reading").inner_text()
    tab_to("#prompt")


def test_the_page_keeps_a_strict_policy(page, address):
    for path in page.evaluate("performance.getEntriesByType('resource').map((e) => new URL(e.name).pathname)") + ["/"]:
        if path.startswith("/v1/"):
            continue
        with urllib.request.urlopen(address + path) as answer:
            policy = answer.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy, path
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert page.locator("[style], script:not([src]), [onclick]").count() == 0
    assert page.viewport_size == DESKTOP and len(PROMPT) == 12
