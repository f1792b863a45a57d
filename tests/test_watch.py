import contextlib
import http.client
import json
import signal
import subprocess
import sys
import threading

import pytest

from browser import browser, console, opened, requests, until
from evenstep.errors import ConfigError, MachineError
from evenstep.watch import Watcher
from runs import make_run


@contextlib.contextmanager
def watching(*run_dirs):
    with Watcher(run_dirs) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def get(server, path, **headers):
    connection = http.client.HTTPConnection(*server.server_address, timeout=10)
    with contextlib.closing(connection):
        connection.request(
            "GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()}
        )
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()


def append(run, step, loss):
    with (run / "metrics.jsonl").open("a") as file:
        file.write(
            json.dumps({"kind": "train", "step": step, "epoch": 1, "loss": loss, "wall_s": step}) + "\n"
        )


def test_it_listens_on_this_machine_only(tmp_path):
    with watching(make_run(tmp_path / "a")) as server:
        assert server.server_address[0] == "127.0.0.1"
        assert server.url == f"http://127.0.0.1:{server.server_address[1]}/"


def test_the_numbers_come_again_only_when_they_changed(tmp_path):
    run = make_run(tmp_path / "a")
    with watching(run) as server:
        status, headers, body = get(server, "/data.json")
        assert (status, json.loads(body)["runs"][0]["step"]) == (200, 40)
        assert get(server, "/data.json", If_None_Match=headers["ETag"])[0] == 304
        append(run, 41, 0.125)
        status, _, body = get(server, "/data.json", If_None_Match=headers["ETag"])
        assert (status, json.loads(body)["runs"][0]["step"]) == (200, 41)


@pytest.mark.parametrize(
    ("path", "host", "status"),
    [
        ("/", "localhost:80", 200),
        ("/", "evil.example:80", 403),  # a name made to point here: DNS rebinding
        ("/data.json", "evil.example", 403),
        ("/../config.toml", "localhost:80", 404),
        ("/metrics.jsonl", "localhost:80", 404),
    ],
)
def test_what_is_served_and_to_whom(path, host, status, tmp_path):
    with watching(make_run(tmp_path / "a")) as server:
        assert get(server, path, Host=host)[0] == status


def test_a_port_that_is_taken(tmp_path):
    run = make_run(tmp_path / "a")
    with watching(run) as server:
        port = server.server_address[1]
        with pytest.raises(MachineError, match=rf"cannot listen on port {port} of 127.0.0.1: .*--port N"):
            Watcher([run], port)
    with pytest.raises(MachineError, match="cannot listen on port 99999"):
        Watcher([run], 99999)


def test_a_directory_that_is_no_run(tmp_path):
    with pytest.raises(ConfigError, match="is not a run"):
        Watcher([tmp_path])


def test_the_page_follows_the_run(tmp_path):
    run = make_run(tmp_path / "a", finished=False)
    with watching(run) as server, browser() as page:
        text = opened(page, server.url)
        assert "running" in text
        assert "live" in text
        assert "Confusion matrix" not in text
        append(run, 41, 0.0625)
        assert until(page, "return document.querySelector('main').innerText.includes('0.0625')")
        append(run, 42, 0.03125)
        assert until(page, "return document.querySelector('main').innerText.includes('0.03125')")
        assert console(page) == []
        asked = set(requests(page))
        assert asked == {server.url, f"{server.url}data.json"}


def test_the_page_says_that_the_connection_is_lost(tmp_path):
    run = make_run(tmp_path / "a", finished=False)
    with browser() as page:
        with watching(run) as server:
            opened(page, server.url)
        assert until(page, "return document.querySelector('main').innerText.includes('connection lost')")


def test_the_command_prints_the_address_and_ends_with_ctrl_c(tmp_path):
    run = make_run(tmp_path / "a")
    words = [sys.executable, "-m", "evenstep", "watch", str(run)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    port = int(line.split("127.0.0.1:")[1].split("/")[0])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with contextlib.closing(connection):
        connection.request("GET", "/")
        assert "evenstep: a" in connection.getresponse().read().decode()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")
