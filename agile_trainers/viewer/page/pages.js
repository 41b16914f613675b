// The pages: the run, a step, a group, an episode, and comparisons.

const CHARTS = [
  {
    title: "Return", names: ["return/mean", "eval_return", "reward"], format: (y) => number(y),
    about: "Mean return of the episodes", counted: (section) => summary(section.run, rowsOf(section)).return,
  },
  {
    title: "Success", names: ["success", "eval_success"], format: percent,
    about: "Share of episodes that succeed", counted: (section) => summary(section.run, rowsOf(section)).success,
  },
  { title: "Entropy", names: ["entropy"], format: (y) => number(y), about: "Mean entropy of the policy's tokens, in nats" },
  {
    title: "Clipped share", names: ["clip_ratio/region_mean", "cispo_clip_ratio"], format: percent,
    about: "Share of tokens whose importance ratio was clipped in the update",
  },
  {
    title: "Zero-advantage groups", names: ["zero_advantage_groups"], format: percent,
    about: "Share of groups in which no turn of any member has an advantage",
  },
];

/** Points of a chart for a run: those that were logged, else those counted from its episodes. */
function pointsOf(run, chart) {
  const logged = run.logged(chart.names);
  if (logged.length || !chart.counted) return logged;
  return run.counted(run.sections.some(({ phase }) => phase === "train") ? "train" : "eval", chart.counted);
}

// ----------------------------------------------------------------------------------------------------------- the run

function runPage(run) {
  const against = VIEW.other(run);
  const charts = h("div.charts");
  const draw = () => {
    const shown = [...CHARTS, ...VIEW.extra.map((name) => ({ title: name, names: [name], format: (y) => number(y), about: "As logged" }))];
    const runs = [run, against].filter(Boolean);
    const drawn = shown
      .map((chart) => ({ ...chart, series: runs.map((one) => ({ label: one.label, points: pointsOf(one, chart) })) }))
      .filter((chart) => chart.series.some(({ points }) => points.length > 1));
    const steps = drawn.flatMap((chart) => chart.series.flatMap(({ points }) => points.map(([step]) => step)));
    const range = [Math.min(...steps), Math.max(...steps)];
    const room = charts.clientWidth || 900;
    const columns = Math.max(1, Math.floor(room / 380));
    const width = Math.floor((room - 16 * (columns - 1)) / columns) - 26;
    const pick = (step) => {
      const training = run.sections.filter(({ phase }) => phase === "train");
      // A log at step s is of the update that ended there; its episodes are of the policy before it.
      const sampled = training.length && run.metrics.step ? step - 1 : step;
      const found = nearest((training.length ? training : run.sections).map((one) => [one.step, one]), sampled);
      if (found) go(`step/${found[1].id}`);
    };
    const made = drawn.map((chart) => lineChart(chart, { width, range, pick }));
    for (const chart of made) {
      chart.drawing.addEventListener("mousemove", (event) => made.forEach((one) => one.show(chart.stepAt(event))));
      chart.drawing.addEventListener("mouseleave", () => made.forEach((one) => one.show(null)));
    }
    charts.replaceChildren(...made.map(({ element }) => element));
    if (!made.length) charts.append(figureLine(summary(run, Array.from({ length: run.size }, (_, row) => row))));
  };
  const others = Object.keys(run.metrics).filter((name) => name !== "step" && !CHARTS.some(({ names }) => names.includes(name)) && !VIEW.extra.includes(name));
  const add = h("label.inline", {}, "further metric ", h("select", {
    onchange: (event) => {
      if (event.target.value) VIEW.extra.push(event.target.value);
      render();
    },
  }, h("option", { value: "" }, "choose …"), others.map((name) => h("option", { value: name }, name))));
  const key = against
    ? h("p.key", {}, h("span.key-0", {}, run.label), h("span.key-1", {}, against.label)) : null;
  VIEW.onShown = draw;
  return [
    h("h1", {}, run.label),
    runFacts(run),
    memberTable(run),
    problemList(run),
    findingList(run),
    h("section", { "aria-label": "Timeline" },
      h("h2", {}, run.sections.length > 1 ? "Timeline" : "Summary", run.sections.length > 1 ? h("span.note", {}, "click a step to open it") : null), key, charts, others.length ? add : null),
    stepTable(run),
  ];
}

function runFacts(run) {
  const { options, ...facts } = run.info;
  const shown = ["kind", "algorithm", "model", "environment", "policy", "seed", "started"].filter((name) => hasContent(facts[name]) || facts[name] === 0);
  return [
    h("dl.facts", {}, shown.map((name) => h("div", {}, h("dt", {}, name), h("dd", {}, asText(facts[name]).replace(/^(\d{4}-\d\d-\d\d)T(\d\d:\d\d).*/, "$1 $2"))))),
    hasContent(options) ? h("details", {}, h("summary", {}, "options"),
      h("dl.options", {}, Object.entries(options).map(([name, value]) => [h("dt", {}, name), h("dd", {}, asText(value))]))) : null,
  ];
}

/** The members of the population that the run belongs to, each with a link to its run. */
function memberTable(run) {
  if (!run.info.member) return null;
  const members = VIEW.runs.filter(({ info }) => info.member);
  const names = [...new Set(members.flatMap(({ info }) => Object.keys(info.member.hyperparameters)))];
  const lines = members.map((one) => {
    const { member, parent, hyperparameters, steps, fitness, error, state } = one.info.member;
    return h("tr", { "aria-current": one === run && "true" },
      h("th", { scope: "row" }, h("a", { href: `#run/${one.id}` }, `member ${member}`)),
      h("td", {}, parent === null ? "" : String(parent)),
      names.map((name) => h("td", {}, asText(hyperparameters[name] ?? ""))),
      h("td", {}, String(steps)), h("td", {}, fitness === null ? "" : `${fitness}${error === null ? "" : ` ± ${error}`}`),
      h("td", {}, state));
  });
  const titles = ["member", "copy of", ...names, "steps", run.info.member.measured, ""];
  return h("section", { "aria-label": "Population" }, h("h2", {}, "Population", h("span.note", {}, "each member is a run of its own")),
    h("div.wide", {}, h("table", {}, h("thead", {}, h("tr", {}, titles.map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, lines))));
}

/** What the run said of itself: see docs/troubleshooting.md. */
/** The files of the run that could not be read; all others are shown. */
function problemList(run) {
  if (!run.problems.length) return null;
  return h("section", { "aria-label": "Not shown" }, h("h2", {}, "Not shown"),
    h("ul.findings", {}, run.problems.map((problem) => h("li", {}, problem))));
}

function findingList(run) {
  if (!run.findings.length) return null;
  return h("section", { "aria-label": "Findings" }, h("h2", {}, "Findings"),
    h("ul.findings", {}, run.findings.map(({ name, step, evidence, advice }) =>
      h("li", {}, h("b", {}, words(name)), ` (step ${step}): ${asText(evidence)} `, h("span.note", {}, asText(advice))))));
}

function stepTable(run) {
  const order = stopNames(run);
  const lines = run.sections.map((section) => {
    const rows = rowsOf(section).filter((row) => passes(run, row));
    const figures = summary(run, rows);
    const link = h("a", { href: `#step/${section.id}` }, `${section.phase === "train" ? "step" : "evaluation at"} ${section.step}`);
    return h("tr", {},
      h("th", { scope: "row" }, link, run.hasEpisodes(section) ? null : h("span.note", { title: "Only the numbers of these episodes are in the file" }, " numbers only")),
      h("td", {}, `${rows.length}${rows.length < section.size ? ` of ${section.size}` : ""}`),
      h("td", {}, number(figures.return)), h("td", {}, percent(figures.success)), h("td", {}, number(figures.turns)),
      h("td", {}, stopBar(figures.stops, order)));
  });
  const table = h("table", {}, h("thead", {}, h("tr", {},
    ["step", "episodes", "return", "success", "turns", "stop reasons"].map((name) => h("th", { scope: "col" }, name)))),
  h("tbody", {}, lines.slice(0, 500)));
  return h("section", { "aria-label": "Steps" }, h("h2", {}, "Steps"),
    h("p.key", {}, order.map((name, k) => h("span", {}, h(`i.stop-${k % 6}`), words(name)))),
    h("div.wide", {}, table),
    lines.length > 500 ? h("button.more", {
      onclick: (event) => {
        event.target.remove();
        table.tBodies[0].append(...lines.slice(500));
      },
    }, `show all (${lines.length - 500} more steps)`) : null);
}

const stopNames = (run) => Object.keys(VIEW.index.stop_reasons).concat([...new Set(run.columns.stop)].filter((name) => !(name in VIEW.index.stop_reasons)))
  .filter((name) => run.columns.stop.includes(name));

// ------------------------------------------------------------------------------------------------------------ a step

async function stepPage(section) {
  const { run } = section;
  const outlines = await run.outlines(section);
  const largest = outlines ? Math.max(0, ...outlines.flatMap(({ turns }) => turns.map(({ advantage }) => Math.abs(finite(advantage) ?? 0)))) : 0;
  const figures = summary(run, rowsOf(section).filter((row) => passes(run, row)));
  const slider = h("input", {
    type: "range", min: 0, max: run.sections.length - 1, value: section.place, "aria-label": "Step",
    oninput: (event) => go(`step/${run.sections[event.target.value].id}`),
  });
  const shown = run.groups(section)
    .map((group) => ({ ...group, rows: group.rows.filter((row) => passes(run, row)) }))
    .filter(({ rows }) => rows.length);
  const grouped = shown.some(({ number: name }) => name !== null);
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
    figureLine(figures),
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

function stepTitle(section, after = null) {
  const { run } = section;
  const name = `${section.phase === "train" ? "Step" : "Evaluation at step"} ${section.step}`;
  return h("h1", {}, h("a", { href: `#run/${run.id}` }, run.label), " › ", after ? h("a", { href: `#step/${section.id}` }, name) : name, after ? ` › ${after}` : null);
}

const numbersOnly = () => h("p.note", { role: "note" },
  "The texts and tokens of these episodes are not in the file, only their numbers. agile-trainers view --megabytes with a larger number includes more.");

function figureLine(figures) {
  const facts = [["episodes", figures.size], ["return", number(figures.return)], ["success", percent(figures.success)],
    ["turns", number(figures.turns)], ["tokens", number(figures.tokens)],
    ...Object.entries(figures.stops).map(([name, value]) => [words(name), value])];
  return h("dl.facts", {}, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, String(value)))));
}

function groupCard(section, group, outlines, largest) {
  const { run } = section;
  const members = group.rows.map((row) => memberLine(run, row, outlines?.[row - section.first], largest));
  if (group.number === null) return h("div.member-alone", {}, members);
  const figures = summary(run, group.rows);
  const outline = outlines?.[group.rows[0] - section.first];
  const zero = outlines && isZeroAdvantage(run, group.rows.map((row) => outlines[row - section.first]));
  const about = outline ? outline.row || outline.prompt || "" : "";
  return h("article.card", {},
    h("h3", {}, h("a", { href: `#group/${section.id}/${group.number}` }, `Group ${group.number}`),
      h("span.numbers", {}, h("span", {}, "return ", h("b", {}, number(figures.return))), figures.success === null ? null : h("span", {}, "success ", h("b", {}, percent(figures.success))))),
    h("p.note", { title: about },
      zero ? h("span.badge.zero", { title: "No turn of any member has an advantage" }, "zero-advantage group") : null,
      [run.environment(group.rows[0]), about].filter(Boolean).join(" · ")),
    members);
}

function memberLine(run, row, outline, largest) {
  const label = [`member ${run.get("member", row) ?? run.idOf(row)}`, `return ${number(run.get("return", row))}`, words(run.get("stop", row))].join(", ");
  const said = outline?.turns.map(({ text }) => text ?? "").join(" → ");
  return h("a.member", { href: `#episode/${run.id}/${run.idOf(row)}`, "aria-label": label, title: label },
    badge(run, row), h("span.figure", {}, number(run.get("return", row))),
    outline ? turnStrip(outline.turns, run.get("num_turns", row), largest) : h("span.note", {}, `${run.get("num_turns", row)} turns`),
    said ? h("span.snippet", { title: shortened(said, 1000) }, shortened(said, 300)) : null,
    h("span.stop", {}, words(run.get("stop", row))));
}

// ----------------------------------------------------------------------------------------------------------- a group

async function groupPage(section, name) {
  const { run } = section;
  const group = run.groups(section).find((one) => String(one.number) === name);
  if (!group) throw new Error(`Step ${section.step} has no group ${name}.`);
  const outlines = await run.outlines(section);
  if (!outlines) return [stepTitle(section, `Group ${name}`), numbersOnly()];
  const rows = group.rows.filter((row) => passes(run, row));
  if (VIEW.sorted) rows.sort((a, b) => run.get("return", b) - run.get("return", a));
  const of = (row) => outlines[row - section.first];
  const largest = Math.max(0, ...rows.flatMap((row) => of(row).turns.map(({ advantage }) => Math.abs(finite(advantage) ?? 0))));
  const longest = Math.max(0, ...rows.map((row) => of(row).turns.length));
  const head = h("tr", {}, h("th", { scope: "col" }, ""), rows.map((row) => h("th", { scope: "col" },
    h("a", { href: `#episode/${run.id}/${run.idOf(row)}` }, badge(run, row), ` member ${run.get("member", row)}`),
    h("span.figure", {}, `return ${number(run.get("return", row))}`))));
  const lines = Array.from({ length: longest }, (_, k) => h("tr", {}, h("th", { scope: "row" }, `turn ${k + 1}`),
    rows.map((row) => {
      const turn = of(row).turns[k];
      if (!turn) return h("td.absent");
      const cell = h("div.said", {}, h("span.text", {}, turn.text ?? ""),
        h("span.numbers", {}, h("span", {}, "r ", h("b", {}, signed(turn.reward))), h("span", {}, "A ", h("b", {}, signed(turn.advantage)))));
      paint(cell, "advantage", turn.advantage, largest);
      return h("td", {}, cell, turn.observation ? h("div.answer", {}, turn.observation) : null);
    })));
  const ends = h("tr", {}, h("th", { scope: "row" }, "end"), rows.map((row) => h("td", {}, words(run.get("stop", row)),
    run.get("num_turns", row) > of(row).turns.length ? h("span.note", {}, ` after ${run.get("num_turns", row)} turns`) : null)));
  const start = rows.length ? of(rows[0]) : null;
  return [
    stepTitle(section, `Group ${name}`),
    figureLine(summary(run, rows)),
    start ? h("section.message", {}, h("h4", {}, ["all start from", start.row].filter(Boolean).join(" ")), h("div.text", {}, start.prompt || "")) : null,
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
  const group = run.get("group", row);
  const member = run.get("member", row);
  const title = member === null || member === undefined ? `Episode ${run.idOf(row)}` : `Member ${member}`;
  return [
    h("h1", {}, h("a", { href: `#run/${run.id}` }, run.label), " › ",
      h("a", { href: `#step/${section.id}` }, `${section.phase === "train" ? "Step" : "Evaluation at step"} ${section.step}`), " › ",
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
    `${one.phase === "train" ? "step" : "evaluation at"} ${one.step}${one.run.hasEpisodes(one) ? "" : " (numbers only)"}`);
  return h("select", { "aria-label": `Run and step, now ${section.run.label}`, onchange: (event) => change(event.target.value) },
    VIEW.runs.map((run) => h("optgroup", { label: run.label }, run.sections.map(option))));
}

async function comparePage(left, right) {
  const sides = [left, right];
  const outlines = await Promise.all(sides.map((section) => section.run.outlines(section)));
  const choose = (k) => (id) => go(`compare/${(k ? [left.id, id] : [id, right.id]).join("/")}`);
  const figures = sides.map((section) => summary(section.run, rowsOf(section).filter((row) => passes(section.run, row))));
  const largest = Math.max(0, ...outlines.flatMap((outline) => (outline || []).flatMap(({ turns }) => turns.map(({ advantage }) => Math.abs(finite(advantage) ?? 0)))));
  const pairs = matched(sides, outlines);
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
        "aria-label": `Open the first episodes of ${title} side by side`,
      }, "side by side") : null))));
  append(0, 100);
  return [
    h("h1", {}, "Comparison"),
    h("div.wide", {}, h("table.compared", {},
      h("thead", {}, h("tr", {}, h("th"), sides.map((section, k) => h("th", { scope: "col" }, VIEW.runs.length > 1 ? h("div", {}, section.run.label) : null, sectionChooser(section, choose(k)))), h("th", { scope: "col" }, "change"))),
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
function matched(sides, outlines) {
  const kept = sides.map((section) => rowsOf(section).filter((row) => passes(section.run, row)));
  const start = (k, row) => outlines[k]?.[row - sides[k].first]?.start;
  const ways = [
    ["matched by start and seed", (k, row) => start(k, row) && `${start(k, row)} ${sides[k].run.get("seed", row)}`],
    ["matched by start", start],
    ["matched by order: they do not start alike", (k, row) => `group ${sides[k].run.get("group", row) ?? row - sides[k].first}`],
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
    return h("a", { href: `#episode/${run.id}/${run.idOf(row)}` }, `${VIEW.runs.length > 1 ? `${run.label} · ` : ""}${section.phase === "train" ? "step" : "evaluation at"} ${section.step} · episode ${run.idOf(row)}`);
  };
  return [h("h1", {}, "Side by side"), h("p.steps", {}, link(places[0]), " and ", link(places[1])), ...pane];
}
