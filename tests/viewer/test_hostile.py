"""Records of strangers: no value of any file becomes markup, none ends the viewer, and every other file is shown."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hostile_records import MARKUP, write_hostile
from made_records import guessing_run
from written_page import Page

from agile_trainers.cli.main import main
from agile_trainers.cli.view import _find, make_parser
from agile_trainers.records.reader import open_records
from agile_trainers.viewer.html import script_tag, write_page
from agile_trainers.viewer.parts import SECTION_PARTS
from agile_trainers.viewer.server import LiveRuns, Server, _Handler

Visit = Callable[..., Any]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[str]]:
    """A folder of hostile runs, its page, and the files that cannot be shown."""
    folder = tmp_path_factory.mktemp("hostile")
    bad = write_hostile(folder)
    assert main(["view", str(folder), "--output", str(folder / "view.html")]) == 0
    return folder, folder / "view.html", bad


def elements(page: Page) -> list[Any]:
    """The elements but for those of data."""
    return [(tag, attributes) for tag, attributes in page.tags if tag != "script" or "type" not in attributes]


def test_no_value_of_any_file_becomes_markup(hostile: tuple[Path, Path, list[str]], tmp_path: Path) -> None:
    """The page has the elements of any page; all that differs is data in Base64, in elements with simple names."""
    usual = Page(write_page(open_records(guessing_run(tmp_path, steps=1)), tmp_path / "view.html").path)
    page = Page(hostile[1])
    assert elements(page) == elements(usual)
    for tag, attributes in page.tags:
        if tag == "script" and "type" in attributes:
            assert set(attributes) == {"type", "id"}
            assert re.fullmatch(
                r"index|episodes/\d+/\d+|(outline|figures|texts)/\d+/(train-\d+-\d+|eval-\d+-\d+-[\w.]+)",
                attributes["id"] or "",
                re.ASCII,
            )
    assert "hacked" not in page.text and "example.org" not in page.text


def test_the_one_place_where_text_becomes_markup_escapes_it() -> None:
    tag = script_tag(MARKUP + "é\ud800".encode("utf-8", "replace").decode(), b"{}").decode()
    assert tag.count("<") == 2 and tag.count(">") == 2 and tag.isascii()


def test_what_cannot_be_shown_is_named_and_the_rest_is_shown(
    hostile: tuple[Path, Path, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    _, path, bad = hostile
    index = Page(path).part("index")
    (columns,) = [run for run in index["runs"] if run["name"] == "columns"]
    named = " ".join(columns["problems"])
    assert all(name in named for name in bad) and len(columns["problems"]) == len(bad)
    assert len(columns["episodes"]["return"]) >= 40
    for run in index["runs"]:
        assert all(type(step) is int for _, step, _, _, _ in run["sections"])
        assert all(type(finding["step"]) is int for finding in run["findings"])
        assert all(
            value is None or isinstance(value, (int, float)) for column in run["metrics"].values() for value in column
        )
        assert all(isinstance(value, (str, dict)) for value in run["info"].values())
        assert type(run["label"]) is str and len(run["label"]) < 300 and type(run["set"]) is int
    page = Page(path)
    for name in filter(None, page.scripts):
        kind, _, rest = name.partition("/")
        for one in page.part(name) if kind in ("figures", "texts") else ():
            if kind == "texts":
                assert len(one) >= 2 and all(type(text) is str for text in one), rest
            else:
                assert re.fullmatch("[0-9a-f]{16}", one["start"]) and type(one["low"]) in (float, int, type(None))
                assert one["clip"] is None or all(type(count) is int for count in one["clip"])
    assert any("lineage.json" in problem for run in index["runs"] for problem in run["problems"])


def test_the_server_shows_the_rest_too(hostile: tuple[Path, Path, list[str]]) -> None:
    """Every part that the index names can be asked for."""
    options = make_parser().parse_args([str(hostile[0])])
    runs = LiveRuns(lambda: _find(options)[0])
    index = json.loads(runs.index() or b"")
    assert len(index["runs"]) > 50
    for number, run in enumerate(index["runs"]):
        for _, _, _, name, _ in run["sections"]:
            for kind in SECTION_PARTS:
                assert json.loads(runs.part(f"{kind}/{number}/{name}") or b"") is not None
        for part in run["episodes"]["part"]:
            assert json.loads(runs.part(f"episodes/{number}/{part}") or b"")["episodes"]


def test_a_file_that_changes_under_the_server_shows_what_happened(tmp_path: Path) -> None:
    folder = guessing_run(tmp_path, steps=1, groups=1)
    runs = LiveRuns(lambda: open_records(tmp_path))
    (run,) = json.loads(runs.index() or b"")["runs"]
    path = next(folder.glob("train-*.parquet"))
    path.write_bytes(path.read_bytes()[:-100])
    (episode,) = json.loads(runs.part(f"episodes/0/{run['episodes']['part'][0]}") or b"")["episodes"]
    assert path.name in episode["error"] and episode["turns"] == []
    (run,) = json.loads(runs.index() or b"")["runs"]
    assert path.name in run["problems"][0] and len(run["episodes"]["return"]) == 5  # the evaluation's


def test_connections_that_say_nothing_or_nonsense_end(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """Each without a traceback: a browser that leaves, an address that is none, and one that waits for ever."""
    monkeypatch.setattr(_Handler, "timeout", 0.2)
    server = Server(LiveRuns(list))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    for sent in (b"", b"GET http://[ HTTP/1.0\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", server.server_port)) as connection:
            connection.sendall(sent)
            answer = b"".join(iter(lambda: connection.recv(1000), b""))  # until the server closes it
            assert answer.partition(b"\r")[0] == (b"HTTP/1.0 404 Not Found" if sent else b"")
    server.shutdown()
    server.server_close()
    thread.join()
    assert capfd.readouterr().err == ""


def test_one_damaged_file_of_each_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command names each, and writes a page of the rest; what it prints cannot steer the terminal."""
    folder = guessing_run(tmp_path / "\x1b[2J\u202e", steps=5, groups=1)
    paths = sorted(folder.glob("train-*.parquet"))
    paths[0].write_bytes(paths[0].read_bytes()[:-100])
    paths[1].write_bytes(b"")
    paths[2].unlink()
    os.mkfifo(paths[2])
    paths[3].unlink()
    paths[3].symlink_to(tmp_path / "nowhere")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("\n\n[1]\n" + "[" * 5000 + "\n")
    assert main(["view", str(tmp_path), "--output", str(tmp_path / "view.html")]) == 0
    said = capsys.readouterr()
    assert all(path.name in said.err for path in paths[:4]) and "2 of its lines" in said.err
    assert not set("\x1b\u202e") & set(said.out + said.err)
    index = Page(tmp_path / "view.html").part("index")
    assert len(index["runs"][0]["episodes"]["return"]) == 4 + 5 and len(index["runs"][0]["problems"]) == 5


@pytest.mark.browser
def test_hostile_records_do_nothing_in_a_browser(hostile: tuple[Path, Path, list[str]], visit: Visit) -> None:
    """Every run, step and episode of the hostile folder: no error of the script, no navigation, no request."""
    index = Page(hostile[1]).part("index")
    page = visit(hostile[1])

    def go(place: str) -> None:
        page.evaluate("place => { location.hash = place; }", place)
        page.wait_for_function("place => document.body.dataset.ready === '#' + place", arg=place)
        assert page.url.startswith("file:") and page.locator("#page .error[role=alert]").count() == 0, place
        assert page.evaluate("typeof window.hacked") == "undefined", place
        assert page.locator("img, meta[http-equiv=refresh]").count() == 0, place

    go("runs")
    for number, run in enumerate(index["runs"]):
        if run["sections"] or run["problems"] or number % 10 == 0:
            go(f"run/{number}")
            shown = page.locator("section[aria-label='Not shown'] li").count()
            assert shown == len(run["problems"]), run["name"]
        if run["sections"]:
            go(f"episodes/{number}?q=refresh&sort=change&outcome=success")
            go(f"episodes/{number}?sort=-clip")
            assert page.locator(".episodes tbody tr").count() == min(100, len(run["episodes"]["return"]))
        if run["name"] in ("columns", "lines"):
            for address in page.evaluate(f"VIEW.runs[{number}].sections.map(({{ id }}) => id)"):
                go(f"step/{address}")
            for row in range(len(run["episodes"]["return"])):
                go(f"episode/{number}/{row}")
