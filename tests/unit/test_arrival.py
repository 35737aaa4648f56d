"""Arrivals: whoever waits hears of it, and of what went wrong."""

from __future__ import annotations

import threading

import pytest

from headrace.arrival import Arrival
from headrace.offload.ticket import Ticket

pytestmark = pytest.mark.unit


def test_calls_come_before_it_counts_as_done() -> None:
    arrival, seen = Arrival(), []
    arrival.then(lambda: seen.append(arrival.done))
    arrival.end()
    arrival.then(lambda: seen.append(arrival.done))
    arrival.wait()
    assert seen == [False, True]


def test_who_waits_gets_what_went_wrong_on_the_way_or_after_it() -> None:
    lost, passed_on = Arrival(), Arrival()
    lost.end(OSError("gone"))
    passed_on.then(lambda: [].index(1))
    passed_on.end()
    with pytest.raises(OSError, match="gone"):
        lost.wait()
    with pytest.raises(ValueError):
        passed_on.wait()


def test_what_was_waited_for_counts_while_it_is_under_way() -> None:
    ticket = Ticket(1, "kv")
    threading.Timer(0.02, ticket.end).start()
    ticket.wait()
    waited = ticket.waited_s
    ticket.wait()
    assert 0.0 < waited == ticket.waited_s
