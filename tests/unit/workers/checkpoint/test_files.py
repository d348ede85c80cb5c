"""The file format, and listing, verifying and exporting committed checkpoints without torch."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xxhash

from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.protocol import coverage
from holdfast.orchestrator.protocol.facts import CoverageSum, ShardFile
from holdfast.orchestrator.protocol.manifest import (
    Manifest,
    decode_manifest,
    encode_manifest,
    parse_directory_name,
    shard_file_name,
)
from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.workers.checkpoint import __main__ as command
from holdfast.workers.checkpoint import inspect
from holdfast.workers.checkpoint.layout import (
    CHUNK_BYTES,
    MODULES,
    Box,
    DamagedCheckpoint,
    Entry,
    copy_and_hash,
    encode_extra,
    make_layout,
    parse_header,
)
from holdfast.workers.checkpoint.shard_sources import (
    CheckpointFiles,
    MissingCheckpoint,
    UnreadableCheckpoint,
)
from tests.unit.workers.checkpoint.fake_ranks import staged


def write(path: Path, files: dict[int, bytes], step: int = 1, generation: int = 1) -> Manifest:
    """A committed checkpoint, as agents and controller leave it."""
    count = len(files)
    shard_files = tuple(
        ShardFile(
            step=step, generation=generation, shard=shard, num_shards=count,
            file=shard_file_name(shard, count), num_bytes=len(content),
            checksum=xxhash.xxh3_128_hexdigest(content),
        )
        for shard, content in sorted(files.items())
    )  # fmt: skip
    manifest = Manifest(
        job="tiny", step=step, generation=generation, mesh=Mesh(shard=count), files=shard_files,
        committed_at="2026-01-01T00:00:00Z",
    )  # fmt: skip
    directory = path / manifest.directory
    directory.mkdir(parents=True)
    for file in shard_files:
        (directory / file.file).write_bytes(files[file.shard])
    (directory / "manifest.json").write_bytes(encode_manifest(manifest))
    return manifest


def flip_bit(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(bytes(content))


# -- format -----------------------------------------------------------------------------------
def test_a_header_returns_its_values_and_keeps_its_length() -> None:
    entries = [
        Entry("model.a", "BF16", Box((5, 2), (3, 0), (2, 2))),
        Entry('model."b"', "F32", Box((), (), ())),
        Entry("model.none", "F32", Box((1, 4), (0, 0), (0, 4))),
    ]
    extra = {"text": 'quotes " and \\ and ümlauts'}
    layout = make_layout(entries, generation=7, shard=1, num_shards=3, extra=encode_extra(extra))
    lengths = set()
    for step, checksum in ((0, 0), (12345, 2**64 - 1)):
        start = bytes(layout.render(step, [checksum] * 3, encode_extra(extra)))
        header = parse_header(start, "file")
        assert (header.step, header.generation, header.shard, header.num_shards) == (step, 7, 1, 3)
        assert header.extra == extra
        assert header.entries["model.a"].box == Box((5, 2), (3, 0), (2, 2))
        assert header.entries["model.a"].checksum == f"{checksum:016x}"
        assert header.entries['model."b"'].num_bytes == 4
        assert header.num_bytes == layout.num_bytes
        lengths.add(len(start))
    assert len(lengths) == 1
    assert layout.data_start % 64 == 0
    assert not layout.fits(encode_extra({"text": "x" * 5000}))


def test_any_safetensors_reader_reads_a_shard(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    (tmp_path / "shard.safetensors").write_bytes(staged(1, 2)[1])
    tensors = load_file(tmp_path / "shard.safetensors")
    assert tensors["model.first.weight"].shape == (3, 3)
    assert tensors["optim.first.weight.exp_avg"].shape == (3, 3)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        pytest.param(b"", "no safetensors header", id="empty"),
        pytest.param(b"\xff" * 64, "no safetensors header", id="garbage"),
        pytest.param((40).to_bytes(8, "little") + b"{}", "within its header", id="cut"),
        pytest.param((4).to_bytes(8, "little") + b"{xx}", "cannot be read", id="no-json"),
        pytest.param((2).to_bytes(8, "little") + b"{}", "not a shard of Holdfast", id="foreign"),
    ],
)
def test_a_file_that_is_not_a_shard_is_refused_with_its_name(content: bytes, what: str) -> None:
    with pytest.raises(DamagedCheckpoint, match=f"some-file: damaged checkpoint: .*{what}"):
        parse_header(content, "some-file")


def test_a_flipped_bit_anywhere_in_a_header_is_damage() -> None:
    extra = encode_extra({"lr": 0.125, "last_epoch": 1234})
    entries = [Entry("model.a", "F32", Box((4, 2), (2, 0), (2, 2)))]
    layout = make_layout(entries, generation=1, shard=1, num_shards=2, extra=extra)
    whole = bytes(layout.render(7, [5], extra))
    assert parse_header(whole, "file").step == 7
    for at in range(len(whole)):
        content = bytearray(whole)
        content[at] ^= 1 << at % 8
        with pytest.raises(DamagedCheckpoint):
            parse_header(bytes(content), "file")


def test_a_header_without_its_checksum_is_damaged() -> None:
    whole = staged(1, 2)[0]
    at = whole.index(b'"holdfast-header"')
    end = whole.index(b",", at) + 1
    with pytest.raises(DamagedCheckpoint, match="the checksum of its header is"):
        parse_header(whole[:at] + b" " * (end - at) + whole[end:], "file")


def test_a_copy_and_its_checksum_agree_at_every_length() -> None:
    for num_bytes in (0, 1, 4, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 17):
        source = np.arange(num_bytes, dtype=np.uint64).astype(np.uint8)
        target = np.zeros(num_bytes, dtype=np.uint8)
        assert copy_and_hash(target, source) == xxhash.xxh3_64_intdigest(source.tobytes())
        assert np.array_equal(target, source)


# -- list and verify --------------------------------------------------------------------------
def test_only_a_directory_with_a_manifest_is_committed(tmp_path: Path) -> None:
    files = staged(1, 2)
    write(tmp_path, files)
    attempt = tmp_path / "step-00000009.gen-2"
    attempt.mkdir()
    (attempt / shard_file_name(0, 2)).write_bytes(files[0])
    (tmp_path / "notes").mkdir()
    assert inspect.find(str(tmp_path)).step == 1
    with pytest.raises(UserError, match=r"no committed checkpoint after 10 steps.*steps: 2"):
        inspect.find(str(tmp_path), 9)


def test_a_stray_file_with_a_steps_name_is_not_a_checkpoint(tmp_path: Path) -> None:
    manifest = write(tmp_path, staged(1, 1))
    (tmp_path / "step-00099999.gen-1").write_text("")
    (tmp_path / "step-00000009.gen-2" / "manifest.json").mkdir(parents=True)
    assert inspect.find(str(tmp_path)) == manifest
    for stray in ("step-00099999.gen-1", "step-00000009.gen-2"):
        with pytest.raises(MissingCheckpoint, match=stray):
            CheckpointFiles(str(tmp_path)).manifest(stray)


def test_a_path_without_any_checkpoint_is_a_store_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "not-mounted"):
        with pytest.raises(UnreadableCheckpoint, match="is it mounted"):
            CheckpointFiles(str(path)).manifest("step-00000009.gen-2")


def test_an_error_of_a_stores_library_is_a_store_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = write(tmp_path, staged(1, 1))
    store = CheckpointFiles(str(tmp_path))

    def refuse(*args: object, **kwargs: object) -> bytes:
        raise RuntimeError("could not connect to the endpoint")

    monkeypatch.setattr(store.filesystem, "cat_file", refuse)
    with pytest.raises(UnreadableCheckpoint, match="could not connect"):
        store.manifest(manifest.directory)


def test_a_whole_checkpoint_verifies(tmp_path: Path) -> None:
    manifest = write(tmp_path, staged(1, 3))
    verdict = inspect.verify(str(tmp_path), manifest)
    assert (verdict.ok, verdict.num_files, verdict.num_tensors) == (True, 3, 21)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        pytest.param(lambda f: flip_bit(f, -5), "do not match its checksum", id="data"),
        pytest.param(lambda f: flip_bit(f, 60), "damaged checkpoint", id="header"),
        pytest.param(lambda f: f.write_bytes(f.read_bytes()[:-1]), "its manifest says", id="short"),
        pytest.param(lambda f: f.unlink(), "the file is missing", id="missing"),
    ],
)
def test_damage_is_found_and_its_file_named(tmp_path: Path, damage, problem: str) -> None:
    manifest = write(tmp_path, staged(1, 2))
    damage(tmp_path / manifest.directory / shard_file_name(1, 2))
    verdict = inspect.verify(str(tmp_path), manifest)
    assert not verdict.ok
    assert "shard-00001-of-00002.safetensors" in verdict.problems[0]
    assert problem in verdict.problems[0]


@pytest.mark.parametrize("kind", ["fifo", "socket", "loop"])
def test_what_is_not_a_file_is_damage_and_holds_up_no_reader(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = write(tmp_path, {0: b""})
    monkeypatch.chdir(tmp_path / manifest.directory)  # the path of a socket must be short
    path = Path(manifest.files[0].file)
    path.unlink()
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "socket":
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(path))
        case "loop":
            path.symlink_to(path.name)
    verdict = inspect.verify(str(tmp_path), manifest)
    assert not verdict.ok and manifest.files[0].file in verdict.problems[0]
    with pytest.raises(DamagedCheckpoint, match="not a regular file"):
        CheckpointFiles(str(tmp_path)).open(manifest.directory, manifest.files[0])


@pytest.mark.parametrize("remote", [False, True])
def test_an_empty_shard_is_damage(tmp_path: Path, remote: bool) -> None:
    import fsspec

    manifest = write(tmp_path, {0: b""})
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path), "/empty-shard", recursive=True)
    try:
        path = "memory://empty-shard" if remote else str(tmp_path)
        assert "the file is empty" in inspect.verify(path, inspect.find(path)).problems[0]
        with pytest.raises(DamagedCheckpoint, match="the file is empty"):
            inspect.export(path, manifest, tmp_path / "out")
    finally:
        memory.rm("/empty-shard", recursive=True)


def test_a_shard_of_another_step_is_damage_even_if_the_manifest_has_its_checksum(
    tmp_path: Path,
) -> None:
    manifest = write(tmp_path, staged(1, 2), step=5)
    verdict = inspect.verify(str(tmp_path), manifest)
    assert "got step 1, shard 0 of 2; expected step 5, shard 0 of 2" in verdict.problems[0]


def _change(path: str, value: object) -> dict[str, object]:
    """A manifest as JSON with another value at this path."""
    files = tuple(
        ShardFile(3, 1, shard, 2, shard_file_name(shard, 2), 100, "c" * 32, CoverageSum(1, 2))
        for shard in range(2)
    )
    manifest = Manifest(
        job="j", step=3, generation=1, mesh=Mesh(shard=2), files=files, committed_at=""
    )
    document: dict[str, object] = json.loads(encode_manifest(manifest))
    holder, (*way, last) = document, [int(key) if key.isdigit() else key for key in path.split(".")]
    for key in way:
        holder = holder[key]  # type: ignore[index, assignment]
    holder[last] = value  # type: ignore[index]
    return document


@pytest.mark.parametrize(
    ("path", "value", "what"),
    [
        ("files.1.num_bytes", 2**64, "num_bytes: got 18446744073709551616; expected 0 to"),
        ("files.1.num_bytes", 2**63 - 1, "their bytes: got 9223372036854775907"),
        ("files.1.num_bytes", -1, "num_bytes: got -1"),
        ("files.1.generation", 2**64, "generation: got 18446744073709551616"),
        ("files.1.generation", -1, "generation: got -1"),
        ("files.1.generation", 2, "generation 2; expected step 3, generation 1"),
        ("files.1.step", 10**18, "got step 1000000000000000000, generation 1; expected step 3"),
        ("files.1.step", -5, "step: got -5"),
        ("files.1.num_shards", 3, "expected 'shard-00001-of-00002.safetensors'"),
        ("files.1.shard", 0, "expected 0 to 1, each once"),
        ("files.1.coverage.whole", 2**64, "coverage: got 18446744073709551616"),
        ("step", -5, "got step 3, generation 1; expected step -5"),
        ("generation", 2**64, "expected step 3, generation 18446744073709551616"),
    ],
)
def test_a_wrong_number_in_a_manifest_is_damage(path: str, value: object, what: str) -> None:
    data = json.dumps(_change(path, value)).encode()
    with pytest.raises(ValueError, match=re.escape(what)):
        decode_manifest(data, "step-00000003.gen-1")


def test_the_manifest_of_another_directory_is_damage(tmp_path: Path) -> None:
    manifest = write(tmp_path, staged(1, 1))
    copied = tmp_path / "step-00000009.gen-2"
    copied.mkdir()
    (copied / "manifest.json").write_bytes(encode_manifest(manifest))
    assert inspect.find(str(tmp_path)) == manifest
    with pytest.raises(DamagedCheckpoint, match="got the manifest of step-00000001"):
        CheckpointFiles(str(tmp_path)).manifest(copied.name)


@pytest.mark.parametrize(
    "name", [f"step-{2**63}.gen-1", f"step-00000001.gen-{2**63}", "step-000000001.gen-1"]
)
def test_a_directory_that_no_attempt_writes_is_not_a_checkpoint(name: str) -> None:
    assert parse_directory_name(name) is None


def _one_tensor(global_shape: tuple[int, ...], shape: tuple[int, ...]) -> bytes:
    entries = [Entry("model.a", "F32", Box(global_shape, (0,) * len(shape), shape))]
    layout = make_layout(entries, generation=1, shard=0, num_shards=1, extra=b"{}")
    data = np.zeros(math.prod(shape), np.float32)
    checksum = xxhash.xxh3_64_intdigest(data.data)
    return bytes(layout.render(1, [checksum], b"{}")) + data.tobytes()


@pytest.mark.parametrize(
    ("global_shape", "shape", "what"),
    [
        pytest.param((2**60,), (2,), f"2 of {2**60} values", id="more-than-memory"),
        pytest.param((2**70,), (2,), "its shape has more than", id="more-than-numpy"),
        pytest.param((0, 2**70), (0, 0), "its shape has more than", id="none-of-many"),
        pytest.param((1,) * 100, (1,) * 100, "100 dimensions; at most 64", id="dimensions"),
    ],
)
def test_an_impossible_shape_is_damage_to_verify_and_export(
    tmp_path: Path, global_shape: tuple[int, ...], shape: tuple[int, ...], what: str
) -> None:
    manifest = write(tmp_path, {0: _one_tensor(global_shape, shape)})
    (problem,) = inspect.verify(str(tmp_path), manifest).problems
    assert what in problem and "a" in problem
    with pytest.raises(DamagedCheckpoint, match=f"a: damaged checkpoint: {what}"):
        inspect.export(str(tmp_path), manifest, tmp_path / "out")


def test_boxes_that_cut_a_tensor_too_often_are_damage_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coverage, "MAX_CELLS", 1)
    manifest = write(tmp_path, staged(1, 3))
    problems = inspect.verify(str(tmp_path), manifest).problems
    assert any("model.first.weight: its boxes cut it" in one for one in problems)


@pytest.mark.parametrize(
    "held",
    [
        ["tensor", "F32", [2], "", ""],
        ["tensor", "X", [1], "", ""],
        ["tensor", "F32", ["1"], "", ""],
    ],
)
def test_a_modules_tensor_that_cannot_be_read_is_damage(tmp_path: Path, held: list[object]) -> None:
    extra = encode_extra({MODULES: {"first._extra_state": [{"__blob__": held}, "AAAAAA=="]}})
    layout = make_layout([], generation=1, shard=0, num_shards=1, extra=extra)
    manifest = write(tmp_path, {0: bytes(layout.render(1, [], extra))})
    with pytest.raises(DamagedCheckpoint, match="damaged checkpoint: its value cannot"):
        inspect.export(str(tmp_path), manifest, tmp_path / "out")


def test_a_broken_manifest_is_reported(tmp_path: Path) -> None:
    manifest = write(tmp_path, staged(1, 1))
    (tmp_path / manifest.directory / "manifest.json").write_text('{"format": 3}')
    with pytest.raises(DamagedCheckpoint, match="not a manifest"):
        CheckpointFiles(str(tmp_path)).manifest(manifest.directory)
    with pytest.raises(UserError, match=r"expected one \(steps: none\)"):
        inspect.find(str(tmp_path))


def test_object_stores_are_read_like_local_directories(tmp_path: Path) -> None:
    import fsspec

    manifest = write(tmp_path, staged(1, 2))
    remote = fsspec.filesystem("memory")
    remote.put(str(tmp_path), "/bucket-of-test", recursive=True)
    try:
        path = "memory://bucket-of-test"
        assert inspect.verify(path, inspect.find(path)).ok
        source = CheckpointFiles(path).open(manifest.directory, manifest.files[1])
        local = CheckpointFiles(str(tmp_path)).open(manifest.directory, manifest.files[1])
        entry = source.header().entries["model.first.weight"]
        assert np.array_equal(
            source.data(entry.begin, entry.end), local.data(entry.begin, entry.end)
        )
    finally:
        remote.rm("/bucket-of-test", recursive=True)


# -- export -----------------------------------------------------------------------------------
def test_export_writes_whole_tensors_under_their_own_names(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    manifest = write(tmp_path / "in", staged(1, 3))
    whole = write(tmp_path / "one", staged(1, 1))
    files = inspect.export(str(tmp_path / "in"), manifest, tmp_path / "out")
    expected = inspect.export(str(tmp_path / "one"), whole, tmp_path / "expected")
    assert [file.name for file in files] == ["model.safetensors"]
    got, want = load_file(files[0]), load_file(expected[0])
    assert sorted(got) == [
        "first.bias", "first.weight", "second.weight", "seen", "third.bias", "third.weight",
    ]  # fmt: skip
    assert all(np.array_equal(got[name], want[name]) for name in want)


def test_export_splits_large_models_and_writes_the_index(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    manifest = write(tmp_path / "in", staged(1, 2))
    files = inspect.export(
        str(tmp_path / "in"), manifest, tmp_path / "out", optimizer=True, max_file_bytes=300
    )
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(files) > 1
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "out" / file)
    assert {"first.weight", "optim.first.weight.exp_avg_sq"} <= index["weight_map"].keys()


def test_export_of_a_damaged_checkpoint_leaves_no_file(tmp_path: Path) -> None:
    manifest = write(tmp_path / "in", staged(1, 2))
    directory = tmp_path / "in" / manifest.directory
    header = parse_header((directory / shard_file_name(0, 2)).read_bytes(), "file")
    entry = header.entries["model.second.weight"]
    flip_bit(directory / shard_file_name(0, 2), header.data_start + entry.begin)
    with pytest.raises(DamagedCheckpoint, match=r"second\.weight"):
        inspect.export(str(tmp_path / "in"), manifest, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


# -- the command ------------------------------------------------------------------------------
def test_the_command_prints_json_and_imports_no_torch(tmp_path: Path) -> None:
    write(tmp_path, staged(1, 2))
    code = (
        "import sys; from holdfast.workers.checkpoint.__main__ import main; "
        f"code = main(['verify', {str(tmp_path)!r}]); assert 'torch' not in sys.modules; "
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ok"] is True


def test_the_command_exits_with_1_for_damage_and_2_for_a_user_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["verify", str(tmp_path / "nowhere")]) == 2
    assert "expected one" in json.loads(capsys.readouterr().out)["error"]
    manifest = write(tmp_path, staged(1, 1))
    flip_bit(tmp_path / manifest.directory / shard_file_name(0, 1), -1)
    assert command.main(["verify", str(tmp_path)]) == 1
    assert command.main(["export", str(tmp_path), "--to", str(tmp_path / "out")]) == 0
