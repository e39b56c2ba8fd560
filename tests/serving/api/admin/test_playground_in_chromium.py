"""The page at /, in a real Chromium, on a mock model that answers at 200 tokens a second."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Error, Locator, Page, Response, Route, expect
from support.browser import chromium, needs_chromium
from support.echo_runner import LOADER, write_echo
from support.server import Server, start_server
from support.tokenizers import write_byte_level

CHATTY_MOCK = "support.mock_runner:load_chatty"
TIMEOUT = 30_000  # milliseconds; a loaded machine draws slowly

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=TIMEOUT)
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Its answers end with max_tokens, and not before."""
    path = tmp_path_factory.mktemp("chatty")
    model = write_byte_level(path / "mock")
    with start_server(model, path, loader=CHATTY_MOCK, max_model_len=16384) as server:
        yield server


@pytest.fixture(scope="module")
def echoing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Its answer is the question."""
    path = tmp_path_factory.mktemp("echoing")
    with start_server(write_echo(path / "echo"), path, loader=LOADER) as server:
        yield server


@contextmanager
def visit(browser: Browser, server: Server, refused: int = 0, **options: Any) -> Iterator[Page]:
    """The page, ready; in the end, that it said nothing on the console and asked nobody else.

    Args:
        browser: Chromium.
        server: whose page it is.
        refused: how many requests the server refuses, which browsers write on the console.
        options: of the browser's context.
    """
    complaints: list[str] = []
    hosts: set[str] = set()
    refusals: list[str] = []

    def came(response: Response) -> None:
        if response.status >= 400:
            refusals.append(f"{response.status} {response.request.method} {response.url}")

    context = browser.new_context(**{"viewport": {"width": 1280, "height": 860}} | options)
    context.set_default_timeout(TIMEOUT)
    page = context.new_page()
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: hosts.add(urlsplit(request.url).netloc))
    page.on("response", came)
    page.goto(server.url)
    expect(page.locator("#status")).to_have_text("ready")
    try:
        yield page
    except BaseException as error:
        error.add_note(f"refused: {refusals}; console: {complaints}")
        raise
    context.close()
    assert hosts == {urlsplit(server.url).netloc}
    assert [text for text in complaints if "status of 4" not in text] == []
    assert len(refusals) == refused, refusals


@pytest.fixture
def page(browser: Browser, chatty: Server) -> Iterator[Page]:
    with visit(browser, chatty) as page:
        yield page


def ask(page: Page, text: str) -> dict[str, Any]:
    """Write a message and send it; returns the request's body."""
    page.get_by_label("Message").fill(text)
    with page.expect_request("**/v1/chat/completions") as sent:
        page.keyboard.press("Enter")
    body = json.loads(sent.value.post_data or "")
    assert isinstance(body, dict)
    return body


def answered(page: Page) -> None:
    """Wait for the end of the answer."""
    expect(page.get_by_role("button", name="Send")).to_be_visible(timeout=TIMEOUT)


def test_an_answer_is_what_the_api_says(page: Page, chatty: Server) -> None:
    page.get_by_label("Max tokens").fill("30")
    page.get_by_label("Seed").fill("7")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Top p").fill("0.9")
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Show Markdown").uncheck()
    body = ask(page, "Hello!\nWho are you?")
    answered(page)
    assert body["max_tokens"] == 30
    assert (body["temperature"], body["top_p"], body["seed"]) == (0.5, 0.9, 7)
    assert [turn["role"] for turn in body["messages"]] == ["system", "user"]
    for name in ("stream", "stream_options"):
        del body[name]
    said = chatty.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    expect(page.locator(".answer .text")).to_have_text(said["content"])
    expect(page.locator(".answer .note")).to_contain_text("30 tokens")
    again = ask(page, "And now?")
    assert again["messages"][1:] == [
        {"role": "user", "content": "Hello!\nWho are you?"},
        {"role": "assistant", "content": said["content"]},
        {"role": "user", "content": "And now?"},
    ]
    answered(page)
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("article")).to_have_count(0)
    assert len(ask(page, "Hello!")["messages"]) == 2


def test_an_answer_streams_in_and_can_be_stopped(page: Page, chatty: Server) -> None:
    page.get_by_label("Show Markdown").uncheck()
    ask(page, "Hello!")
    answer = page.locator(".answer")
    expect(answer.locator(".text")).to_have_text(re.compile("."))
    short = answer.locator(".text").inner_text()
    expect(answer.locator(".text")).not_to_have_text(short)
    expect(answer).to_have_attribute("aria-busy", "true")
    page.get_by_role("button", name="Stop").click()
    expect(answer).to_have_attribute("aria-busy", "false")
    expect(answer.locator(".note")).to_contain_text("stopped")
    expect(page.get_by_label("Message")).to_be_focused()
    chatty.wait_until("requests_running", 0)
    page.get_by_label("Max tokens").fill("3")
    text = answer.locator(".text").inner_text()
    assert ask(page, "Go on")["messages"][1] == {"role": "assistant", "content": text}
    answered(page)


# Reads the same events cut into pieces of every size; returns what was read that was not them.
EVERY_CHUNKING = """async () => {
  const { stream } = await import("/static/api.js");
  const first = 'data: {"a":"é€😀"}\\r\\n\\r\\n: comment\\n\\n';
  const text = first + 'data: {"b":\\ndata:1}\\n\\ndata: [DONE]\\n\\n';
  const real = window.fetch;
  const bytes = new TextEncoder().encode(text);
  const wrong = [];
  for (let size = 1; size <= bytes.length; size += 1) {
    window.fetch = async () => new Response(new ReadableStream({
      start(controller) {
        for (let i = 0; i < bytes.length; i += size) controller.enqueue(bytes.slice(i, i + size));
        controller.close();
      },
    }));
    const read = [];
    for await (const event of stream("v1/chat/completions", {})) read.push(event);
    if (JSON.stringify(read) !== '[{"a":"é€😀"},{"b":1}]') wrong.push([size, read]);
  }
  window.fetch = real;
  return { sizes: bytes.length, wrong };
}"""


def test_a_stream_may_come_in_any_pieces(page: Page) -> None:
    found = page.evaluate(EVERY_CHUNKING)
    assert found["sizes"] > 60
    assert found["wrong"] == []


def test_what_the_server_refuses_is_shown(browser: Browser, chatty: Server) -> None:
    with visit(browser, chatty, refused=1) as page:
        page.get_by_label("Temperature").fill("3")
        body = ask(page, "Hello!")
        error = chatty.http.post("/v1/chat/completions", json=body).json()["error"]
        alert = page.get_by_role("alert")
        expect(alert).to_contain_text("Error 400")
        expect(alert).to_contain_text(error["message"])
        expect(alert).to_contain_text("temperature")
        expect(page.get_by_label("Message")).to_have_value("Hello!")
        page.get_by_label("Temperature").fill("")
        page.get_by_label("Max tokens").fill("3")
        assert len(ask(page, "Hello!")["messages"]) == 1  # the refused one is not in it
        answered(page)


def test_probabilities_on_focus_and_under_the_pointer(page: Page) -> None:
    page.get_by_label("Show them on the answer").check()
    page.get_by_label("Alternatives").fill("3")
    page.get_by_label("Max tokens").fill("6")
    assert ask(page, "Hello!")["top_logprobs"] == 3
    answered(page)
    tokens = page.locator(".answer").get_by_role("option")
    expect(tokens).to_have_count(6)
    tip = page.get_by_role("tooltip")
    expect(tip).to_be_hidden()
    page.get_by_label("Message").focus()
    page.keyboard.press("Shift+Tab")  # curl
    page.keyboard.press("Shift+Tab")  # Copy
    page.keyboard.press("Shift+Tab")
    expect(tokens.nth(0)).to_be_focused()
    expect(tokens.nth(0)).to_have_attribute("aria-describedby", "tip")
    expect(tip).to_be_visible()
    page.keyboard.press("ArrowRight")
    expect(tokens.nth(1)).to_be_focused()
    expect(tokens.nth(1)).to_have_accessible_name(re.compile(r".+, \d+\.\d %"))
    name = tokens.nth(1).get_attribute("aria-label") or ""
    expect(tip.locator(".chosen")).to_contain_text(name.rpartition(", ")[2])
    assert tip.locator("code").count() in (3, 4)  # the chosen one may be among them
    page.keyboard.press("End")
    expect(tokens.nth(5)).to_be_focused()
    page.keyboard.press("Escape")
    expect(tip).to_be_hidden()
    tokens.nth(2).hover()
    expect(tip).to_be_visible()


def test_a_schema_is_checked_and_kept_to(browser: Browser, server: Server) -> None:
    with visit(browser, server) as page:
        page.get_by_label("Format").select_option("JSON schema")
        schema = page.get_by_label("Schema", exact=True)
        schema.fill('{"type": "object"')
        page.get_by_label("Message").fill("Yes?")
        page.keyboard.press("Enter")
        expect(schema).to_be_focused()
        expect(schema).to_have_attribute("aria-invalid", "true")
        expect(schema).to_have_accessible_description(re.compile("^Not JSON"))
        page.get_by_role("button", name="Example schema").click()
        expect(schema).not_to_have_attribute("aria-invalid", "true")
        schema.fill('{"enum": ["yes", "no"]}')
        body = ask(page, "Yes?")
        assert body["response_format"]["json_schema"]["schema"] == {"enum": ["yes", "no"]}
        expect(page.locator(".answer .text")).to_have_text(re.compile('^"(yes|no)"$'))
        expect(page.locator(".answer .note")).to_contain_text("valid JSON")


def test_a_key_is_asked_for(browser: Browser, tmp_path: Path) -> None:
    model = write_byte_level(tmp_path / "mock")
    with (
        start_server(model, tmp_path, loader=CHATTY_MOCK, api_key="open-sesame") as server,
        browser.new_context() as context,
    ):
        page = context.new_page()
        page.goto(server.url)
        expect(page.locator("#status")).to_have_text("wants a key")
        expect(page.get_by_label("API key")).to_be_focused()
        page.keyboard.type("open-sesame")
        page.keyboard.press("Enter")
        expect(page.locator("#status")).to_have_text("ready")
        page.get_by_label("Max tokens").fill("3")
        ask(page, "Hello!")
        answered(page)
        expect(page.locator(".answer .note")).to_contain_text("3 tokens")
        page.locator("#show-request").click()
        expect(page.get_by_role("dialog")).to_contain_text("Bearer $WEFT_API_KEY")
        expect(page.get_by_role("dialog")).not_to_contain_text("open-sesame")


def call_events() -> str:
    """A streamed tool call in OpenAI's shape, as servers send it, in pieces."""
    pieces: list[dict[str, Any]] = [
        {"role": "assistant", "content": None},
        {"tool_calls": [{"index": 0, "id": "call_1", "type": "function",
                         "function": {"name": "get_weather", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"Ghent"}'}}]},
    ]  # fmt: skip
    choices = [{"index": 0, "delta": piece, "finish_reason": None} for piece in pieces]
    choices.append({"index": 0, "delta": {}, "finish_reason": "tool_calls"})
    lines = [f"data: {json.dumps({'choices': [choice]})}\r\n\r\n" for choice in choices]
    return "".join(lines) + "data: [DONE]\r\n\r\n"


def test_a_tool_is_called_and_its_result_goes_back(page: Page) -> None:
    def call(route: Route) -> None:
        route.fulfill(content_type="text/event-stream", body=call_events())

    page.get_by_label("Definitions").fill('[{"type": "function"}]')
    page.get_by_label("Message").fill("Weather?")
    page.keyboard.press("Enter")
    expect(page.get_by_label("Definitions")).to_be_focused()
    expect(page.locator("#tools-error")).to_contain_text("function.name")
    page.get_by_role("button", name="Example tool").click()
    page.route("**/v1/chat/completions", call)
    body = ask(page, "Weather?")
    assert body["tools"][0]["function"]["name"] == "get_weather"
    expect(page.locator(".call")).to_contain_text("get_weather")
    expect(page.locator(".call code")).to_have_text('{ "city": "Ghent" }')
    page.get_by_label("What get_weather returns").fill("Rain")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="Send results").click()
    turns = json.loads(sent.value.post_data or "")["messages"]
    assert turns[-2]["tool_calls"][0]["function"]["arguments"] == '{"city": "Ghent"}'
    assert turns[-1] == {"role": "tool", "tool_call_id": "call_1", "content": "Rain"}


def test_the_request_as_curl(page: Page) -> None:
    page.get_by_label("Message").fill("It's me")
    page.get_by_role("button", name="curl").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("curl 'http://127.0.0.1:")
    expect(dialog).to_contain_text(r"It'\''s me")
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()


def test_by_keyboard_alone(page: Page) -> None:
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the message")).to_be_focused()
    names = []
    for _ in range(4):
        page.keyboard.press("Tab")
        names.append(
            page.evaluate("document.activeElement.ariaLabel ?? document.activeElement.innerText")
        )
    assert names == ["New chat", "Settings", "Engine", "Dark theme"]
    for _ in range(2):  # the conversation; this model has no examples
        page.keyboard.press("Tab")
    expect(page.get_by_label("Message")).to_be_focused()
    page.keyboard.type("Hello!")
    page.keyboard.press("Enter")
    expect(page.locator(".answer .text")).to_have_text(re.compile("."))
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Stop")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator(".answer .note")).to_contain_text("stopped")
    expect(page.get_by_label("Message")).to_be_focused()
    toggle = page.get_by_role("button", name="Settings")
    toggle.focus()
    page.keyboard.press("Enter")
    expect(toggle).to_have_attribute("aria-expanded", "false")
    expect(page.get_by_label("Temperature")).to_be_hidden()
    page.keyboard.press("Enter")
    expect(page.get_by_label("Temperature")).to_be_visible()


def test_dark_and_light(browser: Browser, chatty: Server) -> None:
    background = "getComputedStyle(document.documentElement).backgroundColor"
    with visit(browser, chatty, color_scheme="light") as page:
        light = page.evaluate(background)
    with visit(browser, chatty, color_scheme="dark") as page:
        dark = page.evaluate(background)
        assert dark != light
        toggle = page.get_by_role("button", name="Dark theme")
        expect(toggle).to_have_attribute("aria-pressed", "true")
        toggle.click()
        assert page.evaluate(background) == light
        page.reload()
        expect(toggle).to_have_attribute("aria-pressed", "false")
        assert page.evaluate(background) == light


def test_the_live_view_follows_a_request(page: Page, chatty: Server) -> None:
    chatty.wait_until("requests_running", 0)
    live = page.locator("#timeline g.live")
    expect(live).to_have_count(0)
    page.get_by_role("button", name="Table").click()
    ask(page, "Hello!")
    expect(live).to_have_count(1)
    expect(live.locator("rect.decode")).to_have_count(1)
    number = live.get_attribute("data-request") or ""
    expect(page.locator("#running")).to_have_text("1")
    expect(page.locator("#blocks")).not_to_have_text("0")
    expect(page.locator("#rate")).not_to_have_text("0")
    expect(page.get_by_role("img", name="Requests of the last minute")).to_be_visible()
    row = page.get_by_role("row", name=re.compile(f"^{number} decode"))
    expect(row).to_be_visible()
    page.get_by_role("button", name="Stop").click()
    expect(live).to_have_count(0)
    expect(page.locator(f"#timeline g[data-request='{number}'] rect.decode")).to_have_count(1)
    expect(page.locator("#running")).to_have_text("0")
    expect(page.get_by_role("row", name=re.compile(f"^{number} ended"))).to_be_visible()
    chatty.wait_until("requests_running", 0)


def test_nobody_is_asked_while_nobody_looks(page: Page) -> None:
    """A closed panel asks for the status alone, ten times as seldom."""
    toggle = page.get_by_role("button", name="Engine")
    with page.expect_request("**/engine?*"):
        pass
    toggle.click()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.evaluate("new Promise((resolve) => setTimeout(resolve, 2000))")
    assert len(asked) <= 2
    with page.expect_request("**/engine?*"):
        toggle.click()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_fault(browser: Browser, chatty: Server, scheme: str) -> None:
    with visit(browser, chatty, refused=1, color_scheme=scheme, reduced_motion="reduce") as page:
        check_axe(page)
        page.get_by_label("Show them on the answer").check()
        page.get_by_label("Max tokens").fill("8")
        ask(page, "Hello!")
        answered(page)
        page.get_by_label("Temperature").fill("9")
        ask(page, "Hello!")
        expect(page.get_by_role("alert")).to_be_visible()
        page.get_by_role("option").nth(3).focus()
        page.get_by_label("Format").select_option("JSON schema")
        page.get_by_label("Schema", exact=True).fill("[")
        page.get_by_role("button", name="Table").click()
        expect(page.locator("tbody tr").first).to_be_visible()
        check_axe(page)
        page.locator("#show-request").click()
        check_axe(page)


def check_axe(page: Page) -> None:
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()


def test_on_a_phone(browser: Browser, chatty: Server) -> None:
    with visit(browser, chatty, viewport={"width": 360, "height": 740}) as page:
        page.get_by_role("button", name="Settings").click()
        expect(page.get_by_label("Message")).to_be_hidden()
        page.get_by_label("Max tokens").fill("40")
        page.get_by_role("button", name="Settings").click()
        page.get_by_role("button", name="Engine").click()
        ask(page, "Hello!" * 30)
        answered(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        check_axe(page)


def test_the_routes_have_a_page(browser: Browser, chatty: Server) -> None:
    document = chatty.http.get("/openapi.json").json()
    complaints: list[str] = []
    hosts: set[str] = set()
    with browser.new_context() as context:
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("request", lambda request: hosts.add(urlsplit(request.url).netloc))
        page.goto(f"{chatty.url}/docs")
        expect(page.locator("#version")).to_have_text(document["info"]["version"])
        routes = [
            f"{method.upper()} {path}"
            for path, methods in document["paths"].items()
            for method in methods
        ]
        expect(page.locator("summary code")).to_have_text(routes)
        page.get_by_text("POST /v1/chat/completions", exact=True).click()
        row = page.get_by_role("row", name="temperature")
        expect(row.locator("visible=true")).not_to_have_count(0)
        expect(
            page.get_by_role("row", name=re.compile("^messages list .*required"))
        ).to_be_visible()
        check_axe(page)
    assert hosts == {urlsplit(chatty.url).netloc}
    assert complaints == []


def test_the_page_of_routes_asks_for_a_key(browser: Browser, tmp_path: Path) -> None:
    model = write_byte_level(tmp_path / "mock")
    with (
        start_server(model, tmp_path, loader=CHATTY_MOCK, api_key="open-sesame") as server,
        browser.new_context() as context,
    ):
        page = context.new_page()
        page.goto(f"{server.url}/docs")
        expect(page.get_by_role("alert")).to_contain_text("API key")


def said(page: Page, text: str) -> Locator:
    """Have the model say a text; returns the page's rendering."""
    ask(page, text)
    answered(page)
    return page.locator(".answer .text").last


MARKDOWN = """# Title

A **bold** and *slanted* word, ~~gone~~, `code <b>`, &lt;tag&gt; and \\*stars\\*.
A second line.

1. one
2. two
   - inner
   - [x] done

> quoted

```python
def f(a):
    return a < 1
```

| a | b |
| --- | ---: |
| 1<br>2 | `3` |

---

[weft](https://example.com/a?b=1&c=2), <https://example.org>, [ref][r] ![pic](https://example.com/p.png)

[r]: https://example.net
"""


def test_markdown_is_shown(browser: Browser, echoing: Server) -> None:
    with visit(browser, echoing) as page:
        text = said(page, MARKDOWN)
        expect(text.get_by_role("heading", name="Title")).to_be_visible()
        for tag, shown in (
            *(("strong", "bold"), ("em", "slanted"), ("del", "gone"), ("p > code", "code <b>")),
            *(("blockquote", "quoted"), ("ol > li > ul > li >> nth=0", "inner")),
            *(("th >> nth=1", "b"), ("td >> nth=1", "3")),
        ):
            expect(text.locator(tag)).to_have_text(shown)
        expect(text.locator("p").first).to_contain_text("<tag> and *stars*.")
        expect(text.locator("p").first.locator("br")).to_have_count(1)
        expect(text.locator("td br")).to_have_count(1)
        expect(text.locator("hr")).to_have_count(1)
        block = text.locator(".block")
        assert block.locator("code").text_content() == "def f(a):\n    return a < 1"
        expect(block.locator(".bar span")).to_have_text("python")
        links = text.get_by_role("link")
        addresses = [each.get_attribute("href") for each in links.all()]
        assert addresses == [
            "https://example.com/a?b=1&c=2",
            "https://example.org/",
            "https://example.net/",
            "https://example.com/p.png",
        ]
        for link in links.all():
            assert link.get_attribute("rel") == "noopener noreferrer"
            assert link.get_attribute("target") == "_blank"
        check_axe(page)


def test_code_can_be_copied(browser: Browser, echoing: Server) -> None:
    permissions = ["clipboard-read", "clipboard-write"]
    with visit(browser, echoing, permissions=permissions) as page:
        text = said(page, "Look:\n\n```\na < b\n\n  c\n```")
        text.get_by_role("button", name="Copy").click()
        expect(text.get_by_role("button", name="Copied")).to_be_visible()
        assert page.evaluate("navigator.clipboard.readText()") == "a < b\n\n  c"


HOSTILE = [
    "<img src=x onerror=hacked=1>",
    "a <img src=x onerror='hacked=1'> b",
    "<script>hacked=1</script>",
    "<svg/onload=hacked=1>",
    "<iframe srcdoc='<script>parent.hacked=1</script>'></iframe>",
    "<a href='javascript:hacked=1'>x</a>",
    "<style>body{display:none}</style>",
    "<form action=//evil.example><button>x</button></form>",
    "[x](javascript:hacked=1)",
    "[x](JaVaScRiPt:hacked=1)",
    "[x](&#106;avascript:hacked=1)",
    "[x](java\tscript:hacked=1)",
    "[x](<javascript:hacked=1>)",
    "[x]( data:text/html,<script>hacked=1</script>)",
    "[x](vbscript:hacked=1)",
    "[x](file:///etc/passwd)",
    "[x](//evil.example)",
    "[x](/v1/models)",
    "<javascript:hacked=1>",
    "![x](javascript:hacked=1)",
    "![x](x' onerror='hacked=1)",
    "[a][b]\n\n[b]: javascript:hacked=1",
    "`<img src=x onerror=hacked=1>`",
    "```<img src=x onerror=hacked=1>\n</code><img src=x onerror=hacked=1>\n```",
    "| <img src=x onerror=hacked=1> |\n| --- |\n| <script>hacked=1</script> |",
    "# <img src=x onerror=hacked=1>",
    "&lt;img src=x onerror=hacked=1&gt;",
    "[<img src=x onerror=hacked=1>](https://example.com/?<img src=x onerror=hacked=1>)",
    "[x](https://example.com 'a\" onmouseover=hacked=1 b')",
    "<!--><img src=x onerror=hacked=1>-->",
    "<x onclick=hacked=1 style=position:fixed;inset:0>x</x>",
]
ALLOWED = {
    *("p", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "pre", "hr", "div"),
    *("strong", "em", "del", "code", "br", "a", "span", "button"),
    *("table", "thead", "tbody", "tr", "th", "td"),
}
FOUND = """(element) => [...element.querySelectorAll("*")].map((each) => [
  each.localName, each.getAttributeNames(), each.getAttribute("href"),
])"""


def test_nothing_that_a_model_says_runs_or_leads_astray(browser: Browser, echoing: Server) -> None:
    with visit(browser, echoing) as page:
        for attack in HOSTILE:
            text = said(page, attack)
            for name, attributes, address in text.evaluate(FOUND):
                assert name in ALLOWED, attack
                assert not [each for each in attributes if each.startswith("on")], attack
                assert address is None or address.startswith("https://example.com/"), attack
        assert page.evaluate("typeof hacked") == "undefined"
        expect(page.locator(".answer")).to_have_count(len(HOSTILE))
        # The reader sees the model's own text.
        expect(page.locator(".answer .text").first).to_have_text(HOSTILE[0])


def test_a_page_cannot_make_nodes_of_html(browser: Browser, echoing: Server) -> None:
    """The last line of defence: the browser refuses it, independent of the page's scripts."""
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(echoing.url)
        with pytest.raises(Error, match="TrustedHTML"):
            page.evaluate("() => { document.body.innerHTML = '<b>x</b>'; }")


# Feeds a text in pieces of every kind to the page's renderer; returns pieces with another result.
EVERY_CUT = """async (text) => {
  const { Markdown } = await import("/static/markdown.js");
  const whole = new Markdown();
  whole.add(text);
  whole.finish();
  const wrong = [];
  for (let size = 1; size <= 24; size += 1) {
    const cut = new Markdown();
    for (let i = 0; i < text.length; i += size) cut.add(text.slice(i, i + size));
    cut.finish();
    const shown = cut.element.innerHTML;
    if (shown !== whole.element.innerHTML) wrong.push([size, shown]);
  }
  return wrong;
}"""


@pytest.mark.parametrize(
    "text",
    [
        MARKDOWN,
        "para\n#x\n\n- a\n\n  b\n- c\n\n\nend",
        "a|b\n-|-\n1|2\n\n    code\n\n    more\n\ntext\n===\n",
        "```\nopen\n\n# no heading\n",
        "\r\none\r\ntwo\r\n\r\n* a\r\n* b\r\n",
        "> a\n> b\nlazy\n\n> c\n\n<div>\n**x**\n</div>\n\nend",
    ],
)
def test_a_streamed_text_ends_as_the_whole_one(page: Page, text: str) -> None:
    assert page.evaluate(EVERY_CUT, text) == []


STABLE = """async () => {
  const { Markdown } = await import("/static/markdown.js");
  const shown = new Markdown();
  shown.add("# Title\\n\\nA paragraph.\\n\\n```js\\nlet a;\\n");
  const before = [...shown.element.children];
  const code = shown.element.querySelector("code");
  for (let i = 0; i < 50; i += 1) shown.add(`let a${i};\\n`);
  shown.add("```\\n\\nend");
  shown.finish();
  return before.every((each, i) => each === shown.element.children[i]) &&
    code === shown.element.querySelector("code") && code.textContent.endsWith("let a49;");
}"""


def test_what_is_shown_stays_while_more_comes(page: Page) -> None:
    assert page.evaluate(STABLE.replace("\\\\", "\\"))


@pytest.mark.parametrize(
    "text",
    [
        *(">" * 20_000, "- " * 5_000, "[" * 20_000, "*a_ " * 5_000, "`" * 20_000),
        *("<a" * 10_000, "| a " * 5_000, "x" * 400_000),
    ],
    ids=lambda text: text[:4],
)
def test_texts_made_to_be_slow_are_shown_soon(page: Page, text: str) -> None:
    show = """async (text) => {
      const { Markdown } = await import("/static/markdown.js");
      const shown = new Markdown();
      shown.add(text);
      document.body.append(shown.element);
      return shown.element.childElementCount;
    }"""
    assert page.evaluate(show, text) > 0
    page.evaluate("new Promise(requestAnimationFrame)")


def test_a_conversation_outlives_a_reload(browser: Browser, echoing: Server) -> None:
    with visit(browser, echoing) as page:
        said(page, "**one**")
        said(page, "two")
        page.reload()
        expect(page.locator("#status")).to_have_text("ready")
        expect(page.locator(".question p")).to_have_text(["**one**", "two"])
        expect(page.locator(".answer .text strong")).to_have_text("one")
        expect(page.locator(".answer .note").first).to_contain_text("first token")
        expect(page.locator("#welcome")).to_be_hidden()
        turns = ask(page, "three")["messages"]
        assert [turn["content"] for turn in turns] == ["**one**", "**one**", "two", "two", "three"]
        answered(page)
        page.get_by_role("button", name="New chat").click()
        page.reload()
        expect(page.locator("#status")).to_have_text("ready")
        expect(page.locator("#welcome")).to_be_visible()
        expect(page.locator("article")).to_have_count(0)


def test_a_reload_in_the_middle_of_an_answer_keeps_its_part(page: Page, chatty: Server) -> None:
    page.get_by_label("Show Markdown").uncheck()
    ask(page, "Hello!")
    expect(page.locator(".answer .text")).to_have_text(re.compile("."))
    page.reload()
    expect(page.locator("#status")).to_have_text("ready")
    expect(page.locator(".question p")).to_have_text("Hello!")
    expect(page.locator(".answer .text")).to_have_text(re.compile("."))
    chatty.wait_until("requests_running", 0)


def test_calls_of_tools_outlive_a_reload(page: Page) -> None:
    def call(route: Route) -> None:
        route.fulfill(content_type="text/event-stream", body=call_events())

    page.route("**/v1/chat/completions", call)
    ask(page, "Weather?")
    page.get_by_label("What get_weather returns").fill("Rain")
    with page.expect_request("**/v1/chat/completions"):
        page.get_by_role("button", name="Send results").click()
    expect(page.locator(".call")).to_have_count(2)
    page.reload()
    expect(page.locator("#status")).to_have_text("ready")
    expect(page.locator(".call")).to_have_count(2)
    results = page.get_by_label("What get_weather returns")
    expect(results.nth(0)).to_have_value("Rain")
    expect(results.nth(0)).to_be_disabled()
    expect(results.nth(1)).to_be_enabled()


def test_models_are_told_apart(browser: Browser, echoing: Server) -> None:
    def models(route: Route) -> None:
        route.fulfill(json={"object": "list", "data": [{"id": "weft-demo", "object": "model"}]})

    with visit(browser, echoing) as page:
        expect(page.locator("#model")).to_have_text("echo")
        expect(page.locator("#examples")).to_be_hidden()
        said(page, "one")
        page.route("**/v1/models", models)
        page.reload()
        expect(page.locator("#model")).to_have_text("weft-demo")
        expect(page).to_have_title("weft-demo · weft")
        page.route(
            "**/v1/chat/completions",
            lambda route: route.fulfill(content_type="text/event-stream", body=call_events()),
        )
        ask(page, "two")
        expect(page.locator(".divider")).to_have_text("weft-demo")
        page.get_by_role("button", name="New chat").click()
        expect(page.locator("#examples")).to_be_visible()


PHONE = {"viewport": {"width": 360, "height": 740}}


def test_a_phone_has_one_row_of_each(browser: Browser, echoing: Server) -> None:
    with visit(browser, echoing, **PHONE) as page:
        said(page, "hello there " * 20)
        heights = """() => [".top", ".answer .facts"].map(
            (each) => document.querySelector(each).getBoundingClientRect().height)"""
        top, facts = page.evaluate(heights)
        assert top < 60
        assert facts < 24
        for name in ("New chat", "Settings", "Engine"):
            expect(page.get_by_role("button", name=name)).to_be_in_viewport(ratio=1)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        check_axe(page)


@pytest.mark.parametrize("size", [{"width": 1280, "height": 860}, PHONE["viewport"]], ids=str)
def test_the_newest_answer_stays_in_view(
    browser: Browser, echoing: Server, size: dict[str, int]
) -> None:
    with visit(browser, echoing, viewport=size) as page:
        for number in range(6):
            said(page, f"answer {number}\n\n" + "line\n\n" * 6 + "the end")
        for name in ("Engine", "Table") if size["width"] < 900 else ("Table", "Engine", "Engine"):
            page.get_by_role("button", name=name, exact=True).click()
            expect(page.locator(".answer .note").last).to_be_in_viewport()


def test_a_panel_that_opens_as_the_reader_scrolls_hides_no_answer(
    browser: Browser, echoing: Server
) -> None:
    """The event of a scroll may come after the panel has taken its room."""
    with visit(browser, echoing) as page:
        said(page, "line\n\n" * 40 + "the end")
        panel = page.get_by_role("button", name="Engine", exact=True)
        panel.click()
        expect(panel).to_have_attribute("aria-expanded", "false")
        page.evaluate("""() => {
          document.getElementById("conversation").scrollTop -= 1;
          document.querySelector("[data-panel=engine]").click();
        }""")
        expect(panel).to_have_attribute("aria-expanded", "true")
        expect(page.locator(".answer .note").last).to_be_in_viewport()


def test_the_page_is_ready_once_the_model_is_known(browser: Browser, echoing: Server) -> None:
    """Whoever asks earlier is answered, too."""
    held: list[Route] = []
    asked: list[str] = []
    with browser.new_context() as context:
        page = context.new_page()
        page.on("request", lambda request: asked.append(urlsplit(request.url).path))
        page.route("**/v1/models", lambda route: held.append(route))
        page.goto(echoing.url)
        assert "model" not in ask(page, "one")
        answered(page)
        expect(page.locator(".answer .text")).to_have_text("one")
        assert page.locator("#status").inner_text() == ""
        assert "/engine" not in asked
        (models,) = held
        models.continue_()
        expect(page.locator("#status")).to_have_text("ready")
        assert ask(page, "two")["model"] == "echo"
        answered(page)
        expect(page.locator(".divider")).to_have_count(0)


def test_a_server_that_does_not_answer_is_asked_again(browser: Browser, echoing: Server) -> None:
    with browser.new_context() as context:
        page = context.new_page()
        page.clock.install()
        page.route("**/v1/models", lambda route: route.abort(), times=1)
        page.goto(echoing.url)
        expect(page.locator("#status")).to_have_text("no answer")
        page.clock.run_for(5000)
        expect(page.locator("#model")).to_have_text("echo")
        expect(page.locator("#status")).to_have_text("ready")


@pytest.mark.parametrize("motion", ["no-preference", "reduce"])
def test_the_wait_for_the_first_token_moves_unless_motion_is_unwanted(
    browser: Browser, chatty: Server, motion: Any
) -> None:
    with visit(browser, chatty, reduced_motion=motion) as page:
        page.route("**/v1/chat/completions", lambda route: None)  # never answered
        page.get_by_label("Message").fill("Hello!")
        page.keyboard.press("Enter")
        expect(page.locator(".wait")).to_be_visible()
        animation = page.locator(".wait").evaluate(
            "(each) => getComputedStyle(each, '::after').animationName"
        )
        assert (animation != "none") == (motion == "no-preference")
