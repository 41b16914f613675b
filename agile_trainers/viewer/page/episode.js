// An episode turn by turn: its prompt, the tokens of each action, and the environment's answers.

const TOKENS_AT_FIRST = 3000;
const TOKENS_MORE = 20000;

/** Say that an element has tokens that are to be coloured. */
const grown = (element) => element.dispatchEvent(new CustomEvent("grown", { bubbles: true }));

/** Fill `into` with the tokens from `start` to `end`, the first at once, and the others when a button asks for them. */
function showTokens(into, episode, start, end) {
  const known = episode.ids.slice(start, end).map((id) => episode.pieces[id]);
  const pieces = known.map((piece) => (piece ? piece[0] : ""));
  let first = 0;
  const more = (size) => {
    const last = stretchEnd(pieces, first, size);
    appendTokens(into, episode.ids.slice(start + first, start + last), known.slice(first, last), start + first);
    first = last;
    if (last === pieces.length) return;
    into.append(h("button.more", {
      onclick: (event) => {
        event.target.remove();
        more(TOKENS_MORE);
        grown(into);
      },
    }, `show more (${count(pieces.length - last)} more tokens)`));
  };
  more(TOKENS_AT_FIRST);
}

/** Append tokens, the first of which has the number `start`; a character of several tokens is shown once, the rest are joined to it. */
function appendTokens(into, ids, known, start) {
  const texts = tokenTexts(known.map((piece) => (piece ? piece[0] : "")));
  let joined = null;
  ids.forEach((id, k) => {
    const { text, joined: continues } = texts[k];
    const token = h("span.t", { "data-k": start + k });
    if (!known[k]) token.append(h("span.id", {}, `#${id}`));
    else if (known[k][1]) token.append(h("span.special", { dir: "ltr" }, text));
    else {
      if (continues) token.append(h("span.rest", { title: "same character" }, "·"));
      appendLines(token, text);
    }
    if (texts[k + 1]?.joined && !continues) {
      joined = h("span.joined", { title: "One character of several tokens" }, token);
      into.append(joined);
    } else if (continues && joined) joined.append(token);
    else into.append(token);
  });
}

function appendLines(token, text) {
  text.split("\n").forEach((line, k) => {
    if (k) token.append(h("span.newline", { "aria-hidden": "true" }, "↵"), "\n");
    if (line) token.append(line);
  });
}

/**
 * The element of an episode. `repaint(mark, largest)` colours its tokens anew. The tokens of the first turns are drawn at once, the
 * others when they come near the window; until then their text stands there, so that the browser's search finds it.
 */
function episodePane(run, row, episode) {
  const later = new Map();
  const near = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      near.unobserve(target);
      target.replaceChildren();
      target.closest(".turn").classList.remove("later");
      later.get(target)(target);
      grown(target);
    }
  }, { rootMargin: "1200px 0px" });
  let left = TOKENS_AT_FIRST;
  const draw = (box, size, text, show) => {
    if (left > 0) show(box);
    else {
      box.append(visible(text));
      later.set(box, show);
      near.observe(box);
    }
    left -= size;
    return left + size > 0;
  };
  const turns = episode.turns.map((turn, k) => turnBlock(episode, turn, k, draw));
  const branched = hasPaths(episode);
  const pane = h("article.episode", { "aria-label": `Episode ${run.idOf(row)}` },
    episodeHead(run, row, episode),
    promptBlock(episode),
    branched ? pathTree(episode, (k) => turns[k].scrollIntoView({ block: "start" })) : null,
    inTime(episode.turns).map((k) => turns[k]),
    afterLast(episode),
    h("p.ending", {}, h("strong", {}, `Stopped: ${words(run.get("stop", row))}. `), VIEW.index.stop_reasons[run.get("stop", row)] || ""),
    episode.error ? h("pre.error", {}, asText(episode.error)) : null,
  );
  let painted = null;
  const paintIn = (element) => {
    const [mark, largest, values, any] = painted;
    for (const token of element.querySelectorAll(".t[data-k]")) {
      const k = Number(token.dataset.k);
      if (turnOf(episode, k) === null || token.closest(".foreign")) token.className = "t given";
      else if (any) paint(token, mark, values[k], largest);
      else token.className = "t";
    }
  };
  const repaint = (mark, largest) => {
    const values = valuesOf(episode, mark);
    painted = [mark, largest, values, values.some((value) => value !== null)];
    paintIn(pane);
  };
  pane.addEventListener("grown", (event) => painted && paintIn(event.target));
  const about = (event) => {
    const token = event.target.closest?.(".t[data-k]");
    if (token) showToken(episode, Number(token.dataset.k), token);
  };
  pane.addEventListener("mouseover", about);
  pane.addEventListener("click", about);
  return { element: pane, repaint };
}

const OUTCOMES = {
  success: ["✓", "success"], failure: ["✗", "no success"], unknown: ["○", "outcome not reported"], error: ["!", "environment failed"],
};

function badge(run, row) {
  const [sign, text] = OUTCOMES[outcome(run, row)];
  const mark = h(`span.badge.${outcome(run, row)}`, { title: text, role: "img", "aria-label": text }, sign);
  return run.get("demonstration", row) ? [mark, " ", h("span.badge.cut", { title: "An expert gave the answers" }, "demonstration")] : mark;
}

function episodeHead(run, row, episode) {
  const facts = [
    ["return", number(run.get("return", row))],
    ["turns", number(run.get("num_turns", row))],
    ["tokens", count(episode.paths ? run.get("num_tokens", row) : episode.ids.length)],
    ["clipped tokens", (episode.clipped || []).some((value) => typeof value === "boolean") ? percent(clippedShare(episode)) : null],
    ["environment", run.environment(row)],
    ["seed", run.get("seed", row)],
    ["group", run.groupOf(row)],
    ["member", run.get("member", row)],
    ["row", episode.row === null || episode.row === undefined ? null : asText(episode.row).replace(/\s+/g, " ")],
  ].filter(([, value]) => value !== null && value !== undefined);
  return h("dl.facts", {},
    h("div", {}, h("dt", {}, "outcome"), h("dd", {}, badge(run, row), " ", OUTCOMES[outcome(run, row)][1])),
    facts.map(([name, value]) => {
      const text = String(value);
      return h("div", {}, h("dt", {}, name), h("dd", { title: shortened(text, 2000) }, shortened(text)));
    }));
}

function clippedShare({ clipped }) {
  const known = clipped.filter((value) => typeof value === "boolean");
  return known.filter(Boolean).length / known.length;
}

function messageBlock(role, content, images) {
  const parts = Array.isArray(content) && content.every((part) => part?.type) ? content : [{ type: "text", text: asText(content) }];
  return h("div.message", {}, h("p.role", {}, role), parts.map((part) => {
    const source = part.type === "image" ? images?.[part.image] : null;
    if (source) return imageBlock(source);
    return longText(asText(part.type === "text" ? part.text : part), `the message of ${role}`);
  }));
}

/** A small image, which a click shows as it is; a tiny one is enlarged. */
function imageBlock(source) {
  const image = h("img.shown", {
    alt: "An image that the model saw",
    onload: () => image.classList.toggle("tiny", Math.max(image.naturalWidth, image.naturalHeight) < 48),
  });
  image.src = source;
  const button = h("button.image", { title: "Show the whole image", onclick: () => image.classList.toggle("whole") }, image);
  return button;
}

function promptBlock(episode) {
  const { prompt } = episode;
  const messages = Array.isArray(prompt) ? prompt : [{ role: "prompt", content: prompt }];
  const info = asText(episode.reset_info);
  return h("div.prompt", { role: "group", "aria-label": "Prompt" },
    messages.map((message) => messageBlock(asText(message?.role ?? "prompt"), message?.content ?? message, episode.images)),
    hasContent(episode.reset_info) ? h("details", {}, h("summary", {}, "info of reset"), longText(info, "the info of reset")) : null,
    episode.prompt_ids?.length && startsWithFirst(episode) ? tokensOnDemand(`${count(episode.prompt_ids.length)} prompt tokens`, (box) => {
      box.ids = episode.prompt_ids;
      showTokens(box, { ids: episode.prompt_ids, pieces: episode.pieces }, 0, episode.prompt_ids.length);
    }, "foreign") : null);
}

const hasContent = (value) => value && (typeof value !== "object" || Object.keys(value).length > 0);

/** A fold whose tokens are made when it is opened. */
function tokensOnDemand(title, show, kind = "") {
  const box = h("div.tokens");
  if (kind) box.classList.add(kind);
  return h("details", {
    ontoggle: (event) => {
      if (!event.target.open || box.childNodes.length) return;
      show(box);
      grown(box);
    },
  }, h("summary", {}, title), box);
}

function turnBlock(episode, turn, k, draw) {
  const next = episode.turns[k + 1]?.start ?? episode.ids.length;
  const facts = [
    ["reward", signed(turn.reward)], ["return", number(turn.return)], ["advantage", signed(turn.advantage)], ["value", number(turn.value)],
  ].filter(([name]) => turn[name] !== null && turn[name] !== undefined);
  const tokens = h("div.tokens", { role: "group", "aria-label": `Tokens of turn ${k + 1}`, dir: "auto" });
  const has = turn.start !== null && turn.start !== undefined && turn.end <= episode.ids.length && turn.end > turn.start;
  const drawn = !has || draw(tokens, turn.end - turn.start, asText(turn.text), (box) => showTokens(box, episode, turn.start, turn.end));
  const unknown = has && episode.ids.slice(turn.start, turn.end).some((id) => !episode.pieces[id]);
  const cut = turn.finish_reason === "length" ? h("span.badge.cut", { title: "The answer ended at a token limit" }, "cut at the token limit") : null;
  const answered = turn.observation;
  const origin = hasPaths(episode) ? originOf(episode, k) : [...(turn.question ? [ASKED] : []), ...callNotes(turn)];
  const notes = [...origin, ...requestNotes(turn)];
  return h(drawn ? "div.turn" : "div.turn.later", { id: `turn-${k}`, role: "group", "--hue": `var(--turn-${k % 6})`, "aria-label": `Turn ${k + 1}` },
    h("h2", {}, h("span.number", {}, String(k + 1)), h("span.who", {}, "model"), cut,
      h("span.numbers", {}, facts.map(([name, text]) => h("span", {}, `${name} `, h("b", {}, text))))),
    notes.length ? h("p.note", {}, notes.join(" · ")) : null,
    typeof turn.path === "number" || turn.messages ? wholePrompt(episode, turn, k) : null,
    unknown || !has ? longText(asText(turn.text), `turn ${k + 1}`) : null,
    tokens,
    answered === null || answered === undefined ? null
      : Array.isArray(answered) ? answered.map((message) => messageBlock(`${callOf(turn) ? "agent" : "environment"} (${asText(message?.role ?? "message")})`, message?.content ?? message, episode.images))
      : messageBlock("environment", answered),
    judgementBlocks(turn, k),
    hasContent(turn.info) ? h("details.info", {}, h("summary", {}, "info"), longText(asText(turn.info), `the info of turn ${k + 1}`)) : null,
    turn.end < next ? tokensOnDemand(`${count(next - turn.end)} tokens between the actions`, (box) => showTokens(box, episode, turn.end, next)) : null);
}

/** What judges said of a turn, beside the words of the model that seem to speak to them. */
function judgementBlocks(turn, k) {
  const said = turn.info?.judgements;
  if (!said || typeof said !== "object" || Array.isArray(said)) return null;
  return Object.entries(said).filter(([, one]) => one && typeof one === "object").map(([name, one]) => {
    const verdict = one.failed !== undefined ? "no score" : number(one.score);
    const quotes = Array.isArray(one.addressed) ? one.addressed : [];
    return [
      quotes.map((quote) => h("p.note", {}, `The model seems to address the judge: “${asText(quote)}”`)),
      h("div.message", {}, h("p.role", {}, `${name}: ${verdict}${one.held_out ? " (held out)" : ""}`),
        longText(asText(one.failed ?? one.reason), `what ${name} said of turn ${k + 1}`)),
    ];
  });
}

/** Show what is known of a token beside the page. */
function showToken(episode, k, element) {
  for (const one of document.querySelectorAll(".t.at")) one.classList.remove("at");
  element.classList.add("at");
  const foreign = element.closest(".foreign");
  const id = foreign ? foreign.ids[k] : episode.ids[k];
  const [bytes, special] = episode.pieces[id] || ["", 0];
  const turn = foreign ? null : turnOf(episode, k);
  const hex = [...bytes].map((byte) => byte.charCodeAt(0).toString(16).toUpperCase().padStart(2, "0")).join(" ");
  const facts = [
    ["token", `${id}${special ? " (special)" : ""}`], ["bytes", hex.length > 60 ? `${hex.slice(0, 60)} …` : hex || "unknown"],
    ["position", k], ["turn", turn === null ? "none: not sampled" : turn + 1],
  ];
  if (turn !== null) {
    facts.push(["sampler's log-prob", number(at(episode.sampling_logprobs, k), 4)], ["trainer's log-prob", number(at(episode.logprobs, k), 4)]);
    for (const mark of ["mismatch", "advantage", "ratio", "clipped", "value", "kl"]) {
      const value = MARKS[mark].of(episode, k);
      facts.push([MARKS[mark].label, typeof value === "boolean" ? (value ? "yes" : "no") : number(value, 4)]);
    }
  }
  const panel = document.getElementById("token");
  panel.hidden = false;
  panel.replaceChildren(h("dl", {}, facts.map(([name, value]) => [h("dt", {}, name), h("dd", {}, String(value))])));
}
