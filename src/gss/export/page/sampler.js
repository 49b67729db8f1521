// Which token comes next: the likeliest at temperature 0, otherwise a draw from the likeliest that make up top_p.

export function choose(logits, temperature, topP, random) {
  let best = 0;
  for (let id = 1; id < logits.length; id++) if (logits[id] > logits[best]) best = id;
  if (!(temperature > 0)) return best;
  const weights = new Float64Array(logits.length);
  let total = 0;
  for (let id = 0; id < logits.length; id++) total += weights[id] = Math.exp((logits[id] - logits[best]) / temperature);
  let least = 0; // the weight of the last token that is kept
  if (topP < 1) {
    // Tokens below this are together less than what top_p leaves out, so only the others need sorting.
    const bound = ((1 - topP) * total) / logits.length;
    const sorted = weights.filter((weight) => weight >= bound).sort();
    let sum = 0;
    let kept = sorted.length;
    while (kept > 0 && sum < topP * total) sum += sorted[--kept];
    least = sorted[kept];
    total = sum;
  }
  let left = random() * total;
  for (let id = 0; id < weights.length; id++) {
    if (weights[id] >= least && (left -= weights[id]) < 0) return id;
  }
  return best; // where rounding left a little over
}

// Numbers from 0 up to 1 that a seed determines: a counter, scrambled by multiplications.
export function seeded(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x9e3779b9) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 16), 0x21f0aaad);
    mixed = Math.imul(mixed ^ (mixed >>> 15), 0x735a2d97);
    return ((mixed ^ (mixed >>> 15)) >>> 0) / 2 ** 32;
  };
}
