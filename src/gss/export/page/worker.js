// The model, away from the page's own thread: reads a prompt in chunks, then writes one token after another.

import { choose, seeded } from "./sampler.js";
import { openVocabulary } from "./tokenizer.js";

const json = async (name) => (await found(name)).json();
let model = null;
let latest = 0; // the request that counts; an earlier one ends when it sees another

self.onmessage = async ({ data }) => {
  latest = data.id;
  if (data.prompt === undefined) return;
  try {
    model ??= load();
    await write(await model, data);
  } catch (error) {
    model = null;
    self.postMessage({ id: data.id, error: error.message });
  }
};

async function found(name) {
  const answer = await fetch(name);
  if (!answer.ok) throw new Error(`${name} is missing beside this page (${answer.status}): copy the whole folder`);
  return answer;
}

async function load() {
  const about = await json("model.json");
  const base = new URL(about.runtime, self.location).href;
  const ort = await import(`${base}ort.wasm.bundle.min.mjs`);
  ort.env.wasm.wasmPaths = { wasm: `${base}ort-wasm-simd-threaded.wasm` };
  ort.env.wasm.numThreads = 1; // more need headers that a plain file server does not send
  const bytes = await (await found("model.onnx")).arrayBuffer();
  const session = await ort.InferenceSession.create(new Uint8Array(bytes));
  return { about, ort, session, vocabulary: openVocabulary(await json("vocabulary.json")) };
}

function initialState({ about, ort }) {
  const state = { position: new ort.Tensor("int64", new BigInt64Array(1), [1]) };
  for (const [name, shape] of Object.entries(about.state)) {
    const size = shape.reduce((product, length) => product * length, 1);
    state[name] = new ort.Tensor("float32", new Float32Array(size), shape);
  }
  return state;
}

// The logits after the last of some tokens, and the state after them.
async function read({ about, ort, session }, ids, state) {
  const tokens = new ort.Tensor("int64", BigInt64Array.from(ids, BigInt), [ids.length]);
  const { logits, ...rest } = await session.run({ tokens, ...state });
  const next = Object.entries(rest).map(([name, tensor]) => [name.slice("next.".length), tensor]);
  return [logits.data.subarray((ids.length - 1) * about.vocab_size), Object.fromEntries(next)];
}

async function write(model, { id, prompt, temperature, top_p, max_tokens, seed }) {
  const { about, vocabulary } = model;
  const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  const random = seeded(seed);
  const ids = [about.eos_id, ...vocabulary.encode(prompt)]; // as in training, a document begins after the end of one
  let state = initialState(model);
  let logits;
  let began = performance.now();
  for (let start = 0; start < ids.length; start += about.longest) {
    [logits, state] = await read(model, ids.slice(start, start + about.longest), state);
    self.postMessage({ id, read: Math.min(ids.length, start + about.longest), of: ids.length });
    await turn();
    if (id !== latest) return;
  }
  const first = performance.now();
  const reading = first - began;
  began = first;
  for (let written = 1; written <= max_tokens; written++) {
    const token = choose(logits, temperature, top_p, random);
    const ended = token === about.eos_id;
    const last = ended || written === max_tokens;
    const text = decoder.decode(ended ? new Uint8Array() : vocabulary.bytesOf(token), { stream: !last });
    const seconds = (performance.now() - began) / 1000;
    self.postMessage({ id, text, token, written, seconds, reading, ended, last });
    if (last) return;
    [logits, state] = await read(model, [token], state);
    if (written % 8 === 0) await turn();
    if (id !== latest) return;
  }
}

// Lets messages in. A timer would wait; a channel does not.
function turn() {
  return new Promise((resolve) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = resolve;
    port2.postMessage(null);
  });
}
