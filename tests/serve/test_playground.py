"""The playground in a real browser, in front of a real server: Debian's Chromium, driven by Playwright."""

import re
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.making import make_corpus, make_run
from tests.serve.serving import serving

api = pytest.importorskip("playwright.sync_api", reason="no Playwright here: pip install playwright")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no browser here: `make browser` installs Chromium")

FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage")  # fmt: skip
STRICT = "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
PAGE = Path(__file__).parents[2] / "src" / "gss" / "serve" / "page"
SECONDS = 60_000  # Playwright counts in milliseconds; a busy machine is slow
KEY = "a key of the tests"
api.expect.set_options(timeout=SECONDS)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of three small layers that has seen a little text."""
    root = tmp_path_factory.mktemp("playground")
    texts = ("the cat sat on the mat and the dog sat on the log. " * (12 + number) for number in range(4))
    sizes = {"model__width": 32, "model__depth": 3, "model__gate_width": 64, "model__feedforward_width": 64}
    sizes |= {"model__state_space__modes": 8, "steps": 60, "batch_tokens": 512}
    rates = {"optimizer__learning_rate": 2e-2, "optimizer__warmup_steps": 5}
    return make_run("gss-hybrid-tiny", make_corpus(root, texts, valid=0.25), root / "cat", **sizes, **rates)


@pytest.fixture(scope="module")
def server(run: Path) -> Iterator[str]:
    with serving(run, "--drain", "0") as server:
        yield server.url


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


class Visit:
    """A page, with everything that it asked for and complained about."""

    def __init__(self, browser: Any, address: str, policy: str | None = None, **context: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **context})
        self.context.set_default_timeout(SECONDS)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", lambda said: said.type == "error" and self.complaints.append(said.text))
        self.page.on("request", lambda request: self.asked.append(request.url))
        if policy:
            self.page.route(f"{address}/", lambda route: self._harden(route, policy))
        self.page.goto(f"{address}/")

    @staticmethod
    def _harden(route: Any, policy: str) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, headers={**answer.headers, "content-security-policy": policy})

    def knob(self, name: str, value: str) -> None:
        self.page.locator(f"#{name}").fill(value)

    def endless(self) -> None:
        """Have the model go on past the end of a document, so that as many tokens come as are asked for."""
        self.page.click(".more > summary")
        self.page.check("#ignore_eos")

    def write(self, prompt: str) -> dict[str, Any]:
        """Type a prompt, run it to its end, and give what was sent."""
        with self.page.expect_request("**/v1/completions") as sent:
            self.page.fill("#prompt", prompt)
            self.page.press("#prompt", "Control+Enter")
        self.ended()
        return dict(sent.value.post_data_json)

    def ended(self) -> None:
        api.expect(self.page.locator("#status")).to_contain_text("Ended")

    @property
    def text(self) -> str:
        return str(self.page.locator("#text").evaluate("element => element.textContent"))


@pytest.fixture
def visit(browser: Any, server: str) -> Iterator[Visit]:
    visit = Visit(browser, server, STRICT)
    yield visit
    visit.context.close()
    assert visit.complaints == []
    assert all(url.startswith(f"{server}/") for url in visit.asked)


def test_tokens_stream_in_and_show_their_alternatives(visit: Visit) -> None:
    page = visit.page
    api.expect(page.locator("#model")).to_contain_text("cat · ")
    api.expect(page.locator("#memory svg .hill")).to_have_count(2)
    assert page.get_attribute("#scale", "title") == "from 0 bits to 6 or more"
    visit.knob("max_tokens", "400")
    visit.endless()
    page.evaluate("""counts = new Set(); new MutationObserver(
        () => counts.add(document.querySelectorAll(".token:not(.given)").length)
    ).observe(document.body, {childList: true, subtree: true})""")
    page.fill("#prompt", "the cat ")
    page.click("#run")
    api.expect(page.locator("#status")).to_contain_text("Ended")
    written = page.locator(".token:not(.given)")
    assert page.evaluate("counts.size") > 2, "the text came at once, not bit by bit"
    assert visit.text.startswith("the cat ")
    assert page.locator(".token.given").count() == 8
    for name in ("speed", "first", "written", "read", "bits"):
        api.expect(page.locator(f"#{name}")).to_have_text(re.compile(r"^[\d.]+"))
    # 400, the prompt's 8 and the start of the document.
    api.expect(page.locator("#state")).to_contain_text("a Transformer's cache at 409 tokens")
    api.expect(page.locator(".here-name")).to_contain_text("409 tokens")

    token = written.nth(3)
    token.hover()
    card = page.locator("#card")
    api.expect(card).to_be_visible()
    assert card.locator(".choice").count() >= 8
    shares = [float(share) for share in re.findall(r"([\d.]+)%", card.locator("ol").inner_text())]
    assert shares[:8] == sorted(shares[:8], reverse=True)
    assert sum(shares[:8]) <= 101
    assert card.locator(".chosen").count() == 1
    assert re.search(r"\d bits", card.inner_text())
    page.mouse.move(5, 5)
    api.expect(card).to_be_hidden()


def test_knobs_are_sent(visit: Visit) -> None:
    page = visit.page
    visit.knob("max_tokens", "12")
    sent = visit.write("the dog ")
    assert sent == {
        "prompt": "the dog ", "max_tokens": 12, "temperature": 0.8, "logprobs": 8, "echo": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    visit.knob("temperature", "0")
    api.expect(page.locator("output[for=temperature]")).to_have_text("0, the likeliest")
    visit.knob("top_p", "0.5")
    visit.knob("seed", "11")
    page.click(".more > summary")
    visit.knob("top_k", "5")
    visit.knob("logprobs", "3")
    visit.knob("stop_text", r"\n")
    visit.knob("repetition_penalty", "1.2")
    page.uncheck("#echo")
    page.check("#ignore_eos")
    sent = visit.write("the dog ")
    changed = {"temperature": 0, "top_p": 0.5, "seed": 11, "top_k": 5, "logprobs": 3, "stop": ["\n"],
               "repetition_penalty": 1.2, "echo": False, "ignore_eos": True}  # fmt: skip
    assert {name: sent[name] for name in changed} == changed
    assert not visit.text.startswith("the dog ")
    visit.knob("max_tokens", "99999")
    page.click("#run")
    assert page.evaluate("document.getElementById('max_tokens').validity.rangeOverflow")


def test_the_same_seed_gives_the_same_text(visit: Visit) -> None:
    visit.knob("max_tokens", "40")
    visit.knob("seed", "5")
    visit.write("a ")
    first = visit.text
    visit.write("a ")
    assert visit.text == first
    assert len(first) >= 3


def test_stopping(visit: Visit) -> None:
    page = visit.page
    visit.knob("max_tokens", "4096")
    visit.endless()
    for stop in (lambda: page.keyboard.press("Escape"), lambda: page.click("#stop")):
        page.fill("#prompt", "on and on")
        page.click("#run")
        api.expect(page.locator(".token:not(.given)").nth(5)).to_be_attached()
        stop()
        api.expect(page.locator("#status")).to_have_text("Stopped")
        api.expect(page.locator("#stop")).to_be_disabled()
        count = page.locator(".token").count()
        assert 6 < count < 4096
        page.wait_for_timeout(200)
        assert page.locator(".token").count() == count


def test_going_on_from_an_alternative_by_keyboard(visit: Visit) -> None:
    page = visit.page
    visit.knob("max_tokens", "30")
    visit.knob("temperature", "0")  # no stray byte, which the text shows as a dot
    visit.endless()
    visit.write("the ")
    before = visit.text
    page.locator(".token:not(.given)").nth(1).focus()
    page.keyboard.press("ArrowRight")
    focused = page.locator(".token:focus")
    index = int(focused.get_attribute("data-index") or 0)
    assert index == 6
    assert "bits of surprise" in (focused.get_attribute("aria-label") or "")
    page.keyboard.press("Enter")
    choice = page.locator("#card button.choice:focus")
    api.expect(choice).to_be_visible()
    name = choice.locator("span").first.inner_text().replace("␣", " ")
    with page.expect_request("**/v1/completions") as sent:
        page.keyboard.press("Enter")
    assert sent.value.post_data_json["prompt"] == before[:6] + name
    visit.ended()
    assert visit.text.startswith(before[:6] + name)
    before = visit.text
    page.click("#further")
    visit.ended()
    api.expect(page.locator("#prompt")).to_have_value(before)
    page.locator(".token").first.focus()
    api.expect(page.locator("#card")).to_be_visible()
    page.keyboard.press("Escape")
    api.expect(page.locator("#card")).to_be_hidden()


def test_texts_are_only_ever_text(visit: Visit) -> None:
    wild = "<img src=x onerror=alert(1)><b>é😀</b>\n"
    visit.knob("max_tokens", "60")
    visit.knob("temperature", "2")
    visit.write(wild)
    assert visit.text.replace("·", "").startswith(wild)
    assert visit.page.locator("#text :not(span)").count() == 0
    assert visit.page.locator("#text b, #text img, #card img").count() == 0


def test_a_phone_in_the_dark(browser: Any, server: str) -> None:
    visit = Visit(browser, server, viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True,
                  color_scheme="dark")  # fmt: skip
    page = visit.page
    api.expect(page.locator("#memory svg")).to_be_visible()
    page.tap("#knobs > summary")
    visit.knob("max_tokens", "80")
    visit.endless()
    visit.write("x" * 300 + " the cat ")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    token = page.locator(".token:not(.given)").nth(4)
    token.tap()
    api.expect(page.locator("#card")).to_be_visible()
    card, below = page.locator("#card").bounding_box(), token.bounding_box()
    assert card["x"] >= 0
    assert card["x"] + card["width"] <= 360
    assert below["y"] + below["height"] <= card["y"]
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    ink = page.evaluate("getComputedStyle(document.body).color")
    dark, light = (sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (ground, ink))
    assert dark < 150 < 600 < light
    assert visit.complaints == []
    visit.context.close()


def test_a_key_is_asked_for(browser: Any, run: Path) -> None:
    with serving(run, "--drain", "0", "--api-key", KEY) as server:
        visit = Visit(browser, server.url)
        page = visit.page
        api.expect(page.locator("#error")).to_contain_text("needs an API key")
        api.expect(page.locator("#key")).to_be_focused()
        page.fill("#key", "wrong")
        page.click("#key-use")
        api.expect(page.locator("#error")).to_contain_text("does not accept this API key")
        page.fill("#key", KEY)
        page.press("#key", "Enter")
        api.expect(page.locator("#key-row")).to_be_hidden()
        api.expect(page.locator("#error")).to_be_hidden()
        visit.knob("max_tokens", "5")
        visit.write("the ")
        assert page.locator(".token").count() >= 4
        assert KEY not in "".join(visit.asked)
        visit.context.close()


def test_examples_files_copies_and_what_is_not_shown(visit: Visit, tmp_path: Path) -> None:
    page = visit.page
    page.locator("#examples button").first.click()
    assert page.input_value("#prompt") == "It was a dark and stormy night"
    (tmp_path / "long.txt").write_text("the cat sat on the mat. " * 300)
    page.set_input_files("#file", tmp_path / "long.txt")
    api.expect(page.locator("#status")).to_have_text("long.txt: 7,200 characters")
    page.fill("#max_tokens", "5")
    visit.endless()
    page.click("#run")
    api.expect(page.locator("#read")).to_have_text("7,201")
    api.expect(page.locator("#unshown")).to_have_text(re.compile("The prompt of 7,200 characters is not shown here"))
    api.expect(page.locator("#first")).to_have_text(re.compile(r"^[\d.]+ m?s$"))
    page.click("#copy")
    api.expect(page.locator("#status")).to_have_text(re.compile("Copied|Selected"))
    api.expect(page.locator("#memory")).to_contain_text("this text: 7,206 tokens")
    waiting: list[Any] = []
    page.route("**/v1/completions", lambda route: waiting.append(route))
    page.click("#run")
    for figure in ("speed", "first", "written", "read", "bits"):  # not those of the text before
        api.expect(page.locator(f"#{figure}")).to_have_text("–")
    _answer(500, "{}", waiting[0])
    api.expect(page.locator("#error")).to_be_visible()
    api.expect(page.locator("#memory")).not_to_contain_text("this text")
    api.expect(page.locator("#unshown")).to_be_hidden()  # there is no continuation
    page.unroute("**/v1/completions")
    usage = '{"prompt_tokens": 7201, "completion_tokens": 0, "total_tokens": 7201}'
    ended = 'data: {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}\n\n'
    ended += f'data: {{"choices": [], "usage": {usage}}}\n\ndata: [DONE]\n\n'
    page.route("**/v1/completions", partial(_answer, 200, ended))
    page.click("#run")
    api.expect(page.locator("#memory")).to_contain_text("this text: 7,201 tokens")  # though nothing was written
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n\xff")
    page.set_input_files("#file", tmp_path / "picture.png")
    api.expect(page.locator("#status")).to_have_text("picture.png is not UTF-8 text")
    assert len(page.input_value("#prompt")) == 7200
    assert all("500" in said for said in visit.complaints)
    visit.complaints.clear()


def _answer(status: int, body: str, route: Any) -> None:
    route.fulfill(status=status, body=body, headers={"Retry-After": "3"})


def test_errors_are_said_kindly(browser: Any, server: str) -> None:
    visit = Visit(browser, server)
    page = visit.page
    answers = (
        (429, '{"error": {"message": "full"}}', "The server is busy. Try again in 3 s."),
        (400, '{"error": {"message": "prompt: too long"}}', "Prompt: too long."),
        (500, "<html>", "The server answered with 500."),
        (200, 'data: {"error": {"message": "it took too long"}}\n\n', "It took too long."),
        (200, 'data: {"choices": []}\n\n', "The connection ended before the text did."),
    )
    for status, body, words in answers:
        answer = partial(_answer, status, body)
        page.route("**/v1/completions", answer)
        page.click("#run")
        api.expect(page.locator("#error")).to_have_text(words)
        page.unroute("**/v1/completions")
    page.route("**/v1/completions", lambda route: route.abort())
    page.click("#run")
    api.expect(page.locator("#error")).to_contain_text("Cannot reach the server.")
    api.expect(page.locator("#run")).to_be_enabled()
    visit.context.close()


def test_facts_that_come_late_leave_an_error_alone(browser: Any, server: str) -> None:
    visit = Visit(browser, server)
    page = visit.page
    held: list[Any] = []
    page.route("**/v1/model", lambda route: held.append(route))
    page.route("**/v1/completions", partial(_answer, 500, "<html>"))
    page.reload(wait_until="domcontentloaded")
    page.click("#run")
    api.expect(page.locator("#error")).to_have_text("The server answered with 500.")
    held[0].continue_()
    api.expect(page.locator("#model")).to_contain_text("cat · ")
    api.expect(page.locator("#error")).to_have_text("The server answered with 500.")
    visit.context.close()


def test_nothing_inline_and_nothing_from_elsewhere() -> None:
    page = (PAGE / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<script(?![^>]*\ssrc=)|\sstyle=|\son\w+=|<style", page)
    for path in PAGE.iterdir():
        source = path.read_text(encoding="utf-8")
        assert set(re.findall(r"https?://[^\"' )]+", source)) <= {"http://www.w3.org/2000/svg"}
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|localStorage", source)
    assert re.findall(r'(?:src|href)="([^"]+)"', page) == ["icon.svg", "style.css", "app.js", "icon.svg"]
