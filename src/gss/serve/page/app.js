// The playground: reads the knobs, runs completions, shows what comes.

import { drawMemory, drawState, short, size, time, whole } from "./memory.js";
import { aboutModel, complete, explain, ServerError, useKey } from "./stream.js";
import { bits, TokenText } from "./text.js";

const LONG = 6000; // characters of a prompt that are still shown token by token
const EXAMPLES = ["It was a dark and stormy night", '"My dear sir," said the captain,', "CHAPTER I.\n\n", "def read(path):\n"];

const at = (id) => document.getElementById(id);
const number = (id) => (at(id).value === "" ? null : Number(at(id).value));

let facts = null;
let running = null;
let last = { prompt: "", echo: true };
let figures = null;

const text = new TokenText(at("text"), at("card"), (token, name) => {
  const before = text.characters.slice(0, token.offset).join("");
  at("prompt").value = (last.echo ? "" : last.prompt) + before + name;
  run();
});

// Only what differs from the server's defaults is sent, and what the page itself needs.
export function request() {
  const prompt = at("prompt").value;
  const body = {
    prompt,
    max_tokens: number("max_tokens"),
    temperature: number("temperature"),
    logprobs: number("logprobs"),
    echo: at("echo").checked && prompt.length <= LONG,
    stream: true,
    stream_options: { include_usage: true },
  };
  if (number("top_p") < 1) body.top_p = number("top_p");
  if (number("min_p") > 0) body.min_p = number("min_p");
  if (number("repetition_penalty") > 1) body.repetition_penalty = number("repetition_penalty");
  if (number("top_k") !== null) body.top_k = number("top_k");
  if (number("seed") !== null) body.seed = number("seed");
  if (at("stop_text").value) body.stop = [at("stop_text").value.replaceAll("\\n", "\n")];
  if (at("ignore_eos").checked) body.ignore_eos = true;
  return body;
}

async function run() {
  if (running) stop();
  if (!at("form").reportValidity()) return;
  const body = request();
  const mine = new AbortController();
  running = mine;
  last = { prompt: body.prompt, echo: body.echo };
  text.clear(body.echo ? [...body.prompt].length : 0);
  figures = { began: performance.now(), first: 0, latest: 0, early: 0, written: 0, read: 0, nats: 0, scored: 0 };
  fail(null);
  busy(true);
  show();
  say("Reading the prompt…");
  at("unshown").hidden = body.echo || !body.prompt;
  at("unshown").textContent = `The prompt of ${whole([...body.prompt].length)} characters is not shown here, only its continuation.`;
  if (facts) {
    drawState(at("state"), facts, 0);
    drawMemory(at("memory"), facts, 0);
  }
  let ended = "";
  try {
    for await (const chunk of complete(body, mine.signal)) {
      if (running !== mine) return;
      if (chunk.usage) figures.read = chunk.usage.prompt_tokens;
      for (const choice of chunk.choices) {
        take(choice);
        ended = choice.finish_reason ?? ended;
      }
    }
    const length = body.max_tokens === figures.written;
    say(ended === "length" || length ? "Ended: maximum number of tokens reached" : "Ended: end of the document, or the stop text");
  } catch (error) {
    if (running !== mine) return;
    if (error.name === "AbortError") {
      say("Stopped");
    } else {
      say("");
      at("unshown").hidden ||= !text.characters.length;
      fail(error);
    }
  }
  running = null;
  busy(false);
  show();
}

function take(choice) {
  const follow = at("text").scrollHeight - at("text").scrollTop - at("text").clientHeight < 40;
  text.push(choice.text, choice.logprobs);
  const offsets = choice.logprobs?.text_offset ?? [];
  offsets.forEach((offset, index) => {
    if (offset < text.given) return;
    figures.written += 1;
    figures.nats -= choice.logprobs.token_logprobs[index] ?? 0;
  });
  if (figures.written) {
    const now = performance.now();
    if (!figures.first) {
      figures.first = now;
      figures.early = figures.written;
      say("Writing…");
    }
    figures.latest = now;
  }
  if (follow) at("text").scrollTop = at("text").scrollHeight;
  show();
}

let waiting = false;

// A few times a second, however fast tokens come.
function show() {
  if (waiting) return;
  waiting = true;
  setTimeout(() => {
    waiting = false;
    const { began, first, latest, early, written, read, nats } = figures;
    const seconds = (latest - first) / 1000;
    at("speed").textContent = seconds > 0 ? short((written - early) / seconds) : "–";
    at("first").textContent = first ? time(first - began) : "–";
    at("written").textContent = written ? whole(written) : "–";
    at("read").textContent = read ? whole(read) : "–";
    at("bits").textContent = written ? bits(-nats / written).toFixed(2) : "–";
    const all = read ? read + written : text.tokens.length || written;
    if (facts && all) {
      drawState(at("state"), facts, all);
      drawMemory(at("memory"), facts, all);
    }
  }, 100);
}

function stop() {
  running?.abort();
}

function busy(yes) {
  at("stop").disabled = !yes;
  at("text").classList.toggle("writing-now", yes);
  at("text").setAttribute("aria-busy", yes);
  at("empty").hidden = true;
  at("further").hidden = yes || !text.characters.length;
  at("copy").hidden = !text.characters.length;
}

function say(words) {
  at("status").textContent = words;
}

function fail(error) {
  at("error").hidden = !error;
  at("error").textContent = error ? explain(error) : "";
  if (error instanceof ServerError && error.status === 401) {
    at("key-row").hidden = false;
    at("key").focus();
  }
}

async function meet() {
  try {
    facts = await aboutModel();
  } catch (error) {
    fail(error);
    return;
  }
  at("key-row").hidden = true;
  const kinds = [...new Set(facts.layers)].map((kind) => `${facts.layers.filter((one) => one === kind).length} ${kind}`);
  const name = document.createElement("b");
  name.textContent = facts.id;
  at("model").replaceChildren(
    name,
    ` · ${short(facts.parameters)} parameters · ${kinds.join(" + ")} layers · step ${facts.step.toLocaleString("en")} · ${facts.device}`,
  );
  at("model").title = `${facts.precision}, state of ${size(facts.state.bytes_per_sequence)}, vocabulary of ${facts.vocab_size}`;
  for (const [id, most] of [["max_tokens", facts.limits.max_tokens], ["logprobs", facts.limits.logprobs], ["top_k", facts.vocab_size]]) {
    at(id).max = most;
    if (Number(at(id).value) > most) at(id).value = most;
  }
  // A token of a large vocabulary says more: what is usual there would all be red for bytes.
  text.full = Math.round(Math.min(12, Math.max(4, 0.8 * Math.log2(facts.vocab_size))));
  at("scale").title = `from 0 bits to ${text.full} or more`;
  at("scale").setAttribute("aria-label", `Colors: the stronger a token's color, the more it surprised the model, ${at("scale").title}`);
  drawState(at("state"), facts, 0);
  drawMemory(at("memory"), facts, 0);
}

const WORDS = {
  temperature: (value) => (value === 0 ? "0, the likeliest" : value.toFixed(2)),
  top_p: (value) => (value === 1 ? "all" : value.toFixed(2)),
  min_p: (value) => (value === 0 ? "off" : value.toFixed(2)),
  repetition_penalty: (value) => (value === 1 ? "off" : value.toFixed(2)),
};

for (const [id, words] of Object.entries(WORDS)) {
  const tell = () => {
    document.querySelector(`output[for="${id}"]`).textContent = words(number(id));
  };
  at(id).addEventListener("input", tell);
  tell();
}

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
at("stop").addEventListener("click", stop);
at("further").addEventListener("click", () => {
  at("prompt").value = (last.echo ? "" : last.prompt) + text.whole;
  run();
});

for (const example of EXAMPLES) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = example.trim();
  button.addEventListener("click", () => {
    at("prompt").value = example;
    at("prompt").focus();
  });
  at("examples").append(button);
}

at("open").addEventListener("click", () => at("file").click());
at("file").addEventListener("change", async () => {
  const [file] = at("file").files;
  if (!file) return;
  at("file").value = "";
  try {
    at("prompt").value = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    say(`${file.name} is not UTF-8 text`);
    return;
  }
  say(`${file.name}: ${whole([...at("prompt").value].length)} characters`);
});

at("copy").addEventListener("click", async () => {
  const all = (last.echo ? "" : last.prompt) + text.whole;
  try {
    await navigator.clipboard.writeText(all);
    say("Copied");
  } catch {
    getSelection().selectAllChildren(at("text")); // not every address may write to the clipboard
    say("Selected: copy it with your keyboard");
  }
});

async function withKey() {
  useKey(at("key").value);
  fail(null);
  await meet();
}

at("key-use").addEventListener("click", withKey);
at("key").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.ctrlKey && !event.metaKey) {
    event.preventDefault();
    withKey();
  }
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    run();
  } else if (event.key === "Escape") {
    if (running) stop();
    text.hide();
  }
});

if (/Mac|iP/.test(navigator.platform)) at("run").querySelector("kbd").textContent = "⌘ Enter";
if (matchMedia("(max-width: 900px)").matches) at("knobs").open = false;
meet();
