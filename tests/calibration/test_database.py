"""Calibration databases: tables in and out, merging, remote folders, and what is refused."""

from __future__ import annotations

import csv
import io
import json
import multiprocessing
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from databases import GPU, MODEL, a_database, a_record, ids
from hypothesis import given, settings
from hypothesis import strategies as st

from whichlora import terminal
from whichlora.calibration import database as databases
from whichlora.calibration import load
from whichlora.calibration.load import load_calibration
from whichlora.calibration.share import remote, union
from whichlora.calibration.share.physics import impossible
from whichlora.calibration.share.table import format_table, read_table
from whichlora.cli import main
from whichlora.errors import DataFileError
from whichlora.memory.weights import weight_bytes
from whichlora.predict.coefficients import HeldOut, prior_calibration
from whichlora.predict.quantities import step_features
from whichlora.predict.resolve import resolve
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model
from whichlora.store.measurements import read_measurements
from whichlora.store.paths import data_folder
from whichlora.store.record import MAX_LINE_BYTES
from whichlora.workflow import estimates

COLUMNS = (
    "model",
    "gpu",
    "phase",
    "method",
    "r",
    "batch_size",
    "seq_len",
    "precision",
    "gradient_checkpointing",
    "step [ms]",
    "peak_allocated_GiB",
    "date",
    "source",
)
ROW = (MODEL, GPU, "finetune", "lora", "16", "2", "1024", "bf16", "true", "900", "22.5",
       "2026-01-02", "a table")  # fmt: skip


def whichlora(*args: str | Path) -> Result:
    command = [str(arg) for arg in args]
    return CliRunner().invoke(main, ["calibrate", *command], prog_name="whichlora")


def done(*args: str | Path) -> str:
    result = whichlora(*args)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def refused(*args: str | Path) -> str:
    result = whichlora(*args)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    return line


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's database of one test, without the records that are shipped."""
    folder = tmp_path / "database"
    monkeypatch.setenv("WHICHLORA_CALIBRATION", str(folder))
    monkeypatch.setattr(load, "data_folder", lambda name: tmp_path / "shipped" / name)
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def a_table(tmp_path: Path, **changes: str) -> Path:
    """A table of one row; a change replaces a cell, or renames a column where it is `old=new`."""
    row = dict(zip(COLUMNS, ROW, strict=True)) | changes
    return write_table(tmp_path, row.keys(), [row.values()])


def write_table(tmp_path: Path, header: Any, rows: Any) -> Path:
    text = io.StringIO()
    csv.writer(text).writerows([header, *rows])
    path = tmp_path / "table.csv"
    path.write_text(text.getvalue(), encoding="utf-8")
    return path


# --- tables


def test_a_table_becomes_records_in_base_units(tmp_path: Path, root: Path) -> None:
    out = done("import", a_table(tmp_path, **{"step [ms]": "900;910"}))
    assert f"{GPU}: 1 new record" in out
    (record,) = read_measurements([root], GPU)
    assert record.step_s == pytest.approx((0.9, 0.91))
    assert record.peak_allocated_bytes == round(22.5 * 2**30)
    assert record.run.gradient_checkpointing is True
    assert record.provenance == {"source": "a table"}
    assert "1 record was here already" in done("import", tmp_path / "table.csv")


@pytest.mark.parametrize(
    ("header", "cell", "unit_cell", "wanted"),
    [
        ("peak_allocated [GiB]", "30", "", 30 * 2**30),
        ("peak_allocated_GB", "30", "", 30 * 10**9),
        ("peak_allocated (MiB)", "30000", "", 30000 * 2**20),
        ("peak_allocated_bytes", "30000000000", "", 3 * 10**10),
        ("peak_allocated", "30GiB", "", 30 * 2**30),
        ("peak_allocated", "30 GB", "", 30 * 10**9),
        ("peak_allocated", "30", "GiB", 30 * 2**30),
        ("peak_allocated_GB", "30GB", "GB", 30 * 10**9),
    ],
)
def test_a_unit_is_in_the_header_the_cell_or_its_own_column(
    tmp_path: Path, root: Path, header: str, cell: str, unit_cell: str, wanted: int
) -> None:
    columns = [*COLUMNS, "peak_allocated_unit"]
    columns[10] = header
    row = [*ROW, unit_cell]
    row[10] = cell
    done("import", write_table(tmp_path, columns, [row]))
    (record,) = read_measurements([root], GPU)
    assert record.peak_allocated_bytes == wanted


def test_throughput_counts_every_trained_token(tmp_path: Path, root: Path) -> None:
    columns = [*COLUMNS, "gradient_accumulation_steps"]
    columns[9] = "tokens_per_s"
    row = [*ROW, "4"]
    row[9] = "2048"
    done("import", write_table(tmp_path, columns, [row]))
    (record,) = read_measurements([root], GPU)
    assert record.step_s == (4.0,)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"step [ms]": "9"}, "step: 9 ms is faster than the datasheet of a100-sxm-80gb allows"),
        ({"peak_allocated_GiB": "9"}, "9.00 GiB is less than the weights, 14.96 GiB"),
        ({"peak_allocated_GiB": "99"}, "99.00 GiB is more than a100-sxm-80gb has"),
        ({"step [ms]": "-900"}, "step: '-900' is not above 0"),
        ({"step [ms]": "nan"}, "step: 'nan' is not a number"),
        ({"step [ms]": "1e999"}, "beyond any number"),
        ({"step [ms]": "0.9s"}, "step: has two units, ms and s"),
        ({"peak_allocated_GiB": "24GB"}, "peak_allocated: has two units, GB and GiB"),
        ({"peak_allocated_GiB": "24Gb"}, "is not a unit of it"),
        ({"model": "meta-llama/Llama-3.1-9B"}, "did you mean"),
        ({"gpu": "a100"}, "ambiguous"),
        ({"gpu": "warp-9"}, "unknown GPU 'warp-9'"),
        ({"method": "lorra"}, "lorra"),
        ({"batch_size": "0"}, "batch_size: must be 1 or more"),
        ({"batch_size": "two"}, "batch_size: 'two' is not a number"),
        ({"gradient_checkpointing": "perhaps"}, "'perhaps' is not true or false"),
        ({"precision": ""}, "precision: is empty; a default would be a guess"),
        ({"r": ""}, "r: is empty"),
        ({"source": ""}, "source: is empty"),
        ({"date": "last week"}, "date: got 'last week'; must be a date"),
        ({"step [ms]": "", "peak_allocated_GiB": ""}, "nothing was measured"),
    ],
)
def test_a_row_that_cannot_be_true_is_refused_with_line_and_reason(
    tmp_path: Path, root: Path, changes: dict[str, str], said: str
) -> None:
    path = a_table(tmp_path, **changes)
    line = refused("import", path)
    assert line.startswith(f"{path}:2: ")
    assert said in line
    assert not root.exists()


def test_quantised_experts_may_be_as_small_as_their_codes() -> None:
    """Qwen publishes 30.38 GiB for this one, of a release that quantised experts too."""
    name, gpu = "Qwen/Qwen2-57B-A14B-Instruct", find_gpu(GPU)
    run = RunConfig(model=name, phase="inference", quant="gptq-int4")
    record = a_record(2, config=run.to_dict(), peak_allocated_bytes=round(30.38 * 2**30))
    model = load_model(name)
    assert impossible(replace(record, prefill_s=()), model, gpu) == ""
    small = replace(record, peak_allocated_bytes=20 * 2**30)
    assert "less than the weights" in impossible(small, model, gpu)


def test_a_board_may_pass_its_datasheet_by_a_quarter_and_no_more() -> None:
    """`sharing.physics` says where the slack comes from."""
    gpu = find_gpu(GPU)
    model = load_model(MODEL)
    run = RunConfig(model=MODEL, batch_size=4, seq_len=1024, precision="bf16-no-autocast")
    at_peak = replace(gpu, measured_flops_per_s={}, power_w=None)
    features = step_features(resolve(model, run, at_peak))
    floor = max(features["products"], features["weights"])
    for factor, is_refused in ((0.82, False), (0.78, True)):
        record = a_record(config=run.to_dict(), step_s=(factor * floor,) * 3)
        assert ("faster than the datasheet" in impossible(record, model, gpu)) is is_refused


@pytest.mark.parametrize(
    ("of_weights", "of_device", "said"),
    [(0.98, None, ""), (0.96, None, "less than the weights"),
     (None, 1.01, ""), (None, 1.03, "more than a100-sxm-80gb has")],
)  # fmt: skip
def test_a_peak_may_differ_from_what_is_known_by_2_or_3_percent(
    of_weights: float | None, of_device: float | None, said: str
) -> None:
    gpu, model = find_gpu(GPU), load_model(MODEL)
    stored = weight_bytes(model, resolve(model, a_record().run, gpu).dtypes)
    weights = sum(stored.values()) - stored["buffers"]
    size = weights * of_weights if of_weights else gpu.memory_bytes * (of_device or 0)
    found = impossible(a_record(peak_allocated_bytes=round(size)), model, gpu)
    assert said in found
    assert bool(said) == bool(found)


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ([*COLUMNS[:-1], "colour"], "column 'colour' is not known"),
        ([*COLUMNS[:9], "step_parsec", *COLUMNS[10:]], "'step_parsec'"),
        ([*COLUMNS[:10], "peak_allocated_Gb", *COLUMNS[11:]], "'Gb' is not a unit of it"),
        (COLUMNS[1:], "column 'model' is missing"),
        (COLUMNS[:-1], "column 'source' is missing"),
        ([*COLUMNS, "step_s"], "column 'step' comes twice"),
        ([";".join(COLUMNS)], "is not known"),
    ],
)
def test_a_header_that_is_not_understood_refuses_the_table(
    tmp_path: Path, header: Sequence[str], said: str
) -> None:
    assert said in refused("import", write_table(tmp_path, header, [ROW]))


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe\n", b"x" * (MAX_LINE_BYTES + 2), b'model,"gpu\n', b"a\0b\n"],
    ids=["empty", "no UTF-8", "one long line", "open quote", "a zero byte"],
)
def test_what_is_no_table_gets_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(content)
    assert refused("import", path).startswith(str(path))
    assert "can't be read" in refused("import", tmp_path / "absent.csv")


def test_all_rows_or_none_unless_bad_ones_are_skipped(tmp_path: Path, root: Path) -> None:
    bad = [*ROW[:9], "9", *ROW[10:]]
    path = write_table(tmp_path, COLUMNS, [ROW, bad, [*ROW, "more"]])
    line = refused("import", path)
    assert f"{path}:3: " in line
    assert "and 1 more rows" in line
    assert not root.exists()
    result = whichlora("import", path, "--skip-bad")
    assert result.exit_code == 0
    assert [line.split(": ")[1] for line in result.stderr.splitlines()] == [
        f"{path}:3",
        f"{path}:4",
    ]
    assert len(ids(root)) == 1


IMAGES = {"images": 2, "image_size": [640, 480]}


def test_an_exported_table_is_read_back_as_the_same_records(tmp_path: Path) -> None:
    records = [
        *(a_record(number) for number in range(4)),
        a_record(4, config={**a_record().config, "model": "Qwen/Qwen2-VL-2B-Instruct", **IMAGES}),
        a_record(
            5,
            outcome="oom",
            step_s=(),
            batch_seq_len=(),
            prefill_s=(),
            decode_s_per_token=(),
            peak_allocated_bytes=None,
            detail='CUDA, "out of memory"',
            environment={"number": 5, "text": "5", "nothing": None, "empty": "", "list": [1, "a"]},
        ),
    ]
    path = tmp_path / "table.csv"
    path.write_text(format_table(records), encoding="utf-8")
    table = read_table(path, find_model=load_model, find_gpu=find_gpu)
    assert table.refused == []
    assert list(table.records) == list(records)


def test_every_shipped_record_is_possible_and_comes_back_from_a_table(tmp_path: Path) -> None:
    records = read_measurements([data_folder("calibration")], GPU)
    path = tmp_path / "shipped.csv"
    path.write_text(format_table(records), encoding="utf-8")
    table = read_table(path, find_model=load_model, find_gpu=find_gpu)
    assert table.refused == []
    assert list(table.records) == list(records)


TEXTS = st.text(max_size=12) | st.sampled_from(["=1+1", "'=x", "-1", "+2e3", "\t@x", "null", " a "])
BASE = a_record()
SECONDS = st.floats(1.0, 1e5, allow_nan=False)
GROUPS = st.dictionaries(TEXTS, TEXTS | st.none() | st.integers() | st.booleans(), max_size=3)


@settings(max_examples=60)
@given(data=st.data())
def test_every_field_of_every_outcome_comes_back_from_a_table(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    times = st.lists(SECONDS, max_size=3).map(tuple)
    size = st.none() | st.integers(0, 10**15 - 1)
    config = BASE.config | {"prepare_kbit": data.draw(st.none() | st.booleans())}
    optional = data.draw(st.sets(st.sampled_from(["bias", "attn", "libraries", "use_reentrant"])))
    record = replace(
        BASE,
        config={name: value for name, value in config.items() if name not in optional},
        outcome=data.draw(st.sampled_from(["oom", "crashed", "killed", "timeout", "error"])),
        detail=data.draw(TEXTS),
        step_s=data.draw(times),
        batch_seq_len=data.draw(st.lists(st.integers(1, 10**9 - 1), max_size=3).map(tuple)),
        generate_s=data.draw(times),
        prefill_s=data.draw(times),
        decode_s_per_token=data.draw(st.lists(st.floats(0, 1), max_size=3).map(tuple)),
        peak_allocated_bytes=data.draw(size),
        device_used_bytes=data.draw(size),
        moment_peak_bytes=data.draw(st.dictionaries(TEXTS, st.integers(0, 10**14), max_size=3)),
        largest_blocks_bytes=data.draw(st.lists(st.integers(0, 10**14), max_size=3).map(tuple)),
        engine_log=data.draw(st.dictionaries(TEXTS, st.floats(-1e14, 1e14), max_size=3)),
        device_s=data.draw(st.floats(0, 1e6)),
        warm_up_s=data.draw(st.floats(0, 1e6)),
        environment=data.draw(GROUPS),
        provenance=data.draw(GROUPS),
    )
    path = tmp_path_factory.mktemp("tables") / "table.csv"
    path.write_bytes(format_table([record]).encode())
    table = read_table(path, find_model=load_model, find_gpu=find_gpu)
    assert list(table.records) == [record], table.refused


def test_no_cell_of_an_exported_table_is_a_formula(tmp_path: Path) -> None:
    bad = ["=cmd|'/C calc'!A0", "+1+cmd", "-1+1", "@SUM(A1)", "\t=1", "\r=1"]
    records = [
        a_record(n, detail=text, outcome="error", environment={"driver": text}, id=f"run-{n}")
        for n, text in enumerate(bad)
    ]
    rows = list(csv.reader(io.StringIO(format_table(records), newline="")))
    assert not [cell for row in rows for cell in row if cell[:1] in tuple("=+-@\t\r")]


def test_a_database_knows_the_records_of_its_own_table(tmp_path: Path, root: Path) -> None:
    shipped = read_measurements([data_folder("calibration")], GPU)
    a_database(root, [*shipped[:20], a_record(1, outcome="oom", detail="=1", provenance={})])
    done("export", tmp_path / "all.csv")
    assert done("import", tmp_path / "all.csv") == "21 records were here already\n"


def test_a_record_with_its_own_model_survives_a_table(tmp_path: Path) -> None:
    config = load_model(MODEL).config
    record = a_record(model_config=config)
    record = replace(record, config={**record.config, "model": "./mine"})
    path = tmp_path / "table.csv"
    path.write_text(format_table([record]), encoding="utf-8")
    table = read_table(path, find_model=load_model, find_gpu=find_gpu)
    assert list(table.records) == [record], table.refused


def test_a_row_without_id_is_named_by_what_differs_from_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    # values of its own: predicted ones move with the formulas, and a name with its values
    given = a_record(1, id="", step_s=(1.5, 1.25, 1.0), peak_allocated_bytes=2**34)
    path.write_text(format_table([given]), encoding="utf-8")
    (found,) = read_table(path, find_model=load_model, find_gpu=find_gpu).records
    assert found.id == "import-279423d83f9624e87bf5ba65709f8fd3"  # also after a setting was added


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_what_one_exports_another_adds(tmp_path: Path, root: Path, ending: str) -> None:
    a_database(root, [a_record(n) for n in range(5)])
    path = tmp_path / f"all.{ending}"
    assert done("export", path) == f"{path}: 5 records\n"
    other = tmp_path / "other"
    command = "import" if ending == "csv" else "merge"
    done(command, path, "--calibration-dir", other)
    assert read_measurements([other], GPU) == read_measurements([root], GPU)
    assert "must end in .csv or .jsonl" in refused("export", tmp_path / "all.parquet")


def test_a_list_of_accelerators_is_fitted_shown_and_exported_each_once(
    tmp_path: Path, root: Path
) -> None:
    a_database(root, [a_record(n) for n in range(3)])
    a_database(root, [a_record(n, gpu="l4-24gb") for n in range(2)])
    path = tmp_path / "all.csv"
    assert done("export", path) == f"{path}: 5 records\n"
    assert done("export", path, "--gpu", f"l4,{GPU},L4") == f"{path}: 5 records\n"
    assert done("export", path, "--gpu", "l4") == f"{path}: 2 records\n"
    for before, after in (((), ("--gpu", f"l4,{GPU}")), (("--gpu", f"l4,{GPU}"), ())):
        shown = json.loads(done(*before, "show", "--json", *after))["calibrations"]
        assert [each["calibration"]["gpu"] for each in shown] == ["l4-24gb", GPU]
    fits = json.loads(done("fit", "--gpu", "l4", "--json"))["fits"]
    assert len(fits) == 1


# --- fit, show, estimate


def test_a_fit_says_what_improved(root: Path) -> None:
    slow = [
        replace(one, step_s=tuple(1.4 * s for s in one.step_s)) for one in map(a_record, range(8))
    ]
    a_database(root, slow)
    out = done("--gpu", GPU)
    assert "datasheet alone" in out
    (row,) = [line.split() for line in out.splitlines() if line.startswith(" finetune")]
    cold, now = (float(row[i].rstrip("%")) for i in (2, 4))
    assert (row[1], row[3]) == ("6", "-")
    assert now < cold / 2
    again = json.loads(done("fit", "--json"))["fits"]
    assert again[0]["before"] == again[0]["after"]


def test_show_names_the_outlier_the_range_and_who_measured(root: Path) -> None:
    records = [a_record(n, id=f"run-{n}") for n in range(24)]
    wild = replace(records[3], step_s=tuple(5 * s for s in records[3].step_s))
    unknown = replace(records[4], config={**records[4].config, "model": "nobody/knows"})
    a_database(root, [*records[:3], wild, unknown, *records[5:]])
    done("fit")
    out = done("show", "--gpu", GPU)
    assert re.search(r"run-3 +finetune +(4\.9\d|5\.0)", out)
    assert "left out: run-4" in out
    assert "   24  whichlora run a.yaml\n" in out
    assert "torch 2.13.0 (24)" in out
    assert "1 to 4" in out
    (one,) = json.loads(done("show", "--json"))["calibrations"]
    assert one["outcomes"] == {"ok": 24}
    assert one["stale"] == ""
    assert [found["record"] for found in one["calibration"]["outliers"]] == ["run-3"]


def test_stale_coefficients_are_told_until_the_fit_is_repeated(root: Path) -> None:
    def basis() -> str:
        return estimates.estimate([RunConfig(model=MODEL)], [GPU])[0].basis

    assert "not fitted" not in basis()
    a_database(root, [a_record(n) for n in range(3)])
    assert f"not fitted to the 3 records there are now: whichlora calibrate --gpu {GPU}" in basis()
    done("fit")
    assert "not fitted" not in basis()
    a_database(root, [a_record(9)], name="later")
    assert "not fitted to the 4 records" in basis()
    (root / GPU / "measurements" / "bad.jsonl").write_text("{}\n")
    assert "not fitted to the 4 records" in basis()  # it holds none


def basis_now() -> str:
    (prediction,) = estimates.estimate([RunConfig(model=MODEL)], [GPU])
    return prediction.basis


def test_one_impossible_record_is_left_out_by_name_and_the_others_are_fitted(root: Path) -> None:
    a_database(root, [a_record(number) for number in range(6)])
    before = load_calibration(find_gpu(GPU))
    config = a_record().config | {"batch_size": 10**9}
    a_database(root, [a_record(0, id="forged", config=config)], "other")
    (root / GPU / "measurements" / "broken.jsonl").write_text('{"schema_version": 1}\n')
    said = done("fit", "--gpu", GPU)
    assert "left out: forged: finetune: " in " ".join(said.split())
    assert "broken.jsonl:1: id: missing" in " ".join(said.split()).replace("/ ", "/")
    after = load_calibration(find_gpu(GPU))
    assert set(after.left_out) - set(before.left_out) >= {"forged"}
    assert after.time["finetune"].num_runs == 4
    assert "not fitted" not in basis_now()


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("time", "finetune", "mean", "products"), -3.0, "got -3; must be from 0 to 1e+06"),
        (("time", "decode", "noise"), 1e308, "got 1e+308; must be from 0 to 10"),
        (("memory", "mean", "weights"), "x", "is missing or wrong"),
        (("memory", "num_runs"), -1, "got -1; must be from 0"),
        (("time", "prefill", "covariance"), [[0.0]], "covariance must be"),
    ],
)
def test_a_wrong_coefficient_is_named_and_the_records_are_fitted_instead(
    root: Path, path: tuple[str, ...], value: Any, said: str
) -> None:
    a_database(root, [a_record(number) for number in range(6)])
    done("fit", "--gpu", GPU)
    file = root / GPU / "coefficients.json"
    values = json.loads(file.read_text())
    *inner, last = path
    part = values
    for key in inner:
        part = part[key]
    part[last] = value
    file.write_text(json.dumps(values))
    basis = basis_now()
    assert said in basis
    assert str(file) in basis
    if "must be from" in said:
        assert ".".join(path) in basis
    assert basis.endswith("used until then: a fit to the 6 records just now")
    done("fit", "--gpu", GPU)  # over the broken file
    assert "coefficients.json" not in basis_now()


def test_without_records_there_is_nothing_to_fit(root: Path) -> None:
    assert "no run was recorded yet" in refused()
    a_database(root, [a_record()])
    assert f"records are there for {GPU}" in refused("--gpu", "t4-16gb")


# --- merging


@given(data=st.data())
@settings(max_examples=15)
def test_merging_is_free_of_order_and_repetition(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    base = tmp_path_factory.mktemp("merge")
    records = [a_record(n) for n in range(6)]
    parts = data.draw(
        st.lists(
            st.lists(st.sampled_from(records), min_size=1, unique_by=lambda one: one.id),
            min_size=1,
            max_size=4,
        )
    )
    sources = [a_database(base / f"part-{n}", part) for n, part in enumerate(parts)]
    orders = [sources, data.draw(st.permutations(sources * 2))]
    found = []
    for n, order in enumerate(orders):
        for source in order:
            databases.merge_records(source, calibration_dir=base / f"into-{n}")
        found.append(read_measurements([base / f"into-{n}"], GPU))
    assert found[0] == found[1]
    assert {one.id for one in found[0]} == {one.id for part in parts for one in part}
    before = files(base / "into-0")
    databases.merge_records(base / "into-1", calibration_dir=base / "into-0")
    assert files(base / "into-0") == before


def _merge(source: Path, into: Path) -> None:
    databases.merge_records(source, calibration_dir=into)


def test_processes_that_merge_at_once_lose_and_repeat_nothing(tmp_path: Path) -> None:
    sources = [
        a_database(tmp_path / f"part-{n}", [a_record(i) for i in range(4 * n, 4 * n + 6)])
        for n in range(4)
    ]
    context = multiprocessing.get_context("fork")  # a spawned one imports everything anew
    into = tmp_path / "into"
    workers = [
        context.Process(target=_merge, args=(source, into)) for source in sources for _ in range(2)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * len(workers)
    assert ids(into) == sorted(f"run-{n}" for n in range(18))


def test_two_contents_of_one_id_are_refused(tmp_path: Path, root: Path) -> None:
    a_database(root, [a_record(1)])
    before = files(root)
    theirs = a_database(tmp_path / "theirs", [a_record(0), a_record(1, device_s=3.0)])
    line = refused("merge", theirs)
    assert "'run-1' is another record at" in line
    assert files(root) == before


def test_two_records_of_one_id_here_hinder_no_merge_of_others(tmp_path: Path, root: Path) -> None:
    a_database(root, [a_record(1)])
    a_database(root, [a_record(1, peak_allocated_bytes=80 * 10**9)], "other")
    a_database(tmp_path / "theirs", [a_record(2)])
    assert "1 new record" in done("merge", tmp_path / "theirs")


def test_a_writer_that_came_first_wins_and_the_merge_is_withdrawn(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = union.write_bytes

    def race(path: Path, data: bytes) -> None:
        a_database(root, [a_record(1, device_s=3.0)], name="other-writer")
        write(path, data)

    monkeypatch.setattr(union, "write_bytes", race)
    theirs = a_database(tmp_path / "theirs", [a_record(1)])
    assert "is another record" in refused("merge", theirs)
    assert [one.device_s for one in read_measurements([root], GPU)] == [3.0]


def test_a_device_that_nobody_here_knows_comes_with_its_facts(tmp_path: Path, root: Path) -> None:
    theirs = a_database(tmp_path / "theirs", [a_record(1, gpu="warp-9"), a_record(2)])
    facts = json.loads((data_folder("calibration") / GPU / "gpu.json").read_text())
    facts |= {"key": "warp-9", "name": "Warp 9", "aliases": [], "names": ["Warp 9"]}
    (theirs / "warp-9" / "gpu.json").write_text(json.dumps(facts))
    done("merge", theirs)
    assert find_gpu("warp-9").name == "Warp 9"
    assert not (root / GPU / "gpu.json").exists()


def damage(kind: str, folder: Path) -> None:
    """Make the database in `folder` one that nobody should merge."""
    path = folder / GPU / "measurements" / "run.jsonl"
    good = path.read_bytes()
    record = json.loads(good)
    if kind == "schema":
        path.write_bytes(json.dumps(record | {"schema_version": 9}).encode() + b"\n")
    elif kind == "NaN":
        path.write_bytes(good.replace(b'"device_s": 0.0', b'"device_s": NaN'))
    elif kind == "absurd":
        path.write_bytes(json.dumps(record | {"device_s": -5}).encode() + b"\n")
    elif kind == "impossible":
        path.write_bytes(json.dumps(record | {"step_s": [1e-6] * 3}).encode() + b"\n")
    elif kind == "two contents":
        path.write_bytes(good + json.dumps(record | {"device_s": 5}).encode() + b"\n")
    elif kind == "escape":
        (folder / "loose.jsonl").write_bytes(
            json.dumps(record | {"gpu": "../../etc"}).encode() + b"\n"
        )
    elif kind == "other folder":
        shutil.copytree(folder / GPU, folder / "t4-16gb")
    elif kind == "long line":
        with path.open("ab") as file:
            file.truncate(64 * MAX_LINE_BYTES)  # sparse: no newline anywhere
    elif kind == "huge":
        with (folder / "huge.jsonl").open("wb") as file:
            file.truncate(union.MAX_TOTAL_BYTES + 1)
    elif kind == "link":
        (folder / GPU / "measurements" / "link.jsonl").symlink_to("/etc/passwd")
    elif kind == "folder link":
        (folder / "t4-16gb").symlink_to(folder / GPU)
    elif kind == "pipe":
        os.mkfifo(folder / "pipe.jsonl")
    elif kind == "packed":
        (folder / "more.jsonl.gz").write_bytes(b"\x1f\x8b")
    elif kind == "facts":
        (folder / GPU / "gpu.json").write_text('{"schema_version": 1, "key": "../x"}')
    else:
        path.unlink()


SAID = {
    "schema": "schema_version is 9, this release reads 1 to 1",
    "NaN": "NaN is not JSON",
    "absurd": "device_s: got -5",
    "impossible": "is faster than the datasheet",
    "two contents": "is another record at",
    "escape": "can't name a folder",
    "other folder": "in the folder of 't4-16gb'",
    "long line": "longer than 1048576 bytes",
    "huge": "has more than",
    "link": "is a link",
    "folder link": "is a link",
    "pipe": "a pipe",
    "packed": "is compressed",
    "facts": "gpu.json: ",
    "empty": "holds no records",
}


@pytest.mark.parametrize("kind", SAID)
def test_a_hostile_source_is_refused_whole(tmp_path: Path, root: Path, kind: str) -> None:
    a_database(root, [a_record(7)])
    before = files(root)
    theirs = a_database(tmp_path / "theirs", [a_record(0)])
    damage(kind, theirs)
    line = refused("merge", theirs)
    assert SAID[kind] in line
    assert line.startswith(str(theirs))
    assert files(root) == before


def test_merge_says_what_it_takes(tmp_path: Path) -> None:
    assert "can't be read" in refused("merge", tmp_path / "absent")
    assert "use 'whichlora calibrate import" in refused("merge", a_table(tmp_path))


# --- other places

REMOTE_ONLY = ("pipe", "packed", "folder link")  # a listing of files has none of these


@pytest.fixture
def memory_url() -> str:
    fsspec = pytest.importorskip("fsspec")
    system = fsspec.filesystem("memory")
    system.store.clear()
    return "memory://bucket/calibration"


def test_what_one_pushes_another_pulls(tmp_path: Path, root: Path, memory_url: str) -> None:
    a_database(root, [a_record(n) for n in range(3)])
    assert done("push", memory_url) == f"{memory_url}: 3 new records\n"
    assert done("push", memory_url) == f"{memory_url}: 0 new records\n"
    other = a_database(tmp_path / "other", [a_record(2), a_record(3)])
    done("push", memory_url, "--calibration-dir", other)
    assert f"{GPU}: 1 new record" in done("pull", memory_url)
    done("pull", memory_url, "--calibration-dir", other)
    assert ids(root) == ids(other) == [f"run-{n}" for n in range(4)]


def test_a_directory_is_an_address_too(tmp_path: Path, root: Path) -> None:
    pytest.importorskip("fsspec")
    shared = tmp_path / "shared"
    a_database(root, [a_record(n) for n in range(3)])
    for url in (f"file://{shared}", str(shared)):
        done("push", url)
    assert len(files(shared)) == 1
    other = tmp_path / "other"
    done("pull", str(shared), "--calibration-dir", other)
    done("pull", str(shared / GPU), "--calibration-dir", other)
    assert ids(other) == ids(root)


@pytest.mark.parametrize("kind", [kind for kind in SAID if kind not in REMOTE_ONLY])
def test_a_hostile_address_is_refused_whole(tmp_path: Path, root: Path, kind: str) -> None:
    pytest.importorskip("fsspec")
    a_database(root, [a_record(7)])
    before = files(root)
    theirs = a_database(tmp_path / "theirs", [a_record(0)])
    damage(kind, theirs)
    line = refused("pull", f"file://{theirs}")
    assert SAID[kind] in line or "could lead out of the folder" in line
    assert line.startswith(f"file://{theirs}")
    assert files(root) == before
    if kind not in ("empty", "impossible"):  # a push judges its own records only
        untouched = files(theirs) if kind not in ("huge", "long line") else None
        assert "file://" in refused("push", f"file://{theirs}")
        assert untouched is None or files(theirs) == untouched


def test_more_bytes_than_announced_end_the_copy(
    root: Path, memory_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec

    system = fsspec.filesystem("memory")
    system.pipe_file("/bucket/calibration/big.jsonl", b"x" * 5000)
    monkeypatch.setattr(remote, "MAX_TOTAL_BYTES", 1000)
    monkeypatch.setattr(remote, "_CHUNK_BYTES", 100)
    find = type(system).find

    def modest(self: Any, *args: Any, **more: Any) -> Any:
        return {name: info | {"size": 10} for name, info in find(self, *args, **more).items()}

    monkeypatch.setattr(type(system), "find", modest)
    assert "has more than" in refused("pull", memory_url)
    assert not root.exists()


def test_a_listing_that_leads_out_is_refused(
    root: Path, memory_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec

    system = fsspec.filesystem("memory")
    system.pipe_file("/bucket/calibration/a.jsonl", b"")
    names = {"/bucket/calibration/../../x.jsonl": {"size": 1}}
    monkeypatch.setattr(type(system), "find", lambda *_, **__: names)
    assert "could lead out of the folder" in refused("pull", memory_url)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("gopher://host/x", "gopher"),
        ("zip://a::file:///tmp/b.zip", "chained protocols are not accepted"),
        ("memory://nothing-here", "holds no records"),
        ("file:///nowhere/at/all", "holds no records"),
    ],
)
def test_a_bad_address_gets_one_line(url: str, said: str) -> None:
    pytest.importorskip("fsspec")
    assert said in refused("pull", url)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "fsspec", None)
    monkeypatch.setitem(__import__("sys").modules, "fsspec.core", None)
    assert "pip install 'whichlora[cluster]'" in refused("pull", "s3://bucket/x")


def test_conflicting_records_are_not_pushed(tmp_path: Path, root: Path, memory_url: str) -> None:
    done("push", memory_url, "--calibration-dir", a_database(tmp_path / "a", [a_record(1)]))
    a_database(root, [a_record(1, device_s=2.0), a_record(2)])
    assert "is another record at" in refused("push", memory_url)
    with pytest.raises(DataFileError, match="is another record"):
        databases.pull_records(memory_url)
    assert "1 record was here already" in done(
        "pull", memory_url, "--calibration-dir", tmp_path / "a"
    )


def told_of_fit(
    capsys: pytest.CaptureFixture[str], *, used: bool, now: float, typical: float
) -> str:
    """What `calibrate` prints of a fit whose left-out runs are `now` off, the datasheet's 6 %."""
    cold = HeldOut(num_runs=7, median=0.06, worst=0.3, typical=0.15)
    found = replace(
        prior_calibration(find_gpu(GPU)),
        held_out={"finetune": HeldOut(num_runs=7, median=now, worst=0.3, typical=typical)},
        cold={"finetune": cold},
        by_datasheet=() if used else ("finetune",),
    )
    terminal.print_refit(databases.Refit(before=None, after=found))
    return " ".join(capsys.readouterr().out.split())


def test_a_fit_no_better_than_the_datasheet_is_said_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "finetune:" not in told_of_fit(capsys, used=True, now=0.05, typical=0.1)
    said = told_of_fit(capsys, used=False, now=0.09, typical=0.2)
    assert "the fit is worse than datasheet and priors on the 7 runs left out" in said
    assert "so it is not used" in said
    said = told_of_fit(capsys, used=True, now=0.07, typical=0.1)
    assert "its mean is below (10.0% against 15.0%), so it is used" in said
    said = told_of_fit(capsys, used=True, now=0.07, typical=0.16)
    assert "by no more than chance in 7 runs that scatter by 10%" in said
