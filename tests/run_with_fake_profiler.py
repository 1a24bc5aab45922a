"""`whichlora run CONFIG` with the fake profiler, as a process that a test can kill."""

from __future__ import annotations

import sys

import fake_profiler

import whichlora.profiler.profile
import whichlora.workflow.session
from whichlora.cli import main

fake_profiler.FakeProfiler.SLEEP_S = float(sys.argv.pop(1))
whichlora.profiler.profile.Profiler = fake_profiler.FakeProfiler  # type: ignore[misc,assignment]
whichlora.workflow.session.busy = lambda _: ""  # this machine may be
main()
