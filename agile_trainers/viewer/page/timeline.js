// The timelines: of all runs, and of one.

const CHARTS = [
  {
    title: "Return", names: ["return/mean", "eval_return", "reward"], format: (y) => number(y),
    about: "Mean return of the episodes", counted: (section) => summary(section.run, keptRows(section)).return,
  },
  {
    title: "Success", names: ["success", "eval_success"], format: percent,
    about: "Share of episodes that succeed", counted: (section) => summary(section.run, keptRows(section)).success,
  },
  { title: "Entropy", names: ["entropy"], format: (y) => number(y), about: "Mean entropy of the policy's tokens, in nats" },
  {
    title: "Clipped share", names: ["clip_ratio/region_mean", "cispo_clip_ratio"], format: percent,
    about: "Share of tokens whose importance ratio was clipped in the update",
    counted: (section) => clipShare(keptRows(section).map((row) => ({ clip: section.run.figure("clip", row) }))),
  },
  {
    title: "Zero-advantage groups", names: ["zero_advantage_groups"], format: percent,
    about: "Share of groups in which no turn of any member has an advantage",
  },
];

const SERIES = 6; // colours of charts

/** Points of a chart for a run: those that were logged, else those counted from its episodes; with filters always the latter. */
function pointsOf(run, chart) {
  const logged = run.logged(chart.names);
  if (!filtered() && (logged.length || !chart.counted)) return logged;
  if (!chart.counted) return [];
  return run.counted(run.sections.some(({ phase }) => phase === "train") ? "train" : "eval", chart.counted);
}

/** The rows of a section that pass the filters. */
const keptRows = (section) => rowsOf(section).filter((row) => passes(section.run, row));

/**
 * One curve of several: the mean, and a band from the lowest to the highest, at the steps that all have. Long ones are smoothed
 * first, as the curve of one run is.
 */
function meanOf(curves) {
  const known = curves.filter((points) => points.length);
  if (known.length < 2) return { points: known[0] || [] };
  const maps = known.map((points) => new Map(points.length < 60 ? points : smooth(points, points.length / 20)));
  const steps = [...maps[0].keys()].filter((step) => maps.every((map) => map.has(step)));
  const values = steps.map((step) => maps.map((map) => map.get(step)));
  return {
    points: steps.map((step, k) => [step, mean(values[k])]),
    band: steps.map((step, k) => [step, Math.min(...values[k]), Math.max(...values[k])]),
  };
}

/** Draw charts of series, each of some runs, into an element; a click calls `pick` with a step. Return their number. */
function drawCharts(into, charts, series, pick) {
  return drawPoints(into, charts.map((chart) => ({
    ...chart, series: series.map(({ label, runs }) => ({ label, ...meanOf(runs.map((run) => pointsOf(run, chart))) })),
  })), pick);
}

/** Draw charts of at least a width, each with the points of its series; those with fewer than two points are left out. */
function drawPoints(into, charts, pick, least = 380) {
  const drawn = charts.filter((chart) => chart.series.some(({ points }) => points.length > 1));
  const range = drawn.reduce((found, chart) => chart.series.reduce((ends, { points }) =>
    points.reduce(([first, last], [step]) => [Math.min(first, step), Math.max(last, step)], ends), found), [Infinity, -Infinity]);
  const room = into.clientWidth || 900;
  const columns = Math.max(1, Math.floor((room + 16) / least));
  const width = Math.floor((room - 16 * (columns - 1)) / columns) - 26;
  const made = drawn.map((chart) => lineChart(chart, { width, range, pick }));
  for (const chart of made) {
    chart.drawing.addEventListener("mousemove", (event) => made.forEach((one) => one.show(chart.stepAt(event))));
    chart.drawing.addEventListener("mouseleave", () => made.forEach((one) => one.show(null)));
  }
  into.replaceChildren(...made.map(({ element }) => element));
  return made.length;
}

const shownCharts = () => [...CHARTS, ...VIEW.extra.map((name) => ({ title: name, names: [name], format: (y) => number(y), about: "As logged" }))];

/** A chooser of a metric that the runs logged and no chart shows. */
function metricChooser(runs) {
  const names = new Set(runs.flatMap((run) => Object.keys(run.metrics)));
  const others = [...names].filter((name) => name !== "step" && !CHARTS.some((chart) => chart.names.includes(name)) && !VIEW.extra.includes(name)).sort();
  if (!others.length) return null;
  return h("label.inline", {}, "further metric ", h("select", {
    onchange: (event) => {
      if (event.target.value) VIEW.extra.push(event.target.value);
      render({ keep: true });
    },
  }, h("option", { value: "" }, "choose …"), others.map((name) => h("option", { value: name }, name))));
}

const seriesKey = (series) => h("p.key", {}, series.map(({ label }, k) => h(`span.key-${k}`, {}, label)));

/** Load what charts are counted from while filters are set. */
const figuresForFilters = (runs) => (filtered() ? Promise.all(runs.flatMap((run) => run.sections.map((section) => run.figures(section)))) : null);

/** What the charts show while filters are set. */
const filterNote = () => (filtered() ? h("p.note", { role: "note" },
  "The charts are counted from the episodes that pass the filters. Metrics that only the log has are not shown.") : null);

// ---------------------------------------------------------------------------------------------------------- all runs

/** The runs by set: those of a set differ in the seed alone. */
function runSets() {
  const sets = new Map();
  for (const run of VIEW.runs) sets.set(run.set, [...(sets.get(run.set) || []), run]);
  return [...sets.values()].map((runs) => {
    const folders = [...new Set(runs.map(({ label }) => label))].sort();
    const label = runs.length < 2 ? folders[0] : `${shared(folders)} (${runs.length} seeds)`;
    return { label, runs };
  });
}

/** What texts have in common, with … in the place of what differs: "grpo-0 · GRPO" and "grpo-1 · GRPO" give "grpo-… · GRPO". */
function shared(texts) {
  const all = (test) => texts.every(test);
  const [one] = texts;
  let [start, end] = [0, 0];
  while (start < one.length && all((text) => text[start] === one[start])) start++;
  while (end < one.length - start && all((text) => text.length - end > start && text.at(-1 - end) === one.at(-1 - end))) end++;
  return `${one.slice(0, start)}…${end ? one.slice(-end) : ""}`;
}

async function runsPage() {
  const sets = runSets();
  await figuresForFilters(VIEW.runs);
  const shown = sets.filter(({ runs }) => runs.some((run) => shownCharts().some((chart) => pointsOf(run, chart).length > 1))).slice(0, SERIES);
  const charts = h("div.charts");
  VIEW.onShown = () => drawCharts(charts, shownCharts(), shown, null);
  const last = (run, place) => pointsOf(run, CHARTS[place]).at(-1)?.[1] ?? null;
  const lines = sets.flatMap(({ runs }) => runs).map((run) => {
    const rows = Array.from({ length: run.size }, (_, row) => row).filter((row) => passes(run, row));
    const all = run.sections.length > 1 || !run.size ? null : summary(run, rows);
    return h("tr", {},
      h("th", { scope: "row" }, h("a", { href: `#run/${run.id}` }, run.label)),
      h("td", {}, run.played), h("td", {}, asText(run.info.seed)), h("td", {}, count(rows.length)),
      h("td", {}, String(run.sections.at(-1)?.step ?? "–")),
      h("td", {}, number(all ? all.return : last(run, 0))), h("td", {}, percent(all ? all.success : last(run, 1))),
      h("td", {}, asText(run.info.started).replace(/^(\d{4}-\d\d-\d\d)T(\d\d:\d\d).*/, "$1 $2")));
  });
  const table = h("table", {}, h("thead", {}, h("tr", {},
    ["run", "environment", "seed", "episodes", "last step", "return", "success", "started"].map((name) => h("th", { scope: "col" }, name)))),
  h("tbody", {}, lines.slice(0, 200)));
  return [
    h("h1", {}, "Runs"),
    shown.length ? h("section", { "aria-label": "Timeline" }, h("h2", {}, "Timeline"),
      seriesKey(shown),
      shown.some(({ runs }) => runs.length > 1) ? h("p.note", {}, "Runs that differ in the seed alone are one curve: their mean, and a band from the lowest to the highest seed.") : null,
      sets.length > shown.length ? h("p.note", {}, `${shown.length} of ${sets.length} curves are drawn; others have fewer than two points, or are beyond the first ${SERIES}.`) : null,
      filterNote(), charts, metricChooser(shown.flatMap(({ runs }) => runs))) : null,
    h("section", { "aria-label": "All runs" }, h("h2", {}, `All runs (${VIEW.runs.length})`, h("span.note", {}, "return and success are the last that are known")),
      h("div.wide", {}, table), showRest(lines, 200, table.tBodies[0], "runs")),
    differences(sets),
  ];
}

/** The options in which sets of runs differ. */
function differences(sets) {
  const some = sets.slice(0, SERIES);
  const value = (run, name) => asText(run.info.options?.[name]);
  const names = [...new Set(some.flatMap(({ runs }) => Object.keys(runs[0].info.options || {})))].sort()
    .filter((name) => !["seed", "data_seed"].includes(name) && !some.every(({ runs }) => value(runs[0], name) === value(some[0].runs[0], name)));
  if (some.length < 2 || !names.length) return null;
  return h("details", {}, h("summary", {}, `options that differ (${names.length})`),
    h("div.wide", {}, h("table", {}, h("thead", {}, h("tr", {}, ["option", ...some.map(({ label }) => label)].map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, names.map((name) => h("tr", {}, h("th", { scope: "row" }, name),
        some.map(({ runs }) => h("td", {}, shortened(value(runs[0], name) || "–")))))))));
}

/** A button that adds the lines of a table from `first` on, if there are any. */
function showRest(lines, first, body, what) {
  return lines.length > first ? h("button.more", {
    onclick: (event) => {
      event.target.remove();
      body.append(...lines.slice(first));
    },
  }, `show all (${count(lines.length - first)} more ${what})`) : null;
}

// ----------------------------------------------------------------------------------------------------------- one run

async function runPage(run) {
  const against = VIEW.other(run);
  const series = [run, against].filter(Boolean).map((one) => ({ label: one.label, runs: [one] }));
  await figuresForFilters(series.flatMap(({ runs }) => runs));
  const charts = h("div.charts");
  const pick = (step) => {
    const training = run.sections.filter(({ phase }) => phase === "train");
    // A log at step s is of the update that ended there; its episodes are of the last batch that was sampled before.
    const sampled = training.length && run.metrics.step && !filtered() ? step - 1 : step;
    const sections = training.length ? training : run.sections;
    const found = sections.findLast((one) => one.step <= sampled) ?? sections[0];
    if (found) go(`step/${found.id}`);
  };
  VIEW.onShown = () => {
    if (drawCharts(charts, shownCharts(), series, pick)) return;
    charts.append(figureLine(summary(run, Array.from({ length: run.size }, (_, row) => row).filter((row) => passes(run, row)))));
  };
  return [
    h("h1", {}, run.label),
    runFacts(run),
    memberTable(run),
    problemList(run),
    findingList(run),
    h("section", { "aria-label": "Timeline" },
      h("h2", {}, run.sections.length > 1 ? "Timeline" : "Summary", run.sections.length > 1 ? h("span.note", {}, "click a step to open it") : null),
      against ? seriesKey(series) : null, filterNote(), charts, metricChooser([run])),
    stepTable(run),
  ];
}

function runFacts(run) {
  const { options, ...facts } = run.info;
  const shown = ["run", "kind", "algorithm", "model", "environment", "policy", "seed", "started"].filter((name) => hasContent(facts[name]) || facts[name] === 0);
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
  const titles = ["member", "copy of", ...names, "steps", run.info.member.measured, "state"];
  return h("section", { "aria-label": "Population" }, h("h2", {}, "Population", h("span.note", {}, "each member is a run of its own")),
    h("div.wide", {}, h("table", {}, h("thead", {}, h("tr", {}, titles.map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, lines))));
}

/** The files of the run that could not be read; all others are shown. */
function problemList(run) {
  if (!run.problems.length) return null;
  return h("section", { "aria-label": "Not shown" }, h("h2", {}, "Not shown"),
    h("ul.findings", {}, run.problems.map((problem) => h("li", {}, problem))));
}

/** What the run's diagnosis said: see docs/troubleshooting.md. */
function findingList(run) {
  if (!run.findings.length) return null;
  return h("section", { "aria-label": "Findings" }, h("h2", {}, "Findings"),
    h("ul.findings", {}, run.findings.map(({ name, step, evidence, advice }) =>
      h("li", {}, h("b", {}, words(name)), ` (step ${step}): ${asText(evidence)} `, h("span.note", {}, asText(advice))))));
}

function stepTable(run) {
  const order = stopNames(run);
  const lines = run.sections.map((section) => {
    const rows = keptRows(section);
    const figures = summary(run, rows);
    const link = h("a", { href: `#step/${section.id}` }, section.label);
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
    showRest(lines, 500, table.tBodies[0], "steps"));
}

const stopNames = (run) => Object.keys(VIEW.index.stop_reasons).concat([...new Set(run.columns.stop)].filter((name) => !(name in VIEW.index.stop_reasons)))
  .filter((name) => run.columns.stop.includes(name));
