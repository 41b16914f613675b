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

/** Keeps the parts that were used last. */
class Parts {
  constructor(load, kept = 40) {
    this.load = load;
    this.kept = kept;
    this.loaded = new Map();
  }

  get(name) {
    const promise = this.loaded.get(name) || this.load(name);
    this.loaded.delete(name);
    this.loaded.set(name, promise);
    promise.catch(() => this.loaded.delete(name));
    if (this.loaded.size > this.kept) this.loaded.delete(this.loaded.keys().next().value);
    return promise;
  }
}

/** A run: its metrics, and what is known of every episode without loading it. */
class Run {
  constructor(id, data, live, parts) {
    Object.assign(this, { id, live, parts, name: data.name, info: data.info || {}, metrics: data.metrics });
    this.environments = data.environments;
    this.findings = data.findings || [];
    this.problems = data.problems || [];
    this.columns = data.episodes;
    this.size = this.columns.stop.length;
    let first = 0;
    this.sections = data.sections.map(([phase, step, size, outline], place) => {
      const section = { run: this, place, phase, step, size, outline, first, id: `${id}/${phase}/${step}` };
      first += size;
      return section;
    });
    this.rowOf = new Map(); // of a live run, parts are episodes, and keep their number when rows are added
    if (live) this.columns.part.forEach((part, row) => this.rowOf.set(part, row));
  }

  get label() {
    const info = this.info;
    return info.policy ? `${shortened(info.policy)} · ${this.name}` : this.name;
  }

  get(column, row) {
    return this.columns[column][row];
  }

  environment(row) {
    const place = this.columns.environment[row];
    return place === null ? this.info.environment || null : this.environments[place];
  }

  idOf(row) {
    return this.live ? this.columns.part[row] : row;
  }

  rowOfId(id) {
    return this.live ? this.rowOf.get(id) : id < this.size ? id : undefined;
  }

  sectionOf(row) {
    return this.sections.find((section) => row < section.first + section.size);
  }

  /** The rows of a section by group; episodes without a group are a group of their own each. */
  groups(section) {
    const groups = new Map();
    for (let row = section.first; row < section.first + section.size; row++) {
      const group = this.columns.group[row];
      const key = group === null ? `row ${row}` : `${this.columns.generation[row]}/${group}`;
      if (!groups.has(key)) groups.set(key, { number: group, rows: [] });
      groups.get(key).rows.push(row);
    }
    return [...groups.values()];
  }

  hasEpisodes(section) {
    return this.columns.part[section.first] >= 0;
  }

  async outlines(section) {
    if (!this.hasEpisodes(section)) return null;
    return this.parts.get(`outline/${this.id}/${section.outline}`);
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

  /** A statistic of the episodes by step. */
  counted(phase, statistic) {
    return this.sections
      .filter((section) => section.phase === phase)
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

/** Statistics of rows; episodes whose environment failed do not count in return and success. */
function summary(run, rows) {
  const sound = rows.filter((row) => !FAILED.has(run.get("stop", row)));
  const numbers = (column) => sound.map((row) => run.get(column, row)).filter((value) => typeof value === "number");
  const returns = numbers("return");
  const successes = sound.map((row) => run.get("success", row)).filter((value) => value !== null);
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
