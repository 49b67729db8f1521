"""The exported page in a real browser: Debian's Chromium and onnxruntime-web from npm, both skipped where missing."""

import os
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock

import gss
from gss.accounting import account
from gss.data.tokenizer import JsonTokenizer
from gss.data.tokenizer_training import train_tokenizer
from gss.export import export_page
from gss.export.model import RUNTIME, RUNTIME_FILES, browser_vocabulary
from tests.hf.conftest import TEXTS
from tests.making import save_run
from tests.serve.test_playground import CHROMIUM, FLAGS, SECONDS, api

FASTEST = 60  # tokens per second that the page must reach
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no browser here: `make browser` installs Chromium")


@pytest.fixture(scope="session")
def runtime() -> Path:
    """onnxruntime-web's files, of the version that pages name: fetched once, from npm."""
    version = RUNTIME.partition("onnxruntime-web@")[2].partition("/")[0]
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "gss-tests" / f"onnxruntime-web-{version}"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        if not all((folder / name).is_file() for name in RUNTIME_FILES):
            _fetch(version, folder)
    return folder


def _fetch(version: str, folder: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("no npm here, which fetches onnxruntime-web")
    package = f"onnxruntime-web@{version}"
    try:
        subprocess.run([npm, "pack", package], cwd=folder, check=True, capture_output=True, timeout=120)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        pytest.skip(f"npm cannot fetch {package}")
    archive = folder / f"onnxruntime-web-{version}.tgz"
    with tarfile.open(archive) as packed:
        for name in RUNTIME_FILES:
            member = packed.extractfile(f"package/dist/{name}")
            assert member is not None
            (folder / name).write_bytes(member.read())
    archive.unlink()


class Quiet(SimpleHTTPRequestHandler):
    """A plain file server, such as `python -m http.server`."""

    def log_message(self, *_: Any) -> None:
        pass


class Site:
    """A folder behind a file server, open in the browser; keeps what was asked for and complained about."""

    def __init__(self, browser: Any, folder: Path) -> None:
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.address = f"http://127.0.0.1:{self.server.server_port}/"
        self.context = browser.new_context(viewport={"width": 1280, "height": 800})
        self.context.set_default_timeout(SECONDS)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.context.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(self.address)

    def write(self, prompt: str, **knobs: object) -> str:
        """Run a prompt to its end; gives what the model wrote after it."""
        for name, value in knobs.items():
            self.page.locator(f"#{name}").fill(str(value))
        self.page.fill("#prompt", prompt)
        self.page.click("#run")
        api.expect(self.page.locator("#stop")).to_be_disabled()
        assert not self.page.locator("#error").is_visible(), self.page.inner_text("#error")
        text = str(self.page.locator("#text").evaluate("element => element.textContent"))
        assert text.startswith(prompt)
        return text.removeprefix(prompt)

    def close(self) -> None:
        self.context.close()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def box(browser: Any, runtime: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(browser, export_page("box", tmp_path_factory.mktemp("page") / "box", runtime=runtime))
    yield site
    assert site.complaints == []
    assert all(url.startswith((site.address, "blob:")) for url in site.asked)
    site.close()


@needs_chromium
def test_the_page_writes_what_the_library_writes(box: Site) -> None:
    prompt = "It was a dark and stormy night; “naïve”\n\n"
    long = "The captain looked at the sea. " * 40
    lm = gss.load(weights="fp32")  # for quantized weights, the library in C also rounds what they are multiplied by
    for given in (prompt, long, ""):
        expected = lm.generate(given, temperature=0, max_tokens=40)
        assert box.write(given, temperature=0, max_tokens=40) == expected
    assert box.page.inner_text("#written") == "40"
    api.expect(box.page.locator("#model")).to_contain_text(
        f"the bundled model · {account(lm.model.config).parameters:,} parameters"
    )
    assert "Ended: maximum number of tokens reached" in box.page.inner_text("#status")


@needs_chromium
def test_a_seed_gives_a_text_again(box: Site) -> None:
    first, again, other = (
        box.write("The old", temperature=0.8, top_p=0.9, max_tokens=24, seed=seed) for seed in (1, 1, 2)
    )
    assert first == again != other


@needs_chromium
def test_it_stops_when_asked(box: Site) -> None:
    box.page.fill("#max_tokens", "100000")
    box.page.fill("#prompt", "On and on")
    box.page.click("#run")
    api.expect(box.page.locator("#written")).not_to_have_text("–")
    box.page.press("body", "Escape")
    api.expect(box.page.locator("#status")).to_have_text("Stopped")
    stopped = box.page.inner_text("#text")
    box.page.wait_for_timeout(200)
    assert box.page.inner_text("#text") == stopped
    assert box.write("A new one", max_tokens=5)
    assert box.page.inner_text("#written") == "5"


@needs_chromium
def test_it_is_quick(box: Site) -> None:
    """The best of a few runs: other tests run beside this one, and a browser compiles what it has run for a while."""
    speeds = []
    for _ in range(8):
        box.write("Once upon a time", temperature=0.6, max_tokens=150, seed=1)
        speeds.append(int(box.page.inner_text("#speed").replace(",", "")))
        if speeds[-1] >= FASTEST:
            return
    pytest.fail(f"tokens per second in run after run: {speeds}")


@needs_chromium
def test_the_browsers_tokenizer_is_the_librarys(box: Site) -> None:
    tokenizer = gss.load().tokenizer
    letters = "aeiou thn,.\n\t  “”é▁世🙂0123456789ABC\u00a0\u0301-"
    draw = np.random.default_rng(0)
    random = ["".join(draw.choice(list(letters), size)) for size in range(1, 120)]
    # Where "b", "bb" and "bb", "b" are equally likely, roundings of the whole sum decide, and may do so otherwise.
    tied = ["".join(draw.choice(list("\n\n\n\tab "), 60)) for _ in range(200)]
    texts = [*TEXTS, *random, *tied, (Path(__file__).parents[2] / "README.md").read_text()]
    found = box.page.evaluate(
        """async (texts) => {
            const { openVocabulary } = await import("./tokenizer.js");
            const vocabulary = openVocabulary(await (await fetch("vocabulary.json")).json());
            const bytes = (ids) => Uint8Array.from(ids.flatMap((id) => [...vocabulary.bytesOf(id)]));
            const text = (ids) => new TextDecoder("utf-8", { ignoreBOM: true }).decode(bytes(ids));
            return texts.map((each) => vocabulary.encode(each)).map((ids) => [ids, text(ids)]);
        }""",
        texts,
    )
    for text, (ids, back) in zip(texts, found, strict=True):
        expected = tokenizer.encode(text).tolist()
        assert (ids if text not in tied else sorted(ids)) == (expected if text not in tied else sorted(expected))
        assert back == text


@needs_chromium
def test_top_p_keeps_the_fewest_tokens_that_make_it_up(box: Site) -> None:
    logits = np.random.default_rng(0).normal(size=300) * 2
    found = box.page.evaluate(
        """async ([logits, temperature, topP]) => {
            const { choose } = await import("./sampler.js");
            const given = Float32Array.from(logits);
            const draw = (_, step) => choose(given, temperature, topP, () => (step + 0.5) / 4000);
            return Array.from({ length: 4000 }, draw);
        }""",
        [logits.tolist(), 0.7, 0.8],
    )
    weights = np.exp(logits / 0.7)
    shares = weights / weights.sum()
    order = np.argsort(-shares)
    kept = order[: int(np.searchsorted(np.cumsum(shares[order]), 0.8)) + 1]
    assert set(found) <= set(kept.tolist())
    drawn = np.bincount(found, minlength=300)[kept] / 4000
    assert np.abs(drawn - shares[kept] / shares[kept].sum()).max() < 1e-3


@needs_chromium
def test_a_model_on_bytes_runs_too(browser: Any, runtime: Path, tmp_path: Path) -> None:
    run = save_run(gss.build_model(gss.preset("gss2-tiny"), seed=3), tmp_path / "run")
    site = Site(browser, export_page(run, tmp_path / "page", runtime=runtime))
    try:
        expected = gss.load(run).generate("a café", temperature=0, max_tokens=20)
        assert site.write("a café", temperature=0, max_tokens=20) == expected
    finally:
        site.close()


@needs_chromium
def test_what_is_missing_is_named(browser: Any, runtime: Path, tmp_path: Path) -> None:
    folder = export_page("box", tmp_path / "page", runtime=runtime)
    (folder / "model.onnx").unlink()
    site = Site(browser, folder)
    try:
        site.page.click("#run")
        api.expect(site.page.locator("#error")).to_contain_text("model.onnx is missing beside this page (404)")
    finally:
        site.close()


@needs_chromium
def test_a_runtime_that_cannot_be_had_is_named(browser: Any, tmp_path: Path) -> None:
    folder = export_page("box", tmp_path / "page")
    about = (folder / "model.json").read_text()
    (folder / "model.json").write_text(about.replace(RUNTIME, "gone/"))
    site = Site(browser, folder)
    try:
        site.page.click("#run")
        api.expect(site.page.locator("#error")).to_contain_text("could not be loaded from")
        api.expect(site.page.locator("#error")).to_contain_text("with gss export --runtime a copy is beside the page")
    finally:
        site.close()


def test_without_a_copy_the_page_names_the_network(tmp_path: Path) -> None:
    folder = export_page("box", tmp_path / "page")
    assert f'"runtime": "{RUNTIME}"' in (folder / "model.json").read_text()
    assert not (folder / "onnxruntime").exists()


def test_other_vocabularies_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the cat sat on the mat, and the dog sat on the log. " * 40)
    pieces = train_tokenizer([str(tmp_path / "text.txt")], tmp_path / "bpe", vocab_size=300, model="bpe")
    with pytest.raises(ValueError, match="not SentencePiece's other kinds of models: use --to onnx"):
        browser_vocabulary(pieces)
    json_kind = JsonTokenizer.__new__(JsonTokenizer)
    with pytest.raises(ValueError, match=r"not tokenizer\.json"):
        browser_vocabulary(json_kind)
