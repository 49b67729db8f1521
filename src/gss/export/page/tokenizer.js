// Text to ids and back, as the library does it: bytes, or a unigram SentencePiece vocabulary with byte fallback.

const MARK = "\u2581"; // stands for a space inside a piece
const UNKNOWN_PENALTY = 10;
const utf8 = new TextEncoder();

export function openVocabulary(vocabulary) {
  return vocabulary.kind === "bytes" ? new Bytes() : new Unigram(vocabulary);
}

class Bytes {
  encode(text) {
    return [...utf8.encode(text)];
  }

  bytesOf(id) {
    return id < 256 ? Uint8Array.of(id) : new Uint8Array();
  }
}

class Unigram {
  constructor({ pieces, scores, symbols, bytes, unknown }) {
    this.bytes = bytes; // the id of each byte
    this.unknown = unknown;
    this.scores = scores; // of pieces that text is cut into; null for all others
    const learned = scores.filter((score, id) => score !== null && !symbols.includes(id));
    const most = learned.reduce((one, other) => Math.max(one, other));
    this.worst = learned.reduce((one, other) => Math.min(one, other)) - UNKNOWN_PENALTY;
    for (const id of symbols) scores[id] = utf8.encode(pieces[id]).length * most - 0.1;
    // A run of one symbol, such as newlines, is cut apart from what is around it, so that ties do not hang on that.
    const set = [...new Set(symbols.flatMap((id) => [...pieces[id]]))].map((each) => `\\u{${each.codePointAt(0).toString(16)}}`).join("");
    this.parts = set ? new RegExp(`([${set}])\\1*|[^${set}]+`, "gu") : /[^]+/g;
    this.root = new Map();
    pieces.forEach((piece, id) => {
      if (scores[id] === null) return;
      let node = this.root;
      for (const character of piece) {
        if (!node.has(character)) node.set(character, new Map());
        node = node.get(character);
      }
      node.id = id;
    });
    const byteOf = new Map(bytes.map((id, byte) => [id, byte]));
    this.spelled = pieces.map((piece, id) => {
      if (byteOf.has(id)) return Uint8Array.of(byteOf.get(id));
      if (scores[id] === null) return new Uint8Array(); // a control piece is no text
      return utf8.encode(piece.replaceAll(MARK, " "));
    });
  }

  bytesOf(id) {
    return this.spelled[id] ?? new Uint8Array();
  }

  // A mark that is part of the text is spelled in bytes, since inside a piece it is a space.
  encode(text) {
    const mark = [...utf8.encode(MARK)].map((byte) => this.bytes[byte]);
    const cut = (each) => (each.match(this.parts) ?? []).flatMap((part) => this.segment(part));
    return text.split(MARK).flatMap((each, index) => [...(index ? mark : []), ...cut(each)]);
  }

  // The likeliest way to cut a text into pieces; of equally likely ones, that whose last piece begins first.
  segment(text) {
    const characters = [...text.replaceAll(" ", MARK)];
    const size = characters.length;
    const total = new Float64Array(size + 1);
    const start = new Int32Array(size + 1).fill(-1);
    const chosen = new Int32Array(size + 1);
    const offer = (from, to, id, score) => {
      const sum = score + total[from];
      if (start[to] !== -1 && sum <= total[to]) return;
      total[to] = sum;
      start[to] = from;
      chosen[to] = id;
    };
    for (let from = 0; from < size; from++) {
      let node = this.root;
      let single = false;
      for (let to = from; to < size && (node = node.get(characters[to])); to++) {
        if (node.id === undefined) continue;
        offer(from, to + 1, node.id, this.scores[node.id]);
        single ||= to === from;
      }
      if (!single) offer(from, from + 1, this.unknown, this.worst);
    }
    const ids = [];
    for (let to = size; to > 0; to = start[to]) {
      const spelled = chosen[to] === this.unknown ? [...utf8.encode(characters[to - 1])].map((byte) => this.bytes[byte]) : [chosen[to]];
      ids.push(...spelled.reverse());
    }
    return ids.reverse();
  }
}
