// The state, the address after # (so that Back works and links can be kept), the filters and the keyboard.

const VIEW = {
  index: null, runs: [], mark: null, extra: [], sorted: false, differing: false, pinned: null, page: null, onMark: null, onShown: null,
  filters: { outcome: "", stop: "", environment: "" },
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
    const same = from.sections.filter(({ phase }) => phase === section.phase);
    if (from !== run) return nearest((same.length ? same : from.sections).map((one) => [one.step, one]), section.step)[1];
    return same[0] === section ? same[same.length - 1] : same[0];
  },
};

function passes(run, row) {
  const { outcome: wanted, stop, environment } = VIEW.filters;
  return (!wanted || outcome(run, row) === wanted) && (!stop || run.get("stop", row) === stop)
    && (!environment || run.environment(row) === environment);
}

// ----------------------------------------------------------------------------------------------------------- address

const go = (place) => { location.hash = place; };

function sectionAt([run, phase, step]) {
  const found = VIEW.runs[run]?.sections.find((one) => one.phase === phase && String(one.step) === step);
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
  const [name, ...rest] = decodeURIComponent(location.hash.slice(1)).split("/");
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
  const run = VIEW.runs[Number(rest[0] || 0)];
  if (!run) throw new Error(`There is no run ${rest[0]}.`);
  return { name: "run", run, make: () => runPage(run) };
}

let drawing = 0;

async function render({ keep = false } = {}) {
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
  page.dataset.page = VIEW.page?.name ?? "error";
  if (!keep) scrollTo(0, 0);
  document.body.dataset.ready = location.hash || "#";
}

// --------------------------------------------------------------------------------------------------------------- bar

function chooser(name, label, values, texts = words) {
  if (values.length < 2 && !VIEW.filters[name]) return null;
  return h("label", {}, h("span", {}, label), h("select", {
    id: `filter-${name}`, onchange: (event) => {
      VIEW.filters[name] = event.target.value;
      render({ keep: true });
    },
  }, h("option", { value: "" }, "all"), values.map((value) => h("option", { value, selected: VIEW.filters[name] === value }, texts(value)))));
}

function bar() {
  const current = VIEW.page?.run || VIEW.page?.section?.run || VIEW.runs[0];
  const section = VIEW.page?.section;
  const all = (of) => [...new Set(VIEW.runs.flatMap((run) => of(run)))].sort();
  const outcomes = all((run) => Array.from({ length: run.size }, (_, row) => outcome(run, row)));
  const last = section || [...current.sections].reverse().find(({ phase }) => phase === "train") || current.sections[current.sections.length - 1];
  const links = [["run", `#run/${current.id}`], ["step", last && `#step/${last.id}`], ["compare", last && `#compare/${VIEW.opposite(last).id}/${last.id}`]];
  const runs = VIEW.runs.length > 1 ? h("label", {}, h("span", {}, "run"), h("select", { id: "runs", onchange: (event) => go(`run/${event.target.value}`) },
    VIEW.runs.map((run) => h("option", { value: run.id, selected: run === current }, run.label)))) : null;
  document.getElementById("bar").replaceChildren(
    h("strong", {}, "agile-trainers"),
    h("nav", { "aria-label": "Pages" }, links.filter(([, href]) => href).map(([name, href]) =>
      h("a", { href, "aria-current": (VIEW.page?.name === name || (name === "step" && ["group", "episode"].includes(VIEW.page?.name)) || (name === "compare" && VIEW.page?.name === "pair")) && "page" }, name))),
    h("div.filters", {}, [runs,
      chooser("outcome", "outcome", outcomes, (name) => OUTCOMES[name][1]),
      chooser("stop", "stopped", all((run) => run.columns.stop)),
      chooser("environment", "environment", all((run) => run.environments), (name) => name)].filter(Boolean)),
    ...[VIEW.index.live ? h("span.live", { id: "live", role: "status" }, "● live") : null].filter(Boolean),
    h("span.buttons", {},
      h("button", { id: "theme", title: "Light or dark (t)", "aria-label": "Light or dark", onclick: theme }, "◐"),
      h("button", { id: "keys", title: "Keyboard (?)", "aria-label": "Keyboard", onclick: help }, "? keys")));
}

function theme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
}

// ---------------------------------------------------------------------------------------------------------- keyboard

/** Go to the next or previous step, or episode that passes the filters. */
function move(by) {
  const { name, section, run, row } = VIEW.page;
  if (name === "step") {
    const next = section.run.sections[section.place + by];
    if (next) go(`step/${next.id}`);
  } else if (name === "group") {
    const numbers = section.run.groups(section).map((group) => String(group.number));
    const next = numbers[numbers.indexOf(VIEW.page.group) + by];
    if (next !== undefined) go(`group/${section.id}/${next}`);
  } else if (name === "episode") {
    let next = row + by;
    while (next >= 0 && next < run.size && !passes(run, next)) next += by;
    if (next >= 0 && next < run.size) go(`episode/${run.id}/${run.idOf(next)}`);
  }
}

/** Stay with what is shown and go to the next or previous step. */
function moveStep(by) {
  const { name, section, run, row } = VIEW.page;
  if (name === "step") return move(by);
  const next = section?.run.sections[section.place + by];
  if (!next) return;
  if (name === "episode") go(`episode/${run.id}/${run.idOf(Math.min(next.first + row - section.first, next.first + next.size - 1))}`);
  else go(`${name === "group" ? "group" : "step"}/${next.id}${name === "group" ? `/${VIEW.page.group}` : ""}`);
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
  if (name === "episode") return go(run.get("group", row) === null ? `step/${section.id}` : `group/${section.id}/${run.get("group", row)}`);
  if (name === "group") return go(`step/${section.id}`);
  go(`run/${section ? section.run.id : 0}`);
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
  ["u", "up: episode, group, step, run", up],
  ["r", "the run", () => go(`run/${(VIEW.page.run || VIEW.page.section?.run || VIEW.runs[0]).id}`)],
  ["c", "compare: this step with the first, or pin this episode", () => {
    const { name, run, row, section } = VIEW.page;
    if (name === "episode") return pin(run, row);
    const here = section || VIEW.page.run?.sections.at(-1);
    if (here) go(`compare/${VIEW.opposite(here).id}/${here.id}`);
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
  if (event.ctrlKey || event.metaKey || event.altKey || /^(SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
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
  VIEW.index = index;
  VIEW.runs = index.runs.map((data, id) => new Run(id, data, index.live, parts));
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
        if (["run", "step"].includes(VIEW.page?.name)) await render({ keep: true });
        else VIEW.page = parsePlace();
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
  document.title = `${VIEW.runs.map((run) => run.name).slice(0, 2).join(", ")} · agile-trainers`;
  addEventListener("hashchange", () => render());
  let waiting;
  addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => VIEW.onShown?.(), 150);
  });
  await render();
  if (index.live) follow(parts, VIEW.index.version);
}

start().catch((error) => document.getElementById("page").replaceChildren(h("p.error", { role: "alert" }, `The page cannot be shown: ${error.message}`)));
