// The episodes of a run in one list, which is searched, filtered and sorted. All choices are in the address.

/** What the list is sorted by: how a row's value is found, the direction of the first click (1: lowest first), and its text. */
const SORTS = {
  step: { label: "step", first: 1, of: (run, row) => row },
  return: { label: "return", first: -1, of: (run, row) => run.get("return", row), text: number },
  change: { label: "change", first: 1, of: (run, row) => run.changes?.[row] ?? null, text: signed, about: "Return minus the mean return of the same start at the earlier step" },
  clip: { label: "clipped", first: -1, of: (run, row) => clipShare([{ clip: run.figure("clip", row) }]), text: percent, about: "Share of the episode's tokens that the loss clipped" },
  low: { label: "lowest advantage", first: 1, of: (run, row) => run.figure("low", row), text: signed },
  turns: { label: "turns", first: -1, of: (run, row) => run.get("num_turns", row), text: number },
  tokens: { label: "tokens", first: -1, of: (run, row) => run.get("num_tokens", row), text: number },
};
const LISTED = 100;

/** The sort of the address: its name and direction. */
function sortNow() {
  const name = VIEW.filters.sort.replace(/^-/, "");
  const known = Object.hasOwn(SORTS, name) ? name : "step";
  return [known, VIEW.filters.sort.startsWith("-") ? -1 : 1];
}

/** An expression for a text as it is, in upper or lower case. */
const literally = (text) => new RegExp(text.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&"), "iu");

/**
 * How each episode's return differs from that of its start earlier: at the given step, or at the last step or evaluation before that
 * played it.
 * Its start is the environment and the dataset row or prompt; where an earlier step played it with the same seed, that counts.
 */
function changesOf(run, since) {
  const found = new Array(run.size).fill(null);
  for (const phase of ["train", "eval"]) {
    const before = new Map();
    for (const section of run.sections.filter((one) => one.phase === phase)) {
      const means = new Map();
      for (const row of rowsOf(section)) {
        const [start, value] = [run.figure("start", row), run.get("return", row)];
        if (start === null || typeof value !== "number" || FAILED.has(run.get("stop", row))) continue;
        for (const key of [`${start} ${run.get("seed", row)}`, start]) {
          const [sum, size] = means.get(key) || [0, 0];
          means.set(key, [sum + value, size + 1]);
        }
        const earlier = before.get(`${start} ${run.get("seed", row)}`) ?? before.get(start);
        if (earlier !== undefined) found[row] = value - earlier;
      }
      if (since === "" || String(section.step) === since) for (const [key, [sum, size]] of means) before.set(key, sum / size);
    }
  }
  return found;
}

/** Load the figures of all episodes that are in the file, and what is computed from them. */
async function loadFigures(run) {
  await Promise.all(run.sections.map((section) => run.figures(section)));
  run.changes = changesOf(run, VIEW.filters.since);
}

/** Unpack all texts at the same time; a server reads them one after another. */
function loadTexts(run) {
  if (!run.live) for (const section of run.sections) run.texts(section).catch(() => null);
}

/** Search the texts of a run: the place of the first match by row, for rows that pass the filters. Calls `now` after each step. */
async function searched(run, query, now = () => true) {
  const wanted = literally(query);
  const found = new Map();
  loadTexts(run);
  for (const section of run.sections) {
    const texts = await run.texts(section);
    if (!now(found)) return null; // another search began
    rowsOf(section).forEach((row, k) => {
      if (!texts || !passes(run, row)) return;
      for (const [place, text] of texts[k].entries()) {
        const match = wanted.exec(text);
        if (!match) continue;
        found.set(row, { place, text, at: match.index, size: match[0].length });
        return;
      }
    });
  }
  return found;
}

/** The rows that are listed, in order: those that pass, of a search those that match. */
function sortedRows(run, matches) {
  const [name, direction] = sortNow();
  const rows = Array.from({ length: run.size }, (_, row) => row).filter((row) => passes(run, row) && (!matches || matches.has(row)));
  const value = new Map(rows.map((row) => [row, SORTS[name].of(run, row)]));
  const missing = (row) => typeof value.get(row) !== "number";
  return rows.sort((a, b) => missing(a) - missing(b) || (missing(a) ? 0 : direction * (value.get(a) - value.get(b))) || a - b);
}

/** The rows of the list that the address describes. */
async function listedRows(run) {
  if (["change", "clip", "low"].includes(sortNow()[0])) await loadFigures(run);
  return sortedRows(run, VIEW.filters.q ? await searched(run, VIEW.filters.q) : null);
}

const nameOfText = (place, size) => (place === 0 ? "prompt" : place === size - 1 ? "error"
  : `${place % 2 ? "turn" : "answer"} ${Math.ceil(place / 2)}`);

/** The text around a match, or the first action. */
function snippet(texts, match) {
  if (!match) return shortened(texts?.[1] || "", 200);
  const { place, text, at, size } = match;
  const from = Math.max(0, at - 50);
  return [h("span.note", {}, `${nameOfText(place, texts?.length ?? Infinity)}: `), from ? "…" : "", text.slice(from, at),
    h("mark", {}, text.slice(at, at + size)), text.slice(at + size, at + size + 120), at + size + 120 < text.length ? "…" : ""];
}

async function episodesPage(run) {
  const state = { matches: null, rows: [], searching: null };
  const body = h("tbody");
  const status = h("p.note", { role: "status", id: "found" });
  const charts = h("div.charts");
  const rest = h("div");
  const head = h("tr");

  const line = (row) => {
    const section = run.sectionOf(row);
    const text = h("td.snippet-cell", {});
    run.texts(section).catch(() => null).then((texts) => text.append(h("span.snippet", { dir: "auto" }, snippet(texts?.[row - section.first], state.matches?.get(row)))));
    const group = run.groupOf(row);
    const place = `${section.label}${group === null ? "" : ` · group ${group}`}`;
    return h("tr", {},
      h("th", { scope: "row" }, h("a", { href: `#episode/${run.id}/${run.idOf(row)}` }, badge(run, row), ` ${place} · ${run.get("member", row) ?? run.idOf(row)}`)),
      Object.entries(SORTS).slice(1).map(([name, { of, text: shown }]) => h(`td.is-${name}`, {}, shown(of(run, row)))),
      h("td.is-stop", {}, words(run.get("stop", row))), text);
  };
  const append = (size) => {
    const from = body.childElementCount;
    body.append(...state.rows.slice(from, from + size).map(line));
    const left = state.rows.length - body.childElementCount;
    rest.replaceChildren(...(left > 0 ? [h("button.more", { onclick: () => append(LISTED) }, `show ${Math.min(left, LISTED)} more of ${count(left)}`)] : []));
  };
  const title = ([name, { label, first, about }]) => {
    const [now, direction] = sortNow();
    const on = now === name;
    const next = on ? -direction : first;
    return h(`th.is-${name}`, { scope: "col", "aria-sort": on ? (direction > 0 ? "ascending" : "descending") : null, title: about },
      h("button.sort", { onclick: () => choose({ sort: `${next < 0 ? "-" : ""}${name}` }) }, label, on ? h("span", { "aria-hidden": "true" }, direction > 0 ? " ▲" : " ▼") : null));
  };
  const drawChart = () => {
    const matched = new Set(state.rows);
    const of = (section) => rowsOf(section).filter((row) => matched.has(row));
    const made = [
      { title: "Listed episodes", format: percent, about: "Share of the step's episodes that are in the list", counted: (section) => of(section).length / section.size },
      { title: "Return", format: (y) => number(y), about: "Mean return of the listed episodes", counted: (section) => summary(run, of(section)).return },
      { title: "Success", format: percent, about: "Share of the listed episodes that succeed", counted: (section) => summary(run, of(section)).success },
      { title: "Clipped share", format: percent, about: "Share of clipped tokens of the listed episodes", counted: (section) => clipShare(of(section).map((row) => ({ clip: run.figure("clip", row) }))) },
    ];
    const phase = run.sections.some((section) => section.phase === "train") ? "train" : "eval";
    drawPoints(charts, made.map((chart) => ({ ...chart, series: [{ label: chart.title, points: run.counted(phase, chart.counted) }] })), (step) => {
      const found = nearest(run.sections.filter((section) => section.phase === phase).map((one) => [one.step, one]), step);
      if (found) go(`step/${found[1].id}`);
    }, 290);
  };
  const draw = () => {
    state.rows = sortedRows(run, state.matches);
    head.replaceChildren(...[title(["step", SORTS.step]), ...Object.entries(SORTS).slice(1).map(title), h("th.is-stop", { scope: "col" }, "stopped"), h("th", { scope: "col" }, "text")]);
    body.replaceChildren();
    append(LISTED);
    const unread = run.sections.filter((section) => !run.hasEpisodes(section)).reduce((sum, { size }) => sum + size, 0);
    status.replaceChildren(`${count(state.rows.length)} of ${count(run.size)} episodes`,
      unread ? `. Of ${count(unread)} the file has the numbers only: they are not searched.` : "");
    drawChart();
  };
  const search = async () => {
    const query = VIEW.filters.q;
    const mine = (state.searching = {});
    state.matches = null;
    if (query) {
      status.replaceChildren("Searching …");
      const found = await searched(run, query, () => state.searching === mine).catch((error) => {
        status.replaceChildren(error.message);
        return null;
      });
      if (!found) return;
      state.matches = found;
    }
    draw();
    document.body.dataset.found = query;
  };
  const choose = (changes) => {
    Object.assign(VIEW.filters, changes);
    history.replaceState(null, "", addressOf(`episodes/${run.id}`));
    document.body.dataset.ready = location.hash;
    bar();
    if ("since" in changes) run.changes = changesOf(run, VIEW.filters.since);
    if ("q" in changes) search();
    else draw();
  };
  let waiting;
  const input = h("input", {
    type: "search", id: "search", placeholder: "search in the texts", "aria-label": "Search in the texts of the episodes",
    onfocus: () => loadTexts(run),
    oninput: (event) => {
      clearTimeout(waiting);
      waiting = setTimeout(() => choose({ q: event.target.value }), 150);
    },
  });
  input.value = VIEW.filters.q;
  const since = h("select", { onchange: (event) => choose({ since: event.target.value }) },
    h("option", { value: "" }, "the step that last played the same start"),
    [...new Set(run.sections.map(({ step }) => String(step)))].map((step) => h("option", { value: step, selected: VIEW.filters.since === step }, `step ${step}`)));
  const page = [
    h("h1", {}, h("a", { href: `#run/${run.id}` }, run.label), " › Episodes"),
    h("p.steps", {}, input, run.sections.length > 1 ? h("label.inline", {}, "change since ", since) : null),
    status, run.sections.length > 1 ? h("details", { open: innerWidth > 760, ontoggle: () => VIEW.onShown?.() }, h("summary", {}, "the list by step"), charts) : null,
    h("div.wide", { tabindex: 0, role: "region", "aria-label": "Episodes" }, h("table.episodes", {}, h("thead", {}, head), body)), rest,
  ];
  const [sorted] = sortNow();
  const needed = ["change", "clip", "low"].includes(sorted);
  const loading = loadFigures(run);
  if (needed || !run.live) await loading; // a server reads every file for them
  else loading.then(() => VIEW.page?.name === "episodes" && draw());
  await search();
  VIEW.onShown = drawChart;
  return page;
}
