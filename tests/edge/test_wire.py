"""What a caller asks for its blocks is the same to a worker over both protocols."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edge.openengine_wire import generate_request
from edge.wire import retention_message
from enginelink.retention import Retention, TokenRange
from tests.edge.test_signing import make_order
from worker.options import retention_from, retention_from_extra

ASKED = [
    Retention(),
    Retention((TokenRange(0, None, 0),), decode_priority=0),
    Retention((TokenRange(3, 9, 80, 5), TokenRange(9, None, 100)), 20, 7),
]


@pytest.mark.parametrize("asked", ASKED)
def test_a_worker_reads_what_the_edge_wrote(asked: Retention) -> None:
    message = retention_message(asked)
    assert message is not None

    assert retention_from(message) == asked
    assert retention_from_extra(generate_request(replace(make_order(), retention=asked)).extra) == asked


def test_what_was_not_asked_is_not_written() -> None:
    assert retention_message(None) is None
    assert retention_from_extra(generate_request(make_order()).extra) is None
