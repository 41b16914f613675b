"""Break the code on purpose, one line at a time, and see that a test notices (``make mutations``).

Each mutation is a way in which multi-turn training goes wrong without an error. It is made in a copy of the project; the
tests named with it must pass there before and fail after. The exit code is 1 if a mutation survives. Each run of tests is a
fork of a process that has imported the libraries.

``--since main~3`` runs those that are new or changed, or whose file or tests changed, since that commit. ``--results`` names
a file that holds a line per mutation; with ``--resume``, one that was noticed there is run again only if it, its file or its
tests changed since. Files that tests import are not followed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from forked_pytest import Pytest

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Mutation:
    """One edit, and the tests that must notice."""

    name: str
    file: str
    """Below ``agile_trainers/``."""
    old: str
    """Occurs exactly once in the file."""
    new: str
    tests: str
    """Arguments of pytest."""

    @property
    def reads(self) -> list[str]:
        """The file that is changed, and those of the tests, below the project's folder."""
        return [f"agile_trainers/{self.file}", *(word for word in self.tests.split() if word.endswith(".py"))]


ENUMERATION = "tests/trainers/test_enumeration.py"
STOPPING = "tests/trainers/test_enumeration_stopping.py"
SERVERS = "tests/rollout/test_vllm_servers.py"
ENDED = "tests/rollout/test_server_health.py"
STARTED = "tests/trainers/test_started_server.py"
ADVANTAGES = "tests/objectives/test_advantages.py"
GAE = "tests/objectives/test_gae.py"
PATHS = "tests/objectives/test_forest_enumeration.py"
MIXTURE = "tests/trainers/test_mixture.py"
PANELS = "tests/test_cli_panels.py"
TRIE = "tests/packing/test_trie.py"
PACKED_ATTENTION = "tests/packing/test_attention.py"
PACKED_FORWARD = "tests/packing/test_forward.py"
PACKING = "tests/trainers/test_packing.py"
FIRST_PASS = "tests/trainers/test_first_pass.py"
FORESTS = "tests/trainers/test_paths.py"
OWN_LOSS = "tests/trainers/test_own_loss.py"
VIEWER = "tests/viewer/test_page.py"
LABELS = "tests/viewer/test_labels.py"
ARCHITECTURES = "tests/trainers/test_architectures.py"
MISMATCH = "tests/objectives/test_mismatch.py"
KEPT = "tests/objectives/test_kept_sets.py"
REPLAYED = "tests/trainers/test_successes.py"
SHOWN, SHOWN_ENUMERATED = "tests/trainers/test_demonstrations.py", "tests/trainers/test_demonstration_enumeration.py"
JUDGES, JUDGED = "tests/judges/test_judges.py", "tests/trainers/test_judged_runs.py"
TEACHER, TEACHER_ENUMERATED = "tests/trainers/test_teacher.py", "tests/trainers/test_teacher_enumeration.py"
TRUNCATED = "tests/trainers/test_truncated_enumeration.py"
TRUNCATED_RUNS = "tests/trainers/test_truncated_runs.py"
DRIFT = "tests/objectives/test_drift.py"
DRIFT_OPTIONS = "tests/trainers/test_drift_correction.py"
MISMATCH_RUNS = "tests/trainers/test_mismatch_runs.py"
CORRECTION = "tests/trainers/test_correction.py"
DELIVERY = "tests/trainers/test_delivery.py"
STARTS = "tests/trainers/test_adapter_starts.py"
IMAGES = "tests/rollout/test_images.py"
IMAGE_AGENTS = "tests/trainers/test_image_agents.py"
IMAGE_ENVIRONMENTS = "tests/envs/test_image_environments.py"
IMAGE_REQUESTS = "tests/rollout/agents/test_image_requests.py"
IMAGE_RUNS = "tests/trainers/test_image_runs.py"
RECIPE = "tests/trainers/test_batch_defaults.py"
MEMORY = "tests/test_cli_memory.py"
COUNTED = "tests/test_bench_plan_bytes.py"
EPISODES = "tests/test_cli_check_episodes.py"
DIAGNOSIS = "tests/evaluation/test_diagnosis.py"
HEALTH = "tests/trainers/test_health_checks.py"
RECORDS = "tests/records/test_records.py"
EPISODE_RECORDS = "tests/trainers/test_episode_records.py"
DECODING = "tests/rollout/test_decoding.py"
LINEAGES = "tests/rollout/test_lineages.py"
SERVER = "tests/rollout/agents/test_server.py"
DIALECTS = "tests/rollout/agents/test_dialects.py"
TEMPLATES = "tests/rollout/test_chat_templates.py tests/rollout/test_chat.py"

TASKS = "tests/trainers/test_task_sampling.py"
EVOLVE = "tests/test_cli_evolve.py"
POPULATION = "tests/populations/test_population.py"
SELECTION = "tests/populations/test_selection.py"
MACHINES = "tests/trainers/test_machines_two_processes.py"

END = "tests/rollout/test_end_of_episodes.py"
CLOCK = "tests/trainers/test_ahead_clock.py"

MUTATIONS = [
    Mutation(
        "eval_greedy has no effect", "trainers/evaluation.py",
        "sample = not (args.eval_greedy if greedy is None else greedy)", "sample = not greedy",
        "tests/trainers/test_evaluate_policy.py -k eval_greedy",
    ),
    Mutation(
        "every process prints the table", "monitor/progress.py",
        "not state.is_world_process_zero or ", "", "tests/trainers/test_progress_table.py -k processes",
    ),
    Mutation(
        "a finding is not said", "monitor/health_checks.py",
        "logger.warning(str(finding))", "pass", "tests/trainers/test_progress_table.py -k finding",
    ),
    Mutation(
        "a run that fails leaves its bar", "trainers/trainer.py",
        "close_tables(self.callback_handler)", "pass", "tests/trainers/test_progress_table.py -k leaves_no_bar",
    ),
    Mutation(
        "a row is longer than its width", "monitor/progress.py",
        "(len(end) if cell else 0) > width", "0 > width", "tests/trainers/test_progress_table.py -k longer",
    ),
    Mutation(
        "activations stay on the GPU", "trainers/setup.py",
        "get_act_offloading_ctx_manager(model=model) if args.activation_offload else nullcontext()",
        "nullcontext()", "tests/trainers/test_on_a_pretended_gpu.py -k offloaded",
    ),
    Mutation(
        "one batch fewer is ahead", "step/ahead.py",
        "due = min(generation + self._ahead, last)",
        "due = min(generation + max(self._ahead - 1, 0), last)", f"{CLOCK} -k heavy",
    ),
    Mutation(
        "one batch more is ahead", "step/ahead.py",
        "due = min(generation + self._ahead, last)", "due = min(generation + self._ahead + 1, last)",
        f"{CLOCK} -k heavy",
    ),
    Mutation(
        "batches are played beyond the end of the run", "step/ahead.py",
        "due = min(generation + self._ahead, last)", "due = generation + self._ahead", f"{CLOCK} -k shape",
    ),
    Mutation(
        "a batch names the policy of the batch before", "step/ahead.py",
        "drawn = [self._add(index, generation) for", "drawn = [self._add(index, max(generation - 1, 0)) for",
        f"{CLOCK} -k heavy",
    ),
    Mutation(
        "no snapshot of the policy that plays ahead is kept", "step/ahead.py",
        "self._snapshots.take(generation)", "pass", f"{CLOCK} -k heavy",
    ),
    Mutation(
        "batches are played on by the policy of the update", "step/ahead.py",
        "self._snapshots.holding(None if version == self._current else version)", "self._snapshots.holding(None)",
        f"{CLOCK} -k 'heavy and paused'",
    ),
    Mutation(
        "the policies of ended batches are kept", "step/ahead.py",
        "self._snapshots.keep(self._playing())", "pass", f"{CLOCK} -k heavy",
    ),
    Mutation(
        "the episodes of a batch come in another order", "step/ahead.py",
        "trajectories = self._in_background(batch.keys) if self._sampler.overlaps else self._paused(batch.keys)",
        "trajectories = (self._in_background if self._sampler.overlaps else self._paused)(batch.keys[::-1])",
        f"{CLOCK} -k heavy",
    ),
    Mutation(
        "a resumed run forgets which policy plays", "step/ahead.py",
        'added = self._add(batch["generation"], batch["version"])', 'added = self._add(batch["generation"], 0)',
        f"{CLOCK} -k goes_on",
    ),
    Mutation(
        "each version of the policy decodes as many rows", "sampling/sampler.py",
        "max(1, self.rows // len(versions.wanted()))", "self.rows", "tests/trainers/test_batches_ahead.py -k share_the_rows",
    ),
    Mutation(
        "a trainer drops the adapters of one that lives", "rollout/generators/vllm/adapter_host.py",
        "_locked(Path(self._made.name), fcntl.LOCK_SH)", "os.open(self._made.name, os.O_RDONLY)",
        f"{SERVERS} -k killed_process",
    ),
    Mutation(
        "a killed trainer's adapters stay on the servers", "rollout/generators/vllm/servers.py",
        "    " * 4 + "self._on_each(partial(_unload_if_served, adapter))", "    " * 4 + "pass",
        f"{SERVERS} -k killed_process",
    ),
    Mutation(
        "the plan forgets the adapters of earlier policies", "cli/check/memory_plan.py",
        "snapshots=args.batches_ahead + 1 if args.batches_ahead else 0", "snapshots=0",
        "tests/test_cli_check_server.py -k runs",
    ),
    Mutation(
        "a server on the trainer's GPU takes nothing of it in the plan", "cli/check/memory_plan.py",
        'args.vllm_mode == "colocate" or shares else None', 'args.vllm_mode == "colocate" else None',
        "tests/test_cli_check_server.py -k runs",
    ),
    Mutation(
        "the plan's server gets the GPUs of the trainer", "cli/check/memory_plan.py",
        "range(launch.processes), list(map(str, range(gpus)))", "range(0), list(map(str, range(gpus)))",
        "tests/test_cli_check_server.py -k runs",
    ),
    Mutation(
        "more versions decode than there are rows", "sampling/sampler.py",
        "sorted(versions.wanted())[:most]", "sorted(versions.wanted())",
        "tests/trainers/test_batches_ahead.py -k share_the_rows",
    ),
    Mutation(
        "an update waits for one more answer after its last episode", "rollout/rollout.py",
        "if tells or not done():", "if True:", f"{CLOCK} tests/rollout/test_open_rollout.py -k 'heavy or nobody_waits'",
    ),
    Mutation(
        "recorded answers are lost with an error of the generator", "rollout/replay.py",
        "return [self._answer(request, answer) for request, answer in staged]",
        "return [*[self._answer(request, answer) for request, answer in staged], *self._generator.step()]",
        "tests/rollout/test_open_rollout.py -k costs_no_recorded",
    ),
    Mutation(
        "a resumed rollout asks for answers in a loop", "rollout/replay.py",
        "self.listen = None if tells is None else partial(self._listen, tells)", "self.listen = None",
        "tests/rollout/test_background.py -k sleeps",
    ),
    Mutation(
        "an exit in an environment ends the run", "rollout/environment_pool.py",
        "except BaseException as error:  # in a thread,", "except Exception as error:  # in a thread,",
        "tests/rollout/test_stepping.py -k exit_of_an_environment",
    ),
    Mutation(
        "Ctrl-C costs an episode", "imports.py",
        "error.subgroup(KeyboardInterrupt) is not None", "False", "tests/rollout/test_stepping.py -k ctrl_c",
    ),
    Mutation(
        "a forked child answers for the environment", "rollout/process_environment.py",
        "if os.getpid() != own:", "if False:", "tests/rollout/test_misbehaving.py -k only_processes",
    ),
    Mutation(
        "a changed bit is read as an episode", "records/writer.py",
        "return None if _digest(path, _stamp(path)) in listed else", "return None if listed else",
        "tests/records/test_damage.py -k flipped",
    ),
    Mutation(
        "a column of another type is read", "records/reader.py",
        "if found.field(place).type != column.type:", "if False:",
        "tests/records/test_damage.py -k column_of_another",
    ),
    Mutation(
        "a stranger's path leads to itself", "records/schema.py",
        "if 0 <= of < k else -1", "if 0 <= of <= k else -1", "tests/records/test_recorded_paths.py -k nowhere",
    ),
    Mutation(
        "paths store what they share again", "records/schema.py",
        'found.append({"of": of, "shared": shared, "ids": list(path[shared:])})',
        'found.append({"of": None, "shared": 0, "ids": list(path)})', "tests/records/test_recorded_paths.py -k distinct",
    ),
    Mutation(
        "a reward model reads two prompts", "step/reward.py",
        "it.messages[len(it.rewritten) :]", "it.messages", "tests/rollout/test_asides.py -k rewritten",
    ),
    Mutation(
        "what was thrown away is part of the conversation", "monitor/rollout_log.py",
        '"role": f"aside {number}: {message[\'role\']}"', '"role": message["role"]', "tests/rollout/test_asides.py -k asked",
    ),
    Mutation(
        "an observation is measured from the call before", "cli/check/sections.py",
        "0 if parent is None else starts[k] - ends[parent]", "0 if k == 0 else starts[k] - ends[k - 1]",
        "tests/rollout/test_asides.py -k memory",
    ),
    Mutation(
        "helpers are compared with second turns", "monitor/health_checks.py",
        "(episode.linear or turn == 0)", "True", "tests/trainers/test_health_checks.py -k that_are_compared",
    ),
    Mutation(
        "a resumed run's records have NaN for null", "monitor/rollout_log.py",
        "np.ma.masked_array([0 if value is None else value for value in values], hidden)",
        "np.array([0 if value is None else value for value in values])",
        "tests/trainers/test_checkpoint.py::test_killed_at_every_step",
    ),
    Mutation(
        "what an earlier turn read is a prompt's own", "viewer/parts.py",
        'known[holder], length = max(known[holder], length), min(length, paths[holder]["shared"])',
        "known[holder] = max(known[holder], length)", "tests/viewer/test_page.py -k earlier_turns",
    ),
    Mutation(
        "token columns are as long as the distinct tokens", "monitor/rollout_log.py",
        'length = len(row["completion_ids"])', 'length = row["num_tokens"]',
        f"{EPISODE_RECORDS}::test_calls_of_several_paths_have_what_was_computed_for_them",
    ),
    Mutation(
        "a part's name becomes markup", "viewer/html.py",
        "escape(name, quote=True)", "name", "tests/viewer/test_hostile.py -k one_place",
    ),
    Mutation(
        "aliases of aliases are written out", "cli/yaml_files.py",
        "values, levels = 1 + sum(one[0] for one in children),", "values, levels = 1 + len(children),",
        "tests/test_cli_yaml.py -k one_short_message",
    ),
    Mutation(
        "code of the Hub runs without consent", "evaluation/modules.py",
        "if here is None and not trust_remote_code:", "if False:", "tests/evaluation/test_modules.py -k consent",
    ),
    Mutation(
        "the reward at a limit is dropped", "rollout/stepped.py",
        "episode.turns[-1].reward += episode.end_reward", "pass", END,
    ),
    Mutation(
        "modules that an environment uses are imported in each process", "rollout/process_environment.py",
        'opcode.name == "TUPLE1" and pushed[-2] == _IMPORT', "False", "tests/rollout/test_processes.py",
    ),
    Mutation(
        "modules that a factory is made of are imported in each process", "rollout/process_environment.py",
        "found.add(argument[0])", "pass", "tests/rollout/test_processes.py",
    ),
    Mutation(
        "the end of a frame hides a module", "rollout/process_environment.py",
        'opcode.name in ("MEMOIZE", "FRAME")', 'opcode.name == "MEMOIZE"', "tests/rollout/test_processes.py",
    ),
    Mutation(
        "an agent's own limit cuts an episode", "types.py",
        '"max_tokens" not in turn.call', "True",
        "tests/rollout/agents/test_episode.py -k agent_wants",
    ),
    Mutation(
        "an answer that ran out of tokens is not cut", "rollout/collate.py",
        "trajectory.clipped for", "trajectory.stop_reason.truncated for", "tests/rollout/test_collate.py -k ran_out",
    ),
    Mutation(
        "tokens are compared with those of rows of their length", "train_batch.py",
        "if compared or (", "if (", "tests/trainers/test_accumulation.py -k compares",
    ),
    Mutation(
        "an update of several batches reads them four times", "config/multi_turn.py",
        "self.steps_per_generation < self.gradient_accumulation_steps:", "False:",
        "tests/trainers/test_batch_defaults.py -k several_batches",
    ),
    Mutation(
        "what the environment rewarded at a limit is estimated again", "rollout/collate.py",
        "it.stop_reason.truncated and it.end_reward is None", "it.stop_reason.truncated", END,
    ),
    Mutation(
        "machines resume from a checkpoint that only the first holds", "checkpoints/resuming.py",
        "while len(set(steps)) > 1:", "while None in steps and len(set(steps)) > 1:", MACHINES,
    ),
    Mutation(
        "a machine goes on although another's checkpoint is damaged", "checkpoints/resuming.py",
        "answer = error", "pass", MACHINES,
    ),
    Mutation(
        "machines that share a disk overwrite each other's files", "checkpoints/resuming.py",
        "if seen == machines and args.save_on_each_node:", "if seen > machines and args.save_on_each_node:", MACHINES,
    ),
    Mutation(
        "a log that is written ends a streak of episodes that are not", "monitor/rollout_log.py",
        "self._failing.discard(kind)", "self._failing.clear()",
        "tests/trainers/test_misbehaving_environments.py::test_each_streak_of_failures_is_warned_of_once",
    ),
    Mutation(
        "a checkpoint without an environment keeps PEFT's template", "trainers/trainer.py",
        "processing_class)\n                self.cards.write(folder)",
        "processing_class)\n                self.engine is None or self.cards.write(folder)",
        "tests/trainers/test_without_environment.py::test_every_folder_has_a_card_of_the_run",
    ),
    Mutation(
        "the card of a pushed member loads a folder that is not there", "populations/population.py",
        ".replace(f'\"{name}\"', f'\"{model_id}\"')", "",
        f"{POPULATION}::test_the_winner_on_the_hub",
    ),
    Mutation(
        "a population's files hold an API's key", "populations/population.py",
        "options = public_options(options, type(self._args), public)", "pass",
        f"{POPULATION}::test_the_winner_on_the_hub",
    ),
    Mutation(
        "the stage after a population begins with its first member", "cli/chain/command.py",
        "return folder if stage.population is None else folder / WINNER",
        "return folder if stage.population is None else folder / \"population\" / \"member-00\"",
        f"{EVOLVE}::test_the_winner_goes_on_to_the_next_stage",
    ),
    Mutation(
        "the viewer rounds a learning rate to 0", "viewer/parts.py",
        "{\"options\": _exact(options)}", "{\"options\": options}",
        f"{VIEWER}::test_small_options_are_shown_as_they_are",
    ),
    Mutation(
        "a member's trainer gets a copy of the base", "populations/members.py",
        "nn.Parameter(parameter.detach(), ", "nn.Parameter(parameter.detach().clone(), ",
        f"{POPULATION}::test_the_base_is_there_once_and_never_changes",
    ),
    Mutation(
        "a mutated learning rate reaches the schedule only", "checkpoints/resuming.py",
        'group["lr"] = group["lr"] * after / before if before else after', "pass",
        f"{POPULATION}::test_a_mutated_learning_rate_reaches_the_optimizer",
    ),
    Mutation(
        "a copy with other iterations stays at its place in the schedule", "populations/members.py",
        'schedule["last_epoch"] = int(step)', "pass",
        f"{POPULATION}::test_a_mutated_number_of_iterations_changes_training",
    ),
    Mutation(
        "a policy with broken weights joins the members' batch", "populations/members.py",
        "if not weight.isfinite().all()]", "if weight.isnan().all()]",
        f"{POPULATION} -k broken_weight",
    ),
    Mutation(
        "the winner is the best policy of the last round", "populations/lineage.py",
        "key=lambda event: (event.fitness, event.round)", "key=lambda event: (event.round, event.fitness)",
        f"{POPULATION} -k best_policy_of_all",
    ),
    Mutation(
        "an engine that served others is taken to have the policy still", "sampling/served_policy.py",
        "        self._moved_at_construction = None\n        self.engine.remove_adapter()",
        "        self.engine.remove_adapter()",
        "tests/trainers/test_served_policy.py -k others_were_served",
    ),
    Mutation(
        "a member that was killed after its round trains a step more", "populations/members.py",
        "control.should_training_stop = state.global_step >= self._step", "pass",
        f"{POPULATION}::test_a_killed_population_is_the_same_bit_for_bit",
    ),
    Mutation(
        "a member's failure ends the population", "populations/members.py",
        "except Exception as error:", "except StopIteration as error:",
        f"{POPULATION}::test_a_member_that_crashes_or_turns_nan_loses_only_itself",
    ),
    Mutation(
        "an error of the machine is a member's own", "populations/members.py",
        "except _PASSING:", "except StopIteration:", f"{POPULATION} -k no_members_own",
    ),
    Mutation(
        "the results of a round without a survivor are read again", "populations/population.py",
        "shutil.rmtree(self._round(number))", "pass", f"{POPULATION} -k without_a_survivor",
    ),
    Mutation(
        "members that diverge in a later round end the population without a winner", "populations/members.py",
        "isinstance(error, FloatingPointError)", "False", f"{POPULATION} -k played_again",
    ),
    Mutation(
        "a population starts from an adapter that changes the shared base", "populations/members.py",
        'saved.config.init_lora_weights == "olora"', "False", f"{POPULATION} -k bases_memory",
    ),
    Mutation(
        "a later winner gets the held-out result of an earlier one", "populations/population.py",
        'f"held_out-{winner.round:04d}-{winner.member:02d}.json"', '"held_out.json"', f"{POPULATION} -k larger_budget",
    ),
    Mutation(
        "the card of a policy has another one's held-out result", "populations/population.py",
        " or (found.member, found.round) != (trained.member, trained.round)", "", f"{POPULATION} -k larger_budget",
    ),
    Mutation(
        "a policy is exported with the fitness of another", "populations/population.py",
        "if (of, steps) != (trained.member, trained.steps):", "if False:", f"{POPULATION} -k exported_with",
    ),
    Mutation(
        "checkpoints of other processes' members are deleted", "populations/population.py",
        """                if not replayed:
                    self._forget(assignments)
                self._keep_winner(number)  #""",
        """                self._keep_winner(number)
                if not replayed:
                    self._forget(assignments)  #""",
        f"{POPULATION} -k before_other_processes",
    ),
    Mutation(
        "a member without its checkpoint begins anew", "populations/members.py",
        "if assignment.round > 1 and not there:", "if False:", f"{POPULATION} -k begin_anew",
    ),
    Mutation(
        "reward functions are no fitness", "populations/population.py",
        'fitness or (REWARD if REWARD in measures else "return")', 'fitness or "return"',
        f"{POPULATION} -k reward_functions",
    ),
    Mutation(
        "a failed episode costs a reward the lowest return", "populations/members.py",
        " and fitness != REWARD else None", " else None", f"{POPULATION} -k reward_functions",
    ),
    Mutation(
        "a process without a GPU trains on CPU", "populations/members.py",
        "if not visible and torch.cuda.device_count() == 0:", "if False:", f"{POPULATION} -k without_a_gpu",
    ),
    Mutation(
        "whole numbers do not move", "populations/hyperparameters.py",
        "moved = max(round(moved), value + 1) if factor > 1 else min(round(moved), value - 1)", "moved = value",
        f"{SELECTION}::test_whole_numbers_move_both_ways_by_at_least_one_and_stay_inside",
    ),
    Mutation(
        "halving keeps the worse half", "populations/selection.py",
        "(-score.mean, score.member)", "(score.mean, score.member)",
        f"{SELECTION}::test_halving_keeps_the_better_half_unchanged",
    ),
    Mutation(
        "a tie is a win", "populations/selection.py",
        "return not abs(self.mean) > TIE * self.standard_error", "return False",
        SELECTION,
    ),
    Mutation(
        "copies of one parent are the same run twice", "populations/selection.py",
        "(made.parent, made.hyperparameters) != (one.parent, one.hyperparameters)", "True",
        f"{SELECTION}::test_tournaments_keep_the_best_and_mutate_the_winners",
    ),
    Mutation(
        "the records' token columns stand at other episodes", "monitor/rollout_log.py",
        "row = self.unfinished[episode]", "row = self.unfinished[place]",
        f"{EPISODE_RECORDS}::test_tokens_have_what_the_last_pass_computed",
    ),
    Mutation(
        "records are written after the first pass", "trainers/trainer.py",
        "if self._step % self.micro_steps_per_generation == 0:\n            self.rollout_log",
        "if self._step % self.args.steps_per_generation == 0:\n            self.rollout_log",
        f"{EPISODE_RECORDS}::test_tokens_have_what_the_last_pass_computed",
    ),
    Mutation(
        "clipping whatever the sign of the advantage", "objectives/ratios.py",
        "below = (ratios < 1 - epsilon_low) & (advantages < 0)", "below = ratios < 1 - epsilon_low",
        "tests/objectives/test_clipping.py",
    ),
    Mutation(
        "a checkpoint forgets the records of its generation batch", "checkpoints/record.py",
        "episodes = read_rows(file.with_suffix(\".parquet\"))", "episodes = []",
        "tests/trainers/test_checkpoint.py::test_killed_at_every_step",
    ),
    Mutation(
        "two runs write into one folder", "checkpoints/resuming.py",
        "stack.enter_context(FileLock(path, timeout=0.2))", "pass", "tests/trainers/test_resume.py -k lock",
    ),
    Mutation(
        "records appear before they are complete", "records/plain.py",
        "partial = path.with_name(path.name + writer + PARTIAL)", "partial = path",
        f"{RECORDS}::test_a_run_killed_in_mid_write_leaves_readable_records",
    ),
    Mutation(
        "the newest records are deleted first", "records/writer.py",
        "if generation != newest]", "if generation >= 0]",
        f"{RECORDS}::test_thinning_keeps_the_first_the_newest_and_an_even_rest",
    ),
    Mutation(
        "the mismatch is rounded twice", "records/schema.py",
        "return _on_grid(sampled) + _on_grid(mismatch), hidden", "return _on_grid(trained), hidden",
        f"{RECORDS}::test_numbers_keep_their_stated_precision",
    ),
    Mutation(
        "sign of the advantage", "objectives/advantages.py",
        "centred = self.values - mean", "centred = mean - self.values", ADVANTAGES,
    ),
    Mutation(
        "groups shifted by one row", "objectives/advantages.py",
        "device=rewards.device) // group_size)", "device=rewards.device).add(1) // group_size)", ADVANTAGES,
    ),
    Mutation(
        "an uncompared turn gets its episode's return", "objectives/advantages.py",
        "torch.where(itself, values[row, turn][:, None, None], others.values[group])",
        "torch.where(itself, values[row, 0][:, None, None], others.values[group])", f"{STOPPING} -k leave_one_out",
    ),
    Mutation(
        "an uncompared turn gets nothing", "algorithms/grpo.py",
        'args.turn_advantage_trajectory_fallback is not False and', "False and", f"{STOPPING} -k leave_one_out",
    ),
    Mutation(
        "an uncompared turn is compared with failed episodes", "objectives/advantages.py",
        "torch.zeros_like(sets[:, :1]), ~failed[:, None])", "torch.zeros_like(sets[:, :1]), failed[:, None] | True)",
        ADVANTAGES,
    ),
    Mutation(
        "an episode that comes to a state twice is compared with itself", "objectives/advantages.py",
        "itself | (alike & ~own),", "itself | alike,", f"{ADVANTAGES} -k anchors_equal",
    ),
    Mutation(
        "an episode's turns are compared with themselves if it alone comes to their state", "objectives/advantages.py",
        "for one in fields(_Compared):", "for one in fields(_Compared)[:1] + fields(_Compared)[2:]:",
        f"{ADVANTAGES} -k compared_with_itself",
    ),
    Mutation(
        "a reward given before a call was submitted is in its return", "objectives/returns.py",
        "returns = returns.gather(1, _first_rewards(rewarded, turn_mask, gamma))",
        "returns = returns.gather(1, _first_rewards(rewarded, turn_mask, gamma) * 0)", GAE,
    ),
    Mutation(
        "a reward given after a call was submitted is left out of its return", "objectives/returns.py",
        "returns = returns.gather(1, _first_rewards(rewarded, turn_mask, gamma))",
        "_first_rewards(rewarded, turn_mask, gamma)", GAE,
    ),
    Mutation(
        "groups compare what was rewarded before a call was submitted", "objectives/advantages.py",
        "discounted_returns(rewards, valid, gamma, rewarded)", "discounted_returns(rewards, valid, gamma)",
        f"{ADVANTAGES} -k calls_at_once",
    ),
    Mutation(
        "the last rewards of a path that ended are left out", "objectives/returns.py",
        "last = torch.where(goes_on, first.gather(1, later), end)",
        "last = torch.where(goes_on, first.gather(1, later), index + 1)", f"{PATHS} -k along_paths",
    ),
    Mutation(
        "a step on a path ends with the next call's index, not with its submission", "objectives/returns.py",
        "last = torch.where(goes_on, first.gather(1, later), end)",
        "last = torch.where(goes_on, later, end)", f"{PATHS} -k along_paths",
    ),
    Mutation(
        "a call is compared with others of its own episode at one prompt", "objectives/advantages.py",
        "again = compared & (", "again = ~compared & (", f"{PATHS} -k one_prompt",
    ),
    Mutation(
        "a discount with calls at once", "objectives/returns.py",
        "if gamma != 1.0 and (wrong", "if False and (wrong", GAE,
    ),
    Mutation(
        "lambda counts the calls between two steps of a path", "objectives/returns.py",
        "decays = (discounts * gae_lambda).to(values.dtype)",
        "decays = ((gamma * gae_lambda) ** (torch.where(goes_on, following, end) - index).clamp(min=0).double())"
        ".to(values.dtype)", f"{GAE} -k rewritten",
    ),
    Mutation(
        "an answer that no later prompt contains is judged by a later value", "objectives/returns.py",
        "goes_on = (following < len(index)) & turn_mask.gather(1, later)",
        "later = torch.where(following < len(index), later, (index + 1).clamp(max=len(index) - 1))\n"
        "    goes_on = (later > index) & turn_mask.gather(1, later)", GAE,
    ),
    Mutation(
        "a call that did not happen is next on a path", "objectives/returns.py",
        "goes_on = (following < len(index)) & turn_mask.gather(1, later)", "goes_on = following < len(index)", GAE,
    ),
    Mutation(
        "a step on a path forgets rewards of calls between", "objectives/returns.py",
        "(index >= first[:, k, None]) & (index < last[:, k, None])", "index == k", GAE,
    ),
    Mutation(
        "CISPO with the bound of a clipped ratio", "config/multi_turn.py",
        "args.epsilon_high = CISPO_BOUND", "pass", "tests/trainers/test_invariances.py -k cispos_bound",
    ),
    Mutation(
        "windows that an epoch closes early", "trainers/setup.py",
        "whole = groups * (accumulation // gcd(accumulation, micro_steps))", "whole = groups",
        "tests/trainers/test_accumulation.py -k closes_early",
    ),
    Mutation(
        "the value loss of a short update over a whole one's turns", "trainers/trainer.py",
        "length=self.current_gradient_accumulation_steps", "length=self.args.gradient_accumulation_steps",
        "tests/trainers/test_accumulation.py -k value_loss",
    ),
    Mutation(
        "failed episodes in the statistics", "objectives/advantages.py",
        "valid = turn_mask & ~failed[:, None]", "valid = turn_mask", ADVANTAGES,
    ),
    Mutation(
        "sampler and trainer compared after pooling", "trainers/trainer.py",
        "if self.mismatch.is_open:\n            assert", "if False:\n            assert", f"{MISMATCH_RUNS} -k stops_before",
    ),
    Mutation(
        "the first of two batches not compared", "trainers/trainer.py",
        "== self.args.steps_per_generation - 1", "== -1", f"{MISMATCH_RUNS} -k two-batches",
    ),
    Mutation(
        "the mismatch of one rank", "sampling/mismatch.py",
        "ranks[:, :-1].sum(0)", "ranks[:1, :-1].sum(0)", "tests/trainers/test_mismatch_two_processes.py",
    ),
    Mutation(
        "rows that are not scored counted in the mismatch", "trainers/trainer.py",
        "log_probs.metric_mask(trained)", "trained", f"{MISMATCH_RUNS} -k not_read",
    ),
    Mutation(
        "a bad answer is a low score", "judges/judge.py",
        "values = None if problem else", "values = [[0.0] for _ in asked.conversation] if problem else",
        f"{JUDGES} -k invented",
    ),
    Mutation(
        "JSON inside of other text is an answer", "judges/questions.py",
        "_FENCED.fullmatch(text.strip())", "re.search(r'({.*})', text)", f"{JUDGES} -k does_not_fit",
    ),
    Mutation(
        "NaN of a judge is a number", "judges/questions.py", ", parse_constant=_no_number", "", f"{JUDGES} -k does_not_fit",
    ),
    Mutation(
        "a ranking may name a member twice", "judges/questions.py",
        'return None if "ranking" in answer and', 'return None if "ranking" not in answer and',
        f"{JUDGES} -k every_conversation",
    ),
    Mutation(
        "equal ones have the best of their ranks", "judges/questions.py",
        "(better + (size - 1) / 2)", "better", f"{JUDGES} -k ranks_of_equal",
    ),
    Mutation(
        "both orders of a group are one", "judges/questions.py",
        "return [order, order[::-1]][:orders]", "return [order, order][:orders]", f"{JUDGES} -k likes_places",
    ),
    Mutation(
        "the order of a group's members decides theirs", "judges/questions.py",
        "order = sorted(range(len(contents)), key=contents.__getitem__)", "order = list(range(len(contents)))",
        f"{JUDGES} -k orders_depend",
    ),
    Mutation(
        "a judge's status is always tried again", "judges/asking.py",
        "if not again or (too_often", "if False or (too_often", f"{JUDGES} -k cannot_succeed",
    ),
    Mutation(
        "a judge's failure is forgotten", "judges/asking.py",
        "self.stored.put(failure, reply.failed)", "pass", f"{JUDGES} -k stays_so",
    ),
    Mutation(
        "a judge's answer that does not fit is stored", "judges/asking.py",
        "                if read_judgement(answer, question) is None:", "                if False:",
        f"{JUDGES} -k mended_server",
    ),
    Mutation(
        "a judge's answer without text is the word None", "judges/asking.py",
        "if not isinstance(content, str):", "if not isinstance(content := str(content), str):", f"{JUDGES} -k without_text",
    ),
    Mutation(
        "a rate limit uses the tries of a judge up", "judges/asking.py",
        "if _failure(state).too_often:", "if False:", f"{JUDGES} -k rate_limit",
    ),
    Mutation(
        "a judge is asked before it wants to be", "judges/asking.py",
        "return _failure(state).after + WAITS(state)", "return WAITS(state)", f"{JUDGES} -k rate_limit",
    ),
    Mutation(
        "a judge's key stays in its answers", "judges/asking.py",
        "response.text.replace(key, MASK) if key else response.text", "response.text", f"{JUDGED} -k key",
    ),
    Mutation(
        "an episode without a score counts", "types.py",
        'return any("failed" in one and not one.get("held_out") for one in said)', "return False", f"{JUDGED} -k left_out",
    ),
    Mutation(
        "a fault of a judge that is held out leaves an episode out", "types.py",
        ' and not one.get("held_out")', "", f"{JUDGED} -k held_out_is_logged",
    ),
    Mutation(
        "scores of turns are paid at the end too", "step/reward.py",
        "self.weights.masked_fill(self._of_turns, 0.0)", "self.weights", f"{JUDGED} -k scores_of_turns",
    ),
    Mutation(
        "a score that is held out is a reward", "step/reward.py",
        "weights.masked_fill(torch.tensor(held_out, device=weights.device), torch.nan)", "weights", f"{JUDGED} -k held_out",
    ),
    Mutation(
        "episodes are judged when all have ended", "trainers/setup.py",
        "engine.observers.append(judge.begin)", "pass", f"{JUDGED} -k while_others",
    ),
    Mutation(
        "judges part where both fall", "evaluation/diagnosis.py",
        "or fall <= 0 or trained[-1] < trained[best]:", "or fall <= 0:", "tests/evaluation/test_diagnosis.py -k agree",
    ),
    Mutation(
        "a moving average that forgets itself", "adapters/copies.py",
        "twin.lerp(read, weight)", "read * weight", "tests/trainers/test_reference.py -k moving_average[lora]",
    ),
    Mutation(
        "the reference does not teach", "trainers/teacher.py",
        "return LoadedTeacher(adapter=REFERENCE)", "return LoadedTeacher()",
        "tests/trainers/test_reference.py -k may_teach[0.5",
    ),
    Mutation(
        "a teacher's log-ratio upside down", "objectives/distillation.py",
        "weights * (teacher - policy)", "weights * (policy - teacher)", f"{TEACHER_ENUMERATED} -k target[immediate",
    ),
    Mutation(
        "a teacher's return of what came before", "objectives/distillation.py",
        "ratios.flip(1).cumsum(1).flip(1)", "ratios.cumsum(1)", f"{TEACHER_ENUMERATED} -k target[return",
    ),
    Mutation(
        "a teacher's forward divergence under the policy", "objectives/distillation.py",
        "(teacher if forward else policy).exp()", "policy.exp()", f"{TEACHER_ENUMERATED} -k target[distribution_forward",
    ),
    Mutation(
        "a teacher over all tokens under a filter", "objectives/distillation.py",
        "for logits in (policy, teacher))", "for logits in (policy, policy.detach()))", f"{TEACHER_ENUMERATED} -k kept_sets",
    ),
    Mutation(
        "a teacher's observations scored", "step/teacher.py",
        "total = torch.where(mask, values, 0.0).sum()", "total = (values + (~mask) * measured).sum()",
        f"{TEACHER_ENUMERATED} -k observations",
    ),
    Mutation(
        "a teacher's part divided by the tokens of the reward", "step/teacher.py",
        "weights = weights * output.num_items_in_batch / total.clamp(min=1e-9)", "pass", f"{TEACHER} -k own_count",
    ),
    Mutation(
        "a teacher's coefficient that stays", "objectives/distillation.py",
        "max(1 - step / (length * max_steps if length <= 1 else length), 0.0)", "1.0", f"{TEACHER} -k coefficient",
    ),
    Mutation(
        "a teacher's hint of another path", "train_batch.py",
        "columns + size * (path + 1)", "columns + size * path", f"{TEACHER} -k every_path",
    ),
    Mutation(
        "a teacher in every checkpoint", "adapters/roles.py",
        "configs.pop(name) for name in", "configs[name] for name in", f"{TEACHER} -k not_saved",
    ),
    Mutation(
        "a teacher that is silent where rewards are equal", "config/rules.py",
        " or args.teacher is not None)", ")", f"{TEACHER} -k equal_rewards",
    ),
    Mutation(
        "a teacher's credit without the weight of drift", "step/teacher.py",
        "credit = credit * batch.importance_sampling_ratio", "pass", f"{TEACHER} -k batches_ahead",
    ),
    Mutation(
        "the policy as its own teacher", "step/teacher.py",
        "with running(policy, teacher.adapter) if teacher.adapter else nullcontext():", "with nullcontext():",
        f"{TEACHER} -k stated_mixture",
    ),
    Mutation(
        "another environment in the mean of the batch", "objectives/advantages.py",
        "if environments is None else environments", "if True else environments",
        "tests/objectives/test_advantages.py -k one_environment",
    ),
    Mutation(
        "a deviation without the batch", "objectives/advantages.py",
        "squares = squares + (self.further - mean) ** 2", "pass", "tests/objectives/test_advantages.py -k one_member",
    ),
    Mutation(
        "one teacher for every environment", "step/teacher.py",
        "return (batch.teachers == teacher)", "return (batch.teachers >= 0)", f"{TEACHER} -k own_teacher[two",
    ),
    Mutation(
        "an environment without a teacher counted", "step/teacher.py",
        "weights = weights * (output.teachers >= 0)[:, None]", "pass", f"{TEACHER} -k own_teacher[one",
    ),
    Mutation(
        "a mean over episodes without a teacher", "step/teacher.py",
        "weights = weights / taught.clamp(min=1e-9)", "pass", f"{TEACHER} -k of_episodes_too",
    ),
    Mutation(
        "a frozen teacher that reads in every update", "trainers/trainer.py",
        "whole.token_columns[KEPT] = taught.log_probs", "pass", f"{TEACHER} -k once[frozen",
    ),
    Mutation(
        "a teacher's server without the hint", "sampling/teacher_server.py",
        "part = with_hints(batch.to_trl())", "part = batch.to_trl()", f"{TEACHER} -k gives[one",
    ),
    Mutation(
        "a teacher's return of a part of an episode", "step/token_batches.py",
        "or (self._args.teacher is not None and self._args.teacher_gradient == RETURN_TO_GO)", "or False",
        f"{TEACHER} -k stored_as_paths",
    ),
    Mutation(
        "a teacher with another tokenizer", "trainers/teacher.py", "if known == own:", "if True:",
        f"{TEACHER} -k another_tokenizer",
    ),
    Mutation(
        "rewards that a teacher does not need", "evaluation/diagnosis.py",
        "if not options.rewarded:", "if False:", DIAGNOSIS,
    ),
    Mutation(
        "demonstrations inside of the statistics of own episodes", "step/credit.py",
        "self._rule(turns.own()), self._args, None", "self._rule(turns), self._args, None", f"{SHOWN} -k among_themselves",
    ),
    Mutation(
        "a demonstration weighed by the logarithm", "objectives/demonstrations.py",
        ".clamp(max=0.0).exp()", ".clamp(max=0.0)", f"{SHOWN_ENUMERATED} -k weighted-one",
    ),
    Mutation(
        "a demonstration without the bound", "objectives/demonstrations.py",
        ".clamp(max=0.0).exp()", ".exp()", f"{SHOWN_ENUMERATED} -k weighted-one",
    ),
    Mutation(
        "a demonstration that is worse pushed away", "step/credit.py",
        "whole.advantages.clamp(min=0.0)", "whole.advantages", f"{SHOWN_ENUMERATED} -k advantage_sft-one",
    ),
    Mutation(
        "demonstrations among the tokens of own episodes", "types.py",
        "return mask if self.demonstrations is None else mask & ~self.demonstrations[:, None]", "return mask",
        f"{SHOWN} -k stated_mixture",
    ),
    Mutation(
        "an unlikely answer of an expert in the KL term", "step/loss.py",
        "if DEMONSTRATED in batch.token_columns:", "if False:", f"{SHOWN} -k cannot_give",
    ),
    Mutation(
        "recorded ids after another prompt", "rollout/replay.py",
        "known = answer.prompt_ids == request.token_ids", "known = answer.prompt_ids is not None",
        f"{SHOWN} -k probabilities",
    ),
    Mutation(
        "a replay that may disagree", "rollout/rollout.py", "demonstration.check(trajectory)", "pass",
        f"{SHOWN} -k disagrees",
    ),
    Mutation(
        "answers of an expert given twice after a checkpoint", "rollout/rollout.py",
        "spec.demonstration.answers[len(record.answers) :]", "spec.demonstration.answers[:]",
        "tests/rollout/test_background.py -k expert_goes_on",
    ),
    Mutation(
        "an expert's success in the policy's", "monitor/episode_log.py",
        "own = [place for place, expert in enumerate(shown) if not expert and place % members not in experts]",
        "own = list(range(len(shown)))",
        f"{SHOWN} -k own_episodes",
    ),
    Mutation(
        "a batch of demonstrations without own tokens", "train_batch.py",
        "if not (kept & own).any():", "if not kept.any():", f"{SHOWN} -k own_episodes",
    ),
    Mutation(
        "a success of another start", "step/successes.py",
        "[trajectory.environment_name, trajectory.options]", "[]", f"{REPLAYED} -k its_start",
    ),
    Mutation(
        "a success in the place of an episode with an advantage", "step/successes.py",
        "if zero[first // self._members]:", "if True:", f"{REPLAYED} -k keeps_its_places",
    ),
    Mutation(
        "the oldest success leaves, not the start that succeeded least recently", "step/successes.py",
        "self._kept.pop(start, None)", "pass", f"{REPLAYED} -k least_recently",
    ),
    Mutation(
        "a success that nothing rewards", "step/successes.py",
        "if not isnan(one.reward)]", "]", f"{REPLAYED} -k nothing_rewards",
    ),
    Mutation(
        "a success in the first place of a group", "step/successes.py",
        "taking[first + len(group) - 1] = start", "taking[first] = start", f"{REPLAYED} -k last_place",
    ),
    Mutation(
        "credit from before a success took its place", "step/play.py",
        "(played.trajectories, played.rewards), None", "(played.trajectories, played.rewards), played.judged",
        f"{REPLAYED} -k logged_apart",
    ),
    Mutation(
        "a replaced episode left out of the success rate", "trainers/trainer.py",
        "played.own or (played.trajectories, played.rewards)", "(played.trajectories, played.rewards)",
        f"{REPLAYED} -k logged_apart",
    ),
    Mutation(
        "a replaced episode left out of the records", "monitor/rollout_log.py",
        "if one is not trained)]", "if False)]", f"{REPLAYED} -k logged_apart",
    ),
    Mutation(
        "a resumed run without its successes", "trainers/setup.py",
        "parts.rollouts.successes.restore(rollout.successes)", "pass", f"{REPLAYED} -k goes_on",
    ),
    Mutation(
        "a policy over all tokens under a filter", "objectives/kept_sets.py",
        "logits.masked_fill(removed, -torch.inf).log_softmax", "logits.log_softmax", KEPT,
    ),
    Mutation(
        "kept sets of other tokens", "packing/forward.py",
        "% columns - (columns - length)", "% columns", f"{TRUNCATED_RUNS} -k ratios",
    ),
    Mutation(
        "equal tokens of other kept sets read as one", "packing/forward.py",
        'if not {"kept", "teaching", "heard"} & inputs.keys():', "if True:", f"{PACKED_FORWARD} -k with_kept_sets",
    ),
    Mutation(
        "an old policy over all tokens", "step/log_probs.py",
        "scored=scored, part=part", "scored=scored", f"{TRUNCATED_RUNS} -k ratios",
    ),
    Mutation(
        "kept sets lost in a checkpoint", "rollout/replay.py",
        "read=None, kept=answer.kept", "read=None", f"{TRUNCATED_RUNS} -k goes_on",
    ),
    Mutation(
        "tokens that a shorter set does not have, counted as kept", "objectives/kept_sets.py",
        "there = place < self.sizes[:, None] - 1", "there = place < self.sizes[:, None]", f"{PACKED_FORWARD} -k few_kept",
    ),
    Mutation(
        "the logits of kept tokens without their scale", "packing/kept_head.py",
        "logits = self._scaled(config, logits if", "logits = (logits if", f"{PACKED_FORWARD} -k few_kept",
    ),
    Mutation(
        "episodes that the caller brought are taken for what the sampler plays", "trainers/trainer.py",
        "if not given:", "if True:", "tests/trainers/test_on_a_pretended_gpu.py -k padded",
    ),
    Mutation(
        "a truncated policy without its temperature", "packing/kept_head.py",
        "logits / self.temperature", "logits", f"{TRUNCATED} -k kl_entropy",
    ),
    Mutation(
        "a policy that arrived late is let through after the first batch", "sampling/mismatch.py",
        "(played is not None or (is_first and conditions.exact))", "(is_first and conditions.exact)",
        f"{DELIVERY} -k named_at_its_first_batch",
    ),
    Mutation(
        "rounding taken for another policy", "sampling/delivery.py",
        "self.near <= LESS * self.far and self._decrease > CERTAIN * self._error", "True", f"{DELIVERY} -k healthy",
    ),
    Mutation(
        "the policy before the last move is the one that is trained", "sampling/delivery.py",
        "part.view_as(weights[name]).copy_(weights[name], non_blocking=True)", "weights[name]",
        f"{DELIVERY} -k late",
    ),
    Mutation(
        "the policy that is trained by now taken for the one that should have played", "sampling/delivery.py",
        "with self._playing():\n                self._last", "if True:\n                self._last",
        f"{DELIVERY} -k snapshot",
    ),
    Mutation(
        "a sampler of one rank that plays another policy is judged by the first rank", "sampling/delivery.py",
        "gathered[self._farthest]", "gathered[0]", "tests/trainers/test_mismatch_two_processes.py -k named",
    ),
    Mutation(
        "an adapter's layers looked for on the wrong side", "sampling/delivery.py",
        "int(found[1]) - by", "int(found[1]) + by", f"{DELIVERY} -k other",
    ),
    Mutation(
        "parts of an adapter that have arrived named as missing", "sampling/delivery.py",
        "share > 0.5 for share", "share < 0.5 for share", f"{DELIVERY} -k part",
    ),
    Mutation(
        "a penalty taken for exact sampling", "sampling/mismatch.py",
        "or self.dropout or self.penalized)", "or self.dropout)", f"{MISMATCH_RUNS} -k only_warns",
    ),
    Mutation(
        "weights that TRL's loss does not read", "trainers/trainer.py",
        "self.use_vllm = self.vllm_importance_sampling_correction = weighed", "pass", CORRECTION,
    ),
    Mutation(
        "the disabled adapter as PiSSA's reference", "adapters/lora_settings.py",
        "config.init_lora_weights not in IDLE", "False", f"{STARTS} -k starts",
    ),
    Mutation(
        "a reference that decomposes the base again", "adapters/lora_settings.py",
        "        config.init_lora_weights = True\n    return config", "        pass\n    return config",
        f"{STARTS} -k starts",
    ),
    Mutation(
        "TRL's reference decomposes the base again", "trainers/arguments.py",
        "plain_copies(model), named:", "named:", f"{STARTS} -k already",
    ),
    Mutation(
        "the sampler's probability over the trainer's", "objectives/mismatch.py",
        "log_probs - sampling_log_probs, 0.0", "sampling_log_probs - log_probs, 0.0", MISMATCH,
    ),
    Mutation(
        "the mean of a turn's ratios for their product", "objectives/mismatch.py",
        'max(int(ids.max()) + 1, 1), "sum")', 'max(int(ids.max()) + 1, 1), "mean")', MISMATCH,
    ),
    Mutation(
        "a turn's own ratio for the product up to it", "objectives/drift.py",
        "turns).cumsum(dim=1).exp()", "turns).exp()", DRIFT,
    ),
    Mutation(
        "returns of another policy without their weights", "objectives/returns.py",
        "happened, weights[:, k] * delta + after", "happened, delta + after", DRIFT,
    ),
    Mutation(
        "the value of a path's next call without its weight", "objectives/returns.py",
        "weights.gather(1, (last - 1).clamp(min=0)) * next_values", "next_values", DRIFT,
    ),
    Mutation(
        "the value of a path's call without its weight", "objectives/returns.py",
        "- weights[:, k] * values[:, k]\n", "- values[:, k]\n", DRIFT,
    ),
    Mutation(
        "a member's own return among the values of its turns", "objectives/advantages.py",
        "others = torch.where(has_others, self.values - apart, 0.0)",
        "others = torch.where(has_others, self.values - centred, 0.0)", DRIFT,
    ),
    Mutation(
        "a turn with nothing to compare is its own value", "objectives/advantages.py",
        "others = torch.where(has_others, self.values - apart, 0.0)", "others = self.values - apart",
        f"{DRIFT_OPTIONS} -k without_comparison",
    ),
    Mutation(
        "the group's share of its baseline is forgotten where rewards are weighted", "objectives/advantages.py",
        "factor = factor * (count - 1) / count.clamp(min=1)", "pass", f"{DRIFT_OPTIONS} -k takes_its_share",
    ),
    Mutation(
        "weighted rewards without their scale", "objectives/advantages.py",
        "torch.where(differ, factor / (std + STD_EPSILON), 0.0)", "factor", f"{DRIFT_OPTIONS} -k advantages_by_hand",
    ),
    Mutation(
        "rewards of opposite infinities are an episode without a reward", "step/reward.py",
        "weighted.isinf().any(dim=1) | weighted.nansum(dim=1).isinf()", "weighted.nansum(dim=1).isinf()",
        "tests/trainers/test_reward_functions.py -k leaves_float32",
    ),
    Mutation(
        "rewards too large for the loss are trained on", "step/credit.py",
        "        if value > LARGEST_CREDIT:", "        if False:", "tests/trainers/test_nonfinite.py -k too_large",
    ),
    Mutation(
        "a rule's own columns are taken for targets of a critic", "step/credit.py",
        "{TARGETS: credit.columns[TARGETS]} if TARGETS in credit.columns else {}", "credit.columns",
        "tests/trainers/test_nonfinite.py -k own_columns",
    ),
    Mutation(
        "a turn's reward may be infinite", "step/credit.py",
        "if rewards == math.inf:", "if False:", "tests/trainers/test_nonfinite.py -k turns_reward",
    ),
    Mutation(
        "REINFORCE forgets the weights of rewards", "algorithms/reinforce.py",
        "None if turns.weights is None else functools", "None if True else functools",
        f"{DRIFT_OPTIONS} -k reinforce_is_exact",
    ),
    Mutation(
        "the critic learns from an older policy's episodes as they were played", "algorithms/ppo.py",
        "if turns.ratios is not None:", "if False:", f"{DRIFT_OPTIONS} -k ppo_is_exact",
    ),
    Mutation(
        "a turn's own answer is left out of V-trace", "objectives/returns.py",
        "torch.where(index >= k, ratios, 1.0)", "torch.where(index > k, ratios, 1.0)", DRIFT,
    ),
    Mutation(
        "V-trace weighs what came before the turn", "objectives/returns.py",
        "torch.where(index >= k, ratios, 1.0)", "ratios", f"{DRIFT} -k targets",
    ),
    Mutation(
        "V-trace's later turns have no ratios of the turn", "objectives/returns.py",
        "gamma, gae_lambda, ratios, ratios)", "gamma, gae_lambda, ratios, None)", f"{DRIFT} -k targets",
    ),
    Mutation(
        "an expert's places are those that it took", "monitor/episode_log.py",
        "not expert and place % members not in experts", "not expert",
        "tests/trainers/test_demonstrations.py -k environment_that_fails",
    ),
    Mutation(
        "rewards read the environment's last word", "step/reward.py",
        "return messages[: answers[-1] + 1] if answers else messages", "return messages",
        "tests/rollout/test_asides.py",
    ),
    Mutation(
        "a greedy game that is played again is news", "evaluation/results.py",
        "evaluation_metrics(self.rows, self.ranges, self.units)", "evaluation_metrics(self.rows, self.ranges)",
        "tests/trainers/test_evaluation.py -k greedy_repetitions",
    ),
    Mutation(
        "environments without success lower it", "evaluation/results.py",
        'for row in rows if row["environment"] in reporting\n', "for row in rows\n", "tests/evaluation/test_counted.py",
    ),
    Mutation(
        "failed episodes are of another unit", "evaluation/results.py",
        "(lowest[name], unit) for", "(lowest[name], name) for",
        "tests/evaluation/test_counted.py",
    ),
    Mutation(
        "a further run counts its batches from 0", "trainers/trainer.py",
        "-(-(self._before + micro_steps)", "-(-(micro_steps)", "tests/trainers/test_batches_ahead.py -k again",
    ),
    Mutation(
        "earlier policies share trained biases", "step/ahead.py",
        'check_bias(model.peft_config[POLICY], "the policy and earlier ones, which play,")', "pass",
        "tests/trainers/test_batches_ahead.py -k biases",
    ),
    Mutation(
        "the reference has trained biases", "trainers/reference.py",
        'check_bias(model.peft_config[POLICY], "policy and reference")', "pass",
        "tests/trainers/test_batches_ahead.py -k biases",
    ),
    Mutation(
        "a set inside of an option's set follows the hash seed", "checkpoints/resuming.py",
        "else stable_text(item) for item in value", "else str(item) for item in value",
        "tests/trainers/test_resume.py -k alike",
    ),
    Mutation(
        "a batch has columns of any value", "checkpoints/resuming.py",
        "(acts and name in _OF_THE_BATCH)", "False", "tests/trainers/test_resume.py -k columns_of",
    ),
    Mutation(
        "an expert is to blame for its environment", "trainers/demonstrations.py",
        "if not asking:", "if False:", "tests/trainers/test_demonstrations.py -k environment_that_fails",
    ),
    Mutation(
        "an environment is to blame for what an expert does not say", "trainers/demonstrations.py",
        "if not isinstance(text, str):", "if False:", "tests/trainers/test_demonstrations.py -k is_named",
    ),
    Mutation(
        "names of words are secrets", "checkpoints/disclosure.py",
        '_NO_WORDS = r"(?!', '_NO_WORDS = r"(?!x', "tests/trainers/test_secrets.py -k words",
    ),
    Mutation(
        "keys of a few words are none", "checkpoints/disclosure.py",
        "[A-Z]?[a-z]{0,15}\\d{0,3}(?![\\w\\-+/=~]|\\.[\\w\\-]))", "[A-Z]?[a-z]{0,15}\\d{0,3})",
        "tests/trainers/test_secrets.py -k keys_beside",
    ),
    Mutation(
        "special tokens are secrets", "checkpoints/disclosure.py",
        '_values(_NAMES, r"<\\|")', '_values(_NAMES, "$.")', "tests/trainers/test_secrets.py -k words",
    ),
    Mutation(
        "a pushed template has no special tokens", "checkpoints/disclosure.py",
        "*_values(_NAMES_IN_FILES,", "*_values(_NAMES,", "tests/trainers/test_secrets.py -k templates",
    ),
    Mutation(
        "a pushed processor has no special tokens", "checkpoints/disclosure.py",
        ' and not re.search("tokens?$", name, re.IGNORECASE)', "", "tests/trainers/test_secrets.py -k special_tokens_of",
    ),
    Mutation(
        "expressions of templates are secrets", "checkpoints/disclosure.py",
        "return opened > closed and", "return False and", "tests/trainers/test_secrets.py -k no_expressions",
    ),
    Mutation(
        "strings in a template's code are expressions", "checkpoints/disclosure.py",
        """return opened > closed and not re.search("[\\"']", _STRING.sub("", text[opened:place]))""",
        "return opened > closed", "tests/trainers/test_secrets.py -k no_expressions",
    ),
    Mutation(
        "a masked template is none any more", "checkpoints/disclosure.py",
        'r"(?![#%\\-]{0,2}\\}|\\{)"', '""', "tests/trainers/test_secrets.py -k no_expressions",
    ),
    Mutation(
        "processors stay at home", "checkpoints/disclosure.py",
        ' "processor_config.json",', "", "tests/trainers/test_image_runs.py -k pushed",
    ),
    Mutation(
        "private values beside a model that is saved elsewhere", "checkpoints/record.py",
        "and folder.resolve() == Path(self._args.output_dir).resolve()", "",
        "tests/trainers/test_secrets.py -k what_a_run_writes",
    ),
    Mutation(
        "a data set's name is that of a file", "monitor/rollout_log.py",
        "{file_part(prefix)}", "{prefix}", "tests/trainers/test_evaluation.py -k any_name",
    ),
    Mutation(
        "two data sets of alike names are one", "records/writer.py",
        "if plain == name and len(name) <= _LONGEST:", "if len(name) <= _LONGEST:\n        return plain\n    if False:",
        "tests/viewer/test_page.py -k any_names",
    ),
    Mutation(
        "processes share the name of an unfinished image", "records/writer.py",
        'replacing(path, f"-rank{self._rank}")', "replacing(path)", "tests/rollout/test_images.py -k at_once",
    ),
    Mutation(
        "an unfinished image counts", "records/writer.py",
        "if path.suffix != PARTIAL:", "if True:", "tests/rollout/test_images.py -k at_once",
    ),
    Mutation(
        "V-trace without the bound on ratios", "step/log_probs.py",
        "turn_ratios(*sampled)", "turn_ratios(*sampled[:-1])", f"{DRIFT_OPTIONS} -k ppo_is_exact",
    ),
    Mutation(
        "a critic that learns while it is read forgets the ratios", "step/critic.py",
        "None if fused.weights is None else", "None if True else",
        "tests/trainers/test_ppo_learned.py -k older_policy",
    ),
    Mutation(
        "a critic that learns while it is read takes the ratios of other rows", "step/critic.py",
        "fused.weights.rows(rows)", "fused.weights.rows(rows.sort().values)",
        "tests/trainers/test_ppo_learned.py -k older_policy",
    ),
    Mutation(
        "credit comes before the weights of rewards", "step/batch.py",
        "weighs = args.drift_correction == DECISION and played.version is not None", "weighs = False",
        f"{DRIFT_OPTIONS} -k grpo_is_exact",
    ),
    Mutation(
        "rewards are weighted by trained tokens alone", "step/log_probs.py",
        "log_ratio, batch.valid_mask, batch.turn_ids",
        "log_ratio, batch.valid_mask & ~batch.cut[:, None], batch.turn_ids",
        f"{DRIFT_OPTIONS} -k without_loss",
    ),
    Mutation(
        "rewards are weighted without the bound", "step/log_probs.py",
        "decision_weights(*sampled)", "decision_weights(*sampled[:-1])", f"{DRIFT_OPTIONS} -k advantages_by_hand",
    ),
    Mutation(
        "a rule of one's own passes for one that weighs", "trainers/trainer.py",
        '{"targets_by_row", "weighs_decisions"}', '{"targets_by_row"}', f"{DRIFT_OPTIONS} -k declares",
    ),
    Mutation(
        "an agent's rewards are weighted by the order of its calls", "config/rules.py",
        "if agents and args.drift_correction == drift.DECISION:", "if False:",
        "tests/trainers/test_agents_before_a_run.py -k not_weighted",
    ),
    Mutation(
        "weights of rewards stay on their process", "step/credit.py",
        "inputs.mask = inputs.mask.bool()",
        "inputs.mask = inputs.mask.bool(); inputs.weights = own.weights",
        "tests/trainers/test_two_processes.py -k ahead",
    ),
    Mutation(
        "tokens that do not count in the products", "objectives/drift.py",
        "torch.where(mask, log_ratio, 0.0).float()", "log_ratio.float()", DRIFT,
    ),
    Mutation(
        "weights per decision without their bound", "objectives/drift.py",
        "weights if clip_max is None else weights.clamp(max=clip_max)", "weights", DRIFT,
    ),
    Mutation(
        "the divergence of prox from the snapshot", "objectives/drift.py",
        "(ratio - 1 - gap).mean()", "(1 / ratio - 1 + gap).mean()", DRIFT,
    ),
    Mutation(
        "episodes without a token in the effective sample size", "objectives/drift.py",
        ".sum(dim=1)[mask.any(dim=1)]", ".sum(dim=1)", DRIFT,
    ),
    Mutation(
        "an adapter at the rate of a whole model", "config/batch_defaults.py",
        "LORA_LEARNING_RATE if adapter else TRL_LEARNING_RATE", "TRL_LEARNING_RATE", f"{RECIPE} -k rate_of_its_own",
    ),
    Mutation(
        "an update of one group by default", "config/batch_defaults.py",
        "GROUPS = 8", "GROUPS = 1", f"{RECIPE} -k eight_groups",
    ),
    Mutation(
        "an update that splits a group", "config/batch_defaults.py",
        "whole = unit // math.gcd(unit, together)", "whole = 1", f"{RECIPE} -k eight_groups",
    ),
    Mutation(
        "ratios out of bounds let through", "objectives/mismatch.py",
        "ratio.masked_fill(clipped, 0.0)", "ratio", MISMATCH,
    ),
    Mutation(
        "immediate reward instead of the return", "objectives/returns.py",
        "running = rewards[:, k] + gamma * running", "running = rewards[:, k]", ADVANTAGES,
    ),
    Mutation(
        "a turn's advantage given to the next turn", "objectives/segments.py",
        "return padded.gather(1, turn_ids + 1)", "return padded.roll(1, 1).gather(1, turn_ids + 1)",
        "tests/objectives/test_segments_and_ratios.py",
    ),
    Mutation(
        "a batch that stays on the CPU", "rollout/collate.py",
        "return batch.to(device)", "return batch",
        "tests/trainers/test_on_a_pretended_gpu.py",
    ),
    Mutation(
        "a mask of packed rows that stays on the CPU", "packing/attention.py",
        "end = torch.from_numpy(padded.reshape(-1)).to(device)", "end = torch.from_numpy(padded.reshape(-1))",
        "tests/trainers/test_on_a_pretended_gpu.py",
    ),
    Mutation(
        "rows are chosen by a mask, which waits for the GPU once a column", "train_batch.py",
        "if chosen.dtype == torch.bool:", "if False:",
        "tests/trainers/test_on_a_pretended_gpu.py",
    ),
    Mutation(
        "off-by-one turn start", "rollout/collate.py",
        "np.repeat(ends - tokens.cumsum(), tokens)", "np.repeat(ends - tokens.cumsum() + 1, tokens)",
        "tests/rollout/test_collate.py",
    ),
    Mutation(
        "value read after the first action token", "rollout/collate.py",
        "torch.where(numbers < counts, starts, completed)", "torch.where(numbers < counts, starts + 1, completed)",
        "tests/rollout/test_collate.py",
    ),
    Mutation(
        "reward on every token", "objectives/returns.py",
        "spread_to_tokens(lambda_returns, turn_ids) - token_values",
        "(spread_to_tokens(lambda_returns, turn_ids).flip(1).cumsum(1).flip(1)) - token_values", GAE,
    ),
    Mutation(
        "no bootstrap on truncation", "objectives/returns.py",
        "running, next_values = torch.zeros_like(final_values), final_values",
        "running, next_values = torch.zeros_like(final_values), torch.zeros_like(final_values)", GAE,
    ),
    Mutation(
        "bootstrap on termination", "step/critic.py",
        "torch.where(batch.unfinished & self._args.bootstrap_at_limits, read[:, -1], 0.0)", "read[:, -1]",
        "tests/trainers/test_ppo.py -k by_hand",
    ),
    Mutation(
        "bootstrap at limits by default", "step/critic.py",
        "batch.unfinished & self._args.bootstrap_at_limits", "batch.unfinished",
        "tests/trainers/test_ppo.py -k end_at_a_limit",
    ),
    Mutation(
        "a final observation that nothing reads", "trainers/setup.py",
        "append_final_observation=args.bootstrap_at_limits", "append_final_observation=args.has_critic",
        "tests/trainers/test_ppo.py -k end_at_a_limit",
    ),
    Mutation(
        "lambda ignored", "objectives/returns.py",
        "after = gamma * gae_lambda * (", "after = gamma * (", GAE,
    ),
    Mutation(
        "KL arguments swapped in the reward", "objectives/ratios.py",
        "return pool_to_turns(log_probs - reference,", "return pool_to_turns(reference - log_probs,",
        f"{ENUMERATION} -k kl_in_the_reward",
    ),
    Mutation(
        "KL arguments swapped in the advantage", "objectives/ratios.py",
        "torch.where(turn_ids >= 0, log_probs - reference, 0.0)", "torch.where(turn_ids >= 0, reference - log_probs, 0.0)",
        f"{ENUMERATION} -k kl_in_the_advantage",
    ),
    Mutation(
        "KL of a turn averaged over its tokens", "objectives/ratios.py",
        'return pool_to_turns(log_probs - reference, turn_ids, turns, "sum")',
        'return pool_to_turns(log_probs - reference, turn_ids, turns, "mean")', f"{ENUMERATION} -k kl_in_the_reward",
    ),
    Mutation(
        "KL penalty twice", "trainers/trainer.py",
        "self.beta = 0.0  # the penalty is in the advantages already", "pass",
        "tests/trainers/test_kl_placement.py -k no_kl_term",
    ),
    Mutation(
        "ranks not reduced", "step/credit.py",
        "gather_rows(accelerator, *(getattr(own, name)", "(*(getattr(own, name)",
        "tests/trainers/test_two_processes.py",
    ),
    Mutation(
        "value loss not counted over ranks", "step/critic.py",
        'turns = self._accelerator.reduce(sum(weights), reduction="sum")', "turns = sum(weights)",
        "tests/trainers/test_ppo_two_processes.py",
    ),
    Mutation(
        "critic frozen by the reference pass", "trainers/trainer.py",
        "self.critic.unfreeze(self.model)  # the reference's forward pass left only the policy trainable", "pass",
        "tests/trainers/test_ppo.py -k trainable_after_the_reference",
    ),
    Mutation(
        "recomputation with the wrong adapter", "adapters/roles.py",
        "with context():\n                return function", "if True:\n                return function",
        "tests/adapters/test_critic.py -k merged_by_hand",
    ),
    Mutation(
        "turn ratio over observations too", "objectives/segments.py",
        "inside = torch.where(turn_ids >= 0, values, values.new_zeros(()))",
        "turn_ids = turn_ids.clamp(min=0)\n    inside = values", "tests/objectives/test_segments_and_ratios.py",
    ),
    Mutation(
        "sum pooling not divided by the length", "step/batch.py",
        "spread = spread / spread_to_tokens(lengths, batch.turn_ids).clamp(min=1)", "pass",
        "tests/trainers/test_invariances.py -k poolings",
    ),
    Mutation(
        "observations trained on", "step/batch.py",
        "tool_mask=trained.long()", "tool_mask=batch.completion_mask",
        "tests/trainers/test_invariances.py -k change_nothing",
    ),
    Mutation(
        "members of a group start differently", "rollout/seeds.py",
        "environment_seed(seed, TRAINING, generation, group + offset)",
        "environment_seed(seed, TRAINING, generation, place)",
        "tests/trainers/test_invariances.py -k group_shares",
    ),
    Mutation(
        "deviation of the population instead of the sample", "objectives/advantages.py",
        "std = ((counts * (values - mean) ** 2).sum() / (total - 1)).sqrt()",
        "std = ((counts * (values - mean) ** 2).sum() / total).sqrt()", f"{ADVANTAGES} tests/trainers/test_reinforce.py",
    ),
    Mutation(
        "rows without advantage change the loss's divisor", "train_batch.py",
        "return len(self.prompt_ids) / len(whole.prompt_ids)", "return 1.0",
        "tests/trainers/test_skip_zero_advantage.py -k whole_batch",
    ),
    Mutation(
        "the critic's gradient reaches the policy below its layers", "adapters/critic.py",
        "hidden = calls[0][0][0].detach()", "hidden = calls[0][0][0]", "tests/adapters/test_critic.py -k last_layer_reads",
    ),
    Mutation(
        "the critic's layers run with the policy's adapter", "adapters/critic.py",
        "stack.enter_context(router.route(adapter))", "pass", "tests/adapters/test_critic.py -k last_layer_alone",
    ),
    Mutation(
        "a pass divides by its own tokens", "train_batch.py",
        "return float(self.counted.sum().clamp(min=1).double() / whole.counted.sum().clamp(min=1))", "return 1.0",
        "tests/trainers/test_passes.py -k one_pass",
    ),
    Mutation(
        "tokens outside of the loss enter an algorithm's own", "step/loss.py",
        "torch.where(mask, values, 0.0)", "values", f"{OWN_LOSS} -k by_hand",
    ),
    Mutation(
        "an episode without a token enters an algorithm's own loss", "step/loss.py",
        "torch.where(mask.any(dim=1), values, 0.0)", "values", f"{OWN_LOSS} -k by_hand",
    ),
    Mutation(
        "values of tokens are summed over an episode, not averaged", "step/loss.py",
        " / mask.sum(dim=1).clamp(min=1)", "", f"{OWN_LOSS}::test_grpo_as_a_loss_of_its_own_is_trls[episodes-none]",
    ),
    Mutation(
        "the tokens of all processes divide the loss of one", "step/loss.py",
        "clamp(min=1.0) / accelerator.num_processes", "clamp(min=1.0)", f"{OWN_LOSS} -k by_hand",
    ),
    Mutation(
        "an update is divided by the tokens of its whole generation batch", "step/loss.py",
        "per_process * accumulation / args.steps_per_generation", "per_process",
        f"{OWN_LOSS}::test_a_run_takes_trls_steps[two-steps-tokens]",
    ),
    Mutation(
        "a pass divides by its own episodes", "step/loss.py",
        "output.denominator, whole, args", "output.denominator, part.batch, args",
        f"{OWN_LOSS}::test_grpo_as_a_loss_of_its_own_is_trls[episodes-none]",
    ),
    Mutation(
        "accumulated micro-batches of an own loss are summed", "step/loss.py",
        "whole, args, accelerator, accumulation)\n    return total",
        "whole, args, accelerator, 1)\n    return total",
        f"{OWN_LOSS}::test_a_run_takes_trls_steps[accumulated-constant]",
    ),
    Mutation(
        "a loss over the micro-batch is split", "trainers/setup.py",
        "loss_needs=None if trainer.loss is None else trainer.loss_needs", "loss_needs=None", f"{OWN_LOSS} -k never_split",
    ),
    Mutation(
        "an own loss never sees episodes without advantage", "trainers/setup.py",
        "skips = args.skip_zero_advantage is True if", "skips = True if", f"{OWN_LOSS} -k left_out_only",
    ),
    Mutation(
        "an own loss gets no old policy", "step/loss.py",
        "log_probs.detach() if old is None else old,", "log_probs.detach(),",
        f"{OWN_LOSS}::test_dppo_is_its_definition[none]",
    ),
    Mutation(
        "metrics of episodes are merged by tokens", "step/token_batches.py",
        "part.weights.get(name, part.tokens)", "part.tokens", f"{OWN_LOSS} -k values_of_episodes",
    ),
    Mutation(
        "a micro-batch without a trained token has an entropy of 0", "step/token_batches.py",
        "if not any(part.tokens for part in passes):", "if False:",
        "tests/trainers/test_accumulation.py -k enters_no_metric",
    ),
    Mutation(
        "an update without a trained token has an entropy below the target", "trainers/trainer.py",
        "if adapted and not part.tokens and", "if False and", "tests/trainers/test_accumulation.py -k entropy_coefficient",
    ),
    Mutation(
        "a pass that ran out of memory counts twice", "step/token_batches.py",
        "parameter.grad = gradient", "pass", "tests/trainers/test_passes.py -k does_not_fit_is_made",
    ),
    Mutation(
        "the entropy bonus of a pass has the weight of its rows", "trainers/trainer.py",
        "entropy_coef * part.entropy_share / part.share", "entropy_coef",
        "tests/trainers/test_passes.py -k other_terms",
    ),
    Mutation(
        "an entropy bonus is the mean of those of the micro-batches", "step/token_batches.py",
        "if self._args.use_adaptive_entropy or", "if True or", "tests/trainers/test_invariances.py -k entropy_bonus",
    ),
    Mutation(
        "rewards around a large mean are not named as rounding", "evaluation/diagnosis.py",
        "spread <= ROUNDING * large", "spread <= ROUNDING",
        "tests/evaluation/test_diagnosis.py -k rounding",
    ),
    Mutation(
        "a moving reference is a copy of the policy", "trainers/reference.py",
        "_reference.update(args.ref_model_mixup_alpha)", "_reference.update(1.0)",
        "tests/trainers/test_reference.py -k average",
    ),
    Mutation(
        "the reference of a model changed in memory is that of its files", "trainers/reference.py",
        "            assign_parameter(parameter, value)", "            pass",
        "tests/trainers/test_reference.py -k changed_in_memory",
    ),
    Mutation(
        "a resumed run has the files of a model changed in memory as its reference", "trainers/reference.py",
        "differs |= not torch.equal(value, there)", "pass", "tests/trainers/test_reference.py -k changed_in_memory",
    ),
    Mutation(
        "a model as in its files has its reference in every checkpoint", "trainers/reference.py",
        "differs |= not torch.equal(value, there)", "differs = True", "tests/trainers/test_reference.py -k as_in_its_files",
    ),
    Mutation(
        "TRL's constructor sees a moving reference", "trainers/arguments.py",
        '("use_vllm", "sync_ref_model")', '("use_vllm",)',
        "tests/trainers/test_reference.py",
    ),
    Mutation(
        "reference follows the policy at once", "trainers/reference.py",
        "state.global_step % args.ref_model_sync_steps == 0", "True",
        "tests/trainers/test_reference.py -k so_many_steps",
    ),
    Mutation(
        "rows are packed under a router loss", "trainers/setup.py",
        "shared ones too\": auxiliary_loss", "shared ones too\": False", f"{PACKING} -k router_loss",
    ),
    Mutation(
        "the critic learns twice, in the update too", "step/critic.py",
        "        if self.learned:\n            return None\n", "", "tests/trainers/test_ppo_learned.py -k second_pass",
    ),
    Mutation(
        "the critic learns from truncated episodes that are masked", "step/critic.py",
        "self._weigh(fused.trained[rows], ", "self._weigh(own.valid_mask, ",
        "tests/trainers/test_ppo_learned.py -k second_pass",
    ),
    Mutation(
        "the critic learns while it is read in the first of two epochs alone", "step/critic.py",
        "            self.learned &= drawn  # a further pass over the batch reads the critic anew\n", "",
        "tests/trainers/test_ppo_learned.py -k used_up",
    ),
    Mutation(
        "a second update compares with the policy that it starts from", "trainers/trainer.py",
        'inputs["old_per_token_logps"] = first.log_probs', "pass", f"{FIRST_PASS} -k pass_before",
    ),
    Mutation(
        "the rows of a pass are stored in the order of the passes", "step/loss.py",
        "(batch.episodes[:, None] == self._whole.episodes).int().argmax(dim=1)", "torch.arange(len(log_probs))",
        f"{FIRST_PASS} -k find_their_place",
    ),
    Mutation(
        "a batch of several optimizer steps takes the old policy from its last", "step/batch.py",
        "return first_is_one and not is_noisy(model)", "return True", f"{FIRST_PASS} -k split_into_updates",
    ),
    Mutation(
        "a pass with dropout gives the old policy", "step/batch.py",
        "first_is_one and not is_noisy(model)", "first_is_one", f"{FIRST_PASS} -k dropout",
    ),
    Mutation(
        "a critic's pass that ran out of memory counts twice", "step/token_batches.py",
        "        undo()\n        gc.collect()", "        gc.collect()",
        "tests/trainers/test_ppo_learned.py -k do_not_fit",
    ),
    Mutation(
        "an attempt that ran out of memory draws other noise the second time", "step/token_batches.py",
        "        torch.set_rng_state(states[0])\n", "", "tests/trainers/test_out_of_memory.py -k undone",
    ),
    Mutation(
        "the backward pass of the last pass is left to the trainer", "step/token_batches.py",
        "if last and complete:", "if False:", "tests/trainers/test_out_of_memory.py -k backward",
    ),
    Mutation(
        "what observers saw in an attempt that ran out of memory counts twice", "step/token_batches.py",
        "vars(of).update(state)", "None", "tests/trainers/test_out_of_memory.py -k undone",
    ),
    Mutation(
        "the sums of an attempt that ran out of memory stay in the critic", "trainers/setup.py",
        "        critic.remember,\n", "", "tests/trainers/test_out_of_memory.py -k put_back",
    ),
    Mutation(
        "the highest difference of an attempt that ran out of memory counts", "sampling/mismatch.py",
        "self._sums, self._highest, self.is_open = before", "self._sums = before[0]",
        "tests/trainers/test_out_of_memory.py -k put_back",
    ),
    Mutation(
        "a rollout that ran out of memory is played with as many rows again", "sampling/sampler.py",
        "self.rows = rows // 2", "self.rows = rows - 1", "tests/trainers/test_out_of_memory.py -k half_of_its_rows",
    ),
    Mutation(
        "the rows of a rollout leave no room for the optimizer", "step/token_batches.py",
        "return self._free() - self._to_come(self._accelerator.unwrap_model(self._model))", "return self._free()",
        "tests/trainers/test_on_a_pretended_gpu.py -k decodes_as_many",
    ),
    Mutation(
        "a process that halved its rows goes on with them alone", "sampling/sampler.py",
        "self.rows = self._fewest(self.rows)", "pass", "tests/trainers/test_out_of_memory.py -k two_processes",
    ),
    Mutation(
        "a resumed run decodes other episodes at the same time", "trainers/setup.py",
        '"rows": parts.sampler.rows,', '"rows": None,', "tests/trainers/test_out_of_memory.py -k resumed",
    ),
    Mutation(
        "an engine's profile run reads the whole context", "rollout/generators/base.py",
        "else min(PREFILL_TOKENS, max_batch_size * max_model_length)", "else max_batch_size * max_model_length",
        "tests/test_cli_advice.py -k 8b_model",
    ),
    Mutation(
        "the tokens of a pass are chosen as if nothing came after", "step/token_batches.py",
        "_GPU_SHARE * (free - to_come)", "_GPU_SHARE * free", "tests/trainers/test_passes.py -k to_come",
    ),
    Mutation(
        "warm-up trains the policy", "step/critic.py",
        "policy_weight = 0.0 if step < args.critic_warmup_steps else 1.0", "policy_weight = 1.0",
        "tests/trainers/test_ppo.py -k warm_up",
    ),
    Mutation(
        "update trains on episodes of its own", "trainers/trainer.py",
        'self.rollouts.given(cast("list[Trajectory]", inputs))',
        "self.rollouts.play([dict(one.options) for one in inputs], 9, 9)",
        "tests/trainers/test_updates.py::test_a_loop_of_rollout_and_update_is_train[grpo-rows]",
    ),
    Mutation(
        "a resumed run by hand begins a new generation batch", "trainers/manual_loop.py",
        "        if done:\n            rows = next", "        if False:\n            rows = next",
        "tests/trainers/test_updates.py -k resumed",
    ),
    Mutation(
        "update takes torn groups", "trainers/manual_loop.py",
        "if len(set(group)) > 1", "if len(set(group)) > members", "tests/trainers/test_updates.py -k refused",
    ),
    Mutation(
        "workers that persist draw their seed from the generator that shuffles", "trainers/trainer.py",
        "if self.args.dataloader_persistent_workers:", "if False:", "tests/trainers/test_resume.py -k persist",
    ),
    Mutation(
        "fp16 of the launch is taken on CPU", "config/rules.py",
        'args.mixed_precision != "fp16" or args.device', 'not args.fp16 or args.device',
        "tests/trainers/test_bad_input.py -k launch",
    ),
    Mutation(
        "settings of accelerate's that tear batches of rows are taken", "config/rules.py",
        "not any(getattr(value, key, None) for key in _NOT_OF_ROWS)", "True",
        "tests/trainers/test_bad_input.py -k after_steps",
    ),
    Mutation(
        "rows come in any order", "config/rules.py",
        "value or args.dataloader_num_workers < 2", "True", "tests/trainers/test_bad_input.py -k after_steps",
    ),
    Mutation(
        "a text for a boolean is True", "config/rules.py",
        "    **dict.fromkeys((bool, bool | None), bool),\n", "", "tests/trainers/test_config_rules.py -k boolean",
    ),
    Mutation(
        "a number is infinite", "config/rules.py",
        "return bool(-inf < value < inf)", "return bool(-inf <= value <= inf)",
        "tests/trainers/test_config_rules.py -k finite",
    ),
    Mutation(
        "NaN is a bound", "config/rules.py",
        "(value == inf and name in _MAY_BE_INFINITE)", "(name in _MAY_BE_INFINITE)",
        "tests/trainers/test_config_rules.py -k finite",
    ),
    Mutation(
        "a text for a boolean argument of an environment is True", "envs/base.py",
        "if isinstance(value, str) and name in signature.parameters", "if False and name in signature.parameters",
        "tests/envs/test_env_registry.py -k boolean",
    ),
    Mutation(
        "a text for a boolean of a chat template is True", "envs/base.py",
        'value.lower() in ("true", "false")', 'value in ("true", "false")',
        "tests/trainers/test_bad_input.py -k would_ignore",
    ),
    Mutation(
        "an adapter's pattern has a scale of NaN", "adapters/lora_settings.py",
        "or not 0 < float(alpha) < math.inf", "or alpha == 0", "tests/trainers/test_bad_input.py -k would_ignore",
    ),
    Mutation(
        "an adapter that acts from a token on is trained", "adapters/lora_settings.py",
        "    check_one_policy(config)\n    init", "    init", "tests/trainers/test_bad_input.py -k would_ignore",
    ),
    Mutation(
        "an adapter that acts from a token on is loaded", "adapters/loading.py",
        "    check_one_policy(config, str(folder / CONFIG))\n", "", "tests/adapters/test_strangers.py -k hostile_conf",
    ),
    Mutation(
        "conversations are cut at separators of lines in their texts", "trainers/demonstrations.py",
        '.split("\\n")', ".splitlines()", "tests/trainers/test_demonstrations.py -k conversations_are_replayed",
    ),
    Mutation(
        "an interrupt before the call is passed over", "rollout/environment_pool.py",
        "        self._inline = call if inline else None  #", "        self._inline = None  #",
        "tests/rollout/test_silent_environments.py -k just_before",
    ),
    Mutation(
        "updates that are rounded away are not told", "trainers/setup.py",
        "if lost > total / 2:", "if lost > total:", "tests/trainers/test_bad_input.py -k round_away",
    ),
    Mutation(
        "the loss that a subclass changes is not what is trained", "trainers/trainer.py",
        "together=self._changes_loss", "together=False", "tests/trainers/test_passes.py -k user_code",
    ),
    Mutation(
        "layers that the model lacks are passed over", "adapters/lora_settings.py",
        "if number not in known:", "if False:", "tests/trainers/test_bad_input.py -k would_ignore",
    ),
    Mutation(
        "a quoted no merges adapters", "cli/chain/stages.py",
        'getattr(stage.config, "merge_lora_configs", False)', 'stage.options.get("merge_lora_configs")',
        "tests/test_cli_chain.py -k booleans_as",
    ),
    Mutation(
        "an option at its default is rejected too", "config/rules.py",
        "if rule.when_set and value ==", "if False and value ==",
        "tests/trainers/test_config_rules.py -k default",
    ),
    Mutation(
        "an option that another one switches on is taken without it", "config/rules.py",
        "lambda args, _: _holds(args, other, accepted),", "lambda args, _: True,",
        "tests/trainers/test_idle_options.py -k switches_on",
    ),
    Mutation(
        "options that exclude each other are taken together", "config/rules.py",
        "lambda args, _: not _holds(args, other, clashing),", "lambda args, _: True,",
        "tests/trainers/test_passes.py -k refused_with",
    ),
    Mutation(
        "an episode of no turns", "rollout/episode_options.py",
        "(whole and value >= 1)", "(whole and value >= 0)", "tests/trainers/test_bad_input.py -k out_of_range",
    ),
    Mutation(
        "an algorithm's own rules for values are not read", "config/multi_turn.py",
        "(*VALUES, *self.value_rules)", "VALUES", "tests/trainers/test_config_rules.py -k no_other",
    ),
    Mutation(
        "an update does not move the stream of rows", "trainers/manual_loop.py",
        "        self._peek()  # advance", "        pass  # the stream",
        "tests/trainers/test_updates.py::test_a_loop_of_rollout_and_update_is_train[grpo]",
    ),
    Mutation(
        "every update is of the first rows", "trainers/manual_loop.py",
        "        self._pending = None\n        return", "        return",
        "tests/trainers/test_updates.py::test_a_loop_of_rollout_and_update_is_train[grpo-rows]",
    ),
    Mutation(
        "a dataset row is dropped where reset has no place for it", "envs/base.py",
        "if options is None and not reads_rows", "if not reads_rows",
        "tests/rollout/test_processes.py -k left_out",
    ),
    Mutation(
        "the checker compares an instance with itself", "envs/checker.py",
        "_compare(first, second, seed, report)", "_compare(first, first, seed, report)",
        "tests/envs/test_env_checker.py -k different",
    ),
    Mutation(
        "a game goes on after its last turn", "envs/task.py",
        "self.turns == self.max_turns", "self.turns > self.max_turns", "tests/envs/test_task_episodes.py",
    ),
    Mutation(
        "a seed does not decide what a game starts from", "envs/task.py",
        "if seed is None else seed % count", "if seed is None else 0", "tests/envs/test_task_episodes.py",
    ),
    Mutation(
        "a letter is marked more often than the word holds it", "../environments/wordle/__init__.py",
        "left[a] -= 1", "left[a] -= 0", "tests/envs/test_wordle.py -k marks",
    ),
    Mutation(
        "a merged adapter keeps the old scaling's B", "adapters/lora_settings.py",
        "scaled = weight.to(torch.float64) * scalings[module]", "scaled = weight.to(torch.float64)",
        "tests/adapters/test_merge.py -k same_function",
    ),
    Mutation(
        "an adapter is extended with an initialization that changes the policy", "adapters/lora_settings.py",
        "if wanted.init_lora_weights not in _EXTENDS:", "if False:", "tests/adapters/test_merge.py -k initialization",
    ),
    Mutation(
        "new columns of B are not zero", "adapters/lora_settings.py",
        "new.zero_()", "new.fill_(0.01)", "tests/adapters/test_merge.py -k same_function",
    ),
    Mutation(
        "rows of embeddings that an adapter's file lacks are drawn at random", "adapters/loading.py",
        "shape == [rows, base.get_input_embeddings().embedding_dim] for", "True for",
        "tests/adapters/test_added_tokens.py -k lacks",
    ),
    Mutation(
        "a weight that is missing goes unnoticed", "adapters/loading.py",
        "missing = [n for n in result.missing_keys if", "missing = [n for n in () if",
        "tests/trainers/test_warm_start.py -k says_so",
    ),
    Mutation(
        "the kept reference is the policy's copy after all", "trainers/reference.py",
        "if saved is not None and args.keep_reference:", "if False:", "tests/trainers/test_warm_start.py -k kept",
    ),
    Mutation(
        "the reference lacks the policy's embeddings", "trainers/reference.py",
        "copy_adapter(model, POLICY, REFERENCE)  # TRL", "pass  # TRL",
        "tests/trainers/test_warm_start.py -k embeddings",
    ),
    Mutation(
        "packed nodes see the branches beside them", "packing/trie.py",
        "cuts.append([start + max(kept, 0), stop, size])", "cuts.append([start + max(kept, 0), stop, size + 1])",
        TRIE,
    ),
    Mutation(
        "packed positions count nodes instead of depth", "packing/trie.py",
        "depths.append(np.arange(common, len(row)))", "depths.append(own)", TRIE,
    ),
    Mutation(
        "packed tokens are scored at their own node", "packing/forward.py",
        "torch.stack([trie.nodes.view(-1)[rows.before], rows.tokens], dim=1)",
        "torch.stack([trie.nodes.view(-1)[rows.before + 1].clamp(min=0), rows.tokens], dim=1)",
        f"{PACKED_FORWARD} -k padded_rows",
    ),
    Mutation(
        "padded rows are scored one token late", "packing/forward.py",
        "read=rows.before, **inputs)", "read=rows.before + 1, **inputs)",
        f"{PACKED_FORWARD} -k padded_rows",
    ),
    Mutation(
        "decoding folds each query head into another group", "rollout/generators/transformers/generator.py",
        "query.unflatten(1, (key.size(1), -1)).squeeze(3)",
        "query.unflatten(1, (-1, key.size(1))).squeeze(3).transpose(1, 2)", f"{DECODING} -k equals_transformers",
    ),
    Mutation(
        "decoding reads the padding", "rollout/generators/transformers/generator.py",
        "attn_mask=attention_mask, scale=scaling)", "attn_mask=None, scale=scaling)", f"{DECODING} -k own_attention",
    ),
    Mutation(
        "decoding asks the device whether a mask is needed", "rollout/generators/transformers/generator.py",
        '"allow_is_causal_skip": False', '"allow_is_causal_skip": True', f"{DECODING} -k waits",
    ),
    Mutation(
        "an error in a pass leaves the attention of decoding", "rollout/generators/transformers/generator.py",
        """    finally:
        for config in configs:
            config._attn_implementation = "sdpa\"""",
        """    except KeyError:
        for config in configs:
            config._attn_implementation = "sdpa\"""", f"{DECODING} -k error_in_a_pass",
    ),
    Mutation(
        "under autocast every token casts the keys of the cache", "rollout/generators/transformers/kv_cache.py",
        "if states.dtype == torch.float32 and torch.is_autocast_enabled(device):", "if states.is_complex():",
        f"{DECODING} -k no_copy",
    ),
    Mutation(
        "more lineages keep a cache than are decoded at once", "rollout/generators/transformers/generator.py",
        "max(len(active), len(cached) - len(gone))", "len(active)",
        "tests/rollout/test_generators.py -k max_batch_size",
    ),
    Mutation(
        "a lineage that makes room keeps its cache", "rollout/generators/transformers/generator.py",
        "self._lineages[lineage.episode].remove(lineage)", "pass",
        "tests/rollout/test_generators.py -k take_the_room",
    ),
    Mutation(
        "a cropped row keeps its last tokens", "rollout/generators/transformers/kv_cache.py",
        "dropped = mask.sum(dim=1) - counts", "dropped = 0 * counts",
        f"{LINEAGES} -k cropped",
    ),
    Mutation(
        "a lineage that is decoded is cropped", "rollout/generators/transformers/generator.py",
        "elif not source.busy and (2 * shared", "elif (2 * shared",
        f"{LINEAGES} -k decoded",
    ),
    Mutation(
        "a request whose ids are all cached reads none", "rollout/generators/transformers/generator.py",
        "kept.cached, len(ids) - 1)", "kept.cached, len(ids))",
        f"{LINEAGES} -k cropped",
    ),
    Mutation(
        "ids count as cached whose keys were dropped", "rollout/generators/transformers/generator.py",
        "own), kept.cached, len(ids) - 1)", "own), len(ids) - 1)",
        f"{LINEAGES} -k cropped",
    ),
    Mutation(
        "a copy takes what its request does not share", "rollout/generators/transformers/generator.py",
        "source.kv, source.row, shared[source]))", "source.kv, source.row, source.cached))",
        f"{LINEAGES} -k copied",
    ),
    Mutation(
        "lineages of an episode are kept without end", "rollout/generators/transformers/generator.py",
        "self._forget(idle[: -KEPT if self._keeps_cache else None])", "self._forget([])",
        f"{LINEAGES} -k least_recently",
    ),
    Mutation(
        "copies are more than the rows that are set", "rollout/generators/transformers/generator.py",
        "len(self._with_cache()) < self._max_batch_size", "len(self._with_cache()) <= self._max_batch_size",
        f"{LINEAGES} -k random_programs",
    ),
    Mutation(
        "requests wait for lineages that nobody asks for", "rollout/generators/transformers/generator.py",
        "gone = [*stepping, *reversed(spare)][-missing:]", "gone = stepping[-missing:]",
        f"{LINEAGES} -k spare",
    ),
    Mutation(
        "rows that are decoded move out of their batch", "rollout/generators/transformers/generator.py",
        "if self._batch is not None and any(answer.lineage.kv is kv",
        "if self._batch is None and any(answer.lineage.kv is kv",
        f"{LINEAGES} -k random_programs",
    ),
    Mutation(
        "an answer is taken for that of a later request", "rollout/generators/base.py",
        "if last is request:", "if last:",
        "tests/rollout/test_generators.py -k told_apart",
    ),
    Mutation(
        "ids that are cached count as read", "rollout/generators/transformers/generator.py",
        "read=len(lineage.ids) - lineage.cached)", "read=len(lineage.ids))",
        f"{LINEAGES} -k model_too",
    ),
    Mutation(
        "uniforms are copied from pageable memory", "rollout/generators/transformers/generator.py",
        "noise = placed(uniforms, torch.float64, device)",
        "noise = torch.tensor(uniforms, dtype=torch.float64, device=device)", f"{DECODING} -k waits",
    ),
    Mutation(
        "a packed pass is recomputed without its plan", "packing/attention.py",
        "partial(self.using, _plan)", "lambda: self.using(_plan)", f"{PACKED_FORWARD} -k recomputes",
    ),
    Mutation(
        "descendants' gradients of keys are lost", "packing/attention.py",
        "sums[:, :, own] += summed", "pass", PACKED_ATTENTION,
    ),
    Mutation(
        "FlexAttention skips a block that some node sees", "packing/attention.py",
        "seen = (furthest[None, :] > first[:, None])", "seen = (nearest[None, :] > first[:, None])", PACKED_ATTENTION,
    ),
    Mutation(
        "FlexAttention of all models shares a limit of graphs", "packing/attention.py",
        "return torch.compile(own,", "return torch.compile(attend,", "tests/packing/test_flex_attention.py -k pattern",
    ),
    Mutation(
        "FlexAttention computes full scores beyond the limit", "packing/attention.py",
        "dynamic=True, fullgraph=True", "dynamic=True", "tests/packing/test_flex_attention.py -k limit_is",
    ),
    Mutation(
        "FlexAttention's backward pass reads the forward pass's blocks", "packing/attention.py",
        "*_listed(partial.T, device),", "*_listed(partial, device),", f"{PACKED_ATTENTION} -k flex_attentions_mask",
    ),
    Mutation(
        "values of packed rows are read at the tokens' columns", "packing/forward.py",
        "trie.nodes.view(-1)[cells].clamp(min=0).view(1, -1)",
        "(cells % mask.size(1)).clamp(max=trie.size - 1).view(1, -1)", f"{PACKING} -k ppo",
    ),
    Mutation(
        "a resumed run forgets what it found out about packing", "trainers/setup.py",
        'parts.packer.state = PackingState(**states.get("packing", {}))', "pass", f"{PACKING} -k killed",
    ),
    Mutation(
        "packed rows that differ are used", "packing/packer.py",
        "if worst <= self._bound:", "if worst >= 0:", f"{PACKING} -k differ",
    ),
    Mutation(
        "a resumed run loses the rest of its generation batch", "checkpoints/record.py",
        "return RolloutState(steps, micro_batches,", 'return RolloutState(state["generation"] * self._every, None,',
        "tests/trainers/test_checkpoint.py::test_killed_at_every_step[ppo]",
    ),
    Mutation(
        "a resumed run reads the first epoch's rows again", "checkpoints/record.py",
        "range(self.epochs_done)", "range(0)", "tests/trainers/test_checkpoint.py::test_killed_at_every_step[reinforce]",
    ),
    Mutation(
        "a checkpoint is built where the whole ones are", "checkpoints/record.py",
        "self.building = building.parent", "building = folder",
        "tests/trainers/test_checkpoint.py -k while_saving",
    ),
    Mutation(
        "a changed file is not noticed", "checkpoints/integrity.py",
        "if found != expected:", "if found['size'] != expected['size']:",
        "tests/trainers/test_checkpoint.py -k damaged",
    ),
    Mutation(
        "the Hub token is pickled beside the model", "config/multi_turn.py",
        "for name in hidden} | {\"withheld\": hidden}", "for name in ()}",
        "tests/trainers/test_hub.py -k token",
    ),
    Mutation(
        "fused LoRA without its scaling", "adapters/fused.py",
        "alpha=self.scaling[name]", "alpha=1.0", "tests/adapters/test_fused.py",
    ),
    Mutation(
        "fused LoRA although the adapter is off", "adapters/fused.py",
        "if self.disable_adapters or self.merged", "if self.merged", "tests/adapters/test_fused.py",
    ),
    Mutation(
        "no gradient through packed 4-bit weights", "trainers/setup.py",
        "module.support_avx512bf16_for_cpu = False", "pass", "tests/trainers/test_quantized.py -k flow",
    ),
    Mutation(
        "a resumed adapter of a quantized base goes on in fp32", "trainers/trainer.py",
        "parameter.data.to(dtypes.get(name, parameter.dtype))", "parameter.data", "tests/trainers/test_quantized.py",
    ),
    Mutation(
        "a rollout on the compiled model", "sampling/sampler.py",
        "keep_torch_compile=False", "keep_torch_compile=True",
        "tests/trainers/test_training_options.py -k not_compiled",
    ),
    Mutation(
        "another engine than the launch configuration names", "config/launch_checks.py",
        "and engine != expected:", "and not expected:", "tests/trainers/test_launch_checks.py",
    ),
    Mutation(
        "each process trains by itself", "config/launch_checks.py",
        "if started != accelerator.num_processes:", "if not started:", "tests/trainers/test_launch_checks.py",
    ),
    Mutation(
        "what an environment answered ends the run", "rollout/stepped.py",
        "    except BaseException as error:\n        pass_on_interrupt(error)\n        _fail",
        "    except ValueError as error:\n        pass_on_interrupt(error)\n        _fail",
        "tests/rollout/test_misbehaving.py -k inline",
    ),
    Mutation(
        "a fork is asked for as if it went on", "rollout/stepped.py",
        "extends=episode.asked.fork is None", "extends=True", "tests/rollout/test_history.py",
    ),
    Mutation(
        "the context's limit is that of all paths", "rollout/stepped.py",
        "return self.limits.max_model_length - len(self.paths[-1])",
        "return self.limits.max_model_length - sum(map(len, self.paths))", "tests/rollout/test_history.py",
    ),
    Mutation(
        "the environment gets the answer to a question", "rollout/stepped.py",
        "        if not question:\n", "        if True:\n", "tests/rollout/test_history.py",
    ),
    Mutation(
        "a context with an edited answer goes on by ids", "rollout/stepped.py",
        "said = messages[end:] if messages[:end] == known[:end] else []", "said = messages[end:]",
        "tests/rollout/test_history.py",
    ),
    Mutation(
        "a template's rewrites are not looked for", "rollout/stepped.py",
        "if not self.chat.goes_on(", "if False and not self.chat.goes_on(", "tests/rollout/test_template_forks.py",
    ),
    Mutation(
        "a rewritten context that does not fit is called full", "rollout/stepped.py",
        "episode.stop_reason = StopReason.REWRITE_FULL if fork is Fork.CONTEXT else StopReason.CONTEXT_FULL",
        "episode.stop_reason = StopReason.CONTEXT_FULL", "tests/rollout/test_history.py",
    ),
    Mutation(
        "a turn does not say what it was shown", "rollout/stepped.py",
        "episode.ask(None if unchanged and fork is None else messages, fork, question)",
        "episode.ask(None, fork, question)", "tests/rollout/test_history.py",
    ),
    Mutation(
        "an answer that is rendered again may end a turn", "rollout/chat/renderer.py",
        "self._escaper.hide(messages, self._foreign if sampled else ())", "self._escaper.hide(messages)",
        "tests/rollout/test_template_forks.py",
    ),
    Mutation(
        "a function may change the episode's messages", "envs/context.py",
        "super().__init__(deepcopy(list(messages)))", "super().__init__(messages)",
        "tests/rollout/test_history.py",
    ),
    Mutation(
        "a summary replaces the observation", "envs/context.py",
        "{text_of(summary)}\\n\\n{text}", "{text_of(summary)}", "tests/rollout/test_history.py",
    ),
    Mutation(
        "old tool results stay", "envs/tools/environment.py",
        "if keep_results is not None:", "if keep_results is None:", "tests/envs/test_tools.py",
    ),
    Mutation(
        "an episode that nothing rewards counts as 0", "step/play.py",
        "self._rewards.totals(rewards)[own].isnan()", "self._rewards.totals(rewards)[own].isinf()",
        "tests/trainers/test_moved_from_trl.py",
    ),
    Mutation(
        "TRL's get_reward without a reward counts as 0", "envs/libraries/trl_tools.py",
        "self.rewarded = bool(given)", "self.rewarded = True", "tests/trainers/test_moved_from_trl.py",
    ),
    Mutation(
        "an environment's own info takes its reward", "envs/libraries/trl_tools.py",
        'UNREWARDED = "agile_trainers.unrewarded"', 'UNREWARDED = "rewarded"',
        "tests/trainers/test_reward_functions.py -k takes_its_reward",
    ),
    Mutation(
        "any call in an environment's info is an agent's", "types.py",
        'isinstance(call, Mapping) and {"number", "request"} <= call.keys()', "isinstance(call, Mapping)",
        "tests/rollout/test_collate.py -k ran_out",
    ),
    Mutation(
        "a set in a factory is another one in each process", "records/plain.py",
        "items = sorted(stable_text(item, inside) for item in value)",
        "items = [stable_text(item, inside) for item in value]", "tests/trainers/test_resume.py -k moved_line",
    ),
    Mutation(
        "numbers of a set are sorted as texts", "records/plain.py",
        "if all(isinstance(item, (int, float)) for item in value):", "if False:",
        "tests/trainers/test_resume.py -k moved_line",
    ),
    Mutation(
        "a set in any object is another one in each process", "records/plain.py",
        'held = [*getattr(value, "__dict__", {}).values(), ', "held = [", "tests/trainers/test_resume.py -k moved_line",
    ),
    Mutation(
        "a factory whose line moved is another one", "records/plain.py",
        "if isinstance(value, CodeType):", "if False:", "tests/trainers/test_resume.py -k moved_line",
    ),
    Mutation(
        "what holds a set is another one in each process", "records/plain.py",
        "text = text.replace(before, stable_text(shown[before], inside))", "pass",
        "tests/trainers/test_resume.py -k moved_line",
    ),
    Mutation(
        "a close without an answer is waited for without a limit", "rollout/environment_pool.py",
        "limit = SILENT_SECONDS if self.timeout is None else self.timeout", "limit = 20.0",
        "tests/rollout/test_stepping.py -k has_a_limit_too",
    ),
    Mutation(
        "an inline close without an answer is waited for forever", "rollout/environment_pool.py",
        "= signal.setitimer(signal.ITIMER_REAL, seconds)", "= signal.setitimer(signal.ITIMER_REAL, 3600.0)",
        "tests/rollout/test_stepping.py -k has_a_limit_too",
    ),
    Mutation(
        "a data set that draws from sets has other questions in each process", "envs/isolation/levels.py",
        'interpreter, "-s", "-P", "-S"', 'interpreter, "-I", "-S"',
        "tests/envs/test_reasoning_gym.py -k one_hash_seed",
    ),
    Mutation(
        "items of data sets that draw from sets are made in this process", "envs/libraries/reasoning_gym.py",
        "if self.name in HASHED:", "if False:", "tests/envs/test_reasoning_gym.py -k one_hash_seed",
    ),
    Mutation(
        "a seat that verifiers does not train is trained", "envs/libraries/verifiers.py",
        "if not trace.agent.trainable and trace", "if trace.agent.trainable is None and trace",
        "tests/envs/test_verifiers.py",
    ),
    Mutation(
        "a limit that a harness meets loses the episode", "envs/libraries/verifiers.py",
        "if not refused_by_limit(error.message)", "if refused_by_limit(error.message)",
        "tests/envs/test_verifiers.py",
    ),
    Mutation(
        "the rewards of several traces of verifiers add up", "envs/libraries/verifiers.py",
        '"reward": fmean(trace.reward for trace in traces)', '"reward": sum(trace.reward for trace in traces)',
        "tests/envs/test_verifiers.py",
    ),
    Mutation(
        "old results of TRL's tools stay", "envs/libraries/trl_tools.py",
        "self.context = dropping_results(keep_results)", "self.context_ = dropping_results(keep_results)",
        "tests/envs/test_trl_tools.py",
    ),
    Mutation(
        "an environment's own context is not asked for", "rollout/stepped.py",
        "history is full or (history is None and not self.pool.rewrites(episode.key))", "history is full or history is None",
        "tests/rollout/test_history.py",
    ),
    Mutation(
        "questions keep episodes comparable by turn", "rollout/stepped.py",
        '"linear": not any(turn.question for turn in self.turns),', '"linear": True,', "tests/rollout/test_history.py",
    ),
    Mutation(
        "a path is asked about by the roles of the first prompt", "rollout/stepped.py",
        "for message in episode.begun]", "for message in episode.prompt]",
        "tests/rollout/test_template_forks.py -k roles_make",
    ),
    Mutation(
        "a question stays in the prompt that a function gets", "rollout/stepped.py",
        "Context(episode.context, episode.first, tokens", "Context(episode.context, episode.prompt or episode.first, tokens",
        "tests/rollout/test_history.py -k at_the_first_prompt",
    ),
    Mutation(
        "a function that failed has no name", "rollout/stepped.py",
        "with _costs(episode, name):", "with _costs(episode):", "tests/rollout/test_history.py -k hostile",
    ),
    Mutation(
        "messages without text are no work", "rollout/stepped.py",
        "sum(len(text_of(one)) + 1 for one in messages)", "sum(len(text_of(one)) for one in messages)",
        "tests/rollout/test_history.py -k many_empty",
    ),
    Mutation(
        "answers that are written again may forge turns without a template", "rollout/chat/renderer.py",
        "of_answers=self._foreign if sampled else ())", "of_answers=())",
        "tests/rollout/test_history.py -k begin_and_end_nothing",
    ),
    Mutation(
        "parts of text need a processor", "envs/images.py", 'return found if any(part["type"] == "image" for part in found)',
        "return found if found", f"{IMAGE_ENVIRONMENTS} -k beside",
    ),
    Mutation(
        "what a message holds is the environment's own", "envs/checker.py",
        "    if len(texts) == len(message):\n", "    return dict(message)\n    if len(texts) == len(message):\n",
        "tests/rollout/test_history.py -k nested_values",
    ),
    Mutation(
        "a list with a lock in it stays the environment's own", "envs/checker.py",
        "        elif stored is list:\n", "        elif False:\n", "tests/rollout/test_engine.py -k keeps_of",
    ),
    Mutation(
        "what an info holds is the environment's own", "envs/checker.py",
        "    if kind in _IMMUTABLE:\n", "    if True:\n", "tests/rollout/test_engine.py -k keeps_of",
    ),
    Mutation(
        "an environment may repeat the model's answers", "envs/checker.py",
        'and any(message["role"] == "assistant" for', "and any(False for", "tests/envs/test_env_checker.py -k bad_steps",
    ),
    Mutation(
        "clipped tokens are a finding while the policy learns", "evaluation/diagnosis.py",
        '2 * BATCHES) or history.rose("success")', '2 * BATCHES) or False', "tests/evaluation/test_diagnosis.py -k planted",
    ),
    Mutation(
        "a card samples as the base model's files say", "checkpoints/model_card.py",
        'if "temperature" in options:', "if False:", "tests/trainers/test_hub.py -k lines_of_a_card",
    ),
    Mutation(
        "a reference that a model holds stays", "trainers/arguments.py",
        "        source.delete_adapter(REFERENCE)\n", "", "tests/trainers/test_reference.py -k holds_already",
    ),
    Mutation(
        "a chain compares numbers as texts", "cli/chain/command.py",
        "            return float(value)\n", "            return value\n", "tests/test_cli_chain.py -k however",
    ),
    Mutation(
        "a chain compares texts as numbers", "cli/chain/command.py",
        "isinstance(parsed, (int, float)) and not math.isnan(parsed)", "True", "tests/test_cli_chain.py -k however",
    ),
    Mutation(
        "a function is believed to take messages", "envs/context.py",
        "if (error := call_error(found, [])) is not None:", "if (error := None) is not None:",
        "tests/rollout/test_history.py -k cannot_rewrite",
    ),
    Mutation(
        "a summary is asked for beyond the context", "rollout/episode_options.py",
        "history.tokens >= room", "history.tokens >= 2 * room", "tests/rollout/test_history.py -k never_asked",
    ),
    Mutation(
        "a context is first asked for in the run", "rollout/environment_probe.py",
        "if with_context and pool.rewrites(0):", "if False:", "tests/rollout/test_history.py -k known_before_a_run",
    ),
    Mutation(
        "a history asks the environment's own context too", "rollout/environment_probe.py",
        "if with_context and pool.rewrites(0):", "if pool.rewrites(0):",
        "tests/rollout/test_history.py -k known_before_a_run",
    ),
    Mutation(
        "questions count as turns that rewrite nothing", "evaluation/diagnosis.py",
        "later = turns * (1 - asked) - 1", "later = turns - 1", DIAGNOSIS,
    ),
    Mutation(
        "two turns are every turn", "evaluation/diagnosis.py", "if later < 2 or", "if later <= 0 or", DIAGNOSIS,
    ),
    Mutation(
        "what rewritten contexts cost counts shared tokens twice", "cli/check/sections.py",
        "computed = fmean(episode.num_tokens for episode in played)",
        "computed = fmean(sum(map(len, episode.paths or [[]])) for episode in played)",
        "tests/test_cli_check.py -k what_rewritten_contexts_cost",
    ),
    Mutation(
        "success is read from a question", "types.py",
        "for turn in reversed(self.turns) if not turn.question", "for turn in reversed(self.turns)",
        "tests/rollout/test_history.py",
    ),
    Mutation(
        "a tied head is cast, and the embedding with it", "adapters/fused.py",
        "and module.weight.data_ptr() not in embeddings", "and True", "tests/adapters/test_rollout_weights.py",
    ),
    Mutation(
        "cast weights stay after a rollout", "adapters/fused.py",
        "            setattr(module, name, parameter)", "            pass", "tests/adapters/test_rollout_weights.py",
    ),
    Mutation(
        "vLLM's cache gets the bytes of its activations", "rollout/generators/base.py",
        "room = memory - weights - ENGINE_BYTES", "room = memory - weights", "tests/test_cli_advice.py -k longest",
    ),
    Mutation(
        "idle threads outlive their pool", "rollout/environment_pool.py",
        "weakref.finalize(self, _end_threads, self._idle).atexit = False", "pass",
        "tests/trainers/test_closing.py -k of_a_pool",
    ),
    Mutation(
        "the event loop's thread keeps the loop", "rollout/environment_pool.py",
        "target=_serve_loop, args=(self._loop, stopped),", "target=lambda: _serve_loop(self._loop, stopped),",
        "tests/trainers/test_closing.py -k of_a_pool",
    ),
    Mutation(
        "a coroutine that has not begun when the loop ends never does", "rollout/environment_pool.py",
        "loop.run_until_complete(asyncio.sleep(0))", "pass", "tests/rollout/test_stepping.py -k as_the_pool",
    ),
    Mutation(
        "an evaluation before training is outside autocast", "sampling/sampler.py",
        "with accelerator.autocast(), cast_once(", "with cast_once(", "tests/trainers/test_evaluation.py -k bf16",
    ),
    Mutation(
        "a factory may return an instance that plays", "rollout/environment_pool.py",
        "if any(made is other for", "if any(False for", "tests/trainers/test_bad_input.py -k same_instance",
    ),
    Mutation(
        "a batch is trained on with options that it was not made for", "checkpoints/record.py",
        "        if options.early:\n", "        if False:\n", "tests/trainers/test_resume.py -k lacks",
    ),
    Mutation(
        "reward functions of one name share a metric", "step/reward.py",
        "        if name in before:\n", "        if False:\n", "tests/trainers/test_reward_functions.py -k equal_names",
    ),
    Mutation(
        "a model without trainable parameters is trained", "trainers/setup.py",
        "if not any(parameter.requires_grad for", "if not any(True for", "tests/trainers/test_bad_input.py -k shows_at",
    ),
    Mutation(
        "an optimizer of other parameters trains nothing", "trainers/setup.py",
        "if len(missing) == len(trained):", "if len(missing) > len(trained):",
        "tests/trainers/test_bad_input.py -k optimizer_of_other",
    ),
    Mutation(
        "a wrong range of returns shows at the first evaluation", "trainers/setup.py",
        "pool.return_range(name)  #", "pass  #", "tests/trainers/test_bad_input.py -k shows_at",
    ),
    Mutation(
        "eval knows limits by the names of a run", "evaluation/policy.py",
        "ids.get(name, name)", "name", "tests/test_cli_eval.py -k those_of_training",
    ),
    Mutation(
        "eval plays without the histories of several environments", "cli/eval/command.py",
        'for option in ("environment_limits", "history"):  #', 'for option in ("environment_limits",):  #',
        "tests/test_cli_eval.py -k those_of_training",
    ),
    Mutation(
        "a judge reads calls on the side as one conversation", "judges/questions.py",
        'anew = turn.messages if turn.call else None', "anew = None", "tests/judges/test_judges.py -k own_prompt",
    ),
    Mutation(
        "a judge reads again what an earlier conversation began with", "judges/questions.py",
        "shown = shown[shared:]", "pass", f"{JUDGES} -k omitted",
    ),
    Mutation(
        "a judge reads no tool calls of messages", "judges/questions.py",
        'if (calls := message.get("tool_calls"))', "if (calls := ())", f"{JUDGES} -k tool_calls",
    ),
    Mutation(
        "an answer in JSON is a tool call", "envs/tools/toolbox.py",
        "if not (calls or tagged or", "if not (True or", "tests/envs/test_tools.py -k formats",
    ),
    Mutation(
        "a judge reads a rewritten context as another conversation", "judges/questions.py",
        'anew = turn.messages if turn.call else None', "anew = turn.messages",
        "tests/judges/test_judges.py -k own_prompt",
    ),
    Mutation(
        "a rubric that exits ends the program", "judges/judge.py",
        'with exits_reported("The function `rubric` of a judge"):', "if True:", "tests/judges/test_judges.py -k exits",
    ),
    Mutation(
        "a result of the role tool closes its tag", "envs/tools/toolbox.py",
        "as_content(_escaped(result))} for", "result} for", "tests/envs/test_tools.py -k forge",
    ),
    Mutation(
        "answers of searches are not read from their marks", "envs/tools/search.py",
        "_comparable(read_answer(completion))", "_comparable(completion)", "tests/envs/test_search.py -k squad",
    ),
    Mutation(
        "an instance in a process has no range", "rollout/process_environment.py",
        "        if not self._known:\n", "        if False:\n", "tests/evaluation/test_counted.py -k in_a_process",
    ),
    Mutation(
        "all images are one in the start of an episode", "types.py",
        'return f"image:{self.digest}"', 'return "image"', "tests/evaluation/test_comparison.py -k images",
    ),
    Mutation(
        "starts with other images are the same game", "evaluation/results.py",
        "prompt=content_digest(keyed(trajectory.prompt_ids, pictures[0]), seed)",
        "prompt=content_digest(trajectory.prompt_ids, seed)", "tests/evaluation/test_comparison.py -k images",
    ),
    Mutation(
        "episodes with other images are played alike", "evaluation/results.py",
        "*(trajectory.paths or ()), *shown]", "*(trajectory.paths or ())]", "tests/evaluation/test_comparison.py -k images",
    ),
    Mutation(
        "a metric of an environment with a short name is taken for a typo", "trainers/evaluation.py",
        'if any(name.startswith(f"{one}{environment}_") for one in sets for environment in environments):',
        "if False:",
        "tests/trainers/test_evaluation.py -k metric_is_chosen",
    ),
    Mutation(
        "a scripted policy's limit ends unrewarded", "envs/scripted_policies.py",
        "episode.rewards[-1] += validate_end(", 'episode.info["ended"] = validate_end(', "tests/envs/test_env_checker.py",
    ),
    Mutation(
        "the loss of one's own gets advantages of ratios", "config/rules.py",
        'args.importance_sampling_level = "token"', "pass", "tests/trainers/test_own_loss.py -k credit_rule",
    ),
    Mutation(
        "successes take places by totals", "step/play.py",
        "played.judged.zero.tolist()\n        taken", "[True] * len(played.judged.zero)\n        taken",
        "tests/trainers/test_successes.py -k which_groups",
    ),
    Mutation(
        "tasks of batches ahead are not counted", "step/play.py",
        "if not (self._limit or self.tasks.adaptive or self._args.task_column):",
        "if self.ahead is not None or not (self._limit or self.tasks.adaptive or self._args.task_column):",
        "tests/trainers/test_task_sampling.py -k with_batches_ahead",
    ),
    Mutation(
        "the time of an update is that of a micro-batch", "trainers/trainer.py",
        "        if self.accelerator.sync_gradients:\n            self._add_metrics({\"time/update\"",
        "        if True:\n            self._add_metrics({\"time/update\"", "tests/trainers/test_accumulation.py -k all_its",
    ),
    Mutation(
        "a teacher's ratios have the bounds of sequences", "step/teacher.py",
        'if own_loss or args.importance_sampling_level != "token" or args.loss_type == "cispo":', "if False:",
        "tests/trainers/test_teacher.py -k bounds_of_tokens",
    ),
    Mutation(
        "a range that cannot be sent costs episodes", "rollout/process_environment.py",
        "with suppress(EnvironmentProcessError):  # an", "if True:  # an",
        "tests/evaluation/test_counted.py -k in_a_process",
    ),
    Mutation(
        "equal settings of a stage are refused", "cli/chain/stages.py",
        " and stage.lora.to_dict() != before.to_dict()", "", "tests/test_cli_chain.py -k may_repeat",
    ),
    Mutation(
        "the best demonstration is that of one environment", "trainers/demonstrations.py",
        'if one["return"] < best[one["environment"]] if', 'if one["return"] < max(best.values()) if',
        "tests/trainers/test_demonstrations.py -k best_of_each",
    ),
    Mutation(
        "a stream that names no columns has none", "step/task_sampling.py",
        "list(names) if names is not None else list(next(iter(dataset), {}))", "list(names or ())",
        "tests/trainers/test_task_sampling.py -k a_stream_that",
    ),
    Mutation(
        "the average that teaches is not kept", "config/rules.py",
        'acts_with("beta", _has_reference, "keep_reference",', 'acts_with("beta", _uses_reference, "keep_reference"), '
        'acts_with("beta", _has_reference,',
        "tests/trainers/test_config_rules.py -k saved_average",
    ),
    Mutation(
        "a stage's own settings fail after the stages before", "cli/chain/stages.py",
        "    _check_lora(stages,", "    (lambda *_: None)(stages,", "tests/test_cli_chain.py -k said_before",
    ),
    Mutation(
        "a chain's evaluation forgets settings of the environment", "cli/chain/stages.py",
        "for name in (*_PLAYED, *_LOADED) if name in played", 'for name in ("max_turns", "temperature") if name in played',
        "tests/test_cli_chain.py -k last_multi_turn",
    ),
    Mutation(
        "ends of ranges of whole numbers are fractions", "populations/population.py",
        "int(value) if name in space.whole else value", "value", "tests/test_cli_evolve.py -k whole_numbers",
    ),
    Mutation(
        "the winner's adapter is extended again", "populations/members.py",
        'args.merge_lora_configs, arguments["peft_config"] = False, None', 'arguments["peft_config"] = None',
        "tests/populations/test_population.py -k extends",
    ),
    Mutation(
        "an exported policy names folders", "populations/population.py",
        "    shorten_paths(folder)  #", "    pass  #", "tests/populations/test_population.py -k goes_on_alone",
    ),
    Mutation(
        "judges of one source share answers", "judges/asking.py",
        "state += [function.args, function.keywords]", "state += []", "tests/judges/test_judges.py -k made_otherwise",
    ),
    Mutation(
        "an update lacks the entropy that its log has", "trainers/trainer.py",
        "        for means in self.turn_means:\n            self._add_metrics(means.close(self.accelerator))\n"
        "        with (\n"
        '            self.updates.watched(tr_loss, grad_norm, kwargs.get("learning_rate")),\n',
        '        with self.updates.watched(tr_loss, grad_norm, kwargs.get("learning_rate")):\n'
        "            for means in self.turn_means:\n                self._add_metrics(means.close(self.accelerator))\n"
        "        with (\n",
        "tests/trainers/test_updates.py -k loop_of",
    ),
    Mutation(
        "an update has metrics of earlier ones", "trainers/manual_loop.py",
        "values[length:] if values is before else values", "values[length:] or values[-1:]",
        "tests/trainers/test_updates.py -k earlier_ones",
    ),
    Mutation(
        "a message is shortened in silence", "records/plain.py",
        "        if self._whole and self._left <= 0:\n",
        "        if self._whole and self._left < -1:\n",
        "tests/envs/test_env_checker.py",
    ),
    Mutation(
        "half a surrogate pair of a tool call reaches the tokenizer", "records/plain.py",
        "plain_text(json.dumps(Plain(LARGEST", "str(json.dumps(Plain(LARGEST", "tests/envs/test_env_checker.py -k surrogate",
    ),
    Mutation(
        "one of two keys that become equal is lost", "records/plain.py",
        "return plain_text(text)  # by", "return text  # by",
        "tests/envs/test_env_checker.py -k would_be_shortened",
    ),
    Mutation(
        "arrays are told apart by their texts", "records/plain.py",
        'if isinstance(value, bytes) or callable(getattr(value, "tobytes", None)):', "if False:",
        "tests/evaluation/test_comparison.py -k different_rows",
    ),
    Mutation(
        "rows of another environment are played in the only one", "cli/eval/command.py",
        "named = rows is not None and (len(ids) > 1 or any(row.get(COLUMN) == name for row in rows))",
        "named = rows is not None and len(ids) > 1", "tests/test_cli_eval.py -k rows_metrics",
    ),
    Mutation(
        "rows of an environment that is not played are dropped", "cli/eval/command.py",
        "if len(ids) > 1 and (others", "if False and (others", "tests/test_cli_eval.py -k rows_metrics",
    ),
    Mutation(
        "limits of a class are not found by its name", "cli/eval/command.py",
        'for form in (one.rpartition(":")[2], one)}', "for form in (one,)}", "tests/test_cli_eval.py -k those_of_training",
    ),
    Mutation(
        "the first stage of a chain may have followed another", "cli/chain/command.py",
        'else {"id": None}', 'else {"id": state["parent"]}', "tests/test_cli_chain.py -k other_stages",
    ),
    Mutation(
        "a stage of a chain takes edited rows for its own", "cli/chain/command.py",
        "own[_CONTENT] = digest_of(Path(stage.dataset))", 'own[_CONTENT] = ""', "tests/test_cli_chain.py -k were_edited",
    ),
    Mutation(
        "a stage of a chain is not pushed at its end", "cli/chain/command.py",
        "if trainer.hub_model_id is not None:", "if False:", "tests/test_cli_chain.py -k at_its_end",
    ),
    Mutation(
        "a population in a chain does not know the adapter of a stage", "cli/chain/stages.py",
        "adapter = stage.lora or adapter", "adapter = stage.lora or lora", "tests/test_cli_evolve.py -k settings_of_its_own",
    ),
    Mutation(
        "a population in a chain stays ended by its hours", "cli/chain/command.py",
        'if state["finished"] and _may_go_on(stage):', "if False:", "tests/test_cli_evolve.py -k hours_ended",
    ),
    Mutation(
        "a chain's evaluation names environments that are not there", "cli/chain/stages.py",
        'check_names("environment_limits", episodes.environment_limits, environments or [])', "pass",
        "tests/test_cli_chain.py -k said_before",
    ),
    Mutation(
        "an array of objects is told by addresses", "records/plain.py",
        'elif getattr(getattr(value, "dtype", None), "hasobject", False):', "elif False:",
        "tests/evaluation/test_comparison.py -k different_rows",
    ),
    Mutation(
        "a judge's function may close over nothing that is made later", "judges/asking.py",
        "with suppress(ValueError):  # it is", "if True:  # it is", "tests/judges/test_judges.py -k made_later",
    ),
    Mutation(
        "rows that an evaluation leaves out by default are told of where none are", "trainers/evaluation.py",
        "rows > count and", "rows >= count and", "tests/trainers/test_evaluation.py -k default_leaves_out",
    ),
    Mutation(
        "a question of messages is shown as Python writes it", "envs/questions/environment.py",
        "if _are_messages(row.get(name))), None)", "if False), None)", "tests/envs/test_reasoning.py -k of_messages",
    ),
    Mutation(
        "a data set without rows is taken to evaluate on", "trainers/evaluation.py",
        "and not len(dataset):", "and False:", "tests/trainers/test_bad_input.py -k shows_at",
    ),
    Mutation(
        "a reward that float32 cannot hold is taken", "step/reward.py",
        "-LARGEST_REWARD <= cast(Any, value) <= LARGEST_REWARD", "True",
        "tests/trainers/test_reward_functions.py -k no_list",
    ),
    Mutation(
        "a weight of rewards may be no number", "config/rules.py",
        "all(_is_real(one) and _is_finite(one) for one in value)", "True",
        "tests/trainers/test_reward_functions.py -k cannot_get",
    ),
    Mutation(
        "the CPU that is asked for computes in bf16", "config/launch_checks.py",
        "(torch.accelerator.is_available() and not args.use_cpu)", "args.use_cpu",
        "tests/trainers/test_machine_mistakes.py -k float32",
    ),
    Mutation(
        "options of the command line are abbreviated", "cli/parser.py",
        '"allow_abbrev": False', '"allow_abbrev": True', "tests/test_cli.py -k nearest",
    ),
    Mutation(
        "a hint that no episode has is not told", "step/teacher.py",
        "if not self._looked and not any(", "if False and not any(", "tests/trainers/test_teacher.py -k is_told",
    ),
    Mutation(
        "an expert that fails is not named", "trainers/demonstrations.py",
        "except Exception as error:\n            if not asking", "except OSError as error:\n            if not asking",
        "tests/trainers/test_demonstrations.py -k fails_is_named",
    ),
    Mutation(
        "other rows of a resumed run are not told", "checkpoints/record.py",
        '"data": self._data(),', "", "tests/trainers/test_resume.py -k other_rows",
    ),
    Mutation(
        "a closed trainer keeps its environments", "trainers/trainer.py",
        "self._resources.callback(close)", "pass", "tests/trainers/test_closing.py -k fails_holds",
    ),
    Mutation(
        "a trainer that fails keeps what it has begun", "trainers/setup.py",
        "            self.close()\n            raise", "            raise",
        "tests/trainers/test_closing.py -k fails_holds",
    ),
    Mutation(
        "a closed trainer plays", "trainers/manual_loop.py",
        "self._trainer.check_open()", "pass", "tests/trainers/test_closing.py -k says_so",
    ),
    Mutation(
        "a row shared by environments", "rollout/stepped.py",
        "deepcopy(spec.options), spec.environment", "spec.options, spec.environment", "tests/rollout/test_engine.py",
    ),
    Mutation(
        "a success of NumPy is dropped", "envs/libraries/trl_tools.py",
        "if success is not None and not callable(success):", "if isinstance(success, bool):",
        "tests/envs/test_trl_tools.py -k success",
    ),
    Mutation(
        "a scripted policy answers a retry again", "evaluation/scripted_policies.py",
        "if self._received.repeated(ticket) is not None:", "if self._received.repeated(ticket) is None and False:",
        "tests/rollout/agents/test_scripted_policies.py -k sent_again",
    ),
    Mutation(
        "rewards of calls do not count with a scripted policy", "evaluation/scripted_policies.py",
        "self.played.reward += self.posted.popleft()[0]", "self.posted.popleft()",
        "tests/rollout/agents/test_scripted_policies.py -k rewards_of_calls",
    ),
    Mutation(
        "a reward that was taken is lost at the end of its episode", "rollout/agents/rollout.py",
        "while episode.posted:", "while False:",
        "tests/rollout/agents/test_faults.py -k reward_that_was_taken",
    ),
    Mutation(
        "an async tool is never run", "envs/tools/toolbox.py",
        "if is_async(tool) and not awaits:", "if False:", "tests/envs/test_tools.py -k nobody_would_run",
    ),
    Mutation(
        "the model sees a coroutine as a result", "envs/tools/toolbox.py",
        "if inspect.isawaitable(result) or inspect.isgenerator(result) or", "if",
        "tests/envs/test_tools.py -k nobody_would_run",
    ),
    Mutation(
        "a call that broke off is a call without arguments", "rollout/chat/renderer.py",
        "if any(tag in piece for piece in pieces[::2] for tag in tags):", "if False:",
        "tests/rollout/agents/test_agent_templates.py -k broke_off",
    ),
    Mutation(
        "a call is delivered without a part of its arguments", "rollout/chat/renderer.py",
        "if _words(pieces[1::2]) != _words(call.findall(written)):", "if False:",
        "tests/rollout/agents/test_agent_templates.py -k broke_off",
    ),
    Mutation(
        "the end of the turn is an argument", "rollout/chat/renderer.py",
        "if any(end in given for end in self._ends):", "if False:",
        "tests/rollout/agents/test_agent_templates.py -k broke_off",
    ),
    Mutation(
        "a reward that float32 cannot hold", "envs/checker.py",
        "np.finfo(np.float32).max", "np.finfo(np.float64).max", "tests/rollout/test_misbehaving.py -k inline",
    ),
    Mutation(
        "members compared by the first characters of their prompt", "rollout/metrics.py",
        "blake2b(text.encode()", "blake2b(text[:5].encode()",
        "tests/trainers/test_misbehaving_environments.py -k differently",
    ),
    Mutation(
        "a false equation that names the right number", "envs/questions/answers.py",
        " and _agree(others, number))", ")", "tests/envs/test_grading.py -k arithmetic",
    ),
    Mutation(
        "a power of any size is computed", "envs/questions/answers.py",
        " or bits > _MOST_BITS", " or bits > _MOST_BITS**2", "tests/envs/test_grading.py -k powers",
    ),
    Mutation(
        "a sign in an equation is not read", "envs/questions/answers.py",
        "-1 if isinstance(node.op, ast.USub) else 1", "1", "tests/envs/test_grading.py -k arithmetic",
    ),
    Mutation(
        "an unknown before a sign is a product", "envs/questions/answers.py",
        r"(?=\s*[\d.(\[{\\])", r"(?=[\d(\[{\s])", "tests/envs/test_grading.py -k arithmetic",
    ),
    Mutation(
        "an unknown before a sign and a space is a product", "envs/questions/answers.py",
        r"(?=\s+[-+][\d.", r"(?=\s+[-+]\s*[\d.", "tests/envs/test_grading.py -k arithmetic",
    ),
    Mutation(
        "a mixed number is read as a product", "envs/questions/answers.py",
        "if extended and _MIXED.search(text):", "if False:", "tests/envs/test_grading.py -k arithmetic",
    ),
    Mutation(
        "what was thought is taken for the answer", "envs/questions/answers.py",
        'text = completion.rpartition("</think>")[2]\n    start', "text = completion\n    start",
        "tests/envs/test_grading.py",
    ),
    Mutation(
        "a launch configuration's own file is looked for in the current folder", "cli/launch_configs.py",
        'str(FOLDER.parent / named)', "named", "tests/test_cli.py -k launch",
    ),
    Mutation(
        "the check's limit is for all calls together", "envs/checker.py",
        "self.call, self.since = call, time.monotonic()", "self.call = call", "tests/envs/test_env_checker.py -k slow",
    ),
    Mutation(
        "an option's token is reported", "config/multi_turn.py",
        "return public_options(super().to_dict(), type(self), self.public_values)", "return super().to_dict()",
        "tests/trainers/test_secrets.py",
    ),
    Mutation(
        "secrets inside lists are not masked", "checkpoints/disclosure.py",
        "if type(value) in (list, tuple):", "if type(value) is tuple:", "tests/trainers/test_secrets.py",
    ),
    Mutation(
        "the record holds the values of arguments", "checkpoints/disclosure.py",
        "masked(value) if is_named(name, public) else withheld(name, value)", "masked(value)",
        "tests/trainers/test_secrets.py -k 'arguments or run'",
    ),
    Mutation(
        "the list of what may leave is one of what may not", "checkpoints/disclosure.py",
        "name in public or name.rpartition(\".\")[2] in public", "name not in public",
        "tests/trainers/test_secrets.py -k arguments",
    ),
    Mutation(
        "any text of a known option leaves", "checkpoints/disclosure.py",
        "return name in _WORDS and isinstance(value, str)", "return isinstance(value, str)",
        "tests/trainers/test_secrets.py -k options",
    ),
    Mutation(
        "a digest that anyone can guess the value by", "checkpoints/integrity.py",
        'hmac.new(key, f"{kind}', 'hmac.new(b"", f"{kind}', "tests/trainers/test_secrets.py -k key",
    ),
    Mutation(
        "digests of another user count as another value", "checkpoints/disclosure.py",
        "found[2] is None or found[2] != own_key[2]", "found[2] is None", "tests/trainers/test_secrets.py -k key",
    ),
    Mutation(
        "a pushed checkpoint holds the episodes it was training on", "checkpoints/hub.py",
        "(*FURTHER_FILES, *STATE_FILES, CARD, CURVE)", '(*FURTHER_FILES, *STATE_FILES, "rollout/*", CARD, CURVE)',
        "tests/trainers/test_hub.py -k what_is_pushed",
    ),
    Mutation(
        "a pickle that was added to a signed checkpoint is read", "checkpoints/integrity.py",
        " and files.keys() >= set(found)", "", "tests/adapters/test_signing.py",
    ),
    Mutation(
        "DeepSpeed is sent to another folder", "checkpoints/integrity.py",
        'r"global_step[0-9]{1,18}"', 'r".*"', "tests/adapters/test_strangers.py -k latest",
    ),
    Mutation(
        "a pickle of an unknown name needs no signature", "checkpoints/integrity.py",
        "PurePosixPath(name).suffix not in _DATA and not", "name.endswith('.pt') and not",
        "tests/adapters/test_strangers.py -k pickle",
    ),
    Mutation(
        "links in a checkpoint are followed", "checkpoints/integrity.py",
        "elif entry.is_file(follow_symlinks=False) or is_cached(path):", "elif entry.is_file():",
        "tests/adapters/test_strangers.py -k signed",
    ),
    Mutation(
        "a stranger's expression is not tried", "adapters/untrusted.py",
        '("modules_to_save", config.modules_to_save', '("modules_to_save", ()',
        "tests/adapters/test_strangers.py -k expression",
    ),
    Mutation(
        "memory of a stranger's program is not limited", "adapters/untrusted.py",
        "resource.setrlimit(resource.RLIMIT_AS,", "(lambda *_: None)(None,",
        "tests/adapters/test_strangers.py -k gigabytes",
    ),
    Mutation(
        "named templates of a folder are not tried", "adapters/untrusted.py",
        "several = value if isinstance(value, list) else [value]", "several = [value]",
        "tests/adapters/test_strangers.py -k every_template",
    ),
    Mutation(
        "weights are read from elsewhere", "adapters/folders.py", "or Path(name).name != name", "",
        "tests/adapters/test_damaged_models.py -k weights",
    ),
    Mutation(
        "the loaders' own errors come through", "adapters/untrusted.py",
        'type(error).__name__ != "PanicException"', "True", "tests/adapters/test_damaged_models.py -k one_kind",
    ),
    Mutation(
        "an epoch of a checkpoint is drawn for hours", "checkpoints/integrity.py",
        'not 0 <= state["epoch"] <= state["global_step"] + 1', 'state["epoch"] < 0',
        "tests/adapters/test_strangers.py -k trainer_state",
    ),
    Mutation(
        "the first alternative of a form is enough", "adapters/folders.py",
        "if None not in found:", "if found[0] is not None:",
        "tests/adapters/test_strangers.py -k every_option",
    ),
    Mutation(
        "the name of a user is pushed", "checkpoints/disclosure.py", "    if changed:", "    if False:",
        "tests/trainers/test_secrets.py -k users_name",
    ),
    Mutation(
        "what the diagnosis remembers of episodes is pushed", "checkpoints/disclosure.py",
        '"watch": {}, ', "", "tests/trainers/test_secrets.py -k diagnosis_remembers",
    ),
    Mutation(
        "a secret becomes a special token", "checkpoints/disclosure.py", "own and len(value) >=", "False and len(value) >=",
        "tests/trainers/test_secrets.py -k special_token",
    ),
    Mutation(
        "a key that others can read signs", "checkpoints/integrity.py", "& 0o077:", "& 0:",
        "tests/adapters/test_signing.py -k others",
    ),
    Mutation(
        "a stranger's words are Markdown", "checkpoints/model_card.py",
        'return f"`{shown}`" if shown.strip() else ""', "return shown", "tests/adapters/test_strangers.py -k words",
    ),
    Mutation(
        "a card that fails ends the run", "checkpoints/model_card.py",
        "    except Exception as error:", "    except OSError as error:",
        "tests/trainers/test_strangers_runs.py -k card",
    ),
    Mutation(
        "every log has names of its own", "trainers/trainer.py",
        '["train"][sys.intern(name)]', '["train"][name]', "tests/trainers/test_growth.py -k grpo",
    ),
    Mutation(
        "every evaluation has names of its own", "monitor/reporting.py",
        "{sys.intern(name): value", "{name: value", "tests/trainers/test_growth.py -k grpo",
    ),
    Mutation(
        "the card keeps its whole curve", "checkpoints/model_card.py",
        "digest = sha256(repr(shown).encode()).digest()", "digest: Any = shown",
        "tests/trainers/test_growth.py -k grpo",
    ),
    Mutation(
        "any signature will do", "checkpoints/integrity.py",
        "hmac.compare_digest(signature, expected)", "bool(expected)", "tests/adapters/test_signing.py",
    ),
    Mutation(
        "isolated programs open sockets", "envs/isolation/levels.py",
        '"access", "alarm",', '"access", "socket", "connect", "alarm",', "tests/envs/test_isolation.py",
    ),
    Mutation(
        "isolated programs open files for writing", "envs/isolation/levels.py",
        'allow("openat", seccomp.Arg(2, seccomp.MASKED_EQ, _WRITING, 0))', 'allow("openat")',
        "tests/envs/test_isolation.py",
    ),
    Mutation(
        "a Landlock domain reads every file", "envs/isolation/launcher.py",
        'for path in paths:\n        below', 'for path in ["/"]:\n        below', "tests/envs/test_isolation.py",
    ),
    Mutation(
        "isolation is not required", "envs/isolation/levels.py",
        "if level() == NONE and os.environ.get(OPTION) != NONE:", "if False:", "tests/envs/test_isolation.py",
    ),
    Mutation(
        "output before a time limit is lost", "envs/isolation/levels.py",
        '["-u", "-X"', '["-X"', "tests/envs/test_tools_python.py",
    ),
    Mutation(
        "the sandbox's hook can be rewritten", "envs/tools/python_sandbox.py",
        'event == "object.__setattr__" and arguments[1] != "__code__"', 'event == "object.__setattr__"',
        "tests/envs/test_tools_python.py",
    ),
    Mutation(
        "whatever a model answers is evaluated", "envs/libraries/scorers.py",
        "and not is_in_grammar(name, answer, entry)", "and False", "tests/envs/test_scorers.py",
    ),
    Mutation(
        "an answer that is nested too deeply is taken for a literal", "envs/libraries/scorers.py",
        "scorer\n        return False", "scorer\n        return True", "tests/envs/test_scorers.py",
    ),
    Mutation(
        "scorers that read lists call eval", "envs/libraries/scorers.py",
        '["eval"] = ast.literal_eval', '["eval"] = eval', "tests/envs/test_scorers.py",
    ),
    Mutation(
        "a reply to another request is taken", "envs/isolation/calls.py",
        "found != number or", "", "tests/envs/test_grading.py",
    ),
    Mutation(
        "a process that sent too much is kept", "envs/isolation/calls.py",
        "not self._begun and not _ready(self._replies, select.POLLIN, 0.0)", "True",
        "tests/envs/test_grading.py",
    ),
    Mutation(
        "GEM's grader parses any text", "envs/libraries/gem_grader.py",
        "if _NO_FORMULA.search(text):", "if False:", "tests/envs/test_gem.py -k grader",
    ),
    Mutation(
        "a value that is near solves a puzzle", "envs/libraries/scorers.py",
        "and not _is_exact(str(answer), entry)", "and False", "tests/envs/test_scorers.py",
    ),
    Mutation(
        "a process that ran out of memory is kept", "envs/isolation/calls.py",
        'if kind == "memory":', 'if kind == "never":', "tests/envs/test_grading.py",
    ),
    Mutation(
        "GEM's code runner runs unprotected", "envs/libraries/gem.py",
        "sandbox.subprocess_run = functools.partial(_run, name)", "del sandbox", "tests/envs/test_gem.py -k code_runner",
    ),
    Mutation(
        "a solved task is said to have zero-advantage groups", "evaluation/diagnosis.py",
        "return cause in held or cause in lately", "return False", DIAGNOSIS,
    ),
    Mutation(
        "a finding is repeated at every step", "evaluation/diagnosis.py",
        "size >= 2 * said", "size >= said", DIAGNOSIS,
    ),
    Mutation(
        "starts are lost where many fail", "evaluation/diagnosis.py",
        "unsolved < LOST * (1 - success)", "unsolved == 0", DIAGNOSIS,
    ),
    Mutation(
        "starts are lost while the policy learns them", "evaluation/diagnosis.py",
        'if history.rises("success"):\n        return None  # the policy may',
        "if False:\n        return None  # the policy may",
        DIAGNOSIS,
    ),
    Mutation(
        "a run that plays nothing loses its columns", "monitor/progress.py",
        'or "return" not in batch:', "or not batch:", "tests/trainers/test_progress_table.py -k without_episodes",
    ),
    Mutation(
        "an update without a rollout shows no success", "monitor/progress.py", "self._batch = {**values}", "pass",
        "tests/test_cli.py -k trains_and_saves_an_adapter",
    ),
    Mutation(
        "a batch is trained on once by default", "algorithms/grpo.py",
        "iterations: ClassVar[int] = 4", "iterations: ClassVar[int] = 1",
        "tests/trainers/test_batch_defaults.py -k updates_of_a_batch",
    ),
    Mutation(
        "nine of ten successes are a solved task", "evaluation/diagnosis.py", "SOLVED = 0.95", "SOLVED = 0.9", DIAGNOSIS,
    ),
    Mutation(
        "five batches of one group show a solved task", "evaluation/diagnosis.py",
        "number * max(self.groups, 1) * _divergence(mean, beyond) >= -log(CHANCE)", "True",
        DIAGNOSIS + " -k enough_groups",
    ),
    Mutation(
        "what only looks solved is reported", "evaluation/diagnosis.py",
        "unsure |= set() if evidence.certain else {check.name}", "pass", DIAGNOSIS + " -k enough_groups",
    ),
    Mutation(
        "an old evaluation contradicts a solved task", "evaluation/diagnosis.py",
        "lost = solved and wilson", "lost = wilson", DIAGNOSIS + " -k training_alone",
    ),
    Mutation(
        "a declared range is dropped for returns that equal success", "evaluation/results.py",
        "if not own and rows and all(", "if rows and all(", "tests/evaluation/test_comparison.py -k declared_range",
    ),
    Mutation(
        "a range that the other policy contradicts is used", "evaluation/comparison.py",
        "first.limits(measure, second)", "first.limits(measure)", "tests/evaluation/test_comparison.py -k declared_range",
    ),
    Mutation(
        "an evaluation's row shows the return without failed episodes", "monitor/progress.py",
        '("return", "return/mean")', '("return/mean", "return")', "tests/trainers/test_progress_table.py",
    ),
    Mutation(
        "a policy whose episodes all failed has no success", "evaluation/results.py",
        'return {**row, "success": False} if', 'return row if', "tests/evaluation/test_comparison.py -k only_winners",
    ),
    Mutation(
        "noise counts as a fall", "evaluation/statistics.py", "ALPHA = 2e-3", "ALPHA = 0.1",
        "tests/evaluation/test_sequential.py",
    ),
    Mutation(
        "each block of a run spends the same", "evaluation/statistics.py",
        "(2 * block * (block + 1) *", "(2 * 1 * (1 + 1) *",
        "tests/evaluation/test_sequential.py",
    ),
    Mutation(
        "the start counts as exact", "evaluation/statistics.py", "(1 / batches + 1 / size)", "(1 / size)",
        "tests/evaluation/test_sequential.py",
    ),
    Mutation(
        "what was learned counts as the start", "evaluation/statistics.py",
        "min(means) if now < means[-1][0] else max(means)", "means[-1]", "tests/evaluation/test_sequential.py",
    ),
    Mutation(
        "an entropy bonus is blamed for a rate", "evaluation/diagnosis.py",
        "bonus >= RULES * (spread or inf)", "bonus >= 0", DIAGNOSIS,
    ),
    Mutation(
        "a rate is blamed for what the reward pays for", "evaluation/diagnosis.py",
        "now >= start\n\n\ndef _pays_for_less", "False\n\n\ndef _pays_for_less", DIAGNOSIS,
    ),
    Mutation(
        "two findings that explain each other are both lost", "evaluation/diagnosis.py",
        "return [*BY_NAME].index(cause) < [*BY_NAME].index(name)", "return True", DIAGNOSIS,
    ),
    Mutation(
        "what follows from a finding is reported once that has passed", "evaluation/diagnosis.py",
        "if step - seen <= QUIET]", "if step - seen < 0]", DIAGNOSIS,
    ),
    Mutation(
        "a policy that reads its prompts late is told that it does not", "evaluation/diagnosis.py",
        'history.counts["reward"] < UNREAD_AFTER or ', "", DIAGNOSIS,
    ),
    Mutation(
        "one measurement of few prompts is a collapse", "evaluation/diagnosis.py",
        'history.means("prompt_information", KNOWN_FOR)', 'history.means("prompt_information", 1)', DIAGNOSIS,
    ),
    Mutation(
        "filters cost no memory in a plan", "cli/check/memory_plan.py",
        "tile += COPIES * 4 * min(positions * vocabulary, LOGITS)", "pass", "tests/test_cli_memory.py -k copies",
    ),
    Mutation(
        "a flipped sign passes as a reward", "monitor/reporting.py",
        "return products / (squares * ones) ** 0.5", "return abs(products) / (squares * ones) ** 0.5",
        "tests/trainers/test_health_metrics.py",
    ),
    Mutation(
        "those that survive a failing environment are called solved", "evaluation/diagnosis.py",
        "success < SOLVED or _incomplete(history)", "success < SOLVED", DIAGNOSIS,
    ),
    Mutation(
        "a failing environment is one finding of many", "evaluation/diagnosis.py",
        "if name in (loud or held)", "if name in held", DIAGNOSIS,
    ),
    Mutation(
        "one batch without advantage is reported", "evaluation/diagnosis.py", "BATCHES = 5", "BATCHES = 1", DIAGNOSIS,
    ),
    Mutation(
        "a collapse of the entropy is seen only at zero", "evaluation/diagnosis.py",
        "max(min(0.1 * first, 0.1), 0.005)", "0.005", DIAGNOSIS,
    ),
    Mutation(
        "answers that forget their prompt pass while they vary", "evaluation/diagnosis.py",
        "entropy < 0.3 * first", "entropy > 0.3 * first", DIAGNOSIS,
    ),
    Mutation(
        "a critic is compared with no error at all", "evaluation/diagnosis.py",
        "error <= 1.25 * spread", "error <= 0", DIAGNOSIS,
    ),
    Mutation(
        "prompts are taken for answers", "monitor/health_checks.py",
        "scores.logsumexp(dim=1)", "scores.logsumexp(dim=0)", f"{HEALTH} -k prompt_information",
    ),
    Mutation(
        "a value of a metric is taken at every step until the log", "monitor/health_checks.py",
        "values[self._taken.get(name, 0) :]", "values", f"{HEALTH} -k taken_once",
    ),
    Mutation(
        "a resumed run forgets its diagnosis", "trainers/setup.py",
        'parts.health.restore(states.get("watch", {}))', "pass",
        "tests/trainers/test_checkpoint.py::test_the_diagnosis_goes_on",
    ),
    Mutation(
        "left padding counts as positions", "rollout/generators/architecture.py",
        "return (mask.long().cumsum(dim=1) - 1).clamp(min=0)", "return torch.ones_like(mask).long().cumsum(dim=1) - 1",
        f"{ARCHITECTURES}::test_padding_moves_no_position[gpt2]",
    ),
    Mutation(
        "the critic counts left padding", "adapters/critic.py",
        '"attention_mask", "position_ids")', '"attention_mask")',
        f"{ARCHITECTURES}::test_padding_moves_no_position_of_the_critic",
    ),
    Mutation(
        "dropout kept as a float stays on", "step/dropout.py",
        "_zero(module, _NOISE)", "pass", f"{ARCHITECTURES}::test_reference_and_critic_have_no_noise",
    ),
    Mutation(
        "the critic's adapter has dropout", "trainers/setup.py",
        "        _switch_off_noise(args, accelerator, policy, trainer.ref_model)\n        critic.unfreeze(",
        "        critic.unfreeze(",
        f"{ARCHITECTURES}::test_reference_and_critic_have_no_noise",
    ),
    Mutation(
        "a longer row turns the others otherwise", "rollout/generators/architecture.py",
        "return min(lengths, default=None)", "return None", f"{ARCHITECTURES} -k rope",
    ),
    Mutation(
        "Mamba decodes with the mask of earlier tokens", "rollout/generators/architecture.py",
        '"mamba", ', "", "tests/rollout/test_generators.py -k mamba",
    ),
    Mutation(
        "a decode step is trusted that differs from reading", "rollout/generators/architecture.py",
        '"mamba2", "minimax",', '"mamba2",', "tests/rollout/test_generators.py -k minimax",
    ),
    Mutation(
        "a layer that is computed again is not planned for", "cli/check/tracing.py",
        "max(self.layers, default=0) if gradient_checkpointing else 0", "0", f"{MEMORY} -k checkpointing-lora",
    ),
    Mutation(
        "the input of a layer is planned for twice", "cli/check/tracing.py",
        "- self.saved_inputs + sum(self.inputs)", "+ sum(self.inputs)", f"{COUNTED} -k whole_in_fp32",
    ),
    Mutation(
        "temporaries count what is freed", "cli/check/tracing.py",
        "        self.now -= size", "        pass", f"{COUNTED} -k lora",
    ),
    Mutation(
        "an engine beside the trainer is not planned for", "cli/check/memory_plan.py",
        '0 if plan.engine.sleeps else engine', "0", "tests/test_cli_advice.py -k counts_when",
    ),
    Mutation(
        "ZeRO divides nothing", "cli/check/memory_plan.py",
        "launch.processes if name in launch.shared else 1", "1", "tests/test_cli_advice.py -k share",
    ),
    Mutation(
        "a batch is checked for one process", "cli/check/command.py",
        "if launch.processes > 1:", "if False:", "tests/test_cli_advice.py -k batches",
    ),
    Mutation(
        "each storage is counted every time it is kept", "cli/check/tracing.py",
        "storage._cdata not in own and storage._cdata not in seen", "storage._cdata not in own", f"{MEMORY} -k qwen2-lora",
    ),
    Mutation(
        "the plan leaves out the observations", "cli/check/memory_plan.py",
        "+ (args.max_turns - 1) * observation", "", f"{MEMORY} -k limits",
    ),
    Mutation(
        "a launch of one process hears no signal", "cli/train.py",
        "launchers.simple_launcher = take_place", "pass", "tests/test_cli.py -k signal_to",
    ),
    Mutation(
        "a rank does not use the time that torchrun gives it", "checkpoints/stopping.py",
        "limit = float(given or 30)", "limit = 0.4", "tests/trainers/test_stopping.py -k torchrun",
    ),
    Mutation(
        "a base that was changed in memory is played from its files", "trainers/arguments.py",
        "check_base_unchanged(model)\n", "pass\n", "tests/trainers/test_vllm_options.py -k files_is_refused",
    ),
    Mutation(
        "a base that was rounded is taken for another", "sampling/vllm_checks.py",
        "for way in (dtype, torch.bfloat16, torch.float16))", "for way in (dtype,))",
        "tests/trainers/test_vllm_options.py -k files_is_refused",
    ),
    Mutation(
        "a weight that is stored in another order is taken for another", "sampling/vllm_checks.py",
        "return _sum_of_bits(own) not in map(_sum_of_bits, _roundings(stored[:], own.dtype))", "return True",
        "tests/trainers/test_vllm_options.py -k cannot_be_compared",
    ),
    Mutation(
        "the first evaluation finds out that it leaves an environment out", "trainers/mixture.py",
        "mixture.evaluated(args.num_eval_episodes)", "pass", "tests/trainers/test_mixture.py -k leave_one_out",
    ),
    Mutation(
        "a population finds out late that it leaves an environment out", "populations/population.py",
        "Mixture(tuple(names), 1).evaluated(args.num_eval_episodes)", "pass",
        "tests/populations/test_population.py -k leaves",
    ),
    Mutation(
        "an interrupt waits for an environment that hangs", "checkpoints/stopping.py",
        "            end_silent_calls()\n", "            raise RuntimeError\n",
        "tests/rollout/test_silent_environments.py -k 'interrupt and thread'",
    ),
    Mutation(
        "a check accuses the episodes that agree", "cli/check/plays.py",
        "if others[n] != alone[n]]", "if others[n] == alone[n]]",
        "tests/test_cli_check.py -k reason_not",
    ),
    Mutation(
        "a check plays again on new instances alone", "cli/check/plays.py",
        "[[n] for n in range(len(games))])", "[list(range(len(games)))])", "tests/test_cli_check.py -k reason_not",
    ),
    Mutation(
        "a list of a class passes for randomness", "cli/check/plays.py",
        "if len(new) < len(games) or", "if True or", EPISODES,
    ),
    Mutation(
        "randomness passes for a list of a class", "cli/check/plays.py",
        "CERTAIN = 3", "CERTAIN = 1", EPISODES,
    ),
    Mutation(
        "answers are not given at other starts", "cli/check/plays.py",
        "for game in given for spec in starts]", "for game in given for spec in [game.spec] * len(starts)]", EPISODES,
    ),
    Mutation(
        "a game whose secret the prompt does not show is one task", "cli/check/plays.py",
        "all(result == results[0] for", "all(result[0] == results[0][0] for", EPISODES,
    ),
    Mutation(
        "to hold out is a win that is cut short", "cli/check/sections.py",
        "if won and (longest == 1 or any(len(episode.turns) < longest for episode in won)):", "if won:", EPISODES,
    ),
    Mutation(
        "an environment that pays at the limit is said to be cut", "cli/check/sections.py",
        'hidden = (*OF_POLICY, "episodes_cut") if meant else OF_POLICY', "hidden = OF_POLICY", EPISODES,
    ),
    Mutation(
        "a range that returns contradict passes a check", "cli/check/sections.py",
        "and not within(returns, limits):", "and False:", EPISODES,
    ),
    Mutation(
        "a reward that each turn gets for itself is missed", "evaluation/diagnosis.py",
        " or early > EARLY * spread:", ":", DIAGNOSIS,
    ),
    Mutation(
        "a discount is none", "evaluation/diagnosis.py",
        "0.0 if own else options.gamma ** (turns - 1)", "0.0 if own else 1.0", DIAGNOSIS,
    ),
    Mutation(
        "a low temperature is named last", "evaluation/diagnosis.py",
        "if first is None or first > STIFF:", "if True:", DIAGNOSIS,
    ),
    Mutation(
        "empty observations are no finding", "evaluation/diagnosis.py",
        "if empty is not None and empty >= EMPTY and", "if False and", DIAGNOSIS,
    ),
    Mutation(
        "hidden secrets are one task", "monitor/reporting.py",
        " and all(len(told) == 1 for told in results.values()))", ")", "tests/trainers/test_health_metrics.py",
    ),
    Mutation(
        "the last turn is an early one", "rollout/metrics.py",
        "sum(turn.reward for turn in trajectory.turns[:-1])", "sum(turn.reward for turn in trajectory.turns)",
        "tests/rollout/test_metrics.py",
    ),
    Mutation(
        "an extension that cannot be built is a damaged file", "adapters/untrusted.py",
        "if built or (within", "if (within",
        "tests/adapters/test_damaged_models.py -k built",
    ),
    Mutation(
        "a reward that pays for failure passes a check", "cli/check/plays.py",
        "(_correlation(pairs, len(pairs)) or 0.0) >= PAID", "abs(_correlation(pairs, len(pairs)) or 0.0) >= PAID",
        "tests/test_cli_check.py -k reason_not",
    ),
    Mutation(
        "the policies' returns speak for the model", "cli/check/sections.py",
        "if of_model and len(own) == 1:", "if False:",
        "tests/test_cli_check.py -k own_episodes",
    ),
    Mutation(
        "the last of two equal keys counts", "cli/yaml_files.py",
        "if value in lines:", "if False:", "tests/test_cli_errors.py -k equal_keys",
    ),
    Mutation(
        "a crash in training is taken for a mistake", "cli/errors.py",
        "isinstance(error, MISTAKES) and not Progress.training", "isinstance(error, MISTAKES)",
        "tests/test_cli_errors.py -k mistakes_and_crashes",
    ),
    Mutation(
        "a stage with damaged checkpoints begins again", "cli/chain/command.py",
        "if any((one / MARKER).is_file() for one in there):", "if False:", "tests/test_cli_chain.py -k damaged",
    ),
    Mutation(
        "a skipped step moves the schedule", "monitor/nonfinite.py",
        "optimizer._is_overflow = True", "optimizer._is_overflow = False", "tests/trainers/test_nonfinite.py",
    ),
    Mutation(
        "weights that are not finite are saved", "monitor/nonfinite.py",
        "if not _agree(broken is None, accelerator):", "if False:", "tests/trainers/test_nonfinite.py",
    ),
    Mutation(
        "a finished stage trains one step more", "cli/chain/command.py",
        "_take_no_step_too_many(trainer, Path(checkpoint))", "pass", "tests/test_cli_chain.py -k last_step",
    ),
    Mutation(
        "a finished run trains one step more", "checkpoints/stopping.py",
        "not control.should_training_stop and state.global_step >= state.max_steps",
        "not control.should_training_stop and state.global_step > state.max_steps",
        "tests/trainers/test_resume.py -k finished",
    ),
    Mutation(
        "an old branch's checkpoints stay in the way", "checkpoints/record.py",
        "if step_of(path) > after and", "if step_of(path) > after + 100 and", "tests/trainers/test_resume.py -k branch",
    ),
    Mutation(
        "a checkpoint's step is read in its name", "trainers/trainer.py",
        "generation, self.state.global_step)", "generation, int(checkpoint.rpartition('-')[2]))",
        "tests/trainers/test_resume.py -k any_name",
    ),
    Mutation(
        "a pushed checkpoint resumes until it is saved", "checkpoints/record.py",
        "{**made.stateful_callbacks, **state.stateful_callbacks}", "state.stateful_callbacks",
        "tests/trainers/test_resume.py -k any_name",
    ),
    Mutation(
        "good checkpoints make room for one that does not load", "checkpoints/record.py",
        "        self.epochs_done = int(", "        self._set_aside()\n        self.epochs_done = int(",
        "tests/trainers/test_resume.py -k sets_none_aside",
    ),
    Mutation(
        "a run that was moved forgets its best checkpoint", "checkpoints/record.py",
        "state.best_model_checkpoint = beside.get(name)", "pass", "tests/trainers/test_resume.py -k moved",
    ),
    Mutation(
        "the best checkpoint is deleted by another name of its folder", "checkpoints/record.py",
        "best and str(run / Path(best).name)", "best", "tests/trainers/test_resume.py -k moved",
    ),
    Mutation(
        "the record of the best policy names the last step", "checkpoints/record.py",
        "self._trainer.state.global_step if self._best_step is None else self._best_step",
        "self._trainer.state.global_step", "tests/trainers/test_resume.py -k moved",
    ),
    Mutation(
        "the card of the best policy has the last one's result", "checkpoints/model_card.py",
        "if one[\"step\"] == record[\"global_step\"]", "if False", "tests/trainers/test_resume.py -k moved",
    ),
    Mutation(
        "one of several data sets is all that a card shows", "checkpoints/model_card.py",
        "found.setdefault(entry[\"step\"], {}).update(entry)", "found[entry[\"step\"]] = dict(entry)",
        "tests/trainers/test_hub.py -k data_sets",
    ),
    Mutation(
        "the end of a stopped run deletes where it stopped", "checkpoints/stopping.py",
        "self._change(args, \"save_total_limit\", 2)", "pass", "tests/trainers/test_stopping.py -k go_on_from",
    ),
    Mutation(
        "a stop saves a model that no run goes on from", "checkpoints/stopping.py",
        "self._change(args, \"save_only_model\", False)", "pass", "tests/trainers/test_stopping.py -k go_on_from",
    ),
    Mutation(
        "a stop changes the options for good", "checkpoints/stopping.py",
        "for name, value in self._changed.items():", "for name, value in ():",
        "tests/trainers/test_stopping.py -k go_on_from",
    ),
    Mutation(
        "a signal in the last evaluation is heard too late", "checkpoints/stopping.py",
        "def on_epoch_end(", "def epoch_end(", "tests/trainers/test_stopping.py -k signal_in",
    ),
    Mutation(
        "an update does not hear a signal in its evaluation", "trainers/manual_loop.py",
        "trainer.stop.ask(args, state, control)", "pass", "tests/trainers/test_stopping.py -k signal_in",
    ),
    Mutation(
        "processes that are no more leave their episodes", "records/writer.py",
        "rank >= processes", "False", "tests/records/test_records.py -k writes_again",
    ),
    Mutation(
        "a signal that torchrun passes on is a second one", "checkpoints/stopping.py",
        "            time.sleep(_SAME_SECONDS)\n", "", "tests/trainers/test_stopping.py -k twice",
    ),
    Mutation(
        "a process that knows of another's signal hears none", "checkpoints/stopping.py",
        "            if got:\n", "            if self._requested:\n", "tests/trainers/test_stopping.py -k anothers",
    ),
    Mutation(
        "rows that even out ranks enter the metrics", "step/batch.py",
        "        log_probs.live = live\n", "", "tests/trainers/test_skip_zero_advantage.py -k even_out",
    ),
    Mutation(
        "SIGTERM ends like a run that is done", "checkpoints/stopping.py",
        "raise SystemExit(128 + self._requested) from error", "return", "tests/trainers/test_stopping.py -k its_code",
    ),
    Mutation(
        "a lost result of a round is made of later weights", "populations/population.py",
        "if max(steps, default=0) > one.end:", "if False:", "tests/populations/test_population.py -k later_weights",
    ),
    Mutation(
        "a round that others were decided by is played again", "populations/population.py",
        "        if self._round(number + 1).is_dir():\n", "        if False:\n",
        "tests/populations/test_population.py -k later_weights",
    ),
    Mutation(
        "a signal in a garbage collection is lost", "cli/errors.py",
        "    sys.unraisablehook = send_again\n", "", "tests/test_cli_errors.py -k wherever",
    ),
    Mutation(
        "an interrupted evaluation loses what was played", "cli/eval/command.py",
        "except (Exception, KeyboardInterrupt) as error:", "except Exception as error:",
        "tests/test_cli_eval.py -k on_the_way",
    ),
    Mutation(
        "starts that never were solved are called lost", "evaluation/diagnosis.py",
        'still = abs(history.errors("success")) <= ERRORS', "still = False", "tests/evaluation/test_diagnosis.py",
    ),
    Mutation(
        "starts that are lost from the first batches on are not told", "evaluation/diagnosis.py",
        'still = abs(history.errors("success")) <= ERRORS', "still = True", "tests/evaluation/test_diagnosis.py",
    ),
    Mutation(
        "a closed pipe ends training before the checkpoint of a stop", "imports.py",
        "        vars(file)[\"write\"] = _OutlivingWrite(file)", "        pass",
        "tests/trainers/test_stopping.py -k nothing_reads",
    ),
    Mutation(
        "a terminal that is gone fails environments that print", "imports.py",
        "gone = error.errno == errno.EIO and", "gone = False and", "tests/test_cli_errors.py -k outlives_its_reader",
    ),
    Mutation(
        "a lost output fails the environments in processes", "rollout/process_environment.py",
        "    with outliving_readers():\n", "    with suppress():\n", "tests/rollout/test_processes.py -k nothing_reads",
    ),
    Mutation(
        "a lost output fails programs of environments in processes", "rollout/process_environment.py",
        "        is_unread()  # the trainer's, which it may have lost\n", "",
        "tests/rollout/test_processes.py -k nothing_reads",
    ),
    Mutation(
        "a lost output fails programs of environments", "rollout/environment_pool.py",
        "        is_unread()  # programs that it starts do not write to an output that is lost\n", "",
        "tests/rollout/test_processes.py -k that_is_lost",
    ),
    Mutation(
        "a command whose output was lost says that it is done", "cli/errors.py",
        "return _UNREAD if is_unread() else status", "return status", "tests/test_cli_errors.py -k outlives_its_reader",
    ),
    Mutation(
        "a closed terminal ends a run without a checkpoint", "checkpoints/stopping.py",
        "_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)", "_SIGNALS = (signal.SIGINT, signal.SIGTERM)",
        "tests/trainers/test_stopping.py -k its_code",
    ),
    Mutation(
        "a run under nohup ends with its terminal", "checkpoints/stopping.py",
        "if before[signal.SIGHUP] == signal.SIG_IGN:", "if False:", "tests/test_cli_errors.py -k nohup",
    ),
    Mutation(
        "SIGTERM of a game ends as a person who leaves", "cli/play.py",
        "if isinstance(left, Terminated):", "if False:", "tests/test_cli_play.py -k terminated",
    ),
    Mutation(
        "a run goes on although nothing reads its output", "checkpoints/stopping.py",
        "self._requested or (signal.SIGPIPE if is_unread() else 0)", "self._requested or 0",
        "tests/trainers/test_stopping.py -k nothing_reads",
    ),
    Mutation(
        "an error hides the signal before it", "checkpoints/stopping.py",
        "        except Exception as error:\n            self.pass_on(",
        "        except Exception as error:\n            False and self.pass_on(",
        "tests/trainers/test_stopping.py -k error_after",
    ),
    Mutation(
        "SIGTERM with an error after it is told as an exit of the user's code", "cli/errors.py",
        "not Progress.training or leaving.code in (_UNREAD, *(128 + number for number in _ENDING))", "not Progress.training",
        "tests/test_cli_errors.py -k sigterm",
    ),
    Mutation(
        "an error at the end of updates hides the signal before it", "trainers/manual_loop.py",
        "                if trainer.control.should_training_stop:\n                    self.finish()\n        except",
        "            if trainer.control.should_training_stop:\n                self.finish()\n        except",
        "tests/trainers/test_stopping.py -k error_after",
    ),
    Mutation(
        "a signal is lost while a run by hand begins", "trainers/manual_loop.py",
        'self._trainer.stop.pass_on("training had not begun")', "pass", "tests/trainers/test_stopping.py -k by_hand_begins",
    ),
    Mutation(
        "an adapter stays in use after its block", "adapters/roles.py",
        "layer._active_adapter = names", "pass", "tests/trainers/test_reference.py -k by_name",
    ),
    Mutation(
        "each process stops by its own clock", "checkpoints/stopping.py",
        "self._accelerator.gather(own).amax(dim=0)", "own.amax(dim=0)",
        "tests/trainers/test_checkpoint_two_processes.py -k ahead",
    ),
    Mutation(
        "a resumed run has no time left", "checkpoints/stopping.py",
        "time.monotonic() - self._began >=", "time.monotonic() >=",
        "tests/trainers/test_stopping.py -k time",
    ),
    Mutation(
        "a killed trainer leaves its environments", "rollout/process_environment.py",
        "target=_wait_for_trainer", "target=int", "tests/rollout/test_left_processes.py -k kill",
    ),
    Mutation(
        "orphans of an environment outlive it", "rollout/process_environment.py",
        "adopt_descendants()\n", "pass\n", "tests/rollout/test_left_processes.py -k raise",
    ),
    Mutation(
        "an instance whose call was given up stays open", "rollout/environment_pool.py",
        "            self._given_up.add(call)\n", "", "tests/rollout/test_stepping.py -k given_up",
    ),
    Mutation(
        "a call is cancelled before it has begun", "rollout/environment_pool.py",
        "self._loop.call_soon(made[0].cancel)", "made[0].cancel()", "tests/rollout/test_stepping.py -k begins_before",
    ),
    Mutation(
        "children of a killed script die before it", "envs/isolation/process_tree.py",
        "for process in below:", "for process in reversed(below):", "tests/envs/test_agent_command.py -k a_killed_script",
    ),
    Mutation(
        "a paused answer keeps the numbers that it drew", "rollout/stepped.py",
        "self.noise.bit_generator.state = self.before", "pass", "tests/rollout/test_open_rollout.py -k pauses",
    ),
    Mutation(
        "a resumed episode draws its first numbers again", "rollout/stepped.py",
        "set_noise_state(self.noise, record.noise)", "pass",
        "tests/rollout/test_open_rollout.py -k another_process",
    ),
    Mutation(
        "a client's request is lost in a pause", "rollout/agents/episode.py",
        'return [self._requested(number) for number in sorted(self._pending)]',
        'return []',
        "tests/rollout/agents/test_pausing.py -k pauses_change_nothing",
    ),
    Mutation(
        "an agent's answer that is sampled again goes on with its noise", "rollout/agents/episode.py",
        "noise = cache(partial(noise_of, self.spec.stream, sample.prompt, sample.occurrence, trained=asked.trained))",
        'noise = vars(sample).setdefault("noise", '
        "cache(partial(noise_of, self.spec.stream, sample.prompt, sample.occurrence, trained=asked.trained)))",
        "tests/rollout/agents/test_pausing.py -k pauses_change_nothing",
    ),
    Mutation(
        "an agent's answers are not recorded", "rollout/agents/episode.py",
        'answered = [one for one in self._samples if one.choice is not None]',
        'answered: list[_Sample] = []',
        "tests/rollout/agents/test_pausing.py -k another_process",
    ),
    Mutation(
        "answers that are not trained are not recorded", "rollout/agents/episode.py",
        'answered = [one for one in self._samples if one.choice is not None]',
        'answered = [one for one in self._samples if one.choice is not None and one.asked.trained]',
        "tests/rollout/agents/test_pausing.py -k another_process",
    ),
    Mutation(
        "a judge gets the policy's recorded answer to the same prompt", "rollout/agents/episode.py",
        '[self.prompt.hex(), self.asked.trained, self.occurrence]',
        '[self.prompt.hex(), self.occurrence]',
        "tests/rollout/agents/test_pausing.py -k another_process",
    ),
    Mutation(
        "an equal prompt gets another one's recorded answer", "rollout/agents/episode.py",
        '[self.prompt.hex(), self.asked.trained, self.occurrence]',
        '[self.prompt.hex(), self.asked.trained]',
        "tests/rollout/agents/test_pausing.py -k another_process",
    ),
    Mutation(
        "an agent is given its answers in the order in which they were recorded", "rollout/replay.py",
        'if request.identity is not None:',
        'if False:',
        "tests/rollout/agents/test_pausing.py -k another_process",
    ),
    Mutation(
        "another recorded answer is spent than the one that is given", "rollout/replay.py",
        'record.answers.remove(answer)',
        'record.answers.pop()',
        "tests/rollout/agents/test_pausing.py -k another_process",
    ),
    Mutation(
        "an agent that does not ask for its answers again goes unnoticed", "rollout/rollout.py",
        '            warn_of(left)\n',
        '            pass\n',
        "tests/rollout/agents/test_pausing.py -k repeat_itself",
    ),
    Mutation(
        "an update counts as an agent's time", "rollout/environment_pool.py",
        'if call.method == "play":',
        'if False:',
        "tests/rollout/agents/test_pausing.py -k agents_time",
    ),
    Mutation(
        "an agent has all the time in the world after an update", "rollout/environment_pool.py",
        'call.deadline = now + left',
        'pass',
        "tests/rollout/agents/test_pausing.py -k agents_time",
    ),
    Mutation(
        "clients wait for a rollout that is closed", "rollout/agents/rollout.py",
        '            episode.close()\n',
        '            pass\n',
        "tests/rollout/agents/test_pausing.py -k are_refused",
    ),
    Mutation(
        "ended agents stay in the open rollout", "rollout/rollout.py",
        'self._finished.pop(key)[0] for',
        'self._finished[key][0] for',
        "tests/rollout/agents/test_pausing.py -k leave_nothing",
    ),
    Mutation(
        "keys of ended agents stay in the open rollout", "rollout/agents/requests.py",
        'del self._episodes[key]', 'key.upper()',
        "tests/rollout/agents/test_pausing.py -k leave_nothing",
    ),
    Mutation(
        "an agent that waits for an answer is busy", "rollout/environment_pool.py",
        'self.busy.set(call, not waits)',
        'pass',
        "tests/rollout/agents/test_pausing.py -k is_not_busy",
    ),
    Mutation(
        "recorded answers are given to other prompts", "rollout/replay.py",
        "record.answers[0].prompt == digest_of_ids(keyed(request.token_ids, request.pictures))", "True",
        "tests/rollout/test_open_rollout.py -k repeat_itself",
    ),
    Mutation(
        "an older policy is scored with the current one", "adapters/copies.py",
        "parameter.data = weight.to(parameter)", "pass", "tests/trainers/test_batches_ahead.py -k policy_that_played",
    ),
    Mutation(
        "a snapshot changes with the policy", "adapters/copies.py",
        "weight.detach().clone()", "weight.detach()", "tests/trainers/test_batches_ahead.py -k snapshots",
    ),
    Mutation(
        "the sampler is compared with the policy of the update", "trainers/trainer.py",
        "log_probs.old if log_probs.snapshot is None else log_probs.snapshot", "log_probs.old",
        "tests/trainers/test_batches_ahead.py -k policy_that_played",
    ),
    Mutation(
        "the rows ahead are those of the first epoch", "step/ahead.py",
        "list(self._sampler), self._epoch + 1", "self._indices or list(self._sampler), self._epoch + 1",
        "tests/trainers/test_batches_ahead.py -k order",
    ),
    Mutation(
        "an evaluation plays in the open rollout's pool", "trainers/setup.py",
        "engine.beside() if args.batches_ahead else engine", "engine",
        "tests/trainers/test_batches_ahead.py -k stays",
    ),
    Mutation(
        "checkpoints forget the batches ahead", "trainers/setup.py",
        "None if parts.rollouts.ahead is None else parts.rollouts.ahead.state()", "None",
        "tests/trainers/test_batches_ahead.py -k killed",
    ),
    Mutation(
        "a checkpoint that was pushed without its open episodes is resumed", "checkpoints/record.py",
        '(position.get("ahead"), "ahead-*.json"', '(False, "ahead-*.json"',
        "tests/trainers/test_batches_ahead.py -k without_its",
    ),
    Mutation(
        "the drift is measured but not corrected", "step/batch.py",
        "output.importance_sampling_ratio, metrics = corrected_drift(", "_, metrics = corrected_drift(",
        "tests/trainers/test_batches_ahead.py -k weighed",
    ),
    Mutation(
        "a background rollout's error is lost", "step/ahead.py",
        "            raise self._error\n", "            pass\n", "tests/rollout/test_background.py -k error",
    ),
    Mutation(
        "orphans of an agent's program outlive it", "envs/isolation/process_tree.py",
        "    adopt_descendants()\n    remove_abandoned(", "    remove_abandoned(",
        "tests/envs/test_agent_command.py -k what_a_program_leaves",
    ),
    Mutation(
        "a killed trainer leaves its agents' programs", "envs/isolation/process_tree.py",
        "self.asked or os.getppid() != self._parent", "False", "tests/envs/test_agent_command.py -k killed_training",
    ),
    Mutation(
        "a program that kills its keeper leaves processes", "envs/agent.py",
        "if not self._ending:", "if False:", "tests/envs/test_agent_command.py -k kills_what_keeps_it",
    ),
    Mutation(
        "an agent's program gets every variable", "envs/agent.py",
        'if name in _PASSED_ON or name.startswith("LC_")', "if name",
        "tests/envs/test_agent_command.py -k what_a_program_gets",
    ),
    Mutation(
        "a key that is split between two writes is kept", "envs/isolation/process_tree.py",
        "sure = len(held) - (self._longest - 1)", "sure = len(held)",
        "tests/envs/test_agent_command.py -k no_part_of_a_secret",
    ),
    Mutation(
        "the folder of a running episode is removed", "envs/isolation/process_tree.py",
        "fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)", "pass", "tests/envs/test_agent_command.py -k nobody_holds",
    ),
    Mutation(
        "what a link in a folder points to gets other rights", "envs/isolation/process_tree.py",
        "one.is_dir(follow_symlinks=False)", "one.is_dir()", "tests/envs/test_agent_command.py -k nobody_holds",
    ),
    Mutation(
        "what a link beside the folders points to gets other rights", "envs/isolation/process_tree.py",
        "not stat.S_ISDIR(found.st_mode) or", "", "tests/envs/test_agent_command.py -k without_rights",
    ),
    Mutation(
        "a folder without rights stays", "envs/isolation/process_tree.py",
        "os.chmod(folder, 0o700)  # else one", "pass  # else one", "tests/envs/test_agent_command.py -k without_rights",
    ),
    Mutation(
        "the folder of another user is removed", "envs/isolation/process_tree.py",
        "found.st_uid != os.geteuid() or ", "", "tests/envs/test_agent_command.py -k another_user",
    ),
    Mutation(
        "folders in a program's folder are not moved to its top", "envs/isolation/process_tree.py",
        "waiting.append(moved)", "pass", "tests/envs/test_agent_command.py -k any_depth",
    ),
    Mutation(
        "an error of a keeper is lost", "envs/isolation/process_tree.py",
        "except Exception as error:  # such", "except OSError as error:  # such",
        "tests/envs/test_agent_command.py -k ends_the_keeper",
    ),
    Mutation(
        "an agent's option without effect is taken", "rollout/episode_options.py",
        "if len(agents) == len(pool.factories):", "if False:",
        "tests/trainers/test_agents_before_a_run.py -k without_effect",
    ),
    Mutation(
        "an option of another environment is refused beside an agent", "rollout/episode_options.py",
        "if len(agents) == len(pool.factories):", "if agents:",
        "tests/trainers/test_agents_before_a_run.py -k without_effect",
    ),
    Mutation(
        "an agent that changes every call's prompt goes unnoticed", "cli/check/plays.py",
        "2 * often[0][1] >= len(found)", "2 * often[0][1] < len(found)", "tests/test_cli_check_agents.py -k clock",
    ),
    Mutation(
        "an agent that is not repeatable goes unnoticed", "cli/check/plays.py",
        "if was != now:", "if len(was) != len(now):", "tests/test_cli_check_agents.py -k clock",
    ),
    Mutation(
        "an isolated program uses the network", "envs/isolation/levels.py",
        '"--unshare-all", "--unshare-user"', '"--unshare-user", "--unshare-pid"',
        "tests/envs/test_agent_isolation.py -k nothing_else",
    ),
    Mutation(
        "an isolated program reads what it was not given", "envs/isolation/levels.py",
        'for one in (path, os.path.realpath(path)):', 'for one in (path, os.path.realpath(path), "/"):',
        "tests/envs/test_agent_isolation.py -k nothing_else",
    ),
    Mutation(
        "a program is isolated where it cannot be", "envs/isolation/levels.py",
        "if chosen not in (BUBBLEWRAP, NONE):", "if False:",
        "tests/envs/test_agent_isolation.py -k refused",
    ),
    Mutation(
        "a killed process leaves the folders of its programs", "rollout/process_environment.py",
        "        remove_abandoned(tempfile.gettempdir(), child)", "        pass",
        "tests/trainers/test_agents_before_a_run.py -k takes_too_long",
    ),
    Mutation(
        "programs start in the event loop", "envs/agent.py",
        "await in_thread(keeper.start)", "keeper.start()",
        "tests/envs/test_agent_command.py -k outside_the_event_loop",
    ),
    Mutation(
        "a program that is cancelled while it starts goes on", "envs/agent.py",
        "if self._ending:  # which came", "if False:  # which came", "tests/envs/test_agent_command.py -k cancelled",
    ),
    Mutation(
        "a cancelled episode leaves its program", "envs/agent.py",
        "            keeper.end()\n", "            pass\n", "tests/envs/test_agent_command.py -k cancelled",
    ),
    Mutation(
        "a signal to the group ends the keeper alone", "rollout/process_environment.py",
        "signal.SIG_BLOCK, signal.valid_signals()", "signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM}",
        "tests/rollout/test_left_processes.py -k 'failed and its_group'",
    ),
    Mutation(
        "an environment that signals its group ends its neighbours", "rollout/process_environment.py",
        "os.setsid()  # an environment", "pass  # an environment", "tests/rollout/test_misbehaving.py -k only_processes",
    ),
    Mutation(
        "a signal to the trainer's group ends the server of its environments", "rollout/server_socket.py",
        "\nos.setsid()\n", "\n", "tests/rollout/test_left_processes.py -k signal_to_the",
    ),
    Mutation(
        "a program starts processes where no filter can be made", "envs/isolation/launcher.py",
        "_start_nothing()  # after", "pass  # after", "tests/envs/test_isolation.py -k weakest",
    ),
    Mutation(
        "a closed environment is killed before it exits", "rollout/process_environment.py",
        "self._connection.close()  # on which", "pass  # on which", "tests/rollout/test_left_processes.py -k as_long_as",
    ),
    Mutation(
        "environments are killed when the trainer exits", "rollout/process_environment.py",
        "process.join(max(", "max((", "tests/rollout/test_left_processes.py -k 'trainer and exit'",
    ),
    Mutation(
        "environments that are still held are killed when the trainer exits", "rollout/process_environment.py",
        "            connection.close()", "            pass", "tests/rollout/test_left_processes.py -k exit_with_it",
    ),
    Mutation(
        "a process whose closing is cut short is left", "rollout/process_environment.py",
        "finally:  # also when", "except ArithmeticError:  # also when",
        "tests/rollout/agents/test_faults.py -k in_processes",
    ),
    Mutation(
        "a name of another library is answered with the nearest alone", "config/other_names.py",
        'if here else nearest', 'if not here else nearest', "tests/test_other_names.py -k options",
    ),
    Mutation(
        "an adapter that runs beside the policy is trained", "trainers/arguments.py",
        "if active != [POLICY]:", "if POLICY not in active:", "tests/trainers/test_mistakes.py -k not_the_policy",
    ),
    Mutation(
        "the critic of an earlier trainer is not used", "adapters/loading.py",
        "        keep_critic(model, layers)", "        add_critic(model)",
        "tests/trainers/test_warm_start.py -k second_trainer",
    ),
    Mutation(
        "a trainer's unknown argument is not answered", "trainers/arguments.py",
        "if name not in parameters:", "if name in ():", "tests/test_other_names.py -k arguments",
    ),
    Mutation(
        "tokens that were added do not end an answer", "rollout/generators/transformers/decoding.py",
        "(len(tokenizer), settings", "(0, settings",
        "tests/rollout/test_decoding.py -k stop_strings",
    ),
    Mutation(
        "a killed trainer leaves the socket of its processes", "rollout/server_socket.py",
        "os.rmdir(", "str(", "tests/rollout/test_left_processes.py -k kill",
    ),
    Mutation(
        "a Hub that is silent is waited for without end", "checkpoints/hub.py",
        "follow_redirects=follow, timeout=SILENCE_SECONDS", "follow_redirects=follow, timeout=None",
        "tests/trainers/test_hub.py -k timeout",
    ),
    Mutation(
        "what the Hub answers is taken for no connection", "checkpoints/hub.py",
        "if isinstance(raised, HfHubHTTPError) and not _may_pass(raised):  # the Hub has refused", "if False:",
        "tests/trainers/test_hub.py -k refuses",
    ),
    Mutation(
        "a pushed checkpoint keeps another run's reference", "checkpoints/hub.py",
        'return [*self._patterns(path_in_repo), "rollout/*"]', "return None",
        "tests/trainers/test_hub.py -k file_of_another_run",
    ),
    Mutation(
        "a pushed checkpoint deletes what a user added", "checkpoints/hub.py",
        'return [*self._patterns(path_in_repo), "rollout/*"]', 'return ["*"]',
        "tests/trainers/test_hub.py -k user_added",
    ),
    Mutation(
        "errors of this machine are tried again", "checkpoints/hub.py",
        "isinstance(error, OSError) and error.errno in _NETWORK", "isinstance(error, OSError)",
        "tests/trainers/test_hub.py -k this_machine",
    ),
    Mutation(
        "an adapter deletes its base from the Hub", "checkpoints/hub.py",
        'if not any(folder.glob("model*.safetensors")):', "if False:", "tests/trainers/test_hub.py -k of_another_run",
    ),
    Mutation(
        "an unlisted reference is loaded", "checkpoints/integrity.py",
        "if folder in (REFERENCE, CRITIC):", "if False:", "tests/adapters/test_strangers.py -k does_not_list",
    ),
    Mutation(
        "notes beside a reference make a checkpoint unusable", "checkpoints/integrity.py",
        'return file == CONFIG or (not file.startswith(".") and file.endswith((".safetensors", ".bin")))', "return True",
        "tests/adapters/test_strangers.py -k does_not_list",
    ),
    Mutation(
        "an unlisted whole model is loaded in place of shards", "checkpoints/integrity.py",
        'if file in ("model.safetensors", "pytorch_model.bin"):', "if False:",
        "tests/adapters/test_strangers.py -k loader_prefers",
    ),
    Mutation(
        "nobody makes the branch of a push", "checkpoints/hub.py",
        "create_branch(name, branch=revision, token=token, exist_ok=True)", "return",
        "tests/trainers/test_hub.py -k branch",
    ),
    Mutation(
        "the last push has one attempt", "checkpoints/hub.py",
        'return retried(f"to {name} ({message!r})", lambda: attempt(staged))', "return attempt(staged)",
        "tests/trainers/test_hub.py -k tried_again",
    ),
    Mutation(
        "a push that failed is forgotten", "checkpoints/hub.py",
        "self.failures.append(", "str(", "tests/trainers/test_hub.py -k six_ways",
    ),
    Mutation(
        "templates may rewrite an answer", "rollout/chat/template_check.py",
        "if not rendered.startswith(kept + sampled.end):", "if not rendered.startswith(kept.split(sampled.text)[0]):",
        TEMPLATES,
    ),
    Mutation(
        "turn delimiters may differ from turn to turn", "rollout/chat/template_check.py",
        "delimited = rendered[len(kept) :] if delimited is None else delimited",
        "delimited = rendered[len(kept) :]", TEMPLATES,
    ),
    Mutation(
        "thinking is never sampled", "rollout/chat/template_check.py",
        "return opened, opened or (thinking and not _CLOSED.search(before))", "return opened, opened", TEMPLATES,
    ),
    Mutation(
        "results of tools follow a plain answer", "rollout/chat/renderer.py",
        'answer = self._call if messages[0]["role"] == "tool" and self._call else _ANSWER', "answer = _ANSWER", TEMPLATES,
    ),
    Mutation(
        "gpt-oss forgets its analysis", "rollout/chat/template_check.py",
        '("elif loop.last and not add_generation_prompt", "elif true"),', "", TEMPLATES,
    ),
    Mutation(
        "a sum of rewards forgets the weights of reward functions", "step/reward.py",
        "weighted = rewards * self.weights.to(rewards.device)\n        return", "weighted = rewards\n        return",
        "tests/trainers/test_reward_functions.py -k checkpoint",
    ),
    Mutation(
        "evaluation forgets the weights of reward functions", "step/reward.py",
        'columns = {"reward": self.totals(rewards)}', 'columns = {"reward": rewards.nansum(dim=1)}',
        "tests/trainers/test_reward_functions.py -k checkpoint",
    ),
    Mutation(
        "the best checkpoint is by the return alone", "trainers/evaluation.py",
        'metric = "reward" if by_reward else "return"', 'metric = "return"',
        "tests/trainers/test_reward_functions.py -k checkpoint",
    ),
    Mutation(
        "failed episodes are scored", "step/reward.py",
        "if not episode.stop_reason.failed]", "if episode.turns]", "tests/trainers/test_reward_functions.py -k not_scored",
    ),
    Mutation(
        "values go to the wrong episodes", "step/reward.py",
        "by_place = dict(zip(sound, values))", "by_place = dict(enumerate(values))",
        "tests/trainers/test_reward_functions.py -k not_scored",
    ),
    Mutation(
        "trimming forgets the multiple", "train_batch.py",
        "// (multiple or 1)) * (multiple or 1)", "// 1)", "tests/trainers/test_training_options.py -k multiple",
    ),
    Mutation(
        "what reward functions log leaks", "step/reward.py",
        "            means[name] = total / count\n        self.pending_metrics.clear()",
        "            means[name] = total / count",
        "tests/trainers/test_reward_functions.py -k loggers",
    ),
    Mutation(
        "an instance of one environment plays another", "rollout/environment_pool.py",
        "self._idle[self._names[episode]].append(environment)", "self._idle[next(iter(self.factories))].append(environment)",
        "tests/rollout/test_several_environments.py",
    ),
    Mutation(
        "every environment has the limits of all", "rollout/engine.py",
        "return self.limits if environment is None else self.environment_limits[environment]", "return self.limits",
        f"{MIXTURE} -k limits_of_the_conversation",
    ),
    Mutation(
        "the members of a group play different environments", "rollout/seeds.py",
        "name, row = (environments[group], None)", "name, row = (environments[place % len(environments)], None)",
        f"{MIXTURE} -k depends_on",
    ),
    Mutation(
        "the first groups of a batch play the first environment", "rollout/seeds.py",
        'drawn[random.permutation(np.searchsorted(ends[:-1], points, side="right"))]',
        'drawn[np.searchsorted(ends[:-1], points, side="right")]', f"{MIXTURE} -k every_share",
    ),
    Mutation(
        "an environment's share of a batch is never rounded up", "rollout/seeds.py",
        "(np.arange(count) + random.random())", "np.arange(count)", f"{MIXTURE} -k every_share",
    ),
    Mutation(
        "returns are normalized over all environments together", "objectives/advantages.py",
        "chosen = mask & (sets == one)[:, None]", "chosen = mask", f"{MIXTURE} -k normalized_within",
    ),
    Mutation(
        "reset gets the column that names the environment", "rollout/seeds.py",
        "{column: value for column, value in row.items() if column != COLUMN}", "dict(row)", f"{MIXTURE} -k rows_choose",
    ),
    Mutation(
        "results of two panels are compared", "evaluation/panels.py",
        "if first.panel.hash != other.panel.hash:", "if False:", f"{PANELS} -k not_comparable",
    ),
    Mutation(
        "results on a panel are compared however they were played", "evaluation/panels.py",
        "found = differing(SETTINGS)", "found = differing(())", f"{PANELS} -k not_comparable",
    ),
    Mutation(
        "episodes of a panel's results may be repeated or reordered", "evaluation/panels.py",
        "if (place := _first(keys, expected)) is not None:", "if False:", f"{PANELS} -k results_edited",
    ),
    Mutation(
        "a success is changed by hand in a panel's results", "evaluation/panels.py",
        'if content.get("digest") != sealed(content)["digest"]:', "if False:", f"{PANELS} -k changed_by_hand",
    ),
    Mutation(
        "seeds of a panel are chosen", "evaluation/panels.py",
        "if (place := _first(panel.seeds, derived)) is not None:", "if False:", f"{PANELS} -k panel_edited",
    ),
    Mutation(
        "an environment of a panel starts otherwise", "evaluation/panels.py",
        "if (place := _first(starts, panel.starts)) is not None:", "if False:", f"{PANELS} -k that_changed_is",
    ),
    Mutation(
        "the environment that another one wraps is no part of its version", "evaluation/panels.py",
        "(function, named, *_classes(made))", "(function, named)", f"{PANELS} -k that_changed_is",
    ),
    Mutation(
        "a panel of an environment that ignores its seed", "evaluation/panels.py",
        "if _PARTS[0] not in repeats:", "if False:", f"{PANELS} -k without_fixed",
    ),
    Mutation(
        "rows of a panel are in another order", "evaluation/panels.py",
        "(place := _first(hashes, panel.rows)) is not None:", "False:", f"{PANELS} -k rows_of",
    ),
    Mutation(
        "a panel whose starts were taken out is played", "evaluation/panels.py",
        "if begins != (panel.starts is not None) or begins != (_PARTS[0] in panel.repeats):", "if False:",
        f"{PANELS} -k taken_out",
    ),
    Mutation(
        "modules that an environment imports are no part of its version", "evaluation/panels.py",
        "waiting += _imported(name, Path(file).resolve(), found[name])", "pass", f"{PANELS} -k that_changed_is",
    ),
    Mutation(
        "installed libraries below a project are part of a panel", "evaluation/panels.py",
        '{"site-packages", "dist-packages"} & set(folder.parts) or not', "not", f"{PANELS} -k imports_from_its",
    ),
    Mutation(
        "an environment of a panel changes while it is played", "cli/eval/command.py",
        "            check_starts(panel, tasks[0].factory, tasks[0].rows)\n", "            pass\n", f"{PANELS} -k while_it",
    ),
    Mutation(
        "a history's source is no part of results on a panel", "cli/eval/command.py",
        'if not one.startswith("agile_trainers")})', "if not one})", f"{PANELS} -k history",
    ),
    Mutation(
        "a result is compared with its copy, and it is not said", "evaluation/panels.py",
        "if all(one.played == its.played for one, its in pairs):", "if False:", f"{PANELS} -k equal_episodes",
    ),
    Mutation(
        "other prompts on a panel are not named", "evaluation/panels.py",
        "sum(one.prompt != its.prompt for one, its in pairs)", "0", f"{PANELS} -k equal_episodes",
    ),
    Mutation(
        "models that are compared are tried when they are played", "cli/eval/command.py",
        "if len(models) > 1 or len(tasks) > 1:", "if False:", "tests/test_cli_eval.py -k before_the_first",
    ),
    Mutation(
        "environments of an evaluation are tried when they are played", "evaluation/policy.py",
        "        _tried_engine(model, tokenizer, pool, options, specs)\n", "        pass\n",
        "tests/test_cli_eval.py -k before_the_first",
    ),
    Mutation(
        "an environment without right answers is not told early", "cli/eval/command.py",
        "if lacks_reference(modules, trajectory, options.reference):", "if False:",
        "tests/test_cli_eval.py -k costs_no_other",
    ),
    Mutation(
        "an error on the way loses what was played", "cli/eval/command.py",
        "        if not played:\n", "        if True:\n", "tests/test_cli_eval.py -k on_the_way",
    ),
    Mutation(
        "warnings are shown for each policy", "cli/eval/command.py",
        "record.levelno != WARNING or seen", "True or seen",
        "tests/test_cli_eval.py -k on_the_way",
    ),
    Mutation(
        "a card that cannot be read is noticed after the episodes", "cli/eval/command.py",
        "        check_card(Path(options.model))\n", "        pass\n", "tests/test_cli_eval.py -k loses_no_episodes",
    ),
    Mutation(
        "a card that cannot be read hides the report", "cli/eval/command.py",
        "        except (ValueError, OSError) as error:\n            errors.append(error)\n",
        "        except (ValueError, OSError):\n            raise\n", "tests/test_cli_eval.py -k loses_no_episodes",
    ),
    Mutation(
        "an evaluation asks for longer answers than fit", "evaluation/policy.py",
        "    options.check_answers(settings.min_new_tokens)\n", "",
        "tests/trainers/test_evaluate_policy.py -k cannot_be_evaluated",
    ),
    Mutation(
        "a prompt of no tokens blames the environment", "rollout/environment_probe.py",
        "    if not length:\n", "    if False:\n", "tests/test_cli_check.py -k limits_and_templates",
    ),
    Mutation(
        "greedy evaluation samples", "evaluation/policy.py",
        "do_sample=sampling.do_sample and not greedy", "do_sample=sampling.do_sample",
        "tests/trainers/test_evaluate_policy.py -k of_the_trainer",
    ),
    Mutation(
        "evaluation of the base below an adapter", "evaluation/policy.py",
        "        policy = load_policy(saved, **init)\n", "        policy = load_policy(saved, **init).unload()\n",
        "tests/trainers/test_evaluate_policy.py -k of_the_trainer",
    ),
    Mutation(
        "policies that are compared share their sampling noise", "evaluation/results.py",
        "(seed, domain, 0, number, n, *own)", "(seed, domain, 0, number, n)",
        "tests/evaluation/test_comparison.py -k share_all_but",
    ),
    Mutation(
        "greedy repeats of a game counted as independent", "evaluation/results.py",
        "return [game if len(outcomes[game]) == 1 else start.unit for game, start in zip(games, starts)]",
        "return [start.unit for start in starts]", "tests/evaluation/test_comparison.py -k information",
    ),
    Mutation(
        "hidden chance counted as one game", "evaluation/results.py",
        "game if len(outcomes[game]) == 1 else start.unit", "game", "tests/evaluation/test_comparison.py -k hidden",
    ),
    Mutation(
        "an episode without a word on success is left out", "rollout/metrics.py",
        "rows = with_success(rows, known)", "rows = list(rows)", "tests/rollout/test_metrics.py",
    ),
    Mutation(
        "a member's failed episodes count for it", "populations/selection.py",
        "tuple(failed if value is None", "tuple(max(known) if value is None", SELECTION,
    ),
    Mutation(
        "a count in a file of a search is below zero", "adapters/folders.py",
        "{int: Count, float: NUMBER,", "{int: NUMBER, float: NUMBER,", "tests/adapters/test_hostile_folders.py -k lineage",
    ),
    Mutation(
        "the winner is replayed on the episodes that chose it", "populations/members.py",
        "self._evaluate(trainer, evaluation, HELD_OUT)", "self._evaluate(trainer, evaluation)",
        POPULATION + " -k winner_is_the_best",
    ),
    Mutation(
        "failed episodes are left out of an evaluation", "evaluation/results.py",
        "counted += [(lowest[", "_ = [(lowest[", "tests/evaluation/test_counted.py",
    ),
    Mutation(
        "values that have not come up are impossible", "evaluation/statistics.py",
        "p_value = max(student, (1 + int(beyond)) / (1 + DRAWS)) if mean else 1.0", "p_value = student if mean else 1.0",
        "tests/evaluation/test_statistics.py -k two_values",
    ),
    Mutation(
        "the unit that has not come up is at the wrong end", "evaluation/statistics.py",
        "low[first : first + rows] = (total + added * ends[0]) / weight",
        "low[first : first + rows] = (total + added * ends[1]) / weight",
        "tests/evaluation/test_statistics.py -k clopper",
    ),
    Mutation(
        "an interval of successes without the correlation of pairs", "evaluation/statistics.py",
        "- 2 * correlation * a * b", "", "tests/evaluation/test_statistics.py -k newcombe",
    ),
    Mutation(
        "a verdict on few returns of unknown range", "evaluation/statistics.py",
        "if number < FEWEST_WITHOUT_LIMITS:", "if number < FEWEST_UNITS:",
        "tests/evaluation/test_statistics.py -k none_decides",
    ),
    Mutation(
        "an interval that breaks up the units", "evaluation/statistics.py",
        "return np.bincount(index, numbers), np.bincount(index).astype(float)",
        "return numbers, np.ones(len(numbers))", "tests/evaluation/test_statistics.py -k whole_units",
    ),
    Mutation(
        "pass@k of the first k attempts alone", "evaluation/statistics.py",
        "return 1.0 - math.comb(attempts - successes, k) / math.comb(attempts, k)",
        "return 1.0 - (1 - successes / attempts) ** k", "tests/evaluation/test_statistics.py -k pass_at_k",
    ),
    Mutation(
        "a second evaluation adds rows to the card", "checkpoints/model_card.py",
        "one.get(\"args\")) not in new", "one.get(\"args\")) not in []",
        "tests/test_cli_eval.py -k any_card",
    ),
    Mutation(
        "turn metrics over episodes that ended before", "step/credit.py",
        "kept = values[mask].float()", "kept = values[mask].float() * mask.float().mean()",
        "tests/trainers/test_turn_metrics.py -k reached",
    ),
    Mutation(
        "an update has two rows in the card", "checkpoints/model_card.py",
        "if step or BEFORE not in baselines]", "]", "tests/trainers/test_hub.py -k one_row",
    ),
    Mutation(
        "rows of an evaluation in order of the processes", "evaluation/results.py",
        "sorted(gather_object(list(zip(places, values, strict=True))), key=lambda one: one[0])",
        "gather_object(list(zip(places, values, strict=True)))", "tests/trainers/test_two_processes.py",
    ),
    Mutation(
        "a changed adapter is not moved", "sampling/served_policy.py",
        "if digest(weights) == before[1]:", "if weights:", "tests/trainers/test_served_policy.py -k changed_after",
    ),
    Mutation(
        "an adapter moved again for the first rollout", "sampling/served_policy.py",
        "if digest(weights) == before[1]:", "if not weights:", "tests/trainers/test_served_policy.py -k once_for_each",
    ),
    Mutation(
        "the user's own arguments are completed", "config/multi_turn.py",
        "        args = copy.copy(self)\n        args._iterate_once()",
        "        args = self\n        args._iterate_once()",
        "tests/trainers/test_reward_functions.py -k makes_two_trainers",
    ),
    Mutation(
        "an algorithm of the user's is named after TRL's", "trainers/trainer.py",
        "cls._name = cls.__name__", "pass", "tests/trainers/test_algorithms.py",
    ),
    Mutation(
        "options of a user's algorithm are taken for TRL's", "cli/parser.py",
        'not in ("trl", "transformers")', 'in ("agile_trainers",)', "tests/trainers/test_algorithms.py",
    ),
    Mutation(
        "MaxRL divides by the deviation", "objectives/advantages.py",
        "torch.where(differ, value / mean, 0.0)", "torch.where(differ, value / std, 0.0)",
        "tests/objectives/test_advantages.py -k mean_scale",
    ),
    Mutation(
        "runs of different options are one curve in the viewer", "viewer/parts.py",
        "for name, value in options.items() if name not in _SEEDS}", "for name, value in ()}", f"{LABELS} -k seed_alone",
    ),
    Mutation(
        "two runs of one seed are one curve in the viewer", "viewer/parts.py",
        "key = alike, seen[alike, run.info[\"seed\"]]", "key = alike", f"{LABELS} -k seed_alone",
    ),
    Mutation(
        "a population's page opens at the member that lived longest", "viewer/parts.py",
        "not member[\"winner\"], -member", "-member", f"{LABELS} -k winner",
    ),
    Mutation(
        "the viewer counts observations as tokens that were not clipped", "viewer/parts.py",
        "if value is not None]\n    known = [", "]\n    known = [", f"{LABELS} -k figures",
    ),
    Mutation(
        "the viewer does not count episodes without a report of success", "viewer/parts.py",
        "else bool(success) and not failed", "else success and not failed",
        f"{VIEWER} -k those_of_the_log",
    ),
    Mutation(
        "failed episodes of training are unsuccessful in the viewer", "viewer/parts.py",
        '(failed and phase == "train")', "False", f"{VIEWER} -k those_of_the_log",
    ),
    Mutation(
        "failed episodes do not count in evaluations in the viewer", "viewer/parts.py",
        '(failed and phase == "train")', "failed", f"{VIEWER} -k those_of_the_log",
    ),
    Mutation(
        "an episode that reports success before it fails is a success in the viewer", "viewer/parts.py",
        "else bool(success) and not failed", "else bool(success)", f"{VIEWER} -k those_of_the_log",
    ),
    Mutation(
        "policies of one evaluation count success apart in the viewer", "viewer/parts.py",
        "run.name[: len(_EVALUATED)]", "run.name", f"{VIEWER} -k count_success_alike",
    ),
    Mutation(
        "one evaluation's victories are another's defeats in the viewer", "viewer/parts.py",
        "run.name[: len(_EVALUATED)]", "None", f"{VIEWER} -k count_success_alike",
    ),
    Mutation(
        "a failed episode of an evaluation has the return of its last turn in the viewer", "viewer/page/data.js",
        'if (!FAILED.has(this.get("stop", row))) return', "if (true) return", f"{VIEWER} -k those_of_the_log",
    ),
    Mutation(
        "a failed episode counts with the lowest return of other environments in the viewer", "viewer/page/data.js",
        "(own.length ? own : sound).reduce", "sound.reduce", f"{VIEWER} -k those_of_the_log",
    ),
    Mutation(
        "evaluations of one step are one in the viewer", "viewer/parts.py",
        'named[1] if named else "eval", int(named[2] or 1) if named else 1', '"eval", 1',
        f"{VIEWER} -k evaluations_of_one_step",
    ),
    Mutation(
        "a second evaluation of a step has the first one's address in the viewer", "viewer/page/data.js",
        "${step}${other && `-${other}`}", "${step}", f"{VIEWER} -k evaluations_of_one_step",
    ),
    Mutation(
        "a curve of the viewer mixes evaluations", "viewer/page/data.js",
        "evaluation === sections[0].evaluation", "true", f"{VIEWER} -k evaluations_of_one_step",
    ),
    Mutation(
        "groups of two batches have one address in the viewer", "viewer/page/data.js",
        "this.sectionOf(row).batches > 1 ?", "false ?", f"{VIEWER} -k groups_of_several_batches",
    ),
    Mutation(
        "the viewer rounds small rewards to 0", "viewer/parts.py",
        'round(value, 5) if abs(value) >= 1 else float(f"{value:.5g}")', "round(value, 5)", f"{VIEWER} -k small_numbers",
    ),
    Mutation(
        "images of replaced groups are not written", "monitor/rollout_log.py",
        "written = [*played.trajectories, *(one for _, one in replaced)]", "written = played.trajectories",
        "tests/trainers/test_image_runs.py -k images_of_replaced",
    ),
    Mutation(
        "the search of the viewer reads the beginning of texts", "viewer/parts.py",
        "*map(_whole, turns)", "*map(_cut, turns)", f"{LABELS} -k searched",
    ),
    Mutation(
        "the viewer answers a foreign DNS name", "viewer/server.py",
        'if self.headers.get("Host", "").lower() not in names:', "if False:", f"{VIEWER} -k secret_alone",
    ),
    Mutation(
        "the viewer answers without its secret", "viewer/server.py",
        "if not secrets.compare_digest(secret.encode(), self.server.secret.encode()):", "if False:",
        f"{VIEWER} -k secret_alone",
    ),
    Mutation(
        "a part of the viewer gets another number when a file is added", "viewer/server.py",
        "self._numbers.setdefault(known, len(self._numbers))", "len(part_of)", f"{VIEWER} -k follows",
    ),
    Mutation(
        "a long run loses its last step in the viewer", "viewer/parts.py",
        "{0, count - 1}", "{0, min(1, count - 1)}", f"{VIEWER} -k kept_are_even",
    ),
    Mutation(
        "a turn's advantage in the viewer counts observations", "viewer/parts.py",
        "return sum(known) / len(known) if known else None",
        'return sum(known) / (turn["end"] - turn["start"]) if known else None',
        f"{VIEWER} -k advantage_of_a_turn",
    ),
    Mutation(
        "a task's counts never age", "step/task_sampling.py",
        "self._observed[task] * _DECAY + 1", "self._observed[task] + 1", f"{TASKS}::test_weights_by_hand",
    ),
    Mutation(
        "tasks without advantage are drawn more", "step/task_sampling.py",
        "return (self._informative + 1) / (self._observed + 2)",
        "return (self._observed - self._informative + 1) / (self._observed + 2)", f"{TASKS}::test_adaptive_rows",
    ),
    Mutation(
        "evenly spaced draws meet tasks in the order of rows", "rollout/seeds.py",
        "drawn = random.permutation(np.flatnonzero(weights))", "drawn = np.flatnonzero(weights)",
        f"{TASKS} -k regular_order",
    ),
    Mutation(
        "episodes are left out by the advantage of a token", "step/batch.py",
        "        has_advantage=live,\n",
        "        has_advantage=(spread.abs() > args.zero_advantage_eps).any(dim=1),\n",
        "tests/trainers/test_skip_zero_advantage.py -k whatever_its_length",
    ),
    Mutation(
        "padded passes are split by the longest row, not by their columns", "step/token_batches.py",
        "columns = max(width, own_width) + max(length, own_length)", "columns = own_width + own_length",
        "tests/trainers/test_passes.py -k budget",
    ),
    Mutation(
        "rows that share most of their tokens are read twice on a CPU", "step/token_batches.py",
        "fast is None or 2 * common > length", "fast is None", "tests/trainers/test_passes.py -k stay_together",
    ),
    Mutation(
        "a pass that is split off as packed is padded", "step/token_batches.py",
        "if len(rows) == 1 or packer.pays(part, rows):", "if True:", "tests/trainers/test_passes.py -k does_not_pay",
    ),
    Mutation(
        "a group that replaces another has its seed and noise", "step/draws.py",
        "offset=attempt * self._groups,", "offset=0,", f"{TASKS}::test_zero_advantage_groups_are_replaced",
    ),
    Mutation(
        "credit of the rewards before the penalty is reused", "step/batch.py",
        'read is not None or weights is not None or self._args.kl_placement == "reward":',
        "read is not None or weights is not None:",
        "tests/trainers/test_kl_placement.py -k reused",
    ),
    Mutation(
        "a group that replaces another keeps its reward", "step/play.py",
        "played.rewards[places] = part[: len(places)]", "pass", f"{TASKS}::test_zero_advantage_groups_are_replaced",
    ),
    Mutation(
        "the update trains on the groups that were replaced", "step/play.py",
        "played.batch = self._batch(played.trajectories, played.rewards)\n        # The whole",
        "self._batch(played.trajectories, played.rewards)\n        # The whole",
        f"{TASKS}::test_zero_advantage_groups_are_replaced",
    ),
    Mutation(
        "groups with an advantage are replaced", "step/play.py",
        "again = played.judged.zero.nonzero()", "again = (~played.judged.zero).nonzero()",
        f"{TASKS}::test_zero_advantage_groups_are_replaced",
    ),
    Mutation(
        "credit is computed again after groups were replaced", "step/batch.py",
        "if judged is None or read is not None", "if True or read is not None",
        f"{TASKS}::test_credit_is_computed_once_for_each_time_that_groups_are_played",
    ),
    Mutation(
        "rewards of replaced groups go to another process", "step/play.py",
        "zip(parts, by_rank, strict=True)", "zip(parts.flip(0), by_rank, strict=True)",
        "tests/trainers/test_two_processes.py -k tasks",
    ),
    Mutation(
        "a checkpoint forgets the counts of tasks", "trainers/setup.py",
        'parts.rollouts.restore(states.get("tasks", {}))', "parts.rollouts.restore({})",
        "tests/trainers/test_checkpoint.py::test_killed_at_every_step -k tasks",
    ),
    Mutation(
        "a loss of one's own drops the router's without a word", "trainers/setup.py",
        "if own_loss is not None:", "if False:",
        f"{OWN_LOSS}::test_the_routers_auxiliary_loss_is_refused",
    ),
    Mutation(
        "packed attention of a model in double precision is summed in single", "packing/attention.py",
        "wide = torch.promote_types(q.dtype, torch.float32)", "wide = torch.float32", PACKED_ATTENTION,
    ),
    Mutation(
        "a path's tokens are scored at their own node", "packing/forward.py",
        "before = paths.cells[row, column - (shape[1] - paths.cells.size(1))] - 1",
        "before = paths.cells[row, column - (shape[1] - paths.cells.size(1))]", f"{FORESTS} -k every_call_once",
    ),
    Mutation(
        "a part of an episode weighs as much as the whole", "step/token_batches.py",
        'if one.tokens is None or loss_type not in ("grpo", "sapo"):', "if True:", f"{FORESTS} -k every_call_once",
    ),
    Mutation(
        "an episode's ratio is computed of a part of it", "step/token_batches.py",
        'or self._args.importance_sampling_level == "sequence"', "or False", f"{FORESTS} -k every_call_once",
    ),
    Mutation(
        "scores of a later pass replace those of an earlier", "step/log_probs.py",
        'if "places" in part:', "if False:", f"{FORESTS} -k every_call_once",
    ),
    Mutation(
        "values of a later pass replace those of an earlier", "step/critic.py",
        "torch.where(paths.has(positions), values.detach(), read[rows])", "values.detach()", f"{FORESTS} -k own_prompt",
    ),
    Mutation(
        "the value loss counts turns that a pass does not read", "train_batch.py",
        "copy.turn_columns[name] = value * turns[:, 1:]", "copy.turn_columns[name] = value", f"{FORESTS} -k own_prompt",
    ),
    Mutation(
        "a state of several paths is read at the action", "rollout/collate.py",
        "batch.state_positions[row, k] = first - 1", "batch.state_positions[row, k] = first", f"{FORESTS} -k own_prompt",
    ),
    Mutation(
        "the last of several calls that go on is the next", "rollout/collate.py",
        "for k, parent in reversed(list(enumerate(trajectory.parents))):", "for k, parent in enumerate(trajectory.parents):",
        "tests/rollout/test_forest.py",
    ),
    Mutation(
        "the first of equal calls is gone on from", "types.py",
        "key=lambda i: (lasts[i], i), default=None", "key=lambda i: (lasts[i], -i), default=None",
        "tests/rollout/test_forest.py",
    ),
    Mutation(
        "groups of calls on the side are compared by index", "algorithms/grpo.py",
        "by_turn = linear.repeat_interleave(self.num_generations)[:, None]",
        "by_turn = torch.ones_like(linear).repeat_interleave(self.num_generations)[:, None]", f"{FORESTS} -k by_trajectory",
    ),
    Mutation(
        "no next call of other processes", "step/credit.py",
        "torch.where(inputs.following < 0, inputs.rewards.size(1), inputs.following)",
        "torch.full_like(inputs.following, inputs.rewards.size(1))", f"{FORESTS} -k own_prompt",
    ),
    Mutation(
        "an empty pass counts in the metrics", "train_batch.py",
        "copy.completion_mask[:, :2] = 1", "pass", "tests/trainers/test_paths_runs.py -k two_processes",
    ),
    Mutation(
        "connections take all files of the process", "rollout/agents/server.py",
        "if len(server.connections) < most:", "if True:", f"{SERVER} -k leave_files",
    ),
    Mutation(
        "an environment that Ctrl-C ends is waited for and left open", "rollout/environment_pool.py",
        "            if inline:\n                self._end(call)\n", "", "tests/rollout/test_stepping.py -k ctrl_c",
    ),
    Mutation(
        "an isolated program holds any number of connections", "envs/isolation/process_tree.py",
        "while room.acquire():", "while True:", "tests/envs/test_agent_isolation.py -k few_connections",
    ),
    Mutation(
        "each request of an isolated program waits for 40 ms", "envs/isolation/process_tree.py",
        "for one in (client, endpoint):  # else", "for one in (endpoint,):  # else",
        "tests/envs/test_agent_isolation.py -k in_parts",
    ),
    Mutation(
        "a client that hangs up cancels the answer", "rollout/agents/server.py",
        "self._exchange.abandoned(key, ticket)\n            raise",
        "ticket.answer.cancel()\n            raise",
        SERVER,
    ),
    Mutation(
        "an answer that nobody read counts as delivered", "rollout/agents/server.py",
        "if connection is None or connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):",
        "if connection is None:",
        SERVER,
    ),
    Mutation(
        "an answer counts as delivered while it waits in this process", "rollout/agents/server.py",
        "request.transport.set_write_buffer_limits(high=0)",
        "pass",
        "tests/rollout/agents/test_server.py -k last_byte",
    ),
    Mutation(
        "a client that hangs up is not noticed", "rollout/agents/server.py",
        "handler_cancellation=True",
        "handler_cancellation=False",
        SERVER,
    ),
    Mutation(
        "a second answer follows the one that was begun", "rollout/agents/server.py",
        "if request.writer.output_size:", "if False:", "tests/rollout/agents/test_server.py -k closes_the_connection",
    ),
    Mutation(
        "a connection whose client does not read is never closed", "rollout/agents/server.py",
        "connection.abort()",
        "connection.close()",
        "tests/rollout/agents/test_server.py -k does_not_read",
    ),
    Mutation(
        "an agent's episode starts from the prompt that sorts first", "rollout/agents/episode.py",
        "[one for one in samples if one.begins] or samples",
        "samples",
        "tests/rollout/agents/test_episode.py -k starts_from",
    ),
    Mutation(
        "bytes of a part of a character are those of its text", "rollout/agents/dialects/base.py",
        "if token.part is None else token.part)",
        "if True else token.part)",
        "tests/rollout/agents/test_episode.py -k part_of_a_character",
    ),
    Mutation(
        "a reward function reads the call whose prompt sorts last", "types.py",
        "parents, k, found = self.parents, self.last, list[int]()",
        "parents, k, found = self.parents, len(self.turns) - 1, list[int]()",
        "tests/rollout/agents/test_episode.py -k asked_last",
    ),
    Mutation(
        "the answer of a client that hung up is the last one", "rollout/agents/episode.py",
        "heard = [one for one in samples if one.asked.delivered or not one.asked.abandoned] or samples",
        "heard = samples",
        "tests/rollout/agents/test_episode.py -k asked_last",
    ),
    Mutation(
        "the last of calls in flight together is that of the last request", "rollout/agents/episode.py",
        "if one.asked.answered > last)",
        'if one.info["number"] == last)',
        "tests/rollout/agents/test_episode.py -k does_not_depend_on_time",
    ),
    Mutation(
        "a stop string of another conversation is in the prompt", "rollout/agents/episode.py",
        "if one.choice is not None and one.choice.stop is None]",
        "if one.choice is not None]",
        "tests/rollout/agents/test_episode.py -k stays_out",
    ),
    Mutation(
        "an agent that goes on after a refusal counts as cut", "rollout/agents/episode.py",
        "if self._limited.get(code, -1) > last)",
        "if code in self._limited)",
        "tests/rollout/agents/test_episode.py -k goes_on_after",
    ),
    Mutation(
        "every call of a conversation is a demonstration", "evaluation/scripted_policies.py",
        "if not any(_goes_on(later, call) for later in calls[place + 1 :]):",
        "if True:",
        "tests/rollout/agents/test_scripted_policies.py -k every_call",
    ),
    Mutation(
        "a scripted policy sees no earlier answers", "evaluation/scripted_policies.py",
        "self._received.conversation(request)", "pass",
        "tests/rollout/agents/test_scripted_policies.py -k goes_on",
    ),
    Mutation(
        "a question to a judge is a demonstration", "evaluation/scripted_policies.py",
        "        if request.model == POLICY:", "        if True:",
        "tests/rollout/agents/test_scripted_policies.py -k no_demonstration",
    ),
    Mutation(
        "scripted policies answer what training refuses", "evaluation/scripted_policies.py",
        "            check_request(request, self.agent)", "            pass",
        "tests/rollout/agents/test_scripted_policies.py -k no_demonstration",
    ),
    Mutation(
        "policies of agents draw without the seed", "evaluation/scripted_policies.py",
        'random.Random(f"player {seed}")',
        "random.Random()",
        "tests/rollout/agents/test_scripted_policies.py -k by_the_seed",
    ),
    Mutation(
        "a body of any size is read", "rollout/agents/server.py",
        "client_max_size=self._max_body",
        "client_max_size=2**40",
        SERVER,
    ),
    Mutation(
        "a body is read before the key", "rollout/agents/server.py",
        "others = self._exchange.models(key)",
        "await self._body(request)\n        others = self._exchange.models(key)",
        SERVER,
    ),
    Mutation(
        "the key is in the log", "rollout/agents/server.py",
        "record.exc_info = None",
        "pass",
        SERVER,
    ),
    Mutation(
        "our key is sent to another endpoint", "rollout/agents/server.py",
        'headers |= {"Authorization": f"Bearer {endpoint.api_key}", "x-api-key": endpoint.api_key}',
        'headers |= {"x-api-key": _key(request)}',
        SERVER,
    ),
    Mutation(
        "a body that is no gzip is an error of the endpoint", "rollout/agents/server.py",
        "except web.RequestPayloadError as error:", "except ZeroDivisionError as error:",
        f"{SERVER} -k headers_say",
    ),
    Mutation(
        "a program's key sets its reward", "rollout/agents/requests.py",
        'self._find(key, "reward_key")', "self._find(key)",
        "tests/rollout/agents/test_faults.py -k own_reward",
    ),
    Mutation(
        "a cut answer of another endpoint ends as if it were whole", "rollout/agents/server.py",
        "if ours.prepared:",
        "if ours.prepared and await ours.write_eof() is None:\n                return ours\n            if ours.prepared:",
        SERVER,
    ),
    Mutation(
        "a refusal is sent again", "rollout/agents/server.py",
        '"x-should-retry": "false"',
        '"x-should-retry": "true"',
        SERVER,
    ),
    Mutation(
        "a token of the user's environment is taken for the key", "rollout/agents/server.py",
        'key = request.headers.get("x-api-key") or (token.strip() if scheme.lower() == "bearer" else "")',
        'key = token.strip() or request.headers.get("x-api-key")',
        SERVER,
    ),
    Mutation(
        "a deep body ends the request with the stack", "rollout/agents/dialects/base.py",
        "for _ in range(deepest + 1):",
        "for _ in range(10**9):",
        DIALECTS,
    ),
    Mutation(
        "half a surrogate pair reaches the tokenizer", "rollout/agents/dialects/base.py",
        'if "\\\\u" in text:',
        "if False:",
        DIALECTS,
    ),
    Mutation(
        "an infinite number reaches the settings", "rollout/agents/dialects/base.py",
        "parse_float=_finite",
        "parse_float=float",
        DIALECTS,
    ),
    Mutation(
        "true is a number", "rollout/agents/dialects/base.py",
        "not isinstance(value, bool) and abs",
        "abs",
        DIALECTS,
    ),
    Mutation(
        "parts of a text are joined by a line", "envs/images.py",
        'else "".join(part["text"] for part in found)',
        'else "\\n".join(part["text"] for part in parts)',
        IMAGE_ENVIRONMENTS,
    ),
    Mutation(
        "arguments stay text", "rollout/agents/dialects/base.py",
        "arguments = value if isinstance(value, dict) else arguments",
        "pass",
        DIALECTS,
    ),
    Mutation(
        "a part is left out in silence", "rollout/agents/dialects/base.py",
        "    if kind not in images:\n",
        "    if kind not in images:\n        return {'type': 'text', 'text': ''}\n",
        DIALECTS,
    ),
    Mutation(
        "a forced tool is left out in silence", "rollout/agents/dialects/chat.py",
        'constraints["tool_choice"] = choice',
        "pass",
        DIALECTS,
    ),
    Mutation(
        "a forced form is left out in silence", "rollout/agents/dialects/responses.py",
        'constraints["response_format"] = form',
        "pass",
        DIALECTS,
    ),
    Mutation(
        "parts of a message are one line", "rollout/agents/dialects/base.py",
        'return "\\n".join(part["text"]', 'return "".join(part["text"]', f"{DIALECTS} -k are_lines",
    ),
    Mutation(
        "one call at a time is asked for in vain, in silence", "rollout/agents/dialects/base.py",
        'in (None, True) else {"parallel_tool_calls": False}', "in (None, True) else {}", f"{DIALECTS} -k no_effect",
    ),
    Mutation(
        "calls of one response are several messages", "rollout/agents/dialects/responses.py",
        "            if not calling:\n",
        "            if True:\n",
        DIALECTS,
    ),
    Mutation(
        "calls after results join the answer before them", "rollout/agents/dialects/responses.py",
        "calling = False\n        elif",
        "pass\n        elif",
        DIALECTS,
    ),
    Mutation(
        "instructions are kept for the next answer", "rollout/agents/requests.py",
        "asked.request.messages[asked.request.instructed :]",
        "asked.request.messages",
        "tests/rollout/agents/test_episode.py -k instructions",
    ),
    Mutation(
        "an error of ours in an agent's request ends the rollout", "rollout/agents/episode.py",
        '        except Exception as error:  # one of ours',
        '        except ZeroDivisionError as error:  # one of ours',
        "tests/rollout/agents/test_episode.py -k error_of_ours",
    ),
    Mutation(
        "a judge's long prompt cuts the episode", "rollout/agents/episode.py",
        'if ticket.request.model == POLICY:',
        'if True:',
        "tests/rollout/agents/test_episode.py -k judge_that_is_too_long",
    ),
    Mutation(
        "the user's interrupt is taken for the agent's error", "rollout/agents/episode.py",
        'if raised is not error:',
        'if False:',
        "tests/rollout/agents/test_episode.py -k users_interrupt",
    ),
    Mutation(
        "an echo keeps the ids of another conversation's answer", "rollout/agents/episode.py",
        'chosen = min(same or whole,',
        'chosen = min(whole,',
        "tests/rollout/agents/test_episode.py -k own_ids",
    ),
    Mutation(
        "1.0 and 1 are different arguments", "rollout/agents/episode.py",
        'return int(value) if isinstance(value, float) and value.is_integer() else value',
        'return value',
        "tests/rollout/agents/test_episode.py -k whole_number",
    ),
    Mutation(
        "a request that overtakes the end of its episode is sampled", "rollout/agents/rollout.py",
        'if outcome.method == "call":\n                refuse_request(value, over())',
        'if outcome.method == "call":\n                pass',
        "tests/rollout/agents/test_faults.py -k overtakes",
    ),
    Mutation(
        "a request of an interrupted rollout waits for the next one", "rollout/agents/rollout.py",
        '        self._server.__exit__(*error)\n        self._refuse_posted()',
        '        self._server.__exit__(*error)',
        "tests/rollout/agents/test_faults.py -k between_the_end",
    ),
    Mutation(
        "a header that is no text reaches the episode", "rollout/agents/server.py",
        '.encode(errors="backslashreplace").decode()',
        '',
        "tests/rollout/agents/test_faults.py -k faults_of_some",
    ),
    Mutation(
        "the key goes to a proxy", "envs/agent.py",
        'urllib.request.ProxyHandler({})',
        'urllib.request.ProxyHandler()',
        "tests/rollout/agents/test_server.py -k proxy",
    ),
    Mutation(
        "a call with NaN is delivered, and ends its stream", "rollout/agents/episode.py",
        'strict_json(json.dumps(call.arguments))',
        'json.dumps(call.arguments)',
        "tests/rollout/agents/test_episode.py -k could_send_back",
    ),
    Mutation(
        "what opens an answer is written twice where a conversation forks", "rollout/chat/renderer.py",
        'for marked in (*map(after, openings), alone):',
        'for marked in ():',
        "tests/rollout/test_spliced_templates.py -k glm4moe",
    ),
    Mutation(
        "a conversation is rendered once for each answer", "rollout/chat/renderer.py",
        "if not rewrites and role not in openings:",
        "if False:",
        "tests/rollout/test_spliced_templates.py -k long_conversation",
    ),
    Mutation(
        "roles are checked anew at each length of a conversation", "rollout/chat/renderer.py",
        "if shapes[-3:] != [shape] * 3:",
        "if True:",
        "tests/rollout/test_spliced_templates.py -k long_conversation",
    ),
    Mutation(
        "an answer's place is read where the template opens several", "rollout/chat/renderer.py",
        "begin = whole.index(opening, start) + len(opening)",
        "begin = whole.index(opening, start)",
        "tests/rollout/test_spliced_templates.py -k qwen3",
    ),
    Mutation(
        "a tool's result is left out where a template writes it after fields alone", "rollout/chat/renderer.py",
        'return pieces if self._writes_results(marked) else None',
        'return pieces',
        "tests/rollout/agents/test_agent_templates.py -k gemma4_v5",
    ),
    Mutation(
        "calls of a training template stay text", "rollout/chat/renderer.py",
        'parser.chat_template = original_of(self.chat_template)',
        'pass',
        "tests/rollout/agents/test_agent_templates.py -k glm4moe_training",
    ),
    Mutation(
        "all episodes wait until megabytes are encoded", "rollout/agents/episode.py",
        "if characters > self.limits.max_model_length * longest:", "if False:",
        "tests/rollout/agents/test_episode.py -k megabytes",
    ),
    Mutation(
        "settings of megabytes are recorded", "rollout/agents/requests.py",
        "value if len(texts[name]) <= _LONGEST_SETTING else", "value if True else",
        "tests/rollout/agents/test_episode.py -k megabytes",
    ),
    Mutation(
        "further templates of the Hub are not tried", "adapters/untrusted.py",
        "else [find(name) for name in _more_templates(model, revision)]", "else []",
        "tests/adapters/test_strangers.py -k template_of_a_repository",
    ),
    Mutation(
        "megabytes of tools are no part of a prompt", "rollout/agents/episode.py",
        "yield from _json_characters(tools)", "yield 0",
        "tests/rollout/agents/test_episode.py -k megabytes",
    ),
    Mutation(
        "megabytes of digits are one number each", "rollout/agents/episode.py",
        "item.bit_length() * 3 // 10 if isinstance(item, int) else 0", "0",
        "tests/rollout/agents/test_episode.py -k megabytes",
    ),
    Mutation(
        "a request has any number of stop strings", "rollout/agents/dialects/base.py",
        "if len(items) > MOST_STOPS:", "if False:", DIALECTS,
    ),
    Mutation(
        "an activity that began anew counts from there", "rollout/environment_pool.py",
        "            if not self._active:\n                self._since", "            if True:\n                self._since",
        "tests/rollout/test_busy.py",
    ),
    Mutation(
        "what went on before counts again", "rollout/environment_pool.py",
        "                self._since = now\n", "", "tests/rollout/test_busy.py",
    ),
    Mutation(
        "a call that was given up keeps environments busy", "rollout/environment_pool.py",
        "        del self._running[call.episode]\n        self.busy.end(call)\n",
        "        del self._running[call.episode]\n", "tests/rollout/test_busy.py",
    ),
    Mutation(
        "a call that was answered keeps environments busy until someone looks", "rollout/environment_pool.py",
        "            self.busy.end(call)\n            self._answers", "            self._answers",
        "tests/rollout/test_busy.py",
    ),
    Mutation(
        "a sampler elsewhere is busy only while this process asks it", "rollout/rollout.py",
        "sampling.set(self, tells and pending)", "sampling.end(self)", "tests/rollout/test_busy.py",
    ),
    Mutation(
        "a sampler of this process is busy while it waits for environments", "rollout/rollout.py",
        "                if not tells:\n                    sampling.end(self)\n", "", "tests/rollout/test_busy.py",
    ),
    Mutation(
        "a policy that learns from an old sampler is warned", "evaluation/diagnosis.py",
        'first is None or history.rose("reward")', "first is None",
        DIAGNOSIS,
    ),
    Mutation(
        "few episodes that count are enough for an old sampler", "evaluation/diagnosis.py",
        "drift <= TOO_FAR or share >= TOO_FEW", "share >= TOO_FEW", DIAGNOSIS,
    ),
    Mutation(
        "a coroutine that blocks lets all later ones time out", "rollout/environment_pool.py",
        "self._loop.blocked():", "False:",
        "tests/rollout/agents/test_faults.py -k blocks_the_others",
    ),
    Mutation(
        "the last limit of two counts", "rollout/agents/dialects/chat.py",
        "max_tokens=min((limit",
        "max_tokens=max((limit",
        DIALECTS,
    ),
    Mutation(
        "a stream leaves the arguments of calls out", "rollout/agents/dialects/chat.py",
        'yield delta(index, tool_calls=[{"index": number, "function": {"arguments": call.text}}])',
        "pass",
        DIALECTS,
    ),
    Mutation(
        "a stream of messages gives each call the first one's arguments", "rollout/agents/dialects/messages.py",
        "tool_calls[index - len(_blocks(answer))]",
        "tool_calls[0]",
        DIALECTS,
    ),
    Mutation(
        "a group's engine takes a second request of an episode for the first", "rollout/generators/vllm/tensor_parallel.py",
        "replace(what, episode=", "replace(what, call=0, episode=", "tests/rollout/test_tensor_parallel.py",
    ),
    Mutation(
        "a process gathers an evaluation while another waits for it in the engine", "trainers/evaluation.py",
        "            results = gather_evaluation(", "                results = gather_evaluation(",
        "tests/trainers/test_evaluation.py -k leaves_its_generator",
    ),
    Mutation(
        "an adapter is loaded on the first server alone", "rollout/generators/vllm/servers.py",
        "for place in self.used:", "for place in self.used[:1]:", SERVERS,
    ),
    Mutation(
        "all episodes change their server when one ends", "rollout/generators/vllm/servers.py",
        "place if place in used else used[episode % len(used)]", "used[episode % len(used)]", SERVERS,
    ),
    Mutation(
        "a request is lost with its server", "rollout/generators/vllm/servers.py",
        "                self._leave_out(place, error)\n\n    def _load", "                raise\n\n    def _load", SERVERS,
    ),
    Mutation(
        "no server is left, and a request is sent to none", "rollout/generators/vllm/servers.py",
        "            if not left:\n                raise error\n", "", SERVERS,
    ),
    Mutation(
        "an adapter that one server refuses stays on the others", "rollout/generators/vllm/servers.py",
        "for server in loaded:", "for server in ():", SERVERS,
    ),
    Mutation(
        "a server that was started again ends the run", "rollout/generators/vllm/servers.py",
        "self._served.discard(adapter)\n        self._on_each(partial(_unload_if_served, adapter))",
        "self._served.discard(adapter)\n        self._on_each(lambda server: server.unload(adapter))", SERVERS,
    ),
    Mutation(
        "a server that ends is waited for", "rollout/generators/vllm/__init__.py",
        "return isinstance(error, ConnectionError) or error.errno in _GONE", "return False", ENDED,
    ),
    Mutation(
        "a slow server counts as one that has ended", "rollout/generators/vllm/__init__.py",
        "return isinstance(error, ConnectionError) or error.errno in _GONE", "return True", ENDED,
    ),
    Mutation(
        "a server has ended when it refused twice at any time", "rollout/generators/vllm/__init__.py",
        "ended + 1 if self._has_ended(connection) else 0", "ended + self._has_ended(connection)", ENDED,
    ),
    Mutation(
        "a server that was started again is asked for an adapter that it lacks", "rollout/generators/vllm/servers.py",
        "                    self._load_again(self.servers[place], adapter)\n", "", SERVERS,
    ),
    Mutation(
        "another process of the run finds no adapter to load again", "rollout/generators/vllm/adapter_host.py",
        'place.glob(f"{_PREFIXES}*/{name}")', 'place.glob(f"{_PREFIXES}{os.getpid()}*/{name}")', SERVERS,
    ),
    Mutation(
        "an answer that a teacher's server breaks off is read", "sampling/teacher_server.py",
        'if one.get("prompt_logprobs") is None]', "if False]", f"{TEACHER} -k do_not_fit",
    ),
    Mutation(
        "a teacher's server that holds requests is waited for", "sampling/teacher_server.py",
        'elif event.endswith(".receive_response_headers.started") and connections:', "elif False:", f"{ENDED} -k teacher",
    ),
    Mutation(
        "a process that seems older than its parent goes on", "envs/isolation/process_tree.py",
        "    children: dict[int, list[psutil.Process]] = {}\n",
        "    return psutil.Process().children(recursive=True)\n    children: dict[int, list[psutil.Process]] = {}\n",
        "tests/rollout/test_left_processes.py -k hides_no_process",
    ),
    Mutation(
        "the engines of a trainer's server outlive it", "envs/isolation/process_tree.py",
        "    killed = kill_descendants(kept.pid)\n    kept.", "    killed = None\n    kept.", STARTED,
    ),
    Mutation(
        "a server is killed before it can remove its shared memory", "envs/isolation/process_tree.py",
        "        os.kill(kept.pid, signal.SIGTERM)\n", "        os.kill(kept.pid, signal.SIGKILL)\n", STARTED,
    ),
    Mutation(
        "a server does not end with its trainer", "envs/isolation/process_tree.py",
        "(code := reap(kept.pid)) is None and not wakes.asked:", "(code := reap(kept.pid)) is None:", STARTED,
    ),
    Mutation(
        "a fork of the trainer ends its server", "sampling/started_server.py",
        "keeper.terminate()  # a fork may hold the pipe", "os.kill(keeper.pid, signal.SIGTERM)", STARTED,
    ),
    Mutation(
        "a server gets a GPU of the trainer", "sampling/started_server.py",
        "if place not in used]", "]", "tests/trainers/test_vllm_options.py -k gpus",
    ),
    Mutation(
        "one of the copies of a server serves the adapter", "sampling/vllm_checks.py",
        "rank is not None and copies > 1", "False", "tests/trainers/test_vllm_options.py -k copies",
    ),
    Mutation(
        "matplotlib makes its folders in the home folder", "imports.py",
        'os.environ["MPLCONFIGDIR"] = folder', "pass", "tests/test_session.py -k matplotlib",
    ),
    Mutation(
        "threads import a broken library at once", "envs/isolation/levels.py",
        "    with _importing:", "    if _importing:", "tests/envs/test_isolation.py -k broken_library",
    ),
    Mutation(
        "matplotlib's own folder is not read", "imports.py",
        "if its_own or ", "if ", "tests/test_session.py -k matplotlib",
    ),
    Mutation(
        "an image is expanded from the placeholders of the image before it",
        "rollout/chat/pictures.py",
        "        return pieces[0] + \"\".join(one.text + piece for one, piece in zip(pictures, pieces[1:], strict=True))",
        "        return pieces[0] + \"\".join(pictures[0].text + piece for piece in pieces[1:])",
        IMAGES,
    ),
    Mutation(
        "images that were shown before are not shown again to the trainer",
        "rollout/stepped.py",
        "        self.pictures[-1] += pictures\n",
        "        self.pictures[-1][:] = pictures\n",
        IMAGES,
    ),
    Mutation(
        "keys and values of another image with the same ids are read",
        "rollout/generators/transformers/generator.py",
        "        known = {kept: keyed(kept.ids, kept.pictures) for kept in lineages}\n",
        "        own, known = ids, {kept: kept.ids for kept in lineages}\n",
        f"{IMAGES} -k another_image",
    ),
    Mutation(
        "an image token may be sampled",
        "rollout/generators/images.py",
        "        bias[self.suppressed] = _UNLIKELY\n",
        "",
        IMAGES,
    ),
    Mutation(
        "vLLM caches images of one size under the same key",
        "rollout/generators/images.py",
        '                key = f"{-picture.key:x}-{first}"\n',
        '                key = f"{picture.count}-{first}"\n',
        f"{IMAGES} -k runs_of_image_tokens",
    ),
    Mutation(
        "vLLM gets the first features of an image for each of its tiles",
        "rollout/generators/images.py",
        "picture.features[first:end]",
        "picture.features[: end - first]",
        f"{IMAGES} -k runs_of_image_tokens",
    ),
    Mutation(
        "Gemma 3's images are sampled causally on vLLM",
        "trainers/setup.py",
        "    if model_type not in SERVED:\n",
        "    if False:\n",
        f"{IMAGE_RUNS} -k vllm",
    ),
    Mutation(
        "the text after an image begins at the image's last token",
        "rollout/generators/images.py",
        "        offsets[-1, 3] = picture.count + int(delta)\n",
        "        offsets[-1, 3] = picture.count + int(delta) - 1\n",
        IMAGES,
    ),
    Mutation(
        "the features of DeepStack are not handed over",
        "rollout/generators/images.py",
        "    levels = _shown.features[:, width:]",
        "    levels = 0 * _shown.features[:, width:]",
        IMAGES,
    ),
    Mutation(
        "Gemma 3 keeps keys and values of images between turns",
        "rollout/generators/images.py",
        "            types[shown.rows, shown.columns] = 1\n",
        "",
        IMAGES,
    ),
    Mutation(
        "pixels are lost between sampler and trainer",
        "step/log_probs.py",
        "scored=scored, part=part",
        'scored=scored, part={name: value for name, value in part.items() if "image" not in name}',
        f"{IMAGE_RUNS} -k killed",
    ),
    Mutation(
        "the loss sees no images",
        "trainers/trainer.py",
        "scored, part = handed.batch.scored, handed.inputs",
        "scored = handed.batch.scored",
        IMAGE_RUNS,
    ),
    Mutation(
        "images of left-padded rows are shown without the padding",
        "packing/forward.py",
        "images.places[..., 0] + mask.int().argmax(dim=1)[:, None]",
        "images.places[..., 0]",
        IMAGE_RUNS,
    ),
    Mutation(
        "a critic sees no images",
        "packing/forward.py",
        "                given = {**self._positions(mask), **more}\n",
        "                given = self._positions(mask)\n",
        IMAGE_RUNS,
    ),
    Mutation(
        "the image encoder is trained",
        "rollout/generators/images.py",
        "                parameter.requires_grad_(False)\n",
        "",
        IMAGE_RUNS,
    ),
    Mutation(
        "an image of several frames is taken",
        "envs/images.py",
        'if getattr(image, "is_animated", False) and',
        "if False and",
        IMAGES,
    ),
    Mutation(
        "an image of any size is taken",
        "envs/images.py",
        "    if width * height < 1 or width * height > MOST_PIXELS:",
        "    if False:",
        IMAGES,
    ),
    Mutation(
        "a photo lies on its side", "envs/images.py",
        "_upright(found) if _turn(found) else image", "image",
        f"{IMAGES} -k upright",
    ),
    Mutation(
        "an open photo lies on its side", "envs/images.py",
        "file, turn = BytesIO(), _turn(image)", "file, turn = BytesIO(), None", f"{IMAGES} -k upright",
    ),
    Mutation(
        "photos that lie on the other side stand on their heads", "envs/images.py",
        '6: "ROTATE_270"', '6: "ROTATE_90"', f"{IMAGES} -k orientation",
    ),
    Mutation(
        "broken metadata cost their picture", "envs/images.py",
        "    with suppress(Exception):\n        return _TURNS", "    with suppress():\n        return _TURNS",
        f"{IMAGES} -k metadata",
    ),
    Mutation(
        "a phone's photo is refused for the preview behind it", "envs/images.py",
        ' and image.format != "MPO"', "", f"{IMAGES} -k phones",
    ),
    Mutation(
        "images of 16 bits are cut at 255", "envs/images.py",
        'if image.mode[0] in "IF":', "if False:", f"{IMAGES} -k mode",
    ),
    Mutation(
        "images:N keeps the first images",
        "envs/context.py",
        "                dropped = part[\"type\"] == \"image\" and old > 0\n",
        "                dropped = part[\"type\"] == \"image\" and old <= self.number\n",
        IMAGES,
    ),
    Mutation(
        "a request reads files of this machine", "rollout/agents/dialects/base.py",
        "    if not DATA.match(address):\n",
        "    if address.startswith('http'):\n",
        IMAGE_REQUESTS,
    ),
    Mutation(
        "a hostile image of a request ends the server's answer", "rollout/agents/dialects/base.py",
        "    except (ImageError, ImportError) as error:\n",
        "    except ImportError as error:\n",
        IMAGE_REQUESTS,
    ),
    Mutation(
        "another image of the same size is the same prompt", "rollout/agents/episode.py",
        "        prompt = _digest_of(keyed(first.prompt_ids, pictures))\n",
        "        prompt = _digest_of(first.prompt_ids)\n",
        f"{IMAGE_REQUESTS} -k same_size",
    ),
    Mutation(
        "the trainer does not get the images of requests", "rollout/agents/episode.py",
        "                pictures=sample.pictures,\n            )\n            for sample in samples",
        "            )\n            for sample in samples",
        f"{IMAGE_AGENTS} -k idefics3-chat",
    ),
    Mutation(
        "the sampler does not get the images of requests", "rollout/agents/episode.py",
        "            extends=False,\n            pictures=sample.pictures,\n",
        "            extends=False,\n",
        f"{IMAGE_AGENTS} -k idefics3-chat",
    ),
    Mutation(
        "images around answers of another prompt are not expanded", "rollout/chat/renderer.py",
        "        if pictures := self.pictures(messages):\n",
        "        if pictures := []:\n",
        f"{IMAGE_REQUESTS} -k keeps_its_ids",
    ),
    Mutation(
        "the same image counts each time", "envs/images.py",
        "    images = set(images_of(messages))\n",
        "    images = images_of(messages)\n",
        f"{IMAGE_REQUESTS} -k counts_once",
    ),
    Mutation(
        "a special token is spelled over two parts", "envs/images.py",
        "        found += group if kind == \"image\" else",
        "        found += group if kind else",
        f"{IMAGE_ENVIRONMENTS} -k beside",
    ),
    Mutation(
        "an image that an environment made is not looked at", "envs/images.py",
        "        if _known.get(value.digest) is value:\n",
        "        if value.digest:\n",
        f"{IMAGES} -k hand",
    ),
    Mutation(
        "a tool's image closes its tag", "envs/tools/toolbox.py",
        "*_escaped(result), {", '*parts_of({"content": result}), {',
        f"{IMAGE_ENVIRONMENTS} -k tags",
    ),
    Mutation(
        "names of files in a tool's result are read as images", "envs/tools/toolbox.py",
        "isinstance(part, dict) and is_image(part.get(\"image\"))",
        "isinstance(part, dict) and part.get(\"type\") == \"image\"",
        f"{IMAGE_ENVIRONMENTS} -k tags",
    ),
    Mutation(
        "the image of a board of bytes", "envs/libraries/gymnasium.py",
        " and bool((space.high == 255).all())",
        "",
        f"{IMAGE_ENVIRONMENTS} -k numbers",
    ),
    Mutation(
        "the page shows any file as an image",
        "records/reader.py",
        "        return data if Image(data).digest == digest else None\n",
        "        return data\n",
        IMAGES,
    ),
]  # fmt: skip


def copy_project(target: Path) -> None:
    """What the tests need, and nothing that was built."""
    for name in ("agile_trainers", "environments", "tests", "examples", "benchmarks", "docs", "accelerate_configs"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "AGENTS.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, target / name)
    (target / "agile_environments").symlink_to("environments")


def survives(mutation: Mutation, project: Path, pytest: Pytest) -> bool:
    """Make the mutation, run its tests, and undo it.

    Raises:
        ValueError: If the line to change is not there exactly once.
    """
    file = project / "agile_trainers" / mutation.file
    source = file.read_text()
    if source.count(mutation.old) != 1:
        raise ValueError(
            f"{mutation.name}: {mutation.old!r} occurs {source.count(mutation.old)} times in {mutation.file}."
        )
    file.write_text(source.replace(mutation.old, mutation.new))
    try:
        return pytest.passes(project, mutation.tests)
    finally:
        file.write_text(source)


def git(*arguments: str) -> str:
    """What git prints."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def affected(
    mutations: Sequence[Mutation], changed: Collection[str], before: Collection[tuple[str, ...]]
) -> list[Mutation]:
    """Choose the mutations that a change may have made unnoticed.

    Args:
        mutations: All of them.
        changed: Files that changed, below the project's folder.
        before: The fields of the mutations before the change.
    """
    return [one for one in mutations if astuple(one) not in before or not set(changed).isdisjoint(one.reads)]


def since(revision: str) -> list[Mutation]:
    """Choose the mutations that are affected by what changed since a commit, in the working tree too.

    Raises:
        subprocess.CalledProcessError: If git does not know the commit.
    """
    changed = git("diff", "--name-only", "--no-renames", revision).split()
    changed += git("ls-files", "--others", "--exclude-standard").split()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "mutations_before.py"
        file.write_text(git("show", f"{revision}:tests/mutations.py"), encoding="utf-8")
        before = {astuple(one) for one in runpy.run_path(str(file))["MUTATIONS"]}
    return affected(MUTATIONS, changed, before)


def fingerprint(mutation: Mutation, project: Path) -> str:
    """A digest of a mutation, its file and its tests."""
    texts = [*astuple(mutation), *((project / name).read_text(encoding="utf-8") for name in mutation.reads)]
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]


def read(results: Path | None) -> dict[str, dict[str, Any]]:
    """The lines of a file of results by the name of the mutation; none without a file."""
    lines = results.read_text(encoding="utf-8").splitlines() if results and results.exists() else []
    return {line["name"]: line for line in map(json.loads, lines)}


def write(results: Path, line: dict[str, Any]) -> None:
    """Replace a mutation's line; those of mutations that no longer exist go."""
    names = [one.name for one in MUTATIONS]
    lines = {**read(results), line["name"]: line}
    text = "".join(json.dumps(lines[name]) + "\n" for name in names if name in lines)
    partial = results.with_suffix(".tmp")
    partial.write_text(text, encoding="utf-8")
    partial.replace(results)


def unknown(mutations: Sequence[Mutation], results: Path | None) -> list[Mutation]:
    """Choose those that the file of results does not list as noticed, as they and their files are now."""
    noticed = {line["fingerprint"] for line in read(results).values() if line["verdict"] == "noticed"}
    return [one for one in mutations if not noticed or fingerprint(one, ROOT) not in noticed]


def run(mutations: Sequence[Mutation], results: Path | None) -> list[str]:
    """Make the mutations one after the other; return the names of those that no test noticed."""
    alive, green = [], dict[str, bool]()
    with tempfile.TemporaryDirectory() as folder, Pytest(Path(folder)) as pytest:
        project = Path(folder).resolve() / "project"
        project.mkdir()
        copy_project(project)
        for number, mutation in enumerate(mutations, start=1):
            started, mark = time.perf_counter(), fingerprint(mutation, project)
            try:
                if mutation.tests not in green:
                    green[mutation.tests] = pytest.passes(project, mutation.tests)
                if not green[mutation.tests]:
                    verdict = "TESTS FAIL ANYWAY"
                else:
                    verdict = "SURVIVED" if survives(mutation, project, pytest) else "noticed"
            except (RuntimeError, ValueError) as error:
                verdict = "CANNOT BE RUN"
                print(error)
            alive += [mutation.name] * (verdict != "noticed")
            seconds = round(time.perf_counter() - started)
            place = f"[{number:>2}/{len(mutations)}]"
            print(f"{place} {verdict:<9} {mutation.name} ({mutation.file}, {seconds} s)", flush=True)
            if results is not None:
                write(results, {"name": mutation.name, "verdict": verdict, "fingerprint": mark, "seconds": seconds})
    return alive


def main() -> int:
    """Run the mutations whose name contains a word of the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only mutations whose name contains one of these")
    parser.add_argument("--since", metavar="REV", help="only mutations that changes since this commit affect")
    parser.add_argument("--results", type=Path, metavar="FILE", help="write a line for each mutation to this file")
    parser.add_argument("--resume", action="store_true", help="leave out those that --results lists as noticed")
    options = parser.parse_args()
    if options.resume and options.results is None:
        parser.error("--resume reads --results: name the file.")
    chosen = since(options.since) if options.since else MUTATIONS
    chosen = [one for one in chosen if not options.words or any(word in one.name for word in options.words)]
    left = unknown(chosen, options.results) if options.resume else chosen
    if len(left) < len(chosen):
        print(f"{len(chosen) - len(left)} of {len(chosen)} mutations were noticed before, by the same tests.")
    alive = run(left, options.results)
    print(
        f"\n{len(chosen) - len(alive)} of {len(chosen)} mutations noticed."
        + "".join(f"\nNot: {name}" for name in alive)
    )
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
