// The state, the address after # (so that Back works and links can be kept), the filters and the keyboard.

const VIEW = {
  index: null, runs: [], mark: null, extra: [], sorted: false, differing: false, pinned: null, page: null, onMark: null, onShown: null,
  searching: false,
  /** What the address says after "?": which episodes are shown, and of the Episodes page search, order and what is compared. */
  filters: { outcome: "", stop: "", environment: "", q: "", sort: "", since: "" },
  /** The counterpart of a run: with --against, the run at the same place of the other ones. */
  other(run) {
    const own = this.runs.length - this.index.compared;
    const place = this.runs.indexOf(run);
    if (!this.index.compared) return null;
    return place < own ? this.runs[own + (place % this.index.compared)] : this.runs[(place - own) % own];
  },
  /** The section that one is compared with by default: the same step of the other run or evaluation, else the first step. */
  opposite(section) {
    const { run } = section;
    const evaluations = run.sections.length === 1 ? this.runs.filter((one) => one !== run && one.sections.length === 1) : [];
    const alike = evaluations.find(({ info }) => info.environment === run.info.environment);
    const other = this.other(run) || alike || evaluations[0];
    const from = other && other.size ? other : run;
    const phase = from.sections.filter((one) => one.phase === section.phase);
    const named = phase.filter(({ evaluation }) => evaluation === section.evaluation);
    const same = named.some((one) => one !== section) ? named : phase;
    if (from !== run) return nearest((same.length ? same : from.sections).map((one) => [one.step, one]), section.step)[1];
    return same[0] === section ? same[same.length - 1] : same[0];
  },
};

function passes(run, row) {
  const { outcome: wanted, stop, environment } = VIEW.filters;
  return (!wanted || outcome(run, row) === wanted) && (!stop || run.get("stop", row) === stop)
    && (!environment || run.environment(row) === environment);
}

const filtered = () => ["outcome", "stop", "environment"].some((name) => VIEW.filters[name]);

// ----------------------------------------------------------------------------------------------------------- address

/** The address of a place, with the filters. */
function addressOf(place) {
  const query = new URLSearchParams(Object.entries(VIEW.filters).filter(([, value]) => value)).toString();
  return `#${place}${query && `?${query}`}`;
}

const go = (place) => { location.hash = addressOf(place); };

/** The address in two parts: the place, and the filters, which are taken from it. */
function readAddress() {
  const [place, ...query] = location.hash.slice(1).split("?");
  const given = new URLSearchParams(query.join("?"));
  for (const name of Object.keys(VIEW.filters)) VIEW.filters[name] = given.get(name) ?? "";
  return place;
}

function sectionAt([run, phase, step]) {
  const found = VIEW.runs[run]?.sections.find(({ id }) => id === `${run}/${phase}/${step}`);
  if (!found) throw new Error(`Run ${run} has no ${phase} step ${step}.`);
  return found;
}

function episodeAt([run, id]) {
  const row = VIEW.runs[run]?.rowOfId(Number(id));
  if (row === undefined) throw new Error(`Run ${run} has no episode ${id}.`);
  return [VIEW.runs[run], row];
}

/** Read the address: the page's name, what it shows, and a function that makes it. */
function parsePlace() {
  const [name, ...rest] = decodeURIComponent(readAddress()).split("/");
  if (name === "step") {
    const section = sectionAt(rest);
    return { name, section, make: () => stepPage(section) };
  }
  if (name === "group") {
    const section = sectionAt(rest);
    return { name, section, group: rest[3], make: () => groupPage(section, rest[3]) };
  }
  if (name === "episode") {
    const [run, row] = episodeAt(rest);
    return { name, run, row, section: run.sectionOf(row), make: () => episodePage(run, row) };
  }
  if (name === "compare") {
    const sides = [sectionAt(rest), sectionAt(rest.slice(3))];
    return { name, section: sides[1], make: () => comparePage(...sides) };
  }
  if (name === "pair") {
    const places = [episodeAt(rest), episodeAt(rest.slice(2))];
    return { name, make: () => pairPage(places) };
  }
  // Several runs are shown side by side first; of a population, the winner, which has a table of all.
  if (name === "runs" || (!name && VIEW.runs.length > 1 && !VIEW.runs[0].info.member)) return { name: "runs", make: runsPage };
  const run = VIEW.runs[Number(rest[0] || 0)];
  if (!run) throw new Error(`There is no run ${rest[0]}.`);
  if (name === "episodes") return { name, run, make: () => episodesPage(run) };
  return { name: "run", run, make: () => runPage(run) };
}

let drawing = 0;
let shownPlace = null;

async function render({ keep = location.hash.split("?")[0] === shownPlace } = {}) {
  const mine = ++drawing;
  const page = document.getElementById("page");
  VIEW.onMark = VIEW.onShown = null;
  let content;
  try {
    VIEW.page = parsePlace();
    content = await VIEW.page.make();
  } catch (error) {
    content = [h("p.error", { role: "alert" }, error.message), h("p", {}, h("a", { href: "#run/0" }, "To the run"))];
  }
  if (mine !== drawing) return; // another page was asked for meanwhile
  bar();
  document.getElementById("token").hidden = true;
  page.replaceChildren(...content.flat(3).filter(Boolean));
  VIEW.onShown?.(); // what needs to know its width
  if (VIEW.searching) document.getElementById("search")?.focus();
  VIEW.searching = false;
  page.dataset.page = VIEW.page?.name ?? "error";
  if (!keep) scrollTo(0, 0);
  shownPlace = location.hash.split("?")[0];
  document.body.dataset.ready = location.hash || "#";
}

// --------------------------------------------------------------------------------------------------------------- bar

function chooser(name, label, values, texts = words) {
  if (VIEW.filters[name] && !values.includes(VIEW.filters[name])) values.push(VIEW.filters[name]);
  if (values.length < 2 && !VIEW.filters[name]) return null;
  return h("label", {}, h("span", {}, label), h("select", {
    id: `filter-${name}`, onchange: (event) => {
      VIEW.filters[name] = event.target.value;
      go(location.hash.slice(1).split("?")[0]);
    },
  }, h("option", { value: "" }, "all"), values.map((value) => h("option", { value, selected: VIEW.filters[name] === value }, texts(value)))));
}

function bar() {
  const current = VIEW.page?.run || VIEW.page?.section?.run || VIEW.runs[0];
  const section = VIEW.page?.section;
  const all = (of) => [...new Set(VIEW.runs.flatMap((run) => of(run)))].sort();
  const outcomes = all((run) => Array.from({ length: run.size }, (_, row) => outcome(run, row)));
  const last = section || [...current.sections].reverse().find(({ phase }) => phase === "train") || current.sections[current.sections.length - 1];
  const links = [["runs", VIEW.runs.length > 1 && "#runs"], ["run", `#run/${current.id}`], ["step", last && `#step/${last.id}`],
    ["episodes", last && `#episodes/${current.id}`], ["compare", last && `#compare/${VIEW.opposite(last).id}/${last.id}`]];
  const runs = VIEW.runs.length > 1 ? h("label", {}, h("span", {}, "run"), h("select", { id: "runs", onchange: (event) => go(`${VIEW.page?.name === "episodes" ? "episodes" : "run"}/${event.target.value}`) },
    VIEW.runs.map((run) => h("option", { value: run.id, selected: run === current }, shortened(run.label))))) : null;
  document.getElementById("bar").replaceChildren(
    h("strong", {}, "agile-trainers"),
    h("nav", { "aria-label": "Pages" }, links.filter(([, href]) => href).map(([name, href]) =>
      h("a", { href, "aria-current": (VIEW.page?.name === name || (name === "step" && ["group", "episode"].includes(VIEW.page?.name)) || (name === "compare" && VIEW.page?.name === "pair")) && "page" }, name))),
    h("div.filters", {}, [runs,
      chooser("outcome", "outcome", outcomes, (name) => OUTCOMES[name]?.[1] ?? name),
      chooser("stop", "stopped", all((run) => run.columns.stop)),
      chooser("environment", "environment", all((run) => run.environments), (name) => name)].filter(Boolean)),
    ...[VIEW.index.live ? h("span.live", { id: "live", role: "status" }, "● live") : null].filter(Boolean),
    h("span.buttons", {},
      h("button", { id: "theme", title: "Light or dark (t)", "aria-label": "Light or dark", onclick: theme }, "◐"),
      h("button", { id: "keys", title: "Keyboard (?)", onclick: help }, "? keys")));
}

function theme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
}

// ---------------------------------------------------------------------------------------------------------- keyboard

/** Go to the next or previous step or group, or to the next episode of the list. */
async function move(by) {
  const { name, section, run, row } = VIEW.page;
  if (name === "step") {
    const next = section.run.sections[section.place + by];
    if (next) go(`step/${next.id}`);
  } else if (name === "group") {
    const names = section.run.groups(section).map((group) => group.name);
    const next = names[names.indexOf(VIEW.page.group) + by];
    if (next !== undefined) go(`group/${section.id}/${next}`);
  } else if (name === "episode") {
    const rows = await listedRows(run);
    const place = rows.indexOf(row);
    const next = place >= 0 ? rows[place + by] : by > 0 ? rows.find((one) => one > row) : rows.findLast((one) => one < row);
    if (next !== undefined && VIEW.page.row === row) go(`episode/${run.id}/${run.idOf(next)}`);
  }
}

/** Stay with what is shown and go to the next or previous step. */
function moveStep(by) {
  const { name, section, run, row } = VIEW.page;
  if (name === "step") return move(by);
  const next = section?.run.sections[section.place + by];
  if (!next) return;
  if (name === "episode") go(`episode/${run.id}/${run.idOf(Math.min(next.first + row - section.first, next.first + next.size - 1))}`);
  else if (name === "group") {
    const [here, there] = [section, next].map((one) => one.run.groups(one).map((group) => group.name));
    const same = there[Math.min(here.indexOf(VIEW.page.group), there.length - 1)];
    go(same === null ? `step/${next.id}` : `group/${next.id}/${same}`);
  } else go(`step/${next.id}`);
}

function moveTurn(by) {
  const turns = [...document.querySelectorAll(".episode:first-of-type .turn")];
  const top = document.getElementById("bar").offsetHeight + 60;
  const current = turns.findLastIndex((turn) => turn.getBoundingClientRect().top < top);
  turns[Math.min(turns.length - 1, Math.max(0, current + by))]?.scrollIntoView({ block: "start" });
}

function moveToken(by) {
  const tokens = [...document.querySelectorAll(".episode .t[data-k]:not(.given)")];
  const current = tokens.findIndex((token) => token.classList.contains("at"));
  const next = tokens[Math.min(tokens.length - 1, Math.max(0, current + by))];
  next?.click();
  next?.scrollIntoView({ block: "nearest" });
}

function pin(run, row) {
  if (VIEW.pinned && VIEW.pinned.join() !== [run.id, run.idOf(row)].join()) {
    go(`pair/${VIEW.pinned.join("/")}/${run.id}/${run.idOf(row)}`);
    VIEW.pinned = null;
  } else {
    VIEW.pinned = [run.id, run.idOf(row)];
    render({ keep: true });
  }
}

function up() {
  const { name, section, run, row } = VIEW.page;
  if (name === "episode") return go(run.groupOf(row) === null ? `step/${section.id}` : `group/${section.id}/${run.groupOf(row)}`);
  if (name === "group") return go(`step/${section.id}`);
  if (name === "run" && VIEW.runs.length > 1) return go("runs");
  go(`run/${(run || section?.run || VIEW.runs[0]).id}`);
}

const KEYS = [
  ["j", "next episode, group or step", () => move(1)],
  ["k", "previous episode, group or step", () => move(-1)],
  ["l", "same place, next step", () => moveStep(1)],
  ["h", "same place, previous step", () => moveStep(-1)],
  ["n", "next turn", () => moveTurn(1)],
  ["p", "previous turn", () => moveTurn(-1)],
  [".", "next token", () => moveToken(1)],
  [",", "previous token", () => moveToken(-1)],
  ["u", "up: episode, group, step, run, runs", up],
  ["r", "the run", () => go(`run/${(VIEW.page.run || VIEW.page.section?.run || VIEW.runs[0]).id}`)],
  ["c", "compare: this step with the first, or pin this episode", () => {
    const { name, run, row, section } = VIEW.page;
    if (name === "episode") return pin(run, row);
    const here = section || VIEW.page.run?.sections.at(-1);
    if (here) go(`compare/${VIEW.opposite(here).id}/${here.id}`);
  }],
  ["e", "the episodes of the run", () => go(`episodes/${(VIEW.page.run || VIEW.page.section?.run || VIEW.runs[0]).id}`)],
  ["/", "search in the episodes", () => {
    const input = document.getElementById("search");
    if (input) return input.focus();
    VIEW.searching = true;
    go(`episodes/${(VIEW.page.run || VIEW.page.section?.run || VIEW.runs[0]).id}`);
  }],
  ["f", "filters", () => document.querySelector(".filters select")?.focus()],
  ["t", "light or dark", theme],
  ["?", "this help", help],
  ["Escape", "close", () => { document.getElementById("token").hidden = true; }],
];

function help() {
  const dialog = document.getElementById("help");
  if (dialog.open) return dialog.close();
  const marks = Object.values(MARKS).map(({ label }, k) => [String(k + 1), `colour by ${label}`]);
  dialog.replaceChildren(h("h2", {}, "Keyboard"),
    h("dl", {}, [...KEYS, ...marks].map(([key, text]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, text)])),
    h("button", { onclick: () => dialog.close() }, "close"));
  dialog.showModal();
}

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(SELECT|TEXTAREA)$/.test(event.target.tagName) || event.target.type === "search") return;
  const mark = Object.keys(MARKS)[Number(event.key) - 1];
  const known = KEYS.find(([key]) => key === event.key);
  if (mark && VIEW.onMark) {
    VIEW.mark = mark;
    VIEW.onMark();
  } else if (known && VIEW.page) known[2]();
  else return;
  if (event.key !== "Escape") event.preventDefault();
});

// -------------------------------------------------------------------------------------------------------------- start

function take(index, parts) {
  const names = (one) => one?.runs.map(({ name }) => name).join("\n");
  if (VIEW.index && names(VIEW.index) !== names(index)) parts.forget(); // runs have other numbers now
  VIEW.index = index;
  VIEW.runs = index.runs.map((data, id) => new Run(id, data, index.live, parts));
}

/** Say on the Episodes page that there are more: a list that changes by itself cannot be read. */
function announceNew() {
  const found = document.getElementById("found");
  if (!found || document.getElementById("newer")) return;
  found.append(" ", h("button", { id: "newer", onclick: () => render({ keep: true }) }, "show new episodes"));
}

/** Ask a server for the index again and again, and draw it anew when it has changed; what is open stays open. */
async function follow(parts, version) {
  const state = (text) => document.getElementById("live")?.replaceChildren(text);
  for (;;) {
    await new Promise((resolve) => setTimeout(resolve, VIEW.index.seconds * 1000));
    try {
      const answer = await fetch(`data/index?after=${encodeURIComponent(version)}`, { cache: "no-store" });
      if (answer.status === 200) {
        const index = await answer.json();
        version = index.version;
        take(index, parts);
        if (["runs", "run", "step"].includes(VIEW.page?.name)) await render({ keep: true });
        else {
          VIEW.page = parsePlace();
          announceNew();
        }
      } else if (answer.status !== 204) throw new Error(String(answer.status));
      state("● live");
    } catch {
      state("○ server does not answer");
    }
  }
}

async function start() {
  const index = await embedded("index");
  const parts = new Parts(index.live ? served : embedded);
  take(index.live ? await served("index") : index, parts);
  document.title = `${VIEW.runs.map((run) => run.label).slice(0, 2).join(", ")} · agile-trainers`;
  addEventListener("hashchange", () => render());
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault(); // the address after # is a place of the page
    document.getElementById("page").focus();
  });
  let waiting;
  addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => VIEW.onShown?.(), 150);
  });
  await render();
  if (index.live) follow(parts, VIEW.index.version);
}

start().catch((error) => document.getElementById("page").replaceChildren(h("p.error", { role: "alert" }, `The page cannot be shown: ${error.message}`)));
