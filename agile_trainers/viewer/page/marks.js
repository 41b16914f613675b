// Marks of tokens: what they can be coloured by. Blue is positive, orange negative, and a dotted line repeats the sign.

const at = (list, index) => (list ? list[index] : undefined);
const finite = (value) => (typeof value === "number" ? value : null);

const MARKS = {
  turn: { label: "turn", about: "Each turn has a colour and a number.", of: (episode, k) => turnOf(episode, k) },
  advantage: {
    label: "advantage", kind: "signed", about: "Advantage in the loss: blue is made likelier, orange less likely.",
    of: (episode, k) => at(episode.advantages, k) ?? at(episode.turns, turnOf(episode, k))?.advantage,
  },
  ratio: {
    label: "ratio", kind: "signed", about: "Importance ratio in the last pass over the episode: new policy to old; 1 has no colour.",
    of: (episode, k) => at(episode.ratios, k), scale: (ratio) => Math.log(ratio), back: (x) => Math.exp(x),
  },
  clipped: {
    label: "clipping", kind: "flag", about: "Tokens whose ratio was clipped in the last pass, so that they had no gradient, are boxed.",
    of: (episode, k) => at(episode.clipped, k),
  },
  mismatch: {
    label: "mismatch", kind: "signed",
    about: "Training-inference mismatch: the trainer's log-probability minus the sampler's; they should agree. Blue: the trainer found the token likelier.",
    of: (episode, k) => {
      const [ours, theirs] = [finite(at(episode.logprobs, k)), finite(at(episode.sampling_logprobs, k))];
      return ours === null || theirs === null ? null : ours - theirs;
    },
  },
  value: {
    label: "value", kind: "signed", about: "The critic's value of the state before the turn.",
    of: (episode, k) => at(episode.turns, turnOf(episode, k))?.value,
  },
  kl: { label: "KL", kind: "positive", about: "Estimate of the KL divergence from the reference policy.", of: (episode, k) => at(episode.kl, k) },
  surprise: {
    label: "surprise", kind: "positive", about: "Minus the sampler's log-probability: tokens with much colour were unlikely.",
    of: (episode, k) => {
      const value = finite(at(episode.sampling_logprobs, k));
      return value === null ? null : Math.max(0, -value);
    },
  },
};

function turnOf(episode, k) {
  const turn = at(episode.turn_ids, k);
  return turn === undefined || turn < 0 ? null : turn;
}

/** The values of a mark for an episode's tokens; null where there is none, and for tokens of observations. */
function valuesOf(episode, mark) {
  return episode.ids.map((_, k) => (turnOf(episode, k) === null ? null : MARKS[mark].of(episode, k) ?? null));
}

/** The mark that was chosen; before a choice, the first that the episodes have values of. */
function currentMark(episodes) {
  const has = (mark) => episodes.some((episode) => valuesOf(episode, mark).some((value) => value !== null));
  return VIEW.mark || ["advantage", "surprise"].find(has) || "turn";
}

/** The largest magnitude of a mark in episodes, which gets the full colour. */
function extent(episodes, mark) {
  const scale = MARKS[mark].scale || ((value) => value);
  let largest = 0;
  for (const episode of episodes) {
    for (const value of valuesOf(episode, mark)) {
      if (typeof value === "number" && Number.isFinite(scale(value))) largest = Math.max(largest, Math.abs(scale(value)));
    }
  }
  return largest;
}

/** Colour an element by a value: classes name the sign, and --m is the magnitude between 0 and 1. */
function paint(element, mark, value, largest) {
  const { kind, scale } = MARKS[mark];
  element.classList.remove("pos", "neg", "seq", "none", "odd", "flag", "turn");
  element.style.removeProperty("--m");
  element.style.removeProperty("--hue");
  if (value === null || value === undefined) return void element.classList.add("none");
  if (mark === "turn") {
    element.classList.add("turn");
    element.style.setProperty("--hue", `var(--turn-${value % 6})`);
  } else if (kind === "flag") {
    if (value) element.classList.add("flag");
  } else {
    const x = typeof value === "number" ? (scale ? scale(value) : value) : NaN;
    if (!Number.isFinite(x)) return void element.classList.add("odd");
    if (x === 0) return;
    element.classList.add(kind === "positive" ? "seq" : x > 0 ? "pos" : "neg");
    element.style.setProperty("--m", largest ? Math.min(1, Math.abs(x) / largest).toFixed(3) : 0);
  }
}

/** The legend of a mark: the scale with its ends, and how many of the tokens have no value. */
function legend(episodes, mark, largest) {
  const { kind, about, back = (x) => x } = MARKS[mark];
  const values = episodes.flatMap((episode) => valuesOf(episode, mark).filter((_, k) => turnOf(episode, k) !== null));
  const missing = values.filter((value) => value === null).length;
  const parts = [];
  if (values.length && missing === values.length) parts.push(h("strong", {}, `No token has this value${MISSING[mark] || ""}.`));
  else if (kind === "signed" || kind === "positive") {
    const low = kind === "signed" ? signedEnd(back(-largest), mark) : "0";
    parts.push(h("span.scale", {},
      h("span", {}, low), h(`i.ramp.${kind}`, { "aria-hidden": "true" }), h("span", {}, signedEnd(back(largest), mark))));
  } else if (kind === "flag") {
    parts.push(h("span.t.flag", {}, "clipped"), ` ${values.filter(Boolean).length} of ${values.length} tokens`);
  }
  parts.push(h("span", {}, about));
  if (missing && missing < values.length) parts.push(h("span.note", {}, `${missing} of ${values.length} tokens have no value and are grey.`));
  return h("p.legend", {}, parts);
}

const MISSING = {
  value: ": there was no critic",
  kl: ": there was no reference policy",
  advantage: ": the episode took no part in an update",
  ratio: ": the episode took no part in an update",
  clipped: ": the episode took no part in an update",
  mismatch: ": the trainer's log-probabilities were not recorded",
};
const signedEnd = (value, mark) => (mark === "ratio" || MARKS[mark].kind === "positive" ? number(value) : signed(value));
