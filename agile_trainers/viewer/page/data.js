// Data. The index is read at once; outlines and episodes are decompressed, or asked of the server, when they are shown.

async function unpacked(base64) {
  const binary = atob(base64);
  const bytes = new Uint8Array(binary.length);
  for (let k = 0; k < binary.length; k++) bytes[k] = binary.charCodeAt(k);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

const parsed = new Promise((resolve) => {
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", resolve);
  else resolve();
});

async function embedded(name) {
  if (!document.getElementById(name)) await parsed; // the part comes later in the file than this script
  const tag = document.getElementById(name);
  if (!tag) throw new Error(`The file holds no part ${name}; it may be cut short.`);
  return unpacked(tag.textContent);
}

async function served(name) {
  const answer = await fetch(`data/${name}`, { cache: "no-store" });
  if (!answer.ok) throw new Error(`The server answered ${answer.status} to ${name}. Is agile-trainers view still running?`);
  return answer.json();
}

/** Keeps the parts that were used last, and those that are asked for with `always`. */
class Parts {
  constructor(load, kept = 40) {
    this.load = load;
    this.kept = kept;
    this.loaded = new Map();
    this.always = new Map();
  }

  get(name, always = false) {
    const loaded = always ? this.always : this.loaded;
    const promise = loaded.get(name) || this.load(name);
    loaded.delete(name);
    loaded.set(name, promise);
    promise.catch(() => loaded.delete(name));
    if (!always && loaded.size > this.kept) loaded.delete(loaded.keys().next().value);
    return promise;
  }

  forget() {
    this.loaded.clear();
    this.always.clear();
  }
}

/** A run: its metrics, and what is known of every episode without loading it. */
class Run {
  constructor(id, data, live, parts) {
    Object.assign(this, { id, live, parts, name: data.name, label: data.label, set: data.set, info: data.info || {}, metrics: data.metrics });
    this.figuresOf = new Map(); // figures of sections that were loaded
    this.environments = data.environments;
    this.findings = data.findings || [];
    this.problems = data.problems || [];
    this.columns = data.episodes;
    this.size = this.columns.stop.length;
    let first = 0;
    this.sections = data.sections.map(([phase, step, size, outline, evaluation], place) => {
      const other = phase === "train" || evaluation === "eval" ? "" : evaluation; // of several at one step
      const label = `${phase === "train" ? "step" : "evaluation at step"} ${step}${other && ` (${other})`}`;
      const batches = new Set(data.episodes.generation.slice(first, first + size)).size;
      const section = { run: this, place, phase, step, size, outline, evaluation, label, batches, first, lowest: new Map() };
      section.id = `${id}/${phase}/${step}${other && `-${other}`}`;
      first += size;
      return section;
    });
    this.rowOf = new Map(); // of a live run, parts are episodes, and keep their number when rows are added
    if (live) this.columns.part.forEach((part, row) => this.rowOf.set(part, row));
  }

  get(column, row) {
    return this.columns[column][row];
  }

  environment(row) {
    const place = this.columns.environment[row];
    return place === null ? this.info.environment || null : this.environments[place];
  }

  /** What the run plays: the names of its environments, of one without a name what the run says. */
  get played() {
    return this.environments.join(", ") || asText(this.info.environment);
  }

  idOf(row) {
    return this.live ? this.columns.part[row] : row;
  }

  rowOfId(id) {
    return this.live ? this.rowOf.get(id) : id < this.size ? id : undefined;
  }

  sectionOf(row) {
    let [low, high] = [0, this.sections.length - 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (row < this.sections[middle].first + this.sections[middle].size) high = middle;
      else low = middle + 1;
    }
    return this.sections[low];
  }

  /** The name of a row's group in its section: its number, in a step of several batches with the batch's; null without one. */
  groupOf(row) {
    const group = this.columns.group[row];
    return group === null ? null : this.sectionOf(row).batches > 1 ? `${this.columns.generation[row]}.${group}` : String(group);
  }

  /** The rows of a section by group; episodes without a group are a group of their own each. */
  groups(section) {
    const groups = new Map();
    for (let row = section.first; row < section.first + section.size; row++) {
      const name = this.groupOf(row);
      const key = name ?? `row ${row}`;
      if (!groups.has(key)) groups.set(key, { name, rows: [] });
      groups.get(key).rows.push(row);
    }
    return [...groups.values()];
  }

  /**
   * The return that an episode counts with. A failed one of an evaluation counts as in the log: with the lowest of the sound
   * ones of its environment, or of all if it has none, and 0. One of training does not count: null.
   */
  countedReturn(row) {
    if (!FAILED.has(this.get("stop", row))) return this.get("return", row);
    const section = this.sectionOf(row);
    if (section.phase === "train") return null;
    const environment = this.get("environment", row);
    if (!section.lowest.has(environment)) {
      const sound = rowsOf(section).filter((one) => !FAILED.has(this.get("stop", one)) && typeof this.get("return", one) === "number");
      const own = sound.filter((one) => this.get("environment", one) === environment);
      const lowest = (own.length ? own : sound).reduce((low, one) => Math.min(low, this.get("return", one)), 0);
      section.lowest.set(environment, sound.length ? lowest : null);
    }
    return section.lowest.get(environment);
  }

  hasEpisodes(section) {
    return this.columns.part[section.first] >= 0;
  }

  async outlines(section) {
    if (!this.hasEpisodes(section)) return null;
    return this.parts.get(`outline/${this.id}/${section.outline}`);
  }

  /** The whole texts of a section's episodes, to search in; null if they are not in the file. */
  async texts(section) {
    if (!this.hasEpisodes(section)) return null;
    return this.parts.get(`texts/${this.id}/${section.outline}`, true);
  }

  /** The start, clipping and lowest advantage of a section's episodes; null if they are not in the file. */
  async figures(section) {
    if (!this.hasEpisodes(section)) return null;
    const found = await this.parts.get(`figures/${this.id}/${section.outline}`, true);
    this.figuresOf.set(section, found);
    return found;
  }

  /** A figure of an episode, if its section's were loaded. */
  figure(name, row) {
    const section = this.sectionOf(row);
    return this.figuresOf.get(section)?.[row - section.first][name] ?? null;
  }

  /** An episode with the tokens' bytes; null if only its numbers are in the file. */
  async episode(row) {
    const part = this.columns.part[row];
    if (part < 0) return null;
    const loaded = await this.parts.get(`episodes/${this.id}/${part}`);
    let first = row;
    while (!this.live && first > 0 && this.columns.part[first - 1] === part) first--;
    return { ...loaded.episodes[row - first], pieces: loaded.pieces };
  }

  /** A metric by step, from the log; the first of the names that it has. */
  logged(names) {
    const steps = this.metrics.step;
    const name = names.find((one) => this.metrics[one]);
    if (!name || !steps) return [];
    return steps.map((step, k) => [step, this.metrics[name][k]]).filter(([step, y]) => step !== null && typeof y === "number");
  }

  /** A statistic of the episodes by step; of several evaluations at a step, of the first. */
  counted(phase, statistic) {
    const sections = this.sections.filter((section) => section.phase === phase);
    return sections
      .filter(({ evaluation }) => evaluation === sections[0].evaluation)
      .map((section) => [section.step, statistic(section)])
      .filter(([, y]) => typeof y === "number");
  }
}

const FAILED = new Set(["environment_error", "environment_timeout"]);

function outcome(run, row) {
  if (FAILED.has(run.get("stop", row))) return "error";
  const success = run.get("success", row);
  return success === null ? "unknown" : success ? "success" : "failure";
}

const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);

/**
 * Statistics of rows; episodes of an expert do not count in return and success, nor in training those whose environment failed.
 * In evaluations these count as unsuccessful, which the index has, and with the lowest return.
 */
function summary(run, rows) {
  const own = rows.filter((row) => !run.get("demonstration", row));
  const sound = own.filter((row) => !FAILED.has(run.get("stop", row)));
  const numbers = (column) => sound.map((row) => run.get(column, row)).filter((value) => typeof value === "number");
  const returns = own.map((row) => run.countedReturn(row)).filter((value) => typeof value === "number");
  const successes = own.map((row) => run.get("success", row)).filter((value) => value !== null);
  const stops = {};
  for (const row of rows) stops[run.get("stop", row)] = (stops[run.get("stop", row)] || 0) + 1;
  return {
    size: rows.length,
    return: mean(returns),
    success: mean(successes.map(Number)),
    turns: mean(numbers("num_turns")),
    tokens: mean(numbers("num_tokens")),
    stops,
  };
}

const rowsOf = (section) => Array.from({ length: section.size }, (_, k) => section.first + k);

/** Whether no turn of any member of a group has an advantage; false where advantages are not known. */
function isZeroAdvantage(run, outlines) {
  const eps = Number(run.info.options?.zero_advantage_eps ?? 1e-6);
  const turns = outlines.flatMap((outline) => outline.turns);
  return turns.length > 0 && turns.every(({ advantage }) => Math.abs(finite(advantage) ?? NaN) <= eps);
}

/** Why no member of a group has an advantage, in a sentence; null if one has, and in evaluations. */
function whyNoAdvantage(run, section, rows, outlines) {
  if (section.phase !== "train") return null;
  const sound = rows.filter((row) => !FAILED.has(run.get("stop", row)));
  if (!sound.length) return "The environment failed in every episode, so that none is trained on.";
  const known = outlines.flatMap((outline) => outline.turns).filter(({ advantage }) => advantage !== null && advantage !== undefined);
  if (!known.length) {
    return "The group took no part in an update: none of its episodes has an advantage. Groups that were replaced by others have none, nor do batches that a run left before its update.";
  }
  if (!isZeroAdvantage(run, outlines)) return null;
  if (sound.length === 1) return "Only one episode was played without an error, so that there is none to compare it with.";
  const spread = (values) => Math.max(...values) - Math.min(...values);
  const eps = Number(run.info.options?.zero_advantage_eps ?? 1e-6);
  const returns = sound.map((row) => run.get("return", row));
  const won = sound.filter((row) => run.get("success", row) === true).length;
  const outcomes = won === sound.length ? " All succeed: the task is too easy by now." : won === 0 && sound.every((row) => run.get("success", row) === false) ? " None succeeds: the task is too hard so far." : "";
  if (spread(returns) <= eps) return `All ${sound.length} episodes have the return ${number(returns[0])}, so that none is better.${outcomes}`;
  const credit = outlines.map((outline) => finite(outline.credit)).filter((value) => value !== null);
  if (credit.length && spread(credit) <= eps) return "The environment's returns differ, but the rewards that credit was computed from are equal.";
  return `The returns differ, but every advantage is at most zero_advantage_eps (${eps}) in size.`;
}

/** Clipped tokens as a share of those of which it is known, over the episodes of a section whose figures are given. */
function clipShare(figures) {
  const counts = figures.map((one) => one?.clip).filter(Boolean);
  const all = counts.reduce((sum, [, size]) => sum + size, 0);
  return all ? counts.reduce((sum, [clipped]) => sum + clipped, 0) / all : null;
}
