"""Virtual streams behave as a device's may: in order on each, in any order between them, joined by events."""

import pytest

from pd_integration.sim.clock import Clock, DeviceModule
from pd_integration.sim.errors import Violation


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def module(clock):
    return DeviceModule(clock, lambda: 0.0)


def work(log, name, seconds=1.0):
    return [(seconds, lambda: log.append(name))]


def test_a_stream_runs_its_work_in_order_and_takes_its_time(clock, module):
    log = []
    module.compute.put_work(work(log, "slow", 5.0))
    module.compute.put_work(work(log, "quick", 0.1))
    clock.advance(4.9)
    assert log == []
    clock.advance(0.3)
    assert log == ["slow", "quick"]


def test_streams_do_not_wait_for_each_other_by_themselves(clock, module):
    log = []
    copies = module.Stream()
    module.compute.put_work(work(log, "slow", 5.0))
    copies.put_work(work(log, "quick", 1.0))
    clock.drain()
    assert log == ["quick", "slow"]


def test_an_event_joins_two_streams(clock, module):
    log = []
    copies, ready = module.Stream(), module.Event()
    module.compute.put_work(work(log, "forward", 5.0))
    ready.record(module.compute)
    copies.wait_event(ready)
    copies.put_work(work(log, "copy", 1.0))
    assert not ready.query()
    clock.drain()
    assert log == ["forward", "copy"]
    assert ready.query()


def test_waiting_for_an_event_means_the_last_place_it_marked(clock, module):
    log = []
    copies, event = module.Stream(), module.Event()
    event.record(module.compute)
    copies.wait_event(event)
    module.compute.put_work(work(log, "forward", 5.0))
    event.record(module.compute)
    copies.put_work(work(log, "copy", 1.0))
    clock.drain()
    assert log == ["copy", "forward"]


def test_an_event_reports_what_failed_before_it_once(clock, module):
    first, second = module.Event(), module.Event()

    def fail():
        module.compute.error = RuntimeError("broken")

    module.compute.put_work([(1.0, fail)])
    first.record(module.compute)
    second.record(module.compute)
    clock.drain()
    with pytest.raises(RuntimeError, match="broken"):
        first.query()
    assert second.query()


def test_the_time_between_two_events_is_told_in_milliseconds(clock, module):
    begin, end = module.Event(), module.Event()
    begin.record(module.compute)
    module.compute.put_work(work([], "copy", 0.25))
    end.record(module.compute)
    clock.drain()
    assert begin.elapsed_time(end) == pytest.approx(250.0)


def test_a_wait_that_nothing_can_end_is_a_hang(clock, module):
    never = module.Event()
    other = module.Stream()
    unrecorded = module.Event()
    unrecorded.record(other)
    blocked = module.Stream()
    stuck = module.Event()
    other.put_work([(20_000.0, lambda: None)])
    stuck.record(other)
    blocked.wait_event(stuck)
    never.record(blocked)
    with pytest.raises(Violation, match="hang"):
        clock.wait(never.query, "this step")
