"""The viewer's page in a real Chromium (``make test-viewer``). Screenshots go to ``runs/viewer/`` to be looked at."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from made_records import HOSTILE, guessing_run, large_run, play, populated, run_of
from written_page import shoot, texts

from agile_trainers.records.reader import open_records
from agile_trainers.records.writer import RecordWriter, episode_row
from agile_trainers.types import StopReason
from agile_trainers.viewer.html import write_page
from agile_trainers.viewer.parts import with_members
from agile_trainers.viewer.server import LiveRuns, Server

pytestmark = pytest.mark.browser
MINUS = "\N{MINUS SIGN}"
Visit = Callable[..., Any]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve steps of twelve groups of eight."""
    return guessing_run(tmp_path_factory.mktemp("run"), steps=12, groups=12, members=8)


@pytest.fixture(scope="module")
def page_file(run: Path) -> Path:
    return write_page(open_records(run), run / "view.html").path


NOWHERE = ("#%3Cscript%3E/x", "#episode/9/9")


# ----------------------------------------------------------------------------------------------------------- the pages


def test_the_timeline_shows_every_metric_and_opens_a_step(page_file: Path, visit: Visit) -> None:
    page = visit(page_file)
    assert texts(page, ".chart figcaption > span:first-child") == [
        "Return",
        "Success",
        "Entropy",
        "Clipped share",
        "Zero-advantage groups",
    ]
    assert texts(page, ".findings li") == ["cut answers (step 2): Half <b>are</b> cut. Raise it."]
    line = page.locator(".chart").nth(1).locator("path").get_attribute("d")
    points = [tuple(map(float, point.split(","))) for point in re.split("[ML]", line)[1:]]
    assert len(points) == 12
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(points)]
    assert max(slopes) < 0 and max(slopes) - min(slopes) < 0.01  # success rises by a twelfth a step: one straight line
    assert texts(page, "tbody tr:first-child td")[:2] == ["96", "0.113"]
    page.locator(".inline select").select_option("loss")
    assert texts(page, ".chart figcaption > span:first-child")[-1] == "loss"
    chart = page.locator(".chart svg").first.bounding_box()
    page.mouse.click(chart["x"] + chart["width"] - 11, chart["y"] + 60)
    page.wait_for_selector("main[data-page=step]")
    assert page.url.endswith("#step/0/train/11")


def test_groups_of_a_step_and_members_of_a_group_are_side_by_side(page_file: Path, visit: Visit) -> None:
    page = visit(page_file, "#step/0/train/5")
    cards = page.locator(".card")
    assert cards.count() == 12 and cards.first.locator(".member").count() == 8
    assert cards.nth(0).bounding_box()["y"] == cards.nth(1).bounding_box()["y"]
    cards.nth(3).locator("h3 a").click()
    page.wait_for_selector("main[data-page=group]")
    assert page.locator(".side thead th").count() == 8
    assert page.locator(".side tbody tr").first.locator(".said").count() == 8
    page.locator("input[type=checkbox]").check()
    returns = [float(text.removeprefix("return ").replace(MINUS, "-")) for text in texts(page, ".side thead .figure")]
    assert returns == sorted(returns, reverse=True)


def test_zero_advantage_groups_are_marked(page_file: Path, visit: Visit) -> None:
    page = visit(page_file, "#step/0/train/11")
    assert page.locator(".badge.zero").count() == page.locator(".card").count() == 12


def test_a_zero_advantage_group_goes_by_advantages_not_by_returns(tmp_path: Path, visit: Visit) -> None:
    """Group 0 has equal returns and advantages of its turns; group 1 has different returns, and no advantage."""
    writer = RecordWriter(tmp_path, {"run": "20260101-000000-abcd", "environment": "guess"})
    rewards = [[[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 0.0]]]
    advantages = [[[0.0, -0.5], [0.0, 0.5]], [[0.0, 5e-7], [0.0, 0.0]]]
    writer.write_train(0, [
        episode_row(
            play(["a", "b"], ["c", "d"], rewards[group][member]), step=0, phase="train", index=2 * group + member,
            generation=0, group=group, member=member, advantages=advantages[group][member],
        )
        for group in range(2) for member in range(2)
    ])  # fmt: skip
    page = visit(write_page(open_records(tmp_path), tmp_path / "view.html").path, "#step/0/train/0")
    marked = [card.locator(".badge.zero").count() for card in page.locator(".card").all()]
    assert texts(page, ".card h3 a") == ["Group 0", "Group 1"] and marked == [0, 1]


def test_an_episode_shows_its_turns_answers_and_end(page_file: Path, run: Path, visit: Visit) -> None:
    (records,) = open_records(run)
    record = records.episode("train-000005-rank0.parquet#21")
    page = visit(page_file, f"#episode/0/{5 * 96 + 21}")
    assert page.locator(".turn").count() == len(record["turns"]) == 2
    assert texts(page, ".turn .message .text") == [turn["observation"] for turn in record["turns"]]
    shown = "".join(texts(page, "#turn-0 .tokens:not(details *) .t")).replace("·", "")
    assert shown == record["turns"][0]["text"] + "<|im_end|>"
    assert (
        "max turns" in page.locator(".ending").inner_text()
        and "all of max_turns" in page.locator(".ending").inner_text()
    )
    numbers = page.locator("#turn-0 .numbers").inner_text().replace(MINUS, "-")
    assert f"advantage {record['turns'][0]['advantage']:+g}"[:15] in numbers


def test_tokens_are_coloured_by_what_is_chosen(page_file: Path, run: Path, visit: Visit) -> None:
    (records,) = open_records(run)
    record = records.episode("train-000005-rank0.parquet#21")
    page = visit(page_file, f"#episode/0/{5 * 96 + 21}")
    acting = [k for k, turn in enumerate(record["turn_ids"]) if turn >= 0]

    def classes(kind: str) -> set[int]:
        found = page.locator(f".t.{kind}[data-k]:not(details *)")
        return {int(found.nth(k).get_attribute("data-k")) for k in range(found.count())}

    assert classes("neg") == set(acting) and record["turns"][0]["advantage"] < 0
    page.keyboard.press("3")
    assert classes("pos") == {k for k in acting if record["ratios"][k] > 1}
    assert classes("neg") == {k for k in acting if record["ratios"][k] < 1}
    page.locator(".chooser button", has_text="clipping").click()
    assert classes("flag") == {k for k in acting if record["clipped"][k]}
    page.keyboard.press("5")
    difference = {k: record["logprobs"][k] - record["sampling_logprobs"][k] for k in acting}
    assert classes("pos") == {k for k in acting if difference[k] > 1e-5}
    largest = max(difference, key=lambda k: abs(difference[k]))
    strength = page.locator(f".t[data-k='{largest}']:not(details *)").evaluate(
        "one => one.style.getPropertyValue('--m')"
    )
    assert float(strength) == 1.0
    page.locator(f".t[data-k='{largest}']:not(details *)").hover()
    facts = dict(zip(texts(page, "#token dt"), texts(page, "#token dd")))
    assert float(facts["mismatch"].replace(MINUS, "-")) == pytest.approx(difference[largest], abs=2e-5)
    page.keyboard.press("1")
    assert classes("turn") == set(acting)
    page.keyboard.press("6")
    assert classes("pos") == set(acting) and record["turns"][0]["value"] > 0


def test_a_character_split_over_tokens_is_shown_once_across_them(tmp_path: Path, visit: Visit) -> None:
    """✓ is three tokens, and the bytes of a broken character are shown as bytes."""
    folder = run_of(tmp_path, [play(["a✓é", "x\r\x00y\u200b"], ["", ""], [0.0, 1.0])])
    page = visit(write_page(open_records(folder), tmp_path / "view.html").path, "#episode/0/0")
    joined = page.locator("#turn-0 .joined")
    assert [joined.nth(k).locator(".t").count() for k in range(joined.count())] == [3, 2]
    assert texts(page, "#turn-0 .joined") == ["✓··", "é·"]
    shown = texts(page, "#turn-1 .tokens .t")
    assert shown[:4] == ["x", "⟨U+000D⟩", "⟨U+0000⟩", "y"] and shown[4] == "⟨U+200B⟩·"[:8]
    decoded = page.evaluate("tokenTexts(['\\xe2\\x9c', 'b', '\\xf0\\x9f', '\\x98\\x80c', '\\xed\\xa0\\x80'])")
    assert [(one["text"], one["joined"]) for one in decoded] == [
        ("⟨E2⟩⟨9C⟩", False), ("b", False), ("😀", False), ("c", True), ("⟨ED⟩⟨A0⟩⟨80⟩", False),
    ]  # fmt: skip


def test_two_steps_are_compared(page_file: Path, visit: Visit) -> None:
    page = visit(page_file)
    page.keyboard.press("c")
    page.wait_for_selector("main[data-page=compare]")
    page = visit(page_file, "#compare/0/train/0/0/train/11")
    assert texts(page, ".compared tr:has(th:text-is('success')) td") == ["16.7 %", "100 %", "▲ +83.3 points"]
    assert page.locator(".pairs tr").count() == 12
    assert "matched by start" in page.locator("h2 .note").inner_text()
    assert texts(page, ".pairs tbody th")[0] == '{"secret": 1}'
    assert "Of 12 pairs, 0 succeed more often on the left, 12 on the right." in page.locator("#page").inner_text()
    page.locator("input[type=checkbox]").check()
    assert page.locator(".pairs tr").count() == 12
    page.locator(".pairs a.button").first.click()
    page.wait_for_selector("main[data-page=pair]")
    left, right = page.locator(".episode").nth(0).bounding_box(), page.locator(".episode").nth(1).bounding_box()
    assert left["y"] == right["y"] and left["x"] + left["width"] <= right["x"]


def test_labels_of_an_axis_are_not_cut(page_file: Path, visit: Visit) -> None:
    starts = visit(page_file).evaluate("""() => [[-2e29, 5e29], [-0.0004, 0.0002], [0, 1]].map((ends) => {
      const points = ends.map((value, k) => [k + 1, value]);
      const data = { title: "", about: "", series: [{ label: "", points }], format: number };
      const chart = lineChart(data, { width: 380, range: [1, 2] });
      document.body.append(chart.element);
      return Math.min(...[...chart.drawing.querySelectorAll("text")].map((text) => text.getBBox().x));
    })""")
    assert min(starts) >= 0


def test_two_runs_are_compared(run: Path, tmp_path: Path, visit: Visit) -> None:
    other = guessing_run(tmp_path, steps=12, groups=12, members=8, name="20260102-000000-beef")
    runs = [*open_records(run), *open_records(other)]
    page = visit(write_page(runs, tmp_path / "view.html", compared=1).path)
    assert page.locator(".chart").first.locator("path").count() == 2
    assert page.locator("path.series-1").first.evaluate("one => getComputedStyle(one).strokeDasharray") != "none"
    first, second = f"{run.parents[1].name} · grpo", f"{tmp_path.name} · grpo"
    assert texts(page, ".key span[class^=key]") == [first, second]
    page = visit(tmp_path / "view.html", "#run/1")
    assert texts(page, ".key span[class^=key]") == [second, first]
    page = visit(tmp_path / "view.html", "#compare/0/train/3/1/train/3")
    assert "start and seed" in page.locator("h2 .note").inner_text() and page.locator(".pairs tr").count() == 12


def test_evaluations_of_one_environment_are_compared(tmp_path: Path, visit: Visit) -> None:
    wins = {"a": [True, True, False], "b": [True, False, False], "c": [False] * 3}
    for place, (policy, won) in enumerate(wins.items()):
        games = [play(["1"], ["x"], [float(win)], success=win, seed=seed) for seed, win in enumerate(won)]
        environment = "hard" if policy == "b" else "easy"
        run_of(tmp_path, games, name=f"eval-20260101-000000-abcd-{place}-0", policy=policy, environment=environment)
    page = visit(write_page(open_records(tmp_path), tmp_path / "view.html").path)
    page.locator("nav a", has_text="compare").click()
    page.wait_for_function("() => document.body.dataset.ready === '#compare/2/eval/0/0/eval/0'")
    assert "Of 3 pairs, 0 succeed more often on the left, 2 on the right." in page.locator("#page").inner_text()
    page.locator("input[type=checkbox]").check()
    assert page.locator(".pairs tr").count() == 2
    assert [title.split(" · ")[0] for title in texts(page, ".compared thead div")] == ["c", "a"]


def test_filters_choose_outcome_stop_reason_and_environment(page_file: Path, visit: Visit) -> None:
    page = visit(page_file, "#step/0/train/5")
    page.locator("#filter-outcome").select_option("failure")
    assert page.locator(".member .badge.success").count() == 0 < page.locator(".member").count() == 44
    page.locator("#filter-stop").select_option("terminated")
    assert page.locator(".member").count() == 0
    page.locator("#filter-outcome").select_option("")
    assert page.locator(".member").count() == 52
    page.locator("#filter-environment").select_option("hard")
    assert page.locator(".card").count() == 6
    page.locator(".member").first.click()
    page.wait_for_selector("main[data-page=episode]")
    seen = []
    for _ in range(8):
        seen.append(page.locator(".facts").inner_text())
        before = page.url
        page.keyboard.press("j")
        page.wait_for_function(
            "url => location.href !== url && document.body.dataset.ready === location.hash", arg=before
        )
    assert all("hard" in text and "success" in text and "no success" not in text for text in seen)


def test_every_page_is_reached_by_the_keyboard(page_file: Path, visit: Visit) -> None:
    page = visit(page_file, "#episode/0/500")

    def press(key: str, place: str) -> None:
        page.keyboard.press(key)
        page.wait_for_function("place => document.body.dataset.ready === place", arg=place)

    press("j", "#episode/0/501")
    press("k", "#episode/0/500")
    press("l", "#episode/0/596")
    press("h", "#episode/0/500")
    press("u", "#group/0/train/5/2")
    press("j", "#group/0/train/5/3")
    press("l", "#group/0/train/6/3")
    press("u", "#step/0/train/6")
    press("k", "#step/0/train/5")
    press("c", "#compare/0/train/0/0/train/5")
    press("r", "#run/0")
    page.keyboard.press("?")
    keys = texts(page, "dialog kbd")
    assert page.locator("dialog").is_visible() and {"j", "k", "c", "t", "?", "1", "8"} <= set(keys)
    page.keyboard.press("Escape")
    assert not page.locator("dialog").is_visible()
    page.keyboard.press("f")
    assert page.evaluate("document.activeElement.id").startswith("filter-")
    page = visit(page_file, "#episode/0/500")
    page.keyboard.press(".")
    page.keyboard.press(".")
    assert page.locator(".t.at").get_attribute("data-k") == "1" and page.locator("#token").is_visible()
    page.keyboard.press("c")
    page.keyboard.press("j")
    page.wait_for_function("() => document.body.dataset.ready === '#episode/0/501'")
    page.keyboard.press("c")
    page.wait_for_function("() => document.body.dataset.ready === '#pair/0/500/0/501'")


# ------------------------------------------------------------------------------------------------ hostile, huge, odd


def test_hostile_text_stays_text(tmp_path: Path, visit: Visit) -> None:
    game = play(
        [HOSTILE], [HOSTILE], [0.0], prompt=HOSTILE, error=HOSTILE, environment_name=HOSTILE, options={HOSTILE: HOSTILE},
        stop=StopReason.ENVIRONMENT_ERROR,
    )  # fmt: skip
    game.turns[0].info[HOSTILE] = HOSTILE
    folder = run_of(tmp_path, [game, game], policy=HOSTILE, model=HOSTILE, options={HOSTILE: HOSTILE})
    RecordWriter(tmp_path, {"run": folder.name}).write_metrics(0, {HOSTILE: 1.0})
    RecordWriter(tmp_path, {"run": folder.name}).write_metrics(1, {HOSTILE: 2.0})
    path = write_page(open_records(folder), tmp_path / "view.html").path
    for place in ("", "#step/0/eval/0", "#episode/0/0", "#compare/0/eval/0/0/eval/0", "#pair/0/0/0/1",
                  "#group/0/eval/0/<img>", *NOWHERE):  # fmt: skip
        page = visit(path, place)
        for fold in page.locator("details summary").all():
            fold.click()
        assert page.evaluate("typeof window.hacked") == "undefined"
        assert page.locator("img").count() == 0
        assert page.evaluate("[...document.scripts].filter((one) => !one.type).length") == 1
        body = page.locator("body").inner_text()
        assert not re.search("[\x00\u202e]", body)
        assert "<img src=x onerror=alert(1)>" in body or "no group <img>" in body or place in NOWHERE, place
        assert page.locator("#page").bounding_box()["width"] <= 1280
    page = visit(path, "#episode/0/0")
    assert page.locator(".turn .text").first.inner_text() == HOSTILE.replace("\x00", "⟨U+0000⟩").replace(
        "\u202e", "⟨U+202E⟩"
    ).replace("\ud800", "\\ud800")


def test_what_a_judge_said_stands_beside_the_words_for_it(tmp_path: Path, visit: Visit) -> None:
    """As text, whatever it says; a judge that failed has no score."""
    game = play([HOSTILE, "b"], ["x", "y"], [0.0, 0.0])
    game.turns[0].judgements = {"judge": {"score": 0.25, "reason": HOSTILE, "addressed": [HOSTILE]}}
    game.turns[1].judgements = {"other": {"failed": "HTTP 500", "held_out": True}}
    path = write_page(open_records(run_of(tmp_path, [game])), tmp_path / "view.html").path
    page = visit(path, "#episode/0/0")
    shown = [turn.inner_text() for turn in page.locator(".turn").all()]
    assert "judge: 0.25" in shown[0] and "The model seems to address the judge: “</script><img src=x" in shown[0]
    assert "other: no score (held out)" in shown[1] and "HTTP 500" in shown[1] and "address the judge" not in shown[1]
    assert page.evaluate("typeof window.hacked") == "undefined" and page.locator("img").count() == 0


def test_the_policy_refuses_markup_and_requests(page_file: Path, visit: Visit) -> None:
    page = visit(page_file)
    assert (
        page.evaluate(
            "(() => { try { document.body.innerHTML = '<b>x</b>'; } catch (error) { return error.name; } })()"
        )
        == "TypeError"
    )
    assert page.evaluate("fetch('https://example.com').catch((error) => error.name)") == "TypeError"
    assert page.problems and all("Content Security Policy" in text or "TrustedHTML" in text for text in page.problems)
    page.problems.clear()


def test_ten_megabytes_are_shown_on_demand(tmp_path: Path, visit: Visit) -> None:
    lines = "".join(f"{k} {'x' * 90}\n" for k in range(105_000))
    games = [
        play(["look"], [lines], [1.0]),
        play(["look"], ["y" * 10_000_000], [0.0]),
        play(["look"], ["short"], [0.0]),
    ]
    path = write_page(open_records(run_of(tmp_path, games)), tmp_path / "view.html").path
    page = visit(path, "#step/0/eval/0")
    assert page.locator(".member").count() == 3
    page = visit(path, "#episode/0/0")
    assert len(page.locator("#page").inner_text()) < 10_000
    page.locator("#turn-0 .more").click()
    page.locator("#turn-0 .block").last.scroll_into_view_if_needed()
    page.wait_for_function(
        "() => document.querySelector('#turn-0 .block:last-of-type').innerText.includes('104999 xxx')"
    )
    assert page.evaluate("document.querySelector('#turn-0 .text').textContent.length") == len(lines)
    page = visit(path, "#episode/0/1")
    page.locator("#turn-0 .more").click()
    assert page.evaluate("document.querySelector('#turn-0 .text').textContent") == "y" * 10_000_000


def test_long_answers_are_cut_until_asked_for(tmp_path: Path, visit: Visit) -> None:
    path = write_page(
        open_records(run_of(tmp_path, [play(["word " * 2000], [""], [1.0])])), tmp_path / "view.html"
    ).path
    page = visit(path, "#episode/0/0")
    assert page.locator("#turn-0 .tokens .t").count() == 3000
    page.locator("#turn-0 .tokens .more").click()
    assert page.locator("#turn-0 .tokens .t").count() == 10_001
    assert page.locator("#turn-0 .tokens .t.seq").count() > 9_900


def test_a_run_without_episodes_shows_its_metrics(tmp_path: Path, visit: Visit) -> None:
    writer = RecordWriter(tmp_path, {"run": "20260101-000000-0000", "kind": "training"})
    path = tmp_path / "view.html"
    page = visit(write_page(open_records(tmp_path), path).path)
    assert page.locator(".chart").count() == 0 and page.locator("tbody tr").count() == 0
    for step in (1, 2):
        writer.write_metrics(step, {"success": step / 2, "entropy": float("nan")})
    page = visit(write_page(open_records(tmp_path), path).path)
    assert texts(page, ".chart figcaption") == ["Success\n100 %"]
    page.mouse.click(300, 300)
    for key in "jkhlnpurcft?":
        page.keyboard.press(key)
    page.keyboard.press("Escape")


def test_five_thousand_episodes_open_at_once(tmp_path: Path, visit: Visit) -> None:
    """Prints the size of the file and the time to open it; of 50 steps of 100 episodes of about 300 tokens."""
    tokens = large_run(tmp_path)
    written = write_page(open_records(tmp_path), tmp_path / "view.html")
    assert written.episodes == 5000 and written.left_out == 0
    for place in ("", "#step/0/train/25", "#episode/0/4321", "#episodes/0", "#episodes/0?sort=-clip"):
        started = time.perf_counter()
        page = visit(written.path, place)
        seconds = time.perf_counter() - started
        print(
            f"\n5,000 episodes, {tokens:,} tokens, {written.size / 1e6:.1f} MB: {place or '#run'} after {seconds:.2f} s",
            end="",
        )
        assert page.locator("#page").inner_text().count("\n") > 10
    for query, expected in (("needle 17", 111), ("NEEDLE 4321", 1), ("no such text", 0)):
        started = time.perf_counter()
        page.locator("#search").fill(query)
        page.wait_for_function("query => document.body.dataset.found === query", arg=query)
        print(f"\n5,000 episodes: searched for {query!r} in {time.perf_counter() - started:.2f} s", end="")
        shown = page.locator("#found").inner_text()
        assert shown.startswith(f"{expected:,} of 5,000"), shown


# ------------------------------------------------------------------------------------------------------------ following


def test_a_run_that_goes_on_is_followed(tmp_path: Path, visit: Visit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agile_trainers.viewer.server.SECONDS", 0.2)
    folder = guessing_run(tmp_path, steps=3, groups=2, members=2)
    later = folder / "train-000002-rank0.parquet"
    later.rename(tmp_path / "later")
    with Server(LiveRuns(lambda: open_records(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = visit(server.url)
        assert page.locator("tbody tr").count() == 3
        (tmp_path / "later").rename(later)
        page.wait_for_function("() => document.querySelectorAll('tbody tr').length === 4")
        page.locator("tbody a", has_text="step 2").click()
        page.locator(".member").first.click()
        page.wait_for_selector("main[data-page=episode]")
        assert page.locator(".turn").count() >= 1
        address = page.url
        RecordWriter(tmp_path, {"run": folder.name}).write_eval(
            3, "more", [episode_row(play(["1"], ["x"], [0.0]), step=3)]
        )
        page.wait_for_function("() => VIEW.runs[0].size === 18")
        assert page.url == address and page.locator("main[data-page=episode]").count() == 1
        page.goto("about:blank")
        server.shutdown()


# -------------------------------------------------------------------------------------------------------------- legible

CONTRAST = """(selector) => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const pixel = (colours) => {
    canvas.clearRect(0, 0, 1, 1);
    for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const shown = [...document.querySelectorAll(selector)].filter((one) => one.innerText?.trim() && one.checkVisibility());
  return Math.min(...shown.map((one) => {
    const behind = [];
    for (let up = one; up; up = up.parentElement) behind.unshift(getComputedStyle(up).backgroundColor);
    const [a, b] = [light(pixel([...behind, getComputedStyle(one).color])), light(pixel(behind))];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  }));
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_legible_on_every_colour(page_file: Path, visit: Visit, scheme: str) -> None:
    """WCAG AA: a contrast of 4.5 to 1, in both schemes, on the strongest colours too."""
    for place in ("", "#step/0/train/5", "#group/0/train/5/3", "#compare/0/train/0/0/train/11"):
        page = visit(page_file, place, scheme=scheme)
        assert (
            page.evaluate(CONTRAST, "#bar *, #page a, #page b, #page span, #page td, #page th, #page button, .note")
            >= 4.5
        ), place
    page = visit(page_file, f"#episode/0/{5 * 96 + 21}", scheme=scheme)
    for key in "12345678":
        page.keyboard.press(key)
        assert (
            page.evaluate(CONTRAST, ".t, .t *, #page dt, #page dd, #page p, #page .role, #page b, #page .number") >= 4.5
        ), key


@pytest.mark.parametrize("width", [390, 1280])
def test_no_page_is_wider_than_the_window(page_file: Path, visit: Visit, width: int) -> None:
    for name, place in {"run": "", "step": "#step/0/train/5", "group": "#group/0/train/5/3",
                        "episode": f"#episode/0/{5 * 96 + 21}", "compare": "#compare/0/train/0/0/train/11",
                        "pair": "#pair/0/0/0/1100", "episodes": "#episodes/0?q=higher"}.items():  # fmt: skip
        for scheme in ("light", "dark"):
            page = visit(page_file, place, width=width, scheme=scheme)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, name
            shoot(page, f"{name}-{width}-{scheme}")


def test_the_members_of_a_population_have_a_table_with_links(tmp_path: Path, visit: Visit) -> None:
    runs = with_members(open_records(populated(tmp_path)))
    page = visit(write_page(runs, tmp_path / "view.html").path)
    table = "section[aria-label=Population]"
    assert texts(page, f"{table} thead th") == ["member", "copy of", "learning_rate", "steps", "success", "state"]
    rows = [line.split("\t") for line in texts(page, f"{table} tbody tr")]
    assert rows == [
        ["member 3", "1", "1e-06", "4", "0.875 ± 0.0312", "the best"],
        ["member 1", "", "0.00025", "4", "0.625", ""],
        ["member 0", "", "1e-06", "2", "0.75", "stopped"],
    ]
    assert page.locator(f"{table} tr[aria-current]").inner_text().startswith("member 3")
    shoot(page, "population")
    page.locator(f"{table} a", has_text="member 0").click()
    page.wait_for_function("document.querySelector('h1').innerText.startsWith('member-00')")
    assert page.locator(f"{table} tr[aria-current]").inner_text().startswith("member 0")
