// Draws what a text takes in memory, beside what a Transformer would need, and how long each layer remembers.

const SVG = "http://www.w3.org/2000/svg";
const FAR = 65536;

export function size(bytes) {
  for (const unit of ["bytes", "kB", "MB", "GB"]) {
    if (bytes < 1000 || unit === "GB") return `${Number(bytes.toPrecision(3)).toLocaleString("en")} ${unit}`;
    bytes /= 1000;
  }
}

export function short(count) {
  for (const [unit, letter] of [[1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
    if (count >= unit) return `${Number((count / unit).toPrecision(3))}${letter}`;
  }
  return `${Number(count.toPrecision(3))}`;
}

export function time(milliseconds) {
  return milliseconds < 1000 ? `${short(milliseconds)} ms` : `${short(milliseconds / 1000)} s`;
}

export const whole = (count) => count.toLocaleString("en");

export function drawState(place, facts, length) {
  const shown = length || 1024;
  const state = (tokens) => facts.state.bytes_per_sequence + facts.state.bytes_per_token * tokens;
  const cache = (tokens) => facts.transformer.kv_cache_bytes_per_token * tokens;
  const most = Math.max(state(shown), cache(shown));
  const bars = document.createElement("div");
  bars.className = "bars";
  bars.append(
    bar("this model's state", state(shown), most, ""),
    bar(`a Transformer's cache at ${whole(shown)} tokens`, cache(shown), most, "other"),
  );
  const hint = document.createElement("p");
  hint.className = "hint";
  const stays = facts.state.bounded ? `the state still ${size(state(FAR))}` : `this model's state ${size(state(FAR))}`;
  hint.textContent = `At ${whole(FAR)} tokens the cache would take ${size(cache(FAR))}, ${stays}. The comparison is with a Transformer of the same width, depth and precision.`;
  place.replaceChildren(bars, hint);
}

function bar(name, bytes, most, kind) {
  const row = document.createElement("div");
  row.className = "bar";
  const line = document.createElement("div");
  line.className = "line";
  const much = document.createElement("b");
  much.textContent = size(bytes);
  line.append(name, much);
  const track = document.createElement("div");
  track.className = "track";
  const fill = document.createElement("div");
  fill.className = `fill ${kind}`;
  fill.style.width = `${(100 * bytes) / most}%`;
  track.append(fill);
  row.append(line, track);
  return row;
}

function draw(kind, attributes, content) {
  const element = document.createElementNS(SVG, kind);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (content !== undefined) element.textContent = content;
  return element;
}

export function drawMemory(place, facts, length) {
  const { edges, layers } = facts.time_constants;
  if (!layers.length) {
    place.textContent = "This model has no state spaces: it remembers only what its attention sees.";
    place.className = "hint";
    return;
  }
  const left = 34, right = 350, top = 18;
  const step = layers.length > 20 ? 15 : layers.length > 10 ? 22 : 34;
  const bottom = top + step * layers.length;
  const low = Math.log(edges[0]), high = Math.log(edges.at(-1));
  const x = (tokens) => left + ((right - left) * (Math.min(high, Math.max(low, Math.log(tokens))) - low)) / (high - low);
  const picture = draw("svg", { viewBox: `0 0 360 ${bottom + 38}`, role: "img" });
  const medians = layers.map((layer) => `layer ${layer.layer + 1}: ${short(layer.quantiles["0.5"])}`);
  picture.setAttribute("aria-label", `Time constants by layer, medians in tokens. ${medians.join("; ")}.`);
  for (let tick = edges[0]; tick <= edges.at(-1) * 1.01; tick *= 10) {
    picture.append(
      draw("line", { class: "axis", x1: x(tick), x2: x(tick), y1: top, y2: bottom }),
      draw("text", { x: x(tick), y: bottom + 15, "text-anchor": "middle" }, short(tick)),
    );
  }
  const tallest = Math.max(...layers.map((layer) => Math.max(...layer.histogram) / layer.modes));
  layers.forEach((layer, row) => {
    const beside = layers.filter((one) => one.layer === layer.layer); // a DSS block has two
    const name = `${layer.layer + 1}${beside.length > 1 ? "abcdefgh"[beside.indexOf(layer)] : ""}`;
    const base = top + step * (row + 1);
    const height = (count) => base - ((0.9 * step * count) / layer.modes) / tallest;
    const points = layer.histogram.map((count, bin) => `${x(Math.sqrt(edges[bin] * edges[bin + 1])).toFixed(1)} ${height(count).toFixed(1)}`);
    const group = draw("g", {});
    const q = layer.quantiles;
    group.append(
      draw("title", {}, `Layer ${name}, ${whole(layer.modes)} modes: half of them last ${short(q["0.25"])} to ${short(q["0.75"])} tokens, median ${short(q["0.5"])}`),
      draw("path", { class: "hill", d: `M${x(edges[0])} ${base}L${points.join("L")}L${x(edges.at(-1))} ${base}Z` }),
      draw("line", { class: "median", x1: x(q["0.5"]), x2: x(q["0.5"]), y1: base, y2: base - 0.4 * step }),
      draw("text", { class: "layer", x: left - 8, y: base - 3, "text-anchor": "end" }, name),
    );
    picture.append(group);
  });
  if (length) {
    const at = x(length);
    const late = at > (left + right) / 2;
    picture.append(
      draw("line", { class: "here", x1: at, x2: at, y1: top - 4, y2: bottom }),
      draw("text", { class: "here-name", x: at + (late ? -5 : 5), y: top - 6, "text-anchor": late ? "end" : "start" }, `this text: ${whole(length)} tokens`),
    );
  }
  picture.append(draw("text", { x: (left + right) / 2, y: bottom + 32, "text-anchor": "middle" }, "tokens until a mode has decayed to 1/e, by layer"));
  const hint = document.createElement("p");
  hint.className = "hint";
  hint.textContent = length
    ? "Modes to the right of the dashed line still hold the beginning of this text; those to its left have forgotten it."
    : "Every layer has modes that decay quickly and modes that last. The line marks the median.";
  place.replaceChildren(picture, hint);
}
