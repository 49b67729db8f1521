// The page: reads the knobs, asks the worker for text and shows what comes.

const EXAMPLES = ["It was a dark and stormy night", '"My dear sir," said the captain,', "The old house stood"];
const at = (id) => document.getElementById(id);
const whole = (number) => number.toLocaleString("en");

const worker = new Worker("worker.js", { type: "module" });
let id = 0;
let running = false;

fetch("model.json")
  .then((answer) => answer.json())
  .then(({ name, parameters, state }) => {
    const numbers = Object.values(state).reduce((sum, shape) => sum + shape.reduce((product, size) => product * size, 1), 0);
    at("model").textContent = `${name} · ${whole(parameters)} parameters · runs in this browser, without a server`;
    at("state").textContent = `${((4 * numbers) / 1e6).toFixed(2)} MB`;
  })
  .catch(() => fail("Open this page through a file server, such as python -m http.server: a browser reads no files beside file:// pages."));

worker.onerror = (event) => fail(event.message || "The worker of this page could not start: it needs a file server and a current browser.");
worker.onmessage = ({ data }) => {
  if (data.id !== id) return;
  if (data.error !== undefined) return fail(data.error);
  if (data.of !== undefined) return say(data.read < data.of ? `Reading the prompt: ${whole(data.read)} of ${whole(data.of)} tokens` : "Writing…");
  at("text").append(data.text);
  at("written").textContent = whole(data.written);
  at("first").textContent = data.reading < 10_000 ? `${Math.round(data.reading)} ms` : `${(data.reading / 1000).toFixed(1)} s`;
  if (data.written > 1) at("speed").textContent = whole(Math.round((data.written - 1) / data.seconds));
  if (data.last) end(data.ended ? "Ended: end of the document" : "Ended: maximum number of tokens reached");
};

function run() {
  if (!at("form").reportValidity()) return;
  const prompt = at("prompt").value;
  const seed = at("seed").value === "" ? Math.floor(Math.random() * 2 ** 32) : Number(at("seed").value);
  id += 1;
  at("error").hidden = true;
  at("empty").hidden = true;
  at("text").replaceChildren();
  const given = document.createElement("b");
  given.textContent = prompt;
  at("text").append(given);
  for (const name of ["speed", "first", "written"]) at(name).textContent = "–";
  busy(true);
  say(id === 1 ? "Loading the model…" : "Reading the prompt…");
  const knobs = Object.fromEntries(["temperature", "top_p", "max_tokens"].map((name) => [name, Number(at(name).value)]));
  worker.postMessage({ id, prompt, seed, ...knobs });
}

function stop() {
  if (!running) return;
  id += 1;
  worker.postMessage({ id });
  end("Stopped");
}

function busy(on) {
  running = on;
  at("stop").disabled = !on;
  at("text").classList.toggle("writing-now", on);
  at("copy").hidden = on || !at("text").textContent;
}

function say(what) {
  at("status").textContent = what;
}

function end(what) {
  say(what);
  busy(false);
}

function fail(what) {
  end("");
  at("error").textContent = what;
  at("error").hidden = false;
}

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
at("stop").addEventListener("click", stop);
at("copy").addEventListener("click", async () => {
  try {
    await navigator.clipboard.writeText(at("text").textContent);
    say("Copied");
  } catch {
    getSelection().selectAllChildren(at("text")); // not every address may write to the clipboard
    say("Selected: copy it with your keyboard");
  }
});
addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) run();
});
for (const name of ["temperature", "top_p"]) {
  const show = () => (at(`${name}-shown`).textContent = Number(at(name).value).toFixed(2));
  at(name).addEventListener("input", show);
  show();
}
for (const example of EXAMPLES) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = example;
  button.addEventListener("click", () => {
    at("prompt").value = example;
    run();
  });
  at("examples").append(button);
}
