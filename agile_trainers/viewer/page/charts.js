// Charts: small line charts that share the step axis, and strips of turns.

const CHART = { height: 150, left: 46, right: 10, top: 8, bottom: 20 };
const LETTER = 7; // pixels of the widest usual letter of a label

function ticks(low, high, wanted) {
  const rough = (high - low) / wanted || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((one) => one >= rough * 0.999);
  const found = [];
  // The count is bounded since neighbouring numbers beyond 2 ** 53 are further apart than one.
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9 && found.length < 50; k++) found.push(Number((k * step).toPrecision(12)));
  return found;
}

/** Centred moving mean. */
function smooth(points, width) {
  const half = Math.floor(width / 2);
  return points.map(([x], k) => [x, mean(points.slice(Math.max(0, k - half), k + half + 1).map(([, y]) => y))]);
}

const pathOf = (points, x, y) => points.map(([a, b], k) => `${k ? "L" : "M"}${x(a).toFixed(1)},${y(b).toFixed(1)}`).join("");

/**
 * A line chart of some series by step. The band of a series has its lowest and highest value at each step.
 * @param {{title: string, about: string, series: {label: string, points: number[][], band: number[][]}[], format: function}} chart
 * @param {{width: number, range: number[], pick: function(number)}} place
 */
function lineChart({ title, about, series, format }, { width, range, pick }) {
  const { height, right, top, bottom } = CHART;
  const all = series.flatMap(({ points, band = [] }) => [...points.map(([, y]) => y), ...band.flatMap(([, ...ends]) => ends)]);
  let [low, high] = all.reduce(([least, most], y) => [Math.min(least, y), Math.max(most, y)], [Infinity, -Infinity]);
  if (low === high) [low, high] = [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  const pad = (high - low) * 0.06;
  const share = format === percent; // never below 0 or above 100 %
  [low, high] = [share ? Math.max(0, low - pad) : low - pad, share ? Math.min(1, high + pad) : high + pad];
  const [first, last] = range[0] === range[1] ? [range[0] - 1, range[1] + 1] : range;
  const labels = ticks(low, high, 3).map((tick) => [tick, share ? `${number(100 * tick)} %` : number(tick)]);
  const left = Math.max(CHART.left, 8 + LETTER * Math.max(...labels.map(([, text]) => text.length)));
  const x = (step) => left + ((step - first) / (last - first)) * (width - left - right);
  const y = (value) => height - bottom - ((value - low) / (high - low)) * (height - top - bottom);
  const grid = labels.map(([tick, text]) => [
    svg("line", { x1: left, x2: width - right, y1: y(tick), y2: y(tick), class: "grid" }),
    svg("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, text),
  ]);
  const steps = ticks(first, last, Math.max(2, width / 110)).filter(Number.isInteger).map((tick) =>
    svg("text", { x: x(tick), y: height - 5, "text-anchor": "middle" }, String(tick)));
  const bands = series.map(({ band = [] }, k) => (band.length < 2 ? null : svg("path", {
    class: `band fill-${k}`,
    d: `${pathOf(band.map(([step, , most]) => [step, most]), x, y)}L${pathOf(band.map(([step, least]) => [step, least]).reverse(), x, y).slice(1)}Z`,
  })));
  const lines = series.map(({ points, band }, k) => {
    const shape = `series-${k}`;
    if (points.length < 2) return points.map(([a, b]) => svg("circle", { cx: x(a), cy: y(b), r: 3, class: `dot ${shape}` }));
    if (points.length < 60 || band) return svg("path", { d: pathOf(points, x, y), class: `line ${shape}` });
    return [
      svg("path", { d: pathOf(points, x, y), class: `line raw ${shape}` }),
      svg("path", { d: pathOf(smooth(points, points.length / 20), x, y), class: `line ${shape}` }),
    ];
  });
  const cursor = svg("line", { y1: top, y2: height - bottom, class: "cursor", visibility: "hidden" });
  const drawing = svg("svg", { width, height, role: "img", "aria-label": `${title} by step` }, grid, steps, bands, lines.flat(), cursor);
  const reading = h("span.reading");
  const show = (step) => {
    const texts = series.map(({ label, points }, k) => {
      const point = step === null ? points[points.length - 1] : nearest(points, step);
      return point && h(`span.key-${k}`, { title: label }, format(point[1]));
    });
    reading.replaceChildren(...texts.filter(Boolean));
    cursor.setAttribute("visibility", step === null ? "hidden" : "visible");
    if (step !== null) cursor.setAttribute("x1", x(step)), cursor.setAttribute("x2", x(step));
  };
  const stepAt = (event) => {
    const inside = (event.clientX - drawing.getBoundingClientRect().left - left) / (width - left - right);
    return Math.round(first + Math.min(1, Math.max(0, inside)) * (last - first));
  };
  show(null);
  if (pick) {
    drawing.classList.add("pick");
    drawing.addEventListener("click", (event) => pick(stepAt(event)));
  }
  return {
    element: h("figure.chart", {}, h("figcaption", { title: about }, h("span", {}, title), reading), drawing),
    show, stepAt, drawing,
  };
}

function nearest(points, step) {
  let found = null;
  for (const point of points) if (!found || Math.abs(point[0] - step) < Math.abs(found[0] - step)) found = point;
  return found;
}

/** A bar of the stop reasons of episodes, each with a pattern of its own. */
function stopBar(stops, order) {
  const total = Object.values(stops).reduce((sum, value) => sum + value, 0);
  const text = order.filter((name) => stops[name]).map((name) => `${words(name)} ${stops[name]}`).join(", ");
  return h("span.stops", { role: "img", "aria-label": text, title: text }, order.map((name, k) =>
    stops[name] ? h(`i.stop-${k % 6}`, { "--w": stops[name] / total }) : null));
}

const words = (name) => String(name).replaceAll("_", " ");

const CELLS = 24;
const BAR = 60;

/**
 * The turns of an episode, coloured by advantage: a cell for each, with the reward as its text. Of an episode of many turns, one
 * bar for each 60, in which a turn is a stripe; a stripe of a reward is marked.
 */
function turnStrip(turns, largest) {
  if (turns.length > CELLS) {
    const bars = [];
    for (let first = 0; first < turns.length; first += BAR) bars.push(turnBar(turns.slice(first, first + BAR), largest));
    const text = `${turns.length} turns, ${turns.filter(({ reward }) => reward).length} with a reward`;
    return h("span.strip.long", { role: "img", "aria-label": text, title: text }, bars);
  }
  return h("span.strip", {}, turns.map((turn, k) => {
    const text = `turn ${k + 1}: reward ${number(turn.reward)}, advantage ${signed(turn.advantage)}`;
    const cell = h("span.cell", { title: text }, turn.reward ? number(turn.reward, 2) : "·");
    paint(cell, "advantage", turn.advantage, largest);
    return cell;
  }));
}

/** A bar as one element: the stripes are its background, the rewards marks below them. */
function turnBar(turns, largest) {
  const stripes = (colour) => turns.map((turn, k) => `${colour(turn)} ${(100 * k) / turns.length}% ${(100 * (k + 1)) / turns.length}%`).join(", ");
  const shade = ({ advantage }) => {
    const value = finite(advantage);
    if (!value) return value === null ? "var(--raised)" : "transparent";
    const strength = Math.round(10 + 62 * (largest ? Math.min(1, Math.abs(value) / largest) : 0));
    return `color-mix(in oklab, var(${value > 0 ? "--pos" : "--neg"}) ${strength}%, transparent)`;
  };
  return h("span.turnbar", {
    "--n": turns.length,
    "--stripes": `linear-gradient(90deg, ${stripes(shade)})`,
    "--rewards": `linear-gradient(90deg, ${stripes(({ reward }) => (reward ? "var(--text)" : "transparent"))})`,
  });
}
