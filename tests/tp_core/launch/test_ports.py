"""Ports for ranks: nobody else takes one between its choice and its use."""

import socket

import pytest
from tp_testing import free_port

RANKS = "tp_core._launch._rank_pool"  # what the system gives out is the machine's


def test_ports_are_out_of_reach_of_what_the_system_gives_out_by_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{RANKS}._RANGE", tmp_path / "range")
    (tmp_path / "range").write_text("15000\t60999\n")
    chosen = {free_port() for _ in range(20)}
    assert len(chosen) == 20
    assert all(10_000 <= port < 15_000 for port in chosen)


def test_a_port_that_is_taken_is_passed_over(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        monkeypatch.setattr(f"{RANKS}._LOWEST", taken)
        monkeypatch.setattr(f"{RANKS}._first_of_the_system", lambda: taken + 2)
        monkeypatch.setattr(f"{RANKS}._BLOCK", 2)
        assert taken not in {free_port() for _ in range(6)}


@pytest.mark.parametrize("text", ["1024 65535", "no numbers", ""])
def test_where_the_system_gives_out_all_ports_one_of_those_is_taken(tmp_path, monkeypatch, text):
    monkeypatch.setattr(f"{RANKS}._RANGE", tmp_path / "range")
    (tmp_path / "range").write_text(text)
    with socket.create_server(("127.0.0.1", free_port())):
        pass
