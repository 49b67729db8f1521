// The text as tokens: each coloured by its surprise, each with a card of its alternatives.
// Whatever a model writes reaches the page as textContent only.

const UNREADABLE = /^(bytes:\\x|token_id:|<\|end\|>$)/;

// Spaces and line ends made visible, for a token that stands alone.
export function visible(name) {
  return name.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\r", "␍").replaceAll("\t", "⇥") || "∅";
}

export function bits(logprob) {
  return -logprob / Math.LN2;
}

function percent(logprob) {
  const share = 100 * Math.exp(logprob);
  return share >= 0.1 ? `${share.toFixed(1)}%` : share >= 0.001 ? `${share.toFixed(3)}%` : "< 0.001%";
}

function make(kind, names, content) {
  const element = document.createElement(kind);
  if (names) element.className = names;
  if (content !== undefined) element.textContent = content;
  return element;
}

export class TokenText {
  // `branch(text)` is called with the text up to a token and another one in its place.
  constructor(place, card, branch) {
    this.place = place;
    this.card = card;
    this.branch = branch;
    this.full = 7; // bits that have the strongest colour
    this.pinned = false;
    this.pressed = false;
    this.open = null;
    this.leaving = 0;
    this.clear(0);
    this.listen();
  }

  clear(given) {
    this.hide();
    this.given = given; // characters of the prompt at the start
    this.characters = [];
    this.tokens = [];
    this.settled = 0;
    this.place.replaceChildren();
  }

  get whole() {
    return this.characters.join("");
  }

  // New text and new tokens; offsets count characters, not the halves that JavaScript counts.
  push(text, scores) {
    this.characters.push(...text);
    const added = document.createDocumentFragment();
    scores?.tokens.forEach((name, index) => {
      const token = {
        name,
        logprob: scores.token_logprobs[index],
        top: Object.entries(scores.top_logprobs[index] ?? {}),
        offset: scores.text_offset[index],
        span: make("span", "token"),
      };
      const level = token.logprob === null ? 0 : Math.min(7, Math.round((7 * bits(token.logprob)) / this.full));
      token.span.classList.add(`s${level}`);
      token.span.classList.toggle("given", token.offset < this.given);
      token.span.dataset.index = this.tokens.length;
      token.span.tabIndex = this.tokens.length ? -1 : 0;
      this.tokens.push(token);
      added.append(token.span);
    });
    this.fill();
    this.place.append(added);
  }

  // Tokens' own text: up to where the next one starts. Only the last ones can still change.
  fill() {
    for (let index = this.settled; index < this.tokens.length; index++) {
      const token = this.tokens[index];
      const next = this.tokens[index + 1];
      token.text = this.characters.slice(token.offset, next ? next.offset : undefined).join("");
      const gap = token.text === "" && next !== undefined; // a part of a character that a later token completes
      const shown = gap ? "·" : token.text;
      if (token.span.textContent !== shown) token.span.textContent = shown;
      token.span.classList.toggle("gap", gap);
      token.span.classList.toggle("newline", token.text.includes("\n"));
    }
    this.settled = Math.max(0, this.tokens.length - 1);
  }

  listen() {
    const tokenOf = (event) => this.tokens[event.target.closest?.(".token")?.dataset.index];
    this.place.addEventListener("pointerover", (event) => {
      if (event.pointerType !== "touch" && !this.pinned && tokenOf(event)) this.show(tokenOf(event));
    });
    for (const area of [this.place, this.card]) {
      area.addEventListener("pointerleave", () => {
        clearTimeout(this.leaving);
        this.leaving = setTimeout(() => this.pinned || this.place.contains(document.activeElement) || this.hide(), 250);
      });
      area.addEventListener("pointerenter", () => clearTimeout(this.leaving));
    }
    this.place.addEventListener("focusin", (event) => {
      const token = tokenOf(event);
      if (!token) return;
      this.place.querySelector('[tabindex="0"]')?.setAttribute("tabindex", "-1");
      token.span.tabIndex = 0;
      token.span.setAttribute("role", "button");
      token.span.setAttribute("aria-label", this.spoken(token));
      // A finger's focus comes before its click: a card that opened then would take the click.
      if (!this.pressed) this.show(token);
    });
    this.place.addEventListener("focusout", (event) => {
      event.target.removeAttribute("role");
      event.target.removeAttribute("aria-label");
      if (!this.pinned && !this.card.contains(event.relatedTarget)) this.hide();
    });
    this.place.addEventListener("click", (event) => {
      const token = tokenOf(event);
      if (!token || !getSelection().isCollapsed) return;
      this.show(token);
      this.pinned = true;
      // On a phone the card lies at the bottom of the screen: its token should not be under it.
      const under = token.span.getBoundingClientRect().bottom + 12 - this.card.getBoundingClientRect().top;
      if (innerWidth <= 520 && under > 0) scrollBy({ top: under });
    });
    this.place.addEventListener("keydown", (event) => {
      const token = tokenOf(event);
      if (!token || event.ctrlKey || event.metaKey || event.altKey) return;
      const last = this.tokens.length - 1;
      const index = this.tokens.indexOf(token);
      const goal = { ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: last }[event.key];
      if (goal !== undefined) {
        event.preventDefault();
        this.tokens[Math.min(last, Math.max(0, goal))].span.focus();
      } else if (event.key === "Enter" || event.key === " ") {
        event.preventDefault();
        this.pinned = true;
        this.card.querySelector("button")?.focus();
      }
    });
    for (const after of ["click", "keydown"]) document.addEventListener(after, () => (this.pressed = false), true);
    document.addEventListener("pointerdown", (event) => {
      this.pressed = true;
      if (this.pinned && !this.card.contains(event.target) && !this.place.contains(event.target)) this.hide();
    });
    addEventListener("resize", () => this.hide());
    addEventListener("scroll", () => this.pinned || this.hide(), { passive: true });
  }

  spoken(token) {
    if (token.logprob === null) return `${visible(token.name)}, not scored`;
    return `${visible(token.name)}, ${percent(token.logprob)}, ${bits(token.logprob).toFixed(1)} bits of surprise`;
  }

  // Closes the card.
  hide() {
    clearTimeout(this.leaving);
    if (this.open && this.card.contains(document.activeElement)) this.open.span.focus({ preventScroll: true });
    this.open?.span.classList.remove("open");
    this.open = null;
    this.pinned = false;
    this.card.hidden = true;
  }

  show(token) {
    clearTimeout(this.leaving);
    if (this.open === token) return;
    this.open?.span.classList.remove("open");
    this.open = token;
    this.pinned = false;
    token.span.classList.add("open");
    const line = make("div", "line");
    const much = make("span", "much");
    if (token.logprob === null) {
      much.textContent = "not scored";
    } else {
      much.append(percent(token.logprob), make("br"), `${bits(token.logprob).toFixed(2)} bits`);
    }
    line.append(make("span", "what", visible(token.name)), much);
    const choices = token.top.sort((one, other) => other[1] - one[1]).slice();
    if (token.logprob !== null && !choices.some(([name]) => name === token.name)) {
      choices.push([token.name, token.logprob]);
    }
    const list = make("ol");
    for (const [name, logprob] of choices) list.append(this.choice(token, name, logprob));
    const hint = "What the model expected here, before temperature. Choose another token to continue from it.";
    this.card.replaceChildren(line, list, make("p", "hint", hint));
    this.card.hidden = false;
    this.move();
  }

  choice(token, name, logprob) {
    const item = make("li");
    const chosen = name === token.name;
    const button = make(chosen || UNREADABLE.test(name) ? "div" : "button", "choice");
    button.classList.toggle("chosen", chosen);
    const bar = make("i");
    bar.style.width = `${100 * Math.exp(logprob)}%`;
    button.append(bar, make("span", "", visible(name)), make("span", "", percent(logprob)));
    if (button.tagName === "BUTTON") {
      button.type = "button";
      button.title = "Continue from here with this token";
      button.addEventListener("click", () => {
        this.hide();
        this.branch(token, name);
      });
    }
    item.append(button);
    return item;
  }

  // Beside its token, on whichever side there is room.
  move() {
    const [where] = this.open.span.getClientRects();
    if (!where) return;
    const { offsetWidth: width, offsetHeight: height } = this.card;
    const below = where.bottom + 6;
    const top = below + height < innerHeight || where.top < height ? below : where.top - height - 6;
    this.card.style.left = `${Math.max(8, Math.min(where.left - 12, innerWidth - width - 8))}px`;
    this.card.style.top = `${Math.max(8, Math.min(top, innerHeight - height - 8))}px`;
  }
}
