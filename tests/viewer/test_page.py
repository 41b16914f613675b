"""The viewer without a browser: the parts, the file, the server and the command. In a browser: test_browser.py."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import random
import re
import signal
import threading
import urllib.request
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_records import HOSTILE, byte_tokens, guessing_run, play, populated, run_of
from written_page import Page, in_node

from agile_trainers.cli.main import main
from agile_trainers.evaluation.results import evaluation_metrics
from agile_trainers.records.reader import RunRecords, open_records
from agile_trainers.records.writer import RecordWriter, episode_row, file_part
from agile_trainers.rollout.forest import Call, forest
from agile_trainers.rollout.metrics import episode_metrics, summarize
from agile_trainers.types import StopReason
from agile_trainers.viewer.html import SCRIPTS, write_page
from agile_trainers.viewer.parts import (
    OUTLINE_TEXT,
    SECTION_PARTS,
    STOP_REASONS,
    detail,
    encode,
    figures,
    most_telling_first,
    outline,
    read_section,
    sections,
    turn_advantage,
)
from agile_trainers.viewer.server import LiveRuns, Server


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps of three groups of four, and an evaluation of five episodes."""
    return guessing_run(tmp_path_factory.mktemp("run"))


# ----------------------------------------------------------------------------------------------------------- the parts


def test_every_stop_reason_has_a_sentence() -> None:
    assert set(STOP_REASONS) == set(StopReason)


@pytest.mark.parametrize(
    ("count", "order"), [(0, []), (1, [0]), (2, [0, 1]), (3, [0, 2, 1]), (9, [0, 8, 4, 2, 6, 1, 3, 5, 7])]
)
def test_the_steps_that_are_kept_are_even(count: int, order: list[int]) -> None:
    assert list(most_telling_first(count)) == order
    assert sorted(most_telling_first(300)) == list(range(300))


def test_sections_are_steps_and_evaluations(run: Path) -> None:
    (records,) = open_records(run)
    found = sections(records.index())
    assert [(section.phase, section.step, len(section.rows)) for section in found] == [
        *(("train", step, 12) for step in range(4)), ("eval", 4, 5),
    ]  # fmt: skip
    read = list(read_section(records, found[2]))
    assert [(record["group"], record["member"]) for record in read] == [(k // 4, k % 4) for k in range(12)]
    assert read == [records.episode(row["key"]) for row in found[2].rows]


def test_the_advantage_of_a_turn() -> None:
    record = {"advantages": [None, 1.0, 2.0, None, 5.0]}
    assert turn_advantage(record, {"advantage": -0.5, "start": 0, "end": 2}) == -0.5
    assert turn_advantage(record, {"advantage": None, "start": 1, "end": 4}) == 1.5
    assert turn_advantage(record, {"advantage": None, "start": 3, "end": 4}) is None
    assert turn_advantage({"advantages": None}, {"advantage": None, "start": 0, "end": 4}) is None


def test_an_outline_is_short_and_says_what_episodes_start_from(tmp_path: Path) -> None:
    games = [
        play(["x" * 10_000], ["y" * 10_000], [1.0], options={"secret": 1}, prompt="z" * 10_000),
        play(["a"], ["b"], [0.0], options={"secret": 1}),
        play(["a"], ["b"], [0.0], options={"secret": 2}),
        play(["a"], ["b"], [0.0]),
        play(["a"], ["b"], [0.0], prompt="other"),
    ]
    (records,) = open_records(run_of(tmp_path, games))
    outlines = [outline(record) for record in records.episodes()]
    assert len(encode(outlines[0])) < 4 * OUTLINE_TEXT
    assert outlines[0]["turns"][0]["text"] == "x" * OUTLINE_TEXT + "…"
    starts = [figures(record)["start"] for record in records.episodes()]
    assert starts[0] == starts[1] and len(set(starts)) == 4


@pytest.mark.parametrize("seed", range(10))
def test_what_earlier_turns_read_of_a_prompt_is_counted(seed: int, tmp_path: Path) -> None:
    """Of 12 prompts of two symbols: by comparison with every earlier prompt and answer."""
    noise = random.Random(seed)
    calls = [Call(noise.choices(range(2), k=noise.randint(1, 6)), [noise.randint(0, 1)], [-1.0]) for _ in range(12)]
    (records,) = open_records(run_of(tmp_path, [forest(calls, StopReason.TERMINATED)]))
    (record,) = records.episodes()
    found = detail(record)["turns"]
    for k, call in enumerate(calls):
        whole = [[*one.prompt_ids, *one.answer_ids] for one in calls[:k]]
        lengths = [n for one in whole for n in range(7) if one[:n] == call.prompt_ids[:n] and n <= len(call.prompt_ids)]
        assert found[k]["seen"] == max(lengths, default=0)
        same = [found[j]["samePrompt"] == found[k]["samePrompt"] for j in range(12)]
        assert same == [one.prompt_ids == call.prompt_ids for one in calls]


def test_an_ordinary_episode_has_no_entries_of_paths(tmp_path: Path) -> None:
    (records,) = open_records(run_of(tmp_path, [play(["a"], ["b"], [0.0])]))
    (record,) = records.episodes()
    shown = detail(record)
    assert "paths" not in shown and not {"path", "parent", "seen"} & set(shown["turns"][0])


def test_numbers_that_json_does_not_have_are_texts() -> None:
    values = {"a": [float("nan"), float("inf"), -float("inf"), None, 0.123456789, 3, True], "b": "\ud800"}
    text = encode(values).decode("ascii")
    assert json.loads(text) == {"a": ["nan", "inf", "-inf", None, 0.12346, 3, True], "b": "\ud800"}


def test_small_numbers_keep_their_digits() -> None:
    """Rewards and advantages of 4e-6 are four times the default zero_advantage_eps."""
    values = {"return": 4e-6, "info": {"price": -1.234567e-6}, "a": [4e-6, 1234.567891, 0.0, 1e-12]}
    shown = {"return": 4e-6, "info": {"price": -1.2346e-6}, "a": [4e-6, 1234.56789, 0.0, 1e-12]}
    assert json.loads(encode(values)) == shown


# ---------------------------------------------------------------------------------------------------- its statistics


def won_or_not(noise: random.Random, name: str, stop: StopReason = StopReason.TERMINATED) -> Any:
    """An episode whose environment reports success only when it is won, and may fail after that."""
    won = noise.random() < 0.5
    reward = float(won) if won else noise.choice([-0.5, -0.25, 0.25]) * (1 + (name == "hard"))
    return play(["a"], ["b"], [reward], success=won or None, stop=stop, environment_name=name, noise=noise)


@pytest.mark.node
@pytest.mark.parametrize("seed", range(2))
def test_statistics_of_a_step_are_those_of_the_log(seed: int, tmp_path: Path) -> None:
    """Episodes without a report are unsuccessful; those that failed count in an evaluation alone, as the lowest."""
    noise = random.Random(seed)
    stops = [StopReason.TERMINATED, StopReason.MAX_TURNS, StopReason.ENVIRONMENT_ERROR, StopReason.ENVIRONMENT_TIMEOUT]
    games = [won_or_not(noise, name, noise.choice(stops)) for _ in range(8) for name in ("easy", "hard")]
    games += [play(["a"], [None], [-9.0], stop=StopReason.ENVIRONMENT_ERROR, environment_name="down")]
    games += [play(["a"], ["b"], [1.0], success=True, environment_name=name) for name in ("easy", "hard")]
    writer = RecordWriter(tmp_path, {"run": "20260101-000000-abcd"})
    rows = [episode_row(game, phase="train", index=k, generation=0, group=0, member=k) for k, game in enumerate(games)]
    writer.write_train(0, rows)
    writer.write_eval(0, "eval", (episode_row(game, index=k) for k, game in enumerate(games)))
    path = write_page(open_records(tmp_path), tmp_path / "view.html").path
    statistics = "const { return: mean, success } = summary(one.run, rowsOf(one)); return [mean, success];"
    shown = in_node(path, f"return VIEW.runs[0].sections.map((one) => {{ {statistics} }});")
    measured = [episode_metrics(game) for game in games]
    reporting = [row for row in measured if row["environment"] != "down"]  # which has no success
    train, log = summarize(measured), evaluation_metrics(measured)
    assert shown[0] == pytest.approx([train["return/mean"], train["success"]])
    assert shown[1] == pytest.approx([log["return"], evaluation_metrics(reporting)["success"]])
    outcomes = in_node(path, "const [run] = VIEW.runs; return rowsOf(run.sections[1]).map((row) => outcome(run, row));")
    assert outcomes == [
        "error" if game.stop_reason.failed else "success" if game.success else "failure" for game in games
    ]


@pytest.mark.node
def test_an_evaluation_that_failed_altogether_has_no_return(tmp_path: Path) -> None:
    games = [play(["a"], [None], [0.0], stop=StopReason.ENVIRONMENT_ERROR)] * 2
    path = write_page(open_records(run_of(tmp_path, games)), tmp_path / "view.html").path
    shown = "const one = summary(VIEW.runs[0], [0, 1]); return [one.return, one.success, one.size];"
    assert in_node(path, shown) == [None, None, 2]


def test_policies_of_one_evaluation_count_success_alike(tmp_path: Path) -> None:
    """The second wins nothing, in an environment that reports victories alone; what another evaluation says is its own."""
    for name, success in {"aaaa-0-0": True, "aaaa-1-0": None, "aaaa-1-1": None, "bbbb-0-0": None}.items():
        game = play(["a"], ["b"], [1.0 if success else 0.0], success=success)
        run_of(
            tmp_path, [game], name=f"eval-20260101-000000-{name}", environment="other" if name[-1] == "1" else "guess"
        )
    index = Page(write_page(open_records(tmp_path), tmp_path / "view.html").path).part("index")
    assert {run["name"][-8:]: run["episodes"]["success"] for run in index["runs"]} == {
        "aaaa-0-0": [True], "aaaa-1-0": [False], "aaaa-1-1": [None], "bbbb-0-0": [None],
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------- its sections and groups


def test_data_sets_of_any_names_have_evaluations_of_their_own(tmp_path: Path) -> None:
    strangers = ["eval_a-b", "eval_a_b", "eval_a b", "eval_../x", "eval_é", "eval_" + "a" * 300, "eval_" + "a" * 301]
    writer = RecordWriter(tmp_path, {})
    for prefix in strangers:
        writer.write_eval(1, prefix, [episode_row(play(["7"], ["lower"], [0.0], success=False), step=1)])
    shown = {one.evaluation for one in sections(open_records(tmp_path)[0].index())}
    assert shown == {file_part(prefix) for prefix in strangers} and len(shown) == len(strangers)
    assert "eval_a_b" in shown and max(map(len, shown)) == 80


@pytest.mark.node
def test_evaluations_of_one_step_stay_apart(tmp_path: Path) -> None:
    """Of two data sets, and of a run that was resumed there; each has an address, and a curve is of one of them."""
    folder = guessing_run(tmp_path, steps=2, groups=1)
    writer = RecordWriter(tmp_path, {"run": folder.name})
    given = ["eval", "eval_easy", "eval_hard", *["eval"] * 9]  # eval.2 to eval.11
    for number, prefix in enumerate(given):
        game = play(["7"], ["lower"], [float(number)], success=False)
        writer.write_eval(1, prefix, [episode_row(game, step=1)])
    (records,) = open_records(tmp_path)
    found = [one for one in sections(records.index()) if (one.phase, one.step) == ("eval", 1)]
    names = ["eval", *(f"eval.{number}" for number in range(2, 11)), "eval_easy", "eval_hard"]
    assert [one.evaluation for one in found] == names
    (strange,) = sections([{"key": "eval-000001-a?b#c-rank0.parquet#0", "step": 1, "phase": "eval"}])
    assert strange.evaluation == "eval", "no name that an address or an element cannot have"
    assert [row["return"] for one in found for row in one.rows] == [0.0, *map(float, range(3, 12)), 1.0, 2.0]
    path = write_page([records], tmp_path / "view.html").path
    assert Page(path).part("texts/0/eval-1-1-eval_hard")[0][2] == "lower"
    live = LiveRuns(lambda: open_records(tmp_path))
    live.index()
    assert json.loads(live.part("outline/0/eval-1-1-eval.2") or b"")[0]["credit"] == 3.0
    shown = in_node(
        path,
        """
      const of = VIEW.runs[0].sections.filter(({ phase }) => phase === "eval");
      const opened = of.every((one) => sectionAt(one.id.split("/")) === one);
      const curve = VIEW.runs[0].counted("eval", (section) => summary(section.run, rowsOf(section)).return);
      return [opened, of.map(({ id }) => id), of[1].label, VIEW.opposite(of[0]).id, VIEW.opposite(of[1]).id, curve];
    """,
    )
    assert shown[0] is True and shown[1][:3] == ["0/eval/1", "0/eval/1-eval.2", "0/eval/1-eval.3"]
    assert shown[2:] == ["evaluation at step 1 (eval.2)", "0/eval/2", "0/eval/1", [[1, 0], [2, 1]]]


@pytest.mark.node
def test_groups_of_several_batches_at_one_step_stay_apart(tmp_path: Path) -> None:
    """As with steps_per_generation below gradient_accumulation_steps: each group opens, and j and k go through all."""
    writer = RecordWriter(tmp_path, {"run": "20260101-000000-abcd"})
    for generation, step in enumerate([0, 0, 1]):
        writer.write_train(generation, [
            episode_row(
                play([str(generation)], ["x"], [0.0]), step=step, phase="train", index=index, generation=generation,
                group=index // 2, member=index % 2,
            )
            for index in range(4)
        ])  # fmt: skip
    path = write_page(open_records(tmp_path), tmp_path / "view.html").path
    shown = in_node(
        path,
        """
      const [run] = VIEW.runs;
      const names = run.sections.map((section) => run.groups(section).map(({ name, rows }) => [name, rows]));
      location.hash = "#group/0/train/0/0.0";
      const seen = [];
      for (const [act, by] of [[move, 1], [move, 1], [move, 1], [move, -1], [moveStep, 1]]) {
        VIEW.page = parsePlace();
        act(by);
        seen.push(location.hash);
      }
      VIEW.page = { name: "episode", section: run.sections[0], run, row: 6 };
      up();
      return [names, seen, location.hash];
    """,
    )
    assert shown[0] == [
        [["0.0", [0, 1]], ["0.1", [2, 3]], ["1.0", [4, 5]], ["1.1", [6, 7]]], [["0", [8, 9]], ["1", [10, 11]]],
    ]  # fmt: skip
    places = ["0/0.1", "0/1.0", "0/1.1", "0/1.0", "1/1"]
    assert shown[1:] == [[f"#group/0/train/{place}" for place in places], "#group/0/train/0/1.1"]


@pytest.mark.node
def test_a_run_is_listed_with_all_its_environments(run: Path, tmp_path: Path) -> None:
    runs = [*open_records(run), *open_records(run_of(tmp_path, [play(["a"], ["b"], [0.0])], environment="guess"))]
    path = write_page(runs, tmp_path / "view.html").path
    assert in_node(path, "return VIEW.runs.map((run) => run.played);") == ["easy, hard", "guess"]


# ------------------------------------------------------------------------------------------------------------ the file


def test_the_file_holds_every_episode_as_it_was_recorded(run: Path, tmp_path: Path) -> None:
    runs = open_records(run)
    written = write_page(runs, tmp_path / "view.html")
    assert (written.episodes, written.left_out, written.size) == (53, 0, (tmp_path / "view.html").stat().st_size)
    page = Page(written.path)
    (entry,) = page.part("index")["runs"]
    columns, found = entry["episodes"], sections(runs[0].index())
    records = [record for section in found for record in read_section(runs[0], section)]
    assert columns["return"] == [round(record["return"], 5) for record in records]
    assert columns["stop"] == [record["stop_reason"] for record in records]
    assert entry["metrics"]["success"] == [0.25, 0.5, 0.75, 1.0]
    assert [finding["name"] for finding in entry["findings"]] == ["cut_answers"]
    shown = [one for part in sorted(set(columns["part"])) for one in page.part(f"episodes/0/{part}")["episodes"]]
    by_part = sorted(range(53), key=lambda row: (columns["part"][row], row))
    assert shown == [json.loads(encode(detail(records[row]))) for row in by_part]
    for kind, shown_of in SECTION_PARTS.items():
        assert page.part(f"{kind}/0/train-0-12") == [json.loads(encode(shown_of(one))) for one in records[:12]]
    bytes_of = page.part(f"episodes/0/{columns['part'][0]}")["pieces"]
    assert bytes_of[str(ord("I"))] == ["I", 0] and bytes_of["256"] == ["<|im_end|>", 1]
    assert bytes_of[str(0xE2)] == ["\xe2", 0]


def test_the_file_needs_nothing_from_elsewhere(run: Path, tmp_path: Path) -> None:
    page = Page(write_page(open_records(run), tmp_path / "view.html").path)
    assert set(re.findall(r"https?://[^\s\"'`]+", page.text)) == {"http://www.w3.org/2000/svg"}
    assert not [tag for tag, attributes in page.tags if tag in ("link", "img", "iframe", "object", "base", "form")]
    assert not [name for _, attributes in page.tags for name in attributes if name == "src" or name.startswith("on")]
    policy = next(one["content"] for tag, one in page.tags if one.get("http-equiv") == "Content-Security-Policy") or ""
    for kind in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(page.scripts[kind].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy and "connect-src 'none'" in policy and "unsafe" not in policy


def test_the_script_never_reads_text_as_markup() -> None:
    folder = Path(write_page.__code__.co_filename).parent / "page"
    source = "".join((folder / name).read_text(encoding="utf-8") for name in SCRIPTS)
    assert set(SCRIPTS) == {path.name for path in folder.glob("*.js")}
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|DOMParser|<!--|</script", source
    )


def test_hostile_text_is_in_no_markup(tmp_path: Path) -> None:
    game = play(
        [HOSTILE], [HOSTILE], [0.0], prompt=HOSTILE, error=HOSTILE, environment_name=HOSTILE, options={HOSTILE: HOSTILE}
    )
    runs = open_records(run_of(tmp_path, [game], policy=HOSTILE, options={HOSTILE: HOSTILE}))
    page = Page(write_page(runs, tmp_path / "view.html").path)
    assert "hacked" not in page.text and page.text.count("</script>") == len(
        [1 for tag, _ in page.tags if tag == "script"]
    )
    assert {tag for tag, _ in page.tags} >= {"html", "head", "body", "script"} and "img" not in {
        tag for tag, _ in page.tags
    }
    (episode,) = page.part("episodes/0/0")["episodes"]
    assert episode["turns"][0]["text"].startswith("</script><img src=x")
    assert episode["ids"][: len(byte_tokens(HOSTILE))] == byte_tokens(HOSTILE)


def test_a_long_run_keeps_its_first_and_last_episodes(run: Path, tmp_path: Path) -> None:
    """And the numbers of all."""
    written = write_page(open_records(run), tmp_path / "view.html", megabytes=1e-5)
    assert (written.episodes, written.left_out) == (12, 41)
    (entry,) = Page(written.path).part("index")["runs"]
    assert entry["episodes"]["part"] == [0] * 12 + [-1] * 41 and len(entry["episodes"]["return"]) == 53


def test_a_failure_leaves_the_file_that_was_there(run: Path, tmp_path: Path) -> None:
    class Broken(RunRecords):
        def metrics(self) -> Any:
            raise OSError("disk")

    path = tmp_path / "view.html"
    path.write_text("mine")
    (whole,) = open_records(run)
    with pytest.raises(OSError, match="disk"):
        write_page([Broken(whole.folder, whole.files, whole.name)], path)
    assert path.read_text() == "mine" and [one.name for one in tmp_path.iterdir()] == ["view.html"]


# ---------------------------------------------------------------------------------------------------------- the server


@pytest.fixture(scope="module")
def server(run: Path) -> Iterator[Server]:
    with Server(LiveRuns(lambda: open_records(run))) as made:
        threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
        yield made
        made.shutdown()


def ask(server: Server, path: str, **headers: str) -> tuple[int, bytes]:
    """Ask with the secret in place of ``*``."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
    connection.request("GET", path.replace("*", server.secret), headers=headers)
    answer = connection.getresponse()
    content = answer.read()
    assert answer.getheader("Access-Control-Allow-Origin") is None
    return answer.status, content


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_ctrl_c_ends_the_server_and_sigterm_terminates_it(
    run: Path, monkeypatch: pytest.MonkeyPatch, number: int, status: int
) -> None:
    def visit(url: str) -> None:
        urllib.request.urlopen(url).read()  # which is answered once the server waits
        signal.raise_signal(number)

    def opens(url: str) -> None:
        threading.Thread(target=visit, args=[url]).start()

    monkeypatch.setattr(webbrowser, "open", opens)
    assert main(["view", str(run), "--serve", "--open"]) == status


def test_the_server_answers_this_machine_with_the_secret_alone(server: Server) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert ask(server, "/*/")[0] == 200 and ask(server, "/*/data/index")[0] == 200
    port = server.server_port
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port}.evil.example", ""):
        assert ask(server, "/*/data/index", Host=host)[0] == 421, host
    assert ask(server, "/*/data/index", Host=f"localhost:{port}")[0] == 200
    for path in ("/", "/data/index", "/wrong/data/index", "//data/index"):
        assert ask(server, path)[0] == 404, path


@pytest.mark.parametrize(
    "name",
    [
        "../../../../etc/passwd", "data/../run.json", "data/..%2f..%2frun.json", "run.json", "data/run.json",
        "data//etc/passwd", "data/episodes/0/99999", "data/episodes/7/0", "data/episodes/0/-1",
        "data/episodes/x/y", "data/outline/0/../x",
        "data/outline/0/train-0-9999", "page.html", "data/", "data/episodes",
    ],
)  # fmt: skip
def test_the_server_serves_no_file(server: Server, name: str) -> None:
    ask(server, "/*/data/index")
    assert ask(server, f"/*/{name}")[0] == 404


def test_the_server_follows_a_run(tmp_path: Path) -> None:
    folder = guessing_run(tmp_path, steps=2, groups=1, members=2)
    later = folder / "train-000001-rank0.parquet"
    later.rename(tmp_path / "later")
    live = LiveRuns(lambda: open_records(folder))
    before = json.loads(live.index() or b"")
    assert live.index(before["version"]) is None
    (entry,) = before["runs"]
    assert [one[:3] for one in entry["sections"]] == [["train", 0, 2], ["eval", 2, 5]]
    (tmp_path / "later").rename(later)
    after = json.loads(live.index(before["version"]) or b"")
    assert [one[:3] for one in after["runs"][0]["sections"]] == [["train", 0, 2], ["train", 1, 2], ["eval", 2, 5]]
    parts = after["runs"][0]["episodes"]["part"]
    assert len(set(parts)) == 9 and [parts[k] for k in (0, 1, 4, 5, 6, 7, 8)] == entry["episodes"]["part"]
    (records,) = open_records(folder)
    rows = [row for section in sections(records.index()) for row in section.rows]
    for row, part in zip(rows, parts, strict=True):
        (episode,) = json.loads(live.part(f"episodes/0/{part}") or b"")["episodes"]
        assert episode == json.loads(encode(detail(records.episode(row["key"]))))
    assert len(json.loads(live.part("outline/0/train-1-2") or b"")) == 2


# --------------------------------------------------------------------------------------------------------- the command


def test_the_command_writes_beside_the_run(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = run.parents[1]
    assert main(["view", str(output)]) == 0
    assert capsys.readouterr().out.startswith(f"{output / 'view.html'}: 53 episodes of 20260101-000000-abcd, 0.")
    assert main(["view", str(run / "train-000003-rank0.parquet"), "--output", str(tmp_path / "one.html")]) == 0
    assert len(Page(tmp_path / "one.html").part("index")["runs"][0]["episodes"]["stop"]) == 12
    options = ["--against", str(output), "--output", str(tmp_path / "new" / "two.html"), "--megabytes", "0.00001"]
    assert main(["view", str(output), *options]) == 0
    assert "two.html: 24 episodes" in (out := capsys.readouterr().out) and "Of 82 further episodes" in out
    index = Page(tmp_path / "new" / "two.html").part("index")
    assert index["compared"] == 1 and len(index["runs"]) == 2


def test_the_newest_run_comes_first_and_policies_as_they_were_named(tmp_path: Path) -> None:
    game = play(["1"], ["x"], [0.0])
    names = ["eval-20260103-000000-aaaa-0-0", "eval-20260103-000000-aaaa-1-0", "eval-20260101-000000-bbbb-0-0"]
    for name in reversed(names):
        run_of(tmp_path, [game], name=name)
    for name in ("20260101-000000-aaaa", "20260102-000000-aaaa"):
        run_of(tmp_path, [game], name=name, kind="training")
    assert main(["view", str(tmp_path)]) == 0
    found = [run["name"] for run in Page(tmp_path / "view.html").part("index")["runs"]]
    assert found == ["20260102-000000-aaaa", "20260101-000000-aaaa", *names]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["gone"], "gone"),
        (["."], "holds no rollout log"),
        ([".", "--serve", "--output", "x.html"], "--output"),
        *(
            (["gone", f"--megabytes={size}"], f"0 on, such as 100 or 0.5, got {size!r}")
            for size in ("inf", "nan", "-1")
        ),
        *((["gone", f"--port={port}"], f"to 65535, got {port!r}") for port in ("-1", "65536", "x")),
        ([], "RUN_OR_FILE"),
    ],
)
def test_mistakes_are_named(
    options: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        code = main(["view", *options])
    except SystemExit as stop:
        code = stop.code
    assert code == 2 and named in capsys.readouterr().err and not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------------- a population


def test_a_population_lists_its_members_the_best_first(tmp_path: Path) -> None:
    folder = populated(tmp_path / "chain" / "population")
    guessing_run(tmp_path / "chain" / "sft", steps=1, groups=1, name="20270101-000000-abcd")
    assert main(["view", str(tmp_path / "chain")]) == 0
    index = Page(tmp_path / "chain" / "view.html").part("index")
    assert [run["name"] for run in index["runs"]] == [
        "member-03 20260103-000000-abcd", "member-01 20260101-000000-abcd", "member-00 20260100-000000-abcd",
        "20270101-000000-abcd",
    ]  # fmt: skip
    members = [run["info"].get("member") for run in index["runs"]]
    assert [member["state"] for member in members[:3]] == ["the best", "", "stopped"] and members[3] is None
    assert members[0] == {
        "winner": True,
        "member": 3, "parent": 1, "round": 2, "steps": 4, "fitness": "0.875", "error": "0.0312", "state": "the best",
        "measured": "success", "hyperparameters": {"learning_rate": "1e-06"},
    }  # fmt: skip
    assert members[1]["error"] is None and members[1]["hyperparameters"] == {"learning_rate": "0.00025"}
    assert (folder / "lineage.json").is_file()


def test_small_options_are_shown_as_they_are(tmp_path: Path) -> None:
    guessing_run(tmp_path, steps=1, groups=1)
    (records,) = open_records(tmp_path)
    records.info["options"] = {"learning_rate": 1e-6, "max_steps": 5, "betas": [0.9, 1e-8], "name": None}
    write_page([records], tmp_path / "view.html")
    (run,) = Page(tmp_path / "view.html").part("index")["runs"]
    assert run["info"]["options"] == {"learning_rate": "1e-06", "max_steps": 5, "betas": ["0.9", "1e-08"], "name": None}
