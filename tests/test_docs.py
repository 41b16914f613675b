"""Every code block of the README, ``docs/`` and ``environments/`` runs, on the embedded model and local data.

Python blocks of a page run in order, in one namespace, as a reader would run them. ``EXCHANGED`` says what is exchanged, and
``NOT_RUN`` what is not run and which test does instead. ``EARNED`` plays what a page trains on: right answers are rewarded.
"""

from __future__ import annotations

import ast
import io
import json
import re
import shlex
from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from doc_blocks import BLOCKS, EXCHANGED, NOT_RUN, PAGES, ROOT, SNIPPET, Block, exchanged, of
from installed import skip_without_libraries

TUTORIAL = "docs/tutorial/"
"""Pages that tests/test_tutorial.py runs, but for commands that ask a person or run for minutes."""
ELSEWHERE = (TUTORIAL, "docs/verifiers.md")
"""Those, and a page whose programs need uv, which tests/on_agents/test_agents_verifiers.py runs."""
LANGUAGES = ("python", "py", "sh", "yaml", "text")
"""``py`` is another library's code, which is read and not run."""

GSM8K = [
    {"question": f"Ann has {n} apples and buys 2. How many has she?", "answer": f"{n} + 2 = {n + 2}.\n#### {n + 2}"}
    for n in range(40)
]
"""Rows as openai/gsm8k has them."""

PRELUDES = {
    "docs/chaining.md": """
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

lora = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
get_peft_model(AutoModelForCausalLM.from_pretrained("model"), lora).save_pretrained("runs/dpo")
""",
    "docs/teacher.md": """
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

expert = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
get_peft_model(AutoModelForCausalLM.from_pretrained("model"), expert).save_pretrained("runs/expert")
""",
    "docs/checkpoints.md": SNIPPET.replace("trainer.train()", "").replace("max_steps=200", "save_steps=1, max_steps=2"),
    # Nobody answers there.
    "docs/judges.md": "import tenacity\nfrom agile_trainers.judges import asking\nasking.WAITS = tenacity.wait_none()\n",
    "docs/rollout_log.md": SNIPPET,
    "docs/evaluation.md": "import shutil\nfor name in ('sft', 'adapter'): shutil.copytree('model', f'runs/demo/{name}')\n",
    "docs/rollouts.md": SNIPPET,
}
"""Code that made what a page goes on with."""

ISOLATED_PROGRAM = "docs/agents.md"
"""A page with a program that only bubblewrap isolates; without it, the page is run as its text says."""


@pytest.fixture
def folder(tmp_path: Path, embedded_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a reader stands, with the model as ``model`` and rows of GSM8K's schema as ``gsm8k``."""
    from datasets import Dataset, DatasetDict

    for page, file in {"docs/algorithms.md": "constant_baseline.py", "docs/own_loss.md": "dppo.py"}.items():
        algorithm = next(block for block in of("python") if block.page == page)
        (tmp_path / file).write_text(algorithm.text, encoding="utf-8")
    (tmp_path / "my_agent.py").write_text(
        (ROOT / "tests/trainers/asking.py").read_text(encoding="utf-8") + "\n\nsolve = talks\n", encoding="utf-8"
    )
    (tmp_path / "state_scores.py").write_bytes((ROOT / "examples/state_scores.py").read_bytes())
    (tmp_path / "model").symlink_to(embedded_model)
    DatasetDict({split: Dataset.from_list(GSM8K) for split in ("train", "test")}).save_to_disk(tmp_path / "gsm8k")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("agile_trainers.trainers.registry._registered", {})
    return tmp_path


# ------------------------------------------------------------------------------------------------ nothing is left out


def test_every_block_says_what_it_is() -> None:
    assert len(BLOCKS) > 40
    assert not [str(block) for block in BLOCKS if block.language not in LANGUAGES]


@pytest.mark.parametrize("block", of("text"), ids=str)
def test_a_drawing_hides_no_code(block: Block) -> None:
    """``text`` is for conversations, files and tables of tokens."""
    commands = (
        r"^\s*(\$ |agile-trainers|accelerate|python|pip|make|vllm|import |from \w+ import|def |class |trainer[. ])"
    )
    assert not re.search(commands, block.text, flags=re.M)


@pytest.mark.parametrize("block", of("py"), ids=str)
def test_another_librarys_code_is_python(block: Block) -> None:
    tree = ast.parse(block.text)
    imported = {
        node.module.partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module
    } | {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    ours = {"transformers", "peft", "datasets"} | (set() if block.page == "docs/trl.md" else {"trl"})
    assert "agile_trainers" not in imported and not imported <= ours


@pytest.mark.parametrize("pattern", [pattern for pattern, _ in EXCHANGED] + list(NOT_RUN))
def test_no_exchange_is_stale(pattern: str) -> None:
    assert any(re.search(pattern, block.text) for block in BLOCKS if block.language in ("python", "sh"))


def test_commands_in_the_text_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M))
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for script in re.findall(r"python ((?:examples|benchmarks|tests)/[\w/]+\.py)", text):
            assert (ROOT / script).is_file(), f"{page.name}: {script}"
        for target in re.findall(r"`make ([\w-]+)`", text):
            assert target in targets, f"{page.name}: make {target}"


# ----------------------------------------------------------------------------------------------------------- python


def answers_to(environment: Any, *answers: str) -> float:
    """The return of an episode in which these are the answers."""
    environment.reset(seed=0)
    total = 0.0
    for answer in answers:
        _, reward, terminated, truncated, _ = environment.step(answer)
        total += reward
        if terminated or truncated:
            break
    return total


def any_number(name: str, form: str = "{}") -> Callable[[dict[str, Any]], list[float]]:
    """Every number from 1 to 12, each in a game of its own."""

    def returns(namespace: dict[str, Any]) -> list[float]:
        from agile_trainers.envs import make_environment_factory

        factory = make_environment_factory(name)
        return [answers_to(factory(), form.format(n)) for n in range(1, 13)]

    return returns


def any_word(namespace: dict[str, Any]) -> list[float]:
    """Every word of the probes, each in an episode of its own."""
    from agile_environments.probes import PROBE_WORDS
    from agile_trainers.envs import make_environment_factory

    factory = make_environment_factory("agile:probe/constant")
    return [answers_to(factory(), word) for word in PROBE_WORDS]


def ideal_answers(namespace: dict[str, Any]) -> list[float]:
    """The right answer to the first question and to the second, both to the first."""
    factory = namespace["environment"]
    one, other = factory(), factory()
    one.reset(seed=0), other.reset(seed=1)
    policies = one.scripted_policies(), other.scripted_policies()
    return [answers_to(one, policy["expert"]([], None)) for policy in policies]


def tool_calls(namespace: dict[str, Any]) -> list[float]:
    call = '<tool_call>{"name": "increment", "arguments": {"by": %d}}</tool_call>'
    return [answers_to(namespace["trainer"].environment(), call % by, "Done.") for by in (1, 2)]


def counts(namespace: dict[str, Any]) -> list[float]:
    """By the function of the trainer, which reads the objects of the episodes."""
    call = '<tool_call>{"name": "increment", "arguments": {"by": %d}}</tool_call>'
    played = [namespace["trainer"].environment() for _ in range(2)]
    for by, environment in enumerate(played, start=1):
        answers_to(environment, call % by, "Done.")
    return namespace["reached"]([environment.object for environment in played])


def products(namespace: dict[str, Any]) -> list[float]:
    environment, row = namespace["trainer"].environment(), namespace["rows"][0]
    asked = environment.reset(seed=0, options=row)[0][-1]["content"]
    assert asked == row["prompt"] == "What is 11 times 11?"
    call = '<tool_call>{"name": "multiply", "arguments": {"a": 11, "b": 11}}</tool_call>'
    assert "121" in environment.step(call)[0]
    said = list[list[dict[str, Any]]]()
    for answer in ("It is 120.", "It is 121."):
        environment.reset(seed=0, options=row)
        environment.step(answer)
        said.append(environment.completion)
    return namespace["correct"](said, [row["product"]] * 2)


def conversions(namespace: dict[str, Any]) -> list[float]:
    environment = namespace["trainer"].environment()
    question = environment.reset(seed=0)[0]
    miles = int(re.findall(r"are (\d+) miles", str(question))[-1])
    return [answers_to(environment, answer) for answer in ("0", str(namespace["convert"](miles, "km")))]


def searches(namespace: dict[str, Any]) -> list[float]:
    environment = namespace["trainer"].environment()
    asked = str(environment.reset(seed=0)[0])
    (town,) = [town for name, town in namespace["born"].items() if name in asked]
    return [answers_to(environment, "<search>born</search>", f"<answer>{answer}</answer>") for answer in ("Rome", town)]


def calculations(namespace: dict[str, Any]) -> list[float]:
    from agile_environments.calculator import Calculator
    from agile_trainers.envs.scripted_policies import play

    environment = Calculator()
    environment.reset(seed=0)
    return [play(environment, policy, seed=0).episode_return for policy in environment.scripted_policies().values()]


def sums(namespace: dict[str, Any]) -> list[float]:
    """The right answer to every question, to every question."""
    environment = namespace["trainer"].environment()
    return [answers_to(environment, row["answer"]) for row in namespace["train"]]


def two_and_two(namespace: dict[str, Any]) -> list[float]:
    return [answers_to(namespace["trainer"].environment(), answer) for answer in ("5", "It is 4.")]


def climbs(namespace: dict[str, Any]) -> list[float]:
    """The shaped return is that of the task, whose first score is 0."""
    environment = namespace["trainer"].environment()
    return [answers_to(environment, *moves) for moves in (["down"] * 5, ["down", "up", "up", "up", "up"])]


GEM = any_number("gem:game:GuessTheNumber-v0-easy", "\\boxed{{{}}}")
GUESS = any_number("agile:guess_number")
EARNED = {
    "README.md": [GEM],
    "docs/algorithms.md": [GUESS],
    "docs/async.md": [GUESS],
    "docs/grpo.md": [GEM],
    "docs/judges.md": [GUESS],
    "docs/late_turns.md": [climbs],
    "docs/own_loss.md": [any_word, any_word],
    "docs/ppo.md": [GUESS],
    "docs/reinforce.md": [GUESS],
    "docs/chaining.md": [GUESS],
    "docs/launch.md": [GUESS],
    "docs/task_sampling.md": [GUESS],
    "docs/teacher.md": [GUESS, GUESS, GUESS],
    "docs/demonstrations.md": [GUESS],
    "docs/reasoning.md": [ideal_answers],
    "docs/trl.md": [counts, products],
    "docs/environments.md": [GUESS, tool_calls],
    "docs/tools.md": [conversions, searches],
    "docs/agilerl_scripts.md": [sums, two_and_two],
    "environments/calculator/README.md": [calculations],
}
"""For each block that makes a trainer, returns of some episodes: the best must earn something, and more than the worst."""


@pytest.mark.parametrize("page", sorted({block.page for block in of("python") if not block.page.startswith(ELSEWHERE)}))
def test_python_blocks_run_in_order(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prelude = exchanged(PRELUDES.get(page, ""))
    skip_without_libraries(prelude + "".join(exchanged(block.text) for block in of("python") if block.page == page))
    from agile_trainers.envs.isolation import levels as isolation

    if (isolation.why_not(isolation.BUBBLEWRAP) and page == ISOLATED_PROGRAM) or isolation.level() == isolation.NONE:
        monkeypatch.setenv(isolation.OPTION, isolation.NONE)
    namespace: dict[str, Any] = {"__name__": "docs", "GSM8K": GSM8K}
    exec(prelude, namespace)
    earned = iter(EARNED.get(page, []))
    for block in of("python"):
        if block.page == page:
            exec(compile("\n" * block.line + exchanged(block.text), page, "exec", dont_inherit=True), namespace)
            if "Trainer(" in block.text:
                returns = next(earned)(namespace)
                assert min(returns) < max(returns) > 0, f"{block}: {returns}"
    assert next(earned, None) is None


# ------------------------------------------------------------------------------------------------- commands and files


def commands(block: Block) -> list[str]:
    """The commands of a block, each on one line, without comments and without variables of the environment before them."""
    lines = re.sub(r"\\\n\s*", "", block.text).splitlines()
    lines = [re.sub(r"\s+#.*|^#.*", "", line).strip() for line in lines]
    return [re.sub(r"^(\w+=\S+ )+", "", line) for line in lines if line]


COMMANDS = [
    (block, command)
    for block in of("sh")
    for command in commands(block)
    if not (block.page.startswith(TUTORIAL) and "chain" in command)
    and "examples/recipes" not in command
    # tests/on_vllm/test_vllm_eight_gpus.py reads these servers with vLLM's own parser.
    and block.page != "docs/eight_gpus.md"
]


@pytest.mark.parametrize(("block", "command"), COMMANDS, ids=[f"{block}-{command[:32]}" for block, command in COMMANDS])
def test_commands_are_understood(
    block: Block, command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    skip_without_libraries(command)
    command = re.sub(EXCHANGED[0][0], "model", command).replace(
        "--model_name_or_path ...", "--model_name_or_path model"
    )
    command = command.replace("--environment ...", "--environment agile:wordle")
    program, *arguments = shlex.split(command.replace("my_script.py", "examples/tool_calculator.py"))
    arguments = [re.sub("^(accelerate_configs|examples)/", rf"{ROOT}/\1/", part) for part in arguments]
    PROGRAMS[program](arguments, monkeypatch)
    capsys.readouterr()


def agile_trainers(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As typed, up to where a model would be trained or a person asked."""
    from agile_trainers.cli import main, train, view
    from agile_trainers.cli.eval.command import make_parser

    if arguments[0] == "chain":
        Path("pipeline.yaml").write_text(pipeline(of("yaml")[0]), encoding="utf-8")
        assert main.main([*arguments, *([] if "--dry-run" in arguments else ["--dry-run"])]) == 0
    elif arguments[0] == "evolve":
        if not Path(arguments[1]).is_file():
            block = next(block for block in of("yaml") if block.page == "docs/populations.md")
            Path("population.yaml").write_text(pipeline(block), encoding="utf-8")
        assert main.main([*arguments, *([] if "--dry-run" in arguments else ["--dry-run"])]) == 0
    elif arguments[0] == "view":  # tests/viewer runs it
        view.make_parser().parse_args(arguments[1:])
    elif arguments[0] == "play":
        monkeypatch.setattr("sys.stdin", io.StringIO("crane\nstale\n"))
        assert main.main(arguments) == 0
    elif arguments[0] == "panel":
        assert main.main([*arguments, "--episodes", "3"]) == 0
    elif "--compare" in arguments:  # tests/test_cli_panels.py does
        make_parser().parse_args(arguments[1:])
    elif "--panel" in arguments:
        assert main.main(["panel", "make", "agile:guess_number", "--episodes", "3", "--output", "panel.json"]) == 0
        given = [re.sub("runs/demo/.*", "model", one) for one in arguments]
        assert main.main([*given, "--max_new_tokens", "2", "--no_card"]) == 0
    elif arguments[0] == "eval":
        given = [re.sub("runs/(demo|tutorial)/.*", "model", one) for one in arguments]
        given[given.index("--episodes") + 1] = "3"
        assert main.main([*given, "--max_new_tokens", "2", "--no_card"]) == 0
    elif arguments[0] == "check":
        policy = [] if any(one.startswith("agent:") for one in arguments) else ["--scripted_policy", "expert"]
        assert main.main([*arguments, "--episodes", "2", *policy]) == 0
    else:
        Path("more.yaml").write_text("use_cpu: true\nbf16: false\n", encoding="utf-8")
        started = list[Any]()
        monkeypatch.setattr(train, "train", lambda *given, **_: started.append(given))
        monkeypatch.setattr("accelerate.commands.launch.launch_command", started.append)
        assert main.main(arguments) == 0
        (found,) = started
        if not isinstance(found, tuple):
            assert Path(found.config_file).is_file()
            return
        _, script, args, model, _ = found
        given = dict(pairwise(arguments))
        assert (
            script.environment == (json.loads(named) if (named := given["--environment"]).startswith("{") else named)
            and model.use_peft
            and model.lora_target_modules == "all-linear"
        )
        for name in ("max_turns", "max_steps", "max_new_tokens", "learning_rate", "gradient_accumulation_steps"):
            assert getattr(args, name) == float(given[f"--{name}"])


def accelerate(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.commands.launch import launch_command_parser

    assert arguments.pop(0) == "launch"
    options = launch_command_parser().parse_args(arguments)
    assert Path(options.config_file).is_file()
    if options.module:
        assert find_spec(options.training_script) and options.training_script_args[0] in ("grpo", "chain")
        return
    script = Path(options.training_script)
    assert script.is_file()
    for option in options.training_script_args[::2]:
        assert f'add_argument("{option}"' in script.read_text(encoding="utf-8")


def pip(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for extra in re.findall(r"\[(.*?)\]", " ".join(arguments)):
        assert re.search(rf"^{extra} = \[", text, flags=re.M)


def make(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"\n{arguments[0]}:" in (ROOT / "Makefile").read_text(encoding="utf-8")


def vllm(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    started = (ROOT / "tests/on_vllm/serving.py").read_text(encoding="utf-8")
    assert all(argument in started for argument in arguments if argument.startswith("--"))


PROGRAMS = {"agile-trainers": agile_trainers, "accelerate": accelerate, "pip": pip, "make": make, "vllm": vllm}


def pipeline(block: Block) -> str:
    """A chain's file, with the model and the rows that are here."""
    from datasets import Dataset

    from agile_environments.guess_number import preferences

    Path("data").mkdir(exist_ok=True)
    Dataset.from_list(preferences(8)).to_json("data/pairs.jsonl")
    on_cpu = block.text.replace("\noptions: {", "\noptions: {use_cpu: true, bf16: false, ")
    on_cpu = on_cpu.replace("\noptions:\n", "\noptions:\n  use_cpu: true\n  bf16: false\n")
    return re.sub(EXCHANGED[0][0], "model", on_cpu)


@pytest.mark.parametrize("block", [block for block in of("yaml") if not block.page.startswith(TUTORIAL)], ids=str)
def test_files_are_read_whole(block: Block, folder: Path) -> None:
    from agile_trainers.cli.chain.stages import read_pipeline
    from agile_trainers.cli.evolve.plan import read_population

    Path("pipeline.yaml").write_text(pipeline(block), encoding="utf-8")
    if block.page == "docs/populations.md" and "\nstages:" not in block.text:
        plan = read_population(Path("pipeline.yaml")).plan
        assert (plan.search["members"], plan.search["rounds"], plan.config.max_steps) == (8, 4, 120)
        return
    read = read_pipeline(Path("pipeline.yaml"))
    if block.page == "docs/populations.md":
        assert [stage.name for stage in read.stages] == ["sft", "evolve", "grpo"]
        return
    assert [stage.algorithm for stage in read.stages] == ["sft", "dpo", "grpo"]
    last = read.stages[-1].config
    assert (last.learning_rate, last.generation_batch_size // last.num_generations) == (1e-5, 8)
