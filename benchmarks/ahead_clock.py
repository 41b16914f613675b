"""Plays batches ahead of their updates on a virtual clock, with the engine and the scheduler of a real run.

1,000 groups of heavy-tailed lengths are played by ``RolloutEngine`` and ``BatchesAhead`` (``batches_ahead``). Their
generator takes virtual time for each answer, for at most ``SLOTS`` at once, first come first served; environments take none.
An update takes virtual time too: the generator stops meanwhile, or plays on as a server does. The policy is a number that
each update raises, and an answer is the number of the policy that gave it. The order, the policy of every answer and the
number of open batches are checked, and the time of the run is compared with ``ahead_paths.py``, which knows nothing of the
library. Beside it is the rule that trains on groups in the order in which they end, and discards those that are too old. The
exit code is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from ahead_paths import TAILS, Work, batches, discarding, episodes, makespan, mean
from matplotlib.figure import Figure
from update_vs_trl import with_tables

from agile_trainers.adapters.copies import Snapshots
from agile_trainers.adapters.roles import POLICY
from agile_trainers.checkpoints.record import AheadState
from agile_trainers.embedded import make_word_tokenizer
from agile_trainers.rollout.chat.renderer import ChatRenderer
from agile_trainers.rollout.engine import RolloutEngine
from agile_trainers.rollout.environment_pool import EnvironmentPool
from agile_trainers.rollout.generators.base import Conversations, GenerationOutput, GenerationRequest
from agile_trainers.rollout.spec import EpisodeSpec, Limits
from agile_trainers.sampling.sampler import Versions
from agile_trainers.step.ahead import BatchesAhead
from agile_trainers.types import Trajectory

ROOT = Path(__file__).resolve().parent
RESULTS = ROOT / "results" / "ahead_clock.json"
PAGE = ROOT / "results" / "ahead.md"
PICTURE = ROOT.parent / "docs" / "images" / "ahead.png"
BATCHES, GROUPS, MEMBERS = 125, 8, 2
SLOTS, UPDATE = 16, 3.0
"""With episodes of mean length 3, the work of a batch takes as long as its update, if no slot is ever free."""
AHEAD, SEEDS = range(5), (0, 1, 2)
PATIENCE = 120.0
"""Seconds after which a run that plays on counts as stuck."""
STUCK = "Virtual time stands still: trainer and rollout wait for each other."
BAR = 1.02
"""Time of a run, at most, over the longest path under order, lag and slots."""

TOKENIZER = make_word_tokenizer(["go", "end", *"0123456789"])
CHAT = ChatRenderer(TOKENIZER)
DIGITS = {TOKENIZER.get_vocab()[digit]: digit for digit in "0123456789"}
IDS = {digit: token for token, digit in DIGITS.items()}
END: int = TOKENIZER.eos_token_id


def number_in(token_ids: Sequence[int]) -> int:
    """Return the number that the first digits of a text write."""
    written = ""
    for token in token_ids:
        if token in DIGITS:
            written += DIGITS[token]
        elif written:
            break
    return int(written)


class Numbered:
    """An environment that says its episode's number and ends after its turns."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Say the number."""
        assert options is not None
        self.left: int = options["turns"]
        return " ".join(str(options["number"])), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Count a turn."""
        self.left -= 1
        return ("go" if self.left else "end"), 1.0, not self.left, False, {}


class Clock:
    """Virtual time, which the generator moves on."""

    def __init__(self) -> None:
        self.now = 0.0
        self.stop = float("inf")
        """Time at which the trainer does something."""
        self.computed = 0.0
        """Time of all slots together in which they computed."""

    def go_to(self, then: float, computing: int) -> None:
        """Let the time come at which something happens, or :attr:`stop`."""
        then = min(then, self.stop)
        self.computed += computing * (then - self.now)
        self.now = then


class SharedClock(Clock):
    """Virtual time of a trainer, and of a generator that answers in another thread.

    It stands still where the trainer does something, which takes no virtual time: from the end of the batch that it waits
    for to the start of the update, and from the end of the update until all new episodes have asked for their first answer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.begun = 0
        """Number of the episodes that have begun."""
        self._awaited: range | None = None
        self._asked = set[int]()
        self._ended = set[int]()
        self._changed = threading.Condition()
        self._wake: Callable[[], None] = lambda: None
        self._given_up = False

    def listen(self, wake: Callable[[], None]) -> None:
        """Take a function that tells the rollout that time goes on."""
        self._wake = wake

    @property
    def stands(self) -> bool:
        """True if the trainer has something to do.

        Raises:
            RuntimeError: If it has done nothing for long.
        """
        if self._given_up:
            raise RuntimeError(STUCK)
        has = self._awaited is not None and self._ended.issuperset(self._awaited)
        return has or self.now >= self.stop or len(self._asked | self._ended) < self.begun

    def note(self, asked: Sequence[int] = (), ended: Sequence[int] = ()) -> None:
        """Note that episodes have asked for an answer or have ended, or that :attr:`stop` has come."""
        with self._changed:
            self._asked.update(asked)
            self._ended.update(ended)
            self._changed.notify_all()

    def until(self, awaited: range) -> None:
        """Let time go on to the end of some episodes."""
        self._awaited, self.stop = awaited, float("inf")
        self._wake()

    def update(self, duration: float) -> None:
        """Let an update take its time, while episodes are played."""
        self.stop, self._awaited = self.now + duration, None
        self._wake()
        with self._changed:
            self._changed.wait_for(lambda: self._given_up or self.now >= self.stop or len(self._ended) == self.begun)
        if self._given_up:
            raise RuntimeError(STUCK)
        self.now = self.stop

    def give_up(self) -> None:
        """Let both sides raise an error instead of waiting for ever."""
        self._given_up = True
        self.note()
        self._wake()


class VirtualGenerator:
    """Answers after virtual time, so many requests at once, first come first served.

    Args:
        clock: The time, which :meth:`step` moves on to the next answer.
        slots: Requests that are computed at once.
        work: Durations by episode and turn.
        answer: Returns the ids of an answer, given the key of its episode.
    """

    def __init__(self, clock: Clock, slots: int, work: Sequence[Sequence[float]], answer: Callable[[int], list[int]]):
        self._clock, self._slots, self._work, self._answer = clock, slots, work, answer
        self._conversations = Conversations[GenerationRequest]()
        self._waiting: dict[int, GenerationRequest] = {}
        self._computing: dict[int, tuple[float, GenerationRequest]] = {}

    def submit(self, request: GenerationRequest) -> None:
        """Let a request wait for a slot."""
        self._conversations.check(request)
        self._conversations.submitted(request, request)
        self._waiting[request.episode] = request

    def step(self) -> list[GenerationOutput]:
        """Go on to the next answer, or to the time at which to stop."""
        while self._waiting and len(self._computing) < self._slots:
            request = self._waiting.pop(next(iter(self._waiting)))
            turn = (request.token_ids.count(END) - 1) // 2  # each turn ends an observation and an answer
            duration = self._work[number_in(request.token_ids)][turn]
            self._computing[request.episode] = self._clock.now + duration, request
        key, (end, request) = min(self._computing.items(), key=lambda item: item[1][0])
        self._clock.go_to(min(end, self._clock.stop), len(self._computing))
        if end > self._clock.stop:
            return []
        del self._computing[key]
        ids = self._answer(key)
        self._conversations.answered(request, ids)
        return [GenerationOutput(key, ids, [0.0] * len(ids), "stop", read=len(request.token_ids))]

    @property
    def pending(self) -> int:
        """Number of requests that wait or are computed."""
        return len(self._waiting) + len(self._computing)

    def release(self, episode: int) -> None:
        """Forget an episode."""
        self._conversations.release(episode)
        self._computing.pop(episode, None)
        self._waiting.pop(episode, None)


class VirtualServer(VirtualGenerator):
    """A generator that answers while the trainer updates."""

    _clock: SharedClock

    def listen(self, wake: Callable[[], None]) -> None:
        """Call a function when there is something to do; see :meth:`Rollout.playing`."""
        self._clock.listen(wake)

    def submit(self, request: GenerationRequest) -> None:
        """Let a request wait for a slot."""
        super().submit(request)
        self._clock.note(asked=[request.episode])

    def step(self) -> list[GenerationOutput]:
        """Go on to the next answer, unless the trainer has something to do before."""
        outputs = [] if self._clock.stands or not self.pending else super().step()
        if self._clock.stands:
            self._clock.note()
        return outputs

    def release(self, episode: int) -> None:
        """Forget an episode."""
        super().release(episode)
        self._clock.note(ended=[episode])


class VirtualSampler:
    """Makes virtual generators; see ``RolloutSampler``, in whose place it is.

    Args:
        clock: The time; a shared one lets a server play on during updates.
        make: Makes a generator, given the function from the key of an episode to its answer.
        policy: Returns the number that the policy is now.
        awaited: Returns the episodes of the generation batch that is waited for.
        watch: Called whenever a batch is going to be played.
    """

    def __init__(
        self,
        clock: Clock,
        make: Callable[[Callable[[int], list[int]]], VirtualGenerator],
        policy: Callable[[], int],
        awaited: Callable[[], range],
        watch: Callable[[], None],
    ) -> None:
        self._clock, self._make, self._policy, self._awaited, self._watch = clock, make, policy, awaited, watch
        self._served: dict[int, int] = {}

    @property
    def overlaps(self) -> bool:
        """True if episodes are played during updates."""
        return isinstance(self._clock, SharedClock)

    def serve(self, versions: Versions) -> None:
        """Serve the policies that play, and no other; then let time go on."""
        assert isinstance(self._clock, SharedClock)
        self._watch()
        self._served = {version: number for version, number in self._served.items() if version in versions.wanted()}
        for version in set(versions.wanted()) - self._served.keys():
            with versions.holding(version):
                self._served[version] = self._policy()
        self._clock.until(self._awaited())

    @contextmanager
    def generator_of_versions(self, versions: Versions) -> Iterator[VirtualGenerator]:
        """Make a generator that plays on during updates."""
        yield self._make(lambda key: answer_of(self._served[versions.of(key)]))

    @contextmanager
    def generators(self, versions: Versions) -> Iterator[Callable[[], VirtualGenerator]]:
        """Give a function that makes a generator until the next update."""
        self._watch()

        def answer(key: int) -> list[int]:
            with versions.holding(versions.of(key)):
                return answer_of(self._policy())

        yield lambda: self._make(answer)


def answer_of(policy: int) -> list[int]:
    """Return the answer of a policy: its number."""
    return [*(IDS[digit] for digit in str(policy)), END]


@dataclass
class Run:
    """The course of a run."""

    trained: list[list[int]] = field(default_factory=list)
    """Numbers of the episodes of each batch, in the order in which it was trained on."""
    versions: list[set[int]] = field(default_factory=list)
    """Policies that the answers of each batch name, and the version of its trajectories."""
    open: list[int] = field(default_factory=list)
    """Batches that were open while each was played."""
    policies: list[int] = field(default_factory=list)
    """Snapshots that were kept meanwhile."""
    makespan: float = 0.0
    computed: float = 0.0

    def defects(self, ahead: int, size: int) -> list[str]:
        """Return what contradicts the rule, in words."""
        count = len(self.trained)
        admitted = [[*range(number * size, (number + 1) * size)] for number in range(count)]
        last = [min(number + ahead, count - 1) for number in range(count)]
        rules = {
            "the sequence is not the admitted one": self.trained == admitted,
            "a policy is not the one of so many batches earlier": self.versions
            == [{max(0, number - ahead)} for number in range(count)],
            "other batches are open": self.open == [end - number + 1 for number, end in enumerate(last)],
            "more policies are kept than batches are open": all(
                kept <= count for kept, count in zip(self.policies, self.open)
            ),
        }
        return [said for said, holds in rules.items() if not holds]


class Process:
    """A process that trains in virtual time; see :func:`run` for the arguments.

    Args:
        result: Gets what the process does.
        generation: Generation batches that the policy was trained on before.
    """

    def __init__(
        self,
        work: Work,
        ahead: int,
        slots: int,
        plays_on: bool,
        environment: Callable[[], Any],
        result: Run,
        generation: int = 0,
    ) -> None:
        self._arguments = work, ahead, slots, plays_on, environment, result
        self._size, self._turns = len(work[0]), [one for batch in work for one in batch]
        self._result, self._generation = result, generation
        self.clock: Clock = SharedClock() if plays_on else Clock()
        self._policy = torch.nn.Linear(1, 1, bias=False).requires_grad_(False)
        self._policy.weight.fill_(generation)
        model = torch.nn.ModuleDict({"lora": torch.nn.ModuleDict({POLICY: self._policy})})
        self._snapshots = Snapshots(lambda: model)
        most = max(map(len, self._turns))
        engine = RolloutEngine(EnvironmentPool(environment), CHAT, Limits(most, 4, 64 * (most + 1)))
        make = partial(VirtualServer if plays_on else VirtualGenerator, self.clock, slots, self._turns)
        sampler: Any = VirtualSampler(
            self.clock, make, lambda: int(self._policy.weight.item()), lambda: self._of(self._generation), self._watch
        )
        self._scheduler = BatchesAhead(ahead, engine, sampler, self._snapshots, self._draw)
        give_up = self.clock.give_up if isinstance(self.clock, SharedClock) else lambda: None
        self._watchdog = threading.Timer(PATIENCE, give_up)
        self._watchdog.daemon = True
        self._watchdog.start()

    def train(self, update: float) -> None:
        """Play the next batch and train on it, for so long."""
        _, trajectories, version = self._scheduler.play(self._generation, len(self._arguments[0]) - 1)
        self._result.trained.append([one.options["number"] for one in trajectories if one.options is not None])
        self._result.versions.append({version} | said(trajectories))
        if isinstance(self.clock, SharedClock):
            self.clock.update(update)
        else:
            self.clock.now += update
        self._policy.weight += 1
        self._generation += 1

    def resumed(self) -> Process:
        """End; return the process that goes on from the checkpoint of this one, through JSON."""
        state = self._scheduler.state()
        batches = json.loads(json.dumps(state.batches))
        weights = {
            version: {name: weight.clone() for name, weight in named.items()}
            for version, named in state.weights.items()
        }
        self.close()
        other = Process(*self._arguments, generation=self._generation)
        other.clock.now, other.clock.computed = self.clock.now, self.clock.computed
        other._scheduler.restore(AheadState(batches, weights))
        return other

    def close(self) -> None:
        """Give up what is under way."""
        self._watchdog.cancel()
        self._scheduler.close()

    def _of(self, generation: int) -> range:
        """Return the numbers of a batch's episodes, which are their keys too."""
        return range(generation * self._size, (generation + 1) * self._size)

    def _draw(self, generation: int) -> Any:
        own = self._of(generation)
        if isinstance(self.clock, SharedClock):
            self.clock.begun += len(own)
        rows = [{"number": number, "turns": len(self._turns[number])} for number in own]
        return SimpleNamespace(specs=[EpisodeSpec(it["number"] // MEMBERS, (it["number"],), it) for it in rows])

    def _watch(self) -> None:
        self._result.open.append(len(self._scheduler.versions))
        self._result.policies.append(len(self._snapshots.weights))


def run(
    work: Work,
    ahead: int,
    *,
    slots: int = SLOTS,
    update: float = UPDATE,
    plays_on: bool = True,
    environment: Callable[[], Any] = Numbered,
    killed: Collection[int] = (),
) -> Run:
    """Train on batches, in virtual time.

    Args:
        work: Durations by batch, episode and turn; all batches have as many episodes.
        ahead: Batches ahead.
        slots: Answers that are computed at once.
        update: Duration of an update.
        plays_on: Let the generator play on during updates; False: it stops, and samples again what was under way.
        environment: Makes an environment that says its number.
        killed: Batches after whose update the process ends, and another one goes on.
    """
    result = Run()
    process = Process(work, ahead, slots, plays_on, environment, result)
    try:
        for generation in range(len(work)):
            process.train(update)
            if generation in killed:
                process = process.resumed()
    finally:
        process.close()
    result.makespan, result.computed = process.clock.now, process.clock.computed
    return result


def said(trajectories: Sequence[Trajectory]) -> set[int]:
    """Return the policies of some episodes: what their answers say, and what they name."""
    found = set[int]()
    for one in trajectories:
        found |= {one.version, *(number_in(one.action_of(k)) for k in range(len(one.turns)))}
    return found


def measure(tail: str, seed: int, count: int = BATCHES) -> list[dict[str, Any]]:
    """Train with each number of batches ahead, in both modes, and beside it by the rule that discards.

    Returns:
        For each number: the times of ``paused`` and ``played_on`` runs and of the longest path of each, the share of the
        slots' time that was ``busy``, ``defects``, and of the rule that discards its time, share and bias.
    """
    work, rows = batches(episodes(tail, seed), count, GROUPS * MEMBERS), []
    for ahead in AHEAD:
        row: dict[str, Any] = {"tail": tail, "seed": seed, "ahead": ahead, "defects": []}
        for name, plays_on in (("paused", False), ("played_on", True)):
            done = run(work, ahead, plays_on=plays_on)
            path = makespan(work, ahead, SLOTS, UPDATE, plays_on=plays_on)
            row["defects"] += done.defects(ahead, GROUPS * MEMBERS)
            row[name] = {"time": done.makespan, "path": path, "busy": done.computed / SLOTS / done.makespan}
        if ahead:
            row["most_open"] = makespan(work, ahead, SLOTS, UPDATE, most_open=ahead)
            other = discarding(
                episodes(tail, seed), ahead, SLOTS, UPDATE, updates=count, groups=GROUPS, members=MEMBERS
            )
            row["discarding"] = {"time": other.makespan, "share": other.share, "bias": other.bias}
        rows.append(row)
    return rows


def missed(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the checks that fail, in words."""
    found = []
    for row in rows:
        title = f"{row['tail']}, seed {row['seed']}, {row['ahead']} ahead: "
        found += [title + defect for defect in row["defects"]]
        for name in ("paused", "played_on"):
            ratio = row[name]["time"] / row[name]["path"]
            found += [f"{title}{name}, {ratio:.3f} of the longest path"] if ratio > BAR else []
    return found


def speed_up(rows: Sequence[dict[str, Any]], tail: str, ahead: int, name: str) -> float:
    """Return how many times as fast as without batches ahead a side was, the mean over seeds."""
    chosen = [row for row in rows if row["tail"] == tail]
    whole = {row["seed"]: row["played_on"]["time"] for row in chosen if row["ahead"] == 0}
    return mean([whole[row["seed"]] / row[name]["time"] for row in chosen if row["ahead"] == ahead])


def over_seeds(rows: Sequence[dict[str, Any]], tail: str, ahead: int, name: str, key: str) -> float:
    """Return a side's mean over seeds."""
    return mean([row[name][key] for row in rows if row["tail"] == tail and row["ahead"] == ahead])


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Write the results as a table of Markdown."""
    lines = [
        "| lengths | batches ahead | faster, paused | faster, plays on | slots busy, paused | slots busy, plays on "
        "| faster, discarding | discarded | length of trained groups |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for tail in TAILS:
        for ahead in AHEAD:
            cells = [
                tail,
                str(ahead),
                *(f"{speed_up(rows, tail, ahead, name):.2f}" for name in ("paused", "played_on")),
            ]
            cells += [f"{over_seeds(rows, tail, ahead, name, 'busy'):.0%}" for name in ("paused", "played_on")]
            if ahead:
                share, bias = (over_seeds(rows, tail, ahead, "discarding", key) for key in ("share", "bias"))
                cells += [f"{speed_up(rows, tail, ahead, 'discarding'):.2f}", f"{share:.0%}", f"{bias:.2f}"]
            else:
                cells += [""] * 3
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines).replace("%", " %") + f"\n\n{summary(rows)}"


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Write what the table has no column for."""
    ratio = max(row[name]["time"] / row[name]["path"] for row in rows for name in ("paused", "played_on"))
    one = [row["most_open"] / row["played_on"]["path"] for row in rows if row["ahead"] == 1]
    defects = sum(len(row["defects"]) for row in rows)
    return (
        f"Of {2 * len(rows)} runs, {defects or 'none'} trained in another order or with another policy, and none took more "
        f"than {ratio:.3f} times the longest path under order, lag and slots. If at most n batches were open instead of "
        f"n + 1, one batch ahead would take {min(one):.2f} to {max(one):.2f} times as long: as long as none ahead."
    )


def picture(rows: Sequence[dict[str, Any]]) -> Figure:
    """Draw the speed over batches ahead, and the length of the groups that the rule that discards trains on."""
    figure = Figure(figsize=(7.6, 3.0), layout="constrained")
    speeds, lengths = figure.subplots(1, 2)
    for tail, colour in zip(TAILS, ("#0072B2", "#D55E00"), strict=True):
        for name, style, title in (("played_on", "-", "plays on"), ("paused", "--", "paused")):
            values = [speed_up(rows, tail, ahead, name) for ahead in AHEAD]
            speeds.plot(AHEAD, values, style, marker="o", markersize=4, color=colour, label=f"{tail}, {title}")
        bias = [over_seeds(rows, tail, ahead, "discarding", "bias") for ahead in AHEAD if ahead]
        lengths.plot(AHEAD[1:], bias, marker="o", markersize=4, color=colour, label=f"{tail}, old groups discarded")
    lengths.axhline(1, color="0.3", linewidth=1.6, label="batches_ahead")
    speeds.set(xlabel="batches_ahead", ylabel="times as fast", ylim=(0.9, None))
    lengths.set(xlabel="updates that a group may be old", ylabel="length, trained / started", ylim=(0.5, 1.05))
    for panel in (speeds, lengths):
        panel.spines[["top", "right"]].set_visible(False)
    speeds.set_xticks(list(AHEAD))
    speeds.legend(frameon=False, fontsize=8)
    lengths.set_xticks(list(AHEAD)[1:])
    lengths.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(0, 0.91))
    return figure


def report(rows: Sequence[dict[str, Any]]) -> None:
    """Write table and picture of the page."""
    PAGE.write_text(with_tables(PAGE.read_text(), {"ahead": table(rows)}))
    picture(rows).savefig(PICTURE, dpi=130)
    print(table(rows))


def main() -> int:
    """Measure, save, write the page, and name the checks that fail."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="measure nothing; write the saved results again")
    options = parser.parse_args()
    if options.report:
        report(json.loads(RESULTS.read_text()))
        return 0
    torch.set_num_threads(1)
    started = time.process_time()
    rows = [row for tail in TAILS for seed in SEEDS for row in measure(tail, seed)]
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    report(rows)
    print(f"{time.process_time() - started:.0f} s")
    for line in (found := missed(rows)):
        print("missed:", line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
