"""The viewer's lists in a real Chromium (``make test-viewer``): all runs, and the Episodes page with its address."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from made_records import END, HOSTILE, guessing_run, play, populated, run_of, write_vocabulary
from written_page import shoot, texts

from agile_trainers.records.reader import open_records
from agile_trainers.records.writer import RecordWriter, episode_row
from agile_trainers.types import StopReason
from agile_trainers.viewer.html import write_page
from agile_trainers.viewer.parts import figures, with_members
from agile_trainers.viewer.server import LiveRuns, Server

pytestmark = pytest.mark.browser
MINUS, NOTHING = "\N{MINUS SIGN}", "\N{EN DASH}"
Visit = Callable[..., Any]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps of six groups of four, and an evaluation of five episodes."""
    return guessing_run(tmp_path_factory.mktemp("run"), steps=6, groups=6)


@pytest.fixture(scope="module")
def page_file(run: Path) -> Path:
    return write_page(open_records(run), run / "view.html").path


@pytest.fixture(scope="module")
def records(run: Path) -> list[dict[str, Any]]:
    """The training episodes, in the order of the page."""
    return [one for one in open_records(run)[0].episodes() if one["phase"] == "train"]


def column(page: Any, name: str) -> list[float | None]:
    """The numbers of a column of the list."""
    shown = [
        text.split("\n")[-1].replace(MINUS, "-").removesuffix(" %")
        for text in texts(page, f".episodes tbody .is-{name}")
    ]
    return [None if text == NOTHING else float(text) for text in shown]


def wait(page: Any, place: str) -> None:
    page.wait_for_function("place => document.body.dataset.ready === place", arg=place)


# -------------------------------------------------------------------------------------------------------------- all runs


def test_runs_that_differ_in_the_seed_alone_are_a_mean_and_a_band(tmp_path: Path, visit: Visit) -> None:
    values = {"grpo": [[0.0, 0.5], [0.5, 1.0], [0.1, 0.9]], "ppo": [[0.2, 0.2], [0.2, 0.4]]}
    for algorithm, curves in values.items():
        for seed, curve in enumerate(curves):
            info = {
                "algorithm": f"Multi-turn {algorithm.upper()}",
                "environment": "e",
                "seed": seed,
                "options": {"lr": 1e-3},
            }
            writer = RecordWriter(
                tmp_path / f"{algorithm}-{seed}", {"run": f"20260101-000000-{seed}{algorithm}", **info}
            )
            for step, value in enumerate(curve):
                writer.write_metrics(step, {"success": value})
    page = visit(write_page(open_records(tmp_path), tmp_path / "view.html").path)
    assert page.locator("main[data-page=runs]").count() == 1
    assert texts(page, ".key [class^=key]") == ["grpo-… · GRPO (3 seeds)", "ppo-… · PPO (2 seeds)"]
    shown = page.evaluate("runSets().map(({ runs }) => meanOf(runs.map((run) => pointsOf(run, CHARTS[1]))))")
    for one, curves in zip(shown, values.values(), strict=True):
        for step in range(2):
            at_step = [curve[step] for curve in curves]
            assert one["points"][step] == [step, pytest.approx(mean(at_step))]
            assert one["band"][step] == [step, min(at_step), max(at_step)]
    assert page.locator(".chart .band").count() == 2 and page.locator(".chart .line").count() == 2
    assert texts(page, ".reading span") == ["80.0 %", "30.0 %"]
    assert len(texts(page, "section[aria-label='All runs'] tbody tr")) == 5
    shoot(page, "runs")
    page.locator("tbody a", has_text="ppo-1 · PPO").click()
    page.wait_for_selector("main[data-page=run]")
    assert page.locator("h1").inner_text() == "ppo-1 · PPO" and page.title().startswith("grpo-0 · GRPO, ")


def test_a_population_opens_at_its_winner(tmp_path: Path, visit: Visit) -> None:
    page = visit(write_page(with_members(open_records(populated(tmp_path))), tmp_path / "view.html").path)
    assert page.locator("h1").inner_text() == "member-03 · grpo"
    page.keyboard.press("u")
    page.wait_for_selector("main[data-page=runs]")


# ---------------------------------------------------------------------------------------------------------- the Episodes


def test_the_list_is_sorted_by_each_column(page_file: Path, records: list[dict[str, Any]], visit: Visit) -> None:
    page = visit(page_file, "#episodes/0")
    assert "149 of 149 episodes" in page.locator("#found").inner_text()
    page.locator("#rest .more, main .more").first.click()
    assert page.locator(".episodes tbody tr").count() == 149
    clips = [found[0] / found[1] for one in records if (found := figures(one)["clip"])]
    lows = [found for one in records if (found := figures(one)["low"]) is not None]
    for name, expected in {
        "return": sorted([one["return"] for one in records] + [1.0] * 5, reverse=True),
        "clip": sorted((100 * clip for clip in clips), reverse=True),
        "low": sorted(lows),
    }.items():
        page.locator(f".episodes thead .is-{name} button").click()
        assert f"sort={'' if name == 'low' else '-'}{name}" in page.url
        page.locator("main > .more, main div > .more").first.click()
        shown = column(page, name)
        assert shown[: len(expected)] == pytest.approx(expected, abs=0.06 if name == "clip" else 1e-3)
        assert set(shown[len(expected) :]) <= {None}, "episodes without a value come last"
        head = page.locator(f".episodes thead .is-{name}")
        assert head.get_attribute("aria-sort") == ("ascending" if name == "low" else "descending")
    page.locator(".episodes thead .is-low button").click()
    assert column(page, "low")[0] == pytest.approx(max(lows), abs=1e-3)


def test_the_change_is_to_the_step_before_that_played_the_same_start(tmp_path: Path, visit: Visit) -> None:
    """With the same seed where an earlier step played it; episodes whose environment failed count nowhere."""
    writer = RecordWriter(tmp_path, {"run": "20260101-000000-abcd"})
    plays: list[list[tuple[str, int, float, bool]]] = [
        [("a", 1, 0.0, False), ("a", 1, 1.0, False), ("a", 2, 4.0, False), ("b", 1, 3.0, False)],
        [("a", 1, 2.0, False), ("a", 9, 2.0, False), ("c", 1, 5.0, False), ("b", 1, -9.0, True)],
        [("a", 1, 1.0, False), ("b", 1, 3.5, False), ("c", 1, 0.0, False)],
    ]
    for step, games in enumerate(plays):
        writer.write_train(step, [
            episode_row(play(["x"], ["y"], [value], prompt=prompt, seed=seed,
                             stop=StopReason.ENVIRONMENT_ERROR if failed else StopReason.TERMINATED),
                        step=step, phase="train", index=k, group=k, member=0)
            for k, (prompt, seed, value, failed) in enumerate(games)
        ])  # fmt: skip
    path = write_page(open_records(tmp_path), tmp_path / "view.html").path
    none = [None] * 4
    # 2 to the mean of 0 and 1; 2 to the mean of all three, no step played seed 9; c is new; the failed one has no change.
    first = [*none, 1.5, pytest.approx(2 - 5 / 3, abs=1e-2), None, None]
    assert column(visit(path, "#episodes/0"), "change") == [*first, -1.0, 0.5, -5.0]
    assert column(visit(path, "#episodes/0?since=0"), "change") == [*first, 0.5, 0.5, None]
    page = visit(path, "#episodes/0?since=1")
    assert column(page, "change") == [*none, *none, -1.0, None, -5.0]
    page.locator("main select").first.select_option("0")
    assert "since=0" in page.url and column(page, "change")[-3] == 0.5


def test_texts_are_searched_as_they_are(tmp_path: Path, visit: Visit) -> None:
    odd = "a.*b (c) [d] \\ $ ^ | ü-/"
    games = [
        play([f"say {k}", odd if k == 1 else "other"], ["Higher", "LOWER"], [0.0, 1.0], prompt="Go", seed=k)
        for k in range(3)
    ]
    page = visit(write_page(open_records(run_of(tmp_path, games)), tmp_path / "view.html").path, "#episodes/0")

    def search(query: str) -> list[str]:
        page.locator("#search").fill(query)
        page.wait_for_function("query => document.body.dataset.found === query", arg=query)
        rows = texts(page, ".episodes tbody tr")
        assert page.locator("#found").inner_text().startswith(f"{len(rows)} of 3")
        page.wait_for_function("() => [...document.querySelectorAll('.snippet-cell')].every((one) => one.firstChild)")
        return texts(page, ".snippet")

    assert search("higher") == ["answer 1: Higher"] * 3 and search("go") == ["prompt: You play. Go"] * 3
    assert search("SAY 2") == ["turn 1: say 2"]
    assert search(odd.upper()) == search(odd) == [f"turn 2: {odd}"] and search(".") == ["prompt: You play. Go"] * 3
    assert search("a.b") == [] and texts(page, ".episodes tbody tr") == []
    assert search("(") == [f"turn 2: {odd}"] and texts(page, "mark") == ["("]


def test_the_choices_stay_in_the_address(page_file: Path, records: list[dict[str, Any]], visit: Visit) -> None:
    """After a reload, on other pages and back; and the next episode is the next of the list."""
    page = visit(page_file, "#episodes/0")
    page.locator("#filter-outcome").select_option("failure")
    page.wait_for_function("() => document.body.dataset.ready.includes('outcome=failure')")
    page.locator("#search").fill("lower")
    page.wait_for_function("() => document.body.dataset.found === 'lower'")
    page.locator(".episodes thead .is-low button").click()
    wanted = [k for k, one in enumerate(records) if one["success"] is False]
    low = {k: figures(records[k])["low"] for k in wanted}
    wanted.sort(key=lambda k: (low[k] is None, low[k] or 0, k))
    before = texts(page, ".episodes tbody tr")
    assert len(before) == len(wanted) < 100
    page.reload()
    page.wait_for_selector("body[data-ready]")
    assert texts(page, ".episodes tbody tr") == before
    assert (
        page.locator("#search").input_value() == "lower" and page.locator("#filter-outcome").input_value() == "failure"
    )
    query = page.url.partition("?")[2]
    assert set(query.split("&")) == {"outcome=failure", "q=lower", "sort=low"}
    page.locator(".episodes tbody a").first.click()
    for place in wanted[:4]:
        wait(page, f"#episode/0/{place}?{query}")
        page.keyboard.press("j")
    page.locator("nav a", has_text="episodes").click()
    wait(page, f"#episodes/0?{query}")
    assert texts(page, ".episodes tbody tr") == before


def test_filters_act_on_charts(page_file: Path, records: list[dict[str, Any]], visit: Visit) -> None:
    page = visit(page_file, "#run/0?environment=hard")
    assert page.locator("#filter-environment").input_value() == "hard"
    titles = texts(page, ".chart figcaption > span:first-child")
    assert titles == ["Return", "Success", "Clipped share"], "what only the log has is not shown"
    assert "counted from the episodes" in page.locator("[role=note]").first.inner_text()
    for name, chart in (("return", 0), ("success", 1)):
        points = page.evaluate("chart => pointsOf(VIEW.runs[0], CHARTS[chart])", chart)
        hard = [one for one in records if one["environment"] == "hard"]
        for step in range(6):
            expected = mean(float(one[name]) for one in hard if one["step"] == step)
            assert points[step] == [step, pytest.approx(expected, abs=1e-5)]
    clips = [clip for one in hard if one["step"] == 2 and (clip := figures(one)["clip"])]
    assert page.evaluate("pointsOf(VIEW.runs[0], CHARTS[3])[2]") == [
        2, pytest.approx(sum(clip[0] for clip in clips) / sum(clip[1] for clip in clips))
    ]  # fmt: skip
    page.locator("#filter-environment").select_option("")
    wait(page, "#run/0")
    assert len(texts(page, ".chart figcaption > span:first-child")) == 5
    page = visit(page_file, "#runs?environment=hard")
    assert texts(page, ".chart figcaption > span:first-child") == titles
    page = visit(page_file, "#run/0?outcome=nonsense")
    assert page.locator("#filter-outcome").input_value() == "nonsense", "what filters is shown, also if it is unknown"


def test_the_list_of_a_run_that_goes_on(tmp_path: Path, visit: Visit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agile_trainers.viewer.server.SECONDS", 0.2)
    run = guessing_run(tmp_path, steps=6, groups=6)
    with Server(LiveRuns(lambda: open_records(run))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = visit(server.url, "#episodes/0?q=I+guess&sort=-clip")
        assert page.locator("#found").inner_text().startswith("144 of 149")
        shown = [value for value in column(page, "clip") if value is not None]
        assert len(shown) > 10 and shown == sorted(shown, reverse=True)
        new = episode_row(play(["I guess"], ["x"], [0.0]), step=9)
        RecordWriter(tmp_path, {"run": run.name}).write_eval(9, "more", [new])
        page.locator("#newer").click()
        page.wait_for_function("() => document.getElementById('found').innerText.startsWith('145 of 150')")
        page.goto("about:blank")
        server.shutdown()


def test_hostile_text_in_the_list_stays_text(tmp_path: Path, visit: Visit) -> None:
    game = play(
        [HOSTILE], [HOSTILE], [0.0], prompt=HOSTILE, error=HOSTILE, environment_name=HOSTILE, options={HOSTILE: HOSTILE}
    )
    folder = run_of(tmp_path / "<img src=x onerror=alert(1)>", [game, game], policy=HOSTILE, algorithm=HOSTILE)
    run_of(tmp_path / "other", [game], algorithm=HOSTILE, seed=1, options={HOSTILE: HOSTILE})
    path = write_page(open_records(tmp_path), tmp_path / "view.html").path
    for place in ("#runs", "#episodes/0", "#episodes/0?q=onerror", "#episodes/0?environment=<img src=x>&q=<img>",
                  "#episodes/0?sort=__proto__&since=toString&outcome=constructor",
                  "#episodes/0?sort=-%00%u202e&q=%"):  # fmt: skip
        page = visit(path, place)
        for fold in page.locator("details:not([open]) summary").all():
            fold.click()
        assert page.evaluate("typeof window.hacked") == "undefined" and page.locator("img").count() == 0, place
        assert page.evaluate("[...document.scripts].filter((one) => !one.type).length") == 1
        assert not re.search("[\x00\u202e]", page.locator("body").inner_text())
        assert page.locator("#page .error[role=alert]").count() == 0, place
    page = visit(path, "#episodes/0?q=onerror")
    assert page.locator(".episodes tbody tr").count() == 2 and set(texts(page, "mark")) == {"onerror"}
    assert folder.is_dir()


# --------------------------------------------------------------------------------------------------- groups and episodes


def group_of(folder: Path, rewards: list[list[float]], advantages: list[list[float] | None], **info: Any) -> Path:
    """A page of one group."""
    writer = RecordWriter(folder, {"run": "20260101-000000-abcd", "environment": "e"} | info)
    writer.write_train(0, [
        episode_row(play(["a"] * len(given), ["b"] * len(given), given, success=sum(given) > 0), step=0, phase="train",
                    index=member, generation=0, group=0, member=member, advantages=advantage)
        for member, (given, advantage) in enumerate(zip(rewards, advantages, strict=True))
    ])  # fmt: skip
    return write_page(open_records(folder), folder / "view.html").path


@pytest.mark.parametrize(
    ("rewards", "advantages", "options", "expected"),
    [
        ([[1.0], [1.0]], [[0.0], [0.0]], {}, "All 2 episodes have the return 1, so that none is better. All succeed"),
        ([[0.0], [0.0]], [[0.0], [0.0]], {}, "None succeeds"),
        ([[1.0], [0.0]], [None, None], {}, "took no part in an update"),
        ([[1.0], [0.0]], [[0.0], [5e-7]], {}, "zero_advantage_eps"),
        ([[1.0], [0.0]], [[0.5], [-0.5]], {}, None),
    ],
)  # fmt: skip
def test_a_group_says_why_it_has_no_advantage(
    rewards: list[list[float]],
    advantages: Any,
    options: dict[str, Any],
    expected: str | None,
    tmp_path: Path,
    visit: Visit,
) -> None:
    path = group_of(tmp_path, rewards, advantages, options=options)
    page = visit(path, "#group/0/train/0/0")
    if expected is None:
        assert page.locator(".why").count() == 0
    else:
        assert expected in page.locator(".why").inner_text()
    page = visit(path, "#group/0/train/0/0?outcome=success")
    assert page.locator(".why").count() == (expected is not None), "a filter does not change the group"


def test_clipping_is_counted_by_episode_and_group(page_file: Path, records: list[dict[str, Any]], visit: Visit) -> None:
    place, group = next(
        (k, one["group"]) for k, one in enumerate(records) if one["step"] == 2 and any(one["clipped"] or ())
    )
    mine = [figures(one)["clip"] for one in records if (one["step"], one["group"]) == (2, group)]
    share = sum(clip[0] for clip in mine if clip) / sum(clip[1] for clip in mine if clip)
    own = figures(records[place])["clip"]
    page = visit(page_file, "#step/0/train/2")
    assert (
        f"clipped {100 * share:.1f} %"
        in page.locator(".card", has=page.locator(f"a[href='#group/0/train/2/{group}']")).inner_text()
    )
    page = visit(page_file, f"#group/0/train/2/{group}")
    assert f"{100 * share:.1f} %" in page.locator("dl.facts").inner_text()
    page = visit(page_file, f"#episode/0/{place}")
    assert f"clipped tokens\n{100 * own[0] / own[1]:.1f} %" in page.locator("dl.facts").inner_text()


def test_cards_show_all_turns_of_long_episodes(tmp_path: Path, visit: Visit) -> None:
    turns = 250
    path = group_of(
        tmp_path,
        [[float(k % 100 == 0) for k in range(turns)], [0.0] * 3],
        [[k / turns - 0.5 for k in range(turns)], [0.0] * 3],
    )
    page = visit(path, "#step/0/train/0")
    bars = page.locator(".card .member").first.locator(".turnbar")
    assert bars.count() == 5 and page.locator(".strip.long").get_attribute("aria-label") == "250 turns, 3 with a reward"
    stripes = [
        bars.nth(k).evaluate("one => one.style.getPropertyValue('--stripes').split('color-mix').length - 1")
        for k in range(5)
    ]
    assert sum(stripes) == turns - 1, "every turn but the one of advantage 0 has a colour"
    card = page.locator(".card").bounding_box()
    for one in page.locator(".card .stop").all():
        assert one.bounding_box()["x"] + one.bounding_box()["width"] <= card["x"] + card["width"]
    assert page.locator(".card .member").nth(1).locator(".cell").count() == 3
    page = visit(path, "#group/0/train/0/0")
    assert page.locator(".side tbody tr").count() == turns + 1


@pytest.fixture(scope="module")
def huge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two episodes of 130,000 tokens: of 200 turns, and of one."""
    folder = tmp_path_factory.mktemp("huge")
    writer = RecordWriter(folder, {"run": "20260101-000000-abcd"})
    write_vocabulary(writer.folder)
    games = [play(["word " * 128] * 200, ["seen"] * 200, [0.0] * 200), play(["wörd " * 21_700], ["seen"], [0.0])]
    assert all(130_000 <= len(game.completion_ids) < 135_000 for game in games)
    rows = [
        episode_row(game, step=0, phase="train", index=k, advantages=[0.5] * len(game.turns))
        for k, game in enumerate(games)
    ]
    writer.write_train(0, rows)
    return write_page(open_records(folder), folder / "view.html").path


def test_what_is_visible_of_a_huge_episode_is_drawn(huge: Path, visit: Visit) -> None:
    page = visit(huge, "#episode/0/0")
    assert page.locator(".turn").count() == 200
    assert 3000 <= page.locator(".t").count() < 15_000
    assert page.evaluate("document.querySelector('#turn-199 .tokens').textContent") == "word " * 128, (
        "the search finds it"
    )
    page.wait_for_function("""() => {
      document.querySelector('#turn-150').scrollIntoView(); // again, since turns before it grow when they are drawn
      return document.querySelectorAll('#turn-150 .tokens .t').length === 641;
    }""")
    assert page.locator("#turn-150 .t.pos").count() == 641 and page.locator("#turn-150.later").count() == 0
    page = visit(huge, "#episode/0/1")
    assert page.locator("#turn-0 .t").count() in (3000, 3001)
    page.locator("#turn-0 .tokens .more").click()
    shown = page.locator("#turn-0 .t").count()
    assert 23_000 <= shown <= 23_002 and page.locator("#turn-0 .t.pos").count() == shown
    assert page.locator("#turn-0 .joined").count() == (shown + 4) // 6, "a character of two tokens in each word of six"
    assert "⟨" not in page.locator("#turn-0 > .tokens").inner_text(), "no character was split"


def test_special_tokens_stay_whole_in_text_from_right_to_left(tmp_path: Path, visit: Visit) -> None:
    game = play(["שלום עולם"], ["مرحبا"], [1.0])
    assert END in game.completion_ids
    page = visit(write_page(open_records(run_of(tmp_path, [game])), tmp_path / "view.html").path, "#episode/0/0")
    special = page.locator("#turn-0 .special").first
    assert special.inner_text() == "<|im_end|>"
    places = special.evaluate("""(one) => [...one.firstChild.data].map((_, k) => {
      const range = document.createRange();
      range.setStart(one.firstChild, k);
      range.setEnd(one.firstChild, k + 1);
      return range.getBoundingClientRect().left;
    })""")
    assert places == sorted(places) and len(set(places)) == 10, "its characters stand from left to right"
    word = page.locator("#turn-0 .t").first.bounding_box()
    assert special.bounding_box()["x"] < word["x"], "the text goes from right to left"


def test_controls_have_names(page_file: Path, visit: Visit) -> None:
    """Every link, button and field has a name, and no heading is skipped."""
    for place in (
        "",
        "#step/0/train/2",
        "#group/0/train/2/1",
        "#episode/0/30",
        "#episodes/0?q=guess",
        "#compare/0/train/0/0/train/5",
    ):
        page = visit(page_file, place)
        unnamed = page.evaluate("""() => [...document.querySelectorAll('a, button, select, input')].filter((one) => {
          const label = one.getAttribute('aria-label') || one.labels?.[0]?.textContent || one.textContent || one.title;
          return one.checkVisibility() && !label.trim();
        }).map((one) => one.outerHTML)""")
        assert unnamed == [], place
        levels = [
            int(tag[1])
            for tag in page.evaluate(
                "[...document.querySelectorAll('main :is(h1,h2,h3,h4)')].map((one) => one.tagName)"
            )
        ]
        assert levels[0] == 1 and all(after <= before + 1 for before, after in pairwise(levels)), place
    page.locator(".skip").focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "page" and "#compare" in page.url


def test_the_header_is_low_on_a_telephone(page_file: Path, visit: Visit) -> None:
    page = visit(page_file, "#episodes/0", width=390)
    bar = page.locator("#bar").bounding_box()
    assert bar["height"] <= 140 and page.evaluate("document.documentElement.scrollWidth") <= 390
    theme, title = page.locator("#theme").bounding_box(), page.locator("#bar strong").bounding_box()
    assert abs(theme["y"] + theme["height"] / 2 - title["y"] - title["height"] / 2) < 8, (
        "title and buttons are one line"
    )
