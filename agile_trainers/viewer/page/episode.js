// An episode turn by turn: its prompt, the tokens of each action, and the environment's answers.

const TOKENS_AT_FIRST = 3000;

/** Fill `into` with the tokens from `start` to `end`; a character of several tokens is shown once, the rest are joined to it. */
function showTokens(into, episode, start, end) {
  const ids = episode.ids.slice(start, end);
  const known = ids.map((id) => episode.pieces[id]);
  const texts = tokenTexts(known.map((piece) => (piece ? piece[0] : "")));
  let joined = null;
  const shown = (limit, from) => {
    for (let k = from; k < limit; k++) {
      const { text } = texts[k];
      const continues = texts[k].joined;
      const token = h("span.t", { "data-k": start + k });
      if (!known[k]) token.append(h("span.id", {}, `#${ids[k]}`));
      else if (known[k][1]) token.append(h("span.special", {}, text));
      else {
        if (continues) token.append(h("span.rest", { "aria-label": "same character" }, "·"));
        appendLines(token, text);
      }
      if (texts[k + 1]?.joined && !continues) {
        joined = h("span.joined", { title: "One character of several tokens" }, token);
        into.append(joined);
      } else if (continues && joined) joined.append(token);
      else into.append(token);
    }
  };
  const first = Math.min(TOKENS_AT_FIRST, ids.length);
  shown(first, 0);
  if (first < ids.length) {
    const more = h("button.more", {
      onclick: () => {
        more.remove();
        shown(ids.length, first);
        into.dispatchEvent(new CustomEvent("grown", { bubbles: true }));
      },
    }, `show all (${count(ids.length - first)} more tokens)`);
    into.append(more);
  }
}

function appendLines(token, text) {
  text.split("\n").forEach((line, k) => {
    if (k) token.append(h("span.newline", { "aria-hidden": "true" }, "↵"), "\n");
    if (line) token.append(line);
  });
}

/** The element of an episode. `repaint(mark, largest)` colours its tokens anew. */
function episodePane(run, row, episode) {
  const turns = episode.turns.map((turn, k) => turnBlock(episode, turn, k));
  const pane = h("article.episode", { "aria-label": `Episode ${run.idOf(row)}` },
    episodeHead(run, row, episode),
    promptBlock(episode),
    turns,
    h("p.ending", {}, h("strong", {}, `Stopped: ${words(run.get("stop", row))}. `), VIEW.index.stop_reasons[run.get("stop", row)] || ""),
    episode.error ? h("pre.error", {}, asText(episode.error)) : null,
  );
  let painted = null;
  const repaint = (mark, largest) => {
    painted = [mark, largest];
    const values = valuesOf(episode, mark);
    const any = values.some((value) => value !== null);
    for (const token of pane.querySelectorAll(".t[data-k]")) {
      const k = Number(token.dataset.k);
      if (turnOf(episode, k) === null) token.className = "t given";
      else if (any) paint(token, mark, values[k], largest);
      else token.className = "t";
    }
  };
  pane.addEventListener("grown", () => painted && repaint(...painted));
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
  return h(`span.badge.${outcome(run, row)}`, { title: text, "aria-label": text }, sign);
}

function episodeHead(run, row, episode) {
  const facts = [
    ["return", number(run.get("return", row))],
    ["turns", number(run.get("num_turns", row))],
    ["tokens", count(episode.ids.length)],
    ["environment", run.environment(row)],
    ["seed", run.get("seed", row)],
    ["group", run.get("group", row)],
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

function messageBlock(role, content) {
  return h("section.message", {}, h("h4", {}, role), longText(asText(content), `the message of ${role}`));
}

function promptBlock(episode) {
  const { prompt } = episode;
  const messages = Array.isArray(prompt) ? prompt : [{ role: "prompt", content: prompt }];
  const info = asText(episode.reset_info);
  return h("section.prompt", { "aria-label": "Prompt" },
    messages.map((message) => messageBlock(asText(message?.role ?? "prompt"), message?.content ?? message)),
    hasContent(episode.reset_info) ? h("details", {}, h("summary", {}, "info of reset"), longText(info, "the info of reset")) : null,
    episode.prompt_ids?.length ? tokensOnDemand(`${count(episode.prompt_ids.length)} prompt tokens`, (box) =>
      showTokens(box, { ids: episode.prompt_ids, pieces: episode.pieces }, 0, episode.prompt_ids.length), "foreign") : null);
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
      box.dispatchEvent(new CustomEvent("grown", { bubbles: true }));
    },
  }, h("summary", {}, title), box);
}

function turnBlock(episode, turn, k) {
  const next = episode.turns[k + 1]?.start ?? episode.ids.length;
  const facts = [
    ["reward", signed(turn.reward)], ["return", number(turn.return)], ["advantage", signed(turn.advantage)], ["value", number(turn.value)],
  ].filter(([name]) => turn[name] !== null && turn[name] !== undefined);
  const tokens = h("div.tokens", { role: "group", "aria-label": `Tokens of turn ${k + 1}`, dir: "auto" });
  if (turn.start !== null && turn.start !== undefined && turn.end <= episode.ids.length) showTokens(tokens, episode, turn.start, turn.end);
  const unknown = tokens.querySelector(".id") !== null;
  const cut = turn.finish_reason === "length" ? h("span.badge.cut", { title: "The answer ended at a token limit" }, "cut at the token limit") : null;
  const answered = turn.observation;
  return h("section.turn", { id: `turn-${k}`, "--hue": `var(--turn-${k % 6})`, "aria-label": `Turn ${k + 1}` },
    h("h3", {}, h("span.number", {}, String(k + 1)), h("span.who", {}, "model"), cut,
      h("span.numbers", {}, facts.map(([name, text]) => h("span", {}, `${name} `, h("b", {}, text))))),
    unknown || !tokens.childNodes.length ? longText(asText(turn.text), `turn ${k + 1}`) : null,
    tokens,
    answered === null || answered === undefined ? null
      : Array.isArray(answered) ? answered.map((message) => messageBlock(`environment (${asText(message?.role ?? "message")})`, message?.content ?? message))
      : messageBlock("environment", answered),
    hasContent(turn.info) ? h("details.info", {}, h("summary", {}, "info"), longText(asText(turn.info), `the info of turn ${k + 1}`)) : null,
    turn.end < next ? tokensOnDemand(`${count(next - turn.end)} tokens between the actions`, (box) => showTokens(box, episode, turn.end, next)) : null);
}

/** Show what is known of a token beside the page. */
function showToken(episode, k, element) {
  for (const one of document.querySelectorAll(".t.at")) one.classList.remove("at");
  element.classList.add("at");
  const foreign = element.closest(".foreign") !== null;
  const id = foreign ? episode.prompt_ids[k] : episode.ids[k];
  const [bytes, special] = episode.pieces[id] || ["", 0];
  const turn = foreign ? null : turnOf(episode, k);
  const hex = [...bytes].map((byte) => byte.charCodeAt(0).toString(16).toUpperCase().padStart(2, "0")).join(" ");
  const facts = [
    ["token", `${id}${special ? " (special)" : ""}`], ["bytes", hex.length > 60 ? `${hex.slice(0, 60)} …` : hex || "unknown"],
    ["position", k], ["turn", turn === null ? "none: not sampled" : turn + 1],
  ];
  if (turn !== null) {
    facts.push(["sampler's log-prob", number(at(episode.sampling_logprobs, k), 4)], ["trainer's log-prob", number(at(episode.logprobs, k), 4)]);
    for (const mark of ["gap", "advantage", "ratio", "clipped", "value", "kl"]) {
      const value = MARKS[mark].of(episode, k);
      facts.push([MARKS[mark].label, typeof value === "boolean" ? (value ? "yes" : "no") : number(value, 4)]);
    }
  }
  const panel = document.getElementById("token");
  panel.hidden = false;
  panel.replaceChildren(h("dl", {}, facts.map(([name, value]) => [h("dt", {}, name), h("dd", {}, String(value))])));
}
