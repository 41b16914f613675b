# ruff: noqa: E402
"""Kill runs at random moments and see that nothing is lost (``make faults``).

Trainings, populations, chains and evaluations. Each setting runs once undisturbed, and once while SIGKILL and SIGTERM hit it
at random moments of a random step, and at random file operations inside a save. After every signal it is started again: a
training with ``resume_from_checkpoint="auto"``, a command as it was. Counted are the optimizer steps that were finished but
not saved (at most one each), processes that outlive the run (none), files of the rollout log that cannot be read (none),
entries of the temporary folder that outlive the run (none), and weights, results or rollout logs that differ at the end
(none for environments stepped inline, and none with ``batches_ahead``, where environments take random times and everything
but log-probabilities is compared). Then each command runs on a disk that becomes full and on one that becomes read-only: it
must end with a message that names the folder, and go on when there is room again, to an equal result. The exit code is 1 if
a count is too high.

Resumable: finished settings are read from ``runs/faults/results.jsonl``. Everything is seeded, except when a signal arrives.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing.util
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

os.environ |= {
    "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
}  # fmt: skip
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "trainers"), str(ROOT / "tests"), str(ROOT)]
os.environ["PYTHONPATH"] = os.pathsep.join(
    sys.path[:3]
)  # environments in processes of their own find the tests' modules

import psutil
import torch
from chain_files import start_process
from chatter import Chatter, Late
from commands import FINISHED, Command, weights
from environment_agents import Plays
from games import make_trainer
from ppo_games import make_ppo
from scripted_runs import by_script, sampling_with
from transformers import TrainerCallback
from transformers.utils import logging

from agile_trainers.checkpoints.integrity import checkpoints, newest_complete
from agile_trainers.embedded import make_embedded_model
from agile_trainers.envs.agent import Agent
from agile_trainers.records.reader import RecordsError, open_records

STEPS = 6
LEAST_SIGNALS = 100
"""Over all settings."""
PATIENCE = 120.0
"""Seconds in which a signalled run must be gone, with everything it started."""


@dataclass(frozen=True)
class Setting:
    """One kind of run."""

    algorithm: str
    lora: bool
    environments: str
    ranks: int
    packing: bool = False
    ahead: int = 0
    scripted: bool = False

    @property
    def name(self) -> str:
        whole = f"{self.algorithm}, {'LoRA' if self.lora else 'whole model'}, {self.environments}, {self.ranks} rank(s)"
        whole += (", packed" if self.packing else "") + (f", {self.ahead} ahead" if self.ahead else "")
        return whole + (", scripted" if self.scripted else "")

    def play(self, model: Path, run: Path) -> None:
        """Train to the end, from the newest checkpoint if there is one."""
        train(self, model, run)

    def finished(self, run: Path) -> bool:
        return (run.parent / FINISHED).is_file()

    def result(self, run: Path) -> Any:
        """What must be equal, killed or not."""
        return weights(run / "final"), [self._exact(episode) for episode in trained(run)]

    def _exact(self, episode: dict[str, Any]) -> dict[str, Any]:
        """What timing may not change.

        The last bits of a sampler's log-probabilities depend on its batch, and a record rounds the trainer's to them.
        """
        inexact = ("sampling_logprobs", "logprobs", "ratios", "kl") if self.ahead else ()
        return {name: value for name, value in episode.items() if name not in inexact}


SETTINGS: list[Setting | Command] = [
    Setting(algorithm, lora, environments, ranks)
    for ranks in (1, 2)
    for environments in ("inline", "threads", "processes")
    for algorithm, lora in (("grpo", True), ("grpo", False), ("reinforce", True), ("reinforce", False), ("ppo", True))
]
SETTINGS += [
    Setting("ppo", True, environments, ranks, packing=True)
    for ranks in (1, 2)
    for environments in ("inline", "processes")
]
SETTINGS += [
    Setting("grpo", True, environments, ranks, ahead=ahead, scripted=scripted)
    for environments, ranks in (("threads", 1), ("processes", 1), ("threads", 2), ("agents", 1))
    for ahead in (1, 2)
    for scripted in (False, True)
]
SETTINGS += [
    Command(command, environments) for command in ("evolve", "chain") for environments in ("inline", "processes")
] + [Command("eval", "inline")]


@dataclass
class Outcome:
    """What happened to one setting."""

    setting: str
    signals: int = 0
    kills: int = 0
    inside_saves: int = 0
    lost_steps: list[int] = field(default_factory=list)
    left_behind: int = 0
    temporary: int = 0
    unreadable: int = 0
    equal: bool = False
    seconds: float = 0.0


class Progress(TrainerCallback):
    """Writes down each finished step before it is saved."""

    def __init__(self, file: Path):
        self.file = file

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.file.write_text(str(state.global_step))


class Slow(Chatter):
    """Takes a moment, so that signals arrive inside its calls too."""

    def step(self, action: str) -> Any:
        time.sleep(0.005)
        return super().step(action)


class SlowBesideProcess(Slow):
    """The same in a process of its own; what it starts must end with it."""

    def __init__(self) -> None:
        start_process()


def train(setting: Setting, model: Path, run: Path) -> None:
    """Train to the end, from the newest checkpoint if there is one."""
    options: dict[str, Any] = {
        "environment": Slow,
        "max_steps": STEPS,
        "save_strategy": "steps",
        "save_steps": 1,
        "save_total_limit": 2,
        "optim": "adamw_torch",
        "learning_rate": 1e-2,
        "lr_scheduler_type": "linear",
        "per_device_train_batch_size": 4 // setting.ranks,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "callbacks": [Progress(run.parent / "progress")],
    }
    if setting.packing:
        options["sequence_packing"] = "prefix"
    if setting.environments == "threads":
        options["environment_workers"] = 4
    elif setting.environments == "processes":
        options |= {"environment_processes": 2, "environment": SlowBesideProcess}
    if setting.ahead:
        late = {"environment": Late, "steps_per_generation": 4 // setting.ahead, "max_logprob_gap": 1e9}
        options |= {"batches_ahead": setting.ahead, **late}
    if setting.environments == "agents":
        chance = random.Random()
        options["environment"] = Agent(Plays(Chatter, lambda task, number: chance.choice([0.0, 0.0, 0.01, 0.05])))
        options["advantage_granularity"] = "trajectory"
    if setting.algorithm == "ppo":
        trainer: Any = make_ppo(model, run, **options)
    else:
        groups = {"num_generations": 1} if setting.algorithm == "reinforce" else {}
        trainer = make_trainer(model, run, algorithm=setting.algorithm, lora=setting.lora, **options, **groups)
    if setting.scripted:
        sampling_with(trainer, by_script(trainer))
    trainer.train(resume_from_checkpoint="auto")
    trainer.save_model(str(run / "final"))
    if trainer.accelerator.is_main_process:  # a kill inside the last save leaves a part of it
        (run.parent / FINISHED).touch()
    trainer.accelerator.end_training()


def start(setting: Setting | Command, model: Path, run: Path, die_at: int | None = None) -> list[int]:
    """Fork one process per rank; return their ids. ``die_at``: the file operation inside a save that kills the first."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(setting.ranks):
        process = os.fork()
        if process:
            started.append(process)
            continue
        code = 1
        try:
            os.setpgid(0, 0)
            os.environ["TMPDIR"] = tempfile.tempdir = str(run.parent / "tmp")
            log = os.open(run.parent / f"log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1), os.dup2(log, 2)
            if setting.ranks > 1:
                os.environ |= {
                    "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(setting.ranks), "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "faults", "ACCELERATE_USE_CPU": "true",
                }  # fmt: skip
            if rank == 0 and die_at is not None:
                _die_inside_save(run, die_at)
            setting.play(model, run)
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            multiprocessing.util._exit_function()  # as at the end of any program
            os._exit(code)
    return started


def _die_inside_save(run: Path, operation: int) -> None:
    """Kill this process at the n-th time that a file below ``output_dir`` is opened, renamed, made or removed."""
    left = operation

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir") and str(arguments[0]).startswith(
            str(run)
        ):
            if "rollouts" in str(arguments[0]):
                return
            left -= 1
            if left == 0:
                (run.parent / "inside").write_text(str(arguments[0]))
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def end(processes: list[int], hit: int | None) -> tuple[list[int], int]:
    """Wait for a run to end; if one of its processes was hit, the others get SIGTERM, as torchrun sends it.

    Returns:
        The exit codes, and how many of its descendants were still there long after.
    """
    codes: dict[int, int] = {}
    told, deadline = hit is None, time.monotonic() + PATIENCE
    while len(codes) < len(processes):
        for process in processes:
            if process not in codes and os.waitpid(process, os.WNOHANG)[0]:
                codes[process] = 1
        if codes and not told:
            told, deadline = True, time.monotonic() + PATIENCE
            for process in processes:
                if process not in codes:
                    os.kill(process, signal.SIGTERM)
        if told and hit is not None and time.monotonic() > deadline:
            break
        time.sleep(0.02)
    left = psutil.Process().children(recursive=True)
    _, alive = psutil.wait_procs(left, timeout=PATIENCE)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive)
    return list(codes.values()), len(alive)


def temporary(run: Path) -> list[str]:
    """What is left of a run in the folder of temporary files; emptied."""
    folder = run.parent / "tmp"
    left = sorted(path.name for path in folder.iterdir())
    for name in left:
        print(f"left in the temporary folder: {name}", flush=True)
    shutil.rmtree(folder)
    folder.mkdir()
    return left


def _newest(run: Path) -> str:
    return newest_complete(run)[0].name if checkpoints(run) else ""


def _saved(run: Path) -> int:
    return int(_newest(run).rpartition("-")[2] or 0)


def unreadable(run: Path) -> int:
    """Number of runs of which some record cannot be read."""
    if not (run / "rollouts").is_dir() or not any((run / "rollouts").iterdir()):
        return 0
    failed = 0
    for records in open_records(run):
        try:
            assert len(list(records.episodes())) == len(records.index())
            records.metrics()
        except (RecordsError, AssertionError) as error:
            failed += 1
            print(error, flush=True)
    return failed


def trained(run: Path) -> list[dict[str, Any]]:
    """The training episodes of the last run in a folder; earlier ones died before their first checkpoint."""
    runs = [records for records in open_records(run) if records.info.get("kind") == "training"]
    return [episode for episode in runs[-1].episodes() if episode["phase"] == "train"]


def differences(expected: Any, found: Any, place: str = "") -> Iterator[str]:
    """Say where two results differ."""
    if isinstance(expected, dict) and isinstance(found, dict) and expected.keys() == found.keys():
        for name in expected:
            yield from differences(expected[name], found[name], f"{place}.{name}")
    elif isinstance(expected, list | tuple) and isinstance(found, list | tuple) and len(expected) == len(found):
        for index, (one, other) in enumerate(zip(expected, found, strict=True)):
            yield from differences(one, other, f"{place}[{index}]")
    elif expected != found:
        yield f"{place}: expected {expected!s:.200}, found {found!s:.200}"


def disturb(setting: Setting | Command, model: Path, folder: Path, signals: int, chance: random.Random) -> Outcome:
    """Train a setting undisturbed and disturbed, and compare."""
    outcome, started = Outcome(setting.name), time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    whole, run = folder / "whole" / "run", folder / "disturbed" / "run"
    for each in (whole, run):
        each.mkdir(parents=True)
        (each.parent / "tmp").mkdir()
    begun = time.monotonic()
    end(start(setting, model, whole), None)
    duration = time.monotonic() - begun
    expected = setting.result(whole)
    assert not temporary(whole)
    while not setting.finished(run):
        for name in ("progress", "inside"):
            (run.parent / name).unlink(missing_ok=True)
        before = _newest(run)
        if outcome.signals >= signals:
            end(start(setting, model, run), None)
            break
        inside = chance.random() < 0.4
        processes = start(setting, model, run, die_at=chance.randint(1, 120) if inside else None)
        if not inside:
            _wait_for_moment(setting, run, duration, chance)
            number = chance.choice([signal.SIGKILL, signal.SIGTERM])
            victims = processes if chance.random() < 0.5 else [chance.choice(processes)]
            for victim in victims:
                os.kill(victim, number)
            outcome.kills += number == signal.SIGKILL
        _, left = end(processes, processes[0])
        outcome.left_behind += left
        outcome.temporary += len(temporary(run))
        outcome.unreadable += unreadable(run)
        hit = not inside or (run.parent / "inside").is_file()
        outcome.signals += hit
        outcome.inside_saves += inside and hit
        outcome.kills += inside and hit
        progress = run.parent / "progress"
        if progress.is_file():
            outcome.lost_steps.append(int(progress.read_text()) - _saved(run))
        if not hit and not setting.finished(run) and before == _newest(run):
            raise RuntimeError(f"{setting.name} failed by itself; see {run.parent}/log-0")
        if setting.finished(run) and outcome.signals < signals:
            shutil.rmtree(run)  # it got through: once more from the beginning
            run.mkdir()
            (run.parent / FINISHED).unlink(missing_ok=True)
    found = setting.result(run)
    outcome.equal = found == expected
    if not outcome.equal:
        print(f"{setting.name}: {'; '.join(islice(differences(expected, found), 5))}", flush=True)
    outcome.seconds = time.monotonic() - started
    return outcome


def _wait_for_moment(setting: Setting | Command, run: Path, duration: float, chance: random.Random) -> None:
    """Wait until a random moment of a random step of a run; of a command, a random moment."""
    if isinstance(setting, Command):
        time.sleep(chance.uniform(0.1, 0.9) * duration)
        return
    saved = _saved(run)
    step, begun = chance.randrange(min(saved, STEPS - 1), STEPS), time.monotonic()
    progress = run.parent / "progress"
    while step > saved and not (progress.is_file() and int(progress.read_text() or 0) >= step):
        if time.monotonic() - begun > PATIENCE:
            raise RuntimeError(f"{setting.name} did not come to step {step}; see {run.parent}/log-0")
        time.sleep(0.002)
    time.sleep(chance.uniform(0.0, 1.0) * duration / STEPS if step > saved else chance.uniform(0.1, 0.5) * duration)


def on_disks(setting: Setting | Command, model: Path, folder: Path, fraction: float) -> tuple[list[str], list[str]]:
    """Run on a disk that becomes full, and on one that becomes read-only after a kill; mounts, so in a namespace of its own.

    Args:
        setting: What is run.
        model: The model's folder.
        folder: Where everything goes; emptied.
        fraction: Share of an undisturbed run's bytes that the full disk holds.

    Returns:
        What is wrong, and the last line of each refused run.
    """
    shutil.rmtree(folder, ignore_errors=True)
    wrong, said = [], []
    for kind in ("whole", "full", "read-only"):
        run = folder / kind / "run"
        run.mkdir(parents=True)
        (run.parent / "tmp").mkdir()
        if kind == "whole":
            end(start(setting, model, run), None)
            expected, size = setting.result(run), sum(path.stat().st_blocks * 512 for path in run.rglob("*"))
            continue
        room = f"size={int(size * fraction) if kind == 'full' else 10 * size}"
        _mount("-t", "tmpfs", "-o", room, "tmpfs", str(run))
        if kind == "read-only":
            processes, begun = start(setting, model, run), time.monotonic()
            while time.monotonic() - begun < PATIENCE and not any(path.is_file() for path in run.rglob("*")):
                time.sleep(0.02)
            os.kill(processes[0], signal.SIGKILL)
            end(processes, processes[0])
            _mount("-o", "remount,ro", str(run))
        (run.parent / "log-0").unlink(missing_ok=True)
        end(start(setting, model, run), None)
        lines = [line for line in (run.parent / "log-0").read_text(errors="replace").splitlines() if line.strip()]
        said.append(f"{kind}: {lines[-1] if lines else 'nothing'}")
        if setting.finished(run):
            wrong.append(f"{kind}: ended as if nothing were wrong")
        if any(line.startswith("Traceback") for line in lines) and isinstance(setting, Command):
            wrong.append(f"{kind}: a traceback")
        _mount("-o", f"remount,rw,size={10 * size}", str(run))
        end(start(setting, model, run), None)
        if not setting.finished(run) or setting.result(run) != expected:
            wrong.append(f"{kind}: {'differs' if setting.finished(run) else 'does not go on'} when there is room again")
        wrong += [f"{kind}: {name} in the temporary folder" for name in temporary(run)]
        subprocess.run(["umount", "-l", str(run)], check=True)
    return wrong, said


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def main() -> int:
    """Run what is not done yet and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "faults", help="where runs and results go")
    parser.add_argument("--signals", type=int, default=4, help="per setting")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="settings whose name contains this")
    parser.add_argument("--disks", action="store_true", help="full and read-only disks alone; needs unshare -rm")
    options = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    _become_subreaper()
    options.output.mkdir(parents=True, exist_ok=True)
    results = options.output / "results.jsonl"
    done = [Outcome(**json.loads(line)) for line in results.read_text().splitlines()] if results.is_file() else []
    model = (
        make_embedded_model(options.output / "model")
        if not (options.output / "model").is_dir()
        else options.output / "model"
    )
    if options.disks:
        return _all_disks([setting for setting in SETTINGS if options.only in setting.name], model, options)
    for index, setting in enumerate(SETTINGS):
        if setting.name in {outcome.setting for outcome in done} or options.only not in setting.name:
            continue
        chance = random.Random(1000 * options.seed + index)
        outcome = disturb(setting, model, options.output / "work", options.signals, chance)
        done.append(outcome)
        with results.open("a") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")
        print(_row(outcome), flush=True)
    if not options.only:
        inside = [sys.executable, __file__, "--disks", "--output", str(options.output), "--seed", str(options.seed)]
        disks = subprocess.run(["unshare", "-rm", *inside]).returncode
        return _verdict(done, LEAST_SIGNALS) or disks
    return _verdict(done, least=0)


def _all_disks(settings: list[Setting | Command], model: Path, options: argparse.Namespace) -> int:
    failed = False
    for index, setting in enumerate(each for each in settings if each.ranks == 1 and each.environments == "inline"):
        fraction = random.Random(options.seed + index).uniform(0.2, 0.9)
        wrong, said = on_disks(setting, model, options.output / "disks", fraction)
        failed = failed or bool(wrong)
        print(f"{setting.name:44} {'; '.join(wrong) or 'ok'}", *said, sep="\n    ", flush=True)
    return int(failed)


def _row(outcome: Outcome) -> str:
    lost = max(outcome.lost_steps, default=0)
    return (
        f"{outcome.setting:44} {outcome.signals:3} signals ({outcome.kills} SIGKILL, {outcome.inside_saves} inside a save)  "
        f"lost at most {lost}  left behind {outcome.left_behind}  temporary {outcome.temporary}  "
        f"unreadable {outcome.unreadable}  "
        f"{'equal' if outcome.equal else 'differs'}"
    )


def _verdict(done: list[Outcome], least: int) -> int:
    signals = sum(outcome.signals for outcome in done)
    lost = max((max(outcome.lost_steps, default=0) for outcome in done), default=0)
    left = sum(outcome.left_behind for outcome in done)
    broken = sum(outcome.unreadable for outcome in done)
    temporary = sum(outcome.temporary for outcome in done)
    repeat = [outcome for outcome in done if "inline" in outcome.setting or "ahead" in outcome.setting]
    unequal = [outcome.setting for outcome in repeat if not outcome.equal]
    kills, inside = (sum(getattr(outcome, name) for outcome in done) for name in ("kills", "inside_saves"))
    print(
        f"\n{len(done)} settings, {signals} signals ({kills} SIGKILL, {inside} inside a save): at most {lost} step(s) lost "
        f"each, {left} processes left behind, {temporary} temporary entries, {broken} runs with unreadable records, "
        f"{sum(outcome.equal for outcome in done)} of {len(done)} bit-equal at the end"
    )
    return int(lost > 1 or left > 0 or temporary > 0 or broken > 0 or bool(unequal) or signals < least)


def _become_subreaper() -> None:
    """Orphans become children of this process, so that it sees what a killed run leaves behind."""
    import ctypes

    set_child_subreaper = 36
    ctypes.CDLL(None).prctl(set_child_subreaper, 1, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main())
