"""Monitors and their hub: who may connect, what they say, and what strangers can't do."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest

from chainermn_comm.watchdog.monitor import star
from tests.support.watchdog.monitors import CUT, close, link_of, links


def ask(made, seconds=5.0):
    """What the spokes say, by their numbers."""
    return made.hub.ask("calls", seconds, made.poll)()


def test_the_hub_hears_of_all_and_each_has_one_connection_to_it():
    with links(64) as made:
        made.connect()
        assert {number: said["ranks"] for number, said in ask(made).items()} == {
            number: [number] for number in range(1, 64)
        }
        made.hub.tell("known")
        assert made.until(
            lambda: sum(m["kind"] == "known" for _, m in made.heard) == 63
        )
        made.hub.tell("answer", only=7)
        assert made.until(
            lambda: [n for n, m in made.heard if m["kind"] == "answer"] == [-7]
        )
        made.spokes[4].tell("waits", seconds=3.0)
        assert made.until(
            lambda: [m["seconds"] for n, m in made.heard if n == 5] == [3.0]
        )


def test_one_that_says_nothing_or_nonsense_keeps_nothing_from_the_others():
    with links(6) as made:
        made.connect()
        made.says[2] = None
        link_of(made.spokes[2]).socket.sendall(b'{"kind": "repl\n')
        assert sorted(ask(made, 1.0)) == [1, 4, 5]
        assert made.hub.lost() == []
        made.connect()  # the third one does again
        assert sorted(ask(made, 1.0)) == [1, 3, 4, 5]


def test_late_replies_are_not_taken_for_those_of_the_next_question():
    with links(3) as made:
        made.connect()
        made.says[1] = None
        assert sorted(ask(made, 0.5)) == [2]
        made.says.clear()
        made.spokes[0].tell("reply", query=1, ranks="late")
        assert ask(made)[1]["ranks"] == [1]


@pytest.mark.parametrize("cut", [False, True])
def test_a_link_that_is_cut_counts_as_lost_and_a_monitor_that_ends_does_not(cut):
    with links(3, silence=0.5) as made:
        made.connect()
        endpoints, made.spokes[0]._endpoints = made.spokes[0]._endpoints, []
        made.spokes[0]._lose(made.spokes[0].links[0], CUT if cut else EOFError())
        if cut:
            made.hub._lose(made.hub.links[1], CUT)
        assert made.until(lambda: sorted(made.hub.links) == [2])
        assert made.hub.lost() == [made.names[1]] * cut
        assert made.spokes[0].lost() == [made.names[0]] * cut
        made.spokes[0]._endpoints = endpoints
        made.connect()
        assert made.until(lambda: 1 in made.hub.links)
        assert made.hub.lost() == made.spokes[0].lost() == []


def test_a_hub_that_is_stopped_or_gone_is_not_taken_for_a_cut_link(monkeypatch):
    monkeypatch.setattr(star, "GREETING_SECONDS", 0.2)
    monkeypatch.setattr(star, "RETRY_SECONDS", 0.1)
    with links(2, silence=0.1) as made:
        made.connect()
        (spoke,) = made.spokes
        # The kernel takes connections in, nobody answers.
        made.selector.unregister(made.listener)
        made.hub._lose(made.hub.links[1])
        assert made.until(lambda: not spoke.links)
        assert not made.until(lambda: spoke.links or spoke.lost(), 1.0)
        made.listener.close()
        assert not made.until(lambda: spoke.links or spoke.lost(), 1.0)
        # Where packets are lost it is one.
        monkeypatch.setattr(star.socket, "create_connection", never)
        assert made.until(lambda: spoke.lost() == [made.names[0]], 2.0)


def never(*_):
    raise TimeoutError("timed out")


def test_who_does_not_know_the_secret_is_not_heard_and_hears_no_secret():
    with links(2) as made:
        made.connect()
        with socket.create_connection(made.listener.getsockname()) as stranger:
            made.until(lambda: made.hub._strangers, 1.0)
            digits = stranger.recv(1024)
            stranger.sendall(
                b"mine\n" + b"0" * 64 + b' {"number": 0, "kind": "waits"}\n'
            )
            assert made.until(lambda: not made.hub._strangers)
            assert stranger.recv(1024) == b""
        assert len(digits) == 33
        assert made.heard == []
        assert sorted(ask(made)) == [1]


@pytest.mark.parametrize(
    "said", [b"x" * 5000, b"\xff\n", b"\n\n", b"1\n[2]\n", b"0" * 32 + b"\n\xc3 {}\n"]
)
def test_whatever_a_stranger_sends_drops_the_stranger_alone(said):
    with links(2) as made:
        made.connect()
        with socket.create_connection(made.listener.getsockname()) as stranger:
            stranger.sendall(said)
            assert made.until(lambda: made.hub._strangers)
            assert made.until(lambda: not made.hub._strangers)
        assert sorted(ask(made)) == [1]


def test_a_message_can_not_be_sent_again_by_who_has_seen_it():
    with links(2) as made:
        made.connect()
        (spoke,) = made.spokes
        sent = []
        inner = spoke.links[0].socket
        spoke.links[0].socket = SimpleNamespace(
            sendall=lambda data: (sent.append(data), inner.sendall(data))
        )
        spoke.tell("waits", seconds=1.0)
        spoke.links[0].socket = inner
        assert made.until(lambda: made.heard)
        inner.sendall(sent[0])
        assert made.until(lambda: not made.hub.links)
        assert len(made.heard) == 1
        # Nor on another connection.
        with socket.create_connection(made.listener.getsockname()) as stranger:
            stranger.sendall(b"mine\n" + sent[0])
            assert made.until(lambda: made.hub._strangers)
            assert made.until(lambda: not made.hub._strangers)
        assert len(made.heard) == 1


def test_a_liar_is_no_hub():
    with links(2) as made, socket.create_server(("127.0.0.1", 0)) as liar:
        (spoke,) = made.spokes
        close(spoke)
        spoke._tried_at, spoke._endpoints = -100.0, [liar.getsockname()]
        spoke.keep()
        connection, _ = liar.accept()
        with connection:
            connection.sendall(
                b"mine\n" + b"0" * 64 + b' {"number": 0, "kind": "end"}\n'
            )
            assert made.until(lambda: not spoke._strangers)
        assert not spoke.links
        assert made.heard == []


def test_strangers_are_few_and_have_little_time_and_no_monitor_waits_for_them(
    monkeypatch,
):
    """2,000 connections that say nothing."""
    with links(3) as made:
        made.connect()
        strangers = []
        for _ in range(2000):
            strangers.append(socket.create_connection(made.listener.getsockname()))
            made.poll(0.0)
            assert len(made.hub._strangers) <= star.MOST_STRANGERS
        assert sorted(ask(made, 1.0)) == [1, 2]
        close(made.spokes[0])  # one that connects meanwhile gets in
        made.connect()
        monkeypatch.setattr(star, "GREETING_SECONDS", 0.1)
        assert made.until(lambda: not made.hub._strangers)
        for stranger in strangers:
            stranger.close()


def test_one_that_has_gone_before_it_is_greeted_costs_no_other_one_its_place(
    monkeypatch,
):
    class Reset(star.Connection):
        def __init__(self, *_):
            raise ConnectionResetError

    with links(2) as made:
        made.connect()
        with socket.create_connection(made.listener.getsockname()):
            assert made.until(lambda: made.hub._strangers)
            with monkeypatch.context() as patched:
                patched.setattr(star, "Connection", Reset)
                with socket.create_connection(made.listener.getsockname()):
                    made.until(lambda: False, 0.2)
            assert len(made.hub._strangers) == 1


def test_where_no_descriptor_is_left_no_core_is_kept_busy_and_strangers_go_soon(
    monkeypatch,
):
    class Refusing:
        def accept(self):
            raise OSError(24, "Too many open files")

    with links(2) as made:
        made.connect()
        with socket.create_connection(made.listener.getsockname()):
            assert made.until(lambda: made.hub._strangers)
            slept = []
            with monkeypatch.context() as patched:
                patched.setattr(star.time, "sleep", slept.append)
                made.hub._accept(Refusing())
                assert slept == [star.REFUSED_SECONDS]
                patched.setattr(star, "GREETING_SECONDS", 0.0)
                assert made.until(lambda: not made.hub._strangers)
        assert sorted(ask(made)) == [1]
