"""The live page's server: who may ask for what, and how little a slow or hostile reader costs."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from synthetic_run import synthetic_run

from paceline import cli, env
from paceline.errors import UsageError
from paceline.files import read_info
from paceline.files.run_folder import write_info
from paceline.show.watch import command, server
from paceline.show.watch.follow import Followed, Watched

TOKEN = "t" * 43
PORT = 4711
HOST = f"127.0.0.1:{PORT}"
PATIENCE_S = 60.0
ROUTES = ["/", "/assets/page.css", "/events", "/document", "/report", "/record"]


REFUSED = ["HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE"]


class Answer:
    """What a request got: status, headers and as much of the body as was taken."""

    def __init__(self) -> None:
        self.status, self.headers, self.body = 0, dict[str, str](), b""


async def ask(
    app: server.Guard,
    path: str,
    *,
    token: str | None = TOKEN,
    method: str = "GET",
    query: str = "",
    until: Callable[[Answer], bool] = lambda answer: False,
    **headers: str,
) -> Answer:
    """One request; the connection is closed when the answer is complete, or `until` is true."""
    answer, closed = Answer(), asyncio.Event()
    given = {"host": HOST, **{name.replace("_", "-"): value for name, value in headers.items()}}
    query += f"&token={token}" if token is not None else ""

    async def receive() -> dict[str, Any]:
        await closed.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {k.decode(): v.decode() for k, v in message.get("headers", ())}
        else:
            answer.body += message.get("body", b"")
            if until(answer) or not message.get("more_body"):
                closed.set()

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", PORT),
    }
    await asyncio.wait_for(app(scope, receive, send), PATIENCE_S)
    return answer


def with_app(path: Path, body: Callable[[server.Guard, Watched], Coroutine[Any, Any, Any]]) -> Any:
    async def run() -> Any:
        watched = Watched([path])
        return await body(server.make_app(watched, TOKEN, PORT), watched)

    return asyncio.run(run())


@pytest.fixture(scope="module")
def run_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("watched") / "run"
    synthetic_run(path, steps=30, ranks=2, epochs=2)
    return path


def has_document(answer: Answer) -> bool:
    return b"event: document" in answer.body and answer.body.endswith(b"\n\n")


def test_every_route_and_method_needs_the_token(run_path: Path) -> None:
    async def body(app: server.Guard, _: Watched) -> None:
        for route in [*ROUTES, "/nothing", "/../run.json"]:
            for method in [*REFUSED, "GET", "POST"]:
                for token in (None, "", "t" * 42, "T" * 43, "ü"):
                    answer = await ask(app, route, method=method, token=token)
                    assert (answer.status, b"step" in answer.body) == (403, False), route

    with_app(run_path, body)


def test_a_page_may_only_read_and_ask_for_a_step_to_be_recorded(run_path: Path) -> None:
    async def body(app: server.Guard, _: Watched) -> None:
        for route in ROUTES:
            for method in [*REFUSED, "GET" if route == "/record" else "POST"]:
                assert (await ask(app, route, method=method)).status == 405, (route, method)

    with_app(run_path, body)


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "127.0.0.1"},
        {"host": f"127.0.0.1:{PORT + 1}"},
        {"host": f"127.0.0.1.evil.example:{PORT}"},
        {"host": ""},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": f"https://{HOST}"},
    ],
)
def test_another_host_or_origin_is_refused_even_with_the_token(
    headers: dict[str, str], run_path: Path
) -> None:
    assert with_app(run_path, lambda app, _: ask(app, "/document", **headers)).status in (403, 421)
    assert not (run_path / "record.request").exists()


def test_the_token_may_be_in_a_header_and_every_answer_forbids_what_a_page_does_not_need(
    run_path: Path,
) -> None:
    async def body(app: server.Guard, _: Watched) -> list[Answer]:
        answers = [await ask(app, "/", token=None, x_paceline_token=TOKEN)]
        answers += [await ask(app, route) for route in ("/assets/page.css", "/document", "/report")]
        answers += [await ask(app, "/events", until=has_document), await ask(app, "/nothing")]
        answers.append(await ask(app, "/document", query="run=other"))
        return [*answers, await ask(app, "/", token="wrong")]

    answers = with_app(run_path, body)
    assert [each.status for each in answers] == [200] * 5 + [404, 404, 403]
    for answer in answers:
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert "access-control-allow-origin" not in answer.headers
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy
    page = answers[0].body.decode()
    assert "<script>" not in page
    assert "style=" not in page


@pytest.mark.parametrize(
    "name", ["../page.py", "..%2fpage.py", "/etc/passwd", "vendor/../../page.py", "page.py", ""]
)
def test_assets_are_a_list_and_no_folder(name: str, run_path: Path) -> None:
    assert with_app(run_path, lambda app, _: ask(app, f"/assets/{name}")).status == 404


def test_a_page_is_sent_the_document_first_and_the_report_is_the_same_run(run_path: Path) -> None:
    async def body(app: server.Guard, _: Watched) -> list[Answer]:
        first = await ask(app, "/events", until=has_document)
        return [first, await ask(app, "/document"), await ask(app, "/report")]

    events, document, report = with_app(run_path, body)
    kind, data, *_ = events.body.decode().splitlines()
    assert kind == "event: document"
    shown = json.loads(data.removeprefix("data: "))
    assert shown["schema"] == 1
    assert shown["live"]["step"] == 30
    assert [each["worker"] for each in shown["live"]["workers"]] == [0, 1]
    assert json.loads(document.body)["tiles"] == shown["tiles"]
    assert report.headers["content-disposition"].startswith("attachment")
    assert b'content="paceline report' in report.body


@pytest.mark.parametrize("status", ["finished", "running"])
def test_only_a_run_that_runs_is_asked_to_record(status: str, tmp_path: Path) -> None:
    folder = synthetic_run(tmp_path / "run", steps=4, ranks=1, epochs=1, status=status)

    async def body(app: server.Guard, watched: Watched) -> Answer:
        watched.first.read()
        if status == "running":  # it was written years ago
            watched.first.read = lambda: False  # type: ignore[method-assign]
            watched.first.state = "running"
        return await ask(app, "/record", method="POST")

    answer = with_app(folder.path, body)
    assert answer.status == (202 if status == "running" else 409)
    assert folder.record_request.exists() == (status == "running")


def test_a_request_is_not_written_through_a_link(tmp_path: Path) -> None:
    folder, target = synthetic_run(tmp_path / "run", steps=4, ranks=1), tmp_path / "target"
    target.write_text("mine")
    folder.record_request.symlink_to(target)

    async def body(app: server.Guard, watched: Watched) -> Answer:
        watched.first.read = lambda: False  # type: ignore[method-assign]
        watched.first.state = "running"
        return await ask(app, "/record", method="POST")

    with_app(folder.path, body)
    assert target.read_text() == "mine"


async def take(messages: AsyncGenerator[bytes], count: int) -> list[bytes]:
    return [await asyncio.wait_for(anext(messages), PATIENCE_S) for _ in range(count)]


def test_the_end_of_a_run_comes_with_its_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = synthetic_run(tmp_path / "run", steps=4, ranks=1, epochs=1, status="running")
    monkeypatch.setattr("paceline.show.watch.follow.LIVE_PERIOD_S", 0.01)
    monkeypatch.setattr("paceline.show.watch.follow.DOCUMENT_PERIOD_S", 10 * PATIENCE_S)
    monkeypatch.setattr("paceline.show.watch.follow.REST_FACTOR", 0)

    async def body(_: server.Guard, watched: Watched) -> bytes:
        messages = watched.first.messages()
        # Without the timeline, with it, and then only what changes.
        await take(messages, 2)
        info = read_info(folder)
        assert info is not None
        write_info(folder, replace(info, status="finished", reason="all steps are applied"))
        (newest,) = await take(messages, 1)
        await messages.aclose()
        return newest

    kind, data, *_ = with_app(folder.path, body).decode().splitlines()
    assert (kind, json.loads(data[6:])["live"]["state"]) == ("event: document", "finished")


def test_a_hundred_pages_are_told_by_one_reader_and_a_slow_one_gets_the_newest(
    run_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = list[Followed]()
    real_read = Followed.read

    def read(run: Followed) -> bool:
        reads.append(run)
        real_read(run)
        return True

    monkeypatch.setattr(Followed, "read", read)
    monkeypatch.setattr("paceline.show.watch.follow.LIVE_PERIOD_S", 0.01)
    monkeypatch.setattr("paceline.show.watch.follow.DOCUMENT_PERIOD_S", 0.01)
    monkeypatch.setattr("paceline.show.watch.follow.REST_FACTOR", 0)

    async def body(_: server.Guard, watched: Watched) -> None:
        run = watched.first
        pages = [run.messages() for _ in range(100)]
        slow, *quick = pages
        await take(slow, 1)
        await asyncio.gather(*(take(page, 1) for page in quick))
        for _ in range(20):
            await take(quick[0], 1)
        late = await take(slow, 1)
        newest = [message for _, message in run._messages.values()]
        assert late[0] in newest
        assert len(reads) <= run._published + 2, "one for every message, not for every page"
        for page in pages:
            await page.aclose()
        assert run._reading is None

    with_app(run_path, body)


def test_more_streams_than_the_limit_are_refused_and_freed_places_are_given_again(
    run_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "STREAMS_LIMIT", 2)

    async def body(app: server.Guard, watched: Watched) -> list[int]:
        pages = [watched.first.messages() for _ in range(2)]
        for page in pages:
            await take(page, 1)
        statuses = [(await ask(app, "/events", until=has_document)).status]
        await pages[0].aclose()
        statuses.append((await ask(app, "/events", until=has_document)).status)
        await pages[1].aclose()
        return statuses

    assert with_app(run_path, body) == [503, 200]


def test_who_takes_nothing_is_disconnected(run_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SEND_TIMEOUT_S", 0.05)

    async def body(app: server.Guard, _: Watched) -> None:
        async def stuck(message: Any) -> None:
            await asyncio.Event().wait()

        async def receive() -> Any:
            await asyncio.Event().wait()

        scope = {"type": "http", "method": "GET", "path": "/", "raw_path": b"/"}
        scope |= {"query_string": f"token={TOKEN}".encode(), "headers": [(b"host", HOST.encode())]}
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(app(scope, receive, stuck), PATIENCE_S)

    with_app(run_path, body)


def test_tokens_have_256_bits_and_are_never_the_same() -> None:
    tokens = {server.make_token() for _ in range(100)}
    assert len(tokens) == 100
    assert all(len(token) == 43 for token in tokens)


def test_a_token_file_is_made_for_this_user_alone_and_used_again(tmp_path: Path) -> None:
    path = tmp_path / "token"
    token = server.keep_token(path)
    assert len(token) == 43
    assert path.stat().st_mode & 0o777 == 0o600
    assert server.keep_token(path) == token


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        (f"{TOKEN}\n", 0o644, "can be read by others"),
        ("short", 0o600, "does not contain a token"),
        ("t" * 10_000, 0o600, "does not contain a token"),
        (None, 0, "not a plain file"),
    ],
)
def test_a_token_file_that_keeps_no_secret_is_refused(
    content: str | None, mode: int, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "token"
    if content is None:
        path.mkdir()
    else:
        path.write_text(content)
        path.chmod(mode)
    with pytest.raises(UsageError, match=said):
        server.keep_token(path)


def test_a_token_file_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "real").write_text(TOKEN)
    (tmp_path / "real").chmod(0o600)
    (tmp_path / "token").symlink_to(tmp_path / "real")
    with pytest.raises(UsageError, match="cannot be kept"):
        server.keep_token(tmp_path / "token")


def test_it_listens_on_loopback_alone_and_a_port_that_is_taken_is_said() -> None:
    with server.listen(0) as listening:
        address, port = listening.getsockname()
        assert address == "127.0.0.1"
        with pytest.raises(UsageError, match=f"Port {port} of 127.0.0.1 cannot be used") as error:
            server.listen(port)
        assert "--port" in error.value.advice


def test_without_a_name_the_newest_run_is_watched_and_a_folder_of_runs_shows_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="no run in 'runs'"):
        command.find_paths([])
    for name in ("b", "a"):
        synthetic_run(tmp_path / "runs" / name, steps=2, ranks=1)
    (tmp_path / "empty").mkdir()
    assert command.find_paths([]) == [Path("runs/a")]
    assert command.find_paths(["runs"]) == [Path("runs/a"), Path("runs/b")]
    assert command.find_paths(["runs/b", "runs/a"]) == [Path("runs/b"), Path("runs/a")]
    with pytest.raises(UsageError, match="no run folder 'nowhere'"):
        command.find_paths(["nowhere"])
    with pytest.raises(UsageError, match="'empty' has no run"):
        command.find_paths(["empty"], must_be_there=True)
    assert command.find_paths(["empty"]) == [Path("empty")]


@pytest.mark.parametrize("missing", ["uvicorn", "starlette.applications"])
def test_without_the_extra_one_sentence_says_what_to_install(
    missing: str,
    run_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    assert cli.main(["watch", str(run_path)]) == 2
    said = capsys.readouterr().err
    assert "needs starlette and uvicorn, which are not installed" in said
    assert "pip install 'paceline[watch]'" in said


def test_a_run_announces_its_folder_to_who_waits_for_it_and_to_nobody_else(tmp_path: Path) -> None:
    announcement = tmp_path / "announcement"
    announcement.write_text("0\n")  # nobody's id: of a launcher that is gone
    with announcement.open() as file:
        assert command._wait_for(file.fileno()) == []
    env.announce_folder("runs/first", {})
    env.announce_folder("runs/first", {env.FOLDER_VARIABLE: str(announcement)})
    with announcement.open() as file:
        assert env.find_announced(str(announcement)) == str(Path.cwd() / "runs" / "first")
        announcement.unlink()  # as a launcher that ends takes its folder along
        assert command._wait_for(file.fileno()) == [Path.cwd() / "runs" / "first"]


def test_a_hostile_name_of_a_run_stays_a_name(tmp_path: Path) -> None:
    name = '"><script>alert(1)</script>\r\nset-cookie: a=b'.replace("/", "|")
    synthetic_run(tmp_path / "run", steps=4, ranks=1).path.rename(tmp_path / name)

    async def body(app: server.Guard, _: Watched) -> list[Answer]:
        return [await ask(app, route) for route in ("/", "/report", "/document")]

    page, report, document = with_app(tmp_path / name, body)
    assert "set-cookie" not in report.headers
    assert b"<script>alert" not in page.body + report.body
    assert json.loads(document.body)["live"]["step"] == 4


FLOOD = """
import encodings.idna, os, socket, sys  # before it may not read them any more
os.setgroups([]); os.setgid(54321); os.setuid(54321)
held = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(1000)]
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_flood_of_another_user_is_turned_away_before_the_owner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "time", SimpleNamespace(monotonic=lambda: 7.0))
    taken: list[socket.socket] = []
    with server.listen(0) as listening:
        listening.setblocking(False)
        address = listening.getsockname()
        command = [sys.executable, "-c", FLOOD, str(address[1])]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(command, **pipes) as flood:
            assert flood.stdout is not None
            assert flood.stdout.readline() == b"held\n"
            with socket.create_connection(address) as owner:
                asked = 0
                while not taken or taken[-1].getpeername() != owner.getsockname():
                    asked += 1
                    with suppress(BlockingIOError):
                        taken.append(listening.accept()[0])
            flood.communicate()
    for each in taken:
        each.close()
    assert len(taken) == server.STRANGERS_PER_S + 1
    assert asked - len(taken) == 900 // server.CONNECTIONS_LIMIT  # others had their turn
