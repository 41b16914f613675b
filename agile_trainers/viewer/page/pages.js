// The pages: a step, a group, an episode, and comparisons.

// ------------------------------------------------------------------------------------------------------------ a step

async function stepPage(section) {
  const { run } = section;
  const [outlines, figures] = await Promise.all([run.outlines(section), run.figures(section)]);
  const largest = largestAdvantage(outlines || []);
  const kept = rowsOf(section).filter((row) => passes(run, row));
  const slider = h("input", {
    type: "range", min: 0, max: run.sections.length - 1, value: section.place, "aria-label": "Step",
    oninput: (event) => go(`step/${run.sections[event.target.value].id}`),
  });
  const shown = run.groups(section)
    .map((group) => ({ ...group, all: group.rows, rows: group.rows.filter((row) => passes(run, row)) }))
    .filter(({ rows }) => rows.length);
  const grouped = shown.some(({ name }) => name !== null);
  const cards = h(grouped ? "div.groups" : "div.list");
  const append = (from, size) => cards.append(...shown.slice(from, from + size).map((group) => groupCard(section, group, outlines, largest)));
  const page = grouped ? 60 : 300;
  append(0, page);
  return [
    stepTitle(section),
    h("p.steps", {},
      h("button", { onclick: () => move(-1), disabled: section.place === 0 }, "← previous"), slider,
      h("button", { onclick: () => move(1), disabled: section.place === run.sections.length - 1 }, "next →"),
      h("a.button", { href: `#compare/${VIEW.opposite(section).id}/${section.id}` }, "compare")),
    figureLine(summary(run, kept), clipShare(kept.map((row) => figures?.[row - section.first]))),
    outlines ? null : numbersOnly(),
    h("h2", {}, grouped ? `Groups (${shown.length})` : `Episodes (${shown.length})`,
      grouped ? h("span.note", {}, "cells are turns: colour is advantage, text is reward") : null),
    shown.length ? cards : h("p.note", {}, "No episode passes the filters."),
    shown.length > page ? h("button.more", {
      onclick: (event) => {
        event.target.remove();
        append(page, shown.length);
      },
    }, `show all (${shown.length - page} more)`) : null,
  ];
}

const largestAdvantage = (outlines) => outlines.reduce((largest, { turns }) =>
  turns.reduce((most, { advantage }) => Math.max(most, Math.abs(finite(advantage) ?? 0)), largest), 0);

function stepTitle(section, after = null) {
  const { run } = section;
  const name = capital(section.label);
  return h("h1", {}, h("a", { href: `#run/${run.id}` }, run.label), " › ", after ? h("a", { href: `#step/${section.id}` }, name) : name, after ? ` › ${after}` : null);
}

const numbersOnly = () => h("p.note", { role: "note" },
  "The texts and tokens of these episodes are not in the file, only their numbers. agile-trainers view --megabytes with a larger number includes more.");

function figureLine(figures, clip = null) {
  const facts = [["episodes", figures.size], ["return", number(figures.return)], ["success", percent(figures.success)],
    ["turns", number(figures.turns)], ["tokens", number(figures.tokens)], ...(clip === null ? [] : [["clipped tokens", percent(clip)]]),
    ...Object.entries(figures.stops).map(([name, value]) => [words(name), value])];
  return h("dl.facts", {}, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, String(value)))));
}

function groupCard(section, group, outlines, largest) {
  const { run } = section;
  const members = group.rows.map((row) => memberLine(run, row, outlines?.[row - section.first], largest));
  if (group.name === null) return h("div.member-alone", {}, members);
  const figures = summary(run, group.rows);
  const outline = outlines?.[group.rows[0] - section.first];
  const zero = outlines && isZeroAdvantage(run, group.all.map((row) => outlines[row - section.first]));
  const clip = clipShare(group.rows.map((row) => ({ clip: run.figure("clip", row) })));
  const about = outline ? outline.row || outline.prompt || "" : "";
  return h("article.card", {},
    h("h3", {}, h("a", { href: `#group/${section.id}/${group.name}` }, `Group ${group.name}`),
      h("span.numbers", {}, h("span", {}, "return ", h("b", {}, number(figures.return))), figures.success === null ? null : h("span", {}, "success ", h("b", {}, percent(figures.success))),
        clip === null ? null : h("span", {}, "clipped ", h("b", {}, percent(clip))))),
    h("p.note", { title: about },
      zero ? h("span.badge.zero", { title: whyNoAdvantage(run, section, group.all, group.all.map((row) => outlines[row - section.first])) ?? "No turn of any member has an advantage" }, "zero-advantage group") : null,
      [run.environment(group.rows[0]), about].filter(Boolean).join(" · ")),
    members);
}

function memberLine(run, row, outline, largest) {
  const label = [`member ${run.get("member", row) ?? run.idOf(row)}`, `return ${number(run.get("return", row))}`, words(run.get("stop", row))].join(", ");
  const said = outline?.turns.map(({ text }) => text).filter(Boolean).join(" → ");
  return h("a.member", { href: `#episode/${run.id}/${run.idOf(row)}`, title: label },
    h("span.hidden", {}, `member ${run.get("member", row) ?? run.idOf(row)}: `), badge(run, row), h("span.figure", {}, number(run.get("return", row))),
    outline ? turnStrip(outline.turns, largest) : h("span.note", {}, `${run.get("num_turns", row)} turns`),
    said ? h("span.snippet", { title: shortened(said, 1000) }, shortened(said, 300)) : null,
    h("span.stop", {}, words(run.get("stop", row))));
}

// ----------------------------------------------------------------------------------------------------------- a group

async function groupPage(section, name) {
  const { run } = section;
  const group = run.groups(section).find((one) => one.name === name);
  if (!group) throw new Error(`${capital(section.label)} has no group ${name}.`);
  const [outlines, figures] = await Promise.all([run.outlines(section), run.figures(section)]);
  if (!outlines) return [stepTitle(section, `Group ${name}`), numbersOnly()];
  const rows = group.rows.filter((row) => passes(run, row));
  if (VIEW.sorted) rows.sort((a, b) => run.get("return", b) - run.get("return", a));
  const of = (row) => outlines[row - section.first];
  const largest = largestAdvantage(rows.map(of));
  const clipOf = (row) => clipShare([figures[row - section.first]]);
  const why = whyNoAdvantage(run, section, group.rows, group.rows.map(of));
  const longest = Math.max(0, ...rows.map((row) => of(row).turns.length));
  const head = h("tr", {}, h("td"), rows.map((row) => h("th", { scope: "col" },
    h("a", { href: `#episode/${run.id}/${run.idOf(row)}` }, badge(run, row), ` member ${run.get("member", row)}`),
    h("span.figure", {}, `return ${number(run.get("return", row))}`),
    clipOf(row) === null ? null : h("span.note", {}, `clipped ${percent(clipOf(row))}`))));
  const lines = Array.from({ length: longest }, (_, k) => h("tr", {}, h("th", { scope: "row" }, `turn ${k + 1}`),
    rows.map((row) => {
      const turn = of(row).turns[k];
      if (!turn) return h("td.absent");
      const cell = h("div.said", {}, turn.text ? h("span.text", {}, turn.text) : null,
        h("span.numbers", {}, h("span", {}, "r ", h("b", {}, signed(turn.reward))), h("span", {}, "A ", h("b", {}, signed(turn.advantage)))));
      paint(cell, "advantage", turn.advantage, largest);
      return h("td", {}, cell, turn.observation ? h("div.answer", {}, turn.observation) : null);
    })));
  const ends = h("tr", {}, h("th", { scope: "row" }, "end"), rows.map((row) => h("td", {}, words(run.get("stop", row)))));
  const start = rows.length ? of(rows[0]) : null;
  return [
    stepTitle(section, `Group ${name}`),
    why ? h("p.why", { role: "note" }, h("b", {}, "No advantage. "), why) : null,
    figureLine(summary(run, rows), clipShare(rows.map((row) => figures[row - section.first]))),
    start ? h("div.message", {}, h("p.role", {}, ["all start from", start.row].filter(Boolean).join(" ")), h("div.text", {}, start.prompt || "")) : null,
    h("label.inline", {}, h("input", {
      type: "checkbox", checked: VIEW.sorted, onchange: (event) => {
        VIEW.sorted = event.target.checked;
        render();
      },
    }), " best first"),
    h("p.legend", {}, h("span.scale", {}, h("span", {}, signed(-largest)), h("i.ramp.signed"), h("span", {}, signed(largest))), "Colour is the turn's advantage."),
    h("div.wide", {}, h("table.side", {}, h("thead", {}, head), h("tbody", {}, lines, ends))),
  ];
}

// -------------------------------------------------------------------------------------------------------- an episode

async function episodePage(run, row) {
  const section = run.sectionOf(row);
  const [pane] = await panes([[run, row]]);
  const group = run.groupOf(row);
  const member = run.get("member", row);
  const title = member === null || member === undefined ? `Episode ${run.idOf(row)}` : `Member ${member}`;
  return [
    h("h1", {}, h("a", { href: `#run/${run.id}` }, run.label), " › ",
      h("a", { href: `#step/${section.id}` }, capital(section.label)), " › ",
      group === null ? null : [h("a", { href: `#group/${section.id}/${group}` }, `Group ${group}`), " › "], title),
    h("p.steps", {},
      h("button", { onclick: () => move(-1) }, "← previous"), h("button", { onclick: () => move(1) }, "next →"),
      h("button", { onclick: () => pin(run, row) }, VIEW.pinned ? "compare with the pinned" : "pin to compare")),
    ...pane,
  ];
}

/** Episodes beside each other, with one chooser and one scale for the colours of all. */
async function panes(places) {
  const loaded = await Promise.all(places.map(([run, row]) => run.episode(row)));
  const made = places.map(([run, row], k) => (loaded[k] ? episodePane(run, row, loaded[k]) : { element: h("article.episode", {}, episodeHead(run, row, { ids: [] }), numbersOnly()), repaint() {} }));
  const here = loaded.filter(Boolean);
  const note = h("div");
  const colour = () => {
    const mark = currentMark(here);
    const largest = extent(here, mark);
    note.replaceChildren(legend(here, mark, largest));
    made.forEach(({ repaint }) => repaint(mark, largest));
    chooser.querySelectorAll("button").forEach((button) => button.setAttribute("aria-pressed", button.value === mark));
  };
  const chooser = h("p.chooser", { role: "group", "aria-label": "Colour tokens by" }, "colour by ",
    Object.entries(MARKS).map(([mark, { label }], k) => h("button", {
      value: mark, title: `key ${k + 1}`, onclick: () => {
        VIEW.mark = mark;
        colour();
      },
    }, label)));
  VIEW.onMark = colour;
  colour();
  return [[here.length ? [chooser, note] : null, h(`div.panes.of-${places.length}`, {}, made.map(({ element }) => element))].flat()];
}

// -------------------------------------------------------------------------------------------------------- comparison

function sectionChooser(section, change) {
  const option = (one) => h("option", { value: one.id, selected: one === section },
    `${one.label}${one.run.hasEpisodes(one) ? "" : " (numbers only)"}`);
  return h("select", { "aria-label": `Run and step, now ${section.run.label}`, onchange: (event) => change(event.target.value) },
    VIEW.runs.map((run) => h("optgroup", { label: run.label }, run.sections.map(option))));
}

async function comparePage(left, right) {
  const sides = [left, right];
  const outlines = await Promise.all(sides.map((section) => section.run.outlines(section)));
  const starts = await Promise.all(sides.map((section) => section.run.figures(section)));
  const choose = (k) => (id) => go(`compare/${(k ? [left.id, id] : [id, right.id]).join("/")}`);
  const figures = sides.map((section) => summary(section.run, rowsOf(section).filter((row) => passes(section.run, row))));
  const largest = largestAdvantage(outlines.flatMap((outline) => outline || []));
  const pairs = matched(sides, outlines, starts);
  const rate = (k, rows) => summary(sides[k].run, rows).success;
  const both = pairs.list.filter(({ rows }) => rows[0].length && rows[1].length);
  const better = [both.filter(({ rows }) => rate(0, rows[0]) > rate(1, rows[1])), both.filter(({ rows }) => rate(1, rows[1]) > rate(0, rows[0]))];
  if (VIEW.differing) pairs.list = [...better[1], ...better[0]];
  const line = (name, value, format) => {
    const [a, b] = figures.map(value);
    const change = typeof a === "number" && typeof b === "number" ? b - a : null;
    const size = change === null ? "" : format === percent ? `${number(100 * Math.abs(change))} points` : number(Math.abs(change));
    return h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, format(a)), h("td", {}, format(b)),
      h("td", {}, change === null ? "–" : change ? `${change > 0 ? "▲ +" : "▼ −"}${size}` : "="));
  };
  const stops = [...new Set(figures.flatMap((one) => Object.keys(one.stops)))];
  const cell = (k, rows) => h("td", {}, rows.length
    ? h("div.card", {}, rows.slice(0, 16).map((row) => memberLine(sides[k].run, row, outlines[k]?.[row - sides[k].first], largest)), rows.length > 16 ? h("span.note", {}, `and ${rows.length - 16} more`) : null)
    : h("span.note", {}, "none"));
  const body = h("tbody");
  const append = (from, size) => body.append(...pairs.list.slice(from, from + size).map(({ title, rows }) =>
    h("tr", {}, h("th", { scope: "row" }, title), cell(0, rows[0]), cell(1, rows[1]),
      h("td", {}, rows[0].length && rows[1].length ? h("a.button", {
        href: `#pair/${sides.map((section, k) => `${section.run.id}/${section.run.idOf(rows[k][0])}`).join("/")}`,
        "aria-label": `side by side: the first episodes of ${title}`,
      }, "side by side") : null))));
  append(0, 100);
  return [
    h("h1", {}, "Comparison"),
    h("div.wide", {}, h("table.compared", {},
      h("thead", {}, h("tr", {}, h("td"), sides.map((section, k) => h("th", { scope: "col" }, VIEW.runs.length > 1 ? h("div", {}, section.run.label) : null, sectionChooser(section, choose(k)))), h("th", { scope: "col" }, "change"))),
      h("tbody", {}, line("episodes", (one) => one.size, number), line("return", (one) => one.return, number), line("success", (one) => one.success, percent),
        line("turns", (one) => one.turns, number), line("tokens", (one) => one.tokens, number),
        stops.map((name) => line(words(name), (one) => (one.stops[name] || 0) / (one.size || 1), percent))))),
    outlines.every(Boolean) ? null : numbersOnly(),
    h("h2", {}, "Episodes", h("span.note", {}, pairs.about)),
    h("p.steps", {}, `Of ${both.length} pairs, ${better[0].length} succeed more often on the left, ${better[1].length} on the right.`,
      h("label.inline", {}, h("input", {
        type: "checkbox", checked: VIEW.differing, onchange: (event) => {
          VIEW.differing = event.target.checked;
          render({ keep: true });
        },
      }), " only these")),
    h("div.wide", {}, h("table.side.pairs", {}, body)),
    pairs.list.length > 100 ? h("button.more", {
      onclick: (event) => {
        event.target.remove();
        append(100, pairs.list.length);
      },
    }, `show all (${pairs.list.length - 100} more)`) : null,
  ];
}

/** Rows of two sections by what they start from: row and seed if some agree, else the row, else by order. */
function matched(sides, outlines, starts) {
  const kept = sides.map((section) => rowsOf(section).filter((row) => passes(section.run, row)));
  const places = sides.map(({ run }, k) => new Map(run.groups(sides[k]).flatMap(({ rows }, place) => rows.map((row) => [row, place]))));
  const start = (k, row) => starts[k]?.[row - sides[k].first]?.start;
  const ways = [
    ["matched by start and seed", (k, row) => start(k, row) && `${start(k, row)} ${sides[k].run.get("seed", row)}`],
    ["matched by start", start],
    ["matched by order: they do not start alike", (k, row) => `group ${places[k].get(row)}`],
  ];
  for (const [about, key] of ways) {
    const found = new Map();
    kept.forEach((rows, k) => rows.forEach((row) => {
      const name = key(k, row);
      if (!name) return;
      if (!found.has(name)) found.set(name, [[], []]);
      found.get(name)[k].push(row);
    }));
    const list = [...found].filter(([, rows]) => rows[0].length && rows[1].length);
    if (list.length || about === ways[2][0]) {
      const title = (name, rows) => {
        const k = rows[0].length ? 0 : 1;
        const outline = outlines[k]?.[rows[k][0] - sides[k].first];
        return outline?.row || (about === ways[2][0] ? name : `seed ${sides[k].run.get("seed", rows[k][0])}`);
      };
      const all = [...list, ...[...found].filter(([, rows]) => !rows[0].length || !rows[1].length)];
      return { about, list: all.map(([name, rows]) => ({ title: title(name, rows), rows })) };
    }
  }
}

async function pairPage(places) {
  const [pane] = await panes(places);
  const link = ([run, row]) => {
    const section = run.sectionOf(row);
    return h("a", { href: `#episode/${run.id}/${run.idOf(row)}` }, `${VIEW.runs.length > 1 ? `${run.label} · ` : ""}${section.label} · episode ${run.idOf(row)}`);
  };
  return [h("h1", {}, "Side by side"), h("p.steps", {}, link(places[0]), " and ", link(places[1])), ...pane];
}
