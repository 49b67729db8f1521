// The model, away from the page's own thread: reads a prompt in chunks, then writes one token after another.

import { choose, seeded } from "./sampler.js";
import { openVocabulary } from "./tokenizer.js";

const FRAME = 16; // milliseconds between messages: a screen shows no more
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
  const ort = await import(`${base}ort.wasm.bundle.min.mjs`).catch(() => {
    throw new Error(`onnxruntime-web could not be loaded from ${base}; with gss export --runtime a copy is beside the page`);
  });
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

// The logits after the last of some tokens; the state moves on to the one after them.
async function read({ about, ort, session }, ids, state) {
  const tokens = new ort.Tensor("int64", BigInt64Array.from(ids, BigInt), [ids.length]);
  const place = Number(state.position.data[0]);
  const { logits, ...rest } = await session.run({ tokens, ...state });
  for (const [name, tensor] of Object.entries(rest)) {
    const own = name.slice("next.".length);
    if (about.rings.includes(own)) writeRows(state[own], tensor, place);
    else state[own] = tensor;
  }
  return logits.data.subarray((ids.length - 1) * about.vocab_size);
}

// Rows for the positions from `place` on go to their places in a ring.
function writeRows(ring, rows, place) {
  const width = rows.data.length / rows.dims[0];
  for (let row = 0; row < rows.dims[0]; row++) {
    ring.data.set(rows.data.subarray(row * width, (row + 1) * width), ((place + row) % ring.dims[0]) * width);
  }
}

async function write(model, { id, prompt, temperature, top_p, max_tokens, seed }) {
  const { about, vocabulary } = model;
  const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  const random = seeded(seed);
  const ids = [about.eos_id, ...vocabulary.encode(prompt)]; // as in training, a document begins after the end of one
  const state = initialState(model);
  let logits;
  let began = performance.now();
  for (let start = 0; start < ids.length; start += about.longest) {
    logits = await read(model, ids.slice(start, start + about.longest), state);
    self.postMessage({ id, read: Math.min(ids.length, start + about.longest), of: ids.length });
    await turn();
    if (id !== latest) return;
  }
  const first = performance.now();
  const reading = first - began;
  began = first;
  let text = "";
  let shown = 0;
  for (let written = 1; written <= max_tokens; written++) {
    const token = choose(logits, temperature, top_p, random);
    const ended = token === about.eos_id;
    const last = ended || written === max_tokens;
    text += decoder.decode(ended ? new Uint8Array() : vocabulary.bytesOf(token), { stream: !last });
    const now = performance.now();
    if (last || now - shown >= FRAME) {
      self.postMessage({ id, text, written, seconds: (now - began) / 1000, reading, ended, last });
      text = "";
      shown = now;
      await turn();
    }
    if (last || id !== latest) return;
    logits = await read(model, [token], state);
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
