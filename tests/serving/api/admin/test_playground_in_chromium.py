"""The page at /, in a real Chromium, on a mock model that answers at 200 tokens a second."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright
from support.server import Server, start_server
from support.tokenizers import write_byte_level

CHATTY_MOCK = "support.mock_runner:load_chatty"
CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)
TIMEOUT = 30_000  # milliseconds; a loaded machine draws slowly

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here; Debian has it: apt-get install chromium"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=TIMEOUT)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Its answers end with max_tokens, and not before."""
    path = tmp_path_factory.mktemp("chatty")
    model = write_byte_level(path / "mock")
    with start_server(model, path, loader=CHATTY_MOCK, max_model_len=16384) as server:
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
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 860}} | options)
    context.set_default_timeout(TIMEOUT)
    page = context.new_page()
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: hosts.add(urlsplit(request.url).netloc))
    page.goto(server.url)
    expect(page.locator("#status")).to_have_text("ready")
    yield page
    context.close()
    assert hosts == {urlsplit(server.url).netloc}
    assert [text for text in complaints if "status of 4" not in text] == []
    assert len(complaints) == refused


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
    for _ in range(5):  # the conversation, and three examples
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
