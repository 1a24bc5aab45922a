from __future__ import annotations

import errno
import fcntl
import gc
import itertools
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from whichlora.errors import ConfigError, DataFileError
from whichlora.spec.parallel import ParallelConfig
from whichlora.spec.results import Measurement
from whichlora.spec.run import RunConfig
from whichlora.store.coefficients import read_coefficients, write_coefficients
from whichlora.store.compiled import MAX_BYTES, MAX_SECONDS, MOST_COUNT, parse_record
from whichlora.store.measurements import MeasurementLog, read_measurements, record_ids
from whichlora.store.record import MAX_LINE_BYTES, check_record, encode_record

GPU = "t4-16gb"


def a_measurement(number: int = 0, **changes: Any) -> Measurement:
    values: dict[str, Any] = {
        "id": f"run-{number}",
        "gpu": GPU,
        "date": "2026-11-21T10:00:00+00:00",
        "config": RunConfig(model="org/model", batch_size=number + 1).to_dict(),
        "outcome": "ok",
        "step_s": (0.5, 0.25),
        "peak_allocated_bytes": 7 * 2**30,
        "environment": {"device": "Tesla T4", "note": "µ–×\u2028"},
    }
    return Measurement(**values | changes)


def a_file(root: Path, name: str = "run") -> Path:
    path = root / GPU / "measurements" / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def a_line(**changes: Any) -> bytes:
    """One record as bytes; a change of `...` removes the field."""
    values = a_measurement().to_dict() | changes
    return json.dumps({k: v for k, v in values.items() if v is not ...}).encode() + b"\n"


seconds = st.floats(min_value=1e-9, max_value=1e6)
num_bytes = st.integers(min_value=1, max_value=10**14)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
names = st.text(min_size=1).filter(lambda name: name.strip() and name.isprintable())
measurements = st.builds(
    lambda reserved, **values: Measurement(
        **values,
        peak_reserved_bytes=reserved,
        peak_allocated_bytes=reserved // 2 + 1 if reserved else None,
    ),
    id=st.uuids().map(str),
    gpu=st.just(GPU),
    date=st.datetimes().map(lambda moment: moment.isoformat()),
    config=st.builds(RunConfig, model=names, batch_size=st.integers(1, 10**6)).map(
        RunConfig.to_dict
    ),
    outcome=st.sampled_from(["ok", "oom", "crashed", "killed", "timeout", "error"]),
    model_config=st.none() | st.dictionaries(st.text(), json_values, max_size=3),
    detail=st.text(),
    step_s=st.lists(seconds, max_size=4).map(tuple),
    batch_seq_len=st.lists(st.integers(1, 10**6), max_size=4).map(tuple),
    generate_s=st.lists(seconds, max_size=4).map(tuple),
    prefill_s=st.lists(seconds, max_size=4).map(tuple),
    decode_s_per_token=st.lists(st.just(0.0) | seconds, max_size=4).map(tuple),
    reserved=st.none() | num_bytes,
    device_used_bytes=st.none() | num_bytes,
    moment_peak_bytes=st.dictionaries(st.text(), num_bytes, max_size=3),
    largest_blocks_bytes=st.lists(num_bytes, max_size=3).map(tuple),
    engine_log=st.dictionaries(st.text(), st.floats(-MAX_BYTES, MAX_BYTES), max_size=3),
    device_s=st.just(0.0) | seconds,
    warm_up_s=st.just(0.0) | seconds,
    environment=st.dictionaries(st.text(), json_values, max_size=3),
    provenance=st.dictionaries(st.text(), json_values, max_size=3),
)


@given(records=st.lists(measurements, max_size=5, unique_by=lambda record: record.id))
@settings(max_examples=60)
def test_what_was_appended_is_read_back_unchanged(
    tmp_path_factory: pytest.TempPathFactory, records: list[Measurement]
) -> None:
    root = tmp_path_factory.mktemp("root")
    log = MeasurementLog(root, GPU, "run")
    for record in records:
        log.append(record)
    assert read_measurements([root], GPU) == tuple(sorted(records, key=lambda r: (r.date, r.id)))


def test_a_gpu_without_records_has_none(tmp_path: Path) -> None:
    assert read_measurements([tmp_path, tmp_path / "absent"], GPU) == ()


# --- the compiled checks and the ones that explain


@given(record=measurements)
@settings(max_examples=60)
def test_compiled_checks_accept_a_good_record_unchanged(record: Measurement) -> None:
    line = json.dumps(record.to_dict()).encode()
    assume(b"NaN" not in line and b"Infinity" not in line)  # as a text: for the slow checks
    assert parse_record(line) == check_record(line, "") == record


@pytest.mark.parametrize(
    ("field", "accepted", "refused"),
    [
        ("peak_allocated_bytes", [0, MAX_BYTES - 1, None], [-1, MAX_BYTES, 1.0, True]),
        ("device_used_bytes", [0, MAX_BYTES - 1, None], [-1, MAX_BYTES]),
        ("largest_blocks_bytes", [[], [0, MAX_BYTES - 1]], [[-1], [MAX_BYTES], [None], 0]),
        ("moment_peak_bytes", [{}, {"forward": 0}], [{"forward": -1}, {"forward": None}, []]),
        ("engine_log", [{}, {"ttft_s": 0.2}], [{"ttft_s": 2.0 * MAX_BYTES}, {"ttft_s": None}, []]),
        ("device_s", [0, MAX_SECONDS], [-1e-9, MAX_SECONDS + 1, True, None]),
        ("step_s", [[], [1e-9, MAX_SECONDS]], [[0], [0.0], [MAX_SECONDS + 1], None]),
        ("prefill_s", [[0.0, MAX_SECONDS]], [[-1e-9], [MAX_SECONDS + 1], 1.0]),
        ("batch_seq_len", [[], [1, MOST_COUNT]], [[0], [MOST_COUNT + 1], [1.0], [True]]),
        ("model_config", [None, {}, {"a": 1}], [1, [], "{}"]),
        ("id", ["r", "r" * 200], ["", "r" * 201, 1]),
    ],
)
def test_both_checks_accept_the_ends_of_a_range_and_nothing_beyond(
    field: str, accepted: list[Any], refused: list[Any]
) -> None:
    # of a failed run, which may have used nothing
    plain = {"outcome": "oom", "peak_reserved_bytes": ...}
    for value in accepted:
        line = a_line(**plain | {field: value}).rstrip()
        assert getattr(check_record(line, ""), field) == getattr(parse_record(line), field)
    for value in refused:
        line = a_line(**plain | {field: value}).rstrip()
        assert parse_record(line) is None
        with pytest.raises(DataFileError, match=f"{field}: "):
            check_record(line, "")


def test_compiled_checks_accept_every_setting_that_is_accepted() -> None:
    settings_ = ({"quant": "nf4"}, {"prepare_kbit": True}, {"lora_dropout": 0.5})
    for changes in (*settings_, {"optimizer": "lora_fa"}, {"optimizer": "sgd"}):
        config = RunConfig(model="m", **changes).to_dict()  # type: ignore[arg-type]
        assert parse_record(a_line(config=config)) is not None


def test_a_run_on_several_gpus_is_for_the_slow_checks() -> None:
    run = RunConfig(model="m", parallel=ParallelConfig(strategy="ddp", gpus=2))
    line = a_line(config=run.to_dict())
    assert parse_record(line) is None
    assert check_record(line, "").run == run


@given(data=st.data())
@settings(max_examples=300)
def test_compiled_checks_accept_nothing_that_the_others_refuse(data: st.DataObject) -> None:
    values = a_measurement().to_dict()
    target = data.draw(st.sampled_from([values, values["config"]]))
    key = data.draw(st.sampled_from(sorted(target)) | st.text(max_size=5))
    target[key] = data.draw(
        json_values | st.floats() | st.lists(st.floats() | st.booleans() | st.integers())
    )
    line = json.dumps(values).encode()
    accepted = parse_record(line)
    if accepted is not None and key not in ("id", "gpu", "date"):  # the reader looks at these
        assert accepted == check_record(line, "")


def test_ids_are_found_without_reading_the_rest(tmp_path: Path) -> None:
    log = MeasurementLog(tmp_path, GPU, "run")
    names = ["plain", 'with "quotes"', "back\\slash", "µ", "a, b"]
    for name in names:
        log.append(a_measurement(id=name))
    a_file(tmp_path, "odd").write_bytes(b'{"id": "first", "schema_version": 1}\n{"torn')
    assert record_ids([tmp_path, tmp_path], GPU) == {*names, "first"}


# --- writers that are killed, at once, or careless


def test_a_record_torn_at_any_byte_is_ignored_and_never_glued_to_the_next(tmp_path: Path) -> None:
    log = MeasurementLog(tmp_path, GPU, "run")
    log.append(a_measurement(1))
    whole = log.path.read_bytes()
    torn = a_line(id="torn")
    for length in range(len(torn)):
        log.path.write_bytes(whole + torn[:length])
        survived = {"torn"} if length == len(torn) - 1 else set()  # it lacks its newline only
        assert {m.id for m in read_measurements([tmp_path], GPU)} == {"run-1"} | survived
        log.append(a_measurement(2))
        assert {m.id for m in read_measurements([tmp_path], GPU)} == {"run-1", "run-2"} | survived
        assert log.path.read_bytes().startswith(whole)


def test_the_first_record_torn_leaves_a_usable_file(tmp_path: Path) -> None:
    a_file(tmp_path).write_bytes(b'{"schema_ver')
    MeasurementLog(tmp_path, GPU, "run").append(a_measurement())
    assert read_measurements([tmp_path], GPU) == (a_measurement(),)


def test_a_huge_unfinished_line_is_left_as_it_is(tmp_path: Path) -> None:
    path = a_file(tmp_path)
    path.write_bytes(b"x" * (MAX_LINE_BYTES + 1))
    with pytest.raises(DataFileError, match="longer than a record"):
        MeasurementLog(tmp_path, GPU, "run").append(a_measurement())
    assert path.stat().st_size == MAX_LINE_BYTES + 1


def _write_many(root: Path, writer: int, count: int) -> None:
    log = MeasurementLog(root, GPU, f"writer-{writer}")
    for number in range(count):
        log.append(a_measurement(writer * count + number))


def test_writers_at_once_lose_nothing_and_readers_between_them_see_whole_records(
    tmp_path: Path,
) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write_many, args=(tmp_path, n, 40)) for n in range(4)]
    for writer in writers:
        writer.start()
    seen = 0
    while any(writer.is_alive() for writer in writers):
        records = read_measurements([tmp_path], GPU)
        assert len(records) >= seen
        seen = len(records)
    for writer in writers:
        writer.join()
    assert len(read_measurements([tmp_path], GPU)) == 160


def _write_to_one_log(root: Path, writer: int, count: int) -> None:
    os.fsync = lambda _: None  # what is at stake here is who cuts off whose record, not the disk
    log = MeasurementLog(root, GPU, "shared")
    for number in range(count):
        log.append(a_measurement(writer * count + number))


def test_eight_writers_of_one_log_lose_none_of_ten_thousand_records(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [
        context.Process(target=_write_to_one_log, args=(tmp_path, n, 1250)) for n in range(8)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert record_ids([tmp_path], GPU) == {f"run-{number}" for number in range(10_000)}


def test_without_locks_a_writer_cuts_off_nothing_that_another_may_still_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    log = MeasurementLog(tmp_path, GPU, "run")
    log.append(a_measurement(1))
    with log.path.open("ab") as file:
        file.write(b'{"schema_ver')
    log.append(a_measurement(2))
    assert b'{"schema_ver\n' in log.path.read_bytes()
    assert log.path.read_bytes().endswith(a_line(id="run-2", config=a_measurement(2).config))


def test_a_record_that_the_disk_has_not_confirmed_is_not_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(DataFileError, match=r"can't be written \(Input/output error"):
        MeasurementLog(tmp_path, GPU, "run").append(a_measurement())


def test_a_record_in_an_old_file_waits_for_the_disk_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = MeasurementLog(tmp_path, GPU, "run")
    log.append(a_measurement(1))  # the folders are on the disk
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda at: synced.append(os.readlink(f"/proc/self/fd/{at}")))
    log.append(a_measurement(2))
    assert synced == [str(log.path)]


def test_reading_walks_no_garbage_and_leaves_the_collector_as_it_was(tmp_path: Path) -> None:
    a_file(tmp_path).write_bytes(b"{}\n" + a_line())
    seen: list[bool] = []
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        try:
            read_measurements([tmp_path], GPU, leave_out=lambda *_: seen.append(gc.isenabled()))
            assert gc.isenabled() is enabled
        finally:
            gc.enable()
    assert seen == [False, False]


def test_of_a_new_file_the_folders_wait_for_the_disk_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = MeasurementLog(tmp_path, GPU, "run")
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda at: synced.append(os.readlink(f"/proc/self/fd/{at}")))
    log.append(a_measurement(1))
    folders = [log.path.parent, tmp_path / GPU, tmp_path]
    assert synced == [str(log.path), *map(str, folders)]


def _write_forever(root: Path) -> None:
    log = MeasurementLog(root, GPU, "run")
    for number in itertools.count():
        log.append(a_measurement(number))


def test_a_killed_writer_leaves_only_whole_records(tmp_path: Path) -> None:
    writer = multiprocessing.get_context("spawn").Process(target=_write_forever, args=(tmp_path,))
    writer.start()
    while len(read_measurements([tmp_path], GPU)) < 5:
        assert writer.is_alive()
        time.sleep(0.005)
    assert writer.pid is not None
    os.kill(writer.pid, signal.SIGKILL)
    writer.join()
    before = read_measurements([tmp_path], GPU)
    MeasurementLog(tmp_path, GPU, "run").append(a_measurement(10**6))
    assert len(read_measurements([tmp_path], GPU)) == len(before) + 1


def _write_and_acknowledge(root: Path, writer: int, acknowledged: Path) -> None:
    log = MeasurementLog(root, GPU, "shared")
    with acknowledged.open("w") as file:
        for number in itertools.count():
            record = a_measurement(number, id=f"{writer}-{number}")
            log.append(record)
            file.write(f"{record.id}\n")
            file.flush()


def test_killing_writers_of_one_log_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    told = [tmp_path / f"acknowledged-{n}" for n in range(4)]
    writers = [
        context.Process(target=_write_and_acknowledge, args=(tmp_path, n, told[n]))
        for n in range(4)
    ]
    for writer in writers:
        writer.start()
    for writer, file in zip(writers, told, strict=True):  # one after another, the others at work
        while not (file.exists() and file.read_bytes().count(b"\n") > 20):
            assert writer.is_alive()
            time.sleep(0.005)
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
    ids = record_ids([tmp_path], GPU)
    for number, file in enumerate(told):
        names = set(file.read_text().split())
        assert names <= ids
        assert len({name for name in ids if name.startswith(f"{number}-")} - names) <= 1


def test_a_full_disk_is_reported_and_the_next_record_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    log = MeasurementLog(tmp_path, GPU, "run")
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[: len(data) // 2]))
    with pytest.raises(DataFileError, match=r"run\.jsonl: can't be written \(No space left"):
        log.append(a_measurement(1))
    monkeypatch.undo()
    assert read_measurements([tmp_path], GPU) == ()
    log.append(a_measurement(2))
    assert read_measurements([tmp_path], GPU) == (a_measurement(2),)


def test_a_record_that_readers_would_refuse_is_not_written(tmp_path: Path) -> None:
    log = MeasurementLog(tmp_path, GPU, "run")
    for bad, message in (
        (a_measurement(device_s=float("nan")), "NaN is not JSON"),
        (a_measurement(device_s=-1.0), "device_s: got -1.0"),
        (a_measurement(gpu="l4-24gb"), "in the folder of 't4-16gb'"),
        (a_measurement(detail="x" * MAX_LINE_BYTES), "shorten its detail"),
    ):
        with pytest.raises(DataFileError, match=message):
            log.append(bad)
    assert not log.path.exists()


def test_a_folder_that_is_a_file_gives_one_line(tmp_path: Path) -> None:
    (tmp_path / GPU).write_text("")
    with pytest.raises(DataFileError, match="can't be written"):
        MeasurementLog(tmp_path, GPU, "run").append(a_measurement())


# --- the union


def test_the_union_counts_a_record_once_whatever_the_order_of_roots(tmp_path: Path) -> None:
    packaged, user = tmp_path / "packaged", tmp_path / "user"
    for root, numbers in ((packaged, (1, 2)), (user, (2, 3))):
        for number in numbers:
            MeasurementLog(root, GPU, f"run-{root.name}").append(a_measurement(number))
    both = read_measurements([packaged, user], GPU)
    assert [m.id for m in both] == ["run-1", "run-2", "run-3"]
    assert both == read_measurements([user, packaged, user], GPU)


def test_one_id_with_two_contents_is_refused_and_both_places_are_named(tmp_path: Path) -> None:
    MeasurementLog(tmp_path, GPU, "a").append(a_measurement(1))
    MeasurementLog(tmp_path, GPU, "b").append(a_measurement(1, device_s=3.0))
    with pytest.raises(DataFileError, match=r"b\.jsonl:1: id: 'run-1' .* at .*a\.jsonl:1"):
        read_measurements([tmp_path], GPU)


# --- hostile files


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (a_line() + b'{"schema_version": 1, "id"\n' + a_line(id="c"), r":2: is not valid JSON"),
        (a_line() + b"\n", r":2: is not valid JSON"),
        (b"\xff\xfe\n", r":1: is not valid JSON"),
        (b"[" * 100_000 + b"\n", r":1: is not valid JSON"),
        (b"[1]\n", r":1: must hold a JSON object, got list"),
        (b"x" * (MAX_LINE_BYTES + 2), r":1: is longer than 1048576 bytes"),
        (a_line(device_s="1"), r":1: device_s: got '1'; must be a number"),
        (a_line().replace(b'"device_s": 0.0', b'"device_s": NaN'), r":1: .*NaN is not JSON"),
        (a_line().replace(b'"device_s": 0.0', b'"device_s": 1e999'), r":1: device_s: got inf"),
        (
            a_line().replace(b'"device_s": 0.0', b'"device_s": ' + b"9" * 5000),
            r":1: is not valid JSON",
        ),
        (a_line(schema_version=...), r":1: schema_version: must be a whole number"),
        (a_line(schema_version=True), r":1: schema_version: must be a whole number"),
        (a_line(schema_version=2), r":1: schema_version is 2, this release reads 1 to 1; upgrade"),
        (a_line(colour="red"), r":1: colour: is not a field"),
        (a_line(id=...), r":1: id: missing"),
        (a_line(id=""), r":1: id: got ''"),
        (a_line(id="a\nb"), r":1: id: got"),
        (a_line(gpu="../../etc"), r":1: gpu: is '../../etc' in the folder of"),
        (a_line(date="yesterday"), r":1: date: got 'yesterday'; must be a date"),
        (a_line(date=5), r":1: date: got 5; must be a date"),
        (a_line(outcome="fine"), r":1: outcome: got 'fine'; must be one of ok, oom"),
        (a_line(outcome=["ok"]), r":1: outcome: got \['ok'\]"),
        (a_line(step_s=[0.1, -1]), r":1: step_s: got \[0.1, -1\]"),
        (a_line(step_s=[0]), r":1: step_s: got \[0\]; .* none of them 0"),
        (a_line(step_s=[True]), r":1: step_s: got \[True\]"),
        (a_line(step_s="0.1"), r":1: step_s: got '0.1'"),
        (a_line(batch_seq_len=[0]), r":1: batch_seq_len: got \[0\]"),
        (a_line(peak_allocated_bytes=-1), r":1: peak_allocated_bytes: got -1"),
        (a_line(peak_allocated_bytes=1.5), r":1: peak_allocated_bytes: got 1.5"),
        (a_line(peak_allocated_bytes=10**15), r":1: peak_allocated_bytes: got 1000000000000000"),
        (a_line(peak_allocated_bytes=0), r":1: peak_allocated_bytes.* ended ok used more than 0"),
        (a_line(peak_allocated_bytes=9, peak_reserved_bytes=8), r":1: peak_allocated_bytes: 9 is"),
        (a_line(config={"model": "m", "batch_size": 0}), r":1: config: batch_size: must be 1"),
        (a_line(config={"model": "m", "batchsize": 1}), r":1: config: batchsize: is not a setting"),
        (a_line(config={}), r":1: config: "),
        (a_line(environment=None), r":1: environment: got None; must be an object"),
    ],
)
def test_a_broken_record_is_refused_with_its_place(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = a_file(tmp_path)
    path.write_bytes(content)
    with pytest.raises(DataFileError, match=message) as caught:
        read_measurements([tmp_path], GPU)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_run_out_of_memory_may_have_counted_nothing(tmp_path: Path) -> None:
    oom = a_measurement(outcome="oom", step_s=(), peak_allocated_bytes=0)
    MeasurementLog(tmp_path, GPU, "run").append(oom)
    assert read_measurements([tmp_path], GPU) == (oom,)


def test_a_record_of_an_older_release_takes_the_defaults(tmp_path: Path) -> None:
    a_file(tmp_path).write_bytes(a_line(device_s=..., provenance=..., model_config=...))
    assert read_measurements([tmp_path], GPU) == (a_measurement(),)


def test_what_is_no_record_is_left_out_by_name_and_the_others_are_read(tmp_path: Path) -> None:
    MeasurementLog(tmp_path, GPU, "good").append(a_measurement())
    a_file(tmp_path, "bad").write_bytes(
        a_line(id="large", config=RunConfig(model="m").to_dict() | {"batch_size": 10**10})
        + b"{}\n"
        + a_line(id="after")
        + b'{"torn'
    )
    os.mkfifo(a_file(tmp_path, "pipe"))
    a_file(tmp_path, "folder").mkdir()
    a_file(tmp_path, "loop").symlink_to("loop.jsonl")
    with a_file(tmp_path, "huge").open("wb") as file:
        file.truncate(2**31)
    left_out: dict[str, str] = {}
    records = read_measurements([tmp_path], GPU, leave_out=left_out.__setitem__)
    assert {record.id for record in records} == {"run-0", "after"}
    reasons = {Path(where).name: why for where, why in left_out.items()}
    assert reasons["bad.jsonl:1"].startswith("config: batch_size: must be 1000000000 or less")
    assert reasons["bad.jsonl:2"].startswith("schema_version")
    assert reasons["bad.jsonl:4"].startswith("is not finished")
    assert reasons["pipe.jsonl"].startswith("is a pipe")
    assert reasons["folder.jsonl"].startswith("is a folder")
    assert "symbolic links" in reasons["loop.jsonl"]
    assert reasons["huge.jsonl"].startswith("has 2.00 GiB")
    assert len(reasons) == 7
    assert record_ids([tmp_path], GPU) == {"run-0", "large", "after"}


def test_of_two_records_with_one_id_neither_is_taken(tmp_path: Path) -> None:
    for name, size in (("one", 1), ("two", 2)):
        log = MeasurementLog(tmp_path, GPU, name)
        log.append(a_measurement(peak_allocated_bytes=size))
        log.append(a_measurement(size))
    left_out: dict[str, str] = {}
    records = read_measurements([tmp_path], GPU, leave_out=left_out.__setitem__)
    assert {record.id for record in records} == {"run-1", "run-2"}
    assert len(left_out) == 1


def test_a_folder_named_like_a_file_is_refused(tmp_path: Path) -> None:
    a_file(tmp_path).mkdir()
    with pytest.raises(DataFileError, match=r"run\.jsonl: is a folder, not a file"):
        read_measurements([tmp_path], GPU)


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".", "..", "A100", "a\n", "-a", "a" * 200])
@pytest.mark.parametrize(
    "use",
    [
        lambda root, name: read_measurements([root], name),
        lambda root, name: MeasurementLog(root, name, "run"),
        lambda root, name: MeasurementLog(root, GPU, name),
        lambda root, name: read_coefficients([root], name),
        lambda root, name: write_coefficients(root, name, {}),
    ],
)
def test_a_name_that_could_leave_its_folder_is_refused(
    tmp_path: Path, name: str, use: Callable[[Path, str], object]
) -> None:
    with pytest.raises(ConfigError, match="can't name a folder"):
        use(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


# --- coefficients


def test_coefficients_are_read_back_from_the_first_root_that_has_them(tmp_path: Path) -> None:
    user, packaged = tmp_path / "user", tmp_path / "packaged"
    assert read_coefficients([user, packaged], GPU) is None
    write_coefficients(packaged, GPU, {"num_runs": 8})
    assert read_coefficients([user, packaged], GPU) == {"num_runs": 8, "schema_version": 1}
    write_coefficients(user, GPU, {"num_runs": 20})
    assert read_coefficients([user, packaged], GPU) == {"num_runs": 20, "schema_version": 1}


def test_coefficients_of_a_newer_release_are_refused(tmp_path: Path) -> None:
    path = write_coefficients(tmp_path, GPU, {})
    path.write_text('{"schema_version": 3}')
    message = r"schema_version is 3, this release reads 1 to 1; upgrade whichlora"
    with pytest.raises(DataFileError, match=message):
        read_coefficients([tmp_path], GPU)


def test_a_failed_write_keeps_the_old_coefficients_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_coefficients(tmp_path, GPU, {"num_runs": 8})

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataFileError, match="No space left"):
        write_coefficients(tmp_path, GPU, {"num_runs": 9})
    assert read_coefficients([tmp_path], GPU) == {"num_runs": 8, "schema_version": 1}
    assert list(path.parent.iterdir()) == [path]


def _rewrite(root: Path, writer: int) -> None:
    for _ in range(20):
        write_coefficients(root, GPU, {"values": [writer] * 500})


def test_coefficients_written_by_many_are_always_those_of_one(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_rewrite, args=(tmp_path, n)) for n in range(3)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        payload = read_coefficients([tmp_path], GPU)
        assert payload is None or len(set(payload["values"])) == 1
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0


def test_a_folder_is_made_before_anything_is_measured_and_refused_if_it_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = MeasurementLog(tmp_path, "a100-sxm-80gb", "run")
    log.prepare()
    log.prepare()
    assert log.path.parent.is_dir()
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(DataFileError, match=r"can't be written \(Permission denied\)"):
        log.prepare()


def test_the_longest_line_that_can_be_read_back_is_written_and_none_longer() -> None:
    usual = len(encode_record(a_measurement(detail=""), "r"))
    longest = a_measurement(detail="x" * (MAX_LINE_BYTES - usual))
    assert len(encode_record(longest, "r")) == MAX_LINE_BYTES
    with pytest.raises(DataFileError, match="has 1048577 bytes, at most 1048576"):
        encode_record(a_measurement(detail="x" * (MAX_LINE_BYTES - usual + 1)), "r")


def test_a_file_of_records_is_no_program(tmp_path: Path) -> None:
    record = a_measurement()
    log = MeasurementLog(tmp_path, record.gpu, "run")
    log.append(record)
    assert log.path.stat().st_mode & 0o111 == 0


@pytest.mark.parametrize(
    ("size", "is_accepted"),
    [(0, True), (10**15 - 1, True), (None, True), (10**15, False), (-1, False)],
)
def test_a_run_without_memory_may_have_used_none_and_no_run_a_petabyte(
    size: int | None, is_accepted: bool
) -> None:
    oom = a_measurement(outcome="oom", step_s=(), peak_allocated_bytes=size)
    line = json.dumps(oom.to_dict()).encode()
    if is_accepted:
        assert check_record(line, "r").peak_allocated_bytes == size
    else:
        with pytest.raises(DataFileError, match="r: peak_allocated_bytes: got"):
            check_record(line, "r")


@pytest.mark.parametrize("record_id", ["\ud800", "a\nb", "x" * 201, "", None, 7])
def test_an_id_that_no_name_can_have_is_passed_over(tmp_path: Path, record_id: object) -> None:
    path = tmp_path / GPU / "measurements" / "run.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"schema_version": 2, "id": record_id}) + "\n")
    assert record_ids([tmp_path], GPU) == set()
