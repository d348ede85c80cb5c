"""Corpora, packed samples, and the order in which an epoch has each of them once."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from holdfast.orchestrator.api.v1alpha1 import Pretrain
from holdfast.orchestrator.errors import UserError
from holdfast.workers.session.order import permuted, share
from holdfast.workers.training.corpus import END_OF_DOCUMENT, MAX_STDLIB_BYTES, Corpus
from holdfast.workers.training.data import Dataset, MicroBatch, divide_batches
from tests.unit.workers.checkpoint.fake_ranks import as_rank

FIELD = "spec.entrypoint.recipe.config.data"


def config(data: dict[str, Any] | None = None, **more: Any) -> Pretrain:
    model = {"vocabSize": more.pop("vocab", 256)}
    return Pretrain.model_validate({"data": data or {}, "model": model, **more})


def token_file(path: Path, tokens: list[int], dtype: str = "<u2") -> None:
    path.write_bytes(np.array(tokens, dtype=dtype).tobytes())


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 65, 1000])
def test_a_permutation_has_every_place_once_and_differs_by_key(size: int) -> None:
    positions = np.arange(size, dtype=np.uint64)
    orders = [permuted(positions, size, key).tolist() for key in (1, 2)]
    for order in orders:
        assert sorted(order) == list(range(size))
    assert size < 60 or orders[0] != orders[1]


def test_neighbours_of_an_epoch_are_far_apart() -> None:
    size = 10_000
    order = permuted(np.arange(size, dtype=np.uint64), size, 7).astype(np.int64)
    # Of a random order a third of the size; of one by rows and columns far from it.
    assert abs(float(np.abs(np.diff(order)).mean()) / size - 1 / 3) < 0.02
    assert abs(float(np.corrcoef(order, np.arange(size))[0, 1])) < 0.05


def test_each_sample_is_trained_on_once_an_epoch_over_kills_and_resizes() -> None:
    """A ledger of what each step that counts has read. A kill repeats steps at another size."""
    chance = random.Random(3)
    settings = config({"sequenceLength": 16}, globalBatch=52, seed=5)
    samples = Dataset(settings, ".")
    size = 1009  # a prime, so that batches cross the ends of epochs
    samples.train._count = size
    ledger: dict[int, list[int]] = {}
    step, num_epochs = 0, 3
    while len(ledger) * settings.global_batch < num_epochs * size:
        num_ranks = chance.choice([1, 2, 3, 4, 7, 8, 64])
        for _ in range(chance.randrange(1, 9)):
            seen = []
            for rank in range(num_ranks):
                part = share(step, settings.global_batch, rank, num_ranks)
                ids = samples.ids(part.indices)
                seen += [one for one, weight in zip(ids, part.weights, strict=True) if weight]
            assert ledger.get(step, seen) == seen, "a repeated step has other samples"
            ledger[step] = seen
            step += 1
        step = max(0, step - chance.randrange(4))  # killed: at most three steps are lost
    everything = [one for at in sorted(ledger) for one in ledger[at]]
    epochs = [everything[n * size : (n + 1) * size] for n in range(num_epochs)]
    for epoch in epochs:
        assert Counter(epoch) == Counter(range(size))
    assert epochs[0] != epochs[1] != epochs[2]


def test_an_epoch_has_every_token_of_its_documents_once_as_a_target(tmp_path: Path) -> None:
    token_file(tmp_path / "a.bin", list(range(100, 141)))
    token_file(tmp_path / "b.bin", list(range(200, 240)))
    (tmp_path / "b.idx").write_bytes(b"the index of another tool")
    where = {"source": ".", "format": "uint16", "sequenceLength": 8, "validation": {"share": 0}}
    samples = Dataset(config(where), str(tmp_path))
    assert len(samples.train) == 10
    inputs, targets = samples.batch(tuple(range(10)))
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    predicted = [*range(101, 141), *range(200, 240)]
    assert sorted(targets.flatten().tolist()) == sorted(predicted)
    assert samples.epoch(9) == 0 and samples.epoch(10) == 1


def test_documents_of_text_end_with_a_byte_that_no_utf8_has(tmp_path: Path) -> None:
    for name, text in {"b.txt": "wörld", "a.txt": "hello", "empty": ""}.items():
        (tmp_path / name).write_text(text)
    corpus = Corpus(".", str(tmp_path))
    end = bytes([END_OF_DOCUMENT])
    whole = b"hello" + end + "wörld".encode() + end
    assert bytes(corpus.read(0, len(corpus)).tolist()) == whole
    for first in range(len(whole)):
        for count in range(len(whole) - first + 1):
            read = bytes(corpus.read(first, count).tolist())
            assert read == whole[first : first + count]


def test_the_standard_library_has_enough_text() -> None:
    corpus = Corpus("stdlib", ".")
    assert 1_000_000 < len(corpus) <= MAX_STDLIB_BYTES
    assert b"import" in bytes(corpus.read(0, 100_000).tolist())


def test_the_order_depends_on_seed_and_epoch_only() -> None:
    length = {"sequenceLength": 32}
    samples, again = Dataset(config(length), "."), Dataset(config(length), ".")
    assert samples.ids((4, 5)) == again.ids((4, 5)) == [samples.ids((n,))[0] for n in (4, 5)]
    other = Dataset(config(length, seed=4), ".")
    assert samples.ids(tuple(range(20))) != other.ids(tuple(range(20)))


def test_validation_samples_are_the_last_ones_and_the_same_for_every_seed() -> None:
    data = {"sequenceLength": 32, "validation": {"share": 0.1, "samples": 5}}
    samples, other = (Dataset(config(data, seed=seed), ".") for seed in (0, 1))
    whole = Dataset(config({"sequenceLength": 32, "validation": {"share": 0}}), ".")
    assert len(samples.train) + len(samples.validation) == len(whole.train)
    first, _ = samples.validation.read([0])
    assert torch.equal(first, whole.train.read([len(samples.train)])[0])
    picked = [d.validation_batch(tuple(range(5)))[0] for d in (samples, other)]
    assert torch.equal(*picked)
    assert samples.num_evaluated == 5 and Dataset(config(), ".").num_evaluated == 64


def test_validation_data_may_have_a_source_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "train").write_text("a" * 100)
    (tmp_path / "valid").write_text("b" * 50)
    data = {"source": "train", "sequenceLength": 10, "validation": {"source": "valid"}}
    samples = Dataset(config(data, evaluateEverySteps=1), str(tmp_path))
    assert (len(samples.train), len(samples.validation), samples.num_evaluated) == (10, 5, 5)
    assert set(samples.validation_batch((0, 4))[0].flatten().tolist()) == {ord("b")}


@pytest.mark.parametrize(
    ("data", "fragment"),
    [
        ({"source": "gone"}, "data.source: got 'gone', which cannot be read"),
        ({"source": "short"}, "data.source: got 11 tokens in short; expected at least 65: 2 samp"),
        (
            {"source": "odd", "format": "uint16"},
            r"data.source: got 11 bytes in .*/odd; expected a multiple of 2, as data.format is ui",
        ),
        (
            {"source": "folder", "format": "uint16"},
            "data.source: got the directory folder without a .bin file",
        ),
        (
            {"source": "long", "validation": {"source": "gone"}},
            "data.validation.source: got 'gone', which cannot be read",
        ),
        (
            {"source": "long", "validation": {"share": 0.1, "samples": 500}},
            "data.validation.samples: got 500; expected at most 3, the samples of the validation",
        ),
    ],
)
def test_data_that_do_not_fit_are_refused_by_name(
    data: dict[str, Any], fragment: str, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "short").write_text("x" * 10)
    (tmp_path / "odd").write_text("x" * 11)
    (tmp_path / "long").write_text("x" * 1000)
    settings = config({"sequenceLength": 32, **data}, evaluateEverySteps=1)
    with pytest.raises(UserError, match=fragment):
        Dataset(settings, str(tmp_path))


def test_a_token_outside_the_vocabulary_is_named_with_its_place(tmp_path: Path) -> None:
    token_file(tmp_path / "a.bin", [1] * 100)
    token_file(tmp_path / "b.bin", [2] * 70 + [50_256] + [2] * 29, "<u2")
    corpus = Corpus(".", str(tmp_path), "uint16", 50_000)
    with pytest.raises(UserError, match=r"token 50256 at position 70 of .*/b.bin; expected tokens"):
        corpus.read(160, 20)
    assert Corpus(".", str(tmp_path), "uint16", 50_257).read(170, 1).tolist() == [50_256]
    token_file(tmp_path / "wide", [100_000] * 9, "<u4")
    assert Corpus("wide", str(tmp_path), "uint32", 100_001).read(8, 1).tolist() == [100_000]


def test_a_file_that_became_shorter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x" * 100)
    corpus = Corpus("a", str(tmp_path))
    (tmp_path / "a").write_text("x" * 50)
    with pytest.raises(UserError, match=r"got 50 tokens in .*/a; expected more, as when"):
        corpus.read(40, 20)


def test_the_data_of_a_huge_corpus_cost_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 T tokens: only the permuted positions of a batch are computed."""
    samples = Dataset(config(), ".")
    samples.train._count = 10**13 // 4096
    ids = samples.ids(tuple(range(10**12, 10**12 + 4096)))
    assert len(set(ids)) == 4096 and max(ids) > len(samples.train) // 2
    assert permuted(np.array([], dtype=np.uint64), 5, 0).tolist() == []


def test_a_path_begins_at_the_given_directory_or_at_the_users_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "text").write_text("some text")
    assert bytes(Corpus("~/text", "/nowhere").read(0, 9).tolist()) == b"some text"
    with pytest.raises(UserError, match=r"/nowhere/text: No such file"):
        Corpus("text", "/nowhere")
    with pytest.raises(UserError, match=r"got '~no-such-user/x', .*no home is known here"):
        Corpus("~no-such-user/x", "/")


# -- a context axis --
INPUTS_BT = torch.arange(16).view(2, 8)


@pytest.mark.parametrize(("rank", "positions"), [(0, [0, 1, 6, 7]), (1, [2, 3, 4, 5])])
def test_a_rank_has_one_early_and_one_late_piece_of_each_sequence(
    rank: int, positions: list[int]
) -> None:
    batch = MicroBatch(INPUTS_BT, INPUTS_BT + 1, torch.ones(2))
    with as_rank(rank, 2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("context",))
        with divide_batches(mesh, [batch]) as (part,):
            assert part.positions_t is not None and part.positions_t.tolist() == positions
            assert torch.equal(part.inputs_bt, INPUTS_BT[:, positions])
            assert torch.equal(part.targets_bt, INPUTS_BT[:, positions] + 1)
    assert torch.equal(batch.inputs_bt, torch.arange(16).view(2, 8)), "the whole has changed"


def test_without_a_context_axis_a_batch_is_whole() -> None:
    batch = MicroBatch(INPUTS_BT, INPUTS_BT, torch.ones(2))
    with divide_batches(None, [batch]) as (part,):
        assert part is batch
