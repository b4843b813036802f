"""The page's Markdown and its comparison of words, run in the browser."""

import json

import pytest

MARKDOWN = [
    ("plain", "<p>plain</p>"),
    ("one\ntwo\n\nthree", "<p>one<br>two</p><p>three</p>"),
    ("# A **b** #\n###### f", "<h1>A <strong>b</strong></h1><h6>f</h6>"),
    ("#not a heading", "<p>#not a heading</p>"),
    ("a *b* _c_ __d__ ***e*** ~~f~~", "<p>a <em>b</em> <em>c</em> <strong>d</strong> <strong><em>e</em></strong> <del>f</del></p>"),
    ("*a **b***", "<p><em>a <strong>b</strong></em></p>"),
    ("**a *b***", "<p><strong>a <em>b</em></strong></p>"),
    ("snake_case_name 5 * 3 * 2 **open", "<p>snake_case_name 5 * 3 * 2 **open</p>"),
    (r"\*a\* \\ \q", r"<p>*a* \ \q</p>"),
    ("`a*b*` ``c`d`` `open", "<p><code>a*b*</code> <code>c`d</code> `open</p>"),
    ("---\n***", "<hr><hr>"),
    ("> a\n> b\n\nc", "<blockquote><p>a<br>b</p></blockquote><p>c</p>"),
    ("- a\n- b\n  - c\n  - d\n- e", "<ul><li>a</li><li>b<ul><li>c</li><li>d</li></ul></li><li>e</li></ul>"),
    ("1. a\n\n2. b\n\n3. c", "<ol><li>a</li><li>b</li><li>c</li></ol>"),
    ("4) a\n5) b", '<ol start="4"><li>a</li><li>b</li></ol>'),
    ("1. **A**:\n   - b\n2. c", "<ol><li><strong>A</strong>:<ul><li>b</li></ul></li><li>c</li></ol>"),
    ("- a\n\n  b", "<ul><li><p>a</p><p>b</p></li></ul>"),
    ("text\n- a", "<p>text</p><ul><li>a</li></ul>"),
    ("```rust\nfn f() {}\n  *x*\n```\nafter", '<pre><code data-language="rust">fn f() {}\n  *x*\n</code></pre><p>after</p>'),
    ("```\nopen", "<pre><code>open\n</code></pre>"),
    ("~~~\n```\n~~~", "<pre><code>```\n</code></pre>"),
    (
        "| a | b |\n|---|--:|\n| `c` | d\\|e |\n| f |",
        '<div><table><thead><tr><th>a</th><th class="right">b</th></tr></thead>'
        '<tbody><tr><td><code>c</code></td><td class="right">d|e</td></tr>'
        '<tr><td>f</td><td class="right"></td></tr></tbody></table></div>',
    ),
    ("a | b", "<p>a | b</p>"),
    ("[a *b*](https://x.org/y_(z) \"t\")", '<p><a href="https://x.org/y_(z)">a <em>b</em></a></p>'),
    ("<http://x.org> see https://x.org/a_b_c.", '<p><a href="http://x.org/">http://x.org</a> see <a href="https://x.org/a_b_c">https://x.org/a_b_c</a>.</p>'),
    ("[a](javascript:alert(1)) [b](data:text/html,x) [c](/d)", "<p>[a](javascript:alert(1)) [b](data:text/html,x) [c](/d)</p>"),
    ("<b>no</b> <img src=x onerror=alert(1)>", "<p>&lt;b&gt;no&lt;/b&gt; &lt;img src=x onerror=alert(1)&gt;</p>"),
    ("# <script>x</script>", "<h1>&lt;script&gt;x&lt;/script&gt;</h1>"),
    ("", ""),
]


@pytest.fixture(scope="module")
def run(browser, address):
    """Runs JavaScript with what a module of the page exports."""
    page = browser.new_page()
    page.goto(address)

    def run(module, expression, argument=None):
        return page.evaluate(f"async (x) => {{ const m = await import('/page/{module}'); return {expression}; }}", argument)

    yield run
    page.close()


RENDER = """(() => {
  const box = document.createElement("div");
  box.append(m.markdown(x));
  for (const node of box.querySelectorAll("*")) {
    for (const name of ["rel", "target", "tabindex", "role", "aria-label"]) node.removeAttribute(name);
    if (node.className === "wide") node.removeAttribute("class");
  }
  return box.innerHTML;
})()"""


@pytest.mark.parametrize("source, html", MARKDOWN, ids=lambda text: json.dumps(text)[:30])
def test_markdown(run, source, html):
    assert run("markdown.js", RENDER, source) == html


def test_markdown_takes_no_long_time(run):
    hostile = ["*" * 20_000, "[" * 20_000, "`" * 19_999 + " a", "_a " * 8_000, "> " * 5_000, "- " * 5_000, "**a " * 8_000, "a|" * 9_000]
    time = "(() => { const t = performance.now(); m.markdown(x); return performance.now() - t; })()"
    for source in hostile:
        assert run("markdown.js", time, source) < 5000, source[:10]


@pytest.mark.parametrize("whole", ["**a** `b` [c](http://d.e)\n\n- f\n  - g\n\n|h|i|\n|-|-|\n|j|k|\n\n```py\nl\n```"])
def test_every_beginning_renders(run, whole):
    """A stream shows every beginning of an answer."""
    for end in range(len(whole)):
        run("markdown.js", RENDER, whole[:end])


@pytest.mark.parametrize(
    "a, b, only_a, only_b",
    [
        ("", "", "", ""),
        ("a b c", "a b c", "", ""),
        ("a b c d", "a x c d", "b", "x"),
        ("a b", "a b c d", "", "c d"),
        ("x y", "p q", "x y", "p q"),
        ("the cat sat on the mat", "the dog sat on a mat", "cat the", "dog a"),
        ("a c a b", "b a c", "a b", "b"),
    ],
)
def test_differences(run, a, b, only_a, only_b):
    a, b = a.split(), b.split()
    marks = run("diff.js", "m.differences(...x)", [a, b])
    assert [[w for w, mark in zip(side, marked) if mark] for side, marked in zip((a, b), marks)] == [only_a.split(), only_b.split()]


def test_words(run):
    parts = run("diff.js", "m.words(x)", "It's 3.5 €, naïve\n x")
    assert [p["text"] for p in parts if p["word"]] == ["It's", "3", ".", "5", "€", ",", "naïve", "x"]
    assert "".join(p["text"] for p in parts) == "It's 3.5 €, naïve\n x"


def test_long_texts_are_compared_in_time(run):
    a = [f"w{i * 7 % 900}" for i in range(3000)]
    b = [f"w{i * 11 % 900}" for i in range(3000)]
    time = "(() => { const t = performance.now(); m.differences(...x); return performance.now() - t; })()"
    assert run("diff.js", time, [a, b]) < 5000
    assert run("diff.js", "m.differences(...x).flat().filter(Boolean).length", [["s", *a, *a], ["t", *b, *b]]) == 12_002
