// Episodes of several paths: which turn goes on from which, where a path begins and why, and whole prompts.

/** Whether an episode's turns do more than go on from each other. */
const hasPaths = (episode) => episode.turns.some((turn, k) => typeof turn.path === "number" && (turn.parent ?? -1) !== k - 1);

/** The first turn that goes on from each turn; none for the others. */
function following(turns) {
  const found = new Map();
  turns.forEach((turn, k) => {
    if (typeof turn.parent === "number" && !found.has(turn.parent)) found.set(turn.parent, k);
  });
  return found;
}

/** The turns of the last turn's conversation. One whose messages begin anew holds those before it in them. */
function lastConversation(turns) {
  const found = new Set();
  for (let k = turns.length - 1; typeof k === "number" && k >= 0; k = turns[k].messages ? null : turns[k].parent) found.add(k);
  return found;
}

/** The column of each turn: it stays in its parent's unless another turn went on there; columns of ended paths are used again. */
function columnsOf(turns) {
  const next = following(turns);
  const columns = [];
  const taken = []; // of each column, the last row up to which it is used
  turns.forEach((turn, k) => {
    const parent = typeof turn.parent === "number" ? turn.parent : null;
    if (parent !== null && next.get(parent) === k) {
      columns.push(columns[parent]);
      return;
    }
    let end = k;
    while (next.has(end)) end = next.get(end);
    const free = taken.findIndex((row) => row < (parent ?? k));
    const column = free < 0 ? taken.length : free;
    taken[column] = end;
    columns.push(column);
  });
  return columns;
}

const list = (turns) => `${turns.length > 1 ? "turns" : "turn"} ${turns.slice(0, 6).map((k) => k + 1).join(", ")}${turns.length > 6 ? ` and ${turns.length - 6} more` : ""}`;

const ASKED = "not for the environment";

/** What the endpoint of an agent noted of the call that a turn answers; null of other turns. */
function callOf(turn) {
  const call = turn.info?.call;
  return call && typeof call === "object" && Number.isInteger(call.number) ? call : null;
}

/** The indices of turns in the order in which they were asked for. */
function inTime(turns) {
  const order = turns.map((_, k) => k);
  return turns.every(callOf) ? order.sort((one, other) => callOf(turns[one]).number - callOf(turns[other]).number || one - other) : order;
}

/** Whether the first turn was asked for first, so that its prompt is the one above all turns. */
const startsWithFirst = (episode) => !episode.turns.length || inTime(episode.turns)[0] === 0;

const times = (value) => (value === 1 ? "once" : `${count(value)} times`);

/** What happened to an agent's call, as short texts: where its prompt parts from an earlier one, and what its client did. */
function callNotes(turn) {
  const { parts, repeated, hung_up: hungUp } = callOf(turn) || {};
  const quoted = (text) => `“${shortened(asText(text ?? ""), 40)}”`;
  return [
    parts && Number.isInteger(parts.token) ? `parts from an earlier call after ${count(parts.token)} token${parts.token === 1 ? "" : "s"}: ${quoted(parts.was)} became ${quoted(parts.now)}` : null,
    Number.isInteger(repeated) ? `sent again ${times(repeated)}, and answered with this` : null,
    hungUp ? "its client hung up before it had the answer" : null,
  ].filter(Boolean);
}

/** With which tools and by whom a turn of an agent was asked for, and which settings the run decided instead, as short texts. */
function requestNotes(turn) {
  const { client, asked, tools } = callOf(turn) || {};
  const named = Array.isArray(tools) ? tools.map(asText) : [];
  const settings = asked && typeof asked === "object" ? Object.entries(asked).map(([name, value]) => `${name}=${asText(value)}`) : [];
  return [
    named.length ? `with the tool${named.length === 1 ? "" : "s"} ${shortened(named.join(", "))}` : null,
    client ? `asked by ${shortened(asText(client))}` : null,
    settings.length ? `asked for ${shortened(settings.join(", "))}, which the run decides` : null,
  ].filter(Boolean);
}

/** What tells a turn of several paths from one that goes on from the turn before it, as short texts; the first is the program's. */
function originOf(episode, k) {
  const { turns } = episode;
  const turn = turns[k];
  const others = turns.map((_, j) => j).filter((j) => j !== k);
  const same = others.filter((j) => j < k && turn.samePrompt !== null && turns[j].samePrompt === turn.samePrompt);
  // Of an agent's calls nobody notes which reward came before them.
  const atOnce = callOf(turn) ? [] : others.filter((j) => turn.rewarded !== null && turns[j].rewarded === turn.rewarded);
  const again = others.filter((j) => j > k && turn.samePrompt !== null && turns[j].samePrompt === turn.samePrompt && !atOnce.includes(j));
  const last = k === inTime(turns).at(-1);
  const alone = callOf(turn) ? null : turn.seen ? `shares its first ${count(turn.seen)} tokens with earlier turns` : "a prompt of its own";
  return [
    turn.fork ? asText(turn.fork) : null,
    ...callNotes(turn),
    turn.question ? ASKED : null,
    typeof turn.parent === "number" ? `goes on from turn ${turn.parent + 1}` : k && !same.length ? alone : null,
    same.length ? `the same prompt as ${list(same)}` : null,
    atOnce.length ? `at once with ${list(atOnce)}` : null,
    again.length ? `asked again: ${list(again)}` : null,
    last || following(turns).has(k) ? null : "nothing goes on from this answer",
  ].filter(Boolean);
}

/** The clients of an agent's calls, with their numbers; empty for other episodes. */
function clientsOf(turns) {
  const found = new Map();
  for (const turn of turns) {
    const client = callOf(turn)?.client;
    if (client) found.set(shortened(asText(client), 40), (found.get(shortened(asText(client), 40)) || 0) + 1);
  }
  const named = [...found].slice(0, 6).map(([name, calls]) => `${name} (${count(calls)})`);
  return named.length ? `Asked by ${named.join(", ")}. ` : "";
}

const ROW = 40;

/** The turns in order of time, from top to bottom, and their paths, from left to right. `open` shows a turn. */
function pathTree(episode, open) {
  const order = inTime(episode.turns);
  const rowOf = new Map(order.map((k, row) => [k, row]));
  const turns = order.map((k, row) => {
    const parent = rowOf.get(episode.turns[k].parent);
    return { ...episode.turns[k], parent: parent < row ? parent : null };
  });
  const columns = columnsOf(turns);
  const kept = lastConversation(turns);
  const most = Math.max(...columns) + 1;
  const step = Math.min(18, 200 / most);
  const [x, y] = [(k) => 12 + columns[k] * step, (k) => k * ROW + ROW / 2];
  const width = 24 + (most - 1) * step;
  const lines = turns.map((turn, k) => {
    const from = turn.parent;
    if (typeof from !== "number") return null;
    const bend = `C${x(k)},${y(from) + ROW / 2} ${x(k)},${y(from) + ROW / 2} ${x(k)},${y(from) + ROW}`;
    return svg("path", { class: "edge", d: `M${x(from)},${y(from)} ${columns[from] === columns[k] ? "" : bend} L${x(k)},${y(k)}` });
  });
  const dots = turns.map((_, k) => svg("circle", {
    class: kept.has(k) ? "dot" : "dot aside", cx: x(k), cy: y(k), r: 6, "--hue": `var(--turn-${order[k] % 6})`,
  }));
  const rows = turns.map((turn, row) => {
    const k = order[row];
    const [first, ...more] = originOf(episode, k);
    const about = [turn.fork ? h("b", {}, first) : first, ...more].filter(Boolean);
    return h("li", {}, h("button.call", { onclick: () => open(k), title: shortened(asText(turn.text), 1000) },
      h("span.number", { "--hue": `var(--turn-${k % 6})` }, String(k + 1)),
      h("span.snippet", {}, shortened(asText(turn.text), 300) || "(nothing)"),
      h("span.about", {}, about.flatMap((one, place) => (place ? [" · ", one] : [one])))));
  });
  return h("div.tree", { role: "group", "aria-label": "Turns by time and path" },
    h("p.legend", {}, `${count(turns.length)} turns on ${count(Math.max(...turns.map(({ path }) => path ?? 0)) + 1)} paths, in the order in which they were asked for. `,
      clientsOf(turns),
      h("span", {}, h("i.dot-key", { "aria-hidden": "true" }), " in the last turn's conversation"),
      h("span", {}, h("i.dot-key.aside", { "aria-hidden": "true" }), " beside it")),
    h("div.calls", { "--width": `${width}px` },
      svg("svg", { width, height: turns.length * ROW, "aria-hidden": "true" }, lines, dots),
      h("ol", {}, rows)));
}

/** The tokens of a path up to one of them; what it shares with an earlier path is stored there. */
function pathIds(paths, path, length) {
  const parts = [];
  for (let at = path; at !== null && at !== undefined; at = paths[at].of) {
    const { ids, shared } = paths[at];
    if (length > shared) parts.unshift(ids.slice(0, length - shared));
    length = Math.min(length, shared);
  }
  return parts.flat();
}

const SHORT = 1000;

/** Folds with what a turn was sampled after: messages, and the tokens with those apart that earlier turns read or wrote. */
function wholePrompt(episode, turn, k) {
  const messages = Array.isArray(turn.messages) ? turn.messages : null;
  const blocks = () => messages.map((message) => messageBlock(asText(message?.role ?? "message"), message?.content ?? message, episode.images));
  const said = messages && h("details", {
    open: Boolean(callOf(turn)) && JSON.stringify(messages).length <= SHORT, // such as the note that an agent goes on from
    ontoggle: (event) => {
      if (event.target.open && event.target.childNodes.length === 1) event.target.append(...blocks());
    },
  }, h("summary", {}, `${count(messages.length)} message${messages.length === 1 ? "" : "s"} of the prompt`));
  if (!episode.paths || (k === 0 && startsWithFirst(episode))) return [said];
  const { place, seen } = turn;
  const title = `${count(place)} prompt tokens, ${seen === place ? "all" : seen ? count(seen) : "none"} of them as in earlier turns`;
  const show = (box) => {
    const ids = pathIds(episode.paths, turn.path, place);
    const part = (about, start, end) => {
      if (start === end) return;
      const tokens = h("div.tokens.foreign", { dir: "auto" });
      tokens.ids = ids;
      showTokens(tokens, { ids, pieces: episode.pieces }, start, end);
      box.append(h(start ? "div.own" : seen ? "div.shared" : "div.own", {}, h("p.role", {}, about), tokens));
    };
    part(`${count(seen)} tokens as in earlier turns`, 0, seen);
    part(`${count(place - seen)} tokens of this prompt alone`, seen, place);
  };
  return [said, tokensOnDemand(title, show, "whole")];
}

/** The tokens that follow the last answer on its path, such as the observation that ended an episode. */
function afterLast(episode) {
  const last = episode.turns[episode.turns.length - 1];
  if (!episode.paths || !last || typeof last.path !== "number") return null;
  const ids = pathIds(episode.paths, last.path, Infinity);
  const end = last.place + last.end - last.start;
  return end < ids.length ? tokensOnDemand(`${count(ids.length - end)} tokens after the last answer`, (box) => {
    box.ids = ids;
    showTokens(box, { ids, pieces: episode.pieces }, end, ids.length);
  }, "foreign") : null;
}
