"""Times and header bytes of a connection, without sockets or a clock."""

from __future__ import annotations

from service.bounds import LINGER_SECONDS, HeaderMeter, Limits, Patience, Seen, Verdict

LIMITS = Limits(
    header_bytes=100,
    header_seconds=10,
    body_bytes_per_second=1000,
    body_window_seconds=4,
    write_stall_seconds=30,
    keep_alive_seconds=75,
)


def test_a_new_connection_has_header_time_and_a_kept_one_keep_alive() -> None:
    patience = Patience(LIMITS, 0)
    assert patience.look(10, Seen()) is None
    assert patience.look(10.1, Seen()) is Verdict.CLOSE
    patience.headers_begin(11)
    patience.headers_end()
    patience.idle(12)
    assert patience.look(87, Seen()) is None
    assert patience.look(87.1, Seen()) is Verdict.CLOSE


def test_headers_have_their_time_unless_we_do_not_read() -> None:
    patience = Patience(LIMITS, 0)
    patience.headers_begin(5)
    assert patience.look(15, Seen()) is None
    assert patience.look(15.1, Seen(closing=True)) is None
    assert patience.look(16, Seen(paused=True)) is None
    assert patience.look(26, Seen()) is None
    assert patience.look(26.1, Seen()) is Verdict.LATE_HEADERS


def test_a_body_is_held_to_its_rate_only_while_it_is_awaited() -> None:
    patience = Patience(LIMITS, 0)
    patience.headers_begin(0)
    patience.headers_end()
    for second in range(1, 100):
        assert patience.look(second, Seen(body=5)) is None
    for second in range(100, 104):  # 3 awaited seconds, then a fourth with enough
        assert patience.look(second, Seen(body=5000, awaited=True)) in (None,)
    for second in range(104, 107):
        assert patience.look(second, Seen(body=8000, awaited=True)) is None
    assert patience.look(107, Seen(body=8999, awaited=True)) is Verdict.SLOW_BODY
    assert round(patience.rate) == 1000
    assert patience.look(108, Seen()) is None
    for second in range(109, 112):
        assert patience.look(second, Seen(body=0, awaited=True)) is None
    assert patience.look(112, Seen(body=0, awaited=True)) is Verdict.SLOW_BODY


def test_a_write_stalls_when_nothing_moves() -> None:
    patience = Patience(LIMITS, 0)
    patience.headers_begin(0)
    patience.headers_end()
    assert patience.look(1, Seen(unsent=100, pieces=1)) is None
    assert patience.look(31, Seen(unsent=100, pieces=1)) is None
    assert patience.look(31.1, Seen(unsent=99, pieces=1)) is None
    assert patience.look(61, Seen(unsent=99, pieces=2)) is None
    assert patience.look(91.1, Seen(unsent=99, pieces=2)) is Verdict.CUT
    assert Patience(LIMITS, 0).look(9, Seen(unsent=0, pieces=7)) is None


def test_a_refused_client_lingers_for_a_while() -> None:
    patience = Patience(LIMITS, 0)
    patience.linger(100)
    assert patience.look(100 + LINGER_SECONDS, Seen()) is None
    assert patience.look(100.1 + LINGER_SECONDS, Seen()) is Verdict.CUT


def test_sweeps_are_a_quarter_of_the_shortest_time() -> None:
    assert LIMITS.interval == 0.5
    assert Limits(header_seconds=0.4, body_window_seconds=0.4).interval == 0.1
    assert Limits(write_stall_seconds=0.001).interval == 0.01


def feed(meter: HeaderMeter, nbytes: int, *, begins: int = 0, ends: int = 0, between: bool = True) -> bool:
    """Feed bytes in which messages begin and headers end."""
    meter.before()
    for n in range(max(begins, ends)):
        if n < begins:
            meter.begin()
        if n < ends:
            meter.end()
    return meter.fed(nbytes, between=between)


def test_unfinished_headers_are_counted_as_they_come() -> None:
    meter = HeaderMeter(100)
    assert feed(meter, 60, begins=1)
    assert feed(meter, 40)
    assert not feed(meter, 1)
    meter.end()
    assert feed(meter, 101, begins=1) is False


def test_finished_headers_and_bodies_are_no_unfinished_headers() -> None:
    meter = HeaderMeter(100)
    assert feed(meter, 5000, begins=1, ends=1)  # headers and a body
    assert feed(meter, 5000, between=False)  # more of the body
    assert feed(meter, 5000, begins=1, between=False)  # its end, and headers of unknown length
    assert feed(meter, 100)
    assert not feed(meter, 1)


def test_headers_behind_a_whole_message_are_bounded_by_the_parsers_count() -> None:
    meter = HeaderMeter(100)
    assert feed(meter, 5000, begins=2, ends=1)
    assert meter.open
    assert meter.parsed(100)
    assert not meter.parsed(1)
    meter.begin()
    assert meter.parsed(100)
