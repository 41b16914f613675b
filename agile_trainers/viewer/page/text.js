// Elements and text. Data enters the page through text nodes alone, so that hostile text stays text.

/**
 * Make an element. Of `props`, those that begin with "on" are listeners, with "--" style variables, the others attributes.
 * Children are nodes or texts; invisible characters of texts are shown, also in titles. An `href` is "#" and a place of the page;
 * the filters are added to it.
 */
function h(tag, props, ...children) {
  const [name, ...classes] = tag.split(".");
  const element = document.createElement(name || "div");
  if (classes.length) element.className = classes.join(" ");
  fill(element, props, children);
  return element;
}

function svg(tag, props, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  fill(element, props, children);
  return element;
}

function fill(element, props, children) {
  for (const [key, value] of Object.entries(props || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key.startsWith("--")) element.style.setProperty(key, value);
    else if (key === "href") element.setAttribute(key, addressOf(value.slice(1)));
    else element.setAttribute(key, value === true ? "" : READ.has(key) ? visible(String(value)) : value);
  }
  const there = children.flat(3).filter((child) => child !== null && child !== undefined && child !== false);
  element.append(...there.map((child) => (child instanceof Node ? child : visible(String(child)))));
}

const READ = new Set(["title", "aria-label", "label"]); // attributes that people read
const JOINERS = new Set(["\n", "\t", "\u200c", "\u200d"]); // the last two are part of words and emoji

/** Text with its invisible characters shown: controls, direction overrides, zero-width characters, lone surrogates. */
function visible(text) {
  return text.replace(/[\p{Cs}\p{Cc}\p{Cf}\u2028\u2029]/gu, (character) => {
    if (JOINERS.has(character)) return character;
    const code = character.codePointAt(0);
    return `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

/** The end of a piece of at most `size` characters that begins at `start`: after a line if possible, never inside a pair. */
function pieceEnd(text, start, size) {
  let end = start + size;
  if (end >= text.length) return text.length;
  const line = text.lastIndexOf("\n", end);
  if (line > start + size / 2) return line + 1;
  const code = text.charCodeAt(end - 1);
  return code >= 0xd800 && code < 0xdc00 ? end - 1 : end;
}

const SHOWN_AT_FIRST = 2000;
const BLOCK = 20000;

/** A text that may be megabytes long: its beginning, and the rest on demand, in blocks that are laid out when seen. */
function longText(text, label) {
  const box = h("div.text", { dir: "auto" });
  const first = pieceEnd(text, 0, SHOWN_AT_FIRST);
  box.append(visible(text.slice(0, first)));
  if (first < text.length) {
    const left = text.length - first;
    const more = h("button.more", {
      "aria-label": `Show all of ${label}`,
      onclick: () => {
        more.remove();
        for (let start = first; start < text.length; ) {
          const end = pieceEnd(text, start, BLOCK);
          box.append(h("div.block", {}, text.slice(start, end)));
          start = end;
        }
      },
    }, `show all (${count(left)} more characters)`);
    box.append(more);
  }
  return box;
}

/** Any value as text: a text as it is, messages as role and content, other data as JSON. */
function asText(value) {
  if (value === null || value === undefined) return "";
  return typeof value === "string" ? value : JSON.stringify(value, null, 1);
}

const shortened = (text, size = 80) => (text.length > size ? `${text.slice(0, size)}…` : text);
const capital = (text) => text[0].toUpperCase() + text.slice(1);
const count = (value) => Number(value).toLocaleString("en");

/** A number for people: up to `digits` significant digits, and a true minus sign. */
function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return String(value).replace("-", "−");
  const text = Math.abs(value) >= 1e5 || (value !== 0 && Math.abs(value) < 1e-3)
    ? value.toExponential(1) : String(Number(value.toPrecision(digits)));
  return text.replace("-", "−");
}

const signed = (value) => (typeof value === "number" && value > 0 ? "+" : "") + number(value);
const percent = (value) => (typeof value === "number" ? `${(100 * value).toFixed(value > 0 && value < 1 ? 1 : 0)} %` : "–");

// ------------------------------------------------------------------------------------------------- bytes of tokens

/** Length of the UTF-8 character at a position, and whether it is valid. */
function characterAt(bytes, at) {
  const lead = bytes[at];
  if (lead < 0x80) return [1, true];
  const length = lead >= 0xc2 && lead <= 0xdf ? 2 : lead >= 0xe0 && lead <= 0xef ? 3 : lead >= 0xf0 && lead <= 0xf4 ? 4 : 0;
  if (!length || at + length > bytes.length) return [1, false];
  const low = lead === 0xe0 ? 0xa0 : lead === 0xf0 ? 0x90 : 0x80;
  const high = lead === 0xed ? 0x9f : lead === 0xf4 ? 0x8f : 0xbf;
  if (bytes[at + 1] < low || bytes[at + 1] > high) return [1, false];
  for (let next = 2; next < length; next++) if (bytes[at + next] < 0x80 || bytes[at + next] > 0xbf) return [1, false];
  return [length, true];
}

/**
 * The text of each token. A character whose bytes are spread over several tokens is the text of the first of them, and the
 * others are `joined` to it. Bytes that are no character are shown as ⟨E2⟩.
 * @param {string[]} pieces Bytes of each token, one character (0 to 255) each.
 */
function tokenTexts(pieces) {
  const bytes = [];
  const owner = [];
  pieces.forEach((piece, token) => {
    for (let k = 0; k < piece.length; k++) {
      bytes.push(piece.charCodeAt(k));
      owner.push(token);
    }
  });
  const tokens = pieces.map(() => ({ text: "", joined: false }));
  const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  for (let at = 0; at < bytes.length; ) {
    if (bytes[at] >= 0x20 && bytes[at] < 0x7f) { // nearly all of most texts, and always visible
      tokens[owner[at]].text += String.fromCharCode(bytes[at]);
      at += 1;
      continue;
    }
    const [length, valid] = characterAt(bytes, at);
    const text = valid
      ? visible(decoder.decode(Uint8Array.from(bytes.slice(at, at + length))))
      : `⟨${bytes[at].toString(16).toUpperCase().padStart(2, "0")}⟩`;
    tokens[owner[at]].text += text;
    for (let k = owner[at] + 1; k <= owner[at + length - 1]; k++) tokens[k].joined = true;
    at += length;
  }
  return tokens;
}

/** The end of a stretch of at least `size` tokens that begins at `start` and splits no character; of broken bytes, of a few more. */
function stretchEnd(pieces, start, size) {
  let end = Math.min(start + size, pieces.length);
  for (let more = 0; more < 4 && end < pieces.length && (pieces[end].charCodeAt(0) & 0xc0) === 0x80; more++) end += 1;
  return end;
}
